//! A target on a simulated network, whose volumes are vectors of bytes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BlockDevice;
use forebay_iscsi::scsi::inquiry::UnitIdentity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{
    AccessControl, IscsiServer, IscsiServerOptions, PoolSpace, Target, TargetLimits, TargetSpec, Targets, UnitDevices,
    UnitSpec,
};
use forebay_iscsi_host::client;
use forebay_load::model::worlds;
pub use forebay_load::model::{Model, until};
use forebay_reactor::{Addr, Listener, spawn};

pub const TARGET: &str = "iqn.2026-11.io.forebay:test";
pub const HOST: &str = "iqn.2026-11.io.forebay:host";
pub const OTHER: &str = "iqn.2026-11.io.forebay:other";

#[derive(Clone, Default)]
struct Shelf(Rc<RefCell<BTreeMap<String, Rc<Model>>>>);

impl UnitDevices for Shelf {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        Some(self.0.borrow().get(&unit.spec().name)?.device())
    }
}

/// Target under test, with its server.
#[derive(Clone)]
pub struct Place {
    pub targets: Targets,
    pub target: Target,
    pub server: Rc<IscsiServer>,
    shelf: Shelf,
}

pub fn addr() -> Addr {
    Addr::Tcp("127.0.0.1:3260".parse().expect("an address"))
}

impl Place {
    pub fn new(limits: TargetLimits, options: IscsiServerOptions) -> Self {
        let targets = Targets::new(limits);
        let target = targets.create(spec(TARGET, &[])).expect("the first");
        let shelf = Shelf::default();
        let server = IscsiServer::new(targets.clone(), Rc::new(shelf.clone()), options);
        drop(spawn(server.clone().serve(Listener::bind(&addr()).expect("binds"))));
        Self { targets, target, server, shelf }
    }

    pub fn add(&self, lun: u16, model: &Rc<Model>) -> Arc<Unit> {
        self.add_for(lun, model, &[])
    }

    pub fn add_for(&self, lun: u16, model: &Rc<Model>, initiators: &[&str]) -> Arc<Unit> {
        self.add_to(&self.target, lun, model, initiators)
    }

    pub fn add_to(&self, target: &Target, lun: u16, model: &Rc<Model>, initiators: &[&str]) -> Arc<Unit> {
        let spec = self.unit(lun, model, initiators);
        target.add(lun.into(), spec).expect("in range, and a volume of its own")
    }

    /// Builds the configuration of a unit for a model volume.
    pub fn unit(&self, lun: u16, model: &Rc<Model>, initiators: &[&str]) -> UnitSpec {
        let name = format!("unit-{lun}-{}", self.shelf.0.borrow().len());
        self.shelf.0.borrow_mut().insert(name.clone(), model.clone());
        let identity = UnitIdentity { uuid: [self.shelf.0.borrow().len() as u8; 16], revision: "1".into() };
        UnitSpec {
            name,
            identity,
            read_only: false,
            rotational: false,
            space: Arc::new(PoolSpace::default()),
            initiators: initiators.iter().map(|&name| name.to_owned()).collect(),
        }
    }
}

/// Builds the configuration of a target, for some initiators or for all.
pub fn spec(name: &str, initiators: &[&str]) -> TargetSpec {
    let initiators = initiators.iter().map(|&name| name.to_owned()).collect();
    TargetSpec { name: name.into(), access: AccessControl { initiators, chap: None }, port_groups: None }
}

/// Returns the login options of a host, by its name and session number.
pub fn host(name: &str, session: u8) -> client::Options {
    let mut options = client::Options::new(TARGET, name);
    options.isid[5] = session;
    options
}

/// Runs a test in separate simulated worlds. In every second one, messages arrive in small fragments.
pub fn simulate<F: Future<Output = ()>>(seeds: u64, test: impl Fn(u64, Place) -> F) {
    simulate_with(seeds, |_| TargetLimits::default(), test);
}

/// Runs a test as [`simulate`] does, with given limits.
pub fn simulate_with<F: Future<Output = ()>>(
    seeds: u64,
    limits: impl Fn(u64) -> TargetLimits,
    test: impl Fn(u64, Place) -> F,
) {
    worlds(seeds, |seed| test(seed, Place::new(limits(seed), IscsiServerOptions::default())));
}
