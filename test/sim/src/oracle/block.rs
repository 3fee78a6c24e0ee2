//! Oracle for block devices.
//!
//! For every 4 KiB block it keeps three sets of contents: what a read may return now (`live`), what may be there after
//! the process was killed (`killed`: what a read has seen of a request in flight may be gone again then) and what may be
//! there after a power failure (`crash`).  Each state carries a mask of the requests in flight that it includes.  A
//! request that is submitted may take effect on a block at any time until it completes; once it has completed every live
//! state includes it, and every state after a kill; once it is durable - by FUA, or by a flush that was submitted after
//! its completion - every crash state does.  Blocks are independent: a request may have reached some of its blocks and
//! not others.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};

use super::Expected;
use super::content::{BLOCK, Content};
use super::size::Sizes;
use crate::stamp;
use crate::world::CrashKind;

/// States of one block that count as too many to follow; workloads flush before it comes to that.
const STATES_MAX: usize = 20_000;
/// States of one block from which on a workload should flush.
const STATES_CROWDED: usize = 24;

#[derive(Clone)]
struct Possible {
    content: Content,
    /// Requests in flight, by slot, that this state includes.
    mask: u64,
}

impl Possible {
    fn key(&self) -> (u64, u64) {
        (self.content.hash(), self.mask)
    }
}

#[derive(Clone, Default)]
struct States(Vec<Possible>);

impl States {
    fn only(content: Content) -> Self {
        Self(vec![Possible { content, mask: 0 }])
    }

    /// Adds every state that applying requests in flight can lead to.
    fn close(&mut self, block: u64, in_flight: &[InFlight]) {
        let mut known: HashSet<(u64, u64)> = self.0.iter().map(Possible::key).collect();
        let mut index = 0;
        while index < self.0.len() {
            for flight in in_flight {
                let state = &self.0[index];
                if state.mask >> flight.slot & 1 == 1 {
                    continue;
                }
                let content = match &flight.whole {
                    Some(whole) => Some(whole.clone()),
                    None => flight.change.apply(block, &state.content),
                };
                if let Some(content) = content {
                    let possible = Possible { content, mask: state.mask | 1 << flight.slot };
                    if known.insert(possible.key()) {
                        self.0.push(possible);
                    }
                }
            }
            index += 1;
            assert!(self.0.len() < STATES_MAX, "block {block}: too many states to follow; flush more often");
        }
    }

    /// The request in `slot` has been answered: done, not done, or unknown.
    fn settle(&mut self, slot: u32, done: Option<bool>) {
        if let Some(done) = done {
            self.0.retain(|state| (state.mask >> slot & 1 == 1) == done);
        }
        self.clear_masks(1 << slot);
    }

    fn clear_masks(&mut self, bits: u64) {
        let mut known = HashSet::with_capacity(self.0.len());
        self.0.retain_mut(|state| {
            state.mask &= !bits;
            known.insert(state.key())
        });
    }

    fn contents(&self) -> impl Iterator<Item = &Content> {
        self.0.iter().map(|state| &state.content)
    }
}

/// A change that has not been answered.
struct InFlight {
    slot: u32,
    change: Rc<Change>,
    /// Content of the block after it, when that does not depend on the content before.
    whole: Option<Content>,
}

/// Change that a request makes to the blocks it touches.
enum Change {
    Write { offset: u64, data: BufList },
    Zero(Extent),
    Compare { offset: u64, expect: BufList, data: BufList },
}

impl Change {
    fn of(request: &BlockRequest) -> Option<Self> {
        match request {
            BlockRequest::Write { offset, data, .. } => Some(Change::Write { offset: *offset, data: data.clone() }),
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => Some(Change::Zero(*extent)),
            BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
                Some(Change::Compare { offset: *offset, expect: expect.clone(), data: data.clone() })
            }
            BlockRequest::Read(_) | BlockRequest::Flush => None,
        }
    }

    /// Returns the content of a block after it, if it replaces the whole.
    fn whole(&self, block: u64) -> Option<Content> {
        let extent = match self {
            Change::Write { offset, data } => Extent::new(*offset, data.len() as u64),
            Change::Zero(extent) => *extent,
            Change::Compare { .. } => return None,
        };
        (within(block, extent) == (0, BLOCK as usize)).then(|| self.apply(block, &Content::ZERO)).flatten()
    }

    fn apply(&self, block: u64, content: &Content) -> Option<Content> {
        match self {
            Change::Write { offset, data } => {
                let (at, part) = part(block, *offset, data);
                Some(content.overlaid(at, &part))
            }
            Change::Zero(extent) => {
                let (from, to) = within(block, *extent);
                Some(content.zeroed(from, to - from))
            }
            Change::Compare { offset, expect, data } => {
                let (at, expected) = part(block, *offset, expect);
                content.has(at, &expected).then(|| content.overlaid(at, &part(block, *offset, data).1))
            }
        }
    }
}

/// The bytes of `extent` that lie in `block`, counted from the block's start.
fn within(block: u64, extent: Extent) -> (usize, usize) {
    let from = extent.offset.max(block * BLOCK) - block * BLOCK;
    let to = extent.end().min((block + 1) * BLOCK) - block * BLOCK;
    (from as usize, to as usize)
}

/// The part of `data`, which is at `offset`, that lies in `block`, and where in it.
fn part(block: u64, offset: u64, data: &BufList) -> (usize, Vec<u8>) {
    let (from, to) = within(block, Extent::new(offset, data.len() as u64));
    let start = (block * BLOCK + from as u64 - offset) as usize;
    (from, data.slice(start..start + to - from).to_vec())
}

fn blocks_of(extent: Extent) -> std::ops::Range<u64> {
    extent.offset / BLOCK..extent.end().div_ceil(BLOCK)
}

struct Block {
    live: States,
    killed: States,
    crash: States,
    in_flight: Vec<InFlight>,
    /// Its bytes may be of different crash states.
    mixed: bool,
}

impl Block {
    fn new() -> Self {
        let zeroes = || States::only(Content::ZERO);
        Self { live: zeroes(), killed: zeroes(), crash: zeroes(), in_flight: Vec::new(), mixed: false }
    }
}

/// Contents that a read (or a comparison) may have seen of a block.
struct Window {
    seen: Vec<Content>,
    /// Set when something completed meanwhile, so that the live content need not have been live when it was read.
    settled: bool,
}

enum Open {
    Read {
        extent: Extent,
        windows: BTreeMap<u64, Window>,
    },
    /// The slot in each block, and what a comparison may have seen.
    Change {
        change: Rc<Change>,
        extent: Extent,
        durable: bool,
        slots: BTreeMap<u64, u32>,
        windows: BTreeMap<u64, Window>,
    },
    /// The crash states of blocks that changed since it was submitted, if it succeeds.
    Flush {
        blocks: BTreeMap<u64, States>,
    },
}

/// Names a request that the oracle was told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token(u64);

/// Oracle of the contents that each block of a device may have.
pub struct BlockOracle {
    blocks: BTreeMap<u64, Block>,
    open: BTreeMap<Token, Open>,
    next: u64,
    sizes: Sizes,
    expected: Expected,
    violation: Option<String>,
}

impl BlockOracle {
    /// Creates an oracle for a device that durably reads as zeroes everywhere.
    pub fn new(expected: Expected) -> Self {
        let sizes = Sizes::unbounded();
        Self { blocks: BTreeMap::new(), open: BTreeMap::new(), next: 0, sizes, expected, violation: None }
    }

    /// From now on the device has from `least` to `most` bytes: what reaches past the least may be refused, and what
    /// reaches past the most must be.  Without this nothing is past the end.
    pub fn set_size(&mut self, least: u64, most: u64) {
        self.sizes.set(least, most);
    }

    /// Notes that the device is being removed: from now on requests may fail with `NotFound`.
    pub fn set_ending(&mut self) {
        self.sizes.end();
    }

    /// The bytes of `extent` are being cut off: they read as zeroes once that is done, whatever was written there
    /// before or meanwhile.
    pub fn cut_begins(&mut self, extent: Extent) -> Token {
        self.submit(&BlockRequest::WriteZeroes { extent, no_unmap: false, fua: true })
    }

    /// The cut is done, durably; or it failed, with any part of it done.
    pub fn cut_ends(&mut self, token: Token, extent: Extent, result: &Result<()>) {
        let answer = result.as_ref().map(|()| BlockReply::Done).map_err(|error| Error::from(error.kind()));
        self.complete(token, &answer);
        if result.is_ok() {
            self.cut(extent);
        }
    }

    /// The bytes of `extent` are known to be cut off for good; only what is in flight can write there again.
    pub fn cut(&mut self, extent: Extent) {
        let numbers: Vec<u64> = self.blocks.range(blocks_of(extent)).map(|(&number, _)| number).collect();
        for number in numbers {
            self.touch(number);
            let Self { blocks, open, .. } = self;
            let Some(block) = blocks.get_mut(&number) else { continue };
            let (from, to) = within(number, extent);
            let flushes = open.values_mut().filter_map(|open| match open {
                Open::Flush { blocks } => blocks.get_mut(&number),
                _ => None,
            });
            for states in [&mut block.live, &mut block.killed, &mut block.crash].into_iter().chain(flushes) {
                states.0.iter_mut().for_each(|state| state.content = state.content.zeroed(from, to - from));
                states.clear_masks(0);
                states.close(number, &block.in_flight);
            }
        }
    }

    /// Changes what the environment may cause.
    pub fn expect(&mut self, expected: Expected) {
        self.expected = expected;
    }

    /// Returns the first violation.
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Returns whether some block has so many possible states that the workload should flush and write whole blocks;
    /// those that a flush in flight has begun with count, too: it may take long, while others that are shorter end.
    pub fn is_crowded(&self) -> bool {
        let of_flushes = self.open.values().flat_map(|open| match open {
            Open::Flush { blocks } => Some(blocks.values()),
            _ => None,
        });
        let mut states = self.blocks.values().map(|block| &block.crash).chain(of_flushes.flatten());
        states.any(|states| states.0.len() > STATES_CROWDED)
    }

    /// Returns one of the possible contents of a block; `None` when it was never touched.
    pub fn guess(&self, number: u64) -> Option<Vec<u8>> {
        self.blocks.get(&number)?.live.contents().last().map(Content::to_vec)
    }

    fn violated(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(text());
        }
    }

    /// Prepares a block for an event: flushes in progress remember what it was when they were submitted.
    fn touch(&mut self, number: u64) {
        let block = self.blocks.entry(number).or_insert_with(Block::new);
        for open in self.open.values_mut() {
            if let Open::Flush { blocks } = open {
                blocks.entry(number).or_insert_with(|| block.live.clone());
            }
        }
    }

    /// Notes that a request is submitted.
    pub fn submit(&mut self, request: &BlockRequest) -> Token {
        let token = Token(self.next);
        self.next += 1;
        self.sizes.open(token.0);
        let open = match (request, Change::of(request)) {
            (BlockRequest::Flush, _) => Open::Flush { blocks: BTreeMap::new() },
            (_, Some(change)) => {
                let extent = request.extent().unwrap_or(Extent::new(0, 0));
                let durable = matches!(
                    request,
                    BlockRequest::Write { fua: true, .. }
                        | BlockRequest::WriteZeroes { fua: true, .. }
                        | BlockRequest::CompareAndWrite { fua: true, .. }
                );
                let change = Rc::new(change);
                let slots = blocks_of(extent).map(|block| (block, self.begin(block, &change))).collect();
                let windows =
                    if matches!(*change, Change::Compare { .. }) { self.windows(extent) } else { BTreeMap::new() };
                Open::Change { change, extent, durable, slots, windows }
            }
            _ => {
                let extent = request.extent().unwrap_or(Extent::new(0, 0));
                Open::Read { extent, windows: self.windows(extent) }
            }
        };
        self.open.insert(token, open);
        token
    }

    fn windows(&mut self, extent: Extent) -> BTreeMap<u64, Window> {
        let window = |number| {
            let block = self.blocks.entry(number).or_insert_with(Block::new);
            let mut window = Window { seen: Vec::new(), settled: false };
            window.see(&block.live);
            (number, window)
        };
        blocks_of(extent).map(window).collect()
    }

    /// A change begins on one block.
    fn begin(&mut self, number: u64, change: &Rc<Change>) -> u32 {
        self.touch(number);
        let Self { blocks, open, .. } = self;
        let block = blocks.entry(number).or_insert_with(Block::new);
        let used = block.in_flight.iter().fold(0_u64, |used, flight| used | 1 << flight.slot);
        let slot = used.trailing_ones();
        assert!(slot < 64, "more than 64 requests at once on block {number}");
        block.in_flight.push(InFlight { slot, change: change.clone(), whole: change.whole(number) });
        block.live.close(number, &block.in_flight);
        block.killed.close(number, &block.in_flight);
        block.crash.close(number, &block.in_flight);
        for open in open.values_mut() {
            match open {
                Open::Flush { blocks } => {
                    if let Some(states) = blocks.get_mut(&number) {
                        states.close(number, &block.in_flight);
                    }
                }
                Open::Read { windows, .. } | Open::Change { windows, .. } => {
                    if let Some(window) = windows.get_mut(&number) {
                        window.see(&block.live);
                    }
                }
            }
        }
        slot
    }

    /// A change ends on one block.
    fn end(&mut self, number: u64, slot: u32, done: Option<bool>, durable: bool) {
        self.touch(number);
        let Self { blocks, open, .. } = self;
        let block = blocks.entry(number).or_insert_with(Block::new);
        block.in_flight.retain(|flight| flight.slot != slot);
        block.live.settle(slot, done);
        block.killed.settle(slot, done);
        // A change that is known not to have happened will not be there after a crash either.
        let after_crash = if durable || done == Some(false) { done } else { None };
        block.crash.settle(slot, after_crash);
        for open in open.values_mut() {
            if let Open::Flush { blocks } = open
                && let Some(states) = blocks.get_mut(&number)
            {
                states.settle(slot, after_crash);
            }
        }
        if block.live.0.is_empty() {
            block.live = block.crash.clone();
            block.killed = block.crash.clone();
            self.violated(|| format!("block {number}: a compare-and-write succeeded that cannot have"));
        }
        self.settle_windows(number);
    }

    /// Notes that the states of a block have become fewer since requests began that are open: such a request may see what was
    /// there before.
    fn settle_windows(&mut self, number: u64) {
        for open in self.open.values_mut() {
            if let Open::Read { windows, .. } | Open::Change { windows, .. } = open
                && let Some(window) = windows.get_mut(&number)
            {
                window.settled = true;
            }
        }
    }

    /// Notes that a request has completed.
    pub fn complete(&mut self, token: Token, result: &Result<BlockReply>) {
        let Some(open) = self.open.remove(&token) else { return };
        let kind = result.as_ref().err().map(forebay_block::Error::kind);
        let extent = match &open {
            Open::Read { extent, .. } | Open::Change { extent, .. } => Some(*extent),
            Open::Flush { .. } => None,
        };
        let refused = match self.sizes.close(token.0, extent, result) {
            Ok(refused) => refused,
            Err(text) => return self.violated(|| text),
        };
        let allowed = refused || kind.is_none_or(|kind| self.expected.allows(kind));
        match open {
            Open::Read { extent, windows } => match result {
                Ok(reply) => {
                    let BlockReply::Data(data) = reply else {
                        return self.violated(|| format!("a read of {extent:?} was answered without data"));
                    };
                    if data.len() as u64 != extent.len {
                        let len = data.len();
                        return self.violated(|| format!("a read of {extent:?} was answered with {len} bytes"));
                    }
                    for (number, window) in windows {
                        self.check_read(number, extent.offset, data, &window);
                    }
                }
                Err(error) if !allowed => self.violated(|| format!("a read of {extent:?} failed: {error:?}")),
                Err(_) => {}
            },
            Open::Change { change, extent, durable, slots, windows } => {
                let (done, text) = match (result, &*change) {
                    (Ok(_), _) => (Some(true), None),
                    // Looked at before anything is done.
                    (Err(_), _) if refused => (Some(false), None),
                    (Err(error), Change::Compare { offset, expect, .. })
                        if matches!(error.kind(), ErrorKind::Mismatch(_)) =>
                    {
                        let equal = windows.iter().all(|(number, window)| {
                            let (at, expected) = part(*number, *offset, expect);
                            window.seen.iter().all(|content| content.has(at, &expected))
                        });
                        (Some(false), equal.then(|| format!("a compare of equal data at {extent:?} said {error:?}")))
                    }
                    // Refused for want of space means that nothing was written, block by block; but a request of
                    // several blocks may have been stopped in the middle.
                    (Err(error), _) => (None, (!allowed).then(|| format!("a change of {extent:?} failed: {error:?}"))),
                };
                for (number, slot) in slots {
                    self.end(number, slot, done, durable && done == Some(true));
                }
                if let Some(text) = text {
                    self.violated(|| text);
                }
            }
            Open::Flush { blocks } => match result {
                Ok(_) => self.flushed(blocks),
                Err(error) if !allowed => self.violated(|| format!("a flush failed: {error:?}")),
                Err(_) => {}
            },
        }
    }

    fn flushed(&mut self, mut changed: BTreeMap<u64, States>) {
        for (number, block) in &mut self.blocks {
            let settled = changed.remove(number).unwrap_or_else(|| block.live.clone());
            for states in [&mut block.crash, &mut block.killed] {
                if states.0.len() == 1 && settled.0.len() == 1 {
                    *states = settled.clone();
                    continue;
                }
                // Another flush may already have ruled out some of them.
                states.0.retain(|state| {
                    settled.0.iter().any(|other| other.mask == state.mask && other.content == state.content)
                });
                debug_assert!(!states.0.is_empty(), "block {number}: a flush left nothing possible");
            }
        }
    }

    fn check_read(&mut self, number: u64, offset: u64, data: &BufList, window: &Window) {
        let (at, bytes) = part(number, offset, data);
        if !window.seen.iter().any(|content| content.has(at, &bytes)) {
            let text = self.explain(number, at, &bytes, window.seen.iter());
            return self.violated(|| format!("a read saw what it may not: {text}"));
        }
        if !window.settled {
            self.touch(number);
            let Some(block) = self.blocks.get_mut(&number) else { return };
            // What has been seen once does not go away again.
            let mut live = block.live.clone();
            live.0.retain(|state| state.content.has(at, &bytes));
            live.close(number, &block.in_flight);
            if !live.0.is_empty() {
                let narrowed = live.0.len() < block.live.0.len();
                block.live = live;
                if narrowed {
                    self.settle_windows(number);
                }
            }
        }
    }

    fn explain<'a>(&self, number: u64, at: usize, bytes: &[u8], allowed: impl Iterator<Item = &'a Content>) -> String {
        const SHOWN_MAX: usize = 12;
        let offset = number * BLOCK + at as u64;
        let mut texts: Vec<String> =
            allowed.map(|content| stamp::describe(offset, &content.to_vec()[at..at + bytes.len()])).collect();
        texts.sort();
        texts.dedup();
        let more = texts.len().saturating_sub(SHOWN_MAX);
        texts.truncate(SHOWN_MAX);
        format!(
            "block {number}, bytes {at}..{}: found [{}]; allowed are [{}]{}",
            at + bytes.len(),
            stamp::describe(offset, bytes),
            texts.join("] ["),
            if more > 0 { format!(" and {more} more") } else { String::new() }
        )
    }

    /// The machine has crashed: nothing is in flight any more, and each block holds one of its crash states; if only the
    /// process was killed, one that includes everything that was acknowledged.
    pub fn crash(&mut self, kind: CrashKind) {
        self.open.clear();
        self.sizes.forget();
        for block in self.blocks.values_mut() {
            block.in_flight.clear();
            block.crash.clear_masks(u64::MAX);
            block.killed.clear_masks(u64::MAX);
            if kind == CrashKind::Power {
                block.killed = block.crash.clone();
            }
            block.live = block.killed.clone();
        }
    }

    /// Lets each byte of a block be of a crash state of its own, until the recovery from the crash that has just been.
    pub fn mix(&mut self) {
        self.blocks.values_mut().for_each(|block| block.mixed = true);
    }

    /// Records the content of a block after the recovery from a crash.  It is durable from then on, unless only the
    /// process was killed.
    pub fn recovered(&mut self, number: u64, bytes: &[u8], kind: CrashKind) {
        let Some(block) = self.blocks.get_mut(&number) else {
            if !forebay_block::is_zero(bytes) {
                let text = self.explain(number, 0, bytes, std::iter::once(&Content::ZERO));
                self.violated(|| format!("a block that was never written: {text}"));
            }
            return;
        };
        let found = Content::of(bytes);
        let of_one = block.live.contents().any(|content| *content == found);
        let of_several = || {
            let known = |(at, &byte)| block.crash.contents().any(|content| content.byte(at) == byte);
            block.mixed && bytes.iter().enumerate().all(known)
        };
        if !of_one && !of_several() {
            let allowed: Vec<Content> = block.live.contents().cloned().collect();
            let text = self.explain(number, 0, bytes, allowed.iter());
            return self.violated(|| format!("after the crash ({kind:?}): {text}"));
        }
        block.live = States::only(found.clone());
        block.killed = block.live.clone();
        match kind {
            CrashKind::Power => {
                block.crash = States::only(found);
                block.mixed = false;
            }
            CrashKind::Kill if !of_one => block.crash.0.push(Possible { content: found, mask: 0 }),
            CrashKind::Kill => {}
        }
    }

    /// Checks an extent map, while nothing is in flight.
    pub fn check_map(&mut self, map: &ExtentMap) {
        for run in map.runs().iter().filter(|run| run.state != forebay_block::ExtentState::Data) {
            for number in blocks_of(run.extent) {
                let (from, to) = within(number, run.extent);
                let zeroes = vec![0; to - from];
                let fits =
                    self.blocks.get(&number).is_none_or(|block| block.live.contents().any(|c| c.has(from, &zeroes)));
                if !fits {
                    self.violated(|| format!("block {number} holds data where the map says {:?}", run.state));
                }
            }
        }
    }
}

impl Window {
    fn see(&mut self, live: &States) {
        for content in live.contents() {
            if !self.seen.contains(content) {
                self.seen.push(content.clone());
            }
        }
    }
}

/// A device whose every request and answer the oracle hears of.
pub struct CheckedDevice {
    inner: Rc<dyn BlockDevice>,
    oracle: Rc<RefCell<BlockOracle>>,
}

impl CheckedDevice {
    /// Puts the oracle in front of a device.
    pub fn new(inner: Rc<dyn BlockDevice>, oracle: Rc<RefCell<BlockOracle>>) -> Rc<Self> {
        Rc::new(Self { inner, oracle })
    }
}

impl BlockDevice for CheckedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        // It counts from the call on, not from the first look at the future: a device may do either.
        let token = self.oracle.borrow_mut().submit(&request);
        let (answer, oracle) = (self.inner.submit(request), self.oracle.clone());
        Box::pin(async move {
            let result = answer.await;
            oracle.borrow_mut().complete(token, &result);
            result
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.inner.size_watch()
    }
}
