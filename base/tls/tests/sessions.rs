//! Two sides in memory.

use std::sync::Arc;

use forebay_tls::{Acceptor, Failure, Hash, Keys, Psk, Read, Session, Suite, sealed_len};

fn psk(identity: &str, byte: u8, hash: Hash) -> Psk {
    let len = if hash == Hash::Sha256 { 32 } else { 48 };
    Psk { identity: identity.into(), secret: vec![byte; len].into(), hash }
}

struct Ring(Vec<Psk>);

impl Keys for Ring {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        self.0.iter().filter(|psk| psk.identity == identity).cloned().collect()
    }
}

fn server() -> Session {
    let ring = Ring(vec![psk("one", 1, Hash::Sha256), psk("two", 2, Hash::Sha384)]);
    Session::accept(&Acceptor::new(Arc::new(ring)).expect("an acceptor")).expect("a session")
}

/// Moves bytes until both are done or one has failed, in pieces of so many bytes.
fn shake(client: &mut Session, server: &mut Session, piece: usize) -> Result<(), Failure> {
    let (mut up, mut down) = (Vec::new(), Vec::new());
    let (mut client_done, mut server_done) = (client.handshake(&mut &[][..], &mut up)?, false);
    while !client_done || !server_done {
        assert!(!up.is_empty() || !down.is_empty(), "nobody says anything");
        let bytes = std::mem::take(&mut up);
        for part in bytes.chunks(piece) {
            assert!(!server_done, "more than a handshake");
            let mut input = part;
            server_done = server.handshake(&mut input, &mut down)?;
            assert!(input.is_empty());
        }
        let bytes = std::mem::take(&mut down);
        for part in bytes.chunks(piece) {
            let mut input = part;
            client_done = client.handshake(&mut input, &mut up)?;
            assert!(input.is_empty());
        }
    }
    Ok(())
}

fn pass(from: &mut Session, to: &mut Session, plain: &[u8], piece: usize) {
    let mut sealed = vec![0; sealed_len(plain.len())];
    let len = from.write(plain, &mut sealed).expect("written");
    assert!(len > plain.len());
    let mut got = Vec::new();
    for part in sealed[..len].chunks(piece) {
        let mut input = part;
        let mut out = [0; 1000];
        loop {
            match to.read(&mut input, &mut out).expect("read") {
                Read::Data(len) => got.extend_from_slice(&out[..len]),
                Read::Hungry => break,
                Read::Closed => panic!("closed"),
            }
        }
        assert!(input.is_empty());
    }
    assert!(got == plain);
}

#[test]
fn data_passes_both_ways_with_both_suites() {
    for (key, suite) in
        [(psk("one", 1, Hash::Sha256), Suite::Aes128Gcm), (psk("two", 2, Hash::Sha384), Suite::Aes256Gcm)]
    {
        for piece in [1, 7, 100_000] {
            let (mut client, mut server) = (Session::connect(std::slice::from_ref(&key)).expect("a session"), server());
            shake(&mut client, &mut server, piece).expect("a handshake");
            for side in [&client, &server] {
                assert_eq!((side.suite(), side.identity()), (Some(suite), key.identity.clone()));
            }
            for len in [1, 100, 16_384, 16_385, 100_000] {
                let plain: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
                pass(&mut client, &mut server, &plain, piece);
                pass(&mut server, &mut client, &plain, piece);
            }
            for _ in 0..3 {
                client.update_keys().expect("new keys");
                pass(&mut client, &mut server, b"after new keys", piece);
                server.update_keys().expect("new keys");
                pass(&mut server, &mut client, b"after new keys", piece);
                client.rest();
                server.rest();
            }
            let closing = client.close();
            assert_eq!(server.read(&mut &closing[..], &mut [0; 10]), Ok(Read::Closed));
            pass(&mut server, &mut client, b"the other half is open", piece);
        }
    }
}

#[test]
fn of_several_keys_the_known_one_is_used() {
    let keys = [psk("other", 9, Hash::Sha384), psk("two", 2, Hash::Sha384), psk("one", 1, Hash::Sha256)];
    let (mut client, mut server) = (Session::connect(&keys).expect("a session"), server());
    shake(&mut client, &mut server, 1000).expect("a handshake");
    assert_eq!(server.identity(), b"two");
}

#[test]
fn of_several_keys_with_one_identity_the_peers_is_used() {
    let ring = Ring((1..=3).map(|byte| psk("same", byte, Hash::Sha256)).collect());
    let acceptor = Acceptor::new(Arc::new(ring)).expect("an acceptor");
    for (byte, known) in [(1, true), (2, true), (3, true), (4, false)] {
        for piece in [1, 100, 10_000] {
            let mut client = Session::connect(&[psk("same", byte, Hash::Sha256)]).expect("a session");
            let mut server = Session::accept(&acceptor).expect("a session");
            if known {
                shake(&mut client, &mut server, piece).expect("a handshake");
                pass(&mut client, &mut server, b"up", piece);
                pass(&mut server, &mut client, b"down", piece);
            } else {
                assert_eq!(shake(&mut client, &mut server, piece), Err(Failure::WrongKey));
            }
        }
    }
}

/// What a server says to the first bytes of a client, and the alert that it sends.
fn refused(bytes: &[u8]) -> (Failure, Option<u8>) {
    let mut output = Vec::new();
    let failure = server().handshake(&mut &bytes[..], &mut output).expect_err("refused");
    let alert = (!output.is_empty()).then(|| {
        assert_eq!(output[..6], [21, 3, 3, 0, 2, 2]);
        output[6]
    });
    (failure, alert)
}

fn hello(key: &Psk) -> Vec<u8> {
    let mut out = Vec::new();
    let mut client = Session::connect(std::slice::from_ref(key)).expect("a session");
    assert_eq!(client.handshake(&mut &[][..], &mut out), Ok(false));
    out
}

#[test]
fn who_is_refused_is_told_why() {
    let unknown = Failure::UnknownIdentity("else".into());
    assert_eq!(refused(&hello(&psk("else", 1, Hash::Sha256))), (unknown, Some(115)));
    assert_eq!(refused(&hello(&psk("one", 2, Hash::Sha256))), (Failure::WrongKey, Some(51)));
    // The right key for another hash.
    assert_eq!(refused(&hello(&psk("one", 1, Hash::Sha384))), (Failure::WrongKey, Some(51)));
    // A connection without TLS, and whatever else.
    assert_eq!(refused(&[0, 0, 128, 0, 128, 0, 0, 0]), (Failure::Plain, Some(10)));
    assert_eq!(refused(b"GET / HTTP/1.1\r\n\r\n"), (Failure::Plain, Some(10)));
    let (failure, alert) = refused(&[22, 3, 1, 0, 4, 9, 9, 9, 9]);
    assert!(matches!(failure, Failure::Protocol(_)) && alert.is_some(), "{failure}");
    // A client without a key is not let in.
    let mut plain = Session::connect(&[]).expect("a session");
    let mut out = Vec::new();
    assert_eq!(plain.handshake(&mut &[][..], &mut out), Ok(false));
    assert_eq!(refused(&out), (Failure::NoKey, Some(40)));
}

#[test]
fn a_client_notices_a_server_without_its_key() {
    struct Liar;
    impl Keys for Liar {
        fn find(&self, identity: &[u8]) -> Vec<Psk> {
            vec![Psk { identity: identity.into(), secret: vec![7; 32].into(), hash: Hash::Sha256 }]
        }
    }
    let mut server = Session::accept(&Acceptor::new(Arc::new(Liar)).expect("an acceptor")).expect("a session");
    let mut client = Session::connect(&[psk("one", 1, Hash::Sha256)]).expect("a session");
    assert_eq!(shake(&mut client, &mut server, 1000), Err(Failure::WrongKey));
}

#[test]
fn no_handshake_is_longer_than_it_may_be() {
    // Records of a handshake message that claims to be long.
    let mut session = server();
    let mut record = vec![22, 3, 1, 0x10, 0];
    record.extend_from_slice(&[1, 0, 0xF0, 0]);
    record.resize(5 + 0x1000, 0);
    let mut output = Vec::new();
    let mut taken = 0;
    let failure = loop {
        match session.handshake(&mut &record[..], &mut output) {
            Ok(done) => assert!(!done),
            Err(failure) => break failure,
        }
        taken += record.len();
        assert!(taken < 100_000, "it takes whatever comes");
        record[5..9].fill(0);
    };
    assert_eq!(failure, Failure::TooLong);
}

#[test]
fn a_changed_byte_ends_the_session() {
    let key = psk("one", 1, Hash::Sha256);
    for at in [5, 20, 60] {
        let (mut client, mut server) = (Session::connect(std::slice::from_ref(&key)).expect("a session"), server());
        shake(&mut client, &mut server, 1000).expect("a handshake");
        let mut sealed = vec![0; sealed_len(50)];
        let len = client.write(&[3; 50], &mut sealed).expect("written");
        sealed[at] ^= 1;
        assert!(server.read(&mut &sealed[..len], &mut [0; 100]).is_err(), "byte {at}");
        assert!(server.read(&mut &[][..], &mut [0; 100]).is_err(), "and it stays ended");
    }
}

#[test]
fn whatever_a_handshake_is_changed_into_it_ends() {
    let key = psk("one", 1, Hash::Sha256);
    let hello = hello(&key);
    for at in 0..hello.len() {
        for mask in [1, 0x80, 0xFF] {
            let mut changed = hello.clone();
            changed[at] ^= mask;
            let mut output = Vec::new();
            // The record's version is not looked at, and a longer record waits for its rest.
            match server().handshake(&mut &changed[..], &mut output) {
                Ok(done) => assert!(!done && (at < 9 || output.is_empty()), "byte {at}"),
                Err(failure) => assert_ne!(failure, Failure::Alert),
            }
        }
        assert_eq!(server().handshake(&mut &hello[..at], &mut Vec::new()), Ok(false));
    }
}
