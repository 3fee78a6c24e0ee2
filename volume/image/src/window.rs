//! Many operations at once, but not too many.

use std::future::poll_fn;
use std::task::Poll;

use forebay_block::{LocalFuture, Result};

/// Operations on objects that one request has under way at most.
pub(crate) const REQUEST_WINDOW: usize = 32;
/// Operations that a walk over all objects of an image has under way at most.
pub(crate) const WALK_WINDOW: usize = 16;

/// Starts what `next` gives, `max` at once at most, and hands each result with its number to `done`.
///
/// After an error nothing more is started; what was started is waited for, so that nothing of it goes on when the
/// first error is returned.
pub(crate) async fn windowed<T: 'static>(
    max: usize,
    mut next: impl FnMut() -> Option<LocalFuture<Result<T>>>,
    mut done: impl FnMut(usize, T),
) -> Result<()> {
    let mut running: Vec<(usize, LocalFuture<Result<T>>)> = Vec::new();
    let mut started = 0;
    let mut failed = None;
    let mut more = true;
    poll_fn(move |cx| {
        loop {
            while more && running.len() < max {
                match next() {
                    Some(future) => {
                        running.push((started, future));
                        started += 1;
                    }
                    None => more = false,
                }
            }
            let before = running.len();
            let mut at = 0;
            while at < running.len() {
                let Poll::Ready(result) = running[at].1.as_mut().poll(cx) else {
                    at += 1;
                    continue;
                };
                let (number, _) = running.swap_remove(at);
                match result {
                    Ok(value) => done(number, value),
                    Err(error) => {
                        more = false;
                        failed.get_or_insert(error);
                    }
                }
            }
            if running.is_empty() && !more {
                return Poll::Ready(failed.take().map_or(Ok(()), Err));
            }
            if running.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await
}
