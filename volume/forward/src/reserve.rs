//! Forwarder's side of reservations: the copy of the owner's table, and actions of hosts.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use forebay_block::reservation::{
    HostId, Refusal, ReservationAction, ReservationAuthority, ReservationChange, ReservationMirror, ReservationTable,
    Reservations,
};
use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::spawn;
use forebay_reactor::sync::Semaphore;

use crate::device::VolumeForwarder;
use crate::session::{ReceivedTable, ReceivedTables};
use crate::wire::{ForwardAnswer, NumberedTable, VolumeRequest};

/// Reservations of a forwarded volume.
pub(crate) struct ForwardedReservations {
    reservations: Reservations,
    mirror: ReservationMirror,
    tables: RefCell<ReceivedTables>,
}

impl ForwardedReservations {
    fn new(forwarder: &Rc<VolumeForwarder>, session: u64, first: &NumberedTable) -> Self {
        let owner = OwnerAuthority { forwarder: Rc::downgrade(forwarder), turn: Rc::new(Semaphore::new(1)) };
        let (reservations, mirror) = Reservations::mirror(ReservationTable::clone(&first.table), Rc::new(owner));
        Self { reservations, mirror, tables: RefCell::new(ReceivedTables::new(session, first)) }
    }

    pub(crate) fn handle(&self) -> Reservations {
        self.reservations.clone()
    }

    /// Publishes a table that was received, unless it is the current one.
    fn receive(&self, session: u64, table: &NumberedTable) -> ReceivedTable {
        let received = self.tables.borrow_mut().receive(session, table);
        if received.is_new {
            self.mirror.publish(ReservationTable::clone(&table.table));
        }
        received
    }
}

impl VolumeForwarder {
    /// Adopts the table that a session was opened with, before anything is sent in it; returns its number here, 0 for a volume
    /// without reservations.
    ///
    /// # Errors
    /// If the owner has reservations for the volume and a former one had none, or the other way round.
    pub(crate) async fn adopt_opened(
        self: &Rc<Self>,
        session: u64,
        table: Option<&NumberedTable>,
    ) -> std::result::Result<u64, String> {
        let new = || table.map(|first| ForwardedReservations::new(self, session, first));
        match (self.reserved.get_or_init(new), table) {
            (None, None) => Ok(0),
            (Some(reserved), Some(table)) => {
                let received = reserved.receive(session, table);
                reserved.mirror.fence().await;
                Ok(received.number)
            }
            (None, Some(_)) => Err("the volume has reservations at its owner, and had none before".into()),
            (Some(_), None) => Err("the volume has no reservations at its owner, and had some before".into()),
        }
    }

    /// Handles a change of the owner's table in a session that is open.
    pub(crate) fn table_changed(self: &Rc<Self>, session: u64, table: &NumberedTable) {
        let Some(reserved) = self.reserved() else { return };
        let received = reserved.receive(session, table);
        if !received.is_superseded {
            drop(spawn(self.clone().adopt(session, table.number, received.number)));
        }
    }

    /// Waits until all that older tables have admitted has completed, and tells the owner.
    async fn adopt(self: Rc<Self>, session: u64, owners_number: u64, number: u64) {
        let Some(reserved) = self.reserved() else { return };
        reserved.mirror.fence().await;
        self.state.borrow_mut().adopt(number);
        self.adopting.set(self.adopting.get() + 1);
        let is_over = || {
            let state = self.state.borrow();
            state.session() != Some(session) || state.has_drained(number)
        };
        self.changed.wait_until(is_over).await;
        self.adopting.set(self.adopting.get() - 1);
        if self.state.borrow().session() != Some(session) {
            // The next session is opened with the table.
            return;
        }
        let route = self.route.borrow().clone();
        if let Some(route) = route {
            route.adopted(&self.client, session, owners_number).await;
        }
    }

    /// Returns the reservations; `None` for a volume without, or before the first session.
    pub(crate) fn reserved(&self) -> Option<&ForwardedReservations> {
        self.reserved.get().and_then(Option::as_ref)
    }
}

/// Owner of the volume, as the one that executes actions.
struct OwnerAuthority {
    forwarder: Weak<VolumeForwarder>,
    /// Held by the action that is in flight.
    turn: Rc<Semaphore>,
}

impl ReservationAuthority for OwnerAuthority {
    fn apply(
        &self,
        host: HostId,
        action: ReservationAction,
    ) -> LocalFuture<Result<std::result::Result<ReservationChange, Refusal>>> {
        let (forwarder, turn) = (self.forwarder.upgrade(), self.turn.clone());
        Box::pin(async move {
            let closed = || Error::new(ErrorKind::ShuttingDown, "the volume was closed");
            let forwarder = forwarder.ok_or_else(closed)?;
            let _turn = turn.acquire(1).await;
            match forwarder.push(VolumeRequest::Reserve(host, action)).await? {
                ForwardAnswer::Reserved(outcome) => Ok(outcome),
                _ => Err(forwarder.failed("an answer that does not belong to the reservation action")),
            }
        })
    }
}
