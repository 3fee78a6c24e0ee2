//! Software engine: worker threads beside the reactors, fed by one bounded queue.
//!
//! Submitting costs a push onto a queue without locks.  Only a submitter that finds threads asleep pays for a system
//! call, and wakes one; a woken thread that finds more work than its own wakes the next.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use crossbeam_queue::ArrayQueue;

use super::inline::run_here;
use super::worker::Worker;
use super::{CompressionEngine, CompressionJob, CompressionWork, Full, JobCompletion, JobTicket, ticket};
use crate::compress::Codec;

/// Polls of an empty queue before a thread goes to sleep: some microseconds, about the cost of a wake-up.
const LOOKS_BEFORE_SLEEP: usize = 200;

/// Options of a worker pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolOptions {
    /// Threads; at least one.
    pub workers: usize,
    /// Jobs that may wait; at least one.
    pub depth: usize,
    /// Jobs of at most this many bytes of input, of a codec that is quick, are done by the submitter at once: that
    /// takes it no longer than having it done.  Zero means none.
    pub inline_bytes_max: usize,
    /// Prefix of the thread names, followed by a dash and a number.
    pub name: String,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { workers: 1, depth: 256, inline_bytes_max: 1024, name: "accel".into() }
    }
}

/// Threads that compress.
///
/// Dropping it waits until the jobs it holds are done.
pub struct CompressionPool {
    shared: Arc<Shared>,
    inline_bytes_max: usize,
    threads: Vec<thread::JoinHandle<()>>,
}

struct Queued {
    job: CompressionJob,
    completion: JobCompletion,
}

struct Shared {
    queue: ArrayQueue<Queued>,
    stop: AtomicBool,
    /// Threads that sleep or are about to; changed under the lock only.
    asleep: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
    /// Flag and wakers of tasks that wait for space in the queue.
    waiting: AtomicBool,
    waiters: Mutex<Vec<Waker>>,
}

impl CompressionPool {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn new(options: &PoolOptions) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: ArrayQueue::new(options.depth.max(1)),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
            waiting: AtomicBool::new(false),
            waiters: Mutex::new(Vec::new()),
        });
        // On an error the threads that did start are ended by the drop of this.
        let mut pool = Self { shared, inline_bytes_max: options.inline_bytes_max, threads: Vec::new() };
        for number in 0..options.workers.max(1) {
            let shared = pool.shared.clone();
            let name = format!("{}-{number}", options.name);
            pool.threads.push(thread::Builder::new().name(name).spawn(move || shared.serve())?);
        }
        Ok(pool)
    }

    fn is_small(&self, job: &CompressionJob) -> bool {
        let quick = match job.work {
            CompressionWork::Compress { codec: Codec::Deflate { level, .. }, .. } => level.get() == 1,
            CompressionWork::Compress { codec: Codec::Zstd { level }, .. } => level <= 1,
            CompressionWork::Compress { codec: Codec::Lz4, .. } | CompressionWork::Decompress { .. } => true,
        };
        quick && self.inline_bytes_max > 0 && job.input.total().max(job.output.total() / 2) <= self.inline_bytes_max
    }
}

impl CompressionEngine for CompressionPool {
    fn name(&self) -> &str {
        "software"
    }

    fn depth(&self) -> usize {
        self.shared.queue.capacity()
    }

    fn submit(&self, job: CompressionJob) -> Result<JobTicket, Full> {
        if self.is_small(&job) {
            return Ok(run_here(job));
        }
        let (completion, ticket) = ticket();
        if let Err(queued) = self.shared.queue.push(Queued { job, completion }) {
            return Err(Full(queued.job));
        }
        self.shared.wake_one();
        Ok(ticket)
    }

    fn submit_batch(&self, jobs: &mut VecDeque<CompressionJob>, tickets: &mut Vec<JobTicket>) {
        let mut queued_any = false;
        while let Some(job) = jobs.pop_front() {
            if self.is_small(&job) {
                tickets.push(run_here(job));
                continue;
            }
            let (completion, ticket) = ticket();
            if let Err(queued) = self.shared.queue.push(Queued { job, completion }) {
                jobs.push_front(queued.job);
                break;
            }
            tickets.push(ticket);
            queued_any = true;
        }
        if queued_any {
            self.shared.wake_one();
        }
    }

    fn poll_room(&self, context: &mut Context<'_>) -> Poll<()> {
        let shared = &self.shared;
        if !shared.queue.is_full() {
            return Poll::Ready(());
        }
        let mut waiters = lock(&shared.waiters);
        if !waiters.iter().any(|waker| waker.will_wake(context.waker())) {
            waiters.push(context.waker().clone());
        }
        shared.waiting.store(true, Ordering::SeqCst);
        drop(waiters);
        fence(Ordering::SeqCst);
        // A thread may have freed a slot before it could see the waiting task.
        if shared.queue.is_full() { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for CompressionPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.bed));
        self.shared.bell.notify_all();
        for thread in self.threads.drain(..) {
            // A panicked thread has reported its panic, and its ticket has failed the waiting task.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Runs a worker thread.
    fn serve(&self) {
        let mut worker = Worker::default();
        while let Some(Queued { job, completion }) = self.next() {
            if self.waiting.swap(false, Ordering::SeqCst) {
                std::mem::take(&mut *lock(&self.waiters)).into_iter().for_each(Waker::wake);
            }
            completion.complete(worker.run(job));
        }
    }

    /// Returns the next job, or `None` at shutdown.
    fn next(&self) -> Option<Queued> {
        loop {
            for _ in 0..LOOKS_BEFORE_SLEEP {
                if let Some(queued) = self.queue.pop() {
                    if !self.queue.is_empty() {
                        self.wake_one();
                    }
                    return Some(queued);
                }
                std::hint::spin_loop();
            }
            let mut bed = lock(&self.bed);
            self.asleep.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // A submitter checks `asleep` after its push, so that one of the two sees the other.
            while self.queue.is_empty() && !self.stop.load(Ordering::SeqCst) {
                bed = self.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
            }
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            drop(bed);
            if self.queue.is_empty() && self.stop.load(Ordering::SeqCst) {
                return None;
            }
        }
    }

    /// Wakes a thread, if one sleeps.
    fn wake_one(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            // With the lock the sleeper has either not looked at the queue yet, or waits for the bell.
            drop(lock(&self.bed));
            self.bell.notify_one();
        }
    }
}

/// Locks a mutex, ignoring poisoning: the guarded values are consistent after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
