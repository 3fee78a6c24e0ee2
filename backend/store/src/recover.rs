//! Recovery: the newest anchor's state, and the log since replayed over it, up to the first batch that is not there
//! whole.

use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};

use crate::apply::{needs, subject};
use crate::core::{Core, corrupt};
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::batch::BatchHeader;
use crate::format::entry::Entry;
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::format::superblock::{COPIES, Refused, Superblock};
use crate::format::{BLOCK, BLOCK64};
use crate::media::Media;
use crate::object::{HEAD, Object};
use crate::segments::{Geometry, LiveTable};

/// Blocks read at a time.
const WINDOW_BLOCKS: u64 = 512;

/// What a replay found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    /// Batches replayed.
    pub batches: u64,
    /// Bytes of log replayed.
    pub bytes: u64,
    /// The next batch's number.
    pub next_seq: u64,
}

/// Reads the superblock; one good copy is enough, two that differ are not.
pub async fn read_superblock(file: &forebay_reactor::File) -> Result<Superblock> {
    Ok(read_superblock_bytes(file).await?.0)
}

/// As [`read_superblock`], and the bytes of a good copy: they may hold what only a newer version knows.
pub async fn read_superblock_bytes(file: &forebay_reactor::File) -> Result<(Superblock, Buf)> {
    let path = file.path().display();
    let mut found: Vec<std::result::Result<Superblock, Refused>> = Vec::new();
    let mut bytes = None;
    for at in COPIES {
        let (result, block) = file.read_at(BufMut::with_capacity(BLOCK), at).await;
        result.map_err(|error| Error::from_io(error, format!("reading the superblock at byte {at} of {path}")))?;
        found.push(Superblock::decode(&block));
        if matches!(found.last(), Some(Ok(_))) {
            bytes = Some(block.freeze());
        }
    }
    let superblock = agreed(&found, &path)?;
    Ok((superblock, bytes.expect("a good copy has its bytes")))
}

/// What the copies say together.
fn agreed(found: &[std::result::Result<Superblock, Refused>], path: &std::path::Display<'_>) -> Result<Superblock> {
    let good: Vec<&Superblock> = found.iter().flatten().collect();
    match good[..] {
        [one] => {
            tracing::warn!("one copy of the superblock of {path} is damaged; `forebay store check --repair` renews it");
            Ok(one.clone())
        }
        [a, b] if a == b => Ok(a.clone()),
        [_, _] => Err(corrupt(format!("{path}: the two copies of the superblock differ"))),
        _ => {
            let newer = found.iter().find_map(|copy| match copy {
                Err(Refused::Newer(what)) => Some(what.clone()),
                _ => None,
            });
            if let Some(what) = newer {
                let text = format!("{path} is a store made by a newer Forebay ({what}); upgrade to open it");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            if found.iter().all(|copy| matches!(copy, Err(Refused::NotAStore))) {
                let text = format!("{path} is not a Forebay store (no superblock)");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            Err(corrupt(format!("{path}: both copies of the superblock are damaged")))
        }
    }
}

/// Reads the newest anchor; and, if neither copy in the other slot can be read, the places of these.
///
/// That is damage, for a crash in the middle of a checkpoint leaves one copy whole.  It may have held the newest anchor:
/// see [`Core::replay`] and [`Core::find_lost`].
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
    let newest =
        newest.ok_or_else(|| corrupt(format!("{path}: no anchor can be read, the newest checkpoint is lost")))?;
    if let Some([first, second]) = unreadable {
        tracing::warn!(
            "the anchors at bytes {first} and {second} of {path} cannot be read; going on from checkpoint {}",
            newest.generation
        );
    }
    Ok((newest, unreadable))
}

/// Reads the segment table of an anchor.
pub async fn read_table(media: &Media, anchor: &Anchor, geometry: &Geometry) -> Result<LiveTable> {
    if anchor.segments.is_none() {
        return Ok(LiveTable::new(geometry.segment_count));
    }
    let bytes = media.read_blob(anchor.segments, "the segment table").await?;
    LiveTable::decode(&bytes, geometry).map_err(|error| corrupt(error.to_string()))
}

/// Reads along the log, a window at a time.
struct Window<'a> {
    media: &'a Media,
    start: u64,
    buf: BufMut,
}

impl Window<'_> {
    async fn blocks(&mut self, geometry: &Geometry, block: u64, count: u64) -> Result<&[u8]> {
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

/// Where a replay ends: no batch `seq` is at block `at`, nor at the beginning of the next segment.
#[derive(Clone, Copy)]
struct LogEnd {
    at: u64,
    next_segment: u32,
    seq: u64,
    /// A newer anchor may have been there.
    anchor_lost: bool,
}

/// An entry of the log, with where its blocks lie and the value it brings along.
type Placed = (Entry, u64, Option<Vec<u8>>);

impl Core {
    /// Replays the log since the anchor.  Where that ends before what was durable, tells why.
    ///
    /// With `anchor_lost` a newer anchor may have been there.  Everything before its redo point was durable, whatever
    /// batches say of each other, so that a damaged batch is no end of the log then.
    pub async fn replay(self: &Rc<Self>, anchor: &Anchor, anchor_lost: bool) -> Result<(Replay, Option<String>)> {
        let geometry = self.segments.borrow().geometry;
        let mut replay = Replay { next_seq: anchor.redo.seq, ..Replay::default() };
        if anchor.clean || anchor.generation == 0 {
            return Ok((replay, None));
        }
        let mut window = Window { media: &self.media, start: 0, buf: BufMut::with_capacity(0) };
        let mut at = anchor.redo.block;
        let mut next_segment = anchor.redo_next_segment;
        let mut open: Vec<Placed> = Vec::new();
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
            let payload = window.blocks(&geometry, header.block, count + 1).await?[BLOCK..].to_vec();
            let entries = Entry::decode_all(&header.entries)
                .map_err(|error| corrupt(format!("batch {} at block {}: {error}", header.seq, header.block)))?;
            let whole = entries.iter().all(|entry| is_whole(entry, &payload));
            if !whole && !self.is_followed(&mut window, &geometry, anchor, &header).await? {
                break anchor_lost.then(|| {
                    format!(
                        "{}: the anchor of a checkpoint is damaged, and so is batch {} of the log, at byte {}, which \
                         may have been durable before it",
                        self.media.file.path().display(),
                        header.seq,
                        header.block * BLOCK64
                    )
                });
            }
            if let Some(segment) = geometry.segment_of(header.block) {
                self.segments.borrow_mut().claim(segment);
            }
            replay.batches += 1;
            replay.bytes += (count + 1) * BLOCK64;
            replay.next_seq = header.seq + 1;
            next_segment = header.next_segment;
            at = header.block + 1 + count;
            let settled = if header.continues {
                let settled = header.entries.get(..header.settled as usize).unwrap_or_default();
                Entry::decode_all(settled).map_err(|error| corrupt(format!("batch {}: {error}", header.seq)))?.len()
            } else {
                entries.len()
            };
            for (i, entry) in entries.into_iter().enumerate() {
                let (first, value) = place(&entry, header.block + 1, &payload)?;
                open.push((entry, first, value));
                if i + 1 == settled {
                    self.load_ahead(&open).await;
                    for placed in open.drain(..) {
                        self.replay_entry(placed).await?;
                    }
                }
            }
        };
        Ok((replay, gap))
    }

    /// The batch `seq` at `block`, if that is what is there.
    async fn header_at(
        &self,
        window: &mut Window<'_>,
        geometry: &Geometry,
        anchor: &Anchor,
        block: u64,
        seq: u64,
    ) -> Result<Option<BatchHeader>> {
        if geometry.segment_of(block).is_none() {
            return Ok(None);
        }
        let Ok(header) = BatchHeader::decode(window.blocks(geometry, block, 1).await?) else { return Ok(None) };
        let ours = header.store == anchor.store && header.epoch == anchor.epoch && header.block == block;
        let fits = geometry.contains(block, u64::from(header.payload_blocks) + 1);
        Ok((ours && fits && header.seq == seq).then_some(header))
    }

    /// The log ends here - unless a later batch says that more of it was durable: then a header is damaged, and going
    /// on without what follows would lose what was promised.  Tells so.  After the loss of an anchor any later batch, and
    /// what is left of this one, says so.
    async fn find_gap(
        &self,
        window: &mut Window<'_>,
        geometry: &Geometry,
        anchor: &Anchor,
        end: LogEnd,
    ) -> Result<Option<String>> {
        let LogEnd { at, next_segment, seq, anchor_lost } = end;
        let path = self.media.file.path().display();
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

    /// What was durable and is not in what was replayed, if the newest anchor has been lost: the batch that says so.
    ///
    /// Batches are numbered on from one life to the next, and each tells up to which number they were durable when it was
    /// made; so one that tells of the number after the replay's last or a later one comes after a checkpoint that is not
    /// known here.  (What a crash left of an opening tells of none: it was the first to be made durable in its life.)
    pub async fn find_lost(&self, replay: &Replay, store: u64) -> Result<Option<BatchHeader>> {
        let geometry = self.segments.borrow().geometry;
        for segment in 0..geometry.segment_count {
            let (mut at, mut before): (u64, Option<BatchHeader>) = (geometry.first_block(segment), None);
            while geometry.segment_of(at) == Some(segment) {
                let block = self.media.read_raw(at * BLOCK64, BLOCK).await?;
                let Ok(header) = BatchHeader::decode(&block) else { break };
                let follows = before.as_ref().is_none_or(|b| header.epoch == b.epoch && header.seq == b.seq + 1);
                if header.store != store || header.block != at || header.seq < replay.next_seq || !follows {
                    break;
                }
                if header.durable_seq >= replay.next_seq {
                    return Ok(Some(header));
                }
                at = header.block + 1 + u64::from(header.payload_blocks);
                before = Some(header);
            }
        }
        Ok(None)
    }

    /// A later batch says that this one was durable: its entries count, and its damaged blocks are told to who reads
    /// them.
    async fn is_followed(
        &self,
        window: &mut Window<'_>,
        geometry: &Geometry,
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

    /// Loads side by side what the entries will need; what fails here fails again, and is told, where it is needed.
    async fn load_ahead(self: &Rc<Self>, placed: &[Placed]) {
        let loads = placed.iter().map(|(entry, _, _)| async move {
            let (Some(oid), Some((start, count))) = (subject(entry), needs(entry)) else { return };
            if check_bounds(entry).is_err() {
                return;
            }
            if let Ok(Some(object)) = self.by_oid(oid).await {
                let _ = self.load_pages(&object, HEAD, true, start, count).await;
            }
        });
        crate::read::join_all(loads).await;
    }

    async fn replay_entry(self: &Rc<Self>, (entry, first, value): Placed) -> Result<()> {
        check_bounds(&entry)?;
        if let Entry::Create { oid, namespace, name } = &entry {
            let name = forebay_block::ObjectName::in_namespace(namespace.as_str().into(), name);
            self.apply_create(Object::new(*oid, name));
            return Ok(());
        }
        let Some(oid) = subject(&entry) else {
            self.apply_global(&entry);
            return Ok(());
        };
        let missing = || corrupt(format!("the log speaks of object {oid}, which is not there"));
        let object = self.by_oid(oid).await?.ok_or_else(missing)?;
        if let Some((start, count)) = needs(&entry) {
            self.load_pages(&object, HEAD, true, start, count).await?;
        }
        self.apply(&object, &entry, first, value);
        Ok(())
    }
}

/// What an entry says is within what an object can be.
fn check_bounds(entry: &Entry) -> Result<()> {
    let blocks_max = OBJECT_SIZE_MAX / BLOCK64;
    let fits = match entry {
        Entry::Create { oid, .. } => *oid < u64::MAX / 2,
        Entry::Write { start, crcs, size, .. } => {
            u64::from(*start) + crcs.len() as u64 <= blocks_max && *size <= OBJECT_SIZE_MAX
        }
        Entry::Relocate { start, crcs, .. } => u64::from(*start) + crcs.len() as u64 <= blocks_max,
        Entry::Unmap { size, .. } => *size <= OBJECT_SIZE_MAX,
        _ => true,
    };
    if fits { Ok(()) } else { Err(corrupt(format!("an entry of the log is out of bounds: {entry:?}"))) }
}

/// All that the entry has in the payload is there as it was written.
fn is_whole(entry: &Entry, payload: &[u8]) -> bool {
    match entry {
        Entry::Write { payload: at, crcs, .. } | Entry::Relocate { payload: at, crcs, .. } => {
            crcs.iter().enumerate().all(|(i, &crc)| {
                let at = (*at as usize + i) * BLOCK;
                payload.get(at..at + BLOCK).is_some_and(|block| crc32c(block) == crc)
            })
        }
        Entry::KvSetLong { at, len, crc, .. } => {
            let end = (*at as usize).saturating_add(*len as usize);
            payload.get(*at as usize..end).is_some_and(|value| crc32c(value) == *crc)
        }
        // Metadata of a checkpoint that came to nothing, or whose own anchor vouches for it.
        _ => true,
    }
}

/// Where an entry's blocks lie on the device, and its value.
fn place(entry: &Entry, base: u64, payload: &[u8]) -> Result<(u64, Option<Vec<u8>>)> {
    match entry {
        Entry::Write { payload: at, crcs, .. } | Entry::Relocate { payload: at, crcs, .. } => {
            if (*at as usize + crcs.len()) * BLOCK > payload.len() {
                return Err(corrupt("an entry of the log points past its batch"));
            }
            Ok((base + u64::from(*at), None))
        }
        Entry::KvSetLong { at, len, crc, key, .. } => {
            let end = (*at as usize).saturating_add(*len as usize);
            let value = payload.get(*at as usize..end).filter(|value| crc32c(value) == *crc);
            if value.is_none() {
                let key = String::from_utf8_lossy(key);
                tracing::error!("the value of key {key:?} is damaged in the log, though it was durable");
            }
            Ok((0, value.map(<[u8]>::to_vec)))
        }
        _ => Ok((0, None)),
    }
}
