//! Offer of a volume to forwarders.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_reactor::{JoinHandle, spawn};

use crate::host::ForwardHost;

/// Offer of a volume to forwarders.  Dropping it ends the sessions of the volume; what is in flight completes, so that a
/// volume that is moved is [suspended](Self::suspend) first.
pub struct VolumeOffer {
    host: Rc<ForwardHost>,
    volume: String,
    next_owner: RefCell<Option<String>>,
    /// Tasks that follow the size and the reservations of the device.
    following: Vec<JoinHandle<()>>,
}

impl VolumeOffer {
    pub(crate) fn new(host: Rc<ForwardHost>, volume: &str, device: Rc<dyn BlockDevice>) -> Self {
        let volume = volume.to_owned();
        let reservations = device.reservations().map(|reservations| {
            let (host, volume, mut changes) = (Rc::downgrade(&host), volume.clone(), reservations.changes());
            spawn(async move {
                while changes.next().await {
                    let Some(host) = host.upgrade() else { return };
                    host.current_table(&volume);
                }
            })
        });
        let size = device.size_watch().map(|watch| {
            let (host, volume) = (Rc::downgrade(&host), volume.clone());
            spawn(async move {
                loop {
                    watch.changed().await;
                    let Some(host) = host.upgrade() else { return };
                    host.announce_size(&volume, device.geometry());
                }
            })
        });
        let following = size.into_iter().chain(reservations).collect();
        Self { host, volume, next_owner: RefCell::default(), following }
    }

    /// Returns the identity of the volume.
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// Stops admitting requests, and waits until nothing of any forwarder is being executed.  Requests that come later are
    /// answered *moving*, and have not been executed.  Then the sessions end.
    pub async fn suspend(&self) {
        self.host.suspend(&self.volume).await;
    }

    /// Admits requests again after [`suspend`](Self::suspend), in new sessions: the move was cancelled.
    pub fn resume(&self) {
        self.host.resume(&self.volume);
    }

    /// Sets the name of the next owner, which forwarders are told after the offer is dropped.
    pub fn set_next_owner(&self, name: &str) {
        *self.next_owner.borrow_mut() = Some(name.to_owned());
    }
}

impl Drop for VolumeOffer {
    fn drop(&mut self) {
        for following in self.following.drain(..) {
            following.abort();
        }
        self.host.withdraw(&self.volume, self.next_owner.take());
    }
}
