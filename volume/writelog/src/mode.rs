//! Mode of a log, and the stages of its life.
//!
//! ```text
//!  Acquiring --> On --> TurningOff --> Off
//!      |         |          |
//!      +---------+----------+--> Failed
//! ```

use forebay_block::Error;

/// Mode of a log.
#[derive(Debug, Clone)]
pub enum Mode {
    /// Waiting for the owner: this process is not yet known to be the volume's only writer. Requests wait.
    Acquiring,
    /// Enabled: writes go to the log.
    On,
    /// Being disabled, with the reason: the contents are written back, and writes wait for that.
    TurningOff(Error),
    /// Disabled, with the reason: requests go to the backend.
    Off(Error),
    /// Failed, with the reason: the contents cannot or must not be written back.
    Failed(Error),
}

impl Mode {
    /// Returns whether writes go to the log.
    pub fn is_on(&self) -> bool {
        matches!(self, Mode::On)
    }

    /// Returns a single word for messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Mode::Acquiring => "acquiring",
            Mode::On => "on",
            Mode::TurningOff(_) => "turning-off",
            Mode::Off(_) => "off",
            Mode::Failed(_) => "failed",
        }
    }

    /// Returns the reason of a log that is disabled, being disabled or failed.
    pub fn reason(&self) -> Option<&Error> {
        match self {
            Mode::Acquiring | Mode::On => None,
            Mode::TurningOff(error) | Mode::Off(error) | Mode::Failed(error) => Some(error),
        }
    }
}

/// Mode, ending and errors of a log.
///
/// Invariants:
/// - M1 The mode changes only as in the diagram above; `Off` and `Failed` are final.
/// - M2 A log that is closing refuses new requests.
/// - M3 Only a log being disabled is released: its record states that it must never be replayed.
#[derive(Debug)]
pub(crate) struct LogLifecycle {
    mode: Mode,
    /// Set once new requests are refused; those in flight complete in order.
    ending: bool,
    /// Set once the log's tasks are to end.
    closing: bool,
    /// Set once the record of a log being disabled states that it must never be replayed.
    released: bool,
    /// Error of the last write-back attempt, or of the last attempt to acquire the volume.
    backend_error: Option<Error>,
}

impl LogLifecycle {
    pub(crate) fn new(acquiring: bool) -> Self {
        let mode = if acquiring { Mode::Acquiring } else { Mode::On };
        Self { mode, ending: false, closing: false, released: false, backend_error: None }
    }

    /// Returns the mode.
    pub(crate) fn mode(&self) -> &Mode {
        &self.mode
    }

    /// Returns whether writes go to the log.
    pub(crate) fn is_on(&self) -> bool {
        self.mode.is_on()
    }

    /// Returns whether requests wait for the owner.
    pub(crate) fn is_acquiring(&self) -> bool {
        matches!(self.mode, Mode::Acquiring)
    }

    /// Returns whether the log is being disabled.
    pub(crate) fn is_disabling(&self) -> bool {
        matches!(self.mode, Mode::TurningOff(_))
    }

    /// Returns whether the mode is final.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.mode, Mode::Off(_) | Mode::Failed(_))
    }

    /// Returns whether it is known if the volume is this process's, or the log is closed before that.
    pub(crate) fn has_decided(&self) -> bool {
        !self.is_acquiring() || self.closing
    }

    /// Returns the reason of a log that has failed.
    pub(crate) fn failure(&self) -> Option<&Error> {
        match &self.mode {
            Mode::Failed(error) => Some(error),
            Mode::Acquiring | Mode::On | Mode::TurningOff(_) | Mode::Off(_) => None,
        }
    }

    /// Returns whether new requests are refused.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Returns whether the log's tasks are to end.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    /// Returns whether nothing of the log will ever be replayed.
    pub(crate) fn is_released(&self) -> bool {
        self.released
    }

    /// Returns the last write-back error, if write-back is stalled.
    pub(crate) fn backend_error(&self) -> Option<&Error> {
        self.backend_error.as_ref()
    }

    /// Records the outcome of a write-back attempt, or of an attempt to acquire the volume.
    pub(crate) fn set_backend_error(&mut self, error: Option<Error>) {
        self.backend_error = error;
    }

    /// Enables the log, whose owner is known.
    pub(crate) fn acquired(&mut self) {
        debug_assert!(self.is_acquiring(), "acquired while {}", self.mode.name());
        (self.mode, self.backend_error) = (Mode::On, None);
    }

    /// Begins to disable the log; returns false unless it is enabled.
    pub(crate) fn begin_disable(&mut self, reason: Error) -> bool {
        if !self.is_on() {
            return false;
        }
        self.mode = Mode::TurningOff(reason);
        true
    }

    /// Records that the log must never be replayed.
    pub(crate) fn set_released(&mut self) {
        debug_assert!(self.is_disabling(), "released while {}", self.mode.name());
        self.released = true;
    }

    /// Completes disabling the log.
    pub(crate) fn set_off(&mut self, reason: Error) {
        debug_assert!(self.is_disabling() && self.released, "off after {}", self.mode.name());
        (self.mode, self.backend_error) = (Mode::Off(reason), None);
    }

    /// Fails the log.
    pub(crate) fn fail(&mut self, error: Error) {
        debug_assert!(!self.is_over(), "failed after {}", self.mode.name());
        self.mode = Mode::Failed(error);
    }

    /// Refuses new requests.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// Ends the log's tasks.
    pub(crate) fn close(&mut self) {
        (self.ending, self.closing) = (true, true);
    }
}
