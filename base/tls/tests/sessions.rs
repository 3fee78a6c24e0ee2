//! Tests of two sessions in memory.

use std::sync::Arc;

use forebay_tls::{
    Acceptor, Certificate, PeerIdentity, Psk, PskHash, PskLookup, Read, ServerCertificate, Suite, TlsFailure,
    TlsSession, sealed_len,
};

fn psk(identity: &str, byte: u8, hash: PskHash) -> Psk {
    let len = if hash == PskHash::Sha256 { 32 } else { 48 };
    Psk { identity: identity.into(), secret: vec![byte; len].into(), hash }
}

struct Ring(Vec<Psk>);

impl PskLookup for Ring {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        self.0.iter().filter(|psk| psk.identity == identity).cloned().collect()
    }
}

fn server() -> TlsSession {
    let ring = Ring(vec![psk("one", 1, PskHash::Sha256), psk("two", 2, PskHash::Sha384)]);
    TlsSession::accept(&Acceptor::new(Arc::new(ring)).expect("an acceptor")).expect("a session")
}

/// Moves bytes until both sides have completed the handshake or one has failed, in pieces of `piece` bytes.
fn shake(client: &mut TlsSession, server: &mut TlsSession, piece: usize) -> Result<(), TlsFailure> {
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

fn pass(from: &mut TlsSession, to: &mut TlsSession, plain: &[u8], piece: usize) {
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
                Read::NeedInput => break,
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
        [(psk("one", 1, PskHash::Sha256), Suite::Aes128Gcm), (psk("two", 2, PskHash::Sha384), Suite::Aes256Gcm)]
    {
        for piece in [1, 7, 100_000] {
            let (mut client, mut server) =
                (TlsSession::connect(std::slice::from_ref(&key)).expect("a session"), server());
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
    let keys = [psk("other", 9, PskHash::Sha384), psk("two", 2, PskHash::Sha384), psk("one", 1, PskHash::Sha256)];
    let (mut client, mut server) = (TlsSession::connect(&keys).expect("a session"), server());
    shake(&mut client, &mut server, 1000).expect("a handshake");
    assert_eq!(server.identity(), b"two");
}

#[test]
fn of_several_keys_with_one_identity_the_peers_is_used() {
    let ring = Ring((1..=3).map(|byte| psk("same", byte, PskHash::Sha256)).collect());
    let acceptor = Acceptor::new(Arc::new(ring)).expect("an acceptor");
    for (byte, known) in [(1, true), (2, true), (3, true), (4, false)] {
        for piece in [1, 100, 10_000] {
            let mut client = TlsSession::connect(&[psk("same", byte, PskHash::Sha256)]).expect("a session");
            let mut server = TlsSession::accept(&acceptor).expect("a session");
            if known {
                shake(&mut client, &mut server, piece).expect("a handshake");
                pass(&mut client, &mut server, b"up", piece);
                pass(&mut server, &mut client, b"down", piece);
            } else {
                assert_eq!(shake(&mut client, &mut server, piece), Err(TlsFailure::WrongKey));
            }
        }
    }
}

/// Returns a server's failure on the first bytes of a client, and the alert that it sends.
fn refused(bytes: &[u8]) -> (TlsFailure, Option<u8>) {
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
    let mut client = TlsSession::connect(std::slice::from_ref(key)).expect("a session");
    assert_eq!(client.handshake(&mut &[][..], &mut out), Ok(false));
    out
}

#[test]
fn who_is_refused_is_told_why() {
    let unknown = TlsFailure::UnknownIdentity("else".into());
    assert_eq!(refused(&hello(&psk("else", 1, PskHash::Sha256))), (unknown, Some(115)));
    assert_eq!(refused(&hello(&psk("one", 2, PskHash::Sha256))), (TlsFailure::WrongKey, Some(51)));
    // Correct secret with another hash.
    assert_eq!(refused(&hello(&psk("one", 1, PskHash::Sha384))), (TlsFailure::WrongKey, Some(51)));
    // Connection without TLS, and other garbage.
    assert_eq!(refused(&[0, 0, 128, 0, 128, 0, 0, 0]), (TlsFailure::Plain, Some(10)));
    assert_eq!(refused(b"GET / HTTP/1.1\r\n\r\n"), (TlsFailure::Plain, Some(10)));
    let (failure, alert) = refused(&[22, 3, 1, 0, 4, 9, 9, 9, 9]);
    assert!(matches!(failure, TlsFailure::Protocol(_)) && alert.is_some(), "{failure}");
    // Client without a key is refused.
    let mut plain = TlsSession::connect(&[]).expect("a session");
    let mut out = Vec::new();
    assert_eq!(plain.handshake(&mut &[][..], &mut out), Ok(false));
    assert_eq!(refused(&out), (TlsFailure::NoKey, Some(40)));
}

#[test]
fn a_client_notices_a_server_without_its_key() {
    struct Liar;
    impl PskLookup for Liar {
        fn find(&self, identity: &[u8]) -> Vec<Psk> {
            vec![Psk { identity: identity.into(), secret: vec![7; 32].into(), hash: PskHash::Sha256 }]
        }
    }
    let mut server = TlsSession::accept(&Acceptor::new(Arc::new(Liar)).expect("an acceptor")).expect("a session");
    let mut client = TlsSession::connect(&[psk("one", 1, PskHash::Sha256)]).expect("a session");
    assert_eq!(shake(&mut client, &mut server, 1000), Err(TlsFailure::WrongKey));
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
    assert_eq!(failure, TlsFailure::TooLong);
}

#[test]
fn a_changed_byte_ends_the_session() {
    let key = psk("one", 1, PskHash::Sha256);
    for at in [5, 20, 60] {
        let (mut client, mut server) = (TlsSession::connect(std::slice::from_ref(&key)).expect("a session"), server());
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
    let key = psk("one", 1, PskHash::Sha256);
    let hello = hello(&key);
    for at in 0..hello.len() {
        for mask in [1, 0x80, 0xFF] {
            let mut changed = hello.clone();
            changed[at] ^= mask;
            let mut output = Vec::new();
            // The record's version is not checked, and a longer record waits for its rest.
            match server().handshake(&mut &changed[..], &mut output) {
                Ok(done) => assert!(!done && (at < 9 || output.is_empty()), "byte {at}"),
                Err(failure) => assert_ne!(failure, TlsFailure::Alert),
            }
        }
        assert_eq!(server().handshake(&mut &hello[..at], &mut Vec::new()), Ok(false));
    }
}

macro_rules! pem {
    ($name:literal) => {
        include_bytes!(concat!("certs/", $name, ".pem"))
    };
}

const AUTHORITY: &[u8] = pem!("ca-cert");

fn certificate(chain: &[u8], key: &[u8]) -> Certificate {
    Certificate { chain: chain.to_vec(), key: key.to_vec().into() }
}

/// Creates a server session that shows a certificate and knows the key "one"; with `asks` it requires a client
/// certificate.
fn certified(asks: bool) -> TlsSession {
    let shown = ServerCertificate {
        certificate: certificate(pem!("server-cert"), pem!("server-key")),
        client_authorities: asks.then(|| AUTHORITY.to_vec()),
    };
    let ring = Ring(vec![psk("one", 1, PskHash::Sha256)]);
    TlsSession::accept(&Acceptor::with_certificate(Some(Arc::new(ring)), Some(&shown)).expect("an acceptor"))
        .expect("a session")
}

fn known() -> Certificate {
    certificate(pem!("client-cert"), pem!("client-key"))
}

#[test]
fn certificates_say_who_is_who() {
    for piece in [1, 100, 100_000] {
        for (asks, own) in [(false, None), (false, Some(known())), (true, Some(known()))] {
            let mut server = certified(asks);
            let mut client = TlsSession::connect_to("storage", AUTHORITY, own.as_ref()).expect("a session");
            assert_eq!(server.peer(), None);
            shake(&mut client, &mut server, piece).expect("a handshake");
            match (asks, server.peer()) {
                (false, Some(PeerIdentity::Anonymous)) => {}
                (true, Some(PeerIdentity::Certificate(subject))) => {
                    assert_eq!(subject.distinguished_name, "CN=host one,OU=a\\+b,O=Forebay\\, tests,C=DE");
                    assert_eq!(subject.common_name.as_deref(), Some("host one"));
                }
                (_, other) => panic!("{other:?}"),
            }
            assert!(server.suite().is_some() && server.identity().is_empty());
            let plain = vec![7; 50_000];
            pass(&mut client, &mut server, &plain, piece);
            pass(&mut server, &mut client, &plain, piece);
        }
    }
}

#[test]
fn keys_are_taken_beside_certificates_and_do_not_fall_back_to_them() {
    for asks in [false, true] {
        let mut server = certified(asks);
        let mut client = TlsSession::connect(&[psk("one", 1, PskHash::Sha256)]).expect("a session");
        shake(&mut client, &mut server, 1000).expect("a handshake");
        assert_eq!(server.peer(), Some(PeerIdentity::Key(b"one".to_vec())));
        pass(&mut client, &mut server, b"up", 1000);
        for (key, failure) in [
            (psk("else", 1, PskHash::Sha256), TlsFailure::UnknownIdentity("else".into())),
            (psk("one", 2, PskHash::Sha256), TlsFailure::WrongKey),
        ] {
            let mut client = TlsSession::connect(&[key]).expect("a session");
            assert_eq!(shake(&mut client, &mut certified(asks), 1000), Err(failure));
        }
    }
}

#[test]
fn certificates_that_do_not_fit_are_refused() {
    // Certificate of another authority, and none at all.
    let stranger = certificate(pem!("stranger-cert"), pem!("stranger-key"));
    let mut client = TlsSession::connect_to("storage", AUTHORITY, Some(&stranger)).expect("a session");
    let failure = shake(&mut client, &mut certified(true), 1000).expect_err("not signed by the authority");
    assert_eq!(failure, TlsFailure::Protocol("Certificate is untrusted"));
    let mut client = TlsSession::connect_to("storage", AUTHORITY, None).expect("a session");
    assert_eq!(shake(&mut client, &mut certified(true), 1000), Err(TlsFailure::NoCertificate));
    // Verification by the client.
    for (name, authority) in [("storage", &pem!("other-ca-cert")[..]), ("elsewhere", AUTHORITY)] {
        let mut client = TlsSession::connect_to(name, authority, None).expect("a session");
        assert!(matches!(shake(&mut client, &mut certified(false), 1000), Err(TlsFailure::Protocol(_))), "{name}");
    }
    // Certificate with the key of another, and data that is no certificate.
    for (chain, key) in [(&pem!("server-cert")[..], &pem!("client-key")[..]), (b"x", pem!("server-key"))] {
        let shown = ServerCertificate { certificate: certificate(chain, key), client_authorities: None };
        assert!(Acceptor::with_certificate(None, Some(&shown)).is_err());
    }
}

#[test]
fn a_server_without_keys_refuses_those_who_offer_one() {
    let shown = ServerCertificate {
        certificate: certificate(pem!("server-cert"), pem!("server-key")),
        client_authorities: None,
    };
    let acceptor = Acceptor::with_certificate(None, Some(&shown)).expect("an acceptor");
    let mut client = TlsSession::connect(&[psk("one", 1, PskHash::Sha256)]).expect("a session");
    let mut server = TlsSession::accept(&acceptor).expect("a session");
    assert_eq!(shake(&mut client, &mut server, 1000), Err(TlsFailure::UnknownIdentity("one".into())));
}
