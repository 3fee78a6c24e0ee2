//! Record of the loops that ran, for tests: a choice must reach the loop, not only the report.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// Shapes that ran, while [`ran`] listens.
    static RAN: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Notes that this thread runs a loop of this shape.
pub(crate) fn note(shape: impl ToString) {
    RAN.with_borrow_mut(|ran| ran.iter_mut().for_each(|ran| ran.push(shape.to_string())));
}

/// Runs `work`; returns the shapes of the loops that this thread ran in it.
pub(crate) fn ran(work: impl FnOnce()) -> Vec<String> {
    RAN.set(Some(Vec::new()));
    work();
    RAN.take().unwrap_or_default()
}

/// Locks the slots against other tests of this process that set them.
pub(crate) fn lock_slots() -> MutexGuard<'static, ()> {
    static SLOTS: Mutex<()> = Mutex::new(());
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}
