//! Distribution of an export's queues over cores.
//!
//! Queues of a virtio-blk device take turns over all cores, and so do exports with their first queues.  Queues of a
//! virtio-scsi device are on the core of its export: they share one session with its units.

use std::rc::Rc;

use forebay_block::DeviceHandle;
use forebay_reactor::{CoreHandle, spawn};

use super::device::VhostDevice;
use super::device_copy::{CopyOrigin, DeviceCopy};
use super::device_events::DeviceEvents;
use super::{VhostExport, VhostVolume};
use crate::stats::VhostStatsEntry;

/// Cores of an export's queues.
pub(super) struct QueueSpread {
    volume: DeviceHandle,
    serial: String,
    /// Cores of the first, second, ... queue, in turn.
    cores: Vec<CoreHandle>,
}

impl QueueSpread {
    /// Distributes the queues of an export, of which the first is on core number `first`; `None` if all are on this core.
    pub(super) fn new(export: &VhostExport, cores: &[CoreHandle], first: usize) -> Option<Self> {
        let VhostVolume::Block { device, serial } = &export.volume else { return None };
        let turn = first.checked_rem(cores.len())?;
        let mut cores = cores.to_vec();
        cores.rotate_left(turn);
        cores.truncate(export.queues.into());
        if cores.iter().all(CoreHandle::is_current) {
            return None;
        }
        Some(Self { volume: DeviceHandle::new(device.clone()), serial: serial.clone(), cores })
    }

    /// Creates the copies of a connection's device; returns the one of each of its cores.
    pub(super) fn copy(&self, device: &Rc<VhostDevice>, stats: &VhostStatsEntry) -> Vec<Option<Rc<DeviceCopy>>> {
        let (connection, events) = DeviceEvents::channel();
        drop(spawn(events.pass_on(Rc::downgrade(device))));
        let origin = || CopyOrigin {
            name: device.export.name.clone(),
            volume: self.volume.clone(),
            serial: self.serial.clone(),
            queues: device.export.queues,
            counters: stats.add_core(),
            phase: device.phase.clone(),
            connection: connection.clone(),
        };
        let copy = |core: &CoreHandle| (!core.is_current()).then(|| Rc::new(DeviceCopy::create(core, origin())));
        self.cores.iter().map(copy).collect()
    }
}
