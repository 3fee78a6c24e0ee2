//! Data structures of Identify (base 5.17, nvm 4.1.5).

use super::Page;

/// Bytes of every Identify structure.
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

/// The NVM command set's identifier.
pub const CSI_NVM: u8 = 0;

/// What a controller says of itself.
#[derive(Debug, Clone)]
pub struct Controller<'a> {
    /// Serial number of the subsystem, 20 characters.
    pub serial: &'a str,
    /// Model, 40 characters.
    pub model: &'a str,
    /// Firmware revision, 8 characters.
    pub firmware: &'a str,
    /// Its id.
    pub cntlid: u16,
    /// Name of the subsystem.
    pub nqn: &'a str,
    /// It is a discovery controller.
    pub discovery: bool,
    /// MDTS: transfers up to so many pages, as a power of two.
    pub transfer_pages_log2: u8,
    /// Optional asynchronous events (OAES).
    pub events: u32,
    /// Asynchronous event requests, counted from zero (AERL).
    pub event_requests_max: u8,
    /// Granularity of the keep-alive timer in units of 100 ms (KAS).
    pub keep_alive_unit: u16,
    /// Largest namespace id, and the most namespaces there can be.
    pub namespaces_max: u32,
    /// Largest ANA group.
    pub ana_group_max: u32,
    /// ANA groups.
    pub ana_groups: u32,
    /// Seconds that an ANA transition takes at most.
    pub ana_transition_s: u8,
    /// Commands outstanding on a queue, at most.
    pub commands_max: u16,
    /// Bytes of data in a command capsule.
    pub in_capsule: u32,
    /// Reservations are to be had.
    pub reservations: bool,
}

/// Asynchronous events that a controller offers or a host wants (base figures 275 and 294).
pub mod event {
    /// The list of namespaces, or one of them, has changed.
    pub const NAMESPACE: u32 = 1 << 8;
    /// ANA states have changed.
    pub const ANA: u32 = 1 << 11;
    /// The discovery log page has changed.
    pub const DISCOVERY: u32 = 1 << 31;
}

/// Log page attributes (LPA): only what every page behind a bit keeps.  There is no health page of a namespace, no
/// telemetry and no persistent event log.
pub mod lpa {
    /// Commands Supported and Effects (05h) is served.
    pub const EFFECTS: u8 = 1 << 1;
    /// Log pages can be read in parts, with lengths of 32 bits.
    pub const EXTENDED: u8 = 1 << 2;
    /// Supported Log Pages (00h), Feature Identifiers (12h) and NVMe-MI Commands (13h) are served, and commands' scopes
    /// are told where their effects are.
    pub const SUPPORTED: u8 = 1 << 5;
    /// All of an I/O controller.
    pub const ALL: u8 = EFFECTS | EXTENDED | SUPPORTED;
}

/// Optional NVM commands (ONCS).
pub mod oncs {
    /// Compare.
    pub const COMPARE: u16 = 1 << 0;
    /// Dataset Management.
    pub const DSM: u16 = 1 << 2;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// Save and Select of features.
    pub const SELECT: u16 = 1 << 4;
    /// Reservations.
    pub const RESERVATIONS: u16 = 1 << 5;
    /// Verify.
    pub const VERIFY: u16 = 1 << 7;
}

/// The version of the base specification: 2.0.
pub const VERSION: u32 = 0x0002_0000;

impl Controller<'_> {
    /// Identify Controller (base figure 275).
    pub fn encode(&self) -> Vec<u8> {
        let mut page = Page::new(LEN);
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
        // SGLs of any byte alignment, with offsets in capsules, and the transport's own.
        page.u32(536, 1 | 1 << 20 | 1 << 21);
        page.string(768, 256, self.nqn);
        page.u32(1792, (64 + self.in_capsule) / 16).u32(1796, 1);
        // One SGL descriptor a command.
        page.u8(1803, 1);
        if self.discovery {
            // The subsystem of this discovery controller has no namespaces; DCTYPE 1: a DDC.
            page.u8(1806, 1);
            return page.finish();
        }
        // Many ports, many controllers, ANA.
        page.u8(76, 1 | 1 << 1 | 1 << 3);
        // Times to start and stop on its own, in microseconds.
        page.u32(84, 1_000_000).u32(88, 1_000_000);
        // Aborts at a time, counted from zero.
        page.u8(258, 3);
        // One firmware slot, which is read-only.
        page.u8(260, 1 << 1 | 1);
        // Error log entries, counted from zero.
        page.u8(262, super::log::ERRORS_MAX as u8 - 1);
        // No sensor measures a temperature: no threshold of one is reported (WCTEMP and CCTEMP stay 0).
        page.u8(342, self.ana_transition_s);
        // All five states are reported; a namespace's group may change.
        page.u8(343, 0x1F).u32(344, self.ana_group_max).u32(348, self.ana_groups);
        page.u8(512, 0x66).u8(513, 0x44);
        page.u32(516, self.namespaces_max);
        let reservations = if self.reservations { oncs::RESERVATIONS } else { 0 };
        page.u16(520, oncs::COMPARE | oncs::DSM | oncs::WRITE_ZEROES | oncs::SELECT | oncs::VERIFY | reservations);
        // Compare and Write can be fused.
        page.u16(522, 1);
        // A volatile write cache; Flush does not take all namespaces at once.
        page.u8(525, 1 | 2 << 1);
        // One block of 512 bytes is atomic whatever its place (AWUN, AWUPF); namespaces say more.
        page.u16(526, 0).u16(528, 0).u16(532, 0);
        page.u32(540, self.namespaces_max);
        // One power state (NPSS 0), of which no power is reported: its descriptor stays 0.
        page.finish()
    }
}

/// What a namespace says of itself.
#[derive(Debug, Clone, Copy)]
pub struct Namespace {
    /// Logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block, as a power of two.
    pub block_shift: u8,
    /// Logical blocks that are written together without reading first.
    pub preferred_blocks: u16,
    /// Writes are refused.
    pub write_protected: bool,
    /// Its ANA group.
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

/// Bytes that are written wholly or not at all, whatever happens, when they are aligned to it.
pub const ATOMIC: u16 = 4096;

impl Namespace {
    /// Identify Namespace (nvm figure 97).
    pub fn encode(&self) -> Vec<u8> {
        let atomic = (ATOMIC >> self.block_shift).max(1) - 1;
        let preferred = self.preferred_blocks.max(1) - 1;
        let mut page = Page::new(LEN);
        page.u64(0, self.blocks).u64(8, self.blocks).u64(16, self.blocks);
        // Atomic units of its own; ids are not used again; preferred sizes are filled in.  Not thin (THINP): that would
        // promise a utilization that follows what is allocated, and counting that means looking at every object.
        page.u8(24, 1 << 1 | 1 << 3 | 1 << 4);
        // Shared between controllers.
        page.u8(30, 1).u8(31, self.reservations);
        // What is deallocated reads as zeroes, and Write Zeroes can deallocate.
        page.u8(33, 1 | 1 << 3);
        // Whole 4 KiB-aligned blocks are atomic: so many, with boundaries there.
        page.u16(34, atomic).u16(36, atomic).u16(38, atomic).u16(40, atomic).u16(42, 0).u16(44, atomic);
        page.u128(48, u128::from(self.blocks) << self.block_shift);
        page.u16(64, preferred).u16(66, preferred).u16(68, preferred).u16(70, preferred).u16(72, preferred);
        page.u32(92, self.ana_group).u8(99, u8::from(self.write_protected));
        page.bytes(104, &self.nguid).bytes(120, &self.eui64);
        page.u8(130, self.block_shift);
        page.finish()
    }

    /// Identify Namespace of the user data format (nvm figure 98): only what the format decides.
    pub fn encode_format(&self) -> Vec<u8> {
        let mut page = Page::new(LEN);
        page.u8(130, self.block_shift);
        page.finish()
    }

    /// Identify Namespace independent of the command set (base figure 280).
    pub fn encode_independent(&self) -> Vec<u8> {
        let mut page = Page::new(LEN);
        // Ids are not used again; shared; reservations; ready.
        page.u8(0, 1 << 3).u8(1, 1).u8(2, self.reservations);
        page.u32(8, self.ana_group).u8(12, u8::from(self.write_protected)).u8(19, 1);
        page.finish()
    }

    /// Namespace Identification Descriptors (base figure 277).
    pub fn descriptors(&self) -> Vec<u8> {
        let mut at = 0;
        let mut page = Page::new(LEN);
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

/// A list of namespace ids greater than `after`, in order.
pub fn namespace_list(ids: impl Iterator<Item = u32>, after: u32) -> Vec<u8> {
    let mut page = Page::new(LEN);
    for (index, id) in ids.filter(|&id| id > after).take(LEN / 4).enumerate() {
        page.u32(index * 4, id);
    }
    page.finish()
}

/// A list of controller ids from `from` on, in order (base figure 134).
pub fn controller_list(ids: impl Iterator<Item = u16>, from: u16) -> Vec<u8> {
    let mut page = Page::new(LEN);
    let mut count = 0;
    for id in ids.filter(|&id| id >= from).take(LEN / 2 - 1) {
        count += 1;
        page.u16(count * 2, id);
    }
    page.u16(0, count as u16);
    page.finish()
}

/// Identify Controller of the NVM command set (nvm figure 100): nothing is limited beyond MDTS.
pub fn nvm_controller(ranges_max: u8, range_blocks_max: u32, blocks_max: u64) -> Vec<u8> {
    let mut page = Page::new(LEN);
    page.u8(3, ranges_max).u32(4, range_blocks_max).u64(8, blocks_max);
    page.finish()
}

/// The I/O command set combinations: the NVM command set alone (base figure 289).
pub fn command_sets() -> Vec<u8> {
    let mut page = Page::new(LEN);
    page.u64(0, 1 << CSI_NVM);
    page.finish()
}
