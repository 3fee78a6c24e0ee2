//! Draining the log, and holding the backend at a consistency point: for snapshots, resizes, and a newly attached
//! log.

use std::rc::Rc;

use forebay_block::{Request, Result};

use crate::log::{Shared, WriteLog, closed};
use crate::state::Mode;
use crate::{append, writeback};

impl WriteLog {
    /// Accounts for changes in flight past a log that is being attached, until the returned guard is dropped. Entries
    /// newer than the present ones are not written back in the meantime, and flushes go to the backend too.
    pub fn changes_past(&self) -> ChangesPast {
        let mut state = self.shared.state.borrow_mut();
        let head = state.entries.head();
        state.holds.push(head);
        state.past_active += 1;
        ChangesPast { cut: Cut { shared: self.shared.clone(), head } }
    }

    /// Waits until the backend holds, durably, all writes acknowledged before.
    ///
    /// # Errors
    /// If the log has failed or is closed, or the backend fails a flush.
    pub async fn drain(&self) -> Result<()> {
        self.settle().await;
        let head = self.shared.state.borrow().entries.head();
        self.drain_to(head).await
    }

    async fn drain_to(&self, seq: u64) -> Result<()> {
        let shared = &self.shared;
        {
            let mut state = shared.state.borrow_mut();
            state.wanted = state.wanted.max(seq);
        }
        shared.write_back.notify_all();
        let over = || {
            let state = shared.state.borrow();
            state.entries.tail() >= seq || state.closing || matches!(state.mode, Mode::Failed(_))
        };
        shared.settled.wait_until(over).await;
        {
            let state = shared.state.borrow();
            if let Mode::Failed(error) = &state.mode {
                return Err(error.clone());
            }
            if state.entries.tail() < seq {
                return Err(closed());
            }
        }
        shared.inner.submit(Request::Flush).await.map(drop)
    }

    /// Waits until all pieces queued now are in the log, or were dropped with an error.
    async fn settle(&self) {
        let shared = &self.shared;
        shared.settled.wait_until(|| !matches!(shared.state.borrow().mode, Mode::Acquiring)).await;
        let (queued, drops) = {
            let state = shared.state.borrow();
            (state.next_seq + state.queue.len() as u64, state.drops)
        };
        let over = || {
            let state = shared.state.borrow();
            // Pieces dropped from the queue never get a sequence number.
            let target = if state.drops == drops { queued } else { queued.min(state.dropped_at) };
            state.appended_seq >= target || !state.mode.is_on()
        };
        shared.settled.wait_until(over).await;
    }

    /// Brings the backend to a consistency point and holds it there: it has all writes acknowledged before this call,
    /// and none submitted after it returned. Until the guard is dropped, later writes stay in the log.
    ///
    /// # Errors
    /// If the log has failed or is closed, or the backend fails a flush.
    pub async fn cut(&self) -> Result<Cut> {
        let shared = &self.shared;
        shared.state.borrow_mut().barrier();
        self.settle().await;
        let head = {
            let mut state = shared.state.borrow_mut();
            let head = state.entries.head();
            state.holds.push(head);
            head
        };
        let cut = Cut { shared: shared.clone(), head };
        shared.settled.wait_until(|| shared.state.borrow().direct_active == 0).await;
        self.drain_to(head).await?;
        Ok(cut)
    }

    /// Prepares the volume for a shrink to `size` bytes: requests past it are refused until the returned guard is
    /// dropped, and the log holds nothing past it when this returns.
    ///
    /// # Errors
    /// If the log has failed, or the backend fails a flush.
    pub async fn shrink(&self, size: u64) -> Result<Shrinking> {
        let shared = &self.shared;
        shared.state.borrow_mut().size_limits.push(size);
        let shrinking = Shrinking { shared: shared.clone(), size };
        let over = || shared.ranges.is_free_from(size);
        shared.settled.wait_until(over).await;
        self.drain().await?;
        self.forget().await?;
        Ok(shrinking)
    }

    /// Waits until no recovery would replay an entry that the backend holds.
    async fn forget(&self) -> Result<()> {
        let shared = &self.shared;
        if self.mode().is_on()
            && let Err(error) = writeback::persist_tail_twice(shared).await
        {
            append::turn_off(shared, error);
        }
        // After a failure of the medium, any entry may be replayed until the record excludes it.
        let over = || {
            let state = shared.state.borrow();
            state.mode.is_on() || matches!(state.mode, Mode::Off(_) | Mode::Failed(_))
        };
        shared.settled.wait_until(over).await;
        match &shared.state.borrow().mode {
            Mode::Failed(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

/// Guard of a consistency point of the backend.
pub struct Cut {
    shared: Rc<Shared>,
    head: u64,
}

impl Drop for Cut {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.borrow_mut();
            // Other guards may still hold the same entry.
            if let Some(at) = state.holds.iter().position(|&head| head == self.head) {
                state.holds.swap_remove(at);
            }
        }
        self.shared.write_back.notify_all();
    }
}

/// Guard that accounts for changes in flight past the log.
pub struct ChangesPast {
    cut: Cut,
}

impl Drop for ChangesPast {
    fn drop(&mut self) {
        let mut state = self.cut.shared.state.borrow_mut();
        state.past_active -= 1;
        // Changes acknowledged most recently may not be durable.
        state.direct_done += 1;
    }
}

/// Guard of a shrink: requests past the volume's new end are refused while it is held.
pub struct Shrinking {
    shared: Rc<Shared>,
    size: u64,
}

impl Drop for Shrinking {
    fn drop(&mut self) {
        let limits = &mut self.shared.state.borrow_mut().size_limits;
        // Other guards may still hold the same limit.
        if let Some(at) = limits.iter().position(|&size| size == self.size) {
            limits.swap_remove(at);
        }
    }
}
