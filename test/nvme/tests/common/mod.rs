//! A target on a simulated network, whose volumes are vectors of bytes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_load::model::worlds;
pub use forebay_load::model::{Model, until};
use forebay_nvmf::session::admin::Identity;
use forebay_nvmf::{Devices, Limits, Namespace, Port, PortAddress, Server, Target};
use forebay_reactor::{Addr, Listener, spawn};

pub const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
pub const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000002";
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

#[derive(Clone, Default)]
pub struct Shelf(pub Rc<RefCell<BTreeMap<u32, Rc<Model>>>>);

impl Devices for Shelf {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        Some(self.0.borrow().get(&namespace.nsid)?.device())
    }
}

/// A target with one port, and what is behind it.
#[derive(Clone)]
pub struct Site {
    pub target: Target,
    pub server: Rc<Server>,
    pub port: std::sync::Arc<Port>,
    pub shelf: Shelf,
}

pub fn addr() -> Addr {
    Addr::Unix("/run/nvme".into())
}

impl Site {
    pub fn new(limits: Limits) -> Self {
        let identity =
            Identity { nqn: NQN.into(), serial: "12345".into(), model: "Model".into(), firmware: "1.0".into() };
        let target = Target::new(identity, 5..=60, limits);
        let port = Port::new(1, vec![PortAddress::Tcp("192.0.2.7".parse().expect("an address"), 4420)]);
        target.add_port(port.clone());
        let shelf = Shelf::default();
        let server = Server::new(target.clone(), Box::new(shelf.clone()));
        let listener = Listener::bind(&addr()).expect("binds");
        drop(spawn(server.clone().serve(listener, port.clone())));
        Self { target, server, port, shelf }
    }

    pub fn add(&self, nsid: u32, model: &Rc<Model>) {
        self.shelf.0.borrow_mut().insert(nsid, model.clone());
        let uuid = [nsid as u8 + 1; 16];
        let namespace = Namespace { nsid, name: format!("n{nsid}"), uuid, ana_group: 1, read_only: false };
        self.target.add_namespace(namespace).expect("in range");
        let (target, watch) = (self.target.clone(), model.watch());
        drop(spawn(async move {
            loop {
                watch.changed().await;
                target.namespace_resized(nsid);
            }
        }));
    }
}

/// Runs a test in worlds of their own.
pub fn simulate<F: Future<Output = ()>>(seeds: u64, test: impl Fn(u64, Site) -> F) {
    simulate_with(seeds, &Limits::default(), test);
}

/// The same with limits.
pub fn simulate_with<F: Future<Output = ()>>(seeds: u64, limits: &Limits, test: impl Fn(u64, Site) -> F) {
    worlds(seeds, |seed| test(seed, Site::new(limits.clone())));
}
