//! Token bucket with a burst, in exact arithmetic.

use forebay_reactor::Instant;

use crate::limits::RateLimit;

/// Units of a token: one for each nanosecond of a second, so that a refill is a product of whole numbers.
const TOKEN: i128 = 1_000_000_000;

/// Token bucket of one limit.
///
/// It has two levels. The *reserve* is filled at the rate, up to the burst times its seconds. The *ready* tokens are
/// filled from it at the rate of the burst, up to a second's worth. A request takes its cost from both.
///
/// | invariant | |
/// |---|---|
/// | B1 | `ready <= reserve` |
/// | B2 | a request is admitted only when its cost, or a full bucket if that is less, is ready; it may leave a debt |
/// | B3 | refilling depends on the time since, not on how often it is done |
#[derive(Debug, Clone)]
pub struct TokenBucket {
    limit: RateLimit,
    reserve: i128,
    ready: i128,
    refilled: Instant,
}

impl TokenBucket {
    /// Creates a bucket with a full reserve, of which nothing is ready, as in librbd: no burst begins with the limit.
    ///
    /// # Panics
    /// If the limit is 0.
    pub fn new(limit: RateLimit, now: Instant) -> Self {
        assert!(limit.rate > 0, "a bucket without a limit");
        let limit = limit.in_force();
        Self { limit, reserve: capacity(limit), ready: 0, refilled: now }
    }

    /// Changes the limit. A changed one begins with a full reserve and forgives debt.
    pub fn set_limit(&mut self, limit: RateLimit, now: Instant) {
        let limit = limit.in_force();
        if limit == self.limit {
            return;
        }
        self.refill(now);
        self.limit = limit;
        self.reserve = capacity(limit);
        self.ready = self.ready.clamp(0, ready_max(limit));
    }

    /// Adds the tokens since the last refill.
    pub fn refill(&mut self, now: Instant) {
        let nanos = i128::try_from(now.since(self.refilled).as_nanos()).unwrap_or(i128::MAX);
        self.refilled = self.refilled.max(now);
        let add = |level: i128, rate: u64| level.saturating_add(i128::from(rate).saturating_mul(nanos));
        self.reserve = add(self.reserve, self.limit.rate).min(capacity(self.limit));
        self.ready = add(self.ready, self.limit.burst).min(ready_max(self.limit)).min(self.reserve);
    }

    /// Returns whether a request of that many tokens is admitted, as of the last refill.
    pub fn admits(&self, cost: u64) -> bool {
        self.ready >= self.needed(cost)
    }

    /// Takes the tokens of an admitted request.
    pub fn take(&mut self, cost: u64) {
        self.ready -= tokens(cost);
        self.reserve -= tokens(cost);
    }

    /// Returns the tokens of a request that was admitted and not executed.
    pub fn give_back(&mut self, cost: u64) {
        self.reserve = self.reserve.saturating_add(tokens(cost)).min(capacity(self.limit));
        self.ready = self.ready.saturating_add(tokens(cost)).min(ready_max(self.limit)).min(self.reserve);
    }

    /// Returns when a request of that many tokens is admitted, if no other takes tokens; saturates in the far future.
    pub fn ready_at(&self, cost: u64) -> Instant {
        let needed = self.needed(cost);
        let wait = |level: i128, rate: u64| ((needed - level).max(0) + i128::from(rate) - 1) / i128::from(rate);
        let nanos = wait(self.ready, self.limit.burst).max(wait(self.reserve, self.limit.rate));
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        Instant::from_nanos(self.refilled.as_nanos().saturating_add(nanos))
    }

    /// Returns the level at which a request of that many tokens is admitted.
    fn needed(&self, cost: u64) -> i128 {
        tokens(cost).min(ready_max(self.limit))
    }
}

fn tokens(count: u64) -> i128 {
    i128::from(count) * TOKEN
}

/// Returns the maximum of the reserve.
fn capacity(limit: RateLimit) -> i128 {
    tokens(limit.burst).saturating_mul(i128::from(limit.burst_seconds.max(1)))
}

/// Returns the maximum of the ready tokens: a second of the burst.
fn ready_max(limit: RateLimit) -> i128 {
    tokens(limit.burst)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    /// Takes single tokens at an instant, as many as are admitted.
    fn drain(bucket: &mut TokenBucket, now: Instant) -> u64 {
        bucket.refill(now);
        let mut taken = 0;
        while bucket.admits(1) {
            bucket.take(1);
            taken += 1;
        }
        taken
    }

    #[test]
    fn a_burst_is_spent_and_saved_up_again() {
        let limit = RateLimit { rate: 100, burst: 1000, burst_seconds: 3 };
        let mut bucket = TokenBucket::new(limit, at(0));
        assert_eq!(drain(&mut bucket, at(0)), 0, "nothing is ready at first");
        // 3000 tokens of reserve at 1000 a second, and 100 more for each second after the first.
        let each: Vec<_> = (1..=6).map(|second| drain(&mut bucket, at(second * 1000))).collect();
        assert_eq!(each, [1000, 1000, 1000, 300, 100, 100]);
        // Half of the reserve is back after 15 s; a second's worth of it at once.
        assert_eq!(drain(&mut bucket, at(21_000)), 1000);
        assert_eq!(drain(&mut bucket, at(21_500)), 500);
        assert_eq!(drain(&mut bucket, at(22_500)), 150);
    }

    #[test]
    fn a_large_request_leaves_a_debt() {
        let mut bucket = TokenBucket::new(RateLimit::of(10), at(0));
        bucket.refill(at(999));
        assert!(!bucket.admits(45));
        assert_eq!(bucket.ready_at(45), at(1000));
        bucket.refill(at(1000));
        assert!(bucket.admits(45), "a full bucket is enough");
        bucket.take(45);
        assert_eq!(bucket.ready_at(1), at(1000 + 3600));
        bucket.set_limit(RateLimit::of(1000), at(1000));
        assert_eq!(bucket.ready_at(1), at(1001), "a changed limit forgives the debt");
        bucket.take(45);
        bucket.set_limit(RateLimit::of(1000), at(1000));
        assert_eq!(bucket.ready_at(1), at(1046), "the same one does not");
    }

    #[test]
    fn extreme_limits_do_not_overflow() {
        let limit = RateLimit { rate: u64::MAX, burst: u64::MAX, burst_seconds: u64::MAX };
        let mut bucket = TokenBucket::new(limit, at(0));
        bucket.refill(Instant::from_nanos(u64::MAX));
        assert!(bucket.admits(u64::MAX));
        bucket.take(u64::MAX);
        let mut slow = TokenBucket::new(RateLimit::of(1), at(0));
        slow.take(u64::MAX);
        assert_eq!(slow.ready_at(1), Instant::from_nanos(u64::MAX));
    }

    fn limit() -> impl Strategy<Value = RateLimit> {
        (1_u64..5000, 0_u64..20_000, 1_u64..5).prop_map(|(rate, burst, burst_seconds)| RateLimit {
            rate,
            burst,
            burst_seconds,
        })
    }

    proptest! {
        /// Against the definition: over any interval no more than rate * t + burst * seconds, and than burst * t + burst.
        #[test]
        fn no_interval_has_more_than_its_rate_and_burst(
            limit in limit(),
            steps in proptest::collection::vec((0_u64..400_000_000, 1_u64..300), 1..120),
        ) {
            let force = limit.in_force();
            let mut bucket = TokenBucket::new(limit, at(0));
            let (mut now, mut taken) = (at(0), Vec::new());
            for (wait, cost) in steps {
                now = now + Duration::from_nanos(wait);
                bucket.refill(now);
                prop_assert!(bucket.ready <= bucket.reserve);
                if bucket.admits(cost) {
                    bucket.take(cost);
                    // What exceeds a full bucket is owed, and so paid for by later requests.
                    taken.push((now, cost, cost.saturating_sub(force.burst)));
                }
            }
            for first in 0..taken.len() {
                let mut sum = 0_u128;
                for &(then, cost, excess) in &taken[first..] {
                    sum += u128::from(cost);
                    let nanos = then.since(taken[first].0).as_nanos();
                    let most = |rate: u64, burst: u128| u128::from(rate) * nanos + burst * 1_000_000_000;
                    let counted = (sum - u128::from(excess)) * 1_000_000_000;
                    prop_assert!(counted <= most(force.rate, u128::from(force.burst) * u128::from(force.burst_seconds)));
                    prop_assert!(counted <= most(force.burst, u128::from(force.burst)));
                }
            }
        }

        #[test]
        fn a_request_is_admitted_exactly_when_it_is_said(
            limit in limit(), spent in 0_u64..40_000, cost in 1_u64..20_000,
        ) {
            let mut bucket = TokenBucket::new(limit, at(0));
            bucket.take(spent);
            let then = bucket.ready_at(cost);
            if then > at(0) {
                let mut early = bucket.clone();
                early.refill(Instant::from_nanos(then.as_nanos() - 1));
                prop_assert!(!early.admits(cost));
            }
            bucket.refill(then);
            prop_assert!(bucket.admits(cost));
        }

        #[test]
        fn refilling_often_is_refilling_once(limit in limit(), spent in 0_u64..40_000, steps in proptest::collection::vec(0_u64..90_000_000, 1..50)) {
            let (mut often, mut once) = (TokenBucket::new(limit, at(0)), TokenBucket::new(limit, at(0)));
            often.take(spent);
            once.take(spent);
            let mut now = at(0);
            for step in steps {
                now = now + Duration::from_nanos(step);
                often.refill(now);
            }
            once.refill(now);
            prop_assert_eq!((often.ready, often.reserve), (once.ready, once.reserve));
        }

        #[test]
        fn what_is_given_back_can_be_taken_again(limit in limit(), wait in 0_u64..3_000_000_000, cost in 1_u64..500) {
            let mut bucket = TokenBucket::new(limit, at(0));
            bucket.refill(Instant::from_nanos(wait));
            let before = (bucket.ready, bucket.reserve);
            if bucket.admits(cost) {
                bucket.take(cost);
                bucket.give_back(cost);
            }
            prop_assert_eq!((bucket.ready, bucket.reserve), before);
        }
    }
}
