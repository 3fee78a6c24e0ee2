//! Contents of one disk or file: durable data, cached data, and the effect of a crash on the difference.
//!
//! A write that completes is visible to reads (`current`) and *pending* until a sync that was submitted after its
//! completion has completed, or it was a durable write itself.  A power failure decides for each pending write, and
//! each one in flight, separately: kept, lost, or torn sector by sector.  Data that a later durable write or a sync has
//! superseded cannot return: a durable write cuts its range out of every pending write before it.

use std::collections::VecDeque;
use std::ops::Range;

use crate::faults::CrashPolicy;
use crate::pages::{PAGE, PageMap, Piece};
use crate::rng::Rng;

/// Effect of an operation on the contents.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    Write(Vec<Piece>),
    Zero(Vec<Range<u64>>),
    Resize(u64),
}

fn one(range: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(range).collect()
}

impl Effect {
    /// Makes a run read as zeroes.
    pub(crate) fn zero(range: Range<u64>) -> Self {
        Effect::Zero(one(range))
    }

    /// Returns the remainder of the effect after a power failure in its middle, at a granularity of `sector` bytes.
    fn torn(&self, sector: u64, rng: &mut Rng) -> Effect {
        match self {
            Effect::Write(pieces) => {
                let Some(last) = pieces.last() else { return self.clone() };
                let (start, end) = (pieces[0].offset, last.range().end);
                const SPAN_MAX: u64 = 64 << 20;
                if end - start > SPAN_MAX {
                    return Effect::Write(pieces.iter().filter(|_| rng.coin()).cloned().collect());
                }
                let first = start / sector;
                let sectors = end.div_ceil(sector) - first;
                // Half of the tears are in one place, as a disk writes in order; the others are anywhere.
                let cut = rng.below(sectors + 1);
                let style = rng.below(4);
                let mut bits = 0;
                let mut keep = Vec::with_capacity(sectors as usize);
                for index in 0..sectors {
                    if index % 64 == 0 {
                        bits = rng.bits();
                    }
                    keep.push(match style {
                        0 => index < cut,
                        1 => index >= cut,
                        _ => bits >> (index % 64) & 1 == 1,
                    });
                }
                let mut kept = Vec::new();
                for piece in pieces {
                    let range = piece.range();
                    let mut at = range.start;
                    while at < range.end {
                        let decision = keep[(at / sector - first) as usize];
                        let mut stop = ((at / sector + 1) * sector).min(range.end);
                        while stop < range.end && keep[(stop / sector - first) as usize] == decision {
                            stop = (stop + sector).min(range.end);
                        }
                        if decision {
                            kept.push(piece.part(at..stop));
                        }
                        at = stop;
                    }
                }
                Effect::Write(kept)
            }
            Effect::Zero(ranges) => {
                let mut kept = Vec::new();
                for range in ranges {
                    let sectors = (range.end - range.start).div_ceil(sector);
                    let cut = (range.start + rng.below(sectors + 1) * sector).min(range.end);
                    kept.push(if rng.coin() { range.start..cut } else { cut..range.end });
                }
                Effect::Zero(kept)
            }
            Effect::Resize(_) => {
                if rng.coin() {
                    self.clone()
                } else {
                    Effect::Write(Vec::new())
                }
            }
        }
    }

    /// Takes everything in `range` out of it.
    fn cut_out(&mut self, range: &Range<u64>) {
        match self {
            Effect::Write(pieces) => {
                let overlaps = |piece: &Piece| piece.offset < range.end && range.start < piece.range().end;
                if !pieces.iter().any(overlaps) {
                    return;
                }
                let mut left = Vec::with_capacity(pieces.len());
                for piece in pieces.drain(..) {
                    if !overlaps(&piece) {
                        left.push(piece);
                        continue;
                    }
                    let whole = piece.range();
                    if whole.start < range.start {
                        left.push(piece.part(whole.start..range.start));
                    }
                    if range.end < whole.end {
                        left.push(piece.part(range.end..whole.end));
                    }
                }
                *pieces = left;
            }
            Effect::Zero(ranges) => {
                let mut left = Vec::with_capacity(ranges.len());
                for old in ranges.drain(..) {
                    let before = old.start..old.end.min(range.start);
                    let after = old.start.max(range.end)..old.end;
                    left.extend([before, after].into_iter().filter(|part| !part.is_empty()));
                }
                *ranges = left;
            }
            Effect::Resize(_) => {}
        }
    }

    /// The runs it touches.
    fn ranges(&self) -> Vec<Range<u64>> {
        match self {
            Effect::Write(pieces) => match (pieces.first(), pieces.last()) {
                (Some(first), Some(last)) => one(first.offset..last.range().end),
                _ => Vec::new(),
            },
            Effect::Zero(ranges) => ranges.clone(),
            Effect::Resize(_) => Vec::new(),
        }
    }

    fn apply(&self, map: &mut PageMap, size: &mut u64) {
        match self {
            Effect::Write(pieces) => {
                pieces.iter().for_each(|piece| map.write(piece));
                *size = pieces.last().map_or(*size, |last| last.range().end.max(*size));
            }
            Effect::Zero(ranges) => ranges.iter().for_each(|range| map.zero(range.start..range.end.min(*size))),
            Effect::Resize(to) => {
                if to < size {
                    map.zero(*to..*size);
                }
                *size = *to;
            }
        }
    }

    /// Copies into `out`, the content from `offset` on, those sectors that the write has already reached.
    pub(crate) fn show_through(&self, offset: u64, out: &mut [u8], sector: u64, rng: &mut Rng) {
        let Effect::Write(pieces) = self else { return };
        let end = offset + out.len() as u64;
        for piece in pieces.iter().filter(|piece| piece.offset < end && offset < piece.range().end) {
            let mut at = piece.offset.max(offset);
            let stop = piece.range().end.min(end);
            while at < stop {
                let next = ((at / sector + 1) * sector).min(stop);
                if rng.coin() {
                    let from = &piece.data[(at - piece.offset) as usize..(next - piece.offset) as usize];
                    out[(at - offset) as usize..(next - offset) as usize].copy_from_slice(from);
                }
                at = next;
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Pending {
    seq: u64,
    effect: Effect,
}

/// The odds of one crash, drawn once for all disks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CrashOdds {
    keep_ppm: u32,
    tear_ppm: u32,
}

impl CrashOdds {
    pub(crate) fn draw(policy: CrashPolicy, rng: &mut Rng) -> Self {
        let (keep_ppm, tear_ppm) = match policy {
            CrashPolicy::LoseAll => (0, 0),
            CrashPolicy::KeepAll => (1_000_000, 0),
            CrashPolicy::Mixed { keep_ppm, tear_ppm } => (keep_ppm, tear_ppm),
            CrashPolicy::Seeded => match rng.below(8) {
                0 => (0, 0),
                1 => (1_000_000, 0),
                2 => (0, 1_000_000),
                _ => {
                    let keep = rng.below(1_000_000) as u32;
                    (keep, rng.below(u64::from(1_000_000 - keep)) as u32)
                }
            },
        };
        Self { keep_ppm, tear_ppm }
    }

    /// Draws the remainder of an effect after a crash: all, a torn part, or nothing.
    fn fate(self, effect: &Effect, sector: u64, rng: &mut Rng) -> Option<Effect> {
        let drawn = rng.below(1_000_000) as u32;
        if drawn < self.keep_ppm {
            Some(effect.clone())
        } else if drawn < self.keep_ppm.saturating_add(self.tear_ppm) {
            Some(effect.torn(sector, rng))
        } else {
            None
        }
    }
}

/// The content of a disk or file.
#[derive(Debug, Clone, Default)]
pub(crate) struct Content {
    durable: PageMap,
    durable_size: u64,
    current: PageMap,
    size: u64,
    pending: VecDeque<Pending>,
    next_seq: u64,
}

impl Content {
    /// A disk of `size` bytes, all zero and all durable.
    pub(crate) fn new(size: u64) -> Self {
        Self { durable_size: size, size, ..Self::default() }
    }

    /// Bytes, as reads see it.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes stored, as reads see it.
    pub(crate) fn allocated(&self) -> u64 {
        self.current.len() as u64 * PAGE
    }

    /// Returns whether a page is stored, as reads see it.
    pub(crate) fn is_stored(&self, page: u64) -> bool {
        self.current.contains(page)
    }

    /// Returns the first byte from `from` on that is stored, as reads see it.
    pub(crate) fn next_data(&self, from: u64) -> Option<u64> {
        let page = self.current.next(from / PAGE)?;
        Some((page * PAGE).max(from)).filter(|&at| at < self.size)
    }

    /// Returns the first byte from `from` on that is not stored, or the end; `None` behind that.
    pub(crate) fn next_hole(&self, from: u64) -> Option<u64> {
        let page = (from / PAGE..).find(|&page| !self.current.contains(page))?;
        Some((page * PAGE).max(from).min(self.size)).filter(|_| from < self.size)
    }

    /// Numbers of the stored pages, as reads see it.
    pub(crate) fn stored_pages(&self) -> Vec<u64> {
        self.current.numbers().collect()
    }

    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) {
        self.current.read(offset, out);
    }

    /// An operation completes.
    pub(crate) fn land(&mut self, effect: Effect, durable: bool) {
        effect.apply(&mut self.current, &mut self.size);
        if !durable {
            self.pending.push_back(Pending { seq: self.next_seq, effect });
            self.next_seq += 1;
            return;
        }
        // With the data goes what the file system knew: a length that was set before is durable now too.
        for index in 0..self.pending.len() {
            if let Effect::Resize(to) = self.pending[index].effect {
                self.pending[index].effect.apply(&mut self.durable, &mut self.durable_size);
                self.pending.iter_mut().take(index).for_each(|older| older.effect.cut_out(&(to..u64::MAX)));
            }
        }
        self.pending.retain(|pending| !matches!(pending.effect, Effect::Resize(_)));
        for range in effect.ranges() {
            self.pending.iter_mut().for_each(|pending| pending.effect.cut_out(&range));
        }
        effect.apply(&mut self.durable, &mut self.durable_size);
    }

    /// Returns the position up to which a sync submitted now makes writes durable.
    pub(crate) fn sync_mark(&self) -> u64 {
        self.next_seq
    }

    /// A sync completes: everything that had completed when it was submitted is durable.
    pub(crate) fn sync(&mut self, mark: u64) {
        while self.pending.front().is_some_and(|pending| pending.seq < mark) {
            let Some(pending) = self.pending.pop_front() else { break };
            pending.effect.apply(&mut self.durable, &mut self.durable_size);
        }
    }

    /// A part of an operation that failed may have been done all the same.
    pub(crate) fn land_torn(&mut self, effect: &Effect, sector: u64, rng: &mut Rng) {
        self.land(effect.torn(sector, rng), false);
    }

    /// The power fails.  `in_flight` are the effects of operations that have not completed.
    pub(crate) fn crash(&mut self, mut in_flight: Vec<Effect>, odds: CrashOdds, sector: u64, rng: &mut Rng) {
        for pending in std::mem::take(&mut self.pending) {
            if let Some(effect) = odds.fate(&pending.effect, sector, rng) {
                effect.apply(&mut self.durable, &mut self.durable_size);
            }
        }
        rng.shuffle(&mut in_flight);
        for effect in in_flight {
            if let Some(effect) = odds.fate(&effect, sector, rng) {
                effect.apply(&mut self.durable, &mut self.durable_size);
            }
        }
        self.current = self.durable.clone();
        self.size = self.durable_size;
    }

    /// The process dies, the machine does not: what has completed stays readable, and is still not durable.
    pub(crate) fn kill(&mut self, mut in_flight: Vec<Effect>, odds: CrashOdds, sector: u64, rng: &mut Rng) {
        rng.shuffle(&mut in_flight);
        for effect in in_flight {
            if let Some(effect) = odds.fate(&effect, sector, rng) {
                self.land(effect, false);
            }
        }
    }

    /// Flips a stored bit, in every version of the page.
    pub(crate) fn flip(&mut self, offset: u64, bit: u8) -> bool {
        let durable = self.durable.flip(offset, bit);
        for pending in &mut self.pending {
            if let Effect::Write(pieces) = &mut pending.effect {
                for piece in pieces.iter_mut().filter(|piece| piece.range().contains(&offset)) {
                    let at = (offset - piece.offset) as usize;
                    std::rc::Rc::make_mut(&mut piece.data)[at] ^= 1 << (bit & 7);
                }
            }
        }
        self.current.flip(offset, bit) || durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_reactor::{Buf, BufList};

    fn fill(offset: u64, len: usize, byte: u8) -> Effect {
        Effect::Write(Piece::cut(offset, &BufList::from(Buf::copy_of(&vec![byte; len]))))
    }

    fn bytes(content: &Content, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0xee; len];
        content.read(offset, &mut out);
        out
    }

    const SECTOR: u64 = 512;

    #[test]
    fn synced_data_survives_every_crash_and_unsynced_data_takes_every_form() {
        let (mut kept, mut lost, mut torn) = (0, 0, 0);
        for seed in 0..500 {
            let mut rng = Rng::new(seed);
            let mut content = Content::new(1 << 20);
            content.land(fill(0, 16384, 1), false);
            let mark = content.sync_mark();
            content.land(fill(4096, 8192, 2), false);
            content.sync(mark);
            let odds = CrashOdds::draw(CrashPolicy::Seeded, &mut rng);
            content.crash(vec![fill(65536, 4096, 3)], odds, SECTOR, &mut rng);
            assert!(bytes(&content, 0, 4096).iter().all(|&byte| byte == 1), "seed {seed}");
            assert!(bytes(&content, 12288, 4096).iter().all(|&byte| byte == 1), "seed {seed}");
            let middle = bytes(&content, 4096, 8192);
            match middle.iter().filter(|&&byte| byte == 2).count() {
                8192 => kept += 1,
                0 => lost += 1,
                _ => torn += 1,
            }
            for sector in middle.chunks(SECTOR as usize) {
                assert!(sector.iter().all(|&byte| byte == sector[0] && (byte == 1 || byte == 2)), "seed {seed}");
            }
        }
        assert!(kept > 50 && lost > 50 && torn > 50, "{kept} kept, {lost} lost, {torn} torn");
    }

    #[test]
    fn a_durable_write_is_not_undone_by_an_older_one_that_was_not_synced() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut content = Content::new(1 << 20);
            content.land(fill(0, 12288, 1), false);
            content.land(Effect::zero(0..12288), false);
            content.land(fill(4096, 4096, 2), true);
            let odds = CrashOdds::draw(CrashPolicy::Seeded, &mut rng);
            content.crash(Vec::new(), odds, SECTOR, &mut rng);
            assert!(bytes(&content, 4096, 4096).iter().all(|&byte| byte == 2), "seed {seed}");
        }
    }

    #[test]
    fn a_file_keeps_a_length_that_was_synced() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut content = Content::new(0);
            content.land(fill(0, 8192, 1), false);
            content.land(Effect::Resize(4096), false);
            content.sync(content.sync_mark());
            content.land(Effect::Resize(100_000), false);
            assert_eq!(content.size(), 100_000);
            assert_eq!(bytes(&content, 4096, 4096), vec![0; 4096]);
            let odds = CrashOdds::draw(CrashPolicy::Seeded, &mut rng);
            content.crash(Vec::new(), odds, SECTOR, &mut rng);
            assert!([4096, 100_000].contains(&content.size()), "seed {seed}: {}", content.size());
            assert!(bytes(&content, 0, 4096).iter().all(|&byte| byte == 1), "seed {seed}");
        }
    }

    #[test]
    fn a_killed_process_leaves_its_writes_readable_and_at_risk() {
        let (mut lost, mut kept) = (false, false);
        for seed in 0..100 {
            let mut rng = Rng::new(seed);
            let mut content = Content::new(1 << 20);
            content.land(fill(0, 4096, 1), false);
            let odds = CrashOdds::draw(CrashPolicy::Seeded, &mut rng);
            content.kill(Vec::new(), odds, SECTOR, &mut rng);
            assert_eq!(bytes(&content, 0, 4096), vec![1; 4096]);
            let odds = CrashOdds::draw(CrashPolicy::Seeded, &mut rng);
            content.crash(Vec::new(), odds, SECTOR, &mut rng);
            match bytes(&content, 0, 4096)[0] {
                0 => lost = true,
                _ => kept = true,
            }
        }
        assert!(lost && kept);
    }

    #[test]
    fn a_flipped_bit_stays_flipped() {
        let mut content = Content::new(1 << 20);
        content.land(fill(0, 4096, 8), false);
        content.sync(content.sync_mark());
        assert!(content.flip(17, 0));
        assert!(!content.flip(500_000, 0), "nothing is stored there");
        let odds = CrashOdds::draw(CrashPolicy::LoseAll, &mut Rng::new(1));
        content.crash(Vec::new(), odds, SECTOR, &mut Rng::new(1));
        assert_eq!(bytes(&content, 16, 3), [8, 9, 8]);
    }
}
