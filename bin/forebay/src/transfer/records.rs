//! Chunks of images as streams of `rbd`'s formats, and back.

use forebay_image::diff::{DiffDecoder, DiffError, DiffEvent, DiffVersion};
use forebay_image::image_stream::{
    IMAGE_MAGIC, ImageProperty, ImageStreamDecoder, ImageStreamEvent, put_diffs_head, put_property,
};
use forebay_reactor::Buf;

use crate::engine::transfer::{Chunk, ImageProperties};
use crate::failure::{Failure, Result};
use crate::units::Size;

/// Format of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamFormat {
    /// Content or changes of an image: `rbd diff v1`, and when decoding also `v2`.
    Diff,
    /// Image with its snapshots: `rbd image v2`.
    Image,
}

/// Longest metadata of an image in bytes: it is kept until the image is created.
const METADATA_LEN_MAX: usize = 64 << 20;
/// Memory of a pair of metadata beside its bytes.
const METADATA_PAIR_COST: usize = 64;

enum Decoder {
    Diff(DiffDecoder),
    Image(ImageStreamDecoder),
}

/// Decodes a stream into chunks.
pub struct ChunkDecoder {
    decoder: Decoder,
    /// Properties so far.
    properties: ImageProperties,
    /// Bytes that their metadata takes.
    metadata_len: usize,
    /// Number of diffs left.
    left: u64,
    /// Set once the end of the last diff was returned, but not that of the stream.
    ending: bool,
    /// Number of bytes decoded.
    position: u64,
}

impl ChunkDecoder {
    /// Creates a decoder at the start of a stream.
    pub fn new(format: StreamFormat) -> Self {
        let decoder = match format {
            StreamFormat::Diff => Decoder::Diff(DiffDecoder::new()),
            StreamFormat::Image => Decoder::Image(ImageStreamDecoder::new()),
        };
        Self { decoder, properties: ImageProperties::default(), metadata_len: 0, left: 0, ending: false, position: 0 }
    }

    /// Decodes the next chunk and advances `input` past it; `None` once `input` is consumed.
    ///
    /// # Errors
    /// `Invalid` for a malformed stream; the failure of a sender that has aborted.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Chunk>> {
        loop {
            if self.ending {
                self.ending = false;
                return Ok(Some(Chunk::End));
            }
            let before = input.len();
            let chunk = self.decode(input);
            self.position += (before - input.len()) as u64;
            match chunk.map_err(|error| self.explain(&error))? {
                Some(Decoded::Chunk(chunk)) => return Ok(Some(chunk)),
                Some(Decoded::Failure(reason)) => {
                    return Err(serde_json::from_slice(&reason).unwrap_or_else(|_| {
                        Failure::failed(format!("the sender aborted: {}", String::from_utf8_lossy(&reason)))
                    }));
                }
                Some(Decoded::Nothing) if self.metadata_len > METADATA_LEN_MAX => {
                    let what = format!("the stream has more than {} of metadata", Size(METADATA_LEN_MAX as u64));
                    return Err(Failure::invalid(what));
                }
                Some(Decoded::Nothing) => {}
                None => return Ok(None),
            }
        }
    }

    fn decode(&mut self, input: &mut &[u8]) -> std::result::Result<Option<Decoded>, DiffError> {
        let event = match &mut self.decoder {
            Decoder::Diff(decoder) => return Ok(decoder.next(input)?.map(|event| decoded(event, Chunk::End))),
            Decoder::Image(decoder) => decoder.next(input)?,
        };
        let Some(event) = event else { return Ok(None) };
        Ok(Some(match event {
            ImageStreamEvent::Property(property) => {
                match property {
                    ImageProperty::Order(order) => self.properties.order = Some(order),
                    ImageProperty::Features(features) => self.properties.features = Some(features),
                    ImageProperty::StripeUnit(bytes) => self.properties.stripe_unit = Some(bytes),
                    ImageProperty::StripeCount(count) => self.properties.stripe_count = Some(count),
                    ImageProperty::Meta(key, value) => {
                        self.metadata_len += key.len() + value.len() + METADATA_PAIR_COST;
                        self.properties.metadata.push((key, value));
                    }
                }
                Decoded::Nothing
            }
            ImageStreamEvent::Diffs(diffs) => {
                self.left = diffs;
                let properties = ImageProperties { diffs, ..std::mem::take(&mut self.properties) };
                Decoded::Chunk(Chunk::Image(Box::new(properties)))
            }
            ImageStreamEvent::Diff(event) => {
                if event == DiffEvent::End {
                    self.left -= 1;
                    self.ending = self.left == 0;
                }
                decoded(event, Chunk::DiffEnd)
            }
        }))
    }

    /// Verifies, at the end of the input, that the stream is complete.
    ///
    /// # Errors
    /// `Invalid` if it is not.
    pub fn finish(&self) -> Result<()> {
        let finished = match &self.decoder {
            Decoder::Diff(decoder) => decoder.finish(),
            Decoder::Image(decoder) => decoder.finish(),
        };
        finished.map_err(|error| self.explain(&error))
    }

    /// Explains an error of the stream to the user.
    fn explain(&self, error: &DiffError) -> Failure {
        let failure = Failure::invalid(match (error, &self.decoder) {
            (DiffError::Magic, Decoder::Diff(_)) => error.to_string(),
            (DiffError::Magic, Decoder::Image(_)) => "the stream does not begin with 'rbd image v2'".to_owned(),
            _ => format!("{error} (at byte {})", self.position),
        });
        match (error, &self.decoder) {
            (DiffError::Truncated, _) => failure.hint("it was cut off when it was written or copied; make it again"),
            (DiffError::Magic, Decoder::Diff(_)) => {
                failure.hint("'forebay export-diff' and 'rbd export-diff' write changes of an image")
            }
            (DiffError::Magic, Decoder::Image(_)) => {
                failure.hint("'forebay export --export-format 2' and that of rbd write images with snapshots")
            }
            _ => failure,
        }
    }
}

/// Result of decoding a record.
enum Decoded {
    Chunk(Chunk),
    Failure(Vec<u8>),
    /// Part of something that is not complete.
    Nothing,
}

fn decoded(event: DiffEvent<'_>, end: Chunk) -> Decoded {
    Decoded::Chunk(match event {
        DiffEvent::From(name) => Chunk::From(name),
        DiffEvent::To(name) => Chunk::To(name),
        DiffEvent::Protected(protected) => Chunk::Protected(protected),
        DiffEvent::Size(size) => Chunk::Size(size),
        DiffEvent::Data(offset, data) => Chunk::Data(offset, Buf::copy_of(data)),
        DiffEvent::Zero(offset, len) => Chunk::Zero(offset, len),
        DiffEvent::Changed(offset, len) => Chunk::Changed(offset, len),
        DiffEvent::End => end,
        DiffEvent::Failure(reason) => return Decoded::Failure(reason),
    })
}

/// Encodes chunks as a stream.
pub struct ChunkEncoder {
    version: DiffVersion,
    /// Set if the magic of the current diff is written.
    begun: bool,
}

impl ChunkEncoder {
    /// Creates an encoder at the start of a stream.
    pub fn new(format: StreamFormat) -> Self {
        let version = match format {
            StreamFormat::Diff => DiffVersion::V1,
            StreamFormat::Image => DiffVersion::V2,
        };
        Self { version, begun: false }
    }

    /// Encodes a chunk: bytes, and the data that follows them.
    pub fn encode(&mut self, chunk: Chunk) -> (Vec<u8>, Option<Buf>) {
        let mut out = Vec::new();
        if let Chunk::Image(properties) = &chunk {
            put_properties(&mut out, properties);
            return (out, None);
        }
        if matches!(chunk, Chunk::End) && self.version == DiffVersion::V2 {
            // That of the last diff was its end.
            return (out, None);
        }
        self.begin(&mut out);
        match chunk {
            Chunk::Image(_) => {}
            Chunk::From(name) => self.version.put_from(&mut out, &name),
            Chunk::To(name) => self.version.put_to(&mut out, &name),
            Chunk::Protected(protected) => self.version.put_protected(&mut out, protected),
            Chunk::Size(size) => self.version.put_size(&mut out, size),
            Chunk::Data(offset, data) => {
                self.version.put_data_head(&mut out, offset, data.len() as u64);
                return (out, Some(data));
            }
            Chunk::Zero(offset, len) => self.version.put_zero(&mut out, offset, len),
            Chunk::Changed(offset, len) => self.version.put_changed(&mut out, offset, len),
            Chunk::DiffEnd | Chunk::End => {
                self.version.put_end(&mut out);
                self.begun = false;
            }
        }
        (out, None)
    }

    /// Encodes the reason for which the stream ends early.
    pub fn fail(&mut self, failure: &Failure) -> Vec<u8> {
        let mut out = Vec::new();
        self.begin(&mut out);
        let reason = serde_json::to_vec(failure).expect("plain data becomes JSON");
        self.version.put_failure(&mut out, &reason);
        out
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.begun, true) {
            out.extend_from_slice(self.version.magic());
        }
    }
}

fn put_properties(out: &mut Vec<u8>, properties: &ImageProperties) {
    out.extend_from_slice(IMAGE_MAGIC);
    let numbers = [
        properties.order.map(ImageProperty::Order),
        properties.features.map(ImageProperty::Features),
        properties.stripe_unit.map(ImageProperty::StripeUnit),
        properties.stripe_count.map(ImageProperty::StripeCount),
    ];
    let metadata = properties.metadata.iter().cloned().map(|(key, value)| ImageProperty::Meta(key, value));
    for property in numbers.into_iter().flatten().chain(metadata) {
        put_property(out, &property);
    }
    put_diffs_head(out, properties.diffs);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(format: StreamFormat, chunks: Vec<Chunk>) -> Vec<u8> {
        let mut encoder = ChunkEncoder::new(format);
        let encode = |chunk| {
            let (mut bytes, data) = encoder.encode(chunk);
            data.iter().for_each(|data| bytes.extend_from_slice(data));
            bytes
        };
        chunks.into_iter().flat_map(encode).collect()
    }

    fn chunks_of(format: StreamFormat, stream: &[u8], cut: usize) -> Result<Vec<String>> {
        let mut decoder = ChunkDecoder::new(format);
        let mut chunks = Vec::new();
        for mut input in stream.chunks(cut) {
            while let Some(chunk) = decoder.next(&mut input)? {
                chunks.push(match chunk {
                    Chunk::Data(offset, data) => format!("Data({offset}, {:?})", &data[..]),
                    other => format!("{other:?}"),
                });
            }
        }
        decoder.finish().map(|()| chunks)
    }

    fn image() -> Vec<Chunk> {
        let properties = ImageProperties {
            order: Some(22),
            features: Some(61),
            metadata: vec![(b"k".to_vec(), b"v".to_vec())],
            diffs: 2,
            ..ImageProperties::default()
        };
        vec![
            Chunk::Image(Box::new(properties)),
            Chunk::To("s".into()),
            Chunk::Protected(true),
            Chunk::Size(4096),
            Chunk::Data(7, Buf::copy_of(b"data")),
            Chunk::DiffEnd,
            Chunk::From("s".into()),
            Chunk::Size(8192),
            Chunk::Zero(0, 4096),
            Chunk::DiffEnd,
            Chunk::End,
        ]
    }

    #[test]
    fn chunks_come_back() {
        let want: Vec<String> = image()
            .iter()
            .map(|chunk| match chunk {
                Chunk::Data(offset, data) => format!("Data({offset}, {:?})", &data[..]),
                other => format!("{other:?}"),
            })
            .collect();
        let stream = encoded(StreamFormat::Image, image());
        assert_eq!(chunks_of(StreamFormat::Image, &stream, stream.len()).as_ref(), Ok(&want));
        // Cut into bytes, the end comes with the last one.
        let cut = chunks_of(StreamFormat::Image, &stream, 1).expect("chunks");
        assert_eq!((cut.first(), cut.last()), (want.first(), want.last()));
        let diff = vec![Chunk::To("s".into()), Chunk::Size(1), Chunk::Changed(0, 1), Chunk::End];
        let want: Vec<String> = diff.iter().map(|chunk| format!("{chunk:?}")).collect();
        assert_eq!(chunks_of(StreamFormat::Diff, &encoded(StreamFormat::Diff, diff), 3), Ok(want));
    }

    #[test]
    fn what_is_wrong_with_a_stream_is_said() {
        let stream = encoded(StreamFormat::Image, image());
        let failure = chunks_of(StreamFormat::Image, &stream[..stream.len() - 1], 64).expect_err("cut off");
        assert!(failure.to_string().contains(&format!("truncated (at byte {})", stream.len() - 1)), "{failure}");
        let failure = chunks_of(StreamFormat::Diff, &stream, 64).expect_err("another format");
        assert!(failure.to_string().contains("export-diff"), "{failure}");
        let mut encoder = ChunkEncoder::new(StreamFormat::Image);
        let (mut bytes, _) = encoder.encode(image().remove(0));
        bytes.extend(encoder.fail(&Failure::invalid("no more").hint("do this")));
        assert_eq!(chunks_of(StreamFormat::Image, &bytes, 5), Err(Failure::invalid("no more").hint("do this")));
    }
}
