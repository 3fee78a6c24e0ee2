//! Tests of a store on several devices: identification at opening, refusals, replacement, and scrubs.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::sleep;
use forebay_sim::{DiskFaults, Faults, World};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::blob::SECTOR;
use forebay_store::format::entry::StoreEntry;
use forebay_store::{CheckOptions, ColumnState, DeviceSetOptions, MasterKey, Store, StoreOptions};

use crate::common::{all_active, run, scrub};

const MIB: u64 = 1 << 20;
/// Bytes of each disk.
const DISK: u64 = 4 * MIB;

fn path(number: usize) -> PathBuf {
    PathBuf::from(format!("/disk{number}"))
}

fn paths(numbers: impl IntoIterator<Item = usize>) -> Vec<PathBuf> {
    numbers.into_iter().map(path).collect()
}

/// Creates a machine with disks, and a store of `data` and `parity` columns on the first ones. Returns its UUID.
fn machine(disks: usize, data: usize, parity: usize) -> (World, [u8; 16]) {
    let world = World::new(1, Faults::none());
    for number in 0..disks {
        world.add_disk(path(number), DISK, 4096);
    }
    let uuid = run(&world, async { init(0..data + parity, data, parity).await.expect("init") });
    (world, uuid)
}

async fn init(disks: impl IntoIterator<Item = usize>, data: usize, parity: usize) -> Result<[u8; 16]> {
    let options = DeviceSetOptions { data, parity, column_size: 64 << 10, ..DeviceSetOptions::default() };
    Store::init_devices(&paths(disks), &options, |_, _| {}).await
}

async fn open(disks: impl IntoIterator<Item = usize>) -> Result<Rc<Store>> {
    Store::open_devices(&paths(disks), None, StoreOptions::default()).await
}

async fn refused(disks: impl IntoIterator<Item = usize>) -> String {
    format!("{:?}", open(disks).await.err().expect("refused"))
}

async fn write(store: &Store, name: &str, byte: u8) {
    let data = Buf::copy_of(&vec![byte; 100_000]).into();
    let write = Transaction::of(ObjectOp::Write { offset: 0, data });
    store.submit(&ObjectName::new(name), write).await.expect("write");
    store.flush().await.expect("flush");
}

async fn has(store: &Store, name: &str, byte: u8) {
    let read = ObjectRead::head(0, 100_000);
    let found = store.read(&ObjectName::new(name), read).await.expect("read").fill(read.extent).to_vec();
    assert!(found == vec![byte; 100_000], "{name}");
}

fn states(store: &Store) -> Vec<ColumnState> {
    store.devices().iter().map(|device| device.state).collect()
}

#[test]
fn devices_may_be_named_in_any_order_and_are_recognized() {
    let (world, uuid) = machine(7, 2, 1);
    run(&world, async {
        let store = open([2, 0, 1]).await.expect("open");
        assert_eq!((store.uuid(), store.columns()), (uuid, Some((2, 1))));
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        init(3..6, 2, 1).await.expect("another store");
        let options = StoreOptions { read_only: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([6, 3, 1, 0]), Some(uuid), options).await.expect("one is missing");
        assert!(store.degraded().is_some_and(|text| text.contains("device 2 (/disk2) is missing: no path has it")));
        drop(store);
        let store = Store::open_devices(&paths([3, 0, 1, 2]), Some(uuid), StoreOptions::default()).await;
        let store = store.expect("a foreign device is left out");
        has(&store, "a", 1).await;
        assert!(store.degraded().is_none());
        store.close().await.expect("close");
    });
}

#[test]
fn one_device_of_several_is_no_store_of_its_own() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let error = Store::open(path(0), StoreOptions::default()).await.err().expect("refused");
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("one device of a store on several"));
        world.add_disk("/alone", DISK, 4096);
        let options = forebay_store::InitOptions { segment_size: 64 << 10, ..Default::default() };
        Store::init("/alone", options).await.expect("init");
        let alone = Store::open_devices(&["/alone".into()], None, StoreOptions::default()).await;
        let error = alone.err().expect("refused");
        assert!(error.to_string().contains("a store of its own"), "{error}");
    });
}

#[test]
fn a_copy_of_a_device_is_named() {
    let (world, _) = machine(3, 2, 1);
    let content = world.peek(path(1), 0, DISK as usize).expect("a disk");
    world.add_disk("/copy", DISK, 4096);
    run(&world, async {
        let copy = forebay_reactor::File::open("/copy", forebay_reactor::OpenOptions::read_write()).expect("a disk");
        copy.write_at(Buf::copy_of(&content), 0).await.expect("copied");
        drop(copy);
        let all = [path(0), path(1), path(2), "/copy".into()];
        let error = Store::open_devices(&all, None, StoreOptions::default()).await.err().expect("refused");
        let text = error.to_string();
        assert!(text.contains("/disk1 and /copy are both device 1"), "{text}");
    });
}

#[test]
fn what_is_missing_is_named_and_too_much_is_refused() {
    let (world, _) = machine(5, 3, 2);
    run(&world, async {
        let store = open(0..5).await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        let text = refused([0, 2]).await;
        assert!(text.contains("3 of 5 devices are gone, and parity allows 2"), "{text}");
        for number in [1, 3, 4] {
            assert!(text.contains(&format!("device {number} (/disk{number}) is missing")), "{text}");
        }
        let store = open([0, 2, 4]).await.expect("two may be missing");
        let degraded = store.degraded().expect("degraded");
        assert!(degraded.contains("device 1 (/disk1) is missing") && degraded.contains("device 3"), "{degraded}");
        has(&store, "a", 1).await;
        write(&store, "b", 2).await;
        store.close().await.expect("close");
        drop(store);
        // They come back, and lack what was written meanwhile.
        let store = open(0..5).await.expect("open");
        assert_eq!(states(&store)[1], ColumnState::Filling);
        all_active(&store).await;
        store.close().await.expect("close");
        drop(store);
        let store = open([1, 3, 4]).await.expect("others may be missing now");
        has(&store, "b", 2).await;
    });
}

#[test]
fn a_mirror_that_may_be_out_of_date_is_used_only_if_that_is_accepted() {
    let (world, _) = machine(2, 1, 1);
    run(&world, async {
        let store = open([0, 1]).await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        // Disk 1 may have been used without disk 0.
        assert!(refused([0]).await.contains("--accept-missing-devices"));
        let options = StoreOptions { accept_missing: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([0]), None, options).await.expect("accepted");
        write(&store, "a", 2).await;
        store.close().await.expect("close");
        drop(store);
        // Now disk 0 knows that disk 1 is away: nothing newer can be there.
        let store = open([0]).await.expect("it is certain");
        has(&store, "a", 2).await;
        store.close().await.expect("close");
        drop(store);
        let store = open([0, 1]).await.expect("open");
        all_active(&store).await;
        has(&store, "a", 2).await;
    });
}

#[test]
fn content_from_the_past_is_not_trusted() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
    });
    let old = world.peek(path(2), 0, DISK as usize).expect("a disk");
    for byte in 2..5 {
        run(&world, async {
            let store = open(0..3).await.expect("open");
            write(&store, "a", byte).await;
            store.close().await.expect("close");
        });
    }
    run(&world, async {
        let disk = forebay_reactor::File::open(path(2), forebay_reactor::OpenOptions::read_write()).expect("a disk");
        disk.write_at(Buf::copy_of(&old), 0).await.expect("restored");
        disk.sync_data().await.expect("durable");
        drop(disk);
        let store = open(0..3).await.expect("open");
        assert_eq!(states(&store)[2], ColumnState::Filling);
        let reason = store.devices()[2].reason.clone();
        assert!(reason.contains("from the past"), "{reason}");
        all_active(&store).await;
        assert_eq!(scrub(&store).await, (0, 0), "it was filled completely");
        store.close().await.expect("close");
        drop(store);
        let store = open([1, 2]).await.expect("without another one");
        has(&store, "a", 4).await;
    });
}

#[test]
fn a_device_is_replaced_while_it_works_and_while_it_is_away() {
    let (world, _) = machine(5, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        let missing = store.replace_device(7, &path(3), false).await.expect_err("no such device");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let same = store.replace_device(1, &path(2), false).await.expect_err("a device of the store");
        assert_eq!(same.kind(), ErrorKind::Busy, "{same}");
        assert_eq!(store.replace_device(1, &path(3), false).await.expect("replaced"), 3);
        let again = store.replace_device(1, &path(4), false).await.expect_err("it is being replaced");
        assert_eq!(again.kind(), ErrorKind::Busy);
        write(&store, "b", 2).await;
        all_active(&store).await;
        assert_eq!(store.devices().iter().map(|device| device.number).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(scrub(&store).await, (0, 0));
        store.close().await.expect("close");
        drop(store);
        // The one that was replaced is not used any more.
        let store = open([0, 1, 2, 3]).await.expect("open");
        assert_eq!((store.devices().len(), store.degraded()), (3, None));
        store.close().await.expect("close");
        drop(store);
        let store = open([2, 3]).await.expect("without disk 0");
        store.replace_device(0, &path(4), false).await.expect("replaced while it is missing");
        all_active(&store).await;
        store.close().await.expect("close");
        drop(store);
        let store = open([3, 4]).await.expect("without disk 2");
        has(&store, "a", 1).await;
        has(&store, "b", 2).await;
    });
}

#[test]
fn a_device_that_dies_under_load_is_dropped_and_taken_back() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        world.set_disk_faults(path(1), Some(DiskFaults { life: Some(0), ..DiskFaults::none() }));
        write(&store, "a", 2).await;
        has(&store, "a", 2).await;
        assert_eq!(states(&store), [ColumnState::Active, ColumnState::Away, ColumnState::Active]);
        let degraded = store.degraded().expect("degraded");
        assert!(degraded.contains("device 1 (/disk1) is away: ") && degraded.contains("at most 1"), "{degraded}");
        // A second one cannot be done without: writes fail, and go on when it works again.
        world.set_disk_faults(path(2), Some(DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }));
        let data = Buf::copy_of(&vec![3; 4096]).into();
        let failed = store.submit(&ObjectName::new("b"), Transaction::of(ObjectOp::Write { offset: 0, data })).await;
        assert_eq!(failed.expect_err("two devices fail").kind(), ErrorKind::Io);
        world.set_disk_faults(path(2), None);
        while store.refuses_writes().is_some() {
            sleep(Duration::from_millis(10)).await;
        }
        world.set_disk_faults(path(1), None);
        assert_eq!(store.replace_device(1, &path(1), false).await.expect("taken back"), 1);
        all_active(&store).await;
        assert_eq!(scrub(&store).await, (0, 0));
        store.close().await.expect("close");
        drop(store);
        let store = open([1, 2]).await.expect("without disk 0");
        has(&store, "a", 2).await;
    });
}

#[test]
fn rot_is_reconstructed_by_reads_and_mended_by_a_scrub() {
    let (world, _) = machine(5, 3, 2);
    run(&world, async {
        let store = open(0..5).await.expect("open");
        for (i, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
            write(&store, name, i as u8).await;
        }
        store.close().await.expect("close");
    });
    // Every page of two disks, superblocks and all but the first segments.
    world.flip_bits_where(path(0), 4000, |offset| offset >= MIB);
    world.flip_bits_where(path(3), 4000, |offset| offset >= MIB);
    run(&world, async {
        let options = StoreOptions { data_cache: 0, ..StoreOptions::default() };
        let store = Store::open_devices(&paths(0..5), None, options).await.expect("open");
        for (i, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
            has(&store, name, i as u8).await;
        }
        let counters = store.column_counters();
        assert!(counters.reconstructed_blocks > 0 && counters.mended_blocks > 0, "{counters:?}");
        let (mended, lost) = scrub(&store).await;
        assert!(mended > 0 && lost == 0, "{mended} mended, {lost} lost");
        assert_eq!(scrub(&store).await, (0, 0), "nothing is left");
        store.close().await.expect("close");
        drop(store);
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        let report = Store::check_devices(&paths(0..5), None, options, |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
        let store = open([1, 2, 4]).await.expect("without the two");
        has(&store, "d", 3).await;
    });
}

#[test]
fn long_reads_without_devices_compute_what_is_missing() {
    let (world, _) = machine(5, 3, 2);
    let content: Vec<u8> = (0..200_000_u32).map(|i| (i / 512) as u8 ^ (i % 251) as u8).collect();
    let name = ObjectName::new("a");
    run(&world, async {
        let store = open(0..5).await.expect("open");
        let write = Transaction::of(ObjectOp::Write { offset: 0, data: Buf::copy_of(&content).into() });
        store.submit(&name, write).await.expect("write");
        store.close().await.expect("close");
    });
    let read_without = |missing: &[usize]| {
        run(&world, async {
            let options =
                StoreOptions { data_cache: 0, read_only: true, accept_missing: true, ..StoreOptions::default() };
            let left = (0..5).filter(|disk| !missing.contains(disk));
            let store = Store::open_devices(&paths(left), None, options).await.expect("open");
            for (from, to) in [(0, 200_000), (4096, 16_384), (5000, 75_000), (61_440, 163_840), (199_000, 200_000)] {
                let read = ObjectRead::head(from as u64, (to - from) as u64);
                let found = store.read(&name, read).await.expect("read").fill(read.extent).to_vec();
                assert!(found == content[from..to], "{from} to {to} without {missing:?}");
            }
            assert!(store.column_counters().degraded_reads > 0, "without {missing:?}");
        });
    };
    for missing in (0..5).flat_map(|first| (first + 1..5).map(move |second| [first, second])) {
        read_without(&missing);
    }
    // What is computed is wrong then, which checksums show.
    world.flip_bits_where(path(3), 4000, |offset| offset >= MIB);
    read_without(&[1]);
}

#[test]
fn bad_sectors_of_a_device_table_end_no_scrub_and_are_written_again() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        assert!(world.set_bad_sector(path(1), 384 << 10) && world.set_bad_sector(path(1), 0));
        let (mended, lost) = scrub(&store).await;
        assert!(mended > 0 && lost == 0, "{mended} mended, {lost} lost");
        assert_eq!(scrub(&store).await, (0, 0), "they were written again");
        store.close().await.expect("close");
    });
}

#[test]
fn a_device_that_failed_is_away_before_anything_counts_without_it() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        world.set_disk_faults(path(2), Some(DiskFaults::failing(1_000_000)));
        write(&store, "a", 2).await;
        // The power fails now, with the write acknowledged by a flush.
    });
    world.set_disk_faults(path(2), None);
    run(&world, async {
        // With the device that lacks it, one of the others is needed, and the store knows that.
        for missing in [0, 1] {
            let options = StoreOptions { accept_missing: true, ..StoreOptions::default() };
            let present = paths((0..3).filter(|&disk| disk != missing));
            let error = Store::open_devices(&present, None, options).await.err().expect("refused");
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        }
        let store = open(0..3).await.expect("open");
        has(&store, "a", 2).await;
        all_active(&store).await;
        store.close().await.expect("close");
        drop(store);
        let store = open(1..3).await.expect("it has everything by now");
        has(&store, "a", 2).await;
    });
}

#[test]
fn a_replacement_that_fails_at_once_is_refused() {
    let (world, _) = machine(4, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        // It dies at each of its operations in turn.
        for life in 0..1000 {
            // What an earlier attempt has left would be recognized sooner, and operations be skipped.
            world.set_disk_faults(path(3), None);
            let options = forebay_reactor::OpenOptions::read_write();
            let disk = forebay_reactor::File::open(path(3), options).expect("the disk");
            disk.write_at(Buf::zeroed(MIB as usize), 0).await.expect("erased");
            drop(disk);
            world.set_disk_faults(path(3), Some(DiskFaults { life: Some(life), ..DiskFaults::none() }));
            match store.replace_device(1, &path(3), true).await {
                Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error}"),
                Ok(number) => {
                    assert!(store.devices().iter().any(|device| device.number == number), "after {life} operations");
                    return has(&store, "a", 1).await;
                }
            }
            assert_eq!((store.devices().len(), store.degraded()), (3, None), "after {life} operations");
        }
        panic!("it is never replaced");
    });
}

#[test]
fn rot_beyond_parity_is_reported_and_makes_nothing_worse() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
    });
    for disk in 0..2 {
        world.flip_bits_where(path(disk), 30_000, |offset| offset >= MIB);
    }
    let before: Vec<_> = (0..3).map(|disk| world.peek(path(disk), MIB, (DISK - MIB) as usize)).collect();
    run(&world, async {
        let options = StoreOptions { read_only: true, ..StoreOptions::default() };
        match Store::open_devices(&paths(0..3), None, options).await {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
            Ok(store) => {
                let read = ObjectRead::head(0, 4096);
                let error = store.read(&ObjectName::new("a"), read).await.expect_err("more than parity covers");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            }
        }
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        match Store::check_devices(&paths(0..3), None, options, |_, _| {}).await {
            Ok(report) => assert!(!report.is_clean()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
        }
    });
    let after: Vec<_> = (0..3).map(|disk| world.peek(path(disk), MIB, (DISK - MIB) as usize)).collect();
    assert!(before == after, "a read-only store writes nothing");
}

#[test]
fn requests_that_no_store_fits_are_refused_and_change_nothing() {
    let world = World::new(1, Faults::none());
    for number in 0..4 {
        world.add_disk(path(number), DISK, 4096);
    }
    world.add_disk("/small", MIB + (64 << 10), 4096);
    run(&world, async {
        let kind = |result: Result<[u8; 16]>| result.expect_err("refused").kind();
        assert_eq!(kind(init(0..2, 2, 1).await), ErrorKind::Invalid, "too few devices");
        assert_eq!(kind(init(0..1, 1, 0).await), ErrorKind::Invalid, "one device");
        assert_eq!(kind(init(0..2, 0, 2).await), ErrorKind::Invalid, "no data");
        let options = DeviceSetOptions { data: 2, parity: 1, column_size: 64 << 10, ..DeviceSetOptions::default() };
        let small = [path(0), path(1), "/small".into()];
        assert_eq!(kind(Store::init_devices(&small, &options, |_, _| {}).await), ErrorKind::Invalid, "too small");
        init(0..3, 2, 1).await.expect("nothing was written before");
        assert_eq!(kind(init(0..3, 2, 1).await), ErrorKind::Exists);
        assert_eq!(kind(init([3, 0, 1], 2, 1).await), ErrorKind::Exists, "two of another store");
        open(0..3).await.expect("open").close().await.expect("close");
        let rebuild = CheckOptions { rebuild: true, ..CheckOptions::default() };
        let refused = Store::check_devices(&paths(0..3), None, rebuild, |_, _| {}).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn stripes_without_parity_work_and_fail_as_they_must() {
    let (world, _) = machine(3, 3, 0);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        assert_eq!(scrub(&store).await, (0, 0));
        store.close().await.expect("close");
        drop(store);
        assert!(refused([0, 1]).await.contains("1 of 3 devices are gone, and parity allows 0"));
        has(&open(0..3).await.expect("open"), "a", 1).await;
    });
}

#[test]
fn a_late_device_delays_no_read_for_long() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let options = StoreOptions { data_cache: 0, ..StoreOptions::default() };
        let store = Store::open_devices(&paths(0..3), None, options).await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        let options = StoreOptions { data_cache: 0, ..StoreOptions::default() };
        let store = Store::open_devices(&paths(0..3), None, options).await.expect("open");
        has(&store, "a", 1).await;
        let second = 1_000_000_000;
        let stalls = DiskFaults { stall_ppm: 1_000_000, stall: second..second + 1, ..DiskFaults::none() };
        world.set_disk_faults(path(0), Some(stalls));
        let began = world.now();
        has(&store, "a", 1).await;
        assert!(world.now() - began < second / 2, "{} ns", world.now() - began);
        assert!(store.column_counters().late_reads > 0);
        world.set_disk_faults(path(0), None);
        store.close().await.expect("close");
    });
}

#[test]
fn a_device_that_hangs_is_dropped_and_taken_back() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let store = open(0..3).await.expect("open");
        write(&store, "a", 1).await;
        let second = 1_000_000_000;
        let hangs = DiskFaults { stall_ppm: 1_000_000, stall: 500 * second..501 * second, ..DiskFaults::none() };
        world.set_disk_faults(path(1), Some(hangs));
        let began = world.now();
        write(&store, "b", 2).await;
        assert!(world.now() - began < 100 * second, "{} ns", world.now() - began);
        assert_eq!(states(&store), [ColumnState::Active, ColumnState::Away, ColumnState::Active]);
        assert!(store.devices()[1].reason.contains("30 s"), "{}", store.devices()[1].reason);
        write(&store, "a", 3).await;
        world.set_disk_faults(path(1), None);
        // Its file is locked until what hangs in it is complete.
        while let Err(error) = store.replace_device(1, &path(1), true).await {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            sleep(Duration::from_secs(1)).await;
        }
        all_active(&store).await;
        assert_eq!(scrub(&store).await, (0, 0));
        store.close().await.expect("close");
    });
    run(&world, async {
        let options = StoreOptions { accept_missing: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([1, 2]), None, options).await.expect("without another one");
        has(&store, "a", 3).await;
        has(&store, "b", 2).await;
    });
}

#[test]
fn rot_in_the_segment_of_the_log_is_mended() {
    let (world, _) = machine(3, 2, 1);
    run(&world, async {
        let options = StoreOptions { data_cache: 0, ..StoreOptions::default() };
        let store = Store::open_devices(&paths(0..3), None, options).await.expect("open");
        assert_eq!(scrub(&store).await, (0, 0));
        write(&store, "a", 1).await;
        world.flip_bits_where(path(0), 2000, |offset| offset >= MIB);
        let (mended, lost) = scrub(&store).await;
        assert!(mended > 0 && lost == 0, "{mended} mended, {lost} lost");
        assert_eq!(scrub(&store).await, (0, 0), "nothing is left");
        store.close().await.expect("close");
    });
    run(&world, async {
        let options = StoreOptions { accept_missing: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([0, 1]), None, options).await.expect("without another one");
        has(&store, "a", 1).await;
        assert_eq!(store.column_counters().reconstructed_blocks, 0, "the mended disk proves itself");
    });
}

/// Returns where compressed blobs are stored on every disk of a mirror: byte addresses and lengths.
fn blobs(world: &World) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for at in (MIB..DISK).step_by(4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(path(0), at, 4096).expect("a disk")) else { continue };
        for entry in StoreEntry::decode_all(&header.entries).expect("entries") {
            if let StoreEntry::WriteBlob { blob, .. } = entry {
                let sector = SECTOR as u64;
                found.push((at + 4096 + u64::from(blob.payload) * sector, u64::from(blob.sectors) * sector));
            }
        }
    }
    found
}

#[test]
fn keys_are_on_every_device_also_on_one_that_joins() {
    let world = World::new(1, Faults::none());
    for number in 0..4 {
        world.add_disk(path(number), DISK, 512);
    }
    let options = || StoreOptions {
        accept_missing: true,
        data_cache: 0,
        master_key: Some(MasterKey::from_bytes([1; 32])),
        ..StoreOptions::default()
    };
    let name = ObjectName::new("rbd_data.a.0");
    let data: Vec<u8> = (0..64 << 10).map(|at: u32| (at >> 6) as u8).collect();
    run(&world, async {
        init(0..3, 1, 2).await.expect("init");
        let store = Store::open_devices(&paths(0..3), None, options()).await.expect("open");
        store.encrypt(&ObjectName::new("rbd_data.a.")).await.expect("a key");
        let write = ObjectOp::Write { offset: 0, data: Buf::copy_of(&data).into() };
        store.submit(&name, Transaction::of(write)).await.expect("write");
        store.replace_device(0, &path(3), false).await.expect("replace");
        while store.devices().iter().any(|device| device.state != ColumnState::Active) {
            forebay_reactor::sleep(Duration::from_millis(100)).await;
        }
        store.close().await.expect("close");
        drop(store);
        // Each device alone has the keys: those of the beginning, and the one that came later.
        for number in [1, 2, 3] {
            let options = StoreOptions { read_only: true, ..options() };
            let store = Store::open_devices(&paths([number]), None, options).await.expect("one device");
            let read = ObjectRead::head(0, data.len() as u64);
            let found = store.read(&name, read).await.expect("read").fill(read.extent).to_vec();
            assert!(found == data, "device {number}");
        }
    });
}

#[test]
fn blobs_in_one_block_are_reconstructed_from_different_devices() {
    let world = World::new(1, Faults::none());
    for number in 0..3 {
        world.add_disk(path(number), DISK, 512);
    }
    let names: Vec<String> = (0..6).map(|i| format!("o{i}")).collect();
    let content = |i: usize| -> Vec<u8> {
        let random = (0..1500u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(i as u32 * 977) >> 13) as u8);
        random.chain(std::iter::repeat_n(i as u8, 4096 - 1500)).collect()
    };
    let verify = async |store: &Store| {
        for (i, name) in names.iter().enumerate() {
            let read = ObjectRead::head(0, 4096);
            let found = store.read(&ObjectName::new(name), read).await.expect("read").fill(read.extent).to_vec();
            assert!(found == content(i), "{name}");
        }
    };
    run(&world, async {
        init(0..3, 1, 2).await.expect("init");
        let store = open(0..3).await.expect("open");
        let policy = DataPolicy { compression: Compression::Lz4 };
        store.set_data_policy(&ObjectName::new(""), Some(policy)).await.expect("compression");
        let names = names.iter().enumerate().map(|(i, name)| (ObjectName::new(name), Buf::copy_of(&content(i)).into()));
        let writes: Vec<_> = names
            .map(|(name, data)| store.submit(&name, Transaction::of(ObjectOp::Write { offset: 0, data })))
            .collect();
        for write in writes {
            write.await.expect("write");
        }
        store.close().await.expect("close");
    });
    let blobs = blobs(&world);
    let two = blobs.windows(2).find(|two| {
        // In one block, the second one behind the first.
        two[0].0 / 4096 == (two[1].0 + two[1].1 - 1) / 4096
    });
    let [first, second] = two.expect("blobs share a block") else { unreachable!("two") };
    for (disk, (at, len)) in [(0, first), (1, second)] {
        run(&world, async {
            let options = forebay_reactor::OpenOptions::read_write();
            let file = forebay_reactor::File::open(path(disk), options).expect("a disk");
            file.write_at(Buf::zeroed(*len as usize), *at).await.expect("damaged");
            file.sync_data().await.expect("durable");
        });
    }
    run(&world, async {
        let options = StoreOptions { data_cache: 0, accept_missing: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([0, 1]), None, options).await.expect("without the intact one");
        verify(&store).await;
        let (mended, lost) = scrub(&store).await;
        assert!(mended > 0 && lost == 0, "{mended} mended, {lost} lost");
        verify(&store).await;
        store.close().await.expect("close");
        drop(store);
        let options = StoreOptions { accept_missing: true, ..StoreOptions::default() };
        let store = Store::open_devices(&paths([1]), None, options).await.expect("one alone");
        verify(&store).await;
    });
}
