//! Requests of the front-end.

use super::{IotlbChange, RingAddresses, SharedFileRange};
use crate::memory::RegionPlace;

/// Request of the front-end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrontEndMessage {
    /// `GET_FEATURES` request.
    GetFeatures,
    /// `SET_FEATURES` request, with the bits.
    SetFeatures(u64),
    /// `SET_OWNER` request.
    SetOwner,
    /// `RESET_OWNER` request.
    ResetOwner,
    /// `SET_MEM_TABLE` request.
    SetMemTable(Vec<RegionPlace>),
    /// `SET_LOG_BASE` request; without memory, if the feature is not enabled.
    SetLogBase(Option<SharedFileRange>),
    /// `SET_LOG_FD` request.
    SetLogFd,
    /// `SET_VRING_NUM` request.
    SetVringNum {
        /// Index of the ring.
        index: u32,
        /// Number of entries.
        size: u32,
    },
    /// `SET_VRING_ADDR` request.
    SetVringAddr {
        /// Index of the ring.
        index: u32,
        /// Addresses of its areas.
        addresses: RingAddresses,
    },
    /// `SET_VRING_BASE` request.
    SetVringBase {
        /// Index of the ring.
        index: u32,
        /// Next index.
        base: u32,
    },
    /// `GET_VRING_BASE` request.
    GetVringBase {
        /// Index of the ring.
        index: u32,
    },
    /// `SET_VRING_KICK` request.
    SetVringKick {
        /// Index of the ring.
        index: u32,
        /// Set if a descriptor comes with it.
        has_descriptor: bool,
    },
    /// `SET_VRING_CALL` request.
    SetVringCall {
        /// Index of the ring.
        index: u32,
        /// Set if a descriptor comes with it.
        has_descriptor: bool,
    },
    /// `SET_VRING_ERR` request.
    SetVringErr {
        /// Index of the ring.
        index: u32,
        /// Set if a descriptor comes with it.
        has_descriptor: bool,
    },
    /// `GET_PROTOCOL_FEATURES` request.
    GetProtocolFeatures,
    /// `SET_PROTOCOL_FEATURES` request, with the bits.
    SetProtocolFeatures(u64),
    /// `GET_QUEUE_NUM` request.
    GetQueueNum,
    /// `SET_VRING_ENABLE` request.
    SetVringEnable {
        /// Index of the ring.
        index: u32,
        /// Set if it is to be enabled.
        enable: bool,
    },
    /// `SET_BACKEND_REQ_FD` request.
    SetBackendReqFd,
    /// `IOTLB_MSG` request.
    Iotlb(IotlbChange),
    /// `GET_CONFIG` request.
    GetConfig {
        /// First byte.
        offset: u32,
        /// Length in bytes.
        len: u32,
        /// Flags, returned as they are.
        flags: u32,
    },
    /// `SET_CONFIG` request.
    SetConfig {
        /// First byte.
        offset: u32,
        /// Set if the content is restored by a migration, instead of written by the guest.
        is_migration: bool,
        /// Bytes to write.
        content: Vec<u8>,
    },
    /// Any of the requests of a migration by page faults.
    Postcopy,
    /// `GET_INFLIGHT_FD` request.
    GetInflight {
        /// Number of queues.
        queues: u16,
        /// Size of each.
        queue_size: u16,
    },
    /// `SET_INFLIGHT_FD` request.
    SetInflight {
        /// Location in the file.
        range: SharedFileRange,
        /// Number of queues.
        queues: u16,
        /// Size of each.
        queue_size: u16,
    },
    /// `RESET_DEVICE` request.
    ResetDevice,
    /// `GET_MAX_MEM_SLOTS` request.
    GetMaxMemSlots,
    /// `ADD_MEM_REG` request.
    AddMemReg(RegionPlace),
    /// `REM_MEM_REG` request.
    RemMemReg(RegionPlace),
}
