//! End of a connection: its reason, the logout, and the time that the host and commands in flight still have.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_reactor::sleep;
use forebay_reactor::time::Sleep;

use super::connection::IscsiEndReason;

/// Time for which a session about to be dropped still responds to commands, so that hosts learn the reason.
const LINGER: Duration = Duration::from_millis(100);

/// Expired time limit that the connection has to act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expired {
    /// The host was asked to log out and has not done so.
    LogoutWait,
    /// Commands in flight have not ended in time for the response to this logout request.
    Logout(u32),
}

/// Progress of a connection's end.
///
/// 1. The first reason counts, and once there is one, nothing is received.
/// 2. Draining never ends: no command begins any more.
/// 3. Once `lingered` is set, the timer limits the commands in flight; when it expires, the connection is over.
/// 4. A logout request that has no response yet keeps the connection; it gets one response.
pub(super) struct IscsiTeardown {
    drain_timeout: Duration,
    /// Reason of the end.
    reason: Option<IscsiEndReason>,
    draining: bool,
    /// Logout was requested from the host; `timer` limits the time that it has for that.
    logout_asked: bool,
    timer: Option<Sleep>,
    lingered: bool,
    timed_out: bool,
    /// Initiator task tag of a logout request, until the session's tasks have ended.
    logout: Option<u32>,
}

impl IscsiTeardown {
    /// Creates the state of an open connection.
    pub(super) fn new(drain_timeout: Duration) -> Self {
        Self {
            drain_timeout,
            reason: None,
            draining: false,
            logout_asked: false,
            timer: None,
            lingered: false,
            timed_out: false,
            logout: None,
        }
    }

    /// Returns true while the connection receives.
    pub(super) fn is_open(&self) -> bool {
        self.reason.is_none()
    }

    /// Begins to drain.  Returns false if it has begun already.
    pub(super) fn drain(&mut self) -> bool {
        !std::mem::replace(&mut self.draining, true)
    }

    /// Sets the time that commands in flight have from here on.
    pub(super) fn limit(&mut self) {
        self.timer = Some(sleep(self.drain_timeout));
        self.lingered = true;
    }

    /// Sets the time that the host has to log out.
    pub(super) fn await_logout(&mut self, time: Duration) {
        self.logout_asked = true;
        self.timer = Some(sleep(time));
    }

    /// Sets the time that the host has to read why the session is dropped.
    pub(super) fn linger(&mut self) {
        self.timer = Some(sleep(LINGER));
    }

    /// Ends the connection for a reason.
    pub(super) fn end(&mut self, reason: IscsiEndReason) {
        debug_assert!(self.reason.is_none(), "the first reason counts");
        self.reason = Some(reason);
        self.logout_asked = false;
        self.limit();
    }

    /// Keeps a logout request until the tasks of the session have ended.
    pub(super) fn log_out(&mut self, itt: u32) {
        debug_assert!(!self.is_open());
        self.logout = Some(itt);
    }

    /// Takes the logout request when no task is in flight.
    pub(super) fn take_logout(&mut self, idle: bool) -> Option<u32> {
        self.logout.take_if(|_| idle)
    }

    /// Polls the timer.  Returns a time limit that has expired, until there is none.
    pub(super) fn poll_timer(&mut self, cx: &mut Context<'_>) -> Option<Expired> {
        while let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            if std::mem::take(&mut self.logout_asked) {
                self.linger();
                return Some(Expired::LogoutWait);
            }
            if let Some(itt) = self.logout.take() {
                self.linger();
                return Some(Expired::Logout(itt));
            }
            self.timed_out = self.lingered;
            self.timer = (!self.timed_out).then(|| sleep(self.drain_timeout));
            self.lingered = true;
        }
        None
    }

    /// Returns true if the connection is over once nothing is in flight or unsent.
    fn is_over(&self) -> bool {
        (self.reason.is_some() || (self.draining && self.lingered)) && self.logout.is_none()
    }

    /// Completes when the connection is over: everything is `done` and sent, or the time is over.
    pub(super) fn poll(&mut self, done: bool) -> Poll<IscsiEndReason> {
        match self.timed_out || (done && self.is_over()) {
            true => Poll::Ready(self.reason.take().unwrap_or(IscsiEndReason::Stopped)),
            false => Poll::Pending,
        }
    }
}
