//! The protocol's state machines: bytes and frames in, bytes and decisions out; no I/O, no time, no chance of its own.
//!
//! A [`Link`] is one connection from its banner to the point where both sides agree on a session; [`Session`] is what
//! outlives connections: sequence numbers, what is queued and what is not acknowledged yet.  The states and their
//! transitions are in `docs/design/messenger.md`.

pub mod auth;
pub mod cephx;
pub mod link;
pub mod shared_key;
pub mod state;

pub use auth::{AuthClient, AuthError, AuthServer, Keys, NoAuth, ServerStep};
pub use link::{Answer, Asked, ClientConfig, Established, Link, Outcome, Progress, Resume, ServerConfig};
pub use shared_key::{Key, Keyring};
pub use state::{Policy, Session};

use crate::wire::{Malformed, SecretTooShort, Tag, WireError};

/// Why a connection is ended: the peer broke a rule, or is not whom we talk to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// It is not this protocol, or not intact.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A frame that has no place in the connection's state.
    #[error("a {tag:?} frame came while {state}")]
    Unexpected {
        /// Which frame.
        tag: Tag,
        /// What was going on.
        state: &'static str,
    },
    /// The two versions of the protocol do not fit.
    #[error("the peer's protocol lacks features {lacks:#x} and wants {wants:#x}")]
    Features {
        /// What we require and it lacks.
        lacks: u64,
        /// What it requires and we lack.
        wants: u64,
    },
    /// The peer's messages lack features.
    #[error("the peer lacks features {0:#x} of messages")]
    MessageFeatures(u64),
    /// The peer refuses our method of authentication or our modes.
    #[error("the peer refuses method {method:#x} (error {result}); it takes methods {methods:?} in modes {modes:?}")]
    MethodRefused {
        /// What we asked for.
        method: u32,
        /// Its error number.
        result: i32,
        /// What it takes.
        methods: Vec<u32>,
        /// Of these.
        modes: Vec<u32>,
    },
    /// The peer picked a mode that was not offered.
    #[error("the peer picked mode {0}, which was not offered")]
    ModeNotOffered(u32),
    /// The peer is not who it says it is.
    #[error("authentication failed: {0}")]
    Auth(#[from] AuthError),
    /// What was said before authentication was changed on the way.
    #[error("the peer received something else than what was sent before it authenticated")]
    Signature,
    /// The connection's secret is too short.
    #[error(transparent)]
    Secret(#[from] SecretTooShort),
    /// Somebody else answered at that address.
    #[error("the peer at {target} says it is at {found}")]
    WrongPeer {
        /// Whom we meant.
        target: String,
        /// Who it is.
        found: String,
    },
    /// The server keeps telling us to try again.
    #[error("the peer asks to retry without end")]
    Retries,
    /// The server is connecting to us, and its connection is to win.
    #[error("the peer asks to wait for its own connection")]
    Wait,
    /// A message was left out, or the peer acknowledges what was never sent.
    #[error("sequence number {got} came, and {expected} was expected")]
    Sequence {
        /// What came.
        got: u64,
        /// What could have.
        expected: u64,
    },
    /// So much was said before authentication that it cannot be in earnest.
    #[error("more than {0} bytes came before authentication was done")]
    TooMuchBeforeAuth(usize),
}

impl From<Malformed> for Violation {
    fn from(error: Malformed) -> Self {
        Self::Wire(error.into())
    }
}
