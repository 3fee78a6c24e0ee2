//! Helpers for tests of images that several clients use at once.

use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SnapId,
    Transaction,
};
use forebay_image::{CreateOptions, Image, ImageFeatures, ImageOpenOptions};
use forebay_ram::cluster::RamCluster;
use forebay_ram::cluster::rbd::ClosedImage;
use forebay_reactor::yield_now;

use super::{bytes, pattern};

pub const OBJECT: u64 = 64 << 10;
pub const POOL: i64 = 1;

/// Returns a cluster with one pool, whose responses are up to `late` turns late.
pub fn cluster(seed: u64, late: u64) -> RamCluster {
    let cluster = RamCluster::new(seed, late);
    assert_eq!(cluster.add_pool("rbd"), POOL);
    cluster
}

/// Returns the options of an image with small objects.
pub fn of_size(size: u64) -> CreateOptions {
    CreateOptions { size, object_size: OBJECT, ..CreateOptions::default() }
}

pub fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

pub async fn open(backend: &Rc<dyn ObjectBackend>, name: &str) -> Rc<Image> {
    Image::open(backend.clone(), name, ImageOpenOptions::default()).await.expect("opened")
}

/// Creates an image with small objects and opens it.
pub async fn create_and_open(backend: &Rc<dyn ObjectBackend>, name: &str, size: u64) -> Rc<Image> {
    forebay_image::create(backend, name, of_size(size)).await.expect("created");
    open(backend, name).await
}

/// Returns two clients of a cluster, each with the image `vm` of small objects open.
pub async fn two_clients(cluster: &RamCluster, size: u64) -> ([Rc<dyn ObjectBackend>; 2], [Rc<Image>; 2]) {
    let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
    let first = create_and_open(&backends[0], "vm", size).await;
    let second = open(&backends[1], "vm").await;
    (backends, [first, second])
}

pub async fn write(image: &Image, offset: u64, data: &[u8]) {
    image.submit(BlockRequest::Write { offset, data: bytes(data), fua: false }).await.expect("a write");
}

pub async fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    image.submit(BlockRequest::Read(Extent::new(offset, len))).await.expect("a read").into_data().to_vec()
}

pub async fn names(backend: &dyn ObjectBackend) -> Vec<String> {
    let page = backend.list(None, None, 100_000).await.expect("a listing");
    page.names.iter().map(ToString::to_string).collect()
}

pub async fn kv(backend: &dyn ObjectBackend, object: &str, pairs: Vec<(String, Vec<u8>)>) {
    let pairs = pairs.into_iter().map(|(key, value)| (key.into_bytes(), value)).collect();
    backend.submit(&ObjectName::new(object), Transaction::of(ObjectOp::KvSet { pairs })).await.expect("keys");
}

/// Returns the states of a stored object map, decoded independently of the crate.
pub async fn map_of(backend: &dyn ObjectBackend, name: &str) -> Vec<u8> {
    let name = ObjectName::new(name);
    let size = backend.stat(&name, SnapId::HEAD).await.expect("an object map").size;
    let data = backend.read(&name, ObjectRead::head(0, size)).await.expect("read").fill(Extent::new(0, size)).to_vec();
    let count = u64::from_le_bytes(data[10..18].try_into().expect("8 bytes")) as usize;
    (0..count).map(|object| data[18 + object / 4] >> (6 - object % 4 * 2) & 3).collect()
}

/// Asserts that the object map covers every existing object, and that no object is left pending.
pub async fn check_map(backend: &dyn ObjectBackend, id: &str) {
    let map = map_of(backend, &format!("rbd_object_map.{id}")).await;
    for name in names(backend).await {
        if let Some(object) = name.strip_prefix(&format!("rbd_data.{id}.")) {
            let object = usize::from_str_radix(object, 16).expect("a number");
            assert_ne!(map[object], 0, "object {object} is there");
        }
    }
    assert!(map.iter().all(|state| *state != 2), "an object is marked as being removed: {map:?}");
}

pub async fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        yield_now().await;
    }
}

async fn closed(backend: &Rc<dyn ObjectBackend>, image: &str) -> ClosedImage {
    let info = forebay_image::info(backend, image).await.expect("info");
    let mapped = info.features.has(ImageFeatures::OBJECT_MAP).then(|| info.size.div_ceil(info.object_size));
    ClosedImage { id: info.id, size: info.size, mapped, overlap: None }
}

/// Takes a snapshot of a closed image, as `rbd` does.
pub async fn take_snapshot(backend: &Rc<dyn ObjectBackend>, image: &str, name: &str, overlap: Option<u64>) -> u64 {
    let closed = ClosedImage { overlap, ..closed(backend, image).await };
    closed.take_snapshot(&**backend, name).await.expect("a snapshot")
}

/// Makes `child`, an empty existing image, a clone.
pub async fn make_clone(backend: &Rc<dyn ObjectBackend>, child: &str, of: &str, snap: u64, overlap: u64) {
    make_clone_of(backend, child, (backend, POOL, of), snap, overlap).await;
}

/// Makes `child` a clone of an image in a given pool.
pub async fn make_clone_of(
    backend: &Rc<dyn ObjectBackend>,
    child: &str,
    (pool, number, of): (&Rc<dyn ObjectBackend>, i64, &str),
    snap: u64,
    overlap: u64,
) {
    let parent = closed(pool, of).await.id;
    let child = closed(backend, child).await;
    child.set_parent(&**backend, number, &parent, snap, overlap).await.expect("a clone");
}

/// Returns a clone with a snapshot, in which shrinking copies up: its id, contents and overlap with its parent.
pub async fn clone_with_snapshot(backend: &Rc<dyn ObjectBackend>) -> (String, Vec<u8>) {
    let content = pattern(4, 6 * OBJECT as usize);
    forebay_image::create(backend, "base", of_size(6 * OBJECT)).await.expect("created");
    let base = open(backend, "base").await;
    write(&base, 0, &content).await;
    base.close().await;
    let snap = take_snapshot(backend, "base", "gold", None).await;
    forebay_image::create(backend, "child", of_size(6 * OBJECT)).await.expect("created");
    make_clone(backend, "child", "base", snap, 6 * OBJECT).await;
    take_snapshot(backend, "child", "kept", Some(6 * OBJECT)).await;
    let id = forebay_image::info(backend, "child").await.expect("info").id;
    (id, content)
}
