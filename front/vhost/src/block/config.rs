//! Features and configuration space of the device (VIRTIO 1.2, sections 5.2.3 to 5.2.5).

use std::ops::Range;

use forebay_block::Geometry;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::{RANGE_SECTORS_MAX, RANGES_MAX, SECTOR, SEGMENT_BYTES_MAX, SEGMENTS_MAX, feature};
use crate::config_space;

/// Bytes of the configuration space up to the fields of secure erase, which the device does not support.
pub const BLOCK_CONFIG_LEN: usize = size_of::<BlockConfigFields>();

/// Largest logical block that is announced; guests with pages of 4 KiB accept no larger one.
const LOGICAL_MAX: u32 = 4096;
/// Largest physical block that is announced: file systems use it as the size of sectors of their own.
const PHYSICAL_MAX: u32 = 4096;
/// Offset of `writeback`, the only field that drivers write.
const WRITEBACK_AT: u32 = 32;

/// Layout of `struct virtio_blk_config`.
#[derive(Debug, Clone, PartialEq, Eq, FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct BlockConfigFields {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    /// Cylinders, heads and sectors, which only the feature `GEOMETRY` gives a meaning.
    geometry: [u8; 4],
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: U16,
    opt_io_size: U32,
    writeback: u8,
    unused0: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

/// Reason for which a write to the configuration space is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockConfigRefusal {
    /// Write of another field than `writeback`.
    #[error("only the write cache can be configured: {len} bytes at offset {offset} were written")]
    NotWritable {
        /// Offset of the first byte.
        offset: u32,
        /// Number of bytes.
        len: usize,
    },
    /// Value that the field cannot have.
    #[error("the write cache is either on (1) or off (0), not {0}")]
    Value(u8),
}

/// Returns the features that a device offers; the transport's are not among them.
pub fn features(read_only: bool, queues: u16) -> u64 {
    use feature::*;
    let always = SIZE_MAX | SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | CONFIG_WCE;
    always | if queues > 1 { MQ } else { 0 } | if read_only { RO } else { DISCARD | WRITE_ZEROES }
}

/// Returns the size of a logical block in bytes: a power of two.
fn logical_block(geometry: &Geometry) -> u32 {
    geometry.block_size.clamp(SECTOR as u32, LOGICAL_MAX).next_power_of_two()
}

/// Returns the bytes that the guest can access: whole logical blocks.
pub fn capacity(geometry: &Geometry) -> u64 {
    geometry.size - geometry.size % u64::from(logical_block(geometry))
}

/// Configuration space of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockConfig {
    fields: BlockConfigFields,
}

impl BlockConfig {
    /// Creates the configuration of a device with an enabled write cache.
    pub fn new(geometry: &Geometry, read_only: bool, queues: u16) -> Self {
        let mut config = Self { fields: BlockConfigFields::new_zeroed() };
        config.fields.num_queues = queues.into();
        config.fields.writeback = 1;
        config.describe(geometry, read_only);
        config
    }

    fn describe(&mut self, geometry: &Geometry, read_only: bool) {
        let logical = logical_block(geometry);
        let preferred = geometry.preferred_io.max(logical);
        // A unit that blocks do not fill says nothing in numbers of blocks.
        let preferred = if preferred.is_multiple_of(logical) { preferred } else { logical };
        let physical = if preferred.is_power_of_two() { preferred.min(PHYSICAL_MAX) } else { logical };
        let fields = &mut self.fields;
        fields.capacity = (capacity(geometry) / SECTOR).into();
        fields.size_max = SEGMENT_BYTES_MAX.into();
        fields.seg_max = SEGMENTS_MAX.into();
        fields.blk_size = logical.into();
        fields.physical_block_exp = (physical / logical).ilog2() as u8;
        fields.min_io_size = u16::try_from(preferred / logical).unwrap_or(u16::MAX).into();
        fields.opt_io_size = (preferred / logical).into();
        let (sectors, ranges) = if read_only { (0, 0) } else { (RANGE_SECTORS_MAX, RANGES_MAX) };
        fields.max_discard_sectors = sectors.into();
        fields.max_discard_seg = ranges.into();
        fields.discard_sector_alignment = (preferred / SECTOR as u32).into();
        fields.max_write_zeroes_sectors = sectors.into();
        fields.max_write_zeroes_seg = ranges.into();
        fields.write_zeroes_may_unmap = u8::from(!read_only);
    }

    /// Adopts the current geometry; returns whether the configuration changed, of which the driver is notified.
    pub fn update(&mut self, geometry: &Geometry, read_only: bool) -> bool {
        let before = self.fields.clone();
        self.describe(geometry, read_only);
        self.fields != before
    }

    /// Sets the write cache as the negotiated features demand: off for a driver that would not flush it
    /// (section 5.2.5.2).
    pub fn negotiated(&mut self, features: u64) {
        if features & feature::CONFIG_WCE != 0 && features & feature::FLUSH == 0 {
            self.fields.writeback = 0;
        }
    }

    /// Bytes that a driver may write.
    pub const WRITABLE: Range<usize> = WRITEBACK_AT as usize..WRITEBACK_AT as usize + 1;

    /// Returns whether the write cache is enabled.
    pub fn writeback(&self) -> bool {
        self.fields.writeback != 0
    }

    /// Returns the encoding.
    pub fn bytes(&self) -> [u8; BLOCK_CONFIG_LEN] {
        let mut bytes = [0; BLOCK_CONFIG_LEN];
        bytes.copy_from_slice(self.fields.as_bytes());
        bytes
    }

    /// Copies the bytes from `offset` on; those past the known fields are zero.
    pub fn read(&self, offset: u32, to: &mut [u8]) {
        config_space::copy(&self.bytes(), offset, to);
    }

    /// Writes bytes at `offset`, as the driver does.
    ///
    /// # Errors
    /// When they are not the write cache's, or no value that it can have.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) -> Result<(), BlockConfigRefusal> {
        match *bytes {
            [on @ (0 | 1)] if offset == WRITEBACK_AT => {
                self.fields.writeback = on;
                Ok(())
            }
            [value] if offset == WRITEBACK_AT => Err(BlockConfigRefusal::Value(value)),
            _ => Err(BlockConfigRefusal::NotWritable { offset, len: bytes.len() }),
        }
    }
}
