//! Object map invariant: an existing object is on the map, at every moment.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::common::cluster::{
    OBJECT, POOL, check_map, clone_with_snapshot, cluster, create_and_open, map_of, names, of_size, open, read,
    take_snapshot, until, write,
};
use crate::common::{bytes, pattern, run};
use forebay_block::{BlockDevice, BlockRequest, Extent, ObjectBackend, ObjectName, ObjectOp, Transaction};
use forebay_image::{CreateOptions, ImageFeatures};
use forebay_ram::cluster::RamCluster;
use forebay_reactor::{spawn, yield_now};

/// Returns the first existing object that the map marks as nonexistent: there must be none at any moment, whatever is
/// in flight.
async fn first_lie_of_map(backend: &dyn ObjectBackend, id: &str) -> Option<String> {
    let map = map_of(backend, &format!("rbd_object_map.{id}")).await;
    names(backend).await.iter().find_map(|name| {
        let object = usize::from_str_radix(name.strip_prefix(&format!("rbd_data.{id}."))?, 16).expect("a number");
        (map.get(object).is_none_or(|state| *state == 0)).then(|| format!("object {object} is there: {map:?}"))
    })
}

/// Runs `work`, and checks the object map of an image after every turn of it.
async fn with_true_map<T>(cluster: &RamCluster, id: &str, work: impl Future<Output = T>) -> T {
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
fn images_get_rbds_features_and_leave_nothing() {
    run(async {
        let cluster = cluster(1, 3);
        let backend = cluster.client().pool(POOL);
        forebay_image::create(&backend, "vm", of_size(10 * OBJECT)).await.expect("created");
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        assert_eq!(info.features, ImageFeatures::RBD_DEFAULT);
        let map = format!("rbd_object_map.{}", info.id);
        assert_eq!(map_of(&*backend, &map).await, [0; 10]);
        let image = open(&backend, "vm").await;
        write(&image, 0, &pattern(1, 100)).await;
        write(&image, 3 * OBJECT - 10, &pattern(2, 20)).await;
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 1, 1, 0, 0, 0, 0, 0, 0]);
        image.submit(BlockRequest::Discard(Extent::new(2 * OBJECT, OBJECT))).await.expect("discarded");
        image.submit(BlockRequest::Discard(Extent::new(5 * OBJECT, OBJECT + 5))).await.expect("discarded");
        image.submit(BlockRequest::Discard(Extent::new(100, 5))).await.expect("discarded");
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        check_map(&*backend, &info.id).await;
        image.resize(7 * OBJECT + 1, true, |_| {}).await.expect("shrunk");
        image.resize(2 * OBJECT, true, |_| {}).await.expect("shrunk");
        image.resize(9 * OBJECT, false, |_| {}).await.expect("grown");
        assert_eq!(map_of(&*backend, &map).await, [1, 0, 0, 0, 0, 0, 0, 0, 0]);
        image.close().await;
        assert_eq!(cluster.watches(), 0);
        // Very large images have no map.
        let large = CreateOptions { size: 1 << 50, ..CreateOptions::default() };
        forebay_image::create(&backend, "large", large).await.expect("created");
        let features = forebay_image::info(&backend, "large").await.expect("info").features;
        assert_eq!(features.to_string(), "layering, exclusive-lock, deep-flatten");
        forebay_image::remove(&backend, "vm", |_| {}).await.expect("removed");
        assert!(!names(&*backend).await.iter().any(|name| name.contains(&info.id)));
    });
}

#[test]
fn an_object_is_on_the_map_as_long_as_it_is_there() {
    run(async {
        let cluster = cluster(52, 0);
        let a = cluster.client().pool(POOL);
        let image = create_and_open(&a, "vm", 4 * OBJECT).await;
        let map = format!("rbd_object_map.{}", image.id());
        let stored = async || map_of(&*cluster.bare(POOL), &map).await;
        write(&image, 0, &pattern(1, 3 * OBJECT as usize)).await;
        assert_eq!(stored().await, [1, 1, 1, 0]);
        // A write, a discard and a shrink, each while its object operations are outstanding.
        let stall = cluster.stall(POOL, "rbd_data.");
        let writing = spawn(image.submit(BlockRequest::Write { offset: 3 * OBJECT, data: bytes(b"new"), fua: false }));
        until(|| stall.waiting() == 1).await;
        assert_eq!(stored().await, [1, 1, 1, 1], "marked before it is written");
        drop(stall);
        writing.await.expect("a write");
        let stall = cluster.stall(POOL, "rbd_data.");
        let clearing = spawn(image.submit(BlockRequest::Discard(Extent::new(OBJECT, OBJECT))));
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
        let one = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&one, 0, &pattern(1, 3 * OBJECT as usize)).await;
        let stall = cluster.stall(POOL, "rbd_data.");
        let cut = spawn(one.submit(BlockRequest::Discard(Extent::new(OBJECT, OBJECT))));
        until(|| stall.waiting() == 1).await;
        dying.die();
        cluster.expire_watches();
        let two = open(&b, "vm").await;
        two.take_lock().await.expect("taken from the dead");
        // The write arrives after its client was fenced, and is refused.
        drop(stall);
        until(|| cluster.in_flight() == 0).await;
        assert_eq!(first_lie_of_map(&*cluster.bare(POOL), two.id()).await, None);
        assert!(
            read(&two, OBJECT, OBJECT).await == pattern(1, 3 * OBJECT as usize)[OBJECT as usize..2 * OBJECT as usize]
        );
        two.submit(BlockRequest::Discard(Extent::new(OBJECT, OBJECT))).await.expect("a discard");
        assert_eq!(read(&two, OBJECT, OBJECT).await, vec![0; OBJECT as usize]);
        check_map(&*cluster.bare(POOL), two.id()).await;
        drop(cut);
    });
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
            // Data that was cut off does not reappear, from its own objects or from the parent.
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
fn an_object_that_is_cut_differs_from_the_snapshot_before() {
    run(async {
        let cluster = cluster(61, 0);
        let a = cluster.client().pool(POOL);
        let image = create_and_open(&a, "vm", 3 * OBJECT).await;
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
        let image = create_and_open(&a, "vm", 4 * OBJECT).await;
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
