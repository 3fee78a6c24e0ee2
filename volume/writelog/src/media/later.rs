//! Search for append blocks past the end that recovery found. A block that records a missing block as durable proves
//! that the log is damaged there, and does not merely end.

use forebay_block::{Error, Result};
use forebay_reactor::yield_now;

use super::storage::BlockStorage;
use crate::format::{AREA_AT, BlockHeader, ENTRY_LEN, LogSuperblock};

/// Bytes past the end of a log that are always searched: long enough to contain the start of the block after a
/// damaged one, even after several blocks of maximum length.
pub(crate) const WINDOW: u64 = 4 << 20;
/// Bytes read at a time.
const STEP: u64 = 1 << 20;

/// Ring of append blocks of one log.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    pub(crate) storage: &'a BlockStorage,
    /// Byte offset of the log in it.
    pub(crate) base: u64,
    /// Unit in bytes.
    pub(crate) unit: u32,
    /// Length of the ring in units.
    pub(crate) units: u64,
    pub(crate) tag: u32,
    /// Superblock, which says which blocks another primary has left over.
    pub(crate) superblock: &'a LogSuperblock,
}

impl Ring<'_> {
    /// Returns the highest number before which all blocks were durable, as recorded by a valid block among the
    /// `units` units from position `pos` on; 0 if there is none.
    pub(crate) async fn durable_before(&self, pos: u64, units: u64) -> Result<u64> {
        let (mut at, end) = (pos, pos + units.min(self.units));
        let mut durable = 0;
        while at < end {
            let start = at % self.units;
            let count = (end - at).min(self.units - start).min(STEP / u64::from(self.unit));
            let bytes = self.read(start, count).await?;
            for (place, head) in (start..).zip(bytes.chunks_exact(self.unit as usize)) {
                let Some(header) = BlockHeader::peek(head, self.tag, self.unit) else { continue };
                let here = header.pos % self.units == place && self.superblock.believes(header.run, header.number);
                if here && header.durable_before() > durable && self.is_valid(place, &header, head).await? {
                    durable = header.durable_before();
                }
            }
            at += count;
            yield_now().await;
        }
        Ok(durable)
    }

    async fn is_valid(&self, place: u64, header: &BlockHeader, head: &[u8]) -> Result<bool> {
        let units = u64::from(header.head_units(self.unit));
        if place + units > self.units {
            return Ok(false);
        }
        if units == 1 {
            return Ok(header.entries(head, self.tag, self.unit, self.units).is_ok());
        }
        debug_assert!(header.head_len() > ENTRY_LEN);
        let head = self.read(place, units).await?;
        Ok(header.entries(&head, self.tag, self.unit, self.units).is_ok())
    }

    async fn read(&self, place: u64, units: u64) -> Result<Vec<u8>> {
        let unit = u64::from(self.unit);
        let (at, len) = (self.base + AREA_AT + place * unit, (units * unit) as usize);
        let read = self.storage.read_exact_at(at, len).await;
        Ok(read.map_err(|error| Error::from_io(error, "the write log: searching for later blocks"))?.to_vec())
    }
}
