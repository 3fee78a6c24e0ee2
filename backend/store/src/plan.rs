//! Transaction planning: computes the changes of a transaction without applying them.  Guards are evaluated and
//! required data is read; nothing is changed yet.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{BufList, BufMut, Error, ErrorKind, ObjectName, ObjectOp, Result, SnapContext};

use crate::core::Core;
use crate::format::entry::{KEY_MAX, VALUE_MAX};
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::format::{BLOCK, BLOCK64};
use crate::keys;
use crate::object::{HEAD, StoreObject, blocks_of};
use crate::pack::PackedBlob;

/// Planned changes of a transaction.
pub struct TransactionPlan {
    pub object: Option<Rc<StoreObject>>,
    pub exists: bool,
    pub size: u64,
    /// Source of blocks that are not in `blocks`: the head, a clone, or `None` if they are holes.
    pub base: Option<u64>,
    /// Changed blocks; `None` for a block that becomes a hole.
    pub blocks: BTreeMap<u32, Option<BufList>>,
    /// Changed blocks that are stored compressed.
    pub blobs: Vec<PackedBlob>,
    pub kv: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// Previous keys of the head, for the clone that the transaction creates.
    pub kept_kv: Vec<(Vec<u8>, Vec<u8>)>,
    /// Snapshots represented by the clone that the transaction creates.
    pub kept_snaps: Vec<u64>,
}

impl TransactionPlan {
    /// Creates an empty plan for an object.
    fn on(object: Option<Rc<StoreObject>>) -> Self {
        Self {
            exists: object.as_ref().is_some_and(|object| object.state().exists),
            size: object.as_ref().map_or(0, |object| object.state().size),
            base: object.as_ref().map(|_| HEAD),
            object,
            blocks: BTreeMap::new(),
            blobs: Vec::new(),
            kv: BTreeMap::new(),
            kept_kv: Vec::new(),
            kept_snaps: Vec::new(),
        }
    }

    /// Returns whether the transaction stores blocks or key values.
    pub fn grows(&self) -> bool {
        self.blocks.values().any(Option::is_some) || self.kv.values().any(Option::is_some)
    }

    /// Returns the approximate number of bytes that the transaction appends to the log.
    pub fn bytes_appended(&self) -> u64 {
        let packed: u32 = self.blobs.iter().map(|blob| blob.blocks).sum();
        let blobs: usize = self.blobs.iter().map(|blob| blob.stored.len()).sum();
        let plain = self.blocks.values().flatten().count() as u64 - u64::from(packed);
        let blocks = plain * BLOCK64 + blobs as u64;
        let kept = self.kept_kv.iter().map(|(key, value)| key.len() + value.len() + 64);
        let kv = self.kv.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Vec::len) + 64);
        // Counted twice: large values leave unused space at the ends of segments.
        blocks + 2 * kept.chain(kv).sum::<usize>() as u64
    }
}

impl Core {
    /// Computes the changes of the operations, in order.
    pub async fn plan_transaction(&self, name: &ObjectName, ops: Vec<ObjectOp>) -> Result<TransactionPlan> {
        let mut plan = TransactionPlan::on(self.find(name).await?);
        for op in ops {
            self.prepare(name, &mut plan, op).await?;
        }
        Ok(plan)
    }

    /// Loads the metadata that [`commit`](Self::commit) needs.
    pub async fn load_for(&self, plan: &mut TransactionPlan, snapc: Option<&SnapContext>) -> Result<()> {
        let Some(object) = plan.object.clone() else { return Ok(()) };
        let object = &object;
        let seen = object.state().snap_seq;
        if let Some(snapc) = snapc.filter(|snapc| snapc.seq > seen && object.state().exists) {
            for snap in snapc.snaps.iter().map(|snap| snap.0).filter(|&snap| snap > seen) {
                // The writer's snapshot context may still contain a removed snapshot.
                if self.index.lookup(&keys::snap_removed(snap)).await?.is_none() {
                    plan.kept_snaps.push(snap);
                }
            }
        }
        let clones = !plan.kept_snaps.is_empty();
        if clones && object.state().has_kv {
            plan.kept_kv = self.index.all_kv(object.oid, HEAD).await?;
        }
        if clones || plan.base != Some(HEAD) || !plan.exists {
            return self.load_pages(object, HEAD, true, 0, u32::MAX / 2).await;
        }
        let mut runs = Runs::new(plan.blocks.keys().copied());
        while let Some((start, count)) = runs.next() {
            self.load_pages(object, HEAD, true, start, count).await?;
        }
        Ok(())
    }

    async fn prepare(&self, name: &ObjectName, plan: &mut TransactionPlan, op: ObjectOp) -> Result<()> {
        let at = |kind, what: &str| Error::new(kind, format!("{name}: {what}"));
        match op {
            ObjectOp::AssertExists if plan.exists => Ok(()),
            ObjectOp::AssertExists => Err(at(ErrorKind::NotFound, "no such object")),
            ObjectOp::AssertVersion(version) => {
                let now = plan.object.as_ref().filter(|_| plan.exists).map_or(0, |object| object.state().version);
                if plan.exists && now == version {
                    Ok(())
                } else {
                    Err(at(ErrorKind::Guard, &format!("it has version {now}, not {version}")))
                }
            }
            ObjectOp::Compare { offset, data } => self.compare(name, plan, offset, &data).await,
            ObjectOp::KvCompare { key, value } => {
                if self.kv_value(plan, &key).await? == value {
                    Ok(())
                } else {
                    Err(at(ErrorKind::Guard, "a key does not have the expected value"))
                }
            }
            ObjectOp::Create { exclusive } => {
                if plan.exists && exclusive {
                    return Err(at(ErrorKind::Exists, "the object exists already"));
                }
                plan.exists = true;
                Ok(())
            }
            // Objects of any size have the same layout, so the hint has no other effect.
            ObjectOp::Expect { .. } => {
                plan.exists = true;
                Ok(())
            }
            ObjectOp::Write { offset, data } => self.prepare_write(name, plan, offset, data).await,
            ObjectOp::WriteFull { data } => {
                self.clear_blocks(plan).await?;
                plan.size = 0;
                self.prepare_write(name, plan, 0, data).await
            }
            ObjectOp::Zero { extent } => {
                let end = extent.checked_end().ok_or_else(|| at(ErrorKind::OutOfRange, "zero"))?.min(plan.size);
                if plan.exists && extent.offset < end {
                    self.prepare_zero(plan, extent.offset, end).await?;
                }
                Ok(())
            }
            ObjectOp::Truncate { size } => {
                if size > OBJECT_SIZE_MAX {
                    return Err(at(ErrorKind::OutOfRange, &format!("a size of {size} bytes")));
                }
                if !plan.exists {
                    return Ok(());
                }
                if size < plan.size {
                    let upto = u64::from(blocks_of(plan.size)) * BLOCK64;
                    self.prepare_zero(plan, size, upto).await?;
                }
                plan.size = size;
                Ok(())
            }
            ObjectOp::Remove => {
                if !plan.exists {
                    return Err(at(ErrorKind::NotFound, "no such object"));
                }
                plan.blocks.clear();
                plan.base = None;
                self.clear_kv(plan).await?;
                (plan.exists, plan.size) = (false, 0);
                Ok(())
            }
            ObjectOp::KvSet { pairs } => {
                let value_max = VALUE_MAX.min(self.superblock.segment_size as usize / 4);
                if pairs.iter().any(|(key, value)| key.len() > KEY_MAX || value.len() > value_max) {
                    let text = format!("keys have at most {KEY_MAX} bytes, values {value_max}");
                    return Err(at(ErrorKind::Invalid, &text));
                }
                plan.kv.extend(pairs.into_iter().map(|(key, value)| (key, Some(value))));
                plan.exists = true;
                Ok(())
            }
            ObjectOp::KvRemove { keys } => {
                if !plan.exists {
                    return Err(at(ErrorKind::NotFound, "no such object"));
                }
                plan.kv.extend(keys.into_iter().map(|key| (key, None)));
                Ok(())
            }
            ObjectOp::Rollback { snap } => self.prepare_rollback(name, plan, snap.0).await,
            ObjectOp::Call { method, .. } => Err(at(ErrorKind::Unsupported, &format!("the method {method:?}"))),
        }
    }

    async fn prepare_write(
        &self,
        name: &ObjectName,
        plan: &mut TransactionPlan,
        offset: u64,
        data: BufList,
    ) -> Result<()> {
        let len = data.len() as u64;
        let end = offset.checked_add(len).filter(|&end| end <= OBJECT_SIZE_MAX);
        let out = || Error::new(ErrorKind::OutOfRange, format!("{name}: a write of {len} bytes at {offset}"));
        let end = end.ok_or_else(out)?;
        plan.exists = true;
        if len == 0 {
            return Ok(());
        }
        self.counters.add_user_bytes(len);
        let mut at = offset;
        while at < end {
            let block = (at / BLOCK64) as u32;
            let within = (at % BLOCK64) as usize;
            let take = (BLOCK - within).min((end - at) as usize);
            let from = (at - offset) as usize;
            let part = data.slice(from..from + take);
            let whole = if take == BLOCK {
                part
            } else {
                let mut content = self.block_of(plan, block).await?;
                part.copy_to(&mut content[within..within + take]);
                content.into()
            };
            plan.blocks.insert(block, Some(whole));
            at += take as u64;
        }
        plan.size = plan.size.max(end);
        Ok(())
    }

    /// Makes bytes `from..to` read as zeroes: unmaps whole blocks and writes zeroes to partial ones.
    async fn prepare_zero(&self, plan: &mut TransactionPlan, from: u64, to: u64) -> Result<()> {
        // Beyond the end everything reads as zero already: a tail up to the end is unmapped as a whole block.
        let to = if to >= plan.size { to.next_multiple_of(BLOCK64) } else { to };
        let (first, last) = (from.div_ceil(BLOCK64), to / BLOCK64);
        if first > last {
            self.zero_within(plan, last as u32, (from % BLOCK64) as usize..(to % BLOCK64) as usize).await?;
        } else {
            if !from.is_multiple_of(BLOCK64) {
                self.zero_within(plan, first as u32 - 1, (from % BLOCK64) as usize..BLOCK).await?;
            }
            if !to.is_multiple_of(BLOCK64) {
                self.zero_within(plan, last as u32, 0..(to % BLOCK64) as usize).await?;
            }
        }
        plan.blocks.extend((first..last).map(|block| (block as u32, None)));
        Ok(())
    }

    async fn zero_within(&self, plan: &mut TransactionPlan, block: u32, range: std::ops::Range<usize>) -> Result<()> {
        if self.is_stored(plan, block).await? {
            let mut content = self.block_of(plan, block).await?;
            content[range].fill(0);
            plan.blocks.insert(block, Some(content.into()));
        }
        Ok(())
    }

    async fn is_stored(&self, plan: &TransactionPlan, block: u32) -> Result<bool> {
        if let Some(changed) = plan.blocks.get(&block) {
            return Ok(changed.is_some());
        }
        let (Some(object), Some(of)) = (&plan.object, plan.base) else { return Ok(false) };
        self.load_pages(object, of, false, block, 1).await?;
        Ok(object.state().map_of(of).is_some_and(|map| map.get(block).block != 0))
    }

    /// Returns the content of a block as of the transaction's operations so far.
    async fn block_of(&self, plan: &TransactionPlan, block: u32) -> Result<BufMut> {
        let mut out = BufMut::zeroed(BLOCK);
        match plan.blocks.get(&block) {
            Some(Some(data)) => data.copy_to(&mut out),
            Some(None) => {}
            None => {
                if let (Some(object), Some(of)) = (&plan.object, plan.base) {
                    self.load_pages(object, of, false, block, 1).await?;
                    let slot = object.state().map_of(of).map(|map| map.get(block)).unwrap_or_default();
                    if slot.block != 0 {
                        let what = || format!("{} at byte {}", object.name, u64::from(block) * BLOCK64);
                        self.media
                            .read_blocks(slot.block, &[slot.crc], self.cipher_of(object)?.as_deref(), what)
                            .await?
                            .copy_to(&mut out);
                    }
                }
            }
        }
        Ok(out)
    }

    async fn compare(&self, name: &ObjectName, plan: &TransactionPlan, offset: u64, data: &BufList) -> Result<()> {
        let out = || Error::new(ErrorKind::OutOfRange, format!("{name}: compare at {offset}"));
        let end = offset.checked_add(data.len() as u64).ok_or_else(out)?;
        let mut at = offset;
        while at < end {
            let block = (at / BLOCK64) as u32;
            let within = (at % BLOCK64) as usize;
            let take = (BLOCK - within).min((end - at) as usize);
            let content = if at < OBJECT_SIZE_MAX { self.block_of(plan, block).await? } else { BufMut::zeroed(BLOCK) };
            let want = data.slice((at - offset) as usize..(at - offset) as usize + take).to_vec();
            let have = &content[within..within + take];
            if let Some(differs) = have.iter().zip(&want).position(|(a, b)| a != b) {
                let place = at - offset + differs as u64;
                return Err(Error::new(ErrorKind::Mismatch(place), format!("{name}: compare at {offset}")));
            }
            at += take as u64;
        }
        Ok(())
    }

    async fn kv_value(&self, plan: &TransactionPlan, key: &[u8]) -> Result<Option<Vec<u8>>> {
        if let Some(value) = plan.kv.get(key) {
            return Ok(value.clone());
        }
        match &plan.object {
            Some(object) if plan.base.is_some() && object.state().has_kv => self.index.kv(object.oid, HEAD, key).await,
            _ => Ok(None),
        }
    }

    async fn clear_blocks(&self, plan: &mut TransactionPlan) -> Result<()> {
        let (Some(object), Some(of)) = (&plan.object, plan.base) else {
            plan.blocks.clear();
            return Ok(());
        };
        self.load_pages(object, of, false, 0, u32::MAX / 2).await?;
        let blocks = object.state().map_of(of).map_or(0, crate::map::Map::blocks);
        plan.blocks = (0..blocks).map(|block| (block, None)).collect();
        Ok(())
    }

    async fn clear_kv(&self, plan: &mut TransactionPlan) -> Result<()> {
        plan.kv.values_mut().for_each(|value| *value = None);
        let Some(object) = plan.object.clone().filter(|object| object.state().has_kv) else { return Ok(()) };
        plan.kv.extend(self.index.all_keys(object.oid, HEAD).await?.into_iter().map(|key| (key, None)));
        Ok(())
    }

    /// Plans the removal of the head, as the object did not exist at the snapshot.
    async fn prepare_absence(&self, name: &ObjectName, plan: &mut TransactionPlan) -> Result<()> {
        if plan.exists { Box::pin(self.prepare(name, plan, ObjectOp::Remove)).await } else { Ok(()) }
    }

    async fn prepare_rollback(&self, name: &ObjectName, plan: &mut TransactionPlan, snap: u64) -> Result<()> {
        // An object that does not exist has no clones to roll back to.
        let Some(object) = plan.object.clone() else { return self.prepare_absence(name, plan).await };
        let seen = object.state().snap_seq;
        if snap > seen {
            // No write since the snapshot: it shows the head as it was before this transaction.
            let (exists, size) = (object.state().exists, object.state().size);
            plan.blocks.clear();
            plan.kv.clear();
            plan.base = Some(HEAD);
            (plan.exists, plan.size) = (exists, size);
            return Ok(());
        }
        let find = |clone: &&crate::object::CloneState| clone.snaps.contains(&snap);
        let found = object.state().clones.iter().find(find).map(|clone| (clone.id, clone.size));
        let Some((clone, size)) = found else { return self.prepare_absence(name, plan).await };
        self.clear_kv(plan).await?;
        plan.kv.extend(self.index.all_kv(object.oid, clone).await?.into_iter().map(|(key, value)| (key, Some(value))));
        plan.blocks.clear();
        plan.base = Some(clone);
        (plan.exists, plan.size) = (true, size);
        Ok(())
    }
}

/// Returns whether the operation is a guard, which changes nothing.
pub fn is_guard(op: &ObjectOp) -> bool {
    use ObjectOp::{AssertExists, AssertVersion, Compare, KvCompare};
    matches!(op, AssertExists | AssertVersion(_) | Compare { .. } | KvCompare { .. })
}

/// Iterator that joins ascending numbers into runs.
pub struct Runs<I: Iterator<Item = u32>> {
    rest: std::iter::Peekable<I>,
}

impl<I: Iterator<Item = u32>> Runs<I> {
    pub fn new(numbers: I) -> Self {
        Self { rest: numbers.peekable() }
    }

    pub fn next(&mut self) -> Option<(u32, u32)> {
        let start = self.rest.next()?;
        let mut count = 1;
        while self.rest.next_if_eq(&(start + count)).is_some() {
            count += 1;
        }
        Some((start, count))
    }
}
