//! Ports: the addresses through which hosts reach the subsystems, each with its ANA states.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::session::admin::ANA_GROUPS_MAX;
use crate::wire::log::AnaState;

/// Address at which hosts reach a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortAddress {
    /// TCP address and port number; an unspecified address is omitted from discovery.
    Tcp(IpAddr, u16),
    /// Unix socket, which discovery cannot express.
    Unix,
}

/// Port of another process that serves the same subsystem, for discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberPort {
    /// Port id, which no other port of the subsystem has.
    pub id: u16,
    /// Address at which hosts reach it.
    pub address: SocketAddr,
    /// TLS required for hosts.
    pub tls: bool,
}

/// Ports of a subsystem in discovery, besides those of the process under their own ids.
#[derive(Debug, Default)]
pub(super) struct SubsystemPorts {
    /// Number that is added to the ids of the process's own ports, which other processes number alike.
    pub(super) offset: u16,
    /// Ports of other processes.
    pub(super) others: Vec<MemberPort>,
}

/// Port: an address on which the target listens.
#[derive(Debug)]
pub struct Port {
    /// Port id, from 1.
    pub id: u16,
    /// Addresses reported by discovery.
    pub addresses: Vec<PortAddress>,
    /// TLS required for hosts.
    pub tls: bool,
    /// ANA state of each group, beginning with group 1.
    ana: [AtomicU8; ANA_GROUPS_MAX as usize],
}

impl Port {
    /// Creates a port through which every ANA group is optimized.
    pub fn new(id: u16, addresses: Vec<PortAddress>) -> Arc<Self> {
        Self::make(id, addresses, false)
    }

    /// Creates such a port that requires TLS.
    pub fn with_tls(id: u16, addresses: Vec<PortAddress>) -> Arc<Self> {
        Self::make(id, addresses, true)
    }

    fn make(id: u16, addresses: Vec<PortAddress>, tls: bool) -> Arc<Self> {
        let optimized = |_| AtomicU8::new(AnaState::Optimized as u8);
        Arc::new(Self { id, addresses, tls, ana: std::array::from_fn(optimized) })
    }

    /// Returns the ANA state of a group through this port; inaccessible for an id out of range.
    pub fn ana(&self, group: u32) -> AnaState {
        let state = self.ana.get(group.wrapping_sub(1) as usize).map(|state| state.load(Ordering::Acquire));
        state.and_then(AnaState::of).unwrap_or(AnaState::Inaccessible)
    }

    /// Sets the ANA state of a group through this port.  Returns whether it has changed.
    pub(super) fn set_ana(&self, group: u32, state: AnaState) -> bool {
        let slot = self.ana.get(group.wrapping_sub(1) as usize);
        slot.is_some_and(|slot| slot.swap(state as u8, Ordering::AcqRel) != state as u8)
    }
}
