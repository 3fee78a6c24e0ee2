//! Simulated persistent memory: of the stores that no fence covers, each line, or each word of eight bytes in it, keeps
//! any number of the first ones after a power failure.  Stores of a killed process stay in the processor's caches until
//! their line is stored to again: a fence of its successor does not cover them.  Those of a device stay there until they are
//! flushed.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use forebay_reactor::pmem::PersistentMemory;

use crate::rng::Rng;
use crate::world::{CrashKind, World};

const LINE: u64 = 64;
/// Bytes that become durable together or not at all.
const WORD: usize = 8;
const PAGE: u64 = 4096;

#[derive(Default, Clone)]
struct State {
    /// Pages as loads see them.
    pages: HashMap<u64, Box<[u8; PAGE as usize]>>,
    /// Lines with stores that no fence covers: what they held before each one.
    at_risk: BTreeMap<u64, Vec<[u8; LINE as usize]>>,
    /// The same for lines that a killed process or a device has left in the processor's caches.
    cached: BTreeMap<u64, Vec<[u8; LINE as usize]>>,
}

impl State {
    fn line(&self, line: u64) -> [u8; LINE as usize] {
        let mut out = [0; LINE as usize];
        if let Some(page) = self.pages.get(&(line * LINE / PAGE)) {
            let at = (line * LINE % PAGE) as usize;
            out.copy_from_slice(&page[at..at + LINE as usize]);
        }
        out
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let page = self.pages.entry(at / PAGE).or_insert_with(|| Box::new([0; PAGE as usize]));
        let at = (at % PAGE) as usize;
        page[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// The memory as it was.
pub(crate) struct Saved(State);

/// Memory that keeps what was fenced.  Cloning gives another handle to the same one.
#[derive(Clone)]
pub struct SimPmem {
    world: World,
    len: u64,
    state: Rc<RefCell<State>>,
    incarnation: Rc<Cell<u32>>,
}

impl SimPmem {
    /// `len` zero bytes.
    pub fn new(world: &World, len: u64) -> Self {
        let incarnation = Rc::new(Cell::new(world.incarnation()));
        Self { world: world.clone(), len, state: Rc::default(), incarnation }
    }

    /// The machine, or the process, died; call it after [`World::crash`].  Of what was stored to a line at risk, the
    /// whole line keeps any number of the first stores, or each of its words does (`rng` says which and how many);
    /// after a kill they stay as they are, and at risk until they are stored again.
    pub fn crash(&self, kind: CrashKind, rng: &mut Rng) {
        self.incarnation.set(self.world.incarnation());
        let mut state = self.state.borrow_mut();
        let at_risk = std::mem::take(&mut state.at_risk);
        state.cached.extend(at_risk);
        if kind == CrashKind::Kill {
            return;
        }
        // Some crashes lose everything, some nothing, most are in between.
        let keep_ppm = *rng.pick(&[0, 1_000_000, 500_000, 500_000, 900_000, 100_000]);
        for (line, before) in std::mem::take(&mut state.cached) {
            if rng.ppm(keep_ppm) {
                continue;
            }
            if rng.coin() {
                let kept = rng.pick(&before).to_owned();
                state.put(line * LINE, &kept);
                continue;
            }
            // Stores past the caches come in any order.
            let mut torn = state.line(line);
            for (at, word) in torn.chunks_exact_mut(WORD).enumerate() {
                let kept = rng.below(before.len() as u64 + 1) as usize;
                if let Some(kept) = before.get(kept) {
                    word.copy_from_slice(&kept[at * WORD..(at + 1) * WORD]);
                }
            }
            state.put(line * LINE, &torn);
        }
    }

    /// Returns the memory as it is, with what is at risk.
    pub(crate) fn save(&self) -> Saved {
        Saved(self.state.borrow().clone())
    }

    /// Makes the memory what it was, for the machine that runs next.
    pub(crate) fn restore(&self, saved: &Saved) {
        self.incarnation.set(self.world.incarnation());
        self.state.replace(saved.0.clone());
    }

    /// Numbers of the pages that were stored to.
    pub(crate) fn stored_pages(&self) -> Vec<u64> {
        let mut pages: Vec<u64> = self.state.borrow().pages.keys().copied().collect();
        pages.sort_unstable();
        pages
    }

    /// Flips a bit.
    pub fn flip(&self, at: u64, bit: u8) {
        let mut state = self.state.borrow_mut();
        let mut line = state.line(at / LINE);
        line[(at % LINE) as usize] ^= 1 << bit;
        state.put(at / LINE * LINE, &line);
    }
}

impl PersistentMemory for SimPmem {
    fn len(&self) -> u64 {
        self.len
    }

    fn load(&self, at: u64, out: &mut [u8]) {
        assert!(at + out.len() as u64 <= self.len, "a load past the end");
        let state = self.state.borrow();
        let mut done = 0;
        while done < out.len() {
            let here = at + done as u64;
            let len = ((PAGE - here % PAGE) as usize).min(out.len() - done);
            match state.pages.get(&(here / PAGE)) {
                Some(page) => {
                    let from = (here % PAGE) as usize;
                    out[done..done + len].copy_from_slice(&page[from..from + len]);
                }
                None => out[done..done + len].fill(0),
            }
            done += len;
        }
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.len, "a store past the end");
        if bytes.is_empty() || !self.world.has_power(self.incarnation.get()) {
            return;
        }
        let mut state = self.state.borrow_mut();
        let mut done = 0;
        while done < bytes.len() {
            let here = at + done as u64;
            let len = ((LINE - here % LINE) as usize).min(bytes.len() - done);
            let before = state.line(here / LINE);
            let cached = state.cached.remove(&(here / LINE)).unwrap_or_default();
            let at_risk = state.at_risk.entry(here / LINE).or_default();
            at_risk.extend(cached);
            at_risk.push(before);
            state.put(here, &bytes[done..done + len]);
            done += len;
        }
        drop(state);
        // When the power fails in the middle of it, any part of it has been done.
        self.world.memory_point(self.incarnation.get());
    }

    fn store_word(&self, at: u64, word: u64) {
        assert!(at.is_multiple_of(8), "a word at {at}");
        self.store(at, &word.to_le_bytes());
    }

    fn fence(&self) {
        if self.world.memory_point(self.incarnation.get()) {
            self.state.borrow_mut().at_risk.clear();
        }
    }

    fn store_cached(&self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.len, "a store past the end");
        if bytes.is_empty() || !self.world.has_power(self.incarnation.get()) {
            return;
        }
        let mut state = self.state.borrow_mut();
        for (line, part) in lines(at, bytes) {
            let before = state.line(line);
            let pending = state.at_risk.remove(&line).unwrap_or_default();
            let cached = state.cached.entry(line).or_default();
            cached.extend(pending);
            cached.push(before);
            state.put(part.0, part.1);
        }
        drop(state);
        self.world.memory_point(self.incarnation.get());
    }

    fn flush(&self, at: u64, len: u64) {
        assert!(at + len <= self.len, "a flush past the end");
        if len == 0 || !self.world.has_power(self.incarnation.get()) {
            return;
        }
        let mut state = self.state.borrow_mut();
        for line in at / LINE..(at + len).div_ceil(LINE) {
            if let Some(cached) = state.cached.remove(&line) {
                state.at_risk.entry(line).or_default().extend(cached);
            }
        }
        drop(state);
        self.world.memory_point(self.incarnation.get());
    }
}

/// Splits bytes by lines: the number of each line, where its bytes begin, and the bytes.
fn lines(mut at: u64, mut bytes: &[u8]) -> impl Iterator<Item = (u64, (u64, &[u8]))> {
    std::iter::from_fn(move || {
        let len = ((LINE - at % LINE) as usize).min(bytes.len());
        let (part, rest) = bytes.split_at(len);
        let here = (at / LINE, (at, part));
        (at, bytes) = (at + len as u64, rest);
        (len > 0).then_some(here)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Faults;

    #[test]
    fn what_was_fenced_stays_and_of_the_rest_any_word_or_line_any_prefix() {
        let (mut lines, mut torn) = (std::collections::BTreeSet::new(), false);
        for seed in 0..400 {
            let world = World::new(seed, Faults::none());
            let memory = SimPmem::new(&world, 1 << 20);
            let reactor = world.reactor();
            memory.store(0, &[1; 128]);
            memory.fence();
            memory.store(0, &[2; 64]);
            memory.store(0, &[3; 64]);
            memory.store(64, &[9; 64]);
            world.crash(reactor, CrashKind::Power);
            memory.crash(CrashKind::Power, &mut Rng::new(seed));
            let mut out = [0; 128];
            memory.load(0, &mut out);
            let words: Vec<u64> = out.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8"))).collect();
            let whole = |byte: u8| u64::from_le_bytes([byte; 8]);
            assert!(words[..8].iter().all(|&word| [1, 2, 3].map(whole).contains(&word)), "{words:x?}");
            assert!(words[8..].iter().all(|&word| [1, 9].map(whole).contains(&word)), "{words:x?}");
            match words[..8].iter().all(|&word| word == words[0]) && words[8..].iter().all(|&word| word == words[8]) {
                true => drop(lines.insert((out[0], out[64]))),
                false => torn = true,
            }
        }
        let wanted = [(1, 1), (1, 9), (2, 1), (2, 9), (3, 1), (3, 9)];
        assert_eq!(lines, wanted.into());
        assert!(torn);
    }

    #[test]
    fn a_fence_does_not_cover_the_stores_of_a_killed_process() {
        let mut kept = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let world = World::new(seed, Faults::none());
            let memory = SimPmem::new(&world, 4096);
            memory.store(0, &[1; 64]);
            memory.store(64, &[1; 64]);
            memory.crash(CrashKind::Kill, &mut Rng::new(seed));
            // Only one of them is stored again.
            memory.store(64, &[1; 64]);
            memory.fence();
            memory.crash(CrashKind::Power, &mut Rng::new(seed));
            let mut out = [0; 128];
            memory.load(0, &mut out);
            assert_eq!(out[64..], [1; 64]);
            kept.insert(out[0]);
        }
        assert_eq!(kept, [0, 1].into());
    }

    #[test]
    fn a_fence_covers_what_a_device_has_stored_once_that_is_flushed() {
        let mut kept = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let world = World::new(seed, Faults::none());
            let memory = SimPmem::new(&world, 4096);
            memory.store_cached(0, &[1; 192]);
            memory.flush(64, 65);
            memory.fence();
            memory.crash(CrashKind::Power, &mut Rng::new(seed));
            let mut out = [0; 192];
            memory.load(0, &mut out);
            assert_eq!(out[64..], [1; 128]);
            kept.insert(out[0]);
        }
        assert_eq!(kept, [0, 1].into());
    }

    #[test]
    fn after_the_power_has_failed_nothing_is_stored() {
        let world = World::new(1, Faults::none());
        let memory = SimPmem::new(&world, 4096);
        let reactor = world.reactor();
        world.crash_at_point(Some(2));
        let _ = world.run(&reactor, async {
            memory.store(0, &[1; 8]);
            memory.fence();
            memory.store(8, &[1; 8]);
            memory.fence();
        });
        world.crash(reactor, CrashKind::Power);
        memory.crash(CrashKind::Power, &mut Rng::new(1));
        let mut out = [0; 16];
        memory.load(0, &mut out);
        assert_eq!(out[8..], [0; 8]);
    }
}
