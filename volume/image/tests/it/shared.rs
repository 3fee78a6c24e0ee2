//! Changes of an image by one client while others have it open; namespaces and data pools.

use crate::common::cluster::{OBJECT, POOL, cluster, kind, kv, names, of_size, open, read, two_clients, write};
use crate::common::{pattern, run};
use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectName, ObjectOp, Transaction};
use forebay_image::{CreateOptions, Image, ImageFeatures, ImageOpenOptions, Images};
use forebay_ram::cluster::rbd::encode_snapshot;
use forebay_reactor::{spawn, yield_now};

#[test]
fn what_others_change_is_seen_at_once() {
    run(async {
        let cluster = cluster(5, 2);
        let ([a, b], [one, two]) = two_clients(&cluster, 4 * OBJECT).await;
        let before = pattern(1, 4 * OBJECT as usize);
        write(&one, 0, &before).await;
        let watch = one.size_watch().expect("sizes change");
        let told = spawn(async move { watch.changed().await });
        yield_now().await;
        two.resize(6 * OBJECT, false, |_| {}).await.expect("resized");
        assert_eq!(one.size(), 6 * OBJECT, "when the resize is answered, others know");
        told.await;
        write(&one, 5 * OBJECT, b"new").await;
        // Snapshot as another client takes it: with the lock, in the header, with a notification.
        two.resize(6 * OBJECT, false, |_| {}).await.expect("takes the lock");
        let snap = b.snap_allocate().await.expect("a number").0;
        let header = format!("rbd_header.{}", one.id());
        let value = encode_snapshot(snap, "s", 6 * OBJECT, None);
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
        one.submit(BlockRequest::Discard(Extent::new(OBJECT, OBJECT))).await.expect("a discard");
        let snapshots = Images::of(&a).snapshots("vm").await.expect("listed");
        assert_eq!(snapshots.iter().map(|snapshot| &snapshot.name[..]).collect::<Vec<_>>(), ["s"]);
        for backend in [&a, &b] {
            let then = open(backend, "vm@s").await;
            assert!(then.is_read_only() && then.size() == 6 * OBJECT);
            assert!(read(&then, 0, 4 * OBJECT).await == before);
            assert_eq!(kind(then.submit(BlockRequest::Discard(Extent::new(0, 1))).await), Some(ErrorKind::ReadOnly));
        }
        assert_eq!(read(&two, 98, 4).await, [&before[98..100], b"af"].concat());
        let missing = Image::open(a.clone(), "vm@t", ImageOpenOptions::default()).await;
        assert_eq!(kind(missing), Some(ErrorKind::NotFound));
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
        assert!(info.features.has(ImageFeatures::DATA_POOL));
        assert_eq!(info.block_name_prefix, format!("rbd_data.{POOL}.{}", two.id()));
        one.close().await;
        two.close().await;
        forebay_image::remove(&a, "ns/vm", |_| {}).await.expect("removed");
        forebay_image::remove(&a, "vm", |_| {}).await.expect("removed");
        assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory", "ns/rbd_directory"]);
        assert_eq!(names(&*cluster.bare(data)).await, [""; 0]);
    });
}

/// One client removes an image while others create one of that name: an image that was created can be used.
#[test]
fn a_name_given_anew_while_it_is_removed() {
    let (mut created, mut refused) = (0, 0);
    for seed in 0..400_u64 {
        run(async {
            let cluster = cluster(seed * 7 + 1, 1 + seed % 7);
            let backends: Vec<_> = (0..3).map(|_| cluster.client().pool(POOL)).collect();
            forebay_image::create(&backends[0], "vm", of_size(OBJECT)).await.expect("created");
            let remover = backends[0].clone();
            let removing = spawn(async move { forebay_image::remove(&remover, "vm", |_| {}).await });
            let creating = backends[1..].iter().cloned().map(|backend| {
                spawn(async move {
                    for _ in 0..seed % 50 {
                        yield_now().await;
                    }
                    forebay_image::create(&backend, "vm", of_size(2 * OBJECT)).await
                })
            });
            let creating: Vec<_> = creating.collect();
            let removed = removing.await;
            let mut made = 0;
            for creating in creating {
                match creating.await {
                    Ok(()) => made += 1,
                    Err(error) => assert!(matches!(error.kind(), ErrorKind::Exists | ErrorKind::Busy), "{error}"),
                }
            }
            removed.expect("removed");
            assert!(made <= 1, "seed {seed}: two have the name");
            let info = forebay_image::info(&backends[0], "vm").await;
            assert_eq!(info.map(|info| info.size).ok(), (made == 1).then_some(2 * OBJECT), "seed {seed}");
            created += made;
            refused += 1 - made;
            // The name can be used again, and nothing is left of the others.
            if made == 1 {
                forebay_image::remove(&backends[1], "vm", |_| {}).await.expect("removed");
            }
            forebay_image::create(&backends[2], "vm", of_size(OBJECT)).await.expect("created");
            forebay_image::remove(&backends[2], "vm", |_| {}).await.expect("removed");
            assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory"], "seed {seed}");
        });
    }
    assert!(created > 0 && refused > 0, "both happen: {created}, {refused}");
}
