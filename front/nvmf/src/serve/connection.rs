//! One connection: receives, hands on commands, gathers replies, sends.

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
use super::tls::{self, Channel};
use super::work::Work;
use super::{OpenNamespace, Server};
use crate::session::auth::Exchange;
use crate::session::{ADMIN_ENTRIES_MAX, Agreed, Controller, Fatal, H2C_DATA_MAX, Pdu, Receiver, Replies, Transfers};
use crate::stats::Entered;
use crate::target::{Association, Control, Notice, Port};
use crate::wire::pdu::{Fes, IcReq, IcResp};
use crate::wire::{Cqe, Sqe, Status};

/// PDUs taken in one turn; then the connection lets the others have theirs.
const TURN_PDUS: u32 = 16;
/// How long a connection whose host broke a rule waits for it to close, so that it can read why.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// How a connection came to its end.
#[derive(Debug)]
pub(super) enum End {
    /// The host closed it.
    Closed,
    /// The host ended it, with this status.
    Terminated { _status: u16 },
    /// The host disconnected its queue.
    Disconnected,
    /// The socket failed.
    Socket(io::Error),
    /// The host broke the protocol.
    Fatal(Fatal),
    /// It did not become a queue in time, or its host did not authenticate in time.
    TooSlow,
    /// There was no agreement on TLS.
    Insecure,
    /// Its host has failed to authenticate.
    Unauthenticated,
    /// Its Connects were refused too often.
    Refused,
    /// The host has not sent the data that it was asked for.
    Overdue,
    /// The host fell silent.
    Silent,
    /// The server is closing down, or the controller has gone.
    Stopped,
}

/// What a connection is.
pub(super) enum Role {
    /// Nothing yet.
    Fresh,
    /// An admin queue, with its controller.
    Admin(Box<Admin>),
    /// An I/O queue.
    Io,
}

/// What only an admin queue has.
pub(super) struct Admin {
    pub(super) controller: Controller,
    pub(super) notices: cross::Receiver<Notice>,
    pub(super) keep_alive: Option<Sleep>,
    /// What the timer was set to, in milliseconds.
    pub(super) keep_alive_ms: u32,
    /// What has to become durable before the controller is shut down.
    pub(super) flushing: Option<LocalFuture<bool>>,
}

/// What every queue has.
pub(super) struct Queue {
    pub(super) id: u16,
    pub(super) association: Arc<Association>,
    pub(super) entries: u16,
    pub(super) head: u16,
    /// The host minds the queue's head.
    pub(super) flow_control: bool,
    pub(super) entered: Entered,
}

/// What the data of a command is for.
pub(super) enum Note {
    /// An I/O command.
    Io(Started),
    /// One half of a fused operation.
    Fused(Rc<Fused>, bool),
    /// A command of the admin queue, or of fabrics.
    Admin(Sqe),
}

/// One of the connections of a server that are no queue yet.
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
    /// Everything passes through it, where the port wants TLS.
    pub(super) channel: Option<Rc<Channel>>,
    pub(super) peer: Addr,
    pub(super) control: Arc<Control>,
    pub(super) receiver: Receiver,
    pub(super) outbox: Outbox,
    pub(super) work: InFlight<Work, Pending>,
    /// Commands that wait for room.
    pub(super) waiting: VecDeque<Started>,
    pub(super) transfers: Transfers<Note>,
    /// The first half of a fused operation, whose second half comes next.
    pub(super) fused: Option<Sqe>,
    pub(super) fused_data: BufList,
    pub(super) role: Role,
    pub(super) queue: Option<Queue>,
    /// Commands that are not answered yet.
    pub(super) outstanding: usize,
    /// The namespace of the last command, and the generation in which it was found.
    pub(super) last: Option<(u64, Rc<OpenNamespace>)>,
    /// The answer to a Connect that waits for an earlier controller of the host to end.
    pub(super) connecting: Option<(Sqe, Vec<u8>, Sleep)>,
    /// How the host shows who it is, where it has to.
    pub(super) auth: Option<Box<Exchange>>,
    /// What has begun of that has to have ended by then.
    pub(super) auth_deadline: Option<Sleep>,
    /// A Receive that will be told of a failure, but not at once.
    pub(super) failing: Option<(Sqe, Sleep)>,
    /// Connects that were refused.
    pub(super) refusals: u32,
    /// A Connect has looked for controllers of its host before.
    pub(super) has_looked: bool,
    /// Namespaces that were used.
    pub(super) used: BTreeSet<u32>,
    /// Looks whether data that was asked for is overdue.
    overdue: Option<Sleep>,
    /// Its place among those that are no queue yet.
    fresh: Option<Fresh>,
    pub(super) waker: Waker,
    /// Nothing is taken in any more, and how it came to that.
    end: Option<End>,
    /// Bytes that come are dropped.
    discard: bool,
    /// The last word is sent.
    lingering: bool,
    pub(super) timer: Option<Sleep>,
}

impl Connection {
    pub(super) fn new(server: Rc<Server>, port: Arc<Port>, stream: Stream, peer: Addr, control: Arc<Control>) -> Self {
        let pools = server.pools.clone();
        let timer = Some(sleep(server.target.limits().handshake_timeout));
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

    /// Serves until the connection ends.  The host has what
    /// [`Limits::drain_timeout`](crate::Limits::drain_timeout) gives it to read its answers; all commands that were begun
    /// are done by then, unless the server stops.
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
                let receive = |want| tls::receive(channel.clone(), want);
                let end = exchange(&mut self, receive, |batch| tls::send(channel.clone(), batch)).await;
                if self.outbox.is_empty() {
                    channel.close().await;
                }
                end
            }
        };
        self.stream.shutdown();
        self.outbox.deafen();
        self.last = None;
        self.settle().await;
        if let Some(queue) = self.queue.take() {
            self.server.target.disconnect(&queue.association, queue.id);
        }
        end
    }

    /// Waits for what the device still does, however long that takes: the queue counts as being there until then, and so
    /// the host does not come back before.  Only a server that stops does not wait.
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
            // The host is told, and nothing after it.
            self.outbox.conclude(&fatal.encode());
            self.discard = true;
        }
        if let (Role::Admin(_), Some(queue)) = (&self.role, &self.queue) {
            // Without an admin queue there is no controller, however long this one still has something to say.
            queue.association.end_queues(true);
        }
        self.end = Some(end);
        // From here on what is under way has only so much time.
        self.timer = Some(sleep(self.server.target.limits().drain_timeout));
        self.connecting = None;
        (self.auth_deadline, self.failing) = (None, None);
        self.fused = None;
        self.fused_data = BufList::new();
        // Commands whose data has not come never began; what they hold is given back with the connection.
        drop(self.transfers.clear().collect::<Vec<_>>());
        self.waiting.clear();
    }

    /// No more commands are taken for now.  What is waited for never needs the host to send something: data that it
    /// was asked for may be behind the commands that are not taken.
    fn is_full(&self) -> bool {
        let over = self.outbox.is_over(self.server.target.limits().connection_bytes);
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
            self.server.target.stats().count(|counts| counts.digest_errors += 1);
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
            self.server.target.stats().count(|counts| counts.digest_errors += 1);
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

    /// Asks for a command's data.
    pub(super) fn ask(&mut self, cid: u16, len: u32, note: Note) {
        let tag = self.transfers.begin(cid, len, now().as_nanos(), note);
        if self.overdue.is_none() {
            self.overdue = Some(sleep(self.server.target.limits().data_timeout));
            // A timer that was just made wants to be polled.
            self.waker.wake_by_ref();
        }
        self.outbox.replies.ready_to_transfer(cid, tag, len);
        self.outbox.replied(0);
    }

    /// Ends the connection of a host that does not send what it was asked for.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) {
        while let Some(timer) = &mut self.overdue
            && Pin::new(timer).poll(cx).is_ready()
        {
            let Some(since) = self.transfers.oldest() else {
                self.overdue = None;
                return;
            };
            let waited = Duration::from_nanos(now().as_nanos() - since);
            let timeout = self.server.target.limits().data_timeout;
            if waited >= timeout {
                self.overdue = None;
                return self.stop_receiving(End::Overdue);
            }
            self.overdue = Some(sleep(timeout - waited));
        }
    }

    /// Answers a command, whose reply holds so many bytes.
    pub(super) fn respond(&mut self, cid: u16, status: Status, result: u64, bytes: usize) {
        self.outstanding -= 1;
        let sq_head = self.queue.as_ref().map_or(0, |queue| queue.head);
        self.outbox.replies.response(&Cqe { result, sq_head, cid, status });
        self.outbox.replied(bytes);
    }

    /// Answers a command with an error.
    pub(super) fn fail(&mut self, sqe: &Sqe, status: Status) {
        self.note_error(sqe, status);
        self.respond(sqe.cid(), status, 0, 0);
    }

    /// Entries of the admin queue that a host may have.
    pub(super) fn entries_max(queue: u16) -> usize {
        if queue == 0 { ADMIN_ENTRIES_MAX } else { crate::session::QUEUE_ENTRIES_MAX }
    }

    /// The connection has become a queue, and its host is who it says: there is no hurry any more.
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
        if self.last.as_ref().is_some_and(|(seen, _)| *seen != self.server.target.generation()) {
            // It may be what somebody waits for.
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
                // While a Connect waits nothing else may come; the next bytes wait in the socket.
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
                // All is said; the host has a moment to read it and to close.
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
