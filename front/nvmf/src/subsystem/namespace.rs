//! Namespaces: the volumes of a subsystem.

use crate::session::admin::NAMESPACES_MAX;
use crate::wire::identify;

/// Logical block size in bytes, as a power of two: 512 bytes, which every host supports, ESXi included.
/// Preferred sizes of a namespace indicate that 4 KiB are better.
pub const BLOCK_SHIFT: u8 = 9;

/// Namespace of a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace id, from 1 to [`NAMESPACES_MAX`].
    pub nsid: u32,
    /// Volume name, for people and for opening the device.
    pub name: String,
    /// UUID, which identifies the volume globally and permanently.  NGUID and EUI64 are derived from it.
    pub uuid: [u8; 16],
    /// ANA group id, from 1 to [`Subsystem::ana_groups_max`](super::Subsystem::ana_groups_max); the namespace id where each
    /// namespace has a group of its own.
    pub ana_group: u32,
    /// Writes are rejected.
    pub read_only: bool,
}

/// Error for a namespace that no subsystem can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// Namespace id out of range.
    #[error("namespace id {0} is out of range: a subsystem has ids from 1 to {NAMESPACES_MAX}")]
    Nsid(u32),
    /// ANA group id out of range.
    #[error("ANA group {group} is out of range: the subsystem has groups from 1 to {max}, or one for each namespace")]
    AnaGroup {
        /// ANA group id.
        group: u32,
        /// Largest ANA group id of the subsystem.
        max: u32,
    },
}

impl Namespace {
    /// Returns the NGUID: the bytes of the UUID.
    pub fn nguid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Returns the EUI64: the two halves of the UUID folded, marked as locally administered.
    pub fn eui64(&self) -> [u8; 8] {
        let mut out: [u8; 8] = std::array::from_fn(|at| self.uuid[at] ^ self.uuid[at + 8].rotate_left(3));
        out[0] = (out[0] & !1) | 2;
        out
    }
}

/// Describes a namespace for Identify, of a device of `size` bytes and `preferred` bytes of efficient I/O.
pub(crate) fn describe(
    namespace: &Namespace,
    size: u64,
    preferred: u32,
    read_only: bool,
) -> identify::IdentifyNamespace {
    identify::IdentifyNamespace {
        blocks: size >> BLOCK_SHIFT,
        block_shift: BLOCK_SHIFT,
        preferred_blocks: (preferred >> BLOCK_SHIFT).clamp(1, 256) as u16,
        write_protected: namespace.read_only || read_only,
        ana_group: namespace.ana_group,
        nguid: namespace.nguid(),
        eui64: namespace.eui64(),
        uuid: namespace.uuid,
        reservations: 0,
    }
}
