//! DEFLATE: the crate's own encoder for level 1, libdeflate for the other levels and for expanding, and the framing of
//! both.

use std::ptr::NonNull;

use libdeflate_sys as sys;

use super::codec::{Framing, Level};
use super::error::{CompressError, DecompressError};
use super::fast::FastEncoder;
use crate::tier::Tier;

/// Result of expanding a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expanded {
    /// Length of the stream in bytes; more input may follow it.
    pub consumed: usize,
    /// Number of bytes written to the output.
    pub produced: usize,
}

/// libdeflate's level that takes zlib's place at each level from 2 on: the quickest whose results are no longer on
/// any kind of data that was measured (docs/decisions/0008-compression-libraries.md).
const LIBDEFLATE_LEVEL: [i32; 8] = [1, 2, 4, 5, 6, 7, 8, 9];

/// Compresses with DEFLATE; holds the memory of each level that was used.
#[derive(Default)]
pub(super) struct Deflater {
    fast: Option<FastEncoder>,
    levels: [Option<LevelState>; 8],
}

impl Deflater {
    pub(super) fn compress(
        &mut self,
        framing: Framing,
        level: Level,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<usize, CompressError> {
        let (head, tail) = match framing {
            Framing::Raw => (0, 0),
            Framing::Zlib => (2, 4),
            Framing::Gzip => (10, 8),
        };
        let room = output.len().checked_sub(head + tail).ok_or(CompressError::NoRoom)?;
        let length = self.raw(level, input, &mut output[head..head + room])?;
        match framing {
            Framing::Raw => {}
            Framing::Zlib => {
                // Deflate with a window of 32 KiB; the second byte names the level class and makes the pair a
                // multiple of 31.
                output[..2].copy_from_slice(match level.get() {
                    1 => &[0x78, 0x01],
                    2..=5 => &[0x78, 0x5E],
                    6 => &[0x78, 0x9C],
                    _ => &[0x78, 0xDA],
                });
                output[head + length..][..4].copy_from_slice(&adler32(input).to_be_bytes());
            }
            Framing::Gzip => {
                // No name, no time; extra flags for the fastest and the best, system unknown.
                let flags = match level.get() {
                    1 => 4,
                    9 => 2,
                    _ => 0,
                };
                output[..10].copy_from_slice(&[0x1F, 0x8B, 8, 0, 0, 0, 0, 0, flags, 255]);
                output[head + length..][..4].copy_from_slice(&crc32(input).to_le_bytes());
                output[head + length + 4..][..4].copy_from_slice(&(input.len() as u32).to_le_bytes());
            }
        }
        Ok(head + length + tail)
    }

    fn raw(&mut self, level: Level, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        let Some(index) = usize::from(level.get()).checked_sub(2) else {
            return self.fast.get_or_insert_with(|| FastEncoder::new(Tier::current())).compress(input, output);
        };
        let state = self.levels[index].get_or_insert_with(|| LevelState::new(LIBDEFLATE_LEVEL[index]));
        state.compress(input, output)
    }
}

/// libdeflate's compressor of one level.
struct LevelState(NonNull<sys::libdeflate_compressor>);

// SAFETY: it is memory without ties to a thread, and is used through `&mut` only.
unsafe impl Send for LevelState {}

impl LevelState {
    fn new(level: i32) -> Self {
        // SAFETY: the call has no preconditions.
        let state = unsafe { sys::libdeflate_alloc_compressor(level) };
        Self(NonNull::new(state).expect("no memory for a compressor"))
    }

    fn compress(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        // SAFETY: the state is alive, and both pieces of memory have the lengths that are given.
        let length = unsafe {
            sys::libdeflate_deflate_compress(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        if length == 0 { Err(CompressError::NoRoom) } else { Ok(length) }
    }
}

impl Drop for LevelState {
    fn drop(&mut self) {
        // SAFETY: it came from the matching call, and there is no other reference to it.
        unsafe { sys::libdeflate_free_compressor(self.0.as_ptr()) };
    }
}

/// Decoder of DEFLATE streams that are complete in memory.
pub(super) struct Inflater(NonNull<sys::libdeflate_decompressor>);

// SAFETY: as for `LevelState`.
unsafe impl Send for Inflater {}

impl Inflater {
    pub(super) fn new() -> Self {
        // SAFETY: the call has no preconditions.
        let state = unsafe { sys::libdeflate_alloc_decompressor() };
        Self(NonNull::new(state).expect("no memory for a decompressor"))
    }

    pub(super) fn expand(
        &mut self,
        framing: Framing,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Expanded, DecompressError> {
        let expand = match framing {
            Framing::Raw => sys::libdeflate_deflate_decompress_ex,
            Framing::Zlib => sys::libdeflate_zlib_decompress_ex,
            Framing::Gzip => sys::libdeflate_gzip_decompress_ex,
        };
        let (mut consumed, mut produced) = (0, 0);
        // SAFETY: the state is alive, both pieces of memory have the lengths that are given, and the two results are
        // ours.
        let result = unsafe {
            expand(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
                &mut consumed,
                &mut produced,
            )
        };
        match result {
            sys::libdeflate_result_LIBDEFLATE_SUCCESS => Ok(Expanded { consumed, produced }),
            sys::libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE => Err(DecompressError::TooLong),
            _ if framing == Framing::Zlib && names_dictionary(input) => Err(DecompressError::NeedsDictionary),
            _ => Err(DecompressError::Corrupt),
        }
    }
}

impl Drop for Inflater {
    fn drop(&mut self) {
        // SAFETY: it came from the matching call, and there is no other reference to it.
        unsafe { sys::libdeflate_free_decompressor(self.0.as_ptr()) };
    }
}

/// Returns true if the header is complete and requires a dictionary (RFC 1950 section 2.2).
fn names_dictionary(stream: &[u8]) -> bool {
    matches!(stream, [method, flags, ..]
        if method & 0xF == 8 && flags & 0x20 != 0 && u16::from_be_bytes([*method, *flags]) % 31 == 0)
}

fn adler32(data: &[u8]) -> u32 {
    // SAFETY: the memory has the length that is given.
    unsafe { sys::libdeflate_adler32(1, data.as_ptr().cast(), data.len()) }
}

fn crc32(data: &[u8]) -> u32 {
    // SAFETY: as above.
    unsafe { sys::libdeflate_crc32(0, data.as_ptr().cast(), data.len()) }
}
