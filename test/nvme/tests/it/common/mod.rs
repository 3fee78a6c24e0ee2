//! A target on a simulated network, whose volumes are vectors of bytes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_load::model::worlds;
pub use forebay_load::model::{Model, until};
use forebay_nvmf::session::admin::SubsystemIdentity;
use forebay_nvmf::{HostLimits, Namespace, NamespaceDevices, NvmeServer, Port, PortAddress, Subsystem, Subsystems};
use forebay_reactor::{Addr, Listener, spawn};

pub const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
pub const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000002";
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

#[derive(Clone, Default)]
pub struct Shelf(pub Rc<RefCell<BTreeMap<u32, Rc<Model>>>>);

impl NamespaceDevices for Shelf {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        let number = namespace.name.trim_start_matches('n').parse().ok()?;
        Some(self.0.borrow().get(&number)?.device())
    }
}

/// Target under test with one port, and its server.
#[derive(Clone)]
pub struct Site {
    pub subsystems: Subsystems,
    pub subsystem: Subsystem,
    pub server: Rc<NvmeServer>,
    pub port: std::sync::Arc<Port>,
    pub shelf: Shelf,
}

pub fn addr() -> Addr {
    Addr::Unix("/run/nvme".into())
}

impl Site {
    pub fn new(limits: HostLimits) -> Self {
        let identity = SubsystemIdentity {
            nqn: NQN.into(),
            serial: "12345".into(),
            model: "Model".into(),
            firmware: "1.0".into(),
        };
        let subsystems = Subsystems::new(limits);
        let subsystem = subsystems.create(identity, 5..=60).expect("the first");
        let port = Port::new(1, vec![PortAddress::Tcp("192.0.2.7".parse().expect("an address"), 4420)]);
        subsystems.add_port(port.clone());
        let shelf = Shelf::default();
        let server = NvmeServer::new(subsystems.clone(), Box::new(shelf.clone()));
        let listener = Listener::bind(&addr()).expect("binds");
        drop(spawn(server.clone().serve(listener, port.clone())));
        Self { subsystems, subsystem, server, port, shelf }
    }

    /// Adds another subsystem, with a namespace of id 1.
    pub fn add_subsystem(&self, nqn: &str, shelf: u32, model: &Rc<Model>) -> Subsystem {
        let identity =
            SubsystemIdentity { nqn: nqn.into(), serial: nqn.into(), model: "Model".into(), firmware: "1.0".into() };
        let subsystem = self.subsystems.create(identity, 5..=60).expect("a new name");
        self.shelf.0.borrow_mut().insert(shelf, model.clone());
        let (name, uuid) = (format!("n{shelf}"), [shelf as u8 + 1; 16]);
        subsystem.add_namespace(Namespace { nsid: 1, name, uuid, ana_group: 1, read_only: false }).expect("in range");
        subsystem
    }

    pub fn add(&self, nsid: u32, model: &Rc<Model>) {
        self.shelf.0.borrow_mut().insert(nsid, model.clone());
        let uuid = [nsid as u8 + 1; 16];
        let namespace = Namespace { nsid, name: format!("n{nsid}"), uuid, ana_group: 1, read_only: false };
        self.subsystem.add_namespace(namespace).expect("in range");
        let (subsystem, watch) = (self.subsystem.clone(), model.watch());
        drop(spawn(async move {
            loop {
                watch.changed().await;
                subsystem.namespace_resized(nsid);
            }
        }));
    }
}

/// Runs a test in separate simulated worlds.
pub fn simulate<F: Future<Output = ()>>(seeds: u64, test: impl Fn(u64, Site) -> F) {
    simulate_with(seeds, &HostLimits::default(), test);
}

/// Runs a test as [`simulate`] does, with given limits.
pub fn simulate_with<F: Future<Output = ()>>(seeds: u64, limits: &HostLimits, test: impl Fn(u64, Site) -> F) {
    worlds(seeds, |seed| test(seed, Site::new(limits.clone())));
}
