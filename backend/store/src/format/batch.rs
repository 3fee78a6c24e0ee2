//! Batch: unit of appending to the log.  A header block with the entries, followed by payload blocks.

use super::{BLOCK, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

const MAGIC: &[u8; 8] = b"FBLOGBAT";
const CRC_AT: usize = 8;
/// Size of the fixed header fields before the entries, in bytes.
pub const FIXED: usize = 72;
/// Space for entries in a header, in bytes.
pub const ENTRY_ROOM: usize = BLOCK - FIXED;

const FLAG_CONTINUES: u32 = 1;

/// Header of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BatchHeader {
    /// First eight bytes of the store's UUID.
    pub store: u64,
    /// Epoch of the store opening that wrote it.
    pub epoch: u64,
    /// Sequence number; consecutive.
    pub seq: u64,
    /// Block number of this header on the device.
    pub block: u64,
    /// Highest batch number known to be durable when this batch was written.
    pub durable_seq: u64,
    /// Segment in which the log continues when this one is full.
    pub next_segment: u32,
    /// Payload blocks behind the header.
    pub payload_blocks: u32,
    /// Set if the last transaction continues in the next batch, and is valid only if that batch is recovered too.
    pub continues: bool,
    /// If it continues: bytes of entries before those of that transaction, which are valid on their own.
    pub settled: u32,
    /// Encoded entries.
    pub entries: Vec<u8>,
}

impl BatchHeader {
    /// Encodes the header as one block.
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

    /// Returns whether a block holds the remains of batch `seq` there: at most one of the identifying fields differs.
    pub fn resembles(block: &[u8], store: u64, epoch: u64, seq: u64, number: u64) -> bool {
        let field = |at: usize| block.get(at..at + 8);
        let fields = [(0, *MAGIC), (16, store.to_le_bytes()), (24, epoch.to_le_bytes()), (32, seq.to_le_bytes())];
        let fields = fields.into_iter().chain([(40, number.to_le_bytes())]);
        let wrong = fields.filter(|&(at, value)| field(at) != Some(&value[..])).count();
        wrong <= 1
    }

    /// Returns store and sequence number of a damaged header, if the block has a header of block `number`.
    pub fn remains(block: &[u8], number: u64) -> Option<(u64, u64)> {
        let field = |at: usize| Some(u64::from_le_bytes(block.get(at..at + 8)?.try_into().ok()?));
        (block.starts_with(MAGIC) && field(40)? == number).then(|| Some((field(16)?, field(32)?)))?
    }

    /// Decodes a header from one block.
    pub fn decode(block: &[u8]) -> Result<Self, MalformedStore> {
        if block.len() != BLOCK || !block.starts_with(MAGIC) {
            return malformed("batch: not one");
        }
        if !is_sealed(block, CRC_AT) {
            return malformed("batch: the checksum is wrong");
        }
        let mut reader = StoreReader::new(&block[12..], "batch");
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
            let tells = !(0..8).contains(&at) && !(16..24).contains(&at) && !(32..48).contains(&at);
            assert_eq!(BatchHeader::remains(&bad, 300) == Some((1, 3)), tells, "byte {at}");
            assert_eq!(BatchHeader::remains(&bad, 9999), None, "another place");
        }
        assert!(!BatchHeader::resembles(&block, 1, 7, 4, 300), "another batch of another life");
    }
}
