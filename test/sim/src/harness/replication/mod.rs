//! Replicated write logs: gateways with disks of their own, one volume at a shared backend, and hosts that check every
//! block, while gateways and disks fail, and connections are cut.
//!
//! A gateway that dies loses its disk's handles and its connections; its tasks go on without either.  What it has sent to
//! the backend may still arrive there until it is fenced.

mod encryption;
mod gateway;
mod image;
mod memory;
mod tally;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, DataKey, Error, ErrorKind, Extent};
use forebay_messenger::{MessengerCore, WindowDescriptor};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, sleep, spawn, timeout};
use forebay_writelog::replication::{LeaseClock, MemberKeeper, MemberRecord, ReplicaPolicy, open_members};
use forebay_writelog::{LogId, MediumKind, tweaks};

use self::gateway::{Front, Gateway, Serving, path, peer};
use self::image::SharedImage;
pub use self::tally::ReplicationTally;
use super::writelog::{BACKEND, Oracles, key_of, open_backend};
use super::{Failure, guarded};
use crate::faults::{DiskFaults, Faults, MILLI, NetFaults};
use crate::oracle::Expected;
use crate::pmem::SimPmem;
use crate::rng::Rng;
use crate::workload::BlockLoad;
use crate::world::{CrashKind, World};

const VOLUME: &str = "volume-1";
const NAME: &str = "rbd/volume";
/// Bytes of each gateway's medium.
const MEDIUM_SIZE: u64 = 32 << 20;
/// Longer than anything takes that ends at all.
const LONG: Duration = Duration::from_secs(200);
/// Time in which tasks notice that their connection has ended.
const SOON: Duration = Duration::from_millis(1);

/// Runs the gateways that follow from a seed.
///
/// # Errors
/// When an oracle objects, nobody can serve the volume, or anything panics.
pub fn run_replication(seed: u64) -> std::result::Result<ReplicationTally, Failure> {
    let go = |verbose| {
        let scenario = ReplicationScenario::draw(seed);
        let world = World::new(seed, Faults { events_max: 5_000_000, net: scenario.net.clone(), ..Faults::none() });
        if verbose {
            world.set_verbose();
        }
        let about = format!("{scenario:#?}");
        tweaks::start();
        guarded(&world, &about, || run_one(&world, &scenario))
    };
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Run that follows from a seed.
#[derive(Debug, Clone)]
struct ReplicationScenario {
    seed: u64,
    gateways: u8,
    /// Medium of each gateway's log device. The log is created at the first one.
    media: Vec<MediumKind>,
    sector: u32,
    log_size: u64,
    age_max: Duration,
    patience: Duration,
    policy: ReplicaPolicy,
    rounds: u32,
    /// Set if one gateway dies at a time.
    one_dies: bool,
    /// Set if primaries write into copies in persistent memory through memory windows.
    windows: bool,
    /// Set if the volume is encrypted, and with it its log.
    encrypted: bool,
    net: NetFaults,
    /// Speed of each gateway's clock against the simulator's, in parts in a million more or less.
    clocks: Vec<i32>,
}

impl ReplicationScenario {
    fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x2e91_1ca7);
        let net = match rng.below(3) {
            0 => NetFaults { reset_ppm: 2000, ..NetFaults::none() },
            1 => NetFaults { stall_ppm: 5000, stall: MILLI..50 * MILLI, ..NetFaults::none() },
            _ => NetFaults::none(),
        };
        let gateways = rng.range(2..5) as u8;
        Self {
            seed,
            gateways,
            media: Self::draw_media(seed, gateways),
            sector: *rng.pick(&[512, 4096]),
            log_size: *rng.pick(&[256 << 10, 512 << 10, 2 << 20]),
            age_max: Duration::from_millis(*rng.pick(&[1, 20, 1000])),
            patience: Duration::from_millis(*rng.pick(&[20, 100, 400])),
            policy: ReplicaPolicy {
                lease: Duration::from_millis(*rng.pick(&[16, 100, 500])),
                automatic: rng.coin(),
                ..ReplicaPolicy::default()
            },
            rounds: rng.range(2..7) as u32,
            one_dies: Rng::new(seed ^ 0x6f6e_652e).one_in(2),
            windows: Rng::new(seed ^ 0x77_696e_646f).coin(),
            encrypted: Rng::new(seed ^ 0x656e_6372_7970).coin(),
            net,
            clocks: Self::draw_clocks(seed, gateways),
        }
    }

    /// Draws the media: all alike, or persistent memory with copies of a log on a disk or in memory.
    fn draw_media(seed: u64, gateways: u8) -> Vec<MediumKind> {
        let mut rng = Rng::new(seed ^ 0x64_7261_6d2e);
        if rng.one_in(4) {
            let mut media = vec![MediumKind::Dram; usize::from(gateways)];
            let others = media.iter_mut().skip(1).filter(|_| rng.one_in(8));
            others.for_each(|medium| *medium = MediumKind::Pmem);
            return media;
        }
        let mut rng = Rng::new(seed ^ 0x70_6d65_6d2e);
        let mut media = match rng.below(3) {
            0 => vec![MediumKind::Ssd; usize::from(gateways)],
            1 => vec![MediumKind::Pmem; usize::from(gateways)],
            _ => (0..gateways).map(|_| *rng.pick(&[MediumKind::Ssd, MediumKind::Pmem])).collect(),
        };
        // No disk has sectors of 64 bytes.
        if media.contains(&MediumKind::Ssd) {
            media[0] = MediumKind::Ssd;
        }
        media
    }

    /// Draws the speeds of clocks: alike, or apart by as much as leases permit, which is one part in 16.
    fn draw_clocks(seed: u64, gateways: u8) -> Vec<i32> {
        let mut rng = Rng::new(seed ^ 0x63_6c_6f_63_6b);
        let apart = rng.coin();
        (0..gateways).map(|_| if apart { *rng.pick(&[-30_000, 0, 30_000]) } else { 0 }).collect()
    }

    fn clock(&self, number: u8) -> LeaseClock {
        LeaseClock { ahead_ppm: self.clocks[usize::from(number) - 1] }
    }

    fn key(&self) -> Option<DataKey> {
        self.encrypted.then(|| key_of(self.seed))
    }

    fn medium(&self, number: u8) -> MediumKind {
        self.media[usize::from(number) - 1]
    }
}

/// Cluster of gateways under load.
struct Cluster {
    scenario: ReplicationScenario,
    image: Rc<SharedImage>,
    core: MessengerCore,
    gateways: Vec<Option<Rc<Gateway>>>,
    /// Persistent memory of the machines that have some.
    memories: Vec<Option<SimPmem>>,
    id: LogId,
    /// Gateway that dies until the volume is served again, where one does at a time.
    victim: Option<u8>,
    oracles: Oracles,
    load: BlockLoad,
    version: Rc<Cell<u64>>,
    rng: Rng,
    /// Gateway whose disk fails.
    failing: Option<u8>,
}

fn run_one(world: &World, scenario: &ReplicationScenario) -> std::result::Result<ReplicationTally, String> {
    let mut rng = Rng::new(scenario.seed);
    let size = rng.range(16..128) * 4096;
    world.add_disk(BACKEND, size, 512);
    let mut memories = Vec::new();
    for number in 1..=scenario.gateways {
        let in_memory = scenario.medium(number) != MediumKind::Ssd;
        if !in_memory {
            world.add_disk(path(number), MEDIUM_SIZE, scenario.sector);
        }
        memories.push(in_memory.then(|| SimPmem::new(world, MEDIUM_SIZE)));
    }
    let load = BlockLoad::draw(&mut rng, size);
    let oracles = Oracles::new(world, size, Expected { shut_down: true, ..Expected::nothing() });
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let backend = open_backend(size).map_err(|error| error.to_string())?;
        let image = Rc::new(SharedImage {
            world: world.clone(),
            log: Cell::default(),
            last_epoch: Cell::new(0),
            record: RefCell::default(),
            starts: RefCell::default(),
            copies: RefCell::default(),
            rng: RefCell::new(rng.fork()),
            fenced: RefCell::default(),
            under_way: RefCell::default(),
            in_flight: RefCell::default(),
            requests: Cell::new(0),
            ended: Notify::new(),
            clients: Cell::new(0),
            tally: RefCell::default(),
            violation: RefCell::default(),
            backend,
        });
        let mut cluster = Cluster {
            scenario: scenario.clone(),
            image,
            core: MessengerCore::default(),
            gateways: vec![None; usize::from(scenario.gateways)],
            memories,
            id: LogId::default(),
            victim: None,
            oracles,
            load,
            version: Rc::new(Cell::new(0)),
            rng,
            failing: None,
        };
        let lived = cluster.live().await;
        cluster.gateways.iter().flatten().for_each(|gateway| gateway.disconnect());
        sleep(SOON).await;
        lived?;
        cluster.check_encryption()?;
        let requests = cluster.load.seen.answered.get();
        let pmem = scenario.media.iter().filter(|medium| **medium == MediumKind::Pmem).count();
        cluster.image.count(|tally| {
            (tally.runs, tally.requests) = (1, requests);
            let dram = scenario.media.contains(&MediumKind::Dram);
            tally.pmem = u64::from(pmem == scenario.media.len());
            tally.mixed = u64::from((1..scenario.media.len()).contains(&pmem) && !dram);
            tally.dram = u64::from(dram);
        });
        Ok(*cluster.image.tally.borrow())
    });
    ran.map_err(|stop| format!("the run does not end: {stop:?}"))?
}

impl Cluster {
    async fn live(&mut self) -> std::result::Result<(), String> {
        for number in 1..=self.scenario.gateways {
            self.start(number).await?;
        }
        let mut serving = self.create().await?;
        for _ in 0..self.scenario.rounds {
            self.victim = None;
            self.load_and_disturb(&serving).await?;
            self.image.count(|tally| tally.mirrors_lost += u64::from(serving.set.has_lost_mirror()));
            let Some(settled) = self.settle(serving).await? else {
                self.image.count(|tally| tally.all_lost += 1);
                self.oracles.violation()?;
                return self.oracles.check_backend();
            };
            serving = settled;
            self.check(&serving).await?;
        }
        match timeout(LONG, serving.log.close(true)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(format!("the log cannot be flushed: {error}")),
            Err(_) => return Err("the log does not close".into()),
        }
        let span = self.load.span;
        let verified = self.oracles.verify_backend(&*self.image.backend, span).await;
        verified.map_err(|error| error.to_string())?;
        self.oracles.violation()?;
        self.oracles.check_backend()
    }

    async fn start(&mut self, number: u8) -> std::result::Result<(), String> {
        *self.image.starts.borrow_mut().entry(number).or_default() += 1;
        if self.scenario.medium(number) == MediumKind::Dram {
            // What the former process had has ended with it.
            self.memories[usize::from(number) - 1] = Some(SimPmem::new(&self.image.world, MEDIUM_SIZE));
        }
        let memory = self.memories[usize::from(number) - 1].clone();
        let started = Gateway::start(number, memory, &self.image, &self.core, &self.scenario).await;
        let gateway = started.map_err(|error| format!("gateway {number} does not start: {error}"))?;
        self.gateways[usize::from(number) - 1] = Some(gateway);
        Ok(())
    }

    /// Creates a log at a gateway that lives.
    async fn create(&mut self) -> std::result::Result<Serving, String> {
        let failed = |error: Error| format!("the log cannot be created: {error}");
        let gateway = self.gateways.iter().flatten().next().cloned().expect("one lives");
        let epoch = self.image.last_epoch.get() + 1;
        gateway.shelf.discard_older(VOLUME, epoch).await.map_err(failed)?;
        let keeper = gateway.keeper();
        let (mut copy, own, client) = ([1; 16], peer(gateway.number), keeper.client.clone());
        copy[..8].copy_from_slice(&epoch.to_le_bytes());
        let (names, size) = ((VOLUME, NAME), self.scenario.log_size);
        let created = match self.scenario.medium(gateway.number) {
            // Gets members when it is opened.
            MediumKind::Ssd => gateway.shelf.create_with_key(names, size, epoch, gateway.key.as_ref()).await,
            MediumKind::Pmem | MediumKind::Dram => {
                let key = gateway.key.as_ref();
                gateway.shelf.create_with_members_and_key(names, size, epoch, copy, key).await
            }
        };
        self.id = created.map_err(failed)?;
        self.image.log.set(self.id);
        let record = MemberRecord::created_in(epoch, own, copy, "nobody".to_owned());
        let record = record.opened(own, copy, client.clone()).expect("its own log");
        self.image.note_copies(&record);
        self.image.record.replace(Some(record.clone()));
        let opened = open_members(
            &gateway.shelf,
            &self.id,
            (VOLUME, NAME),
            record,
            keeper,
            (gateway.key.as_ref(), gateway.options()),
        )
        .await;
        let opened = opened.map_err(failed)?;
        opened.set.start();
        gateway.open(opened, client).await.map_err(failed)
    }

    fn front(&self, serving: &Serving) -> Rc<dyn BlockDevice> {
        let Gateway { alive, died, .. } = &*serving.gateway;
        let front = Front { log: serving.log.clone(), alive: alive.clone(), died: died.clone() };
        self.oracles.watch(Rc::new(front), true)
    }

    /// Runs the load, and does something to the gateways meanwhile.
    async fn load_and_disturb(&mut self, serving: &Serving) -> std::result::Result<(), String> {
        let (device, load, oracle) = (self.front(serving), self.load.clone(), self.oracles.blocks.clone());
        let (version, mut rng) = (self.version.clone(), self.rng.fork());
        let loading = spawn(async move { load.run_on(device, oracle, version, &mut rng).await });
        let events = self.rng.range(1..4);
        for _ in 0..events {
            sleep(Duration::from_nanos(self.rng.range(MILLI..200 * MILLI))).await;
            self.disturb(serving);
        }
        match timeout(LONG, loading).await {
            Ok(()) => self.oracles.violation(),
            Err(_) => Err("the load does not end".into()),
        }
    }

    fn disturb(&mut self, serving: &Serving) {
        let world = self.image.world.clone();
        let kind = if self.rng.coin() { CrashKind::Power } else { CrashKind::Kill };
        let primary = serving.gateway.number;
        let other = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
        let dies_soon = self.rng.range(0..300) as u32;
        let event = self.rng.below(8);
        match event {
            6 => self.fail_disk(primary, other),
            0 | 1 if !self.may_die(primary) => {}
            // Writes would wait for the last copy, if the primary has lost its own.
            2 if other != primary && self.failing == Some(primary) => {}
            2 if !self.may_die(other) => {}
            0 | 1 if self.rng.coin() && self.set_fuse(primary, Some((dies_soon, kind))) => {}
            2 if self.rng.coin() && self.set_fuse(other, Some((dies_soon, kind))) => {}
            0 | 1 if serving.gateway.alive.get() => self.kill(primary, kind),
            2 if other != primary => self.kill(other, kind),
            3 => {
                let cut = world.cut_connections(None, 300_000);
                self.image.count(|tally| tally.cuts += cut as u64);
            }
            4 => {
                let reset = world.reset_connections(None, 500_000);
                self.image.count(|tally| tally.cuts += reset as u64);
            }
            _ => {}
        }
    }

    /// Returns whether a gateway may die now: where one dies at a time, it is the one.
    fn may_die(&mut self, number: u8) -> bool {
        let is_dram = self.scenario.media.contains(&MediumKind::Dram);
        !is_dram || !self.scenario.one_dies || *self.victim.get_or_insert(number) == number
    }

    /// Returns whether every process has died that had all acknowledged writes.
    fn is_all_lost(&self) -> bool {
        let (record, copies, starts) =
            (self.image.record.borrow(), self.image.copies.borrow(), self.image.starts.borrow());
        let Some(record) = &*record else { return false };
        record.complete().all(|peer| {
            let number = peer.0[0];
            let copy = record.copy(peer).and_then(|copy| copies.get(&copy)).copied();
            let runs = self.gateways[usize::from(number) - 1].as_ref().is_some_and(|gateway| gateway.alive.get());
            let same = copy == Some((number, starts.get(&number).copied().unwrap_or_default()));
            self.scenario.medium(number) == MediumKind::Dram && !(runs && same)
        })
    }

    fn kill(&mut self, number: u8, kind: CrashKind) {
        if let Some(gateway) = self.gateways[usize::from(number) - 1].take() {
            gateway.kill(kind);
        }
    }

    /// Lets a gateway die between two stores; returns false unless it is alive, and its log device in memory.
    fn set_fuse(&self, number: u8, fuse: Option<(u32, CrashKind)>) -> bool {
        let gateway = self.gateways[usize::from(number) - 1].as_ref().filter(|gateway| gateway.alive.get());
        let Some((_, mapped)) = gateway.and_then(|gateway| gateway.memory.as_ref()) else { return false };
        mapped.set_fuse(fuse);
        true
    }

    /// Forgets gateways that have died by themselves.
    async fn bury(&mut self) {
        // A gateway that died in the middle of a store is dead a moment later.
        sleep(SOON).await;
        for gateway in &mut self.gateways {
            gateway.take_if(|gateway| !gateway.alive.get());
        }
    }

    /// Returns the gateway that serves the volume next: the one that does, if it lives, or another one, which takes over;
    /// `None` if all copies of a log in memory are lost.
    async fn settle(&mut self, serving: Serving) -> std::result::Result<Option<Serving>, String> {
        self.mend_disks();
        for number in 1..=self.scenario.gateways {
            self.set_fuse(number, None);
        }
        self.bury().await;
        let alive = serving.gateway.alive.get();
        let healthy = alive && serving.log.mode().is_on();
        if healthy && !self.rng.one_in(3) {
            self.restart_some(1).await?;
            return Ok(Some(serving));
        }
        let last = serving.client.clone();
        // The former primary may live on, and suspect nothing.
        let mut former = Some(serving);
        let reads = Rc::new(Cell::new(true));
        if !alive || self.rng.coin() {
            former = None;
        } else if let Some(former) = &former {
            let read = read_on(self.front(former), former.gateway.clone(), reads.clone(), self.rng.fork());
            drop(spawn(read));
            for (peer, window) in former.set.windows() {
                let Some(other) = self.gateways[usize::from(peer.0[0]) - 1].clone() else { continue };
                let late = LateWriter {
                    former: former.gateway.clone(),
                    term: former.set.record().term(),
                    window,
                    other,
                    log: self.id,
                };
                drop(spawn(late.run(self.image.clone(), self.rng.fork())));
            }
        }
        for attempt in 0..100_u64 {
            self.restart_some(attempt).await?;
            if self.image.record.borrow().is_none() {
                // It was written back, and given up: nothing of the last one that wrote may come late.
                reads.set(false);
                drop(former.take());
                self.image.fence(&last).await;
                self.restart_some(100).await?;
                return self.create().await.map(Some);
            }
            if self.is_all_lost() {
                reads.set(false);
                self.image.fence(&last).await;
                return Ok(None);
            }
            let number = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
            let other = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
            let Some(gateway) = self.gateways[usize::from(number) - 1].clone() else { continue };
            let rival = self.gateways[usize::from(other) - 1].clone().filter(|_| other != number && self.rng.one_in(3));
            let takes_part = |former: &Serving| [number, other].contains(&former.gateway.number);
            if former.as_ref().is_some_and(takes_part) {
                // It has to close the log before it opens it again.
                former = None;
                reads.set(false);
            }
            // Another one may die as it adopts the term.
            let third = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
            let kind = if self.rng.coin() { CrashKind::Power } else { CrashKind::Kill };
            let dies_soon = self.rng.below(20) as u32;
            if ![number, other].contains(&third) && self.rng.one_in(4) && self.may_die(third) {
                self.set_fuse(third, Some((dies_soon, kind)));
            }
            self.set_fuse(number, None);
            self.set_fuse(other, None);
            let rival = rival.map(|rival| {
                self.image.count(|tally| tally.contended += 1);
                let id = self.id;
                spawn(async move { timeout(LONG, rival.serve(&id)).await })
            });
            let served = timeout(LONG, gateway.serve(&self.id)).await;
            let mut outcomes = vec![(number, served)];
            if let Some(rival) = rival {
                outcomes.push((other, rival.await));
            }
            let mut serves = None;
            for (number, outcome) in outcomes {
                match outcome {
                    // Of two that took over one after the other, the later one serves.
                    Ok(Ok(serving)) if serving.is_current() => serves = Some(serving),
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => {
                        self.image.world.note(|| format!("gateway {number} cannot serve: {error}"));
                        self.image.count(|tally| tally.refused += 1);
                        if error.kind() == ErrorKind::Corrupt {
                            return Err(format!("gateway {number}: {error}"));
                        }
                    }
                    Err(_) => return Err(format!("gateway {number} neither serves nor fails")),
                }
            }
            if let Some(serves) = serves {
                return Ok(Some(serves));
            }
        }
        Err(format!("nobody can serve the volume: {:?}", self.image.record.borrow()))
    }

    /// Ends the faults of all disks.
    fn mend_disks(&mut self) {
        self.failing = None;
        for number in 1..=self.scenario.gateways {
            self.image.world.set_disk_faults(path(number), None);
        }
    }

    /// Lets the disk of a gateway fail, the primary's as a rule.
    fn fail_disk(&mut self, primary: u8, other: u8) {
        let number = if self.rng.one_in(3) { other } else { primary };
        // If the last copy is lost while the primary's own is, writes wait for either.
        if self.failing.replace(number).is_some_and(|failing| failing != number) {
            return;
        }
        // What the only complete copy cannot read, nobody can.
        let is_alone = self.image.record.borrow().as_ref().is_none_or(|record| record.complete().count() < 2);
        let faults = match self.rng.below(3) {
            0 => DiskFaults { write_error_ppm: 1_000_000, sync_error_ppm: 1_000_000, ..DiskFaults::none() },
            kind if kind == 1 || is_alone => DiskFaults { write_error_ppm: 100_000, ..DiskFaults::none() },
            _ => DiskFaults { read_error_ppm: 500_000, ..DiskFaults::none() },
        };
        self.image.world.note(|| format!("the disk of gateway {number} fails: {faults:?}"));
        self.image.count(|tally| tally.failed_disks += 1);
        self.image.world.set_disk_faults(path(number), Some(faults));
    }

    /// Starts gateways that are down: each with a chance that grows with the attempts.
    async fn restart_some(&mut self, attempt: u64) -> std::result::Result<(), String> {
        self.bury().await;
        for number in 1..=self.scenario.gateways {
            let down = self.gateways[usize::from(number) - 1].is_none();
            if down && (attempt > 3 || self.rng.one_in(3)) {
                self.start(number).await?;
            }
        }
        Ok(())
    }

    /// Reads everything; every answer passes the oracle.
    async fn check(&mut self, serving: &Serving) -> std::result::Result<(), String> {
        let device = self.front(serving);
        let mut at = 0;
        while at < self.load.span {
            let len = (self.load.span - at).min(64 << 10);
            let read = timeout(LONG, device.submit(BlockRequest::Read(Extent::new(at, len)))).await;
            match read {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(format!("a read after all was settled: {error}")),
                Err(_) => return Err("a read after all was settled does not end".into()),
            }
            at += len;
        }
        let _ = serving.set.record();
        if let Some(violation) = self.image.violation.borrow().clone() {
            return Err(violation);
        }
        self.oracles.violation()?;
        self.oracles.check_backend()
    }
}

/// Device of a former primary, whose writes through a window onto another gateway's copy arrive when that follows its
/// successor.
struct LateWriter {
    former: Rc<Gateway>,
    term: u64,
    window: WindowDescriptor,
    other: Rc<Gateway>,
    log: LogId,
}

impl LateWriter {
    async fn run(self, image: Rc<SharedImage>, mut rng: Rng) {
        let Self { former, term, window, other, log } = self;
        let keeper = former.keeper();
        let mut refused = 0;
        while refused < 20 && former.alive.get() && other.alive.get() {
            sleep(Duration::from_nanos(rng.below(2 * MILLI))).await;
            match other.shelf.copy_of(&log).await {
                Ok((_, follows)) if u64::from(follows) > term => {}
                Ok(_) => continue,
                // It is not there any more.
                Err(_) => break,
            }
            let Some(connection) = keeper.connection(peer(other.number)) else { break };
            let at = rng.below(window.len() - 4096);
            match timeout(LONG, connection.write(window, at, Buf::copy_of(&[0xEE; 4096]))).await {
                Ok(Ok(())) => {
                    image.violation.borrow_mut().get_or_insert("a former primary has written into a copy".into());
                    break;
                }
                Ok(Err(_)) => refused += 1,
                Err(_) => break,
            }
        }
        image.count(|tally| tally.late_writes += refused);
    }
}

/// Reads from a former primary, while another one takes over and serves, until it fails.
async fn read_on(device: Rc<dyn BlockDevice>, former: Rc<Gateway>, reads: Rc<Cell<bool>>, mut rng: Rng) {
    let span = device.geometry().size;
    while former.alive.get() && reads.get() {
        let at = rng.below(span / 4096) * 4096;
        match timeout(LONG, device.submit(BlockRequest::Read(Extent::new(at, 4096)))).await {
            Ok(Ok(_)) => former.image.count(|tally| tally.late_reads += 1),
            Ok(Err(_)) | Err(_) => break,
        }
        sleep(Duration::from_nanos(rng.below(2 * MILLI))).await;
    }
}
