//! Reads of compressed blobs that lie behind each other, of parts of them, and writes that helper threads compress.

use std::path::Path;

use forebay_block::*;
use forebay_reactor::{DriverChoice, File, OpenOptions, Reactor};
use forebay_sim::Faults;
use forebay_store::{InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

/// Returns text that differs from block to block.
fn text(blocks: usize, salt: usize) -> Vec<u8> {
    let source = include_bytes!("blob_reads.rs");
    (0..blocks * BLOCK).map(|i| source[(i + i / BLOCK * 37 + salt) % source.len()]).collect()
}

async fn write(store: &Store, name: &ObjectName, first: usize, data: &[u8]) {
    let op = ObjectOp::Write { offset: (first * BLOCK) as u64, data: Buf::copy_of(data).into() };
    store.submit(name, Transaction::of(op)).await.expect("write");
}

async fn read(store: &Store, name: &ObjectName, first: usize, count: usize) -> Result<Vec<u8>> {
    let read = ObjectRead::head((first * BLOCK) as u64, (count * BLOCK) as u64);
    Ok(store.read(name, read).await?.fill(read.extent).to_vec())
}

async fn compress(store: &Store, setting: &str) {
    let policy = DataPolicy { compression: setting.parse().expect("a setting") };
    store.set_data_policy(&ObjectName::new(""), Some(policy)).await.expect("a policy");
}

#[test]
fn any_blocks_of_blobs_are_read_alone_and_together() {
    for (setting, data_cache) in [("lz4", 0), ("lz4", 64 * BLOCK), ("zstd:1", 0), ("deflate:1", 100 * BLOCK)] {
        let world = machine(64 * MIB, Faults::none());
        run(&world, async {
            Store::init(Path::new(DISK), InitOptions { size: 64 * MIB, ..InitOptions::default() }).await.expect("init");
            let name = ObjectName::new("rbd_data.a.0");
            let options = || StoreOptions { data_cache, ..StoreOptions::default() };
            let store = Store::open(Path::new(DISK), options()).await.expect("open");
            compress(&store, setting).await;
            let mut model = text(300, 0);
            write(&store, &name, 0, &model).await;
            // Short writes are compressed at once; one block does not shrink, and others become a hole.
            for (first, count) in [(3, 1), (40, 4), (62, 4), (100, 5), (250, 40)] {
                let data = text(count, 1000 + first);
                model[first * BLOCK..(first + count) * BLOCK].copy_from_slice(&data);
                write(&store, &name, first, &data).await;
            }
            let mut state = 1u64;
            let noise: Vec<u8> = (0..BLOCK)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 56) as u8
                })
                .collect();
            model[7 * BLOCK..8 * BLOCK].copy_from_slice(&noise);
            write(&store, &name, 7, &noise).await;
            model[20 * BLOCK..22 * BLOCK].fill(0);
            write(&store, &name, 20, &[0; 2 * BLOCK]).await;
            let (mut store, mut number) = (store, 7usize);
            for life in 0..2 {
                for _ in 0..400 {
                    number = number.wrapping_mul(1_103_515_245).wrapping_add(12345) % (1 << 31);
                    let first = number / 64 % 300;
                    let count = 1 + [number % 3, number % 20, number % 300][number / 7 % 3].min(299 - first);
                    let found = read(&store, &name, first, count).await.expect("read");
                    assert!(found == model[first * BLOCK..(first + count) * BLOCK], "{setting}: {count} at {first}");
                }
                if life == 0 {
                    store.close().await.expect("close");
                    drop(store);
                    store = Store::open(Path::new(DISK), options()).await.expect("open");
                }
            }
            store.close().await.expect("close");
        });
    }
}

#[test]
fn a_damaged_blob_leaves_its_neighbours_readable() {
    let world = machine(64 * MIB, Faults::none());
    run(&world, async {
        Store::init(Path::new(DISK), InitOptions { size: 64 * MIB, ..InitOptions::default() }).await.expect("init");
        let options = || StoreOptions { data_cache: 0, ..StoreOptions::default() };
        let store = Store::open(Path::new(DISK), options()).await.expect("open");
        compress(&store, "lz4").await;
        let (name, data) = (ObjectName::new("rbd_data.a.0"), text(32, 0));
        write(&store, &name, 0, &data).await;
        store.close().await.expect("close");
        drop(store);
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let bytes = disk.read_exact_at(MIB, 8 << 20).await.expect("read").to_vec();
        // Eight blobs of 4 blocks; the second one is damaged.
        let begins = |sector: &&[u8]| sector[..4] == [2, 4, 0, 0];
        let blobs: Vec<usize> =
            (0..).zip(bytes.chunks(512)).filter(|(_, sector)| begins(sector)).map(|(i, _)| i).collect();
        assert_eq!(blobs.len(), 8, "blobs of LZ4 have 4 blocks");
        drop(disk);
        flip(MIB + blobs[1] as u64 * 512 + 700).await;
        let store = Store::open(Path::new(DISK), options()).await.expect("open");
        let error = read(&store, &name, 0, 32).await.expect_err("a part of it is damaged");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("rbd_data.a.0 at byte 16384"), "{error}");
        for (first, count) in [(0, 4), (8, 24), (2, 1)] {
            let found = read(&store, &name, first, count).await.expect("not damaged");
            assert!(found == data[first * BLOCK..(first + count) * BLOCK]);
        }
        assert!(store.stats().checksum_errors > 0);
    });
}

/// Writes and reads with a number of helper threads; returns the bytes that the data takes.
async fn with_helpers(path: &Path, setting: &str, compression_threads: usize) -> u64 {
    Store::init(path, InitOptions { size: 64 * MIB, force: true, ..InitOptions::default() }).await.expect("init");
    let options = StoreOptions { data_cache: 0, compression_threads, ..StoreOptions::default() };
    let store = Store::open(path, options).await.expect("open");
    compress(&store, setting).await;
    let names: Vec<_> = (0..4).map(|number| ObjectName::new(format!("rbd_data.a.{number}"))).collect();
    // At once, and those of one object in order.
    let writes = names
        .iter()
        .enumerate()
        .flat_map(|(number, name)| (0..3).map(move |turn| (name, turn * 100, text(200, number * 100 + turn))));
    let tasks: Vec<_> = writes
        .map(|(name, first, data)| {
            let (store, name) = (store.clone(), name.clone());
            forebay_reactor::spawn(async move { write(&store, &name, first, &data).await })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    for (number, name) in names.iter().enumerate() {
        let mut expected = vec![0; 400 * BLOCK];
        for turn in 0..3 {
            expected[turn * 100 * BLOCK..(turn * 100 + 200) * BLOCK].copy_from_slice(&text(200, number * 100 + turn));
        }
        assert!(read(&store, name, 0, 400).await.expect("read") == expected, "{name}");
    }
    let stored = store.stats().compressed_stored;
    store.close().await.expect("close");
    stored
}

#[test]
fn helper_threads_compress_what_the_reactor_would() {
    let path = std::env::temp_dir().join(format!("forebay-helpers-{}", std::process::id()));
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    for setting in ["lz4", "zstd:5"] {
        let stored = [0, 2].map(|threads| reactor.block_on(with_helpers(&path, setting, threads)));
        assert_eq!(stored[0], stored[1], "{setting}");
        assert!(stored[0] > 0);
    }
    std::fs::remove_file(&path).expect("removed");
}
