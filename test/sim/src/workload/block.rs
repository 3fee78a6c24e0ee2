use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, Result};
use forebay_reactor::{sleep, spawn};

use super::{Odds, Seen};
use crate::oracle::{BLOCK, BlockOracle, CheckedDevice};
use crate::rng::Rng;
use crate::stamp::stamp;
use crate::world::CrashKind;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Write,
    LongWrite,
    OddWrite,
    Read,
    Discard,
    Zeroes,
    Compare,
    Flush,
    Stream,
}

/// A load on a block device.
#[derive(Debug, Clone)]
pub struct BlockLoad {
    /// Bytes at the start of the device that the load touches.
    pub span: u64,
    /// Tasks at once, each with one request in flight.
    pub tasks: usize,
    /// Requests of all tasks together.
    pub requests: usize,
    /// Longest request in blocks of 4 KiB.
    pub blocks_max: u64,
    /// Long writes, each where the one before ended, beside the others.
    pub stream: Option<Stream>,
    /// Counts of results.
    pub seen: Rc<Seen>,
}

/// Long sequential writes, as of a copy.
#[derive(Debug, Clone)]
pub struct Stream {
    /// Shortest of them, in bytes; the longest has four times as many.
    pub least: u64,
    /// Offset of the next write.
    pub next: Rc<Cell<u64>>,
}

/// Requests that fail one after the other before a task gives up: the device is gone for good.
const FAILURES_MAX: usize = 8;

impl BlockLoad {
    /// A small one by chance, on a device of `size` bytes.
    pub fn draw(rng: &mut Rng, size: u64) -> Self {
        let blocks = (1 << rng.below(9)).min(size / BLOCK).max(1);
        // What many requests at once may do to one block takes the oracle long to work out, so a load is either
        // wide or deep.
        let blocks_max = *rng.pick(&[1, 4, 16, 40]);
        let tasks = match blocks / blocks_max {
            0..4 => *rng.pick(&[1, 2, 3]),
            4..16 => *rng.pick(&[1, 2, 4]),
            _ => *rng.pick(&[1, 2, 4, 8]),
        };
        Self {
            span: blocks * BLOCK,
            tasks,
            requests: rng.range(20..200) as usize,
            blocks_max,
            stream: None,
            seen: Rc::default(),
        }
    }

    /// Runs it on `device`, which the oracle watches, until it is done, the oracle objects, or the device is gone.
    /// `version` gives every write its number and must go on from one load to the next on the same device.
    pub async fn run(
        &self,
        device: Rc<CheckedDevice>,
        oracle: Rc<RefCell<BlockOracle>>,
        version: Rc<Cell<u64>>,
        rng: &mut Rng,
    ) {
        self.run_on(device, oracle, version, rng).await;
    }

    /// The same on a device whose oracle is updated by another task.
    pub async fn run_on(
        &self,
        device: Rc<dyn BlockDevice>,
        oracle: Rc<RefCell<BlockOracle>>,
        version: Rc<Cell<u64>>,
        rng: &mut Rng,
    ) {
        let usual = [
            (Kind::Write, 30),
            (Kind::LongWrite, 8),
            (Kind::OddWrite, 6),
            (Kind::Read, 20),
            (Kind::Discard, 4),
            (Kind::Zeroes, 4),
            (Kind::Compare, 4),
            (Kind::Flush, 6),
            (Kind::Stream, 40),
        ];
        let odds = Odds::draw(rng, &usual[..usual.len() - usize::from(self.stream.is_none())]);
        let fua_ppm = *rng.pick(&[0, 0, 50_000, 300_000]);
        let pauses = rng.one_in(4);
        let left = Rc::new(Cell::new(self.requests));
        let tasks: Vec<_> = (0..self.tasks)
            .map(|_| {
                let (load, device, oracle, odds) = (self.clone(), device.clone(), oracle.clone(), odds.clone());
                let (version, left, mut rng) = (version.clone(), left.clone(), rng.fork());
                spawn(async move {
                    let mut failures = 0;
                    while left.get() > 0 && failures < FAILURES_MAX && oracle.borrow().violation().is_none() {
                        left.set(left.get() - 1);
                        let request = load.request(&odds, fua_ppm, &oracle, &version, &mut rng);
                        // A device that shrinks refuses what is past its end by right.
                        let failed =
                            |error: &Error| !matches!(error.kind(), ErrorKind::Mismatch(_) | ErrorKind::OutOfRange);
                        let result = device.submit(request).await;
                        load.seen.note(&result);
                        match result {
                            Err(error) if failed(&error) => failures += 1,
                            _ => failures = 0,
                        }
                        if pauses && rng.one_in(8) {
                            sleep(Duration::from_micros(rng.below(20_000))).await;
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }

    fn request(
        &self,
        odds: &Odds<Kind>,
        fua_ppm: u32,
        oracle: &RefCell<BlockOracle>,
        version: &Cell<u64>,
        rng: &mut Rng,
    ) -> BlockRequest {
        let oracle = oracle.borrow();
        if oracle.is_crowded() && rng.coin() {
            return BlockRequest::Flush;
        }
        let fua = rng.ppm(fua_ppm);
        let next = || {
            version.set(version.get() + 1);
            version.get()
        };
        let blocks = self.span / BLOCK;
        let first = rng.below(blocks);
        let long = |rng: &mut Rng| rng.range(1..self.blocks_max.min(blocks - first) + 1) * BLOCK;
        let mut kind = odds.pick(rng);
        if matches!(kind, Kind::OddWrite) && oracle.is_crowded() {
            // Each part of a block that is written by itself doubles what the block may hold.
            kind = Kind::Write;
        }
        let odd = |rng: &mut Rng| {
            let unit = *rng.pick(&[1, 512, 512]);
            let offset = rng.below(self.span / unit) * unit;
            let len = (rng.below(2 * BLOCK / unit) + 1) * unit;
            Extent::new(offset, len.min(self.span - offset))
        };
        let aligned_or_odd = |rng: &mut Rng| {
            if rng.one_in(4) && !oracle.is_crowded() { odd(rng) } else { Extent::new(first * BLOCK, long(rng)) }
        };
        match kind {
            Kind::Write | Kind::LongWrite => {
                let len = if matches!(kind, Kind::Write) { BLOCK } else { long(rng) };
                BlockRequest::Write {
                    offset: first * BLOCK,
                    data: stamp(first * BLOCK, len as usize, next()).into(),
                    fua,
                }
            }
            Kind::OddWrite => {
                let extent = odd(rng);
                let data = stamp(extent.offset, extent.len as usize, next()).into();
                BlockRequest::Write { offset: extent.offset, data, fua }
            }
            Kind::Read => BlockRequest::Read(if rng.coin() { odd(rng) } else { Extent::new(first * BLOCK, long(rng)) }),
            Kind::Discard => BlockRequest::Discard(aligned_or_odd(rng)),
            Kind::Zeroes => BlockRequest::WriteZeroes { extent: aligned_or_odd(rng), no_unmap: rng.coin(), fua },
            Kind::Compare => {
                // What some state holds, so that it succeeds now and then.
                let offset = first * BLOCK;
                let expect = oracle.guess(first).unwrap_or_else(|| vec![0; BLOCK as usize]);
                let expect = forebay_reactor::Buf::copy_of(&expect).into();
                BlockRequest::CompareAndWrite {
                    offset,
                    expect,
                    data: stamp(offset, BLOCK as usize, next()).into(),
                    fua,
                }
            }
            Kind::Flush => BlockRequest::Flush,
            Kind::Stream => {
                let Some(Stream { least, next: at }) = &self.stream else { return BlockRequest::Flush };
                let begin = if at.get() + least > self.span { 0 } else { at.get() };
                let len = (least + rng.below(3 * least / BLOCK + 1) * BLOCK).min(self.span - begin);
                at.set(begin + len);
                BlockRequest::Write { offset: begin, data: stamp(begin, len as usize, next()).into(), fua }
            }
        }
    }
}

/// Reads `span` bytes of a device after a crash and tells the oracle what is there.  A block that is said to be
/// corrupt is skipped: whether that is allowed is for the caller to say, who gets their number.  What a last block
/// has past `span` counts as zeroes.
pub async fn verify_blocks(
    device: &dyn BlockDevice,
    oracle: &RefCell<BlockOracle>,
    span: u64,
    kind: CrashKind,
) -> Result<usize> {
    const STEP: u64 = 16 * BLOCK;
    let mut corrupt = 0;
    let mut offset = 0;
    while offset < span {
        let len = STEP.min(span - offset);
        let reply = device.submit(BlockRequest::Read(Extent::new(offset, len))).await;
        match reply.map(BlockReply::into_data) {
            Ok(data) => {
                let mut bytes = data.to_vec();
                bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
                let mut oracle = oracle.borrow_mut();
                for (number, block) in (offset / BLOCK..).zip(bytes.chunks(BLOCK as usize)) {
                    oracle.recovered(number, block, kind);
                }
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                for number in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
                    let extent = Extent::new(number * BLOCK, BLOCK.min(span - number * BLOCK));
                    match device.submit(BlockRequest::Read(extent)).await.map(BlockReply::into_data) {
                        Ok(data) => {
                            let mut bytes = data.to_vec();
                            bytes.resize(BLOCK as usize, 0);
                            oracle.borrow_mut().recovered(number, &bytes, kind);
                        }
                        Err(error) if error.kind() == ErrorKind::Corrupt => corrupt += 1,
                        Err(error) => return Err(error),
                    }
                }
            }
            Err(error) => return Err(error),
        }
        offset += len;
    }
    let map = device.map(Extent::new(0, span)).await?;
    oracle.borrow_mut().check_map(&map);
    Ok(corrupt)
}
