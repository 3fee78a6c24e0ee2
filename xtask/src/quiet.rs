//! Quiet time: wall-clock time divided by how much longer a bare thread takes than on a quiet machine.
//!
//! Limits of tests are in quiet time.  On a quiet machine it passes as any clock does; on one whose processors are
//! taken by others for 80 % of the time it passes five times more slowly, so that a limit of 10 s still allows what
//! takes 10 s of a quiet machine.  A bare thread measures it: every [`PERIOD`] it wakes up, does a fixed piece of
//! work, and compares how long both took with the fastest run of that work so far (docs/design/test-runs.md).

use std::collections::VecDeque;
use std::hint::black_box;
use std::io::{Seek, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Time between two samples.
const PERIOD: Duration = Duration::from_millis(400);
/// Work of a sample, on a quiet machine: longer than the scheduler's time slice, so that it meets other tasks that
/// want to run, and 1 % of the period.
const WORK: Duration = Duration::from_millis(4);
/// Samples that a slowdown is averaged over.
const WINDOW: usize = 10;
/// Names the file that a running clock writes milliseconds of quiet time to, for scripts (test/lab/limits.sh).
pub const FILE_VARIABLE: &str = "FOREBAY_QUIET_CLOCK";

/// Slowdown of the machine from samples of a bare thread.
struct Meter {
    /// The fastest run of the work.
    fastest: Duration,
    /// Wake-up latency plus time of the work, the newest last.
    samples: VecDeque<Duration>,
}

impl Meter {
    fn new(fastest: Duration) -> Self {
        Self { fastest: fastest.max(Duration::from_nanos(1)), samples: VecDeque::new() }
    }

    /// Takes a sample: how late the thread was woken, and how long its work took.  Returns the slowdown, at least 1.
    fn sample(&mut self, late: Duration, work: Duration) -> f64 {
        self.fastest = self.fastest.min(work.max(Duration::from_nanos(1)));
        if self.samples.len() == WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(late + work);
        let taken: Duration = self.samples.iter().sum();
        (taken.as_secs_f64() / (self.fastest.as_secs_f64() * self.samples.len() as f64)).max(1.0)
    }
}

/// Quiet time and slowdown as of the last sample.
#[derive(Clone, Copy)]
struct Reading {
    quiet: Duration,
    at: Instant,
    slowdown: f64,
}

impl Reading {
    /// Quiet time at `now`.  Between two samples it goes on at the last slowdown, but not for longer than two periods:
    /// a clock that is not even woken does not know how slow the machine is.
    fn quiet_at(&self, now: Instant) -> Duration {
        self.quiet + now.saturating_duration_since(self.at).min(2 * PERIOD).div_f64(self.slowdown)
    }

    /// The reading of a sample taken at `now`.
    fn advanced(&self, now: Instant, slowdown: f64) -> Self {
        // Never back: what was shown between the samples may have gone at a smaller slowdown.
        let shown = self.quiet_at(now);
        let due = self.quiet + now.saturating_duration_since(self.at).div_f64(slowdown);
        Self { quiet: shown.max(due), at: now, slowdown }
    }
}

/// The clock of this process, started with its first use.
fn clock() -> MutexGuard<'static, Reading> {
    static CLOCK: OnceLock<Mutex<Reading>> = OnceLock::new();
    let clock = CLOCK.get_or_init(|| {
        thread::spawn(tick);
        Mutex::new(Reading { quiet: Duration::ZERO, at: Instant::now(), slowdown: 1.0 })
    });
    clock.lock().expect("nothing panics with the clock's lock")
}

/// The bare thread.
fn tick() {
    let rounds = rounds_of(WORK);
    let mut meter = Meter::new((0..5).map(|_| timed(rounds)).min().unwrap_or(WORK));
    loop {
        let due = Instant::now() + PERIOD;
        thread::sleep(PERIOD);
        let late = due.elapsed();
        let slowdown = meter.sample(late, timed(rounds));
        let mut reading = clock();
        *reading = reading.advanced(Instant::now(), slowdown);
    }
}

/// Rounds of [`work`] that take as long as `time` where nothing disturbs them.
fn rounds_of(time: Duration) -> u64 {
    const PROBE: u64 = 1 << 14;
    let fastest = (0..50).map(|_| timed(PROBE)).min().unwrap_or(time).max(Duration::from_nanos(1));
    (PROBE as f64 * time.as_secs_f64() / fastest.as_secs_f64()).max(1.0) as u64
}

fn timed(rounds: u64) -> Duration {
    let begin = Instant::now();
    black_box(work(rounds));
    begin.elapsed()
}

/// A chain of dependent multiplications: bound by the processor alone, the same each time.
fn work(rounds: u64) -> u64 {
    let mut value = black_box(1u64);
    let mut left = rounds;
    while left > 0 {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        left -= 1;
    }
    value
}

/// A stretch of time, in wall-clock and in quiet time.
#[derive(Clone, Copy)]
pub struct Stopwatch {
    begin: Instant,
    quiet: Duration,
}

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        let begin = Instant::now();
        Self { begin, quiet: clock().quiet_at(begin) }
    }

    /// Returns the wall-clock time since the start.
    pub fn wall(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Returns the quiet time since the start: at most the wall-clock time.
    pub fn quiet(&self) -> Duration {
        let now = Instant::now();
        clock().quiet_at(now).saturating_sub(self.quiet).min(now - self.begin)
    }

    /// Returns how many times longer everything took since the start than on a quiet machine: at least 1.
    pub fn slowdown(&self) -> f64 {
        let (wall, quiet) = (self.wall().as_secs_f64(), self.quiet().as_secs_f64());
        (wall / quiet.max(1e-3)).max(1.0)
    }
}

/// Sleeps for `time` of quiet time: what another process needs so long for on a quiet machine, it has done.
pub fn sleep(time: Duration) {
    let watch = Stopwatch::start();
    while watch.quiet() < time {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Writes the clock to `file` each period from now on, in milliseconds on a line, as long as the process lives.
pub fn publish(file: &Path) -> Result<()> {
    let mut to = std::fs::File::create(file).with_context(|| format!("cannot create {}", file.display()))?;
    let watch = Stopwatch::start();
    write_reading(&mut to, &watch)?;
    thread::spawn(move || {
        loop {
            thread::sleep(PERIOD);
            // Readers then see the clock stopped, and wait longer.
            let _ = write_reading(&mut to, &watch);
        }
    });
    Ok(())
}

fn write_reading(file: &mut std::fs::File, watch: &Stopwatch) -> std::io::Result<()> {
    file.rewind()?;
    // Always as long, in one write: a reader sees the one or the other.
    file.write_all(format!("{:012}\n", watch.quiet().as_millis()).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_quiet_machine_has_no_slowdown_and_a_busy_one_has_its_share() {
        let mut meter = Meter::new(4 * MS);
        assert_eq!(meter.sample(Duration::ZERO, 4 * MS), 1.0);
        for _ in 0..WINDOW {
            meter.sample(10 * MS, 10 * MS);
        }
        assert_eq!(meter.sample(10 * MS, 10 * MS), 5.0, "late by 10 ms, and 10 ms for 4 ms of work");
        for _ in 0..WINDOW {
            meter.sample(Duration::ZERO, 4 * MS);
        }
        assert_eq!(meter.sample(Duration::ZERO, 4 * MS), 1.0, "what is over is forgotten");
    }

    #[test]
    fn a_calibration_on_a_busy_machine_is_mended_by_a_fast_sample() {
        let mut meter = Meter::new(20 * MS);
        assert_eq!(meter.sample(Duration::ZERO, 20 * MS), 1.0);
        assert_eq!(meter.sample(Duration::ZERO, 4 * MS), 3.0, "24 ms for twice 4");
    }

    #[test]
    fn quiet_time_goes_on_between_samples_and_never_back() {
        let begin = Instant::now();
        let first = Reading { quiet: Duration::ZERO, at: begin, slowdown: 2.0 };
        assert_eq!(first.quiet_at(begin + 400 * MS), 200 * MS);
        assert_eq!(first.quiet_at(begin + 100 * PERIOD), PERIOD, "a clock that is not woken stands still");
        let slower = first.advanced(begin + 400 * MS, 8.0);
        assert_eq!(slower.quiet_at(begin + 400 * MS), 200 * MS, "what was shown is kept");
        assert_eq!(slower.quiet_at(begin + 800 * MS), 250 * MS);
        let starved = first.advanced(begin + 4000 * MS, 4.0);
        assert_eq!(starved.quiet_at(begin + 4000 * MS), 1000 * MS, "time without a sample counts at the next one");
    }

    #[test]
    fn a_stopwatch_shows_no_more_than_has_passed() {
        let watch = Stopwatch::start();
        thread::sleep(3 * PERIOD);
        let (quiet, wall) = (watch.quiet(), watch.wall());
        assert!(quiet > Duration::ZERO && quiet <= wall, "{quiet:?} of {wall:?}");
        assert!(watch.slowdown() >= 1.0);
    }

    #[test]
    fn the_file_holds_a_number_that_grows() {
        let folder = crate::shell::Scratch::new("clock").expect("a folder");
        let file = folder.path().join("clock");
        publish(&file).expect("a clock");
        let read = || std::fs::read_to_string(&file).expect("the clock").trim().parse::<u64>().expect("a number");
        let first = read();
        crate::shell::wait_for(Duration::from_secs(60), || (read() > first).then_some(())).expect("it goes on");
    }
}
