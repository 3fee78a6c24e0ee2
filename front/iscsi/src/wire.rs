//! PDU formats of iSCSI: opcodes, flags, and the 48-byte basic header segment of each PDU (RFC 7143, chapter 11).

pub use forebay_scsi::Lun;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of a basic header segment in bytes.
pub const BHS_LEN: usize = 48;
/// Length of a digest in bytes.
pub const DIGEST_LEN: usize = 4;
/// Reserved task tag: no initiator task tag, or no target transfer tag.
pub const TAG_NONE: u32 = 0xffff_ffff;
/// TCP port assigned by IANA.
pub const PORT: u16 = 3260;
/// Maximum length of a node name in bytes (RFC 7143, section 4.2.7.1).
pub const NAME_MAX: usize = 223;

/// Initiator opcodes.
pub mod request {
    /// NOP-Out request.
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

/// Target opcodes.
pub mod response {
    /// NOP-In response.
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
    /// Reject of a PDU.
    pub const REJECT: u8 = 0x3f;
}

/// Immediate delivery bit of the opcode byte.
pub const IMMEDIATE: u8 = 0x40;
/// Opcode mask of the opcode byte.
pub const OPCODE: u8 = 0x3f;
/// Final bit: last PDU of a sequence; transit bit in login PDUs.
pub const FINAL: u8 = 0x80;
/// Continue bit of login and text PDUs: the text continues in the next PDU.
pub const CONTINUE: u8 = 0x40;

/// Flags of a SCSI Command.
pub mod command_flag {
    /// Command reads data from the target.
    pub const READ: u8 = 0x40;
    /// Command writes data to the target.
    pub const WRITE: u8 = 0x20;
    /// Task attribute mask.
    pub const ATTRIBUTE: u8 = 0x07;
    /// SIMPLE task attribute: no ordering.
    pub const SIMPLE: u8 = 1;
    /// ORDERED task attribute: after all earlier tasks, before all later ones.
    pub const ORDERED: u8 = 2;
    /// HEAD OF QUEUE task attribute: before all other tasks.
    pub const HEAD_OF_QUEUE: u8 = 3;
}

/// Flags of a SCSI Response and of a Data-In that carries status.
pub mod response_flag {
    /// Residual overflow: the command had more to transfer than the initiator expected.
    pub const OVERFLOW: u8 = 0x04;
    /// Residual underflow: less was transferred than the initiator expected.
    pub const UNDERFLOW: u8 = 0x02;
    /// Status bit of Data-In: the PDU carries the SCSI status.
    pub const STATUS: u8 = 0x01;
}

/// Reject reason (RFC 7143, section 11.17.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RejectReason {
    /// Data digest error.
    DataDigest = 0x02,
    /// SNACK reject: the error recovery level does not support SNACK.
    Snack = 0x03,
    /// Protocol error.
    Protocol = 0x04,
    /// Command not supported.
    NotSupported = 0x05,
    /// Too many immediate commands.
    ImmediateCommands = 0x06,
    /// Task in progress.
    TaskInProgress = 0x07,
    /// Invalid PDU field.
    InvalidField = 0x09,
    /// Long operation reject: out of resources.
    LongOperation = 0x0a,
    /// Negotiation reset: another login for the same connection is in progress.
    Negotiation = 0x0b,
    /// Waiting for logout.
    WaitingForLogout = 0x0c,
}

/// Login status: class in the upper byte, detail in the lower (RFC 7143, section 11.13.5).
pub mod login_status {
    /// Success: the login proceeds or is complete.
    pub const SUCCESS: u16 = 0x0000;
    /// Initiator error.
    pub const INITIATOR_ERROR: u16 = 0x0200;
    /// Authentication failure.
    pub const AUTHENTICATION: u16 = 0x0201;
    /// Authorization failure: the initiator may not use the target.
    pub const FORBIDDEN: u16 = 0x0202;
    /// Target not found.
    pub const NOT_FOUND: u16 = 0x0203;
    /// Unsupported version.
    pub const VERSION: u16 = 0x0205;
    /// Too many connections in the session.
    pub const TOO_MANY_CONNECTIONS: u16 = 0x0206;
    /// Missing parameter.
    pub const MISSING_PARAMETER: u16 = 0x0207;
    /// Cannot include in session: the session does not span all portals of its connections.
    pub const CANNOT_INCLUDE: u16 = 0x0208;
    /// Session type not supported.
    pub const SESSION_TYPE: u16 = 0x0209;
    /// Session does not exist.
    pub const NO_SESSION: u16 = 0x020a;
    /// Invalid request during login.
    pub const INVALID_REQUEST: u16 = 0x020b;
    /// Target error.
    pub const TARGET_ERROR: u16 = 0x0300;
    /// Service unavailable.
    pub const UNAVAILABLE: u16 = 0x0301;
    /// Out of resources: no further session possible.
    pub const OUT_OF_RESOURCES: u16 = 0x0302;
}

/// Task management functions (RFC 7143, section 11.5.1).
pub mod task_function {
    /// Aborts one task.
    pub const ABORT_TASK: u8 = 1;
    /// Aborts all tasks of this session on the unit.
    pub const ABORT_TASK_SET: u8 = 2;
    /// Ends an automatic contingent allegiance.
    pub const CLEAR_ACA: u8 = 3;
    /// Clears all tasks on the unit.
    pub const CLEAR_TASK_SET: u8 = 4;
    /// Resets the unit.
    pub const LOGICAL_UNIT_RESET: u8 = 5;
    /// Resets every unit of the target.
    pub const TARGET_WARM_RESET: u8 = 6;
    /// Resets every unit of the target, and ends all sessions.
    pub const TARGET_COLD_RESET: u8 = 7;
    /// Moves a task to another connection.
    pub const TASK_REASSIGN: u8 = 8;
}

/// Task management response (RFC 7143, section 11.6.1).
pub mod task_response {
    /// Function complete.
    pub const COMPLETE: u8 = 0;
    /// Task does not exist (any more).
    pub const NO_TASK: u8 = 1;
    /// LUN does not exist.
    pub const NO_LUN: u8 = 2;
    /// Task allegiance reassignment not supported.
    pub const NO_REASSIGNMENT: u8 = 4;
    /// Function not supported.
    pub const NOT_SUPPORTED: u8 = 5;
    /// Function rejected.
    pub const REJECTED: u8 = 255;
}

/// Logout response (RFC 7143, section 11.15.1).
pub mod logout_response {
    /// Connection or session closed.
    pub const CLOSED: u8 = 0;
    /// CID not found.
    pub const NO_CONNECTION: u8 = 1;
    /// Connection recovery not supported.
    pub const NO_RECOVERY: u8 = 2;
    /// Cleanup failed: tasks of the session are still in the device.
    pub const CLEANUP_FAILED: u8 = 3;
}

/// Events of an Asynchronous Message (RFC 7143, section 11.9.1).
pub mod async_event {
    /// A SCSI event with sense data.
    pub const SCSI: u8 = 0;
    /// Logout request for all connections of the session.
    pub const LOGOUT: u8 = 1;
    /// Target will drop this connection.
    pub const DROP_CONNECTION: u8 = 2;
    /// Target will drop all connections of the session.
    pub const DROP_SESSION: u8 = 3;
}

/// Basic header segment, in the fields common to all PDUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Bhs {
    /// Opcode and the [`IMMEDIATE`] bit.
    pub opcode: u8,
    /// Flags: [`FINAL`] and opcode-specific bits.
    pub flags: u8,
    /// Opcode-specific bytes.
    pub specific: [u8; 2],
    /// Length of the additional header segments, in four-byte words.
    pub ahs_len: u8,
    /// Length of the data segment in bytes, without padding.
    pub data_len: [u8; 3],
    /// LUN, or opcode-specific.
    pub lun: [u8; 8],
    /// Initiator task tag.
    pub itt: U32,
    /// Opcode-specific bytes.
    pub rest: [u8; 28],
}

impl Bhs {
    /// Returns the opcode.
    pub fn opcode(&self) -> u8 {
        self.opcode & OPCODE
    }

    /// Returns true if the PDU is for immediate delivery, regardless of its CmdSN.
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// Returns true if the PDU is the last of its sequence.
    pub fn is_final(&self) -> bool {
        self.flags & FINAL != 0
    }

    /// Returns the length of the data segment in bytes, without padding.
    pub fn data_len(&self) -> usize {
        usize::from(self.data_len[0]) << 16 | usize::from(self.data_len[1]) << 8 | usize::from(self.data_len[2])
    }

    /// Returns the length of the additional header segments in bytes.
    pub fn ahs_len(&self) -> usize {
        usize::from(self.ahs_len) * 4
    }

    /// Reinterprets the header as one kind of PDU.
    pub fn view<T: FromBytes + KnownLayout + Immutable + Unaligned>(&self) -> &T {
        const { assert!(size_of::<T>() == BHS_LEN) };
        T::ref_from_bytes(self.as_bytes()).expect("every header has 48 bytes")
    }
}

/// Returns the number of bytes that pad a segment of `len` bytes to a multiple of four.
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// Encodes a length in three bytes.
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
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final, read, write, task attribute.
        flags: u8,
        /// Reserved field.
        reserved: [u8; 2],
        /// Length of the additional header segments, in four-byte words.
        ahs_len: u8,
        /// Length of the immediate data in bytes.
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Expected data transfer length in bytes.
        edtl: U32,
        /// CmdSN of the command.
        cmd_sn: U32,
        /// ExpStatSN: next status that the initiator expects.
        exp_stat_sn: U32,
        /// Command descriptor block.
        cdb: [u8; 16],
    }
}

header! {
    /// SCSI Response (section 11.4).
    ScsiResponse {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final, residual overflow and underflow.
        flags: u8,
        /// Response code; 0: command completed at target.
        response: u8,
        /// SCSI status.
        status: u8,
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment: sense data with its length field.
        data_len: [u8; 3],
        /// Reserved field.
        reserved: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// SNACK tag; error recovery by SNACK is not supported.
        snack_tag: U32,
        /// StatSN of this status.
        stat_sn: U32,
        /// ExpCmdSN: next expected command.
        exp_cmd_sn: U32,
        /// MaxCmdSN: last command that may be sent.
        max_cmd_sn: U32,
        /// ExpDataSN: number of Data-In PDUs and R2Ts of the task.
        exp_data_sn: U32,
        /// Bidirectional read residual count.
        read_residual: U32,
        /// Residual count: bytes not transferred, or not transferable.
        residual: U32,
    }
}

header! {
    /// SCSI Data-Out (section 11.7.1).
    DataOut {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final.
        flags: u8,
        /// Reserved field.
        reserved: [u8; 2],
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment in bytes.
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag of the R2T; [`TAG_NONE`] for unsolicited data.
        ttt: U32,
        /// Reserved field.
        reserved2: U32,
        /// ExpStatSN: next status that the initiator expects.
        exp_stat_sn: U32,
        /// Reserved field.
        reserved3: U32,
        /// DataSN within its sequence.
        data_sn: U32,
        /// Buffer offset in bytes within the task's data.
        offset: U32,
        /// Reserved field.
        reserved4: U32,
    }
}

header! {
    /// SCSI Data-In (section 11.7.2).
    DataIn {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final, residual overflow and underflow, status.
        flags: u8,
        /// Reserved field.
        reserved: u8,
        /// SCSI status, if the status flag is set.
        status: u8,
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment in bytes.
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag; [`TAG_NONE`]: no data acknowledgement is requested.
        ttt: U32,
        /// StatSN, if the status flag is set.
        stat_sn: U32,
        /// ExpCmdSN: next expected command.
        exp_cmd_sn: U32,
        /// MaxCmdSN: last command that may be sent.
        max_cmd_sn: U32,
        /// DataSN within the task.
        data_sn: U32,
        /// Buffer offset in bytes within the task's data.
        offset: U32,
        /// Residual count: bytes not transferred, or not transferable.
        residual: U32,
    }
}

header! {
    /// Ready To Transfer (section 11.8).
    R2t {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final.
        flags: u8,
        /// Reserved field.
        reserved: [u8; 2],
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment (DataSegmentLength).
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag that the Data-Out PDUs have to carry.
        ttt: U32,
        /// Next StatSN.
        stat_sn: U32,
        /// ExpCmdSN: next expected command.
        exp_cmd_sn: U32,
        /// MaxCmdSN: last command that may be sent.
        max_cmd_sn: U32,
        /// R2TSN within the task.
        r2t_sn: U32,
        /// Offset of the first byte that is requested.
        offset: U32,
        /// Desired data transfer length in bytes.
        len: U32,
    }
}

header! {
    /// Task Management Function Request (section 11.5).
    TaskRequest {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final, and the function code.
        flags: u8,
        /// Reserved field.
        reserved: [u8; 2],
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment (DataSegmentLength).
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag of this request.
        itt: U32,
        /// Initiator task tag of the referenced task.
        referenced: U32,
        /// CmdSN of the request.
        cmd_sn: U32,
        /// ExpStatSN: next status that the initiator expects.
        exp_stat_sn: U32,
        /// CmdSN of the referenced command.
        ref_cmd_sn: U32,
        /// ExpDataSN, for task reassignment.
        exp_data_sn: U32,
        /// Reserved field.
        reserved2: U64,
    }
}

header! {
    /// Generic response: Task Management, Text, Logout, NOP-In, Reject, Asynchronous Message (sections 11.6 to 11.17).
    /// Their last bytes differ in meaning.
    Response {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final.
        flags: u8,
        /// Response or reason code.
        code: u8,
        /// Reserved field.
        reserved: u8,
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment in bytes.
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag.
        ttt: U32,
        /// StatSN of this status, or the next one.
        stat_sn: U32,
        /// ExpCmdSN: next expected command.
        exp_cmd_sn: U32,
        /// MaxCmdSN: last command that may be sent.
        max_cmd_sn: U32,
        /// Opcode-specific bytes.
        rest: [U16; 6],
    }
}

header! {
    /// Login Request (section 11.12).
    LoginRequest {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: transit, continue, current and next stage.
        flags: u8,
        /// Highest protocol version that the initiator supports.
        version_max: u8,
        /// Lowest protocol version that the initiator supports.
        version_min: u8,
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the text in bytes.
        data_len: [u8; 3],
        /// ISID: initiator part of the session identifier.
        isid: [u8; 6],
        /// TSIH; 0 for a new session.
        tsih: U16,
        /// Initiator task tag of the login.
        itt: U32,
        /// Connection identifier (CID).
        cid: U16,
        /// Reserved field.
        reserved: U16,
        /// CmdSN of the first command.
        cmd_sn: U32,
        /// ExpStatSN: next status that the initiator expects.
        exp_stat_sn: U32,
        /// Reserved field.
        reserved2: [u8; 16],
    }
}

header! {
    /// Login Response (section 11.13).
    LoginResponse {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: transit, continue, current and next stage.
        flags: u8,
        /// Highest protocol version that the target supports.
        version_max: u8,
        /// Active protocol version.
        version_active: u8,
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the text in bytes.
        data_len: [u8; 3],
        /// ISID: initiator part of the session identifier.
        isid: [u8; 6],
        /// Target session identifying handle.
        tsih: U16,
        /// Initiator task tag of the login.
        itt: U32,
        /// Reserved field.
        reserved: U32,
        /// StatSN of this status.
        stat_sn: U32,
        /// ExpCmdSN: next expected command.
        exp_cmd_sn: U32,
        /// MaxCmdSN: last command that may be sent.
        max_cmd_sn: U32,
        /// Status class and detail.
        status: U16,
        /// Reserved field.
        reserved2: [u8; 10],
    }
}

header! {
    /// Generic request: Text, Logout, NOP-Out, SNACK (sections 11.10 to 11.18).
    Request {
        /// Opcode of the PDU.
        opcode: u8,
        /// Flags: final, and opcode-specific bits.
        flags: u8,
        /// Reserved field.
        reserved: [u8; 2],
        /// Length of additional header segments (TotalAHSLength).
        ahs_len: u8,
        /// Length of the data segment in bytes.
        data_len: [u8; 3],
        /// Logical unit number.
        lun: [u8; 8],
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag; for a logout, the CID in the upper half.
        ttt: U32,
        /// CmdSN of the request.
        cmd_sn: U32,
        /// ExpStatSN: next status that the initiator expects.
        exp_stat_sn: U32,
        /// Opcode-specific bytes.
        rest: [u8; 16],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_padded_to_four() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
        let mut bhs = Bhs::read_from_bytes(&[0; BHS_LEN]).expect("48 bytes");
        bhs.data_len = data_len(0x01_0203);
        assert_eq!(bhs.data_len(), 0x01_0203);
    }
}
