//! Authentication of a queue: commands and timers.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use forebay_block::Buf;
use forebay_reactor::{random, sleep};

use super::admin::host_refused;
use super::connection::{Connection, End};
use crate::session::auth::Progress;
use crate::subsystem::Refused;
use crate::wire::auth::{self, MESSAGE_MAX, Reason};
use crate::wire::command::FABRICS;
use crate::wire::fabrics::fctype;
use crate::wire::{Sqe, Status};

/// Delay before a host learns that its authentication has failed.  Limits the rate at which secrets can be tried.
const FAILURE_WAIT: Duration = Duration::from_secs(1);
/// Refused Connects after which a connection is ended.
const REFUSED_MAX: u32 = 8;

impl Connection {
    /// Returns whether the queue accepts commands: its host has authenticated, or does not have to.
    pub(super) fn is_authenticated(&self) -> bool {
        self.auth.as_ref().is_none_or(|auth| auth.is_done())
    }

    /// Returns whether a command is Authentication Send or Authentication Receive.
    pub(super) fn is_of_authentication(sqe: &Sqe) -> bool {
        sqe.opcode() == FABRICS && [fctype::AUTH_SEND, fctype::AUTH_RECEIVE].contains(&sqe.fctype())
    }

    /// Handles Authentication Send, with its data.
    pub(super) fn auth_send(&mut self, sqe: &Sqe, data: &[u8]) {
        let Some(auth) = &mut self.auth else { return self.fail(sqe, Status::INVALID_OPCODE.final_()) };
        let Some(len) = auth::length(sqe) else { return self.fail(sqe, Status::INVALID_FIELD.final_()) };
        if len as usize != data.len() {
            return self.fail(sqe, Status::INVALID_FIELD.final_());
        }
        let was_under_way = auth.is_under_way();
        let progress = auth.take(data);
        if !was_under_way && auth.is_under_way() {
            self.auth_deadline = Some(sleep(self.server.subsystems.limits().handshake_timeout));
            // A new timer has to be polled once to register its wake-up.
            self.waker.wake_by_ref();
        }
        self.respond(sqe.cid(), Status::SUCCESS, 0, 0);
        self.progressed(progress);
    }

    /// Handles Authentication Receive.  Delays the answer by `FAILURE_WAIT` if authentication has failed.
    pub(super) fn auth_receive(&mut self, sqe: &Sqe) {
        let Some(auth) = &mut self.auth else { return self.fail(sqe, Status::INVALID_OPCODE.final_()) };
        let room = auth::length(sqe).filter(|&len| len <= sqe.sgl().len()).unwrap_or(0) as usize;
        if room == 0 {
            return self.fail(sqe, Status::INVALID_FIELD.final_());
        }
        if auth.is_failing() {
            if self.failing.is_some() {
                return self.fail(sqe, Status::SEQUENCE.final_());
            }
            self.failing = Some((*sqe, sleep(FAILURE_WAIT)));
            self.waker.wake_by_ref();
            return;
        }
        self.tell_auth(sqe, room);
    }

    fn tell_auth(&mut self, sqe: &Sqe, room: usize) {
        let Some(auth) = &mut self.auth else { return };
        let (message, progress) = match auth.give(room.min(MESSAGE_MAX), &mut random) {
            Ok(given) => given,
            Err(status) => return self.fail(sqe, status),
        };
        let held = message.len();
        self.outbox.hold_anyway(held);
        self.outbox.replies.data(sqe.cid(), Buf::copy_of(&message).into(), false);
        self.respond(sqe.cid(), Status::SUCCESS, 0, held);
        self.progressed(progress);
    }

    fn progressed(&mut self, progress: Progress) {
        match progress {
            Progress::On => {}
            Progress::Done => {
                self.auth_deadline = None;
                self.settled();
                if let Some(queue) = &self.queue {
                    let (host, queue) = (&queue.association.host, queue.id);
                    tracing::info!(peer = %self.peer, host, queue, "a host has authenticated");
                }
            }
            Progress::Failed(reason) => self.failed_to_authenticate(reason),
        }
    }

    fn failed_to_authenticate(&mut self, reason: Reason) {
        self.server.subsystems.stats().count(|counts| counts.auth_failures += 1);
        if let Some(queue) = &self.queue {
            let subsystem = queue.association.subsystem.nqn();
            let reason = format_args!("authentication failed: {reason}");
            host_refused(&self.peer, Some((&queue.association.host, subsystem)), reason);
        }
        self.stop_receiving(End::Unauthenticated);
    }

    /// Polls the timers of authentication.
    pub(super) fn poll_auth(&mut self, cx: &mut Context<'_>) {
        if let Some((sqe, timer)) = &mut self.failing
            && Pin::new(timer).poll(cx).is_ready()
        {
            let sqe = *sqe;
            self.failing = None;
            self.tell_auth(&sqe, auth::length(&sqe).unwrap_or(0) as usize);
        }
        if let Some(timer) = &mut self.auth_deadline
            && Pin::new(timer).poll(cx).is_ready()
        {
            self.auth_deadline = None;
            self.server.subsystems.stats().count(|counts| counts.auth_failures += 1);
            self.stop_receiving(End::TooSlow);
        }
    }

    /// Refuses a Connect.  Ends the connection after `REFUSED_MAX` refusals.
    pub(super) fn refuse(&mut self, sqe: &Sqe, refused: Refused) {
        self.server.subsystems.stats().count(|counts| counts.refused += 1);
        let result = refused.wrong.map_or(0, |wrong| wrong.result());
        self.respond(sqe.cid(), refused.status, result, 0);
        self.refusals += 1;
        if self.refusals >= REFUSED_MAX {
            self.stop_receiving(End::Refused);
        }
    }
}
