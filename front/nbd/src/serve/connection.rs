//! Transmission phase of a connection: receives, submits to the device, gathers replies, sends.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{BlockDevice, BlockRequest, BufList, BufMut, ErrorKind, Extent};
use forebay_reactor::sync::InFlight;
use forebay_reactor::{Instant, Stream, now};
use forebay_serve::{ConnectionHandler, Intake, ReceiveRequest, exchange};

use super::ending::NbdTeardown;
use super::execute::{self, RequestFuture};
use super::handshake::NbdStream;
use super::outbox::{NbdOutbox, Pending};
use super::{NbdConnectionControl, NbdServerOptions};
use crate::session::{Failed, NbdAction, NbdCommand, NbdPools, NbdReceiver, NbdRules, NbdViolation, Origin, Payload};
use crate::stats::{NbdCounters, NbdRequestKind};
use crate::wire::Errno;

/// Requests begun in one turn, after which the connection yields.
const TURN_REQUESTS: u32 = 128;
/// Reason why a connection ended.
#[derive(Debug)]
pub(super) enum NbdEndReason {
    /// Disconnect request of the client.
    Disconnected,
    /// Connection closed by the client between messages, without a disconnect request.
    Closed,
    /// Connection closed by the client in the middle of a message.
    Broken,
    /// Socket error.
    Socket(io::Error),
    /// Protocol error of the client.
    Violation(NbdViolation),
    /// Shutdown of the server, or detached export.
    Stopped,
}

pub(super) struct Transmission<'a> {
    control: &'a NbdConnectionControl,
    options: &'a NbdServerOptions,
    counters: &'a NbdCounters,
    device: Rc<dyn BlockDevice>,
    transfer_max: u64,
    rules: NbdRules,
    receiver: NbdReceiver,
    outbox: NbdOutbox,
    work: InFlight<RequestFuture, Pending>,
    /// Command that waits for a limit or for the next turn.
    stalled: Option<(NbdCommand, Payload)>,
    ending: NbdTeardown,
    now: Instant,
    /// Socket of a client that sends requests again over another connection.
    resuming: Option<Stream>,
}

impl<'a> Transmission<'a> {
    /// Creates a transmission with negotiated `rules` and the bytes received after the negotiation.
    pub(super) fn new(
        (control, options, counters): (&'a NbdConnectionControl, &'a NbdServerOptions, &'a NbdCounters),
        pools: &Rc<NbdPools>,
        device: Rc<dyn BlockDevice>,
        rules: NbdRules,
        received: &[u8],
        stream: &Stream,
    ) -> Self {
        Self {
            control,
            options,
            counters,
            transfer_max: u64::from(device.geometry().transfer_max.max(rules.block_min)),
            device,
            receiver: NbdReceiver::new(pools.clone(), received),
            outbox: NbdOutbox::new(pools, rules.replies),
            rules,
            work: InFlight::new(options.requests_max),
            stalled: None,
            ending: NbdTeardown::new(options.drain_timeout),
            now: now(),
            resuming: control.resumes.then(|| stream.clone()),
        }
    }

    /// Runs the transmission until the connection ends.  All requests that were begun are done then, unless
    /// [`NbdServerOptions::drain_timeout`] has expired.
    pub(super) async fn run(mut self, channel: NbdStream) -> NbdEndReason {
        match channel {
            NbdStream::Plain(stream) => {
                let receive = |want| forebay_serve::receive(stream.clone(), want);
                exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await
            }
            NbdStream::Secure(stream) => {
                let receive = |want| stream.clone().receive(want);
                let end = exchange(&mut self, receive, |batch| stream.clone().send(batch)).await;
                if self.outbox.is_empty() {
                    stream.close().await;
                }
                end
            }
        }
    }

    /// Ends the connection: nothing more is received, nor is a command begun that was received.
    fn stop_receiving(&mut self, end: NbdEndReason) {
        if self.ending.end(end) {
            self.stalled = None;
        }
    }

    /// Returns whether the client may have sent a command again already: it ends a connection before it does so.
    ///
    /// A command that was received before that must not be carried out after one that the client has sent later.  If the
    /// connection is not closed yet, the command is submitted in this turn, and so before any that the client sends
    /// again, provided that the same core serves the client's other connections.
    fn is_abandoned(&self, command: &NbdCommand) -> bool {
        let is_change =
            matches!(command.action, NbdAction::Write { .. } | NbdAction::WriteZeroes { .. } | NbdAction::Trim { .. });
        is_change && self.resuming.as_ref().is_some_and(Stream::is_peer_closed)
    }

    fn begin(&mut self, command: &NbdCommand, payload: Payload, bytes: usize) {
        let origin = Origin::from(command);
        let kind = NbdRequestKind::of(command.kind);
        if command.action == NbdAction::Disconnect {
            return self.stop_receiving(NbdEndReason::Disconnected);
        }
        if self.is_abandoned(command) {
            // Nobody reads a reply.
            return self.stop_receiving(NbdEndReason::Closed);
        }
        self.outbox.admit(bytes);
        if self.ending.is_draining() {
            let why = (Errno::Shutdown, "the server is closing down");
            return self.outbox.refuse(self.counters, (origin, kind), why, bytes);
        }
        let none = Extent::new(command.offset, 0);
        let (extent, whole, failed) = match command.action {
            NbdAction::Read { extent, whole } => (extent, whole, Failed::Other),
            NbdAction::Write { extent, .. } => (extent, false, Failed::Write),
            NbdAction::WriteZeroes { extent, fast, .. } => {
                (extent, false, if fast { Failed::FastZero } else { Failed::Write })
            }
            NbdAction::Trim { extent, .. } | NbdAction::BlockStatus { extent, .. } => (extent, false, Failed::Other),
            _ => (none, false, Failed::Other),
        };
        let work = match command.action {
            NbdAction::Read { extent, .. } => execute::read(&self.device, extent, self.transfer_max),
            NbdAction::Write { extent, fua } => execute::write(&self.device, extent, payload, fua, self.transfer_max),
            NbdAction::Flush => RequestFuture::One(self.device.submit(BlockRequest::Flush)),
            NbdAction::Trim { extent, fua } => execute::trim(&self.device, extent, fua),
            NbdAction::WriteZeroes { extent, no_hole: no_unmap, fua, .. } => {
                RequestFuture::One(self.device.submit(BlockRequest::WriteZeroes { extent, no_unmap, fua }))
            }
            NbdAction::BlockStatus { extent, one } => execute::status(&self.device, extent, one),
            NbdAction::Nothing => {
                return self.outbox.answer_empty(self.counters, origin, kind, bytes);
            }
            NbdAction::Refuse(errno, why) => {
                return self.outbox.refuse(self.counters, (origin, kind), (errno, why), bytes);
            }
            NbdAction::Disconnect => unreachable!("handled above"),
        };
        let pending = Pending { origin, kind, extent, whole, failed, began: self.now, bytes };
        if let Some((result, pending)) = self.work.start(work, pending) {
            self.outbox.answer(self.counters, now(), result, pending);
        }
    }
}

impl ConnectionHandler for Transmission<'_> {
    type End = NbdEndReason;

    const TURN: u32 = TURN_REQUESTS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.now = now();
        self.work.set_task(cx.waker());
        self.control.stop_signal.set_task(cx.waker());
        let stopping = self.control.stop_signal.stopping();
        match stopping {
            // An error would reach the application; a request without a reply is sent again.
            true if self.control.resumes => self.stop_receiving(NbdEndReason::Stopped),
            true => self.ending.drain(),
            false => {}
        }
        let (outbox, counters, now) = (&mut self.outbox, self.counters, self.now);
        let mut given_up = false;
        self.work.poll(|result, pending| match result {
            // Other paths are to be used: an error would reach the application, which a lost connection need not.
            Err(failure) if stopping && failure.error.kind() == ErrorKind::Fenced => {
                given_up = true;
                outbox.leave_unanswered(counters, now, &pending);
            }
            result => outbox.answer(counters, now, result, pending),
        });
        if given_up {
            self.stop_receiving(NbdEndReason::Stopped);
        }
    }

    fn want(&mut self) -> ReceiveRequest {
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, buf: BufMut) {
        // At each receive: a turn may have begun before a resize that the host was told of before it sent this.
        self.rules.size = self.device.geometry().size;
        match result {
            Ok(0) => {
                let whole = self.receiver.ended(buf);
                self.stop_receiving(if whole { NbdEndReason::Closed } else { NbdEndReason::Broken });
            }
            Ok(got) => self.receiver.received(buf, got),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.stop_receiving(NbdEndReason::Broken),
            Err(error) => self.stop_receiving(NbdEndReason::Socket(error)),
        }
    }

    fn take_in(&mut self, budget: &mut u32) -> Intake {
        loop {
            if !self.ending.is_open() {
                return Intake::NeedInput;
            }
            let (command, payload) = match self.stalled.take() {
                Some(stalled) => stalled,
                None => match self.receiver.next(&self.rules) {
                    Ok(Some(next)) => next,
                    Ok(None) => return Intake::NeedInput,
                    Err(violation) => {
                        self.stop_receiving(NbdEndReason::Violation(violation));
                        return Intake::NeedInput;
                    }
                },
            };
            let bytes = match command.action {
                NbdAction::Read { extent, .. } | NbdAction::Write { extent, .. } => extent.len as usize,
                _ => 0,
            };
            let has_space = self.outbox.has_space(bytes, self.options);
            if !has_space || *budget == 0 {
                self.stalled = Some((command, payload));
                return if has_space { Intake::BudgetSpent } else { Intake::Full };
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
            self.outbox.discard_output();
            self.stop_receiving(NbdEndReason::Socket(error));
        }
    }

    fn is_open(&self) -> bool {
        self.ending.is_open()
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<NbdEndReason> {
        let quiet = self.work.is_empty() && self.outbox.is_empty() && self.stalled.is_none();
        let over = self.ending.poll(cx, quiet);
        if over.is_ready() && !quiet {
            tracing::warn!(
                requests = self.work.len(),
                timeout = ?self.options.drain_timeout,
                "NBD connection closed with requests in flight: the device did not complete them in time"
            );
        }
        over
    }
}
