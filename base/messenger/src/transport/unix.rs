//! Transport over Unix stream sockets.

use std::fmt;
use std::io;
use std::path::PathBuf;

use forebay_reactor::net::AddrError;
use forebay_reactor::{Addr, BufList, BufMut, Listener, Stream};

use super::{Acceptor, Address, Channel, Transport, TransportOptions, tcp};

/// Unix stream socket.
pub(crate) struct Unix;

/// Parses the path of a Unix socket.
pub(super) fn parse_path(text: &str) -> Result<PathBuf, AddrError> {
    match format!("unix:{text}").parse()? {
        Addr::Unix(path) => Ok(path),
        Addr::Tcp(_) => unreachable!("an address with the scheme unix is a path"),
    }
}

impl Transport for Unix {
    const SCHEME: &'static str = "unix";
    type Endpoint = PathBuf;
    type Acceptor = Listener;
    type Pending = Stream;
    type Stream = Stream;

    fn parse(text: &str) -> Result<Address, AddrError> {
        parse_path(text).map(Address::Unix)
    }

    fn display(endpoint: &PathBuf) -> impl fmt::Display {
        endpoint.display()
    }

    fn unix(endpoint: &PathBuf) -> Option<Addr> {
        Some(Addr::Unix(endpoint.clone()))
    }

    fn bind(endpoint: &PathBuf, _options: TransportOptions) -> io::Result<(Vec<Acceptor>, Address)> {
        let listener = Listener::bind(&Addr::Unix(endpoint.clone()))?;
        let bound = listener.local_addr().clone().into();
        Ok((vec![Acceptor::Unix(listener)], bound))
    }

    async fn accept(acceptor: &Listener) -> io::Result<(Stream, Address)> {
        let (stream, peer) = acceptor.accept().await?;
        Ok((stream, peer.into()))
    }

    fn admit(pending: Stream) -> io::Result<Stream> {
        Ok(pending)
    }

    async fn connect(endpoint: &PathBuf, _options: TransportOptions) -> io::Result<Channel> {
        Stream::connect(&Addr::Unix(endpoint.clone())).await.map(Channel::Unix)
    }

    #[inline]
    fn recv(stream: &Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf)
    }

    fn recv_exact(stream: &Stream, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        tcp::recv_exact(stream, buf)
    }

    #[inline]
    fn send(stream: &Stream, bufs: BufList) -> impl Future<Output = io::Result<()>> {
        stream.send(bufs)
    }

    fn shutdown(stream: &Stream) {
        stream.shutdown();
    }
}
