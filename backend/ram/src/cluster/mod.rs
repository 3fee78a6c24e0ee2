//! Pools shared by several clients: an in-memory model of RADOS's shared state.
//!
//! A [`RamCluster`] has pools and clients.  Each [`RamClient`] sees a pool as an [`ObjectBackend`] with
//! [`SharedObjects`](forebay_block::SharedObjects):
//! the object classes `lock` and `rbd` as far as images call them, watch and notify, and a blocklist.  A client can
//! die: it no longer answers, and its watches stay until they are expired.

mod classes;
mod pool;
pub mod rbd;
mod stalls;
mod watches;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, Result};
use forebay_reactor::sync::KeyedLock;
use forebay_reactor::yield_now;

use crate::RamBackend;
use classes::Caller;
use pool::ClientPool;
pub use stalls::Stall;
use stalls::Stalls;
use watches::{Notifications, RamWatches};

/// Object of a pool: pool ID and name.
type PoolObject = (i64, ObjectName);

/// Cluster, as its clients share it.
struct ClusterModel {
    /// Identity of the cluster, from the seed.
    fsid: [u8; 16],
    pools: RefCell<BTreeMap<i64, (String, Rc<RamBackend>)>>,
    watches: RamWatches,
    notifications: Notifications,
    blocked: RefCell<BTreeSet<String>>,
    last_client: Cell<u64>,
    late: Cell<u64>,
    rng: Cell<u64>,
    /// Set if transactions are delayed too.
    delayed: Cell<bool>,
    /// Lock that serializes the transactions on one object.
    order: KeyedLock<PoolObject>,
    stalls: Rc<Stalls>,
    in_flight: Cell<usize>,
    /// Callback for each transaction that has changed an object.
    observer: RefCell<Option<Rc<dyn Fn(i64, &ObjectName)>>>,
}

/// In-memory cluster.
#[derive(Clone)]
pub struct RamCluster(Rc<ClusterModel>);

impl RamCluster {
    /// Creates a cluster without pools.  Completions are delayed by up to `late` executor turns after the operation was
    /// executed, at random from the seed.
    pub fn new(seed: u64, late: u64) -> Self {
        let fsid = u128::from_be_bytes(*b"in-memory ceph..") ^ u128::from(seed);
        Self(Rc::new(ClusterModel {
            fsid: fsid.to_be_bytes(),
            pools: RefCell::default(),
            watches: RamWatches::default(),
            notifications: Notifications::default(),
            blocked: RefCell::default(),
            last_client: Cell::new(4100),
            late: Cell::new(late),
            rng: Cell::new(seed | 1),
            delayed: Cell::new(false),
            order: KeyedLock::new(),
            stalls: Rc::default(),
            in_flight: Cell::new(0),
            observer: RefCell::default(),
        }))
    }

    /// Delays transactions, from now on, on their way as well: by up to `late` turns, and those of a client that has
    /// died meanwhile still arrive.
    pub fn delay_transactions(&self) {
        self.0.delayed.set(true);
    }

    /// Sets `observer`, which is called with the pool and name of each object that a transaction has just changed.
    pub fn observe(&self, observer: impl Fn(i64, &ObjectName) + 'static) {
        *self.0.observer.borrow_mut() = Some(Rc::new(observer));
    }

    /// Adds a pool; returns its ID.
    pub fn add_pool(&self, name: &str) -> i64 {
        let mut pools = self.0.pools.borrow_mut();
        let id = pools.len() as i64 + 1;
        pools.insert(id, (name.to_owned(), RamBackend::new(name)));
        id
    }

    /// Creates a client.
    pub fn client(&self) -> RamClient {
        let number = self.0.last_client.get() + 13;
        self.0.last_client.set(number);
        RamClient(Rc::new(ClientModel {
            cluster: self.0.clone(),
            number,
            address: format!("127.0.0.1:0/{}", number * 7),
            last_cookie: Cell::new(0x5000 + number),
            dead: Cell::new(false),
            pools: RefCell::default(),
            in_use: RefCell::default(),
        }))
    }

    /// Returns the backend of a pool without a client, to inspect its content.
    pub fn bare(&self, pool: i64) -> Rc<RamBackend> {
        self.0.pools.borrow()[&pool].1.clone()
    }

    /// Stalls transactions and lists of keys of the objects of a pool whose names begin with `prefix`.
    pub fn stall(&self, pool: i64, prefix: &str) -> Stall {
        Stall::new(&self.0.stalls, pool, prefix)
    }

    /// Returns the number of transactions that have been submitted and have not taken effect yet.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.get()
    }

    /// Returns the addresses on the blocklist.
    pub fn blocklisted(&self) -> Vec<String> {
        self.0.blocked.borrow().iter().cloned().collect()
    }

    /// Expires the watches of dead clients.
    pub fn expire_watches(&self) {
        self.0.watches.retain(|entry| entry.client.upgrade().is_some_and(|client| !client.dead.get()));
    }

    /// Loses the next notifications: their senders are told of a timeout.
    pub fn lose_notifications(&self, count: u32) {
        self.0.notifications.lose_next(count);
    }

    /// Breaks every watch of a living client, as a connection loss beyond the timeout does.
    pub fn break_watches(&self) {
        self.0.watches.break_all();
    }

    /// Returns the number of watches.
    pub fn watches(&self) -> usize {
        self.0.watches.len()
    }
}

impl ClusterModel {
    fn observed(&self, object: &PoolObject) {
        let observer = self.observer.borrow().clone();
        if let Some(observer) = observer {
            observer(object.0, &object.1);
        }
    }

    async fn lag(&self) {
        if self.late.get() == 0 {
            return;
        }
        let mut x = self.rng.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.rng.set(x);
        for _ in 0..x % (self.late.get() + 1) {
            yield_now().await;
        }
    }
}

/// Client, as its pools share it.
struct ClientModel {
    cluster: Rc<ClusterModel>,
    number: u64,
    address: String,
    last_cookie: Cell<u64>,
    dead: Cell<bool>,
    pools: RefCell<BTreeMap<i64, Weak<ClientPool>>>,
    /// Pools marked as in use by hosts.
    in_use: RefCell<BTreeSet<i64>>,
}

/// Client of a cluster.
#[derive(Clone)]
pub struct RamClient(Rc<ClientModel>);

impl RamClient {
    /// Returns a pool by its ID.
    pub fn pool(&self, id: i64) -> Rc<dyn ObjectBackend> {
        self.0.pool(id).expect("a pool of the cluster")
    }

    /// Kills the client: from now on its operations never complete.
    pub fn die(&self) {
        self.0.dead.set(true);
    }

    /// Drops the client's watches in the cluster, without notifying it.
    pub fn lose_watches(&self) {
        self.0.cluster.watches.retain(|entry| entry.watcher.client != self.0.number);
    }

    /// Returns the pools that were marked as in use by hosts.
    pub fn pools_in_use(&self) -> Vec<i64> {
        self.0.in_use.borrow().iter().copied().collect()
    }

    /// Returns the address of the client.
    pub fn address(&self) -> String {
        self.0.address.clone()
    }
}

impl ClientModel {
    fn pool(self: &Rc<Self>, id: i64) -> Result<Rc<dyn ObjectBackend>> {
        let mut pools = self.pools.borrow_mut();
        if let Some(pool) = pools.get(&id).and_then(Weak::upgrade) {
            return Ok(pool);
        }
        let ram = self.cluster.pools.borrow().get(&id).map(|pool| pool.1.clone());
        let ram = ram.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("pool {id}")))?;
        let pool = ClientPool::new(self.clone(), id, ram);
        pools.insert(id, Rc::downgrade(&pool));
        Ok(pool)
    }

    fn caller(&self) -> Caller {
        Caller { number: self.number, address: self.address.clone() }
    }

    fn check(&self) -> Result<()> {
        if self.cluster.blocked.borrow().contains(&self.address) {
            return Err(Error::new(ErrorKind::Fenced, format!("client.{} is on the blocklist", self.number)));
        }
        Ok(())
    }
}
