//! File operations of the operating system, common to both of its drivers.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::handles::Handles;
use super::os::{BLKDISCARD, BLKGETSIZE64, SECTOR_DEFAULT, c_path, check, fd_of, handle_of};
use super::{ByteRange, FileDriver, FileInfo, FileSystemSpace, Handle, OpenOptions};

/// Opens a file or block device.
pub(crate) fn open(path: &Path, options: OpenOptions) -> io::Result<(OwnedFd, FileInfo)> {
    let mut flags = libc::O_CLOEXEC | if options.write { libc::O_RDWR } else { libc::O_RDONLY };
    if options.create {
        flags |= libc::O_CREAT;
    }
    if options.create_new {
        flags |= libc::O_CREAT | libc::O_EXCL;
    }
    // On a block device O_EXCL without O_CREAT fails if the kernel uses the device (a mounted file system).
    let is_block = std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device());
    if is_block && options.lock && options.lock_range.is_none() && !options.create_new {
        flags = (flags & !libc::O_CREAT) | libc::O_EXCL;
    }
    let c = c_path(path)?;
    let open = |flags: i32| -> io::Result<OwnedFd> {
        loop {
            // SAFETY: `c` ends in a zero byte and lives through the call.
            match check(unsafe { libc::open(c.as_ptr(), flags, 0o644 as libc::c_uint) }) {
                // SAFETY: the descriptor is new and owned here.
                Ok(fd) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    };
    let mut direct = options.direct;
    let fd = if direct {
        match open(flags | libc::O_DIRECT) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                direct = false;
                // The first attempt may have created the file before it was refused.
                let again = if options.create_new { flags & !libc::O_EXCL } else { flags };
                open(again)?
            }
            other => other?,
        }
    } else {
        open(flags)?
    };
    if options.lock {
        lock(fd.as_raw_fd(), options.lock_range, options.write)?;
        if is_block && options.lock_range.is_some() {
            // Others have ranges open, so that the device cannot be kept from the system; but it must not use it already.
            drop(open(libc::O_CLOEXEC | libc::O_RDONLY | libc::O_EXCL)?);
        }
    }
    let stat = stat(fd.as_raw_fd())?;
    let kind = stat.st_mode & libc::S_IFMT;
    let block_device = kind == libc::S_IFBLK;
    if !block_device && kind != libc::S_IFREG {
        let text = format!("{}: neither a file nor a block device", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let sector = if block_device {
        logical_sector(fd.as_raw_fd())?
    } else {
        match direct_alignment(fd.as_raw_fd()) {
            // The file system accepts O_DIRECT at open, but reports that it does not support it on this file.
            Some(0) => {
                if direct {
                    // SAFETY: no pointers.
                    let now = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
                    // SAFETY: as above.
                    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, now & !libc::O_DIRECT) })?;
                    direct = false;
                }
                SECTOR_DEFAULT
            }
            Some(align) => align,
            None => device_sector(&stat).unwrap_or(SECTOR_DEFAULT),
        }
    };
    let size = file_size(fd.as_raw_fd())?;
    Ok((fd, FileInfo { size, block_device, sector, direct }))
}

/// Locks a file, or a range of it. Openers of ranges share the lock of the whole file.
fn lock(fd: RawFd, range: Option<ByteRange>, write: bool) -> io::Result<()> {
    let whole = if range.is_none() { libc::LOCK_EX } else { libc::LOCK_SH };
    // SAFETY: no pointers.
    check(unsafe { libc::flock(fd, whole | libc::LOCK_NB) })?;
    let Some(range) = range else { return Ok(()) };
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    // SAFETY: all zeroes is a valid flock.
    let mut lock: libc::flock = unsafe { mem::zeroed() };
    lock.l_type = if write { libc::F_WRLCK } else { libc::F_RDLCK } as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = range.offset.try_into().map_err(too_large)?;
    lock.l_len = range.len.try_into().map_err(too_large)?;
    // SAFETY: the call reads one flock.
    match check(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) }) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
        locked => locked.map(drop),
    }
}

/// Returns the number of requests that a block device's queue holds.
fn queue_depth(fd: RawFd) -> Option<u32> {
    let stat = stat(fd).ok().filter(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFBLK)?;
    let base = format!("/sys/dev/block/{}:{}", libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
    queue_attribute(&base, "nr_requests")
}

/// Reads an attribute of the queue of a device in sysfs. A partition uses the queue of its disk.
fn queue_attribute(base: &str, name: &str) -> Option<u32> {
    let queues = ["queue", "../queue"];
    queues.iter().find_map(|queue| std::fs::read_to_string(format!("{base}/{queue}/{name}")).ok()?.trim().parse().ok())
}

fn stat(fd: RawFd) -> io::Result<libc::stat> {
    // SAFETY: all zeroes is a valid stat, and the call fills it.
    unsafe {
        let mut stat: libc::stat = mem::zeroed();
        check(libc::fstat(fd, &mut stat))?;
        Ok(stat)
    }
}

/// Returns a block device's logical sector size in bytes.
fn logical_sector(fd: RawFd) -> io::Result<u32> {
    let mut size: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int.
    check(unsafe { libc::ioctl(fd, libc::BLKSSZGET, &mut size) })?;
    u32::try_from(size).map_err(|_| io::Error::other("a device with a negative sector size"))
}

/// Returns the direct I/O alignment of a file's offsets in bytes, from statx; 0 when direct I/O is not supported.
/// `None` where the kernel (before 6.1) or the file system does not report it.
fn direct_alignment(fd: RawFd) -> Option<u32> {
    // SAFETY: all zeroes is a valid statx; the empty path with AT_EMPTY_PATH means the descriptor itself.
    unsafe {
        let mut statx: libc::statx = mem::zeroed();
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT;
        check(libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, &mut statx)).ok()?;
        (statx.stx_mask & libc::STATX_DIOALIGN != 0).then_some(statx.stx_dio_offset_align)
    }
}

/// Returns the logical sector size in bytes of the device under a file's file system, where there is one such device.
fn device_sector(stat: &libc::stat) -> Option<u32> {
    let base = format!("/sys/dev/block/{}:{}", libc::major(stat.st_dev), libc::minor(stat.st_dev));
    queue_attribute(&base, "logical_block_size")
}

pub(crate) fn file_size(fd: RawFd) -> io::Result<u64> {
    let stat = stat(fd)?;
    if stat.st_mode & libc::S_IFMT == libc::S_IFBLK {
        let mut size = 0u64;
        // SAFETY: BLKGETSIZE64 writes eight bytes.
        check(unsafe { libc::ioctl(fd, BLKGETSIZE64, &mut size) })?;
        return Ok(size);
    }
    u64::try_from(stat.st_size).map_err(|_| io::Error::other("a file of negative length"))
}

pub(crate) fn set_file_size(fd: RawFd, size: u64) -> io::Result<()> {
    let size = libc::off_t::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers.
    check(unsafe { libc::ftruncate(fd, size) }).map(drop)
}

/// Returns the bytes allocated to a file in its file system; `None` for a device.
pub(crate) fn allocated_size(fd: RawFd) -> io::Result<Option<u64>> {
    const UNIT: u64 = 512;
    let stat = stat(fd)?;
    let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
    Ok((stat.st_mode & libc::S_IFMT == libc::S_IFREG).then_some(blocks * UNIT))
}

/// Returns the offset of the first byte at or after `from` that may hold data.
pub(crate) fn next_data(fd: RawFd, from: u64) -> io::Result<Option<u64>> {
    let at = libc::off_t::try_from(from).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers; the file position is not used otherwise.
    let found = unsafe { libc::lseek(fd, at, libc::SEEK_DATA) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            // Devices and some file systems do not support holes.
            error if error.raw_os_error() == Some(libc::EINVAL) => Ok(Some(from)),
            error => Err(error),
        },
    }
}

/// Returns the offset of the first byte at or after `from` that lies in a hole or is the end of the file.
fn next_hole(fd: RawFd, from: u64) -> io::Result<Option<u64>> {
    let at = libc::off_t::try_from(from).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers; the file position is not used otherwise.
    let found = unsafe { libc::lseek(fd, at, libc::SEEK_HOLE) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            // Past the end; devices and some file systems do not support holes.
            error if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EINVAL)) => Ok(None),
            error => Err(error),
        },
    }
}

/// Returns the bytes of memory that `/proc/meminfo` reports as available.
fn available_memory(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the space of the file system that holds `path`.
fn file_system_space(path: &Path) -> io::Result<FileSystemSpace> {
    let c = c_path(if path.as_os_str().is_empty() { Path::new(".") } else { path })?;
    // SAFETY: the path ends in a zero byte, and the call writes one statvfs.
    space(|found| unsafe { libc::statvfs(c.as_ptr(), found) })
}

/// Returns the space of the file system that holds an open file.
fn space_beneath(fd: RawFd) -> io::Result<FileSystemSpace> {
    // SAFETY: the call writes one statvfs.
    space(|found| unsafe { libc::fstatvfs(fd, found) })
}

fn space(ask: impl FnOnce(*mut libc::statvfs) -> libc::c_int) -> io::Result<FileSystemSpace> {
    // SAFETY: all zeroes is a valid statvfs.
    let mut found: libc::statvfs = unsafe { mem::zeroed() };
    check(ask(&raw mut found))?;
    let unit = found.f_frsize;
    Ok(FileSystemSpace { total: found.f_blocks * unit, available: found.f_bavail * unit })
}

/// Returns how the system uses a file, which opening it would not show: as a loop device or a swap area.
fn file_user(path: &Path) -> Option<String> {
    let file = path.canonicalize().ok()?;
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().skip(1).any(|line| line.split_whitespace().next() == file.to_str()) {
        return Some("as a swap area".into());
    }
    let loops = std::fs::read_dir("/sys/block").ok()?.filter_map(Result::ok);
    loops.into_iter().find_map(|device| {
        let backing = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let name = device.file_name();
        (Path::new(backing.trim_end_matches('\n')) == file).then(|| format!("by /dev/{}", name.display()))
    })
}

/// Operating system driver: its files are descriptors, so all drivers share the file operations.
pub(crate) trait OsDriver {
    /// Returns the driver's open descriptors.
    fn handles(&mut self) -> &mut Handles;
}

impl<D: OsDriver> FileDriver for D {
    fn open(&mut self, path: &Path, options: OpenOptions) -> io::Result<(Handle, FileInfo)> {
        let (fd, info) = open(path, options)?;
        let fd = fd.into_raw_fd();
        self.handles().add_file(fd, &info);
        Ok((handle_of(fd), info))
    }

    fn file_size(&mut self, file: Handle) -> io::Result<u64> {
        file_size(fd_of(file))
    }

    fn set_file_size(&mut self, file: Handle, size: u64) -> io::Result<()> {
        set_file_size(fd_of(file), size)
    }

    fn allocated_size(&mut self, file: Handle) -> io::Result<Option<u64>> {
        allocated_size(fd_of(file))
    }

    fn next_data(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>> {
        next_data(fd_of(file), from)
    }

    fn next_hole(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>> {
        next_hole(fd_of(file), from)
    }

    fn queue_depth(&mut self, file: Handle) -> Option<u32> {
        queue_depth(fd_of(file))
    }

    fn file_system_space(&mut self, path: &Path) -> io::Result<Option<FileSystemSpace>> {
        file_system_space(path).map(Some)
    }

    fn space_beneath(&mut self, file: Handle) -> io::Result<Option<FileSystemSpace>> {
        space_beneath(fd_of(file)).map(Some)
    }

    fn available_memory(&mut self) -> Option<u64> {
        available_memory(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn file_user(&mut self, path: &Path) -> Option<String> {
        file_user(path)
    }

    fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn sync_dir(&mut self, path: &Path) -> io::Result<()> {
        sync_dir(path)
    }
}

pub(crate) fn sync_dir(path: &Path) -> io::Result<()> {
    // A bare file name's parent is the empty path, which means the current directory.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    std::fs::File::open(path)?.sync_all()
}

/// Discards a range of a block device; blocks the thread.
pub(crate) fn discard(fd: RawFd, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: BLKDISCARD reads two u64.
    check(unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) }).map(drop)
}

/// Mode of fallocate for allocating a range: the size of the file stays.
pub(crate) const ALLOCATE_MODE: i32 = libc::FALLOC_FL_KEEP_SIZE;

/// Mode of fallocate for deallocating a range.
pub(crate) const PUNCH_MODE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
