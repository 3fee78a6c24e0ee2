//! Dropping of what a damaged index has lost: the survey of what is left, and the changes that make it a whole store.
//!
//! A damaged node of the tree loses the records below it, and the store keeps the space of everything they refer to,
//! because it cannot be counted. The survey reads everything else. Records without their counterparts are dropped, or
//! restored where the counterpart has their content, and live bytes are recounted.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use forebay_block::{ObjectName, Result};
use forebay_reactor::yield_now;

use crate::check::{CheckReport, Finding, Ledger};
use crate::core::{Core, corrupt};
use crate::format::blob::{BlobSlot, byte_of};
use crate::format::entry::StoreEntry;
use crate::format::node::Node;
use crate::format::onode::Onode;
use crate::format::page;
use crate::format::{BLOCK, BlobPtr};
use crate::keys;
use crate::log::StoreLog;
use crate::rebuild::bad_sectors::read_unless_damaged;
use crate::segments::LiveTable;
use crate::store::{Store, StoreOptions, StorePlace};
use crate::tree::{LOST_CRC, NodeSink, ScannedNode, TreeKey};

/// Loss found by a survey: location and description.
pub type Loss = (String, String);

/// Problem of an object whose record is lost.
const RECORD_LOST: &str = "its record is lost, and its data with it";

/// Survey of a store whose index is damaged.
pub struct LossSurvey {
    /// Losses, in the order of a report.
    pub losses: Vec<Loss>,
    /// Changes that make the records consistent without the lost ones.
    changes: BTreeMap<TreeKey, Option<Vec<u8>>>,
    /// Objects with a head that are left.
    objects: u64,
    /// Names of lost objects.
    names_lost: u64,
    /// Blocks and map pages that are left.
    left: Ledger,
    /// Tree nodes that are left.
    nodes: Vec<BlobPtr>,
    /// Keys that lead to damaged nodes, ascending: from the first key on, below the second one if there is one.
    damaged: Vec<(TreeKey, Option<TreeKey>)>,
}

impl LossSurvey {
    /// Returns whether some key in `from..to` may be lost.
    fn may_have_lost(&self, from: &[u8], to: &[u8]) -> bool {
        let first = self.damaged.partition_point(|(_, high)| high.as_ref().is_some_and(|high| high[..] <= *from));
        self.damaged.get(first).is_some_and(|(low, _)| low[..] < *to)
    }

    fn add(&mut self, place: impl Into<String>, problem: impl Into<String>) {
        self.losses.push((place.into(), problem.into()));
    }

    /// Counts a block of an object, by its location. `mine` are the object's blocks and blobs so far, which its states
    /// share.
    fn count_block(&mut self, core: &Core, location: u64, mine: &mut CountedLocations) -> Result<()> {
        if !mine.blocks.insert(location) {
            return Ok(());
        }
        let mut data = BlobPtr { addr: byte_of(location), len: BLOCK as u32, crc: 0 };
        if let Some(blob) = BlobSlot::of(location) {
            self.left.blob_logical += BLOCK as u64;
            if !mine.blobs.insert(blob.at(0).location()) {
                return Ok(());
            }
            data = blob.ptr(0);
            self.left.blob_stored += u64::from(data.len);
        }
        let geometry = core.segments.borrow().geometry;
        let segment = geometry.segment_of_byte(data.addr).filter(|_| geometry.contains_blob(data));
        let segment = segment.ok_or_else(|| corrupt(format!("data at byte {} is outside the segments", data.addr)))?;
        if !self.left.mark(segment, geometry.segment_size, data) {
            return Err(corrupt(format!("data at byte {} belongs to two objects", data.addr)));
        }
        self.left.live[segment as usize] += u64::from(data.len);
        Ok(())
    }

    /// Returns the live bytes of each segment that are left, with those of `nodes`.
    fn live_with(&self, core: &Core, nodes: &[BlobPtr]) -> Result<Vec<u64>> {
        let mut live = self.left.live.clone();
        nodes.iter().try_for_each(|&ptr| count_blob(core, &mut live, ptr))?;
        Ok(live)
    }

    fn is_empty(&self) -> bool {
        self.losses.is_empty() && self.changes.is_empty()
    }
}

/// Blocks and blobs of an object that were counted, by their locations.
#[derive(Default)]
struct CountedLocations {
    blocks: BTreeSet<u64>,
    blobs: BTreeSet<u64>,
}

fn count_blob(core: &Core, live: &mut [u64], ptr: BlobPtr) -> Result<()> {
    let geometry = core.segments.borrow().geometry;
    let segment = geometry.segment_of_byte(ptr.addr).filter(|_| geometry.contains_blob(ptr));
    let outside = || corrupt(format!("a pointer to byte {}, outside the segments", ptr.addr));
    live[segment.ok_or_else(outside)? as usize] += u64::from(ptr.len);
    Ok(())
}

/// Returns the number at `at` of a key; 0 if it is shorter.
fn number_at(key: &[u8], at: usize) -> u64 {
    key.get(at..at + 8).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().expect("8 bytes")))
}

/// Returns the name in a name key, as reports show it.
fn name_of(key: &[u8]) -> String {
    let namespace_len = key.get(1..3).map_or(0, |len| usize::from(u16::from_be_bytes([len[0], len[1]])));
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
    let (namespace, name) = (text(key.get(3..3 + namespace_len)), text(key.get(3 + namespace_len..)));
    ObjectName::in_namespace(namespace.as_str().into(), &name).to_string()
}

/// Node sink of pruning: appends nodes to the log. Live bytes are counted afterwards.
struct PrunedNodes {
    log: Rc<StoreLog>,
}

impl NodeSink for PrunedNodes {
    fn write(&self, node: &Node, key: &[u8], bytes: &[u8]) -> BlobPtr {
        let len = bytes.len() as u32;
        self.log.append_blob(bytes, |at| StoreEntry::Node { level: node.level(), at, len, key: key.to_vec() })
    }

    fn release(&self, _: BlobPtr) {}

    fn pause(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(async {
            match self.log.is_congested() {
                true => self.log.wait_uncongested().await,
                false => yield_now().await,
            }
        })
    }
}

impl Core {
    /// Determines what the damaged parts of the index have lost, and what is left. Nothing is changed.  Calls `progress`
    /// with (objects done, objects in total).
    ///
    /// # Errors
    /// Errors of the device that may be transient, and `Corrupt` if what is left contradicts itself.
    pub async fn survey_losses(&self, progress: &mut impl FnMut(u64, u64)) -> Result<LossSurvey> {
        let mut survey = LossSurvey {
            losses: Vec::new(),
            changes: BTreeMap::new(),
            objects: 0,
            names_lost: 0,
            left: Ledger::of(&self.segments.borrow().geometry),
            nodes: Vec::new(),
            damaged: Vec::new(),
        };
        // Names sort before records.
        let (mut named, mut records, mut unnamed) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        let mut told = HashSet::new();
        let mut scan = self.index.scan();
        while let Some(found) = scan.next().await? {
            let (ptr, node) = match found {
                ScannedNode::Intact(ptr, node) => (ptr, node),
                ScannedNode::Damaged { ptr, keys, error } => {
                    if told.insert(ptr.addr) {
                        survey.add("the tree", format!("a node is lost, with all below it: {error}"));
                    }
                    survey.damaged.push(keys);
                    continue;
                }
            };
            survey.nodes.push(ptr);
            let Node::Leaf(pairs) = &*node else { continue };
            for (key, value) in pairs {
                match key.first() {
                    Some(b'n') => {
                        named.extend(value[..].try_into().map(u64::from_le_bytes));
                    }
                    Some(b'o') => {
                        let oid = number_at(key, 1);
                        if let Some(name) = self.survey_object(oid, value, &mut survey).await? {
                            records.insert(oid);
                            if !named.contains(&oid) {
                                unnamed.push((oid, name));
                            }
                        }
                        progress(records.len() as u64, self.counters.objects());
                    }
                    _ => {}
                }
            }
        }
        // Changes that are not in the tree yet, of a store that was opened for reading.
        for (key, value) in self.index.changes() {
            if let (Some(b'n'), Some(Ok(oid))) = (key.first(), value.map(|value| value[..].try_into())) {
                let oid = u64::from_le_bytes(oid);
                named.insert(oid);
                if let Some(object) = self.objects.by_oid(oid)
                    && records.insert(oid)
                {
                    survey.objects += u64::from(object.state().exists);
                }
            }
        }
        for (oid, name) in unnamed {
            let key = keys::name(&name);
            if let Ok(Some(other)) = self.index.lookup(&key).await
                && other != oid.to_le_bytes()
            {
                return Err(corrupt(format!("object {oid} is named {name}, and so is another one")));
            }
            survey.changes.insert(key, Some(oid.to_le_bytes().to_vec()));
        }
        self.survey_leftovers(&records, &mut survey).await?;
        let missing = self.counters.objects().saturating_sub(survey.objects + survey.names_lost);
        if missing > 0 && !survey.damaged.is_empty() {
            survey.add("objects", format!("at least {missing} are lost, together with their names"));
        }
        if survey.may_have_lost(b"r", b"t") {
            survey.add(
                "snapshots",
                "which ones are being removed may be lost: their clones then stay until their objects are removed",
            );
        }
        Ok(survey)
    }

    /// Counts what an object record refers to. Returns the object's name, or `None` if the record cannot be used.
    async fn survey_object(&self, oid: u64, record: &[u8], survey: &mut LossSurvey) -> Result<Option<ObjectName>> {
        let mut onode = match Onode::decode(record) {
            Ok(onode) => onode,
            Err(error) => {
                survey.add(format!("object {oid}"), format!("its record cannot be used: {error}"));
                survey.changes.insert(keys::object(oid), None);
                return Ok(None);
            }
        };
        let name = ObjectName::in_namespace(onode.namespace.as_str().into(), &onode.name);
        let mut mine = CountedLocations::default();
        let mut lost_pages = 0;
        let maps = onode.clones.iter_mut().map(|clone| &mut clone.pages).chain([&mut onode.pages]);
        for ptr in maps.flatten().filter(|ptr| !ptr.is_none()) {
            count_blob(self, &mut survey.left.live, *ptr)?;
            let read = async || {
                let bytes = self.media.read_blob(*ptr, "a map page").await?;
                page::decode(&bytes).map_err(|error| corrupt(format!("{name}: {error}")))
            };
            let slots = match ptr.crc == LOST_CRC {
                true => read().await,
                false => read_unless_damaged(&self.media, read).await?,
            };
            match slots {
                Ok(slots) => {
                    for slot in slots.iter().filter(|slot| slot.block != 0) {
                        survey.count_block(self, slot.block, &mut mine)?;
                    }
                }
                // Its blocks cannot be counted. It must not become readable again: their space is freed.
                Err(_) => {
                    lost_pages += u32::from(ptr.crc != LOST_CRC);
                    ptr.crc = LOST_CRC;
                }
            }
        }
        if lost_pages > 0 {
            survey
                .add(name.to_string(), format!("{lost_pages} pages of its map are lost: reading there keeps failing"));
            survey.changes.insert(keys::object(oid), Some(onode.encode()));
        }
        let kv = keys::with_number(b'k', oid);
        if (onode.has_kv || !onode.clones.is_empty()) && survey.may_have_lost(&kv, &keys::after(&kv)) {
            survey.add(name.to_string(), "some of its keys may be lost: they are then absent");
        }
        for (clone, snap) in onode.clones.iter().flat_map(|clone| clone.snaps.iter().map(move |snap| (clone.id, *snap)))
        {
            let key = keys::snap_object(snap, oid);
            match self.index.lookup(&key).await {
                Ok(Some(_)) => {}
                Ok(None) => {
                    tracing::warn!(
                        "{name}: the record of snapshot {snap} for clone {clone} is missing; it is restored"
                    );
                    survey.changes.insert(key, Some(Vec::new()));
                }
                Err(_) => {
                    survey.changes.insert(key, Some(Vec::new()));
                }
            }
        }
        survey.objects += u64::from(onode.exists);
        Ok(Some(name))
    }

    /// Finds the records of objects whose own record is lost.
    async fn survey_leftovers(&self, records: &BTreeSet<u64>, survey: &mut LossSurvey) -> Result<()> {
        let mut scan = self.index.scan();
        let mut lost_keys: BTreeMap<u64, u64> = BTreeMap::new();
        while let Some(found) = scan.next().await? {
            let ScannedNode::Intact(_, node) = found else { continue };
            let Node::Leaf(pairs) = &*node else { continue };
            for (key, value) in pairs {
                let oid = match key.first() {
                    Some(b'n') => value[..].try_into().map(u64::from_le_bytes).unwrap_or(0),
                    Some(b'k' | b'x') => number_at(key, 1),
                    Some(b'm') => number_at(key, 9),
                    _ => continue,
                };
                if records.contains(&oid) || survey.changes.get(&key[..]).is_some_and(Option::is_some) {
                    continue;
                }
                match key[0] {
                    b'n' => {
                        survey.names_lost += 1;
                        survey.add(name_of(key), RECORD_LOST);
                    }
                    b'k' | b'x' => *lost_keys.entry(oid).or_default() += 1,
                    _ => {}
                }
                survey.changes.insert(key.to_vec(), None);
            }
        }
        for (oid, count) in lost_keys {
            survey.add(format!("object {oid}"), format!("{count} keys of this lost object are dropped"));
        }
        Ok(())
    }

    /// Drops what the damaged parts of the index have lost, and recounts the live bytes.  The store has no tasks and
    /// no users, and the caller takes the checkpoint that makes the changes durable. Returns the losses and the number
    /// of bytes that were counted as live and are not.
    ///
    /// # Errors
    /// As [`survey_losses`](Self::survey_losses). Nothing is lost then that was not before.
    pub async fn drop_lost(&self, progress: &mut impl FnMut(u64, u64)) -> Result<(Vec<Loss>, u64)> {
        // Everything is in the tree afterwards.
        self.checkpoint(false).await?;
        let mut survey = self.survey_losses(progress).await?;
        let found = survey.live_with(self, &survey.nodes)?;
        let counted = self.segments.borrow().live_table().all().to_vec();
        if let Some(segment) = (0..found.len()).find(|&segment| found[segment] > u64::from(counted[segment])) {
            let text = format!(
                "segment {segment} has {} live bytes, and {} are counted: parts of it may be overwritten already; export \
                 what can be read, create the store again, and import that",
                found[segment], counted[segment]
            );
            return Err(corrupt(text));
        }
        self.index.prune(&PrunedNodes { log: self.log() }).await?;
        let mut nodes = Vec::new();
        let mut scan = self.index.scan();
        while let Some(found) = scan.next().await? {
            match found {
                ScannedNode::Intact(ptr, _) => nodes.push(ptr),
                ScannedNode::Damaged { error, .. } => return Err(error),
            }
        }
        let live = survey.live_with(self, &nodes)?;
        for (key, value) in std::mem::take(&mut survey.changes) {
            self.index.put(key, value);
        }
        let mut segments = self.segments.borrow_mut();
        let geometry = segments.geometry;
        let live = LiveTable::of_counts(&live, &geometry).map_err(|error| corrupt(error.to_string()))?;
        let freed = segments.live_bytes().saturating_sub(live.total());
        segments.recount(live);
        drop(segments);
        self.counters.set_objects(survey.objects);
        self.blobs.recount(survey.left.blob_logical, survey.left.blob_stored);
        Ok((survey.losses, freed))
    }
}

impl Store {
    /// Drops what damaged parts of the index of a store have lost, if `force` is set. Without it, the losses
    /// are reported and nothing is written.  Returns whether the check goes on.
    pub(crate) async fn drop_lost(
        place: StorePlace<'_>,
        force: bool,
        report: &mut CheckReport,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<bool> {
        let options = StoreOptions { read_only: true, data_cache: 0, ..StoreOptions::default() };
        let store = place.open(options).await?;
        let core = store.core.clone();
        let survey = core.survey_losses(progress).await?;
        let found: u64 = survey.live_with(&core, &survey.nodes)?.iter().sum();
        // Changes that were replayed are not in the tree, so that they cannot be compared.
        let unreferenced = match store.stats().replay.batches {
            0 => store.stats().used.saturating_sub(found),
            _ => 0,
        };
        if survey.is_empty() && unreferenced == 0 {
            return Ok(true);
        }
        let mut losses = survey.losses;
        drop((core, store));
        if force {
            let options = StoreOptions { data_cache: 0, without_master_key: true, ..StoreOptions::default() };
            let store = place.open(options).await?;
            (losses, report.freed_bytes) =
                store.close_after(async |core: &Rc<Core>| core.drop_lost(progress).await).await?;
        } else if unreferenced > 0 {
            losses.push(("segments".into(), format!("{unreferenced} bytes are in use, and nothing refers to them")));
        }
        let finding = |(place, problem)| Finding { place, problem, repaired: force };
        report.findings.extend(losses.into_iter().map(finding));
        report.waits_for_force = !force;
        Ok(force)
    }
}
