//! Task set of a session: its commands that wait or are in flight, and its task management functions.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use forebay_reactor::cross::OneshotReceiver;
use forebay_reactor::sync::InFlight;

use super::task::{RunningTask, ScsiTask, ScsiTransport};
use crate::lun::Lun;
use crate::unit::{CommandFuture, DrainGuard, LogicalUnit};

/// Task that ABORT TASK names.
pub(super) enum AbortedTask {
    /// No task has that tag.
    Unknown,
    /// Command that had not begun, and is dropped.
    Dropped,
    /// Command in flight in the unit; the future completes when it has ended.
    InFlight(Option<Rc<LogicalUnit>>, OneshotReceiver<()>),
}

/// Tasks of a session: a command waits for its turn (`queue`), and is in flight in the device (`running`).
///
/// 1. While `queue` is not empty, every new command is queued behind it.
/// 2. `ordered` is the number of ordered commands in `running`; while there is one, no command begins.
/// 3. `running` never has more than `capacity` tasks.
pub(super) struct ScsiTaskSet<N> {
    queue: VecDeque<ScsiTask<N>>,
    running: InFlight<CommandFuture, RunningTask<N>>,
    ordered: usize,
    capacity: usize,
}

/// Returns true if a command is for `lun`; for any one if that is `None`.
fn is_for<N>(command: &ScsiTask<N>, lun: Option<Lun>) -> bool {
    lun.is_none_or(|lun| command.command.lun == lun)
}

impl<N> ScsiTaskSet<N> {
    /// Creates an empty task set for up to `capacity` tasks in flight.
    pub(super) fn new(capacity: usize) -> Self {
        Self { queue: VecDeque::new(), running: InFlight::new(capacity), ordered: 0, capacity }
    }

    // ---- Queue ----

    /// Returns the number of tasks, whether they have begun or not.
    pub(super) fn len(&self) -> usize {
        self.running.len() + self.queue.len()
    }

    /// Queues a command if others wait already or it may not begin yet; returns it otherwise.
    #[inline]
    pub(super) fn admit(
        &mut self,
        mut command: ScsiTask<N>,
        transport: &mut impl ScsiTransport<Note = N>,
    ) -> Option<ScsiTask<N>> {
        if self.queue.is_empty() && self.may_begin(&mut command, transport) {
            return Some(command);
        }
        self.queue.push_back(command);
        None
    }

    /// Takes the first queued command, if it may begin.
    #[inline]
    pub(super) fn next_queued(&mut self, transport: &mut impl ScsiTransport<Note = N>) -> Option<ScsiTask<N>> {
        let mut command = self.queue.pop_front()?;
        if self.may_begin(&mut command, transport) {
            return Some(command);
        }
        self.queue.push_front(command);
        None
    }

    #[inline]
    fn may_begin(&mut self, command: &mut ScsiTask<N>, transport: &mut impl ScsiTransport<Note = N>) -> bool {
        // An ordered command waits for all earlier ones, and later ones wait for it.
        let in_order = self.ordered == 0 && (!command.ordered || self.running.is_empty());
        in_order && !self.is_full() && transport.admit(&command.command, &mut command.note)
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

    /// Starts a task; reports it if it has ended already.  The set must not be full.
    #[inline]
    pub(super) fn start(
        &mut self,
        future: CommandFuture,
        task: RunningTask<N>,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        debug_assert!(!self.is_full());
        let ordered = usize::from(task.ordered);
        match self.running.start(future, task) {
            Some((result, task)) => task.end(result, transport),
            None => self.ordered += ordered,
        }
    }

    /// Sets the task to wake.
    pub(super) fn set_task(&mut self, task: &Waker) {
        self.running.set_task(task);
    }

    /// Polls tasks that were woken, and reports those that have ended.
    pub(super) fn poll(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        let ordered = &mut self.ordered;
        self.running.poll(|result, task| {
            *ordered -= usize::from(task.ordered);
            task.end(result, transport);
        });
    }

    // ---- Queries ----

    /// Returns true if a command with this tag exists.
    pub(super) fn has_command(&mut self, lun: Option<Lun>, tag: u64) -> bool {
        self.queue.iter().any(|command| command.tag == tag && is_for(command, lun))
            || self.running_of(lun).any(|task| task.tag == tag)
    }

    /// Returns true if a command for a unit exists.
    pub(super) fn has_command_for(&mut self, lun: Lun) -> bool {
        self.queue.iter().any(|command| is_for(command, Some(lun))) || self.running_of(Some(lun)).next().is_some()
    }

    fn running_of(&mut self, lun: Option<Lun>) -> impl Iterator<Item = &mut RunningTask<N>> {
        let of_unit = move |task: &&mut RunningTask<N>| lun.is_none_or(|lun| task.lun().map(Lun::Unit) == Some(lun));
        self.running.notes_mut().filter(|task| task.is_command()).filter(of_unit)
    }

    // ---- Aborts ----

    /// Aborts a command.
    pub(super) fn abort(
        &mut self,
        lun: Option<Lun>,
        tag: u64,
        transport: &mut impl ScsiTransport<Note = N>,
    ) -> AbortedTask {
        if let Some(at) = self.queue.iter().position(|command| command.tag == tag && is_for(command, lun)) {
            if let Some(command) = self.queue.remove(at) {
                transport.aborted(command.note);
            }
            return AbortedTask::Dropped;
        }
        let (guard, ended) = DrainGuard::new();
        let mut found = None;
        for task in self.running_of(lun).filter(|task| task.tag == tag) {
            task.abort(transport);
            if task.is_waited_for() {
                task.guards.push(guard.clone());
            }
            found = Some(task.unit.clone());
        }
        drop(guard);
        found.map_or(AbortedTask::Unknown, |unit| AbortedTask::InFlight(unit, ended))
    }

    /// Aborts the commands of one unit; `guard` is held until the device has completed them.
    pub(super) fn abort_unit(
        &mut self,
        lun: u16,
        guard: &Arc<DrainGuard>,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        transport.abort_unit(lun);
        for command in std::mem::take(&mut self.queue) {
            match is_for(&command, Some(Lun::Unit(lun))) {
                true => transport.aborted(command.note),
                false => self.queue.push_back(command),
            }
        }
        self.guard_commands(lun, guard);
        self.running_of(Some(Lun::Unit(lun))).for_each(|task| task.abort(transport));
    }

    /// Aborts all tasks; their outcome is not reported.
    pub(super) fn abort_all(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        for command in std::mem::take(&mut self.queue) {
            transport.aborted(command.note);
        }
        self.running.notes_mut().for_each(|task| task.abort(transport));
    }

    /// Holds `guard` until the commands in flight of one unit have ended.
    pub(super) fn guard_commands(&mut self, lun: u16, guard: &Arc<DrainGuard>) {
        let of_unit = self.running_of(Some(Lun::Unit(lun)));
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
