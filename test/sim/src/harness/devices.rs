//! Runs of a store on several devices: as many as parity allows die, stall, rot, come back with old content, lose,
//! misdirect or garble writes, are taken away or replaced; and after every crash all acknowledged data reads back.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{DataPolicy, Error, ErrorKind, ObjectBackend, ObjectName};
use forebay_reactor::{sleep, spawn, timeout};
use forebay_store::{CheckOptions, ColumnState, DeviceSetOptions, MasterKey, Store, StoreOptions};

use super::load::Load;
use super::scenario::{Damage, Scenario};
use super::{Failure, guarded};
use crate::faults::{DiskFaults, Faults};
use crate::oracle::Expected;
use crate::rng::Rng;
use crate::world::{CrashKind, Saved, Stop, World};

/// Bytes before the first segment: see `docs/formats/store.md`.
const SEGMENTS_START: u64 = 1 << 20;
/// Bytes of a column.
const COLUMN: u64 = 64 << 10;
/// Longest time that a load, a close, or repairs may take.
const PATIENCE: Duration = Duration::from_secs(200);

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DevicesTally {
    /// Number of runs.
    pub runs: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Power failures and kills.
    pub crashes: u64,
    /// Lives with devices that failed in some way.
    pub faulty: u64,
    /// Devices that were dropped under load.
    pub dropped: u64,
    /// Openings with missing devices.
    pub missing: u64,
    /// Openings that were refused because too many devices were missing.
    pub refused: u64,
    /// Devices that had old content.
    pub old: u64,
    /// Devices that were replaced.
    pub replaced: u64,
    /// Times that the store was to use larger disks.
    pub grown: u64,
    /// Disks that were added.
    pub added: u64,
    /// Removals of disks that were begun.
    pub removals: u64,
    /// Columns that were moved.
    pub moved: u64,
    /// Times that devices had been filled and everything was scrubbed.
    pub healed: u64,
    /// Reads that were reconstructed.
    pub degraded_reads: u64,
    /// Blocks that were mended.
    pub mended: u64,
    /// Recoveries that replayed a part of the log.
    pub replays: u64,
    /// Stores that were full.
    pub full: u64,
}

impl DevicesTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        let Self { runs, requests, crashes, faulty, dropped, missing, refused, old, replaced, healed, .. } = *other;
        let Self { degraded_reads, mended, replays, full, grown, added, removals, moved, .. } = *other;
        self.runs += runs;
        self.requests += requests;
        self.crashes += crashes;
        self.faulty += faulty;
        self.dropped += dropped;
        self.missing += missing;
        self.refused += refused;
        self.old += old;
        self.replaced += replaced;
        self.grown += grown;
        self.added += added;
        self.removals += removals;
        self.moved += moved;
        self.healed += healed;
        self.degraded_reads += degraded_reads;
        self.mended += mended;
        self.replays += replays;
        self.full += full;
    }
}

/// Runs the scenario of a seed.
///
/// # Errors
/// When the oracle objects, the store's own check finds something, or anything panics.
pub fn run_devices(seed: u64) -> Result<DevicesTally, Failure> {
    let go = |verbose: bool| {
        let scenario = draw(seed);
        let world = World::new(seed, scenario.faults.clone());
        if verbose {
            world.set_verbose();
        }
        let about = format!("{scenario:#?}");
        guarded(&world, &about, || DevicesRun::new(world.clone(), scenario.clone()).all())
    };
    // The same again for people to read: notes cost more than all the rest.
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

fn draw(seed: u64) -> Scenario {
    let scenario = Scenario::draw(seed);
    let faults = Faults { files_capacity: None, files_space_known: false, ..scenario.faults.clone() };
    let disk = DiskFaults::none();
    Scenario { damage: Damage::None, others: false, faults: Faults { disk, ..faults }, ..scenario }
}

/// Failure of a device for one life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Dies,
    Errors,
    Stalls,
    LosesWrites,
    Misdirects,
    FlipsWrites,
    FlipsReads,
    Rots,
    Old,
    Noise,
    Missing,
}

const FAULTS: [Fault; 11] = [
    Fault::Dies,
    Fault::Errors,
    Fault::Stalls,
    Fault::LosesWrites,
    Fault::Misdirects,
    Fault::FlipsWrites,
    Fault::FlipsReads,
    Fault::Rots,
    Fault::Old,
    Fault::Noise,
    Fault::Missing,
];

struct Disk {
    path: PathBuf,
    size: u64,
    missing: bool,
    /// Content at the end of an earlier life.
    saved: Option<Saved>,
}

struct DevicesRun {
    world: World,
    scenario: Scenario,
    rng: Rng,
    load: Load,
    tally: DevicesTally,
    data: usize,
    parity: usize,
    disks: Vec<Disk>,
    uuid: Option<[u8; 16]>,
    /// Disks that may lack or garble anything since all was healed.
    dirty: BTreeSet<usize>,
    /// Set if columns may have been moved since all was healed.
    moved: bool,
    before: CrashKind,
    next_disk: usize,
}

fn text(what: &str) -> impl Fn(Error) -> String + '_ {
    move |error| format!("{what}: {error:?}")
}

impl DevicesRun {
    fn new(world: World, scenario: Scenario) -> Self {
        let mut rng = Rng::new(scenario.seed ^ 0x00de_71ce);
        let (data, parity) = *rng.pick(&[(2, 1), (2, 1), (3, 2), (3, 2), (1, 1), (1, 2), (4, 2), (2, 2), (5, 3)]);
        let more = *rng.pick(&[0, 0, 0, 1, 2]);
        // From the smallest store to one with space to spare.
        let slots = *rng.pick(&[24, 25, 32, 64]);
        let disks = (0..data + parity + more)
            .map(|number| {
                let slots = slots + if rng.one_in(3) { rng.below(slots) } else { 0 };
                let path = PathBuf::from(format!("/disk{number}"));
                Disk { path, size: SEGMENTS_START + slots * COLUMN, missing: false, saved: None }
            })
            .collect::<Vec<_>>();
        let size = slots * COLUMN * data as u64;
        let load = Load::draw(&mut rng, &scenario, size, &world);
        let next_disk = disks.len();
        Self {
            world,
            scenario,
            rng,
            load,
            tally: DevicesTally { runs: 1, ..DevicesTally::default() },
            data,
            parity,
            disks,
            uuid: None,
            dirty: BTreeSet::new(),
            moved: false,
            before: CrashKind::Power,
            next_disk,
        }
    }

    fn all(&mut self) -> Result<DevicesTally, String> {
        self.world.note(|| format!("{}+{} on {} disks", self.data, self.parity, self.disks.len()));
        self.init()?;
        for _ in 0..self.scenario.lives {
            self.life()?;
            self.save();
            if self.rng.one_in(3) {
                self.heal()?;
            }
        }
        self.heal()?;
        self.last()?;
        self.tally.requests = self.load.seen().answered.get();
        self.tally.full = u64::from(self.load.seen().no_space.get() > 0);
        Ok(self.tally)
    }

    fn init(&mut self) -> Result<(), String> {
        for disk in &self.disks {
            self.world.add_disk(&disk.path, disk.size, self.scenario.sector);
        }
        let options = DeviceSetOptions {
            data: self.data,
            parity: self.parity,
            column_size: COLUMN,
            ..DeviceSetOptions::default()
        };
        let paths: Vec<PathBuf> = self.disks.iter().map(|disk| disk.path.clone()).collect();
        let reactor = self.world.reactor();
        let made = self.world.run(&reactor, Store::init_devices(&paths, &options, |_, _| {}));
        self.world.crash(reactor, CrashKind::Power);
        self.uuid = Some(made.map_err(|stop| stop.to_string())?.map_err(text("init"))?);
        Ok(())
    }

    fn options(&self) -> StoreOptions {
        StoreOptions {
            metadata_cache: self.scenario.metadata_cache,
            data_cache: self.scenario.data_cache,
            punch_free: self.scenario.punch_free,
            // Only disks that may lack something are ever missing.
            accept_missing: true,
            repair_rate: 0,
            master_key: Some(MasterKey::from_bytes([1; 32])),
            ..StoreOptions::default()
        }
    }

    /// Paths of the disks that are there, in any order.
    fn paths(&mut self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> =
            self.disks.iter().filter(|disk| !disk.missing).map(|disk| disk.path.clone()).collect();
        for i in (1..paths.len()).rev() {
            paths.swap(i, self.rng.below(i as u64 + 1) as usize);
        }
        paths
    }

    fn expected(&self) -> Expected {
        Expected { no_space: true, ..Expected::nothing() }
    }

    fn save(&mut self) {
        for disk in &mut self.disks {
            if self.rng.one_in(2) {
                disk.saved = self.world.save(&disk.path);
            }
        }
    }

    /// Draws the disks that fail in the next life, and how.
    fn draw_faults(&mut self) -> Vec<(usize, Fault)> {
        let mut out = Vec::new();
        for _ in 0..self.rng.below(self.parity as u64 + 1) {
            let disk = if self.dirty.len() < self.parity {
                self.rng.below(self.disks.len() as u64) as usize
            } else {
                let dirty: Vec<usize> = self.dirty.iter().copied().collect();
                *self.rng.pick(&dirty)
            };
            let fault = *self.rng.pick(&FAULTS);
            if out.iter().all(|(other, _)| *other != disk) {
                out.push((disk, fault));
                self.dirty.insert(disk);
            }
        }
        out
    }

    fn inject(&mut self, disk: usize, fault: Fault) {
        let (world, path) = (self.world.clone(), self.disks[disk].path.clone());
        self.world.note(|| format!("{fault:?}: {}", path.display()));
        let none = DiskFaults::none();
        let ppm = *self.rng.pick(&[2_000, 20_000, 200_000]);
        let faults = match fault {
            Fault::Dies => DiskFaults { life: Some(self.rng.below(300)), ..none },
            Fault::Errors => DiskFaults::failing(ppm),
            Fault::Stalls => DiskFaults { stall_ppm: ppm, ..none },
            Fault::LosesWrites => DiskFaults { lost_write_ppm: ppm, ..none },
            Fault::Misdirects => DiskFaults { misdirected_write_ppm: ppm, ..none },
            Fault::FlipsWrites => DiskFaults { write_flip_ppm: ppm, ..none },
            Fault::FlipsReads => DiskFaults { read_flip_ppm: ppm, ..none },
            Fault::Rots => {
                world.flip_bits(&path, 1 + self.rng.below(64) as usize);
                return;
            }
            Fault::Old => {
                if let Some(saved) = &self.disks[disk].saved {
                    world.restore(&path, saved);
                    // Its content is old, not its size.
                    world.resize(&path, self.disks[disk].size);
                    self.tally.old += 1;
                }
                return;
            }
            Fault::Noise => {
                let pages = world.allocated(&path).unwrap_or(self.disks[disk].size) / 4096;
                world.flip_bits(&path, 2 * pages as usize);
                return;
            }
            Fault::Missing => {
                self.disks[disk].missing = true;
                self.tally.missing += 1;
                return;
            }
        };
        world.set_disk_faults(&path, Some(faults));
    }

    /// Ends all faults; what they have done stays.
    fn end_faults(&mut self) {
        for disk in &mut self.disks {
            disk.missing = false;
            self.world.set_disk_faults(&disk.path, None);
        }
    }

    /// Tries to open the store with one device too few: refused, and nothing has changed.
    fn open_with_too_few(&mut self) -> Result<(), String> {
        let mut paths = self.paths();
        let present = self.disks.len() - self.parity - 1;
        if paths.len() <= present {
            return Ok(());
        }
        paths.truncate(present);
        let reactor = self.world.reactor();
        let (uuid, options) = (self.uuid, self.options());
        let opened = self.world.run(&reactor, async { Store::open_devices(&paths, uuid, options).await.map(drop) });
        self.world.crash(reactor, CrashKind::Kill);
        match opened.map_err(|stop| stop.to_string())? {
            Ok(()) => Err(format!("opened with {present} of {} devices", self.disks.len())),
            Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::NotFound | ErrorKind::Invalid) => {
                self.tally.refused += 1;
                Ok(())
            }
            Err(error) => Err(format!("opened with {present} devices: {error:?}")),
        }
    }

    fn life(&mut self) -> Result<(), String> {
        if self.dirty.is_empty()
            && self.tally.replaced + self.tally.added + self.tally.removals == 0
            && self.rng.one_in(8)
        {
            self.open_with_too_few()?;
        }
        let faults = self.draw_faults();
        self.tally.faulty += u64::from(!faults.is_empty());
        for &(disk, fault) in &faults {
            self.inject(disk, fault);
        }
        let kind = if self.rng.ppm(self.scenario.kill_ppm) { CrashKind::Kill } else { CrashKind::Power };
        let closes = self.rng.ppm(self.scenario.close_ppm);
        if !closes {
            let offset = 1 + self.rng.below(self.scenario.points_max * self.disks.len() as u64);
            self.world.crash_at_point(Some(self.world.points() + offset));
        }
        self.load.expect(self.expected());
        let (paths, reactor) = (self.paths(), self.world.reactor());
        let opened: Rc<RefCell<Option<Rc<Store>>>> = Rc::default();
        let world = self.world.clone();
        let ran = world.run(&reactor, DevicesLife { run: self, paths, closes, opened: opened.clone() }.live());
        self.world.crash_at_point(None);
        if let Some(store) = opened.borrow_mut().take() {
            self.count(&store);
        }
        match ran {
            Ok(done) => done.map_err(text("a life"))?,
            Err(Stop::Crash(_)) => {}
            Err(stop) => return Err(stop.to_string()),
        }
        self.load.violation().map_or(Ok(()), Err)?;
        self.world.crash(reactor, kind);
        self.load.crash(kind);
        self.before = kind;
        self.tally.crashes += u64::from(!closes);
        self.end_faults();
        Ok(())
    }

    fn count(&mut self, store: &Store) {
        let counters = store.column_counters();
        self.tally.degraded_reads += counters.degraded_reads;
        self.tally.mended += counters.mended_blocks;
        self.tally.moved += store.column_moves().moved;
        self.tally.replays += u64::from(store.stats().replay.batches > 0);
        let is_away = |device: &&forebay_store::DeviceStatus| device.state == ColumnState::Away && !device.missing;
        self.tally.dropped += store.devices().iter().filter(is_away).count() as u64;
    }

    /// Opens the store with all devices, waits until each one is complete, and scrubs.
    fn heal(&mut self) -> Result<(), String> {
        self.load.expect(self.expected());
        let (paths, reactor) = (self.paths(), self.world.reactor());
        let (uuid, options, before) = (self.uuid, self.options(), self.before);
        // The disk of a device that was replaced may be there again, and is ignored.
        let load = &mut self.load;
        let ran = self.world.run(&reactor, async {
            let store = Store::open_devices(&paths, uuid, options).await?;
            load.verify(store.clone(), before).await?;
            repair(&store).await?;
            let counted = store.clone();
            store.close().await?;
            Ok::<_, Error>(counted)
        });
        let store = ran.map_err(|stop| stop.to_string())?.map_err(text("healing"))?;
        self.load.violation().map_or(Ok(()), Err)?;
        self.count(&store);
        let members: BTreeSet<PathBuf> = store.devices().into_iter().map(|device| device.path).collect();
        self.disks.retain(|disk| members.contains(&disk.path));
        drop(store);
        self.world.crash(reactor, CrashKind::Power);
        self.load.crash(CrashKind::Power);
        self.before = CrashKind::Power;
        self.dirty.clear();
        self.moved = false;
        self.tally.healed += 1;
        Ok(())
    }

    /// Loses as many devices as parity allows, and looks at everything once more, with the store's own check too.
    fn last(&mut self) -> Result<(), String> {
        let (paths, reactor) = (self.paths(), self.world.reactor());
        let checked = self.world.run(&reactor, {
            let options = CheckOptions { data: true, ..CheckOptions::default() };
            Store::check_devices(&paths, self.uuid, options, |_, _| {})
        });
        let report = checked.map_err(|stop| stop.to_string())?.map_err(text("the check"))?;
        if !report.is_clean() {
            return Err(format!("the check found {:#?}", report.findings));
        }
        for _ in 0..self.parity {
            let disk = self.rng.below(self.disks.len() as u64) as usize;
            self.disks[disk].missing = true;
        }
        let paths = self.paths();
        let (uuid, options, before) = (self.uuid, self.options(), self.before);
        let load = &mut self.load;
        let verified = self.world.run(&reactor, async {
            let store = Store::open_devices(&paths, uuid, options).await?;
            load.verify(store.clone(), before).await?;
            store.close().await
        });
        self.load.violation().map_or(Ok(()), Err)?;
        verified.map_err(|stop| stop.to_string())?.map_err(text("the last life"))?;
        self.world.crash(reactor, CrashKind::Power);
        Ok(())
    }
}

/// Takes back what is away, waits until all devices are complete and no columns are moved, and scrubs the store.
async fn repair(store: &Store) -> Result<(), Error> {
    let step = Duration::from_millis(5);
    let done = timeout(PATIENCE, async {
        loop {
            let (devices, moves) = (store.devices(), store.column_moves());
            let is_whole = store.degraded().is_none() && devices.iter().all(|device| device.replaces.is_none());
            if is_whole && !moves.pending {
                break;
            }
            if !moves.blocked.is_empty() && devices.iter().any(|device| device.leaving) {
                // Too much was written meanwhile.
                store.cancel_removal(&[]).await?;
            }
            let is_replaced = |number| devices.iter().any(|device| device.replaces == Some(number));
            let is_away = |device: &&forebay_store::DeviceStatus| {
                device.state == ColumnState::Away && !device.leaving && !is_replaced(device.number)
            };
            let away = devices.iter().find(is_away);
            if let Some(device) = away {
                store.replace_device(device.number, &device.path, true).await?;
            }
            sleep(step).await;
        }
        store.start_scrub()?;
        while store.scrub_status().running {
            sleep(step).await;
        }
        // One that was interrupted before went on where it was; only a whole one proves anything.
        store.start_scrub()?;
        while store.scrub_status().running {
            sleep(step).await;
        }
        Ok::<_, Error>(())
    });
    done.await.map_err(|_| {
        Error::new(ErrorKind::TimedOut, format!("not repaired: {:?}, {:?}", store.degraded(), store.column_moves()))
    })??;
    let status = store.scrub_status();
    match status.lost {
        0 => Ok(()),
        _ => Err(Error::new(ErrorKind::Corrupt, format!("the scrub found {status:?}"))),
    }
}

/// One life of a run.
struct DevicesLife<'a> {
    run: &'a mut DevicesRun,
    paths: Vec<PathBuf>,
    closes: bool,
    opened: Rc<RefCell<Option<Rc<Store>>>>,
}

impl DevicesLife<'_> {
    async fn live(self) -> Result<(), Error> {
        let Self { run, paths, closes, opened } = self;
        let store = Store::open_devices(&paths, run.uuid, run.options()).await?;
        *opened.borrow_mut() = Some(store.clone());
        let backend: Rc<dyn ObjectBackend> = store.clone();
        run.load.verify(backend.clone(), run.before).await?;
        run.scenario.encrypt(&*store).await?;
        if !run.scenario.compression.is_empty() {
            let compression = *run.rng.pick(&run.scenario.compression);
            store.set_data_policy(&ObjectName::new(""), Some(DataPolicy { compression })).await?;
        }
        if run.rng.one_in(3) {
            store.start_scrub()?;
        }
        let replacing = if run.rng.one_in(3) { run.begin_replacement(&store) } else { None };
        // What is wrong in a column moves with it, and must not come back to a disk that fails later.
        let may_move = !run.moved || run.dirty.is_empty();
        let growing = if may_move && run.rng.one_in(3) { Some(run.begin_growth(&store)) } else { None };
        let load = run.load.run(backend.clone(), &mut run.rng, None);
        if timeout(PATIENCE, load).await.is_err() {
            return Err(Error::new(ErrorKind::TimedOut, format!("the load is not over after {PATIENCE:?}")));
        }
        if let Some(replacing) = replacing {
            replacing.await?;
        }
        if let Some(growing) = growing {
            growing.await?;
        }
        if run.load.is_quiet() {
            run.load.make_room(backend.clone()).await?;
        }
        if closes {
            run.load.close_begins();
            let closed = timeout(PATIENCE, store.close()).await;
            closed.map_err(|_| Error::new(ErrorKind::TimedOut, "the store is not closed"))??;
            run.load.closed();
        }
        Ok(())
    }
}

impl DevicesRun {
    /// Begins to replace a disk that may lack something, or any one, with a new one.
    fn begin_replacement(&mut self, store: &Rc<Store>) -> Option<forebay_reactor::JoinHandle<Result<(), Error>>> {
        let disk = match self.dirty.first() {
            Some(&disk) => disk,
            None => self.rng.below(self.disks.len() as u64) as usize,
        };
        let device = store.devices().into_iter().find(|device| device.path == self.disks[disk].path)?;
        let path = PathBuf::from(format!("/disk{}", self.next_disk));
        self.next_disk += 1;
        // Large enough, if the old one grows before.
        let size = self.disks[disk].size + 16 * COLUMN;
        self.world.add_disk(&path, size, self.scenario.sector);
        self.disks.push(Disk { path: path.clone(), size, missing: false, saved: None });
        self.tally.replaced += 1;
        let (store, number, after) = (store.clone(), device.number, self.rng.below(20_000));
        Some(spawn(async move {
            sleep(Duration::from_micros(after)).await;
            match store.replace_device(number, &path, false).await {
                // It is being filled, since it was away; or gone.
                Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => Ok(()),
                result => result.map(drop),
            }
        }))
    }

    /// Begins to use larger disks, or one more, or one less.
    fn begin_growth(&mut self, store: &Rc<Store>) -> forebay_reactor::JoinHandle<Result<(), Error>> {
        self.moved = true;
        if self.rng.one_in(3) {
            return self.begin_removal(store.clone());
        }
        let (store, after) = (store.clone(), Duration::from_micros(self.rng.below(20_000)));
        // Devices that are being replaced, or fail, stop it.
        let is_expected = |error: &Error| matches!(error.kind(), ErrorKind::Busy | ErrorKind::Io);
        if self.rng.coin() {
            for at in 0..self.disks.len() {
                if self.rng.one_in(4) {
                    continue;
                }
                self.disks[at].size += self.rng.below(16) * COLUMN + self.rng.below(2) * 4096;
                self.world.resize(&self.disks[at].path, self.disks[at].size);
            }
            self.tally.grown += 1;
            return spawn(async move {
                sleep(after).await;
                store
                    .grow(&[], 0, |_, _| {})
                    .await
                    .map(drop)
                    .or_else(|error| is_expected(&error).then_some(()).ok_or(error))
            });
        }
        let path = PathBuf::from(format!("/disk{}", self.next_disk));
        self.next_disk += 1;
        let size = SEGMENTS_START + (1 + self.rng.below(48)) * COLUMN;
        self.world.add_disk(&path, size, self.scenario.sector);
        self.disks.push(Disk { path: path.clone(), size, missing: false, saved: None });
        self.tally.added += 1;
        spawn(async move {
            sleep(after).await;
            let added = store.add_device(&path, 0, false).await.map(drop);
            added.or_else(|error| is_expected(&error).then_some(()).ok_or(error))
        })
    }

    /// Begins to remove a disk; sometimes that is cancelled.
    fn begin_removal(&mut self, store: Rc<Store>) -> forebay_reactor::JoinHandle<Result<(), Error>> {
        let after = Duration::from_micros(self.rng.below(20_000));
        let cancelled = self.rng.one_in(4).then(|| Duration::from_micros(self.rng.below(20_000)));
        let disk = self.rng.below(self.disks.len() as u64) as usize;
        let path = self.disks[disk].path.clone();
        self.tally.removals += 1;
        let is_expected = |error: &Error| {
            let expected =
                [ErrorKind::Busy, ErrorKind::Io, ErrorKind::Invalid, ErrorKind::NoSpace, ErrorKind::NotFound];
            expected.contains(&error.kind())
        };
        spawn(async move {
            sleep(after).await;
            let device = store.devices().into_iter().find(|device| device.path == path && device.replaces.is_none());
            let Some(device) = device else { return Ok(()) };
            let mut done = store.remove_devices(&[device.number]).await;
            if let (Ok(()), Some(after)) = (&done, cancelled) {
                sleep(after).await;
                done = store.cancel_removal(&[device.number]).await;
            }
            done.or_else(|error| is_expected(&error).then_some(()).ok_or(error))
        })
    }
}
