//! A batch: what is appended to the log in one piece.  A header block with the entries, then the payload blocks.

use super::{BLOCK, Malformed, Put, Reader, is_sealed, malformed, seal};

const MAGIC: &[u8; 8] = b"FBLOGBAT";
const CRC_AT: usize = 8;
/// Bytes of the header before the entries.
pub const FIXED: usize = 72;
/// Room for entries in a header, in bytes.
pub const ENTRY_ROOM: usize = BLOCK - FIXED;

const FLAG_CONTINUES: u32 = 1;

/// A batch's header.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchHeader {
    /// First eight bytes of the store's identity.
    pub store: u64,
    /// The life of the store in which it was written.
    pub epoch: u64,
    /// Consecutive.
    pub seq: u64,
    /// Block number on the device where this header lies.
    pub block: u64,
    /// Batches up to this number were known to be durable when this one was written.
    pub durable_seq: u64,
    /// The segment where the log goes on when this one is full.
    pub next_segment: u32,
    /// Payload blocks after the header.
    pub payload_blocks: u32,
    /// The last transaction goes on in the next batch, and counts only when that is there too.
    pub continues: bool,
    /// When it continues: bytes of entries before those of that transaction, which count by themselves.
    pub settled: u32,
    /// The entries, encoded.
    pub entries: Vec<u8>,
}

impl BatchHeader {
    /// One block.
    pub fn encode(&self, out: &mut [u8]) {
        assert!(self.entries.len() <= ENTRY_ROOM && out.len() == BLOCK);
        let mut head = Vec::with_capacity(FIXED);
        head.put(MAGIC);
        head.put_u32(0);
        head.put_u32(if self.continues { FLAG_CONTINUES } else { 0 });
        for field in [self.store, self.epoch, self.seq, self.block, self.durable_seq] {
            head.put_u64(field);
        }
        head.put_u32(self.next_segment);
        head.put_u32(self.payload_blocks);
        head.put_u32(self.entries.len() as u32);
        head.put_u32(self.settled);
        out[..FIXED].copy_from_slice(&head);
        out[FIXED..FIXED + self.entries.len()].copy_from_slice(&self.entries);
        out[FIXED + self.entries.len()..].fill(0);
        seal(out, CRC_AT);
    }

    /// Tests whether a block holds what is left of the batch `seq` there: all but one of the fields that tell are right.
    pub fn resembles(block: &[u8], store: u64, epoch: u64, seq: u64, number: u64) -> bool {
        let field = |at: usize| block.get(at..at + 8);
        let fields = [(0, *MAGIC), (16, store.to_le_bytes()), (24, epoch.to_le_bytes()), (32, seq.to_le_bytes())];
        let fields = fields.into_iter().chain([(40, number.to_le_bytes())]);
        let wrong = fields.filter(|&(at, value)| field(at) != Some(&value[..])).count();
        wrong <= 1
    }

    /// Of one block.
    pub fn decode(block: &[u8]) -> Result<Self, Malformed> {
        if block.len() != BLOCK || !block.starts_with(MAGIC) {
            return malformed("batch: not one");
        }
        if !is_sealed(block, CRC_AT) {
            return malformed("batch: the checksum is wrong");
        }
        let mut reader = Reader::new(&block[12..], "batch");
        let flags = reader.u32()?;
        let store = reader.u64()?;
        let epoch = reader.u64()?;
        let seq = reader.u64()?;
        let number = reader.u64()?;
        let durable_seq = reader.u64()?;
        let next_segment = reader.u32()?;
        let payload_blocks = reader.u32()?;
        let entry_bytes = reader.u32()? as usize;
        let settled = reader.u32()?;
        if settled as usize > entry_bytes {
            return malformed(format!("batch: {settled} of {entry_bytes} bytes of entries settled"));
        }
        if flags & !FLAG_CONTINUES != 0 {
            return malformed(format!("batch: flags {flags:#x}"));
        }
        let entries = reader.bytes(entry_bytes)?.to_vec();
        let continues = flags & FLAG_CONTINUES != 0;
        Ok(Self {
            store,
            epoch,
            seq,
            block: number,
            durable_seq,
            next_segment,
            payload_blocks,
            continues,
            settled,
            entries,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_damage() {
        let header = BatchHeader {
            store: 1,
            epoch: 2,
            seq: 3,
            block: 300,
            durable_seq: 2,
            next_segment: 9,
            payload_blocks: 7,
            continues: true,
            settled: 40,
            entries: vec![5; ENTRY_ROOM],
        };
        assert!(!BatchHeader::resembles(&[0; BLOCK], 1, 2, 3, 300));
        let mut block = vec![0xEE; BLOCK];
        header.encode(&mut block);
        assert_eq!(BatchHeader::decode(&block), Ok(header));
        for at in 0..BLOCK {
            let mut bad = block.clone();
            bad[at] ^= 1;
            assert!(BatchHeader::decode(&bad).is_err(), "byte {at}");
            assert!(BatchHeader::resembles(&bad, 1, 2, 3, 300), "byte {at}");
        }
        assert!(!BatchHeader::resembles(&block, 1, 7, 4, 300), "another batch of another life");
    }
}
