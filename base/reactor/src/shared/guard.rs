//! Faults of mapped files that another process has truncated.
//!
//! An access to a page that its file does not have any more raises SIGBUS, which ends the process.  The handler here
//! puts zeroed memory in the place of such pages, if they belong to a registered mapping, and passes every other SIGBUS
//! on to the handler that was there before.
//!
//! Rules of the table, because a handler can neither lock nor allocate:
//!
//! - A mapping is registered before anything accesses it, and removed from the table before it is unmapped, when
//!   nothing can access it any more.  So while a thread handles a fault of a mapping, its entry is complete, and does
//!   not change.
//! - Other entries may change meanwhile.  Their generation is odd during a change; the handler skips an entry whose
//!   generation was odd, or has changed while it was read, since it cannot be the one of the fault.
//! - Entries are changed under a lock, which the handler does not take.
//! - Two threads may handle faults of the same mapping: each replaces the pages from its fault to the end, atomically
//!   for the accesses of others.  A later one may wipe out what was written into zeroed memory; it is lost anyway.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::driver::os::check;

/// Maximum mappings at a time.
pub(super) const GUARDED_MAX: usize = 4096;

/// Entry of the table.
struct GuardEntry {
    /// Odd while the entry is changed.
    generation: AtomicUsize,
    /// Address of the first byte; 0 in a free entry.
    start: AtomicUsize,
    /// Length in bytes, a multiple of the page size.
    len: AtomicUsize,
    /// Page size of the mapped file, in bytes.
    page: AtomicUsize,
    /// True once pages were replaced.
    lost: AtomicBool,
}

static TABLE: [GuardEntry; GUARDED_MAX] = [const {
    GuardEntry {
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; GUARDED_MAX];

/// Entries at the start of the table that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Free entries below [`USED`]; its lock protects every change of the table.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Action for SIGBUS from before the handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

impl GuardEntry {
    /// Changes the range; the lock of [`FREE`] is held.
    fn set(&self, start: usize, len: usize, page: usize) {
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.generation.store(generation.wrapping_add(2), Ordering::Release);
    }

    /// Returns start, length and page size; `None` during a change.
    fn get(&self) -> Option<(usize, usize, usize)> {
        let before = self.generation.load(Ordering::Acquire);
        let (start, len, page) =
            (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed), self.page.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let after = self.generation.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some((start, len, page))
    }
}

/// Registration of a mapping, which ends when it is dropped: drop it before unmapping.
#[derive(Debug)]
pub(super) struct GuardSlot(usize);

impl GuardSlot {
    /// Registers a mapping; the first installs the handler.
    pub(super) fn register(start: *const u8, len: usize, page: usize) -> io::Result<Self> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        if PREVIOUS.get().is_none() {
            install()?;
        }
        let index = match free.pop() {
            Some(index) => index,
            None => {
                let index = USED.load(Ordering::Relaxed);
                if index == GUARDED_MAX {
                    let text = format!("{GUARDED_MAX} shared mappings exist already, as many as a process can guard");
                    return Err(io::Error::new(io::ErrorKind::QuotaExceeded, text));
                }
                USED.store(index + 1, Ordering::Release);
                index
            }
        };
        TABLE[index].lost.store(false, Ordering::Relaxed);
        TABLE[index].set(start as usize, len, page);
        Ok(Self(index))
    }

    /// Returns whether pages were replaced.
    pub(super) fn is_lost(&self) -> bool {
        TABLE[self.0].lost.load(Ordering::Acquire)
    }
}

impl Drop for GuardSlot {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        TABLE[self.0].set(0, 0, 0);
        free.push(self.0);
    }
}

/// Installs the handler.
fn install() -> io::Result<()> {
    // SAFETY: all zeroes is a valid sigaction, which the first call fills; the handler has the signature that
    // SA_SIGINFO asks for, and calls nothing that a handler must not call.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        check(libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous))?;
        // Before the handler can run, which reads it.
        PREVIOUS.get_or_init(|| previous);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        // On the alternative stack, where the previous handler may need to run.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&mut action.sa_mask);
        check(libc::sigaction(libc::SIGBUS, &action, ptr::null_mut())).map(drop)
    }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the address of this thread's errno, which is kept for the code that was interrupted.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let kept = unsafe { *errno };
    // SAFETY: the kernel passes valid information.
    let (code, fault) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // The first is an address without a page, the second one whose memory is broken.  Only these are raised by an access
    // of this thread; another process may send the signal too, and then there is no address.
    let access = code == libc::BUS_ADRERR || code == libc::BUS_MCEERR_AR;
    if !(access && replace_pages(fault)) {
        pass_on(signal, code, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = kept };
}

/// Replaces the page of an address by zeroed memory, and all pages after it in its mapping; returns false if there is no
/// such mapping.
///
/// The file has most likely lost them all.  A single page at a time would let a peer use up the mappings that the
/// process may have, and the process would end.
fn replace_pages(fault: usize) -> bool {
    let used = USED.load(Ordering::Acquire);
    for entry in &TABLE[..used] {
        let Some((start, len, page)) = entry.get() else { continue };
        if fault < start || fault - start >= len {
            continue;
        }
        // Before the zeroes can be read.
        entry.lost.store(true, Ordering::Release);
        let first = fault & !(page - 1);
        // A strict limit of memory may forbid the long range.
        return replace_range(first, start + len - first) || replace_range(first, page);
    }
    false
}

/// Maps zeroed memory over a range of a registered mapping.
fn replace_range(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // By system call: a library's function need not be safe in a signal handler.
    // SAFETY: the range consists of whole pages of a registered mapping, which is not unmapped while the interrupted
    // access uses it, and whose bytes may change at any time.
    let result = unsafe { libc::syscall(libc::SYS_mmap, start, len, protection, flags, -1 as c_int, 0_usize) };
    result != -1
}

/// Passes a signal on to the action from before.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    let (action, flags) = previous.map_or((libc::SIG_DFL, 0), |previous| (previous.sa_sigaction, previous.sa_flags));
    match action {
        // Ignoring ends with a fault: the access would be repeated without end.  Codes of faults are positive.
        libc::SIG_IGN if code <= 0 => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zeroes is the default action with an empty mask; both calls may be made in a handler.  The
            // signal is blocked here, and ends the process on return.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &default, ptr::null_mut());
                libc::raise(signal);
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag, the action is the address of a function with this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without the flag, the action is the address of a function with this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
