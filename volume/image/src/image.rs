//! Handle of an open image, a block device.

use std::cell::Cell;
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Advice, BlockDevice, BlockReply, BlockRequest, ClientIdentity, Error, ErrorKind, Extent, ExtentMap, Geometry,
    LocalFuture, ObjectBackend, Result, SizeWatch, WriteExtent,
};
use forebay_reactor::spawn;

use crate::exclusive_lock::KeptLock;
use crate::images::Images;
use crate::info::{ObjectProgress, Striping};
use crate::lock::Keeping;
use crate::open_image::{HeaderHook, ImageView, LockCheck, OpenImage};
use crate::owner::OwnerOperations;
use crate::{read, requests};

/// Longest read or write in bytes; front ends split longer ones.
pub(crate) const TRANSFER_MAX: u32 = 32 << 20;

/// Options of opening an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageOpenOptions {
    /// Read-only mode: changes through this handle are refused with [`ErrorKind::ReadOnly`].
    pub read_only: bool,
}

/// Space usage of an image, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceUsage {
    /// Provisioned size.
    pub provisioned: u64,
    /// Bytes stored.
    pub used: u64,
}

/// Handle of an open image; several may exist.
pub struct Image {
    shared: Rc<OpenImage>,
    read_only: Cell<bool>,
    /// Snapshot that this handle shows; `None` for the head.
    snapshot: Option<ImageView>,
}

impl Image {
    /// Opens an image; see [`Images::open`].
    pub async fn open(backend: Rc<dyn ObjectBackend>, name: &str, options: ImageOpenOptions) -> Result<Rc<Self>> {
        Images::of(&backend).open(name, options).await
    }

    pub(crate) fn new(shared: Rc<OpenImage>, options: ImageOpenOptions, snapshot: Option<ImageView>) -> Rc<Self> {
        shared.lifecycle().add_handle();
        let read_only = Cell::new(options.read_only || snapshot.is_some());
        Rc::new(Self { shared, read_only, snapshot })
    }

    pub(crate) fn view(&self) -> ImageView {
        self.snapshot.unwrap_or_else(|| self.shared.head())
    }

    /// Closes this handle. If it was the last one, waits until the lock and the watch are released, so that other
    /// clients can acquire the lock or remove the image. Dropping the handle does the same in the background.
    pub async fn close(self: Rc<Self>) {
        let shared = self.shared.clone();
        drop(self);
        if shared.lifecycle().is_closing() {
            shared.lifecycle().closed().await;
        }
    }

    pub(crate) fn shared(&self) -> &Rc<OpenImage> {
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
    /// the problem to the opener of the image. Applies to the pools of metadata and data, and to those of present and
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
        self.shared.exclusive_lock().map_or_else(KeptLock::none, |lock| lock.keep(Keeping::Lasting))
    }

    /// Keeps the lock for a moment: clients that request it meanwhile ask again.
    pub(crate) fn keep_lock_briefly(&self) -> KeptLock {
        self.shared.exclusive_lock().map_or_else(KeptLock::none, |lock| lock.keep(Keeping::Brief))
    }

    /// Sets a callback that runs whenever the image's lock was acquired, before any write is admitted: this client's
    /// knowledge of the image may predate another owner. If it fails, the lock is released, and the operation that
    /// needed the lock fails.
    pub fn set_lock_check(&self, check: LockCheck) {
        self.shared.set_lock_check(check);
    }

    /// Sets what carries out the operations that other clients ask of this one, as the owner of the image's lock; without
    /// it, this handle's functions do.
    pub fn set_operations(&self, operations: Rc<dyn OwnerOperations>) {
        self.shared.owner().set_operations(operations);
    }

    /// Sets a callback that runs after another client has notified this one of a changed header, which includes the
    /// image's metadata, and after notifications may have been missed.
    pub fn set_header_hook(&self, hook: HeaderHook) {
        self.shared.set_header_hook(hook);
    }

    /// Acquires the lock like [`take_lock`](Self::take_lock), in the background, as long as the image is open.
    pub fn take_lock_soon(&self) {
        let shared = self.shared.clone();
        drop(spawn(async move {
            match shared.lock().await {
                Err(error) if error.kind() != ErrorKind::ShuttingDown => {
                    tracing::warn!(image = shared.name(), %error, "no exclusive lock yet; the next write tries again");
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

    /// Returns the client of the cluster through which the image is written; `None` in a pool that has no other clients.
    pub fn client(&self) -> Option<ClientIdentity> {
        self.shared.backend().shared().map(|objects| objects.identity())
    }

    /// Fences another client of the cluster for `expire`, and breaks the image's lock if that client holds it. Nothing
    /// that it has sent changes the image after this has ended.
    ///
    /// # Errors
    /// `Unsupported` in a pool that has no other clients; errors of the cluster: `Denied` if this client may not fence
    /// others.
    pub async fn fence(&self, client: &ClientIdentity, expire: Duration) -> Result<()> {
        if let Some(lock) = self.shared.exclusive_lock() {
            return lock.fence(client, expire).await;
        }
        match self.shared.backend().shared() {
            Some(objects) => objects.blocklist(&client.address, Some(expire)).await,
            None => Err(Error::new(ErrorKind::Unsupported, "no other clients write to this pool")),
        }
    }

    /// Returns the current name.
    pub fn name(&self) -> String {
        self.shared.name()
    }

    /// Returns the id within the pool, which never changes.
    pub fn id(&self) -> &str {
        self.shared.id()
    }

    /// Returns the current size in bytes.
    pub fn size(&self) -> u64 {
        self.view().size
    }

    /// Returns the object size in bytes.
    pub fn object_size(&self) -> u64 {
        self.shared.layout().object_size()
    }

    /// Returns the striping, if the image has that feature.
    pub fn striping(&self) -> Option<Striping> {
        self.shared.header().striping
    }

    /// Returns the number of objects of a state of the image with this size, in bytes.
    pub fn objects(&self, size: u64) -> u64 {
        self.shared.layout().objects(size)
    }

    /// Returns whether the handle is read-only.
    pub fn is_read_only(&self) -> bool {
        self.read_only.get()
    }

    /// Returns the space usage.
    pub async fn usage(&self) -> Result<SpaceUsage> {
        self.usage_with_progress(|_| {}).await
    }

    /// Returns the space usage; `progress` reports the number of objects examined.
    pub async fn usage_with_progress(&self, progress: impl FnMut(ObjectProgress)) -> Result<SpaceUsage> {
        read::usage(&self.shared, self.view(), progress).await
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if self.shared.lifecycle().remove_handle() && self.shared.is_shared() {
            self.shared.lifecycle().begin_close();
            drop(spawn(self.shared.clone().close()));
        }
    }
}

impl BlockDevice for Image {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            block_size: 1,
            preferred_io: self.shared.preferred_io(),
            transfer_max: TRANSFER_MAX,
            read_only: self.read_only.get(),
        }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.submit_advised(request, Advice::NONE)
    }

    fn submit_advised(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        if request.is_write()
            && let Err(error) = self.refuse_write()
        {
            return Box::pin(ready(Err(error)));
        }
        if let (BlockRequest::Read(_), None, Some(reserved)) = (&request, self.snapshot, self.shared.reserved())
            && reserved.is_unsure()
        {
            let shared = self.shared.clone();
            return Box::pin(async move {
                reserved.wait_until_sure().await?;
                requests::submit(&shared, shared.head(), request, advice).await
            });
        }
        requests::submit(&self.shared, self.view(), request, advice)
    }

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        match self.refuse_write() {
            Err(error) => Box::pin(ready(Err(error))),
            Ok(()) => requests::write_many(&self.shared, writes, fua),
        }
    }

    fn unit(&self) -> Option<u64> {
        Some(self.shared.layout().set_size())
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        read::map(&self.shared, self.view(), extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.snapshot.is_none().then(|| self.shared.size_watch().clone())
    }
}
