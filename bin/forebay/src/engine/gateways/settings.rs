//! Settings that the daemon keeps in the record of a gateway group.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_gateways::{GatewayGroupId, GroupIdentity, GroupRecord, VolumeName};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{AttachRequest, Front};
use crate::engine::identity::format_uuid;

/// Settings of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSettings {
    /// NQN of the NVMe subsystem of the group.
    pub nqn: String,
    /// Name of the iSCSI target of the group.
    pub target: String,
}

impl GroupSettings {
    /// Returns the settings of a new group: names that its id makes unique.
    pub fn new(id: GatewayGroupId) -> Self {
        let uuid = format_uuid(&id.0);
        Self {
            nqn: format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"),
            target: format!("iqn.2026-11.io.forebay:{uuid}"),
        }
    }

    /// Returns the settings of a group.
    pub fn of(identity: &GroupIdentity) -> Self {
        Self::deserialize(&identity.settings).unwrap_or_else(|_| Self::new(identity.id))
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
    /// Exports, one a front.
    #[serde(default)]
    pub exports: Vec<AttachRequest>,
}

impl VolumeSettings {
    /// Returns the export over a front.
    pub fn export(&self, front: Front) -> Option<&AttachRequest> {
        self.exports.iter().find(|export| export.front == front)
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
        let mut before = self.read.take();
        let staying = record.volumes().iter().filter(|(_, volume)| !volume.leaving);
        let read_again = staying.map(|(name, volume)| {
            let same = before.remove(name).filter(|(text, _)| *text == volume.settings);
            let entry = same.unwrap_or_else(|| (volume.settings.clone(), Rc::new(read(&volume.settings))));
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

/// Reads settings of the record; those that a later version has written count as empty.
pub fn read<T: Default + for<'de> Deserialize<'de>>(settings: &Value) -> T {
    T::deserialize(settings).unwrap_or_default()
}

/// Writes settings for the record.
pub fn write<T: Serialize>(settings: &T) -> Value {
    serde_json::to_value(settings).expect("plain data becomes JSON")
}
