//! Record of the members of a log, which is kept with the image and decides who may serve it.

use std::collections::BTreeMap;

use crate::format::LogId;

/// State of a member of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemberState {
    /// Member with every entry that was acknowledged: acknowledgements depend on it, and it may take over.
    Complete,
    /// Member that receives entries, and lacks some: nothing depends on it, and it must not take over.
    Filling,
}

/// Member of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberEntry {
    /// State of its copy.
    pub state: MemberState,
    /// Id of its copy, which the peer chose when it created it.  A medium that was replaced since has another one.
    pub copy: LogId,
}

/// Record of the members of a log: `P` names a peer, `C` a client of the backend.
///
/// Changed by compare-and-set of the epoch only.
///
/// | invariant | |
/// |---|---|
/// | M1 | every change increments the epoch |
/// | M2 | a term is the epoch in which a primary opened the log, so that no two openings have the same term |
/// | M3 | at least one member is complete |
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberRecord<P: Ord, C> {
    epoch: u64,
    term: u64,
    primary: P,
    client: C,
    members: BTreeMap<P, MemberEntry>,
}

/// Reason for which a record cannot be changed in some way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChangeRefused {
    /// Another peer is the primary.
    #[error("another peer is the primary of the log")]
    NotPrimary,
    /// The peer is the primary already.
    #[error("this peer is the primary of the log already")]
    AlreadyPrimary,
    /// The peer has no copy of the log.
    #[error("this peer is no member of the log")]
    NotMember,
    /// The peer's copy lacks entries.
    #[error("the copy of this peer is being filled: it lacks acknowledged writes")]
    Filling,
    /// The peer's medium does not have the copy that the record names.
    #[error("the medium of this peer does not have the copy of the log that the record names")]
    CopyLost,
    /// No complete copy would be left.
    #[error("no complete copy of the log would be left")]
    LastCopy,
}

impl<P: Ord + Copy, C: Clone> MemberRecord<P, C> {
    /// Returns the record of a new log, which only its primary has.
    pub fn created(primary: P, copy: LogId, client: C) -> Self {
        Self::created_in(1, primary, copy, client)
    }

    /// Returns the record of a new log, whose first epoch follows those of the volume's former logs.
    pub fn created_in(epoch: u64, primary: P, copy: LogId, client: C) -> Self {
        let own = MemberEntry { state: MemberState::Complete, copy };
        Self { epoch, term: epoch, primary, client, members: BTreeMap::from([(primary, own)]) }
    }

    /// Returns a record as it was stored; `None` if it cannot be one.
    pub fn stored(
        (epoch, term): (u64, u64),
        (primary, client): (P, C),
        members: impl IntoIterator<Item = (P, MemberEntry)>,
    ) -> Option<Self> {
        let members: BTreeMap<P, MemberEntry> = members.into_iter().collect();
        let complete = members.values().any(|member| member.state == MemberState::Complete);
        (complete && term >= 1 && term <= epoch && epoch < u64::MAX).then_some(Self {
            epoch,
            term,
            primary,
            client,
            members,
        })
    }

    /// Returns the epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the epoch in which the log was opened last; entries that are appended since then carry it.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Returns the primary.
    pub fn primary(&self) -> P {
        self.primary
    }

    /// Returns the backend client through which the primary writes back, which a takeover must fence.
    pub fn client(&self) -> &C {
        &self.client
    }

    /// Returns all members.
    pub fn members(&self) -> impl Iterator<Item = (P, MemberEntry)> + '_ {
        self.members.iter().map(|(peer, member)| (*peer, *member))
    }

    /// Returns the state of a member.
    pub fn state(&self, peer: P) -> Option<MemberState> {
        self.members.get(&peer).map(|member| member.state)
    }

    /// Returns the id of a member's copy.
    pub fn copy(&self, peer: P) -> Option<LogId> {
        self.members.get(&peer).map(|member| member.copy)
    }

    /// Returns the members that acknowledgements depend on.
    pub fn complete(&self) -> impl Iterator<Item = P> + '_ {
        self.members().filter(|(_, member)| member.state == MemberState::Complete).map(|(peer, _)| peer)
    }

    /// Returns the record after the primary has opened its `copy` of the log again, as another client of the backend.
    ///
    /// # Errors
    /// [`ChangeRefused::NotPrimary`]; [`ChangeRefused::NotMember`], [`ChangeRefused::Filling`] and
    /// [`ChangeRefused::CopyLost`] where the primary has no complete copy of its own.
    pub fn opened(&self, by: P, copy: LogId, client: C) -> Result<Self, ChangeRefused> {
        if by != self.primary {
            return Err(ChangeRefused::NotPrimary);
        }
        self.require_complete(by, copy)?;
        Ok(self.opened_by(by, client))
    }

    /// Returns the record after `by` has taken the log over with its `copy`.  The former primary's copy is no member any
    /// more.
    ///
    /// # Errors
    /// [`ChangeRefused::AlreadyPrimary`], [`ChangeRefused::NotMember`], [`ChangeRefused::Filling`],
    /// [`ChangeRefused::CopyLost`].
    pub fn taken_over(&self, by: P, copy: LogId, client: C) -> Result<Self, ChangeRefused> {
        if by == self.primary {
            return Err(ChangeRefused::AlreadyPrimary);
        }
        self.require_complete(by, copy)?;
        let mut next = self.opened_by(by, client);
        next.members.remove(&self.primary);
        Ok(next)
    }

    /// Returns the record after the primary has closed the log, with nothing in flight at the backend: `nobody` stands for
    /// no client, which no takeover has to fence.
    pub fn closed(&self, nobody: C) -> Self {
        let mut next = self.clone();
        next.epoch += 1;
        next.client = nobody;
        next
    }

    /// Returns the record with a peer whose `copy` is being filled.
    ///
    /// # Panics
    /// If the peer is a complete member: that would give up its copy, which may be the last one (M3).
    pub fn with_filling(&self, peer: P, copy: LogId) -> Self {
        assert!(self.state(peer) != Some(MemberState::Complete), "M3: a complete member is removed first");
        self.with(peer, MemberEntry { state: MemberState::Filling, copy })
    }

    /// Returns the record after a peer has been filled.
    ///
    /// # Errors
    /// [`ChangeRefused::NotMember`] where it is not one that is being filled.
    pub fn with_complete(&self, peer: P) -> Result<Self, ChangeRefused> {
        match self.members.get(&peer) {
            Some(MemberEntry { state: MemberState::Filling, copy }) => {
                Ok(self.with(peer, MemberEntry { state: MemberState::Complete, copy: *copy }))
            }
            _ => Err(ChangeRefused::NotMember),
        }
    }

    /// Returns the record without a member.
    ///
    /// # Errors
    /// [`ChangeRefused::NotMember`]; [`ChangeRefused::LastCopy`].
    pub fn without(&self, peer: P) -> Result<Self, ChangeRefused> {
        let mut next = self.clone();
        next.members.remove(&peer).ok_or(ChangeRefused::NotMember)?;
        if next.complete().next().is_none() {
            return Err(ChangeRefused::LastCopy);
        }
        next.epoch += 1;
        Ok(next)
    }

    fn require_complete(&self, peer: P, copy: LogId) -> Result<(), ChangeRefused> {
        let member = self.members.get(&peer).ok_or(ChangeRefused::NotMember)?;
        match member.state {
            MemberState::Filling => Err(ChangeRefused::Filling),
            MemberState::Complete if member.copy != copy => Err(ChangeRefused::CopyLost),
            MemberState::Complete => Ok(()),
        }
    }

    fn opened_by(&self, primary: P, client: C) -> Self {
        let epoch = self.epoch + 1;
        Self { epoch, term: epoch, primary, client, members: self.members.clone() }
    }

    fn with(&self, peer: P, member: MemberEntry) -> Self {
        let mut next = self.clone();
        next.members.insert(peer, member);
        next.epoch += 1;
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LogId = [1; 16];
    const B: LogId = [2; 16];
    const BLANK: LogId = [9; 16];

    #[test]
    fn every_change_has_an_epoch_of_its_own_and_every_opening_a_term() {
        let created = MemberRecord::created('a', A, 1);
        let filling = created.with_filling('b', B);
        let complete = filling.with_complete('b').unwrap();
        let opened = complete.opened('a', A, 2).unwrap();
        let taken = opened.taken_over('b', B, 9).unwrap();
        let epochs = [&created, &filling, &complete, &opened, &taken].map(MemberRecord::epoch);
        assert_eq!(epochs, [1, 2, 3, 4, 5]);
        assert_eq!([&created, &filling, &complete, &opened, &taken].map(MemberRecord::term), [1, 1, 1, 4, 5]);
        assert_eq!((taken.primary(), *taken.client()), ('b', 9));
        assert_eq!(taken.members().collect::<Vec<_>>(), [('b', MemberEntry { state: MemberState::Complete, copy: B })]);
    }

    #[test]
    fn only_a_complete_member_takes_over() {
        let record = MemberRecord::created('a', A, 1).with_filling('b', B);
        assert_eq!(record.taken_over('b', B, 2), Err(ChangeRefused::Filling));
        assert_eq!(record.taken_over('c', BLANK, 2), Err(ChangeRefused::NotMember));
        assert_eq!(record.taken_over('a', A, 2), Err(ChangeRefused::AlreadyPrimary));
        assert_eq!(record.opened('b', B, 2), Err(ChangeRefused::NotPrimary));
        // A medium that was replaced does not have the member's copy.
        let complete = record.with_complete('b').unwrap();
        assert_eq!(complete.taken_over('b', BLANK, 2), Err(ChangeRefused::CopyLost));
        assert_eq!(complete.opened('a', BLANK, 2), Err(ChangeRefused::CopyLost));
        assert!(complete.taken_over('b', B, 2).is_ok());
    }

    #[test]
    fn a_complete_copy_stays() {
        let record = MemberRecord::created('a', A, 1).with_filling('b', B);
        assert_eq!(record.without('a'), Err(ChangeRefused::LastCopy));
        assert_eq!(record.without('c'), Err(ChangeRefused::NotMember));
        // A primary whose own medium has failed goes on with its replica's copy, and cannot open the log again.
        let mirrored = record.with_complete('b').unwrap().without('a').unwrap();
        assert_eq!(mirrored.primary(), 'a');
        assert_eq!(mirrored.opened('a', A, 2), Err(ChangeRefused::NotMember));
        assert!(mirrored.taken_over('b', B, 2).is_ok());
    }
}
