//! Tweaks over many lives with crashes: none is used for two contents.

use std::path::Path;

use forebay_block::{Buf, ErrorKind, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Transaction};
use forebay_sim::{CrashKind, CrashPolicy, Faults, World};

use super::cipher::recorder;
use super::master::MasterKey;
use crate::format::batch::BatchHeader;
use crate::segment_uses::SegmentUses;
use crate::{CheckOptions, InitOptions, Store, StoreOptions};

const DISK: &str = "/disk";

fn options() -> StoreOptions {
    StoreOptions { master_key: Some(MasterKey::from_bytes([7; 32])), ..StoreOptions::default() }
}

#[test]
fn no_tweak_is_used_for_two_contents() {
    for seed in 0..20 {
        let crash = [CrashPolicy::LoseAll, CrashPolicy::Seeded, CrashPolicy::KeepAll][seed as usize % 3];
        let world = World::new(seed, Faults { crash, ..Faults::none() });
        world.add_file(DISK, 8 << 20, 4096);
        recorder::start();
        let mut state = seed * 99 + 1;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let mut cleaned = 0;
        for life in 0..8 {
            let reactor = world.reactor();
            let ran = world.run(&reactor, async {
                if life == 0 {
                    let init = InitOptions { size: 8 << 20, segment_size: 128 << 10, ..InitOptions::default() };
                    Store::init(Path::new(DISK), init).await.expect("init");
                }
                let store = Store::open(Path::new(DISK), options()).await.expect("open");
                // One key only, since the recorder does not tell keys apart.
                store.encrypt(&ObjectName::new("rbd_data.a.")).await.expect("a key");
                for _ in 0..next() % 400 {
                    let name = ObjectName::new(format!("rbd_data.a.{}", next() % 3));
                    let blocks = 1 + next() % 24;
                    let mut data = vec![0; blocks as usize * 4096];
                    data.chunks_mut(64).for_each(|part| part[..8].copy_from_slice(&next().to_le_bytes()));
                    let op = ObjectOp::Write { offset: next() % 200 * 4096, data: Buf::copy_of(&data).into() };
                    let policy = forebay_block::DataPolicy {
                        compression: if next() % 2 == 0 { forebay_block::Compression::Lz4 } else { Default::default() },
                    };
                    if next() % 50 == 0 {
                        store.set_data_policy(&ObjectName::new("rbd_data.a."), Some(policy)).await.expect("a policy");
                    }
                    match store.submit(&name, Transaction::of(op)).await {
                        Err(error) if error.kind() == ErrorKind::NoSpace => {}
                        done => drop(done.expect("write")),
                    }
                }
                cleaned += store.stats().cleaned_bytes;
                if next() % 3 == 0 {
                    store.close().await.expect("close");
                }
            });
            ran.unwrap_or_else(|stop| panic!("seed {seed}, life {life}: {stop}"));
            world.crash(reactor, if next() % 2 == 0 { CrashKind::Power } else { CrashKind::Kill });
        }
        let reactor = world.reactor();
        let report = world.run(&reactor, async {
            let store = Store::open(Path::new(DISK), options()).await.expect("open");
            store.close().await.expect("close");
            drop(store);
            Store::check(Path::new(DISK), CheckOptions { data: true, ..CheckOptions::default() }, |_, _| {}).await
        });
        let report = report.expect("runs").expect("check");
        assert!(report.is_clean(), "seed {seed}: {report:#?}");
        assert!(recorder::stop() > 100, "seed {seed}: nothing was encrypted");
        assert!(cleaned > 0 || seed % 4 != 0, "seed {seed}: nothing was cleaned");
    }
}

#[test]
fn uses_of_segments_are_found_in_their_first_batches() {
    let world = World::new(3, Faults::none());
    world.add_file(DISK, 8 << 20, 4096);
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let init = InitOptions { size: 8 << 20, segment_size: 128 << 10, ..InitOptions::default() };
        Store::init(Path::new(DISK), init).await.expect("init");
        let options = || StoreOptions { data_cache: 0, ..options() };
        let store = Store::open(Path::new(DISK), options()).await.expect("open");
        store.encrypt(&ObjectName::new("rbd_data.a.")).await.expect("a key");
        let name = ObjectName::new("rbd_data.a.0");
        let content = |block: u64| [block.to_le_bytes(); 512].concat();
        for block in 0..300 {
            let op = ObjectOp::Write { offset: block * 4096, data: Buf::copy_of(&content(block)).into() };
            store.submit(&name, Transaction::of(op)).await.expect("write");
        }
        store.close().await.expect("close");
        drop(store);
        let store = Store::open(Path::new(DISK), options()).await.expect("open");
        let read = async |block: u64| {
            let read = ObjectRead::head(block * 4096, 4096);
            store.read(&name, read).await.map(|found| found.fill(read.extent).to_vec())
        };
        let forget = || store.core.segments.borrow_mut().uses = SegmentUses::default();
        // As if the nodes of the tree that have them were damaged.
        forget();
        for block in 0..300 {
            assert!(read(block).await.expect("read") == content(block), "block {block}");
        }
        // What the two places say is the same.
        let saved = store.core.index.lookup_range(b"u", b"v", 1000).await.expect("uses");
        assert!(saved.len() > 10);
        for (key, value) in saved {
            let segment = u32::from_be_bytes(key[1..].try_into().expect("four bytes"));
            let found = store.core.segments.borrow().uses.of(segment);
            assert!(found.is_none_or(|found| found.to_le_bytes() == value[..]), "segment {segment}");
        }
        // A first batch that the second one does not follow is that of another use.
        let geometry = store.core.segments.borrow().geometry;
        let (one, other) = (geometry.first_block(1) * 4096, geometry.first_block(4) * 4096);
        let disk = forebay_reactor::File::open(DISK, forebay_reactor::OpenOptions::read_write()).expect("the disk");
        let header = disk.read_exact_at(one, 4096).await.expect("read");
        let mut header = BatchHeader::decode(&header).expect("a header");
        header.seq -= 1;
        let mut block = vec![0; 4096];
        header.encode(&mut block);
        disk.write_at(Buf::copy_of(&block), one).await.expect("write");
        disk.write_at(Buf::zeroed(4096), other).await.expect("write");
        forget();
        let mut lost = 0;
        for block in 0..300 {
            match read(block).await {
                Ok(found) => assert!(found == content(block), "block {block}"),
                Err(error) => {
                    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("first batch"), "{error}");
                    lost += 1;
                }
            }
        }
        assert!((2..100).contains(&lost), "{lost} lost");
    });
    ran.unwrap_or_else(|stop| panic!("{stop}"));
}
