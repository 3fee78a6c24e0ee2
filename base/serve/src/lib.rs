//! What every front's server is made of, whatever its protocol: the list of its connections, the turns of a connection
//! that receives and sends at once, and the buffers that it receives into.
//!
//! ```text
//! Connections   accepts, knows who is there, ends them all          connections.rs
//! Bell          stops one connection, and wakes it to see that      connections.rs
//! exchange      one connection: receive, take in, send, again       exchange.rs
//! Staging       what was received and is not parsed yet             staging.rs
//! ```
//!
//! Nothing here knows a protocol.  [`Staging`] does no I/O, so that the pure parts of a front can stand on it.

mod connections;
mod exchange;
mod staging;

pub use connections::{Bell, Connections, Interrupted, Place};
pub use exchange::{Intake, Traffic, exchange, receive, send};
pub use staging::{LARGE, SMALL, Staging, StagingPools, Want};
