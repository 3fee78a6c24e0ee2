//! Power failures while clones are created, flattened and removed, at every transaction and flush.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ObjectBackend, Result};
use forebay_image::{CloneOptions, Images};

use crate::common::{bytes, objects, pattern, run};
use crate::crash::{SIZE, at_every_point, fill, open, read_all};

/// Prepares an image `base` with a snapshot `gold`, that has been overwritten since.
async fn with_gold(backend: &Rc<dyn ObjectBackend>) {
    fill(backend, "base", 5).await;
    let base = open(backend, "base").await;
    base.create_snapshot("gold").await.expect("a snapshot");
    let data = bytes(&pattern(6, SIZE as usize));
    base.submit(BlockRequest::Write { offset: 0, data, fua: true }).await.expect("a write");
}

async fn clone(backend: &Rc<dyn ObjectBackend>) -> Result<()> {
    let images = Images::of(backend);
    images.clone_from(&images, "base@gold", "vm", &CloneOptions::default()).await
}

async fn exists(backend: &Rc<dyn ObjectBackend>) -> bool {
    forebay_image::info(backend, "vm").await.is_ok()
}

async fn remove_parent(backend: &Rc<dyn ObjectBackend>, at: &str) {
    let base = open(backend, "base").await;
    if !base.snapshots().is_empty() {
        base.remove_snapshot("gold").await.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
    drop(base);
}

/// Asserts that the clone keeps its data whatever is done to its parent, and that all of it can be removed.
async fn check_goes(backend: &Rc<dyn ObjectBackend>, at: &str) {
    // First the parent's snapshot, then the clone.
    let has_clone = exists(backend).await;
    remove_parent(backend, at).await;
    if has_clone {
        assert!(read_all(&*open(backend, "vm").await).await == pattern(5, SIZE as usize), "{at}: the clone is damaged");
    }
    if forebay_image::list(backend).await.expect("a listing").contains(&"vm".to_owned()) {
        forebay_image::remove(backend, "vm", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
    // A record that an interrupted creation has left was seen as such only after the removal.
    for snapshot in Images::of(backend).snapshots("base").await.expect("snapshots") {
        let base = open(backend, "base").await;
        let removed = base.remove_snapshot_number(forebay_block::SnapId(snapshot.id)).await;
        removed.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
    assert!(read_all(&*open(backend, "base").await).await == pattern(6, SIZE as usize), "{at}: the parent is damaged");
    forebay_image::remove(backend, "base", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    assert_eq!(objects(backend).await, ["rbd_directory"], "{at}");
}

#[test]
fn creating_a_clone() {
    run(async {
        at_every_point(with_gold, clone, async |backend, done, at| {
            assert!(!done || exists(backend).await, "{at}: created, but lost");
            check_goes(backend, at).await;
        })
        .await;
    });
}

#[test]
fn creating_a_clone_that_is_completed() {
    run(async {
        at_every_point(with_gold, clone, async |backend, done, at| {
            if !done && !exists(backend).await {
                clone(backend).await.unwrap_or_else(|error| panic!("{at}: {error}"));
            }
            assert!(exists(backend).await, "{at}");
            check_goes(backend, at).await;
        })
        .await;
    });
}

#[test]
fn flattening() {
    run(async {
        at_every_point(
            async |backend| {
                with_gold(backend).await;
                clone(backend).await.expect("cloned");
            },
            async |backend| open(backend, "vm").await.flatten(|_| {}).await,
            async |backend, done, at| {
                let info = forebay_image::info(backend, "vm").await.expect("info");
                assert!(!done || !info.has_parent, "{at}: flattened, but has a parent");
                if info.has_parent {
                    assert!(
                        read_all(&*open(backend, "vm").await).await == pattern(5, SIZE as usize),
                        "{at}: it is damaged"
                    );
                }
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn removing_a_clone() {
    run(async {
        at_every_point(
            async |backend| {
                with_gold(backend).await;
                clone(backend).await.expect("cloned");
                // The clone keeps it in the trash.
                open(backend, "base").await.remove_snapshot("gold").await.expect("removed");
            },
            async |backend| forebay_image::remove(backend, "vm", |_| {}).await,
            async |backend, done, at| {
                let left = Images::of(backend).snapshots("base").await.expect("snapshots");
                assert!(!done || left.is_empty(), "{at}: the last clone takes the snapshot along: {left:?}");
                if forebay_image::list(backend).await.expect("a listing").contains(&"vm".to_owned()) {
                    forebay_image::remove(backend, "vm", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                }
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}
