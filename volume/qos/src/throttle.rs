//! Throttle of a volume: its buckets, and the requests that wait for them.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::BlockRequest;
use forebay_reactor::Instant;

use crate::bucket::TokenBucket;
use crate::limits::{QosLimits, RateLimit};

/// Direction of a request, by which limits apply to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestDirection {
    /// Requests that read.
    Read,
    /// Everything that changes data.
    Write,
}

/// Cost of a request: one request of so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestCost {
    /// Direction of the request.
    pub direction: RequestDirection,
    /// Bytes read, written, discarded or zeroed.
    pub bytes: u64,
}

impl RequestCost {
    /// Returns the cost of a request; `None` for a flush, which no limit counts.
    pub fn of(request: &BlockRequest) -> Option<Self> {
        let direction = if request.is_write() { RequestDirection::Write } else { RequestDirection::Read };
        request.extent().map(|extent| Self { direction, bytes: extent.len })
    }
}

/// Identifies a waiting request of a throttle; later ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// Result of asking for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QosAdmission {
    /// The request is executed now; its tokens are taken.
    Now,
    /// The request waits, until [`Throttle::release`] returns its ticket.
    Wait(Ticket),
}

/// Buckets of one dimension: requests, or bytes.
#[derive(Debug, Default)]
struct Buckets {
    total: Option<TokenBucket>,
    reads: Option<TokenBucket>,
    writes: Option<TokenBucket>,
}

impl Buckets {
    fn own(&self, direction: RequestDirection) -> Option<&TokenBucket> {
        match direction {
            RequestDirection::Read => self.reads.as_ref(),
            RequestDirection::Write => self.writes.as_ref(),
        }
    }
}

/// Waiting request.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    cost: RequestCost,
}

/// Throttle of a volume. It does no I/O and has no clock.
///
/// | invariant | |
/// |---|---|
/// | T1 | Requests of one direction are admitted in order. |
/// | T2 | A request overtakes an older one of the other direction only while that waits for a limit of its own direction. |
/// | T3 | Tokens are taken when a request is admitted, once, from all buckets that count it; until then, from none. |
/// | T4 | No request waits for longer than a tick after all its tokens are there. |
/// | T5 | Without limits nothing waits. |
#[derive(Debug)]
pub struct Throttle {
    limits: QosLimits,
    requests: Buckets,
    bytes: Buckets,
    reads: VecDeque<Waiting>,
    writes: VecDeque<Waiting>,
    next: u64,
    /// Last time at which waiting requests were admitted.
    released: Option<Instant>,
}

impl Throttle {
    /// Creates a throttle of a volume.
    pub fn new(limits: QosLimits, now: Instant) -> Self {
        let mut throttle = Self {
            limits: QosLimits::default(),
            requests: Buckets::default(),
            bytes: Buckets::default(),
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            next: 0,
            released: None,
        };
        throttle.set_limits(limits, now);
        throttle
    }

    /// Returns the limits.
    pub fn limits(&self) -> &QosLimits {
        &self.limits
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    /// Changes the limits. Unchanged ones keep their tokens. [`release`](Self::release) is to be called next.
    pub fn set_limits(&mut self, limits: QosLimits, now: Instant) {
        for (bucket, limit) in [
            (&mut self.requests.total, limits.iops),
            (&mut self.requests.reads, limits.read_iops),
            (&mut self.requests.writes, limits.write_iops),
            (&mut self.bytes.total, limits.bps),
            (&mut self.bytes.reads, limits.read_bps),
            (&mut self.bytes.writes, limits.write_bps),
        ] {
            set_limit(bucket, limit, now);
        }
        self.limits = limits;
        // The next release is not delayed by the tick of the last one.
        self.released = None;
    }

    /// Admits a request, or lets it wait.
    pub fn admit(&mut self, cost: RequestCost, now: Instant) -> QosAdmission {
        self.refill(now);
        let overtaken = match cost.direction {
            RequestDirection::Read => self.writes.front(),
            RequestDirection::Write => self.reads.front(),
        };
        let goes_ahead = self.queue(cost.direction).is_empty()
            && overtaken.is_none_or(|older| self.admits_in_total(older.cost))
            && self.admits(cost);
        if goes_ahead {
            self.take(cost);
            return QosAdmission::Now;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.queue_mut(cost.direction).push_back(Waiting { ticket, cost });
        QosAdmission::Wait(ticket)
    }

    /// Admits the waiting requests whose tokens are there, unless the last release is less than a tick ago; calls
    /// `admitted` with each ticket.
    pub fn release(&mut self, now: Instant, mut admitted: impl FnMut(Ticket)) {
        if self.released.is_some_and(|last| now < last + self.limits.tick) {
            return;
        }
        self.refill(now);
        let mut any = false;
        while let Some(direction) = self.next_admitted() {
            let waiting = self.queue_mut(direction).pop_front().expect("it is the head");
            self.take(waiting.cost);
            admitted(waiting.ticket);
            any = true;
        }
        if any {
            self.released = Some(now);
        }
    }

    /// Admits all waiting requests whatever the limits; their tokens are owed.
    pub fn release_all(&mut self, now: Instant, mut admitted: impl FnMut(Ticket)) {
        self.refill(now);
        while let Some(direction) = self.oldest() {
            let waiting = self.queue_mut(direction).pop_front().expect("it is the head");
            self.take(waiting.cost);
            admitted(waiting.ticket);
        }
    }

    /// Returns when [`release`](Self::release) is to be called next; `None` while no request waits.
    pub fn next_release(&self) -> Option<Instant> {
        let oldest = self.queue(self.oldest()?).front()?.cost;
        let ready = match self.admits_in_total(oldest) {
            // It may wait for its own direction, and the head of the other one may overtake it.
            true => self.heads().map(|head| self.ready_at(head)).min()?,
            false => self.total_ready_at(oldest),
        };
        let tick = self.released.map_or(Instant::default(), |last| last + self.limits.tick);
        Some(ready.max(tick))
    }

    /// Removes a waiting request; returns whether it waited. One that does not has been admitted.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        for queue in [&mut self.reads, &mut self.writes] {
            if let Ok(at) = queue.binary_search_by_key(&ticket, |waiting| waiting.ticket) {
                queue.remove(at);
                return true;
            }
        }
        false
    }

    /// Returns the tokens of a request that was admitted and not executed.
    pub fn give_back(&mut self, cost: RequestCost) {
        for (bucket, tokens) in self.buckets_mut(cost) {
            bucket.give_back(tokens);
        }
    }

    /// Returns the time between two releases.
    pub fn tick(&self) -> Duration {
        self.limits.tick
    }

    fn refill(&mut self, now: Instant) {
        for buckets in [&mut self.requests, &mut self.bytes] {
            let all = [&mut buckets.total, &mut buckets.reads, &mut buckets.writes];
            all.into_iter().flatten().for_each(|bucket| bucket.refill(now));
        }
    }

    fn queue(&self, direction: RequestDirection) -> &VecDeque<Waiting> {
        match direction {
            RequestDirection::Read => &self.reads,
            RequestDirection::Write => &self.writes,
        }
    }

    fn queue_mut(&mut self, direction: RequestDirection) -> &mut VecDeque<Waiting> {
        match direction {
            RequestDirection::Read => &mut self.reads,
            RequestDirection::Write => &mut self.writes,
        }
    }

    fn heads(&self) -> impl Iterator<Item = RequestCost> {
        self.reads.front().into_iter().chain(self.writes.front()).map(|head| head.cost)
    }

    /// Returns the direction of the oldest waiting request.
    fn oldest(&self) -> Option<RequestDirection> {
        match (self.reads.front(), self.writes.front()) {
            (Some(read), Some(write)) if write.ticket < read.ticket => Some(RequestDirection::Write),
            (Some(_), _) => Some(RequestDirection::Read),
            (None, Some(_)) => Some(RequestDirection::Write),
            (None, None) => None,
        }
    }

    /// Returns the direction whose head is admitted now.
    fn next_admitted(&self) -> Option<RequestDirection> {
        let first = self.oldest()?;
        let head = |direction: RequestDirection| self.queue(direction).front().map(|head| head.cost);
        let oldest = head(first)?;
        if self.admits(oldest) {
            return Some(first);
        }
        let second = match first {
            RequestDirection::Read => RequestDirection::Write,
            RequestDirection::Write => RequestDirection::Read,
        };
        // Tokens that the oldest waits for are not taken by the other.
        let overtakes = self.admits_in_total(oldest) && head(second).is_some_and(|cost| self.admits(cost));
        overtakes.then_some(second)
    }

    /// Returns the buckets that count a request, with its tokens.
    fn buckets(&self, cost: RequestCost) -> impl Iterator<Item = (&TokenBucket, u64)> {
        let requests = self.requests.own(cost.direction).map(|bucket| (bucket, 1));
        let bytes = self.bytes.own(cost.direction).map(|bucket| (bucket, cost.bytes));
        self.totals(cost).chain(requests).chain(bytes)
    }

    /// Returns the buckets that count requests of both directions, with the tokens of this one.
    fn totals(&self, cost: RequestCost) -> impl Iterator<Item = (&TokenBucket, u64)> {
        let requests = self.requests.total.as_ref().map(|bucket| (bucket, 1));
        requests.into_iter().chain(self.bytes.total.as_ref().map(|bucket| (bucket, cost.bytes)))
    }

    fn buckets_mut(&mut self, cost: RequestCost) -> impl Iterator<Item = (&mut TokenBucket, u64)> {
        let tokens = [1, cost.bytes];
        [&mut self.requests, &mut self.bytes].into_iter().zip(tokens).flat_map(move |(buckets, tokens)| {
            let own = match cost.direction {
                RequestDirection::Read => &mut buckets.reads,
                RequestDirection::Write => &mut buckets.writes,
            };
            [&mut buckets.total, own].into_iter().flatten().map(move |bucket| (bucket, tokens))
        })
    }

    fn admits(&self, cost: RequestCost) -> bool {
        self.buckets(cost).all(|(bucket, tokens)| bucket.admits(tokens))
    }

    fn admits_in_total(&self, cost: RequestCost) -> bool {
        self.totals(cost).all(|(bucket, tokens)| bucket.admits(tokens))
    }

    fn take(&mut self, cost: RequestCost) {
        for (bucket, tokens) in self.buckets_mut(cost) {
            bucket.take(tokens);
        }
    }

    fn ready_at(&self, cost: RequestCost) -> Instant {
        latest(self.buckets(cost))
    }

    fn total_ready_at(&self, cost: RequestCost) -> Instant {
        latest(self.totals(cost))
    }
}

/// Returns when all of the buckets have the tokens.
fn latest<'a>(buckets: impl Iterator<Item = (&'a TokenBucket, u64)>) -> Instant {
    buckets.map(|(bucket, tokens)| bucket.ready_at(tokens)).max().unwrap_or_default()
}

fn set_limit(bucket: &mut Option<TokenBucket>, limit: RateLimit, now: Instant) {
    match bucket {
        _ if limit.rate == 0 => *bucket = None,
        Some(bucket) => bucket.set_limit(limit, now),
        None => *bucket = Some(TokenBucket::new(limit, now)),
    }
}

#[cfg(test)]
mod tests;
