//! Timeouts of an open stream: silence of the peer, and frames that are not completed.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use forebay_reactor::time::Sleep;
use forebay_reactor::{Instant, sleep_until};

use crate::connection::DisconnectReason;
use crate::options::MessengerOptions;

/// Times of an open stream, against its timeouts.
///
/// Invariants:
/// 1. While reception is paused by this side, neither silence nor an incomplete frame counts.
/// 2. The peer is asked once for a sign of life, until something is received.
/// 3. After the first check a timer is armed, and wakes the stream's task for the next one.
pub(super) struct StreamLiveness {
    /// Time of the last reception.
    heard: Instant,
    /// Time when the frame that is being received began.
    frame_since: Option<Instant>,
    /// Set while a keepalive was sent and nothing has been received since.
    asked: bool,
    /// Set while a received message waits for budget.
    paused: bool,
    /// Next check, and the timer that wakes the task for it; `None` before the first check.
    timer: Option<(Instant, Sleep)>,
}

impl StreamLiveness {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: now, frame_since: None, asked: false, paused: false, timer: None }
    }

    /// Records that bytes were received.
    #[inline]
    pub(super) fn received(&mut self, now: Instant) {
        debug_assert!(now >= self.heard, "time goes backwards");
        self.heard = now;
        self.asked = false;
    }

    /// Records that a frame has begun and is not complete.
    #[inline]
    pub(super) fn frame_begun(&mut self, now: Instant) {
        self.frame_since.get_or_insert(now);
    }

    /// Records that no frame is incomplete.
    #[inline]
    pub(super) fn frame_ended(&mut self) {
        self.frame_since = None;
    }

    /// Returns true if a frame has begun and is not complete.
    pub(super) fn is_in_frame(&self) -> bool {
        self.frame_since.is_some()
    }

    /// Records that this side pauses reception.
    pub(super) fn pause(&mut self) {
        self.paused = true;
    }

    /// Records that reception continues, if it was paused: the silence until now does not count.
    #[inline]
    pub(super) fn resume(&mut self, now: Instant) {
        if std::mem::take(&mut self.paused) {
            self.heard = now;
        }
    }

    /// Checks the timeouts when the timer is due.  Returns true if the peer is to be asked for a sign of life.
    ///
    /// # Errors
    /// `Silent` or `Slow`, when a timeout has passed.
    #[inline]
    pub(super) fn check(
        &mut self,
        now: Instant,
        options: &MessengerOptions,
        cx: &mut Context<'_>,
    ) -> Result<bool, DisconnectReason> {
        if self.timer.as_ref().is_some_and(|(due, _)| now < *due) {
            return Ok(false);
        }
        self.check_due(now, options, cx)
    }

    fn check_due(
        &mut self,
        now: Instant,
        options: &MessengerOptions,
        cx: &mut Context<'_>,
    ) -> Result<bool, DisconnectReason> {
        let silent = now.since(self.heard);
        let mut ask = false;
        if !self.paused {
            if silent >= options.keepalive_timeout {
                return Err(DisconnectReason::Silent);
            }
            if self.frame_since.is_some_and(|since| now.since(since) >= options.frame_timeout) {
                return Err(DisconnectReason::Slow);
            }
            ask = silent >= options.keepalive_interval && !std::mem::replace(&mut self.asked, true);
        }
        let patience = options.keepalive_timeout.saturating_sub(options.keepalive_interval);
        let period = options.keepalive_interval.min(patience).min(options.frame_timeout);
        let due = now + period.max(Duration::from_millis(1));
        let mut timer = sleep_until(due);
        // The timer is armed by its first poll; since a task's waker does not change, it is not polled again until it
        // is due.
        let _ = Pin::new(&mut timer).poll(cx);
        self.timer = Some((due, timer));
        Ok(ask)
    }
}
