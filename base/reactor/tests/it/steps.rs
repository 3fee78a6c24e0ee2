//! Helpers that run futures and the reactor step by step.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Polls a future once; returns its result, if it has one.
pub async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        })
    })
    .await
}

/// Runs the reactor for a few iterations, so that operations reach the kernel and their completions come back.
pub async fn turn_round() {
    for _ in 0..5 {
        forebay_reactor::yield_now().await;
    }
}
