//! An open image.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    Advice, BlockDevice, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, ObjectBackend, ObjectName,
    ObjectOp, Patch, Reply, Request, Result, SizeWatch, SnapContext, SnapId,
};
use forebay_reactor::spawn;
use forebay_reactor::sync::{Notify, Semaphore};

use crate::clone::{ParentImage, open_parent};
use crate::format::{Features, Header, header_object};
use crate::gate::{Gate, Hold, Pass};
use crate::images::Images;
use crate::info::Progress;
use crate::layout::Layout;
use crate::objectmap::ObjectMap;
use crate::requests;
use crate::reserved::{Reserved, outdated};
use crate::session::{KeptLock, Session};

/// Longest read or write in bytes; longer ones are for the fronts to cut.
pub(crate) const TRANSFER_MAX: u32 = 32 << 20;

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Changes through this handle are refused with [`ErrorKind::ReadOnly`].
    pub read_only: bool,
}

/// What an image takes up, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageUsage {
    /// Its size.
    pub provisioned: u64,
    /// What is stored of it.
    pub used: u64,
}

/// What of an image a request sees: its head, or a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) snap: SnapId,
    /// Bytes.
    pub(crate) size: u64,
    /// Bytes that may be in the parent.
    pub(crate) overlap: u64,
}

/// Verifies what a client knows of an image whose lock it has just taken.
pub type LockCheck = Rc<dyn Fn() -> LocalFuture<Result<()>>>;

/// What all handles of one open image share.
pub(crate) struct Shared {
    /// Keeps the registry in which this is found.
    images: Rc<Images>,
    /// Where the metadata is.
    backend: Rc<dyn ObjectBackend>,
    /// Where the data is.
    data: Rc<dyn ObjectBackend>,
    id: String,
    name: RefCell<String>,
    layout: Layout,
    /// As it was read last.
    header: RefCell<Rc<Header>>,
    size: Cell<u64>,
    snapc: RefCell<Option<Rc<SnapContext>>>,
    parent: RefCell<Option<Rc<ParentImage>>>,
    /// Bytes of the head that may be in the parent.
    overlap: Cell<u64>,
    /// Its dealings with other clients of the pool, where there are any.
    session: RefCell<Option<Rc<Session>>>,
    /// Its reservations, where it shares them with others.
    reserved: RefCell<Option<Rc<Reserved>>>,
    /// Asked whenever the lock was taken; see [`Image::set_lock_check`].
    lock_check: RefCell<Option<LockCheck>>,
    /// Counts up when what waits to be let in must be refused.
    admission: Cell<u64>,
    refreshing: Semaphore,
    preferred_io: u32,
    gate: Gate,
    resizing: Semaphore,
    watch: Rc<SizeWatch>,
    handles: Cell<usize>,
    /// It is being removed.
    ended: Cell<bool>,
    /// Its last handle has gone, and what belongs to it is being given up.
    closing: Cell<bool>,
    closed: Notify,
}

impl Shared {
    /// An image of that header; its parent, if it has one, is opened, and that one's, up to `depth`.
    pub(crate) async fn open(
        images: &Rc<Images>,
        name: &str,
        id: &str,
        header: Header,
        depth: u32,
    ) -> Result<Rc<Self>> {
        let backend = images.backend().clone();
        let data = match (header.data_pool, backend.shared()) {
            (Some(pool), Some(shared)) => shared.pool(pool).await?,
            _ => backend.clone(),
        };
        let parent = match &header.parent {
            Some((_, spec)) => Some(Box::pin(open_parent(images, spec, depth)).await?),
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
            admission: Cell::new(0),
            refreshing: Semaphore::new(1),
            gate: Gate::new(),
            resizing: Semaphore::new(1),
            watch: Rc::default(),
            handles: Cell::new(0),
            ended: Cell::new(false),
            closing: Cell::new(false),
            closed: Notify::new(),
        }))
    }

    /// The cluster has fenced this client.
    pub(crate) fn is_fenced(&self) -> bool {
        self.session.borrow().as_ref().is_some_and(|session| session.check().is_err())
    }

    /// What a shared pool is told of an object that may be new, as librbd tells it.
    pub(crate) fn expectation(&self) -> Option<ObjectOp> {
        let size = self.layout.object_size();
        self.session.borrow().as_ref().map(|_| ObjectOp::Expect { object_size: size, write_size: size })
    }

    /// Begins to deal with the pool's other clients, if it can have any, and catches up with what they did since the
    /// header was read.
    pub(crate) async fn begin_session(self: &Rc<Self>) -> Result<()> {
        if let Some(objects) = self.backend.shared() {
            let session = Session::begin(Rc::downgrade(self), objects, self.header_object()).await?;
            *self.session.borrow_mut() = Some(session);
            self.refresh().await?;
        }
        Ok(())
    }

    /// Reads the header anew, and shows what it says.
    pub(crate) async fn refresh(self: &Rc<Self>) -> Result<()> {
        // One after another, so that an older one does not come last.
        let _alone = self.refreshing.acquire(1).await;
        let header = self.images.header(&self.id).await?;
        let spec = header.parent.as_ref().map(|(_, spec)| (spec.pool, &spec.namespace, &spec.image, spec.snap));
        let known = self.parent();
        let known = known.as_ref().map(|parent| &parent.spec);
        if spec != known.map(|spec| (spec.pool, &spec.namespace, &spec.image, spec.snap)) {
            let parent = match &header.parent {
                Some((_, spec)) => Some(open_parent(&self.images, spec, 0).await?),
                None => None,
            };
            *self.parent.borrow_mut() = parent;
        }
        self.apply(header);
        Ok(())
    }

    /// After a change of our own: the header as it is stored now, when there is more in it than the size.
    pub(crate) async fn refresh_stored(self: &Rc<Self>) -> Result<()> {
        if self.session().is_some() || self.parent().is_some() { self.refresh().await } else { Ok(()) }
    }

    fn apply(&self, header: Header) {
        *self.snapc.borrow_mut() = context_of(&header);
        // While we change it ourselves, we are ahead of what is stored.
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

    /// Where the data is.
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

    /// The object map, where there is one and it can be kept.
    pub(crate) fn map(&self) -> Option<Rc<ObjectMap>> {
        self.session.borrow().as_ref()?.map()
    }

    /// The head as it is now.
    pub(crate) fn head(&self) -> View {
        View { snap: SnapId::HEAD, size: self.size(), overlap: self.overlap.get() }
    }

    /// A snapshot, if there is one of that number.
    pub(crate) fn view_of(&self, snap: SnapId) -> Option<View> {
        let header = self.header();
        let snapshot = header.snapshots.iter().find(|snapshot| snapshot.id == snap)?;
        let overlap = snapshot.overlap.unwrap_or(0).min(snapshot.size);
        Some(View { snap, size: snapshot.size, overlap })
    }

    /// Bytes of an object that may be in the parent.
    pub(crate) fn overlap_in(&self, view: View, object: u64) -> u64 {
        let start = object.saturating_mul(self.layout.object_size());
        view.overlap.saturating_sub(start).min(self.layout.object_size())
    }

    pub(crate) fn set_overlap(&self, overlap: u64) {
        self.overlap.set(overlap);
    }

    /// Only who has the exclusive lock may write this image.
    fn needs_lock(&self) -> bool {
        self.header.borrow().features.has(Features::EXCLUSIVE_LOCK)
    }

    /// Writes may go, as far as the exclusive lock is concerned.
    pub(crate) fn may_write(&self) -> bool {
        match &*self.session.borrow() {
            None => true,
            Some(session) => session.is_locked() || !self.needs_lock(),
        }
    }

    /// Waits for the exclusive lock, if it is needed.
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

    /// The lock has been taken, and nothing has passed yet: what waits may have been allowed by reservations that are no
    /// more.
    pub(crate) async fn claimed(&self) -> Result<()> {
        if let Some(reserved) = self.reserved()
            && reserved.claimed().await?
        {
            self.admission.set(self.admission.get() + 1);
        }
        let check = self.lock_check.borrow().clone();
        match check {
            Some(check) => check().await,
            None => Ok(()),
        }
    }

    /// What a change is let in by that has come now; see [`Shared::check_admission`].
    pub(crate) fn admission(&self) -> u64 {
        self.admission.get()
    }

    /// Refuses a change that has waited since before others changed who may write.
    pub(crate) fn check_admission(&self, admission: u64) -> Result<()> {
        if admission == self.admission.get() { Ok(()) } else { Err(outdated()) }
    }

    /// Waits until a change of a range may pass, with the exclusive lock if it needs that.  The lock is not given up
    /// before the change has ended.
    pub(crate) async fn enter(self: &Rc<Self>, extent: Extent) -> Result<Pass> {
        loop {
            if !self.may_write() {
                self.lock().await?;
            }
            let pass = self.gate.pass(extent).await;
            // It may have been given up while we waited.
            if self.may_write() {
                return Ok(pass);
            }
        }
    }

    /// Waits until a range is held alone, likewise.
    pub(crate) async fn enter_alone(self: &Rc<Self>, extent: Extent) -> Result<Hold> {
        loop {
            if !self.may_write() {
                self.lock().await?;
            }
            let hold = self.gate.hold(extent).await;
            if self.may_write() {
                return Ok(hold);
            }
        }
    }

    /// Gives up what other clients see of it, when its last handle has gone.
    async fn close(self: Rc<Self>) {
        if let Some(session) = self.session() {
            session.end(&self).await;
        }
        self.session.take();
        self.closed.notify_all();
    }

    /// It is being closed: who wants it waits for that, and opens it anew.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Waits until it has been closed.
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

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(crate) fn resizing(&self) -> &Semaphore {
        &self.resizing
    }

    pub(crate) fn handles(&self) -> usize {
        self.handles.get()
    }

    /// Refuses an image that this crate cannot handle.
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

    /// From now on every request is refused, or no more.
    pub(crate) fn set_ended(&self, ended: bool) {
        self.ended.set(ended);
    }

    /// Refuses what comes after the image has been removed.
    pub(crate) fn check_there(&self) -> Result<()> {
        if self.ended.get() {
            return Err(Error::new(ErrorKind::NotFound, format!("image {} has been removed", self.name())));
        }
        Ok(())
    }

    /// Refuses what reaches past the end.
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

/// What writes must keep; an image that never had a snapshot has nothing to say about them.
fn context_of(header: &Header) -> Option<Rc<SnapContext>> {
    (header.snap_seq > 0).then(|| Rc::new(header.snap_context()))
}

/// Bytes of the head that may be in the parent.
fn overlap_of(header: &Header) -> u64 {
    let overlap = header.parent.as_ref().and_then(|(_, parent)| parent.overlap);
    overlap.unwrap_or(0).min(header.size)
}

/// An open image: a handle, of which there may be several.
pub struct Image {
    shared: Rc<Shared>,
    read_only: bool,
    /// The snapshot that it shows.
    snapshot: Option<View>,
}

impl Image {
    /// Opens an image; see [`Images::open`].
    pub async fn open(backend: Rc<dyn ObjectBackend>, name: &str, options: OpenOptions) -> Result<Rc<Self>> {
        Images::of(&backend).open(name, options).await
    }

    pub(crate) fn new(shared: Rc<Shared>, options: OpenOptions, snapshot: Option<View>) -> Rc<Self> {
        shared.handles.set(shared.handles.get() + 1);
        Rc::new(Self { shared, read_only: options.read_only || snapshot.is_some(), snapshot })
    }

    fn view(&self) -> View {
        self.snapshot.unwrap_or_else(|| self.shared.head())
    }

    /// Waits until the image, of which this was the last handle, has been given up: others can have its lock, and
    /// remove it.  Dropping the handle does the same in the background.
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

    /// Why nothing may be written by this handle.
    fn refuse_write(&self) -> Result<()> {
        if self.read_only {
            let what = format!("image {} is open for reading only", self.name());
            return Err(Error::new(ErrorKind::ReadOnly, what));
        }
        Ok(())
    }

    /// The cluster has fenced the client that has the image open: what is asked of it fails, for good.
    pub fn is_fenced(&self) -> bool {
        self.shared.is_fenced()
    }

    /// Once the image's exclusive lock is taken, it is refused to others until the answer is dropped: for what stands in
    /// front of the image and answers writes that are not in it yet.
    pub fn keep_lock(&self) -> KeptLock {
        self.shared.session().map_or_else(KeptLock::none, |session| session.keep())
    }

    /// Has `check` asked whenever the image's lock was taken, before anything passes: what this client knows of the image
    /// may be of before others had it.  With an error the lock is given back, and what wanted it fails.
    pub fn set_lock_check(&self, check: LockCheck) {
        *self.shared.lock_check.borrow_mut() = Some(check);
    }

    /// Takes the lock as [`take_lock`](Self::take_lock) does, in the background, as long as the image is open.
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

    /// Takes the image's exclusive lock, if it has one, as the first write does otherwise.  That of a dead owner is
    /// waited for.
    ///
    /// # Errors
    /// `Busy` when somebody has the lock and keeps it; what taking it brings.
    pub async fn take_lock(&self) -> Result<()> {
        self.shared.lock().await
    }

    /// Its name now.
    pub fn name(&self) -> String {
        self.shared.name()
    }

    /// Its id within the pool, which never changes.
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Bytes now.
    pub fn size(&self) -> u64 {
        self.view().size
    }

    /// Bytes an object.
    pub fn object_size(&self) -> u64 {
        self.shared.layout.object_size()
    }

    /// Opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What it takes up.
    pub async fn usage(&self) -> Result<ImageUsage> {
        self.usage_with_progress(|_| {}).await
    }

    /// What it takes up; `progress` tells how many of its objects have been looked at.
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
            read_only: self.read_only,
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
