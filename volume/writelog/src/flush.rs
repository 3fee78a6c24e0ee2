//! Flushes and barriers.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{LocalFuture, Reply, Request, Result};

use crate::log::Shared;
use crate::state::{Mode, State};

/// Flushes: all writes acknowledged before are durable when it completes. Begins a new generation for later writes.
pub(crate) fn flush(shared: Rc<Shared>) -> LocalFuture<Result<Reply>> {
    let mut state = shared.state.borrow_mut();
    state.barrier();
    // While the log is being disabled, requests reach the backend, which does not make them durable by itself.
    let lasts = state.mode.is_on() && !shared.is_early() && state.direct_lasts();
    drop(state);
    if lasts {
        return Box::pin(ready(Ok(Reply::Done)));
    }
    Box::pin(async move { make_last(&shared).await.map(|()| Reply::Done) })
}

/// Makes all acknowledged writes durable.
pub(crate) async fn make_last(shared: &Rc<Shared>) -> Result<()> {
    if shared.is_early() {
        let head = shared.state.borrow().entries.head();
        let over = || {
            let state = shared.state.borrow();
            state.appended_seq >= head || !state.mode.is_on()
        };
        shared.settled.wait_until(over).await;
        let synced = if shared.state.borrow().mode.is_on() { sync(shared).await } else { Ok(()) };
        if let Err(error) = synced {
            crate::append::turn_off(shared, error);
        }
        // After a failure of the medium, they become durable only at the backend.
        let over = || {
            let state = shared.state.borrow();
            state.mode.is_on() || matches!(state.mode, Mode::Off(_) | Mode::Failed(_))
        };
        shared.settled.wait_until(over).await;
        if let Mode::Failed(error) = &shared.state.borrow().mode {
            return Err(error.clone());
        }
    }
    flush_direct(shared).await
}

/// Makes all acknowledged writes durable on the medium, without any request to the backend. If the log is full, that
/// covers the entries placed already; the others follow as write-back frees space.
pub(crate) async fn make_last_on_medium(shared: &Rc<Shared>) {
    if !shared.is_early() {
        return;
    }
    let all = |state: &State| state.appended_seq >= state.entries.head() || !state.mode.is_on();
    loop {
        let over = || {
            let state = shared.state.borrow();
            all(&state)
                || shared.throttle.is_starved() && state.appending.is_empty() && state.synced_seq < state.appended_seq
        };
        shared.settled.wait_until(over).await;
        if !shared.state.borrow().mode.is_on() {
            break;
        }
        if let Err(error) = sync(shared).await {
            crate::append::turn_off(shared, error);
        }
        if all(&shared.state.borrow()) {
            break;
        }
    }
    let turning_off = matches!(shared.state.borrow().mode, Mode::TurningOff(_));
    if turning_off && let Err(error) = shared.medium.sync().await {
        // A failed medium is not relied on, whatever it reports: its contents go to the backend.
        tracing::debug!(%error, "a write log that turns off could not be synced");
    }
}

/// Makes all appended entries durable on the medium.
pub(crate) async fn sync(shared: &Rc<Shared>) -> Result<()> {
    let appended = shared.state.borrow().appended_seq;
    if shared.state.borrow().synced_seq < appended {
        shared.medium.sync().await?;
        let mut state = shared.state.borrow_mut();
        state.synced_seq = state.synced_seq.max(appended);
    }
    Ok(())
}

/// Makes bypassed writes durable.
pub(crate) async fn flush_direct(shared: &Rc<Shared>) -> Result<()> {
    let done = {
        let state = shared.state.borrow();
        if state.direct_lasts() && state.mode.is_on() {
            return Ok(());
        }
        state.direct_done
    };
    shared.inner.submit(Request::Flush).await?;
    let mut state = shared.state.borrow_mut();
    state.direct_flushed = state.direct_flushed.max(done);
    Ok(())
}
