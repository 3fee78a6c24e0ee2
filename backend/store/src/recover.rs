//! Recovery: loads the state of the newest anchor, and replays the log after it up to the first incomplete batch.

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::sync::join_all;

use crate::apply::{needs, subject};
use crate::core::{Core, corrupt};
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::batch::BatchHeader;
use crate::format::blob::{SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::{StoreEntry, StoredBlob};
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::format::record::CheckpointRecord;
use crate::format::superblock::{COPIES, StoreSuperblock, SuperblockError};
use crate::format::{BLOCK, BLOCK64};
use crate::media::Media;
use crate::object::{HEAD, StoreObject};
use crate::segments::{LiveTable, SegmentGeometry};

/// Blocks read at a time.
const WINDOW_BLOCKS: u64 = 512;

/// Upper bound of the batches that the checkpoint of a clean close writes. The next opening skips this many numbers, so
/// that no two batches of a store have the same number.
const CLOSING_BATCHES_MAX: u64 = 1 << 20;

/// Result of a log replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    /// Batches replayed.
    pub batches: u64,
    /// Bytes of log replayed.
    pub bytes: u64,
    /// Number of the next batch.
    pub next_seq: u64,
}

/// Superblock found in the copies.
pub struct FoundSuperblock {
    pub superblock: StoreSuperblock,
    /// Content of an intact copy, which may include fields that only a newer version knows.
    pub bytes: Buf,
    /// Set if the other copy is damaged.
    pub one_damaged: bool,
    /// Set if the copies have different feature bits or numbers of segments.
    pub features_differ: bool,
}

/// Reads the superblock. One intact copy is sufficient; two intact copies that differ are an error.
pub async fn read_superblock(file: &forebay_reactor::File) -> Result<FoundSuperblock> {
    let path = file.path().display();
    let mut found: Vec<std::result::Result<StoreSuperblock, SuperblockError>> = Vec::new();
    let mut bytes = None;
    for at in COPIES {
        let (result, block) = file.read_at(BufMut::with_capacity(BLOCK), at).await;
        result.map_err(|error| Error::from_io(error, format!("reading the superblock at byte {at} of {path}")))?;
        found.push(StoreSuperblock::decode(&block));
        if matches!(found.last(), Some(Ok(_))) {
            bytes = Some(block.freeze());
        }
    }
    let superblock = agreed(&found, &path)?;
    let one_damaged = found.iter().any(|copy| copy.is_err());
    let features_differ = found.iter().flatten().any(|copy| *copy != superblock);
    Ok(FoundSuperblock { superblock, bytes: bytes.expect("a good copy has its bytes"), one_damaged, features_differ })
}

/// Returns the superblock on which the copies agree.
fn agreed(
    found: &[std::result::Result<StoreSuperblock, SuperblockError>],
    path: &std::path::Display<'_>,
) -> Result<StoreSuperblock> {
    let good: Vec<&StoreSuperblock> = found.iter().flatten().collect();
    match good[..] {
        [one] => {
            tracing::warn!("one copy of the superblock of {path} is damaged; run `forebay store check --repair`");
            Ok(one.clone())
        }
        [a, b] => a.reconcile(b).ok_or_else(|| corrupt(format!("{path}: the two copies of the superblock differ"))),
        _ => {
            let newer = found.iter().find_map(|copy| match copy {
                Err(SuperblockError::Newer(what)) => Some(what.clone()),
                _ => None,
            });
            if let Some(what) = newer {
                let text = format!("{path} is a store made by a newer Forebay ({what}); upgrade to open it");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            if found.iter().all(|copy| matches!(copy, Err(SuperblockError::NotAStore))) {
                let text = format!("{path} is not a Forebay store (no superblock)");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            let how = "`forebay store check --rebuild` searches the log for their content";
            Err(corrupt(format!("{path}: both copies of the superblock are damaged; {how}")))
        }
    }
}

/// Reads the newest anchor; also returns the locations of the other slot's copies if neither of them is readable.
///
/// An unreadable slot is damage, because a crash during a checkpoint leaves one copy intact.  The slot may have held
/// the newest anchor: see [`Core::replay`] and [`Core::find_lost`].
pub async fn read_anchor(file: &forebay_reactor::File, store: u64) -> Result<(Anchor, Option<[u64; 2]>)> {
    let path = file.path().display();
    let mut found: [Option<Anchor>; 2] = [None, None];
    for (slot, places) in found.iter_mut().zip(SLOTS) {
        for at in places {
            let (result, block) = file.read_at(BufMut::with_capacity(BLOCK), at).await;
            result.map_err(|error| Error::from_io(error, format!("reading an anchor at byte {at} of {path}")))?;
            if let Ok(anchor) = Anchor::decode(&block, store)
                && slot.as_ref().is_none_or(|newest| anchor.generation > newest.generation)
            {
                *slot = Some(anchor);
            }
        }
    }
    let unreadable = found.iter().zip(SLOTS).find(|(slot, _)| slot.is_none()).map(|(_, places)| places);
    let newest = found.into_iter().flatten().max_by_key(|anchor| anchor.generation);
    let newest = newest.ok_or_else(|| {
        let how = "`forebay store check --rebuild` searches the log for it";
        corrupt(format!("{path}: no anchor can be read, the newest checkpoint is lost; {how}"))
    })?;
    if let Some([first, second]) = unreadable {
        tracing::warn!(
            "the anchors at bytes {first} and {second} of {path} cannot be read; using checkpoint {}",
            newest.generation
        );
    }
    Ok((newest, unreadable))
}

/// Reads the segment table of an anchor.
pub async fn read_table(media: &Media, anchor: &Anchor, geometry: &SegmentGeometry) -> Result<LiveTable> {
    if anchor.segments.is_none() {
        return Ok(LiveTable::new(geometry.segment_count));
    }
    let bytes = media.read_blob(anchor.segments, "the segment table").await?;
    LiveTable::decode(&bytes, geometry).map_err(|error| corrupt(error.to_string()))
}

/// Read-ahead window that moves along the log.
struct Window<'a> {
    media: &'a Media,
    start: u64,
    buf: BufMut,
}

impl Window<'_> {
    async fn blocks(&mut self, geometry: &SegmentGeometry, block: u64, count: u64) -> Result<&[u8]> {
        let have = (self.buf.len() / BLOCK) as u64;
        if block < self.start || block + count > self.start + have {
            let segment = geometry.segment_of(block).expect("within the segments");
            let end = geometry.first_block(segment) + geometry.segment_blocks();
            let len = count.max(WINDOW_BLOCKS).min(end - block);
            self.buf = self.media.read_raw(block * BLOCK64, len as usize * BLOCK).await?;
            self.start = block;
        }
        let at = (block - self.start) as usize * BLOCK;
        Ok(&self.buf[at..at + count as usize * BLOCK])
    }
}

/// End of a replay: batch `seq` is neither at block `at` nor at the beginning of the next segment.
#[derive(Clone, Copy)]
struct LogEnd {
    at: u64,
    next_segment: u32,
    seq: u64,
    /// Set if a newer anchor may have been lost.
    anchor_lost: bool,
}

/// Bytes of replayed batches that are kept in memory until it is known that they were durable.
const TAIL_BYTES_MAX: usize = 64 << 20;

/// Batches at the end of the log that may not have been durable: a crash may have left them on some devices only.
#[derive(Default)]
struct LogTail {
    /// Block number, batch number and content.
    batches: VecDeque<(u64, u64, Buf)>,
    bytes: usize,
    /// Highest batch number that was durable.
    durable_seq: u64,
}

impl LogTail {
    /// Adds a batch with header and payload, and what it says about others. Returns batches that are no longer kept.
    fn add(
        &mut self,
        header: &BatchHeader,
        entries: &[StoreEntry],
        payload: &[u8],
        anchor: &Anchor,
    ) -> Vec<(u64, Buf)> {
        let mut content = vec![0; BLOCK + payload.len()];
        header.encode(&mut content[..BLOCK]);
        content[BLOCK..].copy_from_slice(payload);
        self.bytes += content.len();
        self.batches.push_back((header.block, header.seq, Buf::copy_of(&content)));
        self.durable_seq = self.durable_seq.max(header.durable_seq);
        // The anchor was written when its record was durable.
        let is_recorded = entries.iter().any(|entry| match entry {
            StoreEntry::Checkpoint { record } => {
                CheckpointRecord::decode(record).is_ok_and(|record| record.anchor.generation == anchor.generation)
            }
            _ => false,
        });
        if is_recorded {
            self.durable_seq = self.durable_seq.max(header.seq);
        }
        while self.batches.front().is_some_and(|(_, seq, _)| *seq <= self.durable_seq) {
            self.pop();
        }
        let mut out = Vec::new();
        while self.bytes > TAIL_BYTES_MAX {
            out.extend(self.pop());
        }
        out
    }

    fn pop(&mut self) -> Option<(u64, Buf)> {
        let (block, _, content) = self.batches.pop_front()?;
        self.bytes -= content.len();
        Some((block, content))
    }
}

/// Log entry with the location of its blocks and its value.
type LocatedEntry = (StoreEntry, u64, Option<Vec<u8>>);

impl Core {
    /// Replays the log since the anchor.  Returns a description if the log ends before the end of durable data.
    ///
    /// With `anchor_lost`, a newer anchor may have existed.  Everything before its redo point was durable, whatever
    /// batches record about each other, so a damaged batch does not count as the end of the log in that case.
    pub async fn replay(self: &Rc<Self>, anchor: &Anchor, anchor_lost: bool) -> Result<(Replay, Option<String>)> {
        let geometry = self.segments.borrow().geometry;
        let mut replay = Replay { next_seq: anchor.redo.seq, ..Replay::default() };
        if anchor.generation == 0 {
            return Ok((replay, None));
        }
        if anchor.clean {
            // The batches of the checkpoint itself follow the redo point.
            replay.next_seq += CLOSING_BATCHES_MAX;
            return Ok((replay, None));
        }
        let mut window = Window { media: &self.media, start: 0, buf: BufMut::with_capacity(0) };
        let mut at = anchor.redo.block;
        let mut next_segment = anchor.redo_next_segment;
        let mut open: Vec<LocatedEntry> = Vec::new();
        let mut tail = LogTail::default();
        if let Some(segment) = geometry.segment_of(at) {
            self.segments.borrow_mut().claim(segment);
        }
        let gap = loop {
            let mut found = self.header_at(&mut window, &geometry, anchor, at, replay.next_seq).await?;
            if found.is_none() && next_segment < geometry.segment_count {
                let first = geometry.first_block(next_segment);
                found = self.header_at(&mut window, &geometry, anchor, first, replay.next_seq).await?;
            }
            let Some(header) = found else {
                let end = LogEnd { at, next_segment, seq: replay.next_seq, anchor_lost };
                break self.find_gap(&mut window, &geometry, anchor, end).await?;
            };
            let count = u64::from(header.payload_blocks);
            let mut payload = window.blocks(&geometry, header.block, count + 1).await?[BLOCK..].to_vec();
            let entries = StoreEntry::decode_all(&header.entries)
                .map_err(|error| corrupt(format!("batch {} at block {}: {error}", header.seq, header.block)))?;
            let whole = self.verify_payload(&entries, header.block + 1, &mut payload).await;
            if !whole && !self.is_followed(&mut window, &geometry, anchor, &header).await? {
                break anchor_lost.then(|| {
                    format!(
                        "{}: the anchor of a checkpoint is damaged, and so is batch {} of the log, at byte {}, which \
                         may have been durable before it",
                        self.media.device.name(),
                        header.seq,
                        header.block * BLOCK64
                    )
                });
            }
            if let Some(segment) = geometry.segment_of(header.block) {
                let mut segments = self.segments.borrow_mut();
                segments.claim(segment);
                if geometry.first_block(segment) == header.block {
                    segments.uses.begin(segment, header.seq);
                }
            }
            if let Some(set) = self.media.device.columns().filter(|_| !self.read_only) {
                for (block, content) in tail.add(&header, &entries, &payload, anchor) {
                    set.settle(block, &content.into()).await?;
                }
            }
            replay.batches += 1;
            replay.bytes += (count + 1) * BLOCK64;
            replay.next_seq = header.seq + 1;
            next_segment = header.next_segment;
            at = header.block + 1 + count;
            let settled = if header.continues {
                let settled = header.entries.get(..header.settled as usize).unwrap_or_default();
                StoreEntry::decode_all(settled)
                    .map_err(|error| corrupt(format!("batch {}: {error}", header.seq)))?
                    .len()
            } else {
                entries.len()
            };
            for (i, entry) in entries.into_iter().enumerate() {
                let (first, value) = locate(&entry, header.block + 1, &payload)?;
                open.push((entry, first, value));
                if i + 1 == settled {
                    self.load_ahead(&open).await;
                    for located in open.drain(..) {
                        self.replay_entry(located).await?;
                    }
                }
            }
        };
        if let Some(set) = self.media.device.columns().filter(|_| gap.is_none()) {
            let mut settled = 0;
            while let Some((block, content)) = tail.pop() {
                settled += set.settle(block, &content.into()).await?;
            }
            if settled > 0 {
                tracing::info!("{}: {settled} blocks at the end of the log were completed on all devices", set.name());
            }
        }
        Ok((replay, gap))
    }

    /// Verifies the payload of a batch whose first payload block is `base`, and reconstructs damaged blocks from other
    /// devices. Returns whether it is intact.
    async fn verify_payload(&self, entries: &[StoreEntry], base: u64, payload: &mut [u8]) -> bool {
        let mut whole = true;
        for entry in entries {
            if is_whole(entry, payload) {
                continue;
            }
            match entry {
                StoreEntry::Write { payload: at, crcs, .. } | StoreEntry::Relocate { payload: at, crcs, .. } => {
                    for (i, crc) in crcs.iter().enumerate() {
                        let block = *at as usize + i;
                        let Some(bytes) = payload.get_mut(block * BLOCK..(block + 1) * BLOCK) else { continue };
                        if crc32c(bytes) != *crc
                            && let Some(good) =
                                self.media.device.mend_block(base + block as u64, |bytes| crc32c(bytes) == *crc).await
                        {
                            bytes.copy_from_slice(&good);
                        }
                    }
                }
                StoreEntry::KvSetLong { at, len, crc, .. } => {
                    self.mend_bytes(base, payload, *at as usize..(*at as usize).saturating_add(*len as usize), *crc)
                        .await;
                }
                StoreEntry::WriteBlob { blob, .. } | StoreEntry::RelocateBlob { blob, .. } => {
                    let at = (blob.payload as usize).saturating_mul(SECTOR);
                    self.mend_bytes(base, payload, at..at + usize::from(blob.sectors) * SECTOR, blob.crc).await;
                }
                _ => {}
            }
            whole &= is_whole(entry, payload);
        }
        whole
    }

    /// Reconstructs bytes of a payload from other devices, if that yields their checksum.
    async fn mend_bytes(&self, base: u64, payload: &mut [u8], range: std::ops::Range<usize>, crc: u32) {
        let first = range.start / BLOCK;
        let within = range.start - first * BLOCK..range.end.saturating_sub(first * BLOCK);
        let Some(bytes) = payload.get_mut(range).filter(|bytes| !bytes.is_empty()) else { return };
        let is_right = |bytes: &[u8]| crc32c(bytes) == crc;
        if let Some(good) = self.media.device.mend_range(base + first as u64, within, is_right).await {
            bytes.copy_from_slice(&good);
        }
    }

    /// Returns batch `seq` at `block`; `None` if something else is there.
    async fn header_at(
        &self,
        window: &mut Window<'_>,
        geometry: &SegmentGeometry,
        anchor: &Anchor,
        block: u64,
        seq: u64,
    ) -> Result<Option<BatchHeader>> {
        if geometry.segment_of(block).is_none() {
            return Ok(None);
        }
        let is_wanted = |header: &BatchHeader| {
            let ours = header.store == anchor.store && header.epoch == anchor.epoch;
            ours && header.seq == seq && geometry.contains(block, u64::from(header.payload_blocks) + 1)
        };
        let stored = window.blocks(geometry, block, 1).await?;
        Ok(self.media.find_header(stored, block, is_wanted).await)
    }

    /// Determines whether the log really ends here.  If a later batch records that more of the log was durable, a
    /// header is damaged, and continuing without the rest would lose acknowledged data; returns a description of that.
    /// After the loss of an anchor, any later batch or remains of this one are sufficient evidence.
    async fn find_gap(
        &self,
        window: &mut Window<'_>,
        geometry: &SegmentGeometry,
        anchor: &Anchor,
        end: LogEnd,
    ) -> Result<Option<String>> {
        let LogEnd { at, next_segment, seq, anchor_lost } = end;
        let path = self.media.device.name();
        let segment_end = |segment| geometry.first_block(segment) + geometry.segment_blocks();
        let here = geometry.segment_of(at).map(|segment| at..segment_end(segment));
        let next = (next_segment < geometry.segment_count)
            .then(|| geometry.first_block(next_segment)..segment_end(next_segment));
        let places = [here, next].into_iter().flatten();
        let starts: Vec<String> = places.clone().map(|blocks| (blocks.start * BLOCK64).to_string()).collect();
        let starts = starts.join(" or ");
        for start in places.clone().map(|blocks| blocks.start).filter(|_| anchor_lost) {
            let bytes = window.blocks(geometry, start, 1).await?;
            if BatchHeader::resembles(bytes, anchor.store, anchor.epoch, seq, start) {
                return Ok(Some(format!(
                    "{path}: the anchor of a checkpoint is damaged, and so is the header of batch {seq} of the log, at \
                     byte {}, which may have been durable before it",
                    start * BLOCK64
                )));
            }
        }
        for block in places.flatten() {
            let Ok(header) = BatchHeader::decode(window.blocks(geometry, block, 1).await?) else { continue };
            let later = header.store == anchor.store && header.epoch == anchor.epoch && header.block == block;
            let why = match header.durable_seq >= seq {
                true => "says that it was durable",
                false => "comes after it, while the anchor of a checkpoint is damaged, too",
            };
            if later && header.seq > seq && (anchor_lost || header.durable_seq >= seq) {
                return Ok(Some(format!(
                    "{path}: batch {seq} of the log is damaged or written over (its header should be at byte {starts}), \
                     and batch {} {why}",
                    header.seq
                )));
            }
        }
        Ok(None)
    }

    /// Returns a batch that proves the existence of durable data beyond the replay, if the newest anchor has been lost.
    ///
    /// Batch numbers continue from one epoch to the next, and each batch records the highest durable number at its
    /// creation. A batch that records the number after the replay's last one, or a later one, therefore follows a
    /// checkpoint that is not known here.  (Batches left by an opening that crashed record no such number: their
    /// checkpoint would have been the first durable data of that epoch.)
    pub async fn find_lost(&self, replay: &Replay, anchor: &Anchor, store: u64) -> Result<Option<BatchHeader>> {
        let geometry = self.segments.borrow().geometry;
        for segment in 0..geometry.segment_count {
            let (mut at, mut before): (u64, Option<BatchHeader>) = (geometry.first_block(segment), None);
            while geometry.segment_of(at) == Some(segment) {
                let block = self.media.read_raw(at * BLOCK64, BLOCK).await?;
                let Ok(header) = BatchHeader::decode(&block) else { break };
                let follows = before.as_ref().is_none_or(|b| header.epoch == b.epoch && header.seq == b.seq + 1);
                // A later opening may have continued the numbering from a clean checkpoint without a gap.
                let later = match header.epoch != anchor.epoch {
                    true if anchor.clean => anchor.redo.seq,
                    true => replay.next_seq + self.batches_in_flight_at_crash(anchor),
                    false => replay.next_seq,
                };
                if header.store != store || header.block != at || header.seq < later || !follows {
                    break;
                }
                if header.durable_seq >= later {
                    return Ok(Some(header));
                }
                at = header.block + 1 + u64::from(header.payload_blocks);
                before = Some(header);
            }
        }
        Ok(None)
    }

    /// Returns whether a later batch records that this one was durable. In that case its entries are valid, and reads
    /// of its damaged blocks report errors.
    async fn is_followed(
        &self,
        window: &mut Window<'_>,
        geometry: &SegmentGeometry,
        anchor: &Anchor,
        header: &BatchHeader,
    ) -> Result<bool> {
        let (mut seq, mut at) = (header.seq, header.block + 1 + u64::from(header.payload_blocks));
        let mut next_segment = header.next_segment;
        loop {
            let mut found = self.header_at(window, geometry, anchor, at, seq + 1).await?;
            if found.is_none() && next_segment < geometry.segment_count {
                let first = geometry.first_block(next_segment);
                found = self.header_at(window, geometry, anchor, first, seq + 1).await?;
            }
            let Some(later) = found else { return Ok(false) };
            if later.durable_seq >= header.seq {
                return Ok(true);
            }
            (seq, at, next_segment) =
                (later.seq, later.block + 1 + u64::from(later.payload_blocks), later.next_segment);
        }
    }

    /// Loads the metadata that the entries need, in parallel. Errors are ignored here and reported by the later use.
    async fn load_ahead(self: &Rc<Self>, located: &[LocatedEntry]) {
        let loads = located.iter().map(|(entry, _, _)| {
            Box::pin(async move {
                let (Some(oid), Some((start, count))) = (subject(entry), needs(entry)) else { return };
                if check_bounds(entry).is_err() {
                    return;
                }
                if let Ok(Some(object)) = self.by_oid(oid).await {
                    let _ = self.load_pages(&object, HEAD, true, start, count).await;
                }
            })
        });
        join_all(loads).await;
    }

    async fn replay_entry(self: &Rc<Self>, (entry, first, value): LocatedEntry) -> Result<()> {
        check_bounds(&entry)?;
        if let StoreEntry::Create { oid, key, namespace, name } = &entry {
            let name = forebay_block::ObjectName::in_namespace(namespace.as_str().into(), name);
            self.apply_create(StoreObject::new(*oid, *key, name));
            return Ok(());
        }
        let Some(oid) = subject(&entry) else {
            self.apply_global(&entry);
            return Ok(());
        };
        let missing = || corrupt(format!("the log refers to object {oid}, which does not exist"));
        let object = self.by_oid(oid).await?.ok_or_else(missing)?;
        if let Some((start, count)) = needs(&entry) {
            self.load_pages(&object, HEAD, true, start, count).await?;
        }
        self.apply(&object, &entry, first, value);
        Ok(())
    }
}

/// Rejects entries outside the limits of an object.
fn check_bounds(entry: &StoreEntry) -> Result<()> {
    let blocks_max = OBJECT_SIZE_MAX / BLOCK64;
    let fits = match entry {
        StoreEntry::Create { oid, .. } => *oid < u64::MAX / 2,
        StoreEntry::Write { start, crcs, size, .. } => {
            u64::from(*start) + crcs.len() as u64 <= blocks_max && *size <= OBJECT_SIZE_MAX
        }
        StoreEntry::Relocate { start, crcs, .. } => u64::from(*start) + crcs.len() as u64 <= blocks_max,
        StoreEntry::WriteBlob { blob, size, .. } => {
            u64::from(blob.start) + u64::from(blob.blocks) <= blocks_max && *size <= OBJECT_SIZE_MAX
        }
        StoreEntry::RelocateBlob { blob, .. } => u64::from(blob.start) + u64::from(blob.blocks) <= blocks_max,
        StoreEntry::Unmap { size, .. } => *size <= OBJECT_SIZE_MAX,
        _ => true,
    };
    if fits { Ok(()) } else { Err(corrupt(format!("an entry of the log is out of bounds: {entry:?}"))) }
}

/// Returns whether all payload data of the entry is intact.
fn is_whole(entry: &StoreEntry, payload: &[u8]) -> bool {
    match entry {
        StoreEntry::Write { payload: at, crcs, .. } | StoreEntry::Relocate { payload: at, crcs, .. } => {
            crcs.iter().enumerate().all(|(i, &crc)| {
                let at = (*at as usize + i) * BLOCK;
                payload.get(at..at + BLOCK).is_some_and(|block| crc32c(block) == crc)
            })
        }
        StoreEntry::WriteBlob { blob, .. } | StoreEntry::RelocateBlob { blob, .. } => {
            stored_of(blob, payload).is_some_and(|stored| crc32c(stored) == blob.crc)
        }
        StoreEntry::KvSetLong { at, len, crc, .. } => {
            let end = (*at as usize).saturating_add(*len as usize);
            payload.get(*at as usize..end).is_some_and(|value| crc32c(value) == *crc)
        }
        // Metadata of an aborted checkpoint, or of one whose own anchor verifies it.
        _ => true,
    }
}

/// Returns the stored bytes of a blob.
fn stored_of<'a>(blob: &StoredBlob, payload: &'a [u8]) -> Option<&'a [u8]> {
    let at = (blob.payload as usize).checked_mul(SECTOR)?;
    payload.get(at..at.checked_add(usize::from(blob.sectors) * SECTOR)?)
}

/// Returns the location of an entry's blocks or blob on the device, and its value.
fn locate(entry: &StoreEntry, base: u64, payload: &[u8]) -> Result<(u64, Option<Vec<u8>>)> {
    match entry {
        StoreEntry::Write { payload: at, crcs, .. } | StoreEntry::Relocate { payload: at, crcs, .. } => {
            if (*at as usize + crcs.len()) * BLOCK > payload.len() {
                return Err(corrupt("an entry of the log points past its batch"));
            }
            Ok((base + u64::from(*at), None))
        }
        StoreEntry::WriteBlob { blob, .. } | StoreEntry::RelocateBlob { blob, .. } => match stored_of(blob, payload) {
            Some(_) => Ok((base * SECTORS_A_BLOCK + u64::from(blob.payload), None)),
            None => Err(corrupt("an entry of the log points past its batch")),
        },
        StoreEntry::KvSetLong { at, len, crc, key, .. } => {
            let end = (*at as usize).saturating_add(*len as usize);
            let value = payload.get(*at as usize..end).filter(|value| crc32c(value) == *crc);
            if value.is_none() {
                let key = String::from_utf8_lossy(key);
                tracing::error!(
                    "the value of key {key:?} is damaged in the log although it was durable; reading the key fails until it is set"
                );
            }
            Ok((0, value.map(<[u8]>::to_vec)))
        }
        _ => Ok((0, None)),
    }
}
