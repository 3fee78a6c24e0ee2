//! The bytes of iSCSI: opcodes, flags, and the 48-byte basic header segment of each PDU (RFC 7143, chapter 11).

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a basic header segment.
pub const BHS_LEN: usize = 48;
/// Bytes of a digest.
pub const DIGEST_LEN: usize = 4;
/// "No task tag", "no transfer tag".
pub const TAG_NONE: u32 = 0xffff_ffff;
/// The port that IANA gave iSCSI.
pub const PORT: u16 = 3260;
/// Longest name of a node in bytes (RFC 7143, section 4.2.7.1).
pub const NAME_MAX: usize = 223;

/// Opcodes of an initiator.
pub mod request {
    /// NOP-Out.
    pub const NOP_OUT: u8 = 0x00;
    /// SCSI Command.
    pub const SCSI_COMMAND: u8 = 0x01;
    /// Task Management Function Request.
    pub const TASK_MANAGEMENT: u8 = 0x02;
    /// Login Request.
    pub const LOGIN: u8 = 0x03;
    /// Text Request.
    pub const TEXT: u8 = 0x04;
    /// SCSI Data-Out.
    pub const DATA_OUT: u8 = 0x05;
    /// Logout Request.
    pub const LOGOUT: u8 = 0x06;
    /// SNACK Request.
    pub const SNACK: u8 = 0x10;
}

/// Opcodes of a target.
pub mod response {
    /// NOP-In.
    pub const NOP_IN: u8 = 0x20;
    /// SCSI Response.
    pub const SCSI: u8 = 0x21;
    /// Task Management Function Response.
    pub const TASK_MANAGEMENT: u8 = 0x22;
    /// Login Response.
    pub const LOGIN: u8 = 0x23;
    /// Text Response.
    pub const TEXT: u8 = 0x24;
    /// SCSI Data-In.
    pub const DATA_IN: u8 = 0x25;
    /// Logout Response.
    pub const LOGOUT: u8 = 0x26;
    /// Ready To Transfer.
    pub const R2T: u8 = 0x31;
    /// Asynchronous Message.
    pub const ASYNC: u8 = 0x32;
    /// Reject.
    pub const REJECT: u8 = 0x3f;
}

/// The bit of an opcode byte that asks for immediate delivery.
pub const IMMEDIATE: u8 = 0x40;
/// The bits of an opcode byte that are the opcode.
pub const OPCODE: u8 = 0x3f;
/// The final bit: the last PDU of a sequence; in a login, "transit".
pub const FINAL: u8 = 0x80;
/// In login and text PDUs: the text goes on in the next PDU.
pub const CONTINUE: u8 = 0x40;

/// Flags of a SCSI Command.
pub mod command_flag {
    /// Data comes from the target.
    pub const READ: u8 = 0x40;
    /// Data goes to the target.
    pub const WRITE: u8 = 0x20;
    /// The task attribute's bits.
    pub const ATTRIBUTE: u8 = 0x07;
    /// No order.
    pub const SIMPLE: u8 = 1;
    /// After all before it, and before all after it.
    pub const ORDERED: u8 = 2;
    /// Before all others.
    pub const HEAD_OF_QUEUE: u8 = 3;
}

/// Flags of a SCSI Response and of a Data-In that carries status.
pub mod response_flag {
    /// More was to be transferred than the initiator expected.
    pub const OVERFLOW: u8 = 0x04;
    /// Less was transferred than the initiator expected.
    pub const UNDERFLOW: u8 = 0x02;
    /// Data-In only: the status is in this PDU.
    pub const STATUS: u8 = 0x01;
}

/// Why a PDU is rejected (RFC 7143, section 11.17.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RejectReason {
    /// Its data has another digest than it says.
    DataDigest = 0x02,
    /// A SNACK at an error recovery level without.
    Snack = 0x03,
    /// It breaks the protocol.
    Protocol = 0x04,
    /// The PDU is not supported.
    NotSupported = 0x05,
    /// More immediate commands than can be kept.
    ImmediateCommands = 0x06,
    /// The task that it belongs to is already under way.
    TaskInProgress = 0x07,
    /// A field has a value that makes no sense.
    InvalidField = 0x09,
    /// Too long to be kept.
    LongOperation = 0x0a,
    /// Another login for the same connection goes on.
    Negotiation = 0x0b,
    /// It must wait for a logout.
    WaitingForLogout = 0x0c,
}

/// A login's outcome: class in the upper byte, detail in the lower (RFC 7143, section 11.13.5).
pub mod login_status {
    /// It goes on, or is done.
    pub const SUCCESS: u16 = 0x0000;
    /// The initiator did something wrong.
    pub const INITIATOR_ERROR: u16 = 0x0200;
    /// Who it is could not be proven.
    pub const AUTHENTICATION: u16 = 0x0201;
    /// It may not use the target.
    pub const FORBIDDEN: u16 = 0x0202;
    /// There is no such target.
    pub const NOT_FOUND: u16 = 0x0203;
    /// The protocol version is not known.
    pub const VERSION: u16 = 0x0205;
    /// A connection more than the session can have.
    pub const TOO_MANY_CONNECTIONS: u16 = 0x0206;
    /// A key that must be there is not.
    pub const MISSING_PARAMETER: u16 = 0x0207;
    /// Connections of one session on several portals of which not all lead there.
    pub const CANNOT_INCLUDE: u16 = 0x0208;
    /// The kind of session is not known.
    pub const SESSION_TYPE: u16 = 0x0209;
    /// There is no such session.
    pub const NO_SESSION: u16 = 0x020a;
    /// What was sent makes no sense in a login.
    pub const INVALID_REQUEST: u16 = 0x020b;
    /// The target is at fault.
    pub const TARGET_ERROR: u16 = 0x0300;
    /// The target cannot be used now.
    pub const UNAVAILABLE: u16 = 0x0301;
    /// There is no room for another session.
    pub const OUT_OF_RESOURCES: u16 = 0x0302;
}

/// Task management functions (RFC 7143, section 11.5.1).
pub mod task_function {
    /// One task.
    pub const ABORT_TASK: u8 = 1;
    /// All tasks of this session on the unit.
    pub const ABORT_TASK_SET: u8 = 2;
    /// Ends an automatic contingent allegiance.
    pub const CLEAR_ACA: u8 = 3;
    /// All tasks on the unit.
    pub const CLEAR_TASK_SET: u8 = 4;
    /// Resets the unit.
    pub const LOGICAL_UNIT_RESET: u8 = 5;
    /// Resets every unit of the target.
    pub const TARGET_WARM_RESET: u8 = 6;
    /// The same, and ends all sessions.
    pub const TARGET_COLD_RESET: u8 = 7;
    /// Moves a task to another connection.
    pub const TASK_REASSIGN: u8 = 8;
}

/// What a task management function came to (RFC 7143, section 11.6.1).
pub mod task_response {
    /// It is done.
    pub const COMPLETE: u8 = 0;
    /// There is no such task (any more).
    pub const NO_TASK: u8 = 1;
    /// There is no such unit.
    pub const NO_LUN: u8 = 2;
    /// Tasks stay on their connection.
    pub const NO_REASSIGNMENT: u8 = 4;
    /// Not a function that is offered.
    pub const NOT_SUPPORTED: u8 = 5;
    /// Refused.
    pub const REJECTED: u8 = 255;
}

/// Events of an Asynchronous Message (RFC 7143, section 11.9.1).
pub mod async_event {
    /// A SCSI event with sense data.
    pub const SCSI: u8 = 0;
    /// Log out, please, all connections of the session.
    pub const LOGOUT: u8 = 1;
    /// This connection is going to be dropped.
    pub const DROP_CONNECTION: u8 = 2;
    /// All connections of the session are going to be dropped.
    pub const DROP_SESSION: u8 = 3;
}

/// What all PDUs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Bhs {
    /// [`IMMEDIATE`] and the opcode.
    pub opcode: u8,
    /// [`FINAL`] and what the opcode says.
    pub flags: u8,
    /// What the opcode says.
    pub specific: [u8; 2],
    /// Additional header segments, in units of four bytes.
    pub ahs_len: u8,
    /// Bytes of data, without padding.
    pub data_len: [u8; 3],
    /// The unit, or what the opcode says.
    pub lun: [u8; 8],
    /// The initiator's name for the task.
    pub itt: U32,
    /// What the opcode says.
    pub rest: [u8; 28],
}

impl Bhs {
    /// The opcode.
    pub fn opcode(&self) -> u8 {
        self.opcode & OPCODE
    }

    /// Delivered as it comes, without regard to its number.
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// The last of its sequence.
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Bytes of data, without padding.
    pub fn data_len(&self) -> usize {
        usize::from(self.data_len[0]) << 16 | usize::from(self.data_len[1]) << 8 | usize::from(self.data_len[2])
    }

    /// Bytes of additional headers.
    pub fn ahs_len(&self) -> usize {
        usize::from(self.ahs_len) * 4
    }

    /// The same bytes as one kind of PDU.
    pub fn view<T: FromBytes + KnownLayout + Immutable + Unaligned>(&self) -> &T {
        const { assert!(size_of::<T>() == BHS_LEN) };
        T::ref_from_bytes(self.as_bytes()).expect("every header has 48 bytes")
    }
}

/// Bytes that fill a segment of `len` bytes up to a multiple of four.
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// Three bytes of a length.
///
/// # Panics
/// When `len` needs more.
pub fn data_len(len: usize) -> [u8; 3] {
    assert!(len < 1 << 24, "a data segment of {len} bytes");
    [(len >> 16) as u8, (len >> 8) as u8, len as u8]
}

macro_rules! header {
    ($(#[$attribute:meta])* $name:ident { $($(#[$field_attribute:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$field_attribute])* pub $field: $kind,)* }
        const _: () = assert!(size_of::<$name>() == BHS_LEN);
    };
}

header! {
    /// SCSI Command (section 11.3).
    ScsiCommand {
        /// Opcode.
        opcode: u8,
        /// Final, read, write, attribute.
        flags: u8,
        /// Nothing.
        reserved: [u8; 2],
        /// Additional headers.
        ahs_len: u8,
        /// Immediate data.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// Bytes that the initiator wants to send or receive.
        edtl: U32,
        /// The command's number.
        cmd_sn: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// The command.
        cdb: [u8; 16],
    }
}

header! {
    /// SCSI Response (section 11.4).
    ScsiResponse {
        /// Opcode.
        opcode: u8,
        /// Final, residuals.
        flags: u8,
        /// 0: completed at the target.
        response: u8,
        /// SCSI status.
        status: u8,
        /// Nothing.
        ahs_len: u8,
        /// Sense data with its length.
        data_len: [u8; 3],
        /// Nothing.
        reserved: [u8; 8],
        /// Task.
        itt: U32,
        /// For recovery that is not offered.
        snack_tag: U32,
        /// Number of this status.
        stat_sn: U32,
        /// Next command expected.
        exp_cmd_sn: U32,
        /// Last command that may be sent.
        max_cmd_sn: U32,
        /// Data-In PDUs and R2Ts of the task.
        exp_data_sn: U32,
        /// Of bidirectional commands.
        read_residual: U32,
        /// Bytes not transferred, or not transferable.
        residual: U32,
    }
}

header! {
    /// SCSI Data-Out (section 11.7.1).
    DataOut {
        /// Opcode.
        opcode: u8,
        /// Final.
        flags: u8,
        /// Nothing.
        reserved: [u8; 2],
        /// Nothing.
        ahs_len: u8,
        /// Bytes.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// Which R2T it answers; none for what comes unasked.
        ttt: U32,
        /// Nothing.
        reserved2: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// Nothing.
        reserved3: U32,
        /// Number within its sequence.
        data_sn: U32,
        /// First byte, counted within the task's data.
        offset: U32,
        /// Nothing.
        reserved4: U32,
    }
}

header! {
    /// SCSI Data-In (section 11.7.2).
    DataIn {
        /// Opcode.
        opcode: u8,
        /// Final, residuals, status.
        flags: u8,
        /// Nothing.
        reserved: u8,
        /// SCSI status, if there is one.
        status: u8,
        /// Nothing.
        ahs_len: u8,
        /// Bytes.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// None: nothing is to be acknowledged.
        ttt: U32,
        /// Number of this status, if there is one.
        stat_sn: U32,
        /// Next command expected.
        exp_cmd_sn: U32,
        /// Last command that may be sent.
        max_cmd_sn: U32,
        /// Number within the task.
        data_sn: U32,
        /// First byte, counted within the task's data.
        offset: U32,
        /// Bytes not transferred, or not transferable.
        residual: U32,
    }
}

header! {
    /// Ready To Transfer (section 11.8).
    R2t {
        /// Opcode.
        opcode: u8,
        /// Final.
        flags: u8,
        /// Nothing.
        reserved: [u8; 2],
        /// Nothing.
        ahs_len: u8,
        /// Nothing.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// What the data is to say.
        ttt: U32,
        /// Next status.
        stat_sn: U32,
        /// Next command expected.
        exp_cmd_sn: U32,
        /// Last command that may be sent.
        max_cmd_sn: U32,
        /// Number within the task.
        r2t_sn: U32,
        /// First byte wanted.
        offset: U32,
        /// Bytes wanted.
        len: U32,
    }
}

header! {
    /// Task Management Function Request (section 11.5).
    TaskRequest {
        /// Opcode.
        opcode: u8,
        /// Final, and the function.
        flags: u8,
        /// Nothing.
        reserved: [u8; 2],
        /// Nothing.
        ahs_len: u8,
        /// Nothing.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// This task.
        itt: U32,
        /// The task that is meant.
        referenced: U32,
        /// The request's number.
        cmd_sn: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// The number of the command that is meant.
        ref_cmd_sn: U32,
        /// For reassignment.
        exp_data_sn: U32,
        /// Nothing.
        reserved2: U64,
    }
}

header! {
    /// Every other response: Task Management, Text, Logout, NOP-In, Reject, Asynchronous Message (sections 11.6 to
    /// 11.17).  They differ in what the last bytes mean.
    Response {
        /// Opcode.
        opcode: u8,
        /// Final.
        flags: u8,
        /// Response or reason.
        code: u8,
        /// Nothing.
        reserved: u8,
        /// Nothing.
        ahs_len: u8,
        /// Bytes of data.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// Target's tag.
        ttt: U32,
        /// Number of this status, or the next.
        stat_sn: U32,
        /// Next command expected.
        exp_cmd_sn: U32,
        /// Last command that may be sent.
        max_cmd_sn: U32,
        /// What the opcode says.
        rest: [U16; 6],
    }
}

header! {
    /// Login Request (section 11.12).
    LoginRequest {
        /// Opcode.
        opcode: u8,
        /// Transit, continue, stages.
        flags: u8,
        /// Highest version that the initiator knows.
        version_max: u8,
        /// Lowest.
        version_min: u8,
        /// Nothing.
        ahs_len: u8,
        /// Bytes of text.
        data_len: [u8; 3],
        /// Initiator's part of the session's name.
        isid: [u8; 6],
        /// Target's part; 0 for a new session.
        tsih: U16,
        /// This login.
        itt: U32,
        /// The connection's number.
        cid: U16,
        /// Nothing.
        reserved: U16,
        /// The number of the first command.
        cmd_sn: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// Nothing.
        reserved2: [u8; 16],
    }
}

header! {
    /// Login Response (section 11.13).
    LoginResponse {
        /// Opcode.
        opcode: u8,
        /// Transit, continue, stages.
        flags: u8,
        /// Highest version that the target knows.
        version_max: u8,
        /// The version in use.
        version_active: u8,
        /// Nothing.
        ahs_len: u8,
        /// Bytes of text.
        data_len: [u8; 3],
        /// Initiator's part of the session's name.
        isid: [u8; 6],
        /// Target's part.
        tsih: U16,
        /// This login.
        itt: U32,
        /// Nothing.
        reserved: U32,
        /// Number of this status.
        stat_sn: U32,
        /// Next command expected.
        exp_cmd_sn: U32,
        /// Last command that may be sent.
        max_cmd_sn: U32,
        /// Class and detail.
        status: U16,
        /// Nothing.
        reserved2: [u8; 10],
    }
}

header! {
    /// Every other request: Text, Logout, NOP-Out, SNACK (sections 11.10 to 11.18).
    Request {
        /// Opcode.
        opcode: u8,
        /// Final, and what the opcode says.
        flags: u8,
        /// Nothing.
        reserved: [u8; 2],
        /// Nothing.
        ahs_len: u8,
        /// Bytes of data.
        data_len: [u8; 3],
        /// Unit.
        lun: [u8; 8],
        /// Task.
        itt: U32,
        /// Target's tag; for a logout, the connection's number in the upper half.
        ttt: U32,
        /// The request's number.
        cmd_sn: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// What the opcode says.
        rest: [u8; 16],
    }
}

/// A unit's number as it stands in a PDU (SAM-5, section 4.6), or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lun {
    /// A unit of the target.
    Unit(u16),
    /// The well-known unit that answers REPORT LUNS.
    ReportLuns,
    /// A form that this target does not use.
    Foreign,
}

impl Lun {
    /// Largest number of a unit.
    pub const MAX: u16 = 0x3fff;

    /// From the eight bytes of a PDU.
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

    /// As eight bytes.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_one_name_each() {
        for lun in [0, 1, 255, 256, Lun::MAX] {
            assert_eq!(Lun::parse(&Lun::Unit(lun).to_bytes()), Lun::Unit(lun));
        }
        assert_eq!(Lun::parse(&[0x40, 7, 0, 0, 0, 0, 0, 0]), Lun::Unit(7), "flat addressing of a small number");
        assert_eq!(Lun::parse(&Lun::ReportLuns.to_bytes()), Lun::ReportLuns);
        for foreign in [[0, 1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0x80, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(Lun::parse(&foreign), Lun::Foreign);
        }
    }

    #[test]
    fn lengths_are_padded_to_four() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
        let mut bhs = Bhs::read_from_bytes(&[0; BHS_LEN]).expect("48 bytes");
        bhs.data_len = data_len(0x01_0203);
        assert_eq!(bhs.data_len(), 0x01_0203);
    }
}
