//! What a session leaves behind whose commands are not done when its time is over: a device may take as long as it
//! likes, and what it does in the end must not surprise those who came after.
//!
//! The session is gone, so its host may log in again.  Until the last of its commands is done it still uses their units:
//! whoever resets one or takes a reservation waits for it, and the host itself is answered with BUSY there.

use std::collections::BTreeMap;
use std::task::{Context, Poll};

use forebay_reactor::sync::InFlight;
use forebay_reactor::{now, spawn};

use super::execute::Work;
use super::lun::LunState;
use super::outbox::{Outbox, Pending};
use crate::site::Leaving;
use crate::unit::Order;

/// What is left of a session.
pub(super) struct Remains {
    pub(super) work: InFlight<Work, Pending>,
    /// For the memory that commands hold; nothing is sent any more.
    pub(super) outbox: Outbox,
    pub(super) luns: BTreeMap<u16, LunState>,
    /// Its place among the sessions that may be.
    pub(super) leaving: Leaving,
}

impl Remains {
    /// Carries what is left to its end, by itself.
    pub(super) fn carry(mut self) {
        self.outbox.deafen();
        self.work.notes_mut().for_each(|note| note.aborted = true);
        // A unit of which nothing is under way is let go of at once.
        let in_use: Vec<u16> = self.work.notes_mut().filter_map(|note| unit_of(note)).collect();
        self.luns.retain(|lun, _| in_use.contains(lun));
        let mut remains = self;
        drop(spawn(std::future::poll_fn(move |cx| remains.turn(cx))));
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let signal = self.leaving.session().signal.clone();
        signal.set_task(cx.waker());
        self.work.set_task(cx.waker());
        if signal.take_told() {
            self.follow_orders();
        }
        let (outbox, now) = (&mut self.outbox, now());
        self.work.poll(|outcome, pending| outbox.answer(now, outcome, pending));
        // What waits for others is not waited for: two sessions could wait for each other.
        match self.work.notes_mut().any(|note| note.is_task()) {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    }

    fn follow_orders(&mut self) {
        let orders: Vec<_> = self.luns.values().map(|state| (state.nexus.lun, state.nexus.orders())).collect();
        for (lun, orders) in orders {
            for (order, drain) in orders {
                let of_unit = self.work.notes_mut().filter(|note| unit_of(note) == Some(lun));
                // All has been given up already; what is new is who waits for it.
                of_unit.filter(|note| note.is_task()).for_each(|note| note.drains.push(drain.clone()));
                if order == Order::Leave {
                    self.luns.remove(&lun);
                }
            }
        }
    }
}

fn unit_of(note: &Pending) -> Option<u16> {
    note.local.as_ref().map(|local| local.unit.lun())
}
