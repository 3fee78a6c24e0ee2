//! Header of an open image in memory, and what requests see of it: size, overlap, snapshot context, parent.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{SizeWatch, SnapContext, SnapId};
use forebay_reactor::sync::{Permit, Semaphore};

use crate::clone::ParentImage;
use crate::format::{ImageFeatures, ImageHeader};
use crate::open_image::ImageView;

/// Header as last read, and what requests see of it.
///
/// Invariants:
/// 1. The snapshot context is that of the header.
/// 2. The size changes only while one holds the resize permit, so that a re-read header does not undo the size that a
///    resize by this client shows to requests ahead of the stored one.
/// 3. The overlap grows only with a re-read header.
pub(crate) struct HeaderState {
    header: RefCell<Rc<ImageHeader>>,
    /// Snapshot context of writes; `None` for an image that never had a snapshot.
    snapc: RefCell<Option<Rc<SnapContext>>>,
    parent: RefCell<Option<Rc<ParentImage>>>,
    size: Cell<u64>,
    /// Overlap of the head with the parent in bytes.
    overlap: Cell<u64>,
    size_watch: Rc<SizeWatch>,
    /// Serializes re-reads, so that an older header is not applied last.
    refreshing: Semaphore,
    /// Serializes resizes.
    resizing: Semaphore,
    /// Set while the stored header may be newer than this one, since it could not be read.
    stale: Cell<bool>,
}

/// Re-read of the header in progress; the header in memory stays stale unless it is applied.
pub(crate) struct Refresh<'a> {
    state: &'a HeaderState,
    _alone: Permit,
}

impl HeaderState {
    pub(crate) fn new(header: ImageHeader, parent: Option<Rc<ParentImage>>) -> Self {
        Self {
            snapc: RefCell::new(context_of(&header)),
            parent: RefCell::new(parent),
            size: Cell::new(header.size),
            overlap: Cell::new(overlap_of(&header)),
            header: RefCell::new(Rc::new(header)),
            size_watch: Rc::default(),
            refreshing: Semaphore::new(1),
            resizing: Semaphore::new(1),
            stale: Cell::new(false),
        }
    }

    pub(crate) fn header(&self) -> Rc<ImageHeader> {
        self.header.borrow().clone()
    }

    /// Returns whether the image has the feature exclusive-lock.
    pub(crate) fn has_exclusive_lock(&self) -> bool {
        self.header.borrow().features.has(ImageFeatures::EXCLUSIVE_LOCK)
    }

    pub(crate) fn snapc(&self) -> Option<Rc<SnapContext>> {
        self.snapc.borrow().clone()
    }

    pub(crate) fn parent(&self) -> Option<Rc<ParentImage>> {
        self.parent.borrow().clone()
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.get()
    }

    /// Sets the size that requests see; the caller holds the resize permit.
    pub(crate) fn set_size(&self, size: u64) {
        debug_assert_eq!(self.resizing.available(), 0, "the size changes outside of a resize");
        if self.size.replace(size) != size {
            self.size_watch.announce();
        }
    }

    pub(crate) fn size_watch(&self) -> &Rc<SizeWatch> {
        &self.size_watch
    }

    /// Reduces the overlap with the parent.
    pub(crate) fn reduce_overlap(&self, overlap: u64) {
        debug_assert!(overlap <= self.overlap.get(), "the overlap grows");
        self.overlap.set(overlap);
    }

    /// Returns the current view of the head.
    pub(crate) fn head(&self) -> ImageView {
        ImageView { snap: SnapId::HEAD, size: self.size(), overlap: self.overlap.get(), is_parent: false }
    }

    /// Returns the view of a snapshot; `None` if there is none of that id.
    pub(crate) fn view_of(&self, snap: SnapId) -> Option<ImageView> {
        let header = self.header();
        let snapshot = header.snapshots.iter().find(|snapshot| snapshot.id == snap)?;
        let overlap = snapshot.overlap.unwrap_or(0).min(snapshot.size);
        Some(ImageView { snap, size: snapshot.size, overlap, is_parent: false })
    }

    /// Waits for the permit to resize.
    pub(crate) async fn begin_resize(&self) -> Permit {
        self.resizing.acquire(1).await
    }

    /// Returns whether the last attempt to re-read the header failed, or is in progress.
    pub(crate) fn is_stale(&self) -> bool {
        self.stale.get()
    }

    /// Waits for the turn to re-read the header.
    pub(crate) async fn begin_refresh(&self) -> Refresh<'_> {
        let alone = self.refreshing.acquire(1).await;
        self.stale.set(true);
        Refresh { state: self, _alone: alone }
    }
}

impl Refresh<'_> {
    /// Replaces the parent.
    pub(crate) fn set_parent(&self, parent: Option<Rc<ParentImage>>) {
        *self.state.parent.borrow_mut() = parent;
    }

    /// Shows requests a header ahead of the stored one; the header stays stale unless one is applied.
    pub(crate) fn adopt(&self, header: &ImageHeader) {
        *self.state.snapc.borrow_mut() = context_of(header);
        *self.state.header.borrow_mut() = Rc::new(header.clone());
    }

    /// Applies the header that was read.
    pub(crate) fn apply(self, header: ImageHeader) {
        let state = self.state;
        *state.snapc.borrow_mut() = context_of(&header);
        // During a resize by this client, the in-memory size is ahead of the stored one.
        if let Some(_alone) = state.resizing.try_acquire(1) {
            state.overlap.set(overlap_of(&header));
            state.set_size(header.size);
        }
        *state.header.borrow_mut() = Rc::new(header);
        state.stale.set(false);
    }
}

/// Returns the snapshot context of writes; `None` for an image that never had a snapshot.
fn context_of(header: &ImageHeader) -> Option<Rc<SnapContext>> {
    (header.snap_seq > 0).then(|| Rc::new(header.snap_context()))
}

/// Returns the overlap of the head with the parent, in bytes.
fn overlap_of(header: &ImageHeader) -> u64 {
    let overlap = header.parent.as_ref().and_then(|(_, parent)| parent.overlap);
    overlap.unwrap_or(0).min(header.size)
}
