//! Failure of requests while this client is rejected: by the monitors because of its key, or by OSDs because of
//! connection modes or features.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use forebay_block::Error;

use super::{InFlightOp, Objecter};

/// Daemons that reject this client, and the pools whose requests wait for them nevertheless.
///
/// Invariants:
/// 1. A pool in use stays in use: a host that uses a volume must not get errors for a setting that can be reverted.
/// 2. `last_in_use` is one of `in_use`.
#[derive(Default)]
pub(super) struct Rejections {
    /// Authentication error of the monitors: no new OSD sessions, and requests without one fail.
    by_monitors: RefCell<Option<Error>>,
    /// OSDs that reject this client until settings change, with the error: connection modes, features.
    by_osds: RefCell<BTreeMap<i32, Error>>,
    /// Pools that have answered a request or are used by hosts.
    in_use: RefCell<BTreeSet<i64>>,
    /// Pool of the last reply: most replies are of one pool, and need no lookup.
    last_in_use: Cell<Option<i64>>,
}

impl Rejections {
    /// Records the authentication error of the monitors, or that they accept this client again (`None`); returns
    /// whether they rejected it before.
    fn set_by_monitors(&self, error: Option<Error>) -> bool {
        self.by_monitors.replace(error).is_some()
    }

    /// Returns the authentication error of the monitors.
    fn by_monitors(&self) -> Option<Error> {
        self.by_monitors.borrow().clone()
    }

    /// Records the error of an OSD that rejects this client; returns whether it differs from the previous one.
    pub(super) fn set_by_osd(&self, osd: i32, error: &Error) -> bool {
        let before = self.by_osds.borrow_mut().insert(osd, error.clone());
        before.is_none_or(|before| before.context() != error.context())
    }

    /// Clears the error of an OSD that no longer rejects this client, or that is unreachable.
    pub(super) fn clear_osd(&self, osd: i32) {
        self.by_osds.borrow_mut().remove(&osd);
    }

    /// Returns the error of an OSD that rejects this client.
    pub(super) fn by_osd(&self, osd: i32) -> Option<Error> {
        self.by_osds.borrow().get(&osd).cloned()
    }

    /// Returns whether any OSD rejects this client.
    pub(super) fn has_osds(&self) -> bool {
        !self.by_osds.borrow().is_empty()
    }

    /// Marks a pool as used: its requests then wait for OSDs that reject this client because of a setting.
    pub(super) fn mark_in_use(&self, pool: i64) {
        if self.last_in_use.replace(Some(pool)) != Some(pool) {
            self.in_use.borrow_mut().insert(pool);
        }
        debug_assert!(self.is_in_use(pool));
    }

    /// Returns whether a pool has answered a request or is used by hosts.
    pub(super) fn is_in_use(&self, pool: i64) -> bool {
        self.in_use.borrow().contains(&pool)
    }
}

impl Objecter {
    /// Records that the monitors reject the key, or accept this client again (`None`).  Existing OSD sessions stay open
    /// as long as the OSDs allow: revoking write access is the purpose of blocklisting.
    pub(crate) fn refuse(&self, error: Option<Error>) {
        let text = error.as_ref().map(|error| error.context().to_owned());
        let rejected_before = self.rejections.set_by_monitors(error);
        if let (Some(text), false) = (text, rejected_before) {
            tracing::warn!("{text}; requests to OSDs without a session fail until a monitor accepts this client");
        }
        self.fail_refused(None);
    }

    /// Fails unsent requests, or one of them, while the monitors reject this client.
    pub(super) fn fail_refused(&self, one: Option<u64>) {
        let Some(error) = self.rejections.by_monitors() else { return };
        let unsent = match one {
            Some(tid) => Vec::from_iter(self.ops.with(tid, |op| !op.sent).and_then(|unsent| unsent.then_some(tid))),
            None => self.ops.filter_map(|tid, op| (!op.sent).then_some(tid)),
        };
        for tid in unsent {
            self.answer(tid, Err(error.clone()));
        }
    }

    /// Marks a pool as used by hosts: its requests then wait for OSDs that reject this client because of a setting.
    pub(crate) fn mark_in_use(&self, pool: i64) {
        self.rejections.mark_in_use(pool);
    }

    /// Fails requests, or one of them, to OSDs that accept none of this client's connection modes or require features
    /// that it lacks. Limited to pools that have not answered any request and that no host uses, so that opening a pool
    /// reports the error.  Requests of other pools wait, as for an OSD that is down, because a host that uses a volume
    /// must not get errors for a setting that can be reverted.
    pub(super) fn fail_conflicting(&self, one: Option<u64>) {
        if !self.rejections.has_osds() {
            return;
        }
        let refusal = |op: &InFlightOp| {
            let osd = op.target.as_ref()?.mapping.primary;
            let fails = !op.sent && !self.rejections.is_in_use(op.request.pool);
            fails.then(|| self.rejections.by_osd(osd)).flatten()
        };
        let failed = match one {
            Some(tid) => Vec::from_iter(self.ops.with(tid, refusal).flatten().map(|error| (tid, error))),
            None => self.ops.filter_map(|tid, op| Some((tid, refusal(op)?))),
        };
        for (tid, error) in failed {
            self.answer(tid, Err(error));
        }
    }
}
