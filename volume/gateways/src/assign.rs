//! Assignment of volumes: to the member with the least load for its weight, of those that may own them.

use std::collections::BTreeMap;

use crate::ids::{MemberId, VolumeName};
use crate::record::{GatewayState, GatewayVolume, GroupChange, GroupRecord};

/// Load of a member, as it measures it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemberLoad {
    /// Use of its cores by requests, in thousandths of one core.
    pub busy: u32,
    /// Requests a second.
    pub requests: u32,
    /// KiB a second.
    pub kib: u32,
}

/// Loads of members, by which volumes are spread.
///
/// Each volume counts as its share of what its owner was busy with, and as one thousandth of a core beside that, so
/// that idle volumes are spread by their number.
#[derive(Debug)]
pub struct LoadPlan<'a> {
    record: &'a GroupRecord,
    /// Load with what was planned, by member, in thousandths of a core for each 100 of weight, times 1024.
    loads: BTreeMap<MemberId, u64>,
    /// The same of an average volume.
    volume: u64,
}

impl<'a> LoadPlan<'a> {
    /// Begins a plan with what members have said of their loads, if they have.
    pub fn new(record: &'a GroupRecord, said: &BTreeMap<MemberId, MemberLoad>) -> Self {
        let busy = |id: MemberId| said.get(&id).map_or(0, |load| u64::from(load.busy));
        let all_busy: u64 = record.members().keys().map(|id| busy(*id)).sum();
        let volume = 1024 + all_busy * 1024 / record.volumes().len().max(1) as u64;
        let load = |id: MemberId| {
            let coming = record.coming_to(id).count() as u64;
            busy(id) * 1024 + record.owned_count(id) as u64 * 1024 + coming * volume
        };
        let loads = record.active().map(|id| (id, load(id))).collect();
        Self { record, loads, volume }
    }

    fn score(&self, id: MemberId, with: u64) -> u64 {
        let weight = self.record.member(id).map_or(1, |member| u64::from(member.weight.max(1)));
        (self.loads[&id] + with).saturating_mul(100) / weight
    }

    /// Chooses the owner of a volume that is new, or whose owner is lost or leaves it, and counts the volume there.
    /// `None` if no other active member may own it.
    pub fn choose(&mut self, volume: Option<&VolumeName>) -> Option<MemberId> {
        let entry = volume.and_then(|name| self.record.volume(name));
        let owner = entry.map(|entry| entry.owner.member);
        let copies = entry.and_then(|entry| entry.copies.as_ref());
        let may = |id: &&MemberId| Some(**id) != owner && copies.is_none_or(|copies| copies.contains(*id));
        let chosen = *self.loads.keys().filter(may).min_by_key(|id| (self.score(**id, self.volume), **id))?;
        *self.loads.get_mut(&chosen).expect("chosen among them") += self.volume;
        Some(chosen)
    }

    /// Returns up to `max` changes that assign volumes of members that are out.
    pub fn assign_lost(&mut self, of: MemberId, max: usize) -> Vec<GroupChange> {
        let record = self.record;
        let staying = record.owned_by(of).filter(|name| !record.volumes()[*name].leaving);
        let assigned =
            staying.filter_map(|name| Some(GroupChange::Assign { volume: name.clone(), to: self.choose(Some(name))? }));
        assigned.take(max).collect()
    }

    /// Returns up to `max` moves that bring members nearer to the average: each from the member with the highest load to
    /// the one with the lowest, as long as that makes the higher of the two lower by at least a tenth.
    pub fn rebalance(&mut self, max: usize) -> Vec<GroupChange> {
        let mut moves = Vec::new();
        let mut moved = std::collections::BTreeSet::new();
        while moves.len() < max {
            let highest = self.loads.keys().copied().max_by_key(|id| (self.score(*id, 0), *id));
            let Some(from) = highest else { break };
            let free = |name: &&VolumeName| {
                let entry = &self.record.volumes()[*name];
                entry.owner.next.is_none() && !entry.leaving && !moved.contains(*name)
            };
            let candidates: Vec<&VolumeName> = self.record.owned_by(from).filter(free).collect();
            let mut best: Option<(u64, &VolumeName, MemberId)> = None;
            for name in candidates {
                let copies = self.record.volumes()[name].copies.as_ref();
                let others =
                    self.loads.keys().filter(|id| **id != from && copies.is_none_or(|copies| copies.contains(*id)));
                if let Some(to) = others.min_by_key(|id| (self.score(**id, self.volume), **id)) {
                    let after = self.score(*to, self.volume);
                    if best.is_none_or(|(score, ..)| after < score) {
                        best = Some((after, name, *to));
                    }
                }
            }
            let before = self.score(from, 0);
            let Some((after, name, to)) = best.filter(|(after, ..)| after * 10 <= before * 9) else { break };
            debug_assert!(after < before);
            *self.loads.get_mut(&from).expect("an active member") -= self.volume.min(self.loads[&from]);
            *self.loads.get_mut(&to).expect("an active member") += self.volume;
            moved.insert(name.clone());
            moves.push(GroupChange::ProposeMove { volume: name.clone(), to });
        }
        moves
    }
}

/// Returns the number of volumes on their way from a member.
pub fn moving_from(record: &GroupRecord, member: MemberId) -> usize {
    record.owned_by(member).filter(|name| record.volumes()[*name].owner.next.is_some()).count()
}

/// Returns up to `max` moves of volumes away from a member that is drained.
pub fn drain_moves(
    record: &GroupRecord,
    said: &BTreeMap<MemberId, MemberLoad>,
    member: MemberId,
    max: usize,
) -> Vec<GroupChange> {
    if record.member(member).is_none_or(|entry| entry.state != GatewayState::Draining) {
        return Vec::new();
    }
    let mut plan = LoadPlan::new(record, said);
    let stays = |entry: &GatewayVolume| entry.owner.next.is_none() && !entry.leaving;
    let staying = record.owned_by(member).filter(|name| stays(&record.volumes()[*name]));
    let moves = staying
        .filter_map(|name| Some(GroupChange::ProposeMove { volume: name.clone(), to: plan.choose(Some(name))? }));
    moves.take(max).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::ids::{GatewayGroupId, StartId};
    use crate::record::{GatewayMember, GroupIdentity, GroupPolicy};

    fn id(number: u8) -> MemberId {
        MemberId([number; 16])
    }

    /// Returns a group with members of these weights, the first of which owns all volumes.
    fn group(weights: &[u32], volumes: usize) -> GroupRecord {
        let identity = GroupIdentity {
            id: GatewayGroupId([1; 16]),
            policy: GroupPolicy::default(),
            settings: serde_json::Value::Null,
            later: Default::default(),
        };
        let mut record = GroupRecord::created(identity, 1);
        for (at, weight) in weights.iter().enumerate() {
            let entry = GatewayMember {
                slot: at as u16,
                host: String::new(),
                version: String::new(),
                versions: Default::default(),
                state: GatewayState::Active,
                start: StartId([1; 16]),
                clients: Vec::new(),
                peer_addrs: Vec::new(),
                weight: *weight,
                settings: serde_json::Value::Null,
                later: Default::default(),
            };
            record.apply(&[GroupChange::Join { member: id(at as u8), entry }]).unwrap();
        }
        let add = |number| GroupChange::AddVolume {
            volume: VolumeName::new(format!("rbd/{number:04}")),
            owner: id(0),
            settings: serde_json::Value::Null,
        };
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

    #[test]
    fn lost_volumes_are_spread_by_weight_and_by_load() {
        let mut record = group(&[100, 100, 200, 100], 80);
        fail(&mut record, 0, 1);
        let mut weighted = record.clone();
        let changes = LoadPlan::new(&weighted, &BTreeMap::new()).assign_lost(id(0), 1000);
        weighted.apply(&changes).unwrap();
        assert_eq!(counts(&weighted, 4), [0, 20, 40, 20]);
        // A member that is as busy as all volumes together make one gets few.
        let said = BTreeMap::from([(id(3), MemberLoad { busy: 800, requests: 0, kib: 0 })]);
        let changes = LoadPlan::new(&record, &said).assign_lost(id(0), 1000);
        record.apply(&changes).unwrap();
        assert_eq!(record.owned_count(id(3)), 0);
        assert_eq!(record.owned_count(id(1)) + record.owned_count(id(2)), 80);
    }

    proptest! {
        #[test]
        fn rebalancing_ends_and_leaves_members_alike(volumes in 0..60_usize, members in 2..6_usize) {
            let mut record = group(&vec![100; members], volumes);
            for _ in 0..100 {
                let moves = LoadPlan::new(&record, &BTreeMap::new()).rebalance(4);
                if moves.is_empty() {
                    break;
                }
                record.apply(&moves).unwrap();
                for change in &moves {
                    let GroupChange::ProposeMove { volume, to } = change else { unreachable!() };
                    let owner = record.volume(volume).unwrap().owner;
                    let (from, start, term) = (owner.member, StartId([1; 16]), owner.term);
                    record.apply(&[GroupChange::HandOver { volume: volume.clone(), from, start, term, to: *to }]).unwrap();
                }
            }
            prop_assert!(LoadPlan::new(&record, &BTreeMap::new()).rebalance(1).is_empty());
            let counts = counts(&record, members as u8);
            let (most, least) = (counts.iter().max().unwrap(), counts.iter().min().unwrap());
            prop_assert!(most - least <= 1 + most / 10 + 1, "{:?}", counts);
        }

        #[test]
        fn volumes_with_logs_stay_with_their_copies(numbers in prop::collection::vec(0..4_u8, 1..20)) {
            let mut record = group(&[100; 4], numbers.len());
            for (at, copy) in numbers.iter().enumerate() {
                let volume = VolumeName::new(format!("rbd/{at:04}"));
                let copies = Some(BTreeSet::from([id(0), id(*copy)]));
                record.apply(&[GroupChange::SetCopies { volume, owner: id(0), copies }]).unwrap();
            }
            fail(&mut record, 0, 1);
            let changes = LoadPlan::new(&record, &BTreeMap::new()).assign_lost(id(0), 1000);
            record.apply(&changes).unwrap();
            for (at, copy) in numbers.iter().enumerate() {
                let owner = record.volume(&VolumeName::new(format!("rbd/{at:04}"))).unwrap().owner.member;
                prop_assert_eq!(owner, id(*copy));
            }
        }
    }
}
