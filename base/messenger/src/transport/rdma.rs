//! RDMA transport, with a fallback to TCP at the same address.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use forebay_reactor::net::AddrError;
use forebay_reactor::rdma::{RdmaAsk, RdmaListener, RdmaStream};
use forebay_reactor::{Addr, BufList, BufMut, timeout};

use super::tcp::Tcp;
use super::{Acceptor, Address, Channel, Transport, TransportOptions};

/// Timeout of an RDMA connection attempt, before TCP is tried.  A machine without RDMA does not answer, and the kernel
/// would retry for a minute.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// RDMA transport, set up by rdma_cm.
pub(crate) struct Rdma;

impl Transport for Rdma {
    const SCHEME: &'static str = "rdma";
    type Endpoint = SocketAddr;
    type Acceptor = RdmaListener;
    type Pending = RdmaAsk;
    type Stream = RdmaStream;

    fn parse(text: &str) -> Result<Address, AddrError> {
        match text.parse()? {
            Addr::Tcp(addr) => Ok(Address::Rdma(addr)),
            // The parser of socket addresses words the error.
            Addr::Unix(_) => Err("rdma:".parse::<Addr>().expect_err("an address without a port is invalid")),
        }
    }

    fn display(endpoint: &SocketAddr) -> impl fmt::Display {
        *endpoint
    }

    fn socket(endpoint: &SocketAddr) -> Option<SocketAddr> {
        Some(*endpoint)
    }

    /// Listens over RDMA and, for peers without it, over TCP at the same address; only over TCP where this machine has
    /// no RDMA.  Listens over RDMA first, so that a client that gets through over TCP can rely on it; with port 0, TCP
    /// chooses the port, and no client knows it yet.
    fn bind(endpoint: &SocketAddr, options: TransportOptions) -> io::Result<(Vec<Acceptor>, Address)> {
        let early = (endpoint.port() != 0).then(|| RdmaListener::bind(*endpoint, options.busy_poll));
        let (mut acceptors, bound) = Tcp::bind(endpoint, options)?;
        let Some(addr) = bound.socket() else { return Ok((acceptors, bound)) };
        match early.unwrap_or_else(|| RdmaListener::bind(addr, options.busy_poll)) {
            Ok(listener) => {
                acceptors.insert(0, Acceptor::Rdma(listener));
                Ok((acceptors, Address::Rdma(addr)))
            }
            Err(error) => {
                tracing::warn!(address = %Address::Rdma(*endpoint), %error, "cannot listen over RDMA; using TCP only");
                Ok((acceptors, bound))
            }
        }
    }

    async fn accept(acceptor: &RdmaListener) -> io::Result<(RdmaAsk, Address)> {
        let pending = acceptor.asked().await?;
        let peer = pending.peer();
        Ok((pending, Address::Rdma(peer)))
    }

    fn admit(pending: RdmaAsk) -> io::Result<RdmaStream> {
        pending.accept()
    }

    /// Connects over RDMA, or else over TCP.  A peer that rejects the first attempt may have begun to listen before the
    /// one over TCP, and would be served over TCP for as long as that connection lives: RDMA is tried once more.
    async fn connect(endpoint: &SocketAddr, options: TransportOptions) -> io::Result<Channel> {
        let mut error = match connect_once(endpoint, options).await {
            Ok(stream) => return Ok(Channel::Rdma(stream)),
            Err(error) => error,
        };
        let fallback = Tcp::connect(endpoint, options).await?;
        if error.kind() != io::ErrorKind::TimedOut {
            match connect_once(endpoint, options).await {
                Ok(stream) => return Ok(Channel::Rdma(stream)),
                Err(again) => error = again,
            }
        }
        tracing::warn!(address = %Address::Rdma(*endpoint), %error, "cannot connect over RDMA; using TCP");
        Ok(fallback)
    }

    #[inline]
    fn recv(stream: &RdmaStream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf, false)
    }

    fn recv_exact(stream: &RdmaStream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf, true)
    }

    #[inline]
    fn send(stream: &RdmaStream, bufs: BufList) -> impl Future<Output = io::Result<()>> {
        stream.send(bufs)
    }

    fn shutdown(stream: &RdmaStream) {
        stream.shutdown();
    }

    fn rdma(stream: &RdmaStream) -> Option<RdmaStream> {
        Some(stream.clone())
    }
}

/// Tries to connect over RDMA, for [`CONNECT_TIMEOUT`].
async fn connect_once(endpoint: &SocketAddr, options: TransportOptions) -> io::Result<RdmaStream> {
    let stream = RdmaStream::connect(*endpoint, options.rdma_local, options.busy_poll);
    timeout(CONNECT_TIMEOUT, stream).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
