//! Paths of hosts to the group's volumes: which of them are best, and at which addresses the other members are.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use forebay_gateways::{GatewayMember, GatewayVolume, GroupRecord, VolumeName};
use forebay_iscsi::scsi::ports::TargetPort;
use forebay_iscsi::{PortGroups, RemotePortGroup, Target};
use forebay_nvmf::wire::log::AnaState;
use forebay_nvmf::{MemberPort, Subsystem};
use forebay_reactor::spawn;

use super::JoinedGroup;
use super::settings::{self, GroupSettings, MemberNvmePort, MemberSettings};
use crate::api::Front;
use crate::engine::Engine;
use crate::failure::{Failure, Result};

/// Number of NVMe port ids of each member.
const PORT_IDS: u16 = 64;

/// Returns the NVMe/TCP ports of this daemon, for the record.
pub(super) fn own_nvme_ports(engine: &Engine) -> Vec<MemberNvmePort> {
    let ports = engine.fronts.nvme().reachable_ports().into_iter();
    ports.map(|port| MemberNvmePort { addr: port.address.to_string(), id: port.id, tls: port.tls }).collect()
}

/// Returns the id of a member's port among those of the group; `None` if the member has too many.
fn port_id(slot: u16, id: u16) -> Option<u16> {
    (id < PORT_IDS).then_some(slot * PORT_IDS + id)
}

/// Returns the NVMe/TCP ports of a member.
fn ports_of(slot: u16, settings: &MemberSettings) -> Vec<MemberPort> {
    let port = |port: &MemberNvmePort| {
        let address: SocketAddr = port.addr.parse().ok()?;
        Some(MemberPort { id: port_id(slot, port.id)?, address, tls: port.tls })
    };
    settings.nvme.iter().filter_map(port).collect()
}

/// Returns the iSCSI portals of this daemon, for the record.
pub(super) fn own_portals(engine: &Engine) -> Result<Vec<String>> {
    Ok(engine.fronts.iscsi().reachable_portals()?.iter().map(ToString::to_string).collect())
}

/// Returns the iSCSI portals of a member, each once; none of one that does not serve.
fn portals_of(member: &GatewayMember) -> BTreeSet<SocketAddr> {
    let MemberSettings { iscsi, .. } = settings::read(&member.settings);
    let listed = iscsi.iter().filter(|_| member.state.serves());
    listed.filter_map(|portal| portal.parse().ok()).collect()
}

/// Returns the addresses that several members list, such as that of a bridge for containers: each host would reach another
/// machine there, or none.
fn ambiguous(listed: impl Iterator<Item = BTreeSet<SocketAddr>>) -> BTreeSet<SocketAddr> {
    let mut seen = BTreeSet::new();
    listed.flatten().filter(|address| !seen.insert(*address)).collect()
}

/// Returns the iSCSI target port of a member, in a group of its own.
fn target_port(slot: u16) -> TargetPort {
    TargetPort { group: slot + 1, relative_id: slot + 1 }
}

impl JoinedGroup {
    /// Returns the iSCSI target port groups, one for each member; portals are listed of those that serve.
    pub(super) fn port_groups(&self, record: &GroupRecord) -> Result<PortGroups> {
        let own = target_port(record.member(self.own).map_or(0, |member| member.slot));
        let ambiguous = ambiguous(record.members().values().map(portals_of));
        let others = record.members().iter().filter(|(id, _)| **id != self.own);
        let remote = others.map(|(_, member)| RemotePortGroup {
            port: target_port(member.slot),
            portals: portals_of(member).difference(&ambiguous).copied().collect(),
        });
        PortGroups::new(own, remote.collect()).map_err(|error| Failure::invalid(error.to_string()))
    }

    /// Returns the NVMe subsystem of the group here, if it has one by now.
    pub(super) fn subsystem(&self, engine: &Engine, record: &GroupRecord) -> Option<Subsystem> {
        let GroupSettings { nqn, .. } = GroupSettings::of(record.identity());
        engine.fronts.nvme().subsystem(Some(&nqn)).ok()
    }

    /// Tells hosts which volumes they reach best through this member, and where the other members are.
    ///
    /// A path is optimized at the owner that has the volume open, and inaccessible at a member that must not serve hosts:
    /// they use others then, and keep this one.
    pub(super) fn update_paths(&self) {
        let (Some(engine), Some(record)) = (self.engine(), self.record()) else { return };
        if let Some(subsystem) = self.subsystem(&engine, &record) {
            self.update_nvme(&subsystem, &record);
        }
        let GroupSettings { target, .. } = GroupSettings::of(record.identity());
        if let Ok(target) = engine.fronts.iscsi().target(Some(&target)) {
            self.update_iscsi(&target, &record);
        }
    }

    fn update_nvme(&self, subsystem: &Subsystem, record: &GroupRecord) {
        let others = record.members().iter().filter(|(id, member)| **id != self.own && member.state.serves());
        let others = others.flat_map(|(_, member)| ports_of(member.slot, &settings::read(&member.settings))).collect();
        let slot = record.member(self.own).map_or(0, |member| member.slot);
        subsystem.set_ports(slot * PORT_IDS, others);
        let states = self.settings.all().into_iter().filter_map(|(name, settings)| {
            let nsid = settings.export(Front::Nvme)?.unit?;
            Some((nsid, self.ana_state(&name, record.volume(&name)?)))
        });
        subsystem.set_namespace_states(states);
    }

    fn update_iscsi(&self, target: &Target, record: &GroupRecord) {
        match self.port_groups(record) {
            Ok(groups) if target.port_groups().as_deref() != Some(&groups) => target.set_port_groups(Some(groups)),
            Ok(_) => {}
            Err(error) => tracing::error!(group = %self.spec, %error, "hosts cannot be told of all members over iSCSI"),
        }
        for (name, settings) in self.settings.all() {
            let Some(lun) = settings.export(Front::Iscsi).and_then(|export| export.unit) else { continue };
            let (Ok(lun), Some(volume)) = (u16::try_from(lun), record.volume(&name)) else { continue };
            let Some(unit) = target.unit_at(lun) else { continue };
            let owner = record.member(volume.owner.member).map(|member| target_port(member.slot).group);
            // While this member moves it to another one, hosts learn of the new owner when it is one.
            if unit.preferred_group() != owner {
                unit.set_preferred_group(owner);
            }
        }
        // Requests of sessions that have ended may still be in flight; they are not waited for.
        // Units lead to devices of the former start until then.
        match self.serves_hosts() && !self.exports.any_suspended(Front::Iscsi) {
            true if target.is_suspended() => target.resume(),
            false if !target.is_suspended() => drop(spawn(target.suspend())),
            _ => {}
        }
    }

    fn serves_hosts(&self) -> bool {
        self.hosts_admitted.get() && self.running().is_some()
    }

    fn ana_state(&self, name: &VolumeName, volume: &GatewayVolume) -> AnaState {
        if !self.serves_hosts() || self.exports.is_suspended(name, Front::Nvme) {
            AnaState::Inaccessible
        } else if volume.owner.member == self.own && self.owned.is_open(name) {
            AnaState::Optimized
        } else {
            AnaState::NonOptimized
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_several_members_list_are_ambiguous() {
        let portals = |iscsi: &[&str]| {
            let iscsi = iscsi.iter().map(|portal| (*portal).to_owned()).collect();
            let settings = settings::write(&MemberSettings { iscsi, ..MemberSettings::default() });
            let state = forebay_gateways::GatewayState::Active;
            portals_of(&GatewayMember {
                slot: 0,
                host: "gateway".into(),
                version: "1".into(),
                versions: Default::default(),
                state,
                start: forebay_gateways::StartId([1; 16]),
                clients: Vec::new(),
                peer_addrs: Vec::new(),
                weight: 100,
                settings,
                later: Default::default(),
            })
        };
        let first = portals(&["10.0.0.1:3260", "172.17.0.1:3260", "172.17.0.1:3260", "gateway:3260"]);
        let second = portals(&["10.0.0.2:3260", "172.17.0.1:3260"]);
        assert_eq!((first.len(), second.len()), (2, 2), "each once, and no names");
        let shared = BTreeSet::from([SocketAddr::from(([172, 17, 0, 1], 3260))]);
        assert_eq!(ambiguous([first, second].into_iter()), shared);
    }

    #[test]
    fn port_ids_are_unique_in_the_group() {
        let port = |addr: &str, id| MemberNvmePort { addr: addr.into(), id, tls: id == 2 };
        let nvme = vec![port("10.0.0.1:4420", 1), port("[fd00::1]:4420", 2), port("host:1", 3), port("10.0.0.1:9", 64)];
        let found = ports_of(3, &MemberSettings { nvme, ..MemberSettings::default() });
        let ids: Vec<(u16, bool)> = found.iter().map(|port| (port.id, port.tls)).collect();
        assert_eq!(ids, [(193, false), (194, true)], "neither a name nor an id of the next member");
        assert!(port_id(forebay_gateways::record::GROUP_MEMBERS_MAX - 1, PORT_IDS - 1).is_some_and(|id| id < 0x8000));
    }
}
