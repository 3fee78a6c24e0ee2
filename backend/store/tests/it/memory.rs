//! Tests that resident metadata stays within its bound, regardless of how much is stored.

use std::path::Path;
use std::rc::Rc;

use forebay_block::*;
use forebay_sim::Faults;
use forebay_store::{InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};

const MIB: u64 = 1 << 20;
/// Metadata cache of the store in bytes; the object maps on disk are many times larger.
const CACHE: usize = 512 << 10;

async fn open() -> Rc<Store> {
    let options = StoreOptions { metadata_cache: CACHE, ..StoreOptions::default() };
    Store::open(Path::new(DISK), options).await.expect("open")
}

fn name(object: u64) -> ObjectName {
    ObjectName::new(format!("rbd_data.1234567890ab.{object:016x}"))
}

/// Maximum metadata memory observed.
struct Most {
    bytes: u64,
}

impl Most {
    fn look(&mut self, store: &Store) {
        self.bytes = self.bytes.max(store.stats().metadata_bytes);
    }
}

#[test]
fn metadata_in_memory_does_not_grow_with_what_is_stored() {
    const OBJECTS: u64 = 1500;
    const BLOCKS: u64 = 12;
    let world = machine(512 * MIB, Faults::none());
    let mut most = Most { bytes: 0 };
    let data: BufList = Buf::copy_of(&[7; 4096]).into();
    run(&world, async {
        let options = InitOptions { size: 512 * MIB, segment_size: 1 << 20, ..InitOptions::default() };
        Store::init(Path::new(DISK), options).await.expect("init");
        let store = open().await;
        for round in 0..BLOCKS {
            for object in 0..OBJECTS {
                // Far apart within the object, so that each block has its own map page.
                let offset = round * 128 * 4096;
                let write = ObjectOp::Write { offset, data: data.clone() };
                let set = ObjectOp::KvSet { pairs: vec![(format!("key {round}").into_bytes(), vec![1; 200])] };
                store.submit(&name(object), Transaction::new(vec![write, set])).await.expect("write");
                most.look(&store);
            }
        }
        store.flush().await.expect("flush");
        store.close().await.expect("close");
    });
    // Pages, keys and records: memory that tree and maps would need if completely loaded.
    let stored = OBJECTS * BLOCKS * (16 * 128 + 300);
    assert!(stored > 64 * CACHE as u64, "{stored} bytes of metadata are no test of {CACHE}");
    let mut seed = 1_u64;
    run(&world, async {
        let store = open().await;
        for _ in 0..6000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (object, round) = ((seed >> 20) % OBJECTS, (seed >> 50) % BLOCKS);
            let found = store.read(&name(object), ObjectRead::head(round * 128 * 4096, 4096)).await.expect("read");
            assert_eq!(found.runs.len(), 1);
            let key = format!("key {round}").into_bytes();
            assert_eq!(store.kv_get(&name(object), vec![key]).await.expect("key"), [Some(vec![1; 200])]);
            most.look(&store);
        }
        let mut cursor = None;
        let mut listed = 0;
        loop {
            let page = store.list(None, cursor, 100).await.expect("list");
            listed += page.names.len() as u64;
            cursor = page.next;
            most.look(&store);
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(listed, OBJECTS);
        assert!(store.stats().page_loads > 3000, "it was read from the device");
        store.close().await.expect("close");
    });
    // Metadata in use at a given moment is added: by default 60 MiB, of a bound of 64.
    let bound = CACHE as u64 * 64 / 60;
    assert!(most.bytes <= bound, "{} bytes in memory, of {bound}", most.bytes);
}
