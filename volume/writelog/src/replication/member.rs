//! Link of a primary to one replica: adoption, entries in order, retirement.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{BufList, Error, ErrorKind, Result};
use forebay_messenger::{Connection, Message, WindowDescriptor};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, Instant, now, spawn, timeout};

use super::keeper::{LogIdentity, PeerId};
use super::set::{PrimarySet, superseded};
use super::wire::{AdoptTerm, CopyProgress, KIND_REQUEST, ReplicaAction, ReplicaAnswer, ReplicaRequest};
use super::{AppendCursor, AppendRefused, MemberState, RawAppend, one_sided};
use crate::entries::LogEntry;
use crate::format::LogId;
use crate::media::ssd::verify;

/// Number of heartbeats in the length of a lease, to a replica that nothing else is sent to.
pub(super) const HEARTBEATS: u32 = 4;

/// Maximum number of times that a stream begins again without delay.
const RESTARTS_MAX: u32 = 50;

/// Link to a replica.
pub(super) struct MemberLink {
    pub(super) peer: PeerId,
    /// Copy that the record names.
    pub(super) copy: LogId,
    /// Progress of the copy, as far as is known.
    pub(super) progress: Cell<CopyProgress>,
    /// Set while the copy follows this primary's term, as far as is known.
    adopted: Cell<bool>,
    /// Time of the last progress, or of the beginning.
    since: Cell<Instant>,
    /// Time at which a request was accepted last; at first that of the link's creation.
    heard_at: Cell<Instant>,
    /// Set once a request of this term was accepted: the replica has promised not to take over.
    promised: Cell<bool>,
    /// Policy that the replica was told last: whether it takes over by itself.
    automatic: Cell<bool>,
    /// Set while a heartbeat is on its way.
    beating: Cell<bool>,
    /// Set when a request was accepted since the control loop looked last.
    heard: Cell<bool>,
    /// Number of times that the control loop has looked and nothing was heard.
    silent: Cell<u32>,
    /// Bytes of entries on their way.
    in_flight: Cell<usize>,
    /// Newest retirement that the copy has made durable.
    pub(super) retired: Cell<u64>,
    /// Window onto the copy that was opened last.
    pub(super) window: Cell<Option<WindowDescriptor>>,
    /// Number of windows in a row whose writes have failed.
    pub(super) window_failures: Cell<u32>,
    /// Set once the replica did not open a window.
    pub(super) window_refused: Cell<bool>,
    /// Set once the peer has said that the copy is lost.
    lost: Cell<bool>,
    ended: Cell<bool>,
    /// Set when the stream of entries was interrupted, with the reason.
    broken: RefCell<Option<Error>>,
    /// Signaled when an answer has come, or the link ends.
    settled: Notify,
}

impl MemberLink {
    pub(super) fn new(peer: PeerId, copy: LogId) -> Self {
        Self {
            peer,
            copy,
            progress: Cell::default(),
            adopted: Cell::new(false),
            since: Cell::new(now()),
            heard_at: Cell::new(now()),
            promised: Cell::new(false),
            automatic: Cell::new(false),
            beating: Cell::new(false),
            heard: Cell::new(false),
            silent: Cell::new(0),
            in_flight: Cell::new(0),
            retired: Cell::new(0),
            window: Cell::new(None),
            window_failures: Cell::new(0),
            window_refused: Cell::new(false),
            lost: Cell::new(false),
            ended: Cell::new(false),
            broken: RefCell::default(),
            settled: Notify::new(),
        }
    }

    /// Ends the link.
    pub(super) fn end(&self) {
        self.ended.set(true);
        self.settled.notify_all();
    }

    /// Returns whether the link has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Returns whether the peer does not have the copy any more.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.get()
    }

    /// Returns since when this primary waits for the replica; `None` if it has everything.
    pub(super) fn waits_since(&self, set: &PrimarySet) -> Option<Instant> {
        let CopyProgress { head, .. } = self.progress.get();
        let retired = self.retired.get() >= set.retirements.get();
        let done = self.adopted.get() && head >= set.head.get() && retired;
        if done {
            self.since.set(now());
        }
        (!done).then(|| self.since.get())
    }

    /// Returns whether the replica follows this primary and has made progress since a time.
    pub(super) fn progressed_since(&self, time: Instant) -> bool {
        self.adopted.get() && self.since.get() > time
    }

    /// Returns whether the copy has everything but what is on its way.
    pub(super) fn has_caught_up(&self, set: &PrimarySet) -> bool {
        let CopyProgress { head, .. } = self.progress.get();
        self.adopted.get() && head >= set.progress.borrow().published()
    }

    /// Returns whether the replica has promised anything in this term.
    pub(super) fn has_promised(&self) -> bool {
        self.promised.get()
    }

    /// Counts how often the control loop has looked since something was heard of the replica.  Counted by turns of that loop,
    /// not by the clock: a process that was suspended finds the answers before it has looked often enough.
    pub(super) fn count_silence(&self) -> u32 {
        self.silent.set(if self.heard.replace(false) { 0 } else { self.silent.get() + 1 });
        self.silent.get()
    }

    fn break_off(&self, error: Error) {
        self.broken.borrow_mut().get_or_insert(error);
        self.settled.notify_all();
    }
}

/// Keeps a replica up to date until the link ends.
pub(super) async fn run(set: Rc<PrimarySet>, link: Rc<MemberLink>) {
    let over = || link.ended.get() || set.is_over();
    let mut restarts = 0;
    while !over() {
        let error = match set.keeper.connection(link.peer) {
            Some(connection) => stream(&set, &link, &connection).await.err(),
            None => None,
        };
        link.adopted.set(false);
        // What is on its way is answered, or its connection ends, before anything is sent again.
        link.settled.wait_until(|| link.in_flight.get() == 0 || over()).await;
        if let Some(error) = error {
            tracing::debug!(peer = %link.peer, %error, "the stream to a replica of a write log was interrupted");
            // Entries that a replica needed to be filled have been retired meanwhile: it begins at the tail again, at once, or
            // it would find it moved on again and again.
            if error.kind() == ErrorKind::NotFound && restarts < RESTARTS_MAX {
                restarts += 1;
                continue;
            }
        }
        restarts = 0;
        let _ = timeout(set.options.retry, link.settled.wait_until(over)).await;
    }
}

/// Makes a replica follow the term, and sends it entries until something fails.
async fn stream(set: &Rc<PrimarySet>, link: &Rc<MemberLink>, connection: &Connection) -> Result<()> {
    link.broken.take();
    let record = set.record();
    let (base, start) = set.shape();
    let adopt = AdoptTerm {
        copy: link.copy,
        epoch: record.epoch(),
        filling: record.state(link.peer) == Some(MemberState::Filling),
        base,
        start,
        cut: set.cut,
        lease_ms: set.lease_length.as_millis() as u32,
        automatic: set.keeper.policy().automatic,
        encryption: set.identity.encryption,
    };
    link.automatic.set(adopt.automatic);
    tracing::debug!(peer = %link.peer, at = %connection.address(), term = set.term, "asking a replica to follow this primary");
    let CopyProgress { head, tail, .. } =
        ask(set, link, connection, ReplicaAction::Adopt(adopt), BufList::new()).await?;
    link.adopted.set(true);
    tracing::debug!(peer = %link.peer, head, tail, own_head = set.head.get(), "a replica follows this primary");
    let window = one_sided::open(set, link, connection).await;
    link.window.set(window);
    let mut cursor = find(set, head).await?;
    let mut retirements = 0;
    loop {
        // What is retired has been sent before.
        let retires = || retirements < set.retirements.get() && cursor.seq >= set.tail.get();
        let idle = || cursor.seq >= set.head.get() && !retires();
        let full = || link.in_flight.get() >= set.options.window;
        let over = || link.ended.get() || link.broken.borrow().is_some() || set.is_over();
        beat(set, link, connection);
        while !over() && (idle() || full()) {
            beat(set, link, connection);
            let _ = timeout(set.lease_length / HEARTBEATS, wait_either(&set.appended, &link.settled)).await;
        }
        if let Some(error) = link.broken.take() {
            return Err(error);
        }
        if over() {
            return Ok(());
        }
        if retires() {
            retirements = set.retirements.get();
            let tail = set.tail.get();
            send(set, link, connection, (ReplicaAction::Retire { tail }, retirements), BufList::new());
        }
        if cursor.seq < set.head.get() && !full() {
            let raw = next_entries(set, cursor).await?;
            cursor = raw.next;
            let Some((append, data)) = one_sided::place(set, link, connection, window, raw).await? else { continue };
            send(set, link, connection, (append, 0), data);
        }
    }
}

/// Sends a heartbeat if nothing was heard for a time, whatever was sent, or if who takes over has changed.
pub(super) fn beat(set: &Rc<PrimarySet>, link: &Rc<MemberLink>, connection: &Connection) {
    let automatic = set.keeper.policy().automatic;
    let due = link.heard_at.get().elapsed() >= set.lease_length / HEARTBEATS || link.automatic.get() != automatic;
    if due && !link.beating.replace(true) {
        link.automatic.set(automatic);
        send(set, link, connection, (ReplicaAction::Heartbeat { automatic }, 0), BufList::new());
    }
}

/// Waits until either is signaled.
async fn wait_either(one: &Notify, other: &Notify) {
    let (mut one, mut other) = (std::pin::pin!(one.wait()), std::pin::pin!(other.wait()));
    std::future::poll_fn(|cx| match (one.as_mut().poll(cx), other.as_mut().poll(cx)) {
        (std::task::Poll::Pending, std::task::Poll::Pending) => std::task::Poll::Pending,
        _ => std::task::Poll::Ready(()),
    })
    .await;
}

/// Returns the place of an entry in the primary's own copy.
async fn find(set: &PrimarySet, seq: u64) -> Result<AppendCursor> {
    // After its tail has moved on, the log finds a later one.
    let found = set.local.find(seq).await?.filter(|found| found.seq <= seq);
    found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("entry {seq} is in the log no more")))
}

/// Returns the entries at a place, from memory or from the primary's own copy.
async fn next_entries(set: &PrimarySet, cursor: AppendCursor) -> Result<RawAppend> {
    if let Some(raw) = set.recent(cursor.seq) {
        return Ok(raw);
    }
    let found = set.local.read_raw(cursor).await?;
    found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("entry {} is in the log no more", cursor.seq)))
}

/// Sends a request, which may be a retirement; a task takes the answer.
fn send(
    set: &Rc<PrimarySet>,
    link: &Rc<MemberLink>,
    connection: &Connection,
    (action, retirement): (ReplicaAction, u64),
    data: BufList,
) {
    let (bytes, is_heartbeat) = (data.len().max(1), matches!(action, ReplicaAction::Heartbeat { .. }));
    link.in_flight.set(link.in_flight.get() + bytes);
    let (set, link, connection) = (set.clone(), link.clone(), connection.clone());
    drop(spawn(async move {
        match ask(&set, &link, &connection, action, data).await {
            Ok(_) => {
                if retirement > link.retired.get() {
                    link.retired.set(retirement);
                    link.since.set(now());
                    // What else the answer says has been noted.
                    set.changed.notify_all();
                }
            }
            Err(error) => link.break_off(error),
        }
        if is_heartbeat {
            link.beating.set(false);
        }
        link.in_flight.set(link.in_flight.get() - bytes);
        link.settled.notify_all();
    }));
}

/// Sends a request, and notes what its answer says.
async fn ask(
    set: &Rc<PrimarySet>,
    link: &MemberLink,
    connection: &Connection,
    action: ReplicaAction,
    data: BufList,
) -> Result<CopyProgress> {
    let sent = now();
    match request(set, connection, action, data).await? {
        ReplicaAnswer::Done(progress) => {
            let (before, at) = (link.progress.get(), now());
            link.progress.set(before.newest(progress));
            link.heard.set(true);
            link.heard_at.set(at);
            link.promised.set(true);
            // A replica whose medium fails still follows, and answers heartbeats.
            if link.progress.get() != before {
                link.since.set(at);
            }
            set.granted(link.peer, sent);
            set.note(link.peer, Some(link.copy), progress.head, progress.tail);
            set.hold();
            Ok(progress)
        }
        ReplicaAnswer::Refused(AppendRefused::Superseded(term)) => {
            let error = superseded(term);
            set.stop(error.clone());
            Err(error)
        }
        ReplicaAnswer::Refused(refused) => {
            if refused == AppendRefused::CopyLost {
                link.lost.set(true);
                set.attention.notify_all();
            }
            Err(Error::new(ErrorKind::Io, refused.to_string()))
        }
        ReplicaAnswer::Failed(why) => Err(Error::new(ErrorKind::Io, format!("a replica of the write log: {why}"))),
        ReplicaAnswer::Created(_) | ReplicaAnswer::Window(_) => {
            Err(Error::new(ErrorKind::Io, "a replica's answer is to something else"))
        }
    }
}

async fn request(
    set: &PrimarySet,
    connection: &Connection,
    action: ReplicaAction,
    data: BufList,
) -> Result<ReplicaAnswer> {
    match action {
        // A retirement is sent after the entries that it is about.
        ReplicaAction::Append { .. } | ReplicaAction::AppendPlaced { .. } | ReplicaAction::Retire { .. } => {
            let request = ReplicaRequest { log: set.identity.log, term: set.term, action };
            set.requests.ask(connection, &request, data).await
        }
        // A heartbeat does not wait for a replica's medium.
        action => exchange(set, connection, action, data).await.map(|(answer, _)| answer),
    }
}

/// Sends a request; returns its answer, and the data with it.
pub(super) async fn exchange(
    set: &PrimarySet,
    connection: &Connection,
    action: ReplicaAction,
    data: BufList,
) -> Result<(ReplicaAnswer, BufList)> {
    let request = ReplicaRequest { log: set.identity.log, term: set.term, action };
    let message = Message::new(KIND_REQUEST).front(Buf::copy_of(&request.encode())).data(data);
    let answer = connection.request(message).await;
    let answer = answer.map_err(|error| Error::new(ErrorKind::Io, format!("a replica of the write log: {error}")))?;
    let decoded = ReplicaAnswer::decode(&answer.front.to_vec());
    Ok((decoded.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?, answer.data))
}

/// Reads the payload of an entry from a replica's copy.
pub(super) async fn read(set: &PrimarySet, peer: PeerId, entry: &LogEntry) -> Result<Buf> {
    let Some(connection) = set.keeper.connection(peer) else {
        return Err(Error::new(ErrorKind::Io, "the peer is not connected"));
    };
    let (answer, data) = exchange(set, &connection, ReplicaAction::Read(*entry), BufList::new()).await?;
    match answer {
        ReplicaAnswer::Done(_) => {
            let data = Buf::copy_of(&data.to_vec());
            verify(entry, &data).map(|()| data)
        }
        ReplicaAnswer::Refused(refused) => Err(Error::new(ErrorKind::Io, refused.to_string())),
        ReplicaAnswer::Failed(why) => Err(Error::new(ErrorKind::Io, why)),
        ReplicaAnswer::Created(_) | ReplicaAnswer::Window(_) => {
            Err(Error::new(ErrorKind::Io, "a replica's answer is to something else"))
        }
    }
}

/// Creates a copy at a peer; returns its id.
pub(super) async fn create(set: &PrimarySet, peer: PeerId) -> Result<LogId> {
    let Some(connection) = set.keeper.connection(peer) else {
        return Err(Error::new(ErrorKind::Io, "the peer is not connected"));
    };
    let LogIdentity { volume, name, size, unit, .. } = set.identity.clone();
    let epoch = set.record().epoch();
    let in_memory = set.mirror.is_needed();
    let action = ReplicaAction::Create { volume, name, size, unit, epoch, in_memory };
    match request(set, &connection, action, BufList::new()).await? {
        ReplicaAnswer::Created(copy) => Ok(copy),
        ReplicaAnswer::Refused(AppendRefused::Superseded(term)) => Err(superseded(term)),
        ReplicaAnswer::Refused(refused) => Err(Error::new(ErrorKind::Io, refused.to_string())),
        ReplicaAnswer::Failed(why) => Err(Error::new(ErrorKind::Io, why)),
        ReplicaAnswer::Done(_) | ReplicaAnswer::Window(_) => {
            Err(Error::new(ErrorKind::Io, "a replica's answer is to something else"))
        }
    }
}

/// Asks a peer to discard its copy.
pub(super) async fn discard(set: &PrimarySet, peer: PeerId) -> Result<()> {
    let Some(connection) = set.keeper.connection(peer) else {
        return Err(Error::new(ErrorKind::Io, "the peer is not connected"));
    };
    let epoch = set.record().epoch();
    match request(set, &connection, ReplicaAction::Discard { epoch }, BufList::new()).await? {
        ReplicaAnswer::Done(_) | ReplicaAnswer::Refused(AppendRefused::CopyLost) => Ok(()),
        ReplicaAnswer::Refused(refused) => Err(Error::new(ErrorKind::Io, refused.to_string())),
        ReplicaAnswer::Failed(why) => Err(Error::new(ErrorKind::Io, why)),
        ReplicaAnswer::Created(_) | ReplicaAnswer::Window(_) => {
            Err(Error::new(ErrorKind::Io, "a replica's answer is to something else"))
        }
    }
}
