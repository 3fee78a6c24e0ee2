//! Serving: accepts connections, negotiates, and runs them.  The only part of this crate that waits for anything.

mod connection;
mod handshake;
mod work;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, Error, ErrorKind, Geometry, LocalFuture, Result};
use forebay_reactor::{Addr, Listener, Stream, spawn, wall_clock};
use forebay_serve::{Bell, Connections};

use crate::session::{ExportInfo, Pools, Rules};
use crate::stats::Stats;
use crate::wire;
use connection::{End, Transmission};
use handshake::Handshake;

/// An export's name and description, as lists show them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportSummary {
    /// Name; at most 4096 bytes.
    pub name: String,
    /// A few words for people; may be empty.
    pub description: String,
}

/// What is exported: the server's view of whoever owns the volumes.
pub trait Exports {
    /// Everything that can be opened.
    fn list(&self) -> Vec<ExportSummary>;

    /// Opens an export by the name that a client gave; the empty name asks for the default one, if there is one.
    ///
    /// # Errors
    /// `NotFound`; `Denied` or `Busy` when it exists and may not be used now; anything else that opening brings.
    fn open(&self, name: &str) -> LocalFuture<Result<Export>>;
}

/// An opened export.  Every connection opens its own, and drops it when it ends.
#[derive(Clone)]
pub struct Export {
    name: String,
    description: String,
    device: Rc<dyn BlockDevice>,
    read_only: bool,
    rotational: bool,
    fast_zero: bool,
}

impl Export {
    /// `device` under its canonical name.
    pub fn new(name: impl Into<String>, device: Rc<dyn BlockDevice>) -> Self {
        let read_only = device.geometry().read_only;
        Self { name: name.into(), description: String::new(), device, read_only, rotational: false, fast_zero: true }
    }

    /// With a few words for people.
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = text.into();
        self
    }

    /// Refuses writes, even if the device would take them.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only || self.device.geometry().read_only;
        self
    }

    /// The medium turns.
    pub fn rotational(mut self, rotational: bool) -> Self {
        self.rotational = rotational;
        self
    }

    /// Whether writing zeroes that may become holes is faster than writing data; it is taken to be so unless told
    /// otherwise.
    pub fn fast_zero(mut self, fast_zero: bool) -> Self {
        self.fast_zero = fast_zero;
        self
    }

    /// What the protocol says of it now.
    ///
    /// # Errors
    /// `Invalid` when the device has a shape that the protocol cannot express.
    fn info(&self, options: &Options) -> Result<ExportInfo> {
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
            // A device's flush covers whatever was answered before, on whichever connection.
            multi_conn: true,
            fast_zero: self.fast_zero,
        })
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({}, {:?})", self.name, self.device.geometry())
    }
}

/// Limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Connections at a time; more are closed as soon as they are accepted.
    pub connections_max: usize,
    /// Longest payload of a request in bytes, which is what is advertised; at least 64 KiB.
    pub payload_max: u32,
    /// Requests of a connection under way or not sent yet; when reached, nothing is received until one is answered.
    pub requests_max: usize,
    /// The same in bytes of payload.  A single request may be longer.
    pub bytes_max: usize,
    /// Time from accepting to transmission.
    pub handshake_timeout: Duration,
    /// Time that requests under way have to end when their connection ends.
    pub drain_timeout: Duration,
}

impl Default for Options {
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

/// How the rest of the server reaches a connection.
#[derive(Default)]
pub(crate) struct Control {
    /// The canonical name of its export, once it has one.
    export: RefCell<Option<String>>,
    bell: Bell,
}

/// A server on one core.  Several cores each have their own, on one shared listener, with the same [`Stats`].
pub struct Server {
    exports: Rc<dyn Exports>,
    options: Options,
    stats: Stats,
    pools: Rc<Pools>,
    connections: Rc<Connections<Rc<Control>>>,
    /// Calls of [`detach`](Self::detach) so far: an export that was being opened meanwhile is opened again.
    detaches: Cell<u64>,
}

impl Server {
    /// A server of `exports` that counts into `stats`.
    pub fn new(exports: Rc<dyn Exports>, options: Options, stats: Stats) -> Rc<Self> {
        Rc::new(Self {
            exports,
            options,
            stats,
            pools: Rc::new(Pools::new()),
            connections: Connections::new(),
            detaches: Cell::new(0),
        })
    }

    /// Where it counts.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Connections now, those that still negotiate too.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Accepts connections, each of which becomes a task of its own, until [`stop`](Self::stop).
    pub async fn serve(self: Rc<Self>, listener: Listener) {
        tracing::info!(addr = %listener.local_addr(), "serving NBD");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer)).await;
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr) {
        self.stats.count(|counts| counts.accepted += 1);
        if self.connections.stopping() || self.connections() >= self.options.connections_max {
            self.stats.count(|counts| counts.turned_away += 1);
            tracing::warn!(%peer, max = self.options.connections_max, "a connection too many is turned away");
            return;
        }
        let control = Rc::new(Control::default());
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        drop(spawn(async move {
            server.connection(&control, stream, peer).await;
            drop(place);
        }));
    }

    /// Ends all connections to an export, and waits until they are gone.  Requests under way are done first, further
    /// ones are answered with an error.  Returns how many connections there were.
    ///
    /// Whoever calls this sees to it that the export is not opened again.
    pub async fn detach(&self, name: &str) -> usize {
        self.detaches.set(self.detaches.get() + 1);
        let matches = |control: &Rc<Control>| control.export.borrow().as_deref() == Some(name);
        let found: Vec<_> = self.connections.list().values().filter(|control| matches(control)).cloned().collect();
        found.iter().for_each(|control| control.bell.stop());
        self.connections.wait_for_none(matches).await;
        found.len()
    }

    /// Stops accepting, ends all connections as [`detach`](Self::detach) does, and waits until they are gone.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.bell.stop()).await;
    }

    /// A connection from its first byte to its last.
    async fn connection(&self, control: &Control, stream: Stream, peer: Addr) {
        let handshake = Handshake { server: self, control, stream: &stream };
        let ready = match handshake.run().await {
            Ok(Some(ready)) => ready,
            Ok(None) => return stream.shutdown(),
            Err(ended) => {
                if ended.is_cause() {
                    self.stats.count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, reason = %ended, "a handshake is ended");
                } else {
                    tracing::debug!(%peer, reason = %ended, "a handshake has ended");
                }
                return stream.shutdown();
            }
        };
        let export = ready.info.name.clone();
        let entered = self.stats.enter(peer.to_string(), export.clone(), wall_clock());
        tracing::info!(%peer, export, replies = ?ready.agreed.replies, "connected");
        let rules = Rules {
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
        let transmission = Transmission::new(stream.clone(), context, &self.pools, device, rules, &ready.received);
        let end = transmission.run().await;
        stream.shutdown();
        match end {
            End::Violation(reason) => {
                self.stats.count(|counts| counts.ended_for_cause += 1);
                tracing::warn!(%peer, export, %reason, "a connection is ended");
            }
            End::Socket(error) => tracing::info!(%peer, export, %error, "a connection failed"),
            End::Broken => tracing::info!(%peer, export, "a connection ended in the middle of a message"),
            End::Disconnected | End::Closed | End::Stopped => tracing::info!(%peer, export, ?end, "disconnected"),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({} connections)", self.connections())
    }
}
