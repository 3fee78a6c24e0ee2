//! Scan of the readable part of a tree, and a tree without its damaged nodes.

use std::rc::Rc;

use forebay_block::{Error, Result};

use super::{BoxFuture, LOST_CRC, NodeSink, Tree, TreeKey, read_unless_damaged};
use crate::format::BlobPtr;
use crate::format::node::Node;

/// Node found by a [`TreeScan`].
pub enum ScannedNode {
    /// Readable node.
    Intact(BlobPtr, Rc<Node>),
    /// Reference to a node that is damaged for good.
    Damaged {
        /// Location of the node.
        ptr: BlobPtr,
        /// Keys that lead to it: from the first one on, and below the second one if there is one.
        keys: (TreeKey, Option<TreeKey>),
        /// Error of the last attempt to read it.
        error: Error,
    },
}

/// Scan of a tree in key order, parents before children, past damaged nodes.
pub struct TreeScan<'a> {
    tree: &'a Tree,
    stack: Vec<(BlobPtr, Option<u8>, TreeKey, Option<TreeKey>)>,
}

impl<'a> TreeScan<'a> {
    /// Begins a scan at a root.
    pub fn new(tree: &'a Tree, root: BlobPtr) -> Self {
        Self { tree, stack: if root.is_none() { vec![] } else { vec![(root, None, TreeKey::new(), None)] } }
    }

    /// Returns the next node.
    ///
    /// # Errors
    /// Errors of the device that may be transient.
    pub async fn next(&mut self) -> Result<Option<ScannedNode>> {
        let Some((ptr, level, low, high)) = self.stack.pop() else { return Ok(None) };
        let load = async || self.tree.load(ptr, level).await;
        // One attempt is enough for a node that was given up before.
        let read = match load().await {
            Err(_) if ptr.crc != LOST_CRC => read_unless_damaged(&self.tree.media, load).await?,
            read => read,
        };
        let node = match read {
            Ok(node) => node,
            Err(error) => return Ok(Some(ScannedNode::Damaged { ptr, keys: (low, high), error })),
        };
        if let Node::Inner { level, children } = &*node {
            for (i, (key, child)) in children.iter().enumerate().rev() {
                let low = if i == 0 { low.clone() } else { key.to_vec() };
                let high = children.get(i + 1).map(|(next, _)| next.to_vec()).or_else(|| high.clone());
                self.stack.push((*child, Some(level - 1), low, high));
            }
        }
        Ok(Some(ScannedNode::Intact(ptr, node)))
    }
}

impl Tree {
    /// Returns the root of a tree with all readable pairs and without damaged nodes: lost keys are absent in it. Nodes
    /// that are no longer part of the tree are not released.
    pub async fn prune(&self, root: BlobPtr, sink: &dyn NodeSink) -> Result<BlobPtr> {
        if root.is_none() {
            return Ok(root);
        }
        let Some(node) = self.load_unless_damaged(root, None).await? else { return Ok(BlobPtr::default()) };
        let level = node.level();
        let nodes = self.prune_node(&[], root, node, sink).await?;
        self.emit_top(level, nodes, sink).await
    }

    /// Returns what is left of a node: the node itself if nothing below it is damaged. `low` is the smallest key that
    /// leads to it.
    fn prune_node<'a>(
        &'a self,
        low: &'a [u8],
        ptr: BlobPtr,
        node: Rc<Node>,
        sink: &'a dyn NodeSink,
    ) -> BoxFuture<'a, Result<Vec<(Box<[u8]>, BlobPtr)>>> {
        Box::pin(async move {
            let (level, children) = match &*node {
                Node::Leaf(pairs) if pairs.is_empty() => return Ok(Vec::new()),
                Node::Leaf(_) => return Ok(vec![(low.into(), ptr)]),
                Node::Inner { level, children } => (*level, children),
            };
            let mut kept: Vec<(Box<[u8]>, BlobPtr)> = Vec::with_capacity(children.len());
            for (i, (key, child)) in children.iter().enumerate() {
                let low = if i == 0 { low } else { &key[..] };
                // One attempt is enough for a node that was given up before.
                let node = match child.crc == LOST_CRC {
                    true => self.load(*child, Some(level - 1)).await.ok(),
                    false => self.load_unless_damaged(*child, Some(level - 1)).await?,
                };
                if let Some(node) = node {
                    kept.extend(self.prune_node(low, *child, node, sink).await?);
                }
            }
            sink.pause().await;
            if kept.iter().map(|(_, ptr)| ptr).eq(children.iter().map(|(_, ptr)| ptr)) {
                return Ok(vec![(low.into(), ptr)]);
            }
            if let Some(first) = kept.first_mut() {
                first.0 = low.into();
            }
            Ok(self.emit_inner(level, kept, sink))
        })
    }
}
