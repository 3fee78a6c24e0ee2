use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::ids::{GatewayGroupId, StartId};
use crate::record::{GatewayMember, GroupIdentity, GroupPolicy};

fn id(number: u8) -> MemberId {
    MemberId([number; 16])
}

fn volume(number: usize) -> VolumeName {
    VolumeName::new(format!("rbd/{number:04}"))
}

/// Returns a group with members of these weights, the first of which owns all volumes.
fn group(weights: &[u32], volumes: usize) -> GroupRecord {
    let identity = GroupIdentity::new(GatewayGroupId([1; 16]), GroupPolicy::default(), serde_json::Value::Null);
    let mut record = GroupRecord::created(identity, 1);
    for (at, weight) in weights.iter().enumerate() {
        let entry = GatewayMember { slot: at as u16, weight: *weight, ..GatewayMember::new(StartId([1; 16])) };
        record.apply(&[GroupChange::Join { member: id(at as u8), entry }]).unwrap();
    }
    let add =
        |number| GroupChange::AddVolume { volume: volume(number), owner: id(0), settings: serde_json::Value::Null };
    record.apply(&(0..volumes).map(add).collect::<Vec<_>>()).unwrap();
    record
}

fn fail(record: &mut GroupRecord, member: u8, by: u8) {
    let (member, start, by) = (id(member), StartId([1; 16]), id(by));
    let begin = GroupChange::BeginFencing { member, start, by };
    record.apply(&[begin, GroupChange::Fenced { member, start, by }]).unwrap();
}

fn counts(record: &GroupRecord, members: u8) -> Vec<usize> {
    (0..members).map(|number| record.owned_count(id(number))).collect()
}

/// Returns what members say where volume `n` has `requests[n]` requests a second; volumes are known if `told` is set.
fn loads(record: &GroupRecord, requests: &[u32], told: bool) -> GroupLoads {
    let mut loads = GroupLoads::default();
    for id in record.members().keys() {
        let load = |name: &VolumeName| {
            let number: usize = name.as_str()["rbd/".len()..].parse().unwrap();
            RequestLoad { requests: requests[number], kib: 0 }
        };
        let owned: crate::load::VolumeLoads = record.owned_by(*id).map(|name| (name.clone(), load(name))).collect();
        let total = owned.values().fold(RequestLoad::default(), |mut total, load| {
            total.add(*load);
            total
        });
        loads.members.insert(*id, total);
        if told {
            loads.volumes.insert(*id, Rc::new(owned));
        }
    }
    loads
}

/// Makes moves, whose next owners take the volumes at once.
fn make(record: &mut GroupRecord, moves: &[GroupChange]) {
    record.apply(moves).unwrap();
    for change in moves {
        let GroupChange::ProposeMove { volume, to } = change else { unreachable!() };
        let owner = record.volume(volume).unwrap().owner;
        let (from, start, term) = (owner.member, StartId([1; 16]), owner.term);
        record.apply(&[GroupChange::HandOver { volume: volume.clone(), from, start, term, to: *to }]).unwrap();
    }
}

/// Returns the cost of each member's volumes for each 100 of its weight.
fn scores(record: &GroupRecord, requests: &[u32]) -> Vec<u64> {
    let loads = loads(record, requests, true);
    let plan = LoadPlan::new(record, &loads);
    record.members().keys().map(|id| plan.score(*id)).collect()
}

#[test]
fn lost_volumes_are_spread_by_weight_and_by_load() {
    let mut record = group(&[100, 100, 200, 100], 80);
    fail(&mut record, 0, 1);
    let mut weighted = record.clone();
    let changes = LoadPlan::new(&weighted, &GroupLoads::default()).assign_lost(id(0), 1000);
    weighted.apply(&changes).unwrap();
    assert_eq!(counts(&weighted, 4), [0, 20, 40, 20]);
    // A member that is as busy as all volumes together make one gets few.
    let mut loads = GroupLoads::default();
    loads.members.insert(id(3), RequestLoad { requests: 2000, kib: 0 });
    loads.members.insert(id(0), RequestLoad { requests: 800, kib: 0 });
    let changes = LoadPlan::new(&record, &loads).assign_lost(id(0), 1000);
    record.apply(&changes).unwrap();
    assert_eq!(record.owned_count(id(3)), 0);
    assert_eq!(record.owned_count(id(1)) + record.owned_count(id(2)), 80);
}

#[test]
fn requests_and_bytes_are_loads() {
    assert_eq!(RequestLoad { requests: 3, kib: 0 }.cost(), RequestLoad { requests: 1, kib: 64 }.cost());
    let most = RequestLoad { requests: u32::MAX, kib: u32::MAX };
    let mut both = most;
    both.add(most);
    assert_eq!(both, most);
}

#[test]
fn a_new_volume_goes_where_least_load_is_and_stays_at_home_among_equals() {
    let mut record = group(&[100; 3], 0);
    let none = GroupLoads::default();
    assert_eq!(LoadPlan::new(&record, &none).choose(None, Some(id(1))), Some(id(1)));
    assert_eq!(LoadPlan::new(&record, &none).choose(None, None), Some(id(0)));
    let mut busy = GroupLoads::default();
    busy.members.insert(id(1), RequestLoad { requests: 0, kib: 1000 });
    assert_eq!(LoadPlan::new(&record, &busy).choose(None, Some(id(1))), Some(id(0)));
    let mut plan = LoadPlan::new(&record, &none);
    let owners: Vec<_> = (0..6).map(|_| plan.choose(None, Some(id(2))).unwrap()).collect();
    assert_eq!(owners, [id(2), id(0), id(1), id(2), id(0), id(1)], "each one counts");
    record.apply(&[GroupChange::SetWeight { member: id(2), weight: 0 }]).unwrap();
    assert_eq!(LoadPlan::new(&record, &none).choose(None, Some(id(2))), Some(id(0)), "it takes none");
    fail(&mut record, 0, 1);
    fail(&mut record, 1, 2);
    assert_eq!(LoadPlan::new(&record, &none).choose(None, None), Some(id(2)), "but if it is the only one");
}

#[test]
fn lost_volumes_count_as_what_their_owner_has_said() {
    let mut record = group(&[100; 3], 10);
    // All but nothing is known of the volumes; the lost member had 1000 requests a second.
    let requests = vec![100; 10];
    let said = loads(&record, &requests, false);
    fail(&mut record, 0, 1);
    let plan = LoadPlan::new(&record, &said);
    assert_eq!(plan.load_of(&volume(3)), 100 * KIB_PER_REQUEST);
    // One that is known counts as itself, and the others as the rest.
    let mut known = said.clone();
    let one = BTreeMap::from([(volume(0), RequestLoad { requests: 910, kib: 0 })]);
    known.volumes.insert(id(0), Rc::new(one));
    let plan = LoadPlan::new(&record, &known);
    assert_eq!(plan.load_of(&volume(0)), 910 * KIB_PER_REQUEST);
    assert_eq!(plan.load_of(&volume(3)), 10 * KIB_PER_REQUEST);
    // Where nobody has said anything, all are alike.
    let nothing = GroupLoads::default();
    assert_eq!(LoadPlan::new(&record, &nothing).load_of(&volume(3)), 0);
}

#[test]
fn the_volume_that_fits_is_moved() {
    let record = group(&[100, 100], 4);
    // 1600 in all: the one with 700 leaves 900 and 700.
    let loads = loads(&record, &[1000, 700, 200, 1], true);
    let moves = LoadPlan::new(&record, &loads).rebalance(100);
    assert_eq!(moves[0], GroupChange::ProposeMove { volume: volume(0), to: id(1) });
    assert_eq!(moves.len(), 1, "900 and 1000, with which nothing else is better: {moves:?}");
}

#[test]
fn a_volume_that_is_all_of_the_load_stays_and_so_do_idle_ones() {
    let mut record = group(&[100, 100], 40);
    let mut requests = vec![0; 40];
    requests[7] = 50_000;
    let half: Vec<_> = (20..40).map(|at| GroupChange::ProposeMove { volume: volume(at), to: id(1) }).collect();
    make(&mut record, &half);
    let loads = loads(&record, &requests, true);
    assert_eq!(LoadPlan::new(&record, &loads).rebalance(100), [], "neither can change much");
}

#[test]
fn what_is_on_its_way_counts_where_it_goes() {
    let mut record = group(&[100, 100], 4);
    let requests = [100; 4];
    let both = [0, 1].map(|at| GroupChange::ProposeMove { volume: volume(at), to: id(1) });
    record.apply(&both).unwrap();
    let loads = loads(&record, &requests, true);
    let mut plan = LoadPlan::new(&record, &loads);
    assert_eq!(plan.score(id(0)), plan.score(id(1)));
    assert_eq!(plan.rebalance(10), []);
    assert_eq!(moving_from(&record, id(0)), 2);
}

#[test]
fn a_member_with_the_weight_0_gives_its_volumes_away() {
    let mut record = group(&[0, 100, 300], 40);
    let requests = vec![100; 40];
    let moves = LoadPlan::new(&record, &loads(&record, &requests, true)).rebalance(100);
    make(&mut record, &moves);
    assert_eq!(counts(&record, 3), [0, 10, 30]);
    assert_eq!(LoadPlan::new(&record, &loads(&record, &requests, true)).rebalance(100), []);
}

#[test]
fn overload_is_a_third_more_than_the_least_and_not_little() {
    let rank = |requests: &[u32]| {
        // Volume `n` at member `n`.
        let mut record = group(&vec![100; requests.len()], requests.len());
        let spread: Vec<_> =
            (1..requests.len()).map(|at| GroupChange::ProposeMove { volume: volume(at), to: id(at as u8) }).collect();
        make(&mut record, &spread);
        let loads = loads(&record, requests, true);
        let plan = LoadPlan::new(&record, &loads);
        (0..requests.len()).map(|at| plan.overload_rank(id(at as u8))).collect::<Vec<_>>()
    };
    assert_eq!(rank(&[1000, 1000, 900]), [None; 3]);
    assert_eq!(rank(&[1000, 1000, 700]), [Some(0), Some(0), None]);
    assert_eq!(rank(&[1000, 2000, 700]), [None, Some(0), None]);
    assert_eq!(rank(&[1900, 2000, 700]), [Some(1), Some(0), None]);
    assert_eq!(rank(&[90, 0]), [None; 2], "not worth a pause of any volume");
    assert_eq!(rank(&[90_000]), [None], "nobody else is there");
}

proptest! {
    #[test]
    fn rebalancing_ends_and_leaves_members_alike(volumes in 0..60_usize, members in 2..6_usize, told: bool) {
        let mut record = group(&vec![100; members], volumes);
        let requests = vec![50; volumes];
        for _ in 0..100 {
            let moves = LoadPlan::new(&record, &loads(&record, &requests, told)).rebalance(4);
            if moves.is_empty() {
                break;
            }
            make(&mut record, &moves);
        }
        prop_assert!(LoadPlan::new(&record, &loads(&record, &requests, told)).rebalance(1).is_empty());
        let counts = counts(&record, members as u8);
        let (most, least) = (counts.iter().max().unwrap(), counts.iter().min().unwrap());
        prop_assert!(most - least <= 1 + most / 10 + 1, "{:?}", counts);
    }

    /// Moves end, are bounded, never make the highest score higher, and leave no member that could give a fitting volume.
    #[test]
    fn any_loads_are_rebalanced_in_bounded_moves(
        requests in prop::collection::vec(prop_oneof![0..10_u32, 0..1000_u32, 0..30_000_u32], 0..80),
        weights in prop::collection::vec(prop_oneof![Just(100_u32), 0..300_u32], 2..7),
        owners in prop::collection::vec(0..7_u8, 80),
    ) {
        let mut record = group(&weights, requests.len());
        let spread: Vec<_> = (0..requests.len())
            .map(|at| (at, owners[at] % weights.len() as u8))
            .filter(|(_, owner)| *owner != 0)
            .map(|(at, owner)| GroupChange::ProposeMove { volume: volume(at), to: id(owner) })
            .collect();
        make(&mut record, &spread);
        let mut all = 0;
        loop {
            let before = scores(&record, &requests).into_iter().max();
            let moves = LoadPlan::new(&record, &loads(&record, &requests, true)).rebalance(3);
            prop_assert!(moves.len() <= 3);
            if moves.is_empty() {
                break;
            }
            all += moves.len();
            make(&mut record, &moves);
            prop_assert!(scores(&record, &requests).into_iter().max() <= before);
            prop_assert!(all <= 3 * requests.len(), "{} moves of {} volumes", all, requests.len());
        }
        // A member above the average has no volume left that fits anywhere.
        let known = loads(&record, &requests, true);
        let plan = LoadPlan::new(&record, &known);
        let takers: Vec<MemberId> = plan.costs.keys().copied().filter(|id| plan.weight(*id) > 0).collect();
        if takers.is_empty() {
            return Ok(());
        }
        for from in record.active().filter(|id| plan.score(*id) > plan.average()) {
            for name in record.owned_by(from).filter(|name| plan.cost_of(name) * 4 >= plan.average_volume) {
                let mut lightest = takers.clone();
                lightest.retain(|id| *id != from);
                lightest.sort_by_key(|id| (plan.score(*id), *id));
                for to in lightest.into_iter().take(LIGHTEST) {
                    let fits = u128::from(plan.score_with(to, plan.cost_of(name))) * 10 <= u128::from(plan.score(from)) * 9;
                    prop_assert!(!fits, "{} fits at {}", name, to);
                }
            }
        }
    }

    #[test]
    fn volumes_with_logs_stay_with_their_copies(numbers in prop::collection::vec(0..4_u8, 1..20)) {
        let mut record = group(&[100; 4], numbers.len());
        for (at, copy) in numbers.iter().enumerate() {
            let copies = Some(BTreeSet::from([id(0), id(*copy)]));
            record.apply(&[GroupChange::SetCopies { volume: volume(at), owner: id(0), copies }]).unwrap();
        }
        let requests = vec![1000; numbers.len()];
        for change in LoadPlan::new(&record, &loads(&record, &requests, true)).rebalance(100) {
            record.apply(&[change]).expect("G6");
        }
        fail(&mut record, 0, 1);
        let changes = LoadPlan::new(&record, &GroupLoads::default()).assign_lost(id(0), 1000);
        record.apply(&changes).unwrap();
        for (at, copy) in numbers.iter().enumerate() {
            let owner = record.volume(&volume(at)).unwrap().owner.member;
            prop_assert_eq!(owner, id(*copy));
        }
    }
}
