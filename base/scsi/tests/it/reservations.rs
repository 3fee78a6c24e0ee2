//! Reservations between two hosts.

use forebay_load::model::Model;
use forebay_scsi::TaskFunction;

use crate::common::{Host, identifier, read, simulate, write};

const CONFLICT: (u8, Option<(u8, u16)>) = (0x18, None);

/// Executes a PERSISTENT RESERVE OUT with the basic parameter list.
async fn reserve_out(host: &mut Host, action: u8, scope_type: u8, keys: [u64; 2]) -> (u8, Option<(u8, u16)>) {
    let mut list = keys.map(u64::to_be_bytes).concat();
    list.resize(24, 0);
    host.settle(0, &[0x5f, action, scope_type, 0, 0, 0, 0, 0, 24, 0], &list).await.failure()
}

#[test]
fn a_reservation_excludes_the_other_host() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, true);
        disks.add(0, &model);
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        one.settle(0, &[0; 6], &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        assert_eq!(reserve_out(&mut one, 0, 0, [0, 7]).await, (0, None), "registered");
        assert_eq!(reserve_out(&mut one, 1, 1, [7, 0]).await, (0, None), "write exclusive");
        assert_eq!(other.run(0, &write(0, 1), &[1; 512]).await.failure(), CONFLICT);
        other.run(0, &read(0, 1), &[]).await.ok();
        one.run(0, &write(0, 1), &[2; 512]).await.ok();
        assert_eq!(model.at(0), 2);
        // READ FULL STATUS names the registrant in the form of the target's transport.
        let status = other.run(0, &[0x5e, 3, 0, 0, 0, 0, 0, 1, 0, 0], &[]).await.ok();
        assert_eq!((status[32] & 0x3f, &status[36..44]), (6, &identifier("a")[..]), "{status:x?}");
        // The other host preempts it.
        assert_eq!(reserve_out(&mut other, 0, 0, [0, 8]).await, (0, None));
        assert_eq!(reserve_out(&mut other, 4, 1, [8, 7]).await, (0, None));
        assert_eq!(one.told(0).await, Some((6, 0x2a05)), "registration preempted");
        assert_eq!(one.run(0, &write(0, 1), &[3; 512]).await.failure(), CONFLICT);
        other.run(0, &write(0, 1), &[4; 512]).await.ok();
        assert_eq!(model.at(0), 4);
    });
}

#[test]
fn a_preemption_waits_for_what_it_aborts() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        one.settle(0, &[0; 6], &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        assert_eq!(reserve_out(&mut one, 0, 0, [0, 7]).await, (0, None));
        assert_eq!(reserve_out(&mut other, 0, 0, [0, 8]).await, (0, None));
        model.hold();
        let late = one.start(0, &write(0, 1), &[1; 512]);
        let mut list = [8u64.to_be_bytes(), 7u64.to_be_bytes()].concat();
        list.resize(24, 0);
        let preempt = other.start(0, &[0x5f, 5, 1, 0, 0, 0, 0, 0, 24, 0], &list);
        for _ in 0..8 {
            forebay_reactor::sleep(std::time::Duration::from_millis(1)).await;
            one.turn();
            other.turn();
        }
        assert_eq!((one.outcome(late), other.outcome(preempt)), (None, None));
        model.release();
        assert_eq!(one.end(late).await, crate::common::TaskOutcome::Aborted);
        other.end(preempt).await.ok();
    });
}

#[test]
fn a_reset_of_the_nexus_releases_what_the_host_holds() {
    simulate(|disks| async move {
        disks.add(0, &Model::new(1 << 20, true));
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        one.settle(0, &[0; 6], &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        one.run(0, &[0x16, 0, 0, 0, 0, 0], &[]).await.ok();
        assert_eq!(other.run(0, &read(0, 1), &[]).await.failure(), CONFLICT);
        let reset = one.manage(TaskFunction::NexusReset);
        one.end(reset).await;
        other.run(0, &read(0, 1), &[]).await.ok();
        assert_eq!(one.told(0).await, Some((6, 0x2907)), "I_T nexus loss");
        assert_eq!(one.told(0).await, None);
        // The end of a session releases it, too.
        one.run(0, &[0x16, 0, 0, 0, 0, 0], &[]).await.ok();
        one.leave();
        while other.run(0, &read(0, 1), &[]).await.failure() == CONFLICT {
            forebay_reactor::sleep(std::time::Duration::from_millis(1)).await;
        }
    });
}
