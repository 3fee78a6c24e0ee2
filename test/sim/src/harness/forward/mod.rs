//! Forwarded volumes: hosts on several forwarders of one volume, whose owners move and fail.
//!
//! Two daemons take turns as the owner of a volume in memory, whose requests take time.  Others forward requests of hosts to
//! the owner.  Hosts coordinate as those of a cluster do: changes of one block are not in flight at the same time, whichever
//! forwarders they use.  Streams are cut and reset, connections replaced, owners move the volume, are fenced and start again,
//! forwarders start again.  Messages reach owners late, by more than the lease of a session, and forwarders give the volume
//! up.  What the oracle demands:
//!
//! - a read returns the content of the last change that was acknowledged, or of one that is in flight;
//! - a change that failed has been done or not, once it has failed, and is not done later;
//! - nor is one that has ended as its forwarder has given the volume up, and that the host has sent again over another one:
//!   what the host writes after that stays;
//! - a compare-and-write that succeeds has found what it compared;
//! - no write of a host lands after the preemption of its registration was acknowledged, through whichever forwarder, until
//!   it has registered again; and then none that it sent before;
//! - in the end all forwarders have the table that is stored;
//! - nothing is executed on a suspended volume, nor for a start that was declared dead;
//! - in the end all requests are answered.

mod cuts;
mod daemons;
mod device;
mod fencing;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockReply, BlockRequest, Error, ErrorKind, Extent, Result};
use forebay_reactor::{Buf, sleep, spawn, timeout};

use super::{Failure, guarded};
use crate::faults::{Faults, MICRO, MILLI, NetFaults};
use crate::oracle::{BLOCK, BlockOracle, Expected};
use crate::rng::{Rng, mix64};
use crate::stamp::stamp;
use crate::world::World;
use daemons::{ForwarderNode, Group};

/// Identity of the volume.
const VOLUME: &str = "rbd/shared";
/// Number of owners.
const OWNERS: usize = 2;

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ForwardTally {
    /// Number of runs.
    pub runs: u64,
    /// Requests of hosts.
    pub requests: u64,
    /// Requests that owners executed; more than those of hosts where some were sent again.
    pub executed: u64,
    /// Planned moves, ...
    pub moves: u64,
    /// ... and those that were cancelled.
    pub cancelled: u64,
    /// Owners that were fenced.
    pub fenced: u64,
    /// Connections to owners that were replaced.
    pub reconnects: u64,
    /// Forwarders that started again.
    pub restarts: u64,
    /// Owners that started again.
    pub owner_restarts: u64,
    /// Requests that no owner executed in time.
    pub timed_out: u64,
    /// Compare-and-writes whose outcome is unknown.
    pub unknown: u64,
    /// Preemptions that were acknowledged.
    pub preempted: u64,
    /// Writes of hosts that fence each other, ...
    pub fenced_writes: u64,
    /// ... and those that a table had admitted which was superseded.
    pub outdated: u64,
    /// Reservation actions that failed with an error.
    pub actions_failed: u64,
    /// Times that owners handled messages late, ...
    pub delayed: u64,
    /// ... and that a forwarder gave the volume up.
    pub given_up: u64,
    /// Requests that hosts sent again after that.
    pub repeated: u64,
}

impl ForwardTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        let Self { runs, requests, executed, moves, cancelled, fenced, reconnects, restarts, .. } = other;
        self.runs += runs;
        self.requests += requests;
        self.executed += executed;
        self.moves += moves;
        self.cancelled += cancelled;
        self.fenced += fenced;
        self.reconnects += reconnects;
        self.restarts += restarts;
        self.owner_restarts += other.owner_restarts;
        self.timed_out += other.timed_out;
        self.unknown += other.unknown;
        self.preempted += other.preempted;
        self.fenced_writes += other.fenced_writes;
        self.outdated += other.outdated;
        self.actions_failed += other.actions_failed;
        self.delayed += other.delayed;
        self.given_up += other.given_up;
        self.repeated += other.repeated;
    }
}

#[derive(Debug, Clone)]
struct ForwardScenario {
    seed: u64,
    forwarders: usize,
    /// The first forwarders run in the daemons of the owners.
    local: bool,
    blocks: u64,
    tasks: usize,
    requests: usize,
    /// Longest time that a request takes at the owner, before and after it takes effect.
    delay: Duration,
    /// Longest time between two events of the group.
    pause: Duration,
    events: u64,
    patience: Duration,
    lease: Duration,
    /// Forwarders give the volume up.
    gives_up: bool,
    /// Hosts that fence each other.
    fencing: u64,
    net: NetFaults,
}

impl ForwardScenario {
    fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xf0_4a4d);
        let severity = *rng.pick(&[0, 500, 3_000]);
        let net = NetFaults {
            latency: 10 * MICRO..*rng.pick(&[50 * MICRO, MILLI, 10 * MILLI]),
            segment_max: *rng.pick(&[1500, 64 * 1024]),
            window: *rng.pick(&[64 * 1024, 256 * 1024]),
            partial_recv: true,
            refuse_ppm: *rng.pick(&[0, 50_000]),
            reset_ppm: if rng.coin() { severity } else { 0 },
            cut_ppm: if rng.coin() { severity / 4 } else { 0 },
            stall_ppm: *rng.pick(&[0, 5_000]),
            stall: MILLI..200 * MILLI,
        };
        Self {
            seed,
            forwarders: 1 + rng.below(3) as usize,
            local: rng.coin(),
            blocks: 1 << rng.below(5),
            tasks: *rng.pick(&[1, 2, 4, 8]),
            requests: rng.range(40..250) as usize,
            delay: Duration::from_micros(*rng.pick(&[100, 2_000, 30_000, 200_000, 200_000])),
            pause: Duration::from_millis(*rng.pick(&[5, 50, 300])),
            events: rng.below(20),
            patience: Duration::from_millis(*rng.pick(&[20, 20, 500, 3_600_000])),
            lease: Duration::from_millis(*rng.pick(&[100, 200, 2_000])),
            gives_up: rng.coin(),
            fencing: rng.below(5),
            net,
        }
    }
}

/// Parts of a run that all tasks share.
struct Scene {
    scenario: ForwardScenario,
    group: Group,
    oracle: RefCell<BlockOracle>,
    /// Blocks with a change in flight.
    locked: RefCell<Vec<Extent>>,
    version: Cell<u64>,
    left: Cell<usize>,
    tally: RefCell<ForwardTally>,
}

impl Scene {
    fn count(&self, change: impl FnOnce(&mut ForwardTally)) {
        change(&mut self.tally.borrow_mut());
    }

    /// Sends a request by a forwarder, and by others as long as they tell that they are no path.
    async fn send(&self, node: &ForwarderNode, request: BlockRequest, rng: &mut Rng) -> Result<BlockReply> {
        let mut result = node.submit(request.clone()).await;
        while result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Fenced) && !self.is_wrong() {
            self.count(|tally| tally.repeated += 1);
            if rng.coin() {
                sleep(Duration::from_micros(rng.below(5_000))).await;
            }
            let other = rng.pick(self.group.forwarders()).clone();
            result = other.submit(request.clone()).await;
        }
        result
    }

    /// Sends a request by a forwarder, and tells the oracle of its end.
    async fn issue(&self, node: &ForwarderNode, request: BlockRequest, rng: &mut Rng) -> Result<BlockReply> {
        let token = self.oracle.borrow_mut().submit(&request);
        self.count(|tally| tally.requests += 1);
        let compares = matches!(request, BlockRequest::CompareAndWrite { .. });
        let result = self.send(node, request, rng).await.map_err(|error| {
            match error.kind() {
                ErrorKind::TimedOut => self.count(|tally| tally.timed_out += 1),
                ErrorKind::Io if compares => self.count(|tally| tally.unknown += 1),
                _ => {}
            }
            // All of these are over, done or not.
            let unknown = matches!(
                error.kind(),
                ErrorKind::TimedOut | ErrorKind::Fenced | ErrorKind::ShuttingDown | ErrorKind::Busy
            );
            if unknown { Error::new(ErrorKind::Io, error.to_string()) } else { error }
        });
        self.oracle.borrow_mut().complete(token, &result);
        result
    }

    fn is_wrong(&self) -> bool {
        self.oracle.borrow().violation().is_some() || self.group.wrong().is_some()
    }

    /// Draws a change of blocks that have none in flight, which are locked from then on.
    fn draw_change(&self, rng: &mut Rng) -> Option<(BlockRequest, Extent)> {
        let first = rng.below(self.scenario.blocks);
        let count = 1 + rng.below((self.scenario.blocks - first).min(4));
        let lock = Extent::new(first * BLOCK, count * BLOCK);
        if self.locked.borrow().iter().any(|other| other.overlaps(lock)) {
            return None;
        }
        self.version.set(self.version.get() + 1);
        let version = self.version.get();
        let fua = rng.one_in(5);
        let crowded = self.oracle.borrow().is_crowded();
        let part = if crowded || rng.coin() {
            lock
        } else {
            let offset = lock.offset + rng.below(lock.len);
            Extent::new(offset, 1 + rng.below(lock.end() - offset))
        };
        let data = |extent: Extent| stamp(extent.offset, extent.len as usize, version).into();
        let request = match rng.below(10) {
            0 => BlockRequest::Discard(lock),
            1 => BlockRequest::WriteZeroes { extent: lock, no_unmap: rng.coin(), fua },
            2 | 3 => {
                let extent = Extent::new(lock.offset, BLOCK);
                let expect = self.oracle.borrow().guess(first).unwrap_or_else(|| vec![0; BLOCK as usize]);
                let expect = Buf::copy_of(&expect).into();
                BlockRequest::CompareAndWrite { offset: extent.offset, expect, data: data(extent), fua }
            }
            _ => BlockRequest::Write { offset: part.offset, data: data(part), fua },
        };
        self.locked.borrow_mut().push(lock);
        Some((request, lock))
    }

    /// Sends a request of a host, which waits a little after an error.
    async fn submit(&self, node: &ForwarderNode, request: BlockRequest, rng: &mut Rng) {
        if self.issue(node, request, rng).await.is_err_and(|error| !matches!(error.kind(), ErrorKind::Mismatch(_))) {
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Requests of one host, one after the other, over any forwarder.
    async fn host(self: Rc<Self>, mut rng: Rng) {
        while self.left.get() > 0 && !self.is_wrong() {
            self.left.set(self.left.get() - 1);
            let node = rng.pick(self.group.forwarders()).clone();
            if self.oracle.borrow().is_crowded() || rng.one_in(12) {
                self.submit(&node, BlockRequest::Flush, &mut rng).await;
            } else if let Some((request, lock)) = (!rng.one_in(3)).then(|| self.draw_change(&mut rng)).flatten() {
                self.submit(&node, request, &mut rng).await;
                self.locked.borrow_mut().retain(|other| *other != lock);
            } else {
                let read = self.draw_read(&mut rng);
                self.submit(&node, read, &mut rng).await;
            }
            if rng.one_in(8) {
                sleep(Duration::from_micros(rng.below(10_000))).await;
            }
        }
    }

    fn draw_read(&self, rng: &mut Rng) -> BlockRequest {
        let first = rng.below(self.scenario.blocks);
        let count = 1 + rng.below((self.scenario.blocks - first).min(4));
        BlockRequest::Read(Extent::new(first * BLOCK, count * BLOCK))
    }

    /// Things that happen to the group.
    async fn storm(&self, world: &World, rng: &mut Rng) -> std::result::Result<(), String> {
        let group = &self.group;
        for _ in 0..self.scenario.events {
            sleep(Duration::from_micros(rng.below(self.scenario.pause.as_micros() as u64))).await;
            if self.is_wrong() {
                return Ok(());
            }
            if self.scenario.gives_up && rng.coin() {
                let lease = self.scenario.lease;
                if rng.one_in(4) {
                    group.delay_messages(None, Duration::from_micros(rng.below(3 * lease.as_micros() as u64)));
                    self.count(|tally| tally.delayed += 1);
                }
                let are_late = group.give_up(lease, rng);
                self.count(|tally| {
                    tally.given_up += 1;
                    tally.delayed += u64::from(are_late);
                });
                continue;
            }
            match rng.below(14) {
                0..=2 => {
                    let cancels = rng.one_in(4);
                    group.move_volume(cancels, rng).await?;
                    self.count(|tally| if cancels { tally.cancelled += 1 } else { tally.moves += 1 });
                }
                3 | 4 => {
                    group.fence_owner(rng).await?;
                    self.count(|tally| tally.fenced += 1);
                }
                5..=7 => {
                    group.reconnect(rng);
                    self.count(|tally| tally.reconnects += 1);
                }
                8 | 9 => {
                    group.restart_forwarder(rng).await?;
                    self.count(|tally| tally.restarts += 1);
                }
                10 | 11 => group.keep_events(rng),
                12 => {
                    group.restart_owner(rng).await?;
                    self.count(|tally| tally.owner_restarts += 1);
                }
                _ if rng.coin() => drop(world.reset_connections(None, 500_000)),
                _ => drop(world.cut_connections(None, 300_000)),
            }
        }
        Ok(())
    }
}

async fn play(world: &World, scenario: &ForwardScenario) -> std::result::Result<ForwardTally, String> {
    let mut rng = Rng::new(mix64(scenario.seed ^ 0x666f_7277));
    let expected = Expected { io: true, ..Expected::nothing() };
    let group = Group::start(scenario, &mut rng).await?;
    let scene = Rc::new(Scene {
        scenario: scenario.clone(),
        group,
        oracle: RefCell::new(BlockOracle::new(expected)),
        locked: RefCell::default(),
        version: Cell::new(0),
        left: Cell::new(scenario.requests),
        tally: RefCell::default(),
    });
    let mut hosts: Vec<_> = (0..scenario.tasks).map(|_| spawn(scene.clone().host(rng.fork()))).collect();
    if scenario.fencing > 0 {
        hosts.push(spawn(scene.clone().fence_each_other(rng.fork())));
    }
    scene.storm(world, &mut rng).await?;
    // What the storm has broken must heal.
    world.set_faults(Faults::none());
    for host in hosts {
        timeout(Duration::from_secs(600), host).await.map_err(|_| "a request does not come to its end".to_owned())?;
    }
    for node in scene.group.forwarders() {
        for block in 0..scenario.blocks {
            // With little patience it fails until all has healed.
            let read = async {
                while scene.issue(node, BlockRequest::Read(Extent::new(block * BLOCK, BLOCK)), &mut rng).await.is_err()
                {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            let read = timeout(Duration::from_secs(600), read).await;
            read.map_err(|_| "a last read does not come to its end".to_owned())?;
        }
    }
    scene.compare_tables().await?;
    let violation = scene.oracle.borrow().violation().map(str::to_owned);
    if let Some(wrong) = violation.or_else(|| scene.group.wrong()) {
        return Err(wrong);
    }
    scene.group.close().await?;
    let mut tally = *scene.tally.borrow();
    (tally.runs, tally.executed) = (1, scene.group.executed());
    Ok(tally)
}

/// Runs the scenario of a seed.
///
/// # Errors
/// The violation that was found.
pub fn run_forward(seed: u64) -> std::result::Result<ForwardTally, Failure> {
    let scenario = ForwardScenario::draw(seed);
    let faults = Faults { net: scenario.net.clone(), events_max: 3_000_000, ..Faults::none() };
    let world = World::new(seed, faults);
    let reactor = world.reactor();
    let about = format!("{scenario:?}");
    guarded(&world, &about, || {
        world.run(&reactor, play(&world, &scenario)).map_err(|stop| format!("the world stopped: {stop:?}"))?
    })
}
