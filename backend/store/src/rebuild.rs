//! Rebuilding of a store whose superblocks or anchors are lost, by scanning the log for the newest checkpoint record.
//!
//! Writes only after the scan has completed, the checkpoint found has been opened and checked, and the losses are
//! known.  `docs/design/store.md` has the argument why the selected record is the newest.

pub(crate) mod bad_sectors;
mod remains;
mod walk;

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, sleep};

use crate::check::{CheckOptions, CheckReport};
use crate::device::StoreDevice;
use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::batch::BatchHeader;
use crate::format::superblock::{COPIES, StoreSuperblock};
use crate::log::WRITES_MAX;
use crate::occupant;
use crate::segments::SegmentGeometry;
use crate::store::{StartingPoint, Store, StoreOptions, open_file, reject_truncated};
use bad_sectors::{READ_ATTEMPTS, READ_PAUSE, is_of_bad_sector};
use remains::{Candidate, Remains, candidates, choose_store, no_record};
use walk::{StoreTrace, Walk};

/// Maximum number of damaged headers reported individually.
const NAMED_MAX: usize = 8;

/// Checkpoint record that a walk of the log found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordFound {
    /// First eight bytes of the identity of the store it belongs to.
    pub store: u64,
    /// Number of the checkpoint.
    pub generation: u64,
    /// Time of the checkpoint: seconds since 1970.
    pub taken_s: u64,
    /// Byte address of the batch that holds it.
    pub at: u64,
}

/// Result of a rebuild: the state found and the actions taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// First eight bytes of the store's UUID.
    pub store: u64,
    /// Segment size in bytes.
    pub segment_size: u64,
    /// Number of segments.
    pub segments: u32,
    /// Readable batches of the store.
    pub batches: u64,
    /// Lowest and highest batch number.
    pub sequence: (u64, u64),
    /// Batches of other stores that previously used the file or device.
    pub batches_of_others: u64,
    /// Checkpoint records of the store, newest first.
    pub records: Vec<RecordFound>,
    /// Number of the checkpoint from which the store continues.
    pub generation: u64,
    /// Time of that checkpoint: seconds since 1970; 0 if it is known from an anchor only.
    pub taken_s: u64,
    /// Batches replayed after that checkpoint.
    pub replayed: u64,
    /// Number of the next batch: batches with this number or a later one were not recovered.
    pub next_seq: u64,
    /// Objects in the rebuilt store.
    pub objects: u64,
    /// Descriptions of lost data.
    pub lost: Vec<String>,
    /// Descriptions of unproven losses: either a normal effect of a crash, or lost data.
    pub unproven: Vec<String>,
    /// Set if superblocks and anchors were written.
    pub written: bool,
}

/// Rebuilds superblocks and anchors of the store at `path` from its log.  Returns `None` if they are all present and
/// the newest checkpoint can be opened.
///
/// With `give_up`, the store is rebuilt even if data is lost by it. Without, the store is left unchanged in that case,
/// and the report describes the loss.
///
/// # Errors
/// When the path holds something else, when the log has no checkpoint record, or when the device fails.
pub(crate) async fn rebuild(
    path: &Path,
    give_up: bool,
    data: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<Option<RebuildReport>> {
    let file = open_file(path, OpenOptions::read_write().direct().lock()).await?;
    let mut walk = Walk::new(&file);
    let remains = Remains::read(&walk).await?;
    if let Some(newest) = remains.newest_if_whole()
        && open_to_read(&file, &newest).await?.is_ok()
    {
        return Ok(None);
    }
    refuse_foreign(&file, remains.superblock.as_ref()).await?;
    match &remains.superblock {
        Some(superblock) => reject_truncated(&file, superblock)?,
        None => walk.search(remains.store()).await?,
    }
    let geometry = match (&remains.superblock, walk.first_record(remains.store())) {
        (Some(superblock), _) => SegmentGeometry::of(superblock),
        (None, Some(record)) => SegmentGeometry::of(&record.superblock),
        (None, None) => return Err(no_record(&file)),
    };
    let mut walk = Walk::new(&file);
    walk.segments(&geometry, &mut progress).await?;
    let store = choose_store(&file, &walk, &remains)?;
    let newest = |walk: &Walk<'_>| {
        let mut records = walk.stores.get(&store).map(|trace| trace.records.clone()).unwrap_or_default();
        records.sort_by_key(|(record, at)| (record.anchor.generation, record.anchor.redo.seq, *at));
        records.reverse();
        records
    };
    let superblock = match (&remains.superblock, newest(&walk).first()) {
        (Some(superblock), _) => superblock.clone(),
        (None, Some((record, _))) => record.superblock.clone(),
        (None, None) => return Err(no_record(&file)),
    };
    reject_truncated(&file, &superblock)?;
    let geometry = SegmentGeometry::of(&superblock);
    let records = newest(&walk);
    let others = walk.stores.iter().filter(|(number, _)| **number != store).map(|(_, trace)| trace.batches).sum();
    let trace = walk.stores.remove(&store).unwrap_or_default();
    let unreadable = walk.unreadable.take();
    let mut report = RebuildReport {
        store,
        segment_size: geometry.segment_size,
        segments: geometry.segment_count,
        batches: trace.batches,
        sequence: trace.sequence.unwrap_or_default(),
        batches_of_others: others,
        records: records
            .iter()
            .map(|(record, at)| RecordFound {
                store,
                generation: record.anchor.generation,
                taken_s: record.taken_s,
                at: *at,
            })
            .collect(),
        ..RebuildReport::default()
    };
    let candidates = candidates(&superblock, &records, &remains);
    if candidates.is_empty() {
        return Err(no_record(&file));
    }
    let (candidate, opened) = open_newest(&file, candidates, &mut report).await?;
    report.generation = candidate.anchor.generation;
    report.taken_s = candidate.taken_s;
    report.replayed = opened.stats().replay.batches;
    report.next_seq = opened.stats().replay.next_seq;
    if remains.store().is_none() && others > 0 {
        report.lost.push(format!(
            "{others} batches in the log are of other stores, and neither superblock nor anchor says that this one is the newest"
        ));
    }
    find_losses(&trace, &candidate.anchor, &mut report);
    if let (Some(first), Some(last)) = (unreadable.first(), unreadable.last()) {
        report.lost.push(format!(
            "{} blocks cannot be read, from byte {} to byte {}: they may hold newer batches",
            unreadable.len(),
            first * BLOCK64,
            (last + 1) * BLOCK64 - 1
        ));
    }
    let mut checked = CheckReport::default();
    let options = CheckOptions { data, ..CheckOptions::default() };
    opened.check_structures(&options, &mut checked, &mut |_, _| {}).await?;
    report.objects = checked.objects;
    report.lost.extend(checked.findings.into_iter().map(|finding| format!("{}: {}", finding.place, finding.problem)));
    drop(opened);
    if report.lost.is_empty() || give_up {
        let given_up = !report.lost.is_empty();
        if !given_up {
            write_anchor(&file, &candidate.anchor).await?;
            write_superblocks(&file, &remains, &candidate.superblock).await?;
        }
        let from = StartingPoint { anchor: candidate.anchor, anchor_lost: false, given_up };
        let options = StoreOptions { roll_back: true, without_master_key: true, ..StoreOptions::default() };
        // Opening takes a checkpoint, and closing takes another one in the other slot.  If data is discarded, the
        // anchor of the first one is decisive: its number is above all discarded ones, and it needs no replay.
        let store =
            Store::open_at(StoreDevice::Single(file.clone()), candidate.superblock.clone(), from, options).await?;
        store.close().await?;
        if given_up {
            write_superblocks(&file, &remains, &candidate.superblock).await?;
        }
        report.written = true;
    }
    Ok(Some(report))
}

/// Rejects a file or device that has the signature of another format.
///
/// If a superblock gives the size of the store, everything within it is the store's own, whatever it resembles: an
/// object may hold the last sectors of a partitioned disk.
async fn refuse_foreign(file: &File, superblock: Option<&StoreSuperblock>) -> Result<()> {
    let found = occupant::signatures_beside(file, superblock.map_or(0, StoreSuperblock::device_size)).await;
    if found.is_empty() {
        return Ok(());
    }
    let path = file.path().display();
    let text = format!("{path} is not rebuilt: it holds {}, so it belongs to something else now", found.join(", "));
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Opens the newest usable checkpoint, read-only.
async fn open_newest(
    file: &File,
    candidates: Vec<Candidate>,
    report: &mut RebuildReport,
) -> Result<(Candidate, Rc<Store>)> {
    let mut last = None;
    for candidate in candidates {
        let generation = candidate.anchor.generation;
        if is_superseded(file, &candidate).await? {
            let why = "another opening of the store has written over its log since";
            report.lost.push(format!("checkpoint {generation} is passed over: {why}"));
            continue;
        }
        match open_to_read(file, &candidate).await? {
            Ok(store) => {
                report.lost.extend(store.lost.as_ref().map(|(place, lost)| format!("{place}: {lost}")));
                return Ok((candidate, store));
            }
            Err(error) => {
                report.lost.push(format!("checkpoint {generation} cannot be used: {error}"));
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or_else(|| no_record(file)))
}

/// Opens the store from a checkpoint, read-only. The inner error means that the checkpoint is damaged or has a bad
/// sector.
///
/// # Errors
/// Errors of the device that are no evidence against the checkpoint; a later attempt may succeed.
async fn open_to_read(file: &File, candidate: &Candidate) -> Result<Result<Rc<Store>>> {
    let mut attempt = 1;
    loop {
        // The scan itself detects newer checkpoints.
        let from = StartingPoint { anchor: candidate.anchor.clone(), anchor_lost: false, given_up: false };
        let options = StoreOptions { read_only: true, roll_back: true, data_cache: 0, ..StoreOptions::default() };
        let device = StoreDevice::Single(file.clone());
        match Store::open_at(device, candidate.superblock.clone(), from, options).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(Err(error)),
            Err(error) if !is_of_bad_sector(&error) => return Err(error),
            Err(error) if attempt == READ_ATTEMPTS => return Ok(Err(error)),
            Err(_) => sleep(READ_PAUSE).await,
            Ok(store) => return Ok(Ok(store)),
        }
        attempt += 1;
    }
}

/// Returns whether the log after a checkpoint was overwritten from its beginning by another opening, which started at
/// the same position as the opening that took this checkpoint. In that case the checkpoint never became valid.
async fn is_superseded(file: &File, candidate: &Candidate) -> Result<bool> {
    let (anchor, geometry) = (&candidate.anchor, SegmentGeometry::of(&candidate.superblock));
    let begins_segment = geometry.segment_of(anchor.redo.block).map(|segment| geometry.first_block(segment));
    if anchor.clean || begins_segment != Some(anchor.redo.block) {
        return Ok(false);
    }
    let walk = Walk::new(file);
    let found = BatchHeader::decode(&walk.read(anchor.redo.block, 1).await?);
    Ok(found.is_ok_and(|header| {
        let here = header.store == anchor.store && header.block == anchor.redo.block;
        here && header.epoch != anchor.epoch && header.seq >= anchor.redo.seq
    }))
}

/// Finds evidence of durable data that was not recovered.
fn find_losses(trace: &StoreTrace, anchor: &Anchor, report: &mut RebuildReport) {
    let next_seq = report.next_seq;
    // An opening with an older checkpoint came earlier. Batches behind the end of its log were never durable, or were
    // discarded by a roll-back.
    let older: BTreeSet<u64> = trace
        .records
        .iter()
        .filter(|(record, _)| record.anchor.generation < anchor.generation && record.anchor.epoch != anchor.epoch)
        .map(|(record, _)| record.anchor.epoch)
        .collect();
    for (epoch, end) in trace.epochs.iter().filter(|(epoch, _)| !older.contains(epoch)) {
        // A later opening may have continued the numbering from a clean checkpoint without a gap.
        let later = if anchor.clean { anchor.redo.seq } else { next_seq };
        if end.durable_seq >= later && !(anchor.clean && *epoch == anchor.epoch) {
            report.lost.push(format!(
                "batch {} at byte {} says that batches up to {} were durable, and what can be recovered ends with batch {}",
                end.seq,
                end.at,
                end.durable_seq,
                next_seq - 1
            ));
        }
    }
    if let Some(end) = trace.epochs.get(&anchor.epoch).filter(|end| !anchor.clean && end.last_seq >= next_seq) {
        report.unproven.push(format!(
            "the log ends with batch {}: the next one is not whole, and of those up to batch {} none says that it was durable",
            next_seq - 1,
            end.last_seq
        ));
    }
    let newer: Vec<&(u64, u64)> = trace.damaged.iter().filter(|(_, seq)| *seq >= next_seq).collect();
    for (at, seq) in newer.iter().take(NAMED_MAX) {
        let text = format!("the header at byte {at}, of batch {seq} as it seems, is damaged");
        // A crash damages at most the writes in flight.
        match *seq < next_seq + WRITES_MAX as u64 {
            true => report.unproven.push(format!("{text}, as a crash leaves it, or later")),
            false => report.lost.push(text),
        }
    }
    if newer.len() > NAMED_MAX {
        report.lost.push(format!("{} more headers of newer batches are damaged", newer.len() - NAMED_MAX));
    }
}

/// Writes the anchor to its slot.
async fn write_anchor(file: &File, anchor: &Anchor) -> Result<()> {
    write_durably(file, SLOTS[(anchor.generation % 2) as usize], &anchor.encode()).await
}

/// Writes the superblocks if they are missing; after the anchor, like `init`.
async fn write_superblocks(file: &File, remains: &Remains, superblock: &StoreSuperblock) -> Result<()> {
    match remains.superblock {
        Some(_) => Ok(()),
        None => write_durably(file, COPIES, &superblock.encode()).await,
    }
}

/// Writes a block to two locations, one after the other, and flushes after each.
async fn write_durably(file: &File, places: [u64; 2], block: &[u8]) -> Result<()> {
    let failed = |error| Error::from_io(error, format!("rebuilding {}", file.path().display()));
    let block = Buf::copy_of(block);
    for at in places {
        file.write_at(block.clone(), at).await.map_err(failed)?;
        file.sync_data().await.map_err(failed)?;
    }
    Ok(())
}
