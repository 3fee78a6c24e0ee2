//! Pool as seen by one client of the cluster.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    BackendInfo, ClientIdentity, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, Method, Notification,
    Notified, NotifyAnswer, ObjectBackend, ObjectName, ObjectRead, ObjectStat, PoolIdentity, Result, SharedObjects,
    SnapId, SnapSet, SparseData, Transaction, Usage, Watch, WatchHandler, Watcher,
};
use forebay_reactor::{Instant, now, sleep, spawn, timeout};

use super::watches::WatchEntry;
use super::{ClientModel, classes};
use crate::RamBackend;

/// Pool as seen by one client.
pub(super) struct ClientPool {
    client: Rc<ClientModel>,
    id: i64,
    ram: Rc<RamBackend>,
    this: Weak<ClientPool>,
}

impl ClientPool {
    pub(super) fn new(client: Rc<ClientModel>, id: i64, ram: Rc<RamBackend>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self { client, id, ram, this: this.clone() })
    }

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
        let direct = !cluster.delayed.get() && !cluster.order.is_locked(&place) && !cluster.stalls.is_stalled(&place);
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
            cluster.stalls.wait_out(&place).await;
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
        let listed = self.act(|this| this.ram.kv_list(object, prefix, after, max));
        let (cluster, place) = (self.client.cluster.clone(), (self.id, object.clone()));
        Box::pin(async move {
            cluster.stalls.wait_out(&place).await;
            listed.await
        })
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        self.act(|this| this.ram.snap_set(object))
    }

    fn identity(&self) -> Option<PoolIdentity> {
        Some(PoolIdentity { store: self.client.cluster.fsid, pool: self.id })
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

/// Watch of a client, dropped in the cluster with it.
struct ModelWatch {
    client: Rc<ClientModel>,
    cookie: u64,
    confirmed: Cell<Instant>,
}

/// Interval at which a watch is confirmed.
const PING_INTERVAL: Duration = Duration::from_secs(5);

impl ModelWatch {
    fn forget(&self) {
        let own = (self.client.number, self.cookie);
        self.client.cluster.watches.retain(|entry| (entry.watcher.client, entry.watcher.cookie) != own);
    }
}

impl Watch for ModelWatch {
    fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Returns the time of the last ping.  The model has no pings: one counts as sent when the time is asked for, as
    /// long as it would be answered.
    fn confirmed(&self) -> Instant {
        let client = &self.client;
        let is_due = self.confirmed.get().elapsed() >= PING_INTERVAL;
        let is_answered = || !client.dead.get() && client.check().is_ok();
        if is_due && is_answered() && client.cluster.watches.has(client.number, self.cookie) {
            self.confirmed.set(now());
        }
        self.confirmed.get()
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
                let entry = WatchEntry { object: place, client: Rc::downgrade(&client), watcher, handler };
                client.cluster.watches.add(entry);
                Ok(Box::new(ModelWatch { client, cookie, confirmed: Cell::new(now()) }) as Box<dyn Watch>)
            })
        })
    }

    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>> {
        let place = (self.id, object.clone());
        let watches = self.client.cluster.watches.of(&place);
        self.now(Ok(watches.into_iter().map(|entry| entry.watcher).collect()))
    }

    fn notify(&self, object: &ObjectName, payload: Vec<u8>, limit: Duration) -> LocalFuture<Result<Notified>> {
        let place = (self.id, object.clone());
        self.act(|this| {
            let cluster = this.client.cluster.clone();
            if cluster.notifications.is_lost() {
                return Box::pin(async move {
                    sleep(limit).await;
                    Err(Error::new(ErrorKind::TimedOut, "the notification was lost"))
                });
            }
            let sender = this.client.number;
            let watches = cluster.watches.of(&place);
            let wanted = watches.iter().map(|entry| (entry.watcher.client, entry.watcher.cookie)).collect();
            let id = cluster.notifications.begin(wanted);
            for WatchEntry { client, watcher, handler, .. } in watches {
                let notification = Notification { id, cookie: watcher.cookie, sender, payload: payload.clone() };
                let cluster = cluster.clone();
                drop(spawn(async move {
                    cluster.lag().await;
                    if client.upgrade().is_some_and(|client| !client.dead.get()) {
                        handler.notified(notification);
                    }
                }));
            }
            Box::pin(async move {
                let _ = timeout(limit, cluster.notifications.all_acknowledged(id)).await;
                Ok(cluster.notifications.end(id))
            })
        })
    }

    fn answer_notification(&self, _: &ObjectName, id: u64, cookie: u64, payload: Vec<u8>) -> LocalFuture<Result<()>> {
        let client = self.client.number;
        self.act(|this| {
            this.client.cluster.notifications.acknowledge(id, NotifyAnswer { client, cookie, payload });
            Box::pin(std::future::ready(Ok(())))
        })
    }

    fn blocklist(&self, address: &str, _: Option<Duration>) -> LocalFuture<Result<()>> {
        self.act(|this| {
            let cluster = &this.client.cluster;
            cluster.blocked.borrow_mut().insert(address.to_owned());
            // OSDs end the watches of blocklisted clients.
            cluster.watches.retain(|entry| entry.watcher.address != address);
            Box::pin(std::future::ready(Ok(())))
        })
    }

    fn mark_in_use(&self) {
        self.client.in_use.borrow_mut().insert(self.id);
    }

    fn pool_id(&self) -> i64 {
        self.id
    }

    fn pool_ids(&self) -> Vec<i64> {
        self.client.cluster.pools.borrow().keys().copied().collect()
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
