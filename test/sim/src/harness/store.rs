//! Runs of the embedded store, and of images on it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{DataPolicy, Error, ErrorKind, ObjectBackend, ObjectName};
use forebay_reactor::{File, OpenOptions, sleep, spawn, timeout};
use forebay_store::{CheckOptions, InitOptions, MasterKey, Store, StoreOptions, StoreStats};

use super::load::Load;
use super::scenario::{Damage, Scenario, Subject};
use super::{Failure, Tally, guarded};
use crate::faults::{DiskFaults, MICRO, MILLI};
use crate::oracle::Expected;
use crate::rng::Rng;
use crate::world::{CrashKind, Stop, World};

const PATH: &str = "/data/store";
/// Offset of the first segment: see `docs/formats/store.md`.
const SEGMENTS_START: u64 = 1 << 20;

/// Runs one scenario.
///
/// # Errors
/// When the oracle objects, the store's own check finds something, or anything panics.
pub fn run(scenario: Scenario) -> Result<Tally, Failure> {
    let go = |verbose: bool| {
        let world = World::new(scenario.seed, scenario.faults.clone());
        if verbose {
            world.set_verbose();
        }
        let about = format!("{scenario:#?}");
        guarded(&world, &about, || Run::new(world.clone(), scenario.clone()).all())
    };
    // The same again for people to read: notes cost more than all the rest.
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Runs one short scenario again and again, with a crash at every persistence point of its first life in turn.  The
/// number of runs is the number of points.
///
/// # Errors
/// As [`run`].
pub fn crash_everywhere(scenario: &Scenario, requests: usize) -> Result<Tally, Failure> {
    let mut total = Tally::default();
    for point in 1.. {
        let scenario = Scenario { lives: 2, damage: Damage::None, close_ppm: 0, ..scenario.clone() };
        let world = World::new(scenario.seed, scenario.faults.clone());
        let about = format!("crash at point {point} of the first life\n{scenario:#?}");
        let (tally, crashed) = guarded(&world, &about, || {
            let mut run = Run::new(world.clone(), scenario);
            run.requests = Some(requests);
            run.crash_at = Some(point);
            let tally = run.all()?;
            Ok((tally, run.crashed_as_told))
        })?;
        total.add(&tally);
        if !crashed {
            break;
        }
    }
    Ok(total)
}

/// End of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Close,
    Crash(CrashKind),
}

struct Run {
    world: World,
    scenario: Scenario,
    rng: Rng,
    load: Load,
    tally: Tally,
    /// Number of requests of every load.
    requests: Option<usize>,
    /// The first life crashes here, counted from its beginning.
    crash_at: Option<u64>,
    crashed_as_told: bool,
    /// End of the life before this one.
    before: CrashKind,
    /// Bits of what was stored are flipped.
    damaged: bool,
}

fn text(what: &str) -> impl Fn(Error) -> String + '_ {
    move |error| format!("{what}: {error:?}")
}

impl Run {
    fn new(world: World, scenario: Scenario) -> Self {
        let mut rng = Rng::new(scenario.seed);
        let size = u64::from(scenario.segment_size) * u64::from(scenario.segments);
        let load = Load::draw(&mut rng, &scenario, size, &world);
        let images = u64::from(scenario.subject == Subject::Image);
        Self {
            world,
            scenario,
            rng,
            load,
            tally: Tally { runs: 1, images, ..Tally::default() },
            requests: None,
            crash_at: None,
            crashed_as_told: false,
            before: CrashKind::Power,
            damaged: false,
        }
    }

    fn all(&mut self) -> Result<Tally, String> {
        self.init()?;
        for life in 0..self.scenario.lives {
            if !self.life(life)? {
                return Ok(self.done());
            }
        }
        self.last()?;
        Ok(self.done())
    }

    fn done(&mut self) -> Tally {
        self.tally.points = self.world.points();
        self.tally.damage = self.world.damage_count() as u64;
        let seen = self.load.seen();
        self.tally.requests = seen.answered.get();
        self.tally.corrupt += seen.corrupt.get();
        self.tally.io_errors += seen.io.get();
        self.tally.full += u64::from(seen.no_space.get() > 0);
        self.tally.host_full += u64::from(seen.no_space.get() > 0 && self.scenario.others);
        self.tally
    }

    fn init(&mut self) -> Result<(), String> {
        let size = SEGMENTS_START + u64::from(self.scenario.segment_size) * u64::from(self.scenario.segments);
        if self.scenario.device {
            self.world.add_disk(PATH, size, self.scenario.sector);
        }
        let reactor = self.world.reactor();
        let options = InitOptions {
            size: if self.scenario.device { 0 } else { size },
            segment_size: self.scenario.segment_size,
            ..InitOptions::default()
        };
        let made = self.world.run(&reactor, Store::init(PATH, options)).map_err(|stop| stop.to_string())?;
        self.world.crash(reactor, CrashKind::Power);
        made.map_err(text("init"))
    }

    fn options(&self) -> StoreOptions {
        StoreOptions {
            metadata_cache: self.scenario.metadata_cache,
            data_cache: self.scenario.data_cache,
            punch_free: self.scenario.punch_free,
            master_key: Some(MasterKey::from_bytes([1; 32])),
            ..StoreOptions::default()
        }
    }

    fn expected(&self, failing: bool) -> Expected {
        // Others may take the last space of the file system while a write to the store's file is in flight.
        let no_space_late = self.scenario.others;
        Expected { io: failing, no_space: true, no_space_late, corrupt: self.damaged, shut_down: failing }
    }

    /// One life; false when the store is damaged beyond opening, and the run is over.
    fn life(&mut self, life: u32) -> Result<bool, String> {
        let failing = matches!(self.scenario.damage, Damage::Errors | Damage::Dies);
        let orderly = matches!(self.scenario.damage, Damage::Closed | Damage::Open);
        let end = if orderly || (self.crash_at.is_none() && self.rng.ppm(self.scenario.close_ppm)) {
            End::Close
        } else if self.rng.ppm(self.scenario.kill_ppm) {
            End::Crash(CrashKind::Kill)
        } else {
            End::Crash(CrashKind::Power)
        };
        if failing {
            let ppm = *self.rng.pick(&[1_000, 10_000]);
            let faults = match self.scenario.damage {
                Damage::Dies => DiskFaults { life: Some(self.rng.below(200)), ..self.scenario.faults.disk.clone() },
                _ => DiskFaults { read_error_ppm: 0, ..DiskFaults::failing(ppm) },
            };
            self.world.set_disk_faults(PATH, Some(faults));
        }
        if matches!(end, End::Crash(_)) {
            let offset = match self.crash_at {
                Some(point) if life == 0 => point,
                _ => 1 + self.rng.below(self.scenario.points_max),
            };
            self.world.crash_at_point(Some(self.world.points() + offset));
        }
        self.load.expect(self.expected(failing));
        let reactor = self.world.reactor();
        let opened: Rc<RefCell<Option<Rc<Store>>>> = Rc::default();
        let world = self.world.clone();
        let ran = world.run(&reactor, Life { run: self, life, end, opened: opened.clone(), failing }.live());
        self.world.crash_at_point(None);
        let store = opened.borrow_mut().take();
        let was_opened = store.is_some();
        if let Some(store) = &store {
            self.count(store.stats());
        }
        drop(store);
        let over = match ran {
            Ok(Ok(goes_on)) => !goes_on,
            Ok(Err(error)) if failing && self.expected(true).allows(error.kind()) => false,
            Ok(Err(error)) => return Err(format!("life {life}: {error:?}")),
            Err(Stop::Crash(_)) => {
                self.crashed_as_told |= life == 0 && self.crash_at.is_some();
                self.tally.crashes_opening += u64::from(!was_opened);
                false
            }
            Err(stop) => return Err(stop.to_string()),
        };
        self.check_violation()?;
        let kind = match end {
            End::Close => CrashKind::Power,
            End::Crash(kind) => kind,
        };
        self.world.crash(reactor, kind);
        self.load.crash(kind);
        // A process that was killed left what it wrote readable, but at risk until something is synced; and so it
        // stays if the next one is killed too.
        self.before = kind;
        match end {
            End::Close => self.tally.closes += 1,
            End::Crash(CrashKind::Power) => self.tally.crashes += 1,
            End::Crash(CrashKind::Kill) => self.tally.kills += 1,
        }
        if failing {
            self.world.set_disk_faults(PATH, None);
        }
        if self.scenario.damage == Damage::Closed && !over {
            let count = 1 + self.rng.below(4) as usize;
            self.world.flip_bits(PATH, count);
            self.damaged = true;
        }
        Ok(!over)
    }

    fn count(&mut self, stats: StoreStats) {
        self.tally.replays += u64::from(stats.replay.batches > 0);
        self.tally.checkpoints += stats.checkpoints;
        self.tally.cleaned += u64::from(stats.cleaned_bytes > 0);
    }

    fn check_violation(&self) -> Result<(), String> {
        self.load.violation().map_or(Ok(()), Err)
    }

    /// At the end everything is looked at once more, with the store's own check too.
    fn last(&mut self) -> Result<(), String> {
        self.load.expect(self.expected(false));
        let reactor = self.world.reactor();
        let (options, before) = (self.options(), self.before);
        let load = &mut self.load;
        let others = self.scenario.others;
        let verified = self.world.run(&reactor, async {
            if others {
                empty_others().await;
            }
            let store = Store::open(PATH, options).await?;
            load.verify(store.clone(), before).await?;
            store.close().await
        });
        self.check_violation()?;
        match verified.map_err(|stop| stop.to_string())? {
            Err(error) if self.damaged && error.kind() == ErrorKind::Corrupt => {
                self.tally.corrupt += 1;
                return Ok(());
            }
            result => result.map_err(text("the last life"))?,
        }
        let checked = self
            .world
            .run(&reactor, Store::check(PATH, CheckOptions { data: true, ..CheckOptions::default() }, |_, _| {}));
        match checked.map_err(|stop| stop.to_string())? {
            Err(error) if self.damaged && error.kind() == ErrorKind::Corrupt => self.tally.corrupt += 1,
            Err(error) => return Err(format!("the check: {error:?}")),
            Ok(report) if !self.damaged && !report.is_clean() => {
                return Err(format!("the check found {:#?}", report.findings));
            }
            Ok(_) => {}
        }
        self.world.crash(reactor, CrashKind::Power);
        Ok(())
    }
}

const OTHERS: &str = "/data/others";

/// Longer than a store takes to see that there is space again.
const RECOVERY: Duration = Duration::from_secs(3);

/// Makes the others on the file system take nothing.
async fn empty_others() {
    if let Ok(file) = File::open(OTHERS, OpenOptions::read_write().create()) {
        // It fails when that was where the power went.
        let _ = file.set_size(0);
    }
    // Lets the world see that it has no power.
    sleep(Duration::from_nanos(MICRO)).await;
}

/// Fills the file system again and again, as others do, for as long as it is left to.
async fn others(mut rng: Rng) {
    const STEP: u64 = 64 << 10;
    let pause = |rng: &mut Rng| Duration::from_nanos(rng.range(100 * MICRO..100 * MILLI));
    let Ok(file) = File::open(OTHERS, OpenOptions::read_write().create()) else { return };
    loop {
        sleep(pause(&mut rng)).await;
        let mut at = 0;
        while file.allocate(at, STEP).await.is_ok() {
            at += STEP;
        }
        sleep(pause(&mut rng)).await;
        if file.set_size(0).is_err() {
            return;
        }
    }
}

/// One life of a run.
struct Life<'a> {
    run: &'a mut Run,
    life: u32,
    end: End,
    opened: Rc<RefCell<Option<Rc<Store>>>>,
    failing: bool,
}

impl Life<'_> {
    /// False when the store is damaged beyond opening.
    async fn live(self) -> Result<bool, Error> {
        let Self { run, life, end, opened, failing } = self;
        if run.scenario.others {
            empty_others().await;
        }
        let store = match Store::open(PATH, run.options()).await {
            Err(error) if run.damaged && error.kind() == ErrorKind::Corrupt => {
                run.tally.corrupt += 1;
                return Ok(false);
            }
            result => result?,
        };
        *opened.borrow_mut() = Some(store.clone());
        let backend: Rc<dyn ObjectBackend> = store.clone();
        if let Err(error) = run.load.verify(backend.clone(), run.before).await {
            // Something that everything else needs is damaged.
            if run.damaged && error.kind() == ErrorKind::Corrupt {
                run.tally.corrupt += 1;
                return Ok(false);
            }
            return Err(error);
        }
        run.scenario.encrypt(&*store).await?;
        if let Some(&compression) = run.scenario.compression.iter().cycle().nth(life as usize) {
            let policy = DataPolicy { compression };
            store.set_data_policy(&ObjectName::new(""), Some(policy)).await?;
        }
        // On a disk that fails for good the store tries again and again, and its waiters keep waiting.
        const PATIENCE: Duration = Duration::from_secs(100);
        let others = run.scenario.others.then(|| spawn(others(run.rng.fork())));
        let load = run.load.run(backend.clone(), &mut run.rng, run.requests);
        let over = timeout(PATIENCE, load).await.is_ok();
        if let Some(others) = others {
            others.cancel().await;
            empty_others().await;
            // A log that found no space tries again by itself.
            sleep(RECOVERY).await;
        }
        if !over {
            if !failing {
                return Err(Error::new(ErrorKind::TimedOut, format!("the load is not over after {PATIENCE:?}")));
            }
            run.tally.stuck += 1;
            return Ok(true);
        }
        if run.scenario.damage == Damage::Open {
            store.flush().await?;
            let count = 1 + run.rng.below(8) as usize;
            run.world.flip_bits_where(PATH, count, |offset| offset >= SEGMENTS_START);
            run.damaged = true;
            run.load.expect(run.expected(false));
            run.load.run(backend.clone(), &mut run.rng, run.requests).await;
        } else if !failing && !run.damaged && run.load.is_quiet() {
            run.load.make_room(backend.clone()).await?;
        }
        if end == End::Close {
            run.load.close_begins();
            let Ok(closed) = timeout(PATIENCE, store.close()).await else {
                if !failing {
                    return Err(Error::new(ErrorKind::TimedOut, format!("the store is not closed after {PATIENCE:?}")));
                }
                run.tally.stuck += 1;
                return Ok(true);
            };
            match closed {
                Err(error) if run.damaged && error.kind() == ErrorKind::Corrupt => {
                    run.tally.corrupt += 1;
                    return Ok(false);
                }
                result => result?,
            }
            run.load.closed();
        }
        Ok(true)
    }
}
