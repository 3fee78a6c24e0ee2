//! Commands of request queues (VIRTIO 1.2, 5.6.6.1).

use super::data::DecodedSense;
use super::{VirtioScsiLun, cdb, response, status, unit_address};
use crate::block::SECTOR;
use crate::buffers::{UNWRITTEN, UsedBuffers, VirtqBuffers};

/// Task attributes.
#[allow(missing_docs)]
pub mod attribute {
    pub const SIMPLE: u8 = 0;
    pub const ORDERED: u8 = 1;
    pub const HEAD: u8 = 2;
    pub const ACA: u8 = 3;
}

/// Bytes of a command before its CDB.
pub const COMMAND_PREFIX: u32 = 19;
/// Bytes of a response before its sense data.
pub const RESPONSE_PREFIX: u32 = 12;
/// Offset of the SCSI status in a response.
pub const STATUS_OFFSET: u64 = 10;
/// Offset of the response code in a response.
pub const RESPONSE_OFFSET: u64 = 11;

/// Sizes in bytes of the variable fields of commands and responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiFieldSizes {
    /// CDB field of commands.
    pub cdb: u32,
    /// Sense field of responses.
    pub sense: u32,
}

impl ScsiFieldSizes {
    /// Sizes before a driver writes others.
    pub const DEFAULT: Self = Self { cdb: 32, sense: 96 };

    /// Returns the number of bytes of a command before its data.
    pub fn command(self) -> u32 {
        COMMAND_PREFIX + self.cdb
    }

    /// Returns the number of bytes of a response before its data.
    pub fn response(self) -> u32 {
        RESPONSE_PREFIX + self.sense
    }
}

/// Command, with any division of its bytes into buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiHostCommand {
    /// Address of the unit.
    pub lun: VirtioScsiLun,
    /// Identifier; `None` for the next one of the host.
    pub tag: Option<u64>,
    /// Task attribute.
    pub attribute: u8,
    /// Priority of the command.
    pub priority: u8,
    /// Command reference number.
    pub reference: u8,
    /// CDB; filled with zeroes, or cut, to the size of its field.
    pub cdb: Vec<u8>,
    /// Data to the device.
    pub data_out: Vec<u8>,
    /// Bytes of data from the device.
    pub data_in: u32,
    /// Lengths of the buffers of header and data to the device; the rest is one more buffer.  `None` for a buffer each.
    pub out_lengths: Option<Vec<u32>>,
    /// Lengths of the buffers of response and data from the device; the rest is one more buffer.  `None` for a buffer
    /// each.
    pub in_lengths: Option<Vec<u32>>,
    /// Distance of each buffer from the next multiple of 16.
    pub misaligned_by: u64,
}

impl ScsiHostCommand {
    /// Creates a command without data for a unit of target 0.
    pub fn new(lun: u16, cdb: impl Into<Vec<u8>>) -> Self {
        Self {
            lun: unit_address(0, lun),
            tag: None,
            attribute: attribute::SIMPLE,
            priority: 0,
            reference: 0,
            cdb: cdb.into(),
            data_out: Vec::new(),
            data_in: 0,
            out_lengths: None,
            in_lengths: None,
            misaligned_by: 0,
        }
    }

    /// Creates a READ (16) of blocks of 512 bytes.
    pub fn read(lun: u16, lba: u64, blocks: u32) -> Self {
        Self::new(lun, cdb::read16(lba, blocks)).reading(blocks * SECTOR as u32)
    }

    /// Creates a WRITE (16) of blocks of 512 bytes.
    pub fn write(lun: u16, lba: u64, data: &[u8]) -> Self {
        Self::new(lun, cdb::write16(lba, (data.len() as u64 / SECTOR) as u32)).writing(data)
    }

    /// Adds space for data from the device.
    pub fn reading(mut self, length: u32) -> Self {
        self.data_in = length;
        self
    }

    /// Adds data to the device.
    pub fn writing(mut self, data: &[u8]) -> Self {
        self.data_out = data.to_vec();
        self
    }

    /// Gives the command an identifier.
    pub fn tagged(mut self, tag: u64) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Gives the command a task attribute.
    pub fn with_attribute(mut self, attribute: u8) -> Self {
        self.attribute = attribute;
        self
    }

    /// Addresses any bytes.
    pub fn at(mut self, lun: VirtioScsiLun) -> Self {
        self.lun = lun;
        self
    }

    /// Divides header and data to the device, and response and data from it, into buffers of these lengths.
    pub fn split(mut self, out_lengths: &[u32], in_lengths: &[u32]) -> Self {
        self.out_lengths = Some(out_lengths.to_vec());
        self.in_lengths = Some(in_lengths.to_vec());
        self
    }

    /// Returns the bytes before the data to the device.
    pub fn header(&self, sizes: ScsiFieldSizes) -> Vec<u8> {
        let mut bytes = self.lun.to_vec();
        bytes.extend(self.tag.unwrap_or(0).to_le_bytes());
        bytes.extend([self.attribute, self.priority, self.reference]);
        bytes.extend(&self.cdb);
        bytes.resize(sizes.command() as usize, 0);
        bytes
    }

    /// Returns the command as bytes.
    pub fn buffers(&self, sizes: ScsiFieldSizes) -> VirtqBuffers {
        let whole = |lengths: &Option<Vec<u32>>, first: u32| lengths.clone().unwrap_or_else(|| vec![first]);
        let mut out = self.header(sizes);
        out.extend(&self.data_out);
        VirtqBuffers {
            out,
            read: sizes.response().saturating_add(self.data_in),
            out_lengths: whole(&self.out_lengths, sizes.command()),
            in_lengths: whole(&self.in_lengths, sizes.response()),
            misaligned_by: self.misaligned_by,
        }
    }
}

/// Completed command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiHostCompletion {
    /// Number of the chain.
    pub id: u16,
    /// Response code; [`UNWRITTEN`] if the device did not write it.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Status qualifier.
    pub status_qualifier: u16,
    /// Bytes of data that were not transferred.
    pub residual: u32,
    /// Length of the sense data, as the device says.
    pub sense_len: u32,
    /// Sense field, cut to the length of the sense data.
    pub sense: Vec<u8>,
    /// Whole space for data from the device.
    pub data: Vec<u8>,
    /// Number of bytes that the device says it has written.
    pub written: Option<u32>,
}

impl ScsiHostCompletion {
    /// Decodes a response; what is missing reads as [`UNWRITTEN`].
    pub fn decode(used: UsedBuffers, sizes: ScsiFieldSizes) -> Self {
        let UsedBuffers { id, bytes, written } = used;
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(UNWRITTEN);
        let word = |at: usize| u32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]);
        let (sense_len, begin, end) = (word(0), RESPONSE_PREFIX as usize, sizes.response() as usize);
        let sense_end = begin + sense_len.min(sizes.sense) as usize;
        Self {
            id,
            response: byte(RESPONSE_OFFSET as usize),
            status: byte(STATUS_OFFSET as usize),
            status_qualifier: u16::from_le_bytes([byte(8), byte(9)]),
            residual: word(4),
            sense_len,
            sense: bytes.get(begin..sense_end).unwrap_or_default().to_vec(),
            data: bytes.get(end..).unwrap_or_default().to_vec(),
            written,
        }
    }

    /// Returns whether the command was delivered and succeeded.
    pub fn is_good(&self) -> bool {
        self.response == response::OK && self.status == status::GOOD
    }

    /// Returns the sense data of a command that ended with CHECK CONDITION.
    pub fn decoded_sense(&self) -> Option<DecodedSense> {
        let failed = self.response == response::OK && self.status == status::CHECK_CONDITION;
        failed.then(|| DecodedSense::decode(&self.sense)).flatten()
    }

    /// Returns additional sense code and qualifier, such as 0x2900; `None` without sense data.
    pub fn additional_sense(&self) -> Option<u16> {
        self.decoded_sense().map(|sense| sense.code)
    }

    /// Returns whether the device would take the command again: unit attentions, and resources that are short.
    pub fn is_transient(&self) -> bool {
        let is_attention = self.decoded_sense().is_some_and(|sense| sense.key == DecodedSense::UNIT_ATTENTION);
        let is_busy = self.response == response::BUSY
            || self.response == response::OK && [status::BUSY, status::TASK_SET_FULL].contains(&self.status);
        is_attention || is_busy
    }

    /// Returns the data that were transferred by a command that succeeded, and that had none to transfer to the device.
    ///
    /// # Panics
    /// When it failed, or has more residual bytes than data.
    pub fn ok(mut self) -> Vec<u8> {
        assert!(self.is_good(), "the command failed: {self:?}");
        let length = self.data.len().checked_sub(self.residual as usize);
        self.data.truncate(length.unwrap_or_else(|| panic!("more residual bytes than data: {self:?}")));
        self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_fields() {
        let command = ScsiHostCommand { attribute: 1, priority: 2, reference: 3, ..ScsiHostCommand::new(5, [0x88, 9]) };
        let command = command.tagged(0x0807_0605_0403_0201).writing(&[0xEE; 4]).reading(512);
        let buffers = command.buffers(ScsiFieldSizes::DEFAULT);
        assert_eq!(buffers.out[..8], [1, 0, 0x40, 5, 0, 0, 0, 0]);
        assert_eq!(buffers.out[8..21], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 0x88, 9]);
        assert_eq!(buffers.out[21..51], [0; 30]);
        assert_eq!(buffers.out[51..], [0xEE; 4]);
        assert_eq!((buffers.read, buffers.out_lengths, buffers.in_lengths), (108 + 512, vec![51], vec![108]));
        let small = command.buffers(ScsiFieldSizes { cdb: 1, sense: 18 });
        assert_eq!((small.out.len(), small.out[19], small.read), (20 + 4, 0x88, 30 + 512));
    }

    #[test]
    fn data_have_a_buffer_of_their_own_unless_divided() {
        let command = ScsiHostCommand::write(0, 1, &[7; 1024]);
        assert_eq!((command.cdb[13], command.buffers(ScsiFieldSizes::DEFAULT).out_lengths), (2, vec![51]));
        let divided = command.split(&[], &[1, 2]).buffers(ScsiFieldSizes::DEFAULT);
        assert_eq!((divided.out_lengths, divided.in_lengths), (vec![], vec![1, 2]));
    }

    #[test]
    fn a_response_is_decoded() {
        let mut bytes = vec![18, 0, 0, 0, 4, 3, 2, 1, 6, 5, 2, 0];
        bytes.extend([0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0, 0, 0]);
        bytes.resize(108, 0);
        bytes.extend([0xAB; 3]);
        let done =
            ScsiHostCompletion::decode(UsedBuffers { id: 9, bytes, written: Some(111) }, ScsiFieldSizes::DEFAULT);
        assert_eq!((done.id, done.response, done.status, done.status_qualifier), (9, 0, 2, 0x0506));
        assert_eq!((done.residual, done.sense_len, done.sense.len()), (0x0102_0304, 18, 18));
        assert_eq!((done.data.clone(), done.additional_sense()), (vec![0xAB; 3], Some(0x2400)));
        assert!(!done.is_good() && !done.is_transient());
        let attention = ScsiHostCompletion { sense: [0x72, 6, 0x29].into(), ..done.clone() };
        assert!(attention.is_transient());
        assert!(ScsiHostCompletion { response: response::BUSY, ..done.clone() }.is_transient());
        assert!(ScsiHostCompletion { response: response::RESET, ..done }.decoded_sense().is_none());
    }

    #[test]
    fn a_response_that_is_missing_is_unwritten() {
        for length in [0, 5, 12, 50] {
            let used = UsedBuffers { id: 0, bytes: vec![UNWRITTEN; length], written: Some(0) };
            let done = ScsiHostCompletion::decode(used, ScsiFieldSizes::DEFAULT);
            assert_eq!((done.response, done.is_good(), done.data.len()), (UNWRITTEN, false, 0));
        }
    }
}
