//! Failures reported to users: the kind, which selects the exit code and the HTTP status; a message; and a hint.

use std::fmt;

use forebay_block::ErrorKind;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Shorthand for this program's results.
pub type Result<T> = std::result::Result<T, Failure>;

/// Kind of a failure, stable for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// Any failure without a more specific kind.
    Failed,
    /// Invalid request.
    Invalid,
    /// No such pool, image, target or file.
    NotFound,
    /// No daemon responds.
    Unreachable,
    /// Object exists already.
    Exists,
    /// In use, or locked by another process.
    Busy,
    /// The pool or device is full.
    NoSpace,
    /// Stored bytes are damaged.
    Corrupt,
    /// Not supported by this build or this pool.
    Unsupported,
    /// Permission denied.
    Denied,
}

impl FailureKind {
    /// Every kind, in the order of the exit codes.
    #[cfg(test)]
    pub const ALL: [FailureKind; 10] = [
        FailureKind::Failed,
        FailureKind::Invalid,
        FailureKind::NotFound,
        FailureKind::Unreachable,
        FailureKind::Exists,
        FailureKind::Busy,
        FailureKind::NoSpace,
        FailureKind::Corrupt,
        FailureKind::Unsupported,
        FailureKind::Denied,
    ];

    /// Returns its name in JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Failed => "failed",
            FailureKind::Invalid => "invalid",
            FailureKind::NotFound => "not_found",
            FailureKind::Unreachable => "unreachable",
            FailureKind::Exists => "exists",
            FailureKind::Busy => "busy",
            FailureKind::NoSpace => "no_space",
            FailureKind::Corrupt => "corrupt",
            FailureKind::Unsupported => "unsupported",
            FailureKind::Denied => "denied",
        }
    }

    /// Returns the exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            FailureKind::Failed => 1,
            FailureKind::Invalid => 2,
            FailureKind::NotFound => 3,
            FailureKind::Unreachable => 4,
            FailureKind::Exists => 5,
            FailureKind::Busy => 6,
            FailureKind::NoSpace => 7,
            FailureKind::Corrupt => 8,
            FailureKind::Unsupported => 9,
            FailureKind::Denied => 10,
        }
    }

    /// Describes the exit code, for the help and the manual.
    #[cfg(test)]
    pub fn describe(self) -> &'static str {
        match self {
            FailureKind::Failed => "failed",
            FailureKind::Invalid => "wrong usage or invalid request",
            FailureKind::NotFound => "no such pool, image, target or file",
            FailureKind::Unreachable => "no daemon answers, or no monitor of a cluster",
            FailureKind::Exists => "it exists already",
            FailureKind::Busy => "in use, or locked by another process",
            FailureKind::NoSpace => "no space left",
            FailureKind::Corrupt => "stored data is damaged",
            FailureKind::Unsupported => "not supported by this build or pool",
            FailureKind::Denied => "not permitted",
        }
    }

    /// Returns the status of an HTTP response.
    pub fn http_status(self) -> u16 {
        match self {
            FailureKind::Failed | FailureKind::Corrupt => 500,
            FailureKind::Invalid => 400,
            FailureKind::NotFound => 404,
            FailureKind::Unreachable => 503,
            FailureKind::Exists | FailureKind::Busy => 409,
            FailureKind::NoSpace => 507,
            FailureKind::Unsupported => 501,
            FailureKind::Denied => 403,
        }
    }
}

/// Failure with a message and an optional hint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// Kind, for scripts.
    pub kind: FailureKind,
    /// Message for users: the error and the object it concerns.
    pub message: String,
    /// Hint on how to correct it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Failure {
    /// Creates a failure of the given kind.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// Creates a failure without a specific kind.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Failed, message)
    }

    /// Creates the failure of an invalid request.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Invalid, message)
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the message with the operation that failed.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Creates a failure from an I/O error.
    pub fn io(error: std::io::Error, context: impl fmt::Display) -> Self {
        use std::io::ErrorKind as Os;
        let kind = match error.kind() {
            Os::NotFound => FailureKind::NotFound,
            Os::AlreadyExists => FailureKind::Exists,
            Os::PermissionDenied | Os::ReadOnlyFilesystem => FailureKind::Denied,
            Os::StorageFull | Os::QuotaExceeded => FailureKind::NoSpace,
            Os::ResourceBusy | Os::WouldBlock => FailureKind::Busy,
            _ => FailureKind::Failed,
        };
        Self::new(kind, format!("{context}: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

impl From<forebay_block::Error> for Failure {
    fn from(error: forebay_block::Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::NotFound => FailureKind::NotFound,
            ErrorKind::Exists => FailureKind::Exists,
            ErrorKind::NoSpace => FailureKind::NoSpace,
            ErrorKind::Corrupt => FailureKind::Corrupt,
            ErrorKind::ReadOnly | ErrorKind::Denied => FailureKind::Denied,
            ErrorKind::OutOfRange | ErrorKind::Invalid => FailureKind::Invalid,
            ErrorKind::Busy => FailureKind::Busy,
            ErrorKind::Unsupported => FailureKind::Unsupported,
            ErrorKind::Io
            | ErrorKind::Mismatch(_)
            | ErrorKind::Guard
            | ErrorKind::TimedOut
            | ErrorKind::Fenced
            | ErrorKind::ShuttingDown => FailureKind::Failed,
        };
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            message = format!("{message} ({cause})");
            source = cause.source();
        }
        Self::new(kind, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_distinct_and_in_order() {
        let codes: Vec<u8> = FailureKind::ALL.iter().map(|kind| kind.exit_code()).collect();
        assert_eq!(codes, (1..=10).collect::<Vec<u8>>());
    }

    #[test]
    fn the_cause_is_named() {
        let io = std::io::Error::other("the disk is on fire");
        let failure = Failure::from(forebay_block::Error::from_io(io, "reading block 7"));
        assert_eq!(failure.message, "reading block 7: input/output error (the disk is on fire)");
        assert_eq!(failure.kind, FailureKind::Failed);
    }
}
