//! Observation of members: a ring, in which each is observed by its successors.

use crate::ids::MemberId;
use crate::record::GroupRecord;

/// Number of members that observe each member, where there are as many.
pub const OBSERVERS: usize = 3;

/// Members that serve, in the order of a hash of their ids.
///
/// The same at all members that know the same record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObserverRing(Vec<(u64, MemberId)>);

/// Hashes an id (splitmix64): ids that are alike are far from each other in the ring.
fn position(id: MemberId) -> u64 {
    let half = |at: usize| u64::from_le_bytes(id.0[at..at + 8].try_into().expect("8 bytes"));
    let mut hash = half(0) ^ half(8).rotate_left(32);
    for factor in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        hash = (hash ^ (hash >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(factor);
    }
    hash ^ (hash >> 31)
}

impl ObserverRing {
    /// Creates the ring of a record.
    pub fn new(record: &GroupRecord) -> Self {
        let serving = record.members().iter().filter(|(_, member)| member.state.serves());
        let mut ring: Vec<_> = serving.map(|(id, _)| (position(*id), *id)).collect();
        ring.sort_unstable();
        Self(ring)
    }

    /// Returns the members after `id` in the ring, from the nearest on, without itself.
    pub fn after(&self, id: MemberId) -> impl DoubleEndedIterator<Item = MemberId> + '_ {
        let at = self.0.partition_point(|entry| *entry <= (position(id), id));
        self.0[at..].iter().chain(&self.0[..at]).map(|(_, other)| *other).filter(move |other| *other != id)
    }

    /// Returns the members that observe `id`, the first of which acts first.
    pub fn observers_of(&self, id: MemberId) -> impl Iterator<Item = MemberId> + '_ {
        self.after(id).take(OBSERVERS)
    }

    /// Returns the members that `id` observes, with its rank among the observers of each.
    pub fn observed_by(&self, id: MemberId) -> impl Iterator<Item = (MemberId, usize)> + '_ {
        self.after(id).rev().take(OBSERVERS).enumerate().map(|(rank, other)| (other, rank))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_member_is_observed_by_three_others_that_know_it(numbers in prop::collection::btree_set(any::<u8>(), 1..20)) {
            let ids: Vec<MemberId> = numbers.iter().map(|number| MemberId([*number; 16])).collect();
            let mut ring: Vec<_> = ids.iter().map(|id| (position(*id), *id)).collect();
            ring.sort_unstable();
            let ring = ObserverRing(ring);
            for id in &ids {
                let observers: Vec<MemberId> = ring.observers_of(*id).collect();
                prop_assert_eq!(observers.len(), (ids.len() - 1).min(OBSERVERS));
                prop_assert_eq!(observers.iter().collect::<BTreeSet<_>>().len(), observers.len());
                for (rank, observer) in observers.iter().enumerate() {
                    prop_assert!(observer != id);
                    prop_assert!(ring.observed_by(*observer).any(|found| found == (*id, rank)));
                }
                prop_assert_eq!(ring.observed_by(*id).count(), observers.len());
            }
        }
    }
}
