//! The simulator itself: it replays, each fault can be seen, and what was synced is never touched.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{
    Buf, BufMut, ByteRange, File, FileRange, OpenOptions, fs, now, sleep, spawn, timeout, yield_now,
};
use forebay_sim::{CrashKind, CrashPolicy, DiskFaults, Faults, Rng, Stop, World};

const DISK: &str = "/dev/a";
const SIZE: u64 = 1 << 20;

fn world(seed: u64, disk: DiskFaults) -> World {
    let world = World::new(seed, Faults { disk, ..Faults::none() });
    world.add_disk(DISK, SIZE, 512);
    world
}

fn disk() -> File {
    File::open(DISK, OpenOptions::read_write().direct()).expect("the disk opens")
}

fn page(byte: u8) -> Buf {
    Buf::copy_of(&[byte; 4096])
}

/// Eight tasks that write, read and sync anywhere; ends with the trace's hash.
fn busy(seed: u64) -> (u64, u64, Vec<u8>) {
    let world = world(seed, DiskFaults { stall_ppm: 10_000, ..DiskFaults::failing(10_000) });
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                spawn(async move {
                    let disk = disk();
                    let mut rng = Rng::new(task);
                    for step in 0..50 {
                        let offset = rng.below(SIZE / 4096) * 4096;
                        let _ = match rng.below(4) {
                            0 => disk.sync_data().await,
                            1 => disk.read_exact_at(offset, 4096).await.map(drop),
                            2 => disk.punch_hole(offset, 4096).await,
                            _ => disk.write_at(page(step), offset).await,
                        };
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    });
    assert_eq!(ran, Ok(()));
    world.crash(reactor, CrashKind::Power);
    (world.trace_hash(), world.now(), world.peek(DISK, 0, SIZE as usize).expect("the disk is there"))
}

#[test]
fn a_seed_replays_to_the_last_bit() {
    for seed in 0..10 {
        assert!(busy(seed) == busy(seed), "seed {seed}");
    }
    assert_ne!(busy(1).0, busy(2).0);
}

/// Writes with `faults` until something fails or `rounds` are over; what the operations said.
fn outcomes(faults: DiskFaults, rounds: u8) -> (World, Vec<Result<(), ErrorKind>>) {
    let world = world(1, faults);
    let reactor = world.reactor();
    let results = world.run(&reactor, async {
        let disk = disk();
        let mut results = Vec::new();
        for round in 0..rounds {
            let offset = u64::from(round) * 4096;
            results.push(disk.write_at(page(round), offset).await);
            results.push(disk.sync_data().await);
            results.push(disk.read_exact_at(offset, 4096).await.map(drop));
        }
        results.into_iter().map(|result| result.map_err(|error| error.kind())).collect()
    });
    let results = results.expect("the run ends");
    (world, results)
}

#[test]
fn errors_reach_who_asked() {
    let eio = std::io::Error::from_raw_os_error(5).kind();
    let (_, good) = outcomes(DiskFaults::none(), 100);
    assert!(good.iter().all(Result::is_ok));
    for faults in [
        DiskFaults { read_error_ppm: 50_000, ..DiskFaults::none() },
        DiskFaults { write_error_ppm: 50_000, ..DiskFaults::none() },
        DiskFaults { sync_error_ppm: 50_000, ..DiskFaults::none() },
    ] {
        let (_, results) = outcomes(faults, 100);
        let failed = results.iter().filter(|result| **result == Err(eio)).count();
        assert!((1..50).contains(&failed), "{failed}");
    }
    let (_, results) = outcomes(DiskFaults { no_space_ppm: 50_000, ..DiskFaults::none() }, 100);
    assert!(results.contains(&Err(ErrorKind::StorageFull)));
    let (_, results) = outcomes(DiskFaults { life: Some(100), ..DiskFaults::none() }, 100);
    assert!(results[..100].iter().all(Result::is_ok) && results[100..].iter().all(|result| *result == Err(eio)));
}

#[test]
fn stalls_take_long() {
    let (quick, _) = outcomes(DiskFaults::none(), 50);
    let (slow, _) = outcomes(DiskFaults::stalling(), 50);
    assert!(slow.now() > quick.now() + Duration::from_millis(1).as_nanos() as u64);
}

#[test]
fn damage_is_done_and_counted() {
    let content = |faults| {
        let (world, results) = outcomes(faults, 100);
        assert!(results.iter().all(Result::is_ok), "silent faults are silent");
        let bytes = world.peek(DISK, 0, 100 * 4096).expect("the disk is there");
        let wrong =
            (0..100_usize).filter(|&round| bytes[round * 4096..][..4096].iter().any(|&b| b != round as u8)).count();
        (wrong, world.damage_count())
    };
    assert_eq!(content(DiskFaults::none()), (0, 0));
    let (wrong, counted) = content(DiskFaults { write_flip_ppm: 100_000, ..DiskFaults::none() });
    assert!(wrong > 0 && wrong <= counted);
    let (wrong, counted) = content(DiskFaults { lost_write_ppm: 100_000, ..DiskFaults::none() });
    assert!(wrong > 0 && wrong <= counted);
    let (wrong, counted) = content(DiskFaults { misdirected_write_ppm: 100_000, ..DiskFaults::none() });
    assert!(wrong > 0 && wrong <= counted);
    let (wrong, counted) = content(DiskFaults { read_flip_ppm: 100_000, ..DiskFaults::none() });
    assert!(wrong == 0 && counted > 0, "flips in reads do not stay");
}

#[test]
fn bits_flip_and_sectors_go_bad_where_told() {
    let world = world(3, DiskFaults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let disk = disk();
        disk.write_at(page(7), 8192).await.expect("a write");
        let places = world.flip_bits(DISK, 3);
        assert!(places.len() == 3 && places.iter().all(|&at| (8192..12288).contains(&at)));
        let read = disk.read_exact_at(8192, 4096).await.expect("a read");
        assert!((1..=3).contains(&read.iter().filter(|&&byte| byte != 7).count()));
        assert!(world.set_bad_sector(DISK, 9000));
        disk.read_exact_at(8192, 4096).await.expect_err("a bad sector");
        disk.read_exact_at(4096, 4096).await.expect("its neighbour");
        disk.write_at(page(8), 8192).await.expect("a write");
        disk.read_exact_at(8192, 4096).await.expect("written again, it is good again");
    });
    assert_eq!(ran, Ok(()));
}

#[test]
fn a_crash_at_every_point_keeps_what_was_synced_and_only_that() {
    // Blocks 0..8 get versions in turn; the task says which version of each was synced last.
    let run = |seed: u64, point: Option<u64>| {
        let world = world(seed, DiskFaults::none());
        world.crash_at_point(point);
        let synced = Rc::new(RefCell::new([0_u8; 8]));
        let begun = Rc::new(Cell::new(0));
        let reactor = world.reactor();
        let ended = world.run(&reactor, async {
            let disk = disk();
            for version in 1..=3 {
                begun.set(version);
                let writes: Vec<_> = (0..8)
                    .map(|block| {
                        let disk = disk.clone();
                        spawn(async move {
                            if block % 4 == 3 {
                                disk.write_durable_at(page(version), block * 4096).await
                            } else {
                                disk.write_at(page(version), block * 4096).await
                            }
                        })
                    })
                    .collect();
                for (block, write) in writes.into_iter().enumerate() {
                    write.await.expect("a write");
                    if block % 4 == 3 {
                        synced.borrow_mut()[block] = version;
                    }
                }
                disk.sync_data().await.expect("a sync");
                *synced.borrow_mut() = [version; 8];
            }
        });
        world.crash(reactor, CrashKind::Power);
        let bytes = world.peek(DISK, 0, 8 * 4096).expect("the disk is there");
        for (block, content) in bytes.chunks(4096).enumerate() {
            for sector in content.chunks(512) {
                let least = synced.borrow()[block];
                let found = sector[0];
                assert!(sector.iter().all(|&byte| byte == found), "seed {seed}, {point:?}: a sector is torn");
                assert!((least..=begun.get()).contains(&found), "seed {seed}, {point:?}: {found} for {least}");
            }
        }
        (ended, world.points(), bytes)
    };
    let (ended, points, _) = run(1, None);
    assert_eq!((ended, points), (Ok(()), 54), "a point for each submit and each completion of 27 operations");
    let (mut torn, mut old, mut new) = (0, 0, 0);
    for seed in 0..20 {
        for point in 1..=points {
            let (ended, _, bytes) = run(seed, Some(point));
            assert_eq!(ended, Err(Stop::Crash(point)));
            let versions = bytes.chunks(512).map(|sector| sector[0]);
            match (versions.clone().min(), versions.max()) {
                (Some(low), Some(high)) if low != high => torn += 1,
                (Some(1..), _) => new += 1,
                _ => old += 1,
            }
        }
    }
    assert!(torn > 100 && old > 10 && new > 100, "{torn} {old} {new}");
}

#[test]
fn crash_policies_do_what_they_say() {
    for (policy, expected) in [(CrashPolicy::LoseAll, 0), (CrashPolicy::KeepAll, 5)] {
        let world = World::new(1, Faults { crash: policy, ..Faults::none() });
        world.add_disk(DISK, SIZE, 4096);
        let reactor = world.reactor();
        let ended = world.run(&reactor, async {
            disk().write_at(page(5), 0).await.expect("a write");
            world.power_off();
            std::future::pending::<()>().await;
        });
        assert_eq!(ended, Err(Stop::Crash(2)));
        world.crash(reactor, CrashKind::Power);
        assert_eq!(world.peek(DISK, 0, 4096), Some(vec![expected; 4096]));
    }
}

fn range(number: u64, requests: usize) -> FileRange {
    FileRange { name: number.to_string(), bytes: ByteRange { offset: number << 16, len: 1 << 16 }, requests }
}

#[test]
fn ranges_are_locked_apart_and_bounded() {
    let world = world(1, DiskFaults::none());
    let locked = OpenOptions::read_write().lock();
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let one = File::open_range(DISK, &range(1, 8), locked).expect("free");
        let two = File::open_range(DISK, &range(2, 8), locked).expect("another range");
        let again = File::open_range(DISK, &range(1, 8), locked).map(drop).expect_err("it is open");
        let whole = File::open(DISK, locked).map(drop).expect_err("ranges of it are open");
        assert_eq!((again.kind(), whole.kind()), (ErrorKind::WouldBlock, ErrorKind::WouldBlock));
        one.write_at(page(1), 0).await.expect("a write");
        two.write_at(page(2), (1 << 16) - 4096).await.expect("a write");
        one.punch_hole(0, 1 << 16).await.expect("a device discards");
        assert!(one.punch_hole(0, (1 << 16) + 4096).await.is_err(), "beyond the range");
        drop((one, two));
        let whole = File::open(DISK, locked).expect("free");
        let range = File::open_range(DISK, &range(1, 8), locked).map(drop).expect_err("the whole is open");
        assert_eq!(range.kind(), ErrorKind::WouldBlock);
        whole.sync_data().await.expect("synced");
    });
    assert_eq!(ran, Ok(()));
    assert_eq!(world.peek(DISK, (3 << 16) - 4096, 4096), Some(vec![2; 4096]));
}

#[test]
fn a_range_has_no_more_requests_in_flight_than_it_may() {
    let slow = DiskFaults { read_latency: 1_000..90_000, write_latency: 1_000..90_000, ..DiskFaults::none() };
    for (one, two) in [(1, 1), (2, 5), (64, 1)] {
        let world = world(one as u64, slow.clone());
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let mut most = Vec::new();
            for used in [vec![(1, one)], vec![(2, two)], vec![(1, one), (2, two)]] {
                world.take_most_in_flight(DISK);
                let tasks: Vec<_> = used
                    .into_iter()
                    .flat_map(|(number, requests)| {
                        let file = File::open_range(DISK, &range(number, requests), OpenOptions::read_write());
                        let file = file.expect("the range opens");
                        (0..100).map(move |i| {
                            let file = file.clone();
                            spawn(async move {
                                let at = i % 16 * 4096;
                                let write = file.write_at(page(i as u8), at);
                                // Some give up while they wait, or while they are in flight.
                                match i % 7 {
                                    0 => drop(timeout(Duration::from_nanos(i * 300), write).await),
                                    _ => write.await.expect("written"),
                                }
                                file.read_exact_at(at, 4096).await.expect("read");
                            })
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                most.push(world.take_most_in_flight(DISK).expect("the disk"));
            }
            most
        });
        assert_eq!(ran, Ok(vec![one, two, one + two]));
    }
}

#[test]
fn locks_end_with_the_file_and_with_the_machine() {
    let world = world(1, DiskFaults::none());
    let locked = OpenOptions::read_write().lock();
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let first = File::open(DISK, locked).expect("the first gets it");
        let second = File::open(DISK, locked).map(drop).expect_err("the second does not");
        assert_eq!(second.kind(), ErrorKind::WouldBlock);
        File::open(DISK, OpenOptions::read()).map(drop).expect("without the lock it opens");
        drop(first);
        File::open(DISK, locked).map(drop).expect("given back");
        let held = File::open(DISK, locked).expect("and again");
        spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        yield_now().await;
    });
    assert_eq!(ran, Ok(()));
    world.crash(reactor, CrashKind::Kill);
    let reactor = world.reactor();
    let ran = world.run(&reactor, async { File::open(DISK, locked).map(drop).map_err(|error| error.kind()) });
    assert_eq!(ran, Ok(Ok(())));
}

#[test]
fn files_grow_shrink_and_need_their_directory_synced() {
    let (mut there, mut gone) = (0, 0);
    for seed in 0..40 {
        let world = World::new(seed, Faults { files_capacity: Some(1 << 16), ..Faults::none() });
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let create = OpenOptions::read_write().create_new();
            let kept = File::open("/d/kept", create).expect("created");
            assert_eq!(File::open("/d/kept", create).map(drop).expect_err("twice").kind(), ErrorKind::AlreadyExists);
            assert_eq!(
                File::open("/d/no", OpenOptions::read()).map(drop).expect_err("none").kind(),
                ErrorKind::NotFound
            );
            fs::sync_dir("/d").expect("a directory");
            kept.set_size(100_000).expect("a hole costs nothing");
            kept.write_at(page(1), 50_000).await.expect("room");
            let (got, buf) = kept.read_at(BufMut::with_capacity(4096), 99_000).await;
            assert_eq!((got.expect("short at the end"), buf.len()), (1000, 1000));
            for index in 0.. {
                match kept.write_at(page(1), index * 4096).await {
                    Ok(()) => assert!(index < 17),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::StorageFull);
                        break;
                    }
                }
            }
            kept.punch_hole(0, 8192).await.expect("a hole");
            kept.write_at(page(1), 0).await.expect("room again");
            kept.set_size(4096).expect("shorter");
            kept.sync_data().await.expect("a sync");
            File::open("/d/perhaps", create).expect("created");
        });
        assert_eq!(ran, Ok(()));
        world.crash(reactor, CrashKind::Power);
        assert_eq!(world.peek("/d/kept", 0, 8192).map(|bytes| bytes[4095..4097].to_vec()), Some(vec![1, 0]));
        match world.peek("/d/perhaps", 0, 0) {
            Some(_) => there += 1,
            None => gone += 1,
        }
    }
    assert!(there > 5 && gone > 5, "{there} {gone}");
}

#[test]
fn direct_io_must_be_aligned() {
    let world = world(1, DiskFaults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let disk = disk();
        let odd = disk.write_at(Buf::copy_of(&[1; 100]), 0).await.expect_err("100 bytes");
        assert_eq!(odd.kind(), ErrorKind::InvalidInput);
        disk.write_at(Buf::copy_of(&[1; 512]), 100).await.expect_err("offset 100");
        disk.write_at(Buf::copy_of(&[1; 1024]).slice(1..513), 0).await.expect_err("memory");
        disk.write_at(page(1), SIZE).await.expect_err("past the end");
        disk.write_at(page(1), SIZE - 4096).await.expect("at the end");
    });
    assert_eq!(ran, Ok(()));
}

#[test]
fn time_jumps_and_a_spinning_task_is_no_dead_end() {
    let world = world(1, DiskFaults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let before = now();
        sleep(Duration::from_secs(86_400)).await;
        assert_eq!(before.elapsed(), Duration::from_secs(86_400));
        let written = Rc::new(Cell::new(false));
        let flag = written.clone();
        spawn(async move {
            disk().write_at(page(1), 0).await.expect("a write");
            flag.set(true);
        });
        while !written.get() {
            yield_now().await;
        }
        timeout(Duration::from_secs(1), std::future::pending::<()>()).await.expect_err("a timeout");
    });
    assert_eq!(ran, Ok(()));
}

#[test]
fn a_deadlock_is_told() {
    let world = world(1, DiskFaults::none());
    let reactor = world.reactor();
    assert_eq!(world.run(&reactor, std::future::pending::<()>()), Err(Stop::Deadlock));
    assert!(world.trace(10).contains("stop"));
}
