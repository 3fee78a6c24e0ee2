//! Metadata by prefix: of images that others have open, and of pools.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectName};
use forebay_image::Images;
use forebay_ram::RamBackend;

use crate::common::cluster::{OBJECT, cluster, kind, kv, of_size, two_clients};
use crate::common::run;

fn text(found: &[(String, Vec<u8>)]) -> Vec<(&str, &str)> {
    found.iter().map(|(key, value)| (key.as_str(), str::from_utf8(value).expect("a text"))).collect()
}

#[test]
fn metadata_is_listed_by_prefix_and_others_are_told_of_changes() {
    run(async {
        let cluster = cluster(3, 2);
        let ([a, b], [one, _two]) = two_clients(&cluster, OBJECT).await;
        let told = Rc::new(Cell::new(0));
        let count = told.clone();
        one.set_header_hook(Rc::new(move || count.set(count.get() + 1)));
        let images = Images::of(&b);
        for option in 0..150 {
            let key = format!("conf_rbd_{option:03}");
            assert!(images.change_image_metadata("vm", &key, Some(b"7".to_vec())).await.expect("set"));
        }
        assert_eq!(told.get(), 150, "each change is known when it is answered");
        one.set_metadata("other", Some(b"1".to_vec())).await.expect("set");
        let found = Images::of(&a).image_metadata("vm", "conf_").await.expect("listed");
        assert_eq!((found.len(), text(&found)[149]), (150, ("conf_rbd_149", "7")));
        assert_eq!(one.metadata_reader().image_metadata("conf_").await.expect("listed"), found);
        // The bytes are those of the class: the plain value under `metadata_KEY` in the header.
        let key = b"metadata_conf_rbd_000".to_vec();
        let stored = a.kv_get(&ObjectName::new(format!("rbd_header.{}", one.id())), vec![key]).await;
        assert_eq!(stored.expect("read"), [Some(b"7".to_vec())]);
        assert!(images.change_image_metadata("vm", "conf_rbd_000", None).await.expect("removed"));
        assert!(!images.change_image_metadata("vm", "conf_rbd_000", None).await.expect("not there"));
        assert_eq!(told.get(), 151, "nothing is told of nothing");
        assert_eq!(images.image_metadata("vm", "conf_").await.expect("listed").len(), 149);
        let missing = images.change_image_metadata("none", "conf_rbd_a", Some(Vec::new())).await;
        assert_eq!(kind(missing), Some(ErrorKind::NotFound));
        assert_eq!(kind(images.image_metadata("none", "conf_").await), Some(ErrorKind::NotFound));
        let long = images.change_image_metadata("vm", "k", Some(vec![0; (1 << 20) + 1])).await;
        assert_eq!(kind(long), Some(ErrorKind::Invalid));
    });
}

#[test]
fn a_pool_has_metadata_of_its_own() {
    run(async {
        let cluster = cluster(4, 2);
        let ([shared, _], _images) = two_clients(&cluster, OBJECT).await;
        let alone: Rc<dyn forebay_block::ObjectBackend> = RamBackend::new("ram");
        forebay_image::create(&alone, "vm", of_size(OBJECT)).await.expect("created");
        for backend in [shared, alone] {
            let images = Images::of(&backend);
            assert_eq!(images.pool_metadata("conf_").await.expect("none yet"), []);
            assert!(!images.change_pool_metadata("conf_rbd_x", None).await.expect("not there"));
            assert!(images.change_pool_metadata("conf_rbd_x", Some(b"500".to_vec())).await.expect("set"));
            // As 'rbd config pool set' stores one.
            kv(&*backend, "rbd_info", vec![("metadata_conf_rbd_qos_bps_limit".into(), b"1K".to_vec())]).await;
            let found = images.pool_metadata("conf_").await.expect("listed");
            assert_eq!(text(&found), [("conf_rbd_qos_bps_limit", "1K"), ("conf_rbd_x", "500")]);
            assert!(images.change_pool_metadata("conf_rbd_x", None).await.expect("removed"));
            assert_eq!(images.pool_metadata("conf_").await.expect("listed").len(), 1);
            assert_eq!(images.list().await.expect("images"), ["vm"], "it is no image's");
        }
    });
}
