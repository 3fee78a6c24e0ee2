//! ANA groups of a subsystem: shared ones, with states by port, or one for each namespace.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use super::{MemberPort, Namespace, Port, Subsystem, read, write};
use crate::session::AsyncEvent;
use crate::session::admin::{ANA_GROUPS_MAX, NAMESPACES_MAX};
use crate::wire::log::{AnaGroup, AnaState};

/// Grouping of the namespaces of a subsystem into ANA groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AnaGrouping {
    /// Groups that namespaces name, up to [`ANA_GROUPS_MAX`]; each port has a state of each group, the same for all
    /// subsystems.
    #[default]
    ByPort,
    /// One group for each namespace, under its id, with a state that all ports of the process have.  For subsystems of
    /// several processes, of which each serves some namespaces best.
    ByNamespace,
}

/// State of a namespace that none was set of.
const UNSET: AnaState = AnaState::NonOptimized;

/// ANA states by namespace id.
pub(super) struct NamespaceStates(Box<[AtomicU8]>);

impl fmt::Debug for NamespaceStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceStates").finish_non_exhaustive()
    }
}

impl NamespaceStates {
    /// Creates the states.  An id without a namespace has one that refuses nothing, so that hosts learn that it has none.
    pub(super) fn new() -> Self {
        Self((0..NAMESPACES_MAX).map(|_| AtomicU8::new(UNSET as u8)).collect())
    }

    /// Forgets the state of a namespace that was removed.
    pub(super) fn unset(&self, nsid: u32) {
        self.set(nsid, UNSET);
    }

    fn slot(&self, nsid: u32) -> Option<&AtomicU8> {
        self.0.get(nsid.wrapping_sub(1) as usize)
    }

    fn get(&self, nsid: u32) -> AnaState {
        let number = self.slot(nsid).map(|slot| slot.load(Ordering::Acquire));
        number.and_then(AnaState::of).unwrap_or(AnaState::Inaccessible)
    }

    fn set(&self, nsid: u32, state: AnaState) -> bool {
        self.slot(nsid).is_some_and(|slot| slot.swap(state as u8, Ordering::AcqRel) != state as u8)
    }
}

impl Subsystem {
    /// Returns the largest ANA group id, which is the number of groups as well.
    pub fn ana_groups_max(&self) -> u32 {
        if self.0.states.is_some() { NAMESPACES_MAX } else { ANA_GROUPS_MAX }
    }

    /// Returns the ANA state of a namespace's own group; `None` if groups have states by port.
    pub fn namespace_state(&self, nsid: u32) -> Option<AnaState> {
        self.0.states.as_ref().map(|states| states.get(nsid))
    }

    /// Sets the ANA states of namespaces' own groups, and reports the change to the hosts once for all of them.  Without
    /// effect if groups have states by port.
    pub fn set_namespace_states(&self, new: impl IntoIterator<Item = (u32, AnaState)>) {
        let Some(states) = &self.0.states else { return };
        let changed = new.into_iter().fold(false, |any, (nsid, state)| states.set(nsid, state) || any);
        if changed {
            self.0.shared.ana_changes.fetch_add(1, Ordering::AcqRel);
            self.announce(AsyncEvent::Ana);
        }
    }

    /// Returns the ANA state of a namespace as reached through a port.
    pub(crate) fn ana(&self, port: &Port, namespace: &Namespace) -> AnaState {
        self.namespace_state(namespace.nsid).unwrap_or_else(|| port.ana(namespace.ana_group))
    }

    /// Returns the ANA change count, and all groups with namespaces, with their states as reached through `port`.
    pub fn ana_groups(&self, port: &Port) -> (u64, Vec<AnaGroup>) {
        // The count comes first: a change meanwhile is then read with the next one.
        let change = self.0.shared.ana_changes.load(Ordering::Acquire);
        let namespaces = read(&self.0.namespaces);
        if let Some(states) = &self.0.states {
            let own = |&nsid| AnaGroup { id: nsid, state: states.get(nsid), namespaces: vec![nsid] };
            return (change, namespaces.keys().map(own).collect());
        }
        let group = |id| AnaGroup { id, state: port.ana(id), namespaces: Vec::new() };
        let mut groups: Vec<AnaGroup> = (1..=ANA_GROUPS_MAX).map(group).collect();
        for namespace in namespaces.values() {
            groups[namespace.ana_group as usize - 1].namespaces.push(namespace.nsid);
        }
        groups.retain(|group| !group.namespaces.is_empty());
        (change, groups)
    }

    /// Sets the ports that discovery lists for this subsystem: those of other processes, and this one's, whose ids
    /// `offset` is added to.  Tells hosts of a change.
    pub fn set_ports(&self, offset: u16, others: Vec<MemberPort>) {
        let mut ports = write(&self.0.ports);
        if ports.offset == offset && ports.others == others {
            return;
        }
        (ports.offset, ports.others) = (offset, others);
        drop(ports);
        self.0.shared.discovery_changed();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::Arc;

    use super::*;
    use crate::session::admin::SubsystemIdentity;
    use crate::subsystem::{HostLimits, NamespaceError, PortAddress, Subsystems};

    fn subsystem(subsystems: &Subsystems, grouping: AnaGrouping) -> Subsystem {
        let identity = SubsystemIdentity {
            nqn: "nqn.2026-11.test:group".into(),
            serial: "1".into(),
            model: "test".into(),
            firmware: "1".into(),
        };
        subsystems.create_with(identity, 1..=10, grouping, |_| {}).expect("a subsystem")
    }

    fn namespace(nsid: u32, ana_group: u32) -> Namespace {
        Namespace { nsid, name: format!("rbd/{nsid}"), uuid: [nsid as u8; 16], ana_group, read_only: false }
    }

    fn port(id: u16) -> Arc<Port> {
        Port::new(id, vec![PortAddress::Tcp(Ipv4Addr::new(10, 0, 0, 1).into(), 4420)])
    }

    #[test]
    fn each_namespace_has_a_state_of_its_own() {
        let subsystems = Subsystems::new(HostLimits::default());
        let group = subsystem(&subsystems, AnaGrouping::ByNamespace);
        let wrong = NamespaceError::AnaGroup { group: 1, max: NAMESPACES_MAX };
        assert_eq!(group.add_namespace(namespace(7, 1)), Err(wrong));
        for nsid in [7, 300, NAMESPACES_MAX] {
            group.add_namespace(namespace(nsid, nsid)).expect("a group of its own");
        }
        let port = port(1);
        let states = |group: &Subsystem| -> Vec<(u32, AnaState)> {
            group.ana_groups(&port).1.into_iter().map(|group| (group.id, group.state)).collect()
        };
        let all = |state| vec![(7, state), (300, state), (NAMESPACES_MAX, state)];
        assert_eq!(states(&group), all(AnaState::NonOptimized));
        let before = group.ana_groups(&port).0;
        group.set_namespace_states(all(AnaState::Inaccessible));
        group.set_namespace_states([(7, AnaState::Optimized), (300, AnaState::Inaccessible)]);
        assert_eq!(group.ana_groups(&port).0, before + 2, "one change for all of them");
        group.set_namespace_states([(7, AnaState::Optimized), (0, AnaState::Optimized), (u32::MAX, AnaState::Change)]);
        assert_eq!(group.ana_groups(&port).0, before + 2, "nothing has changed");
        assert_eq!(group.ana(&port, &namespace(7, 7)), AnaState::Optimized);
        assert_eq!(group.ana(&port, &namespace(300, 300)), AnaState::Inaccessible);
        group.remove_namespace(300);
        assert_eq!(
            group.namespace_state(300),
            Some(AnaState::NonOptimized),
            "a namespace that is gone refuses nothing"
        );
        // States of ports do not count.
        subsystems.set_ana(&port, 7, AnaState::PersistentLoss);
        assert_eq!(group.namespace_state(7), Some(AnaState::Optimized));
    }

    #[test]
    fn groups_by_port_have_no_states_by_namespace() {
        let subsystems = Subsystems::new(HostLimits::default());
        let shared = subsystem(&subsystems, AnaGrouping::ByPort);
        shared.add_namespace(namespace(7, 3)).expect("a shared group");
        let port = port(1);
        shared.set_namespace_states([(7, AnaState::Inaccessible)]);
        assert_eq!(shared.namespace_state(7), None);
        subsystems.set_ana(&port, 3, AnaState::NonOptimized);
        assert_eq!(shared.ana(&port, &namespace(7, 3)), AnaState::NonOptimized);
        assert_eq!(shared.ana_groups_max(), ANA_GROUPS_MAX);
    }

    #[test]
    fn discovery_lists_the_ports_of_all_processes() {
        let subsystems = Subsystems::new(HostLimits::default());
        let group = subsystem(&subsystems, AnaGrouping::ByNamespace);
        let (first, second) = (port(1), port(2));
        subsystems.add_port(first.clone());
        subsystems.add_port(second);
        let other = MemberPort { id: 129, address: SocketAddr::from(([10, 0, 0, 2], 4421)), tls: true };
        let (before, _) = subsystems.discovery(&first, "nqn.host");
        group.set_ports(64, vec![other.clone()]);
        let (change, entries) = subsystems.discovery(&first, "nqn.host");
        assert_eq!(change, before + 1);
        let listed: Vec<_> =
            entries.iter().map(|entry| (entry.discovery, entry.port, entry.service, entry.tls)).collect();
        assert_eq!(
            listed,
            [(true, 1, 4420, false), (false, 65, 4420, false), (false, 66, 4420, false), (false, 129, 4421, true)]
        );
        assert_eq!((entries[3].address.as_str(), entries[3].nqn.as_str()), ("10.0.0.2", group.nqn()));
        group.set_ports(64, vec![other]);
        assert_eq!(subsystems.discovery(&first, "nqn.host").0, change, "nothing has changed");
    }
}
