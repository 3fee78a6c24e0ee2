//! Clones of snapshots, and snapshots of clones.

use crate::common::cluster::{
    OBJECT, POOL, check_map, clone_with_snapshot, cluster, create_and_open, kind, make_clone, make_clone_of, map_of,
    names, of_size, open, read, take_snapshot, until, write,
};
use crate::common::{bytes, pattern, run};
use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ExtentState, ObjectBackend, ObjectName, ObjectRead, SnapId,
};
use forebay_image::{CreateOptions, ImageFeatures, Images, LockKind, ParentInfo};
use forebay_reactor::{spawn, yield_now};

#[test]
fn where_a_clone_comes_from_and_who_has_it_open() {
    run(async {
        let cluster = cluster(11, 1);
        let a = cluster.client().pool(POOL);
        create_and_open(&a, "base", 8 * OBJECT).await.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        forebay_image::create(&a, "child", of_size(10 * OBJECT)).await.expect("created");
        make_clone(&a, "child", "base", snap, 5 * OBJECT).await;
        take_snapshot(&a, "child", "then", Some(3 * OBJECT)).await;
        let images = Images::of(&a);
        let details = images.details("child").await.expect("details");
        let parent = ParentInfo {
            pool: "rbd".into(),
            namespace: String::new(),
            image: "base".into(),
            id: images.info("base").await.expect("info").id,
            snapshot: "gold".into(),
            trash: false,
            is_clonable: true,
            snapshot_id: snap,
            overlap: 5 * OBJECT,
        };
        assert_eq!(details.parent.as_ref(), Some(&parent));
        assert_eq!((details.snapshots.len(), &details.snapshots[0].info.name[..]), (1, "then"));
        let then = ParentInfo { overlap: 3 * OBJECT, ..parent };
        assert_eq!(details.snapshots[0].parent.as_ref(), Some(&then), "a snapshot has an overlap of its own");
        assert_eq!(images.details("base").await.expect("details").parent, None);
        assert_eq!((details.lock, details.data_pool), (None, None));

        assert_eq!(images.watchers("child").await.expect("watchers"), []);
        let child = open(&a, "child").await;
        write(&child, 0, b"mine").await;
        let watchers = images.watchers("child").await.expect("watchers");
        let me = a.shared().expect("shared").identity();
        assert_eq!(watchers.len(), 1);
        assert_eq!((watchers[0].client, &watchers[0].address), (me.number, &me.address));
        assert_eq!(images.details("child").await.expect("details").lock, Some(LockKind::Exclusive));
        assert_eq!(kind(images.watchers("none").await), Some(ErrorKind::NotFound));
        assert_eq!(kind(images.details("none").await), Some(ErrorKind::NotFound));
    });
}

/// Unused pools refuse requests at once because of a revocable setting; hosts must not see such errors.
#[test]
fn all_pools_of_an_image_that_hosts_use_are_marked() {
    run(async {
        let cluster = cluster(13, 1);
        let [data, gold, gold_data, later] = ["data", "gold", "gold-data", "later"].map(|name| cluster.add_pool(name));
        let client = cluster.client();
        let pool = |number: i64| client.pool(number);
        let (a, parents, last) = (pool(POOL), pool(gold), pool(later));
        let in_pool = |data: Option<&str>| CreateOptions { data_pool: data.map(str::to_owned), ..of_size(4 * OBJECT) };
        forebay_image::create(&parents, "base", in_pool(Some("gold-data"))).await.expect("created");
        let snap = take_snapshot(&parents, "base", "then", None).await;
        forebay_image::create(&a, "child", in_pool(Some("data"))).await.expect("created");
        make_clone_of(&a, "child", (&parents, gold, "base"), snap, 4 * OBJECT).await;
        let child = open(&a, "child").await;
        assert_eq!(client.pools_in_use(), [0; 0], "whoever opens an image is told");
        child.mark_in_use();
        assert_eq!(client.pools_in_use(), [POOL, data, gold, gold_data]);

        // Another parent, discovered when the lock is acquired.
        forebay_image::create(&last, "base", in_pool(None)).await.expect("created");
        let snap = take_snapshot(&last, "base", "then", None).await;
        make_clone_of(&a, "child", (&last, later, "base"), snap, 4 * OBJECT).await;
        write(&child, 0, b"some").await;
        assert_eq!(client.pools_in_use(), [POOL, data, gold, gold_data, later]);
        child.close().await;
    });
}

#[test]
fn what_each_snapshot_takes_up() {
    run(async {
        let cluster = cluster(12, 1);
        let a = cluster.client().pool(POOL);
        for (name, features) in [("mapped", ImageFeatures::RBD_DEFAULT), ("plain", ImageFeatures::LAYERING)] {
            let options = CreateOptions { features: Some(features), ..of_size(5 * OBJECT + 1000) };
            forebay_image::create(&a, name, options).await.expect("created");
            let written = async |objects: &[u64]| {
                let image = open(&a, name).await;
                for &object in objects {
                    write(&image, object * OBJECT, b"some").await;
                }
                image.close().await;
            };
            written(&[0, 1, 5]).await;
            take_snapshot(&a, name, "first", None).await;
            written(&[1, 2]).await;
            take_snapshot(&a, name, "second", None).await;
            take_snapshot(&a, name, "third", None).await;
            written(&[2]).await;
            let image = open(&a, name).await;
            image.submit(BlockRequest::Discard(Extent::new(0, OBJECT))).await.expect("a discard");
            let mut told = Vec::new();
            let usage = image.usage_by_snapshot(|now| told.push((now.done, now.total))).await.expect("usage");
            let named = usage.iter().map(|part| {
                assert_eq!(part.usage.provisioned, 5 * OBJECT + 1000);
                (part.snapshot.as_ref().map_or("", |snapshot| &snapshot.name[..]), part.usage.used)
            });
            let want = [("first", 2 * OBJECT + 1000), ("second", 2 * OBJECT), ("third", 0), ("", OBJECT)];
            assert_eq!(named.collect::<Vec<_>>(), want, "{name}");
            assert!(told.is_sorted() && told.last().is_some_and(|last| last.0 == last.1), "{name}: {told:?}");
            image.close().await;
        }
    });
}

#[test]
fn clones_read_through_and_copy_up() {
    run(async {
        let cluster = cluster(10, 1);
        let a = cluster.client().pool(POOL);
        let base = create_and_open(&a, "base", 8 * OBJECT).await;
        let content = pattern(3, 3 * OBJECT as usize + 1000);
        write(&base, OBJECT, &content).await;
        base.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        let base = open(&a, "base").await;
        write(&base, OBJECT, &pattern(9, 4 * OBJECT as usize)).await;
        base.close().await;

        forebay_image::create(&a, "child", of_size(10 * OBJECT)).await.expect("created");
        // The clone sees only part of its parent: the overlap ends within an object.
        let overlap = 4 * OBJECT + 500;
        make_clone(&a, "child", "base", snap, overlap).await;
        let id = forebay_image::info(&a, "child").await.expect("info").id;
        assert!(forebay_image::info(&a, "child").await.expect("info").has_parent);
        let mut expected = vec![0; 10 * OBJECT as usize];
        expected[OBJECT as usize..overlap as usize].copy_from_slice(&content[..(overlap - OBJECT) as usize]);
        let child = open(&a, "child").await;
        assert!(read(&child, 0, 10 * OBJECT).await == expected);
        let map = child.map(Extent::new(0, 6 * OBJECT)).await.expect("a map");
        let stored: Vec<bool> = map.runs().iter().map(|run| run.state == ExtentState::Data).collect();
        assert_eq!(stored, [false, true, false]);
        assert_eq!(child.usage().await.expect("usage").used, 0, "what the parent has is the parent's");

        write(&child, OBJECT + 10, b"mine").await;
        expected[OBJECT as usize + 10..OBJECT as usize + 14].copy_from_slice(b"mine");
        write(&child, 4 * OBJECT + 490, &[7; 20]).await;
        expected[4 * OBJECT as usize + 490..4 * OBJECT as usize + 510].fill(7);
        let cut = Extent::new(2 * OBJECT, OBJECT);
        child.submit(BlockRequest::Discard(cut)).await.expect("a discard");
        expected[cut.offset as usize..cut.end() as usize].fill(0);
        let compare = |expect: &[u8]| BlockRequest::CompareAndWrite {
            offset: 3 * OBJECT + 5,
            expect: bytes(expect),
            data: bytes(b"new"),
            fua: false,
        };
        assert_eq!(kind(child.submit(compare(&[0; 3])).await), Some(ErrorKind::Mismatch(0)));
        let there = expected[3 * OBJECT as usize + 5..3 * OBJECT as usize + 8].to_vec();
        child.submit(compare(&there)).await.expect("as it is in the parent");
        expected[3 * OBJECT as usize + 5..3 * OBJECT as usize + 8].copy_from_slice(b"new");
        assert!(read(&child, 0, 10 * OBJECT).await == expected);
        check_map(&*cluster.bare(POOL), &id).await;
        assert_eq!(map_of(&*a, &format!("rbd_object_map.{id}")).await[..6], [0, 1, 1, 1, 1, 0]);

        // A shrink reduces the overlap permanently.
        child.resize(OBJECT / 2, true, |_| {}).await.expect("shrunk");
        child.resize(10 * OBJECT, false, |_| {}).await.expect("grown");
        expected[OBJECT as usize / 2..].fill(0);
        assert!(read(&child, 0, 10 * OBJECT).await == expected);
        child.close().await;
        let again = open(&a, "child").await;
        assert!(read(&again, 0, 10 * OBJECT).await == expected);
        again.close().await;
        let base = open(&a, "base@gold").await;
        assert!(read(&base, OBJECT, content.len() as u64).await == content, "the parent is as it was");
        forebay_image::remove(&a, "child", |_| {}).await.expect("removed");
        assert!(!names(&*a).await.iter().any(|name| name.contains(&id)));
    });
}

#[test]
fn what_snapshots_see_of_a_parent_becomes_their_own_when_it_is_copied_up() {
    run(async {
        let cluster = cluster(62, 1);
        let a = cluster.client().pool(POOL);
        let (id, content) = clone_with_snapshot(&a).await;
        let snap = Images::of(&a).snapshots("child").await.expect("listed")[0].id;
        let child = open(&a, "child").await;
        write(&child, OBJECT + 10, b"mine").await;
        // The parent may be detached: the object itself existed at the snapshot.
        let object = ObjectName::new(format!("rbd_data.{id}.{:016x}", 1));
        let at = ObjectRead::new(SnapId(snap), Extent::new(0, OBJECT));
        let kept = cluster.bare(POOL).read(&object, at).await.expect("it is there").fill(at.extent).to_vec();
        assert!(kept == content[OBJECT as usize..2 * OBJECT as usize]);
    });
}

#[test]
fn a_write_while_a_clone_shrinks_does_not_bring_back_what_is_cut_off() {
    run(async {
        let cluster = cluster(60, 0);
        let a = cluster.client().pool(POOL);
        let content = pattern(4, 2 * OBJECT as usize);
        let base = create_and_open(&a, "base", 2 * OBJECT).await;
        write(&base, 0, &content).await;
        base.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        forebay_image::create(&a, "child", of_size(2 * OBJECT)).await.expect("created");
        make_clone(&a, "child", "base", snap, 2 * OBJECT).await;
        let child = open(&a, "child").await;
        child.take_lock().await.expect("taken");
        // Only the update of the size in the header is outstanding.
        let stall = cluster.stall(POOL, "rbd_header.");
        let middle = OBJECT + 5000;
        let shrinking = child.clone();
        let shrinking = spawn(async move { shrinking.resize(middle, true, |_| {}).await });
        until(|| stall.waiting() == 1).await;
        let writing = spawn(child.submit(BlockRequest::Write { offset: OBJECT, data: bytes(b"new"), fua: false }));
        for _ in 0..100 {
            yield_now().await;
        }
        drop(stall);
        shrinking.await.expect("shrunk");
        writing.await.expect("a write to what stays");
        child.resize(2 * OBJECT, false, |_| {}).await.expect("grown");
        let found = read(&child, OBJECT, OBJECT).await;
        assert_eq!(found[..3], *b"new");
        assert!(found[3..5000] == content[OBJECT as usize + 3..OBJECT as usize + 5000]);
        assert!(found[5000..].iter().all(|byte| *byte == 0), "the parent's bytes are back");
    });
}

/// Compares random requests to a clone that gets snapshots with vectors: the head and every snapshot keep their
/// contents.
fn clones_with_snapshots(seed: u64, features: ImageFeatures) {
    run(async {
        let cluster = cluster(seed, seed % 4);
        let a = cluster.client().pool(POOL);
        let options = CreateOptions { features: Some(features), ..of_size(6 * OBJECT) };
        forebay_image::create(&a, "base", options.clone()).await.expect("created");
        let base = open(&a, "base").await;
        for object in [0u64, 2, 3, 5] {
            write(&base, object * OBJECT + 777, &pattern(object as u8, 40_000)).await;
        }
        let mut head = read(&base, 0, 6 * OBJECT).await;
        base.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        forebay_image::create(&a, "child", options).await.expect("created");
        let overlap = 6 * OBJECT - 20_000;
        make_clone(&a, "child", "base", snap, overlap).await;
        head[overlap as usize..].fill(0);
        let id = forebay_image::info(&a, "child").await.expect("info").id;

        let mut rng = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: u64| {
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            rng % below
        };
        let (mut kept, mut overlap) = (Vec::new(), overlap);
        for round in 0..6 {
            let child = open(&a, "child").await;
            for step in 0..8u64 {
                let size = head.len() as u64;
                let (mut offset, mut len) = (random(size), random(90_000));
                if random(3) == 0 {
                    (offset, len) = (offset / OBJECT * OBJECT, OBJECT);
                }
                len = len.min(size - offset);
                let range = offset as usize..(offset + len) as usize;
                match random(8) {
                    0..3 => {
                        let data = pattern((round * 8 + step) as u8, len as usize);
                        write(&child, offset, &data).await;
                        head[range].copy_from_slice(&data);
                    }
                    3..5 => {
                        child.submit(BlockRequest::Discard(Extent::new(offset, len))).await.expect("a discard");
                        head[range].fill(0);
                    }
                    5 => {
                        let len = len.min(3000);
                        let range = offset as usize..(offset + len) as usize;
                        let data = pattern(0xcc, len as usize);
                        let expect = bytes(&head[range.clone()]);
                        let request = BlockRequest::CompareAndWrite { offset, expect, data: bytes(&data), fua: true };
                        child.submit(request).await.expect("as it is");
                        head[range].copy_from_slice(&data);
                    }
                    6 => {
                        let size = random(6 * OBJECT) + 1;
                        child.resize(size, true, |_| {}).await.expect("resized");
                        head.resize(size as usize, 0);
                        overlap = overlap.min(size);
                    }
                    _ => {
                        child
                            .submit(BlockRequest::WriteZeroes {
                                extent: Extent::new(offset, len),
                                no_unmap: true,
                                fua: false,
                            })
                            .await
                            .expect("zeroes");
                        head[range].fill(0);
                    }
                }
                assert!(read(&child, 0, head.len() as u64).await == head, "seed {seed}, round {round}, step {step}");
            }
            child.close().await;
            if features.has(ImageFeatures::OBJECT_MAP) {
                check_map(&*cluster.bare(POOL), &id).await;
            }
            let name = format!("s{round}");
            take_snapshot(&a, "child", &name, Some(overlap)).await;
            kept.push((name, head.clone()));
            for (name, content) in &kept {
                let then = open(&a, &format!("child@{name}")).await;
                assert_eq!(then.size(), content.len() as u64);
                assert!(read(&then, 0, then.size()).await == *content, "seed {seed}, {name} after round {round}");
                then.close().await;
            }
        }
    });
}

#[test]
fn clones_keep_their_snapshots() {
    for seed in 1..=12 {
        clones_with_snapshots(seed, ImageFeatures::RBD_DEFAULT);
    }
}

#[test]
fn clones_without_maps_keep_their_snapshots() {
    for seed in 101..=108 {
        clones_with_snapshots(seed, ImageFeatures::LAYERING);
    }
}
