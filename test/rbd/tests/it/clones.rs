//! Clones of images read their parents through the read cache: the same bytes as without, and each of them once.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::Extent;
use forebay_image::{Image, install_snapshot_cache};
use forebay_ram::cluster::RamCluster;
use forebay_rbd_lab::{ClonePool, POOL};
use forebay_reactor::spawn;
use forebay_reactor::sync::join_all;
use forebay_readcache::{CacheOptions, DiskOptions, ReadCache};
use forebay_sim::{CrashKind, Faults, Rng, World};

const OBJECT: u64 = 256 << 10;
const SIZE: u64 = 16 * OBJECT;
const CLONES: u64 = 50;
const PATH: &str = "/srv/cache";

fn cluster(seed: u64) -> RamCluster {
    let cluster = RamCluster::new(seed, 2);
    assert_eq!(cluster.add_pool("rbd"), POOL);
    cluster
}

fn world(seed: u64) -> World {
    let world = World::new(seed, Faults::none());
    world.add_file(PATH, 0, 512);
    world
}

fn live<T>(world: &World, future: impl Future<Output = T>) -> T {
    let reactor = world.reactor();
    match world.run(&reactor, future) {
        Ok(result) => result,
        Err(stop) => panic!("{stop}\n{}", world.trace(100)),
    }
}

async fn cache(memory: u64) -> Rc<ReadCache> {
    let disk = Some(DiskOptions { path: PATH.into(), size: 16 << 20 });
    ReadCache::open(CacheOptions { memory, disk }).await
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len / 8).flat_map(|_| (rng.bits() | 1).to_le_bytes()).collect()
}

/// Makes a parent with data in most of its objects, and clones of it; returns the parent's content.
async fn make_parent(pool: &ClonePool, clones: u64) -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    pool.create("base", SIZE).await.expect("created");
    let base = pool.open("base").await.expect("opened");
    for object in (0..16).filter(|object| ![3, 9].contains(object)) {
        let (at, data) = ((object * OBJECT) as usize, pattern(object, OBJECT / 2));
        pool.write(&base, at as u64, &data).await.expect("a write");
        content[at..at + data.len()].copy_from_slice(&data);
    }
    base.close().await;
    let snap = pool.take_snapshot("base", "gold", None).await.expect("a snapshot");
    // The image goes on: what its snapshot holds does not.
    let base = pool.open("base").await.expect("opened");
    for object in 0..16 {
        pool.write(&base, object * OBJECT, &pattern(77, 4096)).await.expect("a write");
    }
    base.close().await;
    for number in 0..clones {
        pool.clone(&format!("clone{number}"), "base", snap).await.expect("a clone");
    }
    content
}

async fn open_all(pool: &ClonePool, clones: u64) -> Vec<Rc<Image>> {
    let mut images = Vec::new();
    for number in 0..clones {
        images.push(pool.open(&format!("clone{number}")).await.expect("opened"));
    }
    images
}

async fn close_all(images: Vec<Rc<Image>>) {
    for image in images {
        image.close().await;
    }
}

#[test]
fn fifty_clones_that_boot_read_each_byte_of_their_parent_once() {
    let (cluster, world) = (cluster(1), world(1));
    for life in 0..2 {
        live(&world, async {
            let pool = Rc::new(ClonePool::of(&cluster, OBJECT, Duration::from_millis(2)));
            if life == 0 {
                make_parent(&pool, CLONES).await;
            }
            let content = Rc::new(content_of_gold());
            let cache = cache(1 << 20).await;
            let installed = install_snapshot_cache(cache.clone());
            let images = open_all(&pool, CLONES).await;
            pool.pool.reset();
            let boots = images.iter().enumerate().map(|(number, image)| {
                let (pool, image, content) = (pool.clone(), image.clone(), content.clone());
                spawn(async move {
                    let mut rng = Rng::new(number as u64);
                    let first = rng.below(SIZE / 12_288) * 12_288;
                    for step in (0..SIZE).step_by(12 << 10) {
                        let at = (first + step) % SIZE;
                        let extent = Extent::new(at, (12 << 10).min(SIZE - at));
                        let read = pool.read(&image, extent).await.expect("a read");
                        assert!(read == content[at as usize..][..read.len()], "clone {number}, {extent:?}");
                    }
                })
            });
            join_all(boots).await;
            let stats = cache.stats();
            // Reads of the clones' own objects find none; they ask for bytes, too.
            let own = pool.pool.counts().1 - stats.parents.fetched_bytes;
            assert_eq!(own % (4 << 10), 0);
            let limit = if life == 0 { SIZE * 105 / 100 } else { 0 };
            assert!(
                stats.parents.fetched_bytes <= limit,
                "life {life}: {} bytes of {SIZE}",
                stats.parents.fetched_bytes
            );
            if life == 1 {
                assert!(
                    stats.parents.hits_disk > 0 && stats.parents.misses == 0,
                    "a restart keeps what was read: {stats:?}"
                );
            }
            close_all(images).await;
            drop(installed);
            cache.close().await;
        });
    }
}

/// Content of the snapshot that [`make_parent`] takes.
fn content_of_gold() -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    for object in (0..16u64).filter(|object| ![3, 9].contains(object)) {
        let at = (object * OBJECT) as usize;
        content[at..at + OBJECT as usize / 2].copy_from_slice(&pattern(object, OBJECT / 2));
    }
    content
}

#[test]
fn copies_up_and_snapshots_of_clones_have_the_bytes_of_the_parent() {
    let world = world(2);
    for seed in 0..8 {
        let cluster = cluster(100 + seed);
        live(&world, async {
            let pool = ClonePool::of(&cluster, OBJECT, Duration::ZERO);
            let content = make_parent(&pool, 3).await;
            let cache = cache(1 << 20).await;
            let _installed = install_snapshot_cache(cache.clone());
            let images = open_all(&pool, 3).await;
            if seed % 2 == 1 {
                images.iter().for_each(|image| image.cache_own_blocks(true));
            }
            let mut wanted = vec![content; 3];
            let mut rng = Rng::new(seed);
            for step in 0..150 {
                let clone = rng.below(3) as usize;
                let at = rng.below(SIZE - 70_000);
                let len = rng.range(1..70_000);
                if rng.one_in(4) {
                    let data: Vec<u8> = pattern(step, len.next_multiple_of(8))[..len as usize].to_vec();
                    pool.write(&images[clone], at, &data).await.expect("a write");
                    wanted[clone][at as usize..][..data.len()].copy_from_slice(&data);
                } else {
                    let read = pool.read(&images[clone], Extent::new(at, len)).await.expect("a read");
                    assert!(read == wanted[clone][at as usize..][..len as usize], "seed {seed}, step {step}");
                }
                if rng.one_in(50) {
                    cache.clear().await.expect("cleared");
                }
            }
            for (image, wanted) in images.iter().zip(&wanted) {
                assert!(pool.read(image, Extent::new(0, SIZE)).await.expect("a read") == *wanted);
            }
            let stats = cache.stats();
            assert_eq!(stats.own.hits() > 0, seed % 2 == 1);
            assert!(stats.parents.hits_memory + stats.parents.hits_disk + stats.parents.hits_zero > 100, "{stats:?}");
            close_all(images).await;
            cache.close().await;
        });
    }
}

/// A clone of a clone: what the parent has not copied up is cached as its own parent's.
#[test]
fn chains_of_clones_share_their_oldest_parent() {
    let (cluster, world) = (cluster(3), world(3));
    live(&world, async {
        let pool = ClonePool::of(&cluster, OBJECT, Duration::ZERO);
        let content = make_parent(&pool, 1).await;
        let middle = pool.open("clone0").await.expect("opened");
        pool.write(&middle, 5 * OBJECT, &pattern(5555, 4096)).await.expect("a write");
        middle.close().await;
        let snap = pool.take_snapshot("clone0", "silver", Some(SIZE)).await.expect("a snapshot");
        for number in 0..2 {
            pool.clone(&format!("leaf{number}"), "clone0", snap).await.expect("a clone");
        }
        let mut wanted = content;
        wanted[5 * OBJECT as usize..][..4096].copy_from_slice(&pattern(5555, 4096));
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        for number in 0..2 {
            let leaf = pool.open(&format!("leaf{number}")).await.expect("opened");
            let before = cache.stats().parents.fetched_bytes;
            assert!(pool.read(&leaf, Extent::new(0, SIZE)).await.expect("a read") == wanted, "leaf {number}");
            let fetched = cache.stats().parents.fetched_bytes - before;
            // Once each object of the middle, which has one, and each of the base.
            let limit = if number == 0 { 2 * SIZE } else { 0 };
            assert!(fetched <= limit, "leaf {number}: {fetched} bytes");
            leaf.close().await;
        }
        // The middle copies an object up, after its snapshot: the snapshot still reads the same.
        let middle = pool.open("clone0").await.expect("opened");
        pool.write(&middle, 7 * OBJECT + 10, b"changed in the head").await.expect("a write");
        middle.close().await;
        let leaf = pool.open("leaf1").await.expect("opened");
        assert!(pool.read(&leaf, Extent::new(0, SIZE)).await.expect("a read") == wanted);
        leaf.close().await;
        cache.close().await;
    });
}

#[test]
fn without_a_cache_nothing_is_different() {
    let (cluster, world) = (cluster(4), world(4));
    live(&world, async {
        let pool = ClonePool::of(&cluster, OBJECT, Duration::ZERO);
        let content = make_parent(&pool, 1).await;
        let cache = cache(8 << 20).await;
        drop(install_snapshot_cache(cache.clone()));
        let image = pool.open("clone0").await.expect("opened");
        for _ in 0..2 {
            pool.pool.reset();
            assert!(pool.read(&image, Extent::new(0, SIZE)).await.expect("a read") == content);
            assert!(pool.pool.counts().1 >= SIZE, "read from the pool");
        }
        assert_eq!(cache.stats().parents.misses, 0);
        image.close().await;
        cache.close().await;
    });
    let reactor = world.reactor();
    world.crash(reactor, CrashKind::Kill);
}
