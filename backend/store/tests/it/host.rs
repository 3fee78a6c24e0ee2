//! Tests of a store in a file on a file system that other users fill up.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions, sleep};
use forebay_sim::{Faults, World};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};

const MIB: u64 = 1 << 20;
/// Size of the store in bytes, larger than the file system.
const SIZE: u64 = 96 * MIB;
const CAPACITY: u64 = 64 * MIB;

fn world(files_space_known: bool) -> World {
    machine(0, Faults { files_capacity: Some(CAPACITY), files_space_known, ..Faults::none() })
}

fn options(size: u64) -> InitOptions {
    InitOptions { size, segment_size: 128 << 10, ..InitOptions::default() }
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

fn name(object: u64) -> ObjectName {
    ObjectName::new(format!("o{object}"))
}

async fn write(store: &Store, object: u64) -> Result<u64> {
    let data = Buf::copy_of(&vec![object as u8 | 1; MIB as usize]).into();
    store.submit(&name(object), Transaction::of(ObjectOp::Write { offset: 0, data })).await
}

async fn is_whole(store: &Store, object: u64) -> bool {
    let read = store.read(&name(object), ObjectRead::head(0, MIB)).await.expect("read");
    read.runs.iter().map(|(_, data)| data.len() as u64).sum::<u64>() == MIB
        && read.runs.iter().all(|(_, data)| data.to_vec().iter().all(|&byte| byte == object as u8 | 1))
}

/// Allocates the remaining space of the file system, like another user.
async fn fill() -> File {
    let file = File::open("/filler", OpenOptions::read_write().create()).expect("a file");
    for at in (0..).step_by(1 << 16) {
        if file.allocate(at, 1 << 16).await.is_err() {
            break;
        }
    }
    file
}

/// Writes objects from `first` on until one is rejected; returns the error and the number of the rejected object.
async fn write_until_refused(store: &Store, first: u64) -> (Error, u64) {
    for object in first.. {
        if let Err(error) = write(store, object).await {
            return (error, object);
        }
    }
    unreachable!()
}

#[test]
fn a_host_that_fills_refuses_growth_in_time_takes_removals_and_recovers_by_itself() {
    let world = world(true);
    let kept = run(&world, async {
        Store::init(DISK, options(SIZE)).await.expect("init");
        let store = open().await;
        assert!(store.limited_by_host().is_some_and(|available| available > CAPACITY));
        for object in 0..8 {
            write(&store, object).await.expect("there is space");
        }
        let filler = fill().await;
        let (refused, count) = write_until_refused(&store, 8).await;
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        assert!(refused.to_string().contains("the host's file system is full"), "{refused}");
        store.flush().await.expect("all that was acknowledged has its space");
        let usage = store.usage().await.expect("usage");
        assert!(usage.available < 8 * MIB, "{usage:?}");
        // Removals succeed repeatedly; the oldest objects stay.
        for object in 4..count {
            store.submit(&name(object), Transaction::of(ObjectOp::Remove)).await.expect("removed");
            store.flush().await.expect("flushed");
        }
        for object in 0..4 {
            assert!(is_whole(&store, object).await, "object {object}");
        }
        filler.set_size(0).expect("the others are gone");
        for object in 4..40 {
            // The measured free space is cached for a moment.
            while let Err(error) = write(&store, object).await {
                assert_eq!(error.kind(), ErrorKind::NoSpace);
                sleep(Duration::from_millis(10)).await;
            }
        }
        store.flush().await.expect("flushed");
        40
    });
    run(&world, async {
        let store = open().await;
        for object in 0..kept {
            assert!(is_whole(&store, object).await, "object {object}, after a power failure");
        }
        store.close().await.expect("close");
        drop(store);
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        let report = Store::check(DISK, options, |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
    });
}

#[test]
fn a_host_that_is_full_when_the_power_fails_opens_again() {
    let world = world(true);
    let count = run(&world, async {
        Store::init(DISK, options(SIZE)).await.expect("init");
        let store = open().await;
        let (refused, count) = write_until_refused(&store, 0).await;
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        store.flush().await.expect("flushed");
        drop(fill().await);
        count
    });
    run(&world, async {
        let store = open().await;
        for object in 0..count {
            assert!(is_whole(&store, object).await, "object {object}");
        }
        let refused = write(&store, count).await.expect_err("it is still full");
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        for object in 0..count {
            store.submit(&name(object), Transaction::of(ObjectOp::Remove)).await.expect("removed");
        }
        store.close().await.expect("close");
    });
}

#[test]
fn a_store_that_cannot_be_allocated_leaves_what_was_there() {
    // With a file system that reports its free space, and one that does not.
    for known in [true, false] {
        let world = world(known);
        run(&world, async {
            Store::init(DISK, options(32 * MIB)).await.expect("init");
            let store = open().await;
            write(&store, 1).await.expect("written");
            store.close().await.expect("close");
            drop(store);
            let file = File::open(DISK, OpenOptions::read()).expect("the store");
            let (length, taken) = (file.size().expect("known"), file.allocated_size().expect("known"));
            let too_much = InitOptions { force: true, preallocate: true, ..options(SIZE) };
            let mut last = 0;
            let refused = Store::init_with_progress(DISK, too_much.clone(), |done, _| last = done).await;
            assert_eq!(refused.expect_err("it does not fit").kind(), ErrorKind::NoSpace);
            assert_eq!((file.size().expect("known"), last > 0), (length, !known));
            assert_eq!(file.allocated_size().expect("known"), taken, "it takes more or less than before");
            let store = open().await;
            assert!(is_whole(&store, 1).await);
            store.close().await.expect("close");
            drop(store);
            // The file created for it is removed again.
            Store::init("/other", InitOptions { force: false, ..too_much }).await.expect_err("it does not fit");
            assert!(File::open("/other", OpenOptions::read()).is_err());
            let fits = InitOptions { force: true, preallocate: true, ..options(48 * MIB) };
            Store::init(DISK, fits).await.expect("it fits");
            assert!(file.allocated_size().expect("known").expect("a file") >= file.size().expect("known"));
            let store = open().await;
            assert_eq!(store.stats().objects, 0);
            drop(fill().await);
            assert_eq!(store.limited_by_host(), None, "a file that is allocated has its space");
            for object in 0..32 {
                write(&store, object).await.expect("whatever others do");
            }
            store.close().await.expect("close");
        });
    }
}

#[test]
fn what_lies_behind_a_smaller_store_is_no_space_for_it() {
    let world = world(true);
    run(&world, async {
        let file = File::open(DISK, OpenOptions::read_write().create()).expect("a file");
        file.set_size(SIZE).expect("its length");
        // All its allocated space is beyond the requested 48 MiB.
        file.allocate(60 * MIB, 30 * MIB).await.expect("space");
        drop(file);
        let options = InitOptions { force: true, preallocate: true, ..options(48 * MIB) };
        let mut last = 0;
        let refused = Store::init_with_progress(DISK, options, |done, _| last = done).await.expect_err("no space");
        assert_eq!((refused.kind(), last), (ErrorKind::NoSpace, 0));
        assert!(refused.to_string().contains(&format!("{} bytes more", 48 * MIB)), "{refused}");
    });
}

#[test]
fn an_allocated_store_leaves_space_to_others() {
    let world = world(true);
    run(&world, async {
        let init = |size| Store::init("/other", InitOptions { preallocate: true, ..options(size) });
        let error = init(CAPACITY - MIB).await.expect_err("others would have 1 MiB");
        assert!(error.kind() == ErrorKind::NoSpace && error.to_string().contains("left to others"), "{error}");
        assert!(File::open("/other", OpenOptions::read()).is_err(), "half a store is left");
        init(CAPACITY - 4 * MIB).await.expect("others have a twentieth");
    });
}

#[test]
fn a_device_is_not_allocated() {
    let world = World::new(1, Faults::none());
    world.add_disk(DISK, 64 * MIB, 4096);
    run(&world, async {
        let options = InitOptions { preallocate: true, ..options(0) };
        let refused = Store::init(DISK, options).await.expect_err("a device");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    });
    assert!(world.peek(DISK, 0, 1 << 20).expect("the disk").iter().all(|&byte| byte == 0), "something was written");
}
