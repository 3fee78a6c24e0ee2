//! Making a store.

use std::io;
use std::ops::Range;
use std::path::Path;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, random, wall_clock, yield_now};

use crate::checkpoint::store_id;
use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, LogPosition, SLOTS};
use crate::format::superblock::{COPIES, FEATURES_COMPATIBLE_KNOWN, FEATURES_KNOWN, SEGMENTS_START, Superblock};
use crate::host::RESERVE_MAX;
use crate::occupant::{self, Occupant};
use crate::store::{Store, open_file};

/// Fewest segments a store works with.
const SEGMENTS_MIN: u32 = 24;
/// Bytes allocated at a time.
const ALLOCATE_STEP: u64 = 64 << 20;
/// Space that an allocated store leaves to others on its file system: a twentieth of it, but no more than this many bytes.
const LEFT_TO_OTHERS_MAX: u64 = 1 << 30;

/// Options of [`Store::init`].
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// Bytes of the device to use; 0: all of a block device or of the file as it is.
    pub size: u64,
    /// Bytes a segment, a power of two from 64 KiB to 1 GiB; 0: by size.
    pub segment_size: u32,
    /// Overwrite what is there: a store, signatures of others, data.
    pub force: bool,
    /// Allocate all of the file, so that others cannot take its space; not for a device.  Where a file system copies on
    /// write, overwriting may still need more.
    pub preallocate: bool,
}

impl Store {
    /// Makes a store: on a file (created if it is not there, `size` bytes, sparse) or a block device.
    ///
    /// # Errors
    /// `Exists` when there is a store already, or anything of others; `Corrupt` when it is a store that is damaged; `Busy`
    /// when somebody has it open, or the system uses it; `Invalid` for a size too small; `NoSpace` when all of the file is
    /// to be allocated and the file system has too little; `Unsupported` when that is asked of a device, or the file system
    /// cannot do it.  What is refused has changed nothing.
    pub async fn init(path: impl AsRef<Path>, options: InitOptions) -> Result<()> {
        Self::init_with_progress(path, options, |_, _| {}).await
    }

    /// Makes a store as [`init`](Self::init) does; `progress` is told (bytes allocated, bytes in all).
    ///
    /// # Errors
    /// As [`init`](Self::init).
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
            // What was made for a store that is none.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, "{shown}, which was created for a store, is left");
            }
        }
        made
    }
}

/// Opens a file, or creates it if there is none.  True when it was created here, and by nobody else: it may be removed again.
async fn open_or_create(path: &Path, how: OpenOptions) -> Result<(File, bool)> {
    let absent = match open_file(path, how).await {
        Err(error) if error.kind() == ErrorKind::NotFound => error,
        opened => return Ok((opened?, false)),
    };
    match File::open(path, how.create_new()) {
        Ok(file) => Ok((file, true)),
        // Another process creates it at the same time, or had its lock before this one; or it is a link.
        Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::WouldBlock) => {
            match open_file(path, how).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let text = format!("{} is a link to a file that is not there; name that file", path.display());
                    Err(Error::new(ErrorKind::Invalid, text))
                }
                opened => Ok((opened?, false)),
            }
        }
        // Its directory is missing.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(absent),
        Err(error) => Err(Error::from_io(error, format!("creating {}", path.display()))),
    }
}

async fn make(file: &File, options: &InitOptions, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let path = file.path();
    let shown = path.display();
    let failed = |error| Error::from_io(error, format!("making a store on {shown}"));
    let device = file.info().block_device;
    let (kind, found) = match occupant::look(file).await? {
        Occupant::Nothing => (None, String::new()),
        Occupant::Store => (Some(ErrorKind::Exists), "a Forebay store".to_owned()),
        Occupant::DamagedStore(why) => (Some(ErrorKind::Corrupt), format!("a damaged Forebay store ({why})")),
        Occupant::Foreign(found) => (Some(ErrorKind::Exists), found.join(", ")),
    };
    if let Some(kind) = kind.filter(|_| !options.force) {
        return Err(Error::new(kind, format!("{shown} holds {found}")));
    }
    let superblock = superblock(file, options)?;
    let size = superblock.device_size();
    if options.preallocate {
        preallocate(file, size, progress).await?;
    }
    // Nothing of what was there has been changed up to here.
    if kind.is_some() {
        tracing::warn!("overwriting {shown}, which holds {found}");
    }
    if !device {
        if !options.preallocate {
            // Cut first, so that nothing of an older store is taken for this one's.
            file.set_size(0).map_err(failed)?;
        }
        file.set_size(size).map_err(failed)?;
    }
    if kind.is_some() && (device || options.preallocate) {
        // Nobody shall take it for what it was: most signatures lie where a store writes nothing for long.
        let end = if device { file.info().size } else { size };
        let tail = end.saturating_sub(SEGMENTS_START) / BLOCK64 * BLOCK64;
        for (at, len) in [(0, SEGMENTS_START), (tail, end - tail)] {
            file.write_at(Buf::zeroed(len as usize), at).await.map_err(failed)?;
        }
    }
    let anchor = Anchor {
        store: store_id(&superblock.uuid),
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

/// Returns the superblock of a store that was asked for, if there can be one.
fn superblock(file: &File, options: &InitOptions) -> Result<Superblock> {
    let (info, shown) = (file.info(), file.path().display());
    if options.preallocate && info.block_device {
        let text = format!("{shown} is a device, where nothing is to be allocated");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let size = if options.size == 0 { info.size } else { options.size };
    if info.block_device && size > info.size {
        return Err(Error::new(ErrorKind::OutOfRange, format!("{shown} has {} bytes, not {size}", info.size)));
    }
    let segment_size = if options.segment_size == 0 { segment_size_for(size) } else { options.segment_size };
    let segment_count = size.saturating_sub(SEGMENTS_START) / u64::from(segment_size.max(1));
    let superblock = Superblock {
        features: FEATURES_KNOWN,
        features_compatible: FEATURES_COMPATIBLE_KNOWN,
        uuid: [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes"),
        created_s: wall_clock().as_secs(),
        segment_size,
        segment_count: u32::try_from(segment_count).unwrap_or(u32::MAX),
        data_devices: 1,
        parity_devices: 0,
    };
    if segment_count < u64::from(SEGMENTS_MIN) || Superblock::decode(&superblock.encode()).is_err() {
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

/// Allocates the first `size` bytes of a file, without changing what it reads as or its length; on failure the file is as
/// long as before, and its holes and what lies behind its end take no space.
async fn preallocate(file: &File, size: u64, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let shown = file.path().display();
    let failed = |error| Error::from_io(error, format!("allocating the space of {shown}"));
    let before = file.size().map_err(failed)?;
    let holes = allocatable_holes(file, before).await.map_err(failed)?;
    // Space behind `size` is of no use for it.
    let kept = size.min(before);
    let missing: u64 = holes.iter().map(|hole| hole.end.min(kept).saturating_sub(hole.start)).sum();
    let needed = size - kept + missing;
    if let Some(space) = file.file_system_space().map_err(failed)?.filter(|_| needed > 0) {
        let left = (space.total / 20).min(LEFT_TO_OTHERS_MAX);
        if space.available.saturating_sub(left) < needed {
            let text = format!(
                "{shown} takes {needed} bytes more, and its file system has {} bytes free, {left} of which are left to \
                 others",
                space.available
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
    }
    let mut at = 0;
    while at < size {
        let len = ALLOCATE_STEP.min(size - at);
        if let Err(error) = file.allocate(at, len).await {
            if let Err(error) = free_allocated(file, before, at + len, &holes).await {
                tracing::warn!(%error, "space that was allocated for {shown} is left");
            }
            return Err(failed(error));
        }
        at += len;
        progress(at, size);
        yield_now().await;
    }
    Ok(())
}

/// Returns the holes of a file of `end` bytes; none if all of it is allocated, for what is allocated and not yet written
/// looks like a hole.
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
        // It may be a reserve behind the end that makes it as much.
        free_behind(file, end, RESERVE_MAX).await?;
        if file.allocated_size()?.is_some_and(|allocated| allocated >= end) {
            holes.clear();
        }
    }
    Ok(holes)
}

/// Frees what was allocated below `to` in the holes of a file of `end` bytes, and behind its end.
async fn free_allocated(file: &File, end: u64, to: u64, holes: &[Range<u64>]) -> io::Result<()> {
    let mut freed = Ok(());
    for hole in holes.iter().filter(|hole| hole.start < to) {
        let punched = file.punch_hole(hole.start, hole.end.min(to) - hole.start).await;
        freed = freed.and(punched);
    }
    freed.and(free_behind(file, end, to.saturating_sub(end)).await)
}

/// Frees what a file of `end` bytes has allocated in the `len` bytes behind its end.
pub(crate) async fn free_behind(file: &File, end: u64, len: u64) -> io::Result<()> {
    // Some file systems free it with a hole, some with the length.
    let punched = if len > 0 { file.punch_hole(end, len).await } else { Ok(()) };
    file.set_size(end).and(punched)
}
