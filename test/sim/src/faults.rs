//! Fault injection: kinds of faults and their rates.  Rates are in parts per million of the operations they apply to.

use std::ops::Range;

/// Nanoseconds in a microsecond.
pub const MICRO: u64 = 1_000;
/// Nanoseconds in a millisecond.
pub const MILLI: u64 = 1_000_000;

/// Faults of the whole world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    /// Faults of disks that have none of their own.
    pub disk: DiskFaults,
    /// Faults of connections.
    pub net: NetFaults,
    /// Effect of a crash on writes that were not synced.
    pub crash: CrashPolicy,
    /// Bytes that all files together may have stored or allocated (devices do not count); `None`: without end.
    pub files_capacity: Option<u64>,
    /// Remaining space is reported by the file system; otherwise only a write or an allocation detects its end.
    pub files_space_known: bool,
    /// Events that one run may have before it counts as running in circles.
    pub events_max: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Self::none()
    }
}

impl Faults {
    /// Returns settings without faults. Operations still take time and are reordered, and crashes use the seeded
    /// policy.
    pub fn none() -> Self {
        Self {
            disk: DiskFaults::none(),
            net: NetFaults::none(),
            crash: CrashPolicy::Seeded,
            files_capacity: None,
            files_space_known: false,
            events_max: 20_000_000,
        }
    }
}

/// Faults of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFaults {
    /// Read latency in nanoseconds.
    pub read_latency: Range<u64>,
    /// Latency of a write or a punch in nanoseconds.
    pub write_latency: Range<u64>,
    /// Sync latency in nanoseconds.
    pub sync_latency: Range<u64>,
    /// Operations that take `stall` longer.
    pub stall_ppm: u32,
    /// Additional latency of a stalled operation, in nanoseconds.
    pub stall: Range<u64>,
    /// Reads that fail with EIO.
    pub read_error_ppm: u32,
    /// Writes and punches that fail with EIO; any part of them may have been done.
    pub write_error_ppm: u32,
    /// Syncs that fail with EIO; what they were to make durable stays at risk.
    pub sync_error_ppm: u32,
    /// Writes that fail with ENOSPC, though there is space.
    pub no_space_ppm: u32,
    /// Reads that return one flipped bit of what is stored intact.
    pub read_flip_ppm: u32,
    /// Writes of which one stored bit is flipped.
    pub write_flip_ppm: u32,
    /// Writes that are acknowledged and never done.
    pub lost_write_ppm: u32,
    /// Writes that land somewhere else on the same disk.
    pub misdirected_write_ppm: u32,
    /// Operations after which the disk is dead: each one fails with EIO from then on.
    pub life: Option<u64>,
}

impl DiskFaults {
    /// A sound disk that takes its time and keeps no order.
    pub fn none() -> Self {
        Self {
            read_latency: 5 * MICRO..100 * MICRO,
            write_latency: 5 * MICRO..300 * MICRO,
            sync_latency: 20 * MICRO..500 * MICRO,
            stall_ppm: 0,
            stall: MILLI..500 * MILLI,
            read_error_ppm: 0,
            write_error_ppm: 0,
            sync_error_ppm: 0,
            no_space_ppm: 0,
            read_flip_ppm: 0,
            write_flip_ppm: 0,
            lost_write_ppm: 0,
            misdirected_write_ppm: 0,
            life: None,
        }
    }

    /// One that stalls now and then.
    pub fn stalling() -> Self {
        Self { stall_ppm: 20_000, ..Self::none() }
    }

    /// One that says EIO now and then, to `ppm` of all operations.
    pub fn failing(ppm: u32) -> Self {
        Self { read_error_ppm: ppm, write_error_ppm: ppm, sync_error_ppm: ppm, ..Self::none() }
    }
}

/// Faults of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetFaults {
    /// Latency of a segment in nanoseconds.  Segments of a connection are never reordered.
    pub latency: Range<u64>,
    /// Longest segment in bytes; a send is cut into segments of 1 to this many bytes.
    pub segment_max: usize,
    /// Bytes that a connection takes before the receiver has read some.
    pub window: usize,
    /// Receives return a part of what has arrived (those that do not ask for all).
    pub partial_recv: bool,
    /// Connects that are refused.
    pub refuse_ppm: u32,
    /// Segments at which the connection is reset, for both ends.
    pub reset_ppm: u32,
    /// Segments at which the connection goes silent, without either end being notified.
    pub cut_ppm: u32,
    /// Segments that come later, by up to this many nanoseconds.
    pub stall_ppm: u32,
    /// Additional latency of a stalled segment, in nanoseconds.
    pub stall: Range<u64>,
}

impl NetFaults {
    /// A sound network.
    pub fn none() -> Self {
        Self {
            latency: 10 * MICRO..200 * MICRO,
            segment_max: 64 * 1024,
            window: 256 * 1024,
            partial_recv: true,
            refuse_ppm: 0,
            reset_ppm: 0,
            cut_ppm: 0,
            stall_ppm: 0,
            stall: MILLI..500 * MILLI,
        }
    }
}

/// Effect of a power failure on each write that no sync covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPolicy {
    /// Policy drawn per crash from the seed: one of the others, or a mixture with its own odds.
    Seeded,
    /// All such writes are lost.
    LoseAll,
    /// All such writes are kept, including those in flight.
    KeepAll,
    /// Each one by itself: kept, lost, or torn, sector by sector.
    Mixed {
        /// Kept, of a million.
        keep_ppm: u32,
        /// Torn, of a million; the rest is lost.
        tear_ppm: u32,
    },
}
