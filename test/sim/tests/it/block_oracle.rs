//! The block oracle against a toy device: silent while the toy is sound, and sure to object to each way in which it
//! can be broken.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufList, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch,
};
use forebay_reactor::sleep;
use forebay_sim::oracle::{BLOCK, BlockOracle, CheckedDevice, Expected};
use forebay_sim::workload::{BlockLoad, verify_blocks};
use forebay_sim::{CrashKind, Faults, Rng, World};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Broken {
    Not,
    /// Flush completes and does nothing.
    FlushDropped,
    /// FUA write completes before it is durable.
    FuaIgnored,
    /// Write completes and is not done, now and then.
    WriteLost,
    /// Now and then a write lands in the next block.
    WriteMisplaced,
    /// Now and then half a block is written, and the rest only later.
    BlockTorn,
    /// Half a block of a write that was not flushed survives a crash.
    BlockTornByCrash,
    /// Write completes before it is done, now and then.
    WriteLate,
    /// Now and then a read sees what the block was before.
    ReadStale,
    /// A compare-and-write does not compare.
    NoCompare,
    /// A compare-and-write compares, and writes only later.
    CompareLate,
    /// A discard does nothing.
    NoDiscard,
    /// After a crash a write that was flushed is undone by an older one.
    OldWriteReturns,
    /// A process that is killed takes writes with it that it has acknowledged.
    LostWithProcess,
}

type Data = Rc<Vec<u8>>;

#[derive(Default)]
struct Disk {
    durable: BTreeMap<u64, Data>,
    live: BTreeMap<u64, Data>,
    before: BTreeMap<u64, Data>,
    /// States since the last flush, oldest first.
    since: Vec<(u64, Data)>,
}

impl Disk {
    fn get(&self, block: u64) -> Data {
        self.live.get(&block).cloned().unwrap_or_else(|| Rc::new(vec![0; BLOCK as usize]))
    }

    fn set(&mut self, block: u64, data: Data, durable: bool) {
        self.before.insert(block, self.get(block));
        self.live.insert(block, data.clone());
        if durable {
            self.since.retain(|(other, _)| *other != block);
            self.durable.insert(block, data);
        } else {
            self.since.push((block, data));
        }
    }
}

struct Toy {
    disk: RefCell<Disk>,
    rng: RefCell<Rng>,
    broken: Broken,
    size: u64,
}

impl Toy {
    fn breaks(&self, how: Broken) -> bool {
        self.broken == how && self.rng.borrow_mut().one_in(8)
    }

    async fn pause(&self) {
        let nanos = self.rng.borrow_mut().below(100_000);
        if nanos > 20_000 {
            sleep(Duration::from_nanos(nanos)).await;
        }
    }

    /// Lays what `change` makes of a run over the blocks, one by one, in any order.
    async fn change(self: &Rc<Self>, extent: Extent, fua: bool, change: Rc<dyn Fn(u64, &mut Vec<u8>)>) {
        let mut blocks: Vec<u64> = (extent.offset / BLOCK..extent.end().div_ceil(BLOCK)).collect();
        self.rng.borrow_mut().shuffle(&mut blocks);
        let durable = fua && self.broken != Broken::FuaIgnored;
        for block in blocks {
            self.pause().await;
            if self.breaks(Broken::WriteLost) {
                continue;
            }
            let target = if self.breaks(Broken::WriteMisplaced) { (block + 1) % (self.size / BLOCK) } else { block };
            let old = self.disk.borrow().get(target);
            let mut new = old.to_vec();
            change(block, &mut new);
            if self.breaks(Broken::BlockTorn) {
                let half = [&new[..2048], &old[2048..]].concat();
                self.disk.borrow_mut().set(target, Rc::new(half), durable);
                self.pause().await;
            }
            if self.breaks(Broken::WriteLate) {
                let this = self.clone();
                forebay_reactor::spawn(async move {
                    sleep(Duration::from_micros(200)).await;
                    this.disk.borrow_mut().set(target, Rc::new(new), durable);
                });
                continue;
            }
            self.disk.borrow_mut().set(target, Rc::new(new), durable);
        }
    }

    async fn serve(self: Rc<Self>, request: BlockRequest) -> Result<BlockReply> {
        // What a flush makes durable is what was answered before it was submitted; the toy knows no less.
        let mark = self.disk.borrow().since.clone();
        let extent = request.extent().unwrap_or(Extent::new(0, 0));
        self.pause().await;
        match request {
            BlockRequest::Read(_) => {
                let mut out = BufList::new();
                for block in extent.offset / BLOCK..extent.end().div_ceil(BLOCK) {
                    self.pause().await;
                    let disk = self.disk.borrow();
                    let stale = disk.before.get(&block).filter(|_| self.breaks(Broken::ReadStale));
                    let data = stale.cloned().unwrap_or_else(|| disk.get(block));
                    let from = extent.offset.max(block * BLOCK) - block * BLOCK;
                    let to = extent.end().min((block + 1) * BLOCK) - block * BLOCK;
                    out.push(Buf::copy_of(&data[from as usize..to as usize]));
                }
                Ok(BlockReply::Data(out))
            }
            BlockRequest::Write { offset, data, fua } => {
                self.change(extent, fua, overlay(offset, data.to_vec())).await;
                Ok(BlockReply::Done)
            }
            BlockRequest::Discard(_) if self.broken == Broken::NoDiscard => Ok(BlockReply::Done),
            BlockRequest::Discard(_) => {
                self.change(extent, false, overlay(extent.offset, vec![0; extent.len as usize])).await;
                Ok(BlockReply::Done)
            }
            BlockRequest::WriteZeroes { fua, .. } => {
                self.change(extent, fua, overlay(extent.offset, vec![0; extent.len as usize])).await;
                Ok(BlockReply::Done)
            }
            BlockRequest::CompareAndWrite { offset, expect, data, fua } => {
                // The loads compare whole blocks, one at a time.
                let block = offset / BLOCK;
                let equal = *self.disk.borrow().get(block) == expect.to_vec();
                if !equal && self.broken != Broken::NoCompare {
                    return Err(ErrorKind::Mismatch(0).into());
                }
                if self.broken == Broken::CompareLate {
                    sleep(Duration::from_micros(50)).await;
                }
                self.disk.borrow_mut().set(block, Rc::new(data.to_vec()), fua && self.broken != Broken::FuaIgnored);
                Ok(BlockReply::Done)
            }
            BlockRequest::Flush => {
                if self.broken == Broken::FlushDropped {
                    return Ok(BlockReply::Done);
                }
                let mut disk = self.disk.borrow_mut();
                for (block, data) in mark {
                    // One that a durable write has settled meanwhile is not brought back.
                    if let Some(at) = disk.since.iter().position(|(b, d)| *b == block && Rc::ptr_eq(d, &data)) {
                        disk.durable.insert(block, data);
                        let mut index = 0;
                        disk.since.retain(|(other, _)| {
                            index += 1;
                            *other != block || index > at + 1
                        });
                    }
                }
                Ok(BlockReply::Done)
            }
        }
    }

    /// Returns the device that the next life finds.
    fn crash(&self, kind: CrashKind) -> Rc<Toy> {
        let mut old = self.disk.borrow_mut();
        let mut rng = self.rng.borrow_mut().fork();
        let mut disk = Disk { durable: old.durable.clone(), ..Disk::default() };
        if kind == CrashKind::Kill && self.broken != Broken::LostWithProcess {
            disk.live = old.live.clone();
            disk.since = std::mem::take(&mut old.since);
        } else {
            for (block, data) in std::mem::take(&mut old.since) {
                if rng.coin() {
                    let mut data = data;
                    if self.broken == Broken::BlockTornByCrash {
                        let below = disk.durable.get(&block).map_or(vec![0; BLOCK as usize], |d| d.to_vec());
                        data = Rc::new([&data[..512], &below[512..]].concat());
                    }
                    disk.durable.insert(block, data);
                }
            }
            if self.broken == Broken::OldWriteReturns {
                disk.durable.extend(old.before.clone());
            }
            disk.live = disk.durable.clone();
        }
        Rc::new(Toy { disk: disk.into(), rng: rng.into(), broken: self.broken, size: self.size })
    }
}

fn overlay(offset: u64, data: Vec<u8>) -> Rc<dyn Fn(u64, &mut Vec<u8>)> {
    Rc::new(move |block, bytes| {
        let from = offset.max(block * BLOCK);
        let to = (offset + data.len() as u64).min((block + 1) * BLOCK);
        let part = &data[(from - offset) as usize..(to - offset) as usize];
        bytes[(from - block * BLOCK) as usize..(to - block * BLOCK) as usize].copy_from_slice(part);
    })
}

struct Front(Rc<Toy>);

impl BlockDevice for Front {
    fn geometry(&self) -> Geometry {
        let size = self.0.size;
        Geometry { size, block_size: 1, preferred_io: BLOCK as u32, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        Box::pin(forebay_reactor::spawn(self.0.clone().serve(request)))
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        let mut at = extent.offset;
        while at < extent.end() {
            let stop = ((at / BLOCK + 1) * BLOCK).min(extent.end());
            let data = self.0.disk.borrow().live.contains_key(&(at / BLOCK));
            map.push(at, stop - at, if data { ExtentState::Data } else { ExtentState::Hole });
            at = stop;
        }
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Three lives of a toy under load; what the oracle said.
fn run(seed: u64, broken: Broken) -> Option<String> {
    const SIZE: u64 = 64 * BLOCK;
    let mut rng = Rng::new(seed);
    let world = World::new(seed, Faults::none());
    let oracle = Rc::new(RefCell::new(BlockOracle::new(Expected::nothing())));
    let version = Rc::new(Cell::new(0));
    let mut toy = Rc::new(Toy { disk: Default::default(), rng: rng.fork().into(), broken, size: SIZE });
    for _ in 0..3 {
        let reactor = world.reactor();
        let load = BlockLoad::draw(&mut rng, SIZE);
        let stop_after = Duration::from_micros(rng.below(30_000));
        world
            .run(&reactor, async {
                let device = CheckedDevice::new(Rc::new(Front(toy.clone())), oracle.clone());
                let load = load.run(device, oracle.clone(), version.clone(), &mut rng);
                let _ = forebay_reactor::timeout(stop_after, load).await;
            })
            .expect("the toy is done");
        let kind = if rng.coin() { CrashKind::Power } else { CrashKind::Kill };
        world.crash(reactor, kind);
        oracle.borrow_mut().crash(kind);
        toy = toy.crash(kind);
        let reactor = world.reactor();
        let verified =
            world.run(&reactor, async { verify_blocks(&Front(toy.clone()), &oracle, SIZE, kind).await.map(drop) });
        verified.expect("the toy answers").expect("the toy reads");
        world.crash(reactor, CrashKind::Kill);
        if let Some(violation) = oracle.borrow().violation() {
            return Some(violation.to_owned());
        }
    }
    None
}

#[test]
fn a_sound_device_is_never_blamed() {
    for seed in 0..200 {
        assert_eq!(run(seed, Broken::Not), None, "seed {seed}");
    }
}

#[test]
fn each_broken_device_is_found_out() {
    use Broken::*;
    for broken in [
        FlushDropped,
        FuaIgnored,
        WriteLost,
        WriteMisplaced,
        BlockTorn,
        BlockTornByCrash,
        WriteLate,
        ReadStale,
        NoCompare,
        CompareLate,
        NoDiscard,
        OldWriteReturns,
        LostWithProcess,
    ] {
        let found = (0..100).filter(|&seed| run(seed, broken).is_some()).take(3).count();
        assert_eq!(found, 3, "{broken:?} was found in {found} of 100 runs only");
    }
}

/// Returns the oracle's verdict on a first block found as `found` after a crash, where its first half was written twice,
/// with ones and with twos, and never flushed.
fn said_of_half_a_block(found: impl Fn(usize) -> u8, mixed: bool) -> Option<String> {
    let mut oracle = BlockOracle::new(Expected::nothing());
    let write = |byte: u8| BlockRequest::Write { offset: 0, data: Buf::copy_of(&[byte; 2048]).into(), fua: false };
    for byte in [1, 2] {
        let token = oracle.submit(&write(byte));
        oracle.complete(token, &Ok(BlockReply::Done));
    }
    oracle.crash(CrashKind::Power);
    if mixed {
        oracle.mix();
    }
    let bytes: Vec<u8> = (0..BLOCK as usize).map(found).collect();
    oracle.recovered(0, &bytes, CrashKind::Power);
    oracle.violation().map(str::to_owned)
}

#[test]
fn a_mixed_block_holds_bytes_of_its_states_only() {
    let quarters = |parts: [u8; 4]| move |at: usize| parts[at / 1024];
    let torn = quarters([2, 1, 0, 0]);
    assert!(said_of_half_a_block(torn, false).is_some(), "a torn block is not one of its states");
    assert_eq!(said_of_half_a_block(torn, true), None, "unless it may be mixed");
    assert!(said_of_half_a_block(quarters([2, 3, 0, 0]), true).is_some(), "a byte that was never written");
    assert!(said_of_half_a_block(quarters([2, 1, 1, 0]), true).is_some(), "a byte that was written elsewhere");
}

#[test]
fn a_read_that_began_before_another_one_may_see_what_was_there_before() {
    let mut oracle = BlockOracle::new(Expected::nothing());
    let extent = Extent::new(0, BLOCK);
    let data = |byte: u8| Ok(BlockReply::Data(Buf::copy_of(&[byte; BLOCK as usize]).into()));
    let write =
        oracle.submit(&BlockRequest::Write { offset: 0, data: Buf::copy_of(&[1; BLOCK as usize]).into(), fua: false });
    let (early, late) = (oracle.submit(&BlockRequest::Read(extent)), oracle.submit(&BlockRequest::Read(extent)));
    oracle.complete(late, &data(1));
    let discard = oracle.submit(&BlockRequest::Discard(extent));
    // Not the zeroes of the discard: those from before the write.
    oracle.complete(early, &data(0));
    let read = oracle.submit(&BlockRequest::Read(extent));
    oracle.complete(read, &data(1));
    oracle.complete(write, &Ok(BlockReply::Done));
    oracle.complete(discard, &Ok(BlockReply::Done));
    assert_eq!(oracle.violation(), None);
    let read = oracle.submit(&BlockRequest::Read(extent));
    oracle.complete(read, &data(1));
    assert!(oracle.violation().is_some(), "the discard has been answered");
}
