//! Appending of compressed blobs of data, packed by sectors.

use super::{BATCH_BLOCKS, StoreLog};
use crate::format::BLOCK;
use crate::format::blob::{SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::StoreEntry;

impl StoreLog {
    /// Appends the stored bytes of a blob, whole sectors, behind the blobs already in the batch.  Calls `entry` with the
    /// position in the payload in sectors, and the number of the first sector on the device; `entry` returns the entry that
    /// describes the blob.
    pub fn append_data_blob(&self, stored: &[u8], entry: impl FnOnce(u32, u64) -> StoreEntry) {
        debug_assert!(stored.len().is_multiple_of(SECTOR) && !stored.is_empty());
        let blocks = stored.len().div_ceil(BLOCK) as u32 + 1;
        let batch = self.batch_with(StoreEntry::BLOB_SIZE, blocks);
        let at = (batch.add_aligned_blob(stored, SECTOR) / SECTOR) as u32;
        let before = (batch.entry_bytes(), batch.blob_bytes());
        // The callback must not append, as that would change the position given to it.
        let made = entry(at, batch.first_block() * SECTORS_A_BLOCK + u64::from(at));
        assert!(
            before == (batch.entry_bytes(), batch.blob_bytes()),
            "the callback that describes an appended blob appended to the log"
        );
        self.add_entry(&batch, &made);
        if batch.blob_bytes() >= BATCH_BLOCKS as usize * BLOCK {
            self.pad_blobs(&batch);
        }
    }
}
