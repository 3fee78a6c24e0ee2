//! Reservation table of an open volume, owned by one core and readable from all.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use forebay_reactor::cross::{self, OneshotSender};
use forebay_reactor::spawn;

use super::mirror::{KeptElsewhere, ReservationAuthority, ReservationMirror};
use super::owner::{ReservationOwner, own};
use super::peers::{Joint, ReservationPeers};
use super::table::{HostId, Refusal, ReservationAccess, ReservationAction, ReservationChange, ReservationTable};
use crate::device::LocalFuture;
use crate::error::{Error, ErrorKind, Result};
use crate::remote;

/// Persistent storage of the table.
pub trait Keep {
    /// Replaces the stored table, durably; `None` removes it.  Not called where there are [`ReservationPeers`].
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<Result<()>>;

    /// Waits until the changes in flight in the volume have completed.  The default does not wait, for volumes whose
    /// changes complete on submission.
    fn drain(&self) -> LocalFuture<()> {
        Box::pin(std::future::ready(()))
    }
}

pub(super) enum ReservationMessage {
    Apply(HostId, ReservationAction, OneshotSender<Result<std::result::Result<ReservationChange, Refusal>>>),
    ClearAll(OneshotSender<Result<()>>),
    Watch(cross::Sender<()>),
    /// Registers a handle by which other cores reach the volume.
    Gate(Weak<remote::DeviceShared>),
}

pub(super) struct ReservationShared {
    /// Number of published tables.
    version: AtomicU64,
    /// Newest table; read only when `version` has changed.
    table: RwLock<Arc<ReservationTable>>,
    messages: cross::Sender<ReservationMessage>,
}

/// Handle to a volume's reservations that works from any core.
#[derive(Clone)]
pub struct Reservations(Arc<ReservationShared>);

impl Reservations {
    /// Starts the owner of a table on this core.  It ends with the last handle.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(table: ReservationTable, keep: Rc<dyn Keep>) -> Self {
        Self::begin(table, keep, None).0
    }

    /// Starts the owner of a table that other daemons serve as well: the table is the stored one, now and after each
    /// change by another daemon.  [`Joint::begin`] must be called before anything else.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn joint(keep: Rc<dyn Keep>, peers: Rc<dyn ReservationPeers>) -> (Self, Joint) {
        let (reservations, owner) = Self::begin(ReservationTable::new(), keep, Some(peers));
        (reservations, Joint::of(owner))
    }

    /// Starts a copy of a table that another daemon changes.  Its first table is `table`; later ones come through the
    /// [`ReservationMirror`].
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn mirror(table: ReservationTable, authority: Rc<dyn ReservationAuthority>) -> (Self, ReservationMirror) {
        let new = |shared| ReservationOwner::new(shared, Rc::new(KeptElsewhere), None).with_authority(authority);
        let (reservations, owner) = Self::begin_with(table, new);
        (reservations, ReservationMirror::of(owner))
    }

    fn begin(
        table: ReservationTable,
        keep: Rc<dyn Keep>,
        peers: Option<Rc<dyn ReservationPeers>>,
    ) -> (Self, Rc<ReservationOwner>) {
        Self::begin_with(table, |shared| ReservationOwner::new(shared, keep, peers))
    }

    fn begin_with(
        table: ReservationTable,
        owner: impl FnOnce(Weak<ReservationShared>) -> ReservationOwner,
    ) -> (Self, Rc<ReservationOwner>) {
        let (messages, receiver) = cross::channel();
        let shared = ReservationShared { version: AtomicU64::new(0), table: RwLock::new(Arc::new(table)), messages };
        let shared = Arc::new(shared);
        let owner = Rc::new(owner(Arc::downgrade(&shared)));
        drop(spawn(own(receiver, owner.clone())));
        (Self(shared), owner)
    }

    /// Returns a view for one core.
    pub fn view(&self) -> ReservationView {
        let (version, table) = self.newest();
        ReservationView { reservations: self.clone(), version, table }
    }

    /// Executes a host's action.  On completion, every [`ReservationView`] sees the change, and it is durable if
    /// required.  If the action has taken the volume from another host (a reservation, a preemption) or has reset it,
    /// every request allowed before has completed too: no earlier write lands later.  The outer error is the medium's,
    /// and nothing has changed then; the inner one is the protocol's.
    pub fn apply(
        &self,
        host: &HostId,
        action: ReservationAction,
    ) -> LocalFuture<Result<std::result::Result<ReservationChange, Refusal>>> {
        let (answer, answered) = cross::oneshot();
        // A message that fails to send is dropped with its answer, which then reports the end.
        let _ = self.0.messages.send(ReservationMessage::Apply(host.clone(), action, answer));
        Box::pin(async move { answered.await.unwrap_or_else(gone) })
    }

    /// Clears all registrations and reservations, for administrators.  Registrants are notified.
    pub fn clear_all(&self) -> LocalFuture<Result<()>> {
        let (answer, answered) = cross::oneshot();
        let _ = self.0.messages.send(ReservationMessage::ClearAll(answer));
        Box::pin(async move { answered.await.unwrap_or_else(gone) })
    }

    /// Registers a handle by which other cores reach the volume.
    pub(crate) fn add_gate(&self, gate: Weak<remote::DeviceShared>) {
        let _ = self.0.messages.send(ReservationMessage::Gate(gate));
    }

    /// Subscribes to changes of the table.
    pub fn changes(&self) -> Changes {
        let (sender, receiver) = cross::channel();
        // Fails when the owner is gone; then nothing changes any more.
        let _ = self.0.messages.send(ReservationMessage::Watch(sender));
        Changes(receiver)
    }

    fn newest(&self) -> (u64, Arc<ReservationTable>) {
        let table = self.0.table.read().unwrap_or_else(PoisonError::into_inner);
        // Loaded under the lock, so that the version belongs to this table.
        (self.0.version.load(Ordering::Acquire), table.clone())
    }
}

impl ReservationShared {
    pub(super) fn publish(&self, table: Arc<ReservationTable>) {
        let mut current = self.table.write().unwrap_or_else(PoisonError::into_inner);
        *current = table;
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(super) fn current(&self) -> Arc<ReservationTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn gone<T>() -> Result<T> {
    Err(Error::new(ErrorKind::ShuttingDown, "the volume's core has stopped"))
}

/// Newest table, cached on one core.  Checking it costs one atomic load while nothing changes.
#[derive(Clone)]
pub struct ReservationView {
    reservations: Reservations,
    version: u64,
    table: Arc<ReservationTable>,
}

impl ReservationView {
    /// Returns the current table.
    pub fn table(&mut self) -> &Arc<ReservationTable> {
        if self.reservations.0.version.load(Ordering::Acquire) != self.version {
            (self.version, self.table) = self.reservations.newest();
        }
        &self.table
    }

    /// Returns whether a host is allowed this access now; see [`ReservationTable::allows`].
    pub fn allows(&mut self, host: Option<&HostId>, access: ReservationAccess) -> bool {
        let table = self.table();
        !table.restricts() || table.allows(host, access)
    }

    /// Returns the handle to the reservations.
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }
}

/// Subscription to changes of a table.
pub struct Changes(cross::Receiver<()>);

impl Changes {
    /// Waits for changes since the last call; returns `false` when there will be no more.
    pub async fn next(&mut self) -> bool {
        let more = self.0.recv().await.is_some();
        while self.0.try_recv().is_some() {}
        more
    }
}
