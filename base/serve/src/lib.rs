//! Protocol-independent parts of a front's server: the connection list, the send and receive loop of a connection, its
//! receive buffers, and counters of its requests.
//!
//! ```text
//! Connections   accepts, lists and ends connections          connections.rs
//! StopSignal    stops one connection, and wakes it to see that      connections.rs
//! exchange      one connection: receive, take in, send, again       exchange.rs
//! Staging       what was received and is not parsed yet             staging.rs
//! SecureStream  TLS beneath a connection (feature `tls`)            secure.rs
//! ServedCounters    requests, their latency and bytes               counters.rs
//! ```
//!
//! No part knows a protocol.  [`ReceiveStaging`] does no I/O, so that the I/O-free parts of a front can use it.

mod connections;
mod counters;
mod exchange;
#[cfg(feature = "tls")]
pub mod secure;
mod staging;

pub use connections::{ConnectionEntry, ConnectionStopSignal, Interrupted, ServerConnections};
pub use counters::{Histogram, MovedBytes, ServedCounters, ServedCounts, SingleWriterCounter};
pub use exchange::{ConnectionHandler, Intake, exchange, receive, send};
pub use staging::{LARGE, ReceiveRequest, ReceiveStaging, SMALL, StagingPools};
