//! Driver side of virtio-scsi (VIRTIO 1.2, 5.6).
//!
//! A [`ScsiHost`] runs [commands](ScsiHostCommand) on request queues, [task management and
//! subscriptions](ScsiHostControl) on the control queue, and decodes [events](ScsiHostEvent) of the event queue.
//! [`cdb`] builds CDBs, [`data`] decodes what common commands return.

pub mod cdb;
pub mod command;
pub mod control;
pub mod data;
mod host;
mod units;

pub use command::{ScsiFieldSizes, ScsiHostCommand, ScsiHostCompletion};
pub use control::{ScsiHostControl, ScsiHostControlReply, ScsiHostEvent};
pub use host::{ScsiHost, SubmittedScsiCommand};

/// Index of the queue of control requests.
pub const CONTROL_QUEUE: usize = 0;
/// Index of the queue of event buffers.
pub const EVENT_QUEUE: usize = 1;
/// Index of the first queue of commands.
pub const FIRST_REQUEST_QUEUE: usize = 2;

/// Bytes of the device's configuration.
pub const CONFIG_SIZE: u32 = 36;
/// Offset of `sense_size` in the configuration, which a driver may write.
pub const SENSE_SIZE_OFFSET: u32 = 20;
/// Offset of `cdb_size` in the configuration, which a driver may write.
pub const CDB_SIZE_OFFSET: u32 = 24;

/// Address of a logical unit in requests and events (5.6.6.1).
pub type VirtioScsiLun = [u8; 8];

/// Address of the REPORT LUNS well-known logical unit.
pub const REPORT_LUNS_UNIT: VirtioScsiLun = [0xC1, 0x01, 0, 0, 0, 0, 0, 0];

/// Returns the address of a unit, in flat space addressing (SAM-5, 4.7.7.4).
pub fn unit_address(target: u8, lun: u16) -> VirtioScsiLun {
    let [high, low] = (lun | 0x4000).to_be_bytes();
    [1, target, high, low, 0, 0, 0, 0]
}

/// Returns the address of a unit of a number below 256, in peripheral device addressing (SAM-5, 4.7.7.2).
pub fn peripheral_address(target: u8, lun: u8) -> VirtioScsiLun {
    [1, target, 0, lun, 0, 0, 0, 0]
}

/// Returns target and number of a unit; `None` for the address of anything else.
pub fn unit_number(address: VirtioScsiLun) -> Option<(u8, u16)> {
    let [1, target, high, low, 0, 0, 0, 0] = address else { return None };
    data::level_number([high, low]).map(|lun| (target, lun))
}

/// Response codes of commands and control requests (5.6.6.1 and 5.6.6.2).
#[allow(missing_docs)]
pub mod response {
    pub const OK: u8 = 0;
    pub const OVERRUN: u8 = 1;
    pub const ABORTED: u8 = 2;
    pub const BAD_TARGET: u8 = 3;
    pub const RESET: u8 = 4;
    pub const BUSY: u8 = 5;
    pub const TRANSPORT_FAILURE: u8 = 6;
    pub const TARGET_FAILURE: u8 = 7;
    pub const NEXUS_FAILURE: u8 = 8;
    pub const FAILURE: u8 = 9;
    pub const FUNCTION_SUCCEEDED: u8 = 10;
    pub const FUNCTION_REJECTED: u8 = 11;
    pub const INCORRECT_LUN: u8 = 12;
}

/// SCSI status codes (SAM-5, 5.3.1).
#[allow(missing_docs)]
pub mod status {
    pub const GOOD: u8 = 0x00;
    pub const CHECK_CONDITION: u8 = 0x02;
    pub const CONDITION_MET: u8 = 0x04;
    pub const BUSY: u8 = 0x08;
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    pub const TASK_SET_FULL: u8 = 0x28;
    pub const ACA_ACTIVE: u8 = 0x30;
    pub const TASK_ABORTED: u8 = 0x40;
}

/// Device configuration (5.6.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScsiHostConfig {
    /// Number of request queues.
    pub num_queues: u32,
    /// Maximum segments of a command.
    pub seg_max: u32,
    /// Maximum data of a command, in units of 512 bytes.
    pub max_sectors: u32,
    /// Maximum linked commands on a unit.
    pub cmd_per_lun: u32,
    /// Bytes of an event.
    pub event_info_size: u32,
    /// Bytes of the sense field in responses.
    pub sense_size: u32,
    /// Bytes of the CDB field in commands.
    pub cdb_size: u32,
    /// Highest number of a channel.
    pub max_channel: u16,
    /// Highest number of a target.
    pub max_target: u16,
    /// Highest number of a unit.
    pub max_lun: u32,
}

impl ScsiHostConfig {
    /// Decodes the configuration; fields past the end are 0.
    pub fn decode(bytes: &[u8]) -> Self {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let short = |at: usize| u16::from_le_bytes([byte(at), byte(at + 1)]);
        let word = |at: usize| u32::from(short(at)) | u32::from(short(at + 2)) << 16;
        Self {
            num_queues: word(0),
            seg_max: word(4),
            max_sectors: word(8),
            cmd_per_lun: word(12),
            event_info_size: word(16),
            sense_size: word(SENSE_SIZE_OFFSET as usize),
            cdb_size: word(CDB_SIZE_OFFSET as usize),
            max_channel: short(28),
            max_target: short(30),
            max_lun: word(32),
        }
    }

    /// Returns the sizes of variable fields.
    pub fn sizes(&self) -> ScsiFieldSizes {
        ScsiFieldSizes { cdb: self.cdb_size, sense: self.sense_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_its_fields() {
        let bytes: Vec<u8> = (0..CONFIG_SIZE as u8).collect();
        let config = ScsiHostConfig::decode(&bytes);
        assert_eq!((config.num_queues, config.seg_max, config.max_sectors), (0x0302_0100, 0x0706_0504, 0x0B0A_0908));
        assert_eq!((config.cmd_per_lun, config.event_info_size), (0x0F0E_0D0C, 0x1312_1110));
        assert_eq!(config.sizes(), ScsiFieldSizes { cdb: 0x1B1A_1918, sense: 0x1716_1514 });
        assert_eq!((config.max_channel, config.max_target, config.max_lun), (0x1D1C, 0x1F1E, 0x2322_2120));
        assert_eq!(ScsiHostConfig::decode(&bytes[..34]).max_lun, 0x2120);
    }

    #[test]
    fn units_have_an_address_in_either_method() {
        assert_eq!(unit_address(2, 0x1234), [1, 2, 0x52, 0x34, 0, 0, 0, 0]);
        assert_eq!(peripheral_address(2, 7), [1, 2, 0, 7, 0, 0, 0, 0]);
        assert_eq!(unit_number(unit_address(2, 0x1234)), Some((2, 0x1234)));
        assert_eq!(unit_number(peripheral_address(0, 255)), Some((0, 255)));
        for other in [REPORT_LUNS_UNIT, [0; 8], [1, 0, 0x80, 0, 0, 0, 0, 0], [1, 0, 0x40, 0, 0, 0, 0, 1]] {
            assert_eq!(unit_number(other), None);
        }
    }
}
