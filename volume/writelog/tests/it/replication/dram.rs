//! Logs in memory: they are durable only while another member has them.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent};
use forebay_reactor::{sleep, spawn, timeout};
use forebay_writelog::replication::MemberState;
use forebay_writelog::replication::wire::{ReplicaAction, ReplicaAnswer};
use forebay_writelog::{MediumKind, Mode, Shelf};

use super::attached::{attachment, take_over};
use super::{Host, Primary, peer, with_media};
use crate::common::{LONG, MILLISECOND, write};

const DRAM: MediumKind = MediumKind::Dram;
const PMEM: MediumKind = MediumKind::Pmem;
const SSD: MediumKind = MediumKind::Ssd;
/// Longer than anything takes that needs no replica.
const PATIENT: Duration = Duration::from_secs(1);

/// Creates a log with replicas at the other hosts.
async fn mirrored(hosts: &[Rc<Host>]) -> Primary {
    let others: Vec<_> = hosts[1..].iter().map(|host| host.id).collect();
    hosts[0].wanted.replace(others);
    let (_, primary) = hosts[0].create().await;
    let all: Vec<u8> = hosts.iter().map(|host| host.id.0[0]).collect();
    primary.has(&all).await;
    primary
}

async fn first_byte(device: &dyn BlockDevice, offset: u64) -> u8 {
    let read = device.submit(BlockRequest::Read(Extent::new(offset, 4096)));
    timeout(LONG, read).await.expect("in time").expect("read").into_data().to_vec()[0]
}

/// Waits until a volume goes on without its log.
async fn without_log(primary: &Primary) {
    let off = async {
        while !matches!(primary.log.mode(), Mode::Off(_)) {
            sleep(MILLISECOND).await;
        }
    };
    timeout(LONG, off).await.unwrap_or_else(|_| panic!("it is {:?}", primary.log.mode()));
}

#[test]
fn a_replica_in_persistent_memory_goes_on_with_the_log_as_a_durable_one() {
    with_media(&[DRAM, PMEM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        primary.write(0, 1).await.expect("written");
        hosts[0].kill();
        let second = hosts[1].take_over(&hosts[0].image.log.get()).await.expect("taken over");
        timeout(LONG, second.write(4096, 2)).await.expect("in time").expect("written without a replica");
        assert!(second.log.mode().is_on() && second.set.stall().is_none());
        assert_eq!((first_byte(&*second.log, 0).await, first_byte(&*second.log, 4096).await), (1, 2));
    });
}

#[test]
fn writes_are_acknowledged_only_while_a_replica_is_complete() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (_, primary) = one.create().await;
        assert!(primary.set.is_stalled());
        let why = "writes wait: the log is in memory, and no replica is complete";
        assert_eq!(primary.set.stall().as_deref(), Some(why));
        let first = spawn(primary.log.submit(write(0, 1, 4096)));
        assert!(timeout(PATIENT, primary.write(4096, 1)).await.is_err(), "acknowledged without a replica");
        one.wanted.replace(vec![two.id]);
        primary.set.wanted_changed();
        timeout(LONG, first).await.expect("in time").expect("written");
        primary.has(&[1, 2]).await;
        timeout(LONG, primary.set.mirrored()).await.expect("in time").expect("mirrored");
        timeout(LONG, primary.write(0, 2)).await.expect("in time").expect("written");
        assert!(primary.log.mode().is_on() && primary.set.stall().is_none());
    });
}

#[test]
fn a_log_that_loses_its_last_replica_is_written_back_and_given_up() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        let base = hosts[0].image.base.clone();
        for at in 0..16 {
            primary.write(at * 4096, 1).await.expect("written");
        }
        assert_eq!(base.bytes.borrow()[0], 0, "it is in the log only");
        hosts[1].kill();
        // These are in flight while the replica is lost: none fails, and none is acknowledged before it is at the backend.
        let writes: Vec<_> = (16..32_u64)
            .map(|at| {
                let (written, base) = (primary.log.submit(write(at * 4096, 2, 4096)), base.clone());
                spawn(async move { written.await.map(|_| base.bytes.borrow()[at as usize * 4096]) })
            })
            .collect();
        for written in writes {
            assert_eq!(timeout(LONG, written).await.expect("in time").expect("written"), 2);
        }
        without_log(&primary).await;
        assert!(primary.set.has_lost_mirror() && primary.set.stall().is_none());
        for at in 0..32 {
            assert_eq!(base.bytes.borrow()[at * 4096], if at < 16 { 1 } else { 2 });
        }
        primary.write(0, 3).await.expect("written");
        assert_eq!((first_byte(&*primary.log, 0).await, base.bytes.borrow()[0]), (3, 3), "without a log");
    });
}

#[test]
fn a_log_without_writes_in_flight_is_given_up_as_well() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        primary.write(0, 1).await.expect("written");
        hosts[1].kill();
        without_log(&primary).await;
        assert_eq!(hosts[0].image.base.bytes.borrow()[0], 1);
    });
}

#[test]
fn a_replica_that_was_started_again_has_no_copy() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        primary.write(0, 1).await.expect("written");
        let id = hosts[0].image.log.get();
        // All that its process held is gone.
        hosts[1].replicas.release(&id).await;
        hosts[1].shelf.discard(&id).await.expect("discarded");
        without_log(&primary).await;
        assert_eq!(hosts[0].image.base.bytes.borrow()[0], 1);
        assert_eq!(primary.set.record().state(peer(2)), None, "nothing is filled any more");
    });
}

#[test]
fn a_log_with_another_replica_goes_on() {
    with_media(&[DRAM, DRAM, DRAM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        primary.write(0, 1).await.expect("written");
        hosts[1].kill();
        primary.has(&[1, 3]).await;
        primary.write(4096, 2).await.expect("written");
        assert!(primary.log.mode().is_on());
        // The primary is lost as well: the last copy serves at once, and is not relied on.
        hosts[0].kill();
        let id = hosts[0].image.log.get();
        let third = hosts[2].take_over(&id).await.expect("taken over");
        assert_eq!((first_byte(&*third.log, 0).await, first_byte(&*third.log, 4096).await), (1, 2));
        third.write(8192, 3).await.expect("written");
        without_log(&third).await;
        let bytes = hosts[0].image.base.bytes.borrow();
        assert_eq!((bytes[0], bytes[4096], bytes[8192]), (1, 2, 3));
    });
}

#[test]
fn a_takeover_with_another_replica_goes_on_with_the_log() {
    with_media(&[DRAM, DRAM, DRAM], async |_, _, hosts| {
        let primary = mirrored(&hosts).await;
        primary.write(0, 1).await.expect("written");
        hosts[0].kill();
        hosts[1].wanted.replace(vec![peer(3)]);
        let second = hosts[1].take_over(&hosts[0].image.log.get()).await.expect("taken over");
        timeout(LONG, second.write(0, 2)).await.expect("in time").expect("written");
        assert!(second.log.mode().is_on());
        assert_eq!(hosts[0].image.base.bytes.borrow()[0], 0, "it is in the log only");
    });
}

#[test]
fn no_durable_log_has_a_copy_in_memory() {
    for medium in [SSD, PMEM] {
        with_media(&[medium, DRAM], async |_, _, hosts| {
            let [one, two] = &hosts[..] else { unreachable!("two hosts") };
            one.wanted.replace(vec![two.id]);
            let (id, primary) = one.create().await;
            primary.write(0, 1).await.expect("written");
            sleep(PATIENT).await;
            assert_eq!((primary.set.record().state(two.id), two.shelf.ids().contains(&id)), (None, false));
        });
    }
}

#[test]
fn a_replica_in_memory_says_why_it_takes_no_copy() {
    with_media(&[SSD, DRAM], async |_, _, hosts| {
        let raw = crate::replica::RawPrimary {
            log: [9; 16],
            link: forebay_writelog::replication::MemberKeeper::connection(&super::Keeper(hosts[0].clone()), peer(2))
                .expect("a connection"),
            unit: 64,
        };
        let create = |in_memory| ReplicaAction::Create {
            volume: "one".into(),
            name: "pool/a".into(),
            size: 1 << 20,
            unit: 64,
            epoch: 1,
            in_memory,
        };
        let ReplicaAnswer::Failed(why) = raw.ask(1, create(false), Vec::new()).await else { panic!("it takes one") };
        assert!(why.contains("no copy in memory of a log that is not in memory itself"), "{why}");
        assert!(matches!(raw.ask(1, create(true), Vec::new()).await, ReplicaAnswer::Created(_)));
    });
}

#[test]
fn a_disk_has_no_copy_of_a_log_in_memory() {
    with_media(&[DRAM, SSD], async |_, _, hosts| {
        hosts[0].wanted.replace(vec![peer(2)]);
        let (_, primary) = hosts[0].create().await;
        let written = spawn(primary.log.submit(write(0, 1, 4096)));
        let failed = timeout(LONG, primary.set.mirrored()).await.expect("in time").expect_err("no replica");
        assert_eq!(failed.kind(), ErrorKind::TimedOut);
        assert_eq!(primary.set.record().state(peer(2)), None);
        timeout(LONG, written).await.expect("in time").expect("written without a log");
        without_log(&primary).await;
        assert_eq!(hosts[0].image.base.bytes.borrow()[0], 1);
    });
}

#[test]
fn a_log_in_memory_has_members_or_is_none() {
    with_media(&[DRAM], async |_, _, hosts| {
        let refused = hosts[0].shelf.create("one", "pool/a", 1 << 20, 0).await.expect_err("no members");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("it needs a replica"), "{refused}");
    });
}

#[test]
fn an_attachment_that_gets_no_replica_leaves_the_volume_without_a_log() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        two.kill();
        let at_one = attachment(one).await.expect("opened");
        let failed =
            timeout(LONG, at_one.attach(&super::attached::PLACE)).await.expect("in time").expect_err("no replica");
        assert_eq!(failed.kind(), ErrorKind::TimedOut);
        assert!(failed.to_string().contains("no replica has taken a copy"), "{failed}");
        assert_eq!((one.image.log_record.borrow().log.is_none(), at_one.log().is_none()), (true, true));
        assert_eq!(one.shelf.ids().len(), 0);
        at_one.device().submit(write(0, 1, 4096)).await.expect("written");
        assert_eq!(one.image.base.bytes.borrow()[0], 1);
    });
}

#[test]
fn an_attached_log_in_memory_serves_at_once_and_is_released_with_its_replica() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let at_one = attachment(one).await.expect("opened");
        at_one.attach(&super::attached::PLACE).await.expect("attached");
        let set = at_one.members().expect("members");
        assert_eq!(set.record().state(two.id), Some(MemberState::Complete), "it waits for the first replica");
        timeout(LONG, at_one.device().submit(write(0, 1, 4096))).await.expect("in time").expect("written");
        two.kill();
        let released = async {
            while one.image.log_record.borrow().log.is_some() {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, released).await.expect("the record names no log any more");
        assert_eq!(one.image.base.bytes.borrow()[0], 1);
        timeout(LONG, at_one.device().submit(write(0, 2, 4096))).await.expect("in time").expect("written");
        assert_eq!(first_byte(&*at_one.device(), 0).await, 2);
    });
}

#[test]
fn a_primary_that_was_started_again_names_those_that_take_over() {
    with_media(&[DRAM, DRAM], async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let at_one = attachment(one).await.expect("opened");
        at_one.attach(&super::attached::PLACE).await.expect("attached");
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        let id = one.image.log_record.borrow().log.as_ref().expect("a log").id;
        at_one.close().await.expect("closed");
        // All that its process held is gone.
        drop(at_one);
        one.shelf.discard(&id).await.expect("discarded");
        one.image.owner.set(None);
        let refused = attachment(one).await.err().expect("no copy");
        assert_eq!(refused.kind(), ErrorKind::NotFound);
        let says =
            format!("was in memory, and ended with its process; complete copies, which may take it over: {}", two.id);
        assert!(refused.to_string().contains(&says), "{refused}");
        let at_two = take_over(two).await.expect("taken over");
        assert_eq!(first_byte(&*at_two.device(), 0).await, 7);
        timeout(LONG, at_two.device().submit(write(4096, 8, 4096))).await.expect("in time").expect("written");
        let released = async {
            while one.image.log_record.borrow().log.is_some() {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, released).await.expect("it has no mirror, and is given up");
        let bytes = one.image.base.bytes.borrow();
        assert_eq!((bytes[0], bytes[4096]), (7, 8));
    });
}

#[test]
fn memory_of_this_process_holds_logs() {
    with_media(&[SSD], async |_, _, hosts| {
        let shelf = Shelf::in_process().await.expect("memory");
        let id = shelf.create_with_members(("one", "pool/a"), 1 << 30, 1, [3; 16]).await.expect("room");
        assert_eq!((shelf.medium(), shelf.sizes()), (DRAM, vec![(id, 1 << 30)]));
        assert_eq!(shelf.copy_of(&id).await.expect("a copy"), ([3; 16], 0));
        shelf.discard(&id).await.expect("discarded");
        assert_eq!(shelf.ids().len(), 0);
        let refused = Shelf::open(DRAM, "/logs".as_ref(), forebay_writelog::ShelfOptions::default()).await;
        assert_eq!(refused.err().expect("no path").kind(), ErrorKind::Invalid);
        drop(hosts);
    });
}
