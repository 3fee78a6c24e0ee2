//! Sessions of forwarders at the owner of volumes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use forebay_reactor::Instant;

use crate::wire::{ForwardRefusal, ForwarderStart, LEASES, RequestClass, RequestFootprint};

/// Number of a connection, never given twice.
pub type PeerNumber = u64;

/// Session: the connection that it was opened on, and the number that the forwarder has drawn.
pub type ForwardSessionKey = (PeerNumber, u64);

/// Maximum number of requests of a session that have not been answered.
pub const SESSION_REQUESTS_MAX: usize = 256;
/// Bytes of payload of unanswered requests of a session from which on no other may come; one request always may.
pub const SESSION_BYTES_MAX: usize = 16 << 20;
/// Maximum number of sessions of one connection.
pub const PEER_SESSIONS_MAX: usize = 4096;

/// Number of grants of a connection that may be named.
const GRANTS_MAX: usize = 4;

/// Decision about a request to open a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenStep {
    /// Open: no request of a former session is being executed.
    Open {
        /// Term of the volume.
        term: u64,
        /// Lease of the session, if it has one.
        lease: Option<Duration>,
    },
    /// Requests of a former session are being executed; decide again when one has completed.
    Wait,
    /// Refused, for this reason.
    Refuse(ForwardRefusal),
}

/// Reason for which a request is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdmitRefused {
    /// Not executed; the forwarder is answered so.
    Refusal(ForwardRefusal),
    /// More requests or bytes than a session may have: the forwarder violates the protocol.
    TooMany,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionPhase {
    /// Waits for the end of former sessions.
    Opening,
    Open,
    /// Admits nothing; its requests complete.
    Ended,
}

#[derive(Debug)]
struct OwnerSession {
    volume: String,
    start: ForwarderStart,
    phase: SessionPhase,
    /// Lease; `None` for a forwarder of this daemon, which does without.
    lease: Option<Duration>,
    /// Time at which it was opened, from which the lease counts at least.
    opened: Instant,
    /// Term in which the volume was offered then.
    term: u64,
    /// Accesses that the device is executing.
    accesses: usize,
    /// Reservation actions that are being executed.
    actions: usize,
    /// Number of the newest reservation table that the forwarder has adopted.
    adopted: u64,
    /// Requests that have not been answered, and their bytes.
    unanswered: usize,
    bytes: usize,
}

#[derive(Debug)]
struct OfferedVolume {
    term: u64,
    suspended: bool,
    /// Number of the reservation table; a volume without reservations has one number all the time.
    table: u64,
}

/// Connection of a forwarder.
#[derive(Debug)]
struct ForwarderPeer {
    start: ForwarderStart,
    /// Highest number of a session that was asked for over it.
    highest: u64,
    /// Grants that the forwarder may name, by their numbers, and when they were given; the newest is the last.
    grants: VecDeque<(u64, Instant)>,
    /// Time of the newest grant that the forwarder has named, from which the leases of its sessions count.
    granted: Option<Instant>,
}

/// Request that has been admitted, until the device has executed it.
#[derive(Debug)]
struct AdmittedRequest {
    key: ForwardSessionKey,
    class: RequestClass,
    footprint: RequestFootprint,
}

impl OwnerSession {
    fn is_executing(&self) -> bool {
        self.accesses + self.actions > 0
    }

    fn executing_of(&mut self, class: RequestClass) -> &mut usize {
        if class.is_access() { &mut self.accesses } else { &mut self.actions }
    }
}

/// Sessions of all volumes that a daemon owns.
///
/// Invariants, with the numbers of `docs/design/forward.md`:
/// - F1: only an open session admits requests.
/// - F2: a session opens only when nothing of former sessions of the same start and volume is being executed, and those
///   have ended.
/// - F3: an ended start has no open session, and opens none.
/// - F4: a suspended volume admits nothing.
/// - F10: a session whose lease has run out admits nothing and never will.
/// - F11: no request is executed before a change that it depends on, was admitted earlier in a session that has ended since,
///   and is still being executed.
/// - R1, R5: once [`is_adopted`](Self::is_adopted) is true of a table, no access that an older one has admitted is being
///   executed or will be: each open session has adopted the table or was opened with it, and ended ones have drained.
#[derive(Debug, Default)]
pub struct OwnerSessions {
    volumes: BTreeMap<String, OfferedVolume>,
    /// Volumes that another daemon owns by now, and its name.
    moved: BTreeMap<String, String>,
    sessions: BTreeMap<ForwardSessionKey, OwnerSession>,
    /// Highest number of a session that each start has asked for, by volume.
    newest: BTreeMap<ForwarderStart, BTreeMap<String, u64>>,
    ended: BTreeSet<ForwarderStart>,
    peers: BTreeMap<PeerNumber, ForwarderPeer>,
    /// Requests that are being executed, by their tickets, which are in the order of admission.
    admitted: BTreeMap<u64, AdmittedRequest>,
    next_ticket: u64,
    /// Tickets of those that change something, and whose session has ended.
    left_over: BTreeSet<u64>,
    /// No lease runs out before this.
    lease_ends: Option<Instant>,
    /// Sessions whose lease has run out, until they are taken.
    lapsed: Vec<ForwardSessionKey>,
    /// Number of the newest reservation table of any volume.
    newest_table: u64,
}

impl OwnerSessions {
    /// Offers a volume to forwarders; false if it is offered already.
    pub fn offer(&mut self, volume: &str, term: u64) -> bool {
        if self.volumes.contains_key(volume) {
            return false;
        }
        self.moved.remove(volume);
        self.volumes.insert(volume.to_owned(), OfferedVolume { term, suspended: false, table: 0 });
        self.change_table(volume);
        true
    }

    /// Ends the offer of a volume and its sessions; returns the sessions that were open.  Requests to it are answered with
    /// `hint`, the name of the next owner, from now on.
    pub fn withdraw(&mut self, volume: &str, hint: Option<String>) -> Vec<ForwardSessionKey> {
        self.volumes.remove(volume);
        if let Some(hint) = hint {
            self.moved.insert(volume.to_owned(), hint);
        }
        self.end_volume(volume)
    }

    /// Stops admitting requests to a volume.
    pub fn suspend(&mut self, volume: &str) {
        if let Some(offered) = self.volumes.get_mut(volume) {
            offered.suspended = true;
        }
    }

    /// Admits requests to a volume again, in new sessions.
    pub fn resume(&mut self, volume: &str) {
        if let Some(offered) = self.volumes.get_mut(volume) {
            offered.suspended = false;
        }
    }

    /// Returns whether the device of a volume is executing a request of a forwarder.
    pub fn is_executing(&self, volume: &str) -> bool {
        self.sessions.values().any(|session| session.volume == volume && session.is_executing())
    }

    /// Returns whether any device is executing a request of a start.
    pub fn is_executing_for(&self, start: &ForwarderStart) -> bool {
        self.sessions.values().any(|session| session.start == *start && session.is_executing())
    }

    /// Returns the volume of an open session.
    pub fn volume_of(&self, key: ForwardSessionKey) -> Option<&str> {
        self.sessions.get(&key).filter(|session| session.phase == SessionPhase::Open).map(|session| &session.volume[..])
    }

    /// Returns the open sessions of a volume.
    pub fn open_sessions(&self, volume: &str) -> Vec<ForwardSessionKey> {
        let open = |(_, session): &(&ForwardSessionKey, &OwnerSession)| {
            session.volume == volume && session.phase == SessionPhase::Open
        };
        self.sessions.iter().filter(open).map(|(key, _)| *key).collect()
    }

    /// Begins to open a session: ends the former ones of this start and volume at once.  Then [`open_step`](Self::open_step)
    /// decides.  The lease is one of [`LEASES`], or none for a forwarder of this daemon.
    ///
    /// # Errors
    /// The refusal.
    pub fn begin_open(
        &mut self,
        key: ForwardSessionKey,
        volume: &str,
        start: ForwarderStart,
        lease: Option<Duration>,
    ) -> Result<(), ForwardRefusal> {
        self.check_open(key, volume, &start)?;
        let newest = self.newest.entry(start).or_default();
        // A number names a session of a connection, whatever its volume, and is not used again.
        let used = self.peers.get(&key.0).is_some_and(|peer| peer.highest >= key.1);
        if used || newest.get(volume).is_some_and(|number| *number >= key.1) {
            return Err(ForwardRefusal::NoSession);
        }
        newest.insert(volume.to_owned(), key.1);
        let new = || ForwarderPeer { start, highest: 0, grants: VecDeque::new(), granted: None };
        self.peers.entry(key.0).or_insert_with(new).highest = key.1;
        self.end_where(|session, _| session.start == start && session.volume == volume);
        let phase = SessionPhase::Opening;
        let session = OwnerSession {
            volume: volume.to_owned(),
            start,
            phase,
            lease: lease.map(|lease| lease.clamp(*LEASES.start(), *LEASES.end())),
            opened: Instant::default(),
            term: 0,
            accesses: 0,
            actions: 0,
            adopted: 0,
            unanswered: 0,
            bytes: 0,
        };
        self.sessions.insert(key, session);
        Ok(())
    }

    fn check_open(&self, key: ForwardSessionKey, volume: &str, start: &ForwarderStart) -> Result<(), ForwardRefusal> {
        if self.peers.get(&key.0).is_some_and(|peer| peer.start != *start) {
            return Err(ForwardRefusal::Other("a connection belongs to one start of a daemon".into()));
        }
        match self.volumes.get(volume) {
            // Only by the owner, which knows whether requests of the start are being executed.
            Some(_) if self.ended.contains(start) => return Err(ForwardRefusal::StartEnded),
            Some(offered) if offered.suspended => return Err(ForwardRefusal::Moving),
            Some(_) => {}
            None => {
                return Err(match self.moved.get(volume) {
                    Some(hint) => ForwardRefusal::NotOwner { hint: hint.clone() },
                    None => ForwardRefusal::Unknown,
                });
            }
        }
        if self.sessions.range((key.0, 0)..=(key.0, u64::MAX)).count() >= PEER_SESSIONS_MAX {
            return Err(ForwardRefusal::Busy);
        }
        Ok(())
    }

    /// Opens a session that has begun to open if nothing of the former ones is being executed any more.
    pub fn open_step(&mut self, key: ForwardSessionKey, now: Instant) -> OpenStep {
        let Some(session) = self.sessions.get(&key).filter(|session| session.phase == SessionPhase::Opening) else {
            return OpenStep::Refuse(ForwardRefusal::NoSession);
        };
        let (volume, start) = (session.volume.clone(), session.start);
        let refusal = match self.volumes.get(&volume) {
            None => ForwardRefusal::Unknown,
            Some(_) if self.ended.contains(&start) => ForwardRefusal::StartEnded,
            Some(offered) if offered.suspended => ForwardRefusal::Moving,
            Some(offered) => {
                let (term, table) = (offered.term, offered.table);
                let former =
                    |other: &OwnerSession| other.start == start && other.volume == volume && other.is_executing();
                if self.sessions.values().any(former) {
                    return OpenStep::Wait;
                }
                let session = self.sessions.get_mut(&key).expect("it was found above");
                session.phase = SessionPhase::Open;
                session.adopted = table;
                (session.opened, session.term) = (now, term);
                let lease = session.lease;
                self.lease_ends = self.lease_ends.into_iter().chain(lease.map(|lease| now + lease)).min();
                return OpenStep::Open { term, lease };
            }
        };
        self.sessions.remove(&key);
        OpenStep::Refuse(refusal)
    }

    /// Admits a request that has `cost` bytes of payload, and returns its ticket.  It is executed when it does not
    /// [have to wait](Self::must_wait), and must be [completed](Self::executed) and [answered](Self::answered).
    ///
    /// # Errors
    /// The reason for which it must not be executed.
    pub fn admit(
        &mut self,
        key: ForwardSessionKey,
        (class, footprint): (RequestClass, RequestFootprint),
        cost: usize,
        now: Instant,
    ) -> Result<u64, AdmitRefused> {
        self.end_lapsed(now);
        let refused = |refusal| Err(AdmitRefused::Refusal(refusal));
        let Some(session) = self.sessions.get_mut(&key).filter(|session| session.phase == SessionPhase::Open) else {
            return refused(ForwardRefusal::NoSession);
        };
        match self.volumes.get(&session.volume) {
            None => return refused(ForwardRefusal::NoSession),
            Some(offered) if offered.suspended => return refused(ForwardRefusal::Moving),
            Some(_) => {}
        }
        let too_many = session.unanswered >= SESSION_REQUESTS_MAX;
        if too_many || (session.unanswered > 0 && session.bytes + cost > SESSION_BYTES_MAX) {
            return Err(AdmitRefused::TooMany);
        }
        *session.executing_of(class) += 1;
        session.unanswered += 1;
        session.bytes += cost;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.admitted.insert(ticket, AdmittedRequest { key, class, footprint });
        Ok(ticket)
    }

    /// Returns whether an admitted request must not be given to the device yet: a change that it depends on, from a session that
    /// has ended, is being executed.  The host may have sent that change again since, and another one after it.
    ///
    /// Changes that a former term has left over are not waited for: its owner was fenced, or has drained the volume.
    pub fn must_wait(&self, ticket: u64) -> bool {
        let Some(request) = self.admitted.get(&ticket).filter(|_| !self.left_over.is_empty()) else { return false };
        let of = |request: &AdmittedRequest| {
            let session = self.sessions.get(&request.key).expect("a session stays while it has requests");
            (&session.volume[..], session.term)
        };
        let mut earlier = self.left_over.range(..ticket).filter_map(|other| self.admitted.get(other));
        earlier.any(|other| of(other) == of(request) && request.footprint.depends_on(&other.footprint))
    }

    /// Notes that an admitted request is not being executed any more.
    pub fn executed(&mut self, ticket: u64) {
        let AdmittedRequest { key, class, .. } = self.admitted.remove(&ticket).expect("an admitted request");
        self.left_over.remove(&ticket);
        let session = self.sessions.get_mut(&key).expect("a session stays while it has requests");
        *session.executing_of(class) -= 1;
    }

    /// Notes that a forwarder has named a grant: leases of its sessions count from when that was given.  Gives it another one,
    /// with a number that has not been drawn before.
    pub fn renew(&mut self, peer: PeerNumber, named: u64, next: u64, now: Instant) {
        self.end_lapsed(now);
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        let given = peer.grants.iter().find(|(number, _)| *number == named).map(|(_, given)| *given);
        peer.granted = peer.granted.max(given);
        peer.grants.push_back((next, now));
        if peer.grants.len() > GRANTS_MAX {
            peer.grants.pop_front();
        }
    }

    /// Takes the sessions that have ended because their lease has run out.
    pub fn take_lapsed(&mut self, now: Instant) -> Vec<ForwardSessionKey> {
        self.end_lapsed(now);
        std::mem::take(&mut self.lapsed)
    }

    /// Returns a time before which no lease runs out; `None` if there is no lease.
    pub fn next_lease_end(&self) -> Option<Instant> {
        self.lease_ends
    }

    fn end_lapsed(&mut self, now: Instant) {
        // Renewals are not noted there, so that a request costs a comparison.
        if self.lease_ends.is_none_or(|ends| now < ends) {
            return;
        }
        let open = self.sessions.iter().filter(|(_, session)| session.phase == SessionPhase::Open);
        let ends: Vec<_> = open.filter_map(|(key, session)| Some((*key, self.lease_end_of(*key, session)?))).collect();
        let lapsed: BTreeSet<_> = ends.iter().filter(|(_, end)| now >= *end).map(|(key, _)| *key).collect();
        self.lease_ends = ends.iter().map(|(_, end)| *end).filter(|end| now < *end).min();
        let ended = self.end_where(|_, key| lapsed.contains(&key));
        self.lapsed.extend(ended);
    }

    fn lease_end_of(&self, key: ForwardSessionKey, session: &OwnerSession) -> Option<Instant> {
        let granted = self.peers.get(&key.0).and_then(|peer| peer.granted);
        Some(session.opened.max(granted.unwrap_or_default()) + session.lease?)
    }

    /// Returns whether a session is open, without looking at its lease.
    pub fn is_open(&self, key: ForwardSessionKey) -> bool {
        self.sessions.get(&key).is_some_and(|session| session.phase == SessionPhase::Open)
    }

    /// Notes that the answer to an executed request has been queued, or cannot be sent any more.
    pub fn answered(&mut self, key: ForwardSessionKey, cost: usize) {
        let session = self.sessions.get_mut(&key).expect("a session stays while it has requests");
        session.unanswered -= 1;
        session.bytes -= cost;
        self.remove_if_over(key);
    }

    /// Notes that the reservation table of a volume is another one; returns its number, which is higher than any before.
    pub fn change_table(&mut self, volume: &str) -> u64 {
        self.newest_table += 1;
        if let Some(offered) = self.volumes.get_mut(volume) {
            offered.table = self.newest_table;
        }
        self.newest_table
    }

    /// Returns the number of the reservation table of a volume that is offered.
    pub fn table(&self, volume: &str) -> Option<u64> {
        self.volumes.get(volume).map(|offered| offered.table)
    }

    /// Notes that the forwarder of a session has adopted the reservation table with a number.
    pub fn adopted(&mut self, key: ForwardSessionKey, number: u64) {
        let Some(session) = self.sessions.get_mut(&key).filter(|session| session.phase == SessionPhase::Open) else {
            return;
        };
        let newest = self.volumes.get(&session.volume).map_or(0, |offered| offered.table);
        session.adopted = session.adopted.max(number.min(newest));
    }

    /// Ends the open sessions of a volume that have not adopted the table with a number, if they have had their time or the
    /// volume is suspended, so that they cannot drain; returns those.
    pub fn end_unadopted(&mut self, volume: &str, number: u64, late: bool) -> Vec<ForwardSessionKey> {
        if !late && !self.is_suspended(volume) {
            return Vec::new();
        }
        self.end_where(|session, _| {
            session.volume == volume && session.adopted < number && session.phase == SessionPhase::Open
        })
    }

    /// Returns whether a volume that is offered is suspended.
    pub fn is_suspended(&self, volume: &str) -> bool {
        self.volumes.get(volume).is_some_and(|offered| offered.suspended)
    }

    /// Returns whether no access that a table before the one with this number has admitted is being executed or will be.
    pub fn is_adopted(&self, volume: &str, number: u64) -> bool {
        self.sessions.values().all(|session| match session.phase {
            _ if session.volume != volume || session.adopted >= number => true,
            SessionPhase::Opening => true,
            SessionPhase::Open => false,
            SessionPhase::Ended => session.accesses == 0,
        })
    }

    /// Returns whether a session has requests that have not been answered.
    pub fn is_answering(&self, key: ForwardSessionKey) -> bool {
        self.sessions.get(&key).is_some_and(|session| session.unanswered > 0)
    }

    /// Ends the sessions of a volume; returns those that were open.
    pub fn end_volume(&mut self, volume: &str) -> Vec<ForwardSessionKey> {
        self.end_where(|session, _| session.volume == volume)
    }

    /// Ends a session.
    pub fn end_session(&mut self, key: ForwardSessionKey) {
        self.end_where(|_, other| other == key);
    }

    /// Ends the sessions of a connection; returns those that were open.
    pub fn end_peer(&mut self, peer: PeerNumber) -> Vec<ForwardSessionKey> {
        self.end_where(|_, key| key.0 == peer)
    }

    /// Forgets a connection that has ended.
    pub fn forget_peer(&mut self, peer: PeerNumber) {
        self.end_peer(peer);
        self.peers.remove(&peer);
    }

    /// Ends the sessions of a start and refuses it from now on; returns the sessions that were open.
    pub fn end_start(&mut self, start: ForwarderStart) -> Vec<ForwardSessionKey> {
        self.ended.insert(start);
        self.newest.remove(&start);
        self.end_where(|session, _| session.start == start)
    }

    /// Returns the number of sessions that are open or have requests.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Returns whether there is no session.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    fn end_where(&mut self, which: impl Fn(&OwnerSession, ForwardSessionKey) -> bool) -> Vec<ForwardSessionKey> {
        let mut open = Vec::new();
        let mut all = Vec::new();
        for (key, session) in &mut self.sessions {
            if which(session, *key) {
                if session.phase == SessionPhase::Open {
                    open.push(*key);
                }
                session.phase = SessionPhase::Ended;
                all.push(*key);
            }
        }
        let ended: BTreeSet<_> = all.iter().copied().collect();
        let changes =
            |(_, request): &(&u64, &AdmittedRequest)| request.footprint.is_change() && ended.contains(&request.key);
        self.left_over.extend(self.admitted.iter().filter(changes).map(|(ticket, _)| *ticket));
        all.into_iter().for_each(|key| self.remove_if_over(key));
        open
    }

    /// Removes a session that has ended and has no requests.
    fn remove_if_over(&mut self, key: ForwardSessionKey) {
        let over = |session: &OwnerSession| session.phase == SessionPhase::Ended && session.unanswered == 0;
        if self.sessions.get(&key).is_some_and(over) {
            self.sessions.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests;
