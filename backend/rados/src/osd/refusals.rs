//! Failure of requests while this client is rejected: by the monitors because of its key, or by OSDs because of
//! connection modes or features.

use forebay_block::Error;

use super::{Objecter, Op};

impl Objecter {
    /// Records that the monitors reject the key, or accept this client again (`None`).  Existing OSD sessions stay open
    /// as long as the OSDs allow: revoking write access is the purpose of blocklisting.
    pub(crate) fn refuse(&self, error: Option<Error>) {
        if let (Some(error), None) = (&error, &*self.refused.borrow()) {
            tracing::warn!(%error, "requests to OSDs without a session fail from now on");
        }
        *self.refused.borrow_mut() = error;
        self.fail_refused(None);
    }

    /// Fails unsent requests, or one of them, while the monitors reject this client.
    pub(super) fn fail_refused(&self, one: Option<u64>) {
        let Some(error) = self.refused.borrow().clone() else { return };
        let waits = |tid: &u64| self.ops.borrow().get(tid).is_some_and(|op| !op.sent);
        let all = || self.ops.borrow().keys().copied().collect();
        let tids: Vec<u64> = one.map_or_else(all, |tid| vec![tid]);
        for tid in tids.into_iter().filter(waits) {
            self.answer(tid, Err(error.clone()));
        }
    }

    /// Records the error of an OSD that rejects this client. Returns whether it differs from the previous one.
    pub(super) fn set_conflict(&self, osd: i32, error: &Error) -> bool {
        let before = self.conflicts.borrow_mut().insert(osd, error.clone());
        before.is_none_or(|before| before.context() != error.context())
    }

    /// Clears the error of an OSD that no longer rejects this client, or that is unreachable.
    pub(super) fn clear_conflict(&self, osd: i32) {
        self.conflicts.borrow_mut().remove(&osd);
    }

    /// Marks a pool as used by hosts: its requests then wait for OSDs that reject this client because of a setting.
    pub(crate) fn mark_in_use(&self, pool: i64) {
        self.served.borrow_mut().insert(pool);
    }

    /// Fails requests, or one of them, to OSDs that accept none of this client's connection modes or require features
    /// that it lacks. Limited to pools that have not answered any request and that no host uses, so that opening a pool
    /// reports the error.  Requests of other pools wait, as for an OSD that is down, because a host that uses a volume
    /// must not get errors for a setting that can be reverted.
    pub(super) fn fail_conflicting(&self, one: Option<u64>) {
        let (conflicts, served) = (self.conflicts.borrow(), self.served.borrow());
        if conflicts.is_empty() {
            return;
        }
        let refusal = |op: &Op| {
            let osd = op.target.as_ref()?.mapping.primary;
            conflicts.get(&osd).filter(|_| !op.sent && !served.contains(&op.request.pool)).cloned()
        };
        let failed: Vec<(u64, Error)> = {
            let ops = self.ops.borrow();
            match one {
                Some(tid) => ops.get(&tid).and_then(refusal).map(|error| (tid, error)).into_iter().collect(),
                None => ops.iter().filter_map(|(&tid, op)| Some((tid, refusal(op)?))).collect(),
            }
        };
        for (tid, error) in failed {
            self.answer(tid, Err(error));
        }
    }
}
