//! Resource limits of hosts, and refusal beyond them.

use std::time::Duration;

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, sqe, with};
use forebay_nvmf::HostLimits;
use forebay_reactor::{Stream, now, sleep};

const NONE: Digests = Digests { header: false, data: false };

#[test]
fn connections_past_the_limit_are_closed() {
    simulate_with(2, &HostLimits { connections_max: 2, ..HostLimits::default() }, |_, site| async move {
        let (admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("the first");
        let io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("the second");
        assert!(Client::connect(&addr(), NONE).await.is_err(), "one too many");
        assert_eq!(site.subsystems.stats().counts().turned_away, 1);
        io.close();
        until(|| site.server.connections() == 1).await;
        Client::connect(&addr(), NONE).await.expect("there is room again");
        drop(admin);
    });
}

#[test]
fn those_who_never_become_a_queue_do_not_keep_others_out() {
    simulate_with(2, &HostLimits { handshakes_max: 2, ..HostLimits::default() }, |_, site| async move {
        let (mut admin, _) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("a queue is none of them");
        let quiet = [Stream::connect(&addr()).await.expect("one"), Stream::connect(&addr()).await.expect("two")];
        until(|| site.server.connections() == 3).await;
        assert!(Client::connect(&addr(), NONE).await.is_err(), "one too many");
        admin.run(sqe(0x18, 0), &[], 0).await.expect("who is in is served").ok();
        // Silent connections are closed after a timeout.
        until(|| site.server.connections() == 1).await;
        Client::connect(&addr(), NONE).await.expect("there is room again");
        drop(quiet);
    });
}

#[test]
fn controllers_past_the_limits_are_refused_as_busy() {
    let limits = HostLimits { controllers_max: 3, controllers_per_host: 2, ..HostLimits::default() };
    simulate_with(2, &limits, |_, _| async move {
        let mut hosts = Vec::new();
        for (host, fits) in [(HOST, true), (HOST, true), (HOST, false), (OTHER, true), (OTHER, false)] {
            let mut client = Client::connect(&addr(), NONE).await.expect("connected");
            let done = client.connect_queue(0, 32, NQN, host, 0xFFFF, true).await.expect("answered").completion;
            assert_eq!((done.status, done.final_), (if fits { 0 } else { 0x181 }, false), "{host}");
            hosts.push(client);
        }
    });
}

#[test]
fn queues_past_the_limit_are_not_granted_and_refused() {
    simulate_with(2, &HostLimits { queues_max: 2, ..HostLimits::default() }, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        for asks in [true, false] {
            let (mut admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
            let default = admin.run(with(sqe(0x0A, 0), 10, 7 | 1 << 8), &[], 0).await.expect("get").completion;
            assert_eq!(default.result, 1 | 1 << 16);
            if asks {
                let set = with(with(sqe(0x09, 0), 10, 7), 11, 7 | 7 << 16);
                assert_eq!(admin.run(set, &[], 0).await.expect("set").completion.result, 1 | 1 << 16);
            }
            let mut queues = Vec::new();
            for queue in 1..=2 {
                queues.push(Client::io(&addr(), NONE, NQN, HOST, cntlid, queue).await.expect("granted"));
            }
            let mut client = Client::connect(&addr(), NONE).await.expect("connected");
            let third = client.connect_queue(3, 32, NQN, HOST, cntlid, false).await.expect("answered").completion;
            assert_eq!((third.status, third.result), (0x182, 42));
        }
    });
}

#[test]
fn a_host_that_is_refused_again_and_again_loses_its_connection() {
    simulate(2, |_, site| async move {
        let mut client = Client::connect(&addr(), NONE).await.expect("connected");
        let mut refused = 0;
        while let Ok(done) = client.connect_queue(0, 32, "nqn.2020-01.org.example:other", HOST, 0xFFFF, true).await {
            assert_eq!(done.completion.status, 0x182);
            refused += 1;
            assert!(refused < 100, "there is no end to it");
        }
        assert_eq!((refused, site.subsystems.stats().counts().refused), (8, 8));
    });
}

#[test]
fn data_that_does_not_come_is_not_waited_for_for_ever() {
    let limits =
        HostLimits { data_timeout: Duration::from_secs(5), connection_bytes: 4 << 20, ..HostLimits::default() };
    simulate_with(2, &limits, |_, site| async move {
        site.add(1, &Model::new(8 << 20, false));
        let (_admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        let mut io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("an I/O queue");
        io.run(blocks(1, 1, 0, 2048), &vec![1; 1 << 20], 0).await.expect("write").ok();
        // Solicited within the time limit, one after the other, and never sent.
        let before = now();
        for first in 0..3 {
            io.start(blocks(1, 1, first * 2048, 2048), &vec![1; 1 << 20], 0).await.expect("sent");
            sleep(Duration::from_secs(1)).await;
        }
        until(|| site.server.connections() == 1).await;
        let waited = now() - before;
        assert!(waited >= Duration::from_secs(5) && waited < Duration::from_secs(7), "{waited:?}");
        until(|| site.server.bytes_held() == 0).await;
        assert_eq!(site.subsystems.stats().counts().ended_for_cause, 1);
    });
}
