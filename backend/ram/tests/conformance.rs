//! Tests of the memory backend against the conformance cases, and against an even simpler model.

mod plain;

use std::future::Future;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forebay_block::{
    Buf, BufList, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, ObjectRead, SnapContext, SnapId, Transaction,
};
use forebay_ram::{RamBackend, conformance};
use proptest::prelude::*;

/// Runs a future that never waits, as all futures of the memory backend.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the memory backend never waits"),
    }
}

#[test]
fn every_case_on_a_pool_of_its_own() {
    for (name, case) in conformance::CASES {
        println!("{name}");
        at_once(case(RamBackend::new("ram")));
    }
}

/// Checks that memory moved to a huge page, once most of a chunk of 2 MiB exists, has the same content for reads,
/// snapshots and drops.
#[test]
fn an_object_of_many_chunks_is_what_was_written() {
    const LEN: usize = 5 << 20;
    const PAGE: usize = 4096;
    let backend = RamBackend::new("ram");
    let name = ObjectName::new("large");
    let write = |offset: usize, byte: u8, len: usize, snapc: Option<&Rc<SnapContext>>| {
        let data = BufList::from(Buf::copy_of(&vec![byte; len]));
        let ops = vec![ObjectOp::Write { offset: offset as u64, data }];
        let transaction = Transaction { snapc: snapc.cloned(), ops, ..Transaction::default() };
        at_once(backend.submit(&name, transaction)).expect("there is room");
    };
    let read = |snap| {
        let extent = Extent::new(0, LEN as u64);
        let data = at_once(backend.read(&name, ObjectRead::new(snap, extent))).expect("it is there");
        data.fill(extent).to_vec()
    };
    // Permuted order, so that chunks fill up concurrently.
    let pages = LEN / PAGE;
    let number = |at: usize| at * 577 % pages;
    let mut model = vec![0; LEN];
    for page in (0..pages).map(number) {
        write(page * PAGE, page as u8, PAGE, None);
        model[page * PAGE..][..PAGE].fill(page as u8);
    }
    assert!(read(SnapId::HEAD) == model);
    let held = at_once(backend.read(&name, ObjectRead::new(SnapId::HEAD, Extent::new(0, 8192)))).expect("it is there");
    let snap = at_once(backend.snap_allocate()).expect("a number");
    let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
    let before = model.clone();
    for page in (0..pages).map(number).step_by(3) {
        write(page * PAGE + 100, 0xEE, 1000, Some(&snapc));
        model[page * PAGE + 100..][..1000].fill(0xEE);
    }
    assert!(read(SnapId::HEAD) == model, "the head");
    assert!(read(snap) == before, "the snapshot");
    assert!(held.fill(Extent::new(0, 8192)).to_vec() == before[..8192], "what was read before");
    let added = pages.div_ceil(3);
    let usage = at_once(backend.usage()).expect("it is known");
    assert_eq!(usage.used, ((pages + added) * PAGE) as u64);
    at_once(backend.snap_remove(snap)).expect("it was there");
    assert!(read(SnapId::HEAD) == model, "without the snapshot");
    assert_eq!(at_once(backend.usage()).expect("it is known").used, LEN as u64);
}

/// Checks a chunk's transitions: to a table with the 65th page, to a huge page with the 384th, and back below 128.
/// Earlier reads and a snapshot keep their content through all of them.
#[test]
fn a_chunk_changes_its_memory_under_readers_and_snapshots() {
    const PAGE: u64 = 4096;
    let backend = RamBackend::new("ram");
    let name = ObjectName::new("chunk");
    let submit = |ops: Vec<ObjectOp>, snapc: Option<&Rc<SnapContext>>| {
        at_once(backend.submit(&name, Transaction { snapc: snapc.cloned(), ops, ..Transaction::default() }))
    };
    let page = |number: u64, byte: u8| {
        let data = BufList::from(Buf::copy_of(&[byte; PAGE as usize]));
        ObjectOp::Write { offset: number * PAGE, data }
    };
    let read = |snap, number: u64| {
        let extent = Extent::new(number * PAGE, PAGE);
        at_once(backend.read(&name, ObjectRead::new(snap, extent))).expect("it is there").fill(extent)
    };
    let used = || at_once(backend.usage()).expect("it is known").used / PAGE;
    let mut held = Vec::new();
    let mut snaps: Vec<(SnapId, u64)> = Vec::new();
    let mut snapc = None;
    for number in 0..512_u64 {
        if [64, 383].contains(&number) {
            // Just before the table, and before the huge page: a reader of one page, a snapshot that shares all of
            // them.
            held.push((read(SnapId::HEAD, 0), read(SnapId::HEAD, number - 1)));
            let snap = at_once(backend.snap_allocate()).expect("a number");
            snaps.push((snap, number));
            let newest_first = snaps.iter().rev().map(|(snap, _)| *snap).collect();
            snapc = Some(Rc::new(SnapContext { seq: snap.0, snaps: newest_first }));
        }
        submit(vec![page(number, number as u8)], snapc.as_ref()).expect("written");
        if [64, 383].contains(&number) {
            submit(vec![page(0, 0xE0 + snaps.len() as u8)], snapc.as_ref()).expect("written");
        }
    }
    // A failed transaction of several steps leaves the object unchanged.
    let wrong = ObjectOp::Compare { offset: 0, data: BufList::from(Buf::copy_of(b"not this")) };
    submit(vec![page(1, 0xFF), wrong], snapc.as_ref()).expect_err("it holds something else");
    let first = |count: usize| if count == 0 { 0 } else { 0xE0 + count as u8 };
    let check = |number: u64, count: usize, data: &BufList| {
        let wanted = if number == 0 { first(count) } else { number as u8 };
        assert!(data.to_vec() == [wanted; PAGE as usize], "page {number}");
    };
    (0..512).for_each(|number| check(number, 2, &read(SnapId::HEAD, number)));
    for (count, (snap, pages)) in snaps.iter().enumerate() {
        (0..*pages).for_each(|number| check(number, count, &read(*snap, number)));
    }
    for (count, (zeroth, last)) in held.iter().enumerate() {
        check(0, count, zeroth);
        check(snaps[count].1 - 1, count, last);
    }
    // Each snapshot has a page 0 of its own.
    assert_eq!(used(), 512 + 2);
    for (snap, _) in &snaps {
        at_once(backend.snap_remove(*snap)).expect("it was there");
    }
    assert_eq!(used(), 512);
    let kept = read(SnapId::HEAD, 500);
    submit(vec![ObjectOp::Zero { extent: Extent::new(100 * PAGE, 400 * PAGE) }], None).expect("discarded");
    assert_eq!(used(), 112);
    (1..100).chain(500..512).for_each(|number| check(number, 2, &read(SnapId::HEAD, number)));
    check(500, 2, &kept);
    assert!(read(SnapId::HEAD, 300).to_vec() == [0; PAGE as usize]);
    for number in 100..500 {
        submit(vec![page(number, number as u8)], None).expect("written");
    }
    (0..512).for_each(|number| check(number, 2, &read(SnapId::HEAD, number)));
}

#[test]
fn all_cases_on_one_pool() {
    let backend = RamBackend::new("ram");
    for (name, case) in conformance::CASES {
        println!("{name}");
        at_once(case(backend.clone()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn agrees_with_the_plain_model(seed in any::<u64>()) {
        let steps = conformance::steps_from_seed(seed, 40);
        at_once(conformance::compare(RamBackend::new("ram"), Rc::new(plain::Plain::default()), &steps));
    }
}

#[test]
fn a_full_pool_refuses_writes_and_frees_space() {
    let backend = RamBackend::with_capacity("ram", 10 * 4096);
    let object = ObjectName::new("o");
    let submit = |op| at_once(backend.submit(&object, Transaction::of(op))).map_err(|error| error.kind());
    let write = |offset, len| ObjectOp::Write { offset, data: BufList::zeroes(len) };
    assert!(submit(write(0, 10 * 4096)).is_ok());
    assert_eq!(submit(write(10 * 4096, 1)), Err(ErrorKind::NoSpace));
    assert!(submit(write(5, 9 * 4096)).is_ok(), "overwriting needs no space");
    let usage = at_once(backend.usage()).expect("usage");
    assert_eq!((usage.capacity, usage.used, usage.available, usage.objects), (40960, 40960, 0, 1));
    assert!(submit(ObjectOp::Zero { extent: Extent::new(100, 3 * 4096) }).is_ok());
    assert_eq!(at_once(backend.usage()).expect("usage").available, 2 * 4096);
    assert_eq!(submit(write(0, 11 * 4096)), Err(ErrorKind::NoSpace));
    assert!(submit(write(10 * 4096, 2 * 4096)).is_ok());
    assert!(submit(ObjectOp::Remove).is_ok());
    assert_eq!(at_once(backend.usage()).expect("usage").used, 0);
}

#[test]
fn writes_together_are_done_wholly_or_not_at_all() {
    let backend = RamBackend::with_capacity("ram", 4 * 4096);
    let object = ObjectName::new("o");
    let write = |offset, byte, len| ObjectOp::Write { offset, data: Buf::copy_of(&vec![byte; len]).into() };
    let submit = |ops| at_once(backend.submit(&object, Transaction::new(ops))).map(drop).map_err(|error| error.kind());
    let first = || {
        let read = at_once(backend.read(&object, ObjectRead::head(0, 1))).expect("a read");
        read.runs[0].1.to_vec()[0]
    };
    assert_eq!(submit(vec![write(0, 1, 4096), write(8192, 1, 4096)]), Ok(()));
    assert_eq!(submit(vec![write(0, 2, 4096), write(4096, 2, 3 * 4096 + 1)]), Err(ErrorKind::NoSpace));
    assert_eq!(first(), 1, "the write before the one without room was undone");
    assert_eq!(submit(vec![write(0, 3, 4096), write(u64::MAX, 3, 4096)]), Err(ErrorKind::OutOfRange));
    assert_eq!(first(), 1);
    // Two pages are free; each of these writes needs one, and the last shares the first one's.
    assert_eq!(submit(vec![write(4096, 4, 10), write(12288, 4, 10), write(4106, 4, 10)]), Ok(()));
    assert_eq!(at_once(backend.usage()).expect("usage").available, 0);
}

#[test]
fn snapshots_share_what_is_not_rewritten() {
    let backend = RamBackend::new("ram");
    let object = ObjectName::new("o");
    let used = || at_once(backend.usage()).expect("usage").used / 4096;
    let data = Buf::copy_of(&[1; 8 * 4096]);
    at_once(backend.submit(&object, Transaction::of(ObjectOp::Write { offset: 0, data: data.clone().into() })))
        .expect("a write");
    let snap = at_once(backend.snap_allocate()).expect("a number");
    let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
    let rewrite = ObjectOp::Write { offset: 4096, data: data.slice(0..2 * 4096).into() };
    at_once(backend.submit(&object, Transaction::of(rewrite).with_snapc(snapc))).expect("a write");
    assert_eq!(used(), 10);
    at_once(backend.snap_remove(snap)).expect("removed");
    assert_eq!(used(), 8);
}
