//! The cache: lookups in both layers, and reads from the backend that all waiting requests share.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::ready;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Buf, BufList, BufMut, Error, ErrorKind, Extent, HeadGeneration, LocalFuture, Result, SnapshotCache, SnapshotFetch,
    SnapshotRead, SparseData, is_zero,
};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{Instant, JoinHandle, now, spawn, timeout};

use crate::disk::{Disk, DiskPart};
use crate::flags::ZeroFlags;
use crate::flight::PartFlight;
use crate::format::{CacheGeometry, PART_LEN, PARTS_MAX};
use crate::own_blocks::OwnBlocks;
use crate::part::{ABSENT, Part, PartKey, SnapshotSource, SnapshotSources};
use crate::s3fifo::S3Fifo;
use crate::stats::{CacheDiskCounters, DiskState, ReadCacheCounters, ReadCacheStats};
use crate::writer::write_queued;

/// Parts of one read from the backend, at most: 4 MiB.
const RUN_MAX: usize = 64;
/// Parts that are read from the backend or from disk at the same time, at most: 64 MiB.
const READING_MAX: usize = 1024;
/// Time to write what is queued when the cache is closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Options of the layer on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// File or block device; a file is created if it does not exist.
    pub path: PathBuf,
    /// Size in bytes, from [`DISK_SIZE_MIN`](crate::DISK_SIZE_MIN) to 64 TiB; of a block device at most its own.
    pub size: u64,
}

/// Options of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// Maximum bytes of parts in memory.
    pub memory: u64,
    /// Layer on disk, if there is one.
    pub disk: Option<DiskOptions>,
}

/// Read cache of snapshot parents, and of own blocks of images that ask for it. It belongs to one core, that of the images.
pub struct ReadCache {
    shared: Rc<CacheShared>,
}

/// State that reads in flight and generations of own blocks share with the cache.
pub(crate) struct CacheShared {
    options: CacheOptions,
    begun: Instant,
    sources: SnapshotSources,
    memory: RefCell<S3Fifo<PartKey, Buf>>,
    flags: ZeroFlags,
    disk: RefCell<DiskSlot>,
    /// Parts that are being read, from disk or from the backend.
    flights: RefCell<HashMap<PartKey, Rc<PartFlight>>>,
    /// Permits to read parts.
    reading: Semaphore,
    /// Permit to clear.
    clearing: Semaphore,
    pub(crate) counters: ReadCacheCounters,
    disk_counters: Rc<CacheDiskCounters>,
}

/// Layer on disk.
enum DiskSlot {
    None,
    /// Could not be opened, for this reason.
    Off(String),
    Open {
        disk: Rc<Disk>,
        writer: Option<JoinHandle<()>>,
    },
}

/// Result of a lookup.
enum Lookup {
    Found(Part),
    /// Being read, for another reader if it was joined.
    Wait {
        flight: Rc<PartFlight>,
        joined: bool,
    },
}

/// Adjacent parts that are missing, and are read from the backend at once.
struct MissingRun {
    parts: Vec<(PartKey, Rc<PartFlight>)>,
}

impl ReadCache {
    /// Opens a cache. A file that cannot be used costs a warning and the layer on disk, nothing else.
    pub async fn open(options: CacheOptions) -> Rc<Self> {
        let rows = options.disk.as_ref().and_then(|disk| CacheGeometry::of(disk.size)).map_or(0, |all| all.flag_rows);
        let shared = Rc::new(CacheShared {
            begun: now(),
            sources: SnapshotSources::default(),
            memory: RefCell::new(S3Fifo::new((options.memory / PART_LEN) as usize)),
            flags: ZeroFlags::new(rows),
            disk: RefCell::new(DiskSlot::None),
            flights: RefCell::default(),
            reading: Semaphore::new(READING_MAX),
            clearing: Semaphore::new(1),
            counters: ReadCacheCounters::default(),
            disk_counters: Rc::default(),
            options,
        });
        shared.open_disk().await;
        Rc::new(Self { shared })
    }

    /// Returns counters and gauges.
    pub fn stats(&self) -> ReadCacheStats {
        let shared = &self.shared;
        let (counters, on_disk) = (&shared.counters, &shared.disk_counters);
        let memory = shared.memory.borrow();
        let mut stats = ReadCacheStats {
            memory_capacity: memory.capacity() as u64 * PART_LEN,
            memory_bytes: memory.len() as u64 * PART_LEN,
            flags: shared.flags.len() as u64,
            path: shared.options.disk.as_ref().map(|disk| disk.path.clone()),
            parents: counters.parents.stats(),
            own: counters.own.stats(),
            invalidated: counters.invalidated.get(),
            fetch_errors: counters.fetch_errors.get(),
            evicted_memory: counters.evicted_memory.get(),
            evicted_disk: on_disk.evicted.get(),
            written: on_disk.written.get(),
            dropped: on_disk.dropped.get(),
            disk_errors: on_disk.errors.get(),
            checksum_errors: on_disk.checksum_errors.get(),
            stale: on_disk.stale.get(),
            ..ReadCacheStats::default()
        };
        match &*shared.disk.borrow() {
            DiskSlot::None => {}
            DiskSlot::Off(reason) => stats.disk = DiskState::Off(reason.clone()),
            DiskSlot::Open { disk, .. } => {
                stats.disk = disk.failure().map_or(DiskState::On, DiskState::Off);
                stats.path = Some(disk.path());
                stats.disk_capacity = u64::from(disk.geometry.data_rows) * PART_LEN;
                stats.disk_bytes = disk.index.borrow().len() as u64 * PART_LEN;
                stats.queued_bytes = disk.pending.borrow().len() as u64 * PART_LEN;
            }
        }
        stats
    }

    /// Forgets everything, also what is on disk. A disk that was turned off is opened again.
    ///
    /// # Errors
    /// Those of the disk. Nothing is in memory any more then, and the disk is turned off.
    pub async fn clear(&self) -> Result<()> {
        let shared = &self.shared;
        let _turn = shared.clearing.acquire(1).await;
        shared.forget();
        let disk = match &*shared.disk.borrow() {
            DiskSlot::Open { disk, .. } if disk.is_on() => Some(disk.clone()),
            _ => None,
        };
        match disk {
            Some(disk) => match disk.clear(&shared.flags).await {
                Ok(()) => Ok(()),
                Err(error) => {
                    disk.turn_off(format!("it could not be cleared: {error}"));
                    Err(Error::from_io(error, "clearing the read cache on disk"))
                }
            },
            None if shared.options.disk.is_some() => self.reopen().await,
            None => Ok(()),
        }
    }

    async fn reopen(&self) -> Result<()> {
        let shared = &self.shared;
        // The former file is closed with the last read of it; opening waits for that.
        *shared.disk.borrow_mut() = DiskSlot::None;
        shared.open_disk().await;
        let disk = match &*shared.disk.borrow() {
            DiskSlot::Open { disk, .. } => Ok(disk.clone()),
            DiskSlot::Off(reason) => Err(Error::new(ErrorKind::Io, format!("the read cache on disk: {reason}"))),
            DiskSlot::None => return Ok(()),
        }?;
        disk.clear(&shared.flags).await.map_err(|error| Error::from_io(error, "clearing the read cache on disk"))
    }

    /// Writes what is queued, for 2 s at most, and ends the use of the disk.
    pub async fn close(&self) {
        let shared = &self.shared;
        let (disk, writer) = match &mut *shared.disk.borrow_mut() {
            DiskSlot::Open { disk, writer } => (disk.clone(), writer.take()),
            DiskSlot::None | DiskSlot::Off(_) => return,
        };
        disk.closing.set(true);
        disk.changed.notify_all();
        if let Some(writer) = writer
            && timeout(CLOSE_PATIENCE, writer).await.is_err()
        {
            tracing::info!("read cache: closed before all of it was written");
        }
        disk.turn_off("closed".into());
    }
}

impl Drop for ReadCache {
    fn drop(&mut self) {
        if let DiskSlot::Open { disk, writer } = &mut *self.shared.disk.borrow_mut() {
            disk.turn_off("closed".into());
            if let Some(writer) = writer.take() {
                writer.abort();
            }
        }
    }
}

impl SnapshotCache for ReadCache {
    fn read(&self, read: SnapshotRead, fetch: SnapshotFetch) -> LocalFuture<Result<SparseData>> {
        let source = self.shared.sources.intern(&read.snapshot);
        self.shared.read(&source, read, fetch)
    }

    fn begin_generation(&self, image: &str) -> Option<Rc<dyn HeadGeneration>> {
        Some(Rc::new(OwnBlocks::new(self.shared.clone(), image)))
    }
}

impl CacheShared {
    /// Reads a range of an object of a source.
    pub(crate) fn read(
        self: &Rc<Self>,
        source: &SnapshotSource,
        read: SnapshotRead,
        fetch: SnapshotFetch,
    ) -> LocalFuture<Result<SparseData>> {
        let (extent, counters) = (read.extent, self.counters.of(source));
        if !is_cacheable(&read) {
            counters.bypassed.add(1);
            return fetch(extent);
        }
        if extent.len == 0 {
            return Box::pin(ready(Ok(SparseData::default())));
        }
        let now_ms = self.now_ms();
        let absent = absence_of(source, read.object);
        if !read.inherits && self.flags.is_set(&absent, now_ms) {
            counters.hits_zero.add(1);
            return Box::pin(ready(Err(not_found(&absent))));
        }
        let lookups = self.look_up_all(source, &read, &fetch, now_ms);
        let done = lookups.iter().all(|lookup| matches!(lookup, Lookup::Found(_)));
        let inherits = read.inherits;
        if done {
            let parts = lookups.into_iter().filter_map(|lookup| match lookup {
                Lookup::Found(part) => Some(part),
                Lookup::Wait { .. } => None,
            });
            counters.read_bytes.add(extent.len);
            return Box::pin(ready(assemble(extent, &parts.collect::<Vec<_>>(), &absent)));
        }
        let (shared, is_own) = (self.clone(), source.is_own());
        Box::pin(async move {
            let mut parts = Vec::with_capacity(lookups.len());
            for lookup in lookups {
                parts.push(match lookup {
                    Lookup::Found(part) => part,
                    Lookup::Wait { flight, joined } => {
                        let part = flight.wait().await;
                        // A write of another part, begun since, may have created the object.
                        let is_stale = is_own && matches!(part, Ok(Part::Absent));
                        if joined && (is_stale || !flight.holds_for(&part, inherits)) {
                            return fetch(extent).await;
                        }
                        part?
                    }
                });
            }
            shared.counters.of(&absent.source).read_bytes.add(extent.len);
            assemble(extent, &parts, &absent)
        })
    }

    /// Removes parts of an object of a source. Reads of them that are in flight are completed for those who wait, and nobody
    /// else: what they bring is not kept.
    pub(crate) fn invalidate(&self, source: &SnapshotSource, object: u64, parts: RangeInclusive<u32>) {
        let disk = self.disk();
        for part in parts {
            let key = PartKey { source: source.clone(), object, part };
            let in_memory = self.memory.borrow_mut().remove(&key).is_some();
            let was_zero = self.flags.remove(&key);
            self.flights.borrow_mut().remove(&key);
            let on_disk = disk.as_ref().is_some_and(|disk| disk.invalidate(&key));
            self.counters.invalidated.add((in_memory || was_zero || on_disk).into());
        }
    }

    /// Returns whether what a flight brings may be kept: not if its part was invalidated since it began.
    fn is_current(&self, key: &PartKey, flight: &Rc<PartFlight>) -> bool {
        self.flights.borrow().get(key).is_some_and(|current| Rc::ptr_eq(current, flight))
    }

    fn now_ms(&self) -> u32 {
        self.begun.elapsed().as_millis() as u32
    }

    async fn open_disk(self: &Rc<Self>) {
        let Some(DiskOptions { path, size }) = &self.options.disk else { return };
        let counters = self.disk_counters.clone();
        let opened = Disk::open(path, *size, counters, &self.sources, &self.flags, self.now_ms()).await;
        *self.disk.borrow_mut() = match opened {
            Ok(disk) => {
                let begun = self.begun;
                let writer = spawn(write_queued(disk.clone(), move || begun.elapsed().as_millis() as u32));
                DiskSlot::Open { disk, writer: Some(writer) }
            }
            Err(reason) => {
                tracing::warn!(path = %path.display(), "read cache: not on disk: {reason}");
                DiskSlot::Off(reason)
            }
        };
    }

    /// Returns the layer on disk while it is in use.
    fn disk(&self) -> Option<Rc<Disk>> {
        match &*self.disk.borrow() {
            DiskSlot::Open { disk, .. } if disk.is_on() => Some(disk.clone()),
            _ => None,
        }
    }

    fn forget(&self) {
        self.memory.borrow_mut().clear();
        self.flags.clear();
    }

    /// Looks up all parts of a read, and starts to read those that are missing.
    fn look_up_all(
        self: &Rc<Self>,
        source: &SnapshotSource,
        read: &SnapshotRead,
        fetch: &SnapshotFetch,
        now_ms: u32,
    ) -> Vec<Lookup> {
        let parts = parts_of(read.extent);
        let mut lookups = Vec::with_capacity(parts.clone().count());
        let mut run = MissingRun { parts: Vec::new() };
        for part in parts {
            let key = PartKey { source: source.clone(), object: read.object, part };
            if let Some(lookup) = self.look_up(&key, read, fetch, now_ms) {
                self.begin(&mut run, read, fetch);
                lookups.push(lookup);
                continue;
            }
            self.counters.of(source).misses.add(1);
            let flight = self.new_flight(&key, read);
            lookups.push(Lookup::Wait { flight: flight.clone(), joined: false });
            run.parts.push((key, flight));
            if run.parts.len() == RUN_MAX {
                self.begin(&mut run, read, fetch);
            }
        }
        self.begin(&mut run, read, fetch);
        lookups
    }

    /// Looks a part up in memory and on disk; `None` if it has to be read from the backend.
    fn look_up(
        self: &Rc<Self>,
        key: &PartKey,
        read: &SnapshotRead,
        fetch: &SnapshotFetch,
        now_ms: u32,
    ) -> Option<Lookup> {
        let (disk, counters) = (self.disk(), self.counters.of(&key.source));
        if let Some(data) = self.memory.borrow_mut().get(key, now_ms) {
            counters.hits_memory.add(1);
            if let Some(disk) = disk {
                disk.touch(key, now_ms);
            }
            return Some(Lookup::Found(Part::Data(data.clone())));
        }
        if self.flags.is_set(key, now_ms) {
            counters.hits_zero.add(1);
            return Some(Lookup::Found(Part::Zero));
        }
        if let Some(flight) = self.flights.borrow().get(key) {
            counters.hits_joined.add(1);
            return Some(Lookup::Wait { flight: flight.clone(), joined: true });
        }
        let disk = disk?;
        match disk.find(key, now_ms)? {
            DiskPart::Queued(data) => {
                counters.hits_memory.add(1);
                Some(Lookup::Found(Part::Data(data)))
            }
            DiskPart::Stored(row) => {
                let flight = self.new_flight(key, read);
                let (shared, key, read, fetch) = (self.clone(), key.clone(), read.clone(), fetch.clone());
                let lookup = Lookup::Wait { flight: flight.clone(), joined: false };
                drop(spawn(shared.read_stored(disk, row, key, flight, read, fetch)));
                Some(lookup)
            }
        }
    }

    fn new_flight(&self, key: &PartKey, read: &SnapshotRead) -> Rc<PartFlight> {
        let flight = PartFlight::new(read.inherits);
        self.flights.borrow_mut().insert(key.clone(), flight.clone());
        flight
    }

    /// Reads a part from disk, or from the backend if it is not there.
    async fn read_stored(
        self: Rc<Self>,
        disk: Rc<Disk>,
        row: u32,
        key: PartKey,
        flight: Rc<PartFlight>,
        read: SnapshotRead,
        fetch: SnapshotFetch,
    ) {
        let permit = self.reading.acquire(1).await;
        let stored = disk.read(&key, row).await;
        drop((permit, disk));
        match stored {
            Some(data) => {
                self.counters.of(&key.source).hits_disk.add(1);
                if self.is_current(&key, &flight) {
                    self.remember(&key, &data);
                }
                self.land(&key, &flight, Ok(Part::Data(data)));
            }
            None => {
                self.counters.of(&key.source).misses.add(1);
                self.fetch(vec![(key, flight)], read, fetch).await;
            }
        }
    }

    /// Starts to read a run of missing parts, and empties it.
    fn begin(self: &Rc<Self>, run: &mut MissingRun, read: &SnapshotRead, fetch: &SnapshotFetch) {
        if run.parts.is_empty() {
            return;
        }
        let parts = std::mem::take(&mut run.parts);
        drop(spawn(self.clone().fetch(parts, read.clone(), fetch.clone())));
    }

    /// Reads adjacent parts from the backend, and completes their flights.
    async fn fetch(self: Rc<Self>, parts: Vec<(PartKey, Rc<PartFlight>)>, read: SnapshotRead, fetch: SnapshotFetch) {
        let _permit = self.reading.acquire(parts.len()).await;
        let Some(first) = parts.first().map(|(key, _)| key.clone()) else { return };
        let extent = Extent::new(u64::from(first.part) * PART_LEN, parts.len() as u64 * PART_LEN);
        let counters = self.counters.of(&first.source);
        counters.fetches.add(1);
        match fetch(extent).await {
            Ok(data) => {
                counters.fetched_bytes.add(extent.len);
                for (key, flight) in parts {
                    let part = cut(&data, u64::from(key.part) * PART_LEN).map_or(Part::Zero, Part::Data);
                    if self.is_current(&key, &flight) {
                        self.add(&key, &part);
                    }
                    self.land(&key, &flight, Ok(part));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                // One that inherits data may be copied up at any time.
                if !read.inherits {
                    let absent = absence_of(&first.source, read.object);
                    self.flags.set(absent, self.disk().as_deref(), self.now_ms());
                }
                parts.iter().for_each(|(key, flight)| self.land(key, flight, Ok(Part::Absent)));
            }
            Err(error) => {
                self.counters.fetch_errors.add(1);
                parts.iter().for_each(|(key, flight)| self.land(key, flight, Err(error.clone())));
            }
        }
    }

    /// Completes a flight. What it brought is in the cache by now, so that nobody reads it a second time.
    fn land(&self, key: &PartKey, flight: &Rc<PartFlight>, result: Result<Part>) {
        if self.is_current(key, flight) {
            self.flights.borrow_mut().remove(key);
        }
        flight.land(result);
    }

    /// Adds a part to both layers.
    fn add(&self, key: &PartKey, part: &Part) {
        let disk = self.disk();
        match part {
            Part::Data(data) => {
                self.remember(key, data);
                if let Some(disk) = disk {
                    disk.store(key, data);
                }
            }
            Part::Zero => self.flags.set(key.clone(), disk.as_deref(), self.now_ms()),
            Part::Absent => {}
        }
    }

    /// Adds a part to the layer in memory.
    fn remember(&self, key: &PartKey, data: &Buf) {
        let mut memory = self.memory.borrow_mut();
        if let Some((evicted, _)) = memory.insert(key.clone(), data.clone(), self.now_ms())
            && evicted != *key
        {
            self.counters.evicted_memory.add(1);
        }
    }
}

/// Returns whether the objects can be divided into parts.
fn is_cacheable(read: &SnapshotRead) -> bool {
    let within = read.extent.checked_end().is_some_and(|end| end <= read.object_size);
    within
        && read.object_size.is_multiple_of(PART_LEN)
        && read.object_size > 0
        && read.object_size / PART_LEN <= u64::from(PARTS_MAX)
}

pub(crate) fn parts_of(extent: Extent) -> RangeInclusive<u32> {
    (extent.offset / PART_LEN) as u32..=((extent.end() - 1) / PART_LEN) as u32
}

/// Returns the key of the absence of an object.
fn absence_of(source: &SnapshotSource, object: u64) -> PartKey {
    PartKey { source: source.clone(), object, part: ABSENT }
}

fn not_found(key: &PartKey) -> Error {
    let identity = &key.source.0;
    let what = format!("object {} of image {} at snapshot {}", key.object, identity.image, identity.snap.0);
    Error::new(ErrorKind::NotFound, what)
}

/// Returns a copy of the part at `offset` of what was read; `None` if it is zero.
fn cut(data: &SparseData, offset: u64) -> Option<Buf> {
    let end = offset + PART_LEN;
    let mut part: Option<BufMut> = None;
    for (at, run) in &data.runs {
        let (from, to) = ((*at).max(offset), (at + run.len() as u64).min(end));
        if from >= to {
            continue;
        }
        let run = run.slice((from - at) as usize..(to - at) as usize);
        let part = part.get_or_insert_with(|| BufMut::zeroed(PART_LEN as usize));
        run.copy_to(&mut part[(from - offset) as usize..(to - offset) as usize]);
    }
    part.filter(|part| !is_zero(part)).map(BufMut::freeze)
}

/// Puts the bytes of a read together from its parts.
fn assemble(extent: Extent, parts: &[Part], absent: &PartKey) -> Result<SparseData> {
    let mut runs: Vec<(u64, BufList)> = Vec::new();
    for (number, part) in parts_of(extent).zip(parts) {
        let start = u64::from(number) * PART_LEN;
        let data = match part {
            Part::Absent => return Err(not_found(absent)),
            Part::Zero => continue,
            Part::Data(data) => data,
        };
        let (from, to) = (extent.offset.max(start), extent.end().min(start + PART_LEN));
        let data = data.slice((from - start) as usize..(to - start) as usize);
        match runs.last_mut() {
            Some((at, last)) if *at + last.len() as u64 == from => last.push(data),
            _ => runs.push((from, data.into())),
        }
    }
    Ok(SparseData { runs })
}
