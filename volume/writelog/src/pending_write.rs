//! Pending write: a request that completes when all its pieces are in the log.

use std::cell::{Cell, RefCell};

use forebay_block::{BlockReply, BlockRequest, Error, Result, WriteRange};
use forebay_reactor::sync::oneshot;

/// Pending write and its completion.
pub(crate) struct PendingWrite {
    /// Pieces not in the log yet.
    left: Cell<usize>,
    /// Range that it changes, locked until the request completes; `None` if it was acknowledged before.
    range: RefCell<Option<WriteRange>>,
    /// Generation in which it was submitted; throttling may have delayed it past later barriers.
    pub(crate) arrived: u64,
    /// Original request, to be resubmitted if the log fails.
    pub(crate) request: BlockRequest,
    answer: RefCell<Option<oneshot::Sender<Result<BlockReply>>>>,
}

impl PendingWrite {
    pub(crate) fn new(
        request: BlockRequest,
        range: Option<WriteRange>,
        arrived: u64,
        pieces: usize,
        answer: oneshot::Sender<Result<BlockReply>>,
    ) -> Self {
        Self {
            left: Cell::new(pieces),
            range: RefCell::new(range),
            arrived,
            request,
            answer: RefCell::new(Some(answer)),
        }
    }

    /// Counts one piece as logged; returns true for the last one.
    pub(crate) fn piece_done(&self) -> bool {
        debug_assert!(self.left.get() > 0, "a pending write of no more pieces");
        self.left.set(self.left.get() - 1);
        self.left.get() == 0
    }

    /// Unlocks the range.
    pub(crate) fn unlock(&self) {
        let range = self.range.borrow_mut().take();
        drop(range);
    }

    /// Completes the request; returns true if it had not been completed yet.
    pub(crate) fn answer(&self, result: Result<BlockReply>) -> bool {
        let answer = self.answer.borrow_mut().take();
        let waiting = answer.is_some();
        if let Some(answer) = answer {
            answer.send(result);
        }
        waiting
    }

    /// Completes the request with an error.
    pub(crate) fn fail(&self, error: &Error) {
        self.answer(Err(error.clone()));
    }
}
