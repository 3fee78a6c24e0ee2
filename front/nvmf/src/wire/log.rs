//! Log pages (base 5.16).

use super::{DataStructure, NvmeStatus, command};

/// Log page identifiers.
pub mod id {
    /// Supported Log Pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Error Information.
    pub const ERROR: u8 = 0x01;
    /// SMART / Health Information.
    pub const SMART: u8 = 0x02;
    /// Firmware Slot Information.
    pub const FIRMWARE: u8 = 0x03;
    /// Changed Namespace List.
    pub const CHANGED: u8 = 0x04;
    /// Commands Supported and Effects.
    pub const EFFECTS: u8 = 0x05;
    /// Asymmetric Namespace Access.
    pub const ANA: u8 = 0x0C;
    /// Feature Identifiers Supported and Effects.
    pub const FEATURES: u8 = 0x12;
    /// NVMe-MI Commands Supported and Effects.
    pub const MI_COMMANDS: u8 = 0x13;
    /// Discovery log page.
    pub const DISCOVERY: u8 = 0x70;
    /// Reservation Notification.
    pub const RESERVATION: u8 = 0x80;
}

/// Maximum entries of the error log of a controller.
pub const ERRORS_MAX: usize = 16;
/// Maximum entries of a Changed Namespace List; more are reported as a single FFFFFFFFh.
pub const CHANGED_MAX: usize = 1024;

/// Encodes Supported Log Pages (base 5.16.1.1).
pub fn supported(pages: impl Iterator<Item = u8>) -> Vec<u8> {
    let mut page = DataStructure::new(1024);
    for id in pages {
        page.u32(usize::from(id) * 4, 1);
    }
    page.finish()
}

/// Error log entry of a failed command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Error count, from 1.
    pub count: u64,
    /// Submission queue id.
    pub queue: u16,
    /// Command identifier.
    pub cid: u16,
    /// Status of the completion.
    pub status: NvmeStatus,
    /// First logical block.
    pub lba: u64,
    /// Namespace id.
    pub nsid: u32,
}

/// Encodes Error Information, the newest first (base 5.16.1.2).
pub fn errors<'a>(entries: impl Iterator<Item = &'a ErrorEntry>) -> Vec<u8> {
    let mut page = DataStructure::new(ERRORS_MAX * 64);
    for (index, entry) in entries.take(ERRORS_MAX).enumerate() {
        let at = index * 64;
        page.u64(at, entry.count).u16(at + 8, entry.queue).u16(at + 10, entry.cid);
        page.u16(at + 12, entry.status.0 << 1).u16(at + 14, 0xFFFF);
        page.u64(at + 16, entry.lba).u32(at + 24, entry.nsid);
        // Transport type: TCP.
        page.u8(at + 29, 3);
    }
    page.finish()
}

/// Counters of the SMART / Health Information log page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Health {
    /// Volumes are read-only.
    pub read_only: bool,
    /// Bytes read by hosts.
    pub bytes_read: u64,
    /// Bytes written by hosts.
    pub bytes_written: u64,
    /// Read and compare commands.
    pub reads: u64,
    /// Write commands.
    pub writes: u64,
    /// Seconds that the daemon has been up.
    pub uptime_s: u64,
    /// Media errors.
    pub media_errors: u64,
    /// Number of error log entries since the controller was created.
    pub errors: u64,
}

/// Encodes SMART / Health Information (base 5.16.1.3).  There is no sensor, so no temperature is reported.
pub fn health(health: &Health) -> Vec<u8> {
    let units = |bytes: u64| u128::from(bytes.div_ceil(512_000));
    let mut page = DataStructure::new(512);
    page.u8(0, if health.read_only { 1 << 3 } else { 0 }).u8(3, 100).u8(4, 10);
    page.u128(32, units(health.bytes_read)).u128(48, units(health.bytes_written));
    page.u128(64, health.reads.into()).u128(80, health.writes.into());
    page.u128(128, (health.uptime_s / 3600).into());
    page.u128(160, health.media_errors.into()).u128(176, health.errors.into());
    page.finish()
}

/// Encodes Firmware Slot Information (base 5.16.1.4): one slot.
pub fn firmware(revision: &str) -> Vec<u8> {
    let mut page = DataStructure::new(512);
    page.u8(0, 1).ascii(8, 8, revision);
    page.finish()
}

/// Encodes the Changed Namespace List (base 5.16.1.5).
pub fn changed(ids: &[u32]) -> Vec<u8> {
    let mut page = DataStructure::new(CHANGED_MAX * 4);
    if ids.len() > CHANGED_MAX {
        page.u32(0, u32::MAX);
        return page.finish();
    }
    for (index, id) in ids.iter().enumerate() {
        page.u32(index * 4, *id);
    }
    page.finish()
}

/// Encodes Commands Supported and Effects (base 5.16.1.6).
pub fn effects(reservations: bool) -> Vec<u8> {
    use command::{admin, nvm};
    /// Bit of a supported log page.
    const SUPPORTED: u32 = 1;
    /// Changes the content of logical blocks.
    const CONTENT: u32 = 1 << 1;
    /// Scope: a namespace.
    const NAMESPACE: u32 = 1 << 20;
    /// Scope: a controller.
    const CONTROLLER: u32 = 1 << 21;
    let mut page = DataStructure::new(4096);
    let of_admin = [
        admin::GET_LOG,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT,
        admin::KEEP_ALIVE,
    ];
    for opcode in of_admin {
        page.u32(usize::from(opcode) * 4, SUPPORTED | CONTROLLER);
    }
    let mut io = |opcode: u8, effects: u32| {
        page.u32(1024 + usize::from(opcode) * 4, effects | NAMESPACE);
    };
    for opcode in [nvm::FLUSH, nvm::READ, nvm::COMPARE, nvm::VERIFY] {
        io(opcode, SUPPORTED);
    }
    for opcode in [nvm::WRITE, nvm::WRITE_ZEROES, nvm::DSM] {
        io(opcode, SUPPORTED | CONTENT);
    }
    if reservations {
        for opcode in [nvm::RESV_REGISTER, nvm::RESV_REPORT, nvm::RESV_ACQUIRE, nvm::RESV_RELEASE] {
            io(opcode, SUPPORTED);
        }
    }
    page.finish()
}

/// Encodes Feature Identifiers Supported and Effects (base 5.16.1.18), from ids and whether each is per
/// namespace.
pub fn features(supported: &[(u8, bool)]) -> Vec<u8> {
    let mut page = DataStructure::new(1024);
    for &(id, of_namespace) in supported {
        // Scope: a controller, or a namespace.
        let scope = if of_namespace { 1 << 20 } else { 1 << 21 };
        page.u32(usize::from(id) * 4, 1 | scope);
    }
    page.finish()
}

/// Encodes NVMe-MI Commands Supported and Effects (base 5.16.1.19): there are none.
pub fn mi_commands() -> Vec<u8> {
    DataStructure::new(4096).finish()
}

/// Encodes Reservation Notification (base 5.16.1.26): the oldest unread notification, as its count, namespace and
/// type, and the number of further ones, from the number `available`.
pub fn reservation(oldest: Option<(u64, u32, u8)>, available: usize) -> Vec<u8> {
    let mut page = DataStructure::new(64);
    if let Some((count, nsid, kind)) = oldest {
        page.u64(0, count).u8(8, kind).u8(9, (available - 1).min(255) as u8).u32(12, nsid);
    }
    page.finish()
}

/// ANA state of a group of namespaces, as reached through a controller (base 2.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AnaState {
    /// Optimized: the preferred path.
    Optimized = 1,
    /// Non-optimized: usable, but other paths may be faster.
    NonOptimized = 2,
    /// Inaccessible through this controller for now.
    Inaccessible = 3,
    /// Inaccessible through this controller permanently.
    PersistentLoss = 4,
    /// Transition between states.
    Change = 15,
}

impl AnaState {
    /// Returns the state with a number; `None` if it is unknown.
    pub fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => AnaState::Optimized,
            2 => AnaState::NonOptimized,
            3 => AnaState::Inaccessible,
            4 => AnaState::PersistentLoss,
            15 => AnaState::Change,
            _ => return None,
        })
    }

    /// Returns the name, as nvme-cli and the kernel write it.
    pub fn name(self) -> &'static str {
        match self {
            AnaState::Optimized => "optimized",
            AnaState::NonOptimized => "non-optimized",
            AnaState::Inaccessible => "inaccessible",
            AnaState::PersistentLoss => "persistent-loss",
            AnaState::Change => "change",
        }
    }

    /// Returns the state with a name; `None` if it is unknown.
    pub fn named(name: &str) -> Option<Self> {
        [1, 2, 3, 4, 15].into_iter().filter_map(Self::of).find(|state| state.name() == name)
    }

    /// Returns the status for commands that access the medium; `None` if the state permits them.
    pub fn refuses(self) -> Option<NvmeStatus> {
        match self {
            AnaState::Optimized | AnaState::NonOptimized => None,
            AnaState::Inaccessible => Some(NvmeStatus::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Some(NvmeStatus::ANA_PERSISTENT_LOSS),
            AnaState::Change => Some(NvmeStatus::ANA_TRANSITION),
        }
    }
}

/// ANA group, as in the ANA log page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnaGroup {
    /// Group id, from 1.
    pub id: u32,
    /// ANA state.
    pub state: AnaState,
    /// Namespace ids, in ascending order.
    pub namespaces: Vec<u32>,
}

/// Encodes Asymmetric Namespace Access (base 5.16.1.13).  With `groups_only` the namespace ids are left out.
pub fn ana(change: u64, groups: &[AnaGroup], groups_only: bool) -> Vec<u8> {
    let mut page = DataStructure::new(16);
    page.u64(0, change).u16(8, groups.len() as u16);
    for group in groups {
        let namespaces: &[u32] = if groups_only { &[] } else { &group.namespaces };
        let mut head = DataStructure::new(32);
        head.u32(0, group.id).u32(4, namespaces.len() as u32).u64(8, change).u8(16, group.state as u8);
        page.extend(&head.finish());
        for id in namespaces {
            page.extend(&id.to_le_bytes());
        }
    }
    page.finish()
}

/// Entry of the discovery log page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// IP address, as text.
    pub address: String,
    /// Address family: IPv6, not IPv4.
    pub v6: bool,
    /// TCP port number.
    pub service: u16,
    /// Port id.
    pub port: u16,
    /// NQN of the subsystem.
    pub nqn: String,
    /// Entry for the current discovery subsystem.
    pub discovery: bool,
    /// TLS required.
    pub tls: bool,
}

/// Encodes the discovery log page (base 5.16.1.23).
pub fn discovery(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    let mut page = DataStructure::new(1024);
    page.u64(0, generation).u64(8, entries.len() as u64);
    for entry in entries {
        let mut at = DataStructure::new(1024);
        at.u8(0, 3).u8(1, if entry.v6 { 2 } else { 1 }).u8(2, if entry.discovery { 3 } else { 2 });
        // TREQ: a secure channel is required or not specified, since libnvme takes "not required" as a wish for one.
        // Flow control may be disabled.
        at.u8(3, u8::from(entry.tls) | 1 << 2);
        at.u16(4, entry.port).u16(6, super::fabrics::CNTLID_ANY).u16(8, 32);
        at.ascii(32, 32, &entry.service.to_string()).string(256, 256, &entry.nqn).ascii(512, 256, &entry.address);
        at.u8(768, if entry.tls { 2 } else { 0 });
        page.extend(&at.finish());
    }
    page.finish()
}
