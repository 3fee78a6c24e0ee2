//! Own blocks: data that changes while it is cached.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Buf, Error, ErrorKind, Extent, HeadGeneration, HeadRead, SnapshotCache, SnapshotFetch, SparseData,
};
use forebay_reactor::{now, sleep, spawn, timeout};
use forebay_readcache::{PART_LEN, ReadCache};
use forebay_sim::{CrashKind, Rng};

use crate::common::{Backend, faulty_world, live, options, world, written};

const BLOCK: u64 = 4 << 10;
const OBJECT: u64 = 256 << 10;
const OBJECTS: u64 = 3;
const BLOCKS: u64 = OBJECT / BLOCK;

/// Block of the image under test.
#[derive(Clone, Copy, Default)]
struct BlockVersion {
    /// Version in the pool.
    stored: u64,
    /// Newest version that was submitted.
    submitted: u64,
    /// Newest version that was acknowledged.
    acknowledged: u64,
    /// A change of it is in flight.
    is_busy: bool,
}

/// Pool with an image of one's own: plain model of its content.
struct OwnImage {
    blocks: RefCell<Vec<BlockVersion>>,
    exists: RefCell<Vec<bool>>,
    generation: RefCell<Option<Rc<dyn HeadGeneration>>>,
    changing: Cell<usize>,
    reads: Cell<u64>,
    rng: RefCell<Rng>,
}

/// Content of a block: every sixth version is zero.
fn block_content(object: u64, block: u64, version: u64) -> Vec<u8> {
    if version.is_multiple_of(6) {
        return vec![0; BLOCK as usize];
    }
    (0..BLOCK / 8).flat_map(|word| (version << 32 | object << 24 | block << 12 | word).to_le_bytes()).collect()
}

fn at(object: u64, block: u64) -> usize {
    (object * BLOCKS + block) as usize
}

impl OwnImage {
    fn new(seed: u64) -> Rc<Self> {
        Rc::new(Self {
            blocks: RefCell::new(vec![BlockVersion::default(); (OBJECTS * BLOCKS) as usize]),
            exists: RefCell::new(vec![false; OBJECTS as usize]),
            generation: RefCell::default(),
            changing: Cell::new(0),
            reads: Cell::new(0),
            rng: RefCell::new(Rng::new(seed)),
        })
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.borrow_mut().below(bound)
    }

    async fn delay(&self) {
        let micros = if self.below(3) == 0 { 0 } else { self.below(400) };
        if micros > 0 {
            sleep(Duration::from_micros(micros)).await;
        }
    }

    fn fetch(self: &Rc<Self>, object: u64) -> SnapshotFetch {
        let this = self.clone();
        Rc::new(move |extent: Extent| {
            let this = this.clone();
            Box::pin(async move {
                this.delay().await;
                let exists = this.exists.borrow()[object as usize];
                let mut runs = Vec::new();
                for block in extent.offset / BLOCK..extent.end().div_ceil(BLOCK) {
                    let version = this.blocks.borrow()[at(object, block)].stored;
                    let data = Buf::copy_of(&block_content(object, block, version));
                    let (from, to) = (extent.offset.max(block * BLOCK), extent.end().min((block + 1) * BLOCK));
                    if !version.is_multiple_of(6) {
                        let within = (from - block * BLOCK) as usize..(to - block * BLOCK) as usize;
                        runs.push((from, data.slice(within).into()));
                    }
                }
                this.delay().await;
                match exists {
                    true => Ok(SparseData { runs }),
                    false => Err(Error::new(ErrorKind::NotFound, "absent")),
                }
            })
        })
    }

    /// Reads some blocks, which must be as new as what was acknowledged before.
    async fn read(self: Rc<Self>) {
        let (object, first) = (self.below(OBJECTS), self.below(BLOCKS));
        let last = (first + self.below(24)).min(BLOCKS - 1);
        let known = |field: fn(&BlockVersion) -> u64| -> Vec<u64> {
            self.blocks.borrow()[at(object, first)..=at(object, last)].iter().map(field).collect()
        };
        let least = known(|block| block.acknowledged);
        let extent = Extent::new(first * BLOCK, (last - first + 1) * BLOCK);
        let (fetch, generation) = (self.fetch(object), self.generation.borrow().clone());
        let read = HeadRead { object, object_size: OBJECT, extent };
        let answer = match generation {
            Some(generation) => generation.read(read, fetch),
            None => fetch(extent),
        };
        let data = match answer.await {
            Ok(data) => data.fill(extent).to_vec(),
            Err(error) if error.kind() == ErrorKind::NotFound => vec![0; extent.len as usize],
            Err(error) => panic!("{error}"),
        };
        let most = known(|block| block.submitted);
        for (number, found) in data.chunks_exact(BLOCK as usize).enumerate() {
            let (block, versions) = (first + number as u64, least[number]..=most[number]);
            let is_right = versions.clone().any(|version| found == block_content(object, block, version));
            assert!(is_right, "block {block} of object {object}: not one of the versions {versions:?}");
        }
        self.reads.set(self.reads.get() + 1);
    }

    /// Changes some blocks, or removes an object, unless they are being changed.
    async fn change(self: Rc<Self>) {
        let removes = self.below(25) == 0;
        let (object, first) = (self.below(OBJECTS), if removes { 0 } else { self.below(BLOCKS) });
        let last = if removes { BLOCKS - 1 } else { (first + self.below(6)).min(BLOCKS - 1) };
        let range = at(object, first)..=at(object, last);
        if self.blocks.borrow()[range.clone()].iter().any(|block| block.is_busy) {
            return;
        }
        let extent = Extent::new(first * BLOCK, (last - first + 1) * BLOCK);
        let generation = self.generation.borrow().clone();
        if let Some(generation) = &generation {
            generation.begin_change(object, extent);
        }
        self.changing.set(self.changing.get() + 1);
        for block in &mut self.blocks.borrow_mut()[range.clone()] {
            block.is_busy = true;
            block.submitted = if removes { block.submitted.next_multiple_of(6) + 6 } else { block.submitted + 1 };
        }
        self.delay().await;
        self.exists.borrow_mut()[object as usize] = !removes;
        self.blocks.borrow_mut()[range.clone()].iter_mut().for_each(|block| block.stored = block.submitted);
        self.delay().await;
        if let Some(generation) = &generation {
            generation.end_change(object, extent);
        }
        for block in &mut self.blocks.borrow_mut()[range] {
            (block.is_busy, block.acknowledged) = (false, block.submitted);
        }
        self.changing.set(self.changing.get() - 1);
    }

    /// Loses the lock to another client, which writes, and acquires it again.
    async fn lose_lock(self: &Rc<Self>, cache: &ReadCache) {
        *self.generation.borrow_mut() = None;
        while self.changing.get() > 0 {
            sleep(Duration::from_micros(50)).await;
        }
        for _ in 0..10 {
            let (object, block) = (self.below(OBJECTS), self.below(BLOCKS));
            let mut blocks = self.blocks.borrow_mut();
            let changed = &mut blocks[at(object, block)];
            changed.submitted += 1;
            (changed.stored, changed.acknowledged) = (changed.submitted, changed.submitted);
            self.exists.borrow_mut()[object as usize] = true;
        }
        self.begin(cache);
    }

    fn begin(&self, cache: &ReadCache) {
        *self.generation.borrow_mut() = cache.begin_generation("own");
    }
}

/// Several lives of a process with one file, and an image that changes all the time; returns hits, misses and invalidated
/// parts.
fn run(seed: u64) -> [u64; 4] {
    let mut rng = Rng::new(seed);
    let world = faulty_world(seed, &mut rng);
    let image = OwnImage::new(seed);
    let mut counts = [0; 4];
    for _ in 0..rng.range(1..4) {
        let reactor = world.reactor();
        if rng.coin() {
            world.crash_at_point(Some(world.points() + rng.range(1..1500)));
        }
        let memory = *rng.pick(&[0, 3 << 16, 8 << 20]);
        let ended = world.run(&reactor, async {
            let cache = ReadCache::open(options(memory)).await;
            let parents = Backend::new();
            image.begin(&cache);
            let mut tasks = Vec::new();
            for actor in 0..rng.range(2..7) {
                let (image, mut rng) = (image.clone(), rng.fork());
                tasks.push(spawn(async move {
                    for _ in 0..80 {
                        match actor > 0 && rng.one_in(2) {
                            true => image.clone().change().await,
                            false => image.clone().read().await,
                        }
                        if rng.one_in(10) {
                            sleep(Duration::from_micros(rng.below(2000))).await;
                        }
                    }
                }));
            }
            for _ in 0..rng.below(6) {
                sleep(Duration::from_micros(rng.below(8000))).await;
                match rng.below(3) {
                    0 => drop(cache.clear().await),
                    1 => parents.check_part(&cache, rng.below(3), (rng.below(6), rng.below(64))).await,
                    _ => image.lose_lock(&cache).await,
                }
            }
            for task in tasks {
                task.await;
            }
            let stats = cache.stats();
            let hits = stats.own.hits_memory + stats.own.hits_zero + stats.own.hits_joined;
            for (sum, count) in counts.iter_mut().zip([hits, stats.own.hits_disk, stats.own.misses, stats.invalidated])
            {
                *sum += count;
            }
            if rng.coin() {
                cache.close().await;
            }
        });
        let kind = if ended.is_ok() || rng.coin() { CrashKind::Kill } else { CrashKind::Power };
        world.crash(reactor, kind);
        // What was in flight has happened, or not; the next life learns which by its first read.
        *image.generation.borrow_mut() = None;
        image.changing.set(0);
        for block in image.blocks.borrow_mut().iter_mut() {
            *block = BlockVersion { submitted: block.submitted.max(block.stored), is_busy: false, ..*block };
            block.acknowledged = block.stored;
            block.submitted = block.stored;
        }
    }
    counts
}

#[test]
fn random_lives_of_an_image_that_changes_never_give_an_old_byte() {
    let mut counts = [0; 4];
    for seed in 0..60 {
        counts.iter_mut().zip(run(seed)).for_each(|(sum, count)| *sum += count);
    }
    assert!(counts.iter().all(|count| *count > 300), "hits, hits on disk, misses, invalidated: {counts:?}");
}

#[test]
fn a_seed_replays() {
    assert_eq!(run(11), run(11));
}

/// Object whose bytes all have one value.
fn constant(value: Rc<Cell<u8>>, delay: Duration) -> SnapshotFetch {
    Rc::new(move |extent| {
        let value = value.clone();
        Box::pin(async move {
            let data = Buf::copy_of(&vec![value.get(); extent.len as usize]);
            sleep(delay).await;
            Ok(SparseData { runs: vec![(extent.offset, data.into())] })
        })
    })
}

async fn first_byte(generation: &Rc<dyn HeadGeneration>, offset: u64, fetch: &SnapshotFetch) -> u8 {
    let extent = Extent::new(offset, 1);
    let read = HeadRead { object: 0, object_size: OBJECT, extent };
    generation.read(read, fetch.clone()).await.expect("a read").fill(extent).to_vec()[0]
}

#[test]
fn a_change_removes_its_parts_and_no_others() {
    let world = world(1);
    live(&world, async {
        let cache = ReadCache::open(options(8 << 20)).await;
        let own = cache.begin_generation("own").expect("it caches own blocks");
        let value = Rc::new(Cell::new(1));
        let fetch = constant(value.clone(), Duration::ZERO);
        for part in 0..4 {
            first_byte(&own, part * PART_LEN, &fetch).await;
        }
        written(&cache).await;
        assert_eq!(cache.stats().own.misses, 4);
        value.set(2);
        let change = Extent::new(PART_LEN + 5, PART_LEN);
        own.begin_change(0, change);
        // Neither cached nor fetched for the cache until it has ended.
        assert_eq!(first_byte(&own, PART_LEN, &fetch).await, 2);
        own.end_change(0, change);
        let stats = cache.stats();
        assert_eq!((stats.own.misses, stats.own.bypassed, stats.invalidated), (4, 1, 2));
        let found = [0, 1, 2, 3].map(|part| (part, part * PART_LEN));
        for (part, offset) in found {
            assert_eq!(first_byte(&own, offset, &fetch).await, if [1, 2].contains(&part) { 2 } else { 1 });
        }
        assert_eq!(cache.stats().own.misses, 6);
        cache.close().await;
    });
}

#[test]
fn nobody_joins_a_read_that_began_before_a_change() {
    let world = world(2);
    live(&world, async {
        let cache = ReadCache::open(options(8 << 20)).await;
        let own = cache.begin_generation("own").expect("it caches own blocks");
        let value = Rc::new(Cell::new(1));
        let fetch = constant(value.clone(), Duration::from_millis(10));
        let (early, own_too) = (fetch.clone(), own.clone());
        let before = spawn(async move { first_byte(&own_too, 0, &early).await });
        sleep(Duration::from_millis(2)).await;
        own.begin_change(0, Extent::new(0, 1));
        value.set(2);
        own.end_change(0, Extent::new(0, 1));
        let begun = now();
        assert_eq!(first_byte(&own, 0, &fetch).await, 2);
        assert!(begun.elapsed() >= Duration::from_millis(10), "it was read from the pool");
        assert_eq!(before.await, 1);
        assert_eq!(first_byte(&own, 0, &fetch).await, 2, "what was read last is kept");
        cache.close().await;
    });
}

/// Absence is that of an object, and a change removes parts.
#[test]
fn absence_that_is_being_read_hides_no_write_of_another_part() {
    let world = world(3);
    live(&world, async {
        let cache = ReadCache::open(options(8 << 20)).await;
        let own = cache.begin_generation("own").expect("it caches own blocks");
        let absent: SnapshotFetch = Rc::new(|_| {
            Box::pin(async {
                sleep(Duration::from_millis(10)).await;
                Err(Error::new(ErrorKind::NotFound, "absent"))
            })
        });
        let read = |extent| HeadRead { object: 0, object_size: OBJECT, extent };
        let early = own.read(read(Extent::new(PART_LEN, 1)), absent);
        let early = spawn(async move { early.await.map(drop) });
        sleep(Duration::from_millis(2)).await;
        own.begin_change(0, Extent::new(0, BLOCK));
        own.end_change(0, Extent::new(0, BLOCK));
        let both = Extent::new(0, 2 * PART_LEN);
        let found = own.read(read(both), constant(Rc::new(Cell::new(7)), Duration::ZERO)).await;
        assert_eq!(found.expect("the object is there").fill(both).to_vec()[0], 7);
        assert_eq!(early.await.expect_err("it was not there").kind(), ErrorKind::NotFound);
        cache.close().await;
    });
}

#[test]
fn nothing_is_found_in_another_generation_or_after_a_restart() {
    let world = world(3);
    for life in 0..2u8 {
        live(&world, async {
            let cache = ReadCache::open(options(8 << 20)).await;
            assert_eq!((cache.stats().disk_bytes, cache.stats().flags), (0, 0), "own blocks leave no rows");
            for generation in 0..2u8 {
                let own = cache.begin_generation("own").expect("it caches own blocks");
                let value = 1 + 2 * life + generation;
                let fetch = constant(Rc::new(Cell::new(value)), Duration::ZERO);
                assert_eq!(first_byte(&own, 0, &fetch).await, value);
                let zero = constant(Rc::default(), Duration::ZERO);
                assert_eq!(first_byte(&own, PART_LEN, &zero).await, 0);
                written(&cache).await;
            }
            let stats = cache.stats();
            assert_eq!((stats.own.misses, stats.disk_bytes), (4, 2 * PART_LEN), "{stats:?}");
            cache.close().await;
        });
    }
}

#[test]
fn own_blocks_that_are_read_once_leave_the_parents_that_are_hot() {
    let world = world(4);
    live(&world, async {
        let cache = ReadCache::open(options(64 << 16)).await;
        let (parents, own) = (Backend::new(), cache.begin_generation("own").expect("it caches own blocks"));
        for _ in 0..3 {
            for part in 0..32 {
                let _ = timeout(Duration::from_secs(1), parents.check_part(&cache, 1, (1, part))).await;
            }
            sleep(Duration::from_secs(1)).await;
        }
        let fetch = constant(Rc::new(Cell::new(9)), Duration::ZERO);
        for object in 0..200 {
            let extent = Extent::new(0, OBJECT);
            let read = HeadRead { object, object_size: OBJECT, extent };
            own.read(read, fetch.clone()).await.expect("a read");
        }
        let before = parents.fetches.get();
        for part in 0..32 {
            parents.check_part(&cache, 1, (1, part)).await;
        }
        assert_eq!(parents.fetches.get(), before, "all are still there");
        assert!(cache.stats().evicted_memory > 500);
        cache.close().await;
    });
}
