//! An open image.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, ObjectBackend, ObjectName, Reply, Request,
    Result, SizeWatch, SnapContext,
};
use forebay_reactor::sync::Semaphore;

use crate::format::{Features, Header};
use crate::gate::Gate;
use crate::images::{Images, Progress};
use crate::layout::Layout;
use crate::requests;

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

/// What all handles of one open image share.
pub(crate) struct Shared {
    /// Keeps the registry in which this is found.
    _images: Rc<Images>,
    backend: Rc<dyn ObjectBackend>,
    id: String,
    name: RefCell<String>,
    layout: Layout,
    features: Features,
    size: Cell<u64>,
    snapc: RefCell<Option<Rc<SnapContext>>>,
    preferred_io: u32,
    gate: Gate,
    resizing: Semaphore,
    watch: Rc<SizeWatch>,
    handles: Cell<usize>,
    /// It is being removed.
    ended: Cell<bool>,
}

impl Shared {
    pub(crate) fn new(images: &Rc<Images>, name: &str, id: &str, header: &Header) -> Rc<Self> {
        // An image that never had a snapshot has nothing to say about them.
        let snapc = (header.snap_seq > 0).then(|| Rc::new(header.snap_context()));
        Rc::new(Self {
            _images: images.clone(),
            backend: images.backend().clone(),
            id: id.to_owned(),
            name: RefCell::new(name.to_owned()),
            layout: Layout::new(header.order, &header.object_prefix),
            features: header.features,
            size: Cell::new(header.size),
            snapc: RefCell::new(snapc),
            preferred_io: images.backend().info().preferred_io,
            gate: Gate::new(),
            resizing: Semaphore::new(1),
            watch: Rc::default(),
            handles: Cell::new(0),
            ended: Cell::new(false),
        })
    }

    pub(crate) fn backend(&self) -> &Rc<dyn ObjectBackend> {
        &self.backend
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
        let unsupported = self.features.unsupported(read_only);
        if unsupported == Features::default() {
            return Ok(());
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
    pub(crate) fn check_range(&self, extent: Extent) -> Result<()> {
        self.check_there()?;
        match extent.checked_end() {
            Some(end) if end <= self.size() => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                format!("image {}: {} bytes at {} of {}", self.name(), extent.len, extent.offset, self.size()),
            )),
        }
    }
}

/// An open image: a handle, of which there may be several.
pub struct Image {
    shared: Rc<Shared>,
    read_only: bool,
}

impl Image {
    /// Opens an image; see [`Images::open`].
    pub async fn open(backend: Rc<dyn ObjectBackend>, name: &str, options: OpenOptions) -> Result<Rc<Self>> {
        Images::of(&backend).open(name, options).await
    }

    pub(crate) fn new(shared: Rc<Shared>, options: OpenOptions) -> Rc<Self> {
        shared.handles.set(shared.handles.get() + 1);
        Rc::new(Self { shared, read_only: options.read_only })
    }

    pub(crate) fn shared(&self) -> &Rc<Shared> {
        &self.shared
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
        self.shared.size()
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
        requests::usage(&self.shared, progress).await
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.shared.handles.set(self.shared.handles.get() - 1);
    }
}

impl BlockDevice for Image {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.shared.size(),
            block_size: 1,
            preferred_io: self.shared.preferred_io,
            transfer_max: TRANSFER_MAX,
            read_only: self.read_only,
        }
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        if self.read_only && request.is_write() {
            let error = Error::new(ErrorKind::ReadOnly, format!("image {} is open for reading only", self.name()));
            return Box::pin(ready(Err(error)));
        }
        requests::submit(&self.shared, request)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        requests::map(&self.shared, extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        Some(self.shared.watch.clone())
    }
}
