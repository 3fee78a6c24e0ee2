//! Fuzz targets: bytes from a cluster, through all of their decoders. None of these may panic.

use crate::format::ImageHeader;
use crate::wire::bitmap::Bitmap;
use crate::wire::diff::{DiffDecoder, DiffError, DiffEvent, DiffVersion};
use crate::wire::group::{GroupSnapshot, decode_group, member_of_key};
use crate::wire::image_stream::{
    IMAGE_MAGIC, ImageProperty, ImageStreamDecoder, ImageStreamEvent, put_diffs_head, put_property,
};
use crate::wire::lock::{decode_info, watch_of};
use crate::wire::notify::{NotifyMessage, decode_response};
use crate::wire::snapshot::{Parent, Snapshot};
use crate::wire::trash::TrashEntry;

/// Fuzzes an object map: decoding and encoding must round-trip.
pub fn object_map(data: &[u8]) {
    let Some(map) = Bitmap::decode(data) else { return };
    assert!(map.objects().div_ceil(4) <= data.len() as u64);
    assert_eq!(Bitmap::decode(&map.encode()).as_ref(), Some(&map));
    let mut resized = map.clone();
    resized.resize(map.objects() / 2);
    resized.resize(map.objects());
    for object in 0..map.objects().min(1000) {
        let kept = object < map.objects() / 2;
        assert!(resized.get(object) == map.get(object) || !kept);
        assert!(kept || resized.get(object) as u8 == 0);
    }
}

/// Fuzzes notifications between clients, and lock information of the object class.
pub fn messages(data: &[u8]) {
    if let Some(message) = NotifyMessage::decode(data) {
        // Requests for other operations than these are never sent.
        let is_sent = !matches!(&message, NotifyMessage::Operation(request) if request.operation.is_none());
        assert!(!is_sent || NotifyMessage::decode(&message.encode()) == Some(message));
    }
    decode_response(data);
    if let Some(info) = decode_info(data) {
        for locker in &info.lockers {
            let _ = (locker.client(), watch_of(&locker.cookie));
        }
    }
}

/// Fuzzes diff streams: the first byte selects the version and the chunk size, and the magic is prepended to the rest. The
/// chunk size must not matter, and decoded records must round-trip.
pub fn diff(data: &[u8]) {
    let Some((&chunk, rest)) = data.split_first() else { return };
    let version = if chunk & 128 == 0 { DiffVersion::V1 } else { DiffVersion::V2 };
    let stream = [version.magic(), rest].concat();
    let decoded = decode_diff(&stream, stream.len());
    assert_eq!(decode_diff(&stream, usize::from(chunk & 127).max(1)), decoded);
    let Ok(records) = decoded else { return };
    let mut again = version.magic().to_vec();
    records.iter().for_each(|record| record.put(version, &mut again));
    assert!(again.len() <= stream.len());
    assert_eq!(decode_diff(&again, again.len()).as_ref(), Ok(&records));
}

/// Fuzzes streams of images with snapshots, as [`diff`].
pub fn image_stream(data: &[u8]) {
    let Some((&chunk, rest)) = data.split_first() else { return };
    let stream = [IMAGE_MAGIC, rest].concat();
    let decoded = decode_image(&stream, stream.len());
    assert_eq!(decode_image(&stream, usize::from(chunk).max(1)), decoded);
    let Ok((properties, diffs)) = decoded else { return };
    let mut again = IMAGE_MAGIC.to_vec();
    properties.iter().for_each(|property| put_property(&mut again, property));
    let ends = |records: &[DiffRecord]| matches!(records.last(), Some(DiffRecord::End));
    let fails = !diffs.last().is_some_and(|records| ends(records));
    // A failure stands for the diffs that do not follow it.
    put_diffs_head(&mut again, diffs.len() as u64 + u64::from(fails));
    for records in &diffs {
        again.extend_from_slice(DiffVersion::V2.magic());
        records.iter().for_each(|record| record.put(DiffVersion::V2, &mut again));
    }
    assert!(again.len() <= stream.len());
    assert_eq!(decode_image(&again, again.len()), Ok((properties, diffs)));
}

/// Record of a diff stream, whole.
#[derive(Debug, PartialEq, Eq)]
enum DiffRecord {
    From(String),
    To(String),
    Protected(bool),
    Size(u64),
    Data(u64, Vec<u8>),
    Zero(u64, u64),
    Changed(u64, u64),
    End,
    Failure(Vec<u8>),
}

impl DiffRecord {
    /// Appends the record of an event, or joins data with that before it.
    fn push(records: &mut Vec<DiffRecord>, event: DiffEvent<'_>) {
        if let (DiffEvent::Data(offset, data), Some(DiffRecord::Data(at, have))) = (&event, records.last_mut())
            && *at + have.len() as u64 == *offset
        {
            have.extend_from_slice(data);
            return;
        }
        records.push(match event {
            DiffEvent::From(name) => DiffRecord::From(name),
            DiffEvent::To(name) => DiffRecord::To(name),
            DiffEvent::Protected(protected) => DiffRecord::Protected(protected),
            DiffEvent::Size(size) => DiffRecord::Size(size),
            DiffEvent::Data(offset, data) => DiffRecord::Data(offset, data.to_vec()),
            DiffEvent::Zero(offset, len) => DiffRecord::Zero(offset, len),
            DiffEvent::Changed(offset, len) => DiffRecord::Changed(offset, len),
            DiffEvent::End => DiffRecord::End,
            DiffEvent::Failure(reason) => DiffRecord::Failure(reason),
        });
    }

    fn put(&self, version: DiffVersion, out: &mut Vec<u8>) {
        match self {
            DiffRecord::From(name) => version.put_from(out, name),
            DiffRecord::To(name) => version.put_to(out, name),
            DiffRecord::Protected(protected) => version.put_protected(out, *protected),
            DiffRecord::Size(size) => version.put_size(out, *size),
            DiffRecord::Data(offset, data) => {
                version.put_data_head(out, *offset, data.len() as u64);
                out.extend_from_slice(data);
            }
            DiffRecord::Zero(offset, len) => version.put_zero(out, *offset, *len),
            DiffRecord::Changed(offset, len) => version.put_changed(out, *offset, *len),
            DiffRecord::End => version.put_end(out),
            DiffRecord::Failure(reason) => version.put_failure(out, reason),
        }
    }
}

/// Decodes a stream in chunks, and joins adjacent data.
fn decode_diff(stream: &[u8], chunk: usize) -> Result<Vec<DiffRecord>, DiffError> {
    let mut decoder = DiffDecoder::new();
    let mut records: Vec<DiffRecord> = Vec::new();
    for mut input in stream.chunks(chunk) {
        while let Some(event) = decoder.next(&mut input)? {
            DiffRecord::push(&mut records, event);
        }
    }
    decoder.finish().map(|()| records)
}

/// Decodes a stream of an image in chunks: its properties, and the records of each diff.
fn decode_image(stream: &[u8], chunk: usize) -> Result<(Vec<ImageProperty>, Vec<Vec<DiffRecord>>), DiffError> {
    let mut decoder = ImageStreamDecoder::new();
    let (mut properties, mut diffs) = (Vec::new(), vec![Vec::new()]);
    for mut input in stream.chunks(chunk) {
        while let Some(event) = decoder.next(&mut input)? {
            match event {
                ImageStreamEvent::Property(property) => properties.push(property),
                ImageStreamEvent::Diffs(_) => {}
                ImageStreamEvent::Diff(event) => {
                    let ended = event == DiffEvent::End;
                    DiffRecord::push(diffs.last_mut().expect("never empty"), event);
                    if ended {
                        diffs.push(Vec::new());
                    }
                }
            }
        }
    }
    diffs.pop_if(|last| last.is_empty());
    decoder.finish().map(|()| (properties, diffs))
}

/// Fuzzes header values: the bytes after the first one as a parent, as a snapshot, as an entry of the trash, and split into
/// values. The first
/// byte is the number of these that are header keys; the rest are snapshots.
pub fn header(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    if let Some(parent) = Parent::decode(rest) {
        assert_eq!(Parent::decode(&parent.encode_like(&[2])), Some(parent));
    }
    if let Some(snapshot) = Snapshot::decode(rest)
        && let Some(flagged) = snapshot.with_flags(3)
    {
        assert_eq!(Snapshot::decode(&flagged).map(|flagged| (flagged.flags, flagged.name)), Some((3, snapshot.name)));
    }
    if let Some(entry) = TrashEntry::decode(rest) {
        // Times past 2106 are stored as the last one that fits.
        let again = TrashEntry::decode(&entry.encode()).expect("an entry");
        assert_eq!(again.encode(), entry.encode());
    }
    if let Some(snapshot) = GroupSnapshot::decode(rest) {
        assert_eq!(GroupSnapshot::decode(&snapshot.encode()), Some(snapshot));
    }
    let _ = (decode_group(rest), member_of_key(rest));
    let mut values: Vec<Option<Vec<u8>>> = Vec::new();
    let mut rest = rest;
    while let Some((&len, after)) = rest.split_first() {
        let (value, after) = after.split_at(after.len().min(len.into()));
        values.push((len != 255).then(|| value.to_vec()));
        rest = after;
    }
    let at = usize::from(which).min(values.len());
    let snapshots = values.split_off(at).into_iter().flatten().map(|value| {
        let id = value.get(6..14).and_then(|id| id.first_chunk().copied()).map_or(0, u64::from_le_bytes);
        (format!("snapshot_{id:016x}").into_bytes(), value)
    });
    if let Ok(header) = ImageHeader::decode(&values, &snapshots.collect::<Vec<_>>()) {
        assert!(header.snap_context().is_valid());
        header.encode_overlap(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Appends records of any kind, the last number of each as a seed.
    fn put(version: DiffVersion, out: &mut Vec<u8>, parts: &[(usize, u32, u32)]) {
        for &(kind, number, len) in parts {
            let (offset, len) = (u64::from(number), u64::from(len));
            match kind {
                0 => version.put_size(out, offset),
                1 => version.put_zero(out, offset, len),
                2 => {
                    version.put_data_head(out, offset, len);
                    out.extend(std::iter::repeat_n(number as u8, len as usize));
                }
                3 => version.put_failure(out, &vec![b'x'; len as usize]),
                4 => version.put_end(out),
                5 => version.put_from(out, &"f".repeat(len as usize)),
                6 => version.put_to(out, &"t".repeat(len as usize)),
                7 => version.put_protected(out, number % 2 == 0),
                8 => version.put_changed(out, offset, len),
                _ => out.extend(&number.to_le_bytes()[..1]),
            }
        }
    }

    proptest! {
        #[test]
        fn diff_streams_of_any_records_round_trip(
            parts in proptest::collection::vec((0usize..10, any::<u32>(), 0u32..40), 0..8),
            chunk in any::<u8>(),
            cut in 0usize..400,
        ) {
            let mut data = vec![chunk];
            put(if chunk & 128 == 0 { DiffVersion::V1 } else { DiffVersion::V2 }, &mut data, &parts);
            super::diff(&data);
            super::diff(&data[..cut.min(data.len())]);
            DiffVersion::V1.put_end(&mut data);
            super::diff(&data);
        }

        #[test]
        fn streams_of_images_round_trip(
            numbers in proptest::collection::vec(any::<u64>(), 0..4),
            diffs in proptest::collection::vec(
                proptest::collection::vec((0usize..9, any::<u32>(), 0u32..40), 0..5),
                1..4,
            ),
            chunk in any::<u8>(),
            cut in 0usize..800,
        ) {
            let mut data = vec![chunk];
            for number in numbers {
                put_property(&mut data, &ImageProperty::Features(number));
                put_property(&mut data, &ImageProperty::Meta(b"key".to_vec(), number.to_le_bytes().to_vec()));
            }
            put_diffs_head(&mut data, diffs.len() as u64);
            for parts in &diffs {
                data.extend_from_slice(DiffVersion::V2.magic());
                put(DiffVersion::V2, &mut data, parts);
                if !parts.iter().any(|part| part.0 == 3 || part.0 == 4) {
                    DiffVersion::V2.put_end(&mut data);
                }
            }
            super::image_stream(&data);
            super::image_stream(&data[..cut.min(data.len())]);
        }
    }
}
