//! Metadata index: a copy-on-write B+tree of byte strings whose nodes are stored in the log.
//!
//! Nodes are immutable.  A checkpoint applies all its changes at once and gets a new root. Until that checkpoint is
//! durable, readers use the old root.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Error, ErrorKind, Result};

use crate::format::BlobPtr;
use crate::format::node::{LEVEL_MAX, Node};
use crate::media::Media;
use crate::rebuild::bad_sectors::{is_of_bad_sector, read_unless_damaged};

mod prune;
#[cfg(test)]
mod tests;

pub use prune::{ScannedNode, TreeScan};

/// Node size in bytes above which a node is split.
const NODE_BYTES: usize = 4000;

/// Key of the tree, compared bytewise.
pub type TreeKey = Vec<u8>;
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Change of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeChange {
    /// Set to a value.
    Put(Vec<u8>),
    /// Removal of the key.
    Delete,
    /// Unchanged, but the nodes on the path to the key are rewritten (the cleaner needs their old location).
    Touch,
}

/// Storage for new nodes.
pub trait NodeSink {
    /// Stores a node and returns its location. `key` leads to the node: its first key, or for a leaf without keys the
    /// beginning of its range.
    fn write(&self, node: &Node, key: &[u8], bytes: &[u8]) -> BlobPtr;
    /// Releases a node that is no longer part of the tree.
    fn release(&self, ptr: BlobPtr);
    /// Yields to other tasks.
    fn pause(&self) -> BoxFuture<'_, ()>;
}

struct Cached {
    ptr: BlobPtr,
    node: Rc<Node>,
    weight: usize,
    used: Cell<bool>,
}

/// Checksum used in references to nodes and map pages that are permanently lost.
pub const LOST_CRC: u32 = 0x4C4F_5354;

/// Encoded leaf without keys. Its length and checksum tell it from all other nodes, so that it is never read.
const EMPTY_LEAF: [u8; 4] = [1, 0, 0, 0];

fn is_empty_leaf(ptr: BlobPtr) -> bool {
    ptr.len as usize == EMPTY_LEAF.len() && ptr.crc == crc32c(&EMPTY_LEAF)
}

/// Keys that lead to a node: from `low` on, and below `high` if there is one.
#[derive(Clone, Copy)]
struct KeyRange<'a> {
    low: &'a [u8],
    high: Option<&'a [u8]>,
}

impl KeyRange<'_> {
    const ALL: Self = Self { low: &[], high: None };
}

/// Child of an inner node that is being rewritten.
enum ChildSlot {
    Node(BlobPtr),
    /// Range without keys, and the leaf that says so if one is stored.
    Empty(Option<BlobPtr>),
}

/// Node cache, bounded in memory.
pub struct NodeCache {
    nodes: RefCell<HashMap<u64, Cached>>,
    order: RefCell<VecDeque<u64>>,
    weight: Cell<usize>,
    limit: usize,
}

impl NodeCache {
    pub fn new(limit: usize) -> Self {
        Self { nodes: RefCell::default(), order: RefCell::default(), weight: Cell::new(0), limit }
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        self.weight.get()
    }

    fn get(&self, ptr: BlobPtr) -> Option<Rc<Node>> {
        let nodes = self.nodes.borrow();
        let cached = nodes.get(&ptr.addr).filter(|cached| cached.ptr == ptr)?;
        cached.used.set(true);
        Some(cached.node.clone())
    }

    fn insert(&self, ptr: BlobPtr, node: Rc<Node>) {
        let weight = node.weight() + 128;
        let mut nodes = self.nodes.borrow_mut();
        let cached = Cached { ptr, node, weight, used: Cell::new(false) };
        match nodes.insert(ptr.addr, cached) {
            Some(before) => self.weight.set(self.weight.get() - before.weight),
            None => self.order.borrow_mut().push_back(ptr.addr),
        }
        self.weight.set(self.weight.get() + weight);
        let mut order = self.order.borrow_mut();
        // Second chance (CLOCK): entries used since the last pass are kept for another one.
        while self.weight.get() > self.limit && order.len() > 1 {
            let Some(oldest) = order.pop_front() else { break };
            match nodes.get(&oldest) {
                Some(cached) if cached.used.replace(false) => order.push_back(oldest),
                Some(cached) => {
                    self.weight.set(self.weight.get() - cached.weight);
                    nodes.remove(&oldest);
                }
                None => {}
            }
        }
    }

    fn forget(&self, ptr: BlobPtr) {
        if let Some(cached) = self.nodes.borrow_mut().remove(&ptr.addr) {
            self.weight.set(self.weight.get() - cached.weight);
            self.order.borrow_mut().retain(|&addr| addr != ptr.addr);
        }
    }
}

/// Tree nodes. Callers pass the root, as there are two of them during a checkpoint.
pub struct Tree {
    media: Rc<Media>,
    cache: NodeCache,
}

impl Tree {
    pub fn new(media: Rc<Media>, cache_limit: usize) -> Self {
        Self { media, cache: NodeCache::new(cache_limit) }
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        self.cache.weight()
    }

    /// Looks up a key without waiting. Returns `None` if a node is not in memory.
    pub fn get_cached(&self, root: BlobPtr, key: &[u8]) -> Option<Option<Vec<u8>>> {
        let mut at = root;
        if at.is_none() {
            return Some(None);
        }
        loop {
            if is_empty_leaf(at) {
                return Some(None);
            }
            let node = self.cache.get(at)?;
            match &*node {
                Node::Leaf(pairs) => return Some(find(pairs, key)),
                Node::Inner { children, .. } => at = children[child_of(children, key)].1,
            }
        }
    }

    /// Looks up a key.
    pub async fn get(&self, root: BlobPtr, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut at = root;
        let mut level = None;
        if at.is_none() {
            return Ok(None);
        }
        loop {
            let node = self.load(at, level).await?;
            match &*node {
                Node::Leaf(pairs) => return Ok(find(pairs, key)),
                Node::Inner { level: here, children } => {
                    level = Some(here - 1);
                    at = children[child_of(children, key)].1;
                }
            }
        }
    }

    /// Returns up to `max` pairs with keys in `from..to`, in key order.
    pub async fn range(&self, root: BlobPtr, from: &[u8], to: &[u8], max: usize) -> Result<Vec<(TreeKey, Vec<u8>)>> {
        let mut out = Vec::new();
        if root.is_none() {
            return Ok(out);
        }
        let mut stack = vec![(root, None)];
        while let Some((ptr, level)) = stack.pop() {
            let node = self.load(ptr, level).await?;
            match &*node {
                Node::Leaf(pairs) => {
                    let start = pairs.partition_point(|(key, _)| &key[..] < from);
                    for (key, value) in &pairs[start..] {
                        if &key[..] >= to || out.len() >= max {
                            return Ok(out);
                        }
                        out.push((key.to_vec(), value.to_vec()));
                    }
                }
                Node::Inner { level, children } => {
                    let first = child_of(children, from);
                    // The first child also has the keys below its own.
                    let within = children[first + 1..].iter().take_while(|(key, _)| &key[..] < to);
                    let in_range = std::iter::once(&children[first]).chain(within);
                    let mut next: Vec<_> = in_range.map(|(_, ptr)| (*ptr, Some(level - 1))).collect();
                    next.reverse();
                    stack.extend(next);
                }
            }
        }
        Ok(out)
    }

    /// Visits every node with its location and its content or read error, parents before children. Used by the
    /// consistency check.  An unreadable node that is referenced several times is visited once.
    pub async fn walk(&self, root: BlobPtr, mut visit: impl FnMut(BlobPtr, Result<&Node>)) {
        let mut stack = if root.is_none() { vec![] } else { vec![(root, None)] };
        let mut damaged = HashSet::new();
        while let Some((ptr, level)) = stack.pop() {
            match self.load(ptr, level).await {
                Ok(node) => {
                    visit(ptr, Ok(&node));
                    if let Node::Inner { level, children } = &*node {
                        stack.extend(children.iter().rev().map(|(_, ptr)| (*ptr, Some(level - 1))));
                    }
                }
                Err(error) if damaged.insert(ptr.addr) => visit(ptr, Err(error)),
                Err(_) => {}
            }
        }
    }

    /// Returns the location of the node at `level` on the path to `key`; `None` if there is none.
    pub async fn node_location(&self, root: BlobPtr, key: &[u8], level: u8) -> Result<Option<BlobPtr>> {
        let mut at = root;
        let mut expected = None;
        while !at.is_none() {
            let node = self.load(at, expected).await?;
            if node.level() <= level {
                return Ok((node.level() == level).then_some(at));
            }
            let Node::Inner { level: here, children } = &*node else { return Ok(None) };
            expected = Some(here - 1);
            at = children[child_of(children, key)].1;
        }
        Ok(None)
    }

    async fn load(&self, ptr: BlobPtr, level: Option<u8>) -> Result<Rc<Node>> {
        if let Some(node) = self.cache.get(ptr) {
            return Ok(node);
        }
        if is_empty_leaf(ptr) && level.is_none_or(|level| level == 0) {
            return Ok(Rc::new(Node::Leaf(Vec::new())));
        }
        let corrupt =
            |what: String| Error::new(ErrorKind::Corrupt, format!("a tree node at byte {}: {what}", ptr.addr));
        let bytes = match self.media.read_blob(ptr, "a tree node").await {
            // A node that was given up is lost, whatever the device returns for its sectors.
            Err(error) if ptr.crc == LOST_CRC && is_of_bad_sector(&error) => return Err(corrupt(error.to_string())),
            read => read?,
        };
        let node = Rc::new(Node::decode(&bytes).map_err(|error| corrupt(error.to_string()))?);
        if level.is_some_and(|level| level != node.level()) {
            return Err(corrupt(format!("level {} where {level:?} was expected", node.level())));
        }
        self.cache.insert(ptr, node.clone());
        Ok(node)
    }

    /// Loads a node that is about to be changed. Returns `None` if it is damaged for good. The following step is
    /// irreversible then.
    ///
    /// # Errors
    /// Errors of the device that may be transient. The checkpoint is retried.
    async fn load_unless_damaged(&self, ptr: BlobPtr, level: Option<u8>) -> Result<Option<Rc<Node>>> {
        match read_unless_damaged(&self.media, async || self.load(ptr, level).await).await? {
            Ok(node) => Ok(Some(node)),
            Err(error) => {
                if ptr.crc != LOST_CRC {
                    tracing::error!(
                        ?error,
                        "a node of the metadata index is damaged; new records are stored beside it, `forebay store check` names the node"
                    );
                }
                Ok(None)
            }
        }
    }

    /// Applies `changes` (sorted by key) to the tree and returns the new root.
    pub async fn apply(
        &self,
        root: BlobPtr,
        changes: &[(TreeKey, TreeChange)],
        sink: &dyn NodeSink,
    ) -> Result<BlobPtr> {
        if changes.is_empty() {
            return Ok(root);
        }
        debug_assert!(changes.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let mut level = 0;
        let nodes = if root.is_none() {
            self.emit_leaf(merge(&[], changes), sink)
        } else {
            match self.load_unless_damaged(root, None).await? {
                Some(node) => {
                    level = node.level();
                    self.rewrite((KeyRange::ALL, root), node, changes, sink).await?
                }
                None if is_only_touched(changes) => return Ok(root),
                // The level of a damaged root is unknown, and does not matter: a read through its new references fails
                // before levels are compared.
                None => {
                    let around = self.bypass_damaged((KeyRange::ALL, root), level, changes, sink);
                    self.settle(around, level, sink).await
                }
            }
        };
        self.emit_top(level, nodes, sink).await
    }

    /// Writes the levels above `nodes`, which are of level `level`, and returns the root.
    async fn emit_top(
        &self,
        mut level: u8,
        mut nodes: Vec<(Box<[u8]>, BlobPtr)>,
        sink: &dyn NodeSink,
    ) -> Result<BlobPtr> {
        while nodes.len() > 1 {
            level += 1;
            assert!(level <= LEVEL_MAX, "a tree higher than any store can need");
            nodes = self.emit_inner(level, nodes, sink);
        }
        let Some((_, mut top)) = nodes.pop() else { return Ok(BlobPtr::default()) };
        // A root with a single child is removed.
        loop {
            let node = self.load(top, None).await?;
            match &*node {
                // A damaged root could not be bypassed, so it stays below another node.
                Node::Inner { level, children }
                    if children.len() == 1 && self.load(children[0].1, Some(level - 1)).await.is_ok() =>
                {
                    sink.release(top);
                    self.cache.forget(top);
                    top = children[0].1;
                }
                _ => return Ok(top),
            }
        }
    }

    /// Rewrites the node at `ptr` with the changes, and returns its replacements.
    fn rewrite<'a>(
        &'a self,
        (range, ptr): (KeyRange<'a>, BlobPtr),
        node: Rc<Node>,
        changes: &'a [(TreeKey, TreeChange)],
        sink: &'a dyn NodeSink,
    ) -> BoxFuture<'a, Result<Vec<(Box<[u8]>, BlobPtr)>>> {
        Box::pin(async move {
            let out = match &*node {
                Node::Leaf(pairs) => self.emit_leaf(merge(pairs, changes), sink),
                Node::Inner { level, children } => {
                    let mut kept: Vec<(Box<[u8]>, ChildSlot)> = Vec::with_capacity(children.len() + 1);
                    let mut rest = changes;
                    for (i, (key, child)) in children.iter().enumerate() {
                        let low = if i == 0 { range.low } else { &key[..] };
                        let high = children.get(i + 1).map(|(next, _)| &next[..]);
                        let upto = high.map_or(rest.len(), |high| rest.partition_point(|(key, _)| key[..] < *high));
                        let within = KeyRange { low, high: high.or(range.high) };
                        let (mine, later) = rest.split_at(upto);
                        rest = later;
                        if mine.is_empty() {
                            let slot = match is_empty_leaf(*child) {
                                true => ChildSlot::Empty(Some(*child)),
                                false => ChildSlot::Node(*child),
                            };
                            kept.push((low.into(), slot));
                            continue;
                        }
                        match self.load_unless_damaged(*child, Some(level - 1)).await? {
                            Some(node) => {
                                let mut new = self.rewrite((within, *child), node, mine, sink).await?;
                                match new.first_mut() {
                                    // Otherwise removed keys before the first one would lead to the child before.
                                    Some(first) => first.0 = low.into(),
                                    None => kept.push((low.into(), ChildSlot::Empty(None))),
                                }
                                kept.extend(new.into_iter().map(|(key, ptr)| (key, ChildSlot::Node(ptr))));
                            }
                            None if is_only_touched(mine) => kept.push((low.into(), ChildSlot::Node(*child))),
                            None => kept.extend(self.bypass_damaged((within, *child), level - 1, mine, sink)),
                        }
                    }
                    sink.pause().await;
                    let mut kept = self.settle(kept, level - 1, sink).await;
                    if let Some(first) = kept.first_mut() {
                        first.0 = range.low.into();
                    }
                    self.emit_inner(*level, kept, sink)
                }
            };
            sink.release(ptr);
            self.cache.forget(ptr);
            Ok(out)
        })
    }

    /// Decides which ranges without keys need a leaf that says so: those that would lead to a damaged node otherwise.
    /// The others are merged into the child before them, or into the one after the first ones.
    async fn settle(
        &self,
        slots: Vec<(Box<[u8]>, ChildSlot)>,
        level: u8,
        sink: &dyn NodeSink,
    ) -> Vec<(Box<[u8]>, BlobPtr)> {
        let first_node = slots.iter().find_map(|(_, slot)| match slot {
            ChildSlot::Node(ptr) => Some(*ptr),
            ChildSlot::Empty(_) => None,
        });
        let mut out: Vec<(Box<[u8]>, BlobPtr)> = Vec::with_capacity(slots.len());
        let mut after_empty = false;
        for (key, slot) in slots {
            let stored = match slot {
                ChildSlot::Node(ptr) => {
                    out.push((key, ptr));
                    after_empty = false;
                    continue;
                }
                ChildSlot::Empty(stored) => stored,
            };
            let needed = match (out.last(), first_node) {
                (Some(_), _) if after_empty => false,
                (Some((_, before)), _) => !self.is_edge_intact(*before, level, |children| children.len() - 1).await,
                (None, Some(after)) => !self.is_edge_intact(after, level, |_| 0).await,
                // All of them are empty: the node above decides.
                (None, None) => false,
            };
            match stored {
                Some(ptr) if needed => out.push((key, ptr)),
                Some(ptr) => sink.release(ptr),
                None if needed => {
                    let ptr = self.emit_on(level, &key, Vec::new(), sink);
                    out.push((key, ptr));
                }
                None => {}
            }
            after_empty |= needed;
        }
        out
    }

    /// Returns whether all nodes along one edge of a subtree can be read; `side` selects the child at that edge.
    async fn is_edge_intact(&self, top: BlobPtr, level: u8, side: impl Fn(&[(Box<[u8]>, BlobPtr)]) -> usize) -> bool {
        let (mut at, mut level) = (top, level);
        loop {
            let Ok(node) = self.load(at, Some(level)).await else { return false };
            let Node::Inner { children, .. } = &*node else { return true };
            at = children[side(children)].1;
            level -= 1;
        }
    }

    /// Bypasses a damaged child: changed keys get nodes of their own, and all keys between them still lead to the
    /// damaged node.  No known data is lost, and no lost key reads as absent.
    ///
    /// The damaged node is now referenced from several places.  If it became readable again, a change through one
    /// reference would rewrite and release it while the others still refer to it. The new references therefore carry a
    /// checksum that the node does not have.
    fn bypass_damaged(
        &self,
        (range, damaged): (KeyRange<'_>, BlobPtr),
        level: u8,
        changes: &[(TreeKey, TreeChange)],
        sink: &dyn NodeSink,
    ) -> Vec<(Box<[u8]>, ChildSlot)> {
        let damaged = BlobPtr { crc: LOST_CRC, ..damaged };
        let mut out: Vec<(Box<[u8]>, ChildSlot)> = vec![(range.low.into(), ChildSlot::Node(damaged))];
        for (key, change) in changes {
            debug_assert!(key[..] >= *range.low, "keys of another node");
            let slot = match change {
                TreeChange::Put(value) => {
                    ChildSlot::Node(self.emit_on(level, key, vec![(key[..].into(), value[..].into())], sink))
                }
                TreeChange::Delete => ChildSlot::Empty(None),
                TreeChange::Touch => continue,
            };
            out.pop_if(|(last, _)| last[..] == key[..]);
            out.push((key[..].into(), slot));
            let mut next = key.clone();
            next.push(0);
            if range.high.is_none_or(|high| next[..] < *high) {
                out.push((next.into(), ChildSlot::Node(damaged)));
            }
        }
        out
    }

    /// Writes a leaf, and single-child nodes above it up to the given level; `key` leads to them.
    fn emit_on(&self, level: u8, key: &[u8], pairs: Vec<(Box<[u8]>, Box<[u8]>)>, sink: &dyn NodeSink) -> BlobPtr {
        let mut ptr = self.emit(Node::Leaf(pairs), Some(key), sink).1;
        for level in 1..=level {
            ptr = self.emit(Node::Inner { level, children: vec![(key.into(), ptr)] }, None, sink).1;
        }
        ptr
    }

    fn emit_leaf(&self, pairs: Vec<(Box<[u8]>, Box<[u8]>)>, sink: &dyn NodeSink) -> Vec<(Box<[u8]>, BlobPtr)> {
        let sizes: Vec<usize> = pairs.iter().map(|(key, value)| key.len() + value.len() + 6).collect();
        let mut pairs = pairs.into_iter();
        let groups = split(&sizes);
        groups
            .into_iter()
            .map(|count| self.emit(Node::Leaf(pairs.by_ref().take(count).collect()), None, sink))
            .collect()
    }

    fn emit_inner(
        &self,
        level: u8,
        children: Vec<(Box<[u8]>, BlobPtr)>,
        sink: &dyn NodeSink,
    ) -> Vec<(Box<[u8]>, BlobPtr)> {
        let sizes: Vec<usize> = children.iter().map(|(key, _)| key.len() + 18).collect();
        let mut children = children.into_iter();
        let groups = split(&sizes);
        let node = |children| Node::Inner { level, children };
        groups.into_iter().map(|count| self.emit(node(children.by_ref().take(count).collect()), None, sink)).collect()
    }

    /// Writes a node; `key` leads to it, if not its first key.
    fn emit(&self, node: Node, key: Option<&[u8]>, sink: &dyn NodeSink) -> (Box<[u8]>, BlobPtr) {
        let key: Box<[u8]> = key.unwrap_or_else(|| node.first_key()).into();
        let ptr = sink.write(&node, &key, &node.encode());
        self.cache.insert(ptr, Rc::new(node));
        (key, ptr)
    }
}

/// Returns whether changes leave all keys as they are.
fn is_only_touched(changes: &[(TreeKey, TreeChange)]) -> bool {
    changes.iter().all(|(_, change)| *change == TreeChange::Touch)
}

/// Splits items into nodes: returns the number of items for each, with as few nodes as possible and about equal fill.
fn split(sizes: &[usize]) -> Vec<usize> {
    let total: usize = sizes.iter().sum();
    let nodes = total.div_ceil(NODE_BYTES).max(1);
    let share = total.div_ceil(nodes);
    let mut out = Vec::with_capacity(nodes);
    let (mut count, mut bytes) = (0, 0);
    for &size in sizes {
        // On disk, the item count of a node is 16 bits wide.
        if count > 0 && (bytes + size > share.max(NODE_BYTES / 2) || count == u16::MAX as usize) {
            out.push(count);
            (count, bytes) = (0, 0);
        }
        count += 1;
        bytes += size;
    }
    if count > 0 {
        out.push(count);
    }
    out
}

fn find(pairs: &[(Box<[u8]>, Box<[u8]>)], key: &[u8]) -> Option<Vec<u8>> {
    pairs.binary_search_by(|(at, _)| at[..].cmp(key)).ok().map(|i| pairs[i].1.to_vec())
}

/// Returns the index of the child that covers `key`.
fn child_of(children: &[(Box<[u8]>, BlobPtr)], key: &[u8]) -> usize {
    children.partition_point(|(first, _)| &first[..] <= key).saturating_sub(1)
}

fn merge(pairs: &[(Box<[u8]>, Box<[u8]>)], changes: &[(TreeKey, TreeChange)]) -> Vec<(Box<[u8]>, Box<[u8]>)> {
    let mut out = Vec::with_capacity(pairs.len() + changes.len());
    let mut old = pairs.iter().peekable();
    for (key, change) in changes {
        while let Some(pair) = old.next_if(|(at, _)| at[..] < key[..]) {
            out.push(pair.clone());
        }
        let before = old.next_if(|(at, _)| at[..] == key[..]);
        match change {
            TreeChange::Put(value) => out.push((key[..].into(), value[..].into())),
            TreeChange::Touch => out.extend(before.cloned()),
            TreeChange::Delete => {}
        }
    }
    out.extend(old.cloned());
    out
}
