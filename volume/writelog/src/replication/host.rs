//! Copies that this peer holds of other peers' logs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::KeyedLock;
use forebay_reactor::{Buf, spawn};

use super::AppendRefused;
use super::open_copy::ReplicaCopy;
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
    /// One at a time creates, opens or discards a copy of a log.
    turns: KeyedLock<LogId>,
}

impl ReplicaHost {
    /// Serves copies on these log devices.
    pub fn new(shelves: Vec<ReplicaShelf>) -> Rc<Self> {
        Rc::new(Self { shelves, open: RefCell::default(), turns: KeyedLock::default() })
    }

    /// Handles a message that is a request of a log's primary; returns false if it is something else.
    pub fn handle(self: &Rc<Self>, connection: &Connection, mut message: Message) -> bool {
        if message.kind != KIND_REQUEST {
            return false;
        }
        let data = std::mem::take(&mut message.data);
        let answer: LocalFuture<ReplicaAnswer> = match ReplicaRequest::decode(&message.front.to_vec()) {
            // Appends take their place in the order of the messages.
            Ok(ReplicaRequest { log, term, action: ReplicaAction::Append { durable } }) => match self.copy(&log) {
                Some(copy) => copy.append(term, durable, data),
                None => Box::pin(async { ReplicaAnswer::Refused(AppendRefused::NotAdopted) }),
            },
            Ok(request) => {
                let host = self.clone();
                Box::pin(async move { host.run(request).await })
            }
            Err(error) => Box::pin(async move { ReplicaAnswer::Failed(error.to_string()) }),
        };
        let connection = connection.clone();
        drop(spawn(async move {
            let answer = answer.await.encode();
            // The primary asks again if the connection has ended.
            let _ = connection.send(message.reply(KIND_ANSWER).front(Buf::copy_of(&answer))).await;
        }));
        true
    }

    fn copy(&self, log: &LogId) -> Option<Rc<ReplicaCopy>> {
        self.open.borrow().get(log).cloned()
    }

    async fn run(&self, request: ReplicaRequest) -> ReplicaAnswer {
        let ReplicaRequest { log, term, action } = request;
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
            ReplicaAction::Discard => {
                let _turn = self.turns.lock(&log).await;
                match self.discard(&log, term).await {
                    Ok(()) => ReplicaAnswer::Done(super::wire::CopyProgress::default()),
                    Err(error) => refuse(&error),
                }
            }
            ReplicaAction::Append { .. } => ReplicaAnswer::Failed("appends take their place at once".into()),
        }
    }

    fn shelf_of(&self, log: &LogId) -> Option<Rc<Shelf>> {
        self.shelves.iter().map(|found| &found.shelf).find(|shelf| shelf.ids().contains(log)).cloned()
    }

    /// Opens this peer's copy of a log, if it has one.
    async fn open_copy(&self, log: &LogId) -> Result<Option<Rc<ReplicaCopy>>> {
        if let Some(copy) = self.copy(log) {
            return Ok(Some(copy));
        }
        let Some(shelf) = self.shelf_of(log) else { return Ok(None) };
        let copy = Rc::new(ReplicaCopy::new(shelf.open_copy(log, None).await?));
        self.open.borrow_mut().insert(*log, copy.clone());
        Ok(Some(copy))
    }

    /// Refuses what a primary asks for that this peer's copy knows to be superseded.
    async fn require_newest(&self, log: &LogId, term: u32) -> Result<()> {
        let Some(copy) = self.open_copy(log).await? else { return Ok(()) };
        if copy.term() > u64::from(term) {
            let text = format!("this peer's copy of the log follows the primary of term {}, not {term}", copy.term());
            return Err(Error::new(ErrorKind::Fenced, text));
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
        self.require_newest(log, term).await?;
        self.release(log).await;
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

    async fn discard(&self, log: &LogId, term: u32) -> Result<()> {
        self.require_newest(log, term).await?;
        self.release(log).await;
        let Some(shelf) = self.shelf_of(log) else { return Ok(()) };
        shelf.discard(log).await
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
