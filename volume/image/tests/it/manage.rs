//! Metadata and advisory locks of images, open or not.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, ObjectBackend, ObjectName};
use forebay_image::{ImageLock, Images, METADATA_VALUE_MAX, NotificationReceiver};
use forebay_ram::RamBackend;

use crate::common::cluster::{POOL, cluster, create_and_open, kind, of_size, open, read, two_clients, until, write};
use crate::common::{bytes, pattern, run};

#[test]
fn metadata_of_an_image_open_or_not() {
    run(async {
        let cluster = cluster(3, 2);
        let unshared: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        for backend in [cluster.client().pool(POOL), unshared] {
            let images = Images::of(&backend);
            forebay_image::create(&backend, "vm", of_size(1 << 20)).await.expect("created");
            assert_eq!(images.metadata("vm").await.expect("listed"), []);
            // More than a page of them.
            for number in 0..150 {
                images.set_metadata("vm", &format!("k{number:03}"), vec![number]).await.expect("set");
            }
            let image = open(&backend, "vm").await;
            images.set_metadata("vm", "k007", b"other".to_vec()).await.expect("set while it is open");
            assert_eq!(image.metadata("k007").await.expect("read").as_deref(), Some(&b"other"[..]));
            let listed = images.metadata("vm").await.expect("listed");
            let keys = listed.iter().map(|(key, _)| key.clone());
            assert!(keys.eq((0..150).map(|number| format!("k{number:03}"))), "all, in order: {listed:?}");
            assert_eq!((&listed[7].1[..], &listed[8].1[..]), (&b"other"[..], &[8][..]));
            assert_eq!(images.metadata_value("vm", "k008").await.expect("read"), Some(vec![8]));
            assert_eq!(images.metadata_value("vm", "nope").await.expect("read"), None);
            assert!(images.remove_metadata("vm", "k008").await.expect("removed"));
            assert!(!images.remove_metadata("vm", "k008").await.expect("gone already"));
            assert_eq!(images.metadata("vm").await.expect("listed").len(), 149);
            assert_eq!(kind(images.set_metadata("vm", "", vec![1]).await), Some(ErrorKind::Invalid));
            let long = vec![0; METADATA_VALUE_MAX + 1];
            assert_eq!(kind(images.set_metadata("vm", "k", long).await), Some(ErrorKind::Invalid));
            for missing in [
                kind(images.metadata("no").await),
                kind(images.metadata_value("no", "k").await),
                kind(images.set_metadata("no", "k", vec![]).await),
                kind(images.remove_metadata("no", "k").await),
            ] {
                assert_eq!(missing, Some(ErrorKind::NotFound));
            }
        }
    });
}

/// Both clients set and remove the same keys: no change of another key is lost, and each removal is told once.
#[test]
fn metadata_of_two_clients() {
    for seed in 1..20u64 {
        run(async {
            let cluster = cluster(seed, 3);
            let (backends, images) = two_clients(&cluster, 1 << 20).await;
            let tasks = [0, 1].map(|client: usize| {
                let backend = backends[client].clone();
                forebay_reactor::spawn(async move {
                    let mut removed = 0;
                    for round in 0..10u8 {
                        let own = format!("own{client}-{round}");
                        Images::of(&backend).set_metadata("vm", &own, vec![round]).await.expect("set");
                        Images::of(&backend).set_metadata("vm", "both", vec![round]).await.expect("set");
                        removed +=
                            u32::from(Images::of(&backend).remove_metadata("vm", "both").await.expect("removed"));
                    }
                    removed
                })
            });
            let mut removed = 0;
            for task in tasks {
                removed += task.await;
            }
            assert!((10..=20).contains(&removed), "seed {seed}: {removed}");
            let listed = Images::of(&backends[0]).metadata("vm").await.expect("listed");
            assert_eq!(listed.len(), 20, "seed {seed}: {listed:?}");
            drop(images);
        });
    }
}

#[test]
fn locks_are_listed_taken_and_broken() {
    run(async {
        let cluster = cluster(7, 2);
        let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
        let [first, second] = [Images::of(&backends[0]), Images::of(&backends[1])];
        forebay_image::create(&backends[0], "vm", of_size(1 << 20)).await.expect("created");
        assert_eq!(first.locks("vm").await.expect("listed").locks, []);

        // An exclusive one, which no other client takes, and which keeps hosts out.
        first.add_lock("vm", "mine", None).await.expect("locked");
        let me = backends[0].shared().expect("shared").identity();
        let lock =
            ImageLock { id: "mine".into(), locker: format!("client.{}", me.number), address: me.address.clone() };
        let listed = second.locks("vm").await.expect("listed");
        assert_eq!((listed.exclusive, &listed.locks), (true, &vec![lock.clone()]));
        for (images, id, tag) in [(&first, "mine", None), (&second, "mine", None), (&second, "other", Some("tag"))] {
            assert_eq!(kind(images.add_lock("vm", id, tag).await), Some(ErrorKind::Busy), "{id} {tag:?}");
        }
        let image = open(&backends[1], "vm").await;
        let refused = image.take_lock().await.expect_err("locked by hand");
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        for (id, locker) in [("other", &lock.locker[..]), ("mine", "client.1"), ("mine", "osd.1"), ("mine", "")] {
            assert_eq!(kind(second.break_lock("vm", id, locker).await), Some(ErrorKind::NotFound), "{id} {locker}");
        }
        first.break_lock("vm", "mine", &lock.locker).await.expect("unlocked");
        assert!(backends[0].kv_get(&ObjectName::new("rbd_directory"), vec![]).await.is_ok(), "not fenced");
        assert_eq!(first.locks("vm").await.expect("listed").locks, []);
        image.take_lock().await.expect("free now");
        image.close().await;

        // Shared ones of one tag.
        first.add_lock("vm", "a", Some("t")).await.expect("locked");
        second.add_lock("vm", "b", Some("t")).await.expect("shared");
        assert_eq!(kind(second.add_lock("vm", "c", Some("u")).await), Some(ErrorKind::Busy));
        let listed = first.locks("vm").await.expect("listed");
        assert_eq!((listed.exclusive, &listed.tag[..], listed.locks.len()), (false, "t", 2));
        assert_eq!(kind(first.add_lock("vm", "", None).await), Some(ErrorKind::Invalid));

        // Its holder is fenced when another client breaks it.
        second.break_lock("vm", "a", &lock.locker).await.expect("broken");
        assert_eq!(kind(first.add_lock("vm", "a", Some("t")).await), Some(ErrorKind::Fenced));
        assert_eq!(second.locks("vm").await.expect("listed").locks.len(), 1);
    });
}

#[test]
fn the_automatic_lock_of_a_living_owner_is_broken_by_force() {
    run(async {
        let cluster = cluster(9, 2);
        let (backends, [owner, other]) = two_clients(&cluster, 1 << 20).await;
        let data = pattern(1, 4096);
        write(&owner, 0, &data).await;
        let images = Images::of(&backends[1]);
        let locks = images.locks("vm").await.expect("listed");
        assert_eq!((locks.exclusive, &locks.tag[..], locks.locks.len()), (true, "internal", 1));
        let lock = &locks.locks[0];
        assert!(lock.id.starts_with("auto "), "{lock:?}");
        let own = Images::of(&backends[0]).break_lock("vm", &lock.id, &lock.locker).await;
        assert_eq!(kind(own), Some(ErrorKind::Busy), "it holds the lock itself");
        write(&owner, 0, &data).await;
        images.break_lock("vm", &lock.id, &lock.locker).await.expect("broken");
        assert_eq!(images.locks("vm").await.expect("listed").locks, []);
        let late = BlockRequest::Write { offset: 8192, data: bytes(&data), fua: false };
        assert_eq!(kind(owner.submit(late).await), Some(ErrorKind::Fenced), "the former owner is fenced");
        write(&other, 4096, &data).await;
        assert!(read(&other, 0, 4096).await == data);
    });
}

#[test]
fn notifications_are_seen_by_whoever_watches() {
    run(async {
        let cluster = cluster(11, 2);
        let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
        let image = create_and_open(&backends[0], "vm", 1 << 20).await;
        let seen: Rc<RefCell<Vec<(String, u64)>>> = Rc::default();
        let receiver: NotificationReceiver = Rc::new({
            let seen = seen.clone();
            move |told| {
                let told = told.expect("the watch does not break");
                seen.borrow_mut().push((told.kind, told.sender));
            }
        });
        let watch = Images::of(&backends[1]).watch_notifications("vm", receiver.clone()).await.expect("watched");
        let sender = backends[0].shared().expect("shared").identity().number;
        write(&image, 0, b"a").await;
        image.create_snapshot("s").await.expect("a snapshot");
        Images::of(&backends[0]).set_metadata("vm", "k", b"v".to_vec()).await.expect("set");
        until(|| seen.borrow().len() >= 3).await;
        let kinds: Vec<String> = seen.borrow().iter().map(|(kind, _)| kind.clone()).collect();
        assert_eq!(kinds, ["acquired_lock", "header_update", "header_update"]);
        assert!(seen.borrow().iter().all(|(_, from)| *from == sender), "{seen:?}");
        watch.end().await.expect("ended");
        image.create_snapshot("t").await.expect("a snapshot");
        assert_eq!(seen.borrow().len(), 3, "nothing is seen after the end");
        let missing = Images::of(&backends[1]).watch_notifications("no", receiver.clone()).await.map(drop);
        assert_eq!(kind(missing), Some(ErrorKind::NotFound));
        let unshared: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        forebay_image::create(&unshared, "vm", of_size(1 << 20)).await.expect("created");
        let refused = Images::of(&unshared).watch_notifications("vm", receiver).await.map(drop);
        assert_eq!(kind(refused), Some(ErrorKind::Unsupported));
    });
}

#[test]
fn pools_of_one_client_have_no_locks() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        forebay_image::create(&backend, "vm", of_size(1 << 20)).await.expect("created");
        let images = Images::of(&backend);
        for (name, want) in [("vm", ErrorKind::Unsupported), ("no", ErrorKind::NotFound)] {
            assert_eq!(kind(images.locks(name).await), Some(want));
            assert_eq!(kind(images.add_lock(name, "a", None).await), Some(want));
            assert_eq!(kind(images.break_lock(name, "a", "client.1").await), Some(want));
        }
        let cluster = cluster(1, 1);
        let backend = cluster.client().pool(POOL);
        create_and_open(&backend, "vm", 1 << 20).await.close().await;
        assert_eq!(kind(Images::of(&backend).locks("no").await), Some(ErrorKind::NotFound));
    });
}
