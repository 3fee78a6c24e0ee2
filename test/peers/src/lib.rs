//! Other people's kernels: Debian's ISA-L, jerasure, zlib and OpenSSL, opened at run time, and the newest ISA-L, linked for races.

pub mod cipher;
pub mod corpus;
pub mod debian;
#[cfg(feature = "bench")]
pub mod igzip;
#[cfg(feature = "bench")]
pub mod isal;
pub mod zlib;
