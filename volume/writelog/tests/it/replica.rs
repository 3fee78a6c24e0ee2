//! Copy of a log at a replica: what it takes and answers, whatever a primary sends.

use std::path::Path;
use std::rc::Rc;

use forebay_block::Extent;
use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::join_all;
use forebay_reactor::{Buf, sleep, spawn, timeout};
use forebay_sim::{CrashKind, DiskFaults};
use forebay_writelog::format::{BlockHeader, EntryKind, EntryRecord, tag_of};
use forebay_writelog::replication::wire::{
    AdoptTerm, CopyProgress, KIND_REQUEST, ReplicaAction, ReplicaAnswer, ReplicaRequest,
};
use forebay_writelog::replication::{AppendCursor, AppendRefused, CopyStart, LogShape, MemberKeeper, RequestGroups};
use forebay_writelog::{LogId, MediumKind, Shelf, ShelfOptions};

use crate::common::{LONG, MILLISECOND};
use crate::replication::{Keeper, path, with_hosts};

/// Primary that sends what it likes, with blocks of one entry.
pub struct RawPrimary {
    pub log: LogId,
    pub link: Connection,
    /// Unit of the log in bytes.
    pub unit: u32,
}

impl RawPrimary {
    pub async fn ask(&self, term: u32, action: ReplicaAction, data: Vec<u8>) -> ReplicaAnswer {
        let request = ReplicaRequest { log: self.log, term, action }.encode();
        let mut message = Message::new(KIND_REQUEST).front(Buf::copy_of(&request));
        if !data.is_empty() {
            message = message.data(Buf::copy_of(&data));
        }
        let answer = timeout(LONG, self.link.request(message)).await.expect("in time").expect("an answer");
        ReplicaAnswer::decode(&answer.front.to_vec()).expect("well-formed")
    }

    /// Creates an empty copy that follows a term.
    pub async fn create(&self, term: u32) -> LogId {
        let (volume, name) = ("one".to_owned(), "pool/a".to_owned());
        let action = ReplicaAction::Create { volume, name, size: 1 << 20, unit: self.unit, epoch: 1, in_memory: false };
        let ReplicaAnswer::Created(copy) = self.ask(term, action, Vec::new()).await else { panic!("not created") };
        assert!(matches!(self.adopt(term, copy, 0).await, ReplicaAnswer::Done(_)));
        copy
    }

    pub async fn adopt(&self, term: u32, copy: LogId, entries: u64) -> ReplicaAnswer {
        self.adopt_log(term, copy, &[(1, entries)]).await
    }

    /// Asks a copy to follow a term. The log of its primary has these spans: a term, and its number of entries.
    async fn adopt_log(&self, term: u32, copy: LogId, spans: &[(u64, u64)]) -> ReplicaAnswer {
        let mut base = LogShape::default();
        spans.iter().for_each(|(term, count)| base.push(*term, *count));
        self.adopt_at(term, copy, base, CopyStart::default()).await
    }

    /// The same, with a log that begins at `start`.
    async fn adopt_at(&self, term: u32, copy: LogId, base: LogShape, start: CopyStart) -> ReplicaAnswer {
        let entries = base.head();
        let adopt = AdoptTerm {
            copy,
            epoch: u64::from(term),
            filling: false,
            base,
            start,
            cut: entries,
            lease_ms: 500,
            automatic: false,
            encryption: None,
        };
        self.ask(term, ReplicaAction::Adopt(adopt), Vec::new()).await
    }

    pub async fn append(&self, term: u32, number: u64) -> ReplicaAnswer {
        self.ask(term, ReplicaAction::Append { durable: true }, self.block(term, number, number as u16)).await
    }

    /// Returns block `number`, which zeroes a range, and says that all but `behind` blocks before it are durable.
    pub fn block(&self, term: u32, number: u64, behind: u16) -> Vec<u8> {
        let extent = Extent::new(0, 4096);
        let (generation, place, crc, time_ms) = (1, 0, 0, 0);
        let entry = EntryRecord {
            kind: EntryKind::Zeroes,
            extent,
            seq: number,
            generation,
            place,
            crc,
            time_ms,
            term,
            salt: None,
        };
        let units = (2 * 64_u32).div_ceil(self.unit);
        let (pos, first_seq, tail_pos, tail_seq) = (number * u64::from(units), number, 0, 0);
        let header = BlockHeader { run: term, count: 1, behind, number, pos, first_seq, tail_pos, tail_seq, units };
        let mut bytes = vec![0; (units * self.unit) as usize];
        header.encode(tag_of(&self.log), &[entry], &mut bytes);
        bytes
    }
}

#[test]
fn a_copy_that_adopts_a_term_takes_nothing_meanwhile() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = Rc::new(RawPrimary { log: [9; 16], link, unit: 512 });
        let copy = raw.create(1).await;
        assert!(matches!(raw.append(1, 0).await, ReplicaAnswer::Done(CopyProgress { head: 1, .. })));
        // Writes take long from here on, so that the adoption waits for one.
        let slow = DiskFaults { write_latency: 50_000_000..60_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        let former = spawn({
            let raw = raw.clone();
            async move { raw.append(1, 1).await }
        });
        sleep(MILLISECOND).await;
        let adopting = spawn({
            let raw = raw.clone();
            async move { raw.adopt(2, copy, 2).await }
        });
        sleep(MILLISECOND).await;
        assert_eq!(raw.append(1, 2).await, ReplicaAnswer::Refused(AppendRefused::NotAdopted));
        assert!(matches!(former.await, ReplicaAnswer::Done(_)), "it was on its way before");
        assert!(matches!(adopting.await, ReplicaAnswer::Done(CopyProgress { head: 2, .. })));
        assert_eq!(raw.append(1, 2).await, ReplicaAnswer::Refused(AppendRefused::Superseded(2)));
        assert!(matches!(raw.append(2, 2).await, ReplicaAnswer::Done(CopyProgress { head: 3, .. })));
    });
}

#[test]
fn a_copy_retires_what_it_was_asked_to_even_if_that_is_being_written() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = Rc::new(RawPrimary { log: [9; 16], link, unit: 512 });
        raw.create(1).await;
        let slow = DiskFaults { write_latency: 50_000_000..60_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        let appending = spawn({
            let raw = raw.clone();
            async move { raw.append(1, 0).await }
        });
        sleep(MILLISECOND).await;
        let retired = raw.ask(1, ReplicaAction::Retire { tail: 1 }, Vec::new()).await;
        assert!(matches!(retired, ReplicaAnswer::Done(CopyProgress { head: 1, tail: 1, .. })), "{retired:?}");
        assert!(matches!(appending.await, ReplicaAnswer::Done(_)));
    });
}

#[test]
fn a_copy_that_began_again_does_not_retire_backwards() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        let copy = raw.create(1).await;
        raw.append(1, 0).await;
        // It lacks entries 1 to 4, which its primary has written back, and begins again at entry 5.
        let start = CopyStart { tail_seq: 5, at: AppendCursor { number: 5, pos: 5, seq: 5 } };
        let mut base = LogShape::empty_at(5);
        base.push(1, 3);
        let begun = raw.adopt_at(2, copy, base.clone(), start).await;
        assert!(matches!(begun, ReplicaAnswer::Done(CopyProgress { head: 5, tail: 5, .. })), "{begun:?}");
        // That tail is not durable at the primary yet.
        let retired = raw.ask(2, ReplicaAction::Retire { tail: 3 }, Vec::new()).await;
        assert!(matches!(retired, ReplicaAnswer::Done(CopyProgress { tail: 5, .. })), "{retired:?}");
        let appended = raw.ask(2, ReplicaAction::Append { durable: true }, raw.block(1, 5, 5)).await;
        assert!(matches!(appended, ReplicaAnswer::Done(CopyProgress { head: 6, .. })), "{appended:?}");
        hosts[1].replicas.release(&raw.log).await;
        let again = raw.adopt_at(2, copy, base, start).await;
        assert!(matches!(again, ReplicaAnswer::Done(CopyProgress { head: 6, .. })), "{again:?}");
    });
}

#[test]
fn a_copy_that_has_retired_more_than_its_next_primary_does_not_go_back() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        let copy = raw.create(1).await;
        for number in 0..3 {
            raw.append(1, number).await;
        }
        raw.ask(1, ReplicaAction::Retire { tail: 2 }, Vec::new()).await;
        // The next primary has retired nothing.
        for _ in 0..2 {
            let followed = raw.adopt_log(2, copy, &[(1, 3)]).await;
            assert!(matches!(followed, ReplicaAnswer::Done(CopyProgress { head: 3, tail: 2, .. })), "{followed:?}");
            hosts[1].replicas.release(&raw.log).await;
        }
    });
}

#[test]
fn a_copy_that_begins_again_with_a_block_that_is_retired_is_filled() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        let copy = raw.create(1).await;
        // The primary finds its tail, entry 5, from block 3: entries 3 and 4 are retired, each in a block of its own.
        let start = CopyStart { tail_seq: 5, at: AppendCursor { number: 3, pos: 3, seq: 3 } };
        let mut base = LogShape::empty_at(5);
        base.push(1, 3);
        let begun = raw.adopt_at(2, copy, base.clone(), start).await;
        assert!(matches!(begun, ReplicaAnswer::Done(CopyProgress { head: 3, tail: 5, .. })), "{begun:?}");
        for number in [3, 4, 4, 5, 6, 7] {
            let block = raw.block(1, number, number as u16);
            let appended = raw.ask(2, ReplicaAction::Append { durable: true }, block).await;
            assert!(
                matches!(appended, ReplicaAnswer::Done(CopyProgress { head, .. }) if head == number + 1),
                "{number}: {appended:?}"
            );
        }
        hosts[1].replicas.release(&raw.log).await;
        let again = raw.adopt_at(2, copy, base, start).await;
        assert!(matches!(again, ReplicaAnswer::Done(CopyProgress { head: 8, tail: 5, .. })), "{again:?}");
    });
}

#[test]
fn what_a_former_primary_has_left_over_is_not_found_again() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        let copy = raw.create(1).await;
        for number in 0..3 {
            raw.append(1, number).await;
        }
        // The next primary has two of them, and others of term 2 after them.
        let followed = raw.adopt_log(3, copy, &[(1, 2), (2, 2)]).await;
        assert!(matches!(followed, ReplicaAnswer::Done(CopyProgress { head: 2, .. })), "{followed:?}");
        hosts[1].replicas.release(&raw.log).await;
        let again = raw.adopt_log(3, copy, &[(1, 2), (2, 2)]).await;
        assert!(matches!(again, ReplicaAnswer::Done(CopyProgress { head: 2, .. })), "{again:?}");
    });
}

#[test]
fn a_block_is_not_written_before_those_that_it_says_are_durable() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = Rc::new(RawPrimary { log: [9; 16], link, unit: 512 });
        raw.create(1).await;
        let append = |number: u64| {
            let (raw, block) = (raw.clone(), raw.block(1, number, 0));
            spawn(async move { raw.ask(1, ReplicaAction::Append { durable: true }, block).await })
        };
        let slow = DiskFaults { write_latency: 50_000_000..60_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        drop(append(0));
        sleep(MILLISECOND).await;
        assert!(world.set_disk_faults(path(2), None));
        drop(append(1));
        sleep(10 * MILLISECOND).await;
        assert!(world.lose_disk(path(2), CrashKind::Power));
        let options = ShelfOptions { small: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(&path(2)), options).await.expect("the device");
        let info = shelf.inspect(&raw.log).await.expect("a log that merely ends");
        assert!(info.dirty_entries <= 1, "{info:?}");
    });
}

#[test]
fn requests_of_several_logs_share_a_message_and_a_sync() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let logs: Vec<RawPrimary> =
            [7, 8, 9].map(|log| RawPrimary { log: [log; 16], link: link.clone(), unit: 512 }).into();
        logs[0].create(1).await;
        logs[1].create(1).await;
        let groups = RequestGroups::default();
        let appends = (0..3).flat_map(|number| {
            logs.iter().map(move |raw| {
                let action = ReplicaAction::Append { durable: true };
                (ReplicaRequest { log: raw.log, term: 1, action }, Buf::copy_of(&raw.block(1, number, number as u16)))
            })
        });
        let appends: Vec<_> = appends.collect();
        let asked = appends.iter().map(|(request, block)| Box::pin(groups.ask(&link, request, block.clone().into())));
        for (at, answer) in (0..).zip(join_all(asked).await) {
            match (at % 3, answer.expect("an answer")) {
                // The third log has no copy there.
                (2, answer) => assert_eq!(answer, ReplicaAnswer::Refused(AppendRefused::NotAdopted)),
                (_, ReplicaAnswer::Done(progress)) => assert_eq!(progress.head, 3, "all are durable at once"),
                (_, answer) => panic!("{answer:?}"),
            }
        }
        assert_eq!(groups.sent(), (9, 1));
        assert!(world.lose_disk(path(2), CrashKind::Power));
        let options = ShelfOptions { small: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(&path(2)), options).await.expect("the device");
        for raw in &logs[..2] {
            let info = shelf.inspect(&raw.log).await.expect("a log");
            assert_eq!(info.dirty_entries, 3, "{info:?}");
        }
    });
}

#[test]
fn a_copy_retires_what_it_gets_in_the_same_message() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link: link.clone(), unit: 512 };
        raw.create(1).await;
        let groups = RequestGroups::default();
        let request = |action| ReplicaRequest { log: raw.log, term: 1, action };
        let requests: Vec<_> = (0..3)
            .map(|number| (ReplicaAction::Append { durable: true }, raw.block(1, number, number as u16)))
            .chain([(ReplicaAction::Retire { tail: 3 }, Vec::new())])
            .map(|(action, data)| (request(action), Buf::copy_of(&data)))
            .collect();
        let asked = requests.iter().map(|(request, data)| Box::pin(groups.ask(&link, request, data.clone().into())));
        let answers = join_all(asked).await;
        assert_eq!(groups.sent(), (4, 1));
        assert!(matches!(answers[3], Ok(ReplicaAnswer::Done(CopyProgress { head: 3, tail: 3, .. }))), "{answers:?}");
    });
}

#[test]
fn a_sync_covers_appends_behind_one_that_is_still_being_written() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = Rc::new(RawPrimary { log: [9; 16], link: link.clone(), unit: 512 });
        raw.create(1).await;
        let slow = DiskFaults { write_latency: 50_000_000..60_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        let first = spawn({
            let raw = raw.clone();
            async move { raw.append(1, 0).await }
        });
        sleep(MILLISECOND).await;
        assert!(world.set_disk_faults(path(2), None));
        let groups = RequestGroups::default();
        let request = ReplicaRequest { log: raw.log, term: 1, action: ReplicaAction::Append { durable: true } };
        let blocks = [1, 2].map(|number| Buf::copy_of(&raw.block(1, number, number as u16)));
        let asked = blocks.into_iter().map(|block| Box::pin(groups.ask(&link, &request, block.into())));
        for answer in join_all(asked).await {
            assert!(matches!(answer, Ok(ReplicaAnswer::Done(CopyProgress { head: 0, .. }))), "{answer:?}");
        }
        assert_eq!(groups.sent(), (2, 1));
        let last = first.await;
        assert!(matches!(last, ReplicaAnswer::Done(CopyProgress { head: 3, .. })), "all three are durable: {last:?}");
    });
}

#[test]
fn requests_wait_for_answers_only_for_a_moment() {
    with_hosts(2, async |world, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = Rc::new(RawPrimary { log: [9; 16], link: link.clone(), unit: 512 });
        raw.create(1).await;
        let slow = DiskFaults { write_latency: 50_000_000..60_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        let groups = Rc::new(RequestGroups::default());
        let ask = |number: u64| {
            let (raw, link, groups) = (raw.clone(), link.clone(), groups.clone());
            spawn(async move {
                let request = ReplicaRequest { log: raw.log, term: 1, action: ReplicaAction::Append { durable: true } };
                let block = raw.block(1, number, number as u16);
                groups.ask(&link, &request, Buf::copy_of(&block).into()).await
            })
        };
        let mut answers = Vec::new();
        for number in 0..5 {
            answers.push(ask(number));
            sleep(MILLISECOND).await;
        }
        assert_eq!(groups.sent(), (5, 5), "none of them has been answered");
        for answer in answers {
            assert!(matches!(answer.await, Ok(ReplicaAnswer::Done(_))));
        }
        drop(ask(5));
        hosts[1].kill();
        let ended = timeout(LONG, ask(6)).await.expect("in time");
        assert!(ended.is_err(), "{ended:?}");
    });
}

#[test]
fn entries_of_a_term_that_cannot_be_next_are_refused() {
    with_hosts(2, async |_, hosts| {
        let link = Keeper(hosts[0].clone()).connection(hosts[1].id).expect("a connection");
        let raw = RawPrimary { log: [9; 16], link, unit: 512 };
        let copy = raw.create(2).await;
        raw.append(2, 0).await;
        raw.adopt_log(3, copy, &[(2, 1)]).await;
        for of in [1, 4] {
            let append = ReplicaAction::Append { durable: true };
            let answer = raw.ask(3, append, raw.block(of, 1, 1)).await;
            assert!(matches!(&answer, ReplicaAnswer::Failed(why) if why.contains("term")), "{answer:?}");
        }
        assert!(matches!(raw.append(3, 1).await, ReplicaAnswer::Done(CopyProgress { head: 2, .. })));
    });
}
