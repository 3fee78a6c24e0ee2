//! Owner's side of reservations: executes actions of hosts, and has forwarders adopt the table.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::reservation::{HostId, Refusal, ReservationAction, ReservationView, Reservations};
use forebay_block::{BlockDevice, Error, ErrorKind};
use forebay_reactor::{now, timeout};

use crate::client::ForwardClient;
use crate::host::ForwardHost;
use crate::session::ForwardSessionKey;
use crate::wire::{ForwardAnswer, ForwardEvent, NumberedTable, SessionEndReason};

/// Time that a forwarder has for adopting a table before its session ends.
pub(crate) const ADOPTION_MAX: Duration = Duration::from_secs(2);

/// Device that is offered to forwarders.
pub(crate) struct OfferedDevice {
    pub(crate) device: Rc<dyn BlockDevice>,
    reservations: Option<OfferedReservations>,
}

/// Reservations of an offered device.
struct OfferedReservations {
    view: RefCell<ReservationView>,
    /// Table that forwarders were told last.
    announced: RefCell<NumberedTable>,
}

impl OfferedDevice {
    /// Begins with a table that has this number.
    pub(crate) fn new(device: Rc<dyn BlockDevice>, number: u64) -> Self {
        let reservations = device.reservations().map(|reservations| {
            let mut view = reservations.view();
            let announced = RefCell::new(NumberedTable { number, table: view.table().clone() });
            OfferedReservations { view: RefCell::new(view), announced }
        });
        Self { device, reservations }
    }
}

impl ForwardHost {
    /// Returns the table of a volume that is offered, if it has reservations, after telling forwarders if it has changed.
    pub(crate) fn current_table(self: &Rc<Self>, volume: &str) -> Option<NumberedTable> {
        let (table, is_new) = {
            let devices = self.devices.borrow();
            let offered = devices.get(volume)?.reservations.as_ref()?;
            let newest = offered.view.borrow_mut().table().clone();
            let mut announced = offered.announced.borrow_mut();
            let is_new = !Arc::ptr_eq(&newest, &announced.table);
            if is_new {
                let number = self.sessions.borrow_mut().change_table(volume);
                *announced = NumberedTable { number, table: newest };
            }
            (announced.clone(), is_new)
        };
        if is_new {
            let open = self.sessions.borrow().open_sessions(volume);
            for key in open {
                self.tell(key.0, &ForwardEvent::Reservations { session: key.1, table: table.clone() });
            }
        }
        Some(table)
    }

    /// Executes a reservation action of a host; returns when all forwarders have adopted the table that it leaves.
    ///
    /// A refused action waits as well: a host may learn from the refusal that an action of its own, whose answer was lost,
    /// was executed.
    pub(crate) async fn reserve(
        self: &Rc<Self>,
        volume: &str,
        reservations: Option<Reservations>,
        host: &HostId,
        action: ReservationAction,
    ) -> ForwardAnswer {
        let Some(reservations) = reservations else {
            let error = Error::new(ErrorKind::Unsupported, "the volume has no reservations");
            return ForwardAnswer::Failed(error);
        };
        let Some(action) = surviving(action) else { return ForwardAnswer::Reserved(Err(Refusal::Unsupported)) };
        let outcome = match reservations.apply(host, action).await {
            Ok(outcome) => outcome,
            Err(error) => return ForwardAnswer::Failed(error),
        };
        let number = match self.current_table(volume) {
            Some(table) => table.number,
            // Not offered any more: sessions have ended, and must drain.
            None => self.sessions.borrow_mut().change_table(volume),
        };
        self.wait_for_adoption(volume, number).await;
        ForwardAnswer::Reserved(outcome)
    }

    /// Waits until no access that a table before this one has admitted is being executed or will be.
    async fn wait_for_adoption(self: &Rc<Self>, volume: &str, number: u64) {
        let deadline = now() + ADOPTION_MAX;
        loop {
            let changed = self.changed.wait();
            let late = now() >= deadline;
            self.end_lapsed();
            let ended = self.sessions.borrow_mut().end_unadopted(volume, number, late);
            if !ended.is_empty() {
                let why = match late {
                    true => SessionEndReason::Other("changed reservations were not adopted in time".into()),
                    false => SessionEndReason::Moved,
                };
                if late {
                    let sessions = ended.len();
                    tracing::warn!(volume, sessions, "forwarders did not adopt reservations within {ADOPTION_MAX:?}");
                }
                self.announce_end(ended, &why);
            }
            if self.sessions.borrow().is_adopted(volume, number) {
                return;
            }
            match late {
                true => changed.await,
                // The next turn finds out whether it was too late, and which leases have run out.
                false => {
                    let lease_ends = self.sessions.borrow().next_lease_end();
                    let until = lease_ends.map_or(deadline, |ends| ends.min(deadline));
                    let _ = timeout(until.since(now()), changed).await;
                }
            }
        }
    }

    /// Notes that a forwarder has adopted a table.
    pub(crate) fn adopted(&self, key: ForwardSessionKey, number: u64) {
        self.sessions.borrow_mut().adopted(key, number);
        self.changed.notify_all();
    }

    /// Notes that a forwarder of this daemon has adopted a table.
    pub(crate) fn adopted_local(&self, client: &Rc<ForwardClient>, session: u64, number: u64) {
        self.adopted((self.local_peer(client), session), number);
    }
}

/// Returns the action with which registrations survive a change of owners (R2); `None` for one that daemons cannot share.
fn surviving(mut action: ReservationAction) -> Option<ReservationAction> {
    match &mut action {
        ReservationAction::Register { persist, .. }
        | ReservationAction::Add { persist, .. }
        | ReservationAction::Replace { persist, .. }
        | ReservationAction::Remove { persist, .. }
        | ReservationAction::Move { persist, .. } => *persist = Some(true),
        ReservationAction::Reserve { .. }
        | ReservationAction::Release { .. }
        | ReservationAction::Clear { .. }
        | ReservationAction::Preempt { .. } => {}
        ReservationAction::HoldWhole | ReservationAction::LetGoWhole | ReservationAction::Reset => return None,
    }
    Some(action)
}
