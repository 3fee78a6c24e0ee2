//! Appending of compressed blobs of data, packed by sectors.

use forebay_accel::crc32c::crc32c;

use super::{BATCH_BLOCKS, StoreLog};
use crate::crypt::{BlockCipher, UsePlace};
use crate::format::BLOCK;
use crate::format::blob::{SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::StoreEntry;

impl StoreLog {
    /// Appends the stored bytes of a blob, whole sectors, behind the blobs already in the batch, encrypted with `cipher` if
    /// there is one.  Calls `entry` with the position in the payload in sectors, the number of the first sector on the
    /// device, and the checksum; `entry` returns the entry that describes the blob.
    pub fn append_data_blob(
        &self,
        stored: &[u8],
        cipher: Option<&BlockCipher>,
        entry: impl FnOnce(u32, u64, u32) -> StoreEntry,
    ) {
        debug_assert!(stored.len().is_multiple_of(SECTOR) && !stored.is_empty());
        let blocks = stored.len().div_ceil(BLOCK) as u32 + 1;
        let batch = self.batch_with(StoreEntry::BLOB_SIZE, blocks);
        let at = batch.next_blob_at(SECTOR) / SECTOR;
        let sector = batch.first_block() * SECTORS_A_BLOCK + at as u64;
        let mut crc = 0;
        let added = batch.fill_blob(stored.len(), SECTOR, &self.blob_buffers, |memory| {
            match cipher {
                None => memory.copy_from_slice(stored),
                Some(cipher) => {
                    let place = self.head.use_place(batch.first_block());
                    let place = UsePlace { at: place.at * SECTORS_A_BLOCK + at as u64, ..place };
                    cipher.seal_blob(place, stored, memory);
                }
            }
            crc = crc32c(memory);
        });
        debug_assert_eq!(added, at * SECTOR, "the blob lies where it was encrypted for");
        let before = (batch.entry_bytes(), batch.blob_bytes());
        // The callback must not append, as that would change the position given to it.
        let made = entry(at as u32, sector, crc);
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
