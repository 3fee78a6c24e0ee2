//! Resizes and the exclusive lock where operations of the pool fail, and what a release makes durable.

use std::rc::Rc;

use crate::common::cluster::{OBJECT, POOL, check_map, cluster, create_and_open, of_size, open, read, write};
use crate::common::failing::{Failing, FailingPool};
use crate::common::{pattern, run};
use forebay_block::{Method, ObjectBackend};
use forebay_image::{CreateOptions, ImageFeatures};

#[test]
fn a_shrink_is_done_when_its_size_is_stored() {
    run(async {
        let cluster = cluster(5, 2);
        let pool = FailingPool::new(cluster.client().pool(POOL), None);
        let backend: Rc<dyn ObjectBackend> = pool.clone();
        let image = create_and_open(&backend, "vm", 4 * OBJECT).await;
        write(&image, 0, &pattern(1, 4 * OBJECT as usize)).await;
        pool.fail(Failing::Call(Method::new("rbd", "object_map_resize")));
        image.resize(2 * OBJECT, true, |_| {}).await.expect("the new size is stored");
        assert_eq!(image.size(), 2 * OBJECT);
        let stored = forebay_image::info(&cluster.client().pool(POOL), "vm").await.expect("info");
        assert_eq!(stored.size, 2 * OBJECT);
        check_map(&*cluster.bare(POOL), image.id()).await;
        // A grow updates the map before it stores the size.
        let refused = image.resize(6 * OBJECT, false, |_| {}).await;
        assert!(refused.is_err() && image.size() == 2 * OBJECT);
        pool.fail(Failing::Nothing);
        image.resize(6 * OBJECT, false, |_| {}).await.expect("resized");
        assert!(read(&image, 2 * OBJECT, 4 * OBJECT).await == [0; 4 * OBJECT as usize]);
        check_map(&*cluster.bare(POOL), image.id()).await;
    });
}

#[test]
fn a_resize_is_done_although_the_header_cannot_be_read_again() {
    run(async {
        let cluster = cluster(6, 2);
        let pool = FailingPool::new(cluster.client().pool(POOL), None);
        let backend: Rc<dyn ObjectBackend> = pool.clone();
        let image = create_and_open(&backend, "vm", 4 * OBJECT).await;
        write(&image, 0, b"holds the lock").await;
        for (size, next) in [(6 * OBJECT, 5 * OBJECT), (3 * OBJECT, 4 * OBJECT)] {
            pool.fail(Failing::Keys);
            image.resize(size, true, |_| {}).await.expect("the new size is stored");
            assert_eq!(image.size(), size);
            pool.fail(Failing::Nothing);
            assert_eq!(forebay_image::info(&cluster.client().pool(POOL), "vm").await.expect("info").size, size);
            image.resize(next, true, |_| {}).await.expect("the header is read first");
            assert_eq!(image.size(), next);
        }
        check_map(&*cluster.bare(POOL), image.id()).await;
    });
}

#[test]
fn a_release_of_the_lock_flushes_both_pools() {
    run(async {
        let cluster = cluster(7, 1);
        let number = cluster.add_pool("data");
        let client = cluster.client();
        let data = FailingPool::new(client.pool(number), None);
        let pool = FailingPool::new(client.pool(POOL), Some((number, data.clone())));
        let backend: Rc<dyn ObjectBackend> = pool.clone();
        let features = Some(ImageFeatures(ImageFeatures::RBD_DEFAULT.0 | ImageFeatures::DATA_POOL.0));
        let options = CreateOptions { data_pool: Some("data".into()), features, ..of_size(4 * OBJECT) };
        forebay_image::create(&backend, "vm", options).await.expect("created");
        let image = open(&backend, "vm").await;
        write(&image, 0, b"x").await;
        let before = (pool.flushes(), data.flushes());
        image.close().await;
        assert_eq!((pool.flushes() - before.0, data.flushes() - before.1), (1, 1));
    });
}
