//! Opening and closing a store, and the task that keeps it in shape.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BackendInfo, Error, ErrorKind, Result, Usage};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, JoinHandle, OpenOptions, random, sleep, spawn};

use crate::cache::{Cache, CacheStats};
use crate::checkpoint::store_id;
use crate::core::Core;
use crate::format::anchor::Anchor;
use crate::format::superblock::Superblock;
use crate::format::{BLOCK, BLOCK64};
use crate::host::Host;
use crate::log::Log;
use crate::media::Media;
use crate::object::ObjectCache;
use crate::occupant;
use crate::recover::{Replay, read_anchor, read_superblock, read_table};
use crate::segments::{Geometry, LiveTable, Segments};
use crate::tree::Tree;

/// After a checkpoint or a round of cleaning failed, the next try is this much later.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Free segments that are used next and keep their space in the file system.
const SEGMENTS_KEPT: usize = 64;

/// How a store is opened.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The pool's name.
    pub pool: String,
    /// Bytes of memory for metadata: map pages, tree nodes, changes not yet stored.
    pub metadata_cache: usize,
    /// Bytes of memory for data: blocks that were read or written not long ago.
    pub data_cache: usize,
    /// Give the space of free segments back to the file system or device.
    pub punch_free: bool,
    /// Change nothing: for checking, and for looking into a store.
    pub read_only: bool,
    /// Open the store also if its newest checkpoint is damaged and the one before does not have all that was durable,
    /// or if the log is damaged before its end: what was acknowledged since is lost then.
    pub roll_back: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            pool: "local".into(),
            metadata_cache: 60 << 20,
            data_cache: 256 << 20,
            punch_free: true,
            read_only: false,
            roll_back: false,
        }
    }
}

/// What a store has done and has, for people and metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StoreStats {
    /// Bytes that can be stored.
    pub capacity: u64,
    /// Bytes stored, metadata included.
    pub used: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes of the device that the segments take.
    pub device_size: u64,
    /// Bytes a segment.
    pub segment_size: u64,
    /// Segments.
    pub segments: u32,
    /// Free ones.
    pub segments_free: u32,
    /// Bytes of memory that metadata takes, about.
    pub metadata_bytes: u64,
    /// Bytes users wrote, since the store was made.
    pub user_bytes: u64,
    /// Bytes the store wrote to its device, since it was made.
    pub device_bytes: u64,
    /// Bytes the cleaner moved, since it was opened.
    pub cleaned_bytes: u64,
    /// Checkpoints since it was opened.
    pub checkpoints: u64,
    /// Map pages read since it was opened.
    pub page_loads: u64,
    /// Stored pairs of the index that lookups of ranges have gone through since it was opened.
    pub pairs_looked_at: u64,
    /// Checksum errors found since it was opened.
    pub checksum_errors: u64,
    /// The data cache.
    pub cache: CacheStats,
    /// What the replay found when it was opened.
    pub replay: Replay,
}

/// An open store: a pool of objects in a file or on a block device.  See [`ObjectBackend`](forebay_block::ObjectBackend).
pub struct Store {
    pub(crate) core: Rc<Core>,
    pub(crate) info: BackendInfo,
    replay: Replay,
    tasks: RefCell<Vec<JoinHandle<()>>>,
    /// How the first close ended.
    closed: RefCell<Option<Result<()>>>,
    /// Something is in `closed`.
    close_ended: Notify,
    /// Where and what was lost as it was opened although not all that was durable is there.
    pub(crate) lost: Option<(&'static str, String)>,
}

impl Store {
    /// Opens a store and recovers it.
    ///
    /// # Errors
    /// `NotFound` when there is no file, `Busy` when somebody else has it open, `Invalid` when it is no store,
    /// `Unsupported` when it was made by a newer version, `Corrupt` when what it needs to open is damaged.
    pub async fn open(path: impl AsRef<Path>, options: StoreOptions) -> Result<Rc<Self>> {
        let path = path.as_ref();
        let how = if options.read_only { OpenOptions::read() } else { OpenOptions::read_write() };
        let file = open_file(path, how.direct().lock()).await?;
        let superblock = match read_superblock(&file).await {
            Ok(superblock) => superblock,
            Err(error) if error.kind() == ErrorKind::Invalid => {
                return Err(match occupant::look(&file).await {
                    Ok(found) => occupant::explain(&file, error, found),
                    Err(_) => error,
                });
            }
            Err(error) => return Err(error),
        };
        if file.info().size < superblock.device_size() {
            let text = format!(
                "{}: {} bytes, but its superblock says {}; it was cut short",
                path.display(),
                file.info().size,
                superblock.device_size()
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let (anchor, unreadable) = read_anchor(&file, store_id(&superblock.uuid)).await?;
        let core = open_core(file, superblock, &anchor, &options).await?;
        core.look_for_lost_keys().await;
        let (replay, gap) = core.replay(&anchor, unreadable.is_some()).await?;
        if replay.batches > 0 {
            let path = path.display();
            tracing::info!("recovered {path}: replayed {} batches, {} bytes", replay.batches, replay.bytes);
        }
        let lost = match unreadable {
            Some(_) => core.find_lost(&replay, core.store_id()).await?,
            None => None,
        };
        let lost = lost.map(|batch| {
            format!(
                "{}: the newest checkpoint is damaged, and checkpoint {} before it does not have all that was durable: \
                 batch {} of the log, at byte {}, comes after what can be recovered (up to batch {})",
                path.display(),
                anchor.generation,
                batch.seq,
                batch.block * BLOCK64,
                replay.next_seq.saturating_sub(1)
            )
        });
        // Either is reason enough.
        let lost = lost.map(|text| ("the newest checkpoint", text)).or(gap.map(|text| ("the log", text)));
        if let Some((_, text)) = &lost {
            if !options.roll_back {
                let how = "`forebay store check --roll-back` goes on with what comes before it, and loses the rest";
                return Err(Error::new(ErrorKind::Corrupt, format!("{text}; {how}")));
            }
            tracing::error!("{text}; giving that up, as was asked for");
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
        });
        if !options.read_only {
            store.start(&anchor, &options).await?;
        }
        Ok(store)
    }

    /// Begins a new life of the log, and the tasks.
    async fn start(&self, anchor: &Anchor, options: &StoreOptions) -> Result<()> {
        let core = &self.core;
        // Unlike any before, also that of an opening that a crash cut short.
        let epoch = random() | 1;
        core.epoch.set(if epoch == anchor.epoch { epoch ^ 2 } else { epoch });
        let log = Log::new(
            core.media.file.clone(),
            core.store_id(),
            core.epoch.get(),
            core.segments.clone(),
            self.replay.next_seq.max(1),
            core.host.clone(),
        )?;
        if let Some(host) = &core.host {
            host.start().await;
        }
        core.media.attach_log(log.clone());
        *core.log.borrow_mut() = Some(log.clone());
        core.checkpoint(false).await?;
        let mut tasks = self.tasks.borrow_mut();
        tasks.push(spawn(Log::tick(Rc::downgrade(&log))));
        // What was allocated on purpose stays so.
        let punch = options.punch_free && !core.host.as_ref().is_some_and(|host| host.is_whole());
        tasks.push(spawn(maintain(core.clone(), punch)));
        tasks.push(spawn(crate::snaps::trim(core.clone())));
        Ok(())
    }

    /// Stores everything and closes the store.  Later requests are answered with `ShuttingDown`, and a second close as
    /// the first one was.
    ///
    /// # Errors
    /// When the device does not take what is left: what was not durable before may be lost.  The device is let go of
    /// all the same when the store is dropped.
    pub async fn close(&self) -> Result<()> {
        let core = &self.core;
        if core.read_only {
            return Ok(());
        }
        if core.closing.replace(true) {
            // Somebody else is at it.
            self.close_ended.wait_until(|| self.closed.borrow().is_some()).await;
            return self.closed.borrow().clone().unwrap_or(Ok(()));
        }
        let ended = EndOfClose(self);
        let closed = self.close_once().await;
        *self.closed.borrow_mut() = Some(closed.clone());
        drop(ended);
        closed
    }

    async fn close_once(&self) -> Result<()> {
        let core = &self.core;
        core.wake_cleaner.notify_all();
        core.changed.notify_all();
        core.snaps_changed.notify_all();
        let tasks = self.tasks.take();
        for (i, task) in tasks.into_iter().enumerate() {
            // The ticker (the first) ends by itself with the log; the others see that the store is closing.
            if i > 0 {
                task.await;
            }
        }
        let idle = || core.turns.borrow().is_empty();
        while !idle() {
            let changed = core.changed.wait();
            if idle() {
                break;
            }
            forebay_reactor::timeout(Duration::from_millis(1), changed).await.ok();
        }
        core.checkpoint(true).await
    }

    /// What it has and has done.
    pub fn stats(&self) -> StoreStats {
        let core = &self.core;
        let segments = core.segments.borrow();
        let appended = core.log.borrow().as_ref().map_or(0, |log| log.bytes_appended());
        StoreStats {
            capacity: core.capacity,
            used: segments.live_bytes(),
            objects: core.object_count.get(),
            device_size: core.superblock.device_size(),
            segment_size: segments.geometry.segment_size,
            segments: segments.geometry.segment_count,
            segments_free: segments.free_count(),
            metadata_bytes: core.metadata_bytes() as u64,
            user_bytes: core.user_bytes.get(),
            device_bytes: core.device_bytes_before.get() + appended,
            cleaned_bytes: core.cleaned_bytes.get(),
            checkpoints: core.checkpoints.get(),
            page_loads: core.loads.get(),
            pairs_looked_at: core.pairs_looked_at.get(),
            checksum_errors: core.media.checksum_errors.get(),
            cache: core.media.cache.stats(),
            replay: self.replay,
        }
    }

    /// The store's identity.
    pub fn uuid(&self) -> [u8; 16] {
        self.core.superblock.uuid
    }

    pub(crate) fn usage(&self) -> Usage {
        let core = &self.core;
        let used = core.segments.borrow().live_bytes();
        let available = core.available().min(core.host_room(u64::MAX));
        Usage { capacity: core.capacity, used, available, objects: core.object_count.get() }
    }

    /// Returns why the store takes no writes, if it does not: its device has failed, it is read-only, or it is closing.
    pub fn refuses_writes(&self) -> Option<Error> {
        self.core.refuse_writes().err()
    }

    /// Returns the bytes that the store itself could still take where the file system that its file lies on has less; `None`
    /// where that is no limit.
    pub fn limited_by_host(&self) -> Option<u64> {
        let available = self.core.available();
        (self.core.host_room(u64::MAX) < available).then_some(available)
    }
}

/// Ends the wait of those who close a store a second time, also when the first is given up half way.
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
        // Not closed in order: as a crash would leave it, but without tasks that go on.
        self.core.closing.set(true);
        if let Some(log) = self.core.log.borrow().as_ref().filter(|_| !matches!(*self.closed.borrow(), Some(Ok(())))) {
            log.abandon();
        }
        self.core.wake_cleaner.notify_all();
        self.core.changed.notify_all();
        self.core.snaps_changed.notify_all();
    }
}

pub(crate) async fn open_file(path: &Path, options: OpenOptions) -> Result<File> {
    let shown = path.display();
    File::open_when_free(path, options).await.map_err(|error| match error.kind() {
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
    })
}

async fn open_core(file: File, superblock: Superblock, anchor: &Anchor, options: &StoreOptions) -> Result<Rc<Core>> {
    let geometry = Geometry::of(&superblock);
    let empty = Segments::new(geometry, LiveTable::new(geometry.segment_count));
    let segments = Rc::new(RefCell::new(empty));
    let media = Rc::new(Media::new(file, segments.clone(), Cache::new(options.data_cache)));
    let table = read_table(&media, anchor, &geometry).await?;
    *segments.borrow_mut() = Segments::new(geometry, table);
    if let Some(holder) = geometry.segment_of_byte(anchor.segments.addr).filter(|_| !anchor.segments.is_none()) {
        segments.borrow_mut().claim(holder);
    }
    let host = if options.read_only { None } else { Host::new(&media.file, superblock.device_size()) };
    let count = geometry.segment_count;
    // Kept back from users: what the cleaner needs to work with when the store is full, and the gate below.
    let reserve = (count / 10).max(14);
    let capacity = u64::from(count.saturating_sub(reserve)) * geometry.segment_size;
    let limit = options.metadata_cache;
    Ok(Rc::new(Core {
        tree: Tree::new(media.clone(), limit / 6),
        objects: ObjectCache::new(limit / 2),
        media,
        segments,
        log: RefCell::default(),
        root: Cell::new(anchor.root),
        overlay: RefCell::default(),
        overlay_bytes: Cell::new(0),
        frozen: RefCell::default(),
        frozen_bytes: Cell::new(0),
        dirty: RefCell::default(),
        dirty_pages: Cell::new(0),
        round: Cell::new(1),
        checkpointing: Cell::new(false),
        has_lost_keys: Cell::new(false),
        touched_nodes: RefCell::default(),
        generation: Cell::new(anchor.generation),
        epoch: Cell::new(anchor.epoch),
        next_oid: Cell::new(anchor.next_oid.max(1)),
        snap_seq: Cell::new(anchor.snap_seq),
        version: Cell::new(anchor.version),
        object_count: Cell::new(anchor.objects),
        user_bytes: Cell::new(anchor.user_bytes),
        device_bytes_before: Cell::new(anchor.device_bytes),
        table_at: Cell::new(anchor.segments),
        appended_at_redo: Cell::new(0),
        turns: RefCell::new(HashMap::new()),
        stuck: Cell::new(false),
        futile: Cell::new((0, 0, 0)),
        stuck_at: Cell::new(0),
        room_wanted: Cell::new(0),
        capacity,
        checkpoint_interval: (geometry.segment_size * u64::from(count) / 16).clamp(geometry.segment_size, 512 << 20),
        dirty_max: limit * 2 / 5,
        gate: (count / 40).max(6),
        last_victims: RefCell::new(BTreeSet::new()),
        closing: Cell::new(false),
        upkeep_failure: RefCell::default(),
        changed: Notify::new(),
        wake_cleaner: Notify::new(),
        snaps_changed: Notify::new(),
        cleaned_bytes: Cell::new(0),
        checkpoints: Cell::new(0),
        loads: Cell::new(0),
        pairs_looked_at: Cell::new(0),
        read_only: options.read_only,
        host,
        superblock,
    }))
}

/// Takes checkpoints and cleans when that is due, until the store closes.
async fn maintain(core: Rc<Core>, punch: bool) {
    loop {
        let due = || core.closing.get() || core.wants_checkpoint() || core.wants_cleaning();
        core.wake_cleaner.wait_until(due).await;
        if core.closing.get() {
            return;
        }
        if core.log().failure().is_some() {
            // Each try would append to the log what cannot be written; who waits for room is told why there is none.
            core.changed.notify_all();
            sleep(RETRY_AFTER).await;
            continue;
        }
        if let Err(error) = maintain_once(&core).await {
            tracing::error!(?error, "keeping the store in shape failed; trying again");
            core.last_victims.borrow_mut().clear();
            // Who would wait for it to succeed is told why it does not.
            *core.upkeep_failure.borrow_mut() = Some(error);
            core.changed.notify_all();
            sleep(RETRY_AFTER).await;
            continue;
        }
        core.upkeep_failure.take();
        if punch && !core.closing.get() {
            punch_free(&core).await;
        }
    }
}

async fn maintain_once(core: &Rc<Core>) -> Result<()> {
    if !core.wants_cleaning() {
        return core.checkpoint(false).await;
    }
    let free_before = core.segments.borrow().free_count();
    let live_before = core.segments.borrow().live_bytes();
    let appended_before = core.log().bytes_appended();
    // With much to be stored by the checkpoint, the cleaner had no room to work in: that says nothing yet.
    let cramped = core.dirty_bytes() as u64 > 2 * core.segments.borrow().geometry.segment_size;
    let gain = core.clean_round().await?;
    core.checkpoint(false).await?;
    let free = core.segments.borrow().free_count();
    let quiet = core.segments.borrow().live_bytes() >= live_before;
    // Three ways to be stuck: nothing worth moving, or moving it won nothing although hardly anybody wrote meanwhile, or
    // round after round wins what the next one loses.
    let moved_only = core.log().bytes_appended() - appended_before <= gain * 8;
    let scarce = free <= core.gate + core.room_wanted.replace(0);
    let nothing_won = free <= free_before && !cramped && (gain == 0 || (quiet && moved_only));
    if scarce && (nothing_won || core.is_futile(free)) {
        core.stuck.set(true);
        core.stuck_at.set(core.log().bytes_appended());
    }
    core.changed.notify_all();
    Ok(())
}

async fn punch_free(core: &Rc<Core>) {
    let geometry = core.segments.borrow().geometry;
    let segments = core.segments.borrow_mut().take_punchable(SEGMENTS_KEPT);
    for segment in segments {
        // Somebody may have taken it into use while the others were punched.
        if core.segments.borrow().state(segment) != crate::segments::SegmentState::Free {
            continue;
        }
        core.segments.borrow_mut().hold(segment);
        let at = geometry.first_block(segment) * BLOCK64;
        let done = core.media.file.punch_hole(at, geometry.segment_size).await;
        core.segments.borrow_mut().release(segment);
        if let Err(error) = done {
            tracing::debug!(%error, "giving space back to the file system");
            return;
        }
    }
}
