//! Striped images: where their bytes are, what the header says, and everything that walks over objects.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Transaction,
};
use forebay_image::{CloneOptions, CreateOptions, Image, ImageFeatures, ImageOpenOptions, Images, Striping};

use crate::common::cluster::{OBJECT, POOL, cluster, kind, of_size, open, read, take_snapshot, write};
use crate::common::{pattern, run};

const UNIT: u64 = 16 << 10;
const COUNT: u64 = 3;
/// Bytes in a set of objects.
const SET: u64 = COUNT * OBJECT;

fn striped(size: u64) -> CreateOptions {
    CreateOptions { striping: Some(Striping { unit: UNIT, count: COUNT }), ..of_size(size) }
}

/// Returns the stored bytes of the data objects of an image, by number.
async fn stored(backend: &Rc<dyn ObjectBackend>, name: &str) -> BTreeMap<u64, Vec<u8>> {
    let prefix = forebay_image::info(backend, name).await.expect("info").block_name_prefix + ".";
    let mut found = BTreeMap::new();
    for object in backend.list(None, None, 1000).await.expect("listed").names {
        let Some(number) = object.name().strip_prefix(&prefix) else { continue };
        let data = backend.read(&object, ObjectRead::head(0, OBJECT)).await.expect("read");
        let len = data.runs.iter().map(|(offset, run)| offset + run.len() as u64).max().unwrap_or(0);
        let number = u64::from_str_radix(number, 16).expect("a number");
        found.insert(number, data.fill(Extent::new(0, len)).to_vec());
    }
    found
}

/// Returns the objects of a content, unit by unit.
fn expected(content: &[u8]) -> BTreeMap<u64, Vec<u8>> {
    let mut objects: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    for (number, unit) in content.chunks(UNIT as usize).enumerate() {
        let (set, within) = (number as u64 / (SET / UNIT), number as u64 % (SET / UNIT));
        objects.entry(set * COUNT + within % COUNT).or_default().extend_from_slice(unit);
    }
    objects
}

#[test]
fn bytes_go_round_the_objects_of_a_set() {
    run(async {
        let backend = cluster(1, 0).client().pool(POOL);
        let size = 2 * SET + 2 * UNIT + 100;
        forebay_image::create(&backend, "vm", striped(size)).await.expect("created");
        let image = open(&backend, "vm").await;
        let content = pattern(7, size as usize);
        write(&image, 0, &content).await;
        assert_eq!(stored(&backend, "vm").await, expected(&content));
        assert_eq!(image.objects(size), 9);
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        assert_eq!((info.objects(), info.striping), (9, Some(Striping { unit: UNIT, count: COUNT })));
        assert!(info.features.has(ImageFeatures::STRIPING));
        let header = ObjectName::new(format!("rbd_header.{}", info.id));
        let keys = vec![b"stripe_unit".to_vec(), b"stripe_count".to_vec()];
        let values = backend.kv_get(&header, keys).await.expect("keys");
        assert_eq!(values, [Some(UNIT.to_le_bytes().to_vec()), Some(COUNT.to_le_bytes().to_vec())]);
        // Reads that begin and end anywhere, and the allocation map.
        for (offset, len) in [(0, size), (UNIT - 1, 2), (SET - 5, UNIT + 10), (3 * UNIT + 7, SET), (size - 1, 1)] {
            let want = &content[offset as usize..(offset + len) as usize];
            assert!(read(&image, offset, len).await == want, "{len} bytes at {offset}");
            let map = image.map(Extent::new(offset, len)).await.expect("a map");
            assert_eq!((map.data_bytes(), map.runs().len()), (len, 1), "{len} bytes at {offset}");
        }
        // A discard of one row leaves its neighbors in the same objects.
        let row = COUNT * UNIT;
        image.submit(BlockRequest::Discard(Extent::new(row, row))).await.expect("discarded");
        assert_eq!(read(&image, row - 10, row + 20).await[10..][..row as usize], vec![0; row as usize]);
        assert_eq!(read(&image, 0, row).await, content[..row as usize]);
        assert_eq!(read(&image, 2 * row, row).await, content[2 * row as usize..3 * row as usize]);
        image.close().await;
    });
}

#[test]
fn shrinking_cuts_each_object_of_the_last_set() {
    run(async {
        let backend = cluster(2, 0).client().pool(POOL);
        let size = 2 * SET;
        forebay_image::create(&backend, "vm", striped(size)).await.expect("created");
        let image = open(&backend, "vm").await;
        let mut content = pattern(3, size as usize);
        write(&image, 0, &content).await;
        // In the second row of the second set: its first object ends in a unit, the second before it.
        let cut = SET + COUNT * UNIT + 100;
        image.resize(cut, true, |_| {}).await.expect("shrunk");
        content.truncate(cut as usize);
        assert_eq!(stored(&backend, "vm").await, expected(&content));
        image.resize(size, false, |_| {}).await.expect("grown");
        content.resize(size as usize, 0);
        assert!(read(&image, 0, size).await == content, "what was cut is back");
        // Less than a row: the other objects of the set are gone.
        image.resize(UNIT + 1, true, |_| {}).await.expect("shrunk");
        content.truncate(UNIT as usize + 1);
        assert_eq!(stored(&backend, "vm").await, expected(&content));
        image.close().await;
    });
}

#[test]
fn a_clone_may_be_striped_otherwise_than_its_parent() {
    run(async {
        for (parent, clone) in [(true, false), (false, true), (true, true)] {
            let backend = cluster(3, 0).client().pool(POOL);
            let size = SET + UNIT + 5000;
            let base = if parent { striped(size) } else { of_size(size) };
            forebay_image::create(&backend, "base", base).await.expect("created");
            let image = open(&backend, "base").await;
            let mut content = pattern(5, size as usize);
            write(&image, 0, &content).await;
            image.close().await;
            take_snapshot(&backend, "base", "gold", None).await;
            let images = Images::of(&backend);
            let striping = clone.then_some(Striping { unit: 4096, count: 5 });
            let options = CloneOptions { striping, ..CloneOptions::default() };
            images.clone_from(&images, "base@gold", "vm", &options).await.expect("cloned");
            let image = open(&backend, "vm").await;
            assert!(read(&image, 0, size).await == content, "before any write");
            let mut put = async |image: &Image, offset: u64, data: &[u8]| {
                write(image, offset, data).await;
                content[offset as usize..][..data.len()].copy_from_slice(data);
            };
            put(&image, 4000, &pattern(8, 300)).await;
            put(&image, SET - 100, &pattern(9, 200)).await;
            image.create_snapshot("mine").await.expect("a snapshot");
            put(&image, UNIT + 17, &pattern(4, 9000)).await;
            assert!(read(&image, 0, size).await == content, "after copying up");
            image.flatten(|_| {}).await.expect("flattened");
            assert!(read(&image, 0, size).await == content, "flattened");
            let name = image.name();
            image.close().await;
            let again = open(&backend, &name).await;
            assert!(read(&again, 0, size).await == content, "opened again");
        }
    });
}

#[test]
fn what_is_refused_as_striping() {
    run(async {
        let backend = cluster(4, 0).client().pool(POOL);
        let create = async |unit, count| {
            let options = CreateOptions { striping: Some(Striping { unit, count }), ..of_size(SET) };
            kind(forebay_image::create(&backend, "vm", options).await)
        };
        for (unit, count) in [(0, 4), (256, 4), (3 << 10, 2), (2 * OBJECT, 2), (UNIT, 0), (UNIT, 1025)] {
            assert_eq!(create(unit, count).await, Some(ErrorKind::Invalid), "{unit} and {count}");
        }
        // A header of another client, with more than that, is shown, but not opened.
        forebay_image::create(&backend, "odd", striped(SET)).await.expect("created");
        let id = forebay_image::info(&backend, "odd").await.expect("info").id;
        let header = ObjectName::new(format!("rbd_header.{id}"));
        let open = async || kind(Image::open(backend.clone(), "odd", ImageOpenOptions::default()).await);
        for (key, value, want) in [
            ("stripe_count", u64::MAX, ErrorKind::Unsupported),
            ("stripe_count", 0, ErrorKind::Corrupt),
            ("stripe_unit", 3000, ErrorKind::Corrupt),
            ("stripe_unit", 0, ErrorKind::Corrupt),
        ] {
            let pairs = vec![(key.as_bytes().to_vec(), value.to_le_bytes().to_vec())];
            backend.submit(&header, Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
            assert_eq!(open().await, Some(want), "{key} = {value}");
            assert_eq!(forebay_image::info(&backend, "odd").await.is_ok(), want == ErrorKind::Unsupported, "{key}");
        }
        // Whole objects, one after the other, are no striping.
        assert_eq!(create(OBJECT, 1).await, None);
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        assert_eq!((info.striping, info.features.has(ImageFeatures::STRIPING)), (None, false));
    });
}

/// Clients before Ceph 12 set the feature as it was asked for, and stored the striping only where it was not the default.
#[test]
fn the_feature_without_its_keys_means_objects_one_after_the_other() {
    run(async {
        let backend = cluster(5, 0).client().pool(POOL);
        forebay_image::create(&backend, "vm", of_size(3 * OBJECT)).await.expect("created");
        let id = forebay_image::info(&backend, "vm").await.expect("info").id;
        let pairs = vec![(b"features".to_vec(), 3u64.to_le_bytes().to_vec())];
        let header = ObjectName::new(format!("rbd_header.{id}"));
        backend.submit(&header, Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        assert_eq!((info.objects(), info.striping), (3, Some(Striping { unit: OBJECT, count: 1 })));
        let image = open(&backend, "vm").await;
        let content = pattern(2, 2 * OBJECT as usize);
        write(&image, 5000, &content).await;
        assert!(read(&image, 5000, 2 * OBJECT).await == content);
        image.close().await;
        assert_eq!(stored(&backend, "vm").await[&2].len(), 5000);
    });
}

#[test]
fn changes_of_a_clone_are_in_order_whatever_its_parent_is() {
    run(async {
        let backend = cluster(6, 0).client().pool(POOL);
        let size = 2 * SET;
        forebay_image::create(&backend, "base", striped(size)).await.expect("created");
        let base = open(&backend, "base").await;
        write(&base, 0, &pattern(6, size as usize)).await;
        base.close().await;
        take_snapshot(&backend, "base", "gold", None).await;
        let images = Images::of(&backend);
        images.clone_from(&images, "base@gold", "vm", &CloneOptions::default()).await.expect("cloned");
        let image = open(&backend, "vm").await;
        for whole in [false, true] {
            let mut changes = image.changes(None, whole).await.expect("changes");
            let mut end = 0;
            while let Some(ranges) = changes.next().await.expect("changes") {
                for range in ranges {
                    assert_eq!(range.extent.offset, end, "whole: {whole}");
                    end = range.extent.end();
                }
            }
            assert_eq!(end, size, "whole: {whole}");
        }
        image.close().await;
    });
}
