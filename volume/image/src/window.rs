//! Bounded concurrency of operations.

use std::future::poll_fn;
use std::task::Poll;

use forebay_block::{LocalFuture, Result};
use forebay_reactor::stand_back;

/// Maximum number of object operations in flight for one request.
pub(crate) const REQUEST_WINDOW: usize = 32;
/// Maximum number of object operations in flight for a walk over all objects of an image.
pub(crate) const WALK_WINDOW: usize = 16;

/// Yields to hosts' requests while a loop iteration of the reactor is long, then does the work. Otherwise a store
/// that completes from memory would do all of a walk in one iteration.
pub(crate) fn after_others<T: 'static>(work: LocalFuture<T>) -> LocalFuture<T> {
    Box::pin(async move {
        stand_back().await;
        work.await
    })
}

/// Runs the futures that `next` returns, at most `max` at once, and returns their results in the order in which they were
/// started; after an error as [`windowed`] does.
pub(crate) async fn windowed_in_order<T: 'static>(
    max: usize,
    next: impl FnMut() -> Option<LocalFuture<Result<T>>>,
) -> Result<Vec<T>> {
    let mut results: Vec<Option<T>> = Vec::new();
    let put = |number: usize, result| {
        results.resize_with(results.len().max(number + 1), || None);
        results[number] = Some(result);
    };
    windowed(max, next, put).await?;
    Ok(results.into_iter().flatten().collect())
}

/// Runs the futures that `next` returns, at most `max` at once, and passes each result with its number to `done`.
///
/// After an error no more are started; those in flight are waited for, so that none is left when the first error is
/// returned.
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn work_that_never_waits_lets_others_go_first() {
        const PIECES: u32 = 64;
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            // Pieces of work between two turns of the host task.
            let (since_turn, most) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
            let turns = since_turn.clone();
            let host = spawn(async move {
                loop {
                    turns.set(0);
                    yield_now().await;
                }
            });
            let mut pieces = 0..PIECES;
            let next = || {
                pieces.next().map(|_| {
                    let (since_turn, most) = (since_turn.clone(), most.clone());
                    after_others(Box::pin(async move {
                        let began = Instant::now();
                        while began.elapsed() < Duration::from_micros(150) {}
                        since_turn.set(since_turn.get() + 1);
                        most.set(most.get().max(since_turn.get()));
                        Ok(())
                    }))
                })
            };
            windowed(WALK_WINDOW, next, |_, ()| {}).await.expect("done");
            drop(host);
            // One at a time at best; pieces that have yielded often enough run together.
            assert!(most.get() <= WALK_WINDOW as u32, "{} pieces of work without a turn of the host", most.get());
        });
    }
}
