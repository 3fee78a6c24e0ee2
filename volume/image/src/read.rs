//! Reads and allocation maps of an image, put together from its objects and those of its parent.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    Advice, BlockReply, BufList, ErrorKind, Extent, ExtentMap, ExtentState, LocalFuture, ObjectRead, Result, SnapId,
};

use crate::clone::ParentImage;
use crate::image::SpaceUsage;
use crate::info::ObjectProgress;
use crate::layout::ObjectExtent;
use crate::open_image::{ImageView, OpenImage};
use crate::parent_cache::read_object;
use crate::present::{Present, walk};
use crate::requests::failed;
use crate::window::{REQUEST_WINDOW, windowed_in_order};

pub(crate) fn read(
    shared: &Rc<OpenImage>,
    view: ImageView,
    extent: Extent,
    advice: Advice,
) -> LocalFuture<Result<BlockReply>> {
    if let Some(piece) = shared.layout().single(extent) {
        let data = read_piece(shared, view, piece, advice);
        return Box::pin(async move { data.await.map(BlockReply::Data) });
    }
    let shared = shared.clone();
    Box::pin(async move { read_pieces(&shared, view, extent, advice).await.map(BlockReply::Data) })
}

/// Reads a range of an image at a view; bytes past its end read as zeroes.
pub(crate) async fn read_all(
    shared: &Rc<OpenImage>,
    view: ImageView,
    extent: Extent,
    advice: Advice,
) -> Result<BufList> {
    let within = extent.len.min(view.size.saturating_sub(extent.offset));
    let mut data = if within == 0 {
        BufList::new()
    } else {
        Box::pin(read_pieces(shared, view, Extent::new(extent.offset, within), advice)).await?
    };
    data.append(BufList::zeroes((extent.len - within) as usize));
    Ok(data)
}

/// Returns whether the head's object is known not to exist.
fn is_absent(shared: &OpenImage, view: ImageView, object: u64) -> bool {
    view.snap == SnapId::HEAD && shared.map().is_some_and(|map| !map.may_exist(object))
}

/// Reads what the parent has of a range of an object.
pub(crate) async fn read_parent(
    shared: &Rc<OpenImage>,
    parent: &ParentImage,
    object: u64,
    extent: Extent,
    advice: Advice,
) -> Result<BufList> {
    let mut extents = shared.layout().image_extents(object, extent);
    let next = || -> Option<LocalFuture<Result<BufList>>> {
        let (parent, view, extent) = (parent.shared.clone(), parent.view, extents.next()?);
        Some(Box::pin(async move { read_all(&parent, view, extent, advice).await }))
    };
    let mut whole = BufList::new();
    windowed_in_order(REQUEST_WINDOW, next).await?.into_iter().for_each(|part| whole.append(part));
    Ok(whole)
}

/// Reads exactly the bytes of a piece; an absent object reads as the parent's data, or zeroes.
pub(crate) fn read_piece(
    shared: &Rc<OpenImage>,
    view: ImageView,
    piece: ObjectExtent,
    advice: Advice,
) -> LocalFuture<Result<BufList>> {
    let Extent { offset, len } = piece.extent;
    let from_parent = shared.overlap_in(view, piece.object).saturating_sub(offset).min(len);
    let stored = (!is_absent(shared, view, piece.object)).then(|| read_object(shared, view, piece, advice));
    let parent = (from_parent > 0).then(|| shared.parent()).flatten();
    let shared = shared.clone();
    Box::pin(async move {
        if let Some(stored) = stored {
            match stored.await {
                Ok(data) => return Ok(data.fill(piece.extent)),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let Some(parent) = parent else { return Ok(BufList::zeroes(len as usize)) };
        let mut data = read_parent(&shared, &parent, piece.object, Extent::new(offset, from_parent), advice).await?;
        data.append(BufList::zeroes((len - from_parent) as usize));
        Ok(data)
    })
}

pub(crate) async fn read_pieces(
    shared: &Rc<OpenImage>,
    view: ImageView,
    extent: Extent,
    advice: Advice,
) -> Result<BufList> {
    let mut pieces = shared.layout().pieces(extent);
    let parts = windowed_in_order(REQUEST_WINDOW, || Some(read_piece(shared, view, pieces.next()?, advice))).await?;
    Ok(shared.layout().join(extent, parts))
}

// ---- Allocation map ----

/// Returns the allocation map of a range, object by object, including data in the parent.
pub(crate) fn map(shared: &Rc<OpenImage>, view: ImageView, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
    if let Err(error) = shared.check_range(view, extent) {
        return failed(error);
    }
    let shared = shared.clone();
    Box::pin(async move {
        let present = Present::within(&shared, view, extent).await?;
        let mut pieces = shared.layout().pieces(extent);
        let next = || {
            let piece = pieces.next()?;
            Some(map_piece(&shared, view, piece, present.may_have(piece.object)))
        };
        let parts = windowed_in_order(REQUEST_WINDOW, next).await?;
        if let Some(state) = only_state(&parts) {
            let mut whole = ExtentMap::new();
            whole.push(extent.offset, extent.len, state);
            return Ok(whole);
        }
        let mut runs = Vec::new();
        for (piece, map) in shared.layout().pieces(extent).zip(&parts) {
            for run in map.runs() {
                runs.extend(shared.layout().image_extents(piece.object, run.extent).map(|extent| (extent, run.state)));
            }
        }
        // Those of one piece are not next to each other in a striped image.
        runs.sort_unstable_by_key(|(extent, _)| extent.offset);
        let mut whole = ExtentMap::new();
        runs.into_iter().for_each(|(extent, state)| whole.push(extent.offset, extent.len, state));
        Ok(whole)
    })
}

/// Returns the state of all runs, if it is one.
fn only_state(maps: &[ExtentMap]) -> Option<ExtentState> {
    let mut states = maps.iter().flat_map(ExtentMap::runs).map(|run| run.state);
    let first = states.next()?;
    states.all(|state| state == first).then_some(first)
}

/// Returns the allocation map of a piece, by its bytes in the object, including data in the parent.
pub(crate) fn map_piece(
    shared: &Rc<OpenImage>,
    view: ImageView,
    piece: ObjectExtent,
    present: bool,
) -> LocalFuture<Result<ExtentMap>> {
    let Extent { offset, len } = piece.extent;
    let from_parent = shared.overlap_in(view, piece.object).saturating_sub(offset).min(len);
    let parent = (from_parent > 0).then(|| shared.parent()).flatten();
    let own = present.then(|| map_own(shared, view, piece));
    let shared = shared.clone();
    Box::pin(async move {
        if let Some(own) = own
            && let Some(map) = own.await?
        {
            return Ok(map);
        }
        let mut whole = ExtentMap::new();
        let mut covered = 0;
        if let Some(parent) = parent {
            let there = shared
                .layout()
                .image_extents(piece.object, Extent::new(offset, from_parent))
                .map(|part| Extent::new(part.offset, part.len.min(parent.view.size.saturating_sub(part.offset))));
            let mut there = there.filter(|part| part.len > 0);
            let next = || Some(map(&parent.shared, parent.view, there.next()?));
            let maps = windowed_in_order(REQUEST_WINDOW, next).await?;
            for run in maps.iter().flat_map(ExtentMap::runs) {
                whole.push(offset + covered, run.extent.len, run.state);
                covered += run.extent.len;
            }
        }
        whole.push(offset + covered, len - covered, ExtentState::Hole);
        Ok(whole)
    })
}

/// Returns the allocation map of a piece in the image itself; `None` if the object does not exist.
fn map_own(shared: &OpenImage, view: ImageView, piece: ObjectExtent) -> LocalFuture<Result<Option<ExtentMap>>> {
    if is_absent(shared, view, piece.object) {
        return Box::pin(ready(Ok(None)));
    }
    let read = ObjectRead::new(view.snap, piece.extent);
    let map = shared.data().map(&shared.object_name(piece.object), read);
    Box::pin(async move {
        match map.await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    })
}

/// Sums up the stored bytes, object by object, without those of the parent.
pub(crate) async fn usage(
    shared: &Rc<OpenImage>,
    view: ImageView,
    mut progress: impl FnMut(ObjectProgress),
) -> Result<SpaceUsage> {
    shared.check_there()?;
    let provisioned = view.size;
    let total = shared.layout().objects(provisioned);
    let mut used = 0;
    progress(ObjectProgress { done: 0, total });
    let each = |object| map_own(shared, view, shared.layout().piece_of(object, provisioned));
    walk(shared, view, 0..total, each, |done, map: Option<Option<ExtentMap>>| {
        used += map.flatten().map_or(0, |map| map.data_bytes());
        progress(ObjectProgress { done, total });
    })
    .await?;
    Ok(SpaceUsage { provisioned, used })
}
