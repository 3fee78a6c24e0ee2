//! Tests of stores that grow while they are open: on one file or device, on several, and with added devices.

use std::path::PathBuf;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{CrashKind, DiskFaults, Faults, Stop, World};
use forebay_store::format::superblock::{COPIES, FEATURE_DEVICES, FEATURE_GROWN, StoreSuperblock};
use forebay_store::{CheckOptions, DeviceSetOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, all_active, run, scrub};

const MIB: u64 = 1 << 20;
/// Bytes of a segment, or of a column.
const UNIT: u64 = 64 << 10;
/// Bytes of a small store on one device: 32 segments.
const SMALL: u64 = MIB + 32 * UNIT;
/// Bytes that it grows to: 200 segments.
const LARGE: u64 = MIB + 200 * UNIT;
/// Bytes of an object.
const OBJECT: usize = 128 << 10;

async fn write(store: &Store, number: u64) -> Result<()> {
    let data = Buf::copy_of(&vec![number as u8 + 1; OBJECT]).into();
    let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
    store.submit(&ObjectName::new(format!("o{number}")), write).await.map(drop)
}

async fn has(store: &Store, number: u64) {
    let read = ObjectRead::head(0, OBJECT as u64);
    let found =
        store.read(&ObjectName::new(format!("o{number}")), read).await.expect("read").fill(read.extent).to_vec();
    assert!(found == vec![number as u8 + 1; OBJECT], "object {number}");
}

/// Writes objects from number `first` on until the store is full. Returns the number of the first that did not fit.
async fn fill(store: &Store, first: u64) -> u64 {
    let mut number = first;
    loop {
        match write(store, number).await {
            Ok(()) => number += 1,
            Err(error) if error.kind() == ErrorKind::NoSpace => return number,
            Err(error) => panic!("{error:?}"),
        }
    }
}

async fn open_one() -> Rc<Store> {
    Store::open(DISK, StoreOptions::default()).await.expect("open")
}

async fn check_one() {
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(DISK, options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

/// Creates a machine with a small store in a file or on a device.
fn machine_of_one(device: bool) -> World {
    let world = World::new(1, Faults::none());
    match device {
        true => world.add_disk(DISK, SMALL, 4096),
        false => world.add_file(DISK, SMALL, 4096),
    }
    run(&world, async {
        let options = InitOptions { size: SMALL, segment_size: UNIT as u32, ..InitOptions::default() };
        Store::init(DISK, options).await.expect("init");
    });
    world
}

fn superblocks(world: &World, path: &str) -> Vec<StoreSuperblock> {
    let copy = |at| StoreSuperblock::decode(&world.peek(path, at, 4096).expect("a disk")).expect("a superblock");
    COPIES.into_iter().map(copy).collect()
}

#[test]
fn a_full_store_in_a_file_or_on_a_device_goes_on_when_it_has_grown() {
    for device in [false, true] {
        let world = machine_of_one(device);
        assert!(superblocks(&world, DISK).iter().all(|superblock| superblock.features == 0));
        let written = run(&world, async {
            let store = open_one().await;
            let full = fill(&store, 0).await;
            let before = store.usage().await.expect("usage");
            assert_eq!(store.grow(&[], 0, |_, _| {}).await.expect("done"), (32, 32), "nothing to grow to");
            if device {
                let error = store.grow(&[], LARGE, |_, _| {}).await.expect_err("a device");
                assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("not"), "{error}");
            }
            let error = store.grow(&[], SMALL - 1, |_, _| {}).await.expect_err("smaller");
            assert!(error.to_string().contains("cannot be made smaller"), "{error}");
            let error = store.grow(&[0], 0, |_, _| {}).await.expect_err("one device");
            assert!(error.to_string().contains("on one device"), "{error}");
            if device {
                world.resize(DISK, LARGE + 1000);
            }
            let size = if device { 0 } else { LARGE + 1000 };
            assert_eq!(store.grow(&[], size, |_, _| {}).await.expect("done"), (32, 200));
            let after = store.usage().await.expect("usage");
            assert!(after.capacity > 4 * before.capacity && after.available > 0, "{before:?} {after:?}");
            assert_eq!((store.stats().segments, store.stats().device_size), (200, LARGE));
            let full_again = fill(&store, full).await;
            assert!(full_again > 4 * full, "{full} and {full_again} objects");
            full_again
        });
        let grown = superblocks(&world, DISK);
        let is_grown = |found: &StoreSuperblock| found.segment_count == 200 && found.features == FEATURE_GROWN;
        assert!(grown.iter().all(is_grown), "{grown:?}");
        run(&world, async {
            let store = open_one().await;
            for number in 0..written {
                has(&store, number).await;
            }
            store.close().await.expect("close");
            drop(store);
            check_one().await;
        });
    }
}

#[test]
fn a_power_failure_at_any_point_of_growing_loses_nothing() {
    let mut grown = 0;
    for point in (1..80).chain((80..).step_by(11)) {
        let world = machine_of_one(false);
        let full = run(&world, async {
            let store = open_one().await;
            let full = fill(&store, 0).await;
            store.close().await.expect("close");
            full
        });
        let reactor = world.reactor();
        let ended = world.run(&reactor, async {
            let store = open_one().await;
            world.crash_at_point(Some(world.points() + point));
            store.grow(&[], LARGE, |_, _| {}).await.expect("grown");
            // Some of it lies in added segments.
            fill(&store, full).await
        });
        world.crash_at_point(None);
        world.crash(reactor, if point % 3 == 0 { CrashKind::Kill } else { CrashKind::Power });
        run(&world, async {
            let store = open_one().await;
            let segments = store.stats().segments;
            assert!(segments == 32 || segments == 200, "{segments} segments");
            grown += u32::from(segments == 200);
            for number in 0..full {
                has(&store, number).await;
            }
            assert_eq!(store.grow(&[], LARGE, |_, _| {}).await.expect("grown").1, 200);
            write(&store, full).await.expect("there is space");
            has(&store, full).await;
            store.close().await.expect("close");
            drop(store);
            check_one().await;
        });
        let copies = superblocks(&world, DISK);
        assert!(copies[0] == copies[1] && copies[0].segment_count == 200, "point {point}: {copies:?}");
        // Enough of the log is in added segments then.
        if ended.is_ok() || point > 400 {
            break;
        }
    }
    assert!(grown > 50, "{grown} of them after both copies were written");
}

#[test]
fn a_store_that_has_grown_is_rebuilt_without_its_superblocks() {
    let world = machine_of_one(false);
    let written = run(&world, async {
        let store = open_one().await;
        let full = fill(&store, 0).await;
        store.close().await.expect("close");
        drop(store);
        let store = open_one().await;
        store.grow(&[], LARGE, |_, _| {}).await.expect("grown");
        fill(&store, full).await
    });
    run(&world, async {
        let disk = File::open(DISK, OpenOptions::read_write()).expect("the disk");
        for at in COPIES {
            disk.write_at(Buf::copy_of(&[0xaa; 4096]), at).await.expect("written");
        }
        disk.sync_data().await.expect("durable");
        drop(disk);
        let options = CheckOptions { rebuild: true, ..CheckOptions::default() };
        let report = Store::check(DISK, options, |_, _| {}).await.expect("check");
        let rebuilt = report.rebuild.expect("rebuilt");
        assert!(rebuilt.written && rebuilt.lost.is_empty() && rebuilt.segments == 200, "{rebuilt:#?}");
        let store = open_one().await;
        for number in 0..written {
            has(&store, number).await;
        }
    });
}

#[test]
fn copies_of_the_superblock_with_different_numbers_of_segments_are_made_equal() {
    let world = machine_of_one(false);
    run(&world, async {
        let store = open_one().await;
        write(&store, 0).await.expect("written");
        store.close().await.expect("close");
        drop(store);
        let disk = File::open(DISK, OpenOptions::read_write()).expect("the disk");
        disk.set_size(LARGE).expect("longer");
        let block = disk.read_exact_at(0, 4096).await.expect("read");
        let old = StoreSuperblock::decode(&block).expect("a superblock");
        let grown = StoreSuperblock { features: FEATURE_GROWN, segment_count: 200, ..old };
        disk.write_at(Buf::copy_of(&grown.encode()), 0).await.expect("written");
        disk.sync_data().await.expect("durable");
        drop(disk);
        check_one().await;
        let store = open_one().await;
        assert_eq!(store.stats().segments, 200);
        has(&store, 0).await;
    });
    let copies = superblocks(&world, DISK);
    assert!(copies[0] == copies[1] && copies[0].segment_count == 200, "{copies:?}");
}

#[test]
fn an_allocated_file_stays_allocated_and_keeps_its_size_without_space_for_more() {
    const CAPACITY: u64 = 64 * MIB;
    let world = World::new(1, Faults { files_capacity: Some(CAPACITY), files_space_known: true, ..Faults::none() });
    run(&world, async {
        let options =
            InitOptions { size: SMALL, segment_size: UNIT as u32, preallocate: true, ..InitOptions::default() };
        Store::init(DISK, options).await.expect("init");
        let store = open_one().await;
        let error = store.grow(&[], CAPACITY, |_, _| {}).await.expect_err("no space");
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("bytes more"), "{error}");
        let full = fill(&store, 0).await;
        let file_size = || File::open(DISK, OpenOptions::read()).expect("the file").size().expect("its size");
        assert_eq!((store.stats().segments, file_size()), (32, SMALL));
        let mut reported = 0;
        store.grow(&[], LARGE, |done, _| reported = done).await.expect("grown");
        assert_eq!((store.stats().segments, file_size(), reported), (200, LARGE, LARGE - SMALL));
        // Others take all that is left, and the store does not need it.
        let filler = File::open("/filler", OpenOptions::read_write().create()).expect("a file");
        let left = filler.file_system_space().expect("known").expect("limited").available;
        filler.allocate(0, left).await.expect("space");
        assert!(fill(&store, full).await > 4 * full);
        store.close().await.expect("close");
    });
}

#[test]
fn segments_that_their_table_cannot_have_are_refused() {
    let world = machine_of_one(false);
    run(&world, async {
        let store = open_one().await;
        let most = MIB + ((UNIT - 8192) / 4) * UNIT;
        let error = store.grow(&[], most + UNIT, |_, _| {}).await.expect_err("too many");
        assert!(error.to_string().contains(&format!("{most} bytes at most")), "{error}");
        assert_eq!(store.stats().segments, 32);
    });
}

fn path(number: usize) -> PathBuf {
    PathBuf::from(format!("/disk{number}"))
}

fn paths(numbers: impl IntoIterator<Item = usize>) -> Vec<PathBuf> {
    numbers.into_iter().map(path).collect()
}

fn disk_of(slots: u64) -> u64 {
    MIB + slots * UNIT
}

/// Creates a machine with disks of so many slots each, and a store of `data` and `parity` columns on the first `used`.
fn machine_of_several(slots: &[u64], used: usize, data: usize, parity: usize) -> World {
    let world = World::new(1, Faults::none());
    for (number, slots) in slots.iter().enumerate() {
        world.add_disk(path(number), disk_of(*slots), 4096);
    }
    run(&world, async {
        let options = DeviceSetOptions { data, parity, column_size: UNIT, ..DeviceSetOptions::default() };
        Store::init_devices(&paths(0..used), &options, |_, _| {}).await.expect("init");
    });
    world
}

async fn open(disks: impl IntoIterator<Item = usize>) -> Rc<Store> {
    let options = StoreOptions { repair_rate: 0, accept_missing: true, ..StoreOptions::default() };
    Store::open_devices(&paths(disks), None, options).await.expect("open")
}

async fn scrub_is_clean(store: &Store) {
    assert_eq!(scrub(store).await, (0, 0));
}

/// Reads everything with every choice of one disk missing, and checks the store.
fn survives_without_each(world: &World, disks: std::ops::Range<usize>, objects: u64) {
    for missing in disks.clone() {
        run(world, async {
            let options = StoreOptions { read_only: true, accept_missing: true, ..StoreOptions::default() };
            let left = paths(disks.clone().filter(|disk| *disk != missing));
            let store = Store::open_devices(&left, None, options).await.expect("open");
            for number in 0..objects {
                has(&store, number).await;
            }
        });
    }
    run(world, async {
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        let report = Store::check_devices(&paths(disks), None, options, |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
    });
}

#[test]
fn a_set_whose_devices_have_grown_uses_them() {
    let world = machine_of_several(&[32; 4], 4, 3, 1);
    let objects = run(&world, async {
        let store = open(0..4).await;
        let full = fill(&store, 0).await;
        for number in 0..3 {
            world.resize(path(number), disk_of(100));
        }
        // Three of four make no segment: each needs all of them.
        assert_eq!(store.grow(&[], 0, |_, _| {}).await.expect("done"), (32, 32));
        assert_eq!(store.devices()[0].size, 100 * UNIT);
        let error = store.grow(&[3], disk_of(100), |_, _| {}).await.expect_err("a device of that size");
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("device 3"), "{error}");
        assert_eq!(store.grow(&[7], 0, |_, _| {}).await.expect_err("no device").kind(), ErrorKind::NotFound);
        world.resize(path(3), disk_of(80));
        assert_eq!(store.grow(&[3], 0, |_, _| {}).await.expect("done"), (32, 80));
        let objects = fill(&store, full).await;
        assert!(objects > 2 * full, "{full} and {objects} objects");
        scrub_is_clean(&store).await;
        objects
    });
    assert!(superblocks(&world, "/disk3").iter().all(|found| found.features == FEATURE_DEVICES | FEATURE_GROWN));
    survives_without_each(&world, 0..4, objects);
}

#[test]
fn files_of_a_set_are_extended() {
    let world = World::new(1, Faults::none());
    for number in 0..3 {
        world.add_file(path(number), disk_of(32), 4096);
    }
    run(&world, async {
        let options = DeviceSetOptions { data: 2, parity: 1, column_size: UNIT, ..DeviceSetOptions::default() };
        Store::init_devices(&paths(0..3), &options, |_, _| {}).await.expect("init");
        let store = open(0..3).await;
        let mut reported = (0, 0);
        assert_eq!(store.grow(&[], disk_of(64), |done, total| reported = (done, total)).await.expect("done"), (32, 64));
        assert_eq!(reported, (3 * 32 * UNIT, 3 * 32 * UNIT));
        fill(&store, 0).await;
    });
    let objects = run(&world, async {
        let store = open(0..3).await;
        assert_eq!(store.stats().segments, 64);
        store.stats().objects
    });
    survives_without_each(&world, 0..3, objects);
}

#[test]
fn a_set_grows_while_a_device_is_away() {
    let world = machine_of_several(&[32; 4], 4, 3, 1);
    let objects = run(&world, async {
        let store = open(0..3).await;
        write(&store, 0).await.expect("written");
        for number in 0..3 {
            world.resize(path(number), disk_of(64));
        }
        let error = store.grow(&[3], 0, |_, _| {}).await.expect_err("it is away");
        assert!(error.to_string().contains("is away, and cannot grow"), "{error}");
        assert_eq!(store.grow(&[], 0, |_, _| {}).await.expect("done"), (32, 32));
        drop(store);
        world.resize(path(3), disk_of(64));
        let store = open(0..4).await;
        // It is being filled, and used in part.
        assert_eq!(store.grow(&[], 0, |_, _| {}).await.expect("done"), (32, 64));
        let objects = fill(&store, 1).await;
        all_active(&store).await;
        scrub_is_clean(&store).await;
        objects
    });
    survives_without_each(&world, 0..4, objects);
}

#[test]
fn a_power_failure_at_any_point_of_growing_a_set_loses_nothing() {
    let mut grown = 0;
    for point in (1..80).chain((80..).step_by(11)) {
        let world = machine_of_several(&[25; 3], 3, 2, 1);
        run(&world, async {
            let store = open(0..3).await;
            write(&store, 0).await.expect("written");
            store.close().await.expect("close");
        });
        (0..3).for_each(|number| world.resize(path(number), disk_of(64)));
        let reactor = world.reactor();
        let ended = world.run(&reactor, async {
            let store = open(0..3).await;
            world.crash_at_point(Some(world.points() + point));
            store.grow(&[], 0, |_, _| {}).await.expect("grown");
            fill(&store, 1).await
        });
        world.crash_at_point(None);
        assert!(matches!(ended, Ok(_) | Err(Stop::Crash(_))));
        world.crash(reactor, if point % 3 == 0 { CrashKind::Kill } else { CrashKind::Power });
        run(&world, async {
            let store = open(0..3).await;
            let segments = store.stats().segments;
            assert!(segments == 25 || segments == 64, "{segments} segments");
            grown += u32::from(segments == 64);
            has(&store, 0).await;
            assert_eq!(store.grow(&[], 0, |_, _| {}).await.expect("grown").1, 64);
            write(&store, 1).await.expect("there is space");
            assert_eq!(store.degraded(), None);
            // Remains of batches that do not count may differ.
            assert_eq!(scrub(&store).await.1, 0);
            scrub_is_clean(&store).await;
        });
        survives_without_each(&world, 0..3, 2);
        if ended.is_ok() || point > 200 {
            break;
        }
    }
    assert!(grown > 20, "{grown} of them after the table was written");
}

#[test]
fn devices_that_are_added_to_free_slots_are_used() {
    // Disk 0 has 68 slots that no other one matches.
    let world = machine_of_several(&[100, 32, 32, 40, 48], 3, 2, 1);
    let objects = run(&world, async {
        let store = open(0..3).await;
        assert_eq!(store.stats().segments, 32);
        let full = fill(&store, 0).await;
        assert_eq!(store.add_device(&path(3), 0, false).await.expect("done"), 3);
        assert_eq!(store.devices().len(), 4);
        let twice = store.add_device(&path(3), 0, false).await.expect_err("a device of it");
        assert_eq!(twice.kind(), ErrorKind::Busy, "{twice}");
        assert_eq!(store.add_device(&path(4), 0, false).await.expect("done"), 4);
        // Two with free slots and disk 0.
        assert!(store.stats().segments >= 32 + 38, "{} segments", store.stats().segments);
        assert_eq!(store.degraded(), None);
        let objects = fill(&store, full).await;
        assert!(objects > full * 3 / 2, "{full} and {objects} objects");
        scrub_is_clean(&store).await;
        objects
    });
    survives_without_each(&world, 0..5, objects);
}

#[test]
fn a_device_that_cannot_be_added_is_left_alone() {
    let world = machine_of_several(&[32, 32, 32, 32, 32, 0], 3, 2, 1);
    run(&world, async {
        let store = open(0..3).await;
        let error = store.add_device(&path(5), 0, false).await.expect_err("too small");
        assert!(error.to_string().contains(&format!("{} at least", MIB + UNIT)), "{error}");
        let error = store.add_device(&path(3), disk_of(33), false).await.expect_err("larger than it is");
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
        // One whose device table cannot be written.
        world.set_disk_faults(path(3), Some(DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }));
        store.add_device(&path(3), 0, false).await.expect_err("it fails");
        assert_eq!((store.devices().len(), store.degraded()), (3, None));
        world.set_disk_faults(path(3), None);
        let alone = InitOptions { segment_size: UNIT as u32, ..InitOptions::default() };
        Store::init(path(4), alone).await.expect("another store");
        assert_eq!(store.add_device(&path(4), 0, false).await.expect_err("a store").kind(), ErrorKind::Exists);
        store.add_device(&path(4), 0, true).await.expect("overwritten");
        store.close().await.expect("close");
    });
    run(&world, async {
        let store = open(0..5).await;
        assert_eq!((store.devices().len(), store.degraded()), (4, None));
    });
}

#[test]
fn one_device_takes_no_other() {
    let world = machine_of_one(false);
    world.add_disk(path(1), disk_of(32), 4096);
    run(&world, async {
        let store = open_one().await;
        let error = store.add_device(&path(1), 0, false).await.expect_err("one device");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    });
}
