//! Multiple subsystems in one process: visibility to hosts, and independence of removal.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, sqe, with};
use forebay_nvmf::session::admin::SubsystemIdentity;
use forebay_nvmf::session::psk::TlsKey;
use forebay_nvmf::{HostAccess, SubsystemExists};
use forebay_reactor::{random, spawn};

const NONE: Digests = Digests { header: false, data: false };
const SECOND: &str = "nqn.2024-05.org.example:second";
const THIRD: &str = "nqn.2024-05.org.example:third";
const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

/// Connects admin and I/O queue of a host.
async fn queues(nqn: &str, host: &str) -> (Client, Client, u16) {
    let (admin, cntlid) = Client::admin(&addr(), NONE, nqn, host).await.expect("admitted");
    let io = Client::io(&addr(), NONE, nqn, host, cntlid, 1).await.expect("connected");
    (admin, io, cntlid)
}

fn listed(hosts: &[&str]) -> HostAccess {
    HostAccess::Listed(hosts.iter().map(|host| ((*host).to_owned(), None)).collect())
}

/// Returns the subsystem NQNs that a host discovers.
async fn discovered(host: &str) -> BTreeSet<String> {
    let (mut admin, _) = Client::admin(&addr(), NONE, DISCOVERY, host).await.expect("discovery");
    let page = admin.run(with(sqe(0x02, 0), 10, 0x70 | 1023 << 16), &[], 4096).await.expect("log").ok();
    let count = page[8] as usize;
    let name = |entry: &[u8]| {
        let name = &entry[256..512];
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        String::from_utf8(name[..end].to_vec()).expect("a name")
    };
    let names: BTreeSet<String> = page[1024..].chunks(1024).take(count).map(name).collect();
    names.into_iter().filter(|name| name != DISCOVERY).collect()
}

#[test]
fn a_name_is_given_once() {
    simulate(1, |_, site| async move {
        let named = |nqn: &str| SubsystemIdentity {
            nqn: nqn.into(),
            serial: "1".into(),
            model: "Model".into(),
            firmware: "1.0".into(),
        };
        for taken in [NQN, DISCOVERY] {
            assert_eq!(site.subsystems.create(named(taken), 1..=2).err(), Some(SubsystemExists(taken.into())));
        }
        site.subsystems.create(named(SECOND), 1..=2).expect("a new name");
        assert!(site.subsystems.remove(SECOND).is_some() && site.subsystems.remove(SECOND).is_none());
        site.subsystems.create(named(SECOND), 1..=2).expect("free again");
    });
}

/// One namespace id denotes a different volume in each subsystem.
#[test]
fn each_subsystem_has_namespaces_and_controllers_of_its_own() {
    simulate(4, |_, site| async move {
        let models = [Model::new(1 << 20, false), Model::new(1 << 20, false)];
        site.add(1, &models[0]);
        let second = site.add_subsystem(SECOND, 7, &models[1]);
        let (mut admin, mut io, cntlid) = queues(NQN, HOST).await;
        let (mut other_admin, mut other, other_cntlid) = queues(SECOND, HOST).await;
        assert_eq!((cntlid, other_cntlid), (5, 5), "ids of controllers are the subsystem's");
        io.run(blocks(1, 1, 3, 1), &[1; 512], 0).await.expect("write").ok();
        other.run(blocks(1, 1, 3, 1), &[2; 512], 0).await.expect("write").ok();
        assert_eq!((models[0].bytes.borrow()[3 * 512], models[1].bytes.borrow()[3 * 512]), (1, 2));
        assert_eq!(io.run(blocks(2, 1, 3, 1), &[], 512).await.expect("read").ok(), [1; 512]);
        // Identify reports the name of the own subsystem.
        for (admin, nqn) in [(&mut admin, NQN), (&mut other_admin, SECOND)] {
            let page = admin.run(with(sqe(0x06, 0), 10, 1), &[], 4096).await.expect("identify").ok();
            assert_eq!(&page[768..768 + nqn.len()], nqn.as_bytes());
        }
        // A queue cannot connect to a controller of another subsystem.
        let mut stray = Client::connect(&addr(), NONE).await.expect("connected");
        let done = stray.connect_queue(2, 32, THIRD, HOST, cntlid, true).await.expect("answered").completion;
        assert_eq!((done.status, done.result), (0x182, 1 << 16 | 256));
        // A namespace removed from one subsystem remains in the other.
        second.remove_namespace(1);
        site.server.let_go(&second, 1).await;
        assert_eq!(other.run(blocks(2, 1, 0, 1), &[], 512).await.expect("answered").completion.status, 0x00B);
        io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok();
        assert_eq!((site.subsystem.controller_count(), second.controller_count()), (1, 1));
    });
}

#[test]
fn discovery_shows_a_host_the_subsystems_that_admit_it() {
    simulate(2, |_, site| async move {
        let model = Model::new(1 << 20, false);
        let second = site.add_subsystem(SECOND, 7, &model);
        let third = site.add_subsystem(THIRD, 8, &model);
        site.subsystem.set_access(listed(&[HOST]));
        second.set_access(listed(&[HOST, OTHER]));
        third.set_access(listed(&[]));
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(discovered(HOST).await, names(&[NQN, SECOND]));
        assert_eq!(discovered(OTHER).await, names(&[SECOND]));
        let stranger = "nqn.2024-05.org.example:stranger";
        let refused = Client::admin(&addr(), NONE, DISCOVERY, stranger).await.err().expect("refused").to_string();
        assert!(refused.contains("184"), "{refused}");
        for (nqn, host, admitted) in [(NQN, OTHER, false), (SECOND, OTHER, true), (THIRD, HOST, false)] {
            assert_eq!(Client::admin(&addr(), NONE, nqn, host).await.is_ok(), admitted, "{nqn} {host}");
        }
        third.set_access(HostAccess::Anyone);
        assert_eq!(discovered(stranger).await, names(&[THIRD]));
        site.subsystems.remove(THIRD);
        assert!(Client::admin(&addr(), NONE, THIRD, HOST).await.is_err());
    });
}

#[test]
fn a_host_that_is_expelled_ends_its_commands_first() {
    simulate(4, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (_admin, mut io, _) = queues(NQN, HOST).await;
        let (_other_admin, mut other, _) = queues(NQN, OTHER).await;
        model.hold();
        let written = io.start(blocks(1, 1, 0, 1), &[9; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        site.subsystem.set_access(listed(&[OTHER]));
        assert_eq!(site.subsystem.expel(), [HOST]);
        assert!(site.subsystem.expel().iter().all(|host| host == HOST));
        assert_eq!(site.subsystem.controller_count(), 2, "its command is in flight");
        model.release();
        io.finish(written).await.expect("answered").ok();
        assert_eq!(model.bytes.borrow()[0], 9);
        until(|| site.subsystem.controller_count() == 1).await;
        assert!(io.run(blocks(2, 1, 0, 1), &[], 512).await.is_err(), "its connection has ended");
        other.run(blocks(2, 1, 0, 1), &[], 512).await.expect("the other host goes on").ok();
        assert!(Client::admin(&addr(), NONE, NQN, HOST).await.is_err());
    });
}

#[test]
fn a_subsystem_that_is_removed_ends_its_controllers_only() {
    simulate(4, |_, site| async move {
        let models = [Model::new(1 << 20, false), Model::new(1 << 20, false)];
        site.add(1, &models[0]);
        let second = site.add_subsystem(SECOND, 7, &models[1]);
        let (_admin, mut io, _) = queues(NQN, HOST).await;
        let (_second_admin, mut other, _) = queues(SECOND, HOST).await;
        other.run(blocks(1, 1, 0, 1), &[2; 512], 0).await.expect("write").ok();
        site.subsystems.remove(SECOND).expect("there");
        until(|| second.controller_count() == 0).await;
        assert!(other.run(blocks(2, 1, 0, 1), &[], 512).await.is_err());
        io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok();
        assert_eq!(site.subsystem.controller_count(), 1);
    });
}

/// A host with a key for one subsystem needs none for the other.
#[test]
fn a_key_for_tls_is_for_one_subsystem() {
    simulate(1, |_, site| async move {
        let model = Model::new(1 << 20, false);
        let second = site.add_subsystem(SECOND, 7, &model);
        let key = TlsKey::parse(KEY).expect("a key");
        second.set_tls_keys(&BTreeMap::from([(HOST.to_owned(), key)]));
        assert!(Client::admin(&addr(), NONE, NQN, HOST).await.is_ok());
        let refused = Client::admin(&addr(), NONE, SECOND, HOST).await.err().expect("refused").to_string();
        assert!(refused.contains("184"), "{refused}");
    });
}

/// Hosts connect and disconnect while subsystems are created and removed: afterwards nothing is left of any.
#[test]
fn subsystems_come_and_go_under_load() {
    simulate(6, |_, site| async move {
        let model = Model::new(1 << 20, true);
        site.add(1, &model);
        let mut hosts = Vec::new();
        for round in 0..8_u32 {
            let nqn = format!("nqn.2024-05.org.example:round-{round}");
            site.add_subsystem(&nqn, 10 + round, &model);
            let host = spawn(async move {
                let Ok((admin, cntlid)) = Client::admin(&addr(), NONE, &nqn, HOST).await else { return };
                let Ok(mut io) = Client::io(&addr(), NONE, &nqn, HOST, cntlid, 1).await else { return };
                while io.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.is_ok() {}
                drop(admin);
            });
            hosts.push(host);
        }
        let seen = site.subsystems.all().len();
        assert_eq!(seen, 9);
        until(|| model.in_flight.get() > 0).await;
        let mut left: Vec<u32> = (0..8).collect();
        while !left.is_empty() {
            let round = left.remove(random() as usize % left.len());
            let removed = site.subsystems.remove(&format!("nqn.2024-05.org.example:round-{round}")).expect("there");
            until(|| removed.controller_count() == 0).await;
        }
        for host in hosts {
            host.await;
        }
        until(|| site.server.connections() == 0).await;
        assert_eq!((site.server.bytes_held(), model.in_flight.get()), (0, 0));
    });
}

/// A host gives a path up for good if a Connect is refused with Do Not Retry.
#[test]
fn a_subsystem_that_is_expected_or_held_is_busy_for_now() {
    simulate(1, |_, site| async move {
        let connect = async |nqn: &str| {
            let mut client = Client::connect(&addr(), NONE).await.expect("connected");
            let done = client.connect_queue(0, 32, nqn, HOST, 0xFFFF, false).await.expect("answered").completion;
            (done.status, done.final_)
        };
        assert_eq!(connect(SECOND).await, (0x182, true));
        site.subsystems.set_expecting(true);
        assert_eq!((connect(SECOND).await, connect(NQN).await), ((0x181, false), (0, false)));
        let second = site.add_subsystem(SECOND, 7, &Model::new(1 << 20, false));
        second.set_held(true);
        site.subsystems.set_expecting(false);
        assert_eq!((connect(SECOND).await, connect(THIRD).await), ((0x181, false), (0x182, true)));
        assert!(discovered(HOST).await.contains(SECOND), "hosts may learn of it");
        second.set_held(false);
        assert_eq!(connect(SECOND).await, (0, false));
        site.subsystems.remove(SECOND);
        assert_eq!(connect(SECOND).await, (0x182, true));
    });
}

#[test]
fn an_empty_subsystem_is_hidden_from_discovery_on_request() {
    simulate(1, |_, site| async move {
        let (mut admin, _) = Client::admin(&addr(), NONE, DISCOVERY, HOST).await.expect("discovery");
        let second = site.add_subsystem(SECOND, 7, &Model::new(1 << 20, false));
        let nsid = second.namespace_ids()[0];
        let namespace = second.namespace(nsid).expect("added");
        let mut last = 0;
        let mut changed = async || {
            let page = admin.run(with(sqe(0x02, 0), 10, 0x70 | 3 << 16), &[], 16).await.expect("log").ok();
            let before = std::mem::replace(&mut last, page[0]);
            before != page[0]
        };
        assert!(changed().await);
        second.hide_empty(true);
        assert!(changed().await && discovered(HOST).await.contains(SECOND), "it has a namespace");
        second.remove_namespace(nsid);
        assert!(changed().await && !discovered(HOST).await.contains(SECOND));
        drop(Client::admin(&addr(), NONE, SECOND, HOST).await.expect("hosts that know it connect"));
        second.add_namespace(namespace.as_ref().clone()).expect("in range");
        assert!(changed().await && discovered(HOST).await.contains(SECOND));
        second.remove_namespace(nsid);
        second.hide_empty(false);
        assert!(changed().await && discovered(HOST).await.contains(SECOND));
    });
}
