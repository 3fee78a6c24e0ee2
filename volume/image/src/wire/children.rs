//! Encodings of the lists of a snapshot's clones.

use forebay_block::SnapId;

use super::{CephReader, CephWriter};

/// Clone, as the header of its parent names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Child {
    pub(crate) pool: i64,
    pub(crate) namespace: String,
    pub(crate) image: String,
}

/// Decodes the clones of version 2 of a snapshot.
pub(crate) fn decode_children(bytes: &[u8]) -> Option<Vec<Child>> {
    let mut reader = CephReader::new(bytes);
    let count = reader.u32()?;
    let mut children = Vec::new();
    for _ in 0..count {
        let mut child = reader.versioned(2)?;
        let (pool, image) = (child.body.i64()?, child.body.string()?);
        let namespace = if child.version >= 2 { child.body.string()? } else { String::new() };
        children.push(Child { pool, namespace, image });
    }
    Some(children)
}

/// Encodes the clones of version 2 of a snapshot, in the order of the set that Ceph stores.
pub(crate) fn encode_children(children: &mut [Child]) -> Vec<u8> {
    children.sort();
    let count = CephWriter::new().u32(children.len() as u32);
    let encode = |child: &Child| CephWriter::new().i64(child.pool).string(&child.image).string(&child.namespace);
    children.iter().fold(count, |out, child| out.versioned(2, 1, encode(child))).done()
}

/// Encodes the key of the clones of version 1 of a snapshot, in the list of a pool.
pub(crate) fn encode_legacy_key(pool: i64, image: &str, snap: SnapId) -> Vec<u8> {
    CephWriter::new().i64(pool).string(image).u64(snap.0).done()
}

/// Decodes the ids of the clones of version 1 of a snapshot.
pub(crate) fn decode_legacy_children(bytes: &[u8]) -> Option<Vec<String>> {
    let mut reader = CephReader::new(bytes);
    let count = reader.u32()?;
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(reader.string()?);
    }
    Some(ids)
}

/// Encodes the ids of the clones of version 1 of a snapshot, in the order of the set that Ceph stores.
pub(crate) fn encode_legacy_children(ids: &mut [String]) -> Vec<u8> {
    ids.sort();
    let count = CephWriter::new().u32(ids.len() as u32);
    ids.iter().fold(count, |out, id| out.string(id)).done()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_round_trip_in_order_and_refuse_what_is_cut_off() {
        let child =
            |pool, namespace: &str, image: &str| Child { pool, namespace: namespace.into(), image: image.into() };
        let mut children = vec![child(2, "", "b"), child(1, "ns", "a"), child(1, "", "c")];
        let bytes = encode_children(&mut children);
        assert_eq!(children, [child(1, "", "c"), child(1, "ns", "a"), child(2, "", "b")]);
        assert_eq!(decode_children(&bytes), Some(children));
        let mut ids = vec!["b".to_owned(), "a".to_owned()];
        let legacy = encode_legacy_children(&mut ids);
        assert_eq!(decode_legacy_children(&legacy), Some(vec!["a".to_owned(), "b".to_owned()]));
        for (bytes, what) in [(&bytes, "version 2"), (&legacy, "version 1")] {
            for at in 0..bytes.len() {
                let cut = &bytes[..at];
                let read = if what == "version 2" {
                    decode_children(cut).is_some()
                } else {
                    decode_legacy_children(cut).is_some()
                };
                assert!(!read, "{what}: {at} bytes");
            }
        }
        // A count without entries allocates nothing.
        assert_eq!(decode_children(&u32::MAX.to_le_bytes()), None);
        assert_eq!(decode_legacy_children(&u32::MAX.to_le_bytes()), None);
    }
}
