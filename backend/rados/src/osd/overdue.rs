//! Slow requests: reported in the log, and failed after `rados_osd_op_timeout`.

use std::rc::Weak;
use std::time::Duration;

use forebay_block::{Error, ErrorKind};
use forebay_reactor::sleep;

use super::{InFlightOp, Objecter};

/// Interval between checks for slow requests.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// Age at which a request is reported as slow.
const REPORT_AFTER: Duration = Duration::from_secs(30);

impl Objecter {
    /// Reports slow requests, and fails those beyond the time limit.
    pub(super) fn look_after(&self) {
        let mut oldest: Option<(Duration, String)> = None;
        let mut count = 0;
        let late = self.ops.filter_map(|tid, op| {
            let age = op.since.elapsed();
            if self.timeout.get().is_some_and(|limit| age >= limit && !op.lingers) {
                return Some((tid, self.describe(op)));
            }
            if age >= REPORT_AFTER {
                count += 1;
                if oldest.as_ref().is_none_or(|(other, _)| age > *other) {
                    oldest = Some((age, self.describe(op)));
                }
            }
            None
        });
        if let Some((age, what)) = oldest {
            tracing::warn!(requests = count, oldest_s = age.as_secs(), "slow requests to OSDs: {what}");
        }
        for (tid, what) in late {
            self.answer(tid, Err(Error::new(ErrorKind::TimedOut, what)));
        }
    }

    /// Describes what a request waits for.
    pub(super) fn describe(&self, op: &InFlightOp) -> String {
        let object = &op.request.object;
        let Some(target) = &op.target else { return format!("object {object}: no OSD map received yet") };
        let (osd, pg) = (target.mapping.primary, target.pg);
        if osd < 0 {
            return format!("object {object}: placement group {pg} has no primary OSD; see 'ceph pg map {pg}'");
        }
        let what = if op.sent { "does not reply" } else { "does not accept requests" };
        let conflict = self.rejections.by_osd(osd).filter(|_| !op.sent);
        let why = conflict.map_or_else(String::new, |error| format!(": {}", error.context()));
        format!("object {object}: osd.{osd} {what} (placement group {pg}){why}")
    }
}

/// Checks for slow requests periodically, as long as there are any requests.
pub(super) async fn watch(objecter: Weak<Objecter>) {
    loop {
        let limit = objecter.upgrade().and_then(|objecter| objecter.timeout.get());
        let interval =
            limit.map_or(WATCH_INTERVAL, |limit| (limit / 4).clamp(Duration::from_millis(100), WATCH_INTERVAL));
        sleep(interval).await;
        let Some(objecter) = objecter.upgrade() else { return };
        objecter.look_after();
        if objecter.ops.len() == 0 {
            objecter.looks_for_slow.set(false);
            return;
        }
    }
}
