//! Entries as bytes that are the same on every member, and their places.

use forebay_reactor::BufList;

/// Entries that were appended together, as they are on every member's medium.
#[derive(Debug, Clone)]
pub struct RawAppend {
    /// Sequence number of the first entry.
    pub first_seq: u64,
    /// Number of entries.
    pub count: u32,
    /// Term in which they were appended.
    pub term: u32,
    /// Place after them.
    pub next: AppendCursor,
    /// Append block.
    pub bytes: BufList,
}

/// Place between the entries of a log where the next ones are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AppendCursor {
    /// Number of the block.
    pub number: u64,
    /// End of the block before, in units since the log's creation.
    pub pos: u64,
    /// Sequence number of the next entry.
    pub seq: u64,
}

/// Beginning of a log: its oldest entries that may be needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyStart {
    /// Number of the oldest entry that the backend may not hold.
    pub tail_seq: u64,
    /// Place of that entry, or of one before it that is in the same block.
    pub at: AppendCursor,
}
