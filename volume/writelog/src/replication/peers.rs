//! Peers that are known by their descriptions, and the connections to them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::{Connection, ConnectionState, Message};
use forebay_reactor::{Buf, now, spawn};

use super::PeerId;
use super::hello::{KIND_HELLO, KIND_HELLO_ANSWER, PeerHello};

/// Peer that has described itself over a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPeer {
    /// Its description.
    pub hello: PeerHello,
    /// Time that the last question for it took.
    pub round_trip: Option<Duration>,
    /// Set if another process has the same id: its data directory was copied.
    pub is_copied: bool,
}

/// Peers that are known by their descriptions.
///
/// A peer describes itself when a connection opens, over each connection: two daemons that connect to each other have two.
pub struct KnownPeers {
    own: PeerId,
    boot: [u8; 16],
    known: RefCell<Vec<(Connection, KnownPeer)>>,
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

impl KnownPeers {
    /// Knows nobody yet.  `own` and `boot` are those of this peer.
    pub fn new(own: PeerId, boot: [u8; 16]) -> Self {
        Self { own, boot, known: RefCell::default() }
    }

    /// Returns this peer.
    pub fn own(&self) -> PeerId {
        self.own
    }

    /// Asks for the description of the peer behind a connection, with the own one.
    pub fn ask(self: &Rc<Self>, connection: &Connection, own: &PeerHello) {
        // Behind a connection that opens again may be another process.
        self.forget(connection);
        let (peers, connection) = (self.clone(), connection.clone());
        let message = Message::new(KIND_HELLO).front(Buf::copy_of(&own.encode()));
        drop(spawn(async move {
            let asked = now();
            // A connection that ends is asked again when it opens.
            let Ok(answer) = connection.request(message).await else { return };
            if answer.kind == KIND_HELLO_ANSWER {
                peers.note(&connection, &answer.front.to_vec(), Some(asked.elapsed()));
            }
        }));
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
        let mut is_copied = hello.peer == self.own && hello.boot != self.boot;
        // Which of them is the copy cannot be told: neither gets replicas.
        for (other, found) in known.iter_mut().filter(|(other, _)| other != connection) {
            let same = found.hello.peer == hello.peer && found.hello.boot != hello.boot;
            if same && other.state() == ConnectionState::Open {
                (is_copied, found.is_copied) = (true, true);
            }
        }
        if is_copied {
            tracing::error!(
                peer = %hello.peer, host = hello.host, address = %connection.address(),
                "two daemons have the same identity: one's data directory is a copy of the other's; it gets no replicas"
            );
        }
        let before = known.iter().position(|(other, _)| other == connection);
        let round_trip = round_trip.or_else(|| before.and_then(|at| known[at].1.round_trip));
        let entry = (connection.clone(), KnownPeer { hello, round_trip, is_copied });
        match before {
            Some(at) => known[at] = entry,
            None => known.push(entry),
        }
    }

    /// Forgets a connection that has ended.
    pub fn forget(&self, connection: &Connection) {
        self.known.borrow_mut().retain(|(other, _)| other != connection);
    }

    /// Returns an open connection to a peer, if there is one.
    pub fn connection(&self, peer: PeerId) -> Option<Connection> {
        let known = self.known.borrow();
        let usable = |(connection, known): &&(Connection, KnownPeer)| {
            known.hello.peer == peer && !known.is_copied && connection.state() == ConnectionState::Open
        };
        known.iter().find(usable).map(|(connection, _)| connection.clone())
    }

    /// Returns the description of the peer behind a connection.
    pub fn described(&self, connection: &Connection) -> Option<KnownPeer> {
        self.known.borrow().iter().find(|(other, _)| other == connection).map(|(_, known)| known.clone())
    }

    /// Returns the other peers that are connected, each once.
    pub fn list(&self) -> Vec<KnownPeer> {
        let mut all: Vec<KnownPeer> = Vec::new();
        for (connection, known) in &*self.known.borrow() {
            let (peer, open) = (known.hello.peer, connection.state() == ConnectionState::Open);
            if open && peer != self.own && !known.is_copied && !all.iter().any(|other| other.hello.peer == peer) {
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
            let by_address = address == name || address.strip_prefix("tcp:") == Some(name);
            let named = hello.host == name || by_address || name.len() >= 8 && id.starts_with(name);
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

    /// Returns the host name of a peer, if it is known.
    pub fn host(&self, peer: PeerId) -> Option<String> {
        self.known
            .borrow()
            .iter()
            .find(|(_, known)| known.hello.peer == peer)
            .map(|(_, known)| known.hello.host.clone())
    }
}
