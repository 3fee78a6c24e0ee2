//! Protocol state machines: bytes and frames in, bytes and decisions out; no I/O, no clock, no random source of their
//! own.
//!
//! A [`MessengerHandshake`] is one connection from its banner to the agreement on a session; a [`MessengerSession`] is
//! the state that survives reconnects: sequence numbers, queued and unacknowledged messages.  The states and their
//! transitions are in `docs/design/messenger.md`.

pub mod auth;
pub mod cephx;
pub mod handshake;
pub mod shared_key;
pub mod state;

pub use auth::{AuthClient, AuthError, AuthServer, NoAuth, ServerStep, SessionKeys};
pub use handshake::{
    ClientConfig, Established, HandshakeProgress, MessengerHandshake, Resume, ServerConfig, SessionOrigin,
    SessionReply, SessionRequest,
};
pub use shared_key::{Keyring, SharedKey};
pub use state::{MessengerSession, Policy};

use crate::wire::control::mode;
use crate::wire::{MalformedPayload, SecretTooShort, Tag, WireError};

/// Protocol violation or mismatch that ends a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionViolation {
    /// Frame that is malformed or corrupted.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Frame that is not allowed in the connection's state.
    #[error("unexpected {tag:?} frame while {state}")]
    Unexpected {
        /// Tag of the frame.
        tag: Tag,
        /// Current step of the connection.
        state: &'static str,
    },
    /// Protocol features that do not match.
    #[error("msgr2 features do not match: the peer lacks {lacks:#x} and requires {wants:#x}")]
    Features {
        /// Features required by this side that the peer lacks.
        lacks: u64,
        /// Features required by the peer that this side lacks.
        wants: u64,
    },
    /// Message features that the peer lacks.
    #[error("the peer lacks required message features {0:#x}")]
    MessageFeatures(u64),
    /// Message features required by the peer that this side lacks.
    #[error("the peer requires message features {0:#x}, which this side lacks")]
    FeaturesRequired(u64),
    /// Authentication method or modes rejected by the peer.
    #[error(
        "the peer refuses authentication method {method:#x} with error {result}; it accepts {methods:?} in modes {modes:?}"
    )]
    MethodRefused {
        /// Method that was requested.
        method: u32,
        /// Error number of the peer.
        result: i32,
        /// Methods that the peer accepts.
        methods: Vec<u32>,
        /// Modes that the peer accepts.
        modes: Vec<u32>,
    },
    /// Connection modes without overlap, whatever the authentication.
    #[error(
        "connection modes do not overlap: the peer accepts {}, we offer {}",
        mode::names(theirs),
        mode::names(ours)
    )]
    ModesDiffer {
        /// Modes offered by this side, of [`mode`].
        ours: Vec<u32>,
        /// Modes accepted by the peer.
        theirs: Vec<u32>,
    },
    /// Mode picked by the peer that was not offered.
    #[error("the peer selected connection mode {0}, which was not offered")]
    ModeNotOffered(u32),
    /// Authentication failure.
    #[error("authentication failed: {0}")]
    Auth(#[from] AuthError),
    /// Handshake signature mismatch: what was sent before authentication was changed in transit.
    #[error("handshake signature mismatch: bytes sent before authentication were changed in transit")]
    Signature,
    /// Connection secret that is too short.
    #[error(transparent)]
    Secret(#[from] SecretTooShort),
    /// Peer at that address that has another identity.
    #[error("wrong peer: expected {target}, found {found}")]
    WrongPeer {
        /// Address that was meant.
        target: String,
        /// Addresses that the peer claims.
        found: String,
    },
    /// Retry limit exceeded: the server keeps asking to retry.
    #[error("retry limit exceeded: the peer keeps asking to retry")]
    Retries,
    /// Connection race lost: the server is connecting to this side, and its connection wins.
    #[error("connection race lost: the peer is connecting to this side")]
    Wait,
    /// Sequence number out of order: a message is missing, or the peer acknowledged one that was never sent.
    #[error("unexpected sequence number {got}, expected {expected}")]
    Sequence {
        /// Number received.
        got: u64,
        /// Number expected, or the highest valid one.
        expected: u64,
    },
    /// Byte limit before authentication exceeded.
    #[error("more than {0} bytes received before authentication was complete")]
    TooMuchBeforeAuth(usize),
}

impl From<MalformedPayload> for SessionViolation {
    fn from(error: MalformedPayload) -> Self {
        Self::Wire(error.into())
    }
}
