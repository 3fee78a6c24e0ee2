//! Conversion of error numbers of the cluster's daemons to errors of `base/block`.

use forebay_block::{Error, ErrorKind};

/// Error numbers with a specific meaning for this client.
pub(crate) mod errno {
    pub(crate) const EPERM: i32 = 1;
    pub(crate) const ENOENT: i32 = 2;
    pub(crate) const EIO: i32 = 5;
    pub(crate) const EACCES: i32 = 13;
    pub(crate) const EBUSY: i32 = 16;
    pub(crate) const EEXIST: i32 = 17;
    pub(crate) const EINVAL: i32 = 22;
    pub(crate) const EFBIG: i32 = 27;
    pub(crate) const ENOSPC: i32 = 28;
    pub(crate) const EROFS: i32 = 30;
    pub(crate) const ERANGE: i32 = 34;
    pub(crate) const ENODATA: i32 = 61;
    pub(crate) const EOVERFLOW: i32 = 75;
    pub(crate) const EILSEQ: i32 = 84;
    pub(crate) const EOPNOTSUPP: i32 = 95;
    /// Client is on the blocklist.
    pub(crate) const ESHUTDOWN: i32 = 108;
    pub(crate) const ETIMEDOUT: i32 = 110;
    pub(crate) const EDQUOT: i32 = 122;
    pub(crate) const ECANCELED: i32 = 125;
    /// Base of compare mismatches: a comparison that failed at byte N returns this plus N.
    pub(crate) const MISMATCH: i32 = 4095;
}

/// Returns the kind of an error number, which may be negative, as on the wire.
pub(crate) fn kind_of(status: i32) -> ErrorKind {
    match status.unsigned_abs() as i32 {
        errno::EPERM | errno::EACCES => ErrorKind::Denied,
        errno::ENOENT => ErrorKind::NotFound,
        errno::EBUSY => ErrorKind::Busy,
        errno::EEXIST => ErrorKind::Exists,
        errno::EINVAL => ErrorKind::Invalid,
        errno::EFBIG => ErrorKind::OutOfRange,
        errno::ENOSPC | errno::EDQUOT => ErrorKind::NoSpace,
        errno::EROFS => ErrorKind::ReadOnly,
        errno::ERANGE | errno::EOVERFLOW | errno::ECANCELED => ErrorKind::Guard,
        errno::EILSEQ => ErrorKind::Corrupt,
        errno::EOPNOTSUPP => ErrorKind::Unsupported,
        errno::ESHUTDOWN => ErrorKind::Fenced,
        errno::ETIMEDOUT => ErrorKind::TimedOut,
        number if number >= errno::MISMATCH => ErrorKind::Mismatch((number - errno::MISMATCH) as u64),
        _ => ErrorKind::Io,
    }
}

/// Returns an error of the cluster, with a description of the failed operation.
pub(crate) fn failure(status: i32, what: impl AsRef<str>) -> Error {
    let kind = kind_of(status);
    if kind == ErrorKind::Io && status.unsigned_abs() as i32 != errno::EIO {
        return Error::new(kind, format!("{} (the cluster answers with error {})", what.as_ref(), -status.abs()));
    }
    Error::new(kind, what)
}
