//! Creation of a store.

use std::io;
use std::ops::Range;
use std::path::Path;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, random, wall_clock, yield_now};

use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, LogPosition, SLOTS};
use crate::format::superblock::{COPIES, SEGMENTS_START, StoreSuperblock};
use crate::host::RESERVE_MAX;
use crate::occupant::{self, Occupant};
use crate::store::{Store, open_file};

/// Minimum number of segments of a store.
pub(crate) const SEGMENTS_MIN: u32 = 24;
/// Bytes allocated at a time.
pub(crate) const ALLOCATE_STEP: u64 = 64 << 20;
/// Maximum space in bytes that preallocation leaves free in the file system for other users; the actual value is a
/// twentieth of its size.
const LEFT_TO_OTHERS_MAX: u64 = 1 << 30;

/// Options of [`Store::init`].
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// Bytes of the device to use; 0 for all of a block device, or the current size of a file.
    pub size: u64,
    /// Segment size in bytes, a power of two from 64 KiB to 1 GiB; 0 to derive it from the store size.
    pub segment_size: u32,
    /// Set to overwrite existing content: a store, signatures of other formats, data.
    pub force: bool,
    /// Set to allocate the whole file, so that other users cannot take its space; not for devices.  On a copy-on-write
    /// file system, overwriting may still need more space.
    pub preallocate: bool,
}

impl Store {
    /// Creates a store in a file (created if missing, with `size` bytes, sparse) or on a block device.
    ///
    /// # Errors
    /// `Exists` if there already is a store, or any other content; `Corrupt` if there is a damaged store; `Busy` if it
    /// is open elsewhere or used by the system; `Invalid` for a size that is too small; `NoSpace` if the file is to be
    /// preallocated and the file system has too little space; `Unsupported` if preallocation is requested for a device,
    /// or not supported by the file system.  A rejected request changes nothing.
    pub async fn init(path: impl AsRef<Path>, options: InitOptions) -> Result<()> {
        Self::init_with_progress(path, options, |_, _| {}).await
    }

    /// Creates a store like [`init`](Self::init); calls `progress` with (bytes allocated, bytes in total).
    ///
    /// # Errors
    /// Same errors as [`init`](Self::init).
    pub async fn init_with_progress(
        path: impl AsRef<Path>,
        options: InitOptions,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<()> {
        let path = path.as_ref();
        let shown = path.display();
        if let Some(user) = fs::file_user(path) {
            return Err(Error::new(ErrorKind::Busy, format!("{shown} is in use: {user}")));
        }
        let how = OpenOptions::read_write().direct().lock();
        let (file, created) = open_or_create(path, how).await?;
        let made = make(&file, &options, &mut progress).await;
        if made.is_err() && created {
            // Remove the file that was created for the failed store.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, "cannot remove {shown}, which was created for a store that could not be made");
            }
        }
        made
    }
}

/// Opens a file, or creates it if it does not exist.  Returns true if this call created it, so that it may be removed
/// again.
pub(crate) async fn open_or_create(path: &Path, how: OpenOptions) -> Result<(File, bool)> {
    let absent = match open_file(path, how).await {
        Err(error) if error.kind() == ErrorKind::NotFound => error,
        opened => return Ok((opened?, false)),
    };
    match File::open(path, how.create_new()) {
        Ok(file) => Ok((file, true)),
        // Another process creates the file at the same time, or locked it first; or it is a symbolic link.
        Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::WouldBlock) => {
            match open_file(path, how).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let text = format!("{} is a link to a file that is not there; name that file", path.display());
                    Err(Error::new(ErrorKind::Invalid, text))
                }
                opened => Ok((opened?, false)),
            }
        }
        // The parent directory does not exist.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(absent),
        Err(error) => Err(Error::from_io(error, format!("creating {}", path.display()))),
    }
}

/// Returns a description of what a file or device holds, which may be overwritten; `None` if it holds nothing.
///
/// # Errors
/// `Exists` or `Corrupt` if it holds something, unless `force`.
pub(crate) async fn reject_occupied(file: &File, force: bool) -> Result<Option<String>> {
    let (kind, found) = match occupant::look(file).await? {
        Occupant::Nothing => return Ok(None),
        Occupant::Store => (ErrorKind::Exists, "a Forebay store".to_owned()),
        Occupant::DamagedStore(why) => (ErrorKind::Corrupt, format!("a damaged Forebay store ({why})")),
        Occupant::Foreign(found) => (ErrorKind::Exists, found.join(", ")),
    };
    if force { Ok(Some(found)) } else { Err(Error::new(kind, format!("{} holds {found}", file.path().display()))) }
}

/// Erases old signatures at the beginning and the end of a file or device of `end` bytes, most of which are in areas that
/// a store does not write soon.
pub(crate) async fn erase_signatures(file: &File, end: u64) -> Result<()> {
    let failed = |error| Error::from_io(error, format!("making a store on {}", file.path().display()));
    let tail = end.saturating_sub(SEGMENTS_START) / BLOCK64 * BLOCK64;
    for (at, len) in [(0, SEGMENTS_START), (tail, end - tail)] {
        file.write_at(Buf::zeroed(len as usize), at).await.map_err(failed)?;
    }
    Ok(())
}

async fn make(file: &File, options: &InitOptions, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let path = file.path();
    let shown = path.display();
    let failed = |error| Error::from_io(error, format!("making a store on {shown}"));
    let device = file.info().block_device;
    let occupied = reject_occupied(file, options.force).await?;
    let superblock = superblock(file, options)?;
    let size = superblock.device_size();
    if options.preallocate {
        preallocate(file, size, progress).await?;
    }
    // The existing content is unchanged up to here.
    if let Some(found) = &occupied {
        tracing::warn!("overwriting {shown}, which holds {found}");
    }
    if !device {
        if !options.preallocate {
            // Truncate first, so that remains of an older store are not taken for this one's.
            file.set_size(0).map_err(failed)?;
        }
        file.set_size(size).map_err(failed)?;
    }
    if occupied.is_some() && (device || options.preallocate) {
        erase_signatures(file, if device { file.info().size } else { size }).await?;
    }
    let anchor = Anchor {
        store: superblock.store_number(),
        redo: LogPosition { block: SEGMENTS_START / BLOCK64, seq: 1 },
        next_oid: 1,
        clean: true,
        ..Anchor::default()
    };
    for at in SLOTS.into_iter().flatten() {
        file.write_at(Buf::copy_of(&anchor.encode()), at).await.map_err(failed)?;
    }
    file.sync_data().await.map_err(failed)?;
    for at in COPIES {
        file.write_at(Buf::copy_of(&superblock.encode()), at).await.map_err(failed)?;
    }
    file.sync_data().await.map_err(failed)?;
    if let Some(parent) = path.parent().filter(|_| !device) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        fs::sync_dir(parent).map_err(failed)?;
    }
    Ok(())
}

/// Returns the superblock for the requested store, if it is valid.
fn superblock(file: &File, options: &InitOptions) -> Result<StoreSuperblock> {
    let (info, shown) = (file.info(), file.path().display());
    if options.preallocate && info.block_device {
        let text = format!("{shown} is a device, which cannot be preallocated");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let size = if options.size == 0 { info.size } else { options.size };
    if info.block_device && size > info.size {
        return Err(Error::new(ErrorKind::OutOfRange, format!("{shown} has {} bytes, not {size}", info.size)));
    }
    let segment_size = if options.segment_size == 0 { segment_size_for(size) } else { options.segment_size };
    let segment_count = size.saturating_sub(SEGMENTS_START) / u64::from(segment_size.max(1));
    let superblock = StoreSuperblock {
        features: 0,
        features_compatible: 0,
        uuid: [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes"),
        created_s: wall_clock().as_secs(),
        segment_size,
        segment_count: u32::try_from(segment_count).unwrap_or(u32::MAX),
        data_devices: 1,
        parity_devices: 0,
        device: None,
    };
    if segment_count < u64::from(SEGMENTS_MIN) || StoreSuperblock::decode(&superblock.encode()).is_err() {
        let of = |segments: u64| SEGMENTS_START + segments * u64::from(segment_size);
        let (least, most) = (of(SEGMENTS_MIN.into()), of(1 << 20));
        let text = format!(
            "{shown}: a store of {size} bytes; with segments of {segment_size} bytes it has from {least} to {most} bytes"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(superblock)
}

fn segment_size_for(size: u64) -> u32 {
    (size / 2048).next_power_of_two().clamp(256 << 10, 32 << 20) as u32
}

/// Preallocates the first `size` bytes of a file without changing its content or length. On failure, the file length is
/// restored, and its holes and the space beyond its end are deallocated.
pub(crate) async fn preallocate(file: &File, size: u64, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let shown = file.path().display();
    let failed = |error| Error::from_io(error, format!("allocating the space of {shown}"));
    let before = file.size().map_err(failed)?;
    let holes = allocatable_holes(file, before).await.map_err(failed)?;
    // Existing space beyond `size` does not count.
    let kept = size.min(before);
    let missing: u64 = holes.iter().map(|hole| hole.end.min(kept).saturating_sub(hole.start)).sum();
    let needed = size - kept + missing;
    if needed > 0 {
        check_file_system(file, needed)?;
    }
    let mut at = 0;
    while at < size {
        let len = ALLOCATE_STEP.min(size - at);
        if let Err(error) = file.allocate(at, len).await {
            if let Err(error) = free_allocated(file, before, at + len, &holes).await {
                tracing::warn!(%error, "cannot free the space that was allocated for {shown}");
            }
            return Err(failed(error));
        }
        at += len;
        progress(at, size);
        yield_now().await;
    }
    Ok(())
}

/// Fails unless the file system of a file has `needed` bytes, and leaves some to others.
///
/// # Errors
/// `NoSpace`; errors of the file system.
pub(crate) fn check_file_system(file: &File, needed: u64) -> Result<()> {
    let shown = file.path().display();
    let failed = |error| Error::from_io(error, format!("asking for the space of the file system of {shown}"));
    let Some(space) = file.file_system_space().map_err(failed)? else { return Ok(()) };
    let left = (space.total / 20).min(LEFT_TO_OTHERS_MAX);
    if space.available.saturating_sub(left) < needed {
        let text = format!(
            "{shown} takes {needed} bytes more, and its file system has {} bytes free, {left} of which are left to others",
            space.available
        );
        return Err(Error::new(ErrorKind::NoSpace, text));
    }
    Ok(())
}

/// Returns the holes of a file of `end` bytes; none if the whole file is allocated, because allocated but unwritten
/// space also looks like a hole.
async fn allocatable_holes(file: &File, end: u64) -> io::Result<Vec<Range<u64>>> {
    let mut holes = Vec::new();
    let mut at = 0;
    while at < end {
        let data = file.next_data(at)?.unwrap_or(end).min(end);
        if data > at {
            holes.push(at..data);
        }
        at = if data < end { file.next_hole(data)?.unwrap_or(end).clamp(data + 1, end) } else { end };
        yield_now().await;
    }
    if !holes.is_empty() && file.allocated_size()?.is_some_and(|allocated| allocated >= end) {
        // A reserve beyond the end may be included in the allocated size.
        free_behind(file, end, RESERVE_MAX).await?;
        if file.allocated_size()?.is_some_and(|allocated| allocated >= end) {
            holes.clear();
        }
    }
    Ok(holes)
}

/// Deallocates space below `to` in the former holes of a file of `end` bytes, and beyond its end.
async fn free_allocated(file: &File, end: u64, to: u64, holes: &[Range<u64>]) -> io::Result<()> {
    let mut freed = Ok(());
    for hole in holes.iter().filter(|hole| hole.start < to) {
        let punched = file.punch_hole(hole.start, hole.end.min(to) - hole.start).await;
        freed = freed.and(punched);
    }
    freed.and(free_behind(file, end, to.saturating_sub(end)).await)
}

/// Deallocates `len` bytes beyond the end of a file of `end` bytes.
pub(crate) async fn free_behind(file: &File, end: u64, len: u64) -> io::Result<()> {
    // Depending on the file system, punching a hole or setting the length deallocates the space.
    let punched = if len > 0 { file.punch_hole(end, len).await } else { Ok(()) };
    file.set_size(end).and(punched)
}
