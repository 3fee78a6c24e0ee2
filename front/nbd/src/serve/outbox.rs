//! Send queue of a connection: gathers replies into batches, and accounts what requests hold until they are answered.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Extent};
use forebay_reactor::Instant;

use super::NbdServerOptions;
use super::execute::{self, NbdReplyData, RequestFailure};
use crate::session::{Failed, NbdPools, NbdReplies, Origin, ReplyStyle, errno};
use crate::stats::{NbdCounters, NbdRequestKind};
use crate::wire::Errno;

/// Bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Buffers gathered for one send.
const SEND_PARTS: usize = 256;

/// Context of a request in flight.
pub(super) struct Pending {
    pub(super) origin: Origin,
    pub(super) kind: NbdRequestKind,
    pub(super) extent: Extent,
    pub(super) whole: bool,
    pub(super) failed: Failed,
    pub(super) began: Instant,
    /// Bytes of payload with which the request was admitted.
    pub(super) bytes: usize,
}

/// Requests, and bytes of payload, that count against a connection's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Usage {
    requests: usize,
    bytes: usize,
}

impl Usage {
    fn add(&mut self, other: Usage) {
        self.requests += other.requests;
        self.bytes += other.bytes;
    }

    fn subtract(&mut self, other: Usage) {
        self.requests -= other.requests;
        self.bytes -= other.bytes;
    }
}

/// Outgoing replies, and the requests and bytes that they hold until they are sent.
///
/// 1. `total` is what requests in flight hold, plus `unsent`, `batches` and `sending`.
/// 2. Each admitted request is answered or left unanswered exactly once, with the bytes with which it was admitted.
/// 3. Once output is discarded, nothing is queued: `total` is what requests in flight and `sending` hold.
pub(super) struct NbdOutbox {
    replies: NbdReplies,
    /// Held by the replies in `replies`.
    unsent: Usage,
    /// Full batches, ready to be sent.
    batches: VecDeque<(BufList, Usage)>,
    /// Held by the batch that is being sent.
    sending: Usage,
    /// Held by everything not sent yet, requests in flight included.
    total: Usage,
    /// Replies are discarded, because the client does not read them any more.
    discarding: bool,
}

impl NbdOutbox {
    /// Creates an empty queue of replies in a style.
    pub(super) fn new(pools: &Rc<NbdPools>, style: ReplyStyle) -> Self {
        Self {
            replies: NbdReplies::new(pools.clone(), style),
            unsent: Usage::default(),
            batches: VecDeque::new(),
            sending: Usage::default(),
            total: Usage::default(),
            discarding: false,
        }
    }

    // ---- Requests ----

    /// Returns true if the limits permit another request with this many bytes of payload.
    pub(super) fn has_space(&self, bytes: usize, options: &NbdServerOptions) -> bool {
        self.total.requests < options.requests_max
            && (self.total.bytes == 0 || self.total.bytes + bytes <= options.bytes_max)
    }

    /// Counts a request that is begun, until its reply is sent.
    pub(super) fn admit(&mut self, bytes: usize) {
        self.total.add(Usage { requests: 1, bytes });
    }

    /// Queues the reply to a request that fails without the device.
    pub(super) fn refuse(
        &mut self,
        counters: &NbdCounters,
        (origin, kind): (Origin, NbdRequestKind),
        (errno, reason): (Errno, &str),
        bytes: usize,
    ) {
        counters.answered(kind, 0, Duration::ZERO, true);
        self.replies.error(origin, errno, reason);
        self.replied(bytes);
    }

    /// Queues the reply to a request for nothing.
    pub(super) fn answer_empty(&mut self, counters: &NbdCounters, origin: Origin, kind: NbdRequestKind, bytes: usize) {
        counters.answered(kind, 0, Duration::ZERO, false);
        match kind {
            NbdRequestKind::Read => self.replies.no_data(origin),
            _ => self.replies.done(origin),
        }
        self.replied(bytes);
    }

    /// Counts a request as failed that gets no reply, as the connection ends.
    pub(super) fn leave_unanswered(&mut self, counters: &NbdCounters, now: Instant, pending: &Pending) {
        counters.answered(pending.kind, pending.extent.len, now.since(pending.began), true);
        self.total.subtract(Usage { requests: 1, bytes: pending.bytes });
    }

    /// Queues the reply to a request that the device has completed.
    pub(super) fn answer(
        &mut self,
        counters: &NbdCounters,
        now: Instant,
        result: Result<NbdReplyData, RequestFailure>,
        pending: Pending,
    ) {
        let Pending { origin, kind, extent, whole, failed, began, bytes } = pending;
        let result = match result {
            Ok(NbdReplyData::Data(data)) if data.len() as u64 != extent.len => Err(execute::short_read().into()),
            Ok(NbdReplyData::Status(runs)) if runs.is_empty() => Err(execute::short_read().into()),
            other => other,
        };
        counters.answered(kind, extent.len, now.since(began), result.is_err());
        match result {
            Ok(NbdReplyData::Data(data)) => self.replies.data(origin, extent, whole, data),
            Ok(NbdReplyData::Done) => self.replies.done(origin),
            Ok(NbdReplyData::Status(runs)) => self.replies.status(origin, &runs),
            Err(RequestFailure { error, at }) => {
                let errno = errno(&error, failed);
                tracing::debug!(%error, ?kind, offset = extent.offset, len = extent.len, "NBD request failed");
                match at {
                    Some(at) if at != extent.offset => self.replies.error_at(origin, errno, &error.to_string(), at),
                    _ => self.replies.error(origin, errno, &error.to_string()),
                }
            }
        }
        self.replied(bytes);
    }

    /// Accounts for another reply in `replies`.
    fn replied(&mut self, bytes: usize) {
        self.unsent.add(Usage { requests: 1, bytes });
        if self.discarding {
            self.replies.clear();
            let dropped = std::mem::take(&mut self.unsent);
            self.release(dropped);
        } else if self.replies.len() >= SEND_BYTES || self.replies.parts() >= SEND_PARTS {
            self.batches.push_back((self.replies.take(), std::mem::take(&mut self.unsent)));
        }
        self.assert_accounts();
    }

    fn release(&mut self, usage: Usage) {
        self.total.subtract(usage);
        self.assert_accounts();
    }

    /// Asserts that no more is queued than was admitted.
    fn assert_accounts(&self) {
        debug_assert!(self.total.requests >= self.unsent.requests + self.sending.requests);
        debug_assert!(self.total.bytes >= self.unsent.bytes + self.sending.bytes);
        debug_assert!(!self.discarding || self.batches.is_empty());
    }

    // ---- Batches ----

    /// Takes the next batch to send.
    pub(super) fn next_batch(&mut self) -> Option<BufList> {
        debug_assert_eq!(self.sending, Usage::default(), "one batch is sent at a time");
        if let Some((batch, usage)) = self.batches.pop_front() {
            self.sending = usage;
            return Some(batch);
        }
        if self.replies.is_empty() {
            return None;
        }
        self.sending = std::mem::take(&mut self.unsent);
        Some(self.replies.take())
    }

    /// Releases what the batch that was being sent held.
    pub(super) fn sent(&mut self) {
        let sent = std::mem::take(&mut self.sending);
        self.release(sent);
    }

    /// Returns true when every reply has been sent or discarded.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.replies.is_empty() && self.sending.requests == 0
    }

    /// Discards queued replies, and all further ones.
    pub(super) fn discard_output(&mut self) {
        self.discarding = true;
        let mut dropped = std::mem::take(&mut self.unsent);
        for (_, usage) in self.batches.drain(..) {
            dropped.add(usage);
        }
        self.replies.clear();
        self.release(dropped);
    }
}
