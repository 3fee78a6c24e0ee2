//! Work of a queue: what its chains ask of the device, by the device's type.

use std::rc::Rc;
use std::task::Waker;

use super::block::BlockWork;
use super::scsi::ScsiWork;
use super::{EndedChain, IntakeError};
use crate::memory::GuestPart;
use crate::rings::Chain;
use crate::serve::device::{DeviceModel, VhostDevice};

/// Requests of a queue, in flight and ended.
pub(super) enum QueueWork {
    /// Requests of a virtio-blk device.
    Block(Box<BlockWork>),
    /// Requests of a virtio-scsi device.
    Scsi(Box<ScsiWork>),
}

impl QueueWork {
    /// Creates the work of a queue of `size` entries.  With `leaves`, another device finds requests that this one leaves.
    pub(super) fn new(index: usize, device: &Rc<VhostDevice>, size: u16, leaves: bool) -> Self {
        match &device.model {
            DeviceModel::Block(_) => Self::Block(Box::new(BlockWork::new(device, size, leaves))),
            DeviceModel::Scsi(model) => Self::Scsi(Box::new(ScsiWork::new(index, device, model))),
        }
    }

    /// Returns the number of requests in flight.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Block(work) => work.len(),
            Self::Scsi(work) => work.len(),
        }
    }

    /// Returns whether no request is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of data of the requests in flight.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Block(work) => work.bytes(),
            Self::Scsi(work) => work.bytes(),
        }
    }

    /// Sets the task to wake when a request has ended.
    pub(super) fn set_task(&mut self, task: &Waker) {
        match self {
            Self::Block(work) => work.set_task(task),
            Self::Scsi(work) => work.set_task(task),
        }
    }

    /// Returns whether the volume ends with this daemon: requests are left to the next one, in the record and in the ring.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self, Self::Block(work) if work.is_closing())
    }

    /// Returns whether chains are to be taken: buffers for events stay in the ring until there is an event.
    pub(super) fn wants_chains(&self) -> bool {
        match self {
            Self::Block(work) => !work.is_closing(),
            Self::Scsi(work) => work.wants_chains(),
        }
    }

    /// Prepares for chains that are taken now.
    pub(super) fn begin_turn(&mut self) {
        if let Self::Block(work) = self {
            work.begin_turn();
        }
    }

    /// Begins the request of a chain; returns the chain if it has ended already, and the readable parts for their memory.
    /// With `again`, a former device has begun it too.
    ///
    /// # Errors
    /// When the chain is no request that can be responded to.
    pub(super) fn begin(
        &mut self,
        chain: Chain,
        again: bool,
    ) -> Result<(Option<EndedChain>, Vec<GuestPart>), IntakeError> {
        match self {
            Self::Block(work) => work.begin(chain),
            Self::Scsi(work) => work.begin(chain, again),
        }
    }

    /// Polls the requests that were begun since the last call, and passes the chains of those that have ended to
    /// `give_back`.
    pub(super) fn start_group(&mut self, give_back: impl FnMut(EndedChain)) {
        if let Self::Block(work) = self {
            work.start_group(give_back);
        }
    }

    /// Passes the chains of ended requests to `give_back`, except of those that another daemon will execute: they stay in the
    /// record.
    pub(super) fn poll(&mut self, give_back: impl FnMut(EndedChain)) {
        match self {
            Self::Block(work) => work.poll(give_back),
            Self::Scsi(work) => work.poll(give_back),
        }
    }
}
