//! Append queue: pieces on their way to the medium, in the order of their sequence numbers.

use std::collections::VecDeque;

use forebay_block::{LocalFuture, Result};

use crate::media::{AppendGroup, AppendPiece, Medium, Placed};

/// Group being appended.
pub(crate) struct Appending {
    pub(crate) number: u64,
    pub(crate) first_seq: u64,
    pub(crate) pieces: Vec<Placed>,
    done: Option<Result<()>>,
}

/// Pieces queued at one moment, to wait until they are in the log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueMark {
    end: u64,
    drops: u64,
}

/// Group that was taken from the queue.
pub(crate) struct Started {
    pub(crate) number: u64,
    /// Remaining work until the group is durable; `None` if it is durable already.
    pub(crate) work: Option<LocalFuture<Result<()>>>,
}

/// Queue for the medium, the groups being appended, and the sequence numbers.
///
/// Invariants:
/// - Q1 Entries before `synced_seq` are durable, those before `appended_seq` are on the medium, those before `next_seq`
///   have a place on it: `synced_seq <= appended_seq <= next_seq`.
/// - Q2 The groups being appended are consecutive, from `appended_seq` to `next_seq`, and are published in order.
/// - Q3 Generations do not decrease along groups and queue, and end with the current one.
/// - Q4 `bytes` is the sum of the queued payloads.
pub(crate) struct AppendQueue {
    pieces: VecDeque<AppendPiece>,
    bytes: u64,
    groups: VecDeque<Appending>,
    /// Generation of newly queued pieces.
    generation: u64,
    /// Set once a write of the current generation was queued or bypassed the log.
    generation_used: bool,
    /// Sequence number of the next entry for the medium.
    next_seq: u64,
    /// Entries before this one are on the medium.
    appended_seq: u64,
    /// Entries before this one are durable on the medium, in the write-back acknowledgement mode.
    synced_seq: u64,
    /// Value of `next_seq` when the queue was last dropped: pieces queued then never get a sequence number.
    dropped_at: u64,
    /// Number of times that the queue was dropped.
    drops: u64,
}

impl AppendQueue {
    /// Returns an empty queue of a log whose next entry is `head`.
    pub(crate) fn new(head: u64, generation: u64) -> Self {
        Self {
            pieces: VecDeque::new(),
            bytes: 0,
            groups: VecDeque::new(),
            generation,
            generation_used: false,
            next_seq: head,
            appended_seq: head,
            synced_seq: head,
            dropped_at: head,
            drops: 0,
        }
    }

    fn check(&self) {
        debug_assert!(self.synced_seq <= self.appended_seq && self.appended_seq <= self.next_seq, "Q1");
        let first = self.groups.front().map_or(self.appended_seq, |group| group.first_seq);
        debug_assert_eq!(first, self.appended_seq, "Q2");
        let end = self.groups.back().map_or(self.next_seq, |group| group.first_seq + group.pieces.len() as u64);
        debug_assert_eq!(end, self.next_seq, "Q2");
        debug_assert!(self.pieces.back().is_none_or(|piece| piece.generation <= self.generation), "Q3");
        debug_assert!(self.bytes == 0 || !self.pieces.is_empty(), "Q4");
    }

    /// Returns the generation of newly queued pieces.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Records that the current generation has a write.
    pub(crate) fn use_generation(&mut self) {
        self.generation_used = true;
    }

    /// Begins a new generation for pieces queued from now on, unless the current one is unused; returns whether it
    /// did.
    pub(crate) fn barrier(&mut self) -> bool {
        if !self.generation_used {
            return false;
        }
        self.generation += 1;
        self.generation_used = false;
        true
    }

    /// Returns whether no piece of an older generation is on its way to the medium.
    pub(crate) fn has_only_current(&self) -> bool {
        self.pieces.front().is_none_or(|piece| piece.generation == self.generation)
            && self.groups.iter().flat_map(|group| &group.pieces).all(|p| p.piece.generation == self.generation)
    }

    /// Returns the payload bytes of the queued pieces.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether no piece is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns the number of groups being appended.
    pub(crate) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the sequence number before which all entries are on the medium.
    pub(crate) fn appended_seq(&self) -> u64 {
        self.appended_seq
    }

    /// Returns the sequence number before which all entries are durable, in the write-back acknowledgement mode.
    pub(crate) fn synced_seq(&self) -> u64 {
        self.synced_seq
    }

    /// Records that entries before `seq` are durable.
    pub(crate) fn synced(&mut self, seq: u64) {
        self.synced_seq = self.synced_seq.max(seq);
        self.check();
    }

    /// Adds a piece of the current generation.
    pub(crate) fn push(&mut self, piece: AppendPiece) {
        debug_assert_eq!(piece.generation, self.generation, "Q3");
        self.generation_used = true;
        self.bytes += piece.payload.len() as u64;
        self.pieces.push_back(piece);
    }

    /// Takes the next group from the queue, and starts to append it; `None` if the medium has no space for it.
    pub(crate) fn start_group(&mut self, medium: &dyn Medium, durable: bool) -> Option<Started> {
        let first = self.next_seq;
        let AppendGroup { first_seq, number, pieces, work, .. } = medium.take(&mut self.pieces, first, durable)?;
        self.next_seq = first_seq + pieces.len() as u64;
        self.bytes -= pieces.iter().map(|placed| placed.piece.payload.len() as u64).sum::<u64>();
        let done = work.is_none().then_some(Ok(()));
        self.groups.push_back(Appending { number, first_seq, pieces, done });
        self.check();
        Some(Started { number, work })
    }

    /// Records that the work of a group has ended.
    pub(crate) fn group_done(&mut self, number: u64, result: Result<()>) {
        if let Some(group) = self.groups.iter_mut().find(|group| group.number == number) {
            group.done = Some(result);
        }
    }

    /// Takes the oldest group, if it has been appended; its entries count as on the medium.
    ///
    /// # Errors
    /// If it could not be appended.
    pub(crate) fn take_done(&mut self) -> Result<Option<Appending>> {
        match self.groups.front().map(|group| &group.done) {
            Some(Some(Ok(()))) => {}
            Some(Some(Err(error))) => return Err(error.clone()),
            Some(None) | None => return Ok(None),
        }
        let Some(group) = self.groups.pop_front() else { return Ok(None) };
        self.appended_seq = group.first_seq + group.pieces.len() as u64;
        self.check();
        Ok(Some(group))
    }

    /// Drops the queue and returns its pieces: none of them will be appended.
    pub(crate) fn drop_queued(&mut self) -> VecDeque<AppendPiece> {
        self.bytes = 0;
        self.dropped_at = self.next_seq;
        self.drops += 1;
        std::mem::take(&mut self.pieces)
    }

    /// Drops the groups being appended and the queue, and returns their pieces, in order. No more may be appended.
    pub(crate) fn abort(&mut self) -> impl Iterator<Item = AppendPiece> + use<> {
        let groups = std::mem::take(&mut self.groups);
        let queued = self.drop_queued();
        groups.into_iter().flat_map(|group| group.pieces).map(|placed| placed.piece).chain(queued)
    }

    /// Returns a mark of the pieces queued now.
    pub(crate) fn mark(&self) -> QueueMark {
        QueueMark { end: self.next_seq + self.pieces.len() as u64, drops: self.drops }
    }

    /// Returns whether all pieces of a mark are in the log, or were dropped.
    pub(crate) fn has_reached(&self, mark: QueueMark) -> bool {
        // Pieces dropped from the queue never get a sequence number.
        let target = if self.drops == mark.drops { mark.end } else { mark.end.min(self.dropped_at) };
        self.appended_seq >= target
    }
}
