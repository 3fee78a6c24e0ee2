//! Single flight: a part that is being read, and the requests that wait for it.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::Result;
use forebay_reactor::sync::Notify;

use crate::part::Part;

/// Read of a part in progress. A task of its own completes it, whether anybody still waits or not.
pub(crate) struct PartFlight {
    /// Set if an object that does not exist reads as data of the parent's own parent, as far as its reader knows.
    inherits: bool,
    result: RefCell<Option<Result<Part>>>,
    landed: Notify,
}

impl PartFlight {
    pub(crate) fn new(inherits: bool) -> Rc<Self> {
        Rc::new(Self { inherits, result: RefCell::default(), landed: Notify::new() })
    }

    /// Returns whether the result holds for a reader that has joined: not if the first one failed, whose client may be fenced,
    /// or if it was of an older view of the parent than this one's, in which objects were not copied up yet.
    pub(crate) fn holds_for(&self, result: &Result<Part>, inherits: bool) -> bool {
        match result {
            Ok(Part::Absent) => inherits || !self.inherits,
            result => result.is_ok(),
        }
    }

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
