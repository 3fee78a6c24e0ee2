//! Gateway groups: the record and the state machine of a member.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-gateways");
const SIM: Stage = Stage::Test("forebay-gateways", "simulation");

const CHANGE: &str = "volume/gateways/src/record/change.rs";
const MEMBER: &str = "volume/gateways/src/member/mod.rs";
const OBSERVING: &str = "volume/gateways/src/member/observing.rs";
const LOAD: &str = "volume/gateways/src/load.rs";
const REBALANCING: &str = "volume/gateways/src/member/rebalancing.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "gateway-reopens-in-its-term",
        "A volume is opened again while its handover may still be made",
        CHANGE,
        "self.set_owner(volume, VolumeOwner { term: new_term, ..owner });",
        "self.set_owner(volume, VolumeOwner { term: owner.term, ..owner });",
        &[UNIT],
    ),
    Mutant::new(
        "gateway-assigned-unfenced",
        "The volumes of a member that is being fenced are assigned",
        CHANGE,
        "if !matches!(former.state, GatewayState::Out(_)) && entry.owner.member != *to {",
        "if former.state.serves() && entry.owner.member != *to {",
        &[UNIT],
    ),
    Mutant::new(
        "gateway-joins-unfenced",
        "A member joins while its former start may still write",
        CHANGE,
        "Some(former) if !matches!(former.state, GatewayState::Out(_)) => Err(ChangeRefusal::NotFenced),",
        "Some(former) if former.state.serves() => Err(ChangeRefusal::NotFenced),",
        &[UNIT],
    ),
    Mutant::new(
        "gateway-accuses-alone",
        "A member is fenced although another observer hears it",
        OBSERVING,
        "let silent = (is_refused || now.since(heard.last) >= patience) && !heard_by_others;",
        "let silent = (is_refused || now.since(heard.last) >= patience) && (heard_by_others || !heard_by_others);",
        &[SIM],
    ),
    Mutant::new(
        "gateway-joins-unheard",
        "A member that hears nobody joins",
        MEMBER,
        "if 2 * observers.iter().filter(answers).count() >= observers.len() {",
        "if 2 * observers.iter().filter(answers).count() <= 2 * observers.len() {",
        &[SIM],
    ),
    Mutant::new(
        "gateway-pool-back-for-one",
        "The first member that reaches the pool again fences the others",
        OBSERVING,
        "let pool_reached = self.pool_silence(now) <= lease / 2 && now.since(self.pool_reached_since) >= 2 * lease;",
        "let pool_reached = self.pool_silence(now) <= lease / 2;",
        &[SIM],
    ),
    Mutant::new(
        "gateway-load-begins-low",
        "The load of a volume that was just opened counts as a small part of it",
        LOAD,
        "let whole = |rate: f64| (rate / self.measured).round() as u32;",
        "let whole = |rate: f64| (rate / self.measured.max(1.0)).round() as u32;",
        &[UNIT],
    ),
    Mutant::new(
        "gateway-load-number-begins-again",
        "Others keep the load that a former start of a member has said",
        MEMBER,
        "load_number: wall_clock() << 10,",
        "load_number: 0,",
        &[SIM],
    ),
    Mutant::new(
        "gateway-weight-forgotten",
        "A member that was fenced has the usual weight again",
        CHANGE,
        "Some(former) => Ok(GatewayMember { weight: former.weight, ..entry.clone() }),",
        "Some(_) => Ok(entry.clone()),",
        &[UNIT],
    ),
    Mutant::new(
        "gateway-moves-unsettled",
        "A member moves volumes while loads still change",
        REBALANCING,
        "let patience = self.rebalancing.settle + LOOK_INTERVAL * rank.min(RANK_MAX) as u32;",
        "let patience = LOOK_INTERVAL * rank.min(RANK_MAX) as u32;",
        &[SIM],
    ),
    Mutant::new(
        "gateway-moves-beside-others",
        "Members that begin to move volumes at the same time all do",
        REBALANCING,
        "let mut changes = vec![GroupChange::Expect(record.epoch())];",
        "let mut changes = vec![GroupChange::SetPolicy(record.policy())];",
        &[SIM],
    ),
];
