//! Interface between the reactor and the outside: every disk, socket and clock is reached through [`Driver`].
//!
//! Three drivers exist: `uring` (io_uring), `poll` (epoll and a few file threads, where io_uring is forbidden), and the
//! simulator's in `test/sim`.  An operation is submitted *with its buffers*; the driver owns them until it returns the
//! operation as a [`Completion`].  This makes dropping a future safe: the buffers stay with the driver until the kernel
//! has finished with them.

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
pub(crate) mod messages;
pub(crate) mod os;
pub(crate) mod poll;
pub(crate) mod threads;
pub(crate) mod uring;

/// Open file or socket, by the driver's own number (a file descriptor, or the simulator's index).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

/// Key of an operation in flight.  Keys are small and dense: a key is reused as soon as its completion was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpKey(pub u64);

/// Range of bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ByteRange {
    /// Returns whether both ranges have a byte in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.offset.saturating_add(other.len) && other.offset < self.offset.saturating_add(self.len)
    }
}

/// Options for opening a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// Open for writing too.
    pub write: bool,
    /// Create the file if it does not exist (never truncates).
    pub create: bool,
    /// Fail if the file exists already; with `create`.
    pub create_new: bool,
    /// Bypass the page cache (O_DIRECT): offsets, lengths and memory must be aligned to the sector size.  Where the
    /// file system refuses O_DIRECT (tmpfs on old kernels), the driver opens without it.
    pub direct: bool,
    /// Take the exclusive lock (flock); if another process holds it, or has locked a range, opening fails with
    /// `WouldBlock`.
    pub lock: bool,
    /// Range to lock instead of the whole file, with `lock`: other ranges may be locked at the same time.  Exclusive if
    /// the file is opened for writing; otherwise, readers share it.
    pub lock_range: Option<ByteRange>,
}

impl OpenOptions {
    /// Returns options for reading.
    pub const fn read() -> Self {
        Self { write: false, create: false, create_new: false, direct: false, lock: false, lock_range: None }
    }

    /// Returns options for reading and writing.
    pub const fn read_write() -> Self {
        Self { write: true, ..Self::read() }
    }

    /// Creates the file if it does not exist.
    pub const fn create(self) -> Self {
        Self { create: true, ..self }
    }

    /// Creates the file, which must not exist.
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

    /// Limits the lock, if one is taken, to a range.
    pub const fn lock_range(self, range: ByteRange) -> Self {
        Self { lock_range: Some(range), ..self }
    }
}

/// Properties of an opened file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// Size in bytes (a block device's capacity, a file's length).
    pub size: u64,
    /// True for a block device, and for a named range: the size is fixed.  False for a file.
    pub block_device: bool,
    /// Unit of direct I/O in bytes: the device's logical sector size; for a file, the unit that its file system
    /// requires.  Never the machine's page size.
    pub sector: u32,
    /// True if direct I/O is in effect.
    pub direct: bool,
}

/// Space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystemSpace {
    /// Total space.
    pub total: u64,
    /// Space available to this process.
    pub available: u64,
}

/// I/O operation, with its buffers.
#[derive(Debug)]
pub enum Op {
    /// Reads into the buffer's spare space from `offset`; the result is the bytes read, by which the buffer grew.
    /// Short only at the end of the file.
    Read {
        /// File to read.
        file: Handle,
        /// Offset of the first byte.
        offset: u64,
        /// Buffer, filled from its current length on.
        buf: BufMut,
    },
    /// Writes all of `bufs` at `offset`; the result is the bytes written (all of them, or an error).
    Write {
        /// File to write.
        file: Handle,
        /// Offset of the first byte.
        offset: u64,
        /// Data to write.
        bufs: BufList,
        /// Durable on completion (RWF_DSYNC, FUA on a device).
        durable: bool,
    },
    /// Makes every completed write durable (fdatasync).
    Sync {
        /// File to sync.
        file: Handle,
    },
    /// Deallocates the range; it reads as zeroes (files) or undefined (devices) after.
    Punch {
        /// File or block device.
        file: Handle,
        /// Offset of the first byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Allocates the range of a file, also past its end, without changing content or size.  For a block device it is
    /// `EOPNOTSUPP` or a success without effect.
    Allocate {
        /// File to allocate in.
        file: Handle,
        /// Offset of the first byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Accepts a connection; the result is the new socket's handle, the peer's address is in [`Completion::peer`].
    Accept {
        /// Listening socket.
        listener: Handle,
    },
    /// Connects; the result is the new socket's handle.
    Connect {
        /// Address to connect to.
        addr: Addr,
    },
    /// Receives into the buffer's spare space; the result is the bytes received, 0 at the end of the stream.
    Recv {
        /// Socket to receive from.
        sock: Handle,
        /// Buffer, filled from its current length on.
        buf: BufMut,
        /// Wait until the spare space is full (or the stream ends).
        all: bool,
    },
    /// Waits until a socket, or a foreign descriptor, is readable or writable, or broken.
    Ready {
        /// Socket, or a handle from [`Driver::adopt_listener`].
        handle: Handle,
        /// Wait until it is writable, not readable; for sockets.
        writable: bool,
    },
    /// Sends all of `bufs`; the result is the bytes sent (all of them, or an error).
    Send {
        /// Socket to send on.
        sock: Handle,
        /// Data to send.
        bufs: BufList,
    },
}

/// Completed operation, returned with its buffers.
#[derive(Debug)]
pub struct Completion {
    /// Key of the operation.
    pub key: OpKey,
    /// Bytes, a handle, or 0; or the error.
    pub result: io::Result<u64>,
    /// Operation as it was submitted, its buffers filled.
    pub op: Op,
    /// Address of the peer, for `Accept`.
    pub peer: Option<Addr>,
}

/// Maximum wait of [`Driver::poll`] when nothing has completed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Do not wait.
    No,
    /// Wait until this time at the latest.
    Until(Instant),
    /// Wait until a completion or a wake-up.
    Forever,
}

/// Waker of a waiting driver, usable from any thread.
pub trait Unpark: Send + Sync {
    /// Makes the current or the next [`Driver::poll`] return.
    fn unpark(&self);
}

/// Synchronous file operations.  They may block the thread briefly; used at start and stop, and for infrequent queries.
pub trait FileDriver {
    /// Opens a file or block device.
    fn open(&mut self, path: &Path, options: OpenOptions) -> io::Result<(Handle, FileInfo)>;

    /// Returns the current size of an open file, in bytes.
    fn file_size(&mut self, file: Handle) -> io::Result<u64>;

    /// Sets a file's size in bytes; a longer file gains a hole.
    fn set_file_size(&mut self, file: Handle, size: u64) -> io::Result<()>;

    /// Returns the bytes allocated to an open file in its file system; `None` where that is unknown, and for a device.
    fn allocated_size(&mut self, file: Handle) -> io::Result<Option<u64>>;

    /// Returns the offset of the first byte at or after `from` that may hold data; `None` when only a hole follows.
    fn next_data(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>>;

    /// Returns the offset of the first byte at or after `from` that lies in a hole or is the end of the file; `None`
    /// where that is unknown, and past the end.
    fn next_hole(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>>;

    /// Returns the number of requests that the device's queue holds; `None` for a file, and where that is unknown.
    fn queue_depth(&mut self, _file: Handle) -> Option<u32> {
        None
    }

    /// Returns the space of the file system that holds `path`; `None` where there is no limit.
    fn file_system_space(&mut self, path: &Path) -> io::Result<Option<FileSystemSpace>>;

    /// Returns the space of the file system that holds an open file; `None` where there is no limit.
    fn space_beneath(&mut self, file: Handle) -> io::Result<Option<FileSystemSpace>>;

    /// Returns the bytes of memory that programs can still take without swapping; `None` where that is unknown.
    fn available_memory(&mut self) -> Option<u64> {
        None
    }

    /// Returns how the system itself uses a file, which opening it would not show: as a loop device or a swap area.
    fn file_user(&mut self, path: &Path) -> Option<String>;

    /// Removes a file.
    fn remove_file(&mut self, path: &Path) -> io::Result<()>;

    /// Makes a directory's entries durable (fsync of the directory), after creating or removing a file in it.
    fn sync_dir(&mut self, path: &Path) -> io::Result<()>;
}

/// Access to disks, sockets and time for one reactor.  Single-threaded, except for [`Unpark`].
pub trait Driver: FileDriver {
    /// Returns the display name: `io_uring`, `epoll`, `simulation`.
    fn name(&self) -> &'static str;

    /// Starts an operation.  Never blocks and never fails: an error is reported by the completion.  The driver may
    /// queue it until the next [`poll`](Self::poll), to submit many with one system call.
    fn submit(&mut self, key: OpKey, op: Op);

    /// Requests cancellation of an operation.  It still completes, with its result or `ECANCELED`.
    fn cancel(&mut self, key: OpKey);

    /// Submits queued operations and appends completions to `done`; waits as `wait` says when there are none.
    fn poll(&mut self, wait: Wait, done: &mut Vec<Completion>);

    /// Returns the monotonic time.
    fn now(&self) -> Instant;

    /// Returns the time since 1970-01-01T00:00:00Z.
    fn wall_clock(&self) -> Duration;

    /// Returns a random number, from the system or from the seed.
    fn random(&mut self) -> u64;

    /// Returns the waker for other threads.
    fn unparker(&self) -> Arc<dyn Unpark>;

    /// Opens a listening socket; returns its handle and the bound address (port 0 filled in).  With `private`, a Unix socket
    /// is created for its owner alone.
    fn listen(&mut self, addr: &Addr, private: bool) -> io::Result<(Handle, Addr)>;

    /// Duplicates a listening socket for another core's driver of the same kind.  Both accept from one queue.
    fn share_listener(&mut self, _listener: Handle) -> io::Result<OwnedFd> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver's sockets stay on its core"))
    }

    /// Adopts a socket that another core's [`share_listener`](Self::share_listener) has returned, or a foreign descriptor
    /// that is waited for with [`Op::Ready`].
    fn adopt_listener(&mut self, _listener: OwnedFd) -> io::Result<Handle> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver's sockets stay on its core"))
    }

    /// Adopts a connected stream socket that another process has opened.
    fn adopt_stream(&mut self, _socket: OwnedFd) -> io::Result<Handle> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver cannot adopt a socket"))
    }

    /// Returns the system's descriptor of a socket, for calls that do not block and that no [`Op`] makes.
    fn descriptor(&self, _sock: Handle) -> io::Result<BorrowedFd<'_>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this driver cannot pass file descriptors"))
    }

    /// Returns whether the peer of a connection has closed it or shut its sending direction down, also while bytes that it
    /// sent before are still to be received.  Never blocks.
    fn is_peer_closed(&mut self, sock: Handle) -> bool;

    /// Shuts down both directions of a connection; operations in flight on it complete.
    fn shutdown(&mut self, sock: Handle);

    /// Shuts down the sending direction of a connection, which can still receive.
    fn shutdown_send(&mut self, sock: Handle);

    /// Closes a file or socket.  Operations in flight on it still complete.
    fn close(&mut self, handle: Handle);
}

/// Choice of driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriverChoice {
    /// io_uring, or epoll where io_uring is forbidden, with one warning.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// epoll and file threads.
    Poll,
}

/// Creates an operating system driver for this thread.
pub fn system_driver(choice: DriverChoice) -> io::Result<Box<dyn Driver>> {
    match choice {
        DriverChoice::Uring => Ok(Box::new(uring::UringDriver::new()?)),
        DriverChoice::Poll => Ok(Box::new(poll::PollDriver::new()?)),
        DriverChoice::Auto => match uring::UringDriver::new() {
            Ok(driver) => Ok(Box::new(driver)),
            Err(error) => {
                static SAID: std::sync::Once = std::sync::Once::new();
                SAID.call_once(|| tracing::warn!(%error, "io_uring unavailable; using epoll and file threads"));
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
