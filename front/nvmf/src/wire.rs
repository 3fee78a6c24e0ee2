//! Wire format of NVMe over TCP: PDUs, submission and completion queue entries, status codes, data structures.
//!
//! Section numbers are those of the NVM Express Base specification 2.0 ("base"), the NVM command set 1.0 ("nvm")
//! and the TCP transport 1.0 ("tcp").  All fields are little-endian.

pub mod auth;
pub mod command;
pub mod fabrics;
pub mod identify;
pub mod log;
pub mod pdu;
pub mod reservation;
pub mod status;

pub use command::{Cqe, Sqe};
pub use status::NvmeStatus;

/// Unit of `CAP.MPSMIN`, and so of MDTS, in bytes.
pub const PAGE: usize = 4096;

/// Reads the 16-bit number at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// Reads the 32-bit number at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Reads the 64-bit number at `at`.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Data structure that is filled in place, field by field.
#[derive(Debug)]
pub struct DataStructure(Vec<u8>);

impl DataStructure {
    /// Creates a structure of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    /// Writes one byte.
    pub fn u8(&mut self, at: usize, value: u8) -> &mut Self {
        self.0[at] = value;
        self
    }

    /// Writes a 16-bit number.
    pub fn u16(&mut self, at: usize, value: u16) -> &mut Self {
        self.bytes(at, &value.to_le_bytes())
    }

    /// Writes a 32-bit number.
    pub fn u32(&mut self, at: usize, value: u32) -> &mut Self {
        self.bytes(at, &value.to_le_bytes())
    }

    /// Writes a 64-bit number.
    pub fn u64(&mut self, at: usize, value: u64) -> &mut Self {
        self.bytes(at, &value.to_le_bytes())
    }

    /// Writes a 128-bit number.
    pub fn u128(&mut self, at: usize, value: u128) -> &mut Self {
        self.bytes(at, &value.to_le_bytes())
    }

    /// Writes bytes.
    pub fn bytes(&mut self, at: usize, value: &[u8]) -> &mut Self {
        self.0[at..at + value.len()].copy_from_slice(value);
        self
    }

    /// Writes ASCII text, truncated or padded with spaces to `len` bytes (base 1.4.2).
    pub fn ascii(&mut self, at: usize, len: usize, text: &str) -> &mut Self {
        let field = &mut self.0[at..at + len];
        field.fill(b' ');
        let printable = text.bytes().filter(|byte| (0x20..0x7F).contains(byte));
        field.iter_mut().zip(printable).for_each(|(to, from)| *to = from);
        self
    }

    /// Writes a UTF-8 string, truncated to `len - 1` bytes.  The rest of the field keeps its zero bytes.
    pub fn string(&mut self, at: usize, len: usize, text: &str) -> &mut Self {
        let text = &text.as_bytes()[..text.len().min(len - 1)];
        self.bytes(at, text)
    }

    /// Appends bytes.
    pub fn extend(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Returns the bytes of the structure.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Returns a string terminated by a zero byte or by the end of its field; `None` if it is not UTF-8.
pub fn string_of(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end]).ok()
}
