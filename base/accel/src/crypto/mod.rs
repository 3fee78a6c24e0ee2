//! Encryption: XTS for what is stored, GCM for what travels.
//!
//! [`Xts`] maps sectors to sectors of the same length, and does not detect tampering; callers that need detection keep
//! a checksum over the plain data, as the store does, or a tag.  [`Gcm`] adds a tag of 16 bytes and rejects data that
//! does not match it, and must never see a nonce twice under one key.
//!
//! [`hmac_sha256`] derives keys from others, and values that tell keys apart.
//!
//! [`base64`] reads keys that are passed on as text; [`dh`] has the finite-field groups that DH-HMAC-CHAP asks for.
//!
//! XTS is implemented here over the processor's AES instructions; GCM is aws-lc's, which selects its own implementation
//! (`FOREBAY_ACCEL` does not affect it).  Keys are erased when their holder is dropped, and are not shown by `Debug`.

pub mod base64;
pub mod dh;
mod gcm;
mod hmac;
mod perf;
mod xts;

pub use gcm::{Gcm, NONCE_LEN, TAG_LEN, TagMismatch};
pub use hmac::{HMAC_LEN, hmac_sha256};
pub(crate) use perf::perf;
pub(crate) use xts::shapes::contests;
pub use xts::{SectorNumber, SectorSize, Xts};

/// Reason why a key cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CipherKeyError {
    /// Invalid key length, in bytes.
    #[error("a key of {0} bytes; it must have {1}")]
    Length(usize, &'static str),
    /// Both halves of an XTS key are the same, which breaks the mode (FIPS 140-3 implementation guidance C.I).
    #[error("the two halves of an XTS key are equal; they must differ")]
    HalvesEqual,
}
