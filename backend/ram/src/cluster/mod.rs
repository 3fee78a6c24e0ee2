//! Pools shared by several clients: an in-memory model of RADOS's shared state.
//!
//! A [`Cluster`] has pools and clients.  Each [`Client`] sees a pool as an [`ObjectBackend`] with [`SharedObjects`]:
//! the object classes `lock` and `rbd` as far as images call them, watch and notify, and a blocklist.  A client can
//! die: it no longer answers, and its watches stay until they are expired.

mod classes;
pub mod rbd;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    BackendInfo, ClientIdentity, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, Method, Notification,
    Notified, NotifyAnswer, ObjectBackend, ObjectName, ObjectRead, ObjectStat, Result, SharedObjects, SnapId, SnapSet,
    SparseData, Transaction, Usage, Watch, WatchHandler, Watcher,
};
use forebay_reactor::sync::{KeyedLock, Notify};
use forebay_reactor::{sleep, spawn, timeout, yield_now};

use crate::RamBackend;
use classes::Caller;

/// Object of a pool: pool ID and name.
type Place = (i64, ObjectName);

struct WatchEntry {
    place: Place,
    client: Weak<ClientInner>,
    watcher: Watcher,
    handler: Rc<dyn WatchHandler>,
}

/// Notification that waits for acknowledgements.
struct Pending {
    /// Outstanding watchers, by client and cookie.
    wanted: BTreeSet<(u64, u64)>,
    answers: Vec<NotifyAnswer>,
    changed: Rc<Notify>,
}

struct Inner {
    pools: RefCell<BTreeMap<i64, (String, Rc<RamBackend>)>>,
    watches: RefCell<Vec<WatchEntry>>,
    pending: RefCell<BTreeMap<u64, Pending>>,
    blocked: RefCell<BTreeSet<String>>,
    last_client: Cell<u64>,
    last_notify: Cell<u64>,
    /// Number of notifications that are still to be lost.
    lost_notifies: Cell<u32>,
    late: Cell<u64>,
    rng: Cell<u64>,
    /// Set if transactions are delayed too.
    delayed: Cell<bool>,
    /// Lock that serializes the transactions on one object.
    order: KeyedLock<Place>,
    /// Stalled object names: pool, name prefix, number of the [`Stall`].
    stalls: RefCell<Vec<(i64, String, u64)>>,
    last_stall: Cell<u64>,
    /// Number of transactions that wait for a stall to end.
    stalled: Cell<usize>,
    stalls_changed: Rc<Notify>,
    in_flight: Cell<usize>,
    /// Callback for each transaction that has changed an object.
    observer: RefCell<Option<Rc<dyn Fn(i64, &ObjectName)>>>,
}

/// Guard that stalls transactions on some objects of a pool: they have arrived, and take effect once it is dropped.
pub struct Stall {
    cluster: Rc<Inner>,
    number: u64,
}

impl Stall {
    /// Returns the number of transactions that wait for the end of a stall, of this one or another.
    pub fn waiting(&self) -> usize {
        self.cluster.stalled.get()
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.cluster.stalls.borrow_mut().retain(|(_, _, number)| *number != self.number);
        self.cluster.stalls_changed.notify_all();
    }
}

/// In-memory cluster.
#[derive(Clone)]
pub struct Cluster(Rc<Inner>);

impl Cluster {
    /// Creates a cluster without pools.  Completions are delayed by up to `late` executor turns after the operation was
    /// executed, at random from the seed.
    pub fn new(seed: u64, late: u64) -> Self {
        Self(Rc::new(Inner {
            pools: RefCell::default(),
            watches: RefCell::default(),
            pending: RefCell::default(),
            blocked: RefCell::default(),
            last_client: Cell::new(4100),
            last_notify: Cell::new(0),
            lost_notifies: Cell::new(0),
            late: Cell::new(late),
            rng: Cell::new(seed | 1),
            delayed: Cell::new(false),
            order: KeyedLock::new(),
            stalls: RefCell::default(),
            last_stall: Cell::new(0),
            stalled: Cell::new(0),
            stalls_changed: Rc::default(),
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
    pub fn client(&self) -> Client {
        let number = self.0.last_client.get() + 13;
        self.0.last_client.set(number);
        Client(Rc::new(ClientInner {
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

    /// Stalls transactions on the objects of a pool whose names begin with `prefix`.
    pub fn stall(&self, pool: i64, prefix: &str) -> Stall {
        let number = self.0.last_stall.get() + 1;
        self.0.last_stall.set(number);
        self.0.stalls.borrow_mut().push((pool, prefix.to_owned(), number));
        Stall { cluster: self.0.clone(), number }
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
        self.0.watches.borrow_mut().retain(|entry| entry.client.upgrade().is_some_and(|client| !client.dead.get()));
    }

    /// Loses the next notifications: their senders are told of a timeout.
    pub fn lose_notifications(&self, count: u32) {
        self.0.lost_notifies.set(count);
    }

    /// Breaks every watch of a living client, as a connection loss beyond the timeout does.
    pub fn break_watches(&self) {
        for entry in self.0.watches.take() {
            entry.handler.broken(Error::new(ErrorKind::TimedOut, "the watch was cut"));
        }
    }

    /// Returns the number of watches.
    pub fn watches(&self) -> usize {
        self.0.watches.borrow().len()
    }
}

impl Inner {
    fn observed(&self, place: &Place) {
        let observer = self.observer.borrow().clone();
        if let Some(observer) = observer {
            observer(place.0, &place.1);
        }
    }

    fn is_stalled(&self, place: &Place) -> bool {
        self.stalls.borrow().iter().any(|(pool, prefix, _)| *pool == place.0 && place.1.name().starts_with(prefix))
    }

    async fn wait_out_stalls(&self, place: &Place) {
        if self.is_stalled(place) {
            self.stalled.set(self.stalled.get() + 1);
            self.stalls_changed.wait_until(|| !self.is_stalled(place)).await;
            self.stalled.set(self.stalled.get() - 1);
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

struct ClientInner {
    cluster: Rc<Inner>,
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
pub struct Client(Rc<ClientInner>);

impl Client {
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
        self.0.cluster.watches.borrow_mut().retain(|entry| entry.watcher.client != self.0.number);
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

impl ClientInner {
    fn pool(self: &Rc<Self>, id: i64) -> Result<Rc<dyn ObjectBackend>> {
        let mut pools = self.pools.borrow_mut();
        if let Some(pool) = pools.get(&id).and_then(Weak::upgrade) {
            return Ok(pool);
        }
        let ram = self.cluster.pools.borrow().get(&id).map(|pool| pool.1.clone());
        let ram = ram.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("pool {id}")))?;
        let client = self.clone();
        let pool = Rc::new_cyclic(|this| ClientPool { client, id, ram, this: this.clone() });
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

/// Pool as seen by one client.
struct ClientPool {
    client: Rc<ClientInner>,
    id: i64,
    ram: Rc<RamBackend>,
    this: Weak<ClientPool>,
}

impl ClientPool {
    /// Executes an operation at once, unless this client is fenced, and delays its completion; operations of a dead
    /// client never complete.
    fn act<T: 'static>(&self, work: impl FnOnce(&Self) -> LocalFuture<Result<T>>) -> LocalFuture<Result<T>> {
        let client = self.client.clone();
        if client.dead.get() {
            return Box::pin(std::future::pending());
        }
        let done = match client.check() {
            Ok(()) => work(self),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        };
        Box::pin(async move {
            client.cluster.lag().await;
            let result = done.await;
            if client.dead.get() {
                std::future::pending::<()>().await;
            }
            result
        })
    }

    fn now<T: 'static>(&self, result: Result<T>) -> LocalFuture<Result<T>> {
        self.act(move |_| Box::pin(std::future::ready(result)))
    }
}

impl ObjectBackend for ClientPool {
    fn info(&self) -> BackendInfo {
        BackendInfo { kind: "rados", ..self.ram.info() }
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        self.act(|this| this.ram.read(object, read))
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        self.act(|this| this.ram.map(object, read))
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        self.act(|this| this.ram.stat(object, snap))
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let cluster = self.client.cluster.clone();
        let place = (self.id, object.clone());
        let direct = !cluster.delayed.get() && !cluster.order.is_locked(&place) && !cluster.is_stalled(&place);
        if direct || self.client.dead.get() {
            return self.act(|this| {
                let done = this.ram.transact(object, &transaction, &this.client.caller());
                if done.is_ok() {
                    this.client.cluster.observed(&place);
                }
                Box::pin(std::future::ready(done))
            });
        }
        // In flight: the transaction arrives even if its future was dropped, or its client has died meanwhile.
        let (ram, client) = (self.ram.clone(), self.client.clone());
        cluster.in_flight.set(cluster.in_flight.get() + 1);
        let task = spawn(async move {
            let turn = cluster.order.lock(&place).await;
            if cluster.delayed.get() {
                cluster.lag().await;
            }
            cluster.wait_out_stalls(&place).await;
            let done = match client.check() {
                Ok(()) => ram.transact(&place.1, &transaction, &client.caller()),
                Err(error) => Err(error),
            };
            if done.is_ok() {
                cluster.observed(&place);
            }
            drop(turn);
            cluster.in_flight.set(cluster.in_flight.get() - 1);
            cluster.lag().await;
            if client.dead.get() {
                std::future::pending::<()>().await;
            }
            done
        });
        Box::pin(task)
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        self.act(|this| this.ram.kv_get(object, keys))
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        self.act(|this| this.ram.kv_list(object, prefix, after, max))
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        self.act(|this| this.ram.snap_set(object))
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        self.act(|this| this.ram.snap_allocate())
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        self.act(|this| this.ram.snap_remove(snap))
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        self.act(|this| this.ram.list(namespace, cursor, max))
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        self.act(|this| this.ram.flush())
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        self.act(|this| this.ram.usage())
    }

    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        self.this.upgrade().map(|this| this as _)
    }
}

struct ModelWatch {
    client: Rc<ClientInner>,
    cookie: u64,
}

impl ModelWatch {
    fn forget(&self) {
        let own = (self.client.number, self.cookie);
        let mut gone = Vec::new();
        self.client.cluster.watches.borrow_mut().retain_mut(|entry| {
            let keep = (entry.watcher.client, entry.watcher.cookie) != own;
            if !keep {
                gone.push(entry.handler.clone());
            }
            keep
        });
    }
}

impl Watch for ModelWatch {
    fn cookie(&self) -> u64 {
        self.cookie
    }

    fn end(&self) -> LocalFuture<Result<()>> {
        if !self.client.dead.get() {
            self.forget();
        }
        let client = self.client.clone();
        Box::pin(async move {
            client.cluster.lag().await;
            Ok(())
        })
    }
}

impl Drop for ModelWatch {
    fn drop(&mut self) {
        if !self.client.dead.get() {
            self.forget();
        }
    }
}

impl SharedObjects for ClientPool {
    fn identity(&self) -> ClientIdentity {
        ClientIdentity { number: self.client.number, address: self.client.address.clone() }
    }

    fn exec(&self, object: &ObjectName, snap: SnapId, method: Method, input: Vec<u8>) -> LocalFuture<Result<Vec<u8>>> {
        self.act(|this| this.ram.look(object, snap, |content, _| classes::exec(content, method, &input)))
    }

    fn watch(&self, object: &ObjectName, handler: Rc<dyn WatchHandler>) -> LocalFuture<Result<Box<dyn Watch>>> {
        let there = self.ram.look(object, SnapId::HEAD, |_, _| Ok(()));
        self.act(|this| {
            let (client, place) = (this.client.clone(), (this.id, object.clone()));
            Box::pin(async move {
                there.await?;
                let cookie = client.last_cookie.get() + 1;
                client.last_cookie.set(cookie);
                let watcher = Watcher { client: client.number, cookie, address: client.address.clone() };
                let entry = WatchEntry { place, client: Rc::downgrade(&client), watcher, handler };
                client.cluster.watches.borrow_mut().push(entry);
                Ok(Box::new(ModelWatch { client, cookie }) as Box<dyn Watch>)
            })
        })
    }

    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>> {
        let place = (self.id, object.clone());
        let watches = self.client.cluster.watches.borrow();
        let watchers = watches.iter().filter(|entry| entry.place == place).map(|entry| entry.watcher.clone());
        self.now(Ok(watchers.collect()))
    }

    fn notify(&self, object: &ObjectName, payload: Vec<u8>, limit: Duration) -> LocalFuture<Result<Notified>> {
        let place = (self.id, object.clone());
        self.act(|this| {
            let cluster = this.client.cluster.clone();
            if let Some(left) = cluster.lost_notifies.get().checked_sub(1) {
                cluster.lost_notifies.set(left);
                return Box::pin(async move {
                    sleep(limit).await;
                    Err(Error::new(ErrorKind::TimedOut, "the notification was lost"))
                });
            }
            let sender = this.client.number;
            let id = cluster.last_notify.get() + 1;
            cluster.last_notify.set(id);
            let changed = Rc::new(Notify::new());
            let mut wanted = BTreeSet::new();
            for entry in cluster.watches.borrow().iter().filter(|entry| entry.place == place) {
                let cookie = entry.watcher.cookie;
                wanted.insert((entry.watcher.client, cookie));
                let notification = Notification { id, cookie, sender, payload: payload.clone() };
                let (cluster, client, handler) = (cluster.clone(), entry.client.clone(), entry.handler.clone());
                drop(spawn(async move {
                    cluster.lag().await;
                    if client.upgrade().is_some_and(|client| !client.dead.get()) {
                        handler.notified(notification);
                    }
                }));
            }
            let pending = Pending { wanted, answers: Vec::new(), changed: changed.clone() };
            cluster.pending.borrow_mut().insert(id, pending);
            Box::pin(async move {
                let all = changed.wait_until(|| {
                    let pending = cluster.pending.borrow();
                    pending[&id].answers.len() >= pending[&id].wanted.len()
                });
                let _ = timeout(limit, all).await;
                let pending = cluster.pending.borrow_mut().remove(&id).expect("it was there");
                let answered: BTreeSet<_> = pending.answers.iter().map(|by| (by.client, by.cookie)).collect();
                let missed = pending.wanted.difference(&answered).copied().collect();
                Ok(Notified { answers: pending.answers, missed })
            })
        })
    }

    fn answer_notification(&self, _: &ObjectName, id: u64, cookie: u64, payload: Vec<u8>) -> LocalFuture<Result<()>> {
        let client = self.client.number;
        self.act(|this| {
            if let Some(pending) = this.client.cluster.pending.borrow_mut().get_mut(&id) {
                pending.answers.push(NotifyAnswer { client, cookie, payload });
                pending.changed.notify_all();
            }
            Box::pin(std::future::ready(Ok(())))
        })
    }

    fn blocklist(&self, address: &str, _: Option<Duration>) -> LocalFuture<Result<()>> {
        self.act(|this| {
            let cluster = &this.client.cluster;
            cluster.blocked.borrow_mut().insert(address.to_owned());
            // OSDs end the watches of blocklisted clients.
            let mut gone = Vec::new();
            cluster.watches.borrow_mut().retain(|entry| {
                let stays = entry.watcher.address != address;
                if !stays {
                    gone.push(entry.handler.clone());
                }
                stays
            });
            drop(gone);
            Box::pin(std::future::ready(Ok(())))
        })
    }

    fn mark_in_use(&self) {
        self.client.in_use.borrow_mut().insert(self.id);
    }

    fn pool_id(&self) -> i64 {
        self.id
    }

    fn pool_id_of(&self, name: &str) -> LocalFuture<Result<i64>> {
        let pools = self.client.cluster.pools.borrow();
        let found = pools.iter().find(|(_, pool)| pool.0 == name).map(|(id, _)| *id);
        self.now(found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("pool {name}"))))
    }

    fn pool(&self, id: i64) -> LocalFuture<Result<Rc<dyn ObjectBackend>>> {
        self.now(self.client.pool(id))
    }
}
