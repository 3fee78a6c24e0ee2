//! DNS SRV lookup (RFC 2782): the standard library resolves addresses only.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

/// Timeout for one name server.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of queries to each name server.
const TRIES: u32 = 2;
/// Maximum length of an accepted UDP response, in bytes.
const ANSWER_MAX: usize = 4096;
/// DNS port.
const PORT: u16 = 53;
const TYPE_SRV: u16 = 33;
const TYPE_OPT: u16 = 41;
const CLASS_INTERNET: u16 = 1;
/// Maximum number of labels of a name, and of pointers followed in it.
const LABELS_MAX: usize = 128;

/// Settings from `resolv.conf`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Resolver {
    servers: Vec<IpAddr>,
    /// Search domains for incomplete names.
    search: Vec<String>,
}

impl Resolver {
    fn parse(text: &str) -> Self {
        let mut resolver = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    // A zone id after the address marks a link-local one.
                    let word = words.next().unwrap_or_default().split('%').next().unwrap_or_default();
                    resolver.servers.extend(word.parse::<IpAddr>());
                }
                Some("search" | "domain") => resolver.search = words.map(str::to_owned).collect(),
                _ => {}
            }
        }
        resolver
    }
}

/// Returns names and ports of the service `_NAME._tcp` in a domain, or in the search domains of this machine, the
/// most preferred first.
///
/// # Errors
/// `NotFound` if no domain has it; otherwise the error of the last name server.
pub fn service(name: &str, domain: Option<&str>) -> io::Result<Vec<(String, u16)>> {
    let resolver = Resolver::parse(&std::fs::read_to_string("/etc/resolv.conf")?);
    let servers: Vec<SocketAddr> = resolver.servers.iter().map(|&server| (server, PORT).into()).collect();
    match domain {
        Some(domain) => ask_all(&servers, &[domain.to_owned()], name, rand_id()?),
        None => ask_all(&servers, &resolver.search, name, rand_id()?),
    }
}

/// Returns a random query id, so that an off-path attacker cannot forge a response.
fn rand_id() -> io::Result<u16> {
    let mut id = [0; 2];
    aws_lc_rs::rand::fill(&mut id).map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(u16::from_le_bytes(id))
}

fn ask_all(servers: &[SocketAddr], search: &[String], name: &str, id: u16) -> io::Result<Vec<(String, u16)>> {
    let bare = format!("_{name}._tcp");
    let domains = search.iter().map(|domain| format!("{bare}.{}", domain.trim_end_matches('.')));
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("no domain has the service {bare}"));
    for domain in domains.chain([bare.clone()]) {
        for _ in 0..TRIES {
            for server in servers {
                match ask(*server, &domain, id) {
                    Ok(found) if found.is_empty() => {}
                    Ok(found) => return Ok(found),
                    Err(error) => last = error,
                }
            }
            if last.kind() == io::ErrorKind::NotFound {
                break;
            }
        }
    }
    Err(last)
}

fn ask(server: SocketAddr, name: &str, id: u16) -> io::Result<Vec<(String, u16)>> {
    let own: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(own)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(server)?;
    socket.send(&question(name, id)?)?;
    let mut answer = [0; ANSWER_MAX];
    loop {
        let len = socket.recv(&mut answer)?;
        // A response to another query is ignored.
        if answer.get(..2) == Some(&id.to_be_bytes()[..]) {
            let strange = || io::Error::new(io::ErrorKind::InvalidData, format!("{server} answers nonsense"));
            return parse(&answer[..len]).ok_or_else(strange)?;
        }
    }
}

fn question(name: &str, id: u16) -> io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(64);
    // Recursion desired; one question, and one additional record with the maximum length of the response.
    for word in [id, 0x0100, 1, 0, 0, 1] {
        out.extend(word.to_be_bytes());
    }
    for label in name.split('.') {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..64).contains(len));
        let wrong = || io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is no name of the name service"));
        out.push(len.ok_or_else(wrong)?);
        out.extend(label.as_bytes());
    }
    out.push(0);
    for word in [TYPE_SRV, CLASS_INTERNET] {
        out.extend(word.to_be_bytes());
    }
    out.push(0);
    for word in [TYPE_OPT, ANSWER_MAX as u16, 0, 0, 0] {
        out.extend(word.to_be_bytes());
    }
    Ok(out)
}

/// Parses the services in a response, ordered by priority, then by weight; returns `None` for a malformed response,
/// an error if the server reports that there is none.
fn parse(answer: &[u8]) -> Option<io::Result<Vec<(String, u16)>>> {
    let word = |at: usize| Some(u16::from_be_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let (flags, questions, answers) = (word(2)?, word(4)?, word(6)?);
    if flags & 0x8000 == 0 {
        return None;
    }
    match flags & 0xF {
        0 => {}
        3 => return Some(Err(io::Error::new(io::ErrorKind::NotFound, "the name service knows no such service"))),
        code => return Some(Err(io::Error::other(format!("the name service answers with error {code}")))),
    }
    let mut at = 12;
    for _ in 0..questions {
        at = name(answer, at)?.1 + 4;
    }
    let mut found = Vec::new();
    for _ in 0..answers {
        at = name(answer, at)?.1;
        let (kind, len) = (word(at)?, usize::from(word(at + 8)?));
        at += 10;
        answer.get(at..at + len)?;
        if kind == TYPE_SRV {
            let (priority, weight, port) = (word(at)?, word(at + 2)?, word(at + 4)?);
            found.push((priority, std::cmp::Reverse(weight), name(answer, at + 6)?.0, port));
        }
        at += len;
    }
    found.sort();
    // The root as a target means that the service is decidedly not available (RFC 2782).
    let offered = found.into_iter().filter(|(.., target, _)| !target.is_empty());
    Some(Ok(offered.map(|(.., target, port)| (target, port)).collect()))
}

/// Parses a name; returns it and the offset after it.
fn name(answer: &[u8], mut at: usize) -> Option<(String, usize)> {
    let (mut text, mut end) = (String::new(), None);
    for _ in 0..LABELS_MAX {
        let len = *answer.get(at)?;
        match len {
            0 => return Some((text, end.unwrap_or(at + 1))),
            0xC0.. => {
                end = end.or(Some(at + 2));
                at = usize::from(len & 0x3F) << 8 | usize::from(*answer.get(at + 1)?);
            }
            1..64 => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(std::str::from_utf8(answer.get(at + 1..at + 1 + usize::from(len))?).ok()?);
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
        let server = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let addr = server.local_addr().expect("an address");
        let serving = std::thread::spawn(move || {
            let mut buf = [0; 512];
            let mut asked = Vec::new();
            for records in [
                vec![],
                vec![
                    record(20, 1, 3301, b"\x01c\x07example\0"),
                    record(10, 1, 3300, b"\x01a\x07example\0"),
                    record(10, 9, 6789, b"\x01b\xC0\x1B"),
                ],
            ] {
                let (len, from) = server.recv_from(&mut buf).expect("a question");
                asked.push(name(&buf[..len], 12).expect("a name").0);
                server.send_to(&answer(&buf[..len], &records), from).expect("sent");
            }
            asked
        });
        let found = ask_all(&[addr], &["nowhere.test".into()], "ceph-mon", 7).expect("found");
        assert_eq!(serving.join().expect("served"), ["_ceph-mon._tcp.nowhere.test", "_ceph-mon._tcp"]);
        let names: Vec<(&str, u16)> = found.iter().map(|(name, port)| (name.as_str(), *port)).collect();
        assert_eq!(names.len(), 3);
        assert_eq!((names[0].1, names[1], names[2]), (6789, ("a.example", 3300), ("c.example", 3301)));
    }

    #[test]
    fn nonsense_is_refused_and_absence_is_told() {
        let question = question("_ceph-mon._tcp", 1).expect("a question");
        assert!(parse(&question).is_none(), "a question is no answer");
        let mut absent = answer(&question, &[]);
        absent[3] = 3;
        let kind = parse(&absent).expect("an answer").map_err(|error| error.kind());
        assert_eq!(kind, Err(io::ErrorKind::NotFound));
        let whole = answer(&question, &[record(1, 1, 1, b"\x01a\0")]);
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).is_none(), "cut at {len}");
        }
        let mut circle = whole.clone();
        circle[12..14].copy_from_slice(&[0xC0, 12]);
        assert!(parse(&circle).is_none(), "a name that points at itself");
        assert!(super::question("a..b", 1).is_err());
    }

    #[test]
    fn servers_and_domains_are_read() {
        let text = "# resolv\nnameserver 10.0.0.1\nnameserver fe80::1%eth0\nsearch a.test b.test\noptions ndots:2\n";
        let resolver = Resolver::parse(text);
        assert_eq!(resolver.servers.len(), 2);
        assert_eq!(resolver.search, ["a.test", "b.test"]);
    }
}
