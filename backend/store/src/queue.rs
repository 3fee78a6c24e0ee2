//! Transaction queues: order of the transactions on one object.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};

use forebay_block::ObjectName;
use forebay_reactor::sync::{Notify, oneshot};

/// Waiting transaction: whether its ticket still exists, and the channel that grants it the queue.
struct Waiter {
    ticket: Weak<()>,
    grant: oneshot::Sender<QueueGuard>,
}

/// Queues of the transactions in progress, by object.
///
/// # Invariants
/// 1. An object has a queue exactly while a transaction on it is in progress.
/// 2. At most one [`QueueGuard`] of an object exists at any time.
/// 3. Guards of an object are granted in the order in which the tickets were taken.
#[derive(Default)]
pub struct TransactionQueues {
    /// Transactions that wait for the one in progress, oldest first.
    waiting: RefCell<HashMap<ObjectName, VecDeque<Waiter>>>,
    /// Signals that no transaction is in progress.
    idle: Notify,
}

impl TransactionQueues {
    /// Takes a ticket for the object's queue.
    pub fn take_ticket(self: &Rc<Self>, name: &ObjectName) -> QueueTicket {
        let mut waiting = self.waiting.borrow_mut();
        match waiting.get_mut(name) {
            Some(queue) => {
                let (grant, granted) = oneshot::channel();
                let alive = Rc::new(());
                queue.push_back(Waiter { ticket: Rc::downgrade(&alive), grant });
                QueueTicket::Waiting { granted, alive }
            }
            None => {
                waiting.insert(name.clone(), VecDeque::new());
                QueueTicket::First(QueueGuard { queues: self.clone(), name: name.clone() })
            }
        }
    }

    /// Returns whether a transaction on the object is in progress.
    pub fn is_busy(&self, name: &ObjectName) -> bool {
        self.waiting.borrow().contains_key(name)
    }

    /// Waits until no transaction is in progress.
    pub async fn wait_idle(&self) {
        self.idle.wait_until(|| self.waiting.borrow().is_empty()).await;
    }

    /// Grants the object's queue to the next transaction that still wants it.
    fn pass_on(self: &Rc<Self>, name: &ObjectName) {
        let mut waiting = self.waiting.borrow_mut();
        let queue = waiting.get_mut(name);
        debug_assert!(queue.is_some(), "a guard of {name} exists without a queue");
        let next = queue.and_then(|queue| {
            // Tickets dropped while they waited are skipped.
            std::iter::from_fn(|| queue.pop_front()).find(|waiter| waiter.ticket.strong_count() > 0)
        });
        if next.is_none() {
            waiting.remove(name);
        }
        let is_idle = waiting.is_empty();
        drop(waiting);
        match next {
            Some(waiter) => waiter.grant.send(QueueGuard { queues: self.clone(), name: name.clone() }),
            None if is_idle => self.idle.notify_all(),
            None => {}
        }
    }
}

/// Guard of an object's queue; dropping it lets the next transaction run.
pub struct QueueGuard {
    queues: Rc<TransactionQueues>,
    name: ObjectName,
}

impl Drop for QueueGuard {
    fn drop(&mut self) {
        self.queues.pass_on(&self.name);
    }
}

/// Ticket for an object's queue, taken on submission; must be awaited before the transaction runs.
pub enum QueueTicket {
    /// The queue was empty.
    First(QueueGuard),
    /// Transactions on the object are in progress.
    Waiting {
        /// Receives the guard.
        granted: oneshot::Receiver<QueueGuard>,
        /// Exists as long as the ticket.
        alive: Rc<()>,
    },
}

impl QueueTicket {
    /// Waits until the transaction is first in the queue.
    pub async fn wait(self) -> QueueGuard {
        match self {
            Self::First(guard) => guard,
            Self::Waiting { granted, alive } => {
                let guard = granted.await.expect("the guard before this ticket passes the queue on");
                drop(alive);
                guard
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn transactions_run_one_at_a_time_in_the_order_of_their_tickets() {
        let queues: Rc<TransactionQueues> = Rc::default();
        let name = ObjectName::new("o");
        let first = poll(pin!(queues.take_ticket(&name).wait())).expect("the queue was empty");
        let mut second = Box::pin(queues.take_ticket(&name).wait());
        let mut third = Box::pin(queues.take_ticket(&name).wait());
        assert!(poll(pin!(queues.take_ticket(&ObjectName::new("other")).wait())).is_some());
        assert!(poll(second.as_mut()).is_none() && poll(third.as_mut()).is_none());
        drop(first);
        assert!(poll(third.as_mut()).is_none(), "the second comes first");
        let guard = poll(second.as_mut()).expect("granted");
        assert!(poll(third.as_mut()).is_none(), "the second still runs");
        drop(guard);
        drop(poll(third.as_mut()).expect("granted"));
        assert!(!queues.is_busy(&name));
    }

    #[test]
    fn a_dropped_ticket_grants_nothing_early_and_holds_up_nobody() {
        let queues: Rc<TransactionQueues> = Rc::default();
        let name = ObjectName::new("o");
        let first = poll(pin!(queues.take_ticket(&name).wait())).expect("the queue was empty");
        let mut second = Box::pin(queues.take_ticket(&name).wait());
        let cancelled = queues.take_ticket(&name);
        let mut last = Box::pin(queues.take_ticket(&name).wait());
        drop(cancelled);
        assert!(poll(second.as_mut()).is_none(), "the first still runs");
        drop(first);
        // Cancelled after the queue was granted to it.
        drop(second);
        drop(poll(last.as_mut()).expect("granted"));
        assert!(!queues.is_busy(&name));
    }

    #[test]
    fn the_last_transaction_signals_that_the_queues_are_idle() {
        let queues: Rc<TransactionQueues> = Rc::default();
        assert!(poll(pin!(queues.wait_idle())).is_some());
        let tickets = [ObjectName::new("a"), ObjectName::new("b")].map(|name| queues.take_ticket(&name));
        let woken = Cell::new(false);
        let mut idle = Box::pin(async {
            queues.wait_idle().await;
            woken.set(true);
        });
        for ticket in tickets {
            assert!(poll(idle.as_mut()).is_none());
            drop(ticket);
        }
        assert!(poll(idle.as_mut()).is_some() && woken.get());
    }
}
