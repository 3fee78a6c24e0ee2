//! Logs, and copies of logs, that are open.

use std::rc::Rc;

use forebay_reactor::sync::Notify;

use super::Shelf;
use crate::cipher::PayloadCipher;
use crate::format::{LogId, MediumKind};
use crate::media::copy::CopyMedium;
use crate::media::{Medium, Recovered};

/// Opened log, for [`WriteLog::new`](crate::WriteLog::new).
pub struct OpenLog {
    pub(crate) medium: Rc<dyn Medium>,
    pub(crate) found: Recovered,
    pub(crate) kind: MediumKind,
    /// Cipher of payloads on the medium.
    pub(crate) cipher: Option<Rc<PayloadCipher>>,
    pub(crate) room: Rc<Notify>,
    /// Guard that keeps it from being opened twice.
    pub(crate) held: OpenGuard,
}

/// Opened copy of a log that has members.
pub(crate) struct OpenCopy {
    pub(crate) medium: Rc<dyn CopyMedium>,
    pub(crate) found: Recovered,
    pub(crate) room: Rc<Notify>,
    pub(crate) held: OpenGuard,
}

/// Registration of a log as open; it ends when this is dropped.
pub(crate) struct OpenGuard {
    pub(super) shelf: Rc<Shelf>,
    pub(super) id: LogId,
}

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.shelf.open.borrow_mut().remove(&self.id);
    }
}
