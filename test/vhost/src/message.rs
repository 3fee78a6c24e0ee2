//! Messages of vhost-user (QEMU's docs/interop/vhost-user.rst), as bytes.

use std::os::fd::OwnedFd;

/// Requests of the front-end ("Front-end message types").
#[allow(missing_docs)]
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SEND_RARP: u32 = 19;
    pub const NET_SET_MTU: u32 = 20;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const IOTLB_MSG: u32 = 22;
    pub const SET_VRING_ENDIAN: u32 = 23;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const CREATE_CRYPTO_SESSION: u32 = 26;
    pub const CLOSE_CRYPTO_SESSION: u32 = 27;
    pub const POSTCOPY_ADVISE: u32 = 28;
    pub const POSTCOPY_LISTEN: u32 = 29;
    pub const POSTCOPY_END: u32 = 30;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const GPU_SET_SOCKET: u32 = 33;
    pub const RESET_DEVICE: u32 = 34;
    pub const VRING_KICK: u32 = 35;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    pub const GET_SHARED_OBJECT: u32 = 41;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
}

/// Requests of the back-end ("Back-end message types").
#[allow(missing_docs)]
pub mod backend_request {
    pub const IOTLB_MSG: u32 = 1;
    pub const CONFIG_CHANGE_MSG: u32 = 2;
    pub const VRING_HOST_NOTIFIER_MSG: u32 = 3;
    pub const VRING_CALL: u32 = 4;
    pub const VRING_ERR: u32 = 5;
}

/// Protocol features, as masks ("Protocol features").
#[allow(missing_docs)]
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const PAGEFAULT: u64 = 1 << 8;
    pub const CONFIG: u64 = 1 << 9;
    pub const BACKEND_SEND_FD: u64 = 1 << 10;
    pub const HOST_NOTIFIER: u64 = 1 << 11;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const INBAND_NOTIFICATIONS: u64 = 1 << 14;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    /// Features that a [`FrontEnd`](crate::FrontEnd) uses where they are offered.
    pub const KNOWN: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Device features, as masks (VIRTIO 1.2, 5.2.3, 5.6.3 and 6).
#[allow(missing_docs)]
pub mod feature {
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Requests of virtio-scsi with data in both directions.
    pub const SCSI_INOUT: u64 = 1 << 0;
    /// Events of virtio-scsi about units that come and go.
    pub const SCSI_HOTPLUG: u64 = 1 << 1;
    /// Events of virtio-scsi about changed parameters of units.
    pub const SCSI_CHANGE: u64 = 1 << 2;
    /// Protection information in requests of virtio-scsi.
    pub const SCSI_T10_PI: u64 = 1 << 3;
    /// Log of dirty pages, of vhost.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Protocol features are negotiated, of vhost-user.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    pub const RING_PACKED: u64 = 1 << 34;
    pub const IN_ORDER: u64 = 1 << 35;
    /// Features of virtio-blk and of virtqueues that a driver can have in common with a device.
    pub const BLOCK: u64 = SIZE_MAX
        | SEG_MAX
        | RO
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | CONFIG_WCE
        | MQ
        | DISCARD
        | WRITE_ZEROES
        | PROTOCOL_FEATURES
        | VERSION_1;
    /// Features of virtio-scsi and of virtqueues that a driver can have in common with a device.
    pub const SCSI: u64 = SCSI_INOUT | SCSI_HOTPLUG | SCSI_CHANGE | PROTOCOL_FEATURES | VERSION_1;
}

/// Version 1, the only one, in a message's flags.
pub const VERSION: u32 = 1;
/// Reply, in a message's flags.
pub const REPLY: u32 = 1 << 2;
/// Request for an acknowledgement, in a message's flags.
pub const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a message's header.
pub const HEADER: usize = 12;
/// Flag of SET_VRING_KICK, CALL and ERR: no descriptor follows.
pub const NO_DESCRIPTOR: u64 = 1 << 8;

/// Received message.
#[derive(Debug)]
pub struct FrontEndMessage {
    /// Number of the request.
    pub request: u32,
    /// Version, and flags.
    pub flags: u32,
    /// Bytes after the header.
    pub payload: Vec<u8>,
    /// Descriptors that came with the message.
    pub descriptors: Vec<OwnedFd>,
}

impl FrontEndMessage {
    /// Returns the payload as a number; `None` if it has another size.
    pub fn number(&self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.payload.as_slice().try_into().ok()?))
    }

    /// Returns the payload as a vring state: index and number; `None` if it has another size.
    pub fn state(&self) -> Option<(u32, u32)> {
        let [index, number] = [self.payload.get(..4)?, self.payload.get(4..)?];
        Some((u32::from_ne_bytes(index.try_into().ok()?), u32::from_ne_bytes(number.try_into().ok()?)))
    }
}

/// Encodes a message.
pub fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    header(request, flags, payload.len() as u32, payload)
}

/// Encodes a message whose header tells any size.
pub fn header(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    for word in [request, flags, size] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(payload);
    bytes
}

/// Encodes a vring state: the index of a queue and a number.
pub fn state(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// Payload of SET_VRING_ADDR; ring addresses are user addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Index of the queue.
    pub index: u32,
    /// Flags; 1 asks for a log of the used ring's pages.
    pub flags: u32,
    /// Address of the descriptor table, or of the packed ring.
    pub descriptors: u64,
    /// Address of the used ring, or of the packed device area.
    pub used: u64,
    /// Address of the available ring, or of the packed driver area.
    pub available: u64,
    /// Guest address of the used ring, for the log.
    pub log: u64,
}

impl RingAddresses {
    /// Encodes the payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = state(self.index, self.flags);
        for address in [self.descriptors, self.used, self.available, self.log] {
            bytes.extend(address.to_ne_bytes());
        }
        bytes
    }
}

/// Description of a memory region, as in SET_MEM_TABLE.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegionDescription {
    /// Guest address.
    pub guest: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address in the front-end's address space.
    pub user: u64,
    /// Offset in the file.
    pub offset: u64,
}

impl RegionDescription {
    fn words(&self) -> impl Iterator<Item = u8> + use<> {
        [self.guest, self.size, self.user, self.offset].into_iter().flat_map(u64::to_ne_bytes)
    }

    /// Encodes the payload of ADD_MEM_REG and REM_MEM_REG.
    pub fn encode(&self) -> Vec<u8> {
        [0; 8].into_iter().chain(self.words()).collect()
    }
}

/// Encodes the payload of SET_MEM_TABLE, with any number of regions in its first word.
pub fn memory_table(count: u32, regions: &[RegionDescription]) -> Vec<u8> {
    let mut bytes = state(count, 0);
    bytes.extend(regions.iter().flat_map(RegionDescription::words));
    bytes
}

/// Encodes the payload of SET_LOG_BASE.
pub fn log(size: u64, offset: u64) -> Vec<u8> {
    [size.to_ne_bytes(), offset.to_ne_bytes()].concat()
}

/// Encodes the payload of GET_CONFIG and SET_CONFIG, with any size in its header.
pub fn config(offset: u32, size: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut payload = state(offset, size);
    payload.extend(flags.to_ne_bytes());
    payload.extend(bytes);
    payload
}

/// Description of a region that tracks requests in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InflightDescription {
    /// Size in bytes.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Entries of a queue.
    pub queue_size: u16,
}

impl InflightDescription {
    /// Encodes the payload of GET_INFLIGHT_FD and SET_INFLIGHT_FD.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = log(self.size, self.offset);
        bytes.extend(self.queues.to_ne_bytes());
        bytes.extend(self.queue_size.to_ne_bytes());
        // Padding as C has it in QEMU, DPDK and rust-vmm.
        bytes.extend([0; 4]);
        bytes
    }

    /// Decodes the payload; `None` if it is too short.
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_ne_bytes(payload.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u16::from_ne_bytes(payload.get(at..at + 2)?.try_into().ok()?));
        Some(Self { size: long(0)?, offset: long(8)?, queues: short(16)?, queue_size: short(18)? })
    }
}

/// Message about a translation of I/O addresses ("An IOTLB message").
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IotlbMessage {
    /// I/O address.
    pub iova: u64,
    /// Size in bytes.
    pub size: u64,
    /// User address.
    pub user: u64,
    /// 1 for read access, 2 for write access, 3 for both.
    pub permissions: u8,
    /// 1 for a miss, 2 for an update, 3 for an invalidation, 4 for a failed access.
    pub kind: u8,
}

impl IotlbMessage {
    /// Encodes the payload, padded to 32 bytes as C does.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = [self.iova, self.size, self.user].into_iter().flat_map(u64::to_ne_bytes).collect();
        bytes.extend([self.permissions, self.kind, 0, 0, 0, 0, 0, 0]);
        bytes
    }

    /// Decodes the payload; `None` if it is too short.
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_ne_bytes(payload.get(at..at + 8)?.try_into().ok()?));
        let byte = |at: usize| payload.get(at).copied();
        Some(Self { iova: long(0)?, size: long(8)?, user: long(16)?, permissions: byte(24)?, kind: byte(25)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_have_the_sizes_of_the_specification() {
        let region = RegionDescription { guest: 1, size: 2, user: 3, offset: 4 };
        assert_eq!(memory_table(2, &[region, region]).len(), 8 + 2 * 32);
        assert_eq!(region.encode().len(), 40);
        assert_eq!(RingAddresses::default().encode().len(), 40);
        assert_eq!(config(0, 60, 0, &[0; 60]).len(), 72);
        assert_eq!(encode(request::SET_OWNER, VERSION, &[]).len(), HEADER);
        assert_eq!(IotlbMessage::default().encode().len(), 32);
    }

    #[test]
    fn descriptions_are_decoded_as_they_were_encoded() {
        let inflight = InflightDescription { size: 5, offset: 6, queues: 7, queue_size: 8 };
        assert_eq!(InflightDescription::decode(&inflight.encode()), Some(inflight));
        assert_eq!(InflightDescription::decode(&inflight.encode()[..19]), None);
        let miss = IotlbMessage { iova: 1, size: 2, user: 3, permissions: 3, kind: 1 };
        assert_eq!(IotlbMessage::decode(&miss.encode()), Some(miss));
    }
}
