//! Options of a log, chosen on attachment.

use std::time::Duration;

use forebay_block::{Error, LocalFuture, Result};

/// Acknowledgement mode of writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Persist {
    /// Acknowledgement once the write is durable.
    #[default]
    OnWrite,
    /// Acknowledgement at once; the write is durable when the next flush (or its FUA) completes.
    OnFlush,
}

/// Limits of dirty data: writes in the log that the backend does not hold yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyLimits {
    /// Maximum dirty bytes; `None`: limited by the log's capacity only.
    pub bytes_max: Option<u64>,
    /// Approximate maximum age of dirty data, unless the backend cannot keep up.
    pub age_max: Duration,
}

impl Default for DirtyLimits {
    fn default() -> Self {
        Self { bytes_max: None, age_max: Duration::from_secs(2) }
    }
}

/// Options of a log.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Acknowledgement mode of writes.
    pub persist: Persist,
    /// Limits of dirty data.
    pub limits: DirtyLimits,
    /// Minimum length in bytes of sequential writes that may bypass the log; `None` disables the bypass.
    pub direct_min: Option<u32>,
    /// Payload bytes cached in memory after they were appended, so that write-back need not read them.
    pub recent_bytes: usize,
    /// Maximum write-back requests in flight to the backend.
    pub parallel: usize,
    /// Maximum number of entries of a write-back batch.
    pub batch_entries: usize,
    /// Maximum number of groups being appended at once.
    pub groups: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            persist: Persist::OnWrite,
            limits: DirtyLimits::default(),
            direct_min: Some(256 << 10),
            recent_bytes: 4 << 20,
            parallel: 256,
            batch_entries: 2048,
            groups: 2,
        }
    }
}

/// Owner of an attached log, which maintains its record with the image.
pub trait LogOwner {
    /// Makes this process the volume's only writer, and then verifies that the record still names this log. Until it
    /// succeeds, the log acknowledges and writes back nothing; it is retried after transient errors. `None` if that
    /// is already established.
    ///
    /// # Errors
    /// [`ErrorKind::Fenced`](forebay_block::ErrorKind::Fenced) if the record names another log, or none: this one
    /// then fails permanently.
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        None
    }

    /// Permits a read, at once with `None`: no other process can have become the volume's writer yet.
    ///
    /// # Errors
    /// If another process is the volume's writer.
    fn permit_read(&self) -> Option<LocalFuture<Result<()>>> {
        None
    }

    /// Permits acknowledgements of durable writes, at once with `None`: enough copies of the log are complete.
    ///
    /// # Errors
    /// If another process is the volume's writer.
    fn permit_acknowledgement(&self) -> Option<LocalFuture<Result<()>>> {
        None
    }

    /// Waits until the log has to be disabled although its medium works, and returns why: it is written back then, and
    /// bypassed. `None` if that never happens.
    fn unusable(&self) -> Option<LocalFuture<Error>> {
        None
    }

    /// Records that the contents of the medium must never be replayed again: the log is being disabled and about to
    /// be bypassed. Retried until it succeeds.
    fn release(&self) -> LocalFuture<Result<()>>;
}
