//! Authentication of a queue: commands and timers.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use forebay_block::Buf;
use forebay_reactor::time::Sleep;
use forebay_reactor::{random, sleep};

use super::connect::host_refused;
use super::connection::NvmeConnection;
use super::ending::NvmeEndReason;
use crate::session::auth::{AuthExchange, AuthProgress, AuthSecrets};
use crate::wire::auth::{self, AuthFailureReason, MESSAGE_MAX};
use crate::wire::command::FABRICS;
use crate::wire::fabrics::fctype;
use crate::wire::{NvmeStatus, Sqe};

/// Delay before a host learns that its authentication has failed.  Limits the rate at which secrets can be tried.
const FAILURE_WAIT: Duration = Duration::from_secs(1);

/// Authentication of a queue, with its time limits.
///
/// 1. A queue whose host must authenticate accepts no other command until the host has.
/// 2. While an exchange is in progress, its deadline runs.
/// 3. At most one Authentication Receive waits to be told of a failure, and only once the exchange has failed.
#[derive(Default)]
pub(super) struct Authentication {
    /// Exchange, if the host must authenticate.
    exchange: Option<Box<AuthExchange>>,
    /// Deadline of the exchange in progress.
    deadline: Option<Sleep>,
    /// Authentication Receive that is to be told of a failure, after a delay.
    failing: Option<(Sqe, Sleep)>,
}

impl Authentication {
    /// Requires a host to authenticate with these keys.
    pub(super) fn require(&mut self, keys: Arc<AuthSecrets>, host: &str, subsystem: &str) {
        debug_assert!(self.exchange.is_none(), "a queue connects once");
        self.exchange = Some(Box::new(AuthExchange::new(keys, host, subsystem)));
    }

    /// Returns whether the host must authenticate.
    fn is_required(&self) -> bool {
        self.exchange.is_some()
    }

    /// Returns whether the queue accepts commands: its host has authenticated, or does not have to.
    fn has_passed(&self) -> bool {
        self.exchange.as_ref().is_none_or(|exchange| exchange.is_done())
    }

    /// Returns whether the host is to be told of a failure.
    fn is_failing(&self) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| exchange.is_failing())
    }

    /// Processes a message of the host.  Starts the deadline with the first message of an exchange, and then wakes
    /// `task`, which must poll it.
    fn receive(&mut self, message: &[u8], timeout: Duration, task: &Waker) -> Option<AuthProgress> {
        let exchange = self.exchange.as_mut()?;
        let was_in_progress = exchange.is_in_progress();
        let progress = exchange.take(message);
        if !was_in_progress && exchange.is_in_progress() {
            self.deadline = Some(sleep(timeout));
            // A new timer has to be polled once to register its wake-up.
            task.wake_by_ref();
        }
        self.advanced(progress);
        Some(progress)
    }

    /// Returns the next message to the host, in at most `space` bytes, and the progress it makes.
    ///
    /// # Errors
    /// The status of the command: no message is due, or it does not fit.
    fn send(&mut self, space: usize) -> Result<(Vec<u8>, AuthProgress), NvmeStatus> {
        let exchange = self.exchange.as_mut().ok_or(NvmeStatus::INVALID_OPCODE.final_())?;
        let (message, progress) = exchange.give(space.min(MESSAGE_MAX), &mut random)?;
        self.advanced(progress);
        Ok((message, progress))
    }

    fn advanced(&mut self, progress: AuthProgress) {
        if progress == AuthProgress::Done {
            self.deadline = None;
        }
        let in_progress = self.exchange.as_ref().is_some_and(|exchange| exchange.is_in_progress());
        debug_assert!(!in_progress || self.deadline.is_some(), "an exchange without a deadline");
    }

    /// Delays the answer to an Authentication Receive that is to be told of a failure.  Returns false if another one
    /// waits already.  Wakes `task`, which must poll the delay.
    fn delay_failure(&mut self, sqe: &Sqe, task: &Waker) -> bool {
        debug_assert!(self.is_failing());
        if self.failing.is_some() {
            return false;
        }
        self.failing = Some((*sqe, sleep(FAILURE_WAIT)));
        task.wake_by_ref();
        true
    }

    /// Returns the Authentication Receive whose delay is over.
    fn poll_failure(&mut self, cx: &mut Context<'_>) -> Option<Sqe> {
        let (sqe, timer) = self.failing.as_mut()?;
        if Pin::new(timer).poll(cx).is_pending() {
            return None;
        }
        let sqe = *sqe;
        self.failing = None;
        Some(sqe)
    }

    /// Returns true when the exchange in progress has taken too long.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> bool {
        let is_over = self.deadline.as_mut().is_some_and(|timer| Pin::new(timer).poll(cx).is_ready());
        if is_over {
            self.deadline = None;
        }
        is_over
    }

    /// Stops the timers, when the connection accepts no more commands.
    pub(super) fn abort(&mut self) {
        (self.deadline, self.failing) = (None, None);
    }
}

impl NvmeConnection {
    /// Returns whether a command is accepted: the host has authenticated or does not have to, or the command is for
    /// authentication.
    pub(super) fn is_admitted(&self, sqe: &Sqe) -> bool {
        let authenticates =
            sqe.opcode() == FABRICS && [fctype::AUTH_SEND, fctype::AUTH_RECEIVE].contains(&sqe.fctype());
        authenticates || self.auth.has_passed()
    }

    /// Handles Authentication Send, with its data.
    pub(super) fn auth_send(&mut self, sqe: &Sqe, data: &[u8]) {
        if !self.auth.is_required() {
            return self.fail(sqe, NvmeStatus::INVALID_OPCODE.final_());
        }
        let Some(len) = auth::length(sqe) else { return self.fail(sqe, NvmeStatus::INVALID_FIELD.final_()) };
        if len as usize != data.len() {
            return self.fail(sqe, NvmeStatus::INVALID_FIELD.final_());
        }
        let timeout = self.server.subsystems.limits().handshake_timeout;
        let progress = self.auth.receive(data, timeout, &self.waker);
        self.respond(sqe.cid(), NvmeStatus::SUCCESS, 0, 0);
        self.progressed(progress.unwrap_or(AuthProgress::On));
    }

    /// Handles Authentication Receive.  Delays the answer by `FAILURE_WAIT` if authentication has failed.
    pub(super) fn auth_receive(&mut self, sqe: &Sqe) {
        if !self.auth.is_required() {
            return self.fail(sqe, NvmeStatus::INVALID_OPCODE.final_());
        }
        let space = auth::length(sqe).filter(|&len| len <= sqe.sgl().len()).unwrap_or(0) as usize;
        if space == 0 {
            return self.fail(sqe, NvmeStatus::INVALID_FIELD.final_());
        }
        if !self.auth.is_failing() {
            return self.send_auth_message(sqe, space);
        }
        if !self.auth.delay_failure(sqe, &self.waker) {
            self.fail(sqe, NvmeStatus::SEQUENCE.final_());
        }
    }

    fn send_auth_message(&mut self, sqe: &Sqe, space: usize) {
        let (message, progress) = match self.auth.send(space) {
            Ok(sent) => sent,
            Err(status) => return self.fail(sqe, status),
        };
        self.respond_with_data(sqe.cid(), Buf::copy_of(&message));
        self.progressed(progress);
    }

    fn progressed(&mut self, progress: AuthProgress) {
        match progress {
            AuthProgress::On => {}
            AuthProgress::Done => {
                self.established();
                if let Some(queue) = &self.queue {
                    let (host, subsystem) = (&queue.association.host, queue.association.subsystem.nqn());
                    tracing::info!(peer = %self.peer, host, subsystem, queue = queue.id, "host authenticated");
                }
            }
            AuthProgress::Failed(reason) => self.authentication_failed(reason),
        }
    }

    fn authentication_failed(&mut self, reason: AuthFailureReason) {
        self.server.subsystems.stats().count(|counts| counts.auth_failures += 1);
        if let Some(queue) = &self.queue {
            let subsystem = queue.association.subsystem.nqn();
            let reason = format_args!("authentication failed: {reason}");
            host_refused(&self.peer, Some((&queue.association.host, subsystem)), reason);
        }
        self.stop_receiving(NvmeEndReason::Unauthenticated);
    }

    /// Polls the timers of authentication.
    pub(super) fn poll_auth(&mut self, cx: &mut Context<'_>) {
        if let Some(sqe) = self.auth.poll_failure(cx) {
            self.send_auth_message(&sqe, auth::length(&sqe).unwrap_or(0) as usize);
        }
        if self.auth.poll_deadline(cx) {
            self.server.subsystems.stats().count(|counts| counts.auth_failures += 1);
            self.stop_receiving(NvmeEndReason::TooSlow);
        }
    }
}
