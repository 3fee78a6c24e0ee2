//! Hosts that exceed their share of resources.

use std::time::Duration;

use crate::common::{HOST, Model, OTHER, addr, host, simulate};
use forebay_iscsi::wire::task_function::TARGET_COLD_RESET;
use forebay_iscsi::wire::{IMMEDIATE, Lun, RejectReason, request, response};
use forebay_iscsi_host::client::Client;
use forebay_iscsi_host::{cdb, codec};
use forebay_reactor::{Buf, now, sleep, spawn, timeout};

/// Host that shares the units that [`HOST`] sees.
const SHARING: &str = "iqn.2026-11.io.forebay:sharing";

async fn login(session: u8) -> Client {
    let mut client = Client::login(&addr(), &host(HOST, session)).await.expect("logs in");
    client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
    client
}

/// Builds a write of the given number of blocks, without its data.
fn write(itt: u32, cmd_sn: u32, blocks: u32) -> forebay_iscsi::wire::ScsiCommand {
    codec::command(Lun::Unit(0).to_bytes(), itt, cmd_sn, cdb::write(0, blocks), blocks as usize * 512, true)
}

#[test]
fn immediate_writes_without_their_data_are_refused_at_some_point() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let mut client = login(1).await;
        const SENT: u32 = 2000;
        let mut bytes = Vec::new();
        for itt in 0..SENT {
            let mut header = write(1000 + itt, client.cmd_sn(), 512);
            header.opcode |= IMMEDIATE;
            bytes.extend(codec::pdu(&header, &[], Default::default()));
        }
        let stream = client.stream();
        let sending = spawn(async move { stream.send(Buf::copy_of(&bytes)).await });
        let mut refused = 0;
        while refused < SENT - 160 {
            let pdu = timeout(Duration::from_secs(5), client.pdu()).await;
            refused += count(pdu.unwrap_or_else(|_| panic!("seed {seed}: {refused} refused")).expect("goes on"));
        }
        sending.await.expect("sent");
    });

    fn count(pdu: Option<codec::Pdu>) -> u32 {
        match pdu {
            Some(codec::Pdu::Other(header, _)) if header.opcode == response::REJECT => {
                assert_eq!(header.code, RejectReason::ImmediateCommands as u8);
                1
            }
            Some(codec::Pdu::Ready(_)) => 0,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_is_aborted_while_it_waits_for_memory_leaves_nothing_behind() {
    simulate(2, |seed, place| async move {
        let model = Model::new(64 << 20, false);
        place.add(0, &model);
        let mut client = login(1).await;
        // Each command needs half of a session's memory limit, so the third waits.
        let all: Vec<u32> = {
            let mut all = Vec::new();
            for _ in 0..3 {
                all.push(client.start(0, cdb::write(0, 16 << 10), &vec![7; 8 << 20], 0).await.expect("sent"));
            }
            all
        };
        assert_eq!(client.task(1, 0, all[2]).await.expect("answers"), 0, "seed {seed}");
        for itt in &all[..2] {
            client.finish(*itt).await.expect("answers").ok();
        }
        client.run(0, cdb::write(0, 1), &[9; 512], 0).await.expect("answers").ok();
        assert_eq!((model.at(0), model.at(1)), (9, 7));
        client.logout().await.expect("logs out");
        crate::common::until(|| place.targets.memory() == 0).await;
    });
}

#[test]
fn commands_that_come_too_early_with_too_much_end_the_connection() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let mut client = login(1).await;
        for number in 0..40 {
            // The command that precedes all of them never arrives.
            let header = write(1000 + number, 100 + number, 112);
            if client.send(&codec::pdu(&header, &[7; 112 * 512], Default::default())).await.is_err() {
                break;
            }
        }
        let ended = timeout(Duration::from_secs(5), async { while let Ok(Some(_)) = client.pdu().await {} });
        assert!(ended.await.is_ok(), "seed {seed}: the target keeps them all");
        crate::common::until(|| place.targets.memory() == 0).await;
    });
}

#[test]
fn data_that_never_comes_is_not_waited_for() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let mut client = login(1).await;
        let late = write(1000, client.cmd_sn(), 512);
        client.send(&codec::pdu(&late, &[], Default::default())).await.expect("sent");
        let from = now();
        let ended = timeout(Duration::from_secs(120), async {
            loop {
                // The host is alive, but never sends the solicited data.
                let ping = codec::other(request::NOP_OUT, 0, 2000, client.cmd_sn());
                if client.send(&codec::pdu(&ping, b"here", Default::default())).await.is_err() {
                    return;
                }
                while let Ok(pdu) = timeout(Duration::from_secs(5), client.pdu()).await {
                    if !matches!(pdu, Ok(Some(_))) {
                        return;
                    }
                }
            }
        });
        assert!(ended.await.is_ok(), "seed {seed}: it waits for the data after {:?}", now().since(from));
        assert!(now().since(from) >= Duration::from_secs(30), "seed {seed}: a slow host has time");
        crate::common::until(|| place.targets.memory() == 0).await;
    });
}

#[test]
fn who_does_not_read_answers_is_not_listened_to() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let deaf = login(1).await;
        let mut sent = 0;
        let ping = codec::pdu(&codec::other(request::NOP_OUT, 0, 2000, 2), &[7; 8000], Default::default());
        while sent < 64 << 20 && timeout(Duration::from_secs(2), deaf.send(&ping)).await.is_ok_and(|sent| sent.is_ok())
        {
            sent += ping.len();
        }
        // Two network windows, and the data that the target buffers.
        assert!(sent < 2 << 20, "seed {seed}: it has taken {sent} bytes");
        // Other hosts are still served.
        let mut other = Client::login(&addr(), &host(OTHER, 1)).await.expect("logs in");
        other.settle(0, cdb::write(0, 1), &[9; 512], 0).await.expect("answers").ok();
        // A host that neither reads nor sends is disconnected after a while.
        let from = now();
        while place.targets.session_count() > 1 {
            assert!(now().since(from) < Duration::from_secs(150), "seed {seed}: it is still there");
            other.ping().await.expect("answers");
            sleep(Duration::from_secs(1)).await;
        }
    });
}

#[test]
fn a_target_reset_is_about_those_who_share_units() {
    simulate(2, |seed, place| async move {
        place.add_for(0, &Model::new(1 << 20, false), &[HOST, SHARING]);
        place.add_for(1, &Model::new(1 << 20, false), &[OTHER]);
        let mut stranger = Client::login(&addr(), &host(OTHER, 1)).await.expect("logs in");
        stranger.settle(1, cdb::write(0, 1), &[9; 512], 0).await.expect("answers").ok();
        let mut sharing = Client::login(&addr(), &host(SHARING, 1)).await.expect("logs in");
        sharing.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        let mut client = login(1).await;
        client.start_task(TARGET_COLD_RESET, 0, 0).await.expect("sent");
        while client.step().await.is_ok() {}
        while sharing.step().await.is_ok() {}
        assert_eq!(place.targets.sessions().len(), 1, "seed {seed}");
        let done = stranger.run(1, cdb::test_unit_ready(), &[], 0).await.expect("the session goes on");
        assert_eq!(done.sense(), None, "seed {seed}: its unit was not reset either");
    });
}
