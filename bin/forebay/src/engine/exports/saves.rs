//! Queue of export changes to persist: changes that arrive during a write are combined into the next write.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_export::list::ExportChange;
use forebay_reactor::sync::Semaphore;

use crate::api::Front;
use crate::engine::targets::TargetsFiles;
use crate::failure::Result;

/// Queued changes, and outcomes of changes that another task has written.
pub(super) struct Saves {
    /// Export files; the task that holds the permit uses them, on a separate thread.
    pub(super) files: Arc<Mutex<TargetsFiles>>,
    /// Permit to write: one write at a time.
    pub(super) turn: Semaphore,
    waiting: RefCell<Vec<(u64, ExportChange<Front>)>>,
    /// Outcomes not yet collected, by change number.
    outcomes: RefCell<BTreeMap<u64, Result<()>>>,
    /// Numbers of the changes that the permit holder is writing.
    writing: RefCell<Vec<u64>>,
    next: Cell<u64>,
}

impl Saves {
    pub(super) fn new(files: TargetsFiles) -> Self {
        Self {
            files: Arc::new(Mutex::new(files)),
            turn: Semaphore::new(1),
            waiting: RefCell::default(),
            outcomes: RefCell::default(),
            writing: RefCell::default(),
            next: Cell::new(0),
        }
    }

    /// Queues a change; returns its number.
    pub(super) fn enqueue(&self, change: ExportChange<Front>) -> u64 {
        let number = self.next.replace(self.next.get() + 1);
        self.waiting.borrow_mut().push((number, change));
        number
    }

    /// Takes the outcome of a change that another task has written.
    pub(super) fn outcome(&self, number: u64) -> Option<Result<()>> {
        self.outcomes.borrow_mut().remove(&number)
    }

    /// Takes all queued changes, to be written by the permit holder.
    pub(super) fn take_all(&self) -> Vec<ExportChange<Front>> {
        let (numbers, changes) = self.waiting.take().into_iter().unzip();
        *self.writing.borrow_mut() = numbers;
        changes
    }

    /// Records the outcome of the changes that were taken, for all but the task that wrote them.
    pub(super) fn settle(&self, own: u64, outcome: &Result<()>) {
        let others = self.writing.take().into_iter().filter(|&number| number != own);
        self.outcomes.borrow_mut().extend(others.map(|number| (number, outcome.clone())));
    }
}

/// Locks the files, ignoring poison: they are consistent between any two operations.
pub(super) fn lock(files: &Mutex<TargetsFiles>) -> MutexGuard<'_, TargetsFiles> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}
