//! Kernels that run at the machine's limit, behind one call each, picked at run time for the processor at hand.
//!
//! | room | what it does |
//! |---|---|
//! | [`crc32c`] | checksums (RFC 3720), which every stored block and every frame carries |
//! | [`erasure`] | Reed-Solomon codes, byte-identical with ISA-L and jerasure |
//! | [`compress`] | codecs, and the engines that run them |
//! | [`crypto`] | encryption |
//! | [`mod@tier`] | which instructions may be used; `FOREBAY_ACCEL` |
//! | [`mod@shape`] | which of several loops is used; calibration; `FOREBAY_ACCEL_SHAPES` |
//! | [`processor`] | which processor this is |
//! | [`perf`] | the list of kernels, for `forebay perf accel` |
//!
//! No other crate of the project holds SIMD code.

// Other architectures have the portable tier only, and nothing of what the tiers with vectors share.
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
