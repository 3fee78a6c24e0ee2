//! Write throttle: all back-pressure of the log, on writes and on write-back.
//!
//! *Fill* (0 to 1) is the highest of three shares: space in use or queued of the medium's capacity; dirty bytes,
//! including those of locked ranges, of the configured limit; and bytes queued in memory of [`QUEUE_MAX`].
//!
//! Rules for writes:
//! - T1 Up to a fill of [`FREE_BELOW`], and while no other write is throttled, a write is admitted at once.
//! - T2 Above it, writes are admitted one by one, in order of arrival, each after a delay that rises smoothly with the
//!   fill: at [`EVEN_AT`] exactly as many bytes come in as the backend takes. Without a cliff.
//! - T3 The limit of dirty bytes is strict: no throttled write is admitted while it is reached.
//! - T4 A full log (fill 1) admits no throttled write, so that the queue in memory stays within its limit.
//! - T5 A log that acknowledges writes before they are durable checks T4 again when a write has waited for its range,
//!   before the write's own bytes count.
//! - T6 A full log in front of a full backend fails writes: at admission if they would be acknowledged before they are
//!   durable, otherwise when the append path finds no space for them ([`fails_queued`]).
//! - T7 A log that fails, is disabled or closed ends every wait here.
//!
//! Rules for write-back:
//! - T8 Entries are written back at once from a fill of [`EAGER_FILL`] on, when the append path is *starved* (no queued
//!   piece fits on the medium), or when a caller waits; otherwise at half their maximum age.
//! - T9 The number of requests in flight to the backend rises with the fill, to the configured maximum at
//!   [`FREE_BELOW`].
//!
//! Every change that can lower the fill or end a wait is signaled on `LogShared::settled` or `LogShared::room`.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{Instant, now, sleep};

use crate::log::LogShared;
use crate::options::DirtyLimits;
use crate::state::LogState;

/// Fill up to which writes are not throttled.
const FREE_BELOW: f64 = 0.5;
/// Fill at which incoming writes are throttled to exactly the write-back rate.
const EVEN_AT: f64 = 0.9;
/// Fill from which write-back does not wait for entries to reach their age.
const EAGER_FILL: f64 = 0.125;
/// Maximum payload bytes queued for the medium.
const QUEUE_MAX: u64 = 8 << 20;
/// Number of requests in flight to the backend without urgency, if that many are permitted.
const AT_ONCE_LEAST: usize = 8;
/// Share of the maximum age from which entries are written back at full speed.
const LATE_AT: f64 = 0.75;
/// Delays below this are carried over to the next write.
const WAIT_LEAST: Duration = Duration::from_millis(1);
/// Maximum delay of a single write.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// Maximum lateness of a write that does not postpone the next ones.
const LATE_MAX: Duration = Duration::from_millis(2);
/// Weight of a new sample in the moving average.
const NEWEST: f64 = 0.2;

/// State of the write throttle.
pub(crate) struct WriteThrottle {
    limits: Cell<DirtyLimits>,
    /// Serializes throttled writes, in order of arrival.
    admission: Semaphore,
    delay: RefCell<Delay>,
    /// Set while the append path waits for space.
    starved: Cell<bool>,
}

impl WriteThrottle {
    pub(crate) fn new(limits: DirtyLimits) -> Self {
        let (limits, starved) = (Cell::new(limits), Cell::new(false));
        Self { limits, admission: Semaphore::new(1), delay: RefCell::default(), starved }
    }

    /// Returns the limits of dirty data.
    pub(crate) fn limits(&self) -> DirtyLimits {
        self.limits.get()
    }

    /// Sets the limits of dirty data. To be signaled on `settled` and `write_back`.
    pub(crate) fn set_limits(&self, limits: DirtyLimits) {
        self.limits.set(limits);
    }

    fn dirty_max(&self) -> u64 {
        self.limits.get().bytes_max.unwrap_or(u64::MAX)
    }

    /// Records whether the append path waits for space.
    pub(crate) fn set_starved(&self, starved: bool) {
        self.starved.set(starved);
    }

    /// Returns whether the append path waits for space.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved.get()
    }

    /// Adds a sample of the write-back rate: the backend took `took` for `bytes` bytes.
    pub(crate) fn measured(&self, bytes: u64, took: Duration) {
        self.delay.borrow_mut().measured(bytes, took);
    }
}

/// Returns the fill of the log, 0 to 1.
fn fill(shared: &LogShared) -> f64 {
    let state = shared.state.borrow();
    let capacity = shared.medium.capacity().max(1) as f64;
    let used = (shared.medium.used() + state.queue.bytes()) as f64 / capacity;
    let dirty = (state.dirty.bytes() + shared.ranges.bytes()) as f64 / shared.throttle.dirty_max().max(1) as f64;
    let queue = state.queue.bytes() as f64 / QUEUE_MAX as f64;
    let fill = used.max(dirty).max(queue).min(1.0);
    debug_assert!((0.0..=1.0).contains(&fill), "fill {fill}");
    fill
}

/// Returns whether a write is admitted without a wait.
pub(crate) fn admits_at_once(shared: &LogShared) -> bool {
    shared.throttle.admission.available() > 0 && fill(shared) <= FREE_BELOW
}

/// Waits until a write of `bytes` bytes is admitted.
///
/// # Errors
/// [`ErrorKind::NoSpace`] if log and backend are full and the write would be acknowledged before it is durable on
/// either.
pub(crate) async fn admit(shared: &LogShared, bytes: u64) -> Result<()> {
    if admits_at_once(shared) {
        return Ok(());
    }
    let started = now();
    let turn = shared.throttle.admission.acquire(1).await;
    let level = fill(shared);
    let wait = shared.throttle.delay.borrow_mut().wait(bytes, level, now());
    if !wait.is_zero() {
        shared.write_back.notify_all();
        sleep(wait).await;
    }
    wait_for_dirty_limit(shared).await;
    if level >= 1.0 {
        wait_while_full(shared).await?;
    }
    drop(turn);
    shared.state.borrow_mut().counters.throttled(started.elapsed());
    Ok(())
}

/// Waits until the dirty bytes are within their limit; only a failed or ending log, or a full backend, ends the wait
/// earlier.
async fn wait_for_dirty_limit(shared: &LogShared) {
    let within = || {
        let state = shared.state.borrow();
        let dirty = state.dirty.bytes() + shared.ranges.bytes();
        dirty < shared.throttle.dirty_max() || full_backend(&state).is_some() || ends_waits(&state)
    };
    if !within() {
        shared.write_back.notify_all();
        shared.settled.wait_until(within).await;
    }
}

/// Waits while the log is full, whatever the measured rate: the queue in memory must not exceed its limit.
async fn wait_while_full(shared: &LogShared) -> Result<()> {
    shared.write_back.notify_all();
    loop {
        let (settled, room) = (shared.settled.wait(), shared.room.wait());
        if fill(shared) < 1.0 {
            return Ok(());
        }
        let full = {
            let state = shared.state.borrow();
            if ends_waits(&state) {
                return Ok(());
            }
            full_backend(&state).cloned()
        };
        match full {
            Some(error) if shared.is_write_back_ack() => return Err(error),
            // The append path reports the error.
            Some(_) => return Ok(()),
            None => either(settled, room).await,
        }
    }
}

/// Returns whether a write that has waited for its range must wait for admission again.
pub(crate) fn readmits(shared: &LogShared) -> bool {
    shared.is_write_back_ack() && fill(shared) >= 1.0 && shared.state.borrow().life.is_on()
}

/// Returns whether a write-back error fails the queued writes: no write-back will free space for them.
pub(crate) fn fails_queued(shared: &LogShared, error: &Error) -> bool {
    shared.throttle.is_starved() && !shared.is_write_back_ack() && error.kind() == ErrorKind::NoSpace
}

/// Returns whether the log no longer admits writes itself: waits for admission end.
fn ends_waits(state: &LogState) -> bool {
    state.life.is_ending() || !state.life.is_on()
}

/// Returns the last write-back error if the backend is full.
fn full_backend(state: &LogState) -> Option<&Error> {
    state.life.backend_error().filter(|error| error.kind() == ErrorKind::NoSpace)
}

/// Waits for either of two signals.
async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|cx| match one.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(()),
        Poll::Pending => other.as_mut().poll(cx),
    })
    .await;
}

/// Returns whether the fill is a reason to write back at once.
pub(crate) fn is_eager(shared: &LogShared) -> bool {
    fill(shared) >= EAGER_FILL
}

/// Returns how long the oldest entries may stay in the log; zero if they are to be written back now.
pub(crate) fn write_back_delay(shared: &LogShared, state: &LogState) -> Duration {
    if wants_all(shared, state) || is_eager(shared) {
        return Duration::ZERO;
    }
    (shared.throttle.limits().age_max / 2).saturating_sub(state.dirty.age())
}

/// Returns whether there is a reason other than fill and age to write everything back: a caller waits, or the log is
/// being disabled.
fn wants_all(shared: &LogShared, state: &LogState) -> bool {
    state.points.drain_target() > state.dirty.tail() || shared.throttle.is_starved() || !state.life.is_on()
}

/// Returns the maximum number of requests in flight to the backend: few without urgency, so that a batch does not
/// burst onto the backend and this core while hosts write; all of them when the log fills up, entries reach their age,
/// or a caller waits.
pub(crate) fn requests_max(shared: &LogShared) -> usize {
    let (parallel, fill) = (shared.options.parallel, fill(shared));
    let state = shared.state.borrow();
    let late = state.dirty.age() >= shared.throttle.limits().age_max.mul_f64(LATE_AT);
    if wants_all(shared, &state) || fill >= FREE_BELOW || late {
        return parallel;
    }
    let share = ((fill - EAGER_FILL) / (FREE_BELOW - EAGER_FILL)).max(0.0);
    let more = parallel.saturating_sub(AT_ONCE_LEAST) as f64 * share * share;
    parallel.min(AT_ONCE_LEAST + more as usize)
}

/// Delay of throttled writes.
#[derive(Debug, Default)]
struct Delay {
    /// Moving average of the backend's time per byte, in seconds.
    seconds_a_byte: f64,
    /// Earliest start of the next write.
    next: Instant,
}

impl Delay {
    /// Adds a sample: the backend took `took` for `bytes` bytes.
    fn measured(&mut self, bytes: u64, took: Duration) {
        let now = took.as_secs_f64() / bytes.max(1) as f64;
        let before = self.seconds_a_byte;
        self.seconds_a_byte = if before == 0.0 { now } else { before + NEWEST * (now - before) };
    }

    /// Returns the number of bytes that the backend completes for each admitted byte, at this fill (0 to 1).
    fn factor(fill: f64) -> f64 {
        let over = ((fill - FREE_BELOW) / (EVEN_AT - FREE_BELOW)).max(0.0);
        over * over
    }

    /// Returns the delay of a write of `bytes` bytes, and accounts for it as started.
    fn wait(&mut self, bytes: u64, fill: f64, now: Instant) -> Duration {
        let factor = Self::factor(fill);
        if factor == 0.0 || self.seconds_a_byte == 0.0 {
            self.next = now;
            return Duration::ZERO;
        }
        let step = Duration::from_secs_f64((self.seconds_a_byte * factor * bytes as f64).min(WAIT_MAX.as_secs_f64()));
        // Late wake-ups are compensated, or the timer granularity would determine the rate.
        let begin = if self.next + LATE_MAX < now { now } else { self.next };
        self.next = begin + step;
        let wait = begin.max(now) - now;
        // Short delays are accumulated: a sleep for each write would cost more than the write.
        if wait < WAIT_LEAST { Duration::ZERO } else { wait.min(WAIT_MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates writes at the throttled rate against a backend of `rate` bytes per second; returns the fill at which
    /// it settles, and the longest delay.
    fn settles_at(rate: f64, burst: u64) -> (f64, Duration) {
        let (capacity, mut used, mut now) = (16e6, 0.0, 0.0_f64);
        let mut delay = Delay::default();
        delay.measured(1 << 20, Duration::from_secs_f64((1 << 20) as f64 / rate));
        let mut longest = Duration::ZERO;
        for _ in 0..200_000 {
            let at = Instant::from_nanos((now * 1e9) as u64);
            let wait = delay.wait(burst, used / capacity, at).max(Duration::from_micros(10));
            longest = longest.max(wait);
            now += wait.as_secs_f64();
            used = (used + burst as f64 - wait.as_secs_f64() * rate).max(0.0);
            assert!(used < capacity, "it was not held back");
        }
        (used / capacity, longest)
    }

    #[test]
    fn writes_come_in_as_fast_as_they_go_out() {
        let (fill, longest) = settles_at(40e6, 4096);
        assert!((0.85..0.95).contains(&fill), "{fill}");
        // Not much longer than the backend takes for one write, or than the minimum delay.
        assert!(longest < WAIT_LEAST + Duration::from_micros(200), "{longest:?}");
    }

    #[test]
    fn the_wait_rises_with_the_fill_and_is_never_a_cliff() {
        let mut last = 0.0;
        for fill in 0..=100 {
            let factor = Delay::factor(f64::from(fill) / 100.0);
            assert!(factor >= last && factor - last < 0.1, "{fill} {factor} {last}");
            last = factor;
        }
        assert!(Delay::factor(0.5) == 0.0 && Delay::factor(0.9) > 0.999 && last > 1.2);
    }
}
