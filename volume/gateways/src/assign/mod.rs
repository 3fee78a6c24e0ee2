//! Assignment of volumes: to the member with the least load for its weight, of those that may own them.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{MemberId, VolumeName};
use crate::load::{GroupLoads, KIB_PER_REQUEST, RequestLoad};
use crate::record::{GatewayState, GatewayVolume, GroupChange, GroupRecord};

/// Cost of a volume beside its load: as much as 10 requests a second, so that idle volumes are spread by their number.
const VOLUME_COST: u64 = 10 * KIB_PER_REQUEST;
/// Least difference of two members' costs for which volumes are moved by themselves: 100 requests a second.
const DIFFERENCE_MIN: u64 = 100 * KIB_PER_REQUEST;
/// Number of members with the least load that are looked at for a volume that any member may own.
const LIGHTEST: usize = 4;

/// Loads of members, by which volumes are spread.
///
/// The *cost* of a volume is its load as one number ([`RequestLoad::cost`]) and a share for each volume.  A member's *score* is the
/// cost of its volumes for each 100 of its weight; the highest there is if its weight is 0 and it has volumes.
#[derive(Debug)]
pub struct LoadPlan<'a> {
    record: &'a GroupRecord,
    loads: &'a GroupLoads,
    /// Costs with what was planned, by active member.
    costs: BTreeMap<MemberId, u64>,
    /// Cost of a volume of which nothing is known, by owner: the average of those of its volumes whose loads are not known.
    unknown: BTreeMap<MemberId, u64>,
    /// Cost of an average volume.
    average_volume: u64,
    moved: BTreeSet<VolumeName>,
}

impl<'a> LoadPlan<'a> {
    /// Begins a plan with the loads that are known.
    pub fn new(record: &'a GroupRecord, loads: &'a GroupLoads) -> Self {
        let said = |id: &MemberId| loads.members.get(id).map(RequestLoad::cost);
        let all_said: u64 = record.members().keys().filter_map(said).sum();
        let unknown = record.members().keys().filter_map(|id| {
            let (mut count, mut cost) = (record.owned_count(*id) as u64, said(id)?);
            for (name, load) in loads.volumes.get(id).into_iter().flat_map(|known| known.iter()) {
                if record.volume(name).is_some_and(|entry| entry.owner.member == *id) {
                    (count, cost) = (count.saturating_sub(1), cost.saturating_sub(load.cost()));
                }
            }
            Some((*id, VOLUME_COST + cost / count.max(1)))
        });
        let mut plan = Self {
            record,
            loads,
            costs: BTreeMap::new(),
            unknown: unknown.collect(),
            average_volume: VOLUME_COST + all_said / record.volumes().len().max(1) as u64,
            moved: BTreeSet::new(),
        };
        let owned = |id: MemberId| said(&id).unwrap_or(0) + record.owned_count(id) as u64 * VOLUME_COST;
        plan.costs = record.active().map(|id| (id, owned(id))).collect();
        // What is on its way counts where it goes.
        for id in record.members().keys() {
            for name in record.coming_to(*id) {
                plan.shift(name, record.volumes()[name].owner.member, *id);
            }
        }
        plan
    }

    /// Counts a cost at a member beside what it has said.
    pub fn add(&mut self, id: MemberId, cost: u64) {
        if let Some(at) = self.costs.get_mut(&id) {
            *at += cost;
        }
    }

    /// Returns the cost of a volume beside that which each volume has.
    pub fn load_of(&self, name: &VolumeName) -> u64 {
        self.cost_of(name) - VOLUME_COST
    }

    fn cost_of(&self, name: &VolumeName) -> u64 {
        let Some(owner) = self.record.volume(name).map(|entry| entry.owner.member) else { return self.average_volume };
        let known = self.loads.volumes.get(&owner).and_then(|known| known.get(name));
        match (known, self.unknown.get(&owner)) {
            (Some(load), _) => VOLUME_COST + load.cost(),
            (None, Some(cost)) => *cost,
            (None, None) => self.average_volume,
        }
    }

    fn shift(&mut self, name: &VolumeName, from: MemberId, to: MemberId) {
        let cost = self.cost_of(name);
        if let Some(at) = self.costs.get_mut(&from) {
            *at = at.saturating_sub(cost);
        }
        self.add(to, cost);
    }

    fn weight(&self, id: MemberId) -> u64 {
        self.record.member(id).map_or(0, |member| u64::from(member.weight))
    }

    /// Returns the score of a member whose volumes have this cost.
    fn score_of(&self, id: MemberId, cost: u64) -> u64 {
        match self.weight(id) {
            0 if cost == 0 => 0,
            0 => u64::MAX,
            weight => cost.saturating_mul(100) / weight,
        }
    }

    fn score(&self, id: MemberId) -> u64 {
        self.score_of(id, self.costs[&id])
    }

    fn score_with(&self, id: MemberId, cost: u64) -> u64 {
        self.score_of(id, self.costs[&id] + cost)
    }

    /// Returns the score that all active members would have if volumes could be divided.
    fn average(&self) -> u64 {
        let weights: u64 = self.costs.keys().map(|id| self.weight(*id)).sum();
        match weights {
            0 => u64::MAX,
            weights => self.costs.values().sum::<u64>().saturating_mul(100) / weights,
        }
    }

    /// Chooses the owner of a volume that is new, or whose owner is lost or leaves it, and counts the volume there: the
    /// member with the lowest score then; of several ones `preferred`.  A member with the weight 0 is chosen if there is no
    /// other one.  `None` if no other active member may own it.
    pub fn choose(&mut self, volume: Option<&VolumeName>, preferred: Option<MemberId>) -> Option<MemberId> {
        let entry = volume.and_then(|name| self.record.volume(name));
        let owner = entry.map(|entry| entry.owner.member);
        let copies = entry.and_then(|entry| entry.copies.as_ref());
        let cost = volume.map_or(self.average_volume, |name| self.cost_of(name));
        let may = |id: &&MemberId| Some(**id) != owner && copies.is_none_or(|copies| copies.contains(*id));
        // Of members with the weight 0 the one that has least.
        let key = |id: &&MemberId| (self.score_with(**id, cost), self.costs[*id], Some(**id) != preferred, **id);
        let chosen = *self.costs.keys().filter(may).min_by_key(key)?;
        self.add(chosen, cost);
        Some(chosen)
    }

    /// Returns up to `max` changes that assign volumes of members that are out.
    pub fn assign_lost(&mut self, of: MemberId, max: usize) -> Vec<GroupChange> {
        let record = self.record;
        let staying = record.owned_by(of).filter(|name| !record.volumes()[*name].leaving);
        let assigned = staying
            .filter_map(|name| Some(GroupChange::Assign { volume: name.clone(), to: self.choose(Some(name), None)? }));
        assigned.take(max).collect()
    }

    /// Returns up to `max` moves that bring members nearer to the average, the ones with the highest scores first.
    pub fn rebalance(&mut self, max: usize) -> Vec<GroupChange> {
        let mut moves = Vec::new();
        let mut from: BTreeSet<MemberId> = self.costs.keys().copied().collect();
        while moves.len() < max {
            let Some(highest) = from.iter().copied().max_by_key(|id| (self.score(*id), *id)) else { break };
            match self.next_move(highest, &BTreeSet::new()) {
                Some(change) => moves.push(change),
                // Others only get more: it has none later either.
                None => drop(from.remove(&highest)),
            }
        }
        moves
    }

    /// Plans a move away from a member, which is worth it:
    ///
    /// - the member's score is above the average, and the next owner's will be lower than it was by at least a tenth;
    /// - the volume's cost is at least a quarter of that of an average one.
    ///
    /// Of these, the move after which the higher one of the two scores is lowest.  A member with the weight 0 gives each
    /// volume away.
    pub fn next_move(&mut self, from: MemberId, excluded: &BTreeSet<VolumeName>) -> Option<GroupChange> {
        let (record, before, is_unwanted) = (self.record, self.score(from), self.weight(from) == 0);
        if before <= self.average() {
            return None;
        }
        let takes = |id: &MemberId| *id != from && self.weight(*id) > 0;
        let mut lightest: Vec<MemberId> = self.costs.keys().copied().filter(takes).collect();
        lightest.sort_by_key(|id| (self.score(*id), *id));
        lightest.truncate(LIGHTEST);
        let mut best: Option<(u64, &VolumeName, MemberId)> = None;
        for name in record.owned_by(from) {
            let entry = &record.volumes()[name];
            let cost = self.cost_of(name);
            let is_worth_it = is_unwanted || cost.saturating_mul(4) >= self.average_volume;
            let is_free = entry.owner.next.is_none() && !entry.leaving;
            if !is_worth_it || !is_free || self.moved.contains(name) || excluded.contains(name) {
                continue;
            }
            let mut candidates: Vec<MemberId> = match &entry.copies {
                Some(copies) => self.costs.keys().copied().filter(|id| takes(id) && copies.contains(id)).collect(),
                None => lightest.clone(),
            };
            candidates.sort_by_key(|id| (self.score_with(*id, cost), *id));
            let Some(to) = candidates.first().copied() else { continue };
            let after = self.score_with(to, cost);
            if !is_unwanted && u128::from(after) * 10 > u128::from(before) * 9 {
                continue;
            }
            let rest = if is_unwanted { 0 } else { self.score_of(from, self.costs[&from].saturating_sub(cost)) };
            if best.is_none_or(|(highest, ..)| after.max(rest) < highest) {
                best = Some((after.max(rest), name, to));
            }
        }
        let (_, name, to) = best?;
        self.shift(name, from, to);
        self.moved.insert(name.clone());
        Some(GroupChange::ProposeMove { volume: name.clone(), to })
    }

    /// Returns the number of members with higher scores than this one, if its load differs so much from that of others that
    /// volumes are moved by themselves: it is above the average, and another member has at most three quarters of its
    /// score.
    pub fn overload_rank(&self, id: MemberId) -> Option<usize> {
        let own = self.costs.contains_key(&id).then(|| self.score(id))?;
        let others = self.costs.keys().filter(|other| **other != id && self.weight(**other) > 0);
        let lowest = others.map(|other| self.score(*other)).min()?;
        let differs = u128::from(lowest) * 4 <= u128::from(own) * 3 && own - lowest >= DIFFERENCE_MIN;
        let is_overloaded = own > self.average() && differs;
        is_overloaded.then(|| self.costs.keys().filter(|other| self.score(**other) > own).count())
    }
}

/// Returns the number of volumes on their way from a member.
pub fn moving_from(record: &GroupRecord, member: MemberId) -> usize {
    record.owned_by(member).filter(|name| record.volumes()[*name].owner.next.is_some()).count()
}

/// Returns up to `max` moves of volumes away from a member that is drained.
pub fn drain_moves(record: &GroupRecord, loads: &GroupLoads, member: MemberId, max: usize) -> Vec<GroupChange> {
    if max == 0 || record.member(member).is_none_or(|entry| entry.state != GatewayState::Draining) {
        return Vec::new();
    }
    let mut plan = LoadPlan::new(record, loads);
    let stays = |entry: &GatewayVolume| entry.owner.next.is_none() && !entry.leaving;
    let staying = record.owned_by(member).filter(|name| stays(&record.volumes()[*name]));
    let moves = staying
        .filter_map(|name| Some(GroupChange::ProposeMove { volume: name.clone(), to: plan.choose(Some(name), None)? }));
    moves.take(max).collect()
}

#[cfg(test)]
mod tests;
