//! Tests of `drop_lost`: what a damaged index has lost is named before anything is written, and dropped on request.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::*;
use forebay_sim::{CrashKind, Faults, Rng, World};
use forebay_store::format::BlobPtr;
use forebay_store::format::anchor::{Anchor, SLOTS};
use forebay_store::format::node::Node;
use forebay_store::{CheckOptions, CheckReport, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const SIZE: u64 = 64 << 20;
const OBJECTS: u32 = 400;

fn name(number: u32) -> ObjectName {
    ObjectName::new(format!("object {number:04} {}", "n".repeat(60)))
}

async fn open() -> Rc<Store> {
    Store::open(DISK, StoreOptions::default()).await.expect("open")
}

fn write(byte: u8) -> Transaction {
    let data = Buf::copy_of(&[byte; 8192]).into();
    let pairs = vec![(b"key".to_vec(), vec![byte; 50])];
    Transaction::new(vec![ObjectOp::Write { offset: 4096, data }, ObjectOp::KvSet { pairs }])
}

/// Creates a store of objects with data and a key each, a third of them with a clone.
fn filled() -> (World, SnapId) {
    let world = machine(SIZE, Faults::none());
    let snap = run(&world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
        Store::init(DISK, options).await.expect("init");
        let store = open().await;
        for i in 0..OBJECTS {
            store.submit(&name(i), write(i as u8)).await.expect("write");
        }
        let snap = store.snap_allocate().await.expect("snapshot");
        let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
        for i in (0..OBJECTS).step_by(3) {
            store.submit(&name(i), write(i as u8).with_snapc(snapc.clone())).await.expect("write");
        }
        store.close().await.expect("close");
        snap
    });
    (world, snap)
}

/// Returns the nodes of the newest checkpoint's tree.
fn nodes(world: &World) -> Vec<(BlobPtr, Node)> {
    let superblock = world.peek(DISK, 0, 4096).expect("peek");
    let number = u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"));
    let read =
        |slot: [u64; 2]| Anchor::decode(&world.peek(DISK, slot[0], 4096).expect("peek"), number).expect("anchor");
    let root = SLOTS.map(read).into_iter().max_by_key(|anchor| anchor.generation).expect("an anchor").root;
    let (mut found, mut stack) = (Vec::new(), vec![root]);
    while let Some(ptr) = stack.pop() {
        let node = Node::decode(&world.peek(DISK, ptr.addr, ptr.len as usize).expect("peek")).expect("a node");
        if let Node::Inner { children, .. } = &node {
            stack.extend(children.iter().map(|(_, ptr)| *ptr));
        }
        found.push((ptr, node));
    }
    found
}

fn drop_lost(world: &World, force: bool) -> CheckReport {
    let options = CheckOptions { data: true, drop_lost: true, force, ..CheckOptions::default() };
    run(world, Store::check(DISK, options, |_, _| {})).expect("a report")
}

fn named(report: &CheckReport) -> BTreeMap<String, String> {
    let losses = report.findings.iter().filter(|finding| finding.place != "segments");
    losses.map(|finding| (finding.place.clone(), finding.problem.clone())).collect()
}

/// Damages a node, drops what is lost by it, and checks that every object is whole, or was named before and is absent.
/// Returns how many are absent.
fn dropped(world: &World, damaged: BlobPtr) -> u32 {
    run(world, flip(damaged.addr + 1));
    let disk = |world: &World| world.peek(DISK, 0, SIZE as usize).expect("peek");
    let before = disk(world);
    let report = drop_lost(world, false);
    assert!(report.waits_for_force && !report.is_clean(), "{report:#?}");
    assert!(disk(world) == before, "nothing was written");
    let told = named(&report);
    let unnamed: u32 = told.get("objects").map_or(0, |text| {
        text.split(' ').find_map(|word| word.parse().ok()).unwrap_or_else(|| panic!("a number: {text}"))
    });
    let report = drop_lost(world, true);
    assert!(!report.waits_for_force && report.is_clean(), "{report:#?}");
    assert_eq!(named(&report), told, "the same losses");
    let absent = run(world, async {
        let store = open().await;
        let (mut absent, mut absent_unnamed) = (0, 0);
        for i in 0..OBJECTS {
            let name = name(i);
            match store.read(&name, ObjectRead::head(4096, 8192)).await {
                Ok(read) => {
                    assert_eq!(read.fill(Extent { offset: 4096, len: 8192 }).to_vec(), [i as u8; 8192]);
                    let keys = store.kv_get(&name, vec![b"key".to_vec()]).await.expect("keys");
                    let lost = told.get(&name.to_string()).is_some_and(|problem| problem.contains("keys"));
                    assert!(keys == [Some(vec![i as u8; 50])] || (lost && keys == [None]), "{name}: {keys:?}");
                    if keys == [None] {
                        store.submit(&name, write(i as u8)).await.expect("write");
                    }
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                    absent += 1;
                    absent_unnamed += u32::from(!told.contains_key(&name.to_string()));
                    // It can be created again.
                    store.submit(&name, write(i as u8)).await.expect("write");
                }
            }
        }
        assert_eq!(absent_unnamed, unnamed, "{told:#?}");
        store.close().await.expect("close");
        absent
    });
    assert!(absent == 0 || report.freed_bytes > 0);
    let report = run(world, Store::check(DISK, CheckOptions { data: true, ..CheckOptions::default() }, |_, _| {}));
    assert!(report.as_ref().is_ok_and(CheckReport::is_clean), "{report:#?}");
    absent
}

/// Returns the leaves with a key of a kind.
fn leaves(world: &World, kind: u8) -> Vec<BlobPtr> {
    let has_kind = |node: &Node| matches!(node, Node::Leaf(pairs) if pairs.iter().any(|(key, _)| key[0] == kind));
    nodes(world).into_iter().filter(|(_, node)| has_kind(node)).map(|(ptr, _)| ptr).collect()
}

#[test]
fn objects_whose_records_are_lost_are_named_and_dropped() {
    let (world, _) = filled();
    let leaves = leaves(&world, b'o');
    let absent = dropped(&world, leaves[leaves.len() / 2]);
    assert!(absent > 0 && absent < OBJECTS, "{absent}");
}

#[test]
fn names_that_are_lost_are_made_anew_from_the_records() {
    let (world, _) = filled();
    let leaves = leaves(&world, b'n');
    assert_eq!(dropped(&world, leaves[leaves.len() / 2]), 0);
}

#[test]
fn objects_that_may_have_lost_keys_are_named() {
    let (world, _) = filled();
    let leaves = leaves(&world, b'k');
    assert_eq!(dropped(&world, leaves[leaves.len() / 2]), 0);
}

#[test]
fn a_store_that_lost_its_root_is_empty_afterwards() {
    let (world, _) = filled();
    let root = nodes(&world)[0].0;
    assert_eq!(dropped(&world, root), OBJECTS);
}

#[test]
fn every_node_can_be_lost() {
    let (world, _) = filled();
    let mut rng = Rng::new(7);
    for _ in 0..12 {
        let nodes = nodes(&world);
        dropped(&world, rng.pick(&nodes).0);
    }
}

#[test]
fn clones_are_trimmed_although_the_records_of_their_snapshot_were_lost() {
    let (world, snap) = filled();
    let leaf = leaves(&world, b'm')[0];
    assert_eq!(dropped(&world, leaf), 0);
    run(&world, async {
        let store = open().await;
        store.snap_remove(snap).await.expect("remove");
        for i in 0..OBJECTS {
            while !store.snap_set(&name(i)).await.expect("clones").clones.is_empty() {
                forebay_reactor::sleep(std::time::Duration::from_millis(10)).await;
            }
        }
        store.close().await.expect("close");
    });
}

#[test]
fn a_map_page_that_is_lost_keeps_failing_and_its_space_is_freed() {
    let (world, _) = filled();
    let record = nodes(&world)
        .into_iter()
        .find_map(|(_, node)| match node {
            Node::Leaf(pairs) => pairs.into_iter().find(|(key, _)| key[0] == b'o').map(|(_, value)| value),
            Node::Inner { .. } => None,
        })
        .expect("a record");
    let record = forebay_store::format::onode::Onode::decode(&record).expect("a record");
    run(&world, flip(record.pages[0].addr + 1));
    let told = named(&drop_lost(&world, false));
    assert!(told[&record.name].contains("map"), "{told:?}");
    let report = drop_lost(&world, true);
    assert!(report.freed_bytes >= 8192, "{report:#?}");
    assert!(named(&report).contains_key(&record.name), "{report:#?}");
    // The page reads well again, and is still lost.
    run(&world, flip(record.pages[0].addr + 1));
    run(&world, async {
        let store = open().await;
        let read = store.read(&ObjectName::new(&record.name), ObjectRead::head(4096, 8192)).await;
        assert_eq!(read.expect_err("lost").kind(), ErrorKind::Corrupt);
        store.close().await.expect("close");
    });
    let report = run(&world, Store::check(DISK, CheckOptions::default(), |_, _| {})).expect("a report");
    assert!(report.findings.iter().all(|finding| finding.place == record.name), "{report:#?}");
}

#[test]
fn a_store_that_lost_nothing_is_left_alone() {
    let (world, _) = filled();
    let before = world.peek(DISK, 0, SIZE as usize).expect("peek");
    for force in [false, true] {
        let report = drop_lost(&world, force);
        assert!(report.is_clean() && !report.waits_for_force && report.freed_bytes == 0, "{report:#?}");
        assert_eq!(report.objects, u64::from(OBJECTS));
    }
    assert!(world.peek(DISK, 0, SIZE as usize).expect("peek") == before, "nothing was written");
}

#[test]
fn a_crash_while_losses_are_dropped_leaves_the_store_as_it_was_or_whole() {
    let mut outcomes = [0, 0];
    for point in 0..60 {
        let (world, _) = filled();
        let leaves = leaves(&world, b'o');
        run(&world, flip(leaves[leaves.len() / 2].addr + 1));
        let told = named(&drop_lost(&world, false));
        let reactor = world.reactor();
        world.crash_at_point(Some(world.points() + 1 + point));
        let options = CheckOptions { data: false, drop_lost: true, force: true, ..CheckOptions::default() };
        let done = world.run(&reactor, Store::check(DISK, options, |_, _| {}));
        let stopped = done.is_err();
        drop(done);
        world.crash(reactor, CrashKind::Power);
        let mut report = drop_lost(&world, false);
        // A crash between the two copies of an anchor leaves them different.
        report.findings.retain(|finding| !finding.place.starts_with("anchors"));
        match report.waits_for_force {
            true => assert_eq!(named(&report), told, "point {point}"),
            false => assert!(report.is_clean(), "point {point}: {report:#?}"),
        }
        outcomes[usize::from(report.waits_for_force)] += 1;
        if !stopped {
            break;
        }
    }
    assert!(outcomes.iter().all(|&count| count > 0), "whole, as it was: {outcomes:?}");
}
