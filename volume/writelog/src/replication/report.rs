//! Members of a log as their primary sees them, for operators.

use std::time::Duration;

use super::MemberState;
use super::keeper::PeerId;
use super::set::PrimarySet;

/// Member of a log, as its primary sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberReport {
    /// Its peer.
    pub peer: PeerId,
    /// State of its copy, by the record.
    pub state: MemberState,
    /// Set for the primary itself.
    pub is_primary: bool,
    /// Set if there is an open connection to it, or it is the primary.
    pub is_connected: bool,
    /// Number of entries that it lacks, as far as is known.
    pub lag_entries: u64,
    /// Bytes of the log that it lacks: an upper bound.
    pub lag_bytes: u64,
    /// Time for which it has lacked some without any progress.
    pub waits: Duration,
}

impl PrimarySet {
    /// Describes the members, the primary first.
    pub fn report(&self) -> Vec<MemberReport> {
        let record = self.record();
        let links = self.links.borrow();
        let mut all: Vec<MemberReport> = record
            .members()
            .map(|(peer, entry)| {
                let is_primary = peer == self.own;
                let link = links.get(&peer);
                let head =
                    if is_primary { self.local.durable_seq() } else { link.map_or(0, |l| l.progress.get().head) };
                let lag_entries = self.head.get().saturating_sub(head.max(self.tail.get()));
                let waits =
                    link.and_then(|link| link.waits_since(self)).map_or(Duration::ZERO, |since| since.elapsed());
                MemberReport {
                    peer,
                    state: entry.state,
                    is_primary,
                    is_connected: is_primary || self.keeper.connection(peer).is_some(),
                    lag_entries,
                    lag_bytes: if lag_entries > 0 { self.local.bytes_from(head) } else { 0 },
                    waits,
                }
            })
            .collect();
        all.sort_by_key(|member| (!member.is_primary, member.peer));
        all
    }

    /// Returns how many complete copies there are, and how many are wanted.
    pub fn copies(&self) -> (usize, usize) {
        let others = self.keeper.wanted().into_iter().filter(|peer| *peer != self.own).count();
        (self.record().complete().count(), 1 + others)
    }
}
