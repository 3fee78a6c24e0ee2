//! Images of a pool that several clients use at once: the exclusive lock, object maps, watches, clones, namespaces,
//! data pools.

mod common;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use common::{bytes, parent, pattern, run, snapshot};
use forebay_block::{
    BlockDevice, ErrorKind, Extent, ExtentState, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Request, Result,
    SnapId, Transaction,
};
use forebay_image::{CreateOptions, Features, Image, Images, OpenOptions, RemoveOptions};
use forebay_ram::cluster::Cluster;
use forebay_reactor::{spawn, yield_now};

const OBJECT: u64 = 64 << 10;
const POOL: i64 = 1;

fn cluster(seed: u64, late: u64) -> Cluster {
    let cluster = Cluster::new(seed, late);
    assert_eq!(cluster.add_pool("rbd"), POOL);
    cluster
}

fn of_size(size: u64) -> CreateOptions {
    CreateOptions { size, object_size: OBJECT, ..CreateOptions::default() }
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

async fn open(backend: &Rc<dyn ObjectBackend>, name: &str) -> Rc<Image> {
    Image::open(backend.clone(), name, OpenOptions::default()).await.expect("opened")
}

async fn write(image: &Image, offset: u64, data: &[u8]) {
    image.submit(Request::Write { offset, data: bytes(data), fua: false }).await.expect("a write");
}

async fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    image.submit(Request::Read(Extent::new(offset, len))).await.expect("a read").into_data().to_vec()
}

async fn names(backend: &dyn ObjectBackend) -> Vec<String> {
    let page = backend.list(None, None, 100_000).await.expect("a listing");
    page.names.iter().map(ToString::to_string).collect()
}

async fn kv(backend: &dyn ObjectBackend, object: &str, pairs: Vec<(String, Vec<u8>)>) {
    let pairs = pairs.into_iter().map(|(key, value)| (key.into_bytes(), value)).collect();
    backend.submit(&ObjectName::new(object), Transaction::of(ObjectOp::KvSet { pairs })).await.expect("keys");
}

/// The states of an object map that lies in the pool, by the plain rules of its format.
async fn map_of(backend: &dyn ObjectBackend, name: &str) -> Vec<u8> {
    let name = ObjectName::new(name);
    let size = backend.stat(&name, SnapId::HEAD).await.expect("an object map").size;
    let data = backend.read(&name, ObjectRead::head(0, size)).await.expect("read").fill(Extent::new(0, size)).to_vec();
    let count = u64::from_le_bytes(data[10..18].try_into().expect("8 bytes")) as usize;
    (0..count).map(|object| data[18 + object / 4] >> (6 - object % 4 * 2) & 3).collect()
}

/// Every object that there is, the map says may be there; and nothing is left half removed.
async fn check_map(backend: &dyn ObjectBackend, id: &str) {
    let map = map_of(backend, &format!("rbd_object_map.{id}")).await;
    for name in names(backend).await {
        if let Some(object) = name.strip_prefix(&format!("rbd_data.{id}.")) {
            let object = usize::from_str_radix(object, 16).expect("a number");
            assert_ne!(map[object], 0, "object {object} is there");
        }
    }
    assert!(map.iter().all(|state| *state != 2), "an object is marked as being removed: {map:?}");
}

async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        yield_now().await;
    }
}

#[test]
fn images_get_rbds_features_and_leave_nothing() {
    run(async {
        let cluster = cluster(1, 3);
        let backend = cluster.client().pool(POOL);
        forebay_image::create(&backend, "vm", of_size(10 * OBJECT)).await.expect("created");
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        assert_eq!(info.features, Features::RBD_DEFAULT);
        let map = format!("rbd_object_map.{}", info.id);
        assert_eq!(map_of(&*backend, &map).await, [0; 10]);
        let image = open(&backend, "vm").await;
        write(&image, 0, &pattern(1, 100)).await;
        write(&image, 3 * OBJECT - 10, &pattern(2, 20)).await;
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 1, 1, 0, 0, 0, 0, 0, 0]);
        image.submit(Request::Discard(Extent::new(2 * OBJECT, OBJECT))).await.expect("discarded");
        image.submit(Request::Discard(Extent::new(5 * OBJECT, OBJECT + 5))).await.expect("discarded");
        image.submit(Request::Discard(Extent::new(100, 5))).await.expect("discarded");
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        check_map(&*backend, &info.id).await;
        image.resize(7 * OBJECT + 1, true, |_| {}).await.expect("shrunk");
        image.resize(2 * OBJECT, true, |_| {}).await.expect("shrunk");
        image.resize(9 * OBJECT, false, |_| {}).await.expect("grown");
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 0, 0, 0, 0, 0, 0, 0]);
        image.close().await;
        assert_eq!(cluster.watches(), 0);
        // A very large one has no map.
        let large = CreateOptions { size: 1 << 50, ..CreateOptions::default() };
        forebay_image::create(&backend, "large", large).await.expect("created");
        let features = forebay_image::info(&backend, "large").await.expect("info").features;
        assert_eq!(features.to_string(), "layering, exclusive-lock, deep-flatten");
        forebay_image::remove(&backend, "vm", |_| {}).await.expect("removed");
        assert!(!names(&*backend).await.iter().any(|name| name.contains(&info.id)));
    });
}

#[test]
fn the_lock_goes_to_whoever_writes() {
    for seed in 0..6 {
        run(async {
            let cluster = cluster(seed * 77 + 1, 2 * seed);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(16 * OBJECT)).await.expect("created");
            let id = forebay_image::info(&b, "vm").await.expect("info").id;
            let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
            let mut expected = vec![0; 16 * OBJECT as usize];
            for round in 0..12u64 {
                let image = if round % 3 == 0 { &two } else { &one };
                let at = round * OBJECT + 77 * round;
                write(image, at, &pattern(round as u8, 70_000)).await;
                expected[at as usize..at as usize + 70_000].copy_from_slice(&pattern(round as u8, 70_000));
                let cut = Extent::new(((round * 7) % 15) * OBJECT, OBJECT);
                image.submit(Request::Discard(cut)).await.expect("a discard");
                expected[cut.offset as usize..cut.end() as usize].fill(0);
                assert!(read(&one, 0, 16 * OBJECT).await == expected, "round {round}");
                assert!(read(&two, 0, 16 * OBJECT).await == expected, "round {round}");
                check_map(&*cluster.bare(POOL), &id).await;
            }
            assert_eq!(kind(forebay_image::remove(&a, "vm", |_| {}).await), Some(ErrorKind::Busy), "open elsewhere");
            one.close().await;
            assert_eq!(kind(forebay_image::remove(&a, "vm", |_| {}).await), Some(ErrorKind::Busy), "open elsewhere");
            two.close().await;
            forebay_image::remove(&a, "vm", |_| {}).await.expect("removed");
            assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory"]);
            assert_eq!(cluster.blocklisted(), [""; 0]);
        });
    }
}

#[test]
fn dropped_images_are_given_up_when_their_pool_has_settled() {
    for seed in 0..4 {
        run(async {
            let cluster = cluster(seed * 13 + 5, 3 * seed);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
            let image = open(&a, "vm").await;
            write(&image, 0, b"held").await;
            drop(image);
            Images::of(&a).settle().await;
            // Neither a watch nor a lock is left, which would keep others from removing it.
            forebay_image::remove(&b, "vm", |_| {}).await.expect("removed");
            assert_eq!(cluster.blocklisted(), [""; 0]);
        });
    }
}

#[test]
fn writes_of_two_clients_at_once_all_happen() {
    for seed in 0..6 {
        run(async {
            let cluster = cluster(seed * 13 + 5, 4);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(64 * OBJECT)).await.expect("created");
            let images = [open(&a, "vm").await, open(&b, "vm").await];
            let mut tasks = Vec::new();
            for step in 0..40u64 {
                let image = images[(step % 2) as usize].clone();
                let data = pattern(step as u8, 4096);
                tasks.push(spawn(async move { write(&image, step * OBJECT + step * 512, &data).await }));
                if step % 5 == 0 {
                    yield_now().await;
                }
            }
            for task in tasks {
                task.await;
            }
            for step in 0..40u64 {
                let found = read(&images[1], step * OBJECT + step * 512, 4096).await;
                assert!(found == pattern(step as u8, 4096), "step {step}");
            }
            check_map(&*cluster.bare(POOL), images[0].id()).await;
        });
    }
}

#[test]
fn a_dead_owner_is_fenced_and_its_lock_broken() {
    run(async {
        let cluster = cluster(9, 1);
        let (dead, alive) = (cluster.client(), cluster.client());
        let (a, b) = (dead.pool(POOL), alive.pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let one = open(&a, "vm").await;
        write(&one, 0, b"before").await;
        dead.die();
        cluster.expire_watches();
        let two = open(&b, "vm").await;
        write(&two, 6, b", after").await;
        assert_eq!(read(&two, 0, 13).await, b"before, after");
        assert_eq!(cluster.blocklisted(), [dead.address()]);
        check_map(&*cluster.bare(POOL), two.id()).await;
    });
}

#[test]
fn a_fenced_client_writes_no_more() {
    run(async {
        let cluster = cluster(9, 1);
        let (fenced, other) = (cluster.client(), cluster.client());
        let (a, b) = (fenced.pool(POOL), other.pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let one = open(&a, "vm").await;
        write(&one, 0, b"before").await;
        b.shared().expect("shared").blocklist(&fenced.address(), None).await.expect("fenced");
        let late = Request::Write { offset: OBJECT, data: bytes(b"late"), fua: false };
        assert_eq!(kind(one.submit(late).await), Some(ErrorKind::Fenced));
        assert_eq!(kind(one.submit(Request::Read(Extent::new(0, 1))).await), Some(ErrorKind::Fenced));
    });
}

#[test]
fn a_lock_taken_by_hand_is_left_alone() {
    run(async {
        let cluster = cluster(3, 0);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        let header = ObjectName::new(format!("rbd_header.{}", image.id()));
        let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let body = [text("rbd_lock"), vec![1], text("mine"), text("tag"), text(""), vec![0; 9]].concat();
        let input = [&[1, 1][..], &(body.len() as u32).to_le_bytes(), &body].concat();
        let method = forebay_block::Method::new("lock", "lock");
        b.submit(&header, Transaction::of(ObjectOp::Call { method, input })).await.expect("locked");
        let refused = image.submit(Request::Write { offset: 0, data: bytes(b"x"), fua: false }).await;
        let error = refused.expect_err("somebody has locked it");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("locked by hand, with the tag 'tag', by client."), "{error}");
        assert_eq!(read(&image, 0, 1).await, [0], "reading needs no lock");
    });
}

#[test]
fn a_watch_that_breaks_is_set_again_and_the_lock_kept() {
    run(async {
        let cluster = cluster(4, 2);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
        write(&one, 0, b"one").await;
        cluster.break_watches();
        until(|| cluster.watches() == 2).await;
        write(&one, 3, b"two").await;
        write(&two, 6, b"three").await;
        assert_eq!(read(&one, 0, 11).await, b"onetwothree");
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

#[test]
fn a_lock_that_is_kept_goes_to_nobody_who_asks() {
    run(async {
        let cluster = cluster(41, 2);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
        write(&two, 0, b"before").await;
        let (kept, also) = (one.keep_lock(), one.keep_lock());
        one.take_lock().await.expect("taken");
        let refused = || two.submit(Request::Write { offset: 0, data: bytes(b"other"), fua: false });
        let error = refused().await.expect_err("it is kept");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("keeps it"), "{error}");
        assert_eq!(kind(two.take_lock().await), Some(ErrorKind::Busy), "by itself, too");
        drop(also);
        assert_eq!(kind(refused().await), Some(ErrorKind::Busy), "somebody keeps it still");
        // It goes with its owner to a new watch.
        cluster.break_watches();
        until(|| cluster.watches() == 2).await;
        assert_eq!(kind(refused().await), Some(ErrorKind::Busy), "under another name");
        write(&one, 0, b"ours").await;
        assert_eq!(read(&two, 0, 6).await, b"oursre", "reading needs no lock");
        drop(kept);
        write(&two, 0, b"theirs").await;
        assert_eq!(read(&one, 0, 6).await, b"theirs");
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

#[test]
fn a_lock_whose_taker_has_outdated_knowledge_is_given_back() {
    run(async {
        let cluster = cluster(43, 2);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
        write(&one, 0, b"ours").await;
        let (outdated, asked) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
        let (said, counted) = (outdated.clone(), asked.clone());
        two.set_lock_check(Rc::new(move || {
            counted.set(counted.get() + 1);
            let result = if said.get() { Err(ErrorKind::Busy.into()) } else { Ok(()) };
            Box::pin(std::future::ready(result))
        }));
        let refused = two.submit(Request::Write { offset: 0, data: bytes(b"other"), fua: false }).await;
        assert_eq!((kind(refused), asked.get()), (Some(ErrorKind::Busy), 1));
        write(&one, 4, b"s again").await;
        assert_eq!(read(&two, 0, 11).await, b"ourss again", "nothing of the other has passed");
        outdated.set(false);
        write(&two, 0, b"theirs").await;
        write(&two, 6, b"!").await;
        assert_eq!(asked.get(), 2, "once each time that the lock is taken");
    });
}

#[test]
fn who_waits_for_a_lock_does_not_keep_an_image_from_being_closed() {
    run(async {
        let cluster = cluster(45, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        // Nobody answers for its owner, whose watch is there still.
        let dead = cluster.client();
        let image = open(&dead.pool(POOL), "vm").await;
        write(&image, 0, b"held").await;
        dead.die();
        let waiting = open(&b, "vm").await;
        waiting.take_lock_soon();
        yield_now().await;
        waiting.close().await;
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

#[test]
fn who_loses_a_lock_that_was_to_be_kept_writes_no_more() {
    run(async {
        let cluster = cluster(43, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        let kept = image.keep_lock();
        image.take_lock().await.expect("taken");
        // Somebody breaks it by hand, and does not fence us.
        let header = ObjectName::new(format!("rbd_header.{}", image.id()));
        let shared = b.shared().expect("shared");
        let owner = shared.watchers(&header).await.expect("watchers").remove(0);
        let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let cookie = text(&format!("auto {}", owner.cookie));
        let body = [text("rbd_lock"), vec![8], owner.client.to_le_bytes().to_vec(), cookie].concat();
        let input = [vec![1, 1], (body.len() as u32).to_le_bytes().to_vec(), body].concat();
        let method = forebay_block::Method::new("lock", "break_lock");
        b.submit(&header, Transaction::of(ObjectOp::Call { method, input })).await.expect("broken");
        cluster.break_watches();
        for _ in 0..1000 {
            let late = Request::Write { offset: 0, data: bytes(b"late"), fua: false };
            if kind(image.submit(late).await) == Some(ErrorKind::Fenced) {
                return drop(kept);
            }
            yield_now().await;
        }
        panic!("it wrote without the lock");
    });
}

#[test]
fn what_others_change_is_seen_at_once() {
    run(async {
        let cluster = cluster(5, 2);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
        let before = pattern(1, 4 * OBJECT as usize);
        write(&one, 0, &before).await;
        let watch = one.size_watch().expect("sizes change");
        let told = spawn(async move { watch.changed().await });
        yield_now().await;
        two.resize(6 * OBJECT, false, |_| {}).await.expect("resized");
        assert_eq!(one.size(), 6 * OBJECT, "when the resize is answered, others know");
        told.await;
        write(&one, 5 * OBJECT, b"new").await;
        // A snapshot, as another client makes it: with the lock, by the header, with a notification.
        two.resize(6 * OBJECT, false, |_| {}).await.expect("takes the lock");
        let snap = b.snap_allocate().await.expect("a number").0;
        let header = format!("rbd_header.{}", one.id());
        let value = snapshot(snap, "s", 6 * OBJECT, None);
        kv(
            &*b,
            &header,
            vec![("snap_seq".into(), snap.to_le_bytes().to_vec()), (format!("snapshot_{snap:016x}"), value)],
        )
        .await;
        let notify =
            b.shared().expect("shared").notify(&ObjectName::new(&header), vec![], std::time::Duration::from_secs(5));
        assert_eq!(notify.await.expect("notified").answers.len(), 2);
        write(&one, 100, b"after").await;
        one.submit(Request::Discard(Extent::new(OBJECT, OBJECT))).await.expect("a discard");
        let snapshots = Images::of(&a).snapshots("vm").await.expect("listed");
        assert_eq!(snapshots.iter().map(|snapshot| &snapshot.name[..]).collect::<Vec<_>>(), ["s"]);
        for backend in [&a, &b] {
            let then = open(backend, "vm@s").await;
            assert!(then.is_read_only() && then.size() == 6 * OBJECT);
            assert!(read(&then, 0, 4 * OBJECT).await == before);
            assert_eq!(kind(then.submit(Request::Discard(Extent::new(0, 1))).await), Some(ErrorKind::ReadOnly));
        }
        assert_eq!(read(&two, 98, 4).await, [&before[98..100], b"af"].concat());
        let missing = Image::open(a.clone(), "vm@t", OpenOptions::default()).await;
        assert_eq!(kind(missing), Some(ErrorKind::NotFound));
    });
}

/// Every object that there is, the map says may be there: so it must be at every moment, whatever is under way.
async fn first_lie_of_map(backend: &dyn ObjectBackend, id: &str) -> Option<String> {
    let map = map_of(backend, &format!("rbd_object_map.{id}")).await;
    names(backend).await.iter().find_map(|name| {
        let object = usize::from_str_radix(name.strip_prefix(&format!("rbd_data.{id}."))?, 16).expect("a number");
        (map.get(object).is_none_or(|state| *state == 0)).then(|| format!("object {object} is there: {map:?}"))
    })
}

/// Does `work`, and looks at the object map of an image after every turn of it.
async fn with_true_map<T>(cluster: &Cluster, id: &str, work: impl Future<Output = T>) -> T {
    let (bare, mut work) = (cluster.bare(POOL), pin!(work));
    loop {
        let turn = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
        assert_eq!(first_lie_of_map(&*bare, id).await, None);
        match turn {
            Poll::Ready(result) => return result,
            Poll::Pending => yield_now().await,
        }
    }
}

#[test]
fn a_lock_is_given_up_when_writes_in_flight_have_ended() {
    for waited_for in [true, false] {
        run(async {
            let cluster = cluster(51, 0);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
            let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
            write(&one, 0, b"before").await;
            let stall = cluster.stall(POOL, "rbd_data.");
            let late = one.submit(Request::Write { offset: 0, data: bytes(b"in flight"), fua: false });
            until(|| stall.waiting() == 1).await;
            // Dropped, it goes on.
            let late = Some(late).filter(|_| waited_for);
            let taken = Rc::new(Cell::new(false));
            let (told, taker) = (taken.clone(), two.clone());
            let taking = spawn(async move {
                taker.take_lock().await.expect("taken");
                told.set(true);
            });
            for _ in 0..1000 {
                yield_now().await;
                assert!(!taken.get(), "a write of its earlier owner is still in flight");
            }
            drop(stall);
            if let Some(late) = late {
                late.await.expect("it had the lock");
            }
            taking.await;
            assert_eq!(read(&two, 0, 9).await, b"in flight");
            // What its next owner removes does not come back.
            two.submit(Request::Discard(Extent::new(0, OBJECT))).await.expect("a discard");
            assert_eq!(read(&one, 0, 9).await, [0; 9]);
            check_map(&*cluster.bare(POOL), one.id()).await;
        });
    }
}

#[test]
fn an_object_is_on_the_map_as_long_as_it_is_there() {
    run(async {
        let cluster = cluster(52, 0);
        let a = cluster.client().pool(POOL);
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        let map = format!("rbd_object_map.{}", image.id());
        let stored = async || map_of(&*cluster.bare(POOL), &map).await;
        write(&image, 0, &pattern(1, 3 * OBJECT as usize)).await;
        assert_eq!(stored().await, [1, 1, 1, 0]);
        // A write, a discard and a shrinking, each while what it does to objects has not been done.
        let stall = cluster.stall(POOL, "rbd_data.");
        let writing = spawn(image.submit(Request::Write { offset: 3 * OBJECT, data: bytes(b"new"), fua: false }));
        until(|| stall.waiting() == 1).await;
        assert_eq!(stored().await, [1, 1, 1, 1], "marked before it is written");
        drop(stall);
        writing.await.expect("a write");
        let stall = cluster.stall(POOL, "rbd_data.");
        let clearing = spawn(image.submit(Request::Discard(Extent::new(OBJECT, OBJECT))));
        until(|| stall.waiting() == 1).await;
        assert_eq!(stored().await, [1, 2, 1, 1], "being removed");
        drop(stall);
        clearing.await.expect("a discard");
        assert_eq!(stored().await, [1, 0, 1, 1]);
        let stall = cluster.stall(POOL, "rbd_data.");
        let shrinking = image.clone();
        let shrinking = spawn(async move { shrinking.resize(OBJECT, true, |_| {}).await });
        until(|| stall.waiting() == 2).await;
        assert_eq!(stored().await, [1, 0, 2, 2], "being removed");
        drop(stall);
        shrinking.await.expect("shrunk");
        assert_eq!(stored().await, [1]);
        image.close().await;
        let stall = cluster.stall(POOL, "rbd_data.");
        let removing = a.clone();
        let removing = spawn(async move { forebay_image::remove(&removing, "vm", |_| {}).await });
        until(|| stall.waiting() == 1).await;
        assert_eq!(stored().await, [2], "being removed");
        drop(stall);
        removing.await.expect("removed");
    });
}

#[test]
fn who_dies_while_it_removes_an_object_leaves_a_map_that_is_true() {
    run(async {
        let cluster = cluster(53, 0);
        let (dying, alive) = (cluster.client(), cluster.client());
        let (a, b) = (dying.pool(POOL), alive.pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let one = open(&a, "vm").await;
        write(&one, 0, &pattern(1, 3 * OBJECT as usize)).await;
        let stall = cluster.stall(POOL, "rbd_data.");
        let cut = spawn(one.submit(Request::Discard(Extent::new(OBJECT, OBJECT))));
        until(|| stall.waiting() == 1).await;
        dying.die();
        cluster.expire_watches();
        let two = open(&b, "vm").await;
        two.take_lock().await.expect("taken from the dead");
        // It arrives after its client has been fenced, and is refused.
        drop(stall);
        until(|| cluster.in_flight() == 0).await;
        assert_eq!(first_lie_of_map(&*cluster.bare(POOL), two.id()).await, None);
        assert!(
            read(&two, OBJECT, OBJECT).await == pattern(1, 3 * OBJECT as usize)[OBJECT as usize..2 * OBJECT as usize]
        );
        two.submit(Request::Discard(Extent::new(OBJECT, OBJECT))).await.expect("a discard");
        assert_eq!(read(&two, OBJECT, OBJECT).await, vec![0; OBJECT as usize]);
        check_map(&*cluster.bare(POOL), two.id()).await;
        drop(cut);
    });
}

/// A clone that has a snapshot, in which shrinking copies up: its id, what it holds, and how much of it is its parent's.
async fn clone_with_snapshot(backend: &Rc<dyn ObjectBackend>) -> (String, Vec<u8>) {
    let content = pattern(4, 6 * OBJECT as usize);
    forebay_image::create(backend, "base", of_size(6 * OBJECT)).await.expect("created");
    let base = open(backend, "base").await;
    write(&base, 0, &content).await;
    base.close().await;
    let snap = take_snapshot(backend, "base", "gold", None).await;
    forebay_image::create(backend, "child", of_size(6 * OBJECT)).await.expect("created");
    make_clone(backend, "child", "base", snap, 6 * OBJECT).await;
    take_snapshot(backend, "child", "kept", Some(6 * OBJECT)).await;
    let id = forebay_image::info(backend, "child").await.expect("info").id;
    (id, content)
}

#[test]
fn shrinking_that_copies_up_keeps_the_map_true() {
    for seed in 0..8 {
        run(async {
            let cluster = cluster(54 + seed, seed % 4);
            cluster.delay_transactions();
            let a = cluster.client().pool(POOL);
            let (id, content) = clone_with_snapshot(&a).await;
            let child = open(&a, "child").await;
            let (middle, map) = (OBJECT + 5000, format!("rbd_object_map.{id}"));
            with_true_map(&cluster, &id, child.resize(middle, true, |_| {})).await.expect("shrunk");
            assert_eq!(map_of(&*cluster.bare(POOL), &map).await, [0, 1], "cut within an object, which is there now");
            check_map(&*cluster.bare(POOL), &id).await;
            // Nothing of what was cut off comes back, by its own objects or by the parent.
            with_true_map(&cluster, &id, child.resize(100, true, |_| {})).await.expect("shrunk");
            assert_eq!(map_of(&*cluster.bare(POOL), &map).await, [1]);
            child.resize(6 * OBJECT, false, |_| {}).await.expect("grown");
            let found = read(&child, 0, 6 * OBJECT).await;
            assert!(found[..100] == content[..100] && found[100..].iter().all(|byte| *byte == 0));
            check_map(&*cluster.bare(POOL), &id).await;
            let then = open(&a, "child@kept").await;
            assert!(read(&then, 0, 6 * OBJECT).await == content, "the snapshot is what it was");
        });
    }
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
        // The parent may be let go of: the object itself has been there at the snapshot.
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
        forebay_image::create(&a, "base", of_size(2 * OBJECT)).await.expect("created");
        let base = open(&a, "base").await;
        write(&base, 0, &content).await;
        base.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        forebay_image::create(&a, "child", of_size(2 * OBJECT)).await.expect("created");
        make_clone(&a, "child", "base", snap, 2 * OBJECT).await;
        let child = open(&a, "child").await;
        child.take_lock().await.expect("taken");
        // All but the header's new size is done.
        let stall = cluster.stall(POOL, "rbd_header.");
        let middle = OBJECT + 5000;
        let shrinking = child.clone();
        let shrinking = spawn(async move { shrinking.resize(middle, true, |_| {}).await });
        until(|| stall.waiting() == 1).await;
        let writing = spawn(child.submit(Request::Write { offset: OBJECT, data: bytes(b"new"), fua: false }));
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

#[test]
fn an_object_that_is_cut_differs_from_the_snapshot_before() {
    run(async {
        let cluster = cluster(61, 0);
        let a = cluster.client().pool(POOL);
        forebay_image::create(&a, "vm", of_size(3 * OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        write(&image, 0, &pattern(2, 3 * OBJECT as usize)).await;
        image.close().await;
        take_snapshot(&a, "vm", "s", None).await;
        let image = open(&a, "vm").await;
        let map = format!("rbd_object_map.{}", image.id());
        assert_eq!(map_of(&*cluster.bare(POOL), &map).await, [3, 3, 3], "clean since the snapshot");
        image.resize(OBJECT + 100, true, |_| {}).await.expect("shrunk");
        assert_eq!(map_of(&*cluster.bare(POOL), &map).await, [3, 1], "fast-diff must name it");
    });
}

#[test]
fn a_damaged_map_is_said_to_be_invalid_and_not_believed() {
    run(async {
        let cluster = cluster(6, 0);
        let a = cluster.client().pool(POOL);
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        write(&image, 0, b"there").await;
        let map = ObjectName::new(format!("rbd_object_map.{}", image.id()));
        image.close().await;
        let damage = ObjectOp::Write { offset: 18, data: bytes(&[0]) };
        a.submit(&map, Transaction::of(damage)).await.expect("damaged");
        let image = open(&a, "vm").await;
        assert_eq!(read(&image, 0, 5).await, b"there");
        write(&image, OBJECT, b"more").await;
        assert_eq!(read(&image, 0, 5).await, b"there", "the map, which says that it is not there, is not asked");
        assert_eq!(forebay_image::info(&a, "vm").await.expect("info").flags, 3);
    });
}

#[test]
fn namespaces_and_data_pools() {
    run(async {
        let cluster = cluster(7, 1);
        let data = cluster.add_pool("data");
        let a = cluster.client().pool(POOL);
        assert_eq!(kind(forebay_image::create(&a, "ns/vm", of_size(OBJECT)).await), Some(ErrorKind::NotFound));
        let directory = ObjectName::in_namespace("ns".into(), "rbd_directory");
        let ready = ObjectOp::KvSet { pairs: vec![(b"state".to_vec(), vec![0])] };
        a.submit(&directory, Transaction::of(ready)).await.expect("a namespace");
        forebay_image::create(&a, "ns/vm", of_size(4 * OBJECT)).await.expect("created");
        let elsewhere = CreateOptions { data_pool: Some("data".into()), ..of_size(4 * OBJECT) };
        forebay_image::create(&a, "vm", elsewhere).await.expect("created");
        let missing = CreateOptions { data_pool: Some("none".into()), ..of_size(4 * OBJECT) };
        assert_eq!(kind(forebay_image::create(&a, "vm2", missing).await), Some(ErrorKind::NotFound));
        assert_eq!(forebay_image::list(&a).await.expect("listed"), ["vm"]);
        assert_eq!(Images::in_namespace(&a, "ns").list().await.expect("listed"), ["vm"]);
        let (one, two) = (open(&a, "ns/vm").await, open(&a, "vm").await);
        write(&one, 0, b"one").await;
        write(&two, 0, b"two").await;
        assert_eq!((read(&one, 0, 3).await, read(&two, 0, 3).await), (b"one".to_vec(), b"two".to_vec()));
        let here = names(&*cluster.bare(POOL)).await;
        assert!(here.contains(&format!("ns/rbd_data.{}.0000000000000000", one.id())), "{here:?}");
        assert_eq!(names(&*cluster.bare(data)).await, [format!("rbd_data.{POOL}.{}.0000000000000000", two.id())]);
        let info = forebay_image::info(&a, "vm").await.expect("info");
        assert!(info.features.has(Features::DATA_POOL));
        assert_eq!(info.block_name_prefix, format!("rbd_data.{POOL}.{}", two.id()));
        one.close().await;
        two.close().await;
        forebay_image::remove(&a, "ns/vm", |_| {}).await.expect("removed");
        forebay_image::remove(&a, "vm", |_| {}).await.expect("removed");
        assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory", "ns/rbd_directory"]);
        assert_eq!(names(&*cluster.bare(data)).await, [""; 0]);
    });
}

#[test]
fn a_forced_removal_gives_up_the_lock() {
    run(async {
        let cluster = cluster(8, 1);
        let a = cluster.client().pool(POOL);
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        let image = open(&a, "vm").await;
        write(&image, 0, b"x").await;
        Images::of(&a).remove("vm", RemoveOptions { force: true }, |_| {}).await.expect("removed");
        assert_eq!(kind(image.submit(Request::Read(Extent::new(0, 1))).await), Some(ErrorKind::NotFound));
        assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory"]);
        assert_eq!(cluster.watches(), 0);
    });
}

/// Makes a snapshot of an image that nobody has open, as `rbd` does: object map included.
async fn take_snapshot(backend: &Rc<dyn ObjectBackend>, image: &str, name: &str, overlap: Option<u64>) -> u64 {
    let info = forebay_image::info(backend, image).await.expect("info");
    let snap = backend.snap_allocate().await.expect("a number").0;
    let value = snapshot(snap, name, info.size, overlap);
    let header = format!("rbd_header.{}", info.id);
    let seq = ("snap_seq".to_owned(), snap.to_le_bytes().to_vec());
    kv(&**backend, &header, vec![seq, (format!("snapshot_{snap:016x}"), value)]).await;
    if info.features.has(Features::OBJECT_MAP) {
        let map = ObjectName::new(format!("rbd_object_map.{}", info.id));
        let size = backend.stat(&map, SnapId::HEAD).await.expect("a map").size;
        let data = backend.read(&map, ObjectRead::head(0, size)).await.expect("a map").fill(Extent::new(0, size));
        let copy = ObjectName::new(format!("rbd_object_map.{}.{snap:016x}", info.id));
        backend.submit(&copy, Transaction::of(ObjectOp::WriteFull { data })).await.expect("copied");
        let objects = info.size.div_ceil(info.object_size);
        let mut input = [0u64, objects].map(u64::to_le_bytes).concat();
        // Whatever is there is clean from now on.
        input.extend([3, 1, 1]);
        let method = forebay_block::Method::new("rbd", "object_map_update");
        backend.submit(&map, Transaction::of(ObjectOp::Call { method, input })).await.expect("cleaned");
    }
    snap
}

/// Makes `child`, which is there and empty, a clone.
async fn make_clone(backend: &Rc<dyn ObjectBackend>, child: &str, of: &str, snap: u64, overlap: u64) {
    let of = forebay_image::info(backend, of).await.expect("info").id;
    let id = forebay_image::info(backend, child).await.expect("info").id;
    let value = parent(POOL, "", &of, snap, overlap);
    kv(&**backend, &format!("rbd_header.{id}"), vec![("parent".into(), value)]).await;
}

#[test]
fn clones_read_through_and_copy_up() {
    run(async {
        let cluster = cluster(10, 1);
        let a = cluster.client().pool(POOL);
        forebay_image::create(&a, "base", of_size(8 * OBJECT)).await.expect("created");
        let base = open(&a, "base").await;
        let content = pattern(3, 3 * OBJECT as usize + 1000);
        write(&base, OBJECT, &content).await;
        base.close().await;
        let snap = take_snapshot(&a, "base", "gold", None).await;
        let base = open(&a, "base").await;
        write(&base, OBJECT, &pattern(9, 4 * OBJECT as usize)).await;
        base.close().await;

        forebay_image::create(&a, "child", of_size(10 * OBJECT)).await.expect("created");
        // It sees only part of its parent: the overlap ends within an object.
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
        child.submit(Request::Discard(cut)).await.expect("a discard");
        expected[cut.offset as usize..cut.end() as usize].fill(0);
        let compare = |expect: &[u8]| Request::CompareAndWrite {
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

        // Shrunk, it sees less of its parent, for good.
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

/// Random requests to a clone that gets snapshots, against vectors: the head and every snapshot stay what they are.
fn clones_with_snapshots(seed: u64, features: Features) {
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
                        child.submit(Request::Discard(Extent::new(offset, len))).await.expect("a discard");
                        head[range].fill(0);
                    }
                    5 => {
                        let len = len.min(3000);
                        let range = offset as usize..(offset + len) as usize;
                        let data = pattern(0xcc, len as usize);
                        let expect = bytes(&head[range.clone()]);
                        let request = Request::CompareAndWrite { offset, expect, data: bytes(&data), fua: true };
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
                            .submit(Request::WriteZeroes {
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
            if features.has(Features::OBJECT_MAP) {
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
        clones_with_snapshots(seed, Features::RBD_DEFAULT);
    }
}

#[test]
fn clones_without_maps_keep_their_snapshots() {
    for seed in 101..=108 {
        clones_with_snapshots(seed, Features::LAYERING);
    }
}
