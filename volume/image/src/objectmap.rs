//! Object map of an open image's head, maintained by the owner of the exclusive lock.
//!
//! An object is marked as existing before it is written, as pending before it is removed, and as nonexistent after.
//! Invariant: the map never marks an existing object as nonexistent.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    Buf, Error, ErrorKind, Extent, Method, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SharedObjects,
    SnapId, Transaction,
};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::yield_now;

use crate::exclusive_lock::GET_INFO;
use crate::format::{ImageFeatures, ImageHeader};
use crate::wire::bitmap::{Bitmap, ObjectMapState, encode_resize, encode_update};
use crate::wire::lock;

const LOCK: Method = Method::new("lock", "lock");
const UNLOCK: Method = Method::new("lock", "unlock");
const BREAK: Method = Method::new("lock", "break_lock");
const ASSERT_LOCKED: Method = Method::new("lock", "assert_locked");
const UPDATE: Method = Method::new("rbd", "object_map_update");
const RESIZE: Method = Method::new("rbd", "object_map_resize");
const SNAPSHOT_REMOVE: Method = Method::new("rbd", "object_map_snap_remove");
const SET_FLAGS: Method = Method::new("rbd", "set_flags");
/// Objects examined or changed before yielding to other tasks.
pub(crate) const SCAN: usize = 1 << 16;
/// Attempts to acquire the map's own lock, which only a former owner of the image's lock can still hold.
const LOCK_TRIES: usize = 3;

/// Object map of the head, while this client holds the image's lock.
pub(crate) struct ObjectMap {
    backend: Rc<dyn ObjectBackend>,
    object: ObjectName,
    header: ObjectName,
    bits: RefCell<Bitmap>,
    /// Set while the map is valid and maintained.
    valid: Cell<bool>,
    fast_diff: bool,
    /// Objects whose state is being changed, each with its lock.
    busy: RefCell<BTreeMap<u64, Semaphore>>,
}

impl ObjectMap {
    /// Locks and loads the object map. A missing, damaged or too small one is invalidated, in the header too.
    pub(crate) async fn open(
        backend: &Rc<dyn ObjectBackend>,
        shared: &Rc<dyn SharedObjects>,
        object: ObjectName,
        header_object: ObjectName,
        header: &ImageHeader,
    ) -> Result<Rc<Self>> {
        take_lock(backend, shared, &object).await?;
        let objects = header.striping_or_none().objects(header.object_size(), header.size);
        let loaded = load(backend, &object).await;
        let map = Self {
            backend: backend.clone(),
            object,
            header: header_object,
            bits: RefCell::new(Bitmap::default()),
            valid: Cell::new(header.flags & ImageHeader::MAP_INVALID == 0),
            fast_diff: header.features.has(ImageFeatures::FAST_DIFF),
            busy: RefCell::default(),
        };
        match loaded {
            // A larger map was left by an interrupted shrink, and covers all objects.
            Ok(bits) if bits.objects() >= objects => *map.bits.borrow_mut() = bits,
            Ok(bits) => map.invalidate(&format!("it covers {} objects of {objects}", bits.objects())).await?,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                map.invalidate(&error.to_string()).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(Rc::new(map))
    }

    /// Releases the map's own lock.
    pub(crate) async fn close(&self) {
        let call = ObjectOp::Call { method: UNLOCK, input: lock::encode_unlock("") };
        if let Err(error) = self.backend.submit(&self.object, Transaction::of(call)).await
            && error.kind() != ErrorKind::NotFound
        {
            // The next client that opens the map breaks the lock.
            tracing::debug!(object = %self.object, %error, "cannot release the lock of an object map; the next client breaks it");
        }
    }

    /// Returns whether the map is valid.
    pub(crate) fn is_valid(&self) -> bool {
        self.valid.get()
    }

    /// Returns the state of an object as it is marked.
    pub(crate) fn state(&self, object: u64) -> ObjectMapState {
        self.bits.borrow().get(object)
    }

    /// Stores a map in which every object may exist, whatever the stored one was. It is used once
    /// [`set_valid`](Self::set_valid) is called; no other task changes the map in the meantime.
    pub(crate) async fn start_over(&self, objects: u64) -> Result<()> {
        let bits = Bitmap::existing(objects);
        let data = Buf::copy_of(&bits.encode()).into();
        self.change(ObjectOp::WriteFull { data }).await?;
        *self.bits.borrow_mut() = bits;
        Ok(())
    }

    /// Marks the map as valid, as the stored header does by now.
    pub(crate) fn set_valid(&self) {
        self.valid.set(true);
    }

    /// Returns whether an object may exist.
    pub(crate) fn may_exist(&self, object: u64) -> bool {
        !self.valid.get() || self.bits.borrow().get(object) != ObjectMapState::Nonexistent
    }

    /// Returns whether a write to this object needs no change of the map.
    pub(crate) fn is_marked(&self, object: u64) -> bool {
        !self.valid.get() || self.bits.borrow().get(object) == ObjectMapState::Exists
    }

    /// Stores the state of an object, unless it is stored already; with `from`, only if the object is in that state.
    pub(crate) async fn update(&self, object: u64, to: ObjectMapState, from: Option<ObjectMapState>) -> Result<()> {
        if !self.needs(object, to, from) {
            return Ok(());
        }
        // Serialized per object, so that a later update sees the stored state.
        let turns = self.busy.borrow_mut().entry(object).or_insert_with(|| Semaphore::new(1)).clone();
        let turn = turns.acquire(1).await;
        let result = match self.needs(object, to, from) {
            true => self.store(object..object + 1, to, from).await,
            false => Ok(()),
        };
        drop(turn);
        if turns.available() == 1 {
            self.busy.borrow_mut().remove(&object);
        }
        result
    }

    /// Stores the state of a range of objects that no other task changes in the meantime, like
    /// [`update`](Self::update).
    pub(crate) async fn update_range(
        &self,
        range: Range<u64>,
        to: ObjectMapState,
        from: Option<ObjectMapState>,
    ) -> Result<()> {
        let range = range.start..range.end.min(self.bits.borrow().objects());
        for start in range.clone().step_by(SCAN) {
            let mut part = start..range.end.min(start + SCAN as u64);
            if part.any(|object| self.needs(object, to, from)) {
                return self.store(range, to, from).await;
            }
            yield_now().await;
        }
        Ok(())
    }

    fn needs(&self, object: u64, to: ObjectMapState, from: Option<ObjectMapState>) -> bool {
        let bits = self.bits.borrow();
        let state = bits.get(object);
        self.valid.get() && object < bits.objects() && state != to && from.is_none_or(|from| matches(state, from))
    }

    async fn store(&self, range: Range<u64>, to: ObjectMapState, from: Option<ObjectMapState>) -> Result<()> {
        let call = ObjectOp::Call { method: UPDATE, input: encode_update(range.clone(), to, from) };
        self.change(call).await?;
        for start in range.clone().step_by(SCAN) {
            if start > range.start {
                yield_now().await;
            }
            let mut bits = self.bits.borrow_mut();
            for object in start..range.end.min(start + SCAN as u64) {
                if from.is_none_or(|from| matches(bits.get(object), from)) {
                    bits.set(object, to);
                }
            }
        }
        Ok(())
    }

    /// Resizes the map to `objects` objects; those cut off must have been removed.
    pub(crate) async fn resize(&self, objects: u64) -> Result<()> {
        if !self.valid.get() || objects == self.bits.borrow().objects() {
            return Ok(());
        }
        self.change(ObjectOp::Call { method: RESIZE, input: encode_resize(objects, ObjectMapState::Nonexistent) })
            .await?;
        self.bits.borrow_mut().resize(objects);
        Ok(())
    }

    /// Stores a copy of the map as that of a new snapshot; nothing if the map is invalid.
    pub(crate) async fn copy_to(&self, object: &ObjectName) -> Result<()> {
        if !self.valid.get() {
            return Ok(());
        }
        let data = Buf::copy_of(&self.bits.borrow().encode()).into();
        self.backend.submit(object, Transaction::of(ObjectOp::WriteFull { data }).durable()).await.map(drop)
    }

    /// Marks all existing objects as unchanged since the newest snapshot, if the map records that. No other task changes
    /// the map in the meantime.
    pub(crate) async fn mark_clean(&self) -> Result<()> {
        if !self.fast_diff {
            return Ok(());
        }
        let objects = self.bits.borrow().objects();
        self.update_range(0..objects, ObjectMapState::Clean, Some(ObjectMapState::Exists)).await
    }

    /// Returns whether the map records which objects have changed since the newest snapshot.
    pub(crate) fn has_fast_diff(&self) -> bool {
        self.fast_diff
    }

    /// Marks the objects as changed that had changed before the newest snapshot, which is being removed.
    pub(crate) async fn merge_removed(&self, removed: &Bitmap) -> Result<()> {
        if !self.valid.get() {
            return Ok(());
        }
        self.change(ObjectOp::Call { method: SNAPSHOT_REMOVE, input: removed.encode() }).await?;
        let objects = removed.objects().min(self.bits.borrow().objects());
        for start in (0..objects).step_by(SCAN) {
            if start > 0 {
                yield_now().await;
            }
            let mut bits = self.bits.borrow_mut();
            for object in start..objects.min(start + SCAN as u64) {
                // One that a write has marked meanwhile stays so.
                if bits.get(object) == ObjectMapState::Clean && removed.get(object) == ObjectMapState::Exists {
                    bits.set(object, ObjectMapState::Exists);
                }
            }
        }
        Ok(())
    }

    /// Submits a change of the stored map; if it fails for a reason of the map itself, invalidates the map.
    async fn change(&self, call: ObjectOp) -> Result<()> {
        let assert = ObjectOp::Call { method: ASSERT_LOCKED, input: lock::encode_assert("", "") };
        match self.backend.submit(&self.object, Transaction::new(vec![assert, call]).durable()).await {
            Ok(_) => Ok(()),
            Err(error) => match error.kind() {
                // The lock is lost: this client must change nothing more, not even the header.
                ErrorKind::Fenced | ErrorKind::Busy => {
                    let what = format!("object map {}: lock lost to another client", self.object);
                    Err(Error::new(ErrorKind::Fenced, what).with_source(error))
                }
                ErrorKind::NoSpace | ErrorKind::TimedOut | ErrorKind::ShuttingDown | ErrorKind::Denied => Err(error),
                _ => self.invalidate(&error.to_string()).await,
            },
        }
    }

    /// Invalidates the map, in the header too, until it is rebuilt.
    pub(crate) async fn invalidate(&self, why: &str) -> Result<()> {
        if !self.valid.replace(false) {
            return Ok(());
        }
        tracing::warn!(object = %self.object, why, "object map invalidated; rebuild it with 'rbd object-map rebuild'");
        let flags = ImageHeader::MAP_INVALID | if self.fast_diff { ImageHeader::FAST_DIFF_INVALID } else { 0 };
        let input = [flags, flags, SnapId::HEAD.0].map(u64::to_le_bytes).concat();
        let call = ObjectOp::Call { method: SET_FLAGS, input };
        let stored = self.backend.submit(&self.header, Transaction::of(call).durable()).await;
        if stored.is_err() {
            // The header still calls the map valid, so it must be kept up to date.
            self.valid.set(true);
        }
        stored.map(drop)
    }

    /// Applies the flags of a re-read header.
    pub(crate) fn set_flags(&self, flags: u64) {
        if flags & ImageHeader::MAP_INVALID != 0 {
            self.valid.set(false);
        }
    }
}

/// Returns whether an update from `from` applies to `state`: `Exists` includes `Clean`.
fn matches(state: ObjectMapState, from: ObjectMapState) -> bool {
    state == from || from == ObjectMapState::Exists && state == ObjectMapState::Clean
}

/// Creates the object map of a new image.
pub(crate) async fn create(backend: &Rc<dyn ObjectBackend>, object: &ObjectName, objects: u64) -> Result<()> {
    let call = ObjectOp::Call { method: RESIZE, input: encode_resize(objects, ObjectMapState::Nonexistent) };
    backend.submit(object, Transaction::of(call).durable()).await.map(drop)
}

/// Marks an object as existing in the object map of a snapshot, which takes no lock, unless it is marked as existing already.
pub(crate) async fn mark_in_snapshot(
    backend: &Rc<dyn ObjectBackend>,
    map: &ObjectName,
    object: u64,
    state: ObjectMapState,
) -> Result<()> {
    let call = ObjectOp::Call {
        method: UPDATE,
        input: encode_update(object..object + 1, state, Some(ObjectMapState::Nonexistent)),
    };
    backend.submit(map, Transaction::of(call).durable()).await.map(drop)
}

/// Stores a map of a snapshot in which every object may exist.
pub(crate) async fn start_over_in_snapshot(
    backend: &Rc<dyn ObjectBackend>,
    map: &ObjectName,
    objects: u64,
) -> Result<()> {
    let data = Buf::copy_of(&Bitmap::existing(objects).encode()).into();
    backend.submit(map, Transaction::of(ObjectOp::WriteFull { data }).durable()).await.map(drop)
}

/// Stores the state of a range of objects in the object map of a snapshot.
pub(crate) async fn update_in_snapshot(
    backend: &Rc<dyn ObjectBackend>,
    map: &ObjectName,
    range: Range<u64>,
    state: ObjectMapState,
) -> Result<()> {
    let call = ObjectOp::Call { method: UPDATE, input: encode_update(range, state, None) };
    backend.submit(map, Transaction::of(call).durable()).await.map(drop)
}

/// Does for the map of a snapshot what [`ObjectMap::merge_removed`] does for that of the head: the snapshot before it is
/// being removed.
pub(crate) async fn merge_removed_into(
    backend: &Rc<dyn ObjectBackend>,
    map: &ObjectName,
    removed: &Bitmap,
) -> Result<()> {
    let call = ObjectOp::Call { method: SNAPSHOT_REMOVE, input: removed.encode() };
    backend.submit(map, Transaction::of(call).durable()).await.map(drop)
}

/// Reads and decodes a stored object map. `Corrupt` if it is damaged or too large.
pub(crate) async fn load(backend: &Rc<dyn ObjectBackend>, object: &ObjectName) -> Result<Bitmap> {
    let size = backend.stat(object, SnapId::HEAD).await?.size;
    let damaged = || Error::new(ErrorKind::Corrupt, format!("object map {object}"));
    // Maximum size: two bits per object, and a checksum of 4 bytes for each 4 KiB of them.
    if size > crate::wire::bitmap::OBJECTS_MAX / 4 * 5 / 4 {
        return Err(damaged());
    }
    let read = ObjectRead::new(SnapId::HEAD, Extent::new(0, size));
    let bytes = backend.read(object, read).await?.fill(read.extent).to_vec();
    Bitmap::decode(&bytes).ok_or_else(damaged)
}

/// Acquires the map's own lock. This client holds the image's lock, so any other holder has lost that one.
async fn take_lock(backend: &Rc<dyn ObjectBackend>, shared: &Rc<dyn SharedObjects>, object: &ObjectName) -> Result<()> {
    for _ in 0..LOCK_TRIES {
        let call = ObjectOp::Call { method: LOCK, input: lock::encode_lock("", "") };
        match backend.submit(object, Transaction::of(call)).await {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Exists => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Busy => {}
            Err(error) => return Err(error),
        }
        let answer = shared.exec(object, SnapId::HEAD, GET_INFO, lock::encode_get_info()).await?;
        let info = lock::decode_info(&answer);
        let info = info.ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("the lock of object map {object}")))?;
        for locker in &info.lockers {
            let call = ObjectOp::Call { method: BREAK, input: lock::encode_break(locker) };
            match backend.submit(object, Transaction::of(call)).await {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Err(Error::new(ErrorKind::Busy, format!("object map {object} is locked by another client")))
}
