//! Block storage types, and the two traits between Forebay's layers: [`BlockDevice`] and [`ObjectBackend`].
//!
//! A front (NBD, iSCSI, ...) sees only [`BlockDevice`].  An image maps block requests to objects and sees only
//! [`ObjectBackend`].  The write log, the cache and the image all implement `BlockDevice`, so layers stack and any of
//! them can be left out.

mod advice;
mod data_key;
mod device;
mod error;
mod extent;
mod head_cache;
mod in_flight;
mod locked_ranges;
mod object;
mod policy;
mod range_lock;
mod remote;
mod request;
pub mod reservation;
mod shared;
mod snapshot_cache;
mod unnamed;
mod write_range_lock;

pub use advice::Advice;
pub use data_key::{DATA_KEY_LEN, DataKey};
pub use device::{BlockDevice, Geometry, LocalFuture, SizeWatch, WriteExtent};
pub use error::{Error, ErrorKind, Result};
pub use extent::{Extent, ExtentMap, ExtentState, Mapped};
pub use forebay_reactor::{Buf, BufList, BufMut, is_zero};
pub use head_cache::{HeadGeneration, HeadRead};
pub use in_flight::{CompleteOnDrop, InFlightGuard, InFlightTracker};
pub use object::{
    BackendInfo, KvPage, ListPage, ObjectBackend, ObjectName, ObjectOp, ObjectRead, ObjectStat, SnapClone, SnapContext,
    SnapId, SnapSet, SparseData, Transaction, Usage,
};
pub use policy::{Compression, DataPolicy, StoredBytes, UnknownCompression};
pub use range_lock::{ExclusiveRange, RangeLock, SharedRange};
pub use remote::{DeviceHandle, RemoteDevice};
pub use request::{BlockReply, BlockRequest};
pub use shared::{
    ClientIdentity, Method, Notification, Notified, NotifyAnswer, SharedObjects, WATCH_LIFE_MIN, Watch, WatchHandler,
    Watcher,
};
pub use snapshot_cache::{PoolIdentity, SnapshotCache, SnapshotFetch, SnapshotIdentity, SnapshotRead};
pub use unnamed::Unnamed;
pub use write_range_lock::{WriteRange, WriteRangeLock};
