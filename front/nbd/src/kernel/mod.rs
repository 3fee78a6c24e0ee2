//! NBD client of the Linux kernel: its configuration over netlink, and the handshake of the sockets that it is given.
//!
//! The kernel speaks the transmission phase only.  The process that configures a device connects to the server, negotiates
//! ([`handshake`]), and passes the socket to the kernel in a message of the generic netlink family `nbd` ([`control`]).
//! Nothing here does I/O.

pub mod control;
pub mod handshake;
pub mod netlink;
