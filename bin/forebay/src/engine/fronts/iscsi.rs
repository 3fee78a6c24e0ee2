//! iSCSI front: targets whose logical units are the exports.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use forebay_block::{BlockDevice, DeviceHandle};
use forebay_iscsi::scsi::inquiry::UnitIdentity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{
    AccessControl, IscsiServer, IscsiServerOptions, PortGroups, Target, TargetLimits, TargetSpec, Targets, UnitDevices,
    UnitSpec,
};
use forebay_reactor::{Addr, CoreHandle, Listener, spawn};

use super::addresses::own_addresses;
use super::cores::{Listening, on_each_server, serve_on_cores};
use super::published::Published;
use super::spaces::PoolSpaces;
use super::{Engine, ExportedImage, FrontFuture, HostFront};
use crate::api::Front;
use crate::config::{DaemonConfig, IscsiAccess, IscsiTargetSettings};
use crate::engine::identity::{DataDirIdentity, format_uuid};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

thread_local! {
    /// Server of this core.
    static SERVER: RefCell<Option<Rc<IscsiServer>>> = const { RefCell::new(None) };
}

/// The iSCSI front.
pub struct IscsiFront {
    targets: Targets,
    /// Target of exports that name none.
    default: Target,
    /// Access of the default target as configured, without initiators added at run time.
    configured: RefCell<IscsiAccess>,
    /// Targets being removed: exports cannot select them.
    removing: RefCell<BTreeSet<String>>,
    settings: IscsiTargetSettings,
    listeners: RefCell<Vec<Listening<()>>>,
    addrs: RefCell<Vec<Addr>>,
    published: Published<DeviceHandle>,
    /// Logical units by image, with their targets.
    luns: RefCell<BTreeMap<String, (Target, u16)>>,
    /// Logical units being removed, each with a completion that fires when no session uses it.
    leaving: RefCell<BTreeMap<String, forebay_reactor::cross::OneshotReceiver<()>>>,
    spaces: Rc<PoolSpaces>,
}

impl IscsiFront {
    /// Creates the default target of a data directory; nothing listens yet.
    pub fn new(identity: &DataDirIdentity, settings: &IscsiTargetSettings, spaces: Rc<PoolSpaces>) -> Self {
        let name = || format!("iqn.2026-11.io.forebay:{}", format_uuid(&identity.uuid));
        let limits = TargetLimits {
            sessions_max: settings.sessions_max,
            sessions_per_initiator: settings.sessions_per_host,
            memory_max: settings.memory_max,
        };
        let targets = Targets::new(limits);
        let name = settings.name.clone().unwrap_or_else(name);
        let default = targets
            .create(TargetSpec { name, access: access_control(&settings.access), port_groups: None })
            .expect("the first target of a registry");
        targets.set_discovery_chap(settings.discovery_chap.clone());
        Self {
            targets,
            default,
            configured: RefCell::new(settings.access.clone()),
            removing: RefCell::default(),
            settings: settings.clone(),
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            published: Published::default(),
            luns: RefCell::default(),
            leaving: RefCell::default(),
            spaces,
        }
    }

    /// Sets the initiators that may log in to a target, and their CHAP settings.  Sessions of initiators that are no
    /// longer allowed end after their commands in flight complete.
    pub fn admit(&self, target: &Target, access: &IscsiAccess) {
        target.set_access(access_control(access));
        let ending = target.expel_unlisted();
        if ending.sessions() > 0 {
            let sessions = ending.sessions();
            tracing::warn!(
                front = "iscsi",
                sessions,
                target = target.name(),
                "sessions end: their initiators are not allowed any more"
            );
            drop(spawn(ending));
        }
    }

    /// Sets the CHAP settings for discovery sessions.
    pub fn set_discovery_chap(&self, settings: &IscsiTargetSettings) {
        self.targets.set_discovery_chap(settings.discovery_chap.clone());
    }

    /// Returns the targets.
    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Returns the default target, used by exports that name none.
    pub fn default_target(&self) -> &Target {
        &self.default
    }

    /// Returns a target by name; without a name, the default one.
    ///
    /// # Errors
    /// If no target has that name.
    pub fn target(&self, name: Option<&str>) -> Result<Target> {
        let Some(name) = name else { return Ok(self.default.clone()) };
        let found = self.targets.get(name).filter(|target| !self.removing.borrow().contains(target.name()));
        found.ok_or_else(|| {
            Failure::new(FailureKind::NotFound, format!("there is no iSCSI target {name}"))
                .hint(format!("'forebay iscsi-target ls' lists them; forebay iscsi-target create {name}"))
        })
    }

    /// Creates a target.
    ///
    /// # Errors
    /// If a target of that name exists.
    pub fn create(&self, name: &str, access: &IscsiAccess) -> Result<Target> {
        let spec = TargetSpec { name: name.to_owned(), access: access_control(access), port_groups: None };
        self.targets.create(spec).map_err(|error| Failure::new(FailureKind::Exists, error.to_string()))
    }

    /// Creates a target that other daemons serve as well, as these port groups.  It is suspended.
    ///
    /// # Errors
    /// If a target of that name exists.
    pub fn create_shared(&self, name: &str, access: &IscsiAccess, port_groups: PortGroups) -> Result<Target> {
        let port_groups = Some(port_groups);
        let spec = TargetSpec { name: name.to_owned(), access: access_control(access), port_groups };
        self.targets.create_suspended(spec).map_err(|error| Failure::new(FailureKind::Exists, error.to_string()))
    }

    /// Removes a target, and waits until its sessions have ended.
    pub async fn remove(&self, name: &str) {
        if let Some(ending) = self.targets.remove(name) {
            ending.await;
        }
    }

    /// Returns the addresses at which hosts elsewhere reach the targets by TCP.
    pub fn reachable_portals(&self) -> Result<Vec<SocketAddr>> {
        let mut portals = Vec::new();
        for portal in self.targets.portals() {
            match portal {
                Addr::Tcp(addr) if addr.ip().is_unspecified() => {
                    portals
                        .extend(own_addresses(addr.is_ipv6())?.into_iter().map(|ip| SocketAddr::new(ip, addr.port())));
                }
                Addr::Tcp(addr) => portals.push(addr),
                Addr::Unix(_) => {}
            }
        }
        Ok(portals)
    }

    /// Lists the portals by their addresses, as needed beside portals of other daemons: hosts that learn of those do not
    /// take the address that they asked for another one.
    pub fn name_portals(&self) -> Result<()> {
        let unix = self.targets.portals().into_iter().filter(|portal| matches!(portal, Addr::Unix(_)));
        let named = self.reachable_portals()?.into_iter().map(Addr::Tcp).chain(unix).collect();
        self.targets.set_portals(named);
        Ok(())
    }

    /// Hides a target from exports until the guard is dropped.
    pub fn begin_removal(&self, name: &str) -> TargetRemoval<'_> {
        self.removing.borrow_mut().insert(name.to_owned());
        TargetRemoval { front: self, name: name.to_owned() }
    }

    /// Returns the configured access of the default target.
    pub fn configured(&self) -> IscsiAccess {
        self.configured.borrow().clone()
    }

    /// Sets the configured access of the default target.
    pub fn set_configured(&self, access: IscsiAccess) {
        *self.configured.borrow_mut() = access;
    }
}

/// Guard of a target that is being removed.
pub struct TargetRemoval<'a> {
    front: &'a IscsiFront,
    name: String,
}

impl Drop for TargetRemoval<'_> {
    fn drop(&mut self) {
        self.front.removing.borrow_mut().remove(&self.name);
    }
}

/// Entry that matches no initiator name: an empty list admits all initiators.
const NOBODY: &str = "-";

/// Converts access settings to the target's form.
fn access_control(access: &IscsiAccess) -> AccessControl {
    let initiators = match &access.initiators {
        None => Vec::new(),
        Some(none) if none.is_empty() => vec![NOBODY.to_owned()],
        Some(some) => some.clone(),
    };
    AccessControl { initiators, chap: access.chap.clone() }
}

fn options(settings: &IscsiTargetSettings) -> IscsiServerOptions {
    let mut options = IscsiServerOptions { connections_max: settings.sessions_max, ..IscsiServerOptions::default() };
    options.offer.digests = settings.digests;
    options
}

impl HostFront for IscsiFront {
    fn listen(&self, config: &DaemonConfig) -> Result<()> {
        for addr in &config.iscsi {
            let listener = bind(addr, self.settings.access.chap.is_some())?;
            self.addrs.borrow_mut().push(listener.local_addr().clone());
            self.listeners.borrow_mut().push((listener, ()));
        }
        let advertised: Vec<Addr> = self.settings.advertise.iter().copied().map(Addr::Tcp).collect();
        self.targets.set_portals(if advertised.is_empty() { self.addrs() } else { advertised });
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>> {
        Box::pin(async move {
            let listeners = self.listeners.take();
            if listeners.is_empty() {
                return Ok(());
            }
            let (targets, published) = (self.targets.clone(), self.published.clone());
            let settings = options(&self.settings);
            let start_there = move |listeners| {
                let devices = PublishedDevices { published: published.clone() };
                start_server(targets.clone(), Rc::new(devices), settings.clone(), listeners);
            };
            let devices = EngineDevices { engine: Rc::downgrade(engine) };
            serve_on_cores(cores, listeners, start_there, |listeners| {
                start_server(self.targets.clone(), Rc::new(devices), options(&self.settings), listeners);
            })
            .await?;
            self.spaces.watch(&Rc::downgrade(engine));
            Ok(())
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            self.spaces.stop();
            on_each_server(cores, &SERVER, |server| async move { server.stop().await }).await;
            self.published.clear();
        })
    }

    fn addrs(&self) -> Vec<Addr> {
        self.addrs.borrow().clone()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        let luns = self.luns.borrow();
        let Some((target, lun)) = luns.get(&spec.to_string()) else { return Vec::new() };
        self.addrs.borrow().iter().filter_map(|addr| uri(addr, target.name(), *lun)).collect()
    }

    fn connections(&self) -> usize {
        self.targets.session_count()
    }

    fn connections_of(&self, spec: &ImageSpec) -> usize {
        self.targets.unit_by_name(&spec.to_string()).map_or(0, |unit| unit.sessions())
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        let units = self.targets.all().into_iter().flat_map(|target| target.units());
        units.map(|unit| (unit.name, unit.sessions)).collect()
    }

    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let name = exported.spec.to_string();
        let lun = exported.unit.ok_or_else(|| Failure::invalid("an export over iscsi without a LUN"))?;
        let target = self.target(exported.within)?;
        let owner = u16::try_from(lun).ok().and_then(|lun| target.unit_at(lun)).map(|unit| unit.spec().name.clone());
        if let Some(owner) = owner.filter(|owner| *owner != name) {
            let what = format!("LUN {lun} of {} is {owner}'s already", target.name());
            return Err(Failure::new(FailureKind::Exists, what));
        }
        // Inserted first: an initiator that learns of the unit finds its device.
        self.published.insert(name.clone(), DeviceHandle::new(device.clone()));
        let spec = UnitSpec {
            name: name.clone(),
            identity: UnitIdentity { uuid: *exported.identity, revision: env!("CARGO_PKG_VERSION").into() },
            read_only: exported.read_only,
            rotational: false,
            space: self.spaces.of(&exported.spec.pool),
            initiators: exported.hosts.to_vec(),
        };
        match target.add(lun, spec) {
            Ok(unit) => {
                self.luns.borrow_mut().insert(name, (target, unit.lun()));
                Ok(())
            }
            Err(error) => {
                self.published.remove(&name);
                Err(Failure::invalid(error.to_string()))
            }
        }
    }

    fn replace_device(&self, spec: &ImageSpec, device: &Rc<dyn BlockDevice>) {
        let name = spec.to_string();
        let Some((target, lun)) = self.luns.borrow().get(&name).cloned() else { return };
        let Some(unit) = target.unit_at(lun) else { return };
        self.published.insert(name.clone(), DeviceHandle::new(device.clone()));
        // Another unit: sessions that still end keep the former device.
        if let Err(error) = target.add(lun.into(), unit.spec().clone()) {
            tracing::error!(image = name, %error, "cannot serve an export again");
        }
    }

    fn unpublish(&self, spec: &ImageSpec) {
        let name = spec.to_string();
        let Some((target, lun)) = self.luns.borrow_mut().remove(&name) else { return };
        if let Some(gone) = target.remove(lun) {
            self.leaving.borrow_mut().insert(name.clone(), gone);
        }
        self.published.remove(&name);
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, _cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        let gone = self.leaving.borrow_mut().remove(&spec.to_string());
        Box::pin(async move {
            if let Some(gone) = gone {
                // Sessions keep the other units; they have released this one.
                let _ = gone.await;
            }
        })
    }
}

/// Returns the URI of a logical unit, in libiscsi's syntax.
fn uri(addr: &Addr, target: &str, lun: u16) -> Option<String> {
    match addr {
        // A wildcard address is reachable on the loopback address.
        Addr::Tcp(addr) if addr.ip().is_unspecified() => {
            Some(format!("iscsi://127.0.0.1:{}/{target}/{lun}", addr.port()))
        }
        Addr::Tcp(addr) => Some(format!("iscsi://{addr}/{target}/{lun}")),
        Addr::Unix(_) => None,
    }
}

/// Devices on the engine's core: requests are not forwarded.
struct EngineDevices {
    engine: Weak<Engine>,
}

impl UnitDevices for EngineDevices {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.engine.upgrade()?.exports.device(Front::Iscsi, &unit.spec().name)
    }
}

/// Devices on another core.
struct PublishedDevices {
    published: Published<DeviceHandle>,
}

impl UnitDevices for PublishedDevices {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.published.open(&unit.spec().name)
    }
}

fn bind(addr: &Addr, asks: bool) -> Result<Listener> {
    if !addr.is_local() && !asks {
        tracing::warn!(%addr, "iSCSI is served beyond this machine, without CHAP: anyone who can connect can write");
    }
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for iSCSI on {addr}")).hint("choose another address with --iscsi")
    })
}

/// Starts the server of this core.
fn start_server(
    targets: Targets,
    devices: Rc<dyn UnitDevices>,
    options: IscsiServerOptions,
    listeners: Vec<Listening<()>>,
) {
    let server = IscsiServer::new(targets, devices, options);
    for (listener, ()) in listeners {
        drop(spawn(server.clone().serve(listener)));
    }
    SERVER.set(Some(server));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_what_clients_take() {
        let uri = |addr: &str, lun| uri(&addr.parse().expect("an address"), "iqn.x:y", lun);
        assert_eq!(uri("10.0.0.1:3260", 3).as_deref(), Some("iscsi://10.0.0.1:3260/iqn.x:y/3"));
        assert_eq!(uri("[::1]:3260", 0).as_deref(), Some("iscsi://[::1]:3260/iqn.x:y/0"));
        assert_eq!(uri("0.0.0.0:1", 0).as_deref(), Some("iscsi://127.0.0.1:1/iqn.x:y/0"));
        assert_eq!(uri("unix:/x", 0), None);
    }
}
