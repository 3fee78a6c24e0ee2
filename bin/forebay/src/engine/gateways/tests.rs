//! A member without a daemon's fronts, on the model of a cluster: what its hosts would reach.

mod guests;

use std::path::Path;

use forebay_gateways::record::GroupChange;
use forebay_gateways::{GatewayGroupId, GroupIdentity, GroupPolicy};
use forebay_image::{self as image, CreateOptions};
use forebay_iscsi::session::login::{Denied, LoginDirectory};
use forebay_nvmf::{Port, PortAddress};
use forebay_ram::cluster::{RamClient, RamCluster};
use forebay_reactor::{DriverChoice, Reactor, timeout};
use serde_json::json;
use tempfile::TempDir;

use super::settings::{GroupSettings, MemberNvmePort, VolumeSettings};
use super::*;
use crate::api::{AttachRequest, GatewayGroupPolicy, GatewayHostSource, NvmeHost};
use crate::engine::testing::{POOL, engine_of_client};
use crate::failure::FailureKind;
use crate::spec::ImageSpec;

/// Waits until something is so.
async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(Duration::from_secs(60), so).await.is_ok(), "not within a minute: {what}");
}

fn identity(image: &str) -> String {
    format!("00000000-0000-4000-8000-0000000000{:02x}", image.as_bytes()[0])
}

fn spec() -> GroupSpec {
    "rbd/gw".parse().expect("a group")
}

fn volume(image: &str) -> VolumeName {
    VolumeName::new(format!("rbd/{image}"))
}

/// Group in a cluster, and the data directory of one member.
struct World {
    cluster: RamCluster,
    dir: TempDir,
    names: GroupSettings,
}

impl World {
    async fn new(images: &[&str]) -> Self {
        Self::with_lease(1000, images).await
    }

    async fn with_lease(lease_ms: u32, images: &[&str]) -> Self {
        let cluster = RamCluster::new(1, 0);
        assert_eq!(cluster.add_pool("rbd"), POOL);
        let client = cluster.client();
        for name in images {
            let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
            image::create(&client.pool(POOL), name, options).await.expect("an image");
        }
        let (id, policy) = (GatewayGroupId([3; 16]), GroupPolicy { lease_ms, ..GroupPolicy::default() });
        let names = GroupSettings::new(id);
        let identity = GroupIdentity::new(id, policy, settings::write(&names));
        Self::store(&client).create(identity).await.expect("a new group");
        Self { cluster, dir: tempfile::tempdir().expect("a directory"), names }
    }

    fn store(client: &RamClient) -> Rc<GroupStore> {
        GroupStore::new(&client.pool(POOL), "gw").expect("a shared pool")
    }

    async fn change(&self, changes: &[GroupChange]) {
        Self::store(&self.cluster.client()).change(changes).await.expect("stored").expect("allowed");
    }

    /// Starts the daemon of the member up to where it would accept hosts.
    async fn start(&self) -> Member {
        let engine = engine_of_client(self.dir.path(), &self.cluster.client()).await;
        let group = engine.enter_group(&spec());
        Member { engine, group }
    }
}

struct Member {
    engine: Rc<Engine>,
    group: Rc<JoinedGroup>,
}

impl Member {
    async fn join(&self) {
        self.group.begin();
        eventually("a member", || self.serves()).await;
    }

    fn serves(&self) -> bool {
        let start = self.group.running().map(|running| StartId(*running.client.start()));
        start.zip(self.group.record()).is_some_and(|(start, record)| record.serves(self.group.own, start))
    }

    /// Opens the image of a volume, as its owner would.
    async fn open(&self, image: &str) {
        let spec: ImageSpec = format!("rbd/{image}").parse().expect("a spec");
        let opened = self.engine.open_volume(&spec).await.expect("an image");
        let device = opened.device(false, self.engine.meter(&spec, None)).expect("a device");
        let term = self.group.record().and_then(|record| record.volume(&volume(image)).map(|entry| entry.owner.term));
        let offer = self.group.forward_host.offer(&identity(image), term.expect("a volume of the group"), device);
        self.group.owned.insert(&volume(image), opened, offer.expect("offered"));
        self.group.changed.announce();
    }

    /// Returns the change by which another member joins, in slot 1, with these settings.
    fn join_other(&self, settings: &MemberSettings) -> GroupChange {
        let record = self.group.record().expect("known");
        let entry = GatewayMember {
            slot: 1,
            start: StartId([9; 16]),
            clients: Vec::new(),
            settings: settings::write(settings),
            ..record.member(self.group.own).expect("a member").clone()
        };
        GroupChange::Join { member: MemberId([9; 16]), entry }
    }

    fn published(&self, image: &str) -> Vec<Front> {
        Front::ALL.into_iter().filter(|front| self.group.exports.is_published(&volume(image), *front)).collect()
    }

    /// Returns whether the subsystem of this NQN refuses hosts for now; `None` if there is none.
    fn is_held(&self, nqn: &str) -> Option<bool> {
        self.engine.fronts.nvme().subsystems().get(nqn).map(|subsystem| subsystem.is_held())
    }

    fn login(&self, target: &str) -> std::result::Result<(), Denied> {
        self.engine.fronts.iscsi().targets().target(target, "iqn.2000-01.org.host:1").map(drop)
    }

    /// Returns the NQNs of the subsystems that discovery shows.
    fn discovered(&self) -> BTreeSet<String> {
        self.discovery().into_iter().map(|(nqn, _, _)| nqn).collect()
    }

    /// Returns what discovery shows to a host: NQNs, addresses, and port ids.
    fn discovery(&self) -> BTreeSet<(String, String, u16)> {
        self.discovery_of("a host")
    }

    fn discovery_of(&self, host: &str) -> BTreeSet<(String, String, u16)> {
        let subsystems = self.engine.fronts.nvme().subsystems();
        if subsystems.ports().is_empty() {
            subsystems.add_port(Port::new(1, vec![PortAddress::Tcp([10, 0, 0, 1].into(), 4420)]));
        }
        let (_, entries) = subsystems.discovery(&subsystems.ports()[0], host);
        let entries = entries.into_iter().filter(|entry| !entry.discovery);
        entries.map(|entry| (entry.nqn, entry.address, entry.port)).collect()
    }

    async fn kill(self) {
        // As if the process ended: nothing is said to the pool.
        self.group.leaving.set(true);
        if let Some(running) = self.group.running() {
            running.runner.client_fenced();
        }
        self.engine.close().await.expect("closed");
    }
}

fn exported(names: &GroupSettings, image: &str, fronts: &[(Front, Option<u32>)]) -> serde_json::Value {
    let export = |(front, unit): &(Front, Option<u32>)| {
        let mut export = AttachRequest { unit: *unit, ..AttachRequest::new("rbd", image, *front) };
        match front {
            Front::Nbd | Front::Vhost => {}
            Front::Nvme => export.subsystem = Some(names.nqn.clone()),
            Front::Iscsi => export.target = Some(names.target.clone()),
        }
        export
    };
    settings::write(&VolumeSettings {
        identity: identity(image),
        exports: fronts.iter().map(export).collect(),
        ..VolumeSettings::default()
    })
}

const ALL: [(Front, Option<u32>); 3] = [(Front::Nbd, None), (Front::Nvme, Some(1)), (Front::Iscsi, Some(0))];

fn run(test: impl Future<Output = ()>) {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(test);
}

fn stored(dir: &Path) -> StoredMembership {
    Gateways::new(dir).stored().expect("readable")
}

#[test]
fn hosts_find_the_group_before_it_has_been_joined_again() {
    run(async {
        let world = World::new(&["a"]).await;
        let GroupSettings { nqn, target, .. } = &world.names;
        let member = world.start().await;
        assert_eq!((member.is_held(nqn), member.login(target)), (None, Err(Denied::Expected)), "the first join");
        assert!(member.engine.fronts.nvme().subsystems().is_expecting());
        assert!(member.discovered().is_empty(), "the daemon's own subsystem has nothing to show");
        member.join().await;
        eventually("hosts are admitted", || member.is_held(nqn) == Some(false)).await;
        assert_eq!((member.login(target), member.login("iqn.2000-01.other:1")), (Ok(()), Err(Denied::NotFound)));
        assert!(!member.engine.fronts.nvme().subsystems().is_expecting());
        let owner = member.group.own;
        let settings = exported(&world.names, "a", &ALL);
        world.change(&[GroupChange::AddVolume { volume: volume("a"), owner, settings }]).await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        eventually("all fronts", || member.published("a").len() == 3).await;
        let names = stored(world.dir.path()).names.expect("kept");
        assert_eq!((&names.group, &names.nqn, &names.target, names.slot), (&"rbd/gw".to_owned(), nqn, target, 0));
        member.kill().await;

        // The same names at once, and no host before its volumes are there.
        let member = world.start().await;
        assert_eq!((member.is_held(nqn), member.login(target)), (Some(true), Err(Denied::Suspended)));
        assert_eq!(member.discovered(), BTreeSet::from([nqn.clone()]));
        assert_eq!(member.login("iqn.2000-01.other:1"), Err(Denied::NotFound));
        member.join().await;
        eventually("hosts would be admitted", || member.group.serves_hosts()).await;
        assert_eq!((member.is_held(nqn), member.login(target)), (Some(true), Err(Denied::Suspended)));
        member.open("a").await;
        eventually("hosts are admitted", || member.is_held(nqn) == Some(false)).await;
        assert_eq!((member.published("a").len(), member.login(target)), (3, Ok(())));
        member.kill().await;

        // Hosts do not wait for a volume that no owner opens.
        let member = world.start().await;
        member.join().await;
        member.group.open_paths_in(Duration::from_millis(1));
        eventually("hosts are admitted all the same", || member.is_held(nqn) == Some(false)).await;
        assert_eq!(member.login(target), Ok(()));
        member.kill().await;
    });
}

#[test]
fn names_that_the_record_no_longer_has_are_replaced() {
    run(async {
        let world = World::new(&[]).await;
        let GroupSettings { nqn, target, .. } = &world.names;
        // Files of versions that kept no names are read.
        std::fs::write(world.dir.path().join("gateway-group.json"), r#"{"group":"rbd/gw"}"#).expect("written");
        assert_eq!(stored(world.dir.path()).group.as_deref(), Some("rbd/gw"));
        let cached = |slot| {
            let names =
                json!({"group": "rbd/gw", "nqn": "nqn.2000-01.org.old", "target": "iqn.2000-01.org:old", "slot": slot});
            let content = json!({"group": "rbd/gw", "names": names}).to_string();
            std::fs::write(world.dir.path().join("gateway-group.json"), content).expect("written");
        };
        // No member has such a slot.
        cached(200);
        let member = world.start().await;
        assert_eq!(member.login(target), Err(Denied::Expected));
        member.kill().await;
        cached(7);
        let member = world.start().await;
        assert_eq!((member.is_held("nqn.2000-01.org.old"), member.is_held(nqn)), (Some(true), None));
        assert_eq!(member.login("iqn.2000-01.org:old"), Err(Denied::Suspended));
        member.join().await;
        eventually("hosts are admitted", || member.is_held(nqn) == Some(false)).await;
        assert_eq!(member.is_held("nqn.2000-01.org.old"), None);
        eventually("the former target ends", || member.login("iqn.2000-01.org:old") == Err(Denied::NotFound)).await;
        assert_eq!(stored(world.dir.path()).names.expect("kept").slot, 0);
        member.engine.leave_gateway_group().await.expect("the only member");
        assert_eq!((member.is_held(nqn), member.login(target)), (None, Err(Denied::NotFound)));
        assert!(stored(world.dir.path()).names.is_none() && !member.discovered().is_empty());
        member.kill().await;
    });
}

#[test]
fn hosts_that_the_record_lists_are_admitted() {
    run(async {
        let world = World::new(&[]).await;
        let GroupSettings { nqn, target, .. } = &world.names;
        let member = world.start().await;
        member.join().await;
        eventually("hosts are admitted", || member.is_held(nqn) == Some(false)).await;
        let host = |name: &str| NvmeHost { nqn: format!("nqn.2000-01.org.host:{name}"), ..NvmeHost::default() };
        let finds = |member: &Member, name: &str| {
            member.discovery_of(&host(name).nqn).into_iter().any(|(found, _, _)| found == *nqn)
        };
        let policy = |source| GatewayGroupPolicy { rebalance: None, hosts: Some(source) };
        let engine = &member.engine;
        let listed = |member: &Member| {
            let all = member.engine.list_nvme_subsystems();
            let own = all.into_iter().find(|each| each.nqn == *nqn).expect("the group's");
            own.hosts.into_iter().map(|host| host.nqn).collect::<Vec<_>>()
        };

        let refused = engine.set_gateway_policy(&policy(GatewayHostSource::Group)).await.expect_err("no host");
        assert_eq!(refused.kind, FailureKind::Invalid, "{refused}");
        let unreadable = NvmeHost { secret: Some("/nowhere/secret".into()), ..host("c") };
        engine.allow_nvme_host(Some(nqn), unreadable.clone()).await.expect_err("no such file here");
        assert_eq!(
            engine.deny_nvme_host(Some(nqn), &host("a").nqn).await.expect_err("not listed").kind,
            FailureKind::NotFound
        );
        engine.allow_nvme_host(Some(nqn), host("a")).await.expect("listed");
        engine.allow_initiator(Some(target), "iqn.2000-01.org.host:2").await.expect("listed");
        assert!(finds(&member, "b") && member.login(target) == Ok(()), "lists that do not count yet");
        // Neither the list of the group nor that of the daemon's own subsystem is shown before it counts.
        let shown = engine.list_nvme_subsystems();
        let shown: Vec<_> = shown.iter().map(|each| (each.nqn == *nqn, each.is_default, each.any_host)).collect();
        assert_eq!((shown, listed(&member)), (vec![(false, true, true), (true, false, true)], Vec::new()));

        engine.set_gateway_policy(&policy(GatewayHostSource::Group)).await.expect("they count");
        eventually("the others are not admitted", || !finds(&member, "b")).await;
        assert!(finds(&member, "a"));
        assert_eq!((listed(&member), member.login(target)), (vec![host("a").nqn], Err(Denied::Forbidden)));
        engine.allow_initiator(Some(&target.to_ascii_uppercase()), "iqn.2000-01.org.host:1").await.expect("listed");
        eventually("the initiator is admitted", || member.login(target) == Ok(())).await;
        let refused = [engine.remove_nvme_subsystem(nqn).await, engine.remove_iscsi_target(target).await];
        assert_eq!(refused.map(|each| each.expect_err("the group's own").kind), [FailureKind::Invalid; 2]);

        // Another member lists hosts, one of which has a secret that is not here.
        let record = member.group.record().expect("known");
        let mut settings = GroupSettings::of(record.identity()).expect("of this version");
        settings.hosts.nvme = vec![unreadable, host("d")];
        world.change(&[GroupChange::SetSettings(settings::write(&settings))]).await;
        eventually("the list is followed", || finds(&member, "d")).await;
        assert!(!finds(&member, "a") && !finds(&member, "c"));
        assert_eq!(listed(&member), [host("c").nqn, host("d").nqn]);
        member.kill().await;

        // A member that starts knows them before it has read the record.
        let member = world.start().await;
        assert!(finds(&member, "d") && !finds(&member, "a") && !finds(&member, "c"));
        assert_eq!(member.is_held(nqn), Some(true));
        member.join().await;
        eventually("hosts are admitted", || member.is_held(nqn) == Some(false)).await;
        member.engine.deny_nvme_host(Some(nqn), &host("d").nqn).await.expect("it was listed");
        eventually("it is not admitted any more", || !finds(&member, "d")).await;
        member.engine.set_gateway_policy(&policy(GatewayHostSource::Members)).await.expect("as before");
        eventually("the configuration counts", || finds(&member, "a")).await;
        assert_eq!(member.login(target), Ok(()));
        member.kill().await;
    });
}

#[test]
fn an_export_that_is_ending_does_not_hold_up_the_others() {
    run(async {
        let world = World::new(&["a"]).await;
        let member = world.start().await;
        member.join().await;
        let (owner, settings) = (member.group.own, exported(&world.names, "a", &ALL));
        world.change(&[GroupChange::AddVolume { volume: volume("a"), owner, settings }]).await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        eventually("all fronts", || member.published("a").len() == 3).await;

        let host = MemberHost { group: member.group.clone() };
        host.admit_hosts(false);
        eventually("no hosts", || member.published("a").is_empty()).await;
        assert!(member.group.exports.is_suspended(&volume("a"), Front::Nvme));
        // A connection over NBD has a request in flight.
        let ending = (volume("a"), Front::Nbd);
        member.group.exports.ending.borrow_mut().insert(ending.clone());
        host.admit_hosts(true);
        eventually("the others", || member.published("a") == [Front::Nvme, Front::Iscsi]).await;
        assert_eq!(member.login(&world.names.target), Ok(()));
        member.group.exports.ending.borrow_mut().remove(&ending);
        member.group.exports.reconcile(&member.group);
        eventually("all of them", || member.published("a").len() == 3).await;
        member.kill().await;
    });
}

#[test]
fn numbers_may_be_exchanged_in_one_change() {
    run(async {
        let world = World::new(&["a", "b"]).await;
        let member = world.start().await;
        member.join().await;
        let owner = member.group.own;
        let settings = |image, nsid| exported(&world.names, image, &[(Front::Nvme, Some(nsid))]);
        let add =
            |image, nsid| GroupChange::AddVolume { volume: volume(image), owner, settings: settings(image, nsid) };
        world.change(&[add("a", 1), add("b", 2)]).await;
        eventually("the record is read", || member.group.settings.all().len() == 2).await;
        member.open("a").await;
        member.open("b").await;
        let subsystem = member.engine.fronts.nvme().subsystem(Some(&world.names.nqn)).expect("the group's");
        let names = || [1, 2].map(|nsid| subsystem.namespace(nsid).map(|namespace| namespace.name.clone()));
        let named = |first: &str, second: &str| [Some(format!("rbd/{first}")), Some(format!("rbd/{second}"))];
        eventually("both", || names() == named("a", "b")).await;
        let set = |image, nsid| GroupChange::SetVolume { volume: volume(image), settings: settings(image, nsid) };
        world.change(&[set("a", 2), set("b", 1)]).await;
        eventually("both have the other's number", || names() == named("b", "a")).await;
        member.kill().await;
    });
}

#[test]
fn a_member_that_cannot_leave_goes_on() {
    run(async {
        let world = World::new(&["a"]).await;
        let member = world.start().await;
        member.join().await;
        let own = member.group.own;
        let first = member.group.running().expect("it runs").runner.inspect(|machine| machine.start());
        // No other member could have the volume: the only copy of its log is here.
        let settings = exported(&world.names, "a", &[(Front::Nvme, Some(1))]);
        world
            .change(&[
                GroupChange::AddVolume { volume: volume("a"), owner: own, settings },
                GroupChange::SetCopies { volume: volume("a"), owner: own, copies: Some(BTreeSet::from([own])) },
                member.join_other(&MemberSettings::default()),
            ])
            .await;
        let failure = member.engine.leave_gateway_group().await.expect_err("it owns a volume");
        assert_eq!(failure.kind, FailureKind::Busy, "{failure}");
        let start = || member.group.running().map(|running| running.runner.inspect(|machine| machine.start()));
        eventually("it is a member again", || member.serves() && start() != Some(first)).await;
        member.engine.join_gateway_group(&spec()).await.expect("it is one already");
        member.kill().await;
    });
}

#[test]
fn hosts_are_told_only_of_addresses_that_lead_to_one_member() {
    run(async {
        // Nobody is fenced meanwhile.
        let world = World::with_lease(60_000, &["a"]).await;
        let member = world.start().await;
        assert!(member.discovered().is_empty(), "and the port 10.0.0.1:4420 is there from now on");
        member.join().await;
        let port = |addr: &str, id| MemberNvmePort { addr: addr.into(), id, tls: false };
        let nvme = vec![port("10.0.0.1:4420", 1), port("10.0.0.9:4420", 2)];
        let iscsi = (1..=1025).map(|number| format!("10.0.0.9:{number}")).collect();
        let (owner, settings) = (member.group.own, exported(&world.names, "a", &ALL));
        let join = member.join_other(&MemberSettings { nvme, iscsi, ..MemberSettings::default() });
        world.change(&[join, GroupChange::AddVolume { volume: volume("a"), owner, settings }]).await;
        eventually("the record is read", || !member.group.settings.all().is_empty()).await;
        member.open("a").await;
        // More portals than hosts can be told of: the other fronts go on.
        eventually("NBD and NVMe", || member.published("a") == [Front::Nbd, Front::Nvme]).await;
        let failure = member.group.exports.failure(&volume("a"), Front::Iscsi).expect("the reason");
        assert_eq!(failure.kind, FailureKind::NoSpace);
        assert!(failure.message.contains("1025 portals") && failure.message.contains("1024"), "{failure}");
        let entry = |address: &str, port| (world.names.nqn.clone(), address.to_owned(), port);
        assert_eq!(member.discovery(), BTreeSet::from([entry("10.0.0.1", 1), entry("10.0.0.9", 66)]));
        member.kill().await;
    });
}
