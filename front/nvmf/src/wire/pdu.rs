//! PDUs of the TCP transport (tcp 3.6).

use super::command::CQE_LEN;
use super::{u16_at, u32_at};

/// Bytes of the common header (CH).
pub const COMMON: usize = 8;
/// Bytes of ICReq and ICResp.
pub const IC_LEN: usize = 128;
/// Bytes of a command capsule's header: the common header and the submission queue entry.
pub const CAPSULE_HEADER: usize = 72;
/// Bytes of a response capsule's header: the common header and the completion queue entry.
pub const RESPONSE_HEADER: usize = COMMON + CQE_LEN;
/// Bytes of the header of H2CData, C2HData, R2T and both TermReq.
pub const DATA_HEADER: usize = 24;
/// Bytes of a digest.
pub const DIGEST: usize = 4;
/// Maximum bytes of a TermReq: its header and the start of the offending PDU.
pub const TERM_MAX: usize = DATA_HEADER + 128;

/// PDU types.
pub mod kind {
    /// Initialize Connection Request.
    pub const IC_REQ: u8 = 0x00;
    /// Initialize Connection Response.
    pub const IC_RESP: u8 = 0x01;
    /// Host to Controller Terminate Connection Request.
    pub const H2C_TERM: u8 = 0x02;
    /// Controller to Host Terminate Connection Request.
    pub const C2H_TERM: u8 = 0x03;
    /// Command Capsule.
    pub const COMMAND: u8 = 0x04;
    /// Response Capsule.
    pub const RESPONSE: u8 = 0x05;
    /// Host to Controller Data.
    pub const H2C_DATA: u8 = 0x06;
    /// Controller to Host Data.
    pub const C2H_DATA: u8 = 0x07;
    /// Ready to Transfer.
    pub const R2T: u8 = 0x09;
}

/// Flags of the common header.
pub mod flag {
    /// A header digest follows the header.
    pub const HEADER_DIGEST: u8 = 1;
    /// A data digest follows the data.
    pub const DATA_DIGEST: u8 = 2;
    /// Last PDU of the transfer.
    pub const LAST: u8 = 4;
    /// Successful completion, without a response capsule.
    pub const SUCCESS: u8 = 8;
}

/// Fatal Error Status of a TermReq (tcp figure 23).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Fes {
    /// Invalid header field; the information is its offset.
    InvalidField = 1,
    /// PDU sequence error.
    Sequence = 2,
    /// Header digest error; the information is the received digest.
    HeaderDigest = 3,
    /// Data outside of the requested range.
    DataOutOfRange = 4,
    /// Data transfer limit exceeded.
    DataLimit = 5,
    /// Unsupported parameter; the information is its offset.
    Unsupported = 6,
}

/// Common header of a PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common {
    /// PDU type.
    pub kind: u8,
    /// Flags of the PDU.
    pub flags: u8,
    /// Bytes of the header, without its digest.
    pub header_len: u8,
    /// Offset of the data from the start of the PDU, in bytes; 0 without data.
    pub data_offset: u8,
    /// Bytes of the whole PDU.
    pub len: u32,
}

impl Common {
    /// Decodes the first bytes of a PDU.
    ///
    /// # Panics
    /// When they are fewer than [`COMMON`].
    pub fn decode(bytes: &[u8]) -> Self {
        Self { kind: bytes[0], flags: bytes[1], header_len: bytes[2], data_offset: bytes[3], len: u32_at(bytes, 4) }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; COMMON] {
        let mut out = [self.kind, self.flags, self.header_len, self.data_offset, 0, 0, 0, 0];
        out[4..].copy_from_slice(&self.len.to_le_bytes());
        out
    }
}

/// Digest flags of ICReq and ICResp.
pub mod digest {
    /// Header digest enabled.
    pub const HEADER: u8 = 1;
    /// Data digest enabled.
    pub const DATA: u8 = 2;
}

/// ICReq: parameters requested by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IcReq {
    /// PDU format version.
    pub version: u16,
    /// Alignment of data towards the host (HPDA), in dwords, zero-based.
    pub host_alignment: u8,
    /// Requested digests, as flags of [`digest`].
    pub digests: u8,
    /// Maximum outstanding R2Ts per command (MAXR2T), zero-based.
    pub r2t_max: u32,
}

impl IcReq {
    /// Decodes a PDU.
    ///
    /// # Panics
    /// When it has fewer bytes than [`IC_LEN`].
    pub fn decode(bytes: &[u8]) -> Self {
        Self { version: u16_at(bytes, 8), host_alignment: bytes[10], digests: bytes[11], r2t_max: u32_at(bytes, 12) }
    }

    /// Encodes the PDU.
    pub fn encode(&self) -> [u8; IC_LEN] {
        let mut out = [0; IC_LEN];
        let common = Common { kind: kind::IC_REQ, flags: 0, header_len: 128, data_offset: 0, len: IC_LEN as u32 };
        out[..COMMON].copy_from_slice(&common.encode());
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.host_alignment;
        out[11] = self.digests;
        out[12..16].copy_from_slice(&self.r2t_max.to_le_bytes());
        out
    }
}

/// ICResp: parameters granted by the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IcResp {
    /// PDU format version.
    pub version: u16,
    /// Alignment of data towards the controller (CPDA), in dwords, zero-based.
    pub controller_alignment: u8,
    /// Enabled digests, as flags of [`digest`].
    pub digests: u8,
    /// Maximum bytes of data in one H2CData (MAXH2CDATA).
    pub h2c_data_max: u32,
}

impl IcResp {
    /// Decodes a PDU.
    ///
    /// # Panics
    /// When it has fewer bytes than [`IC_LEN`].
    pub fn decode(bytes: &[u8]) -> Self {
        Self {
            version: u16_at(bytes, 8),
            controller_alignment: bytes[10],
            digests: bytes[11],
            h2c_data_max: u32_at(bytes, 12),
        }
    }

    /// Encodes the PDU.
    pub fn encode(&self) -> [u8; IC_LEN] {
        let mut out = [0; IC_LEN];
        let common = Common { kind: kind::IC_RESP, flags: 0, header_len: 128, data_offset: 0, len: IC_LEN as u32 };
        out[..COMMON].copy_from_slice(&common.encode());
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10] = self.controller_alignment;
        out[11] = self.digests;
        out[12..16].copy_from_slice(&self.h2c_data_max.to_le_bytes());
        out
    }
}

/// PDU-specific header fields of H2CData, C2HData and R2T.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHeader {
    /// Command identifier.
    pub cid: u16,
    /// Transfer tag; 0 in C2HData.
    pub tag: u16,
    /// Offset in bytes from the start of the command's data.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

impl DataHeader {
    /// Decodes a PDU's header.
    ///
    /// # Panics
    /// When it has fewer bytes than [`DATA_HEADER`].
    pub fn decode(bytes: &[u8]) -> Self {
        Self { cid: u16_at(bytes, 8), tag: u16_at(bytes, 10), offset: u32_at(bytes, 12), len: u32_at(bytes, 16) }
    }

    /// Encodes the whole header of a PDU, with its common header.
    pub fn encode(&self, common: Common) -> [u8; DATA_HEADER] {
        let mut out = [0; DATA_HEADER];
        out[..COMMON].copy_from_slice(&common.encode());
        out[8..10].copy_from_slice(&self.cid.to_le_bytes());
        out[10..12].copy_from_slice(&self.tag.to_le_bytes());
        out[12..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..20].copy_from_slice(&self.len.to_le_bytes());
        out
    }
}

/// Encodes a TermReq for an error in a PDU that began with `header`.
pub fn term(kind: u8, status: Fes, information: u32, header: &[u8]) -> Vec<u8> {
    let header = &header[..header.len().min(TERM_MAX - DATA_HEADER)];
    let len = (DATA_HEADER + header.len()) as u32;
    let mut out = Common { kind, flags: 0, header_len: DATA_HEADER as u8, data_offset: 0, len }.encode().to_vec();
    out.extend_from_slice(&(status as u16).to_le_bytes());
    out.extend_from_slice(&information.to_le_bytes());
    out.resize(DATA_HEADER, 0);
    out.extend_from_slice(header);
    out
}
