//! Flushes and barriers.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{BlockReply, BlockRequest, LocalFuture, Result};

use crate::log::LogShared;
use crate::state::LogState;

/// Flushes: all writes acknowledged before are durable when it completes. Begins a new generation for later writes.
pub(crate) fn flush(shared: Rc<LogShared>) -> LocalFuture<Result<BlockReply>> {
    let mut state = shared.state.borrow_mut();
    state.barrier();
    // While the log is being disabled, requests reach the backend, which does not make them durable by itself.
    let durable = state.life.is_on() && !shared.is_write_back_ack() && state.bypassed.is_durable();
    drop(state);
    if durable {
        return Box::pin(ready(Ok(BlockReply::Done)));
    }
    Box::pin(async move { sync_acknowledged(&shared).await.map(|()| BlockReply::Done) })
}

/// Makes all acknowledged writes durable.
pub(crate) async fn sync_acknowledged(shared: &Rc<LogShared>) -> Result<()> {
    if shared.is_write_back_ack() {
        let head = shared.state.borrow().dirty.head();
        let over = || {
            let state = shared.state.borrow();
            state.queue.appended_seq() >= head || !state.life.is_on()
        };
        shared.settled.wait_until(over).await;
        let synced = if shared.state.borrow().life.is_on() { sync(shared).await } else { Ok(()) };
        match synced {
            Err(error) => crate::append::disable_failed(shared, error),
            Ok(()) => {
                if let Some(permitted) = shared.owner.permit_acknowledgement()
                    && !shared.state.borrow().life.is_ending()
                {
                    crate::append::permit(shared, permitted).await?;
                }
            }
        }
        // After a failure of the medium, they become durable only at the backend.
        let over = || {
            let state = shared.state.borrow();
            state.life.is_on() || state.life.is_over()
        };
        shared.settled.wait_until(over).await;
        if let Some(error) = shared.state.borrow().life.failure() {
            return Err(error.clone());
        }
    }
    flush_bypassed(shared).await
}

/// Makes all acknowledged writes durable on the medium, without any request to the backend. If the log is full, that
/// covers the entries placed already; the others follow as write-back frees space.
pub(crate) async fn sync_acknowledged_on_medium(shared: &Rc<LogShared>) {
    if !shared.is_write_back_ack() {
        return;
    }
    let all = |state: &LogState| state.queue.appended_seq() >= state.dirty.head() || !state.life.is_on();
    loop {
        let over = || {
            let state = shared.state.borrow();
            all(&state)
                || shared.throttle.is_starved()
                    && state.queue.groups() == 0
                    && state.queue.synced_seq() < state.queue.appended_seq()
        };
        shared.settled.wait_until(over).await;
        if !shared.state.borrow().life.is_on() {
            break;
        }
        if let Err(error) = sync(shared).await {
            crate::append::disable_failed(shared, error);
        }
        if all(&shared.state.borrow()) {
            break;
        }
    }
    let turning_off = shared.state.borrow().life.is_disabling();
    if turning_off && let Err(error) = shared.medium.sync().await {
        // A failed medium is not relied on, whatever it reports: its contents go to the backend.
        tracing::debug!(%error, "cannot sync the medium of a write log being disabled; its contents go to the backend");
    }
}

/// Makes all appended entries durable on the medium.
pub(crate) async fn sync(shared: &Rc<LogShared>) -> Result<()> {
    let appended = shared.state.borrow().queue.appended_seq();
    if shared.state.borrow().queue.synced_seq() < appended {
        shared.medium.sync().await?;
        let mut state = shared.state.borrow_mut();
        state.queue.synced(appended);
    }
    Ok(())
}

/// Makes bypassed writes durable.
pub(crate) async fn flush_bypassed(shared: &Rc<LogShared>) -> Result<()> {
    let done = {
        let state = shared.state.borrow();
        if state.bypassed.is_durable() && state.life.is_on() {
            return Ok(());
        }
        state.bypassed.acknowledged()
    };
    shared.inner.submit(BlockRequest::Flush).await?;
    shared.state.borrow_mut().bypassed.flushed(done);
    Ok(())
}
