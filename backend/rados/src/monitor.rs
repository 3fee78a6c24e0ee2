//! Monitor session: with one monitor at a time, whichever is reachable.
//!
//! A task maintains the connection: it tries monitors in turn until one accepts this client, subscribes to maps,
//! resends pending requests, and reconnects when the connection ends.  Tickets are renewed before they expire.

mod connect;
mod rejection;
mod requests;
mod tickets;
pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_messenger::session::cephx::TicketStore;
use forebay_messenger::wire::{AddrKind, EntityAddr, entity};
use forebay_messenger::{Auth, Connection, Handler, Message, Messenger, MessengerCore, MessengerOptions};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, BufList, random, spawn, timeout};

use crate::config::{CephConfig, Credentials, Settings};
use crate::map::{Epoch, Fsid, MonMap};
use connect::{Attempts, CurrentMonitor};
pub(crate) use rejection::conflict_of;
use requests::Requests;
pub(crate) use tickets::renew_now;
use wire::kind;

/// Supported message features: those of 16.2 to 18.2.  They determine the encodings of maps.
pub(crate) const FEATURES: u64 = 0x3f01_cfbd_fffd_ffff;
/// Time limit for a connection handshake with a monitor.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(5);
/// Services for which tickets are requested.
const SERVICES: u32 = entity::MON as u32 | entity::OSD as u32;

/// Receiver of updates from the monitors.
pub(crate) trait MonitorListener {
    /// Called when OSD maps arrive.
    fn osd_maps(&self, maps: &wire::OsdMaps<'_>);
    /// Called when settings stored by the monitors arrive.
    fn settings(&self, settings: &Settings);
    /// Called with an error when every monitor rejects the key, and with `None` when a monitor accepts this client.
    fn refused(&self, error: Option<Error>);
}

/// State of the session, shared by its tasks and handles.
struct MonitorSession {
    config: CephConfig,
    settings: RefCell<Settings>,
    /// Set once the monitors have sent the settings they store for this client.
    settings_received: Cell<bool>,
    ticket_store: Rc<TicketStore>,
    messenger: RefCell<Option<Messenger>>,
    current: CurrentMonitor,
    map: RefCell<MonMap>,
    /// Epoch from which on OSD maps are wanted.
    wanted: Cell<Epoch>,
    requests: Requests,
    attempts: Attempts,
    changed: Notify,
    closed: Cell<bool>,
    listener: Rc<dyn MonitorListener>,
}

/// Session with the monitors.
#[derive(Clone)]
pub(crate) struct Monitors(Rc<MonitorSession>);

impl Monitors {
    /// Starts a session; [`connected`](Self::connected) waits until it is established.
    pub(crate) fn start(
        config: CephConfig,
        ticket_store: Rc<TicketStore>,
        nonce: u32,
        core: &MessengerCore,
        listener: Rc<dyn MonitorListener>,
    ) -> Self {
        let (auth, modes) = match &config.credentials {
            Credentials::None => {
                let (id, ticket_store) = (config.id.clone(), ticket_store.clone());
                (Auth::Named { id, ticket_store, monitors: true }, None)
            }
            Credentials::Cephx(secret) => {
                let (id, secret, ticket_store) = (config.id.clone(), secret.clone(), ticket_store.clone());
                (Auth::Cephx { id, secret, services: SERVICES, ticket_store }, Some(config.monitor_modes.clone()))
            }
        };
        let options = MessengerOptions {
            entity: entity::CLIENT,
            peer_entity: Some(entity::MON),
            nonce: Some(nonce),
            auth,
            modes,
            supported: FEATURES,
            handshake_timeout: MONITOR_TIMEOUT,
            ..MessengerOptions::default()
        };
        let (settings, _) = config.said.with(&BTreeMap::new()).expect("looked at when the configuration was resolved");
        let settings_received = Cell::new(!config.ask_monitors);
        let shared = Rc::new(MonitorSession {
            settings: RefCell::new(settings),
            settings_received,
            config,
            ticket_store,
            messenger: RefCell::default(),
            current: CurrentMonitor::default(),
            map: RefCell::default(),
            wanted: Cell::new(0),
            requests: Requests::default(),
            attempts: Attempts::default(),
            changed: Notify::new(),
            closed: Cell::new(false),
            listener,
        });
        let messenger = Messenger::new(core, options, Incoming(Rc::downgrade(&shared)));
        *shared.messenger.borrow_mut() = Some(messenger);
        drop(spawn(connect::maintain(shared.clone())));
        if matches!(shared.config.credentials, Credentials::Cephx(_)) {
            drop(spawn(tickets::maintain(Rc::downgrade(&shared))));
        }
        Self(shared)
    }

    /// Waits until a monitor has accepted this client and sent the monitor map.
    pub(crate) async fn connected(&self) -> Result<()> {
        let shared = &self.0;
        let settled = || shared.fsid().is_some() || shared.closed.get() || shared.attempts.are_rejected();
        let limit = shared.config.connect_timeout;
        let settled = timeout(limit, shared.changed.wait_until(settled)).await;
        if settled.is_ok() && shared.fsid().is_some() && !shared.closed.get() {
            let received = shared.changed.wait_until(|| shared.settings_received.get() || shared.closed.get());
            if timeout(MONITOR_TIMEOUT.min(limit), received).await.is_err() {
                tracing::warn!(
                    "the monitors have not sent the settings that they store for this client; those of the \
                     configuration file apply"
                );
            }
            return Ok(());
        }
        Err(shared.attempts.last_error().map(rejection::denied_by_all).unwrap_or_else(|| {
            let seconds = limit.as_secs_f32();
            let text = format!("no monitor has answered within {seconds} s; check mon_host and the network");
            Error::new(ErrorKind::TimedOut, text)
        }))
    }

    /// Returns the cluster fsid.
    pub(crate) fn fsid(&self) -> Fsid {
        self.0.map.borrow().fsid
    }

    /// Returns the effective settings, merged from the file and the monitors.
    pub(crate) fn settings(&self) -> Settings {
        self.0.settings.borrow().clone()
    }

    /// Returns the address of the current monitor.
    pub(crate) fn current(&self) -> Option<String> {
        self.0.current.connection().map(|connection| connection.address().to_string())
    }

    /// Returns the address of this client, as seen by the monitors.
    pub(crate) fn own_addr(&self) -> Option<EntityAddr> {
        self.0.current.own_addr()
    }

    /// Returns the number of monitors.
    pub(crate) fn count(&self) -> usize {
        self.0.map.borrow().monitors.len()
    }

    /// Sets the epoch from which on OSD maps are wanted.
    pub(crate) fn want_osd_map(&self, from: Epoch) {
        self.0.wanted.set(from);
    }

    /// Resends the subscription, after an OSD map was missed.
    pub(crate) fn ask_again(&self) {
        self.0.subscribe();
    }

    /// Sends a request, resends it if the connection is lost, and waits for its reply.
    pub(crate) async fn request(
        &self,
        kind: u16,
        versions: (u16, u16),
        front: &[u8],
        data: BufList,
    ) -> Result<Message> {
        let shared = &self.0;
        let (tid, answered) = shared.requests.insert(kind, versions, front, data);
        if let Some(connection) = shared.current.connection() {
            shared.requests.send(&connection, tid);
        }
        let limit = shared.settings.borrow().monitor_timeout;
        let result = timeout(limit, answered).await;
        shared.requests.remove(tid);
        match result {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Error::new(ErrorKind::ShuttingDown, "the session with the monitors has ended")),
            Err(_) => {
                let seconds = limit.as_secs_f32();
                Err(Error::new(ErrorKind::TimedOut, format!("no reply of the monitors within {seconds} s")))
            }
        }
    }

    /// Runs a monitor command and returns its output. `fields` are names and JSON values, `prefix` first.
    pub(crate) async fn command(&self, fields: &[(&str, String)]) -> Result<Vec<u8>> {
        let fields: Vec<String> =
            fields.iter().map(|(name, value)| format!("{}: {value}", wire::quote(name))).collect();
        let json = format!("{{{}}}", fields.join(", "));
        let front = wire::command(&self.fsid(), &json);
        let reply = self.request(kind::MON_COMMAND, (1, 1), &front, BufList::new()).await?;
        let (status, words) = wire::command_ack(&reply.front.to_vec()).map_err(malformed)?;
        if status < 0 {
            return Err(crate::error::failure(status, words));
        }
        Ok(reply.data.to_vec())
    }

    /// Closes the session.
    pub(crate) fn close(&self) {
        self.0.closed.set(true);
        self.0.changed.notify_all();
        self.0.requests.clear();
        let messenger = self.0.messenger.borrow_mut().take();
        if let Some(messenger) = messenger {
            messenger.shutdown();
        }
    }
}

pub(crate) fn malformed(error: forebay_messenger::wire::MalformedPayload) -> Error {
    Error::new(ErrorKind::Io, format!("malformed message of a monitor: {error}"))
}

impl MonitorSession {
    fn fsid(&self) -> Option<Fsid> {
        Some(self.map.borrow()).filter(|map| map.epoch > 0).map(|map| map.fsid)
    }

    fn subscribe(&self) {
        let Some(connection) = self.current.connection() else { return };
        let mut what =
            vec![("monmap", u64::from(self.map.borrow().epoch) + 1), ("osdmap", u64::from(self.wanted.get()))];
        if self.config.ask_monitors {
            what.insert(0, ("config", 0));
        }
        let front = wire::subscribe(&what);
        let mut message = Message::new(kind::MON_SUBSCRIBE).front(Buf::copy_of(&front));
        (message.version, message.compat_version) = (3, 1);
        if let Err(error) = connection.post(message) {
            tracing::debug!(%error, "subscription not sent; it is sent on the next connection");
        }
    }

    /// Returns the addresses to try, in order: those of the monitor map first, then the configured ones, each list
    /// starting at a random entry.
    fn addresses(&self) -> Vec<SocketAddr> {
        let map = self.map.borrow();
        let known = map.monitors.iter().flat_map(|monitor| &monitor.addrs);
        let mut addresses: Vec<_> =
            known.filter(|addr| addr.kind == AddrKind::Msgr2).filter_map(|addr| addr.socket).collect();
        let mut configured = self.config.monitors.clone();
        for list in [&mut addresses, &mut configured] {
            if !list.is_empty() {
                let first = random() as usize % list.len();
                list.rotate_left(first);
            }
        }
        addresses.extend(configured);
        let mut seen = std::collections::BTreeSet::new();
        addresses.retain(|address| seen.insert(*address));
        addresses
    }

    fn take_settings(&self, front: &[u8]) {
        let taken = wire::config(front).map_err(malformed).and_then(|kept| {
            self.config.said.with(&kept).map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))
        });
        match taken {
            Ok((settings, refused)) => {
                for error in refused {
                    tracing::warn!(%error, "ignoring a setting that the monitors store for this client");
                }
                if *self.settings.borrow() != settings {
                    tracing::info!(?settings, "settings changed by the monitors");
                    self.listener.settings(&settings);
                    *self.settings.borrow_mut() = settings;
                }
                self.settings_received.set(true);
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(%error, "ignoring settings that the monitors store for this client"),
        }
    }

    fn take_map(&self, front: &[u8]) {
        match wire::mon_map(front).and_then(MonMap::decode) {
            Ok(map) => {
                let ours = self.fsid();
                if ours.is_some_and(|ours| ours != map.fsid) {
                    tracing::warn!("ignoring the map of a monitor of another cluster; check mon_host");
                    return;
                }
                *self.map.borrow_mut() = map;
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(%error, "ignoring a malformed monitor map"),
        }
    }
}

/// Handler of messages from monitors.
struct Incoming(Weak<MonitorSession>);

impl Handler for Incoming {
    fn message(&self, _: &Connection, message: Message) {
        let Some(shared) = self.0.upgrade() else { return };
        match message.kind {
            kind::MON_MAP => shared.take_map(&message.front.to_vec()),
            kind::CONFIG => shared.take_settings(&message.front.to_vec()),
            kind::OSD_MAP => {
                let front = message.front.to_vec();
                match wire::osd_maps(&front) {
                    Ok(maps) => shared.listener.osd_maps(&maps),
                    Err(error) => tracing::warn!(%error, "ignoring malformed OSD maps of a monitor"),
                }
            }
            kind::MON_COMMAND_ACK
            | kind::POOL_OP_REPLY
            | kind::STATFS_REPLY
            | kind::AUTH_REPLY
            | kind::GET_VERSION_REPLY => {
                shared.requests.settle(message);
            }
            other => tracing::trace!(kind = other, "ignoring a monitor's message of unknown type"),
        }
    }
}
