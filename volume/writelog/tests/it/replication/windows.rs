//! Payloads that primaries write into copies in persistent memory through memory windows.

use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::Extent;
use forebay_messenger::{WindowDescriptor, WriteError};
use forebay_reactor::{Buf, sleep, timeout};
use forebay_sim::{CrashKind, Rng, SimPmem};
use forebay_writelog::format::{AREA_AT, BlockHeader, EntryKind, EntryRecord, LOGS_AT, tag_of};
use forebay_writelog::replication::wire::{CopyProgress, ReplicaAction, ReplicaAnswer};
use forebay_writelog::replication::{AppendRefused, MemberKeeper};
use forebay_writelog::{LogId, LogInfo, MediumKind, Shelf, ShelfOptions};

use super::{Host, Keeper, with_media};
use crate::common::{LONG, MILLISECOND, read};
use crate::replica::RawPrimary;

const PMEM: MediumKind = MediumKind::Pmem;
const SSD: MediumKind = MediumKind::Ssd;
const UNIT: u32 = 64;
const LEN: usize = 4096;
/// Header and entry.
const HEAD: usize = 128;
const BLOCK: u64 = (HEAD + LEN) as u64;

/// Primary that writes what it likes through a window onto a copy at the second host.
struct PlacingPrimary {
    raw: RawPrimary,
    copy: LogId,
    window: WindowDescriptor,
}

impl PlacingPrimary {
    async fn start(hosts: &[Rc<Host>]) -> Self {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: UNIT };
        let copy = raw.create(1).await;
        let ReplicaAnswer::Window(window) = raw.ask(1, ReplicaAction::OpenWindow, Vec::new()).await else {
            panic!("no window")
        };
        Self { raw, copy, window }
    }

    /// Returns block `number` with one payload: its header and entry, and the payload.
    fn block(&self, term: u32, number: u64) -> (Vec<u8>, Vec<u8>) {
        let payload: Vec<u8> = (0..LEN).map(|at| (at as u64 * 7 + number * 31 + u64::from(term)) as u8).collect();
        let units = (BLOCK / u64::from(UNIT)) as u32;
        let pos = number * u64::from(units);
        let (extent, place, crc) = (Extent::new(0, LEN as u64), pos as u32 + 2, crc32c(&payload));
        let (kind, generation, time_ms) = (EntryKind::Write, 1, 0);
        let entry = EntryRecord { kind, extent, seq: number, generation, place, crc, time_ms, term, salt: None };
        let (behind, first_seq, tail_pos, tail_seq) = (number as u16, number, 0, 0);
        let header = BlockHeader { run: term, count: 1, behind, number, pos, first_seq, tail_pos, tail_seq, units };
        let mut head = vec![0; HEAD];
        header.encode(tag_of(&self.raw.log), &[entry], &mut head);
        (head, payload)
    }

    async fn write(&self, number: u64, payload: &[u8]) -> Result<(), WriteError> {
        let at = number * BLOCK + HEAD as u64;
        timeout(LONG, self.raw.link.write(self.window, at, Buf::copy_of(payload))).await.expect("in time")
    }

    async fn append(&self, term: u32, head: Vec<u8>) -> ReplicaAnswer {
        let window = self.window.id();
        self.raw.ask(term, ReplicaAction::AppendPlaced { durable: true, window }, head).await
    }

    async fn place(&self, number: u64) -> ReplicaAnswer {
        let (head, payload) = self.block(1, number);
        self.write(number, &payload).await.expect("written");
        self.append(1, head).await
    }

    /// Opens what a power failure leaves of the memory.
    async fn found(&self, memory: &SimPmem, seed: u64) -> LogInfo {
        memory.crash(CrashKind::Power, &mut Rng::new(seed));
        let options = ShelfOptions { small: true, ..ShelfOptions::default() };
        let shelf = Shelf::on_memory(Rc::new(memory.clone()), "/again", options).await.expect("the device");
        shelf.inspect(&self.raw.log).await.expect("a log")
    }
}

fn is_head(answer: &ReplicaAnswer, number: u64) -> bool {
    matches!(answer, ReplicaAnswer::Done(CopyProgress { head, .. }) if *head == number)
}

#[test]
fn a_block_whose_payload_was_written_through_a_window_is_durable_when_acknowledged() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let primary = PlacingPrimary::start(&hosts).await;
        for number in 0..40 {
            let (head, payload) = primary.block(1, number);
            primary.write(number, &payload).await.expect("written");
            // A payload alone is nothing that a recovery finds.
            assert_eq!(primary.found(&memories[1], number).await.dirty_entries, number);
            primary.write(number, &payload).await.expect("written");
            let answer = primary.append(1, head).await;
            assert!(is_head(&answer, number + 1), "{answer:?}");
            // Recovery verifies the newest payload.
            assert_eq!(primary.found(&memories[1], number).await.dirty_entries, number + 1);
        }
        assert_eq!(hosts[1].replicas.placed_blocks(), 40);
    });
}

#[test]
fn no_payload_is_read_when_it_arrives_but_recovery_verifies_the_newest() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let primary = PlacingPrimary::start(&hosts).await;
        primary.place(0).await;
        let (head, mut payload) = primary.block(1, 1);
        payload[77] ^= 1;
        primary.write(1, &payload).await.expect("written");
        assert!(is_head(&primary.append(1, head).await, 2));
        assert_eq!(primary.found(&memories[1], 1).await.dirty_entries, 1);
    });
}

#[test]
fn a_header_that_is_wrong_is_refused() {
    with_media(&[SSD, PMEM], async |_, _, hosts| {
        let primary = PlacingPrimary::start(&hosts).await;
        primary.place(0).await;
        for at in 0..HEAD {
            let (mut head, _) = primary.block(1, 1);
            head[at] ^= 0x10;
            let answer = primary.append(1, head).await;
            assert!(matches!(answer, ReplicaAnswer::Failed(_)), "byte {at}: {answer:?}");
        }
        // Another place, another number, another term, a part of it, a whole block.
        for number in [0, 2, 7] {
            let answer = primary.append(1, primary.block(1, number).0).await;
            assert_eq!(is_head(&answer, 1), number == 0, "{number}: {answer:?}");
        }
        assert!(matches!(primary.append(1, primary.block(2, 1).0).await, ReplicaAnswer::Failed(_)));
        let (head, payload) = primary.block(1, 1);
        for wrong in [head[..64].to_vec(), Vec::new(), [&head[..], &payload].concat()] {
            assert!(matches!(primary.append(1, wrong).await, ReplicaAnswer::Failed(_)));
        }
        assert!(is_head(&primary.place(1).await, 2));
    });
}

#[test]
fn nothing_of_a_former_primary_arrives_once_another_term_is_adopted() {
    with_media(&[SSD, PMEM], async |_, memories, hosts| {
        let primary = PlacingPrimary::start(&hosts).await;
        primary.place(0).await;
        let ring = || {
            let mut bytes = vec![0; 1 << 20];
            forebay_reactor::pmem::PersistentMemory::load(&memories[1], LOGS_AT + AREA_AT, &mut bytes);
            bytes
        };
        let (head, payload) = primary.block(1, 1);
        primary.write(1, &payload).await.expect("written");
        assert!(matches!(primary.raw.adopt(2, primary.copy, 1).await, ReplicaAnswer::Done(_)));
        let before = ring();
        for number in 0..10 {
            assert_eq!(primary.write(number, &payload).await, Err(WriteError::NoWindow(primary.window.id())));
        }
        assert!(ring() == before);
        assert_eq!(primary.append(1, head.clone()).await, ReplicaAnswer::Refused(AppendRefused::Superseded(2)));
        let opened = primary.raw.ask(1, ReplicaAction::OpenWindow, Vec::new()).await;
        assert_eq!(opened, ReplicaAnswer::Refused(AppendRefused::Superseded(2)));
        // The window of the next primary is another one.
        let ReplicaAnswer::Window(window) = primary.raw.ask(2, ReplicaAction::OpenWindow, Vec::new()).await else {
            panic!("no window")
        };
        assert_ne!(window.id(), primary.window.id());
        assert!(matches!(primary.append(2, head).await, ReplicaAnswer::Failed(_)), "through a window that is closed");
        assert!(primary.write(1, &payload).await.is_err());
    });
}

#[test]
fn a_window_is_closed_before_its_copy_is_given_up_or_discarded() {
    with_media(&[SSD, PMEM], async |_, _, hosts| {
        let two = &hosts[1];
        for end in ["given up", "released", "created anew", "discarded"] {
            let primary = PlacingPrimary::start(&hosts).await;
            assert!(is_head(&primary.place(0).await, 1), "{end}");
            let (volume, name) = ("one".to_owned(), "pool/a".to_owned());
            let create = ReplicaAction::Create { volume, name, size: 1 << 20, unit: UNIT, epoch: 1, in_memory: false };
            match end {
                "given up" => drop(two.replicas.give_up(&primary.raw.log).await),
                "released" => two.replicas.release(&primary.raw.log).await,
                "created anew" => drop(primary.raw.ask(1, create, Vec::new()).await),
                _ => drop(primary.raw.ask(1, ReplicaAction::Discard { epoch: 1 }, Vec::new()).await),
            }
            let late = primary.write(1, &primary.block(1, 1).1).await;
            assert_eq!(late, Err(WriteError::NoWindow(primary.window.id())), "{end}");
            two.replicas.resume(&primary.raw.log);
        }
    });
}

#[test]
fn a_stream_that_begins_again_has_another_window() {
    with_media(&[SSD, PMEM], async |_, _, hosts| {
        let primary = PlacingPrimary::start(&hosts).await;
        primary.place(0).await;
        // What was on its way when the stream was interrupted arrives no more.
        assert!(matches!(primary.raw.adopt(1, primary.copy, 1).await, ReplicaAnswer::Done(_)));
        assert!(primary.write(1, &primary.block(1, 1).1).await.is_err());
        assert!(matches!(primary.append(1, primary.block(1, 1).0).await, ReplicaAnswer::Failed(_)));
    });
}

#[test]
fn only_a_copy_in_persistent_memory_has_a_window() {
    with_media(&[SSD, SSD], async |_, _, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        raw.create(1).await;
        let answer = raw.ask(1, ReplicaAction::OpenWindow, Vec::new()).await;
        assert!(matches!(&answer, ReplicaAnswer::Failed(why) if why.contains("persistent memory")), "{answer:?}");
        let append = ReplicaAction::AppendPlaced { durable: true, window: 0 };
        assert!(matches!(raw.ask(1, append, vec![0; 512]).await, ReplicaAnswer::Failed(_)));
    });
}

#[test]
fn a_primary_writes_through_windows_and_its_replica_takes_over() {
    for media in [[PMEM, PMEM], [SSD, PMEM], [SSD, SSD]] {
        with_media(&media, async |_, _, hosts| {
            let [one, two] = &hosts[..] else { unreachable!("two hosts") };
            hosts.iter().for_each(|host| host.windows.set(true));
            let (id, primary) = one.create().await;
            for at in 0..20 {
                primary.write(at * 4096, at as u8).await.expect("written");
            }
            one.wanted.replace(vec![two.id]);
            primary.has(&[1, 2]).await;
            // Around the ring, with retirements.
            for round in 0..12 {
                for at in 0..40 {
                    primary.write(at * 4096, (at + round) as u8).await.expect("written");
                }
                timeout(LONG, primary.log.drain()).await.expect("in time").expect("written back");
            }
            for at in 0..40 {
                primary.write(at * 4096, (at + 100) as u8).await.expect("written");
            }
            assert_eq!(primary.set.placed_blocks() > 300, media[1] == PMEM, "{}", primary.set.placed_blocks());
            let windows = primary.set.windows();
            one.kill();
            let taken = timeout(LONG, two.take_over(&id)).await.expect("in time").expect("taken over");
            for at in 0..40 {
                assert_eq!(read(&*taken.log, at * 4096, 4096).await[0], (at + 100) as u8, "{at}");
            }
            assert_eq!(windows.len(), usize::from(media[1] == PMEM));
        });
    }
}

#[test]
fn a_primary_whose_window_is_gone_goes_on() {
    with_media(&[PMEM, PMEM], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        one.windows.set(true);
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        for at in 0..10 {
            primary.write(at * 4096, 1).await.expect("written");
            // Its next write through the window fails, and the block is sent through another one.
            two.replicas.release(&id).await;
            sleep(MILLISECOND).await;
        }
        primary.has(&[1, 2]).await;
        primary.write(0, 2).await.expect("written");
        assert!(primary.set.placed_blocks() >= 10, "{}", primary.set.placed_blocks());
    });
}
