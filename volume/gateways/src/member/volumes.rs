//! Volumes of one member: opening, preparing, closing, handing over.
//!
//! ```text
//!  record: owner here           opened                     record: next owner, which is prepared
//!      -------> Opening(term) ---------> Open(term) ------------------> Closing(term, move)
//!                  |   ^                    |                                  | closed
//!           failed |   | later              | record: another owner,           v
//!                  v   |                    | or it is leaving              Closed(term) -- record: another owner --> gone
//!               Failed(until)               v                                  | move cancelled; record: another term
//!                                     Closing(term, gone) --> gone             v
//!                                                                          Opening(next term)
//! ```

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::time::Duration;

use forebay_reactor::Instant;

use super::{GatewayAction, GatewayEvent, GatewayMachine, MemberStanding};
use crate::assign::LoadPlan;
use crate::ids::{MemberId, VolumeName};
use crate::record::{GatewayState, GatewayVolume, GroupChange, VolumeOwner};
use crate::wire::GatewayMessageBody;

/// Maximum number of volumes that a member opens at the same time.
const OPENING_MAX: usize = 32;
/// Time after which a move ends whose next owner is not prepared.
const PREPARE_MAX: Duration = Duration::from_secs(10);
/// Bounds of the time until a volume that could not be opened is tried again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Reason for which a volume could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenFailure {
    /// Failure that may be gone later.
    Later,
    /// No complete copy of the volume's log here: these members have one.
    CopiesElsewhere(BTreeSet<MemberId>),
}

/// Reason for which a volume is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Handover: requests wait until it has another owner.
    Move,
    /// Removal from the group, or another owner already.
    Gone,
    /// Orderly stop of the daemon.
    Stop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Opening,
    Open,
    Failed(Instant),
    Closing(CloseReason),
    /// Closed to be handed over; the record still names this member.
    Closed,
    /// Being moved here: asked to prepare it.
    Preparing,
    /// Prepared; its owner was told.
    Prepared,
}

/// Volume that this member owns, or that is being moved here.
#[derive(Debug, Clone)]
pub(super) struct LocalVolume {
    term: u64,
    phase: Phase,
    /// Number of attempts to open it that have failed.
    failures: u32,
    /// Complete copies of its log, if an attempt to open it has found them elsewhere.
    copies: Option<BTreeSet<MemberId>>,
    /// Next owner that is prepared.
    ready: Option<MemberId>,
    /// Since when it is being moved away.
    moving_since: Option<(MemberId, Instant)>,
}

impl LocalVolume {
    fn new(term: u64, phase: Phase) -> Self {
        Self { term, phase, failures: 0, copies: None, ready: None, moving_since: None }
    }

    pub(super) fn open_term(&self) -> Option<u64> {
        (self.phase == Phase::Open).then_some(self.term)
    }
}

impl GatewayMachine {
    /// Returns a volume of this term that is in one of these phases: anything else is an outcome that came late.
    fn local(&mut self, name: &VolumeName, term: u64, phases: fn(Phase) -> bool) -> Option<&mut LocalVolume> {
        self.volumes.get_mut(name).filter(|volume| volume.term == term && phases(volume.phase))
    }

    /// Takes the outcome of what was asked for a volume.
    pub(super) fn take_volume_event(&mut self, now: Instant, event: GatewayEvent) {
        match event {
            GatewayEvent::Opened(name, term) => {
                if let Some(volume) = self.local(&name, term, |phase| phase == Phase::Opening) {
                    volume.phase = Phase::Open;
                    volume.failures = 0;
                }
            }
            GatewayEvent::OpenFailed(name, term, why) => {
                if let Some(volume) = self.local(&name, term, |phase| phase == Phase::Opening) {
                    let wait = RETRY.0.saturating_mul(1 << volume.failures.min(8)).min(RETRY.1);
                    volume.phase = Phase::Failed(now + wait);
                    volume.failures += 1;
                    volume.copies = match why {
                        OpenFailure::Later => None,
                        OpenFailure::CopiesElsewhere(copies) => Some(copies),
                    };
                }
            }
            GatewayEvent::Closed(name, term) => {
                if let Some(volume) = self.local(&name, term, |phase| matches!(phase, Phase::Closing(_))) {
                    match volume.phase {
                        Phase::Closing(CloseReason::Move | CloseReason::Stop) => volume.phase = Phase::Closed,
                        _ => drop(self.volumes.remove(&name)),
                    }
                }
            }
            GatewayEvent::Prepared(name, term) => {
                if let Some(volume) = self.local(&name, term, |phase| phase == Phase::Preparing) {
                    volume.phase = Phase::Prepared;
                    self.tell_prepared(&name, term);
                }
            }
            _ => {}
        }
    }

    /// Notes that the next owner of a volume is prepared.
    pub(super) fn next_owner_prepared(&mut self, name: &VolumeName, term: u64, by: MemberId) {
        let next = self.record.volume(name).and_then(|entry| entry.owner.next);
        if let Some(volume) = self.volumes.get_mut(name).filter(|volume| volume.term == term && next == Some(by)) {
            volume.ready = Some(by);
        }
    }

    fn tell_prepared(&mut self, name: &VolumeName, term: u64) {
        let Some(entry) = self.record.volume(name) else { return };
        let body = GatewayMessageBody::Prepared { volume: name.clone(), term };
        self.actions.push(GatewayAction::Send(entry.owner.member, body));
    }

    /// Tells the owners of volumes that are prepared here again: a message may be lost.
    pub(super) fn repeat_prepared(&mut self) {
        let prepared = self.volumes.iter().filter(|(_, volume)| volume.phase == Phase::Prepared);
        let prepared: Vec<_> = prepared.map(|(name, volume)| (name.clone(), volume.term)).collect();
        for (name, term) in prepared {
            self.tell_prepared(&name, term);
        }
    }

    /// Brings what is open here nearer to what the record says.
    pub(super) fn reconcile_volumes(&mut self, now: Instant) {
        let record = self.record.clone();
        if self.standing == MemberStanding::Joining {
            return;
        }
        let names: BTreeSet<VolumeName> =
            self.volumes.keys().chain(record.owned_by(self.own)).chain(record.coming_to(self.own)).cloned().collect();
        let mut opening = self.volumes.values().filter(|volume| volume.phase == Phase::Opening).count();
        for name in names {
            let owner = record.volume(&name).map(|volume| volume.owner);
            match owner {
                Some(owner) if owner.member == self.own => self.reconcile_owned(now, &name, owner, &mut opening),
                Some(VolumeOwner { next: Some(next), term, .. }) if next == self.own => {
                    self.reconcile_coming(&name, term)
                }
                _ => self.reconcile_gone(&name),
            }
        }
    }

    fn open(&mut self, name: &VolumeName, term: u64, opening: &mut usize) {
        if *opening >= OPENING_MAX || self.standing != MemberStanding::Serving {
            return;
        }
        *opening += 1;
        let former = self.volumes.remove(name);
        let failures = former.map_or(0, |volume| if volume.term == term { volume.failures } else { 0 });
        self.volumes.insert(name.clone(), LocalVolume { failures, ..LocalVolume::new(term, Phase::Opening) });
        self.actions.push(GatewayAction::Open(name.clone(), term));
    }

    fn close(&mut self, name: &VolumeName, reason: CloseReason) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.phase = Phase::Closing(reason);
            self.actions.push(GatewayAction::Close(name.clone(), volume.term, reason));
        }
    }

    fn is_active(&self, member: MemberId) -> bool {
        self.record.member(member).is_some_and(|entry| entry.state == GatewayState::Active)
    }

    /// Returns whether a volume may be handed over to a member: its copy of the log may have been lost since the move began.
    fn may_be_next(&self, entry: &GatewayVolume, next: MemberId) -> bool {
        self.is_active(next) && entry.copies.as_ref().is_none_or(|copies| copies.contains(&next))
    }

    /// Returns the complete copies of a volume's log that an attempt to open it has found, if another active member has one.
    fn copies_elsewhere<'a>(&self, volume: &'a LocalVolume) -> Option<&'a BTreeSet<MemberId>> {
        let copies = volume.copies.as_ref()?;
        copies.iter().any(|id| *id != self.own && self.is_active(*id)).then_some(copies)
    }

    fn reconcile_owned(&mut self, now: Instant, name: &VolumeName, owner: VolumeOwner, opening: &mut usize) {
        if self.record.volume(name).is_some_and(|entry| entry.leaving) {
            return self.reconcile_gone(name);
        }
        let stopping = self.standing == MemberStanding::Stopping;
        let is_elsewhere = self.volumes.get(name).is_some_and(|volume| self.copies_elsewhere(volume).is_some());
        let Some(volume) = self.volumes.get_mut(name) else {
            return self.open(name, owner.term, opening);
        };
        match volume.phase {
            // Prepared in the term of the former owner; what was prepared is used by the opening.
            Phase::Preparing | Phase::Prepared => self.open(name, owner.term, opening),
            // Not open here, and from now on only in another term: it may be handed over.
            Phase::Failed(_) if owner.next.is_some() || is_elsewhere => volume.phase = Phase::Closed,
            Phase::Failed(at) if now >= at => self.open(name, owner.term, opening),
            // Handed over and given back, or opened again (`volume_changes`).
            Phase::Closed if !stopping && owner.term != volume.term => self.open(name, owner.term, opening),
            Phase::Open if stopping => self.close(name, CloseReason::Stop),
            Phase::Open => {
                let since = volume.moving_since.filter(|(next, _)| owner.next == Some(*next));
                volume.moving_since = since.or(owner.next.map(|next| (next, now)));
                volume.ready = volume.ready.filter(|ready| owner.next == Some(*ready));
                if volume.ready.is_some() {
                    self.close(name, CloseReason::Move);
                }
            }
            _ => {}
        }
    }

    fn reconcile_coming(&mut self, name: &VolumeName, term: u64) {
        match self.volumes.get(name).map(|volume| (volume.phase, volume.term)) {
            Some((Phase::Preparing | Phase::Prepared, known)) if known == term => {}
            // It was here a moment ago, and is still being closed.
            Some((Phase::Open | Phase::Opening | Phase::Closing(_), _)) => self.reconcile_gone(name),
            _ => {
                self.volumes.insert(name.clone(), LocalVolume::new(term, Phase::Preparing));
                self.actions.push(GatewayAction::Prepare(name.clone(), term));
            }
        }
    }

    /// The volume is not owned here, nor coming.
    fn reconcile_gone(&mut self, name: &VolumeName) {
        match self.volumes.get(name).map(|volume| volume.phase) {
            Some(Phase::Open) => self.close(name, CloseReason::Gone),
            // Closed once that has ended.
            Some(Phase::Opening) => {}
            Some(Phase::Preparing | Phase::Prepared) => {
                self.volumes.remove(name);
                self.actions.push(GatewayAction::Unprepare(name.clone()));
            }
            Some(Phase::Failed(_) | Phase::Closed) => drop(self.volumes.remove(name)),
            Some(Phase::Closing(CloseReason::Move | CloseReason::Stop)) => {
                // Closed as for any other reason, and then gone.
                if let Some(volume) = self.volumes.get_mut(name) {
                    volume.phase = Phase::Closing(CloseReason::Gone);
                }
            }
            Some(Phase::Closing(CloseReason::Gone)) | None => {}
        }
    }

    /// Returns the changes of the record that this member's volumes need.
    pub(super) fn volume_changes(&self, now: Instant) -> Vec<GroupChange> {
        let record = &self.record;
        let (loads, mut plan) = (OnceCell::new(), None);
        let mut changes = Vec::new();
        let (by, start) = (self.own, self.start);
        let closed = record.owned_by(self.own).filter(|name| !self.volumes.contains_key(*name));
        let left = closed.filter(|name| record.volumes()[*name].leaving);
        changes.extend(left.map(|name| GroupChange::ForgetVolume { volume: name.clone(), by, start }));
        for (name, volume) in &self.volumes {
            let Some(entry) = record.volume(name).filter(|entry| entry.owner.member == self.own) else { continue };
            let (from, start, term) = (self.own, self.start, entry.owner.term);
            let hand_over = |to| GroupChange::HandOver { volume: name.clone(), from, start, term, to };
            match (volume.phase, entry.owner.next) {
                (Phase::Closed, Some(next)) if term == volume.term => {
                    changes.push(if self.may_be_next(entry, next) {
                        hand_over(next)
                    } else {
                        GroupChange::CancelMove { volume: name.clone() }
                    });
                }
                (Phase::Closed, None) if term == volume.term => match self.copies_elsewhere(volume) {
                    Some(copies) => {
                        let known = entry.copies.as_ref() == Some(copies);
                        let plan =
                            plan.get_or_insert_with(|| LoadPlan::new(record, loads.get_or_init(|| self.group_loads())));
                        let first = copies.iter().copied().find(|id| *id != self.own && self.is_active(*id));
                        let to = if known { plan.choose(Some(name), None) } else { first };
                        let (volume, owner) = (name.clone(), self.own);
                        let set = GroupChange::SetCopies { volume, owner, copies: Some(copies.clone()) };
                        changes.extend((!known).then_some(set));
                        changes.extend(to.map(hand_over));
                    }
                    None => changes.push(GroupChange::Reopen { volume: name.clone(), by, start, term }),
                },
                (Phase::Open, Some(next)) => {
                    let late = volume.moving_since.is_some_and(|(_, since)| now.since(since) > PREPARE_MAX);
                    if !self.may_be_next(entry, next) || late {
                        changes.push(GroupChange::CancelMove { volume: name.clone() });
                    }
                }
                _ => {}
            }
        }
        changes
    }

    /// Returns the changes by which this member stops: once everything is closed, others get its volumes.
    pub(super) fn stopping_changes(&self) -> Vec<GroupChange> {
        let closed = |volume: &LocalVolume| {
            matches!(volume.phase, Phase::Closed | Phase::Failed(_) | Phase::Preparing | Phase::Prepared)
        };
        if !self.volumes.values().all(closed) {
            return Vec::new();
        }
        let loads = self.group_loads();
        let mut plan = LoadPlan::new(&self.record, &loads);
        let stop = GroupChange::Stop { member: self.own, start: self.start };
        std::iter::once(stop).chain(plan.assign_lost(self.own, usize::MAX)).collect()
    }
}
