//! Tests of a server and its clients on a simulated network.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::common::world::{addr, simulate, simulate_seed};
use crate::common::*;
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_nbd::stats::NbdRequestKind;
use forebay_nbd::{NbdExport, NbdListenerOptions, NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Listener, random, sleep, spawn};
use proptest::prelude::*;

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];
const KIB: u64 = 1024;

/// Starts a server of `exported`, which runs until it is stopped.
fn serve(exported: &Rc<TestExports>, options: NbdServerOptions) -> Rc<NbdServer> {
    let server = NbdServer::new(exported.clone(), options, NbdStats::new());
    let listener = Listener::bind(&addr()).expect("binds");
    drop(spawn(server.clone().serve(listener, Tls::None)));
    server
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(0x9e37_79b9).wrapping_add(seed).to_le_bytes()[2] | 1).collect()
}

#[test]
fn reads_writes_zeroes_and_trims_in_every_style() {
    for style in STYLES {
        simulate(|| async move {
            let model = Model::new(1 << 20);
            model.delay.set(20_000);
            let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
            let (mut client, facts) = Client::open(&addr(), "disk", style).await;
            assert_eq!(facts.size, 1 << 20);
            let df = if style == Style::Simple { 0 } else { 1 << 7 };
            assert_eq!(facts.flags, 0b1001_0110_1101 | df);
            assert_eq!(facts.block_sizes, Some((1, 4096, 32 << 20)));
            let data = pattern(100_000, 1);
            client.write(777, &data).await;
            assert_eq!(client.read(777, data.len()).await, data);
            assert_eq!(client.read(0, 777).await, vec![0; 777]);
            assert_eq!(client.ask(6, 0, 1000, 5000, &[]).await.error, 0);
            assert_eq!(client.read(1000, 5000).await, vec![0; 5000]);
            assert_eq!(client.ask(4, 0, 8192, 4096, &[]).await.error, 0);
            assert_eq!(client.read(8000, 8192).await[192..4288], [0; 4096]);
            assert_eq!(client.ask(3, 0, 0, 0, &[]).await.error, 0);
            client.disconnect().await;
            server.stop().await;
        });
    }
}

#[test]
fn flags_reach_the_device() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        assert_eq!(client.ask(1, 1, 0, 4, b"data").await.error, 0);
        assert_eq!(client.ask(1, 0, 0, 4, b"data").await.error, 0);
        assert_eq!(client.ask(6, 0b1, 0, 512, &[]).await.error, 0);
        assert_eq!(client.ask(6, 0b10, 0, 512, &[]).await.error, 0);
        assert_eq!(client.ask(6, 0b10000, 0, 512, &[]).await.error, 0);
        assert_eq!(client.ask(6, 0b10010, 0, 512, &[]).await.error, 95, "fast without a hole is refused");
        assert_eq!(client.ask(4, 0b1, 0, 512, &[]).await.error, 0);
        assert_eq!(client.ask(0, 0b1, 0, 0, &[]).await.error, 0);
        assert_eq!(
            model.asked(),
            [
                "write 0+4 fua=true",
                "write 0+4 fua=false",
                "zero 0+512 no_unmap=false fua=true",
                "zero 0+512 no_unmap=true fua=false",
                "zero 0+512 no_unmap=false fua=false",
                "discard 0+512",
                "flush",
            ]
        );
        client.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn holes_are_sent_as_holes_and_never_with_df() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        for style in [Style::Structured, Style::Extended] {
            let (mut client, _) = Client::open(&addr(), "disk", style).await;
            client.write(100_000, &pattern(1000, 3)).await;
            let sparse = client.ask(0, 0, 0, 256 * KIB, &[]).await;
            assert_eq!((sparse.holes, sparse.data.len()), (2, 3));
            let whole = client.ask(0, 4, 0, 256 * KIB, &[]).await;
            assert_eq!((whole.holes, whole.data.len()), (0, 1));
            assert_eq!(sparse.bytes(0, 256 << 10), whole.bytes(0, 256 << 10));
            assert_eq!(client.ask(0, 4, 512 * KIB, 64 * KIB, &[]).await.holes, 1, "one chunk, and it is a hole");
            client.disconnect().await;
        }
        server.stop().await;
    });
}

#[test]
fn block_status_follows_the_map() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        for style in [Style::Structured, Style::Extended] {
            let (mut client, _) = Client::open(&addr(), "disk", style).await;
            client.write(65536, &pattern(8192, 3)).await;
            let hole = 3;
            let all = client.ask(7, 0, 0, 1 << 20, &[]).await;
            assert_eq!(all.status, [(65536, hole), (8192, 0), (974_848, hole)]);
            let one = client.ask(7, 8, 65536 + 4096, 1 << 19, &[]).await;
            assert_eq!(one.status, [(4096, 0)]);
            let inside = client.ask(7, 8, 100, 1000, &[]).await;
            assert_eq!(inside.status, [(1000, hole)]);
            assert_eq!(client.ask(7, 0, 1 << 20, 1, &[]).await.error, 22);
            client.disconnect().await;
        }
        // A client without the selected context gets no status.
        let mut client = Client::fixed(&addr()).await;
        assert_eq!(client.option(8, &[]).await, [(1, vec![])]);
        let contexts = client.option(10, &context_data("disk", &["base:allocation", "qemu:x"])).await;
        assert_eq!(contexts.len(), 2);
        assert_eq!(client.option(10, &context_data("disk", &[])).await, [(1, vec![])]);
        client.go("disk").await.expect("there");
        client.request(5, 7, 0, 0, 4096, &[]).await;
        let head = client.take(20).await.expect("a chunk");
        assert_eq!((be(&head[6..8]), be(&head[8..16])), (0x8001, 5));
        server.stop().await;
    });
}

#[test]
fn errors_have_the_protocols_numbers_and_the_devices_words() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let table = [
            (ErrorKind::NoSpace, 28, 28),
            (ErrorKind::Io, 5, 5),
            (ErrorKind::Corrupt, 5, 5),
            (ErrorKind::ReadOnly, 1, 1),
            (ErrorKind::OutOfRange, 22, 28),
            (ErrorKind::Invalid, 22, 22),
            (ErrorKind::TimedOut, 5, 5),
            (ErrorKind::Fenced, 108, 108),
            (ErrorKind::ShuttingDown, 108, 108),
            (ErrorKind::Denied, 1, 1),
            (ErrorKind::Unsupported, 22, 22),
        ];
        for style in STYLES {
            let (mut client, _) = Client::open(&addr(), "disk", style).await;
            for (kind, read, write) in table {
                model.fail(&[kind, kind]);
                let answer = client.ask(0, 0, 0, 4096, &[]).await;
                assert_eq!((answer.error, answer.data.len()), (read, 0), "{kind:?}");
                if style != Style::Simple {
                    assert!(answer.text.starts_with("as the test wants it"), "{}", answer.text);
                }
                assert_eq!(client.ask(1, 0, 0, 4, b"data").await.error, write, "{kind:?}");
            }
            model.fail(&[ErrorKind::Unsupported]);
            assert_eq!(client.ask(6, 1 << 4, 0, 4096, &[]).await.error, 95);
            client.write(0, b"it goes on").await;
            client.disconnect().await;
        }
        let [export] = &server.stats().exports()[..] else { panic!("one export") };
        assert_eq!(export.numbers.errors, 3 * (2 * table.len() as u64 + 1));
        server.stop().await;
    });
}

#[test]
fn long_requests_are_cut_for_the_device_and_errors_say_where() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        model.change(|geometry| geometry.transfer_max = 128 << 10);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        let data = pattern(300_000, 9);
        client.write(1000, &data).await;
        assert_eq!(
            model.asked(),
            ["write 1000+131072 fua=false", "write 132072+131072 fua=false", "write 263144+37856 fua=false"]
        );
        assert_eq!(client.read(1000, data.len()).await, data);
        assert_eq!(model.asked().len(), 3);
        // The offset of a failed piece is reported only if it differs from the request's offset.
        for (style, at) in [(Style::Structured, Some(512 + 131_072)), (Style::Simple, None)] {
            let (mut client, _) = Client::open(&addr(), "disk", style).await;
            for kind in [0, 1] {
                *model.failures.borrow_mut() = [None, Some(ErrorKind::Io)].into();
                let payload = if kind == 1 { &data[..] } else { &[] };
                let answer = client.ask(kind, 0, 512, 300_000, payload).await;
                assert_eq!((answer.error, answer.error_offset, answer.data.len()), (5, at, 0));
                model.fail(&[ErrorKind::Io]);
                let answer = client.ask(kind, 0, 512, 300_000, payload).await;
                assert_eq!((answer.error, answer.error_offset), (5, None));
            }
            client.disconnect().await;
        }
        client.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn a_long_payload_is_received_in_pieces() {
    for seed in [0, 7] {
        simulate_seed(seed, || async {
            let model = Model::new(6 << 20);
            let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
            let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
            for len in [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 12_345] {
                let data = pattern(len, len as u64);
                client.write(4321, &data).await;
                assert!(model.bytes.borrow()[4321..][..len] == data);
                client.write(0, b"in step").await;
            }
            client.disconnect().await;
            server.stop().await;
        });
    }
}

#[test]
fn too_long_requests_are_refused_and_their_payload_is_read_past() {
    simulate_seed(0, || async {
        let model = Model::new(1 << 20);
        model.change(|geometry| geometry.size = 1 << 30);
        let options = NbdServerOptions { payload_max: 128 << 10, ..NbdServerOptions::default() };
        let server = serve(&TestExports::with("disk", &model), options);
        for (style, read_error) in [(Style::Simple, 22), (Style::Structured, 75)] {
            let (mut client, facts) = Client::open(&addr(), "disk", style).await;
            assert_eq!(facts.block_sizes, Some((1, 4096, 128 << 10)));
            assert_eq!(client.ask(0, 0, 0, 129 << 10, &[]).await.error, read_error);
            assert_eq!(client.ask(1, 0, 0, 300_000, &pattern(300_000, 1)).await.error, 22);
            client.write(0, b"still in step").await;
            assert_eq!(client.read(0, 13).await, b"still in step");
            // Too long to be skipped.
            client.request(9, 1, 0, 0, 65 << 20, &[]).await;
            assert_eq!(client.answer().await, None);
        }
        let (mut client, _) = Client::open(&addr(), "disk", Style::Extended).await;
        client.request(9, 1, 0, 0, 129 << 10, &[]).await;
        assert_eq!(client.answer().await, None);
        assert_eq!(server.stats().server().ended_for_cause, 3);
        server.stop().await;
    });
}

/// Empty device of 32 TiB, which logs its requests.
struct Vast(RefCell<Vec<String>>);

impl BlockDevice for Vast {
    fn geometry(&self) -> Geometry {
        Geometry { size: 32 << 40, block_size: 512, preferred_io: 4096, transfer_max: 32 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.0.borrow_mut().push(match &request {
            BlockRequest::Discard(extent) => format!("discard {}+{}", extent.offset, extent.len),
            BlockRequest::WriteZeroes { extent, .. } => format!("zero {}+{}", extent.offset, extent.len),
            other => format!("{other:?}"),
        });
        Box::pin(std::future::ready(Ok(BlockReply::Done)))
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Hole);
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

#[test]
fn with_extended_headers_effects_are_longer_than_4_gib() {
    const GIB: u64 = 1 << 30;
    simulate(|| async {
        let device = Rc::new(Vast(RefCell::default()));
        let exported = Rc::new(TestExports::default());
        exported.add(NbdExport::new("vast", device.clone()), "vast", "");
        let server = serve(&exported, NbdServerOptions::default());
        let (mut client, facts) = Client::open(&addr(), "vast", Style::Extended).await;
        assert_eq!(facts.size, 32 << 40);
        assert_eq!(client.ask(4, 0, 0, 32 << 40, &[]).await.error, 0);
        assert_eq!(client.ask(6, 0, GIB, 5 * GIB, &[]).await.error, 0);
        assert_eq!(device.0.take(), ["discard 0+35184372088832", "zero 1073741824+5368709120"]);
        let status = client.ask(7, 0, 512, (32 << 40) - 512, &[]).await.status;
        let [(len, 3)] = status[..] else { panic!("one hole: {status:?}") };
        assert!(len > 4 * GIB, "{len}");
        // Requests past the end, and a read that is too long for a payload.
        assert_eq!(client.ask(4, 0, 512, 32 << 40, &[]).await.error, 22);
        assert_eq!(client.ask(6, 0, 512, 32 << 40, &[]).await.error, 28);
        assert_eq!(client.ask(4, 0, 0, u64::MAX - 511, &[]).await.error, 22);
        assert_eq!(client.ask(0, 0, 0, 5 * GIB, &[]).await.error, 75);
        // A filter of contexts was not offered: its payload is skipped and it is refused.
        assert_eq!(client.ask(7, 1 << 5, 0, 12, &[7; 12]).await.error, 22);
        assert_eq!(client.ask(4, 1 << 5, 0, 512, &[7; 512]).await.error, 22);
        assert_eq!(client.ask(3, 0, 0, 0, &[]).await.error, 0, "still in step");
        assert_eq!(device.0.take(), ["Flush"]);
        client.disconnect().await;
        // Clients without extended headers use the same volume.
        let (mut client, _) = Client::open(&addr(), "vast", Style::Structured).await;
        let [(len, 3)] = client.ask(7, 0, 0, 0xffff_fe00, &[]).await.status[..] else { panic!("one hole") };
        assert_eq!(len, 0xffff_fe00);
        client.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn what_is_out_of_bounds_unaligned_or_read_only_is_refused() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        model.change(|geometry| geometry.block_size = 512);
        let exported = TestExports::with("disk", &model);
        exported.add(
            NbdExport::new("fixed", Rc::new(ModelDevice(model.clone()))).read_only(true),
            "fixed",
            "not to be written",
        );
        let server = serve(&exported, NbdServerOptions::default());
        let (mut client, facts) = Client::open(&addr(), "disk", Style::Structured).await;
        assert_eq!(facts.block_sizes, Some((512, 4096, 32 << 20)));
        assert_eq!(client.ask(0, 0, 1, 512, &[]).await.error, 22);
        assert_eq!(client.ask(1, 0, 512, 4, b"data").await.error, 22);
        assert_eq!(client.ask(1, 0, 1 << 20, 512, &[1; 512]).await.error, 28);
        assert_eq!(client.ask(0, 0, u64::MAX - 511, 512, &[]).await.error, 22);
        assert_eq!(client.ask(5, 0, 0, 512, &[]).await.error, 22);
        assert_eq!(client.ask(1000, 0, 0, 512, &[]).await.error, 22);
        // A grown volume accepts larger offsets at once, and shows its size to new connections.
        model.bytes.borrow_mut().resize(2 << 20, 0);
        model.stored.borrow_mut().resize(512, false);
        model.change(|geometry| geometry.size = 2 << 20);
        assert_eq!(client.ask(1, 0, 1 << 20, 512, &[1; 512]).await.error, 0);
        client.disconnect().await;
        let (mut client, facts) = Client::open(&addr(), "fixed", Style::Structured).await;
        assert_eq!((facts.size, facts.flags), (2 << 20, 0b1_1000_1111));
        assert_eq!(facts.description.as_deref(), Some("not to be written"));
        for kind in [1, 4, 6] {
            assert_eq!(client.ask(kind, 0, 0, 512, if kind == 1 { &[1; 512] } else { &[] }).await.error, 1);
        }
        assert_eq!(client.read(1 << 20, 512).await, [1; 512]);
        assert_eq!(client.ask(3, 0, 0, 0, &[]).await.error, 0);
        client.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn in_flight_requests_are_bounded_in_number_and_bytes() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let options = NbdServerOptions { requests_max: 7, bytes_max: 100_000, ..NbdServerOptions::default() };
        let server = serve(&TestExports::with("disk", &model), options);
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        for (len, most) in [(512, 7), (30_000, 3), (200_000, 1)] {
            model.held.set(true);
            model.in_flight_most.set(0);
            for cookie in 0..20 {
                client.request(cookie, 0, 0, 0, len, &[]).await;
            }
            sleep(Duration::from_millis(50)).await;
            assert_eq!(model.in_flight.get(), most);
            model.release();
            for _ in 0..20 {
                assert_eq!(client.answer().await.expect("answered").error, 0);
            }
            assert_eq!(model.in_flight_most.get(), most);
        }
        // A client that does not read its replies is throttled, and does not delay other clients.
        model.bytes.borrow_mut().fill(7);
        model.asked();
        for cookie in 0..24 {
            client.request(cookie, 0, 0, 0, 90_000, &[]).await;
        }
        sleep(Duration::from_millis(50)).await;
        assert!(model.asked().len() < 10, "limits count what is not sent yet");
        let (mut other, _) = Client::open(&addr(), "disk", Style::Simple).await;
        other.write(0, b"served").await;
        for _ in 0..24 {
            client.answer().await.expect("answered in the end");
        }
        client.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn a_disconnect_waits_for_what_is_under_way() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Simple).await;
        model.held.set(true);
        for cookie in 1..=5 {
            client.request(cookie, 1, 0, cookie * 4096, 4, b"data").await;
        }
        client.request(6, 2, 0, 0, 0, &[]).await;
        sleep(Duration::from_millis(20)).await;
        assert_eq!((server.connections(), model.in_flight.get()), (1, 5));
        model.release();
        let mut answered = Vec::new();
        while let Some(answer) = client.answer().await {
            answered.push((answer.cookie, answer.error));
        }
        assert_eq!(answered, (1..=5).map(|cookie| (cookie, 0)).collect::<Vec<_>>());
        server.stop().await;
    });
}

#[test]
fn a_detach_waits_for_the_writes_of_a_client_that_has_disconnected() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Simple).await;
        model.held.set(true);
        client.request(1, 1, 0, 0, 4, b"data").await;
        client.request(2, 2, 0, 0, 0, &[]).await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        sleep(Duration::from_millis(5)).await;
        let detaching = {
            let server = server.clone();
            spawn(async move { server.detach("disk").await })
        };
        sleep(Duration::from_secs(2)).await;
        assert_eq!((server.connections(), model.in_flight.get()), (1, 1), "detached, and a write may land");
        model.release();
        assert_eq!(detaching.await, 1);
        assert_eq!((server.connections(), model.in_flight.get()), (0, 0));
        server.stop().await;
    });
}

#[test]
fn a_vanished_client_leaves_its_writes_done_and_nothing_else() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Simple).await;
        model.held.set(true);
        client.request(1, 1, 0, 0, 4, b"data").await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        // Half of a request, followed by the end of the connection.
        client.send(&[0x25, 0x60]).await;
        drop(client);
        sleep(Duration::from_millis(5)).await;
        assert_eq!((server.connections(), model.in_flight.get()), (1, 1));
        model.release();
        while server.connections() > 0 {
            sleep(Duration::from_micros(100)).await;
        }
        assert_eq!(&model.bytes.borrow()[..4], b"data");
        server.stop().await;
    });
}

#[test]
fn a_stopping_server_finishes_answers_and_closes() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        let mut haggling = Client::fixed(&addr()).await;
        assert_eq!(haggling.option(8, &[]).await, [(1, vec![])]);
        model.held.set(true);
        client.request(1, 1, 0, 0, 4, b"data").await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        let stopping = spawn({
            let server = server.clone();
            async move { server.stop().await }
        });
        sleep(Duration::from_millis(1)).await;
        client.request(2, 1, 0, 0, 4, b"late").await;
        let late = client.answer().await.expect("an answer");
        assert_eq!((late.cookie, late.error), (2, 108));
        assert!(!stopping.is_finished());
        model.release();
        let first = client.answer().await.expect("an answer");
        assert_eq!((first.cookie, first.error), (1, 0));
        assert_eq!(client.answer().await, None);
        assert_eq!(haggling.take(1).await, Err(vec![]));
        stopping.await;
        assert_eq!(server.connections(), 0);
    });
}

#[test]
fn a_client_that_resumes_is_never_refused() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let exports = TestExports::with("disk", &model);
        let server = NbdServer::new(exports, NbdServerOptions::default(), NbdStats::new());
        let listener = Listener::bind(&addr()).expect("binds");
        drop(spawn(server.clone().serve(listener, NbdListenerOptions { tls: Tls::None, resumes: true })));
        let (mut client, _) = Client::open(&addr(), "disk", Style::Simple).await;
        model.held.set(true);
        client.request(1, 1, 0, 0, 4, b"data").await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        let stopping = spawn({
            let server = server.clone();
            async move { server.stop().await }
        });
        sleep(Duration::from_millis(1)).await;
        client.request(2, 1, 0, 4, 4, b"late").await;
        sleep(Duration::from_millis(200)).await;
        assert!(!stopping.is_finished(), "a write is in flight");
        model.release();
        let first = client.answer().await.expect("an answer");
        assert_eq!((first.cookie, first.error), (1, 0));
        assert_eq!(client.answer().await, None, "the other one is sent again, over another connection");
        stopping.await;
        assert_eq!(&model.bytes.borrow()[..8], b"data\0\0\0\0");
    });
}

#[test]
fn a_request_that_never_ends_does_not_hold_up_a_stop_for_ever() {
    simulate_seed(1, || async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        model.held.set(true);
        client.request(1, 0, 0, 0, 4, &[]).await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        server.stop().await;
        assert_eq!(client.answer().await, None);
    });
}

#[test]
fn detaching_ends_the_connections_of_that_export_only() {
    simulate(|| async {
        let (first, second) = (Model::new(1 << 20), Model::new(1 << 20));
        let exported = TestExports::with("first", &first);
        let device: Rc<dyn BlockDevice> = Rc::new(ModelDevice(second.clone()));
        exported.add(NbdExport::new("second", device), "second", "");
        let server = serve(&exported, NbdServerOptions::default());
        let (mut a, _) = Client::open(&addr(), "first", Style::Simple).await;
        let (mut b, _) = Client::open(&addr(), "second", Style::Simple).await;
        // One client that has only queried the export, and one that is about to open it.
        let mut looking = Client::fixed(&addr()).await;
        facts(&looking.option(6, &info_data("first", &[])).await).expect("there");
        let mut opening = Client::fixed(&addr()).await;
        opening.send(&option_bytes(7, &info_data("first", &[]))).await;
        exported.remove("first");
        assert!(server.detach("first").await >= 2);
        assert_eq!(a.answer().await, None);
        assert_eq!(looking.take(1).await, Err(vec![]));
        if let Some(replies) = opening.option_replies(7).await {
            assert!(facts(&replies).is_err() || opening.answer().await.is_none());
        }
        b.write(0, b"goes on").await;
        let mut late = Client::fixed(&addr()).await;
        assert_eq!(late.go("first").await.expect_err("gone").0, 0x8000_0006);
        assert_eq!(server.detach("nobody").await, 0);
        b.disconnect().await;
        assert_eq!(Rc::strong_count(&first), 1, "nobody holds the device any more");
        server.stop().await;
    });
}

#[test]
fn a_flush_on_one_connection_comes_after_writes_answered_on_another() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut a, facts) = Client::open(&addr(), "disk", Style::Simple).await;
        assert!(facts.flags & 1 << 8 != 0, "multi-conn is advertised");
        let (mut b, _) = Client::open(&addr(), "disk", Style::Simple).await;
        a.write(0, b"data").await;
        assert_eq!(b.ask(3, 0, 0, 0, &[]).await.error, 0);
        assert_eq!(model.asked(), ["write 0+4 fua=false", "flush"]);
        assert_eq!(b.read(0, 4).await, b"data");
        server.stop().await;
    });
}

#[test]
fn numbers_are_kept_by_connection_and_by_export() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = serve(&TestExports::with("disk", &model), NbdServerOptions::default());
        let (mut client, _) = Client::open(&addr(), "disk", Style::Structured).await;
        client.write(0, &[1; 5000]).await;
        client.read(0, 4096).await;
        client.ask(0, 0, 5 << 20, 1, &[]).await;
        let [connection] = &server.stats().connections()[..] else { panic!("one connection") };
        assert_eq!(connection.export, "disk");
        assert_eq!((connection.numbers.bytes_read, connection.numbers.bytes_written), (4096, 5000));
        assert_eq!((connection.numbers.requests_of(NbdRequestKind::Read), connection.numbers.errors), (2, 1));
        client.disconnect().await;
        while server.connections() > 0 {
            sleep(Duration::from_micros(100)).await;
        }
        let [export] = &server.stats().exports()[..] else { panic!("one export") };
        assert_eq!((export.connections, export.numbers.requests_total()), (0, 3));
        server.stop().await;
    });
}

/// Sends random requests, many at once, and compares the results with a vector of bytes.
async fn random_requests(style: Style, count: usize) {
    const SIZE: u64 = 1 << 20;
    let model = Model::new(SIZE as usize);
    model.delay.set(30_000);
    let server =
        serve(&TestExports::with("disk", &model), NbdServerOptions { requests_max: 16, ..NbdServerOptions::default() });
    let (mut client, _) = Client::open(&addr(), "disk", style).await;
    let mut expected = vec![0_u8; SIZE as usize];
    let mut pending: BTreeMap<u64, (u16, u64, u64, Vec<u8>)> = BTreeMap::new();
    let mut sent = 0;
    while sent < count || !pending.is_empty() {
        let mut batch = Vec::new();
        while sent < count && pending.len() < 24 {
            let longest = [600, 5_000, 100_000, 300_000][random() as usize % 4];
            let len = 1 + random() % longest;
            let offset = random() % (SIZE - len);
            let overlaps = pending.values().any(|&(_, at, other, _)| offset < at + other && at < offset + len);
            if overlaps {
                break;
            }
            let kind = [0, 0, 1, 1, 1, 4, 6, 7][random() as usize % 8];
            let kind = if kind == 7 && style == Style::Simple { 0 } else { kind };
            let data = if kind == 1 { pattern(len as usize, random()) } else { Vec::new() };
            let flags = random() as u16 & if kind == 7 { 0 } else { 1 };
            batch.extend(client.request_bytes(sent as u64, kind, flags, offset, len, &data));
            pending.insert(sent as u64, (kind, offset, len, data));
            sent += 1;
        }
        client.send(&batch).await;
        let Some(answer) = client.answer().await else { panic!("the connection is gone") };
        let (kind, offset, len, data) = pending.remove(&answer.cookie).expect("it was asked");
        assert_eq!(answer.error, 0, "{}", answer.text);
        let range = offset as usize..(offset + len) as usize;
        match kind {
            0 => assert!(answer.bytes(offset, len as usize) == expected[range], "read {offset}+{len}"),
            1 => expected[range].copy_from_slice(&data),
            7 => assert_eq!(answer.status.iter().map(|run| run.0).sum::<u64>(), len),
            _ => expected[range].fill(0),
        }
    }
    assert!(*model.bytes.borrow() == expected);
    client.disconnect().await;
    server.stop().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_requests_behave_as_a_vector_of_bytes(seed in 0_u64..1 << 32, style in 0_usize..3) {
        simulate_seed(seed, || random_requests(STYLES[style], 150));
    }
}
