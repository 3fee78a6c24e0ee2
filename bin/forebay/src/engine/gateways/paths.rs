//! Paths of hosts to the group's volumes: which of them are best, and at which addresses the other members are.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use forebay_gateways::{GatewayMember, GatewayVolume, GroupRecord, MemberId, VolumeName};
use forebay_iscsi::scsi::ports::TargetPort;
use forebay_iscsi::{PortGroups, RemotePortGroup, Target};
use forebay_nvmf::wire::log::AnaState;
use forebay_nvmf::{MemberPort, Subsystem};
use forebay_reactor::spawn;

use super::JoinedGroup;
use super::settings::{MemberNvmePort, MemberSettings};
use crate::api::Front;
use crate::engine::Engine;
use crate::failure::{Failure, FailureKind, Result};

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

/// Returns the iSCSI portals of a member, each once.
fn portals_of(settings: &MemberSettings) -> BTreeSet<SocketAddr> {
    settings.iscsi.iter().filter_map(|portal| portal.parse().ok()).collect()
}

/// Returns the addresses that several members list, such as that of a bridge for containers: each host would reach another
/// machine there, or none.
fn ambiguous(listed: impl Iterator<Item = BTreeSet<SocketAddr>>) -> BTreeSet<SocketAddr> {
    let mut seen = BTreeSet::new();
    listed.flatten().filter(|address| !seen.insert(*address)).collect()
}

/// Returns the iSCSI target port of a member, in a group of its own.
pub(super) fn target_port(slot: u16) -> TargetPort {
    TargetPort { group: slot + 1, relative_id: slot + 1 }
}

impl JoinedGroup {
    /// Returns the iSCSI target port groups, one for each member; portals are listed of those that serve.
    pub(super) fn port_groups(&self, record: &GroupRecord) -> Result<PortGroups> {
        let own = target_port(self.must_have_names()?.slot);
        let portals = |(id, member): (&MemberId, &GatewayMember)| match member.state.serves() {
            true => portals_of(&self.member_settings.get(*id)),
            // Its group stays, so that hosts need not learn of all groups again when it comes back.
            false => BTreeSet::new(),
        };
        let ambiguous = ambiguous(record.members().iter().map(portals));
        self.report_ambiguous(Front::Iscsi, &ambiguous);
        let others = record.members().iter().filter(|(id, _)| **id != self.own);
        let remote = others.map(|(id, member)| RemotePortGroup {
            port: target_port(member.slot),
            portals: portals((id, member)).difference(&ambiguous).copied().collect(),
        });
        PortGroups::new(own, remote.collect()).map_err(|error| {
            let what = format!("hosts cannot be told of all members of {} over iSCSI: {error}", self.spec);
            Failure::new(FailureKind::NoSpace, what)
                .hint("let each member advertise fewer portals, or have fewer members; NVMe and NBD are not concerned")
        })
    }

    /// Warns of addresses that several members list, once.
    fn report_ambiguous(&self, front: Front, ambiguous: &BTreeSet<SocketAddr>) {
        let before = self.ambiguous.borrow_mut().insert(front, ambiguous.clone()).unwrap_or_default();
        let new: Vec<&SocketAddr> = ambiguous.difference(&before).collect();
        if !new.is_empty() {
            tracing::warn!(
                group = %self.spec, front = front.name(), addresses = ?new,
                "several members list the same addresses: hosts are not told of them; let members advertise their own"
            );
        }
    }

    /// Returns the NVMe subsystem of the group here, if it has one by now.
    pub(super) fn subsystem(&self, engine: &Engine) -> Option<Subsystem> {
        let names = self.host_paths.names()?;
        engine.fronts.nvme().subsystem(Some(&names.nqn)).ok()
    }

    /// Tells hosts which volumes they reach best through this member, and where the other members are.
    ///
    /// A path is optimized at the owner that has the volume open, and inaccessible at a member that must not serve hosts:
    /// they use others then, and keep this one.
    pub(super) fn update_paths(&self) {
        let (Some(engine), Some(record)) = (self.current_engine(), self.record()) else { return };
        let Some(names) = self.host_paths.names() else { return };
        if let Some(subsystem) = self.subsystem(&engine) {
            self.update_nvme(&subsystem, &record, names.slot);
        }
        if let Ok(target) = engine.fronts.iscsi().target(Some(&names.target)) {
            self.update_iscsi(&target, &record);
        }
    }

    fn update_nvme(&self, subsystem: &Subsystem, record: &GroupRecord, slot: u16) {
        let serving = record.members().iter().filter(|(_, member)| member.state.serves());
        let all: Vec<(MemberId, Vec<MemberPort>)> =
            serving.map(|(id, member)| (*id, ports_of(member.slot, &self.member_settings.get(*id)))).collect();
        let ambiguous = ambiguous(all.iter().map(|(_, ports)| ports.iter().map(|port| port.address).collect()));
        self.report_ambiguous(Front::Nvme, &ambiguous);
        let others = all.into_iter().filter(|(id, _)| *id != self.own).flat_map(|(_, ports)| ports);
        let others = others.filter(|port| !ambiguous.contains(&port.address)).collect();
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
            Err(failure) => self.host_paths.report(&failure),
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
        match self.serves_hosts() && self.host_paths.are_open() && !self.exports.any_suspended(Front::Iscsi) {
            true if target.is_suspended() => target.resume(),
            false if !target.is_suspended() => drop(spawn(target.suspend())),
            _ => {}
        }
    }

    pub(super) fn serves_hosts(&self) -> bool {
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
            portals_of(&MemberSettings { iscsi, ..MemberSettings::default() })
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
