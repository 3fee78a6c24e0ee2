//! Families of clones: random programs of clones, snapshots, flattens and removals against a plain model.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, SnapContext, SnapId, Transaction,
};
use forebay_image::{CloneFormat, CloneOptions, CreateOptions, Image, ImageFeatures, Images};
use forebay_reactor::{spawn, timeout, yield_now};

use crate::common::cluster::{
    OBJECT, POOL, check_map, cluster, create_and_open, kind, of_size, open, read, until, write,
};
use crate::common::{Stormy, bytes, objects, pattern, run};

/// Snapshot as the model has it.
struct Known {
    name: String,
    content: Vec<u8>,
    protected: bool,
    /// Set if it may read the image's parent.
    uses_parent: bool,
}

/// Image as the model has it.
struct Member {
    name: String,
    content: Vec<u8>,
    snapshots: Vec<Known>,
    /// Image and snapshot that it is a clone of, by their names when it was made.
    origin: Option<(usize, String)>,
    /// Set while its head reads the parent.
    attached: bool,
    /// Names of snapshots that were removed, and may be in the trash for clones, and read the parent.
    removed: Vec<String>,
    gone: bool,
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }
}

struct Family {
    /// One backend a client; the images are opened by any of them.
    backends: Vec<Rc<dyn ObjectBackend>>,
    features: ImageFeatures,
    members: Vec<Member>,
    random: Random,
    names: u64,
}

const SIZE: u64 = 3 * OBJECT + 777;

impl Family {
    async fn new(backends: Vec<Rc<dyn ObjectBackend>>, features: ImageFeatures, seed: u64) -> Self {
        let options = CreateOptions { features: Some(features), ..of_size(SIZE) };
        forebay_image::create(&backends[0], "m0", options).await.expect("created");
        let member = Member {
            name: "m0".into(),
            content: vec![0; SIZE as usize],
            snapshots: Vec::new(),
            origin: None,
            attached: false,
            removed: Vec::new(),
            gone: false,
        };
        let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { backends, features, members: vec![member], random, names: 0 }
    }

    fn fresh(&mut self) -> String {
        self.names += 1;
        format!("s{}", self.names)
    }

    /// Returns whether an image, or a snapshot of it, needs its parent.
    fn depends(&self, number: usize) -> bool {
        let member = &self.members[number];
        let by_snapshots = member.snapshots.iter().any(|known| known.uses_parent);
        let by_trash = || member.removed.iter().any(|name| !self.clones(number, name).is_empty());
        !member.gone && (member.attached || by_snapshots || by_trash())
    }

    /// Returns the images that depend on a snapshot.
    fn clones(&self, image: usize, snapshot: &str) -> Vec<&str> {
        let of = |&other: &usize| {
            let origin = self.members[other].origin.as_ref();
            origin.is_some_and(|(number, name)| *number == image && name == snapshot) && self.depends(other)
        };
        (0..self.members.len()).filter(of).map(|other| &self.members[other].name[..]).collect()
    }

    async fn step(&mut self, at: &str) {
        let there: Vec<usize> = (0..self.members.len()).filter(|&member| !self.members[member].gone).collect();
        let number = there[self.random.below(there.len() as u64) as usize];
        let client = self.random.below(self.backends.len() as u64) as usize;
        let backend = self.backends[client].clone();
        let name = self.members[number].name.clone();
        let image = open(&backend, &name).await;
        let pick = self.random.below(self.members[number].snapshots.len() as u64) as usize;
        let size = self.members[number].content.len() as u64;
        let op = self.random.below(20);
        match op {
            0..5 if size > 0 => {
                let offset = self.random.below(size);
                let len = 1 + self.random.below((2 * OBJECT).min(size - offset));
                let data = match self.random.below(4) {
                    0 => vec![0; len as usize],
                    _ => pattern(self.random.below(250) as u8 + 1, len as usize),
                };
                write(&image, offset, &data).await;
                self.members[number].content[offset as usize..][..len as usize].copy_from_slice(&data);
            }
            5..=6 if size > 0 => {
                let offset = self.random.below(size);
                let len = 1 + self.random.below((2 * OBJECT).min(size - offset));
                image.submit(BlockRequest::Discard(Extent::new(offset, len))).await.expect("a discard");
                self.members[number].content[offset as usize..][..len as usize].fill(0);
            }
            7 => {
                let to = self.random.below(SIZE + OBJECT);
                image.resize(to, true, |_| {}).await.expect("resized");
                self.members[number].content.resize(to as usize, 0);
            }
            8..=9 => {
                let snapshot = self.fresh();
                image.create_snapshot(&snapshot).await.expect("a snapshot");
                let member = &mut self.members[number];
                let content = member.content.clone();
                let uses_parent = member.attached;
                member.snapshots.push(Known { name: snapshot, content, protected: false, uses_parent });
            }
            10 if !self.members[number].snapshots.is_empty() => {
                let known = &self.members[number].snapshots[pick];
                let removed = image.remove_snapshot(&known.name).await;
                match known.protected {
                    true => assert_eq!(kind(removed), Some(ErrorKind::Busy), "{at}: it is protected"),
                    // With clones it goes to the trash.
                    false => {
                        removed.unwrap_or_else(|error| panic!("{at}: {error}"));
                        let known = self.members[number].snapshots.remove(pick);
                        self.members[number].removed.extend(known.uses_parent.then_some(known.name));
                    }
                }
            }
            11 if !self.members[number].snapshots.is_empty() => {
                let known = &self.members[number].snapshots[pick];
                image.rollback(&known.name, |_| {}).await.expect("rolled back");
                self.members[number].content = known.content.clone();
            }
            12..=16 if !self.members[number].snapshots.is_empty() && there.len() < 6 => {
                image.close().await;
                return self.clone_one(&backend, number, pick, at).await;
            }
            17 => {
                let flattened = image.flatten(|_| {}).await;
                let member = &mut self.members[number];
                match member.attached {
                    false => assert_eq!(kind(flattened), Some(ErrorKind::Invalid), "{at}: it has no parent"),
                    true => flattened.unwrap_or_else(|error| panic!("{at}: {error}")),
                }
                if self.features.has(ImageFeatures::DEEP_FLATTEN) {
                    member.snapshots.iter_mut().for_each(|known| known.uses_parent = false);
                    member.removed.clear();
                }
                member.attached = false;
            }
            18 if there.len() > 1 => {
                image.close().await;
                let all = Images::of(&backend).snapshots(&name).await.expect("snapshots");
                let removed = forebay_image::remove(&backend, &name, |_| {}).await;
                match all.is_empty() {
                    false => assert_eq!(kind(removed), Some(ErrorKind::Busy), "{at}: it has snapshots"),
                    true => {
                        removed.unwrap_or_else(|error| panic!("{at}: {error}"));
                        self.members[number].gone = true;
                    }
                }
                return;
            }
            _ => {}
        }
        image.close().await;
    }

    async fn clone_one(&mut self, backend: &Rc<dyn ObjectBackend>, number: usize, pick: usize, at: &str) {
        let name = format!("m{}", self.members.len());
        let format = [CloneFormat::Auto, CloneFormat::V1, CloneFormat::V2][self.random.below(3) as usize];
        let known = &self.members[number].snapshots[pick];
        let spec = format!("{}@{}", self.members[number].name, known.name);
        let options = CloneOptions { format, features: Some(self.features), ..CloneOptions::default() };
        let images = Images::of(backend);
        if format == CloneFormat::V1 && !known.protected {
            let refused = images.clone_from(&images, &spec, &name, &options).await;
            assert_eq!(kind(refused), Some(ErrorKind::Invalid), "{at}: it is not protected");
            let parent = open(backend, &self.members[number].name).await;
            parent.set_snapshot_protection(&known.name, true).await.expect("protected");
            parent.close().await;
            self.members[number].snapshots[pick].protected = true;
        }
        images.clone_from(&images, &spec, &name, &options).await.unwrap_or_else(|error| panic!("{at}: {error}"));
        let known = &self.members[number].snapshots[pick];
        self.members.push(Member {
            name,
            content: known.content.clone(),
            snapshots: Vec::new(),
            origin: Some((number, known.name.clone())),
            attached: true,
            removed: Vec::new(),
            gone: false,
        });
    }

    async fn check(&self, at: &str) {
        let backend = &self.backends[0];
        let images = Images::of(backend);
        for (number, member) in self.members.iter().enumerate().filter(|(_, member)| !member.gone) {
            let image = open(backend, &member.name).await;
            assert!(content_of(&image).await == member.content, "{at}: {}", member.name);
            image.close().await;
            let mut in_trash = 0;
            for known in &member.snapshots {
                let snapshot = open(backend, &format!("{}@{}", member.name, known.name)).await;
                assert!(content_of(&snapshot).await == known.content, "{at}: {}@{}", member.name, known.name);
                snapshot.close().await;
                let mut found = names_of(&images, &member.name, Some(&known.name)).await;
                found.sort();
                let mut clones = self.clones(number, &known.name);
                clones.sort();
                assert_eq!(found, clones, "{at}: clones of {}@{}", member.name, known.name);
            }
            let all = images.snapshots(&member.name).await.expect("snapshots");
            for snapshot in all.iter().filter(|snapshot| !snapshot.is_user()) {
                assert!(snapshot.children > 0, "{at}: {snapshot:?} in the trash of {} has no clone", member.name);
                in_trash += snapshot.children as usize;
            }
            let removed = |origin: &(usize, String)| {
                origin.0 == number && !member.snapshots.iter().any(|known| known.name == origin.1)
            };
            let waits = (0..self.members.len())
                .filter(|&other| self.members[other].origin.as_ref().is_some_and(removed) && self.depends(other));
            assert_eq!(in_trash, waits.count(), "{at}: clones of snapshots in the trash of {}", member.name);
            let info = forebay_image::info(backend, &member.name).await.expect("info");
            assert_eq!(info.has_parent, self.depends(number), "{at}: {}", member.name);
            if self.features.has(ImageFeatures::OBJECT_MAP) {
                check_map(&**backend, &info.id).await;
            }
        }
    }

    /// Removes everything, clones before their parents, and asserts that nothing is left.
    async fn check_goes(&mut self, at: &str) {
        let backend = self.backends[0].clone();
        for member in self.members.iter().rev().filter(|member| !member.gone) {
            let image = open(&backend, &member.name).await;
            for known in &member.snapshots {
                let ended = image.set_snapshot_protection(&known.name, false).await;
                ended.unwrap_or_else(|error| panic!("{at}: {}@{}: {error}", member.name, known.name));
                image.remove_snapshot(&known.name).await.expect("removed");
            }
            image.close().await;
            let removed = forebay_image::remove(&backend, &member.name, |_| {}).await;
            removed.unwrap_or_else(|error| panic!("{at}: {}: {error}", member.name));
        }
        let left: Vec<_> = objects(&backend).await.into_iter().filter(|name| name != "rbd_children").collect();
        assert_eq!(left, ["rbd_directory"], "{at}");
        let lists = forebay_block::ObjectName::new("rbd_children");
        if let Ok(lists) = backend.kv_list(&lists, b"", b"", 9).await {
            assert!(lists.pairs.is_empty(), "{at}: {:?}", lists.pairs);
        }
    }
}

async fn content_of(image: &Image) -> Vec<u8> {
    if image.size() == 0 { Vec::new() } else { read(image, 0, image.size()).await }
}

async fn names_of(images: &Rc<Images>, image: &str, snapshot: Option<&str>) -> Vec<String> {
    let found = images.children(image, snapshot, false).await.expect("clones");
    found.into_iter().map(|child| child.image).collect()
}

async fn program(mut family: Family, seed: u64) {
    for step in 0..50 {
        let at = format!("seed {seed}, step {step}");
        family.step(&at).await;
        if step % 6 == 5 {
            family.check(&at).await;
        }
    }
    let at = format!("seed {seed}, at the end");
    family.check(&at).await;
    family.check_goes(&at).await;
}

#[test]
fn programs_on_a_pool_of_its_own() {
    for seed in 1..40 {
        run(async {
            let features = match seed % 2 {
                0 => ImageFeatures::LAYERING,
                _ => ImageFeatures(ImageFeatures::LAYERING.0 | ImageFeatures::DEEP_FLATTEN.0),
            };
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 3);
            program(Family::new(vec![backend], features, seed).await, seed).await;
        });
    }
}

#[test]
fn programs_of_two_clients() {
    for seed in 1..40 {
        run(async {
            let cluster = cluster(seed, 2);
            let backends = vec![cluster.client().pool(POOL), cluster.client().pool(POOL)];
            let features = [ImageFeatures::RBD_DEFAULT, ImageFeatures::LAYERING][seed as usize % 2];
            program(Family::new(backends, features, seed).await, seed).await;
        });
    }
}

/// Returns an image of 6 objects with a snapshot, `base@gold`, and its content.
async fn gold(backend: &Rc<dyn ObjectBackend>) -> Vec<u8> {
    let base = create_and_open(backend, "base", 6 * OBJECT).await;
    let content = pattern(4, 6 * OBJECT as usize);
    write(&base, 0, &content).await;
    base.create_snapshot("gold").await.expect("a snapshot");
    write(&base, 0, &pattern(9, 6 * OBJECT as usize)).await;
    base.close().await;
    content
}

async fn clone(backend: &Rc<dyn ObjectBackend>, from: &str, name: &str) -> forebay_block::Result<()> {
    let images = Images::of(backend);
    images.clone_from(&images, from, name, &CloneOptions::default()).await
}

#[test]
fn a_clone_is_flattened_while_it_is_written() {
    for seed in 1..20 {
        run(async {
            let cluster = cluster(seed, 3);
            let backend = cluster.client().pool(POOL);
            let mut content = gold(&backend).await;
            clone(&backend, "base@gold", "vm").await.expect("cloned");
            let image = open(&backend, "vm").await;
            let flattening = image.clone();
            let flattening = spawn(async move { flattening.flatten(|_| {}).await });
            for round in 0..6_u64 {
                let offset = (round * 7 + seed) % 6 * OBJECT + 100 * round;
                let data = pattern(round as u8, 5000);
                let reading = spawn(image.submit(BlockRequest::Read(Extent::new(offset / OBJECT * OBJECT, 10))));
                write(&image, offset, &data).await;
                content[offset as usize..][..5000].copy_from_slice(&data);
                reading.await.expect("a read");
                (0..seed % 5).for_each(drop);
                yield_now().await;
            }
            flattening.await.expect("flattened");
            assert!(content_of(&image).await == content, "seed {seed}");
            image.close().await;
            // The parent is needed no more.
            let base = open(&backend, "base").await;
            base.remove_snapshot("gold").await.expect("removed");
            base.close().await;
            forebay_image::remove(&backend, "base", |_| {}).await.expect("removed");
            assert!(content_of(&*open(&backend, "vm").await).await == content, "seed {seed}");
        });
    }
}

/// The parent's record of a clone stays until the last read of the parent has ended.
#[test]
fn a_read_of_the_parent_holds_the_end_of_a_flatten_up() {
    run(async {
        let cluster = cluster(1, 0);
        let backend = cluster.client().pool(POOL);
        // The first object is a hole in the parent: it stays one in the clone.
        let base = create_and_open(&backend, "base", 2 * OBJECT).await;
        write(&base, OBJECT, &pattern(1, 1000)).await;
        base.create_snapshot("gold").await.expect("a snapshot");
        clone(&backend, "base@gold", "vm").await.expect("cloned");
        let image = open(&backend, "vm").await;
        image.take_lock().await.expect("taken");
        let header = format!("rbd_header.{}", image.id());
        let storing = cluster.stall(POOL, &header);
        let flattening = image.clone();
        let flattening = spawn(async move { flattening.flatten(|_| {}).await });
        until(|| storing.waiting() == 1).await;
        // Submitted, and not completed before it is awaited.
        let read = image.submit(BlockRequest::Read(Extent::new(0, 1000)));
        drop(storing);
        for _ in 0..300 {
            yield_now().await;
        }
        let images = Images::of(&backend);
        assert_eq!(names_of(&images, "base", None).await, ["vm"], "a read still uses the parent");
        let found = read.await.expect("a read").into_data().to_vec();
        assert!(found.iter().all(|byte| *byte == 0));
        flattening.await.expect("flattened");
        assert_eq!(images.children("base", None, false).await.expect("clones"), []);
    });
}

/// The copy of an object that a rollback has removed meanwhile is made again.
#[test]
fn a_flatten_does_not_wait_for_a_walk_over_the_changes_since_the_parent() {
    run(async {
        for by_other in [false, true] {
            let cluster = cluster(1, 2);
            let [here, there] = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
            let base = gold(&here).await;
            clone(&here, "base@gold", "vm").await.expect("cloned");
            let image = open(&here, "vm").await;
            write(&image, OBJECT / 2, b"own").await;
            let mut content = base.clone();
            content[OBJECT as usize / 2..][..3].copy_from_slice(b"own");
            let mut changes = image.changes_since_parent().await.expect("changes");
            let flattening = if by_other { open(&there, "vm").await } else { image.clone() };
            let flattened = timeout(Duration::from_secs(20), flattening.flatten(|_| {})).await;
            flattened.expect("in time").expect("flattened");
            let mut copy = base;
            while let Some(ranges) =
                timeout(Duration::from_secs(20), changes.next()).await.expect("in time").expect("changes")
            {
                for range in ranges {
                    let bytes = range.extent.offset as usize..range.extent.end() as usize;
                    copy[bytes.clone()].copy_from_slice(&content[bytes]);
                }
            }
            assert!(copy == content, "by another client: {by_other}");
            if by_other {
                flattening.close().await;
            }
            image.close().await;
        }
    });
}

#[test]
fn a_flatten_and_rollbacks() {
    // By the client that flattens, at each of its first turns, and by both in turn.
    let early = (0..60).map(|turns| (1, turns, 0));
    for (seed, turns, by) in early.chain((1..30).map(|seed| (seed, seed * 3, seed as usize % 2))) {
        run(async {
            let cluster = cluster(seed, 3);
            let clients = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
            let content = gold(&clients[0]).await;
            let images = Images::of(&clients[0]);
            // Without deep-flatten, as another client makes snapshots that read the parent.
            let options = CloneOptions { features: Some(ImageFeatures(0b101)), ..CloneOptions::default() };
            images.clone_from(&images, "base@gold", "vm", &options).await.expect("cloned");
            let handles = [open(&clients[0], "vm").await, open(&clients[1], "vm").await];
            let then = SnapId(handles[0].create_snapshot("then").await.expect("a snapshot").id);
            // As librbd writes whole objects: the snapshot goes on reading the parent, and a rollback removes them.
            let prefix = images.info("vm").await.expect("info").block_name_prefix;
            for object in 0..3 {
                let data = bytes(&pattern(7, OBJECT as usize));
                let snapc = Some(Rc::new(SnapContext { seq: then.0, snaps: vec![then] }));
                let write = Transaction { snapc, ..Transaction::of(ObjectOp::WriteFull { data }) };
                let name = ObjectName::new(format!("{prefix}.{object:016x}"));
                clients[0].submit(&name, write).await.expect("written");
            }
            let flattening = handles[0].clone();
            let flattening = spawn(async move { flattening.flatten(|_| {}).await });
            for _ in 0..turns {
                yield_now().await;
            }
            handles[by].rollback("then", |_| {}).await.expect("rolled back");
            match flattening.await {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "seed {seed}: {error}"),
            }
            for handle in &handles {
                assert!(content_of(handle).await == content, "seed {seed}");
            }
        });
    }
}

#[test]
fn clones_in_other_pools_and_their_descendants() {
    run(async {
        let cluster = cluster(3, 1);
        let other = cluster.add_pool("other");
        let client = cluster.client();
        let [here, there] = [client.pool(POOL), client.pool(other)];
        let content = gold(&here).await;
        let [from, to] = [Images::of(&here), Images::of(&there)];
        let base = open(&here, "base").await;
        base.set_metadata("color", Some(b"blue".to_vec())).await.expect("set");
        base.set_snapshot_protection("gold", true).await.expect("protected");
        let child = |pool: &str, image: &str| format!("{pool}/{image}");
        for (name, format) in [("first", CloneFormat::V1), ("second", CloneFormat::V2)] {
            let options = CloneOptions { format, ..CloneOptions::default() };
            to.clone_from(&from, "base@gold", name, &options).await.expect("cloned");
            let clone = open(&there, name).await;
            assert!(content_of(&clone).await == content, "{name}");
            assert_eq!(clone.metadata("color").await.expect("metadata").as_deref(), Some(&b"blue"[..]), "{name}");
            clone.close().await;
        }
        let second = open(&there, "second").await;
        second.create_snapshot("then").await.expect("a snapshot");
        second.close().await;
        from.clone_from(&to, "second@then", "third", &CloneOptions::default()).await.expect("cloned");
        let list = async |all| {
            let found = from.children("base", None, all).await.expect("clones");
            found.into_iter().map(|info| child(&info.pool, &info.image)).collect::<Vec<_>>()
        };
        assert_eq!(list(false).await, ["other/second", "other/first"]);
        assert_eq!(list(true).await, ["other/second", "other/first", "rbd/third"]);
        assert_eq!(kind(from.children("base", Some("none"), false).await), Some(ErrorKind::NotFound));

        let busy = base.set_snapshot_protection("gold", false).await.expect_err("it has a clone of version 1");
        assert!(busy.to_string().contains("clones in pool other"), "{busy}");
        let mut told = Vec::new();
        let first = open(&there, "first").await;
        first.flatten(|now| told.push((now.done, now.total))).await.expect("flattened");
        first.close().await;
        assert_eq!((told.first(), told.last()), (Some(&(0, 6)), Some(&(6, 6))));
        base.set_snapshot_protection("gold", false).await.expect("it has none any more");
        // A clone of version 2 keeps its snapshot in the trash.
        base.remove_snapshot("gold").await.expect("removed");
        assert_eq!(base.snapshots(), []);
        let all = from.snapshots("base").await.expect("snapshots");
        assert_eq!(all[0].kind, forebay_image::SnapshotKind::Trash { name: "gold".into() });
        assert_eq!(kind(base.remove_snapshot_number(forebay_block::SnapId(all[0].id)).await), Some(ErrorKind::Busy));
        let refused = from.clone_from(&from, "base@gold", "fourth", &CloneOptions::default()).await;
        assert_eq!(kind(refused), Some(ErrorKind::NotFound));
        assert_eq!(list(false).await, ["other/second"]);
        assert!(content_of(&*open(&there, "second").await).await == content);
        let second = open(&there, "second").await;
        second.flatten(|_| {}).await.expect("flattened");
        assert_eq!(from.snapshots("base").await.expect("snapshots"), [], "the last clone takes it along");
        assert!(content_of(&*open(&here, "third").await).await == content, "a clone of the clone");
        assert_eq!(kind(second.flatten(|_| {}).await), Some(ErrorKind::Invalid));
    });
}

#[test]
fn what_is_refused() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = Stormy::new(1, 0);
        gold(&backend).await;
        for (from, name, want) in [
            ("base", "vm", ErrorKind::Invalid),
            ("base@none", "vm", ErrorKind::NotFound),
            ("none@gold", "vm", ErrorKind::NotFound),
            ("base@gold", "base", ErrorKind::Exists),
            ("base@gold", "a@b", ErrorKind::Invalid),
        ] {
            assert_eq!(kind(clone(&backend, from, name).await), Some(want), "{from} as {name}");
        }
        let images = Images::of(&backend);
        let other: Rc<dyn ObjectBackend> = Stormy::new(2, 0);
        let refused = Images::of(&other).clone_from(&images, "base@gold", "vm", &CloneOptions::default()).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("same cluster")), "another store");
        let options = CloneOptions { features: Some(ImageFeatures(0)), ..CloneOptions::default() };
        let refused = images.clone_from(&images, "base@gold", "vm", &options).await;
        assert_eq!(kind(refused), Some(ErrorKind::Invalid), "without layering");
        let options = CloneOptions { data_pool: Some("x".into()), ..CloneOptions::default() };
        assert!(images.clone_from(&images, "base@gold", "vm", &options).await.is_err(), "there is one pool");
        assert_eq!(images.children("base", None, false).await.expect("clones"), [], "a refused clone is not recorded");
    });
}

/// A removal that was interrupted after the parent had forgotten the clone, and lost its snapshot, can be repeated.
#[test]
fn a_clone_without_its_parent_can_be_removed() {
    run(async {
        let cluster = cluster(4, 1);
        let backend = cluster.client().pool(POOL);
        gold(&backend).await;
        clone(&backend, "base@gold", "vm").await.expect("cloned");
        let id = forebay_image::info(&backend, "vm").await.expect("info").id;
        let base = forebay_image::info(&backend, "base").await.expect("info").id;
        for object in [format!("rbd_header.{base}"), "rbd_id.base".into()] {
            let remove = forebay_block::Transaction::of(forebay_block::ObjectOp::Remove);
            backend.submit(&forebay_block::ObjectName::new(object), remove).await.expect("removed");
        }
        assert!(Image::open(backend.clone(), "vm", Default::default()).await.is_err());
        forebay_image::remove(&backend, "vm", |_| {}).await.expect("removed");
        assert!(!objects(&backend).await.iter().any(|name| name.contains(&id)));
    });
}
