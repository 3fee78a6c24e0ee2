//! Transmission phase of a connection: receives, submits to the device, gathers replies, sends.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BlockDevice, BufList, BufMut, Extent, Request};
use forebay_reactor::sync::InFlight;
use forebay_reactor::time::Sleep;
use forebay_reactor::{Instant, now, sleep};
use forebay_serve::{Intake, Traffic, Want, exchange};

use super::handshake::Channel;
use super::work::{self, Failure, Outcome, Work};
use super::{Control, Options};
use crate::session::{Action, Command, Failed, Origin, Payload, Pools, Receiver, Replies, Rules, Violation, errno};
use crate::stats::{Counters, RequestKind};
use crate::wire::Errno;

/// Requests begun in one turn, after which the connection yields.
const TURN_REQUESTS: u32 = 128;
/// Bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Buffers gathered for one send.
const SEND_PARTS: usize = 256;
/// Time during which an ending connection still answers requests with an error, so that clients see the reason.
const LINGER: Duration = Duration::from_millis(100);

/// Reason why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// Disconnect request of the client.
    Disconnected,
    /// Connection closed by the client between messages, without a disconnect request.
    Closed,
    /// Connection closed by the client in the middle of a message.
    Broken,
    /// Socket error.
    Socket(io::Error),
    /// Protocol error of the client.
    Violation(Violation),
    /// Shutdown of the server, or detached export.
    Stopped,
}

/// Context of a request in flight.
struct Pending {
    origin: Origin,
    kind: RequestKind,
    extent: Extent,
    whole: bool,
    failed: Failed,
    began: Instant,
    bytes: usize,
}

/// Requests and bytes that count against a connection's limits.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    requests: usize,
    bytes: usize,
}

/// Outgoing replies, and the requests and bytes that they hold until they are sent.
struct Outbox {
    replies: Replies,
    /// Resources of the replies in `replies`.
    unsent: Held,
    /// Full batches, ready to be sent.
    batches: VecDeque<(BufList, Held)>,
    /// Resources of the batch that is being sent.
    sending: Held,
    /// Resources of everything not sent yet, requests in flight included.
    held: Held,
    /// Replies are discarded, because the client does not read them any more.
    deaf: bool,
}

impl Outbox {
    /// Accounts for another reply in `replies`.
    fn replied(&mut self, bytes: usize) {
        self.unsent.requests += 1;
        self.unsent.bytes += bytes;
        if self.deaf {
            self.replies.clear();
            self.release(self.unsent);
            self.unsent = Held::default();
        } else if self.replies.len() >= SEND_BYTES || self.replies.parts() >= SEND_PARTS {
            self.batches.push_back((self.replies.take(), std::mem::take(&mut self.unsent)));
        }
    }

    fn release(&mut self, held: Held) {
        self.held.requests -= held.requests;
        self.held.bytes -= held.bytes;
    }

    fn next_batch(&mut self) -> Option<BufList> {
        debug_assert_eq!(self.sending.requests, 0);
        if let Some((batch, held)) = self.batches.pop_front() {
            self.sending = held;
            return Some(batch);
        }
        if self.replies.is_empty() {
            return None;
        }
        self.sending = std::mem::take(&mut self.unsent);
        Some(self.replies.take())
    }

    fn sent(&mut self) {
        let sent = std::mem::take(&mut self.sending);
        self.release(sent);
    }

    fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.replies.is_empty() && self.sending.requests == 0
    }

    /// Discards queued replies, and all further ones.
    fn deafen(&mut self) {
        self.deaf = true;
        let mut dropped = std::mem::take(&mut self.unsent);
        for (_, held) in self.batches.drain(..) {
            dropped.requests += held.requests;
            dropped.bytes += held.bytes;
        }
        self.replies.clear();
        self.release(dropped);
    }

    /// Queues the reply to a request that the device has completed.
    fn answer(&mut self, counters: &Counters, now: Instant, result: Result<Outcome, Failure>, pending: Pending) {
        let Pending { origin, kind, extent, whole, failed, began, bytes } = pending;
        let result = match result {
            Ok(Outcome::Data(data)) if data.len() as u64 != extent.len => Err(work::short_read().into()),
            Ok(Outcome::Status(runs)) if runs.is_empty() => Err(work::short_read().into()),
            other => other,
        };
        counters.answered(kind, extent.len, now.since(began), result.is_err());
        match result {
            Ok(Outcome::Data(data)) => self.replies.data(origin, extent, whole, data),
            Ok(Outcome::Done) => self.replies.done(origin),
            Ok(Outcome::Status(runs)) => self.replies.status(origin, &runs),
            Err(Failure { error, at }) => {
                let errno = errno(&error, failed);
                tracing::debug!(%error, ?kind, offset = extent.offset, len = extent.len, "a request failed");
                match at {
                    Some(at) if at != extent.offset => self.replies.error_at(origin, errno, &error.to_string(), at),
                    _ => self.replies.error(origin, errno, &error.to_string()),
                }
            }
        }
        self.replied(bytes);
    }
}

pub(super) struct Transmission<'a> {
    control: &'a Control,
    options: &'a Options,
    counters: &'a Counters,
    device: Rc<dyn BlockDevice>,
    transfer_max: u64,
    rules: Rules,
    receiver: Receiver,
    outbox: Outbox,
    work: InFlight<Work, Pending>,
    /// Command that waits for a limit or for the next turn.
    stalled: Option<(Command, Payload)>,
    /// Reason of the end, once the connection receives nothing any more.
    end: Option<End>,
    /// Requests are refused, because the server or export is shutting down.
    draining: bool,
    timer: Option<Sleep>,
    lingered: bool,
    now: Instant,
}

impl<'a> Transmission<'a> {
    /// Creates a transmission with negotiated `rules` and the bytes received after the negotiation.
    pub(super) fn new(
        (control, options, counters): (&'a Control, &'a Options, &'a Counters),
        pools: &Rc<Pools>,
        device: Rc<dyn BlockDevice>,
        rules: Rules,
        received: &[u8],
    ) -> Self {
        let outbox = Outbox {
            replies: Replies::new(pools.clone(), rules.replies),
            unsent: Held::default(),
            batches: VecDeque::new(),
            sending: Held::default(),
            held: Held::default(),
            deaf: false,
        };
        Self {
            control,
            options,
            counters,
            transfer_max: u64::from(device.geometry().transfer_max.max(rules.block_min)),
            device,
            rules,
            receiver: Receiver::new(pools.clone(), received),
            outbox,
            work: InFlight::new(options.requests_max),
            stalled: None,
            end: None,
            draining: false,
            timer: None,
            lingered: false,
            now: now(),
        }
    }

    /// Runs the transmission until the connection ends.  All requests that were begun are done then, unless
    /// [`Options::drain_timeout`] has expired.
    pub(super) async fn run(mut self, channel: Channel) -> End {
        match channel {
            Channel::Plain(stream) => {
                let receive = |want| forebay_serve::receive(stream.clone(), want);
                exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await
            }
            Channel::Secure(stream) => {
                let receive = |want| stream.clone().receive(want);
                let end = exchange(&mut self, receive, |batch| stream.clone().send(batch)).await;
                if self.outbox.is_empty() {
                    stream.close().await;
                }
                end
            }
        }
    }

    fn stop_receiving(&mut self, end: End) {
        if self.end.is_none() {
            self.end = Some(end);
            self.stalled = None;
            if !self.draining {
                // From here on requests in flight have `drain_timeout` to complete.
                self.timer = Some(sleep(self.options.drain_timeout));
                self.lingered = true;
            }
        }
    }

    fn begin(&mut self, command: &Command, payload: Payload, bytes: usize) {
        let origin = Origin::from(command);
        let kind = RequestKind::of(command.kind);
        if command.action == Action::Disconnect {
            return self.stop_receiving(End::Disconnected);
        }
        self.outbox.held.requests += 1;
        self.outbox.held.bytes += bytes;
        if self.draining {
            self.counters.answered(kind, 0, Duration::ZERO, true);
            self.outbox.replies.error(origin, Errno::Shutdown, "the server is closing down");
            return self.outbox.replied(bytes);
        }
        let none = Extent::new(command.offset, 0);
        let (extent, whole, failed) = match command.action {
            Action::Read { extent, whole } => (extent, whole, Failed::Other),
            Action::Write { extent, .. } => (extent, false, Failed::Write),
            Action::WriteZeroes { extent, fast, .. } => {
                (extent, false, if fast { Failed::FastZero } else { Failed::Write })
            }
            Action::Trim { extent, .. } | Action::BlockStatus { extent, .. } => (extent, false, Failed::Other),
            _ => (none, false, Failed::Other),
        };
        let work = match command.action {
            Action::Read { extent, .. } => work::read(&self.device, extent, self.transfer_max),
            Action::Write { extent, fua } => work::write(&self.device, extent, payload, fua, self.transfer_max),
            Action::Flush => Work::One(self.device.submit(Request::Flush)),
            Action::Trim { extent, fua } => work::trim(&self.device, extent, fua),
            Action::WriteZeroes { extent, no_hole: no_unmap, fua, .. } => {
                Work::One(self.device.submit(Request::WriteZeroes { extent, no_unmap, fua }))
            }
            Action::BlockStatus { extent, one } => work::status(&self.device, extent, one),
            Action::Nothing => {
                self.counters.answered(kind, 0, Duration::ZERO, false);
                match kind {
                    RequestKind::Read => self.outbox.replies.no_data(origin),
                    _ => self.outbox.replies.done(origin),
                }
                return self.outbox.replied(bytes);
            }
            Action::Refuse(errno, why) => {
                self.counters.answered(kind, 0, Duration::ZERO, true);
                self.outbox.replies.error(origin, errno, why);
                return self.outbox.replied(bytes);
            }
            Action::Disconnect => unreachable!("handled above"),
        };
        let pending = Pending { origin, kind, extent, whole, failed, began: self.now, bytes };
        if let Some((result, pending)) = self.work.start(work, pending) {
            self.outbox.answer(self.counters, now(), result, pending);
        }
    }
}

impl Traffic for Transmission<'_> {
    type End = End;

    const TURN: u32 = TURN_REQUESTS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.now = now();
        self.work.set_task(cx.waker());
        self.control.bell.set_task(cx.waker());
        if self.control.bell.stopping() && !self.draining {
            self.draining = true;
            self.timer = Some(sleep(LINGER));
        }
        self.rules.size = self.device.geometry().size;
        let (outbox, counters, now) = (&mut self.outbox, self.counters, self.now);
        self.work.poll(|result, pending| outbox.answer(counters, now, result, pending));
    }

    fn want(&mut self) -> Want {
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, buf: BufMut) {
        match result {
            Ok(0) => {
                let whole = self.receiver.ended(buf);
                self.stop_receiving(if whole { End::Closed } else { End::Broken });
            }
            Ok(got) => self.receiver.received(buf, got),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.stop_receiving(End::Broken),
            Err(error) => self.stop_receiving(End::Socket(error)),
        }
    }

    fn take_in(&mut self, budget: &mut u32) -> Intake {
        loop {
            if self.end.is_some() {
                return Intake::Hungry;
            }
            let (command, payload) = match self.stalled.take() {
                Some(stalled) => stalled,
                None => match self.receiver.next(&self.rules) {
                    Ok(Some(next)) => next,
                    Ok(None) => return Intake::Hungry,
                    Err(violation) => {
                        self.stop_receiving(End::Violation(violation));
                        return Intake::Hungry;
                    }
                },
            };
            let bytes = match command.action {
                Action::Read { extent, .. } | Action::Write { extent, .. } => extent.len as usize,
                _ => 0,
            };
            let held = self.outbox.held;
            let room = held.requests < self.options.requests_max
                && (held.bytes == 0 || held.bytes + bytes <= self.options.bytes_max);
            if !room || *budget == 0 {
                self.stalled = Some((command, payload));
                return if room { Intake::Tired } else { Intake::Full };
            }
            *budget -= 1;
            self.begin(&command, payload, bytes);
        }
    }

    fn next_batch(&mut self) -> Option<BufList> {
        self.outbox.next_batch()
    }

    fn sent(&mut self, result: io::Result<()>) {
        self.outbox.sent();
        if let Err(error) = result {
            self.outbox.deafen();
            self.stop_receiving(End::Socket(error));
        }
    }

    fn is_open(&self) -> bool {
        self.end.is_none()
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        let mut timed_out = false;
        while let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            timed_out = self.lingered;
            self.timer = (!timed_out).then(|| sleep(self.options.drain_timeout));
            self.lingered = true;
        }
        let quiet = self.work.is_empty() && self.outbox.is_empty() && self.stalled.is_none();
        let over = self.end.is_some() || (self.draining && self.lingered);
        if timed_out || (quiet && over) {
            if !quiet {
                tracing::warn!(requests = self.work.len(), "a connection ends before its requests are done");
            }
            return Poll::Ready(self.end.take().unwrap_or(End::Stopped));
        }
        Poll::Pending
    }
}
