//! Messages of vhost-user: bytes to types and back.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`.  All numbers are in the byte order of the machine, which is little-endian
//! on every machine that this crate supports.

mod front_end;
mod payload;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::memory::{MemoryAccess, RegionPlace};
pub use front_end::FrontEndMessage;

/// Bytes of a message's header.
pub const HEADER_LEN: usize = 12;
/// Maximum bytes of a message after its header; the longest that is known is a table of 64 regions.
pub const PAYLOAD_MAX: usize = 4096;
/// Maximum regions in one table; more are added one by one.
pub const TABLE_REGIONS_MAX: u32 = 8;
/// Maximum bytes of the configuration space.
pub const CONFIG_MAX: u32 = 256;

/// Version in the flags of every message.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// Feature bits of a device that belong to the transport (VIRTIO 1.2 section 6, and vhost).
pub mod feature {
    /// Writes to guest memory are logged (vhost).
    pub const LOG_ALL: u64 = 1 << 26;
    /// Descriptors may refer to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Interrupts and kicks are requested by index.
    pub const EVENT_INDEX: u64 = 1 << 29;
    /// Protocol features are negotiated (vhost-user).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Modern device.
    pub const VERSION_1: u64 = 1 << 32;
    /// Addresses of the device are translated by an IOMMU.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// Packed rings.
    pub const RING_PACKED: u64 = 1 << 34;
    /// Buffers are used in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Protocol feature bits.
pub mod protocol_feature {
    /// More than one queue.
    pub const MQ: u64 = 1;
    /// Dirty log in shared memory.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Acknowledgement of a message on request.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// Channel for messages of the back-end.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// Configuration space is read and written by messages.
    pub const CONFIG: u64 = 1 << 9;
    /// Record of requests in flight in shared memory.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// Reset of the device.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Regions of memory are added and removed one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Numbers of the front-end's requests.
pub mod request {
    /// Returns the feature bits.
    pub const GET_FEATURES: u32 = 1;
    /// Enables features.
    pub const SET_FEATURES: u32 = 2;
    /// Takes the device.
    pub const SET_OWNER: u32 = 3;
    /// Disables all rings; deprecated.
    pub const RESET_OWNER: u32 = 4;
    /// Replaces the table of memory.
    pub const SET_MEM_TABLE: u32 = 5;
    /// Sets the dirty log.
    pub const SET_LOG_BASE: u32 = 6;
    /// Sets the descriptor that is signalled when the log is written; unused.
    pub const SET_LOG_FD: u32 = 7;
    /// Sets a ring's size.
    pub const SET_VRING_NUM: u32 = 8;
    /// Sets a ring's addresses.
    pub const SET_VRING_ADDR: u32 = 9;
    /// Sets a ring's next index.
    pub const SET_VRING_BASE: u32 = 10;
    /// Stops a ring and returns its next index.
    pub const GET_VRING_BASE: u32 = 11;
    /// Sets the descriptor for kicks.
    pub const SET_VRING_KICK: u32 = 12;
    /// Sets the descriptor for interrupts.
    pub const SET_VRING_CALL: u32 = 13;
    /// Sets the descriptor for errors.
    pub const SET_VRING_ERR: u32 = 14;
    /// Returns the protocol feature bits.
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// Enables protocol features.
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// Returns the maximum number of queues.
    pub const GET_QUEUE_NUM: u32 = 17;
    /// Enables or disables a ring.
    pub const SET_VRING_ENABLE: u32 = 18;
    /// Sets the channel for the back-end's messages.
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    /// Changes the IOMMU's table.
    pub const IOTLB_MSG: u32 = 22;
    /// Reads the configuration space.
    pub const GET_CONFIG: u32 = 24;
    /// Writes the configuration space.
    pub const SET_CONFIG: u32 = 25;
    /// Begins a migration by page faults.
    pub const POSTCOPY_ADVISE: u32 = 28;
    /// Continues a migration by page faults.
    pub const POSTCOPY_LISTEN: u32 = 29;
    /// Ends a migration by page faults.
    pub const POSTCOPY_END: u32 = 30;
    /// Returns a region for the record of requests in flight.
    pub const GET_INFLIGHT_FD: u32 = 31;
    /// Sets the region of the record of requests in flight.
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// Resets the device.
    pub const RESET_DEVICE: u32 = 34;
    /// Returns the maximum number of memory regions.
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    /// Adds a region of memory.
    pub const ADD_MEM_REG: u32 = 37;
    /// Removes a region of memory.
    pub const REM_MEM_REG: u32 = 38;

    /// Message of the back-end: a translation is missing.
    pub const BACKEND_IOTLB_MSG: u32 = 1;
    /// Message of the back-end: the configuration space has changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// Message that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VhostMalformed {
    /// Header of another version of the protocol.
    #[error("message {request} has version {version}; only version 1 is supported")]
    Version {
        /// Number of the request.
        request: u32,
        /// Version in its flags.
        version: u32,
    },
    /// Reply where a request was expected.
    #[error("message {0} is a reply to a request that was not made")]
    Reply(u32),
    /// Payload longer than any message's.
    #[error("message {request} of {len} bytes; the maximum is {PAYLOAD_MAX}")]
    TooLong {
        /// Number of the request.
        request: u32,
        /// Length of its payload in bytes.
        len: u32,
    },
    /// Payload of another length than the request has.
    #[error("message {request} has {len} bytes; {expected} were expected")]
    Length {
        /// Number of the request.
        request: u32,
        /// Length of its payload in bytes.
        len: usize,
        /// Length that it should have.
        expected: usize,
    },
    /// Field with a value that has no meaning.
    #[error("message {request}: {what}")]
    Field {
        /// Number of the request.
        request: u32,
        /// Field, its value, and what it may be.
        what: String,
    },
    /// Request that is not known.
    #[error("request {0} is not supported")]
    Unknown(u32),
}

/// Header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VhostHeader {
    /// Number of the request.
    pub request: u32,
    /// Set for the reply to a request.
    pub is_reply: bool,
    /// Set if the sender wants an acknowledgement.
    pub needs_reply: bool,
    /// Bytes that follow.
    pub len: u32,
}

impl VhostHeader {
    fn parse_any(bytes: &[u8; HEADER_LEN]) -> Result<Self, VhostMalformed> {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (request, flags, len) = (number(0), number(4), number(8));
        if flags & VERSION_MASK != VERSION {
            return Err(VhostMalformed::Version { request, version: flags & VERSION_MASK });
        }
        if len as usize > PAYLOAD_MAX {
            return Err(VhostMalformed::TooLong { request, len });
        }
        Ok(Self { request, is_reply: flags & FLAG_REPLY != 0, needs_reply: flags & FLAG_NEED_REPLY != 0, len })
    }

    /// Parses the header of a request.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, VhostMalformed> {
        let header = Self::parse_any(bytes)?;
        if header.is_reply { Err(VhostMalformed::Reply(header.request)) } else { Ok(header) }
    }

    /// Parses the header of a reply to a message of the back-end.
    pub fn parse_reply(bytes: &[u8; HEADER_LEN]) -> Result<Self, VhostMalformed> {
        let header = Self::parse_any(bytes)?;
        if header.is_reply {
            return Ok(header);
        }
        let what = "a reply was expected".to_owned();
        Err(VhostMalformed::Field { request: header.request, what })
    }

    /// Returns the bytes of the header.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let reply = if self.is_reply { FLAG_REPLY } else { 0 };
        let needs_reply = if self.needs_reply { FLAG_NEED_REPLY } else { 0 };
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&self.request.to_le_bytes());
        bytes[4..8].copy_from_slice(&(VERSION | reply | needs_reply).to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }
}

/// Returns a reply to a request.
pub fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    message(VhostHeader { request, is_reply: true, needs_reply: false, len: payload.len() as u32 }, payload)
}

/// Returns a message of the back-end.
pub fn backend_message(request: u32, payload: &[u8], needs_reply: bool) -> Vec<u8> {
    message(VhostHeader { request, is_reply: false, needs_reply, len: payload.len() as u32 }, payload)
}

fn message(header: VhostHeader, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireRegion {
    guest: U64,
    len: U64,
    user: U64,
    file_offset: U64,
}

impl WireRegion {
    const LEN: usize = size_of::<Self>();

    fn place(&self) -> RegionPlace {
        let (guest, len) = (self.guest.get(), self.len.get());
        RegionPlace { guest, len, user: self.user.get(), file_offset: self.file_offset.get() }
    }
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireRing {
    index: U32,
    flags: U32,
    descriptors: U64,
    used: U64,
    available: U64,
    log: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireIotlb {
    iova: U64,
    len: U64,
    user: U64,
    access: u8,
    kind: u8,
    pad: [u8; 6],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireInflight {
    len: U64,
    offset: U64,
    queues: U16,
    queue_size: U16,
}

const _: () = assert!(WireRegion::LEN == 32 && size_of::<WireRing>() == 40);
const _: () = assert!(size_of::<WireIotlb>() == 32 && size_of::<WireInflight>() == 20);

/// Bytes of an in-flight description without the padding that QEMU's compiler adds at its end.
const INFLIGHT_LEN: usize = size_of::<WireInflight>();
/// Bytes of a configuration message before the content.
const CONFIG_HEAD: usize = 12;

/// Addresses of a ring: user addresses, or I/O virtual ones behind an IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, or the packed ring.
    pub descriptors: u64,
    /// Available ring; the driver's event area of a packed ring.
    pub driver: u64,
    /// Used ring; the device's event area of a packed ring.
    pub device: u64,
}

/// Shared memory of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedFileRange {
    /// Length in bytes.
    pub len: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

/// Change of the IOMMU's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IotlbChange {
    /// Adds a translation.
    Update {
        /// First I/O virtual address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First user address.
        user: u64,
        /// Allowed accesses.
        access: MemoryAccess,
    },
    /// Removes the translations of a range.
    Invalidate {
        /// First I/O virtual address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
}

mod iotlb_kind {
    pub(super) const MISS: u8 = 1;
    pub(super) const UPDATE: u8 = 2;
    pub(super) const INVALIDATE: u8 = 3;
}

/// Returns the payload of a reply with a number.
pub fn number(number: u64) -> [u8; 8] {
    number.to_le_bytes()
}

/// Returns the payload of a reply with a ring's next index.
pub fn ring_base(index: u32, base: u32) -> [u8; 8] {
    number(u64::from(index) | u64::from(base) << 32)
}

/// Returns the payload of a reply with content of the configuration space.
pub fn config(offset: u32, flags: u32, content: &[u8]) -> Vec<u8> {
    let head = [offset, content.len() as u32, flags].map(u32::to_le_bytes).concat();
    [head.as_slice(), content].concat()
}

/// Returns the payload of a reply with the region for the record of requests in flight.
pub fn inflight(range: SharedFileRange, queues: u16, queue_size: u16) -> Vec<u8> {
    let (len, offset) = (range.len.into(), range.offset.into());
    let message = WireInflight { len, offset, queues: queues.into(), queue_size: queue_size.into() };
    // QEMU reads a structure that its compiler has padded.
    [message.as_bytes(), &[0; 4]].concat()
}

/// Returns the payload of the back-end's message that a translation is missing.
pub fn iotlb_miss(iova: u64, access: MemoryAccess) -> Vec<u8> {
    let access = match access {
        MemoryAccess::Read => 1,
        MemoryAccess::Write => 2,
        MemoryAccess::ReadWrite => 3,
    };
    let (len, user) = (0.into(), 0.into());
    let message = WireIotlb { iova: iova.into(), len, user, access, kind: iotlb_kind::MISS, pad: [0; 6] };
    message.as_bytes().to_vec()
}
