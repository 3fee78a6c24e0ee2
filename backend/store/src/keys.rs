//! Keys of the metadata tree: one byte for the record type, then the sort fields.

use forebay_block::ObjectName;

/// Returns the key of a name record, which maps an object name to its number.
pub fn name(name: &ObjectName) -> Vec<u8> {
    let mut key = name_space(name.namespace());
    key.extend_from_slice(name.name().as_bytes());
    key
}

/// Returns the common prefix of all name keys of a namespace.
pub fn name_space(namespace: &str) -> Vec<u8> {
    let mut key = vec![b'n'];
    key.extend_from_slice(&(namespace.len() as u16).to_be_bytes());
    key.extend_from_slice(namespace.as_bytes());
    key
}

/// Returns the key of an object record (onode), by object number.
pub fn object(oid: u64) -> Vec<u8> {
    with_number(b'o', oid)
}

/// Returns the key of a key-value pair that belongs to an object's head or to a clone.
pub fn kv(oid: u64, of: u64, key: &[u8]) -> Vec<u8> {
    let mut out = with_number(b'k', oid);
    out.extend_from_slice(&of.to_be_bytes());
    out.extend_from_slice(key);
    out
}

/// Returns the key of a lost-value marker. The value of that [`kv`] key was damaged before it was stored in the
/// tree.
pub fn kv_lost(oid: u64, of: u64, key: &[u8]) -> Vec<u8> {
    let mut out = kv(oid, of, key);
    out[0] = b'x';
    out
}

/// Returns the key of a snapshot-to-object record: the object has a clone that represents the snapshot.
pub fn snap_object(snap: u64, oid: u64) -> Vec<u8> {
    let mut out = with_number(b'm', snap);
    out.extend_from_slice(&oid.to_be_bytes());
    out
}

/// Returns the key of a snapshot whose removal is in progress.
pub fn snap_in_removal(snap: u64) -> Vec<u8> {
    with_number(b's', snap)
}

/// Returns the key of a snapshot whose removal is in progress or complete.
pub fn snap_removed(snap: u64) -> Vec<u8> {
    with_number(b'r', snap)
}

/// Returns the key of the progress of a scrub.
pub fn scrub() -> Vec<u8> {
    vec![b'z']
}

/// Returns the key of the data policy of objects whose names begin with `prefix`.
pub fn policy(namespace: &str, prefix: &str) -> Vec<u8> {
    let mut key = name_space(namespace);
    key[0] = b'p';
    key.extend_from_slice(prefix.as_bytes());
    key
}

/// Returns the key of the counters of compressed data.
pub fn blob_counters() -> Vec<u8> {
    vec![b'd']
}

/// Returns the key of the current use of a segment.
pub fn segment_use(segment: u32) -> Vec<u8> {
    let mut key = vec![b'u'];
    key.extend_from_slice(&segment.to_be_bytes());
    key
}

pub fn with_number(kind: u8, number: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(9 + 16);
    key.push(kind);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

/// Returns the first key after all keys that begin with `prefix`.
pub fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xFF {
            end.push(last + 1);
            return end;
        }
    }
    vec![0xFF; 32]
}
