//! Metadata index: the stored tree and the changes that it does not have yet.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use forebay_block::Result;

use crate::format::BlobPtr;
use crate::format::node::Node;
use crate::merge::merged;
use crate::tree::{NodeSink, Tree, TreeChange, TreeKey, TreeScan};

/// Approximate memory overhead of a changed key, in bytes, in addition to the key and its value.
const PAIR_WEIGHT: usize = 96;
/// Minimum number of keys read from the tree at a time.
const KV_PAGE_MIN: usize = 64;

/// Changes by tree key; `None` marks a deletion.
type Overlay = BTreeMap<TreeKey, Option<Vec<u8>>>;

/// Metadata index of a store: the tree of the last checkpoint, and the changes since then.
///
/// # Invariants
/// 1. The value of a key is the one in the first of `overlay`, `frozen` and the tree that has an entry for it.
/// 2. The root changes only in [`commit`](Self::commit), together with the removal of the frozen changes.  A lookup that
///    waited and finds the same root afterwards has therefore seen all of that tree.
/// 3. `overlay_bytes` and `frozen_bytes` are upper bounds of what the stored values take: replaced values still count.
pub struct MetadataIndex {
    tree: Tree,
    root: Cell<BlobPtr>,
    /// Changes since the checkpoint in progress began (or the last one).
    overlay: RefCell<Overlay>,
    overlay_bytes: Cell<usize>,
    /// Changes that the checkpoint in progress is writing to the tree, or that a failed one did not write.
    frozen: RefCell<Overlay>,
    frozen_bytes: Cell<usize>,
    /// First keys of nodes that the next checkpoint must write elsewhere.
    touched: RefCell<BTreeSet<TreeKey>>,
    /// Set if the index may contain markers of keys whose values were lost.
    has_lost_keys: Cell<bool>,
    /// Stored pairs that range lookups have scanned, including pairs deleted since the last checkpoint.
    pairs_scanned: Cell<u64>,
}

impl MetadataIndex {
    /// Creates the index of a checkpoint, without changes.
    pub fn new(tree: Tree, root: BlobPtr) -> Self {
        Self {
            tree,
            root: Cell::new(root),
            overlay: RefCell::default(),
            overlay_bytes: Cell::new(0),
            frozen: RefCell::default(),
            frozen_bytes: Cell::new(0),
            touched: RefCell::default(),
            has_lost_keys: Cell::new(false),
            pairs_scanned: Cell::new(0),
        }
    }

    /// Returns the approximate memory use of tree nodes, in bytes.
    pub fn tree_weight(&self) -> usize {
        self.tree.weight()
    }

    /// Returns the approximate memory use of the changes since the last checkpoint began, in bytes.
    pub fn overlay_bytes(&self) -> usize {
        self.overlay_bytes.get()
    }

    /// Returns the approximate memory use of the changes that the checkpoint in progress writes, in bytes.
    pub fn frozen_bytes(&self) -> usize {
        self.frozen_bytes.get()
    }

    /// Returns the approximate memory use of all changes, in bytes.
    pub fn changes_bytes(&self) -> usize {
        self.overlay_bytes.get() + self.frozen_bytes.get()
    }

    /// Returns the number of stored pairs that range lookups have scanned.
    pub fn pairs_scanned(&self) -> u64 {
        self.pairs_scanned.get()
    }

    /// Returns whether the index may contain markers of keys whose values were lost.
    pub fn has_lost_keys(&self) -> bool {
        self.has_lost_keys.get()
    }

    /// Records that the index may contain markers of keys whose values were lost.
    pub fn note_lost_keys(&self) {
        self.has_lost_keys.set(true);
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

    /// Looks up a key as of the last durable checkpoint, from which a crash would recover.
    pub async fn lookup_stored(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        loop {
            let root = self.root.get();
            match self.tree.get(root, key).await {
                // A checkpoint may have completed meanwhile; the nodes of the old root may be freed.
                _ if root != self.root.get() => {}
                found => return found,
            }
        }
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
    pub async fn lookup_range(&self, from: &[u8], to: &[u8], wanted: usize) -> Result<Vec<(TreeKey, Vec<u8>)>> {
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
            let mut upto: TreeKey = to.to_vec();
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
    fn with_changes(
        &self,
        stored: &[(TreeKey, Vec<u8>)],
        from: &TreeKey,
        to: &TreeKey,
        max: usize,
    ) -> Vec<(TreeKey, Vec<u8>)> {
        let (overlay, frozen) = (self.overlay.borrow(), self.frozen.borrow());
        let layers = [&overlay, &frozen].map(|layer| layer.range::<TreeKey, _>(from..to)).into();
        let count = |pair| {
            self.pairs_scanned.set(self.pairs_scanned.get() + 1);
            pair
        };
        let pairs = merged(stored.iter().map(|(key, value)| (key, value)).map(count), layers);
        pairs.take(max).map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Sets a key, or deletes it if `value` is `None`. The next checkpoint writes the change to the tree.
    pub fn put(&self, key: TreeKey, value: Option<Vec<u8>>) {
        let bytes = key.len() + value.as_ref().map_or(0, Vec::len) + PAIR_WEIGHT;
        self.overlay_bytes.set(self.overlay_bytes.get() + bytes);
        let mut overlay = self.overlay.borrow_mut();
        overlay.insert(key, value);
        debug_assert!(self.overlay_bytes.get() >= overlay.len() * PAIR_WEIGHT);
    }

    /// Sets a key, or deletes it, as of the checkpoint in progress. A change in the overlay is newer and still counts.
    pub fn put_frozen(&self, key: TreeKey, value: Option<Vec<u8>>) {
        // Deletions do not count; there is at most one for each object.
        if let Some(value) = &value {
            self.frozen_bytes.set(self.frozen_bytes.get() + key.len() + value.len() + PAIR_WEIGHT);
        }
        self.frozen.borrow_mut().insert(key, value);
    }

    /// Begins a checkpoint: the changes so far are those that it writes.
    pub fn freeze(&self) {
        let changes = self.overlay.take();
        self.frozen.borrow_mut().extend(changes);
        self.frozen_bytes.set(self.frozen_bytes.get() + self.overlay_bytes.take());
    }

    /// Writes the frozen changes, and the touched nodes, to a new tree. Returns its root; the index still uses the old
    /// tree until [`commit`](Self::commit).
    pub async fn write_frozen(&self, sink: &dyn NodeSink) -> Result<BlobPtr> {
        let mut changes: BTreeMap<TreeKey, TreeChange> =
            self.touched.take().into_iter().map(|key| (key, TreeChange::Touch)).collect();
        changes.extend(self.frozen.borrow().iter().map(|(key, value)| {
            let change = value.as_ref().map_or(TreeChange::Delete, |value| TreeChange::Put(value.clone()));
            (key.clone(), change)
        }));
        let changes: Vec<(TreeKey, TreeChange)> = changes.into_iter().collect();
        self.tree.apply(self.root.get(), &changes, sink).await
    }

    /// Ends a durable checkpoint: the tree at `root` replaces the old one and the frozen changes.
    pub fn commit(&self, root: BlobPtr) {
        self.root.set(root);
        self.frozen.take();
        self.frozen_bytes.set(0);
    }

    /// Returns the location of the node at `level` on the path to `key`; `None` if there is none.
    pub async fn node_location(&self, key: &[u8], level: u8) -> Result<Option<BlobPtr>> {
        self.tree.node_location(self.root.get(), key, level).await
    }

    /// Makes the next checkpoint write the nodes on the path to `key` elsewhere.
    pub fn touch(&self, key: TreeKey) {
        self.touched.borrow_mut().insert(key);
    }

    /// Returns a scan of the stored tree, without the changes since the last checkpoint.
    pub fn scan(&self) -> TreeScan<'_> {
        TreeScan::new(&self.tree, self.root.get())
    }

    /// Returns the changes since the last checkpoint.
    pub fn changes(&self) -> Vec<(TreeKey, Option<Vec<u8>>)> {
        let mut changes = self.frozen.borrow().clone();
        changes.extend(self.overlay.borrow().iter().map(|(key, value)| (key.clone(), value.clone())));
        changes.into_iter().collect()
    }

    /// Drops the damaged nodes from the tree. The next checkpoint makes that durable.
    pub async fn prune(&self, sink: &dyn NodeSink) -> Result<()> {
        self.root.set(self.tree.prune(self.root.get(), sink).await?);
        Ok(())
    }

    /// Visits every stored node with its location and its content or read error, parents before children.
    pub async fn walk(&self, visit: impl FnMut(BlobPtr, Result<&Node>)) {
        self.tree.walk(self.root.get(), visit).await;
    }
}
