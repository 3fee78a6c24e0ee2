//! Protocol as pure state machines: bytes in, actions and bytes out, without I/O and without clocks.
//!
//! A connection passes through [`Negotiation`], which ends with the [`NbdParameters`] parameters, and then through
//! transmission: [`NbdReceiver`] splits the stream into [`NbdCommand`]s and their payloads, [`NbdReplies`] gathers
//! outgoing replies.
//! `docs/design/nbd.md` has the states and their transitions.

mod command;
mod negotiation;
mod receive;
mod reply;

pub use command::{NbdAction, NbdCommand, NbdRules};
pub use negotiation::{NbdParameters, Negotiation, NegotiationQuery, NegotiationStep, Purpose, Tls};
pub use receive::{NbdPools, NbdReceiver, Payload};
pub use reply::{NbdReplies, Origin, StatusRun};

use forebay_block::{Error, ErrorKind};

use crate::wire::{Errno, transmission};

/// Protocol error of the peer that ends the connection, since it cannot be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NbdViolation {
    /// Client flags that were not offered.
    #[error("client flags {0:#x} were not offered")]
    ClientFlags(u32),
    /// Wrong magic number of an option.
    #[error("option with wrong magic {0:#x}")]
    OptionMagic(u64),
    /// Option with too much data to skip.
    #[error("option {option} with {len} bytes of data is too long")]
    OptionTooLong {
        /// Option code.
        option: u32,
        /// Announced length in bytes.
        len: u32,
    },
    /// Too many options.
    #[error("more than {0} options in one negotiation")]
    TooManyOptions(u32),
    /// Option other than `NBD_OPT_EXPORT_NAME` without fixed newstyle.
    #[error("option {0} requires fixed newstyle negotiation")]
    NotFixed(u32),
    /// Refused `NBD_OPT_EXPORT_NAME`, for which the protocol has no error reply.
    #[error("NBD_OPT_EXPORT_NAME cannot be granted: {0}")]
    ExportName(String),
    /// Wrong magic number of a request.
    #[error("request with wrong magic {0:#x}")]
    RequestMagic(u32),
    /// Payload too long to skip, in bytes.
    #[error("request payload of {0} bytes is too long")]
    PayloadTooLong(u64),
}

/// Format of replies in transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplyStyle {
    /// Simple replies: 16-byte headers and an error number only.
    #[default]
    Simple,
    /// Structured replies: chunks with 20-byte headers; simple replies where there is no payload.
    Structured,
    /// Extended replies: chunks with 32-byte headers; requests have 64-bit lengths.
    Extended,
}

impl ReplyStyle {
    /// Returns whether replies consist of chunks, so that errors have a text and metadata contexts are available.
    pub fn has_chunks(self) -> bool {
        self != ReplyStyle::Simple
    }
}

/// Export properties for negotiation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Canonical name; at most [`STRING_MAX`](crate::wire::STRING_MAX) bytes.
    pub name: String,
    /// Description for people; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Minimum block size in bytes, to which requests must be aligned: a power of two up to 64 KiB.
    pub block_min: u32,
    /// Preferred block size in bytes: a power of two, at least `block_min` and 512.
    pub block_preferred: u32,
    /// Maximum payload of a read or write, in bytes.
    pub payload_max: u32,
    /// Writes are rejected.
    pub read_only: bool,
    /// Rotational medium.
    pub rotational: bool,
    /// A flush on one connection covers writes acknowledged on all.
    pub multi_conn: bool,
    /// Zeroing that may leave holes is faster than writing zeroes.
    pub fast_zero: bool,
}

impl ExportInfo {
    /// Returns the transmission flags, for a client that uses `replies`.
    pub fn transmission_flags(&self, replies: ReplyStyle) -> u16 {
        use transmission::*;
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA;
        for (bit, set) in [
            (READ_ONLY, self.read_only),
            (ROTATIONAL, self.rotational),
            (SEND_TRIM | SEND_WRITE_ZEROES, !self.read_only),
            (SEND_FAST_ZERO, !self.read_only && self.fast_zero),
            (CAN_MULTI_CONN, self.multi_conn),
            (SEND_DF, replies.has_chunks()),
        ] {
            if set {
                flags |= bit;
            }
        }
        flags
    }
}

/// Class of a failed request, as far as the error value depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// Read, trim, status query or flush.
    Other,
    /// Write, or write zeroes.
    Write,
    /// Write zeroes with the fast-zero flag.
    FastZero,
}

/// Returns the protocol's error value ("Error values").
pub fn errno(error: &Error, failed: Failed) -> Errno {
    match error.kind() {
        ErrorKind::NoSpace => Errno::NoSpc,
        ErrorKind::OutOfRange if failed != Failed::Other => Errno::NoSpc,
        ErrorKind::OutOfRange | ErrorKind::Invalid | ErrorKind::Exists => Errno::Inval,
        ErrorKind::ReadOnly | ErrorKind::Denied => Errno::Perm,
        ErrorKind::Fenced | ErrorKind::ShuttingDown => Errno::Shutdown,
        // The protocol document reserves ENOTSUP for this case.
        ErrorKind::Unsupported if failed == Failed::FastZero => Errno::NotSup,
        ErrorKind::Unsupported => Errno::Inval,
        ErrorKind::NotFound
        | ErrorKind::Io
        | ErrorKind::Corrupt
        | ErrorKind::Busy
        | ErrorKind::Mismatch(_)
        | ErrorKind::Guard
        | ErrorKind::TimedOut => Errno::Io,
    }
}
