//! Promises of this peer to the primaries of logs not to take over from them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::sync::Notify;
use forebay_reactor::{Instant, now, timeout};

use super::lease::LeasePromise;
use crate::format::LogId;

/// Promise to the primary of one log. It outlives the copy that is open.
pub(super) struct PrimaryPromise {
    promise: Cell<LeasePromise>,
    lease_ms: Cell<u64>,
    automatic: Cell<bool>,
    clock: LeaseClock,
    followed: Rc<Notify>,
}

/// Clock of leases and promises: the monotonic one of this machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaseClock {
    /// Speed against the reactor's clock, in parts in a million more or less: for simulations of several machines.
    pub ahead_ppm: i32,
}

impl LeaseClock {
    fn nanos(self, at: Instant) -> u64 {
        let nanos = i128::from(at.as_nanos());
        (nanos + nanos * i128::from(self.ahead_ppm) / 1_000_000) as u64
    }

    /// Returns an instant in milliseconds, rounded down, as leases count it.
    pub(super) fn millis(self, at: Instant) -> u64 {
        self.nanos(at) / 1_000_000
    }

    /// Returns an instant in milliseconds, rounded up, from which on a promise counts.
    fn millis_up(self, at: Instant) -> u64 {
        self.nanos(at).div_ceil(1_000_000)
    }
}

/// Returns the length that a promise counts for a lease: its sixteenth part is whole.
fn promised(lease_ms: u64) -> u64 {
    lease_ms.next_multiple_of(16)
}

impl PrimaryPromise {
    /// Follows a primary, whose lease has this length; with `automatic`, this peer takes over when the promise is over.
    pub(super) fn follow(&self, lease_ms: u32, automatic: bool) {
        self.lease_ms.set(promised(lease_ms.into()));
        self.automatic.set(automatic);
        self.extend();
        self.followed.notify_all();
    }

    /// Follows a change of who takes over.
    pub(super) fn set_automatic(&self, automatic: bool) {
        if self.automatic.replace(automatic) != automatic {
            self.followed.notify_all();
        }
    }

    /// Extends the promise: a request of the primary was accepted.
    pub(super) fn extend(&self) {
        let mut promise = self.promise.get();
        promise.extend(self.clock.millis_up(now()), self.lease_ms.get());
        self.promise.set(promise);
    }
}

/// Promises of this peer to the primaries of logs that it has copies of.
pub(super) struct LeasePromises {
    started: Instant,
    clock: LeaseClock,
    known: RefCell<BTreeMap<LogId, Rc<PrimaryPromise>>>,
    /// Signaled when a primary was followed.
    followed: Rc<Notify>,
}

impl LeasePromises {
    /// Begins without any that is known: a former process may have given some.
    pub(super) fn new(clock: LeaseClock) -> Self {
        Self { started: now(), clock, known: RefCell::default(), followed: Rc::default() }
    }

    /// Returns the promise to the primary of a log.
    pub(super) fn of(&self, log: &LogId) -> Rc<PrimaryPromise> {
        let promise = || {
            let followed = self.followed.clone();
            Rc::new(PrimaryPromise {
                promise: Cell::default(),
                lease_ms: Cell::new(0),
                automatic: Cell::new(false),
                clock: self.clock,
                followed,
            })
        };
        self.known.borrow_mut().entry(*log).or_insert_with(promise).clone()
    }

    /// Returns the remaining time of the promise to the primary of a log, whose lease has the length `lease`; a former process
    /// may have given one just before this one has started.
    pub(super) fn remaining(&self, log: &LogId, lease: Duration) -> Duration {
        let mut last =
            LeasePromise::after_start(self.clock.millis_up(self.started), promised(lease.as_millis() as u64));
        if let Some(known) = self.known.borrow().get(log) {
            last = last.max(known.promise.get());
        }
        Duration::from_millis(last.remaining(self.clock.millis(now())))
    }

    /// Returns whether the primary of a log was heard of, or the log dismissed, since this process has started.
    pub(super) fn is_known(&self, log: &LogId) -> bool {
        self.known.borrow().contains_key(log)
    }

    /// Waits until this peer is to take logs over by itself; returns them.
    pub(super) async fn due(&self) -> Vec<LogId> {
        loop {
            let (mut due, mut next) = (Vec::new(), None);
            for (log, known) in &*self.known.borrow() {
                if !known.automatic.get() {
                    continue;
                }
                match known.promise.get().remaining(self.clock.millis(now())) {
                    0 => due.push(*log),
                    remaining => next = Some(next.map_or(remaining, |next: u64| next.min(remaining))),
                }
            }
            if !due.is_empty() {
                return due;
            }
            let followed = self.followed.wait();
            match next {
                // Promises are extended without notice: the time is looked at again.
                Some(next) => drop(timeout(Duration::from_millis(next), followed).await),
                None => followed.await,
            }
        }
    }

    /// Returns whether this peer is to take a log over by itself, as far as its primary has said: its promise is over.
    pub(super) fn is_due(&self, log: &LogId) -> bool {
        let known = self.known.borrow();
        known
            .get(log)
            .is_some_and(|known| known.automatic.get() && known.promise.get().is_over(self.clock.millis(now())))
    }

    /// Expects the primary of a log to be heard of again before this peer takes it over by itself.
    pub(super) fn forget(&self, log: &LogId) {
        self.of(log).automatic.set(false);
    }
}
