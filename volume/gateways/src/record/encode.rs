//! Stored form of the group record: a key for the group, and one for each member and volume; values are JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{GatewayMember, GatewayVolume, GroupIdentity, GroupRecord, GroupVersions, VolumeOwner};
use crate::ids::{MemberId, VolumeName};

/// Key of the entry of the group.
pub const GROUP_KEY: &[u8] = b"group";
/// Beginning of the keys of members; their id follows.
pub const MEMBER_PREFIX: &str = "member.";
/// Beginning of the keys of volumes; their name follows.
pub const VOLUME_PREFIX: &str = "volume.";

/// Fault of a stored record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedGroup {
    /// No entry of the group.
    #[error("the object has no record of a gateway group")]
    None,
    /// A version that this program does not work with.
    #[error("the record of the gateway group has version {version}; this program works with {works_with}")]
    Version {
        /// Version of the record.
        version: u32,
        /// Versions of the program.
        works_with: GroupVersions,
    },
    /// Features that this version does not know.
    #[error("the record of the gateway group uses features that this program does not know: {0}")]
    Features(String),
    /// An entry cannot be read.
    #[error("the entry '{key}' of the gateway group is malformed: {why}")]
    Entry {
        /// Name of the key.
        key: String,
        /// Fault of its value.
        why: String,
    },
    /// Entries contradict each other.
    #[error("the record of the gateway group is malformed: {0}")]
    Contradiction(&'static str),
}

/// Keys that a change has written or removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordKeys {
    /// Members that were changed.
    pub members: BTreeSet<MemberId>,
    /// Volumes that were changed.
    pub volumes: BTreeSet<VolumeName>,
}

/// Stored entry of the group.
#[derive(Serialize, Deserialize)]
struct StoredGroup {
    version: u32,
    /// Features that a program must know to change the record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    features: Vec<String>,
    epoch: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    left: BTreeMap<u16, u64>,
    /// Last: it takes the fields that are not known.
    #[serde(flatten)]
    identity: GroupIdentity,
}

fn malformed(key: &[u8], why: impl ToString) -> MalformedGroup {
    MalformedGroup::Entry { key: String::from_utf8_lossy(key).into_owned(), why: why.to_string() }
}

fn read<'de, T: Deserialize<'de>>(key: &[u8], value: &'de [u8]) -> Result<T, MalformedGroup> {
    serde_json::from_slice(value).map_err(|error| malformed(key, error))
}

fn write<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data becomes JSON")
}

/// Key and value that are set; `None` removes the key.
pub type KeyChange = (Vec<u8>, Option<Vec<u8>>);

impl GroupRecord {
    /// Returns the value of [`GROUP_KEY`].
    pub fn encode_group(&self) -> Vec<u8> {
        let (epoch, identity, left) = (self.epoch, self.identity.clone(), self.left.clone());
        write(&StoredGroup { version: self.version, features: Vec::new(), epoch, left, identity })
    }

    /// Returns what is stored under these keys, and the group's entry.
    pub fn encode_keys(&self, keys: &RecordKeys) -> Vec<KeyChange> {
        let members = keys.members.iter().map(|id| (member_key(*id), self.members.get(id).map(write)));
        let volumes = keys.volumes.iter().map(|name| (volume_key(name), self.volumes.get(name).map(write)));
        let group = (GROUP_KEY.to_vec(), Some(self.encode_group()));
        std::iter::once(group).chain(members).chain(volumes).collect()
    }

    /// Returns all keys.
    pub fn all_keys(&self) -> RecordKeys {
        RecordKeys { members: self.members.keys().copied().collect(), volumes: self.volumes.keys().cloned().collect() }
    }

    /// Decodes a stored record for a program that works with these versions.
    ///
    /// # Errors
    /// [`MalformedGroup`] where it is no record, or of another version.
    pub fn decode(
        pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
        works_with: GroupVersions,
    ) -> Result<Self, MalformedGroup> {
        let mut pairs: BTreeMap<Vec<u8>, Vec<u8>> = pairs.into_iter().collect();
        let group = pairs.remove(GROUP_KEY).ok_or(MalformedGroup::None)?;
        let mut record = Self::decode_group(&group, works_with)?;
        for (key, value) in pairs {
            record.decode_entry(&key, Some(&value))?;
        }
        record.check()?;
        Ok(record)
    }

    /// Applies changes of keys that were announced, if they follow this record: `Ok(false)` if they do not.
    ///
    /// # Errors
    /// [`MalformedGroup`] where they leave no record; it must be read again.
    pub fn follow(&mut self, changes: &[KeyChange], works_with: GroupVersions) -> Result<bool, MalformedGroup> {
        let group = changes.iter().find(|(key, _)| key == GROUP_KEY).and_then(|(_, value)| value.as_deref());
        let next = Self::decode_group(group.ok_or(MalformedGroup::None)?, works_with)?;
        if next.epoch != self.epoch + 1 || next.identity.id != self.identity.id {
            return Ok(false);
        }
        for (key, value) in changes.iter().filter(|(key, _)| key != GROUP_KEY) {
            self.decode_entry(key, value.as_deref())?;
        }
        (self.epoch, self.version, self.identity, self.left) = (next.epoch, next.version, next.identity, next.left);
        self.check()?;
        Ok(true)
    }

    fn decode_group(value: &[u8], works_with: GroupVersions) -> Result<Self, MalformedGroup> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = read(GROUP_KEY, value)?;
        if !works_with.contains(version) {
            return Err(MalformedGroup::Version { version, works_with });
        }
        let StoredGroup { features, epoch, identity, left, .. } = read(GROUP_KEY, value)?;
        if !features.is_empty() {
            return Err(MalformedGroup::Features(features.join(", ")));
        }
        if epoch == 0 || epoch >= u64::MAX >> 1 {
            return Err(malformed(GROUP_KEY, format!("no record has the epoch {epoch}")));
        }
        Ok(Self { epoch, left, ..Self::created(identity, version) })
    }

    /// Applies one key; those of later versions are ignored.
    fn decode_entry(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<(), MalformedGroup> {
        if let Some(id) = key.strip_prefix(MEMBER_PREFIX.as_bytes()) {
            let id = std::str::from_utf8(id).map_err(|error| malformed(key, error))?;
            let id: MemberId = id.parse().map_err(|error| malformed(key, error))?;
            match value {
                Some(value) => drop(self.members.insert(id, read::<GatewayMember>(key, value)?)),
                None => drop(self.members.remove(&id)),
            }
        } else if let Some(name) = key.strip_prefix(VOLUME_PREFIX.as_bytes()) {
            let name = VolumeName::new(std::str::from_utf8(name).map_err(|error| malformed(key, error))?);
            let volume = value.map(|value| read::<GatewayVolume>(key, value)).transpose()?;
            self.set_volume(&name, volume);
        }
        Ok(())
    }

    /// Checks what entries say of each other.
    fn check(&self) -> Result<(), MalformedGroup> {
        let slots: BTreeSet<u16> = self.members.values().map(|member| member.slot).collect();
        if slots.len() != self.members.len() {
            return Err(MalformedGroup::Contradiction("two members have one slot (R1)"));
        }
        if slots.last().is_some_and(|slot| *slot >= super::GROUP_MEMBERS_MAX) {
            return Err(MalformedGroup::Contradiction("a slot is too large"));
        }
        if !super::GroupPolicy::LEASE_MS.contains(&self.identity.policy.lease_ms) {
            return Err(MalformedGroup::Contradiction("the lease is out of range"));
        }
        if self.owned.keys().any(|owner| !self.members.contains_key(owner)) {
            return Err(MalformedGroup::Contradiction("a volume is owned by no member (R2)"));
        }
        let moves_nowhere = |VolumeOwner { member, next, .. }: &VolumeOwner| *next == Some(*member);
        if self.coming.values().flatten().any(|name| moves_nowhere(&self.volumes[name].owner)) {
            return Err(MalformedGroup::Contradiction("a volume is moved to its owner (R3)"));
        }
        Ok(())
    }
}

fn member_key(id: MemberId) -> Vec<u8> {
    format!("{MEMBER_PREFIX}{id}").into_bytes()
}

fn volume_key(name: &VolumeName) -> Vec<u8> {
    format!("{VOLUME_PREFIX}{name}").into_bytes()
}
