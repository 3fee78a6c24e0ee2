//! A volume's life with and without a write log: attached, ended, closed and opened again under load, while the record
//! of its log, its lock, its disks and its machine fail.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch, WriteExtent,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{sleep, spawn, timeout};
use forebay_writelog::{
    DirtyLimits, LogAttachment, LogKeeper, LogOptions, LogRecord, MediumKind, Mode, Persist, PlaceChange, Shelf,
    ShelfOptions,
};

use super::backend::Backend;
use super::watched::{Oracles, describe};
use super::{BACKEND, Record};
use crate::faults::{DiskFaults, Faults, MICRO, MILLI};
use crate::harness::{Failure, guarded};
use crate::oracle::Expected;
use crate::rng::Rng;
use crate::workload::BlockLoad;
use crate::world::{CrashKind, Stop, World};

const DEVICES: [&str; 2] = ["/logs/a", "/logs/b"];
const LOG_SIZE: u64 = 256 << 10;
/// Longer than anything takes that ends at all.
const PATIENCE: Duration = Duration::from_secs(200);
/// Time for which ending a log waits for a backend that takes nothing.
const STALL: Duration = Duration::from_secs(1);

/// Counters of attachment runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachmentTally {
    /// Number of runs.
    pub runs: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Logs put in front of the volume, or left there, when one was asked for.
    pub attached: u64,
    /// Logs that were written back and ended.
    pub ended: u64,
    /// Logs closed as they were, with the volume opened again.
    pub reopened: u64,
    /// Changes of the log that failed.
    pub refused: u64,
    /// Records that were stored though it was said otherwise.
    pub stored_unsaid: u64,
    /// Times that the backend took nothing for a while.
    pub outages: u64,
    /// Power failures and kills.
    pub crashes: u64,
}

impl AttachmentTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.attached += other.attached;
        self.ended += other.ended;
        self.reopened += other.reopened;
        self.refused += other.refused;
        self.stored_unsaid += other.stored_unsaid;
        self.outages += other.outages;
        self.crashes += other.crashes;
    }
}

/// Runs the lives of a volume that follow from a seed.
///
/// # Errors
/// When an oracle objects, or anything panics.
pub fn run_attachment(seed: u64) -> std::result::Result<AttachmentTally, Failure> {
    let go = |verbose| {
        let world = World::new(seed, Faults { events_max: 3_000_000, ..Faults::none() });
        if verbose {
            world.set_verbose();
        }
        guarded(&world, "the lives of a volume", || Lives::new(world.clone(), seed).all())
    };
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Location of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    device: &'static str,
    age_max: Duration,
    persist: Persist,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.device)
    }
}

/// The image's store: it outlives machines.
#[derive(Default)]
struct ImageStore {
    record: RefCell<LogRecord<Place>>,
    /// A change of the record is on its way.
    storing: Cell<bool>,
    stored_unsaid: Cell<u64>,
    /// A log that acknowledges early has turned off in this life.
    early_off: Cell<bool>,
    attachment: RefCell<Weak<LogAttachment<Keeper>>>,
    violation: RefCell<Option<String>>,
}

impl ImageStore {
    /// Notes that a log that acknowledges early gives itself up, when that is what a new record says.
    fn note_early_off(&self, record: &LogRecord<Place>) {
        let early = self.record.borrow().log.as_ref().is_some_and(|log| log.place.persist == Persist::OnFlush);
        let log = self.attachment.borrow().upgrade().and_then(|attachment| attachment.log());
        if early && record.log.is_none() && log.is_none_or(|log| matches!(log.mode(), Mode::TurningOff(_))) {
            self.early_off.set(true);
        }
    }
}

/// Changes on their way to the backend.
#[derive(Default)]
struct Underway {
    next: Cell<u64>,
    open: RefCell<BTreeSet<u64>>,
    ended: Notify,
}

/// The backend, which knows what is on its way to it.
struct Base {
    inner: Backend,
    underway: Rc<Underway>,
}

impl Base {
    fn watched<T: 'static>(&self, answer: LocalFuture<Result<T>>) -> LocalFuture<Result<T>> {
        let (underway, number) = (self.underway.clone(), self.underway.next.get());
        underway.next.set(number + 1);
        underway.open.borrow_mut().insert(number);
        Box::pin(async move {
            let result = answer.await;
            underway.open.borrow_mut().remove(&number);
            underway.ended.notify_all();
            result
        })
    }
}

impl BlockDevice for Base {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        match request.is_write() {
            true => self.watched(self.inner.submit(request)),
            false => self.inner.submit(request),
        }
    }

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        self.watched(self.inner.write_many(writes, fua))
    }

    fn unit(&self) -> Option<u64> {
        self.inner.unit()
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// One process's way to the image.
struct Keeper {
    world: World,
    store: Rc<ImageStore>,
    underway: Rc<Underway>,
    /// The log devices that this process has open.
    shelves: Rc<RefCell<BTreeMap<&'static str, Weak<Shelf>>>>,
    rng: Rc<RefCell<Rng>>,
    /// Chances of a million that a request to the image's store fails.
    fail_ppm: Rc<Cell<u32>>,
}

impl Keeper {
    /// The time that a request to the image's store takes, and whether it fails.
    fn request(&self) -> (Duration, bool) {
        let mut rng = self.rng.borrow_mut();
        (Duration::from_nanos(rng.range(50 * MICRO..2 * MILLI)), rng.ppm(self.fail_ppm.get()))
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::TimedOut, "the image's store does not answer")
}

impl LogKeeper for Keeper {
    type Place = Place;
    type Lock = ();

    fn volume_id(&self) -> String {
        "volume-1".to_owned()
    }

    fn volume_name(&self) -> String {
        "local/volume".to_owned()
    }

    fn load(&self) -> LocalFuture<Result<LogRecord<Place>>> {
        let (store, (takes, fails)) = (self.store.clone(), self.request());
        Box::pin(async move {
            sleep(takes).await;
            if fails { Err(lost()) } else { Ok(store.record.borrow().clone()) }
        })
    }

    fn store(&self, record: LogRecord<Place>) -> LocalFuture<Result<()>> {
        let (world, store, (takes, fails)) = (self.world.clone(), self.store.clone(), self.request());
        let applied = !fails || self.rng.borrow_mut().coin();
        Box::pin(async move {
            store.storing.set(true);
            sleep(takes / 2).await;
            if world.is_off() {
                return std::future::pending().await;
            }
            if applied {
                world.note(|| format!("the record is {record:?}, said: {}", !fails));
                store.note_early_off(&record);
                store.record.replace(record);
                store.stored_unsaid.set(store.stored_unsaid.get() + u64::from(fails));
            }
            sleep(takes / 2).await;
            store.storing.set(false);
            if fails { Err(lost()) } else { Ok(()) }
        })
    }

    fn lock(&self) -> LocalFuture<Result<()>> {
        let (takes, fails) = self.request();
        Box::pin(async move {
            sleep(takes).await;
            if fails { Err(Error::new(ErrorKind::Busy, "another client has the image")) } else { Ok(()) }
        })
    }

    fn drain_changes(&self) -> LocalFuture<()> {
        let (underway, before) = (self.underway.clone(), self.underway.next.get());
        Box::pin(async move {
            underway.ended.wait_until(|| underway.open.borrow().range(..before).next().is_none()).await;
        })
    }

    fn shelf(&self, place: &Place, create: bool) -> LocalFuture<Result<Rc<Shelf>>> {
        let (shelves, device) = (self.shelves.clone(), place.device);
        Box::pin(async move {
            if let Some(shelf) = shelves.borrow().get(device).and_then(Weak::upgrade) {
                return Ok(shelf);
            }
            let options = ShelfOptions { create, small: true, ..ShelfOptions::default() };
            let shelf = Shelf::open(MediumKind::Ssd, Path::new(device), options).await?;
            shelves.borrow_mut().insert(device, Rc::downgrade(&shelf));
            Ok(shelf)
        })
    }

    fn log_size(&self, _place: &Place) -> u64 {
        LOG_SIZE
    }

    fn options(&self, place: &Place) -> LogOptions {
        let limits = DirtyLimits { age_max: place.age_max, ..DirtyLimits::default() };
        LogOptions { persist: place.persist, limits, direct_min: Some(32 << 10), ..LogOptions::default() }
    }

    fn compare(&self, is: &Place, wanted: &Place) -> PlaceChange {
        match () {
            () if is == wanted => PlaceChange::Same,
            () if (is.device, is.persist) == (wanted.device, wanted.persist) => PlaceChange::Limits,
            () => PlaceChange::Other,
        }
    }
}

/// Device that hosts are served: the attachment's current one.
struct Front {
    attachment: Rc<LogAttachment<Keeper>>,
    base: Rc<Base>,
    store: Rc<ImageStore>,
    in_flight: Rc<InFlight>,
}

/// Changes in flight.  One waits for those that it overlaps: what becomes of the blocks of two such changes is said of
/// each sector by itself, where one goes past the log and the other through it, and the oracle knows blocks only.
#[derive(Default)]
struct InFlight {
    extents: RefCell<Vec<Extent>>,
    ended: Notify,
}

impl InFlight {
    async fn enter(self: Rc<Self>, extent: Extent) -> Entered {
        let free = || !self.extents.borrow().iter().any(|other| other.overlaps(extent));
        self.ended.wait_until(free).await;
        self.extents.borrow_mut().push(extent);
        Entered { all: self, extent }
    }
}

/// A change's place among those in flight.
struct Entered {
    all: Rc<InFlight>,
    extent: Extent,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut extents = self.all.extents.borrow_mut();
        if let Some(at) = extents.iter().position(|extent| *extent == self.extent) {
            extents.swap_remove(at);
        }
        drop(extents);
        self.all.ended.notify_all();
    }
}

impl Front {
    /// Sends a request where requests go at the moment.
    fn send(
        attachment: &LogAttachment<Keeper>,
        base: &Rc<Base>,
        store: &ImageStore,
        request: BlockRequest,
    ) -> LocalFuture<Result<BlockReply>> {
        let device = attachment.device();
        let past = std::ptr::addr_eq(Rc::as_ptr(&device), Rc::as_ptr(base));
        if past && store.record.borrow().log.is_some() && !store.storing.get() {
            let text = format!("{} goes past the log that the record names", describe(&request));
            store.violation.borrow_mut().get_or_insert(text);
        }
        device.submit(request)
    }
}

impl BlockDevice for Front {
    fn geometry(&self) -> Geometry {
        self.base.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let (attachment, base, store) = (self.attachment.clone(), self.base.clone(), self.store.clone());
        let change = request.extent().filter(|_| request.is_write());
        let in_flight = self.in_flight.clone();
        Box::pin(async move {
            // What a handle says that does not know its record, a log that ends, or an image's store that is away.
            let passing = |kind| matches!(kind, ErrorKind::TimedOut | ErrorKind::Busy | ErrorKind::ShuttingDown);
            let told = |error: Error| if passing(error.kind()) { ErrorKind::Io.into() } else { error };
            let _entered = match change {
                Some(extent) => Some(in_flight.enter(extent).await),
                None => None,
            };
            Self::send(&attachment, &base, &store, request).await.map_err(told)
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.attachment.device().map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Everything that a process has of the volume.
struct Process {
    attachment: Rc<LogAttachment<Keeper>>,
    front: Rc<Front>,
    fail_ppm: Rc<Cell<u32>>,
}

struct Lives {
    world: World,
    rng: Rng,
    size: u64,
    store: Rc<ImageStore>,
    oracles: Oracles,
    load: BlockLoad,
    version: Rc<Cell<u64>>,
    /// The log devices fail.
    logs_fail: bool,
    tally: AttachmentTally,
}

impl Lives {
    fn new(world: World, seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xa77a_c4ed);
        let size = *rng.pick(&[64 << 10, 256 << 10]);
        let load = BlockLoad { requests: rng.range(40..160) as usize, ..BlockLoad::draw(&mut rng, size) };
        let oracles = Oracles::new(&world, size, Expected { io: true, ..Expected::nothing() });
        let logs_fail = rng.one_in(6);
        Self {
            world,
            rng,
            size,
            store: Rc::default(),
            oracles,
            load,
            version: Rc::default(),
            logs_fail,
            tally: AttachmentTally { runs: 1, ..AttachmentTally::default() },
        }
    }

    fn all(&mut self) -> std::result::Result<AttachmentTally, String> {
        self.world.add_disk(BACKEND, self.size, 4096);
        for device in DEVICES {
            self.world.add_disk(device, (1 << 20) + 4 * LOG_SIZE, 512);
        }
        for life in 0..self.rng.range(1..5) {
            let crash = self.rng.one_in(3).then(|| 1 + self.rng.below(400));
            self.world.crash_at_point(crash.map(|offset| self.world.points() + offset));
            let reactor = self.world.reactor();
            let world = self.world.clone();
            let ran = world.run(&reactor, self.live());
            self.world.crash_at_point(None);
            match ran {
                Ok(result) if !self.world.is_off() => result.map_err(|error| format!("life {life}: {error:?}"))?,
                Ok(_) | Err(Stop::Crash(_)) => {}
                Err(stop) => return Err(format!("life {life}: {stop}")),
            }
            let kind = if self.rng.coin() { CrashKind::Power } else { CrashKind::Kill };
            self.crash(reactor, kind)?;
        }
        self.end()?;
        self.tally.requests = self.load.seen.answered.get();
        self.tally.stored_unsaid = self.store.stored_unsaid.get();
        Ok(self.tally)
    }

    fn crash(&mut self, reactor: forebay_reactor::Reactor, kind: CrashKind) -> std::result::Result<(), String> {
        for path in DEVICES.into_iter().chain([BACKEND]) {
            self.world.set_disk_faults(path, None);
        }
        self.world.crash(reactor, kind);
        self.store.storing.set(false);
        self.oracles.crash(kind, self.store.early_off.take());
        self.tally.crashes += 1;
        self.violation()?;
        self.oracles.check_backend()
    }

    fn violation(&self) -> std::result::Result<(), String> {
        if let Some(text) = &*self.store.violation.borrow() {
            return Err(text.clone());
        }
        self.oracles.violation()
    }

    async fn open(&mut self) -> Result<Process> {
        let record = Rc::new(Record::default());
        record.size.set(self.size);
        // Hosts may be served without a log at any time.
        record.released.set(true);
        let underway = Rc::<Underway>::default();
        let base = Rc::new(Base { inner: Backend::open(record)?, underway: underway.clone() });
        let fail_ppm = Rc::new(Cell::new(0));
        let keeper = Rc::new(Keeper {
            world: self.world.clone(),
            store: self.store.clone(),
            underway,
            shelves: Rc::default(),
            rng: Rc::new(RefCell::new(self.rng.fork())),
            fail_ppm: fail_ppm.clone(),
        });
        let attachment = Rc::new(LogAttachment::open(keeper, base.clone()).await?);
        self.store.attachment.replace(Rc::downgrade(&attachment));
        let front = Rc::new(Front {
            attachment: attachment.clone(),
            base,
            store: self.store.clone(),
            in_flight: Rc::default(),
        });
        Ok(Process { attachment, front, fail_ppm })
    }

    fn watched(&self, front: &Rc<Front>) -> Rc<dyn BlockDevice> {
        self.oracles.watch(front.clone(), false)
    }

    async fn live(&mut self) -> Result<()> {
        let late = |what: &str| Error::new(ErrorKind::TimedOut, format!("{what} takes longer than {PATIENCE:?}"));
        let mut process = self.open().await?;
        self.oracles.verify(&*process.front, self.load.span).await?;
        self.let_logs_fail(self.logs_fail);
        for _ in 0..self.rng.range(1..4) {
            process.fail_ppm.set(*self.rng.pick(&[0, 0, 100_000, 400_000]));
            let watched = self.watched(&process.front);
            let (load, blocks, version) = (self.load.clone(), self.oracles.blocks.clone(), self.version.clone());
            let mut rng = self.rng.fork();
            let load = spawn(async move { load.run_on(watched, blocks, version, &mut rng).await });
            for _ in 0..self.rng.range(1..8) {
                sleep(Duration::from_nanos(self.rng.below(4 * MILLI))).await;
                timeout(PATIENCE, self.change(&process)).await.map_err(|_| late("a change of the log"))??;
            }
            process.fail_ppm.set(0);
            self.world.set_disk_faults(BACKEND, None);
            timeout(PATIENCE, load).await.map_err(|_| late("the load"))?;
            if self.violation().is_err() || self.world.is_off() {
                return Ok(());
            }
            process = timeout(PATIENCE, self.reopen(process)).await.map_err(|_| late("opening it again"))??;
        }
        Ok(())
    }

    /// Does one thing to the log.
    async fn change(&mut self, process: &Process) -> Result<()> {
        let attachment = &process.attachment;
        let (what, result) = match self.rng.below(8) {
            0..4 => {
                let place = Place {
                    device: DEVICES[usize::from(self.rng.one_in(4))],
                    age_max: *self.rng.pick(&[Duration::ZERO, Duration::from_millis(5), Duration::from_secs(60)]),
                    persist: if self.rng.one_in(4) { Persist::OnFlush } else { Persist::OnWrite },
                };
                let result = attachment.attach(&place).await;
                self.tally.attached += u64::from(result.is_ok());
                (format!("attach {place:?}"), result)
            }
            4..6 => {
                let had = attachment.log().is_some();
                let result = attachment.end(STALL).await;
                self.tally.ended += u64::from(had && result.is_ok());
                ("end".to_owned(), result)
            }
            6 => ("settle".to_owned(), attachment.settle().await),
            _ => {
                let gone = self.rng.coin();
                let faults = DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() };
                self.world.set_disk_faults(BACKEND, gone.then_some(faults));
                self.tally.outages += u64::from(gone);
                ("the backend's state".to_owned(), Ok(()))
            }
        };
        self.world.note(|| format!("{what}: {result:?}"));
        let Err(error) = result else { return Ok(()) };
        self.tally.refused += 1;
        match error.kind() {
            // No other client has the image open, and nothing is damaged.
            ErrorKind::Fenced | ErrorKind::Corrupt | ErrorKind::NotFound => {
                Err(Error::new(error.kind(), format!("{what}: {error}")))
            }
            _ => Ok(()),
        }
    }

    /// Closes the log as it is, and opens the volume again: everything that was answered is there.
    async fn reopen(&mut self, process: Process) -> Result<Process> {
        // A handle that does not know its record refuses this, and is as good as closed.
        let flushed = self.watched(&process.front).submit(BlockRequest::Flush).await;
        let Process { attachment, front, .. } = process;
        let closed = attachment.close().await;
        drop((attachment, front));
        self.let_logs_fail(false);
        let process = self.open().await?;
        self.tally.reopened += 1;
        if flushed.is_ok() || closed.is_ok() {
            let watched = self.watched(&process.front);
            let mut offset = 0;
            while offset < self.load.span {
                let len = (16 << 10).min(self.load.span - offset);
                watched.submit(BlockRequest::Read(Extent::new(offset, len))).await?;
                offset += len;
            }
        }
        self.let_logs_fail(self.logs_fail);
        Ok(process)
    }

    fn let_logs_fail(&self, fail: bool) {
        let faults = DiskFaults { write_error_ppm: 20_000, sync_error_ppm: 20_000, ..DiskFaults::none() };
        for device in DEVICES {
            self.world.set_disk_faults(device, fail.then(|| faults.clone()));
        }
    }

    /// Once more in peace: everything is there, is written back, and is on the backend alone.
    fn end(&mut self) -> std::result::Result<(), String> {
        let reactor = self.world.reactor();
        let world = self.world.clone();
        let ran = world.run(&reactor, async {
            let process = self.open().await?;
            self.oracles.verify(&*process.front, self.load.span).await?;
            process.attachment.end(STALL).await?;
            if let Some(log) = &self.store.record.borrow().log {
                return Err(Error::new(ErrorKind::Invalid, format!("the record still names a log at {}", log.place)));
            }
            self.oracles.verify_backend(&process.front.base.inner, self.load.span).await
        });
        ran.map_err(|stop| stop.to_string())?.map_err(|error| format!("the last life: {error:?}"))?;
        self.crash(reactor, CrashKind::Power)
    }
}
