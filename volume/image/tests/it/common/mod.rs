//! Test backend that completes late, in any order across objects, that can be made to fail, and that tracks the state
//! after a crash.

pub mod cluster;
pub mod failing;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    BackendInfo, Buf, BufList, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, ObjectBackend, ObjectName,
    ObjectRead, ObjectStat, Result, SnapId, SnapSet, SparseData, Transaction, Usage,
};
use forebay_ram::RamBackend;
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

/// Runs a test on a reactor of the operating system.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(future)
}

pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(29).wrapping_add((i >> 8) as u8) ^ seed | 1).collect()
}

pub fn bytes(data: &[u8]) -> BufList {
    // Split in two parts, so that scatter-gather is used.
    let (a, b) = data.split_at(data.len() / 3);
    [a, b].into_iter().map(Buf::copy_of).collect()
}

/// Returns the names of all objects.
pub async fn objects(backend: &Rc<dyn ObjectBackend>) -> Vec<String> {
    let page = backend.list(None, None, 100_000).await.expect("a listing");
    assert!(page.next.is_none());
    page.names.iter().map(|name| name.name().to_owned()).collect()
}

/// State of non-durable changes after a crash.
#[derive(Debug, Clone, Copy)]
pub enum Left {
    /// No changes are kept.
    Nothing,
    /// Every change is kept.
    Everything,
    /// A prefix of each object's changes is kept, chosen by this seed.
    Some(u64),
}

/// Failing transactions, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fail {
    Never,
    /// Transactions from this one on.
    From(u64),
    /// Only this transaction.
    Only(u64),
}

pub struct Stormy {
    ram: Rc<RamBackend>,
    durable: Rc<RamBackend>,
    pending: RefCell<Vec<(ObjectName, Transaction)>>,
    order: RefCell<BTreeMap<ObjectName, Semaphore>>,
    rng: Cell<u64>,
    late: Cell<u64>,
    fail: Cell<Fail>,
    submitted: Cell<u64>,
    dead: Cell<bool>,
    under_way: Cell<usize>,
    under_way_most: Cell<usize>,
    /// Set if names are listed in order.
    in_order: bool,
    this: std::rc::Weak<Stormy>,
}

impl Stormy {
    /// Returns a backend whose completions come up to `late` turns of the executor later, by the seed; an even seed
    /// keeps names in order.
    pub fn new(seed: u64, late: u64) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            ram: RamBackend::new("ram"),
            durable: RamBackend::new("ram"),
            pending: RefCell::default(),
            order: RefCell::default(),
            rng: Cell::new(seed | 1),
            late: Cell::new(late),
            fail: Cell::new(Fail::Never),
            submitted: Cell::new(0),
            dead: Cell::new(false),
            under_way: Cell::new(0),
            under_way_most: Cell::new(0),
            in_order: seed.is_multiple_of(2),
            this: this.clone(),
        })
    }

    /// Sets the failure mode, and restarts the count of transactions.
    pub fn fail(&self, fail: Fail) {
        self.fail.set(fail);
        self.submitted.set(0);
    }

    /// Restarts the count of transactions.
    pub fn count(&self) {
        self.submitted.set(0);
        self.under_way_most.set(0);
    }

    /// Returns the number of transactions since then, and the maximum in flight at once.
    pub fn counted(&self) -> (u64, usize) {
        (self.submitted.get(), self.under_way_most.get())
    }

    fn random(&self) -> u64 {
        let mut x = self.rng.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.rng.set(x);
        x
    }

    async fn wait(&self) {
        if self.late.get() > 0 {
            for _ in 0..self.random() % (self.late.get() + 1) {
                yield_now().await;
            }
        }
    }

    fn error() -> Error {
        Error::new(ErrorKind::Io, "injected")
    }

    fn check_alive(&self) -> Result<()> {
        if self.dead.get() { Err(Self::error()) } else { Ok(()) }
    }

    fn take_turn(&self) -> Result<()> {
        self.check_alive()?;
        let turn = self.submitted.replace(self.submitted.get() + 1);
        match self.fail.get() {
            Fail::From(at) if turn >= at => {
                self.dead.set(true);
                Err(Self::error())
            }
            Fail::Only(at) if turn == at => Err(Self::error()),
            _ => Ok(()),
        }
    }

    async fn apply(&self, object: &ObjectName, transaction: Transaction) -> Result<u64> {
        self.take_turn()?;
        let version = self.ram.submit(object, transaction.clone()).await?;
        let durable = transaction.durable;
        self.pending.borrow_mut().push((object.clone(), transaction));
        if durable {
            self.make_durable(Some(object)).await;
        }
        Ok(version)
    }

    async fn make_durable(&self, only: Option<&ObjectName>) {
        let all = self.pending.take();
        let (now, later): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(object, _)| only.is_none_or(|only| only == object));
        *self.pending.borrow_mut() = later;
        for (object, transaction) in now {
            self.durable.submit(&object, transaction).await.expect("what went once goes again");
        }
    }

    /// Simulates a power failure; returns the backend after the restart.
    pub async fn crash(&self, left: Left) -> Rc<dyn ObjectBackend> {
        self.dead.set(true);
        let mut kept: BTreeMap<ObjectName, u64> = BTreeMap::new();
        if let Left::Some(seed) = left {
            self.rng.set(seed | 1);
        }
        for (object, transaction) in self.pending.take() {
            let few = match left {
                Left::Nothing => 0,
                Left::Everything => u64::MAX,
                Left::Some(_) => *kept.entry(object.clone()).or_insert_with(|| self.random() % 3),
            };
            if few > 0 {
                self.durable.submit(&object, transaction).await.expect("what went once goes again");
                kept.insert(object, few - 1);
            }
        }
        self.durable.clone()
    }

    fn later<T: 'static>(
        &self,
        work: impl FnOnce(&RamBackend) -> LocalFuture<Result<T>> + 'static,
    ) -> LocalFuture<Result<T>> {
        let this = self.this.upgrade().expect("it is being called");
        Box::pin(async move {
            this.wait().await;
            this.check_alive()?;
            let result = work(&this.ram).await;
            this.wait().await;
            result
        })
    }
}

impl ObjectBackend for Stormy {
    fn info(&self) -> BackendInfo {
        BackendInfo { durable_at_once: false, ..self.ram.info() }
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        let object = object.clone();
        self.later(move |ram| ram.read(&object, read))
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        let object = object.clone();
        self.later(move |ram| ram.map(&object, read))
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        let object = object.clone();
        self.later(move |ram| ram.stat(&object, snap))
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let this = self.this.upgrade().expect("it is being called");
        let turns = self.order.borrow_mut().entry(object.clone()).or_insert_with(|| Semaphore::new(1)).clone();
        let object = object.clone();
        self.under_way.set(self.under_way.get() + 1);
        self.under_way_most.set(self.under_way_most.get().max(self.under_way.get()));
        // Tasks start in the order in which they were spawned, so an object's transactions queue up in order.
        let task = spawn(async move {
            let turn = turns.acquire(1).await;
            this.wait().await;
            let result = this.apply(&object, transaction).await;
            drop(turn);
            this.wait().await;
            this.under_way.set(this.under_way.get() - 1);
            result
        });
        Box::pin(task)
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        let object = object.clone();
        self.later(move |ram| ram.kv_get(&object, keys))
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        let (object, prefix, after) = (object.clone(), prefix.to_vec(), after.to_vec());
        self.later(move |ram| ram.kv_list(&object, &prefix, &after, max))
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        let object = object.clone();
        self.later(move |ram| ram.snap_set(&object))
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        self.later(|ram| ram.snap_allocate())
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        self.later(move |ram| ram.snap_remove(snap))
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        let namespace = namespace.map(str::to_owned);
        self.later(move |ram| ram.list(namespace.as_deref(), cursor, max))
    }

    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        let ask = move |ram: &RamBackend| ram.list_between(names, max).expect("names in memory are in order");
        self.in_order.then(|| self.later(ask))
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        let this = self.this.upgrade().expect("it is being called");
        Box::pin(async move {
            this.wait().await;
            this.take_turn()?;
            this.make_durable(None).await;
            Ok(())
        })
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        self.later(|ram| ram.usage())
    }
}
