//! Wire format of the NBD protocol: magic numbers, codes, and the fixed parts of each message.
//!
//! Integers are big-endian.  Section names in the comments are those of the protocol document, `doc/proto.md`.
//! Lengths and counts from a peer are not validated here: readers of a header must bound them.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic number at the start of the greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Magic number of the greeting's second field and of each option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic number of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic number of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic number of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Magic number of a chunk of an extended reply.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Maximum bytes of a string of the protocol ("Conventions").
pub const STRING_MAX: usize = 4096;
/// Bytes of zeroes after the reply to `NBD_OPT_EXPORT_NAME`, unless the client disabled them.
pub const EXPORT_NAME_PADDING: usize = 124;
/// Maximum payload in bytes that every peer accepts ("Size constraints").
pub const PAYLOAD_MAX_DEFAULT: u32 = 32 * 1024 * 1024;
/// Maximum value of an advertised minimum block size, in bytes.
pub const BLOCK_MIN_MAX: u32 = 64 * 1024;
/// Only supported metadata context.
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
    /// Read-only export: writes are rejected.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Rotational medium.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// `NBD_CMD_TRIM` supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE` supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` supported; only with structured or extended replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes acknowledged on all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Option codes.
pub mod option {
    /// Selection of an export; can be refused only by disconnecting.
    pub const EXPORT_NAME: u32 = 1;
    /// End of the negotiation.
    pub const ABORT: u32 = 2;
    /// List of exports.
    pub const LIST: u32 = 3;
    /// Upgrade to TLS.
    pub const STARTTLS: u32 = 5;
    /// Query of an export's properties.
    pub const INFO: u32 = 6;
    /// Selection of an export.
    pub const GO: u32 = 7;
    /// Use of structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List of metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selection of metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use of 32-byte headers with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod rep {
    const ERR: u32 = 1 << 31;
    /// Reply that acknowledges an option.
    pub const ACK: u32 = 1;
    /// Entry of the export list.
    pub const SERVER: u32 = 2;
    /// Property of an export.
    pub const INFO: u32 = 3;
    /// Metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = ERR + 1;
    /// Option or export forbidden by policy.
    pub const ERR_POLICY: u32 = ERR + 2;
    /// Malformed option, or not valid at this point.
    pub const ERR_INVALID: u32 = ERR + 3;
    /// Not supported on this platform.
    pub const ERR_PLATFORM: u32 = ERR + 4;
    /// TLS required first.
    pub const ERR_TLS_REQD: u32 = ERR + 5;
    /// Export not available.
    pub const ERR_UNKNOWN: u32 = ERR + 6;
    /// Server shutting down.
    pub const ERR_SHUTDOWN: u32 = ERR + 7;
    /// Request too large to process.
    pub const ERR_TOO_BIG: u32 = ERR + 9;
    /// Extended headers already in force.
    pub const ERR_EXT_HEADER_REQD: u32 = ERR + 10;
}

/// Information types of `NBD_OPT_INFO` and `NBD_OPT_GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Request types.
pub mod command {
    /// Read command.
    pub const READ: u16 = 0;
    /// Write command.
    pub const WRITE: u16 = 1;
    /// Disconnect; has no reply.
    pub const DISC: u16 = 2;
    /// Flush command.
    pub const FLUSH: u16 = 3;
    /// Discard command.
    pub const TRIM: u16 = 4;
    /// Read ahead.
    pub const CACHE: u16 = 5;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Query of the allocation status.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Request flags.
pub mod command_flag {
    /// Durable before it is acknowledged.
    pub const FUA: u16 = 1 << 0;
    /// Zeroed space must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// At most one content chunk.
    pub const DF: u16 = 1 << 2;
    /// At most one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail unless it is faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// Payload length in the header's length field; only with extended headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Reply chunk types and flags.
pub mod chunk {
    /// Flag: last chunk of its reply.
    pub const DONE: u16 = 1 << 0;
    /// Chunk without content.
    pub const NONE: u16 = 0;
    /// Data read.
    pub const OFFSET_DATA: u16 = 1;
    /// Hole of zeroes read.
    pub const OFFSET_HOLE: u16 = 2;
    /// Allocation status.
    pub const BLOCK_STATUS: u16 = 5;
    /// Allocation status with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Error chunk.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// Error at a known offset.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Extent state flags of `base:allocation`.
pub mod state {
    /// Unallocated extent.
    pub const HOLE: u32 = 1 << 0;
    /// Extent that reads as zeroes.
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
    /// Returns the number on the wire.
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
    /// Greeting of the server.
    Greeting, 18, {
        /// Magic number, [`GREETING_MAGIC`].
        magic: U64,
        /// Magic number, [`OPTION_MAGIC`].
        option_magic: U64,
        /// [`handshake`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// Header of an option.
    OptionHeader, 16, {
        /// Magic number, [`OPTION_MAGIC`].
        magic: U64,
        /// One of [`option`].
        option: U32,
        /// Bytes of data that follow.
        len: U32,
    }
}
wire_struct! {
    /// Header of a reply to an option.
    OptionReply, 20, {
        /// Magic number, [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// Option that is answered.
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
        /// Size of the export in bytes.
        size: U64,
        /// [`transmission`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// Information `NBD_INFO_EXPORT`.
    InfoExport, 12, {
        /// Information type, [`info::EXPORT`].
        kind: U16,
        /// Size of the export in bytes.
        size: U64,
        /// [`transmission`] flags.
        flags: U16,
    }
}
wire_struct! {
    /// Information `NBD_INFO_BLOCK_SIZE`.
    InfoBlockSize, 14, {
        /// Information type, [`info::BLOCK_SIZE`].
        kind: U16,
        /// Minimum block size and alignment in bytes.
        minimum: U32,
        /// Preferred block size in bytes.
        preferred: U32,
        /// Maximum payload in bytes.
        maximum: U32,
    }
}
wire_struct! {
    /// Compact request.
    RequestHeader, 28, {
        /// Magic number, [`REQUEST_MAGIC`].
        magic: U32,
        /// Command flags, of [`command_flag`].
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// Cookie, repeated in the reply.
        cookie: U64,
        /// Offset of the first byte.
        offset: U64,
        /// Length in bytes.
        len: U32,
    }
}
wire_struct! {
    /// Extended request.
    ExtendedRequestHeader, 32, {
        /// Magic number, [`EXTENDED_REQUEST_MAGIC`].
        magic: U32,
        /// Command flags, of [`command_flag`].
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// Cookie, repeated in the reply.
        cookie: U64,
        /// Offset of the first byte.
        offset: U64,
        /// Length in bytes, of the payload or of the effect.
        len: U64,
    }
}
wire_struct! {
    /// Simple reply.
    SimpleReply, 16, {
        /// Magic number, [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// Zero or an [`Errno`].
        error: U32,
        /// Cookie of the request.
        cookie: U64,
    }
}
wire_struct! {
    /// Header of a chunk of a structured reply.
    ChunkHeader, 20, {
        /// Magic number, [`CHUNK_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or 0.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// Cookie of the request.
        cookie: U64,
        /// Bytes of payload that follow.
        len: U32,
    }
}
wire_struct! {
    /// Header of a chunk of an extended reply.
    ExtendedChunkHeader, 32, {
        /// Magic number, [`EXTENDED_CHUNK_MAGIC`].
        magic: U32,
        /// [`chunk::DONE`] or 0.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// Cookie of the request.
        cookie: U64,
        /// Offset of the request.
        offset: U64,
        /// Bytes of payload that follow.
        len: U64,
    }
}
wire_struct! {
    /// Payload of [`chunk::OFFSET_HOLE`].
    HolePayload, 12, {
        /// Offset of the first byte.
        offset: U64,
        /// Bytes of zeroes.
        len: U32,
    }
}
wire_struct! {
    /// Start of the payload of an error chunk; followed by the text, and for [`chunk::ERROR_OFFSET`] by the offset.
    ErrorPayload, 6, {
        /// Error value, an [`Errno`].
        error: U32,
        /// Bytes of text that follow.
        len: U16,
    }
}
wire_struct! {
    /// Extent in the payload of [`chunk::BLOCK_STATUS`].
    Descriptor, 8, {
        /// Length in bytes.
        len: U32,
        /// [`state`] flags.
        state: U32,
    }
}
wire_struct! {
    /// Start of the payload of [`chunk::BLOCK_STATUS_EXT`].
    ExtendedStatusHead, 8, {
        /// Metadata context id.
        context: U32,
        /// Number of descriptors that follow.
        count: U32,
    }
}
wire_struct! {
    /// Extent in the payload of [`chunk::BLOCK_STATUS_EXT`].
    ExtendedDescriptor, 16, {
        /// Length in bytes.
        len: U64,
        /// [`state`] flags.
        state: U64,
    }
}

/// Copies the fixed part `T` from the start of `bytes`, and returns its length too; `None` if there are too few
/// bytes yet.
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
