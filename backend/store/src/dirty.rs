//! Objects that the next checkpoint must store.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::format::PAGE_BLOCKS;
use crate::format::page::MapSlot;
use crate::object::StoreObject;

/// Approximate size of the record of a dirty object, in bytes.
const RECORD_BYTES: usize = 256;

/// Dirty objects, and the number of their dirty map pages.
///
/// # Invariants
/// 1. An object whose dirty round is the current one is listed exactly once.
/// 2. `pages` is the number of map pages of all objects that are marked dirty.
pub struct DirtyObjects {
    /// Objects changed in this round, in order of their first change.
    listed: RefCell<Vec<Rc<StoreObject>>>,
    pages: Cell<usize>,
    /// Checkpoint round: one more than the number of checkpoints begun since the store was opened.
    round: Cell<u64>,
}

impl Default for DirtyObjects {
    fn default() -> Self {
        // Round 0 means clean.
        Self { listed: RefCell::default(), pages: Cell::new(0), round: Cell::new(1) }
    }
}

impl DirtyObjects {
    /// Returns the approximate size of what the next checkpoint stores for the objects, in bytes.
    pub fn bytes(&self) -> usize {
        let page = PAGE_BLOCKS as usize * size_of::<MapSlot>();
        self.pages.get() * page + self.listed.borrow().len() * RECORD_BYTES
    }

    /// Returns whether the next checkpoint stores the object.
    pub fn contains(&self, object: &StoreObject) -> bool {
        object.dirty_round() == self.round.get()
    }

    /// Returns whether the checkpoint in progress has yet to store the object.
    pub fn is_due(&self, object: &StoreObject) -> bool {
        object.is_dirty() && !self.contains(object)
    }

    /// Adds a clean object.
    pub fn add(&self, object: &Rc<StoreObject>) {
        debug_assert!(!object.is_dirty(), "{} is dirty already", object.name);
        object.set_dirty_round(self.round.get());
        self.listed.borrow_mut().push(object.clone());
    }

    /// Begins a checkpoint, which stores the returned objects: those that [are due](Self::is_due).
    pub fn begin_round(&self) -> Vec<Rc<StoreObject>> {
        self.round.set(self.round.get() + 1);
        self.listed.take()
    }

    /// Counts pages that were marked dirty.
    pub fn add_pages(&self, count: usize) {
        self.pages.set(self.pages.get() + count);
    }

    /// Counts a dirty page that was stored or dropped.
    pub fn sub_page(&self) {
        debug_assert!(self.pages.get() > 0, "more dirty pages were stored or dropped than there were");
        self.pages.set(self.pages.get().saturating_sub(1));
    }
}
