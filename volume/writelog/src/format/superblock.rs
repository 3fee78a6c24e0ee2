//! Superblock of a log.

use super::{
    FEATURE_ENCRYPTED, FEATURE_MEMBERS, LOG_SIZE_LEAST, LogId, MAGIC, MalformedLog, MediumKind, PMEM_UNIT, Reader,
    SUPER_LEN, VERSION, VERSION_MEMBERS, blocks_size_max, buffers_at, is_sealed, is_unit, malformed, seal,
};

/// State of a copy of a log that has members, in the superblock of version 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyState {
    /// Id of the copy, drawn at random by the peer that created it.
    pub copy: LogId,
    /// Number of the first block (ssd) or entry (pmem) that the copy did not have when it began to follow its term: others
    /// left over from another primary may be there.
    pub kept: u64,
    /// Number of the first block or entry of the term in [`LogSuperblock::run`]; not before `kept`.
    pub cut: u64,
    /// Set while the copy is known to lack entries.
    pub filling: bool,
}

/// Check value of the key that a log is encrypted with: it tells keys apart, and nothing about them.
pub type KeyCheck = [u8; 16];

/// Superblock of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSuperblock {
    /// Incompatible feature bits, which a reader must support.
    pub features: u64,
    /// Serial number of the superblock, incremented on every write; the valid copy with the higher one counts.
    pub serial: u64,
    /// Log id.
    pub log: LogId,
    /// Epoch of the log's membership: see `docs/design/writelog.md`.
    pub epoch: u64,
    /// Run. Without members, the number of times that the log was opened; with members, the term: the epoch of the
    /// record in which the primary that this copy follows opened the log.
    pub run: u32,
    /// Kind of log device.
    pub medium: MediumKind,
    /// Set if the log was closed with all data at the backend.
    pub clean: bool,
    /// Alignment unit of blocks and payloads, in bytes. pmem without append blocks: 64.
    pub unit: u32,
    /// Size of the log in bytes, including superblocks.
    pub size: u64,
    /// Number of entries of the ring; 0 for append blocks, which logs on an SSD have, and all logs with members.
    pub slots: u64,
    /// Creation time in seconds since 1970.
    pub created_s: u64,
    /// ssd: position of the oldest block that is needed, in units since creation.
    pub tail_pos: u64,
    /// ssd: number of that block.
    pub tail_block: u64,
    /// Sequence number of the oldest entry that the backend may not hold.
    pub tail_seq: u64,
    /// ssd: all blocks before this number were durable when the superblock was written.
    pub head_block: u64,
    /// State of this copy of a log with members, which is of version 2.
    pub copy: Option<CopyState>,
    /// Identity of the volume.
    pub volume: String,
    /// Name of the volume, for messages.
    pub name: String,
    /// Check value of the key, if payloads are encrypted.
    pub encryption: Option<KeyCheck>,
}

/// Reason for the rejection of a superblock or a directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogFormatError {
    /// Not a write log.
    #[error("not a write log")]
    Stranger,
    /// Newer version or unknown features.
    #[error("{0}, which this program does not know")]
    Newer(String),
    /// Write log with damaged bytes.
    #[error("{0}")]
    Damaged(MalformedLog),
}

const SUPER_CRC_AT: usize = 12;

impl LogSuperblock {
    /// Gives the log members, of which this is the copy of one.
    pub fn set_copy(&mut self, state: CopyState) {
        self.features |= FEATURE_MEMBERS;
        self.copy = Some(state);
    }

    /// Makes the log an encrypted one; entries that it holds are not.
    pub fn set_encryption(&mut self, check: KeyCheck) {
        self.features |= FEATURE_ENCRYPTED;
        self.encryption = Some(check);
    }

    /// Returns whether a block or entry of run `run` may follow one of run `before`, as number `number` of the log.
    ///
    /// Without members, the next run is accepted too: the newer copy of the superblock may be lost. With members, both
    /// copies have the term before anything of it is appended.
    pub fn accepts(&self, run: u32, before: u32, number: u64) -> bool {
        let current = match &self.copy {
            None => run <= self.run + 1,
            Some(copy) => (run == self.run) == (number >= copy.cut) && run <= self.run,
        };
        current && run >= before
    }

    /// Returns whether a block or entry, past the end of the log, may be believed in what it says about those before it:
    /// not where another primary may have left it.
    pub fn believes(&self, run: u32, number: u64) -> bool {
        self.copy.is_none_or(|copy| !(copy.kept..copy.cut).contains(&number) && self.accepts(run, 0, number))
    }

    /// Encodes the superblock as [`SUPER_LEN`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SUPER_LEN);
        out.extend_from_slice(MAGIC);
        let version = if self.copy.is_some() { VERSION_MEMBERS } else { VERSION };
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        for word in [self.features, self.serial] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.log);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.run.to_le_bytes());
        out.extend_from_slice(&[self.medium.code(), u8::from(self.clean), 0, 0]);
        out.extend_from_slice(&self.unit.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        let words = [self.size, self.slots, self.created_s, self.tail_pos, self.tail_block, self.tail_seq];
        for word in words.into_iter().chain([self.head_block]) {
            out.extend_from_slice(&word.to_le_bytes());
        }
        if let Some(CopyState { copy, kept, cut, filling }) = &self.copy {
            out.extend_from_slice(copy);
            out.extend_from_slice(&kept.to_le_bytes());
            out.extend_from_slice(&cut.to_le_bytes());
            out.push(u8::from(*filling));
            out.extend_from_slice(&[0; 31]);
        }
        for text in [&self.volume, &self.name] {
            out.extend_from_slice(&(text.len() as u16).to_le_bytes());
            out.extend_from_slice(text.as_bytes());
        }
        out.extend_from_slice(self.encryption.as_ref().map_or(&[], |check| check));
        assert!(out.len() <= SUPER_LEN, "a volume's name of {} bytes", self.name.len());
        out.resize(SUPER_LEN, 0);
        seal(&mut out, SUPER_CRC_AT);
        out
    }

    /// Decodes [`SUPER_LEN`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, LogFormatError> {
        if bytes.len() != SUPER_LEN || bytes[..8] != *MAGIC {
            return Err(LogFormatError::Stranger);
        }
        if !is_sealed(bytes, SUPER_CRC_AT) {
            return Err(LogFormatError::Damaged(MalformedLog("superblock: the checksum is wrong".into())));
        }
        let mut reader = Reader { bytes: &bytes[8..], what: "superblock" };
        let version = reader.u32().map_err(LogFormatError::Damaged)?;
        let known = match version {
            VERSION => FEATURE_ENCRYPTED,
            VERSION_MEMBERS => FEATURE_MEMBERS | FEATURE_ENCRYPTED,
            _ => return Err(LogFormatError::Newer(format!("format version {version}"))),
        };
        let found = Self::decode_fields(&mut reader, version).map_err(LogFormatError::Damaged)?;
        let unknown = found.features & !known;
        if unknown != 0 {
            return Err(LogFormatError::Newer(format!("feature bits {unknown:#x}")));
        }
        Ok(found)
    }

    fn decode_fields(reader: &mut Reader<'_>, version: u32) -> Result<Self, MalformedLog> {
        reader.u32()?;
        let (features, serial) = (reader.u64()?, reader.u64()?);
        let (log, epoch, run) = (reader.array()?, reader.u64()?, reader.u32()?);
        let medium = reader.u8()?;
        let Some(medium) = MediumKind::from_code(medium) else {
            return malformed(format!("superblock: no medium has the number {medium}"));
        };
        let clean = reader.u8()? != 0;
        reader.u16()?;
        let unit = reader.u32()?;
        reader.u32()?;
        let (size, slots, created_s) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (tail_pos, tail_block, tail_seq) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let head_block = reader.u64()?;
        let copy = match version {
            VERSION => None,
            _ => {
                let (copy, kept, cut) = (reader.array()?, reader.u64()?, reader.u64()?);
                let filling = reader.u8()? != 0;
                reader.take(31)?;
                Some(CopyState { copy, kept, cut, filling })
            }
        };
        let (volume, name) = (reader.text()?, reader.text()?);
        let encryption = match features & FEATURE_ENCRYPTED {
            0 => None,
            _ => Some(reader.array()?),
        };
        let bounded = (LOG_SIZE_LEAST..1 << 48).contains(&size) && size.is_multiple_of(4096);
        let sane = match medium {
            MediumKind::Ssd => unit.is_power_of_two() && (512..=4096).contains(&unit),
            // The ring must leave space for buffers.
            MediumKind::Pmem if copy.is_none() => {
                unit == PMEM_UNIT && (1..1 << 42).contains(&slots) && buffers_at(slots) < size
            }
            // It may be a copy of a log on an SSD.
            MediumKind::Pmem => is_unit(unit) && slots == 0 && size <= blocks_size_max(unit),
            // It is nowhere without members.
            MediumKind::Dram => copy.is_some() && is_unit(unit) && slots == 0 && size <= blocks_size_max(unit),
        };
        if !bounded || !sane {
            return malformed(format!("superblock: units of {unit} bytes, {slots} slots, {size} bytes"));
        }
        // Counters that this opening increments must not overflow.
        if run >= u32::MAX - 1 || serial >= 1 << 56 {
            return malformed(format!("superblock: it was opened {run} times, and written {serial}"));
        }
        if copy.is_some() && features & FEATURE_MEMBERS == 0 {
            return malformed("superblock: its version has members, and its features do not");
        }
        if copy.is_some_and(|copy| copy.cut >= 1 << 56 || copy.kept > copy.cut)
            || tail_block > head_block
            || tail_pos >= 1 << 56
            || tail_seq >= 1 << 47
            || head_block >= 1 << 56
        {
            return malformed("superblock: the tail is past the head");
        }
        Ok(Self {
            features,
            serial,
            log,
            epoch,
            run,
            medium,
            clean,
            unit,
            size,
            slots,
            created_s,
            tail_pos,
            tail_block,
            tail_seq,
            head_block,
            copy,
            volume,
            name,
            encryption,
        })
    }
}
