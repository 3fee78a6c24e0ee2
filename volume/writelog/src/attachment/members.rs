//! Attachment of a log that has members: its record, and how this peer becomes its primary.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::Connection;
use forebay_reactor::spawn;
use forebay_reactor::sync::Semaphore;

use super::{LogAttachment, LogKeeper};
use crate::format::LogId;
use crate::options::LogOwner;
use crate::record::{LogRecord, RecordedLog};
use crate::replication::{LogMembers, MemberKeeper, PeerId, PrimarySet, RecordChange, ReplicaPolicy, RequestGroups};
use crate::shelf::{Shelf, id_text};

/// Access to other peers, on behalf of logs that have members.
pub trait PeerAccess {
    /// Returns this peer.
    fn own(&self) -> PeerId;

    /// Returns the connection to a peer, if there is one.
    fn connection(&self, peer: PeerId) -> Option<Connection>;

    /// Returns what sends requests of several logs to a peer in one message.
    fn groups(&self) -> Option<Rc<RequestGroups>> {
        None
    }

    /// Returns the log device that has this peer's copy of a log, which may be open.
    fn find_copy(&self, _log: LogId) -> Option<Rc<Shelf>> {
        None
    }

    /// Closes this peer's copy of a log of another primary: nothing is taken from that one until
    /// [`resume_copy`](Self::resume_copy). Returns the log device that has the copy; `None` if there is no such copy.
    ///
    /// # Errors
    /// Errors of the log device.
    fn release_copy(&self, log: LogId) -> LocalFuture<Result<Option<Rc<Shelf>>>>;

    /// Waits until this peer has kept its promise to the primary of a log, whose lease has this length, not to take over.
    fn promise_over(&self, log: LogId, lease: Duration) -> LocalFuture<()>;

    /// Takes what a primary of the log sends again: this peer does not have the log open any more.
    fn resume_copy(&self, log: LogId);
}

/// Log that this peer has open, or opens, as its primary: nothing is taken from a former primary meanwhile.
pub(super) struct ServedCopy {
    peers: Rc<dyn PeerAccess>,
    id: LogId,
}

impl ServedCopy {
    /// Closes this peer's copy; returns the log device that has it, if one for copies does.
    pub(super) async fn release(peers: Rc<dyn PeerAccess>, id: LogId) -> Result<(Self, Option<Rc<Shelf>>)> {
        let served = Self { peers, id };
        let shelf = served.peers.release_copy(id).await?;
        Ok((served, shelf))
    }
}

impl Drop for ServedCopy {
    fn drop(&mut self) {
        self.peers.resume_copy(self.id);
    }
}

/// Client in the record of a log that was closed: nobody has to be fenced.
const NOBODY: &str = "";

/// Members of an open log, at its primary.
pub(super) struct AttachedMembers<K: LogKeeper> {
    pub(super) set: Rc<PrimarySet>,
    pub(super) record: Rc<RecordMembers<K>>,
    /// Let go of last, when the log has been closed.
    pub(super) _served: ServedCopy,
}

impl<K: LogKeeper> AttachedMembers<K> {
    /// Takes a log that has members into use.
    pub(super) fn new(set: Rc<PrimarySet>, record: Rc<RecordMembers<K>>, served: ServedCopy) -> Self {
        let (followed, peers, id) = (set.clone(), record.peers.clone(), record.id);
        drop(spawn(async move {
            followed.ended().await;
            // A peer that has taken the log over may give this one a copy again.
            if followed.is_fenced() {
                peers.resume_copy(id);
            }
        }));
        Self { set, record, _served: served }
    }

    /// Ends the use of a log that was closed as it is.  Nothing of this client is on its way to the backend any more, so
    /// that a takeover need not fence it: unless a request has failed, which may still be on its way.
    pub(super) async fn closed(&self, any_failed: bool) {
        let (record, set) = (&self.record, &self.set);
        if set.is_fenced() {
            self.discard_stale().await;
            return;
        }
        if any_failed {
            return;
        }
        let now = set.record();
        let changed = record.clone().change(now.clone(), now.closed(NOBODY.into())).await;
        if !matches!(changed, Ok(RecordChange::Changed)) {
            tracing::debug!(log = id_text(&record.id), ?changed, "a closed write log keeps its client in the record");
        }
    }

    /// Discards this peer's copy of a log that another one has taken over: the record does not name the copy any more.
    async fn discard_stale(&self) {
        let RecordMembers { keeper, peers, id, shelf, .. } = &*self.record;
        let (own, copy) = (peers.own(), self.set.record().copy(peers.own()));
        let named = match keeper.load().await {
            Ok(record) => RecordMembers::<K>::members(record, id).and_then(|members| members.copy(own)),
            Err(_) => return,
        };
        if named.is_some() && named == copy {
            return;
        }
        match shelf.discard(id).await {
            Ok(()) => tracing::info!(log = id_text(id), path = shelf.path(), "discarded a copy that was taken over"),
            Err(error) => tracing::debug!(log = id_text(id), %error, "a copy that was taken over is kept"),
        }
    }
}

/// Record of one log that has members.
pub(super) struct RecordMembers<K: LogKeeper> {
    pub(super) keeper: Rc<K>,
    pub(super) peers: Rc<dyn PeerAccess>,
    pub(super) id: LogId,
    /// Log device of this peer's copy.
    pub(super) shelf: Rc<Shelf>,
    /// Location and settings, as the record has them.
    pub(super) place: RefCell<K::Place>,
    pub(super) record_turn: Semaphore,
    /// Term that a takeover was decided about: it takes over from no other primary.
    pub(super) expected: Option<u64>,
}

impl<K: LogKeeper> RecordMembers<K> {
    /// Returns the members in a record, if it names the log.
    fn members(record: LogRecord<K::Place>, id: &LogId) -> Option<LogMembers> {
        record.log.filter(|log| log.id == *id).and_then(|log| log.members)
    }

    /// Changes the members in the record.  With the primary the location changes: it is that of the primary's own copy.
    async fn change(self: Rc<Self>, from: LogMembers, to: LogMembers) -> Result<RecordChange> {
        let _turn = self.record_turn.acquire(1).await;
        let (keeper, id) = (&self.keeper, &self.id);
        let record = keeper.load().await?;
        let named = record.log.clone().filter(|log| log.id == *id);
        let Some(log) = named.filter(|log| log.members.as_ref() == Some(&from)) else {
            return Ok(RecordChange::Other(Self::members(record, id)));
        };
        let place = match from.primary() == to.primary() {
            true => log.place,
            false => keeper.moved(&log.place, &self.shelf, from.primary()),
        };
        let changed = RecordedLog { id: *id, place: place.clone(), members: Some(to.clone()) };
        let next = LogRecord { epoch: to.epoch(), log: Some(changed) };
        match keeper.replace(record, next).await? {
            true => {
                self.place.replace(place);
                Ok(RecordChange::Changed)
            }
            false => Ok(RecordChange::Other(Self::members(keeper.load().await?, id))),
        }
    }
}

/// Record of a log's members, as replication uses it.
pub(super) struct SharedRecord<K: LogKeeper>(pub(super) Rc<RecordMembers<K>>);

impl<K: LogKeeper> MemberKeeper for SharedRecord<K> {
    fn own(&self) -> PeerId {
        self.0.peers.own()
    }

    fn client(&self) -> String {
        self.0.keeper.client()
    }

    fn load(&self) -> LocalFuture<Result<Option<LogMembers>>> {
        let own = self.0.clone();
        Box::pin(async move {
            let record = own.keeper.load().await?;
            if let Some(log) = record.log.as_ref().filter(|log| log.id == own.id) {
                own.place.replace(log.place.clone());
            }
            let members = RecordMembers::<K>::members(record, &own.id);
            if let (Some(expected), Some(members)) = (own.expected, &members)
                && members.term() != expected
                && members.primary() != own.peers.own()
            {
                let text = format!("peer {} has taken the write log over meanwhile", members.primary());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            Ok(members)
        })
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        self.0.keeper.fence(client)
    }

    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>> {
        Box::pin(self.0.clone().change(from, to))
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        self.0.peers.connection(peer)
    }

    fn groups(&self) -> Option<Rc<RequestGroups>> {
        self.0.peers.groups()
    }

    fn wanted(&self) -> Vec<PeerId> {
        self.0.keeper.wanted(&self.0.place.borrow())
    }

    fn policy(&self) -> ReplicaPolicy {
        self.0.keeper.policy(&self.0.place.borrow())
    }

    fn promise_over(&self) -> LocalFuture<()> {
        self.0.peers.promise_over(self.0.id, self.policy().lease)
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
        let (keeper, set, lock, id) = (self.keeper.clone(), self.set.clone(), self.lock.clone(), self.id);
        Some(Box::pin(async move {
            if lock.borrow().is_none() {
                let locked = keeper.lock().await?;
                // Another client may have held the lock, and discarded the log.
                let members = RecordMembers::<K>::members(keeper.load().await?, &id);
                if members.is_none_or(|members| members.term() != set.record().term()) {
                    let text = format!("the record of {} no longer names this primary", keeper.volume_name());
                    let error = Error::new(ErrorKind::Fenced, text);
                    set.stop(error.clone());
                    return Err(error);
                }
                lock.replace(Some(locked));
            }
            set.ready().await
        }))
    }

    fn permit_read(&self) -> Option<LocalFuture<Result<()>>> {
        self.set.permit_read()
    }

    fn permit_acknowledgement(&self) -> Option<LocalFuture<Result<()>>> {
        self.set.permit_acknowledgement()
    }

    fn unusable(&self) -> Option<LocalFuture<Error>> {
        self.set.mirror_lost()
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
                        true => {
                            set.release();
                            if set.has_lost_local() || set.has_lost_mirror() {
                                drop(spawn(async move { set.discard_copies().await }));
                            }
                            Ok(())
                        }
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

/// Returns the error of opening a log in memory at a primary whose process was restarted.
pub(super) fn ended_copy(volume: &str, members: Option<&LogMembers>) -> Error {
    let others = members.into_iter().flat_map(|members| members.complete().filter(|peer| *peer != members.primary()));
    let others: Vec<String> = others.map(|peer| peer.to_string()).collect();
    let left = match others.is_empty() {
        true => "no other member is complete: writes that were not written back are lost".to_owned(),
        false => format!("complete copies, which may take it over: {}", others.join(", ")),
    };
    let text = format!("the copy here of the write log of {volume} was in memory, and ended with its process; {left}");
    Error::new(ErrorKind::NotFound, text)
}

impl<K: LogKeeper> LogAttachment<K> {
    /// Waits until a new log in memory has its first replica; without one, the volume goes on without a log.
    pub(super) async fn await_mirror(&self) -> Result<()> {
        let Some(set) = self.members() else { return Ok(()) };
        let Err(error) = set.mirrored().await else { return Ok(()) };
        if let Some(log) = self.log() {
            log.disable(error.clone()).await?;
            drop(log);
            self.remove_disabled().await?;
        }
        Err(error)
    }
}
