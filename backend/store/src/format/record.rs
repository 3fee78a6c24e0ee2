//! Checkpoint record: a copy of superblock and anchor in the log, from which both can be rebuilt.

use super::anchor::Anchor;
use super::superblock::StoreSuperblock;
use super::{BLOCK, MalformedStore, Put, StoreReader, malformed};

/// Length of the used part of a superblock in bytes; the rest is zero.
const SUPERBLOCK_LEN: usize = 72;
/// Length of the used part of an anchor in bytes; the rest is zero.
const ANCHOR_LEN: usize = 144;
/// Encoded size in bytes.
pub const RECORD_LEN: usize = SUPERBLOCK_LEN + ANCHOR_LEN + 8;

/// Copy of a store's superblock and of a checkpoint's anchor.
///
/// A batch with a record is written only when everything that the checkpoint references is durable, except the segment
/// table, which is in the same batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointRecord {
    /// Superblock of the store.
    pub superblock: StoreSuperblock,
    /// Anchor as it was written after this record.
    pub anchor: Anchor,
    /// Time of the checkpoint: seconds since 1970.
    pub taken_s: u64,
}

impl CheckpointRecord {
    /// Encodes the record in [`RECORD_LEN`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(RECORD_LEN);
        out.put(&self.superblock.encode()[..SUPERBLOCK_LEN]);
        out.put(&self.anchor.encode()[..ANCHOR_LEN]);
        out.put_u64(self.taken_s);
        out
    }

    /// Decodes a record encoded by [`encode`](Self::encode); superblock and anchor must be valid and of the same store.
    ///
    /// # Errors
    /// Description of the malformed field.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedStore> {
        if bytes.len() != RECORD_LEN {
            return malformed(format!("checkpoint record: {} bytes", bytes.len()));
        }
        let mut reader = StoreReader::new(bytes, "checkpoint record");
        let mut block = |len| {
            reader.bytes(len).map(|bytes| {
                let mut block = bytes.to_vec();
                block.resize(BLOCK, 0);
                block
            })
        };
        let (superblock, anchor) = (block(SUPERBLOCK_LEN)?, block(ANCHOR_LEN)?);
        let superblock = StoreSuperblock::decode(&superblock)
            .map_err(|refused| MalformedStore(format!("checkpoint record: its superblock is {refused:?}")))?;
        let anchor = Anchor::decode(&anchor, superblock.store_number())?;
        Ok(Self { superblock, anchor, taken_s: reader.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_damage() {
        let superblock = crate::format::superblock::tests::sample();
        let anchor = Anchor { store: superblock.store_number(), generation: 7, epoch: 9, ..Anchor::default() };
        let record = CheckpointRecord { superblock, anchor, taken_s: 1_700_000_001 };
        let bytes = record.encode();
        assert_eq!((bytes.len(), CheckpointRecord::decode(&bytes)), (RECORD_LEN, Ok(record.clone())));
        for at in 0..RECORD_LEN - 8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(CheckpointRecord::decode(&bad).is_err(), "byte {at}");
        }
        let stranger = CheckpointRecord { anchor: Anchor { store: 1, ..record.anchor.clone() }, ..record };
        assert!(CheckpointRecord::decode(&stranger.encode()).is_err(), "an anchor of another store");
        assert!(CheckpointRecord::decode(&bytes[1..]).is_err());
    }
}
