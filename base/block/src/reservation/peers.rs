//! Reservation table shared by several daemons that serve a volume at the same time.
//!
//! The table stored with the volume is authoritative.  A daemon changes it while no other daemon admits changes of the
//! volume ([`ReservationPeers::claim`]), with a compare guard on the previous content, and acknowledges its host once
//! all others have adopted the new table ([`ReservationPeers::announce`]).  A daemon that missed the announcement,
//! because it was cut off, cannot admit a change of the volume before it has reloaded the table ([`Joint::claimed`]):
//! for that it needs the claim, which moved to the daemon that changed the table.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_reactor::random;
use forebay_reactor::sync::Semaphore;

use super::format::Stored;
use super::owner::{ReservationOwner, ReservationResult, closed};
use super::shared::ReservationShared;
use super::table::{Refusal, ReservationChange, ReservationTable};
use crate::device::LocalFuture;
use crate::error::{ErrorKind, Result};

/// Maximum retries of a change that conflicts with other daemons.
const ATTEMPTS: u32 = 100;

/// Connection to the other daemons that serve a volume, and to the table that all share.
pub trait ReservationPeers {
    /// Waits until no other daemon admits changes of the volume, nor will before it has called [`Joint::claimed`].
    fn claim(&self) -> LocalFuture<Result<()>>;

    /// Loads the stored table.
    fn load(&self) -> LocalFuture<Result<Option<Vec<u8>>>>;

    /// Replaces the stored table, durably.
    ///
    /// # Errors
    /// `Guard` when the stored table is not `before`, `Busy` when another daemon has the claim by now; nothing has
    /// changed then.
    fn replace(&self, before: Option<Vec<u8>>, after: Vec<u8>) -> LocalFuture<Result<()>>;

    /// Waits until the other daemons have called [`Joint::told`].
    fn announce(&self) -> LocalFuture<()>;

    /// Returns whether another daemon serves the volume and has answered [`Joint::told`] with this incarnation.
    fn knows(&self, incarnation: u64) -> LocalFuture<Result<bool>>;
}

/// Local copy and state of the stored table.
pub(super) struct StoredTable {
    pub(super) peers: Rc<dyn ReservationPeers>,
    /// Serializes loads and changes of the stored table.
    turn: Semaphore,
    /// Stored bytes as of the last load or change.
    known: RefCell<Option<Vec<u8>>>,
    /// Incarnation of the non-persistent registrations: they stay valid while any daemon that knows it is alive.
    incarnation: Cell<u64>,
    /// Number of tables adopted from the stored form.
    adopted: Cell<u64>,
    /// Value of `adopted` up to which no change admitted by an older table is left.
    seen: Cell<u64>,
    begun: Cell<bool>,
    /// Set when another daemon announced a change before `begin` had completed.
    missed: Cell<bool>,
}

impl StoredTable {
    pub(super) fn new(peers: Rc<dyn ReservationPeers>) -> Self {
        Self {
            peers,
            turn: Semaphore::new(1),
            known: RefCell::default(),
            incarnation: Cell::new(0),
            adopted: Cell::new(0),
            seen: Cell::new(0),
            begun: Cell::new(false),
            missed: Cell::new(false),
        }
    }

    /// Changes the stored table, unless the change is refused or has no effect.
    pub(super) async fn change(
        &self,
        owner: &ReservationOwner,
        shared: &ReservationShared,
        change: impl Fn(&mut ReservationTable) -> ReservationResult,
    ) -> Result<std::result::Result<(ReservationChange, bool), Refusal>> {
        // Checks with the current table first: a change that is refused anyway must not take over the claim.
        self.adopt(owner).await?;
        let mut attempt = 0;
        loop {
            let mut table = ReservationTable::clone(&shared.current());
            match change(&mut table) {
                Err(refusal) => return Ok(Err(refusal)),
                Ok(change) if table == *shared.current() => return Ok(Ok((change, false))),
                Ok(_) => {}
            }
            self.peers.claim().await?;
            let turn = self.turn.acquire(1).await;
            let mut table = ReservationTable::clone(&shared.current());
            let change = match change(&mut table) {
                Err(refusal) => return Ok(Err(refusal)),
                Ok(change) => change,
            };
            table.revision += 1;
            let stored = Stored { table, incarnation: self.incarnation.get() };
            let after = stored.encode();
            let before = self.known.borrow().clone();
            match self.peers.replace(before, after.clone()).await {
                Ok(()) => {
                    *self.known.borrow_mut() = Some(after);
                    owner.publish(shared, stored.table);
                    return Ok(Ok((change, true)));
                }
                Err(error) if matches!(error.kind(), ErrorKind::Guard | ErrorKind::Busy) && attempt < ATTEMPTS => {
                    attempt += 1;
                    drop(turn);
                    self.adopt(owner).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Loads the stored table and makes it the current one.
    async fn adopt(&self, owner: &ReservationOwner) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        let Some(shared) = owner.shared() else { return Ok(()) };
        let bytes = self.peers.load().await?;
        if bytes == *self.known.borrow() {
            return Ok(());
        }
        let table = match &bytes {
            None => ReservationTable::new(),
            Some(bytes) => {
                let stored = Stored::decode(bytes)?;
                if stored.incarnation != 0 {
                    self.incarnation.set(stored.incarnation);
                }
                stored.table
            }
        };
        *self.known.borrow_mut() = bytes;
        self.adopted.set(self.adopted.get() + 1);
        owner.publish(&shared, table);
        Ok(())
    }
}

/// Shared table on the core that owns the volume: reacts to changes by other daemons.
#[derive(Clone)]
pub struct Joint(Rc<ReservationOwner>);

impl Joint {
    pub(super) fn of(owner: Rc<ReservationOwner>) -> Self {
        Self(owner)
    }

    fn state(&self) -> &StoredTable {
        self.0.joint.as_ref().expect("made with peers")
    }

    /// Loads the stored table.  Non-persistent registrations are kept only if a running daemon knows their incarnation.
    pub async fn begin(&self) -> Result<()> {
        let state = self.state();
        loop {
            state.missed.set(false);
            let shared = self.0.shared().ok_or_else(closed)?;
            let bytes = state.peers.load().await?;
            let stored = bytes.as_deref().map(Stored::decode).transpose()?;
            let lost = match &stored {
                Some(stored) if !stored.table.persists() => !state.peers.knows(stored.incarnation).await?,
                Some(stored) => stored.incarnation == 0,
                None => true,
            };
            if state.missed.get() {
                continue;
            }
            let stored = stored.unwrap_or(Stored { table: ReservationTable::new(), incarnation: 0 });
            let keeps = stored.table.persists();
            state.incarnation.set(if lost { random().max(1) } else { stored.incarnation });
            *state.known.borrow_mut() = bytes;
            let mut table = stored.table;
            if lost && !keeps && state.known.borrow().is_some() {
                // Another revision than the stored one, as it is another table.
                let revision = table.revision + 1;
                table = ReservationTable::new();
                table.revision = revision;
            }
            self.0.publish(&shared, table);
            state.begun.set(true);
            return Ok(());
        }
    }

    /// Handles another daemon's change of the table.  On completion, nothing is admitted here that only the old table
    /// allowed, and changes admitted before have completed.  Returns the incarnation that [`ReservationPeers::knows`]
    /// of the other daemon asks for; 0: none.
    pub async fn told(&self) -> Result<u64> {
        let state = self.state();
        if !state.begun.get() {
            // Nothing is admitted yet.
            state.missed.set(true);
            return Ok(0);
        }
        state.adopt(&self.0).await?;
        let adopted = state.adopted.get();
        self.0.fence().await;
        self.0.drain().await;
        // No change that an older table admitted waits for the claim any more.
        state.seen.set(state.seen.get().max(adopted));
        Ok(state.incarnation.get())
    }

    /// Handles the acquisition of the claim by this daemon, before it admits any change.  Returns `true` if changes of
    /// the volume that only an outdated table allowed may be waiting; every such change has been given to the device
    /// when this completes, and must be refused.
    pub async fn claimed(&self) -> Result<bool> {
        let state = self.state();
        if !state.begun.get() {
            return Ok(false);
        }
        state.adopt(&self.0).await?;
        let adopted = state.adopted.get();
        if state.seen.replace(adopted) == adopted {
            return Ok(false);
        }
        self.0.fence().await;
        Ok(true)
    }

    /// Reloads the table, for when another daemon may have changed it without an announcement.  Returns whether it has
    /// changed.
    pub async fn renew(&self) -> Result<bool> {
        let state = self.state();
        if !state.begun.get() {
            state.missed.set(true);
            return Ok(false);
        }
        let before = state.adopted.get();
        state.adopt(&self.0).await?;
        if state.adopted.get() == before {
            return Ok(false);
        }
        self.0.fence().await;
        Ok(true)
    }

    /// Returns the number of tables adopted from other daemons.
    pub fn adopted(&self) -> u64 {
        self.state().adopted.get()
    }
}
