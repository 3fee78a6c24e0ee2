//! Loads of a gateway group: what each member measures, and moves that spread them.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_export::meter::{CountersByKind, RequestKind};
use forebay_gateways::assign::LoadPlan;
use forebay_gateways::{GroupChange, GroupRecord, MemberId, RequestLoad, RequestTotals, VolumeName, WEIGHT_MAX};
use forebay_reactor::{Instant, now, sleep, timeout};

use super::commands::{find_member, not_joined};
use super::{JoinedGroup, RunningStart};
use crate::api::{GatewayLoad, GatewayMove, GatewayMoveState, GatewayWeight};
use crate::engine::Engine;
use crate::failure::{Failure, Result};

/// Maximum number of volumes that one `rebalance` moves.
const REBALANCED_MAX: usize = 256;
/// Number of volumes that a `rebalance` has on their way at the same time.
const MOVES_MAX: usize = 8;
/// Time that a `rebalance` waits for the loads of other members' volumes.
const TOLD: Duration = Duration::from_secs(2);
/// Time that a `rebalance` waits for each of its moves.
const MOVED: Duration = Duration::from_secs(60);
/// Time between looks at moves where the record does not change.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns what a volume's counters have counted: requests of all kinds, and bytes that were read and written.
pub(super) fn totals(counters: &CountersByKind) -> RequestTotals {
    let requests = RequestKind::ALL.iter().map(|kind| counters[*kind as usize].count.get()).sum();
    let bytes = [RequestKind::Read, RequestKind::Write].map(|kind| counters[kind as usize].bytes.get());
    RequestTotals { requests, bytes: bytes.iter().sum() }
}

impl From<RequestLoad> for GatewayLoad {
    fn from(RequestLoad { requests, kib }: RequestLoad) -> Self {
        Self { requests_per_s: requests, kib_per_s: kib }
    }
}

/// Move of a `rebalance`.
struct PlannedMove {
    volume: VolumeName,
    to: MemberId,
    /// Index in the report.
    at: usize,
    /// Time until which it is waited for.
    until: Instant,
}

/// Returns how a move has ended; `None` while it is on its way.
fn outcome(record: &GroupRecord, planned: &PlannedMove) -> Option<GatewayMoveState> {
    match record.volume(&planned.volume).map(|entry| entry.owner) {
        Some(owner) if owner.member == planned.to => Some(GatewayMoveState::Moved),
        Some(owner) if owner.next == Some(planned.to) => None,
        _ => Some(GatewayMoveState::Stayed),
    }
}

impl JoinedGroup {
    /// Waits until the other members that serve have told the loads of their volumes, or for a while.
    async fn learn_loads(&self, running: &RunningStart) {
        running.runner.ask_loads();
        let record = running.runner.record();
        let others = record.members().iter().filter(|(id, entry)| **id != self.own && entry.state.serves());
        let others: Vec<MemberId> = others.map(|(id, _)| *id).filter(|id| self.connection(*id).is_some()).collect();
        let told = async {
            while !running.runner.inspect(|machine| others.iter().all(|id| machine.has_told_loads(*id))) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(TOLD, told).await.is_err() {
            tracing::warn!(group = %self.spec, "not all members have told the loads of their volumes: these count as average ones");
        }
    }

    /// Makes moves, some at a time, and notes how each has ended.
    async fn make_moves(
        &self,
        mut waiting: VecDeque<PlannedMove>,
        moves: &mut [GatewayMove],
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        let mut in_flight: Vec<PlannedMove> = Vec::new();
        let mut done = 0;
        while !in_flight.is_empty() || !waiting.is_empty() {
            let running = self.must_run()?;
            while in_flight.len() < MOVES_MAX
                && let Some(planned) = waiting.pop_front()
            {
                let (volume, to) = (planned.volume.clone(), planned.to);
                match running.runner.change(&[GroupChange::ProposeMove { volume, to }]).await.map_err(Failure::from)? {
                    Ok(()) => in_flight.push(PlannedMove { until: now() + MOVED, ..planned }),
                    Err(refusal) => {
                        (moves[planned.at].state, moves[planned.at].error) =
                            (GatewayMoveState::Stayed, Some(refusal.to_string()));
                        done += 1;
                    }
                }
            }
            let changed = self.changed.next();
            let record = running.runner.record();
            in_flight.retain(|planned| match outcome(&record, planned) {
                Some(state) => {
                    moves[planned.at].state = state;
                    done += 1;
                    false
                }
                None if now() >= planned.until => {
                    moves[planned.at].state = GatewayMoveState::Moving;
                    done += 1;
                    false
                }
                None => true,
            });
            progress(done);
            if in_flight.len() == MOVES_MAX || waiting.is_empty() && !in_flight.is_empty() {
                let _ = timeout(LOOK_INTERVAL, changed).await;
            }
        }
        Ok(())
    }
}

impl Engine {
    /// Moves volumes so that members are loaded alike, some at a time, and waits until that is done.
    pub async fn rebalance_gateways(
        &self,
        dry_run: bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Vec<GatewayMove>> {
        let joined = self.gateways.joined().ok_or_else(not_joined)?;
        joined.wait_to_serve().await?;
        let running = joined.must_run()?;
        joined.learn_loads(&running).await;
        let record = running.runner.record();
        let loads = running.runner.inspect(|machine| machine.group_loads());
        let changes = LoadPlan::new(&record, &loads).rebalance(REBALANCED_MAX);
        let host = |id: MemberId| record.member(id).map_or_else(|| id.to_string(), |member| member.host.clone());
        let (mut moves, mut waiting) = (Vec::new(), VecDeque::new());
        for change in changes {
            let GroupChange::ProposeMove { volume, to } = change else { continue };
            let Some(owner) = record.volume(&volume).map(|entry| entry.owner.member) else { continue };
            let load = loads.volumes.get(&owner).and_then(|known| known.get(&volume));
            moves.push(GatewayMove {
                volume: volume.to_string(),
                from: host(owner),
                to: host(to),
                load: load.map(|load| (*load).into()),
                state: GatewayMoveState::Planned,
                error: None,
            });
            waiting.push_back(PlannedMove { volume, to, at: moves.len() - 1, until: now() });
        }
        if !dry_run {
            let all = moves.len() as u64;
            joined.make_moves(waiting, &mut moves, |done| progress(done, all)).await?;
        }
        Ok(moves)
    }

    /// Sets the weight of a member.
    pub async fn set_gateway_weight(&self, request: &GatewayWeight) -> Result<()> {
        let joined = self.gateways.joined().ok_or_else(not_joined)?;
        let weight = request.weight;
        if weight > WEIGHT_MAX {
            return Err(Failure::invalid(format!("a weight of {weight}: from 0 to {WEIGHT_MAX}")));
        }
        joined
            .change(|record| {
                let member = match &request.member {
                    Some(name) => find_member(record, name)?,
                    None => joined.own,
                };
                let is_so = record.member(member).is_some_and(|entry| entry.weight == weight);
                Ok(if is_so { Vec::new() } else { vec![GroupChange::SetWeight { member, weight }] })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use forebay_export::Meters;
    use forebay_gateways::{GatewayGroupId, GatewayMember, GroupIdentity, GroupPolicy, StartId};

    use super::*;

    #[test]
    fn requests_of_all_kinds_and_bytes_that_are_moved_are_loads() {
        let meters = Meters::default();
        let meter = meters.meter(&"rbd/a", &"nbd");
        for (kind, bytes) in [
            (RequestKind::Read, 4096),
            (RequestKind::Write, 512),
            (RequestKind::Discard, 1 << 30),
            (RequestKind::WriteZeroes, 1 << 30),
            (RequestKind::Flush, 0),
        ] {
            meter.count(kind, bytes, Duration::from_micros(10), false);
        }
        assert_eq!(totals(meter.volume()), RequestTotals { requests: 5, bytes: 4608 });
    }

    #[test]
    fn a_move_is_on_its_way_until_the_record_has_another_owner_or_none() {
        let id = |number| MemberId([number; 16]);
        let identity = GroupIdentity::new(GatewayGroupId([1; 16]), GroupPolicy::default(), serde_json::Value::Null);
        let mut record = GroupRecord::created(identity, 1);
        for slot in 0..2 {
            let entry = GatewayMember { slot: u16::from(slot), ..GatewayMember::new(StartId([slot; 16])) };
            record.apply(&[GroupChange::Join { member: id(slot), entry }]).expect("a new member");
        }
        let volume = VolumeName::new("rbd/a");
        let add = GroupChange::AddVolume { volume: volume.clone(), owner: id(0), settings: serde_json::Value::Null };
        record.apply(&[add]).expect("a new volume");
        let planned = PlannedMove { volume: volume.clone(), to: id(1), at: 0, until: Instant::default() };
        assert_eq!(outcome(&record, &planned), Some(GatewayMoveState::Stayed));
        record.apply(&[GroupChange::ProposeMove { volume: volume.clone(), to: id(1) }]).expect("a move");
        assert_eq!(outcome(&record, &planned), None);
        let cancelled = {
            let mut record = record.clone();
            record.apply(&[GroupChange::CancelMove { volume: volume.clone() }]).expect("cancelled");
            record
        };
        assert_eq!(outcome(&cancelled, &planned), Some(GatewayMoveState::Stayed));
        let (start, term) = (StartId([0; 16]), record.volume(&volume).expect("it is there").owner.term);
        record.apply(&[GroupChange::HandOver { volume, from: id(0), start, term, to: id(1) }]).expect("a handover");
        assert_eq!(outcome(&record, &planned), Some(GatewayMoveState::Moved));
    }
}
