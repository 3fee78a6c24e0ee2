//! Connection task: receives, dispatches commands, gathers replies, sends.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::{Addr, Stream};
use forebay_serve::{ConnectionHandler, Intake, ReceiveRequest, exchange};

use super::NvmeServer;
use super::admin::AdminQueue;
use super::auth::Authentication;
use super::commands::Commands;
use super::connect::NvmeHandshake;
use super::data::{DataOwner, DataTransfers};
use super::ending::{CLOSING, NvmeEndReason, NvmeTeardown};
use super::namespaces::UsedNamespaces;
use super::outbox::NvmeOutbox;
use super::submission::SubmissionQueue;
use super::tls::TlsChannel;
use crate::session::{Fatal, H2C_DATA_MAX, NvmePdu, NvmeReceiver, NvmeReplies, NvmeTcpParameters};
use crate::stats::{NvmeCommandKind, NvmeStatsEntry};
use crate::subsystem::{Association, NvmeConnectionControl, Port};
use crate::wire::pdu::{Fes, IcReq, IcResp};
use crate::wire::{Cqe, NvmeStatus, Sqe};

/// PDUs processed in one turn, after which the connection yields.
const TURN_PDUS: u32 = 16;

/// Role of a connection.
pub(super) enum ConnectionRole {
    /// Connection before its Connect.
    Unconnected,
    /// Admin queue, with its controller.
    Admin(Box<AdminQueue>),
    /// I/O queue.
    Io,
}

/// Identity of a queue, from its Connect on.
pub(super) struct Queue {
    pub(super) id: u16,
    pub(super) association: Arc<Association>,
    pub(super) entered: NvmeStatsEntry,
}

impl Queue {
    /// Counts a completed command, which read or wrote `bytes`.
    pub(super) fn count(&self, kind: NvmeCommandKind, bytes: u64, failed: bool) {
        self.entered.counters.answered(kind, bytes, failed);
    }
}

/// Connection of a host: a queue, once its Connect is granted.
///
/// Each part owns its state and states its invariants.  The connection passes events between them:
///
/// ```text
/// Receiver -> SubmissionQueue -> Handshake | Authentication | AdminQueue | Commands -> Outbox
///                                                    DataTransfers --^
/// ```
///
/// 1. A connection has a queue exactly when it is not `ConnectionRole::Unconnected`.
/// 2. Once it has begun to end, no command begins, and every command in flight is completed before its queue is given
///    up, unless the server stops.
pub(super) struct NvmeConnection {
    pub(super) server: Rc<NvmeServer>,
    pub(super) port: Arc<Port>,
    pub(super) stream: Stream,
    /// TLS session, if the port requires TLS.
    pub(super) channel: Option<Rc<TlsChannel>>,
    pub(super) peer: Addr,
    pub(super) control: Arc<NvmeConnectionControl>,
    receiver: NvmeReceiver,
    pub(super) outbox: NvmeOutbox,
    pub(super) submission: SubmissionQueue,
    pub(super) commands: Commands,
    transfers: DataTransfers,
    pub(super) namespaces: UsedNamespaces,
    pub(super) handshake: NvmeHandshake,
    pub(super) auth: Authentication,
    pub(super) ending: NvmeTeardown,
    pub(super) role: ConnectionRole,
    pub(super) queue: Option<Queue>,
    pub(super) waker: Waker,
}

impl NvmeConnection {
    pub(super) fn new(
        server: Rc<NvmeServer>,
        port: Arc<Port>,
        stream: Stream,
        peer: Addr,
        control: Arc<NvmeConnectionControl>,
    ) -> Self {
        let pools = server.pools.clone();
        let limits = server.subsystems.limits();
        Self {
            port,
            stream,
            channel: None,
            peer,
            control,
            receiver: NvmeReceiver::new(pools.clone()),
            outbox: NvmeOutbox::new(NvmeReplies::new(pools)),
            submission: SubmissionQueue::before_connect(),
            commands: Commands::new(1),
            transfers: DataTransfers::new(limits.data_timeout),
            namespaces: UsedNamespaces::default(),
            handshake: NvmeHandshake::new(&server),
            auth: Authentication::default(),
            ending: NvmeTeardown::new(limits.handshake_timeout),
            role: ConnectionRole::Unconnected,
            queue: None,
            waker: Waker::noop().clone(),
            server,
        }
    }

    /// Runs the connection until it ends.  The host has [`HostLimits::drain_timeout`](crate::HostLimits::drain_timeout)
    /// to read its responses.  All commands that were begun are done when this returns, unless the server stops.
    pub(super) async fn run(mut self) -> NvmeEndReason {
        if self.port.tls {
            match self.secure().await {
                Ok(channel) => self.channel = Some(channel),
                Err(end) => {
                    self.stream.shutdown();
                    self.log_end(&end);
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
        if matches!(end, NvmeEndReason::Stopped) && self.server.connections.stopping() {
            self.stream.close_gracefully(CLOSING).await;
        }
        self.stream.shutdown();
        self.outbox.discard_output();
        self.namespaces.release();
        self.settle().await;
        self.log_end(&end);
        if let Some(queue) = self.queue.take() {
            self.server.subsystems.disconnect(&queue.association, queue.id);
        }
        end
    }

    /// Waits until the device has completed all commands, without a time limit.  The queue counts as connected until
    /// then, so that the host cannot reconnect before.  Returns early only if the server stops.
    async fn settle(&mut self) {
        std::future::poll_fn(|cx| {
            self.commands.set_task(cx.waker());
            drop(self.commands.take_completed());
            if self.commands.in_flight() == 0 || self.server.connections.stopping() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Logs why the connection has ended.
    fn log_end(&self, end: &NvmeEndReason) {
        let peer = &self.peer;
        let host = self.queue.as_ref().map(|queue| &*queue.association.host);
        let subsystem = self.queue.as_ref().map(|queue| queue.association.subsystem.nqn());
        match end {
            NvmeEndReason::Fatal(fatal) => {
                tracing::warn!(%peer, host, subsystem, reason = %fatal, "connection ended: protocol error")
            }
            NvmeEndReason::TooSlow => tracing::warn!(
                %peer, host, subsystem, "connection ended: not connected and authenticated within the handshake timeout"
            ),
            NvmeEndReason::Refused => tracing::warn!(%peer, "connection ended: too many refused Connects"),
            NvmeEndReason::Overdue => tracing::warn!(
                %peer, host, subsystem, "connection ended: requested data did not arrive within the data timeout"
            ),
            NvmeEndReason::Socket(error) => tracing::info!(%peer, host, subsystem, %error, "connection failed"),
            end => tracing::debug!(%peer, host, subsystem, ?end, "connection ended"),
        }
    }

    /// Begins the end of the connection, unless it has begun.  Commands in flight have `drain_timeout` to complete.
    pub(super) fn stop_receiving(&mut self, end: NvmeEndReason) {
        if self.ending.has_begun() {
            return;
        }
        if let NvmeEndReason::Fatal(fatal) = &end {
            // The host gets the C2HTermReq, and nothing after it.
            self.outbox.conclude(&fatal.encode());
        }
        if let (ConnectionRole::Admin(_), Some(queue)) = (&self.role, &self.queue) {
            // A controller ends with its admin queue, even while this connection still has responses to send.  A host
            // that has failed to authenticate reads so first: its I/O queues end with this connection.
            if !matches!(end, NvmeEndReason::Unauthenticated) {
                queue.association.end_queues(true);
            }
        }
        self.ending.begin(end, self.server.subsystems.limits().drain_timeout);
        self.handshake.abort();
        self.auth.abort();
        // Commands whose data has not arrived never began.  Their bytes are released with the connection.
        self.transfers.abort();
        self.commands.abort_waiting();
    }

    /// Returns whether to stop taking commands for now.  Progress never depends on the host sending data: requested
    /// data may be queued behind the commands that are not taken.
    fn is_full(&self) -> bool {
        let over = self.outbox.is_over(self.server.subsystems.limits().connection_bytes);
        self.outbox.is_full() || (over && (self.outbox.keeps_bytes() || self.commands.in_flight() > 0))
    }

    fn take(&mut self, pdu: NvmePdu) {
        match pdu {
            NvmePdu::IcReq(request) => self.initialize(&request),
            NvmePdu::Term(status) => {
                tracing::info!(peer = %self.peer, status, "host terminated the connection with an error");
                self.outbox.discard_output();
                self.stop_receiving(NvmeEndReason::Terminated { _status: status });
            }
            NvmePdu::Command { sqe, data, intact } => self.command(sqe, data, intact),
            NvmePdu::Data { header, data, intact, .. } => {
                if let Some((owner, data, intact)) = self.transfers.add(&header, data, intact) {
                    self.data_arrived(header.cid, owner, data, intact);
                }
            }
        }
    }

    fn initialize(&mut self, request: &IcReq) {
        let agreed = NvmeTcpParameters::of(request);
        let resp = IcResp {
            version: 0,
            controller_alignment: 0,
            digests: agreed.digests(),
            h2c_data_max: H2C_DATA_MAX as u32,
        };
        self.outbox.ic_resp(&resp, agreed);
        self.receiver.agree(agreed);
    }

    fn command(&mut self, sqe: Sqe, data: BufList, intact: bool) {
        debug_assert!(self.queue.is_none() == matches!(self.role, ConnectionRole::Unconnected));
        if !self.submission.accept() {
            let fatal = Fatal::new(Fes::Sequence, 0, &[], "more commands than the queue has room for");
            return self.stop_receiving(NvmeEndReason::Fatal(fatal));
        }
        if !intact {
            self.server.subsystems.stats().count(|counts| counts.digest_errors += 1);
            return self.fail(&sqe, NvmeStatus::TRANSPORT);
        }
        if !self.is_admitted(&sqe) {
            return self.fail(&sqe, NvmeStatus::AUTH_REQUIRED.final_());
        }
        match self.role {
            ConnectionRole::Io if sqe.opcode() != crate::wire::command::FABRICS => self.io_command(sqe, data),
            _ => self.admin_command(sqe, data),
        }
    }

    fn data_arrived(&mut self, cid: u16, owner: DataOwner, data: BufList, intact: bool) {
        if !intact {
            self.server.subsystems.stats().count(|counts| counts.digest_errors += 1);
        }
        match owner {
            DataOwner::Io(ready) if intact => self.start(ready, data),
            DataOwner::Io(ready) => self.fail_ready(&ready, NvmeStatus::TRANSPORT),
            DataOwner::Fused(fused, first) => self.fused_arrived(&fused, first, data, intact),
            DataOwner::Admin(sqe) if intact => self.admin_with_data(&sqe, &data.to_vec()),
            DataOwner::Admin(sqe) => {
                debug_assert_eq!(sqe.cid(), cid);
                self.fail(&sqe, NvmeStatus::TRANSPORT);
            }
        }
    }

    /// Requests a command's data from the host, with an R2T.
    pub(super) fn ask(&mut self, cid: u16, len: u32, owner: DataOwner) {
        let tag = self.transfers.begin(cid, len, owner, &self.waker);
        self.outbox.ready_to_transfer(cid, tag, len);
    }

    /// Queues the response to a command, whose reply holds `bytes` of the budget.
    pub(super) fn respond(&mut self, cid: u16, status: NvmeStatus, result: u64, bytes: usize) {
        let sq_head = self.submission.complete();
        self.outbox.response(&Cqe { result, sq_head, cid, status }, bytes);
    }

    /// Queues data that is in memory already, and the response to its command.
    pub(super) fn respond_with_data(&mut self, cid: u16, data: Buf) {
        let held = data.len();
        self.outbox.hold_anyway(held);
        self.outbox.data(cid, data.into());
        self.respond(cid, NvmeStatus::SUCCESS, 0, held);
    }

    /// Queues an error response to a command, and records the error.
    pub(super) fn fail(&mut self, sqe: &Sqe, status: NvmeStatus) {
        self.note_error(sqe, status);
        self.respond(sqe.cid(), status, 0, 0);
    }
}

impl ConnectionHandler for NvmeConnection {
    type End = NvmeEndReason;

    const TURN: u32 = TURN_PDUS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.commands.set_task(cx.waker());
        if !self.waker.will_wake(cx.waker()) {
            self.waker = cx.waker().clone();
            self.control.set_task(cx.waker());
            self.outbox.set_task(cx.waker());
        }
        if self.control.stopping() {
            self.stop_receiving(NvmeEndReason::Stopped);
        }
        self.namespaces.release_withdrawn(self.server.subsystems.withdrawals());
        self.poll_commands();
        self.poll_connect(cx);
        self.poll_admin(cx);
        self.poll_auth(cx);
        if self.transfers.poll_overdue(cx) {
            self.stop_receiving(NvmeEndReason::Overdue);
        }
        self.start_waiting();
    }

    fn want(&mut self) -> ReceiveRequest {
        self.outbox.rest();
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, mut buf: BufMut) {
        match result {
            Ok(0) => {
                self.ending.stream_ended();
                self.outbox.discard_output();
                self.stop_receiving(NvmeEndReason::Closed);
            }
            Ok(_) if self.ending.is_discarding() => {
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
                self.ending.stream_ended();
                self.outbox.discard_output();
                self.stop_receiving(NvmeEndReason::Socket(error));
            }
        }
    }

    fn take_in(&mut self, budget: &mut u32) -> Intake {
        loop {
            if self.ending.has_begun() {
                return Intake::NeedInput;
            }
            if self.handshake.is_waiting() {
                // Nothing may follow a waiting Connect; later bytes stay in the socket.
                return Intake::Busy;
            }
            if self.is_full() {
                return Intake::Full;
            }
            if *budget == 0 {
                return Intake::BudgetSpent;
            }
            let transfers = &self.transfers;
            match self.receiver.next(|header, last| transfers.check(header, last)) {
                Ok(Some(pdu)) => {
                    *budget -= 1;
                    self.take(pdu);
                }
                Ok(None) => return Intake::NeedInput,
                Err(fatal) => {
                    self.stop_receiving(NvmeEndReason::Fatal(fatal));
                    return Intake::NeedInput;
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
            self.outbox.discard_output();
            self.stop_receiving(NvmeEndReason::Socket(error));
        }
        self.start_waiting();
    }

    fn is_open(&self) -> bool {
        self.ending.is_receiving()
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<NvmeEndReason> {
        let in_flight = self.commands.in_flight();
        self.control.set_in_flight(in_flight);
        let is_idle = in_flight == 0 && self.outbox.is_empty();
        let end = std::task::ready!(self.ending.poll(is_idle, cx));
        if in_flight > 0 {
            let host = self.queue.as_ref().map(|queue| &*queue.association.host);
            tracing::warn!(
                peer = %self.peer, host, commands = in_flight, "connection ended, waiting for its commands at the device"
            );
        }
        Poll::Ready(end)
    }
}
