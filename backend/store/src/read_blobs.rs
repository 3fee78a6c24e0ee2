//! Reads of compressed blobs: those that lie behind each other are read together.

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, Error, ErrorKind, Result};

use crate::crypt::{BlockCipher, UsePlace};
use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot, SECTORS_A_BLOCK};
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::media::{Media, POOLED_BLOCKS};

/// Blocks of one blob that are read: the location of the first one, and the blob's checksum for each.
#[derive(Clone, Copy)]
pub struct BlobRun<'a> {
    pub slot: BlobSlot,
    pub crcs: &'a [u32],
}

impl BlobRun<'_> {
    fn ptr(&self) -> BlobPtr {
        self.slot.ptr(self.crcs[0])
    }

    /// Returns the first block of the device that has a part of the blob, and the one behind the last.
    fn blocks(&self) -> (u64, u64) {
        let ptr = self.ptr();
        (ptr.addr / BLOCK64, (ptr.addr + u64::from(ptr.len)).div_ceil(BLOCK64))
    }
}

/// Returns how many of the blobs, from the first one on, lie behind each other and are read together.
pub fn adjacent_blobs<'a>(mut runs: impl Iterator<Item = BlobRun<'a>>) -> usize {
    let Some(first) = runs.next() else { return 0 };
    let (start, _) = first.blocks();
    let (mut count, mut last) = (1, first.slot);
    for run in runs {
        let follows = run.slot.sector == last.sector + u64::from(last.sectors);
        if !follows || run.blocks().1 - start > POOLED_BLOCKS as u64 {
            break;
        }
        (count, last) = (count + 1, run.slot);
    }
    count
}

impl Media {
    /// Reads and verifies blocks of blobs that lie behind each other: in one read of the device, and with one decompression of
    /// each blob. `what` describes each in error texts.
    pub async fn read_blobs(
        &self,
        runs: &[BlobRun<'_>],
        cipher: Option<&BlockCipher>,
        what: impl Fn(usize) -> String,
    ) -> Result<Vec<BufList>> {
        let together = self.read_together(runs).await;
        let mut out = Vec::with_capacity(runs.len());
        for (i, run) in runs.iter().enumerate() {
            let stored = together.as_ref().map(|(start, bytes)| {
                let from = (run.ptr().addr - start) as usize;
                bytes.slice(from..from + run.ptr().len as usize)
            });
            out.push(match stored.filter(|stored| crc32c(stored) == run.crcs[0]) {
                Some(stored) => self.expand_run(run, &self.opened(run, stored, cipher).await?, || what(i))?,
                // Alone, a damaged one is counted and reconstructed.
                None => self.read_from_blob(*run, cipher, || what(i)).await?,
            });
        }
        Ok(out)
    }

    /// Reads the stored bytes of several blobs and does not verify them; also returns their byte address. Returns `None` if
    /// they are better read one by one: there is only one, or one is in memory, or they cannot be read.
    async fn read_together(&self, runs: &[BlobRun<'_>]) -> Option<(u64, Buf)> {
        let [first, .., last] = runs else { return None };
        let is_stored = |run: &BlobRun<'_>| {
            self.segments.borrow().geometry.contains_blob(run.ptr())
                && !self.is_pending(run.ptr())
                && self.cache.missing(run.slot.location(), run.crcs) > 0
        };
        if !runs.iter().all(is_stored) {
            return None;
        }
        let (start, end) = (first.blocks().0, last.blocks().1);
        let _pin = self.pin(first.ptr().addr);
        let read = self.read_raw(start * BLOCK64, ((end - start) * BLOCK64) as usize).await;
        Some((start * BLOCK64, read.ok()?.freeze()))
    }

    /// Reads and verifies blocks of a blob: in one read of the device, and with one decompression.
    pub async fn read_from_blob(
        &self,
        run: BlobRun<'_>,
        cipher: Option<&BlockCipher>,
        what: impl Fn() -> String,
    ) -> Result<BufList> {
        let mut cached = BufList::new();
        if self.cache.take_front(run.slot.location(), run.crcs, &mut cached) == run.crcs.len() {
            return Ok(cached);
        }
        let _pin = self.pin(run.ptr().addr);
        match self.read_stored_blob(run.ptr(), "a compressed blob").await {
            Ok(stored) => self.expand_run(&run, &self.opened(&run, stored, cipher).await?, what),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                Err(self.damaged_blob(run.ptr(), "checksum mismatch", what))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the verified bytes of the blob of a run decrypted, if there is a cipher.
    async fn opened(&self, run: &BlobRun<'_>, stored: Buf, cipher: Option<&BlockCipher>) -> Result<Buf> {
        let Some(cipher) = cipher else { return Ok(stored) };
        let place = self.blob_place(run.slot).await?;
        let mut opened = self.buffer(stored.len().div_ceil(BLOCK));
        opened.set_len(stored.len());
        cipher.open_blob_to(place, &stored, &mut opened);
        Ok(opened.freeze())
    }

    /// Decrypts the stored bytes of a blob, whose segment is pinned or has live data.
    ///
    /// # Errors
    /// See [`use_place`](Self::use_place).
    pub async fn open_blob(&self, slot: BlobSlot, cipher: &BlockCipher, stored: &mut [u8]) -> Result<()> {
        cipher.open_blob(self.blob_place(slot).await?, stored);
        Ok(())
    }

    /// Returns the place of a blob, in sectors, within the current use of its segment.
    async fn blob_place(&self, slot: BlobSlot) -> Result<UsePlace> {
        let block = self.use_place(slot.sector / SECTORS_A_BLOCK).await?;
        Ok(UsePlace { at: block.at * SECTORS_A_BLOCK + slot.sector % SECTORS_A_BLOCK, ..block })
    }

    /// Expands the blocks of a run from the verified bytes of its blob.
    fn expand_run(&self, run: &BlobRun<'_>, stored: &[u8], what: impl Fn() -> String) -> Result<BufList> {
        let from = usize::from(run.slot.index);
        // All that was expanded enters the cache, so that neighbours that are read next are found there.
        let note = |expanded: &[u8]| {
            let all = [run.crcs[0]; BLOB_BLOCKS_MAX as usize];
            self.cache.put(run.slot.at(0).location(), &all[..expanded.len() / BLOCK], std::iter::once(expanded));
        };
        let buffer = |count| self.buffer(count);
        let blocks = self.codecs.expand_blocks(stored, from..from + run.crcs.len(), buffer, note);
        Ok(blocks.map_err(|why| self.damaged_blob(run.ptr(), &why, what))?.into())
    }

    fn damaged_blob(&self, ptr: BlobPtr, why: &str, what: impl Fn() -> String) -> Error {
        let path = self.device.name();
        let text = format!("{}, compressed in {} bytes at byte {} of {path}: {why}", what(), ptr.len, ptr.addr);
        tracing::error!("{text}");
        Error::new(ErrorKind::Corrupt, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_behind_each_other_are_read_together_up_to_a_limit() {
        let slot = |sector, sectors, index| BlobSlot { sector, sectors, index };
        let count = |slots: &[BlobSlot]| adjacent_blobs(slots.iter().map(|&slot| BlobRun { slot, crcs: &[7] }));
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[slot(100, 3, 0)]), 1);
        assert_eq!(count(&[slot(100, 3, 5), slot(103, 9, 0), slot(112, 1, 2)]), 3);
        // A gap, an earlier one, the same one again.
        assert_eq!(count(&[slot(100, 3, 0), slot(104, 9, 0)]), 1);
        assert_eq!(count(&[slot(100, 3, 0), slot(103, 9, 0), slot(100, 3, 1)]), 2);
        let row: Vec<_> = (0..20).map(|i| slot(801 + 200 * i, 200, 0)).collect();
        // 64 blocks: from block 100 to the end of sector 1311.
        assert_eq!(count(&row), 2);
    }
}
