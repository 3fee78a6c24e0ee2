//! Making a store.

use std::path::Path;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, random, wall_clock, yield_now};

use crate::checkpoint::store_id;
use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, LogPosition, SLOTS};
use crate::format::superblock::{COPIES, FEATURES_COMPATIBLE_KNOWN, FEATURES_KNOWN, SEGMENTS_START, Superblock};
use crate::occupant::{self, Occupant};
use crate::store::{Store, open_file};

/// Fewest segments a store works with.
const SEGMENTS_MIN: u32 = 24;
/// Bytes allocated at a time.
const ALLOCATE_STEP: u64 = 64 << 20;

/// Options of [`Store::init`].
#[derive(Debug, Clone, Default)]
pub struct InitOptions {
    /// Bytes of the device to use; 0: all of a block device or of the file as it is.
    pub size: u64,
    /// Bytes a segment, a power of two from 64 KiB to 1 GiB; 0: by size.
    pub segment_size: u32,
    /// Overwrite what is there: a store, signatures of others, data.
    pub force: bool,
    /// Allocate all of the file, so that the file system beneath never lacks space for the store; not for a device.
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
        let (file, created) = match open_file(path, how).await {
            Err(error) if error.kind() == ErrorKind::NotFound => (open_file(path, how.create()).await?, true),
            opened => (opened?, false),
        };
        let made = make(&file, &options, &mut progress).await;
        if made.is_err() && created {
            // What was made for a store that is none.
            fs::remove_file(path).map_err(|error| Error::from_io(error, format!("removing {shown}")))?;
        }
        made
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
        let least = SEGMENTS_START + u64::from(SEGMENTS_MIN) * u64::from(segment_size);
        let text = format!(
            "a store of {size} bytes on {shown}: with segments of {segment_size} bytes it takes {least} to 2^20 segments"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(superblock)
}

fn segment_size_for(size: u64) -> u32 {
    (size / 2048).next_power_of_two().clamp(256 << 10, 32 << 20) as u32
}

/// Allocates the first `size` bytes of a file, without changing what it reads as or its length; on failure the file is as
/// long as before, with nothing allocated behind that.
async fn preallocate(file: &File, size: u64, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let shown = file.path().display();
    let failed = |error| Error::from_io(error, format!("allocating the space of {shown}"));
    let needed = size.saturating_sub(file.allocated_size().map_err(failed)?.unwrap_or(0));
    let space = file.file_system_space().map_err(failed)?;
    if let Some(space) = space.filter(|space| space.available < needed) {
        let text = format!("{shown} takes {needed} bytes more, and its file system has {} bytes free", space.available);
        return Err(Error::new(ErrorKind::NoSpace, text));
    }
    let before = file.size().map_err(failed)?;
    let mut at = 0;
    while at < size {
        let len = ALLOCATE_STEP.min(size - at);
        if let Err(error) = file.allocate(at, len).await {
            if let Err(error) = free_behind(file, before, (at + len).saturating_sub(before)).await {
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

/// Frees what a file of `end` bytes has allocated in the `len` bytes behind its end.
pub(crate) async fn free_behind(file: &File, end: u64, len: u64) -> std::io::Result<()> {
    // Some file systems free it with a hole, some with the length.
    let punched = if len > 0 { file.punch_hole(end, len).await } else { Ok(()) };
    file.set_size(end).and(punched)
}
