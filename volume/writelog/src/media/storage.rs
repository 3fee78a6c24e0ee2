//! Storage of append blocks: a file or block device with direct I/O, or persistent memory.

use std::io;
use std::rc::Rc;

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::File;
use forebay_reactor::pmem::PersistentMemory;

use super::shared_sync::SharedSync;

/// Storage of append blocks and superblocks.  Offsets and lengths are in bytes.
#[derive(Clone)]
pub(crate) enum BlockStorage {
    /// File or block device, written with direct I/O.
    File(File, Rc<SharedSync>),
    /// Persistent memory.  A write is durable once it has ended: its stores are covered by a fence.
    Memory(Rc<dyn PersistentMemory>),
}

impl BlockStorage {
    /// Returns whether a part of a write needs no copy: it is whole units, and aligned where direct I/O requires that.
    pub(crate) fn takes(&self, part: &Buf, unit: usize) -> bool {
        match self {
            Self::File(..) => part.is_aligned(unit),
            Self::Memory(_) => part.len().is_multiple_of(unit),
        }
    }

    /// Reads exactly `len` bytes.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) async fn read_exact_at(&self, at: u64, len: usize) -> io::Result<BufMut> {
        match self {
            Self::File(file, _) => file.read_exact_at(at, len).await,
            Self::Memory(memory) => {
                let mut bytes = BufMut::zeroed(len);
                memory.load(at, &mut bytes);
                Ok(bytes)
            }
        }
    }

    /// Writes `bytes`; they are durable after a [`sync_data`](Self::sync_data) that began later.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) async fn write_at(&self, bytes: impl Into<BufList>, at: u64) -> io::Result<()> {
        match self {
            Self::File(file, _) => file.write_at(bytes.into(), at).await,
            Self::Memory(memory) => {
                store(&**memory, &bytes.into(), at);
                Ok(())
            }
        }
    }

    /// Writes `bytes`, durably.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) async fn write_durable_at(&self, bytes: impl Into<BufList>, at: u64) -> io::Result<()> {
        match self {
            Self::File(file, _) => file.write_durable_at(bytes.into(), at).await,
            Self::Memory(memory) => {
                store(&**memory, &bytes.into(), at);
                memory.fence();
                Ok(())
            }
        }
    }

    /// Starts writing back what a device has stored in persistent memory; the next durable write or
    /// [`sync_data`](Self::sync_data) makes it durable.  No device stores in files.
    pub(crate) fn flush(&self, at: u64, len: u64) {
        if let Self::Memory(memory) = self {
            memory.flush(at, len);
        }
    }

    /// Returns the persistent memory, if it is some.
    pub(crate) fn memory(&self) -> Option<&Rc<dyn PersistentMemory>> {
        match self {
            Self::File(..) => None,
            Self::Memory(memory) => Some(memory),
        }
    }

    /// Makes everything written so far durable.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) async fn sync_data(&self) -> io::Result<()> {
        match self {
            Self::File(file, syncs) => syncs.sync(file).await,
            Self::Memory(memory) => {
                memory.fence();
                Ok(())
            }
        }
    }

    /// Stores what memory holds at these places again, durably: stores of a killed process may be readable, and still be in
    /// the processor's caches only, which no later fence writes back.  A file needs a
    /// [`sync_data`](Self::sync_data) only.
    pub(crate) fn store_again(&self, places: impl IntoIterator<Item = (u64, usize)>) {
        let Self::Memory(memory) = self else { return };
        for (at, len) in places {
            let mut bytes = BufMut::zeroed(len);
            memory.load(at, &mut bytes);
            memory.store(at, &bytes);
        }
        memory.fence();
    }
}

fn store(memory: &dyn PersistentMemory, bytes: &BufList, mut at: u64) {
    for part in bytes.parts() {
        memory.store(at, part);
        at += part.len() as u64;
    }
}
