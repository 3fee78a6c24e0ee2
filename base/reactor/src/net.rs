//! TCP and Unix stream sockets.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use crate::buf::{Buf, BufList, BufMut};
pub use crate::driver::messages::DESCRIPTORS_MAX;
use crate::driver::{Handle, Op, messages, os};
use crate::executor::{ReactorState, with_current};
use crate::ops::OpFuture;

/// Address to listen on or connect to: `host:port`, `[v6]:port` or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Addr {
    /// TCP address.
    Tcp(SocketAddr),
    /// Path of a Unix stream socket; empty for an unnamed peer.
    Unix(PathBuf),
}

impl Addr {
    /// Returns whether the address is reachable only from this machine: loopback or a Unix socket.
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

/// Error of a text that is not a valid address.
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
            // Kernel limit for a socket's path, including its final zero byte.
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
    inner: Rc<ReactorState>,
    handle: Handle,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let handle = self.handle;
        self.inner.with_driver(|driver| driver.close(handle));
    }
}

/// Foreign descriptor, owned by a library or shared with another process, polled for readability only.
pub(crate) struct PolledFd {
    socket: Socket,
}

impl PolledFd {
    /// Watches the file that `fd` refers to, through a duplicate descriptor.
    pub(crate) fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Self::adopt(fd.try_clone_to_owned()?)
    }

    /// Watches a descriptor, and owns it.
    pub(crate) fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let inner = with_current(Rc::clone);
        let handle = inner.with_driver(|driver| driver.adopt_listener(fd))?;
        Ok(Self { socket: Socket { inner, handle } })
    }

    /// Calls the system on the descriptor, without blocking.
    pub(crate) fn with_descriptor<R>(&self, call: impl FnOnce(BorrowedFd<'_>) -> R) -> io::Result<R> {
        self.socket.inner.with_driver(|driver| driver.descriptor(self.socket.handle).map(call))
    }

    /// Starts to wait until the descriptor is readable.
    pub(crate) fn start_ready(&self) -> OpFuture {
        self.socket.inner.start_op(Op::Ready { handle: self.socket.handle, writable: false })
    }

    /// Waits until the descriptor is readable.
    pub(crate) async fn ready(&self) -> io::Result<()> {
        self.start_ready().await.result.map(drop)
    }
}

/// Listening socket.
pub struct Listener {
    socket: Rc<Socket>,
    addr: Addr,
}

impl Listener {
    /// Listens on `addr`.  A Unix socket path left by a dead process is replaced; one with a live listener is not.
    pub fn bind(addr: &Addr) -> io::Result<Self> {
        Self::listen(addr, false)
    }

    /// Listens as [`bind`](Self::bind) does; nobody but the owner can connect to a Unix socket until its mode is changed.
    pub fn bind_private(addr: &Addr) -> io::Result<Self> {
        Self::listen(addr, true)
    }

    fn listen(addr: &Addr, private: bool) -> io::Result<Self> {
        let inner = with_current(Rc::clone);
        let (handle, addr) = inner.with_driver(|driver| driver.listen(addr, private))?;
        Ok(Self { socket: Rc::new(Socket { inner, handle }), addr })
    }

    /// Waits until [`bind`](Self::bind) can take a Unix socket path whose listener is closing, for up to 0.3 s: the
    /// ring of a killed process keeps its sockets open slightly longer than the process lives.  A live listener is not
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
                // A socket left behind by this attempt is dead, and will be replaced; other errors are reported by
                // `bind`.
                _ => return,
            }
        }
    }

    /// Returns the bound address.
    pub fn local_addr(&self) -> &Addr {
        &self.addr
    }

    /// Duplicates the listening socket for another core.
    pub fn share(&self) -> io::Result<SharedListener> {
        let socket = self.socket.inner.with_driver(|driver| driver.share_listener(self.socket.handle))?;
        Ok(SharedListener { socket, addr: self.addr.clone() })
    }

    /// Accepts the next connection; returns it and its peer's address.  An error need not end the listener: without a
    /// free descriptor (`EMFILE`) the next attempt fails at once too, so wait a moment before it.
    pub async fn accept(&self) -> io::Result<(Stream, Addr)> {
        let done = self.socket.inner.start_op(Op::Accept { listener: self.socket.handle }).await;
        let stream =
            Stream::from_handle(self.socket.inner.clone(), Handle(done.result?), !matches!(self.addr, Addr::Tcp(_)));
        Ok((stream, done.peer.unwrap_or_else(|| Addr::Unix(PathBuf::new()))))
    }
}

/// Listening socket in transit to another core.  All cores accept from the same queue: whichever is idle takes the next
/// connection, and keeps it.
#[derive(Debug)]
pub struct SharedListener {
    socket: OwnedFd,
    addr: Addr,
}

impl SharedListener {
    /// Attaches the listening socket to this core, whose driver must be of the same kind.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn attach(self) -> io::Result<Listener> {
        let inner = with_current(Rc::clone);
        let handle = inner.with_driver(|driver| driver.adopt_listener(self.socket))?;
        Ok(Listener { socket: Rc::new(Socket { inner, handle }), addr: self.addr })
    }
}

/// Connection.  Clones share it, so that one task can receive while another sends; it is closed with the last clone.
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

    fn from_handle(inner: Rc<ReactorState>, handle: Handle, unix: bool) -> Self {
        Self { socket: Rc::new(Socket { inner, handle }), unix }
    }

    /// Returns whether it is a Unix socket, not TCP.
    pub fn is_unix(&self) -> bool {
        self.unix
    }

    /// Receives available bytes into the buffer's spare space, at least one; returns 0 at the end of the stream.
    ///
    /// Dropping the future may lose bytes that have arrived, so drop it only when the connection is abandoned.
    pub async fn recv(&self, buf: BufMut) -> (io::Result<usize>, BufMut) {
        self.recv_op(buf, false).await
    }

    /// Receives until the buffer's spare space is full.
    ///
    /// # Errors
    /// `UnexpectedEof` when the stream ends before.
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

    /// Sends all of `bufs`.  Only one send at a time per connection: two at once would interleave.
    ///
    /// Dropping the future may leave the peer with a part, so drop it only when the connection is abandoned.
    pub async fn send(&self, bufs: impl Into<BufList>) -> io::Result<()> {
        let bufs = bufs.into();
        if bufs.is_empty() {
            return Ok(());
        }
        self.socket.inner.start_op(Op::Send { sock: self.socket.handle, bufs }).await.result.map(drop)
    }

    /// Passes a descriptor to the process at the other end of a Unix socket, with one byte of data.
    ///
    /// # Errors
    /// Errors of the system; `Unsupported` in simulation.
    pub fn send_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.with_descriptor(|socket| messages::send(socket, &[0], &[fd])).map(drop)
    }

    /// Receives a descriptor that the other end of a Unix socket passes with one byte of data.  No other receive may be
    /// in flight.
    ///
    /// # Errors
    /// `InvalidData` when data came without a descriptor, `UnexpectedEof` at the end of the stream.
    pub async fn recv_fd(&self) -> io::Result<OwnedFd> {
        match self.recv_message(BufMut::with_capacity(1)).await.0? {
            (0, _) => Err(io::ErrorKind::UnexpectedEof.into()),
            (_, descriptors) => descriptors
                .into_iter()
                .next()
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no file descriptor received with the byte")),
        }
    }

    /// Adopts a connected Unix stream socket, and sets its blocking mode as the driver needs it.
    ///
    /// # Errors
    /// `InvalidInput` when it is no such socket; `Unsupported` in simulation.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn adopt_unix(socket: OwnedFd) -> io::Result<Self> {
        messages::check_unix_stream(socket.as_fd())?;
        let inner = with_current(Rc::clone);
        let handle = inner.with_driver(|driver| driver.adopt_stream(socket))?;
        Ok(Self::from_handle(inner, handle, true))
    }

    /// Receives available bytes into the buffer's spare space, at least one, and the descriptors that came with them;
    /// returns 0 bytes at the end of the stream.  Received descriptors are closed on exec.
    ///
    /// Bytes of several sends may be received together, but none after a byte that has descriptors: they belong to the
    /// last send of which the bytes are a part.  If the buffer is shorter than that send, they come with its first part.
    ///
    /// Dropping the future loses neither bytes nor descriptors.
    ///
    /// # Errors
    /// `InvalidInput` when the buffer has no spare space; `InvalidData` when a message had more than
    /// [`DESCRIPTORS_MAX`] descriptors, or more than the process can open: its bytes are lost, so close the connection;
    /// `Unsupported` in simulation; errors of the system.
    pub async fn recv_message(&self, mut buf: BufMut) -> (io::Result<(usize, Vec<OwnedFd>)>, BufMut) {
        if buf.spare() == 0 {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "receive into a buffer without spare space");
            return (Err(error), buf);
        }
        // The bytes are taken in the same step in which the future completes.
        let result = self.retry(false, || {
            self.with_descriptor(|socket| {
                let (got, descriptors) = messages::receive(socket, buf.spare_mut())?;
                buf.set_len(buf.len() + got);
                Ok((got, descriptors))
            })
        });
        (result.await, buf)
    }

    /// Sends all of `bytes`, with `descriptors` attached to the first byte.  They are closed here once they are sent.
    /// Only one send at a time per connection: two at once would interleave.
    ///
    /// Dropping the future may leave the peer with a part, so drop it only when the connection is abandoned.
    ///
    /// # Errors
    /// `InvalidInput` when there are more than [`DESCRIPTORS_MAX`] descriptors, or any without bytes; `Unsupported` in
    /// simulation; errors of the system.
    pub async fn send_message(&self, bytes: Buf, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let refused = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if descriptors.len() > DESCRIPTORS_MAX {
            return refused(format!("{} descriptors in a message, more than {DESCRIPTORS_MAX}", descriptors.len()));
        }
        if bytes.is_empty() && !descriptors.is_empty() {
            return refused("descriptors in a message without bytes".into());
        }
        let mut sent = 0;
        let mut unsent: Vec<OwnedFd> = descriptors;
        while sent < bytes.len() {
            let put = self.retry(true, || {
                let attached: Vec<BorrowedFd<'_>> = unsent.iter().map(AsFd::as_fd).collect();
                self.with_descriptor(|socket| messages::send(socket, &bytes[sent..], &attached))
            });
            sent += put.await?;
            unsent.clear();
        }
        Ok(())
    }

    /// Calls the system on the socket's descriptor, without blocking.
    fn with_descriptor<R>(&self, call: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>) -> io::Result<R> {
        self.socket.inner.with_driver(|driver| call(driver.descriptor(self.socket.handle)?))
    }

    /// Repeats a call that does not block, when the socket is readable or writable, until it has a result.
    async fn retry<R>(&self, writable: bool, mut call: impl FnMut() -> io::Result<R>) -> io::Result<R> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let ready = Op::Ready { handle: self.socket.handle, writable };
                    self.socket.inner.start_op(ready).await.result?;
                }
                other => return other,
            }
        }
    }

    /// Returns whether the peer has closed the connection or shut its sending direction down, also while bytes that it sent
    /// before are still to be received.  For a Unix socket that is known as soon as the peer's call has returned; over
    /// TCP, when its last segment has arrived.
    pub fn is_peer_closed(&self) -> bool {
        self.socket.inner.with_driver(|driver| driver.is_peer_closed(self.socket.handle))
    }

    /// Returns the number of the process on the other side, as it was when the sockets were connected; `None` if that is
    /// not known: over TCP, in simulation, or when this process cannot see it.
    pub fn peer_process(&self) -> Option<u32> {
        self.with_descriptor(os::peer_process).ok().flatten()
    }

    /// Shuts down both directions: the peer sees the end of the stream, pending receives and sends return.
    pub fn shutdown(&self) {
        self.socket.inner.with_driver(|driver| driver.shutdown(self.socket.handle));
    }

    /// Shuts down the sending direction: the peer sees the end of the stream, and can still send.  No send may be in
    /// flight.
    pub fn shutdown_send(&self) {
        self.socket.inner.with_driver(|driver| driver.shutdown_send(self.socket.handle));
    }

    /// Closes a connection without a reset: shuts down the sending direction, then receives and discards until the peer
    /// closes, for at most `patience`.  Returns whether the peer has closed.
    ///
    /// A socket that is closed while its peer sends answers with a reset, and what the peer had received and not read yet
    /// is lost to it; senders that do not suppress SIGPIPE are killed.  No send may be in flight, and no receive.
    pub async fn close_gracefully(&self, patience: Duration) -> bool {
        /// Bytes discarded at a time.
        const PIECE: usize = 16 << 10;
        self.shutdown_send();
        let closed = crate::timeout(patience, async {
            let mut buf = BufMut::with_capacity(PIECE);
            loop {
                let (result, got) = self.recv(buf).await;
                match result {
                    Ok(0) | Err(_) => return,
                    Ok(_) => buf = got,
                }
                buf.clear();
            }
        });
        let closed = closed.await.is_ok();
        self.shutdown();
        closed
    }
}
