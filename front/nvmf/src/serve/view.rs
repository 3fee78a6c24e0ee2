//! Environment of a controller, as its admin queue sees it.

use forebay_reactor::now;

use super::NvmeServer;
use crate::session::admin::{ControllerView, SubsystemIdentity};
use crate::stats::NvmeCommandKind;
use crate::subsystem::{Association, Port, describe};
use crate::wire::identify;
use crate::wire::log::{AnaGroup, DiscoveryEntry, Health};

/// RESCAP value: reservations persist through power loss, all six types, and IEKEY as in NVMe 1.3 and later.
const RESERVATIONS_ALL: u8 = 0xFF;

pub(super) struct AdminView<'a> {
    pub(super) server: &'a NvmeServer,
    pub(super) port: &'a Port,
    pub(super) association: &'a Association,
}

impl ControllerView for AdminView<'_> {
    fn identity(&self) -> &SubsystemIdentity {
        self.association.subsystem.identity()
    }

    fn namespaces(&self) -> Vec<u32> {
        self.association.subsystem.namespace_ids()
    }

    fn namespace(&self, nsid: u32) -> Option<identify::IdentifyNamespace> {
        let open = self.server.namespace(&self.association.subsystem, nsid)?;
        let geometry = open.device.geometry();
        let mut described = describe(&open.info, geometry.size, geometry.preferred_io, geometry.read_only);
        if open.reservations.is_some() {
            described.reservations = RESERVATIONS_ALL;
        }
        Some(described)
    }

    fn controllers(&self) -> Vec<u16> {
        self.association.subsystem.controller_ids()
    }

    fn ana(&self) -> (u64, Vec<AnaGroup>) {
        self.association.subsystem.ana_groups(self.port)
    }

    fn ana_groups_max(&self) -> u32 {
        self.association.subsystem.ana_groups_max()
    }

    fn discovery(&self) -> (u64, Vec<DiscoveryEntry>) {
        self.server.subsystems.discovery(self.port, &self.association.host)
    }

    fn health(&self) -> Health {
        let total = self.server.subsystems.stats().total();
        let count = |kinds: &[NvmeCommandKind]| kinds.iter().map(|&kind| total.commands[kind as usize]).sum();
        Health {
            bytes_read: total.bytes_read,
            bytes_written: total.bytes_written,
            reads: count(&[NvmeCommandKind::Read, NvmeCommandKind::Compare]),
            writes: count(&[NvmeCommandKind::Write]),
            uptime_s: now().as_nanos() / 1_000_000_000,
            ..Health::default()
        }
    }

    fn queues_max(&self) -> u16 {
        self.server.subsystems.limits().queues_max
    }

    fn has_io_queues(&self) -> bool {
        self.association.has_io_queues()
    }

    fn reservations(&self) -> bool {
        true
    }

    fn reservations_persist(&self, nsid: u32) -> Option<bool> {
        let open = self.server.namespace(&self.association.subsystem, nsid)?;
        Some(open.reservations.as_ref()?.borrow_mut().table().persists())
    }
}
