//! Small NVMe/TCP initiator for tests, with features that a kernel does not offer.
//!
//! [`codec`] encodes and decodes the transport's PDUs after the specifications' figures, deliberately separate from the
//! front's own wire code.  [`auth`] is the host's side of DH-HMAC-CHAP.  [`client`] is a host on the reactor, which
//! also runs in the simulator.  The program `nvme-load` benchmarks a target.

pub mod auth;
pub mod client;
pub mod codec;
pub mod handshake;
pub mod target;
pub mod wire;
