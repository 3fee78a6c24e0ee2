//! Logical unit numbers in their eight-byte form (SAM-5, section 4.6).

/// Logical unit number, decoded.
///
/// Addresses of one level are understood, in peripheral device addressing (numbers up to 255, on bus 0) and in flat
/// space addressing; they are encoded in the former as far as it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lun {
    /// Logical unit of the target.
    Unit(u16),
    /// REPORT LUNS well-known logical unit.
    ReportLuns,
    /// Addressing method that no target here uses.
    Foreign,
}

impl Lun {
    /// Largest number of a logical unit.
    pub const MAX: u16 = 0x3fff;

    /// Decodes eight bytes.
    #[inline]
    pub fn parse(bytes: &[u8; 8]) -> Self {
        if bytes == &[0; 8] {
            return Lun::Unit(0);
        }
        if bytes[2..] != [0; 6] {
            return Lun::Foreign;
        }
        match bytes[0] >> 6 {
            0 if bytes[0] == 0 => Lun::Unit(bytes[1].into()),
            1 => Lun::Unit(u16::from_be_bytes([bytes[0] & 0x3f, bytes[1]])),
            3 if bytes[..2] == [0xc1, 0x01] => Lun::ReportLuns,
            _ => Lun::Foreign,
        }
    }

    /// Encodes the number in eight bytes.
    pub fn to_bytes(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        match self {
            Lun::Unit(lun @ 0..=0xff) => bytes[1] = lun as u8,
            Lun::Unit(lun) => bytes[..2].copy_from_slice(&(lun | 0x4000).to_be_bytes()),
            Lun::ReportLuns => bytes[..2].copy_from_slice(&[0xc1, 0x01]),
            Lun::Foreign => bytes = [0xff; 8],
        }
        bytes
    }

    /// Encodes a unit's number in the first two bytes of the flat space addressing method, whatever the number.
    ///
    /// Transports whose LUN field has other bytes around these use it, such as virtio-scsi (VIRTIO 1.2, section
    /// 5.6.6.1): `01h, target, flat space LUN, 0, 0, 0, 0`.
    pub fn flat(lun: u16) -> [u8; 2] {
        (lun & Self::MAX | 0x4000).to_be_bytes()
    }

    /// Decodes two bytes of a single-level address, in either addressing method.
    pub fn parse_level(bytes: [u8; 2]) -> Self {
        Self::parse(&[bytes[0], bytes[1], 0, 0, 0, 0, 0, 0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_one_name_each() {
        for lun in [0, 1, 255, 256, Lun::MAX] {
            assert_eq!(Lun::parse(&Lun::Unit(lun).to_bytes()), Lun::Unit(lun));
            assert_eq!(Lun::parse_level(Lun::flat(lun)), Lun::Unit(lun));
        }
        assert_eq!(Lun::parse(&[0x40, 7, 0, 0, 0, 0, 0, 0]), Lun::Unit(7), "flat addressing of a small number");
        assert_eq!(Lun::parse(&Lun::ReportLuns.to_bytes()), Lun::ReportLuns);
        for foreign in [[0, 1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0x80, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(Lun::parse(&foreign), Lun::Foreign);
        }
    }
}
