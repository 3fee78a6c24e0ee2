//! What whoever attaches a log decides about it.

use std::time::Duration;

use forebay_block::{LocalFuture, Result};

/// When a write is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Persist {
    /// When it lasts.
    #[default]
    OnWrite,
    /// At once; it lasts when the next flush (or its FUA) is answered.
    OnFlush,
}

/// How much the backend may lack of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the volume at most; `None`: as many as the log holds.
    pub bytes_max: Option<u64>,
    /// How long it may lack a write, about, unless the backend cannot keep up.
    pub age_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes_max: None, age_max: Duration::from_secs(2) }
    }
}

/// How a log behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// When writes are answered.
    pub persist: Persist,
    /// How much the backend may lack.
    pub limits: Limits,
    /// Sequential writes from so many bytes on go round the log when nothing stands in their way; `None`: none do.
    pub direct_min: Option<u32>,
    /// Payload bytes that are kept in memory after they were written, to be written back without reading them.
    pub recent_bytes: usize,
    /// Requests to the backend at once in writing back.
    pub parallel: usize,
    /// Entries that are written back together at most.
    pub batch_entries: usize,
    /// Groups that are appended at once.
    pub groups: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            persist: Persist::OnWrite,
            limits: Limits::default(),
            direct_min: Some(256 << 10),
            recent_bytes: 4 << 20,
            parallel: 256,
            batch_entries: 2048,
            groups: 2,
        }
    }
}

/// Who attached the log, and keeps the record of it with the image.
pub trait Owner {
    /// Makes this process the volume's only writer, and verifies after that that the record still names this log.
    /// Until it succeeds the log acknowledges and writes back nothing; it is tried again after errors that may pass.
    /// `None`: that is known already.
    ///
    /// # Errors
    /// [`ErrorKind::Fenced`](forebay_block::ErrorKind::Fenced) when the record names another log, or none: this one
    /// then fails for good.
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        None
    }

    /// The log has turned itself off and is about to be gone round: what is on its medium must never be replayed
    /// again.  Tried again until it succeeds.
    fn release(&self) -> LocalFuture<Result<()>>;
}
