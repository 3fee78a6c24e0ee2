//! Owner's side: executes requests of forwarders on the volumes that this daemon has open.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, Geometry, Result};
use forebay_messenger::{Connection, Message, MessageRole};
use forebay_reactor::spawn;
use forebay_reactor::sync::Notify;

use crate::offer::VolumeOffer;
use crate::session::{AdmitRefused, OpenStep, OwnerSessions, PeerNumber, SessionKey};
use crate::wire::{
    self, ForwardAnswer, ForwardEvent, ForwardRefusal, ForwardRequest, KIND_REQUEST, SessionEndReason, StartId,
    VolumeRequest,
};

/// Owner's side of all forwarded volumes of a daemon.
#[derive(Default)]
pub struct ForwardHost {
    sessions: RefCell<OwnerSessions>,
    devices: RefCell<BTreeMap<String, Rc<dyn BlockDevice>>>,
    peers: RefCell<Vec<(PeerNumber, Connection)>>,
    next_peer: Cell<PeerNumber>,
    /// Signaled when a request has completed or a session has ended.
    changed: Notify,
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
        if !self.sessions.borrow_mut().offer(volume, term) {
            return Err(Error::new(ErrorKind::Exists, format!("offering volume {volume} to other daemons")));
        }
        self.devices.borrow_mut().insert(volume.to_owned(), device.clone());
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
            Ok(ForwardRequest::Open { volume, start, session }) => {
                self.open(connection, message, (peer, session), &volume, start);
            }
            Ok(ForwardRequest::Close { session }) => {
                self.sessions.borrow_mut().end_session((peer, session));
                self.changed.notify_all();
                post(connection, wire::reply(&message, ForwardAnswer::Done.encode()));
            }
            Ok(ForwardRequest::Volume { session, request }) => {
                self.execute(connection, message, (peer, session), request);
            }
        }
        true
    }

    /// Ends the sessions of a connection that has ended or whose peer has begun again.
    pub fn forget(&self, connection: &Connection) {
        let mut peers = self.peers.borrow_mut();
        let Some(at) = peers.iter().position(|(_, known)| known == connection) else { return };
        let (peer, _) = peers.swap_remove(at);
        self.sessions.borrow_mut().forget_peer(peer);
        self.changed.notify_all();
    }

    /// Ends all sessions of a start that the group has declared dead.  When this returns, nothing of it is being executed, and
    /// nothing ever will be.
    pub async fn end_start(self: &Rc<Self>, start: StartId) {
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
    pub(crate) fn announce_size(&self, volume: &str, geometry: Geometry) {
        let open = self.sessions.borrow().open_sessions(volume);
        for (peer, session) in open {
            if let Some(connection) = self.connection(peer) {
                let event = ForwardEvent::Size { session, geometry };
                post(&connection, wire::message(wire::KIND_EVENT, (event.encode(), Default::default())));
            }
        }
    }

    /// Tells forwarders that sessions have ended, each after the answers to its requests.
    fn announce_end(self: &Rc<Self>, ended: Vec<SessionKey>, why: &SessionEndReason) {
        self.changed.notify_all();
        for key in ended {
            let Some(connection) = self.connection(key.0) else { continue };
            let (host, event) = (self.clone(), ForwardEvent::Ended { session: key.1, why: why.clone() });
            drop(spawn(async move {
                host.changed.wait_until(|| !host.sessions.borrow().is_answering(key)).await;
                let message = wire::message(wire::KIND_EVENT, (event.encode(), Default::default()));
                // A connection that has ended needs none.
                let _ = connection.send(message).await;
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

    fn open(self: &Rc<Self>, connection: &Connection, message: Message, key: SessionKey, volume: &str, start: StartId) {
        let begun = self.sessions.borrow_mut().begin_open(key, volume, start);
        // Sessions may have ended.
        self.changed.notify_all();
        let (host, connection, volume) = (self.clone(), connection.clone(), volume.to_owned());
        drop(spawn(async move {
            let answer = match begun {
                Err(refusal) => ForwardAnswer::Refused(refusal),
                Ok(()) => host.opened(key, &volume).await,
            };
            // No other task has run since the session is open, so that no event of it is sent before.
            let _ = connection.send(wire::reply(&message, answer.encode())).await;
        }));
    }

    /// Waits until a session is open or refused.
    async fn opened(&self, key: SessionKey, volume: &str) -> ForwardAnswer {
        loop {
            let changed = self.changed.wait();
            let step = self.sessions.borrow_mut().open_step(key);
            match step {
                OpenStep::Wait => changed.await,
                OpenStep::Refuse(refusal) => return ForwardAnswer::Refused(refusal),
                OpenStep::Open { term } => {
                    let devices = self.devices.borrow();
                    let device = devices.get(volume).expect("an offered volume has a device");
                    return ForwardAnswer::Opened { term, geometry: device.geometry() };
                }
            }
        }
    }

    /// Executes a request, unless it is refused.
    fn execute(self: &Rc<Self>, connection: &Connection, message: Message, key: SessionKey, request: VolumeRequest) {
        let cost = request.cost();
        let admitted = self.sessions.borrow_mut().admit(key, cost);
        match admitted {
            Ok(()) => {}
            Err(AdmitRefused::TooMany) => {
                return self.violated(connection, &message, "more requests in flight than a session may have");
            }
            Err(AdmitRefused::Refusal(refusal)) => {
                return post(connection, wire::reply(&message, ForwardAnswer::Refused(refusal).encode()));
            }
        }
        let device = {
            let (sessions, devices) = (self.sessions.borrow(), self.devices.borrow());
            let volume = sessions.volume_of(key).expect("an open session");
            devices.get(volume).expect("an offered volume has a device").clone()
        };
        let (host, connection) = (self.clone(), connection.clone());
        drop(spawn(async move {
            let answer = match check(&device.geometry(), &request) {
                Ok(()) => executed(&*device, request).await,
                Err(error) => ForwardAnswer::Failed(error),
            };
            host.sessions.borrow_mut().executed(key);
            host.changed.notify_all();
            // The forwarder asks again if the connection has ended.
            let _ = connection.send(wire::reply(&message, answer.encode())).await;
            host.sessions.borrow_mut().answered(key, cost);
            host.changed.notify_all();
        }));
    }

    fn peer(&self, connection: &Connection) -> PeerNumber {
        let mut peers = self.peers.borrow_mut();
        if let Some((peer, _)) = peers.iter().find(|(_, known)| known == connection) {
            return *peer;
        }
        let peer = self.next_peer.get();
        self.next_peer.set(peer + 1);
        peers.push((peer, connection.clone()));
        peer
    }

    fn connection(&self, peer: PeerNumber) -> Option<Connection> {
        self.peers.borrow().iter().find(|(known, _)| *known == peer).map(|(_, connection)| connection.clone())
    }
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

async fn executed(device: &dyn BlockDevice, request: VolumeRequest) -> ForwardAnswer {
    let answer = match request {
        VolumeRequest::Map(extent) => device.map(extent).await.map(ForwardAnswer::Mapped),
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
