//! Protocol as pure state machines: bytes in, commands and bytes out, without I/O and without clocks.
//!
//! [`NvmeReceiver`] splits a connection's stream into [`NvmePdu`]s and validates them.  [`NvmeReplies`] gathers
//! outgoing PDUs.  [`Transfers`] tracks the data that was requested.  [`io`] translates I/O commands into device
//! actions. [`admin`] executes admin commands on a [`Controller`]'s state.  `docs/design/nvmf.md` has the states and
//! transitions.

pub mod admin;
pub mod auth;
mod controller;
pub mod io;
mod log;
mod pools;
pub mod psk;
mod receive;
mod reply;
pub mod secret;
mod transfer;

pub use controller::{AsyncEvent, Controller, ControllerType, FeatureValues, Power};
pub use pools::NvmePools;
pub use receive::{NvmePdu, NvmeReceiver, NvmeTcpParameters};
pub use reply::NvmeReplies;
pub use transfer::Transfers;

use forebay_tls::alert;

use crate::wire::pdu::{self, Fes};

/// Maximum bytes of in-capsule data of a command.
pub const IN_CAPSULE: usize = 16 * 1024;
/// Maximum bytes of data of one H2CData PDU (MAXH2CDATA).
pub const H2C_DATA_MAX: usize = 1024 * 1024;
/// Maximum bytes of data of one command (MDTS).
pub const TRANSFER_MAX: usize = 1024 * 1024;
/// Maximum entries of an I/O submission queue.
pub const QUEUE_ENTRIES_MAX: usize = 1024;
/// Maximum entries of an admin queue.
pub const ADMIN_ENTRIES_MAX: usize = 128;

/// Transport error of the host that ends the connection; reported to it with a C2HTermReq (tcp 3.5).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({fes:?})")]
pub struct Fatal {
    /// Fatal error status.
    pub fes: Fes,
    /// Additional information: the offset of a field, or the digest that was received.
    pub information: u32,
    /// Start of the offending PDU.
    pub header: Vec<u8>,
    /// Description for logs.
    pub text: &'static str,
    /// TLS ClientHello on a port without TLS; answered with a TLS alert.
    pub tls: bool,
}

impl Fatal {
    /// Creates an error in the PDU that begins with `header`.  Keeps as much of `header` as a TermReq holds.
    pub fn new(fes: Fes, information: u32, header: &[u8], text: &'static str) -> Self {
        let len = header.len().min(pdu::TERM_MAX - pdu::DATA_HEADER);
        Self { fes, information, header: header[..len].to_vec(), text, tls: false }
    }

    /// Creates the error for a ClientHello, which is not a PDU.
    fn hello(header: &[u8]) -> Self {
        Self { tls: true, ..Self::new(Fes::InvalidField, 0, header, "TLS on a port without it") }
    }

    /// Encodes the C2HTermReq PDU, or the TLS alert.
    pub fn encode(&self) -> Vec<u8> {
        if self.tls {
            return alert::record(alert::UNEXPECTED_MESSAGE).to_vec();
        }
        pdu::term(pdu::kind::C2H_TERM, self.fes, self.information, &self.header)
    }
}
