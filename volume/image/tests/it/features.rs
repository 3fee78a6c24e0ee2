//! Features enabled and disabled on open images, and object maps compared with the objects and rebuilt from them.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, SnapSet, Transaction,
};
use forebay_image::{CreateOptions, Image, ImageFeatures, Images};
use forebay_ram::RamBackend;
use forebay_ram::cluster::RamCluster;
use forebay_reactor::{spawn, yield_now};

use crate::common::cluster::{
    OBJECT, POOL, clone_with_snapshot, cluster, create_and_open, kind, map_of, names, of_size, open, read, two_clients,
    write,
};
use crate::common::failing::{Failing, FailingPool};
use crate::common::{bytes, pattern, run};

const LOCK: ImageFeatures = ImageFeatures::EXCLUSIVE_LOCK;
const MAP: ImageFeatures = ImageFeatures::OBJECT_MAP;
const DIFF: ImageFeatures = ImageFeatures::FAST_DIFF;
const MAPS: ImageFeatures = ImageFeatures(MAP.0 | DIFF.0);
const ALL: ImageFeatures = ImageFeatures(LOCK.0 | MAPS.0);
const SIZE: u64 = 9 * OBJECT + 777;

async fn features(backend: &Rc<dyn ObjectBackend>) -> (ImageFeatures, u64) {
    let info = forebay_image::info(backend, "vm").await.expect("info");
    (info.features, info.flags)
}

/// Returns the state of an object by the rules of librbd, from its clones and the existing snapshots, oldest first.
fn state_by_librbd(set: &SnapSet, snaps: &[u64], at: u64) -> u8 {
    let next = |from: u64| snaps.iter().copied().find(|&snap| snap >= from).unwrap_or(u64::MAX);
    let clones = set.clones.iter().map(|clone| {
        let (newest, oldest) = (clone.snaps[0].0, clone.snaps[clone.snaps.len() - 1].0);
        (next(oldest), newest)
    });
    let head = set.head_exists.then(|| (next(set.seq + 1), u64::MAX));
    for (from, to) in clones.chain(head) {
        if to < at {
            continue;
        }
        if at < from {
            break;
        }
        return if from == at { 1 } else { 3 };
    }
    0
}

/// Asserts that every object map that is marked as valid covers all objects; with `exact`, that all are valid, and mark each
/// object as librbd would. Returns whether all were valid.
async fn check_maps(backend: &Rc<dyn ObjectBackend>, exact: bool, at: &str) -> bool {
    let info = forebay_image::info(backend, "vm").await.expect("info");
    if !info.features.has(MAP) {
        let maps = names(&**backend).await.iter().filter(|name| name.contains("object_map")).count();
        assert_eq!((maps, info.flags), (0, 0), "{at}: what is left of object maps");
        return false;
    }
    let details = Images::of(backend).snapshots("vm").await.expect("snapshots");
    let snaps: Vec<u64> = details.iter().map(|snapshot| snapshot.id).collect();
    let header = ObjectName::new(format!("rbd_header.{}", info.id));
    let mut all_valid = true;
    for (snap, size) in details.iter().map(|snapshot| (snapshot.id, snapshot.size)).chain([(u64::MAX, info.size)]) {
        let (map, flags) = if snap == u64::MAX {
            (format!("rbd_object_map.{}", info.id), info.flags)
        } else {
            let key = format!("snapshot_{snap:016x}").into_bytes();
            let value = backend.kv_get(&header, vec![key]).await.expect("a header").remove(0).expect("a snapshot");
            let name_len = u32::from_le_bytes(value[14..18].try_into().expect("4 bytes")) as usize;
            let flags = value[18 + name_len + 9..][..8].try_into().expect("8 bytes");
            (format!("rbd_object_map.{}.{snap:016x}", info.id), u64::from_le_bytes(flags))
        };
        assert!(!exact || flags == 0, "{at}: the map of {snap:x} has the flags {flags}");
        all_valid &= flags == 0;
        if flags & 1 != 0 {
            continue;
        }
        let map = map_of(&**backend, &map).await;
        for object in 0..size.div_ceil(OBJECT) {
            let name = ObjectName::new(format!("{}.{object:016x}", info.block_name_prefix));
            let set = backend.snap_set(&name).await.unwrap_or_default();
            let (state, marked) = (state_by_librbd(&set, &snaps, snap), map[object as usize]);
            assert!(
                state == 0 || marked == 1 || marked == 3,
                "{at}: object {object} of {snap:x} is marked as {marked}"
            );
            assert!(!exact || state == marked, "{at}: object {object} of {snap:x} is marked as {marked}, not {state}");
        }
    }
    all_valid
}

async fn rebuild_all(image: &Image) {
    for snapshot in image.snapshots() {
        image.rebuild_object_map(Some(&snapshot.name), |_| {}).await.expect("rebuilt");
    }
    image.rebuild_object_map(None, |_| {}).await.expect("rebuilt");
}

#[test]
fn what_is_refused() {
    run(async {
        let cluster = cluster(3, 2);
        let backend = cluster.client().pool(POOL);
        let image = create_and_open(&backend, "vm", SIZE).await;
        let layering = ImageFeatures::LAYERING;
        let (unknown, journaling) = (ImageFeatures(1 << 40), ImageFeatures(1 << 6));
        for (features, enabled, want) in [
            (ImageFeatures(0), true, ErrorKind::Invalid),
            (layering, false, ErrorKind::Invalid),
            (ImageFeatures::DEEP_FLATTEN, true, ErrorKind::Invalid),
            (ImageFeatures::DATA_POOL, true, ErrorKind::Invalid),
            (unknown, true, ErrorKind::Invalid),
            (journaling, true, ErrorKind::Unsupported),
            (journaling, false, ErrorKind::Unsupported),
            (LOCK, true, ErrorKind::Invalid),
            (LOCK, false, ErrorKind::Invalid),
        ] {
            assert_eq!(kind(image.set_features(features, enabled).await), Some(want), "{features} {enabled}");
        }
        assert_eq!(features(&backend).await, (ImageFeatures::RBD_DEFAULT, 0), "nothing has changed");
        assert!(check_maps(&backend, true, "refused").await);
        image.set_features(ImageFeatures(ALL.0 | ImageFeatures::DEEP_FLATTEN.0), false).await.expect("disabled");
        for (features, enabled) in [(MAP, true), (DIFF, true), (MAPS, true), (LOCK, false), (MAP, false)] {
            assert_eq!(
                kind(image.set_features(features, enabled).await),
                Some(ErrorKind::Invalid),
                "{features} {enabled}"
            );
        }
        assert_eq!(kind(image.check_object_map(None, |_| {}).await), Some(ErrorKind::Invalid));
        assert_eq!(kind(image.rebuild_object_map(None, |_| {}).await), Some(ErrorKind::Invalid));
        image.set_features(ALL, true).await.expect("enabled");
        assert_eq!(kind(image.check_object_map(Some("nope"), |_| {}).await), Some(ErrorKind::NotFound));
        let read_only = Image::open(backend.clone(), "vm", forebay_image::ImageOpenOptions { read_only: true }).await;
        let read_only = read_only.expect("opened");
        assert_eq!(kind(read_only.set_features(MAP, false).await), Some(ErrorKind::ReadOnly));

        let unshared: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let both = ImageFeatures(1 | ImageFeatures::DEEP_FLATTEN.0);
        let options = CreateOptions { features: Some(both), ..of_size(SIZE) };
        forebay_image::create(&unshared, "vm", options).await.expect("created");
        let image = open(&unshared, "vm").await;
        assert_eq!(kind(image.set_features(ALL, true).await), Some(ErrorKind::Unsupported));
        assert_eq!(image.set_features(ImageFeatures::DEEP_FLATTEN, false).await.expect("disabled"), ImageFeatures(1));
        assert_eq!(features(&unshared).await.0, ImageFeatures(1));
    });
}

#[test]
fn each_feature_on_an_image_with_snapshots() {
    run(async {
        let cluster = cluster(5, 2);
        let (backends, [image, other]) = two_clients(&cluster, SIZE).await;
        let data = pattern(3, SIZE as usize);
        write(&image, 0, &data[..4 * OBJECT as usize]).await;
        image.create_snapshot("one").await.expect("a snapshot");
        write(&image, OBJECT, &data[..OBJECT as usize]).await;
        image.create_snapshot("two").await.expect("a snapshot");
        write(&image, 6 * OBJECT, &data[..10]).await;
        // Either stands for both, as for rbd.
        for (off, on) in [(MAP, DIFF), (DIFF, MAP), (MAPS, MAPS)] {
            let after = image.set_features(off, false).await.expect("disabled");
            assert!(!after.has(MAP) && !after.has(DIFF) && after.has(LOCK));
            assert!(!check_maps(&backends[0], true, "disabled").await);
            write(&image, 2 * OBJECT + 5, b"without a map").await;
            image.submit(BlockRequest::Discard(Extent::new(0, OBJECT))).await.expect("discarded");
            assert!(image.set_features(on, true).await.expect("enabled").has(MAPS));
            assert_eq!(features(&backends[0]).await.1, 3, "invalid");
            assert!(!check_maps(&backends[0], false, "enabled").await);
            write(&image, 0, b"with an invalid map").await;
            let checked = image.check_object_map(None, |_| {}).await.expect("checked");
            assert!(
                checked.wrong > 0 && !checked.valid && checked.first_wrong[0].name.starts_with("rbd_data."),
                "{checked:?}"
            );
            rebuild_all(&image).await;
            assert!(check_maps(&backends[0], true, "rebuilt").await);
        }
        // Without the lock both write, and each sees the other's features.
        image.set_features(ALL, false).await.expect("disabled");
        assert_eq!(Images::of(&backends[0]).locks("vm").await.expect("listed").locks, [], "the lock was released");
        write(&other, 0, b"theirs").await;
        write(&image, 6, b"ours").await;
        assert_eq!(read(&other, 0, 10).await, b"theirsours");
        assert_eq!(Images::of(&backends[0]).locks("vm").await.expect("listed").locks, [], "nobody needs it");
        other.set_features(ALL, true).await.expect("enabled by the other");
        write(&image, 0, b"locked").await;
        assert_eq!(Images::of(&backends[0]).locks("vm").await.expect("listed").locks.len(), 1);
        rebuild_all(&image).await;
        assert!(check_maps(&backends[1], true, "rebuilt").await);
        assert!(read(&*open(&backends[1], "vm@one").await, 0, 4 * OBJECT).await == data[..4 * OBJECT as usize]);
    });
}

#[test]
fn a_wrong_map_is_found_marked_and_rebuilt() {
    run(async {
        let cluster = cluster(7, 2);
        let backend = cluster.client().pool(POOL);
        let image = create_and_open(&backend, "vm", SIZE).await;
        write(&image, 0, &pattern(1, 3 * OBJECT as usize)).await;
        image.create_snapshot("s").await.expect("a snapshot");
        write(&image, 0, &pattern(2, OBJECT as usize)).await;
        let mut told = Vec::new();
        let checked = image.check_object_map(None, |now| told.push((now.done, now.total))).await.expect("checked");
        assert_eq!((checked.objects, checked.wrong, checked.valid), (10, 0, true));
        assert_eq!(told.last(), Some(&(10, 10)));
        assert!(image.check_object_map(Some("s"), |_| {}).await.expect("checked").valid);

        // An object that others have put behind the back of the map, and one that they have removed, which misleads nobody.
        let prefix = forebay_image::info(&backend, "vm").await.expect("info").block_name_prefix;
        let object = |number: u64| ObjectName::new(format!("{prefix}.{number:016x}"));
        let create = Transaction::of(ObjectOp::Create { exclusive: true });
        cluster.bare(POOL).submit(&object(1), Transaction::of(ObjectOp::Remove)).await.expect("removed");
        assert!(image.check_object_map(None, |_| {}).await.expect("checked").valid);
        cluster.bare(POOL).submit(&object(7), create).await.expect("created");
        let checked = image.check_object_map(None, |_| {}).await.expect("checked");
        assert_eq!((checked.wrong, checked.valid, checked.first_wrong.len()), (1, false, 1));
        let wrong = &checked.first_wrong[0];
        assert_eq!((&wrong.name[..], wrong.marked), (object(7).name(), 0));
        assert_eq!(features(&backend).await.1, 3, "it is marked as invalid");
        image.rebuild_object_map(None, |now| told.push((now.done, now.total))).await.expect("rebuilt");
        assert_eq!(told.last(), Some(&(10, 10)));
        // The removal has hit the snapshot as well.
        image.rebuild_object_map(Some("s"), |_| {}).await.expect("rebuilt");
        assert!(check_maps(&backend, true, "rebuilt").await);

        // A map that is missing or damaged, of a snapshot and of the head.
        let id = image.id().to_owned();
        let snap = image.snapshots()[0].id;
        image.close().await;
        for (snapshot, map) in
            [(Some("s"), format!("rbd_object_map.{id}.{snap:016x}")), (None, format!("rbd_object_map.{id}"))]
        {
            for damage in [ObjectOp::Remove, ObjectOp::WriteFull { data: bytes(b"damaged") }] {
                cluster.bare(POOL).submit(&ObjectName::new(&map), Transaction::of(damage)).await.expect("damaged");
                let image = open(&backend, "vm").await;
                let checked = image.check_object_map(snapshot, |_| {}).await.expect("checked");
                assert!(!checked.valid, "{map}: {checked:?}");
                image.rebuild_object_map(snapshot, |_| {}).await.expect("rebuilt");
                assert!(check_maps(&backend, true, &map).await);
                assert!(image.check_object_map(snapshot, |_| {}).await.expect("checked").valid);
                image.close().await;
            }
        }
    });
}

/// Hosts of both clients write while features are enabled and disabled and maps rebuilt by either: nothing is lost, and no
/// map that is marked as valid lacks an object at any moment.
#[test]
fn writes_in_flight_survive_every_change() {
    for seed in 1..8u64 {
        run(async {
            let cluster = cluster(seed, 2);
            let (_, images) = two_clients(&cluster, SIZE).await;
            images[0].create_snapshot("s").await.expect("a snapshot");
            let stop = Rc::new(Cell::new(false));
            let writers = [0u64, 1].map(|client| {
                let (image, stop) = (images[client as usize].clone(), stop.clone());
                spawn(async move {
                    let mut written = vec![0u8; 10 * OBJECT as usize];
                    for round in 1..200u64 {
                        if stop.get() && round > 20 {
                            break;
                        }
                        // Even or odd objects, so that each knows what it has written.
                        let at = ((round * 7 + client * 3) % 5 * 2 + client) * OBJECT;
                        let len = 500.min(SIZE - at) as usize;
                        match round % 4 {
                            0 => {
                                let extent = Extent::new(at, OBJECT.min(SIZE - at));
                                image.submit(BlockRequest::Discard(extent)).await.expect("a discard");
                                written[at as usize..][..extent.len as usize].fill(0);
                            }
                            _ => {
                                let data = pattern(round as u8, len);
                                write(&image, at, &data).await;
                                written[at as usize..][..len].copy_from_slice(&data);
                            }
                        }
                        yield_now().await;
                    }
                    written
                })
            });
            let changer = spawn({
                let (images, stop) = (images.clone(), stop.clone());
                async move {
                    for round in 0..4 {
                        let image = &images[round % 2];
                        let (off, on) =
                            [(MAPS, MAPS), (ALL, ALL), (DIFF, MAP), (ALL, ALL)][(round + seed as usize) % 4];
                        image.set_features(off, false).await.expect("disabled");
                        yield_now().await;
                        image.set_features(on, true).await.expect("enabled");
                        images[(round + 1) % 2].rebuild_object_map(None, |_| {}).await.expect("rebuilt");
                        image.rebuild_object_map(Some("s"), |_| {}).await.expect("rebuilt");
                    }
                    stop.set(true);
                }
            });
            let bare: Rc<dyn ObjectBackend> = cluster.bare(POOL);
            while !stop.get() {
                // Lists of objects are read at one moment: nothing else runs.
                no_lie(&bare, seed).await;
                yield_now().await;
            }
            changer.await;
            for (client, writer) in writers.into_iter().enumerate() {
                let written = writer.await;
                for object in (client as u64..10).step_by(2) {
                    let (at, len) = (object * OBJECT, OBJECT.min(SIZE - object * OBJECT));
                    let found = read(&images[1 - client], at, len).await;
                    assert!(
                        found == written[at as usize..][..len as usize],
                        "seed {seed}: object {object} of {client}"
                    );
                }
            }
            let backend = cluster.client().pool(POOL);
            rebuild_all(&images[0]).await;
            assert!(check_maps(&backend, true, &format!("seed {seed}")).await);
        });
    }
}

/// A write that has marked its object in the map may still be in flight: the map must not go before.
#[test]
fn a_change_waits_for_the_writes_before_it() {
    run(async {
        let cluster = cluster(14, 1);
        let backend = cluster.client().pool(POOL);
        let image = create_and_open(&backend, "vm", SIZE).await;
        write(&image, 0, b"before").await;
        let stall = cluster.stall(POOL, "rbd_data.");
        let writing = image.clone();
        let slow = spawn(async move { write(&writing, OBJECT, b"slow").await });
        while stall.waiting() == 0 {
            yield_now().await;
        }
        let changing = image.clone();
        let changed = spawn(async move { changing.set_features(MAPS, false).await });
        // Longer than the change takes.
        for _ in 0..500 {
            yield_now().await;
        }
        assert!(features(&backend).await.0.has(MAP), "the map went under a write");
        drop(stall);
        slow.await;
        changed.await.expect("changed");
        assert!(!features(&backend).await.0.has(MAP));
    });
}

/// Asserts that the head's map, if the stored header calls it valid, covers all objects.
async fn no_lie(bare: &Rc<dyn ObjectBackend>, seed: u64) {
    let (features, flags) = features(bare).await;
    if !features.has(MAP) || flags & 1 != 0 {
        return;
    }
    let info = forebay_image::info(bare, "vm").await.expect("info");
    let map = map_of(&**bare, &format!("rbd_object_map.{}", info.id)).await;
    for name in names(&**bare).await {
        if let Some(object) = name.strip_prefix(&format!("rbd_data.{}.", info.id)) {
            let object = usize::from_str_radix(object, 16).expect("a number");
            assert_ne!(map.get(object), Some(&0), "seed {seed}: object {object} is there: {map:?}");
        }
    }
}

/// Programs with writes, snapshots, resizes, and changes of features and maps, by two clients in turn.
#[test]
fn programs_of_two_clients() {
    for seed in 1..30u64 {
        run(async {
            let cluster = cluster(seed, 2);
            let (backends, images) = two_clients(&cluster, SIZE).await;
            let mut chance = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = |end: u64| {
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (chance >> 33) % end
            };
            let mut content = vec![0u8; SIZE as usize];
            let mut snapshots: Vec<(String, Vec<u8>)> = Vec::new();
            for step in 0..60u64 {
                let image = &images[below(2) as usize];
                let at = format!("seed {seed}, step {step}");
                match below(12) {
                    0..4 if !content.is_empty() => {
                        let offset = below(content.len() as u64);
                        let len = (1 + below(2 * OBJECT)).min(content.len() as u64 - offset);
                        let data = pattern(step as u8, len as usize);
                        write(image, offset, &data).await;
                        content[offset as usize..][..len as usize].copy_from_slice(&data);
                    }
                    4 if !content.is_empty() => {
                        let offset = below(content.len() as u64);
                        let len = (1 + below(3 * OBJECT)).min(content.len() as u64 - offset);
                        image.submit(BlockRequest::Discard(Extent::new(offset, len))).await.expect("discarded");
                        content[offset as usize..][..len as usize].fill(0);
                    }
                    5 => {
                        let name = format!("s{step}");
                        image.create_snapshot(&name).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                        snapshots.push((name, content.clone()));
                    }
                    6 if !snapshots.is_empty() => {
                        let (name, _) = snapshots.remove(below(snapshots.len() as u64) as usize);
                        image.remove_snapshot(&name).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                    }
                    7 => {
                        let size = below(SIZE);
                        image.resize(size, true, |_| {}).await.expect("resized");
                        content.resize(size as usize, 0);
                    }
                    8..10 => {
                        let now = features(&backends[0]).await.0;
                        let which = [MAP, DIFF, ALL, LOCK][below(4) as usize];
                        let enabled = now.0 & which.0 == 0;
                        match image.set_features(which, enabled).await {
                            Ok(after) => assert_ne!(after, now, "{at}"),
                            // Such as the lock of an image with a map.
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{at}: {error}"),
                        }
                    }
                    10 => match image.rebuild_object_map(None, |_| {}).await {
                        Ok(()) => assert!(image.check_object_map(None, |_| {}).await.expect("checked").valid, "{at}"),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{at}: {error}"),
                    },
                    _ => {
                        let Some((name, _)) = snapshots.first() else { continue };
                        match image.rebuild_object_map(Some(name), |_| {}).await {
                            Ok(()) => {
                                let checked = image.check_object_map(Some(name), |_| {}).await.expect("checked");
                                assert!(checked.valid, "{at}: {checked:?}");
                            }
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{at}: {error}"),
                        }
                    }
                }
                check_maps(&backends[1], false, &at).await;
            }
            assert!(content.is_empty() || read(&images[0], 0, content.len() as u64).await == content, "seed {seed}");
            if features(&backends[0]).await.0.has(MAP) {
                rebuild_all(&images[1]).await;
                assert!(check_maps(&backends[0], true, &format!("seed {seed}, in the end")).await);
            }
            for (name, then) in &snapshots {
                let snapshot = open(&backends[0], &format!("vm@{name}")).await;
                assert!(then.is_empty() || read(&snapshot, 0, then.len() as u64).await == *then, "seed {seed}: {name}");
            }
        });
    }
}

/// A client that dies at any transaction of a change leaves an image that another client uses, and on which it makes the
/// change.
#[test]
fn a_change_that_is_interrupted() {
    type Change = (&'static str, bool, ImageFeatures);
    const CHANGES: [Change; 4] =
        [("on", true, ALL), ("off", false, ALL), ("maps off", false, MAPS), ("rebuild", true, ImageFeatures(0))];
    for (what, enabled, change) in CHANGES {
        for point in 0..60 {
            let done = run(async {
                let cluster = cluster(point + 1, 1);
                let client = cluster.client();
                let pool = FailingPool::new(client.pool(POOL), None);
                let backend: Rc<dyn ObjectBackend> = pool.clone();
                let image = create_and_open(&backend, "vm", SIZE).await;
                let data = pattern(9, 5 * OBJECT as usize);
                write(&image, 0, &data).await;
                image.create_snapshot("s").await.expect("a snapshot");
                write(&image, OBJECT, b"changed").await;
                if enabled {
                    image.set_features(ALL, false).await.expect("disabled");
                }
                if change.0 == 0 {
                    image.set_features(ALL, true).await.expect("enabled");
                    write(&image, 0, b"c").await;
                }
                pool.fail(Failing::From(point));
                let result = match change.0 {
                    0 => image.rebuild_object_map(None, |_| {}).await,
                    _ => image.set_features(change, enabled).await.map(drop),
                };
                client.die();
                cluster.expire_watches();
                let at = format!("{what}, point {point}");
                let after = cluster.client().pool(POOL);
                check_maps_if_valid(&after, &at).await;
                let again = open(&after, "vm").await;
                write(&again, 7 * OBJECT, b"later").await;
                assert_eq!(read(&again, OBJECT, 7).await, b"changed", "{at}");
                assert!(read(&*open(&after, "vm@s").await, 0, 5 * OBJECT).await == data, "{at}");
                check_maps_if_valid(&after, &at).await;
                if change.0 != 0 {
                    match again.set_features(change, enabled).await {
                        Ok(_) => assert!(result.is_err(), "{at}: done twice"),
                        // The first attempt got far enough.
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid, "{at}: {error}"),
                    }
                }
                if features(&after).await.0.has(MAP) {
                    rebuild_all(&again).await;
                    assert!(check_maps(&after, true, &at).await, "{at}");
                    again.set_features(MAPS, false).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                }
                check_maps(&after, true, &at).await;
                again.remove_snapshot("s").await.expect("removed");
                again.close().await;
                forebay_image::remove(&after, "vm", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                assert_eq!(names(&*after).await, ["rbd_directory"], "{at}: a trace is left");
                result.is_ok()
            });
            if done {
                assert!(point >= 2, "{what} has more steps than that");
                break;
            }
            assert!(point < 59, "{what} has fewer steps than that");
        }
    }
}

async fn check_maps_if_valid(backend: &Rc<dyn ObjectBackend>, at: &str) {
    if features(backend).await.0.has(MAP) {
        check_maps(backend, false, at).await;
    }
}

/// Objects that are copied up while the map of a snapshot is rebuilt are on it.
#[test]
fn copy_ups_during_a_rebuild() {
    for seed in 1..12u64 {
        run(async {
            let cluster: RamCluster = cluster(seed, 3);
            let backend = cluster.client().pool(POOL);
            let (_, content) = clone_with_snapshot(&backend).await;
            let image = open(&backend, "child").await;
            let rebuilding = spawn({
                let image = image.clone();
                async move { image.rebuild_object_map(Some("kept"), |_| {}).await }
            });
            for object in 0..6 {
                write(&image, object * OBJECT + 5, b"new").await;
                yield_now().await;
            }
            rebuilding.await.expect("rebuilt");
            let checked = image.check_object_map(Some("kept"), |_| {}).await.expect("checked");
            assert!(checked.valid, "seed {seed}: {checked:?}");
            assert!(image.check_object_map(None, |_| {}).await.expect("checked").valid);
            let kept = open(&backend, "child@kept").await;
            assert!(read(&kept, 0, content.len() as u64).await == content);
        });
    }
}
