//! The header of a message: the first segment of its frame (`ceph_msg_header2`).

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::Malformed;

/// Bytes of a header.
pub const HEADER_LEN: usize = 41;

/// `Header::flags`: the message is whole.  Ceph's daemons expect it.
pub const FLAG_COMPLETE: u8 = 1;

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    seq: U64,
    tid: U64,
    kind: U16,
    priority: U16,
    version: U16,
    data_pre_padding_len: U32,
    data_off: U16,
    ack_seq: U64,
    flags: u8,
    compat_version: U16,
    reserved: U16,
}

const _: () = assert!(size_of::<Raw>() == HEADER_LEN);

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// Counts the messages of a session in this direction, from 1.
    pub seq: u64,
    /// Matches a reply with its request; chosen by who asks.
    pub tid: u64,
    /// What the message is, in the space of whoever uses the messenger.
    pub kind: u16,
    /// Higher goes first.
    pub priority: u16,
    /// Of the encoding of the front segment.
    pub version: u16,
    /// Where the data is meant to begin within a page, in bytes; a hint.
    pub data_off: u16,
    /// The highest sequence number received in the other direction.
    pub ack_seq: u64,
    /// [`FLAG_COMPLETE`].
    pub flags: u8,
    /// The oldest version that can read the front segment.
    pub compat_version: u16,
    /// Zero between Ceph's daemons; between our own, whether it asks or answers.
    pub reserved: u16,
}

impl Header {
    /// The bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let raw = Raw {
            seq: self.seq.into(),
            tid: self.tid.into(),
            kind: self.kind.into(),
            priority: self.priority.into(),
            version: self.version.into(),
            data_pre_padding_len: 0.into(),
            data_off: self.data_off.into(),
            ack_seq: self.ack_seq.into(),
            flags: self.flags,
            compat_version: self.compat_version.into(),
            reserved: self.reserved.into(),
        };
        zerocopy::transmute!(raw)
    }

    /// Reads one, from exactly its bytes.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let raw = Raw::ref_from_bytes(bytes).map_err(|_| Malformed { what: "a message's header" })?;
        Ok(Self {
            seq: raw.seq.get(),
            tid: raw.tid.get(),
            kind: raw.kind.get(),
            priority: raw.priority.get(),
            version: raw.version.get(),
            data_off: raw.data_off.get(),
            ack_seq: raw.ack_seq.get(),
            flags: raw.flags,
            compat_version: raw.compat_version.get(),
            reserved: raw.reserved.get(),
        })
    }
}
