//! I/O commands of a connection: those that wait, and those in flight at a device.

use std::collections::VecDeque;
use std::task::Waker;

use forebay_block::BufList;
use forebay_reactor::sync::InFlight;

use super::io::{PendingCommand, ReadyNvmeCommand};
use super::submit::{DeviceCommand, NvmeCommandData};
use crate::wire::{NvmeStatus, Sqe};

/// Completed command: its result and its context.
pub(super) type CompletedCommand = (Result<NvmeCommandData, NvmeStatus>, PendingCommand);

/// I/O commands that have arrived, until their device has completed them.
///
/// 1. Commands that wait for buffer space begin in the order of their arrival: none begins while an earlier one waits.
/// 2. At most one command waits for the other half of a fused operation, and only until the next command arrives.
/// 3. A command that was given to its device is completed, even if the connection ends.
pub(super) struct Commands {
    in_flight: InFlight<DeviceCommand, PendingCommand>,
    waiting: VecDeque<ReadyNvmeCommand>,
    first_half: Option<(Sqe, BufList)>,
}

impl Commands {
    /// Creates an empty set, of up to `entries` commands in flight.
    pub(super) fn new(entries: usize) -> Self {
        Self { in_flight: InFlight::new(entries), waiting: VecDeque::new(), first_half: None }
    }

    /// Sets the task to wake.
    pub(super) fn set_task(&mut self, task: &Waker) {
        self.in_flight.set_task(task);
    }

    /// Returns the number of commands in flight at a device.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Submits a command.  Returns it if the device completes it at once.
    pub(super) fn submit(&mut self, command: DeviceCommand, context: PendingCommand) -> Option<CompletedCommand> {
        self.in_flight.start(command, context)
    }

    /// Takes the commands that were completed since the last call.
    pub(super) fn take_completed(&mut self) -> Vec<CompletedCommand> {
        let mut done = Vec::new();
        if self.in_flight() > 0 {
            self.in_flight.poll(|result, context| done.push((result, context)));
        }
        done
    }

    /// Returns whether any command waits for buffer space.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Adds a command that waits for buffer space, behind all others.
    pub(super) fn wait(&mut self, command: ReadyNvmeCommand) {
        self.waiting.push_back(command);
    }

    /// Takes the first command that waits for buffer space.
    pub(super) fn next_waiting(&mut self) -> Option<ReadyNvmeCommand> {
        self.waiting.pop_front()
    }

    /// Puts back the first command, for which there is still no space.
    pub(super) fn wait_again(&mut self, command: ReadyNvmeCommand) {
        self.waiting.push_front(command);
    }

    /// Keeps the first half of a fused operation, with its in-capsule data.
    pub(super) fn keep_first_half(&mut self, sqe: Sqe, data: BufList) {
        debug_assert!(self.first_half.is_none(), "the former one was taken by this command");
        self.first_half = Some((sqe, data));
    }

    /// Takes the first half of a fused operation, when the next command has arrived.
    pub(super) fn take_first_half(&mut self) -> Option<(Sqe, BufList)> {
        self.first_half.take()
    }

    /// Aborts the commands that were not submitted to a device.
    pub(super) fn abort_waiting(&mut self) {
        self.first_half = None;
        self.waiting.clear();
    }
}
