//! Cipher of the blocks of one volume: AES-256-XTS, with tweaks bound to the place and to the use of its segment.

use forebay_accel::crypto::{SectorNumber, SectorSize, Xts};

use super::master::{SECRET_LEN, derive};
use crate::format::BLOCK;

/// Bit of a tweak's lower half that tells plain blocks from blobs.
const PLAIN_BIT: u64 = 1 << 63;

/// Place of data within a use of a segment. Each is written once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UsePlace {
    /// Number of the first batch that was written to the segment when it was used the last time.
    pub segment_use: u64,
    /// Block of the segment for blocks, sector of the segment for blobs.
    pub at: u64,
}

impl UsePlace {
    /// Returns the place that many blocks or sectors further.
    pub fn after(self, count: usize) -> Self {
        Self { at: self.at + count as u64, ..self }
    }
}

/// Cipher of the data of one volume.
///
/// # Invariants
/// 1. A use of a segment writes each of its blocks once, and each sector is part of a block or of a blob: so no tweak is
///    used for two contents.
pub struct BlockCipher {
    xts: Xts,
}

impl BlockCipher {
    /// Makes the cipher of a volume's secret.
    pub fn new(secret: &[u8; SECRET_LEN]) -> Self {
        let mut key = [0; 64];
        derive(&[], secret, b"forebay data", &mut key);
        // Equal halves would come with a probability of 2^-256.
        let xts = Xts::new(&key).expect("64 bytes with different halves");
        zeroize::Zeroize::zeroize(&mut key);
        Self { xts }
    }

    /// Encrypts whole blocks from one place in memory to another of the same length.
    pub fn seal_blocks(&self, place: UsePlace, plain: &[u8], sealed: &mut [u8]) {
        debug_assert!(plain.len().is_multiple_of(BLOCK));
        #[cfg(test)]
        recorder::note(block_number(place), plain, BLOCK);
        self.xts.encrypt(SectorSize::Bytes4096, block_number(place), plain, sealed);
    }

    /// Decrypts whole blocks in place.
    pub fn open_blocks(&self, place: UsePlace, blocks: &mut [u8]) {
        self.xts.decrypt_in_place(SectorSize::Bytes4096, block_number(place), blocks);
    }

    /// Encrypts the bytes of a blob to where they are stored, of the same length.
    pub fn seal_blob(&self, place: UsePlace, plain: &[u8], sealed: &mut [u8]) {
        #[cfg(test)]
        recorder::note(blob_number(place), plain, 512);
        self.xts.encrypt(SectorSize::Bytes512, blob_number(place), plain, sealed);
    }

    /// Decrypts the stored bytes of a blob in place.
    pub fn open_blob(&self, place: UsePlace, stored: &mut [u8]) {
        self.xts.decrypt_in_place(SectorSize::Bytes512, blob_number(place), stored);
    }

    /// Decrypts the stored bytes of a blob to other memory of the same length.
    pub fn open_blob_to(&self, place: UsePlace, stored: &[u8], plain: &mut [u8]) {
        self.xts.decrypt(SectorSize::Bytes512, blob_number(place), stored, plain);
    }
}

fn block_number(place: UsePlace) -> SectorNumber {
    SectorNumber { low: place.at | PLAIN_BIT, high: place.segment_use }
}

fn blob_number(place: UsePlace) -> SectorNumber {
    SectorNumber { low: place.at, high: place.segment_use }
}

/// Recorder of what is encrypted under which tweak, for tests.
#[cfg(test)]
pub(crate) mod recorder {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use super::SectorNumber;

    thread_local! {
        static SEEN: RefCell<Option<HashMap<SectorNumber, u32>>> = const { RefCell::new(None) };
    }

    /// Starts to record, on this thread.
    pub fn start() {
        SEEN.set(Some(HashMap::new()));
    }

    /// Returns the number of tweaks that were used since [`start`].
    pub fn stop() -> usize {
        SEEN.take().map_or(0, |seen| seen.len())
    }

    pub(super) fn note(first: SectorNumber, plain: &[u8], size: usize) {
        SEEN.with_borrow_mut(|seen| {
            let Some(seen) = seen else { return };
            for (i, sector) in plain.chunks(size).enumerate() {
                let number = SectorNumber { low: first.low + i as u64, ..first };
                let crc = forebay_accel::crc32c::crc32c(sector);
                let before = *seen.entry(number).or_insert(crc);
                assert_eq!(before, crc, "two contents under the tweak {number:?}");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_bound_to_place_use_and_kind() {
        let cipher = BlockCipher::new(&[7; SECRET_LEN]);
        let plain = vec![0x5A; BLOCK];
        let at = |segment_use, at| UsePlace { segment_use, at };
        let mut sealed = Vec::new();
        for place in [at(1, 1), at(1, 2), at(2, 1)] {
            let mut block = vec![0; BLOCK];
            cipher.seal_blocks(place, &plain, &mut block);
            let mut back = block.clone();
            cipher.open_blocks(place, &mut back);
            assert_eq!(back, plain);
            let mut blob = vec![0; BLOCK];
            cipher.seal_blob(place, &plain, &mut blob);
            let mut back = vec![0; BLOCK];
            cipher.open_blob_to(place, &blob, &mut back);
            assert_eq!(back, plain);
            let mut back = blob.clone();
            cipher.open_blob(place, &mut back);
            assert_eq!(back, plain);
            sealed.extend([block, blob]);
        }
        let mut other = vec![0; BLOCK];
        BlockCipher::new(&[8; SECRET_LEN]).seal_blocks(at(1, 1), &plain, &mut other);
        sealed.push(other);
        for (i, a) in sealed.iter().enumerate() {
            // XTS encrypts 16 bytes at a time, so no two of them may be alike either.
            assert!(sealed[..i].iter().all(|b| a.chunks(16).zip(b.chunks(16)).all(|(a, b)| a != b)), "{i}");
        }
    }
}
