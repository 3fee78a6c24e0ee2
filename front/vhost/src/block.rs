//! virtio-blk device (VIRTIO 1.2, section 5.2): its configuration, its requests, and their execution on a
//! [`BlockDevice`](forebay_block::BlockDevice).
//!
//! ```text
//! features, BlockConfig   what the guest sees                        block/config.rs
//! BlockCommand            request that a buffer contains             block/request.rs
//! gather, scatter         data out of the guest's memory, and in     block/payload.rs
//! execute, complete       device requests of a command, its status   block/execute.rs
//! ```
//!
//! A guest may change its memory at any time.  So each byte of a buffer is read once, and data is copied out before it
//! is used: what is checked is what is executed.

mod config;
mod execute;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod payload;
mod request;
#[cfg(test)]
mod tests;

pub use config::{BLOCK_CONFIG_LEN, BlockConfig, BlockConfigRefusal, capacity, features};
pub use execute::{BlockDone, BlockFuture, complete, execute};
pub use payload::{PayloadPools, buffer_len, copy_from, gather, put_status, scatter};
pub use request::{BlockCommand, BlockRefusal, BlockRules, BlockViolation, ZeroedExtent};

/// Bytes of a sector, the unit of capacities and positions (section 5.2.4).
pub const SECTOR: u64 = 512;
/// Bytes of the serial number of a device (section 5.2.6).
pub const SERIAL_LEN: usize = 20;
/// Maximum data descriptors of a request, as announced: fits a ring of 128 with the header and the status.
pub const SEGMENTS_MAX: u32 = 126;
/// Maximum bytes of a data descriptor, as announced.
pub const SEGMENT_BYTES_MAX: u32 = 256 << 10;
/// Maximum bytes of data of a request.  What drivers that keep to both announced limits send is shorter.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// Maximum ranges of a discard or write-zeroes request.
pub const RANGES_MAX: u32 = 32;
/// Maximum sectors of such a range: 2 GiB.
pub const RANGE_SECTORS_MAX: u32 = 4 << 20;

/// Feature bits of the device (section 5.2.3).
pub mod feature {
    /// Maximum bytes of a data descriptor are in `size_max`.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// Maximum data descriptors of a request are in `seg_max`.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Device is read-only.
    pub const RO: u64 = 1 << 5;
    /// Logical block size is in `blk_size`.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Device has a write cache that a flush empties.
    pub const FLUSH: u64 = 1 << 9;
    /// Alignment of requests is in `topology`.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// Driver switches the write cache through `writeback`.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Number of queues is in `num_queues`.
    pub const MQ: u64 = 1 << 12;
    /// Device supports discard requests.
    pub const DISCARD: u64 = 1 << 13;
    /// Device supports write-zeroes requests.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Request types (section 5.2.6).
pub(crate) mod request_type {
    /// Read of data.
    pub(crate) const IN: u32 = 0;
    /// Write of data.
    pub(crate) const OUT: u32 = 1;
    /// Flush of the write cache.
    pub(crate) const FLUSH: u32 = 4;
    /// Serial number.
    pub(crate) const GET_ID: u32 = 8;
    /// Discard of ranges.
    pub(crate) const DISCARD: u32 = 11;
    /// Zeroing of ranges.
    pub(crate) const WRITE_ZEROES: u32 = 13;
}

/// Values of the status byte (section 5.2.6).
pub mod status {
    /// Success of the request.
    pub const OK: u8 = 0;
    /// Failure of the device or of the driver.
    pub const IOERR: u8 = 1;
    /// Request is not supported.
    pub const UNSUPP: u8 = 2;
}
