//! Submission and completion queue entries.

use super::{NvmeStatus, u16_at, u32_at, u64_at};

/// Bytes of a submission queue entry.
pub const SQE_LEN: usize = 64;
/// Bytes of a completion queue entry.
pub const CQE_LEN: usize = 16;
/// Namespace id that addresses all namespaces.
pub const NSID_ALL: u32 = u32::MAX;

/// Admin command opcodes (base figure 138).
pub mod admin {
    /// Get Log Page.
    pub const GET_LOG: u8 = 0x02;
    /// Identify command.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort command.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT: u8 = 0x0C;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
}

/// I/O command opcodes (nvm figure 6).
pub mod nvm {
    /// Flush command.
    pub const FLUSH: u8 = 0x00;
    /// Write command.
    pub const WRITE: u8 = 0x01;
    /// Read command.
    pub const READ: u8 = 0x02;
    /// Compare command.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DSM: u8 = 0x09;
    /// Verify command.
    pub const VERIFY: u8 = 0x0C;
    /// Reservation Register.
    pub const RESV_REGISTER: u8 = 0x0D;
    /// Reservation Report.
    pub const RESV_REPORT: u8 = 0x0E;
    /// Reservation Acquire.
    pub const RESV_ACQUIRE: u8 = 0x11;
    /// Reservation Release.
    pub const RESV_RELEASE: u8 = 0x15;
}

/// Opcode of Fabrics commands, on any queue.
pub const FABRICS: u8 = 0x7F;

/// SGL descriptor of a command's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sgl {
    /// Data in the capsule.
    InCapsule {
        /// Offset in bytes from the start of the in-capsule data.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Data moved by the transport (C2HData, or R2T and H2CData).
    Transport {
        /// Length in bytes.
        len: u32,
    },
    /// Unsupported descriptor type; rejected if the command has data.
    Other(u8),
}

impl Sgl {
    /// Returns the length in bytes; 0 for unsupported descriptors.
    pub fn len(self) -> u32 {
        match self {
            Sgl::InCapsule { len, .. } | Sgl::Transport { len } => len,
            Sgl::Other(_) => 0,
        }
    }

    /// Returns whether the length is 0.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Fused operation field (FUSE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fuse {
    /// Normal command.
    None,
    /// First command of a fused operation.
    First,
    /// Second command of a fused operation.
    Second,
    /// Reserved value.
    Reserved,
}

/// Submission queue entry.
#[derive(Debug, Clone, Copy)]
pub struct Sqe(pub [u8; SQE_LEN]);

impl Sqe {
    /// Copies an entry from the bytes of a capsule.
    ///
    /// # Panics
    /// When they are fewer than [`SQE_LEN`].
    pub fn of(bytes: &[u8]) -> Self {
        Self(bytes[..SQE_LEN].try_into().expect("64 bytes"))
    }

    /// Returns the opcode.
    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// Returns the fused operation field (FUSE).
    pub fn fuse(&self) -> Fuse {
        match self.0[1] & 3 {
            0 => Fuse::None,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// Returns PSDT.
    pub fn psdt(&self) -> u8 {
        self.0[1] >> 6
    }

    /// Returns whether PSDT selects an SGL for the data, the only choice over Fabrics.  Metadata in an SGL of its own
    /// (10b) is not supported, nor claimed in SGLS.
    pub fn uses_sgl(&self) -> bool {
        self.psdt() == 1
    }

    /// Returns the command identifier.
    pub fn cid(&self) -> u16 {
        u16_at(&self.0, 2)
    }

    /// Returns the namespace id.
    pub fn nsid(&self) -> u32 {
        u32_at(&self.0, 4)
    }

    /// Returns the Fabrics command type.
    pub fn fctype(&self) -> u8 {
        self.0[4]
    }

    /// Decodes the only SGL descriptor (base 4.1.2).
    pub fn sgl(&self) -> Sgl {
        let len = u32_at(&self.0, 32);
        match self.0[39] {
            0x01 => Sgl::InCapsule { offset: u64_at(&self.0, 24), len },
            0x5A => Sgl::Transport { len },
            other => Sgl::Other(other),
        }
    }

    /// Returns command dword `index`, from 10 to 15.
    pub fn cdw(&self, index: usize) -> u32 {
        u32_at(&self.0, index * 4)
    }

    /// Returns the first logical block (SLBA).
    pub fn slba(&self) -> u64 {
        u64_at(&self.0, 40)
    }

    /// Returns the number of logical blocks, which is encoded zero-based (NLB).
    pub fn blocks(&self) -> u64 {
        u64::from(u16_at(&self.0, 48)) + 1
    }

    /// Returns Force Unit Access.
    pub fn fua(&self) -> bool {
        self.cdw(12) & 1 << 30 != 0
    }

    /// Creates an entry with an opcode, a command identifier and a namespace; for hosts.
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        let mut bytes = [0; SQE_LEN];
        bytes[0] = opcode;
        // Commands over Fabrics use SGLs only.
        bytes[1] = 1 << 6;
        bytes[2..4].copy_from_slice(&cid.to_le_bytes());
        bytes[4..8].copy_from_slice(&nsid.to_le_bytes());
        Self(bytes)
    }

    /// Sets command dword `index`.
    #[must_use]
    pub fn with(mut self, index: usize, value: u32) -> Self {
        self.0[index * 4..index * 4 + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Sets the SGL descriptor.
    #[must_use]
    pub fn with_sgl(mut self, sgl: Sgl) -> Self {
        let (at, len, kind) = match sgl {
            Sgl::InCapsule { offset, len } => (offset, len, 0x01),
            Sgl::Transport { len } => (0, len, 0x5A),
            Sgl::Other(kind) => (0, 0, kind),
        };
        self.0[24..32].copy_from_slice(&at.to_le_bytes());
        self.0[32..36].copy_from_slice(&len.to_le_bytes());
        self.0[39] = kind;
        self
    }
}

/// Completion queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cqe {
    /// Command-specific result, dwords 0 and 1.
    pub result: u64,
    /// Submission queue head.
    pub sq_head: u16,
    /// Command identifier.
    pub cid: u16,
    /// Status field.
    pub status: NvmeStatus,
}

impl Cqe {
    /// Encodes the entry.
    pub fn encode(&self) -> [u8; CQE_LEN] {
        let mut out = [0; CQE_LEN];
        out[0..8].copy_from_slice(&self.result.to_le_bytes());
        out[8..10].copy_from_slice(&self.sq_head.to_le_bytes());
        out[12..14].copy_from_slice(&self.cid.to_le_bytes());
        out[14..16].copy_from_slice(&(self.status.0 << 1).to_le_bytes());
        out
    }

    /// Decodes an entry.
    ///
    /// # Panics
    /// When they are fewer than [`CQE_LEN`].
    pub fn decode(bytes: &[u8]) -> Self {
        Self {
            result: u64_at(bytes, 0),
            sq_head: u16_at(bytes, 8),
            cid: u16_at(bytes, 12),
            status: NvmeStatus(u16_at(bytes, 14) >> 1),
        }
    }
}
