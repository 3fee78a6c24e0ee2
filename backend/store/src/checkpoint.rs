//! Checkpoints: the state at one position of the log, stored so that replay can start there.
//!
//! Writers are not blocked: an object that changes during a checkpoint is first passed to it in its old state
//! ([`Core::mark_dirty`]).

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;

use forebay_block::{Buf, Result};
use forebay_reactor::{wall_clock, yield_now};

use crate::core::Core;
use crate::format::BlobPtr;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::entry::StoreEntry;
use crate::format::node::Node;
use crate::format::record::CheckpointRecord;
use crate::log::StoreLog;
use crate::tree::NodeSink;

/// Objects stored between two yields.
const OBJECTS_A_TURN: usize = 16;

/// Node sink of a checkpoint: appends nodes to the log, counts them when written, and releases replaced ones after
/// success.
struct Nodes<'a> {
    core: &'a Core,
    log: &'a StoreLog,
    added: RefCell<Vec<BlobPtr>>,
    released: RefCell<Vec<BlobPtr>>,
}

impl NodeSink for Nodes<'_> {
    fn write(&self, node: &Node, key: &[u8], bytes: &[u8]) -> BlobPtr {
        let len = bytes.len() as u32;
        let entry = |at| StoreEntry::Node { level: node.level(), at, len, key: key.to_vec() };
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
    /// Returns the approximate size of changed metadata in memory, in bytes.
    pub fn dirty_bytes(&self) -> usize {
        self.dirty.bytes() + self.index.overlay_bytes()
    }

    /// Returns the approximate memory use of metadata, in bytes.
    pub fn metadata_bytes(&self) -> usize {
        self.objects.weight() + self.index.tree_weight() + self.index.changes_bytes()
    }

    /// Returns the approximate size of changed metadata in memory, in bytes, with what the checkpoint in progress stores.
    /// Changes still frozen after a failed checkpoint count too, because writers wait for them.
    fn changed_bytes(&self) -> usize {
        self.dirty_bytes() + self.index.frozen_bytes()
    }

    /// Returns whether a checkpoint is due.
    pub fn wants_checkpoint(&self) -> bool {
        self.checkpoints.is_due(self.log().bytes_appended(), self.changed_bytes())
    }

    /// Returns whether there is so much dirty metadata that writers must wait for the checkpoint.
    pub fn is_dirty_beyond_bounds(&self) -> bool {
        self.checkpoints.is_beyond_bounds(self.changed_bytes())
    }

    /// Takes a checkpoint.  `clean`: the last one before closing, which nothing follows in the log.
    pub async fn checkpoint(&self, clean: bool) -> Result<()> {
        self.checkpoints.begin();
        let done = self.take_checkpoint(clean).await;
        if done.is_err() {
            self.segments.borrow_mut().abandon_checkpoint();
        }
        self.checkpoints.end();
        self.maintenance.notify_writers();
        done
    }

    async fn take_checkpoint(&self, clean: bool) -> Result<()> {
        let log = self.log();
        // The checkpoint includes everything up to here, and nothing later.  No await until the boundary is recorded.
        let redo = log.position();
        let (redo_segment, redo_next_segment) = log.segment_and_next();
        let appended = log.bytes_appended();
        let mut anchor = Anchor {
            store: self.store_id(),
            generation: self.checkpoints.generation() + 1,
            epoch: self.checkpoints.epoch(),
            redo,
            redo_next_segment,
            next_oid: self.counters.next_oid(),
            snap_seq: self.counters.snap_seq(),
            version: self.counters.version(),
            objects: self.counters.objects(),
            user_bytes: self.counters.user_bytes(),
            device_bytes: self.counters.device_bytes(appended),
            clean,
            ..Anchor::default()
        };
        self.segments.borrow_mut().begin_checkpoint();
        self.blobs.store(&self.index);
        self.store_segment_uses();
        self.index.freeze();
        let dirty = self.dirty.begin_round();

        for (i, object) in dirty.into_iter().enumerate() {
            if self.dirty.is_due(&object) {
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
        let stored = self.index.write_frozen(&sink).await;
        let finished = match stored {
            Ok(root) => {
                let released = sink.released.take();
                released.iter().for_each(|&ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                anchor.root = root;
                let finished = self.finish(&log, &mut anchor).await;
                if finished.is_err() {
                    // The next checkpoint starts from the old root again.
                    released.into_iter().for_each(|ptr| self.segments.borrow_mut().add_checkpoint_blob(ptr));
                    sink.added.take().into_iter().for_each(|ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                }
                finished
            }
            Err(error) => {
                // The tree is unchanged; the new nodes are unreferenced.
                sink.added.take().into_iter().for_each(|ptr| self.segments.borrow_mut().sub_checkpoint_blob(ptr));
                Err(error)
            }
        };
        if let Err(error) = finished {
            tracing::error!(?error, "checkpoint {} of {} failed", anchor.generation, self.media.device.name());
            return Err(error);
        }
        self.index.commit(anchor.root);
        self.checkpoints.complete(anchor.generation, appended);
        let mut segments = self.segments.borrow_mut();
        let keep = segments.geometry.segment_of_byte(anchor.segments.addr);
        let freed = segments.commit_checkpoint(redo_segment, keep);
        let (generation, free) = (anchor.generation, segments.free_count());
        tracing::debug!(generation, freed, free, log_bytes = appended, "checkpoint completed");
        Ok(())
    }

    /// Makes everything durable, stores the segment table and the checkpoint record, and then writes the anchor.
    ///
    /// The record in the log is written only when everything it references is durable: if the record is found, the
    /// checkpoint is complete.
    async fn finish(&self, log: &StoreLog, anchor: &mut Anchor) -> Result<()> {
        log.sync(log.last_seq()).await?;
        let table = self.segments.borrow().checkpoint_table().encode();
        let len = table.len() as u32;
        let taken_s = wall_clock().as_secs();
        let record = |segments| {
            let anchor = Anchor { segments, ..anchor.clone() };
            let record = CheckpointRecord { superblock: self.current_superblock(), anchor, taken_s };
            StoreEntry::Checkpoint { record: record.encode() }
        };
        anchor.segments = log.append_described_blob(&table, |at| StoreEntry::Segments { at, len }, record);
        log.sync(log.last_seq()).await?;
        self.write_anchor(anchor).await
    }

    /// Writes an anchor durably, one copy after the other. A crash leaves at least one copy intact, old or new, so that
    /// two unreadable copies are evidence of damage.
    pub async fn write_anchor(&self, anchor: &Anchor) -> Result<()> {
        let block = Buf::copy_of(&anchor.encode());
        let places = SLOTS[(anchor.generation % 2) as usize];
        self.media.device.write_anchor(&block, places, |error| self.log().flush_failed(error)).await
    }

    /// Returns the store number that batches and anchors carry.
    pub fn store_id(&self) -> u64 {
        self.superblock.store_number()
    }
}
