//! Wrapper of a shared pool whose operations fail on demand, and which counts flushes.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    BackendInfo, ClientIdentity, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, Method, Notified,
    ObjectBackend, ObjectName, ObjectOp, ObjectRead, ObjectStat, Result, SharedObjects, SnapId, SnapSet, SparseData,
    Transaction, Usage, Watch, WatchHandler, Watcher,
};

/// Operations that fail.
#[derive(Debug, Clone, PartialEq)]
pub enum Failing {
    Nothing,
    /// Transactions that call this method.
    Call(Method),
    /// Reads of keys.
    Keys,
    /// Transactions from this one on, counted from 0 since the failure was set.
    From(u64),
}

/// Pool whose operations fail on demand with `NoSpace`.
pub struct FailingPool {
    inner: Rc<dyn ObjectBackend>,
    failing: RefCell<Failing>,
    flushes: Cell<usize>,
    /// Transactions since the failure was set.
    submitted: Cell<u64>,
    /// Other pool of the cluster: its number and wrapper.
    other: Option<(i64, Rc<FailingPool>)>,
    this: Weak<FailingPool>,
}

impl FailingPool {
    pub fn new(inner: Rc<dyn ObjectBackend>, other: Option<(i64, Rc<FailingPool>)>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            inner,
            failing: RefCell::new(Failing::Nothing),
            flushes: Cell::new(0),
            submitted: Cell::new(0),
            other,
            this: this.clone(),
        })
    }

    pub fn fail(&self, failing: Failing) {
        *self.failing.borrow_mut() = failing;
        self.submitted.set(0);
    }

    /// Returns the number of flushes.
    pub fn flushes(&self) -> usize {
        self.flushes.get()
    }

    fn objects(&self) -> Rc<dyn SharedObjects> {
        self.inner.shared().expect("shared")
    }
}

fn failed<T: 'static>() -> LocalFuture<Result<T>> {
    Box::pin(async { Err(Error::new(ErrorKind::NoSpace, "injected")) })
}

impl ObjectBackend for FailingPool {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        self.inner.read(object, read)
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(object, read)
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        self.inner.stat(object, snap)
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let turn = self.submitted.replace(self.submitted.get() + 1);
        let fails = match &*self.failing.borrow() {
            Failing::Call(failing) => {
                let calls = |op: &ObjectOp| matches!(op, ObjectOp::Call { method, .. } if method == failing);
                transaction.ops.iter().any(calls)
            }
            Failing::From(first) => turn >= *first,
            Failing::Nothing | Failing::Keys => false,
        };
        if fails { failed() } else { self.inner.submit(object, transaction) }
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        if *self.failing.borrow() == Failing::Keys { failed() } else { self.inner.kv_get(object, keys) }
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
        self.flushes.set(self.flushes.get() + 1);
        self.inner.flush()
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        self.inner.usage()
    }

    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        self.this.upgrade().map(|this| -> Rc<dyn SharedObjects> { this })
    }
}

impl SharedObjects for FailingPool {
    fn identity(&self) -> ClientIdentity {
        self.objects().identity()
    }

    fn exec(&self, object: &ObjectName, snap: SnapId, method: Method, input: Vec<u8>) -> LocalFuture<Result<Vec<u8>>> {
        self.objects().exec(object, snap, method, input)
    }

    fn watch(&self, object: &ObjectName, handler: Rc<dyn WatchHandler>) -> LocalFuture<Result<Box<dyn Watch>>> {
        self.objects().watch(object, handler)
    }

    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>> {
        self.objects().watchers(object)
    }

    fn notify(&self, object: &ObjectName, payload: Vec<u8>, timeout: Duration) -> LocalFuture<Result<Notified>> {
        self.objects().notify(object, payload, timeout)
    }

    fn answer_notification(
        &self,
        object: &ObjectName,
        id: u64,
        cookie: u64,
        payload: Vec<u8>,
    ) -> LocalFuture<Result<()>> {
        self.objects().answer_notification(object, id, cookie, payload)
    }

    fn blocklist(&self, address: &str, expire: Option<Duration>) -> LocalFuture<Result<()>> {
        self.objects().blocklist(address, expire)
    }

    fn mark_in_use(&self) {
        self.objects().mark_in_use();
    }

    fn pool_id(&self) -> i64 {
        self.objects().pool_id()
    }

    fn pool_ids(&self) -> Vec<i64> {
        self.objects().pool_ids()
    }

    fn pool_id_of(&self, name: &str) -> LocalFuture<Result<i64>> {
        self.objects().pool_id_of(name)
    }

    fn pool(&self, id: i64) -> LocalFuture<Result<Rc<dyn ObjectBackend>>> {
        match &self.other {
            Some((number, pool)) if *number == id => {
                let pool: Rc<dyn ObjectBackend> = pool.clone();
                Box::pin(async move { Ok(pool) })
            }
            _ => self.objects().pool(id),
        }
    }
}
