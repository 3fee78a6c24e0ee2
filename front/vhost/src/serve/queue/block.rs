//! Requests of a virtio-blk queue.

use std::rc::Rc;
use std::task::Waker;

use forebay_block::ErrorKind;
use forebay_reactor::sync::InFlight;
use forebay_reactor::{Instant, now};

use super::{EndedChain, IntakeError};
use crate::block::{self, BlockCommand, BlockDone, BlockFuture, BlockRules};
use crate::memory::GuestPart;
use crate::rings::{Chain, ChainToken};
use crate::serve::device::VhostDevice;
use crate::stats::VhostRequestKind;

/// Request in flight.
struct PendingBlock {
    token: ChainToken,
    writable: Vec<GuestPart>,
    kind: VhostRequestKind,
    bytes: u64,
    began: Instant,
}

/// Requests of a queue.
pub(super) struct BlockWork {
    device: Rc<VhostDevice>,
    in_flight: InFlight<BlockFuture, PendingBlock>,
    bytes: u64,
    rules: BlockRules,
    began: Instant,
    serial: [u8; crate::serve::SERIAL_MAX],
    transfer_max: u32,
}

impl BlockWork {
    pub(super) fn new(device: &Rc<VhostDevice>, size: u16) -> Self {
        let model = device.block();
        let (serial, rules) = (model.serial(), model.rules(device.features.get()));
        let (in_flight, transfer_max) = (InFlight::new(usize::from(size).max(1)), rules.geometry.transfer_max);
        Self { device: device.clone(), in_flight, bytes: 0, rules, began: now(), serial, transfer_max }
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn set_task(&mut self, task: &Waker) {
        self.in_flight.set_task(task);
    }

    pub(super) fn begin_turn(&mut self) {
        self.rules = self.device.block().rules(self.device.features.get());
        self.began = now();
    }

    pub(super) fn begin(&mut self, chain: Chain) -> Result<(Option<EndedChain>, Vec<GuestPart>), IntakeError> {
        let Chain { token, readable, writable } = chain;
        let command = BlockCommand::parse(&readable, &writable, &self.rules)
            .map_err(|violation| IntakeError::Request(violation.to_string()))?;
        let (kind, bytes) = (command.kind(), command.data_len());
        let data = command.gather(&readable, &self.device.pools);
        if self.device.is_memory_lost() {
            // Zeroes were read in place of the guest's data.
            return Err(IntakeError::Lost);
        }
        let volume = self.device.block().volume();
        let future = block::execute(volume, command, data, &self.serial, self.transfer_max);
        let pending = PendingBlock { token, writable, kind, bytes, began: self.began };
        let ended = match self.in_flight.start(future, pending) {
            Some((done, pending)) => Some(end(&self.device, done, pending)),
            None => {
                self.bytes += bytes;
                None
            }
        };
        Ok((ended, readable))
    }

    pub(super) fn poll(&mut self, abandoned: bool, mut give_back: impl FnMut(EndedChain)) {
        let Self { in_flight, device, bytes, .. } = self;
        in_flight.poll(|done, pending| {
            *bytes -= pending.bytes;
            let fenced = done.error.as_ref().is_some_and(|error| error.kind() == ErrorKind::Fenced);
            // Another daemon has taken the volume over: the request is executed there, and an error would reach the guest.
            if !(abandoned && fenced) {
                give_back(end(device, done, pending));
            }
        });
    }
}

/// Writes the result of a request to the guest's memory.
fn end(device: &VhostDevice, done: BlockDone, pending: PendingBlock) -> EndedChain {
    let PendingBlock { token, writable, kind, bytes, began } = pending;
    if let Some(error) = &done.error {
        tracing::debug!(export = device.export.name, kind = kind.label(), %error, "a request failed");
    }
    let used = block::complete(&writable, &done, device.log().as_ref());
    device.stats.counters().answered(kind, bytes, now().since(began), done.error.is_some());
    EndedChain { token, writable, used }
}
