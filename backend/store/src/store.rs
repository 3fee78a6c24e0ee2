//! Store opening and closing, and the maintenance task.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{BackendInfo, Error, ErrorKind, Result, Usage};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, JoinHandle, OpenOptions, random, spawn};

use crate::cache::{Cache, CacheStats};
use crate::columns::{
    ColumnCounters, ColumnSet, DeviceSetOptions, DeviceStatus, fill_devices, init_devices, move_columns,
};
use crate::core::Core;
use crate::crypt::{KeyStatus, MasterKey};
use crate::device::StoreDevice;
use crate::features::write_superblock;
use crate::format::anchor::Anchor;
use crate::format::superblock::StoreSuperblock;
use crate::format::{BLOCK, BLOCK64};
use crate::log::StoreLog;
use crate::maintenance::maintain;
use crate::media::Media;
use crate::occupant;
use crate::ranges;
use crate::recover::{FoundSuperblock, Replay, read_anchor, read_superblock, read_table};
use crate::scrub::ScrubStatus;
use crate::segments::{LiveTable, SegmentGeometry, Segments};

/// Checkpoint numbers skipped after durable data was discarded. More than can have been discarded with it, and even, so
/// that the next checkpoint uses the other slot.
const GENERATIONS_SKIPPED: u64 = 1 << 32;
/// Batch numbers skipped after durable data was discarded. More than can have been discarded, so that no discarded
/// batch implies the loss of a later one.
const BATCHES_SKIPPED: u64 = 1 << 40;
/// Number of tasks of the log, which are the first ones of a store.
const LOG_TASKS: usize = 2;

/// Options for opening a store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Name of the pool.
    pub pool: String,
    /// Memory for metadata, in bytes: map pages, tree nodes, changes not yet stored.
    pub metadata_cache: usize,
    /// Memory for the data cache, in bytes: recently read or written blocks.
    pub data_cache: usize,
    /// Set to return the space of free segments to the file system or device (punch holes).
    pub punch_free: bool,
    /// Set to open the store read-only, for checking and inspecting a store.
    pub read_only: bool,
    /// Set to open the store even if its newest checkpoint is damaged and the previous one lacks durable data, or if
    /// the log is damaged before its end. Data acknowledged since then is lost.
    pub roll_back: bool,
    /// Set to open a store on several devices although those that are missing may have continued without the others.
    pub accept_missing: bool,
    /// Bytes a second that filling a device and scrubbing may read; 0 for no limit.
    pub repair_rate: u64,
    /// Master key, which the keys of encrypted volumes are wrapped by.
    pub master_key: Option<MasterKey>,
    /// Set to open a store with encrypted volumes without its master key: they can be neither read nor written.
    pub without_master_key: bool,
    /// Threads that compress long writes; with 0, the reactor does.
    pub compression_threads: usize,
}

/// Default of [`StoreOptions::repair_rate`].
const REPAIR_RATE: u64 = 256 << 20;

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            pool: "local".into(),
            metadata_cache: 60 << 20,
            data_cache: 256 << 20,
            punch_free: true,
            read_only: false,
            roll_back: false,
            accept_missing: false,
            repair_rate: REPAIR_RATE,
            master_key: None,
            without_master_key: false,
            compression_threads: 0,
        }
    }
}

/// Place of a store: a file or block device, or several.
#[derive(Clone, Copy)]
pub(crate) enum StorePlace<'a> {
    /// File or block device.
    One(&'a Path),
    /// Several files or devices.
    Several { paths: &'a [PathBuf], uuid: Option<[u8; 16]>, accept_missing: bool },
}

impl StorePlace<'_> {
    /// Opens the store.
    pub(crate) async fn open(self, options: StoreOptions) -> Result<Rc<Store>> {
        match self {
            Self::One(path) => Store::open(path, options).await,
            Self::Several { paths, uuid, accept_missing } => {
                Store::open_devices(paths, uuid, StoreOptions { accept_missing, ..options }).await
            }
        }
    }
}

/// Store statistics: counters and gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StoreStats {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes stored, including metadata.
    pub used: u64,
    /// Number of objects.
    pub objects: u64,
    /// Bytes of the device that the segments occupy.
    pub device_size: u64,
    /// Segment size in bytes.
    pub segment_size: u64,
    /// Number of segments.
    pub segments: u32,
    /// Number of free segments.
    pub segments_free: u32,
    /// Approximate memory use of metadata, in bytes.
    pub metadata_bytes: u64,
    /// Bytes written by users since the store was created.
    pub user_bytes: u64,
    /// Bytes written to the device since the store was created.
    pub device_bytes: u64,
    /// Bytes moved by the cleaner since the store was opened.
    pub cleaned_bytes: u64,
    /// Checkpoints since the store was opened.
    pub checkpoints: u64,
    /// Map pages read since the store was opened.
    pub page_loads: u64,
    /// Stored index pairs scanned by range lookups since the store was opened.
    pub pairs_looked_at: u64,
    /// Checksum errors found since the store was opened.
    pub checksum_errors: u64,
    /// Bytes of mapped blocks that are stored compressed.
    pub compressed_logical: u64,
    /// Bytes that they take on the device, which `used` includes.
    pub compressed_stored: u64,
    /// Data cache statistics.
    pub cache: CacheStats,
    /// Result of the log replay at opening.
    pub replay: Replay,
}

/// Checkpoint that a store is opened from.
pub(crate) struct StartingPoint {
    /// Anchor of the checkpoint.
    pub anchor: Anchor,
    /// Set if a newer checkpoint may have been lost.
    pub anchor_lost: bool,
    /// Set if durable data is discarded that opening does not detect.
    pub given_up: bool,
}

/// Open store: a pool of objects in a file or on a block device.  See
/// [`ObjectBackend`](forebay_block::ObjectBackend).
pub struct Store {
    pub(crate) core: Rc<Core>,
    pub(crate) info: BackendInfo,
    replay: Replay,
    tasks: RefCell<Vec<JoinHandle<()>>>,
    /// Result of the first close.
    closed: RefCell<Option<Result<()>>>,
    /// Signals that `closed` is set.
    close_ended: Notify,
    /// Location and description of durable data that was lost at opening.
    pub(crate) lost: Option<(&'static str, String)>,
    /// Set if one copy of the superblock was damaged at opening.
    one_superblock: Cell<bool>,
}

impl Store {
    /// Opens a store and recovers it.
    ///
    /// `NotFound` if the file does not exist, `Busy` if it is already open elsewhere, `Invalid` if it is not a store,
    /// `Unsupported` if a newer version created it, `Corrupt` if structures needed for opening are damaged.
    pub async fn open(path: impl AsRef<Path>, options: StoreOptions) -> Result<Rc<Self>> {
        let path = path.as_ref();
        let how = if options.read_only { OpenOptions::read() } else { OpenOptions::read_write() };
        let file = open_file(path, how.direct().lock()).await?;
        let FoundSuperblock { superblock, one_damaged, features_differ, .. } = match read_superblock(&file).await {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::Invalid => {
                return Err(match occupant::look(&file).await {
                    Ok(found) => occupant::explain(&file, error, found),
                    Err(_) => error,
                });
            }
            Err(error) => return Err(error),
        };
        if features_differ && !options.read_only {
            write_superblock(&file, &superblock).await?;
        }
        let (anchor, unreadable) = read_anchor(&file, superblock.store_number()).await?;
        let from = StartingPoint { anchor, anchor_lost: unreadable.is_some(), given_up: false };
        if superblock.device.is_some() {
            let text =
                format!("{} is one device of a store on several; open the store with all of them", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let store = Self::open_at(StoreDevice::Single(file), superblock, from, options).await?;
        store.one_superblock.set(one_damaged);
        Ok(store)
    }

    /// Creates a store on several devices; calls `progress` with (bytes allocated, bytes in total). Returns its UUID.
    ///
    /// # Errors
    /// Those of [`init`](Self::init); `Invalid` for columns, sizes, or a number of devices that no store has.
    pub async fn init_devices(
        paths: &[PathBuf],
        options: &DeviceSetOptions,
        progress: impl FnMut(u64, u64),
    ) -> Result<[u8; 16]> {
        init_devices(paths, options, progress).await
    }

    /// Opens a store on several devices and recovers it. `uuid` is that of the store, if known.  Devices that are missing
    /// are recorded as away; those that come back are filled with what they lack.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); `Io` if more devices are gone than parity allows, or if those that are there may be
    /// out of date.
    pub async fn open_devices(paths: &[PathBuf], uuid: Option<[u8; 16]>, options: StoreOptions) -> Result<Rc<Self>> {
        let opened = ColumnSet::open(paths, uuid, options.read_only, options.accept_missing).await?;
        let from = StartingPoint { anchor: opened.anchor, anchor_lost: opened.anchor_lost, given_up: false };
        let store = Self::open_at(StoreDevice::Columns(opened.set), opened.superblock, from, options).await?;
        store.one_superblock.set(opened.one_superblock);
        Ok(store)
    }

    /// Opens a store from a given checkpoint.
    pub(crate) async fn open_at(
        device: StoreDevice,
        superblock: StoreSuperblock,
        from: StartingPoint,
        options: StoreOptions,
    ) -> Result<Rc<Self>> {
        let StartingPoint { anchor, anchor_lost, given_up } = from;
        let shown = device.name();
        if let Some(file) = device.file() {
            reject_truncated(file, &superblock)?;
        }
        let core = open_core(device, superblock, &anchor, &options).await?;
        core.load_keys(options.master_key.as_ref(), options.without_master_key).await?;
        core.index.look_for_lost_keys().await;
        core.load_policies().await?;
        core.load_segment_uses().await?;
        let (replay, gap) = core.replay(&anchor, anchor_lost).await?;
        if replay.batches > 0 {
            tracing::info!("recovered {shown}: replayed {} batches, {} bytes", replay.batches, replay.bytes);
        }
        let lost = if anchor_lost { core.find_lost(&replay, &anchor, core.store_id()).await? } else { None };
        let lost = lost.map(|batch| {
            format!(
                "{shown}: the newest checkpoint is damaged, and checkpoint {} before it does not have all that was durable: \
                 batch {} of the log, at byte {}, comes after what can be recovered (up to batch {})",
                anchor.generation,
                batch.seq,
                batch.block * BLOCK64,
                replay.next_seq.saturating_sub(1)
            )
        });
        // The checkpoint takes precedence; either is sufficient.
        let lost = lost.map(|text| ("the newest checkpoint", text)).or(gap.map(|text| ("the log", text)));
        if let Some((_, text)) = &lost {
            if !options.roll_back {
                let how = "`forebay store check --rebuild` searches the log for the checkpoint; `--roll-back` discards \
                           everything from there on";
                return Err(Error::new(ErrorKind::Corrupt, format!("{text}; {how}")));
            }
            tracing::error!("{text}; discarding it, because rolling back was requested");
        }
        let mut first_seq = replay.next_seq.max(1) + core.batches_in_flight_at_crash(&anchor);
        if lost.is_some() || given_up {
            // Discarded checkpoints and batches must not be taken for newer ones.
            core.checkpoints.skip_generations(GENERATIONS_SKIPPED);
            first_seq += BATCHES_SKIPPED;
        }
        let store = Rc::new(Self {
            info: BackendInfo {
                pool: options.pool.clone(),
                kind: "store",
                object_size_max: crate::format::onode::OBJECT_SIZE_MAX,
                preferred_io: BLOCK as u32,
                durable_at_once: false,
            },
            core,
            replay,
            tasks: RefCell::default(),
            closed: RefCell::default(),
            close_ended: Notify::new(),
            lost,
            one_superblock: Cell::new(false),
        });
        if !options.read_only {
            store.start(&anchor, first_seq, &options).await?;
        }
        Ok(store)
    }

    /// Starts a new log epoch at batch `first_seq`, and starts the tasks.
    async fn start(&self, anchor: &Anchor, first_seq: u64, options: &StoreOptions) -> Result<()> {
        let core = &self.core;
        // Differs from all earlier epochs, including one of an opening interrupted by a crash.
        let epoch = random() | 1;
        let epoch = if epoch == anchor.epoch { epoch ^ 2 } else { epoch };
        core.checkpoints.begin_epoch(epoch);
        let host = core.space.host().cloned();
        let log = StoreLog::new(
            core.media.device.clone(),
            core.store_id(),
            epoch,
            core.segments.clone(),
            first_seq,
            host.clone(),
        )?;
        if let Some(host) = &host {
            host.start().await;
        }
        core.attach_log(log.clone());
        core.store_features().await?;
        core.checkpoint(false).await?;
        let mut tasks = self.tasks.borrow_mut();
        tasks.push(spawn(StoreLog::tick(Rc::downgrade(&log))));
        tasks.push(spawn(StoreLog::close_early(Rc::downgrade(&log))));
        // Space that was preallocated on purpose stays allocated.
        let punch = options.punch_free && !host.is_some_and(|host| host.is_whole());
        tasks.push(spawn(maintain(core.clone(), punch)));
        tasks.push(spawn(crate::snaps::trim(core.clone())));
        tasks.push(spawn(crate::scrub::scrub_when_wanted(core.clone(), options.repair_rate)));
        if core.media.device.columns().is_some() {
            tasks.push(spawn(fill_devices(core.clone(), options.repair_rate)));
            tasks.push(spawn(move_columns(core.clone(), options.repair_rate)));
        }
        Ok(())
    }

    /// Writes a final checkpoint and closes the store.  Later requests fail with `ShuttingDown`; a second close returns
    /// the result of the first.
    ///
    /// Errors of the device: data that was not durable before may be lost.  The device is released in any case when the
    /// store is dropped.
    pub async fn close(&self) -> Result<()> {
        let core = &self.core;
        if core.read_only {
            return Ok(());
        }
        if !core.maintenance.begin_closing() {
            // Another task is already closing the store.
            self.close_ended.wait_until(|| self.closed.borrow().is_some()).await;
            return self.closed.borrow().clone().unwrap_or(Ok(()));
        }
        let ended = EndOfClose(self);
        let closed = self.close_once().await;
        *self.closed.borrow_mut() = Some(closed.clone());
        drop(ended);
        closed
    }

    /// Closes the store like [`close`](Self::close), and does some work in between: after all tasks and transactions
    /// have ended, and before the final checkpoint. If the work fails, the state stays that of a crash.
    pub(crate) async fn close_after<T>(&self, work: impl AsyncFnOnce(&Rc<Core>) -> Result<T>) -> Result<T> {
        let first = self.core.maintenance.begin_closing();
        assert!(first && !self.core.read_only, "a store that is open for writing, and not closing");
        let ended = EndOfClose(self);
        self.end_tasks().await;
        let done = work(&self.core).await?;
        self.core.checkpoint(true).await?;
        *self.closed.borrow_mut() = Some(Ok(()));
        drop(ended);
        Ok(done)
    }

    async fn close_once(&self) -> Result<()> {
        self.end_tasks().await;
        self.core.checkpoint(true).await
    }

    async fn end_tasks(&self) {
        let tasks = self.tasks.take();
        // Those of the log end with it; the others check that the store is closing.
        for task in tasks.into_iter().skip(LOG_TASKS) {
            task.await;
        }
        self.core.queues.wait_idle().await;
    }

    /// Returns the statistics of the store.
    pub fn stats(&self) -> StoreStats {
        let core = &self.core;
        let segments = core.segments.borrow();
        let appended = core.log_bytes().appended;
        StoreStats {
            capacity: core.space.capacity(),
            used: segments.live_bytes(),
            objects: core.counters.objects(),
            device_size: core.current_superblock().device_size(),
            segment_size: segments.geometry.segment_size,
            segments: segments.geometry.segment_count,
            segments_free: segments.free_count(),
            metadata_bytes: core.metadata_bytes() as u64,
            user_bytes: core.counters.user_bytes(),
            device_bytes: core.counters.device_bytes(appended),
            cleaned_bytes: core.gc.cleaned_bytes(),
            checkpoints: core.checkpoints.completed(),
            page_loads: core.counters.page_loads(),
            pairs_looked_at: core.index.pairs_scanned(),
            checksum_errors: core.media.checksum_errors(),
            compressed_logical: core.blobs.logical(),
            compressed_stored: core.blobs.stored(),
            cache: core.media.cache.stats(),
            replay: self.replay,
        }
    }

    /// Returns the devices of a store on several devices; empty on one device.
    pub fn devices(&self) -> Vec<DeviceStatus> {
        self.core.media.device.columns().map(|set| set.status()).unwrap_or_default()
    }

    /// Returns data and parity columns of a store on several devices; `None` on one device.
    pub fn columns(&self) -> Option<(usize, usize)> {
        self.core.media.device.columns().map(|set| (set.data_columns(), set.parity_columns()))
    }

    /// Returns the counters of a store on several devices; zero on one device.
    pub fn column_counters(&self) -> ColumnCounters {
        self.core.media.device.columns().map(|set| set.counters()).unwrap_or_default()
    }

    /// Returns a sentence about devices that are away or being filled; `None` if there are none.
    pub fn degraded(&self) -> Option<String> {
        self.core.media.device.columns().and_then(|set| set.degraded())
    }

    /// Replaces device `number` with the file or device at `path`, which is filled in the background; the old one is used
    /// until then, if it is there. A path that holds that very device, which was away, takes it back.  Returns the number
    /// of the new device.
    ///
    /// # Errors
    /// `Unsupported` on one device; `NotFound` without such a device; `Busy` if it is being replaced or filled; those of
    /// creating a store on the new device.
    pub async fn replace_device(&self, number: u16, path: &Path, force: bool) -> Result<u16> {
        let set = self.core.media.device.columns().ok_or_else(|| {
            let text = format!("{} is on one device, without redundancy", self.core.media.device.name());
            Error::new(ErrorKind::Unsupported, text)
        })?;
        self.core.refuse_writes()?;
        let _permit = self.core.resizing.acquire(1).await;
        let new = set.replace(&self.core.current_superblock(), number, path, force).await?;
        self.core.renew_keys().await?;
        self.core.maintenance.want_repair();
        Ok(new)
    }

    /// Starts to read and verify everything that is stored, in the background, or goes on with that. Blocks that are wrong
    /// are reconstructed and written again, as far as parity allows.
    ///
    /// # Errors
    /// When the store rejects writes.
    pub fn start_scrub(&self) -> Result<()> {
        self.core.refuse_writes()?;
        self.core.scrub.want();
        self.core.maintenance.want_repair();
        Ok(())
    }

    /// Returns the progress and the results of the current scrub, or of the last one.
    pub fn scrub_status(&self) -> ScrubStatus {
        self.core.scrub.status(&self.core)
    }

    /// Returns the state of the keys of encrypted volumes.
    pub fn key_status(&self) -> KeyStatus {
        self.core.volume_keys.status()
    }

    /// Wraps the keys of all encrypted volumes by another master key, durably; data is not written again. The store is
    /// opened with that one from then on.
    ///
    /// # Errors
    /// `Denied` if the store was opened without its current master key; errors of the device.
    pub async fn rotate_master_key(&self, master: &MasterKey) -> Result<KeyStatus> {
        self.core.rotate_master_key(master).await
    }

    /// Returns the UUID of the store.
    pub fn uuid(&self) -> [u8; 16] {
        self.core.superblock.uuid
    }

    pub(crate) fn usage(&self) -> Usage {
        let core = &self.core;
        let used = core.segments.borrow().live_bytes();
        let available = core.space.available().min(core.space.host_space(core.log_bytes(), u64::MAX));
        Usage { capacity: core.space.capacity(), used, available, objects: core.counters.objects() }
    }

    /// Returns a description of damage that the store was opened with, and the repair procedure; `None` if there is
    /// none.
    pub fn needs_repair(&self) -> Option<String> {
        let text = "one copy of the superblock is damaged; stop the daemon and run `forebay store check --repair`";
        let superblock = self.one_superblock.get().then(|| text.to_owned());
        let texts: Vec<String> = superblock.into_iter().chain(self.degraded()).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// Returns the reason why the store rejects writes, if it does: its device failed, it is read-only, or it is
    /// closing.
    pub fn refuses_writes(&self) -> Option<Error> {
        self.core.refuse_writes().err()
    }

    /// Returns the bytes that the store itself could still accept, if its file system has less space; `None` if the
    /// file system is not the limit.
    pub fn limited_by_host(&self) -> Option<u64> {
        let core = &self.core;
        let available = core.space.available();
        (core.space.host_space(core.log_bytes(), u64::MAX) < available).then_some(available)
    }
}

/// Wakes later callers of close, also if the first close is cancelled.
struct EndOfClose<'a>(&'a Store);

impl Drop for EndOfClose<'_> {
    fn drop(&mut self) {
        let cut_short = || Err(Error::new(ErrorKind::ShuttingDown, "closing the store was cut short"));
        self.0.closed.borrow_mut().get_or_insert_with(cut_short);
        self.0.close_ended.notify_all();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Not closed cleanly: the state is that of a crash, but no tasks continue.
        self.core.maintenance.begin_closing();
        if let Some(log) = self.core.attached_log().filter(|_| !matches!(*self.closed.borrow(), Some(Ok(())))) {
            log.abandon();
        }
    }
}

/// Opens a file or block device, or a named range of one: `DEV#NAME`. A file whose name is literally that comes first.
pub(crate) async fn open_file(path: &Path, options: OpenOptions) -> Result<File> {
    match File::open_when_free(path, options).await {
        Ok(file) => Ok(file),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ranges::open_range(path, options).await?.ok_or_else(|| open_error(error, path))
        }
        Err(error) => Err(open_error(error, path)),
    }
}

/// Describes an error of opening a file or device.
pub(crate) fn open_error(error: std::io::Error, path: &Path) -> Error {
    let shown = path.display();
    match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            Error::new(ErrorKind::Busy, format!("{shown} is in use by another process (or this one)"))
        }
        std::io::ErrorKind::ResourceBusy => {
            let text = format!("{shown} is in use: mounted, a swap area, or part of a RAID or a volume group");
            Error::new(ErrorKind::Busy, text)
        }
        std::io::ErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, format!("{shown} is not there; `forebay store init` makes a store"))
        }
        _ => Error::from_io(error, format!("opening {shown}")),
    }
}

/// Rejects a file or device that is smaller than its store (truncated).
pub(crate) fn reject_truncated(file: &File, superblock: &StoreSuperblock) -> Result<()> {
    let (size, expected) = (file.info().size, superblock.device_size());
    if size >= expected {
        return Ok(());
    }
    let text = format!("{}: {size} bytes, but its superblock says {expected}; it was cut short", file.path().display());
    Err(Error::new(ErrorKind::Corrupt, text))
}

async fn open_core(
    device: StoreDevice,
    superblock: StoreSuperblock,
    anchor: &Anchor,
    options: &StoreOptions,
) -> Result<Rc<Core>> {
    let geometry = SegmentGeometry::of(&superblock);
    let empty = Segments::new(geometry, LiveTable::new(geometry.segment_count));
    let segments = Rc::new(RefCell::new(empty));
    let cache = Cache::new(options.data_cache);
    let (number, threads) = (superblock.store_number(), options.compression_threads);
    let media = Rc::new(Media::new(device, number, segments.clone(), cache, threads));
    let table = read_table(&media, anchor, &geometry).await?;
    *segments.borrow_mut() = Segments::new(geometry, table);
    if let Some(holder) = geometry.segment_of_byte(anchor.segments.addr).filter(|_| !anchor.segments.is_none()) {
        segments.borrow_mut().claim(holder);
    }
    Ok(Rc::new(Core::new(superblock, anchor, media, segments, options.metadata_cache, options.read_only)))
}
