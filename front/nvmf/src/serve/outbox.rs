//! Replies on their way, and what they hold until they are sent.

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::{Buf, BufList};

use super::budget::{Budget, Waiter};
use crate::session::Replies;

/// Bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Buffers gathered for one send.
const SEND_PARTS: usize = 256;
/// Replies that wait to be sent, past which a connection takes no more commands: the host does not read.  Twice what
/// the longest queue can have under way.
const REPLIES_MAX: usize = 2 * crate::session::QUEUE_ENTRIES_MAX;

/// What a number of replies keep until they are sent.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    /// Replies.
    count: usize,
    /// Bytes that they hold of the budget.
    held: usize,
}

pub(super) struct Outbox {
    pub(super) replies: Replies,
    /// Of the replies in `replies`.
    unsent: Kept,
    /// Batches that are full.
    batches: VecDeque<(BufList, Kept)>,
    /// Of the batch that is being sent; `None` when none is.
    sending: Option<Kept>,
    /// Of all of these.
    kept: Kept,
    /// Bytes that this connection holds, of commands under way too.
    held: usize,
    budget: Option<Rc<Budget>>,
    /// How it is called when there is room.
    waiter: Rc<Waiter>,
    /// Nobody reads the replies any more.
    deaf: bool,
    /// What is said after everything that is being sent, and nothing after it.
    last: Option<Buf>,
}

impl Outbox {
    pub(super) fn new(replies: Replies) -> Self {
        Self {
            replies,
            unsent: Kept::default(),
            batches: VecDeque::new(),
            sending: None,
            kept: Kept::default(),
            held: 0,
            budget: None,
            waiter: Rc::default(),
            deaf: false,
            last: None,
        }
    }

    /// From now on what is held counts against the budget of a host.
    pub(super) fn set_budget(&mut self, budget: Rc<Budget>) {
        debug_assert_eq!(self.held, 0);
        self.budget = Some(budget);
    }

    /// Bytes that this connection holds.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Holds bytes if the budget has room.
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        let room = self.budget.as_ref().is_none_or(|budget| budget.take(bytes, &self.waiter));
        self.held += if room { bytes } else { 0 };
        room
    }

    /// Who is called when there is room.
    pub(super) fn set_task(&self, waker: &std::task::Waker) {
        self.waiter.set_task(waker);
    }

    /// Nothing waits for room any more.
    pub(super) fn needs_no_room(&self) {
        if let Some(budget) = &self.budget {
            budget.pass(&self.waiter);
        }
    }

    /// Holds bytes that are in memory already.
    pub(super) fn hold_anyway(&mut self, bytes: usize) {
        self.held += bytes;
        if let Some(budget) = &self.budget {
            budget.take_anyway(bytes);
        }
    }

    pub(super) fn release(&mut self, bytes: usize) {
        if bytes > 0 {
            self.held -= bytes;
            if let Some(budget) = &self.budget {
                budget.give(bytes);
            }
        }
    }

    /// So much waits to be sent that no more commands are to be taken.
    pub(super) fn is_full(&self) -> bool {
        self.kept.count >= REPLIES_MAX
    }

    /// Replies that wait hold bytes.
    pub(super) fn keeps_bytes(&self) -> bool {
        self.kept.held > 0
    }

    /// More is held than there should be, by this connection or by all of its host or core.
    pub(super) fn is_over(&self, connection_max: usize) -> bool {
        self.held > connection_max || self.budget.as_ref().is_some_and(|budget| budget.is_over())
    }

    /// Replies are sent, or nobody wants them any more.
    fn forget(&mut self, kept: Kept) {
        self.kept.count -= kept.count;
        self.kept.held -= kept.held;
        self.release(kept.held);
    }

    /// Another reply was put into `replies`, which holds so many bytes.
    pub(super) fn replied(&mut self, bytes: usize) {
        for kept in [&mut self.unsent, &mut self.kept] {
            kept.count += 1;
            kept.held += bytes;
        }
        if self.deaf {
            self.replies.clear();
            let unsent = std::mem::take(&mut self.unsent);
            self.forget(unsent);
        } else if self.replies.len() >= SEND_BYTES || self.replies.parts() >= SEND_PARTS {
            self.batches.push_back((self.replies.take(), std::mem::take(&mut self.unsent)));
        }
    }

    pub(super) fn next_batch(&mut self) -> Option<BufList> {
        debug_assert!(self.sending.is_none());
        if let Some((batch, kept)) = self.batches.pop_front() {
            self.sending = Some(kept);
            return Some(batch);
        }
        if self.replies.is_empty() {
            let last = self.last.take()?;
            self.sending = Some(Kept::default());
            return Some(last.into());
        }
        self.sending = Some(std::mem::take(&mut self.unsent));
        Some(self.replies.take())
    }

    pub(super) fn sent(&mut self) {
        if let Some(sent) = self.sending.take() {
            self.forget(sent);
        }
    }

    /// Nothing waits, and nothing is being sent.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.replies.is_empty() && self.sending.is_none() && self.last.is_none()
    }

    /// From now on replies are dropped; those that wait are dropped too.
    pub(super) fn deafen(&mut self) {
        self.deaf = true;
        self.last = None;
        let unsent = std::mem::take(&mut self.unsent);
        let batches = std::mem::take(&mut self.batches).into_iter().map(|(_, kept)| kept);
        batches.chain([unsent]).for_each(|kept| self.forget(kept));
        self.replies.clear();
    }

    /// Says a last word, and is deaf after.
    pub(super) fn conclude(&mut self, last: &[u8]) {
        if !self.deaf {
            self.deafen();
            self.last = Some(Buf::copy_of(last));
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let held = self.held;
        self.release(held);
        self.needs_no_room();
    }
}
