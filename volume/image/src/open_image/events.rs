//! Actions of an open image on events of its watch and its exclusive lock.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ExclusiveRange, Extent, LocalFuture, Result};

use super::{Coordination, OpenImage};
use crate::exclusive_lock::{LockedImage, log_lost};
use crate::format::{ImageFeatures, map_object};
use crate::images::SIZE_MAX;
use crate::lock::Then;
use crate::objectmap::ObjectMap;
use crate::owner::answer_request;
use crate::watcher::ImageEvents;
use crate::wire::notify::{ClientId, NotifyMessage, OwnerRequest};

impl LockedImage for OpenImage {
    fn name(&self) -> String {
        self.name()
    }

    fn path(&self) -> String {
        let slash = if self.namespace().is_empty() { "" } else { "/" };
        format!("{}/{}{slash}{}", self.backend().info().pool, self.namespace(), self.name())
    }

    async fn refresh(&self) -> Result<()> {
        self.refresh().await
    }

    async fn open_map(&self) -> Result<Option<Rc<ObjectMap>>> {
        let header = self.header();
        let Some(objects) = self.backend().shared().filter(|_| header.features.has(ImageFeatures::OBJECT_MAP)) else {
            return Ok(None);
        };
        let object = map_object(self.namespace(), &self.id, None);
        ObjectMap::open(self.backend(), &objects, object, self.header_object(), &header).await.map(Some)
    }

    /// Handles the acquisition of the lock. Changes that waited for it may have been allowed by superseded
    /// reservations.
    async fn on_lock_acquired(&self) -> Result<()> {
        self.note_rollback();
        if let Some(reserved) = self.reserved()
            && reserved.claimed().await?
        {
            self.admission.supersede();
        }
        let check = self.lock_check.borrow().clone();
        if let Some(check) = check {
            check().await?;
        }
        self.own_blocks.begin(self).await;
        Ok(())
    }

    async fn block_writes(&self) -> ExclusiveRange {
        self.admission.exclusive(Extent::new(0, SIZE_MAX)).await
    }

    async fn flush(&self) -> Result<()> {
        self.pools.flush().await
    }
}

impl ImageEvents for OpenImage {
    fn react(&self, me: ClientId, message: Option<&NotifyMessage>) -> (Vec<u8>, Then) {
        if let Some(NotifyMessage::AcquiredLock(client)) = message
            && *client != me
        {
            // Whatever this client believes.
            self.own_blocks.end();
        }
        self.exclusive_lock().map_or((Vec::new(), Then::Nothing), |lock| lock.react(me, message))
    }

    fn on_header_update(self: Rc<Self>) -> LocalFuture<Result<()>> {
        Box::pin(async move {
            let had_lock = self.state.has_exclusive_lock();
            self.own_blocks.check_lock(&self).await;
            let refreshed = self.refresh().await;
            self.header_may_have_changed();
            refreshed?;
            if !had_lock && self.state.has_exclusive_lock() {
                // The client that enabled the lock relies on it once this is acknowledged: no write without it is in flight then.
                drop(self.block_writes().await);
            }
            let has_map = self.header().features.has(ImageFeatures::OBJECT_MAP);
            if let Some(lock) = self.exclusive_lock().filter(|lock| has_map && lock.is_locked() && lock.map().is_none())
            {
                // Acquired before the image had a map: the map is opened with the next acquisition.
                lock.release(&*self, None).await;
            }
            Ok(())
        })
    }

    fn on_reservations_changed(self: Rc<Self>) -> LocalFuture<Result<Option<u64>>> {
        Box::pin(async move {
            match self.reserved() {
                Some(reserved) => reserved.told().await.map(Some),
                None => Ok(None),
            }
        })
    }

    fn on_operation(self: Rc<Self>, request: OwnerRequest) -> LocalFuture<Option<Vec<u8>>> {
        Box::pin(async move { answer_request(&self, request).await })
    }

    fn on_owner_message(&self, message: NotifyMessage) {
        self.owner.asked.deliver(message);
    }

    fn on_lock_requested(self: Rc<Self>, client: ClientId) -> LocalFuture<()> {
        Box::pin(async move {
            if let Some(lock) = self.exclusive_lock() {
                lock.release(&*self, Some(client)).await;
            }
        })
    }

    fn on_lock_released(&self) {
        if let Some(lock) = self.exclusive_lock() {
            lock.on_released();
        }
    }

    fn on_watch_lost(&self) {
        if let Some(reserved) = self.reserved() {
            reserved.lost_touch();
        }
    }

    fn on_watch_restored(self: Rc<Self>) -> LocalFuture<()> {
        Box::pin(async move {
            self.header_may_have_changed();
            let Some(lock) = self.exclusive_lock() else { return };
            if lock.on_watch_restored(&*self).await
                && let Err(error) = self.refresh().await
            {
                tracing::warn!(image = self.path(), %error, "cannot read the header after its watch broke");
            }
        })
    }

    fn on_watch_settled(self: Rc<Self>) -> LocalFuture<()> {
        Box::pin(async move {
            // Reservations registered in the meantime are re-read too: changes before that may have been missed.
            let Some(reserved) = self.reserved() else { return };
            let Some(Coordination { watcher, lock }) = self.coordination() else { return reserved.let_go() };
            let go_on = || !watcher.is_ended() && lock.check().is_ok();
            match go_on() {
                true => reserved.found_touch(go_on).await,
                false => reserved.let_go(),
            }
        })
    }

    fn on_blocklisted(&self, why: Error) {
        let Some(lock) = self.exclusive_lock() else { return };
        if why.kind() == ErrorKind::Fenced && lock.is_locked() {
            log_lost(self, None, &why);
        }
        lock.on_blocklisted(why);
    }
}
