//! Target port groups of a target that several daemons serve.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::scsi::ports::{TargetPort, TargetPorts, TargetPortsError};

/// Target port group that another daemon serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePortGroup {
    /// Target port with its group.
    pub port: TargetPort,
    /// Portals that discovery lists for the group.
    pub portals: Vec<SocketAddr>,
}

/// Reason for which a list of port groups is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PortGroupsError {
    /// Groups or ports that are out of range, listed twice, or too many.
    #[error(transparent)]
    Ports(#[from] TargetPortsError),
    /// Portal listed twice: a portal belongs to one portal group of a target (RFC 7143, section 4.4.1).
    #[error("portal {0} is listed twice")]
    DuplicatePortal(SocketAddr),
    /// More than [`PortGroups::PORTALS_MAX`] portals of other daemons.
    #[error("{0} portals of other daemons are too many: the maximum is {max}", max = PortGroups::PORTALS_MAX)]
    TooManyPortals(usize),
}

/// Target port groups of a target: the daemon's own group, and those of the other daemons that serve the target.
///
/// A portal of another daemon is listed once, and its address is not unspecified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortGroups {
    ports: Arc<TargetPorts>,
    /// Groups of other daemons, by group number.
    remote: Vec<RemotePortGroup>,
}

impl PortGroups {
    /// Maximum number of groups, with the own one.
    pub const GROUPS_MAX: usize = TargetPorts::GROUPS_MAX;
    /// Maximum number of portals of other daemons, so that a response with all of them is not truncated.
    pub const PORTALS_MAX: usize = 1024;

    /// Creates the list from the own port and the groups of other daemons.  Unspecified addresses are dropped from the
    /// portals: hosts cannot connect to them.
    ///
    /// # Errors
    /// [`PortGroupsError`].
    pub fn new(own: TargetPort, mut remote: Vec<RemotePortGroup>) -> Result<Self, PortGroupsError> {
        let ports = Arc::new(TargetPorts::new(own, remote.iter().map(|group| group.port))?);
        remote.iter_mut().for_each(|group| group.portals.retain(|portal| !portal.ip().is_unspecified()));
        let portals: usize = remote.iter().map(|group| group.portals.len()).sum();
        if portals > Self::PORTALS_MAX {
            return Err(PortGroupsError::TooManyPortals(portals));
        }
        remote.sort_by_key(|group| group.port.group);
        let mut addrs = BTreeSet::new();
        match remote.iter().flat_map(|group| &group.portals).find(|portal| !addrs.insert(**portal)) {
            Some(portal) => Err(PortGroupsError::DuplicatePortal(*portal)),
            None => Ok(Self { ports, remote }),
        }
    }

    /// Returns the daemon's own port.
    pub fn own(&self) -> TargetPort {
        self.ports.own()
    }

    /// Returns the groups of other daemons, by group number.
    pub fn remote(&self) -> &[RemotePortGroup] {
        &self.remote
    }

    /// Returns the ports of all groups, by group number.
    pub fn ports(&self) -> &[TargetPort] {
        self.ports.all()
    }

    /// Returns the ports as SCSI sees them.
    pub(crate) fn target_ports(&self) -> Arc<TargetPorts> {
        self.ports.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(group: u16, relative_id: u16) -> TargetPort {
        TargetPort { group, relative_id }
    }

    fn remote(group: u16, relative_id: u16, portals: &[&str]) -> RemotePortGroup {
        let portals = portals.iter().map(|portal| portal.parse().expect("an address")).collect();
        RemotePortGroup { port: port(group, relative_id), portals }
    }

    #[test]
    fn groups_are_ordered_by_number() {
        let others = vec![remote(9, 1, &["10.0.0.9:3260", "0.0.0.0:3260"]), remote(2, 7, &["[::]:1", "[fd00::2]:1"])];
        let groups = PortGroups::new(port(5, 5), others).expect("valid");
        assert_eq!(groups.ports(), [port(2, 7), port(5, 5), port(9, 1)]);
        assert_eq!(groups.own(), port(5, 5));
        assert_eq!(groups.remote(), [remote(2, 7, &["[fd00::2]:1"]), remote(9, 1, &["10.0.0.9:3260"])]);
    }

    #[test]
    fn invalid_lists_are_refused() {
        let error = |own, remote| PortGroups::new(own, remote).expect_err("invalid");
        assert_eq!(error(port(0, 1), vec![]), TargetPortsError::ZeroGroup.into());
        assert_eq!(error(port(1, 1), vec![remote(2, 0, &[])]), TargetPortsError::ZeroPort(2).into());
        assert_eq!(error(port(1, 1), vec![remote(1, 2, &[])]), TargetPortsError::DuplicateGroup(1).into());
        assert_eq!(error(port(1, 1), vec![remote(2, 1, &[])]), TargetPortsError::DuplicatePort(1).into());
        let portal = "10.0.0.2:3260";
        let twice = vec![remote(2, 2, &[portal]), remote(3, 3, &[portal])];
        assert_eq!(error(port(1, 1), twice), PortGroupsError::DuplicatePortal(portal.parse().expect("an address")));
        let groups = |count: u16| (2..=count).map(|group| remote(group, group, &[])).collect::<Vec<_>>();
        assert_eq!(PortGroups::new(port(1, 1), groups(128)).expect("valid").ports().len(), PortGroups::GROUPS_MAX);
        assert_eq!(error(port(1, 1), groups(129)), TargetPortsError::TooManyGroups(129).into());
        let portals = |count: u16| RemotePortGroup {
            port: port(2, 2),
            portals: (1..=count).map(|number| SocketAddr::from(([10, 0, 0, 2], number))).collect(),
        };
        assert!(PortGroups::new(port(1, 1), vec![portals(1024)]).is_ok());
        assert_eq!(error(port(1, 1), vec![portals(1025)]), PortGroupsError::TooManyPortals(1025));
    }
}
