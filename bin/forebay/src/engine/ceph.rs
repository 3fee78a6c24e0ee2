//! Pools of a Ceph cluster; the connection is made when the first pool is requested.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ErrorKind, ObjectBackend, Usage};
use forebay_image::Images;
use forebay_rados::config::ConfigError;
use forebay_rados::{CephConfig, Environment, Flags, RadosCluster, RadosPool};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::timeout;

use super::ceph_clients::{CephClient, CephClients};
use super::dns;
use super::offload::offload;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::RADOS_PREFIX;

/// Timeout for querying the usage of a cluster.
const PATIENCE: Duration = Duration::from_secs(2);

/// Wait for what still uses images on close; their locks are released all the same.
const CLOSING_USED: Duration = Duration::from_secs(2);
/// Timeout for releasing locks on close; after it they are left for other clients to break.
const CLOSING: Duration = Duration::from_secs(7);

/// System environment for resolving a cluster's configuration.
struct SystemEnvironment;

impl Environment for SystemEnvironment {
    fn read(&self, path: &Path) -> io::Result<String> {
        std::fs::read_to_string(path)
    }

    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn host(&self) -> String {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        name.trim().split('.').next().unwrap_or_default().to_owned()
    }

    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        Ok((name, 0).to_socket_addrs()?.map(|addr| addr.ip()).collect())
    }

    fn service(&self, name: &str, domain: Option<&str>) -> io::Result<Vec<(String, u16)>> {
        dns::service(name, domain)
    }
}

/// Ceph cluster, connected on demand, and the pools that were requested.
pub struct CephPools {
    flags: Flags,
    cluster: RefCell<Option<Rc<RadosCluster>>>,
    /// List of the daemon's own client addresses; a command has none.
    clients: Option<CephClients>,
    pools: RefCell<BTreeMap<String, Rc<RadosPool>>>,
    /// Permit to connect: the cluster is connected to once.
    connecting: Semaphore,
}

impl CephPools {
    /// Creates it without connecting.
    pub fn new(flags: Flags, clients: Option<CephClients>) -> Self {
        Self { flags, clients, cluster: RefCell::default(), pools: RefCell::default(), connecting: Semaphore::new(1) }
    }

    /// Returns a pool of the cluster, connecting if needed.
    pub async fn pool(&self, name: &str) -> Result<Rc<dyn ObjectBackend>> {
        let unfound = |failure: Failure| match failure.kind {
            FailureKind::NotFound => failure.context(format!("no pool '{name}' here, and no Ceph cluster to look in")),
            _ => failure.context(format!("pool '{name}'")),
        };
        let cluster = self.cluster().await.map_err(unfound)?;
        let known = self.pools.borrow().get(name).cloned();
        // A pool that was deleted, and perhaps recreated, has another id.
        if let Some(pool) = known.filter(|pool| cluster.map().pool_named(name) == Some(pool.id())) {
            return Ok(pool);
        }
        let pool = cluster.pool(name).map_err(|error| {
            let failure = Failure::from(error);
            match failure.kind {
                FailureKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no pool '{name}'"))
                    .hint("'ceph osd pool ls' lists those of the cluster"),
                _ => failure,
            }
        })?;
        self.pools.borrow_mut().insert(name.to_owned(), pool.clone());
        Ok(pool)
    }

    /// Returns the id of the cluster, and that of a pool that was requested.
    pub fn pool_identity(&self, name: &str) -> Option<(String, i64)> {
        let fsid = self.cluster.borrow().as_ref()?.status().fsid;
        let pools = self.pools.borrow();
        Some((fsid, pools.get(name.strip_prefix(RADOS_PREFIX).unwrap_or(name))?.id()))
    }

    /// Returns the names of the pools that were requested.
    pub fn pool_names(&self) -> Vec<String> {
        self.pools.borrow().keys().cloned().collect()
    }

    /// Returns the pools that were requested, with their usage.  A cluster that does not respond delays this by a
    /// bounded time only.
    pub async fn usage(&self) -> Vec<(String, Usage)> {
        let pools: Vec<_> = self.pools.borrow().iter().map(|(name, pool)| (name.clone(), pool.clone())).collect();
        let mut all = Vec::new();
        for (name, pool) in pools {
            match timeout(PATIENCE, pool.usage()).await {
                Ok(Ok(usage)) => all.push((name, usage)),
                Ok(Err(error)) => tracing::debug!(pool = name, %error, "cannot determine the usage of a pool"),
                Err(_) => tracing::debug!(pool = name, "timeout while reading the usage of a pool"),
            }
        }
        all
    }

    async fn cluster(&self) -> Result<Rc<RadosCluster>> {
        let _turn = self.connecting.acquire(1).await;
        let known = self.cluster.borrow().clone();
        let former = match known {
            Some(cluster) if !cluster.is_fenced() => return Ok(cluster),
            Some(cluster) => {
                // Pools of the fenced client are dropped.  Volumes opened from now on use a new client; those that
                // the old client has open keep failing as fenced.
                tracing::warn!("this client is on the cluster's blocklist; connecting as a new client");
                self.pools.borrow_mut().clear();
                Some(client_of(&cluster))
            }
            None => None,
        };
        let flags = self.flags.clone();
        let config = offload(move || CephConfig::resolve(&flags, &SystemEnvironment).map_err(explain)).await?;
        let cluster = RadosCluster::connect(config).await;
        let cluster = cluster.map_err(explain_unconnected)?;
        let status = cluster.status();
        tracing::info!(
            fsid = status.fsid,
            client = status.client,
            osds = status.osds_up,
            "connected to a Ceph cluster"
        );
        self.fence_left_clients(&cluster, former).await;
        *self.cluster.borrow_mut() = Some(cluster.clone());
        Ok(cluster)
    }

    /// Blocklists the clients of earlier daemons of this data directory that did not end cleanly, so that their
    /// watches need not time out; then records the new client.  `former` is this process's client before it was
    /// fenced.  A failure only costs that wait.
    async fn fence_left_clients(&self, cluster: &RadosCluster, former: Option<CephClient>) {
        let Some(clients) = self.clients.clone() else { return };
        let own = client_of(cluster);
        let (reader, about) = (clients.clone(), own.clone());
        let left = offload(move || reader.left(&about)).await.unwrap_or_else(|failure| {
            tracing::warn!(error = failure.message, "cannot read ceph-clients.json; no earlier client is fenced");
            Vec::new()
        });
        for client in left.into_iter().filter(|client| Some(client) != former.as_ref()) {
            match cluster.blocklist(&client.address, None).await {
                Ok(()) => tracing::info!(address = client.address, "fenced the client of a daemon that was killed"),
                Err(error) => {
                    tracing::warn!(
                        address = client.address, %error,
                        "cannot fence the client of a daemon that was killed; its locks are held until its watches time out"
                    );
                }
            }
        }
        if let Err(failure) = offload(move || clients.begin(own)).await {
            tracing::warn!(
                error = failure.message,
                "cannot record this client in ceph-clients.json; after a kill its locks are held until the watch timeout"
            );
        }
    }

    /// Makes pools that are requested from now on use another client: others have fenced this one, or are about to.
    pub fn renew_client(&self) {
        self.pools.borrow_mut().clear();
        let former = self.cluster.borrow_mut().take();
        // Volumes that are still open through it keep it until they fail.
        drop(former);
    }

    /// Ends the sessions, after releasing images that have no users.
    pub async fn close(&self) {
        let pools = std::mem::take(&mut *self.pools.borrow_mut());
        let mut settled = true;
        for (name, pool) in pools {
            let backend: Rc<dyn ObjectBackend> = pool;
            if timeout(CLOSING, Images::close_all(&backend, CLOSING_USED)).await.is_err() {
                tracing::warn!(pool = name, "no response from the cluster; image locks are not released");
                settled = false;
            }
        }
        let cluster = self.cluster.borrow_mut().take();
        if let Some(cluster) = cluster {
            let own = client_of(&cluster);
            cluster.close();
            if let Some(clients) = self.clients.clone().filter(|_| settled)
                && let Err(failure) = offload(move || clients.end(&own)).await
            {
                tracing::warn!(
                    error = failure.message,
                    "cannot remove this client from ceph-clients.json; it is fenced at the next start"
                );
            }
        }
    }
}

/// Returns the client address of our connection to a cluster.
fn client_of(cluster: &RadosCluster) -> CephClient {
    CephClient { fsid: cluster.status().fsid, address: cluster.identity().address }
}

/// Explains to the user that a cluster cannot be connected to.
fn explain_unconnected(error: forebay_block::Error) -> Failure {
    let kind = error.kind();
    let failure = Failure::from(error).context("connecting to the Ceph cluster");
    match kind {
        ErrorKind::TimedOut => Failure { kind: FailureKind::Unreachable, ..failure }.hint(
            "check that its monitors are up and reachable: 'mon_host' in the configuration lists them, and \
             'client_mount_timeout' is the time to wait for them",
        ),
        ErrorKind::Denied => failure.hint(
            "the key differs from the cluster's, which 'ceph auth get client.ID' shows; choose another with \
             --keyring FILE and --id ID",
        ),
        _ => failure,
    }
}

/// Explains a configuration error to the user.
fn explain(error: ConfigError) -> Failure {
    let kind = match &error {
        ConfigError::NoConf(_) | ConfigError::NoKey { .. } => FailureKind::NotFound,
        ConfigError::Read { error, .. } if error.kind() == io::ErrorKind::NotFound => FailureKind::NotFound,
        ConfigError::Read { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => FailureKind::Denied,
        _ => FailureKind::Invalid,
    };
    let failure = Failure::new(kind, error.to_string());
    match &error {
        ConfigError::NoConf(_) => failure.hint(
            "the pools 'local' and 'ram' need none; for those of a cluster, start the daemon with -c FILE or CEPH_CONF",
        ),
        ConfigError::NoKey { .. } => failure.hint("name it with --keyring FILE, and the client's name with --id ID"),
        _ => failure,
    }
}
