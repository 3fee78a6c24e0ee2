//! Frame encoder: turns messages and control payloads into frames, gathered for one send.

use std::rc::Rc;

use forebay_reactor::{BufList, BufMut};

use super::WireError;
use super::crypto::Direction;
use super::decode::MessengerPools;
use super::frame::{
    CRC_LEN, EPILOGUE_CRC_LEN, EPILOGUE_SECURE_LEN, FrameLayout, INLINE_LEN, PREAMBLE_LEN, SECURE_HEAD_LEN,
    SEGMENTS_MAX, STATUS_COMPLETE, TAG_LEN, Tag, padded, segment_crc,
};
use super::header::{HEADER_LEN, MessageHeader};

/// Alignment in bytes that is suggested for the data segment, so that it can be written to a device without copying.
const DATA_ALIGN: u16 = 4096;
/// Alignment in bytes that is suggested for the other segments.
const ALIGN: u16 = 8;
/// Parts up to this length in bytes are copied beside the headers, which costs less than a vector entry.
const COPY_MAX: usize = 512;
/// Frames longer than this, in bytes, are encrypted in a buffer of their own.
const ARENA_MAX: usize = 8 << 10;

/// Frame encoder of one direction of a connection.
pub struct Encoder {
    pools: Rc<MessengerPools>,
    crypto: Option<Direction>,
    checksum: bool,
    /// Headers, epilogues and short frames, contiguous.
    arena: BufMut,
}

impl Encoder {
    /// Creates an encoder in crc mode; `checksum` tells whether segment checksums are written, and must match the
    /// peer's setting.
    pub fn new(pools: Rc<MessengerPools>, checksum: bool) -> Self {
        let arena = pools.arena();
        Self { pools, crypto: None, checksum, arena }
    }

    /// Switches to secure mode from here on.
    pub fn secure(&mut self, direction: Direction) {
        self.crypto = Some(direction);
    }

    /// Ensures space for `len` bytes in the arena.
    #[inline]
    fn reserve(&mut self, len: usize) {
        if self.arena.spare() < len {
            self.arena = self.pools.arena();
        }
    }

    /// Appends to `out` the bytes that [`append`](Self::append) has left in the arena.
    #[inline]
    pub fn flush(&mut self, out: &mut BufList) {
        let len = self.arena.len();
        if len > 0 {
            out.push(self.arena.split_to(len));
        }
    }

    /// Appends a control frame to `out`.
    ///
    /// # Errors
    /// `NonceUsedUp`, in secure mode.
    pub fn control(&mut self, tag: Tag, payload: &[u8], out: &mut BufList) -> Result<(), WireError> {
        self.flush(out);
        let layout = FrameLayout::new(tag, [payload.len() as u32, 0, 0, 0]);
        if self.crypto.is_some() {
            return self.sealed(&layout, payload, [&BufList::new(), &BufList::new(), &BufList::new()], out);
        }
        let preamble = layout.preamble([ALIGN, 0, 0, 0]);
        let len = PREAMBLE_LEN + layout.first_crc_len();
        let mut large;
        let arena = if len > ARENA_MAX {
            large = self.pools.get(len);
            &mut large
        } else {
            self.reserve(len);
            &mut self.arena
        };
        arena.extend_from_slice(&preamble);
        if !payload.is_empty() {
            arena.extend_from_slice(payload);
            let crc = if self.checksum { segment_crc([payload]) } else { 0 };
            arena.extend_from_slice(&crc.to_le_bytes());
        }
        let frame = arena.split_to(len);
        out.push(frame);
        Ok(())
    }

    /// Appends a message's frame to `out`: its payload by reference, or encrypted into new memory.
    ///
    /// # Errors
    /// `NonceUsedUp`, in secure mode.
    ///
    /// # Panics
    /// When a segment has 4 GiB or more; callers check the limits before.
    pub fn message(
        &mut self,
        header: &MessageHeader,
        segments: [&BufList; 3],
        out: &mut BufList,
    ) -> Result<(), WireError> {
        self.append(header, segments, out)?;
        self.flush(out);
        Ok(())
    }

    /// Appends a message's frame as [`message`](Self::message) does, but leaves the last bytes in the arena until the
    /// next frame or [`flush`](Self::flush): consecutive messages then need one buffer between them instead of two, and
    /// messages without a payload share one.
    ///
    /// # Errors
    /// As [`message`](Self::message).
    ///
    /// # Panics
    /// As [`message`](Self::message).
    #[inline]
    pub fn append(
        &mut self,
        header: &MessageHeader,
        segments: [&BufList; 3],
        out: &mut BufList,
    ) -> Result<(), WireError> {
        let len = |at: usize| u32::try_from(segments[at].len()).expect("a segment below 4 GiB");
        let layout = FrameLayout::new(Tag::Message, [HEADER_LEN as u32, len(0), len(1), len(2)]);
        let header = header.encode();
        if self.crypto.is_some() {
            return self.sealed(&layout, &header, segments, out);
        }
        let mut head = [0; PREAMBLE_LEN + HEADER_LEN + CRC_LEN];
        head[..PREAMBLE_LEN].copy_from_slice(&layout.preamble([ALIGN, ALIGN, ALIGN, DATA_ALIGN]));
        head[PREAMBLE_LEN..][..HEADER_LEN].copy_from_slice(&header);
        let crc = if self.checksum { segment_crc([&header[..]]) } else { 0 };
        head[PREAMBLE_LEN + HEADER_LEN..].copy_from_slice(&crc.to_le_bytes());
        self.put(&head, out);
        if layout.count == 1 {
            return Ok(());
        }
        let mut epilogue = [0; EPILOGUE_CRC_LEN];
        epilogue[0] = STATUS_COMPLETE;
        for (at, segment) in segments.into_iter().enumerate().take(layout.count - 1) {
            let crc = if self.checksum { segment_crc(segment.parts().iter().map(|part| &part[..])) } else { 0 };
            epilogue[1 + at * CRC_LEN..][..CRC_LEN].copy_from_slice(&crc.to_le_bytes());
            for part in segment.parts() {
                if part.len() <= COPY_MAX {
                    self.put(part, out);
                } else {
                    self.flush(out);
                    out.push(part.clone());
                }
            }
        }
        self.put(&epilogue, out);
        Ok(())
    }

    /// Writes bytes into the arena.
    #[inline]
    fn put(&mut self, bytes: &[u8], out: &mut BufList) {
        if self.arena.spare() < bytes.len() {
            self.flush(out);
            self.arena = self.pools.arena();
        }
        self.arena.extend_from_slice(bytes);
    }

    /// Appends a frame in secure mode.
    fn sealed(
        &mut self,
        layout: &FrameLayout,
        first: &[u8],
        segments: [&BufList; 3],
        out: &mut BufList,
    ) -> Result<(), WireError> {
        let (first_len, rest_len) = (layout.first_secure_len(), layout.rest_secure_len());
        let len = SECURE_HEAD_LEN + first_len + rest_len;
        let mut large;
        let arena = if len > ARENA_MAX {
            large = self.pools.get(len);
            &mut large
        } else {
            if self.arena.spare() < len {
                self.arena = self.pools.arena();
            }
            &mut self.arena
        };
        debug_assert!(arena.is_empty(), "the arena is flushed after each frame");
        let crypto = self.crypto.as_mut().expect("secure mode");
        let mut aligns = [ALIGN; SEGMENTS_MAX];
        aligns[3] = DATA_ALIGN;
        let (inline, more) = first.split_at(first.len().min(INLINE_LEN));
        arena.extend_from_slice(&layout.preamble(aligns));
        arena.extend_from_slice(inline);
        pad(arena, SECURE_HEAD_LEN);
        crypto.seal(&mut arena[..])?;
        if first_len > 0 {
            arena.extend_from_slice(more);
            pad(arena, SECURE_HEAD_LEN + first_len);
            crypto.seal(&mut arena[SECURE_HEAD_LEN..])?;
        }
        if rest_len > 0 {
            let begin = arena.len();
            for segment in segments.into_iter().take(layout.count - 1) {
                let end = arena.len() + padded(segment.len());
                segment.parts().iter().for_each(|part| arena.extend_from_slice(part));
                pad(arena, end);
            }
            let mut epilogue = [0; EPILOGUE_SECURE_LEN + TAG_LEN];
            epilogue[0] = STATUS_COMPLETE;
            arena.extend_from_slice(&epilogue);
            crypto.seal(&mut arena[begin..])?;
        }
        debug_assert_eq!(arena.len(), len);
        let frame = arena.split_to(len);
        out.push(frame);
        Ok(())
    }
}

/// Appends zeroes up to `len` bytes.
fn pad(buf: &mut BufMut, len: usize) {
    const ZEROES: [u8; INLINE_LEN + TAG_LEN] = [0; INLINE_LEN + TAG_LEN];
    buf.extend_from_slice(&ZEROES[..len - buf.len()]);
}
