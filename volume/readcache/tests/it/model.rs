//! Random reads, restarts, damage and faults against the plain model: never a wrong byte.

use std::time::Duration;

use forebay_block::{ErrorKind, Extent};
use forebay_reactor::sleep;
use forebay_reactor::sync::join_all;
use forebay_readcache::ReadCache;
use forebay_sim::{CrashKind, Rng, World};

use crate::common::{Backend, OBJECT, PATH, content, faulty_world, options};

/// Several lives of a process on one file, which is damaged in between and by its disk.
fn run(seed: u64) -> (u64, u64) {
    let mut rng = Rng::new(seed);
    let world = faulty_world(seed, &mut rng);
    let (mut hits, mut misses) = (0, 0);
    for _ in 0..rng.range(2..6) {
        let memory = *rng.pick(&[0, 4 << 16, 8 << 20]);
        let (hit, missed) = life(&world, &mut rng, memory);
        (hits, misses) = (hits + hit, misses + missed);
        match rng.below(4) {
            0 => drop(world.flip_bits(PATH, rng.range(1..30) as usize)),
            1 => drop(world.set_bad_sector(PATH, rng.below(32 << 10) * 512)),
            _ => {}
        }
    }
    (hits, misses)
}

fn life(world: &World, rng: &mut Rng, memory: u64) -> (u64, u64) {
    let reactor = world.reactor();
    let crashes = rng.coin();
    if crashes {
        world.crash_at_point(Some(world.points() + rng.range(1..2000)));
    }
    let steps = rng.range(20..80);
    let mut counts = (0, 0);
    let ended = world.run(&reactor, async {
        let (cache, backend) = (ReadCache::open(options(memory)).await, Backend::new());
        backend.delay.set(Duration::from_micros(rng.below(500)));
        for _ in 0..steps {
            let reads: Vec<_> = (0..rng.range(1..8))
                .map(|_| {
                    let (snap, object) = (rng.below(3), rng.below(6));
                    let offset = rng.below(OBJECT);
                    let most = 1 << rng.range(1..21);
                    let len = rng.range(1..most.max(2)).min(OBJECT - offset);
                    (snap, object, Extent::new(offset, len))
                })
                .collect();
            backend.fail(rng.one_in(20).then_some(ErrorKind::Io));
            let results = join_all(reads.iter().map(|&(snap, object, extent)| {
                let (cache, backend) = (&cache, &backend);
                Box::pin(async move { backend.read(cache, snap, object, extent).await })
            }))
            .await;
            for ((snap, object, extent), read) in reads.into_iter().zip(results) {
                match read {
                    Ok(read) => assert!(
                        read == content(snap, object, extent),
                        "seed {}: wrong bytes of {extent:?} in object {object} at snapshot {snap}",
                        world.seed()
                    ),
                    Err(error) => assert_eq!(error.context(), "injected"),
                }
            }
            match rng.below(30) {
                0 => drop(cache.clear().await),
                1 => sleep(Duration::from_millis(700)).await,
                _ => {}
            }
        }
        let stats = cache.stats();
        counts = (stats.parents.hits_memory + stats.parents.hits_disk + stats.parents.hits_zero, stats.parents.misses);
        if rng.coin() {
            cache.close().await;
        }
    });
    let kind = if ended.is_ok() || rng.coin() { CrashKind::Kill } else { CrashKind::Power };
    world.crash(reactor, kind);
    counts
}

#[test]
fn random_lives_never_give_a_wrong_byte() {
    let (mut hits, mut misses) = (0, 0);
    for seed in 0..60 {
        let (hit, missed) = run(seed);
        (hits, misses) = (hits + hit, misses + missed);
    }
    assert!(hits > 1000 && misses > 1000, "{hits} hits, {misses} misses");
}

#[test]
fn a_seed_replays() {
    assert_eq!(run(17), run(17));
}
