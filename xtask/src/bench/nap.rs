//! Wake-up latency of a thread of this machine while something else is measured: whatever serves a request is woken
//! several times for it, and waits as long each time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Sleep of the thread: 2,000 wake-ups per second, the write rate of the benchmark's first job.
pub const NAP: Duration = Duration::from_micros(500);

/// Does the work, and says how late a thread that only slept meanwhile was woken: the 99.99th percentile in
/// microseconds.
pub fn beside<T>(work: impl FnOnce() -> T) -> Result<(T, f64)> {
    let stop = AtomicBool::new(false);
    let (done, late) = thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut late = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let begin = Instant::now();
                thread::sleep(NAP);
                late.push(begin.elapsed().saturating_sub(NAP));
            }
            late
        });
        let done = work();
        stop.store(true, Ordering::Relaxed);
        (done, sleeper.join())
    });
    let Ok(mut late) = late else { bail!("the thread that sleeps died") };
    late.sort_unstable();
    let worse = late.len() / 10_000;
    let late = late.iter().rev().nth(worse).context("nobody slept while the work was done")?;
    Ok((done, late.as_secs_f64() * 1e6))
}
