//! Tests of named ranges: several stores on one file or device.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::{Buf, File, OpenOptions, fs, sleep, spawn, yield_now};
use forebay_sim::{CrashKind, DiskFaults, Faults, World};
use forebay_store::format::ranges::{PLACES, RangeRecord, RangeTable};
use forebay_store::{
    CheckOptions, DeviceSetOptions, InitOptions, NewRange, Occupant, Store, StoreOptions, create_range, list_ranges,
    remove_range,
};

use crate::common::{DISK, all_active, run};

const MIB: u64 = 1 << 20;
/// Bytes of an object.
const OBJECT: usize = 128 << 10;

fn device() -> &'static Path {
    Path::new(DISK)
}

/// Returns the path of a range of the disk.
fn named(name: &str) -> PathBuf {
    format!("{DISK}#{name}").into()
}

fn new(name: &str, mib: u64) -> NewRange {
    NewRange { name: name.into(), size: Some(mib * MIB), share: 100, force: false }
}

/// Creates a machine with a disk, which is a device or a sparse file.
fn machine(size: u64, is_device: bool) -> World {
    machine_of(1, size, is_device)
}

fn machine_of(seed: u64, size: u64, is_device: bool) -> World {
    let world = World::new(seed, Faults::none());
    match is_device {
        true => world.add_disk(DISK, size, 4096),
        false => world.add_file(DISK, size, 4096),
    }
    world
}

async fn init(name: &str) -> Result<()> {
    Store::init(named(name), InitOptions { segment_size: 64 << 10, ..InitOptions::default() }).await
}

async fn open(name: &str) -> Rc<Store> {
    Store::open(named(name), StoreOptions::default()).await.expect("open")
}

/// Writes objects until the store is full; returns their number.
async fn fill(store: &Store, seed: u8) -> u64 {
    for number in 0.. {
        let data = Buf::copy_of(&vec![number as u8 ^ seed; OBJECT]).into();
        let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
        match store.submit(&ObjectName::new(format!("o{number}")), write).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NoSpace => return number,
            Err(error) => panic!("{error:?}"),
        }
    }
    unreachable!("a store without end")
}

async fn has(store: &Store, seed: u8, count: u64) {
    for number in 0..count {
        let read = ObjectRead::head(0, OBJECT as u64);
        let found =
            store.read(&ObjectName::new(format!("o{number}")), read).await.expect("read").fill(read.extent).to_vec();
        assert!(found == vec![number as u8 ^ seed; OBJECT], "object {number}");
    }
}

async fn check(name: &str) {
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(named(name), options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

async fn names() -> Vec<String> {
    let listed = list_ranges(device()).await.expect("listed");
    listed.ranges.into_iter().map(|range| range.record.name).collect()
}

fn kind<T>(result: Result<T>) -> (ErrorKind, String) {
    let error = result.map(drop).expect_err("refused");
    (error.kind(), error.to_string())
}

#[test]
fn two_stores_on_one_device_touch_nothing_of_each_other() {
    for is_device in [true, false] {
        let world = machine(40 * MIB, is_device);
        let filled = run(&world, async {
            for (name, mib) in [("a", 12), ("b", 16)] {
                create_range(device(), &new(name, mib)).await.expect("created");
                init(name).await.expect("init");
            }
            let (a, b) = (open("a").await, open("b").await);
            let (kind, text) = kind(Store::open(named("a"), StoreOptions::default()).await);
            assert!(kind == ErrorKind::Busy && text.contains("/disk#a is in use by another"), "{text}");
            let other = spawn(async move {
                // Over and over, so that segments are cleaned and discarded, too.
                for number in (0..40).cycle().take(400) {
                    let data = Buf::copy_of(&vec![number as u8; OBJECT]).into();
                    let write = Transaction::of(ObjectOp::Write { offset: 0, data });
                    a.submit(&ObjectName::new(format!("o{number}")), write).await.expect("overwritten");
                }
                let count = fill(&a, 1).await;
                a.close().await.expect("close");
                count
            });
            let b_count = fill(&b, 2).await;
            let error = b.grow(&[], 32 * MIB, |_, _| {}).await.expect_err("beyond the range");
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("16777216 bytes"), "{error}");
            b.close().await.expect("close");
            (other.await, b_count)
        });
        assert!(filled.0 > 50 && filled.1 > filled.0, "{filled:?}");
        // What no range has stays as it was; noise destroys one range, from its first to its last byte.
        assert!(world.peek(DISK, 29 * MIB, 11 << 20).expect("a disk").iter().all(|&byte| byte == 0));
        run(&world, async {
            let whole = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
            let noise: Vec<u8> = (0..12 * MIB).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
            whole.write_at(Buf::copy_of(&noise), MIB).await.expect("noise");
            whole.sync_data().await.expect("synced");
        });
        run(&world, async {
            assert!(Store::open(named("a"), StoreOptions::default()).await.is_err(), "destroyed");
            let b = open("b").await;
            has(&b, 2, filled.1).await;
            b.close().await.expect("close");
            drop(b);
            check("b").await;
            assert_eq!(kind(init("a").await).0, ErrorKind::Exists, "noise is data");
            let force = InitOptions { segment_size: 64 << 10, force: true, ..InitOptions::default() };
            Store::init(named("a"), force).await.expect("made again");
            let a = open("a").await;
            assert!(fill(&a, 3).await > 50);
            a.close().await.expect("close");
            drop(a);
            check("a").await;
            check("b").await;
            let b = open("b").await;
            has(&b, 2, filled.1).await;
        });
    }
}

#[test]
fn a_name_opens_its_range_unless_a_file_is_called_so() {
    let world = machine(64 * MIB, true);
    world.add_file("/disk#b", 16 * MIB, 4096);
    world.add_file("/plain", 16 * MIB, 4096);
    run(&world, async {
        create_range(device(), &new("a", 12)).await.expect("created");
        create_range(device(), &new("b", 12)).await.expect("created");
        let (kind_of, text) = kind(init("c").await);
        assert_eq!(kind_of, ErrorKind::Invalid);
        assert!(text.contains("/disk has no range 'c'; its ranges: a, b"), "{text}");
        let (kind_of, text) = kind(Store::init("/plain#a", InitOptions::default()).await);
        assert_eq!(kind_of, ErrorKind::Invalid);
        assert!(text.contains("/plain has no ranges; `forebay store ranges create /plain a` makes one"), "{text}");
        assert_eq!(kind(Store::open("/none#a", StoreOptions::default()).await).0, ErrorKind::NotFound);
        init("b").await.expect("init");
        let file = File::open("/disk#b", OpenOptions::read().direct()).expect("the file");
        assert!(file.read_exact_at(0, 4096).await.expect("read").starts_with(b"FOREBAY"), "the file has the store");
        let content = |listed: forebay_store::RangedDevice| listed.ranges[1].content.clone();
        assert_eq!(content(list_ranges(device()).await.expect("listed")), Occupant::Nothing);
        // A new file may have such a name, where nothing has the first part of it.
        let options = InitOptions { size: 16 * MIB, ..InitOptions::default() };
        Store::init("/other#a", options).await.expect("a file");
        File::open("/other#a", OpenOptions::read()).map(drop).expect("the file");
        let (kind_of, text) = kind(create_range(&named("a"), &new("inner", 2)).await);
        assert!(kind_of == ErrorKind::Invalid && text.contains("ranges of its own"), "{text}");
    });
}

#[test]
fn ranges_are_placed_shared_and_listed() {
    let world = machine(100 * MIB + 4096, true);
    run(&world, async {
        let mut shares = new("a", 10);
        shares.share = 300;
        let a = create_range(device(), &shares).await.expect("created");
        assert_eq!(a, RangeRecord { name: "a".into(), offset: MIB, len: 10 * MIB, share: 300 });
        let b = create_range(device(), &NewRange { size: Some(20 * MIB - 5), ..new("b", 0) }).await.expect("created");
        assert_eq!((b.offset, b.len), (11 * MIB, 20 * MIB), "rounded up");
        let (kind_of, text) = kind(create_range(device(), &new("c", 70)).await);
        assert!(kind_of == ErrorKind::NoSpace && text.contains("the largest has 72351744 bytes"), "{text}");
        assert_eq!(kind(create_range(device(), &new("a", 1)).await).0, ErrorKind::Exists);
        for wrong in [new("a b", 1), new("", 1), new("c", 0), NewRange { share: 0, ..new("c", 1) }] {
            assert_eq!(kind(create_range(device(), &wrong).await).0, ErrorKind::Invalid, "{wrong:?}");
        }
        remove_range(device(), "a", false).await.expect("empty");
        let d = create_range(device(), &new("d", 4)).await.expect("created");
        assert_eq!(d.offset, MIB, "the first unused part that is large enough");
        let rest = create_range(device(), &NewRange { size: None, ..new("rest", 1) }).await.expect("created");
        assert_eq!((rest.offset, rest.len), (31 * MIB, 69 * MIB), "the largest unused part");
        let open = File::open(DISK, OpenOptions::read()).expect("the disk");
        let listed = list_ranges(device()).await.expect("listed");
        assert_eq!((listed.size, listed.queue_depth, listed.unused), (100 * MIB + 4096, 128, 6 * MIB));
        assert_eq!(listed.ranges.iter().map(|range| range.requests).collect::<Vec<_>>(), [42, 42, 42]);
        assert_eq!(names().await, ["d", "b", "rest"]);
        drop(open);
    });
}

#[test]
fn a_file_is_extended_by_ranges_and_keeps_its_space() {
    let world = World::new(1, Faults { files_capacity: Some(80 * MIB), ..Faults::none() });
    run(&world, async {
        let (kind_of, _) = kind(create_range(device(), &NewRange { size: None, ..new("a", 0) }).await);
        assert_eq!(kind_of, ErrorKind::NoSpace, "a new file has no unused part");
        assert!(File::open(DISK, OpenOptions::read()).is_err(), "the file was removed again");
        create_range(device(), &new("a", 30)).await.expect("created");
        create_range(device(), &new("b", 20)).await.expect("created");
        assert_eq!(kind(create_range(device(), &new("c", 60)).await).0, ErrorKind::NoSpace);
        let file = File::open(DISK, OpenOptions::read()).expect("the file");
        assert_eq!(file.size().expect("size"), 51 * MIB, "as before");
        assert!(file.allocated_size().expect("size").is_some_and(|size| size >= 50 * MIB), "allocated");
        init("a").await.expect("init");
        // Others take all other space of the file system.
        let filler = File::open("/filler", OpenOptions::read_write().create()).expect("a file");
        let mut at = 0;
        while filler.allocate(at, MIB).await.is_ok() {
            at += MIB;
        }
        let store = open("a").await;
        assert!(fill(&store, 1).await > 100);
        store.close().await.expect("close");
        drop(store);
        check("a").await;
    });
}

#[test]
fn devices_that_hold_something_are_not_divided_or_overwritten_without_force() {
    for is_device in [true, false] {
        let world = machine(64 * MIB, is_device);
        run(&world, async {
            let whole = InitOptions { size: 64 * MIB, ..InitOptions::default() };
            Store::init(DISK, whole.clone()).await.expect("init");
            let (kind_of, text) = kind(create_range(device(), &new("a", 12)).await);
            assert!(kind_of == ErrorKind::Exists && text.contains("/disk holds a Forebay store"), "{text}");
            let store = Store::open(DISK, StoreOptions::default()).await.expect("unharmed");
            let force = NewRange { force: true, ..new("a", 12) };
            assert_eq!(kind(create_range(device(), &force).await).0, ErrorKind::Busy, "it is open");
            store.close().await.expect("close");
            drop(store);
            create_range(device(), &force).await.expect("forced");
            let listed = list_ranges(device()).await.expect("listed");
            assert!(!matches!(listed.ranges[0].content, Occupant::Store | Occupant::DamagedStore(_)), "{listed:?}");
            let (kind_of, text) = kind(Store::init(DISK, whole.clone()).await);
            assert!(kind_of == ErrorKind::Exists && text.contains("holds named ranges of Forebay"), "{text}");
            let a = InitOptions { force: true, ..InitOptions::default() };
            Store::init(named("a"), a).await.expect("forced");
            let store = open("a").await;
            let force = InitOptions { force: true, ..whole };
            assert_eq!(kind(Store::init(DISK, force.clone()).await).0, ErrorKind::Busy, "a range is open");
            store.close().await.expect("close");
            drop(store);
            Store::init(DISK, force).await.expect("forced");
            assert!(kind(list_ranges(device()).await).1.starts_with("/disk has no ranges"));
        });
    }
}

#[test]
fn ranges_that_hold_a_store_or_are_open_are_not_removed() {
    let world = machine(64 * MIB, true);
    run(&world, async {
        create_range(device(), &new("a", 12)).await.expect("created");
        create_range(device(), &new("b", 12)).await.expect("created");
        init("a").await.expect("init");
        init("b").await.expect("init");
        let store = open("a").await;
        for force in [false, true] {
            let (kind_of, text) = kind(remove_range(device(), "a", force).await);
            assert!(kind_of == ErrorKind::Busy && text.contains("/disk#a is in use"), "{text}");
        }
        let listed = list_ranges(device()).await.expect("listed");
        let of = |i: usize| (listed.ranges[i].in_use, listed.ranges[i].content.clone());
        assert_eq!([of(0), of(1)], [(true, Occupant::Store), (false, Occupant::Store)]);
        // Others are created and removed meanwhile.
        create_range(device(), &new("c", 12)).await.expect("created");
        remove_range(device(), "c", false).await.expect("empty");
        let (kind_of, text) = kind(remove_range(device(), "c", false).await);
        assert!(kind_of == ErrorKind::Invalid && text.contains("its ranges: a, b"), "{text}");
        store.close().await.expect("close");
        drop(store);
        let (kind_of, text) = kind(remove_range(device(), "a", false).await);
        assert!(kind_of == ErrorKind::Exists && text.contains("/disk#a holds a Forebay store"), "{text}");
        check("a").await;
        remove_range(device(), "a", true).await.expect("forced");
        check("b").await;
        create_range(device(), &new("a", 12)).await.expect("created again");
        assert_eq!(kind(Store::open(named("a"), StoreOptions::default()).await).0, ErrorKind::Invalid, "erased");
        // A discarded device may still hold data.
        let forced = InitOptions { force: true, ..InitOptions::default() };
        Store::init(named("a"), forced).await.expect("made again");
        remove_range(device(), "a", true).await.expect("forced");
        remove_range(device(), "b", true).await.expect("forced");
        assert!(kind(list_ranges(device()).await).1.starts_with("/disk has no ranges"));
        let (_, text) = kind(Store::init(DISK, InitOptions::default()).await);
        assert!(text.contains("/disk holds unknown data"), "no store, and no ranges: {text}");
    });
}

#[test]
fn a_power_failure_at_any_point_of_changes_leaves_a_table_before_or_after() {
    let mut seen = std::collections::BTreeSet::new();
    // What is written first is lost with some seeds only.
    let early = (0..5).flat_map(|point| (0..5).map(move |seed| (point, 2 * seed)));
    for (point, seed) in early.chain((5..60).map(|point| (point, point))) {
        let world = machine_of(seed, 16 * MIB, true);
        run(&world, async {
            create_range(device(), &new("a", 3)).await.expect("created");
            init("a").await.expect("init");
        });
        let reactor = world.reactor();
        world.crash_at_point(Some(world.points() + point));
        let ended = world.run(&reactor, async {
            create_range(device(), &new("b", 3)).await.expect("created");
            create_range(device(), &new("c", 3)).await.expect("created");
            remove_range(device(), "b", false).await.expect("removed");
        });
        world.crash_at_point(None);
        world.crash(reactor, if seed % 2 == 0 { CrashKind::Power } else { CrashKind::Kill });
        run(&world, async {
            let found = names().await.join(" ");
            assert!(["a", "a b", "a b c", "a c"].contains(&&found[..]), "point {point}: {found}");
            seen.insert(found);
            if point % 5 == 0 {
                check("a").await;
            }
            create_range(device(), &new("d", 3)).await.expect("created");
            assert!(names().await.contains(&"d".to_owned()));
        });
        if ended.is_ok() && point > 3 {
            break;
        }
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
}

#[test]
fn a_power_failure_at_any_point_of_removing_the_last_range_leaves_it_or_none() {
    let mut seen = [0, 0];
    for point in 0..60 {
        let world = machine_of(point, 16 * MIB, true);
        run(&world, async {
            create_range(device(), &new("a", 3)).await.expect("created");
            create_range(device(), &new("b", 3)).await.expect("created");
            remove_range(device(), "a", false).await.expect("removed");
        });
        let reactor = world.reactor();
        world.crash_at_point(Some(world.points() + point));
        let ended = world.run(&reactor, async { remove_range(device(), "b", false).await.expect("removed") });
        world.crash_at_point(None);
        world.crash(reactor, CrashKind::Power);
        run(&world, async {
            match list_ranges(device()).await {
                Ok(listed) => {
                    assert_eq!(listed.ranges.len(), 1, "point {point}");
                    assert_eq!(listed.ranges[0].record.name, "b", "point {point}");
                    seen[0] += 1;
                }
                // A torn table is found, and may be overwritten.
                Err(error) => {
                    let force = error.kind() == ErrorKind::Corrupt;
                    assert!(force || error.to_string().starts_with("/disk has no ranges"), "{error}");
                    create_range(device(), &NewRange { force, ..new("c", 3) }).await.expect("created");
                    seen[1] += 1;
                }
            }
        });
        if ended.is_ok() {
            break;
        }
    }
    assert!(seen.iter().all(|&count| count > 1), "{seen:?}");
}

#[test]
fn one_damaged_copy_of_the_table_is_made_up_for() {
    let world = machine(64 * MIB, true);
    let put = async |at: u64, bytes: &[u8]| {
        let whole = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        whole.write_at(Buf::copy_of(bytes), at).await.expect("written");
        whole.sync_data().await.expect("synced");
    };
    run(&world, async {
        create_range(device(), &new("a", 12)).await.expect("created");
        init("a").await.expect("init");
    });
    let sealed = world.peek(DISK, PLACES[0], 4096).expect("a disk");
    assert_eq!(RangeTable::decode(&sealed).expect("a table").ranges.len(), 1, "both places have the first table");
    for place in PLACES {
        run(&world, async {
            let mut damaged = world.peek(DISK, place, 4096).expect("a disk");
            damaged[50] ^= 1;
            put(place, &damaged).await;
            assert_eq!(names().await, ["a"]);
            check("a").await;
            create_range(device(), &new("b", 12)).await.expect("created");
            assert_eq!(names().await, ["a", "b"]);
            remove_range(device(), "b", false).await.expect("removed");
            assert_eq!(names().await, ["a"], "both copies are good again");
        });
    }
    run(&world, async {
        let mut damaged = world.peek(DISK, PLACES[0], 4096).expect("a disk");
        damaged[50] ^= 1;
        for place in PLACES {
            put(place, &damaged).await;
        }
        for result in [
            list_ranges(device()).await.map(drop),
            create_range(device(), &new("b", 12)).await.map(drop),
            remove_range(device(), "a", true).await,
            Store::open(named("a"), StoreOptions::default()).await.map(drop),
        ] {
            let (kind_of, text) = kind(result);
            assert!(kind_of == ErrorKind::Corrupt && text.contains("both copies of its range table"), "{text}");
        }
        create_range(device(), &NewRange { force: true, ..new("a", 12) }).await.expect("the same range again");
        check("a").await;
    });
}

#[test]
fn a_newer_table_is_never_changed() {
    let world = machine(64 * MIB, true);
    run(&world, async {
        create_range(device(), &new("a", 12)).await.expect("created");
        let whole = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let mut newer = world.peek(DISK, PLACES[1], 4096).expect("a disk");
        newer[16] = 2;
        let len = u32::from_le_bytes(newer[12..16].try_into().expect("four")) as usize;
        newer[8..12].fill(0);
        let crc = forebay_accel::crc32c::crc32c(&newer[..len]);
        newer[8..12].copy_from_slice(&crc.to_le_bytes());
        whole.write_at(Buf::copy_of(&newer), PLACES[1]).await.expect("written");
        drop(whole);
        for result in [
            list_ranges(device()).await.map(drop),
            create_range(device(), &NewRange { force: true, ..new("b", 12) }).await.map(drop),
            remove_range(device(), "a", true).await,
            Store::open(named("a"), StoreOptions::default()).await.map(drop),
        ] {
            let (kind_of, text) = kind(result);
            assert!(kind_of == ErrorKind::Unsupported && text.contains("version 2"), "{text}");
        }
    });
}

#[test]
fn ranges_created_at_the_same_time_do_not_overlap() {
    for is_device in [true, false] {
        let world = machine(if is_device { 64 * MIB } else { 0 }, is_device);
        run(&world, async {
            let tasks = ["a", "b", "c", "d", "e"].map(|name| {
                spawn(async move {
                    create_range(device(), &new(name, 3)).await.expect("created");
                    if name == "c" {
                        remove_range(device(), name, false).await.expect("removed");
                    }
                })
            });
            for task in tasks {
                task.await;
            }
            let mut names = names().await;
            names.sort_unstable();
            assert_eq!(names, ["a", "b", "d", "e"]);
        });
    }
}

#[test]
fn a_store_has_no_more_requests_in_flight_than_its_share() {
    let slow = DiskFaults { read_latency: 1_000..90_000, write_latency: 1_000..90_000, ..DiskFaults::none() };
    let world = World::new(1, Faults { disk: slow, ..Faults::none() });
    world.add_disk(DISK, 64 * MIB, 4096);
    for (name, share) in [("small", 2), ("large", 98)] {
        let created = run(&world, async {
            create_range(device(), &NewRange { share, ..new(name, 24) }).await.expect("created");
            init(name).await
        });
        created.expect("init");
    }
    for (name, most) in [("small", 2), ("large", 125)] {
        run(&world, async {
            let store = open(name).await;
            world.take_most_in_flight(DISK);
            let count = 40;
            let tasks: Vec<_> = (0..count)
                .map(|number| {
                    let store = store.clone();
                    spawn(async move {
                        let data = Buf::copy_of(&vec![number as u8; OBJECT]).into();
                        let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
                        let name = ObjectName::new(format!("o{number}"));
                        store.submit(&name, write).await.expect("written");
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            store.close().await.expect("close");
            drop(store);
            let options = StoreOptions { data_cache: 0, ..StoreOptions::default() };
            let store = Store::open(named(name), options).await.expect("open");
            let reads: Vec<_> = (0..count)
                .map(|number| {
                    let store = store.clone();
                    spawn(async move { has_one(&store, number).await })
                })
                .collect();
            for read in reads {
                read.await;
            }
            let seen = world.take_most_in_flight(DISK).expect("the disk");
            assert!(seen <= most, "{name}: {seen} requests in flight");
            assert!(if most == 2 { seen == 2 } else { seen > 10 }, "{name}: {seen} requests in flight");
        });
    }
}

async fn has_one(store: &Store, number: u64) {
    let read = ObjectRead::head(0, OBJECT as u64);
    let name = ObjectName::new(format!("o{number}"));
    let found = store.read(&name, read).await.expect("read").fill(read.extent).to_vec();
    assert!(found == vec![number as u8; OBJECT], "object {number}");
}

#[test]
fn a_store_on_several_devices_has_ranges_as_devices() {
    let world = World::new(1, Faults::none());
    let disk = |number: usize| PathBuf::from(format!("/disk{number}"));
    let range = |number: usize, name: &str| PathBuf::from(format!("/disk{number}#{name}"));
    (0..4).for_each(|number| world.add_disk(disk(number), 40 * MIB, 4096));
    let open = async |paths: &[PathBuf]| Store::open_devices(paths, None, StoreOptions::default()).await.expect("open");
    run(&world, async {
        for number in 0..4 {
            for name in ["a", "b"] {
                create_range(&disk(number), &new(name, 16)).await.expect("created");
            }
        }
        let mut paths: Vec<PathBuf> = (0..3).map(|number| range(number, "a")).collect();
        let options = DeviceSetOptions { data: 2, parity: 1, ..DeviceSetOptions::default() };
        Store::init_devices(&paths, &options, |_, _| {}).await.expect("init");
        let store = open(&paths).await;
        let count = fill(&store, 5).await;
        // The other ranges of the same devices have a store of their own.
        let others: Vec<PathBuf> = (0..3).map(|number| range(number, "b")).collect();
        Store::init_devices(&others, &options, |_, _| {}).await.expect("init");
        let other = open(&others).await;
        fill(&other, 6).await;
        assert_eq!(kind(store.add_device(&range(3, "c"), 0, false).await).0, ErrorKind::Invalid);
        store.add_device(&range(3, "a"), 0, false).await.expect("added");
        let replaced = store.replace_device(1, &range(3, "b"), false).await.expect("replaced");
        while store.devices().iter().any(|device| device.number == 1 || device.replaces.is_some()) {
            sleep(Duration::from_millis(1)).await;
        }
        all_active(&store).await;
        assert!(store.devices().iter().any(|device| device.number == replaced && device.path == range(3, "b")));
        has(&store, 5, count).await;
        store.close().await.expect("close");
        other.close().await.expect("close");
        drop((store, other));
        paths[1] = range(3, "b");
        paths.push(range(3, "a"));
        remove_range(&disk(1), "a", true).await.expect("it is not used any more");
        for paths in [&paths, &others] {
            let options = CheckOptions { data: true, ..CheckOptions::default() };
            let report = Store::check_devices(paths, None, options, |_, _| {}).await.expect("check");
            assert!(report.is_clean(), "{report:#?}");
        }
        yield_now().await;
        fs::sync_dir("/").expect("synced");
    });
}
