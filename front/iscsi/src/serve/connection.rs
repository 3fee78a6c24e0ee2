//! iSCSI connection in full feature phase: receives PDUs, submits device requests, transfers data, sends responses.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BufList, BufMut};
use forebay_reactor::sync::InFlight;
use forebay_reactor::time::Sleep;
use forebay_reactor::{Instant, Stream, now, sleep};
use forebay_serve::{Bell, Intake, Traffic, Want, exchange};

use super::data_out::DataOutTransfer;
use super::handshake::Ready as LoggedIn;
use super::orphaned_tasks::OrphanedTasks;
use super::outbox::{Outbox, Pending, Role};
use super::requests::{TextAnswer, Waiting};
use super::{Options, Server};
use crate::scsi::reserve;
use crate::session::receive::{Garbled, Pdu, Receiver};
use crate::sessions::Entered;
use crate::signal::{Signal, Stop};
use crate::unit::Order;
use crate::unit::SessionUnits;
use crate::unit::execute::{CommandFuture, composite};
use crate::wire::{Lun, async_event, logout_response, response};

/// Maximum number of PDUs handled per poll, before the connection yields to other tasks.
const TURN_PDUS: u32 = 128;
/// Time for which a session about to be dropped still responds to commands, so that hosts learn the reason.
const LINGER: Duration = Duration::from_millis(100);
/// Time in seconds that a host has to log out after it was asked to.
const LOGOUT_WAIT_S: u16 = 3;
/// Maximum number of tasks in flight, such as immediate commands and task management, beyond those that have a place in
/// the command window.
pub(super) const EXTRA_MAX: usize = 32;

/// Protocol violation that ends the connection: no recovery is possible.
#[derive(Debug, thiserror::Error)]
pub(super) enum Violation {
    #[error("{0}")]
    Garbled(#[from] Garbled),
    #[error("a second login")]
    Login,
    #[error("it does not answer")]
    Silent,
    #[error("the data of a command does not come")]
    NoData,
    #[error("commands with much data come before those that come before them")]
    Early,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum End {
    /// Logout by the initiator.
    LoggedOut,
    /// Connection closed by the initiator without logout.
    Closed,
    /// Connection closed by the initiator in the middle of a PDU.
    Broken,
    /// Socket error.
    Socket(io::Error),
    /// Protocol violation by the initiator.
    Violation(Violation),
    /// Server shutdown, or the session was replaced, reset or expelled.
    Stopped,
}

pub(super) struct Connection<'a> {
    stream: Stream,
    control: &'a Bell,
    pub(super) options: &'a Options,
    pub(super) signal: Arc<Signal>,
    receiver: Receiver,
    pub(super) outbox: Outbox,
    pub(super) units: SessionUnits,
    pub(super) discovery: bool,
    pub(super) cid: u16,
    pub(super) work: InFlight<CommandFuture, Pending>,
    /// Commands with data-out transfers in progress, by initiator task tag.
    pub(super) transfers: BTreeMap<u32, DataOutTransfer>,
    /// Initiator task tags of transfers that wait for memory, in FIFO order.
    pub(super) hungry: VecDeque<u32>,
    /// Commands with complete data that wait for memory or for other commands.
    pub(super) waiting: VecDeque<Waiting>,
    /// PDUs received out of order, by CmdSN, until the preceding commands arrive.
    pub(super) later: BTreeMap<u32, Pdu>,
    /// Target transfer tag and unsent rest of a long text response.
    pub(super) text: Option<(u32, TextAnswer)>,
    pub(super) next_tag: u32,
    /// Reason for the end of the connection. Once it is set, nothing more is received.
    end: Option<End>,
    /// Session is ending.
    draining: bool,
    /// Logout was requested from the host; `timer` limits the time that it has for that.
    logout_asked: bool,
    timer: Option<Sleep>,
    lingered: bool,
    /// Initiator task tag of a logout request, until the session's tasks have ended.
    logout: Option<u32>,
    heard: Instant,
    pinged: bool,
    idle: Sleep,
    pub(super) now: Instant,
    /// Session registration, dropped last: when waiters for the session's end are woken, nothing of it is left.
    entered: Entered,
}

impl<'a> Connection<'a> {
    /// Creates a connection for a session; `None` when the initiator port cannot be represented as a host id.
    pub(super) fn new(server: &'a Server, control: &'a Bell, stream: Stream, ready: LoggedIn) -> Option<Self> {
        let LoggedIn { login, entered, receiver } = ready;
        let Server { targets, options, pools, units, .. } = server;
        let session = entered.session().clone();
        let host = reserve::host(&session.initiator, session.isid)?;
        let numbers = (login.params, login.stat_sn, login.cmd_sn);
        Some(Self {
            stream,
            control,
            options,
            signal: session.signal.clone(),
            receiver,
            outbox: Outbox::new(pools, numbers, options.commands_max, (targets.clone(), session.clone())),
            discovery: session.is_discovery(),
            cid: login.cid,
            units: SessionUnits::new(targets.clone(), units.clone(), session, host),
            work: InFlight::new(options.commands_max as usize + EXTRA_MAX),
            transfers: BTreeMap::new(),
            hungry: VecDeque::new(),
            waiting: VecDeque::new(),
            later: BTreeMap::new(),
            text: None,
            next_tag: 1,
            end: None,
            draining: false,
            logout_asked: false,
            timer: None,
            lingered: false,
            logout: None,
            heard: now(),
            pinged: false,
            idle: sleep(options.ping_after),
            now: now(),
            entered,
        })
    }

    /// Serves until the connection ends.  On return all commands that were begun are done, or
    /// [`Options::drain_timeout`] has expired and the remaining ones are orphaned.
    pub(super) async fn run(mut self) -> End {
        let stream = self.stream.clone();
        let receive = |want| forebay_serve::receive(stream.clone(), want);
        let end = exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await;
        if !self.work.is_empty() {
            let Self { work, outbox, units, entered, .. } = self;
            OrphanedTasks { work, outbox, nexuses: units.into_nexuses(), leaving: entered.leave() }.carry();
        }
        end
    }

    /// Handles orders to this session from other cores, stop requests and timers.
    fn look_around(&mut self, cx: &mut Context<'_>) {
        if self.signal.take_told() {
            self.follow_orders();
        }
        let stop = match (self.signal.stopping(), self.control.stopping()) {
            (Stop::No, false) => None,
            (Stop::No, true) => Some(Stop::Shutdown),
            (why, _) => Some(why),
        };
        if let Some(why) = stop
            && !self.draining
        {
            self.draining = true;
            match why {
                Stop::Reinstated => {
                    // The initiator has abandoned this connection; responses would not be read.
                    self.give_up_all();
                    self.outbox.discard_output();
                    self.lingered = true;
                    self.timer = Some(sleep(self.options.drain_timeout));
                }
                Stop::Logout => {
                    // Commands in flight are completed. The host then logs out, or the connection is dropped (RFC 7143,
                    // section 11.9.1).
                    self.outbox.event(async_event::LOGOUT, [0, 0, LOGOUT_WAIT_S]);
                    self.logout_asked = true;
                    self.timer = Some(sleep(Duration::from_secs(LOGOUT_WAIT_S.into())));
                }
                _ => {
                    if why == Stop::Reset {
                        self.give_up_all();
                    }
                    self.announce_drop();
                }
            }
        }
        while Pin::new(&mut self.idle).poll(cx).is_ready() {
            let silent = self.now.since(self.heard);
            let patience = self.options.ping_after;
            let late = |transfer: &DataOutTransfer| transfer.is_awaited() && self.now.since(transfer.heard) >= patience;
            if self.transfers.values().any(late) {
                // A host that does not send solicited data would hold memory that other sessions wait for, without
                // limit.
                self.stop_receiving(End::Violation(Violation::NoData));
                self.idle = sleep(patience);
            } else if silent < patience {
                self.pinged = false;
                self.idle = sleep(patience - silent);
            } else if !self.pinged {
                self.pinged = true;
                let tag = self.tag();
                self.outbox.ping(tag);
                self.idle = sleep(patience);
            } else {
                self.outbox.discard_output();
                self.stop_receiving(End::Violation(Violation::Silent));
                self.idle = sleep(patience);
            }
        }
    }

    /// Announces to the host that the session is going to be dropped, and waits a moment so that it can learn the
    /// reason.
    fn announce_drop(&mut self) {
        // Time2Wait of one second before reconnecting; Time2Retain of zero.
        self.outbox.event(async_event::DROP_SESSION, [0, 1, 0]);
        self.timer = Some(sleep(LINGER));
    }

    /// Returns a new target transfer tag.
    pub(super) fn tag(&mut self) -> u32 {
        let tag = self.next_tag;
        self.next_tag = if tag >= u32::MAX - 1 { 1 } else { tag + 1 };
        tag
    }

    fn follow_orders(&mut self) {
        let orders: Vec<_> = self.units.nexuses().map(|nexus| (nexus.lun(), nexus.take_orders())).collect();
        for (lun, orders) in orders {
            for (order, drain) in orders {
                match order {
                    Order::Abort => self.give_up(lun, Some(&drain)),
                    Order::Leave => {
                        let lun = Lun::Unit(lun);
                        let of_unit =
                            |unit: &Pending| unit.unit.as_ref().is_some_and(|unit| Lun::Unit(unit.lun()) == lun);
                        self.work.notes_mut().filter(|note| of_unit(note)).for_each(|note| {
                            note.drains.push(drain.clone());
                        });
                        if let Lun::Unit(lun) = lun {
                            self.units.forget(lun);
                        }
                    }
                }
            }
        }
    }

    pub(super) fn stop_receiving(&mut self, end: End) {
        if self.end.is_some() {
            return;
        }
        if !matches!(end, End::LoggedOut) {
            self.outbox.discard_output();
        }
        self.end = Some(end);
        self.logout_asked = false;
        self.give_up_all();
        // Commands in flight have `drain_timeout` from here on.
        self.timer = Some(sleep(self.options.drain_timeout));
        self.lingered = true;
    }

    /// Ends the session for a logout request.  The response follows once no task of the session is left and its
    /// reservations are released: when the host reads it, another host can take over (RFC 7143, section 11.14).
    pub(super) fn log_out(&mut self, itt: u32) {
        self.stop_receiving(End::LoggedOut);
        self.logout = Some(itt);
        self.release_for_logout();
    }

    fn release_for_logout(&mut self) {
        let Some(itt) = self.logout.take_if(|_| self.work.is_empty()) else {
            return;
        };
        let releases: Vec<_> = self.units.nexuses().filter_map(|nexus| nexus.release_reservation()).collect();
        let work = composite(async move {
            for release in releases {
                release.await;
            }
            Ok(BufList::new())
        });
        let pending = Pending {
            itt,
            unit: None,
            role: Role::Logout,
            numbered: false,
            aborted: false,
            ordered: false,
            control: true,
            held: 0,
            drains: Vec::new(),
        };
        if let Some((outcome, pending)) = self.work.start(work, pending) {
            self.outbox.answer(self.now, outcome, pending);
        }
    }

    /// Returns true once the session is ending: no more commands are begun.
    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Aborts all tasks of the session on all units; their outcome is not reported.
    pub(super) fn give_up_all(&mut self) {
        for (_, early) in std::mem::take(&mut self.later) {
            self.outbox.release(early.data.len());
        }
        self.hungry.clear();
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            self.drop_command(transfer.numbered, transfer.held);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            self.drop_command(waiting.numbered, waiting.held);
        }
        self.work.notes_mut().for_each(|note| note.aborted = true);
    }

    pub(super) fn drop_command(&mut self, numbered: bool, held: usize) {
        if numbered {
            self.outbox.settled();
        }
        self.outbox.release(held);
    }
}

impl Traffic for Connection<'_> {
    type End = End;

    const TURN: u32 = TURN_PDUS;

    fn begin_turn(&mut self, cx: &mut Context<'_>) {
        self.now = now();
        self.work.set_task(cx.waker());
        self.control.set_task(cx.waker());
        self.signal.set_task(cx.waker());
        self.look_around(cx);
        let (outbox, now) = (&mut self.outbox, self.now);
        self.work.poll(|outcome, pending| outbox.answer(now, outcome, pending));
        self.begin_waiting();
        self.release_for_logout();
    }

    fn want(&mut self) -> Want {
        self.receiver.want()
    }

    fn received(&mut self, result: io::Result<usize>, buf: BufMut) {
        self.heard = self.now;
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
            if self.outbox.is_full() || self.work.len() >= self.options.commands_max as usize + EXTRA_MAX {
                return Intake::Full;
            }
            if *budget == 0 {
                return Intake::Tired;
            }
            match self.receiver.next_pdu() {
                Ok(Some(pdu)) => {
                    *budget -= 1;
                    if let Err(violation) = self.handle(pdu) {
                        self.stop_receiving(End::Violation(violation));
                    }
                }
                Ok(None) => return Intake::Hungry,
                Err(garbled) => self.stop_receiving(End::Violation(garbled.into())),
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
            self.stop_receiving(End::Socket(error));
        }
    }

    fn is_open(&self) -> bool {
        self.end.is_none()
    }

    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        self.outbox.flush_tallies();
        let mut timed_out = false;
        while let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            if std::mem::take(&mut self.logout_asked) {
                self.announce_drop();
                continue;
            }
            if let Some(itt) = self.logout.take() {
                // The host learns that its commands may still change the medium.
                self.outbox.response(response::LOGOUT, logout_response::CLEANUP_FAILED, itt, 0, &[]);
                self.timer = Some(sleep(LINGER));
                continue;
            }
            timed_out = self.lingered;
            self.timer = (!timed_out).then(|| sleep(self.options.drain_timeout));
            self.lingered = true;
        }
        let quiet = self.work.is_empty() && self.outbox.is_empty() && self.logout.is_none();
        let over = self.end.is_some() || (self.draining && self.lingered);
        if timed_out || (quiet && over) {
            if !quiet {
                tracing::warn!(commands = self.work.len(), "a session ends before its commands are done");
            }
            return Poll::Ready(self.end.take().unwrap_or(End::Stopped));
        }
        Poll::Pending
    }
}

impl Pending {
    /// Returns true for a task; task management functions are not tasks.
    pub(super) fn is_task(&self) -> bool {
        matches!(self.role, Role::Command(_)) && !self.control
    }
}
