//! Requests to the monitors that await their replies.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::oneshot;
use forebay_reactor::{Buf, BufList};

use super::wire::kind;

/// Request that awaits its reply.
struct Pending {
    kind: u16,
    versions: (u16, u16),
    front: Buf,
    data: BufList,
    answer: oneshot::Sender<Message>,
}

/// Requests in flight, by transaction id.
///
/// Invariant: transaction ids ascend and are never reused, so a late reply cannot answer another request.
#[derive(Default)]
pub(super) struct Requests {
    pending: RefCell<BTreeMap<u64, Pending>>,
    last_tid: Cell<u64>,
}

impl Requests {
    /// Adds a request; returns its transaction id, and the receiver of its reply.
    pub(super) fn insert(
        &self,
        kind: u16,
        versions: (u16, u16),
        front: &[u8],
        data: BufList,
    ) -> (u64, oneshot::Receiver<Message>) {
        let tid = self.last_tid.get() + 1;
        self.last_tid.set(tid);
        let (answer, answered) = oneshot::channel();
        let pending = Pending { kind, versions, front: Buf::copy_of(front), data, answer };
        let before = self.pending.borrow_mut().insert(tid, pending);
        debug_assert!(before.is_none(), "transaction ids are unique");
        (tid, answered)
    }

    /// Removes a request that has been answered or abandoned.
    pub(super) fn remove(&self, tid: u64) {
        self.pending.borrow_mut().remove(&tid);
    }

    /// Removes all requests: their receivers get no reply.
    pub(super) fn clear(&self) {
        self.pending.borrow_mut().clear();
    }

    /// Sends a request.
    pub(super) fn send(&self, connection: &Connection, tid: u64) {
        if let Some(pending) = self.pending.borrow().get(&tid) {
            pending.send(connection, tid);
        }
    }

    /// Sends all requests again, in the order of submission, on a new connection.
    pub(super) fn send_all(&self, connection: &Connection) {
        for (&tid, pending) in &*self.pending.borrow() {
            pending.send(connection, tid);
        }
    }

    /// Hands a reply to the request that it answers.
    pub(super) fn settle(&self, message: Message) {
        let mut tid = message.tid;
        if message.kind == kind::AUTH_REPLY {
            // Authentication replies have no tid; at most one request is in flight.
            let waits = |(&tid, pending): (&u64, &Pending)| (pending.kind == kind::AUTH).then_some(tid);
            tid = self.pending.borrow().iter().find_map(waits).unwrap_or(tid);
        }
        let pending = self.pending.borrow_mut().remove(&tid);
        match pending {
            Some(pending) => pending.answer.send(message),
            None => tracing::debug!(kind = message.kind, "ignoring a monitor's reply to an abandoned request"),
        }
    }
}

impl Pending {
    fn send(&self, connection: &Connection, tid: u64) {
        let mut message = Message::new(self.kind).front(self.front.clone()).data(self.data.clone());
        (message.version, message.compat_version) = self.versions;
        message.tid = tid;
        // Messages that cannot be sent are resent over the next connection.
        if let Err(error) = connection.post(message) {
            tracing::debug!(%error, "request to a monitor waits for the next connection");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn reply(answered: &mut oneshot::Receiver<Message>) -> Option<Option<u16>> {
        match pin!(answered).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(message) => Some(message.map(|message| message.kind)),
            Poll::Pending => None,
        }
    }

    fn message(kind: u16, tid: u64) -> Message {
        let mut message = Message::new(kind);
        message.tid = tid;
        message
    }

    #[test]
    fn replies_find_their_requests() {
        let requests = Requests::default();
        let add = |kind| requests.insert(kind, (1, 1), &[], BufList::new());
        let (mut statfs, mut auth, mut late) = (add(kind::STATFS), add(kind::AUTH), add(kind::GET_VERSION));
        assert_eq!((statfs.0, auth.0, late.0), (1, 2, 3));
        requests.settle(message(kind::AUTH_REPLY, 0));
        assert_eq!(reply(&mut auth.1), Some(Some(kind::AUTH_REPLY)), "it has no tid");
        assert_eq!((reply(&mut statfs.1), reply(&mut late.1)), (None, None));
        requests.remove(late.0);
        requests.settle(message(kind::GET_VERSION_REPLY, late.0));
        assert_eq!(add(kind::STATFS).0, 4, "ids are not reused");
        requests.settle(message(kind::STATFS_REPLY, 1));
        assert_eq!(reply(&mut statfs.1), Some(Some(kind::STATFS_REPLY)));
        let (_, mut last) = add(kind::STATFS);
        requests.clear();
        assert_eq!(reply(&mut last), Some(None));
    }
}
