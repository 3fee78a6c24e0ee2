//! The fronts: what listens for hosts, and on which cores.
//!
//! Each protocol is a [`HostFront`] in a file of its own.  Each core has a server of its own on the shared listening
//! sockets, so a connection stays on the core that took it.  Volumes live on the engine's core; the other cores reach
//! them through device handles, which the engine publishes.

mod iscsi;
mod nbd;
mod nvme;
mod published;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_messenger::Address;
use forebay_nbd::Stats;
use forebay_reactor::{Addr, CoreHandle, Listener};

use super::Engine;
use super::identity::{Identity, Uuid};
use crate::api::Front;
use crate::config::{Config, IscsiTarget, NvmeSubsystem};
use crate::failure::Result;
use crate::spec::ImageSpec;
use iscsi::IscsiFront;
use nbd::NbdFront;
use nvme::NvmeFront;

/// One protocol that hosts speak.  All of it runs on the engine's core.
pub trait HostFront {
    /// Binds its addresses; nobody is served yet.  Without addresses the front stays off.
    fn listen(&self, config: &Config) -> Result<()>;

    /// Serves on the given cores, of which the engine's is one.
    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> Served<'a, Result<()>>;

    /// Takes no more hosts, and ends the connections, their requests in flight first.
    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> Served<'a, ()>;

    /// Where it is served.
    fn addrs(&self) -> Vec<Addr>;

    /// What a client uses to reach an export, through each address.
    fn uris(&self, spec: &ImageSpec) -> Vec<String>;

    /// Connections to all exports.
    fn connections(&self) -> usize;

    /// Connections to an export.
    fn connections_of(&self, spec: &ImageSpec) -> usize;

    /// Returns the connections that hosts hold, by the name of the export.
    fn connections_by_export(&self) -> BTreeMap<String, usize>;

    /// Lets hosts open a device, by its name or by its number within the front.  When that fails, nothing has changed.
    fn publish(&self, exported: &Exported<'_>, device: &Rc<dyn BlockDevice>) -> Result<()>;

    /// Lets hosts open a device no more; those who have it open keep it.
    fn unpublish(&self, spec: &ImageSpec);

    /// Ends the connections to an export, their requests in flight first.
    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> Served<'a, ()>;
}

/// What is exported, as a front sees it.
pub struct Exported<'a> {
    /// The image.
    pub spec: &'a ImageSpec,
    /// Its number within the front, where exports have numbers.
    pub unit: Option<u32>,
    /// What identifies the image everywhere and always.
    pub identity: &'a Uuid,
    /// Its group of asymmetric access, where there are such.
    pub ana_group: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Hosts that see it; all do when there is none.
    pub hosts: &'a [String],
}

/// A future that stays on its core and borrows the front.
pub type Served<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + 'a>>;

/// What listens for hosts.
pub struct Fronts {
    nbd: NbdFront,
    nvme: NvmeFront,
    iscsi: IscsiFront,
    serving: Cell<bool>,
}

impl Fronts {
    /// Nothing listens yet.
    pub fn new(identity: &Identity, config: Option<&Config>) -> Self {
        let subsystem = config.map_or_else(NvmeSubsystem::default, |config| config.nvme_subsystem.clone());
        let target = config.map_or_else(IscsiTarget::default, |config| config.iscsi_target.clone());
        Self {
            nbd: NbdFront::new(),
            nvme: NvmeFront::new(identity, &subsystem),
            iscsi: IscsiFront::new(identity, &target),
            serving: Cell::new(false),
        }
    }

    /// Every front, in the order in which they start.
    fn all(&self) -> [&dyn HostFront; 3] {
        [&self.nbd, &self.nvme, &self.iscsi]
    }

    fn of(&self, front: Front) -> &dyn HostFront {
        match front {
            Front::Nbd => &self.nbd,
            Front::Nvme => &self.nvme,
            Front::Iscsi => &self.iscsi,
        }
    }

    /// Hosts can connect.
    pub fn is_serving(&self) -> bool {
        self.serving.get()
    }

    /// Where a front is served.
    pub fn addrs(&self, front: Front) -> Vec<Addr> {
        self.of(front).addrs()
    }

    /// What the NBD servers count.
    pub fn nbd_stats(&self) -> &Stats {
        self.nbd.stats()
    }

    /// The NVMe subsystem.
    pub fn nvme(&self) -> &NvmeFront {
        &self.nvme
    }

    /// The iSCSI target.
    pub fn iscsi(&self) -> &IscsiFront {
        &self.iscsi
    }

    /// Connections to an export.
    pub fn connections_of(&self, front: Front, spec: &ImageSpec) -> usize {
        self.of(front).connections_of(spec)
    }

    /// Returns the connections that hosts hold, by the name of the export.
    pub fn connections_by_export(&self, front: Front) -> BTreeMap<String, usize> {
        self.of(front).connections_by_export()
    }

    /// Connections to all exports.
    pub fn connections(&self) -> usize {
        self.all().iter().map(|front| front.connections()).sum()
    }

    /// What a client uses to reach an export, through each address.
    pub fn uris(&self, front: Front, spec: &ImageSpec) -> Vec<String> {
        self.of(front).uris(spec)
    }
}

impl Engine {
    fn cores(&self) -> &[CoreHandle] {
        self.options.daemon.as_ref().map_or(&[], |daemon| &daemon.cores)
    }

    /// Opens what was exported before, and listens for hosts.
    pub async fn start_fronts(self: &Rc<Self>) -> Result<()> {
        let Some(daemon) = &self.options.daemon else { return Ok(()) };
        self.restore_exports().await;
        // A daemon that was killed a moment ago may still hold its sockets.
        let peers = daemon.config.peers.listen.iter().filter_map(Address::unix);
        for addr in daemon.config.nbd.iter().cloned().chain(peers) {
            Listener::settle(&addr).await;
        }
        for front in self.fronts.all() {
            front.listen(&daemon.config)?;
        }
        self.peers.start(&daemon.config)?;
        // From here on there is something to stop.
        self.fronts.serving.set(true);
        for front in self.fronts.all() {
            front.serve(self, self.cores()).await?;
        }
        Ok(())
    }

    /// Lets hosts open a device.
    pub fn publish(&self, front: Front, exported: &Exported<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        self.fronts.of(front).publish(exported, device)
    }

    /// Lets hosts open a device no more; those who have it open keep it.
    pub fn unpublish(&self, front: Front, spec: &ImageSpec) {
        self.fronts.of(front).unpublish(spec);
    }

    /// Ends the connections to an export, their requests in flight first.
    pub async fn disconnect(&self, front: Front, spec: &ImageSpec) {
        self.fronts.of(front).disconnect(spec, self.cores()).await;
    }

    /// Takes no more hosts, and ends the connections, their requests in flight first.
    pub async fn stop_fronts(&self) {
        self.peers.stop();
        if !self.fronts.serving.replace(false) {
            return;
        }
        for front in self.fronts.all() {
            front.stop(self.cores()).await;
            for addr in front.addrs() {
                if let Addr::Unix(path) = addr {
                    // A path that is left would be replaced at the next start.
                    let _ = forebay_reactor::fs::remove_file(path);
                }
            }
        }
    }
}

/// Does something on each core at the same time, and waits for all.
async fn on_each_core<F, Fut>(cores: &[CoreHandle], work: F)
where
    F: Fn() -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let started = cores.iter().map(|core| {
        let work = work.clone();
        core.run(move || async move { work().await })
    });
    for running in started.collect::<Vec<_>>() {
        // A core that is gone has no connections left.
        let _ = running.await;
    }
}
