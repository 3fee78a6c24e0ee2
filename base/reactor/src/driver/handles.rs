//! The table of open files and sockets of one driver: what each is, and what is in flight on it.
//!
//! A file descriptor that is closed while the kernel still works on it may be given out again, and the work would
//! land in somebody else's file.  So a close waits here until nothing is in flight.

use std::io;
use std::os::fd::RawFd;

use crate::driver::{Handle, os};

/// What a driver knows of a file descriptor it owns.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Entry {
    open: bool,
    closing: bool,
    in_flight: u32,
    /// The last receive took all that was there.
    pub(crate) drained: bool,
    /// A block device.
    pub(crate) block_device: bool,
    /// The unit of direct I/O in bytes, when direct I/O is on; 1 otherwise.
    pub(crate) direct_unit: u32,
}

/// By file descriptor.
#[derive(Default)]
pub(crate) struct Handles {
    entries: Vec<Entry>,
}

impl Handles {
    /// Takes a socket in.
    pub(crate) fn add_socket(&mut self, fd: RawFd) {
        self.add(fd, Entry { direct_unit: 1, ..Entry::default() });
    }

    /// Takes a file in.
    pub(crate) fn add_file(&mut self, fd: RawFd, info: &super::FileInfo) {
        let direct_unit = if info.direct { info.sector.max(1) } else { 1 };
        self.add(fd, Entry { block_device: info.block_device, direct_unit, ..Entry::default() });
    }

    fn add(&mut self, fd: RawFd, entry: Entry) {
        let at = usize::try_from(fd).expect("an open file descriptor is not negative");
        if at >= self.entries.len() {
            self.entries.resize(at + 1, Entry::default());
        }
        assert!(!self.entries[at].open, "file descriptor {fd} was given out twice");
        self.entries[at] = Entry { open: true, ..entry };
    }

    /// What is known of it; `None` when it is not open (or closing).
    pub(crate) fn get(&self, fd: RawFd) -> Option<&Entry> {
        self.entries.get(usize::try_from(fd).ok()?).filter(|entry| entry.open && !entry.closing)
    }

    /// The descriptor behind a handle of ours, for a call that is over at once.
    pub(crate) fn open_fd(&self, handle: Handle) -> io::Result<RawFd> {
        let fd = os::fd_of(handle);
        self.get(fd).map(|_| fd).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// Counts an operation that begins; `None` when the handle is not open.
    pub(crate) fn begin(&mut self, fd: RawFd) -> Option<&Entry> {
        let entry = self.entries.get_mut(usize::try_from(fd).ok()?)?;
        if !entry.open || entry.closing {
            return None;
        }
        entry.in_flight += 1;
        Some(entry)
    }

    /// Remembers whether a receive took all that was there.
    pub(crate) fn set_drained(&mut self, fd: RawFd, drained: bool) {
        self.entries[fd as usize].drained = drained;
    }

    /// Counts an operation that has ended, and closes what waited for it.
    pub(crate) fn end(&mut self, fd: RawFd) {
        let entry = &mut self.entries[fd as usize];
        entry.in_flight -= 1;
        if entry.closing && entry.in_flight == 0 {
            *entry = Entry::default();
            os::close(fd);
        }
    }

    /// Closes now, or as soon as nothing is in flight; true in the second case.
    pub(crate) fn close(&mut self, fd: RawFd) -> bool {
        let Some(entry) = usize::try_from(fd).ok().and_then(|at| self.entries.get_mut(at)) else { return false };
        if !entry.open || entry.closing {
            return false;
        }
        if entry.in_flight > 0 {
            entry.closing = true;
            return true;
        }
        *entry = Entry::default();
        os::close(fd);
        false
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for (fd, entry) in self.entries.iter().enumerate() {
            // What is still in flight here was given up on; its descriptor must not be used again.
            if entry.open && entry.in_flight == 0 {
                os::close(fd as RawFd);
            }
        }
    }
}
