//! Namespaces: created, listed and removed, on any backend, by two clients, under power failures.

use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};
use forebay_image::{Images, RemoveOptions};
use forebay_ram::RamBackend;
use forebay_reactor::{spawn, yield_now};

use crate::common::cluster::{OBJECT, POOL, cluster, kind, names, of_size, open, read, write};
use crate::common::run;
use crate::crash::at_every_point;

#[test]
fn a_namespace_has_images_groups_and_a_trash_of_its_own() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let images = Images::of(&backend);
        assert_eq!(images.namespaces().await.expect("namespaces"), [""; 0]);
        assert_eq!(kind(images.create("ns/vm", of_size(OBJECT)).await), Some(ErrorKind::NotFound));
        for name in ["ns", "other"] {
            images.create_namespace(name).await.expect("created");
        }
        assert_eq!(kind(images.create_namespace("ns").await), Some(ErrorKind::Exists));
        let long = "x".repeat(96);
        for name in ["", "a/b", "a@b", "\u{7}", &long] {
            assert_eq!(kind(images.create_namespace(name).await), Some(ErrorKind::Invalid), "{name:?}");
        }
        assert_eq!(images.namespaces().await.expect("namespaces"), ["ns", "other"]);
        let there = Images::in_namespace(&backend, "ns");
        for name in ["ns/vm", "other/vm", "vm"] {
            images.create(name, of_size(4 * OBJECT)).await.expect("created");
            write(&*open(&backend, name).await, 0, name.as_bytes()).await;
        }
        for name in ["ns/vm", "other/vm", "vm"] {
            assert_eq!(read(&*open(&backend, name).await, 0, name.len() as u64).await, name.as_bytes());
        }
        assert_eq!(
            (images.list().await.expect("listed"), there.list().await.expect("listed")),
            (vec!["vm".into()], vec!["vm".into()])
        );
        assert_eq!(kind(images.remove_namespace("ns").await), Some(ErrorKind::Busy), "it has an image");
        let trashed = images.move_to_trash("ns/vm", Default::default()).await.expect("moved");
        assert_eq!((images.trashed().await.expect("trash").len(), there.trashed().await.expect("trash").len()), (0, 1));
        assert_eq!(kind(images.remove_namespace("ns").await), Some(ErrorKind::Busy), "its trash has an image");
        assert_eq!(there.restore(&trashed.id, None).await.expect("restored"), "vm");
        images.remove("ns/vm", RemoveOptions::default(), |_| {}).await.expect("removed");
        there.create_group("g").await.expect("created");
        assert_eq!(images.groups().await.expect("groups"), [""; 0]);
        assert_eq!(kind(images.remove_namespace("ns").await), Some(ErrorKind::Busy), "it has a group");
        there.remove_group("g").await.expect("removed");
        images.remove_namespace("ns").await.expect("removed");
        assert_eq!(kind(images.remove_namespace("ns").await), Some(ErrorKind::NotFound));
        assert_eq!(kind(images.create("ns/vm", of_size(OBJECT)).await), Some(ErrorKind::NotFound));
        assert_eq!(images.namespaces().await.expect("namespaces"), ["other"]);
        let left = names(&*backend).await;
        assert!(!left.iter().any(|name| name.starts_with("ns/")), "{left:?}");
        assert_eq!(read(&*open(&backend, "vm").await, 0, 2).await, b"vm");
    });
}

#[test]
fn a_namespace_with_what_cannot_be_read_is_not_empty() {
    run(async {
        let cluster = cluster(9, 1);
        let a = cluster.client().pool(POOL);
        let images = Images::of(&a);
        images.create_namespace("ns").await.expect("created");
        for (object, key) in
            [("rbd_directory", &b"name_\xff"[..]), ("rbd_trash", b"id_x"), ("rbd_group_directory", b"?")]
        {
            let object = ObjectName::in_namespace("ns".into(), object);
            let set = ObjectOp::KvSet { pairs: vec![(key.to_vec(), b"?".to_vec())] };
            a.submit(&object, Transaction::of(set)).await.expect("set");
            assert_eq!(kind(images.remove_namespace("ns").await), Some(ErrorKind::Busy), "{key:?}");
            let removed = ObjectOp::KvRemove { keys: vec![key.to_vec()] };
            a.submit(&object, Transaction::of(removed)).await.expect("removed");
        }
        images.create("ns/vm", of_size(OBJECT)).await.expect("it admits images still");
    });
}

#[test]
fn one_client_creates_an_image_while_another_removes_the_namespace() {
    run(async {
        let mut ends = BTreeSet::new();
        for seed in 0..40 {
            let cluster = cluster(seed, 2);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            let (one, two) = (Images::of(&a), Images::of(&b));
            one.create_namespace("ns").await.expect("created");
            let (created, removed) = {
                let two = two.clone();
                let creating = spawn(async move {
                    // At another step of the removal each time.
                    for _ in 0..seed {
                        yield_now().await;
                    }
                    two.create("ns/vm", of_size(OBJECT)).await
                });
                let removed = one.remove_namespace("ns").await;
                (creating.await, removed)
            };
            ends.insert((created.is_ok(), removed.is_ok()));
            assert!(created.is_err() || removed.is_err(), "seed {seed}: an image is lost with its namespace");
            let (listed, there) = (one.namespaces().await.expect("namespaces"), Images::in_namespace(&a, "ns"));
            assert_eq!(listed.is_empty(), removed.is_ok(), "seed {seed}");
            assert_eq!(there.list().await.expect("listed").len(), usize::from(created.is_ok()), "seed {seed}");
        }
        assert!(ends.contains(&(true, false)) && ends.contains(&(false, true)), "each wins at times: {ends:?}");
    });
}

#[test]
fn power_failures_while_a_namespace_is_created() {
    run(async {
        at_every_point(
            async |_| (),
            async |backend| Images::of(backend).create_namespace("ns").await,
            async |backend, done, at| {
                let images = Images::of(backend);
                let created = images.create("ns/vm", of_size(OBJECT)).await;
                assert!(!done || created.is_ok(), "{at}: created, but lost");
                match images.create_namespace("ns").await {
                    Err(error) if error.kind() == ErrorKind::Exists && created.is_ok() => {}
                    again => again.unwrap_or_else(|error| panic!("{at}: {error}")),
                }
                assert_eq!(images.namespaces().await.expect("namespaces"), ["ns"], "{at}");
            },
        )
        .await;
    });
}

#[test]
fn power_failures_while_a_namespace_is_removed() {
    run(async {
        at_every_point(
            async |backend| Images::of(backend).create_namespace("ns").await.expect("created"),
            async |backend| Images::of(backend).remove_namespace("ns").await,
            async |backend, done, at| {
                let images = Images::of(backend);
                let there = images.namespaces().await.expect("namespaces") == ["ns"];
                assert!(!(done && there), "{at}: removed, but listed");
                // What was interrupted can be repeated, or the namespace created again.
                match images.remove_namespace("ns").await {
                    Err(error) if error.kind() == ErrorKind::NotFound && !there => {}
                    again => again.unwrap_or_else(|error| panic!("{at}: {error}")),
                }
                images.create_namespace("ns").await.unwrap_or_else(|error| panic!("{at}: {error}"));
                images.create("ns/vm", of_size(OBJECT)).await.unwrap_or_else(|error| panic!("{at}: {error}"));
            },
        )
        .await;
    });
}

/// Creates the namespace again, and an image in its trash and a group.
async fn create_and_use(images: &Rc<Images>, there: &Rc<Images>) -> Result<()> {
    images.create_namespace("ns").await?;
    images.create("ns/vm", of_size(OBJECT)).await?;
    images.move_to_trash("ns/vm", Default::default()).await?;
    there.create_group("g").await
}

#[test]
fn one_client_creates_a_namespace_again_while_others_remove_it() {
    run(async {
        let mut ends = BTreeSet::new();
        for seed in 0..400 {
            let cluster = cluster(seed, 1);
            let [a, b, c] = [(); 3].map(|()| cluster.client().pool(POOL));
            let [one, two, three] = [&a, &b, &c].map(Images::of);
            one.create_namespace("ns").await.expect("created");
            let (removing, creating) = {
                let (three, there) = (three.clone(), Images::in_namespace(&c, "ns"));
                let two = two.clone();
                let removing = spawn(async move {
                    for _ in 0..seed % 20 {
                        yield_now().await;
                    }
                    two.remove_namespace("ns").await
                });
                let creating = spawn(async move {
                    for _ in 0..seed {
                        yield_now().await;
                    }
                    create_and_use(&three, &there).await
                });
                (removing, creating)
            };
            let first = one.remove_namespace("ns").await;
            let (second, used) = (removing.await, creating.await);
            ends.insert((first.is_ok() || second.is_ok(), used.is_ok()));
            let there = Images::in_namespace(&a, "ns");
            if used.is_ok() {
                assert_eq!(one.namespaces().await.expect("namespaces"), ["ns"], "seed {seed}: it is in use");
                assert!(there.admits_images().await.expect("a state"), "seed {seed}");
                assert_eq!(there.trashed().await.expect("trash").len(), 1, "seed {seed}: an image is lost");
                assert_eq!(there.groups().await.expect("groups"), ["g"], "seed {seed}: a group is lost");
            }
        }
        assert!(ends.contains(&(true, true)) && ends.contains(&(true, false)), "{ends:?}");
    });
}
