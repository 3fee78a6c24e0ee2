//! Advisory locks on an image, as `rbd lock` manages them: listed, taken by hand, and broken.
//!
//! They are those of the class `lock` on the header, by the name that the exclusive lock has, too: a lock taken by hand
//! keeps every client from acquiring the exclusive lock, and the exclusive lock is listed as `auto N`.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Method, ObjectOp, Result, SharedObjects, SnapId, Transaction};

use crate::exclusive_lock::GET_INFO;
use crate::images::Images;
use crate::lock::kind_name;
use crate::own_blocks::outlast_fenced_reads;
use crate::wire::lock::{self as wire, LockInfo, Locker};

const LOCK: Method = Method::new("lock", "lock");
const BREAK: Method = Method::new("lock", "break_lock");

/// Locks on an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageLocks {
    /// Set if there is at most one, unset if clients with the same tag share it.
    pub exclusive: bool,
    /// Tag of a shared lock; `internal` for the automatic one of the feature exclusive-lock.
    pub tag: String,
    /// The locks, one for each holder.
    pub locks: Vec<ImageLock>,
}

/// Lock on an image, of one holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageLock {
    /// Id, chosen by the holder; `auto N` for an automatic lock.
    pub id: String,
    /// Holder: `client.4123`.
    pub locker: String,
    /// Address of the holder, as in [`forebay_block::ClientIdentity::address`].
    pub address: String,
}

impl From<&Locker> for ImageLock {
    fn from(locker: &Locker) -> Self {
        Self { id: locker.cookie.clone(), locker: entity_name(locker), address: locker.address.clone() }
    }
}

fn entity_name(locker: &Locker) -> String {
    format!("{}.{}", kind_name(locker.entity.0), locker.entity.1)
}

impl Images {
    /// Returns the locks on an image, manual and automatic ones.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the pool is not shared; `Corrupt` if the lock cannot be decoded.
    pub async fn locks(&self, name: &str) -> Result<ImageLocks> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.locks(name)).await;
        }
        let told = async {
            let (shared, id) = self.lockable(name).await?;
            self.lock_info(&shared, &id).await
        };
        let info = told.await.map_err(|error: Error| error.within(format_args!("locks of image {name}")))?;
        let locks = info.lockers.iter().map(ImageLock::from).collect();
        Ok(ImageLocks { exclusive: info.exclusive, tag: info.tag, locks })
    }

    /// Takes a lock on an image by hand, in the name of this client: an exclusive one, or with `shared_tag` one that
    /// others of the same tag share. It does not end with this client.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the pool is not shared; `Busy` if there is another lock, or the same one of this
    /// client; `Invalid` for an empty id.
    pub async fn add_lock(&self, name: &str, lock: &str, shared_tag: Option<&str>) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.add_lock(name, lock, shared_tag)).await;
        }
        let added = async {
            if lock.is_empty() {
                return Err(Error::new(ErrorKind::Invalid, "the id of the lock is empty"));
            }
            let (_, id) = self.lockable(name).await?;
            let input = match shared_tag {
                Some(tag) => wire::encode_lock_shared(lock, tag),
                None => wire::encode_lock(lock, ""),
            };
            let call = ObjectOp::Call { method: LOCK, input };
            let ops = vec![ObjectOp::AssertExists, call];
            match self.backend().submit(&self.header_object(&id), Transaction::new(ops).durable()).await {
                Err(error) if matches!(error.kind(), ErrorKind::Exists | ErrorKind::Busy) => {
                    return Err(Error::new(ErrorKind::Busy, "it is locked already"));
                }
                other => other?,
            };
            self.header_changed(&id).await;
            Ok(())
        };
        added.await.map_err(|error| error.within(format_args!("locking image {name}")))
    }

    /// Breaks a lock on an image: fences its holder, dead or alive, so that nothing that it still sends changes the
    /// image, and removes the lock. A lock that this client has taken by hand is only removed.
    ///
    /// # Errors
    /// `NotFound` if there is no such image or lock; `Busy` for the automatic lock of this client; `Unsupported` where the
    /// pool is not shared, or if the holder cannot be fenced.
    pub async fn break_lock(&self, name: &str, lock: &str, locker: &str) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.break_lock(name, lock, locker)).await;
        }
        let broken = async {
            let (shared, id) = self.lockable(name).await?;
            let info = self.lock_info(&shared, &id).await?;
            let holds = |held: &&Locker| held.cookie == lock && entity_name(held) == locker;
            let Some(held) = info.lockers.iter().find(holds) else {
                return Err(Error::new(ErrorKind::NotFound, format!("lock '{lock}' of {locker}")));
            };
            if held.client() != Some(shared.identity().number) {
                if held.address.is_empty() {
                    return Err(Error::new(ErrorKind::Unsupported, format!("{locker} has no address to be fenced by")));
                }
                shared.blocklist(&held.address, None).await?;
                outlast_fenced_reads(self.backend(), &self.header_object(&id)).await?;
            } else if wire::watch_of(&held.cookie).is_some() && self.find_open(&id).is_some() {
                let what = "this client holds the lock itself, and releases it when another client needs it";
                return Err(Error::new(ErrorKind::Busy, what));
            }
            let call = ObjectOp::Call { method: BREAK, input: wire::encode_break(held) };
            self.backend().submit(&self.header_object(&id), Transaction::of(call).durable()).await?;
            self.header_changed(&id).await;
            Ok(())
        };
        broken.await.map_err(|error| error.within(format_args!("unlocking image {name}")))
    }

    /// Returns the interface of a shared pool, and the id of the image.
    async fn lockable(&self, name: &str) -> Result<(Rc<dyn SharedObjects>, String)> {
        let id = self.id_of(name).await?;
        let unshared = || {
            let what = "only images in pools of a Ceph cluster have locks: no other client uses this pool";
            Error::new(ErrorKind::Unsupported, what)
        };
        Ok((self.backend().shared().ok_or_else(unshared)?, id))
    }

    async fn lock_info(&self, shared: &Rc<dyn SharedObjects>, id: &str) -> Result<LockInfo> {
        let answer = shared.exec(&self.header_object(id), SnapId::HEAD, GET_INFO, wire::encode_get_info()).await?;
        wire::decode_info(&answer).ok_or_else(|| Error::new(ErrorKind::Corrupt, "the lock of the image"))
    }
}
