//! Members of a log, as its primary sees them: what each holds, and what is to be sent to it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Buf, Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::WindowDescriptor;
use forebay_reactor::sync::Notify;
use forebay_reactor::{Instant, now, spawn, timeout};

use super::control::control;
use super::keeper::{LogIdentity, LogMembers, MemberKeeper, PeerId, ReplicationOptions};
use super::lease::PrimaryLease;
use super::member::{self, MemberLink, discard};
use super::mirror::Mirror;
use super::wire::CopyProgress;
use super::{CopyStart, LogShape, PrimaryProgress, RawAppend, RequestGroups};
use crate::entries::LogEntry;
use crate::format::{LogId, MediumKind};
use crate::media::copy::CopyMedium;

/// Groups that are being appended to the primary's own copy.
#[derive(Default)]
struct LocalGroups {
    /// Numbers after the last entry of each, and whether it is durable.
    started: VecDeque<(u64, bool)>,
}

impl LocalGroups {
    /// Notes that a group is durable; returns the number of the first entry that is not.
    fn done(&mut self, end: u64) -> Option<u64> {
        self.started.iter_mut().filter(|(at, _)| *at == end).for_each(|group| group.1 = true);
        let mut head = None;
        while let Some((end, true)) = self.started.front() {
            head = Some(*end);
            self.started.pop_front();
        }
        head
    }
}

/// Newest groups of entries, which are sent to replicas without reading them.
#[derive(Default)]
struct RecentAppends {
    groups: VecDeque<RawAppend>,
    bytes: usize,
}

impl RecentAppends {
    /// Adds a group.  Drops the oldest ones down to `bytes_max`, but none that has not been published: it may be nowhere else.
    fn push(&mut self, raw: RawAppend, bytes_max: usize, published: u64) {
        self.bytes += raw.bytes.len();
        self.groups.push_back(raw);
        while self.bytes > bytes_max
            && let Some(first) = self.groups.front()
            && first.first_seq + u64::from(first.count) <= published
        {
            self.bytes -= first.bytes.len();
            self.groups.pop_front();
        }
    }

    /// Returns the group that begins with entry `seq`.
    fn get(&self, seq: u64) -> Option<&RawAppend> {
        let at = self.groups.partition_point(|raw| raw.first_seq < seq);
        self.groups.get(at).filter(|raw| raw.first_seq == seq)
    }
}

/// Members of an open log, at its primary.
pub struct PrimarySet {
    pub(super) own: PeerId,
    pub(super) identity: LogIdentity,
    pub(super) term: u32,
    /// Number of the first block of the term.
    pub(super) cut: u64,
    /// Entries of the log.
    shape: RefCell<LogShape>,
    pub(super) local: Rc<dyn CopyMedium>,
    pub(super) keeper: Rc<dyn MemberKeeper>,
    pub(super) options: ReplicationOptions,
    pub(super) requests: Rc<RequestGroups>,
    pub(super) progress: RefCell<PrimaryProgress<PeerId, String>>,
    pub(super) links: RefCell<BTreeMap<PeerId, Rc<MemberLink>>>,
    /// Length of the lease, and what the members have promised.
    pub(super) lease_length: Duration,
    lease: RefCell<PrimaryLease<PeerId>>,
    /// Complete replicas of a log in memory.
    pub(super) mirror: Mirror,
    groups: RefCell<LocalGroups>,
    recent: RefCell<RecentAppends>,
    /// Number after the last entry that was appended.
    pub(super) head: Cell<u64>,
    pub(super) tail: Cell<u64>,
    /// Number of times that the tail was to be made durable.
    pub(super) retirements: Cell<u64>,
    /// Number of blocks whose payloads were written into replicas' copies, without involving their processors.
    pub(super) placed: Cell<u64>,
    /// Set once the record names the log no more, by this primary's doing.
    released: Cell<bool>,
    /// Set once the primary's own medium has failed.
    local_lost: RefCell<Option<(Instant, Error)>>,
    /// Set once an entry was read from a replica instead.
    read_elsewhere: Cell<bool>,
    /// Set when this primary has to stop.
    over: RefCell<Option<Error>>,
    /// Signaled when something was appended or retired.
    pub(super) appended: Notify,
    /// Signaled when a member needs attention, apart from time that passes.
    pub(super) attention: Notify,
    /// Signaled when a member has made progress, the record has changed, or this primary has to stop.
    pub(super) changed: Rc<Notify>,
}

impl PrimarySet {
    /// Begins with the record that opened the log, and the primary's own copy, which follows its term.
    pub(crate) fn new(
        record: LogMembers,
        identity: LogIdentity,
        (local, kind): (Rc<dyn CopyMedium>, MediumKind),
        keeper: Rc<dyn MemberKeeper>,
        options: ReplicationOptions,
    ) -> Rc<Self> {
        let base: LogShape = local.shape();
        let cut = local.state().map_or(0, |state| state.cut);
        let (head, tail) = (base.head(), base.tail());
        let (lease_length, requests) = (keeper.policy().lease, keeper.groups().unwrap_or_default());
        let replicas = record.complete().filter(|peer| *peer != record.primary()).count();
        let mirror = match kind {
            MediumKind::Dram => Mirror::of(replicas, head == 0, now() + 10 * options.patience),
            MediumKind::Ssd | MediumKind::Pmem => Mirror::unneeded(),
        };
        Rc::new(Self {
            own: record.primary(),
            identity,
            term: local.term(),
            cut,
            shape: RefCell::new(base.clone()),
            local,
            keeper,
            options,
            requests,
            progress: RefCell::new(PrimaryProgress::new(record, base)),
            links: RefCell::default(),
            lease_length,
            mirror,
            lease: RefCell::new(PrimaryLease::new(lease_length.as_millis() as u64)),
            groups: RefCell::default(),
            recent: RefCell::default(),
            head: Cell::new(head),
            tail: Cell::new(tail),
            retirements: Cell::new(0),
            placed: Cell::new(0),
            released: Cell::new(false),
            local_lost: RefCell::default(),
            read_elsewhere: Cell::new(false),
            over: RefCell::default(),
            appended: Notify::new(),
            attention: Notify::new(),
            changed: Rc::new(Notify::new()),
        })
    }

    /// Starts to follow the members, once the record is stored.
    pub fn start(self: &Rc<Self>) {
        drop(spawn(control(self.clone())));
    }

    /// Waits until requests may be served: every complete member has all that the log held.
    ///
    /// # Errors
    /// [`ErrorKind::Fenced`] if another primary has followed.
    pub async fn ready(&self) -> Result<()> {
        self.changed.wait_until(|| self.progress.borrow().serves() || self.over.borrow().is_some()).await;
        self.over.borrow().clone().map_or(Ok(()), Err)
    }

    /// Stops for good: nothing is acknowledged or sent any more.
    pub fn stop(&self, error: Error) {
        if error.kind() == ErrorKind::Fenced && self.over.borrow().is_none() {
            tracing::warn!(image = %self.identity.name, %error, "this daemon is no longer the primary of a write log");
        }
        self.over.borrow_mut().get_or_insert(error);
        self.changed.notify_all();
        self.appended.notify_all();
        self.attention.notify_all();
    }

    /// Ends the use of a log that the record names no more, and whose content is at the backend: nothing waits for replicas.
    pub fn release(&self) {
        self.released.set(true);
        self.changed.notify_all();
        self.appended.notify_all();
        self.attention.notify_all();
    }

    /// Returns whether members are followed no more.
    pub(super) fn is_over(&self) -> bool {
        self.released.get() || self.over.borrow().is_some()
    }

    /// Returns why this primary has stopped, if it has.
    pub(crate) fn stopped(&self) -> Option<Error> {
        self.over.borrow().clone()
    }

    /// Follows a change of the peers that are to have copies, or of the policy.
    pub fn wanted_changed(&self) {
        self.attention.notify_all();
        self.changed.notify_all();
        self.appended.notify_all();
    }

    /// Asks the replicas to discard their copies, once the log has been released: each gets `patience` to answer.  A copy
    /// that remains is discarded when its peer is next asked for one of the volume.
    pub async fn discard_copies(&self) {
        let mut peers: Vec<PeerId> =
            self.record().members().map(|(peer, _)| peer).filter(|peer| *peer != self.own).collect();
        if self.mirror.is_needed() {
            // One that was dropped although it lives keeps memory.
            let has_one = |peer: &PeerId| *peer != self.own && self.keeper.connection(*peer).is_some();
            let dropped: Vec<PeerId> = self.keeper.wanted().into_iter().filter(has_one).collect();
            peers
                .extend(dropped.into_iter().filter(|peer| !self.record().members().any(|(member, _)| member == *peer)));
        }
        for peer in peers {
            self.discard_copy(peer).await;
        }
    }

    /// Asks a peer to discard its copy.
    pub(super) async fn discard_copy(&self, peer: PeerId) {
        let discarded = match timeout(self.options.patience, discard(self, peer)).await {
            Ok(discarded) => discarded,
            Err(_) => Err(Error::new(ErrorKind::TimedOut, "no answer")),
        };
        if let Err(error) = discarded {
            tracing::warn!(
                peer = %peer, log = crate::id_text(&self.identity.log), %error,
                "a peer keeps its copy of a write log that is no member any more; it is discarded with the next copy there"
            );
        }
    }

    /// Waits until this primary has to stop; returns why.
    pub async fn ended(&self) -> Error {
        self.changed.wait_until(|| self.over.borrow().is_some()).await;
        self.over.borrow().clone().unwrap_or_else(crate::log::closed)
    }

    /// Returns whether this primary has stopped for good: another one has followed, the log was discarded, or the backend
    /// refuses its client.  In the last case the record may still name it, and it opens the log again as another client.
    pub fn is_fenced(&self) -> bool {
        self.over.borrow().as_ref().is_some_and(|error| error.kind() == ErrorKind::Fenced)
    }

    /// Returns the record as it was known last.
    pub fn record(&self) -> LogMembers {
        self.progress.borrow().record().clone()
    }

    /// Takes a group that is being appended to the primary's own copy.
    pub(crate) fn append(&self, raw: RawAppend) {
        let end = raw.first_seq + u64::from(raw.count);
        self.groups.borrow_mut().started.push_back((end, false));
        self.head.set(end);
        self.shape.borrow_mut().push(u64::from(self.term), u64::from(raw.count));
        let published = self.progress.borrow().published();
        self.recent.borrow_mut().push(raw, self.options.recent, published);
        self.appended.notify_all();
    }

    /// Returns the entries of the log, and where it begins.
    pub(super) fn shape(&self) -> (LogShape, CopyStart) {
        let start = self.local.start();
        let mut shape = self.shape.borrow_mut();
        shape.retire(start.tail_seq);
        (shape.clone(), start)
    }

    /// Returns the entries from `seq` on that are in memory.
    pub(super) fn recent(&self, seq: u64) -> Option<RawAppend> {
        self.recent.borrow().get(seq).cloned()
    }

    /// Notes that a group is durable in the primary's own copy.
    pub(crate) fn local_durable(&self, end: u64) {
        let head = self.groups.borrow_mut().done(end);
        if let Some(head) = head {
            self.note(self.own, None, head, 0);
        }
    }

    /// Notes that the primary's own medium has failed: it goes on with its replicas' copies, once the record says so.
    pub(crate) fn local_failed(&self, error: &Error) {
        if self.local_lost.borrow().is_none() {
            self.local_lost.replace(Some((now(), error.clone())));
            let (name, replicas) = (&self.identity.name, self.replicas().len());
            tracing::error!(volume = %name, %error, replicas, "the primary's own copy of a write log is lost");
            self.progress.borrow_mut().lost(self.own);
            // Something that the replicas have to make durable shows which of them can.
            self.retirements.set(self.retirements.get() + 1);
            self.appended.notify_all();
            self.attention.notify_all();
            self.changed.notify_all();
        }
    }

    /// Returns whether the primary's own medium has failed.
    pub fn has_lost_local(&self) -> bool {
        self.local_lost.borrow().is_some()
    }

    /// Returns the time at which the primary's own medium has failed.
    pub(super) fn local_lost_at(&self) -> Option<Instant> {
        self.local_lost.borrow().as_ref().map(|(at, _)| *at)
    }

    /// Returns the failure of the primary's own medium if there is no other copy.
    fn last_copy_lost(&self) -> Option<Error> {
        let lost = self.local_lost.borrow();
        lost.as_ref().filter(|_| self.replicas().is_empty()).map(|(_, error)| error.clone())
    }

    /// Reads the payload of an entry from a complete replica, after the primary's own medium has failed with `error`.
    pub(crate) async fn read_replica(&self, entry: &LogEntry, error: Error) -> Result<Buf> {
        for peer in self.replicas() {
            match timeout(self.options.patience, member::read(self, peer, entry)).await {
                Ok(Ok(data)) => {
                    if !self.read_elsewhere.replace(true) {
                        let name = &self.identity.name;
                        tracing::error!(volume = %name, %error, %peer, "reading a write log from a replica: the own copy is damaged");
                    }
                    return Ok(data);
                }
                Ok(Err(other)) => tracing::warn!(%peer, error = %other, "cannot read a write log from a replica"),
                Err(_) => tracing::warn!(%peer, "cannot read a write log from a replica: no answer"),
            }
        }
        Err(error)
    }

    /// Notes that the entries before `end` are durable in the primary's own copy.
    pub(crate) fn local_durable_before(&self, end: u64) {
        self.groups.borrow_mut().started.retain(|(at, _)| *at > end);
        self.note(self.own, None, end, 0);
    }

    /// Notes the tail that is durable in the primary's own copy.
    pub(crate) fn local_retired(&self, tail: u64) {
        self.note(self.own, None, 0, tail);
    }

    /// Notes what a copy holds.
    pub(super) fn note(&self, peer: PeerId, copy: Option<LogId>, head: u64, tail: u64) {
        {
            let mut progress = self.progress.borrow_mut();
            let copy = copy.or_else(|| progress.record().copy(peer));
            if let Some(copy) = copy {
                progress.persisted(peer, copy, head, tail);
            }
        }
        self.changed.notify_all();
    }

    /// Waits until the entries before `end` are durable wherever they must be.
    ///
    /// # Errors
    /// If this primary has to stop.
    pub(crate) async fn published(&self, end: u64) -> Result<()> {
        let stopped = || self.over.borrow().clone().or_else(|| self.last_copy_lost());
        let is_published = || self.progress.borrow().published() >= end;
        self.changed.wait_until(|| is_published() || stopped().is_some()).await;
        self.over.borrow().clone().or_else(|| stopped().filter(|_| !is_published())).map_or(Ok(()), Err)
    }

    /// Waits until every complete member has retired the entries before `tail`.
    ///
    /// # Errors
    /// If this primary has to stop.
    pub(crate) async fn retired(&self, tail: u64) -> Result<()> {
        self.tail.set(self.tail.get().max(tail));
        let round = self.retirements.get() + 1;
        self.retirements.set(round);
        self.appended.notify_all();
        let stopped = || self.over.borrow().clone().or_else(|| self.last_copy_lost());
        let over = || self.released.get() || stopped().is_some() || self.has_retired(tail, round);
        self.changed.wait_until(over).await;
        stopped().map_or(Ok(()), Err)
    }

    /// Returns whether every complete member has the tail, and has made it durable in this round or a later one.
    fn has_retired(&self, tail: u64, round: u64) -> bool {
        let links = self.links.borrow();
        let done = |peer: PeerId| peer == self.own || links.get(&peer).is_some_and(|link| link.retired.get() >= round);
        let progress = self.progress.borrow();
        progress.retired() >= tail && progress.required().all(done)
    }

    /// Notes that a member has accepted a request that was sent at `sent`, and so has promised not to take over.  What its
    /// answer says is [noted](Self::note) next, which wakes reads that wait.
    pub(super) fn granted(&self, peer: PeerId, sent: Instant) {
        self.lease.borrow_mut().granted(peer, self.options.clock.millis(sent));
    }

    /// Returns whether no member can have taken over yet.
    fn has_lease(&self) -> bool {
        if self.released.get() {
            return true;
        }
        let progress = self.progress.borrow();
        let others = progress.required().filter(|peer| *peer != self.own);
        self.lease.borrow().is_valid(self.options.clock.millis(now()), others)
    }

    /// Permits a read: at once with `None`, or when no member can have taken over.
    ///
    /// # Errors
    /// If this primary has stopped.
    pub fn permit_read(self: &Rc<Self>) -> Option<LocalFuture<Result<()>>> {
        if self.has_lease() && self.stopped().is_none() {
            return None;
        }
        let set = self.clone();
        Some(Box::pin(async move {
            set.changed.wait_until(|| set.stopped().is_some() || set.has_lease()).await;
            set.stopped().map_or(Ok(()), Err)
        }))
    }

    /// Returns the number of complete replicas below which writes are not acknowledged: one at least of a log in memory.
    fn replicas_min(&self) -> u32 {
        self.keeper.policy().replicas_min.max(u32::from(self.mirror.is_needed()))
    }

    /// Returns whether fewer replicas are complete than its policy needs: writes are not acknowledged.
    pub fn is_stalled(&self) -> bool {
        let complete = self.progress.borrow().record().complete().count();
        !self.released.get() && complete <= self.replicas_min() as usize
    }

    /// Returns why writes are not acknowledged although they are durable here, if that is so.
    pub fn stall(&self) -> Option<String> {
        let (complete, minimum) = (self.copies().0, self.replicas_min());
        self.is_stalled().then(|| {
            if self.mirror.is_needed() && complete <= 1 {
                return "writes wait: the log is in memory, and no replica is complete".to_owned();
            }
            let needed = minimum.saturating_add(1);
            format!("writes wait: {complete} copies are complete, and min-replicas={minimum} needs {needed}")
        })
    }

    /// Permits acknowledgements of durable writes: at once with `None`, or when enough replicas are complete.
    ///
    /// # Errors
    /// If this primary has stopped.
    pub fn permit_acknowledgement(self: &Rc<Self>) -> Option<LocalFuture<Result<()>>> {
        if !self.is_stalled() {
            return None;
        }
        let set = self.clone();
        Some(Box::pin(async move {
            set.changed.wait_until(|| set.stopped().is_some() || !set.is_stalled()).await;
            set.stopped().map_or(Ok(()), Err)
        }))
    }

    /// Waits until a log in memory has lost its last complete replica: it has to be written back, and given up. Returns why;
    /// `None` for a log that needs none.
    pub fn mirror_lost(self: &Rc<Self>) -> Option<LocalFuture<Error>> {
        let set = self.clone();
        self.mirror.is_needed().then(|| -> LocalFuture<Error> {
            Box::pin(async move {
                set.changed.wait_until(|| set.mirror.is_lost()).await;
                tracing::error!(
                    image = %set.identity.name, log = crate::id_text(&set.identity.log),
                    "a write log in memory has no complete replica: it is written back, and the image goes on without a log"
                );
                Error::new(ErrorKind::Io, "the log is in memory, and no replica has a complete copy of it any more")
            })
        })
    }

    /// Waits until a log in memory has its first complete replica; at once for one that needs none.
    ///
    /// # Errors
    /// If it gets none in time, or this primary has stopped.
    pub async fn mirrored(&self) -> Result<()> {
        let over = || !self.mirror.is_awaited() || self.is_over();
        self.changed.wait_until(over).await;
        match self.stopped() {
            Some(error) => Err(error),
            None if self.mirror.is_lost() => {
                Err(Error::new(ErrorKind::TimedOut, "no replica has taken a copy of the log, which is in memory"))
            }
            None => Ok(()),
        }
    }

    /// Returns whether a log in memory has lost its last complete replica.
    pub fn has_lost_mirror(&self) -> bool {
        self.mirror.is_lost()
    }

    /// Looks at whether a log in memory has a complete replica.
    pub(super) fn look_at_mirror(&self) {
        let was_lost = self.mirror.is_lost();
        self.mirror.look(self.replicas().len(), now());
        if self.mirror.is_lost() && !was_lost {
            self.changed.notify_all();
        }
    }

    /// Returns the number of blocks whose payloads were written into replicas' copies through memory windows.
    pub fn placed_blocks(&self) -> u64 {
        self.placed.get()
    }

    /// Returns the windows onto replicas' copies that were opened last.
    pub fn windows(&self) -> Vec<(PeerId, WindowDescriptor)> {
        let links = self.links.borrow();
        links.iter().filter_map(|(peer, link)| Some((*peer, link.window.get()?))).collect()
    }

    /// Returns the complete members but this peer.
    pub(crate) fn replicas(&self) -> Vec<PeerId> {
        self.progress.borrow().record().complete().filter(|peer| *peer != self.own).collect()
    }

    /// Returns the lowest of some positions of the copies that acknowledgements depend on, but this peer's own.
    fn lowest(&self, of: impl Fn(&CopyProgress) -> u64) -> u64 {
        let (links, progress) = (self.links.borrow(), self.progress.borrow());
        let others = progress.required().filter(|peer| *peer != self.own);
        others.map(|peer| links.get(&peer).map_or(0, |link| of(&link.progress.get()))).min().unwrap_or(u64::MAX)
    }

    /// Returns the lowest tail that a recovery of a complete member would begin at.
    pub(crate) fn persisted_tail(&self) -> u64 {
        self.lowest(|progress| progress.floor)
    }

    /// Keeps the ring from where the complete members need it.
    pub(super) fn hold(&self) {
        self.local.hold(self.lowest(|progress| progress.held));
    }

    /// Takes the record that was read or stored.  Stops if another primary has followed.
    pub(super) fn learn(&self, record: &LogMembers) -> bool {
        let goes_on = self.progress.borrow_mut().learned(record);
        if goes_on {
            self.hold();
            self.look_at_mirror();
            self.changed.notify_all();
        } else {
            self.stop(superseded(record.term()));
        }
        goes_on
    }
}

/// Returns the error of a primary that another one has followed.
pub(super) fn superseded(term: u64) -> Error {
    Error::new(ErrorKind::Fenced, format!("another peer has taken this write log over, in term {term}"))
}
