//! Logs with members in persistent memory.

use std::rc::Rc;

use forebay_block::ErrorKind;
use forebay_reactor::driver::{DriverChoice, system_driver};
use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::{Reactor, sleep, timeout};
use forebay_sim::{CrashKind, Rng, SimPmem};
use forebay_writelog::format::{AREA_AT, LOGS_AT};
use forebay_writelog::replication::wire::{CopyProgress, ReplicaAction, ReplicaAnswer};
use forebay_writelog::replication::{LogOpening, MemberKeeper, MemberRecord, open_primary};
use forebay_writelog::{LogId, MediumKind, Shelf, ShelfOptions};

use super::{Host, Keeper, filled_and_taken_over, filled_from_the_medium, options, with_media};
use crate::common::{LONG, MILLISECOND, read};
use crate::replica::RawPrimary;

const PMEM: MediumKind = MediumKind::Pmem;
const SSD: MediumKind = MediumKind::Ssd;
const UNIT: u32 = 64;

/// Opens what a power failure leaves of a memory.
async fn reopened(memory: &SimPmem, seed: u64) -> Rc<Shelf> {
    memory.crash(CrashKind::Power, &mut Rng::new(seed));
    let options = ShelfOptions { small: true, ..ShelfOptions::default() };
    Shelf::on_memory(Rc::new(memory.clone()), "/again", options).await.expect("the device")
}

/// Returns a primary of a copy at the second host, which sends what it likes.
fn raw_primary(hosts: &[Rc<Host>]) -> RawPrimary {
    let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
    RawPrimary { log: [9; 16], link, unit: UNIT }
}

#[test]
fn a_replica_in_persistent_memory_is_filled_and_takes_over() {
    filled_and_taken_over(&[PMEM, PMEM]);
    filled_and_taken_over(&[SSD, PMEM]);
    filled_from_the_medium(&[PMEM, PMEM]);
    filled_from_the_medium(&[SSD, PMEM]);
}

#[test]
fn a_device_with_sectors_gets_no_copy_of_a_log_in_persistent_memory() {
    with_media(&[PMEM, SSD], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.write(0, 1).await.expect("written");
        sleep(100 * MILLISECOND).await;
        assert_eq!(primary.set.record().state(two.id), None);
        let refused = two.shelf.create_replica(&id, ("one", "pool/a"), (1 << 20, UNIT), 1).await;
        let refused = refused.expect_err("no units of 64 bytes");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("persistent memory"), "{refused}");
        for unit in [32, 128, 256, 8192] {
            assert!(one.shelf.create_replica(&[7; 16], ("two", "b"), (1 << 20, unit), 1).await.is_err(), "{unit}");
        }
    });
}

#[test]
fn a_log_that_was_created_without_members_gets_none() {
    with_media(&[PMEM], async |_, _, hosts| {
        let host = &hosts[0];
        let id = host.shelf.create("one", "pool/a", 1 << 20, 0).await.expect("room");
        let (keeper, names) = (Rc::new(Keeper(host.clone())), ("one", "pool/a"));
        let record = MemberRecord::created(host.id, LogId::default(), "client.1".to_owned());
        host.image.record.replace(Some(record));
        let opened = open_primary(&host.shelf, &id, names, LogOpening::Again, keeper, (None, options())).await;
        let refused = opened.err().expect("another layout");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("attach a new one"), "{refused}");
        host.shelf.open_log(&id, "one", 0).await.expect("it opens as it is");
    });
}

#[test]
fn a_log_with_members_is_opened_with_them_only() {
    with_media(&[PMEM], async |_, _, hosts| {
        let host = &hosts[0];
        let (id, primary) = host.create().await;
        primary.write(0, 5).await.expect("written");
        primary.log.gone().await;
        let refused = host.shelf.open_log(&id, "one", 0).await.err().expect("it has members");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        let again = host.take_over(&id).await.expect("opened again");
        assert_eq!(read(&*again.log, 0, 4096).await[0], 5);
    });
}

#[test]
fn what_a_replica_has_acknowledged_survives_a_power_failure() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let raw = raw_primary(&hosts);
        let copy = raw.create(1).await;
        for number in 0..40 {
            let answer = raw.append(1, number).await;
            assert!(
                matches!(answer, ReplicaAnswer::Done(CopyProgress { head, .. }) if head == number + 1),
                "{answer:?}"
            );
            let info = reopened(&memories[1], number).await.inspect(&raw.log).await.expect("a log");
            assert_eq!(info.dirty_entries, number + 1);
        }
        for number in 0..40_u32 {
            let term = number + 2;
            assert!(matches!(raw.adopt(term, copy, 40).await, ReplicaAnswer::Done(_)));
            let again = reopened(&memories[1], number.into()).await;
            assert_eq!(again.copy_of(&raw.log).await.expect("a copy"), (copy, term));
        }
        for tail in 0..40 {
            assert!(matches!(raw.ask(41, ReplicaAction::Retire { tail }, Vec::new()).await, ReplicaAnswer::Done(_)));
            let info = reopened(&memories[1], tail).await.inspect(&raw.log).await.expect("a log");
            assert_eq!(info.dirty_entries, 40 - tail);
        }
    });
}

#[test]
fn a_block_that_a_power_failure_has_torn_is_the_end_of_the_log() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let (raw, memory) = (raw_primary(&hosts), &memories[1]);
        let copy = raw.create(1).await;
        let (mut ends, mut goes_on) = (0, 0);
        for seed in 0..60 {
            assert!(matches!(raw.adopt(seed as u32 + 2, copy, 0).await, ReplicaAnswer::Done(_)));
            for number in 0..3 {
                raw.append(seed as u32 + 2, number).await;
            }
            // The block after them is stored, and no fence follows.
            let at = LOGS_AT + AREA_AT + 3 * 2 * u64::from(UNIT);
            memory.store(at, &raw.block(seed as u32 + 2, 3, 0));
            let info = reopened(memory, seed).await.inspect(&raw.log).await.expect("a log that merely ends");
            assert!((3..=4).contains(&info.dirty_entries), "{info:?}");
            ends += u32::from(info.dirty_entries == 3);
            goes_on += u32::from(info.dirty_entries == 4);
            // Without it, so that the next one is not the same.
            memory.store(at, &[0; 128]);
            memory.fence();
        }
        assert!(ends > 5 && goes_on > 5, "{ends} {goes_on}");
    });
}

#[test]
fn what_a_killed_process_has_left_in_caches_is_stored_again() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let (raw, memory) = (raw_primary(&hosts), &memories[1]);
        for seed in 0..20 {
            let copy = raw.create(1).await;
            for number in 0..3 {
                raw.append(1, number).await;
            }
            let at = LOGS_AT + AREA_AT + 3 * 2 * u64::from(UNIT);
            memory.store(at, &raw.block(1, 3, 0));
            memory.crash(CrashKind::Kill, &mut Rng::new(seed));
            hosts[1].replicas.release(&raw.log).await;
            let found = raw.adopt(2, copy, 4).await;
            assert!(matches!(found, ReplicaAnswer::Done(CopyProgress { head: 4, .. })), "{found:?}");
            assert!(matches!(raw.append(2, 4).await, ReplicaAnswer::Done(CopyProgress { head: 5, .. })));
            let info = reopened(memory, seed).await.inspect(&raw.log).await.expect("a log");
            assert_eq!(info.dirty_entries, 5);
            hosts[1].replicas.release(&raw.log).await;
            hosts[1].shelf.discard(&raw.log).await.expect("discarded");
        }
    });
}

#[test]
fn a_copy_is_created_without_what_a_former_one_has_left() {
    with_media(&[SSD, PMEM], async |_, _, hosts| {
        let raw = raw_primary(&hosts);
        raw.create(1).await;
        for number in 0..5 {
            raw.append(1, number).await;
        }
        raw.create(1).await;
        hosts[1].replicas.release(&raw.log).await;
        let info = hosts[1].shelf.inspect(&raw.log).await.expect("a log");
        assert_eq!(info.dirty_entries, 0);
    });
}

#[test]
fn a_log_too_large_for_its_places_is_not_created() {
    with_media(&[PMEM], async |_, _, hosts| {
        let size = (256_u64 << 30) + (1 << 20);
        let refused = hosts[0].shelf.create_with_members(("one", "pool/a"), size, 0, [1; 16]).await;
        assert_eq!(refused.expect_err("too large").kind(), ErrorKind::Invalid);
        let refused = hosts[0].shelf.create_replica(&[9; 16], ("one", "pool/a"), (size, UNIT), 0).await;
        assert_eq!(refused.expect_err("too large").kind(), ErrorKind::Invalid);
    });
}

#[test]
fn a_replica_in_persistent_memory_is_dropped_and_filled_again() {
    with_media(&[PMEM, PMEM, PMEM], async |_, _, hosts| {
        let [one, two, three] = &hosts[..] else { unreachable!("three hosts") };
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id, three.id]);
        primary.has(&[1, 2, 3]).await;
        two.kill();
        for at in 0..64 {
            primary.write(at * 4096, at as u8).await.expect("written");
        }
        primary.has(&[1, 3]).await;
        one.kill();
        let taken = timeout(LONG, three.take_over(&id)).await.expect("in time").expect("taken over");
        for at in 0..64 {
            assert_eq!(read(&*taken.log, at * 4096, 4096).await[0], at as u8, "{at}");
        }
    });
}

#[test]
fn a_device_for_copies_is_as_long_as_they_may_be_together() {
    let path = std::env::temp_dir().join(format!("forebay-copies-{}", std::process::id()));
    let reactor = Reactor::new(system_driver(DriverChoice::Auto).expect("a driver"));
    let lived = reactor.block_on(async {
        let options = ShelfOptions { create: true, size: 40 << 20, force: true, ..ShelfOptions::default() };
        for number in [1, 2] {
            let shelf = Shelf::open(PMEM, &path, options).await?;
            shelf.create_replica(&[number; 16], ("one", "pool/a"), (16 << 20, UNIT), 1).await?;
        }
        let shelf = Shelf::open(PMEM, &path, options).await?;
        for id in shelf.ids() {
            assert_eq!(shelf.inspect(&id).await?.dirty_entries, 0);
        }
        Ok::<_, forebay_block::Error>(shelf.ids().len())
    });
    let len = std::fs::metadata(&path).expect("a file").len();
    std::fs::remove_file(&path).expect("a file");
    assert_eq!((lived.expect("room for both"), len), (2, 40 << 20));
}

#[test]
fn no_space_is_allocated_where_stores_are_not_persistent() {
    let path = std::env::temp_dir().join(format!("forebay-copies-refused-{}", std::process::id()));
    let reactor = Reactor::new(system_driver(DriverChoice::Auto).expect("a driver"));
    let opened = reactor.block_on(async {
        let options = ShelfOptions { create: true, size: 1 << 50, ..ShelfOptions::default() };
        Shelf::open(PMEM, &path, options).await.map(drop)
    });
    let left = std::fs::remove_file(&path).is_ok();
    match opened {
        Err(error) if error.kind() == ErrorKind::Unsupported => assert!(!left, "a file is left"),
        // On a machine whose temporary files are persistent memory this is right.
        opened => assert_eq!(opened.err().map(|error| error.kind()), Some(ErrorKind::NoSpace)),
    }
}
