//! Health of the store's device: the error for which it rejects writes.

use std::cell::{Cell, RefCell};

use forebay_block::Error;

/// Health of the device.
///
/// # Invariants
/// 1. While there is a failure, no write is acknowledged.
/// 2. A permanent failure is never cleared.
#[derive(Default)]
pub struct DeviceHealth {
    /// Error for which writes are rejected: the device failed and has not recovered.
    failure: RefCell<Option<Error>>,
    /// Set if the failure persists until the store is reopened.
    permanent: Cell<bool>,
}

impl DeviceHealth {
    /// Returns the error for which writes are rejected.
    pub fn failure(&self) -> Option<Error> {
        self.failure.borrow().clone()
    }

    /// Returns whether writes are rejected.
    pub fn is_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Returns whether writes are rejected until the store is reopened.
    pub fn is_failed_permanently(&self) -> bool {
        debug_assert!(!self.permanent.get() || self.is_failed());
        self.permanent.get()
    }

    /// Records an error; the first one is kept. Returns false if there was one.
    pub fn fail(&self, error: Error) -> bool {
        let mut failure = self.failure.borrow_mut();
        let first = failure.is_none();
        failure.get_or_insert(error);
        first
    }

    /// Records an error like [`fail`](Self::fail), until the store is reopened.
    pub fn fail_permanently(&self, error: Error) -> bool {
        let first = self.fail(error);
        self.permanent.set(true);
        first
    }

    /// Clears a failure that is not permanent.
    pub fn recover(&self) {
        if !self.permanent.get() {
            self.failure.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::ErrorKind;

    use super::*;

    #[test]
    fn only_a_permanent_failure_stays() {
        let health = DeviceHealth::default();
        let error = |text: &str| Error::new(ErrorKind::Io, text);
        assert!(health.fail(error("first")) && !health.fail(error("second")));
        assert!(format!("{:?}", health.failure()).contains("first"));
        health.recover();
        assert!(!health.is_failed());
        assert!(health.fail_permanently(error("flush")));
        health.recover();
        assert!(health.is_failed() && health.is_failed_permanently());
    }
}
