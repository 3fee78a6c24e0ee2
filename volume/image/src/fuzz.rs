//! Fuzz targets: bytes from a cluster, through all of their decoders. None of these may panic.

use crate::format::ImageHeader;
use crate::wire::bitmap::Bitmap;
use crate::wire::diff::{self, DiffDecoder, DiffError, DiffEvent};
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
        assert_eq!(NotifyMessage::decode(&message.encode()), Some(message));
    }
    decode_response(data);
    if let Some(info) = decode_info(data) {
        for locker in &info.lockers {
            let _ = (locker.client(), watch_of(&locker.cookie));
        }
    }
}

/// Fuzzes diff streams: the first byte selects the chunk size, and the magic is prepended to the rest. The chunk size
/// must not matter, and decoded events must round-trip.
pub fn diff(data: &[u8]) {
    let Some((&chunk, rest)) = data.split_first() else { return };
    let stream = [diff::MAGIC, rest].concat();
    let decoded = decode_diff(&stream, stream.len());
    assert_eq!(decode_diff(&stream, usize::from(chunk).max(1)), decoded);
    let Ok(events) = decoded else { return };
    let mut again = diff::MAGIC.to_vec();
    for event in &events {
        match event {
            DiffRecord::Size(size) => diff::put_size(&mut again, *size),
            DiffRecord::Data(offset, data) => {
                diff::put_data_head(&mut again, *offset, data.len() as u64);
                again.extend_from_slice(data);
            }
            DiffRecord::Zero(offset, len) => diff::put_zero(&mut again, *offset, *len),
            DiffRecord::End => diff::put_end(&mut again),
            DiffRecord::Failure(reason) => diff::put_failure(&mut again, reason),
        }
    }
    assert!(again.len() <= stream.len());
    assert_eq!(decode_diff(&again, again.len()).as_ref(), Ok(&events));
}

/// Record of a diff stream, whole.
#[derive(Debug, PartialEq, Eq)]
enum DiffRecord {
    Size(u64),
    Data(u64, Vec<u8>),
    Zero(u64, u64),
    End,
    Failure(Vec<u8>),
}

/// Decodes a stream in chunks, and joins adjacent data.
fn decode_diff(stream: &[u8], chunk: usize) -> Result<Vec<DiffRecord>, DiffError> {
    let mut decoder = DiffDecoder::new();
    let mut records: Vec<DiffRecord> = Vec::new();
    for mut input in stream.chunks(chunk) {
        while let Some(event) = decoder.next(&mut input)? {
            let record = match event {
                DiffEvent::Size(size) => DiffRecord::Size(size),
                DiffEvent::Zero(offset, len) => DiffRecord::Zero(offset, len),
                DiffEvent::End => DiffRecord::End,
                DiffEvent::Failure(reason) => DiffRecord::Failure(reason),
                DiffEvent::Data(offset, data) => {
                    if let Some(DiffRecord::Data(at, have)) = records.last_mut()
                        && *at + have.len() as u64 == offset
                    {
                        have.extend_from_slice(data);
                        continue;
                    }
                    DiffRecord::Data(offset, data.to_vec())
                }
            };
            records.push(record);
        }
    }
    decoder.finish().map(|()| records)
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
        assert_eq!(TrashEntry::decode(&entry.encode()), Some(entry));
    }
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

    proptest! {
        #[test]
        fn diff_streams_of_any_records_round_trip(
            parts in proptest::collection::vec((0usize..6, any::<u32>(), 0u32..40), 0..8),
            chunk in any::<u8>(),
            cut in 0usize..400,
        ) {
            let mut data = vec![chunk];
            for (kind, number, len) in parts {
                let (offset, len) = (u64::from(number), u64::from(len));
                match kind {
                    0 => super::diff::put_size(&mut data, offset),
                    1 => super::diff::put_zero(&mut data, offset, len),
                    2 => {
                        super::diff::put_data_head(&mut data, offset, len);
                        data.extend(std::iter::repeat_n(number as u8, len as usize));
                    }
                    3 => super::diff::put_failure(&mut data, &vec![b'x'; len as usize]),
                    4 => super::diff::put_end(&mut data),
                    _ => data.extend(&number.to_le_bytes()[..1]),
                }
            }
            super::diff(&data);
            super::diff(&data[..cut.min(data.len())]);
        }
    }
}
