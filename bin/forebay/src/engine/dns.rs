//! DNS SRV lookup over UDP: the standard library resolves addresses only.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use forebay_rados::config::dns::{DnsError, RESPONSE_LEN_MAX, ResolvConf, SrvQuery, SrvTarget, find_service};

/// Timeout for one name server.
const PATIENCE: Duration = Duration::from_secs(2);
/// DNS port.
const PORT: u16 = 53;

/// Returns names and ports of the service `_NAME._tcp` in a domain, or in the search domains of this machine, the
/// most preferred first.
///
/// # Errors
/// `NotFound` if no domain has it; otherwise the error of the last name server.
pub fn service(name: &str, domain: Option<&str>) -> io::Result<Vec<SrvTarget>> {
    let ResolvConf { servers, search } = ResolvConf::parse(&std::fs::read_to_string("/etc/resolv.conf")?);
    let servers: Vec<SocketAddr> = servers.iter().map(|&server| (server, PORT).into()).collect();
    let domains = domain.map_or(search, |domain| vec![domain.to_owned()]);
    let id = random_id()?;
    let is_absent = |error: &LookupError| error.0.kind() == io::ErrorKind::NotFound;
    let found = find_service(name, &domains, &servers, is_absent, |server, name| query(*server, name, id));
    found.map_err(|LookupError(error)| error)
}

/// Error of a lookup as an I/O error.
struct LookupError(io::Error);

impl From<io::Error> for LookupError {
    fn from(error: io::Error) -> Self {
        Self(error)
    }
}

impl From<DnsError> for LookupError {
    fn from(error: DnsError) -> Self {
        let kind = match error {
            DnsError::InvalidName(_) => io::ErrorKind::InvalidInput,
            DnsError::NotFound(_) => io::ErrorKind::NotFound,
            DnsError::ServerError(_) => io::ErrorKind::Other,
            DnsError::Malformed => io::ErrorKind::InvalidData,
        };
        Self(io::Error::new(kind, error))
    }
}

/// Returns a random query id, so that an off-path attacker cannot forge a response.
fn random_id() -> io::Result<u16> {
    let mut id = [0; 2];
    aws_lc_rs::rand::fill(&mut id).map_err(|_| io::Error::other("the system's random number generator fails"))?;
    Ok(u16::from_le_bytes(id))
}

/// Sends one query to one name server, and waits for its response.
fn query(server: SocketAddr, name: &str, id: u16) -> Result<Vec<SrvTarget>, LookupError> {
    let own: SocketAddr = if server.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(own)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(server)?;
    let query = SrvQuery::new(id, name);
    socket.send(&query.encode()?)?;
    let mut response = [0; RESPONSE_LEN_MAX];
    loop {
        let len = socket.recv(&mut response)?;
        // A response to another query is ignored.
        if query.matches(&response[..len]) {
            return query.decode(&response[..len]).map_err(|error| {
                let LookupError(error) = error.into();
                LookupError(io::Error::new(error.kind(), format!("name server {server}: {error}")))
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_server_is_asked_over_udp() {
        let server = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let addr = server.local_addr().expect("an address");
        let serving = std::thread::spawn(move || {
            let mut buf = [0; 512];
            let (len, from) = server.recv_from(&mut buf).expect("a question");
            // Turns the question, without its additional record, into a response with one SRV record.
            let mut response = buf[..len - 11].to_vec();
            (response[2], response[7], response[11]) = (0x81, 1, 0);
            response.extend([0xC0, 12, 0, 33, 0, 1, 0, 0, 0, 60, 0, 9, 0, 10, 0, 1, 12, 228]);
            response.extend(b"\x01a\0");
            let mut other = response.clone();
            other[0] ^= 1;
            server.send_to(&other, from).expect("sent");
            server.send_to(&response, from).expect("sent");
        });
        let found = query(addr, "_ceph-mon._tcp", 7).map_err(|LookupError(error)| error);
        serving.join().expect("served");
        assert_eq!(found.expect("found"), [("a".to_owned(), 3300)]);
    }

    #[test]
    fn absence_is_told_from_failure() {
        let kind = |error: DnsError| LookupError::from(error).0.kind();
        assert_eq!(kind(DnsError::NotFound("a".into())), io::ErrorKind::NotFound);
        assert_ne!(kind(DnsError::ServerError(2)), io::ErrorKind::NotFound);
    }
}
