//! A small NVMe/TCP initiator, for what a kernel does not do on request.
//!
//! [`codec`] writes and reads the transport's bytes after the specifications' figures, apart from the front's own wire
//! code on purpose.  [`auth`] is the host's side of DH-HMAC-CHAP.  [`client`] is a host on the reactor, which runs in the simulator as well.  The program `nvme-load`
//! measures a target.

pub mod auth;
pub mod client;
pub mod codec;
pub mod handshake;
pub mod target;
pub mod wire;
