//! Per-core server: accepts connections, negotiates, and runs them.  The only module of this crate that performs
//! I/O or waits.

mod connection;
mod ending;
mod execute;
mod handshake;
mod outbox;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, Error, ErrorKind, Geometry, LocalFuture, Result};
use forebay_reactor::{Addr, Listener, Stream, spawn, wall_clock};
use forebay_serve::secure::{RecordBuffer, SealBuffers, drain};
use forebay_serve::{ConnectionStopSignal, ServerConnections};

use crate::access::{HostName, NbdAccessControl, NbdHost, SharedAccess};
use crate::session::{ExportInfo, NbdPools, NbdRules, Tls};
use crate::stats::NbdStats;
use crate::wire;
use connection::{NbdEndReason, Transmission};
use handshake::{NbdHandshake, NbdHandshakeEnd, NbdStream};

/// Time that a host has to read the alert with which its handshake was refused.
const REFUSAL_LINGER: Duration = Duration::from_millis(100);

/// Name and description of an export, for lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportSummary {
    /// Export name; at most 4096 bytes.
    pub name: String,
    /// Description for people; may be empty.
    pub description: String,
}

/// Source of exports: the server's interface to the owner of the volumes.
pub trait ExportSource {
    /// Lists the exports that this host can open.
    fn list(&self, host: &NbdHost) -> Vec<ExportSummary>;

    /// Opens an export by the name that a client gave; the empty name requests the default export, if there is one.
    ///
    /// # Errors
    /// `NotFound`; `Denied` when it exists and is not for this host, which is told that there is none; `Busy` when it
    /// cannot be used now; any other error of opening the device.
    fn open(&self, name: &str, host: &NbdHost) -> LocalFuture<Result<NbdExport>>;
}

/// Opened export.  Every connection opens its own, and drops it when it ends.
#[derive(Clone)]
pub struct NbdExport {
    name: String,
    description: String,
    device: Rc<dyn BlockDevice>,
    read_only: bool,
    rotational: bool,
    fast_zero: bool,
}

impl NbdExport {
    /// Creates an export of `device` under its canonical name.
    pub fn new(name: impl Into<String>, device: Rc<dyn BlockDevice>) -> Self {
        let read_only = device.geometry().read_only;
        Self { name: name.into(), description: String::new(), device, read_only, rotational: false, fast_zero: true }
    }

    /// Sets the description for people.
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = text.into();
        self
    }

    /// Rejects writes, even if the device would accept them.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only || self.device.geometry().read_only;
        self
    }

    /// Marks the medium as rotational.
    pub fn rotational(mut self, rotational: bool) -> Self {
        self.rotational = rotational;
        self
    }

    /// Sets whether writing zeroes that may become holes is faster than writing data.  True by default.
    pub fn fast_zero(mut self, fast_zero: bool) -> Self {
        self.fast_zero = fast_zero;
        self
    }

    /// Returns the export's properties for negotiation.
    ///
    /// # Errors
    /// `Invalid` when the name or the block size cannot be expressed in the protocol.
    fn info(&self, options: &NbdServerOptions) -> Result<ExportInfo> {
        let Geometry { size, block_size, preferred_io, .. } = self.device.geometry();
        let block_min = block_size.max(1);
        if !block_min.is_power_of_two() || block_min > wire::BLOCK_MIN_MAX || self.name.len() > wire::STRING_MAX {
            let text = format!("export '{}' with blocks of {block_size} bytes cannot be served over NBD", self.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let payload_max = options.payload_max.max(wire::BLOCK_MIN_MAX);
        let preferred = preferred_io.clamp(block_min.max(512), wire::PAYLOAD_MAX_DEFAULT).next_power_of_two();
        Ok(ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size,
            block_min,
            block_preferred: preferred.min(1 << payload_max.ilog2()),
            payload_max,
            read_only: self.read_only,
            rotational: self.rotational,
            // A device's flush covers all writes acknowledged before, on any connection.
            multi_conn: true,
            fast_zero: self.fast_zero,
        })
    }
}

impl fmt::Debug for NbdExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NbdExport({}, {:?})", self.name, self.device.geometry())
    }
}

/// Limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdServerOptions {
    /// Maximum number of connections at a time; more are closed as soon as they are accepted.
    pub connections_max: usize,
    /// Maximum payload of a request in bytes, as advertised; at least 64 KiB.
    pub payload_max: u32,
    /// Maximum requests of a connection in flight or not sent yet.  When reached, no more are processed until a reply
    /// is sent.
    pub requests_max: usize,
    /// Maximum bytes of payload of a connection in flight or not sent yet.  A single request may be longer.
    pub bytes_max: usize,
    /// Maximum time from accepting a connection to transmission.
    pub handshake_timeout: Duration,
    /// Maximum time for requests in flight to end when their connection ends.
    pub drain_timeout: Duration,
}

impl Default for NbdServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            payload_max: wire::PAYLOAD_MAX_DEFAULT,
            requests_max: 256,
            bytes_max: 32 * 1024 * 1024,
            handshake_timeout: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// Settings of a listening address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdListenerOptions {
    /// TLS mode.
    pub tls: Tls,
    /// Set if clients reconnect and send requests without a reply again, as the kernel's does for mapped images.  When
    /// the server ends such a connection, it closes it after the requests in flight, and refuses none.  And it carries out
    /// no write, write of zeroes or trim that it has not begun when the client closes the connection.  For that all
    /// connections of a client are to be served by one core, and that of the device.
    pub resumes: bool,
}

impl From<Tls> for NbdListenerOptions {
    fn from(tls: Tls) -> Self {
        Self { tls, resumes: false }
    }
}

/// Remote control of a connection by its server.
pub(crate) struct NbdConnectionControl {
    /// Canonical name of its export, once it has one.
    export: RefCell<Option<String>>,
    /// Host at the other end; with its name once TLS has proved it.
    host: RefCell<NbdHost>,
    /// Set once TLS is in force.
    secure: Cell<bool>,
    /// Set if the client sends requests without a reply again over a new connection.
    resumes: bool,
    stop_signal: ConnectionStopSignal,
}

impl NbdConnectionControl {
    fn new(addr: Addr, resumes: bool) -> Self {
        let host = RefCell::new(NbdHost { addr, name: None });
        Self {
            export: RefCell::default(),
            host,
            secure: Cell::new(false),
            resumes,
            stop_signal: ConnectionStopSignal::default(),
        }
    }

    /// Records that TLS is in force, and the host name that it has proved.
    fn secured(&self, name: Option<HostName>) {
        self.host.borrow_mut().name = name;
        self.secure.set(true);
    }

    /// Returns the reason why `access` does not admit its host, if so.
    fn refused_by(&self, access: &NbdAccessControl) -> Option<&'static str> {
        let host = self.host.borrow();
        let by_name = || access.refuses_name(host.name.as_ref()).filter(|_| self.secure.get());
        access.refuses_address(&host.addr).or_else(by_name)
    }
}

/// NBD server on one core.  Several cores each have their own, on one shared listener, with the same [`NbdStats`].
pub struct NbdServer {
    exports: Rc<dyn ExportSource>,
    options: NbdServerOptions,
    stats: NbdStats,
    access: SharedAccess,
    pools: Rc<NbdPools>,
    record: RecordBuffer,
    connections: Rc<ServerConnections<Rc<NbdConnectionControl>>>,
    /// Number of calls of [`detach`](Self::detach) so far.  An export that was being opened during one is opened
    /// again.
    detaches: Cell<u64>,
}

impl NbdServer {
    /// Creates a server of `exports` without access control, which counts into `stats`.
    pub fn new(exports: Rc<dyn ExportSource>, options: NbdServerOptions, stats: NbdStats) -> Rc<Self> {
        Self::with_access(exports, options, stats, SharedAccess::default())
    }

    /// Creates a server of `exports` with access control, which counts into `stats`.
    pub fn with_access(
        exports: Rc<dyn ExportSource>,
        options: NbdServerOptions,
        stats: NbdStats,
        access: SharedAccess,
    ) -> Rc<Self> {
        Rc::new(Self {
            exports,
            options,
            stats,
            access,
            pools: Rc::new(NbdPools::new()),
            record: RecordBuffer::default(),
            connections: ServerConnections::new(),
            detaches: Cell::new(0),
        })
    }

    /// Returns the counters.
    pub fn stats(&self) -> &NbdStats {
        &self.stats
    }

    /// Returns the number of open connections, including those in negotiation.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Accepts connections until [`stop`](Self::stop).  Each connection runs as a task of its own.
    pub async fn serve(self: Rc<Self>, listener: Listener, options: impl Into<NbdListenerOptions>) {
        let options = options.into();
        tracing::info!(addr = %listener.local_addr(), tls = ?options.tls, "serving NBD");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer, options)).await;
    }

    /// Serves a connection that was accepted elsewhere.  Drops it if the address is refused, the server is stopping
    /// or the connection limit is reached.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr, options: impl Into<NbdListenerOptions>) {
        let NbdListenerOptions { tls, resumes } = options.into();
        self.stats.count(|counts| counts.accepted += 1);
        if let Some(reason) = self.access.get().refuses_address(&peer) {
            return self.host_refused(&NbdHost { addr: peer, name: None }, None, reason);
        }
        if self.connections.stopping() || self.connections() >= self.options.connections_max {
            self.stats.count(|counts| counts.turned_away += 1);
            tracing::warn!(front = "nbd", %peer, max = self.options.connections_max, "connection rejected: too many connections");
            return;
        }
        let control = Rc::new(NbdConnectionControl::new(peer.clone(), resumes));
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        drop(spawn(async move {
            server.connection(&control, stream, peer, tls).await;
            drop(place);
        }));
    }

    /// Ends all connections to an export, and waits until they are closed.  Requests in flight complete first,
    /// further ones fail.  Returns how many connections there were.
    ///
    /// The caller must ensure that the export is not opened again.
    pub async fn detach(&self, name: &str) -> usize {
        self.detaches.set(self.detaches.get() + 1);
        let matches = |control: &Rc<NbdConnectionControl>| control.export.borrow().as_deref() == Some(name);
        let found: Vec<_> = self.connections.list().values().filter(|control| matches(control)).cloned().collect();
        found.iter().for_each(|control| control.stop_signal.stop());
        self.connections.wait_for_none(matches).await;
        found.len()
    }

    /// Ends the connections of hosts that may no longer connect, after their requests in flight.  Returns their
    /// number.
    pub fn expel(&self) -> usize {
        let access = self.access.get();
        let mut count = 0;
        for control in self.connections.list().values() {
            if let Some(reason) = control.refused_by(&access) {
                self.host_refused(&control.host.borrow(), control.export.borrow().as_deref(), reason);
                control.stop_signal.stop();
                count += 1;
            }
        }
        count
    }

    /// Stops accepting and ends all connections as [`detach`](Self::detach) does.  Waits until they are closed.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop_signal.stop()).await;
    }

    /// Counts and logs a refused host, with the reason.
    fn host_refused(&self, host: &NbdHost, export: Option<&str>, reason: &str) {
        self.stats.count(|counts| counts.hosts_refused += 1);
        let name = host.name.as_ref().map(tracing::field::display);
        tracing::warn!(front = "nbd", host = %host.addr, name, export, reason, "host refused");
    }

    /// Runs a connection, from handshake to end.
    async fn connection(&self, control: &NbdConnectionControl, stream: Stream, peer: Addr, tls: Tls) {
        let host = NbdHost { addr: peer.clone(), name: None };
        let mut handshake = NbdHandshake {
            server: self,
            control,
            tls,
            channel: NbdStream::Plain(stream.clone()),
            host,
            refused: false,
        };
        let ready = match handshake.run().await {
            Ok(Some(ready)) => ready,
            Ok(None) => {
                handshake.channel.close().await;
                return stream.shutdown();
            }
            Err(ended) => {
                if let NbdHandshakeEnd::Tls(error) = &ended {
                    self.stats.count(|counts| counts.tls_failures += 1);
                    tracing::warn!(front = "nbd", host = %peer, reason = %error, "TLS handshake failed");
                    drain(&stream, self.pools.sealed(false), REFUSAL_LINGER).await;
                } else if matches!(ended, NbdHandshakeEnd::Refused) {
                    handshake.channel.close().await;
                } else if ended.is_cause() {
                    self.stats.count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, reason = %ended, "handshake failed: protocol error by the client");
                } else {
                    tracing::debug!(%peer, reason = %ended, "connection closed before the handshake completed");
                }
                return stream.shutdown();
            }
        };
        let export = ready.info.name.clone();
        let NbdHandshake { channel, host, .. } = handshake;
        let name = host.name.as_ref().map(HostName::to_string);
        let with_tls = matches!(channel, NbdStream::Secure(_)).then(|| name.clone().unwrap_or_default());
        let is_secure = with_tls.is_some();
        let entered = self.stats.enter(peer.to_string(), export.clone(), with_tls, wall_clock());
        tracing::info!(%peer, name, export, tls = is_secure, replies = ?ready.agreed.replies, "connected");
        let rules = NbdRules {
            replies: ready.agreed.replies,
            allocation: ready.agreed.allocation,
            size: ready.info.size,
            block_min: ready.info.block_min,
            payload_max: ready.info.payload_max,
            read_only: ready.info.read_only,
            fast_zero: ready.info.fast_zero,
        };
        let context = (control, &self.options, entered.counters());
        let device = ready.export.device.clone();
        let transmission = Transmission::new(context, &self.pools, device, rules, &ready.received, &stream);
        let end = transmission.run(channel).await;
        stream.shutdown();
        match end {
            NbdEndReason::Violation(reason) => {
                self.stats.count(|counts| counts.ended_for_cause += 1);
                tracing::warn!(%peer, export, %reason, "connection closed: protocol error by the host");
            }
            NbdEndReason::Socket(error) => tracing::info!(%peer, export, %error, "connection failed"),
            NbdEndReason::Broken => {
                tracing::info!(%peer, export, "connection closed by the host in the middle of a message")
            }
            NbdEndReason::Disconnected | NbdEndReason::Closed | NbdEndReason::Stopped => {
                tracing::info!(%peer, export, ?end, "disconnected")
            }
        }
    }
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NbdServer({} connections)", self.connections())
    }
}
