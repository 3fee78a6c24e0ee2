//! Sense data: error reports of failed commands (SPC-4, section 4.5).

/// Sense keys.
pub mod key {
    /// No error.
    pub const NO_SENSE: u8 = 0;
    /// Unit not accessible.
    pub const NOT_READY: u8 = 2;
    /// Medium error.
    pub const MEDIUM_ERROR: u8 = 3;
    /// Hardware failure in the unit.
    pub const HARDWARE_ERROR: u8 = 4;
    /// Illegal parameter in the CDB or the parameter list.
    pub const ILLEGAL_REQUEST: u8 = 5;
    /// Event that the initiator has to be informed of.
    pub const UNIT_ATTENTION: u8 = 6;
    /// Write access denied.
    pub const DATA_PROTECT: u8 = 7;
    /// Third-party copy aborted.
    pub const COPY_ABORTED: u8 = 10;
    /// Command aborted by the device server.
    pub const ABORTED_COMMAND: u8 = 11;
    /// Source data does not match the data on the medium.
    pub const MISCOMPARE: u8 = 14;
}

/// Additional sense codes, the qualifier in the lower byte.
pub mod code {
    /// No additional sense information.
    pub const NONE: u16 = 0x0000;
    /// Logical unit not ready, cause not reportable.
    pub const NOT_READY: u16 = 0x0400;
    /// Logical unit not ready, initializing command required.
    pub const STOPPED: u16 = 0x0402;
    /// Write error.
    pub const WRITE_ERROR: u16 = 0x0c00;
    /// Unexpected unsolicited data.
    pub const UNEXPECTED_DATA: u16 = 0x0c0c;
    /// Not enough unsolicited data.
    pub const TOO_LITTLE_DATA: u16 = 0x0c0d;
    /// Invalid field in command information unit.
    pub const INFORMATION_UNIT: u16 = 0x0e03;
    /// Third party device failure.
    pub const THIRD_PARTY: u16 = 0x0d01;
    /// Copy target device not reachable.
    pub const COPY_UNREACHABLE: u16 = 0x0d02;
    /// Unrecovered read error.
    pub const READ_ERROR: u16 = 0x1100;
    /// Parameter list length error.
    pub const PARAMETER_LIST_LENGTH: u16 = 0x1a00;
    /// Miscompare during verify operation.
    pub const MISCOMPARE: u16 = 0x1d00;
    /// Invalid command operation code.
    pub const INVALID_OPCODE: u16 = 0x2000;
    /// Logical block address out of range.
    pub const OUT_OF_RANGE: u16 = 0x2100;
    /// Invalid field in CDB.
    pub const FIELD_IN_CDB: u16 = 0x2400;
    /// Logical unit not supported.
    pub const NO_UNIT: u16 = 0x2500;
    /// Invalid field in parameter list.
    pub const FIELD_IN_LIST: u16 = 0x2600;
    /// Invalid release of persistent reservation.
    pub const INVALID_RELEASE: u16 = 0x2604;
    /// Too many target descriptors.
    pub const TOO_MANY_TARGETS: u16 = 0x2606;
    /// Unsupported target descriptor type code.
    pub const TARGET_TYPE: u16 = 0x2607;
    /// Too many segment descriptors.
    pub const TOO_MANY_SEGMENTS: u16 = 0x2608;
    /// Unsupported segment descriptor type code.
    pub const SEGMENT_TYPE: u16 = 0x2609;
    /// Write protected.
    pub const WRITE_PROTECTED: u16 = 0x2700;
    /// Space allocation failed write protect.
    pub const NO_SPACE: u16 = 0x2707;
    /// Power on, reset, or bus device reset occurred.
    pub const POWER_ON: u16 = 0x2900;
    /// Bus device reset function occurred.
    pub const UNIT_RESET: u16 = 0x2903;
    /// I_T nexus loss occurred.
    pub const NEXUS_LOSS: u16 = 0x2907;
    /// Mode parameters changed.
    pub const MODE_CHANGED: u16 = 0x2a01;
    /// Reservations preempted.
    pub const PREEMPTED: u16 = 0x2a03;
    /// Reservations released.
    pub const RELEASED: u16 = 0x2a04;
    /// Registrations preempted.
    pub const REGISTRATION_PREEMPTED: u16 = 0x2a05;
    /// Asymmetric access state changed.
    pub const ACCESS_STATE_CHANGED: u16 = 0x2a06;
    /// Capacity data has changed.
    pub const CAPACITY_CHANGED: u16 = 0x2a09;
    /// Commands cleared by another initiator.
    pub const CLEARED: u16 = 0x2f00;
    /// Thin provisioning soft threshold reached.
    pub const SOFT_THRESHOLD: u16 = 0x3807;
    /// Saving parameters not supported.
    pub const SAVING: u16 = 0x3900;
    /// INQUIRY data has changed.
    pub const INQUIRY_CHANGED: u16 = 0x3f03;
    /// Target operating conditions have changed.
    pub const REPORTED_LUNS: u16 = 0x3f0e;
    /// Internal target failure.
    pub const INTERNAL: u16 = 0x4400;
    /// Protocol service CRC error.
    pub const CRC: u16 = 0x4705;
    /// Data phase error.
    pub const DATA_PHASE: u16 = 0x4b00;
    /// Insufficient registration resources.
    pub const REGISTRATION_RESOURCES: u16 = 0x5504;
    /// Insufficient resources.
    pub const RESOURCES: u16 = 0x5503;
}

/// Position of an invalid field in a CDB or parameter list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Field is in the CDB; otherwise in the parameter list.
    pub in_cdb: bool,
    /// Byte offset.
    pub byte: u16,
    /// Most significant bit of the field, if it is not the whole byte.
    pub bit: Option<u8>,
}

/// Sense data of a failed command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code.
    pub code: u16,
    /// INFORMATION field: an LBA or offset, depending on the code.
    pub info: Option<u64>,
    /// Position of the invalid field.
    pub field: Option<Field>,
}

impl Sense {
    /// Creates sense data from a key and a code.
    pub const fn new(key: u8, code: u16) -> Self {
        Self { key, code, info: None, field: None }
    }

    /// Creates sense data with key ILLEGAL REQUEST.
    pub const fn illegal(code: u16) -> Self {
        Self::new(key::ILLEGAL_REQUEST, code)
    }

    /// Creates sense data with key UNIT ATTENTION.
    pub const fn attention(code: u16) -> Self {
        Self::new(key::UNIT_ATTENTION, code)
    }

    /// Creates sense data for an invalid field in the CDB.
    pub const fn cdb(byte: u16) -> Self {
        Self { field: Some(Field { in_cdb: true, byte, bit: None }), ..Self::illegal(code::FIELD_IN_CDB) }
    }

    /// Creates sense data for an invalid bit field in the CDB; `bit` is its most significant bit.
    pub const fn cdb_bit(byte: u16, bit: u8) -> Self {
        Self { field: Some(Field { in_cdb: true, byte, bit: Some(bit) }), ..Self::illegal(code::FIELD_IN_CDB) }
    }

    /// Creates sense data for an invalid field in the parameter list.
    pub const fn list(byte: u16) -> Self {
        Self { field: Some(Field { in_cdb: false, byte, bit: None }), ..Self::illegal(code::FIELD_IN_LIST) }
    }

    /// Sets the INFORMATION field, an LBA or offset.
    pub const fn with_info(self, info: u64) -> Self {
        Self { info: Some(info), ..self }
    }

    /// Encodes the sense data in fixed or descriptor format.
    pub fn to_bytes(self, descriptor: bool) -> Vec<u8> {
        let [asc, ascq] = self.code.to_be_bytes();
        let specific = self.field.map(|field| {
            let [high, low] = field.byte.to_be_bytes();
            let bit = field.bit.map_or(0, |bit| 0x08 | bit);
            [0x80 | if field.in_cdb { 0x40 } else { 0 } | bit, high, low]
        });
        if descriptor {
            let mut out = vec![0x72, self.key, asc, ascq, 0, 0, 0, 0];
            if let Some(info) = self.info {
                out.extend([0x00, 0x0a, 0x80, 0]);
                out.extend(info.to_be_bytes());
            }
            if let Some(specific) = specific {
                out.extend([0x02, 0x06, 0, 0]);
                out.extend(specific);
                out.push(0);
            }
            out[7] = (out.len() - 8) as u8;
            return out;
        }
        let mut out = vec![0; 18];
        out[0] = 0x70;
        out[2] = self.key;
        if let Some(info) = self.info.and_then(|info| u32::try_from(info).ok()) {
            out[0] |= 0x80;
            out[3..7].copy_from_slice(&info.to_be_bytes());
        }
        out[7] = 10;
        (out[12], out[13]) = (asc, ascq);
        if let Some(specific) = specific {
            out[15..18].copy_from_slice(&specific);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_say_the_same() {
        let sense = Sense { info: Some(5), ..Sense::cdb_bit(2, 7) };
        let fixed = sense.to_bytes(false);
        assert_eq!((fixed[0], fixed[2], fixed[12], fixed[13], fixed.len()), (0xf0, 5, 0x24, 0, 18));
        assert_eq!((&fixed[3..7], &fixed[15..18]), (&[0, 0, 0, 5][..], &[0xcf, 0, 2][..]));
        let descriptor = sense.to_bytes(true);
        assert_eq!(&descriptor[..4], [0x72, 5, 0x24, 0]);
        assert_eq!(usize::from(descriptor[7]) + 8, descriptor.len());
        assert_eq!(descriptor[19], 5);
        assert_eq!(&descriptor[20..28], [2, 6, 0, 0, 0xcf, 0, 2, 0]);
        let far = Sense::new(key::MEDIUM_ERROR, code::READ_ERROR).with_info(1 << 40);
        assert_eq!(far.to_bytes(false)[0], 0x70, "a number that does not fit is not said");
    }
}
