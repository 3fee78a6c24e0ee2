//! Requests of a virtio-blk queue.

use std::rc::Rc;
use std::task::Waker;

use forebay_block::{Error, ErrorKind};
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

/// Requests that have ended, and are not counted yet: the clock is read once for several.
#[derive(Default)]
struct EndedBlocks(Vec<EndedBlock>);

struct EndedBlock {
    kind: VhostRequestKind,
    bytes: u64,
    began: Instant,
    failed: bool,
}

/// Requests of a queue.
pub(super) struct BlockWork {
    device: Rc<VhostDevice>,
    /// Requests that were submitted, and not polled yet.
    group: Vec<(BlockFuture, PendingBlock)>,
    in_flight: InFlight<BlockFuture, PendingBlock>,
    ended: EndedBlocks,
    bytes: u64,
    leaving: LeavingRule,
    rules: BlockRules,
    began: Instant,
    serial: [u8; crate::serve::SERIAL_MAX],
    transfer_max: u32,
}

impl BlockWork {
    pub(super) fn new(device: &Rc<VhostDevice>, size: u16, leaves: bool) -> Self {
        let model = device.block();
        let (serial, rules) = (model.serial(), model.rules(device.features.get()));
        let (in_flight, transfer_max) = (InFlight::new(usize::from(size).max(1)), rules.geometry.transfer_max);
        let (group, ended) = (Vec::new(), EndedBlocks::default());
        Self {
            device: device.clone(),
            group,
            in_flight,
            ended,
            bytes: 0,
            leaving: LeavingRule { possible: leaves, closing: false },
            rules,
            began: now(),
            serial,
            transfer_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.group.len() + self.in_flight.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_closing(&self) -> bool {
        self.leaving.closing
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
        self.group.push((future, PendingBlock { token, writable, kind, bytes, began: self.began }));
        self.bytes += bytes;
        Ok((None, readable))
    }

    pub(super) fn start_group(&mut self, mut give_back: impl FnMut(EndedChain)) {
        let Self { in_flight, group, device, ended, bytes, leaving, .. } = self;
        for (future, pending) in group.drain(..) {
            if let Some((done, pending)) = in_flight.start(future, pending) {
                *bytes -= pending.bytes;
                if !leaving.leaves(device, &done) {
                    give_back(ended.end(device, done, pending));
                }
            }
        }
        ended.count(device);
    }

    pub(super) fn poll(&mut self, mut give_back: impl FnMut(EndedChain)) {
        let Self { in_flight, device, ended, bytes, leaving, .. } = self;
        in_flight.poll(|done, pending| {
            *bytes -= pending.bytes;
            if !leaving.leaves(device, &done) {
                give_back(ended.end(device, done, pending));
            }
        });
        ended.count(device);
    }
}

/// Choice of the requests that are left to the next device.
struct LeavingRule {
    /// Set if the next device finds them.
    possible: bool,
    /// Set once the volume ends with this daemon: what is in flight and in the ring is left to the next one.
    closing: bool,
}

impl LeavingRule {
    /// Returns whether a request is left: another daemon has taken the volume over, or this one ends.  The daemon that serves
    /// the guest next executes it, and an error would reach the guest.
    fn leaves(&mut self, device: &VhostDevice, done: &BlockDone) -> bool {
        match done.error.as_ref().map(Error::kind) {
            _ if device.phase.is_over() => true,
            Some(ErrorKind::ShuttingDown) if self.possible => {
                if !std::mem::replace(&mut self.closing, true) {
                    let export = &device.export.name;
                    tracing::info!(export, "the volume ends: requests are left for the guest's next device");
                }
                true
            }
            Some(ErrorKind::Fenced) => device.phase.has_ended(),
            _ => false,
        }
    }
}

impl EndedBlocks {
    /// Writes the result of a request to the guest's memory.
    fn end(&mut self, device: &VhostDevice, done: BlockDone, pending: PendingBlock) -> EndedChain {
        let PendingBlock { token, writable, kind, bytes, began } = pending;
        if let Some(error) = &done.error {
            tracing::debug!(export = device.export.name, kind = kind.label(), %error, "a request failed");
        }
        let used = block::complete(&writable, &done, device.log().as_ref());
        self.0.push(EndedBlock { kind, bytes, began, failed: done.error.is_some() });
        EndedChain { token, writable, used }
    }

    /// Counts the requests that have ended.
    fn count(&mut self, device: &VhostDevice) {
        if self.0.is_empty() {
            return;
        }
        let (now, counters) = (now(), &device.counters);
        for EndedBlock { kind, bytes, began, failed } in self.0.drain(..) {
            counters.answered(kind, bytes, now.since(began), failed);
        }
    }
}
