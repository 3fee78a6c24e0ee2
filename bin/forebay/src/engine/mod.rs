//! Pools, images and exports: all work of the daemon other than its control interface, on one reactor.
//!
//! The command line runs the same engine in its own process when no daemon runs.

mod access;
mod ana;
pub mod apply;
pub mod bench;
mod ceph;
mod ceph_clients;
mod clones;
mod compression;
mod copy;
pub mod diffs;
mod dns;
mod exports;
pub mod failover;
pub mod fronts;
mod gateways;
mod groups;
pub mod handle;
mod held_writes;
pub mod identity;
mod images;
mod limits;
mod log_keeper;
mod logs;
mod manage;
pub mod mappings;
mod namespaces;
mod numbers;
mod offload;
mod options;
pub mod overview;
mod owner_operations;
pub mod peers;
mod read_cache;
mod reload;
pub mod replicas;
mod reservations;
pub mod small_files;
mod snapshots;
pub mod store;
pub mod targets;
#[cfg(test)]
mod testing;
mod times;
pub mod transfer;
mod trash;
pub mod volumes;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::{ObjectBackend, Usage};
use forebay_export::{Meter, Meters};
use forebay_image::Images;
use forebay_nbd::stats::ServerCounts;
use forebay_ram::RamBackend;
use forebay_reactor::{CoreHandle, Instant, now};
use forebay_readcache::ReadCacheStats;
use forebay_store::{Store, StoreOptions};
use forebay_writelog::replication::{MemberReport, PrimarySet};

use crate::api::{DaemonStatus, Front, PoolInfo, StoreSpace};
use crate::config::DaemonConfig;
use crate::failure::{Failure, FailureKind, Result};
use crate::master_key::MasterKeySource;
use crate::running;
use crate::spec::{ImageSpec, LOCAL_POOL, RADOS_PREFIX, RAM_POOL, place_text, split_pool};
use crate::units::Size;
use access::AccessLists;
use ceph::CephPools;
use ceph_clients::CephClients;
use exports::{Exports, UnservedExport};
use fronts::Fronts;
use identity::DataDirIdentity;
use logs::Logs;
use peers::{PeerCounts, Peers};
use read_cache::EngineReadCache;
use replicas::TakeoverCounts;
use store::StoreCounter;
use volumes::Volumes;

/// Options for opening an [`Engine`].
pub struct EngineOptions {
    /// The data directory.
    pub data: PathBuf,
    /// The embedded store's file or device.
    pub store: PathBuf,
    /// Set to open the embedded store.  If unset, there is no local pool, and nothing is written to the data
    /// directory.
    pub opens_store: bool,
    /// Source of the store's master key; the daemon's is in its configuration.
    pub master_key: Option<MasterKeySource>,
    /// Connection flags for a Ceph cluster.
    pub ceph: forebay_rados::Flags,
    /// Control sockets on which a command found no daemon.
    pub controls: Vec<PathBuf>,
    /// Options of the daemon; `None` in the engine of a command.
    pub daemon: Option<DaemonOptions>,
}

/// Options that only the daemon's engine has.
pub struct DaemonOptions {
    /// The daemon's configuration.
    pub config: DaemonConfig,
    /// Re-reads the configuration from its source.
    pub read_config: Arc<dyn Fn() -> Result<DaemonConfig> + Send + Sync>,
    /// Reactor cores; the engine runs on the first.
    pub cores: Vec<CoreHandle>,
}

/// Pools, images and exports.
pub struct Engine {
    options: EngineOptions,
    started: Instant,
    store: Option<Rc<Store>>,
    pools: BTreeMap<&'static str, Rc<dyn ObjectBackend>>,
    ceph: CephPools,
    volumes: Volumes,
    meters: Arc<Meters<ImageSpec, RequestPath>>,
    exports: Exports,
    mappings: mappings::Mappings,
    gateways: gateways::Gateways,
    fronts: Fronts,
    ana: ana::AnaFileLock,
    access: AccessLists,
    identity: DataDirIdentity,
    logs: Logs,
    peers: Peers,
    read_cache: Option<EngineReadCache>,
    takeovers: Cell<TakeoverCounts>,
    /// Last takeover of each log by this daemon, by the text of its id.
    last_takeovers: RefCell<BTreeMap<String, crate::api::LogTakeover>>,
    closing: Cell<bool>,
    /// Itself, for volumes whose other clients ask for operations.
    this: RefCell<Weak<Engine>>,
}

/// Path of requests: the front, and the pool of the image; no front means `forebay bench` in the daemon itself.
pub type RequestPath = (Option<Front>, String);

/// Snapshot of all counters.
#[derive(Debug)]
pub struct MetricsSnapshot {
    /// State of the daemon and its pools.
    pub status: DaemonStatus,
    /// Exports that hosts cannot reach.
    pub unserved: Vec<UnservedExport>,
    /// Request meters, shared with the engine; they keep counting after the snapshot.
    pub meters: Arc<Meters<ImageSpec, RequestPath>>,
    /// Counters of the embedded store.
    pub store: Vec<StoreCounter>,
    /// Counters of the read cache, if there is one.
    pub read_cache: Option<ReadCacheStats>,
    /// Open write logs.
    pub logs: Vec<LogSnapshot>,
    /// Counters of the limits of open volumes.
    pub limits: Vec<(ImageSpec, forebay_qos::QosStats)>,
    /// NBD server counters other than requests.
    pub nbd: ServerCounts,
    /// Number of NBD connections with TLS.
    pub nbd_tls_connections: usize,
    /// NVMe server counters.
    pub nvme: NvmeSnapshot,
    /// iSCSI server counters.
    pub iscsi: IscsiSnapshot,
    /// Counters of the vhost-user server, which keep counting after the snapshot.
    pub vhost: forebay_vhost::VhostStats,
    /// Counters of the peer messenger.
    pub peers: PeerCounts,
    /// Takeovers of write logs.
    pub takeovers: TakeoverCounts,
    /// Number of blocks that primaries have written one-sided into copies here.
    pub placed_here: u64,
}

/// Snapshot of the iSCSI server counters.
#[derive(Debug)]
pub struct IscsiSnapshot {
    /// Counters other than commands.
    pub counts: forebay_iscsi::stats::ConnectionSnapshot,
    /// Number of iSCSI sessions.
    pub sessions: usize,
    /// Command counters by host.
    pub hosts: BTreeMap<String, forebay_iscsi::stats::ScsiCounts>,
}

/// Snapshot of a write log's counters.
#[derive(Debug)]
pub struct LogSnapshot {
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub image: String,
    /// Set while the log accepts writes.
    pub on: bool,
    /// Counters of the log.
    pub stats: forebay_writelog::LogStats,
    /// Members, if it has replicas.
    pub replicated: Option<ReplicatedLog>,
}

/// Snapshot of the members of a log that has replicas.
#[derive(Debug)]
pub struct ReplicatedLog {
    /// Epoch of the record.
    pub epoch: u64,
    /// Number of complete copies.
    pub copies: usize,
    /// Number of copies that it should have.
    pub wanted: usize,
    /// Number of blocks written one-sided into its replicas' copies.
    pub placed: u64,
    /// Members, the primary first.
    pub members: Vec<MemberReport>,
}

impl ReplicatedLog {
    fn new(set: &PrimarySet) -> Self {
        let (copies, wanted) = set.copies();
        Self { epoch: set.record().epoch(), copies, wanted, placed: set.placed_blocks(), members: set.report() }
    }
}

/// Snapshot of the NVMe server counters.
#[derive(Debug)]
pub struct NvmeSnapshot {
    /// Counters other than commands.
    pub counts: forebay_nvmf::stats::NvmeTargetCounts,
    /// Number of controllers that hosts have created.
    pub controllers: usize,
    /// Command counters by host.
    pub hosts: BTreeMap<String, forebay_nvmf::stats::NvmeCounts>,
    /// Number of connections with TLS, by cipher suite.
    pub suites: BTreeMap<&'static str, usize>,
}

/// Bytes of data cache for a command that opens the store itself: none, since it reads data only once.
const DIRECT_CACHE: usize = 0;

impl Engine {
    /// Opens the store and loads the state in the data directory.
    pub async fn open(options: EngineOptions) -> Result<Rc<Self>> {
        let identity =
            if options.opens_store { DataDirIdentity::load(&options.data)? } else { DataDirIdentity::passing()? };
        let data_cache = options.daemon.as_ref().map_or(DIRECT_CACHE, |daemon| daemon.config.store_cache);
        let mut pools: BTreeMap<&'static str, Rc<dyn ObjectBackend>> = BTreeMap::new();
        let mut store = None;
        if options.opens_store {
            let daemon = options.daemon.as_ref().map(|daemon| &daemon.config);
            let defaults = StoreOptions::default();
            let source = daemon.map_or(options.master_key.as_ref(), |config| config.master_key.as_ref());
            let master_key = source.map(MasterKeySource::load).transpose()?;
            let opening = StoreOptions {
                // A command that needs none does not ask for it.
                without_master_key: daemon.map_or(master_key.is_none(), |config| config.without_master_key),
                master_key,
                data_cache,
                accept_missing: daemon.is_some_and(|config| config.accept_missing_devices),
                repair_rate: daemon.map_or(defaults.repair_rate, |config| config.repair_rate),
                compression_threads: daemon.map_or(0, |config| config.compression_threads),
                ..defaults
            };
            let opened = store::open(&options.store, opening).await?;
            pools.insert(LOCAL_POOL, opened.clone());
            store = Some(opened);
        }
        if let Some(daemon) = &options.daemon {
            pools.insert(RAM_POOL, RamBackend::with_capacity(RAM_POOL, daemon.config.ram_size));
        }
        let data = &options.data;
        let loaded = Exports::load(data)
            .and_then(|exports| Ok((exports, AccessLists::load(data)?, mappings::Mappings::load(data)?)));
        let (exports, access, mappings) = match loaded {
            Ok(loaded) => loaded,
            Err(failure) => {
                if let Some(store) = store {
                    store.close().await.map_err(Failure::from)?;
                }
                return Err(failure);
            }
        };
        if options.daemon.is_none() {
            mappings.mark_stale();
        }
        let fronts = Fronts::new(&identity, options.daemon.as_ref().map(|daemon| &daemon.config));
        let ceph =
            CephPools::new(options.ceph.clone(), options.daemon.as_ref().map(|_| CephClients::of(&options.data)));
        let logs = Logs::default();
        let settings = options.daemon.as_ref().and_then(|daemon| daemon.config.replicas.as_ref());
        let shelves = replicas::open_device(logs.devices(), settings).await;
        let allowed = settings.map(|settings| settings.allow.clone()).unwrap_or_default();
        let peers = Peers::new(&identity, shelves, allowed);
        let read_cache = match options.daemon.as_ref().and_then(|daemon| daemon.config.read_cache.clone()) {
            Some(cache) => Some(EngineReadCache::open(cache).await),
            None => None,
        };
        let data_dir = options.data.clone();
        let engine = Self {
            options,
            started: now(),
            store,
            pools,
            ceph,
            volumes: Volumes::new(),
            meters: Arc::default(),
            exports,
            mappings,
            gateways: gateways::Gateways::new(&data_dir),
            fronts,
            ana: ana::AnaFileLock::default(),
            access,
            identity,
            logs,
            peers,
            read_cache,
            takeovers: Cell::default(),
            last_takeovers: RefCell::default(),
            closing: Cell::new(false),
            this: RefCell::default(),
        };
        if let Err(failure) = engine.check_default_names() {
            engine.close().await?;
            return Err(failure);
        }
        let engine = Rc::new(engine);
        *engine.this.borrow_mut() = Rc::downgrade(&engine);
        Ok(engine)
    }

    /// Returns the images of a pool, or of a namespace of it: `POOL[/NAMESPACE]`.
    ///
    /// # Errors
    /// `NotFound` if there is no such pool or namespace.
    pub async fn images_in(&self, place: &str) -> Result<Rc<Images>> {
        let (pool, namespace) = split_pool(place);
        let backend = self.pool(pool).await?;
        let images = Images::in_namespace(&backend, namespace);
        // Asked in the namespace itself: a client of Ceph may be restricted to it.
        if !namespace.is_empty() {
            let is_there = images.admits_images().await;
            if !is_there.map_err(|error| self.pool_failure(error, place))? {
                return Err(Failure::new(FailureKind::NotFound, format!("there is no namespace {place}"))
                    .hint(format!("'forebay namespace ls {pool}' lists those that there are")));
            }
        }
        Ok(images)
    }

    /// Returns the backend of the pool of an image that is to be created.
    ///
    /// # Errors
    /// `NotFound` if there is no such pool or namespace.
    pub async fn pool_of_new(&self, spec: &ImageSpec) -> Result<Rc<dyn ObjectBackend>> {
        Ok(self.images_in(&spec.place()).await?.backend().clone())
    }

    /// Returns the spec of an image that another image or a group of the pool `beside` names.
    fn spec_beside(&self, beside: &str, pool: &str, namespace: &str, name: &str) -> Result<ImageSpec> {
        // Pools of a cluster may be called like ours.
        let is_ours = pool == LOCAL_POOL || pool == RAM_POOL;
        let prefix = if is_ours && self.is_in_ceph(beside) { RADOS_PREFIX } else { "" };
        ImageSpec::listed(&place_text(&format!("{prefix}{pool}"), namespace), name).map_err(Failure::invalid)
    }

    /// Returns a pool by name: a local pool, or one of the Ceph cluster.
    pub async fn pool(&self, name: &str) -> Result<Rc<dyn ObjectBackend>> {
        if name.contains('/') {
            return Err(Failure::invalid(format!("'{name}' names a namespace, and a pool is wanted here")));
        }
        if let Some(pool) = self.pools.get(name) {
            return Ok(pool.clone());
        }
        if name == RAM_POOL {
            let unknown = Failure::new(FailureKind::NotFound, format!("there is no pool '{name}'"));
            return Err(unknown.hint("the pool 'ram' lives in the daemon; start it with 'forebay serve'"));
        }
        if name == LOCAL_POOL {
            return Err(self.no_store());
        }
        // The prefix marks a pool of the cluster whose name would otherwise select a local pool.
        self.ceph.pool(name.strip_prefix(RADOS_PREFIX).unwrap_or(name)).await
    }

    /// Returns whether a pool is one of the Ceph cluster.
    fn is_in_ceph(&self, name: &str) -> bool {
        !self.pools.contains_key(name) && ![LOCAL_POOL, RAM_POOL].contains(&name)
    }

    fn no_store(&self) -> Failure {
        let controls = running::either(&self.options.controls);
        let what =
            format!("no daemon answers at {controls}, and there is no store at {}", self.options.store.display());
        Failure::new(FailureKind::Unreachable, what).hint(running::advise(
            "start 'forebay serve' or make a store with 'forebay store init'; \
             --data names the directory, --control the daemon's socket",
        ))
    }

    /// Makes everything durable and closes the store.  The engine must not be used afterwards.
    pub async fn close(&self) -> Result<()> {
        if self.closing.replace(true) {
            return Ok(());
        }
        self.stop_membership().await;
        self.exports.let_go();
        if self.options.daemon.is_some()
            && let Err(failure) = self.exports.settle().await
        {
            tracing::warn!(error = %failure.message, "the exports stay in their journal");
        }
        // A log that is not closed cleanly is recovered when it is next opened.
        if let Err(failure) = self.close_logs().await {
            tracing::warn!(error = %failure.message, "a write log was not closed cleanly");
        }
        // Only now: a log that is closed still needs its replicas.
        self.peers.stop();
        self.ceph.close().await;
        if let Some(read_cache) = &self.read_cache {
            read_cache.close().await;
        }
        let Some(store) = &self.store else { return Ok(()) };
        store.close().await.map_err(|error| Failure::from(error).context("closing the store"))
    }

    /// Returns the state of the daemon and its pools; fails in a command's engine.
    pub async fn status(&self) -> Result<DaemonStatus> {
        let Some(daemon) = &self.options.daemon else {
            return Err(Failure::new(FailureKind::Unreachable, "no daemon runs"));
        };
        let mut usages = Vec::new();
        for (name, backend) in &self.pools {
            let usage = backend.usage().await.map_err(|error| self.pool_failure(error, name))?;
            usages.push(((*name).to_owned(), backend.info().kind, usage));
        }
        usages.extend(self.ceph.usage().await.into_iter().map(|(name, usage)| (name, "rados", usage)));
        let describe = |(name, kind, usage): (String, &str, Usage)| PoolInfo {
            name,
            kind: kind.into(),
            capacity: usage.capacity,
            used: usage.used,
            available: usage.available,
            objects: usage.objects,
            compressed_logical: 0,
            compressed_stored: 0,
            limited_by: None,
            refuses_writes: None,
            needs_repair: None,
        };
        let compressed = self.store.as_ref().map(|store| store.stats()).unwrap_or_default();
        let compressed = (compressed.compressed_logical, compressed.compressed_stored);
        let with_limit = |pool: PoolInfo| match pool.name == LOCAL_POOL {
            true => PoolInfo {
                compressed_logical: compressed.0,
                compressed_stored: compressed.1,
                limited_by: self.store_limit(),
                refuses_writes: self.store_refusal(),
                needs_repair: self.store.as_ref().and_then(|store| store.needs_repair()),
                ..pool
            },
            false => pool,
        };
        let pools = usages.into_iter().map(describe).map(with_limit).collect();
        Ok(DaemonStatus {
            ready: !self.closing.get() && self.fronts.is_serving(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            cores: daemon.config.cores,
            driver: forebay_reactor::driver_name().into(),
            data: self.options.data.clone(),
            control: daemon.config.control.clone(),
            http: daemon.config.http.map(|addr| format!("http://{addr}/")),
            nbd: self.fronts.nbd().listeners(),
            nvme: self.fronts.nvme().listeners(),
            nvme_nqn: self.fronts.nvme().default_subsystem().nqn().to_owned(),
            iscsi: self.fronts.addrs(Front::Iscsi).iter().map(ToString::to_string).collect(),
            iscsi_name: self.fronts.iscsi().default_target().name().to_owned(),
            vhost_sockets: self.fronts.vhost().socket_count(),
            pools,
            targets: self.exports.count(),
            unserved: self.unserved_exports().len(),
            connections: self.fronts.connections(),
            peer: self.peers.addrs(),
            peers: self.peers.list(),
            read_cache: self.read_cache_stats().map(Into::into),
        })
    }

    /// Returns the space of the embedded store.
    pub async fn store_space(&self) -> Result<StoreSpace> {
        let store = self.store.as_ref().ok_or_else(|| self.no_store())?;
        let usage = store.usage().await.map_err(|error| self.pool_failure(error, LOCAL_POOL))?;
        let (limited_by, refuses_writes) = (self.store_limit(), self.store_refusal());
        Ok(StoreSpace { limited_by, refuses_writes, ..store::describe(&self.options.store, usage, &store.stats()) })
    }

    /// Returns a message if the host's file system, not the store's own size, limits the space of the store.
    pub fn store_limit(&self) -> Option<String> {
        let held = self.store.as_ref()?.limited_by_host()?;
        let path = self.options.store.display();
        Some(format!("the host's file system at {path}; the store itself has room for {}", Size(held)))
    }

    /// Returns the reason why the store refuses writes, if it does.
    fn store_refusal(&self) -> Option<String> {
        self.store.as_ref()?.refuses_writes().map(|error| error.to_string())
    }

    /// Returns the meter of an image behind a front; no front means `forebay bench` in the daemon itself.
    fn meter(&self, spec: &ImageSpec, front: Option<Front>) -> Meter {
        self.meters.meter(spec, &(front, spec.pool.clone()))
    }

    /// Returns a snapshot of all counters.
    pub async fn snapshot(&self) -> Result<MetricsSnapshot> {
        Ok(MetricsSnapshot {
            meters: self.meters.clone(),
            unserved: self.unserved_exports(),
            store: self.store.as_ref().map(|store| store::counters(store)).unwrap_or_default(),
            read_cache: self.read_cache_stats(),
            logs: self
                .open_logs()
                .into_iter()
                .map(|(spec, log)| LogSnapshot {
                    replicated: self.members(&spec).map(|set| ReplicatedLog::new(&set)),
                    pool: spec.pool,
                    image: spec.image,
                    on: log.mode().is_on(),
                    stats: log.stats(),
                })
                .collect(),
            limits: self.volumes.limit_counters(),
            nbd: self.fronts.nbd().stats().server(),
            nbd_tls_connections: self.fronts.nbd().stats().tls_connections(),
            nvme: NvmeSnapshot {
                counts: self.fronts.nvme().stats().counts(),
                controllers: self.fronts.nvme().subsystems().controller_count(),
                hosts: self.fronts.nvme().stats().hosts(),
                suites: self.fronts.nvme().stats().suites(),
            },
            iscsi: IscsiSnapshot {
                counts: self.fronts.iscsi().targets().counters().snapshot(),
                sessions: self.fronts.iscsi().targets().session_count(),
                hosts: self.fronts.iscsi().targets().hosts(),
            },
            vhost: self.fronts.vhost().stats().clone(),
            peers: self.peers.counts(),
            takeovers: self.takeovers.get(),
            placed_here: self.peers.replicas().placed_blocks(),
            status: self.status().await?,
        })
    }
}
