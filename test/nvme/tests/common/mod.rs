//! A target on a simulated network, whose volumes are vectors of bytes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::reservation::{Keep, Reservations, Table};
use forebay_block::{
    BlockDevice, Buf, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Reply, Request, Result,
    SizeWatch,
};
use forebay_nvmf::session::admin::Identity;
use forebay_nvmf::{Devices, Limits, Namespace, Port, PortAddress, Server, Target};
use forebay_reactor::{Addr, Listener, random, sleep, spawn};
use forebay_sim::{Faults, World};

pub const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
pub const OTHER: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000002";
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

struct Nowhere;

impl Keep for Nowhere {
    fn save(&self, _: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

/// A volume that is a vector of bytes.
pub struct Model {
    pub bytes: RefCell<Vec<u8>>,
    pub in_flight: Rc<Cell<usize>>,
    pub flushes: Cell<u32>,
    pub durable_writes: Cell<u32>,
    /// Requests wait until this is false.
    pub held: Rc<Cell<bool>>,
    pub delays: bool,
    watch: Rc<SizeWatch>,
    reservations: Reservations,
}

impl Model {
    pub fn new(size: usize, delays: bool) -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; size]),
            in_flight: Rc::default(),
            flushes: Cell::new(0),
            durable_writes: Cell::new(0),
            held: Rc::default(),
            delays,
            watch: Rc::default(),
            reservations: Reservations::new(Table::new(), Rc::new(Nowhere)),
        })
    }

    pub fn resize(&self, size: usize) {
        self.bytes.borrow_mut().resize(size, 0);
        self.watch.announce();
    }

    fn apply(&self, request: Request) -> Result<Reply> {
        let mut bytes = self.bytes.borrow_mut();
        if let Some(extent) = request.extent()
            && extent.end() > bytes.len() as u64
        {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end"));
        }
        let at = |extent: Extent| extent.offset as usize..extent.end() as usize;
        match request {
            Request::Read(extent) => return Ok(Reply::Data(Buf::copy_of(&bytes[at(extent)]).into())),
            Request::Write { offset, data, fua } => {
                data.copy_to(&mut bytes[offset as usize..offset as usize + data.len()]);
                self.durable_writes.set(self.durable_writes.get() + u32::from(fua));
            }
            Request::Discard(extent) | Request::WriteZeroes { extent, .. } => bytes[at(extent)].fill(0),
            Request::CompareAndWrite { offset, expect, data, .. } => {
                let place = offset as usize..offset as usize + data.len();
                if !(expect == bytes[place.clone()]) {
                    return Err(Error::new(ErrorKind::Mismatch(0), "other data"));
                }
                data.copy_to(&mut bytes[place]);
            }
            Request::Flush => self.flushes.set(self.flushes.get() + 1),
        }
        Ok(Reply::Done)
    }
}

/// The model as a device; requests go on when nobody waits for them any more, as the trait wants it.
pub struct Shared(pub Rc<Model>);

impl BlockDevice for Shared {
    fn geometry(&self) -> Geometry {
        let size = self.0.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 300_000, read_only: false }
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        let model = self.0.clone();
        if !model.delays && !model.held.get() {
            return Box::pin(ready(model.apply(request)));
        }
        model.in_flight.set(model.in_flight.get() + 1);
        let task = spawn(async move {
            sleep(Duration::from_nanos(random() % 50_000)).await;
            while model.held.get() {
                sleep(Duration::from_millis(1)).await;
            }
            let result = model.apply(request);
            model.in_flight.set(model.in_flight.get() - 1);
            result
        });
        Box::pin(task)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Data);
        Box::pin(ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        Some(self.0.watch.clone())
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.0.reservations.clone())
    }
}

#[derive(Clone, Default)]
pub struct Shelf(pub Rc<RefCell<BTreeMap<u32, Rc<Model>>>>);

impl Devices for Shelf {
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        Some(Rc::new(Shared(self.0.borrow().get(&namespace.nsid)?.clone())))
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
        self.target.add_namespace(Namespace { nsid, name: format!("n{nsid}"), uuid, ana_group: 1, read_only: false });
        let (target, watch) = (self.target.clone(), model.watch.clone());
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
    for seed in 0..seeds {
        let mut faults = Faults::none();
        if seed % 2 == 1 {
            // Every message arrives in crumbs.
            faults.net.segment_max = 1 + (seed as usize * 37) % 300;
            faults.net.latency = 1..5_000;
        }
        let world = World::new(seed, faults);
        let reactor = world.reactor();
        let run = world.run(&reactor, async { test(seed, Site::new(limits.clone())).await });
        run.unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
    }
}

/// Waits for a condition.
pub async fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}
