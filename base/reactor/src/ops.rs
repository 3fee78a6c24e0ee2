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

enum OpState {
    Waiting(Option<Waker>),
    Done(Completion),
    /// Future dropped; the completion is discarded when it arrives, and its buffers only then.
    Orphaned,
}

/// Operations in flight of one reactor.  No borrow is held while a waker runs or is dropped: it may call back.
#[derive(Default)]
pub(crate) struct Ops {
    states: RefCell<Slab<OpState>>,
}

impl Ops {
    pub(crate) fn start(inner: &Rc<ReactorState>, op: Op) -> OpFuture {
        let key = inner.ops.states.borrow_mut().insert(OpState::Waiting(None));
        inner.with_driver(|driver| driver.submit(OpKey(key as u64), op));
        OpFuture { inner: inner.clone(), key: Some(key) }
    }

    /// Handles a completion from the driver.
    pub(crate) fn complete(inner: &ReactorState, completion: Completion) {
        let key = completion.key.0 as usize;
        let mut states = inner.ops.states.borrow_mut();
        match &mut states[key] {
            state @ OpState::Waiting(_) => {
                let before = mem::replace(state, OpState::Done(completion));
                drop(states);
                if let OpState::Waiting(Some(waker)) = before {
                    waker.wake();
                }
            }
            OpState::Orphaned => {
                states.remove(key);
                drop(states);
                inner.with_driver(|driver| discard(driver, completion));
            }
            OpState::Done(_) => unreachable!("the driver completed operation {key} twice"),
        }
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
            OpState::Waiting(waker) => {
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
            OpState::Orphaned => unreachable!("a future polled after it was dropped"),
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
        } else {
            let before = mem::replace(&mut states[key], OpState::Orphaned);
            drop(states);
            drop(before);
            self.inner.with_driver(|driver| driver.cancel(OpKey(key as u64)));
        }
    }
}
