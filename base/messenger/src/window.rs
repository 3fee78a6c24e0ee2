//! One-sided writes: a peer writes into a memory window opened to it, without involving the owner's handlers.
//!
//! Over RDMA in crc mode the device writes, without this process; everywhere else, and in secure mode, where nothing
//! may be sent in the clear, messages do the same.  Either way a write is complete when the bytes are in the window,
//! and [`persist`](crate::Connection::persist) is complete when the window's owner has made them durable.

mod serve;
mod table;
mod write;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::rdma;
use forebay_reactor::{BufList, BufMut, random};

use crate::connection::{Conn, SendError};
use crate::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

pub(crate) use serve::execute;
pub(crate) use table::WindowTable;

/// Length of an encoded [`WindowDescriptor`] in bytes.
pub const WINDOW_DESCRIPTOR_LEN: usize = 28;

/// Types of messages of the role `Window`, and of their replies.
const KIND_WRITE: u16 = 1;
const KIND_PERSIST: u16 = 2;
const DONE: u16 = 0;
const NO_WINDOW: u16 = 1;
const PAST_THE_END: u16 = 2;
const NOT_DURABLE: u16 = 3;
const FAILED: u16 = 4;

/// Maximum number of bytes written by one message; a longer write takes several.
const WRITE_MAX: usize = 4 << 20;
/// Length in bytes of a request's front: window ID, offset and length.
const REQUEST_LEN: usize = 24;

/// Error of a write into a peer's window, or of making it durable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// Connection ended, or message rejected.  After `Ended` the bytes may or may not be in the window.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Transport error halfway; the bytes may or may not be in the window.
    #[error("cannot complete the write: {1}")]
    Io(io::ErrorKind, String),
    /// Window unknown to the peer, or closed.
    #[error("the peer has no open window {0:#x}")]
    NoWindow(u64),
    /// Range past the end of the window.
    #[error("{len} bytes at offset {offset} exceed the window of {window} bytes")]
    PastTheEnd {
        /// Offset of the first byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Length of the window in bytes.
        window: u64,
    },
    /// Window whose memory the owner cannot make durable.
    #[error("the peer cannot make the memory of the window durable")]
    NotDurable,
    /// Owner's error of making it durable.
    #[error("the peer failed to make the range durable: {0}")]
    Failed(String),
    /// Peer that is not Forebay and has no windows.
    #[error("the peer does not support memory windows")]
    Unsupported,
}

/// Descriptor of a window for the peer that may write into it; the application sends it in a message, in the form of
/// [`encode`](Self::encode).  Valid only on the connection that the window was opened on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowDescriptor {
    /// Window ID.
    id: u64,
    /// Length in bytes.
    len: u64,
    /// Address and key for an RDMA device; the key is 0 where there is none.
    addr: u64,
    key: u32,
}

impl WindowDescriptor {
    /// Returns the window ID, which its owner has drawn at random.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns true if a device writes into the window where both sides have one.
    pub fn is_one_sided(&self) -> bool {
        self.key != 0
    }

    /// Returns the length of the window in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the window has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Encodes window ID, length, address and key, little-endian.
    pub fn encode(&self) -> [u8; WINDOW_DESCRIPTOR_LEN] {
        let mut writer = PayloadWriter::new();
        writer.u64(self.id).u64(self.len).u64(self.addr).u32(self.key);
        writer.finish().try_into().expect("three numbers of 8 bytes and one of 4")
    }

    /// Decodes a descriptor.
    ///
    /// # Errors
    /// When the length is not [`WINDOW_DESCRIPTOR_LEN`].
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(bytes, "the place of a window");
        let place = Self { id: reader.u64()?, len: reader.u64()?, addr: reader.u64()?, key: reader.u32()? };
        if reader.rest().is_empty() { Ok(place) } else { Err(reader.malformed()) }
    }

    /// Returns the window as an RDMA device has it.
    fn target(&self) -> rdma::RemoteWindow {
        rdma::RemoteWindow { addr: self.addr, key: self.key, len: self.len }
    }

    pub(crate) fn check(&self, offset: u64, len: u64) -> Result<(), WriteError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(WriteError::PastTheEnd { offset, len, window: self.len })
    }
}

enum Memory {
    /// Memory written by messages only.
    Own(RefCell<BufMut>),
    /// Memory written by a device too.
    Registered(rdma::RdmaWindow),
    /// Persistent memory from an offset on, written by messages only.
    Persistent(Rc<dyn PersistentMemory>, u64),
}

type Persisting = Pin<Box<dyn Future<Output = io::Result<()>>>>;
type Persist = Rc<dyn Fn(WindowContent, u64, u64) -> Persisting>;

/// Window state, shared with the connection.
pub(crate) struct WindowState {
    id: u64,
    len: u64,
    memory: Memory,
    persist: RefCell<Option<Persist>>,
    writes: Cell<u64>,
}

/// Memory window that the peer of one connection may write into.  Dropping it closes the window: when that returns, no write
/// of the peer arrives any more, by device or message, whether it was sent before or after.
pub struct MemoryWindow {
    inner: Rc<WindowState>,
    conn: Weak<Conn>,
}

impl MemoryWindow {
    pub(crate) fn open(conn: &Rc<Conn>, len: usize) -> io::Result<Self> {
        let memory = match conn.windows.device() {
            Some(stream) => Memory::Registered(stream.window(len)?),
            None => Memory::Own(RefCell::new(BufMut::zeroed(len))),
        };
        Ok(Self::list(conn, memory, len as u64))
    }

    pub(crate) fn open_onto(conn: &Rc<Conn>, memory: Rc<dyn PersistentMemory>, at: u64, len: u64) -> io::Result<Self> {
        if at.checked_add(len).is_none_or(|end| end > memory.len()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the window exceeds the memory"));
        }
        let memory = match (conn.windows.device(), memory.clone().file()) {
            (Some(stream), Some(file)) => Memory::Registered(stream.window_onto(file, at, len)?),
            _ => Memory::Persistent(memory, at),
        };
        Ok(Self::list(conn, memory, len))
    }

    fn list(conn: &Rc<Conn>, memory: Memory, len: u64) -> Self {
        let inner = Rc::new(WindowState {
            id: random().max(1),
            len,
            memory,
            persist: RefCell::default(),
            writes: Cell::new(0),
        });
        // A connection that has ended has revoked its windows already.
        if !conn.is_closed() {
            conn.windows.insert(inner.clone());
        }
        Self { inner, conn: Rc::downgrade(conn) }
    }

    /// Returns the descriptor that the peer needs to write into the window.
    pub fn descriptor(&self) -> WindowDescriptor {
        let (addr, key) = match &self.inner.memory {
            Memory::Own(_) | Memory::Persistent(..) => (0, 0),
            Memory::Registered(window) => (window.place().addr, window.place().key),
        };
        WindowDescriptor { id: self.inner.id, len: self.inner.len, addr, key }
    }

    /// Sets the function that makes bytes durable: called with the content, and the offset and length that the peer
    /// requests.  Without one, such requests fail with `NotDurable`.
    pub fn on_persist<F>(&self, persist: impl Fn(WindowContent, u64, u64) -> F + 'static)
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let persist = move |content, offset, len| -> Persisting { Box::pin(persist(content, offset, len)) };
        *self.inner.persist.borrow_mut() = Some(Rc::new(persist));
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.  The peer may be writing them at the same time: it must
    /// signal that they are complete, by a message or by a persist request.
    ///
    /// # Panics
    /// When the range is not inside the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.inner.read(offset, out);
    }

    /// Returns the number of writes received as messages; writes by a device are not counted.
    pub fn writes_by_message(&self) -> u64 {
        self.inner.writes.get()
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.upgrade() {
            conn.windows.remove(self.inner.id);
        }
        // What is being made durable may still refer to it.
        self.inner.revoke();
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryWindow({:#x}, {} bytes)", self.inner.id, self.inner.len)
    }
}

/// Content of a window, for the function that makes it durable.
pub struct WindowContent(Rc<WindowState>);

impl WindowContent {
    /// Copies `out.len()` bytes from `offset` on into `out`, as [`MemoryWindow::read`] does.
    ///
    /// # Panics
    /// When the range is not inside the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.0.read(offset, out);
    }
}

impl fmt::Debug for WindowContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WindowContent({} bytes)", self.0.len)
    }
}

impl WindowState {
    /// Revokes device access, even while the window is referenced.
    fn revoke(&self) {
        match &self.memory {
            Memory::Own(_) | Memory::Persistent(..) => {}
            Memory::Registered(window) => window.revoke(),
        }
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        match &self.memory {
            Memory::Own(memory) => out.copy_from_slice(&memory.borrow()[offset..offset + out.len()]),
            Memory::Registered(window) => window.read(offset, out),
            Memory::Persistent(memory, base) => memory.load(base + offset as u64, out),
        }
    }

    fn put(&self, offset: u64, data: &BufList) {
        let mut at = offset as usize;
        for part in data.parts() {
            match &self.memory {
                Memory::Own(memory) => memory.borrow_mut()[at..at + part.len()].copy_from_slice(part),
                Memory::Registered(window) => window.put(at, part),
                Memory::Persistent(memory, base) => memory.store_cached(base + at as u64, part),
            }
            at += part.len();
        }
        self.writes.set(self.writes.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_out_as_they_went_in() {
        let place = WindowDescriptor { id: 1 << 60, len: 77, addr: 0xdead_beef_0000, key: 9 };
        assert_eq!(WindowDescriptor::decode(&place.encode()), Ok(place));
        for wrong in [0, 27, 29, 100] {
            assert!(WindowDescriptor::decode(&vec![1; wrong]).is_err(), "{wrong} bytes");
        }
        assert!(place.check(70, 7).is_ok() && place.check(77, 0).is_ok());
        for (offset, len) in [(70, 8), (78, 0), (u64::MAX, 2)] {
            assert_eq!(place.check(offset, len), Err(WriteError::PastTheEnd { offset, len, window: 77 }));
        }
    }
}
