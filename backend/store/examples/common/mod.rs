//! Parts that the measuring programs share.

mod cpu;

use forebay_block::ObjectName;

pub use cpu::cpu_seconds;

/// Size of an object in bytes.
pub const OBJECT: u64 = 4 << 20;
/// Size of a block in bytes.
pub const BLOCK: u64 = 4096;

/// Pseudorandom numbers (xorshift), the same in every run.
pub struct Rng(u64);

impl Rng {
    /// Returns the generator.
    pub fn new() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }

    /// Returns the next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Returns the name of an object.
pub fn object(index: u64) -> ObjectName {
    ObjectName::new(format!("rbd_data.bench.{index:016x}"))
}
