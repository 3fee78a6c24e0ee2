//! Application of log entries to the in-memory state, shared by writing and replay.
//!
//! All functions are synchronous: the pages that an entry needs have been loaded before ([`needs`]).

use std::rc::Rc;

use crate::core::Core;
use crate::format::blob::BlobSlot;
use crate::format::entry::StoreEntry;
use crate::format::page::MapSlot;
use crate::keys;
use crate::map::Map;
use crate::object::{CloneState, HEAD, StoreObject};

/// Returns the block range (start, count), in all states, whose pages must be in memory before an entry is applied.
pub fn needs(entry: &StoreEntry) -> Option<(u32, u32)> {
    match entry {
        StoreEntry::Write { start, crcs, .. } | StoreEntry::Relocate { start, crcs, .. } => {
            Some((*start, crcs.len() as u32))
        }
        StoreEntry::WriteBlob { blob, .. } | StoreEntry::RelocateBlob { blob, .. } => {
            Some((blob.start, blob.blocks.into()))
        }
        StoreEntry::Unmap { start, count, .. } => Some((*start, *count)),
        StoreEntry::Remove { .. }
        | StoreEntry::Clone { .. }
        | StoreEntry::CloneSnaps { .. }
        | StoreEntry::Rollback { .. } => Some((0, u32::MAX / 2)),
        _ => None,
    }
}

/// Returns the number of the object that an entry concerns.
pub fn subject(entry: &StoreEntry) -> Option<u64> {
    match entry {
        StoreEntry::Create { oid, .. }
        | StoreEntry::Write { oid, .. }
        | StoreEntry::Unmap { oid, .. }
        | StoreEntry::Remove { oid, .. }
        | StoreEntry::Clone { oid, .. }
        | StoreEntry::CloneSnaps { oid, .. }
        | StoreEntry::Rollback { oid, .. }
        | StoreEntry::KvSet { oid, .. }
        | StoreEntry::KvSetLong { oid, .. }
        | StoreEntry::KvRemove { oid, .. }
        | StoreEntry::Relocate { oid, .. }
        | StoreEntry::WriteBlob { oid, .. }
        | StoreEntry::RelocateBlob { oid, .. } => Some(*oid),
        StoreEntry::SnapAllocate { .. } | StoreEntry::SnapRemove { .. } | StoreEntry::Policy { .. } => None,
        // Metadata of a checkpoint, irrelevant to replay.
        StoreEntry::Page { .. }
        | StoreEntry::Node { .. }
        | StoreEntry::Segments { .. }
        | StoreEntry::Checkpoint { .. } => None,
    }
}

impl Core {
    /// Registers a new object.
    pub fn apply_create(&self, object: StoreObject) -> Rc<StoreObject> {
        if object.key != 0 {
            self.features.note_encryption();
        }
        self.counters.note_oid(object.oid);
        self.index.put(keys::name(&object.name), Some(object.oid.to_le_bytes().to_vec()));
        let object = self.objects.insert(object);
        self.mark_dirty(&object);
        object
    }

    /// Applies an entry for `object`. `first` is the device block number of the entry's blocks, or the sector number of its
    /// blob; `value` is the value of a `KvSetLong`, or `None` if it is lost.
    pub fn apply(&self, object: &Rc<StoreObject>, entry: &StoreEntry, first: u64, value: Option<Vec<u8>>) {
        self.mark_dirty(object);
        match entry {
            StoreEntry::Write { start, crcs, size, version, .. } => {
                self.segments.borrow_mut().add_blocks(first, crcs.len() as u32);
                for (i, &crc) in crcs.iter().enumerate() {
                    self.remap(object, start + i as u32, MapSlot { block: first + i as u64, crc });
                }
                self.set_shape(object, *size, *version);
            }
            StoreEntry::Unmap { start, count, size, version, .. } => {
                let end = (*start).saturating_add(*count).min(object.state().head.blocks());
                (*start..end).for_each(|block| self.remap(object, block, MapSlot::default()));
                self.set_shape(object, *size, *version);
                self.freed();
            }
            StoreEntry::Remove { version, .. } => self.apply_remove(object, *version),
            StoreEntry::Clone { seq, snaps, .. } => self.apply_clone(object, *seq, snaps),
            StoreEntry::CloneSnaps { clone, snaps, .. } => self.apply_clone_snaps(object, *clone, snaps),
            StoreEntry::Rollback { clone, version, .. } => self.apply_rollback(object, *clone, *version),
            StoreEntry::KvSet { of, key, value, .. } => {
                object.state_mut().has_kv |= *of == HEAD;
                self.index.put_kv(object.oid, *of, key, Some(value.clone()));
            }
            StoreEntry::KvSetLong { of, key, .. } => {
                object.state_mut().has_kv |= *of == HEAD;
                match value {
                    Some(value) => self.index.put_kv(object.oid, *of, key, Some(value)),
                    None => self.index.put_lost(object.oid, *of, key),
                }
            }
            StoreEntry::KvRemove { of, key, .. } => self.index.put_kv(object.oid, *of, key, None),
            StoreEntry::Relocate { start, old, crcs, .. } => {
                for (i, &crc) in crcs.iter().enumerate() {
                    let new = MapSlot { block: first + i as u64, crc };
                    self.apply_move(object, start + i as u32, old + i as u64, new);
                }
            }
            StoreEntry::WriteBlob { blob, size, version, .. } => {
                self.apply_blob(object, blob, first);
                self.set_shape(object, *size, *version);
            }
            StoreEntry::RelocateBlob { blob, old, .. } => self.apply_move_to_blob(object, blob, *old, first),
            _ => unreachable!("not about one object: {entry:?}"),
        }
        if !object.is_gone() {
            self.objects.reweigh(object);
        }
    }

    /// Applies an entry that concerns no single object.
    pub fn apply_global(&self, entry: &StoreEntry) {
        match entry {
            StoreEntry::SnapAllocate { snap } => self.counters.note_snap(*snap),
            StoreEntry::SnapRemove { snap, done } => {
                self.index.put(keys::snap_in_removal(*snap), (!done).then(Vec::new));
                self.index.put(keys::snap_removed(*snap), Some(Vec::new()));
            }
            StoreEntry::Policy { namespace, prefix, policy } => self.apply_policy(namespace, prefix, policy),
            _ => {}
        }
    }

    fn set_shape(&self, object: &StoreObject, size: u64, version: u64) {
        let mut state = object.state_mut();
        if !state.exists {
            state.exists = true;
            self.counters.add_object();
        }
        state.size = size;
        state.version = version;
        self.counters.note_version(version);
    }

    /// Records that space was freed, which ends a stall of garbage collection.
    pub fn freed(&self) {
        if self.gc.resume(self.counters.user_bytes()) {
            self.maintenance.wake();
            self.maintenance.notify_writers();
        }
    }

    /// Releases a map's page blobs, and the blocks that no other state references.
    fn drop_map(&self, object: &StoreObject, of: u64) {
        let mut state = object.state_mut();
        let map = match state.map_of_mut(of) {
            Some(map) => std::mem::take(map),
            None => return,
        };
        for block in 0..map.blocks() {
            let slot = map.get(block);
            if slot.block != 0 && !state.is_shared(of, block, slot) {
                let blob_left = self.release(&state, block, slot, Some(&map));
                if blob_left {
                    self.note_sparse(object.oid, &state, block, slot);
                }
            }
        }
        for page in map.pages() {
            if !page.ptr().is_none() {
                self.segments.borrow_mut().drop_blob(page.ptr());
            }
            if page.is_dirty() {
                self.dirty.sub_page();
            }
        }
    }

    fn apply_remove(&self, object: &Rc<StoreObject>, version: u64) {
        self.drop_map(object, HEAD);
        let mut state = object.state_mut();
        if state.exists {
            self.counters.sub_object();
        }
        state.exists = false;
        state.has_kv = false;
        state.size = 0;
        state.version = version;
        self.counters.note_version(version);
        drop(state);
        self.forget_if_gone(object);
        self.freed();
    }

    /// Removes an object without head and clones: its name can be reused, its number is not.
    fn forget_if_gone(&self, object: &Rc<StoreObject>) {
        if object.is_gone() {
            self.index.put(keys::name(&object.name), None);
            self.index.put(keys::object(object.oid), None);
            self.objects.remove(object);
        }
    }

    fn apply_clone(&self, object: &StoreObject, seq: u64, snaps: &[u64]) {
        let mut guard = object.state_mut();
        let state = &mut *guard;
        state.snap_seq = seq;
        if snaps.is_empty() {
            return;
        }
        let mut map = Map::default();
        let mut pages = 0;
        for block in 0..state.head.blocks() {
            let slot = state.head.get(block);
            if slot.block != 0 {
                map.set(block, slot);
            }
        }
        pages += map.dirty_page_count();
        state.clones.push(CloneState { id: seq, snaps: snaps.to_vec(), size: state.size, map });
        drop(guard);
        self.dirty.add_pages(pages);
        snaps.iter().for_each(|&snap| self.index.put(keys::snap_object(snap, object.oid), Some(Vec::new())));
    }

    fn apply_clone_snaps(&self, object: &Rc<StoreObject>, clone: u64, snaps: &[u64]) {
        let Some(before) =
            object.state().clones.iter().find(|there| there.id == clone).map(|there| there.snaps.clone())
        else {
            return;
        };
        for snap in before.iter().filter(|snap| !snaps.contains(snap)) {
            self.index.put(keys::snap_object(*snap, object.oid), None);
        }
        if !snaps.is_empty() {
            let mut state = object.state_mut();
            if let Some(there) = state.clones.iter_mut().find(|there| there.id == clone) {
                there.snaps = snaps.to_vec();
            }
            return;
        }
        self.drop_map(object, clone);
        object.state_mut().clones.retain(|there| there.id != clone);
        self.forget_if_gone(object);
        self.freed();
    }

    fn apply_rollback(&self, object: &StoreObject, clone: u64, version: u64) {
        let (size, blocks) = {
            let state = object.state();
            let Some(there) = state.clones.iter().find(|there| there.id == clone) else { return };
            (there.size, there.map.blocks().max(state.head.blocks()))
        };
        for block in 0..blocks {
            let slot = object.state().map_of(clone).map(|map| map.get(block)).unwrap_or_default();
            self.remap(object, block, slot);
        }
        self.set_shape(object, size, version);
    }

    /// Moves a block in every state that has it at `old`. Returns whether one had. The caller has counted the blob of the
    /// new location, if it is one.
    pub fn apply_move(&self, object: &StoreObject, block: u32, old: u64, new: MapSlot) -> bool {
        let mut guard = object.state_mut();
        let state = &mut *guard;
        let mut moved = false;
        let mut dirtied = 0;
        let mut old_crc = 0;
        let maps = std::iter::once(&mut state.head).chain(state.clones.iter_mut().map(|clone| &mut clone.map));
        for map in maps.filter(|map| map.get(block).block == old) {
            dirtied += usize::from(!map.is_dirty(block));
            old_crc = map.set(block, new).crc;
            moved = true;
        }
        self.dirty.add_pages(dirtied);
        if moved {
            match BlobSlot::of(new.block) {
                Some(_) => self.blobs.add_blocks(1),
                None => self.segments.borrow_mut().add_block(new.block),
            }
            self.media.cache.moved(old, new.block, new.crc);
            self.release(state, block, MapSlot { block: old, crc: old_crc }, None);
        }
        moved
    }
}
