use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::task::{Context, Waker};

use proptest::prelude::*;
use zerocopy::FromZeros;

use super::*;
use crate::AddError;
use crate::scsi::inquiry::UnitIdentity;
use crate::scsi::unit::UnitSpec;
use crate::session::login::{Login, LoginAction, SEED_LEN};
use crate::session::params::{Offer, Params};
use crate::session::text;
use crate::signal::Stop;
use crate::target::AccessControl;
use crate::wire::{FINAL, LoginRequest};

fn initiator(number: u8) -> String {
    format!("iqn.2000-01.org.host:{number}")
}

fn name(number: u8) -> String {
    format!("iqn.2000-01.org.disks:{number}")
}

/// Builds a login ACL from a bit mask of initiators; 0 admits all.
fn access(bits: u8) -> AccessControl {
    AccessControl { initiators: (0..4).filter(|bit| bits & 1 << bit != 0).map(initiator).collect(), chap: None }
}

fn spec(number: u8, bits: u8) -> TargetSpec {
    TargetSpec { name: name(number), access: access(bits), port_groups: None }
}

fn unit(number: u8) -> UnitSpec {
    UnitSpec {
        name: format!("local/{number}"),
        identity: UnitIdentity { uuid: [number; 16], revision: "1".into() },
        read_only: false,
        rotational: false,
        space: Default::default(),
        initiators: Vec::new(),
    }
}

fn login(target: Option<&Target>, host: u8, isid: u8) -> LoggedIn {
    LoggedIn {
        initiator: initiator(host),
        isid: [0x80, 0, 0, 0, 0, isid],
        target: target.map(|target| target.name().to_owned()),
        target_id: target.map_or(0, Target::id),
        params: Params::default(),
        cid: 0,
        cmd_sn: 1,
        stat_sn: 1,
    }
}

fn enter(targets: &Targets, target: Option<&Target>, host: u8, isid: u8) -> Result<SessionRegistration, RegisterError> {
    let login = login(target, host, isid);
    targets.0.catalog.sessions.enter(&login, target, &targets.0.limits, "peer", Duration::ZERO)
}

fn is_over(ending: &mut TargetTeardown) -> bool {
    pin!(ending).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Returns the status of a login in one request, and its session if it succeeds.
fn status(targets: &Targets, pairs: &[(&str, &str)]) -> (u16, Option<LoggedIn>) {
    let mut request = LoginRequest::new_zeroed();
    request.flags = FINAL | 1 << 2 | 3;
    let mut data = Vec::new();
    pairs.iter().for_each(|(key, value)| text::push(&mut data, key, value));
    let step = Login::new(Offer::default(), [5; SEED_LEN]).request(&request, &data, targets);
    match step.action {
        LoginAction::Session(session) => (step.response.status.get(), Some(*session)),
        _ => (step.response.status.get(), None),
    }
}

#[derive(Debug, Clone)]
enum Step {
    Create { target: u8, bits: u8 },
    Remove { target: u8 },
    Access { target: u8, bits: u8 },
    Add { target: u8, lun: u8, volume: u8 },
    Withdraw { target: u8, lun: u8 },
    Enter { target: Option<u8>, host: u8, isid: u8 },
    Leave { which: prop::sample::Index },
    Expel { target: u8, host: u8 },
    ExpelUnlisted { target: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let (target, host) = (0..4_u8, 0..4_u8);
    prop_oneof![
        2 => (target.clone(), 0..16_u8).prop_map(|(target, bits)| Step::Create { target, bits }),
        1 => target.clone().prop_map(|target| Step::Remove { target }),
        1 => (target.clone(), 0..16_u8).prop_map(|(target, bits)| Step::Access { target, bits }),
        3 => (target.clone(), 0..3_u8, 0..6_u8)
            .prop_map(|(target, lun, volume)| Step::Add { target, lun, volume }),
        1 => (target.clone(), 0..3_u8).prop_map(|(target, lun)| Step::Withdraw { target, lun }),
        6 => (prop::option::weighted(0.9, target.clone()), host.clone(), 0..2_u8)
            .prop_map(|(target, host, isid)| Step::Enter { target, host, isid }),
        3 => any::<prop::sample::Index>().prop_map(|which| Step::Leave { which }),
        1 => (target.clone(), host).prop_map(|(target, host)| Step::Expel { target, host }),
        1 => target.prop_map(|target| Step::ExpelUnlisted { target }),
    ]
}

/// Expected state of a target.
struct Expected {
    handle: Target,
    bits: u8,
    /// Volumes by LUN.
    units: BTreeMap<u8, u8>,
    /// Number of changes to the list of units.
    changes: u32,
}

struct Open {
    entered: SessionRegistration,
    target: Option<(u8, u64)>,
    host: u8,
    isid: u8,
    /// Expected stop reason of the session.
    stop: Stop,
}

/// Registry under test, next to its model.
struct Pair {
    targets: Targets,
    expected: BTreeMap<u8, Expected>,
    open: Vec<Open>,
    endings: Vec<(TargetTeardown, BTreeSet<u64>)>,
}

const LIMITS: TargetLimits = TargetLimits { sessions_max: 10, sessions_per_initiator: 4, memory_max: 1 };

fn admits(bits: u8, host: u8) -> bool {
    bits == 0 || bits & 1 << host != 0
}

impl Pair {
    fn new() -> Self {
        Self { targets: Targets::new(LIMITS), expected: BTreeMap::new(), open: Vec::new(), endings: Vec::new() }
    }

    /// Records that sessions are asked to log out.
    fn ending(&mut self, ending: TargetTeardown, id: u64, whose: impl Fn(&Open) -> bool) {
        let of_target = |open: &&mut Open| open.target.is_some_and(|(_, target)| target == id);
        let mut sessions = BTreeSet::new();
        for open in self.open.iter_mut().filter(of_target).filter(|open| whose(open)) {
            sessions.insert(open.entered.session().id);
            if open.stop == Stop::No {
                open.stop = Stop::Logout;
            }
        }
        assert_eq!(ending.sessions(), sessions.len(), "sessions that are ended");
        self.endings.push((ending, sessions));
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Create { target, bits } => {
                let created = self.targets.create(spec(target, bits));
                match self.expected.contains_key(&target) {
                    true => assert_eq!(created.map(drop), Err(Exists(name(target)))),
                    false => {
                        let handle = created.expect("the name is free");
                        let expected = Expected { handle, bits, units: BTreeMap::new(), changes: 0 };
                        self.expected.insert(target, expected);
                    }
                }
            }
            Step::Remove { target } => {
                let ending = self.targets.remove(&name(target).to_uppercase());
                assert_eq!(ending.is_some(), self.expected.contains_key(&target));
                if let (Some(ending), Some(gone)) = (ending, self.expected.remove(&target)) {
                    self.ending(ending, gone.handle.id(), |_| true);
                    assert!(gone.handle.is_removed());
                    let refused = gone.handle.add(0, unit(9)).map(drop);
                    assert_eq!(refused, Err(AddError::Removed(name(target))));
                    assert!(enter(&self.targets, Some(&gone.handle), 0, 9).is_err(), "a session with what is gone");
                }
            }
            Step::Access { target, bits } => {
                if let Some(expected) = self.expected.get_mut(&target) {
                    expected.bits = bits;
                    expected.handle.set_access(access(bits));
                }
            }
            Step::Add { target, lun, volume } => {
                let holder = self.expected.iter().find_map(|(&other, expected)| {
                    let at = expected.units.iter().find(|(_, found)| **found == volume);
                    at.map(|(&lun, _)| (other, lun))
                });
                let Some(expected) = self.expected.get_mut(&target) else { return };
                let added = expected.handle.add(lun.into(), unit(volume)).map(drop);
                match holder.filter(|holder| *holder != (target, lun)) {
                    Some((other, lun)) => {
                        let (name, target) = (unit(volume).name, name(other));
                        assert_eq!(added, Err(AddError::Exported { name, target, lun: lun.into() }));
                    }
                    None => {
                        assert_eq!(added, Ok(()));
                        expected.units.insert(lun, volume);
                        expected.changes += 1;
                    }
                }
            }
            Step::Withdraw { target, lun } => {
                let Some(expected) = self.expected.get_mut(&target) else { return };
                let was = expected.units.remove(&lun).is_some();
                expected.changes += u32::from(was);
                assert_eq!(expected.handle.remove(lun.into()).is_some(), was);
            }
            Step::Enter { target, host, isid } => self.enter(target, host, isid),
            Step::Leave { which } => {
                if !self.open.is_empty() {
                    drop(self.open.swap_remove(which.index(self.open.len())));
                }
            }
            Step::Expel { target, host } => {
                let ending = self.targets.expel(&name(target), &initiator(host));
                assert_eq!(ending.is_some(), self.expected.contains_key(&target));
                if let Some(ending) = ending {
                    self.ending(ending, self.expected[&target].handle.id(), |open| open.host == host);
                }
            }
            Step::ExpelUnlisted { target } => {
                let Some(expected) = self.expected.get(&target) else { return };
                let (ending, bits, id) = (expected.handle.expel_unlisted(), expected.bits, expected.handle.id());
                self.ending(ending, id, |open| !admits(bits, open.host));
            }
        }
    }

    fn enter(&mut self, target: Option<u8>, host: u8, isid: u8) {
        let handle = target.and_then(|target| self.expected.get(&target));
        if target.is_some() && handle.is_none() {
            return;
        }
        let handle = handle.map(|expected| (expected.handle.clone(), expected.bits));
        let id = handle.as_ref().map(|(handle, _)| (target.unwrap_or(0), handle.id()));
        let entered = enter(&self.targets, handle.as_ref().map(|(handle, _)| handle), host, isid);
        let same_kind = |open: &&Open| open.host == host && open.target.is_some() == target.is_some();
        let of_host = self.open.iter().filter(same_kind).count();
        let refused = |status: u16| match &entered {
            Err(RegisterError::Refused(found, _)) => assert_eq!(*found, status),
            Err(RegisterError::Replaces(_)) => panic!("it replaces one, and should be refused with {status:#x}"),
            Ok(_) => panic!("it should be refused with {status:#x}"),
        };
        if handle.as_ref().is_some_and(|(_, bits)| !admits(*bits, host)) {
            return refused(login_status::FORBIDDEN);
        }
        let port = |open: &&mut Open| open.target == id && open.host == host && open.isid == isid;
        if let Some(before) = self.open.iter_mut().find(port) {
            assert!(matches!(entered, Err(RegisterError::Replaces(_))), "the port has a session");
            if before.stop == Stop::No {
                before.stop = Stop::Reinstated;
            }
            return;
        }
        if self.open.len() >= LIMITS.sessions_max || of_host >= LIMITS.sessions_per_initiator {
            return refused(login_status::OUT_OF_RESOURCES);
        }
        let Ok(entered) = entered else { panic!("there is room for it") };
        let (session, number) = (entered.session(), entered.session().tsih);
        assert!(number != 0 && self.open.iter().all(|open| open.entered.session().tsih != number), "TSIH {number}");
        assert_eq!(session.target.as_ref().map(Target::id), id.map(|(_, id)| id));
        self.open.push(Open { entered, target: id, host, isid, stop: Stop::No });
    }

    fn check(&mut self) {
        let Self { targets, expected, open, endings } = self;
        let all: Vec<u64> = targets.all().iter().map(Target::id).collect();
        assert_eq!(all, expected.values().map(|expected| expected.handle.id()).collect::<Vec<_>>());
        for number in 0..4 {
            let found = targets.get(&name(number)).map(|target| target.id());
            assert_eq!(found, expected.get(&number).map(|expected| expected.handle.id()));
        }
        for host in 0..4 {
            let (mut listed, mut after) = (Vec::new(), None);
            while let Some(target) = targets.next_visible(after.as_deref(), &initiator(host)) {
                listed.push(target.id());
                after = Some(target.name().to_owned());
            }
            let visible = expected.values().filter(|expected| admits(expected.bits, host));
            assert_eq!(listed, visible.map(|expected| expected.handle.id()).collect::<Vec<_>>(), "discovery");
            assert_eq!(targets.discovery(&initiator(host)).is_ok(), !listed.is_empty());
            for number in 0..4 {
                let pairs = [("InitiatorName", initiator(host)), ("TargetName", name(number))];
                let (status, session) = status(targets, &pairs.each_ref().map(|(key, value)| (*key, value.as_str())));
                let wanted = match expected.get(&number) {
                    None => login_status::NOT_FOUND,
                    Some(expected) if !admits(expected.bits, host) => login_status::FORBIDDEN,
                    Some(_) => login_status::SUCCESS,
                };
                assert_eq!(status, wanted);
                let id = expected.get(&number).map(|expected| expected.handle.id());
                assert_eq!(session.map(|session| session.target_id), id.filter(|_| status == 0));
            }
        }
        for volume in 0..6 {
            let name = unit(volume).name;
            let holder = expected.iter().find_map(|(_, expected)| {
                let at = expected.units.iter().find(|(_, found)| **found == volume);
                at.map(|(&lun, _)| (expected.handle.id(), u16::from(lun)))
            });
            let found = targets.unit_by_name(&name);
            assert_eq!(found.map(|unit| (unit.target_id(), unit.lun())), holder, "{name}");
            for expected in expected.values() {
                let is_here = holder.is_some_and(|(target, _)| target == expected.handle.id());
                assert_eq!(expected.handle.unit_by_name(&name).is_some(), is_here);
            }
        }
        for expected in expected.values() {
            let luns = expected.handle.luns(&initiator(0));
            assert!(luns.into_iter().eq(expected.units.keys().map(|&lun| u16::from(lun))));
            assert_eq!(expected.handle.generation(), expected.changes, "changes that sessions are told of");
            let id = expected.handle.id();
            let of_target = open.iter().filter(|open| open.target.is_some_and(|(_, target)| target == id)).count();
            assert_eq!(expected.handle.session_count(), of_target);
            assert_eq!(expected.handle.sessions().len(), of_target);
        }
        assert_eq!(targets.session_count(), open.len());
        for open in &*open {
            assert_eq!(open.entered.session().signal.stopping(), open.stop);
            assert!(targets.has_session(open.entered.session().tsih));
        }
        let alive: BTreeSet<u64> = open.iter().map(|open| open.entered.session().id).collect();
        endings.retain_mut(|(ending, sessions)| {
            let over = sessions.is_disjoint(&alive);
            assert_eq!(is_over(ending), over, "an end is over when all its sessions are gone");
            !over
        });
    }
}

proptest! {
    #[test]
    fn a_registry_is_what_a_plain_model_is(steps in prop::collection::vec(step(), 1..80)) {
        let mut pair = Pair::new();
        for step in &steps {
            pair.apply(step);
            pair.check();
        }
        pair.open.clear();
        pair.check();
        prop_assert!(pair.endings.is_empty());
    }
}

#[test]
fn session_numbers_go_round_without_meeting() {
    let limits = TargetLimits { sessions_max: usize::MAX, sessions_per_initiator: usize::MAX, memory_max: 1 };
    let targets = Targets::new(limits);
    let one = targets.create(spec(1, 0)).expect("the first");
    let kept = enter(&targets, Some(&one), 0, 0).unwrap_or_else(|_| panic!("the first"));
    let (mut last, mut wrapped) = (kept.session().tsih, false);
    for _ in 0..70_000 {
        let next = enter(&targets, None, 1, 0).unwrap_or_else(|_| panic!("there is room"));
        let number = next.session().tsih;
        assert!(number != 0 && number != kept.session().tsih && number != last);
        wrapped |= number < last;
        last = number;
    }
    assert!(wrapped);
}

#[test]
fn a_target_that_is_expected_or_not_ready_yet_is_unavailable_for_now() {
    let targets = Targets::new(TargetLimits::default());
    let (other, wanted) = (initiator(0), name(1));
    let login = |targets: &Targets| status(targets, &[("InitiatorName", &other), ("TargetName", &wanted)]).0;
    assert_eq!(login(&targets), login_status::NOT_FOUND);
    targets.set_expecting(true);
    assert_eq!(login(&targets), login_status::UNAVAILABLE);
    let target = targets.create_suspended(spec(1, 0)).expect("a new name");
    targets.set_expecting(false);
    assert_eq!(login(&targets), login_status::UNAVAILABLE);
    target.resume();
    assert_eq!(login(&targets), login_status::SUCCESS);
    assert!(targets.remove(&wanted).is_some());
    assert_eq!(login(&targets), login_status::NOT_FOUND);
}

#[test]
fn an_empty_target_is_hidden_from_discovery_on_request() {
    let targets = Targets::new(TargetLimits::default());
    let target = targets.create(spec(1, 0)).expect("a new name");
    let listed = || targets.next_visible(None, &initiator(0)).is_some();
    assert!(listed());
    target.hide_empty(true);
    assert!(!listed());
    assert!(targets.discovery(&initiator(0)).is_ok(), "discovery itself is as before");
    drop(target.add(0, unit(1)).expect("added"));
    assert!(listed());
    drop(target.remove(0));
    assert!(!listed());
    target.hide_empty(false);
    assert!(listed());
}

#[test]
fn a_login_that_outlives_its_target_comes_to_nothing() {
    use forebay_sim::{Faults, World};
    let world = World::new(1, Faults::none());
    let run = world.run(&world.reactor(), async {
        let targets = Targets::new(TargetLimits::default());
        let before = targets.create(spec(1, 0)).expect("the first");
        // The login authenticated to this target only.
        let proven = login(Some(&before), 0, 0);
        let enter = async |login: &LoggedIn| targets.enter(login, "peer".into(), Duration::ZERO).await.map(drop);
        assert_eq!(enter(&proven).await, Ok(()));
        targets.remove(&name(1)).expect("is there").await;
        let gone = Err((login_status::NOT_FOUND, "the target has been removed"));
        assert_eq!(enter(&proven).await, gone);
        let mut closed = spec(1, 0);
        closed.access.initiators = vec![initiator(3)];
        let anew = targets.create(closed).expect("the name is free");
        assert_eq!(enter(&proven).await, gone, "another target of the name");
        // The ACL is checked when the session begins, regardless of its contents at the time of the login.
        let late = enter(&login(Some(&anew), 0, 0)).await;
        assert_eq!(late, Err((login_status::FORBIDDEN, "the initiator is not in the target's list")));
        assert_eq!(enter(&login(Some(&anew), 3, 0)).await, Ok(()));
    });
    run.unwrap_or_else(|stop| panic!("{stop}"));
}

#[test]
fn orphaned_tasks_keep_the_place_of_their_session() {
    let targets = Targets::new(TargetLimits { sessions_max: 2, ..LIMITS });
    let one = targets.create(spec(1, 0)).expect("the first");
    let session = |isid| enter(&targets, Some(&one), 0, isid);
    let Ok(first) = session(0) else { panic!("there is room") };
    let leaving = first.leave();
    assert_eq!((targets.session_count(), one.session_count()), (0, 0));
    let Ok(_second) = session(0) else { panic!("its port is free") };
    assert!(matches!(session(1), Err(RegisterError::Refused(login_status::OUT_OF_RESOURCES, _))));
    drop(leaving);
    assert!(session(1).is_ok());
}
