//! Times of the last read and the last write by hosts, recorded with the image at intervals, as librbd does.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::BlockRequest;
use forebay_image::{Image, ImageTimes, TimesRecorder};
use forebay_reactor::{sleep, try_spawn, wall_clock};

/// Interval where no option gives another one, librbd's.
const INTERVAL: Duration = Duration::from_secs(60);

/// Requests of one kind: reads, or changes.
struct UsedAt {
    /// Least time between two records; zero for none at all.
    interval: Cell<Duration>,
    /// Set if there was a request since the last record.
    pending: Cell<bool>,
    /// Time that was recorded last, since 1970-01-01T00:00:00Z.
    recorded: Cell<Option<Duration>>,
}

/// Times of a volume's last read and last write, as far as they are not recorded yet.
///
/// A request sets a flag; one task records the times. It ends when nothing is pending, and does not keep the image open.
pub(super) struct UseTimes {
    recorder: TimesRecorder,
    reads: UsedAt,
    changes: UsedAt,
    /// Set while there is a task.
    is_recording: Cell<bool>,
}

impl UsedAt {
    fn new(recorded: Option<Duration>, interval: Duration) -> Self {
        Self { interval: Cell::new(interval), pending: Cell::new(false), recorded: Cell::new(recorded) }
    }

    fn set_interval(&self, interval: Duration) {
        if self.interval.replace(interval) != interval {
            // The next request begins to wait for it.
            self.pending.set(false);
        }
    }

    /// Returns how long it is until a pending time is to be recorded; `None` if there is none.
    fn due_in(&self, now: Duration) -> Option<Duration> {
        let interval = Some(self.interval.get()).filter(|interval| !interval.is_zero() && self.pending.get())?;
        // One in the future was recorded by another clock.
        let recorded = self.recorded.get().filter(|recorded| *recorded <= now);
        Some(recorded.map_or(Duration::ZERO, |recorded| recorded.saturating_add(interval).saturating_sub(now)))
    }

    /// Returns the time to record, if one is due.
    fn take_due(&self, now: Duration) -> Option<Duration> {
        let is_due = self.due_in(now).is_some_and(|wait| wait.is_zero());
        is_due.then(|| {
            self.pending.set(false);
            self.recorded.set(Some(now));
            now
        })
    }
}

impl UseTimes {
    /// Begins with the times that an image has; those of one that cannot be written are never recorded.
    pub(super) fn new(image: &Image) -> Rc<Self> {
        let ImageTimes { accessed, modified } = image.times();
        let interval = if image.is_read_only() { Duration::ZERO } else { INTERVAL };
        let (reads, changes) = (UsedAt::new(accessed, interval), UsedAt::new(modified, interval));
        Rc::new(Self { recorder: image.times_recorder(), reads, changes, is_recording: Cell::new(false) })
    }

    /// Applies the options of an image; see `rbd_atime_update_interval` and `rbd_mtime_update_interval` of `rbd`.
    pub(super) fn set_options(&self, options: &BTreeMap<String, String>) {
        let interval = |name: &str| {
            let seconds = options.get(name).and_then(|value| forebay_qos::parse_count(value).ok());
            seconds.map_or(INTERVAL, Duration::from_secs)
        };
        self.reads.set_interval(interval("rbd_atime_update_interval"));
        self.changes.set_interval(interval("rbd_mtime_update_interval"));
    }

    /// Takes note of a request of a host.
    pub(super) fn note(self: &Rc<Self>, request: &BlockRequest) {
        let used = match request {
            BlockRequest::Flush => return,
            BlockRequest::Read(_) => &self.reads,
            _ => &self.changes,
        };
        if used.pending.replace(true) || used.interval.get().is_zero() || self.is_recording.replace(true) {
            return;
        }
        // Without a reactor nothing is recorded any more.
        drop(try_spawn(record(Rc::downgrade(self))));
    }
}

/// Records the times when they are due, until nothing is pending or the volume is closed.
async fn record(times: Weak<UseTimes>) {
    loop {
        let Some(used) = times.upgrade() else { return };
        let now = wall_clock();
        let due = ImageTimes { accessed: used.reads.take_due(now), modified: used.changes.take_due(now) };
        if let Err(error) = used.recorder.record(due).await {
            tracing::debug!(%error, "cannot record when an image was used");
        }
        let now = wall_clock();
        let waits = [used.reads.due_in(now), used.changes.due_in(now)];
        let Some(wait) = waits.into_iter().flatten().min() else {
            used.is_recording.set(false);
            return;
        };
        drop(used);
        sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_time_is_recorded_once_an_interval_and_only_if_there_was_a_request() {
        let used = UsedAt::new(Some(at(100)), at(60));
        assert_eq!(used.due_in(at(500)), None, "no request");
        used.pending.set(true);
        assert_eq!((used.due_in(at(130)), used.take_due(at(130))), (Some(at(30)), None));
        assert_eq!(used.take_due(at(160)), Some(at(160)));
        assert_eq!(used.due_in(at(500)), None, "recorded");
        used.pending.set(true);
        assert_eq!(used.due_in(at(161)), Some(at(59)));
        used.set_interval(at(0));
        used.pending.set(true);
        assert_eq!(used.due_in(at(500)), None, "disabled");
    }

    #[test]
    fn a_time_of_the_future_does_not_stop_the_records() {
        let used = UsedAt::new(Some(at(1000)), at(60));
        used.pending.set(true);
        assert_eq!(used.take_due(at(500)), Some(at(500)));
        let never = UsedAt::new(None, at(60));
        never.pending.set(true);
        assert_eq!(never.take_due(at(7)), Some(at(7)));
    }
}
