//! How NVMe namespaces are reached: what whoever looks after failover sets.

use forebay_nvmf::session::admin::ANA_GROUPS_MAX;
use forebay_nvmf::wire::log::AnaState;

use super::Engine;
use crate::api::{Ana, SetAna};
use crate::failure::{Failure, FailureKind, Result};

impl Engine {
    /// Every port with every group that has namespaces or is not optimized.
    pub fn ana(&self) -> Vec<Ana> {
        let target = self.fronts.nvme().target();
        let addrs = self.fronts.addrs(crate::api::Front::Nvme);
        let mut states = Vec::new();
        for port in target.ports() {
            let address = addrs.get(usize::from(port.id) - 1).map(ToString::to_string).unwrap_or_default();
            let (_, groups) = target.ana_groups(&port);
            for group in 1..=ANA_GROUPS_MAX {
                let (state, known) = (port.ana(group), groups.iter().find(|known| known.id == group));
                if known.is_none() && state == AnaState::Optimized {
                    continue;
                }
                let namespaces = known.map(|known| known.namespaces.clone()).unwrap_or_default();
                let (port, address, state) = (port.id, address.clone(), state.name().into());
                states.push(Ana { port, address, group, state, namespaces });
            }
        }
        states
    }

    /// Sets how groups are reached through ports, and tells the hosts; says how it is then.
    pub fn set_ana(&self, request: &SetAna) -> Result<Vec<Ana>> {
        let target = self.fronts.nvme().target();
        let state = AnaState::named(&request.state).ok_or_else(|| {
            Failure::invalid(format!("'{}' is no state of ANA", request.state))
                .hint("optimized, non-optimized, inaccessible, persistent-loss or change")
        })?;
        if let Some(group) = request.group.filter(|group| !(1..=ANA_GROUPS_MAX).contains(group)) {
            return Err(Failure::invalid(format!("ANA group {group}: from 1 to {ANA_GROUPS_MAX}")));
        }
        let ports = target.ports();
        if let Some(id) = request.port.filter(|id| !ports.iter().any(|port| port.id == *id)) {
            let text = format!("there is no NVMe port {id}");
            return Err(Failure::new(FailureKind::NotFound, text).hint("'forebay ana ls' lists them"));
        }
        for port in ports.iter().filter(|port| request.port.is_none_or(|id| id == port.id)) {
            for group in (1..=ANA_GROUPS_MAX).filter(|group| request.group.is_none_or(|wanted| wanted == *group)) {
                target.set_ana(port, group, state);
            }
        }
        Ok(self.ana())
    }
}
