//! Errors of compression and decompression.

/// Compression error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// Output shorter than the compressed data.
    #[error("the compressed data exceeds its output buffer")]
    NoRoom,
}

/// Decompression error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// Data that violates its format, fails its checksum, or is truncated.
    #[error("the compressed data is corrupt or cut short")]
    Corrupt,
    /// Data that expands beyond the output: a wrong length, or a decompression bomb.  Nothing is written past the
    /// output, and no memory is allocated for it.
    #[error("the decompressed data exceeds its output buffer")]
    TooLong,
    /// Stream that requires a preset dictionary (RFC 1950 section 2.2), which is not supported.
    #[error("the compressed data needs a preset dictionary")]
    NeedsDictionary,
}
