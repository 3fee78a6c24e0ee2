//! NVMe/TCP PDU encoding, after the figures of the TCP transport specification 1.0 and the base specification 2.0.

/// Submission queue entry.
pub type Sqe = [u8; 64];

/// Digest settings of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digests {
    /// Header digest.
    pub header: bool,
    /// Data digest.
    pub data: bool,
}

/// Computes CRC32C bit by bit; slow and simple.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ if crc & 1 != 0 { 0x82F6_3B78 } else { 0 })
    })
}

/// PDU sent by the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pdu {
    /// ICResp PDU.
    IcResp {
        /// Digests granted.
        digests: Digests,
        /// Maximum data of one H2CData in bytes.
        data_max: u32,
    },
    /// Response capsule.
    Response(Completion),
    /// C2HData PDU.
    Data {
        /// Command identifier.
        cid: u16,
        /// Offset of the data in the command's buffer, in bytes.
        offset: u32,
        /// Data bytes.
        data: Vec<u8>,
        /// Last data PDU of the command.
        last: bool,
        /// Success flag: no response capsule follows.
        success: bool,
    },
    /// R2T PDU.
    Ready {
        /// Command identifier.
        cid: u16,
        /// Transfer tag.
        tag: u16,
        /// Offset of the requested data in bytes.
        offset: u32,
        /// Length of the requested data in bytes.
        len: u32,
    },
    /// C2HTermReq PDU.
    Term {
        /// Fatal error status.
        status: u16,
        /// Fatal error information.
        information: u32,
        /// Header of the PDU in error.
        header: Vec<u8>,
    },
}

/// Completion queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Completion {
    /// Dwords 0 and 1.
    pub result: u64,
    /// Submission queue head pointer.
    pub sq_head: u16,
    /// Command identifier.
    pub cid: u16,
    /// Status code and type; 0 for success.
    pub status: u16,
    /// Do Not Retry bit.
    pub final_: bool,
}

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Builds an ICReq.
pub fn ic_req(digests: Digests, alignment: u8) -> Vec<u8> {
    let mut pdu = vec![0; 128];
    (pdu[2], pdu[4]) = (128, 128);
    pdu[10] = alignment;
    pdu[11] = u8::from(digests.header) | u8::from(digests.data) << 1;
    pdu
}

fn finish(mut header: Vec<u8>, data: &[u8], digests: Digests) -> Vec<u8> {
    let header_len = header.len();
    if digests.header {
        header[1] |= 1;
    }
    let digest_len = if digests.header { 4 } else { 0 };
    let mut len = header_len + digest_len + data.len();
    if !data.is_empty() {
        header[3] = (header_len + digest_len) as u8;
        if digests.data {
            header[1] |= 2;
            len += 4;
        }
    }
    header[2] = header_len as u8;
    header[4..8].copy_from_slice(&(len as u32).to_le_bytes());
    let mut pdu = header;
    if digests.header {
        let digest = crc32c(&pdu);
        pdu.extend_from_slice(&digest.to_le_bytes());
    }
    pdu.extend_from_slice(data);
    if digests.data && !data.is_empty() {
        pdu.extend_from_slice(&crc32c(data).to_le_bytes());
    }
    pdu
}

/// Builds a command capsule.
pub fn command(sqe: &Sqe, data: &[u8], digests: Digests) -> Vec<u8> {
    let mut header = vec![4, 0, 0, 0, 0, 0, 0, 0];
    header.extend_from_slice(sqe);
    finish(header, data, digests)
}

/// Builds an H2CData.
pub fn data(cid: u16, tag: u16, offset: u32, bytes: &[u8], last: bool, digests: Digests) -> Vec<u8> {
    let mut header = vec![6, if last { 4 } else { 0 }, 0, 0, 0, 0, 0, 0];
    header.extend_from_slice(&cid.to_le_bytes());
    header.extend_from_slice(&tag.to_le_bytes());
    header.extend_from_slice(&offset.to_le_bytes());
    header.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    header.extend_from_slice(&[0; 4]);
    finish(header, bytes, digests)
}

/// Decodes the PDU at the start of `bytes`, and returns its length; `None` when more is needed.
///
/// # Panics
/// When it is not a valid PDU: a target must not send one.
pub fn decode(bytes: &[u8], digests: Digests) -> Option<(Pdu, usize)> {
    if bytes.len() < 8 {
        return None;
    }
    let len = le32(bytes, 4) as usize;
    assert!((8..=16 << 20).contains(&len), "a PDU of {len} bytes");
    if bytes.len() < len {
        return None;
    }
    let pdu = &bytes[..len];
    let (kind, flags, header_len, offset) = (pdu[0], pdu[1], usize::from(pdu[2]), usize::from(pdu[3]));
    let want = match kind {
        1 => 128,
        3 | 5 | 7 | 9 => 24,
        _ => panic!("a PDU of type {kind}"),
    };
    assert_eq!(header_len, want, "the header of type {kind}");
    let digested = kind != 1 && kind != 3;
    assert_eq!(flags & 1 != 0, digests.header && digested, "header digest of type {kind}");
    if digested && digests.header {
        assert_eq!(le32(pdu, header_len), crc32c(&pdu[..header_len]), "a header's digest");
    }
    let parsed = match kind {
        1 => {
            assert_eq!(le16(pdu, 8), 0, "PDU format version");
            let digests = Digests { header: pdu[11] & 1 != 0, data: pdu[11] & 2 != 0 };
            Pdu::IcResp { digests, data_max: le32(pdu, 12) }
        }
        3 => Pdu::Term { status: le16(pdu, 8), information: le32(pdu, 10), header: pdu[24..].to_vec() },
        5 => {
            let status = le16(pdu, 22);
            assert_eq!(status & 1, 0, "there is no phase over fabrics");
            Pdu::Response(Completion {
                result: u64::from(le32(pdu, 8)) | u64::from(le32(pdu, 12)) << 32,
                sq_head: le16(pdu, 16),
                cid: le16(pdu, 20),
                status: status >> 1 & 0x7FF,
                final_: status & 0x8000 != 0,
            })
        }
        9 => Pdu::Ready { cid: le16(pdu, 8), tag: le16(pdu, 10), offset: le32(pdu, 12), len: le32(pdu, 16) },
        _ => {
            let (size, data_len) = (len - offset, le32(pdu, 16) as usize);
            let digest = if digests.data { 4 } else { 0 };
            assert_eq!(flags & 2 != 0, digests.data, "data digest");
            assert_eq!(size, data_len + digest, "the length of data");
            let data = pdu[offset..offset + data_len].to_vec();
            if digests.data {
                assert_eq!(le32(pdu, offset + data_len), crc32c(&data), "the data's digest");
            }
            let (last, success) = (flags & 4 != 0, flags & 8 != 0);
            assert!(last || !success, "SUCCESS without LAST");
            Pdu::Data { cid: le16(pdu, 8), offset: le32(pdu, 12), data, last, success }
        }
    };
    Some((parsed, len))
}

/// Builds an entry with opcode and namespace; the sender assigns its command identifier.
pub fn sqe(opcode: u8, nsid: u32) -> Sqe {
    let mut sqe = [0; 64];
    sqe[0] = opcode;
    sqe[1] = 0x40;
    sqe[4..8].copy_from_slice(&nsid.to_le_bytes());
    sqe
}

/// Sets command dword `index`.
pub fn with(mut sqe: Sqe, index: usize, value: u32) -> Sqe {
    sqe[index * 4..index * 4 + 4].copy_from_slice(&value.to_le_bytes());
    sqe
}

/// Sets the SGL descriptor for data of `len` bytes, in the capsule or not.
pub fn with_data(mut sqe: Sqe, len: usize, in_capsule: bool) -> Sqe {
    sqe[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    sqe[39] = if in_capsule { 0x01 } else { 0x5A };
    sqe
}

/// Builds a command on a range of logical blocks.
pub fn blocks(opcode: u8, nsid: u32, first: u64, count: u32) -> Sqe {
    let mut sqe = with(sqe(opcode, nsid), 12, count - 1);
    sqe[40..48].copy_from_slice(&first.to_le_bytes());
    sqe
}

/// Builds Connect, and its data.
pub fn connect(queue: u16, entries: u16, subsystem: &str, host: &str, cntlid: u16, flow: bool) -> (Sqe, Vec<u8>) {
    let mut sqe = sqe(0x7F, 0);
    sqe[4] = 1;
    sqe[42..44].copy_from_slice(&queue.to_le_bytes());
    sqe[44..46].copy_from_slice(&(entries - 1).to_le_bytes());
    sqe[46] = if flow { 0 } else { 4 };
    let mut data = vec![0; 1024];
    data[..16].copy_from_slice(&host_id(host));
    data[16..18].copy_from_slice(&cntlid.to_le_bytes());
    data[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
    data[512..512 + host.len()].copy_from_slice(host.as_bytes());
    (sqe, data)
}

/// Derives a host identifier from a name.
pub fn host_id(host: &str) -> [u8; 16] {
    std::array::from_fn(|at| host.bytes().rev().cycle().nth(at).unwrap_or(1) ^ at as u8)
}

/// Builds Property Get or Set.
pub fn property(offset: u32, wide: bool, set: Option<u64>) -> Sqe {
    let mut sqe = sqe(0x7F, 0);
    sqe[4] = if set.is_some() { 0 } else { 4 };
    sqe[40] = wide.into();
    sqe[44..48].copy_from_slice(&offset.to_le_bytes());
    sqe[48..56].copy_from_slice(&set.unwrap_or(0).to_le_bytes());
    sqe
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(super::crc32c(b"123456789"), 0xE306_9283);
    }
}
