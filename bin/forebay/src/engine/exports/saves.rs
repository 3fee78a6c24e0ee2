//! Changes of exports on their way to the files: those that come while others are written go together, in one write.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_reactor::sync::Semaphore;

use crate::engine::targets::{Change, TargetsFiles};
use crate::failure::Result;

/// Changes that wait to be written, and what came of those that others wrote.
pub(super) struct Saves {
    /// The files; whoever has the turn uses them, on a thread of its own.
    pub(super) files: Arc<Mutex<TargetsFiles>>,
    /// Permit to write: one write after another.
    pub(super) turn: Semaphore,
    waiting: RefCell<Vec<(u64, Change)>>,
    /// Outcomes that nobody has taken yet, by the number of the change.
    outcomes: RefCell<BTreeMap<u64, Result<()>>>,
    /// Numbers of the changes that the one who has the turn writes.
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

    /// Adds a change to those that wait; returns its number.
    pub(super) fn enqueue(&self, change: Change) -> u64 {
        let number = self.next.replace(self.next.get() + 1);
        self.waiting.borrow_mut().push((number, change));
        number
    }

    /// Takes what came of a change that somebody else has written.
    pub(super) fn outcome(&self, number: u64) -> Option<Result<()>> {
        self.outcomes.borrow_mut().remove(&number)
    }

    /// Takes all changes that wait, to be written by the one who has the turn.
    pub(super) fn take_all(&self) -> Vec<Change> {
        let (numbers, changes) = self.waiting.take().into_iter().unzip();
        *self.writing.borrow_mut() = numbers;
        changes
    }

    /// Notes what came of the changes that were taken, for all but the one who wrote them.
    pub(super) fn settle(&self, own: u64, outcome: &Result<()>) {
        let others = self.writing.take().into_iter().filter(|&number| number != own);
        self.outcomes.borrow_mut().extend(others.map(|number| (number, outcome.clone())));
    }
}

/// The files are whole between any two of their operations.
pub(super) fn lock(files: &Mutex<TargetsFiles>) -> MutexGuard<'_, TargetsFiles> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}
