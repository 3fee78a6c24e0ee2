//! Transaction commit: applies the planned changes and appends them to the log atomically, without waiting in between.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, Error, ErrorKind, ObjectName, Result, SnapContext};

use crate::core::Core;
use crate::crypt::BlockCipher;
use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot, SECTOR};
use crate::format::entry::{StoreEntry, StoredBlob, VALUE_INLINE_MAX};
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::keys;
use crate::object::{HEAD, StoreObject};
use crate::pack::PackedBlob;
use crate::plan::{Runs, TransactionPlan};

impl Core {
    /// Creates a new object, in the log and in memory, whose data is encrypted with key number `key`, or not (0).
    pub fn create(&self, name: &ObjectName, key: u64) -> Rc<StoreObject> {
        let oid = self.counters.next_oid();
        let entry = StoreEntry::Create { oid, key, namespace: name.namespace().into(), name: name.name().into() };
        self.log().append(&entry);
        self.apply_create(StoreObject::new(oid, key, name.clone()))
    }

    /// Returns the key number and the cipher of an object, or of a new one with that name.
    ///
    /// # Errors
    /// See [`VolumeKeys::cipher`](crate::crypt::VolumeKeys::cipher).
    pub fn encryption_of(
        &self,
        name: &ObjectName,
        object: Option<&Rc<StoreObject>>,
    ) -> Result<(u64, Option<Rc<BlockCipher>>)> {
        let key = object.map_or_else(|| self.volume_keys.number_for(name), |object| object.key);
        Ok((key, self.volume_keys.cipher(key)?))
    }

    /// Writes whole blocks of an object, starting at block `start`.
    pub fn write_blocks(&self, write: &ObjectWrite<'_>, start: u32, data: &BufList) {
        let &ObjectWrite { object, cipher, size, version } = write;
        // Marking the object dirty may itself append to the log, so it comes first.
        self.mark_dirty(object);
        let log = self.log();
        let oid = object.oid;
        log.append_blocks(data, cipher, StoreEntry::write_size, |mut run| {
            let (payload, block, crcs) = (run.payload, run.block, run.take_crcs());
            self.media.cache.put(block, &crcs, run.plain.iter().map(|buf| &buf[..]));
            let entry = StoreEntry::Write { oid, start: start + run.done as u32, payload, size, version, crcs };
            self.apply(object, &entry, block, None);
            entry
        });
    }

    /// Appends an entry and applies it.
    fn perform(&self, object: &Rc<StoreObject>, entry: StoreEntry) {
        self.mark_dirty(object);
        self.log().append(&entry);
        self.apply(object, &entry, 0, None);
    }

    /// Applies the planned changes, and appends them to the log as one transaction. Returns the object version and the
    /// batch number.
    pub fn commit(
        &self,
        name: &ObjectName,
        mut plan: TransactionPlan,
        snapc: Option<&SnapContext>,
    ) -> Result<(u64, u64)> {
        // A snapshot removed while this transaction waited is still recorded in memory; a clone for it would never be
        // trimmed.
        plan.kept_snaps.retain(|&snap| !matches!(self.index.lookup_cached(&keys::snap_removed(snap)), Some(Some(_))));
        let added = self.bytes_added(&plan);
        if added > self.space.available() {
            return Err(self.space.full());
        }
        if let Some(object) = plan.object.as_ref().filter(|_| !plan.kept_snaps.is_empty()) {
            // The record with all its clones is one blob, and a blob must fit in one segment.
            let clones = object.state().clones.len() + 1;
            let snaps: usize = object.state().clones.iter().map(|clone| clone.snaps.len()).sum();
            let pages: usize = object.state().clones.iter().map(|clone| clone.map.pages().len()).sum();
            let kept = object.state().head.pages().len();
            let bytes = 20 * clones + 8 * (snaps + plan.kept_snaps.len()) + BlobPtr::SIZE * (pages + kept);
            if bytes > self.superblock.segment_size as usize / 4 {
                let text = format!("{name}: {clones} snapshots of it are more than its record can hold");
                return Err(Error::new(ErrorKind::NoSpace, text));
            }
        }
        let (key, cipher) = match plan.grows() {
            true => self.encryption_of(name, plan.object.as_ref())?,
            // Nothing is encrypted, so that volumes can be removed without their keys.
            false => (self.volume_keys.number_for(name), None),
        };
        let version = self.counters.version() + 1;
        let log = self.log();
        log.begin_transaction();
        let object = match plan.object {
            Some(object) => object,
            None if plan.exists => self.create(name, key),
            None => {
                // No effect: the object never existed, or was created and removed again.
                self.counters.note_version(version);
                return Ok((version, log.end_transaction()));
            }
        };
        if let Some(snapc) = snapc {
            self.keep_for_snapshots(&object, snapc.seq, plan.kept_snaps, plan.kept_kv);
        }
        let oid = object.oid;
        match plan.base {
            Some(HEAD) => {}
            Some(clone) => self.perform(&object, StoreEntry::Rollback { oid, clone, version }),
            None if object.state().exists && plan.exists => {
                let count = object.state().head.blocks();
                self.perform(&object, StoreEntry::Unmap { oid, start: 0, count, size: 0, version });
            }
            None => {}
        }
        for (key, value) in plan.kv {
            self.commit_kv(&object, HEAD, key, value);
        }
        if plan.exists {
            let size = plan.size;
            let mut blocks = plan.blocks;
            let write = ObjectWrite { object: &object, cipher: cipher.as_deref(), size, version };
            self.commit_blobs(&write, plan.blobs, &mut blocks);
            self.commit_blocks(&write, blocks);
            let state = object.state();
            let settled = state.exists && state.size == size && state.version == version;
            drop(state);
            if !settled {
                self.perform(&object, StoreEntry::Unmap { oid, start: 0, count: 0, size, version });
            }
        } else if object.state().exists {
            self.perform(&object, StoreEntry::Remove { oid, version });
        }
        self.counters.note_version(version);
        let seq = log.end_transaction();
        self.after_write();
        Ok((version, seq))
    }

    /// Returns an upper bound of the growth of stored data, in bytes.
    fn bytes_added(&self, plan: &TransactionPlan) -> u64 {
        let kv: usize =
            plan.kv.iter().map(|(key, value)| value.as_ref().map_or(0, |value| key.len() + value.len())).sum();
        let blocks = plan.blocks.iter().filter(|(block, data)| {
            let stored = || {
                let Some(object) = plan.object.as_ref().filter(|_| plan.base == Some(HEAD)) else { return false };
                let state = object.state();
                let slot = state.head.get(**block);
                // A block preserved by a snapshot is not freed when it is overwritten, and neither is a part of a blob.
                let plain = slot.block != 0 && BlobSlot::of(slot.block).is_none();
                plain && plan.kept_snaps.is_empty() && !state.is_shared(HEAD, **block, slot)
            };
            data.is_some() && !plan.blobs.iter().any(|blob| blob.contains(**block)) && !stored()
        });
        let blobs: usize = plan.blobs.iter().map(|blob| blob.stored.len()).sum();
        let kept: usize = plan.kept_kv.iter().map(|(key, value)| key.len() + value.len()).sum();
        (kv + kept + blobs) as u64 + blocks.count() as u64 * BLOCK64
    }

    /// Preserves the head as a clone if there are snapshots that it has not seen.
    fn keep_for_snapshots(&self, object: &Rc<StoreObject>, seq: u64, snaps: Vec<u64>, kv: Vec<(Vec<u8>, Vec<u8>)>) {
        if seq <= object.state().snap_seq {
            return;
        }
        let made = !snaps.is_empty();
        self.perform(object, StoreEntry::Clone { oid: object.oid, seq, snaps });
        if made {
            kv.into_iter().for_each(|(key, value)| self.commit_kv(object, seq, key, Some(value)));
        }
    }

    fn commit_kv(&self, object: &Rc<StoreObject>, of: u64, key: Vec<u8>, value: Option<Vec<u8>>) {
        let oid = object.oid;
        match value {
            None => self.perform(object, StoreEntry::KvRemove { oid, of, key }),
            Some(value) if value.len() <= VALUE_INLINE_MAX => {
                self.perform(object, StoreEntry::KvSet { oid, of, key, value })
            }
            Some(value) => {
                self.mark_dirty(object);
                let (len, crc) = (value.len() as u32, crc32c(&value));
                let log = self.log();
                log.append_blob(&value, |at| StoreEntry::KvSetLong { oid, of, key: key.clone(), at, len, crc });
                self.apply(object, &StoreEntry::KvSetLong { oid, of, key, at: 0, len, crc }, 0, Some(value));
            }
        }
    }

    /// Writes the blobs, and removes their blocks from those that are still to be written.
    fn commit_blobs(
        &self,
        write: &ObjectWrite<'_>,
        blobs: Vec<PackedBlob>,
        blocks: &mut BTreeMap<u32, Option<BufList>>,
    ) {
        for blob in blobs {
            let mut data = BufList::new();
            for block in blob.start..blob.start + blob.blocks {
                data.append(blocks.remove(&block).flatten().expect("a blob has blocks that are written"));
            }
            self.write_blob(write, &blob, &data);
        }
    }

    /// Writes a blob, whose blocks have the content `data`.
    pub fn write_blob(&self, write: &ObjectWrite<'_>, blob: &PackedBlob, data: &BufList) {
        let &ObjectWrite { object, cipher, size, version } = write;
        let PackedBlob { start, blocks, stored } = blob;
        debug_assert!(data.len() == *blocks as usize * BLOCK, "a blob of other blocks");
        // Marking the object dirty may itself append to the log, so it comes first.
        self.mark_dirty(object);
        self.log().append_data_blob(stored, cipher, |payload, sector, crc| {
            let sectors = (stored.len() / SECTOR) as u8;
            let first = BlobSlot { sector, sectors, index: 0 }.location();
            let crcs = [crc; BLOB_BLOCKS_MAX as usize];
            self.media.cache.put(first, &crcs[..*blocks as usize], data.parts().iter().map(|part| &part[..]));
            let blob = StoredBlob { start: *start, blocks: *blocks as u8, payload, sectors, crc };
            let entry = StoreEntry::WriteBlob { oid: object.oid, blob, size, version };
            self.apply(object, &entry, sector, None);
            entry
        });
    }

    /// Removes keys and snapshots from a clone, in one transaction.
    pub fn trim_clone(&self, object: &Rc<StoreObject>, clone: u64, snaps: Vec<u64>, kv: Vec<Vec<u8>>) {
        let log = self.log();
        log.begin_transaction();
        kv.into_iter().for_each(|key| self.commit_kv(object, clone, key, None));
        self.perform(object, StoreEntry::CloneSnaps { oid: object.oid, clone, snaps });
        log.end_transaction();
        self.after_write();
    }

    fn commit_blocks(&self, write: &ObjectWrite<'_>, blocks: BTreeMap<u32, Option<BufList>>) {
        let &ObjectWrite { object, size, version, .. } = write;
        let oid = object.oid;
        let mut holes = Runs::new(blocks.iter().filter(|(_, data)| data.is_none()).map(|(&block, _)| block));
        while let Some((start, count)) = holes.next() {
            if start < object.state().head.blocks() {
                self.perform(object, StoreEntry::Unmap { oid, start, count, size, version });
            }
        }
        let mut run: Option<(u32, BufList)> = None;
        for (block, data) in blocks {
            let Some(data) = data else { continue };
            match &mut run {
                Some((start, list)) if *start + (list.len() / BLOCK) as u32 == block => list.append(data),
                _ => {
                    if let Some((start, list)) = run.replace((block, data)) {
                        self.write_blocks(write, start, &list);
                    }
                }
            }
        }
        if let Some((start, list)) = run {
            self.write_blocks(write, start, &list);
        }
    }
}

/// Write to one object: what is the same for all blocks of a transaction.
pub struct ObjectWrite<'a> {
    pub object: &'a Rc<StoreObject>,
    /// Cipher of the object's data, if it is encrypted.
    pub cipher: Option<&'a BlockCipher>,
    /// Object size after the change, in bytes.
    pub size: u64,
    /// Object version after the change.
    pub version: u64,
}

/// Returns the CRC32C of each block; the buffers together contain whole blocks.
pub fn block_crcs(bufs: &[Buf]) -> Vec<u32> {
    let mut out = Vec::with_capacity(bufs.iter().map(|buf| buf.len()).sum::<usize>() / BLOCK);
    if bufs.iter().all(|buf| buf.len().is_multiple_of(BLOCK)) {
        bufs.iter().for_each(|buf| out.extend(buf.chunks_exact(BLOCK).map(crc32c)));
        return out;
    }
    let list: BufList = bufs.iter().cloned().collect();
    for at in (0..list.len()).step_by(BLOCK) {
        let block = list.slice(at..at + BLOCK);
        out.push(forebay_accel::crc32c::crc32c_parts(block.parts().iter().map(|part| &part[..])));
    }
    out
}
