//! State machines of both sides, without I/O: [`OwnerSessions`] and [`ForwarderState`].

mod forwarder;
mod owner;

pub use forwarder::{AttemptEnd, ForwarderLimits, ForwarderState, OpenFailure, RequestToSend, Resolution};
pub use owner::{AdmitRefused, ForwardSessionKey, OpenStep, OwnerSessions, PeerNumber};
