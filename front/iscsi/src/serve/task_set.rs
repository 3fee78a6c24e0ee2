//! Task set of a session: its commands from the request to the response, and its task management functions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use forebay_reactor::Instant;
use forebay_reactor::cross::OneshotReceiver;
use forebay_reactor::sync::InFlight;

use super::data_out::DataOutTransfer;
use super::outbox::IscsiOutbox;
use super::task::{CommandInfo, PendingTask};
use crate::scsi::BLOCK;
use crate::scsi::cdb::ScsiCommand;
use crate::scsi::inquiry::TRANSFER_BLOCKS_MAX;
use crate::unit::commands::ReadyScsiCommand;
use crate::unit::execute::{CommandFuture, ScsiResult};
use crate::unit::{DrainGuard, LogicalUnit};
use crate::wire::Lun;

/// Maximum number of tasks in flight, such as immediate commands and task management, beyond those that have a place in
/// the command window.
const EXTRA_MAX: usize = 32;

/// Command with its complete data that waits for memory, or for other commands to end.
pub(super) struct QueuedCommand {
    pub(super) itt: u32,
    pub(super) ready: ReadyScsiCommand,
    pub(super) info: CommandInfo,
    pub(super) numbered: bool,
    pub(super) ordered: bool,
    /// Bytes of memory accounted to it already.
    pub(super) held: usize,
}

impl QueuedCommand {
    /// Returns the bytes of memory that the command holds once it has begun.
    #[inline]
    fn needs(&self) -> usize {
        match &self.ready.command {
            // A read above the maximum transfer length is refused.
            Ok(ScsiCommand::Read(run)) if run.blocks <= TRANSFER_BLOCKS_MAX => {
                ((run.blocks * BLOCK) as usize).max(self.held)
            }
            _ => self.held,
        }
    }
}

/// Task that ABORT TASK names.
pub(super) enum Aborted {
    /// No task has that tag.
    Unknown,
    /// Command that had not begun, and is dropped.
    Dropped,
    /// Command in flight in the unit; the future completes when it has ended.
    InFlight(Option<std::rc::Rc<LogicalUnit>>, OneshotReceiver<()>),
}

/// Tasks of a session, in the order in which a command passes them: its data is received (`transfers`, those that wait
/// for memory first in `hungry`), it waits for its turn (`queue`), it is in flight in the device (`running`).
///
/// 1. Each entry of `hungry` is a tag in `transfers`.
/// 2. While `queue` is not empty, every new command is queued behind it.
/// 3. `ordered` is the number of ordered commands in `running`; while there is one, no command begins.
/// 4. `running` never has more than `capacity` tasks.
pub(super) struct TaskSet {
    transfers: BTreeMap<u32, DataOutTransfer>,
    /// Initiator task tags of transfers that wait for memory, in FIFO order.
    hungry: VecDeque<u32>,
    queue: VecDeque<QueuedCommand>,
    running: InFlight<CommandFuture, PendingTask>,
    ordered: usize,
    capacity: usize,
    bytes_max: usize,
}

impl TaskSet {
    /// Creates an empty task set for `commands_max` commands in the window, with at most `bytes_max` bytes.
    pub(super) fn new(commands_max: u32, bytes_max: usize) -> Self {
        let capacity = commands_max as usize + EXTRA_MAX;
        Self {
            transfers: BTreeMap::new(),
            hungry: VecDeque::new(),
            queue: VecDeque::new(),
            running: InFlight::new(capacity),
            ordered: 0,
            capacity,
            bytes_max,
        }
    }

    // ---- Data-out transfers ----

    /// Returns true if a command with this tag is receiving data.
    pub(super) fn has_transfer(&self, itt: u32) -> bool {
        self.transfers.contains_key(&itt)
    }

    /// Returns the transfer of a command that is receiving data.
    pub(super) fn transfer(&mut self, itt: u32) -> Option<&mut DataOutTransfer> {
        self.transfers.get_mut(&itt)
    }

    /// Returns true if solicited or announced data of a command has been outstanding for so long.
    pub(super) fn is_data_late(&self, late: impl Fn(&DataOutTransfer) -> bool) -> bool {
        self.transfers.values().any(late)
    }

    /// Adds a command whose data is incomplete, and solicits the data as soon as there is memory for it.
    pub(super) fn receive(&mut self, itt: u32, transfer: DataOutTransfer, now: Instant, outbox: &mut IscsiOutbox) {
        let hungry = transfer.needs_r2t();
        let before = self.transfers.insert(itt, transfer);
        debug_assert!(before.is_none(), "two commands with tag {itt}");
        if hungry {
            self.solicit(itt, now, outbox);
        }
    }

    /// Solicits more data of a transfer, behind those that wait for memory already.
    pub(super) fn solicit(&mut self, itt: u32, now: Instant, outbox: &mut IscsiOutbox) {
        debug_assert!(self.transfers.contains_key(&itt));
        self.hungry.push_back(itt);
        self.feed(now, outbox);
    }

    /// Sends R2Ts for transfers that wait for memory, as far as there is some.
    pub(super) fn feed(&mut self, now: Instant, outbox: &mut IscsiOutbox) {
        while let Some(&itt) = self.hungry.front() {
            let Some(transfer) = self.transfers.get_mut(&itt) else {
                debug_assert!(false, "no transfer {itt}");
                self.hungry.pop_front();
                continue;
            };
            let more = transfer.want().saturating_sub(transfer.held);
            if !outbox.try_hold(more, transfer.held, self.bytes_max) {
                return;
            }
            transfer.held += more;
            transfer.heard = now;
            transfer.send_r2ts(itt, outbox);
            self.hungry.pop_front();
        }
    }

    /// Removes a command from the transfers, and from those that wait for memory.
    pub(super) fn take_transfer(&mut self, itt: u32) -> Option<DataOutTransfer> {
        let transfer = self.transfers.remove(&itt)?;
        self.hungry.retain(|&other| other != itt);
        Some(transfer)
    }

    // ---- Queue ----

    /// Returns the number of commands, whether they have begun or not.
    pub(super) fn commands(&self) -> usize {
        self.running.len() + self.queue.len() + self.transfers.len()
    }

    /// Returns true if an immediate command would take what is reserved for task management.
    pub(super) fn is_full_for_immediate(&self) -> bool {
        self.commands() >= self.capacity - EXTRA_MAX / 2
    }

    /// Queues a command if others wait already or it may not begin yet; returns it otherwise.
    #[inline]
    pub(super) fn admit(&mut self, mut command: QueuedCommand, outbox: &mut IscsiOutbox) -> Option<QueuedCommand> {
        if self.queue.is_empty() && self.may_begin(&mut command, outbox) {
            return Some(command);
        }
        self.queue.push_back(command);
        None
    }

    /// Takes the first queued command, if it may begin.
    pub(super) fn next_queued(&mut self, outbox: &mut IscsiOutbox) -> Option<QueuedCommand> {
        let mut command = self.queue.pop_front()?;
        if self.may_begin(&mut command, outbox) {
            return Some(command);
        }
        self.queue.push_front(command);
        None
    }

    #[inline]
    fn may_begin(&mut self, command: &mut QueuedCommand, outbox: &mut IscsiOutbox) -> bool {
        // An ordered command waits for all earlier ones, and later ones wait for it.
        let in_order = self.ordered == 0 && (!command.ordered || self.running.is_empty());
        if !in_order || self.is_full() {
            return false;
        }
        let more = command.needs() - command.held;
        if more > 0 && !outbox.try_hold(more, command.held, self.bytes_max) {
            return false;
        }
        command.held += more;
        true
    }

    // ---- Tasks in flight ----

    /// Returns true if no task is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns true if as many tasks are in flight as may be.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.running.len() >= self.capacity
    }

    /// Returns the number of tasks in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.running.len()
    }

    /// Starts a task; returns its result if it has ended already.  The set must not be full.
    #[inline]
    pub(super) fn start(&mut self, future: CommandFuture, task: PendingTask) -> Option<(ScsiResult, PendingTask)> {
        debug_assert!(!self.is_full());
        let ordered = usize::from(task.ordered);
        let ended = self.running.start(future, task);
        if ended.is_none() {
            self.ordered += ordered;
        }
        ended
    }

    /// Sets the task to wake.
    pub(super) fn set_task(&mut self, task: &Waker) {
        self.running.set_task(task);
    }

    /// Polls tasks that were woken, and passes those that have ended to `done`.
    pub(super) fn poll(&mut self, mut done: impl FnMut(ScsiResult, PendingTask)) {
        let ordered = &mut self.ordered;
        self.running.poll(|result, task| {
            *ordered -= usize::from(task.ordered);
            done(result, task);
        });
    }

    // ---- Aborts ----

    /// Aborts a command.
    pub(super) fn abort(&mut self, itt: u32, outbox: &mut IscsiOutbox) -> Aborted {
        if let Some(transfer) = self.take_transfer(itt) {
            outbox.drop_command(transfer.numbered, transfer.held);
            return Aborted::Dropped;
        }
        if let Some(at) = self.queue.iter().position(|command| command.itt == itt) {
            if let Some(command) = self.queue.remove(at) {
                outbox.drop_command(command.numbered, command.held);
            }
            return Aborted::Dropped;
        }
        let (guard, ended) = DrainGuard::new();
        let mut found = None;
        for task in self.running.notes_mut().filter(|task| task.itt == itt && task.is_command()) {
            task.aborted = true;
            if task.is_waited_for() {
                task.guards.push(guard.clone());
            }
            found = Some(task.unit.clone());
        }
        drop(guard);
        found.map_or(Aborted::Unknown, |unit| Aborted::InFlight(unit, ended))
    }

    /// Aborts the commands of one unit; `guard` is held until the device has completed them.
    pub(super) fn abort_unit(&mut self, lun: u16, guard: &Arc<DrainGuard>, outbox: &mut IscsiOutbox) {
        let of_unit = |ready: &ReadyScsiCommand| ready.lun == Lun::Unit(lun);
        let transfers: Vec<u32> =
            self.transfers.iter().filter(|(_, transfer)| of_unit(&transfer.ready)).map(|(&itt, _)| itt).collect();
        for itt in transfers {
            if let Some(transfer) = self.take_transfer(itt) {
                outbox.drop_command(transfer.numbered, transfer.held);
            }
        }
        for command in std::mem::take(&mut self.queue) {
            match of_unit(&command.ready) {
                true => outbox.drop_command(command.numbered, command.held),
                false => self.queue.push_back(command),
            }
        }
        self.guard_commands(lun, guard);
        let of_unit = self.running.notes_mut().filter(|task| task.lun() == Some(lun));
        of_unit.filter(|task| task.is_command()).for_each(|task| task.aborted = true);
    }

    /// Aborts all tasks; their outcome is not reported.
    pub(super) fn abort_all(&mut self, outbox: &mut IscsiOutbox) {
        self.hungry.clear();
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            outbox.drop_command(transfer.numbered, transfer.held);
        }
        for command in std::mem::take(&mut self.queue) {
            outbox.drop_command(command.numbered, command.held);
        }
        self.running.notes_mut().for_each(|task| task.aborted = true);
    }

    /// Holds `guard` until the commands in flight of one unit have ended.
    pub(super) fn guard_commands(&mut self, lun: u16, guard: &Arc<DrainGuard>) {
        let of_unit = self.running.notes_mut().filter(|task| task.lun() == Some(lun));
        of_unit.filter(|task| task.is_waited_for()).for_each(|task| task.guards.push(guard.clone()));
    }

    /// Holds `guard` until all tasks in flight of one unit have ended, including those that wait for others.
    pub(super) fn guard_tasks(&mut self, lun: u16, guard: &Arc<DrainGuard>) {
        let of_unit = self.running.notes_mut().filter(|task| task.lun() == Some(lun));
        of_unit.for_each(|task| task.guards.push(guard.clone()));
    }

    /// Returns true while a command is in flight whose end aborts and resets wait for.
    pub(super) fn has_commands_in_flight(&mut self) -> bool {
        self.running.notes_mut().any(|task| task.is_waited_for())
    }

    /// Returns the LUNs of the units with tasks in flight.
    pub(super) fn luns_in_flight(&mut self) -> Vec<u16> {
        self.running.notes_mut().filter_map(|task| task.lun()).collect()
    }
}
