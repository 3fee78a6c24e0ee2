//! Other people's kernels: Debian's ISA-L and jerasure, opened at run time, and the newest ISA-L, linked for races.

pub mod debian;
#[cfg(feature = "bench")]
pub mod isal;
