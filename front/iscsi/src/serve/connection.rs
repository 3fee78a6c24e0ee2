//! One connection in its full feature phase: receives, asks the devices, gathers what goes back, sends.

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

use super::execute::Work;
use super::gather::Gather;
use super::handshake::Ready as LoggedIn;
use super::outbox::{Outbox, Pending, Role};
use super::remains::Remains;
use super::requests::Waiting;
use super::units::Units;
use super::{Options, Server};
use crate::scsi::reserve;
use crate::session::receive::{Garbled, Pdu, Receiver};
use crate::signal::{Signal, Stop};
use crate::site::Entered;
use crate::unit::Order;
use crate::wire::{Lun, async_event};

/// PDUs taken in one turn; then the connection lets the others have theirs.
const TURN_PDUS: u32 = 128;
/// How long a session that is to end still answers commands, for hosts to see why.
const LINGER: Duration = Duration::from_millis(100);
/// Commands, functions and the like that are under way beside those with a place in the window.
pub(super) const EXTRA_MAX: usize = 32;

/// Why a connection is ended: the initiator broke a rule that leaves no way to go on.
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

/// How a connection came to its end.
#[derive(Debug)]
pub(super) enum End {
    /// The initiator logged out.
    LoggedOut,
    /// The initiator closed the connection without a word.
    Closed,
    /// The initiator closed the connection in the middle of a PDU.
    Broken,
    /// The socket failed.
    Socket(io::Error),
    /// The initiator broke the protocol.
    Violation(Violation),
    /// The server is closing down, or the session was replaced or reset.
    Stopped,
}

pub(super) struct Connection<'a> {
    stream: Stream,
    control: &'a Bell,
    pub(super) options: &'a Options,
    pub(super) signal: Arc<Signal>,
    receiver: Receiver,
    pub(super) outbox: Outbox,
    pub(super) units: Units,
    pub(super) discovery: bool,
    pub(super) cid: u16,
    pub(super) work: InFlight<Work, Pending>,
    /// Commands whose data is on its way, by task.
    pub(super) gathers: BTreeMap<u32, Gather>,
    /// Of these, those that wait for memory, in order.
    pub(super) hungry: VecDeque<u32>,
    /// Commands that have all they need and wait for memory or for others.
    pub(super) waiting: VecDeque<Waiting>,
    /// Commands that came before others that come before them.
    pub(super) later: BTreeMap<u32, Pdu>,
    /// The rest of a long answer to a text request, and its tag.
    pub(super) text: Option<(u32, Vec<u8>)>,
    pub(super) next_tag: u32,
    /// Nothing is received any more, and how it came to that.
    end: Option<End>,
    /// The session is to end.
    draining: bool,
    timer: Option<Sleep>,
    lingered: bool,
    heard: Instant,
    pinged: bool,
    idle: Sleep,
    pub(super) now: Instant,
    /// Given up last: who waits for the session's end finds nothing of it left.
    entered: Entered,
}

impl<'a> Connection<'a> {
    /// A connection with its session; `None` when the initiator's name cannot be told apart from others.
    pub(super) fn new(server: &'a Server, control: &'a Bell, stream: Stream, ready: LoggedIn) -> Option<Self> {
        let LoggedIn { login, entered, receiver } = ready;
        let Server { site, options, pools, cores, .. } = server;
        let session = entered.session().clone();
        let host = reserve::host(&session.initiator, session.isid)?;
        let numbers = (login.params, login.stat_sn, login.cmd_sn);
        Some(Self {
            stream,
            control,
            options,
            signal: session.signal.clone(),
            receiver,
            outbox: Outbox::new(pools, numbers, options.commands_max, (site.clone(), session.clone())),
            discovery: session.discovery,
            cid: login.cid,
            units: Units::new(site.clone(), cores.clone(), session, host),
            work: InFlight::new(options.commands_max as usize + EXTRA_MAX),
            gathers: BTreeMap::new(),
            hungry: VecDeque::new(),
            waiting: VecDeque::new(),
            later: BTreeMap::new(),
            text: None,
            next_tag: 1,
            end: None,
            draining: false,
            timer: None,
            lingered: false,
            heard: now(),
            pinged: false,
            idle: sleep(options.ping_after),
            now: now(),
            entered,
        })
    }

    /// Serves until the connection ends.  All commands that were begun are done by then, or the time that
    /// [`Options::drain_timeout`] gives them is over.
    pub(super) async fn run(mut self) -> End {
        let stream = self.stream.clone();
        let receive = |want| forebay_serve::receive(stream.clone(), want);
        let end = exchange(&mut self, receive, |batch| forebay_serve::send(stream.clone(), batch)).await;
        if !self.work.is_empty() {
            let Self { work, outbox, mut units, entered, .. } = self;
            Remains { work, outbox, luns: units.take_luns(), leaving: entered.leave() }.carry();
        }
        end
    }

    /// What others want of this session, and what time asks for.
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
                    // The initiator has forgotten this connection; nobody reads what it would be sent.
                    self.give_up_all();
                    self.outbox.deafen();
                    self.lingered = true;
                    self.timer = Some(sleep(self.options.drain_timeout));
                }
                _ => {
                    if why == Stop::Reset {
                        self.give_up_all();
                    }
                    // Seconds until a connection is tried again, and that what was under way is kept.
                    self.outbox.event(async_event::DROP_SESSION, [0, 1, 0]);
                    self.timer = Some(sleep(LINGER));
                }
            }
        }
        while Pin::new(&mut self.idle).poll(cx).is_ready() {
            let silent = self.now.since(self.heard);
            let patience = self.options.ping_after;
            let late = |gather: &Gather| gather.is_awaited() && self.now.since(gather.heard) >= patience;
            if self.gathers.values().any(late) {
                // It would hold memory that others wait for, for as long as the host likes.
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
                self.outbox.deafen();
                self.stop_receiving(End::Violation(Violation::Silent));
                self.idle = sleep(patience);
            }
        }
    }

    /// A tag for what this end begins.
    pub(super) fn tag(&mut self) -> u32 {
        let tag = self.next_tag;
        self.next_tag = if tag >= u32::MAX - 1 { 1 } else { tag + 1 };
        tag
    }

    fn follow_orders(&mut self) {
        let orders: Vec<_> = self.units.in_use().map(|state| (state.nexus.lun, state.nexus.orders())).collect();
        for (lun, orders) in orders {
            for (order, drain) in orders {
                match order {
                    Order::Abort => self.give_up(lun, Some(&drain)),
                    Order::Leave => {
                        let lun = Lun::Unit(lun);
                        let of_unit = |local: &Pending| {
                            local.local.as_ref().is_some_and(|local| Lun::Unit(local.unit.lun()) == lun)
                        };
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
            self.outbox.deafen();
        }
        self.end = Some(end);
        self.give_up_all();
        // From here on what is under way has only so much time.
        self.timer = Some(sleep(self.options.drain_timeout));
        self.lingered = true;
    }

    /// True once the session is to end: commands are not begun any more.
    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Nobody waits any more for what is under way, whatever unit it is for.
    pub(super) fn give_up_all(&mut self) {
        for (_, early) in std::mem::take(&mut self.later) {
            self.outbox.release(early.data.len());
        }
        self.hungry.clear();
        for (_, gather) in std::mem::take(&mut self.gathers) {
            self.drop_command(gather.numbered, gather.held);
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
            self.outbox.deafen();
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
            timed_out = self.lingered;
            self.timer = (!timed_out).then(|| sleep(self.options.drain_timeout));
            self.lingered = true;
        }
        let quiet = self.work.is_empty() && self.outbox.is_empty();
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
    /// A function of task management, which is no task itself.
    pub(super) fn is_task(&self) -> bool {
        matches!(self.role, Role::Command(_)) && !self.control
    }
}
