//! Copy of a reservation table that another daemon changes.
//!
//! The daemon that has the volume open is the authority: it executes all actions, and sends its table to the daemons
//! that forward requests of hosts to it.  Each of those has a copy, by which its fronts decide what is allowed.

use std::rc::Rc;

use super::owner::{ReservationOwner, ReservationResult};
use super::shared::Keep;
use super::table::{HostId, ReservationAction, ReservationTable};
use crate::device::LocalFuture;
use crate::error::Result;

/// Connection to the daemon that changes the table of a volume.
pub trait ReservationAuthority {
    /// Executes a host's action; on completion what [`Reservations::apply`](super::Reservations::apply) states holds at
    /// every daemon that serves the volume.  Called in the order of the actions.
    fn apply(&self, host: HostId, action: ReservationAction) -> LocalFuture<Result<ReservationResult>>;
}

/// Copy of a table, on the core that owns the forwarded volume.
#[derive(Clone)]
pub struct ReservationMirror(Rc<ReservationOwner>);

impl ReservationMirror {
    pub(super) fn of(owner: Rc<ReservationOwner>) -> Self {
        Self(owner)
    }

    /// Makes `table` the current one on all cores.
    pub fn publish(&self, table: ReservationTable) {
        if let Some(shared) = self.0.shared() {
            self.0.publish(&shared, table);
        }
    }

    /// Waits until every request that any core has admitted by now has been given to the device.
    pub async fn fence(&self) {
        self.0.fence().await;
    }
}

/// Storage of a copy, which has none.
pub(super) struct KeptElsewhere;

impl Keep for KeptElsewhere {
    fn save(&self, _table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
