//! Own blocks of images through the read cache: never an older byte than without, whichever client has the lock.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Advice, BlockDevice, BlockRequest, Buf, ErrorKind, Extent};
use forebay_image::{Image, Images, OWN_BLOCKS_KEY, OwnBlockState, install_snapshot_cache};
use forebay_ram::cluster::RamCluster;
use forebay_rbd_lab::{ClonePool, POOL};
use forebay_reactor::{now, sleep, spawn, timeout};
use forebay_readcache::{CacheOptions, DiskOptions, ReadCache};
use forebay_sim::{Faults, Rng, World};

const OBJECT: u64 = 128 << 10;
const SIZE: u64 = 8 * OBJECT;
const PATH: &str = "/srv/cache";
/// Time after which a pool drops the watch of a silent client.
const WATCH_LIFE: Duration = Duration::from_secs(30);

fn live<T>(seed: u64, future: impl Future<Output = T>) -> T {
    let world = World::new(seed, Faults::none());
    world.add_file(PATH, 0, 512);
    let reactor = world.reactor();
    match world.run(&reactor, future) {
        Ok(result) => result,
        Err(stop) => panic!("{stop}\n{}", world.trace(100)),
    }
}

fn cluster(seed: u64) -> RamCluster {
    let cluster = RamCluster::new(seed, seed % 4);
    assert_eq!(cluster.add_pool("rbd"), POOL);
    cluster
}

async fn cache(memory: u64) -> Rc<ReadCache> {
    let disk = Some(DiskOptions { path: PATH.into(), size: 16 << 20 });
    ReadCache::open(CacheOptions { memory, disk }).await
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| (rng.bits() | 1).to_le_bytes()).take(len as usize).collect()
}

/// Opens an image of which own blocks are cached, with the lock.
async fn open_cached(pool: &ClonePool, name: &str) -> Rc<Image> {
    let image = pool.open(name).await.expect("opened");
    image.cache_own_blocks(true);
    image.take_lock().await.expect("the lock");
    while image.own_block_state() != OwnBlockState::Active {
        sleep(Duration::from_millis(1)).await;
    }
    image
}

/// Returns an image full of data, and its content.
async fn cached_image(pool: &ClonePool) -> (Rc<Image>, Vec<u8>) {
    pool.create("vm", SIZE).await.expect("created");
    let image = open_cached(pool, "vm").await;
    let content = pattern(1, SIZE);
    pool.write(&image, 0, &content).await.expect("a write");
    (image, content)
}

async fn submit(image: &Image, request: BlockRequest) -> forebay_block::Result<()> {
    image.submit(request).await.map(drop)
}

async fn check(pool: &ClonePool, image: &Image, content: &[u8]) {
    let read = pool.read(image, Extent::new(0, content.len() as u64)).await.expect("a read");
    if let Some(at) = read.iter().zip(content).position(|(found, wanted)| found != wanted) {
        panic!("byte {at} of {} is wrong", content.len());
    }
}

#[test]
fn what_is_read_again_is_not_read_from_the_pool() {
    live(1, async {
        let pool = ClonePool::of(&cluster(1), OBJECT, Duration::from_millis(2));
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        let (image, mut content) = cached_image(&pool).await;
        pool.pool.reset();
        let once = image.submit_advised(BlockRequest::Read(Extent::new(0, SIZE)), Advice::ONE_PASS).await;
        assert!(once.expect("a read").into_data().to_vec() == content);
        assert_eq!((pool.pool.counts().0, cache.stats().own.misses), (8, 0), "a copy does not fill the cache");
        for round in 0..3 {
            check(&pool, &image, &content).await;
            assert_eq!(pool.pool.counts().0, 16, "round {round}");
        }
        // A write costs the parts that it changes.
        pool.write(&image, 70_000, b"changed").await.expect("a write");
        content[70_000..70_007].copy_from_slice(b"changed");
        check(&pool, &image, &content).await;
        assert_eq!(pool.pool.counts().0, 17);
        let stats = cache.stats();
        assert_eq!((stats.own.misses, stats.invalidated, stats.parents.misses), (17, 1, 0), "{stats:?}");
        image.cache_own_blocks(false);
        check(&pool, &image, &content).await;
        assert_eq!((pool.pool.counts().0, image.own_block_state()), (25, OwnBlockState::Disabled));
        image.close().await;
        cache.close().await;
    });
}

#[test]
fn every_kind_of_change_is_seen() {
    live(2, async {
        let pool = ClonePool::of(&cluster(2), OBJECT, Duration::ZERO);
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        let (image, mut content) = cached_image(&pool).await;
        check(&pool, &image, &content).await;
        image.create_snapshot("gold").await.expect("a snapshot");
        let gold = content.clone();
        let at = |range: std::ops::Range<u64>| Extent::new(range.start, range.end - range.start);
        let (a, b) = (OBJECT + 1000, 3 * OBJECT + 5);
        submit(&image, BlockRequest::Discard(at(a..b))).await.expect("a discard");
        content[a as usize..b as usize].fill(0);
        check(&pool, &image, &content).await;
        let extent = at(4 * OBJECT + 7..4 * OBJECT + 70_000);
        let zeroes = BlockRequest::WriteZeroes { extent, no_unmap: true, fua: false };
        submit(&image, zeroes).await.expect("zeroes");
        content[extent.offset as usize..extent.end() as usize].fill(0);
        check(&pool, &image, &content).await;
        for offset in [5 * OBJECT + 9, 6 * OBJECT - 3] {
            let (expect, data) = (content[offset as usize..][..6].to_vec(), b"swap!!");
            let swap = |expect: &[u8]| BlockRequest::CompareAndWrite {
                offset,
                expect: Buf::copy_of(expect).into(),
                data: Buf::copy_of(data).into(),
                fua: false,
            };
            submit(&image, swap(&expect)).await.expect("compared and written");
            content[offset as usize..][..6].copy_from_slice(data);
            check(&pool, &image, &content).await;
            let refused = submit(&image, swap(&expect)).await.expect_err("it has changed");
            assert!(matches!(refused.kind(), ErrorKind::Mismatch(_)));
        }
        let many = [3u64, OBJECT + 5, OBJECT + 100_000, 7 * OBJECT].map(|offset| {
            content[offset as usize..][..5].copy_from_slice(b"many!");
            forebay_block::WriteExtent { offset, data: Buf::copy_of(b"many!").into() }
        });
        image.write_many(many.into(), false).await.expect("written");
        check(&pool, &image, &content).await;
        image.sparsify(4096, |_| {}).await.expect("sparsified");
        check(&pool, &image, &content).await;
        image.resize(2 * OBJECT + 10_000, true, |_| {}).await.expect("shrunk");
        content.truncate(2 * OBJECT as usize + 10_000);
        check(&pool, &image, &content).await;
        image.resize(SIZE, false, |_| {}).await.expect("grown");
        content.resize(SIZE as usize, 0);
        check(&pool, &image, &content).await;
        image.rollback("gold", |_| {}).await.expect("rolled back");
        check(&pool, &image, &gold).await;
        check(&pool, &image, &gold).await;
        let stats = cache.stats();
        assert!(stats.own.hits() > stats.own.misses && stats.own.bypassed == 0, "{stats:?}");
        image.close().await;
        cache.close().await;
    });
}

/// Two clients of one process share the cache, and take the lock from each other.
#[test]
fn a_lock_that_is_handed_over_again_and_again() {
    let mut counts = (0, 0);
    for seed in 0..12 {
        let (hits, invalidated) = live(seed, async {
            let cluster = cluster(seed);
            let pools = [0, 1].map(|_| ClonePool::of(&cluster, OBJECT, Duration::from_micros(50 * (seed % 3))));
            let cache = cache(*Rng::new(seed).pick(&[0, 4 << 16, 8 << 20])).await;
            let _installed = install_snapshot_cache(cache.clone());
            pools[0].create("vm", SIZE).await.expect("created");
            let images = [pools[0].open("vm").await.expect("opened"), pools[1].open("vm").await.expect("opened")];
            images.iter().for_each(|image| image.cache_own_blocks(true));
            let (mut content, mut rng) = (vec![0; SIZE as usize], Rng::new(seed));
            let mut client = 0;
            for step in 0..500 {
                client = if rng.one_in(12) { 1 - client } else { client };
                let (pool, image) = (&pools[client], &images[client]);
                let offset = rng.below(SIZE);
                let len = rng.range(1..100_000).min(SIZE - offset);
                let range = offset as usize..(offset + len) as usize;
                match rng.below(20) {
                    0 if rng.one_in(3) => {
                        submit(image, BlockRequest::Discard(Extent::new(offset, len))).await.expect("a discard");
                        content[range].fill(0);
                    }
                    0 => {
                        let data = pattern(seed * 1000 + step, len);
                        pool.write(image, offset, &data).await.expect("a write");
                        content[range].copy_from_slice(&data);
                    }
                    1 => {
                        let wanted = !rng.one_in(4);
                        image.cache_own_blocks(wanted);
                    }
                    2 if rng.one_in(4) => cluster.break_watches(),
                    2 if rng.one_in(4) => sleep(Duration::from_secs(rng.below(12))).await,
                    _ => {
                        let read = pool.read(image, Extent::new(offset, len)).await.expect("a read");
                        assert!(read == content[range], "seed {seed}, step {step}, client {client}");
                    }
                }
            }
            let stats = cache.stats();
            for image in images {
                image.close().await;
            }
            cache.close().await;
            (stats.own.hits(), stats.invalidated)
        });
        counts = (counts.0 + hits, counts.1 + invalidated);
    }
    assert!(counts.0 > 1000 && counts.1 > 50, "{counts:?}");
}

#[test]
fn while_the_watch_is_broken_nothing_is_read_from_the_cache() {
    live(4, async {
        let cluster = cluster(4);
        let pool = ClonePool::of(&cluster, OBJECT, Duration::ZERO);
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        let (image, content) = cached_image(&pool).await;
        check(&pool, &image, &content).await;
        pool.pool.reset();
        cluster.break_watches();
        assert_eq!(image.own_block_state(), OwnBlockState::Idle, "at once");
        check(&pool, &image, &content).await;
        assert_eq!(pool.pool.counts().0, 8);
        while image.own_block_state() != OwnBlockState::Active {
            sleep(Duration::from_millis(10)).await;
        }
        // The lock was held all the time, so the blocks are what they were.
        check(&pool, &image, &content).await;
        assert_eq!(pool.pool.counts().0, 8);
        image.close().await;
        cache.close().await;
    });
}

/// A client that is cut off from the cluster, and does not know it, returns nothing from the cache when another one may have
/// taken the lock over.
#[test]
fn a_client_that_is_cut_off_does_not_read_what_others_have_changed() {
    live(5, async {
        let cluster = cluster(5);
        let cut_off = cluster.client();
        let pools =
            [ClonePool::of_client(&cut_off, OBJECT, Duration::ZERO), ClonePool::of(&cluster, OBJECT, Duration::ZERO)];
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        let (image, content) = cached_image(&pools[0]).await;
        check(&pools[0], &image, &content).await;
        cut_off.die();
        let died = now();
        check(&pools[0], &image, &content).await;
        let expiring = cluster.clone();
        drop(spawn(async move {
            sleep(WATCH_LIFE).await;
            expiring.expire_watches();
        }));
        let other = pools[1].open("vm").await.expect("opened");
        let writing = spawn({
            let (pool, other) = (ClonePool::of(&cluster, OBJECT, Duration::ZERO), other.clone());
            async move { pool.write(&other, 0, b"by another client").await.map(|()| now()) }
        });
        let mut last = died;
        while died.elapsed() < Duration::from_secs(60) {
            match timeout(Duration::from_millis(1), pools[0].read(&image, Extent::new(0, 17))).await {
                Ok(read) => {
                    assert!(read.expect("a read") == content[..17]);
                    last = now();
                }
                Err(_) => assert_eq!(image.own_block_state(), OwnBlockState::Idle),
            }
            sleep(Duration::from_millis(100)).await;
        }
        let written = writing.await.expect("a write");
        let lease = last.since(died);
        assert!(lease > Duration::from_secs(2) && lease < Duration::from_secs(9), "{lease:?}");
        assert!(written.since(died) >= WATCH_LIFE, "{:?}", written.since(died));
    });
}

/// A client that is fenced although it is alive reads from its cache for a while: who fences it waits for that, if the image
/// asks for the cache.
#[test]
fn who_fences_a_living_owner_outlasts_its_reads() {
    for is_cached in [false, true] {
        live(6, async {
            let cluster = cluster(6);
            let pools = [0, 1].map(|_| ClonePool::of(&cluster, OBJECT, Duration::ZERO));
            let cache = cache(8 << 20).await;
            let _installed = install_snapshot_cache(cache.clone());
            let (image, content) = cached_image(&pools[0]).await;
            if is_cached {
                let set = Images::of(pools[1].backend()).set_metadata("vm", OWN_BLOCKS_KEY, b"true".to_vec()).await;
                set.expect("set");
            }
            check(&pools[0], &image, &content).await;
            let other = pools[1].open("vm").await.expect("opened");
            let begun = now();
            other.fence(&image.client().expect("a client"), Duration::from_secs(600)).await.expect("fenced");
            assert_eq!(begun.elapsed() >= Duration::from_secs(10), is_cached, "{:?}", begun.elapsed());
            pools[1].write(&other, 0, b"by another client").await.expect("a write");
            let read = pools[0].read(&image, Extent::new(0, 17)).await;
            if is_cached {
                assert_eq!(read.expect_err("it is fenced").kind(), ErrorKind::Fenced);
            }
        });
    }
}

/// A change whose caller has given up may happen later.
#[test]
fn after_a_change_of_unknown_outcome_nothing_is_cached() {
    live(7, async {
        let cluster = cluster(7);
        let pool = ClonePool::of(&cluster, OBJECT, Duration::ZERO);
        let cache = cache(8 << 20).await;
        let _installed = install_snapshot_cache(cache.clone());
        let (image, mut content) = cached_image(&pool).await;
        let hole = Extent::new(OBJECT, OBJECT / 2);
        submit(&image, BlockRequest::WriteZeroes { extent: hole, no_unmap: true, fua: false }).await.expect("zeroes");
        content[hole.offset as usize..hole.end() as usize].fill(0);
        check(&pool, &image, &content).await;
        let stall = cluster.stall(POOL, "rbd_data.");
        assert!(timeout(Duration::from_secs(1), image.sparsify(4096, |_| {})).await.is_err(), "it waits");
        assert_eq!(image.own_block_state(), OwnBlockState::Idle);
        check(&pool, &image, &content).await;
        drop(stall);
        sleep(Duration::from_secs(1)).await;
        let before = cache.stats().own;
        check(&pool, &image, &content).await;
        assert_eq!(cache.stats().own, before, "the cache is not used");
        image.close().await;
        cache.close().await;
    });
}

#[test]
fn without_a_read_cache_the_option_does_nothing() {
    live(8, async {
        let pool = ClonePool::of(&cluster(8), OBJECT, Duration::ZERO);
        pool.create("vm", SIZE).await.expect("created");
        let image = pool.open("vm").await.expect("opened");
        image.cache_own_blocks(true);
        pool.write(&image, 0, b"some").await.expect("a write");
        assert_eq!(image.own_block_state(), OwnBlockState::Unavailable);
        assert_eq!(pool.read(&image, Extent::new(0, 4)).await.expect("a read"), b"some");
        image.close().await;
    });
}
