//! End of a connection: its reason, and the time that requests in flight and the client still have.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_reactor::sleep;
use forebay_reactor::time::Sleep;

use super::connection::NbdEndReason;

/// Time during which an ending connection still answers requests with an error, so that clients see the reason.
const LINGER: Duration = Duration::from_millis(100);

/// Progress of a connection's end.
///
/// ```text
/// open --- the client ends it ---------------> ended: receives nothing, requests in flight have the drain timeout
///  \---- the server ends it --> draining: requests are refused for LINGER, then the same
/// ```
///
/// 1. The first reason counts, and once there is one, nothing is received.
/// 2. `timer` is set from the first step on until the time is over.
pub(super) struct NbdTeardown {
    drain_timeout: Duration,
    /// Reason of the end, once the connection receives nothing any more.
    reason: Option<NbdEndReason>,
    /// Requests are refused, because the server or export is shutting down.
    draining: bool,
    timer: Option<Sleep>,
    /// Requests have been refused for long enough; the timer limits those in flight.
    lingered: bool,
}

impl NbdTeardown {
    /// Creates the state of an open connection.
    pub(super) fn new(drain_timeout: Duration) -> Self {
        Self { drain_timeout, reason: None, draining: false, timer: None, lingered: false }
    }

    /// Returns true while the connection receives.
    pub(super) fn is_open(&self) -> bool {
        self.reason.is_none()
    }

    /// Returns true if requests are refused.
    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Ends the connection for a reason.  Returns false if there is one already.
    pub(super) fn end(&mut self, reason: NbdEndReason) -> bool {
        if self.reason.is_some() {
            return false;
        }
        self.reason = Some(reason);
        if !self.draining {
            // From here on requests in flight have `drain_timeout` to complete.
            self.timer = Some(sleep(self.drain_timeout));
            self.lingered = true;
        }
        debug_assert!(self.timer.is_some());
        true
    }

    /// Ends the connection for the server; idempotent.  If the client has ended it already, the time that requests in
    /// flight have goes on.
    pub(super) fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) || self.reason.is_some() {
            return;
        }
        self.timer = Some(sleep(LINGER));
    }

    /// Completes when the connection is over: nothing is in flight, which `quiet` says, or the time is over.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, quiet: bool) -> Poll<NbdEndReason> {
        let mut timed_out = false;
        while let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            timed_out = self.lingered;
            self.timer = (!timed_out).then(|| sleep(self.drain_timeout));
            self.lingered = true;
        }
        let over = self.reason.is_some() || (self.draining && self.lingered);
        match timed_out || (quiet && over) {
            true => Poll::Ready(self.reason.take().unwrap_or(NbdEndReason::Stopped)),
            false => Poll::Pending,
        }
    }
}
