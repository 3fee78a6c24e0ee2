//! Volume in memory, and logs of it on a simulated disk.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch, WriteExtent,
};
use forebay_reactor::sleep;
use forebay_reactor::sync::Notify;
use forebay_sim::{DiskFaults, Faults, World};
use forebay_writelog::format::{LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN};
use forebay_writelog::{DirtyLimits, LogId, LogOptions, LogOwner, MediumKind, Shelf, ShelfOptions, WriteLog};

pub const PATH: &str = "/logs";

/// Volume in memory that counts requests.
pub struct Memory {
    pub bytes: Rc<RefCell<Vec<u8>>>,
    pub writes: Rc<Cell<u64>>,
    /// Number of these with FUA.
    pub durable: Rc<Cell<u64>>,
    pub flushes: Rc<Cell<u64>>,
    /// Latency of a read.
    pub pause: Cell<Duration>,
    /// Gate of writes.
    pub gate: Rc<Gate>,
    /// Gate of flushes.
    pub flush_gate: Rc<Gate>,
    /// Set to fail writes with a lack of space.
    pub full: Cell<bool>,
    /// Requests in order of completion, and calls of the owner.
    pub events: Rc<RefCell<Vec<Event>>>,
    /// Unit in bytes, and number of writes coalesced in one.
    pub unit: Cell<Option<u64>>,
    pub together: Cell<usize>,
}

/// Completion at the backend, or call of the log's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Write, write-zeroes or discard, with its FUA flag.
    Change { fua: bool },
    /// Flush request.
    Flush,
    /// Release of the log by its owner.
    Release,
}

/// Gate that requests wait at while it is closed.
#[derive(Default)]
pub struct Gate {
    pub closed: Cell<bool>,
    pub waiting: Cell<usize>,
    pub opened: Notify,
    /// Error of the writes that have waited.
    pub error: Cell<Option<ErrorKind>>,
}

impl Gate {
    pub fn open(&self) {
        self.closed.set(false);
        self.opened.notify_all();
    }
}

impl Memory {
    pub fn new(size: usize) -> Rc<Self> {
        let bytes = Rc::new(RefCell::new(vec![0; size]));
        let (writes, durable, flushes) = (Rc::default(), Rc::default(), Rc::default());
        let (pause, gate, unit, together) = (Cell::default(), Rc::default(), Cell::default(), Cell::default());
        let (flush_gate, full, events) = (Rc::default(), Cell::default(), Rc::default());
        Rc::new(Self { bytes, writes, durable, flushes, pause, gate, flush_gate, full, events, unit, together })
    }
}

impl BlockDevice for Memory {
    fn geometry(&self) -> Geometry {
        let size = self.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let pause = self.pause.get();
        if let (BlockRequest::Read(extent), false) = (&request, pause.is_zero()) {
            let (bytes, range) = (self.bytes.clone(), extent.offset as usize..extent.end() as usize);
            return Box::pin(async move {
                sleep(pause).await;
                Ok(BlockReply::Data(Buf::copy_of(&bytes.borrow()[range]).into()))
            });
        }
        if request.is_write() && self.full.get() {
            return Box::pin(std::future::ready(Err(Error::from(ErrorKind::NoSpace))));
        }
        if matches!(request, BlockRequest::Flush) && self.flush_gate.closed.get() {
            let (gate, events, flushes) = (self.flush_gate.clone(), self.events.clone(), self.flushes.clone());
            return Box::pin(async move {
                gate.waiting.set(gate.waiting.get() + 1);
                gate.opened.wait_until(|| !gate.closed.get()).await;
                gate.waiting.set(gate.waiting.get() - 1);
                flushes.set(flushes.get() + 1);
                events.borrow_mut().push(Event::Flush);
                Ok(BlockReply::Done)
            });
        }
        if request.is_write() && self.gate.closed.get() {
            let (bytes, gate) = (self.bytes.clone(), self.gate.clone());
            let events = self.events.clone();
            let BlockRequest::Write { offset, data, fua } = request else { unreachable!("only writes come here") };
            return Box::pin(async move {
                gate.waiting.set(gate.waiting.get() + 1);
                gate.opened.wait_until(|| !gate.closed.get()).await;
                if let Some(kind) = gate.error.get() {
                    return Err(Error::from(kind));
                }
                bytes.borrow_mut()[offset as usize..][..data.len()].copy_from_slice(&data.to_vec());
                events.borrow_mut().push(Event::Change { fua });
                Ok(BlockReply::Done)
            });
        }
        match &request {
            BlockRequest::Read(_) => {}
            BlockRequest::Flush => self.events.borrow_mut().push(Event::Flush),
            BlockRequest::Write { fua, .. } => self.events.borrow_mut().push(Event::Change { fua: *fua }),
            _ => self.events.borrow_mut().push(Event::Change { fua: false }),
        }
        let mut bytes = self.bytes.borrow_mut();
        let range = |extent: Extent| extent.offset as usize..extent.end() as usize;
        let end = request.extent().map_or(0, Extent::end);
        let reply = match request {
            _ if end > bytes.len() as u64 => Err(Error::from(ErrorKind::OutOfRange)),
            BlockRequest::Read(extent) => Ok(BlockReply::Data(Buf::copy_of(&bytes[range(extent)]).into())),
            BlockRequest::Write { offset, data, fua } => {
                self.writes.set(self.writes.get() + 1);
                self.durable.set(self.durable.get() + u64::from(fua));
                bytes[offset as usize..][..data.len()].copy_from_slice(&data.to_vec());
                Ok(BlockReply::Done)
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => {
                self.writes.set(self.writes.get() + 1);
                bytes[range(extent)].fill(0);
                Ok(BlockReply::Done)
            }
            BlockRequest::CompareAndWrite { .. } => Err(Error::from(ErrorKind::Unsupported)),
            BlockRequest::Flush => {
                self.flushes.set(self.flushes.get() + 1);
                Ok(BlockReply::Done)
            }
        };
        Box::pin(std::future::ready(reply))
    }

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        let unit = self.unit.get().expect("only with units");
        let units: Vec<u64> = writes.iter().map(|patch| patch.offset / unit).collect();
        assert!(units.len() > 1 && units.iter().all(|&one| one == units[0]), "{units:?}");
        self.together.set(self.together.get() + units.len());
        let one = |WriteExtent { offset, data }| self.submit(BlockRequest::Write { offset, data, fua });
        let under_way: Vec<_> = writes.into_iter().map(one).collect();
        Box::pin(async move {
            for write in under_way {
                write.await?;
            }
            Ok(())
        })
    }

    fn unit(&self) -> Option<u64> {
        self.unit.get()
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Hole);
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

pub struct Nobody;

impl LogOwner for Nobody {
    fn release(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Runs a test on an empty log device in a world of its own.
pub fn on_a_shelf(test: impl AsyncFnOnce(World, Rc<Shelf>)) {
    on_a_shelf_of(false, test);
}

/// Runs a test on an empty log device; with `small`, logs may be smaller than 16 MiB.
pub fn on_a_shelf_of(small: bool, test: impl AsyncFnOnce(World, Rc<Shelf>)) {
    let world = World::new(1, Faults::none());
    world.add_disk(PATH, 64 << 20, 512);
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let options = ShelfOptions { create: true, small, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(PATH), options).await.expect("a shelf");
        test(world.clone(), shelf).await;
    });
    ran.expect("it ends");
}

/// Returns a new log in front of a volume.
pub async fn fresh(
    shelf: &Rc<Shelf>,
    inner: &Rc<Memory>,
    owner: Rc<dyn LogOwner>,
    options: LogOptions,
) -> Rc<WriteLog> {
    fresh_of(16 << 20, shelf, inner, owner, options).await
}

/// Returns a new log of `size` bytes in front of a volume.
pub async fn fresh_of(
    size: u64,
    shelf: &Rc<Shelf>,
    inner: &Rc<Memory>,
    owner: Rc<dyn LogOwner>,
    options: LogOptions,
) -> Rc<WriteLog> {
    let id = shelf.create("one", "local/a", size, 0).await.expect("room");
    let log = shelf.open_log(&id, "one", 0).await.expect("a log");
    WriteLog::new(inner.clone(), log, owner, options)
}

/// Returns options with which entries are written back only on demand.
pub fn patience() -> LogOptions {
    LogOptions { limits: DirtyLimits { age_max: Duration::from_secs(1000), bytes_max: None }, ..LogOptions::default() }
}

/// Returns a new log that writes back only on demand.
pub async fn patient(shelf: &Rc<Shelf>, inner: &Rc<Memory>) -> Rc<WriteLog> {
    fresh(shelf, inner, Rc::new(Nobody), patience()).await
}

pub async fn open(shelf: &Rc<Shelf>, id: &LogId, volume: &str, inner: Rc<Memory>) -> Rc<WriteLog> {
    let log = shelf.open_log(id, volume, 0).await.expect("a log");
    WriteLog::new(inner, log, Rc::new(Nobody), patience())
}

pub fn write(offset: u64, byte: u8, len: usize) -> BlockRequest {
    // Content without a pattern that the log would shorten.
    let data: Vec<u8> = (0..len).map(|at| byte ^ (at / 512) as u8).collect();
    BlockRequest::Write { offset, data: Buf::copy_of(&data).into(), fua: false }
}

pub async fn read(device: &dyn BlockDevice, offset: u64, len: u64) -> Vec<u8> {
    device.submit(BlockRequest::Read(Extent::new(offset, len))).await.expect("read").into_data().to_vec()
}

/// Size in bytes of a log that is soon full.
pub const SMALL: u64 = 256 << 10;
pub const UNIT: u64 = 512;
pub const MILLISECOND: Duration = Duration::from_millis(1);
/// Timeout longer than any operation that ends at all.
pub const LONG: Duration = Duration::from_secs(600);

/// Returns the superblocks on the disk, the newest first.
pub fn superblocks(world: &World) -> Vec<LogSuperblock> {
    let decode = |copy| LogSuperblock::decode(&world.peek(PATH, LOGS_AT + copy, SUPER_LEN).expect("on the disk"));
    let mut found: Vec<LogSuperblock> = SUPER_COPIES.into_iter().filter_map(|copy| decode(copy).ok()).collect();
    found.sort_by_key(|superblock| std::cmp::Reverse(superblock.serial));
    found
}

pub fn slow_writes(millis: u64) -> Option<DiskFaults> {
    let nanos = millis * 1_000_000;
    Some(DiskFaults { write_latency: nanos..nanos + 1, ..DiskFaults::none() })
}

/// Returns options without a payload cache.
pub fn forgetful() -> LogOptions {
    LogOptions { recent_bytes: 0, ..patience() }
}
