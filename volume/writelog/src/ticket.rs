//! A request that waits until all its pieces are in the log.

use std::cell::{Cell, RefCell};

use forebay_block::{Error, Extent, Reply, Request, Result};
use forebay_reactor::sync::oneshot;

/// One request and who waits for it.
pub(crate) struct Ticket {
    /// Pieces that are not in the log yet.
    left: Cell<usize>,
    /// What it changes; nothing overlaps it while it is under way.
    pub(crate) extent: Extent,
    /// The generation in which it was submitted; it may have been held back over later barriers.
    pub(crate) arrived: u64,
    /// The request as it came, for the case that the log fails under it.
    pub(crate) request: Request,
    answer: RefCell<Option<oneshot::Sender<Result<Reply>>>>,
}

impl Ticket {
    pub(crate) fn new(
        request: Request,
        extent: Extent,
        arrived: u64,
        pieces: usize,
        answer: oneshot::Sender<Result<Reply>>,
    ) -> Self {
        Self { left: Cell::new(pieces), extent, arrived, request, answer: RefCell::new(Some(answer)) }
    }

    /// One piece is in the log; true when that was the last.
    pub(crate) fn piece_done(&self) -> bool {
        self.left.set(self.left.get() - 1);
        self.left.get() == 0
    }

    /// Answers who waits; true if nobody had been answered yet.
    pub(crate) fn answer(&self, result: Result<Reply>) -> bool {
        let answer = self.answer.borrow_mut().take();
        let waiting = answer.is_some();
        if let Some(answer) = answer {
            answer.send(result);
        }
        waiting
    }

    /// Nobody will do it.
    pub(crate) fn fail(&self, error: &Error) {
        self.answer(Err(error.clone()));
    }
}
