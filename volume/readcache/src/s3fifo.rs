//! S3-FIFO: a bounded map that resists scans, with three queues and a counter an entry.
//!
//! New entries go to a small queue of a tenth of the capacity. Entries that were referenced there move to the main
//! queue; the others are evicted, and only their hashes are remembered. A remembered one that comes back goes to the
//! main queue at once. So one pass over any amount of data displaces a tenth of the entries at most.
//!
//! References within [`CORRELATED_MS`] of the last counted one do not count: a client that reads 64 KiB in steps of
//! 4 KiB has used the part once, not 16 times.

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, Hash};

/// Time in milliseconds within which references to an entry count as one.
pub(crate) const CORRELATED_MS: u32 = 500;
/// Highest value of an entry's counter.
const COUNT_MAX: u8 = 3;
/// Queue entries of removed keys that are tolerated before a queue is swept.
const STALE_MIN: usize = 64;

type Hashing = BuildHasherDefault<DefaultHasher>;

struct Node<V> {
    value: V,
    count: u8,
    in_main: bool,
    /// Number of its entry in the queue; entries with another number are left over.
    ticket: u32,
    /// Time of the last counted reference in milliseconds.
    referenced_ms: u32,
}

/// Queue whose entries may be left over from keys that were removed.
struct Queue<K> {
    entries: VecDeque<(K, u32)>,
    live: usize,
}

/// Hashes of keys that were evicted from the small queue, the newest `capacity` of them.
struct Ghost {
    order: VecDeque<u64>,
    counts: HashMap<u64, u32, Hashing>,
    capacity: usize,
}

/// Bounded map with eviction.
pub(crate) struct S3Fifo<K, V> {
    nodes: HashMap<K, Node<V>, Hashing>,
    small: Queue<K>,
    main: Queue<K>,
    ghost: Ghost,
    capacity: usize,
    next_ticket: u32,
}

impl<K: Hash + Eq + Clone, V> S3Fifo<K, V> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            nodes: HashMap::default(),
            small: Queue::new(),
            main: Queue::new(),
            ghost: Ghost { order: VecDeque::new(), counts: HashMap::default(), capacity },
            capacity,
            next_ticket: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns a value, and counts the reference.
    pub(crate) fn get(&mut self, key: &K, now_ms: u32) -> Option<&mut V> {
        let node = self.nodes.get_mut(key)?;
        if now_ms.wrapping_sub(node.referenced_ms) >= CORRELATED_MS {
            node.referenced_ms = now_ms;
            node.count = (node.count + 1).min(COUNT_MAX);
        }
        Some(&mut node.value)
    }

    /// Returns a value without counting a reference.
    pub(crate) fn peek(&self, key: &K) -> Option<&V> {
        Some(&self.nodes.get(key)?.value)
    }

    /// Inserts or replaces a value; returns the entry that was evicted for it, which may be itself.
    pub(crate) fn insert(&mut self, key: K, value: V, now_ms: u32) -> Option<(K, V)> {
        if let Some(node) = self.nodes.get_mut(&key) {
            return Some((key, std::mem::replace(&mut node.value, value)));
        }
        if self.capacity == 0 {
            return Some((key, value));
        }
        let evicted = if self.nodes.len() >= self.capacity { self.evict() } else { None };
        let to_main = self.ghost.take(Self::hash(&key));
        self.add(key, value, to_main, now_ms);
        evicted
    }

    /// Inserts a value at the end of the main queue, if there is space and no value of that key.
    pub(crate) fn restore(&mut self, key: K, value: V, now_ms: u32) -> bool {
        let fits = self.nodes.len() < self.capacity && !self.nodes.contains_key(&key);
        if fits {
            self.add(key, value, true, now_ms);
        }
        fits
    }

    fn add(&mut self, key: K, value: V, in_main: bool, now_ms: u32) {
        let ticket = self.next_ticket;
        self.next_ticket = ticket.wrapping_add(1);
        let queue = if in_main { &mut self.main } else { &mut self.small };
        queue.push(key.clone(), ticket);
        self.nodes.insert(key, Node { value, count: 0, in_main, ticket, referenced_ms: now_ms });
    }

    /// Removes a value.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let node = self.nodes.remove(key)?;
        let queue = if node.in_main { &mut self.main } else { &mut self.small };
        queue.live -= 1;
        if queue.entries.len() > 2 * queue.live + STALE_MIN {
            let nodes = &self.nodes;
            queue.entries.retain(|(key, ticket)| nodes.get(key).is_some_and(|node| node.ticket == *ticket));
        }
        Some(node.value)
    }

    /// Evicts an entry; `None` when there is none.
    pub(crate) fn evict(&mut self) -> Option<(K, V)> {
        loop {
            let from_small = self.small.live > 0 && (self.small.live * 10 >= self.capacity || self.main.live == 0);
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let (key, ticket) = queue.entries.pop_front()?;
            let Entry::Occupied(mut entry) = self.nodes.entry(key) else { continue };
            let node = entry.get_mut();
            if node.ticket != ticket {
                continue;
            }
            queue.live -= 1;
            if node.count > 0 {
                // A promotion uses the counter up; in the main queue each round costs one.
                node.count = if from_small { 0 } else { node.count - 1 };
                node.in_main = true;
                self.main.push(entry.key().clone(), ticket);
                continue;
            }
            let (key, node) = entry.remove_entry();
            if from_small {
                self.ghost.put(Self::hash(&key));
            }
            return Some((key, node.value));
        }
    }

    /// Removes all entries, and what is remembered of former ones.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }

    fn hash(key: &K) -> u64 {
        Hashing::default().hash_one(key)
    }
}

impl<K> Queue<K> {
    fn new() -> Self {
        Self { entries: VecDeque::new(), live: 0 }
    }

    fn push(&mut self, key: K, ticket: u32) {
        self.entries.push_back((key, ticket));
        self.live += 1;
    }
}

impl Ghost {
    fn put(&mut self, hash: u64) {
        self.order.push_back(hash);
        *self.counts.entry(hash).or_default() += 1;
        if self.order.len() > self.capacity
            && let Some(oldest) = self.order.pop_front()
        {
            self.forget(oldest);
        }
    }

    /// Returns whether the hash is remembered, and forgets it; its place in the order is left over.
    fn take(&mut self, hash: u64) -> bool {
        self.counts.remove(&hash).is_some()
    }

    fn forget(&mut self, hash: u64) {
        if let Entry::Occupied(mut count) = self.counts.entry(hash) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Plain LRU, to compare with.
    struct Lru {
        order: BTreeMap<u64, u32>,
        places: HashMap<u32, u64>,
        clock: u64,
        capacity: usize,
    }

    impl Lru {
        fn new(capacity: usize) -> Self {
            Self { order: BTreeMap::new(), places: HashMap::new(), clock: 0, capacity }
        }

        fn access(&mut self, key: u32) -> bool {
            self.clock += 1;
            let known = self.places.insert(key, self.clock);
            if let Some(place) = known {
                self.order.remove(&place);
            }
            self.order.insert(self.clock, key);
            if self.order.len() > self.capacity {
                let (_, oldest) = self.order.pop_first().expect("full");
                self.places.remove(&oldest);
            }
            known.is_some()
        }
    }

    fn access(cache: &mut S3Fifo<u32, ()>, key: u32, now_ms: u32) -> bool {
        let hit = cache.get(&key, now_ms).is_some();
        if !hit {
            cache.insert(key, (), now_ms);
        }
        hit
    }

    fn fill(cache: &mut S3Fifo<u32, ()>, keys: std::ops::Range<u32>, now_ms: u32) {
        for key in keys {
            cache.insert(key, (), now_ms);
        }
    }

    /// Key of a popularity that falls with its rank, from a number at random.
    fn popular(random: u64, keys: u32) -> u32 {
        // Log-uniform: half of the references go to the square root of the keys.
        let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
        (f64::from(keys).powf(unit) as u32).min(keys - 1)
    }

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state ^ *state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    #[test]
    fn a_scan_of_ten_times_the_capacity_leaves_the_hot_set() {
        const CAPACITY: u32 = 1000;
        let (mut ours, mut lru) = (S3Fifo::new(CAPACITY as usize), Lru::new(CAPACITY as usize));
        let hot = 0..CAPACITY / 2;
        for round in 0..3 {
            for key in hot.clone() {
                access(&mut ours, key, round * 1000);
                lru.access(key);
            }
        }
        let scan = 10_000..10_000 + 10 * CAPACITY;
        for (at, key) in scan.enumerate() {
            // As a client does that reads 64 KiB in steps of 4 KiB.
            for _ in 0..16 {
                access(&mut ours, key, 4000 + at as u32 * 3);
                lru.access(key);
            }
        }
        let left = hot.clone().filter(|key| ours.peek(key).is_some()).count();
        let lru_left = hot.clone().filter(|key| lru.places.contains_key(key)).count();
        assert_eq!(lru_left, 0, "LRU loses all of it");
        assert_eq!(left, hot.len(), "all of the hot set is left");
    }

    /// Trace: boots of clones that read popular parts, and between them backups that read everything once.
    #[test]
    fn more_hits_than_lru_on_popular_parts_between_scans() {
        const CAPACITY: usize = 500;
        let (mut ours, mut lru) = (S3Fifo::new(CAPACITY), Lru::new(CAPACITY));
        let (mut state, mut now, mut counts) = (7, 0, [0u32; 3]);
        for round in 0..20u32 {
            for _ in 0..5000 {
                now += 2;
                let key = popular(random(&mut state), 5000);
                counts[0] += 1;
                counts[1] += u32::from(access(&mut ours, key, now));
                counts[2] += u32::from(lru.access(key));
            }
            for key in 0..2000 {
                now += 1;
                access(&mut ours, 100_000 + round * 2000 + key, now);
                lru.access(100_000 + round * 2000 + key);
            }
        }
        let [all, ours, lru] = counts.map(f64::from);
        println!("hit ratio: S3-FIFO {:.3}, LRU {:.3}", ours / all, lru / all);
        assert!(ours > lru * 1.03, "{ours} hits of {all}, LRU {lru}");
    }

    #[test]
    fn references_close_together_count_once() {
        let mut cache = S3Fifo::new(10);
        fill(&mut cache, 0..10, 1000);
        cache.get(&3, 1000 + CORRELATED_MS - 1);
        cache.get(&4, 1000 + CORRELATED_MS);
        fill(&mut cache, 10..19, 2000);
        assert_eq!((cache.peek(&3), cache.peek(&4)), (None, Some(&())));
        assert_eq!(cache.len(), 10);
    }

    #[test]
    fn what_comes_back_soon_after_its_eviction_stays() {
        let mut cache = S3Fifo::new(20);
        fill(&mut cache, 0..25, 0);
        assert!(cache.peek(&0).is_none(), "evicted, and remembered");
        cache.insert(0, (), 0);
        fill(&mut cache, 100..200, 0);
        assert!(cache.peek(&0).is_some());
    }

    #[test]
    fn without_capacity_nothing_stays() {
        let mut cache = S3Fifo::new(0);
        assert_eq!(cache.insert(1, "a", 0), Some((1, "a")));
        assert!(!cache.restore(1, "a", 0) && cache.evict().is_none() && cache.len() == 0);
    }

    proptest! {
        #[test]
        fn never_more_than_its_capacity_and_never_another_value(
            capacity in 0usize..20,
            steps in prop::collection::vec((0u8..5, 0u32..40), 0..400),
        ) {
            let mut cache = S3Fifo::new(capacity);
            let mut inside: HashMap<u32, usize> = HashMap::new();
            for (at, (what, key)) in steps.into_iter().enumerate() {
                let now = at as u32 * 300;
                match what {
                    0 | 1 => {
                        inside.insert(key, at);
                        if let Some((out, value)) = cache.insert(key, at, now) && (out != key || value == at) {
                            prop_assert_eq!(inside.remove(&out), Some(value));
                        }
                    }
                    2 => prop_assert_eq!(cache.get(&key, now).copied(), inside.get(&key).copied()),
                    3 => prop_assert_eq!(cache.remove(&key), inside.remove(&key)),
                    _ => if let Some((out, value)) = cache.evict() {
                        prop_assert_eq!(inside.remove(&out), Some(value));
                    },
                }
                prop_assert_eq!(cache.len(), inside.len());
                prop_assert!(cache.len() <= capacity && cache.small.live + cache.main.live == cache.len());
                prop_assert!(cache.ghost.order.len() <= capacity && cache.ghost.counts.len() <= capacity);
                prop_assert!(cache.small.entries.len() + cache.main.entries.len() <= 4 * capacity + 4 * STALE_MIN);
            }
        }
    }
}
