//! NVMe/TCP: one subsystem, whose namespaces are the exports.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::{BlockDevice, DeviceHandle};
use forebay_nvmf::session::admin::Identity as Subsystem;
use forebay_nvmf::{Access, Devices, Namespace, Port, PortAddress, Server, Stats, Target};
use forebay_reactor::{Addr, CoreHandle, JoinHandle, Listener, SharedListener, spawn};

use super::published::Published;
use super::{Engine, Exported, HostFront, Served, on_each_core};
use crate::api::Front;
use crate::config::{Config, NvmeSubsystem};
use crate::engine::identity::{Identity, format_uuid};
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

thread_local! {
    /// This core's server.
    static SERVER: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

/// A namespace that is offered.
struct Offer {
    nsid: u32,
    /// Tells the hosts of each new size.
    resizing: Option<JoinHandle<()>>,
}

/// The NVMe/TCP front.
pub struct NvmeFront {
    target: Target,
    listeners: RefCell<Vec<(Listener, Arc<Port>)>>,
    addrs: RefCell<Vec<Addr>>,
    published: Published<DeviceHandle>,
    offers: RefCell<BTreeMap<String, Offer>>,
    /// Ids of namespaces that were taken away, and whose commands may not have ended.
    leaving: RefCell<BTreeMap<String, u32>>,
}

impl NvmeFront {
    /// The subsystem of a data directory; nothing listens yet.
    pub fn new(identity: &Identity, subsystem: &NvmeSubsystem) -> Self {
        let uuid = format_uuid(&identity.uuid);
        let nqn = subsystem.nqn.clone().unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"));
        let identity = Subsystem {
            // Those of one name are one subsystem to hosts, so they must have one serial number, too.
            serial: match &subsystem.nqn {
                None => uuid.replace('-', "")[..20].to_owned(),
                Some(nqn) => serial_of(nqn),
            },
            nqn,
            model: "Forebay".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
        };
        let target = Target::new(identity, subsystem.cntlids.clone(), subsystem.limits.clone());
        let this = Self {
            target,
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            published: Published::default(),
            offers: RefCell::default(),
            leaving: RefCell::default(),
        };
        this.admit(subsystem);
        this
    }

    /// Says who may connect from now on, and with which secrets and keys; who is connected stays.
    pub fn admit(&self, subsystem: &NvmeSubsystem) {
        // Keys first: a host that is new with a key must not be let in without it in between.
        self.target.set_tls_keys(&subsystem.tls_keys);
        self.target.set_access(subsystem.hosts.clone().map_or(Access::Anyone, Access::Listed));
    }

    /// The subsystem.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Where it is served, as the configuration says it.
    pub fn listeners(&self) -> Vec<String> {
        let told = |(addr, port): (&Addr, &Arc<Port>)| format!("{addr}{}", if port.tls { ",tls=required" } else { "" });
        self.addrs.borrow().iter().zip(&self.target.ports()).map(told).collect()
    }

    /// What the servers count.
    pub fn stats(&self) -> &Stats {
        self.target.stats()
    }

    /// Offers an export no more; returns its namespace id, if it was offered.
    fn withdraw(&self, spec: &ImageSpec) -> Option<u32> {
        let name = spec.to_string();
        let offer = self.offers.borrow_mut().remove(&name)?;
        if let Some(resizing) = offer.resizing {
            resizing.abort();
        }
        self.published.remove(&name);
        Some(offer.nsid)
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
        let id = self.target.ports().len() as u16 + 1;
        let port = if tls { Port::with_tls(id, addresses) } else { Port::new(id, addresses) };
        self.target.add_port(port.clone());
        Ok(port)
    }
}

/// 20 characters that follow from a name.
fn serial_of(nqn: &str) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, nqn.as_bytes());
    digest.as_ref()[..10].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where this machine is reached, when a socket listens everywhere.
fn own_addresses(v6: bool) -> Result<Vec<IpAddr>> {
    let found = interface_addresses().map_err(|error| Failure::io(error, "asking for this machine's addresses"))?;
    let fits = |ip: &IpAddr| v6 || ip.is_ipv4();
    let mut others: Vec<IpAddr> = found.iter().copied().filter(|ip| fits(ip) && !ip.is_loopback()).collect();
    if others.is_empty() {
        others.extend(found.into_iter().filter(fits));
    }
    Ok(others)
}

/// The addresses of the interfaces, out of the kernel's lists of local routes.
fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    let trie = std::fs::read_to_string("/proc/net/fib_trie")?;
    let mut last = None;
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<IpAddr>().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = last
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    let v6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    for line in v6.lines() {
        // Address, interface, prefix, scope: 20 is link-local, which is of no use without the interface.
        let mut fields = line.split_whitespace();
        let (address, scope) = (fields.next(), fields.nth(2));
        if let (Some(address), Some("00" | "10")) = (address, scope)
            && let Ok(bits) = u128::from_str_radix(address, 16)
        {
            found.push(IpAddr::V6(bits.into()));
        }
    }
    Ok(found)
}

impl HostFront for NvmeFront {
    fn listen(&self, config: &Config) -> Result<()> {
        for (index, addr) in config.nvme.iter().enumerate() {
            let tls = config.nvme_subsystem.tls.get(index).is_some_and(|tls| *tls);
            if !addr.is_local() && !tls {
                match &config.nvme_subsystem.hosts {
                    None => {
                        tracing::warn!(%addr, "NVMe/TCP is served beyond this machine: whoever reaches it can write")
                    }
                    Some(hosts) if hosts.values().any(Option::is_none) => tracing::warn!(
                        %addr, "NVMe/TCP is served beyond this machine: hosts without a secret are known by name alone"
                    ),
                    Some(_) => {}
                }
            }
            let listener = bind(addr)?;
            let advertised = config.nvme_subsystem.advertise.get(index);
            let port = self.add_port(listener.local_addr(), advertised, tls)?;
            self.addrs.borrow_mut().push(listener.local_addr().clone());
            self.listeners.borrow_mut().push((listener, port));
        }
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> Served<'a, Result<()>> {
        Box::pin(async move {
            // Before anybody can ask for them.
            engine.restore_ana()?;
            let listeners = self.listeners.take();
            for core in cores.iter().filter(|core| !core.is_current()) {
                let share = |(listener, port): &(Listener, Arc<Port>)| Ok((listener.share()?, port.clone()));
                let shared = listeners.iter().map(share).collect::<io::Result<Vec<_>>>();
                let shared = shared.map_err(|error| Failure::io(error, "sharing the listening sockets"))?;
                serve_on(core, self.target.clone(), self.published.clone(), shared).await?;
            }
            let devices = Local { engine: Rc::downgrade(engine) };
            serve(self.target.clone(), Box::new(devices), listeners);
            Ok(())
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> Served<'a, ()> {
        Box::pin(async move {
            on_each_core(cores, || async {
                if let Some(server) = SERVER.with_borrow(Clone::clone) {
                    server.stop().await;
                }
            })
            .await;
            self.published.clear();
        })
    }

    fn addrs(&self) -> Vec<Addr> {
        self.addrs.borrow().clone()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        let offers = self.offers.borrow();
        let Some(offer) = offers.get(&spec.to_string()) else { return Vec::new() };
        let nqn = &self.target.identity().nqn;
        let uri = |addr: &Addr| match addr {
            // Who listens everywhere is reached here, too.
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

    /// A host that is connected can use every namespace, so every controller counts.
    fn connections_of(&self, _spec: &ImageSpec) -> usize {
        self.target.controller_ids().len()
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        // Any controller may use any namespace.
        let controllers = self.target.controller_ids().len();
        self.offers.borrow().keys().map(|name| (name.clone(), controllers)).collect()
    }

    fn publish(&self, exported: &Exported<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let name = exported.spec.to_string();
        let nsid = exported.unit.ok_or_else(|| Failure::invalid("an export over nvme without a namespace id"))?;
        self.published.insert(name.clone(), DeviceHandle::new(device.clone()));
        let resizing = device.size_watch().map(|watch| {
            let target = self.target.clone();
            spawn(async move {
                loop {
                    watch.changed().await;
                    target.namespace_resized(nsid);
                }
            })
        });
        self.offers.borrow_mut().insert(name.clone(), Offer { nsid, resizing });
        let added = self.target.add_namespace(Namespace {
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

    fn unpublish(&self, spec: &ImageSpec) {
        if let Some(nsid) = self.withdraw(spec) {
            self.target.remove_namespace(nsid);
            self.leaving.borrow_mut().insert(spec.to_string(), nsid);
        }
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> Served<'a, ()> {
        let leaving = self.leaving.borrow_mut().remove(&spec.to_string());
        Box::pin(async move {
            let Some(nsid) = leaving else { return };
            on_each_core(cores, move || async move {
                if let Some(server) = SERVER.with_borrow(Clone::clone) {
                    server.let_go(nsid).await;
                }
            })
            .await;
        })
    }
}

/// The devices, on the engine's core: requests take no detour.
struct Local {
    engine: Weak<Engine>,
}

impl Devices for Local {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        self.engine.upgrade()?.exports.device(Front::Nvme, &namespace.name)
    }
}

/// The devices, on another core.
struct Remote {
    published: Published<DeviceHandle>,
}

impl Devices for Remote {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        let handle = self.published.read(|published| published.get(&namespace.name).cloned())?;
        Some(handle.attach())
    }
}

fn bind(addr: &Addr) -> Result<Listener> {
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for NVMe/TCP on {addr}")).hint("choose another address with --nvme")
    })
}

/// Starts this core's server.
fn serve(target: Target, devices: Box<dyn Devices>, listeners: Vec<(Listener, Arc<Port>)>) {
    let server = Server::new(target, devices);
    for (listener, port) in listeners {
        drop(spawn(server.clone().serve(listener, port)));
    }
    SERVER.set(Some(server));
}

/// Starts the server of another core.
async fn serve_on(
    core: &CoreHandle,
    target: Target,
    published: Published<DeviceHandle>,
    shared: Vec<(SharedListener, Arc<Port>)>,
) -> Result<()> {
    let started = core.run(move || async move {
        let attach = |(shared, port): (SharedListener, Arc<Port>)| Ok((shared.attach()?, port));
        let listeners = shared.into_iter().map(attach).collect::<io::Result<Vec<_>>>()?;
        serve(target, Box::new(Remote { published }), listeners);
        Ok(())
    });
    match started.await {
        Ok(started) => started.map_err(|error| Failure::io(error, "listening on another core")),
        Err(gone) => Err(Failure::failed(gone.to_string())),
    }
}
