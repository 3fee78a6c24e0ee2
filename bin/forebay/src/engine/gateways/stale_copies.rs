//! Copies of write logs here that the logs' records name no more, and volumes that wait for copies that others have.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_gateways::{GatewayState, GroupChange, GroupRecord, VolumeName};
use forebay_reactor::{Instant, now, sleep};
use forebay_writelog::replication::{PeerId, ReplicaShelf};
use forebay_writelog::{LogId, LogRecord, Shelf, id_text};

use super::JoinedGroup;
use super::logs::complete;
use crate::engine::Engine;
use crate::engine::log_keeper::load_record;
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

/// Time between looks at the copies that no primary is heard of, and at volumes without an owner.
const LOOK: Duration = Duration::from_secs(3);
/// Time until a copy is looked at again.
const AGAIN: Duration = Duration::from_secs(15);

/// Returns whether a copy of this epoch is stale: the record was changed since, and does not name it.
fn is_stale<P>(record: &LogRecord<P>, log: LogId, (own, copy, epoch): (PeerId, LogId, u64)) -> bool {
    // One of the record's epoch may just have been created, and is named in a moment.
    let named = record.log.as_ref().filter(|named| named.id == log);
    let named_copy = named.and_then(|named| named.members.as_ref()).and_then(|members| members.copy(own));
    record.epoch > epoch && named_copy != Some(copy)
}

/// Looks at what no owner cares for, until this daemon leaves the group.
pub(super) async fn look(group: Weak<JoinedGroup>) {
    let looked: RefCell<BTreeMap<LogId, Instant>> = RefCell::default();
    loop {
        sleep(LOOK).await;
        let Some(group) = group.upgrade() else { return };
        if group.leaving.get() {
            continue;
        }
        let (Some(engine), Some(record), Some(_)) = (group.engine(), group.record(), group.running()) else { continue };
        group.discard_stale_copies(&engine, &record, &looked).await;
        group.find_copies(&engine, &record).await;
    }
}

impl JoinedGroup {
    /// Discards copies of the logs of this group's volumes that the records name no more.
    async fn discard_stale_copies(
        &self,
        engine: &Rc<Engine>,
        record: &GroupRecord,
        looked: &RefCell<BTreeMap<LogId, Instant>>,
    ) {
        let lease = record.policy().lease();
        let replicas = engine.peers.replicas();
        for ReplicaShelf { shelf, .. } in replicas.shelves() {
            for log in shelf.ids() {
                let is_due = looked.borrow().get(&log).is_none_or(|at| at.elapsed() >= AGAIN);
                if !is_due || !replicas.is_silent(&log, lease) {
                    continue;
                }
                looked.borrow_mut().insert(log, now());
                match self.discard_if_stale(engine, record, shelf, log).await {
                    Ok(false) => {}
                    Ok(true) => {
                        tracing::info!(group = %self.spec, log = id_text(&log), "discarded a stale copy of a write log");
                    }
                    Err(error) => {
                        tracing::debug!(group = %self.spec, log = id_text(&log), %error, "a copy of a write log is kept");
                    }
                }
            }
        }
        looked.borrow_mut().retain(|_, at| at.elapsed() < 2 * AGAIN);
    }

    async fn discard_if_stale(
        &self,
        engine: &Rc<Engine>,
        group: &GroupRecord,
        shelf: &Rc<Shelf>,
        log: LogId,
    ) -> Result<bool> {
        let (copy, _) = shelf.copy_of(&log).await.map_err(Failure::from)?;
        let info = shelf.inspect_superblock(&log).await.map_err(Failure::from)?;
        let known = self.settings.all().into_iter().find(|(_, settings)| settings.identity == info.volume);
        let name = known.map_or_else(|| VolumeName::new(info.name.clone()), |(name, _)| name);
        if group.volume(&name).is_some_and(|entry| entry.owner.member == self.own) {
            // Its own, which is open or is about to be.
            return Ok(false);
        }
        let spec: ImageSpec = name.as_str().parse().map_err(Failure::invalid)?;
        let image = engine.open_image(&spec).await?;
        if engine.shared_id(&spec, image.id()).as_deref() != Some(&*info.volume) {
            return Ok(false);
        }
        let record = load_record(&image).await.map_err(Failure::from)?;
        if !is_stale(&record, log, (PeerId(self.own.0), copy, info.epoch)) {
            return Ok(false);
        }
        engine.peers.replicas().discard_unnamed(&log, copy).await.map_err(Failure::from)
    }

    /// Notes who has complete copies of the logs of volumes whose owner is lost and that nobody was given: the owner may have
    /// had no time to note the last ones.
    async fn find_copies(&self, engine: &Rc<Engine>, record: &GroupRecord) {
        let is_active = |id| record.member(id).is_some_and(|member| member.state == GatewayState::Active);
        for (name, entry) in record.volumes() {
            let owner = entry.owner.member;
            let is_out = record.member(owner).is_none_or(|member| matches!(member.state, GatewayState::Out(_)));
            let Some(noted) = entry.copies.as_ref().filter(|_| is_out && !entry.leaving) else { continue };
            if noted.iter().any(|id| is_active(*id)) {
                continue;
            }
            match self.copies_of(engine, name).await {
                Ok(copies) if copies.as_ref() != Some(noted) => {
                    tracing::info!(group = %self.spec, volume = %name, ?copies, "found the copies of a write log");
                    let change = GroupChange::SetCopies { volume: name.clone(), owner, copies };
                    let changes = [GroupChange::Expect(record.epoch()), change];
                    if let Some(running) = self.running() {
                        // Refused if the record has changed meanwhile; it is looked at again.
                        let _ = running.runner.change(&changes).await;
                    }
                    return;
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(group = %self.spec, volume = %name, %error, "copies are not known"),
            }
        }
    }

    /// Returns the members with complete copies of a volume's log, as its own record has them; `None` if it has no log.
    async fn copies_of(
        &self,
        engine: &Rc<Engine>,
        name: &VolumeName,
    ) -> Result<Option<std::collections::BTreeSet<forebay_gateways::MemberId>>> {
        let spec: ImageSpec = name.as_str().parse().map_err(Failure::invalid)?;
        let image = engine.open_image(&spec).await?;
        let record = load_record(&image).await.map_err(Failure::from)?;
        Ok(record.log.and_then(|log| log.members).map(|members| complete(&members)))
    }
}

#[cfg(test)]
mod tests {
    use forebay_writelog::RecordedLog;
    use forebay_writelog::replication::LogMembers;

    use super::*;

    #[test]
    fn a_copy_is_stale_once_a_later_record_does_not_name_it() {
        let (own, other) = (PeerId([2; 16]), PeerId([1; 16]));
        let members = LogMembers::created_in(4, other, [1; 16], "client.1 a".into());
        let record = |members: LogMembers| {
            let epoch = members.epoch();
            LogRecord { epoch, log: Some(RecordedLog { id: [7; 16], place: (), members: Some(members) }) }
        };
        let copy = (own, [2; 16], 4);
        assert!(!is_stale(&record(members.clone()), [7; 16], copy), "it was created in this epoch, and is named next");
        let with = members.with_filling(own, [2; 16]);
        assert!(!is_stale(&record(with.clone()), [7; 16], copy));
        assert!(is_stale(&record(with.clone()), [7; 16], (own, [3; 16], 4)), "another copy is named");
        let without = with.without(own).expect("another one is complete");
        assert!(is_stale(&record(without), [7; 16], copy));
        assert!(is_stale(&record(with.clone()), [8; 16], copy), "another log is named");
        let released = LogRecord::<()> { epoch: with.epoch() + 1, log: None };
        assert!(is_stale(&released, [7; 16], copy));
    }
}
