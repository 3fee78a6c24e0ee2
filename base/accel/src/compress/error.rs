//! What can go wrong.

/// Why data was not compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// The output is shorter than what the data compresses to.
    #[error("the compressed data does not fit into the output")]
    NoRoom,
}

/// Why compressed data was not expanded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// The data breaks its format, fails its checksum, or ends too early.
    #[error("the compressed data is corrupt or cut short")]
    Corrupt,
    /// The data expands to more than the output holds: a wrong length, or a bomb.  Nothing is written behind the
    /// output, and no memory is taken for it.
    #[error("the compressed data expands to more than its output holds")]
    TooLong,
    /// The stream was made with a preset dictionary (RFC 1950 section 2.2), which is not known here.
    #[error("the compressed data needs a preset dictionary")]
    NeedsDictionary,
}
