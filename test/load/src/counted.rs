//! A pool whose reads of objects are counted and take time, as those of a cluster do.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BackendInfo, ExtentMap, KvPage, ListPage, LocalFuture, ObjectBackend, ObjectName, ObjectRead, ObjectStat,
    PoolIdentity, Result, SharedObjects, SnapId, SnapSet, SparseData, Transaction, Usage,
};
use forebay_reactor::sleep;

/// Pool that counts and delays reads; everything else is that of the pool behind it.
pub struct CountedBackend {
    inner: Rc<dyn ObjectBackend>,
    delay: Duration,
    reads: Cell<u64>,
    bytes: Cell<u64>,
}

impl CountedBackend {
    /// Wraps a pool; each read takes `delay` longer.
    pub fn new(inner: Rc<dyn ObjectBackend>, delay: Duration) -> Rc<Self> {
        Rc::new(Self { inner, delay, reads: Cell::new(0), bytes: Cell::new(0) })
    }

    /// Returns the number of reads, and the bytes that they have asked for.
    pub fn counts(&self) -> (u64, u64) {
        (self.reads.get(), self.bytes.get())
    }

    /// Starts to count from zero.
    pub fn reset(&self) {
        self.reads.set(0);
        self.bytes.set(0);
    }
}

impl ObjectBackend for CountedBackend {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + read.extent.len);
        let (found, delay) = (self.inner.read(object, read), self.delay);
        if delay.is_zero() {
            return found;
        }
        Box::pin(async move {
            sleep(delay).await;
            found.await
        })
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(object, read)
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        self.inner.stat(object, snap)
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        self.inner.submit(object, transaction)
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        self.inner.kv_get(object, keys)
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        self.inner.kv_list(object, prefix, after, max)
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        self.inner.snap_set(object)
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        self.inner.snap_allocate()
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        self.inner.snap_remove(snap)
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        self.inner.list(namespace, cursor, max)
    }

    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        self.inner.list_between(names, max)
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        self.inner.flush()
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        self.inner.usage()
    }

    fn identity(&self) -> Option<PoolIdentity> {
        self.inner.identity()
    }

    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        self.inner.shared()
    }
}
