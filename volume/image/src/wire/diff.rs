//! Stream format for the content of an image, or for its changes since a snapshot: Ceph's `rbd diff v1` and `v2`, see
//! `docs/formats/diff-stream.md`.
//!
//! `rbd diff v1\n`, then records of a tag byte and little-endian numbers: `f` and `t` names of snapshots; `s` size; `w`
//! offset, length, bytes; `z` offset, length (reads as zeroes); `e` end.  In version 2 the length of a record follows its
//! tag, except for the end, and `p` says whether the snapshot is protected.  Two records are Forebay's own: `r` offset,
//! length of a range that has changed, without its bytes; and `!`, the reason of a sender that aborts, which is the last
//! one.

use std::fmt;

/// Magic bytes at the start of every stream of version 1.
pub const MAGIC: &[u8] = b"rbd diff v1\n";
/// Magic bytes at the start of every stream of version 2.
pub const MAGIC_V2: &[u8] = b"rbd diff v2\n";

/// Maximum length of a snapshot name, in bytes.
const SNAP_NAME_LEN_MAX: u32 = 4096;

/// Maximum length of the reason in a failure record, in bytes.
const FAILURE_LEN_MAX: u32 = 64 * 1024;

/// Version of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiffVersion {
    /// Changes alone, as `export-diff` writes them.
    V1,
    /// Within an export of an image with its snapshots.
    V2,
}

/// Decoded part of a stream.  A long `w` record yields several `Data` events.
#[derive(Debug, PartialEq, Eq)]
pub enum DiffEvent<'a> {
    /// Snapshot that the changes begin at.
    From(String),
    /// Snapshot that the changes lead to.
    To(String),
    /// Protection of that snapshot.
    Protected(bool),
    /// The image's size in bytes.
    Size(u64),
    /// Bytes at an offset.
    Data(u64, &'a [u8]),
    /// Range (offset, length) that reads as zeroes.
    Zero(u64, u64),
    /// Range (offset, length) that has changed, without its bytes.
    Changed(u64, u64),
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
    /// Name, value or reason that exceeds its maximum length.
    TooLong(u32),
    /// Name of a snapshot that is no text.
    Name,
    /// Record (tag, length) whose length contradicts its content.
    RecordLength(u8, u64),
    /// Number of diffs in an export of an image that cannot be right.
    Diffs(u64),
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
            DiffError::Name => f.write_str("the stream has a name that is not UTF-8"),
            DiffError::RecordLength(tag, len) => {
                write!(f, "the stream has a record '{}' with the wrong length {len}", tag.escape_ascii())
            }
            DiffError::Diffs(count) => write!(f, "the stream has {count} diffs"),
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
    /// Within an unknown record, which is skipped; number of bytes left.
    Skip(u64),
    /// Within a snapshot's name or the reason of a failure; number of bytes left.
    Text { tag: u8, left: u32 },
    /// After the end or failure record.
    End,
}

/// Incremental decoder: accepts a stream in chunks of any size.
pub struct DiffDecoder {
    state: DecoderState,
    version: DiffVersion,
    /// Fixed part of the current record, of which `have` bytes are present.
    head: [u8; 24],
    have: usize,
    /// Collected name or reason.
    text: Vec<u8>,
}

impl Default for DiffDecoder {
    fn default() -> Self {
        Self::new()
    }
}

impl DiffDecoder {
    /// Creates a decoder at the start of a stream of either version.
    pub fn new() -> Self {
        Self { state: DecoderState::Magic(0), version: DiffVersion::V1, head: [0; 24], have: 0, text: Vec::new() }
    }

    /// Decodes the next event and advances `input` past it; `None` once `input` is consumed.
    ///
    /// # Errors
    /// Any [`DiffError`] except [`DiffError::Truncated`].
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<DiffEvent<'a>>, DiffError> {
        while !input.is_empty() {
            match self.state {
                DecoderState::Magic(matched) => self.magic(matched, take(input, 1)[0])?,
                DecoderState::Tag => {
                    let tag = take(input, 1)[0];
                    self.have = 0;
                    if tag == b'e' {
                        self.state = DecoderState::End;
                        return Ok(Some(DiffEvent::End));
                    }
                    self.state = DecoderState::Head { tag, need: self.fixed_len(tag)? };
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
                    let part = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                    take(input, part);
                    let left = left - part as u64;
                    self.state = if left == 0 { DecoderState::Tag } else { DecoderState::Skip(left) };
                }
                DecoderState::Text { tag, left } => {
                    let part = input.len().min(left as usize);
                    self.text.extend_from_slice(take(input, part));
                    let left = left - part as u32;
                    self.state = DecoderState::Text { tag, left };
                    if left == 0 {
                        return self.text(tag).map(Some);
                    }
                }
                DecoderState::End => return Err(DiffError::Trailing),
            }
        }
        Ok(None)
    }

    /// Compares a byte with the magic of either version.
    fn magic(&mut self, matched: usize, byte: u8) -> Result<(), DiffError> {
        if MAGIC_V2[matched] == byte && MAGIC[matched] != byte {
            self.version = DiffVersion::V2;
        } else if MAGIC[matched] != byte {
            return Err(DiffError::Magic);
        }
        self.state = match matched + 1 {
            all if all == MAGIC.len() => DecoderState::Tag,
            matched => DecoderState::Magic(matched),
        };
        Ok(())
    }

    /// Returns the length of the fixed part of a record.
    fn fixed_len(&self, tag: u8) -> Result<usize, DiffError> {
        let before = match self.version {
            DiffVersion::V1 => 0,
            DiffVersion::V2 => 8,
        };
        let own = match (tag, self.version) {
            (b's', _) => 8,
            (b'w' | b'z' | b'r', _) => 16,
            (b'f' | b't' | b'!', _) => 4,
            (b'p', DiffVersion::V2) => 1,
            // Their length allows them to be skipped.
            (_, DiffVersion::V2) => 0,
            (tag, DiffVersion::V1) => return Err(DiffError::Tag(tag)),
        };
        Ok(before + own)
    }

    /// Decodes the fixed part of a record, which is complete.
    fn record(&mut self, tag: u8) -> Result<Option<DiffEvent<'static>>, DiffError> {
        let (said, own) = match self.version {
            DiffVersion::V1 => (None, &self.head[..16]),
            DiffVersion::V2 => (Some(word(&self.head)), &self.head[8..]),
        };
        let has_len = |len: u64| match said {
            Some(said) if said != len => Err(DiffError::RecordLength(tag, said)),
            _ => Ok(()),
        };
        self.state = DecoderState::Tag;
        match tag {
            b'f' | b't' | b'!' => {
                let len = u32::from_le_bytes(own[..4].try_into().expect("four bytes"));
                let most = if tag == b'!' { FAILURE_LEN_MAX } else { SNAP_NAME_LEN_MAX };
                if len > most {
                    return Err(DiffError::TooLong(len));
                }
                has_len(4 + u64::from(len))?;
                self.text.clear();
                self.state = DecoderState::Text { tag, left: len };
                if len == 0 { self.text(tag).map(Some) } else { Ok(None) }
            }
            b's' => {
                has_len(8)?;
                Ok(Some(DiffEvent::Size(word(own))))
            }
            b'w' | b'z' | b'r' => {
                let (offset, len) = (word(own), word(&own[8..]));
                if offset.checked_add(len).is_none() {
                    return Err(DiffError::Range(offset, len));
                }
                if tag != b'w' {
                    has_len(16)?;
                    return Ok(Some(match tag {
                        b'z' => DiffEvent::Zero(offset, len),
                        _ => DiffEvent::Changed(offset, len),
                    }));
                }
                has_len(len.saturating_add(16))?;
                if len > 0 {
                    self.state = DecoderState::Data { offset, left: len };
                }
                Ok(None)
            }
            b'p' => {
                // Ceph writes a length of 8 before this byte, and does not read it.
                has_len(8).or_else(|_| has_len(1))?;
                Ok(Some(DiffEvent::Protected(own[0] != 0)))
            }
            _ => {
                if let Some(len @ 1..) = said {
                    self.state = DecoderState::Skip(len);
                }
                Ok(None)
            }
        }
    }

    /// Ends the collected text of a record.
    fn text(&mut self, tag: u8) -> Result<DiffEvent<'static>, DiffError> {
        let text = std::mem::take(&mut self.text);
        if tag == b'!' {
            self.state = DecoderState::End;
            return Ok(DiffEvent::Failure(text));
        }
        self.state = DecoderState::Tag;
        let name = String::from_utf8(text).map_err(|_| DiffError::Name)?;
        Ok(if tag == b'f' { DiffEvent::From(name) } else { DiffEvent::To(name) })
    }

    /// Verifies, at the end of the input, that the stream is complete.
    ///
    /// # Errors
    /// [`DiffError::Truncated`] if it is not.
    pub fn finish(&self) -> Result<(), DiffError> {
        if matches!(self.state, DecoderState::End) { Ok(()) } else { Err(DiffError::Truncated) }
    }
}

/// Returns the first eight bytes as a number.
pub(super) fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

pub(super) fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(len);
    *input = rest;
    head
}

impl DiffVersion {
    /// Returns the magic bytes.
    pub const fn magic(self) -> &'static [u8] {
        match self {
            DiffVersion::V1 => MAGIC,
            DiffVersion::V2 => MAGIC_V2,
        }
    }

    /// Appends a tag, and the length of what follows where the version has it.
    fn put_tag(self, out: &mut Vec<u8>, tag: u8, len: u64) {
        out.push(tag);
        if self == DiffVersion::V2 {
            out.extend_from_slice(&len.to_le_bytes());
        }
    }

    fn put_text(self, out: &mut Vec<u8>, tag: u8, text: &[u8]) {
        self.put_tag(out, tag, 4 + text.len() as u64);
        out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        out.extend_from_slice(text);
    }

    fn put_range(self, out: &mut Vec<u8>, tag: u8, offset: u64, len: u64, data: u64) {
        self.put_tag(out, tag, 16 + data);
        out.extend_from_slice(&offset.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
    }

    /// Appends the name of the snapshot that the changes begin at.
    pub fn put_from(self, out: &mut Vec<u8>, name: &str) {
        self.put_text(out, b'f', name.as_bytes());
    }

    /// Appends the name of the snapshot that the changes lead to.
    pub fn put_to(self, out: &mut Vec<u8>, name: &str) {
        self.put_text(out, b't', name.as_bytes());
    }

    /// Appends whether that snapshot is protected, which version 1 does not say.
    pub fn put_protected(self, out: &mut Vec<u8>, protected: bool) {
        if self == DiffVersion::V2 {
            self.put_tag(out, b'p', 8);
            out.push(protected.into());
        }
    }

    /// Appends a size record.
    pub fn put_size(self, out: &mut Vec<u8>, size: u64) {
        self.put_tag(out, b's', 8);
        out.extend_from_slice(&size.to_le_bytes());
    }

    /// Appends the fixed part of a data record; its `len` bytes must follow.
    pub fn put_data_head(self, out: &mut Vec<u8>, offset: u64, len: u64) {
        self.put_range(out, b'w', offset, len, len);
    }

    /// Appends a record of a range that reads as zeroes.
    pub fn put_zero(self, out: &mut Vec<u8>, offset: u64, len: u64) {
        self.put_range(out, b'z', offset, len, 0);
    }

    /// Appends a record of a range that has changed, without its bytes; `rbd` has no such record.
    pub fn put_changed(self, out: &mut Vec<u8>, offset: u64, len: u64) {
        self.put_range(out, b'r', offset, len, 0);
    }

    /// Appends a failure record with the reason, truncated to 64 KiB.
    pub fn put_failure(self, out: &mut Vec<u8>, why: &[u8]) {
        self.put_text(out, b'!', &why[..why.len().min(FAILURE_LEN_MAX as usize)]);
    }

    /// Appends an end record.
    pub fn put_end(self, out: &mut Vec<u8>) {
        out.push(b'e');
    }
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
                    DiffEvent::Changed(offset, len) => out.push(('r', offset, len.to_le_bytes().to_vec())),
                    DiffEvent::From(name) => out.push(('f', 0, name.into_bytes())),
                    DiffEvent::To(name) => out.push(('t', 0, name.into_bytes())),
                    DiffEvent::Protected(is) => out.push(('p', is.into(), Vec::new())),
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

    fn sample(version: DiffVersion) -> Vec<u8> {
        let mut out = version.magic().to_vec();
        version.put_from(&mut out, "old");
        version.put_to(&mut out, "snap");
        version.put_protected(&mut out, true);
        version.put_size(&mut out, 1 << 30);
        version.put_data_head(&mut out, 4096, 5);
        out.extend_from_slice(b"hello");
        version.put_zero(&mut out, 8192, 4096);
        version.put_changed(&mut out, 16384, 4096);
        version.put_end(&mut out);
        out
    }

    const BOTH: [DiffVersion; 2] = [DiffVersion::V1, DiffVersion::V2];

    /// Bytes that `rbd` 16.2 writes, with `export-diff` and with `export --export-format 2`.
    #[test]
    fn bytes_of_both_versions() {
        let of = |version: DiffVersion| {
            let mut out = version.magic().to_vec();
            version.put_to(&mut out, "s");
            version.put_protected(&mut out, false);
            version.put_size(&mut out, 4096);
            version.put_data_head(&mut out, 0, 1);
            out.push(b'x');
            version.put_zero(&mut out, 1, 2);
            version.put_end(&mut out);
            out
        };
        let one = b"rbd diff v1\nt\x01\0\0\0ss\0\x10\0\0\0\0\0\0w\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0x\
            z\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0e";
        assert_eq!(of(DiffVersion::V1), one);
        let two = b"rbd diff v2\nt\x05\0\0\0\0\0\0\0\x01\0\0\0sp\x08\0\0\0\0\0\0\0\0\
            s\x08\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\
            w\x11\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0x\
            z\x10\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0e";
        assert_eq!(of(DiffVersion::V2), two);
    }

    #[test]
    fn unknown_records_of_version_2_are_skipped() {
        let bytes = [MAGIC_V2, b"q\x03\0\0\0\0\0\0\0abcx\0\0\0\0\0\0\0\0e"].concat();
        for cut in 1..=bytes.len() {
            assert_eq!(decode(&bytes, cut), Ok(vec![('e', 0, Vec::new())]), "cut at {cut}");
        }
        let wrong = [MAGIC_V2, b"s\x07\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0e"].concat();
        assert_eq!(decode(&wrong, 64), Err(DiffError::RecordLength(b's', 7)));
    }

    #[test]
    fn any_cut_gives_the_same_events() {
        for version in BOTH {
            let mut want = vec![
                ('f', 0, b"old".to_vec()),
                ('t', 0, b"snap".to_vec()),
                ('p', 1, Vec::new()),
                ('s', 1 << 30, Vec::new()),
                ('w', 4096, b"hello".to_vec()),
                ('z', 8192, 4096u64.to_le_bytes().to_vec()),
                ('r', 16384, 4096u64.to_le_bytes().to_vec()),
                ('e', 0, Vec::new()),
            ];
            want.retain(|event| event.0 != 'p' || version == DiffVersion::V2);
            let sample = sample(version);
            for cut in 1..=sample.len() {
                assert_eq!(decode(&sample, cut).as_ref(), Ok(&want), "{version:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn a_sender_that_gives_up_says_why() {
        for version in BOTH {
            let mut bytes = version.magic().to_vec();
            version.put_failure(&mut bytes, b"no more");
            for cut in 1..=bytes.len() {
                assert_eq!(decode(&bytes, cut), Ok(vec![('!', 0, b"no more".to_vec())]), "cut at {cut}");
            }
        }
    }

    #[test]
    fn every_prefix_is_cut_short() {
        for sample in BOTH.map(sample) {
            for len in 0..sample.len() {
                assert_eq!(decode(&sample[..len], 7), Err(DiffError::Truncated), "{len} bytes");
            }
        }
    }

    #[test]
    fn what_is_refused() {
        let with = |tail: &[u8]| [MAGIC, tail].concat();
        assert_eq!(decode(b"rbd diff v3\n", 64), Err(DiffError::Magic));
        assert_eq!(decode(&with(b"x"), 64), Err(DiffError::Tag(b'x')));
        assert_eq!(decode(&with(b"ee"), 64), Err(DiffError::Trailing));
        assert_eq!(decode(&with(b"f\xff\xff\xff\xff"), 64), Err(DiffError::TooLong(u32::MAX)));
        assert_eq!(decode(&with(b"t\x01\0\0\0\xff"), 64), Err(DiffError::Name));
        let mut wrap = MAGIC.to_vec();
        DiffVersion::V1.put_zero(&mut wrap, u64::MAX, 2);
        assert_eq!(decode(&wrap, 64), Err(DiffError::Range(u64::MAX, 2)));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 1usize..32) {
            let _ = decode(&[MAGIC, &bytes].concat(), cut);
            let _ = decode(&[MAGIC_V2, &bytes].concat(), cut);
            let _ = decode(&bytes, cut);
        }
    }
}
