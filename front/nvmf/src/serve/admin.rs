//! Admin and Fabrics commands.

use std::fmt::Display;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BufList, LocalFuture, Request};
use forebay_reactor::sync::InFlight;
use forebay_reactor::{Addr, sleep};

use super::Server;
use super::connection::{Admin, Connection, End, Note, Queue, Role};
use super::view::AdminView;
use crate::session::admin::{self, Answer};
use crate::session::auth::Exchange;
use crate::session::{Controller, Kind, Power, io};
use crate::stats::CommandKind;
use crate::subsystem::{Association, Notice, Refused, Way, watcher};
use crate::wire::command::{FABRICS, Sgl, admin as opcode};
use crate::wire::fabrics::{CONNECT_DATA, Connect, DISCOVERY_NQN, Property, connect_field, fctype};
use crate::wire::identify::cns;
use crate::wire::{Cqe, Sqe, Status};

/// Maximum bytes of data that a host may send with an admin command.
const DATA_MAX: u32 = 4096;
/// Maximum notices processed in one turn.
const TURN_NOTICES: u32 = 64;
/// Polling interval of a Connect that waits for an earlier controller of its host to end.
const CONNECT_LOOK: Duration = Duration::from_millis(2);
/// ATR bit of AUTHREQ in the result of a Connect, beside the controller's id (base 6.3).
const AUTHENTICATION_REQUIRED: u64 = 1 << 17;
/// Minimum keep-alive timeout in milliseconds.
const KEEP_ALIVE_MIN_MS: u32 = 1000;

/// Logs that a host is refused, with the names of host and subsystem as far as they are known.  One line, in the
/// same format in all fronts.
pub(super) fn host_refused(address: &Addr, parties: Option<(&str, &str)>, reason: impl Display) {
    let (host, subsystem) = parties.unwrap_or(("unknown", "unknown"));
    tracing::warn!(front = "nvme", host, %address, subsystem, %reason, "host refused");
}

impl Connection {
    /// Handles a command that is not an I/O command, with its in-capsule data.
    pub(super) fn admin_command(&mut self, sqe: Sqe, data: BufList) {
        let fabrics = sqe.opcode() == FABRICS;
        let direction = if fabrics { sqe.fctype() } else { sqe.opcode() };
        let len = sqe.sgl().len();
        if !io::has_data_in(direction) || len == 0 {
            return self.admin_with_data(&sqe, &[]);
        }
        if len > DATA_MAX {
            return self.fail(&sqe, Status::SGL_LENGTH.final_());
        }
        match sqe.sgl() {
            Sgl::InCapsule { .. } => match io::in_capsule(sqe.sgl(), len, &data) {
                Ok(data) => self.admin_with_data(&sqe, &data.into_contiguous()),
                Err(status) => self.fail(&sqe, status),
            },
            // A Connect has its data in the capsule (base 6.3).
            _ if matches!(self.role, Role::Fresh) => self.fail(&sqe, Status::SGL_TYPE.final_()),
            // Data that would be ignored is not requested, since it is buffered until complete.
            _ if fabrics && direction != fctype::AUTH_SEND => self.admin_with_data(&sqe, &[]),
            _ if !fabrics && direction != opcode::SET_FEATURES => self.admin_with_data(&sqe, &[]),
            _ => self.ask(sqe.cid(), len, Note::Admin(sqe)),
        }
    }

    /// Executes a command that is not an I/O command, with the complete data from the host.
    pub(super) fn admin_with_data(&mut self, sqe: &Sqe, data: &[u8]) {
        if sqe.opcode() == FABRICS {
            return self.fabrics_command(sqe, data);
        }
        let Role::Admin(admin) = &mut self.role else { return self.fail(sqe, Status::SEQUENCE.final_()) };
        if !admin.controller.is_ready() {
            return self.fail(sqe, Status::SEQUENCE.final_());
        }
        let Some(queue) = &self.queue else { return self.fail(sqe, Status::SEQUENCE.final_()) };
        let view = AdminView { server: &self.server, port: &self.port, association: &queue.association };
        let answer = admin::execute(&mut admin.controller, &view, sqe, data);
        self.follow_controller();
        if let Some(queue) = &self.queue {
            let identity = [cns::NAMESPACE, cns::DESCRIPTORS].contains(&(sqe.cdw(10) as u8));
            if sqe.opcode() == opcode::IDENTIFY && identity && matches!(answer, Answer::Data(_)) {
                queue.association.knows(sqe.nsid());
            }
            let failed = matches!(answer, Answer::Failed(_));
            queue.entered.counters.answered(CommandKind::Other, 0, failed);
        }
        match answer {
            Answer::Done(result) => self.respond(sqe.cid(), Status::SUCCESS, result, 0),
            Answer::Data(_) if !matches!(sqe.sgl(), Sgl::Transport { .. }) => self.fail(sqe, Status::SGL_TYPE.final_()),
            Answer::Data(data) if data.len() > sqe.sgl().len() as usize => {
                self.fail(sqe, Status::SGL_LENGTH.final_());
            }
            Answer::Data(data) => {
                let data = forebay_block::Buf::copy_of(&data);
                let held = data.len();
                self.outbox.hold_anyway(held);
                self.outbox.replies.data(sqe.cid(), data.into(), false);
                self.respond(sqe.cid(), Status::SUCCESS, 0, held);
            }
            Answer::Failed(status) => self.fail(sqe, status),
            Answer::Later => self.tell_events(),
            Answer::Abort { queue, cid } => {
                let Role::Admin(admin) = &mut self.role else { return };
                let aborted = queue == 0 && admin.controller.abort_request(cid);
                if aborted {
                    self.respond(cid, Status::ABORTED, 0, 0);
                }
                // Bit 0 set: not aborted.  Commands at a device are expected to complete soon anyway.
                self.respond(sqe.cid(), Status::SUCCESS, u64::from(!aborted), 0);
            }
        }
    }

    /// Applies the features that the host has set to the connection and to the other queues.
    fn follow_controller(&mut self) {
        let (Role::Admin(admin), Some(queue)) = (&mut self.role, &self.queue) else { return };
        let features = &admin.controller.features;
        queue.association.write_through.store(!features.write_cache, Ordering::Relaxed);
        queue.association.queues_granted.store(features.queues, Ordering::Release);
        if admin.keep_alive_ms != admin.controller.keep_alive_ms {
            admin.keep_alive_ms = admin.controller.keep_alive_ms;
            admin.keep_alive = keep_alive(admin.keep_alive_ms);
            // A new timer has to be polled once to register its wake-up.
            self.waker.wake_by_ref();
        }
    }

    fn fabrics_command(&mut self, sqe: &Sqe, data: &[u8]) {
        match (sqe.fctype(), &mut self.role) {
            (fctype::CONNECT, Role::Fresh) => self.connect(sqe, data),
            (_, Role::Fresh) => self.fail(sqe, Status::SEQUENCE.final_()),
            (fctype::CONNECT, _) => self.fail(sqe, Status::SEQUENCE.final_()),
            (fctype::AUTH_SEND, _) => self.auth_send(sqe, data),
            (fctype::AUTH_RECEIVE, _) => self.auth_receive(sqe),
            (fctype::PROPERTY_GET, Role::Admin(admin)) => match admin.controller.property(Property::decode(sqe)) {
                Ok(value) => self.respond(sqe.cid(), Status::SUCCESS, value, 0),
                Err(status) => self.fail(sqe, status),
            },
            (fctype::PROPERTY_SET, Role::Admin(admin)) => match admin.controller.set_property(Property::decode(sqe)) {
                Ok(power) => {
                    self.power(power);
                    self.respond(sqe.cid(), Status::SUCCESS, 0, 0);
                }
                Err(status) => self.fail(sqe, status),
            },
            (fctype::DISCONNECT, Role::Io) => {
                self.respond(sqe.cid(), Status::SUCCESS, 0, 0);
                self.stop_receiving(End::Disconnected);
            }
            _ => self.fail(sqe, Status::INVALID_OPCODE.final_()),
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
                if let Role::Admin(admin) = &mut self.role {
                    self.outstanding -= admin.controller.forget_requests();
                    admin.flushing = None;
                }
            }
            Power::Shutdown => {
                queue.association.ready.store(false, Ordering::Release);
                let flushing = flush(&self.server, &queue.association);
                if let Role::Admin(admin) = &mut self.role {
                    admin.flushing = Some(flushing);
                    // The flush must be polled once to start.
                    self.waker.wake_by_ref();
                }
            }
        }
        self.follow_controller();
    }

    // ---- Connect ----

    fn connect(&mut self, sqe: &Sqe, data: &[u8]) {
        if data.len() < CONNECT_DATA {
            return self.fail(sqe, Status::SGL_LENGTH.final_());
        }
        let parameter = |wrong| Refused { status: Status::CONNECT_PARAMETER.final_(), wrong: Some(wrong) };
        let connect = match Connect::decode(sqe, data) {
            Ok(connect) => connect,
            Err(None) => {
                host_refused(&self.peer, None, "unknown record format");
                return self.refuse(sqe, Refused { status: Status::CONNECT_FORMAT.final_(), wrong: None });
            }
            Err(Some(wrong)) => {
                host_refused(&self.peer, None, format_args!("invalid {}", wrong.name()));
                return self.refuse(sqe, parameter(wrong));
            }
        };
        let entries = usize::from(connect.sq_size) + 1;
        if entries < 2 || entries > Self::entries_max(connect.queue) {
            let most = Self::entries_max(connect.queue);
            let reason = format_args!("queue of {entries} entries, allowed are 2 to {most}");
            host_refused(&self.peer, Some((&connect.host, &connect.subsystem)), reason);
            return self.refuse(sqe, parameter(connect_field::SIZE));
        }
        if let Some(refused) = self.channel_refuses(&connect) {
            let reason = match self.channel {
                Some(_) => "the TLS key is of another host or subsystem",
                None => "the host has a TLS key, and comes without TLS",
            };
            host_refused(&self.peer, Some((&connect.host, &connect.subsystem)), reason);
            return self.refuse(sqe, refused);
        }
        let subsystems = &self.server.subsystems;
        let discovers = connect.subsystem == DISCOVERY_NQN;
        let way = Way { port: self.port.id, machine: machine_of(&self.peer) };
        let first = !std::mem::replace(&mut self.has_looked, true);
        if connect.queue == 0 && !discovers && subsystems.is_leaving(&connect, &way, first) {
            self.connecting = Some((*sqe, data.to_vec(), sleep(CONNECT_LOOK)));
            self.waker.wake_by_ref();
            return;
        }
        let made = if connect.queue == 0 {
            subsystems.connect_admin(&connect, way, &self.control).map(|(association, notices)| {
                let controller =
                    Controller::new(association.kind, association.cntlid, connect.host_id, connect.keep_alive_ms);
                let keep_alive_ms = connect.keep_alive_ms;
                let admin =
                    Admin { controller, notices, keep_alive: keep_alive(keep_alive_ms), keep_alive_ms, flushing: None };
                (association, Role::Admin(Box::new(admin)))
            })
        } else {
            subsystems.connect_io(&connect, &self.control).map(|association| (association, Role::Io))
        };
        let (association, role) = match made {
            Ok(made) => made,
            Err(refused) => {
                let parties = Some((&*connect.host, &*connect.subsystem));
                match refused.wrong {
                    Some(wrong) => host_refused(&self.peer, parties, format_args!("invalid {}", wrong.name())),
                    None => host_refused(&self.peer, parties, refused.status),
                }
                return self.refuse(sqe, refused);
            }
        };
        self.role = role;
        let discovery = association.kind == Kind::Discovery;
        let (keys, subsystem) = (association.keys.clone(), association.subsystem.clone());
        let suite = self.channel.as_ref().map(|channel| channel.suite.name());
        let (host, cntlid, queue) = (connect.host.clone(), association.cntlid, connect.queue);
        if queue == 0 {
            tracing::info!(peer = %self.peer, host, cntlid, discovery, tls = suite, "a host has connected");
        }
        self.outbox.set_budget(self.server.host_budget(&host));
        let entered = subsystems.stats().enter(self.peer.to_string(), host, (cntlid, queue), discovery, suite);
        self.work = InFlight::new(entries);
        self.work.set_task(&self.waker);
        let flow_control = !connect.no_flow_control;
        self.queue = Some(Queue { id: queue, association, entries: entries as u16, head: 1, flow_control, entered });
        self.auth = keys.map(|keys| Box::new(Exchange::new(keys, &connect.host, subsystem.nqn())));
        let mut result = u64::from(cntlid);
        match self.auth {
            None => self.settled(),
            Some(_) => result |= AUTHENTICATION_REQUIRED,
        }
        self.outstanding -= 1;
        // SQHD FFFFh grants the host's request to disable flow control.
        let sq_head = if flow_control { 1 } else { 0xFFFF };
        let cqe = Cqe { result, sq_head, cid: sqe.cid(), status: Status::SUCCESS };
        self.outbox.replies.response(&cqe);
        self.outbox.replied(0);
        self.waker.wake_by_ref();
    }

    // ---- Events without a command ----

    /// Completes asynchronous event requests, as long as there are events and requests.
    fn tell_events(&mut self) {
        while let Role::Admin(admin) = &mut self.role
            && let Some((cid, result)) = admin.controller.tell()
        {
            self.respond(cid, Status::SUCCESS, result, 0);
        }
    }

    /// Polls the notices from other queues, a waiting Connect, a flush for shutdown and the keep-alive timer.
    pub(super) fn poll_admin(&mut self, cx: &mut Context<'_>) {
        if let Some((sqe, data, timer)) = &mut self.connecting
            && Pin::new(timer).poll(cx).is_ready()
        {
            let (sqe, data) = (*sqe, std::mem::take(data));
            self.connecting = None;
            self.connect(&sqe, &data);
        }
        let Role::Admin(admin) = &mut self.role else { return };
        let Some(queue) = &self.queue else { return };
        let (mut events, mut taken) = (false, 0);
        while let Poll::Ready(Some(notice)) = pin!(admin.notices.recv()).poll(cx) {
            match notice {
                Notice::Event(event) => {
                    admin.controller.raise(event);
                    events = true;
                }
                Notice::Error(entry) => {
                    let untold = queue.association.error_taken();
                    admin.controller.count_errors(untold);
                    admin.controller.note_error(entry);
                }
            }
            taken += 1;
            if taken >= TURN_NOTICES {
                // Yields to other tasks first.
                cx.waker().wake_by_ref();
                break;
            }
        }
        if let Some(flushing) = &mut admin.flushing
            && let Poll::Ready(durable) = flushing.as_mut().poll(cx)
        {
            admin.flushing = None;
            admin.controller.shut_down(durable);
        }
        let mut silent = false;
        while let Some(timer) = &mut admin.keep_alive
            && Pin::new(timer).poll(cx).is_ready()
        {
            silent = !queue.association.had_traffic(watcher::KEEP_ALIVE);
            admin.keep_alive = if silent { None } else { keep_alive(admin.keep_alive_ms) };
        }
        if silent {
            self.server.subsystems.stats().count(|counts| counts.keep_alive_expired += 1);
            tracing::warn!(peer = %self.peer, host = queue.association.host, "a host has fallen silent");
            return self.stop_receiving(End::Silent);
        }
        if events {
            self.tell_events();
        }
    }
}

/// Returns the IP address of a host's machine; `None` for Unix sockets.
fn machine_of(peer: &Addr) -> Option<IpAddr> {
    match peer {
        Addr::Tcp(addr) => Some(addr.ip()),
        Addr::Unix(_) => None,
    }
}

/// Flushes the namespaces that a controller has used.  Resolves to whether all flushes succeeded.
fn flush(server: &Rc<Server>, association: &Association) -> LocalFuture<bool> {
    let subsystem = &association.subsystem;
    let devices: Vec<_> = association.used().into_iter().filter_map(|nsid| server.namespace(subsystem, nsid)).collect();
    Box::pin(async move {
        let mut durable = true;
        for namespace in devices {
            if let Err(error) = namespace.device.submit(Request::Flush).await {
                tracing::warn!(namespace = namespace.info.name, %error, "a flush at a host's shutdown failed");
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
