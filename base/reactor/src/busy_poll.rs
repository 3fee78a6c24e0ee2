//! Busy-polling of work that another process leaves in shared memory.

use std::time::Duration;

use crate::executor::{GAP_LINGERS_MAX, busy_poll_time};
use crate::time::{Instant, now};

/// Decision whether a task polls its source of work once more, or waits to be woken.
///
/// It follows the rule by which a reactor busy-polls its driver, with the same busy-poll time: a task polls at most that
/// long after its last work, and only while its average gap without work (weight 1/8) is at most twice as long.  A source
/// that is idle, or used now and then, costs no processor time.
#[derive(Debug, Default)]
pub struct BusyPoll {
    idle_since: Option<Instant>,
    gap: Duration,
}

impl BusyPoll {
    /// Notes that there was work.
    pub fn worked(&mut self) {
        if self.idle_since.is_some() {
            self.worked_at(now(), busy_poll_time());
        }
    }

    /// Returns whether a task that found no work is to poll again, after [`yield_now`](crate::yield_now).
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn is_due(&mut self) -> bool {
        let linger = busy_poll_time();
        !linger.is_zero() && self.is_due_at(now(), linger)
    }

    fn worked_at(&mut self, now: Instant, linger: Duration) {
        if let Some(begun) = self.idle_since.take() {
            // Clamped, so that a few short gaps outweigh one long pause.
            let gap = now.since(begun).min(linger * (4 * GAP_LINGERS_MAX));
            self.gap = (self.gap * 7 + gap) / 8;
        }
    }

    fn is_due_at(&mut self, now: Instant, linger: Duration) -> bool {
        let begun = *self.idle_since.get_or_insert(now);
        self.gap <= linger * GAP_LINGERS_MAX && now.since(begun) < linger
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINGER: Duration = Duration::from_micros(50);

    /// Returns the time for which a task polls in a gap of `gap`, after which there is work.
    fn polled(poll: &mut BusyPoll, at: &mut Instant, gap: Duration) -> Duration {
        let (begun, end) = (*at, *at + gap);
        while *at < end && poll.is_due_at(*at, LINGER) {
            *at = *at + Duration::from_micros(1);
        }
        let took = at.since(begun);
        *at = end;
        poll.worked_at(end, LINGER);
        took
    }

    #[test]
    fn short_gaps_are_polled_and_long_ones_are_not_once_there_were_some() {
        let (mut poll, mut at) = (BusyPoll::default(), Instant::default());
        let (short, long) = (Duration::from_micros(10), Duration::from_millis(10));
        assert_eq!(polled(&mut poll, &mut at, short), short);
        assert_eq!(polled(&mut poll, &mut at, long), LINGER, "at most the busy-poll time");
        assert_eq!(polled(&mut poll, &mut at, short), short, "one pause changes nothing");
        (0..20).map(|_| polled(&mut poll, &mut at, long)).for_each(|took| assert!(took <= LINGER));
        assert_eq!(polled(&mut poll, &mut at, long), Duration::ZERO);
        (0..20).map(|_| polled(&mut poll, &mut at, short)).for_each(|took| assert!(took <= short));
        assert_eq!(polled(&mut poll, &mut at, short), short);
    }
}
