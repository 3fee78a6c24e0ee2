//! A target on a simulated network, whose volumes are vectors of bytes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BlockDevice;
use forebay_iscsi::scsi::inquiry::Identity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{Devices, Limits, Options, Server, Site, Space, UnitSpec};
use forebay_iscsi_host::client;
use forebay_load::model::worlds;
pub use forebay_load::model::{Model, until};
use forebay_reactor::{Addr, Listener, spawn};

pub const TARGET: &str = "iqn.2026-11.io.forebay:test";
pub const HOST: &str = "iqn.2026-11.io.forebay:host";
pub const OTHER: &str = "iqn.2026-11.io.forebay:other";

#[derive(Clone, Default)]
struct Shelf(Rc<RefCell<BTreeMap<String, Rc<Model>>>>);

impl Devices for Shelf {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        Some(self.0.borrow().get(&unit.spec().name)?.device())
    }
}

/// A target, and what is behind it.
#[derive(Clone)]
pub struct Place {
    pub site: Site,
    pub server: Rc<Server>,
    shelf: Shelf,
}

pub fn addr() -> Addr {
    Addr::Tcp("127.0.0.1:3260".parse().expect("an address"))
}

impl Place {
    pub fn new(limits: Limits, options: Options) -> Self {
        let site = Site::new(TARGET, limits);
        let shelf = Shelf::default();
        let server = Server::new(site.clone(), Rc::new(shelf.clone()), options);
        drop(spawn(server.clone().serve(Listener::bind(&addr()).expect("binds"))));
        Self { site, server, shelf }
    }

    pub fn add(&self, lun: u16, model: &Rc<Model>) -> Arc<Unit> {
        self.add_for(lun, model, &[])
    }

    pub fn add_for(&self, lun: u16, model: &Rc<Model>, initiators: &[&str]) -> Arc<Unit> {
        let name = format!("unit-{lun}-{}", self.shelf.0.borrow().len());
        self.shelf.0.borrow_mut().insert(name.clone(), model.clone());
        let identity = Identity { uuid: [self.shelf.0.borrow().len() as u8; 16], revision: "1".into() };
        let spec = UnitSpec {
            name,
            identity,
            read_only: false,
            rotational: false,
            space: Arc::new(Space::default()),
            initiators: initiators.iter().map(|&name| name.to_owned()).collect(),
        };
        self.site.add(lun.into(), spec).expect("in range")
    }
}

/// A host's options, by its name and the number of its session.
pub fn host(name: &str, session: u8) -> client::Options {
    let mut options = client::Options::new(TARGET, name);
    options.isid[5] = session;
    options
}

/// Runs a test in worlds of their own: in every second one every message arrives in crumbs.
pub fn simulate<F: Future<Output = ()>>(seeds: u64, test: impl Fn(u64, Place) -> F) {
    simulate_with(seeds, |_| Limits::default(), test);
}

/// The same with limits of one's own.
pub fn simulate_with<F: Future<Output = ()>>(
    seeds: u64,
    limits: impl Fn(u64) -> Limits,
    test: impl Fn(u64, Place) -> F,
) {
    worlds(seeds, |seed| test(seed, Place::new(limits(seed), Options::default())));
}
