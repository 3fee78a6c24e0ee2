//! Reads of payloads, which protect their place in the ring.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::spawn;
use forebay_reactor::sync::Notify;

use super::io;
use super::ring::RingState;
use crate::media::storage::BlockStorage;

/// Guard that keeps a payload from being overwritten while it is read.
pub(super) struct Pin {
    pub(super) state: Rc<RefCell<RingState>>,
    pub(super) room: Rc<Notify>,
    pub(super) pos: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.state.borrow_mut();
        if let Some(count) = state.reads.get_mut(&self.pos) {
            *count -= 1;
            if *count == 0 {
                state.reads.remove(&self.pos);
            }
        }
        drop(state);
        self.room.notify_all();
    }
}

/// Combined read of several payloads, started when the first of them is polled.
pub(super) struct PayloadSpan {
    pub(super) storage: BlockStorage,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) begun: Cell<bool>,
    pub(super) result: RefCell<Option<Result<Buf>>>,
    pub(super) ended: Notify,
    pub(super) _pin: Pin,
}

impl PayloadSpan {
    pub(super) async fn get(self: &Rc<Self>) -> Result<Buf> {
        if !self.begun.replace(true) {
            // The caller that started the read may be dropped.
            let span = self.clone();
            drop(spawn(async move {
                let read = span.storage.read_exact_at(span.offset, span.len).await;
                let read = read.map(BufMut::freeze).map_err(|error| io(error, "reading payloads"));
                *span.result.borrow_mut() = Some(read);
                span.ended.notify_all();
            }));
        }
        self.ended.wait_until(|| self.result.borrow().is_some()).await;
        let result = self.result.borrow();
        result.clone().unwrap_or_else(|| Err(Error::from(ErrorKind::Io)))
    }
}
