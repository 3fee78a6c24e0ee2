//! Target ports and target port groups, with the asymmetric access states of a unit (SPC-4, section 5.15): REPORT TARGET
//! PORT GROUPS and SET TARGET PORT GROUPS.

use std::collections::BTreeSet;

use super::be16;

/// Target port, the only one of its target port group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetPort {
    /// Target port group number, at least 1; over iSCSI also the target portal group tag.
    pub group: u16,
    /// Relative target port identifier, at least 1.
    pub relative_id: u16,
}

impl TargetPort {
    /// Port of a target without a list of port groups.
    pub const SINGLE: Self = Self { group: 1, relative_id: 1 };
}

/// Reason for which a list of target ports is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TargetPortsError {
    /// Target port group number 0.
    #[error("target port group 0 is out of range: numbers begin at 1")]
    ZeroGroup,
    /// Relative target port id 0, in this group.
    #[error("relative target port id 0 of target port group {0} is out of range: ids begin at 1")]
    ZeroPort(u16),
    /// Target port group listed twice.
    #[error("target port group {0} is listed twice")]
    DuplicateGroup(u16),
    /// Relative target port id in two groups.
    #[error("relative target port id {0} is listed twice")]
    DuplicatePort(u16),
    /// More than [`TargetPorts::GROUPS_MAX`] groups.
    #[error("{0} target port groups are too many: the maximum is {max}", max = TargetPorts::GROUPS_MAX)]
    TooManyGroups(usize),
}

/// Target ports of a target that several daemons serve, each of them a target port group: the daemon's own port, and all.
///
/// Group numbers and relative target port ids are unique, and not 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetPorts {
    own: TargetPort,
    /// Ports of all groups, by group number.
    ports: Vec<TargetPort>,
}

impl TargetPorts {
    /// Maximum number of groups, with the own one.
    pub const GROUPS_MAX: usize = 128;

    /// Creates the list from the own port and those of other daemons.
    ///
    /// # Errors
    /// [`TargetPortsError`].
    pub fn new(own: TargetPort, others: impl IntoIterator<Item = TargetPort>) -> Result<Self, TargetPortsError> {
        let mut ports: Vec<TargetPort> = others.into_iter().chain([own]).collect();
        if ports.len() > Self::GROUPS_MAX {
            return Err(TargetPortsError::TooManyGroups(ports.len()));
        }
        ports.sort_by_key(|port| port.group);
        let (mut groups, mut ids) = (BTreeSet::new(), BTreeSet::new());
        for &TargetPort { group, relative_id } in &ports {
            if group == 0 {
                return Err(TargetPortsError::ZeroGroup);
            }
            if relative_id == 0 {
                return Err(TargetPortsError::ZeroPort(group));
            }
            if !groups.insert(group) {
                return Err(TargetPortsError::DuplicateGroup(group));
            }
            if !ids.insert(relative_id) {
                return Err(TargetPortsError::DuplicatePort(relative_id));
            }
        }
        Ok(Self { own, ports })
    }

    /// Returns the daemon's own port.
    pub fn own(&self) -> TargetPort {
        self.own
    }

    /// Returns the ports of all groups, by group number.
    pub fn all(&self) -> &[TargetPort] {
        &self.ports
    }
}

/// Asymmetric access state of a unit through a target port group.
///
/// In both states every command is executed.  The other states of SPC-4 (standby, unavailable, offline, transitioning)
/// are not supported, and never reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum AccessState {
    /// State active/optimized: the fast path to the unit.
    Optimized = 0x0,
    /// State active/non-optimized: a path through another daemon.
    NonOptimized = 0x1,
}

/// AO_SUP: active/optimized is a supported state.
const OPTIMIZED_SUPPORTED: u8 = 0x01;
/// AN_SUP: active/non-optimized is a supported state.
const NON_OPTIMIZED_SUPPORTED: u8 = 0x02;
/// PREF: the group is preferred for the unit.
const PREFERRED: u8 = 0x80;
/// Status code: the state was altered by implicit asymmetric access behavior.
const ALTERED_IMPLICITLY: u8 = 0x02;
/// Format of the extended parameter data header.
const EXTENDED: u8 = 0x10;

/// Access states of a unit through all target port groups.
///
/// At most one group is optimized, and this one is preferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortGroupStates {
    groups: Vec<(TargetPort, AccessState)>,
    /// Bits of the states that a group can have.
    supported: u8,
}

impl PortGroupStates {
    /// Returns the state of a unit whose target has no list of port groups: one group, always optimized.
    pub fn single() -> Self {
        Self { groups: vec![(TargetPort::SINGLE, AccessState::Optimized)], supported: OPTIMIZED_SUPPORTED }
    }

    /// Returns the states of a unit with a preferred group, which is optimized; the others are non-optimized.  Without
    /// a preferred group among `ports`, all are non-optimized.
    pub fn of(ports: &[TargetPort], preferred: Option<u16>) -> Self {
        let state = |port: &TargetPort| match Some(port.group) == preferred {
            true => AccessState::Optimized,
            false => AccessState::NonOptimized,
        };
        let groups = ports.iter().map(|port| (*port, state(port))).collect();
        Self { groups, supported: OPTIMIZED_SUPPORTED | NON_OPTIMIZED_SUPPORTED }
    }

    /// Returns the state of a group; `None` if it does not exist.
    pub fn state(&self, group: u16) -> Option<AccessState> {
        self.groups.iter().find(|(port, _)| port.group == group).map(|(_, state)| *state)
    }

    /// Builds the REPORT TARGET PORT GROUPS data, complete: the caller truncates it to the allocation length.
    pub fn to_bytes(&self, extended: bool) -> Vec<u8> {
        let mut out = vec![0; 4];
        if extended {
            // No implicit transition time: no state is left for a transition.
            out.extend([EXTENDED, 0, 0, 0]);
        }
        for (port, state) in &self.groups {
            let preferred = if *state == AccessState::Optimized { PREFERRED } else { 0 };
            let [high, low] = port.group.to_be_bytes();
            out.extend([preferred | *state as u8, self.supported, high, low, 0, ALTERED_IMPLICITLY, 0, 1]);
            let [high, low] = port.relative_id.to_be_bytes();
            out.extend([0, 0, high, low]);
        }
        let len = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&len.to_be_bytes());
        out
    }

    /// Checks a SET TARGET PORT GROUPS list.  States cannot be changed by hosts: a list that requests the current ones
    /// is accepted.
    ///
    /// # Errors
    /// Offset in the list of an unknown group, or of a state that is not the current one.
    pub fn check_request(&self, list: &[u8]) -> Result<(), u16> {
        for (index, descriptor) in list.get(4..).unwrap_or_default().chunks_exact(4).enumerate() {
            let at = (4 + index * 4) as u16;
            let state = self.state(be16(descriptor, 2)).ok_or(at + 2)?;
            if descriptor[0] & 0x0f != state as u8 {
                return Err(at);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(group: u16) -> TargetPort {
        TargetPort { group, relative_id: group + 0x100 }
    }

    #[test]
    fn one_group_is_always_optimized() {
        let states = PortGroupStates::single();
        let descriptor = [0x80, 0x01, 0, 1, 0, 0x02, 0, 1, 0, 0, 0, 1];
        assert_eq!(states.to_bytes(false), [&[0, 0, 0, 12][..], &descriptor].concat());
        assert_eq!(states.to_bytes(true), [&[0, 0, 0, 16, 0x10, 0, 0, 0][..], &descriptor].concat());
    }

    #[test]
    fn the_preferred_group_is_optimized() {
        let ports = [port(1), port(2), port(0x304)];
        let states = PortGroupStates::of(&ports, Some(2));
        let bytes = states.to_bytes(false);
        assert_eq!(bytes[..4], [0, 0, 0, 36]);
        assert_eq!(bytes[4..16], [0x01, 0x03, 0, 1, 0, 0x02, 0, 1, 0, 0, 1, 1]);
        assert_eq!(bytes[16..28], [0x80, 0x03, 0, 2, 0, 0x02, 0, 1, 0, 0, 1, 2]);
        assert_eq!(bytes[28..], [0x01, 0x03, 3, 4, 0, 0x02, 0, 1, 0, 0, 4, 4]);
        assert_eq!(states.to_bytes(true)[8..], bytes[4..]);
        // Neither an unknown group nor none is optimized.
        for preferred in [None, Some(0), Some(9)] {
            let states = PortGroupStates::of(&ports, preferred);
            assert!(ports.iter().all(|port| states.state(port.group) == Some(AccessState::NonOptimized)));
            assert!(states.to_bytes(false)[4..].chunks(12).all(|descriptor| descriptor[0] == 0x01));
        }
    }

    #[test]
    fn only_current_states_may_be_requested() {
        let states = PortGroupStates::single();
        assert_eq!(states.check_request(&[0, 0, 0, 0, 0, 0, 0, 1]), Ok(()));
        assert_eq!(states.check_request(&[0, 0, 0, 0, 2, 0, 0, 1]), Err(4));
        assert_eq!(states.check_request(&[0, 0, 0, 0, 0, 0, 0, 2]), Err(6));
        let states = PortGroupStates::of(&[port(1), port(2)], Some(2));
        let request = |first: u8, second: u8, group: u8| [0, 0, 0, 0, first, 0, 0, 1, second, 0, 0, group];
        assert_eq!(states.check_request(&request(1, 0, 2)), Ok(()));
        assert_eq!(states.check_request(&request(0, 0, 2)), Err(4), "it would take over the unit");
        assert_eq!(states.check_request(&request(1, 1, 2)), Err(8));
        assert_eq!(states.check_request(&request(1, 0, 3)), Err(10));
        assert_eq!(states.check_request(&[]), Ok(()));
    }
}
