//! Requests (VIRTIO 1.2, section 5.2.6).
//!
//! ```text
//! readable by the device:   type u32 | reserved u32 | sector u64 | data of a write, or ranges
//! writable by the device:   data of a read, or the serial number | status u8
//! ```
//!
//! The borders of descriptors mean nothing (section 2.7.4): a header may be spread over several, and share one with the
//! data.

use forebay_block::{Extent, Geometry};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::payload::{buffer_len, copy_from};
use super::{
    RANGE_SECTORS_MAX, RANGES_MAX, REQUEST_BYTES_MAX, SECTOR, SERIAL_LEN, capacity, feature, request_type, status,
};
use crate::memory::GuestPart;
use crate::stats::VhostRequestKind;

/// Bytes before the data of a request.
const HEADER_LEN: u64 = size_of::<VirtioBlockHeader>() as u64;
/// Flag of a range to zero: its space may be deallocated.
const UNMAP: u32 = 1;

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct VirtioBlockHeader {
    kind: U32,
    reserved: U32,
    sector: U64,
}

/// Layout of `struct virtio_blk_discard_write_zeroes`.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct VirtioBlockRange {
    sector: U64,
    sectors: U32,
    flags: U32,
}

/// State of the device by which requests are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRules {
    /// Current geometry of the volume.
    pub geometry: Geometry,
    /// True if the device was offered as read-only.
    pub read_only: bool,
    /// Negotiated features.
    pub features: u64,
    /// Write cache enabled, as of [`BlockConfig::writeback`](super::BlockConfig::writeback).
    pub writeback: bool,
}

impl BlockRules {
    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Returns whether changes are durable before they are acknowledged: for a driver that cannot flush, and with the
    /// write cache off (section 5.2.6.2, cases 1 and 2 of stable writes).
    pub fn writethrough(&self) -> bool {
        !self.has(feature::FLUSH) || (self.has(feature::CONFIG_WCE) && !self.writeback)
    }

    /// Checks the place of a request.
    fn extent(&self, sector: u64, len: u64) -> Result<Extent, BlockRefusal> {
        let align = u64::from(self.geometry.block_size.max(1));
        let outside = BlockRefusal::OutOfRange { sector, len, capacity: capacity(&self.geometry) };
        let extent = Extent::new(sector.checked_mul(SECTOR).ok_or(outside.clone())?, len);
        if !extent.offset.is_multiple_of(align) || !len.is_multiple_of(align) {
            return Err(BlockRefusal::Unaligned { sector, len, block: align });
        }
        match extent.checked_end() {
            Some(end) if end <= capacity(&self.geometry) => Ok(extent),
            _ => Err(outside),
        }
    }

    fn writable(&self) -> Result<(), BlockRefusal> {
        if self.read_only || self.geometry.read_only { Err(BlockRefusal::ReadOnly) } else { Ok(()) }
    }
}

/// Range of a write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroedExtent {
    /// Range to zero.
    pub extent: Extent,
    /// True keeps the space allocated.
    pub no_unmap: bool,
}

/// Request, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockCommand {
    /// Read of data, which is written to the beginning of the writable parts.
    Read(Extent),
    /// Write of the data after the header ([`BlockCommand::gather`]).
    Write {
        /// Range to write.
        extent: Extent,
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Flush of the write cache.
    Flush,
    /// Read of the serial number.
    GetId {
        /// Bytes of it that the driver has space for.
        len: usize,
    },
    /// Discard of ranges, in any order.
    Discard {
        /// Ranges; none is empty.
        extents: Vec<Extent>,
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Zeroing of ranges, in any order.
    WriteZeroes {
        /// Ranges; none is empty.
        extents: Vec<ZeroedExtent>,
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Request that ends with an error status.
    Refused(VhostRequestKind, BlockRefusal),
}

/// Reason for which a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockRefusal {
    /// Type that the device does not support.
    #[error("request type {0} is not supported")]
    Type(u32),
    /// Flags of a range that the device does not support.
    #[error("flags {0:#x} of a range are not supported")]
    Flags(u32),
    /// Change of a read-only device.
    #[error("device is read-only")]
    ReadOnly,
    /// Data that is not a whole number of units.
    #[error("{len} bytes of data are not a multiple of {unit}")]
    Length {
        /// Bytes of data.
        len: u64,
        /// Bytes of a sector, or of the description of a range.
        unit: u64,
    },
    /// More data than the limit.
    #[error("{0} bytes of data; at most {REQUEST_BYTES_MAX} are allowed")]
    TooLong(u64),
    /// Request at a place that the volume's blocks do not allow.
    #[error("{len} bytes at sector {sector} are not aligned to blocks of {block} bytes")]
    Unaligned {
        /// First sector.
        sector: u64,
        /// Bytes of data.
        len: u64,
        /// Bytes of a block.
        block: u64,
    },
    /// Request past the end.
    #[error("{len} bytes at sector {sector} are past the end of {capacity} bytes")]
    OutOfRange {
        /// First sector.
        sector: u64,
        /// Bytes of data.
        len: u64,
        /// Bytes of the device.
        capacity: u64,
    },
    /// No ranges, or more than the limit.
    #[error("{0} ranges; 1 to {RANGES_MAX} are allowed")]
    Ranges(u64),
    /// Range longer than the limit.
    #[error("range of {0} sectors; at most {RANGE_SECTORS_MAX} are allowed")]
    RangeTooLong(u32),
}

impl BlockRefusal {
    /// Returns the [status] of the request.
    pub fn status(&self) -> u8 {
        match self {
            BlockRefusal::Type(_) | BlockRefusal::Flags(_) => status::UNSUPP,
            _ => status::IOERR,
        }
    }
}

/// Buffer that is no request and cannot be answered: the device stops and needs a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockViolation {
    /// Buffer shorter than a header.
    #[error("request of {0} bytes is shorter than its header of {HEADER_LEN}")]
    NoHeader(u64),
    /// Buffer without a byte for the status.
    #[error("request has no space for a status")]
    NoStatus,
}

impl BlockCommand {
    /// Parses the request in a buffer.
    ///
    /// # Errors
    /// When the buffer has no header or no status byte.  Everything else that is wrong is
    /// [`Refused`](BlockCommand::Refused).
    pub fn parse(readable: &[GuestPart], writable: &[GuestPart], rules: &BlockRules) -> Result<Self, BlockViolation> {
        let mut header = VirtioBlockHeader::new_zeroed();
        if copy_from(readable, 0, header.as_mut_bytes()) < size_of::<VirtioBlockHeader>() {
            return Err(BlockViolation::NoHeader(buffer_len(readable)));
        }
        let space = buffer_len(writable).checked_sub(1).ok_or(BlockViolation::NoStatus)?;
        let sector = header.sector.get();
        let data_len = || buffer_len(readable) - HEADER_LEN;
        let (kind, command) = match header.kind.get() {
            request_type::IN => (VhostRequestKind::Read, data(rules, sector, space).map(BlockCommand::Read)),
            request_type::OUT => {
                let extent = rules.writable().and_then(|()| data(rules, sector, data_len()));
                let fua = rules.writethrough();
                (VhostRequestKind::Write, extent.map(|extent| BlockCommand::Write { extent, fua }))
            }
            request_type::FLUSH => (VhostRequestKind::Flush, Ok(BlockCommand::Flush)),
            request_type::GET_ID => {
                (VhostRequestKind::GetId, Ok(BlockCommand::GetId { len: space.min(SERIAL_LEN as u64) as usize }))
            }
            request_type::DISCARD if rules.has(feature::DISCARD) => {
                let extents = ranges(readable, data_len(), rules, 0, |extent, _| extent);
                let fua = rules.writethrough();
                (VhostRequestKind::Discard, extents.map(|extents| BlockCommand::Discard { extents, fua }))
            }
            request_type::WRITE_ZEROES if rules.has(feature::WRITE_ZEROES) => {
                let zeroed = |extent, flags| ZeroedExtent { extent, no_unmap: flags & UNMAP == 0 };
                let extents = ranges(readable, data_len(), rules, UNMAP, zeroed);
                let fua = rules.writethrough();
                (VhostRequestKind::WriteZeroes, extents.map(|extents| BlockCommand::WriteZeroes { extents, fua }))
            }
            other => (VhostRequestKind::Other, Err(BlockRefusal::Type(other))),
        };
        Ok(command.unwrap_or_else(|refusal| BlockCommand::Refused(kind, refusal)))
    }

    /// Returns the kind of the request, for statistics.
    pub fn kind(&self) -> VhostRequestKind {
        match self {
            BlockCommand::Read(_) => VhostRequestKind::Read,
            BlockCommand::Write { .. } => VhostRequestKind::Write,
            BlockCommand::Flush => VhostRequestKind::Flush,
            BlockCommand::GetId { .. } => VhostRequestKind::GetId,
            BlockCommand::Discard { .. } => VhostRequestKind::Discard,
            BlockCommand::WriteZeroes { .. } => VhostRequestKind::WriteZeroes,
            BlockCommand::Refused(kind, _) => *kind,
        }
    }

    /// Returns the bytes that are read or written, which the device keeps in memory until it completes the request.
    pub fn data_len(&self) -> u64 {
        match self {
            BlockCommand::Read(extent) | BlockCommand::Write { extent, .. } => extent.len,
            _ => 0,
        }
    }

    /// Copies the data of a write out of the guest's memory; an empty list for other requests.
    pub fn gather(&self, readable: &[GuestPart], pools: &super::PayloadPools) -> forebay_block::BufList {
        match self {
            BlockCommand::Write { extent, .. } => super::gather(readable, HEADER_LEN, extent.len, pools),
            _ => forebay_block::BufList::new(),
        }
    }
}

/// Checks a read or write of `len` bytes.
fn data(rules: &BlockRules, sector: u64, len: u64) -> Result<Extent, BlockRefusal> {
    if !len.is_multiple_of(SECTOR) {
        return Err(BlockRefusal::Length { len, unit: SECTOR });
    }
    if len > REQUEST_BYTES_MAX {
        return Err(BlockRefusal::TooLong(len));
    }
    rules.extent(sector, len)
}

/// Parses the ranges of a discard or write-zeroes request.
fn ranges<T>(
    readable: &[GuestPart],
    len: u64,
    rules: &BlockRules,
    flags_allowed: u32,
    make: impl Fn(Extent, u32) -> T,
) -> Result<Vec<T>, BlockRefusal> {
    let unit = size_of::<VirtioBlockRange>() as u64;
    rules.writable()?;
    if !len.is_multiple_of(unit) {
        return Err(BlockRefusal::Length { len, unit });
    }
    if !(1..=u64::from(RANGES_MAX)).contains(&(len / unit)) {
        return Err(BlockRefusal::Ranges(len / unit));
    }
    let mut bytes = vec![0; len as usize];
    copy_from(readable, HEADER_LEN, &mut bytes);
    let (ranges, _) = bytes.as_chunks::<{ size_of::<VirtioBlockRange>() }>();
    let mut found = Vec::with_capacity(ranges.len());
    for range in ranges {
        let range = VirtioBlockRange::read_from_bytes(range).expect("bytes of a range");
        let (sectors, flags) = (range.sectors.get(), range.flags.get());
        if flags & !flags_allowed != 0 {
            return Err(BlockRefusal::Flags(flags));
        }
        if sectors > RANGE_SECTORS_MAX {
            return Err(BlockRefusal::RangeTooLong(sectors));
        }
        let extent = rules.extent(range.sector.get(), u64::from(sectors) * SECTOR)?;
        if extent.len > 0 {
            found.push(make(extent, flags));
        }
    }
    Ok(found)
}
