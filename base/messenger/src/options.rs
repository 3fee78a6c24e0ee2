//! Options of a messenger endpoint.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::Network;

use crate::session::auth::{Named, NoAuth};
use crate::session::{AuthClient, AuthServer, Keyring, Policy, SharedKey, cephx, shared_key};
use crate::throttle::MessageBudget;
use crate::transport::TransportOptions;
use crate::wire::control::mode;
use crate::wire::{SegmentLimits, entity};

/// Authentication method of this endpoint, for outgoing and incoming connections.
#[derive(Debug, Clone)]
pub enum Auth {
    /// No authentication; only for peers on the local machine.
    None,
    /// Mutual proof of possession of a shared key.
    SharedKey {
        /// Name of this endpoint; the keyring of the peer that it connects to holds its key under this name.
        name: String,
        /// Key of this endpoint.
        key: SharedKey,
        /// Keys of the peers that may connect to this endpoint.
        keyring: Rc<Keyring>,
    },
    /// Cephx client of a Ceph cluster's monitors; accepts no incoming connections.
    Cephx {
        /// Entity ID: the part of the name after `client.`.
        id: String,
        /// Secret key of the client.
        secret: cephx::CephxSecret,
        /// Bit mask of the services to request tickets for, values of [`entity`].
        services: u32,
        /// Store that receives the tickets.
        ticket_store: Rc<cephx::TicketStore>,
    },
    /// Client of a Ceph cluster without authentication (`auth none`); accepts no incoming connections.
    Named {
        /// Entity ID: the part of the name after `client.`.
        id: String,
        /// Store that the global ID is written to and read from.
        ticket_store: Rc<cephx::TicketStore>,
        /// True for monitors, which assign the global ID.
        monitors: bool,
    },
    /// Client of a Ceph cluster's OSDs or managers, authenticated by a ticket; accepts no incoming connections.
    CephxService {
        /// Store that holds the ticket.
        ticket_store: Rc<cephx::TicketStore>,
        /// Service that the ticket is for, of [`entity`].
        service: u32,
    },
}

impl Auth {
    pub(crate) fn client(&self) -> Box<dyn AuthClient> {
        match self {
            Self::None => Box::new(NoAuth),
            Self::SharedKey { name, key, .. } => Box::new(shared_key::SharedKeyClient::new(name.clone(), key.clone())),
            Self::Cephx { id, secret, services, ticket_store } => {
                Box::new(cephx::CephxClient::new(id.clone(), secret.clone(), *services, ticket_store.clone()))
            }
            Self::Named { id, ticket_store, monitors } => {
                Box::new(Named::new(id.clone(), ticket_store.clone(), *monitors))
            }
            Self::CephxService { ticket_store, service } => {
                Box::new(cephx::Authorizer::new(ticket_store.clone(), *service))
            }
        }
    }

    pub(crate) fn server(&self) -> Box<dyn AuthServer> {
        match self {
            Self::None => Box::new(NoAuth),
            Self::SharedKey { name, keyring, .. } => {
                Box::new(shared_key::SharedKeyServer::new(name.clone(), keyring.clone()))
            }
            Self::Cephx { id, .. } => Box::new(shared_key::SharedKeyServer::new(id.clone(), Rc::default())),
            Self::Named { .. } | Self::CephxService { .. } => {
                Box::new(shared_key::SharedKeyServer::new(String::new(), Rc::default()))
            }
        }
    }

    /// Returns true if the peers are daemons of a Ceph cluster.
    pub(crate) fn is_ceph(&self) -> bool {
        matches!(self, Self::Cephx { .. } | Self::Named { .. } | Self::CephxService { .. })
    }
}

/// Options of a [`Messenger`](crate::Messenger).
#[derive(Debug, Clone)]
pub struct MessengerOptions {
    /// Entity type of this endpoint, of [`entity`].
    pub entity: u8,
    /// Entity type required of peers that this endpoint connects to; `None` accepts any.
    pub peer_entity: Option<u8>,
    /// Global ID of this endpoint; with cephx the ID assigned by the monitor replaces it.
    pub gid: u64,
    /// Nonce that distinguishes process instances at the same address; `None` picks a random one.  A Ceph cluster
    /// blocklists a client by its address and nonce: all messengers of one client share it.
    pub nonce: Option<u32>,
    /// Authentication method, for outgoing and incoming connections.
    pub auth: Auth,
    /// Connection modes, of [`mode`], most preferred first.  `None` means secure only; crc, then secure, for peers on
    /// this machine; and crc where there is no authentication.
    pub modes: Option<Vec<u32>>,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
    /// Message features supported by this endpoint.
    pub supported: u64,
    /// Message features required of the peer.
    pub required: u64,
    /// Maximum segment sizes in bytes.
    pub limits: SegmentLimits,
    /// Receive budget per peer: messages received and not yet dropped.
    pub receive: MessageBudget,
    /// Send budget per peer: messages waiting to be sent or, in a lossless session, to be acknowledged.
    pub send: MessageBudget,
    /// Policy for incoming connections that do not ask to be lossy.
    pub accept: Policy,
    /// Networks that peers may connect from; empty allows all.
    pub allow: Vec<Network>,
    /// Maximum number of connections, including those in standby.
    pub connections_max: usize,
    /// Maximum number of incoming connections that have not identified themselves yet.
    pub handshakes_max: usize,
    /// Timeout of a handshake.
    pub handshake_timeout: Duration,
    /// Silence after which a keepalive is sent to the peer.
    pub keepalive_interval: Duration,
    /// Silence after which the peer is considered dead.
    pub keepalive_timeout: Duration,
    /// Timeout of a frame, from its first byte to its last.
    pub frame_timeout: Duration,
    /// Initial delay before a lost stream is re-established ...
    pub backoff_min: Duration,
    /// ... and its upper bound; the delay doubles with each attempt.
    pub backoff_max: Duration,
    /// Time after which a client stops reconnecting; `None` retries until the connection is closed.
    pub give_up: Option<Duration>,
    /// Time that a server keeps the session of a disconnected client.
    pub session_timeout: Duration,
    /// Busy-poll time of a shared memory or RDMA side after its last work, before it sleeps.
    pub busy_poll: Duration,
    /// Local address of the RDMA device to use; `None` selects the device on the route to the peer.
    pub rdma_local: Option<IpAddr>,
}

impl Default for MessengerOptions {
    fn default() -> Self {
        Self {
            entity: entity::FOREBAY,
            peer_entity: None,
            gid: 0,
            nonce: None,
            auth: Auth::None,
            modes: None,
            checksum: true,
            supported: u64::MAX,
            required: 0,
            limits: SegmentLimits::default(),
            receive: MessageBudget { messages: 4096, bytes: 64 << 20 },
            send: MessageBudget { messages: 4096, bytes: 64 << 20 },
            accept: Policy::LosslessPeer,
            allow: Vec::new(),
            connections_max: 4096,
            handshakes_max: 256,
            handshake_timeout: Duration::from_secs(20),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(30),
            frame_timeout: Duration::from_secs(60),
            backoff_min: Duration::from_millis(50),
            backoff_max: Duration::from_secs(5),
            give_up: None,
            session_timeout: Duration::from_secs(600),
            busy_poll: Duration::from_micros(50),
            rdma_local: None,
        }
    }
}

impl MessengerOptions {
    pub(crate) fn transport(&self) -> TransportOptions {
        TransportOptions { busy_poll: self.busy_poll, rdma_local: self.rdma_local }
    }

    pub(crate) fn modes(&self, local: bool) -> Vec<u32> {
        match (&self.modes, &self.auth) {
            (Some(modes), _) => modes.clone(),
            (None, Auth::None | Auth::Named { .. }) => vec![mode::CRC],
            (None, _) if local => vec![mode::CRC, mode::SECURE],
            (None, _) => vec![mode::SECURE],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secure_mode_is_the_default_off_this_machine() {
        let key = SharedKey::new([0; 32]);
        let auth = Auth::SharedKey { name: "a".into(), key, keyring: Rc::default() };
        let options = MessengerOptions { auth, ..MessengerOptions::default() };
        assert_eq!(options.modes(false), [mode::SECURE]);
        assert_eq!(options.modes(true), [mode::CRC, mode::SECURE]);
        assert_eq!(MessengerOptions::default().modes(true), [mode::CRC]);
    }
}
