//! How long a write waits because the log is getting full: not at all until it is half full, then ever longer, so that
//! writes come in as fast as they can go out before there is no room left.  Never a cliff.

use std::time::Duration;

use forebay_reactor::Instant;

/// Below this fill nobody waits.
pub(crate) const FREE_BELOW: f64 = 0.5;
/// At this fill writes come in exactly as fast as they go out.
const EVEN_AT: f64 = 0.9;
/// Who would have to wait for less than this goes at once, and whoever is next waits for both.
const WAIT_LEAST: Duration = Duration::from_millis(1);
/// Longest wait of a single write.
const WAIT_MAX: Duration = Duration::from_millis(500);
/// A write that begins later than it might, by no more than this, does not put off the next ones.
const LATE_MAX: Duration = Duration::from_millis(2);
/// How much a new measurement counts.
const NEWEST: f64 = 0.2;

/// Paces writes.
#[derive(Debug, Default)]
pub(crate) struct Pressure {
    /// Seconds that the backend takes for a byte, on average.
    seconds_a_byte: f64,
    /// When the next write may begin.
    next: Instant,
}

impl Pressure {
    /// The backend took so long for so many bytes.
    pub(crate) fn measured(&mut self, bytes: u64, took: Duration) {
        let now = took.as_secs_f64() / bytes.max(1) as f64;
        let before = self.seconds_a_byte;
        self.seconds_a_byte = if before == 0.0 { now } else { before + NEWEST * (now - before) };
    }

    /// How many of a backend's bytes go by for each byte of a write, at this fill (0 to 1).
    fn factor(fill: f64) -> f64 {
        let over = ((fill - FREE_BELOW) / (EVEN_AT - FREE_BELOW)).max(0.0);
        over * over
    }

    /// How long a write of so many bytes has to wait; it counts as begun.
    pub(crate) fn wait(&mut self, bytes: u64, fill: f64, now: Instant) -> Duration {
        let factor = Self::factor(fill);
        if factor == 0.0 || self.seconds_a_byte == 0.0 {
            self.next = now;
            return Duration::ZERO;
        }
        let step = Duration::from_secs_f64((self.seconds_a_byte * factor * bytes as f64).min(WAIT_MAX.as_secs_f64()));
        // Who was woken late is made up for, or the clock's steps would set the pace.
        let begin = if self.next + LATE_MAX < now { now } else { self.next };
        self.next = begin + step;
        let wait = begin.max(now) - now;
        // Short waits are put together: one for each write would cost more than the write.
        if wait < WAIT_LEAST { Duration::ZERO } else { wait.min(WAIT_MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes as fast as they are let in, against a backend of `rate` bytes a second; the fill where it settles.
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
        // Never much longer than the backend takes for one write, or than it is worth waiting for.
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
