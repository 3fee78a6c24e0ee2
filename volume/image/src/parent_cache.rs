//! Reads of stored objects, those of a parent, and own blocks of an image that asks for it, through the cache of this core,
//! if it has one.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{
    Advice, HeadRead, LocalFuture, ObjectRead, Result, SnapId, SnapshotCache, SnapshotIdentity, SnapshotRead,
    SparseData,
};

use crate::layout::ObjectExtent;
use crate::open_image::{ImageView, OpenImage};

thread_local! {
    /// Snapshot cache of the images on this core.
    static INSTALLED: RefCell<Option<Rc<dyn SnapshotCache>>> = const { RefCell::new(None) };
}

/// Guard of an installed snapshot cache: images stop using it when this is dropped.
pub struct InstalledSnapshotCache(Rc<dyn SnapshotCache>);

/// Makes all images of this core read the data of their parents through `cache`, in place of a former one.
#[must_use = "images stop using the cache when the guard is dropped"]
pub fn install_snapshot_cache(cache: Rc<dyn SnapshotCache>) -> InstalledSnapshotCache {
    INSTALLED.set(Some(cache.clone()));
    InstalledSnapshotCache(cache)
}

impl Drop for InstalledSnapshotCache {
    fn drop(&mut self) {
        // Dropped behind the borrow: the cache may own anything.  At the end of the thread there is none left.
        let _former = INSTALLED.try_with(|installed| {
            let mut installed = installed.borrow_mut();
            let is_own = installed.as_ref().is_some_and(|cache| Rc::ptr_eq(cache, &self.0));
            if is_own { installed.take() } else { None }
        });
    }
}

/// Returns the snapshot cache of this core.
pub(crate) fn installed() -> Option<Rc<dyn SnapshotCache>> {
    INSTALLED.with_borrow(Clone::clone)
}

/// Reads stored extents of a piece; `NotFound` if its object does not exist in the view.
pub(crate) fn read_object(
    shared: &Rc<OpenImage>,
    view: ImageView,
    piece: ObjectExtent,
    advice: Advice,
) -> LocalFuture<Result<SparseData>> {
    let (data, name) = (shared.data(), shared.object_name(piece.object));
    if view.is_parent
        && view.snap != SnapId::HEAD
        && let Some(cache) = installed()
        && let Some(pool) = data.identity()
    {
        let read = SnapshotRead {
            snapshot: SnapshotIdentity { pool, image: shared.id().into(), snap: view.snap },
            object: piece.object,
            object_size: shared.layout().object_size(),
            extent: piece.extent,
            inherits: shared.overlap_in(view, piece.object) > 0 && shared.parent().is_some(),
        };
        let data = data.clone();
        // Without advice: the parent has other children, which may read the same soon.
        return cache.read(read, Rc::new(move |extent| data.read(&name, ObjectRead::new(view.snap, extent))));
    }
    if view.snap == SnapId::HEAD
        && !advice.has(Advice::NO_CACHE)
        && let Some(own) = shared.own_blocks().for_read(shared)
    {
        let object_size = shared.layout().object_size();
        let read = HeadRead { object: piece.object, object_size, extent: piece.extent };
        let data = data.clone();
        return own.read(
            read,
            Rc::new(move |extent| data.read(&name, ObjectRead::new(SnapId::HEAD, extent).advised(advice))),
        );
    }
    data.read(&name, ObjectRead::new(view.snap, piece.extent).advised(advice))
}
