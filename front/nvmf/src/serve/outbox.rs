//! Outgoing replies, and the budget that they hold until they are sent.

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::{Buf, BufList};

use super::budget::{ByteBudget, Waiter};
use crate::session::{NvmeReplies, NvmeTcpParameters};
use crate::wire::Cqe;
use crate::wire::pdu::IcResp;

/// Bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Buffers gathered for one send.
const SEND_PARTS: usize = 256;
/// Queued replies at which a connection takes no more commands, because the host does not read.  Twice the
/// maximum number of commands in flight on a queue.
const REPLIES_MAX: usize = 2 * crate::session::QUEUE_ENTRIES_MAX;

/// Resources that a number of replies hold until they are sent.
#[derive(Debug, Clone, Copy, Default)]
struct HeldReplies {
    /// Number of replies.
    count: usize,
    /// Bytes that they hold of the budget.
    held: usize,
}

/// Outgoing replies of a connection, and the bytes of the budget that it holds.
///
/// 1. The bytes held are those of commands in flight and of unsent replies; all are released when the connection ends.
/// 2. `kept` is the sum over the replies not sent: those being gathered, the full batches, and the batch being sent.
/// 3. At most one batch is being sent.
/// 4. Once output is discarded, nothing is queued but the final PDU.
pub(super) struct NvmeOutbox {
    replies: NvmeReplies,
    /// Resources of the replies in `replies`.
    unsent: HeldReplies,
    /// Full batches, ready to be sent.
    batches: VecDeque<(BufList, HeldReplies)>,
    /// Resources of the batch that is being sent; `None` when there is none.
    sending: Option<HeldReplies>,
    /// Resources of all unsent replies together.
    kept: HeldReplies,
    /// Bytes of the budget that this connection holds, commands in flight included.
    held: usize,
    budget: Option<Rc<ByteBudget>>,
    /// Entry in the budget's wait queue.
    waiter: Rc<Waiter>,
    /// Replies are discarded, because the host does not read them any more.
    discarding: bool,
    /// Final PDU, sent after the batch that is being sent and followed by nothing.
    last: Option<Buf>,
}

impl NvmeOutbox {
    pub(super) fn new(replies: NvmeReplies) -> Self {
        Self {
            replies,
            unsent: HeldReplies::default(),
            batches: VecDeque::new(),
            sending: None,
            kept: HeldReplies::default(),
            held: 0,
            budget: None,
            waiter: Rc::default(),
            discarding: false,
            last: None,
        }
    }

    /// Charges bytes against the budget of a host from now on.
    pub(super) fn set_budget(&mut self, budget: Rc<ByteBudget>) {
        debug_assert_eq!(self.held, 0);
        self.budget = Some(budget);
    }

    /// Returns the bytes of the budget that this connection holds.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Takes bytes of the budget, and returns whether there was space.
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        let room = self.budget.as_ref().is_none_or(|budget| budget.take(bytes, &self.waiter));
        self.held += if room { bytes } else { 0 };
        room
    }

    /// Sets the task to wake when the budget may have space.
    pub(super) fn set_task(&self, waker: &std::task::Waker) {
        self.waiter.set_task(waker);
    }

    /// Leaves the budget's wait queue.
    pub(super) fn needs_no_space(&self) {
        if let Some(budget) = &self.budget {
            budget.pass(&self.waiter);
        }
    }

    /// Takes bytes that are in memory already, without a limit check.
    pub(super) fn hold_anyway(&mut self, bytes: usize) {
        self.held += bytes;
        if let Some(budget) = &self.budget {
            budget.take_anyway(bytes);
        }
    }

    fn release(&mut self, bytes: usize) {
        if bytes > 0 {
            self.held -= bytes;
            if let Some(budget) = &self.budget {
                budget.give(bytes);
            }
        }
    }

    /// Returns true if the number of queued replies requires receiving commands to stop.
    pub(super) fn is_full(&self) -> bool {
        self.kept.count >= REPLIES_MAX
    }

    /// Returns whether unsent replies hold bytes of the budget.
    pub(super) fn keeps_bytes(&self) -> bool {
        self.kept.held > 0
    }

    /// Returns whether this connection, its host or its core holds more bytes than its limit.
    pub(super) fn is_over(&self, connection_max: usize) -> bool {
        self.held > connection_max || self.budget.as_ref().is_some_and(|budget| budget.is_over())
    }

    /// Releases the resources of replies that were sent or discarded.
    fn forget(&mut self, kept: HeldReplies) {
        self.kept.count -= kept.count;
        self.kept.held -= kept.held;
        self.release(kept.held);
    }

    /// Queues an ICResp, and uses what was agreed on from then on.
    pub(super) fn ic_resp(&mut self, resp: &IcResp, agreed: NvmeTcpParameters) {
        self.replies.ic_resp(resp);
        self.replied(0);
        self.replies.agree(agreed);
    }

    /// Queues an R2T.
    pub(super) fn ready_to_transfer(&mut self, cid: u16, tag: u16, len: u32) {
        self.replies.ready_to_transfer(cid, tag, len);
        self.replied(0);
    }

    /// Queues a response, which holds `bytes` of the budget.
    pub(super) fn response(&mut self, cqe: &Cqe, bytes: usize) {
        self.replies.response(cqe);
        self.replied(bytes);
    }

    /// Queues data that is followed by the response to its command.
    pub(super) fn data(&mut self, cid: u16, data: BufList) {
        self.replies.data(cid, data, false);
    }

    /// Queues data that replaces the response to its command, and holds `bytes` of the budget.
    pub(super) fn data_with_success(&mut self, cid: u16, data: BufList, bytes: usize) {
        self.replies.data(cid, data, true);
        self.replied(bytes);
    }

    /// Releases memory of the replies, before the connection waits.
    pub(super) fn rest(&mut self) {
        self.replies.rest();
    }

    /// Accounts for another reply in `replies`, which holds `bytes` of the budget.
    fn replied(&mut self, bytes: usize) {
        for kept in [&mut self.unsent, &mut self.kept] {
            kept.count += 1;
            kept.held += bytes;
        }
        if self.discarding {
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
            self.sending = Some(HeldReplies::default());
            return Some(last.into());
        }
        self.sending = Some(std::mem::take(&mut self.unsent));
        Some(self.replies.take())
    }

    pub(super) fn sent(&mut self) {
        if let Some(sent) = self.sending.take() {
            self.forget(sent);
        }
        self.check();
    }

    /// Asserts the sum of the replies not sent.
    fn check(&self) {
        let parts = || self.batches.iter().map(|(_, kept)| kept).chain([&self.unsent]).chain(&self.sending);
        debug_assert_eq!(self.kept.count, parts().map(|kept| kept.count).sum::<usize>());
        debug_assert_eq!(self.kept.held, parts().map(|kept| kept.held).sum::<usize>());
        debug_assert!(self.kept.held <= self.held);
    }

    /// Returns whether nothing is queued and nothing is being sent.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.replies.is_empty() && self.sending.is_none() && self.last.is_none()
    }

    /// Discards queued replies, and all further ones.
    pub(super) fn discard_output(&mut self) {
        self.discarding = true;
        self.last = None;
        let unsent = std::mem::take(&mut self.unsent);
        let batches = std::mem::take(&mut self.batches).into_iter().map(|(_, kept)| kept);
        batches.chain([unsent]).for_each(|kept| self.forget(kept));
        self.replies.clear();
        self.check();
    }

    /// Queues a final PDU, and discards all other replies.
    pub(super) fn conclude(&mut self, last: &[u8]) {
        if !self.discarding {
            self.discard_output();
            self.last = Some(Buf::copy_of(last));
        }
    }
}

impl Drop for NvmeOutbox {
    fn drop(&mut self) {
        let held = self.held;
        self.release(held);
        self.needs_no_space();
    }
}
