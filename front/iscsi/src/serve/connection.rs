//! iSCSI connection in full feature phase: receives PDUs, submits device requests, transfers data, sends responses.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BufList, BufMut};
use forebay_reactor::{Instant, Stream, now};
use forebay_serve::{ConnectionHandler, ConnectionStopSignal, Intake, ReceiveRequest, exchange};

use super::data_out_set::DataOutSet;
use super::early::EarlyPdus;
use super::ending::{Expired, IscsiTeardown};
use super::handshake::LoggedInConnection;
use super::keep_alive::{InitiatorLiveness, KeepAlive};
use super::orphaned_tasks::OrphanedTasks;
use super::outbox::IscsiOutbox;
use super::scsi_port::IscsiPort;
use super::task::IscsiTask;
use super::text::TextExchange;
use super::{IscsiServer, IscsiServerOptions};
use crate::scsi::{ScsiSession, ScsiSessionSpec, reserve};
use crate::session::receive::{Garbled, PduReceiver};
use crate::sessions::{IscsiSession, SessionRegistration};
use crate::signal::Stop;
use crate::targets::Targets;
use crate::wire::{async_event, logout_response, response};

/// Maximum number of PDUs handled per poll, before the connection yields to other tasks.
const TURN_PDUS: u32 = 128;
/// Time in seconds that a host has to log out after it was asked to.
const LOGOUT_WAIT_S: u16 = 3;
/// Maximum number of tasks in flight, such as immediate commands and task management, beyond those that have a place in
/// the command window.
const EXTRA_MAX: usize = 32;

/// Protocol violation that ends the connection: no recovery is possible.
#[derive(Debug, thiserror::Error)]
pub(super) enum IscsiViolation {
    #[error("{0}")]
    Garbled(#[from] Garbled),
    #[error("login request on a connection that is logged in already")]
    Login,
    #[error("initiator does not respond to a ping")]
    Silent,
    #[error("initiator does not send the data of a write command that was solicited")]
    NoData,
    #[error("too much out-of-order command data")]
    Early,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum IscsiEndReason {
    /// Logout by the initiator.
    LoggedOut,
    /// Connection closed by the initiator without logout.
    Closed,
    /// Connection closed by the initiator in the middle of a PDU.
    Broken,
    /// Socket error.
    Socket(io::Error),
    /// Protocol violation by the initiator.
    Violation(IscsiViolation),
    /// Server shutdown, or the session was replaced, reset or expelled.
    Stopped,
}

/// Connection of a session in full feature phase.
pub(super) struct IscsiConnection<'a> {
    stream: Stream,
    control: &'a ConnectionStopSignal,
    options: &'a IscsiServerOptions,
    pub(super) targets: Targets,
    pub(super) session: Arc<IscsiSession>,
    receiver: PduReceiver,
    pub(super) outbox: IscsiOutbox,
    pub(super) discovery: bool,
    pub(super) cid: u16,
    /// Commands whose data is being received; from then on they are tasks of `scsi`.
    pub(super) transfers: DataOutSet,
    scsi: ScsiSession<IscsiTask>,
    pub(super) early: EarlyPdus,
    pub(super) text: TextExchange,
    next_tag: u32,
    ending: IscsiTeardown,
    keep_alive: KeepAlive,
    /// Time at the beginning of this turn.
    pub(super) now: Instant,
    /// Session registration, dropped last: when waiters for the session's end are woken, nothing of it is left.
    entered: SessionRegistration,
}

impl<'a> IscsiConnection<'a> {
    /// Creates a connection for a session; `None` when the initiator port cannot be represented as a host id.
    pub(super) fn new(
        server: &'a IscsiServer,
        control: &'a ConnectionStopSignal,
        stream: Stream,
        ready: LoggedInConnection,
    ) -> Option<Self> {
        let LoggedInConnection { login, entered, receiver } = ready;
        let IscsiServer { targets, options, pools, units, .. } = server;
        let session = entered.session().clone();
        let host = reserve::host(&session.initiator, session.isid)?;
        let numbers = (login.params, login.stat_sn, login.cmd_sn);
        let limits = (options.commands_max, options.bytes_max);
        let spec = ScsiSessionSpec {
            id: session.id,
            initiator: session.initiator.clone(),
            host,
            signal: session.signal.nexus().clone(),
            tasks_max: options.commands_max as usize + EXTRA_MAX,
            watches: false,
        };
        Some(Self {
            stream,
            control,
            options,
            targets: targets.clone(),
            receiver,
            outbox: IscsiOutbox::new(pools, numbers, limits, (targets.clone(), session.clone())),
            discovery: session.is_discovery(),
            cid: login.cid,
            transfers: DataOutSet::default(),
            scsi: ScsiSession::new(targets.scsi_target(session.target.as_ref()), units.clone(), spec),
            session,
            early: EarlyPdus::default(),
            text: TextExchange::default(),
            next_tag: 1,
            ending: IscsiTeardown::new(options.drain_timeout),
            keep_alive: KeepAlive::new(options.ping_after, now()),
            now: now(),
            entered,
        })
    }

    /// Serves until the connection ends.  On return all commands that were begun are done, or
    /// [`IscsiServerOptions::drain_timeout`] has expired and the remaining ones are orphaned.
    pub(super) async fn run(mut self) -> IscsiEndReason {
        let stream = self.stream.clone();
        let receive = |want| forebay_serve::receive(stream.clone(), want);
        let end = exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await;
        if !self.scsi.is_idle() {
            let Self { scsi, mut transfers, mut outbox, entered, .. } = self;
            let leaving = entered.leave();
            outbox.discard_output();
            transfers.abort_all(&mut outbox);
            let orphans = scsi.leave(&mut IscsiPort::of_orphans(&mut outbox, now()));
            if let Some(orphans) = orphans {
                OrphanedTasks::new(orphans, outbox, leaving).complete();
            }
        }
        end
    }

    /// Handles orders to this session from other cores, stop requests and timers.
    fn handle_signals(&mut self, cx: &mut Context<'_>) {
        let (scsi, mut port) = self.scsi_port();
        scsi.handle_signal(&mut port);
        let stop = match (self.session.signal.stopping(), self.control.stopping()) {
            (Stop::No, false) => None,
            (Stop::No, true) => Some(Stop::Shutdown),
            (why, _) => Some(why),
        };
        if let Some(why) = stop
            && self.ending.drain()
        {
            self.scsi.refuse_commands();
            match why {
                Stop::Reinstated => {
                    // The initiator has abandoned this connection; responses would not be read.
                    self.abort_all();
                    self.outbox.discard_output();
                    self.ending.limit();
                }
                // The host has ended the session already; its commands in flight keep the time that they have.
                _ if !self.ending.is_open() => {}
                Stop::Logout => {
                    // Commands in flight are completed. The host then logs out, or the connection is dropped (RFC 7143,
                    // section 11.9.1).
                    self.outbox.event(async_event::LOGOUT, [0, 0, LOGOUT_WAIT_S]);
                    self.ending.await_logout(Duration::from_secs(LOGOUT_WAIT_S.into()));
                }
                _ => {
                    if why == Stop::Reset {
                        self.abort_all();
                    }
                    self.announce_drop();
                    self.ending.linger();
                }
            }
        }
        while self.keep_alive.has_expired(cx) {
            let (now, patience) = (self.now, self.keep_alive.patience());
            if self.transfers.is_data_late(|transfer| transfer.is_awaited() && now.since(transfer.heard) >= patience) {
                // A host that does not send solicited data would hold memory that other sessions wait for, without
                // limit.
                self.stop_receiving(IscsiEndReason::Violation(IscsiViolation::NoData));
                self.keep_alive.restart();
                continue;
            }
            match self.keep_alive.check(now) {
                InitiatorLiveness::Alive => {}
                InitiatorLiveness::Silent => {
                    let tag = self.tag();
                    self.outbox.ping(tag);
                }
                InitiatorLiveness::Dead => {
                    self.outbox.discard_output();
                    self.stop_receiving(IscsiEndReason::Violation(IscsiViolation::Silent));
                }
            }
        }
    }

    /// Announces to the host that the session is going to be dropped.
    fn announce_drop(&mut self) {
        // Time2Wait of one second before reconnecting; Time2Retain of zero.
        self.outbox.event(async_event::DROP_SESSION, [0, 1, 0]);
    }

    /// Returns a new target transfer tag.
    pub(super) fn tag(&mut self) -> u32 {
        let tag = self.next_tag;
        self.next_tag = if tag >= u32::MAX - 1 { 1 } else { tag + 1 };
        tag
    }

    /// Returns the SCSI session, and the port through which it responds to the host.
    #[inline]
    pub(super) fn scsi_port(&mut self) -> (&mut ScsiSession<IscsiTask>, IscsiPort<'_>) {
        (&mut self.scsi, IscsiPort::new(&mut self.outbox, &mut self.transfers, None))
    }

    /// Returns true if an immediate command would take what is reserved for task management.
    pub(super) fn is_full_for_immediate(&self) -> bool {
        self.scsi.tasks() + self.transfers.len() >= self.options.commands_max as usize + EXTRA_MAX / 2
    }

    /// Ends the connection: nothing more is received, and all tasks are aborted.
    fn stop_receiving(&mut self, end: IscsiEndReason) {
        if !self.ending.is_open() {
            return;
        }
        if !matches!(end, IscsiEndReason::LoggedOut) {
            self.outbox.discard_output();
        }
        self.ending.end(end);
        self.abort_all();
    }

    /// Ends the session for a logout request.  The response follows once no task of the session is left and its
    /// reservations are released: when the host reads it, another host can take over (RFC 7143, section 11.14).
    pub(super) fn log_out(&mut self, itt: u32) {
        self.stop_receiving(IscsiEndReason::LoggedOut);
        self.ending.log_out(itt);
        self.release_for_logout();
    }

    fn release_for_logout(&mut self) {
        let Some(itt) = self.ending.take_logout(self.scsi.is_idle()) else {
            return;
        };
        let released = self.scsi.release_reservations();
        let (scsi, mut port) = self.scsi_port();
        scsi.start_control(IscsiTask::Logout(itt), released, &mut port);
    }

    /// Aborts all tasks of the session on all units; their outcome is not reported.
    fn abort_all(&mut self) {
        self.outbox.release(self.early.clear());
        self.transfers.abort_all(&mut self.outbox);
        let (scsi, mut port) = self.scsi_port();
        scsi.abort_all(&mut port);
    }
}

impl ConnectionHandler for IscsiConnection<'_> {
    type End = IscsiEndReason;

    const TURN: u32 = TURN_PDUS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.now = now();
        self.scsi.set_task(cx.waker());
        self.control.set_task(cx.waker());
        self.handle_signals(cx);
        self.scsi.poll(&mut IscsiPort::new(&mut self.outbox, &mut self.transfers, Some(self.now)));
        self.begin_waiting();
        self.release_for_logout();
    }

    fn want(&mut self) -> ReceiveRequest {
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, buf: BufMut) {
        self.keep_alive.heard(self.now);
        match result {
            Ok(0) => {
                let whole = self.receiver.ended(buf);
                self.stop_receiving(if whole { IscsiEndReason::Closed } else { IscsiEndReason::Broken });
            }
            Ok(got) => self.receiver.received(buf, got),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.stop_receiving(IscsiEndReason::Broken),
            Err(error) => self.stop_receiving(IscsiEndReason::Socket(error)),
        }
    }

    fn take_in(&mut self, budget: &mut u32) -> Intake {
        loop {
            if !self.ending.is_open() {
                return Intake::NeedInput;
            }
            if self.outbox.is_full() || self.scsi.is_full() {
                return Intake::Full;
            }
            if *budget == 0 {
                return Intake::BudgetSpent;
            }
            match self.receiver.next_pdu() {
                Ok(Some(pdu)) => {
                    *budget -= 1;
                    if let Err(violation) = self.handle(pdu) {
                        self.stop_receiving(IscsiEndReason::Violation(violation));
                    }
                }
                Ok(None) => return Intake::NeedInput,
                Err(garbled) => self.stop_receiving(IscsiEndReason::Violation(garbled.into())),
            }
        }
    }

    fn next_batch(&mut self) -> Option<BufList> {
        self.outbox.next_batch()
    }

    fn sent(&mut self, result: io::Result<()>) {
        self.outbox.sent();
        self.begin_waiting();
        if let Err(error) = result {
            self.outbox.discard_output();
            self.stop_receiving(IscsiEndReason::Socket(error));
        }
    }

    fn is_open(&self) -> bool {
        self.ending.is_open()
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<IscsiEndReason> {
        self.outbox.flush_tallies();
        while let Some(expired) = self.ending.poll_timer(cx) {
            match expired {
                Expired::LogoutWait => self.announce_drop(),
                // The host learns that its commands may still change the medium.
                Expired::Logout(itt) => {
                    self.outbox.response(response::LOGOUT, logout_response::CLEANUP_FAILED, itt, 0, &[]);
                }
            }
        }
        let done = self.scsi.is_idle() && self.outbox.is_empty();
        let over = self.ending.poll(done);
        if over.is_ready() && !done {
            let session = self.entered.session();
            tracing::warn!(
                initiator = session.initiator,
                peer = session.peer,
                commands = self.scsi.in_flight(),
                timeout = ?self.options.drain_timeout,
                "iSCSI session closed with commands in flight: the volume did not complete them in time"
            );
        }
        over
    }
}
