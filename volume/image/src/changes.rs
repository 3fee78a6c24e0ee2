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

use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::image::Image;
use crate::info::ObjectProgress;
use crate::objectmap::{SCAN, load};
use crate::open_image::{ImageView, OpenImage};
use crate::present;
use crate::read::{self, read_all};
use crate::snapshots::find;
use crate::usage::version_at;
use crate::window::{WALK_WINDOW, after_others, windowed};
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
    to: ImageView,
    whole_object: bool,
    /// Objects that may have changed, if the object maps tell; otherwise each is queried.
    marked: Option<Bitmap>,
    /// Objects that may read other data of the parent than before, whether they exist or not.
    parents: Range<u64>,
    at: u64,
    total: u64,
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
        let object_size = shared.layout().object_size();
        let (least, most) = match from {
            Some(from) => (from.overlap.min(to.overlap), from.overlap.max(to.overlap)),
            None => (0, to.overlap),
        };
        let total = match from.is_some_and(|from| from.snap == to.snap) {
            true => 0,
            false => shared.layout().objects(to.size),
        };
        let parents = (least / object_size..shared.layout().objects(most)).start.min(total)
            ..shared.layout().objects(most).min(total);
        let parents = if least == most { 0..0 } else { parents };
        Ok(ImageChanges { image: self.clone(), from, to, whole_object, marked, parents, at: 0, total, checked: false })
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
        let count = objects.len();
        let mut objects = objects.into_iter();
        let next = || {
            let object = objects.next()?;
            Some(after_others(self.examine(object)))
        };
        let mut found: Vec<Vec<ChangedRange>> = vec![Vec::new(); count];
        windowed(WALK_WINDOW, next, |number, ranges| found[number] = ranges).await?;
        self.at = upto;
        yield_now().await;
        stand_back().await;
        Ok(Some(found.concat()))
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
        Box::pin(async move {
            let object_size = shared.layout().object_size();
            let start = object * object_size;
            let extent = Extent::new(start, object_size.min(to.size.saturating_sub(start)));
            if extent.len == 0 {
                return Ok(Vec::new());
            }
            let Some(from) = from else {
                return match whole {
                    true => stored_objects(&shared, to, extent).await,
                    false => stored(&shared, to, extent).await,
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
                        true => Ok(vec![ChangedRange { extent, exists }]),
                        // It came and went in between.
                        false => Ok(Vec::new()),
                    }
                }
                false => compare(&shared, from, to, extent).await,
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

/// Returns the data of a range, in the parent too.
async fn stored(shared: &Rc<OpenImage>, view: ImageView, extent: Extent) -> Result<Vec<ChangedRange>> {
    let map = read::map(shared, view, extent).await?;
    let data = map.runs().iter().filter(|run| run.state == ExtentState::Data);
    Ok(data.map(|run| ChangedRange { extent: run.extent, exists: true }).collect())
}

/// Returns the parts of a range that are in existing objects, of the parent too.
fn stored_objects(shared: &Rc<OpenImage>, view: ImageView, extent: Extent) -> LocalFuture<Result<Vec<ChangedRange>>> {
    let shared = shared.clone();
    Box::pin(async move {
        let mut found = Vec::new();
        let object_size = shared.layout().object_size();
        for piece in shared.layout().pieces(extent) {
            let at = piece.object * object_size + piece.extent.offset;
            if exists(&shared, view, piece.object).await? {
                found.push(ChangedRange { extent: Extent::new(at, piece.extent.len), exists: true });
                continue;
            }
            let overlap = shared.overlap_in(view, piece.object).saturating_sub(piece.extent.offset);
            let Some(parent) = shared.parent().filter(|_| overlap > 0) else { continue };
            let len = overlap.min(piece.extent.len).min(parent.view.size.saturating_sub(at));
            found.extend(stored_objects(&parent.shared, parent.view, Extent::new(at, len)).await?);
        }
        Ok(found)
    })
}

/// Compares the content of a range, within one object, at two views.
async fn compare(shared: &Rc<OpenImage>, from: ImageView, to: ImageView, extent: Extent) -> Result<Vec<ChangedRange>> {
    let mut found: Vec<ChangedRange> = Vec::new();
    for run in data_at_either(shared, from, to, extent).await? {
        let mut at = run.start;
        while at < run.end {
            // Up to the end of a block, so that blocks are whole.
            let end = run.end.min((at + COMPARED) / BLOCK * BLOCK);
            let part = Extent::new(at, end - at);
            let was = read_all(shared, from, part, Advice::ONE_PASS).await?.to_vec();
            let is = read_all(shared, to, part, Advice::ONE_PASS).await?.to_vec();
            let mut done = 0;
            while done < is.len() {
                let offset = at + done as u64;
                let len = (BLOCK - offset % BLOCK).min(end - offset);
                let bytes = done..done + len as usize;
                if was[bytes.clone()] != is[bytes.clone()] {
                    let exists = !is_zero(&is[bytes]);
                    match found.last_mut() {
                        Some(last) if last.extent.end() == offset && last.exists == exists => last.extent.len += len,
                        _ => found.push(ChangedRange { extent: Extent::new(offset, len), exists }),
                    }
                }
                done += len as usize;
            }
            at = end;
        }
    }
    Ok(found)
}

/// Returns the parts of a range that have data at one of two views; the rest reads as zeroes at both.
async fn data_at_either(
    shared: &Rc<OpenImage>,
    from: ImageView,
    to: ImageView,
    extent: Extent,
) -> Result<Vec<Range<u64>>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for view in [from, to] {
        let len = extent.len.min(view.size.saturating_sub(extent.offset));
        if len > 0 {
            let data = stored(shared, view, Extent::new(extent.offset, len)).await?;
            runs.extend(data.iter().map(|range| range.extent.range()));
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
