//! NVMe/TCP front: subsystems whose namespaces are the exports.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::{BlockDevice, DeviceHandle};
use forebay_nvmf::session::admin::SubsystemIdentity;
use forebay_nvmf::{
    AnaGrouping, HostAccess, MemberPort, Namespace, NamespaceDevices, NvmeServer, NvmeStats, Port, PortAddress,
    Subsystem, Subsystems,
};
use forebay_reactor::{Addr, CoreHandle, JoinHandle, Listener, spawn};

use super::addresses::own_addresses;
use super::cores::{Listening, on_each_server, serve_on_cores};
use super::published::Published;
use super::{Engine, ExportedImage, FrontFuture, HostFront};
use crate::api::Front;
use crate::config::{DaemonConfig, NvmeAccess, NvmeSubsystemSettings};
use crate::engine::identity::{DataDirIdentity, format_uuid};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

thread_local! {
    /// Server of this core.
    static SERVER: RefCell<Option<Rc<NvmeServer>>> = const { RefCell::new(None) };
}

/// Published namespace.
struct Offer {
    subsystem: Subsystem,
    nsid: u32,
    /// Task that notifies hosts of each new size.
    resizing: Option<JoinHandle<()>>,
}

/// Namespace that was withdrawn and may have commands in flight.
type Leaving = (Subsystem, u32);

/// The NVMe/TCP front.
pub struct NvmeFront {
    subsystems: Subsystems,
    /// Subsystem of exports that name none.
    default: Subsystem,
    /// Access of the default subsystem as configured, without hosts added at run time.
    configured: RefCell<NvmeAccess>,
    /// Access of each subsystem, by NQN.
    access: RefCell<BTreeMap<String, NvmeAccess>>,
    /// Subsystems being removed: exports cannot select them.
    removing: RefCell<BTreeSet<String>>,
    cntlids: RangeInclusive<u16>,
    listeners: RefCell<Vec<Listening<Arc<Port>>>>,
    addrs: RefCell<Vec<Addr>>,
    published: Published<DeviceHandle>,
    offers: RefCell<BTreeMap<String, Offer>>,
    leaving: RefCell<BTreeMap<String, Leaving>>,
}

impl NvmeFront {
    /// Creates the default subsystem of a data directory; nothing listens yet.
    pub fn new(identity: &DataDirIdentity, config: &NvmeSubsystemSettings) -> Self {
        let uuid = format_uuid(&identity.uuid);
        let nqn = config.nqn.clone().unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"));
        let serial = match &config.nqn {
            None => uuid.replace('-', "")[..20].to_owned(),
            Some(nqn) => serial_of(nqn),
        };
        let default_nqn = nqn.clone();
        let subsystems = Subsystems::new(config.limits.clone());
        let admit = |subsystem: &Subsystem| set_hosts(subsystem, &config.access);
        let default = subsystems
            .create_with(identity_of(nqn, serial), config.cntlids.clone(), AnaGrouping::ByPort, admit)
            .expect("the first subsystem's name is its own: the name of discovery is refused in the configuration");
        Self {
            subsystems,
            default,
            access: RefCell::new(BTreeMap::from([(default_nqn, config.access.clone())])),
            configured: RefCell::new(config.access.clone()),
            removing: RefCell::default(),
            cntlids: config.cntlids.clone(),
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            published: Published::default(),
            offers: RefCell::default(),
            leaving: RefCell::default(),
        }
    }

    /// Returns the subsystems.
    pub fn subsystems(&self) -> &Subsystems {
        &self.subsystems
    }

    /// Returns the default subsystem, used by exports that name none.
    pub fn default_subsystem(&self) -> &Subsystem {
        &self.default
    }

    /// Returns a subsystem by NQN; without one, the default subsystem.
    ///
    /// # Errors
    /// If no subsystem has that NQN.
    pub fn subsystem(&self, nqn: Option<&str>) -> Result<Subsystem> {
        let Some(nqn) = nqn else { return Ok(self.default.clone()) };
        let found = self.subsystems.get(nqn).filter(|_| !self.removing.borrow().contains(nqn));
        found.ok_or_else(|| {
            Failure::new(FailureKind::NotFound, format!("there is no NVMe subsystem {nqn}"))
                .hint(format!("'forebay nvme-subsystem ls' lists them; forebay nvme-subsystem create {nqn}"))
        })
    }

    /// Hides a subsystem from exports until the guard is dropped.
    pub fn begin_removal(&self, nqn: &str) -> SubsystemRemoval<'_> {
        self.removing.borrow_mut().insert(nqn.to_owned());
        SubsystemRemoval { front: self, nqn: nqn.to_owned() }
    }

    /// Returns the configured access of the default subsystem.
    pub fn configured(&self) -> NvmeAccess {
        self.configured.borrow().clone()
    }

    /// Sets the configured access of the default subsystem.
    pub fn set_configured(&self, access: NvmeAccess) {
        *self.configured.borrow_mut() = access;
    }

    /// Creates a subsystem that admits the given hosts.
    ///
    /// # Errors
    /// If a subsystem of that NQN exists.
    pub fn create(&self, nqn: &str, access: &NvmeAccess) -> Result<Subsystem> {
        self.create_with(nqn, access, self.cntlids.clone(), AnaGrouping::ByPort, |_| {})
    }

    /// Creates a subsystem that admits the given hosts, and gives their controllers ids of this range.  `set_up` configures it
    /// further before the first host can connect.
    ///
    /// # Errors
    /// If a subsystem of that NQN exists.
    pub fn create_with(
        &self,
        nqn: &str,
        access: &NvmeAccess,
        cntlids: RangeInclusive<u16>,
        grouping: AnaGrouping,
        set_up: impl FnOnce(&Subsystem),
    ) -> Result<Subsystem> {
        // Subsystems of one NQN are one subsystem to hosts, on whichever daemon, so they need the same serial number.
        let identity = identity_of(nqn.to_owned(), serial_of(nqn));
        let created = self
            .subsystems
            .create_with(identity, cntlids, grouping, |subsystem| {
                set_hosts(subsystem, access);
                set_up(subsystem);
            })
            .map_err(|error| Failure::new(FailureKind::Exists, error.to_string()))?;
        self.access.borrow_mut().insert(nqn.to_owned(), access.clone());
        Ok(created)
    }

    /// Sets the hosts that may connect to a subsystem, with their secrets and keys.  Hosts that are no longer allowed
    /// are disconnected after their commands in flight complete.
    pub fn admit(&self, subsystem: &Subsystem, access: &NvmeAccess) {
        self.access.borrow_mut().insert(subsystem.nqn().to_owned(), access.clone());
        set_hosts(subsystem, access);
        for host in subsystem.expel() {
            tracing::warn!(
                front = "nvme",
                host,
                subsystem = subsystem.nqn(),
                "a host is disconnected: it is not allowed any more"
            );
        }
    }

    /// Changes the access of a subsystem, as [`admit`](Self::admit) does.
    pub fn change(&self, subsystem: &Subsystem, change: impl FnOnce(&mut NvmeAccess)) {
        let before = self.access.borrow().get(subsystem.nqn()).cloned();
        // A subsystem without an entry was removed meanwhile: it admits no host.
        let mut access = before.unwrap_or_else(NvmeAccess::nobody);
        change(&mut access);
        self.admit(subsystem, &access);
    }

    /// Removes a subsystem; its controllers end after their commands in flight complete.
    pub fn remove(&self, nqn: &str) {
        self.access.borrow_mut().remove(nqn);
        self.subsystems.remove(nqn);
    }

    /// Returns the listening addresses in configuration syntax.
    pub fn listeners(&self) -> Vec<String> {
        let told = |(addr, port): (&Addr, &Arc<Port>)| format!("{addr}{}", if port.tls { ",tls=required" } else { "" });
        self.addrs.borrow().iter().zip(&self.subsystems.ports()).map(told).collect()
    }

    /// Returns the ports that hosts elsewhere reach by TCP, one entry an address.
    pub fn reachable_ports(&self) -> Vec<MemberPort> {
        let ports = self.subsystems.ports();
        let addresses = |port: &Arc<Port>| {
            let of = |address: &PortAddress| match address {
                PortAddress::Tcp(ip, number) if !ip.is_unspecified() => Some(SocketAddr::new(*ip, *number)),
                _ => None,
            };
            let (id, tls) = (port.id, port.tls);
            let found: Vec<SocketAddr> = port.addresses.iter().filter_map(of).collect();
            found.into_iter().map(move |address| MemberPort { id, address, tls })
        };
        ports.iter().flat_map(addresses).collect()
    }

    /// Returns the server counters.
    pub fn stats(&self) -> &NvmeStats {
        self.subsystems.stats()
    }

    /// Withdraws the namespace of an export; returns its subsystem and namespace id, if it was published.
    fn withdraw(&self, spec: &ImageSpec) -> Option<Leaving> {
        let name = spec.to_string();
        let offer = self.offers.borrow_mut().remove(&name)?;
        if let Some(resizing) = offer.resizing {
            resizing.abort();
        }
        self.published.remove(&name);
        Some((offer.subsystem, offer.nsid))
    }

    /// Adds a port for a listener.
    fn add_port(&self, addr: &Addr, advertised: Option<&SocketAddr>, tls: bool) -> Result<Arc<Port>> {
        let addresses = match (advertised, addr) {
            (Some(advertised), _) => vec![PortAddress::Tcp(advertised.ip(), advertised.port())],
            (None, Addr::Tcp(addr)) if addr.ip().is_unspecified() => {
                own_addresses(addr.is_ipv6())?.into_iter().map(|ip| PortAddress::Tcp(ip, addr.port())).collect()
            }
            (None, Addr::Tcp(addr)) => vec![PortAddress::Tcp(addr.ip(), addr.port())],
            (None, Addr::Unix(_)) => vec![PortAddress::Unix],
        };
        let id = self.subsystems.ports().len() as u16 + 1;
        let port = if tls { Port::with_tls(id, addresses) } else { Port::new(id, addresses) };
        self.subsystems.add_port(port.clone());
        Ok(port)
    }
}

/// Guard of a subsystem that is being removed.
pub struct SubsystemRemoval<'a> {
    front: &'a NvmeFront,
    nqn: String,
}

impl Drop for SubsystemRemoval<'_> {
    fn drop(&mut self) {
        self.front.removing.borrow_mut().remove(&self.nqn);
    }
}

/// Sets the hosts that may connect.  Keys come first: a new host with a key must never be admitted without it.
fn set_hosts(subsystem: &Subsystem, access: &NvmeAccess) {
    subsystem.set_tls_keys(&access.tls_keys);
    subsystem.set_access(access.hosts.clone().map_or(HostAccess::Anyone, HostAccess::Listed));
}

/// Returns the immutable identity of a subsystem.
fn identity_of(nqn: String, serial: String) -> SubsystemIdentity {
    SubsystemIdentity { nqn, serial, model: "Forebay".into(), firmware: env!("CARGO_PKG_VERSION").into() }
}

/// Derives a 20-character serial number from a name.
fn serial_of(nqn: &str) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, nqn.as_bytes());
    digest.as_ref()[..10].iter().map(|byte| format!("{byte:02x}")).collect()
}

impl HostFront for NvmeFront {
    fn listen(&self, config: &DaemonConfig) -> Result<()> {
        for (index, addr) in config.nvme.iter().enumerate() {
            let tls = config.nvme_subsystem.tls.get(index).is_some_and(|tls| *tls);
            if !addr.is_local() && !tls {
                match &config.nvme_subsystem.access.hosts {
                    None => {
                        tracing::warn!(%addr, "NVMe/TCP is served beyond this machine: anyone who can connect can write")
                    }
                    Some(hosts) if hosts.values().any(Option::is_none) => tracing::warn!(
                        %addr,
                        "NVMe/TCP is served beyond this machine: hosts without a secret are identified by name alone"
                    ),
                    Some(_) => {}
                }
            }
            if tls && self.subsystems.all().iter().all(|subsystem| !subsystem.has_tls_keys()) {
                tracing::warn!(%addr, "TLS is required, but no host has a key yet: forebay nvme-subsystem allow NQN,tls-key=FILE");
            }
            let listener = bind(addr)?;
            let advertised = config.nvme_subsystem.advertise.get(index);
            let port = self.add_port(listener.local_addr(), advertised, tls)?;
            self.addrs.borrow_mut().push(listener.local_addr().clone());
            self.listeners.borrow_mut().push((listener, port));
        }
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>> {
        Box::pin(async move {
            // Set before any host can request them.
            engine.restore_ana()?;
            let (subsystems, published) = (self.subsystems.clone(), self.published.clone());
            let start_there = move |listeners| {
                let devices = PublishedDevices { published: published.clone() };
                start_server(subsystems.clone(), Box::new(devices), listeners);
            };
            let devices = EngineDevices { engine: Rc::downgrade(engine) };
            serve_on_cores(cores, self.listeners.take(), start_there, |listeners| {
                start_server(self.subsystems.clone(), Box::new(devices), listeners);
            })
            .await
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            on_each_server(cores, &SERVER, |server| async move { server.stop().await }).await;
            self.published.clear();
        })
    }

    fn addrs(&self) -> Vec<Addr> {
        self.addrs.borrow().clone()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        let offers = self.offers.borrow();
        let Some(offer) = offers.get(&spec.to_string()) else { return Vec::new() };
        let nqn = offer.subsystem.nqn();
        let uri = |addr: &Addr| match addr {
            // A wildcard address is reachable on the loopback address.
            Addr::Tcp(addr) if addr.ip().is_unspecified() => {
                Some(format!("nvme+tcp://localhost:{}/{nqn}#{}", addr.port(), offer.nsid))
            }
            Addr::Tcp(addr) => Some(format!("nvme+tcp://{addr}/{nqn}#{}", offer.nsid)),
            Addr::Unix(_) => None,
        };
        self.addrs.borrow().iter().filter_map(uri).collect()
    }

    fn connections(&self) -> usize {
        self.stats().connections().len()
    }

    /// Counts the controllers of the export's subsystem: each can use every namespace.
    fn connections_of(&self, spec: &ImageSpec) -> usize {
        self.offers.borrow().get(&spec.to_string()).map_or(0, |offer| offer.subsystem.controller_count())
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        let counts: BTreeMap<String, usize> =
            self.subsystems.all().iter().map(|each| (each.nqn().to_owned(), each.controller_count())).collect();
        let count = |offer: &Offer| counts.get(offer.subsystem.nqn()).copied().unwrap_or(0);
        self.offers.borrow().iter().map(|(name, offer)| (name.clone(), count(offer))).collect()
    }

    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let name = exported.spec.to_string();
        let nsid = exported.unit.ok_or_else(|| Failure::invalid("an export over nvme without a namespace id"))?;
        let subsystem = self.subsystem(exported.within)?;
        if let Some(owner) = subsystem.namespace(nsid).filter(|owner| owner.name != name) {
            let what = format!("namespace {nsid} of {} is {}'s already", subsystem.nqn(), owner.name);
            return Err(Failure::new(FailureKind::Exists, what));
        }
        self.published.insert(name.clone(), DeviceHandle::new(device.clone()));
        let resizing = watch_size(device, &subsystem, nsid);
        self.offers.borrow_mut().insert(name.clone(), Offer { subsystem: subsystem.clone(), nsid, resizing });
        let added = subsystem.add_namespace(Namespace {
            nsid,
            name,
            uuid: *exported.identity,
            ana_group: exported.ana_group,
            read_only: exported.read_only,
        });
        added.map_err(|error| {
            self.withdraw(exported.spec);
            Failure::invalid(error.to_string())
        })
    }

    fn replace_device(&self, spec: &ImageSpec, device: &Rc<dyn BlockDevice>) {
        let name = spec.to_string();
        let mut offers = self.offers.borrow_mut();
        let Some(offer) = offers.get_mut(&name) else { return };
        self.published.insert(name, DeviceHandle::new(device.clone()));
        if let Some(resizing) = offer.resizing.take() {
            resizing.abort();
        }
        offer.resizing = watch_size(device, &offer.subsystem, offer.nsid);
        offer.subsystem.reopen_namespace(offer.nsid);
        // It may have been resized meanwhile.
        offer.subsystem.namespace_resized(offer.nsid);
    }

    fn unpublish(&self, spec: &ImageSpec) {
        if let Some((subsystem, nsid)) = self.withdraw(spec) {
            subsystem.remove_namespace(nsid);
            self.leaving.borrow_mut().insert(spec.to_string(), (subsystem, nsid));
        }
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        let leaving = self.leaving.borrow_mut().remove(&spec.to_string());
        Box::pin(async move {
            let Some((subsystem, nsid)) = leaving else { return };
            on_each_server(cores, &SERVER, move |server| {
                let subsystem = subsystem.clone();
                async move { server.let_go(&subsystem, nsid).await }
            })
            .await;
        })
    }
}

/// Reports each new size of a device to hosts.
fn watch_size(device: &Rc<dyn BlockDevice>, subsystem: &Subsystem, nsid: u32) -> Option<JoinHandle<()>> {
    let (watch, subsystem) = (device.size_watch()?, subsystem.clone());
    Some(spawn(async move {
        loop {
            watch.changed().await;
            subsystem.namespace_resized(nsid);
        }
    }))
}

/// Devices on the engine's core: requests are not forwarded.
struct EngineDevices {
    engine: Weak<Engine>,
}

impl NamespaceDevices for EngineDevices {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        self.engine.upgrade()?.exports.device(Front::Nvme, &namespace.name)
    }
}

/// Devices on another core.
struct PublishedDevices {
    published: Published<DeviceHandle>,
}

impl NamespaceDevices for PublishedDevices {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        self.published.open(&namespace.name)
    }
}

fn bind(addr: &Addr) -> Result<Listener> {
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for NVMe/TCP on {addr}")).hint("choose another address with --nvme")
    })
}

/// Starts the server of this core.
fn start_server(subsystems: Subsystems, devices: Box<dyn NamespaceDevices>, listeners: Vec<Listening<Arc<Port>>>) {
    let server = NvmeServer::new(subsystems, devices);
    for (listener, port) in listeners {
        drop(spawn(server.clone().serve(listener, port)));
    }
    SERVER.set(Some(server));
}
