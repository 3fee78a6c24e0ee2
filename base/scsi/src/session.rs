//! Session: the I_T nexus of one host with a target, with its units and its tasks.
//!
//! A [`ScsiSession`] belongs to one task on one core.  That task passes commands and task management functions to it,
//! and calls [`ScsiSession::turn`] when it is woken.  Outcomes are reported through [`ScsiTransport`].

mod events;
mod management;
mod orphans;
mod task;
mod task_set;

use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use forebay_block::reservation::HostId;
use forebay_block::{BufList, LocalFuture};

use crate::signal::NexusSignal;
use crate::target::ScsiTarget;
use crate::unit::commands::Execution;
pub use crate::unit::commands::ReadyScsiCommand;
use crate::unit::execute::composite;
use crate::unit::{LogicalUnit, LogicalUnits, NexusIdentity, Order, ScsiFailure, SessionUnits};
pub use events::ScsiUnitEvent;
use events::SessionWatch;
pub use management::TaskFunction;
pub use orphans::OrphanedScsiTasks;
use task::{RunningTask, TaskRole};
pub use task::{ScsiCompletion, ScsiTask, ScsiTransport, TaskResponse};
use task_set::ScsiTaskSet;

/// Configuration of a session.
#[derive(Debug, Clone)]
pub struct ScsiSessionSpec {
    /// Session id, unique among all sessions of the target's [catalog](crate::target::UnitCatalog), past and future.
    pub id: u64,
    /// Initiator name, which selects the units that the host sees.
    pub initiator: String,
    /// Initiator port for reservations: [`reserve::host`](crate::reserve::host) or
    /// [`naa_host`](crate::reserve::naa_host).
    pub host: HostId,
    /// Wakes the session's task.
    pub signal: Arc<NexusSignal>,
    /// Maximum number of tasks in flight, commands and others.
    pub tasks_max: usize,
    /// Session reports changes of units as [events](ScsiSession::take_event), and is woken by them.
    pub watches: bool,
}

/// Session of one host with a target, without its transport; `N` is the transport's note on a task.
pub struct ScsiSession<N> {
    units: SessionUnits,
    tasks: ScsiTaskSet<N>,
    signal: Arc<NexusSignal>,
    watch: Option<SessionWatch>,
    /// Commands that have not begun end with status BUSY.
    refusing: bool,
}

impl<N> ScsiSession<N> {
    /// Creates a session; `units` are those of this core.
    pub fn new(target: ScsiTarget, units: Rc<LogicalUnits>, spec: ScsiSessionSpec) -> Self {
        let ScsiSessionSpec { id, initiator, host, signal, tasks_max, watches } = spec;
        let watch = watches.then(|| SessionWatch::new(&target, id, &signal, &initiator));
        let identity = NexusIdentity { session: id, initiator, host, signal: signal.clone(), watches };
        let units = SessionUnits::new(target, units, identity);
        Self { units, tasks: ScsiTaskSet::new(tasks_max), signal, watch, refusing: false }
    }

    /// Returns the target.
    pub fn target(&self) -> &ScsiTarget {
        self.units.target()
    }

    /// Returns the initiator name.
    pub fn initiator(&self) -> &str {
        self.units.initiator()
    }

    /// Returns the LUNs of the units that the host sees, in order.
    pub fn luns(&self) -> Vec<u16> {
        self.units.visible()
    }

    // ---- Commands ----

    /// Begins a command, or queues it behind waiting ones.
    #[inline]
    pub fn submit(&mut self, task: ScsiTask<N>, transport: &mut impl ScsiTransport<Note = N>) {
        if let Some(task) = self.tasks.admit(task, transport) {
            self.begin(task, transport);
        }
    }

    /// Begins waiting commands, as far as permitted.
    #[inline]
    pub fn begin_waiting(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        while let Some(task) = self.tasks.next_queued(transport) {
            self.begin(task, transport);
        }
    }

    #[inline]
    fn begin(&mut self, task: ScsiTask<N>, transport: &mut impl ScsiTransport<Note = N>) {
        let ScsiTask { tag, command, ordered, note } = task;
        self.units.note_changed_luns();
        let (unit, execution) = match self.refusing {
            // BUSY makes the host retry with the server that is active then.
            true => (None, Execution::Done(Err(ScsiFailure::BUSY))),
            false => self.units.begin(command),
        };
        let (future, role) = match execution {
            Execution::Done(result) => return transport.complete(ScsiCompletion { note, unit, result }),
            Execution::InFlight(future) => (future, TaskRole::Command),
            Execution::Control(future) => (future, TaskRole::ControlCommand),
        };
        let (note, guards) = (Some(note), Vec::new());
        let task = RunningTask { tag, unit, note, role, aborted: false, ordered, guards };
        self.tasks.start(future, task, transport);
    }

    /// Ends commands that have not begun with status BUSY from now on.
    pub fn refuse_commands(&mut self) {
        self.refusing = true;
    }

    /// Returns the number of tasks, whether they have begun or not.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the number of tasks in flight.
    pub fn in_flight(&self) -> usize {
        self.tasks.in_flight()
    }

    /// Returns true if no task is in flight.
    pub fn is_idle(&self) -> bool {
        self.tasks.is_idle()
    }

    /// Returns true if as many tasks are in flight as may be.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.tasks.is_full()
    }

    // ---- Turns ----

    /// Sets the task to wake, follows the orders of other sessions, reports tasks that have ended, and begins those that
    /// wait.
    pub fn turn(&mut self, task: &Waker, transport: &mut impl ScsiTransport<Note = N>) {
        self.set_task(task);
        self.handle_signal(transport);
        self.poll(transport);
        self.begin_waiting(transport);
    }

    /// Sets the task to wake.
    #[inline]
    pub fn set_task(&mut self, task: &Waker) {
        self.tasks.set_task(task);
        self.signal.set_task(task);
    }

    /// Reports tasks that have ended.
    #[inline]
    pub fn poll(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        self.tasks.poll(transport);
    }

    /// Follows the orders of other sessions and collects events, if the signal was notified.
    #[inline]
    pub fn handle_signal(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        if self.signal.take_notified() {
            self.follow_orders(transport);
            if let Some(watch) = &mut self.watch {
                watch.examine(&mut self.units, &self.signal);
            }
        }
    }

    fn follow_orders(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        let orders: Vec<_> = self.units.nexuses().map(|nexus| (nexus.lun(), nexus.take_orders())).collect();
        for (lun, orders) in orders {
            for (order, guard) in orders {
                match order {
                    Order::Abort => self.tasks.abort_unit(lun, &guard, transport),
                    Order::Leave => {
                        self.tasks.guard_tasks(lun, &guard);
                        self.units.forget(lun);
                    }
                }
            }
        }
    }

    /// Takes the next event of a session that watches; the signal wakes the session when there may be one.
    pub fn take_event(&mut self) -> Option<ScsiUnitEvent> {
        self.watch.as_mut()?.take_event()
    }

    // ---- End ----

    /// Aborts all tasks on all units; their outcome is not reported.
    pub fn abort_all(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        self.tasks.abort_all(transport);
    }

    /// Releases the SPC-2 reservations of the session, which end with it.  The releases are submitted by this call; the
    /// future completes when other hosts can reserve the units.
    pub fn release_reservations(&self) -> LocalFuture<()> {
        Box::pin(self.units.release_reservations())
    }

    /// Starts work of the transport as a task that waits for others and is not waited for: when `end` completes, the
    /// note comes back with [`TaskResponse::Complete`].  If too many tasks are in flight, it is
    /// [rejected](TaskResponse::Rejected).
    pub fn start_control(
        &mut self,
        note: N,
        end: impl Future<Output = ()> + 'static,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        self.control(note, None, end, transport);
    }

    fn control(
        &mut self,
        note: N,
        unit: Option<Rc<LogicalUnit>>,
        end: impl Future<Output = ()> + 'static,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        let future = composite(async move {
            end.await;
            Ok(BufList::new())
        });
        if self.tasks.is_full() {
            return transport.managed(note, TaskResponse::Rejected);
        }
        let (note, role, guards) = (Some(note), TaskRole::Management, Vec::new());
        let task = RunningTask { tag: 0, unit, note, role, aborted: false, ordered: false, guards };
        self.tasks.start(future, task, transport);
    }

    /// Ends the session.  Tasks in flight are aborted and become orphaned tasks, which have to be driven to their end;
    /// `None` if there are none.
    pub fn leave(mut self, transport: &mut impl ScsiTransport<Note = N>) -> Option<OrphanedScsiTasks<N>> {
        self.tasks.abort_all(transport);
        if self.tasks.is_idle() {
            return None;
        }
        Some(OrphanedScsiTasks::new(self.tasks, self.units.into_nexuses(), self.signal))
    }
}
