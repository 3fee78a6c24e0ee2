//! Channel for messages of the back-end to the front-end.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, Stream, spawn};

use crate::memory::MemoryAccess;
use crate::wire::{self, request};

/// Maximum messages that wait to be sent; a front-end that does not read loses later ones.
const WAITING_MAX: usize = 256;

#[derive(Default)]
struct Outgoing {
    messages: RefCell<VecDeque<Vec<u8>>>,
    changed: Notify,
    closed: Cell<bool>,
}

/// Channel to a front-end; closed when it is dropped.
pub(super) struct BackendChannel {
    outgoing: Rc<Outgoing>,
    stream: Stream,
}

impl BackendChannel {
    /// Adopts the socket that the front-end has passed.
    ///
    /// # Errors
    /// When the descriptor is no Unix socket.
    pub(super) fn adopt(socket: OwnedFd) -> io::Result<Self> {
        let stream = Stream::adopt_unix(socket)?;
        let outgoing = Rc::new(Outgoing::default());
        drop(spawn(send_all(stream.clone(), outgoing.clone())));
        Ok(Self { outgoing, stream })
    }

    fn send(&self, message: Vec<u8>) {
        let mut messages = self.outgoing.messages.borrow_mut();
        if messages.len() < WAITING_MAX && !messages.contains(&message) {
            messages.push_back(message);
            self.outgoing.changed.notify_all();
        }
    }

    /// Tells the front-end to read the configuration space again.
    pub(super) fn config_changed(&self) {
        self.send(wire::backend_message(request::BACKEND_CONFIG_CHANGE, &[], false));
    }

    /// Asks the front-end for a translation.
    pub(super) fn iotlb_miss(&self, iova: u64, access: MemoryAccess) {
        self.send(wire::backend_message(request::BACKEND_IOTLB_MSG, &wire::iotlb_miss(iova, access), false));
    }
}

impl Drop for BackendChannel {
    fn drop(&mut self) {
        self.outgoing.closed.set(true);
        self.outgoing.changed.notify_all();
        // A send that waits for the front-end ends.
        self.stream.shutdown();
    }
}

async fn send_all(stream: Stream, outgoing: Rc<Outgoing>) {
    loop {
        outgoing.changed.wait_until(|| outgoing.closed.get() || !outgoing.messages.borrow().is_empty()).await;
        if outgoing.closed.get() {
            return;
        }
        let message = outgoing.messages.borrow_mut().pop_front().expect("just waited for");
        if let Err(error) = stream.send_message(Buf::copy_of(&message), Vec::new()).await {
            tracing::debug!(%error, "the channel to a vhost-user front-end is closed");
            return;
        }
    }
}
