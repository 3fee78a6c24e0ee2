//! Message header: the first segment of a message frame (`ceph_msg_header2`).

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::MalformedPayload;

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 41;

/// Flag in `MessageHeader::flags`: the message is complete.  Ceph's daemons require it.
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

/// Message header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MessageHeader {
    /// Sequence number of the message in its session and direction, from 1.
    pub seq: u64,
    /// Transaction ID that matches a reply with its request; chosen by the requester.
    pub tid: u64,
    /// Message type, in the number space of the messenger's user.
    pub kind: u16,
    /// Priority; higher goes first.
    pub priority: u16,
    /// Version of the encoding of the front segment.
    pub version: u16,
    /// Suggested offset in bytes of the data within a page; a hint.
    pub data_off: u16,
    /// Highest sequence number received in the other direction.
    pub ack_seq: u64,
    /// Flags: [`FLAG_COMPLETE`].
    pub flags: u8,
    /// Oldest decoder version that can read the front segment.
    pub compat_version: u16,
    /// Zero between Ceph's daemons; the role of the message between Forebay processes.
    pub reserved: u16,
}

impl MessageHeader {
    /// Encodes the header.
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

    /// Decodes a header of exactly [`HEADER_LEN`] bytes.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let raw =
            Raw::ref_from_bytes(bytes).map_err(|_| MalformedPayload { what: "a message's header", newer: None })?;
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
