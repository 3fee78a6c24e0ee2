//! Configuration and results of a handshake.

use crate::wire::EntityAddr;
use crate::wire::control::{ClientIdent, Reconnect, ServerIdent};

/// Configuration of a client handshake.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Entity type of this side, of [`entity`](crate::wire::entity).
    pub entity: u8,
    /// Entity type required of the peer; `None` accepts any.
    pub peer_entity: Option<u8>,
    /// Addresses of this side.
    pub addrs: Vec<EntityAddr>,
    /// Address of the peer to reach.
    pub target: EntityAddr,
    /// Global ID of this side.
    pub gid: u64,
    /// Connection modes, of [`mode`](crate::wire::control::mode), most preferred first.
    pub modes: Vec<u32>,
    /// Message features supported by this side.
    pub supported: u64,
    /// Message features required of the peer.
    pub required: u64,
    /// Lossy session: no state is kept across reconnects.
    pub lossy: bool,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
}

/// Configuration of a server handshake.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Entity type of this side, of [`entity`](crate::wire::entity).
    pub entity: u8,
    /// Address of the client, as seen by this side.
    pub peer: EntityAddr,
    /// Connection modes that are accepted, of [`mode`](crate::wire::control::mode).
    pub modes: Vec<u32>,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
}

/// Identifiers and sequence numbers of a session that a client begins or resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resume {
    /// Session ID assigned by the client; zero for a lossy one.
    pub client_cookie: u64,
    /// Session ID assigned by the server; zero to begin one.
    pub server_cookie: u64,
    /// Sequence number of the client's connections.
    pub global_seq: u64,
    /// Number of attempts to reconnect this session.
    pub connect_seq: u64,
    /// Highest sequence number received.
    pub in_seq: u64,
}

/// Session request of an authenticated client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRequest {
    /// Request for a new session.
    Ident(ClientIdent),
    /// Request to resume a session.
    Reconnect(Reconnect),
}

/// Reply of a server to a session request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionReply {
    /// New session accepted.
    Ident(ServerIdent),
    /// Features that the client lacks.
    Missing(u64),
    /// Session resumed; the highest sequence number received.
    ReconnectOk(u64),
    /// Session unknown, or no longer known.
    Reset,
    /// Later reconnect attempt seen; its number.
    Retry(u64),
    /// Later connection seen; its number.
    RetryGlobal(u64),
}

/// Origin of a client's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionOrigin {
    /// New session.
    Fresh,
    /// Resumed session; the server has received everything up to this sequence number.
    Resumed(u64),
}

/// Result of the handshake, for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Established {
    /// New or resumed session.
    pub outcome: SessionOrigin,
    /// Reset by the server, if it has lost the session that was to be resumed: full (`true`), or only the server's
    /// half.
    pub reset: Option<bool>,
    /// Identifiers and numbers for the next resume.
    pub resume: Resume,
    /// Lossy session: no state is kept across reconnects.
    pub lossy: bool,
    /// Addresses of the server; empty for a resumed session.
    pub peer_addrs: Vec<EntityAddr>,
    /// Message features supported by both sides; zero for a resumed session.
    pub features: u64,
}

/// Progress of the handshake after parsing received bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeProgress {
    /// More bytes must be received.
    NeedInput,
    /// Server only: session request of the client; [`MessengerHandshake::answer`](super::MessengerHandshake::answer) is
    /// next.
    SessionRequest(SessionRequest),
    /// Client only: session established, new or resumed.
    Established(Box<Established>),
}
