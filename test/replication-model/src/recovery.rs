//! Recovery of a volume from a state, with no further failures, by what daemons and an operator do anyway.

use forebay_writelog::replication::MemberState;

use crate::model::{Limits, ModelAction, ModelState, ReplicationModel};
use crate::peer::PeerRole;

/// Number of events within which a volume must be served again.
const EVENTS_MAX: usize = 400;
/// Changes of the record that this may take, past those of the exploration.
const CHANGES: u64 = 8;

/// Returns whether the volume is served again when all peers are back, and all that is on its way arrives.  True as well where
/// no copy is left that could be served: a member may be dropped while the medium of the last other one fails.
pub(crate) fn gets_on(model: &ReplicationModel, state: &ModelState) -> bool {
    let Limits { changes, time, .. } = model.limits;
    let model = ReplicationModel {
        limits: Limits {
            changes: changes + CHANGES,
            crashes: 0,
            media: 0,
            closes: 0,
            writes: 0,
            time: time * 2,
            ..model.limits
        },
        omission: model.omission,
    };
    let mut state = state.clone();
    for _ in 0..EVENTS_MAX {
        if is_served(&state) || !(0..model.limits.peers).any(|peer| has_copy(&state, peer)) {
            return true;
        }
        let mut actions = model.actions(&state);
        actions.sort_by_key(|action| priority(&state, action));
        let wanted = actions.into_iter().filter(|action| priority(&state, action) < u8::MAX);
        let Some(next) = wanted.into_iter().find_map(|action| model.next_state(&state, action)) else { return false };
        state = next;
    }
    false
}

/// Returns whether a peer has the copy that the record names, and all that was acknowledged in it.
fn has_copy(state: &ModelState, peer: u8) -> bool {
    let disk = &state.peers[peer as usize].disk;
    let named = state.backend.record.members().find(|(member, _)| *member == peer);
    named.is_some_and(|(_, member)| {
        member.state == MemberState::Complete && member.copy == disk.copy.id() && !disk.failed
    })
}

/// Returns whether the current primary serves, and owes no answer.
fn is_served(state: &ModelState) -> bool {
    let primary = state.backend.record.primary();
    match &state.peers[primary as usize].role {
        PeerRole::Primary(serving) => {
            state.is_current(primary)
                && serving.progress.serves()
                // A write that died with a process is not answered.
                && state.pending.is_none_or(|(peer, number)| peer != primary || number >= serving.log.head())
                && !state.backend.fenced.contains(&(primary, state.peers[primary as usize].starts))
        }
        _ => false,
    }
}

/// Returns the order in which events are tried; `u8::MAX` for those that are no part of getting on.
fn priority(state: &ModelState, action: &ModelAction) -> u8 {
    let open = |peer: u8| if state.backend.record.primary() == peer { 5 } else { 6 };
    match action {
        ModelAction::Acknowledge | ModelAction::GiveUp => 0,
        ModelAction::NoticeFence(_) | ModelAction::ReadRecord(_) => 1,
        ModelAction::Deliver(_) | ModelAction::Persist(_) => 2,
        ModelAction::Apply(_) => 3,
        ModelAction::Fence(_) | ModelAction::SendOpening(_) => 4,
        // A peer that is down in the middle of an opening, or has lost its copy, opens nothing.
        ModelAction::Open(peer) if has_copy(state, *peer) && !serves_soon(state) => open(*peer),
        // A member whose copy is lost is not waited for.
        ModelAction::Drop(at, member) if !has_copy(state, *member) && has_others(state, *at) => 7,
        ModelAction::Tick => 8,
        _ => u8::MAX,
    }
}

/// Returns whether the current primary runs, with a copy, or a peer is about to become primary.
fn serves_soon(state: &ModelState) -> bool {
    let runs = |(at, peer): (usize, &crate::peer::PeerState)| match &peer.role {
        PeerRole::Opening(_) => true,
        PeerRole::Primary(_) => state.is_current(at as u8),
        PeerRole::Idle => false,
    };
    state.peers.iter().enumerate().any(runs)
}

/// Returns whether a complete copy is left apart from that of the peer's own medium, if that has failed.
fn has_others(state: &ModelState, at: u8) -> bool {
    (0..state.peers.len() as u8)
        .any(|peer| (peer != at || !state.peers[at as usize].disk.failed) && has_copy(state, peer))
}
