//! Server: accepts connections, logs hosts in, and runs their sessions.  The only part of this crate that performs
//! socket I/O.

mod connection;
mod data_out;
mod data_out_set;
mod early;
mod ending;
mod handshake;
mod keep_alive;
mod memory;
mod orphaned_tasks;
mod outbox;
mod requests;
mod scsi_port;
mod scsi_requests;
mod task;
mod task_management;
mod text;

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{Addr, Listener, Stream, spawn};
use forebay_serve::{ConnectionStopSignal, ServerConnections};

use crate::scsi::LogicalUnits;
pub use crate::scsi::UnitDevices;
use crate::session::params::Offer;
use crate::session::receive::IscsiPools;
use crate::stats::ConnectionEvent;
use crate::target::Target;
use crate::targets::Targets;
use connection::{IscsiConnection, IscsiEndReason};
use handshake::{IscsiHandshake, LoginEnd};

/// Placeholder for the target name of discovery sessions in the log.
const DISCOVERY: &str = "discovery";

/// Limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiServerOptions {
    /// Maximum number of concurrent connections of this core; further ones are closed right after they are accepted.
    pub connections_max: usize,
    /// Parameters offered in logins.
    pub offer: Offer,
    /// Maximum number of commands in flight per session.
    pub commands_max: u32,
    /// Maximum number of bytes held by a session's commands in flight and unsent responses.  A single command may hold
    /// more.
    pub bytes_max: usize,
    /// Login timeout, counted from accepting the connection.
    pub login_timeout: Duration,
    /// Idle time after which a host is pinged. It has the same time again to respond.  It is also the timeout for
    /// solicited data.
    pub ping_after: Duration,
    /// Timeout for commands in flight when their session ends.
    pub drain_timeout: Duration,
}

impl Default for IscsiServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            offer: Offer::default(),
            commands_max: 128,
            bytes_max: 16 << 20,
            login_timeout: Duration::from_secs(20),
            ping_after: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// iSCSI server on one core.  Each core has its own, on one shared listener and with the same [`Targets`].
pub struct IscsiServer {
    targets: Targets,
    options: IscsiServerOptions,
    pools: Rc<IscsiPools>,
    units: Rc<LogicalUnits>,
    connections: Rc<ServerConnections<Rc<ConnectionStopSignal>>>,
}

impl IscsiServer {
    /// Creates a server for the units of all targets.
    pub fn new(targets: Targets, devices: Rc<dyn UnitDevices>, options: IscsiServerOptions) -> Rc<Self> {
        Rc::new(Self {
            targets,
            options,
            pools: Rc::new(IscsiPools::new()),
            units: Rc::new(LogicalUnits::new(devices)),
            connections: ServerConnections::new(),
        })
    }

    /// Returns the targets that are served.
    pub fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Returns the number of open connections, including those still logging in.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Accepts connections until [`stop`](Self::stop), and spawns a task for each.
    pub async fn serve(self: Rc<Self>, listener: Listener) {
        tracing::info!(addr = %listener.local_addr(), targets = ?self.targets, "serving iSCSI");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer)).await;
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr) {
        self.targets.counters().count(ConnectionEvent::Accepted);
        if self.connections.stopping() || self.connections() >= self.options.connections_max {
            self.targets.counters().count(ConnectionEvent::TurnedAway);
            tracing::warn!(front = "iscsi", %peer, max = self.options.connections_max, "connection rejected: too many connections");
            return;
        }
        let control = Rc::new(ConnectionStopSignal::default());
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        drop(spawn(async move {
            server.connection(&control, stream, peer).await;
            drop(place);
        }));
    }

    /// Stops accepting, ends all connections after their commands in flight, and waits until they are gone.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop()).await;
    }

    /// Serves a connection from login to shutdown.
    async fn connection(&self, control: &ConnectionStopSignal, stream: Stream, peer: Addr) {
        let ready = match (IscsiHandshake { server: self, control, stream: &stream, peer: &peer }).run().await {
            Ok(ready) => ready,
            Err(ended) => {
                self.login_ended(&ended, &peer);
                return stream.shutdown();
            }
        };
        let session = ready.entered.session().clone();
        let initiator = session.initiator.clone();
        let target = session.target.as_ref().map_or(DISCOVERY, Target::name);
        tracing::info!(%peer, initiator, target, tsih = session.tsih, "logged in");
        let end = match IscsiConnection::new(self, control, stream.clone(), ready) {
            Some(connection) => connection.run().await,
            None => IscsiEndReason::Stopped,
        };
        stream.shutdown();
        match end {
            IscsiEndReason::Violation(reason) => {
                self.targets.counters().count(ConnectionEvent::EndedForCause);
                tracing::warn!(%peer, initiator, target, %reason, "connection closed: protocol error by the host");
            }
            IscsiEndReason::Socket(error) => tracing::info!(%peer, initiator, target, %error, "connection failed"),
            IscsiEndReason::Broken => {
                tracing::info!(%peer, initiator, target, "connection closed by the host in the middle of a message")
            }
            end => tracing::info!(%peer, initiator, target, ?end, "logged out"),
        }
    }

    /// Logs a failed login: one line per refused host, regardless of the reason.
    fn login_ended(&self, ended: &LoginEnd, address: &Addr) {
        if ended.is_cause() {
            self.targets.counters().count(ConnectionEvent::EndedForCause);
        }
        match ended {
            LoginEnd::Refused { initiator, target, reason } => {
                let initiator = initiator.as_deref().unwrap_or("unknown");
                let target = target.as_deref().unwrap_or(DISCOVERY);
                tracing::warn!(front = "iscsi", initiator, %address, target, reason, "host refused");
            }
            ended if ended.is_cause() => {
                tracing::warn!(%address, reason = %ended, "login failed: protocol error by the initiator")
            }
            ended => tracing::debug!(%address, reason = %ended, "connection closed before the login completed"),
        }
    }
}

impl fmt::Debug for IscsiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IscsiServer({} connections)", self.connections())
    }
}
