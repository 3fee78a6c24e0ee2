//! Fair share of a core at work.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::rc::Rc;

use forebay_block::BlockRequest;
use forebay_reactor::{now, try_now};

use crate::share::{FairShare, ShareKey, cost_of};
use crate::throttle::{QosAdmission, Ticket};
use crate::waiters::Waiters;

/// Shares of the volumes of a core; see [`FairShare`].
#[derive(Default)]
pub struct CoreShare {
    share: RefCell<FairShare>,
    waiters: Waiters,
}

/// Share of a volume in its core.
pub struct VolumeShare {
    core: Rc<CoreShare>,
    key: ShareKey,
}

/// Request that uses a share, until this is dropped.
pub struct SharedRequest {
    volume: Rc<VolumeShare>,
    cost: u64,
}

/// Admission of a request to a share.
pub enum ShareAdmission<W> {
    /// The request is executed now; it uses the share until the guard is dropped.
    Now(Option<SharedRequest>),
    /// The request waits; the future returns the guard.
    Wait(W),
}

impl VolumeShare {
    /// Adds a volume to those of a core.
    pub fn new(core: Rc<CoreShare>) -> Rc<Self> {
        let key = core.share.borrow_mut().add();
        Rc::new(Self { core, key })
    }

    /// Admits a request, or returns what it has to wait for.
    pub fn admit(
        self: &Rc<Self>,
        request: &BlockRequest,
    ) -> ShareAdmission<impl Future<Output = SharedRequest> + 'static> {
        let Some(cost) = cost_of(request) else { return ShareAdmission::Now(None) };
        let mut admitted = Vec::new();
        let admission = self.core.share.borrow_mut().admit(self.key, cost, now(), |ticket| admitted.push(ticket));
        self.core.waiters.admit(admitted);
        match admission {
            QosAdmission::Now => ShareAdmission::Now(Some(SharedRequest { volume: self.clone(), cost })),
            QosAdmission::Wait(ticket) => {
                self.core.waiters.add(ticket);
                let wait = ShareWait { volume: self.clone(), ticket, cost, is_admitted: false };
                ShareAdmission::Wait(wait.admitted())
            }
        }
    }

    fn complete(&self, cost: u64) {
        let mut admitted = Vec::new();
        // A reactor that has ended wakes nobody.
        let now = try_now().unwrap_or_default();
        self.core.share.borrow_mut().complete(self.key, cost, now, |ticket| admitted.push(ticket));
        self.core.waiters.admit(admitted);
    }
}

impl Drop for VolumeShare {
    fn drop(&mut self) {
        self.core.share.borrow_mut().remove(self.key);
    }
}

impl Drop for SharedRequest {
    fn drop(&mut self) {
        self.volume.complete(self.cost);
    }
}

/// Wait of a request for its share; dropped before, it is withdrawn.
struct ShareWait {
    volume: Rc<VolumeShare>,
    ticket: Ticket,
    cost: u64,
    is_admitted: bool,
}

impl ShareWait {
    async fn admitted(mut self) -> SharedRequest {
        poll_fn(|cx| self.volume.core.waiters.poll(self.ticket, cx)).await;
        self.is_admitted = true;
        SharedRequest { volume: self.volume.clone(), cost: self.cost }
    }
}

impl Drop for ShareWait {
    fn drop(&mut self) {
        if self.is_admitted {
            return;
        }
        let core = &self.volume.core;
        core.waiters.remove(self.ticket);
        let mut admitted = Vec::new();
        let now = try_now().unwrap_or_default();
        let waited = core.share.borrow_mut().cancel(self.volume.key, self.ticket, now, |ticket| admitted.push(ticket));
        core.waiters.admit(admitted);
        if !waited {
            self.volume.complete(self.cost);
        }
    }
}
