//! Single flight: many readers, one read of the backend.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use forebay_block::{ErrorKind, Extent, SnapshotCache, SnapshotRead};
use forebay_reactor::sync::join_all;
use forebay_reactor::{now, sleep, spawn, yield_now};
use forebay_readcache::{CacheOptions, PART_LEN, ReadCache};

use crate::common::{Backend, OBJECT, a_part_with_data, content, live, options, world, written};

const SNAP: u64 = 4;

#[test]
fn fifty_readers_read_each_byte_of_the_parent_once() {
    for memory in [64 << 20, 1 << 20] {
        let world = world(1);
        live(&world, async {
            let (cache, backend) = (ReadCache::open(options(memory)).await, Backend::new());
            backend.delay.set(Duration::from_millis(2));
            let readers = (0..50).map(|reader: u64| {
                let (cache, backend) = (cache.clone(), backend.clone());
                spawn(async move {
                    // Each begins a little later, in steps of 24 KiB, which parts are no multiple of.
                    sleep(Duration::from_millis(reader % 7)).await;
                    for object in 0..2 {
                        for from in (0..OBJECT).step_by(24 << 10) {
                            let extent = Extent::new(from, (24 << 10).min(OBJECT - from));
                            let read = backend.read(&cache, SNAP, object, extent).await.expect("a read");
                            assert!(read == content(SNAP, object, extent), "reader {reader}, {extent:?}");
                        }
                    }
                })
            });
            join_all(readers).await;
            let bytes = backend.bytes.get();
            assert!(bytes <= 2 * OBJECT * 105 / 100, "{bytes} bytes of {} were read", 2 * OBJECT);
            let stats = cache.stats();
            assert_eq!(stats.parents.fetched_bytes, bytes);
            assert!(stats.parents.hits_joined > 0 && stats.parents.misses * PART_LEN == bytes, "{stats:?}");
            cache.close().await;
        });
    }
}

#[test]
fn adjacent_missing_parts_are_read_at_once() {
    let world = world(2);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let (object, part) = a_part_with_data(SNAP);
        backend.check_part(&cache, SNAP, (object, part)).await;
        backend.seen.borrow_mut().clear();
        let whole = Extent::new(0, OBJECT);
        assert!(backend.read(&cache, SNAP, object, whole).await.expect("a read") == content(SNAP, object, whole));
        let at = part * PART_LEN;
        let rest = [Extent::new(0, at), Extent::new(at + PART_LEN, OBJECT - at - PART_LEN)];
        let seen: Vec<_> = backend.seen.borrow().iter().map(|(_, _, extent)| *extent).collect();
        assert_eq!(seen, rest.into_iter().filter(|extent| extent.len > 0).collect::<Vec<_>>());
        cache.close().await;
    });
}

#[test]
fn after_an_error_those_who_wait_and_the_next_one_read_again() {
    let world = world(3);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let (object, part) = a_part_with_data(SNAP);
        backend.delay.set(Duration::from_millis(1));
        backend.fail(Some(ErrorKind::TimedOut));
        let extent = Extent::new(part * PART_LEN, 4096);
        let readers = (0..10).map(|_| {
            let (cache, backend) = (cache.clone(), backend.clone());
            spawn(async move { backend.read(&cache, SNAP, object, extent).await })
        });
        let kinds = join_all(readers).await.into_iter().map(|read| read.expect_err("fails").kind());
        assert!(kinds.collect::<Vec<_>>() == [ErrorKind::TimedOut; 10]);
        // The nine that have joined ask once more each: their clients may be other ones.
        assert_eq!((backend.fetches.get(), cache.stats().fetch_errors), (10, 1));
        backend.fail(None);
        backend.check_part(&cache, SNAP, (object, part)).await;
        assert_eq!(backend.fetches.get(), 11);
        cache.close().await;
    });
}

#[test]
fn a_reader_that_gives_up_takes_nothing_from_the_others() {
    let world = world(4);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let (object, part) = a_part_with_data(SNAP);
        backend.delay.set(Duration::from_millis(5));
        let extent = Extent::new(part * PART_LEN, PART_LEN);
        {
            let mut first = pin!(backend.read(&cache, SNAP, object, extent));
            assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        let begun = now();
        backend.check_part(&cache, SNAP, (object, part)).await;
        assert_eq!(backend.fetches.get(), 1, "the read that nobody waited for was the one");
        assert!(begun.elapsed() >= Duration::from_millis(4));
        // The same with nobody left: the part is there afterwards.
        let other = if part + 1 < 64 { part + 1 } else { part - 1 };
        {
            let mut alone = pin!(backend.read(&cache, SNAP, object, Extent::new(other * PART_LEN, 512)));
            assert!(alone.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        sleep(Duration::from_millis(10)).await;
        backend.check_part(&cache, SNAP, (object, other)).await;
        assert_eq!(backend.fetches.get(), 2);
        cache.close().await;
    });
}

/// Returns a read of an object that does not exist.
async fn read_absent(cache: &ReadCache, backend: &Rc<Backend>, object: u64, inherits: bool) {
    let (snapshot, extent) = (crate::common::snapshot(SNAP), Extent::new(0, 4096));
    let read = SnapshotRead { snapshot, object, object_size: OBJECT, extent, inherits };
    let read = cache.read(read, backend.fetch(SNAP, object)).await;
    assert_eq!(read.expect_err("absent").kind(), ErrorKind::NotFound);
}

#[test]
fn absent_objects_are_asked_for_once_unless_they_inherit_data() {
    let world = world(5);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let mut absent = (0..).filter(|&object| content(SNAP, object, Extent::new(0, 1)).is_none());
        let [once, inheriting] = [absent.next().expect("one"), absent.next().expect("two")];
        for part in 0..64 {
            backend.check_part(&cache, SNAP, (once, part)).await;
        }
        assert_eq!(backend.fetches.get(), 1);
        // It may be copied up between two reads, and its parent's parent removed, which this reader does not know.
        for asked in 2..5 {
            read_absent(&cache, &backend, inheriting, true).await;
            assert_eq!(backend.fetches.get(), asked);
        }
        // Nothing is inherited any more.
        read_absent(&cache, &backend, inheriting, false).await;
        read_absent(&cache, &backend, inheriting, false).await;
        assert_eq!(backend.fetches.get(), 5);
        // A reader to which it is final does not take the word of one that inherits.
        let other = absent.next().expect("three");
        backend.delay.set(Duration::from_millis(5));
        let first = spawn({
            let (cache, backend) = (cache.clone(), backend.clone());
            async move { read_absent(&cache, &backend, other, true).await }
        });
        yield_now().await;
        read_absent(&cache, &backend, other, false).await;
        first.await;
        assert_eq!(backend.fetches.get(), 7);
        cache.close().await;
    });
}

/// The client of the reader that is first may be fenced, and that of the others is not.
#[test]
fn the_error_of_one_reader_is_not_that_of_another() {
    let world = world(7);
    live(&world, async {
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let fenced = Backend::new();
        fenced.fail(Some(ErrorKind::Fenced));
        fenced.delay.set(Duration::from_millis(5));
        let (object, part) = a_part_with_data(SNAP);
        let extent = Extent::new(part * PART_LEN, PART_LEN);
        let first = spawn({
            let (cache, fenced) = (cache.clone(), fenced.clone());
            async move { fenced.read(&cache, SNAP, object, extent).await }
        });
        yield_now().await;
        backend.check_part(&cache, SNAP, (object, part)).await;
        assert_eq!(first.await.expect_err("fenced").kind(), ErrorKind::Fenced);
        assert_eq!((fenced.fetches.get(), backend.fetches.get()), (1, 1));
        cache.close().await;
    });
}

#[test]
fn memory_is_bounded_without_a_disk_as_well() {
    let world = world(6);
    live(&world, async {
        let cache = ReadCache::open(CacheOptions { memory: 10 * PART_LEN, disk: None }).await;
        let backend = Backend::new();
        for object in 0..4 {
            for part in 0..64 {
                backend.check_part(&cache, SNAP, (object, part)).await;
            }
        }
        let stats = cache.stats();
        assert_eq!((stats.memory_bytes, stats.memory_capacity), (10 * PART_LEN, 10 * PART_LEN));
        assert!(stats.evicted_memory > 100 && stats.path.is_none(), "{stats:?}");
        let last = Rc::strong_count(&cache);
        assert_eq!(last, 1, "no read is left");
    });
}

#[test]
fn images_with_small_objects_bypass_the_cache() {
    let world = world(7);
    live(&world, async {
        use forebay_block::SnapshotCache;
        let (cache, backend) = (ReadCache::open(options(8 << 20)).await, Backend::new());
        let (object, _) = a_part_with_data(SNAP);
        let extent = Extent::new(0, 4096);
        for _ in 0..2 {
            let snapshot = crate::common::snapshot(SNAP);
            let read = forebay_block::SnapshotRead { snapshot, object, object_size: 32 << 10, extent, inherits: false };
            let data = cache.read(read, backend.fetch(SNAP, object)).await.expect("a read");
            assert!(Some(data.fill(extent).to_vec()) == content(SNAP, object, extent));
        }
        assert_eq!((backend.bytes.get(), cache.stats().parents.bypassed), (8192, 2));
        written(&cache).await;
        cache.close().await;
    });
}
