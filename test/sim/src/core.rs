//! The clock, the events to come, chance, power, and the record of what happened.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use forebay_reactor::driver::{Completion, Handle};

use crate::faults::Faults;
use crate::net::NetEvent;
use crate::rng::Rng;
use crate::trace::{Trace, What};
use crate::world::Stop;

/// Scheduled event.
#[derive(Debug)]
pub(crate) enum Event {
    /// A disk operation ends.
    Disk(u64),
    /// The network does something.
    Net(NetEvent),
}

#[derive(Debug)]
struct Timed {
    at: u64,
    seq: u64,
    event: Event,
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.seq == other.seq
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    /// The earliest is the greatest, as the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.seq).cmp(&(self.at, self.seq))
    }
}

/// State shared by disks and network.
#[derive(Debug)]
pub(crate) struct Core {
    /// Nanoseconds since the world began.
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    pub(crate) faults: Faults,
    pub(crate) trace: Trace,
    events: BinaryHeap<Timed>,
    next_seq: u64,
    events_done: u64,
    next_handle: u64,
    /// Completions to hand over at the next poll.
    pub(crate) done: Vec<Completion>,
    /// Persistence points passed.
    pub(crate) points: u64,
    /// Stop at this point.
    pub(crate) crash_at: Option<u64>,
    /// Reason for which the world has stopped.
    pub(crate) stop: Option<Stop>,
}

impl Core {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        Self {
            now: 0,
            rng: Rng::new(seed),
            faults,
            trace: Trace::default(),
            events: BinaryHeap::new(),
            next_seq: 0,
            events_done: 0,
            next_handle: 0,
            done: Vec::new(),
            points: 0,
            crash_at: None,
            stop: None,
        }
    }

    pub(crate) fn schedule(&mut self, delay: u64, event: Event) {
        let at = self.now.saturating_add(delay);
        self.schedule_at(at, event);
    }

    pub(crate) fn schedule_at(&mut self, at: u64, event: Event) {
        self.events.push(Timed { at, seq: self.next_seq, event });
        self.next_seq += 1;
    }

    /// A handle that was never given out before.
    pub(crate) fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        Handle(self.next_handle)
    }

    /// Returns the time of the next event.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.events.peek().map(|timed| timed.at)
    }

    /// The next event, if it is due.
    pub(crate) fn take_due(&mut self) -> Option<Event> {
        if self.stop.is_some() || self.next_at()? > self.now {
            return None;
        }
        self.events_done += 1;
        if self.events_done > self.faults.events_max {
            self.stop(Stop::Runaway);
            return None;
        }
        self.events.pop().map(|timed| timed.event)
    }

    /// Drops everything in flight.
    pub(crate) fn forget_events(&mut self) {
        self.events.clear();
        self.done.clear();
    }

    /// Stops the world.
    pub(crate) fn stop(&mut self, why: Stop) {
        if self.stop.is_none() {
            self.stop = Some(why);
            let number = if let Stop::Crash(point) = why { point } else { 0 };
            self.log(What::PowerOff, "stop", [number, 0, 0]);
        }
    }

    /// Passes a persistence point; the power may fail right here.
    pub(crate) fn point(&mut self) {
        self.points += 1;
        if self.crash_at.is_some_and(|at| at <= self.points) {
            self.crash_at = None;
            self.log(What::Point, "", [self.points, 0, 0]);
            self.stop(Stop::Crash(self.points));
        }
    }

    pub(crate) fn log(&mut self, what: What, label: &'static str, numbers: [u64; 3]) {
        self.trace.event(self.now, what, label, numbers);
    }
}
