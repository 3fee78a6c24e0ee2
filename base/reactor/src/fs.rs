//! Files and block devices.

use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use crate::buf::{BufList, BufMut};
use crate::driver::{FileInfo, FileSystemSpace, Handle, Op, OpenOptions};
use crate::executor::{ReactorState, with_current};
use crate::time::{now, sleep};

/// Longest time that an opener waits for a file lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);
/// Retry interval while waiting for a file lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Open file or block device.  Clones share it; it is closed with the last clone.
#[derive(Clone)]
pub struct File {
    shared: Rc<Shared>,
}

struct Shared {
    inner: Rc<ReactorState>,
    handle: Handle,
    info: FileInfo,
    path: PathBuf,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let handle = self.handle;
        self.inner.with_driver(|driver| driver.close(handle));
    }
}

impl File {
    /// Opens `path`.  May block the thread briefly; meant for start-up.
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> io::Result<Self> {
        let path = path.as_ref();
        let inner = with_current(Rc::clone);
        let (handle, info) = inner.with_driver(|driver| driver.open(path, options))?;
        Ok(Self { shared: Rc::new(Shared { inner, handle, info, path: path.to_owned() }) })
    }

    /// Opens `path`, retrying for up to 3 s while the file is locked by another process, if `options` ask for the lock.
    /// A killed process is gone before the kernel has closed its files: in-flight operations of its ring hold them, and
    /// the lock with them, until they have completed.
    ///
    /// # Errors
    /// `WouldBlock` when another process still holds the lock after that time; otherwise as [`open`](Self::open).
    pub async fn open_when_free(path: impl AsRef<Path>, options: OpenOptions) -> io::Result<Self> {
        let deadline = now() + LOCK_PATIENCE;
        loop {
            match Self::open(path.as_ref(), options) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && now() < deadline => sleep(LOCK_RETRY).await,
                result => return result,
            }
        }
    }

    /// Returns the file's properties as of opening.
    pub fn info(&self) -> FileInfo {
        self.shared.info
    }

    /// Returns the path that was opened.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Returns the current size in bytes.
    pub fn size(&self) -> io::Result<u64> {
        self.shared.inner.with_driver(|driver| driver.file_size(self.shared.handle))
    }

    /// Sets the size in bytes.
    pub fn set_size(&self, size: u64) -> io::Result<()> {
        self.shared.inner.with_driver(|driver| driver.set_file_size(self.shared.handle, size))
    }

    /// Returns the bytes currently allocated in the file system; `None` for a device.
    pub fn allocated_size(&self) -> io::Result<Option<u64>> {
        self.shared.inner.with_driver(|driver| driver.allocated_size(self.shared.handle))
    }

    /// Returns the space of the file system that holds the file; `None` where there is no limit.
    pub fn file_system_space(&self) -> io::Result<Option<FileSystemSpace>> {
        self.shared.inner.with_driver(|driver| driver.space_beneath(self.shared.handle))
    }

    /// Returns the offset of the first byte at or after `from` that may hold data; `None` when only a hole follows.
    pub fn next_data(&self, from: u64) -> io::Result<Option<u64>> {
        self.shared.inner.with_driver(|driver| driver.next_data(self.shared.handle, from))
    }

    /// Returns the offset of the first byte at or after `from` that lies in a hole or is the end of the file; `None`
    /// where that is unknown, and past the end.
    pub fn next_hole(&self, from: u64) -> io::Result<Option<u64>> {
        self.shared.inner.with_driver(|driver| driver.next_hole(self.shared.handle, from))
    }

    /// Reads into the buffer's spare space from `offset`; short only at the end of the file.  Returns the buffer in
    /// either case.
    pub async fn read_at(&self, buf: BufMut, offset: u64) -> (io::Result<usize>, BufMut) {
        let op = Op::Read { file: self.shared.handle, offset, buf };
        let done = self.shared.inner.start_op(op).await;
        let Op::Read { buf, .. } = done.op else { unreachable!("a read completed as {:?}", done.op) };
        (done.result.map(|len| len as usize), buf)
    }

    /// Reads exactly `len` bytes from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` when there are fewer.
    pub async fn read_exact_at(&self, offset: u64, len: usize) -> io::Result<BufMut> {
        let (result, buf) = self.read_at(BufMut::with_capacity(len), offset).await;
        let got = result?;
        if got < len {
            let text = format!("{}: {got} bytes where {len} were expected at {offset}", self.path().display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        Ok(buf)
    }

    /// Writes all of `bufs` at `offset`.
    pub async fn write_at(&self, bufs: impl Into<BufList>, offset: u64) -> io::Result<()> {
        self.write(bufs.into(), offset, false).await
    }

    /// Writes all of `bufs` at `offset`; durable on completion.
    pub async fn write_durable_at(&self, bufs: impl Into<BufList>, offset: u64) -> io::Result<()> {
        self.write(bufs.into(), offset, true).await
    }

    async fn write(&self, bufs: BufList, offset: u64, durable: bool) -> io::Result<()> {
        let op = Op::Write { file: self.shared.handle, offset, bufs, durable };
        self.shared.inner.start_op(op).await.result.map(drop)
    }

    /// Makes every completed write durable.
    pub async fn sync_data(&self) -> io::Result<()> {
        self.shared.inner.start_op(Op::Sync { file: self.shared.handle }).await.result.map(drop)
    }

    /// Allocates a range, also past the end of the file, without changing content or size.
    ///
    /// # Errors
    /// `StorageFull`; `Unsupported` where the file system cannot do it.
    pub async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.inner.start_op(Op::Allocate { file: self.shared.handle, offset, len }).await.result.map(drop)
    }

    /// Deallocates a range, returning its space to the file system or device.
    pub async fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.inner.start_op(Op::Punch { file: self.shared.handle, offset, len }).await.result.map(drop)
    }
}

/// Returns the space of the file system that holds `path`; `None` where there is no limit.
pub fn file_system_space(path: impl AsRef<Path>) -> io::Result<Option<FileSystemSpace>> {
    with_current(|inner| inner.with_driver(|driver| driver.file_system_space(path.as_ref())))
}

/// Returns the bytes of memory that programs can still take without swapping; `None` where that is unknown.
pub fn available_memory() -> Option<u64> {
    with_current(|inner| inner.with_driver(|driver| driver.available_memory()))
}

/// Returns how the system itself uses a file, which opening it would not show: as a loop device or a swap area.
pub fn file_user(path: impl AsRef<Path>) -> Option<String> {
    with_current(|inner| inner.with_driver(|driver| driver.file_user(path.as_ref())))
}

/// Removes a file.
pub fn remove_file(path: impl AsRef<Path>) -> io::Result<()> {
    with_current(|inner| inner.with_driver(|driver| driver.remove_file(path.as_ref())))
}

/// Makes a directory's entries durable.
pub fn sync_dir(path: impl AsRef<Path>) -> io::Result<()> {
    with_current(|inner| inner.with_driver(|driver| driver.sync_dir(path.as_ref())))
}
