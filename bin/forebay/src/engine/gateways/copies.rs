//! Choice of the members that have copies of a volume's write log, and of how its owner opens the log: without I/O.

use std::collections::BTreeSet;

use forebay_gateways::MemberId;
use forebay_writelog::LogId;
use forebay_writelog::replication::{LogMembers, MemberState, PeerId};

/// Presence of a member of the group, as a log's owner sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CandidatePresence {
    /// Active and connected.
    Here,
    /// Away for a moment: it may be starting again.
    Away,
    /// Away for longer, or being drained.
    Leaving,
}

/// Member of the group that may have a copy of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CopyCandidate {
    pub(super) peer: PeerId,
    pub(super) presence: CandidatePresence,
    /// Free bytes of the space that it offers; `None` if its medium takes no copy of the log, or not all of it.
    pub(super) free: Option<u64>,
}

/// Chooses `count` members that are to have a copy beside the owner, in an order that is kept: those that have one stay,
/// complete ones first; then those that are being filled; then the ones with the most space.  A member that was chosen
/// before and is away keeps its place only while no other one can take it.
pub(super) fn choose_copies(
    count: usize,
    own: PeerId,
    wanted: &[PeerId],
    log: Option<&LogMembers>,
    candidates: &[CopyCandidate],
) -> Vec<PeerId> {
    let state = |peer: PeerId| log.and_then(|members| members.state(peer));
    let usable = |candidate: &&CopyCandidate| match candidate.presence {
        _ if candidate.peer == own => false,
        CandidatePresence::Here => candidate.free.is_some() || state(candidate.peer).is_some(),
        CandidatePresence::Away => wanted.contains(&candidate.peer),
        CandidatePresence::Leaving => false,
    };
    let rank = |candidate: &&CopyCandidate| {
        let standing = match state(candidate.peer) {
            Some(MemberState::Complete) => 0,
            Some(MemberState::Filling) => 1,
            None => 2,
        };
        let place = wanted.iter().position(|peer| *peer == candidate.peer).unwrap_or(usize::MAX);
        (standing, place, u64::MAX - candidate.free.unwrap_or(0), candidate.peer)
    };
    let mut ranked: Vec<&CopyCandidate> = candidates.iter().filter(usable).collect();
    ranked.sort_by_key(rank);
    let chosen: Vec<PeerId> = ranked.into_iter().take(count).map(|candidate| candidate.peer).collect();
    let away = wanted.iter().filter(|peer| **peer != own && !chosen.contains(*peer));
    let mut all: Vec<PeerId> = chosen.iter().chain(away).copied().take(count).collect();
    // The order says nothing here, so that it is not changed for its own sake.
    all.sort_by_key(|peer| (wanted.iter().position(|before| before == peer).unwrap_or(usize::MAX), *peer));
    all
}

/// Way in which the owner of a volume opens its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LogOpeningPlan {
    /// Opened as the primary that the log's record names.
    AsPrimary,
    /// Taken over from the primary of this term.
    TakeOver(u64),
    /// Not here: these members have complete copies.
    Elsewhere(BTreeSet<MemberId>),
    /// Not yet: the primary has not closed the log, and its client is that of a member that serves.
    PrimaryServes(PeerId),
}

/// Decides how `own` opens a log, of which its log device has the copy `own_copy`.  `serves` says whether a client of the
/// cluster is that of a member that serves.
pub(super) fn plan_opening(
    members: &LogMembers,
    own: PeerId,
    own_copy: Option<LogId>,
    serves: impl Fn(&str) -> bool,
) -> LogOpeningPlan {
    let is_complete = members.state(own) == Some(MemberState::Complete);
    if !is_complete || own_copy.is_none() || own_copy != members.copy(own) {
        let others = members.complete().filter(|peer| *peer != own);
        return LogOpeningPlan::Elsewhere(others.map(|peer| MemberId(peer.0)).collect());
    }
    match members.primary() == own {
        true => LogOpeningPlan::AsPrimary,
        false if !members.client().is_empty() && serves(members.client()) => {
            LogOpeningPlan::PrimaryServes(members.primary())
        }
        false => LogOpeningPlan::TakeOver(members.term()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 16])
    }

    fn peers(numbers: &[u8]) -> Vec<PeerId> {
        numbers.iter().copied().map(peer).collect()
    }

    fn candidate(number: u8, free: u64) -> CopyCandidate {
        CopyCandidate { peer: peer(number), presence: CandidatePresence::Here, free: Some(free) }
    }

    /// Returns the members of a log whose primary is 1, with these complete and filling replicas.
    fn log(complete: &[u8], filling: &[u8]) -> LogMembers {
        let mut members = LogMembers::created(peer(1), [1; 16], "client.1 a".into());
        for number in complete.iter().chain(filling) {
            members = members.with_filling(peer(*number), [*number; 16]);
        }
        complete.iter().fold(members, |members, number| members.with_complete(peer(*number)).expect("filling"))
    }

    #[test]
    fn copies_stay_where_they_are_and_lost_ones_go_where_space_is() {
        let all = [candidate(1, 9), candidate(2, 1), candidate(3, 5), candidate(4, 7)];
        assert_eq!(choose_copies(1, peer(1), &[], None, &all), peers(&[4]), "the most space");
        assert_eq!(choose_copies(2, peer(1), &[], None, &all), peers(&[3, 4]));
        let complete = log(&[2], &[]);
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&complete), &all), peers(&[2]));
        // After a takeover the former owner is wished for as well: who is complete stays.
        assert_eq!(choose_copies(1, peer(1), &peers(&[3, 2]), Some(&complete), &all), peers(&[2]));
        let filling = log(&[], &[3]);
        assert_eq!(choose_copies(1, peer(1), &peers(&[3]), Some(&filling), &all), peers(&[3]), "it is being filled");
        // One without space that has a copy already needs none.
        let full = [CopyCandidate { free: None, ..candidate(2, 0) }, candidate(3, 5)];
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&complete), &full), peers(&[2]));
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&log(&[], &[])), &full), peers(&[3]));
    }

    #[test]
    fn a_member_that_is_away_is_replaced_if_another_one_can() {
        let away = CopyCandidate { presence: CandidatePresence::Leaving, ..candidate(2, 9) };
        let complete = log(&[2], &[]);
        // It is waited for a moment, also if the log has dropped it.
        let restarting = CopyCandidate { presence: CandidatePresence::Away, free: None, ..candidate(2, 0) };
        let all = [restarting, candidate(3, 5)];
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&log(&[], &[])), &all), peers(&[2]));
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&log(&[3], &[])), &all), peers(&[3]), "it is complete");
        assert_eq!(choose_copies(1, peer(1), &[], None, &all), peers(&[3]));
        let chosen = choose_copies(1, peer(1), &peers(&[2]), Some(&complete), &[away.clone(), candidate(3, 5)]);
        assert_eq!(chosen, peers(&[3]));
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&complete), std::slice::from_ref(&away)), peers(&[2]));
        assert_eq!(choose_copies(1, peer(1), &peers(&[2]), Some(&complete), &[]), peers(&[2]), "it may come back");
        let both = choose_copies(2, peer(1), &peers(&[2, 3]), Some(&log(&[3], &[])), &[away, candidate(3, 5)]);
        assert_eq!(both, peers(&[2, 3]), "in the order as it was");
        assert_eq!(choose_copies(2, peer(1), &[], None, &[candidate(1, 9)]), peers(&[]));
    }

    #[test]
    fn a_log_is_opened_by_its_primary_or_taken_over_with_a_complete_copy() {
        let members = log(&[2], &[3]);
        let plan = |own: u8, copy: u8, serves: bool| plan_opening(&members, peer(own), Some([copy; 16]), |_| serves);
        assert_eq!(plan(1, 1, true), LogOpeningPlan::AsPrimary);
        assert_eq!(plan(2, 2, false), LogOpeningPlan::TakeOver(members.term()));
        assert_eq!(plan(2, 2, true), LogOpeningPlan::PrimaryServes(peer(1)), "nobody who is alive is fenced");
        let elsewhere =
            |numbers: &[u8]| LogOpeningPlan::Elsewhere(numbers.iter().map(|number| MemberId([*number; 16])).collect());
        assert_eq!(plan(3, 3, false), elsewhere(&[1, 2]), "its copy lacks writes");
        assert_eq!(plan(4, 4, false), elsewhere(&[1, 2]));
        // A medium that was replaced has another copy.
        assert_eq!(plan(1, 9, false), elsewhere(&[2]));
        assert_eq!(plan_opening(&members, peer(2), None, |_| false), elsewhere(&[1]));
        // Closed in order: nobody has to be fenced.
        let closed = members.closed(String::new());
        let handed = plan_opening(&closed, peer(2), Some([2; 16]), |_| true);
        assert_eq!(handed, LogOpeningPlan::TakeOver(closed.term()));
    }
}
