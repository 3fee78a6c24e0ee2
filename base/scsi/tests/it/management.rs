//! Task management: what has ended when a function is answered.

use std::time::Duration;

use forebay_load::model::{Model, until};
use forebay_reactor::sleep;
use forebay_scsi::{Lun, TaskFunction, TaskResponse};

use crate::common::{TaskOutcome, read, simulate, write};

const UNIT: Lun = Lun::Unit(0);

#[test]
fn an_abort_is_answered_after_the_command_has_ended() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        disks.add(1, &Model::new(1 << 20, false));
        let mut host = disks.host("a");
        host.settle(0, &[0; 6], &[]).await.ok();
        model.hold();
        let late = host.start(0, &write(0, 1), &[1; 512]);
        let query = host.manage(TaskFunction::QueryTask { lun: Some(UNIT), tag: late });
        assert_eq!(host.outcome(query), Some(TaskOutcome::Managed(TaskResponse::Succeeded)));
        let query = host.manage(TaskFunction::QueryTaskSet(UNIT));
        assert_eq!(host.outcome(query), Some(TaskOutcome::Managed(TaskResponse::Succeeded)));
        let elsewhere = host.manage(TaskFunction::AbortTask { lun: Some(Lun::Unit(1)), tag: late });
        assert_eq!(host.outcome(elsewhere), Some(TaskOutcome::Managed(TaskResponse::NoTask)));
        for (lun, expected) in [(Lun::Unit(1), TaskResponse::Complete), (Lun::Unit(2), TaskResponse::NoUnit)] {
            let query = host.manage(TaskFunction::QueryTask { lun: Some(lun), tag: late });
            assert_eq!(host.outcome(query), Some(TaskOutcome::Managed(expected)), "{lun:?}");
        }
        let nowhere = host.manage(TaskFunction::AbortTask { lun: Some(Lun::Unit(2)), tag: late });
        assert_eq!(host.outcome(nowhere), Some(TaskOutcome::Managed(TaskResponse::NoUnit)));
        let abort = host.manage(TaskFunction::AbortTask { lun: Some(UNIT), tag: late });
        host.turn();
        assert_eq!(host.port.0, [], "the write may still reach the medium");
        model.release();
        assert_eq!(host.end(abort).await, TaskOutcome::Managed(TaskResponse::Complete));
        assert_eq!(host.port.0, [(late, TaskOutcome::Aborted)], "reported before");
        assert_eq!(model.at(0), 1);
        let query = host.manage(TaskFunction::QueryTask { lun: None, tag: late });
        assert_eq!(host.outcome(query), Some(TaskOutcome::Managed(TaskResponse::Complete)));
        let absent = host.manage(TaskFunction::LogicalUnitReset(Lun::Unit(9)));
        assert_eq!(host.outcome(absent), Some(TaskOutcome::Managed(TaskResponse::NoUnit)));
    });
}

#[test]
fn a_reset_ends_the_commands_of_every_host() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        one.settle(0, &[0; 6], &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        model.hold();
        let late = other.start(0, &write(0, 1), &[1; 512]);
        let set = one.manage(TaskFunction::AbortTaskSet(UNIT));
        assert_eq!(one.end(set).await, TaskOutcome::Managed(TaskResponse::Complete), "it has no command of its own");
        let reset = one.manage(TaskFunction::TargetReset);
        one.turn();
        other.turn();
        assert_eq!((one.outcome(reset), other.outcome(late)), (None, None));
        model.release();
        assert_eq!(other.end(late).await, TaskOutcome::Aborted);
        assert_eq!(one.end(reset).await, TaskOutcome::Managed(TaskResponse::Complete));
        assert_eq!(other.told(0).await, Some((6, 0x2903)));
        assert_eq!(one.told(0).await, Some((6, 0x2903)));
    });
}

#[test]
fn hosts_that_reset_each_other_go_on() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, true);
        disks.add(0, &model);
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        one.settle(0, &[0; 6], &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        for _ in 0..4 {
            let writes = [one.start(0, &write(0, 1), &[1; 512]), other.start(0, &write(1, 1), &[2; 512])];
            let resets =
                [one.manage(TaskFunction::LogicalUnitReset(UNIT)), other.manage(TaskFunction::LogicalUnitReset(UNIT))];
            let mut outcomes = Vec::new();
            while outcomes.len() < 4 {
                one.turn();
                other.turn();
                outcomes.extend([writes[0], resets[0]].iter().filter_map(|tag| one.outcome(*tag)));
                outcomes.extend([writes[1], resets[1]].iter().filter_map(|tag| other.outcome(*tag)));
                sleep(Duration::from_micros(10)).await;
            }
            one.settle(0, &[0; 6], &[]).await.ok();
            other.settle(0, &[0; 6], &[]).await.ok();
        }
    });
}

#[test]
fn an_ordered_command_waits_for_earlier_ones() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        let mut host = disks.host("a");
        host.settle(0, &[0; 6], &[]).await.ok();
        model.hold();
        let first = host.start(0, &write(0, 1), &[1; 512]);
        let ordered = host.start_as(0, &write(0, 1), &[2; 512], true);
        let last = host.start(0, &write(0, 1), &[3; 512]);
        host.turn();
        assert_eq!((host.session.in_flight(), host.session.tasks()), (1, 3));
        // A command that has not begun is aborted at once.
        let waiting = host.start(0, &write(9, 1), &[4; 512]);
        let abort = host.manage(TaskFunction::AbortTask { lun: None, tag: waiting });
        assert_eq!(host.outcome(waiting), Some(TaskOutcome::Aborted));
        assert_eq!(host.outcome(abort), Some(TaskOutcome::Managed(TaskResponse::Complete)));
        model.release();
        host.end(last).await.ok();
        host.end(first).await.ok();
        host.end(ordered).await.ok();
        assert_eq!((model.at(0), model.at(9)), (3, 0));
    });
}

#[test]
fn orphaned_tasks_use_their_units_until_they_have_ended() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        disks.add(1, &Model::new(1 << 20, false));
        let mut host = disks.host("a");
        host.settle(0, &[0; 6], &[]).await.ok();
        model.hold();
        host.start(0, &write(0, 1), &[1; 512]);
        host.leave();
        let (mut host, mut other) = (disks.host("a"), disks.host("b"));
        assert_eq!(host.run(0, &read(0, 1), &[]).await.failure(), (8, None), "its own write is in flight");
        host.settle(1, &read(0, 1), &[]).await.ok();
        other.settle(0, &[0; 6], &[]).await.ok();
        let reset = other.manage(TaskFunction::LogicalUnitReset(UNIT));
        let gone = disks.target.remove(1).expect("a unit");
        host.turn();
        let _ = gone.await;
        other.turn();
        assert_eq!(other.outcome(reset), None);
        model.release();
        assert_eq!(other.end(reset).await, TaskOutcome::Managed(TaskResponse::Complete));
        assert_eq!(model.at(0), 1);
        let unit = disks.target.unit_at(0).expect("a unit");
        until(|| unit.sessions() == 1).await;
        host.settle(0, &read(0, 1), &[]).await.ok();
    });
}

#[test]
fn a_draining_session_answers_busy() {
    simulate(|disks| async move {
        disks.add(0, &Model::new(1 << 20, false));
        let mut host = disks.host("a");
        host.settle(0, &[0; 6], &[]).await.ok();
        host.session.refuse_commands();
        assert_eq!(host.run(0, &read(0, 1), &[]).await.failure(), (8, None));
        assert!(host.session.is_idle());
    });
}
