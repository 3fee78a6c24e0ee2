//! Tests of misbehaving clients: each ends at most its own connection, and the server continues.

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use crate::common::*;
use forebay_nbd::{NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Addr, Listener, sleep, spawn};
use forebay_sim::{Faults, World};
use proptest::prelude::*;

fn addr() -> Addr {
    Addr::Unix("/run/nbd".into())
}

fn simulate<F: Future<Output = ()>>(seed: u64, test: impl Fn(Rc<NbdServer>) -> F) {
    let mut faults = Faults::none();
    if seed % 2 == 1 {
        faults.net.segment_max = 1 + (seed as usize * 31) % 100;
    }
    let world = World::new(seed, faults);
    let reactor = world.reactor();
    let run = world.run(&reactor, async {
        let model = Model::new(1 << 20);
        let options = NbdServerOptions { connections_max: 8, ..NbdServerOptions::default() };
        let server = NbdServer::new(TestExports::with("disk", &model), options, NbdStats::new());
        drop(spawn(server.clone().serve(Listener::bind(&addr()).expect("binds"), Tls::None)));
        test(server.clone()).await;
        // The next client is served in any case.
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        client.write(0, b"all is well").await;
        assert_eq!(client.read(0, 11).await, b"all is well");
        client.disconnect().await;
        server.stop().await;
        assert_eq!(model.in_flight.get(), 0);
    });
    run.unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
}

/// Sends bytes after the greeting, and expects the connection to be closed, with or without replies before.
async fn closes(server: &NbdServer, bytes: &[u8]) {
    let before = server.stats().server().ended_for_cause;
    let mut client = Client::connect(&addr()).await;
    client.send(bytes).await;
    while client.take(1).await.is_ok() {}
    assert_eq!(server.stats().server().ended_for_cause, before + 1, "ended for cause");
}

const FIXED: [u8; 4] = [0, 0, 0, 3];

#[test]
fn handshakes_that_cannot_be_answered_end() {
    for seed in 0..4 {
        simulate(seed, |server| async move {
            closes(&server, &[0, 0, 0, 4]).await;
            closes(&server, &[0x80, 0, 0, 3]).await;
            closes(&server, &[&FIXED[..], b"IHAVEOPX\0\0\0\x03\0\0\0\0"].concat()).await;
            // An unknown export, invalid names, a name that is too long.
            closes(&server, &[&FIXED[..], &option_bytes(1, b"nobody")].concat()).await;
            closes(&server, &[&FIXED[..], &option_bytes(1, &[0xff, 0xfe])].concat()).await;
            closes(&server, &[&FIXED[..], &option_bytes(1, b"a\0b")].concat()).await;
            closes(&server, &[&FIXED[..], &option_bytes(1, &[b'x'; 4097])].concat()).await;
            closes(&server, &[&FIXED[..], b"IHAVEOPT\0\0\0\x03\x7f\xff\xff\xff"].concat()).await;
            // Without fixed newstyle there is only one option.
            closes(&server, &[&[0, 0, 0, 0][..], &option_bytes(3, &[])].concat()).await;
            let extended = [&FIXED[..], &option_bytes(11, &[]), &option_bytes(1, b"disk")].concat();
            closes(&server, &extended).await;
            let endless: Vec<u8> = (0..4097).flat_map(|_| option_bytes(99, &[])).collect();
            closes(&server, &[&FIXED[..], &endless].concat()).await;
        });
    }
}

#[test]
fn options_that_can_be_answered_are_refused_and_the_next_is_served() {
    const UNSUP: u32 = 0x8000_0001;
    const INVALID: u32 = 0x8000_0003;
    const UNKNOWN: u32 = 0x8000_0006;
    const TOO_BIG: u32 = 0x8000_0009;
    const EXTENDED: u32 = 0x8000_000a;
    for seed in 0..4 {
        simulate(seed, |_| async {
            let mut client = Client::fixed(&addr()).await;
            let name = |name: &[u8]| [&(name.len() as u32).to_be_bytes()[..], name].concat();
            let table: Vec<(u32, Vec<u8>, u32)> = vec![
                (99, vec![1, 2, 3], UNSUP),
                (5, vec![], UNSUP),
                (3, vec![0], INVALID),
                (8, vec![0], INVALID),
                (11, vec![0], INVALID),
                (6, vec![], INVALID),
                (6, name(b"disk"), INVALID),
                (6, [name(b"disk"), vec![0, 1]].concat(), INVALID),
                (6, [name(b"disk"), vec![0, 0, 7]].concat(), INVALID),
                (6, vec![0xff, 0xff, 0xff, 0xff, 0, 0], INVALID),
                (7, [name(&[0xc3, 0x28]), vec![0, 0]].concat(), INVALID),
                (7, [name(b"nobody"), vec![0, 0]].concat(), UNKNOWN),
                (7, [name(&[b'n'; 4097]), vec![0, 0]].concat(), INVALID),
                (99, vec![0; 16 * 1024 + 1], TOO_BIG),
                (99, vec![0; 1 << 20], TOO_BIG),
                (9, context_data("disk", &[]), INVALID),
                (10, context_data("disk", &["base:allocation"]), INVALID),
            ];
            for (option, data, refusal) in table {
                let [(kind, text)] = &client.option(option, &data).await[..] else { panic!("one reply") };
                assert_eq!(*kind, refusal, "option {option} with {} bytes", data.len());
                assert!(!text.is_empty() && std::str::from_utf8(text).is_ok());
            }
            assert_eq!(client.option(8, &[]).await, [(1, vec![])]);
            for (data, refusal) in [
                (context_data("nobody", &["base:allocation"]), UNKNOWN),
                (context_data("disk", &["base:allocation"])[..20].to_vec(), INVALID),
                ([name(b"disk"), vec![0xff; 4]].concat(), INVALID),
                ([context_data("disk", &[]), vec![0]].concat(), INVALID),
            ] {
                for option in [9, 10] {
                    assert_eq!(client.option(option, &data).await.last().expect("a reply").0, refusal);
                }
            }
            let listed = |replies: Vec<OptionReply>| replies.iter().filter(|reply| reply.0 == 4).count();
            for (queries, found) in [
                (&[][..], [1, 0]),
                (&["base:"], [1, 0]),
                (&["base:allocation"], [1, 1]),
                (&["base:allocation", "base:", "base:allocation"], [1, 1]),
                (&["base:other", "qemu:dirty-bitmap:x", "", "nonsense"], [0, 0]),
            ] {
                for (option, found) in [9, 10].into_iter().zip(found) {
                    assert_eq!(
                        listed(client.option(option, &context_data("disk", queries)).await),
                        found,
                        "{queries:?}"
                    );
                }
            }
            assert_eq!(client.option(11, &[]).await, [(1, vec![])]);
            assert_eq!(client.option(8, &[]).await[0].0, EXTENDED);
            let list = client.option(3, &[]).await;
            assert_eq!(list, [(2, [&4_u32.to_be_bytes()[..], b"disk"].concat()), (1, vec![])]);
            let info = facts(&client.option(6, &info_data("", &INFO_ALL)).await).expect("the default export");
            assert_eq!((info.name.as_deref(), info.description), (Some("disk"), None));
            assert_eq!(client.option(2, b"ignored").await, [(1, vec![])]);
            assert_eq!(client.take(1).await, Err(vec![]), "closed after a goodbye");
        });
    }
}

#[test]
fn export_name_is_padded_unless_told_otherwise() {
    for (flags, len) in [(0, 134), (1, 134), (2, 10), (3, 10)] {
        simulate(flags, move |_| async move {
            let mut client = Client::connect(&addr()).await;
            client.send(&(flags as u32).to_be_bytes()).await;
            client.send(&option_bytes(1, b"disk")).await;
            let reply = client.take(len).await.expect("a reply");
            assert_eq!((be(&reply[..8]), be(&reply[8..10])), (1 << 20, 0b1001_0110_1101));
            assert!(reply[10..].iter().all(|&byte| byte == 0));
            client.write(0, b"in step").await;
            client.disconnect().await;
        });
    }
}

#[test]
fn a_request_that_is_none_ends_the_connection_after_what_came_before_is_answered() {
    for seed in 0..4 {
        simulate(seed, |server| async move {
            let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
            let good = client.request_bytes(1, 1, 0, 0, 4, b"data");
            client.send(&[&good[..], &[0xee; 28], &good].concat()).await;
            assert_eq!(client.answer().await.map(|answer| (answer.cookie, answer.error)), Some((1, 0)));
            assert_eq!(client.answer().await, None);
            assert_eq!(server.stats().server().ended_for_cause, 1);
        });
    }
}

#[test]
fn one_that_says_nothing_is_not_waited_for() {
    simulate(0, |server| async move {
        let mut silent = Client::connect(&addr()).await;
        // Single bytes at long intervals do not extend the timeout.
        let mut slow = Client::connect(&addr()).await;
        let slow_stream = slow.stream.clone();
        drop(spawn(async move {
            for byte in [&FIXED[..], &option_bytes(3, &[])].concat() {
                sleep(Duration::from_secs(3)).await;
                if slow_stream.send(forebay_block::Buf::copy_of(&[byte])).await.is_err() {
                    break;
                }
            }
        }));
        assert_eq!(silent.take(1).await, Err(vec![]));
        assert_eq!(slow.take(1).await, Err(vec![]));
        assert_eq!(server.stats().server().ended_for_cause, 2);
        while server.connections() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn connections_past_the_limit_are_turned_away() {
    simulate(0, |server| async move {
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(Client::open(&addr(), "disk", Style::Simple).await.0);
        }
        let stream = forebay_reactor::Stream::connect(&addr()).await.expect("connects");
        let (result, _) = stream.recv(forebay_block::BufMut::with_capacity(18)).await;
        assert!(!result.is_ok_and(|got| got > 0), "no greeting");
        assert_eq!(server.stats().server().turned_away, 1);
        clients[0].write(0, b"served").await;
        for client in clients {
            client.disconnect().await;
        }
        while server.connections() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

/// Encodes a session with most options and requests.
fn session(client: &mut Client) -> Vec<u8> {
    let mut bytes = FIXED.to_vec();
    bytes.extend(option_bytes(8, &[]));
    bytes.extend(option_bytes(10, &context_data("disk", &["base:allocation"])));
    bytes.extend(option_bytes(7, &info_data("disk", &INFO_ALL)));
    for (cookie, (kind, offset, len)) in
        [(1, 0, 70_000), (0, 10, 5000), (3, 0, 0), (4, 4096, 4096), (6, 0, 100), (7, 0, 1 << 20), (1, 5, 300)]
            .into_iter()
            .enumerate()
    {
        let payload = vec![1; if kind == 1 { len as usize } else { 0 }];
        bytes.extend(client.request_bytes(cookie as u64, kind, 0, offset, len, &payload));
    }
    bytes.extend(client.request_bytes(99, 2, 0, 0, 0, &[]));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_sessions_harm_nobody_else(
        seed in 0_u64..1 << 32,
        damage in prop::collection::vec((0_usize..1 << 20, any::<u8>()), 0..4),
        cut in prop::option::of(0_usize..1 << 20),
    ) {
        simulate(seed, |server| {
            let (damage, cut) = (damage.clone(), cut);
            async move {
                let mut client = Client::connect(&addr()).await;
                let mut bytes = session(&mut client);
                // Most of a session is payload; damage has effects mainly in its headers.
                let heads = 400;
                for (at, value) in damage {
                    let at = if at % 2 == 0 { at % heads } else { at % bytes.len() };
                    bytes[at] = value;
                }
                bytes.truncate(cut.map_or(bytes.len(), |cut| cut % bytes.len()));
                client.send(&bytes).await;
                let stream = client.stream.clone();
                drop(spawn(async move {
                    sleep(Duration::from_secs(1)).await;
                    stream.shutdown();
                }));
                while client.take(1).await.is_ok() {}
                while server.connections() > 0 {
                    sleep(Duration::from_millis(10)).await;
                }
            }
        });
    }

    #[test]
    fn noise_harms_nobody_else(seed in 0_u64..1 << 32, noise in prop::collection::vec(any::<u8>(), 0..600)) {
        simulate(seed, |server| {
            let noise = noise.clone();
            async move {
                let mut client = Client::fixed(&addr()).await;
                client.send(&noise).await;
                let stream = client.stream.clone();
                drop(spawn(async move {
                    sleep(Duration::from_secs(1)).await;
                    stream.shutdown();
                }));
                while client.take(1).await.is_ok() {}
                while server.connections() > 0 {
                    sleep(Duration::from_millis(10)).await;
                }
            }
        });
    }
}
