//! Leases: what a primary that is cut off still answers, and when a replica takes over.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent};
use forebay_reactor::{now, sleep, spawn, timeout};
use forebay_sim::CrashKind;
use forebay_writelog::replication::ReplicaPolicy;

use super::{Host, Primary, path, peer, with_hosts};
use crate::common::{LONG, MILLISECOND};

const LEASE: Duration = Duration::from_millis(100);

/// Creates a log with a replica, and the first block written with 1.
async fn mirrored(one: &Rc<Host>, two: &Rc<Host>) -> Primary {
    one.image.policy.set(ReplicaPolicy { lease: LEASE, ..ReplicaPolicy::default() });
    let (_, primary) = one.create().await;
    one.wanted.replace(vec![two.id]);
    primary.set.wanted_changed();
    primary.has(&[1, 2]).await;
    primary.write(0, 1).await.expect("written");
    primary
}

#[test]
fn a_primary_that_is_cut_off_reads_nothing_once_another_one_serves() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let former = Rc::new(mirrored(one, two).await);
        // Reads that were answered with the old content, by the time of their submission.
        let answered = Rc::new(RefCell::new(Vec::new()));
        let (reader, seen) = (former.clone(), answered.clone());
        drop(spawn(async move {
            loop {
                let begun = now();
                match reader.log.submit(BlockRequest::Read(Extent::new(0, 4096))).await {
                    Ok(reply) => seen.borrow_mut().push((begun, reply.into_data().to_vec()[0])),
                    Err(error) => break assert_eq!(error.kind(), ErrorKind::Fenced),
                }
                sleep(MILLISECOND / 10).await;
            }
        }));
        // The record can be reached, but nothing is stored: the primary goes on.
        one.kill();
        let cut = now();
        let id = one.image.log.get();
        let primary = timeout(LONG, two.take_over(&id)).await.expect("in time").expect("taken over");
        timeout(LONG, primary.write(0, 2)).await.expect("in time").expect("written");
        let served = now();
        timeout(LONG, former.set.ended()).await.expect("it stops");
        let answered = answered.borrow();
        assert!(answered.iter().any(|(begun, _)| *begun > cut), "it reads until its lease has run out");
        assert!(answered.iter().all(|(begun, byte)| *byte == 1 && *begun < served), "{served:?}: {answered:?}");
    });
}

#[test]
fn an_idle_primary_keeps_its_lease() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        for _ in 0..10 {
            sleep(LEASE * 3 / 4).await;
            let begun = now();
            primary.log.submit(BlockRequest::Read(Extent::new(0, 4096))).await.expect("read");
            assert!(begun.elapsed() < LEASE / 4, "a read waits for a promise");
        }
        assert_eq!(primary.set.record().complete().collect::<Vec<_>>(), [peer(1), peer(2)]);
    });
}

#[test]
fn a_silent_replica_is_dropped_although_nothing_is_written() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let primary = mirrored(one, two).await;
        // Nothing is left to be retired, either.
        timeout(LONG, primary.log.drain()).await.expect("in time").expect("written back");
        sleep(LEASE).await;
        // Nothing is answered, and no connection ends.
        two.parked.on.set(true);
        primary.has(&[1]).await;
        let reads = timeout(LONG, primary.log.submit(BlockRequest::Read(Extent::new(0, 4096)))).await;
        assert!(reads.expect("in time").is_ok());
    });
}

#[test]
fn a_replica_that_was_started_again_waits_for_a_promise_that_it_may_have_given() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let former = mirrored(one, two).await;
        one.kill();
        two.kill();
        world.lose_disk(path(2), CrashKind::Kill);
        let begun = now();
        let two = Host::start(2, None, &one.image, &Default::default()).await;
        let primary = timeout(LONG, two.take_over(&one.image.log.get())).await.expect("in time");
        assert!(begun.elapsed() >= LEASE, "{:?}", begun.elapsed());
        timeout(LONG, primary.expect("taken over").write(0, 2)).await.expect("in time").expect("written");
        drop(former);
    });
}
