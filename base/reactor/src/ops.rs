//! Operations in flight: their futures, and the handling of abandoned ones.

use std::cell::RefCell;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use slab::Slab;

use crate::driver::{Completion, Driver, Handle, Op, OpKey};
use crate::executor::ReactorState;
use crate::queue_limit::QueueLimit;

/// Limit that an operation counts for; `None` for most.
type OpLimit = Option<Rc<QueueLimit>>;

enum OpState {
    Waiting(Option<Waker>, OpLimit),
    Done(Completion),
    /// Future dropped; the completion is discarded when it arrives, and its buffers only then.
    Orphaned(OpLimit),
}

/// Operations in flight of one reactor.  No borrow is held while a waker runs or is dropped: it may call back.
#[derive(Default)]
pub(crate) struct Ops {
    states: RefCell<Slab<OpState>>,
}

impl Ops {
    pub(crate) fn start(inner: &Rc<ReactorState>, op: Op) -> OpFuture {
        let key = inner.ops.states.borrow_mut().insert(OpState::Waiting(None, None));
        inner.with_driver(|driver| driver.submit(OpKey(key as u64), op));
        OpFuture { inner: inner.clone(), key: Some(key) }
    }

    /// Starts an operation, at once or when the limit admits it.
    pub(crate) fn start_limited(inner: &Rc<ReactorState>, op: Op, limit: &Rc<QueueLimit>) -> OpFuture {
        let key = inner.ops.states.borrow_mut().insert(OpState::Waiting(None, Some(limit.clone())));
        if let Some(op) = limit.admit(OpKey(key as u64), op) {
            inner.with_driver(|driver| driver.submit(OpKey(key as u64), op));
        }
        OpFuture { inner: inner.clone(), key: Some(key) }
    }

    /// Handles a completion from the driver.
    pub(crate) fn complete(inner: &ReactorState, completion: Completion) {
        let key = completion.key.0 as usize;
        let mut states = inner.ops.states.borrow_mut();
        match &mut states[key] {
            state @ OpState::Waiting(..) => {
                let before = mem::replace(state, OpState::Done(completion));
                drop(states);
                if let OpState::Waiting(waker, limit) = before {
                    submit_next(inner, limit);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                }
            }
            OpState::Orphaned(limit) => {
                let limit = limit.take();
                states.remove(key);
                drop(states);
                inner.with_driver(|driver| discard(driver, completion));
                submit_next(inner, limit);
            }
            OpState::Done(_) => unreachable!("the driver completed operation {key} twice"),
        }
    }
}

/// Submits the operation that waited for the completion of one.
fn submit_next(inner: &ReactorState, limit: OpLimit) {
    if let Some((key, op)) = limit.and_then(|limit| limit.complete()) {
        inner.with_driver(|driver| driver.submit(key, op));
    }
}

/// Discards the completion of an abandoned operation; a socket that came with it is closed, not leaked.
fn discard(driver: &mut dyn Driver, completion: Completion) {
    if let (Op::Accept { .. } | Op::Connect { .. }, Ok(handle)) = (&completion.op, &completion.result) {
        driver.close(Handle(*handle));
    }
}

/// Future of an operation in flight.  Dropping it early requests cancellation, and the buffers stay with the driver
/// until the operation has completed.
pub(crate) struct OpFuture {
    inner: Rc<ReactorState>,
    key: Option<usize>,
}

impl Future for OpFuture {
    type Output = Completion;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let key = self.key.expect("polled after it was done");
        let mut states = self.inner.ops.states.borrow_mut();
        match &mut states[key] {
            OpState::Waiting(waker, _) => {
                let before = match waker {
                    Some(waker) if waker.will_wake(cx.waker()) => None,
                    _ => waker.replace(cx.waker().clone()),
                };
                drop(states);
                drop(before);
                Poll::Pending
            }
            OpState::Done(_) => {
                let OpState::Done(completion) = states.remove(key) else { unreachable!() };
                drop(states);
                self.key = None;
                Poll::Ready(completion)
            }
            OpState::Orphaned(_) => unreachable!("a future polled after it was dropped"),
        }
    }
}

impl Drop for OpFuture {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut states = self.inner.ops.states.borrow_mut();
        if matches!(states[key], OpState::Done(_)) {
            let OpState::Done(completion) = states.remove(key) else { unreachable!() };
            drop(states);
            self.inner.with_driver(|driver| discard(driver, completion));
            return;
        }
        let OpState::Waiting(_, limit) = &mut states[key] else { unreachable!("a future dropped twice") };
        let limit = limit.take();
        // An operation that waits for its turn was not submitted.
        let unsubmitted = limit.as_ref().and_then(|limit| limit.remove(OpKey(key as u64)));
        let before = match unsubmitted {
            Some(_) => states.remove(key),
            None => mem::replace(&mut states[key], OpState::Orphaned(limit)),
        };
        drop(states);
        drop(before);
        if unsubmitted.is_none() {
            self.inner.with_driver(|driver| driver.cancel(OpKey(key as u64)));
        }
    }
}
