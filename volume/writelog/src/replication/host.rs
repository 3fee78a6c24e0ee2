//! Copies that this peer holds of other peers' logs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::{KeyedLock, join_all};
use forebay_reactor::{Buf, sleep, spawn};

use super::AppendRefused;
use super::hello::ReplicaOffer;
use super::open_copy::ReplicaCopy;
use super::promises::{LeaseClock, LeasePromises};
use super::wire::{
    KIND_ANSWER, KIND_GROUP, KIND_GROUP_ANSWER, KIND_REQUEST, ReplicaAction, ReplicaAnswer, ReplicaRequest,
    decode_group, encode_answers,
};
use crate::format::{LogId, MediumKind};
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
        Self::with_clock(shelves, LeaseClock::default())
    }

    /// Serves copies on these log devices, with this clock for promises.
    pub fn with_clock(shelves: Vec<ReplicaShelf>, clock: LeaseClock) -> Rc<Self> {
        Rc::new(Self {
            shelves,
            open: RefCell::default(),
            given_up: RefCell::default(),
            turns: KeyedLock::default(),
            promises: LeasePromises::new(clock),
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

    /// Handles a message that is a request of a log's primary, or several; returns false if it is something else.
    pub fn handle(self: &Rc<Self>, connection: &Connection, mut message: Message) -> bool {
        let data = std::mem::take(&mut message.data);
        let front = message.front.to_vec();
        let answer: LocalFuture<Message> = match message.kind {
            KIND_REQUEST => {
                let answer = match ReplicaRequest::decode(&front) {
                    Ok(request) => self.begin(connection, request, data),
                    Err(error) => failed(&error),
                };
                Box::pin(async move {
                    let (answer, data) = answer.await;
                    message.reply(KIND_ANSWER).front(Buf::copy_of(&answer.encode())).data(data)
                })
            }
            KIND_GROUP => match decode_group(&front, data.len()) {
                Ok(requests) => {
                    let answers = self.begin_group(connection, requests, data);
                    Box::pin(async move {
                        message.reply(KIND_GROUP_ANSWER).front(Buf::copy_of(&encode_answers(&answers.await)))
                    })
                }
                Err(error) => {
                    Self::refuse(connection, &message, &error.to_string());
                    return true;
                }
            },
            _ => return false,
        };
        let connection = connection.clone();
        drop(spawn(async move {
            // The primary asks again if the connection has ended.
            let _ = connection.send(answer.await).await;
        }));
        true
    }

    /// Begins with a request; appends take their place at once, in the order of the messages.
    fn begin(
        self: &Rc<Self>,
        connection: &Connection,
        request: ReplicaRequest,
        data: BufList,
    ) -> LocalFuture<(ReplicaAnswer, BufList)> {
        let ReplicaRequest { log, term, action } = request;
        let is_of_copy = matches!(
            action,
            ReplicaAction::Append { .. }
                | ReplicaAction::AppendPlaced { .. }
                | ReplicaAction::OpenWindow
                | ReplicaAction::Read(_)
        );
        let Some(copy) = self.copy(&log) else {
            if is_of_copy {
                return without_data(Box::pin(async { ReplicaAnswer::Refused(AppendRefused::NotAdopted) }));
            }
            let host = self.clone();
            return without_data(Box::pin(async move { host.run(ReplicaRequest { log, term, action }).await }));
        };
        match action {
            ReplicaAction::Append { durable } => without_data(copy.append(term, durable, data, None)),
            ReplicaAction::AppendPlaced { durable, window } => {
                without_data(copy.append(term, durable, data, Some(window)))
            }
            ReplicaAction::OpenWindow => {
                let opened = copy.open_window(term, connection);
                without_data(Box::pin(async move { opened }))
            }
            ReplicaAction::Read(entry) => copy.read(term, entry),
            action => {
                let host = self.clone();
                without_data(Box::pin(async move { host.run(ReplicaRequest { log, term, action }).await }))
            }
        }
    }

    /// Begins with the requests of a message.  Several appends are made durable together.
    fn begin_group(
        self: &Rc<Self>,
        connection: &Connection,
        requests: Vec<(ReplicaRequest, usize)>,
        data: BufList,
    ) -> LocalFuture<Vec<ReplicaAnswer>> {
        let mut requests = requests;
        let several = requests.iter_mut().filter_map(|(request, _)| to_be_durable(&mut request.action)).count() > 1;
        let mut at = 0;
        let mut synced = Vec::with_capacity(requests.len());
        let mut work = Vec::with_capacity(requests.len());
        for (mut request, len) in requests {
            let copy = self.copy(&request.log);
            let later = to_be_durable(&mut request.action).filter(|_| several);
            synced.push(copy.filter(|_| later.is_some()).map(|copy| copy.in_use()));
            if let Some(durable) = later {
                *durable = false;
            }
            work.push(self.begin(connection, request, data.slice(at..at + len)));
            at += len;
        }
        Box::pin(async move {
            let answers = join_all(work).await.into_iter().map(|(answer, _)| answer);
            let syncs = answers.zip(synced).map(|(answer, used)| -> LocalFuture<ReplicaAnswer> {
                Box::pin(async move {
                    match used {
                        Some(used) if matches!(answer, ReplicaAnswer::Done(_)) => used.copy().sync_appended().await,
                        _ => answer,
                    }
                })
            });
            join_all(syncs).await
        })
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
            ReplicaAction::Create { volume, name, size, unit, epoch, in_memory } => {
                let _turn = self.turns.lock(&log).await;
                let created = self.create(&log, term, (&volume, &name), (size, unit), (epoch, in_memory)).await;
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
        (epoch, in_memory): (u64, bool),
    ) -> Result<LogId> {
        self.require_newest(log, term, epoch).await?;
        self.release(log).await;
        self.discard_older(names.0, epoch).await;
        let mut reason = Error::new(ErrorKind::NoSpace, "this peer has no log device for copies of logs");
        for ReplicaShelf { shelf, quota } in &self.shelves {
            if shelf.medium() == MediumKind::Dram && !in_memory {
                // As a complete member, it would be weaker than the medium that the operator has chosen.
                let text = format!("{}: no copy in memory of a log that is not in memory itself", shelf.path());
                reason = Error::new(ErrorKind::Unsupported, text);
                continue;
            }
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

    /// Discards this peer's copy of a log that the log's record names no more, unless it is another copy by now, or this peer
    /// opens the log.  Returns whether it was discarded.
    ///
    /// # Errors
    /// Errors of the log device.
    pub async fn discard_unnamed(&self, log: &LogId, copy: LogId) -> Result<bool> {
        let _turn = self.turns.lock(log).await;
        let Some(shelf) = self.shelf_of(log).filter(|_| !self.is_given_up(log)) else { return Ok(false) };
        if shelf.copy_of(log).await?.0 != copy {
            return Ok(false);
        }
        self.release(log).await;
        self.promises.forget(log);
        shelf.discard(log).await.map(|()| true)
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

    /// Returns whether the lease of a log's primary has run out, as far as this peer knows.
    pub fn is_silent(&self, log: &LogId, lease: Duration) -> bool {
        self.promises.remaining(log, lease).is_zero()
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

/// Returns the flag of an append whose answer waits until it is durable.
fn to_be_durable(action: &mut ReplicaAction) -> Option<&mut bool> {
    match action {
        ReplicaAction::Append { durable } | ReplicaAction::AppendPlaced { durable, .. } => {
            Some(durable).filter(|durable| **durable)
        }
        _ => None,
    }
}

fn without_data(answer: LocalFuture<ReplicaAnswer>) -> LocalFuture<(ReplicaAnswer, BufList)> {
    Box::pin(async move { (answer.await, BufList::new()) })
}

fn failed(error: &dyn std::fmt::Display) -> LocalFuture<(ReplicaAnswer, BufList)> {
    let answer = ReplicaAnswer::Failed(error.to_string());
    without_data(Box::pin(async move { answer }))
}

fn refuse(error: &Error) -> ReplicaAnswer {
    match error.kind() {
        ErrorKind::NotFound => ReplicaAnswer::Refused(AppendRefused::CopyLost),
        _ => ReplicaAnswer::Failed(error.to_string()),
    }
}
