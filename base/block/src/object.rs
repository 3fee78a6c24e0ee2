//! Objects, as RADOS has them: the embedded store and the native RADOS client both offer this.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use forebay_reactor::BufList;

use crate::advice::Advice;
use crate::device::LocalFuture;
use crate::error::Result;
use crate::extent::{Extent, ExtentMap};
use crate::shared::{Method, SharedObjects};

/// An object's name within its pool, with its namespace (empty: the default one).  Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    namespace: Rc<str>,
    name: Rc<str>,
}

impl ObjectName {
    /// Longest name and longest namespace in bytes.
    pub const LEN_MAX: usize = 1024;

    /// A name in the default namespace.
    pub fn new(name: impl AsRef<str>) -> Self {
        thread_local!(static DEFAULT: Rc<str> = Rc::from(""));
        Self { namespace: DEFAULT.with(Rc::clone), name: name.as_ref().into() }
    }

    /// A name in a namespace.
    pub fn in_namespace(namespace: Rc<str>, name: impl AsRef<str>) -> Self {
        Self { namespace, name: name.as_ref().into() }
    }

    /// The name without its namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace; empty for the default one.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The namespace, for names of others in it.
    pub fn namespace_shared(&self) -> Rc<str> {
        self.namespace.clone()
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A self-managed snapshot's number within its pool.  Numbers only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapId(pub u64);

impl SnapId {
    /// The object as it is now, not a snapshot (RADOS: CEPH_NOSNAP).
    pub const HEAD: SnapId = SnapId(u64::MAX - 1);
}

/// What a write must keep: the newest snapshot number, and those that exist, newest first.
///
/// The first write to an object after a snapshot keeps the object's state as a clone for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapContext {
    /// The newest number ever taken for this image; 0 when there was none.
    pub seq: u64,
    /// Those that exist, newest first.
    pub snaps: Vec<SnapId>,
}

impl SnapContext {
    /// No snapshots.
    pub const fn empty() -> Self {
        Self { seq: 0, snaps: Vec::new() }
    }

    /// Newest first without repeats, none newer than `seq`.
    pub fn is_valid(&self) -> bool {
        self.snaps.windows(2).all(|pair| pair[0] > pair[1]) && self.snaps.first().is_none_or(|snap| snap.0 <= self.seq)
    }
}

/// One step of a [`Transaction`].  Steps are done in order; a guard that does not hold undoes the whole.
#[derive(Debug, Clone)]
pub enum ObjectOp {
    /// Guard: the object exists ([`ErrorKind::NotFound`](crate::ErrorKind) otherwise).
    AssertExists,
    /// Guard: the object's version is this one ([`ErrorKind::Guard`](crate::ErrorKind) otherwise, and when there is
    /// no such object).
    AssertVersion(u64),
    /// Guard: these bytes are stored at `offset` (past the end reads as zeroes, as does an object that is not there);
    /// [`ErrorKind::Mismatch`](crate::ErrorKind) otherwise.
    Compare {
        /// First byte.
        offset: u64,
        /// What must be there.
        data: BufList,
    },
    /// Guard: the key has this value (`None`: the key, or the object, is not there);
    /// [`ErrorKind::Guard`](crate::ErrorKind) otherwise.
    KvCompare {
        /// Key.
        key: Vec<u8>,
        /// Value.
        value: Option<Vec<u8>>,
    },
    /// Creates the object if it is not there; with `exclusive`, being there is an error.  Every step that stores
    /// something creates it too.
    Create {
        /// [`ErrorKind::Exists`](crate::ErrorKind) if it is there.
        exclusive: bool,
    },
    /// Advice for what is stored next, on an object that may be new: how large the object will become and how large
    /// writes to it will be, in bytes.  Creates the object if it is not there.  A backend may do no more than that.
    Expect {
        /// Of the object.
        object_size: u64,
        /// Of a write.
        write_size: u64,
    },
    /// Writes at an offset, growing the object.
    Write {
        /// First byte.
        offset: u64,
        /// What is written.
        data: BufList,
    },
    /// Replaces all bytes, and the size with them; the keys stay.
    WriteFull {
        /// The new content.
        data: BufList,
    },
    /// The run reads as zeroes after; its space is given back.  Never changes the size; past the end does nothing,
    /// nor does it create the object.
    Zero {
        /// Where.
        extent: Extent,
    },
    /// Sets the size; a grown part reads as zeroes.  On an object that is not there it does nothing.
    Truncate {
        /// Bytes.
        size: u64,
    },
    /// Removes the object and its keys (its clones stay until their snapshots go);
    /// [`ErrorKind::NotFound`](crate::ErrorKind) if it is not there.
    Remove,
    /// Sets keys.
    KvSet {
        /// Keys and their values.
        pairs: Vec<(Vec<u8>, Vec<u8>)>,
    },
    /// Removes keys; those that are not there do not matter, but the object must be there
    /// ([`ErrorKind::NotFound`](crate::ErrorKind)).
    KvRemove {
        /// Keys.
        keys: Vec<Vec<u8>>,
    },
    /// Makes the head what it was at the snapshot, keys included; removes it if it was not there then.
    Rollback {
        /// The snapshot.
        snap: SnapId,
    },
    /// Calls a method of an object class that may change the object; what it would answer is lost.  Only where
    /// [`ObjectBackend::shared`] offers it ([`ErrorKind::Unsupported`](crate::ErrorKind) otherwise).
    Call {
        /// Which.
        method: Method,
        /// Its input, as the class decodes it.
        input: Vec<u8>,
    },
}

/// Steps on one object that happen wholly or not at all, after a crash too.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    /// What must be kept for snapshots.
    pub snapc: Option<Rc<SnapContext>>,
    /// The steps.
    pub ops: Vec<ObjectOp>,
    /// Durable before it is answered.  Without, it is readable when answered and durable after the next
    /// [`ObjectBackend::flush`] (a backend may be durable at once; RADOS is).
    pub durable: bool,
    /// What will become of the bytes that it stores.
    pub advice: Advice,
}

impl Transaction {
    /// One step.
    pub fn of(op: ObjectOp) -> Self {
        Self::new(vec![op])
    }

    /// Several steps.
    pub fn new(ops: Vec<ObjectOp>) -> Self {
        Self { snapc: None, ops, durable: false, advice: Advice::NONE }
    }

    /// With advice.
    pub fn advised(mut self, advice: Advice) -> Self {
        self.advice = advice;
        self
    }

    /// Durable before it is answered.
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// With a snapshot context.
    pub fn with_snapc(mut self, snapc: Rc<SnapContext>) -> Self {
        self.snapc = Some(snapc);
        self
    }
}

/// What a read asks for.
#[derive(Debug, Clone, Copy)]
pub struct ObjectRead {
    /// The head, or a snapshot.
    pub snap: SnapId,
    /// Where; the part past the object's end is left out of the answer.
    pub extent: Extent,
    /// What will become of it.
    pub advice: Advice,
}

impl ObjectRead {
    /// From the head, or a snapshot.
    pub const fn new(snap: SnapId, extent: Extent) -> Self {
        Self { snap, extent, advice: Advice::NONE }
    }

    /// From the head.
    pub fn head(offset: u64, len: u64) -> Self {
        Self::new(SnapId::HEAD, Extent::new(offset, len))
    }

    /// With advice.
    pub const fn advised(mut self, advice: Advice) -> Self {
        self.advice = advice;
        self
    }
}

/// What was read: the stored runs in order; what is between them reads as zeroes.
#[derive(Debug, Clone, Default)]
pub struct SparseData {
    /// Offset within the object, and bytes.
    pub runs: Vec<(u64, BufList)>,
}

impl SparseData {
    /// Lays the runs into `extent`, the gaps filled with zeroes.
    pub fn fill(self, extent: Extent) -> BufList {
        let mut out = BufList::new();
        let mut at = extent.offset;
        for (offset, data) in self.runs {
            if offset > at {
                out.append(BufList::zeroes((offset - at) as usize));
            }
            at = offset + data.len() as u64;
            out.append(data);
        }
        if extent.end() > at {
            out.append(BufList::zeroes((extent.end() - at) as usize));
        }
        out
    }
}

/// An object's size and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectStat {
    /// Bytes.
    pub size: u64,
    /// Grows with each change, and goes on growing when the object is removed and created again.
    pub version: u64,
}

/// One kept state of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapClone {
    /// Its number: the context's `seq` when it was made, not older than any snapshot it stands for.
    pub id: SnapId,
    /// All the snapshots it stands for, newest first.
    pub snaps: Vec<SnapId>,
    /// Bytes.
    pub size: u64,
}

/// The kept states of an object, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapSet {
    /// The newest snapshot that a write to the head has seen.
    pub seq: u64,
    /// The head exists.
    pub head_exists: bool,
    /// The clones, oldest first.
    pub clones: Vec<SnapClone>,
}

/// A page of an object's key-value map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvPage {
    /// In key order.
    pub pairs: Vec<(Vec<u8>, Vec<u8>)>,
    /// There are more after the last.
    pub more: bool,
}

/// A page of object names.
#[derive(Debug, Clone, Default)]
pub struct ListPage {
    /// In no order that means something; each object once.
    pub names: Vec<ObjectName>,
    /// Where to go on; `None` at the end.
    pub next: Option<Vec<u8>>,
}

/// What a backend is and can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// The pool's name as a user types it.
    pub pool: String,
    /// `store`, `ram` or `rados`.
    pub kind: &'static str,
    /// Largest object in bytes.
    pub object_size_max: u64,
    /// The unit that is written without reading first, in bytes.
    pub preferred_io: u32,
    /// Everything answered is durable at once; `flush` does nothing.
    pub durable_at_once: bool,
}

/// Space, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// What can be stored in all.
    pub capacity: u64,
    /// What is stored.
    pub used: u64,
    /// What can still be stored.
    pub available: u64,
    /// Objects.
    pub objects: u64,
}

/// A pool of named objects.
///
/// Transactions on one object take effect in the order in which they were submitted; a read sees every transaction
/// that was answered before it was submitted.  Dropping a future neither ends nor undoes what it stands for.
pub trait ObjectBackend {
    /// What it is.
    fn info(&self) -> BackendInfo;

    /// Reads stored runs; `NotFound` when there is no such object (or it did not exist at that snapshot).
    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>>;

    /// What is stored where, without reading it.  Covers the extent, past the object's end too (as a hole).
    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>>;

    /// Size and version.
    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>>;

    /// Does a transaction; answers the object's version after it.
    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>>;

    /// The values of some keys; `None` for those that are not there.
    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>>;

    /// Keys that start with `prefix`, in order, after `after` (exclusive; empty: from the first), `max` at most.
    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>>;

    /// The object's clones.
    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>>;

    /// Takes a new snapshot number for this pool.
    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>>;

    /// Gives up a snapshot number: clones that stand for no other snapshot go, in the background.
    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>>;

    /// Object names of a namespace (`None`: of all), `max` at most, going on at `cursor`.
    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>>;

    /// Names from the first to before the second of `names`, in order, `max` at most, of objects that are there or were at
    /// a snapshot.  `None` where names are not kept in order.
    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        let _ = (names, max);
        None
    }

    /// Everything answered before is durable when this is answered.
    fn flush(&self) -> LocalFuture<Result<()>>;

    /// Space.
    fn usage(&self) -> LocalFuture<Result<Usage>>;

    /// What it offers beside this because other clients use the pool at the same time; `None` where there are none.
    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        None
    }
}
