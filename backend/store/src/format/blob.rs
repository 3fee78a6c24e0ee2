//! Compressed blob: up to 32 consecutive blocks of one object, stored together in a whole number of sectors.
//!
//! The location of a block in a map is either a block number or, with the highest bit set, a position within a blob
//! ([`BlobSlot`]).  The stored bytes begin with a header ([`BlobHeader`]); the CRC32C in the map covers all of them.

use super::{BLOCK, BlobPtr, MalformedStore, Put, StoreReader, malformed};

/// Unit in which blobs are packed, in bytes.
pub const SECTOR: usize = 512;
/// Sectors of a block.
pub const SECTORS_A_BLOCK: u64 = (BLOCK / SECTOR) as u64;
/// Maximum number of blocks of a blob. A blob does not cross a multiple of it within the object, and so no map page.
pub const BLOB_BLOCKS_MAX: u32 = 32;
/// Size of a blob's header in bytes.
pub const BLOB_HEADER: usize = 8;

const INDEX_BITS: u32 = 5;
const SECTOR_BITS: u32 = 47;
const SECTORS_AT: u32 = INDEX_BITS + SECTOR_BITS;
const ZERO_BITS: u64 = 7 << 60;
const BLOB_BIT: u64 = 1 << 63;

/// Location of a block within a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobSlot {
    /// First sector of the blob on the device.
    pub sector: u64,
    /// Length of the blob in sectors.
    pub sectors: u8,
    /// Index of the block within the blob.
    pub index: u8,
}

impl BlobSlot {
    /// Decodes a location; `None` for that of a plain block.
    pub fn of(location: u64) -> Option<Self> {
        (location & BLOB_BIT != 0).then_some(Self {
            sector: location >> INDEX_BITS & ((1 << SECTOR_BITS) - 1),
            sectors: (location >> SECTORS_AT) as u8,
            index: (location & ((1 << INDEX_BITS) - 1)) as u8,
        })
    }

    /// Encodes the location. Blocks that follow each other in a blob have locations that follow each other.
    pub fn location(self) -> u64 {
        debug_assert!(self.sector < 1 << SECTOR_BITS && u32::from(self.index) < BLOB_BLOCKS_MAX && self.sectors > 0);
        BLOB_BIT | u64::from(self.sectors) << SECTORS_AT | self.sector << INDEX_BITS | u64::from(self.index)
    }

    /// Returns the location of another block of the blob.
    pub fn at(self, index: u32) -> Self {
        Self { index: index as u8, ..self }
    }

    /// Returns whether both are in the same blob.
    pub fn is_same_blob(self, other: Self) -> bool {
        (self.sector, self.sectors) == (other.sector, other.sectors)
    }

    /// Returns the pointer to the blob's stored bytes, whose checksum is `crc`.
    pub fn ptr(self, crc: u32) -> BlobPtr {
        BlobPtr { addr: self.sector * SECTOR as u64, len: u32::from(self.sectors) * SECTOR as u32, crc }
    }
}

/// Checks a location read from the device: flags that are zero, a blob that is not empty.
pub fn check_location(location: u64) -> Result<(), MalformedStore> {
    match BlobSlot::of(location) {
        Some(_) if location & ZERO_BITS != 0 => {
            malformed(format!("a location {location:#x} with flags that this program does not know"))
        }
        Some(slot) if slot.sectors == 0 || slot.sector == 0 => {
            malformed(format!("a location {location:#x} of no blob"))
        }
        None if location >= 1 << 48 => malformed(format!("a location {location:#x} beyond 48 bits")),
        _ => Ok(()),
    }
}

/// Returns the byte address of the data at a location: of the block, or of the blob.
pub fn byte_of(location: u64) -> u64 {
    BlobSlot::of(location).map_or(location.saturating_mul(BLOCK as u64), |slot| slot.sector * SECTOR as u64)
}

/// Returns whether `next` is the location of the block that follows the one at `location` by `distance`, in the same run of
/// blocks or in the same blob.
pub fn follows(location: u64, distance: u64, next: u64) -> bool {
    let same = match (BlobSlot::of(location), BlobSlot::of(next)) {
        (None, None) => true,
        (Some(a), Some(b)) => a.is_same_blob(b),
        _ => false,
    };
    same && location + distance == next
}

/// Compression format of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobCodec {
    /// Raw DEFLATE (RFC 1951).
    Deflate,
    /// LZ4's block format.
    Lz4,
    /// Zstandard frame (RFC 8878).
    Zstd,
}

/// Header of a blob's stored bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlobHeader {
    /// Compression format.
    pub codec: BlobCodec,
    /// Number of blocks in the blob.
    pub blocks: u8,
    /// Length of the compressed data after the header, in bytes.
    pub length: u32,
}

impl BlobHeader {
    /// Encodes the header in [`BLOB_HEADER`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOB_HEADER);
        out.put_u8(match self.codec {
            BlobCodec::Deflate => 1,
            BlobCodec::Lz4 => 2,
            BlobCodec::Zstd => 3,
        });
        out.put_u8(self.blocks);
        out.put_u16(0);
        out.put_u32(self.length);
        out
    }

    /// Decodes the header of stored bytes; also returns the compressed data.
    ///
    /// # Errors
    /// Description of the malformed field. Flags are for later versions, and none is known yet.
    pub fn decode(stored: &[u8]) -> Result<(Self, &[u8]), MalformedStore> {
        let mut reader = StoreReader::new(stored, "compressed blob");
        let codec = match reader.u8()? {
            1 => BlobCodec::Deflate,
            2 => BlobCodec::Lz4,
            3 => BlobCodec::Zstd,
            other => return malformed(format!("compressed blob: codec {other}, which this program does not know")),
        };
        let (blocks, flags, length) = (reader.u8()?, reader.u16()?, reader.u32()?);
        if !(1..=BLOB_BLOCKS_MAX).contains(&u32::from(blocks)) || flags != 0 {
            return malformed(format!("compressed blob: {blocks} blocks, flags {flags:#x}"));
        }
        let data = reader.bytes(length as usize)?;
        Ok((Self { codec, blocks, length }, data))
    }
}

/// Returns whether blocks `start..start + blocks` of an object can be one blob.
pub fn is_blob_range(start: u32, blocks: u32) -> bool {
    (1..=BLOB_BLOCKS_MAX).contains(&blocks) && start % BLOB_BLOCKS_MAX + blocks <= BLOB_BLOCKS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn locations_round_trip(sector in 1u64..1 << 47, sectors in 1u8.., index in 0u8..32, distance in 0u64..40) {
            let slot = BlobSlot { sector, sectors, index };
            prop_assert_eq!(BlobSlot::of(slot.location()), Some(slot));
            prop_assert_eq!(check_location(slot.location()), Ok(()));
            prop_assert_eq!(byte_of(slot.location()), sector * 512);
            let next = slot.location() + distance;
            prop_assert_eq!(follows(slot.location(), distance, next), u64::from(index) + distance < 32);
            for bit in 60..63 {
                prop_assert!(check_location(slot.location() | 1 << bit).is_err());
            }
        }

        #[test]
        fn junk_never_panics(location in any::<u64>(), bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = (check_location(location), byte_of(location), BlobHeader::decode(&bytes));
        }
    }

    #[test]
    fn unknown_codecs_and_flags_are_rejected() {
        let header = BlobHeader { codec: BlobCodec::Zstd, blocks: 32, length: 3 };
        let mut bytes = header.encode();
        bytes.extend_from_slice(b"abcd");
        assert_eq!(BlobHeader::decode(&bytes), Ok((header, &b"abc"[..])));
        for (at, value) in [(0, 0), (0, 4), (1, 0), (1, 33), (2, 1), (3, 128), (4, 5)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            assert!(BlobHeader::decode(&bad).is_err(), "byte {at}");
        }
        assert!(is_blob_range(0, 32) && is_blob_range(33, 31) && !is_blob_range(33, 32) && !is_blob_range(0, 0));
    }
}
