//! Errors of a front-end.

use std::io;
use std::time::Duration;

/// Result with a [`FrontEndError`].
pub type Result<T> = std::result::Result<T, FrontEndError>;

/// Reason why a front-end does not go on.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// The device has closed the connection.
    #[error("the device has closed the connection")]
    Ended,
    /// The device did not do in time what was waited for.
    #[error("no {what} within {patience:?}")]
    TimedOut {
        /// Event that was waited for.
        what: String,
        /// Time that has passed.
        patience: Duration,
    },
    /// The device has acknowledged a message with an error.
    #[error("the device refused request {request} with {value:#x}")]
    Refused {
        /// Number of the message's request.
        request: u32,
        /// Value of the acknowledgement, not 0.
        value: u64,
    },
    /// The device has broken the protocol.
    #[error("the device broke the protocol: {0}")]
    Violation(String),
    /// The device has signalled the error descriptor of a queue.
    #[error("the device reported an error of queue {0}")]
    QueueError(u16),
    /// Guest memory is not as large as this access needs, or has no free space left.
    #[error("guest memory has no {length} bytes at {address:#x}")]
    NoMemory {
        /// Guest address; [`u64::MAX`] for an allocation.
        address: u64,
        /// Number of bytes.
        length: u64,
    },
    /// A queue has fewer free descriptors than a chain needs.
    #[error("the queue is full")]
    QueueFull,
    /// Error of the operating system.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for FrontEndError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl FrontEndError {
    /// Creates the error of an event that did not come in time.
    pub fn timed_out(what: impl Into<String>, patience: Duration) -> Self {
        Self::TimedOut { what: what.into(), patience }
    }
}
