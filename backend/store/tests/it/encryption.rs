//! Tests of encrypted volumes: what is on the device, master keys, rotation, destroyed keys, damage.

use std::path::Path;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::Faults;
use forebay_store::{CheckOptions, InitOptions, MasterKey, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Places of the key table.
const KEY_TABLES: [u64; 2] = [512 << 10, 768 << 10];
const SEGMENTS_START: u64 = MIB;
const DATA: &str = "rbd_data.a.";

fn key(byte: u8) -> MasterKey {
    MasterKey::from_bytes([byte; 32])
}

fn with_key(byte: u8) -> StoreOptions {
    StoreOptions { master_key: Some(key(byte)), data_cache: 0, ..StoreOptions::default() }
}

async fn open(options: StoreOptions) -> Result<Rc<Store>> {
    Store::open(Path::new(DISK), options).await
}

/// Creates a store with master key 1 and an encrypted volume.
async fn fresh(size: u64) -> Rc<Store> {
    let options = InitOptions { size, segment_size: 256 << 10, ..InitOptions::default() };
    Store::init(Path::new(DISK), options).await.expect("init");
    let store = open(with_key(1)).await.expect("open");
    store.encrypt(&ObjectName::new(DATA)).await.expect("a key");
    store
}

async fn close_and_check(store: Rc<Store>) {
    store.close().await.expect("close");
    drop(store);
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(Path::new(DISK), options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

async fn disk(from: u64, len: u64) -> Vec<u8> {
    let file = File::open(Path::new(DISK), OpenOptions::read()).expect("the disk");
    let (read, bytes) = file.read_at(BufMut::with_capacity(len as usize), from).await;
    read.expect("read");
    bytes.to_vec()
}

async fn is_on_disk(size: u64, wanted: &[u8]) -> bool {
    disk(0, size).await.windows(wanted.len()).any(|part| part == wanted)
}

/// Returns a block that has a marker in each of its sectors, and is told apart by a number.
fn marked(number: u64, noise: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let mut state = number;
    while out.len() < BLOCK {
        out.extend_from_slice(b"this is a marker");
        out.extend_from_slice(&number.to_le_bytes());
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        out.extend_from_slice(&if noise { state >> 7 } else { 0 }.to_le_bytes());
    }
    out.truncate(BLOCK);
    out
}

async fn write(store: &Store, name: &str, offset: u64, data: &[u8]) -> Result<()> {
    let op = ObjectOp::Write { offset, data: Buf::copy_of(data).into() };
    store.submit(&ObjectName::new(name), Transaction::of(op)).await.map(drop)
}

async fn read(store: &Store, name: &str, offset: u64, len: u64) -> Result<Vec<u8>> {
    let read = ObjectRead::new(SnapId::HEAD, Extent::new(offset, len));
    Ok(store.read(&ObjectName::new(name), read).await?.fill(read.extent).to_vec())
}

#[test]
fn nothing_that_was_written_is_on_the_device() {
    const SIZE: u64 = 10 * MIB;
    for (compression, blocks) in [("none", 1300), ("lz4", 3000)] {
        let world = machine(SIZE, Faults::none());
        run(&world, async {
            let store = fresh(SIZE).await;
            let policy = DataPolicy { compression: compression.parse().expect("a setting") };
            store.set_data_policy(&ObjectName::new(DATA), Some(policy)).await.expect("a policy");
            let mut expected = vec![0; blocks * BLOCK];
            let (mut number, mut state) = (0, 1u64);
            // Overwritten until the cleaner has moved and encrypted again what is left.
            while number < 4000 || store.stats().cleaned_bytes < MIB {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 20) as usize % blocks * BLOCK;
                let len = if number % 3 == 0 { BLOCK } else { 3000 };
                let data = &marked(number, number % 2 == 0)[..len];
                expected[at..at + len].copy_from_slice(data);
                write(&store, "rbd_data.a.0", at as u64, data).await.expect("write");
                number += 1;
                assert!(number < 100_000, "nothing is cleaned");
            }
            let found = read(&store, "rbd_data.a.0", 0, expected.len() as u64).await.expect("read");
            assert!(found == expected, "{compression}");
            close_and_check(store).await;
            assert!(!is_on_disk(SIZE, b"this is a marker").await, "{compression}");

            let store = open(with_key(1)).await.expect("open");
            let found = read(&store, "rbd_data.a.0", 0, expected.len() as u64).await.expect("read");
            assert!(found == expected, "{compression}, opened again");
            // The search would find what is not encrypted.
            write(&store, "rbd_data.b.0", 0, &marked(1, true)).await.expect("write");
            close_and_check(store).await;
            assert!(is_on_disk(SIZE, b"this is a marker").await);
        });
    }
}

#[test]
fn a_wrong_master_key_says_so_and_none_locks_only_what_is_encrypted() {
    let world = machine(16 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(16 * MIB).await;
        write(&store, "rbd_data.a.0", 0, &marked(1, true)).await.expect("write");
        write(&store, "rbd_data.b.0", 0, &marked(2, true)).await.expect("write");
        close_and_check(store).await;
        let before = disk(0, 16 * MIB).await;

        let error = open(with_key(2)).await.map(drop).expect_err("a wrong key");
        assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("wrong master key"), "{error}");
        let error = open(StoreOptions::default()).await.map(drop).expect_err("no key");
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Denied && text.contains("1 encrypted volumes"), "{error}");
        assert!(disk(0, 16 * MIB).await == before, "a refused opening writes nothing");

        let options = StoreOptions { without_master_key: true, ..StoreOptions::default() };
        let store = open(options).await.expect("open without the key");
        assert!(store.key_status().locked);
        assert!(read(&store, "rbd_data.b.0", 0, 4096).await.expect("read") == marked(2, true));
        for denied in [
            read(&store, "rbd_data.a.0", 0, 4096).await.map(drop),
            write(&store, "rbd_data.a.0", 0, &marked(3, true)).await,
            write(&store, "rbd_data.a.0", 5, b"part").await,
            write(&store, "rbd_data.a.1", 0, &marked(3, true)).await,
            store.rotate_master_key(&key(9)).await.map(drop),
        ] {
            assert_eq!(denied.expect_err("locked").kind(), ErrorKind::Denied);
        }
        let error = store.encrypt(&ObjectName::new("rbd_data.c.")).await.expect_err("no master key");
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("--master-key"), "{error}");
        let name = ObjectName::new("rbd_data.a.0");
        store.submit(&name, Transaction::of(ObjectOp::Remove)).await.expect("it can be removed");
        store.destroy_key(&ObjectName::new(DATA)).await.expect("destroy");
        close_and_check(store).await;
        open(StoreOptions::default()).await.expect("nothing is encrypted any more").close().await.expect("close");
    });
}

#[test]
fn rotation_replaces_the_master_key_and_writes_no_data() {
    let world = machine(16 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(16 * MIB).await;
        write(&store, "rbd_data.a.0", 0, &marked(1, true)).await.expect("write");
        store.close().await.expect("close");
        drop(store);
        let store = open(with_key(1)).await.expect("open");
        store.flush().await.expect("flush");
        let before = (disk(SEGMENTS_START, 15 * MIB).await, store.key_status().master);
        let status = store.rotate_master_key(&key(2)).await.expect("rotate");
        assert!(status.master != before.1 && status.keys == 1);
        assert!(disk(SEGMENTS_START, 15 * MIB).await == before.0, "data was written");
        store.encrypt(&ObjectName::new("rbd_data.b.")).await.expect("a key under the new master key");
        write(&store, "rbd_data.b.0", 0, &marked(2, true)).await.expect("write");
        close_and_check(store).await;

        assert_eq!(open(with_key(1)).await.map(drop).expect_err("the old key").kind(), ErrorKind::Denied);
        let store = open(with_key(2)).await.expect("the new key");
        assert!(read(&store, "rbd_data.a.0", 0, 4096).await.expect("read") == marked(1, true));
        assert!(read(&store, "rbd_data.b.0", 0, 4096).await.expect("read") == marked(2, true));
        close_and_check(store).await;
    });
}

#[test]
fn a_destroyed_key_is_nowhere_on_the_device() {
    const SIZE: u64 = 16 * MIB;
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        let store = fresh(SIZE).await;
        for other in ["rbd_data.b.", "rbd_data.c."] {
            store.encrypt(&ObjectName::new(other)).await.expect("a key");
        }
        write(&store, "rbd_data.a.0", 0, &marked(1, true)).await.expect("write");
        write(&store, "rbd_data.c.0", 0, &marked(2, true)).await.expect("write");
        // The first key of the table: number, prefix, wrapped secret.
        let wrapped = disk(KEY_TABLES[0] + 64 + 24, 60).await;
        assert!(is_on_disk(SIZE, &wrapped).await);
        store.destroy_key(&ObjectName::new(DATA)).await.expect("destroy");
        assert!(!is_on_disk(SIZE, &wrapped).await, "the key is still there");
        assert!(!is_on_disk(SIZE, &wrapped[12..44]).await);
        let error = read(&store, "rbd_data.a.0", 0, 4096).await.expect_err("destroyed");
        assert!(error.kind() == ErrorKind::Denied && error.to_string().contains("destroyed"), "{error}");
        // A new volume of that name has another key, for new objects.
        assert_eq!(store.encrypt(&ObjectName::new(DATA)).await.expect_err("objects").kind(), ErrorKind::Exists);
        // What is left is cleaned like anything else.
        let mut number = 0;
        while store.stats().cleaned_bytes < 8 * MIB {
            write(&store, "rbd_data.b.0", number * 37 % 1900 * 4096, &marked(number, true)).await.expect("write");
            number += 1;
            assert!(number < 100_000, "nothing is cleaned");
        }
        assert!(read(&store, "rbd_data.c.0", 0, 4096).await.expect("read") == marked(2, true));
        close_and_check(store).await;
    });
}

#[test]
fn one_damaged_key_table_is_renewed_and_two_are_an_error() {
    let world = machine(16 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(16 * MIB).await;
        write(&store, "rbd_data.a.0", 0, &marked(1, true)).await.expect("write");
        close_and_check(store).await;
        for place in KEY_TABLES {
            flip(place + 100).await;
            let store = open(with_key(1)).await.expect("open");
            assert!(read(&store, "rbd_data.a.0", 0, 4096).await.expect("read") == marked(1, true));
            close_and_check(store).await;
        }
        // Both were whole again each time, with the same key: next number, check value, key.
        let keys = async |place| disk(place + 40, 112).await;
        assert!(keys(KEY_TABLES[0]).await == keys(KEY_TABLES[1]).await);
        for place in KEY_TABLES {
            flip(place + 100).await;
        }
        let error = open(with_key(1)).await.map(drop).expect_err("no key table");
        assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("key table"), "{error}");
        flip(KEY_TABLES[1] + 100).await;
        let store = open(with_key(1)).await.expect("open");
        assert!(read(&store, "rbd_data.a.0", 0, 4096).await.expect("read") == marked(1, true));
        close_and_check(store).await;
    });
}

#[test]
fn only_volumes_without_data_can_be_encrypted() {
    let world = machine(16 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(16 * MIB).await;
        write(&store, "rbd_data.b.0", 0, &marked(1, true)).await.expect("write");
        let encrypt = |prefix: &str| store.encrypt(&ObjectName::new(prefix));
        assert_eq!(encrypt("rbd_data.b.").await.expect_err("data").kind(), ErrorKind::Exists);
        assert_eq!(encrypt("").await.expect_err("no volume").kind(), ErrorKind::Invalid);
        encrypt(DATA).await.expect("it is encrypted already");
        assert_eq!((store.is_encrypted(&ObjectName::new(DATA)), store.key_status().keys), (true, 1));
        assert!(!store.is_encrypted(&ObjectName::new("rbd_data.b.")));
        close_and_check(store).await;
    });
}
