//! State machines of both sides, without I/O: [`OwnerSessions`], [`ForwarderState`] and
//! [`ReceivedTables`].

mod forwarder;
mod owner;
mod tables;

pub use forwarder::{
    AttemptEnd, ForwarderLimits, ForwarderState, RequestToSend, Resolution, SessionFailure, lease_is_over,
};
pub use owner::{AdmitRefused, ForwardSessionKey, OpenStep, OwnerSessions, PeerNumber};
pub use tables::{ReceivedTable, ReceivedTables};
