//! Exclusive ownership of the volume: requests wait until the owner has verified it.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::timeout;

use crate::log::LogShared;
use crate::writeback::{closed, fail, is_final};

/// Minimum and maximum delay between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Retries until this process owns the volume, the log has failed, or it is closed.
pub(crate) async fn run(shared: Rc<LogShared>, first: LocalFuture<Result<()>>) {
    let (mut attempt, mut backoff) = (first, BACKOFF.0);
    loop {
        // An unreachable cluster must not delay closing the log.
        let Some(result) = until_closed(&shared, &mut attempt).await else { return };
        match result {
            Ok(()) => {
                {
                    shared.state.borrow_mut().life.acquired();
                }
                shared.append.notify_all();
                shared.write_back.notify_all();
                return shared.settled.notify_all();
            }
            Err(error) if is_lost(error.kind()) => return fail(&shared, error),
            Err(error) => {
                tracing::warn!(%error, "cannot acquire the volume of a write log: its requests wait, retrying");
                shared.state.borrow_mut().life.set_backend_error(Some(error));
                shared.settled.notify_all();
            }
        }
        let _ = timeout(backoff, closed(&shared)).await;
        if shared.state.borrow().life.is_closing() {
            return;
        }
        backoff = (backoff * 2).min(BACKOFF.1);
        let Some(again) = shared.owner.acquire() else { return };
        attempt = again;
    }
}

/// Returns the result of an attempt; `None` once the log is closed.
async fn until_closed(shared: &LogShared, attempt: &mut LocalFuture<Result<()>>) -> Option<Result<()>> {
    let mut closed = pin!(closed(shared));
    poll_fn(|cx| match closed.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => attempt.as_mut().poll(cx).map(Some),
    })
    .await
}

/// Returns whether no later attempt can succeed.
fn is_lost(kind: ErrorKind) -> bool {
    is_final(kind) || matches!(kind, ErrorKind::Corrupt | ErrorKind::Denied)
}

/// Waits until ownership is established.
///
/// # Errors
/// [`ErrorKind::ShuttingDown`] if the log is closed in the meantime.
pub(crate) async fn wait(shared: &Rc<LogShared>) -> Result<()> {
    let over = || {
        let state = shared.state.borrow();
        !state.life.is_acquiring() || state.life.is_ending()
    };
    shared.settled.wait_until(over).await;
    match shared.state.borrow().life.is_ending() {
        true => Err(Error::new(ErrorKind::ShuttingDown, "the write log is closed")),
        false => Ok(()),
    }
}
