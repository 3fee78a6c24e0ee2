use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectName, ObjectOp, Transaction};
use forebay_gateways::record::GROUP_KEY;
use forebay_gateways::store::{GroupStore, OBJECT_PREFIX};
use forebay_gateways::{ChangeRefusal, GroupChange, StartId, VolumeName};
use forebay_ram::RamBackend;
use forebay_ram::cluster::RamCluster;
use forebay_reactor::sync::join_all;

use crate::{entry, eventually, identity, member, run};

fn volume(number: u32) -> VolumeName {
    VolumeName::new(format!("rbd/disk{number:04}"))
}

fn add(number: u32, owner: u8) -> GroupChange {
    GroupChange::AddVolume { volume: volume(number), owner: member(owner), settings: serde_json::Value::Null }
}

fn join(number: u8) -> GroupChange {
    GroupChange::Join { member: member(number), entry: entry(number.into(), number, format!("10.0.0.{number}:0/1")) }
}

#[test]
fn a_record_is_changed_by_several_at_once_and_announced() {
    run(async {
        let cluster = RamCluster::new(1, 20);
        let pool = cluster.add_pool("rbd");
        let clients: Vec<_> = (0..3).map(|_| cluster.client()).collect();
        let stores: Vec<_> = clients.iter().map(|client| GroupStore::new(&client.pool(pool), "g").unwrap()).collect();
        assert_eq!(stores[0].load().await.unwrap_err().kind(), ErrorKind::NotFound);
        stores[0].create(identity()).await.unwrap();
        assert_eq!(stores[1].create(identity()).await.unwrap_err().kind(), ErrorKind::Exists);
        let mut watches = Vec::new();
        for store in &stores {
            store.load().await.unwrap();
            let reader = store.clone();
            let changed = move |must_read: bool| {
                let reader = reader.clone();
                // Announcements that come in another order do not follow each other.
                drop(must_read.then(|| forebay_reactor::spawn(async move { reader.refresh().await.map(drop) })));
            };
            watches.push(store.watch(changed).await.unwrap());
        }
        stores[2].change(&[join(1), join(2)]).await.unwrap().unwrap();
        let all = stores.iter().enumerate().map(|(at, store)| {
            let store = store.clone();
            Box::pin(async move {
                for number in 0..40 {
                    store.change(&[add(100 * at as u32 + number, 1)]).await.unwrap().unwrap();
                }
            })
        });
        join_all(all).await;
        for store in &stores {
            eventually("all changes are known", || store.known().unwrap().epoch() == 122).await;
        }
        let read = GroupStore::new(&clients[0].pool(pool), "g").unwrap().load().await.unwrap();
        assert_eq!(read.volumes().len(), 120);
        assert!(stores.iter().all(|store| *store.known().unwrap() == *read));
        let refused = stores[0].change(&[add(0, 2)]).await.unwrap();
        assert_eq!(refused.unwrap_err(), ChangeRefusal::VolumeExists);
    });
}

#[test]
fn a_large_record_is_read_in_pages_while_it_changes() {
    run(async {
        let cluster = RamCluster::new(2, 3);
        let pool = cluster.add_pool("rbd");
        let [one, other] = [(); 2].map(|()| GroupStore::new(&cluster.client().pool(pool), "large").unwrap());
        one.create(identity()).await.unwrap();
        one.change(&[join(1)]).await.unwrap().unwrap();
        let volumes: Vec<_> = (0..3000).map(|number| add(number, 1)).collect();
        one.change(&volumes).await.unwrap().unwrap();
        let changing = one.clone();
        let changes = forebay_reactor::spawn(async move {
            for number in 0..5 {
                let (by, start) = (member(1), StartId([1; 16]));
                let leaves = GroupChange::RemoveVolume { volume: volume(number) };
                let gone = GroupChange::ForgetVolume { volume: volume(number), by, start };
                changing.change(&[leaves, gone, add(10_000 - number, 1)]).await.unwrap().unwrap();
            }
        });
        // Never parts of two epochs: each has as many volumes.
        for _ in 0..5 {
            assert_eq!(other.load().await.unwrap().volumes().len(), 3000);
        }
        changes.await;
    });
}

#[test]
fn what_cannot_be_a_record_is_refused_by_name() {
    run(async {
        let local: Rc<dyn forebay_block::ObjectBackend> = RamBackend::new("local");
        assert_eq!(GroupStore::new(&local, "g").err().unwrap().kind(), ErrorKind::Unsupported);
        let cluster = RamCluster::new(3, 0);
        let pool = cluster.add_pool("rbd");
        let backend = cluster.client().pool(pool);
        for name in ["", "a/b", "a@b", "a\nb", &"x".repeat(201)] {
            assert_eq!(GroupStore::new(&backend, name).err().unwrap().kind(), ErrorKind::Invalid, "{name}");
        }
        let store = GroupStore::new(&backend, "g").unwrap();
        let object = ObjectName::new(format!("{OBJECT_PREFIX}g"));
        let set = |value: &str| Transaction::of(ObjectOp::KvSet { pairs: vec![(GROUP_KEY.to_vec(), value.into())] });
        for (value, kind) in [("{", ErrorKind::Corrupt), (r#"{"version":9}"#, ErrorKind::Unsupported)] {
            backend.submit(&object, set(value)).await.unwrap();
            let error = store.load().await.unwrap_err();
            assert_eq!(error.kind(), kind);
            assert!(error.to_string().contains("gateway group 'g'"), "{error}");
        }
    });
}

#[test]
fn an_entry_that_was_written_with_other_fields_is_changed_all_the_same() {
    run(async {
        let cluster = RamCluster::new(4, 0);
        let pool = cluster.add_pool("rbd");
        let backend = cluster.client().pool(pool);
        let store = GroupStore::new(&backend, "g").unwrap();
        store.create(identity()).await.unwrap();
        store.change(&[join(1)]).await.unwrap().unwrap();
        // A later version of the same format has a field more.
        let object = ObjectName::new(format!("{OBJECT_PREFIX}g"));
        let stored = backend.kv_get(&object, vec![GROUP_KEY.to_vec()]).await.unwrap().pop().unwrap().unwrap();
        let other = String::from_utf8(stored).unwrap().replacen('{', r#"{"color":"blue","#, 1);
        let set = ObjectOp::KvSet { pairs: vec![(GROUP_KEY.to_vec(), other.into_bytes())] };
        backend.submit(&object, Transaction::of(set)).await.unwrap();
        store.change(&[add(1, 1)]).await.unwrap().unwrap();
        assert_eq!(store.remove().await.unwrap_err().kind(), ErrorKind::Busy);
        let leave = GroupChange::Leave { member: member(1), now: 0 };
        let leaves = GroupChange::RemoveVolume { volume: volume(1) };
        let gone = GroupChange::ForgetVolume { volume: volume(1), by: member(1), start: StartId([1; 16]) };
        store.change(&[leaves, gone, leave]).await.unwrap().unwrap();
        store.remove().await.unwrap();
        assert_eq!(store.remove().await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}
