//! Clones: data absent from a clone is read from its parent, an image at a snapshot.

use std::rc::Rc;

use forebay_block::{Advice, BufList, Error, ErrorKind, Extent, ObjectOp, Result, Transaction};
use forebay_reactor::Buf;
use forebay_reactor::sync::Notify;

use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::images::Images;
use crate::objectmap::mark_in_snapshot;
use crate::open_image::{ImageView, OpenImage};
use crate::pools::mark_in_use;
use crate::read::read_parent;
use crate::requests::WriteFlags;
use crate::wire::bitmap::ObjectMapState;
use crate::wire::snapshot::Parent;

/// Maximum depth of a chain of clones; a deeper one is taken for a cycle.
const DEPTH_MAX: u32 = 64;
/// Granularity of zero detection in bytes: all-zero blocks of this size are not copied up.
const GRAIN: usize = 4096;

/// Parent image of a clone, at its snapshot.
pub(crate) struct ParentImage {
    pub(crate) spec: Parent,
    pub(crate) shared: Rc<OpenImage>,
    pub(crate) view: ImageView,
    /// Signaled when the parent is dropped, which reads keep from that.
    dropped: Rc<Notify>,
}

impl Drop for ParentImage {
    fn drop(&mut self) {
        self.dropped.notify_all();
    }
}

/// Waits until no read and no copy-up uses a parent any more that the image has no more.
pub(crate) async fn until_unused(parent: Rc<ParentImage>) {
    let dropped = parent.dropped.clone();
    let wait = dropped.wait();
    drop(parent);
    wait.await;
}

/// Opens the parent image of a clone. `in_use` marks its pools as in use by hosts; `depth` counts the clones so far.
///
/// Fails with `Corrupt` at a depth of `DEPTH_MAX` (64), and with `NotFound` if the snapshot does not exist.
pub(crate) async fn open_parent(
    images: &Rc<Images>,
    spec: &Parent,
    depth: u32,
    in_use: bool,
) -> Result<Rc<ParentImage>> {
    let what = || format!("parent image {} in pool {}", spec.image, spec.pool);
    if depth >= DEPTH_MAX {
        return Err(Error::new(ErrorKind::Corrupt, format!("{}: clones of clones, {DEPTH_MAX} deep", what())));
    }
    let backend = match images.backend().shared() {
        Some(shared) if shared.pool_id() != spec.pool => shared.pool(spec.pool).await?,
        _ => images.backend().clone(),
    };
    if in_use {
        mark_in_use(&backend);
    }
    let images = Images::in_namespace(&backend, &spec.namespace);
    let header = images.header(&spec.image).await.map_err(|error| error.within(what()))?;
    let shared = OpenImage::open(&images, &what(), &spec.image, header, depth + 1, in_use).await?;
    shared.check_features(true)?;
    let view = shared.view_of(spec.snap).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, format!("{}: its snapshot {}, of which this is a clone", what(), spec.snap.0))
    })?;
    let view = ImageView { is_parent: true, ..view };
    Ok(Rc::new(ParentImage { spec: spec.clone(), shared, view, dropped: Rc::default() }))
}

/// Outcome of a copy-up.
#[derive(PartialEq, Eq)]
pub(crate) enum CopiedUp {
    /// The object exists now; the change is still to be applied.
    Only,
    /// The object exists now, with the change applied.
    WithChange,
}

/// Copies an object up from the parent, before a change of it.
///
/// Snapshots of the clone must keep their contents. Without snapshots the copy and the change are one transaction.
/// With snapshots the copy is submitted first and without a snapshot context, as if the object had always existed:
/// all snapshots see it, and the change after it preserves it for them.
pub(crate) async fn copy_up(
    shared: &Rc<OpenImage>,
    object: u64,
    overlap: u64,
    change: &[ObjectOp],
    flags: WriteFlags,
) -> Result<CopiedUp> {
    let Some(writes) = parent_data(shared, object, overlap).await? else { return Ok(CopiedUp::Only) };
    store_copy(shared, object, writes, change, flags).await
}

/// Copies an object up, if the parent has data that is not zero, and the object does not exist.
///
/// The caller has locked the object's range against other exclusive operations.
pub(crate) async fn copy_data_up(shared: &Rc<OpenImage>, object: u64, overlap: u64) -> Result<()> {
    let Some(writes) = parent_data(shared, object, overlap).await? else { return Ok(()) };
    if writes.is_empty() {
        return Ok(());
    }
    if let Some(map) = shared.map() {
        // As if it had always existed, so that it has not changed since the newest snapshot.
        let is_old = shared.snapc().is_some_and(|snapc| !snapc.snaps.is_empty());
        let state = if is_old && map.has_fast_diff() { ObjectMapState::Clean } else { ObjectMapState::Exists };
        map.update(object, state, Some(ObjectMapState::Nonexistent)).await?;
    }
    store_copy(shared, object, writes, &[], WriteFlags::default()).await.map(drop)
}

/// Reads what the parent has of an object, as writes of the blocks that are not zero; `None` without a parent.
async fn parent_data(shared: &Rc<OpenImage>, object: u64, overlap: u64) -> Result<Option<Vec<ObjectOp>>> {
    let Some(parent) = shared.parent() else { return Ok(None) };
    // The parent has other children, which may read the same soon.
    let data = read_parent(shared, &parent, object, Extent::new(0, overlap), Advice::NONE).await?;
    Ok(Some(stored_runs(&data)))
}

async fn store_copy(
    shared: &Rc<OpenImage>,
    object: u64,
    writes: Vec<ObjectOp>,
    change: &[ObjectOp],
    flags: WriteFlags,
) -> Result<CopiedUp> {
    let WriteFlags { durable, advice } = flags;
    let snapc = shared.snapc();
    let keeps = snapc.as_ref().is_some_and(|snapc| !snapc.snaps.is_empty());
    let compares = change.iter().any(|op| matches!(op, ObjectOp::Compare { .. }));
    let alone = keeps && !writes.is_empty() || compares;
    if keeps && !writes.is_empty() {
        mark_in_snapshots(shared, object).await?;
    }
    let mut ops = vec![ObjectOp::Create { exclusive: true }];
    let stores = !writes.is_empty() || change.iter().any(|op| matches!(op, ObjectOp::Write { .. }));
    ops.extend(shared.expectation().filter(|_| stores));
    ops.extend(writes);
    let transaction = if alone {
        Transaction { snapc: if keeps { None } else { snapc }, ops, durable, advice }
    } else {
        ops.extend_from_slice(change);
        Transaction { snapc, ops, durable, advice }
    };
    match shared.change_data(object, transaction).await {
        Ok(_) => Ok(if alone { CopiedUp::Only } else { CopiedUp::WithChange }),
        // Lost the race: another writer created the object first.
        Err(error) if error.kind() == ErrorKind::Exists => Ok(CopiedUp::Only),
        Err(error) => Err(error),
    }
}

/// Returns the non-zero blocks of `data` as writes, adjacent blocks merged.
fn stored_runs(data: &BufList) -> Vec<ObjectOp> {
    let bytes = data.to_vec();
    let mut writes = Vec::new();
    let mut start = None;
    let blocks = bytes.len().div_ceil(GRAIN);
    for block in 0..=blocks {
        let end = ((block + 1) * GRAIN).min(bytes.len());
        let holds = block < blocks && bytes[block * GRAIN..end].iter().any(|&byte| byte != 0);
        match (start, holds) {
            (None, true) => start = Some(block * GRAIN),
            (Some(from), false) => {
                let run = &bytes[from..(block * GRAIN).min(bytes.len())];
                writes.push(ObjectOp::Write { offset: from as u64, data: Buf::copy_of(run).into() });
                start = None;
            }
            _ => {}
        }
    }
    writes
}

/// Marks the object as existing in the object maps of all snapshots: dirty in the oldest, clean in the others. Maps that have it
/// stay as they are: the object may exist.
async fn mark_in_snapshots(shared: &Rc<OpenImage>, object: u64) -> Result<()> {
    let header = shared.header();
    if !header.features.has(ImageFeatures::OBJECT_MAP) || shared.map().is_none() {
        return Ok(());
    }
    let objects_at = |size: u64| shared.layout().objects(size);
    let mut oldest = true;
    for snapshot in header.snapshots.iter().rev() {
        if snapshot.flags & ImageHeader::MAP_INVALID != 0 || object >= objects_at(snapshot.size) {
            continue;
        }
        let clean = header.features.has(ImageFeatures::FAST_DIFF) && !oldest;
        let state = if clean { ObjectMapState::Clean } else { ObjectMapState::Exists };
        let map = map_object(shared.namespace(), shared.id(), Some(snapshot.id));
        match mark_in_snapshot(shared.backend(), &map, object, state).await {
            // Snapshots without an object map need no update.
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => oldest = false,
        }
    }
    Ok(())
}
