//! Encrypted logs: keys, contents compared with a plain volume, and what is on the medium.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, Buf, DataKey, ErrorKind, Extent};
use forebay_reactor::pmem::PersistentMemory;
use forebay_sim::{Faults, SimPmem, World};
use forebay_writelog::format::SUPER_COPIES;
use forebay_writelog::{LogId, LogOptions, MediumKind, Shelf, ShelfOptions, WriteLog};
use proptest::prelude::*;

use crate::common::{Memory, Nobody, PATH, SMALL, forgetful, on_a_shelf_of, open, patience, read, superblocks, write};

/// Size of the volume in bytes.
const VOLUME: usize = 96 << 10;

fn key(byte: u8) -> DataKey {
    DataKey::from_bytes(&std::array::from_fn(|at| byte ^ at as u8))
}

/// Opens a log with a key; returns the error if that is refused.
async fn try_open(
    shelf: &Rc<Shelf>,
    id: &LogId,
    inner: &Rc<Memory>,
    key: Option<&DataKey>,
    options: LogOptions,
) -> forebay_block::Result<Rc<WriteLog>> {
    let log = shelf.open_log_with_key(id, "one", 0, key).await?;
    Ok(WriteLog::new(inner.clone(), log, Rc::new(Nobody), options))
}

async fn refused(shelf: &Rc<Shelf>, id: &LogId, inner: &Rc<Memory>, key: Option<&DataKey>) -> String {
    let error = try_open(shelf, id, inner, key, patience()).await.err().expect("refused");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let checked = shelf.check_key(id, key).await.expect_err("refused by the check as well");
    assert_eq!(checked.to_string(), error.to_string());
    error.to_string()
}

fn contains(bytes: &[u8], marker: &[u8]) -> bool {
    bytes.windows(marker.len()).any(|found| found == marker)
}

#[test]
fn an_encrypted_log_is_opened_with_its_key_only_and_keeps_the_data_secret() {
    on_a_shelf_of(true, async |world, shelf| {
        let (inner, right) = (Memory::new(VOLUME), key(1));
        let id = shelf.create_with_key(("one", "local/a"), SMALL, 0, Some(&right)).await.expect("room");
        assert!(shelf.inspect(&id).await.expect("a log").encrypted);
        assert!(superblocks(&world)[0].encryption.is_some(), "from the beginning");
        let log = try_open(&shelf, &id, &inner, Some(&right), forgetful()).await.expect("its key");
        assert!(log.is_encrypted());
        let marker = b"a text that nobody else may read";
        let data: Vec<u8> = marker.repeat(200);
        let request = BlockRequest::Write { offset: 512, data: Buf::copy_of(&data).into(), fua: false };
        log.submit(request).await.expect("written");
        // A pattern of 512 bytes is stored once, and encrypted all the same.
        let pattern: Vec<u8> = marker.repeat(16);
        let request =
            BlockRequest::Write { offset: 32 << 10, data: Buf::copy_of(&pattern.repeat(8)).into(), fua: false };
        log.submit(request).await.expect("written");
        assert_eq!(read(&*log, 512, data.len() as u64).await, data, "from the medium: nothing is cached");
        log.close(false).await.expect("closed");
        log.gone().await;
        let found = world.peek(PATH, 0, (1 << 20) + SMALL as usize).expect("a disk");
        assert!(!contains(&found, &marker[..8]));
        let says = refused(&shelf, &id, &inner, None).await;
        assert!(says.contains("is encrypted, and no key was given"), "{says}");
        let says = refused(&shelf, &id, &inner, Some(&key(2))).await;
        assert!(says.contains("is encrypted with another key"), "{says}");
        let info = shelf.inspect(&id).await.expect("described without a key");
        assert!(info.encrypted && info.dirty_entries == 2);
        let log = try_open(&shelf, &id, &inner, Some(&right), forgetful()).await.expect("its key");
        assert_eq!(read(&*log, 512, data.len() as u64).await, data);
        assert_eq!(read(&*log, 32 << 10, 4096).await, pattern.repeat(8));
        log.drain().await.expect("written back");
        assert_eq!(inner.bytes.borrow()[512..512 + data.len()], data[..]);
        assert_eq!(inner.bytes.borrow()[32 << 10..36 << 10], pattern.repeat(8)[..]);
    });
}

#[test]
fn a_log_becomes_an_encrypted_one_when_it_is_empty() {
    on_a_shelf_of(true, async |world, shelf| {
        let inner = Memory::new(VOLUME);
        let id = shelf.create("one", "local/a", SMALL, 0).await.expect("room");
        let log = open(&shelf, &id, "one", inner.clone()).await;
        log.submit(write(0, 7, 4096)).await.expect("written");
        log.close(false).await.expect("closed");
        log.gone().await;
        let says = refused(&shelf, &id, &inner, Some(&key(1))).await;
        assert!(says.contains("is not encrypted and holds 1 entries"), "{says}");
        let log = open(&shelf, &id, "one", inner.clone()).await;
        log.close(true).await.expect("written back");
        log.gone().await;
        assert!(superblocks(&world).iter().all(|superblock| superblock.encryption.is_none()));
        let log = try_open(&shelf, &id, &inner, Some(&key(1)), forgetful()).await.expect("it is empty");
        // Either copy says it before anything is appended.
        let found = superblocks(&world);
        assert_eq!(found.len(), SUPER_COPIES.len());
        assert!(found.iter().all(|superblock| superblock.encryption.is_some()), "{found:?}");
        log.submit(write(4096, 9, 1000)).await.expect("written");
        log.close(false).await.expect("closed");
        log.gone().await;
        assert!(refused(&shelf, &id, &inner, None).await.contains("no key was given"));
        let log = try_open(&shelf, &id, &inner, Some(&key(1)), forgetful()).await.expect("its key");
        let expected: Vec<u8> = (0..1000).map(|at| 9 ^ (at / 512) as u8).collect();
        assert_eq!(read(&*log, 4096, 1000).await, expected);
    });
}

/// Step of a host.
#[derive(Debug, Clone)]
enum Step {
    Write {
        offset: usize,
        data: Vec<u8>,
    },
    Zeroes {
        offset: usize,
        len: usize,
    },
    Read {
        offset: usize,
        len: usize,
    },
    Flush,
    Drain,
    /// Closes the log and opens it again; with `true`, all of it is written back before.
    Reopen(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..VOLUME, prop_oneof![1..40_usize, 500..530_usize, 1..9000_usize]);
    let bounded = |offset: usize, len: usize| len.min(VOLUME - offset);
    prop_oneof![
        6 => (range(), any::<u8>(), any::<bool>()).prop_map(move |((offset, len), byte, same)| {
            let of = |at: usize| if same { byte ^ (at % 512) as u8 } else { byte ^ (at * at / 7) as u8 };
            Step::Write { offset, data: (0..bounded(offset, len)).map(of).collect() }
        }),
        1 => range().prop_map(move |(offset, len)| Step::Zeroes { offset, len: bounded(offset, len) }),
        3 => range().prop_map(move |(offset, len)| Step::Read { offset, len: bounded(offset, len) }),
        1 => Just(Step::Flush),
        1 => Just(Step::Drain),
        1 => any::<bool>().prop_map(Step::Reopen),
    ]
}

/// Runs the steps on an encrypted log, and compares with a plain volume.
async fn compare(shelf: &Rc<Shelf>, steps: Vec<Step>, recent_bytes: usize) {
    let (inner, key) = (Memory::new(VOLUME), key(3));
    let options = || LogOptions { recent_bytes, ..patience() };
    let id = shelf.create_with_key(("one", "local/a"), SMALL, 0, Some(&key)).await.expect("room");
    let mut log = try_open(shelf, &id, &inner, Some(&key), options()).await.expect("a log");
    let mut plain = vec![0; VOLUME];
    for step in steps {
        match step {
            Step::Write { offset, data } => {
                plain[offset..offset + data.len()].copy_from_slice(&data);
                let request =
                    BlockRequest::Write { offset: offset as u64, data: Buf::copy_of(&data).into(), fua: false };
                log.submit(request).await.expect("written");
            }
            Step::Zeroes { offset, len } => {
                plain[offset..offset + len].fill(0);
                let extent = Extent::new(offset as u64, len as u64);
                let request = BlockRequest::WriteZeroes { extent, no_unmap: false, fua: false };
                log.submit(request).await.expect("zeroed");
            }
            Step::Read { offset, len } => {
                assert!(read(&*log, offset as u64, len as u64).await == plain[offset..offset + len], "at {offset}");
            }
            Step::Flush => drop(log.submit(BlockRequest::Flush).await.expect("flushed")),
            Step::Drain => {
                log.drain().await.expect("written back");
                assert!(*inner.bytes.borrow() == plain);
            }
            Step::Reopen(flush) => {
                log.close(flush).await.expect("closed");
                log.gone().await;
                log = try_open(shelf, &id, &inner, Some(&key), options()).await.expect("a log");
            }
        }
    }
    assert!(read(&*log, 0, VOLUME as u64).await == plain);
    log.close(true).await.expect("written back");
    assert!(*inner.bytes.borrow() == plain);
    log.gone().await;
    shelf.discard(&id).await.expect("discarded");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn an_encrypted_log_reads_as_a_plain_volume(
        steps in prop::collection::vec(step(), 1..40),
        recent_bytes in prop::sample::select(vec![0, 4096, 4 << 20]),
    ) {
        on_a_shelf_of(true, async |_, shelf| compare(&shelf, steps.clone(), recent_bytes).await);
        let world = World::new(1, Faults::none());
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let memory: Rc<dyn PersistentMemory> = Rc::new(SimPmem::new(&world, 4 << 20));
            let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
            let shelf = Shelf::on_memory(memory, "/memory", options).await.expect("a shelf");
            assert_eq!(shelf.medium(), MediumKind::Pmem);
            compare(&shelf, steps, recent_bytes).await;
        });
        ran.expect("it ends");
    }
}
