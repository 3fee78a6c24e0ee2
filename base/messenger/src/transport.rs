//! Byte transports behind one interface, and the syntax of their addresses.
//!
//! A transport is a file that implements [`Transport`], and its entry in the list below.

#[macro_use]
mod registry;
mod rdma;
mod shm;
mod tcp;
mod unix;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use forebay_reactor::net::AddrError;
use forebay_reactor::rdma::RdmaStream;
use forebay_reactor::{Addr, BufList, BufMut};

transports! {
    /// TCP transport.
    Tcp(SocketAddr) = tcp::Tcp;
    /// RDMA, set up by rdma_cm; falls back to TCP at the same address where there is none.
    Rdma(SocketAddr) = rdma::Rdma;
    /// Unix stream socket.
    Unix(PathBuf) = unix::Unix;
    /// Shared memory; the path is that of the Unix socket.
    Shm(PathBuf) = shm::Shm;
}

/// Transport whose connections are ordered byte streams.
pub(crate) trait Transport {
    /// Scheme of its addresses, before the first colon; the transport's name too.
    const SCHEME: &'static str;
    /// True if bytes cannot be corrupted in transit, so that checksums are redundant.
    const IS_SOUND: bool = false;

    /// Address without the scheme.
    type Endpoint;
    /// Listening endpoint.
    type Acceptor;
    /// Incoming connection, for which nothing but a socket has been allocated; rejected when it is dropped.
    type Pending;
    /// Established connection.  Clones share it.
    type Stream: Clone;

    /// Parses an address without its scheme.
    fn parse(text: &str) -> Result<Address, AddrError>;

    /// Returns the text of an address without its scheme.
    fn display(endpoint: &Self::Endpoint) -> impl fmt::Display;

    /// Returns the IP address and port, for a transport that reaches other machines.
    fn socket(_endpoint: &Self::Endpoint) -> Option<SocketAddr> {
        None
    }

    /// Returns the Unix socket address that it is, or is set up over.
    fn unix(_endpoint: &Self::Endpoint) -> Option<Addr> {
        None
    }

    /// Listens, and returns the address as bound.  A transport with a fallback returns the fallback's listener too.
    fn bind(endpoint: &Self::Endpoint, options: TransportOptions) -> io::Result<(Vec<Acceptor>, Address)>;

    /// Returns the next incoming connection and its peer address.
    async fn accept(acceptor: &Self::Acceptor) -> io::Result<(Self::Pending, Address)>;

    /// Allocates the resources of an incoming connection.
    fn admit(pending: Self::Pending) -> io::Result<Self::Stream>;

    /// Connects to a listener; the stream is another transport's if this one falls back to it.
    async fn connect(endpoint: &Self::Endpoint, options: TransportOptions) -> io::Result<Channel>;

    /// Receives the available bytes into the buffer's spare capacity.  Returns 0 at the end of the stream.
    fn recv(stream: &Self::Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)>;

    /// Receives until the buffer is full.
    fn recv_exact(stream: &Self::Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)>;

    /// Sends all bytes.
    fn send(stream: &Self::Stream, bufs: BufList) -> impl Future<Output = io::Result<()>>;

    /// Shuts down both directions.
    fn shutdown(stream: &Self::Stream);

    /// Returns the RDMA stream, if its device can write into the peer's memory.
    fn rdma(_stream: &Self::Stream) -> Option<RdmaStream> {
        None
    }
}

/// Transport options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransportOptions {
    /// Busy-poll time of a shared memory or RDMA side after its last work, before it sleeps.
    pub(crate) busy_poll: Duration,
    /// Local address of the RDMA device to use; `None` selects by route.
    pub(crate) rdma_local: Option<IpAddr>,
}

/// Returns the error of a loopback address at which no messenger of this process listens.
pub(crate) fn no_local_endpoint(name: &str) -> io::Error {
    let text = format!("no messenger of this core listens at loopback:{name}");
    io::Error::new(io::ErrorKind::ConnectionRefused, text)
}

impl Address {
    /// Returns true if the address reaches only this machine.
    pub fn is_local(&self) -> bool {
        self.socket().is_none_or(|addr| addr.ip().is_loopback())
    }
}

impl From<Addr> for Address {
    fn from(addr: Addr) -> Self {
        match addr {
            Addr::Tcp(addr) => Self::Tcp(addr),
            Addr::Unix(path) => Self::Unix(path),
        }
    }
}

impl FromStr for Address {
    type Err = AddrError;
    fn from_str(text: &str) -> Result<Self, AddrError> {
        if let Some(name) = text.strip_prefix("loopback:") {
            return Ok(Self::Loopback(name.to_owned()));
        }
        // Without a scheme it is TCP.
        Self::with_scheme(text).unwrap_or_else(|| tcp::Tcp::parse(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_their_transport() {
        for (text, written) in [
            ("127.0.0.1:3300", "tcp:127.0.0.1:3300"),
            ("tcp:[::1]:1", "tcp:[::1]:1"),
            ("unix:/run/a", "unix:/run/a"),
            ("shm:/run/a", "shm:/run/a"),
            ("loopback:log", "loopback:log"),
        ] {
            let address: Address = text.parse().expect("an address");
            assert_eq!(address.to_string(), written);
            assert_eq!(written.parse(), Ok(address.clone()));
            assert!(address.is_local());
        }
        assert_eq!("rdma:10.0.0.1:7000".parse::<Address>().expect("an address").to_string(), "rdma:10.0.0.1:7000");
        assert!("rdma:".parse::<Address>().is_err() && "rdma:unix:/x".parse::<Address>().is_err());
        assert!("tcp:".parse::<Address>().is_err() && "unix:".parse::<Address>().is_err());
        assert!(!"10.0.0.1:1".parse::<Address>().expect("an address").is_local());
    }
}
