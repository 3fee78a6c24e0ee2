//! Copy of a log that a replica has open: what its primary asks for, in order.
//!
//! | invariant of the window | |
//! |---|---|
//! | W1 | It is open to the primary of the copy's term only, and closed before the copy follows another term, begins again, or is closed: nothing that is written through it arrives later. |
//! | W2 | A block is taken without its payloads only while the window is open that these were written through. |
//! | W3 | A block whose payloads are in the ring becomes valid, and durable, no earlier than they do: its header is stored by this peer. |

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{BufList, Error, ErrorKind, InFlightGuard, InFlightTracker, LocalFuture};
use forebay_messenger::{Connection, MemoryWindow};

use super::promises::PrimaryPromise;
use super::wire::{AdoptTerm, CopyProgress, ReplicaAnswer};
use super::{Adoption, AppendRefused, ReplicaLog};
use crate::entries::LogEntry;
use crate::format::{AREA_AT, LogId};
use crate::media::copy::{CopyMedium, NewTerm};
use crate::shelf::{OpenCopy, OpenGuard};

/// Copy of a log at a replica, in use.
///
/// `log` says what the copy has and whom it follows; the medium holds the same.  Both change in one step, except that an
/// adoption first waits until nothing is being appended.
pub(super) struct ReplicaCopy {
    log: RefCell<ReplicaLog>,
    medium: Rc<dyn CopyMedium>,
    /// Appends that are being made durable.
    appends: Rc<InFlightTracker>,
    /// Set while a term is being adopted: nothing else is accepted.
    adopting: Cell<bool>,
    /// Promise to the primary, which every accepted request extends.
    promise: Rc<PrimaryPromise>,
    /// Window onto the ring that is open to the primary.
    window: RefCell<Option<MemoryWindow>>,
    /// Number of blocks whose payloads came through windows.
    placed: Rc<Cell<u64>>,
    _held: OpenGuard,
}

impl ReplicaCopy {
    /// Takes an opened copy into use.
    pub(super) fn new(copy: OpenCopy, promise: Rc<PrimaryPromise>, placed: Rc<Cell<u64>>) -> Self {
        let OpenCopy { medium, held, .. } = copy;
        let id = medium.state().map_or_else(LogId::default, |state| state.copy);
        let log = ReplicaLog::new(id, u64::from(medium.term()), medium.shape());
        let (log, appends, adopting) = (RefCell::new(log), Rc::default(), Cell::new(false));
        let window = RefCell::default();
        Self { log, medium, appends, adopting, promise, window, placed, _held: held }
    }

    /// Returns the term that the copy follows.
    pub(super) fn term(&self) -> u64 {
        self.log.borrow().term()
    }

    /// Returns the epoch of the record when the copy began to follow its term, or was created.
    pub(super) fn epoch(&self) -> u64 {
        self.medium.epoch()
    }

    /// Returns what the copy holds.
    fn progress(&self) -> CopyProgress {
        CopyProgress {
            head: self.medium.durable_seq(),
            tail: self.medium.durable_tail(),
            floor: self.medium.persisted_tail(),
            held: self.medium.held(),
        }
    }

    fn done(&self) -> ReplicaAnswer {
        ReplicaAnswer::Done(self.progress())
    }

    /// Follows a term, durably.  One adoption at a time.
    pub(super) async fn adopt(&self, term: u32, adopt: &AdoptTerm) -> ReplicaAnswer {
        let mut next = self.log.borrow().clone();
        let adopted = next.adopt(u64::from(term), adopt.copy, &adopt.base);
        if adopted.is_ok() {
            // Also of the same term: what its primary has not seen arrive may arrive until then.
            self.close_window();
        }
        let adoption = match adopted {
            Ok(Adoption::Repeated) => {
                self.promise.follow(adopt.lease_ms, adopt.automatic);
                return self.done();
            }
            Ok(adoption) => adoption,
            Err(refused) => return ReplicaAnswer::Refused(refused),
        };
        // From here on nothing of the former primary is accepted, whether this succeeds or not: it has been superseded.
        self.adopting.set(true);
        match self.follow(term, adopt, adoption, next.log().head()).await {
            Ok(()) => {
                *self.log.borrow_mut() = next;
                self.adopting.set(false);
                self.promise.follow(adopt.lease_ms, adopt.automatic);
                self.done()
            }
            Err(error) => {
                tracing::error!(%error, term, "cannot make a copy of a write log follow its new primary");
                ReplicaAnswer::Failed(error.to_string())
            }
        }
    }

    async fn follow(&self, term: u32, adopt: &AdoptTerm, adoption: Adoption, head: u64) -> Result<(), Error> {
        let AdoptTerm { copy, epoch, filling, start, cut, encryption, .. } = adopt;
        self.appends.drain().await;
        self.medium.check()?;
        self.medium.sync().await?;
        if adoption == Adoption::Restarted {
            self.medium.restart(*start);
        } else if head < self.medium.durable_seq() {
            let Some(place) = self.medium.find(head).await?.filter(|place| place.seq == head) else {
                let text = format!("entries from {head} on cannot be dropped: they were appended with others");
                return Err(Error::new(ErrorKind::Corrupt, text));
            };
            self.medium.truncate(place);
        }
        self.medium.retire(start.tail_seq, &[]);
        let (encryption, cut) = (*encryption, Some(*cut));
        let term = NewTerm { term, epoch: *epoch, copy: *copy, filling: *filling, encryption, cut };
        self.medium.begin_term(term).await
    }

    /// Refuses what another primary than that of the copy's term asks for; extends the promise to that one.
    fn require_term(&self, term: u32) -> Result<(), AppendRefused> {
        let own = self.term();
        match u64::from(term) {
            term if term < own => Err(AppendRefused::Superseded(own)),
            term if term > own || self.adopting.get() => Err(AppendRefused::NotAdopted),
            _ => {
                self.promise.extend();
                Ok(())
            }
        }
    }

    /// Opens a window onto the ring to the primary, instead of the one that is open.
    pub(super) fn open_window(&self, term: u32, connection: &Connection) -> ReplicaAnswer {
        if let Err(refused) = self.require_term(term) {
            return ReplicaAnswer::Refused(refused);
        }
        self.close_window();
        let Some((memory, at, len)) = self.medium.ring_memory() else {
            return ReplicaAnswer::Failed("this copy of the log is not in persistent memory".into());
        };
        match connection.window_onto(memory, at, len) {
            Ok(window) => {
                let descriptor = window.descriptor();
                self.window.replace(Some(window));
                ReplicaAnswer::Window(descriptor)
            }
            Err(error) => ReplicaAnswer::Failed(format!("no memory window onto this copy of the log: {error}")),
        }
    }

    /// Closes the window: nothing that is written through it arrives from here on.
    fn close_window(&self) {
        let window = self.window.take();
        drop(window);
    }

    fn has_window(&self, id: u64) -> bool {
        self.window.borrow().as_ref().is_some_and(|window| window.descriptor().id() == id)
    }

    /// Appends entries; they take their place at once, and the answer comes when they are on the medium.  With `window`, their
    /// payloads are in the ring already, where they came through that one.
    pub(super) fn append(
        self: &Rc<Self>,
        term: u32,
        durable: bool,
        bytes: BufList,
        window: Option<u64>,
    ) -> LocalFuture<ReplicaAnswer> {
        let used = self.in_use();
        let begun = self.begin_append(term, durable, bytes, window);
        Box::pin(async move {
            match begun {
                Ok(work) => match work.await {
                    Ok(()) => used.copy().done(),
                    Err(error) => ReplicaAnswer::Failed(error.to_string()),
                },
                Err(answer) => answer,
            }
        })
    }

    /// Keeps the copy open until this is dropped.
    pub(super) fn in_use(self: &Rc<Self>) -> CopyInUse {
        CopyInUse { copy: self.clone(), _in_flight: self.appends.begin() }
    }

    fn begin_append(
        &self,
        term: u32,
        durable: bool,
        bytes: BufList,
        window: Option<u64>,
    ) -> Result<LocalFuture<Result<(), Error>>, ReplicaAnswer> {
        self.require_term(term).map_err(ReplicaAnswer::Refused)?;
        let failed = |error: Error| ReplicaAnswer::Failed(error.to_string());
        if window.is_some_and(|id| !self.has_window(id)) {
            return Err(ReplicaAnswer::Failed("the window that the payloads were written through is closed".into()));
        }
        let raw = match window {
            None => self.medium.inspect(bytes),
            Some(_) => self.medium.inspect_placed(bytes),
        };
        let raw = raw.map_err(failed)?;
        let (term, number, entry_term, count) = (term.into(), raw.first_seq, raw.term.into(), raw.count.into());
        let mut log = self.log.borrow_mut();
        let had = log.accepts(term, number, count).map_err(ReplicaAnswer::Refused)?;
        let newest = log.log().spans().last().map_or(0, |span| span.term);
        if had < count && !(newest..=term).contains(&entry_term) {
            let text = format!("entry {number} is of term {entry_term}, after one of term {newest}, in term {term}");
            return Err(ReplicaAnswer::Failed(text));
        }
        // A copy that began again counts entries before the tail as had, whose block its medium lacks.
        if had == count && number + count <= self.medium.next_seq() {
            // Sent again, with the same payloads.
            if window.is_some() {
                self.medium.flush_placed(&raw);
            }
            let (written, sync) = (self.medium.written(number + count), self.medium.sync());
            let again = async move {
                written.await;
                if durable { sync.await } else { Ok(()) }
            };
            return Ok(Box::pin(again));
        }
        let work = self.medium.append_raw(raw, durable).map_err(failed)?;
        log.append(term, number, entry_term, count).map_err(ReplicaAnswer::Refused)?;
        self.placed.set(self.placed.get() + u64::from(window.is_some()));
        Ok(work)
    }

    /// Moves the tail, durably.
    pub(super) async fn retire(&self, term: u32, tail: u64) -> ReplicaAnswer {
        if let Err(refused) = self.require_term(term) {
            return ReplicaAnswer::Refused(refused);
        }
        // Nothing that is not durable here counts as written back.
        self.medium.written(tail).await;
        if self.medium.durable_seq() < tail
            && let Err(error) = self.medium.sync().await
        {
            return ReplicaAnswer::Failed(error.to_string());
        }
        let tail = tail.min(self.medium.durable_seq());
        if let Err(refused) = self.log.borrow_mut().retire(u64::from(term), tail) {
            return ReplicaAnswer::Refused(refused);
        }
        self.medium.retire(tail, &[]);
        match self.medium.persist_tail(false).await {
            Ok(()) => self.done(),
            Err(error) => ReplicaAnswer::Failed(error.to_string()),
        }
    }

    /// Reads the payload of an entry that the primary cannot read from its own medium.
    pub(super) fn read(self: &Rc<Self>, term: u32, entry: LogEntry) -> LocalFuture<(ReplicaAnswer, BufList)> {
        if let Err(refused) = self.require_term(term) {
            return Box::pin(async move { (ReplicaAnswer::Refused(refused), BufList::new()) });
        }
        let (unit, ring) = (u64::from(self.medium.unit()), self.medium.size() - AREA_AT);
        let end = u64::from(entry.place) * unit + u64::from(entry.payload_len()).next_multiple_of(unit);
        if end > ring {
            let text = format!("a payload at unit {} of a ring of {} units", entry.place, ring / unit);
            return Box::pin(async move { (ReplicaAnswer::Failed(text), BufList::new()) });
        }
        let (used, read) = (self.in_use(), self.medium.read(&entry));
        Box::pin(async move {
            match read.await {
                Ok(data) => (used.copy().done(), data.into()),
                Err(error) => (ReplicaAnswer::Failed(error.to_string()), BufList::new()),
            }
        })
    }

    /// Answers a heartbeat.
    pub(super) fn heartbeat(&self, term: u32, automatic: bool) -> ReplicaAnswer {
        match self.require_term(term) {
            Ok(()) => {
                self.promise.set_automatic(automatic);
                self.done()
            }
            Err(refused) => ReplicaAnswer::Refused(refused),
        }
    }

    /// Refuses everything from now on, and waits until nothing is in flight.
    pub(super) async fn close(&self) {
        self.adopting.set(true);
        self.close_window();
        self.appends.drain().await;
    }

    /// Makes what was accepted before durable, for an answer to it, also if another term has begun since.
    pub(super) async fn sync_appended(&self) -> ReplicaAnswer {
        match self.medium.sync().await {
            Ok(()) => self.done(),
            Err(error) => ReplicaAnswer::Failed(error.to_string()),
        }
    }

    /// Makes all that was appended durable.
    pub(super) async fn sync(&self, term: u32) -> ReplicaAnswer {
        if let Err(refused) = self.require_term(term) {
            return ReplicaAnswer::Refused(refused);
        }
        match self.medium.sync().await {
            Ok(()) => self.done(),
            Err(error) => ReplicaAnswer::Failed(error.to_string()),
        }
    }
}

/// Copy that something is in flight for.  It is let go of before its end is signaled.
pub(super) struct CopyInUse {
    copy: Rc<ReplicaCopy>,
    _in_flight: InFlightGuard,
}

impl CopyInUse {
    /// Returns the copy.  A task that named the field would take the field alone, and let go of the rest at once.
    pub(super) fn copy(&self) -> &ReplicaCopy {
        &self.copy
    }
}
