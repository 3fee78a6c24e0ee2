//! Connect: turns a connection into a queue.

use std::fmt::Display;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use forebay_reactor::time::Sleep;
use forebay_reactor::{Addr, sleep};

use super::NvmeServer;
use super::admin::AdminQueue;
use super::connection::{ConnectionRole, NvmeConnection, Queue};
use super::ending::NvmeEndReason;
use crate::session::{ADMIN_ENTRIES_MAX, Controller, ControllerType, QUEUE_ENTRIES_MAX};
use crate::subsystem::{ConnectRefusal, HostPath};
use crate::wire::fabrics::{CONNECT_DATA, Connect, DISCOVERY_NQN, connect_field};
use crate::wire::{Cqe, NvmeStatus, Sqe};

/// Polling interval of a Connect that waits for an earlier controller of its host to end.
const CONNECT_LOOK: Duration = Duration::from_millis(2);
/// ATR bit of AUTHREQ in the result of a Connect, beside the controller's id (base 6.3).
const AUTHENTICATION_REQUIRED: u64 = 1 << 17;
/// Refused Connects after which a connection is ended.
const REFUSED_MAX: u32 = 8;

/// Logs that a host is refused, with the names of host and subsystem as far as they are known.  One line, in the
/// same format in all fronts.
pub(super) fn host_refused(address: &Addr, parties: Option<(&str, &str)>, reason: impl Display) {
    let (host, subsystem) = parties.unwrap_or(("unknown", "unknown"));
    tracing::warn!(front = "nvme", host, %address, subsystem, %reason, "host refused");
}

/// Returns the maximum number of entries of a queue; queue 0 is the admin queue.
fn entries_max(queue: u16) -> usize {
    if queue == 0 { ADMIN_ENTRIES_MAX } else { QUEUE_ENTRIES_MAX }
}

/// Count of a connection in its handshake; decremented when dropped.
struct HandshakeCount(Rc<NvmeServer>);

impl HandshakeCount {
    fn new(server: &Rc<NvmeServer>) -> Self {
        server.handshakes.set(server.handshakes.get() + 1);
        Self(server.clone())
    }
}

impl Drop for HandshakeCount {
    fn drop(&mut self) {
        self.0.handshakes.set(self.0.handshakes.get() - 1);
    }
}

/// Connect that waits for an earlier controller of its host to end.
struct WaitingConnect {
    sqe: Sqe,
    data: Vec<u8>,
    timer: Sleep,
}

/// Handshake of a connection, until it is a queue whose host has authenticated if it must.
///
/// 1. The connection counts among the handshakes of its core until the handshake is complete.
/// 2. At most one Connect waits, and nothing is parsed behind it.
/// 3. After `REFUSED_MAX` refused Connects, the connection ends.
pub(super) struct NvmeHandshake {
    count: Option<HandshakeCount>,
    waiting: Option<WaitingConnect>,
    refused: u32,
    /// Set once a Connect has checked for earlier controllers of its host.
    has_checked: bool,
}

impl NvmeHandshake {
    /// Begins the handshake of a connection.
    pub(super) fn new(server: &Rc<NvmeServer>) -> Self {
        Self { count: Some(HandshakeCount::new(server)), waiting: None, refused: 0, has_checked: false }
    }

    /// Completes the handshake.
    pub(super) fn complete(&mut self) {
        debug_assert!(self.waiting.is_none(), "complete without its Connect");
        self.count = None;
    }

    /// Returns whether a Connect waits.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Aborts a waiting Connect, when the connection accepts no more commands.
    pub(super) fn abort(&mut self) {
        self.waiting = None;
    }

    /// Returns whether this is the first check for earlier controllers of the host.
    fn is_first_check(&mut self) -> bool {
        !std::mem::replace(&mut self.has_checked, true)
    }

    /// Lets a Connect wait.  Wakes `task`, which must poll the timer.
    fn wait(&mut self, sqe: &Sqe, data: &[u8], task: &Waker) {
        debug_assert!(self.waiting.is_none() && self.count.is_some());
        self.waiting = Some(WaitingConnect { sqe: *sqe, data: data.to_vec(), timer: sleep(CONNECT_LOOK) });
        task.wake_by_ref();
    }

    /// Returns the waiting Connect, when it is time to try it again.
    fn poll_waiting(&mut self, cx: &mut Context<'_>) -> Option<(Sqe, Vec<u8>)> {
        if Pin::new(&mut self.waiting.as_mut()?.timer).poll(cx).is_pending() {
            return None;
        }
        self.waiting.take().map(|waiting| (waiting.sqe, waiting.data))
    }

    /// Counts a refused Connect.  Returns whether it was one too many.
    fn count_refused(&mut self) -> bool {
        debug_assert!(self.refused < REFUSED_MAX);
        self.refused += 1;
        self.refused >= REFUSED_MAX
    }
}

impl NvmeConnection {
    /// Tries a waiting Connect again, when it is time to.
    pub(super) fn poll_connect(&mut self, cx: &mut Context<'_>) {
        if let Some((sqe, data)) = self.handshake.poll_waiting(cx) {
            self.connect(&sqe, &data);
        }
    }

    /// Handles a Connect, with its data.
    pub(super) fn connect(&mut self, sqe: &Sqe, data: &[u8]) {
        if data.len() < CONNECT_DATA {
            return self.fail(sqe, NvmeStatus::SGL_LENGTH.final_());
        }
        let connect = match Connect::decode(sqe, data) {
            Ok(connect) => connect,
            Err(None) => {
                host_refused(&self.peer, None, "unknown record format");
                return self.refuse(sqe, ConnectRefusal::status(NvmeStatus::CONNECT_FORMAT.final_()));
            }
            Err(Some(wrong)) => {
                host_refused(&self.peer, None, format_args!("invalid {}", wrong.name()));
                return self.refuse(sqe, ConnectRefusal::parameter(wrong));
            }
        };
        let entries = usize::from(connect.sq_size) + 1;
        let most = entries_max(connect.queue);
        if entries < 2 || entries > most {
            let reason = format_args!("queue of {entries} entries, allowed are 2 to {most}");
            host_refused(&self.peer, Some((&connect.host, &connect.subsystem)), reason);
            return self.refuse(sqe, ConnectRefusal::parameter(connect_field::SIZE));
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
        let path = HostPath { port: self.port.id, machine: machine_of(&self.peer) };
        let first = self.handshake.is_first_check();
        if connect.queue == 0 && !discovers && subsystems.is_leaving(&connect, &path, first) {
            return self.handshake.wait(sqe, data, &self.waker);
        }
        let made = if connect.queue == 0 {
            subsystems.connect_admin(&connect, path, &self.control).map(|(association, notices)| {
                let controller =
                    Controller::new(association.kind, association.cntlid, connect.host_id, connect.keep_alive_ms);
                (association, ConnectionRole::Admin(Box::new(AdminQueue::new(controller, notices))))
            })
        } else {
            subsystems.connect_io(&connect, &self.control).map(|association| (association, ConnectionRole::Io))
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
        let discovery = association.kind == ControllerType::Discovery;
        let (keys, cntlid, id) = (association.keys.clone(), association.cntlid, connect.queue);
        let suite = self.channel.as_ref().map(|channel| channel.suite.name());
        if id == 0 {
            let (host, subsystem) = (&connect.host, &connect.subsystem);
            tracing::info!(peer = %self.peer, host, subsystem, cntlid, discovery, tls = suite, "host connected");
        }
        self.outbox.set_budget(self.server.host_budget(&connect.host));
        let (peer, host) = (self.peer.to_string(), connect.host.clone());
        let entered = subsystems.stats().enter(peer, host, (cntlid, id), discovery, suite);
        self.commands = super::commands::Commands::new(entries);
        self.commands.set_task(&self.waker);
        let mut result = u64::from(cntlid);
        let authenticates = keys.is_some();
        if let Some(keys) = keys {
            self.auth.require(keys, &connect.host, association.subsystem.nqn());
            result |= AUTHENTICATION_REQUIRED;
        }
        self.queue = Some(Queue { id, association, entered });
        if !authenticates {
            self.established();
        }
        let sq_head = self.submission.connect(entries as u16, !connect.no_flow_control);
        self.outbox.response(&Cqe { result, sq_head, cid: sqe.cid(), status: NvmeStatus::SUCCESS }, 0);
        self.waker.wake_by_ref();
    }

    /// Refuses a Connect.  Ends the connection after `REFUSED_MAX` refusals.
    fn refuse(&mut self, sqe: &Sqe, refused: ConnectRefusal) {
        self.server.subsystems.stats().count(|counts| counts.refused += 1);
        let result = refused.wrong.map_or(0, |wrong| wrong.result());
        self.respond(sqe.cid(), refused.status, result, 0);
        if self.handshake.count_refused() {
            self.stop_receiving(NvmeEndReason::Refused);
        }
    }

    /// Ends the handshake: the connection is a queue, and its host has authenticated if it must.
    pub(super) fn established(&mut self) {
        self.ending.established();
        self.handshake.complete();
    }
}

/// Returns the IP address of a host's machine; `None` for Unix sockets.
fn machine_of(peer: &Addr) -> Option<IpAddr> {
    match peer {
        Addr::Tcp(addr) => Some(addr.ip()),
        Addr::Unix(_) => None,
    }
}
