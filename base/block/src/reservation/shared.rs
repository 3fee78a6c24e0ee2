//! The table of an open volume, owned by one core and seen by all.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use forebay_reactor::cross::{self, Answer};
use forebay_reactor::spawn;

use super::owner::{Owner, own};
use super::peers::{Joint, Peers};
use super::table::{Access, Action, Change, HostId, Refusal, Table};
use crate::device::LocalFuture;
use crate::error::{Error, ErrorKind, Result};
use crate::remote;

/// Where the table is kept over restarts.
pub trait Keep {
    /// Replaces what is stored, durably; `None` removes it.  Not asked for where there are [`Peers`].
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<Result<()>>;

    /// Waits until the changes that the volume has taken by now are over.  Where a change is over when it was
    /// submitted, there is nothing to wait for.
    fn drain(&self) -> LocalFuture<()> {
        Box::pin(std::future::ready(()))
    }
}

pub(super) enum Message {
    Apply(HostId, Action, Answer<Result<std::result::Result<Change, Refusal>>>),
    ClearAll(Answer<Result<()>>),
    Watch(cross::Sender<()>),
    /// A way by which other cores reach the volume.
    Gate(Weak<remote::Shared>),
}

pub(super) struct Shared {
    /// Counts the tables that were published.
    version: AtomicU64,
    /// The newest; looked at only by who has seen an older version.
    table: RwLock<Arc<Table>>,
    messages: cross::Sender<Message>,
}

/// A volume's reservations, from any core.
#[derive(Clone)]
pub struct Reservations(Arc<Shared>);

impl Reservations {
    /// Takes charge of a table on this core.  It ends with the last handle.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(table: Table, keep: Rc<dyn Keep>) -> Self {
        Self::begin(table, keep, None).0
    }

    /// The same for a volume that other daemons serve as well: the table is the one that is stored, now and whenever
    /// another daemon has changed it.  [`Joint::begin`] has to be called before anything else happens.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn joint(keep: Rc<dyn Keep>, peers: Rc<dyn Peers>) -> (Self, Joint) {
        let (reservations, owner) = Self::begin(Table::new(), keep, Some(peers));
        (reservations, Joint::of(owner))
    }

    fn begin(table: Table, keep: Rc<dyn Keep>, peers: Option<Rc<dyn Peers>>) -> (Self, Rc<Owner>) {
        let (messages, receiver) = cross::channel();
        let shared = Shared { version: AtomicU64::new(0), table: RwLock::new(Arc::new(table)), messages };
        let shared = Arc::new(shared);
        let owner = Rc::new(Owner::new(Arc::downgrade(&shared), keep, peers));
        drop(spawn(own(receiver, owner.clone())));
        (Self(shared), owner)
    }

    /// What a core knows of them.
    pub fn view(&self) -> View {
        let (version, table) = self.newest();
        View { reservations: self.clone(), version, table }
    }

    /// Does what a host asks for.  When this answers, every [`View`] that looks sees it, and it is durable if it must
    /// be.  When it has taken the volume from another host (a reservation, a preemption) or has reset it, what was
    /// allowed before is over, too: no write of before lands later.  The outer error is the medium's, and nothing has
    /// changed then; the inner one is the protocol's.
    pub fn apply(&self, host: &HostId, action: Action) -> LocalFuture<Result<std::result::Result<Change, Refusal>>> {
        let (answer, answered) = cross::oneshot();
        // What is refused is dropped with its answer, which then tells of the end.
        let _ = self.0.messages.send(Message::Apply(host.clone(), action, answer));
        Box::pin(async move { answered.await.unwrap_or_else(gone) })
    }

    /// Forgets all registrations and whatever is held, as an administrator may.  Those who were registered are told.
    pub fn clear_all(&self) -> LocalFuture<Result<()>> {
        let (answer, answered) = cross::oneshot();
        let _ = self.0.messages.send(Message::ClearAll(answer));
        Box::pin(async move { answered.await.unwrap_or_else(gone) })
    }

    /// Counts on a way by which other cores reach the volume.
    pub(crate) fn add_gate(&self, gate: Weak<remote::Shared>) {
        let _ = self.0.messages.send(Message::Gate(gate));
    }

    /// Tells of changes from now on.
    pub fn changes(&self) -> Changes {
        let (sender, receiver) = cross::channel();
        // Refused when the owner is gone; then nothing changes any more.
        let _ = self.0.messages.send(Message::Watch(sender));
        Changes(receiver)
    }

    fn newest(&self) -> (u64, Arc<Table>) {
        let table = self.0.table.read().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, so that the version is this table's.
        (self.0.version.load(Ordering::Acquire), table.clone())
    }
}

impl Shared {
    pub(super) fn publish(&self, table: Arc<Table>) {
        let mut current = self.table.write().unwrap_or_else(PoisonError::into_inner);
        *current = table;
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(super) fn current(&self) -> Arc<Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn gone<T>() -> Result<T> {
    Err(Error::new(ErrorKind::ShuttingDown, "the volume's core has stopped"))
}

/// The newest table, on one core.  Looking costs one atomic load while nothing changes.
#[derive(Clone)]
pub struct View {
    reservations: Reservations,
    version: u64,
    table: Arc<Table>,
}

impl View {
    /// The table now.
    pub fn table(&mut self) -> &Arc<Table> {
        if self.reservations.0.version.load(Ordering::Acquire) != self.version {
            (self.version, self.table) = self.reservations.newest();
        }
        &self.table
    }

    /// Whether a host may do something now; see [`Table::allows`].
    pub fn allows(&mut self, host: Option<&HostId>, access: Access) -> bool {
        let table = self.table();
        !table.restricts() || table.allows(host, access)
    }

    /// Where to ask for changes.
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }
}

/// Tells of changes of a table.
pub struct Changes(cross::Receiver<()>);

impl Changes {
    /// Waits for changes since the last call; `false` when there will be none any more.
    pub async fn next(&mut self) -> bool {
        let more = self.0.recv().await.is_some();
        while self.0.try_recv().is_some() {}
        more
    }
}
