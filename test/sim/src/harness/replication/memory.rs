//! Persistent memory of a gateway, as its process has it: a process that is dead stores nothing, and may die between two
//! stores.

use std::cell::Cell;
use std::rc::Rc;

use forebay_reactor::pmem::PersistentMemory;

use crate::pmem::SimPmem;
use crate::world::CrashKind;

/// Memory of a machine, mapped by one process.
pub(super) struct MappedMemory {
    memory: SimPmem,
    /// Set while the process lives.
    alive: Rc<Cell<bool>>,
    /// Stores and fences until the process dies, and how.
    fuse: Cell<Option<(u32, CrashKind)>>,
    /// Called in the middle of the last store: it must not use anything of the process.
    dies: Box<dyn Fn(CrashKind)>,
}

impl MappedMemory {
    pub(super) fn new(memory: SimPmem, alive: Rc<Cell<bool>>, dies: Box<dyn Fn(CrashKind)>) -> Rc<Self> {
        Rc::new(Self { memory, alive, fuse: Cell::new(None), dies })
    }

    /// Lets the process die after some more stores and fences; `None` lets it live.
    pub(super) fn set_fuse(&self, fuse: Option<(u32, CrashKind)>) {
        self.fuse.set(fuse);
    }

    /// Counts a store or a fence; returns false if the process is dead before it.
    fn count(&self) -> bool {
        if !self.alive.get() {
            return false;
        }
        match self.fuse.get() {
            Some((0, kind)) => {
                self.fuse.set(None);
                self.alive.set(false);
                (self.dies)(kind);
                false
            }
            fuse => {
                self.fuse.set(fuse.map(|(left, kind)| (left - 1, kind)));
                true
            }
        }
    }
}

impl PersistentMemory for MappedMemory {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn load(&self, at: u64, out: &mut [u8]) {
        self.memory.load(at, out);
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        if self.count() {
            self.memory.store(at, bytes);
        }
    }

    fn store_word(&self, at: u64, word: u64) {
        if self.count() {
            self.memory.store_word(at, word);
        }
    }

    fn fence(&self) {
        if self.count() {
            self.memory.fence();
        }
    }

    fn store_cached(&self, at: u64, bytes: &[u8]) {
        if self.count() {
            self.memory.store_cached(at, bytes);
        }
    }

    fn flush(&self, at: u64, len: u64) {
        if self.count() {
            self.memory.flush(at, len);
        }
    }
}
