//! Group record: who is a member, who owns which volume, what is exported.  `docs/formats/gateways.md`.
//!
//! Kept in one object of a pool, and changed by compare-and-set of its epoch only.  [`GroupRecord::apply`] has the rules
//! that every change obeys; nothing here does I/O.

mod change;
mod encode;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{GatewayGroupId, MemberId, StartId, VolumeName};

pub use change::{ChangeRefusal, GroupChange};
pub use encode::{GROUP_KEY, KeyChange, MEMBER_PREFIX, MalformedGroup, RecordKeys, VOLUME_PREFIX};
pub use versions::GroupVersions;

/// Maximum number of members: slots are from 0 to this, exclusive.
pub const GROUP_MEMBERS_MAX: u16 = 128;
/// Maximum number of volumes of a group.
pub const GROUP_VOLUMES_MAX: usize = 65_536;

/// Weight of a member that was given none.
const WEIGHT: u32 = 100;
/// Maximum weight of a member.
pub const WEIGHT_MAX: u32 = 10_000;

/// Policy of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPolicy {
    /// Time for which a member may be silent, in milliseconds.
    pub lease_ms: u32,
    /// Set if volumes are moved by themselves where members' loads differ.
    #[serde(default)]
    pub rebalance: bool,
}

impl GroupPolicy {
    /// Limits of a lease in milliseconds.
    pub const LEASE_MS: std::ops::RangeInclusive<u32> = 200..=60_000;

    /// Returns the lease.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.lease_ms))
    }
}

impl Default for GroupPolicy {
    fn default() -> Self {
        Self { lease_ms: 1000, rebalance: false }
    }
}

/// Fields that a later version has added, kept as they are.
pub type LaterFields = serde_json::Map<String, serde_json::Value>;

/// Identity of a group: all of it but its members and volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupIdentity {
    /// Id, drawn when the group was created.
    pub id: GatewayGroupId,
    /// Policy of the group.
    pub policy: GroupPolicy,
    /// Settings that all members share, such as names of targets, which this crate does not interpret.
    #[serde(default)]
    pub settings: serde_json::Value,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub later: LaterFields,
}

impl GroupIdentity {
    /// Returns the identity of a new group.
    pub fn new(id: GatewayGroupId, policy: GroupPolicy, settings: serde_json::Value) -> Self {
        Self { id, policy, settings, later: LaterFields::new() }
    }
}

/// State of a member in the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state", content = "by")]
pub enum GatewayState {
    /// Serves its volumes, and may be given others.
    Active,
    /// Serves its volumes until they are moved away.
    Draining,
    /// Its start is being fenced, by this member.
    Fencing(MemberId),
    /// Its start was fenced, by this member.
    Out(MemberId),
}

impl GatewayState {
    /// Returns whether the member may have volumes open.
    pub fn serves(self) -> bool {
        matches!(self, Self::Active | Self::Draining)
    }
}

/// Member of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayMember {
    /// Number of the member among those of its group: see [`GROUP_MEMBERS_MAX`].
    pub slot: u16,
    /// Host name, for people.
    pub host: String,
    /// Version of its software.
    pub version: String,
    /// Versions of the record that it works with.
    #[serde(default)]
    pub versions: GroupVersions,
    /// State of the member.
    #[serde(flatten)]
    pub state: GatewayState,
    /// Current or last start.
    pub start: StartId,
    /// Clients of the cluster of that start: what fencing puts on the blocklist.
    pub clients: Vec<String>,
    /// Addresses of its messenger.
    pub peer_addrs: Vec<String>,
    /// Share of the load that it is to have, compared with others; 100 unless an operator has set it, and up to
    /// [`WEIGHT_MAX`].  A member with 0 is given volumes only if no other one is left.
    pub weight: u32,
    /// Ports and other settings, which this crate does not interpret.
    #[serde(default)]
    pub settings: serde_json::Value,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub later: LaterFields,
}

impl GatewayMember {
    /// Returns the entry of an active member with the usual weight, and nothing else that is known of it.
    pub fn new(start: StartId) -> Self {
        Self {
            slot: 0,
            host: String::new(),
            version: String::new(),
            versions: GroupVersions::OWN,
            state: GatewayState::Active,
            start,
            clients: Vec::new(),
            peer_addrs: Vec::new(),
            weight: WEIGHT,
            settings: serde_json::Value::Null,
            later: LaterFields::new(),
        }
    }
}

/// Owner of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeOwner {
    /// Id of the member.
    pub member: MemberId,
    /// Epoch in which it became the owner.
    pub term: u64,
    /// Member that is to be the next owner, if the volume is being moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<MemberId>,
}

/// Volume of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayVolume {
    /// Owner of the volume.
    pub owner: VolumeOwner,
    /// Members with a complete copy of its write log, as its owner last said; `None` if it has no log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<BTreeSet<MemberId>>,
    /// Set once the volume is to leave the group: its owner closes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// Exports of the volume, which this crate does not interpret.
    #[serde(default)]
    pub settings: serde_json::Value,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub later: LaterFields,
}

/// Group record.
///
/// | invariant | |
/// |---|---|
/// | R1 | no two members share a slot |
/// | R2 | the owner of a volume is a member |
/// | R3 | the next owner of a volume is another member than its owner |
/// | R4 | every member works with the version of the record |
#[derive(Debug, Clone)]
pub struct GroupRecord {
    epoch: u64,
    version: u32,
    identity: GroupIdentity,
    members: BTreeMap<MemberId, GatewayMember>,
    volumes: BTreeMap<VolumeName, GatewayVolume>,
    /// Volumes by owner.
    owned: BTreeMap<MemberId, BTreeSet<VolumeName>>,
    /// Volumes by next owner.
    coming: BTreeMap<MemberId, BTreeSet<VolumeName>>,
    /// Slots of members that have left, and when, in seconds since 1970: they are not given out again soon.
    left: BTreeMap<u16, u64>,
}

impl PartialEq for GroupRecord {
    fn eq(&self, other: &Self) -> bool {
        // `owned` and `coming` follow from the volumes.
        (self.epoch, self.version, &self.identity, &self.members, &self.volumes, &self.left)
            == (other.epoch, other.version, &other.identity, &other.members, &other.volumes, &other.left)
    }
}

impl GroupRecord {
    /// Creates the record of a new group, of this version.
    pub fn created(identity: GroupIdentity, version: u32) -> Self {
        Self {
            epoch: 1,
            version,
            identity,
            members: BTreeMap::new(),
            volumes: BTreeMap::new(),
            owned: BTreeMap::new(),
            coming: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    /// Returns the epoch: the number of changes since the group was created, and 1.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the version in which the record is stored.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the next version, if every member works with it.
    pub fn next_version(&self) -> Option<u32> {
        let next = self.version + 1;
        let mut members = self.members.values().peekable();
        (members.peek().is_some() && members.all(|member| member.versions.contains(next))).then_some(next)
    }

    /// Returns what the group is.
    pub fn identity(&self) -> &GroupIdentity {
        &self.identity
    }

    /// Returns the policy.
    pub fn policy(&self) -> GroupPolicy {
        self.identity.policy
    }

    /// Returns all members.
    pub fn members(&self) -> &BTreeMap<MemberId, GatewayMember> {
        &self.members
    }

    /// Returns a member.
    pub fn member(&self, id: MemberId) -> Option<&GatewayMember> {
        self.members.get(&id)
    }

    /// Returns whether a member serves in this start.
    pub fn serves(&self, id: MemberId, start: StartId) -> bool {
        self.member(id).is_some_and(|member| member.start == start && member.state.serves())
    }

    /// Returns the members that may be given volumes.
    pub fn active(&self) -> impl Iterator<Item = MemberId> + '_ {
        self.members.iter().filter(|(_, member)| member.state == GatewayState::Active).map(|(id, _)| *id)
    }

    /// Returns all volumes.
    pub fn volumes(&self) -> &BTreeMap<VolumeName, GatewayVolume> {
        &self.volumes
    }

    /// Returns a volume.
    pub fn volume(&self, name: &VolumeName) -> Option<&GatewayVolume> {
        self.volumes.get(name)
    }

    /// Returns the names of the volumes that a member owns.
    pub fn owned_by(&self, member: MemberId) -> impl Iterator<Item = &VolumeName> + '_ {
        self.owned.get(&member).into_iter().flatten()
    }

    /// Returns the names of the volumes that are being moved to a member.
    pub fn coming_to(&self, member: MemberId) -> impl Iterator<Item = &VolumeName> + '_ {
        self.coming.get(&member).into_iter().flatten()
    }

    /// Returns the number of volumes that are being moved.
    pub fn moving_count(&self) -> usize {
        self.coming.values().map(BTreeSet::len).sum()
    }

    /// Returns the number of volumes that a member owns.
    pub fn owned_count(&self, member: MemberId) -> usize {
        self.owned.get(&member).map_or(0, BTreeSet::len)
    }

    /// Returns the lowest slot that is not taken, and was not for the last 24 h before `now` (seconds since 1970).
    pub fn free_slot(&self, now: u64) -> Option<u16> {
        let taken: BTreeSet<u16> = self.members.values().map(|member| member.slot).collect();
        let recent =
            |slot: &u16| self.left.get(slot).is_some_and(|left| now.saturating_sub(*left) < change::SLOT_REST_SECONDS);
        let free = || (0..GROUP_MEMBERS_MAX).filter(|slot| !taken.contains(slot));
        // A group in which all were taken within a day takes the one that has been free for the longest time.
        free().find(|slot| !recent(slot)).or_else(|| free().min_by_key(|slot| self.left.get(slot).copied()))
    }

    fn index(&mut self, name: &VolumeName, before: Option<VolumeOwner>, after: Option<VolumeOwner>) {
        fn change(
            index: &mut BTreeMap<MemberId, BTreeSet<VolumeName>>,
            member: MemberId,
            name: &VolumeName,
            add: bool,
        ) {
            let names = index.entry(member).or_default();
            if add {
                names.insert(name.clone());
            } else {
                names.remove(name);
            }
            if names.is_empty() {
                index.remove(&member);
            }
        }
        for (owner, add) in [(before, false), (after, true)] {
            let Some(VolumeOwner { member, next, .. }) = owner else { continue };
            change(&mut self.owned, member, name, add);
            if let Some(next) = next {
                change(&mut self.coming, next, name, add);
            }
        }
    }

    fn set_volume(&mut self, name: &VolumeName, volume: Option<GatewayVolume>) {
        let after = volume.as_ref().map(|volume| volume.owner);
        let before = match volume {
            Some(volume) => self.volumes.insert(name.clone(), volume),
            None => self.volumes.remove(name),
        };
        self.index(name, before.map(|volume| volume.owner), after);
    }
}
