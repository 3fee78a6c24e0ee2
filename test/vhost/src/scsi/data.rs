//! Data that common commands return (SPC-4, SBC-3).

/// Sense data of a failed command (SPC-4, 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodedSense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code, and its qualifier in the lower byte.
    pub code: u16,
}

impl DecodedSense {
    /// Sense key of an invalid field in a command.
    pub const ILLEGAL_REQUEST: u8 = 5;
    /// Sense key of an event that a host has to be informed of.
    pub const UNIT_ATTENTION: u8 = 6;
    /// Sense key of data that differ from those compared with.
    pub const MISCOMPARE: u8 = 14;

    /// Decodes sense data in fixed or descriptor format; fields past the end are 0.  `None` for another format.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let (key, code) = match bytes.first()? & 0x7F {
            0x70 | 0x71 => (2, 12),
            0x72 | 0x73 => (1, 2),
            _ => return None,
        };
        Some(Self { key: byte(key) & 0x0F, code: u16::from_be_bytes([byte(code), byte(code + 1)]) })
    }
}

/// Capacity of a disk, as READ CAPACITY (16) returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskCapacity {
    /// Last logical block.
    pub last_lba: u64,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Logical blocks per physical block, as exponent.
    pub physical_exponent: u8,
    /// Blocks can be deallocated (LBPME).
    pub is_provisioned: bool,
}

impl DiskCapacity {
    /// Decodes parameter data; `None` if it is too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            last_lba: u64::from_be_bytes(*bytes.first_chunk()?),
            block_size: u32::from_be_bytes(bytes.get(8..12)?.try_into().ok()?),
            physical_exponent: bytes.get(13)? & 0x0F,
            is_provisioned: bytes.get(14)? & 0x80 != 0,
        })
    }
}

/// Returns the number of a unit in the first level of a LUN: in peripheral device addressing on bus 0, or in flat space
/// addressing (SAM-5, 4.7.7).
pub fn level_number(level: [u8; 2]) -> Option<u16> {
    match level {
        [0, lun] => Some(lun.into()),
        [high @ 0x40..=0x7F, low] => Some(u16::from_be_bytes([high & 0x3F, low])),
        _ => None,
    }
}

/// Returns the units of the parameter data of REPORT LUNS; `None` if it is cut, or names other LUNs than single-level
/// ones.
pub fn reported_luns(bytes: &[u8]) -> Option<Vec<u16>> {
    let length = u32::from_be_bytes(*bytes.first_chunk()?) as usize;
    let number = |lun: &[u8]| (lun[2..] == [0; 6]).then(|| level_number([lun[0], lun[1]])).flatten();
    bytes.get(8..8 + length)?.chunks(8).map(|lun| if lun.len() == 8 { number(lun) } else { None }).collect()
}

/// Returns page code and body of a vital product data page; `None` if it is cut.
pub fn vpd_page(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let length = usize::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?));
    Some((*bytes.get(1)?, bytes.get(4..4 + length)?))
}

/// Returns generation and keys of the parameter data of READ KEYS; `None` if it is cut.
pub fn reservation_keys(bytes: &[u8]) -> Option<(u32, Vec<u64>)> {
    let (generation, body) = reserve_data(bytes)?;
    let (keys, rest) = body.as_chunks();
    rest.is_empty().then(|| (generation, keys.iter().map(|key| u64::from_be_bytes(*key)).collect()))
}

/// Returns key and type of the reservation in the parameter data of READ RESERVATION: `Some(None)` if there is none,
/// `None` if the data are cut.
pub fn reservation(bytes: &[u8]) -> Option<Option<(u64, u8)>> {
    let (_, body) = reserve_data(bytes)?;
    if body.is_empty() {
        return Some(None);
    }
    Some(Some((u64::from_be_bytes(*body.first_chunk()?), body.get(13)? & 0x0F)))
}

/// Returns generation and body of the parameter data of PERSISTENT RESERVE IN.
fn reserve_data(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let word = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    Some((word(0)?, bytes.get(8..8 + word(4)? as usize)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sense_is_decoded_in_both_formats() {
        let fixed = [0xF0, 0, 0x46, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0x07];
        assert_eq!(DecodedSense::decode(&fixed), Some(DecodedSense { key: 6, code: 0x2907 }));
        assert_eq!(DecodedSense::decode(&[0x72, 5, 0x24, 0]), Some(DecodedSense { key: 5, code: 0x2400 }));
        assert_eq!(DecodedSense::decode(&fixed[..8]), Some(DecodedSense { key: 6, code: 0 }));
        assert_eq!(DecodedSense::decode(&[]), None);
        assert_eq!(DecodedSense::decode(&[0xFF; 18]), None);
    }

    #[test]
    fn capacities_are_decoded() {
        let mut bytes = [0; 32];
        (bytes[7], bytes[10], bytes[13], bytes[14]) = (9, 2, 0x13, 0x80);
        let capacity = DiskCapacity { last_lba: 9, block_size: 512, physical_exponent: 3, is_provisioned: true };
        assert_eq!(DiskCapacity::decode(&bytes), Some(capacity));
        assert_eq!(DiskCapacity::decode(&bytes[..14]), None);
    }

    #[test]
    fn units_are_listed_in_both_methods() {
        let mut bytes = vec![0, 0, 0, 16, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x41, 2, 0, 0, 0, 0, 0, 0];
        assert_eq!(reported_luns(&bytes), Some(vec![7, 258]));
        assert_eq!(reported_luns(&bytes[..23]), None);
        bytes[15] = 1;
        assert_eq!(reported_luns(&bytes), None);
        assert_eq!(reported_luns(&[0; 8]), Some(vec![]));
    }

    #[test]
    fn reservations_are_decoded() {
        let keys = [0, 0, 0, 5, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2];
        assert_eq!(reservation_keys(&keys), Some((5, vec![1, 2])));
        assert_eq!(reservation_keys(&keys[..20]), None);
        let mut held = keys;
        held[21] = 0x13;
        assert_eq!(reservation(&held), Some(Some((1, 3))));
        assert_eq!(reservation(&[0; 8]), Some(None));
        assert_eq!(reservation(&[0; 7]), None);
    }

    #[test]
    fn pages_have_a_code_and_a_body() {
        assert_eq!(vpd_page(&[0, 0x80, 0, 2, 7, 8, 9]), Some((0x80, &[7, 8][..])));
        assert_eq!(vpd_page(&[0, 0x80, 0, 4, 7, 8, 9]), None);
    }
}
