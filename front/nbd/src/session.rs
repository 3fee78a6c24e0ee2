//! The protocol as pure state machines: bytes in, actions and bytes out, no I/O and no time.
//!
//! A connection passes through [`Negotiation`], which ends with what was [`Agreed`], and then through transmission:
//! [`Receiver`] cuts the stream into [`Command`]s and their payloads, [`Replies`] gathers what goes back.
//! `docs/design/nbd.md` has the states and their transitions.

mod command;
mod negotiation;
mod receive;
mod reply;

pub use command::{Action, Command, Rules};
pub use negotiation::{Agreed, Ask, Negotiation, Purpose, Step};
pub use receive::{Payload, Pools, Receiver};
pub use reply::{Origin, Replies, StatusRun};

use forebay_block::{Error, ErrorKind};

use crate::wire::{Errno, transmission};

/// Why a connection is ended: the peer broke a rule that leaves no way to answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Flags that were not offered.
    #[error("client flags {0:#x} were not offered")]
    ClientFlags(u32),
    /// What should be an option does not start as one.
    #[error("an option starts with {0:#x}")]
    OptionMagic(u64),
    /// An option with more data than is worth reading past.
    #[error("option {option} with {len} bytes of data")]
    OptionTooLong {
        /// The option.
        option: u32,
        /// Bytes it announced.
        len: u32,
    },
    /// The client goes on asking.
    #[error("more than {0} options")]
    TooManyOptions(u32),
    /// Without fixed newstyle, only one option exists.
    #[error("option {0} without fixed newstyle")]
    NotFixed(u32),
    /// `NBD_OPT_EXPORT_NAME` cannot be refused but by ending.
    #[error("NBD_OPT_EXPORT_NAME cannot be granted: {0}")]
    ExportName(String),
    /// What should be a request does not start as one.
    #[error("a request starts with {0:#x}")]
    RequestMagic(u32),
    /// A payload so long that it is not worth reading past.
    #[error("a payload of {0} bytes")]
    PayloadTooLong(u64),
}

/// How replies look in transmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplyStyle {
    /// 16-byte headers, an error number and no more.
    #[default]
    Simple,
    /// Chunks with 20-byte headers; simple replies where there is no payload.
    Structured,
    /// Chunks with 32-byte headers; requests have 64-bit lengths.
    Extended,
}

impl ReplyStyle {
    /// Replies consist of chunks, so that errors have a text and metadata can be asked for.
    pub fn has_chunks(self) -> bool {
        self != ReplyStyle::Simple
    }
}

/// An export as the protocol describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Canonical name; at most [`STRING_MAX`](crate::wire::STRING_MAX) bytes.
    pub name: String,
    /// A few words for people; may be empty.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Unit in which requests must be aligned, in bytes: a power of two up to 64 KiB.
    pub block_min: u32,
    /// Unit that is written efficiently, in bytes: a power of two, at least `block_min` and 512.
    pub block_preferred: u32,
    /// Longest payload of a read or write, in bytes.
    pub payload_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The medium turns.
    pub rotational: bool,
    /// A flush on one connection covers writes answered on all.
    pub multi_conn: bool,
    /// Zeroing that may leave holes is faster than writing zeroes.
    pub fast_zero: bool,
}

impl ExportInfo {
    /// The transmission flags, for a client that uses `replies`.
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

/// What failed, as far as the error value depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// A read, a trim, a status query, a flush.
    Other,
    /// A write, or zeroing.
    Write,
    /// Zeroing that was asked for only if it is fast.
    FastZero,
}

/// The protocol's error value ("Error values").
pub fn errno(error: &Error, failed: Failed) -> Errno {
    match error.kind() {
        ErrorKind::NoSpace => Errno::NoSpc,
        ErrorKind::OutOfRange if failed != Failed::Other => Errno::NoSpc,
        ErrorKind::OutOfRange | ErrorKind::Invalid | ErrorKind::Exists => Errno::Inval,
        ErrorKind::ReadOnly | ErrorKind::Denied => Errno::Perm,
        ErrorKind::Fenced | ErrorKind::ShuttingDown => Errno::Shutdown,
        // The document keeps ENOTSUP for this one case.
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
