//! Writer's side of a window: writes by a device or by messages.

use std::io;
use std::rc::Rc;

use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::{Buf, BufList};

use super::{
    DONE, FAILED, KIND_PERSIST, KIND_WRITE, MemoryWindow, NOT_DURABLE, PAST_THE_END, REQUEST_LEN, WRITE_MAX,
    WindowDescriptor, WriteError,
};
use crate::connection::Connection;
use crate::message::{Message, MessageRole};
use crate::wire::codec::PayloadWriter;
use crate::wire::entity;

impl Connection {
    /// Opens a window of `len` zeroes to the peer of this connection.  Over RDMA in crc mode the memory is registered
    /// with the device.  The window stays open across reconnects, until it is dropped or the connection ends.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn window(&self, len: usize) -> io::Result<MemoryWindow> {
        MemoryWindow::open(&self.conn, len)
    }

    /// Opens a window onto `len` bytes of persistent memory from `at` on, as [`window`](Self::window) does.  What the peer
    /// writes is durable after a [`flush`](PersistentMemory::flush) of its range and a fence.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn window_onto(&self, memory: Rc<dyn PersistentMemory>, at: u64, len: u64) -> io::Result<MemoryWindow> {
        MemoryWindow::open_onto(&self.conn, memory, at, len)
    }

    /// Returns true if writes into the peer's window are currently made by a device, without involving the peer's
    /// processor.
    pub fn writes_one_sided(&self) -> bool {
        self.conn.windows.device().is_some()
    }

    /// Writes into the peer's window; complete when the bytes are there.
    ///
    /// Concurrent writes are not ordered among each other or with messages: await one before starting the other.
    ///
    /// # Errors
    /// When the range does not fit, the window is closed, or the connection ends before completion is known.  With a
    /// device, losing the stream fails the write; with messages, the write continues on the next stream.
    pub async fn write(
        &self,
        place: WindowDescriptor,
        offset: u64,
        data: impl Into<BufList>,
    ) -> Result<(), WriteError> {
        let data = data.into();
        self.check_window(place, offset, data.len() as u64)?;
        match self.conn.windows.device() {
            Some(stream) if place.key != 0 => {
                let written = stream.write(place.target(), offset, data).await;
                written.map_err(|error| WriteError::Io(error.kind(), error.to_string()))
            }
            _ => self.write_by_messages(place, offset, data).await,
        }
    }

    /// Waits until the bytes of a range that were written before are durable in the peer's window.
    ///
    /// # Errors
    /// `NotDurable` where the owner cannot do so; otherwise as [`write`](Self::write).
    pub async fn persist(&self, place: WindowDescriptor, offset: u64, len: u64) -> Result<(), WriteError> {
        self.check_window(place, offset, len)?;
        self.ask_window(KIND_PERSIST, place, (offset, len), BufList::new()).await
    }

    fn check_window(&self, place: WindowDescriptor, offset: u64, len: u64) -> Result<(), WriteError> {
        if ![0, entity::FOREBAY].contains(&self.entity()) {
            return Err(WriteError::Unsupported);
        }
        place.check(offset, len)
    }

    async fn write_by_messages(&self, place: WindowDescriptor, offset: u64, data: BufList) -> Result<(), WriteError> {
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
        place: WindowDescriptor,
        (offset, len): (u64, u64),
        data: BufList,
    ) -> Result<(), WriteError> {
        let mut front = PayloadWriter::new();
        front.u64(place.id).u64(offset).u64(len);
        debug_assert_eq!(front.len(), REQUEST_LEN);
        let mut message = Message::new(kind).front(Buf::copy_of(&front.finish())).data(data);
        message.role = MessageRole::Window;
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
