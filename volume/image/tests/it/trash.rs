//! The trash: moving, restoring and removing images, alone, interrupted, and by two clients at once.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ErrorKind, ObjectBackend, ObjectName, Result};
use forebay_image::{Images, RemoveOptions, TrashSource};

use crate::common::cluster::{
    POOL, cluster, create_and_open, kind, kv, make_clone, names, of_size, open as open_shared, read, take_snapshot,
    write,
};
use crate::common::{objects, pattern, run};
use forebay_reactor::{spawn, yield_now};

use crate::crash::{SIZE, at_every_point, fill, open, read_all};
use forebay_ram::RamBackend;

const NOW: Duration = Duration::ZERO;
const NEVER: Duration = Duration::from_secs(4_000_000_000);
const FORCED: RemoveOptions = RemoveOptions { force: true };

async fn mv(backend: &Rc<dyn ObjectBackend>, name: &str) -> Result<String> {
    Images::of(backend).move_to_trash(name, NOW).await.map(|moved| moved.id)
}

async fn restore(backend: &Rc<dyn ObjectBackend>, id: &str) -> Result<String> {
    Images::of(backend).restore(id, None).await
}

async fn remove(backend: &Rc<dyn ObjectBackend>, id: &str) -> Result<()> {
    Images::of(backend).remove_trashed(id, RemoveOptions::default(), |_| {}).await
}

async fn trashed(backend: &Rc<dyn ObjectBackend>) -> Vec<(String, String)> {
    let all = Images::of(backend).trashed().await.expect("a listing");
    all.into_iter().map(|image| (image.id, image.name)).collect()
}

async fn check_content(backend: &Rc<dyn ObjectBackend>, name: &str, at: &str) {
    assert!(read_all(&*open(backend, name).await).await == pattern(6, SIZE as usize), "{at}: {name} is damaged");
}

/// Asserts that nothing is left but empty lists.
async fn check_empty(backend: &Rc<dyn ObjectBackend>, at: &str) {
    let mut left = objects(backend).await;
    left.retain(|name| name != "rbd_directory" && name != "rbd_trash");
    assert!(left.is_empty(), "{at}: {left:?}");
    for list in ["rbd_directory", "rbd_trash"] {
        let keys = backend.kv_list(&ObjectName::new(list), b"", b"", 9).await.map(|page| page.pairs.len());
        assert!(matches!(keys, Ok(0)) || kind(keys) == Some(ErrorKind::NotFound), "{at}: {list} has entries");
    }
}

#[test]
fn moving_restoring_and_removing() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let images = Images::of(&backend);
        fill(&backend, "vm", 6).await;
        let image = open(&backend, "vm").await;
        assert_eq!(kind(mv(&backend, "vm").await), Some(ErrorKind::Busy), "it is open");
        let id = image.id().to_owned();
        drop(image);
        let moved = images.move_to_trash("vm", NEVER).await.expect("moved");
        assert_eq!((&moved.id, &moved.name[..], moved.source), (&id, "vm", TrashSource::User));
        assert_eq!(images.trashed().await.expect("listed"), [moved]);
        assert!(images.list().await.expect("listed").is_empty());
        assert!(!objects(&backend).await.contains(&"rbd_id.vm".into()));
        assert_eq!(kind(mv(&backend, "vm").await), Some(ErrorKind::NotFound));
        assert_eq!(kind(remove(&backend, &id).await), Some(ErrorKind::Denied), "its time has not come");
        for missing in ["0123", "no id", "", "x/y"] {
            assert_eq!(kind(restore(&backend, missing).await), Some(ErrorKind::NotFound), "{missing:?}");
            assert_eq!(kind(remove(&backend, missing).await), Some(ErrorKind::NotFound), "{missing:?}");
        }

        // Another image may get the name; then the first needs another.
        fill(&backend, "vm", 7).await;
        assert_eq!(kind(restore(&backend, &id).await), Some(ErrorKind::Exists));
        assert_eq!(kind(images.restore(&id, Some("a/b")).await), Some(ErrorKind::Invalid));
        assert_eq!(images.restore(&id, Some("older")).await.expect("restored"), "older");
        assert!(trashed(&backend).await.is_empty());
        check_content(&backend, "older", "restored").await;

        // Both go, one by force before its time.
        let id = images.move_to_trash("older", NEVER).await.expect("moved").id;
        images.remove_trashed(&id, FORCED, |_| {}).await.expect("removed");
        let image = open(&backend, "vm").await;
        image.create_snapshot("s").await.expect("a snapshot");
        drop(image);
        let id = mv(&backend, "vm").await.expect("moved");
        assert_eq!(kind(remove(&backend, &id).await), Some(ErrorKind::Busy), "it has a snapshot");
        assert_eq!(restore(&backend, &id).await.expect("restored"), "vm", "a refusal changes nothing");
        open(&backend, "vm").await.remove_snapshot("s").await.expect("removed");
        let id = mv(&backend, "vm").await.expect("moved");
        remove(&backend, &id).await.expect("removed");
        check_empty(&backend, "in the end").await;
    });
}

#[test]
fn an_interrupted_move_can_be_completed() {
    for by_name in [false, true] {
        run(async {
            at_every_point(
                async |backend| fill(backend, "vm", 6).await,
                async |backend| mv(backend, "vm").await.map(drop),
                async |backend, done, at| {
                    let listed = forebay_image::list(backend).await.expect("listed");
                    let mut in_trash = trashed(backend).await;
                    assert!(!done || (listed.is_empty() && in_trash.len() == 1), "{at}: moved, and not");
                    assert!(!listed.is_empty() || in_trash.len() == 1, "{at}: nothing leads to the image");
                    // Where only the last step is missing, the image can be restored or removed at once.
                    if by_name && !done || !listed.is_empty() {
                        if let Some((id, _)) = in_trash.first().filter(|_| !listed.is_empty()) {
                            assert_eq!(kind(remove(backend, id).await), Some(ErrorKind::Busy), "{at}: half moved");
                            assert_eq!(kind(restore(backend, id).await), Some(ErrorKind::Busy), "{at}: half moved");
                        }
                        let again = mv(backend, "vm").await;
                        assert!(again.is_ok() || listed.is_empty(), "{at}: {again:?}");
                        in_trash = trashed(backend).await;
                    }
                    let (id, name) = in_trash.first().expect("in the trash");
                    assert_eq!(name, "vm");
                    assert!(forebay_image::list(backend).await.expect("listed").is_empty(), "{at}");
                    restore(backend, id).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                    check_content(backend, "vm", at).await;
                    let id = mv(backend, "vm").await.unwrap_or_else(|error| panic!("{at}: {error}"));
                    remove(backend, &id).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                    check_empty(backend, at).await;
                },
            )
            .await;
        });
    }
}

#[test]
fn an_interrupted_restoration_can_be_completed() {
    for other_name in [false, true] {
        run(async {
            at_every_point(
                async |backend| {
                    fill(backend, "vm", 6).await;
                    mv(backend, "vm").await.expect("moved");
                },
                async |backend| {
                    let id = trashed(backend).await.first().expect("in the trash").0.clone();
                    restore(backend, &id).await.map(drop)
                },
                async |backend, done, at| {
                    assert!(!done || trashed(backend).await.is_empty(), "{at}: restored, and not");
                    let mut name = "vm";
                    if let Some((id, _)) = trashed(backend).await.first() {
                        // Its name may be back already, and the image in use.
                        if forebay_image::list(backend).await.expect("listed").len() == 1 {
                            check_content(backend, "vm", at).await;
                            assert_eq!(kind(remove(backend, id).await), Some(ErrorKind::Busy), "{at}");
                        }
                        let wanted = other_name.then_some("other");
                        let given = Images::of(backend).restore(id, wanted).await;
                        let given = given.unwrap_or_else(|error| panic!("{at}: {error}"));
                        name = wanted.unwrap_or("vm");
                        assert_eq!(given, name, "{at}");
                    }
                    assert!(trashed(backend).await.is_empty(), "{at}");
                    assert_eq!(forebay_image::list(backend).await.expect("listed"), [name], "{at}");
                    assert!(objects(backend).await.contains(&format!("rbd_id.{name}")), "{at}");
                    check_content(backend, name, at).await;
                    // What an interrupted attempt has left of the other name does not prevent its use.
                    forebay_image::rename(backend, name, "last").await.expect("renamed");
                    fill(backend, "vm", 5).await;
                    forebay_image::remove(backend, "vm", |_| {}).await.expect("removed");
                    forebay_image::remove(backend, "last", |_| {}).await.expect("removed");
                    check_empty(backend, at).await;
                },
            )
            .await;
        });
    }
}

#[test]
fn an_interrupted_removal_can_be_completed() {
    run(async {
        at_every_point(
            async |backend| {
                fill(backend, "vm", 6).await;
                mv(backend, "vm").await.expect("moved");
            },
            async |backend| {
                let id = trashed(backend).await.first().expect("in the trash").0.clone();
                remove(backend, &id).await
            },
            async |backend, done, at| {
                let in_trash = trashed(backend).await;
                assert!(!done || in_trash.is_empty(), "{at}: removed, and not");
                if let Some((id, _)) = in_trash.first() {
                    match restore(backend, id).await {
                        // Nothing was removed yet.
                        Ok(name) => {
                            check_content(backend, &name, at).await;
                            let id = mv(backend, &name).await.expect("moved");
                            remove(backend, &id).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Busy, "{at}: {error}");
                            remove(backend, id).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                        }
                    }
                }
                check_empty(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn a_clone_reads_its_parent_in_the_trash() {
    run(async {
        let cluster = cluster(3, 2);
        let backend = cluster.client().pool(POOL);
        let content = pattern(6, of_size(0).object_size as usize * 3);
        let size = content.len() as u64;
        let base = create_and_open(&backend, "base", size).await;
        write(&base, 0, &content).await;
        base.close().await;
        let snap = take_snapshot(&backend, "base", "gold", None).await;
        forebay_image::create(&backend, "child", of_size(size)).await.expect("created");
        make_clone(&backend, "child", "base", snap, size).await;
        let child = open_shared(&backend, "child").await;
        let id = mv(&backend, "base").await.expect("moved, although the clone is open");
        assert!(read(&child, 0, size).await == content);
        child.close().await;
        let again = open_shared(&backend, "child").await;
        assert!(read(&again, 0, size).await == content, "opened after the move");
        let parent = Images::of(&backend).details("child").await.expect("details").parent.expect("a parent");
        assert_eq!((&parent.image[..], parent.trash), ("base", true));
        assert_eq!(kind(remove(&backend, &id).await), Some(ErrorKind::Busy), "it has a snapshot");
        let child = mv(&backend, "child").await;
        assert_eq!(kind(child), Some(ErrorKind::Busy), "it is open");
        again.close().await;
        let child = mv(&backend, "child").await.expect("moved");
        let (parent, snapshots) = Images::of(&backend).trashed_details(&child).await.expect("a header");
        let parent = parent.expect("a parent");
        assert_eq!(snapshots, 0);
        assert_eq!((&parent.image[..], &parent.snapshot[..]), ("base", "gold"));
    });
}

#[test]
fn images_of_others_are_not_touched() {
    run(async {
        let cluster = cluster(5, 2);
        let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
        let image = create_and_open(&backends[0], "vm", 1 << 20).await;
        let refused = mv(&backends[1], "vm").await.expect_err("another client has it open");
        assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains("client."), "{refused}");
        let id = image.id().to_owned();
        image.close().await;
        // What `rbd-mirror` and `rbd rm` have put there.
        let entry = |source: u8, state: u8| {
            [&[2, 1, 24, 0, 0, 0, source, 2, 0, 0, 0, b'v', b'm'][..], &[0; 16], &[state]].concat()
        };
        kv(&*backends[0], "rbd_trash", vec![("id_abc".into(), entry(3, 0)), ("id_abd".into(), entry(2, 0))]).await;
        kv(&*backends[0], "rbd_trash", vec![("id_bad".into(), vec![1, 2, 3])]).await;
        assert_eq!(trashed(&backends[1]).await, [("abd".to_owned(), "vm".to_owned())], "not those of rbd rm");
        assert_eq!(kind(restore(&backends[1], "abd").await), Some(ErrorKind::Invalid));
        assert_eq!(kind(restore(&backends[1], "bad").await), Some(ErrorKind::Corrupt));
        // Remains of either can be removed.
        remove(&backends[1], "abc").await.expect("no image is left of it");
        assert_eq!(mv(&backends[1], "vm").await.expect("moved"), id);
        kv(&*backends[0], "rbd_trash", vec![(format!("id_{id}"), entry(0, 3))]).await;
        assert_eq!(kind(remove(&backends[1], &id).await), Some(ErrorKind::Busy), "it is being restored");
    });
}

/// Two clients move, restore and remove the same few images at once. Whatever each is told, every image exists once, by a
/// name or in the trash, and can be removed without a trace.
#[test]
fn random_programs_of_two_clients() {
    for seed in 1..40u64 {
        run(async {
            let cluster = cluster(seed, 3);
            let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
            let mut ids = BTreeMap::new();
            for name in ["a", "b"] {
                forebay_image::create(&backends[0], name, of_size(1 << 20)).await.expect("created");
                ids.insert(forebay_image::info(&backends[0], name).await.expect("info").id, name);
            }
            let tasks = [0, 1].map(|client: usize| {
                let backend = backends[client].clone();
                let ids: Vec<String> = ids.keys().cloned().collect();
                let mut chance = (seed << 1 | client as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                forebay_reactor::spawn(async move {
                    for _ in 0..12 {
                        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let pick = chance >> 33;
                        let done = match pick % 3 {
                            0 => mv(&backend, if pick & 8 == 0 { "a" } else { "b" }).await.map(drop),
                            1 => restore(&backend, &ids[(pick >> 4) as usize % 2]).await.map(drop),
                            _ => mv(&backend, if pick & 8 == 0 { "b" } else { "a" }).await.map(drop),
                        };
                        if let Err(error) = done {
                            let expected =
                                matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound | ErrorKind::Exists);
                            assert!(expected, "seed {seed}: {error}");
                        }
                    }
                })
            });
            for task in tasks {
                task.await;
            }
            for (id, name) in &ids {
                let backend = &backends[0];
                // Completes whatever was left half done.
                let _ = mv(backend, name).await;
                let known = trashed(backend).await;
                assert!(known.iter().any(|(other, _)| other == id), "seed {seed}: {name} is lost: {known:?}");
                assert_eq!(restore(backend, id).await.as_deref().ok(), Some(*name), "seed {seed}");
                let again = mv(backend, name).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                assert_eq!(again, *id);
                remove(backend, id).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            let mut left = names(&*backends[0]).await;
            left.retain(|name| name != "rbd_directory" && name != "rbd_trash");
            assert!(left.is_empty(), "seed {seed}: {left:?}");
        });
    }
}

/// A client dies while it removes an image; before its watch has expired, another one tries, and fails.
#[test]
fn what_is_partly_removed_is_not_restored() {
    run(async {
        let cluster = cluster(9, 3);
        let (dying, other) = (cluster.client(), cluster.client());
        let (a, b) = (dying.pool(POOL), other.pool(POOL));
        let image = create_and_open(&a, "vm", SIZE).await;
        write(&image, 0, &pattern(6, SIZE as usize)).await;
        image.close().await;
        let id = mv(&a, "vm").await.expect("moved");
        let all = names(&*cluster.bare(POOL)).await.len();
        let removing = spawn({
            let (a, id) = (a.clone(), id.clone());
            async move { drop(remove(&a, &id).await) }
        });
        while names(&*cluster.bare(POOL)).await.len() == all {
            yield_now().await;
        }
        dying.die();
        drop(removing);
        assert_eq!(kind(remove(&b, &id).await), Some(ErrorKind::Busy), "the watch of the dead client");
        assert_eq!(kind(restore(&b, &id).await), Some(ErrorKind::Busy), "its data is gone in part");
        cluster.expire_watches();
        remove(&b, &id).await.expect("removed");
        assert_eq!(trashed(&b).await, []);
    });
}
