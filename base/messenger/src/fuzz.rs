//! Entry points of fuzzers and property tests: feed untrusted bytes to every decoder.
//!
//! No input may cause a panic, and no result may depend on how the stream is cut.

use std::rc::Rc;

use crate::session::auth::{AuthClient, AuthServer, NoAuth};
use crate::session::cephx;
use crate::session::handshake::{
    ClientConfig, HandshakeProgress, MessengerHandshake, Resume, ServerConfig, SessionReply, SessionRequest,
};
use crate::session::shared_key::{self, Keyring, SharedKey};
use crate::window::{WINDOW_DESCRIPTOR_LEN, WindowDescriptor};
use crate::wire::control::{
    Ack, AuthBadMethod, AuthDone, AuthReplyMore, AuthRequest, AuthSignature, ClientIdent, ControlPayload, Hello,
    Keepalive, Reconnect, Reset, Retry, ServerIdent, mode,
};
use crate::wire::{
    Banner, Direction, EntityAddr, Frame, FrameDecoder, MessageHeader, MessengerPools, ParseProgress, SegmentLimits,
    WireError, entity,
};

/// Decodes a banner: a bad beginning must be rejected at its first wrong byte.
pub fn banner(data: &[u8]) {
    let whole = Banner::decode(data);
    for len in 0..data.len().min(300) {
        match Banner::decode(&data[..len]) {
            Ok(None) => {}
            early => assert_eq!(early.is_err(), whole.is_err(), "{len} bytes decide"),
        }
    }
    if let Ok(Some((banner, len))) = whole {
        assert!(len <= data.len());
        assert_eq!(Banner::decode(&banner.encode()), Ok(Some((banner, 26))));
    }
}

/// Result of a stream: its frames, and the error that ended it.
type Stream = (Vec<(u8, Vec<u8>, [Vec<u8>; 3])>, Option<WireError>);

fn read_all(secure: bool, mut data: &[u8], cuts: &[u8]) -> Stream {
    let limits = SegmentLimits { control_max: 4096, front_max: 50_000, middle_max: 50_000, data_max: 200_000 };
    let mut decoder = FrameDecoder::new(Rc::new(MessengerPools::new()), limits, true);
    if secure {
        decoder.secure(Direction::pair(&[7; 40], true).expect("long enough").0);
    }
    let mut frames = Vec::new();
    for cut in cuts.iter().cycle() {
        loop {
            match decoder.next(|_| true, |_| {}) {
                Ok(ParseProgress::Frame(frame)) => frames.push(plain(&frame)),
                Ok(ParseProgress::NeedInput) => break,
                Ok(ParseProgress::NotAdmitted) => unreachable!("everything is admitted"),
                Err(error) => return (frames, Some(error)),
            }
        }
        if data.is_empty() {
            break;
        }
        let fed = decoder.feed(&data[..data.len().min(usize::from(*cut) * 40 + 1)]);
        assert!(fed > 0, "a hungry decoder takes something");
        data = &data[fed..];
    }
    (frames, None)
}

fn plain(frame: &Frame) -> (u8, Vec<u8>, [Vec<u8>; 3]) {
    let segments = frame.segments.each_ref().map(|part| part.as_ref().map_or_else(Vec::new, |part| part.to_vec()));
    let first = frame.header().map_or_else(|_| frame.payload().to_vec(), |header| header.encode().to_vec());
    (frame.tag as u8, first, segments)
}

/// Decodes frames in crc or secure mode, in pieces and all at once.  The first byte selects the mode, the second the
/// number of bytes with cut lengths that follow.
pub fn frames(data: &[u8]) {
    let [mode, count, rest @ ..] = data else { return };
    let count = usize::from(count % 16).min(rest.len());
    let (cuts, stream) = rest.split_at(count);
    let cuts = if cuts.is_empty() { &[255] } else { cuts };
    let pieces = read_all(mode & 1 == 1, stream, cuts);
    assert_eq!(pieces, read_all(mode & 1 == 1, stream, &[255]), "cut at {cuts:?}");
    for (_, first, _) in pieces.0 {
        let _ = MessageHeader::decode(&first);
    }
}

fn round_trip<C: ControlPayload + PartialEq + std::fmt::Debug>(data: &[u8]) {
    if let Ok(payload) = C::decode(data) {
        assert_eq!(C::decode(&payload.encode()).as_ref(), Ok(&payload));
    }
}

/// Decodes the payloads of all control frames: a decoded payload must survive another round trip.
pub fn ident(data: &[u8]) {
    let [kind, data @ ..] = data else { return };
    match kind % 13 {
        0 => round_trip::<Hello>(data),
        1 => round_trip::<AuthRequest>(data),
        2 => round_trip::<AuthBadMethod>(data),
        3 => round_trip::<AuthReplyMore>(data),
        4 => round_trip::<AuthDone>(data),
        5 => round_trip::<AuthSignature>(data),
        6 => round_trip::<ClientIdent>(data),
        7 => round_trip::<ServerIdent>(data),
        8 => round_trip::<Reconnect>(data),
        9 => round_trip::<Reset>(data),
        10 => round_trip::<Retry>(data),
        11 => round_trip::<Ack>(data),
        _ => round_trip::<Keepalive>(data),
    }
}

/// Decodes a window descriptor, and checks a range in it: a decoded descriptor must survive a round trip, and an
/// accepted range must lie within the window.
pub fn place(data: &[u8]) {
    let Some((range, place)) = data.split_first_chunk::<16>() else { return };
    let Ok(found) = WindowDescriptor::decode(place) else {
        assert_ne!(place.len(), WINDOW_DESCRIPTOR_LEN, "whatever is as long is a place");
        return;
    };
    assert_eq!(found.encode(), place, "it comes out as it went in");
    let [offset, len] = [0, 8].map(|at| u64::from_le_bytes(range[at..at + 8].try_into().expect("8 bytes")));
    let fits = u128::from(offset) + u128::from(len) <= u128::from(found.len());
    assert_eq!(found.check(offset, len).is_ok(), fits);
}

fn key() -> SharedKey {
    SharedKey::new([3; 32])
}

/// Runs handshakes with a peer that sends `data`: as a client and as a server, with each method; and the methods alone.
/// The first byte selects.
pub fn auth(data: &[u8]) {
    let [kind, data @ ..] = data else { return };
    let mut count = 0u64;
    let mut random = || {
        count += 1;
        count
    };
    let secret = || cephx::CephxSecret::from_base64("AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw==").expect("a key");
    match kind % 6 {
        // Payloads of one method.
        0 => {
            let mut client = cephx::CephxClient::new("a", secret(), 0xff, cephx::TicketStore::new());
            let more = data.get(..9).unwrap_or_default();
            let _ = client.more(more, &mut random);
            let _ = client.done(mode::SECURE, data.get(9..).unwrap_or_default());
        }
        1 => {
            let mut client = shared_key::SharedKeyClient::new("a", key());
            client.begin(&[mode::SECURE], &mut random);
            let (first, second) = data.split_at(data.len() / 2);
            if client.more(first, &mut random).is_ok() {
                assert!(client.done(mode::SECURE, second).is_err(), "a proof cannot be guessed");
            }
        }
        2 => {
            let mut server = shared_key::SharedKeyServer::new("s", Rc::new(Keyring::new().with("a", key())));
            let (first, second) = data.split_at(data.len() / 2);
            let request = AuthRequest { method: server.methods()[0], modes: vec![], payload: first.to_vec() };
            if server.begin(&request, mode::CRC, &mut random).is_ok() {
                assert!(server.more(second).is_err(), "a proof cannot be guessed");
            }
        }
        // Complete streams.
        3 => drop(drive(client(Box::new(cephx::CephxClient::new("a", secret(), 0, cephx::TicketStore::new()))), data)),
        4 => drop(drive(client(Box::new(NoAuth)), data)),
        _ => drop(drive(server(Box::new(NoAuth)), data)),
    }
}

fn client(auth: Box<dyn AuthClient>) -> MessengerHandshake {
    let config = ClientConfig {
        entity: entity::CLIENT,
        peer_entity: None,
        addrs: vec![EntityAddr::msgr2(None, 1)],
        target: EntityAddr::msgr2(None, 0),
        gid: 0,
        modes: vec![mode::CRC, mode::SECURE],
        supported: u64::MAX,
        required: 0,
        lossy: false,
        checksum: true,
    };
    let resume = Resume { client_cookie: 1, server_cookie: 2, global_seq: 3, connect_seq: 4, in_seq: 5 };
    MessengerHandshake::client(config, auth, resume, Rc::new(MessengerPools::new()))
}

fn server(auth: Box<dyn AuthServer>) -> MessengerHandshake {
    let peer = EntityAddr::msgr2(None, 0);
    let config = ServerConfig { entity: entity::FOREBAY, peer, modes: vec![mode::CRC], checksum: true };
    MessengerHandshake::server(config, auth, Rc::new(MessengerPools::new()))
}

/// Feeds all bytes to one side, with the answers that it requires; returns true if a session was established.
fn drive(mut handshake: MessengerHandshake, mut data: &[u8]) -> bool {
    let mut count = 0u64;
    let mut random = || {
        count += 1;
        count
    };
    loop {
        let _ = handshake.output();
        match handshake.step(&mut random) {
            Err(_) => return false,
            Ok(HandshakeProgress::Established(_)) => return true,
            Ok(HandshakeProgress::SessionRequest(asked)) => {
                let answer = match asked {
                    SessionRequest::Ident(ident) if ident.cookie % 2 == 1 => SessionReply::Missing(1),
                    SessionRequest::Ident(_) => SessionReply::Ident(ServerIdent::default()),
                    SessionRequest::Reconnect(reconnect) => match reconnect.connect_seq % 4 {
                        0 => SessionReply::Reset,
                        1 => SessionReply::Retry(9),
                        2 => SessionReply::RetryGlobal(9),
                        _ => SessionReply::ReconnectOk(9),
                    },
                };
                if handshake.answer(&answer).expect("crc mode") {
                    return true;
                }
            }
            Ok(HandshakeProgress::NeedInput) => {
                if data.is_empty() {
                    return false;
                }
                let fed = handshake.feed(data);
                data = &data[fed..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn noise_is_survived(noise in prop::collection::vec(any::<u8>(), 0..1500)) {
            banner(&noise);
            frames(&noise);
            ident(&noise);
            place(&noise);
            auth(&noise);
            let begun = [&b"ceph v2\n"[..], &noise].concat();
            banner(&begun);
        }
    }

    /// Checks that the fuzzers' seeds get past the banner.
    #[test]
    fn seeds_reach_what_they_are_for() {
        for entry in
            std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/msgr2_auth")).expect("seeds")
        {
            let path = entry.expect("a file").path();
            let data = std::fs::read(&path).expect("a seed");
            auth(&data);
            if path.ends_with("server-session") {
                assert!(drive(server(Box::new(NoAuth)), &data[1..]));
            }
        }
    }

    /// Rewrites the seeds: `FOREBAY_WRITE_SEEDS=1 cargo test -p forebay-messenger seeds`.
    #[test]
    fn seeds_are_what_we_write() {
        use crate::wire::{Encoder, Tag};
        use forebay_reactor::{Buf, BufList};
        let mut encoder = Encoder::new(Rc::new(MessengerPools::new()), true);
        let mut message = BufList::new();
        let list = |len: usize| BufList::from(Buf::copy_of(&vec![5; len]));
        let header = MessageHeader { seq: 1, tid: 2, kind: 3, ..MessageHeader::default() };
        encoder.message(&header, [&list(30), &BufList::new(), &list(700)], &mut message).expect("crc mode");
        encoder.control(Tag::Ack, &Ack { seq: 9 }.encode(), &mut message).expect("crc mode");
        let mut sealed = BufList::new();
        encoder.secure(Direction::pair(&[7; 40], false).expect("long enough").1);
        encoder.message(&header, [&list(30), &BufList::new(), &list(700)], &mut sealed).expect("nonces are left");
        encoder.control(Tag::Ack, &Ack { seq: 9 }.encode(), &mut sealed).expect("nonces are left");
        // A client's side of a handshake without authentication.
        let addr = EntityAddr::msgr2(None, 7);
        let mut session = BufList::new();
        let mut encoder = Encoder::new(Rc::new(MessengerPools::new()), true);
        let request = AuthRequest { method: 1, modes: vec![mode::CRC], payload: vec![] };
        let ident = ClientIdent { addrs: vec![addr], target: addr, cookie: 8, ..ClientIdent::default() };
        encoder.control(Tag::Hello, &Hello { entity: 8, peer: addr }.encode(), &mut session).expect("crc mode");
        encoder.control(Tag::AuthRequest, &request.encode(), &mut session).expect("crc mode");
        encoder.control(Tag::AuthSignature, &AuthSignature::default().encode(), &mut session).expect("crc mode");
        encoder.control(Tag::ClientIdent, &ident.encode(), &mut session).expect("crc mode");
        let session = [&[5][..], &Banner::OURS.encode(), &session.to_vec()].concat();
        let place = [&[4, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0][..], &[7; 28]].concat();
        let seeds: [(&str, Vec<u8>); 7] = [
            ("msgr2_banner/ours", Banner::OURS.encode()),
            ("msgr2_frames/crc", [&[0, 2, 9, 200][..], &message.to_vec()].concat()),
            ("msgr2_frames/secure", [&[1, 1, 255][..], &sealed.to_vec()].concat()),
            ("msgr2_ident/client", [&[6][..], &ident.encode()].concat()),
            ("msgr2_ident/request", [&[1][..], &request.encode()].concat()),
            ("msgr2_auth/server-session", session),
            ("msgr2_place/in-a-window", place),
        ];
        for (name, bytes) in seeds {
            let path = format!("{}/../../fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("FOREBAY_WRITE_SEEDS").is_some() {
                std::fs::create_dir_all(std::path::Path::new(&path).parent().expect("a folder")).expect("a folder");
                std::fs::write(&path, &bytes).expect("written");
            }
            assert_eq!(std::fs::read(&path).expect("the seed is there"), bytes, "{name}");
        }
    }
}
