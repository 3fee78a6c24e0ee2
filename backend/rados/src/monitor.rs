//! Monitor session: with one monitor at a time, whichever is reachable.
//!
//! A task maintains the connection: it tries monitors in turn until one accepts this client, subscribes to maps,
//! resends pending requests, and reconnects when the connection ends.  Tickets are renewed before they expire.

pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_messenger::session::Violation;
use forebay_messenger::session::cephx::TicketStore;
use forebay_messenger::wire::control::mode;
use forebay_messenger::wire::{AddrKind, EntityAddr, entity};
use forebay_messenger::{
    Address, Auth, Connection, Handler, Message, Messenger, MessengerCore, Options, Policy, Reason,
};
use forebay_reactor::sync::{Notify, oneshot};
use forebay_reactor::{Buf, BufList, Instant, now, random, sleep, spawn, timeout};

use crate::config::{Config, Credentials, Settings};
use crate::map::{Epoch, Fsid, MonMap};
use wire::kind;

/// Supported message features: those of 16.2 to 18.2.  They determine the encodings of maps.
pub(crate) const FEATURES: u64 = 0x3f01_cfbd_fffd_ffff;
/// Time limit for a connection handshake with a monitor.
const MONITOR_PATIENCE: Duration = Duration::from_secs(5);
/// Pause after all monitors were tried.
const REST: Duration = Duration::from_secs(1);
/// Maximum interval between ticket renewals.
const RENEWAL_MAX: Duration = Duration::from_secs(3600);
/// Minimum interval between ticket renewals, however short their validity.
const RENEWAL_MIN: Duration = Duration::from_secs(5);
/// Services for which tickets are requested.
const SERVICES: u32 = entity::MON as u32 | entity::OSD as u32;

/// Request that awaits its reply.
struct Pending {
    kind: u16,
    versions: (u16, u16),
    front: Buf,
    data: BufList,
    answer: oneshot::Sender<Message>,
}

/// Receiver of updates from the monitors.
pub(crate) trait Listener {
    /// Called when OSD maps arrive.
    fn osd_maps(&self, maps: &wire::OsdMaps<'_>);
    /// Called when settings stored by the monitors arrive.
    fn settings(&self, settings: &Settings);
    /// Called with an error when every monitor rejects the key, and with `None` when a monitor accepts this client.
    fn refused(&self, error: Option<Error>);
}

struct Shared {
    config: Config,
    settings: RefCell<Settings>,
    /// Set once the monitors have sent the settings they store for this client.
    told: Cell<bool>,
    ticket_store: Rc<TicketStore>,
    messenger: RefCell<Option<Messenger>>,
    connection: RefCell<Option<Connection>>,
    map: RefCell<MonMap>,
    /// Epoch from which on OSD maps are wanted.
    wanted: Cell<Epoch>,
    pending: RefCell<BTreeMap<u64, Pending>>,
    last_tid: Cell<u64>,
    /// Reason why the last monitor did not accept this client.
    trouble: RefCell<Option<Error>>,
    /// Number of complete rounds over all monitors.
    rounds: Cell<u32>,
    /// Time of the last authentication, from which the monitors' own tickets are valid.
    authenticated: Cell<Option<Instant>>,
    changed: Notify,
    closed: Cell<bool>,
    /// Address of this client, as seen by the last monitor.
    seen: Cell<Option<EntityAddr>>,
    listener: Rc<dyn Listener>,
}

/// Session with the monitors.
#[derive(Clone)]
pub(crate) struct Monitors(Rc<Shared>);

impl Monitors {
    /// Starts a session; [`connected`](Self::connected) waits until it is established.
    pub(crate) fn start(
        config: Config,
        ticket_store: Rc<TicketStore>,
        nonce: u32,
        core: &MessengerCore,
        listener: Rc<dyn Listener>,
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
        let options = Options {
            entity: entity::CLIENT,
            peer_entity: Some(entity::MON),
            nonce: Some(nonce),
            auth,
            modes,
            supported: FEATURES,
            handshake_timeout: MONITOR_PATIENCE,
            ..Options::default()
        };
        let (settings, _) = config.said.with(&BTreeMap::new()).expect("looked at when the configuration was resolved");
        let told = Cell::new(!config.ask_monitors);
        let shared = Rc::new(Shared {
            settings: RefCell::new(settings),
            told,
            config,
            ticket_store,
            messenger: RefCell::default(),
            connection: RefCell::default(),
            map: RefCell::default(),
            wanted: Cell::new(0),
            pending: RefCell::default(),
            last_tid: Cell::new(0),
            trouble: RefCell::default(),
            rounds: Cell::new(0),
            authenticated: Cell::new(None),
            changed: Notify::new(),
            closed: Cell::new(false),
            seen: Cell::new(None),
            listener,
        });
        let messenger = Messenger::new(core, options, Incoming(Rc::downgrade(&shared)));
        *shared.messenger.borrow_mut() = Some(messenger);
        drop(spawn(keep_connected(shared.clone())));
        if matches!(shared.config.credentials, Credentials::Cephx(_)) {
            drop(spawn(renew(Rc::downgrade(&shared))));
        }
        Self(shared)
    }

    /// Waits until a monitor has accepted this client and sent the monitor map.
    pub(crate) async fn connected(&self) -> Result<()> {
        let shared = &self.0;
        // A monitor may be down for a while, but a key rejected by all is invalid, and so are modes that none accepts.
        let denied = || {
            let trouble = shared.trouble.borrow();
            trouble.as_ref().is_some_and(|error| matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unsupported))
        };
        let settled = || shared.fsid().is_some() || shared.closed.get() || (shared.rounds.get() > 0 && denied());
        let limit = shared.config.connect_timeout;
        let settled = timeout(limit, shared.changed.wait_until(settled)).await;
        if settled.is_ok() && shared.fsid().is_some() && !shared.closed.get() {
            let told = shared.changed.wait_until(|| shared.told.get() || shared.closed.get());
            if timeout(MONITOR_PATIENCE.min(limit), told).await.is_err() {
                tracing::warn!("the monitors do not say what settings they keep for us; those of the file hold");
            }
            return Ok(());
        }
        let trouble = shared.trouble.borrow().clone();
        Err(trouble.unwrap_or_else(|| {
            Error::new(ErrorKind::TimedOut, format!("no monitor has answered within {} s", limit.as_secs_f32()))
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
        self.0.connection.borrow().as_ref().map(|connection| connection.address().to_string())
    }

    /// Returns the address of this client, as seen by the monitors.
    pub(crate) fn own_addr(&self) -> Option<EntityAddr> {
        self.0.seen.get()
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
        let tid = shared.last_tid.get() + 1;
        shared.last_tid.set(tid);
        let (answer, answered) = oneshot::channel();
        let pending = Pending { kind, versions, front: Buf::copy_of(front), data, answer };
        if let Some(connection) = &*shared.connection.borrow() {
            shared.post(connection, tid, &pending);
        }
        shared.pending.borrow_mut().insert(tid, pending);
        let limit = shared.settings.borrow().monitor_timeout;
        let result = timeout(limit, answered).await;
        shared.pending.borrow_mut().remove(&tid);
        match result {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Error::new(ErrorKind::ShuttingDown, "the session with the monitors has ended")),
            Err(_) => {
                let seconds = limit.as_secs_f32();
                Err(Error::new(ErrorKind::TimedOut, format!("the monitors have not answered within {seconds} s")))
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
        self.0.pending.borrow_mut().clear();
        let messenger = self.0.messenger.borrow_mut().take();
        if let Some(messenger) = messenger {
            messenger.shutdown();
        }
    }
}

pub(crate) fn malformed(error: forebay_messenger::wire::Malformed) -> Error {
    Error::new(ErrorKind::Io, format!("{error}, as a monitor sent it"))
}

impl Shared {
    fn fsid(&self) -> Option<Fsid> {
        Some(self.map.borrow()).filter(|map| map.epoch > 0).map(|map| map.fsid)
    }

    fn post(&self, connection: &Connection, tid: u64, pending: &Pending) {
        let mut message = Message::new(pending.kind).front(pending.front.clone()).data(pending.data.clone());
        (message.version, message.compat_version) = pending.versions;
        message.tid = tid;
        // Messages that cannot be sent are resent over the next connection.
        if let Err(error) = connection.post(message) {
            tracing::debug!(%error, "a request to a monitor waits for the next one");
        }
    }

    fn subscribe(&self) {
        let connection = self.connection.borrow();
        let Some(connection) = &*connection else { return };
        let mut what =
            vec![("monmap", u64::from(self.map.borrow().epoch) + 1), ("osdmap", u64::from(self.wanted.get()))];
        if self.config.ask_monitors {
            what.insert(0, ("config", 0));
        }
        let front = wire::subscribe(&what);
        let mut message = Message::new(kind::MON_SUBSCRIBE).front(Buf::copy_of(&front));
        (message.version, message.compat_version) = (3, 1);
        if let Err(error) = connection.post(message) {
            tracing::debug!(%error, "a subscription is not sent");
        }
    }

    /// Returns the addresses to try, in order: those of the monitor map first, then the configured ones, each list
    /// starting at a random entry.
    fn places(&self) -> Vec<SocketAddr> {
        let map = self.map.borrow();
        let known = map.monitors.iter().flat_map(|monitor| &monitor.addrs);
        let mut places: Vec<_> =
            known.filter(|addr| addr.kind == AddrKind::Msgr2).filter_map(|addr| addr.socket).collect();
        let mut configured = self.config.monitors.clone();
        for list in [&mut places, &mut configured] {
            if !list.is_empty() {
                let first = random() as usize % list.len();
                list.rotate_left(first);
            }
        }
        places.extend(configured);
        let mut seen = std::collections::BTreeSet::new();
        places.retain(|place| seen.insert(*place));
        places
    }

    fn settle(&self, message: Message) {
        let mut tid = message.tid;
        if message.kind == kind::AUTH_REPLY {
            // Authentication replies have no tid; at most one request is in flight.
            let waits = |(&tid, pending): (&u64, &Pending)| (pending.kind == kind::AUTH).then_some(tid);
            tid = self.pending.borrow().iter().find_map(waits).unwrap_or(tid);
        }
        let pending = self.pending.borrow_mut().remove(&tid);
        match pending {
            Some(pending) => pending.answer.send(message),
            None => tracing::debug!(kind = message.kind, "an answer came for which nobody waits"),
        }
    }

    fn take_settings(&self, front: &[u8]) {
        let taken = wire::config(front).map_err(malformed).and_then(|kept| {
            self.config.said.with(&kept).map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))
        });
        match taken {
            Ok((settings, refused)) => {
                for error in refused {
                    tracing::warn!(%error, "what the monitors keep for us is not taken");
                }
                if *self.settings.borrow() != settings {
                    tracing::info!(?settings, "the monitors keep settings for us");
                    self.listener.settings(&settings);
                    *self.settings.borrow_mut() = settings;
                }
                self.told.set(true);
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(%error, "a monitor's message is not taken"),
        }
    }

    fn take_map(&self, front: &[u8]) {
        match wire::mon_map(front).and_then(MonMap::decode) {
            Ok(map) => {
                let ours = self.fsid();
                if ours.is_some_and(|ours| ours != map.fsid) {
                    tracing::warn!("a monitor of another cluster has answered; its map is not taken");
                    return;
                }
                *self.map.borrow_mut() = map;
                self.changed.notify_all();
            }
            Err(error) => tracing::warn!(%error, "a monitor's message is not taken"),
        }
    }
}

/// Handler of messages from monitors.
struct Incoming(Weak<Shared>);

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
                    Err(error) => tracing::warn!(%error, "a monitor's message is not taken"),
                }
            }
            kind::MON_COMMAND_ACK
            | kind::POOL_OP_REPLY
            | kind::STATFS_REPLY
            | kind::AUTH_REPLY
            | kind::GET_VERSION_REPLY => {
                shared.settle(message);
            }
            other => tracing::trace!(kind = other, "a monitor's message says nothing to us"),
        }
    }
}

/// Maintains a connection to one of the monitors until the session is closed.
async fn keep_connected(shared: Rc<Shared>) {
    while !shared.closed.get() {
        // Set while every monitor of this round has denied access.
        let mut all_refuse = true;
        for place in shared.places() {
            let Some(messenger) = shared.messenger.borrow().clone() else { return };
            let connection = messenger.connect(&Address::Tcp(place), Policy::LossyClient);
            let reason = match timeout(MONITOR_PATIENCE, connection.ready()).await {
                Ok(Ok(())) => serve(&shared, &connection).await,
                Ok(Err(reason)) => reason,
                Err(_) => Reason::Handshake("it is connected"),
            };
            connection.close();
            shared.connection.borrow_mut().take();
            if shared.closed.get() {
                return;
            }
            note(&shared, place, &reason);
            let trouble = shared.trouble.borrow();
            all_refuse &= trouble.as_ref().is_some_and(|error| error.kind() == ErrorKind::Denied);
        }
        let trouble = shared.trouble.borrow().clone();
        if let Some(error) = trouble.filter(|_| all_refuse) {
            shared.listener.refused(Some(error));
        }
        shared.rounds.set(shared.rounds.get().saturating_add(1));
        shared.changed.notify_all();
        let _ = timeout(REST, shared.changed.wait_until(|| shared.closed.get())).await;
    }
}

/// Uses a monitor connection until it ends.
async fn serve(shared: &Rc<Shared>, connection: &Connection) -> Reason {
    *shared.connection.borrow_mut() = Some(connection.clone());
    shared.trouble.borrow_mut().take();
    shared.listener.refused(None);
    shared.authenticated.set(Some(now()));
    shared.seen.set(connection.own_addr().or(shared.seen.get()));
    tracing::debug!(monitor = %connection.address(), client = shared.ticket_store.global_id(), "a monitor has taken us");
    shared.subscribe();
    for (&tid, pending) in &*shared.pending.borrow() {
        shared.post(connection, tid, pending);
    }
    shared.changed.notify_all();
    connection.ended().await
}

/// Returns the error for a daemon that accepts none of this client's connection modes. It names the modes of both
/// sides, and the settings of client and daemon that determine them.
fn mode_conflict(peer: &str, (ours, theirs): (&[u32], &[u32]), (client, service): (&str, &str)) -> Error {
    let (ours, theirs) = (mode::names(ours), mode::names(theirs));
    let text = format!(
        "{peer} accepts connections in mode {theirs} only, and this client offers {ours} only: change {client} of the client \
         or {service} of the daemon"
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the error for a daemon that requires features that this client lacks.
fn features_missing(peer: &str, bits: u64) -> Error {
    let name = |bit: u32| match bit {
        38 => "CRUSH_MSR".to_owned(),
        44 => "NVMEOFHA".to_owned(),
        45 => "NVMEOFHAMAP".to_owned(),
        49 => "SERVER_SQUID".to_owned(),
        50 => "SERVER_TENTACLE".to_owned(),
        other => format!("bit {other}"),
    };
    let names: Vec<String> = (0..64).filter(|bit| bits >> bit & 1 == 1).map(name).collect();
    let text = format!(
        "{peer} requires features of releases newer than this build understands: {} ({bits:#x}); see 'ceph osd dump' and \
         'ceph osd crush dump' for what uses them",
        names.join(", ")
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the error for a daemon that will reject this client until settings change; `None` for any other reason of a
/// lost connection.  `settings` are those that select modes, of the client and of the daemon.
pub(crate) fn conflict_of(peer: &str, reason: &Reason, settings: (&str, &str)) -> Option<Error> {
    match reason {
        Reason::Violation(Violation::ModesDiffer { ours, theirs }) => {
            Some(mode_conflict(peer, (ours, theirs), settings))
        }
        Reason::Violation(Violation::FeaturesRequired(bits)) => Some(features_missing(peer, *bits)),
        _ => None,
    }
}

/// Records why a monitor connection was lost, and logs it.
fn note(shared: &Shared, place: SocketAddr, reason: &Reason) {
    let peer = format!("the monitor at {place}");
    if let Some(error) = conflict_of(&peer, reason, ("ms_mon_client_mode", "ms_mon_service_mode")) {
        let before = shared.trouble.replace(Some(error.clone()));
        if before.as_ref().map(Error::context) != Some(error.context()) {
            tracing::warn!("{}", error.context());
        }
        return;
    }
    let refused = matches!(reason, Reason::Violation(Violation::MethodRefused { .. } | Violation::Auth(_)));
    let name = format!("client.{}", shared.config.id);
    if refused && shared.ticket_store.global_id() != 0 {
        // The monitor no longer accepts the former global id.
        tracing::warn!(%place, %reason, "a monitor does not take {name} for the client that it was; it begins anew");
        shared.ticket_store.clear();
        return;
    }
    tracing::info!(%place, %reason, "a monitor is lost");
    let kind = if refused { ErrorKind::Denied } else { ErrorKind::TimedOut };
    let text = if refused {
        format!("the monitor at {place} refuses {name}: {reason}")
    } else {
        format!("the monitor at {place} cannot be reached: {reason}")
    };
    *shared.trouble.borrow_mut() = Some(Error::new(kind, text));
}

/// Renews tickets when half of their validity has passed.
async fn renew(shared: Weak<Shared>) {
    let mut due = None;
    loop {
        sleep(due.unwrap_or(RENEWAL_MIN)).await;
        let Some(session) = shared.upgrade() else { return };
        if session.closed.get() {
            return;
        }
        let half = |service: u8| {
            let ticket = session.ticket_store.ticket(service.into())?;
            Some(Duration::from_secs(u64::from(ticket.valid_seconds) / 2))
        };
        let (Some(own), Some(osd)) = (half(entity::AUTH), half(entity::OSD)) else { continue };
        if due.is_some() {
            let old = session.authenticated.get().is_some_and(|since| since.elapsed() >= own);
            let connection = session.connection.borrow().clone().filter(|_| old);
            if let Some(connection) = connection {
                // The monitors' own ticket is only issued by authentication.
                connection.close();
            } else if let Err(error) = renew_now(&Monitors(session)).await {
                tracing::warn!(%error, "tickets cannot be renewed; it is tried again");
                due = Some(RENEWAL_MIN);
                continue;
            }
        }
        due = Some(own.min(osd).clamp(RENEWAL_MIN, RENEWAL_MAX));
    }
}

/// Requests new tickets.  The monitors' own ticket is renewed by authenticating again.
pub(crate) async fn renew_now(monitors: &Monitors) -> Result<()> {
    let ticket_store = monitors.0.ticket_store.clone();
    let Some(payload) = ticket_store.renewal(SERVICES, random()) else { return Ok(()) };
    let reply = monitors.request(kind::AUTH, (1, 1), &wire::auth(&payload), BufList::new()).await?;
    let (status, payload) = wire::auth_reply(&reply.front.to_vec()).map_err(malformed)?;
    if status < 0 {
        return Err(crate::error::failure(status, "renewing tickets"));
    }
    let refused = |error| Error::new(ErrorKind::Denied, format!("renewing tickets: {error}"));
    ticket_store.renewed(&payload).map_err(refused)
}
