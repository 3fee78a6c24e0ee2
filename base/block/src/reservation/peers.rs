//! One table for several daemons that serve a volume at the same time.
//!
//! What counts is what is stored with the volume.  A daemon changes it while no other lets changes of the volume pass
//! ([`Peers::claim`]), with a guard on what was stored before, and answers its host when all others go by it
//! ([`Peers::announce`]).  A daemon that was not told, because it was cut off, cannot let a change of the volume pass
//! before it has read the table anew ([`Joint::claimed`]): for that it needs the claim, which who changed the table had.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_reactor::random;
use forebay_reactor::sync::Semaphore;

use super::format::Stored;
use super::owner::{Outcome, Owner, closed};
use super::shared::Shared;
use super::table::{Change, Refusal, Table};
use crate::device::LocalFuture;
use crate::error::{ErrorKind, Result};

/// Attempts at a change that others get in the way of.
const ATTEMPTS: u32 = 100;

/// The other daemons that serve a volume, and the table that all go by.
pub trait Peers {
    /// Waits until no other daemon lets changes of the volume pass, nor will before it has called [`Joint::claimed`].
    fn claim(&self) -> LocalFuture<Result<()>>;

    /// What is stored now.
    fn load(&self) -> LocalFuture<Result<Option<Vec<u8>>>>;

    /// Replaces what is stored, durably.  `Guard` when it is not `before`, `Busy` when another has the claim by now;
    /// nothing has changed then.
    fn replace(&self, before: Option<Vec<u8>>, after: Vec<u8>) -> LocalFuture<Result<()>>;

    /// Waits until the others have called [`Joint::told`].
    fn announce(&self) -> LocalFuture<()>;

    /// Whether another daemon serves the volume, and has answered [`Joint::told`] with this number.
    fn knows(&self, incarnation: u64) -> LocalFuture<Result<bool>>;
}

/// What is known of the stored table.
pub(super) struct State {
    pub(super) peers: Rc<dyn Peers>,
    /// One at a time looks at what is stored, or changes it.
    turn: Semaphore,
    /// What was stored when it was looked at last.
    known: RefCell<Option<Vec<u8>>>,
    /// Names what those who are registered without persistence count on: as long as any daemon lives that knows them.
    incarnation: Cell<u64>,
    /// Counts tables that came from others.
    adopted: Cell<u64>,
    /// That count as far as nothing is left that was allowed by an older table.
    seen: Cell<u64>,
    begun: Cell<bool>,
    /// Others have told of a change before it has begun.
    missed: Cell<bool>,
}

impl State {
    pub(super) fn new(peers: Rc<dyn Peers>) -> Self {
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

    /// Changes the stored table, unless it is refused or nothing would change.
    pub(super) async fn change(
        &self,
        owner: &Owner,
        shared: &Shared,
        change: impl Fn(&mut Table) -> Outcome,
    ) -> Result<std::result::Result<(Change, bool), Refusal>> {
        // What is refused anyway does not take the claim from anybody.
        self.adopt(owner).await?;
        let mut attempt = 0;
        loop {
            let mut table = Table::clone(&shared.current());
            match change(&mut table) {
                Err(refusal) => return Ok(Err(refusal)),
                Ok(change) if table == *shared.current() => return Ok(Ok((change, false))),
                Ok(_) => {}
            }
            self.peers.claim().await?;
            let turn = self.turn.acquire(1).await;
            let mut table = Table::clone(&shared.current());
            let change = match change(&mut table) {
                Err(refusal) => return Ok(Err(refusal)),
                Ok(change) => change,
            };
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

    /// Goes by what is stored, from now on.
    async fn adopt(&self, owner: &Owner) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        let Some(shared) = owner.shared() else { return Ok(()) };
        let bytes = self.peers.load().await?;
        if bytes == *self.known.borrow() {
            return Ok(());
        }
        let table = match &bytes {
            None => Table::new(),
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

/// A table that several daemons go by, on the core that owns the volume: what has to happen to it when others change it.
#[derive(Clone)]
pub struct Joint(Rc<Owner>);

impl Joint {
    pub(super) fn of(owner: Rc<Owner>) -> Self {
        Self(owner)
    }

    fn state(&self) -> &State {
        self.0.joint.as_ref().expect("made with peers")
    }

    /// Takes up the stored table.  What nobody asked to be persistent counts only if a daemon is there that knows it.
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
            let stored = stored.unwrap_or(Stored { table: Table::new(), incarnation: 0 });
            let keeps = stored.table.persists();
            state.incarnation.set(if lost { random().max(1) } else { stored.incarnation });
            *state.known.borrow_mut() = bytes;
            self.0.publish(&shared, if lost && !keeps { Table::new() } else { stored.table });
            state.begun.set(true);
            return Ok(());
        }
    }

    /// Another daemon has changed the table.  When this is answered, nothing passes here that only the former allowed,
    /// and what has passed is over.  The answer is what [`Peers::knows`] of the other daemon asks for; 0: nothing.
    pub async fn told(&self) -> Result<u64> {
        let state = self.state();
        if !state.begun.get() {
            // Nothing passes yet.
            state.missed.set(true);
            return Ok(0);
        }
        state.adopt(&self.0).await?;
        let adopted = state.adopted.get();
        self.0.fence().await;
        self.0.drain().await;
        // Nothing waits for the claim any more that an older table allowed.
        state.seen.set(state.seen.get().max(adopted));
        Ok(state.incarnation.get())
    }

    /// This daemon has the claim, and nothing has passed since.  `true`: changes of the volume may wait that were allowed
    /// by a table that is no more; every such change has been given to the device when this is answered, and has to be
    /// refused.
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

    /// Others may have changed the table without this daemon being told.  `true`: they have.
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

    /// Counts how often others have changed the table.
    pub fn adopted(&self) -> u64 {
        self.state().adopted.get()
    }
}
