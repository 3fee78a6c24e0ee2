//! Uses of segments: which one a segment is in, so that the places of encrypted data are never the same twice.

use std::collections::BTreeSet;

use forebay_block::{ErrorKind, Result};

use crate::core::{Core, corrupt};
use crate::format::anchor::Anchor;
use crate::keys;
use crate::rebuild::bad_sectors::is_of_bad_sector;

/// Uses of segments. A use begins when the log enters the segment, and its number is that of the first batch, which no
/// other use has.
#[derive(Debug, Default)]
pub struct SegmentUses {
    /// Current use by segment; 0 where it is not known.
    current: Vec<u64>,
    /// Segments whose use the tree does not have yet.
    unsaved: BTreeSet<u32>,
}

impl SegmentUses {
    /// Records that the log has entered a segment with batch `seq`.
    pub fn begin(&mut self, segment: u32, seq: u64) {
        *self.entry(segment) = seq;
        self.unsaved.insert(segment);
    }

    /// Records the use of a segment that the tree has, unless a newer one is known.
    pub fn load(&mut self, segment: u32, seq: u64) {
        let entry = self.entry(segment);
        if *entry == 0 {
            *entry = seq;
        }
    }

    fn entry(&mut self, segment: u32) -> &mut u64 {
        let at = segment as usize;
        if at >= self.current.len() {
            self.current.resize(at + 1, 0);
        }
        &mut self.current[at]
    }

    /// Returns the number of the current use of a segment, if it is known.
    pub fn of(&self, segment: u32) -> Option<u64> {
        self.current.get(segment as usize).copied().filter(|&seq| seq > 0)
    }

    /// Forgets the segments from number `count` on, which the store does not have any more.
    pub fn forget_from(&mut self, count: u32) {
        self.current.truncate(count as usize);
        self.unsaved.retain(|&segment| segment < count);
    }

    /// Takes the uses that the tree does not have yet.
    pub fn take_unsaved(&mut self) -> Vec<(u32, u64)> {
        let unsaved = std::mem::take(&mut self.unsaved);
        unsaved.into_iter().map(|segment| (segment, self.current[segment as usize])).collect()
    }
}

/// Upper bound of the batches in flight at a crash. Where they are encrypted, the next opening skips as many numbers, since
/// it may not find them, and the number of a use must not have been one before.
const IN_FLIGHT_MAX: u64 = 1 << 20;

/// Uses read at a time.
const USES_PAGE: usize = 1024;

impl Core {
    /// Returns the batch numbers to be skipped because of batches that a crash may have left behind the end of the log.
    pub fn batches_in_flight_at_crash(&self, anchor: &Anchor) -> u64 {
        if self.features.has_encryption() && !anchor.clean { IN_FLIGHT_MAX } else { 0 }
    }

    /// Passes the uses of segments to the checkpoint that begins.
    pub fn store_segment_uses(&self) {
        if self.features.has_encryption() {
            for (segment, seq) in self.segments.borrow_mut().uses.take_unsaved() {
                self.index.put(keys::segment_use(segment), Some(seq.to_le_bytes().into()));
            }
        }
    }

    /// Loads the uses of segments of the last checkpoint. Those that are in damaged nodes of the tree are found in the
    /// segments when they are needed.
    pub async fn load_segment_uses(&self) -> Result<()> {
        if !self.features.has_encryption() {
            return Ok(());
        }
        match self.try_load_segment_uses().await {
            Err(error) if error.kind() == ErrorKind::Corrupt || is_of_bad_sector(&error) => {
                tracing::error!(%error, "cannot read all uses of segments");
                Ok(())
            }
            done => done,
        }
    }

    async fn try_load_segment_uses(&self) -> Result<()> {
        let (mut from, to) = (vec![b'u'], keys::after(b"u"));
        loop {
            let page = self.index.lookup_range(&from, &to, USES_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            from.clone_from(last);
            from.push(0);
            for (key, value) in page {
                let damaged = || corrupt("the use of a segment");
                let segment = key.get(1..).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
                let seq = value.try_into().ok().map(u64::from_le_bytes).filter(|&seq| seq > 0);
                let mut segments = self.segments.borrow_mut();
                let (segment, seq) = (segment.ok_or_else(damaged)?, seq.ok_or_else(damaged)?);
                // A store that has shrunk had more.
                if segment < segments.geometry.segment_count {
                    segments.uses.load(segment, seq);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_use_counts_and_is_saved_once() {
        let mut uses = SegmentUses::default();
        uses.begin(3, 70);
        uses.load(3, 9);
        uses.load(4, 10);
        assert_eq!((uses.of(3), uses.of(4), uses.of(5)), (Some(70), Some(10), None));
        assert_eq!(uses.take_unsaved(), [(3, 70)]);
        assert_eq!(uses.take_unsaved(), []);
        uses.begin(4, 80);
        assert_eq!((uses.of(4), uses.take_unsaved()), (Some(80), vec![(4, 80)]));
    }
}
