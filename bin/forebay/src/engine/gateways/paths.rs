//! Paths of hosts to the group's volumes: which of them are best, and at which addresses the other members are.

use std::net::SocketAddr;

use forebay_gateways::{GatewayVolume, GroupRecord, VolumeName};
use forebay_nvmf::wire::log::AnaState;
use forebay_nvmf::{MemberPort, Subsystem};

use super::JoinedGroup;
use super::settings::{self, GroupSettings, MemberNvmePort, MemberSettings};
use crate::api::Front;
use crate::engine::Engine;

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

impl JoinedGroup {
    /// Returns the NVMe subsystem of the group here, if it has one by now.
    pub(super) fn subsystem(&self, engine: &Engine, record: &GroupRecord) -> Option<Subsystem> {
        let GroupSettings { nqn } = settings::read(&record.identity().settings);
        engine.fronts.nvme().subsystem(Some(&nqn)).ok()
    }

    /// Tells hosts which volumes they reach best through this member, and where the other members are.
    ///
    /// A path is optimized at the owner that has the volume open, and inaccessible at a member that must not serve hosts:
    /// they use others then, and keep this one.
    pub(super) fn update_paths(&self) {
        let (Some(engine), Some(record)) = (self.engine(), self.record()) else { return };
        let Some(subsystem) = self.subsystem(&engine, &record) else { return };
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

    fn ana_state(&self, name: &VolumeName, volume: &GatewayVolume) -> AnaState {
        let admitted = self.hosts_admitted.get() && self.running().is_some();
        if !admitted || self.exports.is_suspended(name, Front::Nvme) {
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
    fn port_ids_are_unique_in_the_group() {
        let port = |addr: &str, id| MemberNvmePort { addr: addr.into(), id, tls: id == 2 };
        let nvme = vec![port("10.0.0.1:4420", 1), port("[fd00::1]:4420", 2), port("host:1", 3), port("10.0.0.1:9", 64)];
        let found = ports_of(3, &MemberSettings { nvme, ..MemberSettings::default() });
        let ids: Vec<(u16, bool)> = found.iter().map(|port| (port.id, port.tls)).collect();
        assert_eq!(ids, [(193, false), (194, true)], "neither a name nor an id of the next member");
        assert!(port_id(forebay_gateways::GROUP_MEMBERS_MAX - 1, PORT_IDS - 1).is_some_and(|id| id < 0x8000));
    }
}
