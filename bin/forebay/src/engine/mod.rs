//! Pools, images, exports: everything the daemon does besides talking, on one reactor.
//!
//! The command line runs the same engine in its own process when no daemon runs.

mod ana;
pub mod bench;
mod ceph;
mod ceph_clients;
mod delayed;
mod dns;
mod exports;
pub mod fronts;
pub mod handle;
pub mod identity;
mod images;
mod log_keeper;
mod logs;
pub mod meters;
mod numbers;
mod offload;
pub mod overview;
pub mod peers;
mod reload;
mod reservations;
pub mod small_files;
pub mod store;
pub mod targets;
pub mod transfer;
mod underway;
pub mod volumes;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{ObjectBackend, Usage};
use forebay_nbd::stats::ServerCounts;
use forebay_ram::RamBackend;
use forebay_reactor::{CoreHandle, Instant, now};
use forebay_store::Store;

use crate::api::{Front, Pool, Status, StoreSpace};
use crate::config::Config;
use crate::failure::{Failure, FailureKind, Result};
use crate::running;
use crate::spec::{LOCAL_POOL, RADOS_PREFIX, RAM_POOL};
use crate::units::Size;
use ceph::Ceph;
use ceph_clients::CephClients;
use exports::{Exports, UnservedExport};
use fronts::Fronts;
use identity::Identity;
use logs::Logs;
use meters::Meters;
use peers::{PeerCounts, Peers};
use store::StoreCounter;
use volumes::Volumes;

/// What an engine is started with.
pub struct EngineOptions {
    /// The data directory.
    pub data: PathBuf,
    /// The embedded store's file or device.
    pub store: PathBuf,
    /// The store is opened; otherwise there is no pool of ours, and nothing is written in the data directory.
    pub opens_store: bool,
    /// How a Ceph cluster is reached.
    pub ceph: forebay_rados::Flags,
    /// Control sockets at which a command has found no daemon.
    pub controls: Vec<PathBuf>,
    /// It is the daemon's engine, not a command's.
    pub daemon: Option<DaemonOptions>,
}

/// What only the daemon's engine has.
pub struct DaemonOptions {
    /// The daemon's configuration.
    pub config: Config,
    /// Reads it again, from where it came from.
    pub read_config: Arc<dyn Fn() -> Result<Config> + Send + Sync>,
    /// The reactors; the engine runs on the first.
    pub cores: Vec<CoreHandle>,
}

/// Pools, images and exports.
pub struct Engine {
    options: EngineOptions,
    started: Instant,
    store: Option<Rc<Store>>,
    pools: BTreeMap<&'static str, Rc<dyn ObjectBackend>>,
    ceph: Ceph,
    volumes: Volumes,
    meters: Arc<Meters>,
    exports: Exports,
    fronts: Fronts,
    ana: ana::Keeper,
    identity: Identity,
    logs: Logs,
    peers: Peers,
    closing: Cell<bool>,
}

/// Everything that is counted, at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// The daemon and its pools.
    pub status: Status,
    /// Exports that hosts do not reach.
    pub unserved: Vec<UnservedExport>,
    /// What hosts asked for, which goes on counting.
    pub meters: Arc<Meters>,
    /// The store's own counters.
    pub store: Vec<StoreCounter>,
    /// The write logs that are open.
    pub logs: Vec<LogSnapshot>,
    /// What the NBD servers count besides requests.
    pub nbd: ServerCounts,
    /// What the NVMe servers count.
    pub nvme: NvmeSnapshot,
    /// What the iSCSI servers count.
    pub iscsi: IscsiSnapshot,
    /// What is counted of peers.
    pub peers: PeerCounts,
}

/// What the iSCSI servers count, at one moment.
#[derive(Debug)]
pub struct IscsiSnapshot {
    /// Besides commands.
    pub counts: forebay_iscsi::stats::SiteSnapshot,
    /// Sessions that hosts have.
    pub sessions: usize,
    /// Commands, by host.
    pub hosts: BTreeMap<String, forebay_iscsi::stats::Snapshot>,
}

/// A write log's counters at one moment.
#[derive(Debug)]
pub struct LogSnapshot {
    /// Its pool.
    pub pool: String,
    /// Its image.
    pub image: String,
    /// It takes writes.
    pub on: bool,
    /// What it counts.
    pub stats: forebay_writelog::LogStats,
}

/// What the NVMe servers count, at one moment.
#[derive(Debug)]
pub struct NvmeSnapshot {
    /// Besides commands.
    pub counts: forebay_nvmf::stats::Counts,
    /// Controllers that hosts have.
    pub controllers: usize,
    /// Commands, by host.
    pub hosts: BTreeMap<String, forebay_nvmf::stats::Snapshot>,
    /// Connections with TLS, by suite.
    pub suites: BTreeMap<&'static str, usize>,
}

/// Bytes of memory for the store's data in a command that opens the store itself: it reads what it reads once.
const DIRECT_CACHE: usize = 0;

impl Engine {
    /// Opens the store, and what the data directory remembers.
    pub async fn open(options: EngineOptions) -> Result<Rc<Self>> {
        let identity = if options.opens_store { Identity::load(&options.data)? } else { Identity::passing()? };
        let data_cache = options.daemon.as_ref().map_or(DIRECT_CACHE, |daemon| daemon.config.store_cache);
        let mut pools: BTreeMap<&'static str, Rc<dyn ObjectBackend>> = BTreeMap::new();
        let mut store = None;
        if options.opens_store {
            let opened = store::open(&options.store, data_cache).await?;
            pools.insert(LOCAL_POOL, opened.clone());
            store = Some(opened);
        }
        if let Some(daemon) = &options.daemon {
            pools.insert(RAM_POOL, RamBackend::with_capacity(RAM_POOL, daemon.config.ram_size));
        }
        let exports = match Exports::load(&options.data) {
            Ok(exports) => exports,
            Err(failure) => {
                if let Some(store) = store {
                    store.close().await.map_err(Failure::from)?;
                }
                return Err(failure);
            }
        };
        let fronts = Fronts::new(&identity, options.daemon.as_ref().map(|daemon| &daemon.config));
        let ceph = Ceph::new(options.ceph.clone(), options.daemon.as_ref().map(|_| CephClients::of(&options.data)));
        let engine = Self {
            options,
            started: now(),
            store,
            pools,
            ceph,
            volumes: Volumes::new(),
            meters: Arc::default(),
            exports,
            fronts,
            ana: ana::Keeper::default(),
            identity,
            logs: Logs::default(),
            peers: Peers::default(),
            closing: Cell::new(false),
        };
        Ok(Rc::new(engine))
    }

    /// A pool by name: one of our own, or of the Ceph cluster.
    pub async fn pool(&self, name: &str) -> Result<Rc<dyn ObjectBackend>> {
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
        // What would be taken for a pool of our own is written with its kind before it.
        self.ceph.pool(name.strip_prefix(RADOS_PREFIX).unwrap_or(name)).await
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

    /// Makes everything durable and closes the store.  Nothing may be asked of the engine after.
    pub async fn close(&self) -> Result<()> {
        if self.closing.replace(true) {
            return Ok(());
        }
        self.exports.let_go();
        if self.options.daemon.is_some()
            && let Err(failure) = self.exports.settle().await
        {
            tracing::warn!(error = %failure.message, "the exports stay in their journal");
        }
        // A log that cannot be closed in order is recovered when it is opened again.
        if let Err(failure) = self.close_logs().await {
            tracing::warn!(error = %failure.message, "a write log was not closed in order");
        }
        self.ceph.close().await;
        let Some(store) = &self.store else { return Ok(()) };
        store.close().await.map_err(|error| Failure::from(error).context("closing the store"))
    }

    /// What the daemon is and does.
    pub async fn status(&self) -> Result<Status> {
        let Some(daemon) = &self.options.daemon else {
            return Err(Failure::new(FailureKind::Unreachable, "no daemon runs"));
        };
        let mut usages = Vec::new();
        for (name, backend) in &self.pools {
            let usage = backend.usage().await.map_err(|error| self.pool_failure(error, name))?;
            usages.push(((*name).to_owned(), backend.info().kind, usage));
        }
        usages.extend(self.ceph.usage().await.into_iter().map(|(name, usage)| (name, "rados", usage)));
        let describe = |(name, kind, usage): (String, &str, Usage)| Pool {
            name,
            kind: kind.into(),
            capacity: usage.capacity,
            used: usage.used,
            available: usage.available,
            objects: usage.objects,
            limited_by: None,
            refuses_writes: None,
        };
        let with_limit = |pool: Pool| match pool.name == LOCAL_POOL {
            true => Pool { limited_by: self.store_limit(), refuses_writes: self.store_refusal(), ..pool },
            false => pool,
        };
        let pools = usages.into_iter().map(describe).map(with_limit).collect();
        Ok(Status {
            ready: !self.closing.get() && self.fronts.is_serving(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            cores: daemon.config.cores,
            driver: forebay_reactor::driver_name().into(),
            data: self.options.data.clone(),
            control: daemon.config.control.clone(),
            http: daemon.config.http.map(|addr| format!("http://{addr}/")),
            nbd: self.fronts.addrs(Front::Nbd).iter().map(ToString::to_string).collect(),
            nvme: self.fronts.nvme().listeners(),
            nvme_nqn: self.fronts.nvme().target().identity().nqn.clone(),
            iscsi: self.fronts.addrs(Front::Iscsi).iter().map(ToString::to_string).collect(),
            iscsi_name: self.fronts.iscsi().site().target().to_owned(),
            pools,
            targets: self.exports.count(),
            unserved: self.unserved_exports().len(),
            connections: self.fronts.connections(),
            peer: self.peers.addrs(),
            peers: self.peers.list(),
        })
    }

    /// The embedded store's space.
    pub async fn store_space(&self) -> Result<StoreSpace> {
        let store = self.store.as_ref().ok_or_else(|| self.no_store())?;
        let usage = store.usage().await.map_err(|error| self.pool_failure(error, LOCAL_POOL))?;
        let (limited_by, refuses_writes) = (self.store_limit(), self.store_refusal());
        Ok(StoreSpace { limited_by, refuses_writes, ..store::describe(&self.options.store, usage) })
    }

    /// Says that the file system beneath the store is why it takes less than it has room for.
    pub fn store_limit(&self) -> Option<String> {
        let held = self.store.as_ref()?.limited_by_host()?;
        let path = self.options.store.display();
        Some(format!("the host's file system at {path}; the store itself has room for {}", Size(held)))
    }

    /// Says why the store takes no writes, if it does not.
    fn store_refusal(&self) -> Option<String> {
        self.store.as_ref()?.refuses_writes().map(|error| error.to_string())
    }

    /// Everything that is counted.
    pub async fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot {
            meters: self.meters.clone(),
            unserved: self.unserved_exports(),
            store: self.store.as_ref().map(|store| store::counters(store)).unwrap_or_default(),
            logs: self
                .open_logs()
                .into_iter()
                .map(|(spec, log)| LogSnapshot {
                    pool: spec.pool,
                    image: spec.image,
                    on: log.mode().is_on(),
                    stats: log.stats(),
                })
                .collect(),
            nbd: self.fronts.nbd_stats().server(),
            nvme: NvmeSnapshot {
                counts: self.fronts.nvme().stats().counts(),
                controllers: self.fronts.nvme().target().controller_ids().len(),
                hosts: self.fronts.nvme().stats().hosts(),
                suites: self.fronts.nvme().stats().suites(),
            },
            iscsi: IscsiSnapshot {
                counts: self.fronts.iscsi().site().counters().snapshot(),
                sessions: self.fronts.iscsi().site().session_count(),
                hosts: self.fronts.iscsi().site().hosts(),
            },
            peers: self.peers.counts(),
            status: self.status().await?,
        })
    }
}
