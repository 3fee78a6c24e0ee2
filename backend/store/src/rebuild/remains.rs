//! Superblock and anchors that are still readable, and the checkpoints that a rebuild can continue from.

use std::collections::BTreeSet;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::File;

use super::walk::{StoreTrace, Walk};
use crate::core::corrupt;
use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::record::CheckpointRecord;
use crate::format::superblock::{COPIES, FEATURE_GROWN, StoreSuperblock, SuperblockError};

/// Readable superblock and anchors.
pub(super) struct Remains {
    pub(super) superblock: Option<StoreSuperblock>,
    pub(super) anchors: Vec<Anchor>,
    /// Set if none of them is missing.
    whole: bool,
}

impl Remains {
    pub(super) async fn read(walk: &Walk<'_>) -> Result<Self> {
        let mut superblock: Option<StoreSuperblock> = None;
        let path = walk.file.path().display();
        for at in COPIES {
            match StoreSuperblock::decode(&walk.read(at / BLOCK64, 1).await?) {
                Ok(found) => {
                    let both = superblock.as_ref().map_or(Some(found.clone()), |before| before.reconcile(&found));
                    let differ = || corrupt(format!("{path}: the two copies of the superblock differ"));
                    superblock = Some(both.ok_or_else(differ)?);
                }
                Err(SuperblockError::Newer(what)) => {
                    let text = format!("{path} is a store made by a newer Forebay ({what}); upgrade to rebuild it");
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                Err(_) => {}
            }
        }
        let mut slots = 0;
        let mut anchors: Vec<Anchor> = Vec::new();
        for places in SLOTS {
            let before = anchors.len();
            for at in places {
                anchors.extend(Anchor::decode_any(&walk.read(at / BLOCK64, 1).await?).ok());
            }
            slots += usize::from(anchors.len() > before);
        }
        if let Some(superblock) = &superblock {
            anchors.retain(|anchor| anchor.store == superblock.store_number());
        }
        Ok(Self { whole: superblock.is_some() && slots == SLOTS.len() && !anchors.is_empty(), superblock, anchors })
    }

    /// Returns the number of the store, if the superblock or all anchors identify it consistently.
    pub(super) fn store(&self) -> Option<u64> {
        let of_anchors: BTreeSet<u64> = self.anchors.iter().map(|anchor| anchor.store).collect();
        match (&self.superblock, of_anchors.len()) {
            (Some(superblock), _) => Some(superblock.store_number()),
            (None, 1) => of_anchors.first().copied(),
            _ => None,
        }
    }

    /// Returns the checkpoint from which the store is opened, if nothing is missing.
    pub(super) fn newest_if_whole(&self) -> Option<Candidate> {
        let superblock = self.superblock.clone().filter(|_| self.whole)?;
        let anchor = self.anchors.iter().max_by_key(|anchor| anchor.generation)?.clone();
        Some(Candidate { superblock, anchor, taken_s: 0 })
    }
}

/// Checkpoint to continue from.
pub(super) struct Candidate {
    pub(super) superblock: StoreSuperblock,
    pub(super) anchor: Anchor,
    pub(super) taken_s: u64,
}

/// Selects the store to rebuild.
pub(super) fn choose_store(file: &File, walk: &Walk<'_>, remains: &Remains) -> Result<u64> {
    if let Some(store) = remains.store() {
        return Ok(store);
    }
    let with_records: Vec<(&u64, &StoreTrace)> =
        walk.stores.iter().filter(|(_, trace)| !trace.records.is_empty()).collect();
    match with_records[..] {
        [(&store, _)] => Ok(store),
        [] => Err(no_record(file)),
        _ => {
            let describe = |(store, trace): &(&u64, &StoreTrace)| {
                let newest = trace.records.iter().map(|(record, _)| record.taken_s).max().unwrap_or(0);
                format!("store {store:016x}, last checkpoint at second {newest} of 1970")
            };
            let stores: Vec<String> = with_records.iter().map(describe).collect();
            Err(corrupt(format!(
                "{} is not rebuilt: it holds the logs of several stores made one after the other ({}), and neither \
                 superblock nor anchor says which one counts",
                file.path().display(),
                stores.join("; ")
            )))
        }
    }
}

/// Returns the checkpoints that could be continued from, newest first.
pub(super) fn candidates(
    superblock: &StoreSuperblock,
    records: &[(CheckpointRecord, u64)],
    remains: &Remains,
) -> Vec<Candidate> {
    let shape = |superblock: &StoreSuperblock| (superblock.store_number(), superblock.segment_size);
    // A store may have grown since an older checkpoint.
    let is_of = |found: &StoreSuperblock| {
        let is_older = found.segment_count < superblock.segment_count && superblock.features & FEATURE_GROWN != 0;
        shape(found) == shape(superblock) && (found.segment_count == superblock.segment_count || is_older)
    };
    let of_records = records.iter().filter(|(record, _)| is_of(&record.superblock));
    let of_records = of_records.map(|(record, _)| (record.anchor.clone(), record.taken_s));
    let of_anchors = remains.anchors.iter().filter(|anchor| anchor.store == superblock.store_number());
    let mut all: Vec<(Anchor, u64)> = of_records.chain(of_anchors.map(|anchor| (anchor.clone(), 0))).collect();
    all.sort_by_key(|(anchor, taken_s)| std::cmp::Reverse((anchor.generation, anchor.redo.seq, *taken_s)));
    all.dedup_by(|later, earlier| later.0 == earlier.0);
    all.into_iter().map(|(anchor, taken_s)| Candidate { superblock: superblock.clone(), anchor, taken_s }).collect()
}

pub(super) fn no_record(file: &File) -> Error {
    let text = "no checkpoint record can be read in its log; a store that was last written by a Forebay that made none has none";
    corrupt(format!("{} cannot be rebuilt: {text}", file.path().display()))
}
