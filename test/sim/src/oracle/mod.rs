//! Oracles of permitted results: they observe every request and its completion, and know what a read may return.

mod block;
mod content;
mod object;
mod object_state;
mod order;
mod size;

pub use block::{BlockOracle, CheckedDevice, Token};
pub use content::{BLOCK, Content};
pub use object::{CheckedBackend, ObjectOracle, ReadToken, observe};
pub use object_state::{Body, ObjectState, Observed};
pub use order::{OrderOracle, OrderToken, SECTOR as ORDER_SECTOR};

use forebay_block::ErrorKind;

/// Errors that the environment may cause, and that a run therefore accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// The medium may fail.
    pub io: bool,
    /// The medium may be full.
    pub no_space: bool,
    /// A change may find that the medium is full when it is already on its way: it may still take effect.
    pub no_space_late: bool,
    /// Stored bytes may be damaged.
    pub corrupt: bool,
    /// Backend may be shutting down, or fenced after a failure.
    pub shut_down: bool,
}

impl Expected {
    /// Returns a set without errors.
    pub const fn nothing() -> Self {
        Self { io: false, no_space: false, no_space_late: false, corrupt: false, shut_down: false }
    }

    /// Returns true if a request may fail through no fault of its own.
    pub fn may_fail(self) -> bool {
        self != Self::nothing()
    }

    /// Returns true if this error may come from the environment.
    pub fn allows(self, kind: ErrorKind) -> bool {
        match kind {
            ErrorKind::Io => self.io,
            ErrorKind::NoSpace => self.no_space,
            ErrorKind::Corrupt => self.corrupt,
            ErrorKind::ShuttingDown | ErrorKind::Fenced => self.shut_down,
            _ => false,
        }
    }
}
