//! A small iSCSI initiator, for what others do not do on request.
//!
//! [`codec`] makes and reads PDUs, [`client`] is a session on the reactor.  [`plain`] is one on a socket of the
//! operating system: for `iscsi-load`, which measures a target, and `iscsi-say`, which sends what it is told.

#![warn(missing_docs)]

pub mod cdb;
pub mod client;
pub mod codec;
pub mod plain;
pub mod target;
