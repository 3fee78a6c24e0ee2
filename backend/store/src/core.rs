//! Store state and shared operations: object lookup, page loading, dirty tracking.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result};
use forebay_reactor::sync::Semaphore;

use crate::blobs::BlobCounters;
use crate::checkpoint_state::CheckpointState;
use crate::columns::MoveState;
use crate::counters::StoreCounters;
use crate::crypt::VolumeKeys;
use crate::dirty::DirtyObjects;
use crate::features::StoreFeatures;
use crate::format::BlobPtr;
use crate::format::anchor::Anchor;
use crate::format::blob::{BlobSlot, byte_of};
use crate::format::entry::StoreEntry;
use crate::format::onode::Onode;
use crate::format::page::{self, MapSlot};
use crate::format::superblock::StoreSuperblock;
use crate::gc::GcState;
use crate::host::{HostFileSystem, LogBytes};
use crate::index::MetadataIndex;
use crate::keys;
use crate::log::StoreLog;
use crate::maintenance::Maintenance;
use crate::map::Map;
use crate::media::Media;
use crate::object::{HEAD, ObjectCache, StoreObject};
use crate::policies::DataPolicies;
use crate::queue::TransactionQueues;
use crate::scrub::ScrubState;
use crate::segments::Segments;
use crate::space::SegmentSpace;
use crate::sparse::SparseBlobs;
use crate::tree::Tree;

/// State of an open store, except the tasks that serve it.  Each part owns the state that its invariants are about.
pub struct Core {
    pub superblock: StoreSuperblock,
    pub media: Rc<Media>,
    pub segments: Rc<RefCell<Segments>>,
    /// Log that is written; none if the store is open read-only, or not yet.
    log: OnceCell<Rc<StoreLog>>,
    pub objects: ObjectCache,
    pub index: MetadataIndex,
    pub dirty: DirtyObjects,
    pub counters: StoreCounters,
    pub blobs: BlobCounters,
    pub sparse: SparseBlobs,
    pub policies: DataPolicies,
    pub volume_keys: VolumeKeys,
    pub features: StoreFeatures,
    pub checkpoints: CheckpointState,
    pub space: SegmentSpace,
    pub gc: GcState,
    pub queues: Rc<TransactionQueues>,
    pub maintenance: Maintenance,
    pub scrub: ScrubState,
    pub moves: MoveState,
    /// Permit of changing the size of the store, or its devices.
    pub resizing: Semaphore,
    pub read_only: bool,
}

/// Returns a `Corrupt` error that describes a damaged structure and its location.
pub fn corrupt(text: impl AsRef<str>) -> Error {
    Error::new(ErrorKind::Corrupt, text)
}

impl Core {
    /// Creates the state as of a checkpoint.  `metadata_cache` is the memory for metadata in bytes.
    pub fn new(
        superblock: StoreSuperblock,
        anchor: &Anchor,
        media: Rc<Media>,
        segments: Rc<RefCell<Segments>>,
        metadata_cache: usize,
        read_only: bool,
    ) -> Self {
        let geometry = segments.borrow().geometry;
        let file = media.device.file().filter(|_| !read_only);
        let host = file.and_then(|file| HostFileSystem::new(file, superblock.device_size()));
        Self {
            index: MetadataIndex::new(Tree::new(media.clone(), metadata_cache / 6), anchor.root),
            objects: ObjectCache::new(metadata_cache / 2),
            media,
            log: OnceCell::new(),
            dirty: DirtyObjects::default(),
            counters: StoreCounters::of(anchor),
            blobs: BlobCounters::default(),
            sparse: SparseBlobs::default(),
            policies: DataPolicies::default(),
            volume_keys: VolumeKeys::new(&superblock),
            features: StoreFeatures::of(&superblock),
            checkpoints: CheckpointState::of(anchor, &geometry, metadata_cache * 2 / 5),
            space: SegmentSpace::new(segments.clone(), host),
            segments,
            gc: GcState::default(),
            queues: Rc::default(),
            maintenance: Maintenance::default(),
            scrub: ScrubState::default(),
            moves: MoveState::default(),
            resizing: Semaphore::new(1),
            read_only,
            superblock,
        }
    }

    /// Attaches the log of a store that is opened for writing.
    pub fn attach_log(&self, log: Rc<StoreLog>) {
        self.media.attach_log(log.clone());
        let attached = self.log.set(log);
        assert!(attached.is_ok(), "a store has one log");
    }

    /// Returns the log; `None` if the store is open read-only, or not yet.
    pub fn attached_log(&self) -> Option<&Rc<StoreLog>> {
        self.log.get()
    }

    /// Returns the log.
    ///
    /// # Panics
    /// When none is attached.
    pub fn log(&self) -> Rc<StoreLog> {
        self.log.get().cloned().expect("the log is attached when the store is open for writing")
    }

    /// Returns the byte counts of the log; zero without one.
    pub fn log_bytes(&self) -> LogBytes {
        let (appended, pending) = self.log.get().map_or((0, 0), |log| (log.bytes_appended(), log.bytes_pending()));
        LogBytes { appended, pending }
    }

    /// Finds an object by name. Returns `None` if there is none; a removed object that has clones still counts as one.
    pub async fn find(&self, name: &ObjectName) -> Result<Option<Rc<StoreObject>>> {
        loop {
            if let Some(object) = self.objects.by_name(name) {
                return Ok(Some(object));
            }
            let Some(value) = self.index.lookup(&keys::name(name)).await? else {
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
                    .index
                    .lookup_cached(&keys::name(name))
                    .is_none_or(|found| found != Some(oid.to_le_bytes().into())) => {}
                _ => return Err(corrupt(format!("{name} is object {oid}, which is not there"))),
            }
        }
    }

    /// Finds an object like [`find`](Self::find), without waiting. The outer `None` means that metadata must be read
    /// first.
    pub fn find_cached(&self, name: &ObjectName) -> Option<Option<Rc<StoreObject>>> {
        if let Some(object) = self.objects.by_name(name) {
            return Some(Some(object));
        }
        match self.index.lookup_cached(&keys::name(name))? {
            None => Some(None),
            Some(_) => None,
        }
    }

    /// Finds an object by number.
    pub async fn by_oid(&self, oid: u64) -> Result<Option<Rc<StoreObject>>> {
        if let Some(object) = self.objects.by_oid(oid) {
            return Ok(Some(object));
        }
        let Some(bytes) = self.index.lookup(&keys::object(oid)).await? else { return Ok(self.objects.by_oid(oid)) };
        if let Some(object) = self.objects.by_oid(oid) {
            return Ok(Some(object));
        }
        let onode = Onode::decode(&bytes).map_err(|error| corrupt(format!("object {oid}: {error}")))?;
        self.check_onode(oid, &onode)?;
        self.objects.shrink(self.index.changes_bytes());
        Ok(Some(self.objects.insert(StoreObject::from_onode(oid, onode))))
    }

    /// Returns the pages that must be read before blocks `start..start + count` can be accessed, in the head (`of` =
    /// [`HEAD`]) or a clone, or in the head and all clones if `all`.
    fn missing_pages(object: &StoreObject, of: u64, all: bool, start: u32, count: u32) -> Vec<(u64, u32, BlobPtr)> {
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
    fn check_slots(&self, object: &StoreObject, slots: &[MapSlot]) -> Result<()> {
        let geometry = self.segments.borrow().geometry;
        let is_stray = |slot: &&MapSlot| match BlobSlot::of(slot.block) {
            Some(blob) => !geometry.contains_blob(blob.ptr(slot.crc)),
            None => slot.block != 0 && geometry.segment_of(slot.block).is_none(),
        };
        slots.iter().find(is_stray).map_or(Ok(()), |slot| {
            let at = byte_of(slot.block);
            Err(corrupt(format!("{}: a map page points to byte {at}, outside the segments", object.name)))
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

    fn is_missing(object: &StoreObject, of: u64, index: u32, ptr: BlobPtr) -> bool {
        let state = object.state();
        let page = state.map_of(of).and_then(|map| map.pages().get(index as usize));
        page.is_some_and(|page| page.is_missing(ptr))
    }

    /// Returns whether blocks `start..start + count` can be changed without reading pages first.
    pub fn is_loaded(object: &StoreObject, start: u32, count: u32) -> bool {
        let state = object.state();
        state.head.missing(start, count).next().is_none()
            && state.clones.iter().all(|clone| clone.map.missing(start, count).next().is_none())
    }

    /// Reads the map pages of blocks `start..start + count` of one state (head or clone), or of `all` of them.
    pub async fn load_pages(&self, object: &StoreObject, of: u64, all: bool, start: u32, count: u32) -> Result<()> {
        loop {
            let missing = Self::missing_pages(object, of, all, start, count);
            if missing.is_empty() {
                return Ok(());
            }
            for (of, index, ptr) in missing {
                self.counters.add_page_load();
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
                let Some(page) = map.page_mut(index) else { continue };
                page.load(ptr, slots);
            }
            self.objects.reweigh(object);
            self.objects.shrink(self.index.changes_bytes());
        }
    }

    /// Marks an object dirty. Must be called before the object is changed: the checkpoint in progress stores the old
    /// state, the next one stores the new state.
    pub fn mark_dirty(&self, object: &Rc<StoreObject>) {
        if self.dirty.contains(object) {
            return;
        }
        if object.is_dirty() {
            self.store_object(object);
        }
        self.dirty.add(object);
    }

    /// Passes an object's changed pages and its record to the checkpoint in progress.
    pub fn store_object(&self, object: &Rc<StoreObject>) {
        object.set_clean();
        let key = keys::object(object.oid);
        if object.is_gone() {
            self.index.put_frozen(key, None);
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
        self.index.put_frozen(key, Some(record));
    }

    fn store_pages(&self, oid: u64, of: u64, map: &mut Map) {
        let log = self.log();
        for (index, page) in map.dirty_pages_mut() {
            self.dirty.sub_page();
            let before = page.begin_store();
            if !before.is_none() {
                self.segments.borrow_mut().sub_checkpoint_blob(before);
            }
            let Some(bytes) = page.encode() else { continue };
            let len = bytes.len() as u32;
            let ptr = log.append_blob(&bytes, |at| StoreEntry::Page { oid, of, index, at, len });
            page.end_store(ptr);
            self.segments.borrow_mut().add_checkpoint_blob(ptr);
        }
    }

    /// Remaps a block of an object's head (or unmaps it) and updates the live counts.
    /// The caller has already counted the new block.
    pub fn remap(&self, object: &StoreObject, block: u32, slot: MapSlot) {
        let mut state = object.state_mut();
        let was_dirty = state.head.is_dirty(block);
        let before = state.head.set(block, slot);
        if state.head.is_dirty(block) && !was_dirty {
            self.dirty.add_pages(1);
        }
        if before.block != 0
            && before.block != slot.block
            && !state.is_shared(HEAD, block, before)
            && self.release(&state, block, before, None)
        {
            self.note_sparse(object.oid, &state, block, before);
        }
    }
}
