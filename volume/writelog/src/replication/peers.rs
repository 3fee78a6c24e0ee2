//! Peers that are known by their descriptions, and the connections to them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::LocalFuture;
use forebay_messenger::{Connection, ConnectionState, Message};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, now, spawn};

use super::hello::{KIND_HELLO, KIND_HELLO_ANSWER, PeerHello};
use super::{PeerId, RequestGroups};

/// Peer that has described itself over a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPeer {
    /// Its description.
    pub hello: PeerHello,
    /// Time that the last question for it took.
    pub round_trip: Option<Duration>,
}

/// Peers that are known by their descriptions.
///
/// A peer describes itself when a connection opens, over each connection: two daemons that connect to each other have two.
pub struct KnownPeers {
    own: PeerId,
    boot: [u8; 16],
    known: RefCell<Vec<(Connection, KnownPeer)>>,
    groups: Rc<RequestGroups>,
    noted: Notify,
}

/// Reason for which a name stands for no peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerUnknown {
    /// No peer has the name.
    #[error("no connected peer is called '{0}'")]
    NoSuch(String),
    /// Several peers have the name.
    #[error("several peers are called '{0}': {1}")]
    Several(String, String),
    /// The name is that of this peer.
    #[error("'{0}' is this daemon itself")]
    Own(String),
}

/// Returns whether a connection leads to the address that `name` is; `tcp:` may be left out.
pub fn is_at(connection: &Connection, name: &str) -> bool {
    let address = connection.address().to_string();
    address == name || address.strip_prefix("tcp:") == Some(name)
}

impl KnownPeers {
    /// Knows nobody yet.  `own` and `boot` are those of this peer.
    pub fn new(own: PeerId, boot: [u8; 16]) -> Self {
        Self { own, boot, known: RefCell::default(), groups: Rc::default(), noted: Notify::new() }
    }

    /// Returns this peer.
    pub fn own(&self) -> PeerId {
        self.own
    }

    /// Returns what sends requests of all logs of this core to a peer.
    pub fn groups(&self) -> Rc<RequestGroups> {
        self.groups.clone()
    }

    /// Asks for the description of the peer behind a connection, with the own one.
    pub fn ask(self: &Rc<Self>, connection: &Connection, own: &PeerHello) -> LocalFuture<()> {
        let (peers, connection) = (self.clone(), connection.clone());
        let message = Message::new(KIND_HELLO).front(Buf::copy_of(&own.encode()));
        Box::pin(async move {
            let asked = now();
            // A connection that ends is asked again when it opens.
            let Ok(answer) = connection.request(message).await else { return };
            if answer.kind == KIND_HELLO_ANSWER {
                peers.note(&connection, &answer.front.to_vec(), Some(asked.elapsed()));
            }
        })
    }

    /// Asks the peer behind a connection that has opened: it may be another process than before.
    pub fn opened(self: &Rc<Self>, connection: &Connection, own: &PeerHello) {
        self.forget(connection);
        drop(spawn(self.ask(connection, own)));
    }

    /// Returns the connections whose peers have described themselves.
    pub fn connections(&self) -> Vec<Connection> {
        self.known.borrow().iter().map(|(connection, _)| connection.clone()).collect()
    }

    /// Answers a question, which describes the one that asks; `own` is the answer.
    pub fn answer(&self, connection: &Connection, question: &Message, own: &PeerHello) {
        self.note(connection, &question.front.to_vec(), None);
        let answer = question.reply(KIND_HELLO_ANSWER).front(Buf::copy_of(&own.encode()));
        // Only a connection that has ended refuses it.
        let _ = connection.post(answer);
    }

    fn note(&self, connection: &Connection, hello: &[u8], round_trip: Option<Duration>) {
        let hello = match PeerHello::decode(hello) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!(peer = %connection.address(), %error, "a peer's description is malformed");
                return;
            }
        };
        let mut known = self.known.borrow_mut();
        let before = known.iter().position(|(other, _)| other == connection);
        let round_trip = round_trip.or_else(|| before.and_then(|at| known[at].1.round_trip));
        let (peer, host) = (hello.peer, hello.host.clone());
        let entry = (connection.clone(), KnownPeer { hello, round_trip });
        match before {
            Some(at) => known[at] = entry,
            None => known.push(entry),
        }
        self.noted.notify_all();
        if self.is_copied(&known, peer) {
            tracing::error!(
                %peer, host, address = %connection.address(),
                "two daemons have the same identity: one's data directory is a copy of the other's, or one was started \
                 again while its former connection is still open; it gets no replicas until one of them is gone"
            );
        }
    }

    /// Returns whether two daemons of one id are connected.  Which of them is the copy cannot be told.
    fn is_copied(&self, known: &[(Connection, KnownPeer)], peer: PeerId) -> bool {
        let open = known
            .iter()
            .filter(|(connection, found)| found.hello.peer == peer && connection.state() == ConnectionState::Open);
        let mut boots: Vec<[u8; 16]> = open.map(|(_, found)| found.hello.boot).collect();
        boots.extend((peer == self.own).then_some(self.boot));
        boots.windows(2).any(|two| two[0] != two[1])
    }

    /// Returns whether the daemon behind a connection has the id of another one.
    pub fn has_copied_identity(&self, connection: &Connection) -> bool {
        let known = self.known.borrow();
        let found = known.iter().find(|(other, _)| other == connection);
        found.is_some_and(|(_, found)| self.is_copied(&known, found.hello.peer))
    }

    /// Forgets a connection that has ended.
    pub fn forget(&self, connection: &Connection) {
        self.known.borrow_mut().retain(|(other, _)| other != connection);
    }

    /// Returns an open connection to a peer, if there is one.
    pub fn connection(&self, peer: PeerId) -> Option<Connection> {
        let known = self.known.borrow();
        let usable = |(connection, known): &&(Connection, KnownPeer)| {
            known.hello.peer == peer && connection.state() == ConnectionState::Open
        };
        known.iter().find(usable).filter(|_| !self.is_copied(&known, peer)).map(|(connection, _)| connection.clone())
    }

    /// Returns the description of the peer behind a connection.
    pub fn described(&self, connection: &Connection) -> Option<KnownPeer> {
        self.known.borrow().iter().find(|(other, _)| other == connection).map(|(_, known)| known.clone())
    }

    /// Returns the other peers that are connected, each once.
    pub fn list(&self) -> Vec<KnownPeer> {
        let mut all: Vec<KnownPeer> = Vec::new();
        let entries = self.known.borrow();
        for (connection, known) in &*entries {
            let (peer, open) = (known.hello.peer, connection.state() == ConnectionState::Open);
            if open
                && peer != self.own
                && !self.is_copied(&entries, peer)
                && !all.iter().any(|other| other.hello.peer == peer)
            {
                all.push(known.clone());
            }
        }
        all
    }

    /// Finds a peer by its host name, by an address that this daemon connects to, or by its id or the beginning of it, of 8
    /// digits at least.
    ///
    /// # Errors
    /// [`PeerUnknown`].
    pub fn find(&self, name: &str) -> Result<PeerId, PeerUnknown> {
        let mut found: Vec<(PeerId, String)> = Vec::new();
        for (connection, KnownPeer { hello, .. }) in &*self.known.borrow() {
            let (id, address) = (hello.peer.to_string(), connection.address().to_string());
            let named = hello.host == name || is_at(connection, name) || name.len() >= 8 && id.starts_with(name);
            if named && !found.iter().any(|(peer, _)| *peer == hello.peer) {
                found.push((hello.peer, format!("{id} at {address}")));
            }
        }
        match &found[..] {
            [(peer, _)] if *peer == self.own => Err(PeerUnknown::Own(name.into())),
            [(peer, _)] => Ok(*peer),
            [] => Err(PeerUnknown::NoSuch(name.into())),
            several => {
                let all: Vec<&str> = several.iter().map(|(_, text)| text.as_str()).collect();
                Err(PeerUnknown::Several(name.into(), all.join(", ")))
            }
        }
    }

    /// Waits until the peer behind a connection has described itself.
    pub async fn until_described(&self, connection: &Connection) {
        self.noted.wait_until(|| self.described(connection).is_some()).await;
    }

    /// Returns the host name of a peer, if it is known.
    pub fn host(&self, peer: PeerId) -> Option<String> {
        self.known
            .borrow()
            .iter()
            .find(|(_, known)| known.hello.peer == peer)
            .map(|(_, known)| known.hello.host.clone())
    }
}
