//! Fronts: the protocol servers that listen for hosts, and their cores.
//!
//! Each protocol is a [`HostFront`] in a file of its own.  Each core has a server of its own on the shared listening
//! sockets, so a connection stays on the core that took it.  Volumes live on the engine's core; the other cores reach
//! them through device handles, which the engine publishes.

mod addresses;
mod cores;
mod iscsi;
mod nbd;
mod nvme;
mod published;
mod spaces;
mod vhost;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_messenger::Address;
use forebay_reactor::{Addr, CoreHandle, Listener, spawn};

use super::identity::{DataDirIdentity, Uuid};
use super::{Engine, failover};
use crate::api::Front;
use crate::config::{DaemonConfig, IscsiTargetSettings, NvmeSubsystemSettings};
use crate::failure::Result;
use crate::spec::ImageSpec;
use iscsi::IscsiFront;
use nbd::NbdFront;
use nvme::NvmeFront;
use spaces::PoolSpaces;
pub use vhost::VhostBinding;
use vhost::VhostFront;

/// Protocol front for hosts.  All methods run on the engine's core.
pub trait HostFront {
    /// Binds the front's addresses; no host is served yet.  Without addresses the front stays disabled.
    fn listen(&self, config: &DaemonConfig) -> Result<()>;

    /// Serves on the given cores, which include the engine's.
    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>>;

    /// Stops accepting hosts, and ends the connections after their requests in flight complete.
    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()>;

    /// Returns the addresses on which it is served.
    fn addrs(&self) -> Vec<Addr>;

    /// Returns the URIs of an export for clients, one for each address.
    fn uris(&self, spec: &ImageSpec) -> Vec<String>;

    /// Returns the number of connections to all exports.
    fn connections(&self) -> usize;

    /// Returns the number of connections to an export.
    fn connections_of(&self, spec: &ImageSpec) -> usize;

    /// Returns the number of host connections by export name.
    fn connections_by_export(&self) -> BTreeMap<String, usize>;

    /// Lets hosts open a device, by its name or by its number within the front.  On failure nothing has changed.
    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()>;

    /// Stops hosts from opening a device; hosts that have it open keep it.
    fn unpublish(&self, spec: &ImageSpec);

    /// Gives a published device's export another device, without hosts noticing; requests in flight stay with the former
    /// one.  Only fronts whose hosts use other paths meanwhile have to.
    fn replace_device(&self, _spec: &ImageSpec, _device: &Rc<dyn BlockDevice>) {}

    /// Ends the connections to an export after their requests in flight complete.
    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()>;
}

/// Description of an export for a front.
pub struct ExportedImage<'a> {
    /// Exported image.
    pub spec: &'a ImageSpec,
    /// Number within the front, in fronts whose exports have numbers.
    pub unit: Option<u32>,
    /// Unique and permanent identity of the image.
    pub identity: &'a Uuid,
    /// ANA group, in fronts that support ANA.
    pub ana_group: u32,
    /// Set if writes are refused.
    pub read_only: bool,
    /// Subsystem or target of the export; `None` for the default one.
    pub within: Option<&'a str>,
    /// Hosts that see the export; if empty, all do.
    pub hosts: &'a [String],
    /// Socket of the export, in fronts whose exports have sockets of their own.
    pub socket: Option<&'a VhostBinding>,
}

/// Future of a front's operation; it stays on its core and borrows the front.
pub type FrontFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + 'a>>;

/// Fronts of the engine.
pub struct Fronts {
    nbd: NbdFront,
    nvme: NvmeFront,
    iscsi: IscsiFront,
    vhost: VhostFront,
    serving: Cell<bool>,
}

impl Fronts {
    /// Creates the fronts; nothing listens yet.
    pub fn new(identity: &DataDirIdentity, config: Option<&DaemonConfig>) -> Self {
        let subsystem = config.map_or_else(NvmeSubsystemSettings::default, |config| config.nvme_subsystem.clone());
        let target = config.map_or_else(IscsiTargetSettings::default, |config| config.iscsi_target.clone());
        let spaces = PoolSpaces::new(target.threshold_percent);
        Self {
            nbd: NbdFront::new(),
            nvme: NvmeFront::new(identity, &subsystem),
            iscsi: IscsiFront::new(identity, &target, spaces.clone()),
            vhost: VhostFront::new(identity, spaces),
            serving: Cell::new(false),
        }
    }

    /// Returns all fronts, in the order in which they start.
    fn all(&self) -> [&dyn HostFront; 4] {
        [&self.nbd, &self.nvme, &self.iscsi, &self.vhost]
    }

    fn of(&self, front: Front) -> &dyn HostFront {
        match front {
            Front::Nbd => &self.nbd,
            Front::Nvme => &self.nvme,
            Front::Iscsi => &self.iscsi,
            Front::Vhost => &self.vhost,
        }
    }

    /// Serves the vhost controllers that waited for their units, if these have been opened or cannot be.
    pub fn serve_controllers(&self, engine: &Rc<Engine>) {
        self.vhost.serve_controllers(engine);
    }

    /// Returns whether hosts can connect.
    pub fn is_serving(&self) -> bool {
        self.serving.get()
    }

    /// Returns the addresses on which a front is served.
    pub fn addrs(&self, front: Front) -> Vec<Addr> {
        self.of(front).addrs()
    }

    /// Gives a published export another device; requests in flight stay with the former one.
    pub fn replace_device(&self, front: Front, spec: &ImageSpec, device: &Rc<dyn BlockDevice>) {
        self.of(front).replace_device(spec, device);
    }

    /// Returns the NBD front.
    pub fn nbd(&self) -> &NbdFront {
        &self.nbd
    }

    /// Returns the NVMe/TCP front.
    pub fn nvme(&self) -> &NvmeFront {
        &self.nvme
    }

    /// Returns the iSCSI front.
    pub fn iscsi(&self) -> &IscsiFront {
        &self.iscsi
    }

    /// Returns the vhost-user front.
    pub fn vhost(&self) -> &VhostFront {
        &self.vhost
    }

    /// Sets whether subsystems and targets are expected whose names are not known yet: hosts that ask for unknown ones are
    /// told to try again.
    pub fn set_expecting(&self, expects_more: bool) {
        self.nvme.subsystems().set_expecting(expects_more);
        self.iscsi.targets().set_expecting(expects_more);
    }

    /// Sets whether discovery omits the default subsystem and the default target while they have no exports.
    pub fn hide_empty_defaults(&self, hides_empty: bool) {
        self.nvme.default_subsystem().hide_empty(hides_empty);
        self.iscsi.default_target().hide_empty(hides_empty);
    }

    /// Returns the number of connections to an export.
    pub fn connections_of(&self, front: Front, spec: &ImageSpec) -> usize {
        self.of(front).connections_of(spec)
    }

    /// Returns the number of host connections by export name.
    pub fn connections_by_export(&self, front: Front) -> BTreeMap<String, usize> {
        self.of(front).connections_by_export()
    }

    /// Returns the number of connections to all exports.
    pub fn connections(&self) -> usize {
        self.all().iter().map(|front| front.connections()).sum()
    }

    /// Returns the name of a subsystem or target in the form that exports use: `None` for the default one.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn within(&self, front: Front, name: &str) -> Result<Option<String>> {
        let (name, default) = match front {
            Front::Nbd | Front::Vhost => return Ok(None),
            Front::Nvme => (self.nvme.subsystem(Some(name))?.nqn().to_owned(), self.nvme.default_subsystem().nqn()),
            Front::Iscsi => (self.iscsi.target(Some(name))?.name().to_owned(), self.iscsi.default_target().name()),
        };
        Ok((name != default).then_some(name))
    }

    /// Returns the TCP addresses of a front, as URIs have them, for hosts elsewhere.
    pub fn uri_addrs(&self, front: Front) -> Vec<String> {
        let elsewhere = |addr: Addr| match addr {
            Addr::Tcp(addr) if !addr.ip().is_unspecified() => Some(addr.to_string()),
            _ => None,
        };
        self.addrs(front).into_iter().filter_map(elsewhere).collect()
    }

    /// Returns the URIs of an export for clients, one for each address.
    pub fn uris(&self, front: Front, spec: &ImageSpec) -> Vec<String> {
        self.of(front).uris(spec)
    }
}

impl Engine {
    pub(super) fn cores(&self) -> &[CoreHandle] {
        self.options.daemon.as_ref().map_or(&[], |daemon| &daemon.cores)
    }

    /// Restores the exports and starts listening for hosts.
    pub async fn start_fronts(self: &Rc<Self>) -> Result<()> {
        let Some(daemon) = &self.options.daemon else { return Ok(()) };
        self.restore_access();
        // A daemon that was just killed may still hold its sockets.
        let peers = daemon.config.peers.listen.iter().filter_map(Address::unix);
        let kernel = Addr::Unix(nbd::kernel_socket_in(&daemon.config.data));
        for addr in daemon.config.nbd.iter().cloned().chain(peers).chain([kernel]) {
            Listener::settle(&addr).await;
        }
        self.exports.settle_sockets().await;
        for front in self.fronts.all() {
            front.listen(&daemon.config)?;
        }
        // Peers come first: a log that is opened drops the replicas that do not answer.
        self.peers.start(&daemon.config)?;
        // From here on, `stop_fronts` has work to do.
        self.fronts.serving.set(true);
        self.restore_exports().await;
        // Hosts that come back find the subsystem and the target of the group.
        let membership = self.prepare_membership(daemon.config.group.as_ref())?;
        for front in self.fronts.all() {
            front.serve(self, self.cores()).await?;
        }
        failover::watch(self);
        if let Some(joined) = membership {
            joined.begin();
        }
        drop(spawn(self.clone().resume_mappings()));
        Ok(())
    }

    /// Lets hosts open a device.
    pub fn publish(&self, front: Front, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        self.fronts.of(front).publish(exported, device)
    }

    /// Stops hosts from opening a device; hosts that have it open keep it.
    pub fn unpublish(&self, front: Front, spec: &ImageSpec) {
        self.fronts.of(front).unpublish(spec);
    }

    /// Ends the connections to an export after their requests in flight complete.
    pub async fn disconnect(&self, front: Front, spec: &ImageSpec) {
        self.fronts.of(front).disconnect(spec, self.cores()).await;
    }

    /// Stops accepting hosts, and ends the connections after their requests in flight complete.
    pub async fn stop_fronts(&self) {
        if !self.fronts.serving.replace(false) {
            return;
        }
        self.volumes.end_limits();
        for front in self.fronts.all() {
            front.stop(self.cores()).await;
            for addr in front.addrs() {
                if let Addr::Unix(path) = addr {
                    // A socket path left behind would be replaced at the next start.
                    let _ = forebay_reactor::fs::remove_file(path);
                }
            }
        }
    }
}
