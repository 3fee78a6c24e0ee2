//! State machines of both sides, without I/O: [`OwnerSessions`] and [`ForwarderState`].

mod forwarder;
mod owner;

pub use forwarder::{AttemptEnd, ForwarderLimits, ForwarderState, RequestToSend, Resolution, SessionFailure};
pub use owner::{AdmitRefused, ForwardSessionKey, OpenStep, OwnerSessions, PeerNumber};
