//! Single flight: a part that is being read, and the requests that wait for it.

use std::cell::RefCell;

use forebay_block::Result;
use forebay_reactor::sync::Notify;

use crate::part::Part;

/// Read of a part in progress. A task of its own completes it, whether anybody still waits or not.
#[derive(Default)]
pub(crate) struct PartFlight {
    result: RefCell<Option<Result<Part>>>,
    landed: Notify,
}

impl PartFlight {
    /// Completes it for all who wait.
    pub(crate) fn land(&self, result: Result<Part>) {
        *self.result.borrow_mut() = Some(result);
        self.landed.notify_all();
    }

    /// Waits until it is complete; returns the part, or the error of the read.
    pub(crate) async fn wait(&self) -> Result<Part> {
        self.landed.wait_until(|| self.result.borrow().is_some()).await;
        self.result.borrow().clone().expect("it has landed")
    }
}
