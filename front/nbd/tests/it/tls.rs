//! Tests of TLS: hosts with and without it, and their access to exports.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::common::world::{addr, simulate};
use crate::common::*;
use forebay_nbd::access::{NbdAccessControl, SharedAccess};
use forebay_nbd::{NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Addr, Listener, Stream, spawn};
use forebay_tls::{Acceptor, Certificate, Psk, PskHash, PskLookup, ServerCertificate, TlsSession};

const TLS_REQUIRED: u32 = 1 << 31 | 5;
const UNKNOWN: u32 = 1 << 31 | 6;

macro_rules! pem {
    ($name:literal) => {
        include_bytes!(concat!("../../../../base/tls/tests/certs/", $name, ".pem"))
    };
}

fn certificate(chain: &[u8], key: &[u8]) -> Certificate {
    Certificate { chain: chain.to_vec(), key: key.to_vec().into() }
}

fn psk(user: &str, byte: u8) -> Psk {
    Psk { identity: user.into(), secret: vec![byte; 32].into(), hash: PskHash::Sha256 }
}

struct Ring;

impl PskLookup for Ring {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        if identity == b"user" { vec![psk("user", 1)] } else { Vec::new() }
    }
}

/// Creates an acceptor with the certificate "storage" and the key of "user", which with `verifies` asks for a
/// certificate of the same authority.
fn acceptor(verifies: bool) -> Acceptor {
    let shown = ServerCertificate {
        certificate: certificate(pem!("server-cert"), pem!("server-key")),
        client_authorities: verifies.then(|| pem!("ca-cert").to_vec()),
    };
    Acceptor::with_certificate(Some(Arc::new(Ring)), Some(&shown)).expect("an acceptor")
}

fn access(names: &[&str]) -> NbdAccessControl {
    NbdAccessControl {
        tls: Some(acceptor(true)),
        names: names.iter().map(ToString::to_string).collect(),
        ..NbdAccessControl::default()
    }
}

/// Creates a client session with the certificate of "host one".
fn host_one() -> TlsSession {
    let own = certificate(pem!("client-cert"), pem!("client-key"));
    TlsSession::connect_to("storage", pem!("ca-cert"), Some(&own)).expect("a session")
}

fn keyed(user: &str, byte: u8) -> TlsSession {
    TlsSession::connect(&[psk(user, byte)]).expect("a session")
}

fn serve(exported: &Rc<TestExports>, tls: Tls, access: NbdAccessControl) -> (Rc<NbdServer>, SharedAccess) {
    let shared = SharedAccess::default();
    shared.set(access);
    let server = NbdServer::with_access(exported.clone(), NbdServerOptions::default(), NbdStats::new(), shared.clone());
    drop(spawn(server.clone().serve(Listener::bind(&addr()).expect("binds"), tls)));
    (server, shared)
}

async fn secured(session: TlsSession) -> Client {
    let mut client = Client::fixed(&addr()).await;
    client.start_tls(session).await.expect("TLS");
    client
}

#[test]
fn everything_works_through_tls() {
    simulate(|| async {
        let model = Model::new(4 << 20);
        let (server, _) = serve(&TestExports::with("disk", &model), Tls::Required, access(&[]));
        for style in [Style::Simple, Style::Structured, Style::Extended] {
            for session in [host_one(), keyed("user", 1)] {
                let (mut client, _) = secured(session).await.choose("disk", style).await;
                for len in [1, 777, 16_384, 70_000, 1_500_000] {
                    let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8 | 1).collect();
                    client.write(12_345, &data).await;
                    assert!(client.read(12_345, len).await == data);
                }
                if style != Style::Simple {
                    assert!(!client.ask(7, 0, 0, 1 << 20, &[]).await.status.is_empty());
                }
                assert_eq!(server.stats().tls_connections(), 1);
                client.disconnect().await;
            }
        }
        let counts = server.stats().server();
        assert_eq!((counts.accepted, counts.tls_failures, counts.ended_for_cause), (6, 0, 0));
        server.stop().await;
    });
}

#[test]
fn where_tls_is_required_nothing_else_is_answered_before_it() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let (server, _) = serve(&TestExports::with("disk", &model), Tls::Required, access(&[]));
        let mut client = Client::fixed(&addr()).await;
        for (option, data) in
            [(3, vec![]), (6, info_data("disk", &[])), (7, info_data("disk", &[])), (8, vec![]), (11, vec![])]
        {
            let replies = client.option(option, &data).await;
            assert_eq!((replies.len(), replies[0].0), (1, TLS_REQUIRED), "option {option}");
        }
        client.start_tls(host_one()).await.expect("TLS");
        let (mut client, _) = client.choose("disk", Style::Extended).await;
        client.write(0, b"let in").await;
        client.disconnect().await;
        let mut plain = Client::fixed(&addr()).await;
        plain.send(&option_bytes(1, b"disk")).await;
        assert_eq!(plain.take(1).await, Err(vec![]), "no way to say no");
        let mut leaving = Client::fixed(&addr()).await;
        assert_eq!(leaving.option(2, &[]).await, [(1, vec![])]);
        server.stop().await;
    });
}

#[test]
fn where_tls_is_allowed_what_was_agreed_on_before_it_is_forgotten() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let (server, _) = serve(&TestExports::with("disk", &model), Tls::Allowed, access(&[]));
        let (mut plain, _) = Client::open(&addr(), "disk", Style::Structured).await;
        plain.write(0, b"plain").await;
        let mut client = Client::fixed(&addr()).await;
        assert_eq!(client.option(8, &[]).await, [(1, vec![])]);
        assert_eq!(client.option(10, &context_data("disk", &["base:allocation"])).await.len(), 2);
        client.start_tls(host_one()).await.expect("TLS");
        // Metadata contexts need structured replies, which the upgrade has reset.
        assert_eq!(client.option(10, &context_data("disk", &["base:allocation"])).await[0].0, 1 << 31 | 3);
        assert_eq!(client.option(5, &[]).await[0].0, 1 << 31 | 3, "TLS once");
        let (mut client, _) = client.choose("disk", Style::Simple).await;
        assert_eq!(client.read(0, 5).await, b"plain");
        assert_eq!(server.stats().tls_connections(), 1);
        client.disconnect().await;
        plain.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn who_does_not_come_to_agree_is_counted_and_the_next_is_served() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let (server, shared) = serve(&TestExports::with("disk", &model), Tls::Required, access(&[]));
        let stranger = certificate(pem!("stranger-cert"), pem!("stranger-key"));
        let mut failures = 0;
        let authority = pem!("ca-cert");
        for session in [
            keyed("user", 2),
            keyed("nobody", 1),
            TlsSession::connect_to("storage", pem!("other-ca-cert"), None).expect("a session"),
            TlsSession::connect_to("storage", authority, Some(&stranger)).expect("a session"),
            TlsSession::connect_to("storage", authority, None).expect("a session"),
        ] {
            let mut client = Client::fixed(&addr()).await;
            // With TLS 1.3 a client does not learn in the handshake that its certificate is refused.
            if client.start_tls(session).await.is_some() {
                client.send(&option_bytes(3, &[])).await;
                assert_eq!(client.take(1).await, Err(vec![]), "nothing is listed");
            }
            drop(client);
            failures += 1;
            while server.connections() > 0 {
                forebay_reactor::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(server.stats().server().tls_failures, failures);
        }
        // Plaintext options behind NBD_OPT_STARTTLS are not options.
        let mut client = Client::fixed(&addr()).await;
        client
            .send(&[option_bytes(5, &[]), option_bytes(3, &[]), option_bytes(7, &info_data("disk", &[]))].concat())
            .await;
        assert_eq!(client.take(20).await.expect("the reply")[12..16], [0, 0, 0, 1]);
        // An alert, then the end of the stream.
        assert_eq!(client.take(8).await, Err(vec![21, 3, 3, 0, 2, 2, 10]));
        // A server without certificates cannot begin TLS.
        shared.set(NbdAccessControl::default());
        let mut client = Client::fixed(&addr()).await;
        assert!(client.start_tls(host_one()).await.is_none());
        shared.set(access(&[]));
        let (client, _) = secured(host_one()).await.choose("disk", Style::Structured).await;
        client.disconnect().await;
        assert_eq!(server.stats().server().tls_failures, failures + 2);
        server.stop().await;
    });
}

#[test]
fn a_handshake_of_tls_has_the_time_of_any_handshake() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let (server, _) = serve(&TestExports::with("disk", &model), Tls::Required, access(&[]));
        let began = forebay_reactor::now();
        let mut client = Client::fixed(&addr()).await;
        assert_eq!(client.option(5, &[]).await, [(1, vec![])]);
        client.send(&[22, 3, 1, 1, 0]).await;
        assert_eq!(client.take(1).await, Err(vec![]));
        let took = forebay_reactor::now().since(began);
        assert!((Duration::from_secs(20)..Duration::from_secs(21)).contains(&took), "{took:?}");
        assert_eq!(server.stats().server().ended_for_cause, 1);
        server.stop().await;
    });
}

#[test]
fn names_are_looked_at_when_a_host_connects() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let (server, shared) = serve(&TestExports::with("disk", &model), Tls::Allowed, access(&["host *", "user"]));
        let (mut one, _) = secured(host_one()).await.choose("disk", Style::Structured).await;
        let (user, _) = secured(keyed("user", 1)).await.choose("disk", Style::Structured).await;
        // After a change of the list connected hosts stay, and new connections are checked against it.
        shared.set(access(&["CN=host two*", "user"]));
        one.write(0, b"still here").await;
        let mut again = secured(host_one()).await;
        again.send(&option_bytes(3, &[])).await;
        assert_eq!(again.take(1).await, Err(vec![]));
        assert_eq!(server.stats().server().hosts_refused, 1);
        let (other, _) = secured(keyed("user", 1)).await.choose("disk", Style::Structured).await;
        // A host without TLS has no name; the listener's TLS mode decides whether it may connect.
        let (plain, _) = Client::open(&addr(), "disk", Style::Structured).await;
        // Hosts that are not listed any more are expelled, after their earlier writes.
        assert_eq!(server.expel(), 1);
        assert_eq!(one.take(1).await, Err(vec![]));
        assert_eq!((server.expel(), server.stats().server().hosts_refused), (0, 2));
        assert_eq!(&model.bytes.borrow()[..10], b"still here");
        for client in [user, other, plain] {
            client.disconnect().await;
        }
        // Without a certificate request a host has no name.
        shared.set(NbdAccessControl { tls: Some(acceptor(false)), ..access(&["*"]) });
        let mut anonymous = secured(host_one()).await;
        anonymous.send(&option_bytes(3, &[])).await;
        assert_eq!(anonymous.take(1).await, Err(vec![]));
        server.stop().await;
    });
}

#[test]
fn an_export_is_there_only_for_its_hosts() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let exported = TestExports::with("disk", &model);
        exported.add(forebay_nbd::NbdExport::new("mine", Rc::new(ModelDevice(model.clone()))), "mine", "");
        exported.hosts.borrow_mut().insert("mine".into(), vec!["host one".parse().expect("a name")]);
        let (server, _) = serve(&exported, Tls::Allowed, access(&[]));
        let count = |replies: &[OptionReply]| replies.iter().filter(|(kind, _)| *kind == 2).count();
        let mut one = secured(host_one()).await;
        assert_eq!(count(&one.option(3, &[]).await), 2);
        let (mut one, _) = one.choose("mine", Style::Structured).await;
        one.write(0, b"mine").await;
        for (refused, mut other) in [(1, secured(keyed("user", 1)).await), (2, Client::fixed(&addr()).await)] {
            assert_eq!(count(&other.option(3, &[]).await), 1);
            for option in [6, 7] {
                let there = other.option(option, &info_data("mine", &[])).await;
                let missing = other.option(option, &info_data("none", &[])).await;
                assert_eq!((there.len(), there[0].0, missing[0].0), (1, UNKNOWN, UNKNOWN));
                let text = |reply: &OptionReply| String::from_utf8(reply.1.clone()).expect("UTF-8");
                assert_eq!(text(&there[0]).replace("mine", "none"), text(&missing[0]));
            }
            // Counted and logged once per connection.
            assert_eq!(server.stats().server().hosts_refused, refused);
            let (other, _) = other.choose("disk", Style::Structured).await;
            other.disconnect().await;
        }
        // A later TLS upgrade discards the export opened before it.
        let mut late = Client::fixed(&addr()).await;
        assert_eq!(late.option(6, &info_data("mine", &[])).await[0].0, UNKNOWN);
        late.start_tls(host_one()).await.expect("TLS");
        let (late, _) = late.choose("mine", Style::Structured).await;
        late.disconnect().await;
        one.disconnect().await;
        server.stop().await;
    });
}

#[test]
fn hosts_come_from_allowed_networks() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let shared = SharedAccess::default();
        let server = NbdServer::with_access(
            TestExports::with("disk", &model),
            NbdServerOptions::default(),
            NbdStats::new(),
            shared.clone(),
        );
        let addr: Addr = "127.0.0.1:10809".parse().expect("an address");
        drop(spawn(server.clone().serve(Listener::bind(&addr).expect("binds"), Tls::None)));
        let networks = |text: &str| NbdAccessControl {
            networks: vec![text.parse().expect("a network")],
            ..NbdAccessControl::default()
        };
        shared.set(networks("127.0.0.0/8"));
        let (mut client, _) = Client::open(&addr, "disk", Style::Structured).await;
        shared.set(networks("10.0.0.0/8"));
        client.write(0, b"still here").await;
        let stream = Stream::connect(&addr).await.expect("connects");
        let (got, _) = stream.recv(forebay_block::BufMut::with_capacity(64)).await;
        assert!(!got.is_ok_and(|got| got > 0), "not even a greeting");
        assert_eq!(server.stats().server().hosts_refused, 1);
        assert_eq!(server.expel(), 1);
        assert_eq!(client.take(1).await, Err(vec![]));
        server.stop().await;
    });
}
