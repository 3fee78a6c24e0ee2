//! In-flight regions: memory that outlives the device, by which its successor resumes the chains that it had in flight.
//!
//! Source: QEMU's vhost-user specification, "Inflight I/O tracking".  The front-end keeps the region; each queue has a
//! part of it.  A record of version 0 is unused: the queue starts at the base that the front-end gives.

mod packed;
mod split;

pub(crate) use self::packed::PackedRecord;
pub(crate) use self::split::SplitRecord;

/// Version of the layout.
const VERSION: u16 = 1;

/// Alignment of a queue's part.
const ALIGN: u64 = 64;

/// Returns the length in bytes of a queue's part of the region.
pub fn inflight_len(queue_size: u16, packed: bool) -> u64 {
    let size = u64::from(queue_size);
    let len = if packed { packed::HEADER + packed::ENTRY * size } else { split::HEADER + split::ENTRY * size };
    len.next_multiple_of(ALIGN)
}

/// Contradiction in a queue's part of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InflightViolation {
    /// Part that is too short for the queue.
    #[error("{len} bytes are too short: the queue needs {need}")]
    Length {
        /// Length in bytes.
        len: u64,
        /// Length that the queue requires.
        need: u64,
    },
    /// Part at an address that is not aligned.
    #[error("part of a queue is not aligned to 8 bytes")]
    Alignment,
    /// Version or features that are not known.
    #[error("version {version} with features {features:#x} is not supported")]
    Version {
        /// Version of the record.
        version: u16,
        /// Feature bits.
        features: u64,
    },
    /// Number of entries that does not fit the queue.
    #[error("{entries} entries do not fit a queue of {size}")]
    Entries {
        /// Entries of the record.
        entries: u16,
        /// Size of the queue.
        size: u16,
    },
    /// Last batch that is larger than the queue.
    #[error("last batch of {batch} chains exceeds the queue of {size}")]
    Batch {
        /// Chains of the batch.
        batch: u16,
        /// Size of the queue.
        size: u16,
    },
    /// Index of an entry that is outside the record, or part of another list already.
    #[error("entry {0} is outside the record, or in two lists")]
    Entry(u16),
    /// State of an entry that is neither idle nor in flight.
    #[error("entry {entry} has state {state}")]
    EntryState {
        /// Index of the entry.
        entry: u16,
        /// State of the entry.
        state: u8,
    },
    /// Buffer ID that is outside the queue, or in flight twice.
    #[error("buffer ID {0} is outside the queue, or in flight twice")]
    BufferId(u16),
    /// Position outside the ring.
    #[error("used position {index} with wrap counter {wrap} is outside the ring of {size}")]
    Position {
        /// Position in the ring.
        index: u16,
        /// Wrap counter.
        wrap: u8,
        /// Size of the queue.
        size: u16,
    },
    /// Chains in flight that exceed the ring.
    #[error("{descriptors} descriptors in flight exceed the ring of {size}")]
    Overrun {
        /// Descriptors in flight.
        descriptors: u32,
        /// Size of the queue.
        size: u16,
    },
}
