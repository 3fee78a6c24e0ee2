//! The seam between the reactor and the world: every disk, socket and clock is reached through [`Driver`].
//!
//! Three drivers exist: `uring` (io_uring), `poll` (epoll and a few file threads, where io_uring is forbidden), and
//! the simulator's in `test/sim`.  An operation is given to the driver *with its buffers*; the driver owns them until
//! it hands the operation back as a [`Completion`].  That is what makes dropping a future safe: the buffers stay with
//! the driver until the kernel is done with them.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::buf::{BufList, BufMut};
use crate::net::Addr;
use crate::time::Instant;

pub(crate) mod files;
pub(crate) mod fixed;
pub(crate) mod flight;
pub(crate) mod handles;
pub(crate) mod iov;
pub(crate) mod os;
pub(crate) mod poll;
pub(crate) mod threads;
pub(crate) mod uring;

/// An open file or socket, by the driver's own number (a file descriptor, or the simulator's index).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

/// Names an operation in flight.  Keys are small and dense: one is used again as soon as its completion was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpKey(pub u64);

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// Open for writing too.
    pub write: bool,
    /// Create it if it is not there (never truncates).
    pub create: bool,
    /// Fail if it is there already; with `create`.
    pub create_new: bool,
    /// Bypass the page cache (O_DIRECT): offsets, lengths and memory must be aligned to the sector size.
    /// Where the file system refuses O_DIRECT (tmpfs on old kernels), the driver opens without.
    pub direct: bool,
    /// Take the exclusive lock (flock); held by another process, opening fails with `WouldBlock`.
    pub lock: bool,
}

impl OpenOptions {
    /// For reading.
    pub const fn read() -> Self {
        Self { write: false, create: false, create_new: false, direct: false, lock: false }
    }

    /// For reading and writing.
    pub const fn read_write() -> Self {
        Self { write: true, ..Self::read() }
    }

    /// Creates the file if it is not there.
    pub const fn create(self) -> Self {
        Self { create: true, ..self }
    }

    /// Creates the file, which must not be there.
    pub const fn create_new(self) -> Self {
        Self { create: true, create_new: true, ..self }
    }

    /// Bypasses the page cache.
    pub const fn direct(self) -> Self {
        Self { direct: true, ..self }
    }

    /// Takes the exclusive lock.
    pub const fn lock(self) -> Self {
        Self { lock: true, ..self }
    }
}

/// What an opened file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// Bytes (a block device's capacity, a file's length).
    pub size: u64,
    /// A block device, not a file.
    pub block_device: bool,
    /// The unit of direct I/O in bytes: the device's logical sector size; for a file, what its file system asks for.
    /// Never the machine's page size.
    pub sector: u32,
    /// Direct I/O is really on.
    pub direct: bool,
}

/// Space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystemSpace {
    /// All of it.
    pub total: u64,
    /// What this process may still take.
    pub available: u64,
}

/// One operation, with the buffers it works on.
#[derive(Debug)]
pub enum Op {
    /// Reads into the buffer's spare room from `offset`; the result is the bytes read, by which the buffer grew.
    /// Short only at the end of the file.
    Read {
        /// The file.
        file: Handle,
        /// First byte.
        offset: u64,
        /// Filled from its length on.
        buf: BufMut,
    },
    /// Writes all of `bufs` at `offset`; the result is the bytes written (all of them, or an error).
    Write {
        /// The file.
        file: Handle,
        /// First byte.
        offset: u64,
        /// What is written.
        bufs: BufList,
        /// Durable when it completes (RWF_DSYNC, FUA on a device).
        durable: bool,
    },
    /// Makes every completed write durable (fdatasync).
    Sync {
        /// The file.
        file: Handle,
    },
    /// Gives the range back to the file system or device; it reads as zeroes (files) or undefined (devices) after.
    Punch {
        /// The file.
        file: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Allocates the range of a file, beyond its end too, without changing what it reads as or its length; for a block
    /// device it is `EOPNOTSUPP` or a success that means nothing.
    Allocate {
        /// The file.
        file: Handle,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Accepts a connection; the result is the new socket's handle, the peer's address comes in [`Completion::peer`].
    Accept {
        /// The listening socket.
        listener: Handle,
    },
    /// Connects; the result is the new socket's handle.
    Connect {
        /// Where to.
        addr: Addr,
    },
    /// Receives into the buffer's spare room; the result is the bytes received, 0 at the end of the stream.
    Recv {
        /// The socket.
        sock: Handle,
        /// Filled from its length on.
        buf: BufMut,
        /// Wait until the spare room is full (or the stream ends).
        all: bool,
    },
    /// Waits until there is something to read from a descriptor that is no socket of ours.
    Ready {
        /// What was taken in by [`Driver::adopt_listener`].
        handle: Handle,
    },
    /// Sends all of `bufs`; the result is the bytes sent (all of them, or an error).
    Send {
        /// The socket.
        sock: Handle,
        /// What is sent.
        bufs: BufList,
    },
}

/// An operation that has ended, handed back with its buffers.
#[derive(Debug)]
pub struct Completion {
    /// Which.
    pub key: OpKey,
    /// Bytes, or a handle, or 0; or why it failed.
    pub result: io::Result<u64>,
    /// The operation as it was submitted, its buffers filled.
    pub op: Op,
    /// For `Accept`: who connected.
    pub peer: Option<Addr>,
}

/// How long [`Driver::poll`] may wait when nothing has completed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until this time at the latest.
    Until(Instant),
    /// Until something happens.
    Forever,
}

/// Wakes a driver that waits, from any thread.
pub trait Unpark: Send + Sync {
    /// Makes the current or the next [`Driver::poll`] return.
    fn unpark(&self);
}

/// Calls on files that are answered at once.  They may block for a moment; used when starting and stopping, and for what is
/// looked at now and then.
pub trait FileDriver {
    /// Opens a file or block device.
    fn open(&mut self, path: &Path, options: OpenOptions) -> io::Result<(Handle, FileInfo)>;

    /// Returns the size of an open file now, in bytes.
    fn file_size(&mut self, file: Handle) -> io::Result<u64>;

    /// Sets a file's length; a longer file gains a hole.
    fn set_file_size(&mut self, file: Handle, size: u64) -> io::Result<()>;

    /// Returns the bytes of its file system that an open file takes; `None` where nobody knows, and for a device.
    fn allocated_size(&mut self, file: Handle) -> io::Result<Option<u64>>;

    /// Returns the first byte from `from` on that may hold data; `None` when only a hole follows.
    fn next_data(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>>;

    /// Returns the first byte from `from` on that lies in a hole or is the end of the file; `None` where nobody knows, and
    /// behind the end.
    fn next_hole(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>>;

    /// Returns the space of the file system that `path` lies on; `None` where there is no limit.
    fn file_system_space(&mut self, path: &Path) -> io::Result<Option<FileSystemSpace>>;

    /// Returns the space of the file system that an open file lies on; `None` where there is no limit.
    fn space_beneath(&mut self, file: Handle) -> io::Result<Option<FileSystemSpace>>;

    /// Says how the system itself uses a file, which opening it would not tell: as a loop device or a swap area.
    fn file_user(&mut self, path: &Path) -> Option<String>;

    /// Removes a file.
    fn remove_file(&mut self, path: &Path) -> io::Result<()>;

    /// Makes the names in a directory durable (fsync of the directory), after creating or removing a file in it.
    fn sync_dir(&mut self, path: &Path) -> io::Result<()>;
}

/// Reaches disks, sockets and time for one reactor.  Single-threaded but for [`Unpark`].
pub trait Driver: FileDriver {
    /// Its name, for people: `io_uring`, `epoll`, `simulation`.
    fn name(&self) -> &'static str;

    /// Starts an operation.  Never blocks and never fails: a failure is a completion.
    /// The driver may hold it back until the next [`poll`](Self::poll), to submit many with one system call.
    fn submit(&mut self, key: OpKey, op: Op);

    /// Asks for an operation to end early.  It completes all the same, with its result or `ECANCELED`.
    fn cancel(&mut self, key: OpKey);

    /// Submits what was held back, and appends what has completed to `done`; waits as told when there is nothing.
    fn poll(&mut self, wait: Wait, done: &mut Vec<Completion>);

    /// Monotonic time.
    fn now(&self) -> Instant;

    /// Time since 1970-01-01T00:00:00Z.
    fn wall_clock(&self) -> Duration;

    /// A random number, from the system or from the seed.
    fn random(&mut self) -> u64;

    /// The waker for other threads.
    fn unparker(&self) -> Arc<dyn Unpark>;

    /// Opens a listening socket; returns the address as bound (port 0 filled in).
    fn listen(&mut self, addr: &Addr) -> io::Result<(Handle, Addr)>;

    /// A listening socket again, for another core's driver of the same kind.  Both accept from one queue.
    fn share_listener(&mut self, _listener: Handle) -> io::Result<OwnedFd> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver's sockets stay on its core"))
    }

    /// Takes in what [`share_listener`](Self::share_listener) of another core has given.
    fn adopt_listener(&mut self, _listener: OwnedFd) -> io::Result<Handle> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver's sockets stay on its core"))
    }

    /// Gives the process at the other end of a Unix socket a descriptor, with one byte of data.
    fn send_fd(&mut self, _sock: Handle, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver passes no descriptors"))
    }

    /// Takes a descriptor that came with one byte of data; `WouldBlock` while there is none.
    fn recv_fd(&mut self, _sock: Handle) -> io::Result<OwnedFd> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver passes no descriptors"))
    }

    /// Ends both directions of a connection; operations in flight on it complete.
    fn shutdown(&mut self, sock: Handle);

    /// Closes a file or socket.  Operations in flight on it still complete.
    fn close(&mut self, handle: Handle);
}

/// Which driver to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverChoice {
    /// io_uring, and where it is forbidden epoll, saying so once.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// epoll and file threads.
    Poll,
}

/// Makes a driver of the operating system for this thread.
pub fn system_driver(choice: DriverChoice) -> io::Result<Box<dyn Driver>> {
    match choice {
        DriverChoice::Uring => Ok(Box::new(uring::UringDriver::new()?)),
        DriverChoice::Poll => Ok(Box::new(poll::PollDriver::new()?)),
        DriverChoice::Auto => match uring::UringDriver::new() {
            Ok(driver) => Ok(Box::new(driver)),
            Err(error) => {
                static SAID: std::sync::Once = std::sync::Once::new();
                SAID.call_once(
                    || tracing::warn!(%error, "io_uring is not to be had here; using epoll and file threads"),
                );
                Ok(Box::new(poll::PollDriver::new()?))
            }
        },
    }
}

impl fmt::Debug for dyn Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
