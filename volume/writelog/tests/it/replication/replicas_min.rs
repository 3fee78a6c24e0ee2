//! Number of complete replicas below which writes are not acknowledged.

use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent};
use forebay_reactor::{spawn, timeout};
use forebay_writelog::replication::ReplicaPolicy;

use super::{reopened, with_hosts};
use crate::common::{LONG, write};

const PATIENT: Duration = Duration::from_secs(3);

#[test]
fn writes_wait_while_too_few_replicas_are_complete() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        one.image.policy.set(ReplicaPolicy { replicas_min: 1, ..ReplicaPolicy::default() });
        let (_, primary) = one.create().await;
        assert!(primary.set.is_stalled());
        let why = "writes wait: 1 copies are complete, and min-replicas=1 needs 2";
        assert_eq!(primary.set.stall().as_deref(), Some(why));
        let first = spawn(primary.log.submit(write(0, 1, 4096)));
        // A write that waits is answered once the first replica is complete.
        assert!(timeout(PATIENT, primary.write(4096, 1)).await.is_err(), "answered without a replica");
        let data = primary.log.submit(BlockRequest::Read(Extent::new(0, 4096))).await.expect("reads go on").into_data();
        assert_eq!(data.to_vec()[0], 1);
        one.wanted.replace(vec![two.id]);
        primary.set.wanted_changed();
        timeout(LONG, first).await.expect("in time").expect("written");
        primary.has(&[1, 2]).await;
        assert_eq!(primary.set.stall(), None);
        timeout(LONG, primary.write(0, 2)).await.expect("in time").expect("written");
        // The replica is lost: nothing is answered until there is one again.
        two.kill();
        primary.has(&[1]).await;
        assert!(timeout(PATIENT, primary.write(4096, 2)).await.is_err(), "answered without a replica");
        let waits = spawn(primary.log.submit(write(8192, 2, 4096)));
        // The operator lets it go on.
        one.image.policy.set(ReplicaPolicy::default());
        primary.set.wanted_changed();
        timeout(LONG, waits).await.expect("in time").expect("written");
    });
}

#[test]
fn a_log_that_is_closed_ends_writes_that_wait_for_replicas() {
    with_hosts(1, async |_, hosts| {
        let [one] = &hosts[..] else { unreachable!("one host") };
        one.image.policy.set(ReplicaPolicy { replicas_min: 1, ..ReplicaPolicy::default() });
        let (id, primary) = one.create().await;
        let waits = spawn(primary.log.submit(write(0, 1, 4096)));
        assert!(timeout(PATIENT, primary.write(4096, 1)).await.is_err(), "answered without a replica");
        timeout(LONG, primary.log.close(false)).await.expect("in time").expect("closed");
        let failed = timeout(LONG, waits).await.expect("in time").expect_err("nobody has promised it");
        assert_eq!(failed.kind(), ErrorKind::ShuttingDown);
        drop(primary);
        let again = reopened(one, &id).await;
        let data = again.log.submit(BlockRequest::Read(Extent::new(0, 4096))).await.expect("read").into_data();
        assert_eq!(data.to_vec()[0], 1, "it was in the log all the same");
    });
}
