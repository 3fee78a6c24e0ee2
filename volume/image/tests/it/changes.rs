//! Changes between snapshots: random programs; the changes between any two points, applied to a copy of the first, give the
//! second. With object maps, without, on clones, and by two clients.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend};
use forebay_image::{ChangedRange, CreateOptions, Image, ImageFeatures, Striping};

use crate::common::cluster::{
    OBJECT, POOL, cluster, create_and_open, kind, make_clone, of_size, open, read, two_clients, write,
};
use crate::common::{Stormy, pattern, run};
use forebay_reactor::spawn;

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

/// Plain model: the content of the head, and of each snapshot.
struct Model {
    content: Vec<u8>,
    snapshots: Vec<(String, Vec<u8>)>,
}

const SIZE_MAX: u64 = 7 * OBJECT + 999;
const BLOCK: usize = 4096;

/// Runs a program of `steps` steps on an open image, as one of `images` at a time.
async fn program(random: &mut Random, images: &[Rc<Image>], model: &mut Model, steps: u64) {
    for step in 0..steps {
        let image = &images[random.below(images.len() as u64) as usize];
        let size = model.content.len() as u64;
        let pick = random.below(model.snapshots.len() as u64) as usize;
        match random.below(12) {
            0..4 if size > 0 => {
                let (offset, len) = random.range(size);
                let data = pattern(step as u8, len as usize);
                write(image, offset, &data).await;
                model.content[offset as usize..][..len as usize].copy_from_slice(&data);
            }
            4 if size > 0 => {
                // The same bytes again change nothing.
                let (offset, len) = random.range(size);
                write(image, offset, &model.content[offset as usize..][..len as usize]).await;
            }
            5..=6 if size > 0 => {
                let (offset, len) = random.range(size);
                image.submit(BlockRequest::Discard(Extent::new(offset, len))).await.expect("a discard");
                model.content[offset as usize..][..len as usize].fill(0);
            }
            7..=8 => {
                let name = format!("s{:x}", random.below(1 << 40));
                image.create_snapshot(&name).await.expect("a snapshot");
                model.snapshots.push((name, model.content.clone()));
            }
            9 if model.snapshots.len() > 3 => {
                image.remove_snapshot(&model.snapshots[pick].0).await.expect("removed");
                model.snapshots.remove(pick);
            }
            10 if !model.snapshots.is_empty() => {
                image.rollback(&model.snapshots[pick].0, |_| {}).await.expect("rolled back");
                let content = model.snapshots[pick].1.clone();
                model.content = content;
            }
            11 => {
                let to = random.below(SIZE_MAX);
                image.resize(to, true, |_| {}).await.expect("resized");
                model.content.resize(to as usize, 0);
            }
            _ => {}
        }
    }
}

/// Returns the changes from a snapshot to the state that an image shows.
async fn changes(image: &Rc<Image>, from: Option<&str>, whole: bool) -> Vec<ChangedRange> {
    let mut changes = image.changes(from, whole).await.expect("changes");
    assert_eq!(changes.size(), image.size());
    let mut all = Vec::new();
    let mut done = 0;
    while let Some(ranges) = changes.next().await.expect("changes") {
        let progress = changes.progress();
        assert!(progress.done > done && progress.done <= progress.total, "{progress:?} after {done}");
        done = progress.done;
        all.extend(ranges);
    }
    assert!(changes.next().await.expect("the end").is_none());
    all
}

/// Asserts that changes are in order within the image, cover all differences, and say rightly what reads as zeroes; and that
/// they are no more than the blocks that differ, or whole objects.
fn check(was: &[u8], is: &[u8], found: &[ChangedRange], [whole, striped]: [bool; 2], at: &str) {
    let mut copy = was.to_vec();
    copy.resize(is.len(), 0);
    let before = copy.clone();
    let mut end = 0;
    for range in found {
        assert!(range.extent.len > 0 && range.extent.offset >= end, "{at}: {range:?} after {end}");
        end = range.extent.end();
        assert!(end <= is.len() as u64, "{at}: {range:?} is past the end");
        let bytes = range.extent.offset as usize..end as usize;
        let object = OBJECT as usize;
        assert!(striped || bytes.start / object == (bytes.end - 1) / object, "{at}: {range:?} is in two objects");
        if whole && !striped {
            let all = bytes.start / object * object..((bytes.start / object + 1) * object).min(is.len());
            assert_eq!(bytes, all, "{at}: not a whole object");
        }
        match range.exists {
            true => copy[bytes.clone()].copy_from_slice(&is[bytes.clone()]),
            false => copy[bytes.clone()].fill(0),
        }
    }
    assert!(copy == is, "{at}: changes are left out");
    if whole {
        return;
    }
    for range in found {
        let mut block = range.extent.offset as usize;
        while block < range.extent.end() as usize {
            let next = (block / BLOCK + 1) * BLOCK;
            let bytes = block..next.min(range.extent.end() as usize);
            assert!(before[bytes.clone()] != is[bytes.clone()], "{at}: block {bytes:?} has not changed");
            assert_eq!(range.exists, is[bytes.clone()].iter().any(|&byte| byte != 0), "{at}: {bytes:?}");
            block = next;
        }
    }
}

/// Checks the changes between any two points.
async fn check_all(backend: &Rc<dyn ObjectBackend>, name: &str, model: &Model, at: &str) {
    let mut points: Vec<(Option<&str>, &[u8])> =
        model.snapshots.iter().map(|(name, content)| (Some(&name[..]), &content[..])).collect();
    points.push((None, &model.content));
    for (end, &(snapshot, is)) in points.iter().enumerate() {
        let spec = snapshot.map_or_else(|| name.to_owned(), |snapshot| format!("{name}@{snapshot}"));
        let image = open(backend, &spec).await;
        let striped = image.striping().is_some();
        for whole in [false, true] {
            for &(from, was) in &points[..end] {
                let at = format!("{at}: from {from:?} to {snapshot:?}, whole: {whole}");
                check(was, is, &changes(&image, from, whole).await, [whole, striped], &at);
            }
            let at = format!("{at}: to {snapshot:?}, whole: {whole}");
            let found = changes(&image, None, whole).await;
            assert!(found.iter().all(|range| range.exists), "{at}");
            let covered: Vec<_> = found.iter().map(|range| range.extent).collect();
            for (block, bytes) in is.chunks(BLOCK).enumerate() {
                let (offset, len) = ((block * BLOCK) as u64, bytes.len() as u64);
                let within = |byte: u64| covered.iter().any(|extent| extent.range().contains(&byte));
                for (byte, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).step_by(97) {
                    assert!(within(offset + byte as u64), "{at}: data at {offset}, {len} bytes, is left out");
                }
            }
        }
        if let Some(&(Some(newer), _)) = points[..points.len() - 1].get(end + 1) {
            assert_eq!(kind(image.changes(Some(newer), false).await), Some(ErrorKind::Invalid), "{at}");
        }
        if snapshot.is_some() {
            assert_eq!(changes(&image, snapshot, false).await, [], "{at}: nothing since itself");
        }
        assert_eq!(kind(image.changes(Some("none"), false).await), Some(ErrorKind::NotFound), "{at}");
        image.close().await;
    }
}

/// Checks the changes that lead from a new clone of the parent to any point.
async fn check_since_parent(backend: &Rc<dyn ObjectBackend>, name: &str, model: &Model, parent: &[u8], at: &str) {
    let snapshots = model.snapshots.iter().map(|(snapshot, content)| (format!("{name}@{snapshot}"), content));
    for (spec, is) in snapshots.chain([(name.to_owned(), &model.content)]) {
        let image = open(backend, &spec).await;
        let mut changes = image.changes_since_parent().await.expect("changes");
        let mut found = Vec::new();
        while let Some(ranges) = changes.next().await.expect("changes") {
            found.extend(ranges);
        }
        // A clone of that size: what the parent has past it is cut off.
        let was = &parent[..parent.len().min(is.len())];
        check(was, is, &found, [false, image.striping().is_some()], &format!("{at}: {spec} since the parent"));
        image.close().await;
    }
}

fn seeded(seed: u64) -> Random {
    Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[test]
fn programs_on_a_pool_of_its_own() {
    for seed in 1..16 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 3);
            let size = 4 * OBJECT + 777;
            let image = create_and_open(&backend, "vm", size).await;
            let mut model = Model { content: vec![0; size as usize], snapshots: Vec::new() };
            program(&mut seeded(seed), std::slice::from_ref(&image), &mut model, 40).await;
            check_all(&backend, "vm", &model, &format!("seed {seed}")).await;
            image.close().await;
        });
    }
}

#[test]
fn programs_with_object_maps_and_without() {
    for seed in 1..16 {
        run(async {
            let cluster = cluster(seed, 2);
            let backend = cluster.client().pool(POOL);
            let size = 4 * OBJECT + 777;
            let features = [ImageFeatures::RBD_DEFAULT, ImageFeatures::LAYERING][seed as usize % 2];
            let striping = (seed % 3 == 0).then_some(Striping { unit: 8 << 10, count: 2 + seed % 2 });
            let options = CreateOptions { features: Some(features), striping, ..of_size(size) };
            forebay_image::create(&backend, "vm", options).await.expect("created");
            let image = open(&backend, "vm").await;
            let mut model = Model { content: vec![0; size as usize], snapshots: Vec::new() };
            program(&mut seeded(seed), std::slice::from_ref(&image), &mut model, 40).await;
            check_all(&backend, "vm", &model, &format!("seed {seed}, open")).await;
            image.close().await;
            check_all(&backend, "vm", &model, &format!("seed {seed}, closed")).await;
        });
    }
}

#[test]
fn programs_of_two_clients() {
    for seed in 1..16 {
        run(async {
            let cluster = cluster(seed, 2);
            let size = 4 * OBJECT + 777;
            let (backends, images) = two_clients(&cluster, size).await;
            let mut random = seeded(seed);
            let mut model = Model { content: vec![0; size as usize], snapshots: Vec::new() };
            for turn in 0..6 {
                program(&mut random, &images[turn % 2..][..1], &mut model, 7).await;
            }
            for backend in &backends {
                check_all(backend, "vm", &model, &format!("seed {seed}")).await;
            }
            for image in images {
                image.close().await;
            }
        });
    }
}

#[test]
fn programs_on_clones() {
    for seed in 1..16 {
        run(async {
            let cluster = cluster(seed, 1);
            let backend = cluster.client().pool(POOL);
            let size = 4 * OBJECT + 777;
            let mut content = pattern(9, size as usize);
            content[OBJECT as usize..][..2 * OBJECT as usize].fill(0);
            let base = create_and_open(&backend, "base", size).await;
            write(&base, 0, &content[..OBJECT as usize]).await;
            write(&base, 3 * OBJECT, &content[3 * OBJECT as usize..]).await;
            let gold = base.create_snapshot("gold").await.expect("a snapshot");
            write(&base, 0, &pattern(1, size as usize)).await;
            base.close().await;
            let features = [ImageFeatures::RBD_DEFAULT, ImageFeatures::LAYERING][seed as usize % 2];
            let striping = (seed % 3 == 0).then_some(Striping { unit: 8 << 10, count: 2 + seed % 2 });
            let options = CreateOptions { features: Some(features), striping, ..of_size(size) };
            forebay_image::create(&backend, "vm", options).await.expect("created");
            make_clone(&backend, "vm", "base", gold.id, size).await;
            let image = open(&backend, "vm").await;
            assert!(image.reads_parent());
            let parent = content.clone();
            let mut model = Model { content, snapshots: Vec::new() };
            let mut random = seeded(seed);
            // At first the parent has most objects.
            for steps in [0, 2, 38] {
                program(&mut random, std::slice::from_ref(&image), &mut model, steps).await;
                let at = format!("seed {seed}, {steps} steps");
                check_all(&backend, "vm", &model, &at).await;
                check_since_parent(&backend, "vm", &model, &parent, &at).await;
            }
            image.close().await;
        });
    }
}

/// While one client writes and creates snapshots, which begin new object maps, another sees every write that has completed.
#[test]
fn snapshots_that_are_created_meanwhile_hide_no_changes() {
    const OBJECTS: u64 = 40;
    for seed in 1..12 {
        run(async {
            let cluster = cluster(seed, 4);
            let (_, [writer, reader]) = two_clients(&cluster, OBJECTS * OBJECT).await;
            // What is new needs no mark of a change.
            write(&writer, 0, &vec![1; (OBJECTS * OBJECT) as usize]).await;
            writer.create_snapshot("base").await.expect("a snapshot");
            let written = Rc::new(std::cell::Cell::new(0));
            let (done, image) = (written.clone(), writer.clone());
            let task = spawn(async move {
                for object in 0..OBJECTS {
                    write(&image, object * OBJECT, b"new").await;
                    done.set(object + 1);
                    if object % 2 == 0 {
                        image.create_snapshot(&format!("s{object}")).await.expect("a snapshot");
                    }
                }
            });
            while written.get() < OBJECTS {
                let before = written.get();
                let found = changes(&reader, Some("base"), true).await;
                let objects: Vec<_> = found.iter().map(|range| range.extent.offset / OBJECT).collect();
                let missing = (0..before).find(|object| !objects.contains(object));
                assert_eq!(missing, None, "seed {seed}: {before} objects were written, and {objects:?} have changed");
            }
            task.await;
            writer.close().await;
            reader.close().await;
        });
    }
}

#[test]
fn changes_are_exact_to_the_block() {
    run(async {
        let cluster = cluster(3, 0);
        let backend = cluster.client().pool(POOL);
        let image = create_and_open(&backend, "vm", 1000 * OBJECT).await;
        for object in [0, 1, 400, 999] {
            write(&image, object * OBJECT, &pattern(5, 3 * BLOCK)).await;
        }
        image.create_snapshot("one").await.expect("a snapshot");
        write(&image, OBJECT + BLOCK as u64, &[8; BLOCK]).await;
        image.submit(BlockRequest::Discard(Extent::new(999 * OBJECT, OBJECT))).await.expect("a discard");
        image.create_snapshot("two").await.expect("a snapshot");
        write(&image, 700 * OBJECT, b"new").await;
        let block = |object: u64, offset: u64, len: u64, exists| ChangedRange {
            extent: Extent::new(object * OBJECT + offset, len),
            exists,
        };
        let size = BLOCK as u64;
        let first = [block(1, size, size, true), block(999, 0, 3 * size, false)];
        let two = open(&backend, "vm@two").await;
        assert_eq!(changes(&two, Some("one"), false).await, first);
        assert_eq!(changes(&two, Some("one"), true).await, [block(1, 0, OBJECT, true), block(999, 0, OBJECT, false)]);
        two.close().await;
        assert_eq!(changes(&image, Some("two"), false).await, [block(700, 0, 3, true)]);
        assert_eq!(changes(&image, Some("two"), true).await, [block(700, 0, OBJECT, true)]);
        let whole = [0, 1, 400, 700].map(|object| block(object, 0, OBJECT, true));
        assert_eq!(changes(&image, None, true).await, whole);
        // A snapshot that goes meanwhile may have been read as zeroes.
        let mut walk = image.changes(Some("one"), false).await.expect("changes");
        assert!(walk.next().await.expect("changes").is_some());
        image.remove_snapshot("one").await.expect("removed");
        let left = loop {
            match walk.next().await {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(error) => break Some(error.kind()),
            }
        };
        assert_eq!(left, Some(ErrorKind::NotFound));
        image.close().await;
    });
}

#[test]
fn metadata_is_listed_in_order() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = Stormy::new(1, 0);
        let image = create_and_open(&backend, "vm", OBJECT).await;
        assert_eq!(image.metadata_pairs().await.expect("a list"), []);
        let want: Vec<_> = (0..150).map(|n| (format!("k{n:03}").into_bytes(), vec![n as u8; 3])).collect();
        for (key, value) in want.iter().rev() {
            let key = String::from_utf8(key.clone()).expect("a key");
            image.set_metadata(&key, Some(value.clone())).await.expect("set");
        }
        assert!(image.metadata_pairs().await.expect("a list") == want);
        assert!(!image.reads_parent() && image.features().has(ImageFeatures::LAYERING));
        assert_eq!(read(&image, 0, 1).await, [0]);
        image.close().await;
    });
}
