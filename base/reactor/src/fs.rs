//! Files and block devices.

use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use crate::buf::{BufList, BufMut};
use crate::driver::{ByteRange, FileInfo, FileSystemSpace, Handle, Op, OpenOptions};
use crate::executor::{ReactorState, with_current};
use crate::ops::OpFuture;
use crate::queue_limit::QueueLimit;
use crate::time::{now, sleep};

/// Longest time that an opener waits for a file lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);
/// Retry interval while waiting for a file lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Open file or block device, or a named range of one.  Clones share it; it is closed with the last clone.
#[derive(Clone)]
pub struct File {
    shared: Rc<Shared>,
}

/// Named range of a file or block device, which [`File::open_range`] opens like a device of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRange {
    /// Name, shown behind the path: `PATH#NAME`.
    pub name: String,
    /// Place in the file.
    pub bytes: ByteRange,
    /// Maximum number of requests in flight.
    pub requests: usize,
}

struct Shared {
    inner: Rc<ReactorState>,
    handle: Handle,
    info: FileInfo,
    path: PathBuf,
    range: Option<OpenRange>,
}

/// Range that a file is limited to.
struct OpenRange {
    bytes: ByteRange,
    /// Set for a range of a block device, unset for one of a file.
    on_device: bool,
    limit: Rc<QueueLimit>,
}

impl OpenRange {
    /// Returns the offset in the whole file of `len` bytes at `offset`.
    ///
    /// # Errors
    /// `InvalidInput` if they are not all within the range.
    fn place(&self, offset: u64, len: u64) -> io::Result<u64> {
        match offset.checked_add(len).is_some_and(|end| end <= self.bytes.len) {
            true => Ok(self.bytes.offset + offset),
            false => {
                let text = format!("{len} bytes at {offset} of a range of {} bytes", self.bytes.len);
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
        }
    }

    /// Returns an offset in the whole file as one in the range; `None` past the end.
    fn offset_of(&self, place: u64) -> Option<u64> {
        place.checked_sub(self.bytes.offset).filter(|&offset| offset < self.bytes.len)
    }
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
        Ok(Self { shared: Rc::new(Shared { inner, handle, info, path: path.to_owned(), range: None }) })
    }

    /// Opens a range of the file or block device at `path` as a device of fixed size.  A lock is taken on the range only.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before the range does; otherwise as [`open`](Self::open).
    pub fn open_range(path: impl AsRef<Path>, range: &FileRange, options: OpenOptions) -> io::Result<Self> {
        let path = path.as_ref();
        let inner = with_current(Rc::clone);
        let options = OpenOptions { lock_range: Some(range.bytes), ..options };
        let (handle, info) = inner.with_driver(|driver| driver.open(path, options))?;
        let mut shown = path.as_os_str().to_owned();
        shown.push(format!("#{}", range.name));
        let open = OpenRange {
            bytes: range.bytes,
            on_device: info.block_device,
            limit: Rc::new(QueueLimit::new(range.requests)),
        };
        let size = info.size;
        let info = FileInfo { size: range.bytes.len, block_device: true, ..info };
        let file = Self { shared: Rc::new(Shared { inner, handle, info, path: shown.into(), range: Some(open) }) };
        if range.bytes.offset.checked_add(range.bytes.len).is_none_or(|end| end > size) {
            let text = format!("{}: {} has only {size} bytes", file.path().display(), path.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        Ok(file)
    }

    /// Opens `path`, retrying for up to 3 s while the file is locked by another process, if `options` ask for the lock.
    /// A killed process is gone before the kernel has closed its files: in-flight operations of its ring hold them, and
    /// the lock with them, until they have completed.
    ///
    /// # Errors
    /// `WouldBlock` when another process still holds the lock after that time; otherwise as [`open`](Self::open).
    pub async fn open_when_free(path: impl AsRef<Path>, options: OpenOptions) -> io::Result<Self> {
        open_patiently(|| Self::open(path.as_ref(), options), &[io::ErrorKind::WouldBlock]).await
    }

    /// Opens a range of the file or block device at `path` as [`open_when_free`](Self::open_when_free) opens the whole.
    ///
    /// # Errors
    /// `WouldBlock` when another process has locked the whole, or a part of the range; `ResourceBusy` when the system uses
    /// the device; otherwise as [`open_range`](Self::open_range).
    pub async fn open_range_when_free(
        path: impl AsRef<Path>,
        range: &FileRange,
        options: OpenOptions,
    ) -> io::Result<Self> {
        // Whether the system uses a device is found out by using it for a moment, which others may see.
        let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::ResourceBusy];
        open_patiently(|| Self::open_range(path.as_ref(), range, options), &kinds).await
    }

    /// Returns the file's properties as of opening.
    pub fn info(&self) -> FileInfo {
        self.shared.info
    }

    /// Returns the path that was opened; `PATH#NAME` for a range.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Returns whether this is a named range.
    pub fn is_range(&self) -> bool {
        self.shared.range.is_some()
    }

    /// Returns the current size in bytes.
    pub fn size(&self) -> io::Result<u64> {
        if let Some(range) = &self.shared.range {
            return Ok(range.bytes.len);
        }
        self.shared.inner.with_driver(|driver| driver.file_size(self.shared.handle))
    }

    /// Sets the size in bytes.
    ///
    /// # Errors
    /// `Unsupported` for another size than that of a range.
    pub fn set_size(&self, size: u64) -> io::Result<()> {
        if let Some(range) = &self.shared.range {
            if size == range.bytes.len {
                return Ok(());
            }
            let text = format!("{} is a range of {} bytes, not {size}", self.path().display(), range.bytes.len);
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        self.shared.inner.with_driver(|driver| driver.set_file_size(self.shared.handle, size))
    }

    /// Returns the number of requests that the device's queue holds; `None` for a file, and where that is unknown.
    pub fn queue_depth(&self) -> Option<u32> {
        self.shared.inner.with_driver(|driver| driver.queue_depth(self.shared.handle))
    }

    /// Returns the bytes currently allocated in the file system; `None` for a device or a range.
    pub fn allocated_size(&self) -> io::Result<Option<u64>> {
        if self.shared.range.is_some() {
            return Ok(None);
        }
        self.shared.inner.with_driver(|driver| driver.allocated_size(self.shared.handle))
    }

    /// Returns the space of the file system that holds the file; `None` where there is no limit, and for a range.
    pub fn file_system_space(&self) -> io::Result<Option<FileSystemSpace>> {
        if self.shared.range.is_some() {
            return Ok(None);
        }
        self.shared.inner.with_driver(|driver| driver.space_beneath(self.shared.handle))
    }

    /// Returns the offset of the first byte at or after `from` that may hold data; `None` when only a hole follows.
    pub fn next_data(&self, from: u64) -> io::Result<Option<u64>> {
        let find = |from| self.shared.inner.with_driver(|driver| driver.next_data(self.shared.handle, from));
        match &self.shared.range {
            None => find(from),
            Some(range) if from >= range.bytes.len => Ok(None),
            Some(range) => Ok(find(range.bytes.offset + from)?.and_then(|place| range.offset_of(place))),
        }
    }

    /// Returns the offset of the first byte at or after `from` that lies in a hole or is the end of the file; `None`
    /// where that is unknown, and past the end.
    pub fn next_hole(&self, from: u64) -> io::Result<Option<u64>> {
        let find = |from| self.shared.inner.with_driver(|driver| driver.next_hole(self.shared.handle, from));
        match &self.shared.range {
            None => find(from),
            Some(range) if from >= range.bytes.len => Ok(None),
            Some(range) => {
                let hole = find(range.bytes.offset + from)?;
                Ok(hole.map(|place| range.offset_of(place).unwrap_or(range.bytes.len)))
            }
        }
    }

    /// Reads into the buffer's spare space from `offset`; short only at the end of the file.  Returns the buffer in
    /// either case.
    pub async fn read_at(&self, mut buf: BufMut, mut offset: u64) -> (io::Result<usize>, BufMut) {
        let file = self.shared.handle;
        if let Some(range) = &self.shared.range {
            let left = range.bytes.len.saturating_sub(offset);
            if left == 0 {
                return (Ok(0), buf);
            }
            if left < buf.spare() as u64 {
                let capacity = buf.len() + left as usize;
                buf = buf.limited(capacity);
            }
            offset += range.bytes.offset;
        }
        let done = self.start(Op::Read { file, offset, buf }).await;
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
        let offset = self.place(offset, bufs.len() as u64)?;
        self.start(Op::Write { file: self.shared.handle, offset, bufs, durable }).await.result.map(drop)
    }

    /// Starts an operation; on a range, once its limit admits it.
    fn start(&self, op: Op) -> OpFuture {
        match &self.shared.range {
            None => self.shared.inner.start_op(op),
            Some(range) => self.shared.inner.start_limited_op(op, &range.limit),
        }
    }

    /// Returns where `len` bytes at `offset` are in the whole file.
    ///
    /// # Errors
    /// `InvalidInput` if they are not all within the range.
    fn place(&self, offset: u64, len: u64) -> io::Result<u64> {
        self.shared.range.as_ref().map_or(Ok(offset), |range| range.place(offset, len))
    }

    /// Makes every completed write durable.
    pub async fn sync_data(&self) -> io::Result<()> {
        self.start(Op::Sync { file: self.shared.handle }).await.result.map(drop)
    }

    /// Allocates a range, also past the end of the file, without changing content or size.
    ///
    /// # Errors
    /// `StorageFull`; `Unsupported` where the file system cannot do it.
    pub async fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let offset = self.place(offset, len)?;
        self.start(Op::Allocate { file: self.shared.handle, offset, len }).await.result.map(drop)
    }

    /// Deallocates a range, returning its space to the file system or device.  Has no effect on a named range of a file,
    /// which keeps its space, as nothing else could use it.
    pub async fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        let offset = self.place(offset, len)?;
        if self.shared.range.as_ref().is_some_and(|range| !range.on_device) {
            return Ok(());
        }
        self.start(Op::Punch { file: self.shared.handle, offset, len }).await.result.map(drop)
    }
}

/// Opens a file, retrying for up to 3 s while that fails with one of these kinds of errors.
async fn open_patiently(open: impl Fn() -> io::Result<File>, kinds: &[io::ErrorKind]) -> io::Result<File> {
    let deadline = now() + LOCK_PATIENCE;
    loop {
        match open() {
            Err(error) if kinds.contains(&error.kind()) && now() < deadline => sleep(LOCK_RETRY).await,
            result => return result,
        }
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

/// Sets the permissions of a file or socket: the lower nine bits of its mode.  Symbolic links are not followed.
///
/// # Errors
/// Errors of the system; one of them for a symbolic link.
pub fn set_mode(path: impl AsRef<Path>, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)?;
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(same, std::fs::Permissions::from_mode(mode & 0o777))
}

/// Gives a file or socket to another user or group; `None` leaves either as it is.  Of a symbolic link, the link is given.
///
/// # Errors
/// Errors of the system; `PermissionDenied` for a process without that right.
pub fn set_owner(path: impl AsRef<Path>, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
    if user.is_none() && group.is_none() { Ok(()) } else { std::os::unix::fs::lchown(path, user, group) }
}
