//! A target on a simulated network, whose volumes are vectors of bytes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::reservation::{Keep, Reservations, Table};
use forebay_block::{
    BlockDevice, Buf, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Reply, Request, Result,
    SizeWatch,
};
use forebay_iscsi::scsi::inquiry::Identity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{Devices, Limits, Options, Server, Site, Space, UnitSpec};
use forebay_iscsi_host::client;
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Listener, random, sleep, spawn};
use forebay_sim::{Faults, World};

pub const TARGET: &str = "iqn.2026-11.io.forebay:test";
pub const HOST: &str = "iqn.2026-11.io.forebay:host";
pub const OTHER: &str = "iqn.2026-11.io.forebay:other";

struct Nowhere;

impl Keep for Nowhere {
    fn save(&self, _: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

/// A volume that is a vector of bytes.
pub struct Model {
    pub bytes: RefCell<Vec<u8>>,
    /// Requests under way.
    pub in_flight: Cell<usize>,
    pub flushes: Cell<u32>,
    /// Requests take their time.
    pub delays: bool,
    held: Cell<bool>,
    released: Notify,
    watch: Rc<SizeWatch>,
    reservations: Reservations,
}

impl Model {
    pub fn new(size: usize, delays: bool) -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; size]),
            in_flight: Cell::default(),
            flushes: Cell::default(),
            delays,
            held: Cell::default(),
            released: Notify::new(),
            watch: Rc::default(),
            reservations: Reservations::new(Table::new(), Rc::new(Nowhere)),
        })
    }

    /// From now on requests wait.
    pub fn hold(&self) {
        self.held.set(true);
    }

    /// They go on.
    pub fn release(&self) {
        self.held.set(false);
        self.released.notify_all();
    }

    pub fn resize(&self, size: usize) {
        self.bytes.borrow_mut().resize(size, 0);
        self.watch.announce();
    }

    /// One byte of a block.
    pub fn at(&self, lba: u64) -> u8 {
        self.bytes.borrow()[lba as usize * 512]
    }

    fn apply(&self, request: Request) -> Result<Reply> {
        let mut bytes = self.bytes.borrow_mut();
        if let Some(extent) = request.extent()
            && extent.checked_end().is_none_or(|end| end > bytes.len() as u64)
        {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end"));
        }
        let at = |extent: Extent| extent.offset as usize..extent.end() as usize;
        match request {
            Request::Read(extent) => return Ok(Reply::Data(Buf::copy_of(&bytes[at(extent)]).into())),
            Request::Write { offset, data, .. } => {
                data.copy_to(&mut bytes[offset as usize..offset as usize + data.len()]);
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
struct Shared(Rc<Model>);

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
        Box::pin(spawn(async move {
            if model.delays {
                sleep(Duration::from_nanos(random() % 50_000)).await;
            }
            model.released.wait_until(|| !model.held.get()).await;
            let result = model.apply(request);
            model.in_flight.set(model.in_flight.get() - 1);
            result
        }))
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
struct Shelf(Rc<RefCell<BTreeMap<String, Rc<Model>>>>);

impl Devices for Shelf {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        Some(Rc::new(Shared(self.0.borrow().get(&unit.spec().name)?.clone())))
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
        let identity =
            Identity { uuid: [self.shelf.0.borrow().len() as u8; 16], product: "m".into(), revision: "1".into() };
        self.site.add(
            lun,
            UnitSpec {
                name,
                identity,
                read_only: false,
                rotational: false,
                space: Arc::new(Space::default()),
                initiators: initiators.iter().map(|&name| name.to_owned()).collect(),
            },
        )
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
    for seed in 0..seeds {
        let mut faults = Faults::none();
        if seed % 2 == 1 {
            faults.net.segment_max = 1 + (seed as usize * 37) % 300;
            faults.net.latency = 1..5_000;
        }
        let world = World::new(seed, faults);
        let reactor = world.reactor();
        let run = world.run(&reactor, async { test(seed, Place::new(limits(seed), Options::default())).await });
        run.unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
    }
}

/// Waits for a condition.
pub async fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}
