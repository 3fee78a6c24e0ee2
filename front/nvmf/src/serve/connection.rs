//! Connection task: receives, dispatches commands, gathers replies, sends.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forebay_block::{BufList, BufMut, LocalFuture};
use forebay_reactor::sync::InFlight;
use forebay_reactor::time::Sleep;
use forebay_reactor::{Addr, Stream, cross, now, sleep};
use forebay_serve::{Intake, Traffic, Want, exchange};

use super::io::{Fused, Pending, Started};
use super::outbox::Outbox;
use super::tls::Channel;
use super::work::Work;
use super::{OpenNamespace, Server};
use crate::session::auth::Exchange;
use crate::session::{ADMIN_ENTRIES_MAX, Agreed, Controller, Fatal, H2C_DATA_MAX, Pdu, Receiver, Replies, Transfers};
use crate::stats::Entered;
use crate::subsystem::{Association, Control, Notice, Port};
use crate::wire::pdu::{Fes, IcReq, IcResp};
use crate::wire::{Cqe, Sqe, Status};

/// PDUs processed in one turn, after which the connection yields.
const TURN_PDUS: u32 = 16;
/// Time that a connection stays open after a protocol error, so that the host can read the reason.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// Time in which a host has to close its end of a connection when the server stops.  Linux sends commands from the
/// context of the process that submits them, up to 6.1 at least without MSG_NOSIGNAL: a reset kills that process.
const CLOSING: Duration = Duration::from_secs(1);

/// Reason why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// Closed by the host.
    Closed,
    /// Terminated by the host, with this error status.
    Terminated { _status: u16 },
    /// Queue disconnected by the host.
    Disconnected,
    /// Socket error.
    Socket(io::Error),
    /// Protocol error of the host.
    Fatal(Fatal),
    /// Timeout: the connection did not become a queue, or its host did not authenticate, in time.
    TooSlow,
    /// Failed TLS handshake.
    Insecure,
    /// Failed authentication.
    Unauthenticated,
    /// Too many refused Connects.
    Refused,
    /// Timeout: the host has not sent the data that it was asked for.
    Overdue,
    /// Expired keep-alive timeout.
    Silent,
    /// Shutdown of the server, or end of the controller.
    Stopped,
}

/// Role of a connection.
pub(super) enum Role {
    /// Connection before its Connect.
    Fresh,
    /// Admin queue, with its controller.
    Admin(Box<Admin>),
    /// I/O queue.
    Io,
}

/// State of an admin queue.
pub(super) struct Admin {
    pub(super) controller: Controller,
    pub(super) notices: cross::Receiver<Notice>,
    pub(super) keep_alive: Option<Sleep>,
    /// Keep-alive timeout to which the timer was set, in milliseconds.
    pub(super) keep_alive_ms: u32,
    /// Flush that must complete before the controller is shut down.
    pub(super) flushing: Option<LocalFuture<bool>>,
}

/// State that every queue has.
pub(super) struct Queue {
    pub(super) id: u16,
    pub(super) association: Arc<Association>,
    pub(super) entries: u16,
    pub(super) head: u16,
    /// Submission queue flow control (SQHD) is enabled.
    pub(super) flow_control: bool,
    pub(super) entered: Entered,
}

/// Command that the requested data belongs to.
pub(super) enum Note {
    /// I/O command.
    Io(Started),
    /// One half of a fused operation; true for the first.
    Fused(Rc<Fused>, bool),
    /// Admin or Fabrics command.
    Admin(Sqe),
}

/// Count of a connection that is not a queue yet; decremented when dropped.
struct Fresh(Rc<Server>);

impl Fresh {
    fn new(server: &Rc<Server>) -> Self {
        server.fresh.set(server.fresh.get() + 1);
        Self(server.clone())
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        self.0.fresh.set(self.0.fresh.get() - 1);
    }
}

pub(super) struct Connection {
    pub(super) server: Rc<Server>,
    pub(super) port: Arc<Port>,
    pub(super) stream: Stream,
    /// TLS session, if the port requires TLS.
    pub(super) channel: Option<Rc<Channel>>,
    pub(super) peer: Addr,
    pub(super) control: Arc<Control>,
    pub(super) receiver: Receiver,
    pub(super) outbox: Outbox,
    pub(super) work: InFlight<Work, Pending>,
    /// Commands that wait for buffer space.
    pub(super) waiting: VecDeque<Started>,
    pub(super) transfers: Transfers<Note>,
    /// First half of a fused operation, whose second half comes next.
    pub(super) fused: Option<Sqe>,
    pub(super) fused_data: BufList,
    pub(super) role: Role,
    pub(super) queue: Option<Queue>,
    /// Commands without a response yet.
    pub(super) outstanding: usize,
    /// Namespace of the last command, and the withdrawal count when it was looked up.
    pub(super) last: Option<(u64, Rc<OpenNamespace>)>,
    /// Connect that waits for an earlier controller of the host to end.
    pub(super) connecting: Option<(Sqe, Vec<u8>, Sleep)>,
    /// Authentication state, if the host must authenticate.
    pub(super) auth: Option<Box<Exchange>>,
    /// Deadline of an authentication in progress.
    pub(super) auth_deadline: Option<Sleep>,
    /// Authentication Receive that is to be told of a failure, after a delay.
    pub(super) failing: Option<(Sqe, Sleep)>,
    /// Number of refused Connects.
    pub(super) refusals: u32,
    /// Set once a Connect has checked for earlier controllers of its host.
    pub(super) has_looked: bool,
    /// Namespaces that this queue has used.
    pub(super) used: BTreeSet<u32>,
    /// Timer for overdue data from the host.
    overdue: Option<Sleep>,
    /// Count among the connections that are not a queue yet.
    fresh: Option<Fresh>,
    pub(super) waker: Waker,
    /// Reason of the end, once the connection accepts no more input.
    end: Option<End>,
    /// Received bytes are discarded.
    discard: bool,
    /// Final PDU is sent; the connection waits for the host to close.
    lingering: bool,
    pub(super) timer: Option<Sleep>,
}

impl Connection {
    pub(super) fn new(server: Rc<Server>, port: Arc<Port>, stream: Stream, peer: Addr, control: Arc<Control>) -> Self {
        let pools = server.pools.clone();
        let timer = Some(sleep(server.subsystems.limits().handshake_timeout));
        Self {
            port,
            stream,
            channel: None,
            peer,
            control,
            receiver: Receiver::new(pools.clone()),
            outbox: Outbox::new(Replies::new(pools)),
            work: InFlight::new(1),
            waiting: VecDeque::new(),
            transfers: Transfers::default(),
            fused: None,
            fused_data: BufList::new(),
            role: Role::Fresh,
            queue: None,
            outstanding: 0,
            last: None,
            connecting: None,
            auth: None,
            auth_deadline: None,
            failing: None,
            refusals: 0,
            has_looked: false,
            used: BTreeSet::new(),
            overdue: None,
            fresh: Some(Fresh::new(&server)),
            waker: Waker::noop().clone(),
            end: None,
            discard: false,
            lingering: false,
            timer,
            server,
        }
    }

    /// Runs the connection until it ends.  The host has [`Limits::drain_timeout`](crate::Limits::drain_timeout) to
    /// read its responses.  All commands that were begun are done when this returns, unless the server stops.
    pub(super) async fn run(mut self) -> End {
        if self.port.tls {
            match self.secure().await {
                Ok(channel) => self.channel = Some(channel),
                Err(end) => {
                    self.stream.shutdown();
                    return end;
                }
            }
        }
        let end = match self.channel.clone() {
            None => {
                let stream = self.stream.clone();
                let receive = |want| forebay_serve::receive(stream.clone(), want);
                exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await
            }
            Some(channel) => {
                let stream = channel.stream.clone();
                let receive = |want| stream.clone().receive(want);
                let end = exchange(&mut self, receive, |batch| stream.clone().send(batch)).await;
                if self.outbox.is_empty() {
                    stream.close().await;
                }
                end
            }
        };
        if matches!(end, End::Stopped) && self.server.connections.stopping() {
            self.stream.close_gracefully(CLOSING).await;
        }
        self.stream.shutdown();
        self.outbox.deafen();
        self.last = None;
        self.settle().await;
        if let Some(queue) = self.queue.take() {
            self.server.subsystems.disconnect(&queue.association, queue.id);
        }
        end
    }

    /// Waits until the device has completed all commands, without a time limit.  The queue counts as connected until
    /// then, so that the host cannot reconnect before.  Returns early only if the server stops.
    async fn settle(&mut self) {
        std::future::poll_fn(|cx| {
            self.work.set_task(cx.waker());
            self.work.poll(|_, _| {});
            if self.work.is_empty() || self.server.connections.stopping() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub(super) fn stop_receiving(&mut self, end: End) {
        if self.end.is_some() {
            return;
        }
        if let End::Fatal(fatal) = &end {
            // The host gets the C2HTermReq, and nothing after it.
            self.outbox.conclude(&fatal.encode());
            self.discard = true;
        }
        if let (Role::Admin(_), Some(queue)) = (&self.role, &self.queue) {
            // A controller ends with its admin queue, even while this connection still has responses to send.
            queue.association.end_queues(true);
        }
        self.end = Some(end);
        // From here on commands in flight have `drain_timeout` to complete.
        self.timer = Some(sleep(self.server.subsystems.limits().drain_timeout));
        self.connecting = None;
        (self.auth_deadline, self.failing) = (None, None);
        self.fused = None;
        self.fused_data = BufList::new();
        // Commands whose data has not arrived never began.  Their bytes are released with the connection.
        drop(self.transfers.clear().collect::<Vec<_>>());
        self.waiting.clear();
    }

    /// Returns whether to stop taking commands for now.  Progress never depends on the host sending data: requested
    /// data may be queued behind the commands that are not taken.
    fn is_full(&self) -> bool {
        let over = self.outbox.is_over(self.server.subsystems.limits().connection_bytes);
        self.outbox.is_full() || (over && (self.outbox.keeps_bytes() || !self.work.is_empty()))
    }

    fn take(&mut self, pdu: Pdu) {
        match pdu {
            Pdu::IcReq(request) => self.initialize(&request),
            Pdu::Term(status) => {
                tracing::info!(peer = %self.peer, status, "a host ends its connection with an error");
                self.outbox.deafen();
                self.stop_receiving(End::Terminated { _status: status });
            }
            Pdu::Command { sqe, data, intact } => self.command(sqe, data, intact),
            Pdu::Data { header, data, intact, .. } => {
                if let Some((note, data, intact)) = self.transfers.arrived(&header, data, intact) {
                    self.data_arrived(header.cid, note, data, intact);
                }
            }
        }
    }

    fn initialize(&mut self, request: &IcReq) {
        let agreed = Agreed::of(request);
        let resp = IcResp {
            version: 0,
            controller_alignment: 0,
            digests: agreed.digests(),
            h2c_data_max: H2C_DATA_MAX as u32,
        };
        self.outbox.replies.ic_resp(&resp);
        self.outbox.replied(0);
        self.receiver.agree(agreed);
        self.outbox.replies.agree(agreed);
    }

    fn command(&mut self, sqe: Sqe, data: BufList, intact: bool) {
        let entries = match &mut self.queue {
            None => 1,
            Some(queue) => {
                if queue.flow_control {
                    queue.head = if queue.head + 1 >= queue.entries { 0 } else { queue.head + 1 };
                }
                usize::from(queue.entries)
            }
        };
        if self.outstanding >= entries {
            let fatal = Fatal::new(Fes::Sequence, 0, &[], "more commands than the queue has room for");
            return self.stop_receiving(End::Fatal(fatal));
        }
        self.outstanding += 1;
        if !intact {
            self.server.subsystems.stats().count(|counts| counts.digest_errors += 1);
            return self.fail(&sqe, Status::TRANSPORT);
        }
        if !self.is_authenticated() && !Self::is_of_authentication(&sqe) {
            return self.fail(&sqe, Status::AUTH_REQUIRED.final_());
        }
        match self.role {
            Role::Io if sqe.opcode() != crate::wire::command::FABRICS => self.io_command(sqe, data),
            _ => self.admin_command(sqe, data),
        }
    }

    fn data_arrived(&mut self, cid: u16, note: Note, data: BufList, intact: bool) {
        if !intact {
            self.server.subsystems.stats().count(|counts| counts.digest_errors += 1);
        }
        match note {
            Note::Io(started) if intact => self.start(started, data),
            Note::Io(started) => self.fail_started(started, Status::TRANSPORT),
            Note::Fused(fused, first) => self.fused_arrived(&fused, first, data, intact),
            Note::Admin(sqe) if intact => self.admin_with_data(&sqe, &data.to_vec()),
            Note::Admin(sqe) => {
                debug_assert_eq!(sqe.cid(), cid);
                self.fail(&sqe, Status::TRANSPORT);
            }
        }
    }

    /// Requests a command's data from the host, with an R2T.
    pub(super) fn ask(&mut self, cid: u16, len: u32, note: Note) {
        let tag = self.transfers.begin(cid, len, now().as_nanos(), note);
        if self.overdue.is_none() {
            self.overdue = Some(sleep(self.server.subsystems.limits().data_timeout));
            // A new timer has to be polled once to register its wake-up.
            self.waker.wake_by_ref();
        }
        self.outbox.replies.ready_to_transfer(cid, tag, len);
        self.outbox.replied(0);
    }

    /// Ends the connection if the host is overdue with requested data.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) {
        while let Some(timer) = &mut self.overdue
            && Pin::new(timer).poll(cx).is_ready()
        {
            let Some(since) = self.transfers.oldest() else {
                self.overdue = None;
                return;
            };
            let waited = Duration::from_nanos(now().as_nanos() - since);
            let timeout = self.server.subsystems.limits().data_timeout;
            if waited >= timeout {
                self.overdue = None;
                return self.stop_receiving(End::Overdue);
            }
            self.overdue = Some(sleep(timeout - waited));
        }
    }

    /// Queues the response to a command, whose reply holds `bytes` of the budget.
    pub(super) fn respond(&mut self, cid: u16, status: Status, result: u64, bytes: usize) {
        self.outstanding -= 1;
        let sq_head = self.queue.as_ref().map_or(0, |queue| queue.head);
        self.outbox.replies.response(&Cqe { result, sq_head, cid, status });
        self.outbox.replied(bytes);
    }

    /// Queues an error response to a command, and records the error.
    pub(super) fn fail(&mut self, sqe: &Sqe, status: Status) {
        self.note_error(sqe, status);
        self.respond(sqe.cid(), status, 0, 0);
    }

    /// Returns the maximum number of entries of a queue; queue 0 is the admin queue.
    pub(super) fn entries_max(queue: u16) -> usize {
        if queue == 0 { ADMIN_ENTRIES_MAX } else { crate::session::QUEUE_ENTRIES_MAX }
    }

    /// Clears the handshake timeout: the connection is a queue, and its host has authenticated if it must.
    pub(super) fn settled(&mut self) {
        if self.end.is_none() {
            self.timer = None;
        }
        self.fresh = None;
    }
}

impl Traffic for Connection {
    type End = End;

    const TURN: u32 = TURN_PDUS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.work.set_task(cx.waker());
        if !self.waker.will_wake(cx.waker()) {
            self.waker = cx.waker().clone();
            self.control.set_task(cx.waker());
            self.outbox.set_task(cx.waker());
        }
        if self.control.stopping() {
            self.stop_receiving(End::Stopped);
        }
        if self.last.as_ref().is_some_and(|(seen, _)| *seen != self.server.subsystems.withdrawals()) {
            // Releases a namespace whose withdrawal may be waiting for it.
            self.last = None;
        }
        self.poll_work();
        self.poll_admin(cx);
        self.poll_auth(cx);
        self.poll_overdue(cx);
        self.start_waiting();
    }

    fn want(&mut self) -> Want {
        self.outbox.replies.rest();
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, mut buf: BufMut) {
        match result {
            Ok(0) => {
                self.discard = false;
                self.outbox.deafen();
                self.stop_receiving(End::Closed);
            }
            Ok(_) if self.discard => {
                buf.clear();
                self.receiver.received(buf, 0);
            }
            Ok(got) => {
                if let Some(queue) = &self.queue {
                    queue.association.note_traffic();
                }
                self.receiver.received(buf, got);
            }
            Err(error) => {
                self.discard = false;
                self.outbox.deafen();
                self.stop_receiving(End::Socket(error));
            }
        }
    }

    fn take_in(&mut self, budget: &mut u32) -> Intake {
        loop {
            if self.end.is_some() {
                return Intake::Hungry;
            }
            if self.connecting.is_some() {
                // Nothing may follow a waiting Connect; later bytes stay in the socket.
                return Intake::Busy;
            }
            if self.is_full() {
                return Intake::Full;
            }
            if *budget == 0 {
                return Intake::Tired;
            }
            let transfers = &self.transfers;
            match self.receiver.next(|header, last| transfers.check(header, last)) {
                Ok(Some(pdu)) => {
                    *budget -= 1;
                    self.take(pdu);
                }
                Ok(None) => return Intake::Hungry,
                Err(fatal) => {
                    self.stop_receiving(End::Fatal(fatal));
                    return Intake::Hungry;
                }
            }
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
        self.start_waiting();
    }

    fn is_open(&self) -> bool {
        self.end.is_none() || self.discard
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        self.control.set_under_way(self.work.len());
        if let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            self.timer = None;
            let Some(end) = self.end.take() else {
                return Poll::Ready(End::TooSlow);
            };
            if !self.work.is_empty() {
                tracing::warn!(
                    peer = %self.peer, commands = self.work.len(), "a connection has ended, but not its commands"
                );
            }
            return Poll::Ready(end);
        }
        if self.end.is_some() && self.work.is_empty() && self.outbox.is_empty() {
            if self.discard {
                // Everything is sent.  The host has a moment to read it and to close.
                if !std::mem::replace(&mut self.lingering, true) {
                    self.timer = Some(sleep(LINGER));
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
            return Poll::Ready(self.end.take().unwrap_or(End::Stopped));
        }
        Poll::Pending
    }
}
