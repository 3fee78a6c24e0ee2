//! Leases: how long a primary may answer reads, and how long its members must not take over.
//!
//! A primary asks its members for their promise again and again.  Its lease counts from when it *sent* the question, the
//! promise from when the member *received* it, so that the lease is over first, however long messages take.  Times are
//! milliseconds of each machine's own monotonic clock; clocks need not agree, and may differ in speed by one part in 16.

use std::collections::BTreeMap;

/// Lease of a primary.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrimaryLease<P: Ord> {
    length: u64,
    /// Time at which the newest question was sent that a member has answered.
    granted: BTreeMap<P, u64>,
}

impl<P: Ord + Copy> PrimaryLease<P> {
    /// Begins without any promise.
    pub fn new(length: u64) -> Self {
        Self { length, granted: BTreeMap::new() }
    }

    /// Notes a member's promise, which answers the question that was sent at `sent`.
    pub fn granted(&mut self, peer: P, sent: u64) {
        let newest = self.granted.entry(peer).or_insert(sent);
        *newest = (*newest).max(sent);
    }

    /// Returns whether none of these members can have broken its promise yet.
    pub fn is_valid(&self, now: u64, mut members: impl Iterator<Item = P>) -> bool {
        members.all(|peer| self.granted.get(&peer).is_some_and(|sent| now < sent + self.length))
    }
}

/// Promise of a member not to take over from its primary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeasePromise {
    until: u64,
}

impl LeasePromise {
    /// Returns the promise of a process that has just started, which knows of none that it gave before.
    pub fn after_start(now: u64, length: u64) -> Self {
        let mut promise = Self::default();
        promise.extend(now, length);
        promise
    }

    /// Promises not to take over for a lease's length, and one part in 16 more, from now on.
    pub fn extend(&mut self, now: u64, length: u64) {
        self.until = self.until.max(now + length + length / 16);
    }

    /// Returns the milliseconds until the member may take over.
    pub fn remaining(&self, now: u64) -> u64 {
        self.until.saturating_sub(now)
    }

    /// Returns whether the member may take over.
    pub fn is_over(&self, now: u64) -> bool {
        now >= self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_needs_every_member_and_counts_from_the_question() {
        let mut lease = PrimaryLease::new(500);
        assert!(lease.is_valid(7, std::iter::empty()), "without members nobody can take over");
        lease.granted('b', 100);
        assert!(lease.is_valid(599, "b".chars()) && !lease.is_valid(600, "b".chars()));
        assert!(!lease.is_valid(101, "bc".chars()));
        lease.granted('c', 300);
        // A late answer to an early question makes nothing shorter.
        lease.granted('c', 50);
        assert!(lease.is_valid(599, "bc".chars()) && !lease.is_valid(601, "bc".chars()));
        assert!(lease.is_valid(799, "c".chars()));
    }

    #[test]
    fn a_promise_outlives_the_lease() {
        let mut promise = LeasePromise::after_start(0, 500);
        assert!(!promise.is_over(530) && promise.is_over(531));
        promise.extend(200, 500);
        promise.extend(190, 500);
        assert!(!promise.is_over(730) && promise.is_over(731));
    }
}
