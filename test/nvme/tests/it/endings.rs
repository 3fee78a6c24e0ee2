//! Termination of controllers, connections and commands.

use std::time::Duration;

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, property, sqe, with};
use forebay_nvmf::Namespace;
use forebay_nvmf::wire::log::AnaState;
use forebay_reactor::{sleep, spawn};

const NONE: Digests = Digests { header: false, data: false };

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    (0..len).rev().fold(0, |value, byte| value << 8 | u64::from(bytes[at + byte]))
}

async fn hosts(host: &str) -> (Client, Client, u16) {
    let (admin, cntlid) = Client::admin(&addr(), NONE, NQN, host).await.expect("an admin queue");
    let io = Client::io(&addr(), NONE, NQN, host, cntlid, 1).await.expect("an I/O queue");
    (admin, io, cntlid)
}

#[test]
fn a_host_that_comes_back_over_a_dead_connection_waits_for_its_old_commands() {
    simulate(4, |seed, site| async move {
        let model = Model::new(1 << 20, true);
        site.add(1, &model);
        let (mut admin, mut io, _) = hosts(HOST).await;
        model.hold();
        io.start(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        // The connection is lost without being closed, and only the host knows.
        let again = spawn(async { Client::admin(&addr(), NONE, NQN, HOST).await });
        sleep(Duration::from_millis(500)).await;
        assert!(!again.is_finished(), "the old write may still land");
        Client::admin(&addr(), NONE, NQN, OTHER).await.expect("another host does not wait");
        if seed & 1 == 0 {
            model.release();
        } else {
            // The connection is not lost after all: the host has a second controller.
            admin.run(sqe(0x18, 0), &[], 0).await.expect("keep alive").ok();
        }
        again.await.expect("connected");
        assert_eq!(model.in_flight.get(), seed as usize & 1);
        model.release();
    });
}

#[test]
fn what_is_answered_late_keeps_a_controller() {
    simulate(1, |_, site| async move {
        let models = [Model::new(1 << 20, true), Model::new(1 << 20, true)];
        site.add(1, &models[0]);
        site.add(2, &models[1]);
        let (mut admin, mut io, cntlid) = hosts(HOST).await;
        admin.run(with(with(sqe(0x09, 0), 10, 0xF), 11, 2000), &[], 0).await.expect("set").ok();
        for (nsid, model) in (1..).zip(&models) {
            model.hold();
            io.start(blocks(1, nsid, 0, 1), &[1; 512], 0).await.expect("sent");
        }
        // A host whose commands complete between two of its own checks does not send Keep Alive (TBKAS).
        for model in &models {
            sleep(Duration::from_millis(1900)).await;
            model.release();
            until(|| model.in_flight.get() == 0).await;
        }
        sleep(Duration::from_millis(1900)).await;
        assert_eq!(site.subsystem.controller_ids(), [cntlid]);
        sleep(Duration::from_secs(5)).await;
        assert!(site.subsystem.controller_ids().is_empty());
    });
}

#[test]
fn a_shutdown_makes_everything_durable_before_it_says_so() {
    simulate(2, |_, site| async move {
        let (model, unused) = (Model::new(1 << 20, true), Model::new(1 << 20, true));
        site.add(1, &model);
        site.add(2, &unused);
        let (mut admin, mut io, _) = hosts(HOST).await;
        io.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        model.hold();
        admin.run(property(0x14, false, Some(1 | 1 << 14 | 0x46 << 16)), &[], 0).await.expect("set").ok();
        sleep(Duration::from_millis(100)).await;
        let status = admin.run(property(0x1C, false, None), &[], 0).await.expect("get").completion.result;
        assert_eq!((status >> 2 & 3, model.flushes.get()), (1, 0), "it goes on");
        model.release();
        while admin.run(property(0x1C, false, None), &[], 0).await.expect("get").completion.result >> 2 & 3 != 2 {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!((model.flushes.get(), unused.flushes.get()), (1, 0));
    });
}

#[test]
fn a_reset_forgets_who_asked_for_events() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, _) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        for _ in 0..40 {
            for _ in 0..4 {
                admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
            }
            admin.run(property(0x14, false, Some(0)), &[], 0).await.expect("reset").ok();
            admin.enable().await.expect("enabled");
        }
        admin.run(with(with(sqe(0x09, 0), 10, 0xB), 11, 1 << 8), &[], 0).await.expect("set").ok();
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        site.add(2, &Model::new(1 << 20, false));
        assert_eq!(admin.finish(request).await.expect("an event").completion.result, 2 | 4 << 16);
    });
}

#[test]
fn a_host_that_broke_a_rule_reads_why_behind_what_it_had_not_read() {
    simulate(6, |_, site| async move {
        let (fast, slow) = (Model::new(8 << 20, false), Model::new(1 << 20, true));
        site.add(1, &fast);
        site.add(2, &slow);
        let (_admin, mut io, _) = hosts(HOST).await;
        slow.hold();
        for _ in 0..4 {
            io.start(blocks(1, 2, 0, 1), &[1; 512], 0).await.expect("sent");
        }
        until(|| slow.in_flight.get() == 4).await;
        for first in 0..6 {
            io.start(blocks(2, 1, first * 2048, 2048), &[], 1 << 20).await.expect("sent");
        }
        until(|| site.server.bytes_held() >= 6 << 20).await;
        // An invalid PDU type, while the target cannot send.
        io.send(&[99, 0, 8, 0, 8, 0, 0, 0]).await.expect("sent");
        sleep(Duration::from_millis(10)).await;
        slow.release();
        until(|| slow.in_flight.get() == 0).await;
        while io.any().await.is_ok() {}
        assert_eq!(io.terminated, Some((1, 0)), "the host was told");
    });
}

#[test]
fn descriptors_that_do_not_fit_the_direction_are_refused() {
    simulate(2, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (mut admin, mut io, _) = hosts(HOST).await;
        let in_capsule = |mut sqe: forebay_nvme_host::codec::Sqe, len: u32| {
            sqe[32..36].copy_from_slice(&len.to_le_bytes());
            sqe[39] = 1;
            sqe
        };
        let read = io.run(in_capsule(blocks(2, 1, 0, 1), 512), &[], 0).await.expect("answered").completion;
        assert_eq!((read.status, read.final_), (0x011, true));
        let identify = admin.run(in_capsule(with(sqe(0x06, 0), 10, 1), 4096), &[], 0).await.expect("answered");
        assert_eq!(identify.completion.status, 0x011);
        for wrong in 0..2 {
            let (mut first, mut second) = (blocks(5, 1, 0, 1), blocks(1, 1, 0, 1));
            (first[1], second[1]) = (first[1] | 1, second[1] | 2);
            // Beyond the end of the in-capsule data.
            (if wrong == 0 { &mut first } else { &mut second })[25] = 2;
            let first = io.start(first, &[0; 512], 0).await.expect("sent");
            let second = io.start(second, &[7; 512], 0).await.expect("sent");
            let (first, second) = (io.finish(first).await.expect("done"), io.finish(second).await.expect("done"));
            let want = if wrong == 0 { (0x016, 0x009) } else { (0x009, 0x016) };
            assert_eq!((first.completion.status, second.completion.status), want);
        }
        assert_eq!(model.bytes.borrow()[0], 0);
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn every_error_counts_however_many_there_are_at_a_time() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, mut io, _) = hosts(HOST).await;
        for _ in 0..5 {
            let mut ids = Vec::new();
            for _ in 0..100 {
                ids.push(io.start(sqe(0x99, 1), &[], 0).await.expect("sent"));
            }
            for id in ids {
                assert_eq!(io.finish(id).await.expect("answered").completion.status, 0x001);
            }
        }
        let log = with(sqe(0x02, 0xFFFF_FFFF), 10, 1 | 255 << 16);
        let mut count = 0;
        while count < 500 {
            sleep(Duration::from_millis(1)).await;
            assert_eq!(io.run(sqe(0x99, 1), &[], 0).await.expect("answered").completion.status, 0x001);
            sleep(Duration::from_millis(1)).await;
            count = le(&admin.run(log, &[], 1024).await.expect("log").ok(), 0, 8);
            assert!(count >= 16, "{count}");
        }
    });
}

#[test]
fn a_namespace_that_hangs_holds_up_only_its_own_end() {
    simulate(4, |_, site| async move {
        let models = [Model::new(1 << 20, false), Model::new(1 << 20, false)];
        site.add(1, &models[0]);
        site.add(2, &models[1]);
        let (_admin, mut io, _) = hosts(HOST).await;
        models[0].hold();
        let hanging = io.start(blocks(1, 1, 0, 1), &[7; 512], 0).await.expect("sent");
        until(|| models[0].in_flight.get() == 1).await;
        io.run(blocks(1, 2, 0, 1), &[7; 512], 0).await.expect("write").ok();
        site.subsystem.remove_namespace(1);
        let (server, subsystem) = (site.server.clone(), site.subsystem.clone());
        let first = spawn(async move { server.let_go(&subsystem, 1).await });
        site.subsystem.remove_namespace(2);
        // The other controller is gone at once; the stuck one is gone when its command has ended.
        site.server.let_go(&site.subsystem, 2).await;
        assert_eq!(models[0].in_flight.get(), 1);
        assert!(!first.is_finished(), "nobody waits for the command that hangs");
        models[0].release();
        first.await;
        assert_eq!(models[0].in_flight.get(), 0);
        io.finish(hanging).await.expect("answered").ok();
    });
}

#[test]
fn groups_have_states_of_their_own() {
    simulate(2, |_, site| async move {
        let models = [Model::new(1 << 20, false), Model::new(1 << 20, false)];
        site.add(1, &models[0]);
        site.shelf.0.borrow_mut().insert(2, models[1].clone());
        let (name, uuid) = ("n2".to_owned(), [3; 16]);
        let namespace = Namespace { nsid: 2, name, uuid, ana_group: 9, read_only: false };
        site.subsystem.add_namespace(namespace).expect("in range");
        let (mut admin, mut io, _) = hosts(HOST).await;
        admin.run(with(with(sqe(0x09, 0), 10, 0xB), 11, 1 << 11), &[], 0).await.expect("set").ok();
        let log = with(sqe(0x02, 0xFFFF_FFFF), 10, 0xC | 1023 << 16);
        let mut before = 0;
        for (state, status) in [
            (AnaState::PersistentLoss, 0x301),
            (AnaState::Inaccessible, 0x302),
            (AnaState::Change, 0x303),
            (AnaState::NonOptimized, 0),
            (AnaState::Optimized, 0),
        ] {
            let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
            site.subsystems.set_ana(&site.port, 9, state);
            assert_eq!(admin.finish(request).await.expect("an event").completion.result, 2 | 3 << 8 | 0xC << 16);
            io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("the other group").ok();
            let done = io.run(blocks(2, 2, 0, 1), &[], 512).await.expect("answered").completion;
            assert_eq!(done.status, status, "{state:?}");
            let page = admin.run(log, &[], 4096).await.expect("log").ok();
            assert_eq!((le(&page, 8, 2), le(&page, 16, 4), page[32]), (2, 1, AnaState::Optimized as u8));
            assert_eq!((le(&page, 52, 4), page[68], le(&page, 84, 4)), (9, state as u8, 2));
            let change = le(&page, 0, 8);
            assert!(change > before, "a change counts");
            before = change;
        }
    });
}

#[test]
fn a_stop_does_not_reset_connections_of_hosts_that_send() {
    simulate(4, |_, site| async move {
        let model = Model::new(1 << 20, true);
        site.add(1, &model);
        let (mut admin, mut io, _) = hosts(HOST).await;
        io.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        let server = site.server.clone();
        let stopping = spawn(async move { server.stop().await });
        // The host's own processes submit commands until it has seen the end of the stream, and closes.
        for _ in 0..20 {
            io.start(blocks(1, 1, 0, 1), &[2; 512], 0).await.expect("the connection is not reset");
            sleep(Duration::from_millis(10)).await;
        }
        assert!(io.any().await.is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof));
        assert!(admin.any().await.is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof));
        assert!(!stopping.is_finished());
        io.close();
        admin.close();
        stopping.await;
    });
}

#[test]
fn a_stop_does_not_wait_long_for_hosts_that_are_gone() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, true));
        let (_admin, _io, _) = hosts(HOST).await;
        let begun = forebay_reactor::now();
        site.server.stop().await;
        let took = begun.elapsed();
        assert!((Duration::from_secs(1)..Duration::from_secs(2)).contains(&took), "{took:?}");
    });
}
