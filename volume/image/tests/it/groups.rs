//! Groups: their images and snapshots, of one moment, by two clients, under power failures.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, ObjectBackend, ObjectName, Result};
use forebay_image::{Image, Images, SnapshotKind};
use forebay_ram::RamBackend;
use forebay_reactor::{random, spawn, yield_now};

use crate::common::cluster::{OBJECT, POOL, cluster, create_and_open, kind, names, of_size, open, read, write};
use crate::common::{bytes, objects, pattern, run};
use crate::crash::{at_every_point, fill, read_all};

/// Creates a snapshot of a group at one moment.
async fn take(images: &Rc<Images>, group: &str, name: &str) -> Result<()> {
    let mut members = Vec::new();
    for member in images.group_images(group).await? {
        members.push(images.open(&member.image, Default::default()).await?);
    }
    let (pending, mut parts) = images.begin_group_snapshot(group, name, members).await?;
    for part in &mut parts {
        part.hold().await?;
    }
    let mut created = Vec::new();
    for part in parts {
        match part.create().await {
            Ok(part) => created.push(part),
            Err(error) => {
                drop(created);
                pending.undo().await;
                return Err(error);
            }
        }
    }
    pending.complete(created).await.map(drop)
}

async fn members(images: &Images, group: &str) -> Vec<String> {
    let all = images.group_images(group).await.expect("images");
    assert!(all.iter().all(|member| member.is_attached));
    all.into_iter().map(|member| member.image).collect()
}

async fn snapshots(images: &Images, group: &str) -> Vec<(String, bool)> {
    let all = images.group_snapshots(group).await.expect("snapshots");
    all.into_iter().map(|snapshot| (snapshot.name, snapshot.is_complete)).collect()
}

async fn keys(backend: &dyn ObjectBackend, object: &str) -> BTreeMap<String, Vec<u8>> {
    let page = backend.kv_list(&ObjectName::new(object), b"", b"", 1000).await.expect("keys");
    page.pairs.into_iter().map(|(key, value)| (String::from_utf8(key).expect("text"), value)).collect()
}

/// Returns the parts of groups' snapshots that images have.
async fn parts(images: &Images, image: &str) -> usize {
    let all = images.snapshots(image).await.expect("snapshots");
    all.iter().filter(|snapshot| matches!(snapshot.kind, SnapshotKind::Group { .. })).count()
}

#[test]
fn life_of_a_group() {
    run(async {
        let shared = cluster(1, 2).client().pool(POOL);
        let alone: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        for backend in [shared, alone] {
            let images = Images::of(&backend);
            for name in ["a", "b"] {
                images.create(name, of_size(2 * OBJECT)).await.expect("created");
            }
            assert_eq!(images.groups().await.expect("none"), [""; 0]);
            images.create_group("g").await.expect("created");
            images.create_group("h").await.expect("created");
            assert_eq!(kind(images.create_group("g").await), Some(ErrorKind::Exists));
            assert_eq!(kind(images.create_group("g/h@").await), Some(ErrorKind::Invalid));
            let headers = names(&*backend).await.iter().filter(|name| name.starts_with("rbd_group_header.")).count();
            assert_eq!(headers, 2, "a refused creation leaves nothing");
            images.add_to_group("g", &images, "a").await.expect("added");
            images.add_to_group("g", &images, "b").await.expect("added");
            assert_eq!(members(&images, "g").await.len(), 2);
            let of = async |name| images.details(name).await.expect("details");
            let pool = backend.info().pool;
            assert_eq!(of("a").await.group, Some(format!("{pool}/g")));
            assert_eq!((of("a").await.op_features, of("b").await.op_features), (4, 4));
            for group in ["g", "h"] {
                let again = images.add_to_group(group, &images, "a").await;
                assert_eq!(kind(again), Some(ErrorKind::Exists), "{group}");
            }
            assert_eq!(members(&images, "h").await, [""; 0]);
            for (group, image) in [("none", "a"), ("g", "none")] {
                assert_eq!(kind(images.add_to_group(group, &images, image).await), Some(ErrorKind::NotFound));
                assert_eq!(kind(images.remove_from_group(group, &images, image).await), Some(ErrorKind::NotFound));
            }
            images.rename_group("g", "group").await.expect("renamed");
            assert_eq!(kind(images.rename_group("group", "h").await), Some(ErrorKind::Exists));
            assert_eq!(kind(images.rename_group("g", "x").await), Some(ErrorKind::NotFound));
            assert_eq!(images.groups().await.expect("groups"), ["group", "h"]);
            images.rename("a", "aa").await.expect("renamed");
            assert!(members(&images, "group").await.contains(&"aa".to_owned()));
            // It cannot go before it has left the group.
            let removed = images.remove("aa", Default::default(), |_| {}).await;
            assert_eq!(kind(removed), Some(ErrorKind::Busy));
            take(&images, "group", "s").await.expect("a snapshot");
            assert_eq!(snapshots(&images, "group").await, [("s".into(), true)]);
            assert_eq!(kind(take(&images, "group", "s").await), Some(ErrorKind::Exists));
            images.rename_group_snapshot("group", "s", "t").await.expect("renamed");
            take(&images, "group", "s").await.expect("a snapshot");
            assert_eq!(kind(images.rename_group_snapshot("group", "s", "t").await), Some(ErrorKind::Exists));
            images.remove_from_group("group", &images, "aa").await.expect("removed");
            assert_eq!((of("aa").await.group, of("aa").await.op_features), (None, 0));
            assert_eq!(members(&images, "group").await, ["b"]);
            // Its part stays, and goes with the snapshot of the group.
            assert_eq!((parts(&images, "aa").await, parts(&images, "b").await), (2, 2));
            images.remove_group_snapshot("group", "t").await.expect("removed");
            assert_eq!((parts(&images, "aa").await, parts(&images, "b").await), (1, 1));
            assert_eq!(kind(images.remove_group_snapshot("group", "t").await), Some(ErrorKind::NotFound));
            images.remove_group("group").await.expect("removed");
            assert_eq!((parts(&images, "aa").await, parts(&images, "b").await), (0, 0));
            assert_eq!(kind(images.group_images("group").await), Some(ErrorKind::NotFound));
            images.remove_group("h").await.expect("removed");
            for name in ["aa", "b"] {
                images.remove(name, Default::default(), |_| {}).await.expect("removed");
            }
            let left: Vec<_> = objects(&backend).await;
            assert!(left.iter().all(|name| name.ends_with("_directory")), "{left:?}");
            assert_eq!(keys(&*backend, "rbd_group_directory").await.len(), 0);
        }
    });
}

/// Keys and values are those that `rbd` stores; see `wire::group`.
#[test]
fn what_is_stored_is_what_rbd_stores() {
    run(async {
        let backend = cluster(2, 0).client().pool(POOL);
        let images = Images::of(&backend);
        let image = create_and_open(&backend, "vm", OBJECT).await;
        images.create_group("g").await.expect("created");
        images.add_to_group("g", &images, "vm").await.expect("added");
        take(&images, "g", "s").await.expect("a snapshot");
        let directory = keys(&*backend, "rbd_group_directory").await;
        let string = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let group = String::from_utf8(directory["name_g"][4..].to_vec()).expect("an id");
        assert_eq!(directory[&format!("id_{group}")], string("g"));
        let header = keys(&*backend, &format!("rbd_group_header.{group}")).await;
        assert_eq!(header[&format!("image_{POOL:016x}_{}", image.id())], [0], "attached");
        let snapshot = images.group_snapshots("g").await.expect("one").remove(0).id;
        assert!(header.contains_key(&format!("snapshot_{snapshot}")));
        assert_eq!(header.len(), 2);
        let stored = images.snapshots("vm").await.expect("one").remove(0);
        assert_eq!(stored.name, format!(".group.{POOL:x}_{group}_{snapshot}"));
        let kind = SnapshotKind::Group { pool: POOL, group: group.clone(), snapshot: snapshot.clone() };
        assert_eq!(stored.kind, kind);
        assert_eq!(
            images.group_names(POOL, &group, &snapshot).await.expect("names"),
            (Some("rbd".into()), Some("g".into()), Some("s".into()))
        );
        let own = keys(&*backend, &format!("rbd_header.{}", image.id())).await;
        let reference =
            [&[1, 1][..], &(8 + 4 + group.len() as u32).to_le_bytes(), &POOL.to_le_bytes(), &string(&group)];
        assert_eq!(own["rbd_group_ref"], reference.concat());
        assert_eq!(u64::from_le_bytes(own["features"][..8].try_into().expect("8")) & 1 << 8, 1 << 8, "operations");
        // It is no snapshot of a user.
        assert!(image.snapshots().is_empty());
        assert_eq!(
            self::kind(image.remove_snapshot_number(forebay_block::SnapId(stored.id)).await),
            Some(ErrorKind::Unsupported)
        );
    });
}

/// Writes to the images of a group in turn, each once the write before was acknowledged; returns how many turns there were.
async fn write_in_turn(all: Vec<Rc<Image>>, stop: Rc<Cell<bool>>) -> u64 {
    let mut turn = 0u64;
    while !stop.get() {
        turn += 1;
        for image in &all {
            write(image, 0, &turn.to_le_bytes()).await;
        }
    }
    turn
}

#[test]
fn a_snapshot_has_the_state_of_one_moment() {
    run(async {
        for seed in 0..8 {
            let backend = cluster(seed, 4).client().pool(POOL);
            let images = Images::of(&backend);
            images.create_group("g").await.expect("created");
            let mut all = Vec::new();
            for name in ["a", "b", "c"] {
                all.push(create_and_open(&backend, name, OBJECT).await);
                images.add_to_group("g", &images, name).await.expect("added");
            }
            // So that the order of writes is not that of the snapshots.
            let shift = seed as usize % 3;
            all.rotate_left(shift);
            let stop = Rc::new(Cell::new(false));
            let writer = spawn(write_in_turn(all.clone(), stop.clone()));
            for snapshot in 0..6 {
                for _ in 0..random() % 50 {
                    yield_now().await;
                }
                take(&images, "g", &snapshot.to_string()).await.expect("a snapshot");
            }
            stop.set(true);
            assert!(writer.await > 6, "the writer was blocked");
            for snapshot in 0..6 {
                let parts = images.group_snapshot_parts("g", &snapshot.to_string()).await.expect("parts");
                let mut turns = Vec::new();
                for image in &all {
                    let part = parts.iter().find(|part| part.image == image.name()).expect("a part");
                    image.rollback_number(part.snapshot, |_| {}).await.expect("rolled back");
                    turns.push(u64::from_le_bytes(read(image, 0, 8).await.try_into().expect("8 bytes")));
                }
                let fits = turns.is_sorted_by(|a, b| a >= b) && turns[0] - turns[2] <= 1;
                assert!(fits, "seed {seed}: the images have turns {turns:?} in one snapshot");
            }
        }
    });
}

#[test]
fn a_snapshot_that_one_image_refuses_leaves_nothing() {
    run(async {
        let cluster = cluster(5, 2);
        let (backend, other) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        let images = Images::of(&backend);
        images.create_group("g").await.expect("created");
        for name in ["a", "b"] {
            images.create(name, of_size(OBJECT)).await.expect("created");
            images.add_to_group("g", &images, name).await.expect("added");
        }
        let second = images.group_images("g").await.expect("images").remove(1).image;
        let elsewhere = open(&other, &second).await;
        write(&elsewhere, 0, b"x").await;
        let kept = elsewhere.keep_lock();
        assert_eq!(kind(take(&images, "g", "s").await), Some(ErrorKind::Busy));
        assert_eq!(snapshots(&images, "g").await, []);
        drop(kept);
        elsewhere.set_snapshot_limit(Some(0)).await.expect("limited");
        assert_eq!(kind(take(&images, "g", "s").await), Some(ErrorKind::NoSpace));
        assert_eq!(snapshots(&images, "g").await, []);
        elsewhere.set_snapshot_limit(None).await.expect("not limited");
        take(&images, "g", "s").await.expect("a snapshot");
        assert_eq!((parts(&images, "a").await, parts(&images, "b").await), (1, 1));
        // An image that came meanwhile is missed.
        images.create("c", of_size(OBJECT)).await.expect("created");
        let old = vec![open(&backend, "a").await, open(&backend, "b").await];
        images.add_to_group("g", &images, "c").await.expect("added");
        assert_eq!(kind(images.begin_group_snapshot("g", "t", old).await), Some(ErrorKind::Busy));
        assert_eq!(snapshots(&images, "g").await.len(), 1);
    });
}

/// Changes the group as `rbd` does, which does not know of this client.
#[test]
fn a_snapshot_whose_group_another_client_changes_leaves_nothing() {
    run(async {
        let cluster = cluster(8, 1);
        let backend = cluster.client().pool(POOL);
        let images = Images::of(&backend);
        images.create_group("g").await.expect("created");
        let mut all = Vec::new();
        for name in ["a", "b"] {
            all.push(create_and_open(&backend, name, OBJECT).await);
            images.add_to_group("g", &images, name).await.expect("added");
        }
        let stranger = create_and_open(&backend, "c", OBJECT).await;
        let directory = keys(&*backend, "rbd_group_directory").await;
        let group = String::from_utf8(directory["name_g"][4..].to_vec()).expect("an id");
        let header = ObjectName::new(format!("rbd_group_header.{group}"));
        let link = |image: &Image| format!("image_{POOL:016x}_{}", image.id());
        let change = async |op| {
            let changed = backend.submit(&header, forebay_block::Transaction::of(op)).await;
            changed.expect("changed");
        };
        // An image leaves the group when its part is there.
        let (pending, mut parts) = images.begin_group_snapshot("g", "s", all.clone()).await.expect("begun");
        let part = parts.remove(0);
        let left = part.image().clone();
        let created = part.create().await.expect("a part");
        change(forebay_block::ObjectOp::KvRemove { keys: vec![link(&left).into_bytes()] }).await;
        drop((created, parts));
        pending.undo().await;
        assert_eq!((parts_of(&images).await, snapshots(&images, "g").await), ([0; 3], vec![]));
        let back = vec![(link(&left).into_bytes(), vec![0])];
        change(forebay_block::ObjectOp::KvSet { pairs: back }).await;
        // Another image joins it, and would be missed.
        let (pending, parts) = images.begin_group_snapshot("g", "s", all.clone()).await.expect("begun");
        let mut created = Vec::new();
        for part in parts {
            created.push(part.create().await.expect("a part"));
        }
        let joined = vec![(link(&stranger).into_bytes(), vec![0])];
        change(forebay_block::ObjectOp::KvSet { pairs: joined }).await;
        assert_eq!(kind(pending.complete(created).await), Some(ErrorKind::Busy));
        assert_eq!((parts_of(&images).await, snapshots(&images, "g").await), ([0; 3], vec![]));
        // A group that is gone, with its entry, leaves parts that are removed by their numbers.
        change(forebay_block::ObjectOp::KvRemove { keys: vec![link(&stranger).into_bytes()] }).await;
        take(&images, "g", "s").await.expect("a snapshot");
        let number = images.snapshots("a").await.expect("snapshots")[0].id;
        change(forebay_block::ObjectOp::Remove).await;
        all[0].remove_snapshot_number(forebay_block::SnapId(number)).await.expect("removed");
        assert_eq!(parts_of(&images).await, [0, 1, 0]);
        // And so is the reference to it.
        images.create_group("h").await.expect("created");
        images.add_to_group("h", &images, "a").await.expect("added");
        assert_eq!(members(&images, "h").await, ["a"]);
    });
}

async fn parts_of(images: &Images) -> [usize; 3] {
    [parts(images, "a").await, parts(images, "b").await, parts(images, "c").await]
}

#[test]
fn an_image_that_is_gone_is_removed_by_its_id() {
    run(async {
        let backend = cluster(6, 0).client().pool(POOL);
        let images = Images::of(&backend);
        images.create_group("g").await.expect("created");
        images.create("a", of_size(OBJECT)).await.expect("created");
        images.add_to_group("g", &images, "a").await.expect("added");
        let id = images.info("a").await.expect("info").id;
        // As a client that does not know of groups removes it.
        for object in [format!("rbd_header.{id}"), "rbd_directory".into()] {
            let remove = forebay_block::Transaction::of(forebay_block::ObjectOp::Remove);
            backend.submit(&ObjectName::new(object), remove).await.expect("removed");
        }
        let left = images.group_images("g").await.expect("images").remove(0);
        assert_eq!((left.image, left.has_name), (id.clone(), false));
        images.remove_from_group("g", &images, &id).await.expect("removed");
        assert_eq!(members(&images, "g").await, [""; 0]);
    });
}

#[test]
fn rolling_back_to_a_part() {
    run(async {
        let backend = cluster(7, 1).client().pool(POOL);
        let images = Images::of(&backend);
        let image = create_and_open(&backend, "vm", OBJECT).await;
        images.create_group("g").await.expect("created");
        images.add_to_group("g", &images, "vm").await.expect("added");
        write(&image, 0, b"before").await;
        take(&images, "g", "s").await.expect("a snapshot");
        write(&image, 0, b"after!").await;
        let part = images.group_snapshot_parts("g", "s").await.expect("parts").remove(0);
        image.rollback_number(part.snapshot, |_| {}).await.expect("rolled back");
        assert_eq!(read(&image, 0, 6).await, b"before");
        let missing = image.rollback_number(forebay_block::SnapId(99), |_| {}).await;
        assert_eq!(kind(missing), Some(ErrorKind::NotFound));
    });
}

/// Prepares a group of two images full of a pattern.
async fn grouped(backend: &Rc<dyn ObjectBackend>) {
    let images = Images::of(backend);
    images.create_group("g").await.expect("created");
    for name in ["a", "b"] {
        fill(backend, name, 5).await;
        images.add_to_group("g", &images, name).await.expect("added");
    }
}

/// Asserts that the group and its images go without a trace, but for empty headers of groups that were never listed.
async fn check_goes(backend: &Rc<dyn ObjectBackend>, at: &str) {
    let images = Images::of(backend);
    match images.remove_group("g").await {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        removed => removed.unwrap_or_else(|error| panic!("{at}: {error}")),
    }
    for name in images.list().await.expect("images") {
        images.remove(&name, Default::default(), |_| {}).await.unwrap_or_else(|error| panic!("{at}: {name}: {error}"));
    }
    for left in objects(backend).await {
        if let Some(group) = left.strip_prefix("rbd_group_header.") {
            assert_eq!(keys(&**backend, &left).await.len(), 0, "{at}: {group}");
        } else {
            assert!(left.ends_with("_directory"), "{at}: {left} is left");
        }
    }
}

#[test]
fn power_failures_while_a_group_is_made() {
    run(async {
        at_every_point(
            async |backend| fill(backend, "a", 5).await,
            async |backend| {
                let images = Images::of(backend);
                images.create_group("g").await?;
                images.add_to_group("g", &images, "a").await
            },
            async |backend, done, at| {
                let images = Images::of(backend);
                let there = images.groups().await.expect("groups") == ["g"];
                assert!(!done || members(&images, "g").await == ["a"], "{at}: added, but lost");
                let named = images.details("a").await.expect("details").group.is_some();
                let listed = there && !images.group_images("g").await.expect("images").is_empty();
                assert!(!named || listed, "{at}: the image names a group that does not list it");
                // What was interrupted can be repeated.
                if !there {
                    images.create_group("g").await.unwrap_or_else(|error| panic!("{at}: {error}"));
                }
                match images.add_to_group("g", &images, "a").await {
                    Err(error) if error.kind() == ErrorKind::Exists => {}
                    added => added.unwrap_or_else(|error| panic!("{at}: {error}")),
                }
                assert_eq!(members(&images, "g").await, ["a"], "{at}");
                assert_eq!(images.details("a").await.expect("details").group.as_deref(), Some("ram/g"), "{at}");
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn power_failures_while_a_snapshot_is_made() {
    run(async {
        at_every_point(
            grouped,
            async |backend| {
                let images = Images::of(backend);
                for name in ["a", "b"] {
                    let new = BlockRequest::Write { offset: 7, data: bytes(b"new"), fua: false };
                    open(backend, name).await.submit(new).await?;
                }
                take(&images, "g", "s").await
            },
            async |backend, done, at| {
                let images = Images::of(backend);
                let found = snapshots(&images, "g").await;
                assert!(!done || found == [("s".to_owned(), true)], "{at}: created, but lost");
                if found == [("s".to_owned(), true)] {
                    let parts = images.group_snapshot_parts("g", "s").await.expect("parts");
                    assert_eq!(parts.len(), 2, "{at}: complete without its parts");
                    for part in parts {
                        let image = open(backend, &part.image).await;
                        image
                            .submit(BlockRequest::Discard(forebay_block::Extent::new(0, OBJECT)))
                            .await
                            .expect("cleared");
                        image.rollback_number(part.snapshot, |_| {}).await.expect("rolled back");
                        let mut want = pattern(5, image.size() as usize);
                        want[7..10].copy_from_slice(b"new");
                        assert!(read_all(&image).await == want, "{at}: {} is damaged", part.image);
                    }
                }
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn power_failures_while_a_snapshot_is_removed() {
    run(async {
        at_every_point(
            async |backend| {
                grouped(backend).await;
                take(&Images::of(backend), "g", "s").await.expect("a snapshot");
            },
            async |backend| Images::of(backend).remove_group_snapshot("g", "s").await,
            async |backend, done, at| {
                let images = Images::of(backend);
                let found = snapshots(&images, "g").await;
                assert!(!done || found.is_empty(), "{at}: removed, and still there");
                let complete = found == [("s".to_owned(), true)];
                let both = (parts(&images, "a").await, parts(&images, "b").await) == (1, 1);
                assert!(!complete || both, "{at}: complete without a part");
                assert!(!found.is_empty() || (parts(&images, "a").await, parts(&images, "b").await) == (0, 0), "{at}");
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}
