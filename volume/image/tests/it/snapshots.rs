//! Snapshots: random programs against a plain model, concurrent writes, refusals, and other clients.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, SnapId};
use forebay_image::{Image, ImageFeatures, ImageOpenOptions, Images};
use forebay_reactor::{spawn, yield_now};

use crate::common::cluster::{
    OBJECT, POOL, check_map, cluster, create_and_open, kind, make_clone, map_of, of_size, open, read, take_snapshot,
    two_clients, write,
};
use crate::common::{Stormy, objects, pattern, run};

/// Snapshot as the model has it.
#[derive(Clone)]
struct Known {
    name: String,
    content: Vec<u8>,
    protected: bool,
}

/// Plain model of an image.
#[derive(Clone, Default)]
struct Model {
    content: Vec<u8>,
    snapshots: Vec<Known>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }

    fn range(&mut self, size: u64) -> (u64, u64) {
        let offset = self.below(size);
        let longest = [5000, OBJECT, 3 * OBJECT][self.below(3) as usize];
        (offset, 1 + self.below(longest.min(size - offset)))
    }
}

const SIZE_MAX: u64 = 7 * OBJECT + 999;

async fn content_of(image: &Image) -> Vec<u8> {
    if image.size() == 0 { Vec::new() } else { read(image, 0, image.size()).await }
}

/// Runs a program of `steps` steps on an open image, as one of `images` at a time.
async fn program(random: &mut Random, images: &[Rc<Image>], model: &mut Model, steps: u64) {
    for step in 0..steps {
        let image = &images[random.below(images.len() as u64) as usize];
        let size = model.content.len() as u64;
        let pick = random.below(model.snapshots.len() as u64) as usize;
        let op = random.below(16);
        match op {
            0..4 if size > 0 => {
                let (offset, len) = random.range(size);
                let data = pattern(step as u8, len as usize);
                write(image, offset, &data).await;
                model.content[offset as usize..][..len as usize].copy_from_slice(&data);
            }
            4..=5 if size > 0 => {
                let (offset, len) = random.range(size);
                image.submit(BlockRequest::Discard(Extent::new(offset, len))).await.expect("a discard");
                model.content[offset as usize..][..len as usize].fill(0);
            }
            6..=8 => {
                let name = format!("s{:x}", random.below(1 << 40));
                let info = image.create_snapshot(&name).await.expect("a snapshot");
                assert_eq!((&info.name, info.size, info.protected, info.is_user()), (&name, size, false, true));
                assert_eq!(kind(image.create_snapshot(&name).await), Some(ErrorKind::Exists));
                model.snapshots.push(Known { name, content: model.content.clone(), protected: false });
            }
            9 if !model.snapshots.is_empty() => {
                let known = &model.snapshots[pick];
                let removed = image.remove_snapshot(&known.name).await;
                if known.protected {
                    assert_eq!(kind(removed), Some(ErrorKind::Busy), "it is protected");
                } else {
                    removed.expect("removed");
                    model.snapshots.remove(pick);
                }
            }
            10 if !model.snapshots.is_empty() => {
                let known = &mut model.snapshots[pick];
                let to = format!("r{:x}", random.below(1 << 40));
                image.rename_snapshot(&known.name, &to).await.expect("renamed");
                known.name = to;
            }
            11 if !model.snapshots.is_empty() => {
                let known = &mut model.snapshots[pick];
                known.protected ^= true;
                let changed = image.set_snapshot_protection(&known.name, known.protected).await;
                assert!(changed.expect("protected, or not any more"));
                assert!(!image.set_snapshot_protection(&known.name, known.protected).await.expect("as it is"));
            }
            12 if !model.snapshots.is_empty() => {
                let known = &model.snapshots[pick];
                let mut told = Vec::new();
                image.rollback(&known.name, |now| told.push((now.done, now.total))).await.expect("rolled back");
                assert!(told.is_sorted() && told.last().is_some_and(|last| last.0 == last.1), "{told:?}");
                model.content.clone_from(&known.content);
            }
            13 => {
                let to = random.below(SIZE_MAX);
                image.resize(to, true, |_| {}).await.expect("resized");
                model.content.resize(to as usize, 0);
            }
            14 if size > 0 => {
                let (offset, len) = random.range(size);
                let extent = Extent::new(offset, len);
                let zeroes = BlockRequest::WriteZeroes { extent, no_unmap: true, fua: false };
                image.submit(zeroes).await.expect("zeroes");
                model.content[offset as usize..][..len as usize].fill(0);
            }
            15 => {
                let mut told = Vec::new();
                let sparsified = image.sparsify(4096 << random.below(5), |now| told.push((now.done, now.total)));
                sparsified.await.expect("sparsified");
                assert!(told.is_sorted() && told.last().is_some_and(|last| last.0 == last.1), "{told:?}");
            }
            _ => {}
        }
        assert_eq!(image.size(), model.content.len() as u64, "step {step}");
    }
}

/// Compares the head and every snapshot with the model.
async fn check(backend: &Rc<dyn ObjectBackend>, name: &str, model: &Model, at: &str) {
    let image = open(backend, name).await;
    assert!(content_of(&image).await == model.content, "{at}: the head differs");
    let mut listed: Vec<_> = image.snapshots().into_iter().map(|info| (info.name, info.size, info.protected)).collect();
    let mut known: Vec<_> =
        model.snapshots.iter().map(|known| (known.name.clone(), known.content.len() as u64, known.protected)).collect();
    assert!(image.snapshots().is_sorted_by_key(|info| info.id), "{at}: the oldest is first");
    listed.sort();
    known.sort();
    assert_eq!(listed, known, "{at}");
    for known in &model.snapshots {
        let snapshot = open(backend, &format!("{name}@{}", known.name)).await;
        assert!(content_of(&snapshot).await == known.content, "{at}: snapshot {} differs", known.name);
        snapshot.close().await;
    }
    image.close().await;
}

/// Asserts that the object maps of the head and of all snapshots cover every object, and mark none wrongly.
async fn check_maps(backend: &Rc<dyn ObjectBackend>, name: &str, at: &str) {
    let info = forebay_image::info(backend, name).await.expect("info");
    assert_eq!(info.flags, 0, "{at}: the object map is valid");
    check_map(&**backend, &info.id).await;
    let snapshots = Images::of(backend).snapshots(name).await.expect("snapshots");
    let mut before: Option<(Vec<u8>, u64)> = None;
    let all = snapshots.iter().map(|info| (SnapId(info.id), info.size)).chain([(SnapId::HEAD, info.size)]);
    for (snap, size) in all {
        let map = match snap {
            SnapId::HEAD => format!("rbd_object_map.{}", info.id),
            SnapId(id) => format!("rbd_object_map.{}.{id:016x}", info.id),
        };
        let map = map_of(&**backend, &map).await;
        for object in 0..size.div_ceil(OBJECT) {
            let name = forebay_block::ObjectName::new(format!("{}.{object:016x}", info.block_name_prefix));
            let exists = backend.stat(&name, snap).await.is_ok();
            assert_eq!(map[object as usize] != 0, exists, "{at}: object {object} at {snap:?}: {map:?}");
            // An object that has changed since the snapshot before must not be marked as unchanged.
            if map[object as usize] == 3 {
                let (then, id) = before.as_ref().expect("nothing is unchanged before the first snapshot");
                assert_ne!(then.get(object as usize), Some(&0), "{at}: object {object} is new at {snap:?}");
                let read = async |snap| {
                    let read = forebay_block::ObjectRead::new(snap, Extent::new(0, OBJECT));
                    backend.read(&name, read).await.expect("a read").fill(read.extent).to_vec()
                };
                assert!(read(SnapId(*id)).await == read(snap).await, "{at}: object {object} has changed at {snap:?}");
            }
        }
        before = Some((map, snap.0));
    }
}

/// Removes all snapshots and the image, and asserts that nothing is left.
async fn check_goes(backend: &Rc<dyn ObjectBackend>, name: &str, model: &mut Model, at: &str) {
    let info = forebay_image::info(backend, name).await.expect("info");
    let image = open(backend, name).await;
    for known in model.snapshots.drain(..) {
        image.set_snapshot_protection(&known.name, false).await.expect("unprotected");
        image.remove_snapshot(&known.name).await.expect("removed");
    }
    assert!(content_of(&image).await == model.content, "{at}: the head is as it was");
    image.close().await;
    forebay_image::remove(backend, name, |_| {}).await.expect("removed");
    let left: Vec<_> = objects(backend).await.into_iter().filter(|object| object.contains(&info.id)).collect();
    assert!(left.is_empty(), "{at}: {left:?}");
    for object in 0..=SIZE_MAX / OBJECT {
        let object = forebay_block::ObjectName::new(format!("{}.{object:016x}", info.block_name_prefix));
        let clones = backend.snap_set(&object).await.map_or_else(|_| Vec::new(), |set| set.clones);
        assert!(clones.is_empty(), "{at}: {object} is kept for a snapshot that is gone: {clones:?}");
    }
}

#[test]
fn programs_on_a_pool_of_its_own() {
    for seed in 1..25 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 3);
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let size = 4 * OBJECT + 777;
            let image = create_and_open(&backend, "vm", size).await;
            let mut model = Model { content: vec![0; size as usize], ..Model::default() };
            program(&mut random, std::slice::from_ref(&image), &mut model, 40).await;
            image.close().await;
            let at = format!("seed {seed}");
            check(&backend, "vm", &model, &at).await;
            check_goes(&backend, "vm", &mut model, &at).await;
        });
    }
}

#[test]
fn programs_of_two_clients() {
    for seed in 1..25 {
        run(async {
            let cluster = cluster(seed, 2);
            let size = 4 * OBJECT + 777;
            let (backends, images) = two_clients(&cluster, size).await;
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut model = Model { content: vec![0; size as usize], ..Model::default() };
            // Mostly one client, so that the lock stays for a while.
            for turn in 0..6 {
                program(&mut random, &images[turn % 2..][..1], &mut model, 6).await;
            }
            program(&mut random, &images, &mut model, 10).await;
            let at = format!("seed {seed}");
            for backend in &backends {
                check(backend, "vm", &model, &at).await;
            }
            for image in images {
                image.close().await;
            }
            check_maps(&backends[0], "vm", &at).await;
            check_goes(&backends[1], "vm", &mut model, &at).await;
        });
    }
}

#[test]
fn programs_on_clones() {
    for seed in 1..25 {
        run(async {
            let cluster = cluster(seed, 1);
            let backend = cluster.client().pool(POOL);
            let size = 4 * OBJECT + 777;
            let mut model = Model { content: pattern(9, size as usize), ..Model::default() };
            model.content[OBJECT as usize..][..2 * OBJECT as usize].fill(0);
            let base = create_and_open(&backend, "base", size).await;
            write(&base, 0, &model.content[..OBJECT as usize]).await;
            write(&base, 3 * OBJECT, &model.content[3 * OBJECT as usize..]).await;
            let gold = base.create_snapshot("gold").await.expect("a snapshot");
            write(&base, 0, &pattern(1, size as usize)).await;
            base.close().await;
            forebay_image::create(&backend, "vm", of_size(size)).await.expect("created");
            make_clone(&backend, "vm", "base", gold.id, size).await;
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let image = open(&backend, "vm").await;
            program(&mut random, std::slice::from_ref(&image), &mut model, 40).await;
            image.close().await;
            let at = format!("seed {seed}");
            check(&backend, "vm", &model, &at).await;
            check_maps(&backend, "vm", &at).await;
            check_goes(&backend, "vm", &mut model, &at).await;
        });
    }
}

/// Every write that completed before a snapshot is in it, none that was submitted after it is, and each that was in flight is
/// in it whole or not at all.
#[test]
fn writes_under_way_are_before_or_after_a_snapshot() {
    for seed in 1..40 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = match seed % 2 {
                0 => Stormy::new(seed, 6),
                _ => cluster(seed, 4).client().pool(POOL),
            };
            let image = create_and_open(&backend, "vm", 48 * OBJECT).await;
            // In more objects than are written at once.
            let long = image.clone();
            let long = spawn(async move {
                for version in 1..4_u8 {
                    write(&long, 8 * OBJECT, &vec![version; 40 * OBJECT as usize]).await;
                }
            });
            // Each of these writes is in two objects.
            let offset = |place: u64| (2 * place + 1) * OBJECT - 2048;
            let block = |version: u8| vec![version; 4096];
            let writers: Vec<_> = (0..4)
                .map(|place| {
                    let image = image.clone();
                    let done = Rc::new(std::cell::Cell::new([0_u8; 2]));
                    let told = done.clone();
                    let task = spawn(async move {
                        for version in 1..60_u8 {
                            // Begun, and completed.
                            told.set([version, version - 1]);
                            write(&image, offset(place), &vec![version; 4096]).await;
                            told.set([version, version]);
                            yield_now().await;
                        }
                    });
                    (done, task)
                })
                .collect();
            let mut snapshots = Vec::new();
            for number in 0..5 {
                let before: Vec<u8> = writers.iter().map(|(done, _)| done.get()[1]).collect();
                let name = format!("s{number}");
                image.create_snapshot(&name).await.expect("a snapshot");
                let after: Vec<u8> = writers.iter().map(|(done, _)| done.get()[0]).collect();
                snapshots.push((name, before, after));
                for _ in 0..seed % 7 {
                    yield_now().await;
                }
            }
            for (_, task) in writers {
                task.await;
            }
            long.await;
            for (name, before, after) in snapshots {
                let snapshot = open_at(&backend, &name).await;
                let found = read(&snapshot, 8 * OBJECT, 40 * OBJECT).await;
                assert!(found.iter().all(|&byte| byte == found[0]), "seed {seed}: {name} has a torn long write");
                for place in 0..4 {
                    let found = read(&snapshot, offset(place as u64), 4096).await;
                    assert!(found == block(found[0]), "seed {seed}: {name} has a torn write at {place}");
                    let range = before[place]..=after[place];
                    assert!(range.contains(&found[0]), "seed {seed}: {name} has {} at {place}, of {range:?}", found[0]);
                }
            }
        });
    }
}

async fn open_at(backend: &Rc<dyn ObjectBackend>, snapshot: &str) -> Rc<Image> {
    open(backend, &format!("vm@{snapshot}")).await
}

#[test]
fn what_is_refused() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = Stormy::new(1, 0);
        let image = create_and_open(&backend, "vm", OBJECT).await;
        for name in ["", "a/b", "a@b"] {
            assert_eq!(kind(image.create_snapshot(name).await), Some(ErrorKind::Invalid), "{name}");
        }
        image.set_snapshot_limit(Some(2)).await.expect("limited");
        for name in ["one", "two"] {
            image.create_snapshot(name).await.expect("a snapshot");
        }
        let over = image.create_snapshot("three").await.expect_err("one too many");
        assert_eq!(over.kind(), ErrorKind::NoSpace);
        assert!(over.to_string().contains("its limit of 2 snapshots"), "{over}");
        assert_eq!(Images::of(&backend).details("vm").await.expect("details").snapshot_limit, Some(2));
        image.set_snapshot_limit(None).await.expect("unlimited");
        assert_eq!(Images::of(&backend).details("vm").await.expect("details").snapshot_limit, None);
        image.create_snapshot("three").await.expect("a snapshot");
        for name in ["none", ""] {
            assert_eq!(kind(image.remove_snapshot(name).await), Some(ErrorKind::NotFound));
            assert_eq!(kind(image.rename_snapshot(name, "x").await), Some(ErrorKind::NotFound));
            assert_eq!(kind(image.set_snapshot_protection(name, true).await), Some(ErrorKind::NotFound));
            assert_eq!(kind(image.rollback(name, |_| {}).await), Some(ErrorKind::NotFound));
        }
        assert_eq!(kind(image.rename_snapshot("one", "two").await), Some(ErrorKind::Exists));
        assert_eq!(kind(image.rename_snapshot("one", "o@e").await), Some(ErrorKind::Invalid));
        let read_only = Image::open(backend.clone(), "vm", ImageOpenOptions { read_only: true }).await.expect("opened");
        for handle in [read_only, open_at(&backend, "one").await] {
            assert_eq!(kind(handle.create_snapshot("x").await), Some(ErrorKind::ReadOnly));
            assert_eq!(kind(handle.remove_snapshot("one").await), Some(ErrorKind::ReadOnly));
            assert_eq!(kind(handle.rollback("one", |_| {}).await), Some(ErrorKind::ReadOnly));
        }
        let refused = forebay_image::remove(&backend, "vm", |_| {}).await;
        assert_eq!(kind(refused), Some(ErrorKind::Busy), "it has snapshots");
    });
}

#[test]
fn a_snapshot_with_clones_stays() {
    run(async {
        let cluster = cluster(3, 1);
        let pools = [POOL, cluster.add_pool("other")].map(|pool| cluster.client().pool(pool));
        let base = create_and_open(&pools[0], "base", OBJECT).await;
        let gold = base.create_snapshot("gold").await.expect("a snapshot");
        base.set_snapshot_protection("gold", true).await.expect("protected");
        // What `rbd clone` stores for a clone of version 1 in another pool.
        let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let key = [&POOL.to_le_bytes()[..], &text(base.id()), &gold.id.to_le_bytes()].concat();
        let child = create_and_open(&pools[1], "child", OBJECT).await;
        let value = [&1_u32.to_le_bytes()[..], &text(child.id())].concat();
        let children = forebay_block::ObjectName::new("rbd_children");
        let set = |pairs| forebay_block::Transaction::of(forebay_block::ObjectOp::KvSet { pairs });
        pools[1].submit(&children, set(vec![(key.clone(), value)])).await.expect("keys");
        let parent = forebay_ram::cluster::rbd::encode_parent(POOL, "", base.id(), gold.id, OBJECT);
        let header = forebay_block::ObjectName::new(format!("rbd_header.{}", child.id()));
        pools[1].submit(&header, set(vec![(b"parent".to_vec(), parent)])).await.expect("keys");
        child.close().await;
        let busy = base.set_snapshot_protection("gold", false).await.expect_err("it has a clone");
        assert_eq!(busy.kind(), ErrorKind::Busy);
        assert!(busy.to_string().contains("clones in pool other"), "{busy}");
        assert!(base.snapshots()[0].protected);
        assert_eq!(kind(base.remove_snapshot("gold").await), Some(ErrorKind::Busy));
        let gone = forebay_block::ObjectOp::KvRemove { keys: vec![key] };
        pools[1].submit(&children, forebay_block::Transaction::of(gone)).await.expect("keys");
        base.set_snapshot_protection("gold", false).await.expect("unprotected");
        base.remove_snapshot("gold").await.expect("removed");
        base.close().await;
    });
}

/// Other clients' snapshots, made between two of ours, are kept by our writes.
#[test]
fn snapshots_of_other_clients() {
    run(async {
        let cluster = cluster(5, 2);
        let backend = cluster.client().pool(POOL);
        let image = create_and_open(&backend, "vm", 2 * OBJECT).await;
        write(&image, 0, &pattern(1, OBJECT as usize)).await;
        image.create_snapshot("ours").await.expect("a snapshot");
        image.close().await;
        take_snapshot(&backend, "vm", "theirs", None).await;
        let image = open(&backend, "vm").await;
        write(&image, 0, &pattern(2, OBJECT as usize)).await;
        image.create_snapshot("last").await.expect("a snapshot");
        write(&image, 0, &pattern(3, OBJECT as usize)).await;
        for (name, seed) in [("ours", 1), ("theirs", 1), ("last", 2)] {
            assert!(read(&*open_at(&backend, name).await, 0, OBJECT).await == pattern(seed, OBJECT as usize), "{name}");
        }
        image.remove_snapshot("theirs").await.expect("removed");
        image.rollback("ours", |_| {}).await.expect("rolled back");
        assert!(read(&image, 0, OBJECT).await == pattern(1, OBJECT as usize));
        image.close().await;
        check_maps(&backend, "vm", "at the end").await;
    });
}

/// An image without an exclusive lock: two clients change its snapshots at the same time.
#[test]
fn clients_without_a_lock() {
    for seed in 1..60 {
        run(async {
            let cluster = cluster(seed, 1 + seed % 6);
            let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
            let options =
                forebay_image::CreateOptions { features: Some(ImageFeatures::LAYERING), ..of_size(2 * OBJECT) };
            forebay_image::create(&backends[0], "vm", options).await.expect("created");
            let images = [open(&backends[0], "vm").await, open(&backends[1], "vm").await];
            let tasks = images.clone().into_iter().enumerate().map(|(client, image)| {
                spawn(async move {
                    let mut made = Vec::new();
                    for number in 0..4 {
                        let name = format!("{client}-{number}");
                        write(&image, client as u64 * OBJECT, &pattern(number, 1000)).await;
                        match image.create_snapshot(&name).await {
                            Ok(_) => made.push(name),
                            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
                        }
                        if number == 2 && !made.is_empty() {
                            match image.remove_snapshot(&made[0]).await {
                                Ok(()) => drop(made.remove(0)),
                                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
                            }
                        }
                    }
                    made
                })
            });
            let mut made = Vec::new();
            for task in tasks.collect::<Vec<_>>() {
                made.extend(task.await);
            }
            let found = Images::of(&backends[0]).snapshots("vm").await.expect("snapshots");
            let mut found: Vec<_> = found.into_iter().map(|info| info.name).collect();
            found.sort();
            made.sort();
            assert_eq!(found, made, "seed {seed}");
            // Their numbers are not among those that are removed from the pool.
            for (client, image) in (0..).zip(&images) {
                write(image, client * OBJECT, &pattern(100, 1000)).await;
            }
            for name in &made {
                let (client, number) = name.split_once('-').expect("a name");
                let (client, number): (u64, u8) = (client.parse().expect("it"), number.parse().expect("it"));
                let then = open(&backends[0], &format!("vm@{name}")).await;
                assert!(read(&then, client * OBJECT, 1000).await == pattern(number, 1000), "seed {seed}: {name}");
                then.close().await;
            }
        });
    }
}
