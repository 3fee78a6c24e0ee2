//! Parts that the measuring programs share.

use forebay_block::ObjectName;

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

/// Returns the processor time of this process in seconds, all threads together.
pub fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc/self/stat");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    // Fields 14 and 15 (utime, stime), in ticks of 10 ms.
    fields[11..13].iter().map(|field| field.parse::<f64>().expect("ticks") / 100.0).sum()
}
