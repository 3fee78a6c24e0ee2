//! Parser for the notations of `mon host`.

/// Default port of msgr2.
pub(super) const PORT_V2: u16 = 3300;
/// Default port of msgr1.
pub(super) const PORT_V1: u16 = 6789;

/// Address of a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorAddr {
    /// IP address or host name.
    pub host: String,
    /// Port number.
    pub port: u16,
}

/// Parses a list of monitors: `HOST`, `HOST:PORT`, `v2:HOST:PORT/NONCE`, and groups `[v2:HOST:PORT,v1:HOST:PORT]`,
/// separated by commas, semicolons or spaces.  Omits addresses of msgr1.
pub fn parse_monitors(text: &str) -> Result<Vec<MonitorAddr>, String> {
    let mut places = Vec::new();
    let mut word = String::new();
    let mut brackets = 0;
    for c in text.chars().chain([',']) {
        match c {
            '[' => brackets += 1,
            ']' => brackets -= 1,
            _ => {}
        }
        if !(0..=2).contains(&brackets) {
            return Err(format!("the brackets in '{text}' do not fit"));
        }
        if brackets == 0 && matches!(c, ',' | ';' | ' ' | '\t') {
            let one = std::mem::take(&mut word);
            if !one.is_empty() {
                group(&one, &mut places)?;
            }
        } else {
            word.push(c);
        }
    }
    if brackets != 0 {
        return Err(format!("the brackets in '{text}' do not fit"));
    }
    Ok(places)
}

/// Parses one monitor: an address, or several in brackets.
fn group(text: &str, places: &mut Vec<MonitorAddr>) -> Result<(), String> {
    if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'))
        && (inner.starts_with("v1:") || inner.starts_with("v2:"))
    {
        for one in inner.split([',', ' ']).filter(|one| !one.is_empty()) {
            places.extend(address(one)?);
        }
        return Ok(());
    }
    places.extend(address(text)?);
    Ok(())
}

fn address(text: &str) -> Result<Option<MonitorAddr>, String> {
    let (version, rest) = match text.split_at_checked(3) {
        Some(("v1:", rest)) => (1, rest),
        Some(("v2:", rest)) => (2, rest),
        _ => (0, text),
    };
    // The nonce of a monitor's address is not needed.
    let rest = rest.split('/').next().unwrap_or_default();
    let wrong = || format!("'{text}' is no address; write HOST, HOST:PORT or v2:HOST:PORT");
    let (host, port) = if let Some(inner) = rest.strip_prefix('[') {
        let (host, behind) = inner.split_once(']').ok_or_else(wrong)?;
        (host, behind.strip_prefix(':'))
    } else {
        match rest.rsplit_once(':') {
            // Several colons without brackets: an IPv6 address without a port.
            Some((host, _)) if host.contains(':') => (rest, None),
            Some((host, port)) => (host, Some(port)),
            None => (rest, None),
        }
    };
    let port = port.map(|port| port.parse::<u16>().map_err(|_| wrong())).transpose()?.filter(|&port| port != 0);
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(wrong());
    }
    let port = match (version, port) {
        (1, _) | (0, Some(PORT_V1)) => return Ok(None),
        (_, port) => port.unwrap_or(PORT_V2),
    };
    Ok(Some(MonitorAddr { host: host.into(), port }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, u16)>, String> {
        parse_monitors(text).map(|all| all.into_iter().map(|place| (place.host, place.port)).collect())
    }

    #[test]
    fn all_notations() {
        for (text, expected) in [
            ("10.0.0.1", vec![("10.0.0.1", 3300)]),
            ("10.0.0.1,10.0.0.2; a.b:3301", vec![("10.0.0.1", 3300), ("10.0.0.2", 3300), ("a.b", 3301)]),
            ("10.0.0.1:6789 10.0.0.2:3300", vec![("10.0.0.2", 3300)]),
            ("v2:10.0.0.1:3300/0", vec![("10.0.0.1", 3300)]),
            ("[v2:127.0.0.1:3300,v1:127.0.0.1:6789]", vec![("127.0.0.1", 3300)]),
            ("[v2:[::1]:3300/0,v1:[::1]:6789/0],[v1:h:1,v2:h:2]", vec![("::1", 3300), ("h", 2)]),
            ("[fd00::1]:3301, fd00::2, [fd00::3]", vec![("fd00::1", 3301), ("fd00::2", 3300), ("fd00::3", 3300)]),
            ("v1:10.0.0.1", vec![]),
            ("", vec![]),
        ] {
            let expected: Vec<_> = expected.into_iter().map(|(host, port)| (host.to_owned(), port)).collect();
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_none() {
        for text in ["[v2:1.2.3.4", "1.2.3.4]", "h:port", "v2:", ":3300", "h:70000", "[[[x]]]"] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }
}
