//! Fencing: once a reset, abort, preemption or new login has completed, no earlier write reaches the medium.

use std::time::Duration;

use crate::common::{HOST, Model, OTHER, addr, host, simulate, until};
use forebay_iscsi::wire::{logout_response, task_function, task_response};
use forebay_iscsi_host::{cdb, client::Client};
use forebay_reactor::{now, sleep, spawn, timeout};

/// Longer than the drain timeout of a session.
const LONG: Duration = Duration::from_secs(60);
const BUSY: u8 = 8;
const RESERVATION_CONFLICT: u8 = 0x18;

/// Returns true if the client receives something within the given time.
async fn is_answered(client: &mut Client, within: Duration) -> bool {
    let answered = timeout(within, async {
        while !client.has_answers() {
            client.step().await.expect("the session goes on");
        }
    });
    answered.await.is_ok()
}

async fn login(name: &str, session: u8) -> Client {
    Client::login(&addr(), &host(name, session)).await.expect("logs in")
}

#[test]
fn a_reset_waits_for_writes_of_a_session_that_is_gone() {
    simulate(6, |seed, place| async move {
        let model = Model::new(1 << 20, seed % 3 == 0);
        place.add(0, &model);
        let mut gone = login(HOST, 1).await;
        gone.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        for lba in 0..3 {
            gone.start(0, cdb::write(lba, 1), &[7; 512], 0).await.expect("sent");
        }
        until(|| model.in_flight.get() == 3).await;
        gone.close();
        until(|| place.targets.session_count() == 0).await;
        let mut other = login(OTHER, 1).await;
        other.start_task(task_function::LOGICAL_UNIT_RESET, 0, 0).await.expect("sent");
        assert!(!is_answered(&mut other, LONG).await, "seed {seed}: the reset is answered before the writes are over");
        model.release();
        let (answer, _) = other.response(forebay_iscsi::wire::response::TASK_MANAGEMENT).await.expect("an answer");
        assert_eq!((answer.code, model.in_flight.get()), (task_response::COMPLETE, 0), "seed {seed}");
        // No earlier write lands after the new host's write.
        other.settle(0, cdb::write(0, 3), &[9; 3 * 512], 0).await.expect("answers").ok();
        sleep(LONG).await;
        assert_eq!([0, 1, 2].map(|lba| model.at(lba)), [9; 3], "seed {seed}");
    });
}

#[test]
fn a_host_that_comes_back_waits_for_its_own_writes_of_before() {
    simulate(6, |seed, place| async move {
        let (slow, other) = (Model::new(1 << 20, false), Model::new(1 << 20, false));
        place.add(0, &slow);
        place.add(1, &other);
        let mut gone = login(HOST, 1).await;
        gone.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        slow.hold();
        gone.start(0, cdb::write(5, 1), &[7; 512], 0).await.expect("sent");
        until(|| slow.in_flight.get() == 1).await;
        let from = now();
        // Same initiator port: the earlier session is replaced, and has ten seconds to drain.
        let mut back = login(HOST, 1).await;
        assert!(now().since(from) >= Duration::from_secs(9), "seed {seed}: it waits for what is under way first");
        let busy = back.run(0, cdb::write(5, 1), &[9; 512], 0).await.expect("answers");
        assert_eq!(busy.status, BUSY, "seed {seed}: {busy:?}");
        // Neither the other unit nor the LUN inventory is affected.
        back.settle(1, cdb::write(0, 1), &[3; 512], 0).await.expect("answers").ok();
        assert_eq!(back.settle(0, cdb::report_luns(), &[], 1024).await.expect("answers").ok().len(), 8 + 2 * 8);
        slow.release();
        until(|| slow.at(5) == 7).await;
        loop {
            let done = back.settle(0, cdb::write(5, 1), &[9; 512], 0).await.expect("answers");
            if done.status != BUSY {
                done.ok();
                break;
            }
        }
        assert_eq!(slow.at(5), 9, "seed {seed}");
    });
}

#[test]
fn a_logout_waits_for_writes_and_releases_the_reservation_first() {
    simulate(6, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let mut leaving = login(HOST, 1).await;
        let mut other = login(OTHER, 1).await;
        leaving.settle(0, cdb::reserve6(), &[], 0).await.expect("answers").ok();
        let refused = other.settle(0, cdb::reserve6(), &[], 0).await.expect("answers");
        assert_eq!(refused.status, RESERVATION_CONFLICT, "seed {seed}: {refused:?}");
        model.hold();
        leaving.start(0, cdb::write(2, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        leaving.start_logout().await.expect("sent");
        assert!(
            !is_answered(&mut leaving, Duration::from_secs(5)).await,
            "seed {seed}: answered, and the write may land"
        );
        model.release();
        assert_eq!(leaving.finish_logout().await.expect("answers"), logout_response::CLOSED, "seed {seed}");
        assert_eq!(model.in_flight.get(), 0, "seed {seed}");
        other.run(0, cdb::reserve6(), &[], 0).await.expect("answers").ok();
    });
}

#[test]
fn a_logout_says_that_writes_are_left_in_the_device() {
    simulate(6, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let mut leaving = login(HOST, 1).await;
        leaving.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        leaving.start(0, cdb::write(2, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        leaving.start_logout().await.expect("sent");
        assert_eq!(leaving.finish_logout().await.expect("answers"), logout_response::CLEANUP_FAILED, "seed {seed}");
        until(|| place.targets.session_count() == 0).await;
        model.release();
        until(|| model.at(2) == 7).await;
    });
}

#[test]
fn a_server_that_stops_waits_for_writes_of_a_host_that_has_logged_out() {
    simulate(6, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let mut leaving = login(HOST, 1).await;
        leaving.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        leaving.start(0, cdb::write(2, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        leaving.start_logout().await.expect("sent");
        sleep(Duration::from_secs(1)).await;
        let stopping = {
            let server = place.server.clone();
            spawn(async move { server.stop().await })
        };
        assert!(
            !is_answered(&mut leaving, Duration::from_secs(5)).await,
            "seed {seed}: answered, and the write may land"
        );
        model.release();
        assert_eq!(leaving.finish_logout().await.expect("answers"), logout_response::CLOSED, "seed {seed}");
        stopping.await;
        assert_eq!((model.at(2), model.in_flight.get()), (7, 0), "seed {seed}");
    });
}

#[test]
fn hosts_that_reset_each_other_and_log_out_do_not_wait_for_each_other() {
    simulate(12, |seed, place| async move {
        let models = [Model::new(1 << 20, seed % 3 == 0), Model::new(1 << 20, false)];
        models.iter().zip(0..).for_each(|(model, lun)| drop(place.add(lun, model)));
        let mut hosts = [login(HOST, 1).await, login(OTHER, 1).await];
        for host in &mut hosts {
            for lun in [0, 1] {
                host.settle(lun, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
            }
        }
        let writes = seed % 2 == 0;
        if writes {
            models.iter().for_each(|model| model.hold());
            for (host, lun) in hosts.iter_mut().zip(0..) {
                host.start(lun, cdb::write(0, 1), &[7; 512], 0).await.expect("sent");
            }
            until(|| models.iter().all(|model| model.in_flight.get() == 1)).await;
        }
        // Each resets the unit to which the other writes, and logs out without waiting for the answer.
        for (host, lun) in hosts.iter_mut().zip([1, 0]) {
            host.start_task(task_function::LOGICAL_UNIT_RESET, lun, 0).await.expect("sent");
            host.start_logout().await.expect("sent");
        }
        if writes {
            sleep(Duration::from_secs(1)).await;
            models.iter().for_each(|model| model.release());
        }
        let from = now();
        for mut host in hosts {
            assert_eq!(host.finish_logout().await.expect("answers"), logout_response::CLOSED, "seed {seed}");
        }
        let took = now().since(from);
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        assert!(models.iter().all(|model| model.in_flight.get() == 0), "seed {seed}");
    });
}

#[test]
fn an_abort_waits_for_the_write_that_it_aborts() {
    simulate(6, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let mut client = login(HOST, 1).await;
        client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        let write = client.start(0, cdb::write(1, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        client.start_task(task_function::ABORT_TASK, 0, write).await.expect("sent");
        assert!(!is_answered(&mut client, LONG).await, "seed {seed}: aborted, and it may land");
        model.release();
        let (answer, _) = client.response(forebay_iscsi::wire::response::TASK_MANAGEMENT).await.expect("an answer");
        assert_eq!(answer.code, task_response::COMPLETE, "seed {seed}");
        // The task no longer exists, and its response is not sent.
        assert_eq!(client.task(task_function::ABORT_TASK, 0, write).await.expect("answers"), task_response::NO_TASK);
        client.run(0, cdb::write(1, 1), &[9; 512], 0).await.expect("answers").ok();
        assert_eq!(model.at(1), 9);
    });
}

#[test]
fn sessions_that_left_writes_behind_count_as_sessions() {
    let few = forebay_iscsi::TargetLimits { sessions_per_initiator: 2, ..forebay_iscsi::TargetLimits::default() };
    crate::common::simulate_with(
        2,
        |_| few.clone(),
        |seed, place| async move {
            let model = Model::new(1 << 20, false);
            place.add(0, &model);
            model.hold();
            for session in 1..=2 {
                let mut gone = login(HOST, session).await;
                let first = gone.run(0, cdb::test_unit_ready(), &[], 0).await.expect("answers");
                assert_eq!(first.sense(), Some((6, 0x2900)), "seed {seed}");
                gone.start(0, cdb::write(5, 1), &[7; 512], 0).await.expect("sent");
                until(|| model.in_flight.get() == usize::from(session)).await;
                gone.close();
                until(|| place.targets.session_count() == 0).await;
            }
            let refused = Client::login(&addr(), &host(HOST, 3)).await.err().expect("refused").to_string();
            assert!(refused.contains("0x0302"), "seed {seed}: {refused}");
            model.release();
            while Client::login(&addr(), &host(HOST, 3)).await.is_err() {
                sleep(Duration::from_millis(1)).await;
            }
        },
    );
}

#[test]
fn a_preemption_waits_for_writes_of_a_session_that_is_gone() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let (mut gone, mut other) = (login(HOST, 1).await, login(OTHER, 1).await);
        for (client, key) in [(&mut gone, 1), (&mut other, 2)] {
            client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
            client.run(0, cdb::reserve_out(0, 0), &cdb::reserve_list(0, key, false), 0).await.expect("answers").ok();
        }
        gone.run(0, cdb::reserve_out(1, 5), &cdb::reserve_list(1, 0, false), 0).await.expect("answers").ok();
        model.hold();
        gone.start(0, cdb::write(5, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        gone.close();
        until(|| place.targets.session_count() == 1).await;
        let preempt = cdb::reserve_list(2, 1, false);
        let itt = other.start(0, cdb::reserve_out(5, 5), &preempt, 0).await.expect("sent");
        assert!(!is_answered(&mut other, LONG).await, "seed {seed}: preempted, and a write may land");
        model.release();
        other.finish(itt).await.expect("answers").ok();
        assert_eq!((model.at(5), model.in_flight.get()), (7, 0), "seed {seed}");
    });
}
