//! Session of a guest with the units of a target: one for all queues of a virtio-scsi device.
//!
//! Queues pass commands to the session, and find their outcomes in an outbox each.  A task of its own drives the session:
//! it follows orders of other sessions, ends tasks, and collects events.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use forebay_reactor::sync::Notify;
use forebay_reactor::{Instant, spawn};
use forebay_scsi::reserve::naa_host;
use forebay_scsi::{
    NexusSignal, ScsiCompletion, ScsiSession, ScsiSessionSpec, ScsiTask, ScsiTransport, TaskFunction, TaskResponse,
};

use super::VhostScsiTarget;
use super::ring_owner::RingOwner;
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;
use crate::rings::ChainToken;
use crate::scsi::{
    self, ScsiConfig, ScsiControlRequest, ScsiEvents, ScsiOutcome, ScsiReply, ScsiResponse, ScsiRingViolation,
};
use crate::stats::VhostRequestKind;

/// Maximum tasks of a session in flight.
const TASKS_MAX: usize = 1024;

/// Form of a request's response.
pub(super) enum ScsiResponseForm {
    /// Response to a command.
    Command(ScsiReply),
    /// Response to a request of the control queue.
    Control(ScsiControlRequest),
}

/// Chain of a request that was passed to the session.
pub(super) struct ScsiNote {
    /// Queue of the chain.
    pub(super) queue: usize,
    /// Right to complete the chain.
    pub(super) token: ChainToken,
    /// Parts for the response.
    pub(super) writable: Vec<GuestPart>,
    /// Form of the response.
    pub(super) form: ScsiResponseForm,
    /// Kind of the request, for statistics.
    pub(super) kind: VhostRequestKind,
    /// Bytes of data that the request holds.
    pub(super) bytes: u64,
    /// Time at which it was taken.
    pub(super) began: Instant,
}

/// Request whose response is to be written.
pub(super) struct EndedScsi {
    pub(super) note: ScsiNote,
    pub(super) outcome: ScsiOutcome,
}

impl EndedScsi {
    /// Writes the response to the request's chain; returns the number of bytes for the used ring.
    pub(super) fn respond(&self, log: Option<&DirtyLog>) -> u32 {
        match &self.note.form {
            ScsiResponseForm::Command(reply) => reply.respond(&self.note.writable, &self.outcome, log),
            ScsiResponseForm::Control(request) => request.respond(&self.note.writable, self.outcome.response, log),
        }
    }
}

/// Outbox of a queue.
#[derive(Default)]
struct QueueOutbox {
    ended: VecDeque<EndedScsi>,
    task: Option<Waker>,
}

impl QueueOutbox {
    fn wake(&self) {
        if let Some(task) = &self.task {
            task.wake_by_ref();
        }
    }
}

/// Outcomes of a session's tasks, by queue, and its events.
struct ScsiOutcomes {
    queues: Vec<QueueOutbox>,
    events: ScsiEvents,
}

impl ScsiOutcomes {
    fn push(&mut self, note: ScsiNote, outcome: ScsiOutcome) {
        let outbox = &mut self.queues[note.queue];
        outbox.ended.push_back(EndedScsi { note, outcome });
        outbox.wake();
    }
}

impl ScsiTransport for ScsiOutcomes {
    type Note = ScsiNote;

    fn complete(&mut self, done: ScsiCompletion<ScsiNote>) {
        let (note, outcome) = ScsiOutcome::of(done);
        self.push(note, outcome);
    }

    fn aborted(&mut self, note: ScsiNote) {
        self.push(note, ScsiOutcome::failed(ScsiResponse::Aborted));
    }

    fn managed(&mut self, note: ScsiNote, response: TaskResponse) {
        self.push(note, ScsiOutcome::failed(response.into()));
    }
}

/// Session of a front-end, while it has one.
pub(super) struct ScsiNexus {
    session: RefCell<Option<ScsiSession<ScsiNote>>>,
    outcomes: RefCell<ScsiOutcomes>,
    task: RefCell<Option<Waker>>,
    ended: Cell<bool>,
    has_left: Cell<bool>,
    /// Notified when the session has left its units.
    left: Notify,
}

impl ScsiNexus {
    fn start(spec: &VhostScsiTarget, queues: usize, features: u64) -> Rc<Self> {
        let VhostScsiTarget { target, units, initiator } = spec.clone();
        let session = ScsiSessionSpec {
            id: target.next_session(),
            initiator: format!("naa.{:016x}", u64::from_be_bytes(initiator)),
            host: naa_host(initiator),
            signal: Arc::new(NexusSignal::default()),
            tasks_max: TASKS_MAX,
            watches: true,
        };
        let session = ScsiSession::new(target, units, session);
        let queues = (0..queues).map(|_| QueueOutbox::default()).collect();
        let outcomes = RefCell::new(ScsiOutcomes { queues, events: ScsiEvents::new(features) });
        let (session, task) = (RefCell::new(Some(session)), RefCell::default());
        let (ended, has_left, left) = (Cell::new(false), Cell::new(false), Notify::new());
        let nexus = Rc::new(Self { session, outcomes, task, ended, has_left, left });
        drop(spawn(nexus.clone().drive()));
        nexus
    }

    /// Drives the session to its end, and then what is left of its tasks.
    async fn drive(self: Rc<Self>) {
        poll_fn(|cx| self.turn(cx)).await;
        let Some(session) = self.session.take() else { return };
        session.release_reservations().await;
        let orphans = session.leave(&mut *self.outcomes.borrow_mut());
        self.has_left.set(true);
        self.left.notify_all();
        if let Some(mut orphans) = orphans {
            poll_fn(|cx| orphans.poll(cx.waker(), &mut *self.outcomes.borrow_mut())).await;
        }
    }

    fn turn(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.ended.get() {
            return Poll::Ready(());
        }
        *self.task.borrow_mut() = Some(cx.waker().clone());
        let mut session = self.session.borrow_mut();
        let Some(session) = session.as_mut() else { return Poll::Ready(()) };
        let mut outcomes = self.outcomes.borrow_mut();
        session.turn(cx.waker(), &mut *outcomes);
        let mut any = false;
        while let Some(event) = session.take_event() {
            outcomes.events.push(event);
            any = true;
        }
        if any {
            outcomes.queues[scsi::EVENT_QUEUE].wake();
        }
        Poll::Pending
    }

    /// Ends the session; its tasks in flight are aborted.
    fn end(&self) {
        self.ended.set(true);
        if let Some(task) = self.task.take() {
            task.wake();
        }
    }

    /// Ends the session, and waits until it has left its units, except those at which its tasks have not ended.
    async fn leave(&self) {
        self.end();
        self.left.wait_until(|| self.has_left.get()).await;
    }

    /// Passes a command to the session.
    pub(super) fn submit(&self, task: ScsiTask<ScsiNote>) {
        let mut outcomes = self.outcomes.borrow_mut();
        match self.session.borrow_mut().as_mut() {
            Some(session) => session.submit(task, &mut *outcomes),
            None => outcomes.push(task.note, ScsiOutcome::failed(ScsiResponse::Reset)),
        }
    }

    /// Passes a task management function to the session.
    pub(super) fn manage(&self, function: TaskFunction, note: ScsiNote) {
        let mut outcomes = self.outcomes.borrow_mut();
        match self.session.borrow_mut().as_mut() {
            Some(session) => session.manage(function, note, &mut *outcomes),
            None => outcomes.push(note, ScsiOutcome::failed(ScsiResponse::Reset)),
        }
    }

    /// Returns the next request of a queue whose response is to be written.
    pub(super) fn take_ended(&self, queue: usize) -> Option<EndedScsi> {
        self.outcomes.borrow_mut().queues[queue].ended.pop_front()
    }

    /// Sets the task to wake when a request of a queue has ended, or for the event queue, when there is an event.
    pub(super) fn set_task(&self, queue: usize, task: &Waker) {
        let outbox = &mut self.outcomes.borrow_mut().queues[queue];
        if !outbox.task.as_ref().is_some_and(|known| known.will_wake(task)) {
            outbox.task = Some(task.clone());
        }
    }

    /// Returns whether there is an event.
    pub(super) fn has_event(&self) -> bool {
        self.outcomes.borrow().events.has_pending()
    }

    /// Writes the next event to a buffer of the event queue; returns the number of bytes for the used ring, if there is an
    /// event.
    ///
    /// # Errors
    /// When the buffer is too short.
    pub(super) fn put_event(
        &self,
        writable: &[GuestPart],
        log: Option<&DirtyLog>,
    ) -> Result<Option<u32>, ScsiRingViolation> {
        self.outcomes.borrow_mut().events.put(writable, log)
    }
}

/// virtio-scsi device of a connection.
pub(super) struct ScsiModel {
    spec: VhostScsiTarget,
    queues: u16,
    config: RefCell<ScsiConfig>,
    /// Session, from the first queue that runs on; it ends when another connection runs the rings.
    nexus: RefCell<Option<Rc<ScsiNexus>>>,
}

impl ScsiModel {
    /// Creates the device of a connection.
    pub(super) fn new(spec: &VhostScsiTarget, queues: u16) -> Self {
        Self { spec: spec.clone(), queues, config: RefCell::new(ScsiConfig::new(queues)), nexus: RefCell::default() }
    }

    /// Returns the features of the device.
    pub(super) fn features(&self) -> u64 {
        scsi::features()
    }

    /// Copies content of the configuration space.
    pub(super) fn read_config(&self, offset: u32, to: &mut [u8]) {
        self.config.borrow().read(offset, to);
    }

    /// Writes the configuration space, as a driver does.
    ///
    /// # Errors
    /// Text that says what cannot be written.
    pub(super) fn write_config(&self, offset: u32, content: &[u8]) -> Result<(), String> {
        self.config.borrow_mut().write(offset, content).map_err(|refusal| refusal.to_string())
    }

    /// Returns the configuration.
    pub(super) fn config(&self) -> ScsiConfig {
        self.config.borrow().clone()
    }

    /// Begins the session, unless there is one, after that of the connection which ran the rings before: the units take one
    /// session of a guest at a time.
    pub(super) async fn begin_session(&self, owner: &RingOwner, features: u64) {
        if self.has_session() {
            return;
        }
        if let Some(former) = owner.session() {
            former.leave().await;
        }
        // Another queue of the connection may have waited as well.
        if !self.has_session() {
            let queues = usize::from(self.queues) + scsi::FIRST_REQUEST_QUEUE;
            let nexus = ScsiNexus::start(&self.spec, queues, features);
            owner.set_session(&nexus);
            *self.nexus.borrow_mut() = Some(nexus);
        }
    }

    fn has_session(&self) -> bool {
        self.nexus.borrow().as_ref().is_some_and(|nexus| !nexus.ended.get())
    }

    /// Returns the session.
    ///
    /// # Panics
    /// When it has not [begun](Self::begin_session).
    pub(super) fn nexus(&self) -> Rc<ScsiNexus> {
        self.nexus.borrow().clone().expect("a queue that runs has begun the session")
    }

    /// Ends the session, as a reset of the device does.
    pub(super) fn reset(&self) {
        self.config.borrow_mut().reset();
        self.end();
    }

    fn end(&self) {
        if let Some(nexus) = self.nexus.take() {
            nexus.end();
        }
    }
}

impl Drop for ScsiModel {
    fn drop(&mut self) {
        self.end();
    }
}
