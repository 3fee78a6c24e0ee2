use std::fmt;
use std::sync::Arc;

/// Shorthand for results of this crate's traits.
pub type Result<T> = std::result::Result<T, Error>;

/// Kind of an error, which a front maps to its protocol's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Object, image or snapshot does not exist (ENOENT).
    NotFound,
    /// Object, image or snapshot exists already (EEXIST).
    Exists,
    /// Device or pool is full (ENOSPC).
    NoSpace,
    /// Medium error (EIO).
    Io,
    /// Checksum mismatch of stored bytes (EIO; never retried, never returned as data).
    Corrupt,
    /// Write to a read-only or write-protected target (EROFS, EPERM).
    ReadOnly,
    /// Offset past the end of the device or object (EINVAL, or ENOSPC for a write).
    OutOfRange,
    /// Invalid request (EINVAL).
    Invalid,
    /// Resource is in use or locked by another owner (EBUSY).
    Busy,
    /// Compare mismatch; the offset of the first differing byte, relative to the start of the compare.
    Mismatch(u64),
    /// Guard of a transaction failed; nothing was changed (ECANCELED).
    Guard,
    /// Timeout (ETIMEDOUT).
    TimedOut,
    /// Fenced: another owner has taken over, and this one must stop (ESHUTDOWN).
    Fenced,
    /// Operation not supported (ENOTSUP).
    Unsupported,
    /// Shutdown in progress (ESHUTDOWN).
    ShuttingDown,
    /// Permission denied (EPERM).
    Denied,
}

impl ErrorKind {
    /// Returns a short text for operators.
    pub fn describe(self) -> &'static str {
        match self {
            ErrorKind::NotFound => "not found",
            ErrorKind::Exists => "exists already",
            ErrorKind::NoSpace => "no space left",
            ErrorKind::Io => "input/output error",
            ErrorKind::Corrupt => "checksum mismatch",
            ErrorKind::ReadOnly => "read-only",
            ErrorKind::OutOfRange => "out of range",
            ErrorKind::Invalid => "invalid request",
            ErrorKind::Busy => "busy",
            ErrorKind::Mismatch(_) => "data differs",
            ErrorKind::Guard => "a guard did not hold",
            ErrorKind::TimedOut => "timed out",
            ErrorKind::Fenced => "fenced off",
            ErrorKind::Unsupported => "not supported",
            ErrorKind::ShuttingDown => "shutting down",
            ErrorKind::Denied => "not permitted",
        }
    }
}

/// Error of a block device or object backend: its kind, the failed operation, and the cause.  Cheap to clone, so that
/// one failed group commit can be reported to all its waiters.
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    context: Arc<str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Creates an error; `context` names the operation and its object.
    pub fn new(kind: ErrorKind, context: impl AsRef<str>) -> Self {
        Self { kind, context: context.as_ref().into(), source: None }
    }

    /// Creates an error from an I/O error, which determines the kind and becomes the source.
    pub fn from_io(error: std::io::Error, context: impl AsRef<str>) -> Self {
        use std::io::ErrorKind as Os;
        let kind = match error.kind() {
            Os::StorageFull | Os::QuotaExceeded | Os::FileTooLarge => ErrorKind::NoSpace,
            Os::NotFound => ErrorKind::NotFound,
            Os::AlreadyExists => ErrorKind::Exists,
            Os::PermissionDenied => ErrorKind::Denied,
            Os::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            Os::WouldBlock | Os::ResourceBusy => ErrorKind::Busy,
            Os::TimedOut => ErrorKind::TimedOut,
            Os::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Self { kind, context: context.as_ref().into(), source: Some(Arc::new(error)) }
    }

    /// Sets the error that caused it.
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Prepends `what` to the context, unless the context begins with it already.  The kind and the cause stay.
    pub fn within(self, what: impl fmt::Display) -> Self {
        let what = what.to_string();
        let context = match self.context() {
            "" => what,
            context if context.strip_prefix(&what).is_some_and(|rest| rest.is_empty() || rest.starts_with(':')) => {
                return self;
            }
            context => format!("{what}: {context}"),
        };
        Self { context: context.into(), ..self }
    }

    /// Returns the kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the context: the operation that failed.
    pub fn context(&self) -> &str {
        &self.context
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.context.is_empty() {
            return f.write_str(self.kind.describe());
        }
        write!(f, "{}: {}", self.context, self.kind.describe())?;
        if let ErrorKind::Mismatch(at) = self.kind {
            write!(f, " at byte {at}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Error::new(kind, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_front_are_said_once_and_keep_the_cause() {
        let cause = std::io::Error::other("the disk is on fire");
        let error = Error::from_io(cause, "reading block 7").within("image a").within("image a");
        assert_eq!(error.to_string(), "image a: reading block 7: input/output error");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("the disk is on fire"));
        assert_eq!(Error::from(ErrorKind::Busy).within("image a").to_string(), "image a: busy");
        assert_eq!(Error::new(ErrorKind::Busy, "image ab").within("image a").context(), "image a: image ab");
    }
}
