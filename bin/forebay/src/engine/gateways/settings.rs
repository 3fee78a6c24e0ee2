//! Settings that the daemon keeps in the record of a gateway group.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_gateways::{GatewayGroupId, GroupIdentity, GroupRecord, MemberId, VolumeName};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::hosts::GroupHosts;
use crate::api::{AttachRequest, Front, LogPlace};
use crate::engine::identity::format_uuid;
use crate::failure::{Failure, FailureKind, Result};

/// Settings of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSettings {
    /// NQN of the NVMe subsystem of the group.
    pub nqn: String,
    /// Name of the iSCSI target of the group.
    pub target: String,
    /// Hosts that may use them.
    #[serde(default, skip_serializing_if = "GroupHosts::is_default")]
    pub hosts: GroupHosts,
}

impl GroupSettings {
    /// Returns the settings of a new group: names that its id makes unique.
    pub fn new(id: GatewayGroupId) -> Self {
        let uuid = format_uuid(&id.0);
        Self {
            nqn: format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"),
            target: format!("iqn.2026-11.io.forebay:{uuid}"),
            hosts: GroupHosts::default(),
        }
    }

    /// Returns the settings of a group.
    ///
    /// # Errors
    /// If a later version has written them.
    pub fn of(identity: &GroupIdentity) -> Result<Self> {
        match &identity.settings {
            Value::Null => Ok(Self::new(identity.id)),
            settings => Self::deserialize(settings).map_err(|error| later_version("the group's names", &error)),
        }
    }
}

/// Settings of a member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberSettings {
    /// Addresses of NBD, as a URI has them: `HOST:PORT`.
    #[serde(default)]
    pub nbd: Vec<String>,
    /// Ports of NVMe/TCP.
    #[serde(default)]
    pub nvme: Vec<MemberNvmePort>,
    /// Portals of iSCSI: `IP:PORT`.
    #[serde(default)]
    pub iscsi: Vec<String>,
    /// Set if it knows exports of single members: a version that does not takes a volume with no others for one without
    /// exports, and removes it.
    #[serde(default)]
    pub member_exports: bool,
}

/// NVMe/TCP port of a member, as its hosts reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberNvmePort {
    /// Address: `IP:PORT`.
    pub addr: String,
    /// Port id within the member, from 1.
    pub id: u16,
    /// TLS required.
    #[serde(default)]
    pub tls: bool,
}

/// Settings of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSettings {
    /// UUID of the image, the same for all daemons: by it hosts recognize the volume, and members name it to each other.
    #[serde(default)]
    pub identity: String,
    /// Exports of all members, one a front.  Those that a later version has written are left out.
    #[serde(default, deserialize_with = "known")]
    pub exports: Vec<AttachRequest>,
    /// Exports of single members, over fronts that only guests of a member's machine reach; one a front and member.  Those
    /// that a later version has written are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "known")]
    pub member_exports: Vec<MemberExport>,
    /// Write log that it is to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<VolumeLog>,
}

/// Export of a volume at one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberExport {
    /// Member whose machine has the guest.
    pub member: MemberId,
    /// Its export.
    pub export: AttachRequest,
}

/// Write log of a volume, wherever its members are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeLog {
    /// Medium, size and limits; without a path or peers.
    pub place: LogPlace,
    /// Number of members that have copies beside the owner.
    pub replicas: u32,
}

/// Reads those entries of a list that this version knows.
fn known<'de, D: Deserializer<'de>, T: for<'a> Deserialize<'a>>(list: D) -> std::result::Result<Vec<T>, D::Error> {
    let all = Vec::<Value>::deserialize(list)?;
    Ok(all.iter().filter_map(|entry| T::deserialize(entry).ok()).collect())
}

/// Returns whether exports over a front are of one member, as only guests of its machine reach them.
pub fn is_of_one_member(front: Front) -> bool {
    front == Front::Vhost
}

impl VolumeSettings {
    /// Returns the export of all members over a front.
    pub fn export(&self, front: Front) -> Option<&AttachRequest> {
        self.exports.iter().find(|export| export.front == front)
    }

    /// Returns the export over a front as a member has it.
    pub fn export_at(&self, member: MemberId, front: Front) -> Option<&AttachRequest> {
        self.exports_at(member).find(|export| export.front == front)
    }

    /// Returns the exports that a member has.
    pub fn exports_at(&self, member: MemberId) -> impl Iterator<Item = &AttachRequest> {
        let own = self.member_exports.iter().filter(move |own| own.member == member);
        self.exports.iter().chain(own.map(|own| &own.export))
    }

    /// Returns whether any member has an export.
    pub fn has_exports(&self) -> bool {
        !self.exports.is_empty() || !self.member_exports.is_empty()
    }

    /// Adds an export that a member has attached, and that is its own or of all.
    pub fn add_export(&mut self, member: MemberId, export: AttachRequest) {
        match is_of_one_member(export.front) {
            true => self.member_exports.push(MemberExport { member, export }),
            false => self.exports.push(export),
        }
    }

    /// Removes the export over a front as a member has it.
    pub fn remove_export(&mut self, member: MemberId, front: Front) {
        self.exports.retain(|export| export.front != front);
        self.member_exports.retain(|own| own.member != member || own.export.front != front);
    }
}

/// Settings of the volumes of a record, read once for each change of them.
#[derive(Default)]
pub struct SettingsByVolume {
    read: RefCell<BTreeMap<VolumeName, (Value, Rc<VolumeSettings>)>>,
}

impl SettingsByVolume {
    /// Follows a change of the record.
    pub fn update(&self, record: &GroupRecord) {
        let before = self.read.take();
        let staying = record.volumes().iter().filter(|(_, volume)| !volume.leaving);
        let read_again = staying.map(|(name, volume)| {
            let entry = match before.get(name) {
                Some(same) if same.0 == volume.settings => same.clone(),
                other => {
                    let former = other.map(|(_, settings)| &**settings);
                    (volume.settings.clone(), Rc::new(follow(name, &volume.settings, former)))
                }
            };
            (name.clone(), entry)
        });
        let now: BTreeMap<_, _> = read_again.collect();
        self.read.replace(now);
    }

    /// Forgets all volumes.
    pub fn clear(&self) {
        self.read.take();
    }

    /// Returns the settings of a volume; `None` if it is not in the record, or is to leave it.
    pub fn get(&self, name: &VolumeName) -> Option<Rc<VolumeSettings>> {
        self.read.borrow().get(name).map(|(_, settings)| settings.clone())
    }

    /// Returns the settings of all volumes that stay.
    pub fn all(&self) -> Vec<(VolumeName, Rc<VolumeSettings>)> {
        self.read.borrow().iter().map(|(name, (_, settings))| (name.clone(), settings.clone())).collect()
    }
}

/// Reads the settings of a volume that have changed.  What a later version has written stays as it was.
fn follow(name: &VolumeName, settings: &Value, former: Option<&VolumeSettings>) -> VolumeSettings {
    let mut read = match VolumeSettings::deserialize(settings) {
        Ok(read) => read,
        Err(error) => {
            tracing::error!(volume = %name, %error, "settings in the record of a gateway group are of a later version");
            return former.cloned().unwrap_or_default();
        }
    };
    let former = former.filter(|former| former.identity == read.identity);
    for export in raw_exports(settings) {
        let Err(error) = AttachRequest::deserialize(export) else { continue };
        tracing::error!(volume = %name, %error, "an export in the record of a gateway group is of a later version");
        let same = |kept: &&AttachRequest| export.get("front").and_then(Value::as_str) == Some(kept.front.name());
        let kept = former.and_then(|former| former.exports.iter().find(same)).cloned();
        read.exports.extend(kept);
    }
    for own in raw_list(settings, "member_exports") {
        let Err(error) = MemberExport::deserialize(own) else { continue };
        tracing::error!(volume = %name, %error, "a member's export in the record of a gateway group is of a later version");
        let front = own.get("export").and_then(|export| export.get("front")).and_then(Value::as_str);
        let member = own.get("member").and_then(|member| MemberId::deserialize(member).ok());
        let same = |kept: &&MemberExport| front == Some(kept.export.front.name()) && member == Some(kept.member);
        read.member_exports.extend(former.and_then(|former| former.member_exports.iter().find(same)).cloned());
    }
    read
}

fn raw_exports(settings: &Value) -> impl Iterator<Item = &Value> {
    raw_list(settings, "exports")
}

fn raw_list<'a>(settings: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    settings.get(list).and_then(Value::as_array).into_iter().flatten()
}

/// Returns the numbers over a front that a volume's settings take, exports of a later version included.
pub fn taken_units(settings: &Value, front: Front) -> impl Iterator<Item = u32> {
    let of_front = move |export: &&Value| export.get("front").and_then(Value::as_str) == Some(front.name());
    let unit = |export: &Value| u32::try_from(export.get("unit")?.as_u64()?).ok();
    raw_exports(settings).filter(of_front).filter_map(unit)
}

/// Settings of the members of a record, read once for each change of them.
#[derive(Default)]
pub struct SettingsByMember {
    read: RefCell<BTreeMap<MemberId, (Value, Rc<MemberSettings>)>>,
}

impl SettingsByMember {
    /// Follows a change of the record.  What a later version has written stays as it was.
    pub fn update(&self, record: &GroupRecord) {
        let before = self.read.take();
        let read_again = record.members().iter().map(|(id, member)| {
            let (value, settings) = (&member.settings, before.get(id));
            let entry = match (settings, MemberSettings::deserialize(value)) {
                (Some(same), _) if same.0 == *value => same.clone(),
                (_, Ok(read)) => (value.clone(), Rc::new(read)),
                (former, Err(error)) => {
                    tracing::error!(
                        member = %id, host = member.host, %error,
                        "settings of a member of a gateway group are of a later version"
                    );
                    (value.clone(), former.map(|(_, settings)| settings.clone()).unwrap_or_default())
                }
            };
            (*id, entry)
        });
        let now: BTreeMap<_, _> = read_again.collect();
        self.read.replace(now);
    }

    /// Returns the settings of a member.
    pub fn get(&self, member: MemberId) -> Rc<MemberSettings> {
        self.read.borrow().get(&member).map(|(_, settings)| settings.clone()).unwrap_or_default()
    }
}

fn later_version(what: &str, error: &dyn std::fmt::Display) -> Failure {
    let what = format!("{what} in the record of the gateway group are of a later version: {error}");
    Failure::new(FailureKind::Unsupported, what)
        .hint("run the command at a member with that version, or upgrade this one")
}

/// Reads settings of the record that are to be shown.
pub fn read<T: Default + for<'de> Deserialize<'de>>(settings: &Value) -> T {
    T::deserialize(settings).unwrap_or_default()
}

/// Reads settings of the record that are to be changed.
///
/// # Errors
/// If a later version has written them: something of them would be lost.
pub fn read_to_change<T: Serialize + for<'de> Deserialize<'de>>(what: &str, settings: &Value) -> Result<T> {
    let read = T::deserialize(settings).map_err(|error| later_version(what, &error))?;
    match lost(settings, Some(&write(&read)), "") {
        None => Ok(read),
        Some(field) => Err(later_version(what, &format_args!("unknown setting{field}"))),
    }
}

/// Returns the first field that is not in `after`.
fn lost(before: &Value, after: Option<&Value>, path: &str) -> Option<String> {
    match (before, after) {
        (Value::Null, _) => None,
        (Value::Array(before), None) if before.is_empty() => None,
        (Value::Object(before), Some(Value::Object(after))) => {
            let each = |(key, value): (&String, &Value)| lost(value, after.get(key), &format!("{path} {key}"));
            before.iter().find_map(each)
        }
        (Value::Array(before), Some(Value::Array(after))) if before.len() == after.len() => {
            before.iter().zip(after).find_map(|(before, after)| lost(before, Some(after), path))
        }
        (Value::Object(_) | Value::Array(_), _) | (_, None) => Some(path.to_owned()),
        _ => None,
    }
}

/// Writes settings for the record.
pub fn write<T: Serialize>(settings: &T) -> Value {
    serde_json::to_value(settings).expect("plain data becomes JSON")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn export(front: &str) -> Value {
        json!({"pool": "rbd", "image": "a", "front": front, "read_only": false})
    }

    #[test]
    fn exports_of_a_later_version_stay_as_they_were() {
        let name = VolumeName::new("rbd/a");
        let first = json!({"identity": "i", "exports": [export("nbd"), export("nvme")]});
        let former = follow(&name, &first, None);
        assert_eq!(former.exports.len(), 2);
        let mut later = first.clone();
        later["exports"][1]["compression"] = json!("zstd");
        later["exports"][1]["unit"] = json!(7);
        let kept = follow(&name, &later, Some(&former));
        assert_eq!(kept, former, "the export of the later version is the former one");
        assert_eq!(follow(&name, &later, None).exports.len(), 1, "without one it is not served");
        assert_eq!(follow(&name, &later, None).identity, "i");
        assert_eq!(taken_units(&later, Front::Nvme).collect::<Vec<_>>(), [7]);
        assert_eq!(taken_units(&later, Front::Nbd).count(), 0);
        later["exports"].as_array_mut().expect("a list").remove(1);
        assert_eq!(follow(&name, &later, Some(&kept)).exports.len(), 1, "it ends when the record says so");
        later["identity"] = json!(5);
        assert_eq!(follow(&name, &later, Some(&kept)), kept);
        // Another image of that name has nothing of the former one.
        later = json!({"identity": "other", "exports": [{"front": "nvme", "compression": 1}]});
        assert_eq!(follow(&name, &later, Some(&kept)).exports.len(), 0);
    }

    #[test]
    fn what_a_later_version_has_written_is_not_overwritten() {
        let read = |value: &Value| read_to_change::<VolumeSettings>("the settings of rbd/a", value);
        let plain = json!({"identity": "i", "exports": [export("nbd")]});
        assert_eq!(read(&plain).expect("of this version").exports.len(), 1);
        let mut written = write(&read(&plain).expect("of this version"));
        assert!(read(&written).is_ok());
        // What is absent here by default may be there by name.
        written["exports"][0]["hosts"] = json!([]);
        written["exports"][0]["unit"] = Value::Null;
        assert!(read(&written).is_ok());
        for (field, value) in [("tier", json!("fast")), ("identity", json!(5)), ("exports", json!({}))] {
            let mut later = plain.clone();
            later[field] = value;
            let failure = read(&later).expect_err(field);
            assert_eq!(failure.kind, FailureKind::Unsupported, "{field}");
        }
        for (field, value) in [("compression", json!("zstd")), ("front", json!("ublk")), ("read_only", json!("maybe"))]
        {
            let mut later = plain.clone();
            later["exports"][0][field] = value;
            assert_eq!(read(&later).expect_err(field).kind, FailureKind::Unsupported, "{field}");
        }
    }

    #[test]
    fn exports_of_single_members_are_kept_apart() {
        let [own, other] = [MemberId([1; 16]), MemberId([2; 16])];
        let mut settings = VolumeSettings::default();
        let request = |front| AttachRequest::new("rbd", "a", front);
        settings.add_export(own, request(Front::Vhost));
        settings.add_export(other, request(Front::Vhost));
        settings.add_export(own, request(Front::Nbd));
        let fronts =
            |settings: &VolumeSettings, member| settings.exports_at(member).map(|each| each.front).collect::<Vec<_>>();
        assert_eq!(fronts(&settings, own), [Front::Nbd, Front::Vhost]);
        assert_eq!(fronts(&settings, MemberId([3; 16])), [Front::Nbd]);
        let read = read_to_change::<VolumeSettings>("the settings of rbd/a", &write(&settings));
        assert_eq!(read.expect("of this version"), settings);
        // An export of a later version stays as it was, and is not overwritten.
        let (name, mut later) = (VolumeName::new("rbd/a"), write(&settings));
        later["member_exports"][1]["export"]["compression"] = json!("zstd");
        let kept = follow(&name, &later, Some(&settings));
        assert_eq!(kept, settings);
        assert_eq!(fronts(&follow(&name, &later, None), other), [Front::Nbd]);
        read_to_change::<VolumeSettings>("the settings of rbd/a", &later).expect_err("a field would be lost");
        settings.remove_export(own, Front::Vhost);
        assert_eq!((fronts(&settings, own), settings.has_exports()), (vec![Front::Nbd], true));
        settings.remove_export(own, Front::Nbd);
        assert!(settings.has_exports(), "the other member's is left");
        settings.remove_export(other, Front::Vhost);
        assert_eq!(settings, VolumeSettings::default());
        // A volume without any looks as it did before there were such exports.
        assert!(write(&settings).get("member_exports").is_none());
    }

    #[test]
    fn names_of_a_group_are_not_guessed() {
        let id = GatewayGroupId([7; 16]);
        let of = |settings| GroupSettings::of(&GroupIdentity::new(id, Default::default(), settings));
        let usual = GroupSettings::new(id);
        assert_eq!(of(Value::Null).expect("of this version"), usual);
        assert_eq!(of(write(&usual)).expect("of this version"), usual);
        let later = of(json!({"nqn": ["nqn.a", "nqn.b"], "target": "iqn.a"}));
        assert_eq!(later.expect_err("two names").kind, FailureKind::Unsupported);
    }
}
