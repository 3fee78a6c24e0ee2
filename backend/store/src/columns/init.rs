//! Creation of a store on several devices.

use std::path::{Path, PathBuf};

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, random, wall_clock};

use super::code::RowCode;
use super::places::plan_groups;
use crate::features::write_superblock;
use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, LogPosition, SLOTS};
use crate::format::devices::{DEVICES_MAX, DeviceRecord, DeviceTable, PLACES, RecordedState};
use crate::format::superblock::{DeviceIdentity, FEATURE_DEVICES, SEGMENTS_START, StoreSuperblock};
use crate::init::{SEGMENTS_MIN, erase_signatures, open_or_create, preallocate, reject_occupied};

/// Bounds of the length of a column in bytes.
const COLUMN_MIN: u64 = 64 << 10;
const COLUMN_MAX: u64 = 16 << 20;
/// Number of segments for which the length of a column is chosen.
const SEGMENTS_WANTED: u64 = 2048;

/// Options of [`Store::init_devices`](crate::Store::init_devices).
#[derive(Debug, Clone, Default)]
pub struct DeviceSetOptions {
    /// Data columns (k): 1 for mirrors.
    pub data: usize,
    /// Parity columns (m), or additional copies: devices that may be lost.
    pub parity: usize,
    /// Bytes of each device to use; 0 for all of a block device, or the current size of a file.
    pub size: u64,
    /// Length of a column in bytes, a power of two from 64 KiB to 16 MiB; 0 to derive it from the sizes.
    pub column_size: u64,
    /// Set to overwrite existing content.
    pub force: bool,
}

/// Device of a store that is being created.
struct NewDevice {
    path: PathBuf,
    file: File,
    created: bool,
    /// Set if existing content is overwritten.
    occupied: bool,
    size: u64,
}

/// Creates a store on several devices; calls `progress` with (bytes allocated, bytes in total).  Returns its UUID.
///
/// # Errors
/// `Invalid` for a number of columns or devices, or sizes, that no store has; otherwise as for one device. A rejected
/// request changes nothing, but that a file may have been truncated.
pub async fn init_devices(
    paths: &[PathBuf],
    options: &DeviceSetOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<[u8; 16]> {
    let columns = options.data + options.parity;
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    if options.data == 0 || columns < 2 {
        return invalid(format!(
            "{}+{} columns: a store on several devices has two at least",
            options.data, options.parity
        ));
    }
    RowCode::new(options.data, options.parity)?;
    if paths.len() < columns || paths.len() > DEVICES_MAX {
        return invalid(format!(
            "{}+{} needs {columns} devices at least, and takes {DEVICES_MAX} at most; {} are named",
            options.data,
            options.parity,
            paths.len()
        ));
    }
    let mut devices = Vec::new();
    let made = create(paths, options, &mut devices, &mut progress).await;
    if made.is_err() {
        for device in devices.iter().filter(|device| device.created) {
            if let Err(error) = fs::remove_file(&device.path) {
                tracing::warn!(%error, "cannot remove {}, which was created for a store", device.path.display());
            }
        }
    }
    made
}

async fn create(
    paths: &[PathBuf],
    options: &DeviceSetOptions,
    devices: &mut Vec<NewDevice>,
    progress: &mut impl FnMut(u64, u64),
) -> Result<[u8; 16]> {
    for path in paths {
        devices.push(open_new(path, options.size).await?);
        let device = devices.last_mut().expect("pushed");
        device.occupied = reject_occupied(&device.file, options.force).await?.is_some();
    }
    let (superblock, table) = layout(devices, options)?;
    let total: u64 = devices.iter().map(|device| device.size).sum();
    let mut done = 0;
    for device in devices.iter() {
        prepare(device, |at| progress(done + at, total)).await?;
        done += device.size;
    }
    let table_bytes = table.encode().map_err(|error| Error::new(ErrorKind::Invalid, error.0))?;
    let anchor = Anchor {
        store: superblock.store_number(),
        redo: LogPosition { block: SEGMENTS_START / BLOCK64, seq: 1 },
        next_oid: 1,
        clean: true,
        ..Anchor::default()
    };
    for device in devices.iter() {
        for place in PLACES {
            write(device, &table_bytes, place).await?;
        }
        for at in SLOTS.into_iter().flatten() {
            write(device, &anchor.encode(), at).await?;
        }
        sync(device).await?;
    }
    // A device counts only with its superblock.
    for (device, record) in devices.iter().zip(&table.devices) {
        let identity = DeviceIdentity { number: record.number, id: record.id };
        let superblock = StoreSuperblock { device: Some(identity), ..superblock.clone() };
        write_superblock(&device.file, &superblock).await?;
        if let Some(parent) = device.path.parent().filter(|_| !device.file.info().block_device) {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            fs::sync_dir(parent)
                .map_err(|error| Error::from_io(error, format!("creating {}", device.path.display())))?;
        }
    }
    Ok(superblock.uuid)
}

async fn open_new(path: &Path, size: u64) -> Result<NewDevice> {
    if let Some(user) = fs::file_user(path) {
        return Err(Error::new(ErrorKind::Busy, format!("{} is in use: {user}", path.display())));
    }
    let (file, created) = open_or_create(path, OpenOptions::read_write().direct().lock()).await?;
    let info = file.info();
    let size = if size == 0 { info.size } else { size };
    if info.block_device && size > info.size {
        let text = format!("{} has {} bytes, not {size}", path.display(), info.size);
        return Err(Error::new(ErrorKind::OutOfRange, text));
    }
    Ok(NewDevice { path: path.into(), file, created, occupied: false, size })
}

/// Returns the superblock without identity of a device, and the device table.
fn layout(devices: &[NewDevice], options: &DeviceSetOptions) -> Result<(StoreSuperblock, DeviceTable)> {
    let data = options.data as u64;
    let smallest = devices.iter().map(|device| device.size).min().unwrap_or(0);
    let column = match options.column_size {
        0 => (smallest / SEGMENTS_WANTED).next_power_of_two().clamp(COLUMN_MIN, COLUMN_MAX),
        size => size,
    };
    let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
    if !column.is_power_of_two() || !(COLUMN_MIN..=COLUMN_MAX).contains(&column) {
        return Err(invalid(format!(
            "columns of {column} bytes: a power of two from {COLUMN_MIN} to {COLUMN_MAX} is needed"
        )));
    }
    let uuid: [u8; 16] = [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes");
    let record = |(number, device): (usize, &NewDevice)| DeviceRecord {
        number: number as u16,
        id: [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes"),
        slots: u32::try_from(device.size.saturating_sub(SEGMENTS_START) / column).unwrap_or(u32::MAX),
        state: RecordedState::Active,
        replaces: None,
        leaving: false,
        path: device.path.display().to_string(),
    };
    let mut table = DeviceTable {
        store: u64::from_le_bytes(uuid[..8].try_into().expect("eight bytes")),
        generation: 1,
        data: options.data as u16,
        parity: options.parity as u16,
        column_blocks: (column / BLOCK64) as u32,
        next_number: devices.len() as u16,
        devices: devices.iter().enumerate().map(record).collect(),
        groups: Vec::new(),
    };
    table.groups = plan_groups(&table, 1 << 20, usize::MAX);
    let superblock = StoreSuperblock {
        features: FEATURE_DEVICES,
        features_compatible: 0,
        uuid,
        created_s: wall_clock().as_secs(),
        segment_size: (column * data) as u32,
        segment_count: table.segments(),
        data_devices: options.data as u16,
        parity_devices: options.parity as u16,
        device: None,
    };
    if table.segments() < SEGMENTS_MIN || StoreSuperblock::decode(&superblock.encode()).is_err() {
        let least = SEGMENTS_START + u64::from(SEGMENTS_MIN) * column;
        let text = format!(
            "devices of {smallest} bytes and more, with columns of {column} bytes: {} segments, {SEGMENTS_MIN} at least \
             ({least} bytes each)",
            table.segments()
        );
        return Err(invalid(text));
    }
    Ok((superblock, table))
}

/// Gives a file its length and its space, and erases what a device held before.
async fn prepare(device: &NewDevice, mut progress: impl FnMut(u64)) -> Result<()> {
    let (file, failed) = (&device.file, |error| Error::from_io(error, format!("making {}", device.path.display())));
    if device.occupied {
        tracing::warn!("overwriting {}", device.path.display());
    }
    if file.info().block_device {
        if device.occupied {
            erase_signatures(file, file.info().size).await?;
        }
        return Ok(());
    }
    // Truncated first, so that remains of an older store are not taken for this one's.
    file.set_size(0).map_err(failed)?;
    file.set_size(device.size).map_err(failed)?;
    // Sparse files would fail one by one when their file system is full.
    match preallocate(file, device.size, &mut |at, _| progress(at)).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        done => done,
    }
}

async fn write(device: &NewDevice, bytes: &[u8], at: u64) -> Result<()> {
    let failed = |error| Error::from_io(error, format!("making a store on {}", device.path.display()));
    device.file.write_at(Buf::copy_of(bytes), at).await.map_err(failed)
}

async fn sync(device: &NewDevice) -> Result<()> {
    let failed = |error| Error::from_io(error, format!("making a store on {}", device.path.display()));
    device.file.sync_data().await.map_err(failed)
}
