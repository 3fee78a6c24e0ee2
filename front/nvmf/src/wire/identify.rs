//! Identify data structures (base 5.17, nvm 4.1.5).

use super::DataStructure;

/// Size of every Identify structure in bytes.
pub const LEN: usize = 4096;

/// Controller or Namespace Structure (base figure 273).
pub mod cns {
    /// Identify Namespace, NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active Namespace ID list.
    pub const ACTIVE_LIST: u8 = 0x02;
    /// Namespace Identification Descriptor list.
    pub const DESCRIPTORS: u8 = 0x03;
    /// I/O Command Set specific Namespace.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// I/O Command Set specific Controller.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// I/O Command Set specific Active Namespace ID list.
    pub const CSI_ACTIVE_LIST: u8 = 0x07;
    /// I/O Command Set independent Namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Identify Namespace of the user data format.
    pub const FORMAT_NAMESPACE: u8 = 0x09;
    /// I/O Command Set specific Namespace of the user data format.
    pub const CSI_FORMAT_NAMESPACE: u8 = 0x0A;
    /// Allocated Namespace ID list.
    pub const ALLOCATED_LIST: u8 = 0x10;
    /// Identify an allocated Namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers that a namespace is attached to.
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    /// Controllers of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// I/O Command Set specific Allocated Namespace ID list.
    pub const CSI_ALLOCATED_LIST: u8 = 0x1A;
    /// I/O Command Set specific Identify an allocated Namespace.
    pub const CSI_ALLOCATED_NAMESPACE: u8 = 0x1B;
    /// I/O Command Set data structure.
    pub const COMMAND_SETS: u8 = 0x1C;
}

/// Identifier of the NVM command set.
pub const CSI_NVM: u8 = 0;

/// Fields of the Identify Controller data structure.
#[derive(Debug, Clone)]
pub struct IdentifyController<'a> {
    /// Serial number of the subsystem, 20 characters.
    pub serial: &'a str,
    /// Model, 40 characters.
    pub model: &'a str,
    /// Firmware revision, 8 characters.
    pub firmware: &'a str,
    /// Controller id.
    pub cntlid: u16,
    /// NQN of the subsystem.
    pub nqn: &'a str,
    /// Discovery controller, not an I/O controller.
    pub discovery: bool,
    /// Maximum data transfer size (MDTS), in pages, as a power of two.
    pub transfer_pages_log2: u8,
    /// Optional asynchronous events (OAES).
    pub events: u32,
    /// Asynchronous event request limit, zero-based (AERL).
    pub event_requests_max: u8,
    /// Granularity of the keep-alive timer in units of 100 ms (KAS).
    pub keep_alive_unit: u16,
    /// Largest namespace id, and the maximum number of namespaces.
    pub namespaces_max: u32,
    /// Largest ANA group id.
    pub ana_group_max: u32,
    /// Number of ANA groups.
    pub ana_groups: u32,
    /// Maximum duration of an ANA transition, in seconds.
    pub ana_transition_s: u8,
    /// Maximum number of outstanding commands on a queue.
    pub commands_max: u16,
    /// Maximum bytes of in-capsule data.
    pub in_capsule: u32,
    /// Reservations supported.
    pub reservations: bool,
}

/// Asynchronous events that a controller supports or a host enables (base figures 275 and 294).
pub mod event {
    /// Namespace attribute notices: the list of namespaces, or one of them, has changed.
    pub const NAMESPACE: u32 = 1 << 8;
    /// ANA change notices.
    pub const ANA: u32 = 1 << 11;
    /// Discovery log page change notices.
    pub const DISCOVERY: u32 = 1 << 31;
}

/// Log page attributes (LPA).  A bit is set only if every page behind it is supported.  There is no health page
/// per namespace, no telemetry and no persistent event log.
pub mod lpa {
    /// Commands Supported and Effects (05h) supported.
    pub const EFFECTS: u8 = 1 << 1;
    /// Extended data for Get Log Page: 32-bit lengths and offsets.
    pub const EXTENDED: u8 = 1 << 2;
    /// Supported Log Pages (00h), Feature Identifiers (12h) and NVMe-MI Commands (13h) supported, and the scopes of
    /// commands reported with their effects.
    pub const SUPPORTED: u8 = 1 << 5;
    /// Attributes of an I/O controller.
    pub const ALL: u8 = EFFECTS | EXTENDED | SUPPORTED;
}

/// Optional NVM commands (ONCS).
pub mod oncs {
    /// Compare support (ONCS bit).
    pub const COMPARE: u16 = 1 << 0;
    /// Dataset Management.
    pub const DSM: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// Save and Select of features.
    pub const SELECT: u16 = 1 << 4;
    /// Reservations support (ONCS bit).
    pub const RESERVATIONS: u16 = 1 << 5;
    /// Verify support (ONCS bit).
    pub const VERIFY: u16 = 1 << 7;
}

/// The version of the base specification: 2.0.
pub const VERSION: u32 = 0x0002_0000;

impl IdentifyController<'_> {
    /// Encodes Identify Controller (base figure 275).
    pub fn encode(&self) -> Vec<u8> {
        let mut page = DataStructure::new(LEN);
        page.ascii(4, 20, self.serial).ascii(24, 40, self.model).ascii(64, 8, self.firmware);
        page.u8(77, self.transfer_pages_log2).u16(78, self.cntlid).u32(80, VERSION);
        page.u32(92, self.events);
        // 128-bit host ids, and keep-alive by any traffic (TBKAS).
        page.u32(96, 1 | 1 << 6);
        page.u8(111, if self.discovery { 2 } else { 1 });
        page.u8(259, self.event_requests_max);
        page.u8(261, if self.discovery { lpa::EXTENDED | lpa::SUPPORTED } else { lpa::ALL });
        page.u16(320, self.keep_alive_unit);
        page.u16(514, self.commands_max);
        // SGLs of any byte alignment, with offsets for in-capsule data, and transport SGLs.
        page.u32(536, 1 | 1 << 20 | 1 << 21);
        page.string(768, 256, self.nqn);
        page.u32(1792, (64 + self.in_capsule) / 16).u32(1796, 1);
        // One SGL descriptor per command.
        page.u8(1803, 1);
        if self.discovery {
            // The subsystem of this discovery controller has no namespaces; DCTYPE 1: a DDC.
            page.u8(1806, 1);
            return page.finish();
        }
        // Multiple ports, multiple controllers, ANA reporting.
        page.u8(76, 1 | 1 << 1 | 1 << 3);
        // Typical times to become ready (RTD3R) and to shut down (RTD3E), in microseconds.
        page.u32(84, 1_000_000).u32(88, 1_000_000);
        // Abort command limit, zero-based.
        page.u8(258, 3);
        // One firmware slot, which is read-only.
        page.u8(260, 1 << 1 | 1);
        // Error log page entries, zero-based.
        page.u8(262, super::log::ERRORS_MAX as u8 - 1);
        // No sensor measures a temperature: no threshold of one is reported (WCTEMP and CCTEMP stay 0).
        page.u8(342, self.ana_transition_s);
        // Reports five ANA states (ANACAP).  The group of a namespace may change.
        page.u8(343, 0x1F).u32(344, self.ana_group_max).u32(348, self.ana_groups);
        page.u8(512, 0x66).u8(513, 0x44);
        page.u32(516, self.namespaces_max);
        let reservations = if self.reservations { oncs::RESERVATIONS } else { 0 };
        page.u16(520, oncs::COMPARE | oncs::DSM | oncs::WRITE_ZEROES | oncs::SELECT | oncs::VERIFY | reservations);
        // Compare and Write can be fused.
        page.u16(522, 1);
        // Volatile write cache present; Flush does not accept the broadcast namespace id.
        page.u8(525, 1 | 2 << 1);
        // Only one 512-byte block is atomic at any position (AWUN, AWUPF); namespaces report more.
        page.u16(526, 0).u16(528, 0).u16(532, 0);
        page.u32(540, self.namespaces_max);
        // One power state (NPSS 0), of which no power is reported: its descriptor stays 0.
        page.finish()
    }
}

/// Fields of the Identify Namespace data structure.
#[derive(Debug, Clone, Copy)]
pub struct IdentifyNamespace {
    /// Size in logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes, as a power of two.
    pub block_shift: u8,
    /// Preferred write granularity in logical blocks, which avoids read-modify-write.
    pub preferred_blocks: u16,
    /// Writes are rejected.
    pub write_protected: bool,
    /// ANA group id.
    pub ana_group: u32,
    /// Namespace Globally Unique Identifier.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier.
    pub eui64: [u8; 8],
    /// Universally Unique Identifier.
    pub uuid: [u8; 16],
    /// Reservation capabilities (RESCAP).
    pub reservations: u8,
}

/// Atomic write unit in bytes, also on power failure, for writes within one unit aligned to its size.
pub const ATOMIC: u16 = 4096;

impl IdentifyNamespace {
    /// Encodes Identify Namespace (nvm figure 97).
    pub fn encode(&self) -> Vec<u8> {
        let atomic = (ATOMIC >> self.block_shift).max(1) - 1;
        let preferred = self.preferred_blocks.max(1) - 1;
        let mut page = DataStructure::new(LEN);
        page.u64(0, self.blocks).u64(8, self.blocks).u64(16, self.blocks);
        // NSFEAT: own atomic units (NSABP); ids not reused (UIDREUSE); optimal I/O fields (OPTPERF).  Not thin
        // provisioned (THINP): that would require a utilization that follows the allocation, and counting that means
        // looking at every object.
        page.u8(24, 1 << 1 | 1 << 3 | 1 << 4);
        // Shared between controllers.
        page.u8(30, 1).u8(31, self.reservations);
        // Deallocated blocks read as zeroes, and Write Zeroes can deallocate.
        page.u8(33, 1 | 1 << 3);
        // Atomic write sizes and boundaries: 4 KiB-aligned units, in zero-based logical blocks.
        page.u16(34, atomic).u16(36, atomic).u16(38, atomic).u16(40, atomic).u16(42, 0).u16(44, atomic);
        page.u128(48, u128::from(self.blocks) << self.block_shift);
        page.u16(64, preferred).u16(66, preferred).u16(68, preferred).u16(70, preferred).u16(72, preferred);
        page.u32(92, self.ana_group).u8(99, u8::from(self.write_protected));
        page.bytes(104, &self.nguid).bytes(120, &self.eui64);
        page.u8(130, self.block_shift);
        page.finish()
    }

    /// Encodes Identify Namespace of the user data format (nvm figure 98): only fields that depend on the format.
    pub fn encode_format(&self) -> Vec<u8> {
        let mut page = DataStructure::new(LEN);
        page.u8(130, self.block_shift);
        page.finish()
    }

    /// Encodes Identify Namespace independent of the command set (base figure 280).
    pub fn encode_independent(&self) -> Vec<u8> {
        let mut page = DataStructure::new(LEN);
        // Ids not reused; shared; reservations; ready.
        page.u8(0, 1 << 3).u8(1, 1).u8(2, self.reservations);
        page.u32(8, self.ana_group).u8(12, u8::from(self.write_protected)).u8(19, 1);
        page.finish()
    }

    /// Encodes the Namespace Identification Descriptors (base figure 277).
    pub fn descriptors(&self) -> Vec<u8> {
        let mut at = 0;
        let mut page = DataStructure::new(LEN);
        let mut put = |kind: u8, value: &[u8]| {
            page.u8(at, kind).u8(at + 1, value.len() as u8).bytes(at + 4, value);
            at += 4 + value.len();
        };
        put(1, &self.eui64);
        put(2, &self.nguid);
        put(3, &self.uuid);
        put(4, &[CSI_NVM]);
        page.finish()
    }
}

/// Encodes a list of the namespace ids greater than `after`, in order.
pub fn namespace_list(ids: impl Iterator<Item = u32>, after: u32) -> Vec<u8> {
    let mut page = DataStructure::new(LEN);
    for (index, id) in ids.filter(|&id| id > after).take(LEN / 4).enumerate() {
        page.u32(index * 4, id);
    }
    page.finish()
}

/// Encodes a list of the controller ids from `from` on, in order (base figure 134).
pub fn controller_list(ids: impl Iterator<Item = u16>, from: u16) -> Vec<u8> {
    let mut page = DataStructure::new(LEN);
    let mut count = 0;
    for id in ids.filter(|&id| id >= from).take(LEN / 2 - 1) {
        count += 1;
        page.u16(count * 2, id);
    }
    page.u16(0, count as u16);
    page.finish()
}

/// Encodes Identify Controller of the NVM command set (nvm figure 100).  A limit of 0 means none beyond MDTS.
pub fn nvm_controller(ranges_max: u8, range_blocks_max: u32, blocks_max: u64) -> Vec<u8> {
    let mut page = DataStructure::new(LEN);
    page.u8(3, ranges_max).u32(4, range_blocks_max).u64(8, blocks_max);
    page.finish()
}

/// Encodes the I/O command set combinations: the NVM command set alone (base figure 289).
pub fn command_sets() -> Vec<u8> {
    let mut page = DataStructure::new(LEN);
    page.u64(0, 1 << CSI_NVM);
    page.finish()
}
