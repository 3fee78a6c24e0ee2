//! Features and configuration space of the device (VIRTIO 1.2, sections 5.6.3 and 5.6.4).

use std::ops::Range;

use forebay_scsi::Lun;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    CDB_SIZE, CDB_SIZE_MAX, CDB_SIZE_MIN, COMMANDS_PER_UNIT, EVENT_LEN, SECTORS_MAX, SEGMENTS_MAX, SENSE_SIZE,
    SENSE_SIZE_MAX, feature,
};
use crate::config_space;

/// Bytes of the configuration space.
pub const SCSI_CONFIG_LEN: usize = size_of::<ScsiConfigFields>();

/// Layout of `struct virtio_scsi_config`.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ScsiConfigFields {
    num_queues: U32,
    seg_max: U32,
    max_sectors: U32,
    cmd_per_lun: U32,
    event_info_size: U32,
    sense_size: U32,
    cdb_size: U32,
    max_channel: U16,
    max_target: U16,
    max_lun: U32,
}

/// Reason for which a write to the configuration space is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScsiConfigRefusal {
    /// Change of another field than `sense_size` and `cdb_size`.
    #[error(
        "only the sizes of sense data and CDB can be configured: {len} bytes at offset {offset} change something else"
    )]
    NotWritable {
        /// Offset of the first byte.
        offset: u32,
        /// Number of bytes.
        len: usize,
    },
    /// Size of the sense data above the limit.
    #[error("sense data of {0} bytes; at most {SENSE_SIZE_MAX} are supported")]
    SenseSize(u32),
    /// Size of the CDB out of bounds.
    #[error("CDB of {0} bytes; {CDB_SIZE_MIN} to {CDB_SIZE_MAX} are supported")]
    CdbSize(u32),
}

/// Returns the features that a device offers; the transport's are not among them.
pub fn features() -> u64 {
    feature::HOTPLUG | feature::CHANGE
}

/// Configuration space of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiConfig {
    fields: ScsiConfigFields,
}

impl ScsiConfig {
    /// Bytes that a driver may write: `sense_size` and `cdb_size`.
    pub const WRITABLE: Range<usize> = 20..28;

    /// Creates the configuration of a device with `queues` request queues.
    pub fn new(queues: u16) -> Self {
        let fields = ScsiConfigFields {
            num_queues: u32::from(queues).into(),
            seg_max: SEGMENTS_MAX.into(),
            max_sectors: SECTORS_MAX.into(),
            cmd_per_lun: COMMANDS_PER_UNIT.into(),
            event_info_size: (EVENT_LEN as u32).into(),
            sense_size: SENSE_SIZE.into(),
            cdb_size: CDB_SIZE.into(),
            max_channel: 0.into(),
            max_target: 0.into(),
            max_lun: u32::from(Lun::MAX).into(),
        };
        Self { fields }
    }

    /// Restores what the driver has written, as a reset of the device does.
    pub fn reset(&mut self) {
        self.fields.sense_size = SENSE_SIZE.into();
        self.fields.cdb_size = CDB_SIZE.into();
    }

    /// Returns the bytes of the sense data in a response, at most [`SENSE_SIZE_MAX`].
    pub fn sense_size(&self) -> u32 {
        self.fields.sense_size.get()
    }

    /// Returns the bytes of the CDB in a command, from [`CDB_SIZE_MIN`] to [`CDB_SIZE_MAX`].
    pub fn cdb_size(&self) -> u32 {
        self.fields.cdb_size.get()
    }

    /// Returns the encoding.
    pub fn bytes(&self) -> [u8; SCSI_CONFIG_LEN] {
        let mut bytes = [0; SCSI_CONFIG_LEN];
        bytes.copy_from_slice(self.fields.as_bytes());
        bytes
    }

    /// Copies the bytes from `offset` on; those past the known fields are zero.
    pub fn read(&self, offset: u32, to: &mut [u8]) {
        config_space::copy(&self.bytes(), offset, to);
    }

    /// Writes bytes at `offset`, as the driver does.  They may contain other fields than those that can be written,
    /// with the values that they have.
    ///
    /// # Errors
    /// When another field would change, or a size is not supported.  Nothing changes then.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ScsiConfigRefusal> {
        let not_writable = ScsiConfigRefusal::NotWritable { offset, len: bytes.len() };
        let (before, mut after) = (self.bytes(), self.bytes());
        let at = offset as usize;
        let to = at.checked_add(bytes.len()).and_then(|end| after.get_mut(at..end)).ok_or(not_writable)?;
        to.copy_from_slice(bytes);
        if before[..Self::WRITABLE.start] != after[..Self::WRITABLE.start]
            || before[Self::WRITABLE.end..] != after[Self::WRITABLE.end..]
        {
            return Err(not_writable);
        }
        let fields = ScsiConfigFields::read_from_bytes(&after).expect("bytes of a configuration");
        let (sense_size, cdb_size) = (fields.sense_size.get(), fields.cdb_size.get());
        if sense_size > SENSE_SIZE_MAX {
            return Err(ScsiConfigRefusal::SenseSize(sense_size));
        }
        if !(CDB_SIZE_MIN..=CDB_SIZE_MAX).contains(&cdb_size) {
            return Err(ScsiConfigRefusal::CdbSize(cdb_size));
        }
        self.fields = fields;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let bytes = ScsiConfig::new(5).bytes();
        let number =
            |at: usize, len: usize| bytes[at..at + len].iter().rev().fold(0, |sum, &byte| sum << 8 | u32::from(byte));
        let fields = [
            ("num_queues", 0, 4, 5),
            ("seg_max", 4, 4, 126),
            ("max_sectors", 8, 4, 65_528),
            ("cmd_per_lun", 12, 4, 128),
            ("event_info_size", 16, 4, 16),
            ("sense_size", 20, 4, 96),
            ("cdb_size", 24, 4, 32),
            ("max_channel", 28, 2, 0),
            ("max_target", 30, 2, 0),
            ("max_lun", 32, 4, 16_383),
        ];
        let mut next = 0;
        for (name, at, len, value) in fields {
            assert_eq!((at, number(at, len)), (next, value), "{name}");
            next = at + len;
        }
        assert_eq!((next, SCSI_CONFIG_LEN, features()), (36, 36, 6));
    }

    #[test]
    fn only_sizes_are_written_and_a_reset_restores_them() {
        let mut config = ScsiConfig::new(1);
        // What Linux writes.
        config.write(24, &32_u32.to_le_bytes()).expect("CDB");
        config.write(20, &96_u32.to_le_bytes()).expect("sense data");
        assert_eq!(config, ScsiConfig::new(1));
        config.write(20, &[252, 0, 0, 0, 4, 1, 0, 0]).expect("both, the largest");
        assert_eq!((config.sense_size(), config.cdb_size()), (252, 260));
        config.write(20, &[0, 0, 0, 0, 6]).expect_err("a CDB of 262 bytes");
        config.write(20, &[0, 0, 0, 0, 6, 0]).expect("both, the smallest");
        let whole = config.bytes();
        config.write(0, &whole).expect("no change");
        assert_eq!((config.sense_size(), config.cdb_size()), (0, 6));
        for (offset, bytes) in [(0, &[9; 4][..]), (16, &[0; 8]), (24, &[16, 0, 0, 0, 1]), (36, &[0]), (u32::MAX, &[0])]
        {
            let refusal = ScsiConfigRefusal::NotWritable { offset, len: bytes.len() };
            assert_eq!(config.write(offset, bytes), Err(refusal));
        }
        assert_eq!(config.write(20, &253_u32.to_le_bytes()), Err(ScsiConfigRefusal::SenseSize(253)));
        assert_eq!(config.write(24, &5_u32.to_le_bytes()), Err(ScsiConfigRefusal::CdbSize(5)));
        assert_eq!(config.write(24, &261_u32.to_le_bytes()), Err(ScsiConfigRefusal::CdbSize(261)));
        assert_eq!(config.bytes(), whole, "refused writes change nothing");
        config.reset();
        assert_eq!(config, ScsiConfig::new(1));
    }

    #[test]
    fn reads_past_the_end_are_zero() {
        let mut bytes = [0xff; 8];
        ScsiConfig::new(1).read(32, &mut bytes);
        assert_eq!(bytes, [0xff, 0x3f, 0, 0, 0, 0, 0, 0]);
        ScsiConfig::new(1).read(u32::MAX, &mut bytes);
        assert_eq!(bytes, [0; 8]);
    }
}
