//! Admin and Fabrics commands.

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BlockRequest, Buf, BufList, LocalFuture};
use forebay_reactor::time::Sleep;
use forebay_reactor::{cross, sleep};

use super::NvmeServer;
use super::connection::{ConnectionRole, NvmeConnection};
use super::data::DataOwner;
use super::ending::NvmeEndReason;
use super::view::AdminView;
use crate::session::admin::{self, AdminResult};
use crate::session::{Controller, Power, io};
use crate::stats::NvmeCommandKind;
use crate::subsystem::{Association, Notice, watcher};
use crate::wire::command::{FABRICS, Sgl, admin as opcode};
use crate::wire::fabrics::{Property, fctype};
use crate::wire::identify::cns;
use crate::wire::{NvmeStatus, Sqe};

/// Maximum bytes of data that a host may send with an admin command.
const DATA_MAX: u32 = 4096;
/// Maximum notices processed in one turn.
const TURN_NOTICES: u32 = 64;
/// Minimum keep-alive timeout in milliseconds.
const KEEP_ALIVE_MIN_MS: u32 = 1000;

/// Admin queue of a controller.
///
/// 1. The keep-alive timer runs while the host has set a keep-alive timeout, until that expires.
/// 2. A controller reports its shutdown as complete only after the flush for it.
pub(super) struct AdminQueue {
    controller: Controller,
    notices: cross::Receiver<Notice>,
    keep_alive: Option<Sleep>,
    /// Keep-alive timeout to which the timer was set, in milliseconds.
    keep_alive_ms: u32,
    /// Flush that must complete before the controller is shut down.
    flushing: Option<LocalFuture<bool>>,
}

impl AdminQueue {
    /// Creates the admin queue of a new controller, which is sent `notices`.
    pub(super) fn new(controller: Controller, notices: cross::Receiver<Notice>) -> Self {
        let keep_alive_ms = controller.keep_alive_ms;
        Self { controller, notices, keep_alive: keep_alive(keep_alive_ms), keep_alive_ms, flushing: None }
    }

    /// Sets the keep-alive timer if the host has changed its timeout.  Returns whether there is a new timer to poll.
    fn follow_keep_alive(&mut self) -> bool {
        if self.keep_alive_ms == self.controller.keep_alive_ms {
            return false;
        }
        self.keep_alive_ms = self.controller.keep_alive_ms;
        self.keep_alive = keep_alive(self.keep_alive_ms);
        true
    }

    /// Drops what a reset ends: the asynchronous event requests, whose number is returned, and a shutdown in progress.
    fn reset(&mut self) -> usize {
        self.flushing = None;
        self.controller.forget_requests()
    }

    /// Takes the notices of other queues, up to `TURN_NOTICES`.  Returns whether there were events among them.
    fn poll_notices(&mut self, association: &Association, cx: &mut Context<'_>) -> bool {
        let mut events = false;
        for _ in 0..TURN_NOTICES {
            match pin!(self.notices.recv()).poll(cx) {
                Poll::Ready(Some(Notice::Event(event))) => {
                    self.controller.raise(event);
                    events = true;
                }
                Poll::Ready(Some(Notice::Error(entry))) => {
                    let unreported = association.error_taken();
                    self.controller.count_errors(unreported);
                    self.controller.note_error(entry);
                }
                Poll::Ready(None) | Poll::Pending => return events,
            }
        }
        // Yields to other tasks first.
        cx.waker().wake_by_ref();
        events
    }

    /// Completes a shutdown whose flush is done.
    fn poll_flush(&mut self, cx: &mut Context<'_>) {
        if let Some(flushing) = &mut self.flushing
            && let Poll::Ready(durable) = flushing.as_mut().poll(cx)
        {
            self.flushing = None;
            self.controller.shut_down(durable);
        }
    }

    /// Polls the keep-alive timer.  Returns true if there was no traffic on any queue since it was last set.
    fn poll_keep_alive(&mut self, association: &Association, cx: &mut Context<'_>) -> bool {
        while let Some(timer) = &mut self.keep_alive
            && Pin::new(timer).poll(cx).is_ready()
        {
            if !association.had_traffic(watcher::KEEP_ALIVE) {
                self.keep_alive = None;
                return true;
            }
            self.keep_alive = keep_alive(self.keep_alive_ms);
        }
        false
    }
}

impl NvmeConnection {
    /// Handles a command that is not an I/O command, with its in-capsule data.
    pub(super) fn admin_command(&mut self, sqe: Sqe, data: BufList) {
        let fabrics = sqe.opcode() == FABRICS;
        let direction = if fabrics { sqe.fctype() } else { sqe.opcode() };
        let len = sqe.sgl().len();
        if !io::has_data_in(direction) || len == 0 {
            return self.admin_with_data(&sqe, &[]);
        }
        if len > DATA_MAX {
            return self.fail(&sqe, NvmeStatus::SGL_LENGTH.final_());
        }
        match sqe.sgl() {
            Sgl::InCapsule { .. } => match io::in_capsule(sqe.sgl(), len, &data) {
                Ok(data) => self.admin_with_data(&sqe, &data.into_contiguous()),
                Err(status) => self.fail(&sqe, status),
            },
            // A Connect has its data in the capsule (base 6.3).
            _ if matches!(self.role, ConnectionRole::Unconnected) => self.fail(&sqe, NvmeStatus::SGL_TYPE.final_()),
            // Data that would be ignored is not requested, since it is buffered until complete.
            _ if fabrics && direction != fctype::AUTH_SEND => self.admin_with_data(&sqe, &[]),
            _ if !fabrics && direction != opcode::SET_FEATURES => self.admin_with_data(&sqe, &[]),
            _ => self.ask(sqe.cid(), len, DataOwner::Admin(sqe)),
        }
    }

    /// Executes a command that is not an I/O command, with the complete data from the host.
    pub(super) fn admin_with_data(&mut self, sqe: &Sqe, data: &[u8]) {
        if sqe.opcode() == FABRICS {
            return self.fabrics_command(sqe, data);
        }
        let ConnectionRole::Admin(admin) = &mut self.role else { return self.fail(sqe, NvmeStatus::SEQUENCE.final_()) };
        if !admin.controller.is_ready() {
            return self.fail(sqe, NvmeStatus::SEQUENCE.final_());
        }
        let Some(queue) = &self.queue else { return self.fail(sqe, NvmeStatus::SEQUENCE.final_()) };
        let view = AdminView { server: &self.server, port: &self.port, association: &queue.association };
        let answer = admin::execute(&mut admin.controller, &view, sqe, data);
        self.follow_controller();
        if let Some(queue) = &self.queue {
            let identity = [cns::NAMESPACE, cns::DESCRIPTORS].contains(&(sqe.cdw(10) as u8));
            if sqe.opcode() == opcode::IDENTIFY && identity && matches!(answer, AdminResult::Data(_)) {
                queue.association.clear_stale(sqe.nsid());
            }
            let failed = matches!(answer, AdminResult::Failed(_));
            queue.count(NvmeCommandKind::Other, 0, failed);
        }
        match answer {
            AdminResult::Done(result) => self.respond(sqe.cid(), NvmeStatus::SUCCESS, result, 0),
            AdminResult::Data(_) if !matches!(sqe.sgl(), Sgl::Transport { .. }) => {
                self.fail(sqe, NvmeStatus::SGL_TYPE.final_())
            }
            AdminResult::Data(data) if data.len() > sqe.sgl().len() as usize => {
                self.fail(sqe, NvmeStatus::SGL_LENGTH.final_());
            }
            AdminResult::Data(data) => self.respond_with_data(sqe.cid(), Buf::copy_of(&data)),
            AdminResult::Failed(status) => self.fail(sqe, status),
            AdminResult::Later => self.tell_events(),
            AdminResult::Abort { queue, cid } => {
                let ConnectionRole::Admin(admin) = &mut self.role else { return };
                let aborted = queue == 0 && admin.controller.abort_request(cid);
                if aborted {
                    self.respond(cid, NvmeStatus::ABORTED, 0, 0);
                }
                // Bit 0 set: not aborted.  Commands at a device are expected to complete soon anyway.
                self.respond(sqe.cid(), NvmeStatus::SUCCESS, u64::from(!aborted), 0);
            }
        }
    }

    /// Applies the features that the host has set to the connection and to the other queues.
    fn follow_controller(&mut self) {
        let (ConnectionRole::Admin(admin), Some(queue)) = (&mut self.role, &self.queue) else { return };
        let features = &admin.controller.features;
        queue.association.write_through.store(!features.write_cache, Ordering::Relaxed);
        queue.association.queues_granted.store(features.queues, Ordering::Release);
        if admin.follow_keep_alive() {
            // A new timer has to be polled once to register its wake-up.
            self.waker.wake_by_ref();
        }
    }

    fn fabrics_command(&mut self, sqe: &Sqe, data: &[u8]) {
        match (sqe.fctype(), &mut self.role) {
            (fctype::CONNECT, ConnectionRole::Unconnected) => self.connect(sqe, data),
            (_, ConnectionRole::Unconnected) => self.fail(sqe, NvmeStatus::SEQUENCE.final_()),
            (fctype::CONNECT, _) => self.fail(sqe, NvmeStatus::SEQUENCE.final_()),
            (fctype::AUTH_SEND, _) => self.auth_send(sqe, data),
            (fctype::AUTH_RECEIVE, _) => self.auth_receive(sqe),
            (fctype::PROPERTY_GET, ConnectionRole::Admin(admin)) => {
                match admin.controller.property(Property::decode(sqe)) {
                    Ok(value) => self.respond(sqe.cid(), NvmeStatus::SUCCESS, value, 0),
                    Err(status) => self.fail(sqe, status),
                }
            }
            (fctype::PROPERTY_SET, ConnectionRole::Admin(admin)) => {
                match admin.controller.set_property(Property::decode(sqe)) {
                    Ok(power) => {
                        self.power(power);
                        self.respond(sqe.cid(), NvmeStatus::SUCCESS, 0, 0);
                    }
                    Err(status) => self.fail(sqe, status),
                }
            }
            (fctype::DISCONNECT, ConnectionRole::Io) => {
                self.respond(sqe.cid(), NvmeStatus::SUCCESS, 0, 0);
                self.stop_receiving(NvmeEndReason::Disconnected);
            }
            _ => self.fail(sqe, NvmeStatus::INVALID_OPCODE.final_()),
        }
    }

    fn power(&mut self, power: Power) {
        let Some(queue) = &self.queue else { return };
        match power {
            Power::Same => {}
            Power::Enabled => queue.association.ready.store(true, Ordering::Release),
            Power::Disabled => {
                queue.association.ready.store(false, Ordering::Release);
                queue.association.end_queues(false);
                if let ConnectionRole::Admin(admin) = &mut self.role {
                    self.submission.drop_commands(admin.reset());
                }
            }
            Power::Shutdown => {
                queue.association.ready.store(false, Ordering::Release);
                let flushing = flush(&self.server, &queue.association);
                if let ConnectionRole::Admin(admin) = &mut self.role {
                    admin.flushing = Some(flushing);
                    // The flush must be polled once to start.
                    self.waker.wake_by_ref();
                }
            }
        }
        self.follow_controller();
    }

    // ---- Events without a command ----

    /// Completes asynchronous event requests, as long as there are events and requests.
    fn tell_events(&mut self) {
        while let ConnectionRole::Admin(admin) = &mut self.role
            && let Some((cid, result)) = admin.controller.tell()
        {
            self.respond(cid, NvmeStatus::SUCCESS, result, 0);
        }
    }

    /// Polls the notices from other queues, a flush for shutdown and the keep-alive timer.
    pub(super) fn poll_admin(&mut self, cx: &mut Context<'_>) {
        let (ConnectionRole::Admin(admin), Some(queue)) = (&mut self.role, &self.queue) else { return };
        let events = admin.poll_notices(&queue.association, cx);
        admin.poll_flush(cx);
        if admin.poll_keep_alive(&queue.association, cx) {
            self.server.subsystems.stats().count(|counts| counts.keep_alive_expired += 1);
            let (host, subsystem) = (&queue.association.host, queue.association.subsystem.nqn());
            let timeout_ms = admin.keep_alive_ms;
            tracing::warn!(peer = %self.peer, host, subsystem, timeout_ms, "keep-alive timeout expired, ending controller");
            return self.stop_receiving(NvmeEndReason::Silent);
        }
        if events {
            self.tell_events();
        }
    }
}

/// Flushes the namespaces that a controller has used.  Resolves to whether all flushes succeeded.
fn flush(server: &Rc<NvmeServer>, association: &Association) -> LocalFuture<bool> {
    let subsystem = &association.subsystem;
    let devices: Vec<_> = association.used().into_iter().filter_map(|nsid| server.namespace(subsystem, nsid)).collect();
    Box::pin(async move {
        let mut durable = true;
        for namespace in devices {
            if let Err(error) = namespace.device.submit(BlockRequest::Flush).await {
                tracing::warn!(namespace = namespace.info.name, %error, "flush for the shutdown of a controller failed");
                durable = false;
            }
        }
        durable
    })
}

/// Returns a timer for the next keep-alive check, at least `KEEP_ALIVE_MIN_MS` from now; `None` if `ms` is 0.
fn keep_alive(ms: u32) -> Option<forebay_reactor::time::Sleep> {
    (ms > 0).then(|| sleep(Duration::from_millis(ms.max(KEEP_ALIVE_MIN_MS).into())))
}
