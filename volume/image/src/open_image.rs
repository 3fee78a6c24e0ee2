//! Open image: what its handles share.

mod events;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{
    Error, ErrorKind, ExclusiveRange, Extent, LocalFuture, ObjectBackend, ObjectName, ObjectOp, Result, SharedRange,
    SizeWatch, SnapContext, SnapId, Transaction,
};
use forebay_reactor::sync::Permit;

use crate::admission::Admission;
use crate::clone::{ParentImage, open_parent, until_unused};
use crate::exclusive_lock::ExclusiveLock;
use crate::format::{ImageFeatures, ImageHeader, header_object};
use crate::header_state::{HeaderState, Refresh};
use crate::images::Images;
use crate::info::Striping;
use crate::layout::StripeLayout;
use crate::lifecycle::ImageLifecycle;
use crate::objectmap::ObjectMap;
use crate::own_blocks::OwnBlockCache;
use crate::owner::OwnerRequests;
use crate::pools::{DataPool, ImagePools};
use crate::reserved::ImageReservations;
use crate::watcher::{HeaderWatcher, ImageEvents};

/// View of an image that a request operates on: the head, or a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImageView {
    pub(crate) snap: SnapId,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: u64,
    /// True for a snapshot that is read as the parent of a clone: its objects may come from the snapshot cache.
    pub(crate) is_parent: bool,
}

/// Callback that verifies this client's knowledge of an image whose lock it has just acquired.
pub type LockCheck = Rc<dyn Fn() -> LocalFuture<Result<()>>>;

/// Callback after the header may have been changed by another client.
pub type HeaderHook = Rc<dyn Fn()>;

/// Open image, shared by all its handles. Each part has its own invariants; this joins them.
pub(crate) struct OpenImage {
    pools: ImagePools,
    id: String,
    name: RefCell<String>,
    layout: StripeLayout,
    state: HeaderState,
    admission: Admission,
    lifecycle: ImageLifecycle,
    /// Watch and exclusive lock, if the pool is shared.
    coordination: RefCell<Option<Coordination>>,
    /// Shared reservations, if other daemons can serve the image too.
    reserved: RefCell<Option<Rc<ImageReservations>>>,
    /// Operations for other clients, and requests to the owner of the lock.
    owner: OwnerRequests,
    /// Called whenever the lock was acquired; see [`Image::set_lock_check`](crate::Image::set_lock_check).
    lock_check: RefCell<Option<LockCheck>>,
    /// Called after a header update; see [`Image::set_header_hook`](crate::Image::set_header_hook).
    header_hook: RefCell<Option<HeaderHook>>,
    preferred_io: u32,
    /// Set if the image is being removed, and its parent need not exist.
    ignores_parent: bool,
    /// Number of rollbacks by this client, and of acquisitions of the lock, before which other clients may have rolled back.
    rollbacks: Cell<u64>,
    own_blocks: OwnBlockCache,
}

/// Coordination with the other clients of a shared pool.
#[derive(Clone)]
pub(crate) struct Coordination {
    pub(crate) watcher: Rc<HeaderWatcher>,
    pub(crate) lock: Rc<ExclusiveLock>,
}

impl OpenImage {
    /// Opens an image by its header. A parent, if any, is opened recursively; `depth` counts the clones so far.
    /// `in_use` marks the pools as in use by hosts.
    pub(crate) async fn open(
        images: &Rc<Images>,
        name: &str,
        id: &str,
        header: ImageHeader,
        depth: u32,
        in_use: bool,
    ) -> Result<Rc<Self>> {
        let pools = ImagePools::open(images, &header, in_use).await?;
        let parent = match &header.parent {
            Some((_, spec)) => Some(Box::pin(open_parent(images, spec, depth, in_use)).await?),
            None => None,
        };
        Ok(Self::new(pools, name, id, header, parent, false))
    }

    /// Opens an image that will not be read, whether its parent exists or not.
    pub(crate) async fn open_without_parent(
        images: &Rc<Images>,
        name: &str,
        id: &str,
        header: ImageHeader,
    ) -> Result<Rc<Self>> {
        let pools = ImagePools::open(images, &header, false).await?;
        Ok(Self::new(pools, name, id, header, None, true))
    }

    fn new(
        pools: ImagePools,
        name: &str,
        id: &str,
        header: ImageHeader,
        parent: Option<Rc<ParentImage>>,
        ignores_parent: bool,
    ) -> Rc<Self> {
        let layout = StripeLayout::new(
            header.order,
            header.striping_or_none(),
            &header.object_prefix,
            pools.images().namespace(),
        );
        Rc::new(Self {
            preferred_io: pools.data().info().preferred_io,
            pools,
            id: id.to_owned(),
            name: RefCell::new(name.to_owned()),
            layout,
            state: HeaderState::new(header, parent),
            ignores_parent,
            rollbacks: Cell::new(0),
            own_blocks: OwnBlockCache::default(),
            admission: Admission::new(),
            lifecycle: ImageLifecycle::default(),
            coordination: RefCell::default(),
            reserved: RefCell::default(),
            owner: OwnerRequests::default(),
            lock_check: RefCell::default(),
            header_hook: RefCell::default(),
        })
    }

    // ---- Identity and pools ----

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn name(&self) -> String {
        self.name.borrow().clone()
    }

    pub(crate) fn set_name(&self, name: &str) {
        *self.name.borrow_mut() = name.to_owned();
    }

    /// Returns the images of its pool and namespace.
    pub(crate) fn images(&self) -> &Rc<Images> {
        self.pools.images()
    }

    /// Returns the pool of the metadata.
    pub(crate) fn backend(&self) -> &Rc<dyn ObjectBackend> {
        self.pools.metadata()
    }

    /// Returns the pool of the data.
    pub(crate) fn data(&self) -> &DataPool {
        self.pools.data()
    }

    /// Submits a change of a data object of the head. All of them go through here.
    pub(crate) fn change_data(&self, object: u64, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let change = self.own_blocks.begin_change(self, object, &transaction);
        let submitted = self.data().submit_uncached(&self.object_name(object), transaction);
        match change {
            Some(change) => change.until(submitted),
            None => submitted,
        }
    }

    pub(crate) fn own_blocks(&self) -> &OwnBlockCache {
        &self.own_blocks
    }

    pub(crate) fn namespace(&self) -> &Rc<str> {
        self.pools.images().namespace()
    }

    pub(crate) fn header_object(&self) -> ObjectName {
        header_object(self.namespace(), &self.id)
    }

    pub(crate) fn layout(&self) -> &StripeLayout {
        &self.layout
    }

    pub(crate) fn object_name(&self, object: u64) -> ObjectName {
        self.layout.name(object)
    }

    /// Returns the preferred size of requests in bytes.
    pub(crate) fn preferred_io(&self) -> u32 {
        self.preferred_io
    }

    /// Marks the pools of the image and of its parents as in use; see
    /// [`Image::mark_in_use`](crate::Image::mark_in_use).
    pub(crate) fn mark_in_use(&self) {
        self.pools.mark_in_use();
        if let Some(parent) = self.parent() {
            parent.shared.mark_in_use();
        }
    }

    /// Returns the allocation hint for an object that may be new, the same as librbd's; `None` in an unshared pool.
    pub(crate) fn expectation(&self) -> Option<ObjectOp> {
        let size = self.layout.object_size();
        self.is_shared().then_some(ObjectOp::Expect { object_size: size, write_size: size })
    }

    pub(crate) fn lifecycle(&self) -> &ImageLifecycle {
        &self.lifecycle
    }

    // ---- Header ----

    /// Re-reads the header and applies it.
    pub(crate) async fn refresh(&self) -> Result<()> {
        let refresh = self.state.begin_refresh().await;
        let header = self.pools.images().header(&self.id).await?;
        let spec = header.parent.as_ref().map(|(_, spec)| (spec.pool, &spec.namespace, &spec.image, spec.snap));
        let known = self.parent();
        let known_spec = known.as_ref().map(|parent| &parent.spec);
        let is_other = spec != known_spec.map(|spec| (spec.pool, &spec.namespace, &spec.image, spec.snap));
        if is_other && !self.ignores_parent {
            let parent = match &header.parent {
                Some((_, spec)) => Some(open_parent(self.pools.images(), spec, 0, self.pools.is_in_use()).await?),
                None => None,
            };
            refresh.set_parent(parent);
            if self.pools.is_in_use() {
                // The image may have been marked as in use while the parent was opened.
                self.mark_in_use();
            }
        }
        let flags = header.flags;
        refresh.apply(header);
        if let Some(map) = self.map() {
            map.set_flags(flags);
        }
        if let Some(former) = known.filter(|_| is_other) {
            // When this client has taken the change over, the former parent's snapshot may be removed.
            until_unused(former).await;
        }
        Ok(())
    }

    /// Returns the number of times that objects of the image may have been rolled back while it was open.
    pub(crate) fn rollbacks(&self) -> u64 {
        self.rollbacks.get()
    }

    /// Counts a rollback that begins, or may have been made by another client.
    pub(crate) fn note_rollback(&self) {
        self.rollbacks.set(self.rollbacks.get() + 1);
    }

    /// Waits until no header is being re-read, and keeps it so until the guard is dropped.
    pub(crate) async fn begin_refresh(&self) -> Refresh<'_> {
        self.state.begin_refresh().await
    }

    /// Re-reads the header if the last attempt failed.
    pub(crate) async fn refresh_stale(&self) -> Result<()> {
        if self.state.is_stale() { self.refresh().await } else { Ok(()) }
    }

    /// Re-reads the stored header after a change by this client, if the pool is shared or the image has a parent.
    pub(crate) async fn refresh_stored(&self) -> Result<()> {
        if self.is_shared() || self.parent().is_some() { self.refresh().await } else { Ok(()) }
    }

    /// Changes the stored header, durably, if the image exists and this client still holds its lock.  `Guard` if a comparison
    /// fails.
    pub(crate) async fn store_header(&self, change: Vec<ObjectOp>) -> Result<()> {
        let mut ops = vec![ObjectOp::AssertExists];
        ops.extend(self.exclusive_lock().and_then(|lock| lock.assertion()));
        ops.extend(change);
        self.backend().submit(&self.header_object(), Transaction::new(ops).durable()).await.map(drop)
    }

    pub(crate) fn header(&self) -> Rc<ImageHeader> {
        self.state.header()
    }

    pub(crate) fn parent(&self) -> Option<Rc<ParentImage>> {
        self.state.parent()
    }

    pub(crate) fn snapc(&self) -> Option<Rc<SnapContext>> {
        self.state.snapc()
    }

    pub(crate) fn size(&self) -> u64 {
        self.state.size()
    }

    /// Sets the size that requests see; the caller holds the resize permit.
    pub(crate) fn set_size(&self, size: u64) {
        self.state.set_size(size);
    }

    pub(crate) fn size_watch(&self) -> &Rc<SizeWatch> {
        self.state.size_watch()
    }

    pub(crate) fn reduce_overlap(&self, overlap: u64) {
        self.state.reduce_overlap(overlap);
    }

    /// Waits for the permit to resize.
    pub(crate) async fn begin_resize(&self) -> Permit {
        self.state.begin_resize().await
    }

    /// Returns the current view of the head.
    pub(crate) fn head(&self) -> ImageView {
        self.state.head()
    }

    /// Returns the view of a snapshot; `None` if there is none of that id.
    pub(crate) fn view_of(&self, snap: SnapId) -> Option<ImageView> {
        self.state.view_of(snap)
    }

    /// Returns how many bytes of an object, its first ones, overlap with the parent.
    pub(crate) fn overlap_in(&self, view: ImageView, object: u64) -> u64 {
        if view.overlap == 0 {
            return 0;
        }
        self.layout.bytes_below(object, view.overlap)
    }

    // ---- Other clients ----

    /// Establishes the watch, if the pool is shared, and re-reads the header for changes since it was read.
    pub(crate) async fn begin_watch(self: &Rc<Self>) -> Result<()> {
        let Some(objects) = self.backend().shared() else { return Ok(()) };
        let image: Rc<dyn ImageEvents> = self.clone();
        let watcher = HeaderWatcher::new(objects, self.header_object(), Rc::downgrade(&image));
        let lock = ExclusiveLock::new(watcher.clone(), self.backend().clone());
        *self.coordination.borrow_mut() = Some(Coordination { watcher: watcher.clone(), lock });
        watcher.begin().await?;
        self.refresh().await
    }

    /// Returns whether other clients can have the image open at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        self.coordination.borrow().is_some()
    }

    pub(crate) fn coordination(&self) -> Option<Coordination> {
        self.coordination.borrow().clone()
    }

    pub(crate) fn watcher(&self) -> Option<Rc<HeaderWatcher>> {
        self.coordination.borrow().as_ref().map(|coordination| coordination.watcher.clone())
    }

    pub(crate) fn exclusive_lock(&self) -> Option<Rc<ExclusiveLock>> {
        self.coordination.borrow().as_ref().map(|coordination| coordination.lock.clone())
    }

    /// Returns the object map, if the image has one and this client holds the lock.
    pub(crate) fn map(&self) -> Option<Rc<ObjectMap>> {
        self.coordination.borrow().as_ref()?.lock.map()
    }

    /// Returns whether the image is lost for good: the cluster has fenced this client, the image was removed, or a lock
    /// to be kept was lost.
    pub(crate) fn is_fenced(&self) -> bool {
        self.coordination.borrow().as_ref().is_some_and(|coordination| coordination.lock.check().is_err())
    }

    /// Returns whether writing requires the exclusive lock.
    fn needs_lock(&self) -> bool {
        self.state.has_exclusive_lock()
    }

    /// Returns whether the exclusive lock, if required, is held.
    pub(crate) fn may_write(&self) -> bool {
        match &*self.coordination.borrow() {
            None => true,
            Some(coordination) => coordination.lock.is_locked() || !self.needs_lock(),
        }
    }

    /// Returns the number of the present acquisition of the exclusive lock, or of the next one; 0 in an unshared pool.
    pub(crate) fn acquisition(&self) -> u64 {
        self.coordination.borrow().as_ref().map_or(0, |coordination| coordination.lock.acquisition())
    }

    /// Returns [`acquisition`](Self::acquisition) if it is certain that no other client can change the image.
    pub(crate) fn certain_acquisition(&self) -> Option<u64> {
        match &*self.coordination.borrow() {
            None => Some(0),
            Some(coordination) => coordination.lock.certain_acquisition().filter(|_| self.needs_lock()),
        }
    }

    /// Acquires the exclusive lock, if it is required.
    pub(crate) async fn lock(&self) -> Result<()> {
        match self.exclusive_lock() {
            Some(lock) if self.needs_lock() => {
                lock.acquire(self).await?;
                if !self.needs_lock() {
                    // The feature was disabled while this client waited for the lock.
                    lock.release(self, None).await;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns whether another client that is alive holds the exclusive lock, which this image requires.
    pub(crate) async fn has_other_owner(&self) -> Result<bool> {
        match self.exclusive_lock() {
            Some(lock) if self.needs_lock() => lock.has_other_owner().await,
            _ => Ok(false),
        }
    }

    pub(crate) fn owner(&self) -> &OwnerRequests {
        &self.owner
    }

    pub(crate) fn set_lock_check(&self, check: LockCheck) {
        *self.lock_check.borrow_mut() = Some(check);
    }

    pub(crate) fn set_header_hook(&self, hook: HeaderHook) {
        *self.header_hook.borrow_mut() = Some(hook);
    }

    /// Calls the hook for a header that may have changed.
    fn header_may_have_changed(&self) {
        let hook = self.header_hook.borrow().clone();
        if let Some(hook) = hook {
            hook();
        }
    }

    pub(crate) fn reserved(&self) -> Option<Rc<ImageReservations>> {
        self.reserved.borrow().clone()
    }

    pub(crate) fn set_reserved(&self, reserved: Rc<ImageReservations>) {
        *self.reserved.borrow_mut() = Some(reserved);
    }

    /// Releases the lock and the watch.
    pub(crate) async fn end_coordination(&self) {
        if let Some(Coordination { watcher, lock }) = self.coordination() {
            lock.close(self).await;
            watcher.end().await;
        }
    }

    /// Releases the lock and the watch, after the last handle was dropped.
    pub(crate) async fn close(self: Rc<Self>) {
        self.end_coordination().await;
        self.coordination.take();
        self.lifecycle.end_close();
    }

    // ---- Admission ----

    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Waits until a change of a range is admitted, with the exclusive lock if required. The lock is not released
    /// before the change has ended.
    pub(crate) async fn enter(&self, extent: Extent) -> Result<SharedRange> {
        loop {
            if !self.may_write() {
                self.lock().await?;
            }
            let range = self.admission.shared(extent).await;
            // The lock may have been released in the meantime.
            if self.may_write() {
                return Ok(range);
            }
        }
    }

    /// Locks a range exclusively, with the exclusive lock of the image if required.
    pub(crate) async fn enter_alone(&self, extent: Extent) -> Result<ExclusiveRange> {
        loop {
            if !self.may_write() {
                self.lock().await?;
            }
            let range = self.admission.exclusive(extent).await;
            if self.may_write() {
                return Ok(range);
            }
        }
    }

    /// Refuses an image with unsupported features, or striping.
    pub(crate) fn check_features(&self, read_only: bool) -> Result<()> {
        let header = self.header();
        if let Some(Striping { unit, count }) = header.striping.filter(|one| !one.is_valid(header.object_size())) {
            let what = format!("image {}: a stripe unit of {unit} bytes and a stripe count of {count}", self.name());
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let unsupported = header.features.unsupported(read_only, self.backend().shared().is_some());
        if unsupported == ImageFeatures::default() {
            let unknown = header.op_features & !ImageFeatures::OPERATIONS;
            if unknown == 0 || read_only {
                return Ok(());
            }
            let what = format!("image {}: writing an image with the operations {unknown:#x}", self.name());
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let how = if read_only { "reading" } else { "writing" };
        let what = format!("image {}: {how} an image with the features {unsupported}", self.name());
        Err(Error::new(ErrorKind::Unsupported, what))
    }

    /// Refuses requests after the image was removed.
    pub(crate) fn check_there(&self) -> Result<()> {
        if self.lifecycle.is_removed() {
            return Err(Error::new(ErrorKind::NotFound, format!("image {} has been removed", self.name())));
        }
        Ok(())
    }

    /// Refuses a range beyond the end of the view.
    pub(crate) fn check_range(&self, view: ImageView, extent: Extent) -> Result<()> {
        self.check_there()?;
        match extent.checked_end() {
            Some(end) if end <= view.size => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                format!("image {}: {} bytes at {} of {}", self.name(), extent.len, extent.offset, view.size),
            )),
        }
    }
}
