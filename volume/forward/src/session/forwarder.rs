//! State machine of a forwarded volume: its session, and the requests that wait or are in flight.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_reactor::Instant;

use crate::wire::RequestClass;

/// Bounds of a forwarded volume.
#[derive(Debug, Clone, Copy)]
pub struct ForwarderLimits {
    /// Maximum number of requests in flight; further ones wait in order.
    pub requests_max: usize,
    /// Maximum bytes of payload of the requests in flight; one request may exceed it.
    pub bytes_max: usize,
    /// Time for which a request waits for an owner before it fails.
    pub patience: Duration,
    /// Time for which a compare-and-write that a former owner may have executed waits for its answer, after the next session
    /// has opened.
    pub answer_grace: Duration,
    /// First delay before an owner that did not open a session is asked again ...
    pub backoff_min: Duration,
    /// ... and the longest; the delay doubles with each attempt.
    pub backoff_max: Duration,
    /// Lease that sessions are opened with.
    pub lease: Duration,
}

impl Default for ForwarderLimits {
    fn default() -> Self {
        Self {
            requests_max: 128,
            bytes_max: 8 << 20,
            patience: Duration::from_secs(30),
            answer_grace: Duration::from_secs(1),
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(1),
            lease: Duration::from_secs(2),
        }
    }
}

/// Returns the time at which a lease has run out at the owner, if it counts there from a grant that was received at `received`
/// or earlier.  Clocks may differ in speed by one part in 16.
pub fn lease_is_over(received: Instant, lease: Duration) -> Instant {
    received + lease + lease / 16
}

/// End of one attempt to have a request executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// Answered with a result: it is over.
    Answered,
    /// Not executed: the volume is being moved, or the session has ended.
    NotExecuted,
    /// Executed by an owner that is fenced or stops: the outcome is unknown.
    OwnerStopped,
    /// Not answered, as the connection was lost: it may still be executed.
    Lost,
}

/// Failure to open a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionFailure {
    /// May work later.
    Retry,
    /// Never works again for this start of the daemon.
    Final,
}

/// End of a request that is due to something else than an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolution<R> {
    /// No owner has taken the request in time.  Nothing of it is in flight.
    TimedOut(R),
    /// The request may or may not have been executed, and must not be repeated.
    OutcomeUnknown(R),
    /// The reservations have changed since the request was admitted.  Nothing of it is in flight; a former owner may have
    /// executed it.
    Outdated(R),
    /// The volume was given up.  No attempt of the request begins any more, and one that is being executed is executed before
    /// any later request that depends on it: hosts may send it again over another path.
    GivenUp(R),
}

/// Request to send now.
#[derive(Debug)]
pub struct RequestToSend<'a, R> {
    /// Number of the session.
    pub session: u64,
    /// Number of the request.
    pub id: u64,
    /// Request as it was pushed.
    pub request: &'a R,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ForwarderPhase {
    /// No session.
    Suspended,
    /// An owner was asked for a session, which may have ended before the answer is seen.
    Opening { session: u64, owner: u64, ended: bool },
    /// A session is open; if `ending`, nothing more is sent in it.  `stopped`: its owner is fenced or stops.
    Open { session: u64, owner: u64, ending: bool, stopped: bool },
    /// Refused for good.
    Dead,
}

/// Knowledge of former attempts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FormerAttempts {
    /// None has been executed.
    None,
    /// One may have been executed, and none will be.
    Over,
    /// One may be executed until the next session opens.
    InDoubt,
}

#[derive(Debug)]
struct ForwardedEntry<R> {
    request: R,
    cost: usize,
    class: RequestClass,
    /// Number of the reservation table that had been adopted when the request came.
    table: u64,
    since: Instant,
    former: FormerAttempts,
    /// Session of the last attempt, if its answer may still arrive.
    attempt: Option<u64>,
}

impl<R> ForwardedEntry<R> {
    /// Returns whether a table before this one has admitted the request.
    fn is_older_than(&self, table: u64) -> bool {
        self.class.is_access() && self.table < table
    }
}

/// Session and requests of a forwarded volume.
///
/// Invariants, with the numbers of `docs/design/forward.md`:
/// - F2: a request is sent again only in a session that has opened after the session of its former attempt has ended.
/// - F5: a request that fails with `TimedOut` is not in flight anywhere.
/// - F6: a request that must not be repeated is sent again only if no former attempt can have been executed.
/// - F12: a request that was sent ends as given up only when no attempt of it begins any more.
/// - F7: terms of sessions do not decrease.
/// - R5: a session that was opened with a reservation table gets no access that an older table has admitted.
#[derive(Debug)]
pub struct ForwarderState<R> {
    limits: ForwarderLimits,
    phase: ForwarderPhase,
    /// Connection to the owner, as far as that is known.
    owner: Option<u64>,
    /// Highest term of a session, or that the owner is known to have.
    term: u64,
    waiting: BTreeMap<u64, ForwardedEntry<R>>,
    sent: BTreeMap<u64, ForwardedEntry<R>>,
    sent_bytes: usize,
    /// Reservation actions that are in flight.  They are not bounded here, as they may wait for accesses.
    sent_actions: usize,
    /// Requests that must not be repeated and whose outcome is final, but not known yet; and until when their answers are
    /// waited for.
    unresolved: BTreeMap<u64, (ForwardedEntry<R>, Instant)>,
    next_id: u64,
    /// Number of the newest reservation table of which it is certain that older ones admit no further request.
    table: u64,
    suspended_since: Instant,
    retry_at: Instant,
    backoff: Duration,
    /// Set once hosts are to use other paths: nothing more is sent.
    given_up: bool,
    /// Time from which no owner begins to execute a request of any session, unless a lease is renewed.
    leases_over: Option<Instant>,
}

impl<R> ForwarderState<R> {
    /// Creates the state of a volume without a session.
    pub fn new(limits: ForwarderLimits, now: Instant) -> Self {
        Self {
            limits,
            phase: ForwarderPhase::Suspended,
            owner: None,
            term: 0,
            waiting: BTreeMap::new(),
            sent: BTreeMap::new(),
            sent_bytes: 0,
            sent_actions: 0,
            unresolved: BTreeMap::new(),
            next_id: 0,
            table: 0,
            suspended_since: now,
            retry_at: now,
            backoff: limits.backoff_min,
            given_up: false,
            leases_over: None,
        }
    }

    /// Adds a request behind all others.
    pub fn push(&mut self, request: R, cost: usize, class: RequestClass, now: Instant) {
        let (table, former) = (self.table, FormerAttempts::None);
        let entry = ForwardedEntry { request, cost, class, table, since: now, former, attempt: None };
        self.waiting.insert(self.next_id, entry);
        self.next_id += 1;
    }

    /// Notes who owns the volume: a connection to the owner, and the term if it is known.  A session with another owner is
    /// given up: the group names a next owner only after the former one has drained or was fenced.  Returns false for an owner
    /// of a former term, which is ignored.
    pub fn set_owner(&mut self, owner: Option<u64>, term: Option<u64>, now: Instant) -> bool {
        if term.is_some_and(|term| term < self.term) {
            return false;
        }
        self.term = self.term.max(term.unwrap_or(0));
        if owner == self.owner {
            return true;
        }
        self.owner = owner;
        let Some(owner) = owner else { return true };
        match self.phase {
            ForwarderPhase::Opening { owner: other, .. } | ForwarderPhase::Open { owner: other, .. }
                if other != owner =>
            {
                self.abandon(now);
            }
            _ => {}
        }
        self.retry_at = now;
        self.backoff = self.limits.backoff_min;
        true
    }

    /// Returns the owner to ask for a session now, if there is one to ask.
    pub fn owner_to_ask(&self, now: Instant) -> Option<u64> {
        let may_ask = self.phase == ForwarderPhase::Suspended && now >= self.retry_at && !self.given_up;
        self.owner.filter(|_| may_ask)
    }

    /// Notes that the owner was asked for a session, with a number higher than any before.
    pub fn begin_open(&mut self, session: u64) {
        let owner = self.owner.expect("an owner that is asked");
        self.phase = ForwarderPhase::Opening { session, owner, ended: false };
    }

    /// Returns whether a session that an owner of a term has opened is of use.
    pub fn is_awaited(&self, session: u64, term: u64) -> bool {
        matches!(self.phase, ForwarderPhase::Opening { session: asked, .. } if asked == session) && term >= self.term
    }

    /// Notes that a session is open, whose reservation table has been [adopted](Self::adopt) with this number.  Returns the
    /// requests that end by that: all former sessions have ended, so their outcomes are final, and what an older table has
    /// admitted is not sent.  `None`: the session is of no use.
    pub fn opened(&mut self, session: u64, term: u64, table: u64, now: Instant) -> Option<Vec<Resolution<R>>> {
        let ForwarderPhase::Opening { session: asked, owner, ended } = self.phase else { return None };
        if asked != session {
            return None;
        }
        if self.given_up {
            self.phase = ForwarderPhase::Suspended;
            return None;
        }
        if term < self.term {
            // An owner that does not know yet that it is not.
            self.open_failed(session, SessionFailure::Retry, now);
            return None;
        }
        self.term = term;
        self.adopt(table);
        for entry in self.waiting.values_mut().filter(|entry| entry.former == FormerAttempts::InDoubt) {
            entry.former = FormerAttempts::Over;
        }
        self.phase = ForwarderPhase::Open { session, owner, ending: false, stopped: false };
        if ended {
            self.suspend_after(self.limits.backoff_min, now);
        }
        let mut over = self.take_unrepeatable(now);
        let table = self.table;
        let outdated = self.waiting.extract_if(.., |_, entry| entry.is_older_than(table));
        over.extend(outdated.map(|(_, entry)| Resolution::Outdated(entry.request)));
        Some(over)
    }

    /// Notes that all accesses that tables before this one have admitted have been pushed.
    pub fn adopt(&mut self, table: u64) {
        self.table = self.table.max(table);
    }

    /// Returns the number of the table that the next request counts as admitted by.
    pub fn table(&self) -> u64 {
        self.table
    }

    /// Returns whether no access that a table before this one has admitted waits or is in flight.  In a session that has ended
    /// that may take until the next one.
    pub fn has_drained(&self, table: u64) -> bool {
        !self.waiting.values().chain(self.sent.values()).any(|entry| entry.is_older_than(table))
    }

    /// Takes out the requests that may have been executed and must not be repeated; those whose answers may still arrive wait
    /// for them.
    fn take_unrepeatable(&mut self, now: Instant) -> Vec<Resolution<R>> {
        let unrepeatable =
            |entry: &ForwardedEntry<R>| entry.class.is_once_only() && entry.former == FormerAttempts::Over;
        let mut over = Vec::new();
        for (id, entry) in self.waiting.extract_if(.., |_, entry| unrepeatable(entry)) {
            match entry.attempt {
                None => over.push(Resolution::OutcomeUnknown(entry.request)),
                Some(_) => drop(self.unresolved.insert(id, (entry, now + self.limits.answer_grace))),
            }
        }
        over
    }

    /// Notes that a session could not be opened.  After [`SessionFailure::Final`] all requests must be
    /// [taken](Self::take_all) and failed.
    pub fn open_failed(&mut self, session: u64, failure: SessionFailure, now: Instant) {
        if !matches!(self.phase, ForwarderPhase::Opening { session: asked, .. } if asked == session) {
            return;
        }
        self.phase = match failure {
            SessionFailure::Retry => ForwarderPhase::Suspended,
            SessionFailure::Final => ForwarderPhase::Dead,
        };
        self.retry_at = now + self.backoff;
        self.backoff = (self.backoff * 2).min(self.limits.backoff_max);
    }

    /// Returns the next request to send, which is in flight from then on.
    pub fn next_to_send(&mut self) -> Option<RequestToSend<'_, R>> {
        let ForwarderPhase::Open { session, ending: false, .. } = self.phase else { return None };
        if self.given_up {
            return None;
        }
        let (&id, entry) = self.waiting.first_key_value()?;
        let accesses = self.sent.len() - self.sent_actions;
        let full = accesses >= self.limits.requests_max || self.sent_bytes + entry.cost > self.limits.bytes_max;
        if full && accesses > 0 && entry.class.is_access() {
            return None;
        }
        let (_, entry) = self.waiting.pop_first()?;
        self.sent_bytes += entry.cost;
        self.sent_actions += usize::from(!entry.class.is_access());
        let entry = self.sent.entry(id).or_insert(entry);
        entry.attempt = Some(session);
        Some(RequestToSend { session, id, request: &entry.request })
    }

    /// Notes the end of an attempt.  Returns the request if it is over: with [`AttemptEnd::Answered`] the caller has its
    /// result, otherwise the outcome is unknown.
    pub fn answered(&mut self, session: u64, id: u64, end: AttemptEnd, now: Instant) -> Option<R> {
        if !self.is_current(session) {
            return self.answered_late(session, id, end);
        }
        let mut entry = self.sent.remove(&id)?;
        self.sent_bytes -= entry.cost;
        self.sent_actions -= usize::from(!entry.class.is_access());
        if end == AttemptEnd::Answered {
            self.backoff = self.limits.backoff_min;
            self.suspend_if_drained(now);
            return Some(entry.request);
        }
        if let ForwarderPhase::Open { ending, stopped, .. } = &mut self.phase {
            *ending = true;
            *stopped |= end == AttemptEnd::OwnerStopped;
        }
        let mut over = None;
        match end {
            AttemptEnd::Answered | AttemptEnd::NotExecuted => {}
            AttemptEnd::OwnerStopped => entry.former = FormerAttempts::Over,
            AttemptEnd::Lost => entry.former = FormerAttempts::InDoubt,
        }
        entry.attempt = None;
        if entry.class.is_once_only() && entry.former == FormerAttempts::Over {
            over = Some(entry.request);
        } else {
            self.waiting.insert(id, entry);
        }
        self.suspend_if_drained(now);
        over
    }

    /// Notes the end of an attempt in a session that was given up.  It counts unless the request was sent again.
    fn answered_late(&mut self, session: u64, id: u64, end: AttemptEnd) -> Option<R> {
        let of_attempt = |entry: &ForwardedEntry<R>| entry.attempt == Some(session);
        if let Some(entry) = self.waiting.get_mut(&id).filter(|entry| of_attempt(entry)) {
            entry.attempt = None;
            match end {
                AttemptEnd::Answered => return self.waiting.remove(&id).map(|entry| entry.request),
                AttemptEnd::NotExecuted => entry.former = FormerAttempts::None,
                AttemptEnd::OwnerStopped if entry.class.is_once_only() => {
                    return self.waiting.remove(&id).map(|entry| entry.request);
                }
                AttemptEnd::OwnerStopped => entry.former = FormerAttempts::Over,
                AttemptEnd::Lost => {}
            }
        } else if self.unresolved.get(&id).is_some_and(|(entry, _)| of_attempt(entry)) {
            let (mut entry, _) = self.unresolved.remove(&id)?;
            // One that may not be sent any more fails as if its outcome were unknown.
            if end != AttemptEnd::NotExecuted || entry.is_older_than(self.table) {
                return Some(entry.request);
            }
            (entry.former, entry.attempt) = (FormerAttempts::None, None);
            self.waiting.insert(id, entry);
        }
        None
    }

    /// Notes that a session has ended or is of no use: nothing more is sent in it, and the next one is opened when all that was
    /// sent has been answered or lost.
    pub fn end(&mut self, session: u64, now: Instant) {
        match &mut self.phase {
            ForwarderPhase::Opening { session: asked, ended, .. } if *asked == session => *ended = true,
            ForwarderPhase::Open { session: open, ending, .. } if *open == session => *ending = true,
            _ => {}
        }
        self.suspend_if_drained(now);
    }

    fn is_current(&self, session: u64) -> bool {
        matches!(self.phase,
            ForwarderPhase::Opening { session: current, .. } | ForwarderPhase::Open { session: current, .. }
            if current == session)
    }

    /// Gives a session up at once: what is in flight may still be executed.
    fn abandon(&mut self, now: Instant) {
        for (id, mut entry) in std::mem::take(&mut self.sent) {
            entry.former = FormerAttempts::InDoubt;
            self.waiting.insert(id, entry);
        }
        (self.sent_bytes, self.sent_actions) = (0, 0);
        self.suspend_after(Duration::ZERO, now);
    }

    fn suspend_if_drained(&mut self, now: Instant) {
        if matches!(self.phase, ForwarderPhase::Open { ending: true, .. }) && self.sent.is_empty() {
            self.suspend_after(self.backoff, now);
            self.backoff = (self.backoff * 2).min(self.limits.backoff_max);
        }
    }

    fn suspend_after(&mut self, pause: Duration, now: Instant) {
        // An owner that opens sessions and executes nothing must not renew patience.
        if matches!(self.phase, ForwarderPhase::Open { stopped: false, .. }) {
            self.suspended_since = now;
        }
        self.phase = ForwarderPhase::Suspended;
        self.retry_at = now + pause;
    }

    /// Notes that leases of sessions count until this time at the latest, unless they are renewed again.
    pub fn leases_until(&mut self, over: Instant) {
        self.leases_over = self.leases_over.max(Some(over));
    }

    /// Gives the volume up: nothing more is sent.  Requests that may still be executed end when their sessions have
    /// [been closed](Self::closed), or their leases are over; see [`expired`](Self::expired).
    pub fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Returns whether the volume was given up.
    pub fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Returns whether the volume was given up, and requests of it wait for the end of leases.
    pub fn waits_for_leases(&self) -> bool {
        self.given_up && self.leases_over.is_some() && !(self.waiting.is_empty() && self.sent.is_empty())
    }

    /// Notes that the owner has ended a session, so that none of its requests begins any more.  Former sessions of the volume
    /// have ended before it was opened.
    pub fn closed(&mut self, session: u64) {
        let is_open = matches!(self.phase, ForwarderPhase::Open { session: open, .. } if open == session);
        if self.given_up && is_open {
            self.leases_over = None;
        }
    }

    /// Takes out the requests that may end as the volume was given up.
    fn take_given_up(&mut self, now: Instant) -> Vec<Resolution<R>> {
        let are_over = self.leases_over.is_none_or(|over| now >= over);
        let ends = |entry: &ForwardedEntry<R>| are_over || entry.former != FormerAttempts::InDoubt;
        let mut taken: Vec<_> =
            self.waiting.extract_if(.., |_, entry| ends(entry)).map(|(_, entry)| (entry, false)).collect();
        if are_over {
            (self.sent_bytes, self.sent_actions) = (0, 0);
            taken.extend(std::mem::take(&mut self.sent).into_values().map(|entry| (entry, true)));
            if matches!(self.phase, ForwarderPhase::Open { .. }) {
                self.phase = ForwarderPhase::Suspended;
            }
        }
        let ended = taken.into_iter().map(|(entry, was_sent)| {
            let executed = was_sent || entry.former != FormerAttempts::None;
            match executed && entry.class.is_once_only() {
                true => Resolution::OutcomeUnknown(entry.request),
                false => Resolution::GivenUp(entry.request),
            }
        });
        ended.collect()
    }

    /// Takes out the requests that have waited for too long, for an owner or for the answer of a former one, and those that may
    /// end as the volume was given up.
    pub fn expired(&mut self, now: Instant) -> Vec<Resolution<R>> {
        let given_up = self.given_up;
        let unknown = self.unresolved.extract_if(.., |_, (_, until)| given_up || now >= *until);
        let mut over: Vec<_> = unknown.map(|(_, (entry, _))| Resolution::OutcomeUnknown(entry.request)).collect();
        if self.given_up {
            over.extend(self.take_given_up(now));
        }
        if matches!(self.phase, ForwarderPhase::Open { .. }) || self.patience_ends().is_none_or(|end| now < end) {
            return over;
        }
        let (since, patience) = (self.suspended_since, self.limits.patience);
        let due = |entry: &ForwardedEntry<R>| {
            entry.former != FormerAttempts::InDoubt && now >= entry.since.max(since) + patience
        };
        let taken = self.waiting.extract_if(.., |_, entry| due(entry));
        over.extend(taken.map(|(_, entry)| Resolution::TimedOut(entry.request)));
        over
    }

    /// Returns the time at which something is to be done without an event, if any.
    pub fn deadline(&self) -> Option<Instant> {
        let unresolved = self.unresolved.values().map(|(_, until)| *until).min();
        if self.given_up {
            return self.leases_over.filter(|_| !self.waiting.is_empty() || !self.sent.is_empty()).or(unresolved);
        }
        if matches!(self.phase, ForwarderPhase::Open { .. } | ForwarderPhase::Dead) {
            return unresolved;
        }
        let retry = self.owner.filter(|_| self.phase == ForwarderPhase::Suspended).map(|_| self.retry_at);
        self.patience_ends().into_iter().chain(retry).chain(unresolved).min()
    }

    /// Returns the time at which the first request has waited for too long.  Requests are in the order of their beginnings.
    fn patience_ends(&self) -> Option<Instant> {
        let first = self.waiting.values().find(|entry| entry.former != FormerAttempts::InDoubt);
        first.map(|entry| entry.since.max(self.suspended_since) + self.limits.patience)
    }

    /// Takes out all requests.
    pub fn take_all(&mut self) -> Vec<R> {
        (self.sent_bytes, self.sent_actions) = (0, 0);
        let unresolved = std::mem::take(&mut self.unresolved).into_values().map(|(entry, _)| entry);
        let all = std::mem::take(&mut self.sent).into_values().chain(std::mem::take(&mut self.waiting).into_values());
        all.chain(unresolved).map(|entry| entry.request).collect()
    }

    /// Returns whether no request waits or is in flight.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.sent.is_empty() && self.unresolved.is_empty()
    }

    /// Returns whether the start of the daemon was refused for good.
    pub fn is_dead(&self) -> bool {
        self.phase == ForwarderPhase::Dead
    }

    /// Returns the number of the session that is open or being opened.
    pub fn session(&self) -> Option<u64> {
        match self.phase {
            ForwarderPhase::Opening { session, .. } | ForwarderPhase::Open { session, .. } => Some(session),
            ForwarderPhase::Suspended | ForwarderPhase::Dead => None,
        }
    }

    /// Returns whether a session is open.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, ForwarderPhase::Open { .. })
    }

    /// Returns the numbers of requests that wait and that are in flight.
    pub fn counts(&self) -> (usize, usize) {
        (self.waiting.len() + self.unresolved.len(), self.sent.len())
    }
}

#[cfg(test)]
mod tests;
