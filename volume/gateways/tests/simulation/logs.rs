//! Write logs of volumes: who has complete copies, as the record of each log says, and as the group was told.

use std::collections::BTreeSet;

use forebay_gateways::{GroupChange, MemberId, VolumeName};

use super::{World, WorldEvent};

/// Log of a volume, as its own record has it.
pub struct LogModel {
    /// Member that opened it last.
    pub primary: MemberId,
    /// Members with complete copies.
    pub complete: BTreeSet<MemberId>,
}

impl World {
    /// Gives each volume a log, of which its owner has the only copy so far.
    pub fn give_logs(&mut self) {
        let volumes: Vec<(VolumeName, MemberId)> =
            self.record.volumes().iter().map(|(name, volume)| (name.clone(), volume.owner.member)).collect();
        for (name, primary) in volumes {
            let complete = BTreeSet::from([primary]);
            let noted = GroupChange::SetCopies { volume: name.clone(), owner: primary, copies: Some(complete.clone()) };
            assert!(self.command(&[noted]));
            self.logs.insert(name, LogModel { primary, complete });
        }
    }

    /// Returns whether each log has as many complete copies at members that run, and the group knows of them.
    pub fn logs_are_complete(&self, copies: usize) -> bool {
        self.logs.iter().all(|(name, log)| {
            let noted = self.record.volume(name).is_some_and(|volume| volume.copies.as_ref() == Some(&log.complete));
            log.complete.len() >= copies && noted
        })
    }

    /// Returns the members with complete copies of a volume's log, if a daemon that opens it has none.
    pub(super) fn copies_elsewhere(&self, at: usize, name: &VolumeName) -> Option<BTreeSet<MemberId>> {
        let log = self.logs.get(name)?;
        (!log.complete.contains(&self.daemons[at].id)).then(|| log.complete.clone())
    }

    /// Makes a daemon that has opened a volume the primary of its log: the former one's copy is no member any more.
    pub(super) fn take_log(&mut self, at: usize, name: &VolumeName) {
        let own = self.daemons[at].id;
        let Some(log) = self.logs.get_mut(name) else { return };
        assert!(log.complete.contains(&own), "{name} is opened without a complete copy of its log");
        if log.primary != own {
            let former = std::mem::replace(&mut log.primary, own);
            log.complete.remove(&former);
        }
    }

    /// Lets the primaries at a daemon drop copies that they do not reach, and fill others; the group is told later.
    pub(super) fn keep_logs(&mut self, at: usize) {
        if self.logs.is_empty() || self.is_fenced(at) || self.daemons[at].cut_from_pool || !self.random.one_in(2) {
            return;
        }
        let (own, start, part) = (self.daemons[at].id, self.daemons[at].start, self.daemons[at].part);
        let reached = self.daemons.iter().filter(|daemon| daemon.machine.is_some() && daemon.part == part);
        let reached: Vec<MemberId> =
            reached.filter(|daemon| daemon.suspended_until <= self.now).map(|daemon| daemon.id).collect();
        let open = |name: &VolumeName| self.open.get(name).is_some_and(|open| open.contains_key(&start));
        let names: Vec<VolumeName> = self.logs.keys().filter(|name| open(name)).cloned().collect();
        let mut changes = Vec::new();
        for name in names {
            let Some(log) = self.logs.get_mut(&name).filter(|log| log.primary == own) else { continue };
            log.complete.retain(|id| reached.contains(id));
            if log.complete.len() < 2 && self.random.one_in(4) {
                let at = self.random.below(reached.len() as u64) as usize;
                log.complete.insert(reached[at]);
            }
            let copies = Some(log.complete.clone());
            if self.record.volume(&name).is_some_and(|volume| volume.copies != copies) {
                changes.push(GroupChange::SetCopies { volume: name, owner: own, copies });
            }
        }
        if !changes.is_empty() {
            let delay = self.random.between(self.latencies.record);
            self.after(at, delay, WorldEvent::CopiesArrive(changes));
        }
    }

    pub(super) fn copies_arrive(&mut self, at: usize, changes: &[GroupChange]) {
        if !self.is_fenced(at) && !self.daemons[at].cut_from_pool {
            // Refused together where one is; they are sent again.
            self.command(changes);
        }
    }
}
