//! Barriers.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{LocalFuture, Reply, Request, Result};

use crate::log::Shared;
use crate::state::{Mode, State};

/// What was answered before lasts when this is answered; what is queued from now on is of a new generation.
pub(crate) fn flush(shared: Rc<Shared>) -> LocalFuture<Result<Reply>> {
    let mut state = shared.state.borrow_mut();
    state.barrier();
    // A log that is turning off lets requests through to the backend, which does not make them last by itself.
    let lasts = state.mode.is_on() && !shared.is_early() && state.direct_lasts();
    drop(state);
    if lasts {
        return Box::pin(ready(Ok(Reply::Done)));
    }
    Box::pin(async move { make_last(&shared).await.map(|()| Reply::Done) })
}

/// Makes everything last that was answered.
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
        // On a medium that has failed they last only at the backend.
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

/// Makes what was answered last on the medium, without anything of the backend.  Of a full log that is what has its place
/// already; the rest follows as far as the backend makes room.
pub(crate) async fn make_last_on_medium(shared: &Rc<Shared>) {
    if !shared.is_early() {
        return;
    }
    let all = |state: &State| state.appended_seq >= state.entries.head() || !state.mode.is_on();
    loop {
        let over = || {
            let state = shared.state.borrow();
            all(&state) || state.starved && state.appending.is_empty() && state.synced_seq < state.appended_seq
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
        // Whatever it says, what a failed medium has is not relied on: it goes to the backend.
        tracing::debug!(%error, "a write log that turns off could not be synced");
    }
}

/// Makes everything last that is on the medium.
pub(crate) async fn sync(shared: &Rc<Shared>) -> Result<()> {
    let appended = shared.state.borrow().appended_seq;
    if shared.state.borrow().synced_seq < appended {
        shared.medium.sync().await?;
        let mut state = shared.state.borrow_mut();
        state.synced_seq = state.synced_seq.max(appended);
    }
    Ok(())
}

/// Makes what went round the log last.
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
