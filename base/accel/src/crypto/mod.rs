//! Encryption: GCM for what travels.
//!
//! [`Gcm`] adds a tag of 16 bytes and refuses what does not fit it, and must never see a nonce twice under one key.
//!
//! The ciphers are aws-lc's, which picks its own instructions for the processor; `FOREBAY_ACCEL` has no say in it.
//! Keys are erased when their holder is dropped, and are not shown by `Debug`.

mod gcm;
mod perf;

pub use gcm::{Gcm, NONCE_LEN, TAG_LEN, TagMismatch};
pub(crate) use perf::perf;

/// Why a key cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not one of the cipher's lengths, in bytes.
    #[error("a key of {0} bytes; it must have {1}")]
    Length(usize, &'static str),
}
