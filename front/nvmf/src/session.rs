//! The protocol as pure state machines: bytes in, commands and bytes out, no I/O and no time.
//!
//! [`Receiver`] cuts a connection's stream into [`Pdu`]s and checks them; [`Replies`] gathers what goes back;
//! [`Transfers`] knows which data was asked for; [`io`] says what an I/O command asks of a device, and [`admin`] what
//! the admin queue answers, out of a [`Controller`]'s state.  `docs/design/nvmf.md` has the states and transitions.

pub mod admin;
pub mod auth;
mod controller;
pub mod io;
mod pools;
pub mod psk;
mod receive;
mod reply;
pub mod secret;
mod transfer;

pub use controller::{Controller, Event, Features, Kind, Power};
pub use pools::Pools;
pub use receive::{Agreed, Pdu, Receiver};
pub use reply::Replies;
pub use transfer::Transfers;

use forebay_tls::alert;

use crate::wire::pdu::{self, Fes};

/// Bytes of data that a command capsule may carry.
pub const IN_CAPSULE: usize = 16 * 1024;
/// Bytes of data that one H2CData may carry.
pub const H2C_DATA_MAX: usize = 1024 * 1024;
/// Bytes of data that one command may move (MDTS).
pub const TRANSFER_MAX: usize = 1024 * 1024;
/// Entries of a submission queue, at most.
pub const QUEUE_ENTRIES_MAX: usize = 1024;
/// Entries of an admin queue, at most.
pub const ADMIN_ENTRIES_MAX: usize = 128;

/// Why a connection is ended: the host broke a rule of the transport, and is told so with a C2HTermReq (tcp 3.5).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({fes:?})")]
pub struct Fatal {
    /// What kind of error.
    pub fes: Fes,
    /// More about it: an offset, or the digest that came.
    pub information: u32,
    /// The start of the PDU.
    pub header: Vec<u8>,
    /// In words.
    pub text: &'static str,
    /// The host speaks TLS where there is none, and is answered in it.
    pub tls: bool,
}

impl Fatal {
    /// An error in the PDU that begins with `header`.
    pub fn new(fes: Fes, information: u32, header: &[u8], text: &'static str) -> Self {
        let len = header.len().min(pdu::TERM_MAX - pdu::DATA_HEADER);
        Self { fes, information, header: header[..len].to_vec(), text, tls: false }
    }

    /// A ClientHello, which is no PDU.
    fn hello(header: &[u8]) -> Self {
        Self { tls: true, ..Self::new(Fes::InvalidField, 0, header, "TLS on a port without it") }
    }

    /// The PDU that tells the host, or the alert.
    pub fn encode(&self) -> Vec<u8> {
        if self.tls {
            return alert::record(alert::UNEXPECTED_MESSAGE).to_vec();
        }
        pdu::term(pdu::kind::C2H_TERM, self.fes, self.information, &self.header)
    }
}
