//! Authentication of a queue: what of it waits.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use forebay_block::Buf;
use forebay_reactor::{random, sleep};

use super::connection::{Connection, End};
use crate::session::auth::Progress;
use crate::target::Refused;
use crate::wire::auth::{self, MESSAGE_MAX, Reason};
use crate::wire::command::FABRICS;
use crate::wire::fabrics::fctype;
use crate::wire::{Sqe, Status};

/// How long a host that has failed waits to be told, so that nobody can try secrets as fast as the network carries them.
const FAILURE_WAIT: Duration = Duration::from_secs(1);
/// Connects of a connection that are refused before it is ended.
const REFUSED_MAX: u32 = 8;

impl Connection {
    /// The queue takes commands: its host has shown who it is, or needs not to.
    pub(super) fn is_authenticated(&self) -> bool {
        self.auth.as_ref().is_none_or(|auth| auth.is_done())
    }

    /// Whether a command is one of those with which a host authenticates.
    pub(super) fn is_of_authentication(sqe: &Sqe) -> bool {
        sqe.opcode() == FABRICS && [fctype::AUTH_SEND, fctype::AUTH_RECEIVE].contains(&sqe.fctype())
    }

    /// Authentication Send, with its data.
    pub(super) fn auth_send(&mut self, sqe: &Sqe, data: &[u8]) {
        let Some(auth) = &mut self.auth else { return self.fail(sqe, Status::INVALID_OPCODE.final_()) };
        let Some(len) = auth::length(sqe) else { return self.fail(sqe, Status::INVALID_FIELD.final_()) };
        if len as usize != data.len() {
            return self.fail(sqe, Status::INVALID_FIELD.final_());
        }
        let was_under_way = auth.is_under_way();
        let progress = auth.take(data);
        if !was_under_way && auth.is_under_way() {
            self.auth_deadline = Some(sleep(self.server.target.limits().handshake_timeout));
            // A timer that was just made wants to be polled.
            self.waker.wake_by_ref();
        }
        self.respond(sqe.cid(), Status::SUCCESS, 0, 0);
        self.progressed(progress);
    }

    /// Authentication Receive.
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
        self.server.target.stats().count(|counts| counts.auth_failures += 1);
        if let Some(queue) = &self.queue {
            let (host, queue) = (&queue.association.host, queue.id);
            tracing::warn!(peer = %self.peer, host, queue, %reason, "a host has failed to authenticate");
        }
        self.stop_receiving(End::Unauthenticated);
    }

    /// Looks at the timers of authentication.
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
            self.server.target.stats().count(|counts| counts.auth_failures += 1);
            self.stop_receiving(End::TooSlow);
        }
    }

    /// Refuses a Connect; a host that asks again and again on one connection loses it.
    pub(super) fn refuse(&mut self, sqe: &Sqe, refused: Refused) {
        self.server.target.stats().count(|counts| counts.refused += 1);
        let result = refused.wrong.map_or(0, |wrong| wrong.result());
        self.respond(sqe.cid(), refused.status, result, 0);
        self.refusals += 1;
        if self.refusals >= REFUSED_MAX {
            self.stop_receiving(End::Refused);
        }
    }
}
