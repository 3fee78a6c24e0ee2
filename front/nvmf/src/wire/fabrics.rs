//! Fabrics commands: Connect, properties, authentication (base 6), and the NVMe Qualified Name.

use super::{DataStructure, Sqe, string_of, u16_at, u32_at, u64_at};

/// Fabrics command types.
pub mod fctype {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect command.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTH_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTH_RECEIVE: u8 = 0x06;
    /// Disconnect command.
    pub const DISCONNECT: u8 = 0x08;
}

/// Controller properties (base 3.1.3), by offset.
pub mod property {
    /// Controller Capabilities, 8 bytes.
    pub const CAP: u32 = 0x00;
    /// Version, 4 bytes.
    pub const VS: u32 = 0x08;
    /// Controller Configuration, 4 bytes.
    pub const CC: u32 = 0x14;
    /// Controller Status, 4 bytes.
    pub const CSTS: u32 = 0x1C;
    /// NVM Subsystem Reset, 4 bytes.
    pub const NSSR: u32 = 0x20;
    /// Controller Ready Timeouts, 4 bytes.
    pub const CRTO: u32 = 0x68;
}

/// Bytes of the Connect command's data.
pub const CONNECT_DATA: usize = 1024;
/// Well-known NQN of the discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Maximum bytes of an NVMe Qualified Name.
pub const NQN_MAX: usize = 223;
/// Controller id that requests any controller.
pub const CNTLID_ANY: u16 = 0xFFFF;

/// Connect command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connect {
    /// Queue id; 0 for the admin queue.
    pub queue: u16,
    /// Entries of the submission queue, zero-based.
    pub sq_size: u16,
    /// Flow control disabled by the host (CATTR bit 2).
    pub no_flow_control: bool,
    /// Keep-alive timeout in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Controller id.
    pub cntlid: u16,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// NQN of the host.
    pub host: String,
}

/// Invalid parameter of a Connect (base 6.3): its offset, and whether that is in the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    /// Offset in bytes from the start of the entry, or of the data.
    pub offset: u16,
    /// Set for a field of the data.
    pub in_data: bool,
}

impl Wrong {
    /// Locates a field of the submission queue entry.
    pub const fn entry(offset: u16) -> Self {
        Self { offset, in_data: false }
    }

    /// Locates a field of the data.
    pub const fn data(offset: u16) -> Self {
        Self { offset, in_data: true }
    }

    /// Returns the field's name, for logs.
    pub fn name(self) -> &'static str {
        match self {
            connect_field::QUEUE => "queue identifier",
            connect_field::SIZE => "queue size",
            connect_field::HOST_ID => "host identifier",
            connect_field::CNTLID => "controller identifier",
            connect_field::SUBSYSTEM => "subsystem NQN",
            connect_field::HOST => "host NQN",
            _ => "unknown field",
        }
    }

    /// Returns the result of the completion, with offset and location of the parameter.
    pub fn result(self) -> u64 {
        u64::from(self.offset) | u64::from(self.in_data) << 16
    }
}

/// Field offsets in the Connect command and its data.
pub mod connect_field {
    use super::Wrong;
    /// Queue identifier.
    pub const QUEUE: Wrong = Wrong::entry(42);
    /// Queue size.
    pub const SIZE: Wrong = Wrong::entry(44);
    /// Host identifier.
    pub const HOST_ID: Wrong = Wrong::data(0);
    /// Controller id.
    pub const CNTLID: Wrong = Wrong::data(16);
    /// NQN of the subsystem.
    pub const SUBSYSTEM: Wrong = Wrong::data(256);
    /// NQN of the host.
    pub const HOST: Wrong = Wrong::data(512);
}

impl Connect {
    /// Decodes a Connect command and its data.
    ///
    /// # Errors
    /// `None` for an unsupported record format; otherwise the invalid parameter.
    pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<Self, Option<Wrong>> {
        if u16_at(&sqe.0, 40) != 0 {
            return Err(None);
        }
        let name = |from: usize, wrong| {
            let text = string_of(&data[from..from + 256]).filter(|text| is_nqn(text));
            text.map(str::to_owned).ok_or(Some(wrong))
        };
        Ok(Self {
            queue: u16_at(&sqe.0, 42),
            sq_size: u16_at(&sqe.0, 44),
            no_flow_control: sqe.0[46] & 4 != 0,
            keep_alive_ms: u32_at(&sqe.0, 48),
            host_id: data[..16].try_into().expect("16 bytes"),
            cntlid: u16_at(data, 16),
            subsystem: name(256, connect_field::SUBSYSTEM)?,
            host: name(512, connect_field::HOST)?,
        })
    }

    /// Encodes the command's fields in `sqe`, and its data; for hosts.
    pub fn encode(&self, mut sqe: Sqe) -> (Sqe, Vec<u8>) {
        sqe.0[4] = fctype::CONNECT;
        sqe.0[42..44].copy_from_slice(&self.queue.to_le_bytes());
        sqe.0[44..46].copy_from_slice(&self.sq_size.to_le_bytes());
        sqe.0[46] = u8::from(self.no_flow_control) << 2;
        sqe.0[48..52].copy_from_slice(&self.keep_alive_ms.to_le_bytes());
        let mut data = DataStructure::new(CONNECT_DATA);
        data.bytes(0, &self.host_id).u16(16, self.cntlid);
        data.string(256, 256, &self.subsystem).string(512, 256, &self.host);
        (sqe, data.finish())
    }
}

/// Returns whether a text may be an NVMe Qualified Name (base 4.5).  Requires only the prefix `nqn.`, a valid
/// length and no control characters, since hosts have names of all kinds.
pub fn is_nqn(text: &str) -> bool {
    text.starts_with("nqn.") && text.len() >= 11 && text.len() <= NQN_MAX && !text.chars().any(char::is_control)
}

/// Property access by a host: the property, its width and its new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Property {
    /// Offset of the property.
    pub offset: u32,
    /// Width of 8 bytes, not 4.
    pub wide: bool,
    /// Value to set; meaningless for Property Get.
    pub value: u64,
}

impl Property {
    /// Decodes a Property Get or Property Set command.
    pub fn decode(sqe: &Sqe) -> Self {
        Self { offset: u32_at(&sqe.0, 44), wide: sqe.0[40] & 7 == 1, value: u64_at(&sqe.0, 48) }
    }
}
