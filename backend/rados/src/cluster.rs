//! Client of one cluster, on one core.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{ClientIdentity, Error, ErrorKind, Result};
use forebay_messenger::MessengerCore;
use forebay_messenger::session::cephx::TicketStore;
use forebay_reactor::sync::KeyedLock;
use forebay_reactor::{random, timeout, wall_clock};

use crate::config::{CephConfig, Settings};
use crate::error::failure;
use crate::map::{Epoch, Fsid, OsdMap};
use crate::monitor::wire::{self, OsdMaps, PoolUsage, kind, pool_op};
use crate::monitor::{MonitorListener, Monitors, malformed};
use crate::osd::Objecter;
use crate::pool::RadosPool;

/// Snapshot of the client's view of its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterStatus {
    /// Cluster fsid in the usual UUID notation.
    pub fsid: String,
    /// Global id of this client.
    pub client: u64,
    /// Address of the monitor of the current session; `None` without a session.
    pub monitor: Option<String>,
    /// Number of monitors.
    pub monitors: usize,
    /// Epoch of the OSD map.
    pub epoch: Epoch,
    /// Number of OSDs that are up.
    pub osds_up: usize,
    /// Number of OSDs that the map has slots for.
    pub osds: usize,
    /// Number of pools.
    pub pools: usize,
    /// Number of sessions with OSDs.
    pub sessions: usize,
    /// Number of requests in flight.
    pub requests: usize,
    /// Set if this client is on the cluster's blocklist.
    pub fenced: bool,
}

/// Client: its session with the monitors, and its sessions with OSDs.
pub struct RadosCluster {
    ticket_store: Rc<TicketStore>,
    monitors: Monitors,
    objecter: Rc<Objecter>,
    nonce: u32,
    /// Open pools, by pool id, so that each exists only once.
    pools: RefCell<HashMap<i64, Weak<RadosPool>>>,
    /// Clients that are being blocklisted, by address.
    fencing: KeyedLock<String>,
}

/// Time for which the cluster keeps an entry of its blocklist by default (`mon_osd_blocklist_default_expire`).
const DEFAULT_EXPIRE: Duration = Duration::from_secs(3600);

/// Least time for which an entry of the blocklist must last to be relied on: clocks may differ.
const LASTS_MIN: Duration = Duration::from_secs(30);

/// Time within which monitors remove an entry from the blocklist after [`LASTS_MIN`]: they look every few seconds.
const REMOVED: Duration = Duration::from_secs(60);

struct Maps(Weak<Objecter>);

impl MonitorListener for Maps {
    fn osd_maps(&self, maps: &OsdMaps<'_>) {
        if let Some(objecter) = self.0.upgrade() {
            objecter.take_maps(maps);
        }
    }

    fn settings(&self, settings: &Settings) {
        if let Some(objecter) = self.0.upgrade() {
            objecter.set_timeout(settings.osd_timeout);
        }
    }

    fn refused(&self, error: Option<Error>) {
        if let Some(objecter) = self.0.upgrade() {
            objecter.refuse(error);
        }
    }
}

impl RadosCluster {
    /// Connects to a monitor, and waits until an OSD map has arrived.
    ///
    /// # Errors
    /// `Denied` if the monitors reject the key; `Unsupported` if they accept none of the configured connection modes,
    /// or the cluster requires a newer client; `TimedOut` if no monitor answers in time.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub async fn connect(config: CephConfig) -> Result<Rc<Self>> {
        let core = MessengerCore::default();
        let ticket_store = TicketStore::new();
        // One nonce for all connections: the cluster identifies this client by its nonce and address when it blocklists
        // it.
        let nonce = (random() as u32).max(1);
        let limit = config.connect_timeout;
        let objecter = Objecter::new(ticket_store.clone());
        let who = (config.id.clone(), config.credentials.clone());
        let maps: Rc<dyn MonitorListener> = Rc::new(Maps(Rc::downgrade(&objecter)));
        let monitors = Monitors::start(config, ticket_store.clone(), nonce, &core, maps);
        objecter.set_monitors(monitors.clone());
        let cluster = Rc::new(Self {
            ticket_store,
            monitors,
            objecter,
            nonce,
            pools: RefCell::default(),
            fencing: KeyedLock::default(),
        });
        cluster.monitors.connected().await?;
        cluster.objecter.start(who, nonce, &core, &cluster.monitors.settings());
        let settled = || cluster.objecter.map().is_some() || cluster.objecter.newer_map().is_some();
        let came = cluster.objecter.changed.wait_until(settled);
        if timeout(limit, came).await.is_err() {
            let text = format!("no OSD map received within {} s", limit.as_secs_f32());
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        if let Some(error) = cluster.objecter.newer_map() {
            return Err(error);
        }
        Ok(cluster)
    }

    /// Returns whether this client is on the cluster's blocklist, after which it remains fenced.
    pub fn is_fenced(&self) -> bool {
        self.objecter.is_fenced()
    }

    /// Returns the cluster fsid.
    pub fn fsid(&self) -> [u8; 16] {
        self.monitors.fsid()
    }

    /// Returns the current status.
    pub fn status(&self) -> ClusterStatus {
        let (requests, sessions) = self.objecter.counts();
        let map = self.map();
        ClusterStatus {
            fsid: text(&self.monitors.fsid()),
            client: self.ticket_store.global_id(),
            monitor: self.monitors.current(),
            monitors: self.monitors.count(),
            epoch: map.epoch,
            osds_up: map.osds_up(),
            osds: map.osds(),
            pools: map.pools.len(),
            sessions,
            requests,
            fenced: self.objecter.is_fenced(),
        }
    }

    /// Returns the effective values of settings that the monitors may store for this client. The configuration file
    /// takes precedence.
    pub fn settings(&self) -> Settings {
        self.monitors.settings()
    }

    /// Returns the current OSD map.
    pub fn map(&self) -> Rc<OsdMap> {
        self.objecter.map().expect("a client that has connected has a map")
    }

    /// Opens a pool by name.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` for a pool that requires features unknown to this client.
    pub fn pool(self: &Rc<Self>, name: &str) -> Result<Rc<RadosPool>> {
        let map = self.map();
        let absent = || Error::new(ErrorKind::NotFound, format!("pool {name}"));
        let id = map.pool_named(name).ok_or_else(absent)?;
        self.pool_by_id(id)
    }

    /// Opens a pool by id. All users of a pool share one instance.
    pub(crate) fn pool_by_id(self: &Rc<Self>, id: i64) -> Result<Rc<RadosPool>> {
        let map = self.map();
        let absent = || Error::new(ErrorKind::NotFound, format!("pool {id}"));
        let (pool, name) = map.pools.get(&id).zip(map.names.get(&id)).ok_or_else(absent)?;
        map.check_pool(pool).map_err(|text| Error::new(ErrorKind::Unsupported, format!("pool {name}: {text}")))?;
        let mut pools = self.pools.borrow_mut();
        pools.retain(|_, pool| pool.strong_count() > 0);
        if let Some(pool) = pools.get(&id).and_then(Weak::upgrade) {
            return Ok(pool);
        }
        let pool = RadosPool::new(self.clone(), id, name);
        pools.insert(id, Rc::downgrade(&pool));
        Ok(pool)
    }

    /// Returns the identity by which other clients know this one.
    pub fn identity(&self) -> ClientIdentity {
        let seen = self.monitors.own_addr();
        let address = match seen.and_then(|addr| addr.socket) {
            Some(socket) => format!("{socket}/{}", self.nonce),
            None => format!(":/{}", self.nonce),
        };
        ClientIdentity { number: self.ticket_store.global_id(), address }
    }

    /// Blocklists a client, for `expire` or the cluster's default (`mon_osd_blocklist_default_expire`, an hour), and
    /// waits until the local OSD map includes that.  From then on, every OSD that this client writes to rejects
    /// requests of the blocklisted client; its watches end.
    ///
    /// A client that is on the blocklist stays as it is: monitors keep the time of an entry that exists, and a change of
    /// the map would take them up to a second, for each image that is taken over.
    ///
    /// # Errors
    /// Errors of the monitors: `Denied` if the key's capabilities do not allow it.
    pub async fn blocklist(&self, address: &str, expire: Option<Duration>) -> Result<()> {
        // One at a time for each client: several takeovers of its images at once fence it once.
        let _turn = self.fencing.lock(address).await;
        // An entry may have been removed since the map that this client has.
        self.reach_newest().await?;
        if let Some(left) = self.blocklisted_for(address) {
            let removed = self.objecter.changed.wait_until(|| self.map().blocklisted_until(address).is_none());
            if left >= LASTS_MIN || timeout(REMOVED, removed).await.is_err() {
                if left < expire.unwrap_or(DEFAULT_EXPIRE) / 2 {
                    tracing::warn!(
                        address,
                        left_secs = left.as_secs(),
                        "the client is on the blocklist, for less time than it should be; monitors cannot prolong that: \
                         make sure that its process ends"
                    );
                }
                return Ok(());
            }
        }
        let mut fields = vec![
            ("prefix", wire::quote("osd blocklist")),
            ("blocklistop", wire::quote("add")),
            ("addr", wire::quote(address)),
        ];
        if let Some(expire) = expire {
            fields.push(("expire", format!("{:.3}", expire.as_secs_f64())));
        }
        self.monitors.command(&fields).await?;
        self.reach_newest().await
    }

    /// Returns for how long the client at `address` is on the blocklist still, by this machine's clock; `None` if the
    /// current map does not have it.
    fn blocklisted_for(&self, address: &str) -> Option<Duration> {
        self.map().blocklisted_until(address).map(|until| until.saturating_sub(wall_clock()))
    }

    /// Waits until this client has the newest OSD map that the monitors have now.
    async fn reach_newest(&self) -> Result<()> {
        let reply =
            self.monitors.request(kind::GET_VERSION, (1, 1), &wire::version("osdmap"), Default::default()).await?;
        let newest = wire::version_reply(&reply.front.to_vec()).map_err(malformed)?;
        self.reached(u32::try_from(newest).unwrap_or(Epoch::MAX)).await;
        Ok(())
    }

    /// Runs a monitor command and returns its output. `fields` are names and values as text, `prefix` first.
    ///
    /// # Errors
    /// Errors returned by the monitors.
    pub async fn command(&self, fields: &[(&str, &str)]) -> Result<Vec<u8>> {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, wire::quote(value))).collect();
        self.monitors.command(&fields).await
    }

    /// Creates a replicated pool, and waits until it is in the OSD map.
    ///
    /// # Errors
    /// Errors returned by the monitors.
    pub async fn create_pool(&self, name: &str, groups: u32) -> Result<()> {
        let fields = [
            ("prefix", wire::quote("osd pool create")),
            ("pool", wire::quote(name)),
            ("pg_num", groups.to_string()),
            ("pgp_num", groups.to_string()),
        ];
        self.monitors.command(&fields).await?;
        let there = self.objecter.changed.wait_until(|| self.map().pool_named(name).is_some());
        there.await;
        Ok(())
    }

    /// Deletes a pool and all its objects, if the cluster allows it (`mon allow pool delete`).
    ///
    /// # Errors
    /// Errors returned by the monitors.
    pub async fn delete_pool(&self, name: &str) -> Result<()> {
        let fields = [
            ("prefix", wire::quote("osd pool delete")),
            ("pool", wire::quote(name)),
            ("pool2", wire::quote(name)),
            ("yes_i_really_really_mean_it", "true".into()),
        ];
        self.monitors.command(&fields).await.map(drop)
    }

    /// Allocates a new self-managed snapshot id in a pool.
    pub(crate) async fn create_snap(&self, pool: i64) -> Result<u64> {
        let (status, epoch, number) = self.pool_op(pool, pool_op::CREATE_UNMANAGED_SNAP, 0).await?;
        if status < 0 {
            return Err(failure(status, "taking a snapshot's number"));
        }
        self.reached(epoch).await;
        number.ok_or_else(|| Error::new(ErrorKind::Io, "the monitors gave no snapshot's number"))
    }

    /// Removes a self-managed snapshot id of a pool.
    pub(crate) async fn remove_snap(&self, pool: i64, snap: u64) -> Result<()> {
        let (status, epoch, _) = self.pool_op(pool, pool_op::DELETE_UNMANAGED_SNAP, snap).await?;
        if status < 0 {
            return Err(failure(status, format!("giving up the snapshot's number {snap}")));
        }
        self.reached(epoch).await;
        Ok(())
    }

    async fn pool_op(&self, pool: i64, op: u32, snap: u64) -> Result<(i32, Epoch, Option<u64>)> {
        let front = wire::snapshot_op(&self.monitors.fsid(), pool, op, snap);
        let reply = self.monitors.request(kind::POOL_OP, (4, 2), &front, Default::default()).await?;
        wire::pool_reply(&reply.front.to_vec()).map_err(malformed)
    }

    /// Waits until the local OSD map has reached an epoch.
    async fn reached(&self, epoch: Epoch) {
        self.objecter.changed.wait_until(|| self.map().epoch >= epoch).await;
    }

    pub(crate) async fn space(&self, pool: i64) -> Result<PoolUsage> {
        let front = wire::statfs(&self.monitors.fsid(), pool);
        let reply = self.monitors.request(kind::STATFS, (2, 1), &front, Default::default()).await?;
        wire::statfs_reply(&reply.front.to_vec()).map_err(malformed)
    }

    pub(crate) fn objecter(&self) -> &Rc<Objecter> {
        &self.objecter
    }

    /// Closes all sessions; requests in flight fail.
    pub fn close(&self) {
        self.objecter.close();
        self.monitors.close();
    }
}

impl Drop for RadosCluster {
    fn drop(&mut self) {
        self.close();
    }
}

/// Formats a cluster fsid as a UUID.
fn text(fsid: &Fsid) -> String {
    let hex: Vec<String> = fsid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    [part(0..4), part(4..6), part(6..8), part(8..10), part(10..16)].join("-")
}
