//! What may go wrong, and how often.  Rates are in parts per million of the operations they apply to.

use std::ops::Range;

/// Nanoseconds in a microsecond.
pub const MICRO: u64 = 1_000;
/// Nanoseconds in a millisecond.
pub const MILLI: u64 = 1_000_000;

/// Faults of the whole world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults {
    /// Of disks that have none of their own.
    pub disk: DiskFaults,
    /// Of connections.
    pub net: NetFaults,
    /// What a crash does to writes that were not synced.
    pub crash: CrashPolicy,
    /// Bytes that all files together may have stored or allocated (devices do not count); `None`: without end.
    pub files_capacity: Option<u64>,
    /// The file system says how much of that is left to whoever asks; else only a write or an allocation finds out.
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
    /// Nothing goes wrong, but nothing is instant and operations overtake each other; crashes do all they can.
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
    /// How long a read takes, in nanoseconds.
    pub read_latency: Range<u64>,
    /// How long a write or a punch takes, in nanoseconds.
    pub write_latency: Range<u64>,
    /// How long a sync takes, in nanoseconds.
    pub sync_latency: Range<u64>,
    /// Operations that take `stall` longer.
    pub stall_ppm: u32,
    /// How much longer, in nanoseconds.
    pub stall: Range<u64>,
    /// Reads that fail with EIO.
    pub read_error_ppm: u32,
    /// Writes and punches that fail with EIO; any part of them may have been done.
    pub write_error_ppm: u32,
    /// Syncs that fail with EIO; what they were to make durable stays at risk.
    pub sync_error_ppm: u32,
    /// Writes that fail with ENOSPC, though there is room.
    pub no_space_ppm: u32,
    /// Reads that return one flipped bit of what is stored intact.
    pub read_flip_ppm: u32,
    /// Writes of which one stored bit is flipped.
    pub write_flip_ppm: u32,
    /// Writes that are answered and never done.
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
    /// How long a segment is under way, in nanoseconds.  Segments of a connection never overtake each other.
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
    /// Segments at which the connection goes silent, without either end being told.
    pub cut_ppm: u32,
    /// Segments that come later, by up to this many nanoseconds.
    pub stall_ppm: u32,
    /// How much later, in nanoseconds.
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

/// What a power failure does to each write that no sync covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPolicy {
    /// Each crash takes one of the others by its seed, or a mixture with odds of its own.
    Seeded,
    /// All of them are lost.
    LoseAll,
    /// All of them are kept, those in flight too.
    KeepAll,
    /// Each one by itself: kept, lost, or torn, sector by sector.
    Mixed {
        /// Kept, of a million.
        keep_ppm: u32,
        /// Torn, of a million; the rest is lost.
        tear_ppm: u32,
    },
}
