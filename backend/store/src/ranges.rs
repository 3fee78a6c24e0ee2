//! Named ranges of one file or block device, `DEV#NAME`, for several stores.
//!
//! A table at the start of the device says where each range is. It is changed under a lock of its own place, so that
//! ranges can be in use meanwhile; a range itself is locked while it is open.

use std::path::{Path, PathBuf};

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::{ByteRange, File, FileRange, OpenOptions, fs, random, yield_now};

use crate::core::corrupt;
use crate::format::BLOCK64;
use crate::format::ranges::{
    PLACES, RANGE_UNIT, RANGES_MAX, RangeRecord, RangeTable, RangeTableError, SHARE_MAX, TABLE_MAX, is_range_name,
};
use crate::format::superblock::SEGMENTS_START;
use crate::init::{ALLOCATE_STEP, check_file_system, erase_signatures, open_or_create, reject_occupied};
use crate::occupant::{self, Occupant};
use crate::store::{open_error, open_file};

/// Depth of the queue that ranges share where the device does not report one, and in a file.
const QUEUE_DEPTH: u32 = 128;
/// Number of times that an operation begins again because the table has changed meanwhile.
const CHANGES_MAX: usize = 16;

/// Options of [`create_range`].
#[derive(Debug, Clone)]
pub struct NewRange {
    /// Name of the range.
    pub name: String,
    /// Size in bytes, rounded up to MiB; `None` for the largest unused part of the device.
    pub size: Option<u64>,
    /// Share of the device's queue, relative to the shares of the other ranges; 1 to 10000.
    pub share: u16,
    /// Set to overwrite existing content of a device that has no range table yet.
    pub force: bool,
}

/// Named range, as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeStatus {
    /// Name, place and share.
    pub record: RangeRecord,
    /// Maximum number of requests in flight.
    pub requests: usize,
    /// Set if a process has it open.
    pub in_use: bool,
    /// Content found in the range.
    pub content: Occupant,
}

/// Device with named ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangedDevice {
    /// UUID of the range table.
    pub uuid: [u8; 16],
    /// Size of the device in bytes.
    pub size: u64,
    /// Depth of the queue that ranges share.
    pub queue_depth: u32,
    /// Ranges, in order of their places.
    pub ranges: Vec<RangeStatus>,
    /// Bytes that no range has.
    pub unused: u64,
}

/// Splits `DEV#NAME` into both; `None` if the last part of the path is nothing of that form.
pub fn split_range(path: &Path) -> Option<(PathBuf, String)> {
    let (device, name) = path.file_name()?.to_str()?.rsplit_once('#')?;
    (!device.is_empty() && is_range_name(name)).then(|| (path.with_file_name(device), name.to_owned()))
}

/// Opens the range that `path` names, if it has the form `DEV#NAME` and there is a file or device at DEV.
///
/// # Errors
/// `Invalid` if DEV has no range of that name; otherwise those of opening a device.
pub(crate) async fn open_range(path: &Path, options: OpenOptions) -> Result<Option<File>> {
    let Some((device, name)) = split_range(path) else { return Ok(None) };
    let shown = device.display();
    let whole = match File::open(&device, OpenOptions::read().direct()) {
        Ok(whole) => whole,
        // Nothing is there, or a directory.
        Err(error) if is_no_device(&error) => return Ok(None),
        Err(error) => return Err(open_error(error, &device)),
    };
    for _ in 0..CHANGES_MAX {
        let Some(table) = read_table(&whole).await? else {
            let text = format!("{shown} has no ranges; `forebay store ranges create {shown} {name}` makes one");
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let record = find(&table, &device, &name)?;
        if options.lock
            && let Some(user) = fs::file_user(&device)
        {
            return Err(Error::new(ErrorKind::Busy, format!("{shown} is in use: {user}")));
        }
        let range = file_range(&table, record, queue_depth(&whole));
        let opened = File::open_range_when_free(&device, &range, options).await;
        let file = opened.map_err(|error| open_error(error, path))?;
        // It may have been removed before it was locked.
        if read_table(&whole).await?.is_some_and(|now| now.uuid == table.uuid && now.find(&name) == Some(record)) {
            return Ok(Some(file));
        }
    }
    Err(busy_table(&device))
}

/// Returns whether an error of opening means that no file or block device is at the path.
fn is_no_device(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidInput, IsADirectory, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | IsADirectory | InvalidInput)
}

fn busy_table(device: &Path) -> Error {
    Error::new(ErrorKind::Busy, format!("the ranges of {} change all the time", device.display()))
}

/// Returns the range with a name.
///
/// # Errors
/// `Invalid`, with the names that there are.
fn find<'a>(table: &'a RangeTable, device: &Path, name: &str) -> Result<&'a RangeRecord> {
    table.find(name).ok_or_else(|| {
        let names: Vec<&str> = table.ranges.iter().map(|range| &range.name[..]).collect();
        let text = format!("{} has no range '{name}'; its ranges: {}", device.display(), names.join(", "));
        Error::new(ErrorKind::Invalid, text)
    })
}

fn queue_depth(whole: &File) -> u32 {
    whole.queue_depth().unwrap_or(QUEUE_DEPTH)
}

fn file_range(table: &RangeTable, record: &RangeRecord, depth: u32) -> FileRange {
    let bytes = ByteRange { offset: record.offset, len: record.len };
    FileRange { name: record.name.clone(), bytes, requests: table.requests(record, depth) }
}

/// Reads the range table of a device; `None` if it has none.
///
/// # Errors
/// `Unsupported` for one of a newer version; `Corrupt` if both copies are damaged.
async fn read_table(whole: &File) -> Result<Option<RangeTable>> {
    Ok(read_newest(whole).await?.map(|(table, _)| table))
}

/// Reads the range table of a device like [`read_table`]; returns the place of a copy, too.
async fn read_newest(whole: &File) -> Result<Option<(RangeTable, u64)>> {
    let shown = whole.path().display();
    let mut newest: Option<(RangeTable, u64)> = None;
    let mut damage = None;
    for at in PLACES {
        let (read, bytes) = whole.read_at(BufMut::with_capacity(TABLE_MAX), at).await;
        read.map_err(|error| Error::from_io(error, format!("reading the range table of {shown}")))?;
        match RangeTable::decode(&bytes) {
            Ok(table) if newest.as_ref().is_none_or(|(newest, _)| newest.generation < table.generation) => {
                newest = Some((table, at));
            }
            Ok(_) | Err(RangeTableError::NotATable) => {}
            Err(RangeTableError::Damaged(why)) => damage = Some(why),
            Err(RangeTableError::Newer(version)) => {
                let text = format!("{shown}: a range table of version {version}, which this program does not know");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        }
    }
    match (newest, damage) {
        (None, Some(why)) => Err(corrupt(format!("{shown}: both copies of its range table are damaged: {why}"))),
        (newest, _) => Ok(newest),
    }
}

/// Writes both copies of a range table, or what takes their place, durably one after the other. That at `newest`, which
/// may be the only one that is intact, comes last.
async fn write_copies(whole: &File, bytes: &[u8], newest: u64) -> Result<()> {
    let failed = |error| Error::from_io(error, format!("writing the range table of {}", whole.path().display()));
    let others = PLACES.into_iter().filter(|&place| place != newest);
    for place in others.chain([newest]) {
        whole.write_at(Buf::copy_of(bytes), place).await.map_err(failed)?;
        whole.sync_data().await.map_err(failed)?;
    }
    Ok(())
}

/// Device whose range table may be changed.
struct LockedDevice {
    /// Whole device, open for writing.
    whole: File,
    /// Lock of the table.
    _lock: File,
    table: RangeTable,
    /// Place of a copy of the table.
    newest: u64,
}

impl LockedDevice {
    /// Locks the range table of a device.  `None` if it has none.
    ///
    /// # Errors
    /// `Busy` while another process changes it, or has the whole device open.
    async fn open(device: &Path) -> Result<Option<Self>> {
        let options = OpenOptions::read_write().direct();
        let whole = File::open(device, options).map_err(|error| open_error(error, device))?;
        if read_table(&whole).await?.is_none() {
            return Ok(None);
        }
        let bytes = ByteRange { offset: 0, len: RANGE_UNIT };
        let range = FileRange { name: "range table".into(), bytes, requests: 1 };
        let lock = File::open_range_when_free(device, &range, options.lock()).await;
        let lock = lock.map_err(|error| open_error(error, device))?;
        Ok(read_newest(&whole).await?.map(|(table, newest)| Self { whole, _lock: lock, table, newest }))
    }

    /// Writes a changed table.
    async fn write(&self, mut table: RangeTable) -> Result<()> {
        table.generation += 1;
        write_copies(&self.whole, &table.encode(), self.newest).await
    }
}

/// Creates a range of the file or block device at `device`, and the range table if there is none; a file is created or
/// extended if that is needed, and the space of the range allocated.
///
/// # Errors
/// `Exists` if there is a range of that name, or the device has other content and no range table; `Corrupt` if its range
/// table or its store is damaged; `Busy` if it is in use; `Invalid` for a name, size or share that no range may have;
/// `NoSpace` if there is too little unused space.
pub async fn create_range(device: &Path, options: &NewRange) -> Result<RangeRecord> {
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    if !is_range_name(&options.name) {
        let text = format!("'{}' is no name of a range", options.name.escape_debug());
        return invalid(format!("{text}: 1 to 64 ASCII letters, digits, '-', '_' and '.'"));
    }
    if !(1..=SHARE_MAX).contains(&options.share) {
        return invalid(format!("a share of {}: 1 to {SHARE_MAX} are possible", options.share));
    }
    if options.size == Some(0) {
        return invalid("a range of 0 bytes".into());
    }
    if let Some(user) = fs::file_user(device) {
        return Err(Error::new(ErrorKind::Busy, format!("{} is in use: {user}", device.display())));
    }
    for _ in 0..CHANGES_MAX {
        let locked = match LockedDevice::open(device).await {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // A damaged table counts as content, which may be overwritten.
            Err(error) if error.kind() == ErrorKind::Corrupt && options.force => None,
            locked => locked?,
        };
        match locked {
            Some(locked) => return add_range(locked, options).await,
            None => {
                if let Some(record) = create_first(device, options).await? {
                    return Ok(record);
                }
            }
        }
    }
    Err(busy_table(device))
}

/// Creates a table with a first range. Returns `None` if another process has created one meanwhile.
async fn create_first(device: &Path, options: &NewRange) -> Result<Option<RangeRecord>> {
    let (whole, created) = open_or_create(device, OpenOptions::read_write().direct().lock()).await?;
    let made = create_table(&whole, options).await;
    if made.is_err() && created {
        // Remove the file that was created for the range.
        if let Err(error) = fs::remove_file(device) {
            tracing::warn!(%error, "cannot remove {}", device.display());
        }
    }
    made
}

async fn create_table(whole: &File, options: &NewRange) -> Result<Option<RangeRecord>> {
    if whole.is_range() {
        let text = format!("{} is a range, which cannot have ranges of its own", whole.path().display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let damaged = match read_table(whole).await {
        Ok(Some(_)) => return Ok(None),
        Ok(None) => false,
        Err(error) if error.kind() == ErrorKind::Corrupt && options.force => true,
        Err(error) => return Err(error),
    };
    let occupied = reject_occupied(whole, options.force).await?;
    let uuid = [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes");
    let mut table = RangeTable { uuid, generation: 0, ranges: Vec::new() };
    let record = place_range(&mut table, whole, options)?;
    allocate(whole, &record).await?;
    // The existing content is unchanged up to here.
    if occupied.is_some() || damaged {
        tracing::warn!("overwriting {}, which holds {}", whole.path().display(), occupied.unwrap_or_default());
        let size =
            whole.size().map_err(|error| Error::from_io(error, format!("overwriting {}", whole.path().display())));
        erase_signatures(whole, size?.next_multiple_of(BLOCK64)).await?;
    }
    write_copies(whole, &table.encode(), PLACES[0]).await?;
    if let Some(parent) = whole.path().parent().filter(|_| !whole.info().block_device) {
        let synced = fs::sync_dir(parent);
        synced.map_err(|error| Error::from_io(error, format!("creating {}", whole.path().display())))?;
    }
    Ok(Some(record))
}

/// Adds a range to an existing table.
async fn add_range(locked: LockedDevice, options: &NewRange) -> Result<RangeRecord> {
    let mut table = locked.table.clone();
    let record = place_range(&mut table, &locked.whole, options)?;
    allocate(&locked.whole, &record).await?;
    locked.write(table).await?;
    Ok(record)
}

/// Finds a place for a range: the first unused part that is large enough, or behind the end of a file. Adds it to the
/// table.
fn place_range(table: &mut RangeTable, whole: &File, options: &NewRange) -> Result<RangeRecord> {
    let shown = whole.path().display();
    let name = &options.name;
    if table.find(name).is_some() {
        return Err(Error::new(ErrorKind::Exists, format!("{shown} already has a range '{name}'")));
    }
    if table.ranges.len() >= RANGES_MAX {
        return Err(Error::new(ErrorKind::Invalid, format!("{shown} has {RANGES_MAX} ranges, which is the most")));
    }
    let size = whole.size().map_err(|error| Error::from_io(error, format!("reading the size of {shown}")))?;
    let gaps = table.gaps(size);
    let largest = gaps.iter().copied().max_by_key(|&(offset, len)| (len, u64::MAX - offset));
    let none = |largest: u64| {
        let text = format!("{shown} has no unused part that is large enough; the largest has {largest} bytes");
        Error::new(ErrorKind::NoSpace, text)
    };
    let (offset, len) = match options.size {
        None => largest.ok_or_else(|| none(0))?,
        Some(bytes) => {
            let too_large = || Error::new(ErrorKind::Invalid, format!("a range of {bytes} bytes"));
            let len = bytes.checked_next_multiple_of(RANGE_UNIT).filter(|len| *len < 1 << 62).ok_or_else(too_large)?;
            match gaps.iter().find(|(_, free)| *free >= len) {
                Some(&(offset, _)) => (offset, len),
                None if whole.info().block_device => return Err(none(largest.map_or(0, |(_, len)| len))),
                None => (table.ranges.last().map_or(RANGE_UNIT, RangeRecord::end), len),
            }
        }
    };
    if offset.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
        return Err(none(largest.map_or(0, |(_, len)| len)));
    }
    let record = RangeRecord { name: name.clone(), offset, len, share: options.share };
    table.ranges.push(record.clone());
    table.ranges.sort_unstable_by_key(|range| range.offset);
    Ok(record)
}

/// Extends a file to the end of a range, and allocates the range's space, durably: a store in it counts on a fixed size.
async fn allocate(whole: &File, record: &RangeRecord) -> Result<()> {
    if whole.info().block_device {
        return Ok(());
    }
    let failed =
        |error| Error::from_io(error, format!("allocating the space of a range of {}", whole.path().display()));
    let before = whole.size().map_err(failed)?;
    let missing = record.end().saturating_sub(before.max(record.offset));
    check_file_system(whole, missing)?;
    if before < record.end() {
        whole.set_size(record.end()).map_err(failed)?;
    }
    let mut at = record.offset;
    while at < record.end() {
        let len = ALLOCATE_STEP.min(record.end() - at);
        match whole.allocate(at, len).await {
            // The file system cannot do it: writes may then find no space.
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => break,
            Err(error) => {
                if let Err(error) = whole.set_size(before) {
                    tracing::warn!(%error, "cannot shorten {} again", whole.path().display());
                }
                return Err(failed(error));
            }
            Ok(()) => at += len,
        }
        yield_now().await;
    }
    whole.sync_data().await.map_err(failed)
}

/// Removes a range. Its space is discarded; the range table is removed with the last range.
///
/// # Errors
/// `Invalid` if there is no such range; `Busy` if it is open; `Exists` or `Corrupt` if it holds a store or other data, unless
/// `force`.
pub async fn remove_range(device: &Path, name: &str, force: bool) -> Result<()> {
    let Some(locked) = LockedDevice::open(device).await? else {
        return Err(Error::new(ErrorKind::Invalid, format!("{} has no ranges", device.display())));
    };
    let mut table = locked.table.clone();
    let record = find(&table, device, name)?.clone();
    let range = file_range(&table, &record, queue_depth(&locked.whole));
    let options = OpenOptions::read_write().direct().lock();
    let opened = File::open_range_when_free(device, &range, options).await;
    let file = opened.map_err(|error| {
        let mut shown = device.as_os_str().to_owned();
        shown.push(format!("#{name}"));
        open_error(error, Path::new(&shown))
    })?;
    if let Some(found) = reject_occupied(&file, force).await? {
        tracing::warn!("removing {}, which holds {found}", file.path().display());
        erase_signatures(&file, record.len).await?;
        // The first batch of the log is a trace of a store, too.
        let batch = SEGMENTS_START.min(record.len - BLOCK64);
        let erased = file.write_at(Buf::zeroed(BLOCK64 as usize), batch).await;
        erased.map_err(|error| Error::from_io(error, format!("erasing {}", file.path().display())))?;
    }
    table.ranges.retain(|other| other.name != name);
    match table.ranges.is_empty() {
        true => write_copies(&locked.whole, &[0; TABLE_MAX], locked.newest).await?,
        false => locked.write(table).await?,
    }
    if let Err(error) = locked.whole.punch_hole(record.offset, record.len).await {
        tracing::debug!(%error, "cannot discard the space of {}", file.path().display());
    }
    Ok(())
}

/// Lists the ranges of a device.
///
/// # Errors
/// `Invalid` if it has none; errors of opening and reading it.
pub async fn list_ranges(device: &Path) -> Result<RangedDevice> {
    let whole = open_file(device, OpenOptions::read().direct()).await?;
    let Some(table) = read_table(&whole).await? else {
        return Err(Error::new(ErrorKind::Invalid, format!("{} has no ranges", device.display())));
    };
    let (size, queue_depth) = (whole.info().size, queue_depth(&whole));
    let mut ranges = Vec::new();
    for record in &table.ranges {
        let range = file_range(&table, record, queue_depth);
        let locked = File::open_range(device, &range, OpenOptions::read().direct().lock());
        let in_use = matches!(&locked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
        drop(locked);
        let file = File::open_range(device, &range, OpenOptions::read().direct());
        let content = occupant::look(&file.map_err(|error| open_error(error, device))?).await?;
        ranges.push(RangeStatus { record: record.clone(), requests: range.requests, in_use, content });
    }
    let unused = table.gaps(size).iter().map(|(_, len)| len).sum();
    Ok(RangedDevice { uuid: table.uuid, size, queue_depth, ranges, unused })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_last_number_sign() {
        let split =
            |path: &str| split_range(Path::new(path)).map(|(device, name)| (device.display().to_string(), name));
        let is = |device: &str, name: &str| Some((device.to_owned(), name.to_owned()));
        assert_eq!(split("/dev/nvme0n1#a"), is("/dev/nvme0n1", "a"));
        assert_eq!(split("disk#1#osd.0"), is("disk#1", "osd.0"));
        assert_eq!(split("/srv/a#b/disk"), None, "a directory");
        for none in ["/dev/sda", "/dev/sda#", "/dev/#a", "/dev/sda#a b", "/dev/sda#ä", "/", "#a", "/dev/.."] {
            assert_eq!(split(none), None, "{none}");
        }
    }
}
