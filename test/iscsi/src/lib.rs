//! Small iSCSI initiator for tests, with features that common initiators do not offer.
//!
//! [`codec`] encodes and decodes PDUs, [`client`] is a session on the reactor.  [`plain`] is a session on an operating
//! system socket: for `iscsi-load`, which benchmarks a target, and `iscsi-say`, which sends given commands.

#![warn(missing_docs)]

pub mod cdb;
pub mod client;
pub mod codec;
pub mod plain;
pub mod target;
