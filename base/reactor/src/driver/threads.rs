//! Thread pool for file operations that block.
//!
//! The epoll driver runs all its file operations here; the io_uring driver only discards on block devices.  An
//! operation moves to the thread with its buffers, so nothing is shared while it runs.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crossbeam_queue::SegQueue;

use super::iov::{self, IovPiece};
use super::os::{EventFd, RW_MAX, check, check_len};
use super::{Op, OpKey, Unpark, files};

/// Maximum threads; one more is started when there is work and all others are busy.
const THREADS_MAX: usize = 4;

/// File operation in transit to a thread, or back.
pub(crate) struct FileJob {
    pub(crate) key: OpKey,
    pub(crate) fd: RawFd,
    /// Unit of direct I/O in bytes; 1 when there is no restriction.
    pub(crate) direct_unit: u32,
    pub(crate) block_device: bool,
    pub(crate) op: Op,
    pub(crate) result: io::Result<u64>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<FileJob>,
    idle: usize,
    stop: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wanted: Condvar,
    done: SegQueue<FileJob>,
    /// Set once the driver was woken for `done`, until it looks.
    told: AtomicBool,
    wake: Arc<EventFd>,
}

/// File threads of one driver.
pub(crate) struct FileThreads {
    shared: Arc<Shared>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl FileThreads {
    /// Creates the pool without threads; `wake` wakes the driver when an operation has completed.
    pub(crate) fn new(wake: Arc<EventFd>) -> Self {
        let shared = Shared {
            queue: Mutex::default(),
            wanted: Condvar::new(),
            done: SegQueue::new(),
            told: AtomicBool::new(false),
            wake,
        };
        Self { shared: Arc::new(shared), threads: Vec::new() }
    }

    /// Queues a job; returns it with its error when no thread can be started.
    pub(crate) fn submit(&mut self, job: FileJob) -> Result<(), Box<FileJob>> {
        let more = {
            let mut queue = self.shared.lock();
            queue.jobs.push_back(job);
            queue.jobs.len() > queue.idle && self.threads.len() < THREADS_MAX
        };
        if more {
            let shared = self.shared.clone();
            let name = format!("forebay-file-{}", self.threads.len());
            match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
                Ok(thread) => self.threads.push(thread),
                // The existing threads run it later.
                Err(_) if !self.threads.is_empty() => {}
                Err(error) => {
                    let mut job = self.shared.lock().jobs.pop_back().expect("the job that was just queued");
                    job.result = Err(error);
                    return Err(Box::new(job));
                }
            }
        }
        self.shared.wanted.notify_one();
        Ok(())
    }

    /// Removes a queued job that no thread has begun.
    pub(crate) fn take_back(&mut self, key: OpKey) -> Option<FileJob> {
        let mut queue = self.shared.lock();
        let at = queue.jobs.iter().position(|job| job.key == key)?;
        queue.jobs.remove(at)
    }

    /// Returns the next completed job.
    pub(crate) fn next_done(&mut self) -> Option<FileJob> {
        if let Some(job) = self.shared.done.pop() {
            return Some(job);
        }
        // A thread that adds one from here on wakes the driver; one added before is found now.
        self.shared.told.store(false, Ordering::SeqCst);
        self.shared.done.pop()
    }

    /// Stops the threads.  Waits for running jobs, because they use the driver's buffers; returns completed jobs and
    /// those that were never begun.
    pub(crate) fn stop(&mut self) -> Vec<FileJob> {
        let mut jobs: Vec<FileJob> = {
            let mut queue = self.shared.lock();
            queue.stop = true;
            queue.jobs.drain(..).collect()
        };
        self.shared.wanted.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a file thread panicked");
            }
        }
        jobs.extend(std::iter::from_fn(|| self.shared.done.pop()));
        jobs
    }
}

impl Drop for FileThreads {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code panics under the lock.
        self.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn work(&self) {
        let _guard = AbortOnPanic;
        let mut queue = self.lock();
        loop {
            if queue.stop {
                return;
            }
            match queue.jobs.pop_front() {
                Some(mut job) => {
                    drop(queue);
                    job.result = run(&mut job);
                    self.done.push(job);
                    if !self.told.swap(true, Ordering::SeqCst) {
                        self.wake.unpark();
                    }
                    queue = self.lock();
                }
                None => {
                    queue.idle += 1;
                    queue = self.wanted.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
                    queue.idle -= 1;
                }
            }
        }
    }
}

/// Aborts the process when a file thread panics: its operation, and the task that waits for it, would otherwise never
/// complete.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Repeats a system call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Offset at which punching a hole never completes, like an operation on a disk that hangs.
#[cfg(test)]
pub(crate) const HANGS_AT: u64 = u64::MAX - 1;

/// Set once a thread has begun with such a hole.
#[cfg(test)]
pub(crate) static HANGS: AtomicBool = AtomicBool::new(false);

fn run(job: &mut FileJob) -> io::Result<u64> {
    let fd = job.fd;
    #[cfg(test)]
    if matches!(job.op, Op::Punch { offset: HANGS_AT, .. }) {
        HANGS.store(true, Ordering::SeqCst);
        loop {
            std::thread::park();
        }
    }
    match &mut job.op {
        Op::Read { offset, buf, .. } => {
            let mut at = *offset;
            loop {
                let to = buf.spare_mut();
                if to.is_empty() {
                    return Ok(at - *offset);
                }
                let len = to.len().min(RW_MAX);
                // SAFETY: `to` has space for `len` bytes and is borrowed uniquely.
                let got = retry(|| check_len(unsafe { libc::pread(fd, to.as_mut_ptr().cast(), len, at as i64) }))?;
                buf.set_len(buf.len() + got);
                at += got as u64;
                // A direct read that ends at the end of the file has an unaligned length; continuing would be refused.
                if got == 0 || !at.is_multiple_of(u64::from(job.direct_unit)) {
                    return Ok(at - *offset);
                }
            }
        }
        Op::Write { offset, bufs, durable, .. } => {
            let mut iovecs = Vec::new();
            let mut done = 0;
            while done < bufs.len() {
                let at = (*offset + done as u64) as i64;
                let iovecs = match iov::remaining(bufs, done, &mut iovecs) {
                    IovPiece::One(..) | IovPiece::Many => &iovecs,
                };
                let put = retry(|| write(fd, iovecs, at, *durable))?;
                if put == 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::WriteZero,
                        "the kernel accepts no more bytes of a write",
                    ));
                }
                done += put;
            }
            Ok(done as u64)
        }
        // SAFETY: no pointers.
        Op::Sync { .. } => retry(|| check(unsafe { libc::fdatasync(fd) })).map(|_| 0),
        Op::Punch { offset, len, .. } => {
            let (offset, len) = (*offset, *len);
            // SAFETY: no pointers.
            let punch = || check(unsafe { libc::fallocate(fd, files::PUNCH_MODE, offset as i64, len as i64) });
            match retry(punch) {
                Err(error) if job.block_device && error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    retry(|| files::discard(fd, offset, len)).map(|()| 0)
                }
                other => other.map(|_| 0),
            }
        }
        Op::Allocate { offset, len, .. } => {
            let (offset, len) = (*offset as i64, *len as i64);
            // SAFETY: no pointers.
            retry(|| check(unsafe { libc::fallocate(fd, files::ALLOCATE_MODE, offset, len) })).map(|_| 0)
        }
        other => unreachable!("no file operation: {other:?}"),
    }
}

fn write(fd: RawFd, iovecs: &[libc::iovec], at: i64, durable: bool) -> io::Result<usize> {
    let (ptr, count) = (iovecs.as_ptr(), iovecs.len() as libc::c_int);
    if !durable {
        // SAFETY: the parts are memory that the job keeps alive.
        return check_len(unsafe { libc::pwritev(fd, ptr, count, at) });
    }
    // SAFETY: as above.
    match check_len(unsafe { libc::pwritev2(fd, ptr, count, at, libc::RWF_DSYNC) }) {
        // Sandboxes may lack the flag or the call.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
            // SAFETY: as above.
            let put = check_len(unsafe { libc::pwritev(fd, ptr, count, at) })?;
            // SAFETY: no pointers.
            check(unsafe { libc::fdatasync(fd) })?;
            Ok(put)
        }
        other => other,
    }
}
