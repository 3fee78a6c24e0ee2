//! Tests of columns that are moved: to added devices, and away from devices that are removed.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions, sleep, spawn};
use forebay_sim::{CrashKind, CrashPolicy, Faults, Stop, World};
use forebay_store::{CheckOptions, DeviceSetOptions, Store, StoreOptions};

use crate::common::{all_active, run, scrub};

const MIB: u64 = 1 << 20;
/// Bytes of a column.
const COLUMN: u64 = 64 << 10;
/// Bytes of an object.
const OBJECT: usize = 64 << 10;

fn path(number: usize) -> PathBuf {
    PathBuf::from(format!("/disk{number}"))
}

fn paths(numbers: impl IntoIterator<Item = usize>) -> Vec<PathBuf> {
    numbers.into_iter().map(path).collect()
}

/// Creates a machine with disks of so many slots each, and a store of `data` and `parity` columns on the first `used`.
fn machine(slots: &[u64], used: usize, data: usize, parity: usize) -> World {
    machine_with(Faults::none(), slots, used, data, parity)
}

fn machine_with(faults: Faults, slots: &[u64], used: usize, data: usize, parity: usize) -> World {
    let world = World::new(1, faults);
    for (number, slots) in slots.iter().enumerate() {
        world.add_disk(path(number), MIB + slots * COLUMN, 4096);
    }
    run(&world, async {
        let options = DeviceSetOptions { data, parity, column_size: COLUMN, ..DeviceSetOptions::default() };
        Store::init_devices(&paths(0..used), &options, |_, _| {}).await.expect("init");
    });
    world
}

async fn open(disks: impl IntoIterator<Item = usize>) -> Rc<Store> {
    let options = StoreOptions { repair_rate: 0, accept_missing: true, ..StoreOptions::default() };
    Store::open_devices(&paths(disks), None, options).await.expect("open")
}

fn content(number: u64, version: u8) -> Vec<u8> {
    (0..OBJECT).map(|i| (i / 4096) as u8 ^ number as u8 ^ version).collect()
}

async fn write(store: &Store, number: u64, version: u8) -> Result<()> {
    let data = Buf::copy_of(&content(number, version)).into();
    let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
    store.submit(&ObjectName::new(format!("o{number}")), write).await.map(drop)
}

async fn has(store: &Store, number: u64, version: u8) {
    let read = ObjectRead::head(0, OBJECT as u64);
    let found = store.read(&ObjectName::new(format!("o{number}")), read).await.expect("read").fill(read.extent);
    assert!(found.to_vec() == content(number, version), "object {number}");
}

async fn remove(store: &Store, number: u64) {
    store.submit(&ObjectName::new(format!("o{number}")), Transaction::of(ObjectOp::Remove)).await.expect("removed");
}

/// Writes objects from number `first` on until the store is full. Returns the number of the first that did not fit.
async fn fill(store: &Store, first: u64) -> u64 {
    let mut number = first;
    loop {
        match write(store, number, 0).await {
            Ok(()) => number += 1,
            Err(error) if error.kind() == ErrorKind::NoSpace => return number,
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Waits until no column is to be moved.
async fn settled(store: &Store) {
    let is_settled = || {
        let moves = store.column_moves();
        assert_eq!(moves.blocked, "", "{moves:?}");
        !moves.pending
    };
    while !is_settled() {
        sleep(Duration::from_millis(1)).await;
    }
}

/// Reads everything with every choice of one disk missing, and checks the store.
fn survives_without_each(world: &World, disks: &[usize], objects: impl Iterator<Item = u64> + Clone) {
    for missing in disks {
        run(world, async {
            let options = StoreOptions { read_only: true, accept_missing: true, ..StoreOptions::default() };
            let left = paths(disks.iter().copied().filter(|disk| disk != missing));
            let store = Store::open_devices(&left, None, options).await.expect("open");
            for number in objects.clone() {
                has(&store, number, 0).await;
            }
        });
    }
    run(world, async {
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        let report =
            Store::check_devices(&paths(disks.iter().copied()), None, options, |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
    });
}

#[test]
fn one_device_added_to_full_ones_is_used() {
    let world = machine(&[60; 5], 4, 3, 1);
    let objects = run(&world, async {
        let store = open(0..4).await;
        let full = fill(&store, 0).await;
        assert_eq!(store.add_device(&path(4), 0, false).await.expect("done"), 4);
        assert_eq!(store.stats().segments, 60, "each segment needs four devices");
        assert!(store.column_moves().columns_left > 0);
        settled(&store).await;
        assert_eq!(store.stats().segments, 75, "five times sixty slots, in fours");
        let moves = store.column_moves();
        assert!((40..50).contains(&moves.moved), "15 slots each are to be free on four devices: {moves:?}");
        let objects = fill(&store, full).await;
        assert!(objects * 100 > full * 122, "{full} and {objects} objects");
        for number in 0..objects {
            has(&store, number, 0).await;
        }
        assert_eq!(scrub(&store).await, (0, 0));
        objects
    });
    survives_without_each(&world, &[0, 1, 2, 3, 4], 0..objects);
}

#[test]
fn a_device_is_removed_while_others_have_space_for_its_columns() {
    // Fifty segments are possible on four of them.
    let world = machine(&[50, 50, 50, 30, 50], 4, 2, 1);
    let objects = run(&world, async {
        let store = open(0..4).await;
        assert_eq!(store.add_device(&path(4), 0, false).await.expect("done"), 4);
        settled(&store).await;
        let before = store.stats().segments;
        for number in 0..60 {
            write(&store, number, 1).await.expect("written");
        }
        store.remove_devices(&[3]).await.expect("begun");
        for error in [
            store.add_device(&path(3), 0, false).await.map(drop).expect_err("busy"),
            store.grow(&[], 0, |_, _| {}).await.map(drop).expect_err("busy"),
            store.replace_device(3, &path(3), true).await.map(drop).expect_err("busy"),
        ] {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        }
        // Overwritten meanwhile.
        for number in 0..60 {
            write(&store, number, 0).await.expect("written");
        }
        settled(&store).await;
        let devices = store.devices();
        assert_eq!(devices.iter().map(|device| device.number).collect::<Vec<_>>(), [0, 1, 2, 4]);
        assert_eq!(store.stats().segments, before.min(66));
        for number in 0..60 {
            has(&store, number, 0).await;
        }
        assert_eq!(scrub(&store).await, (0, 0));
        // It is no store any more, but what was in its columns is still there.
        let error = store.add_device(&path(3), 0, false).await.expect_err("data of the store");
        assert!(error.to_string().contains("unknown data"), "{error}");
        store.add_device(&path(3), 0, true).await.expect("overwritten");
        settled(&store).await;
        assert_eq!(store.devices().len(), 5);
        60
    });
    survives_without_each(&world, &[0, 1, 2, 3, 4], 0..objects);
}

#[test]
fn segments_without_space_are_emptied_and_given_up() {
    let world = machine(&[60; 4], 4, 2, 1);
    run(&world, async {
        let store = open(0..4).await;
        assert_eq!(store.stats().segments, 80);
        let full = fill(&store, 0).await;
        let error = store.remove_devices(&[1]).await.expect_err("too much is stored");
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("bytes are used"), "{error}");
        // Every third object, so that all segments keep some data.
        for number in (0..full).filter(|number| number % 3 != 0) {
            remove(&store, number).await;
        }
        store.remove_devices(&[1]).await.expect("begun");
        let capacity = store.usage().await.expect("usage").capacity;
        settled(&store).await;
        assert_eq!((store.stats().segments, store.devices().len()), (60, 3));
        assert!(store.usage().await.expect("usage").capacity < capacity);
        assert_eq!(scrub(&store).await, (0, 0));
        drop(store);
    });
    run(&world, async {
        let store = open([0, 2, 3]).await;
        assert_eq!((store.stats().segments, store.degraded()), (60, None));
        let full = fill(&store, 10_000).await;
        assert!(full > 10_040, "{full}");
        for number in 10_000..full {
            remove(&store, number).await;
        }
        store.close().await.expect("close");
    });
    survives_without_each(&world, &[0, 2, 3], (0..60).filter(|number| number % 3 == 0));
}

#[test]
fn a_dead_device_is_removed() {
    let world = machine(&[60; 4], 4, 2, 1);
    run(&world, async {
        let store = open(0..4).await;
        for number in 0..80 {
            write(&store, number, 0).await.expect("written");
        }
        store.close().await.expect("close");
    });
    run(&world, async {
        let store = open([0, 1, 3]).await;
        let error = store.remove_devices(&[0]).await.expect_err("another one is away");
        assert!(error.to_string().contains("device 2") && error.to_string().contains("is away"), "{error}");
        store.remove_devices(&[2]).await.expect("begun");
        settled(&store).await;
        assert_eq!((store.devices().len(), store.degraded()), (3, None));
        assert_eq!(scrub(&store).await, (0, 0));
    });
    survives_without_each(&world, &[0, 1, 3], 0..80);
    // It is no device of the store any more.
    run(&world, async {
        let store = open(0..4).await;
        assert_eq!((store.devices().len(), store.degraded()), (3, None));
    });
}

#[test]
fn a_removal_that_is_impossible_is_refused() {
    let world = machine(&[40; 4], 3, 2, 1);
    run(&world, async {
        let store = open(0..3).await;
        let error = store.remove_devices(&[1]).await.expect_err("three are needed");
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("2+1 needs 3"), "{error}");
        store.add_device(&path(3), 0, false).await.expect("added");
        settled(&store).await;
        assert_eq!(store.remove_devices(&[9]).await.expect_err("no such device").kind(), ErrorKind::NotFound);
        assert_eq!(store.cancel_removal(&[1]).await.expect_err("it stays").kind(), ErrorKind::NotFound);
        assert!(store.devices().iter().all(|device| !device.leaving));
    });
}

#[test]
fn a_removal_is_cancelled() {
    let world = machine(&[60; 4], 4, 2, 1);
    let objects = run(&world, async {
        let store = open(0..4).await;
        for number in 0..80 {
            write(&store, number, 0).await.expect("written");
        }
        let capacity = store.usage().await.expect("usage").capacity;
        store.remove_devices(&[1]).await.expect("begun");
        while store.column_moves().moved < 20 {
            sleep(Duration::from_millis(1)).await;
        }
        store.cancel_removal(&[]).await.expect("cancelled");
        settled(&store).await;
        assert_eq!(store.devices().len(), 4);
        assert_eq!((store.stats().segments, store.usage().await.expect("usage").capacity), (80, capacity));
        fill(&store, 80).await
    });
    survives_without_each(&world, &[0, 1, 2, 3], 0..objects);
}

#[test]
fn columns_are_moved_under_load() {
    let world = machine(&[60; 6], 4, 2, 1);
    run(&world, async {
        let store = open(0..4).await;
        for number in 0..40 {
            write(&store, number, 0).await.expect("written");
        }
        let stop = Rc::new(Cell::new(false));
        let load = spawn({
            let (store, stop) = (store.clone(), stop.clone());
            async move {
                let (mut version, mut versions) = (1_u8, [0_u8; 40]);
                while !stop.get() {
                    for number in 0..40 {
                        write(&store, number, version).await.expect("written");
                        versions[number as usize] = version;
                        let other = (number * 7) % 40;
                        has(&store, other, versions[other as usize]).await;
                    }
                    version = version.wrapping_add(1);
                }
                versions
            }
        });
        for number in [4, 5] {
            store.add_device(&path(number), 0, false).await.expect("added");
            settled(&store).await;
        }
        assert_eq!(store.stats().segments, 120);
        for number in [0, 2, 4] {
            store.remove_devices(&[number]).await.expect("begun");
            settled(&store).await;
        }
        stop.set(true);
        let versions = load.await;
        assert_eq!((store.stats().segments, store.stats().checksum_errors), (60, 0));
        assert!(versions[0] > 2, "{versions:?}");
        for (number, version) in versions.into_iter().enumerate() {
            has(&store, number as u64, version).await;
        }
        assert_eq!(scrub(&store).await, (0, 0));
    });
}

#[test]
fn a_power_failure_at_any_point_of_moving_loses_nothing() {
    let (mut grown, mut removed) = (0, 0);
    for point in (1..100).step_by(14).chain((100..).step_by(147)) {
        let world = machine(&[40; 4], 3, 2, 1);
        run(&world, async {
            let store = open(0..3).await;
            for number in 0..30 {
                write(&store, number, 0).await.expect("written");
            }
            store.close().await.expect("close");
        });
        let reactor = world.reactor();
        let ended = world.run(&reactor, async {
            let store = open(0..3).await;
            world.crash_at_point(Some(world.points() + point));
            store.add_device(&path(3), 0, false).await.expect("added");
            settled(&store).await;
            for number in 30..40 {
                write(&store, number, 0).await.expect("written");
            }
            store.remove_devices(&[0]).await.expect("begun");
            settled(&store).await;
        });
        world.crash_at_point(None);
        assert!(matches!(ended, Ok(_) | Err(Stop::Crash(_))));
        world.crash(reactor, if point % 3 == 0 { CrashKind::Kill } else { CrashKind::Power });
        let devices = run(&world, async {
            let options = StoreOptions { repair_rate: 0, ..StoreOptions::default() };
            let store = Store::open_devices(&paths(0..4), None, options).await.expect("open");
            for number in 0..30 {
                has(&store, number, 0).await;
            }
            // What was begun goes on by itself.
            settled(&store).await;
            all_active(&store).await;
            let devices: Vec<usize> = store.devices().iter().map(|device| usize::from(device.number)).collect();
            let segments = store.stats().segments;
            let expected = if devices.len() == 4 { 53 } else { 40 };
            assert_eq!(segments, expected, "{devices:?}");
            grown += u32::from(devices.len() == 4);
            removed += u32::from(!devices.contains(&0));
            for number in 0..30 {
                has(&store, number, 0).await;
            }
            // Remains of batches that do not count may differ.
            assert_eq!(scrub(&store).await.1, 0);
            assert_eq!(scrub(&store).await, (0, 0));
            devices
        });
        survives_without_each(&world, &devices, 0..30);
        if ended.is_ok() {
            break;
        }
    }
    assert!(grown > 2 && removed > 0, "{grown} and {removed} of them");
}

#[test]
fn a_column_is_durable_where_the_table_has_it() {
    let objects = 12;
    let mut columns_left = Vec::new();
    // While the table is changed for the first columns.
    for point in 16..40 {
        let world = machine_with(Faults { crash: CrashPolicy::LoseAll, ..Faults::none() }, &[40; 4], 3, 2, 1);
        run(&world, async {
            let store = open(0..3).await;
            for number in 0..objects {
                write(&store, number, 0).await.expect("written");
            }
            store.close().await.expect("close");
        });
        let reactor = world.reactor();
        let stopped = world.run(&reactor, async {
            let store = open(0..3).await;
            store.add_device(&path(3), 0, false).await.expect("added");
            world.crash_at_point(Some(world.points() + point));
            settled(&store).await;
        });
        assert!(matches!(stopped, Err(Stop::Crash(_))));
        world.crash_at_point(None);
        world.crash(reactor, CrashKind::Power);
        // Parity would hide what is not there, without another missing device.
        for missing in 0..3 {
            run(&world, async {
                let options = StoreOptions { read_only: true, accept_missing: true, ..StoreOptions::default() };
                let left = paths((0..4).filter(|disk| *disk != missing));
                let store = Store::open_devices(&left, None, options).await.expect("open");
                for number in 0..objects {
                    has(&store, number, 0).await;
                }
                columns_left.push(store.column_moves().columns_left);
            });
        }
    }
    let (least, most) = (columns_left.iter().min(), columns_left.iter().max());
    assert!(least < most, "no change of the table came before a crash: {columns_left:?}");
}

#[test]
fn a_removed_device_has_no_superblock() {
    let world = machine(&[40; 4], 4, 2, 1);
    run(&world, async {
        let store = open(0..4).await;
        store.remove_devices(&[2]).await.expect("begun");
        settled(&store).await;
        store.close().await.expect("close");
        let disk = File::open(path(2), OpenOptions::read()).expect("the disk");
        let block = disk.read_exact_at(0, 4096).await.expect("read");
        assert!(block.iter().all(|&byte| byte == 0));
    });
}
