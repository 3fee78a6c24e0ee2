//! Heartbeats, silent members, and their fencing.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_reactor::Instant;

use super::{GatewayAction, GatewayMachine, HEARTBEATS_PER_LEASE, MemberStanding};
use crate::assign::{LoadPlan, drain_moves, moving_from};
use crate::ids::{MemberId, StartId};
use crate::load::{GroupLoads, RequestLoad};
use crate::record::{GatewayState, GroupChange};
use crate::wire::{GatewayMessageBody, HeartbeatReport, LOADS_MAX, LoadReport};

/// Maximum number of volumes that one change assigns.
const ASSIGN_MAX: usize = 256;
/// Maximum number of volumes that are on their way from a member that is drained.
const MOVES_MAX: usize = 8;
/// Time between attempts to fence a start.
const FENCE_RETRY: Duration = Duration::from_millis(500);

/// Number of attempts to connect that must be refused where no other member is heard that could contradict.
const REFUSALS_ALONE: u32 = 3;
/// Least time between attempts that count as several.
const REFUSAL_SPACING: Duration = Duration::from_millis(20);

/// Refusals of connections to a member by its machine.
#[derive(Debug, Clone, Copy)]
struct ConnectionRefusals {
    since: Instant,
    last: Instant,
    count: u32,
}

/// Observation of another member.
#[derive(Debug, Clone)]
pub(super) struct HeardMember {
    start: StartId,
    /// Time at which it was last heard, or began to be observed.
    last: Instant,
    /// Time for which it has not reached the pool, as it has said last.
    pool_silence: Duration,
    /// Set once it was heard.
    was_heard: bool,
    /// Refusals since it was last heard.
    refusals: Option<ConnectionRefusals>,
    /// For how long it has not heard those that it observes.
    silences: Vec<(MemberId, Duration)>,
}

/// Progress of fencing a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FencingProgress {
    /// The pool was asked.
    Asked,
    /// Failed; tried again at this time.
    Failed(Instant),
    /// The clients are on the blocklist.
    Done,
}

impl GatewayMachine {
    /// Begins to observe members that the ring has brought here, and forgets others.
    pub(super) fn observe_ring(&mut self, now: Instant) {
        let mut heard = BTreeMap::new();
        let observed = self.ring.observed_by(self.own).map(|(member, _)| member);
        for member in observed.chain(self.ring.observers_of(self.own)) {
            let start = self.record.members()[&member].start;
            let fresh = HeardMember {
                start,
                last: now,
                pool_silence: Duration::ZERO,
                was_heard: false,
                refusals: None,
                silences: Vec::new(),
            };
            let known = self.heard.get(&member).cloned().filter(|known| known.start == start);
            heard.insert(member, known.unwrap_or(fresh));
        }
        self.heard = heard;
        let record = self.record.clone();
        self.fencing.retain(|(member, start), _| record.member(*member).is_some_and(|entry| entry.start == *start));
        self.loads.retain(|member, _| record.member(*member).is_some());
        let seen = std::mem::take(&mut self.self_fencing);
        let fences_itself = record.members().iter().filter(|(id, entry)| entry.state == GatewayState::Fencing(**id));
        self.self_fencing = fences_itself.map(|(id, _)| (*id, seen.get(id).copied().unwrap_or(now))).collect();
    }

    /// Counts what was not heard while this process did not run as heard.
    pub(super) fn heard_anew(&mut self, now: Instant) {
        for heard in self.heard.values_mut() {
            heard.last = now;
        }
    }

    pub(super) fn hear(&mut self, now: Instant, member: MemberId, pool_silence_ms: u32, report: HeartbeatReport) {
        let time = |ms: u32| Duration::from_millis(u64::from(ms));
        if let Some(heard) = self.heard.get_mut(&member) {
            heard.last = now;
            heard.was_heard = true;
            heard.refusals = None;
            heard.pool_silence = time(pool_silence_ms);
            heard.silences = report.silences.into_iter().map(|(member, silence)| (member, time(silence))).collect();
        }
        for LoadReport { member, number, load } in report.loads {
            let known = self.record.member(member).is_some() && member != self.own;
            if known && self.loads.get(&member).is_none_or(|(before, _)| *before < number) {
                self.loads.insert(member, (number, load));
            }
        }
    }

    /// Takes note that a member's machine refuses connections to it, and says so to the others at once: none of them
    /// accuses a member that another one has heard.
    pub(super) fn take_refused(&mut self, now: Instant, member: MemberId, start: StartId) {
        if let Some(heard) = self.heard.get_mut(&member).filter(|heard| heard.start == start && heard.was_heard) {
            let first = ConnectionRefusals { since: now, last: now, count: 1 };
            let refusals = heard.refusals.get_or_insert(first);
            if now.since(refusals.last) >= REFUSAL_SPACING {
                (refusals.last, refusals.count) = (now, refusals.count + 1);
            }
            self.heartbeat_at = now;
        }
    }

    /// Returns since when a member has certainly failed, as far as this one can tell: connections to it are refused, while
    /// others are heard, so that it is not this machine that refuses them.  Where there is no other one, several attempts must
    /// have been refused.
    fn refused_since(&self, now: Instant, heard: &HeardMember) -> Option<Instant> {
        let others = || self.heard.values().any(|other| other.refusals.is_none() && self.hears(now, other));
        let is_certain = |refusals: &ConnectionRefusals| match self.heard.len() {
            1 => refusals.count >= REFUSALS_ALONE,
            _ => others(),
        };
        heard.refusals.filter(is_certain).map(|refusals| refusals.since)
    }

    /// Returns what this member says in heartbeats: whom it hears, its load, and loads of others, other ones each time.
    pub(super) fn report(&self, now: Instant) -> HeartbeatReport {
        let silence = |member| {
            let heard = self.heard.get(&member).filter(|heard| heard.refusals.is_none());
            let silence = heard.map_or(Duration::MAX, |heard| now.since(heard.last));
            (member, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))
        };
        let silences = self.ring.observed_by(self.own).map(|(member, _)| silence(member)).collect();
        let own = LoadReport { member: self.own, number: self.load_number, load: self.load };
        let skip = (now.as_nanos() >> 20) as usize % self.loads.len().max(1);
        let report = |(member, (number, load)): (&MemberId, &(u64, RequestLoad))| LoadReport {
            member: *member,
            number: *number,
            load: *load,
        };
        let others = self.loads.iter().cycle().skip(skip).take(self.loads.len().min(LOADS_MAX - 1)).map(report);
        HeartbeatReport { silences, loads: std::iter::once(own).chain(others).collect() }
    }

    pub(super) fn send_heartbeats(&mut self, now: Instant) {
        if now < self.heartbeat_at {
            return;
        }
        self.heartbeat_at = now + self.lease() / HEARTBEATS_PER_LEASE;
        let body = GatewayMessageBody::Heartbeat(self.report(now));
        let observers: Vec<MemberId> = self.ring.observers_of(self.own).collect();
        self.actions.extend(observers.into_iter().map(|to| GatewayAction::Send(to, body.clone())));
        self.repeat_prepared();
    }

    /// Returns whether a member was heard in the last half of a lease.
    fn hears(&self, now: Instant, heard: &HeardMember) -> bool {
        heard.was_heard && now.since(heard.last) <= self.lease() / 2
    }

    /// A member that does not reach the pool gives hosts up if it is the only one: others reach it, or it hears nobody.
    /// Hosts wait where all members have lost the pool.
    pub(super) fn decide_hosts(&mut self, now: Instant) {
        let lease = self.lease();
        let reached = self.pool_silence(now) < lease * 3 / 2;
        let alone = self.ring.observers_of(self.own).next().is_none();
        let others = || self.heard.values().filter(|heard| self.hears(now, heard));
        let cut_off =
            !reached && !alone && (others().next().is_none() || others().any(|other| other.pool_silence < lease / 2));
        // Hosts that were given up come back when the pool is reached.
        let admits = self.standing == MemberStanding::Serving && if self.hosts_admitted { !cut_off } else { reached };
        let admits = admits || (self.standing == MemberStanding::Stopping && self.hosts_admitted && !cut_off);
        if admits != std::mem::replace(&mut self.hosts_admitted, admits) {
            self.actions.push(GatewayAction::AdmitHosts(admits));
        }
    }

    /// Returns the members that this one accuses: silent for too long, or without the pool.
    fn failed(&self, now: Instant) -> Vec<(MemberId, StartId)> {
        let lease = self.lease();
        // Where the pool was away for all, each is given time to reach it again.
        let pool_reached = self.pool_silence(now) <= lease / 2 && now.since(self.pool_reached_since) >= 2 * lease;
        let is_isolated = self.heard.len() >= 2 && self.heard.values().all(|heard| now.since(heard.last) > lease / 2);
        let failed = self.ring.observed_by(self.own).filter_map(|(member, rank)| {
            let heard = self.heard.get(&member)?;
            // The first observer acts first; one that hears nobody may be the one that is cut off.
            let turn = lease / 2 * rank as u32;
            let patience = lease + turn + if is_isolated { lease } else { Duration::ZERO };
            let heard_by_others = self
                .heard
                .values()
                .filter(|other| self.hears(now, other))
                .any(|other| other.silences.iter().any(|(silent, silence)| *silent == member && *silence < lease));
            let is_refused = self.refused_since(now, heard).is_some_and(|since| now.since(since) >= turn);
            let silent = (is_refused || now.since(heard.last) >= patience) && !heard_by_others;
            let without_pool = pool_reached && heard.pool_silence >= 2 * lease + turn;
            (silent || without_pool).then_some((member, heard.start))
        });
        failed.collect()
    }

    /// Returns the member that goes on with the fencing of another one, or with what follows it.
    fn successor(&self, of: MemberId, by: MemberId) -> Option<MemberId> {
        let serves = self.record.member(by).is_some_and(|member| member.state.serves());
        if serves { Some(by) } else { self.ring.after(of).next() }
    }

    /// Returns whether a fencing goes on only if another member takes it over.  A member that was started again fences its
    /// own former start, and is given time for that.
    fn is_left(&self, now: Instant, member: MemberId, by: MemberId) -> bool {
        let since = |seen: &Instant| now.since(*seen) >= 2 * self.lease();
        by != member || self.self_fencing.get(&member).is_some_and(since)
    }

    /// Asks the pool to fence the current start of a member.
    pub(super) fn fence(&mut self, member: MemberId) {
        let Some(entry) = self.record.member(member) else { return };
        let (start, clients) = (entry.start, entry.clients.clone());
        self.fencing.insert((member, start), FencingProgress::Asked);
        self.actions.push(GatewayAction::Fence { member, start, clients });
    }

    pub(super) fn fence_ended(&mut self, now: Instant, of: (MemberId, StartId), done: bool) {
        if let Some(progress) = self.fencing.get_mut(&of) {
            *progress = if done { FencingProgress::Done } else { FencingProgress::Failed(now + FENCE_RETRY) };
        }
        if of.0 == self.own && !done {
            // Asked for again by `joining_changes`.
            self.fencing.remove(&of);
        }
    }

    /// Returns the changes that follow from what this member observes and from what others have left.
    pub(super) fn serving_changes(&mut self, now: Instant) -> Vec<GroupChange> {
        let record = self.record.clone();
        let mut changes = Vec::new();
        for (member, start) in self.failed(now) {
            changes.push(GroupChange::BeginFencing { member, start, by: self.own });
        }
        for (&member, entry) in record.members() {
            let start = entry.start;
            match entry.state {
                _ if member == self.own => {}
                GatewayState::Fencing(by) if by == self.own => match self.fencing.get(&(member, start)) {
                    Some(FencingProgress::Done) => changes.push(GroupChange::Fenced { member, start, by }),
                    Some(FencingProgress::Failed(at)) if now >= *at => self.fence(member),
                    Some(_) => {}
                    None => self.fence(member),
                },
                GatewayState::Fencing(by)
                    if self.successor(member, by) == Some(self.own) && self.is_left(now, member, by) =>
                {
                    changes.push(GroupChange::BeginFencing { member, start, by: self.own });
                }
                _ => {}
            }
        }
        changes.extend(self.assignments(&changes));
        changes.extend(self.volume_changes(now));
        changes.extend(self.version_change());
        if record.member(self.own).is_some_and(|own| own.state == GatewayState::Draining) {
            let moves = MOVES_MAX.saturating_sub(moving_from(&record, self.own));
            changes.extend(drain_moves(&record, &self.group_loads(), self.own, moves));
        }
        if changes.is_empty() {
            // Alone: it is refused where the record has changed.
            changes = self.rebalancing_changes(now);
        }
        changes
    }

    /// Returns the change to the next version of the record.  One member asks for it: all would at the same time.
    fn version_change(&self) -> Option<GroupChange> {
        let is_first = self.record.active().next() == Some(self.own);
        is_first.then(|| self.record.next_version())?.map(GroupChange::RaiseVersion)
    }

    /// Returns assignments of the volumes of members that are out, or will be by these changes.
    fn assignments(&self, changes: &[GroupChange]) -> Vec<GroupChange> {
        let record = &self.record;
        let fenced_now = changes.iter().filter_map(|change| match change {
            GroupChange::Fenced { member, .. } => Some(*member),
            _ => None,
        });
        let out = record.members().iter().filter(|(id, entry)| match entry.state {
            GatewayState::Out(by) => self.successor(**id, by) == Some(self.own),
            _ => false,
        });
        let lost: Vec<MemberId> =
            out.map(|(id, _)| *id).chain(fenced_now).filter(|id| record.owned_count(*id) > 0).collect();
        if lost.is_empty() {
            return Vec::new();
        }
        let loads = self.group_loads();
        let mut plan = LoadPlan::new(record, &loads);
        let mut all = Vec::new();
        for member in lost {
            let leaving =
                record.owned_by(member).filter(|name| record.volumes()[*name].leaving).take(ASSIGN_MAX - all.len());
            let (by, start) = (self.own, self.start);
            all.extend(leaving.map(|name| GroupChange::ForgetVolume { volume: name.clone(), by, start }));
            all.extend(plan.assign_lost(member, ASSIGN_MAX - all.len()));
        }
        all
    }

    /// Returns the load of this member: that of the volumes that it owns.
    pub(super) fn own_load(&self) -> RequestLoad {
        let owns = |name| self.record.volume(name).is_some_and(|entry| entry.owner.member == self.own);
        let mut sum = RequestLoad::default();
        self.volume_loads.iter().filter(|(name, _)| owns(name)).for_each(|(_, load)| sum.add(*load));
        sum
    }

    /// Returns the loads that this member knows: those that others have said, and its own.
    pub fn group_loads(&self) -> GroupLoads {
        let others = self.loads.iter().map(|(member, (_, load))| (*member, *load));
        let told = self.told.iter().map(|(member, loads)| (*member, loads.clone()));
        GroupLoads {
            members: others.chain([(self.own, self.own_load())]).collect(),
            volumes: told.chain([(self.own, self.volume_loads.clone())]).collect(),
        }
    }
}
