//! Queue of a connection, which runs on the connection's core or on another one.

use std::rc::Rc;

use forebay_reactor::{JoinHandle, spawn};

use super::device::VhostDevice;
use super::device_copy::{ControlChange, DeviceCopy, QueueEnd};
use super::queue::{self, QueueControl, QueueOrder};
use super::ring_owner::RingClaim;
use crate::session::VringState;
use crate::stats::VhostStatsEntry;

/// Queue of a connection.
pub(super) struct QueueSlot {
    index: usize,
    control: Rc<QueueControl>,
    /// Copy of the device that runs it, where that is on another core.
    copy: Option<Rc<DeviceCopy>>,
    running: Option<JoinHandle<QueueEnd>>,
}

impl QueueSlot {
    /// Creates a queue that does not run.
    pub(super) fn new(index: usize, copy: Option<Rc<DeviceCopy>>) -> Self {
        Self { index, control: Rc::new(QueueControl::new()), copy, running: None }
    }

    /// Returns whether the queue was started, and its end not awaited yet.
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Changes the descriptors of the queue; on another core, the change is to be settled.
    ///
    /// # Errors
    /// Text that says which descriptor is refused, and why.
    pub(super) fn change(&self, change: ControlChange) -> Result<(), String> {
        match &self.copy {
            Some(copy) => copy.control(self.index, change),
            None => self.control.change(change).map_err(|why| format!("ring {}: {why}", self.index))?,
        }
        Ok(())
    }

    /// Starts the queue, as soon as its connection has the right to run rings.
    pub(super) fn start(
        &mut self,
        ring: VringState,
        device: &Rc<VhostDevice>,
        claim: &Rc<RingClaim>,
        stats: &Rc<VhostStatsEntry>,
    ) {
        self.control.set_order(QueueOrder::Run);
        let (index, control, copy) = (self.index, self.control.clone(), self.copy.clone());
        let (device, claim, stats) = (device.clone(), claim.clone(), stats.clone());
        self.running = Some(spawn(async move {
            let Some(_running) = queue::acquire(&claim, &device, index, &control).await else { return Ok(ring.base) };
            let result = match copy {
                // Orders that come from now on follow it to the other core.
                Some(copy) => copy.run(index, ring, control.order()).await,
                None => queue::run(index, ring, device.clone(), control).await,
            };
            if let Err(why) = &result {
                stats.count_broken_queue();
                // It has said so itself, unless its core has stopped.
                device.fail(why.clone());
            }
            result
        }));
    }

    /// Orders the queue to end.
    pub(super) fn order(&self, order: QueueOrder) {
        self.control.set_order(order);
        if let Some(copy) = &self.copy {
            copy.control(self.index, ControlChange::Order(order));
        }
    }

    /// Waits for the end of the queue; `None` when it does not run.
    pub(super) async fn end(&mut self) -> Option<QueueEnd> {
        let end = self.running.as_mut()?.await;
        self.running = None;
        Some(end)
    }

    /// Drops descriptors and orders, after a reset of the device; a copy does it when it is reset itself.
    pub(super) fn reset(&mut self) {
        self.control = Rc::new(QueueControl::new());
    }
}
