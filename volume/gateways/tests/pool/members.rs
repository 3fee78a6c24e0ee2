use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{ErrorKind, LocalFuture};
use forebay_gateways::runner::{GatewayHost, GatewayRunner};
use forebay_gateways::store::GroupStore;
use forebay_gateways::wire::GatewayMessage;
use forebay_gateways::{
    CloseReason, EndReason, GatewayMember, GatewayState, GatewayVolume, GroupChange, GroupPolicy, GroupRecord,
    GroupVersions, MemberId, OpenFailure, RequestLoad, VolumeLoads, VolumeName,
};
use forebay_ram::cluster::{RamClient, RamCluster};
use forebay_reactor::{sleep, spawn};

use crate::{entry, eventually, identity, member, run};

/// Group on the model of a cluster, whose members reach each other by function calls.
struct Group {
    cluster: RamCluster,
    pool: i64,
    running: RefCell<BTreeMap<MemberId, Running>>,
    /// Members that are cut off from the others.
    cut: RefCell<Vec<MemberId>>,
    starts: Cell<u8>,
}

struct Running {
    runner: Rc<GatewayRunner>,
    host: Rc<TestHost>,
    client: RamClient,
}

struct TestHost {
    own: MemberId,
    group: Weak<Group>,
    open: RefCell<BTreeMap<VolumeName, u64>>,
    loads: RefCell<Rc<VolumeLoads>>,
    admits: Cell<bool>,
    ended: Cell<Option<EndReason>>,
}

impl GatewayHost for TestHost {
    fn send(&self, to: MemberId, _: Option<&GatewayMember>, message: &GatewayMessage) {
        let Some(group) = self.group.upgrade() else { return };
        let cut = group.cut.borrow().iter().any(|id| *id == to || *id == self.own);
        let other = group.running.borrow().get(&to).map(|running| running.runner.clone());
        if let Some(other) = other.filter(|_| !cut) {
            let bytes = message.encode();
            drop(spawn(async move {
                other.message(GatewayMessage::decode(&bytes).expect("a message").expect("of this version"))
            }));
        }
    }

    fn open(&self, volume: &VolumeName, term: u64, _: &GatewayVolume) -> LocalFuture<Result<(), OpenFailure>> {
        let group = self.group.upgrade().expect("the group outlives its members");
        for (id, running) in &*group.running.borrow() {
            let fenced = group.cluster.blocklisted().contains(&running.client.address());
            let elsewhere = *id != self.own && running.host.open.borrow().contains_key(volume) && !fenced;
            assert!(!elsewhere, "{volume} is open at {id} as well");
        }
        self.open.borrow_mut().insert(volume.clone(), term);
        Box::pin(async { Ok(()) })
    }

    fn prepare(&self, _: &VolumeName, _: &GatewayVolume) -> LocalFuture<()> {
        Box::pin(async {})
    }

    fn unprepare(&self, _: &VolumeName) {}

    fn close(&self, volume: &VolumeName, _: CloseReason) -> LocalFuture<()> {
        self.open.borrow_mut().remove(volume);
        Box::pin(async {})
    }

    fn admit_hosts(&self, admitted: bool) {
        self.admits.set(admitted);
    }

    fn loads(&self) -> Rc<VolumeLoads> {
        self.loads.borrow().clone()
    }

    fn record_changed(&self, _: &Rc<GroupRecord>) {}

    fn ended(&self, reason: EndReason) {
        self.open.borrow_mut().clear();
        self.ended.set(Some(reason));
    }
}

impl Group {
    async fn of(members: u8, volumes: usize) -> Rc<Self> {
        let cluster = RamCluster::new(5, 10);
        let pool = cluster.add_pool("rbd");
        let group =
            Rc::new(Self { cluster, pool, running: RefCell::default(), cut: RefCell::default(), starts: Cell::new(0) });
        let store = group.store();
        store.create(identity()).await.expect("a group");
        for number in 1..=members {
            group.start(number).await;
        }
        eventually("all have joined", || group.serving() == usize::from(members)).await;
        for number in 0..volumes {
            let (volume, owner) = (VolumeName::new(format!("rbd/{number}")), member(1 + number as u8 % members));
            let add = GroupChange::AddVolume { volume, owner, settings: serde_json::Value::Null };
            store.change(&[add]).await.expect("the pool").expect("a new volume");
        }
        eventually("all is served", || group.served() == volumes).await;
        group
    }

    fn store(&self) -> Rc<GroupStore> {
        GroupStore::new(&self.cluster.client().pool(self.pool), "g").expect("a shared pool")
    }

    async fn start(self: &Rc<Self>, number: u8) {
        self.start_program(number, GroupVersions::OWN).await.expect("a start");
    }

    /// Starts a member whose program works with these versions of the record.
    async fn start_program(self: &Rc<Self>, number: u8, versions: GroupVersions) -> forebay_block::Result<()> {
        let client = self.cluster.client();
        let store = GroupStore::with_versions(&client.pool(self.pool), "g", versions).expect("a shared pool");
        self.starts.set(self.starts.get() + 1);
        let entry = GatewayMember { versions, ..entry(0, self.starts.get(), client.address()) };
        let own = member(number);
        let host = Rc::new(TestHost {
            own,
            group: Rc::downgrade(self),
            open: RefCell::default(),
            loads: RefCell::default(),
            admits: Cell::new(false),
            ended: Cell::default(),
        });
        let runner = GatewayRunner::start(store, host.clone(), own, entry).await?;
        self.running.borrow_mut().insert(own, Running { runner, host, client });
        Ok(())
    }

    /// Stops a member in order, and starts another program.
    async fn upgrade(self: &Rc<Self>, number: u8, versions: GroupVersions) {
        let runner = self.running.borrow()[&member(number)].runner.clone();
        runner.stop().await;
        self.kill(number);
        self.start_program(number, versions).await.expect("a start");
    }

    /// Kills a member: it does nothing any more, and its client is gone.
    fn kill(&self, number: u8) {
        let running = self.running.borrow_mut().remove(&member(number)).expect("running");
        running.client.die();
    }

    fn serving(&self) -> usize {
        let known =
            self.running.borrow().values().map(|running| running.runner.record()).max_by_key(|record| record.epoch());
        known.map_or(0, |record| record.members().values().filter(|entry| entry.state.serves()).count())
    }

    /// Returns the number of volumes that are open at members that admit hosts.
    fn served(&self) -> usize {
        self.running
            .borrow()
            .values()
            .filter(|running| running.host.admits.get())
            .map(|running| running.host.open.borrow().len())
            .sum()
    }
}

#[test]
fn the_volumes_of_a_killed_member_are_served_by_others() {
    run(async {
        let group = Group::of(3, 12).await;
        group.kill(2);
        eventually("others serve its volumes", || group.served() == 12 && group.serving() == 2).await;
        assert_eq!(group.cluster.blocklisted().len(), 1);
        group.start(2).await;
        eventually("it is back", || group.serving() == 3).await;
        assert_eq!(group.running.borrow()[&member(2)].host.open.borrow().len(), 0);
    });
}

#[test]
fn a_member_that_is_cut_off_is_fenced_and_joins_again() {
    run(async {
        let group = Group::of(3, 6).await;
        group.cut.borrow_mut().push(member(3));
        let host = group.running.borrow()[&member(3)].host.clone();
        eventually("it has ended", || host.ended.get() == Some(EndReason::Fenced)).await;
        eventually("others serve its volumes", || group.served() == 6).await;
        // As long as it hears nobody, it stays out: the others live.
        group.start(3).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(group.serving(), 2);
        group.cut.borrow_mut().clear();
        eventually("it is back", || group.serving() == 3).await;
        assert_eq!(group.served(), 6);
    });
}

#[test]
fn a_member_is_drained_and_stops() {
    run(async {
        let group = Group::of(3, 12).await;
        let store = group.store();
        let drain = GroupChange::Drain { member: member(1), drain: true };
        store.change(&[drain]).await.unwrap().unwrap();
        let host = group.running.borrow()[&member(1)].host.clone();
        eventually("it is empty", || host.open.borrow().is_empty() && group.served() == 12).await;
        let runner = group.running.borrow()[&member(2)].runner.clone();
        runner.stop().await;
        let host = group.running.borrow()[&member(2)].host.clone();
        assert_eq!(host.ended.get(), Some(EndReason::Stopped));
        eventually("the last one has all", || group.running.borrow()[&member(3)].host.open.borrow().len() == 12).await;
        assert!(group.cluster.blocklisted().is_empty(), "nobody was fenced");
        let record = store.load().await.unwrap();
        assert_eq!(record.member(member(2)).unwrap().state, GatewayState::Out(member(2)));
    });
}

#[test]
fn loads_of_volumes_are_told_and_asked_for() {
    run(async {
        let group = Group::of(2, 6).await;
        let runner = group.running.borrow()[&member(1)].runner.clone();
        let loads = |id: u8| -> Rc<VolumeLoads> {
            let running = group.running.borrow();
            let names: Vec<VolumeName> = running[&member(id)].host.open.borrow().keys().cloned().collect();
            Rc::new(names.into_iter().map(|name| (name, RequestLoad { requests: 100, kib: 10 })).collect())
        };
        let told = loads(2);
        assert_eq!(told.len(), 3);
        group.running.borrow()[&member(2)].host.loads.replace(told.clone());
        let said = |id: u8| runner.inspect(|machine| machine.group_loads().members.get(&member(id)).copied());
        eventually("the sum is said in heartbeats", || said(2) == Some(RequestLoad { requests: 300, kib: 30 })).await;
        assert!(!runner.inspect(|machine| machine.has_told_loads(member(2))));
        runner.ask_loads();
        eventually("it has told", || runner.inspect(|machine| machine.has_told_loads(member(2)))).await;
        assert_eq!(runner.inspect(|machine| machine.group_loads().volumes[&member(2)].clone()), told);
        // A start that follows says other loads, which count at once.
        group.kill(2);
        group.start(2).await;
        eventually("it has its volumes again", || group.served() == 6 && said(2) == Some(RequestLoad::default())).await;
    });
}

#[test]
fn volumes_move_by_themselves_where_the_policy_says_so() {
    run(async {
        let group = Group::of(2, 6).await;
        for running in group.running.borrow().values() {
            running.runner.set_settle_time(Duration::from_secs(1));
        }
        let busy = group.running.borrow()[&member(1)].host.clone();
        let names: Vec<VolumeName> = busy.open.borrow().keys().cloned().collect();
        let load = |requests| RequestLoad { requests, kib: 0 };
        busy.loads.replace(Rc::new(names.iter().map(|name| (name.clone(), load(1000))).collect()));
        let store = group.store();
        let policy = GroupPolicy { rebalance: true, ..store.load().await.unwrap().policy() };
        store.change(&[GroupChange::SetPolicy(policy)]).await.unwrap().unwrap();
        eventually("the other one has more", || group.running.borrow()[&member(2)].host.open.borrow().len() > 3).await;
        eventually("all is served", || group.served() == 6).await;
        assert!(group.cluster.blocklisted().is_empty());
    });
}

#[test]
fn a_member_that_is_started_again_fences_its_former_client_and_keeps_its_volumes() {
    run(async {
        let group = Group::of(2, 6).await;
        let former = group.running.borrow()[&member(1)].client.address();
        group.kill(1);
        group.start(1).await;
        eventually("it serves again", || group.served() == 6).await;
        assert_eq!(group.cluster.blocklisted(), [former]);
        assert_eq!(group.running.borrow()[&member(1)].host.open.borrow().len(), 3);
    });
}

#[test]
fn members_are_upgraded_one_after_the_other() {
    run(async {
        let group = Group::of(3, 12).await;
        let version =
            || group.running.borrow().values().map(|running| running.runner.record().version()).collect::<Vec<_>>();
        let next = GroupVersions { oldest: 1, newest: 2 };
        for number in 1..=2 {
            group.upgrade(number, next).await;
            eventually("it is back", || group.serving() == 3 && group.served() == 12).await;
            assert_eq!(version(), [1; 3], "a member of the former version is left");
        }
        group.upgrade(3, next).await;
        eventually("all work with the next version", || group.served() == 12 && version() == [2; 3]).await;
        assert!(group.cluster.blocklisted().is_empty(), "nobody was fenced");
        // Programs of the former version know no way back.
        group.kill(3);
        let refused = group.start_program(3, GroupVersions::OWN).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("has version 2; this program works with version 1"), "{refused}");
        group.start_program(3, GroupVersions { oldest: 2, newest: 3 }).await.expect("one version apart");
        eventually("all is served again", || group.serving() == 3 && group.served() == 12).await;
        assert_eq!(version(), [2; 3]);
    });
}
