//! Content that says where it belongs and which write it came from, so that a wrong block is recognised as such.
//!
//! Every 512-byte sector begins with its own number and the write's version; the other words are mixed from both.

use forebay_reactor::{Buf, BufMut, is_zero};

const SECTOR: u64 = 512;
const WORDS: u64 = SECTOR / 8;
const MAGIC: u64 = 0x464f_5245_4241_5900;

fn word(sector: u64, index: u64, version: u64) -> u64 {
    match index {
        0 => sector ^ MAGIC,
        1 => version,
        _ => (version.rotate_left(32) ^ sector.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(index),
    }
}

/// The bytes that write number `version` puts at `offset`.
pub fn stamp(offset: u64, len: usize, version: u64) -> Buf {
    let mut buf = BufMut::zeroed(len);
    let mut at = 0;
    while at < len {
        let position = offset + at as u64;
        let bytes = word(position / SECTOR, position % SECTOR / 8, version).to_le_bytes();
        let skip = (position % 8) as usize;
        let take = (8 - skip).min(len - at);
        buf[at..at + take].copy_from_slice(&bytes[skip..skip + take]);
        at += take;
    }
    buf.freeze()
}

/// Returns where the bytes, which begin at a multiple of 8, have the beginning of a stamped sector, if they do.
pub fn find_stamp(bytes: &[u8]) -> Option<usize> {
    // The number of a sector is in the other bytes.
    let begins = |word: &[u8]| word[3..] == MAGIC.to_le_bytes()[3..];
    bytes.chunks_exact(8).position(begins).map(|at| 8 * at)
}

/// Describes bytes that were found at `offset` (a multiple of 512), for people.
pub fn describe(offset: u64, bytes: &[u8]) -> String {
    let mut runs: Vec<(String, u64)> = Vec::new();
    for (index, sector) in bytes.chunks(SECTOR as usize).enumerate() {
        let here = offset / SECTOR + index as u64;
        let text = describe_sector(here, sector);
        match runs.last_mut() {
            Some((last, count)) if *last == text => *count += 1,
            _ => runs.push((text, 1)),
        }
    }
    let texts: Vec<String> = runs.into_iter().map(|(text, count)| format!("{count} x {text}")).collect();
    texts.join(", ")
}

fn describe_sector(here: u64, sector: &[u8]) -> String {
    if is_zero(sector) {
        return "zeroes".to_owned();
    }
    let words: Vec<u64> =
        sector.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect();
    let [first, version, ..] = words[..] else { return "a fragment".to_owned() };
    let belongs = first ^ MAGIC;
    let right = words.iter().zip(0..WORDS).filter(|(found, index)| **found == word(belongs, *index, version)).count();
    match (right == words.len(), belongs == here) {
        (true, true) => format!("version {version}"),
        (true, false) => format!("version {version} of sector {belongs} (here is {here})"),
        (false, _) if right * 2 > words.len() => format!("version {version} of sector {belongs}, damaged or mixed"),
        (false, _) => format!("bytes of no write ({:02x?}...)", &sector[..8.min(sector.len())]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_same_as_the_part_of_the_whole() {
        let whole = stamp(0, 8192, 9);
        for (offset, len) in [(0, 1), (3, 700), (511, 2), (4096, 4096), (1000, 7000)] {
            assert!(stamp(offset, len, 9)[..] == whole[offset as usize..offset as usize + len]);
        }
    }

    #[test]
    fn blocks_are_recognised() {
        let block = stamp(4096, 4096, 9);
        assert_eq!(describe(4096, &block), "8 x version 9");
        assert_eq!(describe(4096, &[&block[..1024], &[0; 3072]].concat()), "2 x version 9, 6 x zeroes");
        assert!(describe(8192, &block[..512]).contains("version 9 of sector 8"));
        let mut damaged = block.to_vec();
        damaged[100] ^= 1;
        assert!(describe(4096, &damaged).starts_with("1 x version 9 of sector 8, damaged"));
        assert!(describe(4096, &[0xaa; 512]).contains("no write"));
    }
}
