//! Read path: the map has the locations of blocks, the device (or the log's memory) their content.

use std::rc::Rc;

use forebay_block::{
    BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, LocalFuture, ObjectName, ObjectRead, ObjectStat, Result,
    SnapClone, SnapId, SnapSet, SparseData, StoredBytes,
};
use forebay_reactor::sync::join_all;

use crate::core::Core;
use crate::format::BLOCK64;
use crate::format::blob::{BlobSlot, byte_of, follows};
use crate::object::{HEAD, ObjectState, StoreObject};
use crate::read_blobs::{BlobRun, adjacent_blobs};

/// Maximum run read in one request, in blocks.  Devices accept a few hundred scattered pages per request (254 on
/// virtio); the kernel cannot submit longer requests without blocking, and offloads them to a worker thread.
const RUN_BLOCKS_MAX: usize = crate::media::POOLED_BLOCKS;

struct StoredRun {
    /// First block within the object.
    start: u32,
    /// Location of the first block; the others follow it on the device, or in the same blob.
    block: u64,
    crcs: Vec<u32>,
}

impl StoredRun {
    /// Returns the run as one of a blob; `None` for plain blocks.
    fn blob(&self) -> Option<BlobRun<'_>> {
        BlobSlot::of(self.block).map(|slot| BlobRun { slot, crcs: &self.crcs })
    }
}

/// Resolves a snapshot number to a state (head or clone id) and its size.
fn resolve(state: &ObjectState, snap: SnapId) -> Option<(u64, u64)> {
    if snap == SnapId::HEAD || snap.0 > state.snap_seq {
        return state.exists.then_some((HEAD, state.size));
    }
    state.clones.iter().find(|clone| clone.snaps.contains(&snap.0)).map(|clone| (clone.id, clone.size))
}

fn not_found(name: &ObjectName) -> Error {
    Error::new(ErrorKind::NotFound, format!("object {name}"))
}

/// Reads the stored runs of an object.
pub fn read(core: &Rc<Core>, name: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
    // Metadata in memory is looked up immediately, so that the read sees all writes submitted before it.
    let planned = match core.find_cached(name) {
        Some(None) => return Box::pin(std::future::ready(Err(not_found(name)))),
        Some(Some(object)) => match core.plan_cached(&object, read) {
            Some(Err(error)) => return Box::pin(std::future::ready(Err(error))),
            Some(Ok(plan)) => Some((object, plan)),
            None => None,
        },
        None => None,
    };
    let (core, name) = (core.clone(), name.clone());
    Box::pin(async move {
        let (object, (extent, runs)) = match planned {
            Some(planned) => planned,
            None => {
                let object = core.find(&name).await?.ok_or_else(|| not_found(&name))?;
                let plan = core.plan(&object, read).await?;
                (object, plan)
            }
        };
        core.read_runs(&object, extent, runs).await
    })
}

struct SegmentPins {
    core: Rc<Core>,
    segments: Vec<u32>,
}

impl Drop for SegmentPins {
    fn drop(&mut self) {
        let mut table = self.core.segments.borrow_mut();
        self.segments.iter().for_each(|&segment| table.unpin(segment));
    }
}

type ReadPlan = (Extent, (Vec<StoredRun>, SegmentPins));

impl Core {
    /// Returns the locations of the data of a read; `None` if a page must be read first.
    fn plan_cached(self: &Rc<Self>, object: &StoreObject, read: ObjectRead) -> Option<Result<ReadPlan>> {
        let state = object.state();
        let Some((of, size)) = resolve(&state, read.snap) else { return Some(Err(not_found(&object.name))) };
        let Some(end) = read.extent.checked_end() else {
            return Some(Err(Error::new(ErrorKind::OutOfRange, format!("a read of {}", object.name))));
        };
        let end = end.min(size);
        let mut runs: Vec<StoredRun> = Vec::new();
        let pins = SegmentPins { core: self.clone(), segments: Vec::new() };
        if read.extent.offset >= end {
            return Some(Ok((Extent::new(read.extent.offset, 0), (runs, pins))));
        }
        let extent = Extent::new(read.extent.offset, end - read.extent.offset);
        let (first, last) = ((extent.offset / BLOCK64) as u32, ((end - 1) / BLOCK64) as u32);
        let map = state.map_of(of)?;
        if map.missing(first, last - first + 1).next().is_some() {
            return None;
        }
        for block in first..=last.min(map.blocks().saturating_sub(1)) {
            let slot = map.get(block);
            if slot.block == 0 {
                continue;
            }
            match runs.last_mut() {
                Some(run)
                    if follows(run.block, run.crcs.len() as u64, slot.block)
                        && run.start + run.crcs.len() as u32 == block
                        && run.crcs.len() < RUN_BLOCKS_MAX =>
                {
                    run.crcs.push(slot.crc);
                }
                _ => runs.push(StoredRun { start: block, block: slot.block, crcs: vec![slot.crc] }),
            }
        }
        let mut pins = pins;
        let mut table = self.segments.borrow_mut();
        for run in &runs {
            let segment = table.geometry.segment_of_byte(byte_of(run.block)).expect("a mapped block lies in a segment");
            table.pin(segment);
            pins.segments.push(segment);
        }
        drop(table);
        Some(Ok((extent, (runs, pins))))
    }

    async fn plan(self: &Rc<Self>, object: &StoreObject, read: ObjectRead) -> Result<ReadPlan> {
        loop {
            if let Some(plan) = self.plan_cached(object, read) {
                return plan;
            }
            let (of, first, count) = {
                let state = object.state();
                let (of, size) = resolve(&state, read.snap).ok_or_else(|| not_found(&object.name))?;
                let end = read.extent.offset.saturating_add(read.extent.len).min(size);
                let first = (read.extent.offset / BLOCK64) as u32;
                (of, first, (end.saturating_sub(1) / BLOCK64) as u32 - first + 1)
            };
            self.load_pages(object, of, false, first, count).await?;
        }
    }

    async fn read_runs(
        &self,
        object: &StoreObject,
        extent: Extent,
        plan: (Vec<StoredRun>, SegmentPins),
    ) -> Result<SparseData> {
        let (runs, _pins) = plan;
        let whole = |run: &StoredRun, data: BufList| {
            // Trim the parts of the first and last block outside the requested extent.
            let offset = u64::from(run.start) * BLOCK64;
            let from = extent.offset.max(offset);
            let to = extent.end().min(offset + data.len() as u64);
            (from, data.slice((from - offset) as usize..(to - offset) as usize))
        };
        let cipher = match runs.is_empty() {
            true => None,
            false => self.cipher_of(object)?,
        };
        let cipher = cipher.as_deref();
        let what = |run: &StoredRun| {
            let at = u64::from(run.start) * BLOCK64;
            move || format!("{} at byte {at}", object.name)
        };
        if let [run] = &runs[..] {
            let data = self.media.read_blocks(run.block, &run.crcs, cipher, what(run)).await?;
            return Ok(SparseData { runs: vec![whole(run, data)] });
        }
        let mut reads = Vec::new();
        let mut left = &runs[..];
        while !left.is_empty() {
            // Blobs that were written together lie behind each other.
            let blobs = adjacent_blobs(left.iter().map_while(StoredRun::blob)).max(1);
            let (group, rest) = left.split_at(blobs);
            left = rest;
            reads.push(Box::pin(async move {
                let data = match group {
                    [run] => vec![self.media.read_blocks(run.block, &run.crcs, cipher, what(run)).await?],
                    _ => {
                        let blobs: Vec<BlobRun<'_>> = group.iter().filter_map(StoredRun::blob).collect();
                        self.media.read_blobs(&blobs, cipher, |i| what(&group[i])()).await?
                    }
                };
                Ok::<_, Error>(group.iter().zip(data).map(|(run, data)| whole(run, data)).collect::<Vec<_>>())
            }));
        }
        let mut done = Vec::with_capacity(runs.len());
        for result in join_all(reads).await {
            done.extend(result?);
        }
        Ok(SparseData { runs: done })
    }

    /// Returns the stored and unallocated extents of an object.
    pub async fn map_extents(self: &Rc<Self>, name: &ObjectName, read: ObjectRead) -> Result<ExtentMap> {
        let object = self.find(name).await?.ok_or_else(|| not_found(name))?;
        let end = read.extent.checked_end().ok_or_else(|| Error::new(ErrorKind::OutOfRange, name.to_string()))?;
        let (stored, (runs, _pins)) = self.plan(&object, read).await?;
        let mut out = ExtentMap::new();
        let mut at = read.extent.offset;
        for run in &runs {
            let from = (u64::from(run.start) * BLOCK64).max(at);
            let to = ((u64::from(run.start) + run.crcs.len() as u64) * BLOCK64).min(stored.end());
            out.push(at, from - at, ExtentState::Hole);
            out.push(from, to - from, ExtentState::Data);
            at = to;
        }
        out.push(at, end - at, ExtentState::Hole);
        Ok(out)
    }

    /// Returns the size of an object's mapped blocks, and what they take on the device.
    pub async fn stored_bytes(&self, name: &ObjectName, snap: SnapId) -> Result<StoredBytes> {
        let object = self.find(name).await?.ok_or_else(|| not_found(name))?;
        let (of, _) = resolve(&object.state(), snap).ok_or_else(|| not_found(name))?;
        self.load_pages(&object, of, false, 0, u32::MAX / 2).await?;
        let state = object.state();
        let mut out = StoredBytes::default();
        let Some(map) = state.map_of(of) else { return Ok(out) };
        let mut counted = None;
        for block in 0..map.blocks() {
            let slot = map.get(block);
            if slot.block == 0 {
                continue;
            }
            out.logical += BLOCK64;
            match BlobSlot::of(slot.block).map(|blob| blob.at(0)) {
                None => out.stored += BLOCK64,
                // The blocks of a blob that are left are close to each other, but others may lie between them.
                Some(blob) if counted == Some(blob) || map.has_earlier(blob, block) => {}
                Some(blob) => {
                    counted = Some(blob);
                    out.stored += u64::from(blob.ptr(0).len);
                }
            }
        }
        Ok(out)
    }

    /// Returns size and version of an object.
    pub async fn stat(&self, name: &ObjectName, snap: SnapId) -> Result<ObjectStat> {
        let object = self.find(name).await?.ok_or_else(|| not_found(name))?;
        let state = object.state();
        let (_, size) = resolve(&state, snap).ok_or_else(|| not_found(name))?;
        Ok(ObjectStat { size, version: state.version })
    }

    /// Returns the clones of an object.
    pub async fn snap_set(&self, name: &ObjectName) -> Result<SnapSet> {
        let object = self.find(name).await?.ok_or_else(|| not_found(name))?;
        let state = object.state();
        let clones = state.clones.iter().map(|clone| SnapClone {
            id: SnapId(clone.id),
            snaps: clone.snaps.iter().map(|&snap| SnapId(snap)).collect(),
            size: clone.size,
        });
        Ok(SnapSet { seq: state.snap_seq, head_exists: state.exists, clones: clones.collect() })
    }
}
