//! On-disk format: `docs/formats/writelog.md`. All numbers are little-endian.

use std::ops::Range;

use forebay_accel::crc32c::crc32c;
use forebay_block::Extent;

mod superblock;

pub use self::superblock::{CopyState, KeyCheck, LogFormatError, LogSuperblock};
pub use crate::entries::EntryKind;
use crate::entries::{payload_len, stored_len};

/// First eight bytes of a superblock.
pub const MAGIC: &[u8; 8] = b"FBYLOG\x00\x01";
/// First eight bytes of a log device's directory.
pub const SHELF_MAGIC: &[u8; 8] = b"FBYSHLF\x01";
/// First eight bytes of the first directory in persistent memory while it is being stored.
pub const SHELF_UNFINISHED: &[u8; 8] = b"FBYSHLF\x00";
/// First four bytes of an append block.
pub const BLOCK_MAGIC: u32 = u32::from_le_bytes(*b"FBAB");
/// Version of directories, and of logs without members; a newer one is refused.
pub const VERSION: u32 = 1;
/// Version of logs with members.
pub const VERSION_MEMBERS: u32 = 2;
/// Feature bit of logs with members.
pub const FEATURE_MEMBERS: u64 = 1;
/// Feature bit of logs whose payloads are encrypted.
pub const FEATURE_ENCRYPTED: u64 = 2;

/// Length of a superblock in bytes.
pub const SUPER_LEN: usize = 4096;
/// Byte offsets of the superblock's copies within a log.
pub const SUPER_COPIES: [u64; 2] = [0, 4096];
/// Byte offset of the head word within a log in persistent memory; the tail word is one cache line further.
pub const HEAD_AT: u64 = 8192;
/// Byte offset of the tail word.
pub const TAIL_AT: u64 = HEAD_AT + 64;
/// Byte offset of the ring within a log.
pub const AREA_AT: u64 = 16 << 10;
/// Length of an entry, and of the header of an append block, in bytes.
pub const ENTRY_LEN: usize = 64;
/// Maximum number of entries of an append block.
pub const BLOCK_ENTRIES_MAX: usize = 256;
/// Approximate maximum length of an append block in bytes.
pub const BLOCK_LEN_MAX: u64 = 1 << 20;
/// Maximum payload of one entry in bytes; longer writes are split.
pub const PAYLOAD_MAX: u32 = 64 << 10;
/// Unit of a log in persistent memory, in bytes: a cache line.
pub const PMEM_UNIT: u32 = 64;
/// Maximum range that one entry may zero or discard, in bytes.
pub const RUN_MAX: u64 = 1 << 30;
/// Smallest log that the format permits, in bytes; for tests that fill it.
pub const LOG_SIZE_LEAST: u64 = 256 << 10;
/// Smallest log that is created, in bytes.
pub const LOG_SIZE_MIN: u64 = 16 << 20;

/// Byte offsets of the directory's copies on a log device.
pub const DIRECTORY_COPIES: [u64; 2] = [0, 512 << 10];
/// Byte offset of the first log on a log device.
pub const LOGS_AT: u64 = 1 << 20;
/// Maximum number of logs on a log device.
pub const LOGS_MAX: usize = 4096;
/// Alignment of the start and end of a log, in bytes.
pub const LOG_ALIGN: u64 = 64 << 10;

/// Error of malformed bytes, with its description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MalformedLog(pub String);

fn malformed<T>(text: impl Into<String>) -> Result<T, MalformedLog> {
    Err(MalformedLog(text.into()))
}

struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], MalformedLog> {
        let Some((head, rest)) = self.bytes.split_at_checked(len) else {
            return malformed(format!("{}: too short", self.what));
        };
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedLog> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn u8(&mut self) -> Result<u8, MalformedLog> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, MalformedLog> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, MalformedLog> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, MalformedLog> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String, MalformedLog> {
        let len = usize::from(self.u16()?);
        String::from_utf8(self.take(len)?.to_vec()).or_else(|_| malformed(format!("{}: not UTF-8", self.what)))
    }
}

/// Stores the CRC32C of `bytes` at `at`, computed with zeroes in its own place.
fn seal(bytes: &mut [u8], at: usize) {
    bytes[at..at + 4].fill(0);
    let crc = crc32c(bytes);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Stores the checksum like `seal`, for fuzzing.
pub(crate) fn reseal(bytes: &mut [u8], at: usize) {
    seal(bytes, at);
}

fn is_sealed(bytes: &[u8], at: usize) -> bool {
    let crc = [crc32c(&bytes[..at]), 0];
    let crc = forebay_accel::crc32c::extend_zeroes(crc[0], 4);
    let crc = forebay_accel::crc32c::extend(crc, &bytes[at + 4..]);
    bytes[at..at + 4] == crc.to_le_bytes()
}

/// Kind of log device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediumKind {
    /// File or block device, written with direct I/O.
    Ssd,
    /// Mapping of persistent memory.
    Pmem,
    /// Memory of the process: a log in it is durable only while another member has it.
    Dram,
}

impl MediumKind {
    /// Returns the name, as in configuration and output.
    pub fn name(self) -> &'static str {
        match self {
            MediumKind::Ssd => "ssd",
            MediumKind::Pmem => "pmem",
            MediumKind::Dram => "dram",
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            MediumKind::Ssd => 1,
            MediumKind::Pmem => 2,
            MediumKind::Dram => 3,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [MediumKind::Ssd, MediumKind::Pmem, MediumKind::Dram].into_iter().find(|kind| kind.code() == code)
    }
}

/// Log id, drawn at random on creation.
pub type LogId = [u8; 16];

/// Returns the offset of the buffers from the start of a log, in bytes. For pmem.
pub(crate) fn buffers_at(slots: u64) -> u64 {
    (AREA_AT + slots * ENTRY_LEN as u64).next_multiple_of(4096)
}

/// Returns whether a log of append blocks may have this unit: of persistent memory, or the sector size of a device.
pub(crate) fn is_unit(unit: u32) -> bool {
    unit == PMEM_UNIT || unit.is_power_of_two() && (512..=4096).contains(&unit)
}

/// Returns the maximum size of a log of append blocks, in bytes: an entry has 32 bits for the place of its payload.
pub(crate) fn blocks_size_max(unit: u32) -> u64 {
    (AREA_AT + u64::from(unit) * u64::from(u32::MAX)).min((1 << 48) - 1)
}

/// Returns the tag in a log's blocks and entries, which tells them from remains of another log in the same place.
pub fn tag_of(log: &LogId) -> u32 {
    crc32c(log)
}

/// Entry as stored on the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryRecord {
    /// Kind of the operation.
    pub kind: EntryKind,
    /// Byte range of the volume.
    pub extent: Extent,
    /// Sequence number.
    pub seq: u64,
    /// Barrier generation.
    pub generation: u64,
    /// Location of the payload, in units: in an append block, from the start of the ring; otherwise from the start of the
    /// buffers.
    pub place: u32,
    /// CRC32C of the payload, as it is stored.
    pub crc: u32,
    /// Time of the write in milliseconds since 1970.
    pub time_ms: u64,
    /// Term in which the entry was appended; 0 in a log without members. With a salt also there: the run.
    pub term: u32,
    /// Salt that was drawn when the log was opened in which the entry was appended; `None` if the payload is not
    /// encrypted. Run or term, salt and sequence number are never the same for two writes.
    pub salt: Option<u32>,
}

const ENTRY_CRC_AT: usize = 60;
/// Flag of an entry with a salt.
const ENTRY_ENCRYPTED: u8 = 1;

impl EntryRecord {
    /// Returns the length of the payload in bytes, as it is stored.
    pub fn stored_len(&self) -> u32 {
        stored_len(payload_len(self.kind, self.extent.len as u32), self.salt.is_some())
    }

    /// Encodes the entry as [`ENTRY_LEN`] bytes, with the log's tag.
    pub fn encode(&self, tag: u32) -> [u8; ENTRY_LEN] {
        let mut out = [0; ENTRY_LEN];
        out[0] = self.kind.code();
        out[1] = if self.salt.is_some() { ENTRY_ENCRYPTED } else { 0 };
        out[4..8].copy_from_slice(&(self.extent.len as u32).to_le_bytes());
        out[8..16].copy_from_slice(&self.extent.offset.to_le_bytes());
        out[16..24].copy_from_slice(&self.seq.to_le_bytes());
        out[24..32].copy_from_slice(&self.generation.to_le_bytes());
        out[32..36].copy_from_slice(&self.place.to_le_bytes());
        let payload = self.salt.unwrap_or_else(|| payload_len(self.kind, self.extent.len as u32));
        out[36..40].copy_from_slice(&payload.to_le_bytes());
        out[40..44].copy_from_slice(&self.crc.to_le_bytes());
        out[44..52].copy_from_slice(&self.time_ms.to_le_bytes());
        out[52..56].copy_from_slice(&tag.to_le_bytes());
        out[56..60].copy_from_slice(&self.term.to_le_bytes());
        seal(&mut out, ENTRY_CRC_AT);
        out
    }

    /// Decodes [`ENTRY_LEN`] bytes expected to be entry `seq` of the log with this tag.
    pub fn decode(bytes: &[u8], tag: u32, seq: u64) -> Result<Self, MalformedLog> {
        if bytes.len() != ENTRY_LEN || !is_sealed(bytes, ENTRY_CRC_AT) {
            return malformed(format!("entry {seq}: the checksum is wrong"));
        }
        let mut reader = Reader { bytes, what: "entry" };
        let (code, flags) = (reader.u8()?, reader.u8()?);
        reader.take(2)?;
        let len = reader.u32()?;
        let (offset, found, generation) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (place, payload, crc) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let time_ms = reader.u64()?;
        let (owner, term) = (reader.u32()?, reader.u32()?);
        let Some(kind) = EntryKind::from_code(code) else {
            return malformed(format!("entry {seq}: no kind is {code}"));
        };
        if (owner, found) != (tag, seq) {
            return malformed(format!(
                "entry {seq}: it is number {found} of log {owner:#010x}, not of log {tag:#010x}"
            ));
        }
        if flags & !ENTRY_ENCRYPTED != 0 {
            return malformed(format!("entry {seq}: it has flags {flags:#x}"));
        }
        let salt = (flags == ENTRY_ENCRYPTED).then_some(payload);
        let longest = if kind == EntryKind::Write { u64::from(PAYLOAD_MAX) } else { RUN_MAX };
        let right = len > 0 && u64::from(len) <= longest && (salt.is_some() || payload == payload_len(kind, len));
        if !right || offset.checked_add(u64::from(len)).is_none() || generation >= 1 << 56 {
            return malformed(format!("entry {seq}: {kind:?} of {len} bytes at {offset}, with {payload} of payload"));
        }
        let extent = Extent::new(offset, u64::from(len));
        Ok(Self { kind, extent, seq, generation, place, crc, time_ms, term, salt })
    }
}

/// Header of an append block; its entries follow, then, from the next unit on, their payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHeader {
    /// Run of the log that wrote the block; the term of its primary where the log has members.
    pub run: u32,
    /// Number of entries.
    pub count: u16,
    /// Number of blocks before this one not known to be durable when it was written; [`BEHIND_UNKNOWN`] if unknown.
    pub behind: u16,
    /// Block number.
    pub number: u64,
    /// Position of the block, in units since the log's creation.
    pub pos: u64,
    /// Sequence number of the first entry.
    pub first_seq: u64,
    /// Position of the block with the oldest entry that the backend may not hold.
    pub tail_pos: u64,
    /// Sequence number of that entry.
    pub tail_seq: u64,
    /// Length in units, including payloads.
    pub units: u32,
}

const BLOCK_CRC_AT: usize = 60;

/// Value of [`BlockHeader::behind`] for a number that is unknown or exceeds the field.
pub const BEHIND_UNKNOWN: u16 = u16::MAX;

impl BlockHeader {
    /// Returns the value of [`behind`](Self::behind) for `blocks` blocks not known to be durable.
    pub fn behind_of(blocks: u64) -> u16 {
        u16::try_from(blocks).unwrap_or(BEHIND_UNKNOWN)
    }

    /// Returns the number before which all blocks were durable when this one was written, as far as known; 0
    /// otherwise.
    pub fn durable_before(&self) -> u64 {
        if self.behind == BEHIND_UNKNOWN { 0 } else { self.number.saturating_sub(u64::from(self.behind)) }
    }

    /// Encodes header and entries into `out`, which the caller has padded to whole units.
    pub fn encode(&self, tag: u32, entries: &[EntryRecord], out: &mut [u8]) {
        let mut head = [0; ENTRY_LEN];
        head[0..4].copy_from_slice(&BLOCK_MAGIC.to_le_bytes());
        head[4..8].copy_from_slice(&tag.to_le_bytes());
        head[8..12].copy_from_slice(&self.run.to_le_bytes());
        head[12..14].copy_from_slice(&self.count.to_le_bytes());
        head[14..16].copy_from_slice(&self.behind.to_le_bytes());
        let words = [self.number, self.pos, self.first_seq, self.tail_pos, self.tail_seq];
        for (word, at) in words.into_iter().zip((16..).step_by(8)) {
            head[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        head[56..60].copy_from_slice(&self.units.to_le_bytes());
        out[..ENTRY_LEN].copy_from_slice(&head);
        for (entry, place) in entries.iter().zip(out[ENTRY_LEN..].chunks_exact_mut(ENTRY_LEN)) {
            place.copy_from_slice(&entry.encode(tag));
        }
        let len = ENTRY_LEN * (1 + entries.len());
        seal(&mut out[..len], BLOCK_CRC_AT);
    }

    /// Decodes only the header, from the first [`ENTRY_LEN`] bytes; its checksum covers the entries too, and is not
    /// verified here.
    pub fn peek(bytes: &[u8], tag: u32, unit: u32) -> Option<Self> {
        let mut reader = Reader { bytes: bytes.get(..ENTRY_LEN)?, what: "append block" };
        let mut read = || -> Result<Self, MalformedLog> {
            if (reader.u32()?, reader.u32()?) != (BLOCK_MAGIC, tag) {
                return malformed("not a block of this log");
            }
            Ok(Self {
                run: reader.u32()?,
                count: reader.u16()?,
                behind: reader.u16()?,
                number: reader.u64()?,
                pos: reader.u64()?,
                first_seq: reader.u64()?,
                tail_pos: reader.u64()?,
                tail_seq: reader.u64()?,
                units: reader.u32()?,
            })
        };
        let found = read().ok()?;
        let head_units = found.head_units(unit);
        let longest = (BLOCK_LEN_MAX + u64::from(PAYLOAD_MAX)) / u64::from(unit) + u64::from(head_units);
        let sane = (1..=BLOCK_ENTRIES_MAX).contains(&usize::from(found.count))
            && (head_units..=longest as u32).contains(&found.units)
            && u64::from(found.behind) <= found.number
            && found.first_seq < 1 << 47;
        sane.then_some(found)
    }

    /// Returns the length of header and entries in bytes.
    pub fn head_len(&self) -> usize {
        ENTRY_LEN * (1 + usize::from(self.count))
    }

    /// Returns the length of header and entries in units.
    pub fn head_units(&self, unit: u32) -> u32 {
        (self.head_len() as u32).div_ceil(unit)
    }

    /// Decodes and verifies the entries from the bytes of header and entries; payloads must be inside the block, in a
    /// ring of `ring` units.
    pub fn entries(&self, bytes: &[u8], tag: u32, unit: u32, ring: u64) -> Result<Vec<EntryRecord>, MalformedLog> {
        let bytes = bytes.get(..self.head_len()).ok_or_else(|| MalformedLog("append block: too short".into()))?;
        if !is_sealed(bytes, BLOCK_CRC_AT) {
            return malformed(format!("append block {}: the checksum is wrong", self.number));
        }
        let mut at = self.head_units(unit);
        let mut entries = Vec::with_capacity(usize::from(self.count));
        for (seq, bytes) in (self.first_seq..).zip(bytes[ENTRY_LEN..].chunks_exact(ENTRY_LEN)) {
            let entry = EntryRecord::decode(bytes, tag, seq)?;
            if (entry.term != 0 || entry.salt.is_some()) && entry.term != self.run {
                return malformed(format!(
                    "entry {seq}: it is of term {}, in a block of term {}",
                    entry.term, self.run
                ));
            }
            if entry.kind.has_payload() && u64::from(entry.place) != self.pos % ring + u64::from(at) {
                return malformed(format!("entry {seq}: its payload is not in its block"));
            }
            at += payload_len(entry.kind, entry.extent.len as u32).div_ceil(unit);
            entries.push(entry);
        }
        if at != self.units || self.pos % ring + u64::from(at) > ring {
            return malformed(format!("append block {}: {at} units, not {}", self.number, self.units));
        }
        Ok(entries)
    }
}

/// Encodes a word of persistent memory that is stored atomically: a sequence number and its check.
pub fn encode_word(seq: u64, tag: u32) -> u64 {
    seq << 16 | u64::from(check_of(seq, tag))
}

/// Decodes the sequence number of such a word, if its check matches.
pub fn decode_word(word: u64, tag: u32) -> Result<u64, MalformedLog> {
    let seq = word >> 16;
    if word as u16 == check_of(seq, tag) { Ok(seq) } else { malformed(format!("the word {word:#x} has a wrong check")) }
}

fn check_of(seq: u64, tag: u32) -> u16 {
    let crc = forebay_accel::crc32c::extend(tag, &seq.to_le_bytes());
    (crc ^ (crc >> 16)) as u16
}

/// Directory entry of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShelfEntry {
    /// Log id.
    pub log: LogId,
    /// Byte offset on the log device.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Directory of the logs on a log device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogDirectory {
    /// Serial number, incremented on every write; the valid copy with the higher one counts.
    pub serial: u64,
    /// Kind of log device.
    pub medium: MediumKind,
    /// Logs, ordered by offset.
    pub logs: Vec<ShelfEntry>,
}

const DIRECTORY_HEAD: usize = 64;
const DIRECTORY_CRC_AT: usize = 12;

impl LogDirectory {
    /// Encodes the directory, padded to a multiple of 4096 bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(SHELF_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.serial.to_le_bytes());
        out.extend_from_slice(&(self.logs.len() as u32).to_le_bytes());
        out.push(self.medium.code());
        out.resize(DIRECTORY_HEAD, 0);
        for log in &self.logs {
            out.extend_from_slice(&log.log);
            out.extend_from_slice(&log.start.to_le_bytes());
            out.extend_from_slice(&log.size.to_le_bytes());
            out.extend_from_slice(&[0; 32]);
        }
        seal(&mut out, DIRECTORY_CRC_AT);
        out.resize(out.len().next_multiple_of(4096), 0);
        out
    }

    /// Returns the length of a directory in bytes, from its first 4096 bytes or more.
    pub fn encoded_len(bytes: &[u8]) -> Result<usize, LogFormatError> {
        let mut reader = Reader { bytes, what: "directory" };
        let magic: [u8; 8] = reader.array().map_err(LogFormatError::Damaged)?;
        if magic != *SHELF_MAGIC {
            return Err(LogFormatError::Stranger);
        }
        let mut count = || {
            reader.take(16)?;
            reader.u32()
        };
        let count = count().map_err(LogFormatError::Damaged)? as usize;
        if count > LOGS_MAX {
            return Err(LogFormatError::Damaged(MalformedLog(format!("directory: {count} logs"))));
        }
        Ok(DIRECTORY_HEAD + 64 * count)
    }

    /// Decodes a directory from at least as many bytes as it has.
    pub fn decode(bytes: &[u8]) -> Result<Self, LogFormatError> {
        let len = Self::encoded_len(bytes)?;
        let Some(bytes) = bytes.get(..len) else {
            return Err(LogFormatError::Damaged(MalformedLog("directory: too short".into())));
        };
        if !is_sealed(bytes, DIRECTORY_CRC_AT) {
            return Err(LogFormatError::Damaged(MalformedLog("directory: the checksum is wrong".into())));
        }
        let mut reader = Reader { bytes: &bytes[8..], what: "directory" };
        let version = reader.u32().map_err(LogFormatError::Damaged)?;
        if version != VERSION {
            return Err(LogFormatError::Newer(format!("format version {version}")));
        }
        Self::decode_fields(&mut reader).map_err(LogFormatError::Damaged)
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, MalformedLog> {
        reader.u32()?;
        let serial = reader.u64()?;
        let count = reader.u32()?;
        let medium = reader.u8()?;
        let Some(medium) = MediumKind::from_code(medium) else {
            return malformed(format!("directory: no medium has the number {medium}"));
        };
        reader.take(DIRECTORY_HEAD - 29)?;
        if serial >= 1 << 56 {
            return malformed(format!("directory: it was written {serial} times"));
        }
        let mut logs: Vec<ShelfEntry> = Vec::new();
        for _ in 0..count {
            let entry = ShelfEntry { log: reader.array()?, start: reader.u64()?, size: reader.u64()? };
            reader.take(32)?;
            let after = logs.last().map_or(LOGS_AT, |last| last.start + last.size);
            let whole = entry.start.is_multiple_of(LOG_ALIGN) && entry.size.is_multiple_of(LOG_ALIGN);
            if !whole || entry.start < after || entry.size < LOG_SIZE_LEAST || entry.start.max(entry.size) >= 1 << 48 {
                return malformed(format!("directory: a log of {} bytes at {}", entry.size, entry.start));
            }
            logs.push(entry);
        }
        Ok(Self { serial, medium, logs })
    }

    /// Returns the end of the last log, or the offset of the first one.
    pub fn end(&self) -> u64 {
        self.logs.iter().map(|log| log.start + log.size).max().unwrap_or(LOGS_AT)
    }

    /// Returns the unused ranges before the last log.
    pub fn holes(&self) -> Vec<Range<u64>> {
        let mut at = LOGS_AT;
        let mut holes = Vec::new();
        for log in &self.logs {
            if log.start > at {
                holes.push(at..log.start);
            }
            at = at.max(log.start + log.size);
        }
        holes
    }

    /// Returns an offset where a log of `size` bytes fits; `limit` is the end of the log device, if it has one.
    pub fn room_for(&self, size: u64, limit: Option<u64>) -> Option<u64> {
        if self.logs.len() >= LOGS_MAX {
            return None;
        }
        let mut at = LOGS_AT;
        for log in &self.logs {
            if log.start - at >= size {
                return Some(at);
            }
            at = log.start + log.size;
        }
        limit.is_none_or(|limit| limit.saturating_sub(at) >= size).then_some(at)
    }
}

#[cfg(test)]
mod golden;
