//! Creating, listing, opening, renaming and removing images, and what that leaves in the pool.

use std::rc::Rc;

use crate::common::{Stormy, bytes, objects, pattern, run};
use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ExtentState, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result,
    Transaction,
};
use forebay_image::{
    CreateOptions, Image, ImageFeatures, ImageOpenOptions, Images, ObjectProgress, RemoveOptions, SIZE_MAX,
};
use forebay_ram::RamBackend;
use forebay_ram::cluster::rbd::encode_snapshot;

const MIB: u64 = 1 << 20;

fn ram() -> Rc<dyn ObjectBackend> {
    RamBackend::new("ram")
}

fn of_size(size: u64) -> CreateOptions {
    CreateOptions { size, ..CreateOptions::default() }
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

async fn write(image: &Image, offset: u64, data: &[u8]) {
    image.submit(BlockRequest::Write { offset, data: bytes(data), fua: false }).await.expect("a write");
}

async fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    image.submit(BlockRequest::Read(Extent::new(offset, len))).await.expect("a read").into_data().to_vec()
}

#[test]
fn a_created_image_in_the_pool_byte_for_byte() {
    run(async {
        let backend = ram();
        let before = forebay_reactor::wall_clock();
        forebay_image::create(&backend, "vm-1", of_size(10 << 30)).await.expect("created");
        let info = forebay_image::info(&backend, "vm-1").await.expect("info");
        let id = &info.id;
        assert_eq!(id.len(), 14);
        let encoded = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();

        let names = objects(&backend).await;
        assert_eq!(names, ["rbd_directory".to_owned(), format!("rbd_header.{id}"), "rbd_id.vm-1".to_owned()]);
        let all =
            async |object: &str| backend.kv_list(&ObjectName::new(object), b"", b"", 100).await.expect("keys").pairs;
        let directory = [(format!("id_{id}").into_bytes(), encoded("vm-1")), (b"name_vm-1".to_vec(), encoded(id))];
        assert_eq!(all("rbd_directory").await, directory);
        let id_object = backend.read(&ObjectName::new("rbd_id.vm-1"), ObjectRead::head(0, 100)).await.expect("the id");
        assert_eq!(id_object.fill(Extent::new(0, 18)).to_vec(), encoded(id));

        let header = all(&format!("rbd_header.{id}")).await;
        let value = |key: &str| header.iter().find(|pair| pair.0 == key.as_bytes()).expect(key).1.clone();
        assert_eq!(header.len(), 8);
        assert_eq!(value("size"), (10u64 << 30).to_le_bytes());
        assert_eq!(value("order"), [22]);
        assert_eq!(value("features"), 0x21u64.to_le_bytes());
        assert_eq!(value("object_prefix"), encoded(&format!("rbd_data.{id}")));
        assert_eq!(value("snap_seq"), [0; 8]);
        let seconds = u32::from_le_bytes(value("create_timestamp")[..4].try_into().expect("4 bytes")).into();
        assert!((before.as_secs()..=before.as_secs() + 60).contains(&seconds));

        assert_eq!(info.block_name_prefix, format!("rbd_data.{id}"));
        assert_eq!((info.size, info.object_size, info.order(), info.objects()), (10 << 30, 4 * MIB, 22, 2560));
        assert_eq!((info.features, info.snapshots, info.has_parent), (ImageFeatures(0x21), 0, false));

        let image = Image::open(backend.clone(), "vm-1", ImageOpenOptions::default()).await.expect("opened");
        write(&image, (10 << 30) - 5, b"last!").await;
        assert!(objects(&backend).await.contains(&format!("rbd_data.{id}.00000000000009ff")));
    });
}

#[test]
fn names_sizes_and_object_sizes_that_cannot_be() {
    run(async {
        let backend = ram();
        let long = "n".repeat(96);
        for name in ["", "a/b/c", "a/", "a@b", "a\nb", "a\0b", &long] {
            assert_eq!(
                kind(forebay_image::create(&backend, name, of_size(1)).await),
                Some(ErrorKind::Invalid),
                "{name:?}"
            );
        }
        for object_size in [0, 1, 32 << 10, 3 * MIB, 64 * MIB, u64::MAX] {
            let options = CreateOptions { object_size, ..of_size(1) };
            assert_eq!(kind(forebay_image::create(&backend, "a", options).await), Some(ErrorKind::Invalid));
        }
        assert_eq!(kind(forebay_image::create(&backend, "a", of_size(SIZE_MAX + 1)).await), Some(ErrorKind::Invalid));
        let features = CreateOptions { features: Some(ImageFeatures(0b101)), ..of_size(1) };
        assert_eq!(kind(forebay_image::create(&backend, "a", features).await), Some(ErrorKind::Invalid));
        assert_eq!(objects(&backend).await, [""; 0], "nothing of it was done");
        for (name, size, object_size) in [(&long[1..], 0, 64 << 10), ("größe 1", SIZE_MAX, 32 * MIB), ("-", 12345, MIB)]
        {
            let options = CreateOptions {
                size,
                object_size,
                striping: None,
                features: Some(ImageFeatures::default()),
                data_pool: None,
                encrypted: false,
            };
            forebay_image::create(&backend, name, options).await.expect("created");
            let info = forebay_image::info(&backend, name).await.expect("info");
            assert_eq!((info.size, info.object_size, info.features), (size, object_size, ImageFeatures(0)));
        }
    });
}

#[test]
fn images_are_listed_in_order_and_in_pages() {
    run(async {
        let backend = ram();
        let images = Images::of(&backend);
        assert_eq!(images.list().await.expect("no directory yet"), [""; 0]);
        let mut names: Vec<String> = (0..25).map(|i| format!("vm-{}", i * 7 % 25)).collect();
        for name in &names {
            images.create(name, of_size(MIB)).await.expect("created");
        }
        assert_eq!(kind(images.create("vm-3", of_size(MIB)).await), Some(ErrorKind::Exists));
        names.sort();
        assert_eq!(images.list().await.expect("listed"), names);
        let mut paged = Vec::new();
        let mut cursor = None;
        loop {
            let (page, next) = images.list_page(cursor, 4).await.expect("a page");
            assert!(page.len() <= 4);
            paged.extend(page);
            cursor = next;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(paged, names);
    });
}

#[test]
fn what_is_not_there_is_not_found() {
    run(async {
        let backend = ram();
        for _ in 0..2 {
            assert_eq!(kind(forebay_image::info(&backend, "x").await), Some(ErrorKind::NotFound));
            assert_eq!(kind(forebay_image::remove(&backend, "x", |_| {}).await), Some(ErrorKind::NotFound));
            assert_eq!(kind(forebay_image::rename(&backend, "x", "y").await), Some(ErrorKind::NotFound));
            let opened = Image::open(backend.clone(), "x", ImageOpenOptions::default()).await;
            assert_eq!(kind(opened), Some(ErrorKind::NotFound));
            forebay_image::create(&backend, "other", of_size(1)).await.ok();
        }
    });
}

#[test]
fn removing_leaves_nothing_and_tells_how_far_it_is() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(64 * MIB + 1)).await.expect("created");
        let image = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        for offset in [0, 20 * MIB, 64 * MIB] {
            write(&image, offset, b"x").await;
        }
        assert_eq!(kind(forebay_image::remove(&backend, "vm", |_| {}).await), Some(ErrorKind::Busy), "it is open");
        assert_eq!(read(&image, 20 * MIB, 1).await, b"x");
        drop(image);
        let mut told = Vec::new();
        forebay_image::remove(&backend, "vm", |progress| told.push(progress)).await.expect("removed");
        let expected: Vec<ObjectProgress> = [0, 1, 2, 3, 17].map(|done| ObjectProgress { done, total: 17 }).into();
        assert_eq!(told, expected);
        assert_eq!(objects(&backend).await, ["rbd_directory"]);
        assert_eq!(forebay_image::list(&backend).await.expect("listed"), [""; 0]);
    });
}

#[test]
fn a_forced_removal_ends_open_handles() {
    run(async {
        let backend = ram();
        let images = Images::of(&backend);
        images.create("vm", of_size(MIB)).await.expect("created");
        let image = images.open("vm", ImageOpenOptions::default()).await.expect("opened");
        write(&image, 0, b"x").await;
        images.remove("vm", RemoveOptions { force: true }, |_| {}).await.expect("removed");
        let after = image.submit(BlockRequest::Read(Extent::new(0, 1))).await;
        assert_eq!(kind(after), Some(ErrorKind::NotFound));
        assert_eq!(kind(image.resize(2 * MIB, false, |_| {}).await), Some(ErrorKind::NotFound));
        assert_eq!(objects(&backend).await, ["rbd_directory"]);
        // New images of the same name are distinct.
        images.create("vm", of_size(MIB)).await.expect("created again");
        let again = images.open("vm", ImageOpenOptions::default()).await.expect("opened");
        assert_eq!(read(&again, 0, 1).await, [0]);
        assert_eq!(kind(image.submit(BlockRequest::Read(Extent::new(0, 1))).await), Some(ErrorKind::NotFound));
    });
}

#[test]
fn handles_of_one_image_share_its_size() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(MIB)).await.expect("created");
        let one = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        let two = Image::open(backend.clone(), "vm", ImageOpenOptions { read_only: true }).await.expect("opened");
        let watch = two.size_watch().expect("sizes change");
        let told = forebay_reactor::spawn(async move { watch.changed().await });
        forebay_reactor::yield_now().await;
        one.resize(3 * MIB, false, |_| {}).await.expect("resized");
        told.await;
        assert_eq!(two.geometry().size, 3 * MIB);
        assert!(two.geometry().read_only && !one.geometry().read_only);
        write(&one, 2 * MIB, b"beyond the old end").await;
        assert_eq!(read(&two, 2 * MIB, 6).await, b"beyond");
        for refused in [
            BlockRequest::Write { offset: 0, data: bytes(b"x"), fua: false },
            BlockRequest::Discard(Extent::new(0, 1)),
            BlockRequest::WriteZeroes { extent: Extent::new(0, 1), no_unmap: false, fua: false },
            BlockRequest::CompareAndWrite { offset: 0, expect: bytes(b"x"), data: bytes(b"y"), fua: false },
        ] {
            assert_eq!(kind(two.submit(refused).await), Some(ErrorKind::ReadOnly));
        }
        two.submit(BlockRequest::Flush).await.expect("a flush changes nothing");
        assert_eq!(kind(two.resize(MIB, true, |_| {}).await), Some(ErrorKind::ReadOnly));
        // The stored state agrees, for later opens.
        drop((one, two));
        assert_eq!(forebay_image::info(&backend, "vm").await.expect("info").size, 3 * MIB);
    });
}

#[test]
fn shrinking_must_be_meant() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(MIB)).await.expect("created");
        let image = Image::open(backend, "vm", ImageOpenOptions::default()).await.expect("opened");
        assert_eq!(kind(image.resize(MIB - 1, false, |_| {}).await), Some(ErrorKind::Invalid));
        assert_eq!(kind(image.resize(SIZE_MAX + 1, false, |_| {}).await), Some(ErrorKind::Invalid));
        assert_eq!(image.size(), MIB);
        image.resize(MIB - 1, true, |_| {}).await.expect("shrunk");
        assert_eq!(image.size(), MIB - 1);
    });
}

#[test]
fn a_renamed_image_is_the_same_image() {
    run(async {
        let backend = ram();
        let images = Images::of(&backend);
        images.create("old", of_size(MIB)).await.expect("created");
        images.create("taken", of_size(MIB)).await.expect("created");
        let image = images.open("old", ImageOpenOptions::default()).await.expect("opened");
        write(&image, 5, b"content").await;
        assert_eq!(kind(images.rename("old", "taken").await), Some(ErrorKind::Exists));
        assert_eq!(kind(images.rename("old", "old").await), Some(ErrorKind::Exists));
        assert_eq!(kind(images.rename("old", "a/b").await), Some(ErrorKind::Invalid));
        images.rename("old", "new").await.expect("renamed");
        assert_eq!(image.name(), "new");
        assert_eq!(images.list().await.expect("listed"), ["new", "taken"]);
        let again = images.open("new", ImageOpenOptions::default()).await.expect("opened by its new name");
        assert_eq!(read(&again, 5, 7).await, b"content");
        assert_eq!(kind(images.open("old", ImageOpenOptions::default()).await), Some(ErrorKind::NotFound));
        images.create("old", of_size(MIB)).await.expect("the old name is free");
        let ids: Vec<String> = objects(&backend).await.into_iter().filter(|name| name.starts_with("rbd_id.")).collect();
        assert_eq!(ids, ["rbd_id.new", "rbd_id.old", "rbd_id.taken"]);
    });
}

/// Returns the text of an error, and asserts that it has no cause that would repeat it.
fn refusal<T>(result: forebay_block::Result<T>) -> String {
    let error = result.err().expect("a refusal");
    assert!(std::error::Error::source(&error).is_none(), "{error:?}");
    error.to_string()
}

#[test]
fn foreign_images_are_opened_only_if_all_their_features_are_known() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(MIB)).await.expect("created");
        let id = forebay_image::info(&backend, "vm").await.expect("info").id;
        let header = ObjectName::new(format!("rbd_header.{id}"));
        let set = async |key: &str, value: &[u8]| {
            let pairs = vec![(key.as_bytes().to_vec(), value.to_vec())];
            backend.submit(&header, Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
        };
        let open = async |read_only| kind(Image::open(backend.clone(), "vm", ImageOpenOptions { read_only }).await);
        let unsupported = Some(ErrorKind::Unsupported);
        // Features of an ordinary `rbd create`: reading is permitted, writing only with the lock.
        set("features", &0b11_1101u64.to_le_bytes()).await;
        assert_eq!((open(true).await, open(false).await), (None, unsupported));
        assert_eq!(kind(forebay_image::remove(&backend, "vm", |_| {}).await), unsupported);
        let names = forebay_image::info(&backend, "vm").await.expect("info").features.to_string();
        assert_eq!(names, "layering, exclusive-lock, object-map, fast-diff, deep-flatten");
        // Open for reading, it can still not be opened for writing.
        let reader = Image::open(backend.clone(), "vm", ImageOpenOptions { read_only: true }).await.expect("opened");
        assert_eq!(open(false).await, unsupported);
        assert_eq!((kind(reader.allow_writes()), reader.is_read_only()), (unsupported, true));
        drop(reader);
        set("features", &(1u64 << 9).to_le_bytes()).await;
        assert_eq!((open(true).await, open(false).await), (unsupported, unsupported));
        // Each refusal names the image and the operation once, and its cause is not itself.
        for (read_only, bit, text) in [
            (true, 9, "image vm: reading an image with the features migrating: not supported"),
            (false, 9, "image vm: writing an image with the features migrating: not supported"),
            (false, 6, "image vm: writing an image with the features journaling: not supported"),
        ] {
            set("features", &(1u64 << bit).to_le_bytes()).await;
            let opened = Image::open(backend.clone(), "vm", ImageOpenOptions { read_only }).await;
            assert_eq!(refusal(opened), text);
        }
        let removed = forebay_image::remove(&backend, "vm", |_| {}).await;
        assert_eq!(refusal(removed), "removing image vm: it has the features journaling: not supported");
        set("features", &1u64.to_le_bytes()).await;
        assert_eq!((open(true).await, open(false).await), (None, None));
        set("parent", b"anything").await;
        assert_eq!((open(true).await, open(false).await), (Some(ErrorKind::Corrupt), Some(ErrorKind::Corrupt)));
        set("order", &[99]).await;
        assert_eq!((open(true).await, open(false).await), (Some(ErrorKind::Corrupt), Some(ErrorKind::Corrupt)));
    });
}

#[test]
fn writes_keep_what_snapshots_show() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(16 * MIB)).await.expect("created");
        let info = forebay_image::info(&backend, "vm").await.expect("info");
        let image = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        let before = pattern(1, 8 << 20);
        write(&image, 0, &before).await;
        drop(image);
        let snap = backend.snap_allocate().await.expect("a number");
        let pairs = vec![
            (b"snap_seq".to_vec(), snap.0.to_le_bytes().to_vec()),
            (format!("snapshot_{:016x}", snap.0).into_bytes(), encode_snapshot(snap.0, "s", 16 * MIB, None)),
        ];
        let header = ObjectName::new(format!("rbd_header.{}", info.id));
        backend.submit(&header, Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");

        assert_eq!(forebay_image::info(&backend, "vm").await.expect("info").snapshots, 1);
        assert_eq!(kind(forebay_image::remove(&backend, "vm", |_| {}).await), Some(ErrorKind::Busy));
        let image = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        write(&image, 100, b"after the snapshot").await;
        image.submit(BlockRequest::Discard(Extent::new(4 * MIB, 4 * MIB))).await.expect("a discard");
        image.resize(MIB, true, |_| {}).await.expect("shrunk");
        for object in 0..2 {
            let name = ObjectName::new(format!("{}.{object:016x}", info.block_name_prefix));
            let extent = Extent::new(0, 4 * MIB);
            let kept = backend.read(&name, ObjectRead::new(snap, extent)).await.expect("kept");
            let from = (object * 4 * MIB) as usize;
            assert!(kept.fill(extent).to_vec() == before[from..from + (4 << 20)], "object {object} at the snapshot");
            let set = backend.snap_set(&name).await.expect("clones");
            assert_eq!((set.seq, set.head_exists), (snap.0, object == 0));
        }
    });
}

#[test]
fn usage_counts_what_is_stored() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "vm", of_size(100 * MIB)).await.expect("created");
        let image = Image::open(backend, "vm", ImageOpenOptions::default()).await.expect("opened");
        let usage = async || image.usage().await.map(|usage| (usage.provisioned, usage.used)).expect("usage");
        assert_eq!(usage().await, (100 * MIB, 0));
        write(&image, 3 * MIB, &pattern(1, 2 << 20)).await;
        assert_eq!(usage().await, (100 * MIB, 2 * MIB));
        image.submit(BlockRequest::Discard(Extent::new(0, 4 * MIB))).await.expect("a discard");
        assert_eq!(usage().await, (100 * MIB, MIB));
        let mut told = Vec::new();
        image.usage_with_progress(|progress| told.push(progress.done)).await.expect("usage");
        assert_eq!(told, [0, 1, 25]);
    });
}

#[test]
fn a_full_pool_refuses_the_creation_and_is_left_clean() {
    run(async {
        // Capacity of one page: enough for the id of one image.
        let backend: Rc<dyn ObjectBackend> = RamBackend::with_capacity("ram", 4096);
        forebay_image::create(&backend, "a", of_size(MIB)).await.expect("created");
        assert_eq!(kind(forebay_image::create(&backend, "b", of_size(MIB)).await), Some(ErrorKind::NoSpace));
        assert_eq!(forebay_image::list(&backend).await.expect("listed"), ["a"]);
        assert_eq!(objects(&backend).await.len(), 3);
        forebay_image::remove(&backend, "a", |_| {}).await.expect("removed");
        forebay_image::create(&backend, "b", of_size(MIB)).await.expect("now there is room");
    });
}

#[test]
fn metadata_is_kept_with_the_image() {
    run(async {
        let backend = ram();
        forebay_image::create(&backend, "x", of_size(MIB)).await.expect("created");
        let image = Image::open(backend.clone(), "x", ImageOpenOptions::default()).await.expect("opened");
        assert_eq!(image.metadata("k").await.expect("read"), None);
        image.set_metadata("k", Some(b"one".to_vec())).await.expect("set");
        image.set_metadata("k", Some(b"two".to_vec())).await.expect("replaced");
        let (two, three) = (Some(b"two".to_vec()), Some(b"three".to_vec()));
        assert!(!image.replace_metadata("k", None, three.clone()).await.expect("compared"), "it is set");
        assert!(!image.replace_metadata("k", three.clone(), None).await.expect("compared"), "to something else");
        assert!(image.replace_metadata("k", two.clone(), three.clone()).await.expect("compared"));
        assert!(image.replace_metadata("k", three, two).await.expect("compared"));
        assert!(image.replace_metadata("absent", None, Some(b"x".to_vec())).await.expect("compared"));
        assert!(image.replace_metadata("absent", Some(b"x".to_vec()), None).await.expect("compared"));
        drop(image);
        forebay_image::rename(&backend, "x", "y").await.expect("renamed");
        let image = Image::open(backend.clone(), "y", ImageOpenOptions { read_only: true }).await.expect("opened");
        assert_eq!(image.metadata("k").await.expect("read").as_deref(), Some(&b"two"[..]));
        assert_eq!(kind(image.set_metadata("k", None).await), Some(ErrorKind::ReadOnly));
        let writable = Image::open(backend.clone(), "y", ImageOpenOptions::default()).await.expect("opened");
        // Stored like librbd does: the bare bytes under the prefixed key.
        let header = ObjectName::new(format!("rbd_header.{}", image.id()));
        let stored = backend.kv_get(&header, vec![b"metadata_k".to_vec()]).await.expect("keys");
        assert_eq!(stored, [Some(b"two".to_vec())]);
        writable.set_metadata("k", None).await.expect("removed");
        writable.set_metadata("k", None).await.expect("removed again");
        assert_eq!(image.metadata("k").await.expect("read"), None);
    });
}

#[test]
fn what_an_image_could_have_and_has_not_is_no_work() {
    const TIB: u64 = 1 << 40;
    run(async {
        let stormy = Stormy::new(2, 0);
        let backend: Rc<dyn ObjectBackend> = stormy.clone();
        forebay_image::create(&backend, "vm", of_size(64 * TIB)).await.expect("created");
        let image = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        let places = [0, 5 * MIB, TIB, 30 * TIB, 64 * TIB - 4096];
        for offset in places {
            write(&image, offset, &pattern(1, 4096)).await;
        }
        assert_eq!(image.usage().await.expect("usage").used, 5 * 4096);
        let map = image.map(Extent::new(TIB - MIB, TIB)).await.expect("a map");
        let data: Vec<Extent> =
            map.runs().iter().filter(|run| run.state == ExtentState::Data).map(|run| run.extent).collect();
        assert_eq!(data, [Extent::new(TIB, 4096)]);
        stormy.count();
        let zeroes = BlockRequest::WriteZeroes { extent: Extent::new(MIB, 2 * TIB), no_unmap: false, fua: false };
        image.submit(zeroes).await.expect("zeroes");
        assert_eq!(image.usage().await.expect("usage").used, 3 * 4096);
        image.resize(2 * TIB, true, |_| {}).await.expect("a smaller one");
        assert_eq!(image.usage().await.expect("usage").used, 4096);
        drop(image);
        forebay_image::remove(&backend, "vm", |_| {}).await.expect("removed");
        assert!(stormy.counted().0 < 20, "{} transactions for 5 objects", stormy.counted().0);
        assert_eq!(objects(&backend).await, ["rbd_directory"]);
    });
}
