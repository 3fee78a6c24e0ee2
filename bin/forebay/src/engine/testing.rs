//! Engines for tests.

use std::path::Path;
use std::rc::Rc;

use forebay_image::{self as image, CreateOptions};
use forebay_ram::cluster::{RamClient, RamCluster};
use forebay_reactor::yield_now;
use forebay_store::InitOptions;

use super::{Engine, EngineOptions, store};
use crate::ops::ProgressSink;
use crate::spec::ImageSpec;

/// Id of the pool `rbd` of [`engine_with_cluster`]; `data` has the next id.
pub(super) const POOL: i64 = 1;

/// Creates an engine with an empty store, or opens it again.
pub(super) async fn engine(dir: &Path) -> Rc<Engine> {
    let path = dir.join("store.img");
    if !path.exists() {
        let options = InitOptions { size: 64 << 20, ..InitOptions::default() };
        store::init(&path, options, ProgressSink::channel().0).await.expect("a store");
    }
    let options = EngineOptions {
        data: dir.into(),
        store: path,
        opens_store: true,
        master_key: None,
        ceph: Default::default(),
        controls: Vec::new(),
        daemon: None,
    };
    Engine::open(options).await.expect("an engine")
}

/// Creates an engine with the pools of a cluster, one of its clients, and an image in the pool `rbd` whose data
/// is in `data`.
pub(super) async fn engine_with_cluster(dir: &Path) -> (Rc<Engine>, RamCluster, RamClient, ImageSpec) {
    let cluster = RamCluster::new(1, 0);
    assert_eq!((cluster.add_pool("rbd"), cluster.add_pool("data")), (POOL, POOL + 1));
    let client = cluster.client();
    let pool = client.pool(POOL);
    let options = CreateOptions { size: 8 << 20, data_pool: Some("data".into()), ..CreateOptions::default() };
    image::create(&pool, "x", options).await.expect("an image");
    (engine_of_client(dir, &client).await, cluster, client, "rbd/x".parse().expect("a spec"))
}

/// Creates an engine, or opens it again, that reaches the pool `rbd` of a cluster as this client.
pub(super) async fn engine_of_client(dir: &Path, client: &RamClient) -> Rc<Engine> {
    let mut engine = engine(dir).await;
    engine.this.take();
    Rc::get_mut(&mut engine).expect("the only handle").pools.insert("rbd", client.pool(POOL));
    *engine.this.borrow_mut() = Rc::downgrade(&engine);
    engine
}

/// Waits until a condition holds that only this reactor can bring about.
pub(super) async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        yield_now().await;
    }
}
