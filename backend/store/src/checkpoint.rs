//! Checkpoints: the state as of one position of the log, stored so that replay need go no further back.
//!
//! Writers do not wait: what changes while a checkpoint is under way is given to it as it was first
//! ([`Core::mark_dirty`]).

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;

use forebay_block::{Buf, Error, Result};
use forebay_reactor::yield_now;

use crate::core::Core;
use crate::format::BlobPtr;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::entry::Entry;
use crate::format::node::Node;
use crate::format::page::Slot;
use crate::log::Log;
use crate::tree::NodeSink;

/// Objects stored between two pauses.
const OBJECTS_A_TURN: usize = 16;

/// Where a checkpoint's nodes go: into the log, counted when they come, released when it has succeeded.
struct Nodes<'a> {
    core: &'a Core,
    log: &'a Log,
    added: RefCell<Vec<BlobPtr>>,
    released: RefCell<Vec<BlobPtr>>,
}

impl NodeSink for Nodes<'_> {
    fn write(&self, node: &Node, bytes: &[u8]) -> BlobPtr {
        let len = bytes.len() as u32;
        let entry = |at| Entry::Node { level: node.level(), at, len, key: node.first_key().to_vec() };
        let ptr = self.log.append_blob(bytes, entry);
        self.core.segments.borrow_mut().add_checkpoint_blob(ptr);
        self.added.borrow_mut().push(ptr);
        ptr
    }

    fn release(&self, ptr: BlobPtr) {
        self.released.borrow_mut().push(ptr);
    }

    fn pause(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(async {
            if self.log.is_congested() {
                self.log.wait_uncongested().await;
            } else {
                yield_now().await;
            }
        })
    }
}

impl Core {
    /// Bytes of changed metadata in memory, about.
    pub fn dirty_bytes(&self) -> usize {
        let page = crate::format::PAGE_BLOCKS as usize * size_of::<Slot>();
        self.dirty_pages.get() * page + self.dirty.borrow().len() * 256 + self.overlay_bytes.get()
    }

    /// Bytes of memory that metadata takes, about.
    pub fn metadata_bytes(&self) -> usize {
        self.objects.weight() + self.tree.weight() + self.changes_bytes()
    }

    /// Bytes of memory that changed keys take, about.
    pub fn changes_bytes(&self) -> usize {
        self.overlay_bytes.get() + self.frozen_bytes.get()
    }

    /// A checkpoint is due.
    pub fn wants_checkpoint(&self) -> bool {
        let since = self.log().bytes_appended() - self.appended_at_redo.get();
        // What a checkpoint that failed has left frozen counts too: writers wait for it.
        let changed = self.dirty_bytes() + self.frozen_bytes.get();
        !self.checkpointing.get() && (since >= self.checkpoint_interval || changed >= self.dirty_max)
    }

    /// So much is changed and not stored that writers wait for the checkpoint.
    pub fn is_dirty_beyond_bounds(&self) -> bool {
        self.dirty_bytes() + self.frozen_bytes.get() >= self.dirty_max * 3 / 2
    }

    /// Takes a checkpoint.  `clean`: the last one, nothing follows it in the log.
    pub async fn checkpoint(&self, clean: bool) -> Result<()> {
        assert!(!self.checkpointing.replace(true), "two checkpoints at once");
        let done = self.take_checkpoint(clean).await;
        if done.is_err() {
            self.segments.borrow_mut().abandon_checkpoint();
        }
        self.checkpointing.set(false);
        self.changed.notify_all();
        done
    }

    async fn take_checkpoint(&self, clean: bool) -> Result<()> {
        let log = self.log();
        // Everything up to here is in this checkpoint, nothing after.  No waiting until the borders are drawn.
        let redo = log.position();
        let (redo_segment, redo_next_segment) = log.segment_and_next();
        let appended = log.bytes_appended();
        let mut anchor = Anchor {
            store: self.store_id(),
            generation: self.generation.get() + 1,
            epoch: self.epoch.get(),
            redo,
            redo_next_segment,
            next_oid: self.next_oid.get(),
            snap_seq: self.snap_seq.get(),
            version: self.version.get(),
            objects: self.object_count.get(),
            user_bytes: self.user_bytes.get(),
            device_bytes: self.device_bytes_before.get() + appended,
            clean,
            ..Anchor::default()
        };
        self.segments.borrow_mut().begin_checkpoint();
        self.round.set(self.round.get() + 1);
        let changes = self.overlay.take();
        self.frozen.borrow_mut().extend(changes);
        self.frozen_bytes.set(self.frozen_bytes.get() + self.overlay_bytes.take());
        let dirty = self.dirty.take();

        for (i, object) in dirty.into_iter().enumerate() {
            if object.dirty_round.get() != 0 && object.dirty_round.get() != self.round.get() {
                self.store_object(&object);
            }
            if i % OBJECTS_A_TURN == OBJECTS_A_TURN - 1 {
                if log.is_congested() {
                    log.wait_uncongested().await;
                }
                yield_now().await;
            }
        }

        let sink = Nodes { core: self, log: &log, added: RefCell::default(), released: RefCell::default() };
        let changes = self.frozen_changes();
        let stored = self.tree.apply(self.root.get(), &changes, &sink).await;
        let finished = match stored {
            Ok(root) => {
                let released = sink.released.take();
                released.iter().for_each(|&ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                anchor.root = root;
                let finished = self.finish(&log, &mut anchor).await;
                if finished.is_err() {
                    // The next one begins with the old root again.
                    released.into_iter().for_each(|ptr| self.segments.borrow_mut().add_checkpoint_blob(ptr));
                    sink.added.take().into_iter().for_each(|ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                }
                finished
            }
            Err(error) => {
                // The tree stays as it was; the new nodes are nobody's.
                sink.added.take().into_iter().for_each(|ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                Err(error)
            }
        };
        if let Err(error) = finished {
            tracing::error!(?error, "a checkpoint failed");
            return Err(error);
        }
        self.root.set(anchor.root);
        self.frozen.take();
        self.frozen_bytes.set(0);
        self.generation.set(anchor.generation);
        self.table_at.set(anchor.segments);
        self.appended_at_redo.set(appended);
        self.checkpoints.set(self.checkpoints.get() + 1);
        let mut segments = self.segments.borrow_mut();
        let keep = segments.geometry.segment_of_byte(anchor.segments.addr);
        let freed = segments.commit_checkpoint(redo_segment, keep);
        let (generation, free) = (anchor.generation, segments.free_count());
        tracing::debug!(generation, freed, free, log_bytes = appended, "a checkpoint");
        Ok(())
    }

    /// Stores the segment table, makes everything durable, then says so in the anchor.
    async fn finish(&self, log: &Log, anchor: &mut Anchor) -> Result<()> {
        let table = self.segments.borrow().checkpoint_table().encode();
        let len = table.len() as u32;
        anchor.segments = log.append_blob(&table, |at| Entry::Segments { at, len });
        log.sync(log.last_seq()).await?;
        self.write_anchor(anchor).await
    }

    /// Writes an anchor durably, one copy after the other: a crash leaves one of them as it should be or as it was, so
    /// that two that cannot be read tell of damage.
    pub async fn write_anchor(&self, anchor: &Anchor) -> Result<()> {
        let block = Buf::copy_of(&anchor.encode());
        let failed =
            |error| Error::from_io(error, format!("writing an anchor of {}", self.media.file.path().display()));
        for at in SLOTS[(anchor.generation % 2) as usize] {
            self.media.file.write_at(block.clone(), at).await.map_err(failed)?;
            self.media.file.sync_data().await.map_err(|error| {
                let error = failed(error);
                self.log().flush_failed(error.clone());
                error
            })?;
        }
        Ok(())
    }

    /// What batches and anchors carry of the store's identity.
    pub fn store_id(&self) -> u64 {
        store_id(&self.superblock.uuid)
    }
}

/// What batches and anchors carry of a store's identity.
pub fn store_id(uuid: &[u8; 16]) -> u64 {
    u64::from_le_bytes(uuid[..8].try_into().expect("eight bytes"))
}
