//! Copy of a log at a replica: which primary it follows, and what it accepts.

use crate::format::LogId;
use crate::replication::LogShape;

/// Copy of a log at a replica.
///
/// A copy follows one term.  It *adopts* a higher one together with the shape that the log had when its primary opened it,
/// and drops what that primary does not have.  From then on it accepts that primary's entries only.
///
/// | invariant | |
/// |---|---|
/// | C1 | the term never decreases |
/// | C2 | the copy is a beginning of what the primary of its term has |
///
/// Both need the term and the cut to be durable, in one step, before an adoption is answered.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaLog {
    id: LogId,
    term: u64,
    log: LogShape,
}

/// Reason for which a replica does not accept entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendRefused {
    /// The copy follows a later primary: the sender has been superseded, and must stop.
    #[error("this copy of the log follows the primary of term {0}, which is later")]
    Superseded(u64),
    /// The copy has not adopted the sender's term yet.
    #[error("this copy of the log has not adopted the sender's term")]
    NotAdopted,
    /// The medium does not have the copy that the record names.
    #[error("this medium does not have the copy of the log that the record names")]
    CopyLost,
    /// Entries from this number on are missing.
    #[error("this copy of the log needs entries from {0} on")]
    Gap(u64),
}

/// Effect of an adoption on a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adoption {
    /// No effect: the copy followed the term already.
    Repeated,
    /// Entries from the head on were dropped, if there were any.
    Kept,
    /// All entries were dropped: the copy begins where the primary does.
    Restarted,
}

impl ReplicaLog {
    /// Returns the copy that a medium holds.
    pub fn new(id: LogId, term: u64, log: LogShape) -> Self {
        Self { id, term, log }
    }

    /// Returns the id of the copy.
    pub fn id(&self) -> LogId {
        self.id
    }

    /// Returns the term that the copy follows.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Returns the shape of the copy.
    pub fn log(&self) -> &LogShape {
        &self.log
    }

    /// Follows the primary of `term`, whose log has the shape `base`, and takes this one for the `copy` that the record names.
    /// Entries that this primary does not have are dropped; the first one that the copy lacks is then its head.
    ///
    /// A repeated adoption of the term that the copy follows changes nothing, unless the copy lacks entries that the primary
    /// has retired meanwhile: then it begins where the primary does.  Complete copies never lack such entries, so that this
    /// loses nothing however late the message comes.
    ///
    /// # Errors
    /// [`AppendRefused::Superseded`], [`AppendRefused::CopyLost`].
    pub fn adopt(&mut self, term: u64, copy: LogId, base: &LogShape) -> Result<Adoption, AppendRefused> {
        if term < self.term {
            return Err(AppendRefused::Superseded(self.term));
        }
        if copy != self.id {
            return Err(AppendRefused::CopyLost);
        }
        if term == self.term {
            if self.log.head() >= base.tail() {
                return Ok(Adoption::Repeated);
            }
            self.log = LogShape::empty_at(base.tail());
            return Ok(Adoption::Restarted);
        }
        let agreed = self.log.agreement(base);
        self.log.truncate(agreed);
        let restarted = !(base.tail()..=base.head()).contains(&self.log.head());
        if restarted {
            self.log = LogShape::empty_at(base.tail());
        }
        self.log.retire(base.tail());
        self.term = term;
        Ok(if restarted { Adoption::Restarted } else { Adoption::Kept })
    }

    /// Takes `count` entries of `entry_term` from `number` on, sent by the primary of `term`.  Returns how many of them the
    /// copy has had before.
    ///
    /// # Errors
    /// [`AppendRefused`].
    pub fn append(&mut self, term: u64, number: u64, entry_term: u64, count: u64) -> Result<u64, AppendRefused> {
        let had = self.accepts(term, number, count)?;
        self.log.push(entry_term, count - had);
        Ok(had)
    }

    /// Returns how many of `count` entries from `number` on, sent by the primary of `term`, the copy has already.
    ///
    /// # Errors
    /// [`AppendRefused`].
    pub fn accepts(&self, term: u64, number: u64, count: u64) -> Result<u64, AppendRefused> {
        if term < self.term {
            return Err(AppendRefused::Superseded(self.term));
        }
        if term > self.term {
            return Err(AppendRefused::NotAdopted);
        }
        let head = self.log.head();
        if number > head {
            return Err(AppendRefused::Gap(head));
        }
        Ok((head - number).min(count))
    }

    /// Retires entries that the primary of `term` has retired.
    ///
    /// # Errors
    /// [`AppendRefused::Superseded`], [`AppendRefused::NotAdopted`].
    pub fn retire(&mut self, term: u64, tail: u64) -> Result<(), AppendRefused> {
        if term < self.term {
            return Err(AppendRefused::Superseded(self.term));
        }
        if term > self.term {
            return Err(AppendRefused::NotAdopted);
        }
        self.log.retire(tail);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replication::TermSpan;

    const ID: LogId = [1; 16];

    fn copy(term: u64, spans: &[(u64, u64)]) -> ReplicaLog {
        let mut log = LogShape::default();
        spans.iter().for_each(|(term, count)| log.push(*term, *count));
        ReplicaLog::new(ID, term, log)
    }

    #[test]
    fn what_the_new_primary_lacks_is_dropped() {
        let base = copy(1, &[(1, 5)]).log().clone();
        let mut replica = copy(1, &[(1, 7)]);
        assert_eq!(replica.adopt(2, ID, &base), Ok(Adoption::Kept));
        assert_eq!(replica.log().head(), 5);
        assert_eq!(replica.append(1, 5, 1, 1), Err(AppendRefused::Superseded(2)));
        assert_eq!(replica.append(2, 5, 2, 3), Ok(0));
        assert_eq!(replica.log().spans(), [TermSpan { term: 1, end: 5 }, TermSpan { term: 2, end: 8 }]);
    }

    #[test]
    fn a_medium_that_was_replaced_follows_nobody() {
        let base = copy(1, &[(1, 2)]).log().clone();
        let mut blank = ReplicaLog::new([9; 16], 0, LogShape::default());
        assert_eq!(blank.adopt(3, ID, &base), Err(AppendRefused::CopyLost));
        assert_eq!(blank.append(3, 0, 1, 1), Err(AppendRefused::NotAdopted));
    }

    #[test]
    fn a_late_message_of_the_same_term_drops_nothing() {
        let base = copy(1, &[(1, 2)]).log().clone();
        let mut replica = copy(1, &[(1, 2)]);
        replica.adopt(3, ID, &base).unwrap();
        assert_eq!(replica.append(3, 2, 3, 4), Ok(0));
        assert_eq!(replica.adopt(3, ID, &base), Ok(Adoption::Repeated));
        assert_eq!(replica.log().head(), 6);
        assert_eq!(replica.append(3, 3, 3, 2), Ok(2), "had before");
        assert_eq!(replica.append(3, 5, 3, 2), Ok(1), "in part");
        assert_eq!(replica.append(3, 9, 3, 1), Err(AppendRefused::Gap(7)));
        assert_eq!(replica.append(4, 7, 4, 1), Err(AppendRefused::NotAdopted));
        assert_eq!(replica.log().head(), 7);
    }

    #[test]
    fn a_copy_that_lacks_retired_entries_begins_again() {
        let mut base = copy(1, &[(1, 8)]).log().clone();
        let mut replica = copy(0, &[]);
        assert_eq!(replica.adopt(1, ID, &base), Ok(Adoption::Kept));
        assert_eq!(replica.append(1, 0, 1, 3), Ok(0));
        base.retire(3);
        assert_eq!(replica.adopt(1, ID, &base), Ok(Adoption::Repeated), "it needs 3 next");
        base.retire(4);
        assert_eq!(replica.adopt(1, ID, &base), Ok(Adoption::Restarted));
        assert_eq!((replica.log().tail(), replica.log().head()), (4, 4));
    }

    #[test]
    fn a_copy_from_long_ago_begins_where_the_primary_does() {
        let mut base = copy(1, &[(1, 8), (4, 4)]).log().clone();
        base.retire(9);
        let mut replica = copy(1, &[(1, 3)]);
        assert_eq!(replica.adopt(5, ID, &base), Ok(Adoption::Restarted));
        assert_eq!((replica.log().tail(), replica.log().head()), (9, 9));
        assert_eq!(replica.append(5, 9, 4, 3), Ok(0));
        assert_eq!(replica.retire(4, 11), Err(AppendRefused::Superseded(5)));
        assert_eq!(replica.retire(5, 11), Ok(()));
        assert_eq!((replica.log().tail(), replica.log().head()), (11, 12));
    }
}
