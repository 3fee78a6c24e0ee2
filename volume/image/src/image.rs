//! Open image.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    Advice, BlockDevice, Error, ErrorKind, ExclusiveRange, Extent, ExtentMap, Geometry, LocalFuture, ObjectBackend,
    ObjectName, ObjectOp, Patch, Reply, Request, Result, SharedRange, SizeWatch, SnapContext, SnapId,
};
use forebay_reactor::spawn;
use forebay_reactor::sync::{Notify, Semaphore};

use crate::admission::Admission;
use crate::clone::{ParentImage, open_parent};
use crate::format::{Features, Header, header_object};
use crate::images::Images;
use crate::info::Progress;
use crate::layout::Layout;
use crate::objectmap::ObjectMap;
use crate::requests;
use crate::reserved::Reserved;
use crate::session::{KeptLock, Session};

/// Longest read or write in bytes; front ends split longer ones.
pub(crate) const TRANSFER_MAX: u32 = 32 << 20;

/// Options of opening an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Read-only mode: changes through this handle are refused with [`ErrorKind::ReadOnly`].
    pub read_only: bool,
}

/// Space usage of an image, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageUsage {
    /// Provisioned size.
    pub provisioned: u64,
    /// Bytes stored.
    pub used: u64,
}

/// View of an image that a request operates on: the head, or a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) snap: SnapId,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: u64,
}

/// Callback that verifies this client's knowledge of an image whose lock it has just acquired.
pub type LockCheck = Rc<dyn Fn() -> LocalFuture<Result<()>>>;

/// State shared by all handles of one open image.
pub(crate) struct Shared {
    /// Registry of open images that lists this one, kept alive.
    images: Rc<Images>,
    /// Pool of the metadata.
    backend: Rc<dyn ObjectBackend>,
    /// Pool of the data.
    data: Rc<dyn ObjectBackend>,
    id: String,
    name: RefCell<String>,
    layout: Layout,
    /// Header as last read.
    header: RefCell<Rc<Header>>,
    size: Cell<u64>,
    snapc: RefCell<Option<Rc<SnapContext>>>,
    parent: RefCell<Option<Rc<ParentImage>>>,
    /// Overlap of the head with the parent in bytes.
    overlap: Cell<u64>,
    /// Watch and exclusive lock, if the pool is shared.
    session: RefCell<Option<Rc<Session>>>,
    /// Shared reservations, if other daemons can serve the image too.
    reserved: RefCell<Option<Rc<Reserved>>>,
    /// Called whenever the lock was acquired; see [`Image::set_lock_check`].
    lock_check: RefCell<Option<LockCheck>>,
    admission: Admission,
    refreshing: Semaphore,
    /// Set while the stored header may be newer than the one in memory, since it could not be read.
    stale: Cell<bool>,
    preferred_io: u32,
    resizing: Semaphore,
    watch: Rc<SizeWatch>,
    handles: Cell<usize>,
    /// Set once hosts use the image; see [`Image::mark_in_use`].
    in_use: Cell<bool>,
    /// Set while the image is being removed, and after.
    ended: Cell<bool>,
    /// Set once the last handle is dropped and the lock and watch are being released.
    closing: Cell<bool>,
    closed: Notify,
}

impl Shared {
    /// Opens an image by its header. A parent, if any, is opened recursively; `depth` counts the clones so far.
    /// `in_use` marks the pools as in use by hosts.
    pub(crate) async fn open(
        images: &Rc<Images>,
        name: &str,
        id: &str,
        header: Header,
        depth: u32,
        in_use: bool,
    ) -> Result<Rc<Self>> {
        let backend = images.backend().clone();
        let data = match (header.data_pool, backend.shared()) {
            (Some(pool), Some(shared)) => shared.pool(pool).await?,
            _ => backend.clone(),
        };
        if in_use {
            mark_in_use(&data);
        }
        let parent = match &header.parent {
            Some((_, spec)) => Some(Box::pin(open_parent(images, spec, depth, in_use)).await?),
            None => None,
        };
        Ok(Rc::new(Self {
            images: images.clone(),
            preferred_io: data.info().preferred_io,
            backend,
            data,
            id: id.to_owned(),
            name: RefCell::new(name.to_owned()),
            layout: Layout::new(header.order, &header.object_prefix, images.namespace()),
            size: Cell::new(header.size),
            snapc: RefCell::new(context_of(&header)),
            overlap: Cell::new(overlap_of(&header)),
            header: RefCell::new(Rc::new(header)),
            parent: RefCell::new(parent),
            session: RefCell::default(),
            reserved: RefCell::default(),
            lock_check: RefCell::default(),
            admission: Admission::new(),
            refreshing: Semaphore::new(1),
            stale: Cell::new(false),
            resizing: Semaphore::new(1),
            watch: Rc::default(),
            handles: Cell::new(0),
            in_use: Cell::new(in_use),
            ended: Cell::new(false),
            closing: Cell::new(false),
            closed: Notify::new(),
        }))
    }

    /// Returns whether the session has failed permanently: the cluster has fenced this client, the image was removed,
    /// or a lock to be kept was lost.
    pub(crate) fn is_fenced(&self) -> bool {
        self.session.borrow().as_ref().is_some_and(|session| session.check().is_err())
    }

    /// Returns the allocation hint for an object that may be new, the same as librbd's; `None` in an unshared pool.
    pub(crate) fn expectation(&self) -> Option<ObjectOp> {
        let size = self.layout.object_size();
        self.session.borrow().as_ref().map(|_| ObjectOp::Expect { object_size: size, write_size: size })
    }

    /// Establishes the watch, if the pool is shared, and re-reads the header for changes since it was read.
    pub(crate) async fn begin_session(self: &Rc<Self>) -> Result<()> {
        if let Some(objects) = self.backend.shared() {
            let session = Session::begin(Rc::downgrade(self), objects, self.header_object()).await?;
            *self.session.borrow_mut() = Some(session);
            self.refresh().await?;
        }
        Ok(())
    }

    /// Re-reads the header and applies it.
    pub(crate) async fn refresh(self: &Rc<Self>) -> Result<()> {
        // Serialized, so that an older header is not applied last.
        let _alone = self.refreshing.acquire(1).await;
        self.stale.set(true);
        let header = self.images.header(&self.id).await?;
        let spec = header.parent.as_ref().map(|(_, spec)| (spec.pool, &spec.namespace, &spec.image, spec.snap));
        let known = self.parent();
        let known = known.as_ref().map(|parent| &parent.spec);
        if spec != known.map(|spec| (spec.pool, &spec.namespace, &spec.image, spec.snap)) {
            let parent = match &header.parent {
                Some((_, spec)) => Some(open_parent(&self.images, spec, 0, self.in_use.get()).await?),
                None => None,
            };
            *self.parent.borrow_mut() = parent;
            if self.in_use.get() {
                // The image may have been marked as in use while the parent was opened.
                self.mark_in_use();
            }
        }
        self.apply(header);
        self.stale.set(false);
        Ok(())
    }

    /// Marks the pools of the image and of its parents as in use; see [`Image::mark_in_use`].
    fn mark_in_use(&self) {
        self.in_use.set(true);
        mark_in_use(&self.backend);
        mark_in_use(&self.data);
        if let Some(parent) = self.parent() {
            parent.shared.mark_in_use();
        }
    }

    /// Re-reads the header if the last attempt failed.
    pub(crate) async fn refresh_stale(self: &Rc<Self>) -> Result<()> {
        if self.stale.get() { self.refresh().await } else { Ok(()) }
    }

    /// Re-reads the stored header after a change by this client, if the pool is shared or the image has a parent.
    pub(crate) async fn refresh_stored(self: &Rc<Self>) -> Result<()> {
        if self.session().is_some() || self.parent().is_some() { self.refresh().await } else { Ok(()) }
    }

    fn apply(&self, header: Header) {
        *self.snapc.borrow_mut() = context_of(&header);
        // During a resize by this client, the in-memory size is ahead of the stored one.
        if let Some(_alone) = self.resizing.try_acquire(1) {
            self.overlap.set(overlap_of(&header));
            self.set_size(header.size);
        }
        if let Some(map) = self.map() {
            map.set_flags(header.flags);
        }
        *self.header.borrow_mut() = Rc::new(header);
    }

    pub(crate) fn backend(&self) -> &Rc<dyn ObjectBackend> {
        &self.backend
    }

    /// Makes completed changes durable: those of the data, and those of the metadata if they are in another pool.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.data.flush().await?;
        if std::ptr::addr_eq(Rc::as_ptr(&self.data), Rc::as_ptr(&self.backend)) {
            return Ok(());
        }
        self.backend.flush().await
    }

    /// Returns the pool of the data.
    pub(crate) fn data(&self) -> &Rc<dyn ObjectBackend> {
        &self.data
    }

    pub(crate) fn header(&self) -> Rc<Header> {
        self.header.borrow().clone()
    }

    pub(crate) fn namespace(&self) -> &Rc<str> {
        self.images.namespace()
    }

    pub(crate) fn header_object(&self) -> ObjectName {
        header_object(self.namespace(), &self.id)
    }

    pub(crate) fn parent(&self) -> Option<Rc<ParentImage>> {
        self.parent.borrow().clone()
    }

    pub(crate) fn session(&self) -> Option<Rc<Session>> {
        self.session.borrow().clone()
    }

    /// Returns the object map, if the image has one and this client holds the lock.
    pub(crate) fn map(&self) -> Option<Rc<ObjectMap>> {
        self.session.borrow().as_ref()?.map()
    }

    /// Returns the current view of the head.
    pub(crate) fn head(&self) -> View {
        View { snap: SnapId::HEAD, size: self.size(), overlap: self.overlap.get() }
    }

    /// Returns the view of a snapshot; `None` if there is none of that id.
    pub(crate) fn view_of(&self, snap: SnapId) -> Option<View> {
        let header = self.header();
        let snapshot = header.snapshots.iter().find(|snapshot| snapshot.id == snap)?;
        let overlap = snapshot.overlap.unwrap_or(0).min(snapshot.size);
        Some(View { snap, size: snapshot.size, overlap })
    }

    /// Returns the overlap of an object with the parent, in bytes.
    pub(crate) fn overlap_in(&self, view: View, object: u64) -> u64 {
        let start = object.saturating_mul(self.layout.object_size());
        view.overlap.saturating_sub(start).min(self.layout.object_size())
    }

    pub(crate) fn set_overlap(&self, overlap: u64) {
        self.overlap.set(overlap);
    }

    /// Returns whether writing requires the exclusive lock.
    fn needs_lock(&self) -> bool {
        self.header.borrow().features.has(Features::EXCLUSIVE_LOCK)
    }

    /// Returns whether the exclusive lock, if required, is held.
    pub(crate) fn may_write(&self) -> bool {
        match &*self.session.borrow() {
            None => true,
            Some(session) => session.is_locked() || !self.needs_lock(),
        }
    }

    /// Acquires the exclusive lock, if it is required.
    pub(crate) async fn lock(self: &Rc<Self>) -> Result<()> {
        match self.session() {
            Some(session) if self.needs_lock() => session.acquire(self).await,
            _ => Ok(()),
        }
    }

    pub(crate) fn reserved(&self) -> Option<Rc<Reserved>> {
        self.reserved.borrow().clone()
    }

    pub(crate) fn set_reserved(&self, reserved: Rc<Reserved>) {
        *self.reserved.borrow_mut() = Some(reserved);
    }

    /// Handles the acquisition of the lock, before any write is admitted. Changes that waited for the lock may have
    /// been allowed by superseded reservations.
    pub(crate) async fn claimed(&self) -> Result<()> {
        if let Some(reserved) = self.reserved()
            && reserved.claimed().await?
        {
            self.admission.supersede();
        }
        let check = self.lock_check.borrow().clone();
        match check {
            Some(check) => check().await,
            None => Ok(()),
        }
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Waits until a change of a range is admitted, with the exclusive lock if required. The lock is not released
    /// before the change has ended.
    pub(crate) async fn enter(self: &Rc<Self>, extent: Extent) -> Result<SharedRange> {
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
    pub(crate) async fn enter_alone(self: &Rc<Self>, extent: Extent) -> Result<ExclusiveRange> {
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

    /// Releases the lock and the watch, after the last handle was dropped.
    async fn close(self: Rc<Self>) {
        if let Some(session) = self.session() {
            session.end(&self).await;
        }
        self.session.take();
        self.closed.notify_all();
    }

    /// Returns whether the image is closing; to reopen it, wait until it is closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Waits until the image is closed.
    pub(crate) async fn closed(&self) {
        self.closed.wait_until(|| self.session.borrow().is_none()).await;
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn name(&self) -> String {
        self.name.borrow().clone()
    }

    pub(crate) fn set_name(&self, name: &str) {
        *self.name.borrow_mut() = name.to_owned();
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn object_name(&self, object: u64) -> ObjectName {
        self.layout.name(object)
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.get()
    }

    pub(crate) fn set_size(&self, size: u64) {
        if self.size.replace(size) != size {
            self.watch.announce();
        }
    }

    pub(crate) fn snapc(&self) -> Option<Rc<SnapContext>> {
        self.snapc.borrow().clone()
    }

    pub(crate) fn resizing(&self) -> &Semaphore {
        &self.resizing
    }

    pub(crate) fn handles(&self) -> usize {
        self.handles.get()
    }

    /// Refuses an image with unsupported features.
    pub(crate) fn check_features(&self, read_only: bool) -> Result<()> {
        let header = self.header();
        let unsupported = header.features.unsupported(read_only, self.backend.shared().is_some());
        if unsupported == Features::default() {
            let unknown = header.op_features & !Features::OPERATIONS;
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

    /// Enables or disables the refusal of every request, for a removal.
    pub(crate) fn set_ended(&self, ended: bool) {
        self.ended.set(ended);
    }

    /// Refuses requests after the image was removed.
    pub(crate) fn check_there(&self) -> Result<()> {
        if self.ended.get() {
            return Err(Error::new(ErrorKind::NotFound, format!("image {} has been removed", self.name())));
        }
        Ok(())
    }

    /// Refuses a range beyond the end of the view.
    pub(crate) fn check_range(&self, view: View, extent: Extent) -> Result<()> {
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

/// Marks a shared pool as in use: requests that would fail for a revocable setting wait instead.
pub(crate) fn mark_in_use(pool: &Rc<dyn ObjectBackend>) {
    if let Some(shared) = pool.shared() {
        shared.mark_in_use();
    }
}

/// Returns the snapshot context of writes; `None` for an image that never had a snapshot.
fn context_of(header: &Header) -> Option<Rc<SnapContext>> {
    (header.snap_seq > 0).then(|| Rc::new(header.snap_context()))
}

/// Returns the overlap of the head with the parent, in bytes.
fn overlap_of(header: &Header) -> u64 {
    let overlap = header.parent.as_ref().and_then(|(_, parent)| parent.overlap);
    overlap.unwrap_or(0).min(header.size)
}

/// Handle of an open image; several may exist.
pub struct Image {
    shared: Rc<Shared>,
    read_only: Cell<bool>,
    /// Snapshot that this handle shows; `None` for the head.
    snapshot: Option<View>,
}

impl Image {
    /// Opens an image; see [`Images::open`].
    pub async fn open(backend: Rc<dyn ObjectBackend>, name: &str, options: OpenOptions) -> Result<Rc<Self>> {
        Images::of(&backend).open(name, options).await
    }

    pub(crate) fn new(shared: Rc<Shared>, options: OpenOptions, snapshot: Option<View>) -> Rc<Self> {
        shared.handles.set(shared.handles.get() + 1);
        let read_only = Cell::new(options.read_only || snapshot.is_some());
        Rc::new(Self { shared, read_only, snapshot })
    }

    fn view(&self) -> View {
        self.snapshot.unwrap_or_else(|| self.shared.head())
    }

    /// Closes this handle. If it was the last one, waits until the lock and the watch are released, so that other
    /// clients can acquire the lock or remove the image. Dropping the handle does the same in the background.
    pub async fn close(self: Rc<Self>) {
        let shared = self.shared.clone();
        drop(self);
        if shared.is_closing() {
            shared.closed().await;
        }
    }

    pub(crate) fn shared(&self) -> &Rc<Shared> {
        &self.shared
    }

    /// Refuses a write through a read-only handle.
    fn refuse_write(&self) -> Result<()> {
        if self.read_only.get() {
            let what = format!("image {} is open for reading only", self.name());
            return Err(Error::new(ErrorKind::ReadOnly, what));
        }
        Ok(())
    }

    /// Enables writes through a handle opened read-only, if the image's features allow it now. On a shared pool,
    /// these are the features as of the last header update.
    ///
    /// # Errors
    /// `Unsupported` as on opening for writing; `ReadOnly` for a snapshot. The handle is unchanged then.
    pub fn allow_writes(&self) -> Result<()> {
        if self.snapshot.is_some() {
            return self.refuse_write();
        }
        let checked = self.shared.check_features(false);
        checked.map_err(|error| error.within(format_args!("image {}", self.name())))?;
        self.read_only.set(false);
        Ok(())
    }

    /// Marks the image as used by hosts. Requests to servers that refuse this client because of a revocable setting
    /// wait from then on, so that hosts get no errors. Before, such a request fails with `Unsupported`, which reports
    /// the problem to whoever opens the image. Applies to the pools of metadata and data, and to those of present and
    /// future parents.
    pub fn mark_in_use(&self) {
        self.shared.mark_in_use();
    }

    /// Returns whether the cluster has fenced this client; requests to the image then fail permanently. Also true
    /// once the image was found to be removed, or a lock to be kept was lost.
    pub fn is_fenced(&self) -> bool {
        self.shared.is_fenced()
    }

    /// Keeps the image's exclusive lock, once acquired, from being released on request until the returned guard is
    /// dropped. For a write-back layer that acknowledges writes before they reach the image.
    pub fn keep_lock(&self) -> KeptLock {
        self.shared.session().map_or_else(KeptLock::none, |session| session.keep())
    }

    /// Sets a callback that runs whenever the image's lock was acquired, before any write is admitted: this client's
    /// knowledge of the image may predate another owner. If it fails, the lock is released, and the operation that
    /// needed the lock fails.
    pub fn set_lock_check(&self, check: LockCheck) {
        *self.shared.lock_check.borrow_mut() = Some(check);
    }

    /// Acquires the lock like [`take_lock`](Self::take_lock), in the background, as long as the image is open.
    pub fn take_lock_soon(&self) {
        let shared = self.shared.clone();
        drop(spawn(async move {
            match shared.lock().await {
                Err(error) if error.kind() != ErrorKind::ShuttingDown => {
                    tracing::warn!(image = shared.name(), %error, "the lock of an image is not to be had");
                }
                _ => {}
            }
        }));
    }

    /// Acquires the image's exclusive lock, if it has one, ahead of the first write. If the owner is dead, waits
    /// until its watch has expired, and fences it.
    ///
    /// # Errors
    /// `Busy` if another client holds the lock and keeps it; errors of acquiring it.
    pub async fn take_lock(&self) -> Result<()> {
        self.shared.lock().await
    }

    /// Returns the current name.
    pub fn name(&self) -> String {
        self.shared.name()
    }

    /// Returns the id within the pool, which never changes.
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Returns the current size in bytes.
    pub fn size(&self) -> u64 {
        self.view().size
    }

    /// Returns the object size in bytes.
    pub fn object_size(&self) -> u64 {
        self.shared.layout.object_size()
    }

    /// Returns whether the handle is read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only.get()
    }

    /// Returns the space usage.
    pub async fn usage(&self) -> Result<ImageUsage> {
        self.usage_with_progress(|_| {}).await
    }

    /// Returns the space usage; `progress` reports the number of objects examined.
    pub async fn usage_with_progress(&self, progress: impl FnMut(Progress)) -> Result<ImageUsage> {
        requests::usage(&self.shared, self.view(), progress).await
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let handles = self.shared.handles.get() - 1;
        self.shared.handles.set(handles);
        if handles == 0 && self.shared.session().is_some() {
            self.shared.closing.set(true);
            drop(spawn(self.shared.clone().close()));
        }
    }
}

impl BlockDevice for Image {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            block_size: 1,
            preferred_io: self.shared.preferred_io,
            transfer_max: TRANSFER_MAX,
            read_only: self.read_only.get(),
        }
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        self.submit_advised(request, Advice::NONE)
    }

    fn submit_advised(&self, request: Request, advice: Advice) -> LocalFuture<Result<Reply>> {
        if request.is_write()
            && let Err(error) = self.refuse_write()
        {
            return Box::pin(ready(Err(error)));
        }
        if let (Request::Read(_), None, Some(reserved)) = (&request, self.snapshot, &*self.shared.reserved.borrow())
            && reserved.is_unsure()
        {
            let (shared, reserved) = (self.shared.clone(), reserved.clone());
            return Box::pin(async move {
                reserved.wait_until_sure().await?;
                requests::submit(&shared, shared.head(), request, advice).await
            });
        }
        requests::submit(&self.shared, self.view(), request, advice)
    }

    fn write_many(&self, writes: Vec<Patch>, fua: bool) -> LocalFuture<Result<()>> {
        match self.refuse_write() {
            Err(error) => Box::pin(ready(Err(error))),
            Ok(()) => requests::write_many(&self.shared, writes, fua),
        }
    }

    fn unit(&self) -> Option<u64> {
        Some(self.object_size())
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        requests::map(&self.shared, self.view(), extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.snapshot.is_none().then(|| self.shared.watch.clone())
    }
}
