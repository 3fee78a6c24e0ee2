//! I/O buffers of the library: memory that is lent to it for a call.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use libc::EAGAIN;

/// State that the callbacks access.
#[derive(Debug)]
struct Inner {
    input: *const u8,
    input_len: usize,
    output: *mut u8,
    output_len: usize,
    /// Output bytes that did not fit.
    overflow: Vec<u8>,
    /// Bytes written so far.
    written: u64,
}

/// Memory lent to a connection of the library: input to read, and output to write to.
#[derive(Debug)]
pub(crate) struct Pipe(NonNull<Inner>);

impl Pipe {
    /// Creates a pipe with nothing lent.
    pub(crate) fn new() -> Self {
        let inner = Inner {
            input: std::ptr::null(),
            input_len: 0,
            output: std::ptr::null_mut(),
            output_len: 0,
            overflow: Vec::new(),
            written: 0,
        };
        Self(NonNull::from(Box::leak(Box::new(inner))))
    }

    /// Returns the context of the callbacks.  It is valid as long as the pipe lives.
    pub(crate) fn context(&self) -> *mut c_void {
        self.0.as_ptr().cast()
    }

    /// Lends memory for the duration of `call`.  Advances `input` past the bytes read; returns how many bytes were
    /// written to `output`.  Bytes that did not fit are returned by [`overflow`](Self::overflow).
    pub(crate) fn lend<T>(&mut self, input: &mut &[u8], output: &mut [u8], call: impl FnOnce() -> T) -> (T, usize) {
        // SAFETY: this pipe owns the box, and the callbacks, which use it too, run within `call` only; no reference
        // exists while they do.
        unsafe {
            let inner = self.0.as_ptr();
            ((*inner).input, (*inner).input_len) = (input.as_ptr(), input.len());
            ((*inner).output, (*inner).output_len) = (output.as_mut_ptr(), output.len());
        }
        let result = call();
        // SAFETY: as above; nothing of the lent memory is kept.
        let (left, room) = unsafe {
            let inner = self.0.as_ptr();
            let left = ((*inner).input_len, (*inner).output_len);
            ((*inner).input, (*inner).input_len) = (std::ptr::null(), 0);
            ((*inner).output, (*inner).output_len) = (std::ptr::null_mut(), 0);
            left
        };
        *input = &input[input.len() - left..];
        (result, output.len() - room)
    }

    /// Takes the output bytes that did not fit.
    pub(crate) fn overflow(&mut self) -> Vec<u8> {
        // SAFETY: this pipe owns the box, and no callback runs.
        unsafe { std::mem::take(&mut self.0.as_mut().overflow) }
    }

    /// Returns the bytes written so far.
    pub(crate) fn written(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.0.as_ref().written }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // SAFETY: it was made from a box, and the connection that used it is gone: a session drops its connection
        // first.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

fn set_errno(code: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = code };
}

/// Read callback: copies bytes of the peer to the library.
///
/// # Safety
/// `context` is a pipe's, within its `lend` or with nothing lent, and `buf` has space for `len` bytes.
pub(crate) unsafe extern "C" fn receive(context: *mut c_void, buf: *mut u8, len: u32) -> c_int {
    let inner: *mut Inner = context.cast();
    // SAFETY: the caller guarantees it; the lent memory lives until `lend` has returned.
    unsafe {
        let now = (*inner).input_len.min(len as usize);
        if now == 0 {
            set_errno(EAGAIN);
            return -1;
        }
        std::ptr::copy_nonoverlapping((*inner).input, buf, now);
        (*inner).input = (*inner).input.add(now);
        (*inner).input_len -= now;
        now as c_int
    }
}

/// Write callback: copies bytes for the peer from the library.
///
/// # Safety
/// `context` is a pipe's, within its `lend` or with nothing lent, and `len` bytes can be read at `buf`.
pub(crate) unsafe extern "C" fn send(context: *mut c_void, buf: *const u8, len: u32) -> c_int {
    let inner: *mut Inner = context.cast();
    // SAFETY: the caller guarantees it; the output does not overlap with memory of the library, and a reference to the
    // overflow lives within this call only.
    unsafe {
        let overflow = &mut (*inner).overflow;
        let all = len as usize;
        // Once bytes have overflowed, all later bytes follow them there.
        let now = if overflow.is_empty() { (*inner).output_len.min(all) } else { 0 };
        overflow.extend_from_slice(std::slice::from_raw_parts(buf.add(now), all - now));
        if now > 0 {
            std::ptr::copy_nonoverlapping(buf, (*inner).output, now);
            (*inner).output = (*inner).output.add(now);
            (*inner).output_len -= now;
        }
        (*inner).written += u64::from(len);
        len as c_int
    }
}
