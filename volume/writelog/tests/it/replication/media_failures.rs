//! The primary's own medium fails while a replica has a copy: nothing fails for hosts.

use std::rc::Rc;

use forebay_block::{BlockDevice, BlockRequest, Error, ErrorKind, Extent};
use forebay_reactor::{sleep, spawn, timeout};
use forebay_sim::DiskFaults;
use forebay_writelog::Mode;
use forebay_writelog::replication::{MemberState, ReplicaPolicy};

use super::{Host, Primary, path, peer, reopened, with_hosts};
use crate::common::{LONG, MILLISECOND, write};

/// Creates a log with a replica.
async fn mirrored(one: &Rc<Host>, two: &Rc<Host>) -> Primary {
    let (_, primary) = one.create().await;
    one.wanted.replace(vec![two.id]);
    primary.set.wanted_changed();
    primary.has(&[1, 2]).await;
    primary
}

async fn first_byte(primary: &Primary, offset: u64) -> u8 {
    let read = primary.log.submit(BlockRequest::Read(Extent::new(offset, 4096)));
    timeout(LONG, read).await.expect("in time").expect("read").into_data().to_vec()[0]
}

#[test]
fn writes_in_flight_succeed_when_the_own_medium_fails() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        for at in 0..16 {
            primary.write(at * 4096, 1).await.expect("written");
        }
        let failing = DiskFaults { write_error_ppm: 1_000_000, sync_error_ppm: 1_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(1), Some(failing)));
        let writes: Vec<_> = (0..16).map(|at| spawn(primary.log.submit(write(at * 4096 + 65536, 2, 4096)))).collect();
        for written in writes {
            timeout(LONG, written).await.expect("in time").expect("written");
        }
        let off = async {
            while !matches!(primary.log.mode(), Mode::Off(_)) {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, off).await.expect("it goes on without the log");
        assert_eq!(primary.set.record().complete().collect::<Vec<_>>(), [peer(2)], "its own copy is lost");
        for at in 0..32 {
            assert_eq!(first_byte(&primary, at * 4096).await, if at < 16 { 1 } else { 2 });
        }
        primary.write(0, 3).await.expect("written");
        assert_eq!(first_byte(&primary, 0).await, 3);
    });
}

#[test]
fn a_primary_that_is_stopped_and_whose_write_back_is_refused_fails_once() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        primary.write(0, 1).await.expect("written");
        let gate = one.image.base.gate.clone();
        gate.closed.set(true);
        let log = primary.log.clone();
        let draining = spawn(async move { log.drain().await });
        while gate.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        primary.set.stop(Error::new(ErrorKind::Fenced, "another start"));
        let failed = timeout(LONG, primary.log.submit(write(8192, 2, 4096))).await.expect("in time");
        assert_eq!(failed.expect_err("stopped").kind(), ErrorKind::Fenced);
        assert!(matches!(primary.log.mode(), Mode::Failed(_)));
        // The backend refuses what was in flight, too.
        gate.error.set(Some(ErrorKind::Fenced));
        gate.open();
        let drained = timeout(LONG, draining).await.expect("in time");
        assert_eq!(drained.expect_err("nothing is written back").kind(), ErrorKind::Fenced);
        let reason = primary.log.mode().reason().expect("failed").to_string();
        assert!(reason.contains("another start"), "{reason}");
        let _ = timeout(LONG, primary.log.close(false)).await.expect("it ends");
    });
}

#[test]
fn what_cannot_be_read_here_is_read_from_a_replica() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        for at in 1..9 {
            primary.log.submit(write(at * 4096, at as u8, 4096)).await.expect("written");
        }
        timeout(LONG, primary.log.close(false)).await.expect("in time").expect("closed");
        drop(primary);
        // Nothing is in memory any more.
        let primary = reopened(one, &one.image.log.get()).await;
        primary.has(&[1, 2]).await;
        assert_eq!(first_byte(&primary, 8 * 4096).await, 8);
        assert_eq!(primary.log.stats().dirty_entries, 8);
        let failing = DiskFaults { read_error_ppm: 1_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(1), Some(failing.clone())));
        assert!(world.set_disk_faults(path(2), Some(failing)));
        let read = primary.log.submit(BlockRequest::Read(Extent::new(4096, 4096)));
        assert!(timeout(LONG, read).await.expect("in time").is_err(), "no copy can be read");
        assert!(world.set_disk_faults(path(2), None));
        for at in 1..9 {
            assert_eq!(first_byte(&primary, at * 4096).await, at as u8);
        }
        timeout(LONG, primary.log.drain()).await.expect("in time").expect("written back");
        assert!(primary.log.mode().is_on());
    });
}

#[test]
fn a_replica_whose_medium_fails_is_dropped_although_it_answers() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        let failing = DiskFaults { write_error_ppm: 1_000_000, sync_error_ppm: 1_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(failing)));
        timeout(LONG, primary.write(0, 1)).await.expect("in time").expect("written");
        assert_eq!(primary.set.record().state(two.id).filter(|state| *state == MemberState::Complete), None);
    });
}

#[test]
fn writes_that_wait_for_replicas_succeed_when_the_log_is_given_up() {
    with_hosts(1, async |world, hosts| {
        let [one] = &hosts[..] else { unreachable!("one host") };
        one.image.policy.set(ReplicaPolicy { replicas_min: 1, ..ReplicaPolicy::default() });
        let (_, primary) = one.create().await;
        let waits = spawn(primary.log.submit(write(0, 1, 4096)));
        sleep(100 * MILLISECOND).await;
        let failing = DiskFaults { write_error_ppm: 1_000_000, sync_error_ppm: 1_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(1), Some(failing)));
        timeout(LONG, primary.write(4096, 2)).await.expect("in time").expect("written, past the log");
        timeout(LONG, waits).await.expect("in time").expect("it is at the backend");
        assert_eq!((first_byte(&primary, 0).await, first_byte(&primary, 4096).await), (1, 2));
    });
}
