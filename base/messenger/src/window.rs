//! One-sided writes: a peer writes into memory of ours that we have opened to it, without our handlers' doing.
//!
//! Over RDMA in crc mode the device does it, and this process takes no part; everywhere else, and in secure mode, where
//! nothing may travel in the clear, messages do the same.  Either way a write is complete when the bytes are in the window,
//! and [`persist`](crate::Connection::persist) is complete when the window's owner has made them durable.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use forebay_reactor::rdma::{self, RdmaStream};
use forebay_reactor::{Buf, BufList, BufMut, random, spawn};

use crate::connection::{Conn, Connection, SendError};
use crate::message::{Message, Role};
use crate::wire::codec::{Malformed, Reader, Writer};
use crate::wire::entity;

/// Bytes of a [`Place`].
pub const PLACE_LEN: usize = 28;

/// Types of messages of the role `Window`, and of the replies to them.
const KIND_WRITE: u16 = 1;
const KIND_PERSIST: u16 = 2;
const DONE: u16 = 0;
const NO_WINDOW: u16 = 1;
const PAST_THE_END: u16 = 2;
const NOT_DURABLE: u16 = 3;
const FAILED: u16 = 4;

/// A longer write travels in several messages.
const WRITE_MAX: usize = 4 << 20;
/// Bytes of the window's number, offset and length in front of a request.
const ASK_LEN: usize = 24;

/// Why a write into a peer's window, or making it durable, was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The connection ended, or what was to be sent was refused.  After `Ended` the bytes may or may not be there.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The transport failed halfway; the bytes may or may not be there.
    #[error("the write was not completed: {1}")]
    Io(io::ErrorKind, String),
    /// The peer has no such window, or has closed it.
    #[error("the peer has no window {0:#x}, or has closed it")]
    NoWindow(u64),
    /// It would go past the window's end.
    #[error("{len} bytes at {offset} are more than the window's {window}")]
    PastTheEnd {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the window.
        window: u64,
    },
    /// The window's memory is not backed by anything that lasts.
    #[error("the window's memory is not durable, and its owner has nothing that makes it so")]
    NotDurable,
    /// The owner could not make it durable.
    #[error("the peer could not make it durable: {0}")]
    Failed(String),
    /// The peer is not of our kind.
    #[error("the peer knows no windows")]
    Unsupported,
}

/// Names a window to the peer that may write into it; sent to it in a message of one's own, as [`encode`](Self::encode) has
/// it.  It is of use on the connection that the window was opened on, and on no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The window's number.
    id: u64,
    /// Bytes.
    len: u64,
    /// Where the device finds it: address and key; the key is 0 where none does.
    addr: u64,
    key: u32,
}

impl Place {
    /// Bytes of the window.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// There is no room in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes: number, length, address, key, little-endian.
    pub fn encode(&self) -> [u8; PLACE_LEN] {
        let mut writer = Writer::new();
        writer.u64(self.id).u64(self.len).u64(self.addr).u32(self.key);
        writer.finish().try_into().expect("three numbers of 8 bytes and one of 4")
    }

    /// Reads one.
    ///
    /// # Errors
    /// When it has another length.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes, "the place of a window");
        let place = Self { id: reader.u64()?, len: reader.u64()?, addr: reader.u64()?, key: reader.u32()? };
        if reader.rest().is_empty() { Ok(place) } else { Err(reader.malformed()) }
    }

    pub(crate) fn check(&self, offset: u64, len: u64) -> Result<(), WriteError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(WriteError::PastTheEnd { offset, len, window: self.len })
    }
}

enum Memory {
    /// Only messages write to it.
    Own(RefCell<BufMut>),
    /// A device writes to it too.
    Registered(rdma::Window),
}

type Persisting = Pin<Box<dyn Future<Output = io::Result<()>>>>;
type Persist = Rc<dyn Fn(Content, u64, u64) -> Persisting>;

/// What is behind a window.
pub(crate) struct Inner {
    id: u64,
    len: u64,
    memory: Memory,
    persist: RefCell<Option<Persist>>,
    writes: Cell<u64>,
}

/// Memory of ours that the peer of one connection may write into.  It is closed when this is dropped: what the peer writes
/// from then on is refused.  It begins as zeroes.
pub struct Window {
    inner: Rc<Inner>,
    conn: Weak<Conn>,
}

impl Window {
    pub(crate) fn open(conn: &Rc<Conn>, len: usize) -> io::Result<Self> {
        let memory = match &*conn.rdma.borrow() {
            Some(stream) => Memory::Registered(stream.window(len)?),
            None => Memory::Own(RefCell::new(BufMut::zeroed(len))),
        };
        let (id, len) = (random().max(1), len as u64);
        let inner = Rc::new(Inner { id, len, memory, persist: RefCell::default(), writes: Cell::new(0) });
        conn.windows.borrow_mut().insert(id, inner.clone());
        Ok(Self { inner, conn: Rc::downgrade(conn) })
    }

    /// What the peer needs to know to write into it.
    pub fn place(&self) -> Place {
        let (addr, key) = match &self.inner.memory {
            Memory::Own(_) => (0, 0),
            Memory::Registered(window) => (window.place().addr, window.place().key),
        };
        Place { id: self.inner.id, len: self.inner.len, addr, key }
    }

    /// How bytes of it are made durable: called with the content, and the offset and the length that the peer wants so.
    /// Without this the peer is told that they cannot be.
    pub fn on_persist<F>(&self, persist: impl Fn(Content, u64, u64) -> F + 'static)
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let persist = move |content, offset, len| -> Persisting { Box::pin(persist(content, offset, len)) };
        *self.inner.persist.borrow_mut() = Some(Rc::new(persist));
    }

    /// Copies out `out.len()` bytes from `offset` on.  The peer may be writing them: who needs them whole is told by the
    /// peer, in a message or by its asking that they persist.
    ///
    /// # Panics
    /// When they are not all in the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.inner.read(offset, out);
    }

    /// Writes that came as messages; a device's are not counted.
    pub fn writes_by_message(&self) -> u64 {
        self.inner.writes.get()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.upgrade() {
            let closed = conn.windows.borrow_mut().remove(&self.inner.id);
            drop(closed);
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({:#x}, {} bytes)", self.inner.id, self.inner.len)
    }
}

/// What is in a window, for who makes it durable.
pub struct Content(Rc<Inner>);

impl Content {
    /// Copies out `out.len()` bytes from `offset` on, as [`Window::read`] does.
    ///
    /// # Panics
    /// When they are not all in the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.0.read(offset, out);
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Content({} bytes)", self.0.len)
    }
}

impl Inner {
    /// No device writes to it any more, whoever keeps it.
    pub(crate) fn revoke(&self) {
        match &self.memory {
            Memory::Own(_) => {}
            Memory::Registered(window) => window.revoke(),
        }
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        match &self.memory {
            Memory::Own(memory) => out.copy_from_slice(&memory.borrow()[offset..offset + out.len()]),
            Memory::Registered(window) => window.read(offset, out),
        }
    }

    fn put(&self, offset: u64, data: &BufList) {
        let mut at = offset as usize;
        for part in data.parts() {
            match &self.memory {
                Memory::Own(memory) => memory.borrow_mut()[at..at + part.len()].copy_from_slice(part),
                Memory::Registered(window) => window.put(at, part),
            }
            at += part.len();
        }
        self.writes.set(self.writes.get() + 1);
    }
}

/// Does what a message of the role `Window` asks.  It is called where handlers are.
pub(crate) fn asked(conn: &Rc<Conn>, message: Message) {
    let (code, persisting) = match look(conn, &message) {
        Ok(persisting) => (DONE, persisting),
        Err(code) => (code, None),
    };
    let Some(persisting) = persisting else { return answer(conn, message, code, String::new()) };
    let conn = conn.clone();
    drop(spawn(async move {
        match persisting.await {
            Ok(()) => answer(&conn, message, DONE, String::new()),
            Err(error) => answer(&conn, message, FAILED, error.to_string()),
        }
    }));
}

/// Writes what is to be written, or says how what is to persist does.
fn look(conn: &Conn, message: &Message) -> Result<Option<Persisting>, u16> {
    let front = message.front.clone().into_contiguous();
    let mut reader = Reader::new(&front, "a request to a window");
    let (Ok(id), Ok(offset), Ok(len)) = (reader.u64(), reader.u64(), reader.u64()) else { return Err(NO_WINDOW) };
    let window = conn.windows.borrow().get(&id).cloned().ok_or(NO_WINDOW)?;
    if offset.checked_add(len).is_none_or(|end| end > window.len) {
        return Err(PAST_THE_END);
    }
    match message.kind {
        KIND_WRITE if message.data.len() as u64 == len => {
            window.put(offset, &message.data);
            Ok(None)
        }
        KIND_WRITE => Err(PAST_THE_END),
        KIND_PERSIST => {
            let persist = window.persist.borrow().clone().ok_or(NOT_DURABLE)?;
            Ok(Some(persist(Content(window), offset, len)))
        }
        _ => Err(NO_WINDOW),
    }
}

fn answer(conn: &Rc<Conn>, mut asked: Message, code: u16, text: String) {
    let mut reply = asked.reply(code).front(Buf::copy_of(text.as_bytes()));
    // What was written is in the window; only its share of the budget is kept until the answer is queued.
    asked.data = BufList::new();
    if !matches!(conn.offer(&mut reply, &mut None), Ok(false)) {
        return;
    }
    let conn = conn.clone();
    drop(spawn(async move {
        // Who asks more than fits into the queue waits for room, and with it the peer's budget.
        let _ = conn.queue(reply, None).await;
        drop(asked);
    }));
}

impl Connection {
    /// Opens `len` bytes of memory to the peer of this connection.  Over RDMA in crc mode they are registered with the
    /// device.  They stay open while streams come and go, until the window is dropped or the connection ends.
    ///
    /// # Errors
    /// When no memory can be registered.
    pub fn window(&self, len: usize) -> io::Result<Window> {
        Window::open(&self.conn, len)
    }

    /// Writes into the peer's window are made by a device, without its processor, at the moment.
    pub fn writes_one_sided(&self) -> bool {
        self.conn.rdma.borrow().is_some()
    }

    /// Writes into the peer's window; complete when the bytes are there.
    ///
    /// Writes under way together have no order between them, nor with messages: wait for the one before the other.
    ///
    /// # Errors
    /// When they do not fit, the window is closed, or the connection ends before it is known that they are there.  Where a
    /// device writes, losing the stream fails the write; where messages do, it goes on over the next one.
    pub async fn write(&self, place: Place, offset: u64, data: impl Into<BufList>) -> Result<(), WriteError> {
        let data = data.into();
        self.check_window(place, offset, data.len() as u64)?;
        let stream = self.conn.rdma.borrow().clone();
        match stream {
            Some(stream) if place.key != 0 => write_by_device(&stream, place, offset, &data).await,
            _ => self.write_by_messages(place, offset, data).await,
        }
    }

    /// Waits until bytes of the peer's window are durable that were there before.
    ///
    /// # Errors
    /// `NotDurable` where they cannot be; as [`write`](Self::write).
    pub async fn persist(&self, place: Place, offset: u64, len: u64) -> Result<(), WriteError> {
        self.check_window(place, offset, len)?;
        self.ask_window(KIND_PERSIST, place, (offset, len), BufList::new()).await
    }

    fn check_window(&self, place: Place, offset: u64, len: u64) -> Result<(), WriteError> {
        if ![0, entity::FOREBAY].contains(&self.entity()) {
            return Err(WriteError::Unsupported);
        }
        place.check(offset, len)
    }

    async fn write_by_messages(&self, place: Place, offset: u64, data: BufList) -> Result<(), WriteError> {
        let mut at = 0;
        while at < data.len() {
            let len = (data.len() - at).min(WRITE_MAX);
            let range = (offset + at as u64, len as u64);
            self.ask_window(KIND_WRITE, place, range, data.slice(at..at + len)).await?;
            at += len;
        }
        Ok(())
    }

    async fn ask_window(
        &self,
        kind: u16,
        place: Place,
        (offset, len): (u64, u64),
        data: BufList,
    ) -> Result<(), WriteError> {
        let mut front = Writer::new();
        front.u64(place.id).u64(offset).u64(len);
        debug_assert_eq!(front.len(), ASK_LEN);
        let mut message = Message::new(kind).front(Buf::copy_of(&front.finish())).data(data);
        message.role = Role::Window;
        let reply = self.ask(message).await?;
        match reply.kind {
            DONE => Ok(()),
            PAST_THE_END => Err(WriteError::PastTheEnd { offset, len, window: place.len }),
            NOT_DURABLE => Err(WriteError::NotDurable),
            FAILED => Err(WriteError::Failed(String::from_utf8_lossy(&reply.front.to_vec()).into_owned())),
            _ => Err(WriteError::NoWindow(place.id)),
        }
    }
}

async fn write_by_device(stream: &RdmaStream, place: Place, offset: u64, data: &BufList) -> Result<(), WriteError> {
    let wrong = |error: io::Error| WriteError::Io(error.kind(), error.to_string());
    let target = rdma::Place { addr: place.addr, key: place.key, len: place.len.min(u64::from(u32::MAX)) as u32 };
    let mut at = offset;
    for part in data.parts() {
        let offset = u32::try_from(at).map_err(|_| wrong(io::ErrorKind::InvalidInput.into()))?;
        stream.write(target, offset, part.clone()).await.map_err(wrong)?;
        at += part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_out_as_they_went_in() {
        let place = Place { id: 1 << 60, len: 77, addr: 0xdead_beef_0000, key: 9 };
        assert_eq!(Place::decode(&place.encode()), Ok(place));
        for wrong in [0, 27, 29, 100] {
            assert!(Place::decode(&vec![1; wrong]).is_err(), "{wrong} bytes");
        }
        assert!(place.check(70, 7).is_ok() && place.check(77, 0).is_ok());
        for (offset, len) in [(70, 8), (78, 0), (u64::MAX, 2)] {
            assert_eq!(place.check(offset, len), Err(WriteError::PastTheEnd { offset, len, window: 77 }));
        }
    }
}
