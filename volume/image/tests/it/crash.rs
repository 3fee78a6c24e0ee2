//! Power failures during creating, removing, renaming and resizing, at every transaction and flush.

use std::rc::Rc;

use crate::common::{Fail, Left, Stormy, bytes, objects, pattern, run};
use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, Result};
use forebay_image::{CreateOptions, Image, ImageOpenOptions};

const OBJECT: u64 = 64 << 10;
/// Size of the image; the last object is not full.
pub const SIZE: u64 = 4 * OBJECT + 777;

const LEFT: [Left; 5] = [Left::Nothing, Left::Everything, Left::Some(1), Left::Some(77), Left::Some(12345)];

fn options() -> CreateOptions {
    CreateOptions { size: SIZE, object_size: OBJECT, ..CreateOptions::default() }
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

pub async fn open(backend: &Rc<dyn ObjectBackend>, name: &str) -> Rc<Image> {
    Image::open(backend.clone(), name, ImageOpenOptions::default()).await.expect("opened")
}

pub async fn read_all(image: &Image) -> Vec<u8> {
    let extent = Extent::new(0, image.size());
    image.submit(BlockRequest::Read(extent)).await.expect("a read").into_data().to_vec()
}

/// Creates an image full of a pattern, durably.
pub async fn fill(backend: &Rc<dyn ObjectBackend>, name: &str, seed: u8) {
    forebay_image::create(backend, name, options()).await.expect("created");
    let image = open(backend, name).await;
    let data = bytes(&pattern(seed, SIZE as usize));
    image.submit(BlockRequest::Write { offset: 0, data, fua: false }).await.expect("a write");
    image.submit(BlockRequest::Flush).await.expect("a flush");
}

async fn check_full(backend: &Rc<dyn ObjectBackend>, name: &str, seed: u8) {
    assert!(read_all(&*open(backend, name).await).await == pattern(seed, SIZE as usize), "{name} is damaged");
}

/// Asserts that the image can be created unless it exists, that it then exists once, and that it can be removed
/// without a trace.
async fn check_can_be_made_and_removed(backend: &Rc<dyn ObjectBackend>, name: &str, at: &str) {
    let others = objects(backend).await;
    match forebay_image::create(backend, name, options()).await {
        Ok(()) => {
            let image = open(backend, name).await;
            assert!(read_all(&image).await.iter().all(|&byte| byte == 0), "{at}: a new image has old content");
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Exists, "{at}: {error}");
            assert_eq!(forebay_image::info(backend, name).await.expect("it is there").size, SIZE, "{at}");
        }
    }
    let listed = forebay_image::list(backend).await.expect("listed");
    assert_eq!(listed.iter().filter(|other| *other == name).count(), 1, "{at}: {listed:?}");
    forebay_image::remove(backend, name, |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    check_no_trace(backend, name, &others, at).await;
}

/// Asserts that only the objects of listed images exist.
async fn check_no_trace(backend: &Rc<dyn ObjectBackend>, name: &str, before: &[String], at: &str) {
    let mut ids = Vec::new();
    let listed = forebay_image::list(backend).await.expect("listed");
    assert!(!listed.iter().any(|other| other == name), "{at}");
    for other in &listed {
        ids.push(forebay_image::info(backend, other).await.expect("info").id);
    }
    for object in objects(backend).await {
        let belongs = object == "rbd_directory"
            || listed.iter().any(|other| object == format!("rbd_id.{other}"))
            || ids.iter().any(|id| object.contains(id.as_str()));
        assert!(belongs, "{at}: {object} is left (there were {before:?})");
    }
}

/// Runs `work` on a backend that fails from the nth transaction or flush on, for every n, and checks every state that
/// a crash can leave of non-durable changes.
pub async fn at_every_point(
    prepare: impl AsyncFn(&Rc<dyn ObjectBackend>),
    work: impl AsyncFn(&Rc<dyn ObjectBackend>) -> Result<()>,
    check: impl AsyncFn(&Rc<dyn ObjectBackend>, bool, &str),
) {
    for left in LEFT {
        for point in 0.. {
            let stormy = Stormy::new(point + 1, 3);
            let backend: Rc<dyn ObjectBackend> = stormy.clone();
            prepare(&backend).await;
            backend.flush().await.expect("all that is prepared is durable");
            stormy.fail(Fail::From(point));
            let result = work(&backend).await;
            if let Err(error) = &result {
                assert_eq!(error.kind(), ErrorKind::Io, "point {point}: {error}");
            }
            let done = result.is_ok();
            let after = stormy.crash(left).await;
            check(&after, done, &format!("{left:?}, point {point}")).await;
            if done {
                assert!(point >= 2, "the work has more steps than that");
                break;
            }
        }
    }
}

#[test]
fn creating() {
    run(async {
        at_every_point(
            async |backend| fill(backend, "other", 5).await,
            async |backend| forebay_image::create(backend, "vm", options()).await,
            async |backend, done, at| {
                assert!(!done || forebay_image::info(backend, "vm").await.is_ok(), "{at}: created, but lost");
                assert!(!done || objects(backend).await.contains(&"rbd_id.vm".to_owned()), "{at}: no id object");
                check_full(backend, "other", 5).await;
                check_can_be_made_and_removed(backend, "vm", at).await;
                check_full(backend, "other", 5).await;
            },
        )
        .await;
    });
}

#[test]
fn creating_what_is_then_removed_without_being_completed() {
    run(async {
        at_every_point(
            async |_| {},
            async |backend| forebay_image::create(backend, "vm", options()).await,
            async |backend, done, at| {
                let removed = forebay_image::remove(backend, "vm", |_| {}).await;
                assert!(matches!(kind(removed), None | Some(ErrorKind::NotFound)) || done, "{at}");
                check_no_trace(backend, "vm", &[], at).await;
            },
        )
        .await;
    });
}

#[test]
fn removing() {
    run(async {
        at_every_point(
            async |backend| {
                fill(backend, "other", 5).await;
                fill(backend, "vm", 6).await;
            },
            async |backend| forebay_image::remove(backend, "vm", |_| {}).await,
            async |backend, done, at| {
                check_full(backend, "other", 5).await;
                let listed = forebay_image::list(backend).await.expect("listed");
                let is_listed = listed.iter().any(|name| name == "vm");
                assert!(!done || !is_listed, "{at}: removed, but listed");
                if is_listed {
                    // The removal resumes where it was interrupted.
                    forebay_image::remove(backend, "vm", |_| {}).await.unwrap_or_else(|error| panic!("{at}: {error}"));
                }
                check_no_trace(backend, "vm", &listed, at).await;
                check_can_be_made_and_removed(backend, "vm", at).await;
                check_full(backend, "other", 5).await;
            },
        )
        .await;
    });
}

#[test]
fn creating_again_what_is_half_removed() {
    run(async {
        at_every_point(
            async |backend| fill(backend, "vm", 6).await,
            async |backend| forebay_image::remove(backend, "vm", |_| {}).await,
            async |backend, _, at| check_can_be_made_and_removed(backend, "vm", at).await,
        )
        .await;
    });
}

#[test]
fn renaming() {
    run(async {
        at_every_point(
            async |backend| fill(backend, "old", 6).await,
            async |backend| forebay_image::rename(backend, "old", "new").await,
            async |backend, done, at| {
                let listed = forebay_image::list(backend).await.expect("listed");
                assert!(listed == ["old"] || listed == ["new"], "{at}: {listed:?}");
                assert!(!done || listed == ["new"], "{at}: renamed, but not");
                let id_object = format!("rbd_id.{}", listed[0]);
                assert!(objects(backend).await.contains(&id_object), "{at}: no id object");
                check_full(backend, &listed[0], 6).await;
                if listed == ["old"] {
                    forebay_image::rename(backend, "old", "new").await.expect("renamed now");
                }
                check_full(backend, "new", 6).await;
                // Remains of the old name do not prevent its reuse.
                check_can_be_made_and_removed(backend, "old", at).await;
                check_full(backend, "new", 6).await;
            },
        )
        .await;
    });
}

#[test]
fn shrinking() {
    for new_size in [0, 1, 2 * OBJECT, 2 * OBJECT + 5000, SIZE - 1] {
        run(async {
            at_every_point(
                async |backend| fill(backend, "vm", 6).await,
                async |backend| open(backend, "vm").await.resize(new_size, true, |_| {}).await,
                async |backend, done, at| {
                    let image = open(backend, "vm").await;
                    let size = image.size();
                    assert!(size == new_size || (size == SIZE && !done), "{at}: {size} bytes");
                    let kept = &pattern(6, SIZE as usize)[..new_size as usize];
                    assert!(read_all(&image).await[..new_size as usize] == *kept, "{at}: what stays is damaged");
                    if size != new_size {
                        image.resize(new_size, true, |_| {}).await.expect("shrunk now");
                    }
                    // No data past the old end reappears.
                    image.resize(SIZE, false, |_| {}).await.expect("grown");
                    let all = read_all(&image).await;
                    assert!(all[..new_size as usize] == *kept, "{at}");
                    assert!(all[new_size as usize..].iter().all(|&byte| byte == 0), "{at}: old content is back");
                },
            )
            .await;
        });
    }
}

#[test]
fn growing() {
    run(async {
        for left in LEFT {
            for point in 0..3 {
                let stormy = Stormy::new(point, 3);
                let backend: Rc<dyn ObjectBackend> = stormy.clone();
                fill(&backend, "vm", 6).await;
                stormy.fail(Fail::From(point));
                let image = open(&backend, "vm").await;
                let done = image.resize(2 * SIZE, false, |_| {}).await.is_ok();
                assert_eq!(done, point > 0);
                assert_eq!(image.size(), if done { 2 * SIZE } else { SIZE }, "what failed shows no new size");
                let after = stormy.crash(left).await;
                let image = open(&after, "vm").await;
                assert_eq!(image.size(), if done { 2 * SIZE } else { SIZE });
                let all = read_all(&image).await;
                assert!(all[..SIZE as usize] == pattern(6, SIZE as usize));
                assert!(all[SIZE as usize..].iter().all(|&byte| byte == 0));
            }
        }
    });
}

/// A single failure, after which the backend works again, is rolled back.
#[test]
fn what_fails_once_leaves_things_as_they_were() {
    run(async {
        for point in 0..20 {
            let stormy = Stormy::new(point + 1, 2);
            let backend: Rc<dyn ObjectBackend> = stormy.clone();
            fill(&backend, "other", 5).await;
            let before = objects(&backend).await;

            stormy.fail(Fail::Only(point));
            let created = forebay_image::create(&backend, "vm", options()).await;
            stormy.fail(Fail::Never);
            match created {
                Ok(()) => assert_eq!(forebay_image::info(&backend, "vm").await.expect("info").size, SIZE),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Io);
                    assert_eq!(objects(&backend).await, before, "point {point}");
                    forebay_image::create(&backend, "vm", options()).await.expect("created");
                }
            }

            let image = open(&backend, "vm").await;
            let data = bytes(&pattern(6, SIZE as usize));
            image.submit(BlockRequest::Write { offset: 0, data, fua: true }).await.expect("a write");
            stormy.fail(Fail::Only(point));
            let shrunk = image.resize(OBJECT, true, |_| {}).await;
            stormy.fail(Fail::Never);
            assert_eq!(image.size(), if shrunk.is_ok() { OBJECT } else { SIZE }, "point {point}");
            assert!(read_all(&image).await[..OBJECT as usize] == pattern(6, OBJECT as usize));

            drop(image);
            stormy.fail(Fail::Only(point));
            let removed = forebay_image::remove(&backend, "vm", |_| {}).await;
            stormy.fail(Fail::Never);
            if removed.is_err() {
                forebay_image::remove(&backend, "vm", |_| {}).await.expect("removed the second time");
            }
            assert_eq!(objects(&backend).await, before, "point {point}");
            check_full(&backend, "other", 5).await;
        }
    });
}

#[test]
fn durable_zeroes_of_what_is_already_gone_make_its_removal_durable() {
    for (seed, objects) in [(2, 1), (2, 3), (2, 12), (3, 1), (3, 12)] {
        let extent = Extent::new(OBJECT, objects * OBJECT);
        run(async {
            let stormy = Stormy::new(seed, 2);
            let backend: Rc<dyn ObjectBackend> = stormy.clone();
            let size = 16 * OBJECT;
            forebay_image::create(&backend, "vm", CreateOptions { size, ..options() }).await.expect("created");
            let image = open(&backend, "vm").await;
            let data = bytes(&pattern(5, size as usize));
            image.submit(BlockRequest::Write { offset: 0, data, fua: true }).await.expect("a write");
            image.submit(BlockRequest::Flush).await.expect("a flush");
            image.submit(BlockRequest::Discard(Extent::new(0, size))).await.expect("a discard");
            let zeroes = BlockRequest::WriteZeroes { extent, no_unmap: false, fua: true };
            image.submit(zeroes).await.expect("zeroes that last");
            let after = stormy.crash(Left::Nothing).await;
            let content = read_all(&*open(&after, "vm").await).await;
            let range = extent.offset as usize..extent.end() as usize;
            assert!(content[range].iter().all(|&byte| byte == 0), "{extent:?} was promised to be zero, and is not");
        });
    }
}
