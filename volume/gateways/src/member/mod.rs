//! State machine of one member: what it does next, given the record, what others say, and the time.
//!
//! [`GatewayMachine::step`] takes one event and returns the actions that follow.  Each action that has an outcome is
//! answered by an event; nothing else is assumed about when, or whether, actions take effect.

mod observing;
mod rebalancing;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::Instant;

use crate::ids::{MemberId, StartId, VolumeName};
use crate::load::{RequestLoad, VolumeLoads};
use crate::observe::ObserverRing;
use crate::record::{ChangeRefusal, GatewayMember, GatewayState, GroupChange, GroupRecord};
use crate::wire::{GatewayMessage, GatewayMessageBody, told_loads};

use observing::{FencingProgress, HeardMember};
use rebalancing::Rebalancing;
use volumes::LocalVolume;
pub use volumes::{CloseReason, OpenFailure};

/// Number of heartbeats in the length of a lease.
const HEARTBEATS_PER_LEASE: u32 = 4;
/// Time between attempts to change the record after one has failed.
const CHANGE_RETRY: Duration = Duration::from_millis(100);

/// Event that a member's state machine takes.
#[derive(Debug, Clone)]
pub enum GatewayEvent {
    /// Time has passed.
    Tick,
    /// The record was read: this one, by a request that was sent at this time.
    Record(Rc<GroupRecord>, Instant),
    /// A message from another member.
    Message(GatewayMessage),
    /// The change of the record was made, or not; the record as it is then comes before this.
    Changed(ChangeOutcome),
    /// The clients of this start of a member are on the blocklist; or that failed, and is asked for again.
    FenceEnded(MemberId, StartId, bool),
    /// The volume is open in this term.
    Opened(VolumeName, u64),
    /// The volume could not be opened in this term.
    OpenFailed(VolumeName, u64, OpenFailure),
    /// The volume of this term is closed: nothing of it is in flight at the pool, and its lock is given up.
    Closed(VolumeName, u64),
    /// The volume, which is being moved to this member in this term of its owner, is prepared.
    Prepared(VolumeName, u64),
    /// Starts that have the record open: the pool sees their clients watch it.
    Present(BTreeSet<(MemberId, StartId)>),
    /// No process of this start of a member is left: its machine refuses connections to it.
    Refused(MemberId, StartId),
    /// Loads of the volumes that this member has open, as far as they are measured.
    Load(Rc<VolumeLoads>),
    /// Request to ask the other members for the loads of their volumes ([`GatewayMachine::has_told_loads`]).
    AskLoads,
    /// The pool refuses this member's client: it is on the blocklist.
    ClientFenced,
    /// Request to stop in order: volumes are closed, and others get them.
    Stop,
}

/// Outcome of a change of the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// Change made.
    Made,
    /// Refused: the record is another one by now.
    Refused(ChangeRefusal),
    /// Unknown, or the pool was not reached.
    Failed,
}

/// Action that a member's state machine asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum GatewayAction {
    /// Send a message to a member, if it is connected.
    Send(MemberId, GatewayMessageBody),
    /// Read the record again.
    Refresh,
    /// Find out which starts have the record open ([`GatewayEvent::Present`]).
    FindPresent,
    /// Change the record, and say how that went ([`GatewayEvent::Changed`]).
    Change(Vec<GroupChange>),
    /// Put clients on the blocklist ([`GatewayEvent::FenceEnded`]).
    Fence {
        /// Id of the member.
        member: MemberId,
        /// Its start.
        start: StartId,
        /// Clients of that start.
        clients: Vec<String>,
    },
    /// Open a volume ([`GatewayEvent::Opened`], [`GatewayEvent::OpenFailed`]).
    Open(VolumeName, u64),
    /// Open the image of a volume without its lock ([`GatewayEvent::Prepared`]).
    Prepare(VolumeName, u64),
    /// Forget what was prepared.
    Unprepare(VolumeName),
    /// Close a volume ([`GatewayEvent::Closed`]).
    Close(VolumeName, u64, CloseReason),
    /// Admit the connections of hosts, or close them and refuse new ones.
    AdmitHosts(bool),
    /// The member has ended in this start: everything is closed at once, without a word to the pool.
    End(EndReason),
}

/// Reason for which a start of a member has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// Record that says that it is fenced, or a client that was.  The member joins again with another start.
    Fenced,
    /// Departure from the group, by itself or by others.
    Left,
    /// Orderly stop.
    Stopped,
}

/// Standing of a member in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberStanding {
    /// Not a member in this start yet.
    Joining,
    /// Serves its volumes.
    Serving,
    /// Closes its volumes, to stop in order.
    Stopping,
    /// Ended in this start.
    Ended(EndReason),
}

/// State machine of one start of a member.
///
/// | invariant | |
/// |---|---|
/// | S1 | a volume is opened only in a term in which the record names this member, in this start, as its owner |
/// | S2 | one change of the record is in flight at most |
/// | S3 | a volume is handed over only after it was closed |
/// | S4 | after [`GatewayAction::End`], no further action is asked for |
pub struct GatewayMachine {
    own: MemberId,
    start: StartId,
    /// Entry with which it joins; state, slot and start are set when it does.
    entry: GatewayMember,
    record: Rc<GroupRecord>,
    /// Members that fence their own former start, since when.
    self_fencing: BTreeMap<MemberId, Instant>,
    ring: ObserverRing,
    standing: MemberStanding,
    heard: BTreeMap<MemberId, HeardMember>,
    loads: BTreeMap<MemberId, (u64, RequestLoad)>,
    volume_loads: Rc<VolumeLoads>,
    /// Sum of these, which is said to others.
    load: RequestLoad,
    /// Loads of their volumes that others have told since they were asked last.
    told: BTreeMap<MemberId, Rc<VolumeLoads>>,
    load_number: u64,
    rebalancing: Rebalancing,
    /// Time at which the last request was sent that the pool has answered.
    pool_confirmed: Instant,
    /// Since when it was reached without a gap of a lease.
    pool_reached_since: Instant,
    heartbeat_at: Instant,
    stepped: Instant,
    change_in_flight: bool,
    change_at: Instant,
    fencing: BTreeMap<(MemberId, StartId), FencingProgress>,
    hosts_admitted: bool,
    /// Members that have answered heartbeats, and when.
    answered: BTreeMap<MemberId, Instant>,
    /// Starts that had the record open when that was asked last, and when.
    present: Option<(BTreeSet<(MemberId, StartId)>, Instant)>,
    present_at: Instant,
    /// Set while the record must be read before anything is done: this process was suspended.
    stale_since: Option<Instant>,
    volumes: BTreeMap<VolumeName, LocalVolume>,
    actions: Vec<GatewayAction>,
    /// Seconds since 1970 at `stepped`, for what the record keeps.
    wall_clock: fn() -> u64,
}

impl GatewayMachine {
    /// Creates the state machine of a start that is to join with `entry`, or rejoin, at time `now`.
    pub fn new(
        own: MemberId,
        entry: GatewayMember,
        record: Rc<GroupRecord>,
        now: Instant,
        wall_clock: fn() -> u64,
    ) -> Self {
        let entry_patience = record.policy().lease();
        let mut machine = Self {
            own,
            start: entry.start,
            entry,
            ring: ObserverRing::new(&record),
            record,
            self_fencing: BTreeMap::new(),
            standing: MemberStanding::Joining,
            heard: BTreeMap::new(),
            loads: BTreeMap::new(),
            volume_loads: Rc::default(),
            load: RequestLoad::default(),
            told: BTreeMap::new(),
            // Higher than those of former starts, which others may have: there are less than 1024 in a second.
            load_number: wall_clock() << 10,
            rebalancing: Rebalancing::new(now),
            pool_confirmed: now,
            pool_reached_since: now,
            heartbeat_at: now,
            stepped: now,
            change_in_flight: false,
            change_at: now,
            fencing: BTreeMap::new(),
            hosts_admitted: false,
            answered: BTreeMap::new(),
            present: None,
            present_at: now + entry_patience,
            stale_since: None,
            volumes: BTreeMap::new(),
            actions: Vec::new(),
            wall_clock,
        };
        machine.observe_ring(now);
        machine
    }

    /// Returns this member.
    pub fn own(&self) -> MemberId {
        self.own
    }

    /// Returns the start.
    pub fn start(&self) -> StartId {
        self.start
    }

    /// Returns the record as this member knows it.
    pub fn record(&self) -> &Rc<GroupRecord> {
        &self.record
    }

    /// Returns what the member is doing.
    pub fn standing(&self) -> MemberStanding {
        self.standing
    }

    /// Returns when the last request was sent that the pool has answered.
    pub fn pool_confirmed(&self) -> Instant {
        self.pool_confirmed
    }

    /// Returns whether hosts are admitted.
    pub fn admits_hosts(&self) -> bool {
        self.hosts_admitted
    }

    /// Returns the term in which a volume is open here.
    pub fn open_term(&self, volume: &VolumeName) -> Option<u64> {
        self.volumes.get(volume).and_then(LocalVolume::open_term)
    }

    /// Returns whether a member has told the loads of its volumes since it was asked last.
    pub fn has_told_loads(&self, member: MemberId) -> bool {
        self.told.contains_key(&member)
    }

    /// Sets the time without a change after which volumes are moved by themselves, for simulations of short times.
    pub fn set_settle_time(&mut self, settle: Duration) {
        self.rebalancing.settle = settle;
    }

    /// Returns the longest time until the next [`GatewayEvent::Tick`].
    pub fn tick_interval(&self) -> Duration {
        self.lease() / (2 * HEARTBEATS_PER_LEASE)
    }

    fn lease(&self) -> Duration {
        self.record.policy().lease()
    }

    /// Returns how long the pool has not been reached.
    fn pool_silence(&self, now: Instant) -> Duration {
        now.since(self.pool_confirmed)
    }

    /// Returns a message of this member.
    pub fn message(&self, now: Instant, body: GatewayMessageBody) -> GatewayMessage {
        GatewayMessage {
            group: self.record.identity().id,
            from: self.own,
            start: self.start,
            epoch: self.record.epoch(),
            pool_silence_ms: u32::try_from(self.pool_silence(now).as_millis()).unwrap_or(u32::MAX),
            body,
        }
    }

    /// Takes an event at time `now`, and returns what is to be done.
    pub fn step(&mut self, now: Instant, event: GatewayEvent) -> Vec<GatewayAction> {
        if matches!(self.standing, MemberStanding::Ended(_)) {
            return Vec::new();
        }
        self.notice_suspension(now);
        self.stepped = now;
        // What is heard is looked at with the next tick.
        let decides = !matches!(&event, GatewayEvent::Message(message) if message.body.is_heartbeat());
        self.take(now, event);
        self.check_own_entry();
        if decides && !matches!(self.standing, MemberStanding::Ended(_)) && self.stale_since.is_none() {
            self.send_heartbeats(now);
            self.decide_hosts(now);
            self.reconcile_volumes(now);
            self.decide_change(now);
        }
        std::mem::take(&mut self.actions)
    }

    /// A process that did not run for a while has heard nobody, and may have been fenced.
    fn notice_suspension(&mut self, now: Instant) {
        if now.since(self.stepped) <= self.lease() / 2 {
            return;
        }
        self.heard_anew(now);
        if now.since(self.stepped) > self.lease() && self.standing != MemberStanding::Joining {
            self.stale_since = Some(now);
            if std::mem::replace(&mut self.hosts_admitted, false) {
                self.actions.push(GatewayAction::AdmitHosts(false));
            }
            self.actions.push(GatewayAction::Refresh);
        }
    }

    fn take(&mut self, now: Instant, event: GatewayEvent) {
        match event {
            GatewayEvent::Tick => {}
            GatewayEvent::Record(record, asked) => {
                if asked.since(self.pool_confirmed) > self.lease() {
                    self.pool_reached_since = now;
                }
                self.pool_confirmed = self.pool_confirmed.max(asked);
                if self.stale_since.is_some_and(|since| asked >= since) {
                    self.stale_since = None;
                }
                if record.epoch() > self.record.epoch() {
                    self.ring = ObserverRing::new(&record);
                    self.record = record;
                    self.observe_ring(now);
                }
            }
            GatewayEvent::Message(message) => self.take_message(now, message),
            GatewayEvent::Changed(outcome) => {
                self.change_in_flight = false;
                if outcome != ChangeOutcome::Made {
                    self.change_at = now + CHANGE_RETRY;
                }
            }
            GatewayEvent::FenceEnded(member, start, done) => self.fence_ended(now, (member, start), done),
            GatewayEvent::Present(present) => self.present = Some((present, now)),
            GatewayEvent::Refused(member, start) => self.take_refused(now, member, start),
            GatewayEvent::Load(loads) => {
                self.load_number += 1;
                if !Rc::ptr_eq(&loads, &self.volume_loads) {
                    self.volume_loads = loads;
                    self.load = self.own_load();
                }
            }
            GatewayEvent::AskLoads => {
                self.told.clear();
                let others = self.ring.after(self.own).map(|to| GatewayAction::Send(to, GatewayMessageBody::AskLoads));
                self.actions.extend(others);
            }
            GatewayEvent::ClientFenced => self.end(EndReason::Fenced),
            GatewayEvent::Stop if self.standing == MemberStanding::Serving => self.standing = MemberStanding::Stopping,
            GatewayEvent::Stop => self.end(EndReason::Stopped),
            event => self.take_volume_event(now, event),
        }
    }

    fn take_message(&mut self, now: Instant, message: GatewayMessage) {
        if message.group != self.record.identity().id || message.from == self.own {
            return;
        }
        if message.epoch > self.record.epoch() {
            self.actions.push(GatewayAction::Refresh);
        }
        // A start that is about to join is answered, but is not what the record names.
        let is_known = self.record.member(message.from).is_some_and(|member| member.start == message.start);
        match message.body {
            GatewayMessageBody::Heartbeat(report) => {
                if is_known {
                    self.hear(now, message.from, message.pool_silence_ms, report);
                }
                let answer = GatewayMessageBody::HeartbeatAnswer(self.report(now));
                self.actions.push(GatewayAction::Send(message.from, answer));
            }
            GatewayMessageBody::HeartbeatAnswer(report) => {
                self.answered.insert(message.from, now);
                if is_known {
                    self.hear(now, message.from, message.pool_silence_ms, report);
                }
            }
            _ if !is_known => {}
            GatewayMessageBody::AskLoads => {
                let told = GatewayMessageBody::TellLoads(told_loads(&self.volume_loads));
                self.actions.push(GatewayAction::Send(message.from, told));
            }
            GatewayMessageBody::TellLoads(loads) => drop(self.told.insert(message.from, Rc::new(loads))),
            GatewayMessageBody::Prepared { volume, term } => self.next_owner_prepared(&volume, term, message.from),
        }
    }

    /// Ends this start where the record no longer has it (G5).
    fn check_own_entry(&mut self) {
        let own = self.record.member(self.own);
        match (self.standing, own) {
            (MemberStanding::Joining, Some(member)) if member.start == self.start && member.state.serves() => {
                self.standing = MemberStanding::Serving;
            }
            (MemberStanding::Joining | MemberStanding::Ended(_), _) => {}
            (MemberStanding::Serving | MemberStanding::Stopping, None) => self.end(EndReason::Left),
            (MemberStanding::Stopping, Some(member)) if member.state == GatewayState::Out(self.own) => {
                self.end(EndReason::Stopped);
            }
            (MemberStanding::Serving | MemberStanding::Stopping, Some(_)) => {
                if !self.record.serves(self.own, self.start) {
                    self.end(EndReason::Fenced);
                }
            }
        }
    }

    fn end(&mut self, reason: EndReason) {
        if matches!(self.standing, MemberStanding::Ended(_)) {
            return;
        }
        self.standing = MemberStanding::Ended(reason);
        if std::mem::replace(&mut self.hosts_admitted, false) {
            self.actions.push(GatewayAction::AdmitHosts(false));
        }
        self.actions.push(GatewayAction::End(reason));
    }

    /// Asks for a change of the record, unless one is in flight (S2).
    fn decide_change(&mut self, now: Instant) {
        if self.change_in_flight || now < self.change_at {
            return;
        }
        let changes = match self.standing {
            MemberStanding::Joining => {
                if self.may_join(now) {
                    self.joining_changes()
                } else {
                    Vec::new()
                }
            }
            MemberStanding::Serving => self.serving_changes(now),
            MemberStanding::Stopping => self.stopping_changes(),
            MemberStanding::Ended(_) => Vec::new(),
        };
        let changes = self.allowed(changes);
        if !changes.is_empty() {
            self.change_in_flight = true;
            self.actions.push(GatewayAction::Change(changes));
        }
    }

    /// Returns those of the changes that the record allows, one after the other: one that is refused must not keep the
    /// others back.
    fn allowed(&self, changes: Vec<GroupChange>) -> Vec<GroupChange> {
        if changes.len() < 2 {
            return changes;
        }
        let mut record = (*self.record).clone();
        let allowed = changes.into_iter().filter(|change| match record.apply(std::slice::from_ref(change)) {
            Ok(_) => true,
            Err(refusal) => {
                tracing::warn!(%refusal, ?change, "a change of a gateway group would be refused");
                false
            }
        });
        allowed.collect()
    }

    /// Returns whether this start may join: it hears most of those that would observe it, or the pool says that no other
    /// member is there.  One that joins and hears nobody would fence members that others hear.
    fn may_join(&mut self, now: Instant) -> bool {
        let lease = self.lease();
        let observers: Vec<MemberId> = self.ring.observers_of(self.own).collect();
        let answers = |id: &&MemberId| self.answered.get(*id).is_some_and(|at| now.since(*at) <= lease);
        if 2 * observers.iter().filter(answers).count() >= observers.len() {
            return true;
        }
        let is_alone = |present: &BTreeSet<(MemberId, StartId)>| {
            let mut others = present.iter().filter(|(member, _)| *member != self.own);
            !others.any(|(member, start)| self.record.serves(*member, *start))
        };
        if self.present.as_ref().is_some_and(|(present, at)| now.since(*at) <= lease && is_alone(present)) {
            return true;
        }
        if now >= self.present_at {
            self.present_at = now + lease;
            self.actions.push(GatewayAction::FindPresent);
        }
        false
    }

    /// Returns the changes by which this start joins.  A former start of this member is fenced first, unless others do
    /// that: its requests may still be on their way.
    fn joining_changes(&mut self) -> Vec<GroupChange> {
        let Some(former) = self.record.member(self.own) else {
            let Some(slot) = self.record.free_slot((self.wall_clock)()) else { return Vec::new() };
            return vec![self.join(slot)];
        };
        let (slot, start) = (former.slot, former.start);
        let fenced = GroupChange::Fenced { member: self.own, start, by: self.own };
        match former.state {
            GatewayState::Out(_) => vec![self.join(slot)],
            GatewayState::Fencing(by) if by == self.own => match self.fencing.get(&(self.own, start)) {
                Some(FencingProgress::Done) => vec![fenced, self.join(slot)],
                Some(_) => Vec::new(),
                None => {
                    self.fence(self.own);
                    Vec::new()
                }
            },
            GatewayState::Fencing(by) if self.record.member(by).is_some_and(|other| other.state.serves()) => Vec::new(),
            _ => vec![GroupChange::BeginFencing { member: self.own, start, by: self.own }],
        }
    }

    fn join(&self, slot: u16) -> GroupChange {
        let entry = GatewayMember { slot, state: GatewayState::Active, start: self.start, ..self.entry.clone() };
        GroupChange::Join { member: self.own, entry }
    }
}
