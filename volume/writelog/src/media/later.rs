//! A search for append blocks past the end that recovery found: one that says that a block recovery could not find was
//! durable proves that the log is damaged there, and does not merely end.

use forebay_block::{Error, Result};
use forebay_reactor::File;

use crate::format::{AREA_AT, BlockHeader, ENTRY_LEN};

/// Bytes behind the end of a log that are always searched: the block behind a damaged one begins within them, several of
/// the longest blocks included.
pub(crate) const WINDOW: u64 = 4 << 20;
/// Bytes that are read at a time.
const STEP: u64 = 1 << 20;

/// The ring of append blocks of one log.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    pub(crate) file: &'a File,
    /// Where the log begins on the file, in bytes.
    pub(crate) base: u64,
    /// Bytes of a unit.
    pub(crate) unit: u32,
    /// Units of the ring.
    pub(crate) units: u64,
    pub(crate) tag: u32,
}

impl Ring<'_> {
    /// Returns the highest number for which a valid block among the `units` from position `pos` on says that all blocks
    /// before it were durable; 0 when none says anything.
    pub(crate) async fn durable_before(&self, pos: u64, units: u64) -> Result<u64> {
        let (mut at, end) = (pos, pos + units.min(self.units));
        let mut durable = 0;
        while at < end {
            let start = at % self.units;
            let count = (end - at).min(self.units - start).min(STEP / u64::from(self.unit));
            let bytes = self.read(start, count).await?;
            for (place, head) in (start..).zip(bytes.chunks_exact(self.unit as usize)) {
                let Some(header) = BlockHeader::peek(head, self.tag, self.unit) else { continue };
                let here = header.pos % self.units == place;
                if here && header.durable_before() > durable && self.is_valid(place, &header, head).await? {
                    durable = header.durable_before();
                }
            }
            at += count;
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
        let read = self.file.read_exact_at(self.base + AREA_AT + place * unit, (units * unit) as usize).await;
        Ok(read.map_err(|error| Error::from_io(error, "the write log: searching for later blocks"))?.to_vec())
    }
}
