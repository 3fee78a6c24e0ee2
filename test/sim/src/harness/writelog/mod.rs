//! Runs of the write log: on a disk or in persistent memory, in front of a disk that keeps what was flushed.

mod attachment;
mod backend;
mod damage;
mod encryption;
mod resizing;
mod scenario;
mod watched;

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, LocalFuture, Result};
use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::{sleep, spawn, timeout};
use forebay_writelog::{LogId, LogOwner, MediumKind, Mode, Persist, Shelf, ShelfOptions, WriteLog, tweaks};

pub use attachment::{AttachmentTally, run_attachment};
pub use scenario::{Encryption, LogScenario, LogTally};

use self::backend::Backend;
pub(super) use self::encryption::key_of;
use self::resizing::Resizing;
pub(super) use self::watched::Oracles;
use super::{Failure, guarded};
use crate::faults::{DiskFaults, Faults, MICRO, MILLI};
use crate::oracle::{Expected, ORDER_SECTOR, OrderOracle};
use crate::pmem::SimPmem;
use crate::rng::Rng;
use crate::workload::{BlockLoad, Stream};
use crate::world::{CrashKind, Stop, World};

const LOG: &str = "/logs/shelf";
pub(super) const BACKEND: &str = "/backend";
const VOLUME: &str = "volume-1";

/// Runs the scenario of a seed.
///
/// # Errors
/// When an oracle objects, or anything panics.
pub fn run_writelog(seed: u64) -> std::result::Result<LogTally, Failure> {
    let go = |verbose| run_one(LogScenario::draw(seed), None, verbose).map(|(tally, _)| tally);
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Runs the scenario of a seed, short, with a crash at every persistence point of its first life in turn.
///
/// # Errors
/// As [`run_writelog`].
pub fn sweep_writelog(seed: u64) -> std::result::Result<LogTally, Failure> {
    let mut total = LogTally::default();
    for point in 1.. {
        let scenario = LogScenario { lives: 2, close_ppm: 0, log_fails: false, ..LogScenario::draw(seed) };
        let (tally, crashed) = run_one(scenario, Some(point), false)?;
        total.add(&tally);
        if !crashed {
            break;
        }
    }
    Ok(total)
}

fn run_one(
    scenario: LogScenario,
    crash_at: Option<u64>,
    verbose: bool,
) -> std::result::Result<(LogTally, bool), Failure> {
    let faults = Faults { crash: scenario.crash, events_max: 3_000_000, ..Faults::none() };
    let world = World::new(scenario.seed, faults);
    if verbose {
        world.set_verbose();
    }
    let about = format!("crash at {crash_at:?}\n{scenario:#?}");
    tweaks::start();
    guarded(&world, &about, || Run::new(world.clone(), scenario, crash_at).all())
}

/// Returns the backend of a volume of `size` bytes.
pub(super) fn open_backend(size: u64) -> Result<Rc<dyn BlockDevice>> {
    let record = Rc::new(Record::default());
    record.size.set(size);
    Ok(Rc::new(Backend::open(record)?))
}

/// The records that are kept with the image.
#[derive(Default)]
struct Record {
    epoch: Cell<u64>,
    released: Cell<bool>,
    /// Bytes of the volume.
    size: Cell<u64>,
}

impl LogOwner for Record {
    fn release(&self) -> LocalFuture<Result<()>> {
        self.epoch.set(self.epoch.get() + 1);
        self.released.set(true);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Run {
    world: World,
    scenario: LogScenario,
    rng: Rng,
    memory: Option<SimPmem>,
    oracles: Oracles,
    record: Rc<Record>,
    log: Option<LogId>,
    load: BlockLoad,
    version: Rc<Cell<u64>>,
    /// Volume size that the host was told.
    told_size: Rc<Cell<u64>>,
    tally: LogTally,
    crash_at: Option<u64>,
    crashed_as_told: bool,
}

/// End of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Close { flush: bool },
    Crash(CrashKind),
}

type Opened = Rc<RefCell<Option<Rc<WriteLog>>>>;

/// Shortest writes of a stream: from here on the log would be gone round by itself.
const STREAM_MIN: u64 = 256 << 10;

impl Run {
    fn new(world: World, scenario: LogScenario, crash_at: Option<u64>) -> Self {
        let mut rng = Rng::new(scenario.seed);
        let mut load = BlockLoad::draw(&mut rng, scenario.size);
        load.requests = if crash_at.is_some() { 16 } else { 20 + rng.below(100) as usize };
        if scenario.streams {
            load.span = scenario.size;
            load.stream = Some(Stream { least: STREAM_MIN, next: Rc::default() });
        }
        if scenario.full_ring {
            (load.span, load.requests) = (scenario.size, 100);
            (load.tasks, load.blocks_max) = *rng.pick(&[(8, 4), (4, 16), (2, 40)]);
        }
        let record = Record::default();
        record.size.set(scenario.size);
        let oracles = Oracles::new(&world, scenario.size, Expected::nothing());
        let told_size = Rc::new(Cell::new(scenario.size));
        let pmem = scenario.medium == MediumKind::Pmem;
        let memory = pmem.then(|| SimPmem::new(&world, (1 << 20) + 2 * scenario.log_size));
        let tally = LogTally { runs: 1, pmem: u64::from(pmem), ..LogTally::default() };
        Self {
            world,
            scenario,
            rng,
            memory,
            oracles,
            record: Rc::new(record),
            log: None,
            load,
            version: Rc::default(),
            told_size,
            tally,
            crash_at,
            crashed_as_told: false,
        }
    }

    fn all(&mut self) -> std::result::Result<(LogTally, bool), String> {
        let LogScenario { sector, size, log_size, .. } = self.scenario;
        self.world.add_disk(BACKEND, size, 4096);
        if self.memory.is_none() {
            self.world.add_disk(LOG, (1 << 20) + 2 * log_size, sector);
        }
        let latency = if self.scenario.slow_backend { MILLI..5 * MILLI } else { 5 * MICRO..300 * MICRO };
        let backend = DiskFaults {
            read_latency: latency.clone(),
            write_latency: latency.clone(),
            sync_latency: latency,
            write_error_ppm: self.scenario.backend_error_ppm,
            ..DiskFaults::none()
        };
        let uneven = DiskFaults { write_latency: 5 * MICRO..4 * MILLI, ..DiskFaults::none() };
        let log = self.scenario.full_ring.then_some(uneven);
        for life in 0..self.scenario.lives {
            self.world.set_disk_faults(BACKEND, Some(backend.clone()));
            self.world.set_disk_faults(LOG, log.clone());
            self.life(life)?;
        }
        // Once more in peace: everything is looked at, drained, and looked at on the backend alone.
        self.world.set_disk_faults(BACKEND, None);
        self.world.set_disk_faults(LOG, None);
        if self.scenario.damage {
            self.damage()?;
        }
        self.end()?;
        self.check_tweaks()?;
        self.tally.points = self.world.points();
        self.tally.requests = self.load.seen.answered.get();
        Ok((self.tally, self.crashed_as_told))
    }

    fn life(&mut self, life: u32) -> std::result::Result<(), String> {
        let end = match () {
            () if self.crash_at.is_none() && self.rng.ppm(self.scenario.close_ppm) => {
                End::Close { flush: self.rng.coin() }
            }
            () if self.rng.ppm(self.scenario.kill_ppm) => End::Crash(CrashKind::Kill),
            () => End::Crash(CrashKind::Power),
        };
        if matches!(end, End::Crash(_)) {
            let offset = match self.crash_at {
                Some(point) if life == 0 => point,
                _ => 1 + self.rng.below(self.scenario.points_max),
            };
            self.world.crash_at_point(Some(self.world.points() + offset));
        }
        let opened: Opened = Rc::default();
        let reactor = self.world.reactor();
        let world = self.world.clone();
        let ran = world.run(&reactor, self.live(end, opened.clone()));
        self.world.crash_at_point(None);
        let log = opened.borrow_mut().take();
        let was_opened = log.is_some();
        if let Some(log) = &log {
            self.count(log);
        }
        match ran {
            Ok(result) if !self.world.is_off() => result.map_err(|error| format!("life {life}: {error:?}"))?,
            Ok(_) | Err(Stop::Crash(_)) => {
                self.crashed_as_told |= life == 0 && self.crash_at.is_some();
                self.tally.crashes_opening += u64::from(!was_opened);
            }
            Err(stop) => return Err(format!("life {life}: {stop}")),
        }
        self.oracles.violation()?;
        let kind = match end {
            End::Close { .. } => CrashKind::Power,
            End::Crash(kind) => kind,
        };
        let turning_off = log.as_ref().is_some_and(|log| matches!(log.mode(), Mode::TurningOff(_)));
        let early = self.scenario.persist == Persist::OnFlush;
        drop(log);
        self.crash(reactor, kind, early && turning_off && self.record.released.get())?;
        match end {
            End::Close { .. } => self.tally.closes += 1,
            End::Crash(CrashKind::Power) => self.tally.crashes += 1,
            End::Crash(CrashKind::Kill) => self.tally.kills += 1,
        }
        Ok(())
    }

    fn crash(
        &mut self,
        reactor: forebay_reactor::Reactor,
        kind: CrashKind,
        unprotected: bool,
    ) -> std::result::Result<(), String> {
        self.check_medium()?;
        self.world.crash(reactor, kind);
        if let Some(memory) = &self.memory {
            memory.crash(kind, &mut self.rng);
        }
        self.oracles.crash(kind, unprotected);
        {
            let mut blocks = self.oracles.blocks.borrow_mut();
            let (told, size) = (self.told_size.get(), self.record.size.get());
            blocks.set_size(size, size);
            if size < told {
                blocks.cut(Extent::new(size, told - size));
            }
            self.told_size.set(size);
        }
        self.oracles.check_backend()
    }

    fn count(&mut self, log: &WriteLog) {
        let stats = log.counters();
        self.tally.replayed += stats.replayed;
        self.tally.appended += stats.appended;
        self.tally.groups += stats.groups;
        self.tally.overwritten += stats.overwritten;
        self.tally.direct += stats.direct;
        self.tally.direct_bytes += stats.direct_bytes;
        self.tally.throttled += stats.throttled;
        self.tally.hit_bytes += stats.hit_bytes;
        self.tally.backend_errors += stats.backend_errors;
        self.tally.turned_off += u64::from(!log.mode().is_on());
    }

    /// Returns the part of the volume that is verified.
    fn span(&self) -> u64 {
        self.load.span.min(self.record.size.get())
    }

    async fn shelf(&self) -> Result<Rc<Shelf>> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        match &self.memory {
            Some(memory) => Shelf::on_memory(Rc::new(memory.clone()) as Rc<dyn PersistentMemory>, LOG, options).await,
            None => Shelf::open(MediumKind::Ssd, Path::new(LOG), options).await,
        }
    }

    async fn open(&mut self) -> Result<(Rc<WriteLog>, Rc<Backend>)> {
        let shelf = self.shelf().await?;
        if let Some(id) = self.log
            && self.record.released.get()
        {
            // It was turned off: what is on it must never come back.
            let refused = shelf.open_log(&id, VOLUME, self.record.epoch.get()).await;
            match refused.map(drop).map_err(|error| error.kind()) {
                Err(ErrorKind::Fenced) => shelf.discard(&id).await?,
                // It was discarded before the last crash already.
                Err(ErrorKind::NotFound) => {}
                _ => return Err(Error::new(ErrorKind::Invalid, "a log of an older epoch was taken")),
            }
            self.log = None;
            self.record.released.set(false);
        }
        let id = match self.log {
            Some(id) => id,
            None => {
                // A crash may have left an unrecorded one.
                for id in shelf.ids() {
                    shelf.discard(&id).await?;
                }
                let id = self.create(&shelf).await?;
                if !self.world.is_off() {
                    self.log = Some(id);
                }
                id
            }
        };
        if self.rng.one_in(8) {
            let other = shelf.open_log(&id, "another", 0).await;
            if other.err().map(|error| error.kind()) != Some(ErrorKind::Denied) {
                return Err(Error::new(ErrorKind::Invalid, "the log of another volume was taken"));
            }
            shelf.inspect(&id).await?;
        }
        let log = self.open_encrypted(&shelf, &id).await?;
        let backend = Rc::new(Backend::open(self.record.clone())?);
        Ok((WriteLog::new(backend.clone(), log, self.record.clone(), self.scenario.options()), backend))
    }

    async fn live(&mut self, end: End, opened: Opened) -> Result<()> {
        const PATIENCE: Duration = Duration::from_secs(200);
        let late = |what: &str| Error::new(ErrorKind::TimedOut, format!("{what} takes longer than {PATIENCE:?}"));
        let (log, backend) = self.open().await?;
        *opened.borrow_mut() = Some(log.clone());
        self.oracles.verify(&*log, self.span()).await?;
        if self.scenario.log_fails {
            let ppm = *self.rng.pick(&[5_000, 50_000, 300_000]);
            let faults = DiskFaults { write_error_ppm: ppm, sync_error_ppm: ppm, ..DiskFaults::none() };
            self.world.set_disk_faults(LOG, Some(faults));
        }
        let strict = self.scenario.persist == Persist::OnWrite && !self.scenario.log_fails;
        let watched = self.oracles.watch(log.clone(), strict);
        // A snapshot is not taken while the size changes: each of the two has exclusive use of the image.
        let resizing = (self.scenario.resizes > 0).then(|| {
            let resizing = Resizing {
                log: log.clone(),
                backend,
                world: self.world.clone(),
                oracles: self.oracles.clone(),
                told_size: self.told_size.clone(),
                // Where the load is, and a little past it.
                most: (self.load.span + self.load.span / 4).min(self.scenario.size),
                may_fail: self.scenario.backend_error_ppm > 0,
                rng: self.rng.fork(),
            };
            spawn(resizing.all(self.scenario.resizes))
        });
        let cutting = (resizing.is_none() && self.rng.one_in(3)).then(|| {
            let (log, order, world) = (log.clone(), self.oracles.order.clone(), self.world.clone());
            let (wait, hold) = (self.rng.below(20_000), self.rng.below(10_000));
            spawn(async move {
                sleep(Duration::from_micros(wait)).await;
                cut(&log, &order, &world, hold).await
            })
        });
        let load = self.load.run_on(watched, self.oracles.blocks.clone(), self.version.clone(), &mut self.rng);
        timeout(PATIENCE, load).await.map_err(|_| late("the load"))?;
        if let Some(cutting) = cutting {
            let cut = timeout(PATIENCE, cutting).await.map_err(|_| late("a cut"))?;
            self.tally.cuts += u64::from(cut?);
        }
        if let Some(resizing) = resizing {
            let (shrunk, grown) = timeout(PATIENCE, resizing).await.map_err(|_| late("a change of size"))??;
            self.tally.shrunk += shrunk;
            self.tally.grown += grown;
        }
        if let End::Close { flush } = end {
            let closed = timeout(PATIENCE, log.close(flush)).await.map_err(|_| late("closing"))?;
            match closed {
                Err(error) if !(self.scenario.log_fails && error.kind() == ErrorKind::Io) => return Err(error),
                _ => {}
            }
            if log.mode().is_on() && self.oracles.violation().is_ok() {
                // Closed in order is as good as flushed.
                let mut blocks = self.oracles.blocks.borrow_mut();
                let token = blocks.submit(&BlockRequest::Flush);
                blocks.complete(token, &Ok(BlockReply::Done));
            }
        }
        Ok(())
    }

    fn end(&mut self) -> std::result::Result<(), String> {
        let reactor = self.world.reactor();
        let world = self.world.clone();
        let ran = world.run(&reactor, async {
            let (log, _) = self.open().await?;
            self.oracles.verify(&*log, self.span()).await?;
            log.close(true).await?;
            if let Mode::Failed(error) = log.mode() {
                return Err(error);
            }
            // What is in the log no longer matters.
            let backend = Backend::open(self.record.clone())?;
            self.oracles.verify_backend(&backend, self.span()).await
        });
        ran.map_err(|stop| stop.to_string())?.map_err(|error| format!("the last life: {error:?}"))?;
        self.oracles.violation()?;
        self.crash(reactor, CrashKind::Power, false)
    }
}

/// Holds a cut for a while, and looks at the backend meanwhile.
async fn cut(log: &Rc<WriteLog>, order: &Rc<RefCell<OrderOracle>>, world: &World, hold: u64) -> Result<bool> {
    let from = order.borrow_mut().now();
    world.note(|| "a cut is asked for".to_owned());
    let held = match log.cut().await {
        Ok(held) => held,
        Err(error) if log.mode().is_on() => return Err(error),
        Err(_) => return Ok(false),
    };
    let to = order.borrow_mut().now();
    world.note(|| format!("a cut is held, {}", log.mode().name()));
    for step in 0..2 {
        if !log.mode().is_on() || world.is_off() {
            return Ok(false);
        }
        let read = |sector| world.peek(BACKEND, sector * ORDER_SECTOR, ORDER_SECTOR as usize).unwrap_or_default();
        let checked = order.borrow().check_cut(from, to, read);
        checked.map_err(|text| Error::new(ErrorKind::Invalid, text))?;
        if step == 0 {
            sleep(Duration::from_micros(hold)).await;
        }
    }
    drop(held);
    Ok(true)
}
