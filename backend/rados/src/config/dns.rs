//! DNS SRV lookup (RFC 2782) of monitors: names to query, queries, and responses.

use std::cmp::Reverse;
use std::net::IpAddr;

/// Maximum length of an accepted UDP response, in bytes.
pub const RESPONSE_LEN_MAX: usize = 4096;
/// Number of queries to each name server.
const TRIES: u32 = 2;
const TYPE_SRV: u16 = 33;
const TYPE_OPT: u16 = 41;
const CLASS_INTERNET: u16 = 1;
/// Bit of the flags that marks a response.
const FLAG_RESPONSE: u16 = 0x8000;
/// Bit of the flags that requests recursion.
const FLAG_RECURSION: u16 = 0x0100;
/// Response code for a name that does not exist.
const NXDOMAIN: u16 = 3;
/// Length of a message's header, in bytes.
const HEADER_LEN: usize = 12;
/// Maximum number of labels of a name, and of pointers followed in it.
const LABELS_MAX: usize = 128;

/// Target of an SRV record: host name and port.
pub type SrvTarget = (String, u16);

/// Error of an SRV lookup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DnsError {
    /// Name with a label that is empty or longer than 63 bytes.
    #[error("'{0}' is not a valid DNS name")]
    InvalidName(String),
    /// Name without SRV records.
    #[error("DNS has no service {0}")]
    NotFound(String),
    /// Other error that a name server reports.
    #[error("the name server responds with error code {0}")]
    ServerError(u16),
    /// Response that cannot be decoded.
    #[error("the name server's response is malformed")]
    Malformed,
}

/// Resolver settings from `resolv.conf`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResolvConf {
    /// Name servers, most preferred first.
    pub servers: Vec<IpAddr>,
    /// Search domains for incomplete names.
    pub search: Vec<String>,
}

impl ResolvConf {
    /// Parses the file's text; unknown lines are ignored.
    pub fn parse(text: &str) -> Self {
        let mut settings = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    // A zone id after the address marks a link-local one.
                    let word = words.next().unwrap_or_default().split('%').next().unwrap_or_default();
                    settings.servers.extend(word.parse::<IpAddr>());
                }
                Some("search" | "domain") => settings.search = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
        settings
    }
}

/// Looks up the service `_SERVICE._tcp` in each of the `domains`, then without a domain, with `query` to send one query
/// to one name server.  Returns the targets of the first name that has any, most preferred first.
///
/// # Errors
/// [`DnsError::NotFound`] if no name has any; otherwise the last error of `query`, for which `is_absent` returns
/// whether it reports a name that does not exist.
pub fn find_service<S, E: From<DnsError>>(
    service: &str,
    domains: &[String],
    servers: &[S],
    is_absent: impl Fn(&E) -> bool,
    mut query: impl FnMut(&S, &str) -> Result<Vec<SrvTarget>, E>,
) -> Result<Vec<SrvTarget>, E> {
    let bare = format!("_{service}._tcp");
    let names = domains.iter().map(|domain| format!("{bare}.{}", domain.trim_end_matches('.')));
    let mut last = E::from(DnsError::NotFound(bare.clone()));
    for name in names.chain([bare.clone()]) {
        for _ in 0..TRIES {
            for server in servers {
                match query(server, &name) {
                    Ok(found) if found.is_empty() => {}
                    Ok(found) => return Ok(found),
                    Err(error) => last = error,
                }
            }
            if is_absent(&last) {
                break;
            }
        }
    }
    Err(last)
}

/// Query for the SRV records of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SrvQuery {
    id: u16,
    name: String,
}

impl SrvQuery {
    /// Creates a query.  The id must be unpredictable, so that an off-path attacker cannot forge a response.
    pub fn new(id: u16, name: &str) -> Self {
        Self { id, name: name.to_owned() }
    }

    /// Encodes the query as a UDP message.
    ///
    /// # Errors
    /// [`DnsError::InvalidName`].
    pub fn encode(&self) -> Result<Vec<u8>, DnsError> {
        let mut out = Vec::with_capacity(64);
        // One question, and one additional record with the maximum length of the response.
        for word in [self.id, FLAG_RECURSION, 1, 0, 0, 1] {
            out.extend(word.to_be_bytes());
        }
        for label in self.name.split('.') {
            let len = u8::try_from(label.len()).ok().filter(|len| (1..64).contains(len));
            out.push(len.ok_or_else(|| DnsError::InvalidName(self.name.clone()))?);
            out.extend(label.as_bytes());
        }
        out.push(0);
        for word in [TYPE_SRV, CLASS_INTERNET] {
            out.extend(word.to_be_bytes());
        }
        out.push(0);
        for word in [TYPE_OPT, RESPONSE_LEN_MAX as u16, 0, 0, 0] {
            out.extend(word.to_be_bytes());
        }
        Ok(out)
    }

    /// Returns whether a message has this query's id; others are responses to other queries.
    pub fn matches(&self, message: &[u8]) -> bool {
        message.get(..2) == Some(&self.id.to_be_bytes()[..])
    }

    /// Decodes the targets in a response, ordered by priority, then by weight.
    ///
    /// # Errors
    /// [`DnsError::Malformed`], or the error that the server reports.
    pub fn decode(&self, response: &[u8]) -> Result<Vec<SrvTarget>, DnsError> {
        let (flags, questions, answers) = decode_header(response).ok_or(DnsError::Malformed)?;
        match flags & 0xF {
            0 => decode_targets(response, questions, answers).ok_or(DnsError::Malformed),
            NXDOMAIN => Err(DnsError::NotFound(self.name.clone())),
            code => Err(DnsError::ServerError(code)),
        }
    }
}

fn word(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?))
}

/// Decodes the flags and the numbers of questions and answers in a response's header.
fn decode_header(response: &[u8]) -> Option<(u16, u16, u16)> {
    let (flags, questions, answers) = (word(response, 2)?, word(response, 4)?, word(response, 6)?);
    (flags & FLAG_RESPONSE != 0).then_some((flags, questions, answers))
}

fn decode_targets(response: &[u8], questions: u16, answers: u16) -> Option<Vec<SrvTarget>> {
    let mut at = HEADER_LEN;
    for _ in 0..questions {
        at = decode_name(response, at)?.1 + 4;
    }
    let mut found = Vec::new();
    for _ in 0..answers {
        at = decode_name(response, at)?.1;
        let (kind, len) = (word(response, at)?, usize::from(word(response, at + 8)?));
        at += 10;
        response.get(at..at + len)?;
        if kind == TYPE_SRV {
            let (priority, weight, port) = (word(response, at)?, word(response, at + 2)?, word(response, at + 4)?);
            found.push((priority, Reverse(weight), decode_name(response, at + 6)?.0, port));
        }
        at += len;
    }
    found.sort();
    // The root as a target means that the service is decidedly not available (RFC 2782).
    let offered = found.into_iter().filter(|(.., target, _)| !target.is_empty());
    Some(offered.map(|(.., target, port)| (target, port)).collect())
}

/// Decodes a name; returns it and the offset after it.
fn decode_name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let (mut text, mut end) = (String::new(), None);
    for _ in 0..LABELS_MAX {
        let len = *message.get(at)?;
        match len {
            0 => return Some((text, end.unwrap_or(at + 1))),
            0xC0.. => {
                end = end.or(Some(at + 2));
                at = usize::from(len & 0x3F) << 8 | usize::from(*message.get(at + 1)?);
            }
            1..64 => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(std::str::from_utf8(message.get(at + 1..at + 1 + usize::from(len))?).ok()?);
                at += 1 + usize::from(len);
            }
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds an SRV record whose target is a label before a pointer to the question's name.
    fn record(priority: u16, weight: u16, port: u16, target: &[u8]) -> Vec<u8> {
        let mut out = vec![0xC0, 12];
        for word in [TYPE_SRV, CLASS_INTERNET, 0, 60, 6 + target.len() as u16, priority, weight, port] {
            out.extend(word.to_be_bytes());
        }
        out.extend(target);
        out
    }

    fn answer(question: &[u8], records: &[Vec<u8>]) -> Vec<u8> {
        let mut out = question.to_vec();
        out[2] |= 0x80;
        out[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
        // The additional record of the query is not part of the response.
        out.truncate(out.len() - 11);
        out[10..12].fill(0);
        records.iter().for_each(|record| out.extend(record));
        out
    }

    #[test]
    fn services_are_asked_for_and_ordered() {
        let mut responses = vec![
            vec![
                record(20, 1, 3301, b"\x01c\x07example\0"),
                record(10, 1, 3300, b"\x01a\x07example\0"),
                record(10, 9, 6789, b"\x01b\xC0\x1B"),
            ],
            vec![],
        ];
        let mut asked = Vec::new();
        let is_absent = |error: &DnsError| matches!(error, DnsError::NotFound(_));
        let found = find_service("ceph-mon", &["nowhere.test.".into()], &[()], is_absent, |(), name| {
            let query = SrvQuery::new(7, name);
            let question = query.encode()?;
            asked.push(decode_name(&question, HEADER_LEN).expect("a name").0);
            let response = answer(&question, &responses.pop().expect("a question too many"));
            assert!(query.matches(&response) && !SrvQuery::new(8, name).matches(&response));
            query.decode(&response)
        });
        let found = found.expect("found");
        assert_eq!(asked, ["_ceph-mon._tcp.nowhere.test", "_ceph-mon._tcp"]);
        let names: Vec<(&str, u16)> = found.iter().map(|(name, port)| (name.as_str(), *port)).collect();
        assert_eq!(names.len(), 3);
        assert_eq!((names[0].1, names[1], names[2]), (6789, ("a.example", 3300), ("c.example", 3301)));
    }

    #[test]
    fn a_server_that_fails_is_asked_again_and_one_that_has_nothing_is_not() {
        let is_absent = |error: &DnsError| matches!(error, DnsError::NotFound(_));
        let absent = || DnsError::NotFound("_s._tcp".into());
        for (failure, times) in [(DnsError::ServerError(2), 4), (DnsError::Malformed, 4), (absent(), 2)] {
            let mut asked = 0;
            let found = find_service("s", &["a".into()], &[()], is_absent, |(), _| {
                asked += 1;
                Err(failure.clone())
            });
            assert_eq!((found, asked), (Err(failure), times));
        }
        assert_eq!(find_service("s", &[], &[(); 0], is_absent, |(), _| Ok(Vec::new())), Err(absent()));
    }

    #[test]
    fn malformed_responses_are_refused_and_absence_is_reported() {
        let query = SrvQuery::new(1, "_ceph-mon._tcp");
        let question = query.encode().expect("a question");
        assert_eq!(query.decode(&question), Err(DnsError::Malformed), "a question is no answer");
        let mut absent = answer(&question, &[]);
        absent[3] = 3;
        assert_eq!(query.decode(&absent), Err(DnsError::NotFound("_ceph-mon._tcp".into())));
        let whole = answer(&question, &[record(1, 1, 1, b"\x01a\0")]);
        for len in 0..whole.len() {
            assert_eq!(query.decode(&whole[..len]), Err(DnsError::Malformed), "cut at {len}");
        }
        let mut circle = whole.clone();
        circle[12..14].copy_from_slice(&[0xC0, 12]);
        assert_eq!(query.decode(&circle), Err(DnsError::Malformed), "a name that points at itself");
        assert_eq!(SrvQuery::new(1, "a..b").encode(), Err(DnsError::InvalidName("a..b".into())));
    }

    #[test]
    fn servers_and_domains_are_read() {
        let text = "# resolv\nnameserver 10.0.0.1\nnameserver fe80::1%eth0\nsearch a.test b.test\noptions ndots:2\n";
        let settings = ResolvConf::parse(text);
        assert_eq!(settings.servers.len(), 2);
        assert_eq!(settings.search, ["a.test", "b.test"]);
    }
}
