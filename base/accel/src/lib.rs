//! Compute kernels tuned for each processor, behind one call each, selected at run time.
//!
//! | module | purpose |
//! |---|---|
//! | [`crc32c`] | CRC32C checksums (RFC 3720) of stored blocks and frames |
//! | [`erasure`] | Reed-Solomon codes, byte-identical with ISA-L and jerasure |
//! | [`compress`] | codecs, and the engines that run them |
//! | [`crypto`] | encryption |
//! | [`mod@tier`] | instruction tier in use; `FOREBAY_ACCEL` |
//! | [`mod@shape`] | loop shape in use; calibration; `FOREBAY_ACCEL_SHAPES` |
//! | [`processor`] | processor identification |
//! | [`perf`] | list of kernels, for `forebay perf accel` |
//!
//! SIMD code exists in no other crate of the project.

// Other architectures have the portable tier only, and do not use the code shared by the vector tiers.
#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, unused_imports, unused_macros, unused_variables)
)]

pub mod compress;
pub mod crc32c;
pub mod crypto;
pub mod erasure;
pub mod perf;
pub mod processor;
pub mod shape;
pub mod tier;
mod vector;

pub use tier::Tier;
