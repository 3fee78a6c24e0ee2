//! Store state and shared operations: object lookup, page loading, dirty tracking.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result};
use forebay_reactor::sync::Notify;

use crate::format::entry::Entry;
use crate::format::onode::Onode;
use crate::format::page::{self, Slot};
use crate::format::superblock::Superblock;
use crate::format::{BlobPtr, PAGE_BLOCKS};
use crate::host::{Host, LogBytes};
use crate::log::Log;
use crate::media::Media;
use crate::merge::merged;
use crate::object::{HEAD, Map, Object, ObjectCache};
use crate::queue::TransactionQueues;
use crate::segments::Segments;
use crate::tree::{Change, Key, Tree};

/// Keys of the metadata tree: one byte for the record type, then the sort fields.
pub mod keys {
    use forebay_block::ObjectName;

    /// Returns the key of a name record, which maps an object name to its number.
    pub fn name(name: &ObjectName) -> Vec<u8> {
        let mut key = name_space(name.namespace());
        key.extend_from_slice(name.name().as_bytes());
        key
    }

    /// Returns the common prefix of all name keys of a namespace.
    pub fn name_space(namespace: &str) -> Vec<u8> {
        let mut key = vec![b'n'];
        key.extend_from_slice(&(namespace.len() as u16).to_be_bytes());
        key.extend_from_slice(namespace.as_bytes());
        key
    }

    /// Returns the key of an object record (onode), by object number.
    pub fn object(oid: u64) -> Vec<u8> {
        with_number(b'o', oid)
    }

    /// Returns the key of a key-value pair that belongs to an object's head or to a clone.
    pub fn kv(oid: u64, of: u64, key: &[u8]) -> Vec<u8> {
        let mut out = with_number(b'k', oid);
        out.extend_from_slice(&of.to_be_bytes());
        out.extend_from_slice(key);
        out
    }

    /// Returns the key of a lost-value marker. The value of that [`kv`] key was damaged before it was stored in the
    /// tree.
    pub fn kv_lost(oid: u64, of: u64, key: &[u8]) -> Vec<u8> {
        let mut out = kv(oid, of, key);
        out[0] = b'x';
        out
    }

    /// Returns the key of a snapshot-to-object record: the object has a clone that represents the snapshot.
    pub fn snap_object(snap: u64, oid: u64) -> Vec<u8> {
        let mut out = with_number(b'm', snap);
        out.extend_from_slice(&oid.to_be_bytes());
        out
    }

    /// Returns the key of a snapshot whose removal is in progress.
    pub fn snap_going(snap: u64) -> Vec<u8> {
        with_number(b's', snap)
    }

    /// Returns the key of a snapshot whose removal is in progress or complete.
    pub fn snap_removed(snap: u64) -> Vec<u8> {
        with_number(b'r', snap)
    }

    pub fn with_number(kind: u8, number: u64) -> Vec<u8> {
        let mut key = Vec::with_capacity(9 + 16);
        key.push(kind);
        key.extend_from_slice(&number.to_be_bytes());
        key
    }

    /// Returns the first key after all keys that begin with `prefix`.
    pub fn after(prefix: &[u8]) -> Vec<u8> {
        let mut end = prefix.to_vec();
        while let Some(last) = end.pop() {
            if last < 0xFF {
                end.push(last + 1);
                return end;
            }
        }
        vec![0xFF; 32]
    }
}

/// Approximate memory overhead of a changed key, in bytes, in addition to the key and its value.
const PAIR_WEIGHT: usize = 96;
/// Minimum number of keys read from the tree at a time.
const KV_PAGE_MIN: usize = 64;

/// Changes since the last checkpoint, by tree key; `None` marks a deletion.
pub type Overlay = BTreeMap<Key, Option<Vec<u8>>>;

/// State of an open store, except the tasks that serve it.
pub struct Core {
    pub superblock: Superblock,
    pub media: Rc<Media>,
    pub segments: Rc<RefCell<Segments>>,
    pub log: RefCell<Option<Rc<Log>>>,
    pub objects: ObjectCache,
    pub tree: Tree,
    pub root: Cell<BlobPtr>,
    /// Changes since the checkpoint in progress began (or the last one).
    pub overlay: RefCell<Overlay>,
    pub overlay_bytes: Cell<usize>,
    /// Changes that the checkpoint in progress is writing to the tree.
    pub frozen: RefCell<Overlay>,
    pub frozen_bytes: Cell<usize>,
    /// Objects changed in this round. The next checkpoint stores them.
    pub dirty: RefCell<Vec<Rc<Object>>>,
    pub dirty_pages: Cell<usize>,
    /// Checkpoint round: number of checkpoints since the store was opened. Objects record the round they changed in.
    pub round: Cell<u64>,
    pub checkpointing: Cell<bool>,
    /// Set if the tree may contain markers of keys whose values were lost.
    pub has_lost_keys: Cell<bool>,
    pub touched_nodes: RefCell<BTreeSet<Key>>,
    pub generation: Cell<u64>,
    pub epoch: Cell<u64>,
    pub next_oid: Cell<u64>,
    pub snap_seq: Cell<u64>,
    /// Newest object version assigned. Versions of one name never repeat.
    pub version: Cell<u64>,
    pub object_count: Cell<u64>,
    pub user_bytes: Cell<u64>,
    pub device_bytes_before: Cell<u64>,
    /// Location of the segment table of the durable anchor.
    pub table_at: Cell<BlobPtr>,
    /// Replay start (redo point) of the last checkpoint, in bytes appended to the log.
    pub appended_at_redo: Cell<u64>,
    pub queues: Rc<TransactionQueues>,
    /// Set when garbage collection is stalled: the cleaner found nothing to gain, and nothing has been freed since.
    pub stuck: Cell<bool>,
    /// Bytes appended to the log when garbage collection stalled.
    pub stuck_at: Cell<u64>,
    /// Progress of cleaning: user bytes written, most free segments after a cleaning round since then, and rounds since
    /// then that did not exceed it.
    pub futile: Cell<(u64, u32, u32)>,
    /// Free segments wanted by waiting writers, in addition to the reserve watermark.
    pub room_wanted: Cell<u32>,
    pub capacity: u64,
    /// Bytes appended to the log after which a checkpoint is due.
    pub checkpoint_interval: u64,
    /// Bytes of changed metadata in memory at which a checkpoint is due.
    pub dirty_max: usize,
    /// Reserve watermark, in free segments. At or below it, user writes wait for the cleaner.
    pub gate: u32,
    /// Segments that the cleaner emptied in its last round.
    pub last_victims: RefCell<BTreeSet<u32>>,
    pub closing: Cell<bool>,
    /// Error of the last checkpoint or cleaning round; `None` if it succeeded.
    pub upkeep_failure: RefCell<Option<Error>>,
    /// Signals changes in space, checkpoints or throttling that a task may wait for.
    pub changed: Notify,
    pub wake_cleaner: Notify,
    /// Signals that a snapshot was removed, or that the store is closing.
    pub snaps_changed: Notify,
    pub cleaned_bytes: Cell<u64>,
    pub checkpoints: Cell<u64>,
    pub loads: Cell<u64>,
    /// Stored pairs that range lookups have scanned, including pairs deleted since the last checkpoint.
    pub pairs_looked_at: Cell<u64>,
    pub read_only: bool,
    /// File system that holds the store file; `None` unless the store is in a file.
    pub host: Option<Rc<Host>>,
}

/// Returns a `Corrupt` error that describes a damaged structure and its location.
pub fn corrupt(text: impl AsRef<str>) -> Error {
    Error::new(ErrorKind::Corrupt, text)
}

impl Core {
    pub fn log(&self) -> Rc<Log> {
        self.log.borrow().clone().expect("the log is attached when the store is open for writing")
    }

    /// Looks up a key in memory, including changes since the last checkpoint. Returns `None` if a tree node must be
    /// read first.
    pub fn lookup_cached(&self, key: &[u8]) -> Option<Option<Vec<u8>>> {
        if let Some(value) = self.overlay.borrow().get(key) {
            return Some(value.clone());
        }
        if let Some(value) = self.frozen.borrow().get(key) {
            return Some(value.clone());
        }
        self.tree.get_cached(self.root.get(), key)
    }

    /// Looks up a key, including changes since the last checkpoint.
    pub async fn lookup(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(value) = self.lookup_cached(key) {
                return Ok(value);
            }
            let root = self.root.get();
            let found = match self.tree.get(root, key).await {
                Ok(found) => found,
                // A checkpoint may have completed meanwhile; the nodes of the old root may be freed.
                Err(_) if root != self.root.get() => continue,
                Err(error) => return Err(error),
            };
            // A result found under the old root may be stale.
            if root == self.root.get()
                && !self.overlay.borrow().contains_key(key)
                && !self.frozen.borrow().contains_key(key)
            {
                return Ok(found);
            }
        }
    }

    /// Returns up to `wanted` pairs with keys in `from..to`, in key order, including changes since the last checkpoint.
    pub async fn lookup_range(&self, from: &[u8], to: &[u8], wanted: usize) -> Result<Vec<(Key, Vec<u8>)>> {
        let (mut from, mut out) = (from.to_vec(), Vec::new());
        while out.len() < wanted && &from[..] < to {
            // Reads at least a minimum page, so that pairs deleted since the checkpoint are skipped in few steps.
            let max = (wanted - out.len()).max(KV_PAGE_MIN);
            let root = self.root.get();
            let stored = match self.tree.range(root, &from, to, max).await {
                Ok(stored) => stored,
                Err(_) if root != self.root.get() => continue,
                Err(error) => return Err(error),
            };
            if root != self.root.get() {
                continue;
            }
            // The content of the tree beyond the last stored pair of a full page is unknown.
            let full = stored.len() == max;
            let mut upto: Key = to.to_vec();
            if full {
                upto.clone_from(&stored[max - 1].0);
                upto.push(0);
            }
            out.extend(self.with_changes(&stored, &from, &upto, max));
            if !full || out.len() >= wanted {
                break;
            }
            // Deletions may have removed part of the page. The remaining pairs are correct; continue behind them.
            from = upto;
        }
        out.truncate(wanted);
        Ok(out)
    }

    /// Merges the stored pairs in `from..to` with the changes since the last checkpoint, and returns the first `max`.
    fn with_changes(&self, stored: &[(Key, Vec<u8>)], from: &Key, to: &Key, max: usize) -> Vec<(Key, Vec<u8>)> {
        let (overlay, frozen) = (self.overlay.borrow(), self.frozen.borrow());
        let layers = [&overlay, &frozen].map(|layer| layer.range::<Key, _>(from..to)).into();
        let looked_at = |pair| {
            self.pairs_looked_at.set(self.pairs_looked_at.get() + 1);
            pair
        };
        let pairs = merged(stored.iter().map(|(key, value)| (key, value)).map(looked_at), layers);
        pairs.take(max).map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Sets a key, or deletes it if `value` is `None`. The next checkpoint writes the change to the tree.
    pub fn put(&self, key: Key, value: Option<Vec<u8>>) {
        let bytes = key.len() + value.as_ref().map_or(0, Vec::len) + PAIR_WEIGHT;
        self.overlay_bytes.set(self.overlay_bytes.get() + bytes);
        self.overlay.borrow_mut().insert(key, value);
    }

    /// Finds an object by name. Returns `None` if there is none; a removed object that has clones still counts as one.
    pub async fn find(&self, name: &ObjectName) -> Result<Option<Rc<Object>>> {
        loop {
            if let Some(object) = self.objects.by_name(name) {
                return Ok(Some(object));
            }
            let Some(value) = self.lookup(&keys::name(name)).await? else {
                match self.objects.by_name(name) {
                    Some(object) => return Ok(Some(object)),
                    None => return Ok(None),
                }
            };
            let oid = value.try_into().map(u64::from_le_bytes).map_err(|_| corrupt(format!("the number of {name}")))?;
            match self.by_oid(oid).await? {
                Some(object) if object.name == *name => return Ok(Some(object)),
                // Removed during the lookup.
                _ if self
                    .lookup_cached(&keys::name(name))
                    .is_none_or(|found| found != Some(oid.to_le_bytes().into())) => {}
                _ => return Err(corrupt(format!("{name} is object {oid}, which is not there"))),
            }
        }
    }

    /// Finds an object like [`find`](Self::find), without waiting. The outer `None` means that metadata must be read
    /// first.
    pub fn find_cached(&self, name: &ObjectName) -> Option<Option<Rc<Object>>> {
        if let Some(object) = self.objects.by_name(name) {
            return Some(Some(object));
        }
        match self.lookup_cached(&keys::name(name))? {
            None => Some(None),
            Some(_) => None,
        }
    }

    /// Finds an object by number.
    pub async fn by_oid(&self, oid: u64) -> Result<Option<Rc<Object>>> {
        if let Some(object) = self.objects.by_oid(oid) {
            return Ok(Some(object));
        }
        let Some(bytes) = self.lookup(&keys::object(oid)).await? else { return Ok(self.objects.by_oid(oid)) };
        if let Some(object) = self.objects.by_oid(oid) {
            return Ok(Some(object));
        }
        let onode = Onode::decode(&bytes).map_err(|error| corrupt(format!("object {oid}: {error}")))?;
        self.check_onode(oid, &onode)?;
        self.objects.shrink(self.changes_bytes());
        Ok(Some(self.objects.insert(Object::from_onode(oid, onode))))
    }

    /// Returns the pages that must be read before blocks `start..start + count` can be accessed, in the head (`of` =
    /// [`HEAD`]) or a clone, or in the head and all clones if `all`.
    fn missing_pages(object: &Object, of: u64, all: bool, start: u32, count: u32) -> Vec<(u64, u32, BlobPtr)> {
        let state = object.state();
        let mut out = Vec::new();
        if of == HEAD || all {
            out.extend(state.head.missing(start, count).map(|(index, ptr)| (HEAD, index, ptr)));
        }
        for clone in state.clones.iter().filter(|clone| all || clone.id == of) {
            out.extend(clone.map.missing(start, count).map(|(index, ptr)| (clone.id, index, ptr)));
        }
        out
    }

    /// Rejects slots that point to blocks outside the segments.
    fn check_slots(&self, object: &Object, slots: &[Slot]) -> Result<()> {
        let geometry = self.segments.borrow().geometry;
        let stray = slots.iter().find(|slot| slot.block != 0 && geometry.segment_of(slot.block).is_none());
        stray.map_or(Ok(()), |slot| {
            let block = slot.block;
            Err(corrupt(format!("{}: a map page points to block {block}, outside the segments", object.name)))
        })
    }

    fn check_onode(&self, oid: u64, onode: &Onode) -> Result<()> {
        let geometry = self.segments.borrow().geometry;
        let mut ptrs = onode.pages.iter().chain(onode.clones.iter().flat_map(|clone| &clone.pages));
        let stray = ptrs.find(|ptr| !ptr.is_none() && !geometry.contains_blob(**ptr));
        stray.map_or(Ok(()), |ptr| {
            Err(corrupt(format!("object {oid}: a map page at byte {}, outside the segments", ptr.addr)))
        })
    }

    fn is_missing(object: &Object, of: u64, index: u32, ptr: BlobPtr) -> bool {
        let state = object.state();
        let page = state.map_of(of).and_then(|map| map.pages().get(index as usize));
        page.is_some_and(|page| page.ptr == ptr && page.slots.is_none())
    }

    /// Returns whether blocks `start..start + count` can be changed without reading pages first.
    pub fn is_loaded(object: &Object, start: u32, count: u32) -> bool {
        let state = object.state();
        state.head.missing(start, count).next().is_none()
            && state.clones.iter().all(|clone| clone.map.missing(start, count).next().is_none())
    }

    /// Reads the map pages of blocks `start..start + count` of one state (head or clone), or of `all` of them.
    pub async fn load_pages(&self, object: &Object, of: u64, all: bool, start: u32, count: u32) -> Result<()> {
        loop {
            let missing = Self::missing_pages(object, of, all, start, count);
            if missing.is_empty() {
                return Ok(());
            }
            for (of, index, ptr) in missing {
                self.loads.set(self.loads.get() + 1);
                let bytes = match self.media.read_blob(ptr, "a map page").await {
                    Ok(bytes) => bytes,
                    // The page moved while it was read; the next iteration uses its new location.
                    Err(_) if !Self::is_missing(object, of, index, ptr) => continue,
                    Err(error) => return Err(error),
                };
                let slots = page::decode(&bytes).map_err(|error| corrupt(format!("{}: {error}", object.name)))?;
                self.check_slots(object, &slots)?;
                let mut state = object.state_mut();
                // Another task may have loaded, changed or dropped the page meanwhile.
                let Some(map) = state.map_of_mut(of) else { continue };
                let Some(page) = map.pages_mut().get_mut(index as usize) else { continue };
                if page.ptr == ptr && page.slots.is_none() {
                    page.slots = Some(slots);
                }
            }
            self.objects.reweigh(object);
            self.objects.shrink(self.changes_bytes());
        }
    }

    /// Marks an object dirty. Must be called before the object is changed: the checkpoint in progress stores the old
    /// state, the next one stores the new state.
    pub fn mark_dirty(&self, object: &Rc<Object>) {
        let round = self.round.get();
        let before = object.dirty_round.get();
        if before == round {
            return;
        }
        if before != 0 {
            self.store_object(object);
        }
        object.dirty_round.set(round);
        self.dirty.borrow_mut().push(object.clone());
    }

    /// Passes an object's changed pages and its record to the checkpoint in progress.
    pub fn store_object(&self, object: &Rc<Object>) {
        object.dirty_round.set(0);
        let key = keys::object(object.oid);
        if object.is_gone() {
            self.frozen.borrow_mut().insert(key, None);
            self.objects.remove(object);
            return;
        }
        let mut state = object.state_mut();
        self.store_pages(object.oid, HEAD, &mut state.head);
        for clone in &mut state.clones {
            self.store_pages(object.oid, clone.id, &mut clone.map);
        }
        drop(state);
        let record = object.to_onode().encode();
        self.frozen_bytes.set(self.frozen_bytes.get() + key.len() + record.len() + PAIR_WEIGHT);
        self.frozen.borrow_mut().insert(key, Some(record));
        object.recorded.set(true);
    }

    fn store_pages(&self, oid: u64, of: u64, map: &mut Map) {
        let log = self.log();
        for (index, page) in map.pages_mut().iter_mut().enumerate().filter(|(_, page)| page.dirty) {
            page.dirty = false;
            self.dirty_pages.set(self.dirty_pages.get().saturating_sub(1));
            let before = std::mem::take(&mut page.ptr);
            if !before.is_none() {
                self.segments.borrow_mut().sub_checkpoint_blob(before);
            }
            let slots = page.slots.as_deref().unwrap_or_default();
            if slots.iter().all(|slot| slot.block == 0) {
                page.slots = None;
                continue;
            }
            let bytes = page::encode(slots);
            let len = bytes.len() as u32;
            let entry = |at| Entry::Page { oid, of, index: index as u32, at, len };
            page.ptr = log.append_blob(&bytes, entry);
            self.segments.borrow_mut().add_checkpoint_blob(page.ptr);
        }
    }

    /// Remaps a block of an object's head (or unmaps it) and updates the live counts.
    /// The caller has already counted the new block.
    pub fn remap(&self, object: &Object, block: u32, slot: Slot) {
        let mut state = object.state_mut();
        let page = (block / PAGE_BLOCKS) as usize;
        let was_dirty = state.head.pages().get(page).is_some_and(|page| page.dirty);
        let before = state.head.set(block, slot);
        let is_dirty = state.head.pages().get(page).is_some_and(|page| page.dirty);
        if is_dirty && !was_dirty {
            self.dirty_pages.set(self.dirty_pages.get() + 1);
        }
        if before.block != 0 && before.block != slot.block && !state.is_shared(HEAD, block, before) {
            self.segments.borrow_mut().sub_block(before.block);
            self.media.cache.forget(before.block);
        }
    }

    /// Returns the bytes by which the store may grow in its file system, given a request for `wanted` bytes; `u64::MAX`
    /// if there is no such limit.
    pub fn host_room(&self, wanted: u64) -> u64 {
        let Some(host) = &self.host else { return u64::MAX };
        let log = self.log.borrow();
        let (appended, pending) = log.as_ref().map_or((0, 0), |log| (log.bytes_appended(), log.bytes_pending()));
        let in_use = || {
            let segments = self.segments.borrow();
            u64::from(segments.geometry.segment_count - segments.free_count()) * segments.geometry.segment_size
        };
        host.room(LogBytes { appended, pending }, in_use, wanted)
    }

    /// Returns whether the file system has space for growth of the store by `bytes` (at least 1).
    pub fn host_allows(&self, bytes: u64) -> bool {
        let bytes = bytes.max(1);
        self.host_room(bytes) >= bytes
    }

    /// Returns an error if the file system has no space for growth of the store by `bytes`.
    pub fn check_host(&self, bytes: u64) -> Result<()> {
        match &self.host {
            Some(host) if !self.host_allows(bytes) => Err(host.full()),
            _ => Ok(()),
        }
    }

    /// Returns the bytes that can still be stored.
    pub fn available(&self) -> u64 {
        let used = self.segments.borrow().live_bytes();
        self.capacity.saturating_sub(used)
    }

    /// Returns all changes of the checkpoint in progress, to be applied to the tree.
    pub fn frozen_changes(&self) -> Vec<(Key, Change)> {
        let frozen = self.frozen.borrow();
        let mut changes: BTreeMap<Key, Change> =
            self.touched_nodes.take().into_iter().map(|key| (key, Change::Touch)).collect();
        changes.extend(frozen.iter().map(|(key, value)| {
            let change = value.as_ref().map_or(Change::Delete, |value| Change::Put(value.clone()));
            (key.clone(), change)
        }));
        changes.into_iter().collect()
    }
}
