//! Clock and timers of a reactor: real, or the simulator's.

use std::fmt;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::executor::{ReactorState, try_with_current, with_current};

/// Point in monotonic time, in nanoseconds since the driver's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// Creates an instant from nanoseconds since the driver's start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns nanoseconds since the driver's start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time from `earlier` to this instant; zero if `earlier` is later.
    pub fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time from this instant to now.
    pub fn elapsed(self) -> Duration {
        now().since(self)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, rhs: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, rhs: Instant) -> Duration {
        self.since(rhs)
    }
}

/// Returns the current time of this reactor's monotonic clock.
pub fn now() -> Instant {
    with_current(|reactor| reactor.now())
}

/// Returns the current time like [`now`]; `None` when no reactor runs on this thread, as may be in `Drop`.
pub fn try_now() -> Option<Instant> {
    try_with_current(|reactor| reactor.now())
}

/// Returns the time since 1970-01-01T00:00:00Z, by this reactor's clock.
pub fn wall_clock() -> Duration {
    with_current(|reactor| reactor.wall_clock())
}

/// Returns a random number, from the system or from the simulation's seed.
pub fn random() -> u64 {
    with_current(|reactor| reactor.random())
}

/// Waits for `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(now() + duration)
}

/// Waits until `deadline`.
///
/// # Panics
/// When no reactor runs on this thread.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, reactor: with_current(Rc::clone), timer: None }
}

/// Future of [`sleep`] and [`sleep_until`].
pub struct Sleep {
    deadline: Instant,
    reactor: Rc<ReactorState>,
    timer: Option<u64>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.reactor.now() >= self.deadline {
            return Poll::Ready(());
        }
        let id = self.timer.unwrap_or_else(|| self.reactor.new_timer());
        self.timer = Some(id);
        self.reactor.arm_timer(self.deadline, id, cx.waker());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(id) = self.timer {
            self.reactor.disarm_timer(self.deadline, id);
        }
    }
}

/// Error of [`timeout`]: the time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedOut;

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for TimedOut {}

/// Runs `future` for at most `duration`.
///
/// # Errors
/// [`TimedOut`] when it has not ended by then.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, TimedOut> {
    let mut future = std::pin::pin!(future);
    let mut timer = std::pin::pin!(sleep(duration));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        timer.as_mut().poll(cx).map(|()| Err(TimedOut))
    })
    .await
}
