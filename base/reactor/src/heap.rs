//! Return of freed heap memory to the system.
//!
//! Memory freed by thousands of connections is interspersed with live allocations, so the C library's allocator does
//! not return it by itself.  Trimming takes the locks of its arenas, for tens of milliseconds after ten thousand
//! connections.  So a thread of its own trims: after many connections have closed, once no more of them close and the
//! process is nearly idle, and at a limited rate.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Closed connections from which a trim is worthwhile.
const CLOSED_MIN: usize = 64;
/// Interval that must pass without further closes and nearly idle before a trim.
const SETTLED_AFTER: Duration = Duration::from_millis(250);
/// Maximum CPU time of the process in that interval.
const IDLE_MAX: Duration = Duration::from_millis(10);
/// Maximum wait for such an interval.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// Minimum time between two trims.
const INTERVAL: Duration = Duration::from_secs(10);

struct Trimmer {
    /// Connections closed since the last trim.
    closed: AtomicUsize,
    thread: Thread,
}

static TRIMMER: OnceLock<Trimmer> = OnceLock::new();

/// Starts the thread that trims the heap after connections have closed; once per process.
///
/// # Errors
/// When no thread can be started.
pub fn start_trimmer() -> io::Result<()> {
    if TRIMMER.get().is_some() {
        return Ok(());
    }
    let thread = thread::Builder::new().name("trim".into()).stack_size(64 << 10).spawn(|| {
        loop {
            let Some(trimmer) = TRIMMER.get() else {
                thread::park();
                continue;
            };
            trimmer.wait();
            let began = Instant::now();
            let released = trim();
            tracing::debug!(released, elapsed = ?began.elapsed(), "trimmed the heap after connections had closed");
            thread::sleep(INTERVAL);
        }
    })?;
    let thread = thread.thread().clone();
    TRIMMER.get_or_init(|| Trimmer { closed: AtomicUsize::new(0), thread }).thread.unpark();
    Ok(())
}

/// Counts a closed connection whose memory was freed.  Costs an atomic addition.
pub fn connection_closed() {
    if let Some(trimmer) = TRIMMER.get()
        && trimmer.closed.fetch_add(1, Ordering::Relaxed) + 1 == CLOSED_MIN
    {
        trimmer.thread.unpark();
    }
}

impl Trimmer {
    /// Blocks until many connections have closed, and no more do or `SETTLE_MAX` has passed.
    fn wait(&self) {
        while self.closed.load(Ordering::Relaxed) < CLOSED_MIN {
            thread::park();
        }
        let began = Instant::now();
        while began.elapsed() < SETTLE_MAX {
            let (closed, used) = (self.closed.load(Ordering::Relaxed), processor_time());
            thread::sleep(SETTLED_AFTER);
            let is_idle = processor_time().saturating_sub(used) <= IDLE_MAX;
            if is_idle && self.closed.load(Ordering::Relaxed) == closed {
                break;
            }
        }
        self.closed.store(0, Ordering::Relaxed);
    }
}

/// Returns the CPU time that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that lives through the call.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    if done == 0 { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) } else { Duration::ZERO }
}

/// Returns free whole pages of the heap to the system; returns whether there were any.  Allocations by other threads
/// may block for some milliseconds meanwhile.
pub fn trim() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: takes no pointers, and may be called by any thread at any time.
        unsafe { libc::malloc_trim(0) == 1 }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    false
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    /// Returns the resident bytes of this process.
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
        statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
    }

    #[test]
    fn what_lies_between_what_lives_is_given_back() {
        const PIECES: usize = 32 << 10;
        let mut pieces: Vec<Option<Box<[u8]>>> = (0..PIECES).map(|_| Some(vec![1; 4096].into_boxed_slice())).collect();
        let with = resident();
        // One in 16 stays, the last one too: there is no free end to trim.
        pieces.iter_mut().enumerate().filter(|(at, _)| at % 16 != 15).for_each(|(_, piece)| drop(piece.take()));
        assert!(trim());
        let after = resident();
        assert!(after + PIECES * 4096 / 2 < with, "{after} bytes of {with}");
        assert!(pieces.iter().flatten().all(|piece| piece.iter().all(|&byte| byte == 1)));
    }
}
