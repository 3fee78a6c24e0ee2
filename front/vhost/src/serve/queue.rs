//! Task of a running queue: chains in, requests to the volume, completions and interrupts out.
//!
//! ```text
//! waiting for the right to run rings -> finding the ring's areas -> running --stop--> draining -> stopped, with its base
//!                                                                     \-----abandon--> draining -> dropped, for a successor
//! ```
//!
//! With the right to run rings, a queue of a virtio-scsi device waits for the session of the guest.
//!
//! While a turn makes progress, and for a short time after it, kicks are disabled and the ring is polled.  A queue without
//! work sleeps on its kick descriptor, and costs nothing.

mod block;
mod scsi;
mod work;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use forebay_reactor::{BusyPoll, EventSignal, EventWatch, sleep, yield_now};

use super::device::{DeviceModel, VhostDevice};
use super::device_copy::ControlChange;
use super::ring_owner::{RingClaim, RunningRing};
use crate::iotlb::IotlbMiss;
use crate::memory::{GuestPart, MemoryFault};
use crate::rings::{ChainHead, ChainToken, Virtq, VirtqError, VirtqSetup, VirtqViolation};
use crate::session::VringState;
use crate::wire::feature;
use work::QueueWork;

/// Maximum chains taken in one turn; then other tasks run.
const TURN_CHAINS: usize = 64;
/// Chains whose requests are submitted before the first of them is completed: the memory that they need is fetched meanwhile.
const GROUP_CHAINS: usize = 8;
/// Maximum bytes of a queue's requests in flight, after which no more are taken; one alone may be longer.
const BYTES_MAX: u64 = 64 << 20;
/// Time between two looks at a ring whose front-end kicks by no descriptor.
const LOOK: Duration = Duration::from_micros(100);

/// End that a queue is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueOrder {
    /// Take chains.
    Run,
    /// Complete what is in flight, and tell the position.
    Stop,
    /// Complete what the volume has, and leave the rest to a successor.
    Abandon,
}

/// Control of a queue by its connection.
pub(super) struct QueueControl {
    order: Cell<QueueOrder>,
    task: RefCell<Option<Waker>>,
    kick: RefCell<Option<Rc<EventWatch>>>,
    call: RefCell<Option<EventSignal>>,
    err: RefCell<Option<EventSignal>>,
}

impl QueueControl {
    /// Creates the control of a queue without descriptors.
    pub(super) fn new() -> Self {
        let order = Cell::new(QueueOrder::Run);
        let (task, kick) = (RefCell::default(), RefCell::default());
        Self { order, task, kick, call: RefCell::default(), err: RefCell::default() }
    }

    fn wake(&self) {
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// Returns the order.
    pub(super) fn order(&self) -> QueueOrder {
        self.order.get()
    }

    /// Changes the order.
    pub(super) fn set_order(&self, order: QueueOrder) {
        self.order.set(order);
        self.wake();
    }

    /// Changes the order or a descriptor.
    ///
    /// # Errors
    /// Text that says which descriptor is refused, and why; the former one stays.
    pub(super) fn change(&self, change: ControlChange) -> Result<(), String> {
        let refused = |what| move |error| format!("{what} descriptor: {error}");
        match change {
            ControlChange::Order(order) => self.set_order(order),
            ControlChange::Kick(kick) => {
                let kick = kick.map(EventWatch::new).transpose().map_err(refused("kick"))?;
                *self.kick.borrow_mut() = kick.map(Rc::new);
                self.wake();
            }
            ControlChange::Call(call) => {
                *self.call.borrow_mut() = call.map(EventSignal::new).transpose().map_err(refused("call"))?;
                // Completions before this had no descriptor, or one that nothing reads any more.
                self.interrupt();
            }
            ControlChange::Err(err) => {
                *self.err.borrow_mut() = err.map(EventSignal::new).transpose().map_err(refused("error"))?;
            }
        }
        Ok(())
    }

    /// Waits for an event; `None` when the queue is ordered to end before.
    async fn unless_ended(&self, event: impl Future<Output = ()>) -> Option<()> {
        let mut event = pin!(event);
        poll_fn(|cx| {
            *self.task.borrow_mut() = Some(cx.waker().clone());
            match self.order.get() {
                QueueOrder::Run => event.as_mut().poll(cx).map(Some),
                _ => Poll::Ready(None),
            }
        })
        .await
    }

    fn interrupt(&self) {
        if let Some(call) = &*self.call.borrow() {
            call.signal();
        }
    }
}

/// Chain whose request has ended, with its result in the guest's memory.
pub(super) struct EndedChain {
    token: ChainToken,
    /// Parts of the chain, for their memory.
    writable: Vec<GuestPart>,
    /// Bytes written, for the used ring.
    used: u32,
}

/// Reason for which no chain was taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum IntakeError {
    #[error(transparent)]
    Ring(#[from] VirtqError),
    #[error(transparent)]
    Violation(#[from] VirtqViolation),
    #[error(transparent)]
    Fault(#[from] MemoryFault),
    #[error("{0}")]
    Request(String),
    #[error("the file of the guest's memory was truncated")]
    Lost,
}

impl IntakeError {
    /// Returns the translation that is missing, if that is all.
    fn miss(&self) -> Option<IotlbMiss> {
        match self {
            IntakeError::Ring(error) => error.miss(),
            IntakeError::Fault(MemoryFault::Unmapped(miss)) => Some(*miss),
            _ => None,
        }
    }
}

/// Result of one turn.
enum QueueTurn {
    /// Chains were taken or completed: look again at once.
    Progress,
    /// Idle until a kick, a completion, or an order.
    Idle,
    /// Waits until translations or memory change.
    Unmapped,
    /// Ended as ordered.
    Ended,
}

/// Queue that runs.
struct RunningQueue {
    index: usize,
    ring: VringState,
    device: Rc<VhostDevice>,
    control: Rc<QueueControl>,
    virtq: Virtq,
    /// Chains of a former device that are to be executed again, in order.
    again: VecDeque<ChainHead>,
    work: QueueWork,
    /// Generation of the memory in which the ring's areas were found.
    generation: u64,
}

/// Runs a queue that has the right to run until it is told to end.  Returns its position, of which an abandoned queue's
/// says nothing.
///
/// # Errors
/// Text that says which rule the guest or its monitor has broken: the device is to end.
pub(super) async fn run(
    index: usize,
    ring: VringState,
    device: Rc<VhostDevice>,
    control: Rc<QueueControl>,
) -> Result<u32, String> {
    let result = run_ring(index, ring, device, control.clone()).await;
    if let Err(why) = &result
        && let Some(err) = &*control.err.borrow()
    {
        tracing::debug!(index, why, "signalling the error of a queue");
        err.signal();
    }
    result
}

async fn run_ring(
    index: usize,
    ring: VringState,
    device: Rc<VhostDevice>,
    control: Rc<QueueControl>,
) -> Result<u32, String> {
    let Some(mut queue) = RunningQueue::start(index, ring.clone(), device.clone(), control.clone()).await? else {
        return Ok(ring.base);
    };
    let mut poll = BusyPoll::default();
    loop {
        if device.phase.is_over() {
            // The guest may have given the memory of its ring to others.
            queue.drain().await;
            return Ok(queue.end());
        }
        let turn = match queue.turn() {
            Ok(turn) => turn,
            Err(why) => {
                device.fail(why.clone());
                // Rings of a successor must not begin before.
                queue.drain().await;
                return Err(why);
            }
        };
        if !matches!(turn, QueueTurn::Idle) {
            poll.worked();
        }
        match turn {
            QueueTurn::Progress => yield_now().await,
            QueueTurn::Ended => return Ok(queue.end()),
            // A kick costs the guest more than a look at its ring costs us.
            QueueTurn::Idle if poll.is_due() => yield_now().await,
            QueueTurn::Idle => {
                let log = device.log();
                if queue.virtq.enable_kicks(log.as_ref()) && queue.may_take() {
                    queue.virtq.disable_kicks(log.as_ref());
                    continue;
                }
                queue.wait().await;
                if queue.is_found() && !device.phase.is_over() {
                    queue.virtq.disable_kicks(device.log().as_ref());
                }
            }
            QueueTurn::Unmapped => queue.wait().await,
        }
    }
}

/// Waits until a connection has the right to run rings of an export, and its guest a session where the device needs one;
/// `None` when the queue is to end before.
pub(super) async fn acquire(
    claim: &RingClaim,
    device: &VhostDevice,
    index: usize,
    control: &QueueControl,
) -> Option<RunningRing> {
    let mut told = false;
    let running = loop {
        let freed = claim.freed();
        if let Some(running) = claim.try_acquire() {
            break running;
        }
        if !std::mem::replace(&mut told, true) {
            let export = &device.export.name;
            tracing::info!(export, index, "a queue waits: another front-end runs the rings of this export");
        }
        control.unless_ended(freed).await?;
    };
    if let DeviceModel::Scsi(model) = &device.model {
        control.unless_ended(model.begin_session(&claim.owner, device.features.get())).await?;
    }
    Some(running)
}

/// Finds the areas of a ring.
fn find_areas(device: &VhostDevice, ring: &VringState) -> Result<[GuestPart; 3], MemoryFault> {
    let addresses = ring.addresses.expect("a ring that runs has addresses");
    let lens = VirtqSetup::area_lens(ring.size, device.has(feature::RING_PACKED), device.has(feature::EVENT_INDEX));
    device.with_space(|space| {
        Ok([
            space.ring_area(addresses.descriptors, lens[0])?,
            space.ring_area(addresses.driver, lens[1])?,
            space.ring_area(addresses.device, lens[2])?,
        ])
    })
}

impl RunningQueue {
    /// Finds the ring and starts it; `None` when the queue is to end before its areas are mapped.
    async fn start(
        index: usize,
        ring: VringState,
        device: Rc<VhostDevice>,
        control: Rc<QueueControl>,
    ) -> Result<Option<Self>, String> {
        let in_ring = |why: &dyn std::fmt::Display| format!("ring {index}: {why}");
        let (generation, [descriptors, driver, device_area]) = loop {
            let generation = device.generation();
            match find_areas(&device, &ring) {
                Ok(areas) => break (generation, areas),
                Err(MemoryFault::Unmapped(miss)) => device.request_translation(miss),
                Err(fault) => return Err(in_ring(&fault)),
            }
            if !wait_for_change(&device, &control, generation).await {
                return Ok(None);
            }
        };
        let inflight = device.inflight_part(index, ring.size)?;
        // Without a record, the next device begins after the used chains of a split ring: it finds those that are left only
        // if no later one has been used.
        let ordered = device.has(feature::IN_ORDER) && !device.has(feature::RING_PACKED);
        let leaves = inflight.is_some() || ordered;
        let setup = VirtqSetup {
            size: ring.size,
            packed: device.has(feature::RING_PACKED),
            event_index: device.has(feature::EVENT_INDEX),
            in_order: device.has(feature::IN_ORDER),
            indirect: device.has(feature::INDIRECT_DESC),
            descriptors,
            driver,
            log_used: Some(device_area.guest),
            device: device_area,
            inflight,
        };
        let (mut virtq, again) = Virtq::start(setup, ring.base).map_err(|violation| in_ring(&violation))?;
        if !again.is_empty() {
            let (export, requests) = (&device.export.name, again.len());
            tracing::info!(export, index, requests, "executing the requests again that were in flight");
        }
        virtq.disable_kicks(device.log().as_ref());
        let work = QueueWork::new(index, &device, ring.size, leaves);
        let again = again.into();
        Ok(Some(Self { index, ring, device, control, virtq, again, work, generation }))
    }

    fn in_ring(&self, why: impl std::fmt::Display) -> String {
        format!("ring {}: {why}", self.index)
    }

    /// Returns whether another chain may be taken.
    fn may_take(&self) -> bool {
        let order = self.control.order.get();
        (order == QueueOrder::Run || (order == QueueOrder::Stop && !self.again.is_empty()))
            && self.work.wants_chains()
            && self.work.bytes() < BYTES_MAX
            && self.work.len() < usize::from(self.virtq.size())
    }

    /// Completes requests, takes chains, and interrupts the driver.
    fn turn(&mut self) -> Result<QueueTurn, String> {
        if let Err(error) = self.find_ring() {
            let Some(miss) = error.miss() else { return Err(self.in_ring(error)) };
            return Ok(self.turn_without_ring(miss));
        }
        let completed = self.complete_all();
        let taken = self.take_chains();
        if self.virtq.needs_interrupt() {
            self.device.counters.interrupted();
            self.control.interrupt();
        }
        if self.device.is_memory_lost() {
            return Err(IntakeError::Lost.to_string());
        }
        let taken = match taken {
            Ok(taken) => taken,
            Err(error) => {
                let Some(miss) = error.miss() else { return Err(self.in_ring(error)) };
                self.device.request_translation(miss);
                // What cannot be executed again, for want of a translation, stays in the record.
                return Ok(match self.may_end() {
                    true => QueueTurn::Ended,
                    false if completed > 0 => QueueTurn::Progress,
                    false => QueueTurn::Unmapped,
                });
            }
        };
        Ok(match self.may_end() && !self.may_take() {
            true => QueueTurn::Ended,
            false if completed + taken > 0 => QueueTurn::Progress,
            false => QueueTurn::Idle,
        })
    }

    /// Waits for the translation of the ring's areas; requests that end meanwhile are returned when they are found.
    fn turn_without_ring(&mut self, miss: IotlbMiss) -> QueueTurn {
        self.device.request_translation(miss);
        if self.control.order.get() != QueueOrder::Run {
            // The monitor waits, and a guest that has taken its ring away looks for nothing there: the record keeps them.
            self.work.poll(drop);
        }
        if self.may_end() { QueueTurn::Ended } else { QueueTurn::Unmapped }
    }

    /// Returns whether the ring's areas are those of the memory as it is now.
    fn is_found(&self) -> bool {
        self.generation == self.device.generation()
    }

    /// Finds the ring's areas again, if memory has changed.
    fn find_ring(&mut self) -> Result<(), IntakeError> {
        if self.is_found() {
            return Ok(());
        }
        let generation = self.device.generation();
        let [descriptors, driver, device] = find_areas(&self.device, &self.ring)?;
        self.virtq.relocate(descriptors, driver, device)?;
        self.generation = generation;
        Ok(())
    }

    /// Returns whether the queue is ordered to end, and nothing in flight holds it up.
    fn may_end(&self) -> bool {
        let ordered = match self.control.order.get() {
            QueueOrder::Run => false,
            // A position says that all before it was executed: with requests that are left it cannot be told.
            QueueOrder::Stop => !self.work.is_closing(),
            QueueOrder::Abandon => true,
        };
        ordered && self.work.is_empty()
    }

    /// Returns the position after the end.
    fn end(self) -> u32 {
        match self.control.order.get() {
            QueueOrder::Abandon => self.virtq.base(),
            _ => self.virtq.stop(),
        }
    }

    fn complete_all(&mut self) -> usize {
        let Self { work, virtq, device, .. } = self;
        let before = work.len();
        work.poll(|chain| give_back(virtq, device, chain));
        // With those that are left in the record: the queue may end now.
        before - work.len()
    }

    /// Waits until nothing is in flight, of a ring that is not used any more.
    async fn drain(&mut self) {
        poll_fn(|cx| {
            self.work.set_task(cx.waker());
            self.work.poll(drop);
            if self.work.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Polls the requests that were submitted since the last call for the first time.
    fn start_group(&mut self) {
        let Self { work, virtq, device, .. } = self;
        work.start_group(|chain| give_back(virtq, device, chain));
    }

    fn take_chains(&mut self) -> Result<usize, IntakeError> {
        let taken = self.submit_chains();
        self.start_group();
        taken
    }

    fn submit_chains(&mut self) -> Result<usize, IntakeError> {
        let mut taken = 0;
        if !self.may_take() || (self.again.is_empty() && !self.virtq.has_available()) {
            return Ok(0);
        }
        self.work.begin_turn();
        while taken < TURN_CHAINS && self.may_take() {
            let (device, virtq) = (&self.device, &mut self.virtq);
            let (chain, again) = match self.again.front() {
                Some(head) => {
                    let chain = device.with_space(|space| virtq.resume(*head, space))?;
                    self.again.pop_front();
                    (chain, true)
                }
                None => match device.with_space(|space| virtq.next(space))? {
                    Some(chain) => (chain, false),
                    None => break,
                },
            };
            taken += 1;
            let (ended, readable) = self.work.begin(chain, again)?;
            virtq.recycle(readable);
            if let Some(ended) = ended {
                give_back(virtq, device, ended);
            }
            if taken.is_multiple_of(GROUP_CHAINS) {
                self.start_group();
            }
        }
        Ok(taken)
    }

    /// Waits for a kick, a completion, an order, or a change of memory.
    async fn wait(&mut self) {
        let device = self.device.clone();
        let kick = self.control.kick.borrow().clone();
        let mut kicked = pin!(async {
            match &kick {
                Some(kick) => {
                    if let Err(error) = kick.ready().await {
                        tracing::warn!(%error, "cannot wait for kicks of a queue");
                        pending().await
                    }
                }
                None => sleep(LOOK).await,
            }
        });
        let mut changed = pin!(device.changed.wait());
        let order = self.control.order.get();
        let mut registered = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut registered, true) {
                // Whatever woke the task, the next turn finds it.
                return Poll::Ready(());
            }
            self.work.set_task(cx.waker());
            *self.control.task.borrow_mut() = Some(cx.waker().clone());
            let ready = kicked.as_mut().poll(cx).is_ready() || changed.as_mut().poll(cx).is_ready();
            if ready || self.control.order.get() != order || (self.is_found() && self.complete_all() > 0) {
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
        if let Some(kick) = &kick
            && kick.take()
        {
            self.device.counters.kicked();
        }
    }
}

/// Waits for a change of memory; returns false when the queue is to end before.
async fn wait_for_change(device: &VhostDevice, control: &QueueControl, generation: u64) -> bool {
    let mut changed = pin!(device.changed.wait_until(|| device.generation() != generation));
    poll_fn(|cx| {
        *control.task.borrow_mut() = Some(cx.waker().clone());
        match control.order.get() {
            QueueOrder::Run => changed.as_mut().poll(cx).map(|()| true),
            _ => Poll::Ready(false),
        }
    })
    .await
}

/// Returns a chain to the driver.
fn give_back(virtq: &mut Virtq, device: &VhostDevice, chain: EndedChain) {
    if device.is_memory_lost() || device.phase.is_over() {
        // The driver does not have what it asked for, and the queue ends in this turn; or the ring is a successor's.
        return;
    }
    virtq.complete(chain.token, chain.used, device.log().as_ref());
    virtq.recycle(chain.writable);
}
