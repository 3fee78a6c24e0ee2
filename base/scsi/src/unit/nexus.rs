//! I_T_L nexus as other cores see it: orders to the session that uses the unit.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use forebay_block::reservation::HostId;
use forebay_reactor::cross::{OneshotReceiver, OneshotSender, oneshot};

use crate::locks::lock;
use crate::signal::NexusSignal;

/// Order to a session to end its tasks on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Abort the tasks without a response.
    Abort,
    /// Complete the tasks and stop using the unit, which is removed.
    Leave,
}

/// Drain guard, held for each task that has to end. The waiter is notified when all clones are dropped.
pub(crate) struct DrainGuard {
    answer: Mutex<Option<OneshotSender<()>>>,
}

impl fmt::Debug for DrainGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DrainGuard")
    }
}

impl DrainGuard {
    /// Creates a guard, and the future that completes when all its clones are dropped.
    pub(crate) fn new() -> (Arc<Self>, OneshotReceiver<()>) {
        let (answer, answered) = oneshot();
        (Arc::new(Self { answer: Mutex::new(Some(answer)) }), answered)
    }
}

impl Drop for DrainGuard {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            answer.send(());
        }
    }
}

/// I_T_L nexus: use of a unit by a session.
///
/// 1. It is registered with the unit from [`Unit::register`](super::Unit::register) to
///    [`Unit::unregister`](super::Unit::unregister).
/// 2. An order is recorded before the session is woken, so that the session's next turn finds it.
/// 3. An order that its session never takes is dropped with the nexus, which releases its guard.
#[derive(Debug)]
pub(crate) struct Nexus {
    lun: u16,
    session: u64,
    watches: bool,
    host: HostId,
    signal: Arc<NexusSignal>,
    orders: Mutex<Vec<(Order, Arc<DrainGuard>)>>,
}

impl Nexus {
    pub(super) fn new(lun: u16, (session, watches): (u64, bool), host: HostId, signal: Arc<NexusSignal>) -> Self {
        Self { lun, session, watches, host, signal, orders: Mutex::default() }
    }

    /// Returns the LUN of the unit.
    pub(crate) fn lun(&self) -> u16 {
        self.lun
    }

    /// Returns the id of the session.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// Returns true if the session is woken by changes of the unit.
    pub(super) fn watches(&self) -> bool {
        self.watches
    }

    /// Wakes the session for a change of the unit.
    pub(super) fn wake(&self) {
        self.signal.notify();
    }

    /// Returns the host id for reservations.
    pub(crate) fn host(&self) -> &HostId {
        &self.host
    }

    /// Gives an order to the session, and wakes it.
    pub(super) fn give(&self, order: Order, guard: Arc<DrainGuard>) {
        lock(&self.orders).push((order, guard));
        self.signal.notify();
    }

    /// Takes the orders since the last call.
    pub(crate) fn take_orders(&self) -> Vec<(Order, Arc<DrainGuard>)> {
        std::mem::take(&mut lock(&self.orders))
    }
}

/// Reason for which a session cannot use a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NexusError {
    /// Unit removed.
    Gone,
    /// Commands of an earlier session of the same host are still in flight.
    Occupied,
}
