//! Shared memory transport between processes of one machine: a byte ring in each direction, and a Unix socket.
//!
//! The socket establishes the connection, passes the memory, wakes a sleeping side with one byte, and detects the
//! peer's exit.  A side that has just had work busy-polls its ring for a while, between the reactor's other tasks; then
//! it announces that it sleeps, and waits for the socket.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::net::AddrError;
use forebay_reactor::shm::{self, Consumer, Producer};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Buf, BufList, BufMut, Instant, Listener, Stream, now, spawn, yield_now};

use super::{Acceptor, Address, Channel, Transport, TransportOptions, unix};

/// Ring polls in a row before the reactor runs other tasks: about 300 ns, as long as a reactor turn without work.
const POLLS_IN_A_ROW: u32 = 128;
/// Bytes copied into the ring before they are published to the peer, so that both sides work concurrently.
const PUBLISH: usize = 64 << 10;

/// Shared memory transport.
pub(crate) struct Shm;

impl Transport for Shm {
    const SCHEME: &'static str = "shm";
    const IS_SOUND: bool = true;
    type Endpoint = PathBuf;
    /// Listener of the Unix socket, and the busy-poll time.
    type Acceptor = (Listener, Duration);
    type Pending = (Stream, Duration);
    type Stream = ShmChannel;

    fn parse(text: &str) -> Result<Address, AddrError> {
        unix::parse_path(text).map(Address::Shm)
    }

    fn display(endpoint: &PathBuf) -> impl fmt::Display {
        endpoint.display()
    }

    fn unix(endpoint: &PathBuf) -> Option<Addr> {
        Some(Addr::Unix(endpoint.clone()))
    }

    fn bind(endpoint: &PathBuf, options: TransportOptions) -> io::Result<(Vec<Acceptor>, Address)> {
        let listener = Listener::bind(&Addr::Unix(endpoint.clone()))?;
        Ok((vec![Acceptor::Shm((listener, options.busy_poll))], Address::Shm(endpoint.clone())))
    }

    async fn accept((listener, busy_poll): &(Listener, Duration)) -> io::Result<((Stream, Duration), Address)> {
        let (stream, _) = listener.accept().await?;
        Ok(((stream, *busy_poll), Address::Shm(PathBuf::new())))
    }

    fn admit((socket, busy_poll): (Stream, Duration)) -> io::Result<ShmChannel> {
        ShmChannel::accept(socket, busy_poll)
    }

    async fn connect(endpoint: &PathBuf, options: TransportOptions) -> io::Result<Channel> {
        let socket = Stream::connect(&Addr::Unix(endpoint.clone())).await?;
        ShmChannel::connect(socket, options.busy_poll).await.map(Channel::Shm)
    }

    #[inline]
    fn recv(stream: &ShmChannel, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf, false)
    }

    fn recv_exact(stream: &ShmChannel, buf: BufMut) -> impl Future<Output = (io::Result<usize>, BufMut)> {
        stream.recv(buf, true)
    }

    #[inline]
    fn send(stream: &ShmChannel, bufs: BufList) -> impl Future<Output = io::Result<()>> {
        stream.send(bufs)
    }

    fn shutdown(stream: &ShmChannel) {
        stream.shutdown();
    }
}

/// State of one end, shared by its clones and its listening task.
struct ShmState {
    socket: Stream,
    producer: RefCell<Producer>,
    consumer: RefCell<Consumer>,
    /// Notified when the peer has sent a wake-up, or is gone.
    woken: Notify,
    gone: Cell<bool>,
    shut: Cell<bool>,
    /// Busy-poll time before a side sleeps.
    busy_poll: Duration,
    /// Set when bytes have moved, in either direction, since `since` was set.
    moved: Cell<bool>,
    /// Time when a waiting side first saw that bytes no longer move.
    since: Cell<Instant>,
    /// Byte that wakes the peer.
    wake_byte: Buf,
}

impl ShmState {
    /// Returns true if there are no bytes to receive.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.consumer.borrow().available()? == 0)
    }

    /// Returns true if there is no space to send.
    fn is_full(&self) -> io::Result<bool> {
        Ok(self.producer.borrow().room()? == 0)
    }
}

/// One end of a shared memory connection.  Clones share it.
#[derive(Clone)]
pub(crate) struct ShmChannel(Rc<ShmState>);

impl ShmChannel {
    /// Accepts a connection: creates the memory and passes it to the peer.
    fn accept(socket: Stream, busy_poll: Duration) -> io::Result<Self> {
        let (producer, consumer, fd) = shm::create()?;
        socket.send_fd(fd.as_fd())?;
        Ok(Self::new(socket, producer, consumer, busy_poll))
    }

    /// Connects: receives the memory from the peer.
    async fn connect(socket: Stream, busy_poll: Duration) -> io::Result<Self> {
        let fd = socket.recv_fd().await?;
        let (producer, consumer) = shm::adopt(&fd)?;
        Ok(Self::new(socket, producer, consumer, busy_poll))
    }

    fn new(socket: Stream, producer: Producer, consumer: Consumer, busy_poll: Duration) -> Self {
        let shared = ShmState {
            socket,
            producer: RefCell::new(producer),
            consumer: RefCell::new(consumer),
            woken: Notify::new(),
            gone: Cell::new(false),
            shut: Cell::new(false),
            busy_poll,
            moved: Cell::new(true),
            since: Cell::new(now()),
            wake_byte: Buf::zeroed(1),
        };
        let channel = Self(Rc::new(shared));
        drop(spawn(listen(channel.0.socket.clone(), Rc::downgrade(&channel.0))));
        channel
    }

    /// Waits until `idle` returns false, first by busy-polling, then by sleeping.  `idle` tells whether there is no
    /// work; `sleep` does so after announcing to the peer that this side sleeps.
    async fn wait(
        &self,
        idle: impl Fn(&ShmState) -> io::Result<bool>,
        sleep: impl Fn(&ShmState) -> io::Result<bool>,
    ) -> io::Result<()> {
        let shared = &*self.0;
        shared.moved.set(true);
        let mut polls = 0;
        while idle(shared)? && !shared.gone.get() && !shared.shut.get() {
            // The first round yields at once, to tasks that were just woken by the last bytes.
            for _ in 0..std::mem::replace(&mut polls, POLLS_IN_A_ROW) {
                // No pause instruction: a hypervisor may take it for idleness and deschedule the virtual CPU.
                if !idle(shared)? {
                    return Ok(());
                }
            }
            let time = now();
            if shared.moved.replace(false) {
                shared.since.set(time);
            }
            if time.since(shared.since.get()) < shared.busy_poll {
                yield_now().await;
                continue;
            }
            let woken = shared.woken.wait();
            if sleep(shared)? && !shared.gone.get() && !shared.shut.get() {
                woken.await;
            }
        }
        Ok(())
    }

    /// Wakes the peer.
    async fn wake_peer(&self) {
        // The listening task notices that the peer is gone.
        let _ = self.0.socket.send(self.0.wake_byte.clone()).await;
    }

    /// Receives the available bytes, or (`all`) until the buffer is full.  Returns 0 at the end of the stream.
    async fn recv(&self, mut buf: BufMut, all: bool) -> (io::Result<usize>, BufMut) {
        let before = buf.len();
        loop {
            let (len, sleeps) = match self.0.consumer.borrow_mut().read(buf.spare_mut()) {
                Ok(read) => read,
                Err(error) => return (Err(error), buf),
            };
            buf.set_len(buf.len() + len);
            if len > 0 {
                self.0.moved.set(true);
            }
            if sleeps {
                self.wake_peer().await;
            }
            let got = buf.len() - before;
            if buf.spare() == 0 || (got > 0 && !all) {
                return (Ok(got), buf);
            }
            if let Err(error) = self.wait(ShmState::is_empty, |shared| shared.consumer.borrow_mut().sleep()).await {
                return (Err(error), buf);
            }
            // Bytes that the peer wrote before it went are still received.
            let over = self.0.shut.get() || (self.0.gone.get() && self.0.is_empty().unwrap_or(true));
            if over {
                let result = if all { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(0) };
                return (result, buf);
            }
        }
    }

    /// Sends all bytes.
    async fn send(&self, bufs: BufList) -> io::Result<()> {
        let mut unseen = 0;
        for part in bufs.parts() {
            let mut rest = &part[..];
            while !rest.is_empty() {
                if self.0.gone.get() || self.0.shut.get() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                let len = self.0.producer.borrow_mut().write(&rest[..rest.len().min(PUBLISH)])?;
                rest = &rest[len..];
                unseen += len;
                if len > 0 && unseen < PUBLISH {
                    continue;
                }
                unseen = 0;
                self.publish().await;
                if len == 0 {
                    self.wait(ShmState::is_full, |shared| shared.producer.borrow_mut().sleep()).await?;
                }
            }
        }
        self.publish().await;
        Ok(())
    }

    async fn publish(&self) {
        self.0.moved.set(true);
        let sleeps = self.0.producer.borrow_mut().publish();
        if sleeps {
            self.wake_peer().await;
        }
    }

    /// Shuts down both directions.
    fn shutdown(&self) {
        self.0.shut.set(true);
        self.0.socket.shutdown();
        self.0.woken.notify_all();
    }
}

/// Receives wake-ups of the peer, until the peer is gone or this side is closed.
async fn listen(socket: Stream, shared: std::rc::Weak<ShmState>) {
    let mut buf = BufMut::with_capacity(64);
    loop {
        buf.clear();
        let (result, back) = socket.recv(buf).await;
        buf = back;
        let Some(shared) = shared.upgrade() else { return };
        let gone = !matches!(result, Ok(1..));
        if gone {
            shared.gone.set(true);
        }
        shared.woken.notify_all();
        if gone {
            return;
        }
    }
}

impl Drop for ShmState {
    fn drop(&mut self) {
        // The listening task holds the socket too, and ends when it is shut down.
        self.socket.shutdown();
    }
}
