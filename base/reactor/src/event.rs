//! Eventfds that another process has handed over, and may change at any time.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use crate::driver::os::{self, check, check_len};
use crate::net::PolledFd;
use crate::ops::OpFuture;

/// Position that stands for a file's own, which an eventfd does not have.
const NO_POSITION: libc::off_t = -1;

/// Checks that a descriptor is an eventfd, and sets it to nonblocking.
///
/// The mode is shared with the other process, which may change it back; so nothing here relies on it where the system
/// has another way.
fn adopt(fd: BorrowedFd<'_>) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let name = std::fs::read_link(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {path}: {error}")))?;
    if name.as_os_str() != "anon_inode:[eventfd]" {
        let text = format!("the descriptor is no eventfd but {}", name.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    os::set_nonblocking(fd.as_raw_fd(), true)
}

/// Returns whether this error says that the system, or a sandbox, does not support a call with a flag.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM | libc::EINVAL))
}

/// Write side of an eventfd.
#[derive(Debug)]
pub struct EventSignal {
    fd: OwnedFd,
}

impl EventSignal {
    /// Adopts an eventfd.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is no eventfd; errors of the system.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        adopt(fd.as_fd())?;
        Ok(Self { fd })
    }

    /// Creates an eventfd; returns its write side, and a descriptor for the other side.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        // SAFETY: no pointers; the descriptor is new and owned here.
        let fd = unsafe { OwnedFd::from_raw_fd(check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?) };
        let other = fd.try_clone()?;
        Ok((Self { fd }, other))
    }

    /// Adds 1 to the counter; never waits.  A full counter stays as it is: its reader is signalled already.
    pub fn signal(&self) {
        /// True once the system was found not to write to eventfds with `RWF_NOWAIT` (no kernel up to 6.18 does).
        static NO_NOWAIT: AtomicBool = AtomicBool::new(false);
        let fd = self.fd.as_raw_fd();
        let mut one = 1u64;
        let part = libc::iovec { iov_base: (&raw mut one).cast(), iov_len: size_of_val(&one) };
        if !NO_NOWAIT.load(Ordering::Relaxed) {
            // SAFETY: one part of eight bytes; all of it lives through the call.
            match check_len(unsafe { libc::pwritev2(fd, &raw const part, 1, NO_POSITION, libc::RWF_NOWAIT) }) {
                Err(error) if is_unsupported(&error) => NO_NOWAIT.store(true, Ordering::Relaxed),
                // The other error is a full counter.
                _ => return,
            }
        }
        // Where the other process has made the eventfd blocking, a write waits while the counter is full.  Only a
        // process that fills it between these two calls could make it wait.
        if os::is_ready(fd, true).unwrap_or(true) {
            // SAFETY: eight bytes from eight bytes.
            unsafe { libc::write(fd, part.iov_base, part.iov_len) };
        }
    }
}

/// Read side of an eventfd, for one core.
pub struct EventWatch {
    /// Operation of a [`ready`](Self::ready) that was dropped, which the next one continues.  It is before the
    /// descriptor, so that it is dropped first.
    armed: Cell<Option<OpFuture>>,
    polled: PolledFd,
}

impl EventWatch {
    /// Adopts an eventfd for this core.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is no eventfd; `Unsupported` in simulation; errors of the system.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        adopt(fd.as_fd())?;
        Ok(Self { armed: Cell::new(None), polled: PolledFd::adopt(fd)? })
    }

    /// Takes the counter (1 of it, from a semaphore); returns false if it was zero.  Never waits.
    pub fn take(&self) -> bool {
        self.polled.with_descriptor(take_count).unwrap_or(false)
    }

    /// Waits until the counter is not zero, without taking it.  The future may be dropped at any time: what it has set
    /// up waits for the next call, so that dropping and calling again costs no system call.
    ///
    /// # Errors
    /// Errors of the system.
    pub async fn ready(&self) -> io::Result<()> {
        EventReady { watch: self, op: None, earlier: false }.await
    }

    fn is_ready(&self) -> bool {
        // After an error, `take` decides.
        self.polled.with_descriptor(|fd| os::is_ready(fd.as_raw_fd(), false)).flatten().unwrap_or(true)
    }
}

impl fmt::Debug for EventWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventWatch").finish_non_exhaustive()
    }
}

fn take_count(fd: BorrowedFd<'_>) -> bool {
    /// True once the system was found not to read from eventfds with `RWF_NOWAIT`.
    static NO_NOWAIT: AtomicBool = AtomicBool::new(false);
    let mut count = 0u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: size_of_val(&count) };
    let fd = fd.as_raw_fd();
    if !NO_NOWAIT.load(Ordering::Relaxed) {
        // SAFETY: one part of eight bytes; all of it lives through the call.
        match check_len(unsafe { libc::preadv2(fd, &raw const part, 1, NO_POSITION, libc::RWF_NOWAIT) }) {
            Err(error) if is_unsupported(&error) => NO_NOWAIT.store(true, Ordering::Relaxed),
            result => return result.is_ok(),
        }
    }
    // A blocking eventfd could only make this wait if another reader takes the counter between the two calls.
    // SAFETY: eight bytes into eight bytes.
    os::is_ready(fd, false).unwrap_or(false)
        && check_len(unsafe { libc::read(fd, part.iov_base, part.iov_len) }).is_ok()
}

/// Future of [`EventWatch::ready`].
struct EventReady<'a> {
    watch: &'a EventWatch,
    op: Option<OpFuture>,
    /// True while the operation may have completed before this future was polled: the counter may have been taken since.
    earlier: bool,
}

impl Future for EventReady<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut op = match self.op.take() {
                Some(op) => op,
                None => match self.watch.armed.take() {
                    Some(op) => {
                        self.earlier = true;
                        op
                    }
                    None => self.watch.polled.start_ready(),
                },
            };
            match Pin::new(&mut op).poll(cx) {
                Poll::Pending => {
                    self.op = Some(op);
                    self.earlier = false;
                    return Poll::Pending;
                }
                Poll::Ready(done) => {
                    if done.result.is_err() || !self.earlier || self.watch.is_ready() {
                        return Poll::Ready(done.result.map(drop));
                    }
                    self.earlier = false;
                }
            }
        }
    }
}

impl Drop for EventReady<'_> {
    fn drop(&mut self) {
        // Two at once have an operation each; the one that is kept replaces the other, which is cancelled.
        if let Some(op) = self.op.take() {
            self.watch.armed.set(Some(op));
        }
    }
}
