//! Liveness of the initiator: silence, the ping, and the patience with both.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_reactor::time::Sleep;
use forebay_reactor::{Instant, sleep};

/// State of the initiator when the timer expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InitiatorLiveness {
    /// Initiator that has sent something in the meantime.
    Alive,
    /// Initiator that has sent nothing: it is pinged.
    Silent,
    /// Initiator that has sent nothing since the ping either.
    Dead,
}

/// Timer that expires when nothing was received for `patience`.
pub(super) struct KeepAlive {
    patience: Duration,
    heard: Instant,
    pinged: bool,
    timer: Sleep,
}

impl KeepAlive {
    /// Creates the timer of an initiator that was heard at `now`.
    pub(super) fn new(patience: Duration, now: Instant) -> Self {
        Self { patience, heard: now, pinged: false, timer: sleep(patience) }
    }

    /// Records that something was received.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Returns the longest silence that is tolerated.
    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// Returns true when the timer has expired; [`check`](Self::check) or [`restart`](Self::restart) sets it again.
    pub(super) fn has_expired(&mut self, cx: &mut Context<'_>) -> bool {
        matches!(Pin::new(&mut self.timer).poll(cx), Poll::Ready(()))
    }

    /// Sets the timer again.
    pub(super) fn restart(&mut self) {
        self.timer = sleep(self.patience);
    }

    /// Returns the state of the initiator, and sets the timer again.
    pub(super) fn check(&mut self, now: Instant) -> InitiatorLiveness {
        let silent = now.since(self.heard);
        if silent < self.patience {
            self.pinged = false;
            self.timer = sleep(self.patience - silent);
            return InitiatorLiveness::Alive;
        }
        self.restart();
        match std::mem::replace(&mut self.pinged, true) {
            false => InitiatorLiveness::Silent,
            true => InitiatorLiveness::Dead,
        }
    }
}
