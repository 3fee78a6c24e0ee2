//! Members of one group, their network and their pool, in virtual time.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::rc::Rc;
use std::time::Duration;

use forebay_gateways::wire::GatewayMessage;
use forebay_gateways::{
    ChangeOutcome, EndReason, GatewayAction, GatewayEvent, GatewayGroupId, GatewayMachine, GatewayMember, GroupChange,
    GroupIdentity, GroupPolicy, GroupRecord, MemberId, MemberStanding, OpenFailure, StartId, VolumeLoads, VolumeName,
};
use forebay_reactor::Instant;

use crate::conditions::{Latencies, Random, RandomFaults};
use logs::LogModel;

#[path = "logs.rs"]
mod logs;
#[path = "report.rs"]
mod report;

/// Attempts of a daemon to connect to one whose connection was interrupted, and the time between them.
const PROBES: u32 = 8;
const PROBE_PAUSE: Duration = Duration::from_millis(25);

enum WorldEvent {
    Tick,
    Deliver(GatewayMessage),
    /// A read arrives at the pool, sent at this time.
    ReadArrives(Instant),
    FindArrives,
    RecordComes(Rc<GroupRecord>, Instant),
    /// A change whose record was read in this epoch arrives at the pool, for the so-manieth time.
    ChangeArrives(Vec<GroupChange>, u64),
    ChangeAnswered(ChangeOutcome, Rc<GroupRecord>, Instant),
    FenceArrives(MemberId, StartId),
    FenceAnswered(MemberId, StartId, bool),
    OpenDone(VolumeName, u64),
    CloseDone(VolumeName, u64),
    Prepared(VolumeName, u64),
    /// An owner notes the members with complete copies of logs.
    CopiesArrive(Vec<GroupChange>),
    /// Connections to this start of a member are refused.
    ConnectionRefused(MemberId, StartId),
    Refused,
    Rejoin,
}

/// Daemon of a member.
pub struct Daemon {
    pub id: MemberId,
    pub machine: Option<GatewayMachine>,
    /// Incremented with each start; events of former ones are dropped.
    life: u64,
    pub start: StartId,
    pub suspended_until: u64,
    held: Vec<(u64, WorldEvent)>,
    pub cut_from_pool: bool,
    /// Time at which the pool has lost its client, if that was not in order.
    pool_lost: Option<u64>,
    /// Members of different parts do not hear each other.
    pub part: u8,
    pub hosts: bool,
    pub sent: u64,
    ticks: u64,
    pub stops: bool,
}

/// World of one group.
pub struct World {
    pub now: u64,
    number: u64,
    events: BinaryHeap<Reverse<(u64, u64, usize)>>,
    waiting: BTreeMap<u64, (u64, WorldEvent)>,
    pub random: Random,
    pub latencies: Latencies,
    pub faults: RandomFaults,
    pub record: Rc<GroupRecord>,
    pub fenced: BTreeSet<StartId>,
    /// Number of times that each start was fenced.
    pub fencings: BTreeMap<StartId, u32>,
    pub daemons: Vec<Daemon>,
    /// Pairs of daemons that do not hear each other.
    pub cut_links: BTreeSet<(usize, usize)>,
    /// Starts that have a volume open in fact, whether they live or not.
    pub open: BTreeMap<VolumeName, BTreeMap<StartId, u64>>,
    /// Since when volumes are not served; those that are missing are.
    pub unserved: BTreeMap<VolumeName, u64>,
    /// Longest time for which a volume was not served.
    pub unserved_max: u64,
    pub record_changes: u64,
    pub conflicts: u64,
    pub moves: u64,
    /// Loads of volumes, wherever they are; those that are missing have none.
    pub loads: VolumeLoads,
    /// Loads are measured with an error of up to this many per cent.
    pub load_noise: u64,
    /// Time without a change after which volumes are moved by themselves, if it is not the usual one.
    pub settle: Option<Duration>,
    /// Most volumes that were on their way at the same time.
    pub moving_max: usize,
    /// Write logs of volumes, as the records of their images have them.
    pub logs: BTreeMap<VolumeName, LogModel>,
    starts: u64,
}

/// Ticks between two measurements of loads: a second with the usual lease.
const TICKS_PER_LOAD: u64 = 8;

thread_local! {
    static SECONDS: Cell<u64> = const { Cell::new(0) };
}

fn wall_clock() -> u64 {
    1_800_000_000 + SECONDS.get()
}

impl World {
    /// Creates a group whose members have joined, and whose volumes are owned in turn.
    pub fn new(seed: u64, members: usize, volumes: usize, latencies: Latencies) -> Self {
        let identity = GroupIdentity::new(GatewayGroupId([7; 16]), GroupPolicy::default(), serde_json::Value::Null);
        let mut world = Self {
            now: 1_000_000_000,
            number: 0,
            events: BinaryHeap::new(),
            waiting: BTreeMap::new(),
            random: Random(seed),
            latencies,
            faults: RandomFaults::default(),
            record: Rc::new(GroupRecord::created(identity, 1)),
            fenced: BTreeSet::new(),
            fencings: BTreeMap::new(),
            daemons: Vec::new(),
            cut_links: BTreeSet::new(),
            open: BTreeMap::new(),
            unserved: BTreeMap::new(),
            unserved_max: 0,
            record_changes: 0,
            conflicts: 0,
            moves: 0,
            loads: VolumeLoads::new(),
            load_noise: 0,
            settle: None,
            moving_max: 0,
            logs: BTreeMap::new(),
            starts: 0,
        };
        let mut record = (*world.record).clone();
        for slot in 0..members {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&world.random.next().to_le_bytes());
            id[8..].copy_from_slice(&(slot as u64).to_le_bytes());
            let (id, start) = (MemberId(id), world.next_start());
            let entry = GatewayMember { slot: slot as u16, ..entry_of(start) };
            record.apply(&[GroupChange::Join { member: id, entry }]).expect("a new member");
            world.daemons.push(Daemon {
                id,
                machine: None,
                life: 0,
                start,
                suspended_until: 0,
                held: Vec::new(),
                cut_from_pool: false,
                pool_lost: None,
                part: 0,
                hosts: false,
                sent: 0,
                ticks: 0,
                stops: false,
            });
        }
        let ids: Vec<MemberId> = world.daemons.iter().map(|daemon| daemon.id).collect();
        let add = |number: usize| GroupChange::AddVolume {
            volume: VolumeName::new(format!("rbd/v{number:05}")),
            owner: ids[number % ids.len()],
            settings: serde_json::Value::Null,
        };
        record.apply(&(0..volumes).map(add).collect::<Vec<_>>()).expect("new volumes");
        world.record = Rc::new(record);
        world.unserved = world.record.volumes().keys().map(|name| (name.clone(), world.now)).collect();
        for at in 0..members {
            world.begin(at);
        }
        world
    }

    fn next_start(&mut self) -> StartId {
        self.starts += 1;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.starts.to_le_bytes());
        StartId(id)
    }

    fn time(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Begins a start of a daemon, which has read the record.
    fn begin(&mut self, at: usize) {
        let (id, start) = (self.daemons[at].id, self.daemons[at].start);
        SECONDS.set(self.now / 1_000_000_000);
        let mut machine = GatewayMachine::new(id, entry_of(start), self.record.clone(), self.time(), wall_clock);
        if let Some(settle) = self.settle {
            machine.set_settle_time(settle);
        }
        self.daemons[at].machine = Some(machine);
        // Not all at the same moment.
        let delay = Duration::from_micros(self.random.below(125_000));
        self.after(at, delay, WorldEvent::Tick);
        let now = self.time();
        self.after(at, Duration::ZERO, WorldEvent::ReadArrives(now));
    }

    fn after(&mut self, at: usize, delay: Duration, event: WorldEvent) {
        self.number += 1;
        let time = self.now + delay.as_nanos() as u64;
        self.events.push(Reverse((time, self.number, at)));
        self.waiting.insert(self.number, (self.daemons[at].life, event));
    }

    /// Runs until this time.
    pub fn run_until(&mut self, until: u64) {
        while let Some(Reverse((time, number, at))) = self.events.peek().copied() {
            if time > until {
                break;
            }
            self.events.pop();
            self.now = self.now.max(time);
            let Some((life, event)) = self.waiting.remove(&number) else { continue };
            let daemon = &mut self.daemons[at];
            // What is at the pool already takes effect there, even if its sender is dead.
            let at_pool = matches!(event, WorldEvent::ChangeArrives(..) | WorldEvent::FenceArrives(..));
            if life != daemon.life && !at_pool {
                continue;
            }
            if self.now < daemon.suspended_until && !at_pool {
                daemon.held.push((life, event));
                continue;
            }
            self.handle(at, life, event);
        }
        self.now = self.now.max(until);
    }

    /// Suspends a daemon's process: it does nothing until then.
    pub fn suspend(&mut self, at: usize, duration: Duration) {
        self.daemons[at].suspended_until = self.now + duration.as_nanos() as u64;
        // What was held is delivered when it goes on.
        self.number += 1;
        self.events.push(Reverse((self.daemons[at].suspended_until, self.number, at)));
        self.waiting.insert(self.number, (self.daemons[at].life, WorldEvent::Refused));
    }

    /// Kills a daemon.
    pub fn kill(&mut self, at: usize) {
        let daemon = &mut self.daemons[at];
        (daemon.machine, daemon.hosts, daemon.stops) = (None, false, false);
        daemon.life += 1;
        daemon.pool_lost = Some(self.now);
        daemon.held.clear();
        daemon.suspended_until = 0;
        self.count_unserved();
    }

    /// Kills the process of a daemon, whose machine lives: it refuses connections.
    pub fn kill_process(&mut self, at: usize) {
        self.kill(at);
        self.refuse(at);
    }

    /// Refuses connections to a daemon, whether it runs or not.
    pub fn refuse(&mut self, at: usize) {
        let (id, start) = (self.daemons[at].id, self.daemons[at].start);
        for other in 0..self.daemons.len() {
            let reached = self.daemons[other].part == self.daemons[at].part;
            if other != at && reached && !self.cut_links.contains(&(at.min(other), at.max(other))) {
                // Several attempts, as daemons make them.
                let first = Duration::from_millis(1 + self.random.below(30));
                for attempt in 0..PROBES {
                    self.after(other, first + PROBE_PAUSE * attempt, WorldEvent::ConnectionRefused(id, start));
                }
            }
        }
    }

    /// Tells a daemon that connections to a start of another one are refused.
    pub fn refused_at(&mut self, at: usize, member: MemberId, start: StartId) {
        self.after(at, Duration::ZERO, WorldEvent::ConnectionRefused(member, start));
    }

    /// Starts a daemon again that is not running.
    pub fn restart(&mut self, at: usize) {
        if self.daemons[at].machine.is_none() {
            self.daemons[at].start = self.next_start();
            self.daemons[at].pool_lost = None;
            self.begin(at);
        }
    }

    /// Lets a daemon stop in order.
    pub fn stop(&mut self, at: usize) {
        if self.daemons[at].machine.as_ref().is_some_and(|machine| machine.standing() == MemberStanding::Serving) {
            self.daemons[at].stops = true;
            self.step(at, GatewayEvent::Stop);
        }
    }

    /// Changes the record as an operator's command does.
    pub fn command(&mut self, changes: &[GroupChange]) -> bool {
        let mut record = (*self.record).clone();
        let made = record.apply(changes).is_ok();
        if made {
            self.publish(record);
        }
        made
    }

    fn publish(&mut self, record: GroupRecord) {
        for (name, volume) in record.volumes() {
            if self.record.volume(name).is_some_and(|before| before.owner.term != volume.owner.term) {
                self.moves += 1;
            }
        }
        // Volumes that have left are not counted; new ones are.
        self.unserved.retain(|name, _| record.volume(name).is_some());
        let now = self.now;
        let new = record.volumes().keys().filter(|name| self.record.volume(name).is_none());
        self.unserved.extend(new.map(|name| (name.clone(), now)));
        self.moving_max = self.moving_max.max(record.moving_count());
        self.record = Rc::new(record);
        self.record_changes += 1;
        for at in 0..self.daemons.len() {
            if self.daemons[at].machine.is_some() && !self.daemons[at].cut_from_pool {
                let delay = self.random.between(self.latencies.notify);
                // An announcement says nothing about when the pool was reached.
                self.after(at, delay, WorldEvent::RecordComes(self.record.clone(), Instant::from_nanos(0)));
            }
        }
    }

    fn is_fenced(&self, at: usize) -> bool {
        self.fenced.contains(&self.daemons[at].start)
    }

    fn handle(&mut self, at: usize, life: u64, event: WorldEvent) {
        match event {
            WorldEvent::Tick => {
                let Some(machine) = &self.daemons[at].machine else { return };
                let interval = machine.tick_interval();
                self.after(at, interval, WorldEvent::Tick);
                // A daemon reads the group's entry four times in a lease, at most two ticks apart.
                self.daemons[at].ticks += 1;
                if self.daemons[at].ticks.is_multiple_of(2) || self.random.one_in(4) {
                    self.read(at);
                }
                if self.daemons[at].ticks.is_multiple_of(TICKS_PER_LOAD) {
                    let loads = self.measured(at);
                    return self.step(at, GatewayEvent::Load(Rc::new(loads)));
                }
                self.step(at, GatewayEvent::Tick);
                self.keep_logs(at);
            }
            WorldEvent::CopiesArrive(changes) => self.copies_arrive(at, &changes),
            WorldEvent::Deliver(message) => self.step(at, GatewayEvent::Message(message)),
            WorldEvent::ReadArrives(asked) => {
                if self.daemons[at].cut_from_pool {
                    return;
                }
                let delay = self.random.between(self.latencies.record);
                if self.is_fenced(at) {
                    return self.after(at, delay, WorldEvent::Refused);
                }
                self.after(at, delay, WorldEvent::RecordComes(self.record.clone(), asked));
            }
            WorldEvent::FindArrives => {
                if self.daemons[at].cut_from_pool || self.is_fenced(at) {
                    return;
                }
                // A watch outlives its client by up to 30 s.
                let (now, lost) = (self.now, 30_000_000_000);
                let watches = self.daemons.iter().filter(|daemon| match daemon.pool_lost {
                    None => daemon.machine.is_some(),
                    Some(since) => now - since < lost,
                });
                let present = watches
                    .filter(|daemon| !self.fenced.contains(&daemon.start))
                    .map(|daemon| (daemon.id, daemon.start));
                self.step(at, GatewayEvent::Present(present.collect()));
            }
            WorldEvent::RecordComes(record, asked) => self.step(at, GatewayEvent::Record(record, asked)),
            WorldEvent::ChangeArrives(changes, epoch) => self.change_arrives(at, life, changes, epoch),
            WorldEvent::ChangeAnswered(outcome, record, asked) => {
                self.step(at, GatewayEvent::Record(record, asked));
                self.step(at, GatewayEvent::Changed(outcome));
            }
            WorldEvent::FenceArrives(member, start) => {
                let fails = self.daemons[at].cut_from_pool
                    || self.is_fenced(at)
                    || (self.faults.failed_fences > 0 && self.random.one_in(self.faults.failed_fences));
                if !fails {
                    self.fenced.insert(start);
                    *self.fencings.entry(start).or_default() += 1;
                    self.count_unserved();
                }
                let delay = self.random.between(self.latencies.record);
                if life == self.daemons[at].life {
                    self.after(at, delay, WorldEvent::FenceAnswered(member, start, !fails));
                }
            }
            WorldEvent::FenceAnswered(member, start, done) => {
                self.step(at, GatewayEvent::FenceEnded(member, start, done))
            }
            WorldEvent::OpenDone(name, term) => self.open_done(at, name, term),
            WorldEvent::CloseDone(name, term) => {
                let start = self.daemons[at].start;
                if let Some(open) = self.open.get_mut(&name) {
                    open.remove(&start);
                }
                self.count_unserved_of(&name);
                self.step(at, GatewayEvent::Closed(name, term));
            }
            WorldEvent::Prepared(name, term) => self.step(at, GatewayEvent::Prepared(name, term)),
            WorldEvent::Refused => {
                let held = std::mem::take(&mut self.daemons[at].held);
                for (life, event) in held {
                    if life == self.daemons[at].life {
                        self.handle(at, life, event);
                    }
                }
                if self.is_fenced(at) && !self.daemons[at].cut_from_pool {
                    self.step(at, GatewayEvent::ClientFenced);
                }
            }
            WorldEvent::ConnectionRefused(member, start) => self.step(at, GatewayEvent::Refused(member, start)),
            WorldEvent::Rejoin => self.restart(at),
        }
    }

    fn read(&mut self, at: usize) {
        let (now, delay) = (self.time(), self.random.between(self.latencies.record));
        self.after(at, delay, WorldEvent::ReadArrives(now));
    }

    fn change_arrives(&mut self, at: usize, life: u64, changes: Vec<GroupChange>, epoch: u64) {
        let there_and_back = self.random.between(self.latencies.record);
        if self.daemons[at].cut_from_pool {
            if life == self.daemons[at].life {
                let (record, zero) =
                    (self.daemons[at].machine.as_ref().expect("alive").record().clone(), Instant::from_nanos(0));
                self.after(
                    at,
                    Duration::from_millis(500),
                    WorldEvent::ChangeAnswered(ChangeOutcome::Failed, record, zero),
                );
            }
            return;
        }
        if self.is_fenced(at) {
            if life == self.daemons[at].life {
                self.after(at, there_and_back, WorldEvent::Refused);
            }
            return;
        }
        let mut outcome = ChangeOutcome::Made;
        if epoch != self.record.epoch() {
            // Compare-and-set fails: the daemon reads the record, and tries again if the change is still allowed.
            self.conflicts += 1;
            if life != self.daemons[at].life {
                return;
            }
            let mut trial = (*self.record).clone();
            match trial.apply(&changes) {
                Ok(_) => {
                    let both = there_and_back
                        + self.random.between(self.latencies.record)
                        + self.random.between(self.latencies.record);
                    let epoch = self.record.epoch();
                    return self.after(at, both, WorldEvent::ChangeArrives(changes, epoch));
                }
                Err(refusal) => outcome = ChangeOutcome::Refused(refusal),
            }
        } else {
            let mut record = (*self.record).clone();
            match record.apply(&changes) {
                Ok(_) => self.publish(record),
                Err(refusal) => outcome = ChangeOutcome::Refused(refusal),
            }
        }
        if outcome == ChangeOutcome::Made
            && self.faults.lost_answers > 0
            && self.random.one_in(self.faults.lost_answers)
        {
            outcome = ChangeOutcome::Failed;
        }
        if life == self.daemons[at].life {
            let now = self.time();
            self.after(at, there_and_back, WorldEvent::ChangeAnswered(outcome, self.record.clone(), now));
        }
    }

    fn open_done(&mut self, at: usize, name: VolumeName, term: u64) {
        let start = self.daemons[at].start;
        let failed = self.faults.failed_opens > 0 && self.random.one_in(self.faults.failed_opens);
        let elsewhere = self.copies_elsewhere(at, &name);
        if self.is_fenced(at) || self.daemons[at].cut_from_pool || failed || elsewhere.is_some() {
            if !self.logs.is_empty() {
                let why = elsewhere.map_or(OpenFailure::Later, OpenFailure::CopiesElsewhere);
                return self.step(at, GatewayEvent::OpenFailed(name, term, why));
            }
            // Some find that others have the copies of the volume's log.
            let copies: BTreeSet<MemberId> = self.daemons.iter().map(|daemon| daemon.id).filter(|_| failed).collect();
            let copies: BTreeSet<MemberId> = copies.into_iter().filter(|_| self.random.one_in(2)).collect();
            let why = match self.random.one_in(4) && !copies.is_empty() {
                true => OpenFailure::CopiesElsewhere(copies),
                false => OpenFailure::Later,
            };
            return self.step(at, GatewayEvent::OpenFailed(name, term, why));
        }
        let fenced = &self.fenced;
        let open = self.open.entry(name.clone()).or_default();
        // What a fenced start has open, nothing comes of.
        open.retain(|other, _| !fenced.contains(other));
        let others: Vec<_> = open.keys().filter(|other| **other != start).collect();
        assert!(others.is_empty(), "{name} is opened in term {term} by {start}, and {others:?} have it open");
        open.insert(start, term);
        self.take_log(at, &name);
        self.count_unserved_of(&name);
        self.step(at, GatewayEvent::Opened(name, term));
    }

    fn step(&mut self, at: usize, event: GatewayEvent) {
        let now = self.time();
        let Some(machine) = &mut self.daemons[at].machine else { return };
        let actions = machine.step(now, event);
        for action in actions {
            self.act(at, action);
        }
    }

    fn act(&mut self, at: usize, action: GatewayAction) {
        let now = self.time();
        match action {
            GatewayAction::Send(to, body) => {
                self.daemons[at].sent += 1;
                let Some(machine) = &self.daemons[at].machine else { return };
                let message = machine.message(now, body);
                let Some(other) = self.daemons.iter().position(|daemon| daemon.id == to) else { return };
                let is_cut = self.cut_links.contains(&(at.min(other), at.max(other)));
                let lost = is_cut || self.faults.lost_messages > 0 && self.random.one_in(self.faults.lost_messages);
                if self.daemons[other].part == self.daemons[at].part && !lost {
                    let delay = self.random.between(self.latencies.message);
                    self.after(other, delay, WorldEvent::Deliver(message));
                }
            }
            GatewayAction::Refresh => self.read(at),
            GatewayAction::FindPresent => {
                let delay = self.random.between(self.latencies.record);
                self.after(at, delay, WorldEvent::FindArrives);
            }
            GatewayAction::Change(changes) => {
                let delay = self.random.between(self.latencies.record);
                let epoch = self.daemons[at].machine.as_ref().expect("alive").record().epoch();
                self.after(at, delay, WorldEvent::ChangeArrives(changes, epoch));
            }
            GatewayAction::Fence { member, start, .. } => {
                let delay = self.random.between(self.latencies.fence);
                self.after(at, delay, WorldEvent::FenceArrives(member, start));
            }
            GatewayAction::Open(name, term) => {
                let delay = self.random.between(self.latencies.open);
                self.after(at, delay, WorldEvent::OpenDone(name, term));
            }
            GatewayAction::Prepare(name, term) => {
                let delay = self.random.between(self.latencies.prepare);
                self.after(at, delay, WorldEvent::Prepared(name, term));
            }
            GatewayAction::Unprepare(_) => {}
            GatewayAction::Close(name, term, _) => {
                let delay = self.random.between(self.latencies.close);
                self.after(at, delay, WorldEvent::CloseDone(name, term));
            }
            GatewayAction::AdmitHosts(admitted) => self.daemons[at].hosts = admitted,
            GatewayAction::End(reason) => {
                let start = self.daemons[at].start;
                if reason == EndReason::Stopped {
                    let open: Vec<_> = self.open.iter().filter(|(_, open)| open.contains_key(&start)).collect();
                    assert!(open.is_empty(), "a member has stopped with {} volumes open", open.len());
                }
                let stops = self.daemons[at].stops;
                self.kill(at);
                if reason == EndReason::Fenced && !stops {
                    self.after(at, Duration::from_millis(100), WorldEvent::Rejoin);
                }
            }
        }
    }

    fn is_served(&self, name: &VolumeName) -> bool {
        self.open.get(name).is_some_and(|open| {
            open.keys().any(|start| {
                !self.fenced.contains(start)
                    && self.daemons.iter().any(|daemon| daemon.start == *start && daemon.machine.is_some())
            })
        })
    }

    fn count_unserved_of(&mut self, name: &VolumeName) {
        if self.record.volume(name).is_none() {
            self.unserved.remove(name);
        } else if !self.is_served(name) {
            self.unserved.entry(name.clone()).or_insert(self.now);
        } else if let Some(since) = self.unserved.remove(name) {
            self.unserved_max = self.unserved_max.max(self.now - since);
        }
    }

    fn count_unserved(&mut self) {
        let names: Vec<VolumeName> = self.record.volumes().keys().cloned().collect();
        let living: BTreeSet<StartId> =
            self.daemons.iter().filter(|daemon| daemon.machine.is_some()).map(|daemon| daemon.start).collect();
        for name in names {
            let served = self
                .open
                .get(&name)
                .is_some_and(|open| open.keys().any(|start| living.contains(start) && !self.fenced.contains(start)));
            if !served {
                self.unserved.entry(name).or_insert(self.now);
            }
        }
    }
}

fn entry_of(start: StartId) -> GatewayMember {
    GatewayMember {
        host: "gateway".into(),
        version: "0.1.0".into(),
        clients: vec![start.to_string()],
        ..GatewayMember::new(start)
    }
}
