//! Fuzz targets: bytes from a cluster, through all of their decoders. None of these may panic.

use crate::format::Header;
use crate::wire::bitmap::Bitmap;
use crate::wire::lock::{decode_info, watch_of};
use crate::wire::notify::{Message, decode_response};
use crate::wire::snapshot::{Parent, Snapshot};

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
    if let Some(message) = Message::decode(data) {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
    decode_response(data);
    if let Some(info) = decode_info(data) {
        for locker in &info.lockers {
            let _ = (locker.client(), watch_of(&locker.cookie));
        }
    }
}

/// Fuzzes header values: the bytes after the first one as a parent, as a snapshot, and split into values. The first
/// byte is the number of these that are header keys; the rest are snapshots.
pub fn header(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    if let Some(parent) = Parent::decode(rest) {
        assert_eq!(Parent::decode(&parent.encode_like(&[2])), Some(parent));
    }
    Snapshot::decode(rest);
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
    if let Ok(header) = Header::decode(&values, &snapshots.collect::<Vec<_>>()) {
        assert!(header.snap_context().is_valid());
        header.encode_overlap(1);
    }
}
