//! Attachment of a log that has members: its record, and how this peer becomes its primary.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::Connection;
use forebay_reactor::sync::Semaphore;

use super::LogKeeper;
use crate::format::LogId;
use crate::options::LogOwner;
use crate::record::{LogRecord, RecordedLog};
use crate::replication::{LogMembers, MemberKeeper, PeerId, PrimarySet, RecordChange};
use crate::shelf::{Shelf, id_text};

/// Access to other peers, on behalf of logs that have members.
pub trait PeerAccess {
    /// Returns this peer.
    fn own(&self) -> PeerId;

    /// Returns the connection to a peer, if there is one.
    fn connection(&self, peer: PeerId) -> Option<Connection>;

    /// Closes this peer's copy of a log of another primary: nothing is taken from that one any more. Returns the log device
    /// that has the copy; `None` if there is no such copy.
    ///
    /// # Errors
    /// Errors of the log device.
    fn release_copy(&self, log: LogId) -> LocalFuture<Result<Option<Rc<Shelf>>>>;
}

/// Record of one log that has members.
pub(super) struct RecordMembers<K: LogKeeper> {
    pub(super) keeper: Rc<K>,
    pub(super) peers: Rc<dyn PeerAccess>,
    pub(super) id: LogId,
    pub(super) place: K::Place,
    pub(super) record_turn: Semaphore,
}

impl<K: LogKeeper> RecordMembers<K> {
    /// Returns the members in a record, if it names the log.
    fn members(record: LogRecord<K::Place>, id: &LogId) -> Option<LogMembers> {
        record.log.filter(|log| log.id == *id).and_then(|log| log.members)
    }

    async fn change(keeper: &K, id: &LogId, from: &LogMembers, to: LogMembers) -> Result<RecordChange> {
        let record = keeper.load().await?;
        let named = record.log.clone().filter(|log| log.id == *id);
        let Some(log) = named.filter(|log| log.members.as_ref() == Some(from)) else {
            return Ok(RecordChange::Other(Self::members(record, id)));
        };
        let next = LogRecord { epoch: to.epoch(), log: Some(RecordedLog { members: Some(to), ..log }) };
        match keeper.replace(record, next).await? {
            true => Ok(RecordChange::Changed),
            false => Ok(RecordChange::Other(Self::members(keeper.load().await?, id))),
        }
    }
}

impl<K: LogKeeper> MemberKeeper for RecordMembers<K> {
    fn own(&self) -> PeerId {
        self.peers.own()
    }

    fn client(&self) -> String {
        self.keeper.client()
    }

    fn load(&self) -> LocalFuture<Result<Option<LogMembers>>> {
        let (keeper, id) = (self.keeper.clone(), self.id);
        Box::pin(async move { Ok(Self::members(keeper.load().await?, &id)) })
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        self.keeper.fence(client)
    }

    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>> {
        let (keeper, id, turn) = (self.keeper.clone(), self.id, self.record_turn.clone());
        Box::pin(async move {
            let _turn = turn.acquire(1).await;
            Self::change(&keeper, &id, &from, to).await
        })
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        self.peers.connection(peer)
    }

    fn wanted(&self) -> Vec<PeerId> {
        self.keeper.wanted(&self.place)
    }
}

/// Owner of a log that has members, at its primary.
pub(super) struct MembersOwner<K: LogKeeper> {
    pub(super) keeper: Rc<K>,
    pub(super) id: LogId,
    pub(super) set: Rc<PrimarySet>,
    pub(super) lock: Rc<RefCell<Option<K::Lock>>>,
    pub(super) record_turn: Semaphore,
}

impl<K: LogKeeper> LogOwner for MembersOwner<K> {
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        let (keeper, set, lock) = (self.keeper.clone(), self.set.clone(), self.lock.clone());
        Some(Box::pin(async move {
            if lock.borrow().is_none() {
                let locked = keeper.lock().await?;
                lock.replace(Some(locked));
            }
            set.ready().await
        }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        let (keeper, id, set, turn) = (self.keeper.clone(), self.id, self.set.clone(), self.record_turn.clone());
        Box::pin(async move {
            let _turn = turn.acquire(1).await;
            let ours = set.record();
            let record = keeper.load().await?;
            let epoch = record.epoch;
            let named = record.log.as_ref().filter(|log| log.id == id).and_then(|log| log.members.as_ref());
            match named {
                Some(members) if members.term() == ours.term() => {
                    match keeper.replace(record, LogRecord::released(epoch)).await? {
                        true => Ok(()),
                        false => Err(Error::new(ErrorKind::Busy, "the record of the write log has changed meanwhile")),
                    }
                }
                // An earlier attempt succeeded although it reported an error.
                None if record.log.is_none() && epoch > ours.epoch() => Ok(()),
                _ => {
                    let text = format!(
                        "the record of {} no longer names this peer as the primary of log {}",
                        keeper.volume_name(),
                        id_text(&id)
                    );
                    Err(Error::new(ErrorKind::Fenced, text))
                }
            }
        })
    }
}
