//! In-memory objects: block maps, clones, and dirty state for the next checkpoint.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use forebay_block::ObjectName;

use crate::format::BLOCK64;
use crate::format::blob::BlobSlot;
use crate::format::onode::{CloneRecord, Onode};
use crate::format::page::MapSlot;
use crate::map::Map;

/// Clone id that denotes the head.
pub const HEAD: u64 = u64::MAX;

/// Clone: a preserved earlier state of an object.
#[derive(Debug)]
pub struct CloneState {
    /// Clone id.
    pub id: u64,
    /// Snapshots that the clone represents, newest first.
    pub snaps: Vec<u64>,
    /// Size in bytes.
    pub size: u64,
    pub map: Map,
}

/// Object state: the head and its clones.
#[derive(Debug)]
pub struct ObjectState {
    pub exists: bool,
    pub has_kv: bool,
    pub size: u64,
    pub version: u64,
    pub snap_seq: u64,
    pub head: Map,
    /// Clones, oldest first.
    pub clones: Vec<CloneState>,
}

impl ObjectState {
    /// Returns the map of the head or of a clone.
    pub fn map_of(&self, of: u64) -> Option<&Map> {
        if of == HEAD {
            return Some(&self.head);
        }
        self.clones.iter().find(|clone| clone.id == of).map(|clone| &clone.map)
    }

    /// Returns the map of the head or of a clone for modification, like [`map_of`](Self::map_of).
    pub fn map_of_mut(&mut self, of: u64) -> Option<&mut Map> {
        if of == HEAD {
            return Some(&mut self.head);
        }
        self.clones.iter_mut().find(|clone| clone.id == of).map(|clone| &mut clone.map)
    }

    /// Returns whether a state other than `of` also maps `block` to `slot`.  All pages there must be in memory.
    pub fn is_shared(&self, of: u64, block: u32, slot: MapSlot) -> bool {
        let same = |map: &Map| map.get(block).block == slot.block;
        (of != HEAD && same(&self.head)) || self.clones.iter().any(|clone| clone.id != of && same(&clone.map))
    }

    /// Returns whether a state refers to the blob that has, or had, `block`.  The page of the block must be in memory in all
    /// states.
    pub fn refers_to(&self, blob: BlobSlot, block: u32) -> bool {
        self.head.refers_to(blob, block, 0) || self.clones.iter().any(|clone| clone.map.refers_to(blob, block, 0))
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        let clones: usize = self.clones.iter().map(|clone| clone.map.weight() + 96).sum();
        self.head.weight() + clones
    }
}

/// Object in memory.
pub struct StoreObject {
    /// Object number; never reused.
    pub oid: u64,
    /// Number of the key that its data is encrypted with; 0 for none.
    pub key: u64,
    pub name: ObjectName,
    state: RefCell<ObjectState>,
    /// Checkpoint round that must store the object; 0 if it equals its stored version.
    dirty_round: Cell<u64>,
    weight: Cell<usize>,
    used: Cell<bool>,
}

impl StoreObject {
    /// Creates an empty object, whose data is encrypted with key number `key`, or not (0).
    pub fn new(oid: u64, key: u64, name: ObjectName) -> Self {
        let state = ObjectState {
            exists: false,
            has_kv: false,
            size: 0,
            version: 0,
            snap_seq: 0,
            head: Map::default(),
            clones: Vec::new(),
        };
        Self::with_state(oid, key, name, state)
    }

    fn with_state(oid: u64, key: u64, name: ObjectName, state: ObjectState) -> Self {
        Self {
            oid,
            key,
            name,
            state: RefCell::new(state),
            dirty_round: Cell::new(0),
            weight: Cell::new(0),
            used: Cell::new(true),
        }
    }

    /// Creates an object from its stored record.
    pub fn from_onode(oid: u64, onode: Onode) -> Self {
        let (key, name) = (onode.key, ObjectName::in_namespace(onode.namespace.into(), onode.name));
        let state = ObjectState {
            exists: onode.exists,
            has_kv: onode.has_kv,
            size: onode.size,
            version: onode.version,
            snap_seq: onode.snap_seq,
            head: Map::from_ptrs(&onode.pages),
            clones: onode
                .clones
                .into_iter()
                .map(|clone| CloneState {
                    id: clone.id,
                    snaps: clone.snaps,
                    size: clone.size,
                    map: Map::from_ptrs(&clone.pages),
                })
                .collect(),
        };
        Self::with_state(oid, key, name, state)
    }

    /// Returns the record of the object. Every page must have been stored.
    pub fn to_onode(&self) -> Onode {
        let state = self.state.borrow();
        Onode {
            namespace: self.name.namespace().into(),
            name: self.name.name().into(),
            key: self.key,
            exists: state.exists,
            has_kv: state.has_kv,
            size: state.size,
            version: state.version,
            snap_seq: state.snap_seq,
            pages: state.head.ptrs(),
            clones: state
                .clones
                .iter()
                .map(|clone| CloneRecord {
                    id: clone.id,
                    snaps: clone.snaps.clone(),
                    size: clone.size,
                    pages: clone.map.ptrs(),
                })
                .collect(),
        }
    }

    pub fn state(&self) -> Ref<'_, ObjectState> {
        self.state.borrow()
    }

    pub fn state_mut(&self) -> RefMut<'_, ObjectState> {
        self.state.borrow_mut()
    }

    /// Returns whether a checkpoint, in progress or later, must store the object.
    pub fn is_dirty(&self) -> bool {
        self.dirty_round.get() != 0
    }

    /// Returns the checkpoint round that must store the object; 0 if it equals its stored version.
    pub fn dirty_round(&self) -> u64 {
        self.dirty_round.get()
    }

    /// Records the checkpoint round that must store the object.
    pub fn set_dirty_round(&self, round: u64) {
        debug_assert!(round > 0, "round 0 means clean");
        self.dirty_round.set(round);
    }

    /// Records that the object equals its stored version.
    pub fn set_clean(&self) {
        self.dirty_round.set(0);
    }

    /// Returns whether the object has neither head nor clones, so that there is nothing to store.
    pub fn is_gone(&self) -> bool {
        let state = self.state.borrow();
        !state.exists && state.clones.is_empty()
    }
}

/// Returns the number of blocks of an object of `size` bytes.
pub fn blocks_of(size: u64) -> u32 {
    size.div_ceil(BLOCK64) as u32
}

/// Object cache: all objects that the next checkpoint must store, and others up to a bound.
pub struct ObjectCache {
    by_oid: RefCell<HashMap<u64, Rc<StoreObject>>>,
    by_name: RefCell<HashMap<ObjectName, Rc<StoreObject>>>,
    order: RefCell<VecDeque<u64>>,
    weight: Cell<usize>,
    /// Memory limit: half of the metadata memory.  Changed keys have a third of it; any excess of theirs reduces this
    /// limit.
    limit: usize,
}

/// Maximum number of objects examined per eviction pass.
const LOOKED_AT_MAX: usize = 64;
/// Approximate memory of an object in bytes, in addition to its maps.
const OBJECT_WEIGHT: usize = 512;

impl ObjectCache {
    pub fn new(limit: usize) -> Self {
        Self {
            by_oid: RefCell::default(),
            by_name: RefCell::default(),
            order: RefCell::default(),
            weight: Cell::new(0),
            limit,
        }
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        self.weight.get()
    }

    pub fn by_name(&self, name: &ObjectName) -> Option<Rc<StoreObject>> {
        let by_name = self.by_name.borrow();
        let object = by_name.get(name)?;
        object.used.set(true);
        Some(object.clone())
    }

    pub fn by_oid(&self, oid: u64) -> Option<Rc<StoreObject>> {
        let by_oid = self.by_oid.borrow();
        let object = by_oid.get(&oid)?;
        object.used.set(true);
        Some(object.clone())
    }

    /// Adds an object. Returns the existing object if another task has added it meanwhile.
    pub fn insert(&self, object: StoreObject) -> Rc<StoreObject> {
        if let Some(there) = self.by_oid(object.oid) {
            return there;
        }
        let object = Rc::new(object);
        self.by_oid.borrow_mut().insert(object.oid, object.clone());
        self.by_name.borrow_mut().insert(object.name.clone(), object.clone());
        self.remember(object.oid);
        object.weight.set(OBJECT_WEIGHT);
        self.weight.set(self.weight.get() + OBJECT_WEIGHT);
        self.reweigh(&object);
        object
    }

    /// Appends an object to the eviction order.  Entries of removed objects are purged only when the order has grown
    /// large.
    fn remember(&self, oid: u64) {
        let mut order = self.order.borrow_mut();
        let by_oid = self.by_oid.borrow();
        if order.len() >= 2 * by_oid.len() + LOOKED_AT_MAX {
            let mut seen = HashSet::with_capacity(by_oid.len());
            order.retain(|&there| there != oid && by_oid.contains_key(&there) && seen.insert(there));
        }
        order.push_back(oid);
    }

    /// Updates an object's memory accounting after its pages have changed.
    pub fn reweigh(&self, object: &StoreObject) {
        // A task may still end here with an object that has been evicted meanwhile.
        if object.weight.get() == 0 {
            return;
        }
        let now = OBJECT_WEIGHT + object.state().weight();
        self.weight.set(self.weight.get() + now - object.weight.replace(now));
    }

    /// Removes an object that no longer exists.
    pub fn remove(&self, object: &Rc<StoreObject>) {
        if self.by_oid.borrow_mut().remove(&object.oid).is_some() {
            // Cached objects have a nonzero weight; weight 0 marks an object that is not cached.
            self.weight.set(self.weight.get() - object.weight.replace(0));
            let mut by_name = self.by_name.borrow_mut();
            if by_name.get(&object.name).is_some_and(|there| Rc::ptr_eq(there, object)) {
                by_name.remove(&object.name);
            }
        }
    }

    /// Evicts clean and unreferenced objects, least recently used first, while `others` bytes of other metadata are in
    /// memory.
    pub fn shrink(&self, others: usize) {
        self.shrink_some(others, LOOKED_AT_MAX);
    }

    /// Evicts like [`shrink`](Self::shrink), for frequent callers: stops after a few objects that cannot be evicted.
    pub fn shrink_a_little(&self, others: usize) {
        const FEW: usize = 4;
        self.shrink_some(others, FEW);
    }

    fn shrink_some(&self, others: usize, looks_max: usize) {
        let limit = self.limit.min((self.limit + self.limit * 2 / 3).saturating_sub(others));
        let mut order = self.order.borrow_mut();
        let mut looked_at = 0;
        while self.weight.get() > limit && looked_at < order.len().min(looks_max) {
            let Some(oid) = order.pop_front() else { break };
            let Some(object) = self.by_oid.borrow().get(&oid).cloned() else { continue };
            // Referenced by the two maps and this variable only.
            let idle = Rc::strong_count(&object) == 3;
            if !idle || object.is_dirty() || object.used.replace(false) {
                order.push_back(oid);
                looked_at += 1;
                continue;
            }
            self.remove(&object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_that_come_and_go_leave_nothing_in_the_cache() {
        let cache = ObjectCache::new(1 << 20);
        let kept = cache.insert(StoreObject::new(1, 0, ObjectName::new("kept")));
        for oid in 2..100_000 {
            let object = cache.insert(StoreObject::new(oid, 0, ObjectName::new(format!("o{}", oid % 7))));
            cache.remove(&object);
        }
        assert!(cache.order.borrow().len() <= 2 * LOOKED_AT_MAX, "{} entries", cache.order.borrow().len());
        assert!(cache.order.borrow().contains(&kept.oid));
        assert_eq!(cache.weight(), OBJECT_WEIGHT + kept.state().weight());
    }

    #[test]
    fn an_object_that_comes_back_again_and_again_can_still_go() {
        let cache = ObjectCache::new(0);
        for _ in 0..1000 {
            let object = cache.insert(StoreObject::new(7, 0, ObjectName::new("o")));
            cache.remove(&object);
        }
        assert!(cache.order.borrow().len() <= 2 * LOOKED_AT_MAX);
        cache.insert(StoreObject::new(7, 0, ObjectName::new("o")));
        (0..4).for_each(|_| cache.shrink(0));
        assert_eq!(cache.weight(), 0);
    }
}
