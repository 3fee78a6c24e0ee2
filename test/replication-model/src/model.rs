//! The model: its state, its limits, its properties.

use std::collections::BTreeSet;

use forebay_writelog::replication::{LeasePromise, MemberState};

use crate::backend::{Backend, BackendOp, Record};
use crate::peer::{Disk, Message, PeerRole, PeerState};
use crate::step;

/// Limits of an exploration.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Number of peers.
    pub peers: u8,
    /// Number of them that are complete members at first.
    pub members: u8,
    /// Number of them that are being filled at first.
    pub filling: u8,
    /// Writes of the host.
    pub writes: u8,
    /// Changes of the record: openings, takeovers, members that come and go.
    pub changes: u64,
    /// Crashes of processes.
    pub crashes: u8,
    /// Media that fail.
    pub media: u8,
    /// Primaries that close the log.
    pub closes: u8,
    /// Time at which clocks end; 0 leaves out reads and leases.
    pub time: u64,
}

impl Limits {
    /// Returns the record at first: peer 0 has opened the log before, as another client.
    fn first_record(&self) -> Record {
        let copy = |peer| [peer; 16];
        let mut record = Record::created(0, copy(0), (0, 0));
        for peer in 1..self.members {
            record = record.with_filling(peer, copy(peer)).with_complete(peer).expect("being filled");
        }
        (self.members..self.members + self.filling).fold(record, |record, peer| record.with_filling(peer, copy(peer)))
    }

    /// Returns whether the record may change once more.
    pub(crate) fn may_change(&self, epoch: u64) -> bool {
        epoch < self.first_record().epoch() + self.changes
    }
}

/// Length of a lease.
pub(crate) const LEASE: u64 = 1;

/// Rule of the protocol that is left out, to show that the model finds what it prevents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Omission {
    /// R1: a write is acknowledged when the primary alone has it.
    AcknowledgedByPrimaryAlone,
    /// R2: the primary goes on without a replica before the record says so.
    DroppedBeforeRecord,
    /// R3: a takeover does not fence the former primary.
    NotFenced,
    /// R3: a peer takes over though the record does not name it a complete member.
    TakenOverByAnyone,
    /// R3: the record is set without comparing it.
    RecordSetUnconditionally,
    /// R3: a replica goes on taking entries of a term that is over.
    FormerTermAccepted,
    /// R4: a replica becomes a complete member before it has everything.
    CompleteBeforeFilled,
    /// R5: entries are written back before the replicas have retired those before them.
    RetirementNotAwaited,
    /// An opening serves before the members have all that it found in its own copy.
    ServedBeforeReconciled,
    /// A peer takes over while its promise to the primary holds.
    PromiseBroken,
    /// A medium that was replaced counts as the copy of a complete member.
    BlankMediumTrusted,
    /// A primary closes the log while a write of its client is on its way to the backend.
    ClosedBeforeWritten,
    /// A primary that was fenced opens the log again as the same client.
    FencedForGood,
}

impl Omission {
    /// All omissions.
    pub const ALL: [Self; 13] = [
        Self::AcknowledgedByPrimaryAlone,
        Self::DroppedBeforeRecord,
        Self::NotFenced,
        Self::TakenOverByAnyone,
        Self::RecordSetUnconditionally,
        Self::FormerTermAccepted,
        Self::CompleteBeforeFilled,
        Self::RetirementNotAwaited,
        Self::ServedBeforeReconciled,
        Self::PromiseBroken,
        Self::BlankMediumTrusted,
        Self::ClosedBeforeWritten,
        Self::FencedForGood,
    ];
}

/// Model of one log and its peers.
#[derive(Debug, Clone)]
pub struct ReplicationModel {
    /// Limits of the exploration.
    pub limits: Limits,
    /// Rule that is left out, if any.
    pub omission: Option<Omission>,
}

/// State of the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelState {
    /// State of the backend.
    pub backend: Backend,
    /// State of each peer.
    pub peers: Vec<PeerState>,
    /// Messages that were ever sent: each arrives any number of times, in any order.
    pub messages: BTreeSet<Message>,
    /// Number that the host writes next.
    pub next: u8,
    /// Number that the host waits for: the peer it was sent to, and the entry there.
    pub pending: Option<(u8, u64)>,
    /// Newest number that the host knows: it was acknowledged, or read.
    pub known: u8,
    /// Time, by all clocks.
    pub now: u64,
    /// Crashes so far.
    pub crashes: u8,
    /// Media that have failed so far.
    pub media: u8,
    /// Primaries that have closed the log so far.
    pub closes: u8,
    /// Property that the last event has broken, if any.
    pub violation: Option<&'static str>,
}

/// Event of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelAction {
    /// The host writes the next number, to this peer.
    Write(u8),
    /// The host gives up a write that a peer which no longer serves has not answered.
    GiveUp,
    /// The host is told that its write is done.
    Acknowledge,
    /// The medium of a primary has one more entry.
    Persist(u8),
    /// A message arrives.
    Deliver(Message),
    /// The backend applies an operation.
    Apply(BackendOp),
    /// A process dies, and is started again.
    Crash(u8),
    /// The medium of a primary fails, or that of a replica is replaced by a blank one.
    MediumFails(u8),
    /// A peer begins to open the log, or to take it over.
    Open(u8),
    /// A peer that opens the log fences the last primary's client.
    Fence(u8),
    /// A peer that opens the log sends the change of the record.
    SendOpening(u8),
    /// A peer reads the record.
    ReadRecord(u8),
    /// A primary sends a record without a member.
    Drop(u8, u8),
    /// A primary sends a record with a peer to be filled.
    Fill(u8, u8),
    /// A primary sends a record with a filled peer as complete.
    Complete(u8, u8),
    /// A peer whose client is fenced finds out, and goes on as another client.
    NoticeFence(u8),
    /// Time passes.
    Tick,
    /// A primary asks its members for their promise.
    AskLease(u8),
    /// The host reads from a primary that may answer.
    Read(u8),
    /// A primary closes the log, and sends a record without a client.
    Close(u8),
    /// A primary begins to write an entry back.
    WriteBack(u8),
    /// A primary's medium has the new tail.
    Retire(u8),
}

impl ModelState {
    /// Returns the record's verdict on a peer's role: whether it is the primary of the current term.
    pub fn is_current(&self, peer: u8) -> bool {
        let record = &self.backend.record;
        match &self.peers[peer as usize].role {
            PeerRole::Primary(serving) => serving.progress.record().term() == record.term(),
            _ => false,
        }
    }

    /// Returns what is wrong with the state, if anything.
    pub fn broken(&self) -> Option<&'static str> {
        if !self.nothing_is_lost() {
            return Some("a complete member lacks an acknowledged write");
        }
        if !self.primary_has_everything() {
            return Some("the primary serves, and lacks an acknowledged write");
        }
        self.violation
    }

    /// Returns whether the current primary, once it serves, has everything that was acknowledged.
    fn primary_has_everything(&self) -> bool {
        let PeerRole::Primary(serving) = &self.peers[self.backend.record.primary() as usize].role else { return true };
        let is_current = serving.progress.record().term() == self.backend.record.term();
        let newest = serving.values.last().copied().unwrap_or(0).max(self.backend.value);
        !is_current || !serving.progress.serves() || newest >= self.known
    }

    /// Returns whether a peer has taken over, and a write has been acknowledged since.
    pub fn shows_takeover(&self) -> bool {
        let primary = self.backend.record.primary();
        self.known > 0 && primary != 0 && is_newest_of(self, primary)
    }

    /// Returns whether every copy that may be served next has everything that was acknowledged.
    fn nothing_is_lost(&self) -> bool {
        let record = &self.backend.record;
        let copies = record.members().filter(|(_, member)| member.state == MemberState::Complete);
        copies
            .map(|(peer, member)| (&self.peers[peer as usize].disk, member))
            .filter(|(disk, member)| !disk.failed && disk.copy.id() == member.copy)
            .all(|(disk, _)| disk.newest().max(self.backend.value) >= self.known)
    }
}

impl ReplicationModel {
    /// Returns the state at first.
    pub fn first_state(&self) -> ModelState {
        let record = self.limits.first_record();
        let peer = |peer| {
            let disk = Disk::blank(peer);
            PeerState { starts: 1, disk, promise: LeasePromise::default(), role: PeerRole::Idle }
        };
        let peers = (0..self.limits.peers).map(peer).collect();
        let backend = Backend { record, value: 0, fenced: BTreeSet::new(), ops: BTreeSet::new() };
        ModelState {
            backend,
            peers,
            messages: BTreeSet::new(),
            next: 1,
            pending: None,
            known: 0,
            now: 0,
            crashes: 0,
            media: 0,
            closes: 0,
            violation: None,
        }
    }

    /// Returns the events that may happen in a state.
    pub fn actions(&self, state: &ModelState) -> Vec<ModelAction> {
        let mut actions = Vec::new();
        step::actions(self, state, &mut actions);
        actions
    }

    /// Returns the state after an event; `None` where it makes no difference.
    pub fn next_state(&self, last: &ModelState, action: ModelAction) -> Option<ModelState> {
        let mut state = last.clone();
        step::apply(self, &mut state, action)?;
        (state != *last).then_some(state)
    }
}

/// Returns whether the newest acknowledged write was appended in a peer's own current term.
fn is_newest_of(state: &ModelState, peer: u8) -> bool {
    let PeerRole::Primary(serving) = &state.peers[peer as usize].role else { return false };
    let term = state.backend.record.term();
    let Some(number) = serving.values.iter().position(|value| *value == state.known) else { return false };
    state.is_current(peer) && serving.log.term_of(number as u64) == Some(term)
}

/// Returns whether a peer is a complete member.
pub(crate) fn is_complete(record: &Record, peer: u8) -> bool {
    record.state(peer) == Some(MemberState::Complete)
}
