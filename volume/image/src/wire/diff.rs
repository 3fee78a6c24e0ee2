//! Stream format for the content of an image: Ceph's `rbd diff v1`, see `docs/formats/diff-stream.md`.
//!
//! `rbd diff v1\n`, then records of a tag byte and little-endian numbers: `s` size; `w` offset, length, bytes; `z`
//! offset, length (reads as zeroes); `e` end.  Ranges without a record are holes.  A sender that aborts reports the
//! reason in a record of its own, `!`, which is the last one.

use std::fmt;

/// Magic bytes at the start of every stream.
pub const MAGIC: &[u8] = b"rbd diff v1\n";

/// Maximum length of a snapshot name, in bytes.
const SNAP_NAME_LEN_MAX: u32 = 4096;

/// Maximum length of the reason in a failure record, in bytes.
const FAILURE_LEN_MAX: u32 = 64 * 1024;

/// Decoded part of a stream.  A long `w` record yields several `Data` events.
#[derive(Debug, PartialEq, Eq)]
pub enum DiffEvent<'a> {
    /// The image's size in bytes.
    Size(u64),
    /// Bytes at an offset.
    Data(u64, &'a [u8]),
    /// Range (offset, length) that reads as zeroes.
    Zero(u64, u64),
    /// End of the stream; without it the stream is truncated.
    End,
    /// Reason for which the sender has aborted; the stream ends with it.
    Failure(Vec<u8>),
}

/// Reason for which a stream is malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiffError {
    /// Stream does not begin with the magic.
    Magic,
    /// Record with an unknown tag.
    Tag(u8),
    /// Range (offset, length) that exceeds 2^64.
    Range(u64, u64),
    /// Snapshot name or reason that exceeds its maximum length.
    TooLong(u32),
    /// Bytes after the end.
    Trailing,
    /// Stream that ends within a record or without an end record.
    Truncated,
}

impl fmt::Display for DiffError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiffError::Magic => f.write_str("the stream does not begin with 'rbd diff v1'"),
            DiffError::Tag(tag) => write!(f, "the stream has a record with the unknown tag {tag:#04x}"),
            DiffError::Range(offset, len) => write!(f, "the stream has a record of {len} bytes at {offset}"),
            DiffError::TooLong(len) => write!(f, "the stream has a text of {len} bytes"),
            DiffError::Trailing => f.write_str("the stream has data after its end record"),
            DiffError::Truncated => f.write_str("the stream is truncated"),
        }
    }
}

impl std::error::Error for DiffError {}

enum DecoderState {
    /// Within the magic; number of bytes that have matched.
    Magic(usize),
    /// Before a record.
    Tag,
    /// Within the fixed part of a record, of `need` bytes.
    Head { tag: u8, need: usize },
    /// Within the bytes of a `w` record; the next offset and the number of bytes left.
    Data { offset: u64, left: u64 },
    /// Within a snapshot's name, which is skipped; number of bytes left.
    Skip(u32),
    /// Within the reason of a failure record; number of bytes left.
    Failure(u32),
    /// After the end or failure record.
    End,
}

/// Incremental decoder: accepts a stream in chunks of any size.
pub struct DiffDecoder {
    state: DecoderState,
    /// Fixed part of the current record, of which `have` bytes are present.
    head: [u8; 16],
    have: usize,
    /// Collected reason of a failure record.
    failure: Vec<u8>,
}

impl Default for DiffDecoder {
    fn default() -> Self {
        Self::new()
    }
}

impl DiffDecoder {
    /// Creates a decoder at the start of a stream.
    pub fn new() -> Self {
        Self { state: DecoderState::Magic(0), head: [0; 16], have: 0, failure: Vec::new() }
    }

    /// Decodes the next event and advances `input` past it; `None` once `input` is consumed.
    ///
    /// # Errors
    /// Any [`DiffError`] except [`DiffError::Truncated`].
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<DiffEvent<'a>>, DiffError> {
        while !input.is_empty() {
            match self.state {
                DecoderState::Magic(matched) => {
                    let part = input.len().min(MAGIC.len() - matched);
                    if take(input, part) != &MAGIC[matched..matched + part] {
                        return Err(DiffError::Magic);
                    }
                    let matched = matched + part;
                    self.state = if matched == MAGIC.len() { DecoderState::Tag } else { DecoderState::Magic(matched) };
                }
                DecoderState::Tag => {
                    let tag = take(input, 1)[0];
                    self.have = 0;
                    self.state = match tag {
                        b'e' => {
                            self.state = DecoderState::End;
                            return Ok(Some(DiffEvent::End));
                        }
                        b's' => DecoderState::Head { tag, need: 8 },
                        b'w' | b'z' => DecoderState::Head { tag, need: 16 },
                        b'f' | b't' | b'!' => DecoderState::Head { tag, need: 4 },
                        tag => return Err(DiffError::Tag(tag)),
                    };
                }
                DecoderState::Head { tag, need } => {
                    let part = input.len().min(need - self.have);
                    self.head[self.have..self.have + part].copy_from_slice(take(input, part));
                    self.have += part;
                    if self.have == need
                        && let Some(event) = self.record(tag)?
                    {
                        return Ok(Some(event));
                    }
                }
                DecoderState::Data { offset, left } => {
                    let part = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                    let data = take(input, part);
                    let left = left - part as u64;
                    self.state = if left == 0 {
                        DecoderState::Tag
                    } else {
                        DecoderState::Data { offset: offset + part as u64, left }
                    };
                    return Ok(Some(DiffEvent::Data(offset, data)));
                }
                DecoderState::Skip(left) => {
                    let part = input.len().min(left as usize);
                    take(input, part);
                    self.state =
                        if part as u32 == left { DecoderState::Tag } else { DecoderState::Skip(left - part as u32) };
                }
                DecoderState::Failure(left) => {
                    let part = input.len().min(left as usize);
                    self.failure.extend_from_slice(take(input, part));
                    let left = left - part as u32;
                    self.state = if left == 0 { DecoderState::End } else { DecoderState::Failure(left) };
                    if left == 0 {
                        return Ok(Some(DiffEvent::Failure(std::mem::take(&mut self.failure))));
                    }
                }
                DecoderState::End => return Err(DiffError::Trailing),
            }
        }
        Ok(None)
    }

    /// Decodes the fixed part of a record, which is complete.
    fn record(&mut self, tag: u8) -> Result<Option<DiffEvent<'static>>, DiffError> {
        let word = |at: usize| u64::from_le_bytes(self.head[at..at + 8].try_into().expect("eight bytes"));
        let number = || u32::from_le_bytes(self.head[..4].try_into().expect("four bytes"));
        self.state = DecoderState::Tag;
        match tag {
            b'!' => match number() {
                0 => {
                    self.state = DecoderState::End;
                    Ok(Some(DiffEvent::Failure(Vec::new())))
                }
                len if len > FAILURE_LEN_MAX => Err(DiffError::TooLong(len)),
                len => {
                    self.state = DecoderState::Failure(len);
                    Ok(None)
                }
            },
            b's' => Ok(Some(DiffEvent::Size(word(0)))),
            b'f' | b't' => {
                let len = number();
                if len > SNAP_NAME_LEN_MAX {
                    return Err(DiffError::TooLong(len));
                }
                if len > 0 {
                    self.state = DecoderState::Skip(len);
                }
                Ok(None)
            }
            _ => {
                let (offset, len) = (word(0), word(8));
                if offset.checked_add(len).is_none() {
                    return Err(DiffError::Range(offset, len));
                }
                if tag == b'z' {
                    return Ok(Some(DiffEvent::Zero(offset, len)));
                }
                if len > 0 {
                    self.state = DecoderState::Data { offset, left: len };
                }
                Ok(None)
            }
        }
    }

    /// Verifies, at the end of the input, that the stream is complete.
    ///
    /// # Errors
    /// [`DiffError::Truncated`] if it is not.
    pub fn finish(&self) -> Result<(), DiffError> {
        if matches!(self.state, DecoderState::End) { Ok(()) } else { Err(DiffError::Truncated) }
    }
}

fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(len);
    *input = rest;
    head
}

/// Appends a size record.
pub fn put_size(out: &mut Vec<u8>, size: u64) {
    out.push(b's');
    out.extend_from_slice(&size.to_le_bytes());
}

/// Appends the fixed part of a data record; its `len` bytes must follow.
pub fn put_data_head(out: &mut Vec<u8>, offset: u64, len: u64) {
    out.push(b'w');
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Appends a record of a range that reads as zeroes.
pub fn put_zero(out: &mut Vec<u8>, offset: u64, len: u64) {
    out.push(b'z');
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Appends a failure record with the reason, truncated to 64 KiB.
pub fn put_failure(out: &mut Vec<u8>, why: &[u8]) {
    let why = &why[..why.len().min(FAILURE_LEN_MAX as usize)];
    out.push(b'!');
    out.extend_from_slice(&(why.len() as u32).to_le_bytes());
    out.extend_from_slice(why);
}

/// Appends an end record.
pub fn put_end(out: &mut Vec<u8>) {
    out.push(b'e');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes `bytes` cut into pieces of `cut` bytes; data events are joined.
    fn decode(bytes: &[u8], cut: usize) -> Result<Vec<(char, u64, Vec<u8>)>, DiffError> {
        let mut decoder = DiffDecoder::new();
        let mut out: Vec<(char, u64, Vec<u8>)> = Vec::new();
        for piece in bytes.chunks(cut) {
            let mut input = piece;
            while let Some(event) = decoder.next(&mut input)? {
                match event {
                    DiffEvent::Size(size) => out.push(('s', size, Vec::new())),
                    DiffEvent::Zero(offset, len) => out.push(('z', offset, len.to_le_bytes().to_vec())),
                    DiffEvent::End => out.push(('e', 0, Vec::new())),
                    DiffEvent::Failure(why) => out.push(('!', 0, why)),
                    DiffEvent::Data(offset, data) => match out.last_mut() {
                        Some(('w', at, have)) if *at + have.len() as u64 == offset => have.extend_from_slice(data),
                        _ => out.push(('w', offset, data.to_vec())),
                    },
                }
            }
        }
        decoder.finish().map(|()| out)
    }

    fn sample() -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(b"t\x04\0\0\0snap");
        put_size(&mut out, 1 << 30);
        put_data_head(&mut out, 4096, 5);
        out.extend_from_slice(b"hello");
        put_zero(&mut out, 8192, 4096);
        put_end(&mut out);
        out
    }

    #[test]
    fn any_cut_gives_the_same_events() {
        let sample = sample();
        let want = vec![
            ('s', 1 << 30, Vec::new()),
            ('w', 4096, b"hello".to_vec()),
            ('z', 8192, 4096u64.to_le_bytes().to_vec()),
            ('e', 0, Vec::new()),
        ];
        for cut in 1..=sample.len() {
            assert_eq!(decode(&sample, cut).as_ref(), Ok(&want), "cut at {cut}");
        }
    }

    #[test]
    fn a_sender_that_gives_up_says_why() {
        let mut bytes = MAGIC.to_vec();
        put_failure(&mut bytes, b"no more");
        for cut in 1..=bytes.len() {
            assert_eq!(decode(&bytes, cut), Ok(vec![('!', 0, b"no more".to_vec())]), "cut at {cut}");
        }
    }

    #[test]
    fn every_prefix_is_cut_short() {
        let sample = sample();
        for len in 0..sample.len() {
            assert_eq!(decode(&sample[..len], 7), Err(DiffError::Truncated), "{len} bytes");
        }
    }

    #[test]
    fn what_is_refused() {
        let with = |tail: &[u8]| [MAGIC, tail].concat();
        assert_eq!(decode(b"rbd diff v2\n", 64), Err(DiffError::Magic));
        assert_eq!(decode(&with(b"x"), 64), Err(DiffError::Tag(b'x')));
        assert_eq!(decode(&with(b"ee"), 64), Err(DiffError::Trailing));
        assert_eq!(decode(&with(b"f\xff\xff\xff\xff"), 64), Err(DiffError::TooLong(u32::MAX)));
        let mut wrap = MAGIC.to_vec();
        put_zero(&mut wrap, u64::MAX, 2);
        assert_eq!(decode(&wrap, 64), Err(DiffError::Range(u64::MAX, 2)));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 1usize..32) {
            let _ = decode(&[MAGIC, &bytes].concat(), cut);
            let _ = decode(&bytes, cut);
        }
    }
}
