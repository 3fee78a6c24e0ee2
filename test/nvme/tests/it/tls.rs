//! TLS between a target and hosts on a simulated network.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, Pdu, blocks, ic_req};
use forebay_nvme_host::wire::Wire;
use forebay_nvmf::session::psk::TlsKey;
use forebay_nvmf::{HostAccess, HostLimits, Port, PortAddress};
use forebay_reactor::{Addr, Buf, BufMut, Listener, Stream, now, sleep, spawn};
use forebay_tls::{Psk, PskHash, Suite, TlsSession};

const NONE: Digests = Digests { header: false, data: false };
const BOTH: Digests = Digests { header: true, data: true };
const SHORT: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const LONG: &str = "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
}

fn psk(identity: String, hash: PskHash, secret: &str) -> Psk {
    Psk { identity: identity.into(), secret: bytes(secret).into(), hash }
}

/// TLS keys computed independently of the front's own code, with Python's hmac.
fn first() -> Psk {
    psk(format!("NVMe0R01 {HOST} {NQN}"), PskHash::Sha256, FIRST)
}

fn second() -> Psk {
    psk(format!("NVMe1R01 {HOST} {NQN} MPlTcPr+AAnLIMtCwiu1gWzZgi/Ssia6saHp8zt4b9o="), PskHash::Sha256, SECOND)
}

fn discovery() -> Psk {
    psk(
        format!("NVMe1R01 {HOST} {DISCOVERY} z4rAhkY6EJj+RFrahJTENhfqnPcAOnDw8FtIL0PQBFc="),
        PskHash::Sha256,
        OF_DISCOVERY,
    )
}

/// Key of the other host, for the longer hash.
fn longer() -> Psk {
    psk(
        format!("NVMe1R02 {OTHER} {NQN} yeHgEW57DBmNJK1fAqH11is4I34+gIkSFbNalsgGS3vZFlZ+SrHDClHXCBFVaPeL"),
        PskHash::Sha384,
        LONGER,
    )
}

const FIRST: &str = "4d351b38215bef634a382e999f0e90d4003b19a0a51c81374fe50db15be22e65";
const SECOND: &str = "d4525dde6fbf4374ba9266e528c83d6721d150ebc2ff92db325b9aa4f0a6db4a";
const OF_DISCOVERY: &str = "382729b5abf2c62d934d6e9b99144bcace6e348dcd0ccf977a184f9ff75a019f";
const LONGER: &str = "cf5df983cd774c8d0194019214cd085d0f753f69d85d144ef99ab6e2f74d69ebf7c374f010df9389097420020c0f131e";

fn secure_addr() -> Addr {
    Addr::Unix("/run/nvme-tls".into())
}

/// Sets up two hosts with keys, one without, and a port with TLS beside the one without.
fn secure(site: &Site) {
    let key = |text| TlsKey::parse(text).expect("a key");
    site.subsystem.set_tls_keys(&BTreeMap::from([(HOST.to_owned(), key(SHORT)), (OTHER.to_owned(), key(LONG))]));
    let hosts = [HOST, OTHER, THIRD].map(|host| (host.to_owned(), None));
    site.subsystem.set_access(HostAccess::Listed(hosts.into()));
    let port = Port::with_tls(2, vec![PortAddress::Tcp("192.0.2.8".parse().expect("an address"), 4421)]);
    site.subsystems.add_port(port.clone());
    let listener = Listener::bind(&secure_addr()).expect("binds");
    drop(spawn(site.server.clone().serve(listener, port)));
}

const THIRD: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000003";

async fn queue(psk: &Psk, host: &str, number: u16, cntlid: u16, digests: Digests) -> (Client, u16) {
    let mut client = Client::connect_tls(&secure_addr(), digests, std::slice::from_ref(psk)).await.expect("TLS");
    let done = client.connect_queue(number, 32, NQN, host, cntlid, true).await.expect("answered").completion;
    assert_eq!(done.status, 0);
    (client, done.result as u16)
}

#[test]
fn a_host_with_its_key_reads_what_it_wrote() {
    simulate(6, |seed, site| async move {
        secure(&site);
        let model = Model::new(4 << 20, seed & 2 != 0);
        site.add(1, &model);
        let digests = if seed & 1 != 0 { BOTH } else { NONE };
        for (psk, host, suite) in
            [(first(), HOST, Suite::Aes128Gcm), (second(), HOST, Suite::Aes128Gcm), (longer(), OTHER, Suite::Aes256Gcm)]
        {
            let (mut admin, cntlid) = queue(&psk, host, 0, 0xFFFF, digests).await;
            assert_eq!(admin.wire.suite(), Some(suite));
            admin.enable().await.expect("enabled");
            let (mut io, _) = queue(&psk, host, 1, cntlid, digests).await;
            assert_eq!(site.subsystems.stats().suites(), BTreeMap::from([(suite.name(), 2)]));
            // In-capsule data, data by R2T, and data longer than a record and every buffer.
            for (at, count) in [(0, 1), (8, 8), (100, 100), (1000, 2000)] {
                let data: Vec<u8> = (0..count * 512).map(|byte| (byte / 7 + seed as u32 + at) as u8).collect();
                io.run(blocks(1, 1, u64::from(at), count), &data, 0).await.expect("written").ok();
                let from = at as usize * 512;
                assert!(model.bytes.borrow()[from..from + data.len()] == data);
                io.wire.update_keys();
                let read = io.run(blocks(2, 1, u64::from(at), count), &[], data.len()).await.expect("read").ok();
                assert!(read == data);
            }
            // Multiple commands at once, in one send and in many.
            let mut cids = Vec::new();
            for at in 0..20 {
                cids.push(io.start(blocks(2, 1, at, 16), &[], 8192).await.expect("sent"));
            }
            for (at, cid) in cids.into_iter().enumerate() {
                let done = io.finish(cid).await.expect("answered").ok();
                assert!(done == model.bytes.borrow()[at * 512..at * 512 + 8192]);
            }
            for client in [io, admin] {
                client.wire.close().await.expect("close_notify");
                assert_eq!(client.wire.receive().await.expect("the end"), Vec::<u8>::new(), "and it says so too");
            }
            until(|| site.subsystem.controller_ids().is_empty()).await;
        }
        assert_eq!(site.subsystems.stats().counts().tls_failures, 0);
        until(|| site.server.connections() == 0).await;
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn discovery_says_where_tls_is_needed() {
    simulate(2, |_, site| async move {
        secure(&site);
        let mut client = Client::connect_tls(&secure_addr(), NONE, &[discovery()]).await.expect("TLS");
        let done = client.connect_queue(0, 32, DISCOVERY, HOST, 0xFFFF, true).await.expect("answered").completion;
        assert_eq!(done.status, 0);
        client.enable().await.expect("enabled");
        let mut sqe = forebay_nvme_host::codec::sqe(0x02, 0);
        sqe[40..44].copy_from_slice(&(0x70_u32 | (4096 / 4 - 1) << 16).to_le_bytes());
        let page = client.run(sqe, &[], 4096).await.expect("answered").ok();
        assert_eq!(page[8], 3, "both ports, and discovery through this one");
        for entry in page[1024..4096].chunks(1024) {
            // TREQ: required, or not specified; SECTYPE: TLS 1.3, or none.
            let tls = entry[512..].starts_with(b"192.0.2.8");
            assert_eq!((entry[3] & 3, entry[768]), if tls { (1, 2) } else { (0, 0) });
        }
        // The key is valid for discovery only.
        let mut client = Client::connect_tls(&secure_addr(), NONE, &[discovery()]).await.expect("TLS");
        let done = client.connect_queue(0, 32, NQN, HOST, 0xFFFF, true).await.expect("answered").completion;
        assert_eq!((done.status, done.result), (0x182, 1 << 16 | 256));
    });
}

#[test]
fn who_has_no_right_to_connect_is_told_so() {
    simulate(2, |_, site| async move {
        secure(&site);
        let refused = async |psk: Psk| {
            let stream = Stream::connect(&secure_addr()).await.expect("connected");
            Wire::secure(stream, &[psk]).await.err().map(|error| error.to_string()).expect("refused")
        };
        let wrong = Psk { secret: vec![7; 32].into(), ..first() };
        let unknown = psk(format!("NVMe0R01 {THIRD} {NQN}"), PskHash::Sha256, FIRST);
        let elsewhere = psk(format!("NVMe0R01 {HOST} nqn.2020-01.org.example:else"), PskHash::Sha256, FIRST);
        let stranger = psk("Client_identity".into(), PskHash::Sha256, FIRST);
        for psk in [wrong, unknown, elsewhere, stranger] {
            let error = refused(psk).await;
            assert!(error.contains("alert"), "{error}");
        }
        assert_eq!(site.subsystems.stats().counts().tls_failures, 4);
        // The key of one host is not valid for another, and a host with a key is not admitted without TLS.
        let mut client = Client::connect_tls(&secure_addr(), NONE, &[first()]).await.expect("TLS");
        let done = client.connect_queue(0, 32, NQN, THIRD, 0xFFFF, true).await.expect("answered").completion;
        assert_eq!((done.status, done.result), (0x182, 1 << 16 | 512));
        let plain = Client::admin(&addr(), NONE, NQN, HOST).await.err().expect("refused").to_string();
        assert!(plain.contains("184"), "{plain}");
        // Other hosts and discovery are not affected.
        Client::admin(&addr(), NONE, NQN, THIRD).await.expect("without a key");
        Client::admin(&addr(), NONE, DISCOVERY, HOST).await.expect("discovery");
    });
}

#[test]
fn plain_and_tls_do_not_mix_and_say_so() {
    simulate(2, |_, site| async move {
        secure(&site);
        let mut plain = Client::raw(Stream::connect(&secure_addr()).await.expect("connected"));
        plain.send(&ic_req(NONE, 0)).await.expect("sent");
        match plain.pdu().await.expect("answered") {
            Some(Pdu::Term { status, .. }) => assert_eq!(status, 6, "unsupported parameter"),
            other => panic!("{other:?}"),
        }
        plain.close();
        let stream = Stream::connect(&addr()).await.expect("connected");
        let error = Wire::secure(stream, &[first()]).await.err().expect("no TLS there").to_string();
        assert!(error.contains("TLS:"), "{error}");
        // Garbage is answered with an alert.
        let stream = Stream::connect(&secure_addr()).await.expect("connected");
        stream.send(Buf::copy_of(b"GET / HTTP/1.1\r\n\r\n")).await.expect("sent");
        let (got, buf) = stream.recv(BufMut::with_capacity(100)).await;
        assert_eq!((got.expect("answered"), &buf[..]), (7, &[21, 3, 3, 0, 2, 2, 10][..]));
        until(|| site.subsystems.stats().counts().tls_failures == 2).await;
        drop(stream);
        until(|| site.server.connections() == 0).await;
    });
}

#[test]
fn handshakes_are_bounded_in_time_and_number() {
    let limits = HostLimits { handshakes_max: 8, ..HostLimits::default() };
    simulate_with(2, &limits, |_, site| async move {
        secure(&site);
        let mut hello = Vec::new();
        let mut session = TlsSession::connect(&[first()]).expect("a session");
        assert!(!session.handshake(&mut &[][..], &mut hello).expect("begun"));
        let begun = now();
        // These connections send nothing, a part, or all but the last message, and stay open.
        let mut open = Vec::new();
        for cut in [0, 1, 5, 40, hello.len() - 1, hello.len(), hello.len(), hello.len()] {
            let stream = Stream::connect(&secure_addr()).await.expect("connected");
            if cut > 0 {
                stream.send(Buf::copy_of(&hello[..cut])).await.expect("sent");
            }
            open.push(stream);
            until(|| site.server.connections() == open.len()).await;
        }
        // One more connection is rejected.
        let more = Stream::connect(&secure_addr()).await.expect("connected");
        let (got, _) = more.recv(BufMut::with_capacity(10)).await;
        assert!(!got.is_ok_and(|got| got > 0));
        until(|| site.subsystems.stats().counts().turned_away == 1).await;
        until(|| site.server.connections() == 0).await;
        let took = now() - begun;
        assert!(took >= Duration::from_secs(19) && took < Duration::from_secs(30), "{took:?}");
        // Connections are accepted again.
        let (admin, _) = queue(&first(), HOST, 0, 0xFFFF, NONE).await;
        admin.close();
        until(|| site.server.connections() == 0).await;
        // A connection cut off at any point leaves nothing behind.
        for cut in 0..hello.len() {
            let stream = Stream::connect(&secure_addr()).await.expect("connected");
            if cut > 0 {
                stream.send(Buf::copy_of(&hello[..cut])).await.expect("sent");
            }
            if cut % 3 == 0 {
                sleep(Duration::from_micros(50)).await;
            }
            drop(stream);
        }
        until(|| site.server.connections() == 0).await;
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn a_session_that_is_damaged_ends() {
    simulate(4, |seed, site| async move {
        secure(&site);
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, cntlid) = queue(&first(), HOST, 0, 0xFFFF, NONE).await;
        admin.enable().await.expect("enabled");
        let (mut io, _) = queue(&first(), HOST, 1, cntlid, NONE).await;
        io.run(blocks(2, 1, 0, 8), &[], 4096).await.expect("read").ok();
        let record: &[u8] = match seed {
            // A record that cannot be decrypted, one that is too long, one in plaintext, an alert in plaintext.
            0 => &[23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0],
            1 => &[&[23, 3, 3, 0x42, 0][..], &[0; 0x4200]].concat(),
            2 => &[22, 3, 3, 0, 4, 24, 0, 0, 1],
            _ => &[21, 3, 3, 0, 2, 2, 10],
        };
        io.wire.send_raw(record).await.expect("sent");
        while io.wire.receive().await.is_ok_and(|bytes| !bytes.is_empty()) {}
        until(|| site.server.connections() == 1).await;
        // Only that queue is lost; the controller remains.
        admin.run(forebay_nvme_host::codec::property(0x1C, false, None), &[], 0).await.expect("answered").ok();
    });
}
