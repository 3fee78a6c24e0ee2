//! Expanding a DEFLATE stream piece by piece, where its length is not known or it does not fit into memory.

use zlib_rs::{Inflate, InflateError, InflateFlush, Status};

use super::codec::Framing;
use super::error::DecompressError;

/// Result of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamProgress {
    /// Number of bytes taken from the input.
    pub consumed: usize,
    /// Number of bytes written to the output.
    pub produced: usize,
    /// Set once the stream is complete and its checksum right; the rest of the input does not belong to it.
    pub done: bool,
}

/// Streaming decoder, in about 40 KiB of memory whatever the length of the stream.
///
/// Speed is about half of that of expanding a whole stream with [`Decompressor`](super::Decompressor).
pub struct InflateStream {
    inner: Inflate,
    framing: Framing,
    done: bool,
}

impl InflateStream {
    /// Creates a decoder at the beginning of a stream.
    pub fn new(framing: Framing) -> Self {
        // Fifteen bits of window serve every stream; 16 more mean gzip.
        let inner = match framing {
            Framing::Raw => Inflate::new(false, 15),
            Framing::Zlib => Inflate::new(true, 15),
            Framing::Gzip => Inflate::new(true, 31),
        };
        Self { inner, framing, done: false }
    }

    /// Resets the decompressor for another stream of the same framing.
    pub fn reset(&mut self) {
        match self.framing {
            Framing::Gzip => self.inner = Inflate::new(true, 31),
            framing => self.inner.reset(framing == Framing::Zlib),
        }
        self.done = false;
    }

    /// Expands some more: as much as the input gives or the output holds.
    ///
    /// A step without progress needs more input if the output has space, and more output space otherwise.  The caller
    /// detects truncation: the input ended before [`StreamProgress::done`].
    ///
    /// # Errors
    /// The stream breaks its format or its checksum is wrong; what was produced before may be wrong as well.
    pub fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<StreamProgress, DecompressError> {
        if self.done {
            return Ok(StreamProgress { consumed: 0, produced: 0, done: true });
        }
        let (before_in, before_out) = (self.inner.total_in(), self.inner.total_out());
        let status = self.inner.decompress(input, output, InflateFlush::NoFlush).map_err(|error| match error {
            InflateError::NeedDict { .. } => DecompressError::NeedsDictionary,
            _ => DecompressError::Corrupt,
        })?;
        self.done = status == Status::StreamEnd;
        Ok(StreamProgress {
            consumed: (self.inner.total_in() - before_in) as usize,
            produced: (self.inner.total_out() - before_out) as usize,
            done: self.done,
        })
    }
}
