//! Kernels that run at the machine's limit, behind one call each.
//!
//! Today this is CRC32C only (Castagnoli, RFC 3720 appendix B.4), which every stored block and every frame
//! carries.  Erasure coding, compression and encryption join it here; no other crate holds SIMD code.

pub mod crc32c;
