//! Hostile peers on the simulated network: each is disconnected with a reason, the server memory it can occupy is
//! bounded, and a concurrent client is unaffected.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::wire::control::{
    Ack, AuthRequest, AuthSignature, ClientIdent, ControlPayload, FLAG_LOSSY, Hello, Reconnect, method, mode,
};
use forebay_messenger::wire::{
    Banner, Encoder, EntityAddr, FrameLayout, MessageHeader, MessengerPools, Tag, WireError, entity,
};
use forebay_messenger::{
    Address, Auth, Connection, DisconnectReason, Handler, Keyring, Message, MessageBudget, Messenger, MessengerCore,
    MessengerOptions, Policy, SendError, SessionViolation, SharedKey,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Buf, BufList, BufMut, Listener, Stream, now, sleep, spawn, timeout};
use forebay_sim::{Faults, World};

/// Server journal: replies to every message, and records the reasons why peers were disconnected.
#[derive(Default)]
struct Journal {
    ended: RefCell<Vec<DisconnectReason>>,
    /// Total number of streams opened.
    open: Cell<u32>,
    opened: Notify,
    /// Messages kept by the server; `None` disables keeping.
    kept: RefCell<Option<Vec<Message>>>,
}

struct Server(Rc<Journal>);

impl Handler for Server {
    fn message(&self, connection: &Connection, message: Message) {
        if let Some(kept) = &mut *self.0.kept.borrow_mut()
            && message.kind == 99
        {
            return kept.push(message);
        }
        // Replies to a flood may exceed the send budget; those to a well-behaved client do not.
        let _ = connection.post(message.reply(2).data(message.data.clone()));
    }

    fn opened(&self, _connection: &Connection) {
        self.0.open.set(self.0.open.get() + 1);
        self.0.opened.notify_all();
    }

    fn interrupted(&self, _connection: &Connection, reason: &DisconnectReason) {
        self.0.ended.borrow_mut().push(reason.clone());
    }

    fn lost(&self, _connection: &Connection, reason: &DisconnectReason) {
        self.0.ended.borrow_mut().push(reason.clone());
    }

    fn refused(&self, _peer: &Address, reason: &DisconnectReason) {
        self.0.ended.borrow_mut().push(reason.clone());
    }
}

fn key() -> SharedKey {
    SharedKey::new([5; 32])
}

fn shared(name: &str) -> Auth {
    Auth::SharedKey { name: name.into(), key: key(), keyring: Rc::new(Keyring::new().with("client", key())) }
}

fn options(auth: Auth) -> MessengerOptions {
    MessengerOptions { auth, ..MessengerOptions::default() }
}

struct Stage {
    journal: Rc<Journal>,
    core: MessengerCore,
    address: Address,
}

impl Stage {
    fn addr(&self) -> Addr {
        Addr::Tcp(self.address.socket().expect("TCP"))
    }

    async fn raw(&self) -> Stream {
        Stream::connect(&self.addr()).await.expect("connected")
    }

    /// Waits until a peer has been disconnected, and returns the reason.
    async fn ended(&self) -> DisconnectReason {
        timeout(Duration::from_secs(600), async {
            while self.journal.ended.borrow().is_empty() {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("a peer has ended");
        self.journal.ended.borrow_mut().remove(0)
    }
}

fn quiet(_: &Connection, _: Message) {}

/// Runs `attack` against a server, beside a client that keeps sending requests, all of which must be answered.
fn attacked<F: Future<Output = ()>>(seed: u64, options_: MessengerOptions, attack: impl FnOnce(Rc<Stage>) -> F) {
    let world = World::new(seed, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let journal = Rc::new(Journal::default());
        let core = MessengerCore::new(MessageBudget { messages: 100, bytes: 4 << 20 });
        let auth = if matches!(options_.auth, Auth::None) { Auth::None } else { shared("client") };
        let server = Messenger::new(&core, options_, Server(journal.clone()));
        let address = server.bind(&"127.0.0.1:3300".parse().expect("an address")).expect("bound");
        let client = Messenger::new(&MessengerCore::default(), options(auth), quiet);
        let good = client.connect(&address, Policy::LosslessPeer);
        good.ready().await.expect("connected");
        let stop = Rc::new(std::cell::Cell::new(false));
        let stopped = stop.clone();
        let beside = spawn(async move {
            let mut answered = 0u32;
            while !stopped.get() {
                let data = Buf::copy_of(&answered.to_le_bytes());
                let asked = good.request(Message::new(1).data(data.clone()));
                let reply = timeout(Duration::from_secs(5), asked).await.expect("answered in time").expect("answered");
                assert_eq!(reply.data.to_vec(), &data[..]);
                answered += 1;
                sleep(Duration::from_millis(20)).await;
            }
            answered
        });
        let stage = Rc::new(Stage { journal, core: core.clone(), address });
        attack(stage.clone()).await;
        stop.set(true);
        assert!(beside.await > 0);
        stage.journal.kept.take();
        assert!(stage.journal.ended.borrow().is_empty(), "somebody else has ended: {:?}", stage.journal.ended);
        server.shutdown();
        client.shutdown();
        sleep(Duration::from_secs(1)).await;
        assert_eq!((server.handshakes(), server.connections().len()), (0, 0));
        assert_eq!(core.held(), MessageBudget { messages: 0, bytes: 0 });
    });
    assert_eq!(ran, Ok(()), "seed {seed}\n{}", world.trace(40));
}

/// Encodes a peer's handshake up to its ident, without authentication and in crc mode.
fn greeting(rest: &[(Tag, Vec<u8>)]) -> Vec<u8> {
    let addr = EntityAddr::msgr2(None, 7);
    let request = AuthRequest { method: method::NONE, modes: vec![mode::CRC], payload: vec![] };
    let frames = [
        (Tag::Hello, Hello { entity: entity::FOREBAY, peer: addr }.encode()),
        (Tag::AuthRequest, request.encode()),
        (Tag::AuthSignature, AuthSignature::default().encode()),
    ];
    let mut out = BufList::new();
    let mut encoder = Encoder::new(Rc::new(MessengerPools::new()), true);
    for (tag, payload) in frames.iter().chain(rest) {
        encoder.control(*tag, payload, &mut out).expect("crc mode");
    }
    [Banner::OURS.encode(), out.to_vec()].concat()
}

fn ident(cookie: u64) -> (Tag, Vec<u8>) {
    let addr = EntityAddr::msgr2(None, 7);
    let ident = ClientIdent { addrs: vec![addr], supported: u64::MAX, cookie, ..ClientIdent::default() };
    (Tag::ClientIdent, ident.encode())
}

fn message(header: MessageHeader, len: usize) -> Vec<u8> {
    let mut out = BufList::new();
    let data: BufList = Buf::zeroed(len).into();
    let empty = BufList::new();
    Encoder::new(Rc::new(MessengerPools::new()), true)
        .message(&header, [&empty, &empty, &data], &mut out)
        .expect("crc mode");
    out.to_vec()
}

async fn send(stream: &Stream, bytes: &[u8]) {
    // The server may have closed the connection already.
    let _ = stream.send(Buf::copy_of(bytes)).await;
}

/// Reads until the server ends the connection.
async fn drain(stream: &Stream) {
    while matches!(stream.recv(BufMut::with_capacity(4096)).await, (Ok(1..), _)) {}
}

#[test]
fn a_wrong_banner_is_refused_at_once() {
    for (seed, banner) in
        [&b"GET / HTTP/1.1\r\n"[..], b"ceph v027", b"\0", b"ceph v2\n\xff\xff"].into_iter().enumerate()
    {
        attacked(seed as u64, MessengerOptions::default(), |stage| async move {
            let stream = stage.raw().await;
            let begin = now();
            send(&stream, banner).await;
            drain(&stream).await;
            assert!(begin.elapsed() < Duration::from_secs(1));
            let reason = stage.ended().await;
            let DisconnectReason::Violation(SessionViolation::Wire(error)) = &reason else { panic!("{reason}") };
            assert!(matches!(error, WireError::BadBanner(_) | WireError::BadBannerLength(_)), "{error}");
        });
    }
}

#[test]
fn a_peer_of_another_age_is_refused() {
    attacked(1, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        send(&stream, &Banner { supported: 0, required: 0 }.encode()).await;
        drain(&stream).await;
        assert_eq!(stage.ended().await, SessionViolation::Features { lacks: 1, wants: 0 }.into());
    });
}

#[test]
fn half_open_and_dripping_peers_run_out_of_time() {
    for drip in [false, true] {
        attacked(2, MessengerOptions::default(), |stage| async move {
            let stream = stage.raw().await;
            let begin = now();
            for byte in greeting(&[ident(1)]).into_iter().take(if drip { 100 } else { 0 }) {
                send(&stream, &[byte]).await;
                sleep(Duration::from_secs(1)).await;
            }
            drain(&stream).await;
            let reason = stage.ended().await;
            assert!(matches!(reason, DisconnectReason::Handshake(_)), "{reason}");
            assert!(begin.elapsed() >= Duration::from_secs(20));
        });
    }
}

#[test]
fn no_more_strangers_than_are_allowed_are_heard() {
    let limited = MessengerOptions { handshakes_max: 8, ..MessengerOptions::default() };
    attacked(3, limited, |stage| async move {
        let mut strangers = Vec::new();
        for _ in 0..20 {
            strangers.push(stage.raw().await);
        }
        for _ in 0..12 {
            assert_eq!(stage.ended().await, DisconnectReason::TooMany(8));
        }
        for _ in 0..8 {
            assert!(matches!(stage.ended().await, DisconnectReason::Handshake(_)));
        }
    });
}

#[test]
fn connection_number_1025_is_refused() {
    const MAX: u32 = 1024;
    let limited =
        MessengerOptions { connections_max: MAX as usize, handshakes_max: 2048, ..MessengerOptions::default() };
    let lossy = |nonce: u32| {
        let addrs = vec![EntityAddr::msgr2(None, nonce)];
        let ident = ClientIdent { addrs, supported: u64::MAX, flags: FLAG_LOSSY, ..ClientIdent::default() };
        greeting(&[(Tag::ClientIdent, ident.encode())])
    };
    attacked(16, limited, |stage| async move {
        let mut peers = Vec::new();
        // One of them is the client beside it.
        for nonce in 1..MAX {
            let stream = stage.raw().await;
            send(&stream, &lossy(nonce)).await;
            peers.push(stream);
        }
        // Handshakes take time; only completed ones count.
        timeout(Duration::from_secs(60), stage.journal.opened.wait_until(|| stage.journal.open.get() >= MAX))
            .await
            .expect("as many as are allowed are heard");
        let extra = stage.raw().await;
        send(&extra, &lossy(MAX)).await;
        drain(&extra).await;
        assert_eq!(stage.ended().await, DisconnectReason::TooMany(MAX as usize));
        // Once a connection has ended, the next one is accepted.
        peers.pop().expect("a peer").shutdown();
        stage.ended().await;
        let next = stage.raw().await;
        send(&next, &lossy(MAX + 1)).await;
        timeout(Duration::from_secs(60), stage.journal.opened.wait_until(|| stage.journal.open.get() > MAX))
            .await
            .expect("there is room again");
        peers.push(next);
        for peer in peers {
            peer.shutdown();
            stage.ended().await;
        }
    });
}

#[test]
fn oversized_lengths_are_refused_before_room_is_made() {
    let lens = [[20_000, 0, 0, 0], [41, 1, 0, 0], [41, 0, 0, u32::MAX]];
    for (seed, lens) in lens.into_iter().enumerate() {
        attacked(seed as u64, MessengerOptions::default(), |stage| async move {
            let stream = stage.raw().await;
            send(&stream, &Banner::OURS.encode()).await;
            send(&stream, &FrameLayout::new(Tag::Message, lens).preamble([8; 4])).await;
            drain(&stream).await;
            let reason = stage.ended().await;
            assert!(
                matches!(reason, DisconnectReason::Violation(SessionViolation::Wire(WireError::TooLong { .. }))),
                "{reason}"
            );
        });
    }
    // Repeats the check on an open connection.
    attacked(9, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        send(&stream, &greeting(&[ident(1)])).await;
        send(&stream, &FrameLayout::new(Tag::Message, [41, 0, 0, 65 << 20]).preamble([8; 4])).await;
        drain(&stream).await;
        let reason = stage.ended().await;
        assert!(
            matches!(reason, DisconnectReason::Violation(SessionViolation::Wire(WireError::TooLong { .. }))),
            "{reason}"
        );
    });
}

#[test]
fn a_message_before_its_time_is_refused() {
    attacked(4, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        let bytes = [greeting(&[]), message(MessageHeader { seq: 1, ..MessageHeader::default() }, 0)].concat();
        send(&stream, &bytes).await;
        drain(&stream).await;
        let reason = stage.ended().await;
        assert!(
            matches!(reason, DisconnectReason::Violation(SessionViolation::Unexpected { tag: Tag::Message, .. })),
            "{reason}"
        );
    });
}

#[test]
fn wrong_sequence_numbers_end_the_stream() {
    let wrong: [(Vec<u8>, &str); 3] = [
        (message(MessageHeader { seq: 2, ..MessageHeader::default() }, 10), "one is left out"),
        (
            message(MessageHeader { seq: 1, ack_seq: 5, ..MessageHeader::default() }, 10),
            "what was never sent is acknowledged",
        ),
        (
            {
                let mut out = BufList::new();
                let ack = Ack { seq: 9 }.encode();
                Encoder::new(Rc::new(MessengerPools::new()), true).control(Tag::Ack, &ack, &mut out).expect("crc mode");
                out.to_vec()
            },
            "what was never sent is acknowledged",
        ),
    ];
    for (bytes, why) in wrong {
        attacked(5, MessengerOptions::default(), |stage| async move {
            let stream = stage.raw().await;
            send(&stream, &[greeting(&[ident(1)]), bytes].concat()).await;
            drain(&stream).await;
            let reason = stage.ended().await;
            assert!(
                matches!(reason, DisconnectReason::Violation(SessionViolation::Sequence { .. })),
                "{why}: {reason}"
            );
        });
    }
}

#[test]
fn a_bad_checksum_ends_the_stream() {
    attacked(6, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        let mut bytes = message(MessageHeader { seq: 1, ..MessageHeader::default() }, 5000);
        let at = bytes.len() - 100;
        bytes[at] ^= 4;
        send(&stream, &[greeting(&[ident(1)]), bytes].concat()).await;
        drain(&stream).await;
        let reason = stage.ended().await;
        let expected = matches!(
            reason,
            DisconnectReason::Violation(SessionViolation::Wire(WireError::BadSegmentCrc { segment: 3, .. }))
        );
        assert!(expected, "{reason}");
    });
}

#[test]
fn a_frame_that_does_not_end_runs_out_of_time() {
    attacked(7, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        send(&stream, &greeting(&[ident(1)])).await;
        let bytes = message(MessageHeader { seq: 1, ..MessageHeader::default() }, 50_000);
        for byte in &bytes[..200] {
            send(&stream, &[*byte]).await;
            sleep(Duration::from_secs(1)).await;
        }
        drain(&stream).await;
        assert_eq!(stage.ended().await, DisconnectReason::Slow);
    });
}

#[test]
fn a_silent_peer_is_asked_and_then_given_up() {
    attacked(8, MessengerOptions::default(), |stage| async move {
        let stream = stage.raw().await;
        let begin = now();
        send(&stream, &greeting(&[ident(1)])).await;
        drain(&stream).await;
        assert_eq!(stage.ended().await, DisconnectReason::Silent);
        assert!(begin.elapsed() >= Duration::from_secs(30) && begin.elapsed() < Duration::from_secs(60));
    });
}

#[test]
fn a_flood_is_held_at_its_budget() {
    let tight =
        MessengerOptions { receive: MessageBudget { messages: 20, bytes: 1 << 20 }, ..MessengerOptions::default() };
    for len in [0, 4096, 200_000] {
        attacked(10, tight.clone(), |stage| async move {
            *stage.journal.kept.borrow_mut() = Some(Vec::new());
            let stream = stage.raw().await;
            send(&stream, &greeting(&[ident(1)])).await;
            let flood = stream.clone();
            let sending = spawn(async move {
                for seq in 1..2000 {
                    let header = MessageHeader { seq, kind: 99, ..MessageHeader::default() };
                    if flood.send(Buf::copy_of(&message(header, len))).await.is_err() {
                        return;
                    }
                }
            });
            sleep(Duration::from_secs(5)).await;
            let held = stage.core.held();
            let kept = stage.journal.kept.borrow().as_ref().map_or(0, Vec::len);
            assert!(kept >= 5 && held.messages <= 21 && held.bytes <= (1 << 20) + 200_000, "{held:?}");
            assert!(len < 4096 || !sending.is_finished(), "the sender is held back");
            // A peer that is read from again resumes sending.
            stage.journal.kept.borrow_mut().as_mut().expect("kept").clear();
            sleep(Duration::from_secs(1)).await;
            assert!(stage.journal.kept.borrow().as_ref().is_some_and(|kept| !kept.is_empty()));
            stream.shutdown();
            stage.journal.kept.take();
            let reason = stage.ended().await;
            assert!(
                matches!(reason, DisconnectReason::PeerClosed | DisconnectReason::PeerBroke | DisconnectReason::Io(..)),
                "{reason}"
            );
        });
    }
}

#[test]
fn nobody_resumes_what_is_not_theirs() {
    attacked(11, MessengerOptions::default(), |stage| async move {
        // Guessed cookies are answered with a reset, not with the session.
        let stream = stage.raw().await;
        let addr = EntityAddr::msgr2(None, 7);
        let guess = Reconnect { addrs: vec![addr], client_cookie: 1, server_cookie: 1, ..Reconnect::default() };
        send(&stream, &greeting(&[(Tag::SessionReconnect, guess.encode())])).await;
        let mut received = Vec::new();
        while !received.windows(2).any(|pair| pair == [Tag::SessionReset as u8, 1]) {
            let (got, buf) = stream.recv(BufMut::with_capacity(4096)).await;
            assert!(got.expect("open") > 0, "it ended without a reset");
            received.extend_from_slice(&buf);
        }
        stream.shutdown();
        stage.ended().await;
    });
}

#[test]
fn who_has_no_key_does_not_get_in() {
    attacked(12, options(shared("server")), |stage| async move {
        let auth = Auth::SharedKey { name: "client".into(), key: SharedKey::new([6; 32]), keyring: Rc::default() };
        let stranger = Messenger::new(&MessengerCore::default(), options(auth), quiet);
        let connection = stranger.connect(&stage.address, Policy::LosslessPeer);
        let reason = connection.ready().await.expect_err("it has the wrong key");
        assert!(
            matches!(reason, DisconnectReason::Violation(SessionViolation::MethodRefused { result: -13, .. })),
            "{reason}"
        );
        stage.ended().await;
        let sent = connection.send(Message::new(1)).await;
        assert_eq!(sent, Err(SendError::Ended(reason)));
        let nobody = Messenger::new(&MessengerCore::default(), options(Auth::None), quiet);
        let reason = nobody.connect(&stage.address, Policy::LosslessPeer).ready().await.expect_err("it has no key");
        assert!(
            matches!(reason, DisconnectReason::Violation(SessionViolation::MethodRefused { result: -95, .. })),
            "{reason}"
        );
        stage.ended().await;
    });
}

#[test]
fn only_those_on_the_list_may_connect() {
    let world = World::new(13, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let journal = Rc::new(Journal::default());
        let allow = vec!["10.0.0.0/8".parse().expect("a network")];
        let server = Messenger::new(
            &MessengerCore::default(),
            MessengerOptions { allow, ..MessengerOptions::default() },
            Server(journal.clone()),
        );
        let address = server.bind(&"127.0.0.1:3300".parse().expect("an address")).expect("bound");
        let stream = Stream::connect(&Addr::Tcp(address.socket().expect("TCP"))).await.expect("connected");
        drain(&stream).await;
        assert!(matches!(journal.ended.borrow()[..], [DisconnectReason::NotAllowed(_)]));
        server.shutdown();
    });
    assert_eq!(ran, Ok(()));
}

#[test]
fn without_a_key_only_this_machine_is_served() {
    let world = World::new(14, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let server = Messenger::new(&MessengerCore::default(), MessengerOptions::default(), quiet);
        let error = server.bind(&"10.0.0.1:3300".parse().expect("an address")).expect_err("anybody could connect");
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    });
    assert_eq!(ran, Ok(()));
}

/// Relays bytes between a client and the server, and applies `change` to those of the client.
async fn man_in_the_middle(listener: Listener, to: Addr, change: impl Fn(usize, Vec<u8>) -> Vec<u8> + 'static) {
    let mut number = 0;
    let change = Rc::new(change);
    loop {
        let (client, _) = listener.accept().await.expect("accepted");
        let server = Stream::connect(&to).await.expect("connected");
        let (back_from, back_to) = (server.clone(), client.clone());
        drop(spawn(async move {
            loop {
                let (got, buf) = back_from.recv(BufMut::with_capacity(65_536)).await;
                if !matches!(got, Ok(1..)) || back_to.send(buf).await.is_err() {
                    return back_to.shutdown();
                }
            }
        }));
        let change = change.clone();
        let first = std::mem::replace(&mut number, 1) == 0;
        drop(spawn(async move {
            let mut passed = 0;
            loop {
                let (got, buf) = client.recv(BufMut::with_capacity(65_536)).await;
                if !matches!(got, Ok(1..)) {
                    return server.shutdown();
                }
                let len = buf.len();
                // Only the first stream is tampered with, so that the session can resume.
                let bytes = if first { change(passed, buf.to_vec()) } else { buf.to_vec() };
                passed += len;
                if server.send(Buf::copy_of(&bytes)).await.is_err() {
                    return client.shutdown();
                }
            }
        }));
    }
}

/// Checks that in secure mode any replayed, dropped or changed bytes end the stream; a lossless session resumes on the
/// next one, and every message arrives exactly once.
#[test]
fn meddling_on_the_way_is_noticed_and_survived() {
    type Change = fn(usize, Vec<u8>) -> Vec<u8>;
    let changes: [(&str, Change); 3] = [
        ("replayed", |passed, bytes| if passed > 2000 { bytes.repeat(2) } else { bytes }),
        (
            "left out",
            |passed, bytes| if passed > 2000 && passed < 6000 { bytes[..bytes.len() - 1].to_vec() } else { bytes },
        ),
        ("changed", |passed, mut bytes| {
            if passed > 2000 {
                let at = bytes.len() / 2;
                bytes[at] ^= 1;
            }
            bytes
        }),
    ];
    for (what, change) in changes {
        let mut secure = options(shared("server"));
        secure.modes = Some(vec![mode::SECURE]);
        secure.frame_timeout = Duration::from_secs(5);
        let client_options = MessengerOptions { modes: Some(vec![mode::SECURE]), ..options(shared("client")) };
        attacked(15, MessengerOptions { modes: None, ..secure }, |stage| async move {
            let between: Addr = "127.0.0.1:4400".parse().expect("an address");
            let listener = Listener::bind(&between).expect("bound");
            let middle = spawn(man_in_the_middle(listener, stage.addr(), change));
            let client = Messenger::new(&MessengerCore::default(), client_options, quiet);
            let connection = client.connect(&between.into(), Policy::LosslessPeer);
            for number in 0..40u32 {
                let data = Buf::copy_of(&number.to_le_bytes().repeat(200));
                let reply = connection.request(Message::new(1).data(data.clone())).await.expect("answered");
                assert_eq!(reply.data.to_vec(), &data[..], "{what}");
            }
            let reason = stage.ended().await;
            let noticed = matches!(
                reason,
                DisconnectReason::Violation(SessionViolation::Wire(WireError::BadTag)) | DisconnectReason::Slow
            );
            assert!(noticed, "{what}: {reason}");
            client.shutdown();
            stage.ended().await;
            middle.cancel().await;
        });
    }
}
