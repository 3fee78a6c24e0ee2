//! Byte transports behind one small interface, and the syntax of their addresses.

mod shm;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use forebay_reactor::net::AddrError;
use forebay_reactor::rdma::{RdmaAsk, RdmaListener, RdmaStream};
use forebay_reactor::{Addr, BufList, BufMut, Listener, Stream, timeout};

use shm::ShmChannel;

/// Timeout of an RDMA connection attempt, before TCP is tried.
const RDMA_PATIENCE: Duration = Duration::from_secs(5);

/// Address that a messenger listens at or connects to.
///
/// `HOST:PORT` and `tcp:HOST:PORT` are TCP, `rdma:HOST:PORT` RDMA, or TCP where RDMA is unavailable, `unix:PATH` a Unix
/// socket, `shm:PATH` shared memory that is set up over a Unix socket, `loopback:NAME` a messenger of the same process
/// on the same core.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP transport.
    Tcp(SocketAddr),
    /// RDMA, set up by rdma_cm; falls back to TCP at the same address where there is none.
    Rdma(SocketAddr),
    /// Unix stream socket.
    Unix(PathBuf),
    /// Shared memory; the path is that of the Unix socket.
    Shm(PathBuf),
    /// Endpoint of the same process: messages are passed without being serialised.
    Loopback(String),
}

impl Address {
    /// Returns true if the address reaches only this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(addr) | Self::Rdma(addr) => addr.ip().is_loopback(),
            Self::Unix(_) | Self::Shm(_) | Self::Loopback(_) => true,
        }
    }

    /// Returns the socket address, if there is one.
    pub fn socket(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(addr) | Self::Rdma(addr) => Some(*addr),
            Self::Unix(_) | Self::Shm(_) | Self::Loopback(_) => None,
        }
    }

    /// Returns the Unix socket address that it is, or is set up over.
    pub fn unix(&self) -> Option<Addr> {
        match self {
            Self::Unix(path) | Self::Shm(path) => Some(Addr::Unix(path.clone())),
            Self::Tcp(_) | Self::Rdma(_) | Self::Loopback(_) => None,
        }
    }

    fn reactor_addr(&self) -> io::Result<Addr> {
        match self {
            Self::Tcp(addr) | Self::Rdma(addr) => Ok(Addr::Tcp(*addr)),
            Self::Unix(path) | Self::Shm(path) => Ok(Addr::Unix(path.clone())),
            Self::Loopback(name) => {
                let text = format!("nobody is called {name} here");
                Err(io::Error::new(io::ErrorKind::ConnectionRefused, text))
            }
        }
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

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => write!(f, "tcp:{addr}"),
            Self::Rdma(addr) => write!(f, "rdma:{addr}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Shm(path) => write!(f, "shm:{}", path.display()),
            Self::Loopback(name) => write!(f, "loopback:{name}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddrError;
    fn from_str(text: &str) -> Result<Self, AddrError> {
        if let Some(name) = text.strip_prefix("loopback:") {
            return Ok(Self::Loopback(name.to_owned()));
        }
        if let Some(path) = text.strip_prefix("shm:") {
            // The rules for the path are those of any Unix socket's.
            return match format!("unix:{path}").parse()? {
                Addr::Unix(path) => Ok(Self::Shm(path)),
                Addr::Tcp(_) => unreachable!("a path is no TCP address"),
            };
        }
        if let Some(place) = text.strip_prefix("rdma:") {
            return match place.parse()? {
                Addr::Tcp(addr) => Ok(Self::Rdma(addr)),
                // The parser of socket addresses words the error.
                Addr::Unix(_) => Err("rdma:".parse::<Addr>().expect_err("it has no port")),
            };
        }
        text.strip_prefix("tcp:").unwrap_or(text).parse::<Addr>().map(Self::from)
    }
}

/// Transport options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// Busy-poll time of a shared memory or RDMA side after its last work, before it sleeps.
    pub(crate) look: Duration,
    /// Local address of the RDMA device to use; `None` selects by route.
    pub(crate) rdma_local: Option<IpAddr>,
}

/// Listening endpoint of a transport that serialises.
pub(crate) enum Acceptor {
    /// TCP or a Unix socket.
    Socket(Listener),
    /// Unix socket whose connections are given shared memory.
    Shm(Listener, Manner),
    /// RDMA transport.
    Rdma(RdmaListener),
}

impl Acceptor {
    /// Listens at `address`: for RDMA also over TCP at the same address, for peers without RDMA; only over TCP where
    /// this machine has none.
    pub(crate) fn bind(address: &Address, manner: Manner) -> io::Result<(Vec<Self>, Address)> {
        let listener = Listener::bind(&address.reactor_addr()?)?;
        let bound = listener.local_addr().clone();
        match (address, &bound) {
            (Address::Shm(_), _) => Ok((vec![Self::Shm(listener, manner)], address.clone())),
            (Address::Rdma(_), Addr::Tcp(place)) => match RdmaListener::bind(*place, manner.look) {
                Ok(rdma) => Ok((vec![Self::Rdma(rdma), Self::Socket(listener)], Address::Rdma(*place))),
                Err(error) => {
                    tracing::warn!(%address, %error, "listening over RDMA is not possible; over TCP only");
                    Ok((vec![Self::Socket(listener)], bound.into()))
                }
            },
            _ => Ok((vec![Self::Socket(listener)], bound.into())),
        }
    }

    /// Returns the next incoming connection, for which no resources have been allocated yet, and its peer address.
    pub(crate) async fn accept(&self) -> io::Result<(Coming, Address)> {
        match self {
            Self::Socket(listener) => {
                let (stream, peer) = listener.accept().await?;
                Ok((Coming::Socket(stream), peer.into()))
            }
            Self::Shm(listener, manner) => {
                let (stream, _) = listener.accept().await?;
                Ok((Coming::Shm(stream, *manner), Address::Shm(PathBuf::new())))
            }
            Self::Rdma(listener) => {
                let ask = listener.asked().await?;
                let peer = ask.peer();
                Ok((Coming::Rdma(ask), Address::Rdma(peer)))
            }
        }
    }
}

/// Incoming connection that was not admitted yet; rejected when it is dropped.
pub(crate) enum Coming {
    /// TCP or a Unix socket.
    Socket(Stream),
    /// Unix socket, to be given shared memory.
    Shm(Stream, Manner),
    /// RDMA connection request, to be given queues and buffers.
    Rdma(RdmaAsk),
}

impl Coming {
    /// Admits the connection and allocates its resources.
    pub(crate) fn admit(self) -> io::Result<Channel> {
        match self {
            Self::Socket(stream) => Ok(Channel::Socket(stream)),
            Self::Shm(stream, manner) => Ok(Channel::Shm(ShmChannel::accept(stream, manner.look)?)),
            Self::Rdma(ask) => Ok(Channel::Rdma(ask.accept()?)),
        }
    }
}

/// Connection of a transport that serialises: an ordered byte stream in each direction.  Clones share it.
#[derive(Clone)]
pub(crate) enum Channel {
    /// TCP or a Unix socket.
    Socket(Stream),
    /// Shared memory.
    Shm(ShmChannel),
    /// RDMA transport.
    Rdma(RdmaStream),
}

impl Channel {
    pub(crate) async fn connect(address: &Address, manner: Manner) -> io::Result<Self> {
        if let Address::Rdma(place) = address {
            let stream = RdmaStream::connect(*place, manner.rdma_local, manner.look);
            // A machine without RDMA does not answer, and the kernel would retry for a minute.
            let connected = timeout(RDMA_PATIENCE, stream).await;
            match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(stream) => return Ok(Self::Rdma(stream)),
                Err(error) => tracing::warn!(%address, %error, "RDMA is not possible; trying TCP"),
            }
        }
        let stream = Stream::connect(&address.reactor_addr()?).await?;
        match address {
            Address::Shm(_) => Ok(Self::Shm(ShmChannel::connect(stream, manner.look).await?)),
            _ => Ok(Self::Socket(stream)),
        }
    }

    /// Returns the transport's name, as in addresses.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Socket(stream) if stream.is_unix() => "unix",
            Self::Socket(_) => "tcp",
            Self::Shm(_) => "shm",
            Self::Rdma(_) => "rdma",
        }
    }

    /// Returns the RDMA stream, if its device can write into the peer's memory.
    pub(crate) fn rdma(&self) -> Option<RdmaStream> {
        match self {
            Self::Rdma(stream) => Some(stream.clone()),
            Self::Socket(_) | Self::Shm(_) => None,
        }
    }

    /// Returns true if bytes cannot be corrupted in transit, so that checksums are redundant.
    pub(crate) fn is_sound(&self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Receives into the buffer's spare capacity: the available bytes, or (`all`) until it is full.  Returns 0 at the
    /// end of the stream.
    pub(crate) async fn recv(self, buf: BufMut, all: bool) -> (io::Result<usize>, BufMut) {
        match self {
            Self::Shm(channel) => channel.recv(buf, all).await,
            Self::Rdma(stream) => stream.recv(buf, all).await,
            Self::Socket(stream) if !all => stream.recv(buf).await,
            Self::Socket(stream) => {
                let want = buf.spare();
                let (result, buf) = stream.recv_exact(buf).await;
                (result.map(|()| want), buf)
            }
        }
    }

    /// Sends all bytes.
    pub(crate) async fn send(self, bufs: BufList) -> io::Result<()> {
        match self {
            Self::Shm(channel) => channel.send(bufs).await,
            Self::Rdma(stream) => stream.send(bufs).await,
            Self::Socket(stream) => stream.send(bufs).await,
        }
    }

    /// Shuts down both directions.
    pub(crate) fn shutdown(&self) {
        match self {
            Self::Shm(channel) => channel.shutdown(),
            Self::Rdma(stream) => stream.shutdown(),
            Self::Socket(stream) => stream.shutdown(),
        }
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
