//! On-disk format: encoding and decoding only, without I/O or state.  `docs/formats/store.md` describes every
//! structure.
//!
//! All integers are little-endian.  Decoders accept arbitrary bytes: they check lengths before reading, bound their
//! allocations, and return [`MalformedStore`] with a description of the error.

pub mod anchor;
pub mod batch;
pub mod blob;
pub mod devices;
pub mod entry;
#[cfg(test)]
mod golden;
pub mod key_table;
pub mod node;
pub mod onode;
pub mod page;
pub mod policy;
pub mod ranges;
pub mod record;
pub mod superblock;

use std::fmt;

/// Unit of allocation and of checksums, in bytes.
pub const BLOCK: usize = 4096;
/// [`BLOCK`] as a 64-bit number.
pub const BLOCK64: u64 = BLOCK as u64;
/// Map entries per page: one page maps this many blocks of an object.
pub const PAGE_BLOCKS: u32 = 128;

/// Decoding error, with a description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MalformedStore(pub String);

impl fmt::Display for MalformedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MalformedStore {}

pub(crate) fn malformed<T>(what: impl Into<String>) -> Result<T, MalformedStore> {
    Err(MalformedStore(what.into()))
}

/// Location of a metadata blob in the log: `len` bytes at byte `addr` of the device, with their CRC32C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BlobPtr {
    /// Byte address on the device; 0 when there is none.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// CRC32C of the bytes.
    pub crc: u32,
}

impl BlobPtr {
    /// Encoded size in bytes.
    pub const SIZE: usize = 16;

    /// Returns whether the pointer is null.
    pub fn is_none(&self) -> bool {
        self.addr == 0
    }
}

/// Bounds-checked reader of fields in a byte slice.
pub(crate) struct StoreReader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> StoreReader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, what }
    }

    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], MalformedStore> {
        if len > self.bytes.len() {
            return malformed(format!("{}: {len} bytes wanted, {} left", self.what, self.bytes.len()));
        }
        let (head, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedStore> {
        let bytes = self.bytes(N)?;
        Ok(bytes.try_into().expect("as many bytes as asked for"))
    }

    pub fn u8(&mut self) -> Result<u8, MalformedStore> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16, MalformedStore> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, MalformedStore> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u48(&mut self) -> Result<u64, MalformedStore> {
        let b = self.array::<6>()?;
        Ok(u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], 0, 0]))
    }

    pub fn u64(&mut self) -> Result<u64, MalformedStore> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn ptr(&mut self) -> Result<BlobPtr, MalformedStore> {
        Ok(BlobPtr { addr: self.u64()?, len: self.u32()?, crc: self.u32()? })
    }

    pub fn text(&mut self, len: usize) -> Result<&'a str, MalformedStore> {
        let what = self.what;
        std::str::from_utf8(self.bytes(len)?).map_err(|_| MalformedStore(format!("{what}: a name is not UTF-8")))
    }

    pub fn end(self) -> Result<(), MalformedStore> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            malformed(format!("{}: {} bytes too many", self.what, self.bytes.len()))
        }
    }
}

/// Appends encoded fields to a vector.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);
    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u48(&mut self, value: u64) {
        debug_assert!(value < 1 << 48);
        self.put(&value.to_le_bytes()[..6]);
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    fn put_ptr(&mut self, ptr: BlobPtr) {
        self.put_u64(ptr.addr);
        self.put_u32(ptr.len);
        self.put_u32(ptr.crc);
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Computes the CRC32C of `block`, with the field at `at` taken as zero, and stores it in that field.
pub(crate) fn seal(block: &mut [u8], at: usize) {
    block[at..at + 4].fill(0);
    let crc = forebay_accel::crc32c::crc32c(block);
    block[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Returns whether the CRC32C in the field at `at` is correct.
pub(crate) fn is_sealed(block: &[u8], at: usize) -> bool {
    let Some(field) = block.get(at..at + 4) else { return false };
    let crc = forebay_accel::crc32c::crc32c_parts([&block[..at], &[0; 4], &block[at + 4..]]);
    field == crc.to_le_bytes()
}
