//! Changes of the group record, and the conditions of each.

use std::collections::BTreeSet;

use super::{
    GROUP_MEMBERS_MAX, GROUP_VOLUMES_MAX, GatewayMember, GatewayState, GatewayVolume, GroupPolicy, GroupRecord,
    RecordKeys, VolumeOwner, WEIGHT_MAX,
};
use crate::ids::{MemberId, StartId, VolumeName};

/// Time for which the slot of a member that has left is not given to another one, in seconds: hosts may remember ids
/// that come from it.
pub(super) const SLOT_REST_SECONDS: u64 = 24 * 3600;

/// Change of a group record.  Several are made in one step, or none.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupChange {
    /// Condition: the record has this epoch before the changes, which were decided on it.
    Expect(u64),
    /// The member joins, or rejoins with another start after its former one was fenced.
    Join {
        /// Id of the member.
        member: MemberId,
        /// Its entry, which is *active*.  A member that rejoins keeps its slot and its weight.
        entry: GatewayMember,
    },
    /// The member is to have another share of the load.
    SetWeight {
        /// Id of the member.
        member: MemberId,
        /// Its weight.
        weight: u32,
    },
    /// A member that owns nothing leaves.
    Leave {
        /// Id of the member.
        member: MemberId,
        /// Time in seconds since 1970.
        now: u64,
    },
    /// The member takes no more volumes, and those that it has are moved away; or it does again.
    Drain {
        /// Id of the member.
        member: MemberId,
        /// Set to drain it, unset to end that.
        drain: bool,
    },
    /// A member begins to fence a start of another one.
    BeginFencing {
        /// Member that is to be fenced.
        member: MemberId,
        /// Its start.
        start: StartId,
        /// Member that fences it.
        by: MemberId,
    },
    /// The start was fenced: its clients are on the blocklist.
    Fenced {
        /// Member that was fenced.
        member: MemberId,
        /// Its start.
        start: StartId,
        /// Member that has fenced it.
        by: MemberId,
    },
    /// A member has closed all that it had open, and stops.  It is *out* without having been fenced.
    Stop {
        /// Id of the member.
        member: MemberId,
        /// Its start.
        start: StartId,
    },
    /// A new volume gets its first owner.
    AddVolume {
        /// Name of the volume.
        volume: VolumeName,
        /// Id of the owner.
        owner: MemberId,
        /// Exports of the volume.
        settings: serde_json::Value,
    },
    /// The exports of a volume change.
    SetVolume {
        /// Name of the volume.
        volume: VolumeName,
        /// Exports of the volume.
        settings: serde_json::Value,
    },
    /// A volume is to leave the group.  Its owner closes it.
    RemoveVolume {
        /// Name of the volume.
        volume: VolumeName,
    },
    /// A volume that was to leave is closed, and leaves.
    ForgetVolume {
        /// Name of the volume.
        volume: VolumeName,
        /// Owner, unless that is *out*.
        by: MemberId,
        /// Start of that member.
        start: StartId,
    },
    /// The owner opens a volume again that it had closed to hand it over.  The term is another one, so that the handover
    /// cannot be made any more, wherever it is on its way.
    Reopen {
        /// Name of the volume.
        volume: VolumeName,
        /// Id of the owner.
        by: MemberId,
        /// Start of the owner.
        start: StartId,
        /// Term of the owner.
        term: u64,
    },
    /// A volume whose owner is *out* gets another one.
    Assign {
        /// Name of the volume.
        volume: VolumeName,
        /// Next owner.
        to: MemberId,
    },
    /// A volume is to be moved.
    ProposeMove {
        /// Name of the volume.
        volume: VolumeName,
        /// Next owner.
        to: MemberId,
    },
    /// A volume stays with its owner.
    CancelMove {
        /// Name of the volume.
        volume: VolumeName,
    },
    /// The owner has closed the volume, and gives it to another member.
    HandOver {
        /// Name of the volume.
        volume: VolumeName,
        /// Id of the owner.
        from: MemberId,
        /// Start of the owner.
        start: StartId,
        /// Term of the owner.
        term: u64,
        /// Next owner.
        to: MemberId,
    },
    /// The owner says which members have complete copies of the volume's log.
    SetCopies {
        /// Name of the volume.
        volume: VolumeName,
        /// Id of the owner.
        owner: MemberId,
        /// Members with a complete copy; `None` if the volume has no log.
        copies: Option<BTreeSet<MemberId>>,
    },
    /// The policy changes.
    SetPolicy(GroupPolicy),
    /// The settings of the group change, which this crate does not interpret.
    SetSettings(serde_json::Value),
    /// The record is stored in the next version from now on, with which every member works.
    RaiseVersion(u32),
}

/// Reason for which a change is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefusal {
    /// No such member.
    #[error("the group has no such member")]
    NoMember,
    /// No such volume.
    #[error("the group has no such volume")]
    NoVolume,
    /// Volume that the group has already.
    #[error("the group has this volume already")]
    VolumeExists,
    /// The member is in another state, or in another start.
    #[error("the member is in another state, or was started again")]
    MemberState,
    /// The member has not been fenced.
    #[error("another start of the member is in the group, and was not fenced")]
    NotFenced,
    /// Another member fences it.
    #[error("another member fences it")]
    FencedByAnother,
    /// The slot is taken, too large, or another one than before.
    #[error("the slot of the member is taken, or not its own")]
    Slot,
    /// The member owns volumes.
    #[error("the member owns volumes")]
    OwnsVolumes,
    /// The owner of the volume may have it open.
    #[error("the owner of the volume may have it open")]
    OwnerServes,
    /// The volume has another owner, or another term.
    #[error("the volume has another owner by now")]
    NotOwner,
    /// The member cannot be given volumes.
    #[error("the member cannot be given volumes")]
    NotActive,
    /// The member has no complete copy of the volume's log.
    #[error("the member has no complete copy of the volume's write log")]
    NoCopy,
    /// The record has another epoch by now.
    #[error("the record of the group was changed meanwhile")]
    Epoch,
    /// The volume is not to leave.
    #[error("the volume is not being removed")]
    NotLeaving,
    /// The move leads nowhere else.
    #[error("the volume is, or is being moved, there already")]
    SameOwner,
    /// The group is full.
    #[error("the group has as many volumes as it may have")]
    Full,
    /// The weight is out of bounds.
    #[error("the weight is out of range: from 0 to {WEIGHT_MAX}")]
    Weight,
    /// The policy is out of bounds.
    #[error("the lease is out of range")]
    Policy,
    /// A member does not work with the version of the record.
    #[error("a member does not work with this version of the group's record")]
    Version,
}

impl GroupRecord {
    /// Makes changes in one step: all, or none.  Returns the keys that are written.  The epoch is one more.
    ///
    /// # Errors
    /// Reason for which one of the changes is refused; the record is as before.
    pub fn apply(&mut self, changes: &[GroupChange]) -> Result<RecordKeys, ChangeRefusal> {
        let mut undo = Undo { record: self, members: Vec::new(), volumes: Vec::new(), done: false };
        undo.apply(changes)
    }

    fn must_member(&self, id: MemberId) -> Result<&GatewayMember, ChangeRefusal> {
        self.members.get(&id).ok_or(ChangeRefusal::NoMember)
    }

    fn must_volume(&self, name: &VolumeName) -> Result<&GatewayVolume, ChangeRefusal> {
        self.volumes.get(name).ok_or(ChangeRefusal::NoVolume)
    }

    /// Returns whether a member may become the owner of a volume (G6).
    fn may_own(&self, volume: &GatewayVolume, to: MemberId) -> Result<(), ChangeRefusal> {
        if volume.leaving {
            return Err(ChangeRefusal::NoVolume);
        }
        if self.must_member(to)?.state != GatewayState::Active {
            return Err(ChangeRefusal::NotActive);
        }
        match &volume.copies {
            Some(copies) if !copies.contains(&to) => Err(ChangeRefusal::NoCopy),
            _ => Ok(()),
        }
    }

    /// Returns the entry of a member that joins.
    fn joined(&self, member: MemberId, entry: &GatewayMember) -> Result<GatewayMember, ChangeRefusal> {
        if entry.state != GatewayState::Active {
            return Err(ChangeRefusal::MemberState);
        }
        if entry.slot >= GROUP_MEMBERS_MAX {
            return Err(ChangeRefusal::Slot);
        }
        if !entry.versions.contains(self.version) {
            return Err(ChangeRefusal::Version);
        }
        match self.members.get(&member) {
            Some(former) if !matches!(former.state, GatewayState::Out(_)) => Err(ChangeRefusal::NotFenced),
            Some(former) if former.start == entry.start => Err(ChangeRefusal::MemberState),
            Some(former) if former.slot != entry.slot => Err(ChangeRefusal::Slot),
            Some(former) => Ok(GatewayMember { weight: former.weight, ..entry.clone() }),
            None if self.members.values().any(|other| other.slot == entry.slot) => Err(ChangeRefusal::Slot),
            None => Ok(entry.clone()),
        }
    }
}

/// Change in progress, which is undone unless it is completed.
struct Undo<'a> {
    record: &'a mut GroupRecord,
    members: Vec<(MemberId, Option<GatewayMember>)>,
    volumes: Vec<(VolumeName, Option<GatewayVolume>)>,
    done: bool,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        for (id, before) in self.members.drain(..).rev() {
            match before {
                Some(before) => drop(self.record.members.insert(id, before)),
                None => drop(self.record.members.remove(&id)),
            }
        }
        for (name, before) in std::mem::take(&mut self.volumes).into_iter().rev() {
            self.record.set_volume(&name, before);
        }
    }
}

impl Undo<'_> {
    fn apply(&mut self, changes: &[GroupChange]) -> Result<RecordKeys, ChangeRefusal> {
        let (version, identity, left) = (self.record.version, self.record.identity.clone(), self.record.left.clone());
        for change in changes {
            if let Err(refusal) = self.apply_one(change) {
                (self.record.version, self.record.identity, self.record.left) = (version, identity, left);
                return Err(refusal);
            }
        }
        self.done = true;
        self.record.epoch += 1;
        let members = self.members.iter().map(|(id, _)| *id).collect();
        let volumes = self.volumes.iter().map(|(name, _)| name.clone()).collect();
        Ok(RecordKeys { members, volumes })
    }

    fn set_member(&mut self, id: MemberId, entry: Option<GatewayMember>) {
        let before = match entry {
            Some(entry) => self.record.members.insert(id, entry),
            None => self.record.members.remove(&id),
        };
        self.members.push((id, before));
    }

    fn set_state(&mut self, id: MemberId, state: GatewayState) {
        let entry = self.record.members.get(&id).map(|entry| GatewayMember { state, ..entry.clone() });
        self.set_member(id, entry);
    }

    fn set_volume(&mut self, name: &VolumeName, volume: Option<GatewayVolume>) {
        self.volumes.push((name.clone(), self.record.volumes.get(name).cloned()));
        self.record.set_volume(name, volume);
    }

    fn set_owner(&mut self, name: &VolumeName, owner: VolumeOwner) {
        let volume = self.record.volumes.get(name).map(|volume| GatewayVolume { owner, ..volume.clone() });
        self.set_volume(name, volume);
    }

    fn apply_one(&mut self, change: &GroupChange) -> Result<(), ChangeRefusal> {
        use ChangeRefusal as Refused;
        let record = &*self.record;
        let new_term = record.epoch + 1;
        match change {
            GroupChange::Expect(epoch) if *epoch != record.epoch => return Err(Refused::Epoch),
            GroupChange::Expect(_) => {}
            GroupChange::Join { member, entry } => {
                let entry = record.joined(*member, entry)?;
                self.record.left.remove(&entry.slot);
                self.set_member(*member, Some(entry));
            }
            GroupChange::SetWeight { member, weight } => {
                if *weight > WEIGHT_MAX {
                    return Err(Refused::Weight);
                }
                let entry = GatewayMember { weight: *weight, ..record.must_member(*member)?.clone() };
                self.set_member(*member, Some(entry));
            }
            GroupChange::Leave { member, now } => {
                let slot = record.must_member(*member)?.slot;
                if record.owned_count(*member) > 0 {
                    return Err(Refused::OwnsVolumes);
                }
                let coming: Vec<VolumeName> = record.coming_to(*member).cloned().collect();
                for name in coming {
                    let owner = self.record.must_volume(&name)?.owner;
                    self.set_owner(&name, VolumeOwner { next: None, ..owner });
                }
                self.record.left.insert(slot, *now);
                self.set_member(*member, None);
            }
            GroupChange::Drain { member, drain } => {
                if !record.must_member(*member)?.state.serves() {
                    return Err(Refused::MemberState);
                }
                self.set_state(*member, if *drain { GatewayState::Draining } else { GatewayState::Active });
            }
            GroupChange::BeginFencing { member, start, by } => {
                let entry = record.must_member(*member)?;
                // A member fences its own former start when it was started again.
                if entry.start != *start || (member != by && !record.must_member(*by)?.state.serves()) {
                    return Err(Refused::MemberState);
                }
                match entry.state {
                    GatewayState::Active | GatewayState::Draining => {}
                    GatewayState::Out(_) => return Err(Refused::MemberState),
                    // Another one goes on only if that one has failed as well (G4).
                    GatewayState::Fencing(former) if record.member(former).is_some_and(|m| m.state.serves()) => {
                        return Err(Refused::FencedByAnother);
                    }
                    GatewayState::Fencing(_) => {}
                }
                self.set_state(*member, GatewayState::Fencing(*by));
            }
            GroupChange::Fenced { member, start, by } => {
                let entry = record.must_member(*member)?;
                match entry.state {
                    _ if entry.start != *start => return Err(Refused::MemberState),
                    GatewayState::Fencing(fencing) if fencing == *by => {}
                    GatewayState::Fencing(_) => return Err(Refused::FencedByAnother),
                    _ => return Err(Refused::MemberState),
                }
                self.set_state(*member, GatewayState::Out(*by));
            }
            GroupChange::Stop { member, start } => {
                if !record.serves(*member, *start) {
                    return Err(Refused::MemberState);
                }
                self.set_state(*member, GatewayState::Out(*member));
            }
            GroupChange::AddVolume { volume, owner, settings } => {
                if record.volumes.contains_key(volume) {
                    return Err(Refused::VolumeExists);
                }
                if record.volumes.len() >= GROUP_VOLUMES_MAX {
                    return Err(Refused::Full);
                }
                let owner = VolumeOwner { member: *owner, term: new_term, next: None };
                let entry = GatewayVolume {
                    owner,
                    copies: None,
                    leaving: false,
                    settings: settings.clone(),
                    later: Default::default(),
                };
                record.may_own(&entry, owner.member)?;
                self.set_volume(volume, Some(entry));
            }
            GroupChange::SetVolume { volume, settings } => {
                let entry = GatewayVolume { settings: settings.clone(), ..record.must_volume(volume)?.clone() };
                self.set_volume(volume, Some(entry));
            }
            GroupChange::RemoveVolume { volume } => {
                let entry = record.must_volume(volume)?.clone();
                let owner = VolumeOwner { next: None, ..entry.owner };
                self.set_volume(volume, Some(GatewayVolume { leaving: true, owner, ..entry }));
            }
            GroupChange::ForgetVolume { volume, by, start } => {
                let entry = record.must_volume(volume)?;
                if !entry.leaving {
                    return Err(Refused::NotLeaving);
                }
                let owner_is_out = matches!(record.must_member(entry.owner.member)?.state, GatewayState::Out(_));
                if !record.serves(*by, *start) || (entry.owner.member != *by && !owner_is_out) {
                    return Err(Refused::NotOwner);
                }
                self.set_volume(volume, None);
            }
            GroupChange::Reopen { volume, by, start, term } => {
                let owner = record.must_volume(volume)?.owner;
                if (owner.member, owner.term) != (*by, *term) || !record.serves(*by, *start) {
                    return Err(Refused::NotOwner);
                }
                self.set_owner(volume, VolumeOwner { term: new_term, ..owner });
            }
            GroupChange::Assign { volume, to } => {
                let entry = record.must_volume(volume)?;
                let former = record.must_member(entry.owner.member)?;
                if !matches!(former.state, GatewayState::Out(_)) && entry.owner.member != *to {
                    return Err(Refused::OwnerServes);
                }
                if !matches!(former.state, GatewayState::Out(_)) {
                    return Err(Refused::SameOwner);
                }
                record.may_own(entry, *to)?;
                self.set_owner(volume, VolumeOwner { member: *to, term: new_term, next: None });
            }
            GroupChange::ProposeMove { volume, to } => {
                let entry = record.must_volume(volume)?;
                let VolumeOwner { member, next, .. } = entry.owner;
                if member == *to || next == Some(*to) {
                    return Err(Refused::SameOwner);
                }
                if !record.must_member(member)?.state.serves() {
                    return Err(Refused::NotOwner);
                }
                record.may_own(entry, *to)?;
                self.set_owner(volume, VolumeOwner { next: Some(*to), ..entry.owner });
            }
            GroupChange::CancelMove { volume } => {
                let owner = record.must_volume(volume)?.owner;
                self.set_owner(volume, VolumeOwner { next: None, ..owner });
            }
            GroupChange::HandOver { volume, from, start, term, to } => {
                let entry = record.must_volume(volume)?;
                let owns = entry.owner.member == *from && entry.owner.term == *term;
                if !owns || !record.serves(*from, *start) {
                    return Err(Refused::NotOwner);
                }
                if from == to {
                    return Err(Refused::SameOwner);
                }
                record.may_own(entry, *to)?;
                self.set_owner(volume, VolumeOwner { member: *to, term: new_term, next: None });
            }
            GroupChange::SetCopies { volume, owner, copies } => {
                let entry = record.must_volume(volume)?;
                if entry.owner.member != *owner {
                    return Err(Refused::NotOwner);
                }
                self.set_volume(volume, Some(GatewayVolume { copies: copies.clone(), ..entry.clone() }));
            }
            GroupChange::SetPolicy(policy) => {
                if !GroupPolicy::LEASE_MS.contains(&policy.lease_ms) {
                    return Err(Refused::Policy);
                }
                self.record.identity.policy = *policy;
            }
            GroupChange::SetSettings(settings) => self.record.identity.settings.clone_from(settings),
            GroupChange::RaiseVersion(version) => {
                if record.next_version() != Some(*version) {
                    return Err(Refused::Version);
                }
                self.record.version = *version;
            }
        }
        Ok(())
    }
}
