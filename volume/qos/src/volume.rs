//! Limits of a volume at work: delays requests by the reactor's clock.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::BlockRequest;
use forebay_reactor::sync::Notify;
use forebay_reactor::{Instant, now, sleep_until, try_spawn};

use crate::limits::QosLimits;
use crate::throttle::{QosAdmission, RequestCost, Throttle, Ticket};
use crate::waiters::Waiters;

/// Counters of a volume's throttle.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QosStats {
    /// Requests that had to wait.
    pub throttled: u64,
    /// Total time that executed requests have waited.
    pub throttled_time: Duration,
    /// Requests that wait now.
    pub waiting: usize,
}

/// Limits of a volume, for the tasks of one reactor.
///
/// Without limits, admission costs the check of a flag. With limits, a request that is admitted at once takes no
/// memory and no timer; while requests wait, one task has one timer for all of them.
pub struct VolumeQos {
    throttle: RefCell<Throttle>,
    /// Set while there are limits.
    limited: Cell<bool>,
    /// Set once the volume closes: nothing waits any more.
    ended: Cell<bool>,
    /// Waiting requests; those without an entry in the throttle have been admitted.
    waiters: Waiters,
    /// Set while a task releases waiting requests.
    has_timer: Cell<bool>,
    /// Notified when the time of the next release may have changed.
    changed: Notify,
    throttled: Cell<u64>,
    throttled_time: Cell<Duration>,
}

impl VolumeQos {
    /// Creates the limits of a volume.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(limits: QosLimits) -> Rc<Self> {
        Rc::new(Self {
            limited: Cell::new(limits.has_any()),
            throttle: RefCell::new(Throttle::new(limits, now())),
            ended: Cell::new(false),
            waiters: Waiters::default(),
            has_timer: Cell::new(false),
            changed: Notify::new(),
            throttled: Cell::new(0),
            throttled_time: Cell::default(),
        })
    }

    /// Returns the limits.
    pub fn limits(&self) -> QosLimits {
        self.throttle.borrow().limits().clone()
    }

    /// Changes the limits; they apply to waiting requests at once.
    pub fn set_limits(&self, limits: QosLimits) {
        let now = now();
        self.limited.set(limits.has_any());
        self.throttle.borrow_mut().set_limits(limits, now);
        self.release(now);
        self.changed.notify_all();
    }

    /// Admits all waiting requests at once; what exceeds the limits is owed by later ones. For those who wait until
    /// all requests have completed.
    pub fn release_all(&self) {
        let mut admitted = Vec::new();
        self.throttle.borrow_mut().release_all(now(), |ticket| admitted.push(ticket));
        self.waiters.admit(admitted);
        self.changed.notify_all();
    }

    /// Admits all waiting requests and all later ones, whatever the limits, as the volume closes.
    pub fn end(&self) {
        self.ended.set(true);
        self.release_all();
    }

    /// Puts the limits into force again, for a volume that is not closed after all.
    pub fn resume(&self) {
        self.ended.set(false);
    }

    /// Returns the counters.
    pub fn stats(&self) -> QosStats {
        QosStats {
            throttled: self.throttled.get(),
            throttled_time: self.throttled_time.get(),
            waiting: self.throttle.borrow().waiting(),
        }
    }

    /// Admits a request: `None` if it is to be executed now, otherwise what it has to wait for first.
    pub fn admit(self: &Rc<Self>, request: &BlockRequest) -> Option<AdmissionWait> {
        if !self.limited.get() || self.ended.get() {
            return None;
        }
        let cost = RequestCost::of(request)?;
        let started = now();
        let mut throttle = self.throttle.borrow_mut();
        if throttle.limits().excludes(request) {
            return None;
        }
        let QosAdmission::Wait(ticket) = throttle.admit(cost, started) else { return None };
        drop(throttle);
        self.throttled.set(self.throttled.get() + 1);
        self.waiters.add(ticket);
        self.run_timer();
        Some(AdmissionWait { qos: self.clone(), ticket, cost, started, is_executed: false })
    }

    /// Starts the task that releases waiting requests, unless it runs.
    fn run_timer(self: &Rc<Self>) {
        if self.has_timer.replace(true) {
            return;
        }
        let qos = self.clone();
        drop(try_spawn(async move { qos.release_in_time().await }));
    }

    /// Releases waiting requests until none is left.
    async fn release_in_time(&self) {
        loop {
            let changed = self.changed.wait();
            let Some(next) = self.throttle.borrow().next_release() else { break };
            let (mut changed, mut time) = (pin!(changed), pin!(sleep_until(next)));
            poll_fn(|cx| match changed.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(()),
                Poll::Pending => time.as_mut().poll(cx),
            })
            .await;
            self.release(now());
        }
        self.has_timer.set(false);
    }

    /// Admits the waiting requests whose tokens are there.
    fn release(&self, now: Instant) {
        let mut admitted = Vec::new();
        self.throttle.borrow_mut().release(now, |ticket| admitted.push(ticket));
        self.waiters.admit(admitted);
    }
}

/// Wait of a request for its admission; see [`VolumeQos::admit`]. A request that is dropped while it waits is withdrawn, and one
/// that is dropped after it was admitted returns its tokens.
pub struct AdmissionWait {
    qos: Rc<VolumeQos>,
    ticket: Ticket,
    cost: RequestCost,
    started: Instant,
    is_executed: bool,
}

impl Future for AdmissionWait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.qos.waiters.poll(self.ticket, cx).is_pending() {
            return Poll::Pending;
        }
        if !std::mem::replace(&mut self.is_executed, true) {
            let qos = &self.qos;
            qos.throttled_time.set(qos.throttled_time.get() + self.started.elapsed());
        }
        Poll::Ready(())
    }
}

impl Drop for AdmissionWait {
    fn drop(&mut self) {
        if self.is_executed {
            return;
        }
        self.qos.waiters.remove(self.ticket);
        let mut throttle = self.qos.throttle.borrow_mut();
        if !throttle.cancel(self.ticket) {
            throttle.give_back(self.cost);
        }
        drop(throttle);
        self.qos.changed.notify_all();
    }
}
