//! Write throttle: no delay until the log is half full, then an increasing one, so that incoming writes match the
//! write-back rate before the log is full. Without a cliff.

use std::time::Duration;

use forebay_reactor::Instant;

/// Fill below which writes are not throttled.
pub(crate) const FREE_BELOW: f64 = 0.5;
/// Fill at which incoming writes are throttled to exactly the write-back rate.
const EVEN_AT: f64 = 0.9;
/// Delays below this are carried over to the next write.
const WAIT_LEAST: Duration = Duration::from_millis(1);
/// Maximum delay of a single write.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// Maximum lateness of a write that does not postpone the next ones.
const LATE_MAX: Duration = Duration::from_millis(2);
/// Weight of a new sample in the moving average.
const NEWEST: f64 = 0.2;

/// Write throttle.
#[derive(Debug, Default)]
pub(crate) struct Pressure {
    /// Moving average of the backend's time per byte, in seconds.
    seconds_a_byte: f64,
    /// Earliest start of the next write.
    next: Instant,
}

impl Pressure {
    /// Adds a sample: the backend took `took` for `bytes` bytes.
    pub(crate) fn measured(&mut self, bytes: u64, took: Duration) {
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
    pub(crate) fn wait(&mut self, bytes: u64, fill: f64, now: Instant) -> Duration {
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
        let mut pressure = Pressure::default();
        pressure.measured(1 << 20, Duration::from_secs_f64((1 << 20) as f64 / rate));
        let mut longest = Duration::ZERO;
        for _ in 0..200_000 {
            let at = Instant::from_nanos((now * 1e9) as u64);
            let wait = pressure.wait(burst, used / capacity, at).max(Duration::from_micros(10));
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
            let factor = Pressure::factor(f64::from(fill) / 100.0);
            assert!(factor >= last && factor - last < 0.1, "{fill} {factor} {last}");
            last = factor;
        }
        assert!(Pressure::factor(0.5) == 0.0 && Pressure::factor(0.9) > 0.999 && last > 1.2);
    }
}
