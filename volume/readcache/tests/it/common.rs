//! A backend whose contents follow from their names, and which counts and delays reads.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Buf, Error, ErrorKind, Extent, PoolIdentity, Result, SnapId, SnapshotCache, SnapshotFetch, SnapshotIdentity,
    SnapshotRead, SparseData,
};
use forebay_reactor::sleep;
use forebay_readcache::{CacheOptions, DiskOptions, PART_LEN, ReadCache};
use forebay_sim::{CrashPolicy, DiskFaults, Faults, Rng, World};

pub const OBJECT: u64 = 4 << 20;
pub const PATH: &str = "/srv/cache";
pub const DISK: u64 = 16 << 20;

/// Snapshots of images; snapshot `n` is number `n` of the pool.
pub fn snapshot(number: u64) -> SnapshotIdentity {
    let pool = PoolIdentity { store: *b"a cluster's fsid", pool: 2 };
    SnapshotIdentity { pool, image: format!("image{}", number / 2).into(), snap: SnapId(number) }
}

/// Content of a part of 64 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Absent,
    Zero,
    Data(u64),
}

/// Returns the content of a part: of 16 objects one is absent; of 8 parts one is zero.
pub fn kind_of(snap: u64, object: u64, part: u64) -> Kind {
    let mix = |value: u64| (value ^ value >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ value >> 7;
    let of_object = mix(mix(snap + 1) ^ object.wrapping_mul(77));
    let of_part = mix(of_object ^ part.wrapping_mul(0x1_0001));
    match (of_object >> 20) % 16 {
        0 => Kind::Absent,
        _ if (of_part >> 20).is_multiple_of(8) => Kind::Zero,
        _ => Kind::Data(of_part),
    }
}

/// Returns bytes of an object; `None` if it does not exist.
pub fn content(snap: u64, object: u64, extent: Extent) -> Option<Vec<u8>> {
    let first = extent.offset / PART_LEN;
    let parts = extent.end().div_ceil(PART_LEN) - first;
    let mut out = vec![0; (parts * PART_LEN) as usize];
    for (data, part) in out.chunks_exact_mut(PART_LEN as usize).zip(first..) {
        match kind_of(snap, object, part) {
            Kind::Absent => return None,
            Kind::Zero => {}
            Kind::Data(seed) => {
                // A pattern with a long period, repeated: 4 KiB of words that count.
                let words: Vec<u8> = (0..512u64).flat_map(|word| (seed ^ word << 7 | 1).to_le_bytes()).collect();
                for (page, number) in data.chunks_exact_mut(words.len()).zip(1u8..) {
                    page.copy_from_slice(&words);
                    page[9] = number;
                }
            }
        }
    }
    out.drain(..(extent.offset - first * PART_LEN) as usize);
    out.truncate(extent.len as usize);
    Some(out)
}

/// Returns an object and a part of it that holds data, for a snapshot.
pub fn a_part_with_data(snap: u64) -> (u64, u64) {
    let mut all = (0..100).flat_map(|object| (0..64).map(move |part| (object, part)));
    all.find(|&(object, part)| matches!(kind_of(snap, object, part), Kind::Data(_))).expect("data")
}

/// Backend of the tests.
#[derive(Default)]
pub struct Backend {
    pub fetches: Cell<u64>,
    pub bytes: Cell<u64>,
    pub delay: Cell<Duration>,
    /// Error of all reads.
    pub error: RefCell<Option<Error>>,
    /// Ranges that were read.
    pub seen: RefCell<Vec<(u64, u64, Extent)>>,
}

impl Backend {
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    pub fn fail(&self, kind: Option<ErrorKind>) {
        *self.error.borrow_mut() = kind.map(|kind| Error::new(kind, "injected"));
    }

    pub fn fetch(self: &Rc<Self>, snap: u64, object: u64) -> SnapshotFetch {
        let this = self.clone();
        Rc::new(move |extent| {
            let this = this.clone();
            Box::pin(async move {
                this.fetches.set(this.fetches.get() + 1);
                this.bytes.set(this.bytes.get() + extent.len);
                this.seen.borrow_mut().push((snap, object, extent));
                if !this.delay.get().is_zero() {
                    sleep(this.delay.get()).await;
                }
                if let Some(error) = this.error.borrow().clone() {
                    return Err(error);
                }
                let data = content(snap, object, extent).ok_or_else(|| Error::new(ErrorKind::NotFound, "absent"))?;
                // As a store does: without zeroes, and in odd pieces.
                let mut runs = Vec::new();
                for (number, chunk) in data.chunks(12 << 10).enumerate() {
                    if chunk.iter().any(|&byte| byte != 0) {
                        runs.push((extent.offset + number as u64 * (12 << 10), Buf::copy_of(chunk).into()));
                    }
                }
                Ok(SparseData { runs })
            })
        })
    }

    /// Reads through a cache; `None` if the object does not exist.
    pub async fn read(
        self: &Rc<Self>,
        cache: &ReadCache,
        snap: u64,
        object: u64,
        extent: Extent,
    ) -> Result<Option<Vec<u8>>> {
        let snapshot = snapshot(snap);
        let read = SnapshotRead { snapshot, object, object_size: OBJECT, extent, inherits: false };
        match cache.read(read, self.fetch(snap, object)).await {
            Ok(data) => Ok(Some(data.fill(extent).to_vec())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a whole part, which must be right.
    pub async fn check_part(self: &Rc<Self>, cache: &ReadCache, snap: u64, (object, part): (u64, u64)) {
        let extent = Extent::new(part * PART_LEN, PART_LEN);
        let read = self.read(cache, snap, object, extent).await.expect("a read");
        assert!(read == content(snap, object, extent), "part {part} of object {object} at snapshot {snap}");
    }
}

pub fn options(memory: u64) -> CacheOptions {
    CacheOptions { memory, disk: Some(DiskOptions { path: PATH.into(), size: DISK }) }
}

/// Returns a world with a file for the cache.
pub fn world(seed: u64) -> World {
    let world = World::new(seed, Faults::none());
    world.add_file(PATH, 0, 512);
    world
}

/// Runs a test in a world, as one life of a process that ends in order.
pub fn live<T>(world: &World, future: impl Future<Output = T>) -> T {
    let reactor = world.reactor();
    match world.run(&reactor, future) {
        Ok(result) => result,
        Err(stop) => panic!("{stop}\n{}", world.trace(100)),
    }
}

/// Waits until nothing is queued for the disk.
pub async fn written(cache: &ReadCache) {
    while cache.stats().queued_bytes > 0 {
        sleep(Duration::from_millis(1)).await;
    }
    // The table is written behind the parts.
    sleep(Duration::from_millis(20)).await;
}

/// Returns a world with an empty file for the cache, on a disk with faults that are drawn.
pub fn faulty_world(seed: u64, rng: &mut Rng) -> World {
    let disk = match rng.below(5) {
        0 => DiskFaults { misdirected_write_ppm: 20_000, ..DiskFaults::none() },
        1 => DiskFaults { lost_write_ppm: 50_000, write_flip_ppm: 20_000, ..DiskFaults::none() },
        2 => DiskFaults { read_flip_ppm: 5_000, ..DiskFaults::failing(5_000) },
        3 => DiskFaults::stalling(),
        _ => DiskFaults::none(),
    };
    let crash = CrashPolicy::Mixed { keep_ppm: 400_000, tear_ppm: 400_000 };
    let world = World::new(seed, Faults { disk, crash, ..Faults::none() });
    world.add_file(PATH, 0, 512);
    world
}
