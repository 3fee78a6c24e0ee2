//! Object map encoding: two bits per object, with checksums.
//!
//! Stored as three parts: the header, a length and a structure with the number of objects; the bits, four objects a
//! byte, the first in the highest bits; the footer, a length, the header's checksum, and one checksum for each 4 KiB
//! of bits.  A footer without checksums is an empty one.

use forebay_accel::crc32c;

use super::{CephReader, CephWriter};

/// Bytes of the bitmap covered by one checksum.
const BLOCK: usize = 4096;
/// Maximum number of objects of a map; an image with more has none (cls_rbd: MAX_OBJECT_MAP_OBJECT_COUNT).
pub(crate) const OBJECTS_MAX: u64 = 256_000_000;

/// State of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectMapState {
    /// Object does not exist.
    Nonexistent = 0,
    /// Object may exist, and may have changed since the newest snapshot.
    Exists = 1,
    /// Object is being removed.
    Pending = 2,
    /// Object may exist, and has not changed since the newest snapshot.
    Clean = 3,
}

impl ObjectMapState {
    fn of(bits: u8) -> Self {
        match bits & 3 {
            0 => ObjectMapState::Nonexistent,
            1 => ObjectMapState::Exists,
            2 => ObjectMapState::Pending,
            _ => ObjectMapState::Clean,
        }
    }
}

/// States of an image's objects.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Bitmap {
    objects: u64,
    bits: Vec<u8>,
}

impl Bitmap {
    /// Returns a map of `objects` objects, none existing.
    #[cfg(test)]
    pub(crate) fn new(objects: u64) -> Self {
        Self { objects, bits: vec![0; bytes_of(objects)] }
    }

    /// Returns a map of `objects` objects that all exist.
    pub(crate) fn existing(objects: u64) -> Self {
        let mut map = Self::default();
        map.resize(objects);
        (0..objects).for_each(|object| map.set(object, ObjectMapState::Exists));
        map
    }

    pub(crate) fn objects(&self) -> u64 {
        self.objects
    }

    /// Returns the state of an object; `Exists` for one past the end of the map.
    pub(crate) fn get(&self, object: u64) -> ObjectMapState {
        if object >= self.objects {
            return ObjectMapState::Exists;
        }
        ObjectMapState::of(self.bits[(object / 4) as usize] >> shift(object))
    }

    /// Sets the state of an object; ignored past the end of the map.
    pub(crate) fn set(&mut self, object: u64, state: ObjectMapState) {
        if object < self.objects {
            let byte = &mut self.bits[(object / 4) as usize];
            *byte = *byte & !(3 << shift(object)) | (state as u8) << shift(object);
        }
    }

    /// Resizes the map; new objects are `Nonexistent`.
    pub(crate) fn resize(&mut self, objects: u64) {
        self.bits.resize(bytes_of(objects), 0);
        for object in self.objects..objects.min(self.objects.next_multiple_of(4)) {
            let byte = &mut self.bits[(object / 4) as usize];
            *byte &= !(3 << shift(object));
        }
        self.objects = objects;
    }

    /// Encodes the stored form, with checksums: a snapshot's map, or the argument of a method of the class.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let header = CephWriter::new().versioned(1, 1, CephWriter::new().u64(self.objects)).done();
        let blocks = self.bits.chunks(BLOCK);
        let mut footer = CephWriter::new().u32(checksum(&header)).u32(blocks.len() as u32);
        for block in blocks {
            footer = footer.u32(checksum(block));
        }
        let mut out = CephWriter::new().bytes(&header).done();
        out.extend_from_slice(&self.bits);
        out.extend(CephWriter::new().bytes(&footer.done()).done());
        out
    }

    /// Decodes the stored form; `None` if it is damaged.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = CephReader::new(bytes);
        let header = reader.bytes()?;
        let objects = CephReader::new(header).versioned(1)?.body.u64()?;
        if objects > OBJECTS_MAX {
            return None;
        }
        let bits = reader.take(bytes_of(objects))?.to_vec();
        let mut footer = CephReader::new(reader.bytes()?);
        if !footer.rest().is_empty() {
            if footer.u32()? != checksum(header) {
                return None;
            }
            let blocks = bits.chunks(BLOCK);
            if footer.u32()? as usize != blocks.len() {
                return None;
            }
            for block in blocks {
                if footer.u32()? != checksum(block) {
                    return None;
                }
            }
        }
        Some(Self { objects, bits })
    }
}

/// Encodes the input of `rbd.object_map_update`: objects in `range` in the state `from` (`None`: in any) change to
/// the state `to`.
pub(crate) fn encode_update(range: std::ops::Range<u64>, to: ObjectMapState, from: Option<ObjectMapState>) -> Vec<u8> {
    let filter = |writer: CephWriter| match from {
        Some(from) => writer.u8(1).u8(from as u8),
        None => writer.u8(0),
    };
    filter(CephWriter::new().u64(range.start).u64(range.end).u8(to as u8)).done()
}

/// Encodes the input of `rbd.object_map_resize`: new objects get the state `state`.
pub(crate) fn encode_resize(objects: u64, state: ObjectMapState) -> Vec<u8> {
    CephWriter::new().u64(objects).u8(state as u8).done()
}

/// Returns the length of the bitmap in bytes.
fn bytes_of(objects: u64) -> usize {
    objects.div_ceil(4) as usize
}

fn shift(object: u64) -> u64 {
    (3 - object % 4) * 2
}

/// Returns Ceph's CRC-32C with seed 0, not inverted before or after.
fn checksum(bytes: &[u8]) -> u32 {
    !crc32c::extend(!0, bytes)
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    /// Golden bytes: stored by `rbd` 16.2 for an image of 160 objects: sixteen written, then a snapshot, so that they
    /// are clean.
    #[test]
    fn maps_of_rbd_byte_for_byte() {
        let stored = |first: &str, crc: &str| {
            unhex(&format!(
                "0e000000 0101 08000000 a000000000000000 {first} {} 0c000000 af49b6d3 01000000 {crc}",
                "00".repeat(36)
            ))
        };
        for (bytes, state) in [
            (stored("ffffffff", "2248a0a6"), ObjectMapState::Clean),
            (stored("55555555", "1e386062"), ObjectMapState::Exists),
            (stored("00000000", "00000000"), ObjectMapState::Nonexistent),
        ] {
            let mut map = Bitmap::decode(&bytes).expect("a good map");
            assert_eq!((map.objects(), map.get(15), map.get(16)), (160, state, ObjectMapState::Nonexistent));
            assert_eq!(map.encode(), bytes);
            let mut made = Bitmap::new(160);
            (0..16).for_each(|object| made.set(object, state));
            assert_eq!(made, map);
            map.set(0, ObjectMapState::Pending);
            assert_eq!([map.get(0), map.get(1)], [ObjectMapState::Pending, state]);
            for at in 0..bytes.len() {
                let mut bad = bytes.clone();
                bad[at] ^= 0x10;
                assert_eq!(Bitmap::decode(&bad), None, "byte {at}");
                assert_eq!(Bitmap::decode(&bytes[..at]), None);
            }
        }
        let without_checksums = unhex("0e000000 0101 08000000 0500000000000000 1b40 00000000");
        let map = Bitmap::decode(&without_checksums).expect("as object_map_load answers");
        let states = [
            ObjectMapState::Nonexistent,
            ObjectMapState::Exists,
            ObjectMapState::Pending,
            ObjectMapState::Clean,
            ObjectMapState::Exists,
        ];
        assert_eq!([0, 1, 2, 3, 4].map(|object| map.get(object)), states);
    }

    #[test]
    fn resized_maps_are_clear_where_they_grew() {
        let mut map = Bitmap::new(9);
        (0..9).for_each(|object| map.set(object, ObjectMapState::Clean));
        map.resize(6);
        assert_eq!(map.get(8), ObjectMapState::Exists, "what is not covered may be there");
        map.resize(20_000);
        assert_eq!([5, 6, 7, 8, 19_999].map(|object| map.get(object) as u8), [3, 0, 0, 0, 0]);
        assert_eq!(Bitmap::decode(&map.encode()), Some(map));
    }

    #[test]
    fn large_counts_take_no_memory() {
        let bytes =
            CephWriter::new().bytes(&CephWriter::new().versioned(1, 1, CephWriter::new().u64(OBJECTS_MAX + 1)).done());
        assert_eq!(Bitmap::decode(&bytes.done()), None);
        let bytes =
            CephWriter::new().bytes(&CephWriter::new().versioned(1, 1, CephWriter::new().u64(OBJECTS_MAX)).done());
        assert_eq!(Bitmap::decode(&bytes.done()), None, "the bits are not there");
    }

    #[test]
    fn inputs_byte_for_byte() {
        assert_eq!(encode_update(1..3, ObjectMapState::Exists, None), unhex("0100000000000000 0300000000000000 01 00"));
        assert_eq!(
            encode_update(1..2, ObjectMapState::Nonexistent, Some(ObjectMapState::Pending)),
            unhex("0100000000000000 0200000000000000 00 01 02")
        );
        assert_eq!(encode_resize(160, ObjectMapState::Nonexistent), unhex("a000000000000000 00"));
    }
}
