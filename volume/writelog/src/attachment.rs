//! Attachment of a log to a volume: from the record stored with the image to the device that hosts are served.
//!
//! ```text
//!             attach                     end: written back, recorded
//!  Without ------------> With(log) ---------------------------------> Without
//!     ^  \                  |  \
//!     |   \ record unknown  |   \ close
//!     |    v                v    v
//!     +-- Unusable <--------+-- Unusable
//!  settled by the record
//! ```
//!
//! | invariant | |
//! |---|---|
//! | A1 | while the record names a log, no request of this handle reaches the image but through that log |
//! | A2 | the record stops naming a log only when the image holds, durably, everything that the log acknowledged |
//! | A3 | a log acknowledges and writes back nothing until a record read under the image's lock still names the log |
//! | A4 | a handle that does not know what the record says serves nothing |

mod keeper;
mod members;
mod refusing;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, DataKey, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{spawn, timeout};

pub use self::keeper::{LogKeeper, PlaceChange};
pub use self::members::PeerAccess;
use self::members::{AttachedMembers, MembersOwner, RecordMembers, ServedCopy, SharedRecord, ended_copy};
use self::refusing::Refusing;
use crate::format::{LogId, MediumKind};
use crate::log::WriteLog;
use crate::mode::Mode;
use crate::options::LogOwner;
use crate::record::{LogRecord, RecordedLog, Standing};
use crate::replication::{
    LogMembers, LogOpening, MemberRecord, OpenedMembers, PrimarySet, ReplicationOptions, open_members, open_primary,
};
use crate::shelf::{Shelf, draw_id, id_text};

/// Owner of a log through the record that names it.
struct RecordOwner<K: LogKeeper> {
    keeper: Rc<K>,
    id: LogId,
    epoch: u64,
    lock: Rc<RefCell<Option<K::Lock>>>,
    record_turn: Semaphore,
}

impl<K: LogKeeper> RecordOwner<K> {
    /// Fails unless the record names this log.
    async fn verify(keeper: &K, id: LogId, epoch: u64) -> Result<()> {
        let record = keeper.load().await?;
        if record.standing(&id, epoch) == Standing::Current {
            return Ok(());
        }
        let text = format!(
            "the record of {} has epoch {} and no longer names log {}",
            keeper.volume_name(),
            record.epoch,
            id_text(&id)
        );
        Err(Error::new(ErrorKind::Fenced, text))
    }
}

impl<K: LogKeeper> LogOwner for RecordOwner<K> {
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        if self.lock.borrow().is_some() {
            return None;
        }
        let (keeper, id, epoch, lock) = (self.keeper.clone(), self.id, self.epoch, self.lock.clone());
        Some(Box::pin(async move {
            let locked = keeper.lock().await?;
            // Another client may have held the lock, and released the log.
            Self::verify(&keeper, id, epoch).await?;
            lock.replace(Some(locked));
            Ok(())
        }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        let (keeper, id, epoch, turn) = (self.keeper.clone(), self.id, self.epoch, self.record_turn.clone());
        Box::pin(async move {
            let _turn = turn.acquire(1).await;
            let record = keeper.load().await?;
            if record.standing(&id, epoch) == Standing::Released {
                // An earlier attempt succeeded although it reported an error.
                return keeper.store(record).await;
            }
            Self::verify(&keeper, id, epoch).await?;
            keeper.store(LogRecord::released(epoch)).await
        })
    }
}

enum Slot<K: LogKeeper> {
    /// No log in the record.
    Without,
    /// Open log that the record names.
    With { log: Rc<WriteLog>, recorded: RecordedLog<K::Place>, shelf: Rc<Shelf>, members: Option<AttachedMembers<K>> },
    /// Unusable: the record may name a log that is not open here.
    Unusable(Error),
}

/// Volume with the write log in front of it that its record names.
pub struct LogAttachment<K: LogKeeper> {
    keeper: Rc<K>,
    base: Rc<dyn BlockDevice>,
    slot: RefCell<Slot<K>>,
    /// Serializes changes of the log.
    turn: Semaphore,
    /// Set while the record is being read under the image's lock anyway.
    attaching: Cell<bool>,
    /// Serializes changes of the record, including those that the log initiates.
    record_turn: Semaphore,
}

impl<K: LogKeeper> LogAttachment<K> {
    /// Opens a volume with the log that its record names, if any.
    ///
    /// # Errors
    /// If the record cannot be read, or the log that it names cannot be opened.
    pub async fn open(keeper: Rc<K>, base: Rc<dyn BlockDevice>) -> Result<Self> {
        let attachment = Self::unsettled(keeper, base);
        attachment.reload().await?;
        Ok(attachment)
    }

    fn unsettled(keeper: Rc<K>, base: Rc<dyn BlockDevice>) -> Self {
        Self {
            keeper,
            base,
            slot: RefCell::new(Slot::Without),
            turn: Semaphore::new(1),
            attaching: Cell::new(false),
            record_turn: Semaphore::new(1),
        }
    }

    /// Returns the device that requests go to: the log; the image if there is no log; or a device that refuses
    /// everything if that is unknown.
    pub fn device(&self) -> Rc<dyn BlockDevice> {
        match &*self.slot.borrow() {
            Slot::Without => self.base.clone(),
            Slot::With { log, .. } => log.clone(),
            Slot::Unusable(error) => Rc::new(Refusing { base: self.base.clone(), error: error.clone() }),
        }
    }

    /// Returns the log, if one is open.
    pub fn log(&self) -> Option<Rc<WriteLog>> {
        match &*self.slot.borrow() {
            Slot::With { log, .. } => Some(log.clone()),
            Slot::Without | Slot::Unusable(_) => None,
        }
    }

    /// Returns the record's entry of the open log.
    pub fn recorded(&self) -> Option<RecordedLog<K::Place>> {
        match &*self.slot.borrow() {
            Slot::With { recorded, members: None, .. } => Some(recorded.clone()),
            Slot::With { recorded, members: Some(AttachedMembers { set, record, .. }), .. } => {
                Some(RecordedLog { id: recorded.id, place: record.place.borrow().clone(), members: Some(set.record()) })
            }
            Slot::Without | Slot::Unusable(_) => None,
        }
    }

    /// Recovers an unusable handle by re-reading the record.
    ///
    /// # Errors
    /// Errors of [`open`](Self::open).
    pub async fn settle(&self) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.settle_in_turn().await
    }

    /// Verifies, whenever the image's lock was acquired, that the record names no log unknown to this handle: another
    /// client may have attached one while it held the lock.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if the record names such a log; this handle then refuses all requests until
    /// [`settle`](Self::settle) succeeds.
    pub async fn check_record(&self) -> Result<()> {
        if self.attaching.get() || !matches!(&*self.slot.borrow(), Slot::Without) {
            return Ok(());
        }
        let record = self.keeper.load().await?;
        let Some(recorded) = record.log else { return Ok(()) };
        if !matches!(&*self.slot.borrow(), Slot::Without) {
            return Ok(());
        }
        let text = format!("another client has given {} a write log at {}", self.keeper.volume_name(), recorded.place);
        let error = Error::new(ErrorKind::Busy, text);
        self.slot.replace(Slot::Unusable(error.clone()));
        Err(error)
    }

    async fn settle_in_turn(&self) -> Result<()> {
        match &*self.slot.borrow() {
            Slot::Unusable(_) => {}
            Slot::Without | Slot::With { .. } => return Ok(()),
        }
        self.reload().await
    }

    /// Re-reads the record and opens the log that it names.
    async fn reload(&self) -> Result<()> {
        let record = self.keeper.load().await?;
        let slot = match record.log {
            None => Slot::Without,
            Some(recorded) => self.open_recorded(record.epoch, recorded, None).await?,
        };
        self.slot.replace(slot);
        Ok(())
    }

    async fn open_recorded(
        &self,
        epoch: u64,
        recorded: RecordedLog<K::Place>,
        lock: Option<K::Lock>,
    ) -> Result<Slot<K>> {
        if recorded.members.is_some() {
            return self.open_with_members(recorded, LogOpening::Again, lock).await;
        }
        let shelf = self.keeper.shelf(&recorded.place, false).await?;
        let (volume, key) = (self.keeper.volume_id(), self.keeper.key().await?);
        let opened = shelf.open_log_with_key(&recorded.id, &volume, epoch, key.as_ref()).await?;
        let owner = self.owner(recorded.id, epoch, lock);
        let log = WriteLog::new(self.base.clone(), opened, owner, self.keeper.options(&recorded.place));
        Ok(Slot::With { log, recorded, shelf, members: None })
    }

    /// Makes this peer the primary of a log that has members.
    async fn open_with_members(
        &self,
        recorded: RecordedLog<K::Place>,
        opening: LogOpening,
        lock: Option<K::Lock>,
    ) -> Result<Slot<K>> {
        let (keeper, id) = (&self.keeper, recorded.id);
        let peers = self.peers()?;
        let is_primary = recorded.members.as_ref().is_some_and(|members| members.primary() == peers.own());
        if !is_primary && opening == LogOpening::Again {
            let primary = recorded.members.as_ref().map_or_else(String::new, |members| members.primary().to_string());
            let text = format!("the write log of {} is served by peer {primary}", keeper.volume_name());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let key = keeper.key().await?;
        if let Some(shelf) = peers.find_copy(id) {
            // Nobody is fenced for an attempt that cannot succeed.
            shelf.check_key(&id, key.as_ref()).await?;
        }
        if let Some(members) = recorded.members.as_ref().filter(|_| !is_primary)
            && members.complete().any(|peer| peer == peers.own())
            && !members.client().is_empty()
        {
            // Until then, the primary must find a replica here: it would drop one that refuses its entries, and nobody would
            // serve the volume any more.
            keeper.fence(members.client()).await?;
        }
        let (served, copy) = ServedCopy::release(peers.clone(), id).await?;
        let shelf = match copy {
            Some(shelf) => shelf,
            None if is_primary => keeper.shelf(&recorded.place, false).await?,
            None => {
                let text = format!("this peer has no copy of the write log of {}", keeper.volume_name());
                return Err(Error::new(ErrorKind::Denied, text));
            }
        };
        if shelf.medium() == MediumKind::Dram && !shelf.ids().contains(&id) {
            return Err(ended_copy(&keeper.volume_name(), recorded.members.as_ref()));
        }
        let (volume, name) = (keeper.shared_id(), keeper.volume_name());
        let term = recorded.members.as_ref().map(LogMembers::term);
        let expected = term.filter(|_| opening == LogOpening::TakeOver);
        let record = self.record_members(peers, id, &recorded.place, &shelf, expected);
        let (shared, options) = (Rc::new(SharedRecord(record.clone())), ReplicationOptions::default());
        let options = (key.as_ref(), options);
        let opened = open_primary(&shelf, &id, (&volume, &name), opening, shared, options).await?;
        let place = record.place.borrow().clone();
        let (log, set) = self.front(opened, id, &place, lock);
        let recorded = RecordedLog { members: Some(set.record()), place, ..recorded };
        let members = Some(AttachedMembers::new(set, record, served));
        Ok(Slot::With { log, recorded, shelf, members })
    }

    fn peers(&self) -> Result<Rc<dyn PeerAccess>> {
        let text = || format!("the write log of {} has members, and this process no peers", self.keeper.volume_name());
        self.keeper.peers().ok_or_else(|| Error::new(ErrorKind::Unsupported, text()))
    }

    fn record_members(
        &self,
        peers: Rc<dyn PeerAccess>,
        id: LogId,
        place: &K::Place,
        shelf: &Rc<Shelf>,
        expected: Option<u64>,
    ) -> Rc<RecordMembers<K>> {
        let (keeper, record_turn) = (self.keeper.clone(), self.record_turn.clone());
        let place = RefCell::new(place.clone());
        Rc::new(RecordMembers { keeper, peers, id, shelf: shelf.clone(), place, record_turn, expected })
    }

    /// Puts an opened log that has members in front of the image.
    fn front(
        &self,
        opened: OpenedMembers,
        id: LogId,
        place: &K::Place,
        lock: Option<K::Lock>,
    ) -> (Rc<WriteLog>, Rc<PrimarySet>) {
        let OpenedMembers { log, set } = opened;
        let (keeper, lock) = (self.keeper.clone(), Rc::new(RefCell::new(lock)));
        let owner = MembersOwner { keeper, id, set: set.clone(), lock, record_turn: self.record_turn.clone() };
        let log = WriteLog::new(self.base.clone(), log, Rc::new(owner), self.keeper.options(place));
        (log, set)
    }

    /// Opens a volume whose log another peer serves, or did, and takes that log over: the former primary, which opened it in
    /// `term`, is fenced.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the record names no log that has members; [`ErrorKind::Busy`] if another peer has taken it
    /// over since `term`; errors of [`open_primary`].
    pub async fn take_over(keeper: Rc<K>, base: Rc<dyn BlockDevice>, term: u64) -> Result<Self> {
        let attachment = Self::unsettled(keeper, base);
        let record = attachment.keeper.load().await?;
        let Some(recorded) = record.log.filter(|log| log.members.is_some()) else {
            let text = format!("{} has no write log with members", attachment.keeper.volume_name());
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        if recorded.members.as_ref().is_some_and(|members| members.term() != term) {
            let text = format!("another peer has taken the write log of {} over", attachment.keeper.volume_name());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let slot = attachment.open_with_members(recorded, LogOpening::TakeOver, None).await?;
        attachment.slot.replace(slot);
        Ok(attachment)
    }

    fn owner(&self, id: LogId, epoch: u64, lock: Option<K::Lock>) -> Rc<RecordOwner<K>> {
        let (keeper, record_turn) = (self.keeper.clone(), self.record_turn.clone());
        Rc::new(RecordOwner { keeper, id, epoch, lock: Rc::new(RefCell::new(lock)), record_turn })
    }

    /// Attaches a log to the volume, unless it has that one already; changes only the limits if nothing else differs.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`] if the volume has another log; [`ErrorKind::Busy`] if its log is not in use, or another
    /// client holds the image's lock; errors of the log device and of the image, after which the volume has no log,
    /// or refuses all requests.
    pub async fn attach(&self, place: &K::Place) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.settle_in_turn().await?;
        if let Some(log) = self.log()
            && matches!(log.mode(), Mode::Off(_))
        {
            drop(log);
            self.remove_disabled().await?;
        }
        if self.log().is_none() {
            // From now on, no other client may write the image: the log acknowledges writes ahead of it.
            self.attaching.set(true);
            let lock = self.keeper.lock().await;
            self.attaching.set(false);
            let lock = lock?;
            let record = self.keeper.load().await?;
            match record.log {
                None => {
                    self.create(record.epoch, place, lock).await?;
                    return self.await_mirror().await;
                }
                Some(recorded) => {
                    // Another client has attached a log since the image was opened here.
                    match self.open_recorded(record.epoch, recorded, Some(lock)).await {
                        Ok(slot) => drop(self.slot.replace(slot)),
                        Err(error) => {
                            self.slot.replace(Slot::Unusable(error.clone()));
                            return Err(error);
                        }
                    }
                }
            }
        }
        self.adjust(place).await
    }

    /// Compares the attached log with the requested one, and applies changed limits.
    async fn adjust(&self, place: &K::Place) -> Result<()> {
        let (Some(log), Some(recorded)) = (self.log(), self.recorded()) else {
            return Err(Error::new(ErrorKind::Busy, "the write log is gone again"));
        };
        let check_in_use = || match log.mode().reason() {
            Some(reason) => {
                Err(Error::new(ErrorKind::Busy, format!("the write log is {}: {reason}", log.mode().name())))
            }
            None => Ok(()),
        };
        check_in_use()?;
        match self.keeper.compare(&recorded.place, place) {
            PlaceChange::Same => Ok(()),
            PlaceChange::Other => {
                Err(Error::new(ErrorKind::Exists, format!("there is a write log at {}", recorded.place)))
            }
            PlaceChange::Limits => {
                log.acquired().await?;
                // A log in use has not been released, and this does not wait for a release in progress.
                check_in_use()?;
                let _turn = self.record_turn.acquire(1).await;
                let LogRecord { epoch, log: named } = self.keeper.load().await?;
                // Never restore a record that has been cleared in the meantime.
                let Some(named) = named.filter(|named| named.id == recorded.id) else {
                    return Err(Error::new(ErrorKind::Busy, "the write log is being ended"));
                };
                let place = self.keeper.adjusted(&named.place, place);
                let changed = RecordedLog { place: place.clone(), ..named.clone() };
                let next = LogRecord { epoch, log: Some(changed.clone()) };
                match changed.members.is_some() {
                    false => self.keeper.store(next).await?,
                    true if self.keeper.replace(LogRecord { epoch, log: Some(named) }, next).await? => {}
                    true => return Err(Error::new(ErrorKind::Busy, "the record has been changed meanwhile")),
                }
                log.set_limits(self.keeper.options(&place).limits);
                if let Slot::With { recorded, members, .. } = &mut *self.slot.borrow_mut() {
                    *recorded = changed;
                    if let Some(AttachedMembers { set, record, .. }) = members {
                        record.place.replace(place);
                        set.wanted_changed();
                    }
                }
                Ok(())
            }
        }
    }

    async fn create(&self, epoch: u64, place: &K::Place, lock: K::Lock) -> Result<()> {
        let keeper = &self.keeper;
        let with_members = !keeper.wanted(place).is_empty();
        let volume = if with_members { keeper.shared_id() } else { keeper.volume_id() };
        let shelf = keeper.shelf(place, true).await?;
        for volume in [keeper.volume_id(), keeper.shared_id()] {
            if let Err(error) = shelf.discard_older(&volume, epoch).await {
                tracing::warn!(%place, %error, "cannot free the space of a released write log");
            }
        }
        let (name, size, copy) = (keeper.volume_name(), keeper.log_size(place), draw_id());
        let (names, key) = ((volume.as_str(), name.as_str()), keeper.key().await?);
        let key = key.as_ref();
        let id = match with_members {
            false => shelf.create_with_key(names, size, epoch, key).await?,
            true => shelf.create_with_members_and_key(names, size, epoch, copy, key).await?,
        };
        let opened = match with_members {
            false => match shelf.open_log_with_key(&id, &volume, epoch, key).await {
                Ok(opened) => {
                    let owner = self.owner(id, epoch, Some(lock));
                    Ok((WriteLog::new(self.base.clone(), opened, owner, keeper.options(place)), None))
                }
                Err(error) => Err(error),
            },
            true => {
                let created = self.create_with_members(&shelf, (id, copy), epoch + 1, place, (lock, key)).await;
                created.map(|(log, members)| (log, Some(members)))
            }
        };
        let (log, attached) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(discarded(&shelf, &id, error).await),
        };
        let past = log.changes_past();
        let members = attached.as_ref().map(|attached| attached.set.record());
        let epoch = members.as_ref().map_or(epoch, LogMembers::epoch);
        let recorded = RecordedLog { id, place: place.clone(), members };
        if let Err(error) = keeper.store(LogRecord { epoch, log: Some(recorded.clone()) }).await {
            // The record may have been stored despite the error; storing a later epoch invalidates it.
            if let Err(undo) = keeper.store(LogRecord::released(epoch)).await {
                let text = format!("the record of its write log could not be written ({error}), nor corrected: {undo}");
                self.slot.replace(Slot::Unusable(Error::new(undo.kind(), text)));
                return Err(error);
            }
            drop(past);
            log.gone().await;
            return Err(discarded(&shelf, &id, error).await);
        }
        if let Some(AttachedMembers { set, .. }) = &attached {
            set.start();
        }
        self.slot.replace(Slot::With { log, recorded, shelf, members: attached });
        // Changes in flight past the log must complete before the log writes back to the same ranges.
        let keeper = self.keeper.clone();
        drop(spawn(async move {
            keeper.drain_changes().await;
            drop(past);
        }));
        Ok(())
    }

    /// Opens a new log whose only member is this peer; the record is not stored yet.
    async fn create_with_members(
        &self,
        shelf: &Rc<Shelf>,
        (id, copy): (LogId, LogId),
        epoch: u64,
        place: &K::Place,
        (lock, key): (K::Lock, Option<&DataKey>),
    ) -> Result<(Rc<WriteLog>, AttachedMembers<K>)> {
        let peers = self.peers()?;
        let (served, _) = ServedCopy::release(peers.clone(), id).await?;
        let members = MemberRecord::created_in(epoch, peers.own(), copy, self.keeper.client());
        let record = self.record_members(peers, id, place, shelf, None);
        let (shared, options) = (Rc::new(SharedRecord(record.clone())), ReplicationOptions::default());
        let (volume, name) = (self.keeper.shared_id(), self.keeper.volume_name());
        let opened = open_members(shelf, &id, (&volume, &name), members, shared, (key, options)).await?;
        let (log, set) = self.front(opened, id, place, Some(lock));
        Ok((log, AttachedMembers::new(set, record, served)))
    }

    /// Returns the members of the log, where it is served here and has some.
    pub fn members(&self) -> Option<Rc<PrimarySet>> {
        match &*self.slot.borrow() {
            Slot::With { members, .. } => members.as_ref().map(|members| members.set.clone()),
            Slot::Without | Slot::Unusable(_) => None,
        }
    }

    /// Drains the log and detaches it, even while the volume is in use: requests go directly to the image from then
    /// on. Stops waiting if no write-back progress is made for `patience`.
    ///
    /// # Errors
    /// If the log cannot be drained (it stays attached, and write-back continues), or has failed.
    pub async fn end(&self, patience: Duration) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.settle_in_turn().await?;
        let Some(log) = self.log() else { return Ok(()) };
        if log.mode().is_on() || matches!(log.mode(), Mode::Acquiring) {
            loop {
                let before = log.progress();
                match timeout(patience, log.drain()).await {
                    Ok(drained) => break drained?,
                    Err(_) if log.progress() != before => {}
                    Err(_) => return Err(stalled(&log, patience)),
                }
            }
        }
        let reason = Error::new(ErrorKind::ShuttingDown, "the volume is detached");
        match timeout(patience, log.disable(reason)).await {
            Ok(disabled) => disabled?,
            Err(_) => return Err(stalled(&log, patience)),
        }
        drop(log);
        self.remove_disabled().await
    }

    /// Frees the space of a log that the record no longer names.
    async fn remove_disabled(&self) -> Result<()> {
        let Slot::With { log, recorded, shelf, members } = self.slot.replace(Slot::Without) else { return Ok(()) };
        // Requests that came through the log complete first.
        log.gone().await;
        free_disabled(&shelf, &recorded).await;
        if let Some(AttachedMembers { set, .. }) = &members {
            set.discard_copies().await;
        }
        Ok(())
    }

    /// Closes the log with its contents, which are used again when the volume is next opened; a disabled log is
    /// discarded. This handle refuses all requests from then on.
    ///
    /// # Errors
    /// If not all acknowledged writes could be made durable.
    pub async fn close(&self) -> Result<()> {
        // Acknowledged writes become durable even while a concurrent change of the log holds the lock and waits.
        if let Some(log) = self.log() {
            log.stop().await;
        }
        let _turn = self.turn.acquire(1).await;
        let closed = Error::new(ErrorKind::ShuttingDown, "the volume is closed");
        let before = self.slot.replace(Slot::Unusable(closed));
        let Slot::With { log, recorded, shelf, members } = before else {
            if matches!(before, Slot::Without) {
                self.slot.replace(before);
            }
            return Ok(());
        };
        let result = log.close(false).await;
        let (mode, any_failed) = (log.mode(), log.stats().backend_errors > 0);
        log.gone().await;
        let released = match mode {
            Mode::Off(_) => true,
            // The release may have reached the record.
            Mode::TurningOff(_) => self.is_released(&recorded.id).await,
            Mode::Acquiring | Mode::On | Mode::Failed(_) => false,
        };
        if released {
            // The record no longer names the log, and nothing else would ever free it.
            free_disabled(&shelf, &recorded).await;
        }
        match &members {
            Some(members) if released => members.set.discard_copies().await,
            // It may hold what the other members do not have, if it could not be closed.
            Some(members) if result.is_ok() || members.set.is_fenced() => members.closed(any_failed).await,
            _ => {}
        }
        result
    }

    /// Returns whether the record is known to no longer name a log.
    async fn is_released(&self, id: &LogId) -> bool {
        let record = self.keeper.load().await;
        record.is_ok_and(|record| record.log.is_none_or(|log| log.id != *id))
    }

    /// Discards the log that the record of a volume names, including unwritten data. The volume must not be open.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another client holds the image's lock; errors of the image.
    pub async fn discard(keeper: &K) -> Result<()> {
        let _lock = keeper.lock().await?;
        let record = keeper.load().await?;
        let released = LogRecord::released(record.epoch);
        let with_members = record.log.as_ref().is_some_and(|log| log.members.is_some());
        match with_members {
            false => keeper.store(released).await?,
            true if keeper.replace(record.clone(), released).await? => {}
            true => return Err(Error::new(ErrorKind::Busy, "the record of the write log has changed meanwhile")),
        }
        let Some(recorded) = record.log else { return Ok(()) };
        if let (Some(_), Some(peers)) = (&recorded.members, keeper.peers())
            && let (_served, Some(shelf)) = ServedCopy::release(peers, recorded.id).await?
        {
            return discard_found(&shelf, &recorded.id).await;
        }
        let Ok(shelf) = keeper.shelf(&recorded.place, false).await else { return Ok(()) };
        discard_found(&shelf, &recorded.id).await
    }
}

/// Discards a log, if its device has it.
async fn discard_found(shelf: &Rc<Shelf>, id: &LogId) -> Result<()> {
    match shelf.discard(id).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Frees the space of a closed log that no record names any more.
async fn free_disabled<P: fmt::Display>(shelf: &Rc<Shelf>, recorded: &RecordedLog<P>) {
    if let Err(error) = discard_found(shelf, &recorded.id).await {
        tracing::warn!(
            log = id_text(&recorded.id),
            place = %recorded.place,
            %error,
            "cannot free the space of an ended write log"
        );
    }
}

/// Discards a log that no record ever named; returns the error that caused this.
async fn discarded(shelf: &Rc<Shelf>, id: &LogId, why: Error) -> Error {
    if let Err(error) = shelf.discard(id).await {
        tracing::warn!(log = id_text(id), %error, "cannot remove an unused write log from its device");
    }
    why
}

fn stalled(log: &WriteLog, patience: Duration) -> Error {
    let why = log.backend_error().unwrap_or_else(|| Error::new(ErrorKind::TimedOut, "no response from the backend"));
    let text = format!("nothing was written back for {} s: {why}", patience.as_secs());
    Error::new(why.kind(), text)
}
