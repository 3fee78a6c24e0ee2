//! Data that was requested from the host, and the time limit for it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;

use forebay_block::BufList;
use forebay_reactor::time::Sleep;
use forebay_reactor::{now, sleep};

use super::fused::FusedPair;
use super::io::ReadyNvmeCommand;
use crate::session::Transfers;
use crate::wire::Sqe;
use crate::wire::pdu::{DataHeader, Fes};

/// Command that requested data belongs to.
pub(super) enum DataOwner {
    /// I/O command.
    Io(ReadyNvmeCommand),
    /// One half of a fused operation; true for the first.
    Fused(Rc<FusedPair>, bool),
    /// Admin or Fabrics command.
    Admin(Sqe),
}

/// Data transfers from the host that are in progress, with one timer for all of them.
///
/// 1. While a transfer is in progress, the timer runs, and fires no later than the timeout after the oldest request.
/// 2. A transfer ends once: with all of its data, or when all are aborted.
pub(super) struct DataTransfers {
    transfers: Transfers<DataOwner>,
    timer: Option<Sleep>,
    timeout: Duration,
}

impl DataTransfers {
    /// Creates an empty set, whose transfers may each take `timeout`.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { transfers: Transfers::default(), timer: None, timeout }
    }

    /// Begins a transfer of `len` bytes for the command `cid`.  Returns the tag for the R2T.  Wakes `task`, if a timer
    /// was started that it must poll.
    pub(super) fn begin(&mut self, cid: u16, len: u32, owner: DataOwner, task: &Waker) -> u16 {
        let tag = self.transfers.begin(cid, len, now().as_nanos(), owner);
        if self.timer.is_none() {
            self.timer = Some(sleep(self.timeout));
            // A new timer has to be polled once to register its wake-up.
            task.wake_by_ref();
        }
        tag
    }

    /// Checks that an H2CData with this `header` is expected.
    ///
    /// # Errors
    /// The fatal error status if it is not.
    pub(super) fn check(&self, header: &DataHeader, last: bool) -> Result<(), Fes> {
        self.transfers.check(header, last)
    }

    /// Adds data that was checked.  Returns the command, its data and whether all digests matched once the data is
    /// complete.
    pub(super) fn add(
        &mut self,
        header: &DataHeader,
        data: BufList,
        intact: bool,
    ) -> Option<(DataOwner, BufList, bool)> {
        debug_assert!(self.timer.is_some(), "data is awaited without a time limit");
        self.transfers.arrived(header, data, intact)
    }

    /// Polls the timer.  Returns true if the host is overdue with requested data.
    pub(super) fn poll_overdue(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(timer) = &mut self.timer
            && Pin::new(timer).poll(cx).is_ready()
        {
            self.timer = None;
            let Some(since) = self.transfers.oldest() else { return false };
            let waited = Duration::from_nanos(now().as_nanos() - since);
            if waited >= self.timeout {
                return true;
            }
            self.timer = Some(sleep(self.timeout - waited));
        }
        false
    }

    /// Aborts all transfers.  Their commands never began.
    pub(super) fn abort(&mut self) {
        self.timer = None;
        drop(self.transfers.clear().collect::<Vec<_>>());
    }
}
