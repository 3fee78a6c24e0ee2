//! The framing in which an image's content travels: the `rbd diff v1` stream of Ceph.
//!
//! `rbd diff v1\n`, then records of a tag byte and little-endian numbers: `s` size; `w` offset, length, bytes; `z`
//! offset, length (reads as zeroes); `e` the end.  What no record names is a hole.  A sender that gives up says why in
//! a record of its own, `!`, after which nothing follows.  See docs/formats/diff-stream.md.
//! This file is pure: bytes to events and back.

use std::fmt;

/// Magic bytes at the start of every stream.
pub const MAGIC: &[u8] = b"rbd diff v1\n";

/// Longest snapshot name in a stream's head, in bytes.
const SNAP_NAME_LEN_MAX: u32 = 4096;

/// Longest account of why a sender gives up, in bytes.
const FAILURE_LEN_MAX: u32 = 64 * 1024;

/// Event of a stream.  A long `w` record yields several `Data` events.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The image's size in bytes.
    Size(u64),
    /// Bytes at an offset.
    Data(u64, &'a [u8]),
    /// A run (offset, length) that reads as zeroes.
    Zero(u64, u64),
    /// End of the stream; without it the stream is truncated.
    End,
    /// The sender gives up, and says why.
    Failure(Vec<u8>),
}

/// Error in a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiffError {
    /// Stream does not begin with the magic.
    Magic,
    /// A record with an unknown tag.
    Tag(u8),
    /// Offset and length pass 2^64.
    Range(u64, u64),
    /// A snapshot's name, or the reason for giving up, is longer than any.
    TooLong(u32),
    /// Bytes after the end.
    Trailing,
    /// The stream ends within a record or without an end record.
    CutShort,
}

impl fmt::Display for DiffError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiffError::Magic => f.write_str("the stream does not begin with 'rbd diff v1'"),
            DiffError::Tag(tag) => write!(f, "the stream has a record with the unknown tag {tag:#04x}"),
            DiffError::Range(offset, len) => write!(f, "the stream has a record of {len} bytes at {offset}"),
            DiffError::TooLong(len) => write!(f, "the stream has a text of {len} bytes"),
            DiffError::Trailing => f.write_str("the stream goes on after its end record"),
            DiffError::CutShort => f.write_str("the stream is cut short"),
        }
    }
}

impl std::error::Error for DiffError {}

enum State {
    /// Number of magic bytes that have matched.
    Magic(usize),
    Tag,
    /// Collecting the fixed part of a record.
    Head {
        tag: u8,
        need: usize,
    },
    /// Within the bytes of a `w` record.
    Data {
        offset: u64,
        left: u64,
    },
    /// Within a snapshot's name, which is not kept.
    Skip(u32),
    /// Within the account of why the sender gives up.
    Failure(u32),
    End,
}

/// Turns bytes, however they are cut, into events.
pub struct Decoder {
    state: State,
    head: [u8; 16],
    have: usize,
    failure: Vec<u8>,
}

impl Decoder {
    /// At the stream's start.
    pub fn new() -> Self {
        Self { state: State::Magic(0), head: [0; 16], have: 0, failure: Vec::new() }
    }

    /// Takes the next event out of `input`, shortening it; `None` when it is used up.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, DiffError> {
        while !input.is_empty() {
            match self.state {
                State::Magic(matched) => {
                    let part = input.len().min(MAGIC.len() - matched);
                    if take(input, part) != &MAGIC[matched..matched + part] {
                        return Err(DiffError::Magic);
                    }
                    let matched = matched + part;
                    self.state = if matched == MAGIC.len() { State::Tag } else { State::Magic(matched) };
                }
                State::Tag => {
                    let tag = take(input, 1)[0];
                    self.have = 0;
                    self.state = match tag {
                        b'e' => {
                            self.state = State::End;
                            return Ok(Some(Event::End));
                        }
                        b's' => State::Head { tag, need: 8 },
                        b'w' | b'z' => State::Head { tag, need: 16 },
                        b'f' | b't' | b'!' => State::Head { tag, need: 4 },
                        tag => return Err(DiffError::Tag(tag)),
                    };
                }
                State::Head { tag, need } => {
                    let part = input.len().min(need - self.have);
                    self.head[self.have..self.have + part].copy_from_slice(take(input, part));
                    self.have += part;
                    if self.have == need
                        && let Some(event) = self.record(tag)?
                    {
                        return Ok(Some(event));
                    }
                }
                State::Data { offset, left } => {
                    let part = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                    let data = take(input, part);
                    let left = left - part as u64;
                    self.state =
                        if left == 0 { State::Tag } else { State::Data { offset: offset + part as u64, left } };
                    return Ok(Some(Event::Data(offset, data)));
                }
                State::Skip(left) => {
                    let part = input.len().min(left as usize);
                    take(input, part);
                    self.state = if part as u32 == left { State::Tag } else { State::Skip(left - part as u32) };
                }
                State::Failure(left) => {
                    let part = input.len().min(left as usize);
                    self.failure.extend_from_slice(take(input, part));
                    let left = left - part as u32;
                    self.state = if left == 0 { State::End } else { State::Failure(left) };
                    if left == 0 {
                        return Ok(Some(Event::Failure(std::mem::take(&mut self.failure))));
                    }
                }
                State::End => return Err(DiffError::Trailing),
            }
        }
        Ok(None)
    }

    /// A record's fixed part is complete.
    fn record(&mut self, tag: u8) -> Result<Option<Event<'static>>, DiffError> {
        let word = |at: usize| u64::from_le_bytes(self.head[at..at + 8].try_into().expect("eight bytes"));
        let number = || u32::from_le_bytes(self.head[..4].try_into().expect("four bytes"));
        self.state = State::Tag;
        match tag {
            b'!' => match number() {
                0 => {
                    self.state = State::End;
                    Ok(Some(Event::Failure(Vec::new())))
                }
                len if len > FAILURE_LEN_MAX => Err(DiffError::TooLong(len)),
                len => {
                    self.state = State::Failure(len);
                    Ok(None)
                }
            },
            b's' => Ok(Some(Event::Size(word(0)))),
            b'f' | b't' => {
                let len = number();
                if len > SNAP_NAME_LEN_MAX {
                    return Err(DiffError::TooLong(len));
                }
                if len > 0 {
                    self.state = State::Skip(len);
                }
                Ok(None)
            }
            _ => {
                let (offset, len) = (word(0), word(8));
                if offset.checked_add(len).is_none() {
                    return Err(DiffError::Range(offset, len));
                }
                if tag == b'z' {
                    return Ok(Some(Event::Zero(offset, len)));
                }
                if len > 0 {
                    self.state = State::Data { offset, left: len };
                }
                Ok(None)
            }
        }
    }

    /// The bytes have ended; an error unless the stream has.
    pub fn finish(&self) -> Result<(), DiffError> {
        if matches!(self.state, State::End) { Ok(()) } else { Err(DiffError::CutShort) }
    }
}

fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(len);
    *input = rest;
    head
}

/// Appends the size record.
pub fn put_size(out: &mut Vec<u8>, size: u64) {
    out.push(b's');
    out.extend_from_slice(&size.to_le_bytes());
}

/// Appends the head of a data record, after which its `len` bytes must follow.
pub fn put_data_head(out: &mut Vec<u8>, offset: u64, len: u64) {
    out.push(b'w');
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Appends a run of zeroes.
pub fn put_zero(out: &mut Vec<u8>, offset: u64, len: u64) {
    out.push(b'z');
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Appends why the sender gives up, at most [`FAILURE_LEN_MAX`] bytes of it.
pub fn put_failure(out: &mut Vec<u8>, why: &[u8]) {
    let why = &why[..why.len().min(FAILURE_LEN_MAX as usize)];
    out.push(b'!');
    out.extend_from_slice(&(why.len() as u32).to_le_bytes());
    out.extend_from_slice(why);
}

/// Appends the end record.
pub fn put_end(out: &mut Vec<u8>) {
    out.push(b'e');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decodes `bytes` cut into pieces of `cut` bytes; data events are joined.
    fn decode(bytes: &[u8], cut: usize) -> Result<Vec<(char, u64, Vec<u8>)>, DiffError> {
        let mut decoder = Decoder::new();
        let mut out: Vec<(char, u64, Vec<u8>)> = Vec::new();
        for piece in bytes.chunks(cut) {
            let mut input = piece;
            while let Some(event) = decoder.next(&mut input)? {
                match event {
                    Event::Size(size) => out.push(('s', size, Vec::new())),
                    Event::Zero(offset, len) => out.push(('z', offset, len.to_le_bytes().to_vec())),
                    Event::End => out.push(('e', 0, Vec::new())),
                    Event::Failure(why) => out.push(('!', 0, why)),
                    Event::Data(offset, data) => match out.last_mut() {
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
            assert_eq!(decode(&sample[..len], 7), Err(DiffError::CutShort), "{len} bytes");
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
