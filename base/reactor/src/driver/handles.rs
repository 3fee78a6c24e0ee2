//! Table of open files and sockets of one driver, with their operations in flight.
//!
//! The kernel may reuse a descriptor number that is closed while an operation is in flight on it, and the operation
//! would reach the wrong file.  So a close is deferred until nothing is in flight.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use crate::driver::{Handle, os};

/// State of an owned file descriptor.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HandleEntry {
    open: bool,
    closing: bool,
    in_flight: u32,
    /// True if the last receive did not fill its buffer.
    pub(crate) drained: bool,
    /// True for a block device.
    pub(crate) block_device: bool,
    /// Unit of direct I/O in bytes, when direct I/O is on; 1 otherwise.
    pub(crate) direct_unit: u32,
}

/// Entries by file descriptor.
#[derive(Default)]
pub(crate) struct Handles {
    entries: Vec<HandleEntry>,
}

impl Handles {
    /// Adds a socket.
    pub(crate) fn add_socket(&mut self, fd: RawFd) {
        self.add(fd, HandleEntry { direct_unit: 1, ..HandleEntry::default() });
    }

    /// Adds a file.
    pub(crate) fn add_file(&mut self, fd: RawFd, info: &super::FileInfo) {
        let direct_unit = if info.direct { info.sector.max(1) } else { 1 };
        self.add(fd, HandleEntry { block_device: info.block_device, direct_unit, ..HandleEntry::default() });
    }

    fn add(&mut self, fd: RawFd, entry: HandleEntry) {
        let at = usize::try_from(fd).expect("an open file descriptor is not negative");
        if at >= self.entries.len() {
            self.entries.resize(at + 1, HandleEntry::default());
        }
        assert!(!self.entries[at].open, "file descriptor {fd} was given out twice");
        self.entries[at] = HandleEntry { open: true, ..entry };
    }

    /// Returns the entry; `None` when the descriptor is not open (or closing).
    pub(crate) fn get(&self, fd: RawFd) -> Option<&HandleEntry> {
        self.entries.get(usize::try_from(fd).ok()?).filter(|entry| entry.open && !entry.closing)
    }

    /// Returns the descriptor of an open handle, for a synchronous call.
    ///
    /// # Errors
    /// `EBADF` when the handle is not open.
    pub(crate) fn open_fd(&self, handle: Handle) -> io::Result<RawFd> {
        let fd = os::fd_of(handle);
        self.get(fd).map(|_| fd).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// Returns the descriptor of an open handle, as [`open_fd`](Self::open_fd).
    pub(crate) fn descriptor(&self, handle: Handle) -> io::Result<BorrowedFd<'_>> {
        // SAFETY: the entry shows that the descriptor is open, and closing it takes a unique borrow of the table.
        self.open_fd(handle).map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Counts an operation as in flight; `None` when the handle is not open.
    pub(crate) fn begin(&mut self, fd: RawFd) -> Option<&HandleEntry> {
        let entry = self.entries.get_mut(usize::try_from(fd).ok()?)?;
        if !entry.open || entry.closing {
            return None;
        }
        entry.in_flight += 1;
        Some(entry)
    }

    /// Records whether the last receive left spare space in its buffer.
    pub(crate) fn set_drained(&mut self, fd: RawFd, drained: bool) {
        self.entries[fd as usize].drained = drained;
    }

    /// Counts an operation as completed, and performs a deferred close.
    pub(crate) fn end(&mut self, fd: RawFd) {
        let entry = &mut self.entries[fd as usize];
        entry.in_flight -= 1;
        if entry.closing && entry.in_flight == 0 {
            *entry = HandleEntry::default();
            os::close(fd);
        }
    }

    /// Closes now, or once nothing is in flight; returns true in the second case.
    pub(crate) fn close(&mut self, fd: RawFd) -> bool {
        let Some(entry) = usize::try_from(fd).ok().and_then(|at| self.entries.get_mut(at)) else { return false };
        if !entry.open || entry.closing {
            return false;
        }
        if entry.in_flight > 0 {
            entry.closing = true;
            return true;
        }
        *entry = HandleEntry::default();
        os::close(fd);
        false
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for (fd, entry) in self.entries.iter().enumerate() {
            // Operations still in flight here were abandoned; their descriptor must not be reused.
            if entry.open && entry.in_flight == 0 {
                os::close(fd as RawFd);
            }
        }
    }
}
