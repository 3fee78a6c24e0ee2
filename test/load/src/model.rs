//! In-memory volume, and simulated worlds to test a target in.

use std::cell::{Cell, RefCell};
use std::future::{Future, ready};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::reservation::{Keep, ReservationTable, Reservations};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{random, sleep, spawn};
use forebay_sim::{Faults, World};

struct Nowhere;

impl Keep for Nowhere {
    fn save(&self, _: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

/// Volume in a byte vector.
pub struct Model {
    /// Contents of the volume.
    pub bytes: RefCell<Vec<u8>>,
    /// Requests in flight.
    pub in_flight: Cell<usize>,
    /// Completed flushes.
    pub flushes: Cell<u32>,
    /// Writes with FUA.
    pub durable_writes: Cell<u32>,
    /// Requests are delayed.
    delays: bool,
    held: Cell<bool>,
    released: Notify,
    watch: Rc<SizeWatch>,
    reservations: Reservations,
}

impl Model {
    /// Creates a volume of `size` zero bytes; with `delays` each request takes up to 50 us.
    pub fn new(size: usize, delays: bool) -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; size]),
            in_flight: Cell::default(),
            flushes: Cell::default(),
            durable_writes: Cell::default(),
            delays,
            held: Cell::default(),
            released: Notify::new(),
            watch: Rc::default(),
            reservations: Reservations::new(ReservationTable::new(), Rc::new(Nowhere)),
        })
    }

    /// Blocks requests from now on.
    pub fn hold(&self) {
        self.held.set(true);
    }

    /// Unblocks requests.
    pub fn release(&self) {
        self.held.set(false);
        self.released.notify_all();
    }

    /// Changes the size in bytes, and announces it.
    pub fn resize(&self, size: usize) {
        self.bytes.borrow_mut().resize(size, 0);
        self.watch.announce();
    }

    /// Returns the watch that announces size changes.
    pub fn watch(&self) -> Rc<SizeWatch> {
        self.watch.clone()
    }

    /// Returns the first byte of a 512-byte block.
    pub fn at(&self, lba: u64) -> u8 {
        self.bytes.borrow()[lba as usize * 512]
    }

    /// Returns the volume as a device.
    pub fn device(self: &Rc<Self>) -> Rc<dyn BlockDevice> {
        Rc::new(Shared(self.clone()))
    }

    fn apply(&self, request: BlockRequest) -> Result<BlockReply> {
        let mut bytes = self.bytes.borrow_mut();
        if let Some(extent) = request.extent()
            && extent.checked_end().is_none_or(|end| end > bytes.len() as u64)
        {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end"));
        }
        let at = |extent: Extent| extent.offset as usize..extent.end() as usize;
        match request {
            BlockRequest::Read(extent) => return Ok(BlockReply::Data(Buf::copy_of(&bytes[at(extent)]).into())),
            BlockRequest::Write { offset, data, fua } => {
                data.copy_to(&mut bytes[offset as usize..offset as usize + data.len()]);
                self.durable_writes.set(self.durable_writes.get() + u32::from(fua));
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => bytes[at(extent)].fill(0),
            BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
                let place = offset as usize..offset as usize + data.len();
                if !(expect == bytes[place.clone()]) {
                    return Err(Error::new(ErrorKind::Mismatch(0), "other data"));
                }
                data.copy_to(&mut bytes[place]);
            }
            BlockRequest::Flush => self.flushes.set(self.flushes.get() + 1),
        }
        Ok(BlockReply::Done)
    }
}

/// Model as a device; requests complete even if their future is dropped, as the trait requires.
struct Shared(Rc<Model>);

impl BlockDevice for Shared {
    fn geometry(&self) -> Geometry {
        let size = self.0.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 300_000, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
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

/// Runs a test in separate simulated worlds. In every second one, messages arrive in small fragments.
///
/// # Panics
/// When the test does, with the seed and the end of the trace.
pub fn worlds<F: Future<Output = ()>>(seeds: u64, test: impl Fn(u64) -> F) {
    for seed in 0..seeds {
        let mut faults = Faults::none();
        if seed % 2 == 1 {
            faults.net.segment_max = 1 + (seed as usize * 37) % 300;
            faults.net.latency = 1..5_000;
        }
        let world = World::new(seed, faults);
        let reactor = world.reactor();
        // The test is called within the world, where it can spawn.
        let run = world.run(&reactor, async { test(seed).await });
        run.unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
    }
}

/// Waits until a condition holds.
pub async fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}
