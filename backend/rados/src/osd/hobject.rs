//! Objects in the sort order of OSDs within a placement group (`hobject_t`).

use std::cmp::Ordering;

use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};

use crate::denc::{ReaderExt, WriterExt};

/// Object, or a position between objects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HObject {
    pub(crate) pool: i64,
    pub(crate) namespace: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) name: Vec<u8>,
    pub(crate) snap: u64,
    pub(crate) hash: u32,
    /// Set for the position after all objects.
    pub(crate) max: bool,
}

impl HObject {
    pub(crate) fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let (version, mut part) = from.part(4)?;
        if version < 4 {
            return Err(part.malformed());
        }
        let (key, name) = (part.blob()?.to_vec(), part.blob()?.to_vec());
        let (snap, hash, max) = (part.u64()?, part.u32()?, part.flag()?);
        Ok(Self { key, name, snap, hash, max, namespace: part.blob()?.to_vec(), pool: part.i64()? })
    }

    pub(crate) fn encode(&self, out: &mut PayloadWriter) {
        out.versioned(4, 3, |out| {
            out.blob(&self.key).blob(&self.name).u64(self.snap).u32(self.hash).u8(u8::from(self.max));
            out.blob(&self.namespace).i64(self.pool);
        });
    }

    /// Returns the position before all objects of a placement group.
    pub(crate) fn start(pool: i64, hash: u32) -> Self {
        Self { pool, hash, ..Self::default() }
    }
}

impl Ord for HObject {
    fn cmp(&self, other: &Self) -> Ordering {
        if self.max || other.max {
            return self.max.cmp(&other.max);
        }
        let by_key = || {
            if self.key.is_empty() && other.key.is_empty() {
                return Ordering::Equal;
            }
            let effective = |one: &Self| if one.key.is_empty() { one.name.clone() } else { one.key.clone() };
            effective(self).cmp(&effective(other))
        };
        self.pool
            .cmp(&other.pool)
            .then_with(|| self.hash.reverse_bits().cmp(&other.hash.reverse_bits()))
            .then_with(|| self.namespace.cmp(&other.namespace))
            .then_with(by_key)
            .then_with(|| self.name.cmp(&other.name))
            .then_with(|| self.snap.cmp(&other.snap))
    }
}

impl PartialOrd for HObject {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_objects() {
        let one = |hash, name: &str| HObject { hash, name: name.into(), ..HObject::default() };
        assert!(one(1, "a") > one(2, "a"), "by the reversed bits of the hash");
        assert!(one(1, "a") < one(1, "b"));
        assert!(HObject { max: true, ..HObject::default() } > one(u32::MAX, "z"));
        let mut out = PayloadWriter::new();
        let whole = HObject { pool: 3, namespace: b"n".into(), key: b"k".into(), snap: 5, ..one(7, "o") };
        whole.encode(&mut out);
        let bytes = out.finish();
        assert_eq!(HObject::decode(&mut PayloadReader::new(&bytes, "x")), Ok(whole));
    }
}
