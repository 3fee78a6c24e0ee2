//! TCP transport.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use forebay_reactor::net::AddrError;
use forebay_reactor::{Addr, BufList, BufMut, Listener, Stream};

use super::{Acceptor, Address, Channel, Transport, TransportOptions};

/// TCP transport.
pub(crate) struct Tcp;

impl Transport for Tcp {
    const SCHEME: &'static str = "tcp";
    type Endpoint = SocketAddr;
    type Acceptor = Listener;
    type Pending = Stream;
    type Stream = Stream;

    fn parse(text: &str) -> Result<Address, AddrError> {
        text.parse::<Addr>().map(Address::from)
    }

    fn display(endpoint: &SocketAddr) -> impl fmt::Display {
        *endpoint
    }

    fn socket(endpoint: &SocketAddr) -> Option<SocketAddr> {
        Some(*endpoint)
    }

    fn bind(endpoint: &SocketAddr, _options: TransportOptions) -> io::Result<(Vec<Acceptor>, Address)> {
        let listener = Listener::bind(&Addr::Tcp(*endpoint))?;
        let bound = listener.local_addr().clone().into();
        Ok((vec![Acceptor::Tcp(listener)], bound))
    }

    async fn accept(acceptor: &Listener) -> io::Result<(Stream, Address)> {
        let (stream, peer) = acceptor.accept().await?;
        Ok((stream, peer.into()))
    }

    fn admit(pending: Stream) -> io::Result<Stream> {
        Ok(pending)
    }

    async fn connect(endpoint: &SocketAddr, _options: TransportOptions) -> io::Result<Channel> {
        Stream::connect(&Addr::Tcp(*endpoint)).await.map(Channel::Tcp)
    }

    #[inline]
    fn recv(stream: &Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf)
    }

    fn recv_exact(stream: &Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        recv_exact(stream, buf)
    }

    #[inline]
    fn send(stream: &Stream, bufs: BufList) -> impl Future<Output = io::Result<()>> {
        stream.send(bufs)
    }

    fn shutdown(stream: &Stream) {
        stream.shutdown();
    }
}

/// Receives from a socket until the buffer is full, and returns the number of bytes.
pub(super) async fn recv_exact(stream: &Stream, buf: BufMut) -> (io::Result<usize>, BufMut) {
    let len = buf.spare();
    let (result, buf) = stream.recv_exact(buf).await;
    (result.map(|()| len), buf)
}
