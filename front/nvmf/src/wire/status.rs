//! Completion status (base 3.3.3.2.1).

use std::fmt;

use forebay_block::{Error, ErrorKind};

/// Status field of a completion, without the phase bit: the code in bits 7:0, its type in 10:8, "more" in 13 and
/// "do not retry" in 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NvmeStatus(pub u16);

/// Do Not Retry bit: the same command will fail again.
const DO_NOT_RETRY: u16 = 0x4000;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $text:literal;)*) => {
        impl NvmeStatus {
            $($(#[$doc])* #[doc = $text] pub const $name: NvmeStatus = NvmeStatus($value);)*

            fn text(self) -> &'static str {
                match self.code() {
                    $($value => $text,)*
                    _ => "another status",
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0x000, "success";
    INVALID_OPCODE = 0x001, "invalid opcode";
    INVALID_FIELD = 0x002, "invalid field in command";
    DATA_TRANSFER = 0x004, "data transfer error";
    INTERNAL = 0x006, "internal error";
    ABORTED = 0x007, "abort requested";
    SQ_DELETED = 0x008, "aborted for deletion of its queue";
    FUSED_FAILED = 0x009, "aborted because the other fused command failed";
    FUSED_MISSING = 0x00A, "aborted because the other fused command is missing";
    INVALID_NAMESPACE = 0x00B, "invalid namespace or format";
    SEQUENCE = 0x00C, "command sequence error";
    SGL_COUNT = 0x00E, "invalid number of SGL descriptors";
    SGL_LENGTH = 0x00F, "invalid data SGL length";
    SGL_TYPE = 0x011, "invalid SGL descriptor type";
    ATOMIC_UNIT = 0x014, "atomic write unit exceeded";
    SGL_OFFSET = 0x016, "invalid SGL offset";
    HOST_ID = 0x018, "inconsistent host identifier";
    KEEP_ALIVE_INVALID = 0x01A, "invalid keep-alive timeout";
    PREEMPTED = 0x01B, "aborted for preempt and abort";
    WRITE_PROTECTED = 0x020, "the namespace is write protected";
    INTERRUPTED = 0x021, "the command was interrupted";
    TRANSPORT = 0x022, "transient transport error";
    LBA_RANGE = 0x080, "past the end of the namespace";
    CAPACITY = 0x081, "capacity exceeded";
    NOT_READY = 0x082, "the namespace is not ready";
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    INVALID_QUEUE = 0x101, "invalid queue identifier";
    INVALID_QUEUE_SIZE = 0x102, "invalid queue size";
    ABORT_LIMIT = 0x103, "too many aborts";
    AER_LIMIT = 0x105, "too many asynchronous event requests";
    INVALID_LOG = 0x109, "invalid log page";
    NOT_SAVEABLE = 0x10D, "the feature cannot be saved";
    NOT_CHANGEABLE = 0x10E, "the feature cannot be changed";
    NOT_PER_NAMESPACE = 0x10F, "the feature is not per namespace";
    CONNECT_FORMAT = 0x180, "incompatible format";
    CONNECT_BUSY = 0x181, "the controller is busy";
    CONNECT_PARAMETER = 0x182, "invalid connect parameters";
    CONNECT_RESTART = 0x183, "restart discovery";
    CONNECT_HOST = 0x184, "the host is not allowed";
    DISCOVERY_RESTART = 0x190, "the discovery log page has changed";
    AUTH_REQUIRED = 0x191, "authentication required";
    WRITE_FAULT = 0x280, "write fault";
    READ_ERROR = 0x281, "unrecovered read error";
    COMPARE_FAILED = 0x285, "compare failed";
    ACCESS_DENIED = 0x286, "access denied";
    ANA_PERSISTENT_LOSS = 0x301, "asymmetric access persistent loss";
    ANA_INACCESSIBLE = 0x302, "asymmetric access inaccessible";
    ANA_TRANSITION = 0x303, "asymmetric access transition";
}

impl NvmeStatus {
    /// Returns code and type, without "more" and "do not retry".
    pub fn code(self) -> u16 {
        self.0 & 0x7FF
    }

    /// Returns whether the command succeeded.
    pub fn is_success(self) -> bool {
        self.code() == 0
    }

    /// Returns the status with Do Not Retry set.
    #[must_use]
    pub const fn final_(self) -> Self {
        NvmeStatus(self.0 | DO_NOT_RETRY)
    }

    /// Returns the status for a device's error.
    pub fn of(error: &Error, writing: bool) -> Self {
        match error.kind() {
            ErrorKind::Mismatch(_) => NvmeStatus::COMPARE_FAILED.final_(),
            ErrorKind::NoSpace => NvmeStatus::CAPACITY.final_(),
            ErrorKind::OutOfRange => NvmeStatus::LBA_RANGE.final_(),
            ErrorKind::Invalid => NvmeStatus::INVALID_FIELD.final_(),
            ErrorKind::Unsupported => NvmeStatus::INVALID_OPCODE.final_(),
            ErrorKind::ReadOnly => NvmeStatus::WRITE_PROTECTED.final_(),
            ErrorKind::Denied => NvmeStatus::ACCESS_DENIED.final_(),
            ErrorKind::NotFound | ErrorKind::Exists => NvmeStatus::INVALID_NAMESPACE.final_(),
            ErrorKind::Corrupt => NvmeStatus::READ_ERROR.final_(),
            // Another path may still succeed.
            ErrorKind::Fenced | ErrorKind::ShuttingDown => NvmeStatus::ANA_TRANSITION,
            ErrorKind::Busy | ErrorKind::Guard | ErrorKind::TimedOut => NvmeStatus::INTERRUPTED,
            ErrorKind::Io if writing => NvmeStatus::WRITE_FAULT,
            ErrorKind::Io => NvmeStatus::READ_ERROR,
        }
    }
}

impl fmt::Debug for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#05x} ({})", self.0, self.text())
    }
}

impl fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}
