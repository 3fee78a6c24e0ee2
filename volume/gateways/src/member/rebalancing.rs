//! Automatic rebalancing: the most loaded member moves some of its volumes away, one member at a time.
//!
//! ```text
//!            overloaded for a while,                nothing is worth a move, a move has failed,
//!  Waiting ---- nothing has changed ----> Turn ----- or another owner has changed ----> Waiting
//! ```
//!
//! | invariant | |
//! |---|---|
//! | B1 | a member moves its own volumes only, at most two at the same time, and none while others are moved |
//! | B2 | of members that begin a turn at the same time, the record lets one: moves are refused if it has changed |
//! | B3 | a turn begins when the member was overloaded for [`SETTLE`], and no owner and no membership has changed: what was moved is measured again |

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forebay_reactor::Instant;

use super::GatewayMachine;
use crate::assign::{LoadPlan, moving_from};
use crate::ids::{MemberId, VolumeName};
use crate::record::{GatewayState, GroupChange};

/// Time for which a member is overloaded without a change before it begins a turn.
pub(super) const SETTLE: Duration = Duration::from_secs(30);
/// Number of volumes that are on their way at the same time.
const MOVES_MAX: usize = 2;
/// Time between looks at the loads, and by which less loaded members wait longer.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Most members that a member lets go first.
const RANK_MAX: usize = 30;
/// Time for which a volume whose move has failed is not moved by itself again.
const FAILED_MOVE_REST: Duration = Duration::from_secs(600);

/// Move of a volume in a turn of this member.
#[derive(Debug, Clone)]
struct OwnMove {
    to: MemberId,
    /// Load of the volume, which its next owner has not said yet.
    load: u64,
    at: Instant,
    /// Set once the record has it.
    is_recorded: bool,
}

/// Automatic rebalancing as one member sees it.
#[derive(Debug, Clone)]
pub(super) struct Rebalancing {
    /// Time without a change, [`SETTLE`].
    pub(super) settle: Duration,
    look_at: Instant,
    /// Epoch of the record that was looked at last.
    epoch: u64,
    /// Highest term of a volume when it was looked at last.
    newest_term: u64,
    /// Members that were active when it was looked at last.
    active: Vec<MemberId>,
    /// Since when this member is overloaded, and nothing has changed.
    overloaded_since: Instant,
    in_turn: bool,
    moves: BTreeMap<VolumeName, OwnMove>,
    /// Volumes whose moves have failed, and when.
    failed: BTreeMap<VolumeName, Instant>,
}

impl Rebalancing {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            settle: SETTLE,
            look_at: now,
            epoch: 0,
            newest_term: 0,
            active: Vec::new(),
            overloaded_since: now,
            in_turn: false,
            moves: BTreeMap::new(),
            failed: BTreeMap::new(),
        }
    }

    /// Ends the turn, if it is one, and begins to wait.
    fn end_turn(&mut self, now: Instant) {
        (self.in_turn, self.overloaded_since) = (false, now);
    }
}

impl GatewayMachine {
    /// Returns moves of this member's volumes, if they are worth it and it is its turn.
    pub(super) fn rebalancing_changes(&mut self, now: Instant) -> Vec<GroupChange> {
        let is_active = self.record.member(self.own).is_some_and(|own| own.state == GatewayState::Active);
        if now < self.rebalancing.look_at {
            return Vec::new();
        }
        self.rebalancing.look_at = now + LOOK_INTERVAL.min(self.rebalancing.settle / 2);
        if !self.record.policy().rebalance || !is_active {
            self.rebalancing.end_turn(now);
            return Vec::new();
        }
        self.follow_moves(now);
        let record = self.record.clone();
        let own_moving = moving_from(&record, self.own);
        if record.moving_count() > own_moving {
            self.rebalancing.end_turn(now);
        }
        if record.moving_count() >= MOVES_MAX {
            return Vec::new();
        }
        let loads = self.group_loads();
        let mut plan = LoadPlan::new(&record, &loads);
        for (name, moved) in &self.rebalancing.moves {
            if record.volume(name).is_some_and(|entry| entry.owner.member == moved.to) {
                plan.add(moved.to, moved.load);
            }
        }
        if !self.rebalancing.in_turn {
            let Some(rank) = plan.overload_rank(self.own) else {
                self.rebalancing.end_turn(now);
                return Vec::new();
            };
            let patience = self.rebalancing.settle + LOOK_INTERVAL * rank.min(RANK_MAX) as u32;
            if now.since(self.rebalancing.overloaded_since) < patience {
                return Vec::new();
            }
        }
        let excluded: BTreeSet<VolumeName> = self.rebalancing.failed.keys().cloned().collect();
        let mut changes = vec![GroupChange::Expect(record.epoch())];
        while changes.len() <= MOVES_MAX - own_moving {
            let Some(change) = plan.next_move(self.own, &excluded) else { break };
            if let GroupChange::ProposeMove { volume, to } = &change {
                let moved = OwnMove { to: *to, load: plan.load_of(volume), at: now, is_recorded: false };
                self.rebalancing.moves.insert(volume.clone(), moved);
            }
            changes.push(change);
        }
        if changes.len() > 1 {
            self.rebalancing.in_turn = true;
            return changes;
        }
        if own_moving == 0 {
            self.rebalancing.end_turn(now);
        }
        Vec::new()
    }

    /// Takes note of what the record says of this member's moves, and of changes by others.
    fn follow_moves(&mut self, now: Instant) {
        let record = self.record.clone();
        let Self { rebalancing, own, .. } = self;
        let settle = rebalancing.settle;
        rebalancing.failed.retain(|_, at| now.since(*at) < FAILED_MOVE_REST);
        let (mut has_failed, mut kept) = (false, BTreeMap::new());
        for (name, mut moved) in std::mem::take(&mut rebalancing.moves) {
            let Some(owner) = record.volume(&name).map(|entry| entry.owner) else { continue };
            let is_done = owner.member == moved.to;
            let is_coming = owner.member == *own && owner.next == Some(moved.to);
            if is_done || is_coming {
                moved.is_recorded = true;
            } else if moved.is_recorded && owner.member == *own {
                has_failed = true;
                rebalancing.failed.insert(name, now);
                continue;
            } else if moved.is_recorded || now.since(moved.at) > LOOK_INTERVAL * 10 {
                continue;
            }
            // Until its next owner has measured it, and that is known here.
            if !is_done || now.since(moved.at) < settle {
                kept.insert(name, moved);
            }
        }
        rebalancing.moves = kept;
        if record.epoch() == rebalancing.epoch {
            return;
        }
        rebalancing.epoch = record.epoch();
        let (mut newest, mut by_others) = (rebalancing.newest_term, false);
        for (name, entry) in record.volumes().iter().filter(|(_, entry)| entry.owner.term > rebalancing.newest_term) {
            newest = newest.max(entry.owner.term);
            by_others |= rebalancing.moves.get(name).is_none_or(|moved| moved.to != entry.owner.member);
        }
        rebalancing.newest_term = newest;
        let active: Vec<MemberId> = record.active().collect();
        if has_failed || by_others || active != rebalancing.active {
            rebalancing.end_turn(now);
        }
        rebalancing.active = active;
    }
}
