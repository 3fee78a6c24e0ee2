//! Protocol state machines: bytes and frames in, bytes and decisions out; no I/O, no clock, no random source of their
//! own.
//!
//! A [`Link`] is one connection from its banner to the agreement on a session; a [`Session`] is the state that survives
//! reconnects: sequence numbers, queued and unacknowledged messages.  The states and their transitions are in
//! `docs/design/messenger.md`.

pub mod auth;
pub mod cephx;
pub mod link;
pub mod shared_key;
pub mod state;

pub use auth::{AuthClient, AuthError, AuthServer, Keys, NoAuth, ServerStep};
pub use link::{Answer, Asked, ClientConfig, Established, Link, Outcome, Progress, Resume, ServerConfig};
pub use shared_key::{Key, Keyring};
pub use state::{Policy, Session};

use crate::wire::control::mode;
use crate::wire::{Malformed, SecretTooShort, Tag, WireError};

/// Protocol violation or mismatch that ends a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Frame that is malformed or corrupted.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Frame that is not allowed in the connection's state.
    #[error("a {tag:?} frame came while {state}")]
    Unexpected {
        /// Tag of the frame.
        tag: Tag,
        /// Current step of the connection.
        state: &'static str,
    },
    /// Protocol features that do not match.
    #[error("the peer's protocol lacks features {lacks:#x} and wants {wants:#x}")]
    Features {
        /// Features required by this side that the peer lacks.
        lacks: u64,
        /// Features required by the peer that this side lacks.
        wants: u64,
    },
    /// Message features that the peer lacks.
    #[error("the peer lacks features {0:#x} of messages")]
    MessageFeatures(u64),
    /// Message features required by the peer that this side lacks.
    #[error("the peer requires features {0:#x} of messages, which we lack")]
    FeaturesRequired(u64),
    /// Authentication method or modes rejected by the peer.
    #[error("the peer refuses method {method:#x} (error {result}); it takes methods {methods:?} in modes {modes:?}")]
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
    #[error("the peer picked mode {0}, which was not offered")]
    ModeNotOffered(u32),
    /// Authentication failure.
    #[error("authentication failed: {0}")]
    Auth(#[from] AuthError),
    /// Handshake signature mismatch: what was sent before authentication was changed in transit.
    #[error("the peer received something else than what was sent before it authenticated")]
    Signature,
    /// Connection secret that is too short.
    #[error(transparent)]
    Secret(#[from] SecretTooShort),
    /// Peer at that address that has another identity.
    #[error("the peer at {target} says it is at {found}")]
    WrongPeer {
        /// Address that was meant.
        target: String,
        /// Addresses that the peer claims.
        found: String,
    },
    /// Retry limit exceeded: the server keeps asking to retry.
    #[error("the peer asks to retry without end")]
    Retries,
    /// Connection race lost: the server is connecting to this side, and its connection wins.
    #[error("the peer asks to wait for its own connection")]
    Wait,
    /// Sequence number out of order: a message is missing, or the peer acknowledged one that was never sent.
    #[error("sequence number {got} came, and {expected} was expected")]
    Sequence {
        /// Number received.
        got: u64,
        /// Number expected, or the highest valid one.
        expected: u64,
    },
    /// Byte limit before authentication exceeded.
    #[error("more than {0} bytes came before authentication was done")]
    TooMuchBeforeAuth(usize),
}

impl From<Malformed> for Violation {
    fn from(error: Malformed) -> Self {
        Self::Wire(error.into())
    }
}
