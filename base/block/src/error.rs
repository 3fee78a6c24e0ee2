use std::fmt;
use std::sync::Arc;

/// Shorthand for results of this crate's traits.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in the terms that a front maps to its protocol's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No such object, image or snapshot (ENOENT).
    NotFound,
    /// It is there already (EEXIST).
    Exists,
    /// The device or pool is full (ENOSPC).
    NoSpace,
    /// The medium failed (EIO).
    Io,
    /// Stored bytes do not have the checksum they were stored with (EIO; never retried, never returned as data).
    Corrupt,
    /// Writing is not allowed here (EROFS, EPERM).
    ReadOnly,
    /// Past the end of the device or object (EINVAL, or ENOSPC for a write).
    OutOfRange,
    /// The request makes no sense (EINVAL).
    Invalid,
    /// Somebody else holds it (EBUSY).
    Busy,
    /// A compare found other data; the offset of the first differing byte, counted from the compare's start.
    Mismatch(u64),
    /// A guard of a transaction did not hold; nothing was changed (ECANCELED).
    Guard,
    /// No answer in time (ETIMEDOUT).
    TimedOut,
    /// Another owner has taken over; this one must not go on (ESHUTDOWN).
    Fenced,
    /// Not offered here (ENOTSUP).
    Unsupported,
    /// It is closing down (ESHUTDOWN).
    ShuttingDown,
    /// Not permitted (EPERM).
    Denied,
}

impl ErrorKind {
    /// A few words for people.
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

/// An error of a block device or object backend: its kind, what was being done, and the cause.  Cheap to clone, so
/// that one failed group commit can answer everybody who waited for it.
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    context: Arc<str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error with the words that say what was being done, and to what.
    pub fn new(kind: ErrorKind, context: impl AsRef<str>) -> Self {
        Self { kind, context: context.as_ref().into(), source: None }
    }

    /// Of an I/O error; the kind follows from it.
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

    /// With the error that caused it.
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// Its kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What was being done.
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
