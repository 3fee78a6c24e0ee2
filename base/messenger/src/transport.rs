//! Ways for bytes to travel, behind one small interface; and how an address names them.

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

/// How long a machine may take to answer over RDMA before TCP is tried.
const RDMA_PATIENCE: Duration = Duration::from_secs(5);

/// Where a messenger listens or connects.
///
/// `HOST:PORT` and `tcp:HOST:PORT` are TCP, `rdma:HOST:PORT` RDMA, or TCP where that is not to be had, `unix:PATH` a Unix
/// socket, `shm:PATH` shared memory that is set up over a Unix socket, `loopback:NAME` a messenger of the same process on
/// the same core.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// RDMA, set up by rdma_cm; TCP at the same place where there is none.
    Rdma(SocketAddr),
    /// A Unix stream socket.
    Unix(PathBuf),
    /// Shared memory; the path is that of the Unix socket.
    Shm(PathBuf),
    /// Within the process: messages are handed over, nothing is serialised.
    Loopback(String),
}

impl Address {
    /// Reaches only this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(addr) | Self::Rdma(addr) => addr.ip().is_loopback(),
            Self::Unix(_) | Self::Shm(_) | Self::Loopback(_) => true,
        }
    }

    /// The place, if it has an IP address.
    pub fn socket(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(addr) | Self::Rdma(addr) => Some(*addr),
            Self::Unix(_) | Self::Shm(_) | Self::Loopback(_) => None,
        }
    }

    /// The Unix socket that it is, or is set up over.
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
            // The rules for its socket's path are those of any Unix socket's.
            return match format!("unix:{path}").parse()? {
                Addr::Unix(path) => Ok(Self::Shm(path)),
                Addr::Tcp(_) => unreachable!("a path is no TCP address"),
            };
        }
        if let Some(place) = text.strip_prefix("rdma:") {
            return match place.parse()? {
                Addr::Tcp(addr) => Ok(Self::Rdma(addr)),
                // Said by who knows what an address with a port looks like.
                Addr::Unix(_) => Err("rdma:".parse::<Addr>().expect_err("it has no port")),
            };
        }
        text.strip_prefix("tcp:").unwrap_or(text).parse::<Addr>().map(Self::from)
    }
}

/// How transports are used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// Who looks at memory for what comes does so for this long after something has come, before it sleeps.
    pub(crate) look: Duration,
    /// The RDMA device that has this address is used.
    pub(crate) rdma_local: Option<IpAddr>,
}

/// A listening endpoint of a transport that serialises.
pub(crate) enum Acceptor {
    /// TCP or a Unix socket.
    Socket(Listener),
    /// Those who connect to the socket get shared memory.
    Shm(Listener, Manner),
    /// RDMA.
    Rdma(RdmaListener),
}

impl Acceptor {
    /// Listens: on RDMA also over TCP at the same place, for those who have none; over TCP only where we have none.
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

    /// The next that comes, for whom nothing has been set aside yet, and where it is.
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

/// Somebody who has come and was not admitted yet; turned away when it is dropped.
pub(crate) enum Coming {
    /// TCP or a Unix socket.
    Socket(Stream),
    /// Gets shared memory.
    Shm(Stream, Manner),
    /// Gets queues and buffers.
    Rdma(RdmaAsk),
}

impl Coming {
    /// Admits it.
    pub(crate) fn admit(self) -> io::Result<Channel> {
        match self {
            Self::Socket(stream) => Ok(Channel::Socket(stream)),
            Self::Shm(stream, manner) => Ok(Channel::Shm(ShmChannel::accept(stream, manner.look)?)),
            Self::Rdma(ask) => Ok(Channel::Rdma(ask.accept()?)),
        }
    }
}

/// A connection of a transport that serialises: an ordered stream of bytes in each direction.  Clones share it.
#[derive(Clone)]
pub(crate) enum Channel {
    /// TCP or a Unix socket.
    Socket(Stream),
    /// Shared memory.
    Shm(ShmChannel),
    /// RDMA.
    Rdma(RdmaStream),
}

impl Channel {
    pub(crate) async fn connect(address: &Address, manner: Manner) -> io::Result<Self> {
        if let Address::Rdma(place) = address {
            let stream = RdmaStream::connect(*place, manner.rdma_local, manner.look);
            // A machine without RDMA answers nothing, and the kernel would go on asking for a minute.
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

    /// The transport's name, as addresses have it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Socket(stream) if stream.is_unix() => "unix",
            Self::Socket(_) => "tcp",
            Self::Shm(_) => "shm",
            Self::Rdma(_) => "rdma",
        }
    }

    /// The stream, if its device can write into the peer's memory.
    pub(crate) fn rdma(&self) -> Option<RdmaStream> {
        match self {
            Self::Rdma(stream) => Some(stream.clone()),
            Self::Socket(_) | Self::Shm(_) => None,
        }
    }

    /// Bytes cannot be damaged on the way: checksums would find nothing.
    pub(crate) fn is_sound(&self) -> bool {
        matches!(self, Self::Shm(_))
    }

    /// Receives into the buffer's spare room: what there is, or (`all`) until it is full.  0 at the end of the stream.
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

    /// Sends everything.
    pub(crate) async fn send(self, bufs: BufList) -> io::Result<()> {
        match self {
            Self::Shm(channel) => channel.send(bufs).await,
            Self::Rdma(stream) => stream.send(bufs).await,
            Self::Socket(stream) => stream.send(bufs).await,
        }
    }

    /// Ends both directions.
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
