//! Lines whose content is not what a checksum says: reconstruction from other columns, and mending.
//!
//! Which column of a line is wrong is not known from the line alone. Every choice of k columns decodes to a candidate;
//! the checksum selects one.

use forebay_block::{Buf, BufList, BufMut, Result};
use forebay_reactor::sync::join_all;

use super::geometry::LineBlock;
use super::row::encode_columns;
use super::set::ColumnSet;
use crate::format::{BLOCK, BLOCK64};

/// Maximum number of choices of columns that are decoded for a line.
const CHOICES_MAX: usize = 4096;
/// Maximum number of combinations of lines that are tried for a blob.
const COMBINATIONS_MAX: usize = 4096;

/// Content of the data columns of a line.
type LineData = Vec<Buf>;

/// Candidates for the data of a line, the stored data first.
pub struct LineCandidates {
    /// Location of the line's first block.
    first: LineBlock,
    /// Stored block of each column; `None` if it cannot be read.
    stored: Vec<Option<Buf>>,
    candidates: Vec<LineData>,
}

/// Calls `visit` with each choice of `count` of `from` items, until it returns false.
fn each_choice(from: usize, count: usize, mut visit: impl FnMut(&[usize]) -> bool) {
    let mut chosen: Vec<usize> = (0..count).collect();
    if count > from {
        return;
    }
    loop {
        if !visit(&chosen) {
            return;
        }
        let Some(at) = (0..count).rev().find(|&at| chosen[at] < from - count + at) else { return };
        chosen[at] += 1;
        for next in at + 1..count {
            chosen[next] = chosen[next - 1] + 1;
        }
    }
}

impl ColumnSet {
    /// Reads all columns of a line from devices that have them.
    async fn read_line(&self, segment: u32, line: u64) -> Vec<Option<Buf>> {
        let reads = (0..self.columns())
            .map(|column| Box::pin(self.read_stored(segment, column, line, BufMut::with_capacity(BLOCK), BLOCK)));
        join_all(reads).await.into_iter().map(|read| read.ok().map(BufMut::freeze)).collect()
    }

    /// Returns the candidates for the data of the line of a block.
    pub async fn candidates(&self, block: u64) -> LineCandidates {
        let first = self.geometry.borrow().locate(block);
        let stored = self.read_line(first.segment, first.line).await;
        let candidates = self.decode_candidates(&stored);
        LineCandidates { first: LineBlock { column: 0, ..first }, stored, candidates }
    }

    fn decode_candidates(&self, stored: &[Option<Buf>]) -> Vec<LineData> {
        let data = self.data_columns();
        let present: Vec<usize> = (0..stored.len()).filter(|&column| stored[column].is_some()).collect();
        let mut candidates: Vec<LineData> = Vec::new();
        let mut choices = 0;
        each_choice(present.len(), data, |chosen| {
            choices += 1;
            let have: Vec<(usize, &[u8])> =
                chosen.iter().map(|&i| (present[i], &stored[present[i]].as_ref().expect("present")[..])).collect();
            if let Some(line) = self.decode_line(&have, stored)
                && !candidates.iter().any(|known| known.iter().zip(&line).all(|(a, b)| a[..] == b[..]))
            {
                candidates.push(line);
            }
            choices < CHOICES_MAX
        });
        candidates
    }

    fn decode_line(&self, have: &[(usize, &[u8])], stored: &[Option<Buf>]) -> Option<LineData> {
        (0..self.data_columns())
            .map(|column| match have.iter().find(|(number, _)| *number == column) {
                Some(_) => stored[column].clone(),
                None => {
                    let mut out = BufMut::zeroed(BLOCK);
                    self.code.borrow_mut().rebuild(have, column, &mut out).then(|| out.freeze())
                }
            })
            .collect()
    }

    /// Returns the content of a block that `is_right` accepts, reconstructed from other columns of its line; writes it
    /// where it was wrong, unless the store is open read-only.
    pub async fn mend_block(&self, block: u64, is_right: impl Fn(&[u8]) -> bool) -> Option<Buf> {
        if self.parity_columns() == 0 {
            return None;
        }
        let line = self.candidates(block).await;
        let column = self.geometry.borrow().locate(block).column;
        let found = line.candidates.iter().find(|data| is_right(&data[column]))?.clone();
        let content = found[column].clone();
        self.count(|counters| counters.reconstructed_blocks += 1);
        self.mend_stored(&line, column, &content).await;
        Some(content)
    }

    /// Returns the content of a block with the highest rank, of all that its line may decode to; mends it like
    /// [`mend_block`](Self::mend_block). Content without a rank does not count.
    pub async fn best_block(&self, block: u64, rank: impl Fn(&[u8]) -> Option<u64>) -> Option<Buf> {
        let line = self.candidates(block).await;
        let column = self.geometry.borrow().locate(block).column;
        let ranked = line.candidates.iter().filter_map(|data| Some((rank(&data[column])?, &data[column])));
        let content = ranked.max_by_key(|(rank, _)| *rank)?.1.clone();
        self.mend_stored(&line, column, &content).await;
        Some(content)
    }

    /// Returns bytes `range` of consecutive blocks that `is_right` accepts, reconstructed from other columns of their lines,
    /// which are decoded independently of each other; mends these bytes like [`mend_block`](Self::mend_block). Other bytes
    /// of the blocks stay as they are: they have checksums of their own, and their best source may be another one.
    pub async fn mend_range(
        &self,
        block: u64,
        range: std::ops::Range<usize>,
        is_right: impl Fn(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        if self.parity_columns() == 0 {
            return None;
        }
        let (data, count) = (self.data_columns() as u64, range.end.div_ceil(BLOCK) as u64);
        let mut lines = Vec::new();
        let mut at = block;
        while at < block + count {
            let line = self.candidates(at).await;
            let column = self.geometry.borrow().locate(at).column as u64;
            let blocks = (data - column).min(block + count - at);
            lines.push((line, column as usize..(column + blocks) as usize));
            at += blocks;
        }
        let mut chosen = vec![0; lines.len()];
        for _ in 0..COMBINATIONS_MAX {
            if lines.iter().any(|(line, _)| line.candidates.is_empty()) {
                return None;
            }
            let mut bytes = Vec::with_capacity(count as usize * BLOCK);
            for ((line, columns), &choice) in lines.iter().zip(&chosen) {
                line.candidates[choice][columns.clone()].iter().for_each(|block| bytes.extend_from_slice(block));
            }
            if is_right(&bytes[range.clone()]) {
                self.count(|counters| counters.reconstructed_blocks += 1);
                self.mend_parts(&lines, &bytes, &range).await;
                return Some(bytes[range].to_vec());
            }
            // The next combination, as a counter whose digits have the lines' numbers of candidates.
            let next = (0..chosen.len()).find(|&i| chosen[i] + 1 < lines[i].0.candidates.len())?;
            chosen[..next].fill(0);
            chosen[next] += 1;
        }
        None
    }

    /// Writes `range` of blocks, whose right content is in `bytes`, into the stored blocks.
    async fn mend_parts(
        &self,
        lines: &[(LineCandidates, std::ops::Range<usize>)],
        bytes: &[u8],
        range: &std::ops::Range<usize>,
    ) {
        let mut start = 0;
        for (line, columns) in lines {
            for column in columns.clone() {
                let mut content = bytes[start..start + BLOCK].to_vec();
                if let Some(stored) = &line.stored[column] {
                    let part = range.start.max(start)..range.end.min(start + BLOCK);
                    let right = content[part.start - start..part.end - start].to_vec();
                    content.copy_from_slice(stored);
                    content[part.start - start..part.end - start].copy_from_slice(&right);
                }
                self.mend_stored(line, column, &Buf::copy_of(&content)).await;
                start += BLOCK;
            }
        }
    }

    /// Writes a column's block where it is stored with other content, or cannot be read.
    async fn mend_stored(&self, line: &LineCandidates, column: usize, content: &Buf) {
        let LineBlock { segment, line: number, .. } = line.first;
        let _use = self.place_uses.begin();
        let (at, device) = self.column(segment, column);
        let differs = line.stored[column].as_ref().is_none_or(|stored| stored[..] != content[..]);
        if !differs || !device.is_readable(segment) {
            return;
        }
        device.count_wrong_block();
        let offset = at.line(number);
        if self.read_only {
            tracing::warn!("the block at byte {offset} of {} is wrong; it was reconstructed", device.describe());
            return;
        }
        match device.write(content.clone().into(), offset).await {
            Ok(()) => {
                self.count(|counters| counters.mended_blocks += 1);
                tracing::warn!("the block at byte {offset} of {} was wrong, and was mended", device.describe());
            }
            Err(error) => {
                tracing::error!(%error, "cannot mend the block at byte {offset} of {}", device.describe());
            }
        }
    }

    /// Brings lines to the content of `blocks`, which were verified: columns that differ are written again, data and
    /// parity.  Returns the number of blocks written.
    ///
    /// # Errors
    /// Errors of a device that is written to.
    pub async fn settle(&self, block: u64, blocks: &BufList) -> Result<u64> {
        let first = self.geometry.borrow().locate(block);
        debug_assert_eq!(first.column, 0, "lines are settled as a whole");
        let columns = encode_columns(self, blocks);
        let mut written = 0;
        for (column, expected) in columns.into_iter().enumerate() {
            let _use = self.place_uses.begin();
            let (at, device) = self.column(first.segment, column);
            if !device.is_readable(first.segment) {
                continue;
            }
            let len = expected.len();
            let read = self.read_stored(first.segment, column, first.line, BufMut::with_capacity(len), len).await;
            let expected = expected.into_contiguous();
            let stored = read.ok();
            for line in 0..len / BLOCK {
                let range = line * BLOCK..(line + 1) * BLOCK;
                if stored.as_ref().is_some_and(|stored| stored[range.clone()] == expected[range.clone()]) {
                    continue;
                }
                let offset = at.line(first.line) + line as u64 * BLOCK64;
                if let Err(error) = device.write(expected.slice(range).into(), offset).await {
                    self.drop_device(device.number, &format!("writing byte {offset} of it fails: {error}")).await?;
                    break;
                }
                written += 1;
            }
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_visited_once() {
        let mut seen = Vec::new();
        each_choice(4, 2, |chosen| {
            seen.push(chosen.to_vec());
            true
        });
        assert_eq!(seen, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        let mut count = 0;
        each_choice(7, 5, |_| {
            count += 1;
            count < 100
        });
        assert_eq!(count, 21);
        each_choice(2, 3, |_| panic!("there is none"));
        let mut first = Vec::new();
        each_choice(3, 3, |chosen| {
            first = chosen.to_vec();
            true
        });
        assert_eq!(first, [0, 1, 2]);
    }
}
