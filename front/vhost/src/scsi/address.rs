//! Addresses of units, in the eight bytes of virtio-scsi (VIRTIO 1.2, section 5.6.6.1).
//!
//! ```text
//! unit of a target:                       01 | target | LUN, one level u16 | 0 0 0 0
//! REPORT LUNS well-known logical unit:    C1   01       0 0                  0 0 0 0
//! ```

use forebay_scsi::Lun;

/// Number of the only target.
const TARGET: u8 = 0;

/// Address that no unit of the device's only target can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("SCSI address {0:02x?} is not one of target {TARGET}")]
pub struct BadTarget(pub [u8; 8]);

/// Encoding of addresses: the target is always number 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiAddress;

impl ScsiAddress {
    /// Decodes the address of a request, with a LUN in either addressing method.  The unit need not exist.
    ///
    /// # Errors
    /// When it is one of another target, or in another format.
    pub fn parse(bytes: &[u8; 8]) -> Result<Lun, BadTarget> {
        let lun = match *bytes {
            [1, TARGET, high, low, 0, 0, 0, 0] => Lun::parse_level([high, low]),
            // The well-known logical unit, which has an address of its own besides those in a target.
            [0xc1, ..] => Lun::parse(bytes),
            _ => Lun::Foreign,
        };
        if lun == Lun::Foreign { Err(BadTarget(*bytes)) } else { Ok(lun) }
    }

    /// Checks the target of an address whose LUN means nothing, as that of a function for the whole I_T nexus.
    ///
    /// # Errors
    /// When it is another target.
    pub fn check_target(bytes: &[u8; 8]) -> Result<(), BadTarget> {
        if bytes[..2] == [1, TARGET] { Ok(()) } else { Err(BadTarget(*bytes)) }
    }

    /// Encodes the address of a unit, for an event.
    ///
    /// The LUN is encoded as REPORT LUNS encodes it: Linux finds the unit of an event by comparing these bits.
    pub fn to_bytes(lun: u16) -> [u8; 8] {
        let level = Lun::Unit(lun & Lun::MAX).to_bytes();
        [1, TARGET, level[0], level[1], 0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_units_are_decoded_in_both_methods() {
        for lun in [0, 1, 255, 256, 0x1234, Lun::MAX] {
            assert_eq!(ScsiAddress::parse(&ScsiAddress::to_bytes(lun)), Ok(Lun::Unit(lun)));
            let [high, low] = Lun::flat(lun);
            assert_eq!(ScsiAddress::parse(&[1, 0, high, low, 0, 0, 0, 0]), Ok(Lun::Unit(lun)), "as Linux sends it");
        }
        assert_eq!(ScsiAddress::to_bytes(7), [1, 0, 0, 7, 0, 0, 0, 0]);
        assert_eq!(ScsiAddress::to_bytes(300), [1, 0, 0x41, 0x2c, 0, 0, 0, 0]);
        for well_known in [[0xc1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0xc1, 1, 0, 0, 0, 0]] {
            assert_eq!(ScsiAddress::parse(&well_known), Ok(Lun::ReportLuns));
        }
    }

    #[test]
    fn addresses_of_other_targets_are_refused() {
        for bytes in [
            [1, 1, 0x40, 0, 0, 0, 0, 0],
            [0, 0, 0x40, 0, 0, 0, 0, 0],
            [1, 0, 0x80, 0, 0, 0, 0, 0],
            [1, 0, 0x40, 0, 0, 1, 0, 0],
            [1, 0, 1, 0, 0, 0, 0, 0],
            [0xc1, 2, 0, 0, 0, 0, 0, 0],
            [0xc1, 1, 0, 0, 0, 0, 0, 1],
            [0; 8],
        ] {
            assert_eq!(ScsiAddress::parse(&bytes), Err(BadTarget(bytes)));
        }
        assert!(ScsiAddress::check_target(&[1, 0, 0x80, 9, 9, 9, 9, 9]).is_ok());
        assert!(ScsiAddress::check_target(&[1, 1, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
