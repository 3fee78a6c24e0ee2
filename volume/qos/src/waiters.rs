//! Requests that wait for admission, with the tasks to wake.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};

use crate::throttle::Ticket;

/// Waiting requests by their tickets.
#[derive(Default)]
pub(crate) struct Waiters(RefCell<BTreeMap<Ticket, Waiter>>);

#[derive(Default)]
struct Waiter {
    admitted: bool,
    waker: Option<Waker>,
}

impl Waiters {
    /// Adds a waiting request.
    pub(crate) fn add(&self, ticket: Ticket) {
        self.0.borrow_mut().insert(ticket, Waiter::default());
    }

    /// Marks requests as admitted and wakes them.
    pub(crate) fn admit(&self, tickets: Vec<Ticket>) {
        for ticket in tickets {
            let waker = self.0.borrow_mut().get_mut(&ticket).and_then(|waiter| {
                waiter.admitted = true;
                waiter.waker.take()
            });
            // Waking may run any code, so not under the borrow.
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Completes when the request is admitted, and forgets it.
    pub(crate) fn poll(&self, ticket: Ticket, cx: &mut Context<'_>) -> Poll<()> {
        let before = match self.0.borrow_mut().get_mut(&ticket) {
            Some(waiter) if !waiter.admitted => Some(waiter.waker.replace(cx.waker().clone())),
            _ => None,
        };
        // Dropping a waker may run any code, so not under the borrow.
        if before.map(drop).is_some() {
            return Poll::Pending;
        }
        self.remove(ticket);
        Poll::Ready(())
    }

    /// Forgets a request.
    pub(crate) fn remove(&self, ticket: Ticket) {
        let waiter = self.0.borrow_mut().remove(&ticket);
        drop(waiter);
    }
}
