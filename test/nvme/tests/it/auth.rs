//! DH-HMAC-CHAP between a target and hosts on a simulated network.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use forebay_accel::crypto::dh::DhGroup;
use forebay_nvme_host::auth::{self, Identity, Outcome, negotiate, transformed};
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, sqe, with};
use forebay_nvmf::HostAccess;
use forebay_nvmf::session::auth::AuthSecrets;
use forebay_nvmf::session::secret::{DhChapHash, DhChapSecret};
use forebay_reactor::{now, sleep};

const NONE: Digests = Digests { header: false, data: false };
/// Secret of the bytes 0 to 63, not transformed.
const PLAIN: &str =
    "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P4zODhA=:";
/// Secret of the bytes of `SHAPED_KEY`, to be transformed with SHA-384.
const SHAPED: &str = "DHHC-1:02:UjUpCd6Kzjx6TIqb1h53dLKJaadT3ZUDIf1uqk5N0ct2DhapRv9nBlWeWG36etP9TTSiRQ==:";
const SHAPED_KEY: [u8; 48] = [
    0x52, 0x35, 0x29, 0x09, 0xde, 0x8a, 0xce, 0x3c, 0x7a, 0x4c, 0x8a, 0x9b, 0xd6, 0x1e, 0x77, 0x74, 0xb2, 0x89, 0x69,
    0xa7, 0x53, 0xdd, 0x95, 0x03, 0x21, 0xfd, 0x6e, 0xaa, 0x4e, 0x4d, 0xd1, 0xcb, 0x76, 0x0e, 0x16, 0xa9, 0x46, 0xff,
    0x67, 0x06, 0x55, 0x9e, 0x58, 0x6d, 0xfa, 0x7a, 0xd3, 0xfd,
];

fn keys(mutual: bool) -> AuthSecrets {
    AuthSecrets {
        host: DhChapSecret::parse(PLAIN).expect("a secret"),
        controller: mutual.then(|| DhChapSecret::parse(SHAPED).expect("a secret")),
        hashes: vec![DhChapHash::Sha256, DhChapHash::Sha512, DhChapHash::Sha384],
        groups: vec![Some(DhGroup::Ffdhe2048), Some(DhGroup::Ffdhe3072), None],
    }
}

fn admit(site: &Site, keys: AuthSecrets) {
    let hosts = [(HOST.to_owned(), Some(Arc::new(keys))), (OTHER.to_owned(), None)];
    site.subsystem.set_access(HostAccess::Listed(hosts.into()));
}

fn identity(mutual: bool) -> Identity {
    Identity {
        host: HOST.into(),
        subsystem: NQN.into(),
        key: (0..64).collect(),
        controller_key: mutual.then(|| transformed(2, &SHAPED_KEY, NQN)),
        hashes: vec![3, 2, 1],
        groups: vec![0, 2],
    }
}

/// Connects a queue that is not authenticated yet.
async fn queue(number: u16, cntlid: u16) -> (Client, u16) {
    let mut client = Client::connect(&addr(), NONE).await.expect("connected");
    let done = client.connect_queue(number, 32, NQN, HOST, cntlid, true).await.expect("answered").completion;
    assert_eq!((done.status, done.result >> 16), (0, 2), "authentication is asked for");
    (client, done.result as u16)
}

#[test]
fn a_host_that_knows_the_secret_gets_in_with_every_queue() {
    simulate(4, |seed, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let mutual = seed & 2 != 0;
        admit(&site, keys(mutual));
        let (mut admin, cntlid) = queue(0, 0xFFFF).await;
        // Other commands are refused before authentication.
        for early in [sqe(0x06, 0), forebay_nvme_host::codec::property(0x1C, false, None)] {
            let read = if early[0] == 6 { 4096 } else { 0 };
            let refused = admin.run(early, &[], read).await.expect("answered").completion;
            assert_eq!((refused.status, refused.final_), (0x191, true));
        }
        assert_eq!(admin.authenticate(&identity(mutual)).await.expect("answered"), Outcome::Authenticated);
        admin.enable().await.expect("enabled");
        let (mut io, _) = queue(1, cntlid).await;
        let refused = io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("answered").completion;
        assert_eq!(refused.status, 0x191);
        assert_eq!(io.authenticate(&identity(mutual)).await.expect("answered"), Outcome::Authenticated);
        io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok();
        // Reauthentication, while the queues are in use.
        for queue in [&mut admin, &mut io] {
            assert_eq!(queue.authenticate(&identity(mutual)).await.expect("answered"), Outcome::Authenticated);
        }
        // Long after the authentication timeout.
        sleep(Duration::from_secs(60)).await;
        io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok();
        assert_eq!(site.subsystems.stats().counts().auth_failures, 0);
        // Another host, which needs no key, and a third that is unknown.
        Client::admin(&addr(), NONE, NQN, OTHER).await.expect("the other host");
        let stranger = Client::admin(&addr(), NONE, NQN, "nqn.2020-01.org.example:stranger").await;
        assert!(stranger.is_err_and(|error| error.to_string().contains("184")));
        Client::admin(&addr(), NONE, DISCOVERY, HOST).await.expect("discovery asks for nothing");
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn every_hash_and_group() {
    simulate(1, |_, site| async move {
        for hash in 1..=3_u8 {
            for group in 0..=5_u8 {
                // The two largest groups are slow in an unoptimised build; once each is enough.
                if group > 3 && hash != 2 {
                    continue;
                }
                let groups = vec![DhGroup::ALL.get(usize::from(group).wrapping_sub(1)).copied()];
                admit(&site, AuthSecrets { hashes: vec![DhChapHash::of(hash).expect("a hash")], groups, ..keys(true) });
                let (mut admin, _) = queue(0, 0xFFFF).await;
                let identity = Identity { hashes: vec![1, 2, 3], groups: vec![5, 4, 3, 2, 1, 0], ..identity(true) };
                let outcome = admin.authenticate(&identity).await.expect("answered");
                assert_eq!(outcome, Outcome::Authenticated, "hash {hash}, group {group}");
            }
        }
    });
}

#[test]
fn who_does_not_know_the_secret_is_told_why_later_and_is_out() {
    simulate(2, |_, site| async move {
        let good = identity(false);
        let wrong_key = Identity { key: vec![1; 64], ..good.clone() };
        let no_hash = Identity { hashes: vec![9], ..good.clone() };
        let no_group = Identity { groups: vec![5], ..good.clone() };
        // The target has no secret for bidirectional authentication.
        let not_mutual = identity(true);
        for (host, reason) in [(wrong_key, 1), (no_hash, 4), (no_group, 5), (not_mutual, 1)] {
            admit(&site, keys(false));
            let (mut admin, _) = queue(0, 0xFFFF).await;
            let before = now();
            assert_eq!(admin.authenticate(&host).await.expect("answered"), Outcome::Refused(reason), "{host:?}");
            assert!(now() - before >= Duration::from_secs(1), "secrets are not tried fast");
            assert!(admin.run(sqe(0x06, 0), &[], 4096).await.is_err(), "the connection is ended");
        }
        assert_eq!(site.subsystems.stats().counts().auth_failures, 4);
        until(|| site.subsystem.controller_ids().is_empty()).await;
        // The host does not believe the controller.
        admit(&site, keys(true));
        let host = Identity { controller_key: Some(vec![0; 48]), ..good };
        let (mut admin, _) = queue(0, 0xFFFF).await;
        assert_eq!(admin.authenticate(&host).await.expect("answered"), Outcome::Impostor);
        assert!(admin.run(sqe(0x06, 0), &[], 4096).await.is_err(), "the connection is ended");
    });
}

#[test]
fn a_failure_of_a_later_authentication_ends_the_controller() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        admit(&site, keys(false));
        let (mut admin, cntlid) = queue(0, 0xFFFF).await;
        admin.authenticate(&identity(false)).await.expect("answered");
        admin.enable().await.expect("enabled");
        let (mut io, _) = queue(1, cntlid).await;
        io.authenticate(&identity(false)).await.expect("answered");
        let wrong = Identity { key: vec![1; 64], ..identity(false) };
        let before = now();
        assert_eq!(admin.authenticate(&wrong).await.expect("answered"), Outcome::Refused(1));
        // The host has the time to read so before any of its connections is closed.
        let refused = now();
        assert!(refused - before >= Duration::from_secs(1), "guesses are limited");
        until(|| site.subsystem.controller_ids().is_empty()).await;
        assert!(now() - refused >= Duration::from_millis(400), "closed {:?} after the answer", now() - refused);
        assert!(io.run(blocks(2, 1, 0, 1), &[], 512).await.is_err(), "its queues have gone, too");
    });
}

#[test]
fn messages_out_of_turn_and_out_of_time() {
    simulate(2, |_, site| async move {
        admit(&site, keys(false));
        // Authentication Receive fails before a negotiation; a command of another security protocol is refused.
        let (mut admin, _) = queue(0, 0xFFFF).await;
        assert_eq!(admin.auth_receive().await.expect("answered").completion.status, 0x00C);
        let mut other = auth::command(true, 72);
        other[43] = 0xEA;
        let refused = admin.run(other, &negotiate(1, &[1], &[0]), 0).await.expect("answered").completion;
        assert_eq!(refused.status, 0x002);
        // An unsolicited success message.
        let mut success = vec![1, 4, 0, 0, 1, 0];
        success.resize(16, 0);
        admin.auth_send(&success).await.expect("answered").ok();
        let failure = admin.auth_receive().await.expect("answered").ok();
        // No transaction had begun.
        assert_eq!((failure[1], failure[6], failure[7]), (0xF1, 1, 6));
        // The reply of another transaction; then a buffer too small for the challenge.
        let (mut admin, _) = queue(0, 0xFFFF).await;
        admin.auth_send(&negotiate(7, &[1], &[0])).await.expect("answered").ok();
        let small = admin.run(auth::command(false, 8), &[], 8).await.expect("answered").completion;
        assert_eq!(small.status, 0x002);
        let mut reply = vec![1, 2, 0, 0, 8, 0];
        reply.resize(80, 0);
        reply[6] = 32;
        admin.auth_send(&reply).await.expect("answered").ok();
        assert_eq!(admin.auth_receive().await.expect("answered").ok()[7], 6);
        // A host that exceeds the authentication timeout is disconnected, even if it is busy.
        for begin in [false, true] {
            let (mut admin, _) = queue(0, 0xFFFF).await;
            let before = now();
            while admin.run(sqe(0x06, 0), &[], 4096).await.is_ok() {
                if begin && admin.auth_send(&negotiate(7, &[1], &[0])).await.is_err() {
                    break;
                }
                sleep(Duration::from_secs(1)).await;
            }
            assert!(now() - before < Duration::from_secs(25));
        }
        // A host that begins reauthentication has to finish it, too.
        let (mut admin, _) = queue(0, 0xFFFF).await;
        admin.authenticate(&identity(false)).await.expect("answered");
        admin.auth_send(&negotiate(7, &[1], &[0])).await.expect("answered").ok();
        until(|| site.server.connections() == 0).await;
        let set = with(with(sqe(0x09, 0), 10, 0xF), 11, 2000);
        assert!(admin.run(set, &[], 0).await.is_err());
    });
}
