//! Changes of an image since a snapshot, or since the beginning: which ranges differ, and whether they have data.
//!
//! Changes are found in two steps. Which objects may have changed is known from the object maps if they record it
//! (fast-diff), and otherwise from the clones of each object. What has changed within an object is found by comparing
//! its content at both points. So no change is left out, and unless whole objects are asked for, no block is reported
//! that is the same.

use std::ops::Range;
use std::rc::Rc;

use forebay_block::{Advice, Error, ErrorKind, Extent, ExtentState, LocalFuture, Result, SnapId, SnapSet, is_zero};
use forebay_reactor::{stand_back, yield_now};

use crate::clone::{ParentImage, open_parent};
use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::image::Image;
use crate::info::ObjectProgress;
use crate::layout::ObjectExtent;
use crate::objectmap::{SCAN, load};
use crate::open_image::{ImageView, OpenImage};
use crate::present;
use crate::read::{map_piece, read_parent, read_piece};
use crate::snapshots::find;
use crate::usage::version_at;
use crate::window::{WALK_WINDOW, after_others, windowed_in_order};
use crate::wire::bitmap::{Bitmap, ObjectMapState};

/// Granularity of comparisons in bytes, from the beginning of an object.
const BLOCK: u64 = 4096;
/// Bytes that are compared at once.
const COMPARED: u64 = 1 << 20;
/// Objects whose changes are returned at once.
const STEP: usize = 64;
/// Attempts to read the object maps while other clients change the snapshots.
const TRIES: usize = 3;

/// Range of an image that has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedRange {
    /// Byte range.
    pub extent: Extent,
    /// Set if it has data; otherwise it reads as zeroes.
    pub exists: bool,
}

/// Changes of an image, found object by object.
///
/// Invariant: whatever differs between both points is returned, unless [`next`](Self::next) fails. For the head that
/// includes every write completed before [`Image::changes`] was called; later ones may be included.
pub struct ImageChanges {
    image: Rc<Image>,
    /// Snapshot that the changes begin at; `None`: the beginning, when the image was empty.
    from: Option<ImageView>,
    /// Parent whose content the changes begin at, in place of an empty image.
    parent: Option<Rc<ParentImage>>,
    to: ImageView,
    whole_object: bool,
    /// Objects that may have changed, if the object maps tell; otherwise each is queried.
    marked: Option<Bitmap>,
    /// Objects that may read other data of the parent than before, whether they exist or not.
    parents: Range<u64>,
    at: u64,
    total: u64,
    /// Changes of objects whose set is not complete yet; others of the set may have changes before them.
    held: Vec<ChangedRange>,
    checked: bool,
}

impl Image {
    /// Returns the changes that lead from the snapshot `from` (`None`: from an empty image) to the state that this handle
    /// shows; with `whole_object`, in whole objects, which costs no reads. Data in the parent of a clone counts if `from`
    /// is `None`.
    ///
    /// # Errors
    /// `NotFound` if there is no snapshot `from`; `Invalid` if it is newer than that of this handle; errors of the
    /// backend.
    pub async fn changes(self: &Rc<Self>, from: Option<&str>, whole_object: bool) -> Result<ImageChanges> {
        let shared = self.shared();
        shared.check_there()?;
        // Another client may just have created the snapshot.
        match shared.is_shared() {
            true => shared.refresh().await?,
            false => shared.refresh_stale().await?,
        }
        let from = match from {
            Some(name) => Some(find(shared, name)?),
            None => None,
        };
        let from = match from {
            Some(snapshot) => {
                let gone = || Error::new(ErrorKind::NotFound, format!("snapshot {}", snapshot.name));
                Some(shared.view_of(snapshot.id).ok_or_else(gone)?)
            }
            None => None,
        };
        let to = self.view();
        if from.is_some_and(|from| from.snap > to.snap) {
            let what = format!("image {}: the changes would begin at a newer snapshot", self.name());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let marked = marked_objects(shared, from, to).await?;
        let (least, most) = match from {
            Some(from) => (from.overlap.min(to.overlap), from.overlap.max(to.overlap)),
            None => (0, to.overlap),
        };
        let total = match from.is_some_and(|from| from.snap == to.snap) {
            true => 0,
            false => shared.layout().objects(to.size),
        };
        let parents = shared.layout().objects_of(Extent::new(least, most - least));
        let parents = if least == most { 0..0 } else { parents.start.min(total)..parents.end.min(total) };
        let (image, parent, held) = (self.clone(), None, Vec::new());
        Ok(ImageChanges { image, from, parent, to, whole_object, marked, parents, at: 0, total, held, checked: false })
    }

    /// Returns the changes that lead from a new clone of the image's parent, of the size of this state, to the state that
    /// this handle shows.
    ///
    /// # Errors
    /// `Invalid` if the image has no parent; errors of the backend.
    pub async fn changes_since_parent(self: &Rc<Self>) -> Result<ImageChanges> {
        let shared = self.shared();
        shared.check_there()?;
        match shared.is_shared() {
            true => shared.refresh().await?,
            false => shared.refresh_stale().await?,
        }
        let what = || Error::new(ErrorKind::Invalid, format!("image {}: it has no parent", self.name()));
        let spec = shared.parent().ok_or_else(what)?.spec.clone();
        // A handle of its own: that of the image is used for single reads only, which a flatten waits for.
        let parent = open_parent(shared.images(), &spec, 0, false).await?;
        let to = self.view();
        let marked = marked_objects(shared, None, to).await?;
        let total = shared.layout().objects(to.size);
        // What the clone reads of the parent, and this image does not any more.
        let hidden = to.overlap.min(parent.view.size)..parent.view.size;
        let objects = shared.layout().objects_of(Extent::new(hidden.start, hidden.end - hidden.start));
        let parents = if hidden.is_empty() { 0..0 } else { objects.start.min(total)..objects.end.min(total) };
        Ok(ImageChanges {
            image: self.clone(),
            from: None,
            parent: Some(parent),
            to,
            whole_object: false,
            marked,
            parents,
            at: 0,
            total,
            held: Vec::new(),
            checked: false,
        })
    }
}

impl ImageChanges {
    /// Returns the size of the image at the end of the changes, in bytes.
    pub fn size(&self) -> u64 {
        self.to.size
    }

    /// Returns how many objects have been examined.
    pub fn progress(&self) -> ObjectProgress {
        ObjectProgress { done: self.at, total: self.total }
    }

    /// Returns the changes of the next objects, in order, perhaps none; `None` at the end.
    ///
    /// # Errors
    /// `NotFound` if the image, or one of the snapshots, has been removed meanwhile: the changes are incomplete then;
    /// errors of the backend.
    pub async fn next(&mut self) -> Result<Option<Vec<ChangedRange>>> {
        let shared = self.image.shared().clone();
        shared.check_there()?;
        if self.at == self.total {
            if !self.checked {
                self.check_snapshots().await?;
                self.checked = true;
            }
            return Ok(None);
        }
        let (objects, upto) = self.candidates().await?;
        let mut objects = objects.into_iter();
        let next = || {
            let object = objects.next()?;
            Some(after_others(self.examine(object)))
        };
        let found = windowed_in_order(WALK_WINDOW, next).await?;
        self.at = upto;
        yield_now().await;
        stand_back().await;
        Ok(Some(self.in_order(found.concat())))
    }

    /// Brings changes that were found object by object into the order of the image. Those that others may still precede
    /// are held back.
    fn in_order(&mut self, found: Vec<ChangedRange>) -> Vec<ChangedRange> {
        let shared = self.image.shared();
        let layout = shared.layout();
        if !layout.is_striped() {
            return found;
        }
        self.held.extend(found);
        let complete = match self.at == self.total {
            true => u64::MAX,
            false => self.at / layout.set_objects() * layout.set_size(),
        };
        if self.held.iter().all(|range| range.extent.offset >= complete) {
            return Vec::new();
        }
        self.held.sort_unstable_by_key(|range| range.extent.offset);
        let upto = self.held.partition_point(|range| range.extent.offset < complete);
        merged(self.held.drain(..upto))
    }

    /// Returns the view at the end of the changes, as it is by now: the head may have shrunk.
    fn to(&self) -> ImageView {
        match self.to.snap {
            SnapId::HEAD => {
                let now = self.image.shared().head();
                ImageView { size: now.size.min(self.to.size), ..now }
            }
            _ => self.to,
        }
    }

    /// Returns the next objects that may have changed, and the end of the examined ones.
    async fn candidates(&self) -> Result<(Vec<u64>, u64)> {
        let shared = self.image.shared();
        let (mut objects, mut upto) = match &self.marked {
            Some(marked) => {
                let end = self.total.min(self.at + SCAN as u64);
                let set = |&object: &u64| object < marked.objects() && marked.get(object) == ObjectMapState::Exists;
                let found: Vec<u64> = (self.at..end).filter(set).take(STEP).collect();
                let upto = match found.last() {
                    Some(last) if found.len() == STEP => last + 1,
                    _ => end,
                };
                (found, upto)
            }
            None => {
                // Not the head's view: its object map knows no objects that existed at the snapshot alone.
                let view = self.from.unwrap_or(self.to);
                let found = present::find(shared, view, self.at..self.total).await?;
                (found.objects, found.upto)
            }
        };
        if self.parents.start < upto && self.at < self.parents.end {
            objects.extend(self.parents.start.max(self.at)..self.parents.end.min(upto).min(self.at + STEP as u64));
            objects.sort_unstable();
            objects.dedup();
            if self.parents.end.min(upto) > self.at + STEP as u64 {
                upto = self.at + STEP as u64;
                objects.retain(|&object| object < upto);
            }
        }
        if objects.len() > STEP {
            objects.truncate(STEP);
            upto = objects[STEP - 1] + 1;
        }
        Ok((objects, upto))
    }

    /// Finds the changes of an object.
    fn examine(&self, object: u64) -> LocalFuture<Result<Vec<ChangedRange>>> {
        let (shared, from, to, whole) = (self.image.shared().clone(), self.from, self.to(), self.whole_object);
        let known = self.marked.is_some() || self.parents.contains(&object);
        let (parent, sees_less) = (self.parent.clone(), self.parents.contains(&object));
        Box::pin(async move {
            let piece = shared.layout().piece_of(object, to.size);
            if piece.extent.len == 0 {
                return Ok(Vec::new());
            }
            if let Some(parent) = parent {
                if !sees_less && !exists(&shared, to, object).await? {
                    // Both show the parent's bytes.
                    return Ok(Vec::new());
                }
                let was = async |part| read_of_parent(&shared, &parent, part).await;
                let found = compare(&shared, [piece.extent.range()], was, to, piece).await?;
                return Ok(in_image(&shared, object, found));
            }
            let Some(from) = from else {
                return match whole {
                    true => stored_in_piece(shared, to, piece).await,
                    false => {
                        let stored = stored(&shared, to, piece).await?;
                        Ok(in_image(&shared, object, stored.into_iter().map(|range| (range, true))))
                    }
                };
            };
            if !known && is_unchanged(&shared, object, from.snap, to.snap).await? {
                return Ok(Vec::new());
            }
            match whole {
                true => {
                    // Without an object of its own, a clone reads the parent's data.
                    let sees = async |view| {
                        Ok::<_, Error>(shared.overlap_in(view, object) > 0 || exists(&shared, view, object).await?)
                    };
                    let exists = sees(to).await?;
                    match exists || sees(from).await? {
                        true => Ok(in_image(&shared, object, [(piece.extent.range(), exists)])),
                        // It came and went in between.
                        false => Ok(Vec::new()),
                    }
                }
                false => {
                    let runs = data_at_either(&shared, from, to, piece).await?;
                    let was = async |part| read_within(&shared, from, part).await;
                    let found = compare(&shared, runs, was, to, piece).await?;
                    Ok(in_image(&shared, object, found))
                }
            }
        })
    }

    /// Refuses changes between snapshots that have been removed meanwhile: their data may have been read as zeroes.
    async fn check_snapshots(&self) -> Result<()> {
        let shared = self.image.shared();
        if shared.is_shared() {
            shared.refresh().await?;
        }
        let ends = self.from.into_iter().chain([self.to]).filter(|view| view.snap != SnapId::HEAD);
        for view in ends {
            if shared.view_of(view.snap).is_none() {
                let what = format!("image {}: a snapshot was removed while its changes were read", self.image.name());
                return Err(Error::new(ErrorKind::NotFound, what));
            }
        }
        Ok(())
    }
}

/// Returns the objects that may have changed between two points, as existing ones; `None` unless all object maps between them
/// are valid, and record changes if `from` is a snapshot.
async fn marked_objects(shared: &Rc<OpenImage>, from: Option<ImageView>, to: ImageView) -> Result<Option<Bitmap>> {
    let mut header = shared.header();
    for _ in 0..TRIES {
        let needed = match from {
            Some(_) => ImageFeatures::FAST_DIFF,
            None => ImageFeatures::OBJECT_MAP,
        };
        if !shared.is_shared() || !header.features.has(needed) {
            return Ok(None);
        }
        let Some(marked) = read_maps(shared, &header, from, to).await? else { return Ok(None) };
        // A snapshot that was created meanwhile begins with a map without changes: they are in that of the snapshot.
        let now = Rc::new(shared.images().header(shared.id()).await?);
        let flags =
            |header: &ImageHeader| (header.flags, header.snapshots.iter().map(|one| one.flags).collect::<Vec<_>>());
        let snapshots = |header: &ImageHeader| header.snapshots.iter().map(|one| one.id).collect::<Vec<_>>();
        if snapshots(&now) == snapshots(&header) && flags(&now) == flags(&header) {
            return Ok(Some(marked));
        }
        header = now;
    }
    Ok(None)
}

async fn read_maps(
    shared: &Rc<OpenImage>,
    header: &ImageHeader,
    from: Option<ImageView>,
    to: ImageView,
) -> Result<Option<Bitmap>> {
    let first = from.map_or(to.snap, |from| from.snap);
    let head = (SnapId::HEAD, shared.size(), header.flags);
    let snapshots = header.snapshots.iter().rev().map(|snapshot| (snapshot.id, snapshot.size, snapshot.flags));
    let steps = snapshots.chain([head]).filter(|(snap, ..)| (first..=to.snap).contains(snap));
    let invalid = ImageHeader::MAP_INVALID | if from.is_some() { ImageHeader::FAST_DIFF_INVALID } else { 0 };
    let mut before: Option<Bitmap> = None;
    let mut marked = Bitmap::default();
    for (snap, size, flags) in steps {
        if flags & invalid != 0 {
            return Ok(None);
        }
        let of = (snap != SnapId::HEAD).then_some(snap);
        let map = match load(shared.backend(), &map_object(shared.namespace(), shared.id(), of)).await {
            Ok(map) if map.objects() >= shared.layout().objects(size) => map,
            Ok(_) => return Ok(None),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Ok(None),
            Err(error) => return Err(error),
        };
        let state = |map: &Bitmap, object| match object < map.objects() {
            true => map.get(object),
            false => ObjectMapState::Nonexistent,
        };
        let objects = before.as_ref().map_or(0, Bitmap::objects).max(map.objects());
        marked.resize(objects.max(marked.objects()));
        for object in 0..objects {
            let now = state(&map, object);
            let is_marked = match (&before, from) {
                (Some(before), _) => {
                    let was = state(before, object);
                    !matches!(now, ObjectMapState::Clean | ObjectMapState::Nonexistent)
                        || (was == ObjectMapState::Nonexistent) != (now == ObjectMapState::Nonexistent)
                }
                // The map of the snapshot that the changes begin at.
                (None, Some(_)) => false,
                (None, None) => now != ObjectMapState::Nonexistent,
            };
            if is_marked {
                marked.set(object, ObjectMapState::Exists);
            }
            if object % SCAN as u64 == 0 {
                yield_now().await;
            }
        }
        before = Some(map);
    }
    Ok(before.map(|_| marked))
}

/// Returns whether an object has not been written between two points.
async fn is_unchanged(shared: &OpenImage, object: u64, from: SnapId, to: SnapId) -> Result<bool> {
    let set = match shared.data().snap_set(&shared.object_name(object)).await {
        Ok(set) => set,
        Err(error) if error.kind() == ErrorKind::NotFound => SnapSet::default(),
        Err(error) => return Err(error),
    };
    Ok(version_at(&set, from) == version_at(&set, to))
}

/// Returns whether an image has an object of its own at a view.
async fn exists(shared: &OpenImage, view: ImageView, object: u64) -> Result<bool> {
    match shared.data().stat(&shared.object_name(object), view.snap).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Merges adjacent ranges of one state, which are in order.
fn merged(ranges: impl IntoIterator<Item = ChangedRange>) -> Vec<ChangedRange> {
    let mut merged: Vec<ChangedRange> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.extent.end() == range.extent.offset && last.exists == range.exists => {
                last.extent.len += range.extent.len;
            }
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the ranges of the image that are ranges of an object.
fn in_image(
    shared: &OpenImage,
    object: u64,
    ranges: impl IntoIterator<Item = (Range<u64>, bool)>,
) -> Vec<ChangedRange> {
    let layout = shared.layout();
    let found = ranges.into_iter().flat_map(|(range, exists)| {
        let extents = layout.image_extents(object, Extent::new(range.start, range.end - range.start));
        extents.map(move |extent| ChangedRange { extent, exists })
    });
    found.collect()
}

/// Returns the data of a piece, in the parent too, as ranges of its object.
async fn stored(shared: &Rc<OpenImage>, view: ImageView, piece: ObjectExtent) -> Result<Vec<Range<u64>>> {
    let map = map_piece(shared, view, piece, true).await?;
    let data = map.runs().iter().filter(|run| run.state == ExtentState::Data);
    Ok(data.map(|run| run.extent.range()).collect())
}

/// Returns the parts of a range that are in existing objects, of the parent too.
async fn stored_objects(shared: &Rc<OpenImage>, view: ImageView, extent: Extent) -> Result<Vec<ChangedRange>> {
    let mut found = Vec::new();
    for piece in shared.layout().pieces(extent) {
        found.extend(stored_in_piece(shared.clone(), view, piece).await?);
    }
    Ok(found)
}

/// Returns the parts of a piece that are in existing objects: all of it, or what is in those of the parent.
fn stored_in_piece(
    shared: Rc<OpenImage>,
    view: ImageView,
    piece: ObjectExtent,
) -> LocalFuture<Result<Vec<ChangedRange>>> {
    Box::pin(async move {
        if exists(&shared, view, piece.object).await? {
            return Ok(in_image(&shared, piece.object, [(piece.extent.range(), true)]));
        }
        let overlap = shared.overlap_in(view, piece.object).saturating_sub(piece.extent.offset).min(piece.extent.len);
        let Some(parent) = shared.parent().filter(|_| overlap > 0) else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for extent in shared.layout().image_extents(piece.object, Extent::new(piece.extent.offset, overlap)) {
            let len = extent.len.min(parent.view.size.saturating_sub(extent.offset));
            found.extend(stored_objects(&parent.shared, parent.view, Extent::new(extent.offset, len)).await?);
        }
        if parent.shared.layout().is_striped() {
            found.sort_unstable_by_key(|range: &ChangedRange| range.extent.offset);
            found = merged(found);
        }
        Ok(found)
    })
}

/// Compares ranges of an object at a view with what `was` returns for them; returns what differs, as ranges of the object,
/// and whether it has data.
async fn compare(
    shared: &Rc<OpenImage>,
    runs: impl IntoIterator<Item = Range<u64>>,
    was: impl AsyncFn(ObjectExtent) -> Result<Vec<u8>>,
    to: ImageView,
    piece: ObjectExtent,
) -> Result<Vec<(Range<u64>, bool)>> {
    let mut found: Vec<(Range<u64>, bool)> = Vec::new();
    for run in runs {
        let mut at = run.start;
        while at < run.end {
            // Up to the end of a block, so that blocks are whole.
            let end = run.end.min((at + COMPARED) / BLOCK * BLOCK);
            let part = ObjectExtent { extent: Extent::new(at, end - at), ..piece };
            let was = was(part).await?;
            let is = read_within(shared, to, part).await?;
            let mut done = 0;
            while done < is.len() {
                let offset = at + done as u64;
                let len = (BLOCK - offset % BLOCK).min(end - offset);
                let bytes = done..done + len as usize;
                if was[bytes.clone()] != is[bytes.clone()] {
                    let exists = !is_zero(&is[bytes]);
                    match found.last_mut() {
                        Some((last, state)) if last.end == offset && *state == exists => last.end += len,
                        _ => found.push((offset..offset + len, exists)),
                    }
                }
                done += len as usize;
            }
            at = end;
        }
    }
    Ok(found)
}

/// Cuts a piece at the end of a view.
fn within(shared: &OpenImage, view: ImageView, piece: ObjectExtent) -> ObjectExtent {
    let Extent { offset, len } = piece.extent;
    let len = len.min(shared.layout().bytes_below(piece.object, view.size).saturating_sub(offset));
    ObjectExtent { extent: Extent::new(offset, len), ..piece }
}

/// Reads a piece at a view; bytes past its end read as zeroes.
async fn read_within(shared: &Rc<OpenImage>, view: ImageView, piece: ObjectExtent) -> Result<Vec<u8>> {
    let inner = within(shared, view, piece);
    let mut data = match inner.extent.len {
        0 => Vec::new(),
        _ => read_piece(shared, view, inner, Advice::ONE_PASS).await?.to_vec(),
    };
    data.resize(piece.extent.len as usize, 0);
    Ok(data)
}

/// Reads what a new clone of the parent shows of a piece.
async fn read_of_parent(shared: &Rc<OpenImage>, parent: &ParentImage, piece: ObjectExtent) -> Result<Vec<u8>> {
    let Extent { offset, len } = piece.extent;
    let inner = len.min(shared.layout().bytes_below(piece.object, parent.view.size).saturating_sub(offset));
    let mut data = match inner {
        0 => Vec::new(),
        _ => read_parent(shared, parent, piece.object, Extent::new(offset, inner), Advice::ONE_PASS).await?.to_vec(),
    };
    data.resize(len as usize, 0);
    Ok(data)
}

/// Returns the parts of a piece that have data at one of two views; the rest reads as zeroes at both.
async fn data_at_either(
    shared: &Rc<OpenImage>,
    from: ImageView,
    to: ImageView,
    piece: ObjectExtent,
) -> Result<Vec<Range<u64>>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for view in [from, to] {
        let inner = within(shared, view, piece);
        if inner.extent.len > 0 {
            runs.extend(stored(shared, view, inner).await?);
        }
    }
    runs.sort_unstable_by_key(|run| run.start);
    let mut union: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match union.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => union.push(run),
        }
    }
    Ok(union)
}
