//! Anchor: location of the newest checkpoint.  Two slots are written alternately, each in two copies. A torn write
//! leaves the previous anchor intact, and a single damaged block leaves the other copy.

use super::{BLOCK, BlobPtr, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

const MAGIC: &[u8; 8] = b"FBANCHOR";
const CRC_AT: usize = 8;

/// Byte addresses of the copies of each slot.
pub const SLOTS: [[u64; 2]; 2] = [[128 * 1024, 192 * 1024], [256 * 1024, 320 * 1024]];

/// Position in the log, and the sequence number of the batch there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogPosition {
    /// Block number on the device.
    pub block: u64,
    /// Sequence number of the batch there.
    pub seq: u64,
}

/// Anchor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Anchor {
    /// First eight bytes of the store's UUID.
    pub store: u64,
    /// Checkpoint number; incremented by each checkpoint. Its lowest bit selects the slot.
    pub generation: u64,
    /// Random number, different each time the store is opened for writing. Batches carry it, so that batches of an
    /// earlier opening are never taken for those of a later one.
    pub epoch: u64,
    /// Redo point: position at which replay begins.
    pub redo: LogPosition,
    /// Segment in which the log continues when the redo point's segment is full.
    pub redo_next_segment: u32,
    /// Root of the tree; none if the tree is empty.
    pub root: BlobPtr,
    /// Location of the segment table.
    pub segments: BlobPtr,
    /// Next object number to assign.
    pub next_oid: u64,
    /// Newest snapshot number allocated.
    pub snap_seq: u64,
    /// Newest object version assigned.
    pub version: u64,
    /// Number of objects (heads).
    pub objects: u64,
    /// Total bytes written by users of the store.
    pub user_bytes: u64,
    /// Total bytes written to the device.
    pub device_bytes: u64,
    /// Set if the store was closed cleanly, so that nothing must be replayed.
    pub clean: bool,
}

impl Anchor {
    /// Encodes the anchor as one block.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOCK);
        out.put(MAGIC);
        out.put_u32(0);
        out.put_u32(u32::from(self.clean));
        for field in [self.store, self.generation, self.epoch, self.redo.block, self.redo.seq] {
            out.put_u64(field);
        }
        out.put_ptr(self.root);
        out.put_ptr(self.segments);
        out.put_u32(self.redo_next_segment);
        out.put_u32(0);
        for field in [self.next_oid, self.snap_seq, self.version, self.objects, self.user_bytes, self.device_bytes] {
            out.put_u64(field);
        }
        out.resize(BLOCK, 0);
        seal(&mut out, CRC_AT);
        out
    }

    /// Decodes an anchor of any store from one block. For use when the store's identity is lost.
    pub fn decode_any(block: &[u8]) -> Result<Self, MalformedStore> {
        const STORE_AT: usize = 16;
        match block.get(STORE_AT..STORE_AT + 8).and_then(|bytes| bytes.try_into().ok()) {
            Some(store) => Self::decode(block, u64::from_le_bytes(store)),
            None => malformed("anchor: not one"),
        }
    }

    /// Decodes an anchor from one block, of the store whose UUID begins with `store`.
    pub fn decode(block: &[u8], store: u64) -> Result<Self, MalformedStore> {
        if block.len() != BLOCK || !block.starts_with(MAGIC) {
            return malformed("anchor: not one");
        }
        if !is_sealed(block, CRC_AT) {
            return malformed("anchor: the checksum is wrong");
        }
        let mut reader = StoreReader::new(&block[12..], "anchor");
        let flags = reader.u32()?;
        let anchor = Self {
            clean: flags & 1 != 0,
            store: reader.u64()?,
            generation: reader.u64()?,
            epoch: reader.u64()?,
            redo: LogPosition { block: reader.u64()?, seq: reader.u64()? },
            root: reader.ptr()?,
            segments: reader.ptr()?,
            redo_next_segment: {
                let next = reader.u32()?;
                reader.u32()?;
                next
            },
            next_oid: reader.u64()?,
            snap_seq: reader.u64()?,
            version: reader.u64()?,
            objects: reader.u64()?,
            user_bytes: reader.u64()?,
            device_bytes: reader.u64()?,
        };
        if anchor.store != store {
            return malformed("anchor: of another store");
        }
        if flags > 1 {
            return malformed(format!("anchor: flags {flags:#x}"));
        }
        Ok(anchor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_damage() {
        let anchor = Anchor {
            store: 77,
            generation: 9,
            epoch: 3,
            redo: LogPosition { block: 300, seq: 12 },
            root: BlobPtr { addr: 5 << 20, len: 4000, crc: 1 },
            next_oid: 44,
            clean: true,
            ..Anchor::default()
        };
        let block = anchor.encode();
        assert_eq!(Anchor::decode(&block, 77).as_ref(), Ok(&anchor));
        assert_eq!(Anchor::decode_any(&block), Ok(anchor));
        assert!(Anchor::decode_any(&block[..16]).is_err());
        assert!(Anchor::decode(&block, 78).is_err());
        for at in [0, 9, 13, 40, 4095] {
            let mut bad = block.clone();
            bad[at] ^= 0x10;
            assert!(Anchor::decode(&bad, 77).is_err());
        }
    }
}
