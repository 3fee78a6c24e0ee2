//! Compression: codecs, and the engines that run them beside the reactors.
//!
//! [`Compressor`] and [`Decompressor`] do the work where they are called, from one piece of memory into another.
//! [`engine`] takes jobs of scattered pages instead, does them elsewhere and says when they are done: what runs on a
//! reactor uses that, so that it never stands still for as long as compressing takes.
//!
//! ```
//! use forebay_accel::compress::{Codec, Compressor, Decompressor};
//! let data = b"what one engine compresses, any other expands; what one engine compresses".to_vec();
//! let mut packed = vec![0; Codec::ZLIB.bound(data.len())];
//! let length = Compressor::new().compress(Codec::ZLIB, &data, &mut packed)?;
//! let mut out = vec![0; data.len()];
//! let expanded = Decompressor::new().decompress(Codec::ZLIB, &packed[..length], &mut out)?;
//! assert_eq!((expanded.consumed, out), (length, data));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod codec;
mod deflate;
pub mod engine;
mod error;
mod fast;
#[cfg(any(fuzzing, test))]
pub mod fuzz;
mod lz4;
mod perf;
mod sample;
mod stream;
#[cfg(test)]
mod tests;

pub use codec::{Codec, Framing, Level, UnknownCodec};
pub use deflate::Expanded;
pub use error::{CompressError, DecompressError};
pub use lz4::expand_lz4_front;
pub use sample::looks_incompressible;
pub use stream::{InflateStream, StreamProgress};

use deflate::{Deflater, Inflater};
pub(crate) use perf::perf;

/// Compresses; holds the memory of the codecs it was asked for, so one a thread is kept and used again.
#[derive(Default)]
pub struct Compressor {
    deflate: Deflater,
    zstd: Option<(i8, zstd::bulk::Compressor<'static>)>,
    lz4: lz4::Lz4Tables,
    spare: Vec<u8>,
}

impl Compressor {
    /// Without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Compresses `input` to the front of `output`; returns the length of the result in bytes.
    ///
    /// Never fails with [`Codec::bound`] bytes of output.
    ///
    /// # Errors
    /// [`CompressError::NoRoom`] where the result is longer than `output`, whose content then means nothing.
    pub fn compress(&mut self, codec: Codec, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        match codec {
            Codec::Deflate { framing, level } => self.deflate.compress(framing, level, input, output),
            // These libraries need a larger output than their result takes.
            Codec::Lz4 | Codec::Zstd { .. } if output.len() < codec.bound(input.len()) => {
                let mut spare = std::mem::take(&mut self.spare);
                spare.resize(codec.bound(input.len()).max(spare.len()), 0);
                let length = self.compress(codec, input, &mut spare);
                self.spare = spare;
                let length = length?;
                output.get_mut(..length).ok_or(CompressError::NoRoom)?.copy_from_slice(&self.spare[..length]);
                Ok(length)
            }
            // With a valid output of sufficient length, no error can occur.
            Codec::Lz4 => self.lz4.compress(input, output),
            Codec::Zstd { level } => {
                if self.zstd.as_ref().is_none_or(|(other, _)| *other != level) {
                    let state = zstd::bulk::Compressor::new(i32::from(level)).expect("no memory for a compressor");
                    self.zstd = Some((level, state));
                }
                let (_, state) = self.zstd.as_mut().ok_or(CompressError::NoRoom)?;
                state.compress_to_buffer(input, output).map_err(|_| CompressError::NoRoom)
            }
        }
    }
}

/// Expands; one a thread is kept and used again.
#[derive(Default)]
pub struct Decompressor {
    inflater: Option<Inflater>,
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Decompressor {
    /// Without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Expands the stream at the front of `input` to the front of `output`.
    ///
    /// Ignores the level of `codec`.  Memory use depends on the codec only, never on lengths stated in the input.
    ///
    /// # Errors
    /// The input is corrupt, cut short, or expands to more than `output` holds.
    pub fn decompress(&mut self, codec: Codec, input: &[u8], output: &mut [u8]) -> Result<Expanded, DecompressError> {
        let whole = |produced| Expanded { consumed: input.len(), produced };
        match codec {
            Codec::Deflate { framing, .. } => {
                self.inflater.get_or_insert_with(Inflater::new).expand(framing, input, output)
            }
            Codec::Lz4 => lz4::expand(input, output).map(whole),
            // The library takes no input at all for no frames at all, which is no error to it.
            Codec::Zstd { .. } if input.is_empty() => Err(DecompressError::Corrupt),
            Codec::Zstd { .. } => {
                let state = self
                    .zstd
                    .get_or_insert_with(|| zstd::bulk::Decompressor::new().expect("no memory for a decompressor"));
                state.decompress_to_buffer(input, output).map(whole).map_err(|error| {
                    // The library hands its codes out as text only.
                    if error.to_string().contains("too small") {
                        DecompressError::TooLong
                    } else {
                        DecompressError::Corrupt
                    }
                })
            }
        }
    }
}
