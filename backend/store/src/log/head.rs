//! Head of the log: where the next batch begins.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};

use super::batch::Batch;
use crate::crypt::UsePlace;
use crate::format::anchor::LogPosition;
use crate::segments::Segments;

/// Head of the log.
///
/// # Invariants
/// 1. `next_block` is in the current segment, or directly behind it.
/// 2. The next segment is allocated before the current one is entered, so each batch can name it; but for the error of
///    [`begin_batch`](Self::begin_batch).
/// 3. Batch numbers are consecutive.
pub struct LogHead {
    segments: Rc<RefCell<Segments>>,
    segment: Cell<u32>,
    next_segment: Cell<u32>,
    next_block: Cell<u64>,
    next_seq: Cell<u64>,
}

impl LogHead {
    /// Returns the head of a log that starts in a newly allocated segment with batch `next_seq`.
    ///
    /// # Errors
    /// `NoSpace` if there are fewer than two free segments.
    pub fn new(segments: Rc<RefCell<Segments>>, next_seq: u64) -> Result<Self> {
        let (segment, next_segment, next_block) = {
            let mut table = segments.borrow_mut();
            let full = || Error::new(ErrorKind::NoSpace, "no free segment to continue the log");
            let segment = table.allocate().ok_or_else(full)?;
            let next = table.allocate().ok_or_else(full)?;
            table.entered(segment, next_seq);
            (segment, next, table.geometry.first_block(segment))
        };
        Ok(Self {
            segments,
            segment: Cell::new(segment),
            next_segment: Cell::new(next_segment),
            next_block: Cell::new(next_block),
            next_seq: Cell::new(next_seq),
        })
    }

    /// Returns the number of the next batch.
    pub fn next_seq(&self) -> u64 {
        self.next_seq.get()
    }

    /// Returns the current segment and the next one.
    pub fn segment_and_next(&self) -> (u32, u32) {
        (self.segment.get(), self.next_segment.get())
    }

    /// Returns the place of a block of the current segment within its current use.
    pub fn use_place(&self, block: u64) -> UsePlace {
        let segments = self.segments.borrow();
        let segment = self.segment.get();
        let segment_use = segments.uses.of(segment).expect("the log has entered its segment");
        UsePlace { segment_use, at: block - segments.geometry.first_block(segment) }
    }

    /// Returns the position of the next batch.
    pub fn position(&self) -> LogPosition {
        LogPosition { block: self.next_block.get(), seq: self.next_seq.get() }
    }

    /// Returns the block number behind the current segment.
    fn segment_end(&self) -> u64 {
        let geometry = self.segments.borrow().geometry;
        geometry.first_block(self.segment.get()) + geometry.segment_blocks()
    }

    /// Returns the space for further payload blocks in the open batch.
    pub fn block_space(&self, batch: &Batch) -> u32 {
        (self.segment_end() - batch.first_block()) as u32 - batch.padded_blocks()
    }

    /// Begins a batch with space for `blocks` payload blocks, in the next segment if the current one has too little.
    ///
    /// Also returns an error if there is no free segment to be the next one. The batch must not be written then.
    pub fn begin_batch(&self, blocks: u32) -> (Batch, Result<()>) {
        // A header must be followed by space for at least one payload block.
        let least = u64::from(blocks.max(1)) + 1;
        let advanced = if self.next_block.get() + least > self.segment_end() { self.advance_segment() } else { Ok(()) };
        let seq = self.next_seq.get();
        self.next_seq.set(seq + 1);
        (Batch::new(seq, self.next_block.get()), advanced)
    }

    fn advance_segment(&self) -> Result<()> {
        let mut segments = self.segments.borrow_mut();
        segments.leave(self.segment.get());
        let segment = self.next_segment.get();
        segments.entered(segment, self.next_seq.get());
        self.segment.set(segment);
        self.next_block.set(segments.geometry.first_block(segment));
        // The reserve watermark keeps enough segments free, so a lack of them is a bug in the store.
        let next =
            segments.allocate().ok_or_else(|| Error::new(ErrorKind::NoSpace, "the log has no free segment left"))?;
        self.next_segment.set(next);
        Ok(())
    }

    /// Ends the current segment, between two batches: the next one begins the next segment.
    pub fn end_segment(&self) {
        self.next_block.set(self.segment_end());
    }

    /// Ends a batch: the next one begins behind its payload.
    pub fn end_batch(&self, batch: &Batch) {
        debug_assert_eq!(batch.seq() + 1, self.next_seq.get(), "a batch is closed before the next one is opened");
        self.next_block.set(batch.first_block() + u64::from(batch.payload_blocks()));
        debug_assert!(self.next_block.get() <= self.segment_end());
    }
}
