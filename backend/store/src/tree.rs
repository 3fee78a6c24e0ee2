//! The index: a copy-on-write B+tree of byte strings whose nodes lie in the log.
//!
//! Nodes never change.  A checkpoint hands over all its changes at once and gets a new root; until that checkpoint is
//! durable, readers stay with the old one.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};

use crate::format::BlobPtr;
use crate::format::node::{LEVEL_MAX, Node};
use crate::media::Media;

/// Bytes at which a node is split.
const NODE_BYTES: usize = 4000;

/// A key.
pub type Key = Vec<u8>;
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What happens to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Set.
    Put(Vec<u8>),
    /// Removed.
    Delete,
    /// Nothing, but the nodes on the way to it are written anew (the cleaner wants their old place).
    Touch,
}

/// Where new nodes go.
pub trait NodeSink {
    /// Stores a node.
    fn write(&self, node: &Node, bytes: &[u8]) -> BlobPtr;
    /// A node is not part of the tree any more.
    fn release(&self, ptr: BlobPtr);
    /// A good moment to let others run.
    fn pause(&self) -> BoxFuture<'_, ()>;
}

struct Cached {
    ptr: BlobPtr,
    node: Rc<Node>,
    weight: usize,
    used: Cell<bool>,
}

/// The checksum of references to nodes that are given up.
const LOST_CRC: u32 = 0x4C4F_5354;

/// Nodes in memory, up to a bound.
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

    /// Bytes of memory in use, about.
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
        // Second chance: what was used since the hand last passed stays once more.
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

/// The tree's nodes; the root is the caller's, as there are two during a checkpoint.
pub struct Tree {
    media: Rc<Media>,
    cache: NodeCache,
}

impl Tree {
    pub fn new(media: Rc<Media>, cache_limit: usize) -> Self {
        Self { media, cache: NodeCache::new(cache_limit) }
    }

    /// Bytes of memory in use, about.
    pub fn weight(&self) -> usize {
        self.cache.weight()
    }

    /// Looks a key up without waiting; `None` when a node is not in memory.
    pub fn get_cached(&self, root: BlobPtr, key: &[u8]) -> Option<Option<Vec<u8>>> {
        let mut at = root;
        if at.is_none() {
            return Some(None);
        }
        loop {
            let node = self.cache.get(at)?;
            match &*node {
                Node::Leaf(pairs) => return Some(find(pairs, key)),
                Node::Inner { children, .. } => at = children[child_of(children, key)].1,
            }
        }
    }

    /// Looks a key up.
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

    /// Up to `max` pairs with keys in `from..to`, in order, and where to go on.
    pub async fn range(&self, root: BlobPtr, from: &[u8], to: &[u8], max: usize) -> Result<Vec<(Key, Vec<u8>)>> {
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
                    let in_range = children[first..].iter().take_while(|(key, _)| &key[..] < to || key.is_empty());
                    let mut next: Vec<_> = in_range.map(|(_, ptr)| (*ptr, Some(level - 1))).collect();
                    next.reverse();
                    stack.extend(next);
                }
            }
        }
        Ok(out)
    }

    /// Every node's place and content, or why it cannot be read, parents before children; for checking.  A node that
    /// several parts of a range lead to, as it cannot be read, comes once.
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

    /// The place of the node on the way to `key` at `level`; `None` when there is none.
    pub async fn place_of(&self, root: BlobPtr, key: &[u8], level: u8) -> Result<Option<BlobPtr>> {
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
        let bytes = self.media.read_blob(ptr, "a tree node").await?;
        let corrupt =
            |what: String| Error::new(ErrorKind::Corrupt, format!("a tree node at byte {}: {what}", ptr.addr));
        let node = Rc::new(Node::decode(&bytes).map_err(|error| corrupt(error.to_string()))?);
        if level.is_some_and(|level| level != node.level()) {
            return Err(corrupt(format!("level {} where {level:?} was expected", node.level())));
        }
        self.cache.insert(ptr, node.clone());
        Ok(node)
    }

    /// The tree with `changes` (sorted by key) made: its new root.
    pub async fn apply(&self, root: BlobPtr, changes: &[(Key, Change)], sink: &dyn NodeSink) -> Result<BlobPtr> {
        if changes.is_empty() {
            return Ok(root);
        }
        debug_assert!(changes.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let mut level = 0;
        let mut nodes = if root.is_none() {
            self.emit_leaf(merge(&[], changes), sink)
        } else {
            let node = self.load(root, None).await?;
            level = node.level();
            self.rewrite(root, node, changes, sink).await?
        };
        while nodes.len() > 1 {
            level += 1;
            assert!(level <= LEVEL_MAX, "a tree higher than any store can need");
            nodes = self.emit_inner(level, nodes, sink);
        }
        let Some((_, mut top)) = nodes.pop() else { return Ok(BlobPtr::default()) };
        // A root with one child is no use.
        loop {
            let node = self.load(top, None).await?;
            match &*node {
                // Nothing can be put around a damaged root, so it stays below one.
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

    /// What takes the place of the node at `ptr`.
    fn rewrite<'a>(
        &'a self,
        ptr: BlobPtr,
        node: Rc<Node>,
        changes: &'a [(Key, Change)],
        sink: &'a dyn NodeSink,
    ) -> BoxFuture<'a, Result<Vec<(Box<[u8]>, BlobPtr)>>> {
        Box::pin(async move {
            let out = match &*node {
                Node::Leaf(pairs) => self.emit_leaf(merge(pairs, changes), sink),
                Node::Inner { level, children } => {
                    let mut kept = Vec::with_capacity(children.len() + 1);
                    let mut rest = changes;
                    for (i, (key, child)) in children.iter().enumerate() {
                        let upto = match children.get(i + 1) {
                            Some((next, _)) => rest.partition_point(|(key, _)| key[..] < next[..]),
                            None => rest.len(),
                        };
                        let (mine, later) = rest.split_at(upto);
                        rest = later;
                        if mine.is_empty() {
                            kept.push((key.clone(), *child));
                            continue;
                        }
                        let mut found = self.load(*child, Some(level - 1)).await;
                        if found.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
                            // A bit may have flipped on the way.  What follows is for good.
                            found = self.load(*child, Some(level - 1)).await;
                        }
                        match found {
                            Ok(node) => {
                                let new = self.rewrite(*child, node, mine, sink).await?;
                                if new.is_empty() && is_island(children, i, mine) {
                                    // Its key would lead to the damaged one if it just went.
                                    kept.push((key.clone(), self.emit_on(level - 1, key, Vec::new(), sink)));
                                }
                                kept.extend(new);
                            }
                            // What cannot be read now may be read later: then the checkpoint is tried again.
                            Err(error) if error.kind() == ErrorKind::Corrupt => {
                                tracing::error!(?error, "what is stored is put around a damaged part of the index");
                                kept.extend(self.put_around((key, *child), level - 1, mine, sink));
                            }
                            Err(error) => return Err(error),
                        }
                    }
                    if let Some(first) = kept.first_mut() {
                        // Smaller keys than any there come here too.
                        first.0 = children[0].0.clone().min(first.0.clone());
                    }
                    sink.pause().await;
                    self.emit_inner(*level, kept, sink)
                }
            };
            sink.release(ptr);
            self.cache.forget(ptr);
            Ok(out)
        })
    }

    /// What takes the place of a child that is damaged: the changed keys get nodes of their own, and every key between
    /// them leads to the damaged one as before.  So nothing that is known is lost, and nothing that is lost reads as if
    /// it had never been.
    ///
    /// From now on several places lead to the damaged node.  Should it ever read well again, a change would take it apart
    /// at one of them and give it up while the others still lead there; so they lead to it with a checksum that it has
    /// not.
    fn put_around(
        &self,
        (first, damaged): (&[u8], BlobPtr),
        level: u8,
        changes: &[(Key, Change)],
        sink: &dyn NodeSink,
    ) -> Vec<(Box<[u8]>, BlobPtr)> {
        let damaged = BlobPtr { crc: LOST_CRC, ..damaged };
        let mut out: Vec<(Box<[u8]>, BlobPtr)> = vec![(first.into(), damaged)];
        for (key, change) in changes {
            let pairs = match change {
                Change::Put(value) => vec![(key[..].into(), value[..].into())],
                // A leaf without keys says that there is nothing.
                Change::Delete => Vec::new(),
                Change::Touch => continue,
            };
            let ptr = self.emit_on(level, key, pairs, sink);
            match out.last() {
                Some((last, _)) if last[..] == key[..] => {
                    out.pop();
                }
                // Smaller keys than any come to the first child; so they go on doing.
                Some((last, _)) if last[..] > key[..] => out[0].0 = Box::default(),
                _ => {}
            }
            out.push((key[..].into(), ptr));
            let mut next = key.clone();
            next.push(0);
            out.push((next.into(), damaged));
        }
        out
    }

    /// A leaf, and as many nodes with one child above it as make it a node of that level; `key` is where it begins.
    fn emit_on(&self, level: u8, key: &[u8], pairs: Vec<(Box<[u8]>, Box<[u8]>)>, sink: &dyn NodeSink) -> BlobPtr {
        let mut ptr = self.emit(Node::Leaf(pairs), sink).1;
        for level in 1..=level {
            ptr = self.emit(Node::Inner { level, children: vec![(key.into(), ptr)] }, sink).1;
        }
        ptr
    }

    fn emit_leaf(&self, pairs: Vec<(Box<[u8]>, Box<[u8]>)>, sink: &dyn NodeSink) -> Vec<(Box<[u8]>, BlobPtr)> {
        let sizes: Vec<usize> = pairs.iter().map(|(key, value)| key.len() + value.len() + 6).collect();
        let mut pairs = pairs.into_iter();
        let groups = split(&sizes);
        groups.into_iter().map(|count| self.emit(Node::Leaf(pairs.by_ref().take(count).collect()), sink)).collect()
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
        groups.into_iter().map(|count| self.emit(node(children.by_ref().take(count).collect()), sink)).collect()
    }

    fn emit(&self, node: Node, sink: &dyn NodeSink) -> (Box<[u8]>, BlobPtr) {
        let ptr = sink.write(&node, &node.encode());
        let key = node.first_key().into();
        self.cache.insert(ptr, Rc::new(node));
        (key, ptr)
    }
}

/// The child that has become empty by these changes lies amid a damaged one - or, at an end, where its other neighbour is
/// not known, it may.
fn is_island(children: &[(Box<[u8]>, BlobPtr)], i: usize, changes: &[(Key, Change)]) -> bool {
    match (i.checked_sub(1).map(|before| children[before].1), children.get(i + 1)) {
        (Some(before), Some((_, after))) => before == *after,
        _ => matches!(changes, [(key, _)] if key[..] == children[i].0[..]),
    }
}

/// How many items go into each node: as few nodes as hold them, about equally full.
fn split(sizes: &[usize]) -> Vec<usize> {
    let total: usize = sizes.iter().sum();
    let nodes = total.div_ceil(NODE_BYTES).max(1);
    let share = total.div_ceil(nodes);
    let mut out = Vec::with_capacity(nodes);
    let (mut count, mut bytes) = (0, 0);
    for &size in sizes {
        // The count of a node is 16 bits wide on disk.
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

/// The child in which `key` is, if it is anywhere.
fn child_of(children: &[(Box<[u8]>, BlobPtr)], key: &[u8]) -> usize {
    children.partition_point(|(first, _)| &first[..] <= key).saturating_sub(1)
}

fn merge(pairs: &[(Box<[u8]>, Box<[u8]>)], changes: &[(Key, Change)]) -> Vec<(Box<[u8]>, Box<[u8]>)> {
    let mut out = Vec::with_capacity(pairs.len() + changes.len());
    let mut old = pairs.iter().peekable();
    for (key, change) in changes {
        while let Some(pair) = old.next_if(|(at, _)| at[..] < key[..]) {
            out.push(pair.clone());
        }
        let before = old.next_if(|(at, _)| at[..] == key[..]);
        match change {
            Change::Put(value) => out.push((key[..].into(), value[..].into())),
            Change::Touch => out.extend(before.cloned()),
            Change::Delete => {}
        }
    }
    out.extend(old.cloned());
    out
}
