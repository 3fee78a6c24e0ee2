//! Copies that this peer holds of other peers' logs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::KeyedLock;
use forebay_reactor::{Buf, sleep, spawn};

use super::AppendRefused;
use super::hello::ReplicaOffer;
use super::open_copy::ReplicaCopy;
use super::promises::LeasePromises;
use super::wire::{KIND_ANSWER, KIND_REQUEST, ReplicaAction, ReplicaAnswer, ReplicaRequest};
use crate::format::LogId;
use crate::shelf::Shelf;

/// Log device for copies of other peers' logs.
pub struct ReplicaShelf {
    /// Log device.
    pub shelf: Rc<Shelf>,
    /// Maximum size of all logs on it, in bytes.
    pub quota: u64,
}

/// Copies that this peer holds of other peers' logs.
pub struct ReplicaHost {
    shelves: Vec<ReplicaShelf>,
    open: RefCell<BTreeMap<LogId, Rc<ReplicaCopy>>>,
    /// Logs that this peer takes over: nothing is taken from their primaries any more.
    given_up: RefCell<BTreeSet<LogId>>,
    /// One at a time creates, opens or discards a copy of a log.
    turns: KeyedLock<LogId>,
    promises: LeasePromises,
    /// Number of blocks whose payloads came through windows.
    placed: Rc<Cell<u64>>,
}

impl ReplicaHost {
    /// Serves copies on these log devices.
    pub fn new(shelves: Vec<ReplicaShelf>) -> Rc<Self> {
        Rc::new(Self {
            shelves,
            open: RefCell::default(),
            given_up: RefCell::default(),
            turns: KeyedLock::default(),
            promises: LeasePromises::new(),
            placed: Rc::default(),
        })
    }

    /// Returns the number of blocks whose payloads primaries wrote into copies here by themselves.
    pub fn placed_blocks(&self) -> u64 {
        self.placed.get()
    }

    /// Returns the log devices for copies.
    pub fn shelves(&self) -> &[ReplicaShelf] {
        &self.shelves
    }

    /// Returns the space on each log device.
    pub fn offers(&self) -> Vec<ReplicaOffer> {
        let offer = |ReplicaShelf { shelf, quota }: &ReplicaShelf| {
            let used: u64 = shelf.sizes().into_iter().map(|(_, size)| size).sum();
            ReplicaOffer { medium: shelf.medium(), quota: *quota, free: quota.saturating_sub(used) }
        };
        self.shelves.iter().map(offer).collect()
    }

    /// Answers a request with an error: its sender may not have copies here.
    pub fn refuse(connection: &Connection, message: &Message, why: &str) {
        let answer = ReplicaAnswer::Failed(why.into()).encode();
        // Only a connection that has ended refuses it.
        let _ = connection.post(message.reply(KIND_ANSWER).front(Buf::copy_of(&answer)));
    }

    /// Handles a message that is a request of a log's primary; returns false if it is something else.
    pub fn handle(self: &Rc<Self>, connection: &Connection, mut message: Message) -> bool {
        if message.kind != KIND_REQUEST {
            return false;
        }
        let data = std::mem::take(&mut message.data);
        let without_data = |answer: LocalFuture<ReplicaAnswer>| -> LocalFuture<(ReplicaAnswer, BufList)> {
            Box::pin(async move { (answer.await, BufList::new()) })
        };
        let answer = match ReplicaRequest::decode(&message.front.to_vec()) {
            // Appends take their place in the order of the messages.
            Ok(ReplicaRequest { log, term, action: ReplicaAction::Append { durable } }) => match self.copy(&log) {
                Some(copy) => without_data(copy.append(term, durable, data, None)),
                None => without_data(Box::pin(async { ReplicaAnswer::Refused(AppendRefused::NotAdopted) })),
            },
            Ok(ReplicaRequest { log, term, action: ReplicaAction::AppendPlaced { durable, window } }) => {
                match self.copy(&log) {
                    Some(copy) => without_data(copy.append(term, durable, data, Some(window))),
                    None => without_data(Box::pin(async { ReplicaAnswer::Refused(AppendRefused::NotAdopted) })),
                }
            }
            Ok(ReplicaRequest { log, term, action: ReplicaAction::OpenWindow }) => {
                let opened = match self.copy(&log) {
                    Some(copy) => copy.open_window(term, connection),
                    None => ReplicaAnswer::Refused(AppendRefused::NotAdopted),
                };
                without_data(Box::pin(async move { opened }))
            }
            Ok(ReplicaRequest { log, term, action: ReplicaAction::Read(entry) }) => match self.copy(&log) {
                Some(copy) => copy.read(term, entry),
                None => without_data(Box::pin(async { ReplicaAnswer::Refused(AppendRefused::NotAdopted) })),
            },
            Ok(request) => {
                let host = self.clone();
                without_data(Box::pin(async move { host.run(request).await }))
            }
            Err(error) => without_data(Box::pin(async move { ReplicaAnswer::Failed(error.to_string()) })),
        };
        let connection = connection.clone();
        drop(spawn(async move {
            let (answer, data) = answer.await;
            let front = Buf::copy_of(&answer.encode());
            // The primary asks again if the connection has ended.
            let _ = connection.send(message.reply(KIND_ANSWER).front(front).data(data)).await;
        }));
        true
    }

    fn copy(&self, log: &LogId) -> Option<Rc<ReplicaCopy>> {
        self.open.borrow().get(log).cloned()
    }

    async fn run(&self, request: ReplicaRequest) -> ReplicaAnswer {
        let ReplicaRequest { log, term, action } = request;
        if self.is_given_up(&log) {
            return ReplicaAnswer::Failed("this peer is taking the log over".into());
        }
        match action {
            ReplicaAction::Create { volume, name, size, unit, epoch } => {
                let _turn = self.turns.lock(&log).await;
                let created = self.create(&log, term, (&volume, &name), (size, unit), epoch).await;
                created.map_or_else(|error| refuse(&error), ReplicaAnswer::Created)
            }
            ReplicaAction::Adopt(adopt) => {
                let _turn = self.turns.lock(&log).await;
                match self.open_copy(&log).await {
                    Ok(Some(copy)) => copy.adopt(term, &adopt).await,
                    Ok(None) => ReplicaAnswer::Refused(AppendRefused::CopyLost),
                    Err(error) => refuse(&error),
                }
            }
            ReplicaAction::Retire { tail } => match self.copy(&log).map(|copy| copy.in_use()) {
                Some(used) => used.copy().retire(term, tail).await,
                None => ReplicaAnswer::Refused(AppendRefused::NotAdopted),
            },
            ReplicaAction::Sync => match self.copy(&log).map(|copy| copy.in_use()) {
                Some(used) => used.copy().sync(term).await,
                None => ReplicaAnswer::Refused(AppendRefused::NotAdopted),
            },
            ReplicaAction::Heartbeat { automatic } => match self.copy(&log) {
                Some(copy) => copy.heartbeat(term, automatic),
                None => ReplicaAnswer::Refused(AppendRefused::NotAdopted),
            },
            ReplicaAction::Discard { epoch } => {
                let _turn = self.turns.lock(&log).await;
                match self.discard(&log, term, epoch).await {
                    Ok(()) => ReplicaAnswer::Done(super::wire::CopyProgress::default()),
                    Err(error) => refuse(&error),
                }
            }
            ReplicaAction::Append { .. }
            | ReplicaAction::AppendPlaced { .. }
            | ReplicaAction::OpenWindow
            | ReplicaAction::Read(_) => {
                ReplicaAnswer::Failed("appends, windows and reads are answered by the open copy".into())
            }
        }
    }

    /// Returns the log device that has a copy of a log.
    pub fn shelf_of(&self, log: &LogId) -> Option<Rc<Shelf>> {
        self.shelves.iter().map(|found| &found.shelf).find(|shelf| shelf.ids().contains(log)).cloned()
    }

    fn is_given_up(&self, log: &LogId) -> bool {
        self.given_up.borrow().contains(log)
    }

    /// Opens this peer's copy of a log, if it has one.
    async fn open_copy(&self, log: &LogId) -> Result<Option<Rc<ReplicaCopy>>> {
        if let Some(copy) = self.copy(log) {
            return Ok(Some(copy));
        }
        let Some(shelf) = self.shelf_of(log) else { return Ok(None) };
        let copy =
            Rc::new(ReplicaCopy::new(shelf.open_copy(log, None).await?, self.promises.of(log), self.placed.clone()));
        if self.is_given_up(log) {
            return Err(Error::new(ErrorKind::Busy, "this peer is taking the log over"));
        }
        self.open.borrow_mut().insert(*log, copy.clone());
        Ok(Some(copy))
    }

    /// Refuses what a primary asks for that this peer's copy knows to be superseded: by a later term, or by a later epoch of
    /// the record, since a request may arrive late over another connection.
    async fn require_newest(&self, log: &LogId, term: u32, epoch: u64) -> Result<()> {
        let Some(copy) = self.open_copy(log).await? else { return Ok(()) };
        if copy.term() > u64::from(term) {
            let text = format!("this peer's copy of the log follows the primary of term {}, not {term}", copy.term());
            return Err(Error::new(ErrorKind::Fenced, text));
        }
        if copy.epoch() > epoch {
            let text = format!("this peer's copy of the log is of epoch {}, after {epoch}", copy.epoch());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    async fn create(
        &self,
        log: &LogId,
        term: u32,
        names: (&str, &str),
        (size, unit): (u64, u32),
        epoch: u64,
    ) -> Result<LogId> {
        self.require_newest(log, term, epoch).await?;
        self.release(log).await;
        self.discard_older(names.0, epoch).await;
        let mut reason = Error::new(ErrorKind::NoSpace, "this peer has no log device for copies of logs");
        for ReplicaShelf { shelf, quota } in &self.shelves {
            let used: u64 = shelf.sizes().into_iter().filter(|(id, _)| id != log).map(|(_, size)| size).sum();
            if used.saturating_add(size) > *quota {
                let text = format!("{}: {used} bytes of {quota} are used, {size} are needed", shelf.path());
                reason = Error::new(ErrorKind::NoSpace, text);
                continue;
            }
            match shelf.create_replica(log, names, (size, unit), epoch).await {
                Ok(copy) => return Ok(copy),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    /// Frees the space of former logs of a volume, which its record names no more.
    async fn discard_older(&self, volume: &str, epoch: u64) {
        for ReplicaShelf { shelf, .. } in &self.shelves {
            if let Err(error) = shelf.discard_older(volume, epoch).await {
                tracing::warn!(path = shelf.path(), %error, "cannot free the space of a former write log of a volume");
            }
        }
    }

    async fn discard(&self, log: &LogId, term: u32, epoch: u64) -> Result<()> {
        self.require_newest(log, term, epoch).await?;
        self.release(log).await;
        self.promises.forget(log);
        let Some(shelf) = self.shelf_of(log) else { return Ok(()) };
        shelf.discard(log).await
    }

    /// Waits until this peer has kept its promise to the primary of a log not to take over.  Nothing is taken from that one
    /// any more ([`give_up`](Self::give_up)), or the promise may be extended meanwhile.
    pub async fn promise_over(&self, log: &LogId, lease: Duration) {
        loop {
            let remaining = self.promises.remaining(log, lease);
            if remaining.is_zero() {
                return;
            }
            sleep(remaining).await;
        }
    }

    /// Takes nothing more from the primary of a log, until [`resume`](Self::resume): this peer takes the log over.  Returns
    /// the log device that has the copy, if there is one.
    pub async fn give_up(&self, log: &LogId) -> Option<Rc<Shelf>> {
        self.given_up.borrow_mut().insert(*log);
        let _turn = self.turns.lock(log).await;
        self.release(log).await;
        self.shelf_of(log)
    }

    /// Takes requests of a log's primary again, after this peer has closed the log or could not take it over.
    pub fn resume(&self, log: &LogId) {
        self.given_up.borrow_mut().remove(log);
    }

    /// Waits until a primary may be lost whose logs this peer is to take over by itself; returns these logs.  A primary that
    /// is heard of again before they are [looked at again](Self::is_due) is not.
    pub async fn due(&self) -> Vec<LogId> {
        self.promises.due().await
    }

    /// Returns whether the primary of a log that this peer is to take over by itself has let its lease run out.
    pub fn is_due(&self, log: &LogId) -> bool {
        self.promises.is_due(log)
    }

    /// Returns the copies whose primary has not been heard of since this process has started.
    pub fn unheard(&self) -> Vec<LogId> {
        let ids = self.shelves.iter().flat_map(|replicas| replicas.shelf.ids());
        ids.filter(|log| !self.promises.is_known(log)).collect()
    }

    /// Expects the primary of a log to be heard of again before this peer takes it over by itself.
    pub fn dismiss(&self, log: &LogId) {
        self.promises.forget(log);
    }

    /// Closes this peer's copy of a log, once nothing is in flight: it takes nothing more from a primary until it is opened
    /// again.
    pub async fn release(&self, log: &LogId) {
        let copy = self.open.borrow_mut().remove(log);
        if let Some(copy) = copy {
            copy.close().await;
        }
    }
}

fn refuse(error: &Error) -> ReplicaAnswer {
    match error.kind() {
        ErrorKind::NotFound => ReplicaAnswer::Refused(AppendRefused::CopyLost),
        _ => ReplicaAnswer::Failed(error.to_string()),
    }
}
