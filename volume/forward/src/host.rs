//! Owner's side: executes requests of forwarders on the volumes that this daemon has open.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, Geometry, Result};
use forebay_messenger::{Connection, Message, MessageRole};
use forebay_reactor::sync::Notify;
use forebay_reactor::{now, random, spawn};

use crate::authority::OfferedDevice;
use crate::client::ForwardClient;
use crate::offer::VolumeOffer;
use crate::route::OwnerRoute;
use crate::session::{AdmitRefused, ForwardSessionKey, OpenStep, OwnerSessions, PeerNumber};
use crate::wire::{
    self, ForwardAnswer, ForwardEvent, ForwardRefusal, ForwardRequest, ForwarderStart, KIND_REQUEST, LEASES,
    SessionEndReason, VolumeRequest,
};

/// Forwarder that has sessions here.
#[derive(Clone)]
enum SessionPeer {
    Remote(Connection),
    /// Forwarder of this daemon.
    Local(Weak<ForwardClient>),
}

/// Request that has been admitted, and what executes it.
struct AdmittedAccess {
    ticket: u64,
    device: Rc<dyn BlockDevice>,
    volume: String,
}

/// Owner's side of all forwarded volumes of a daemon.
#[derive(Default)]
pub struct ForwardHost {
    pub(crate) sessions: RefCell<OwnerSessions>,
    pub(crate) devices: RefCell<BTreeMap<String, OfferedDevice>>,
    peers: RefCell<Vec<(PeerNumber, SessionPeer)>>,
    next_peer: Cell<PeerNumber>,
    /// Signaled when a request has completed or a session has ended.
    pub(crate) changed: Notify,
}

impl ForwardHost {
    /// Creates a host that offers no volumes.
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    /// Offers a volume that this daemon owns in `term` to forwarders, until the offer is dropped.
    ///
    /// # Errors
    /// `Exists` if it is offered already.
    pub fn offer(self: &Rc<Self>, volume: &str, term: u64, device: Rc<dyn BlockDevice>) -> Result<VolumeOffer> {
        let is_new = self.sessions.borrow_mut().offer(volume, term);
        let table = self.sessions.borrow().table(volume).filter(|_| is_new);
        let Some(table) = table else {
            return Err(Error::new(ErrorKind::Exists, format!("offering volume {volume} to other daemons")));
        };
        self.devices.borrow_mut().insert(volume.to_owned(), OfferedDevice::new(device.clone(), table));
        Ok(VolumeOffer::new(self.clone(), volume, device))
    }

    /// Handles a message that is a request of a forwarder; returns false if it is something else.
    pub fn handle(self: &Rc<Self>, connection: &Connection, mut message: Message) -> bool {
        if message.kind != KIND_REQUEST {
            return false;
        }
        let data = std::mem::take(&mut message.data);
        let decoded = wire::front(&message).and_then(|front| ForwardRequest::decode(&front, data));
        let peer = self.peer(connection);
        match decoded {
            _ if message.role != MessageRole::Request => {
                self.violated(connection, &message, "a request without a reply")
            }
            Err(error) => self.violated(connection, &message, &error.to_string()),
            Ok(ForwardRequest::Open { volume, start, session, lease }) => {
                self.open(connection, message, (peer, session), &volume, (start, lease));
            }
            Ok(ForwardRequest::Renew { grant }) => {
                // 0 stands for none.
                let next = random() | 1;
                self.sessions.borrow_mut().renew(peer, grant, next, now());
                self.end_lapsed();
                let answer = ForwardAnswer::Renewed { grant: next };
                post(connection, wire::urgent(wire::reply(&message, answer.encode())));
            }
            Ok(ForwardRequest::Close { session }) => {
                self.sessions.borrow_mut().end_session((peer, session));
                self.changed.notify_all();
                post(connection, wire::reply(&message, ForwardAnswer::Done.encode()));
            }
            Ok(ForwardRequest::Adopted { session, number }) => {
                self.adopted((peer, session), number);
                post(connection, wire::reply(&message, ForwardAnswer::Done.encode()));
            }
            Ok(ForwardRequest::Volume { session, request }) => {
                self.execute(connection, message, (peer, session), request);
            }
        }
        true
    }

    /// Ends the sessions of a connection that has ended or whose peer has begun again; also of one that this daemon has closed,
    /// of which the messenger does not tell.
    pub fn forget(&self, connection: &Connection) {
        let mut peers = self.peers.borrow_mut();
        let is_it = |peer: &SessionPeer| matches!(peer, SessionPeer::Remote(known) if known == connection);
        let Some(at) = peers.iter().position(|(_, peer)| is_it(peer)) else { return };
        let (peer, _) = peers.swap_remove(at);
        self.sessions.borrow_mut().forget_peer(peer);
        self.changed.notify_all();
    }

    /// Ends all sessions and forgets all connections, for a daemon that stops.  Until then the host and the messenger whose handler
    /// has it keep each other in memory.
    pub fn shut_down(&self) {
        let peers = self.peers.take();
        for (peer, _) in &peers {
            self.sessions.borrow_mut().forget_peer(*peer);
        }
        self.changed.notify_all();
    }

    /// Ends all sessions of a start that the group has declared dead.  When this returns, nothing of it is being executed, and
    /// nothing ever will be.
    pub async fn end_start(self: &Rc<Self>, start: ForwarderStart) {
        let ended = self.sessions.borrow_mut().end_start(start);
        self.announce_end(ended, &SessionEndReason::StartEnded);
        self.changed.wait_until(|| !self.sessions.borrow().is_executing_for(&start)).await;
    }

    /// Returns the number of sessions that are open or have requests.
    pub fn sessions(&self) -> usize {
        self.sessions.borrow().len()
    }

    /// Stops admitting requests to a volume, waits until nothing is being executed, and ends its sessions.
    pub(crate) async fn suspend(self: &Rc<Self>, volume: &str) {
        self.sessions.borrow_mut().suspend(volume);
        self.changed.notify_all();
        self.changed.wait_until(|| !self.sessions.borrow().is_executing(volume)).await;
        let ended = self.sessions.borrow_mut().end_volume(volume);
        self.announce_end(ended, &SessionEndReason::Moved);
    }

    pub(crate) fn resume(&self, volume: &str) {
        self.sessions.borrow_mut().resume(volume);
    }

    pub(crate) fn withdraw(self: &Rc<Self>, volume: &str, hint: Option<String>) {
        let device = self.devices.borrow_mut().remove(volume);
        let ended = self.sessions.borrow_mut().withdraw(volume, hint);
        self.announce_end(ended, &SessionEndReason::Closed);
        drop(device);
    }

    /// Tells the forwarders of a volume its geometry.
    pub(crate) fn announce_size(self: &Rc<Self>, volume: &str, geometry: Geometry) {
        let open = self.sessions.borrow().open_sessions(volume);
        for (peer, session) in open {
            self.tell(peer, &ForwardEvent::Size { session, geometry });
        }
    }

    /// Sends an event to a forwarder.
    pub(crate) fn tell(self: &Rc<Self>, peer: PeerNumber, event: &ForwardEvent) {
        match self.session_peer(peer) {
            Some(SessionPeer::Remote(connection)) => post(&connection, event_message(event)),
            Some(SessionPeer::Local(client)) => self.tell_local(&client, event),
            None => {}
        }
    }

    fn tell_local(self: &Rc<Self>, client: &Weak<ForwardClient>, event: &ForwardEvent) {
        if let Some(client) = client.upgrade() {
            client.event(&OwnerRoute::Local(self.clone()), event);
        }
    }

    /// Tells forwarders that sessions have ended, each after the answers to its requests.
    pub(crate) fn announce_end(self: &Rc<Self>, ended: Vec<ForwardSessionKey>, why: &SessionEndReason) {
        self.changed.notify_all();
        for key in ended {
            let Some(peer) = self.session_peer(key.0) else { continue };
            let (host, event) = (self.clone(), ForwardEvent::Ended { session: key.1, why: why.clone() });
            drop(spawn(async move {
                host.changed.wait_until(|| !host.sessions.borrow().is_answering(key)).await;
                match peer {
                    // A connection that has ended needs none.
                    SessionPeer::Remote(connection) => drop(connection.send(event_message(&event)).await),
                    SessionPeer::Local(client) => host.tell_local(&client, &event),
                }
            }));
        }
    }

    /// Ends all sessions of a peer that violates the protocol.
    fn violated(self: &Rc<Self>, connection: &Connection, message: &Message, why: &str) {
        let peer = connection.address();
        tracing::warn!(%peer, name = connection.name(), why, "forwarded volumes: protocol violation; sessions of the peer end");
        let ended = self.sessions.borrow_mut().end_peer(self.peer(connection));
        self.announce_end(ended, &SessionEndReason::Other(why.to_owned()));
        if message.role != MessageRole::Request {
            return;
        }
        let refusal = ForwardAnswer::Refused(ForwardRefusal::Other(why.to_owned()));
        post(connection, wire::reply(message, refusal.encode()));
    }

    fn open(
        self: &Rc<Self>,
        connection: &Connection,
        message: Message,
        key: ForwardSessionKey,
        volume: &str,
        (start, lease): (ForwarderStart, Duration),
    ) {
        let begun = self.sessions.borrow_mut().begin_open(key, volume, start, Some(lease));
        // Sessions may have ended.
        self.changed.notify_all();
        let (host, connection, volume) = (self.clone(), connection.clone(), volume.to_owned());
        drop(spawn(async move {
            let answer = host.opened(begun, key, &volume, start).await;
            // No other task has run since the session is open, so that no event of it is sent before.
            let _ = connection.send(wire::reply(&message, answer.encode())).await;
        }));
    }

    /// Waits until a session that has begun to open is open or refused.  A start that was declared dead is told so when nothing
    /// of it is being executed any more, as it fails its requests then.
    async fn opened(
        self: &Rc<Self>,
        begun: std::result::Result<(), ForwardRefusal>,
        key: ForwardSessionKey,
        volume: &str,
        start: ForwarderStart,
    ) -> ForwardAnswer {
        let answer = match begun {
            Err(refusal) => ForwardAnswer::Refused(refusal),
            Ok(()) => self.open_or_refused(key, volume).await,
        };
        if matches!(answer, ForwardAnswer::Refused(ForwardRefusal::StartEnded)) {
            self.changed.wait_until(|| !self.sessions.borrow().is_executing_for(&start)).await;
        }
        answer
    }

    async fn open_or_refused(self: &Rc<Self>, key: ForwardSessionKey, volume: &str) -> ForwardAnswer {
        loop {
            let changed = self.changed.wait();
            // The session counts as having adopted this table.
            let reservations = self.current_table(volume);
            let step = self.sessions.borrow_mut().open_step(key, now());
            match step {
                OpenStep::Wait => changed.await,
                OpenStep::Refuse(refusal) => return ForwardAnswer::Refused(refusal),
                OpenStep::Open { term, lease } => {
                    let devices = self.devices.borrow();
                    let geometry = devices.get(volume).expect("an offered volume has a device").device.geometry();
                    let lease = lease.unwrap_or(*LEASES.end());
                    return ForwardAnswer::Opened { term, geometry, reservations, lease };
                }
            }
        }
    }

    /// Executes a request, unless it is refused.
    fn execute(
        self: &Rc<Self>,
        connection: &Connection,
        message: Message,
        key: ForwardSessionKey,
        request: VolumeRequest,
    ) {
        let cost = request.cost();
        let admitted = match self.admit(key, &request) {
            Ok(admitted) => admitted,
            Err(AdmitRefused::TooMany) => {
                return self.violated(connection, &message, "more requests in flight than a session may have");
            }
            Err(AdmitRefused::Refusal(refusal)) => {
                return post(connection, wire::reply(&message, ForwardAnswer::Refused(refusal).encode()));
            }
        };
        let (host, connection) = (self.clone(), connection.clone());
        drop(spawn(async move {
            let answer = host.perform(key, admitted, request).await;
            // The forwarder asks again if the connection has ended.
            let _ = connection.send(wire::reply(&message, answer.encode())).await;
            host.sessions.borrow_mut().answered(key, cost);
            host.changed.notify_all();
        }));
    }

    /// Admits a request.
    fn admit(
        self: &Rc<Self>,
        key: ForwardSessionKey,
        request: &VolumeRequest,
    ) -> std::result::Result<AdmittedAccess, AdmitRefused> {
        let kind = (request.class(), request.footprint());
        let admitted = self.sessions.borrow_mut().admit(key, kind, request.cost(), now());
        // Before leases are looked at once more, as this one may run out just now.
        let volume = self.sessions.borrow().volume_of(key).map(str::to_owned);
        self.end_lapsed();
        let (ticket, volume) = (admitted?, volume.expect("an open session"));
        let device = self.devices.borrow().get(&volume).expect("an offered volume has a device").device.clone();
        Ok(AdmittedAccess { ticket, device, volume })
    }

    /// Executes an admitted request.  One that had to wait is refused if its session has ended meanwhile.
    async fn perform(
        self: &Rc<Self>,
        key: ForwardSessionKey,
        admitted: AdmittedAccess,
        request: VolumeRequest,
    ) -> ForwardAnswer {
        let AdmittedAccess { ticket, device, volume } = admitted;
        let had_to_wait = self.sessions.borrow().must_wait(ticket);
        if had_to_wait {
            self.changed.wait_until(|| !self.sessions.borrow().must_wait(ticket)).await;
            self.end_lapsed();
        }
        let is_refused = had_to_wait && !self.sessions.borrow().is_open(key);
        let answer = match request {
            _ if is_refused => ForwardAnswer::Refused(ForwardRefusal::NoSession),
            VolumeRequest::Reserve(host, action) => self.reserve(&volume, device.reservations(), &host, action).await,
            access => executed(&*device, access).await,
        };
        self.sessions.borrow_mut().executed(ticket);
        self.changed.notify_all();
        answer
    }

    /// Ends the sessions whose leases have run out.
    pub(crate) fn end_lapsed(self: &Rc<Self>) {
        let lapsed = self.sessions.borrow_mut().take_lapsed(now());
        if !lapsed.is_empty() {
            tracing::info!(
                sessions = lapsed.len(),
                "sessions of forwarded volumes end: the forwarder was not heard of"
            );
            self.announce_end(lapsed, &SessionEndReason::Other("the lease of the session has run out".into()));
        }
    }

    /// Opens a session of a forwarder of this daemon.
    pub(crate) async fn open_local(
        self: &Rc<Self>,
        client: &Rc<ForwardClient>,
        volume: &str,
        session: u64,
    ) -> ForwardAnswer {
        let key = (self.local_peer(client), session);
        let begun = self.sessions.borrow_mut().begin_open(key, volume, *client.start(), None);
        self.changed.notify_all();
        self.opened(begun, key, volume, *client.start()).await
    }

    /// Executes a request of a forwarder of this daemon, in a session.  Must not be dropped before it has completed.
    pub(crate) async fn execute_local(
        self: &Rc<Self>,
        client: &Rc<ForwardClient>,
        session: u64,
        request: VolumeRequest,
    ) -> ForwardAnswer {
        let (key, cost) = ((self.local_peer(client), session), request.cost());
        let admitted = match self.admit(key, &request) {
            Ok(admitted) => admitted,
            Err(AdmitRefused::Refusal(refusal)) => return ForwardAnswer::Refused(refusal),
            Err(AdmitRefused::TooMany) => {
                return ForwardAnswer::Refused(ForwardRefusal::Other("too many requests in flight".into()));
            }
        };
        let answer = self.perform(key, admitted, request).await;
        self.sessions.borrow_mut().answered(key, cost);
        self.changed.notify_all();
        answer
    }

    /// Ends a session of a forwarder of this daemon.
    pub(crate) fn close_local(&self, client: &Rc<ForwardClient>, session: u64) {
        self.sessions.borrow_mut().end_session((self.local_peer(client), session));
        self.changed.notify_all();
    }

    fn peer(&self, connection: &Connection) -> PeerNumber {
        let is_it = |peer: &SessionPeer| matches!(peer, SessionPeer::Remote(known) if known == connection);
        self.number_of(is_it, || SessionPeer::Remote(connection.clone()))
    }

    pub(crate) fn local_peer(&self, client: &Rc<ForwardClient>) -> PeerNumber {
        let is_it =
            |peer: &SessionPeer| matches!(peer, SessionPeer::Local(known) if known.as_ptr() == Rc::as_ptr(client));
        self.number_of(is_it, || SessionPeer::Local(Rc::downgrade(client)))
    }

    /// Returns the number of a peer, which gets one if it has none yet.
    fn number_of(&self, is_it: impl Fn(&SessionPeer) -> bool, peer: impl FnOnce() -> SessionPeer) -> PeerNumber {
        let mut peers = self.peers.borrow_mut();
        if let Some((number, _)) = peers.iter().find(|(_, known)| is_it(known)) {
            return *number;
        }
        let number = self.next_peer.get();
        self.next_peer.set(number + 1);
        peers.push((number, peer()));
        number
    }

    fn session_peer(&self, number: PeerNumber) -> Option<SessionPeer> {
        self.peers.borrow().iter().find(|(known, _)| *known == number).map(|(_, peer)| peer.clone())
    }
}

fn event_message(event: &ForwardEvent) -> Message {
    wire::message(wire::KIND_EVENT, event.encode())
}

/// Sends a message, as soon as there is room for it.
fn post(connection: &Connection, message: Message) {
    let connection = connection.clone();
    drop(spawn(async move {
        // A connection that has ended needs none.
        let _ = connection.send(message).await;
    }));
}

/// Checks a request of another daemon before the device has to rely on it.
fn check(geometry: &Geometry, request: &VolumeRequest) -> Result<()> {
    let (extent, changes) = match request {
        VolumeRequest::Map(extent) => (Some(*extent), false),
        VolumeRequest::Reserve(..) => return Err(Error::new(ErrorKind::Unsupported, "not an access to the device")),
        VolumeRequest::Submit(request, _) => (request.extent(), request.is_write()),
    };
    if changes && geometry.read_only {
        return Err(Error::new(ErrorKind::ReadOnly, "a write to a volume that is read-only"));
    }
    let Some(Extent { offset, len }) = extent else { return Ok(()) };
    let size = geometry.size;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at {offset} of a volume of {size} bytes")));
    }
    let unit = u64::from(geometry.block_size);
    if !offset.is_multiple_of(unit) || !len.is_multiple_of(unit) {
        let text = format!("{len} bytes at {offset} of a volume with blocks of {unit} bytes");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// Executes a request on a device.
async fn executed(device: &dyn BlockDevice, request: VolumeRequest) -> ForwardAnswer {
    if let Err(error) = check(&device.geometry(), &request) {
        return ForwardAnswer::Failed(error);
    }
    let answer = match request {
        VolumeRequest::Map(extent) => device.map(extent).await.map(ForwardAnswer::Mapped),
        VolumeRequest::Reserve(..) => Ok(ForwardAnswer::Done),
        VolumeRequest::Submit(request, advice) => {
            let reads = matches!(request, BlockRequest::Read(_));
            device.submit_advised(request, advice).await.map(|reply| match reply {
                BlockReply::Data(data) if reads => ForwardAnswer::Data(data),
                _ => ForwardAnswer::Done,
            })
        }
    };
    answer.unwrap_or_else(ForwardAnswer::Failed)
}
