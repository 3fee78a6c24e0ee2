//! The layer on disk: restarts, damage, errors, files of others.

use forebay_block::Extent;
use forebay_readcache::{CacheOptions, DiskOptions, DiskState, PART_LEN, ReadCache};
use forebay_sim::{CrashKind, DiskFaults, World};

use crate::common::{Backend, DISK, Kind, PATH, kind_of, live, options, world, written};

const SNAP: u64 = 8;
const OBJECTS: u64 = 2;

fn parts() -> impl Iterator<Item = (u64, u64)> {
    (0..OBJECTS).flat_map(|object| (0..64).map(move |part| (object, part)))
}

fn count_of(data: bool) -> u64 {
    let kinds = parts().map(|(object, part)| kind_of(SNAP, object, part));
    kinds.filter(|kind| matches!(kind, Kind::Data(_)) == data).count() as u64
}

async fn check_all(cache: &ReadCache, backend: &std::rc::Rc<Backend>) {
    for place in parts() {
        backend.check_part(cache, SNAP, place).await;
    }
}

/// Fills the cache in one life of the process.
fn fill(world: &World) {
    live(world, async {
        let (cache, backend) = (ReadCache::open(options(1 << 20)).await, Backend::new());
        check_all(&cache, &backend).await;
        written(&cache).await;
        let stats = cache.stats();
        assert_eq!(stats.disk_bytes, count_of(true) * PART_LEN, "{stats:?}");
        assert!(backend.bytes.get() > 0 && stats.disk == DiskState::On);
        cache.close().await;
    });
}

#[test]
fn after_a_restart_nothing_is_read_from_the_backend() {
    for kill in [false, true] {
        let world = world(1);
        fill(&world);
        if kill {
            let reactor = world.reactor();
            world.crash(reactor, CrashKind::Kill);
        }
        live(&world, async {
            let (cache, backend) = (ReadCache::open(options(1 << 20)).await, Backend::new());
            check_all(&cache, &backend).await;
            let stats = cache.stats();
            assert_eq!((backend.fetches.get(), stats.parents.misses, stats.stale), (0, 0, 0));
            assert_eq!(stats.parents.hits_disk, count_of(true), "{stats:?}");
            assert!(stats.parents.hits_zero >= count_of(false), "{stats:?}");
            cache.close().await;
        });
    }
}

#[test]
fn another_pool_snapshot_or_object_never_gets_the_part() {
    let world = world(2);
    fill(&world);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(1 << 20)).await, Backend::new());
        for snap in [SNAP + 1, SNAP + 2] {
            for place in parts() {
                backend.check_part(&cache, snap, place).await;
            }
        }
        assert!(backend.fetches.get() > 0);
        cache.close().await;
    });
}

#[test]
fn flipped_bits_cost_a_read_and_give_no_wrong_byte() {
    for seed in 0..20 {
        let world = world(seed);
        fill(&world);
        let flipped = world.flip_bits(PATH, 40);
        live(&world, async {
            let (cache, backend) = (ReadCache::open(options(1 << 20)).await, Backend::new());
            check_all(&cache, &backend).await;
            check_all(&cache, &backend).await;
            let stats = cache.stats();
            assert!(stats.disk != DiskState::None, "{stats:?}");
            assert!(
                stats.parents.misses > 0 && stats.parents.misses <= parts().count() as u64 * 2,
                "{flipped:?}: {stats:?}"
            );
            cache.close().await;
        });
    }
}

#[test]
fn a_part_in_a_wrong_slot_is_not_taken_for_another() {
    let world = world(3);
    world.set_disk_faults(PATH, Some(DiskFaults { misdirected_write_ppm: 200_000, ..DiskFaults::none() }));
    for _ in 0..3 {
        live(&world, async {
            let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
            for _ in 0..3 {
                check_all(&cache, &backend).await;
                written(&cache).await;
            }
            cache.close().await;
        });
    }
    assert!(world.damage_count() > 10);
}

#[test]
fn a_failing_disk_is_turned_off_and_reads_go_on() {
    let world = world(4);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
        check_all(&cache, &backend).await;
        written(&cache).await;
        for faults in [
            DiskFaults { read_error_ppm: 1_000_000, ..DiskFaults::none() },
            DiskFaults { read_flip_ppm: 1_000_000, ..DiskFaults::none() },
            DiskFaults { no_space_ppm: 1_000_000, ..DiskFaults::none() },
            DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() },
        ] {
            world.set_disk_faults(PATH, Some(faults.clone()));
            for snap in [SNAP, SNAP + 1, SNAP + 2] {
                for place in parts() {
                    backend.check_part(&cache, snap, place).await;
                }
                written(&cache).await;
            }
            let stats = cache.stats();
            let DiskState::Off(reason) = &stats.disk else { panic!("{faults:?}: {stats:?}") };
            assert!(reason.starts_with("8 errors, the last one: "), "{reason}");
            assert_eq!((stats.disk_bytes, stats.queued_bytes), (0, 0));
            // The disk is replaced.
            world.set_disk_faults(PATH, None);
            cache.clear().await.expect("cleared");
            assert_eq!(cache.stats().disk, DiskState::On);
            check_all(&cache, &backend).await;
            written(&cache).await;
            assert!(cache.stats().disk_bytes > 0);
        }
        cache.close().await;
    });
}

#[test]
fn a_few_errors_do_not_turn_it_off() {
    let world = world(5);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
        world.set_disk_faults(PATH, Some(DiskFaults::failing(1000)));
        for round in 0..60 {
            check_all(&cache, &backend).await;
            if round % 8 == 0 {
                written(&cache).await;
            }
        }
        let stats = cache.stats();
        assert!(stats.disk == DiskState::On && stats.disk_errors > 0, "{stats:?}");
        cache.close().await;
    });
}

#[test]
fn cleared_is_empty_also_after_a_restart() {
    let world = world(6);
    fill(&world);
    live(&world, async {
        let cache = ReadCache::open(options(1 << 20)).await;
        assert!(cache.stats().disk_bytes > 0 && cache.stats().flags > 0);
        cache.clear().await.expect("cleared");
        let stats = cache.stats();
        assert_eq!((stats.disk_bytes, stats.memory_bytes, stats.flags), (0, 0, 0));
        cache.close().await;
    });
    live(&world, async {
        let cache = ReadCache::open(options(1 << 20)).await;
        let stats = cache.stats();
        assert_eq!((stats.disk_bytes, stats.flags, stats.disk), (0, 0, DiskState::On));
        cache.close().await;
    });
    // And it fills again.
    fill(&world);
}

#[test]
fn a_file_of_others_is_left_alone() {
    let world = world(7);
    live(&world, async {
        let file = forebay_reactor::File::open(PATH, forebay_reactor::OpenOptions::read_write()).expect("a file");
        let text = forebay_block::Buf::copy_of(&[b'x'; 4096]);
        file.write_at(text, 0).await.expect("written");
        drop(file);
        let (cache, backend) = (ReadCache::open(options(1 << 20)).await, Backend::new());
        check_all(&cache, &backend).await;
        let DiskState::Off(reason) = cache.stats().disk else { panic!("in use") };
        assert!(reason.contains("something else than a read cache"), "{reason}");
        let error = cache.clear().await.expect_err("still not its own");
        assert!(error.to_string().contains("something else"), "{error}");
        cache.close().await;
    });
    assert_eq!(world.peek(PATH, 0, 4096), Some(vec![b'x'; 4096]));
}

#[test]
fn another_size_or_version_empties_the_file() {
    for change in ["size", "version"] {
        let world = world(8);
        fill(&world);
        let size = if change == "size" { DISK + (1 << 20) } else { DISK };
        live(&world, async {
            if change == "version" {
                let file = forebay_reactor::File::open(PATH, forebay_reactor::OpenOptions::read_write());
                let file = file.expect("a file");
                let mut start = file.read_exact_at(0, 4096).await.expect("read").to_vec();
                start[8] = 2;
                start[12..16].fill(0);
                let crc = forebay_accel::crc32c::crc32c(&start);
                start[12..16].copy_from_slice(&crc.to_le_bytes());
                file.write_at(forebay_block::Buf::copy_of(&start), 0).await.expect("written");
            }
            let disk = Some(DiskOptions { path: PATH.into(), size });
            let cache = ReadCache::open(CacheOptions { memory: 0, disk }).await;
            let stats = cache.stats();
            assert_eq!((stats.disk_bytes, stats.flags, &stats.disk), (0, 0, &DiskState::On), "{change}");
            let backend = Backend::new();
            check_all(&cache, &backend).await;
            written(&cache).await;
            assert!(cache.stats().disk_bytes > 0);
            cache.close().await;
        });
    }
}

#[test]
fn two_processes_do_not_share_a_file() {
    let world = world(9);
    live(&world, async {
        let first = ReadCache::open(options(1 << 20)).await;
        let second = ReadCache::open(options(1 << 20)).await;
        let DiskState::Off(reason) = second.stats().disk else { panic!("both") };
        assert!(reason.contains("another process"), "{reason}");
        first.close().await;
    });
}

#[test]
fn the_disk_is_bounded_and_keeps_what_is_used_again() {
    let world = world(10);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(0)).await, Backend::new());
        let hot: Vec<_> = parts().take(100).collect();
        for _ in 0..3 {
            for &place in &hot {
                backend.check_part(&cache, SNAP, place).await;
            }
            forebay_reactor::sleep(std::time::Duration::from_secs(1)).await;
        }
        // A scan over ten times the size of the disk.
        for object in 0..40 {
            let whole = Extent::new(0, crate::common::OBJECT);
            backend.read(&cache, SNAP + 2, object, whole).await.expect("a read");
            written(&cache).await;
        }
        let stats = cache.stats();
        assert!(stats.disk_bytes <= stats.disk_capacity && stats.disk_capacity <= DISK, "{stats:?}");
        assert!(stats.evicted_disk > 1000, "{stats:?}");
        let before = backend.fetches.get();
        for &place in &hot {
            backend.check_part(&cache, SNAP, place).await;
        }
        assert_eq!(backend.fetches.get(), before, "the hot set is still there");
        cache.close().await;
    });
}
