//! End of a connection: its reason, and the time limits before and after.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_reactor::sleep;
use forebay_reactor::time::Sleep;

use crate::session::Fatal;

/// Time that a connection stays open after a protocol error or failed authentication, so that the host can read the
/// reason.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// Time in which a host has to close its end of a connection when the server stops.  Linux sends commands from the
/// context of the process that submits them, up to 6.1 at least without MSG_NOSIGNAL: a reset kills that process.
pub(super) const CLOSING: Duration = Duration::from_secs(1);

/// Reason why a connection ended.
#[derive(Debug)]
pub(super) enum NvmeEndReason {
    /// Closed by the host.
    Closed,
    /// Terminated by the host, with this error status.
    Terminated { _status: u16 },
    /// Queue disconnected by the host.
    Disconnected,
    /// Socket error.
    Socket(io::Error),
    /// Protocol error of the host.
    Fatal(Fatal),
    /// Timeout: the connection did not become a queue, or its host did not authenticate, in time.
    TooSlow,
    /// Failed TLS handshake.
    Insecure,
    /// Failed authentication.
    Unauthenticated,
    /// Too many refused Connects.
    Refused,
    /// Timeout: the host has not sent the data that it was asked for.
    Overdue,
    /// Expired keep-alive timeout.
    Silent,
    /// Shutdown of the server, or end of the controller.
    Stopped,
}

/// Progress of a connection towards its end.
///
/// ```text
/// handshake --established--> open --begin--> draining --all sent--> ended
///     |                                         |  (if the host is told: discarding --all sent--> lingering --> ended)
///     +-----------------begin-------------------+
/// ```
///
/// 1. The first reason to end stays the reason.
/// 2. Received bytes are discarded only if the host is told a reason to end that it has to read first: after a protocol
///    error or failed authentication, as long as the host keeps the connection open.
/// 3. The connection lingers only while it discards.
/// 4. A timer runs during the handshake and from the reason on, so that neither takes indefinitely.
pub(super) struct NvmeTeardown {
    reason: Option<NvmeEndReason>,
    discarding: bool,
    lingering: bool,
    timer: Option<Sleep>,
}

impl NvmeTeardown {
    /// Creates the state of a connection that has `timeout` for its handshake.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { reason: None, discarding: false, lingering: false, timer: Some(sleep(timeout)) }
    }

    /// Ends the handshake: the connection may stay open without a time limit.
    pub(super) fn established(&mut self) {
        if self.reason.is_none() {
            self.timer = None;
        }
    }

    /// Sets the reason to end, after which commands in flight have `drain_timeout` to complete.  Received bytes are
    /// discarded from then on if the host has to read the reason first.  Must not be called again.
    pub(super) fn begin(&mut self, reason: NvmeEndReason, drain_timeout: Duration) {
        debug_assert!(self.reason.is_none(), "the first reason stays");
        // Linux 6.9 and later repeat an Authentication Receive whose response a closed connection has overtaken, and
        // then recover neither the request nor the connection.
        self.discarding = matches!(reason, NvmeEndReason::Fatal(_) | NvmeEndReason::Unauthenticated);
        self.reason = Some(reason);
        self.timer = Some(sleep(drain_timeout));
        self.check();
    }

    /// Returns whether the connection accepts no more input.
    pub(super) fn has_begun(&self) -> bool {
        self.reason.is_some()
    }

    /// Returns whether received bytes are discarded.
    pub(super) fn is_discarding(&self) -> bool {
        self.discarding
    }

    /// Returns whether the connection still receives.
    pub(super) fn is_receiving(&self) -> bool {
        self.reason.is_none() || self.discarding
    }

    /// Records that the host has closed the connection, so that there is nothing left to discard or to wait for.
    pub(super) fn stream_ended(&mut self) {
        self.discarding = false;
        self.lingering = false;
    }

    /// Polls the time limit of the handshake.
    pub(super) fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        debug_assert!(self.reason.is_none());
        match &mut self.timer {
            Some(timer) => Pin::new(timer).poll(cx),
            None => Poll::Pending,
        }
    }

    /// Polls for the end: the time is over, or the connection is idle after its reason to end.
    pub(super) fn poll(&mut self, is_idle: bool, cx: &mut Context<'_>) -> Poll<NvmeEndReason> {
        if let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            self.timer = None;
            return Poll::Ready(self.reason.take().unwrap_or(NvmeEndReason::TooSlow));
        }
        if !is_idle || self.reason.is_none() {
            return Poll::Pending;
        }
        if !self.discarding {
            return Poll::Ready(self.reason.take().unwrap_or(NvmeEndReason::Stopped));
        }
        // Everything is sent.  The host has a moment to read it and to close.
        if !std::mem::replace(&mut self.lingering, true) {
            self.timer = Some(sleep(LINGER));
            cx.waker().wake_by_ref();
        }
        self.check();
        Poll::Pending
    }

    fn check(&self) {
        debug_assert!(!self.lingering || self.discarding);
        debug_assert!(!self.discarding || self.reason.is_some());
        debug_assert!(self.reason.is_none() || self.timer.is_some());
    }
}
