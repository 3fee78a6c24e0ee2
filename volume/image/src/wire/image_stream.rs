//! Stream format for an image with its snapshots: Ceph's `rbd image v2`, see `docs/formats/diff-stream.md`.
//!
//! `rbd image v2\n`, the image's properties as records of a tag byte, a length and a value, an end record `E`; then
//! `rbd image diffs v2\n`, the number of diffs, and that many [diffs](super::diff) of version 2: one a snapshot, oldest
//! first, each since the one before, and at last one for the image itself.

use super::diff::{DiffDecoder, DiffError, DiffEvent, take, word};

/// Magic bytes at the start of every stream.
pub const IMAGE_MAGIC: &[u8] = b"rbd image v2\n";
/// Magic bytes between the properties and the diffs.
pub const DIFFS_MAGIC: &[u8] = b"rbd image diffs v2\n";

/// Maximum length of a record of a property, in bytes: a metadata value and its key.
const PROPERTY_LEN_MAX: u64 = 2 << 20;

/// Property of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageProperty {
    /// Object size as a power of two.
    Order(u64),
    /// Feature bits.
    Features(u64),
    /// Stripe unit in bytes.
    StripeUnit(u64),
    /// Number of objects of a stripe.
    StripeCount(u64),
    /// Metadata: key and value.
    Meta(Vec<u8>, Vec<u8>),
}

/// Decoded part of a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum ImageStreamEvent<'a> {
    /// Property of the image.
    Property(ImageProperty),
    /// Number of diffs; no more properties follow.
    Diffs(u64),
    /// Part of a diff.
    Diff(DiffEvent<'a>),
}

enum StreamState {
    /// Within the first magic; number of bytes that have matched.
    Magic(usize),
    /// Before a property.
    Tag,
    /// Within the length of a property.
    Length(u8),
    /// Within a property of this length.
    Property { tag: u8, len: usize },
    /// Within the second magic; number of bytes that have matched.
    DiffsMagic(usize),
    /// Within the number of diffs.
    Count,
    /// Within a diff; number of diffs left, with this one.
    Diff(u64),
    /// After the last diff, or the reason of a sender that aborts.
    End,
}

/// Incremental decoder: accepts a stream in chunks of any size.
pub struct ImageStreamDecoder {
    state: StreamState,
    /// Collected bytes of a number or property.
    have: Vec<u8>,
    diff: DiffDecoder,
}

impl Default for ImageStreamDecoder {
    fn default() -> Self {
        Self::new()
    }
}

impl ImageStreamDecoder {
    /// Creates a decoder at the start of a stream.
    pub fn new() -> Self {
        Self { state: StreamState::Magic(0), have: Vec::new(), diff: DiffDecoder::new() }
    }

    /// Decodes the next event and advances `input` past it; `None` once `input` is consumed.
    ///
    /// # Errors
    /// Any [`DiffError`] except [`DiffError::Truncated`].
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<ImageStreamEvent<'a>>, DiffError> {
        while !input.is_empty() {
            match self.state {
                StreamState::Magic(matched) => {
                    self.state = match matches(IMAGE_MAGIC, matched, take(input, 1)[0])? {
                        Some(matched) => StreamState::Magic(matched),
                        None => StreamState::Tag,
                    };
                }
                StreamState::Tag => {
                    self.have.clear();
                    self.state = match take(input, 1)[0] {
                        b'E' => StreamState::DiffsMagic(0),
                        tag => StreamState::Length(tag),
                    };
                }
                StreamState::Length(tag) => {
                    if self.collect(input, 8) {
                        let len = word(&self.have);
                        if len > PROPERTY_LEN_MAX {
                            return Err(DiffError::RecordLength(tag, len));
                        }
                        self.have.clear();
                        self.state = StreamState::Property { tag, len: len as usize };
                        if len == 0
                            && let Some(property) = self.property(tag)?
                        {
                            return Ok(Some(ImageStreamEvent::Property(property)));
                        }
                    }
                }
                StreamState::Property { tag, len } => {
                    if self.collect(input, len)
                        && let Some(property) = self.property(tag)?
                    {
                        return Ok(Some(ImageStreamEvent::Property(property)));
                    }
                }
                StreamState::DiffsMagic(matched) => {
                    self.state = match matches(DIFFS_MAGIC, matched, take(input, 1)[0])? {
                        Some(matched) => StreamState::DiffsMagic(matched),
                        None => StreamState::Count,
                    };
                }
                StreamState::Count => {
                    if self.collect(input, 8) {
                        let count = word(&self.have);
                        if count == 0 {
                            return Err(DiffError::Diffs(count));
                        }
                        self.state = StreamState::Diff(count);
                        return Ok(Some(ImageStreamEvent::Diffs(count)));
                    }
                }
                StreamState::Diff(left) => {
                    let Some(event) = self.diff.next(input)? else { continue };
                    match event {
                        DiffEvent::End if left > 1 => {
                            self.diff = DiffDecoder::new();
                            self.state = StreamState::Diff(left - 1);
                        }
                        DiffEvent::End | DiffEvent::Failure(_) => self.state = StreamState::End,
                        _ => {}
                    }
                    return Ok(Some(ImageStreamEvent::Diff(event)));
                }
                StreamState::End => return Err(DiffError::Trailing),
            }
        }
        Ok(None)
    }

    /// Collects `len` bytes; returns whether they are complete.
    fn collect(&mut self, input: &mut &[u8], len: usize) -> bool {
        let part = input.len().min(len - self.have.len());
        self.have.extend_from_slice(take(input, part));
        self.have.len() == len
    }

    /// Decodes a property, which is complete; `None` for one that is unknown, which is skipped.
    fn property(&mut self, tag: u8) -> Result<Option<ImageProperty>, DiffError> {
        self.state = StreamState::Tag;
        let have = std::mem::take(&mut self.have);
        let wrong = || DiffError::RecordLength(tag, have.len() as u64);
        let number = || if have.len() == 8 { Ok(word(&have)) } else { Err(wrong()) };
        Ok(Some(match tag {
            b'O' => ImageProperty::Order(number()?),
            b'T' => ImageProperty::Features(number()?),
            b'U' => ImageProperty::StripeUnit(number()?),
            b'C' => ImageProperty::StripeCount(number()?),
            b'M' => {
                let (key, rest) = text(&have).ok_or_else(wrong)?;
                let (value, rest) = text(rest).ok_or_else(wrong)?;
                if !rest.is_empty() {
                    return Err(wrong());
                }
                ImageProperty::Meta(key.to_vec(), value.to_vec())
            }
            _ => return Ok(None),
        }))
    }

    /// Verifies, at the end of the input, that the stream is complete.
    ///
    /// # Errors
    /// [`DiffError::Truncated`] if it is not.
    pub fn finish(&self) -> Result<(), DiffError> {
        if matches!(self.state, StreamState::End) { Ok(()) } else { Err(DiffError::Truncated) }
    }
}

/// Compares a byte with a magic; returns the number of bytes that match, or `None` if it is complete.
fn matches(magic: &[u8], matched: usize, byte: u8) -> Result<Option<usize>, DiffError> {
    if magic[matched] != byte {
        return Err(DiffError::Magic);
    }
    Ok(Some(matched + 1).filter(|&matched| matched < magic.len()))
}

/// Splits a text off that its length precedes.
fn text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

/// Appends a property.
pub fn put_property(out: &mut Vec<u8>, property: &ImageProperty) {
    let mut number = |tag: u8, value: u64| {
        out.push(tag);
        out.extend_from_slice(&8u64.to_le_bytes());
        out.extend_from_slice(&value.to_le_bytes());
    };
    match property {
        ImageProperty::Order(order) => number(b'O', *order),
        ImageProperty::Features(features) => number(b'T', *features),
        ImageProperty::StripeUnit(bytes) => number(b'U', *bytes),
        ImageProperty::StripeCount(count) => number(b'C', *count),
        ImageProperty::Meta(key, value) => {
            out.push(b'M');
            out.extend_from_slice(&(8 + key.len() as u64 + value.len() as u64).to_le_bytes());
            for text in [key, value] {
                out.extend_from_slice(&(text.len() as u32).to_le_bytes());
                out.extend_from_slice(text);
            }
        }
    }
}

/// Appends the end of the properties, and the number of diffs, which must follow.
pub fn put_diffs_head(out: &mut Vec<u8>, diffs: u64) {
    out.push(b'E');
    out.extend_from_slice(DIFFS_MAGIC);
    out.extend_from_slice(&diffs.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::diff::{DiffVersion, MAGIC_V2};

    fn decode(bytes: &[u8], cut: usize) -> Result<Vec<String>, DiffError> {
        let mut decoder = ImageStreamDecoder::new();
        let mut out = Vec::new();
        for mut input in bytes.chunks(cut) {
            while let Some(event) = decoder.next(&mut input)? {
                out.push(format!("{event:?}"));
            }
        }
        decoder.finish().map(|()| out)
    }

    fn sample() -> Vec<u8> {
        let mut out = IMAGE_MAGIC.to_vec();
        for property in [
            ImageProperty::Order(22),
            ImageProperty::Features(61),
            ImageProperty::StripeUnit(4 << 20),
            ImageProperty::StripeCount(1),
            ImageProperty::Meta(b"key".to_vec(), b"value".to_vec()),
        ] {
            put_property(&mut out, &property);
        }
        put_diffs_head(&mut out, 2);
        for name in [Some("s"), None] {
            out.extend_from_slice(MAGIC_V2);
            name.inspect(|name| DiffVersion::V2.put_to(&mut out, name));
            DiffVersion::V2.put_size(&mut out, 1 << 20);
            DiffVersion::V2.put_end(&mut out);
        }
        out
    }

    /// Bytes that `rbd` 16.2 writes.
    #[test]
    fn bytes_of_the_properties() {
        let mut out = Vec::new();
        put_property(&mut out, &ImageProperty::Order(22));
        put_property(&mut out, &ImageProperty::Meta(b"a".to_vec(), b"bc".to_vec()));
        put_diffs_head(&mut out, 1);
        let want = b"O\x08\0\0\0\0\0\0\0\x16\0\0\0\0\0\0\0M\x0b\0\0\0\0\0\0\0\x01\0\0\0a\x02\0\0\0bc\
            Erbd image diffs v2\n\x01\0\0\0\0\0\0\0";
        assert_eq!(out, want);
    }

    #[test]
    fn any_cut_gives_the_same_events_and_every_prefix_is_cut_short() {
        let sample = sample();
        let want = decode(&sample, sample.len()).expect("a stream");
        assert_eq!(want.len(), 5 + 1 + 3 + 2, "{want:?}");
        assert_eq!(
            want[4],
            format!("{:?}", ImageStreamEvent::Property(ImageProperty::Meta(b"key".into(), b"value".into())))
        );
        for cut in 1..sample.len() {
            assert_eq!(decode(&sample, cut).as_ref(), Ok(&want), "cut at {cut}");
            assert_eq!(decode(&sample[..cut], 5), Err(DiffError::Truncated), "{cut} bytes");
        }
        assert_eq!(decode(&[&sample[..], b"x"].concat(), 9), Err(DiffError::Trailing));
    }

    #[test]
    fn what_is_refused() {
        let with = |tail: &[u8]| [IMAGE_MAGIC, tail].concat();
        assert_eq!(decode(b"rbd image v1\n", 64), Err(DiffError::Magic));
        assert_eq!(decode(&with(b"O\x07\0\0\0\0\0\0\0\x16\0\0\0\0\0\0"), 64), Err(DiffError::RecordLength(b'O', 7)));
        assert_eq!(decode(&with(b"M\x05\0\0\0\0\0\0\0\x09\0\0\0a"), 64), Err(DiffError::RecordLength(b'M', 5)));
        let endless = [&b"M"[..], &u64::MAX.to_le_bytes()].concat();
        assert_eq!(decode(&with(&endless), 64), Err(DiffError::RecordLength(b'M', u64::MAX)));
        let mut none = IMAGE_MAGIC.to_vec();
        put_diffs_head(&mut none, 0);
        assert_eq!(decode(&none, 64), Err(DiffError::Diffs(0)));
        // What is unknown is skipped.
        let unknown = [b"X\x02\0\0\0\0\0\0\0ab", &sample()[IMAGE_MAGIC.len()..]].concat();
        assert_eq!(decode(&with(&unknown), 3), decode(&sample(), 3));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 1usize..32) {
            let _ = decode(&[IMAGE_MAGIC, &bytes].concat(), cut);
            let _ = decode(&[&sample()[..40], &bytes].concat(), cut);
        }
    }
}
