//! A crash at every point of a short run: what survives is what verifies, and the next life has right bytes.

use forebay_readcache::{DiskState, PART_LEN, ReadCache};
use forebay_sim::{CrashKind, CrashPolicy, Faults, World};

use crate::common::{Backend, DISK, PATH, live, options, written};

const SNAP: u64 = 8;

fn places(round: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..24).map(move |part| (round, part))
}

/// Two rounds of parts through a cache without memory, in one life.
async fn life(world: &World) {
    let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
    for round in 0..2 {
        for place in places(round) {
            backend.check_part(&cache, SNAP, place).await;
        }
        written(&cache).await;
        if round == 0 {
            cache.clear().await.expect("cleared");
        }
    }
    world.note(|| "the life is complete".into());
}

#[test]
fn a_crash_at_any_point_costs_reads_only() {
    let begin = |policy| {
        let world = World::new(9, Faults { crash: policy, ..Faults::none() });
        world.add_file(PATH, 0, 512);
        world
    };
    let whole = begin(CrashPolicy::Seeded);
    live(&whole, life(&whole));
    let points = whole.points();
    assert!(points > 50, "{points} points");
    let mut survived = 0;
    for point in 1..=points {
        let policies = [
            (CrashPolicy::Mixed { keep_ppm: 400_000, tear_ppm: 400_000 }, CrashKind::Power),
            (CrashPolicy::LoseAll, CrashKind::Power),
            (CrashPolicy::KeepAll, CrashKind::Kill),
        ];
        // Each point with one of them; every write is several points.
        let (policy, kind) = policies[point as usize % policies.len()];
        let world = begin(policy);
        world.crash_at_point(Some(point));
        let reactor = world.reactor();
        world.run(&reactor, life(&world)).expect_err("it crashes");
        world.crash(reactor, kind);
        live(&world, async {
            let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
            let stats = cache.stats();
            assert_eq!(stats.disk, DiskState::On, "point {point}");
            assert!(stats.disk_bytes <= DISK);
            for place in places(0).chain(places(1)).chain(places(0)) {
                backend.check_part(&cache, SNAP, place).await;
            }
            let stats = cache.stats();
            assert_eq!(stats.checksum_errors, 0, "point {point}: what a crash leaves is no error of the disk");
            survived += stats.parents.hits_disk * PART_LEN;
            cache.close().await;
        });
    }
    assert!(survived > 0);
}
