//! Progress of the members of a log, as its primary knows it: what may be acknowledged, and what written back.

use std::collections::BTreeMap;

use crate::format::LogId;
use crate::replication::{ChangeRefused, LogShape, MemberRecord};

/// Progress of one copy: what it holds durably.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct CopyProgress {
    copy: LogId,
    head: u64,
    tail: u64,
}

/// Progress of the members of a log, as its primary knows it.
///
/// | invariant | |
/// |---|---|
/// | P1 | an entry is published when every complete member has it, by the record and by a proposed change of the record |
/// | P2 | nothing is served before all that the log held when it was opened is published |
/// | P3 | a peer proposed as complete has all that is published or was there at the opening, and has retired what all have |
/// | P4 | an entry is written back only when every complete member has retired all entries before it |
/// | P5 | only the copy counts that the record names, not another one of the same peer |
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrimaryProgress<P: Ord, C> {
    record: MemberRecord<P, C>,
    proposed: Option<MemberRecord<P, C>>,
    base: LogShape,
    /// Copies that have adopted this primary's term, its own among them.
    copies: BTreeMap<P, CopyProgress>,
    /// Number of the first entry that was never durable: those before it may be acknowledged already.
    published: u64,
}

impl<P: Ord + Copy, C: Clone + PartialEq> PrimaryProgress<P, C> {
    /// Begins with the record that opened the log, and with what the primary's own copy holds.
    pub fn new(record: MemberRecord<P, C>, base: LogShape) -> Self {
        let copy = record.copy(record.primary()).unwrap_or_default();
        let own = CopyProgress { copy, head: base.head(), tail: base.tail() };
        let copies = BTreeMap::from([(record.primary(), own)]);
        let mut progress = Self { copies, record, proposed: None, base, published: 0 };
        progress.publish();
        progress
    }

    /// Returns the record as it was known last.
    pub fn record(&self) -> &MemberRecord<P, C> {
        &self.record
    }

    /// Returns the shape that the log had when it was opened, which replicas adopt.
    pub fn base(&self) -> &LogShape {
        &self.base
    }

    /// Returns the proposed change of the record, if any.
    pub fn proposed(&self) -> Option<&MemberRecord<P, C>> {
        self.proposed.as_ref()
    }

    /// Notes what a peer's copy holds durably: entries before `head`, of which those before `tail` are retired.  Ignores copies
    /// that the record does not name.
    pub fn persisted(&mut self, peer: P, copy: LogId, head: u64, tail: u64) {
        if self.record.copy(peer) != Some(copy) {
            return;
        }
        let known = self.copies.entry(peer).or_insert(CopyProgress { copy, head: 0, tail: 0 });
        known.head = known.head.max(head);
        known.tail = known.tail.max(tail);
        self.publish();
    }

    /// Forgets a copy that is lost, such as the primary's own when its medium fails.
    pub fn lost(&mut self, peer: P) {
        self.copies.remove(&peer);
    }

    /// Returns the number of the first entry that has not been published: those before it are durable, and may have been
    /// acknowledged.
    pub fn published(&self) -> u64 {
        self.published
    }

    /// Returns the number of the first entry that is not durable everywhere where it must be.
    fn durable(&self) -> u64 {
        self.required().map(|peer| self.copies.get(&peer).map_or(0, |copy| copy.head)).min().unwrap_or(0)
    }

    /// Returns whether requests may be served: all that the log held when it was opened is published.
    pub fn serves(&self) -> bool {
        self.published >= self.base.head()
    }

    /// Returns the number of the first entry that some complete member has not retired.
    pub fn retired(&self) -> u64 {
        self.required().map(|peer| self.copies.get(&peer).map_or(0, |copy| copy.tail)).min().unwrap_or(0)
    }

    /// Returns whether the entries from `first` to before `end` may be written back.
    pub fn may_write_back(&self, first: u64, end: u64) -> bool {
        self.serves() && end <= self.published && first <= self.retired()
    }

    /// Proposes a record without a member.
    ///
    /// # Errors
    /// As [`MemberRecord::without`].
    pub fn propose_without(&mut self, peer: P) -> Result<&MemberRecord<P, C>, ChangeRefused> {
        let next = self.record.without(peer)?;
        Ok(self.propose(next))
    }

    /// Proposes a record with a peer whose `copy` is being filled.
    pub fn propose_filling(&mut self, peer: P, copy: LogId) -> &MemberRecord<P, C> {
        let next = self.record.with_filling(peer, copy);
        self.propose(next)
    }

    /// Proposes a peer that has been filled as a complete member.
    ///
    /// # Errors
    /// [`ChangeRefused::Filling`] while it lacks entries; [`ChangeRefused::NotMember`].
    pub fn propose_complete(&mut self, peer: P) -> Result<&MemberRecord<P, C>, ChangeRefused> {
        let next = self.record.with_complete(peer)?;
        // Until it serves, any of what the log held when it was opened may have been acknowledged in a former term.
        let needed = self.published.max(self.base.head());
        // With an older tail it would replay, after a takeover, what the backend has newer content for.
        let retired = self.retired();
        if self.copies.get(&peer).is_none_or(|copy| copy.head < needed || copy.tail < retired) {
            return Err(ChangeRefused::Filling);
        }
        Ok(self.propose(next))
    }

    /// Takes a record that was read.  Returns whether this primary goes on: not where another opening followed its own.
    pub fn learned(&mut self, record: &MemberRecord<P, C>) -> bool {
        if record.term() != self.record.term() {
            return false;
        }
        if record.epoch() > self.record.epoch() {
            self.record = record.clone();
            self.proposed = None;
            self.copies.retain(|peer, copy| record.copy(*peer) == Some(copy.copy));
            self.publish();
        }
        true
    }

    fn publish(&mut self) {
        self.published = self.published.max(self.durable());
    }

    fn propose(&mut self, next: MemberRecord<P, C>) -> &MemberRecord<P, C> {
        // Acknowledgements would no longer depend on the members of the former proposal, which may succeed yet.
        assert!(self.proposed.is_none(), "P1: one change of the record at a time");
        self.proposed.insert(next)
    }

    /// Returns the members that acknowledgements depend on: by the record, and by a proposed change of it, with repetitions.
    pub fn required(&self) -> impl Iterator<Item = P> + '_ {
        self.record.complete().chain(self.proposed.iter().flat_map(MemberRecord::complete))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LogId = [1; 16];
    const B: LogId = [2; 16];
    const C: LogId = [3; 16];

    fn log(entries: u64) -> LogShape {
        let mut log = LogShape::default();
        log.push(1, entries);
        log
    }

    fn of_two() -> PrimaryProgress<char, u32> {
        let record = MemberRecord::created('a', A, 1).with_filling('b', B).with_complete('b').unwrap();
        PrimaryProgress::new(record.opened('a', A, 2).unwrap(), log(3))
    }

    #[test]
    fn an_opening_waits_until_every_member_has_all_of_the_log() {
        let mut primary = of_two();
        assert!(!primary.serves());
        primary.persisted('b', B, 2, 0);
        assert!(!primary.serves() && !primary.may_write_back(0, 1));
        primary.persisted('b', B, 3, 0);
        assert!(primary.serves() && primary.may_write_back(0, 3));
    }

    #[test]
    fn a_member_counts_until_the_record_has_dropped_it() {
        let mut primary = of_two();
        primary.persisted('b', B, 3, 0);
        primary.persisted('a', A, 9, 0);
        let dropped = primary.propose_without('b').unwrap().clone();
        assert_eq!(primary.published(), 3);
        assert!(primary.learned(&dropped));
        assert_eq!((primary.published(), primary.proposed()), (9, None));
    }

    #[test]
    fn a_peer_counts_from_the_proposal_on() {
        let mut primary = of_two();
        primary.persisted('b', B, 5, 0);
        primary.persisted('a', A, 5, 0);
        let filling = primary.propose_filling('c', C).clone();
        assert!(primary.learned(&filling));
        primary.persisted('c', C, 4, 0);
        assert_eq!((primary.published(), primary.propose_complete('c')), (5, Err(ChangeRefused::Filling)));
        primary.persisted('c', C, 5, 0);
        primary.propose_complete('c').unwrap();
        primary.persisted('a', A, 7, 0);
        primary.persisted('b', B, 7, 0);
        assert_eq!(primary.published(), 5);
    }

    #[test]
    fn a_primary_that_has_lost_its_copy_completes_no_peer_that_lacks_entries() {
        let mut primary = of_two();
        primary.persisted('b', B, 5, 0);
        primary.persisted('a', A, 5, 0);
        let filling = primary.propose_filling('c', C).clone();
        assert!(primary.learned(&filling));
        primary.persisted('c', C, 4, 0);
        primary.lost('a');
        assert_eq!(primary.propose_complete('c'), Err(ChangeRefused::Filling));
        // It goes on with the replica's copy, once the record says so.
        primary.persisted('b', B, 8, 0);
        assert_eq!((primary.serves(), primary.published()), (true, 5));
        let alone = primary.propose_without('a').unwrap().clone();
        assert!(primary.learned(&alone));
        assert_eq!(primary.published(), 8);
    }

    #[test]
    fn what_the_log_held_counts_as_acknowledged_before_it_is_served() {
        let record = of_two().record().with_filling('c', C);
        let mut primary = PrimaryProgress::new(record, log(3));
        primary.persisted('c', C, 0, 0);
        assert_eq!((primary.published(), primary.propose_complete('c')), (0, Err(ChangeRefused::Filling)));
        primary.persisted('c', C, 3, 0);
        assert!(primary.propose_complete('c').is_ok());
    }

    #[test]
    fn a_peer_counts_only_when_it_has_retired_what_the_others_have() {
        let mut primary = PrimaryProgress::new(MemberRecord::created('a', A, 1).with_filling('b', B), log(3));
        primary.persisted('a', A, 3, 2);
        primary.persisted('b', B, 3, 1);
        assert_eq!(primary.propose_complete('b'), Err(ChangeRefused::Filling));
        primary.persisted('b', B, 3, 2);
        assert!(primary.propose_complete('b').is_ok());
    }

    #[test]
    fn what_a_replaced_medium_held_counts_for_nothing() {
        let mut primary = of_two();
        primary.persisted('b', B, 3, 0);
        let alone = primary.propose_without('b').unwrap().clone();
        assert!(primary.learned(&alone));
        // The same peer, with another medium.
        let filling = primary.propose_filling('b', C).clone();
        assert!(primary.learned(&filling));
        primary.persisted('b', B, 3, 0);
        assert_eq!(primary.propose_complete('b'), Err(ChangeRefused::Filling));
        primary.persisted('b', C, 3, 0);
        assert!(primary.propose_complete('b').is_ok());
    }

    #[test]
    fn write_back_waits_until_all_have_retired_what_is_before_it() {
        let mut primary = of_two();
        primary.persisted('b', B, 3, 0);
        assert!(primary.may_write_back(0, 2) && !primary.may_write_back(2, 3));
        primary.persisted('a', A, 3, 2);
        assert!(!primary.may_write_back(2, 3));
        primary.persisted('b', B, 3, 2);
        assert!(primary.may_write_back(2, 3) && !primary.may_write_back(2, 4));
    }

    #[test]
    fn a_later_opening_ends_a_primary() {
        let mut primary = of_two();
        let later = primary.record().taken_over('b', B, 7).unwrap();
        assert!(!primary.learned(&later));
    }
}
