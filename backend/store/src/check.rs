//! Consistency check of a store: every structure, every reference, and on request every stored byte.

mod ledger;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, ObjectName, Result};
use forebay_reactor::{File, OpenOptions, random, wall_clock};

use crate::columns::check_devices;
use crate::core::Core;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::blob::BlobSlot;
use crate::format::node::Node;
use crate::format::superblock::{COPIES, SEGMENTS_START, StoreSuperblock, SuperblockError};
use crate::format::{BLOCK, BlobPtr, PAGE_BLOCKS};
use crate::keys;
use crate::object::{HEAD, StoreObject};
use crate::occupant::{self, Occupant};
use crate::rebuild::{RebuildReport, rebuild};
use crate::recover::{FoundSuperblock, read_superblock};
use crate::store::{Store, StoreOptions, StorePlace, open_file};
pub(crate) use ledger::Ledger;

/// Names looked up at a time.
const PAGE: usize = 256;

/// Options of a check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Set to read every stored block and compare its checksum, not only those of metadata.
    pub data: bool,
    /// Set to rewrite damaged copies of the superblock from the intact one, or both from the newest anchor if the store
    /// is in a file.
    pub repair: bool,
    /// Set to roll back permanently to the previous checkpoint if the newest one is damaged, although data acknowledged
    /// since then may be lost.
    pub roll_back: bool,
    /// Set to rebuild lost superblocks or anchors from the checkpoint records in the log.  If that loses data, the loss
    /// is reported and the store left unchanged, unless `roll_back` is set too.
    pub rebuild: bool,
    /// Set to check a store on several devices although those that are missing may have continued without the others.
    pub accept_missing: bool,
    /// Set to drop what damaged parts of the index have lost, so that the space is freed: lost objects and keys are
    /// absent afterwards.
    pub drop_lost: bool,
    /// Set to roll back although data of the older checkpoint was overwritten, and to drop what is lost. Without it, the
    /// losses are reported and the store left unchanged.
    pub force: bool,
}

/// Inconsistency found by a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Location: an object, a segment, a structure.
    pub place: String,
    /// Description of the problem.
    pub problem: String,
    /// Set if the problem was repaired.
    pub repaired: bool,
}

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Number of objects with a head.
    pub objects: u64,
    /// Number of clones.
    pub clones: u64,
    /// Mapped blocks, each counted once.
    pub blocks: u64,
    /// Blocks whose content was read and verified.
    pub blocks_read: u64,
    /// Number of tree nodes.
    pub nodes: u64,
    /// Batches that had to be replayed.
    pub replayed: u64,
    /// Problems found.
    pub findings: Vec<Finding>,
    /// Result of the rebuild, if one was performed.
    pub rebuild: Option<RebuildReport>,
    /// Set if nothing was written and nothing else checked, because that would lose what the findings name, and `force`
    /// is not set.
    pub waits_for_force: bool,
    /// Bytes in use that were freed, because nothing referred to them any more.
    pub freed_bytes: u64,
}

impl CheckReport {
    /// Returns whether all problems found were repaired.
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(|finding| finding.repaired)
    }

    pub(crate) fn add(&mut self, place: impl Into<String>, problem: impl Into<String>) {
        self.findings.push(Finding { place: place.into(), problem: problem.into(), repaired: false });
    }
}

impl Store {
    /// Checks the store at `path`, which must not be open elsewhere.  Calls `progress` with (objects done, objects in
    /// total).
    ///
    /// # Errors
    /// When the store cannot be opened at all; internal problems are in the report.
    pub async fn check(
        path: impl AsRef<Path>,
        mut options: CheckOptions,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<CheckReport> {
        let path = path.as_ref();
        let mut report = CheckReport::default();
        if options.rebuild {
            report.rebuild = rebuild(path, options.roll_back, options.data, &mut progress).await?;
        }
        if let Some(rebuilt) = report.rebuild.clone() {
            report.objects = rebuilt.objects;
            for problem in rebuilt.lost {
                report.findings.push(Finding { place: "the log".into(), problem, repaired: rebuilt.written });
            }
            if !rebuilt.written {
                return Ok(report);
            }
            report.objects = 0;
            options.repair = true;
            options.roll_back = false;
        }
        check_copies(path, &options, &mut report).await?;
        if options.roll_back
            && !Self::verify_roll_back(StorePlace::One(path), &options, &mut report, &mut progress).await?
        {
            return Ok(report);
        }
        if options.roll_back {
            // Opening takes a checkpoint, which then is the newest one.
            let store = Store::open(
                path,
                StoreOptions { roll_back: true, without_master_key: true, ..StoreOptions::default() },
            )
            .await?;
            report
                .findings
                .iter_mut()
                .filter(|finding| finding.place.starts_with("anchor"))
                .for_each(|finding| finding.repaired = true);
            if let Some((place, lost)) = &store.lost {
                let problem = format!("{lost}; discarded");
                report.findings.push(Finding { place: (*place).into(), problem, repaired: true });
            }
            store.close().await?;
        }
        if options.drop_lost
            && !Self::drop_lost(StorePlace::One(path), options.force, &mut report, &mut progress).await?
        {
            return Ok(report);
        }
        let store = Store::open(
            path,
            StoreOptions { read_only: true, roll_back: true, data_cache: 0, ..StoreOptions::default() },
        )
        .await?;
        if let Some((place, lost)) = &store.lost {
            report.add(*place, lost.clone());
        }
        report.replayed = store.stats().replay.batches;
        store.check_structures(&options, &mut report, &mut progress).await?;
        Ok(report)
    }

    /// Checks the store on the devices at `paths` like [`check`](Self::check). `uuid` is that of the store, if known.
    ///
    /// # Errors
    /// When the store cannot be opened at all; `Unsupported` for a rebuild.
    pub async fn check_devices(
        paths: &[PathBuf],
        uuid: Option<[u8; 16]>,
        options: CheckOptions,
        progress: impl FnMut(u64, u64),
    ) -> Result<CheckReport> {
        check_devices(paths, uuid, &options, progress).await
    }

    /// Verifies what a rollback would keep, before anything is written: segments that the lost checkpoint had freed may
    /// have been used again since, so that data of the older checkpoint is overwritten. Every block is read.  Returns
    /// false, with the damage in the report, if something is damaged and `force` is not set.
    pub(crate) async fn verify_roll_back(
        store: StorePlace<'_>,
        options: &CheckOptions,
        report: &mut CheckReport,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<bool> {
        if options.force {
            return Ok(true);
        }
        let reading = StoreOptions { read_only: true, roll_back: true, data_cache: 0, ..StoreOptions::default() };
        let store = store.open(reading).await?;
        let Some((place, lost)) = &store.lost else { return Ok(true) };
        let mut found = CheckReport::default();
        let reading = CheckOptions { data: true, ..CheckOptions::default() };
        store.check_structures(&reading, &mut found, progress).await?;
        if found.findings.is_empty() {
            return Ok(true);
        }
        report.add(*place, lost.clone());
        report.findings.extend(found.findings);
        report.waits_for_force = true;
        Ok(false)
    }

    /// Checks the structures of an open store.
    pub(crate) async fn check_structures(
        &self,
        options: &CheckOptions,
        report: &mut CheckReport,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<()> {
        let core = self.core.clone();
        let mut ledger = Ledger::of(&core.segments.borrow().geometry);
        let whole = core.check_tree(&mut ledger, report).await;
        match core.check_objects(options, &mut ledger, report, progress).await {
            Ok(()) if whole => core.check_live(&ledger, report),
            // Data below a damaged node can be neither found nor counted.
            _ if !whole => {}
            Err(error) => return Err(error),
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Checks each copy of superblock and anchor.
async fn check_copies(path: &Path, options: &CheckOptions, report: &mut CheckReport) -> Result<()> {
    let how = if options.repair { OpenOptions::read_write() } else { OpenOptions::read() };
    let file = open_file(path, how.direct().lock()).await?;
    let (good, bytes) = match read_superblock(&file).await {
        Ok(FoundSuperblock { superblock, bytes, .. }) => (superblock, bytes),
        Err(error) => {
            let found = occupant::look(&file).await?;
            // Never overwrites a place that now holds another format.
            let mine = !matches!(found, Occupant::Foreign(_));
            let made = if mine { rebuild_superblock(&file, options).await? } else { None };
            let Some(made) = made else { return Err(occupant::explain(&file, error, found)) };
            let bytes = Buf::copy_of(&made.encode());
            (made, bytes)
        }
    };
    for at in COPIES {
        let block = read_block(&file, at).await?;
        if StoreSuperblock::decode(&block).is_ok() {
            continue;
        }
        let mut finding = Finding {
            place: format!("superblock at byte {at}"),
            problem: "damaged; `forebay store check --repair` renews it".into(),
            repaired: false,
        };
        if options.repair {
            let failed = |error| Error::from_io(error, format!("renewing the superblock at byte {at}"));
            file.write_at(bytes.clone(), at).await.map_err(failed)?;
            file.sync_data().await.map_err(failed)?;
            finding.problem = "damaged".into();
            finding.repaired = true;
        }
        report.findings.push(finding);
    }
    let store = good.store_number();
    for slot in SLOTS {
        let mut found = Vec::new();
        for at in slot {
            found.push(Anchor::decode(&read_block(&file, at).await?, store));
        }
        if let [Ok(a), Ok(b)] = &found[..]
            && a != b
        {
            report.add(format!("anchors at bytes {slot:?}"), "the copies differ");
        }
        for (at, error) in slot.iter().zip(&found).filter_map(|(at, found)| Some((at, found.as_ref().err()?))) {
            report.add(format!("anchor at byte {at}"), error.to_string());
        }
    }
    Ok(())
}

/// Rebuilds the superblock, of which no copy is readable, from the newest anchor and the size of the file. Returns
/// `None` unless repair is requested and the former content can be determined.
///
/// # Errors
/// [`ErrorKind::Corrupt`] on a device: a store may be smaller, so that the size of its segments does not follow.
async fn rebuild_superblock(file: &File, options: &CheckOptions) -> Result<Option<StoreSuperblock>> {
    let mut newest: Option<Anchor> = None;
    for at in SLOTS.into_iter().flatten().filter(|_| options.repair) {
        if let Ok(anchor) = Anchor::decode_any(&read_block(file, at).await?)
            && newest.as_ref().is_none_or(|newest| anchor.generation > newest.generation)
        {
            newest = Some(anchor);
        }
    }
    for at in COPIES {
        // A superblock written by a newer version must not be rebuilt.
        if matches!(StoreSuperblock::decode(&read_block(file, at).await?), Err(SuperblockError::Newer(_))) {
            return Ok(None);
        }
    }
    // The segment table has four bytes per segment.
    let Some((anchor, segments)) = newest.map(|anchor| (anchor.clone(), anchor.segments.len / 4)) else {
        return Ok(None);
    };
    if file.info().block_device {
        let text = "both copies of the superblock are damaged; a device does not tell how large its store was, but the log \
                    may: `forebay store check --rebuild`";
        return Err(Error::new(ErrorKind::Corrupt, format!("{}: {text}", file.path().display())));
    }
    let size = file.info().size;
    let fits = |&segment_size: &u64| segments > 0 && size == SEGMENTS_START + segment_size * u64::from(segments);
    let Some(segment_size) = (16..=30).map(|bits| 1_u64 << bits).find(fits) else { return Ok(None) };
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&anchor.store.to_le_bytes());
    uuid[8..].copy_from_slice(&random().to_le_bytes());
    let superblock = StoreSuperblock {
        features: 0,
        features_compatible: 0,
        uuid,
        created_s: wall_clock().as_secs(),
        segment_size: segment_size as u32,
        segment_count: segments,
        data_devices: 1,
        parity_devices: 0,
        device: None,
    };
    Ok(Some(superblock))
}

async fn read_block(file: &File, at: u64) -> Result<BufMut> {
    let (result, block) = file.read_at(BufMut::with_capacity(BLOCK), at).await;
    result.map_err(|error| Error::from_io(error, format!("reading byte {at} of {}", file.path().display())))?;
    Ok(block)
}

impl Core {
    fn count_blob(&self, ptr: BlobPtr, place: &str, ledger: &mut Ledger, report: &mut CheckReport) -> bool {
        let geometry = self.segments.borrow().geometry;
        match geometry.segment_of_byte(ptr.addr).filter(|_| geometry.contains_blob(ptr)) {
            Some(segment) => {
                ledger.live[segment as usize] += u64::from(ptr.len);
                true
            }
            None => {
                report.add(place, format!("a pointer to byte {}, outside the segments", ptr.addr));
                false
            }
        }
    }

    /// Checks the tree. Returns false if a part of it cannot be read.
    async fn check_tree(&self, ledger: &mut Ledger, report: &mut CheckReport) -> bool {
        let mut places = Vec::new();
        let mut damaged = Vec::new();
        let mut disorder = 0;
        let mut last_key: Vec<u8> = Vec::new();
        self.index
            .walk(|ptr, node| {
                places.push(ptr);
                match node {
                    Ok(Node::Leaf(pairs)) => {
                        for (key, _) in pairs {
                            disorder += u32::from(!last_key.is_empty() && key[..] <= last_key[..]);
                            last_key = key.to_vec();
                        }
                    }
                    Ok(_) => {}
                    Err(error) => damaged.push(error),
                }
            })
            .await;
        if disorder > 0 {
            report.add("the tree", format!("{disorder} keys are out of order"));
        }
        for error in &damaged {
            report.add("the tree", format!("{error:?}"));
        }
        report.nodes = places.len() as u64;
        for ptr in places {
            self.count_blob(ptr, "a tree node", ledger, report);
        }
        damaged.is_empty()
    }

    async fn check_objects(
        self: &Rc<Self>,
        options: &CheckOptions,
        ledger: &mut Ledger,
        report: &mut CheckReport,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<()> {
        let total = self.counters.objects();
        let mut named = BTreeSet::new();
        let mut from = vec![b'n'];
        let to = keys::after(&from);
        loop {
            let page = self.index.lookup_range(&from, &to, PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            from = last.clone();
            from.push(0);
            for (key, value) in page {
                let oid = value.try_into().map(u64::from_le_bytes).unwrap_or(0);
                named.insert(oid);
                match self.by_oid(oid).await {
                    Ok(Some(object)) if keys::name(&object.name) == key => {
                        self.check_object(&object, options, ledger, report).await?;
                        progress(report.objects, total);
                    }
                    Ok(Some(object)) => {
                        report.add(object.name.to_string(), "a name record of another name refers to it")
                    }
                    Ok(None) => report.add(
                        String::from_utf8_lossy(&key[3..]),
                        format!("its name record refers to object {oid}, which does not exist"),
                    ),
                    Err(error) => report.add(format!("object {oid}"), format!("{error:?}")),
                }
            }
        }
        self.check_orphans(&named, report).await?;
        if report.objects != total {
            report.add("objects", format!("{} found, {total} counted", report.objects));
        }
        Ok(())
    }

    /// Checks for records and keys of objects without a name, and for keys whose values are lost.
    async fn check_orphans(&self, named: &BTreeSet<u64>, report: &mut CheckReport) -> Result<()> {
        for kind in [b'o', b'k', b'x'] {
            let mut from = vec![kind];
            let to = keys::after(&from);
            loop {
                let page = self.index.lookup_range(&from, &to, PAGE).await?;
                let Some((last, _)) = page.last() else { break };
                from = last.clone();
                from.push(0);
                for (key, _) in page {
                    let oid = key.get(1..9).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().expect("8 bytes")));
                    if !named.contains(&oid) {
                        report.add(format!("object {oid}"), "no name record refers to it");
                    }
                    if kind == b'x' {
                        let key = String::from_utf8_lossy(key.get(17..).unwrap_or_default()).into_owned();
                        report.add(format!("object {oid}"), format!("the value of key {key:?} is lost"));
                    }
                }
            }
        }
        Ok(())
    }

    async fn check_object(
        self: &Rc<Self>,
        object: &Rc<StoreObject>,
        options: &CheckOptions,
        ledger: &mut Ledger,
        report: &mut CheckReport,
    ) -> Result<()> {
        let name: &ObjectName = &object.name;
        let states: Vec<u64> = {
            let state = object.state();
            report.objects += u64::from(state.exists);
            report.clones += state.clones.len() as u64;
            state.clones.iter().map(|clone| clone.id).chain([HEAD]).collect()
        };
        let geometry = self.segments.borrow().geometry;
        // Blocks and blobs shared by clones are counted once.
        let mut mine: BTreeSet<u64> = BTreeSet::new();
        let mut my_blobs: BTreeSet<u64> = BTreeSet::new();
        let mut to_read = Vec::new();
        for of in states {
            let pages = object.state().map_of(of).map_or(0, |map| map.pages().len() as u32);
            for index in 0..pages {
                let first = index * PAGE_BLOCKS;
                let loaded = self.load_pages(object, of, false, first, PAGE_BLOCKS).await;
                let state = object.state();
                let Some(map) = state.map_of(of) else { continue };
                let ptr = map.pages()[index as usize].ptr();
                if !ptr.is_none() {
                    self.count_blob(ptr, &name.to_string(), ledger, report);
                }
                if let Err(error) = loaded {
                    report.add(name.to_string(), format!("{error:?}"));
                    continue;
                }
                for block in first..first + PAGE_BLOCKS {
                    let slot = map.get(block);
                    let at = slot.block;
                    if at == 0 || !mine.insert(at) {
                        continue;
                    }
                    report.blocks += 1;
                    to_read.push((block, slot));
                    let blob = BlobSlot::of(at);
                    if let Some(blob) = blob {
                        ledger.blob_logical += BLOCK as u64;
                        if !my_blobs.insert(blob.at(0).location()) {
                            continue;
                        }
                    }
                    let data = blob.map_or(
                        BlobPtr { addr: at.saturating_mul(BLOCK as u64), len: BLOCK as u32, crc: slot.crc },
                        |blob| blob.ptr(slot.crc),
                    );
                    let inside = geometry.segment_of_byte(data.addr).filter(|_| geometry.contains_blob(data));
                    let Some(segment) = inside else {
                        let what = format!("block {block} lies at byte {}, outside the segments", data.addr);
                        report.add(name.to_string(), what);
                        continue;
                    };
                    if !ledger.mark(segment, geometry.segment_size, data) {
                        let what = format!("block {block} lies at byte {}, which other data uses too", data.addr);
                        report.add(name.to_string(), what);
                    }
                    ledger.live[segment as usize] += u64::from(data.len);
                    ledger.blob_stored += blob.map_or(0, |_| u64::from(data.len));
                }
            }
        }
        let mut damaged: BTreeSet<u64> = BTreeSet::new();
        for (block, slot) in to_read.into_iter().filter(|_| options.data) {
            report.blocks_read += 1;
            // A damaged blob is reported once, by its first block.
            let blob = BlobSlot::of(slot.block).map(|blob| blob.at(0).location());
            if blob.is_some_and(|blob| damaged.contains(&blob)) {
                continue;
            }
            let what = || format!("{name}, block {block}");
            // The checksums of encrypted data are verified without the keys.
            let read = match object.key {
                0 => self.media.read_blocks(slot.block, &[slot.crc], None, what).await.map(drop),
                _ => self.media.verify(slot.block, slot.crc, what).await,
            };
            if let Err(error) = read {
                report.add(name.to_string(), format!("{error:?}"));
                damaged.extend(blob);
            }
        }
        // Bounds memory use: loaded pages can be evicted.
        self.objects.reweigh(object);
        self.objects.shrink(self.index.changes_bytes());
        Ok(())
    }

    fn check_live(&self, ledger: &Ledger, report: &mut CheckReport) {
        let segments = self.segments.borrow();
        for (segment, (&counted, &found)) in segments.live_table().all().iter().zip(&ledger.live).enumerate() {
            if u64::from(counted) != found {
                report.add(format!("segment {segment}"), format!("{counted} live bytes counted, {found} found"));
            }
        }
        let counted = (self.blobs.logical(), self.blobs.stored());
        if counted != (ledger.blob_logical, ledger.blob_stored) {
            let found = format!("{} bytes in {} found", ledger.blob_logical, ledger.blob_stored);
            report.add("compressed data", format!("{} bytes in {} counted, {found}", counted.0, counted.1));
        }
    }
}
