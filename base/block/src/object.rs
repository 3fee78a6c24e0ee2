//! Object interface modelled on RADOS; implemented by the embedded store and the native RADOS client.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use forebay_reactor::BufList;

use crate::advice::Advice;
use crate::data_key::DataKey;
use crate::device::LocalFuture;
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, ExtentMap};
use crate::policy::{DataPolicy, StoredBytes};
use crate::shared::{Method, SharedObjects};
use crate::snapshot_cache::PoolIdentity;

/// Name of an object within its pool, with its namespace (empty: the default one).  Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    namespace: Rc<str>,
    name: Rc<str>,
}

impl ObjectName {
    /// Maximum length of a name, and of a namespace, in bytes.
    pub const LEN_MAX: usize = 1024;

    /// Creates a name in the default namespace.
    pub fn new(name: impl AsRef<str>) -> Self {
        thread_local!(static DEFAULT: Rc<str> = Rc::from(""));
        Self { namespace: DEFAULT.with(Rc::clone), name: name.as_ref().into() }
    }

    /// Creates a name in a namespace.
    pub fn in_namespace(namespace: Rc<str>, name: impl AsRef<str>) -> Self {
        Self { namespace, name: name.as_ref().into() }
    }

    /// Returns the name without its namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the namespace; empty for the default one.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the namespace, for creating further names in it.
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

/// Number of a self-managed snapshot within its pool.  Numbers only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapId(pub u64);

impl SnapId {
    /// Current object state, not a snapshot (RADOS: CEPH_NOSNAP).
    pub const HEAD: SnapId = SnapId(u64::MAX - 1);
}

/// Snapshot context of a write: the newest snapshot number, and the existing snapshots, newest first.
///
/// The first write to an object after a snapshot preserves the object's state as a clone for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapContext {
    /// Newest number ever taken for this image; 0 when there was none.
    pub seq: u64,
    /// Existing snapshots, newest first.
    pub snaps: Vec<SnapId>,
}

impl SnapContext {
    /// Creates a context without snapshots.
    pub const fn empty() -> Self {
        Self { seq: 0, snaps: Vec::new() }
    }

    /// Returns whether the snapshots are sorted newest first without duplicates, none newer than `seq`.
    pub fn is_valid(&self) -> bool {
        self.snaps.windows(2).all(|pair| pair[0] > pair[1]) && self.snaps.first().is_none_or(|snap| snap.0 <= self.seq)
    }
}

/// Step of a [`Transaction`].  Steps run in order; a guard that fails undoes the whole transaction.
#[derive(Debug, Clone)]
pub enum ObjectOp {
    /// Guard: the object exists ([`ErrorKind::NotFound`](crate::ErrorKind) otherwise).
    AssertExists,
    /// Guard: the object has this version ([`ErrorKind::Guard`](crate::ErrorKind) otherwise, and when the object does
    /// not exist).
    AssertVersion(u64),
    /// Guard: these bytes are stored at `offset` (past the end reads as zeroes, as does an object that does not exist);
    /// [`ErrorKind::Mismatch`](crate::ErrorKind) otherwise.
    Compare {
        /// Offset of the first byte.
        offset: u64,
        /// Expected bytes.
        data: BufList,
    },
    /// Guard: the key has this value (`None`: the key, or the object, does not exist);
    /// [`ErrorKind::Guard`](crate::ErrorKind) otherwise.
    KvCompare {
        /// Key to compare.
        key: Vec<u8>,
        /// Expected value.
        value: Option<Vec<u8>>,
    },
    /// Creates the object if it does not exist; with `exclusive`, an existing object is an error.  Every step that
    /// stores data creates it too.
    Create {
        /// Fail with [`ErrorKind::Exists`](crate::ErrorKind) if the object exists.
        exclusive: bool,
    },
    /// Allocation hint for the data stored next, on an object that may be new: expected object size and write size in
    /// bytes.  Creates the object if it does not exist.  A backend may ignore the sizes.
    Expect {
        /// Expected size of the object, in bytes.
        object_size: u64,
        /// Expected size of a write, in bytes.
        write_size: u64,
    },
    /// Writes at an offset, growing the object.
    Write {
        /// Offset of the first byte.
        offset: u64,
        /// Data to write.
        data: BufList,
    },
    /// Replaces all bytes and the size; the keys stay.
    WriteFull {
        /// New content.
        data: BufList,
    },
    /// Zeroes the range and deallocates its space.  Never changes the size.  Past the end it does nothing, nor does it
    /// create the object.
    Zero {
        /// Range to zero.
        extent: Extent,
    },
    /// Sets the size; a grown part reads as zeroes.  Does nothing on an object that does not exist.
    Truncate {
        /// New size in bytes.
        size: u64,
    },
    /// Removes the object and its keys (its clones stay until their snapshots are removed);
    /// [`ErrorKind::NotFound`](crate::ErrorKind) if it does not exist.
    Remove,
    /// Sets keys.
    KvSet {
        /// Keys and values.
        pairs: Vec<(Vec<u8>, Vec<u8>)>,
    },
    /// Removes keys.  Missing keys are ignored, but the object must exist ([`ErrorKind::NotFound`](crate::ErrorKind)).
    KvRemove {
        /// Keys to remove.
        keys: Vec<Vec<u8>>,
    },
    /// Restores the head to its state at the snapshot, keys included; removes it if it did not exist then.
    Rollback {
        /// Snapshot to restore.
        snap: SnapId,
    },
    /// Calls an object class method that may change the object; its output is discarded.  Supported only where
    /// [`ObjectBackend::shared`] returns something ([`ErrorKind::Unsupported`](crate::ErrorKind) otherwise).
    Call {
        /// Method to call.
        method: Method,
        /// Input, encoded as the class expects it.
        input: Vec<u8>,
    },
}

/// Atomic sequence of steps on one object: all or none take effect, also after a crash.
#[derive(Debug, Clone, Default)]
pub struct Transaction {
    /// Snapshot context: states that the first write must preserve.
    pub snapc: Option<Rc<SnapContext>>,
    /// Steps, in order.
    pub ops: Vec<ObjectOp>,
    /// Durable before it is acknowledged.  Otherwise it survives a kill of this process when acknowledged (but for a
    /// backend in memory), and is durable after the next [`ObjectBackend::flush`] (a backend may be durable at once;
    /// RADOS is).
    pub durable: bool,
    /// Access advice for the bytes that it stores.
    pub advice: Advice,
}

impl Transaction {
    /// Creates a transaction of one step.
    pub fn of(op: ObjectOp) -> Self {
        Self::new(vec![op])
    }

    /// Creates a transaction of several steps.
    pub fn new(ops: Vec<ObjectOp>) -> Self {
        Self { snapc: None, ops, durable: false, advice: Advice::NONE }
    }

    /// Sets the access advice.
    pub fn advised(mut self, advice: Advice) -> Self {
        self.advice = advice;
        self
    }

    /// Makes the transaction durable before it is acknowledged.
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Sets the snapshot context.
    pub fn with_snapc(mut self, snapc: Rc<SnapContext>) -> Self {
        self.snapc = Some(snapc);
        self
    }
}

/// Parameters of a read.
#[derive(Debug, Clone, Copy)]
pub struct ObjectRead {
    /// Snapshot to read, or [`SnapId::HEAD`].
    pub snap: SnapId,
    /// Range to read; the part past the object's end is left out of the reply.
    pub extent: Extent,
    /// Access advice for the bytes.
    pub advice: Advice,
}

impl ObjectRead {
    /// Creates a read of a snapshot, or of the head.
    pub const fn new(snap: SnapId, extent: Extent) -> Self {
        Self { snap, extent, advice: Advice::NONE }
    }

    /// Creates a read of the head.
    pub fn head(offset: u64, len: u64) -> Self {
        Self::new(SnapId::HEAD, Extent::new(offset, len))
    }

    /// Sets the access advice.
    pub const fn advised(mut self, advice: Advice) -> Self {
        self.advice = advice;
        self
    }
}

/// Result of a read: the stored extents in order; the gaps between them read as zeroes.
#[derive(Debug, Clone, Default)]
pub struct SparseData {
    /// Stored extents: offset within the object, and bytes.
    pub runs: Vec<(u64, BufList)>,
}

impl SparseData {
    /// Returns the bytes of `extent`, with the gaps filled with zeroes.
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

/// Size and version of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectStat {
    /// Size in bytes.
    pub size: u64,
    /// Version; grows with each change, and continues to grow when the object is removed and created again.
    pub version: u64,
}

/// Clone of an object: its state preserved for snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapClone {
    /// Clone number: the context's `seq` when it was made, not older than any snapshot it represents.
    pub id: SnapId,
    /// Snapshots that it represents, newest first.
    pub snaps: Vec<SnapId>,
    /// Size in bytes.
    pub size: u64,
}

/// Clones of an object, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapSet {
    /// Newest snapshot that a write to the head has seen.
    pub seq: u64,
    /// True if the head exists.
    pub head_exists: bool,
    /// Clones, oldest first.
    pub clones: Vec<SnapClone>,
}

/// Page of an object's key-value map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvPage {
    /// Keys and values, in key order.
    pub pairs: Vec<(Vec<u8>, Vec<u8>)>,
    /// True if there are more keys after the last.
    pub more: bool,
}

/// Page of object names.
#[derive(Debug, Clone, Default)]
pub struct ListPage {
    /// Object names, in unspecified order; each object once.
    pub names: Vec<ObjectName>,
    /// Cursor of the next page; `None` at the end.
    pub next: Option<Vec<u8>>,
}

/// Properties of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// Pool name as a user types it.
    pub pool: String,
    /// Kind of backend: `store`, `ram` or `rados`.
    pub kind: &'static str,
    /// Maximum object size in bytes.
    pub object_size_max: u64,
    /// Write unit that needs no read-modify-write, in bytes.
    pub preferred_io: u32,
    /// True if every acknowledged write is durable; `flush` does nothing then.
    pub durable_at_once: bool,
}

/// Space usage of a pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Total capacity.
    pub capacity: u64,
    /// Used space.
    pub used: u64,
    /// Available space.
    pub available: u64,
    /// Number of objects.
    pub objects: u64,
}

fn no_policies(kind: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("a pool of kind `{kind}` has no data policies"))
}

/// Pool of named objects.
///
/// Transactions on one object take effect in the order in which they were submitted.  A read sees every transaction
/// that was acknowledged before it was submitted.  Dropping a future neither cancels nor undoes its operation.
pub trait ObjectBackend {
    /// Returns the backend's properties.
    fn info(&self) -> BackendInfo;

    /// Reads stored extents; `NotFound` when the object does not exist (or did not exist at that snapshot).
    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>>;

    /// Maps stored extents without reading them.  The map covers the whole extent, also past the object's end (as a
    /// hole).
    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>>;

    /// Returns size and version.
    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>>;

    /// Executes a transaction; returns the object's version after it.
    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>>;

    /// Returns the values of some keys; `None` for missing keys.
    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>>;

    /// Lists keys that start with `prefix`, in order, after `after` (exclusive; empty: from the first), `max` at most.
    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>>;

    /// Returns the object's clones.
    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>>;

    /// Allocates a new snapshot number for this pool.
    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>>;

    /// Removes a snapshot number: clones that represent no other snapshot are deleted in the background.
    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>>;

    /// Lists object names of a namespace (`None`: of all), `max` at most, from `cursor` on.
    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>>;

    /// Lists names from `names.start` to before `names.end`, in order, `max` at most, of objects that exist or existed
    /// at a snapshot.  `None` where names are not kept in order.
    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        let _ = (names, max);
        None
    }

    /// Makes every transaction acknowledged before durable.
    fn flush(&self) -> LocalFuture<Result<()>>;

    /// Returns the space usage.
    fn usage(&self) -> LocalFuture<Result<Usage>>;

    /// Returns the pool's identity across clusters and stores; `None` where data of a snapshot must not be remembered
    /// beyond the life of this process, or in it.
    fn identity(&self) -> Option<PoolIdentity> {
        None
    }

    /// Returns the data policy that is set for objects whose names begin with `prefix` (an empty name: the default of all
    /// other objects); `None` where none is.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind) where the backend has no policies.
    fn data_policy(&self, prefix: &ObjectName) -> Result<Option<DataPolicy>> {
        let _ = prefix;
        Err(no_policies(self.info().kind))
    }

    /// Sets the data policy of objects whose names begin with `prefix`, durably: everything up to the last dot of their
    /// names. An empty name sets the default of all other objects. `None` returns the objects to the default. Applies to
    /// data written from then on.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind) where the backend has no policies.
    fn set_data_policy(&self, prefix: &ObjectName, policy: Option<DataPolicy>) -> LocalFuture<Result<()>> {
        let _ = (prefix, policy);
        Box::pin(std::future::ready(Err(no_policies(self.info().kind))))
    }

    /// Returns whether new objects whose names begin with `prefix` are encrypted.
    fn is_encrypted(&self, prefix: &ObjectName) -> bool {
        let _ = prefix;
        false
    }

    /// Encrypts the objects whose names begin with `prefix`, up to the last dot of their names, of which there are none
    /// yet, with a key of their own. Durable.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind) where the backend does not encrypt.
    fn encrypt(&self, prefix: &ObjectName) -> LocalFuture<Result<()>> {
        let _ = prefix;
        let text = format!("a backend of kind {} does not encrypt volumes", self.info().kind);
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::Unsupported, text))))
    }

    /// Returns the key for the write log of the volume whose objects have names that begin with `prefix`; `None` if they are
    /// not encrypted.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`](crate::ErrorKind) if they are, and the key is not available.
    fn log_key(&self, prefix: &ObjectName) -> Result<Option<DataKey>> {
        let _ = prefix;
        Ok(None)
    }

    /// Destroys the key of the objects whose names begin with `prefix`, durably: what is left of them cannot be read again.
    /// No effect if they have none.
    fn destroy_key(&self, prefix: &ObjectName) -> LocalFuture<Result<()>> {
        let _ = prefix;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Returns the stored size of an object's data; `None` where the backend does not know it.
    fn stored_bytes(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<Option<StoredBytes>>> {
        let _ = (object, snap);
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Returns the interface for pools that other clients use at the same time; `None` where there are none.
    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        None
    }
}
