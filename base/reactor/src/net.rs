//! TCP and Unix stream sockets.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use crate::buf::{BufList, BufMut};
use crate::driver::{Handle, Op};
use crate::executor::{Inner, with_current};

/// Where a socket listens or connects: `host:port`, `[v6]:port` or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Addr {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix stream socket; an unnamed peer has an empty path.
    Unix(PathBuf),
}

impl Addr {
    /// Reaches only this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Addr::Tcp(addr) => addr.ip().is_loopback(),
            Addr::Unix(_) => true,
        }
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Addr::Tcp(addr) => addr.fmt(f),
            Addr::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddrError(String);

impl fmt::Display for AddrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AddrError {}

impl FromStr for Addr {
    type Err = AddrError;
    fn from_str(text: &str) -> Result<Self, AddrError> {
        if let Some(path) = text.strip_prefix("unix:") {
            // The kernel's limit for a socket's path, its final zero byte included.
            const SUN_PATH_MAX: usize = 108;
            if path.is_empty() || path.len() >= SUN_PATH_MAX {
                return Err(AddrError(format!("'{text}': a socket's path has 1 to {} bytes", SUN_PATH_MAX - 1)));
            }
            return Ok(Addr::Unix(path.into()));
        }
        let mut found = text.to_socket_addrs().map_err(|error| {
            AddrError(format!("'{text}' is no address ({error}); use host:port, [v6]:port or unix:PATH"))
        })?;
        found.next().map(Addr::Tcp).ok_or_else(|| AddrError(format!("'{text}': the host has no address")))
    }
}

struct Socket {
    inner: Rc<Inner>,
    handle: Handle,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let handle = self.handle;
        self.inner.with_driver(|driver| driver.close(handle));
    }
}

/// A descriptor of somebody else's (a library's), of which is only asked whether there is something to read.
pub(crate) struct Watched {
    socket: Socket,
}

impl Watched {
    /// Watches what `fd` refers to, under a descriptor of its own.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let inner = with_current(Rc::clone);
        let handle = inner.with_driver(|driver| driver.adopt_listener(fd.try_clone_to_owned()?))?;
        Ok(Self { socket: Socket { inner, handle } })
    }

    /// Waits until there is something to read.
    pub(crate) async fn ready(&self) -> io::Result<()> {
        self.socket.inner.start_op(Op::Ready { handle: self.socket.handle }).await.result.map(drop)
    }
}

/// A listening socket.
pub struct Listener {
    socket: Rc<Socket>,
    addr: Addr,
}

impl Listener {
    /// Listens on `addr`.  A Unix socket's path that is left from a dead process is replaced; a live one is not.
    pub fn bind(addr: &Addr) -> io::Result<Self> {
        let inner = with_current(Rc::clone);
        let (handle, addr) = inner.with_driver(|driver| driver.listen(addr))?;
        Ok(Self { socket: Rc::new(Socket { inner, handle }), addr })
    }

    /// Waits until [`bind`](Self::bind) can have a Unix socket's path whose listener is just going, for up to 0.3 s: the
    /// ring of a process that was killed holds its sockets a moment longer than the process lives.  Who listens on is not
    /// disturbed.
    pub async fn settle(addr: &Addr) {
        const LOOKS: u32 = 30;
        const REST: Duration = Duration::from_millis(10);
        if matches!(addr, Addr::Tcp(_)) {
            return;
        }
        for _ in 0..LOOKS {
            match Self::bind(addr) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => crate::sleep(REST).await,
                // What this leaves behind is dead, and replaced; other errors are for who binds.
                _ => return,
            }
        }
    }

    /// The address as bound.
    pub fn local_addr(&self) -> &Addr {
        &self.addr
    }

    /// The same socket for another core.
    pub fn share(&self) -> io::Result<SharedListener> {
        let socket = self.socket.inner.with_driver(|driver| driver.share_listener(self.socket.handle))?;
        Ok(SharedListener { socket, addr: self.addr.clone() })
    }

    /// The next connection and its peer's address.  An error need not be the listener's end: without a free descriptor
    /// (`EMFILE`) the next attempt fails at once too, so wait a moment before it.
    pub async fn accept(&self) -> io::Result<(Stream, Addr)> {
        let done = self.socket.inner.start_op(Op::Accept { listener: self.socket.handle }).await;
        let stream =
            Stream::from_handle(self.socket.inner.clone(), Handle(done.result?), !matches!(self.addr, Addr::Tcp(_)));
        Ok((stream, done.peer.unwrap_or_else(|| Addr::Unix(PathBuf::new()))))
    }
}

/// A listening socket on its way to other cores, which accept from the same queue: whichever is idle takes the next
/// connection, and keeps it.
#[derive(Debug)]
pub struct SharedListener {
    socket: OwnedFd,
    addr: Addr,
}

impl SharedListener {
    /// The listening socket on this core, whose driver must be of the same kind.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn attach(self) -> io::Result<Listener> {
        let inner = with_current(Rc::clone);
        let handle = inner.with_driver(|driver| driver.adopt_listener(self.socket))?;
        Ok(Listener { socket: Rc::new(Socket { inner, handle }), addr: self.addr })
    }
}

/// A connection.  Cloning shares it, so that one task can receive while another sends; closed with the last clone.
#[derive(Clone)]
pub struct Stream {
    socket: Rc<Socket>,
    unix: bool,
}

impl Stream {
    /// Connects to `addr`.
    pub async fn connect(addr: &Addr) -> io::Result<Self> {
        let inner = with_current(Rc::clone);
        let done = inner.start_op(Op::Connect { addr: addr.clone() }).await;
        Ok(Self::from_handle(inner, Handle(done.result?), !matches!(addr, Addr::Tcp(_))))
    }

    fn from_handle(inner: Rc<Inner>, handle: Handle, unix: bool) -> Self {
        Self { socket: Rc::new(Socket { inner, handle }), unix }
    }

    /// It is a Unix socket, not TCP.
    pub fn is_unix(&self) -> bool {
        self.unix
    }

    /// Receives what there is into the buffer's spare room, at least one byte; 0 at the end of the stream.
    ///
    /// Dropping the future may lose bytes that have arrived, so do that only when the connection is given up.
    pub async fn recv(&self, buf: BufMut) -> (io::Result<usize>, BufMut) {
        self.recv_op(buf, false).await
    }

    /// Receives until the buffer's spare room is full; the stream ending before is `UnexpectedEof`.
    pub async fn recv_exact(&self, buf: BufMut) -> (io::Result<()>, BufMut) {
        let want = buf.spare();
        let (result, buf) = self.recv_op(buf, true).await;
        let result = match result {
            Ok(got) if got < want => {
                let text = format!("the connection ended after {got} of {want} bytes");
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, text))
            }
            other => other.map(drop),
        };
        (result, buf)
    }

    async fn recv_op(&self, buf: BufMut, all: bool) -> (io::Result<usize>, BufMut) {
        if buf.spare() == 0 {
            return (Ok(0), buf);
        }
        let done = self.socket.inner.start_op(Op::Recv { sock: self.socket.handle, buf, all }).await;
        let Op::Recv { buf, .. } = done.op else { unreachable!("a receive completed as {:?}", done.op) };
        (done.result.map(|len| len as usize), buf)
    }

    /// Sends everything.  One send at a time a connection: two at once would interleave.
    ///
    /// Dropping the future may leave the peer with a part, so do that only when the connection is given up.
    pub async fn send(&self, bufs: impl Into<BufList>) -> io::Result<()> {
        let bufs = bufs.into();
        if bufs.is_empty() {
            return Ok(());
        }
        self.socket.inner.start_op(Op::Send { sock: self.socket.handle, bufs }).await.result.map(drop)
    }

    /// Gives the process at the other end of a Unix socket a descriptor, with one byte of data.
    ///
    /// # Errors
    /// Of the system; `Unsupported` in simulation.
    pub fn send_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.socket.inner.with_driver(|driver| driver.send_fd(self.socket.handle, fd))
    }

    /// Takes a descriptor that the other end of a Unix socket gives with one byte of data.  No other receive may be under
    /// way.
    ///
    /// # Errors
    /// `InvalidData` when data came without a descriptor, `UnexpectedEof` at the end of the stream.
    pub async fn recv_fd(&self) -> io::Result<OwnedFd> {
        // It comes once in a connection's life, so that looking now and then is good enough.
        const LOOK: Duration = Duration::from_micros(200);
        loop {
            match self.socket.inner.with_driver(|driver| driver.recv_fd(self.socket.handle)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => crate::sleep(LOOK).await,
                other => return other,
            }
        }
    }

    /// Ends both directions: the peer sees the end of the stream, waiting receives and sends return.
    pub fn shutdown(&self) {
        self.socket.inner.with_driver(|driver| driver.shutdown(self.socket.handle));
    }
}
