//! Tests of whole handshakes, and of every frame in every state.

use proptest::prelude::*;

use super::*;
use crate::session::auth::NoAuth;
use crate::session::shared_key::{self, Keyring, SharedKey};
use crate::wire::control::{KeepaliveAck, Wait};
use crate::wire::entity;

fn addr(port: u16) -> EntityAddr {
    EntityAddr::msgr2(Some(([127, 0, 0, 1], port).into()), 5)
}

fn chance(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 1
    }
}

fn client_config(modes: &[u32]) -> ClientConfig {
    ClientConfig {
        entity: entity::FOREBAY,
        peer_entity: Some(entity::FOREBAY),
        addrs: vec![EntityAddr::msgr2(None, 77)],
        target: EntityAddr { nonce: 0, ..addr(1000) },
        gid: 3,
        modes: modes.to_vec(),
        supported: 0xff,
        required: 1,
        lossy: false,
        checksum: true,
    }
}

fn server_config(modes: &[u32]) -> ServerConfig {
    ServerConfig { entity: entity::FOREBAY, peer: addr(2000), modes: modes.to_vec(), checksum: true }
}

fn server_ident() -> ServerIdent {
    ServerIdent { addrs: vec![addr(1000)], gid: 4, global_seq: 1, supported: 0x0f, required: 0, flags: 0, cookie: 99 }
}

struct Pair {
    client: MessengerHandshake,
    server: MessengerHandshake,
    random: Box<dyn FnMut() -> u64>,
    /// Bytes in flight to the client and to the server.
    under_way: [Vec<u8>; 2],
}

fn pair(modes: [&[u32]; 2], with_key: bool, resume: Resume) -> Pair {
    let pools = Rc::new(MessengerPools::new());
    let (client_auth, server_auth): (Box<dyn AuthClient>, Box<dyn AuthServer>) = if with_key {
        let key = SharedKey::new([9; 32]);
        let keyring = Rc::new(Keyring::new().with("a", key.clone()));
        (Box::new(shared_key::SharedKeyClient::new("a", key)), Box::new(shared_key::SharedKeyServer::new("s", keyring)))
    } else {
        (Box::new(NoAuth), Box::new(NoAuth))
    };
    Pair {
        client: MessengerHandshake::client(client_config(modes[0]), client_auth, resume, pools.clone()),
        server: MessengerHandshake::server(server_config(modes[1]), server_auth, pools),
        random: Box::new(chance(42)),
        under_way: [Vec::new(), Vec::new()],
    }
}

type Turn = (usize, Result<HandshakeProgress, SessionViolation>);

impl Pair {
    fn side(&mut self, at: usize) -> &mut MessengerHandshake {
        if at == 0 { &mut self.client } else { &mut self.server }
    }

    fn collect(&mut self) {
        for at in 0..2 {
            let out = self.side(at).output().to_vec();
            self.under_way[1 - at].extend(out);
        }
    }

    /// Delivers up to `len` bytes to one side and processes them.
    fn deliver(&mut self, at: usize, len: usize) -> Option<Turn> {
        self.collect();
        let bytes: Vec<u8> = self.under_way[at].drain(..len.min(self.under_way[at].len())).collect();
        if bytes.is_empty() {
            return None;
        }
        let link = if at == 0 { &mut self.client } else { &mut self.server };
        let mut fed = 0;
        let mut last = HandshakeProgress::NeedInput;
        while fed < bytes.len() {
            fed += link.feed(&bytes[fed..]);
            match link.step(&mut self.random) {
                Ok(HandshakeProgress::NeedInput) => {}
                Ok(progress) => last = progress,
                Err(error) => return Some((at, Err(error))),
            }
        }
        Some((at, Ok(last)))
    }

    /// Exchanges bytes until one side makes progress, or none are in flight.
    fn talk(&mut self, cuts: &[usize]) -> Option<Turn> {
        for (turn, cut) in cuts.iter().cycle().enumerate() {
            self.collect();
            if self.under_way.iter().all(Vec::is_empty) {
                return None;
            }
            match self.deliver(turn % 2, (*cut).max(1)) {
                None | Some((_, Ok(HandshakeProgress::NeedInput))) => {}
                told => return told,
            }
        }
        unreachable!("cuts go round and round")
    }
}

fn asked(turn: Option<Turn>) -> SessionRequest {
    match turn {
        Some((1, Ok(HandshakeProgress::SessionRequest(asked)))) => asked,
        other => panic!("the server is asked, not {other:?}"),
    }
}

fn established(turn: Option<Turn>) -> Established {
    match turn {
        Some((0, Ok(HandshakeProgress::Established(established)))) => *established,
        other => panic!("the client has a session, not {other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_handshake_does_not_depend_on_how_the_stream_is_cut(
        secure in any::<bool>(),
        with_key in any::<bool>(),
        cuts in prop::collection::vec(1usize..300, 1..9),
    ) {
        let mode = if secure && with_key { mode::SECURE } else { mode::CRC };
        let mut pair = pair([&[mode], &[mode::CRC, mode::SECURE]], with_key, Resume { client_cookie: 6, global_seq: 1, ..Resume::default() });
        let SessionRequest::Ident(ident) = asked(pair.talk(&cuts)) else { panic!("a new session") };
        prop_assert_eq!((ident.cookie, ident.global_seq, ident.gid), (6, 1, 3));
        prop_assert_eq!(pair.server.client_name(), if with_key { "a" } else { "" });
        prop_assert_eq!((pair.client.mode(), pair.server.mode()), (mode, mode));
        prop_assert_eq!(pair.server.answer(&SessionReply::Ident(server_ident())), Ok(true));
        let session = established(pair.talk(&cuts));
        prop_assert_eq!((session.outcome, session.reset, session.features), (SessionOrigin::Fresh, None, 0x0f));
        prop_assert_eq!(session.resume, Resume { client_cookie: 6, server_cookie: 99, global_seq: 1, ..Resume::default() });
    }

    #[test]
    fn a_change_on_the_way_never_leads_to_a_session(
        place in any::<prop::sample::Index>(),
        bit in 0u8..8,
        to_server in any::<bool>(),
    ) {
        // A man in the middle may change anything, including checksums; one bit suffices here.
        let mut pair = pair([&[mode::SECURE, mode::CRC], &[mode::CRC, mode::SECURE]], true, Resume { client_cookie: 6, ..Resume::default() });
        let victim = usize::from(to_server);
        let at = place.index(150);
        let mut seen = 0;
        for turn in 0..100 {
            pair.collect();
            let side = turn % 2;
            if side == victim {
                let len = pair.under_way[side].len();
                if (seen..seen + len).contains(&at) {
                    pair.under_way[side][at - seen] ^= 1 << bit;
                }
                seen += len;
            }
            match pair.deliver(side, usize::MAX) {
                Some((_, Err(_))) => return Ok(()),
                Some((_, Ok(progress))) => prop_assert_eq!(progress, HandshakeProgress::NeedInput),
                None if pair.under_way.iter().all(Vec::is_empty) => return Ok(()),
                None => {}
            }
        }
    }
}

fn resume() -> Resume {
    Resume { client_cookie: 6, server_cookie: 99, global_seq: 4, connect_seq: 2, in_seq: 17 }
}

fn reconnecting() -> Pair {
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], true, resume());
    let SessionRequest::Reconnect(reconnect) = asked(pair.talk(&[999])) else { panic!("an old session") };
    assert_eq!((reconnect.client_cookie, reconnect.server_cookie, reconnect.msg_seq), (6, 99, 17));
    pair
}

#[test]
fn a_session_goes_on() {
    let mut pair = reconnecting();
    assert_eq!(pair.server.answer(&SessionReply::ReconnectOk(31)), Ok(true));
    let session = established(pair.talk(&[999]));
    assert_eq!((session.outcome, session.resume), (SessionOrigin::Resumed(31), resume()));
}

#[test]
fn a_session_that_is_gone_begins_anew() {
    let mut pair = reconnecting();
    assert_eq!(pair.server.answer(&SessionReply::Reset), Ok(false));
    let SessionRequest::Ident(ident) = asked(pair.talk(&[999])) else { panic!("a new session") };
    assert!(ident.cookie != 0 && ident.cookie != 6, "a session that is lost keeps no name");
    pair.server.answer(&SessionReply::Ident(server_ident())).expect("sent");
    let session = established(pair.talk(&[999]));
    assert_eq!((session.outcome, session.reset), (SessionOrigin::Fresh, Some(true)));
    assert_eq!((session.resume.in_seq, session.resume.connect_seq), (0, 0));
}

#[test]
fn a_client_that_lacks_features_is_told_which() {
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], true, Resume::default());
    let SessionRequest::Ident(_) = asked(pair.talk(&[999])) else { panic!("a new session") };
    assert_eq!(pair.server.answer(&SessionReply::Missing(1 << 38)), Ok(false));
    assert_eq!(pair.talk(&[999]), Some((0, Err(SessionViolation::FeaturesRequired(1 << 38)))));
}

#[test]
fn stale_numbers_are_raised() {
    let mut pair = reconnecting();
    pair.server.answer(&SessionReply::Retry(7)).expect("sent");
    let SessionRequest::Reconnect(again) = asked(pair.talk(&[999])) else { panic!("again") };
    assert_eq!(again.connect_seq, 8);
    pair.server.answer(&SessionReply::RetryGlobal(20)).expect("sent");
    let SessionRequest::Reconnect(again) = asked(pair.talk(&[999])) else { panic!("again") };
    assert_eq!((again.connect_seq, again.global_seq), (8, 21));
    for _ in 0..RETRIES_MAX {
        pair.server.answer(&SessionReply::Retry(7)).expect("sent");
        match pair.talk(&[999]) {
            Some((1, Ok(HandshakeProgress::SessionRequest(_)))) => {}
            Some((0, Err(SessionViolation::Retries))) => return,
            other => panic!("{other:?}"),
        }
    }
    panic!("it retries without end");
}

#[test]
fn whoever_has_no_key_is_refused_with_a_reason() {
    let pools = Rc::new(MessengerPools::new());
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], true, Resume::default());
    let stranger = Box::new(shared_key::SharedKeyClient::new("a", SharedKey::new([8; 32])));
    pair.client = MessengerHandshake::client(client_config(&[mode::CRC]), stranger, Resume::default(), pools.clone());
    let refused = pair.talk(&[999]);
    assert!(matches!(refused, Some((0, Err(SessionViolation::MethodRefused { result: -13, .. })))), "{refused:?}");
    assert_eq!(pair.server.refused(), Some(&AuthError::Proof("a".into())));

    pair = self::pair([&[mode::CRC], &[mode::SECURE]], true, Resume::default());
    let refused = pair.talk(&[999]);
    let Some((0, Err(differ @ SessionViolation::ModesDiffer { .. }))) = refused else { panic!("{refused:?}") };
    assert_eq!(differ, SessionViolation::ModesDiffer { ours: vec![mode::CRC], theirs: vec![mode::SECURE] });
    let text = "connection modes do not overlap: the peer accepts secure, we offer crc";
    assert_eq!(differ.to_string(), text);

    pair = self::pair([&[mode::CRC], &[mode::CRC]], true, Resume::default());
    pair.client = MessengerHandshake::client(client_config(&[mode::CRC]), Box::new(NoAuth), Resume::default(), pools);
    assert!(matches!(pair.talk(&[999]), Some((0, Err(SessionViolation::MethodRefused { result: -95, .. })))));
}

#[test]
fn guesses_are_counted() {
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], true, Resume::default());
    // Up to the server's wait for a request.
    while pair.server.state != HandshakeState::Auth {
        pair.deliver(0, usize::MAX);
        pair.deliver(1, 1);
    }
    let guess = AuthRequest { method: 1, modes: vec![mode::CRC], payload: vec![] };
    for left in (0..AUTH_REQUESTS_MAX).rev() {
        let mut frame = BufList::new();
        Encoder::new(Rc::new(MessengerPools::new()), true)
            .control(Tag::AuthRequest, &guess.encode(), &mut frame)
            .expect("crc");
        pair.server.feed(&frame.to_vec());
        let result = pair.server.step(&mut || 1);
        assert_eq!(result.is_err(), left == 0);
    }
}

#[test]
fn a_server_somewhere_else_is_not_believed() {
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], false, Resume { client_cookie: 1, ..Resume::default() });
    asked(pair.talk(&[999]));
    pair.server.answer(&SessionReply::Ident(ServerIdent { addrs: vec![addr(1001)], ..server_ident() })).expect("sent");
    assert!(matches!(pair.talk(&[999]), Some((0, Err(SessionViolation::WrongPeer { .. })))));
}

#[test]
fn floods_before_authentication_end_the_connection() {
    let mut pair = pair([&[mode::CRC], &[mode::CRC]], true, Resume::default());
    let mut frame = BufList::new();
    let request = AuthRequest { method: 0, modes: vec![], payload: vec![0; 15_000] };
    Encoder::new(Rc::new(MessengerPools::new()), true)
        .control(Tag::AuthRequest, &request.encode(), &mut frame)
        .expect("crc");
    let hello = Hello { entity: 1, peer: addr(1) };
    let mut hellos = BufList::new();
    Encoder::new(Rc::new(MessengerPools::new()), true).control(Tag::Hello, &hello.encode(), &mut hellos).expect("crc");
    let flood = [Banner::OURS.encode(), hellos.to_vec(), frame.to_vec().repeat(10)].concat();
    let mut fed = 0;
    while fed < flood.len() {
        fed += pair.server.feed(&flood[fed..]);
        if pair.server.step(&mut || 1).is_err() {
            return;
        }
    }
    panic!("it listens without end");
}

/// A well-formed payload for each kind of frame.
fn payload(tag: Tag) -> Vec<u8> {
    match tag {
        Tag::Hello => Hello { entity: entity::FOREBAY, peer: addr(1) }.encode(),
        Tag::AuthRequest => AuthRequest { method: 1, modes: vec![mode::CRC], payload: vec![] }.encode(),
        Tag::AuthBadMethod => AuthBadMethod::default().encode(),
        Tag::AuthReplyMore => AuthReplyMore::default().encode(),
        Tag::AuthRequestMore => AuthRequestMore::default().encode(),
        Tag::AuthDone => AuthDone { mode: mode::CRC, ..AuthDone::default() }.encode(),
        Tag::AuthSignature => AuthSignature::default().encode(),
        Tag::ClientIdent => ClientIdent::default().encode(),
        Tag::ServerIdent => server_ident().encode(),
        Tag::IdentMissingFeatures => IdentMissingFeatures::default().encode(),
        Tag::SessionReconnect => Reconnect::default().encode(),
        Tag::SessionReset => Reset::default().encode(),
        Tag::SessionRetry => Retry::default().encode(),
        Tag::SessionRetryGlobal => RetryGlobal::default().encode(),
        Tag::SessionReconnectOk => ReconnectOk::default().encode(),
        Tag::Wait => Wait::default().encode(),
        Tag::Message => vec![0; 41],
        Tag::Keepalive2 | Tag::Keepalive2Ack => KeepaliveAck::default().encode(),
        Tag::Ack => 7u64.to_le_bytes().to_vec(),
    }
}

/// Delivers every frame in every state of both sides: a disallowed frame ends the connection as unexpected, an allowed
/// one does not.
#[test]
fn every_frame_in_every_state() {
    use Tag::*;
    let states: [(bool, Resume, HandshakeState, &[Tag]); 10] = [
        (true, Resume::default(), HandshakeState::Hello, &[Hello]),
        (true, Resume::default(), HandshakeState::Auth, &[AuthBadMethod, AuthReplyMore, AuthDone]),
        (true, Resume::default(), HandshakeState::Signature, &[AuthSignature]),
        (true, Resume::default(), HandshakeState::Ident, &[ServerIdent, IdentMissingFeatures, Wait]),
        (
            true,
            resume(),
            HandshakeState::Reconnect,
            &[SessionReset, SessionRetry, SessionRetryGlobal, SessionReconnectOk, Wait],
        ),
        (false, Resume::default(), HandshakeState::Hello, &[Hello]),
        (false, Resume::default(), HandshakeState::Auth, &[AuthRequest]),
        (false, Resume::default(), HandshakeState::Signature, &[AuthSignature]),
        (false, Resume::default(), HandshakeState::Ident, &[ClientIdent, SessionReconnect]),
        (false, Resume::default(), HandshakeState::Deciding, &[]),
    ];
    for (client, resume, state, allowed) in states {
        for tag in Tag::ALL {
            let mut pair = pair([&[mode::CRC], &[mode::CRC]], false, resume);
            let at = usize::from(!client);
            // Byte by byte, so that the state is not passed over.
            let mut steps = 0;
            while pair.side(at).state != state {
                let side = if pair.under_way[at].is_empty() { 1 - at } else { at };
                pair.deliver(side, 1);
                pair.collect();
                steps += 1;
                assert!(steps < 5000, "{state:?} of client {client} is not reached");
            }
            // The bytes in flight are replaced by this frame.  In crc mode any encoder will do.
            let mut frame = BufList::new();
            Encoder::new(Rc::new(MessengerPools::new()), true)
                .control(tag, &payload(tag), &mut frame)
                .expect("crc mode");
            let link = pair.side(at);
            assert!(link.decoder.is_between_frames(), "{state:?}");
            link.feed(&frame.to_vec());
            let result = link.step(&mut || 3);
            let unexpected = matches!(result, Err(SessionViolation::Unexpected { tag: told, .. }) if told == tag);
            assert_eq!(unexpected, !allowed.contains(&tag), "{tag:?} in {state:?} of client {client}: {result:?}");
        }
    }
}
