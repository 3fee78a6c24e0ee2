//! Bytes that many connections share.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;

/// A number of bytes that may be in use.
pub(super) struct Budget {
    used: Cell<usize>,
    max: usize,
    /// Connections that would go on if there were more.
    waiting: RefCell<Vec<Waker>>,
    /// What has to have room as well.
    above: Option<Rc<Budget>>,
}

impl Budget {
    pub(super) fn new(max: usize, above: Option<Rc<Budget>>) -> Rc<Self> {
        Rc::new(Self { used: Cell::new(0), max, waiting: RefCell::default(), above })
    }

    fn has_room(&self, bytes: usize) -> bool {
        // One command always goes, however long.
        self.used.get() == 0 || self.used.get() + bytes <= self.max
    }

    /// There is room for one who has nothing yet, of which as much again is spared.
    fn is_spared(&self, bytes: usize) -> bool {
        self.used.get() + bytes <= self.max.saturating_mul(2)
    }

    /// Takes bytes if there is room; otherwise `waker` is called when there may be.
    pub(super) fn take(&self, bytes: usize, waker: &Waker) -> bool {
        let full = match &self.above {
            _ if !self.has_room(bytes) => Some(self),
            // Others may have taken everything and never give it back: nobody is kept out altogether.
            Some(above) if !(above.has_room(bytes) || self.used.get() == 0 && above.is_spared(bytes)) => Some(&**above),
            _ => None,
        };
        if let Some(full) = full {
            let mut waiting = full.waiting.borrow_mut();
            if !waiting.iter().any(|waiting| waiting.will_wake(waker)) {
                waiting.push(waker.clone());
            }
            return false;
        }
        self.take_anyway(bytes);
        true
    }

    /// Takes bytes that are in memory already.
    pub(super) fn take_anyway(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
        if let Some(above) = &self.above {
            above.used.set(above.used.get() + bytes);
        }
    }

    /// More was taken than there is: bytes that were in memory already.
    pub(super) fn is_over(&self) -> bool {
        self.used.get() > self.max || self.above.as_ref().is_some_and(|above| above.is_over())
    }

    /// Gives bytes back.
    pub(super) fn give(&self, bytes: usize) {
        self.used.set(self.used.get() - bytes);
        if !self.waiting.borrow().is_empty() {
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
        if let Some(above) = &self.above {
            above.give(bytes);
        }
    }

    /// Bytes in use.
    pub(super) fn used(&self) -> usize {
        self.used.get()
    }
}
