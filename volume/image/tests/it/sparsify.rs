//! Zeroes that an image stores are deallocated.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectRead, SnapId};
use forebay_image::{Image, ImageOpenOptions, Images, SPARSE_SIZE_MIN};
use forebay_ram::RamBackend;
use forebay_reactor::{spawn, yield_now};

use crate::common::cluster::{OBJECT, POOL, check_map, cluster, create_and_open, kind, open, read, two_clients, write};
use crate::common::{pattern, run};
use crate::owner::lock_of;

/// Writes zeroes that are stored.
async fn store_zeroes(image: &Image, offset: u64, len: u64) {
    let zeroes = BlockRequest::WriteZeroes { extent: Extent::new(offset, len), no_unmap: true, fua: false };
    image.submit(zeroes).await.expect("zeroes");
}

/// Returns the bytes that an object of an image stores; `None` if it does not exist.
async fn stored(backend: &Rc<dyn ObjectBackend>, image: &Image, object: u64) -> Option<u64> {
    let prefix = forebay_image::info(backend, &image.name()).await.expect("info").block_name_prefix;
    let name = ObjectName::new(format!("{prefix}.{object:016x}"));
    let read = backend.read(&name, ObjectRead::new(SnapId::HEAD, Extent::new(0, OBJECT))).await.ok()?;
    Some(read.runs.iter().map(|(_, data)| data.len() as u64).sum())
}

#[test]
fn blocks_of_zeroes_are_freed() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let image = create_and_open(&backend, "vm", 4 * OBJECT + 5000).await;
        // Zeroes only; zeroes within data, and not aligned; data only; nothing; a short last object.
        store_zeroes(&image, 0, OBJECT).await;
        write(&image, OBJECT, &pattern(1, OBJECT as usize)).await;
        store_zeroes(&image, OBJECT + 8192 - 100, 8192 + 200).await;
        write(&image, 2 * OBJECT, &pattern(2, OBJECT as usize)).await;
        store_zeroes(&image, 4 * OBJECT, 5000).await;
        let before = read(&image, 0, image.size()).await;
        let used = image.usage().await.expect("usage").used;
        for size in [0, 512, 2048, 6000, 2 * OBJECT] {
            assert_eq!(kind(image.sparsify(size, |_| {}).await), Some(ErrorKind::Invalid), "{size}");
        }
        image.sparsify(SPARSE_SIZE_MIN, |_| {}).await.expect("sparsified");
        assert!(read(&image, 0, image.size()).await == before);
        assert_eq!(stored(&backend, &image, 0).await, None);
        assert_eq!(stored(&backend, &image, 1).await, Some(OBJECT - 8192));
        assert_eq!(stored(&backend, &image, 2).await, Some(OBJECT));
        assert_eq!(stored(&backend, &image, 4).await, None);
        assert_eq!(image.usage().await.expect("usage").used, used - OBJECT - 8192 - 5000);
        // Larger blocks free less; a snapshot is not changed.
        store_zeroes(&image, 2 * OBJECT + 4096, 16384).await;
        image.create_snapshot("one").await.expect("a snapshot");
        image.sparsify(16384, |_| {}).await.expect("sparsified");
        assert_eq!(stored(&backend, &image, 2).await, Some(OBJECT), "no block of 16 KiB is zero");
        image.sparsify(8192, |_| {}).await.expect("sparsified");
        assert_eq!(stored(&backend, &image, 2).await, Some(OBJECT - 8192));
        let then = open(&backend, "vm@one").await;
        assert!(read(&then, 0, then.size()).await == read(&image, 0, image.size()).await);
        assert_eq!(kind(then.sparsify(4096, |_| {}).await), Some(ErrorKind::ReadOnly));
        let reader = Images::of(&backend).open("vm", ImageOpenOptions { read_only: true }).await.expect("opened");
        assert_eq!(kind(reader.sparsify(4096, |_| {}).await), Some(ErrorKind::ReadOnly));
    });
}

#[test]
fn zeroes_of_a_clone_hide_what_the_parent_has() {
    run(async {
        let cluster = cluster(5, 2);
        let backend = cluster.client().pool(POOL);
        let base = create_and_open(&backend, "base", 3 * OBJECT).await;
        write(&base, 0, &pattern(7, 3 * OBJECT as usize)).await;
        base.create_snapshot("gold").await.expect("a snapshot");
        let images = Images::of(&backend);
        images.clone_from(&images, "base@gold", "vm", &Default::default()).await.expect("cloned");
        let image = open(&backend, "vm").await;
        store_zeroes(&image, 0, OBJECT).await;
        store_zeroes(&image, OBJECT, 4096).await;
        let before = read(&image, 0, 3 * OBJECT).await;
        image.sparsify(4096, |_| {}).await.expect("sparsified");
        image.sparsify(4096, |_| {}).await.expect("nothing is left to do");
        assert!(read(&image, 0, 3 * OBJECT).await == before);
        assert_eq!(stored(&backend, &image, 0).await, Some(0), "it stays, and is empty");
        assert_eq!(stored(&backend, &image, 1).await, Some(OBJECT - 4096));
        assert_eq!(stored(&backend, &image, 2).await, None, "nothing is copied up");
        let id = image.id().to_owned();
        image.close().await;
        check_map(&*cluster.bare(POOL), &id).await;
    });
}

#[test]
fn writes_at_the_same_time_are_kept() {
    for seed in 0..8 {
        run(async {
            let cluster = cluster(seed * 31 + 3, 1 + seed % 5);
            let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
            store_zeroes(&owner, 0, 4 * OBJECT).await;
            let lock = lock_of(&backends[0], &owner).await;
            // The owner of the lock does it, in the midst of its own writes.
            let writer = owner.clone();
            let writing = spawn(async move {
                let mut expected = vec![0; 4 * OBJECT as usize];
                for i in 0..40_u64 {
                    let (at, data) = ((i * 7919 * 4096) % (4 * OBJECT), pattern(i as u8, 4096));
                    write(&writer, at, &data).await;
                    expected[at as usize..][..4096].copy_from_slice(&data);
                    yield_now().await;
                }
                expected
            });
            for _ in 0..2 {
                other.sparsify(4096, |_| {}).await.expect("sparsified by the owner");
            }
            let expected = writing.await;
            assert!(read(&owner, 0, 4 * OBJECT).await == expected, "seed {seed}");
            assert!(read(&other, 0, 4 * OBJECT).await == expected, "seed {seed}");
            assert_eq!(lock_of(&backends[0], &owner).await, lock, "seed {seed}: the lock has changed hands");
        });
    }
}
