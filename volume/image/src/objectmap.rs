//! The object map of an open image's head, kept true by who has the exclusive lock.
//!
//! An object is marked as there before it is written, as being removed before it is removed, and as not there after.
//! So the map never says that an object is not there that is.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    Error, ErrorKind, Extent, Method, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SharedObjects, SnapId,
    Transaction,
};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::yield_now;

use crate::format::{Features, Header};
use crate::session::GET_INFO;
use crate::wire::bitmap::{Bitmap, State, encode_resize, encode_update};
use crate::wire::lock;

const LOCK: Method = Method::new("lock", "lock");
const UNLOCK: Method = Method::new("lock", "unlock");
const BREAK: Method = Method::new("lock", "break_lock");
const ASSERT_LOCKED: Method = Method::new("lock", "assert_locked");
const UPDATE: Method = Method::new("rbd", "object_map_update");
const RESIZE: Method = Method::new("rbd", "object_map_resize");
const SET_FLAGS: Method = Method::new("rbd", "set_flags");
/// Objects that are looked at, or changed, before others have a turn.
pub(crate) const SCAN: usize = 1 << 16;
/// Tries to take the map's own lock, which only somebody who lost the image's lock can still have.
const LOCK_TRIES: usize = 3;

/// The map of the head, as long as we have the image's lock.
pub(crate) struct ObjectMap {
    backend: Rc<dyn ObjectBackend>,
    object: ObjectName,
    header: ObjectName,
    bits: RefCell<Bitmap>,
    /// It is believed and kept.
    valid: Cell<bool>,
    fast_diff: bool,
    /// Objects whose state is being changed.
    busy: RefCell<BTreeMap<u64, Semaphore>>,
}

impl ObjectMap {
    /// Locks and loads the map of an image of `objects` objects; what is wrong with it makes it invalid, which the
    /// header is told.
    pub(crate) async fn open(
        backend: &Rc<dyn ObjectBackend>,
        shared: &Rc<dyn SharedObjects>,
        object: ObjectName,
        header_object: ObjectName,
        header: &Header,
    ) -> Result<Rc<Self>> {
        take_lock(backend, shared, &object).await?;
        let objects = header.size.div_ceil(header.object_size());
        let loaded = load(backend, &object).await;
        let map = Self {
            backend: backend.clone(),
            object,
            header: header_object,
            bits: RefCell::new(Bitmap::default()),
            valid: Cell::new(header.flags & Header::MAP_INVALID == 0),
            fast_diff: header.features.has(Features::FAST_DIFF),
            busy: RefCell::default(),
        };
        match loaded {
            // A larger one was being cut when somebody died, and says more than is needed.
            Ok(bits) if bits.objects() >= objects => *map.bits.borrow_mut() = bits,
            Ok(bits) => map.invalidate(&format!("it covers {} objects of {objects}", bits.objects())).await?,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                map.invalidate(&error.to_string()).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(Rc::new(map))
    }

    /// Gives up the map's own lock.
    pub(crate) async fn close(&self) {
        let call = ObjectOp::Call { method: UNLOCK, input: lock::encode_unlock("") };
        if let Err(error) = self.backend.submit(&self.object, Transaction::of(call)).await
            && error.kind() != ErrorKind::NotFound
        {
            // Who opens it next breaks it.
            tracing::debug!(object = %self.object, %error, "the lock of an object map stays");
        }
    }

    /// It is believed.
    pub(crate) fn is_valid(&self) -> bool {
        self.valid.get()
    }

    /// An object may be there.
    pub(crate) fn may_exist(&self, object: u64) -> bool {
        !self.valid.get() || self.bits.borrow().get(object) != State::Nonexistent
    }

    /// A write to this object needs no change of the map.
    pub(crate) fn is_marked(&self, object: u64) -> bool {
        !self.valid.get() || self.bits.borrow().get(object) == State::Exists
    }

    /// Stores that an object is in a state, unless it is already; with `from`, only if it is in that one.
    pub(crate) async fn update(&self, object: u64, to: State, from: Option<State>) -> Result<()> {
        if !self.needs(object, to, from) {
            return Ok(());
        }
        // One after another: what a later one finds is what is stored.
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

    /// The same for a run of objects that nobody else changes meanwhile.
    pub(crate) async fn update_range(&self, range: Range<u64>, to: State, from: Option<State>) -> Result<()> {
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

    fn needs(&self, object: u64, to: State, from: Option<State>) -> bool {
        let bits = self.bits.borrow();
        let state = bits.get(object);
        self.valid.get() && object < bits.objects() && state != to && from.is_none_or(|from| matches(state, from))
    }

    async fn store(&self, range: Range<u64>, to: State, from: Option<State>) -> Result<()> {
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

    /// Covers so many objects from now on; those cut off must be gone.
    pub(crate) async fn resize(&self, objects: u64) -> Result<()> {
        if !self.valid.get() || objects == self.bits.borrow().objects() {
            return Ok(());
        }
        self.change(ObjectOp::Call { method: RESIZE, input: encode_resize(objects, State::Nonexistent) }).await?;
        self.bits.borrow_mut().resize(objects);
        Ok(())
    }

    /// Changes what is stored; if that fails for a reason of the map's own, the map is invalid from now on.
    async fn change(&self, call: ObjectOp) -> Result<()> {
        let assert = ObjectOp::Call { method: ASSERT_LOCKED, input: lock::encode_assert("", "") };
        match self.backend.submit(&self.object, Transaction::new(vec![assert, call]).durable()).await {
            Ok(_) => Ok(()),
            Err(error) => match error.kind() {
                // We are out: nothing more may be changed by us, the header neither.
                ErrorKind::Fenced | ErrorKind::Busy => {
                    let what = format!("object map {}: its lock is lost", self.object);
                    Err(Error::new(ErrorKind::Fenced, what).with_source(error))
                }
                ErrorKind::NoSpace | ErrorKind::TimedOut | ErrorKind::ShuttingDown | ErrorKind::Denied => Err(error),
                _ => self.invalidate(&error.to_string()).await,
            },
        }
    }

    /// It is not believed any more, by anybody, until somebody rebuilds it.
    pub(crate) async fn invalidate(&self, why: &str) -> Result<()> {
        if !self.valid.replace(false) {
            return Ok(());
        }
        tracing::warn!(object = %self.object, why, "an object map is invalid: rbd object-map rebuild makes it anew");
        let flags = Header::MAP_INVALID | if self.fast_diff { Header::FAST_DIFF_INVALID } else { 0 };
        let input = [flags, flags, SnapId::HEAD.0].map(u64::to_le_bytes).concat();
        let call = ObjectOp::Call { method: SET_FLAGS, input };
        self.backend.submit(&self.header, Transaction::of(call).durable()).await.map(drop)
    }

    /// The header says something else of it now.
    pub(crate) fn set_flags(&self, flags: u64) {
        if flags & Header::MAP_INVALID != 0 {
            self.valid.set(false);
        }
    }
}

/// A state that an update from `from` is meant for: what is clean is there, too.
fn matches(state: State, from: State) -> bool {
    state == from || from == State::Exists && state == State::Clean
}

/// Creates the map of a new image.
pub(crate) async fn create(backend: &Rc<dyn ObjectBackend>, object: &ObjectName, objects: u64) -> Result<()> {
    let call = ObjectOp::Call { method: RESIZE, input: encode_resize(objects, State::Nonexistent) };
    backend.submit(object, Transaction::of(call).durable()).await.map(drop)
}

/// Marks an object in the map of a snapshot, which nobody locks.
pub(crate) async fn mark_in_snapshot(
    backend: &Rc<dyn ObjectBackend>,
    map: &ObjectName,
    object: u64,
    state: State,
) -> Result<()> {
    let call = ObjectOp::Call { method: UPDATE, input: encode_update(object..object + 1, state, None) };
    backend.submit(map, Transaction::of(call).durable()).await.map(drop)
}

/// What is stored of a map.
pub(crate) async fn load(backend: &Rc<dyn ObjectBackend>, object: &ObjectName) -> Result<Bitmap> {
    let size = backend.stat(object, SnapId::HEAD).await?.size;
    let damaged = || Error::new(ErrorKind::Corrupt, format!("object map {object}"));
    // The largest there can be: two bits an object, and 4 bytes of checksum for each 4 KiB of them.
    if size > crate::wire::bitmap::OBJECTS_MAX / 4 * 5 / 4 {
        return Err(damaged());
    }
    let read = ObjectRead::new(SnapId::HEAD, Extent::new(0, size));
    let bytes = backend.read(object, read).await?.fill(read.extent).to_vec();
    Bitmap::decode(&bytes).ok_or_else(damaged)
}

/// Takes the map's own lock.  We have the image's, so whoever has this one does not know yet that it is out.
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
    Err(Error::new(ErrorKind::Busy, format!("object map {object} is locked by others")))
}
