//! The bytes of the NBD protocol: magic numbers, codes, and the fixed parts of each message.
//!
//! All integers are big-endian.  Section names in the comments are those of the protocol document, `doc/proto.md`.
//! Lengths and counts that a peer states are not trusted here: whoever reads a header bounds them.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First number of the greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second number of the greeting, and first of each option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First number of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First number of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First number of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First number of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// First number of a chunk of an extended reply.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// The longest string of the protocol in bytes ("Conventions").
pub const STRING_MAX: usize = 4096;
/// Bytes of zeroes after the reply to `NBD_OPT_EXPORT_NAME`, unless the client did not want them.
pub const EXPORT_NAME_PADDING: usize = 124;
/// The longest payload that every peer takes ("Size constraints").
pub const PAYLOAD_MAX_DEFAULT: u32 = 32 * 1024 * 1024;
/// The largest minimum block size that may be advertised.
pub const BLOCK_MIN_MAX: u32 = 64 * 1024;
/// The one metadata context that exists here.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Handshake flags, both sides ("Handshake flags", "Client flags").
pub mod handshake {
    /// Fixed newstyle negotiation.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No zeroes after the reply to `NBD_OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The medium turns.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// `NBD_CMD_TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE` work.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` works; only with structured or extended replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes answered on all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Options a client can send.
pub mod option {
    /// Choose an export; cannot fail but by disconnecting.
    pub const EXPORT_NAME: u32 = 1;
    /// Say goodbye.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Upgrade to TLS.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Choose an export.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 32-byte headers with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod rep {
    const ERR: u32 = 1 << 31;
    /// It is done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// One fact of an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = ERR + 1;
    /// The option is known and forbidden.
    pub const ERR_POLICY: u32 = ERR + 2;
    /// The option is malformed, or not valid at this point.
    pub const ERR_INVALID: u32 = ERR + 3;
    /// Not to be had on this platform.
    pub const ERR_PLATFORM: u32 = ERR + 4;
    /// The export is not available.
    pub const ERR_UNKNOWN: u32 = ERR + 6;
    /// The server is closing down.
    pub const ERR_SHUTDOWN: u32 = ERR + 7;
    /// The request is too large to process.
    pub const ERR_TOO_BIG: u32 = ERR + 9;
    /// Extended headers are already in force.
    pub const ERR_EXT_HEADER_REQD: u32 = ERR + 10;
}

/// Facts of an export, asked for and answered in `NBD_OPT_INFO` and `NBD_OPT_GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Types of requests.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect; not answered.
    pub const DISC: u16 = 2;
    /// Flush.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Read ahead.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask what is allocated.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod command_flag {
    /// Durable before it is answered.
    pub const FUA: u16 = 1 << 0;
    /// The zeroed space must stay reserved.
    pub const NO_HOLE: u16 = 1 << 1;
    /// At most one content chunk.
    pub const DF: u16 = 1 << 2;
    /// At most one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Only if it is faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload; only with extended headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types and flags of reply chunks.
pub mod chunk {
    /// Flag: the last chunk of its reply.
    pub const DONE: u16 = 1 << 0;
    /// Nothing more to say.
    pub const NONE: u16 = 0;
    /// Bytes read.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes read.
    pub const OFFSET_HOLE: u16 = 2;
    /// What is allocated.
    pub const BLOCK_STATUS: u16 = 5;
    /// What is allocated, with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// It failed.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// It failed at a known place.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// States of an extent in `base:allocation`.
pub mod state {
    /// Nothing is allocated.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Error values of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Operation not permitted.
    Perm = 1,
    /// Input/output error.
    Io = 5,
    /// Cannot allocate memory.
    NoMem = 12,
    /// Invalid argument.
    Inval = 22,
    /// No space left on device.
    NoSpc = 28,
    /// Value too large.
    Overflow = 75,
    /// Operation not supported.
    NotSup = 95,
    /// Server is in the process of being shut down.
    Shutdown = 108,
}

impl Errno {
    /// The number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }
}

macro_rules! wire_struct {
    ($(#[$doc:meta])* $name:ident, $size:literal, { $($(#[$field_doc:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

wire_struct! {
    /// What the server says first.
    Greeting, 18, {
        /// [`GREETING_MAGIC`].
        magic: U64,
        /// [`OPTION_MAGIC`].
        option_magic: U64,
        /// [`handshake`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// Head of an option.
    OptionHeader, 16, {
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// One of [`option`].
        option: U32,
        /// Bytes of data that follow.
        len: U32,
    }
}
wire_struct! {
    /// Head of a reply to an option.
    OptionReply, 20, {
        /// [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// The option it answers.
        option: U32,
        /// One of [`rep`].
        kind: U32,
        /// Bytes of data that follow.
        len: U32,
    }
}
wire_struct! {
    /// Reply to `NBD_OPT_EXPORT_NAME`, before the padding.
    ExportNameReply, 10, {
        /// The export's size in bytes.
        size: U64,
        /// [`transmission`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// The fact `NBD_INFO_EXPORT`.
    InfoExport, 12, {
        /// [`info::EXPORT`].
        kind: U16,
        /// The export's size in bytes.
        size: U64,
        /// [`transmission`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// The fact `NBD_INFO_BLOCK_SIZE`.
    InfoBlockSize, 14, {
        /// [`info::BLOCK_SIZE`].
        kind: U16,
        /// Smallest unit and alignment in bytes.
        minimum: U32,
        /// Efficient unit in bytes.
        preferred: U32,
        /// Longest payload in bytes.
        maximum: U32,
    }
}
wire_struct! {
    /// A compact request.
    RequestHeader, 28, {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// [`command_flag`]s.
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// Repeated in the reply.
        cookie: U64,
        /// First byte.
        offset: U64,
        /// Bytes.
        len: U32,
    }
}
wire_struct! {
    /// An extended request.
    ExtendedRequestHeader, 32, {
        /// [`EXTENDED_REQUEST_MAGIC`].
        magic: U32,
        /// [`command_flag`]s.
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// Repeated in the reply.
        cookie: U64,
        /// First byte.
        offset: U64,
        /// Bytes of payload, or of effect.
        len: U64,
    }
}
wire_struct! {
    /// A simple reply.
    SimpleReply, 16, {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// Zero or an [`Errno`].
        error: U32,
        /// The request's.
        cookie: U64,
    }
}
wire_struct! {
    /// Head of a chunk of a structured reply.
    ChunkHeader, 20, {
        /// [`CHUNK_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or nothing.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// The request's.
        cookie: U64,
        /// Bytes of payload that follow.
        len: U32,
    }
}
wire_struct! {
    /// Head of a chunk of an extended reply.
    ExtendedChunkHeader, 32, {
        /// [`EXTENDED_CHUNK_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or nothing.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// The request's.
        cookie: U64,
        /// The request's.
        offset: U64,
        /// Bytes of payload that follow.
        len: U64,
    }
}
wire_struct! {
    /// Payload of [`chunk::OFFSET_HOLE`].
    HolePayload, 12, {
        /// First byte.
        offset: U64,
        /// Bytes of zeroes.
        len: U32,
    }
}
wire_struct! {
    /// Start of the payload of an error chunk; the text follows, then for [`chunk::ERROR_OFFSET`] the place.
    ErrorPayload, 6, {
        /// An [`Errno`].
        error: U32,
        /// Bytes of text.
        len: U16,
    }
}
wire_struct! {
    /// One extent in the payload of [`chunk::BLOCK_STATUS`].
    Descriptor, 8, {
        /// Bytes.
        len: U32,
        /// [`state`] flags.
        state: U32,
    }
}
wire_struct! {
    /// Start of the payload of [`chunk::BLOCK_STATUS_EXT`].
    ExtendedStatusHead, 8, {
        /// The metadata context.
        context: U32,
        /// Descriptors that follow.
        count: U32,
    }
}
wire_struct! {
    /// One extent in the payload of [`chunk::BLOCK_STATUS_EXT`].
    ExtendedDescriptor, 16, {
        /// Bytes.
        len: U64,
        /// [`state`] flags.
        state: U64,
    }
}

/// The fixed part at the start of `bytes`, and its length; `None` when there are too few bytes yet.
pub fn prefix<T: FromBytes + KnownLayout + Immutable + Unaligned + Copy>(bytes: &[u8]) -> Option<(T, usize)> {
    T::ref_from_prefix(bytes).ok().map(|(head, _)| (*head, size_of::<T>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magic_numbers_are_the_documents() {
        assert_eq!(&GREETING_MAGIC.to_be_bytes(), b"NBDMAGIC");
        assert_eq!(&OPTION_MAGIC.to_be_bytes(), b"IHAVEOPT");
        assert_eq!(rep::ERR_EXT_HEADER_REQD, 0x8000_000a);
    }

    #[test]
    fn a_request_is_read_from_its_bytes() {
        let bytes: [u8; 28] =
            [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0];
        let (head, len) = prefix::<RequestHeader>(&bytes).expect("28 bytes");
        assert_eq!(len, 28);
        assert_eq!(head.magic.get(), REQUEST_MAGIC);
        assert_eq!((head.flags.get(), head.kind.get()), (command_flag::FUA, command::WRITE_ZEROES));
        assert_eq!(head.cookie.get(), 0x0102_0304_0506_0708);
        assert_eq!((head.offset.get(), head.len.get()), (4096, 512));
        assert!(prefix::<RequestHeader>(&bytes[..27]).is_none());
    }
}
