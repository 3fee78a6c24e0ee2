//! Power failures while snapshots are created, removed and rolled back to, at every transaction and flush.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ObjectBackend, ObjectName};
use forebay_image::Image;

use crate::common::{bytes, objects, pattern, run};
use crate::crash::{SIZE, at_every_point, fill, open, read_all};

async fn overwrite(image: &Image, seed: u8) {
    let data = bytes(&pattern(seed, SIZE as usize));
    image.submit(BlockRequest::Write { offset: 0, data, fua: false }).await.expect("a write");
}

/// Prepares an image that has been overwritten since its snapshot `s`.
async fn with_snapshot(backend: &Rc<dyn ObjectBackend>) {
    fill(backend, "vm", 5).await;
    let image = open(backend, "vm").await;
    image.create_snapshot("s").await.expect("a snapshot");
    overwrite(&image, 6).await;
    image.submit(BlockRequest::Flush).await.expect("a flush");
}

async fn has_snapshot(backend: &Rc<dyn ObjectBackend>) -> bool {
    !open(backend, "vm").await.snapshots().is_empty()
}

async fn check_snapshot(backend: &Rc<dyn ObjectBackend>, seed: u8, at: &str) {
    let content = read_all(&*open(backend, "vm@s").await).await;
    assert!(content == pattern(seed, SIZE as usize), "{at}: the snapshot is damaged");
}

/// Asserts that the snapshot can be removed, and the image, without a trace.
async fn check_goes(backend: &Rc<dyn ObjectBackend>, at: &str) {
    let image = open(backend, "vm").await;
    let id = image.id().to_owned();
    if !image.snapshots().is_empty() {
        image.remove_snapshot("s").await.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
    // Any change completes an interrupted removal.
    image.set_snapshot_limit(Some(9)).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    let header = ObjectName::new(format!("rbd_header.{id}"));
    let left = backend.kv_list(&header, b"forebay_", b"", 9).await.expect("a listing");
    assert!(left.pairs.is_empty(), "{at}: {:?}", left.pairs);
    drop(image);
    forebay_image::remove(backend, "vm", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    assert_eq!(objects(backend).await, ["rbd_directory"], "{at}");
}

#[test]
fn creating_a_snapshot() {
    run(async {
        at_every_point(
            async |backend| fill(backend, "vm", 5).await,
            async |backend| {
                let image = open(backend, "vm").await;
                let data = bytes(&pattern(6, SIZE as usize));
                image.submit(BlockRequest::Write { offset: 0, data, fua: false }).await?;
                image.create_snapshot("s").await.map(drop)
            },
            async |backend, done, at| {
                assert!(!done || has_snapshot(backend).await, "{at}: created, but lost");
                if has_snapshot(backend).await {
                    // What was written before it is in it, durable or not.
                    check_snapshot(backend, 6, at).await;
                    overwrite(&*open(backend, "vm").await, 7).await;
                    check_snapshot(backend, 6, at).await;
                }
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn removing_a_snapshot() {
    run(async {
        at_every_point(
            with_snapshot,
            async |backend| open(backend, "vm").await.remove_snapshot("s").await,
            async |backend, done, at| {
                assert!(!done || !has_snapshot(backend).await, "{at}: removed, but there");
                if has_snapshot(backend).await {
                    check_snapshot(backend, 5, at).await;
                }
                assert!(read_all(&*open(backend, "vm").await).await == pattern(6, SIZE as usize), "{at}");
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}

#[test]
fn rolling_back() {
    run(async {
        at_every_point(
            with_snapshot,
            async |backend| open(backend, "vm").await.rollback("s", |_| {}).await,
            async |backend, done, at| {
                let image = open(backend, "vm").await;
                assert!(!done || read_all(&image).await == pattern(5, SIZE as usize), "{at}: rolled back, and not");
                check_snapshot(backend, 5, at).await;
                image.rollback("s", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                assert!(read_all(&image).await == pattern(5, SIZE as usize), "{at}: the second time");
                drop(image);
                check_goes(backend, at).await;
            },
        )
        .await;
    });
}
