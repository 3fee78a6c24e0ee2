//! Pending requests, indexed by the transaction ID in the message header without a search.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::task::{Context, Poll, Waker};

use slab::Slab;

use crate::connection::SendError;
use crate::message::{Message, MessageRole};

pub(crate) type ReplyResult = Result<Message, SendError>;

enum RequestState {
    /// Not queued yet: an error of the connection is reported to the task that queues it.
    Fresh,
    /// Reply pending; the waker, if any, is woken by it.
    Waiting(Option<Waker>),
    Done(ReplyResult),
}

struct Request {
    tid: u64,
    state: RequestState,
}

/// Pending requests of one connection.
///
/// Invariant: wakers are woken, and wakers, messages and replies dropped, while the table is not borrowed, since either
/// may begin or end another request.
#[derive(Default)]
pub(crate) struct RequestTable(RefCell<Requests>);

impl RequestTable {
    /// Lists a request that is about to be queued, and returns its ID: the chosen one, or a new one.
    ///
    /// # Errors
    /// `Tid` when the chosen ID is 0, or that of a pending request.
    #[inline]
    pub(crate) fn begin(&self, chosen: Option<u64>) -> Result<u64, SendError> {
        let mut requests = self.0.borrow_mut();
        match chosen {
            Some(tid) if !requests.begin_as(tid) => Err(SendError::Tid(tid)),
            Some(tid) => Ok(tid),
            None => Ok(requests.begin()),
        }
    }

    /// Marks a request as queued, so that a reply can be delivered.
    #[inline]
    pub(crate) fn queued(&self, tid: u64) {
        self.0.borrow_mut().queued(tid);
    }

    /// Delivers a reply to its waiting request.  Returns the message if it may be something else; a reply that nothing
    /// waits for any more is dropped.
    #[inline]
    pub(crate) fn answer(&self, message: Message) -> Option<Message> {
        let answered = self.0.borrow_mut().answer(message.tid, message);
        match answered {
            Ok(waker) => waker.into_iter().for_each(Waker::wake),
            Err(message) if message.role == MessageRole::Reply => drop(message),
            Err(message) => return Some(message),
        }
        None
    }

    /// Takes the reply and ends the request, if the reply has arrived; otherwise registers the task.
    #[inline]
    pub(crate) fn poll(&self, tid: u64, cx: &Context<'_>) -> Poll<ReplyResult> {
        let mut requests = self.0.borrow_mut();
        if let Some(reply) = requests.take(tid) {
            return Poll::Ready(reply);
        }
        let before = requests.wait(tid, cx);
        drop(requests);
        drop(before);
        Poll::Pending
    }

    /// Ends a request, with or without a reply.
    #[inline]
    pub(crate) fn end(&self, tid: u64) {
        let remains = self.0.borrow_mut().end(tid);
        drop(remains);
    }

    /// Fails all requests that wait for a reply.
    pub(crate) fn fail(&self, error: &SendError) {
        let wakers = self.0.borrow_mut().fail(error);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Requests by transaction ID.
///
/// A transaction ID has the slot index in its lower half and a generation count in the upper one, so a late reply to an
/// abandoned request is not taken for that of the next request in the same slot.  IDs chosen by the caller are looked
/// up in a map.
#[derive(Default)]
struct Requests {
    slots: Slab<Request>,
    count: u32,
    /// Slots of the requests whose IDs were chosen by the caller.
    chosen: HashMap<u64, usize, BuildHasherDefault<TidHasher>>,
}

/// Hash for sequential numbers.  The keys are generated on this side, so no peer can provoke collisions.
#[derive(Default)]
struct TidHasher(u64);

impl Hasher for TidHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("tids are numbers")
    }

    fn write_u64(&mut self, tid: u64) {
        self.0 = tid.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32);
    }
}

impl Requests {
    /// Allocates the ID of a request that is about to be queued; never 0.
    #[inline]
    fn begin(&mut self) -> u64 {
        let place = self.slots.vacant_key() as u64;
        let tid = loop {
            self.count = self.count.checked_add(1).unwrap_or(1);
            let tid = u64::from(self.count) << 32 | place;
            if !self.chosen.contains_key(&tid) {
                break tid;
            }
        };
        self.slots.insert(Request { tid, state: RequestState::Fresh });
        tid
    }

    /// Registers a request under the caller's ID.  Returns false if the ID is 0, or that of a pending request.
    fn begin_as(&mut self, tid: u64) -> bool {
        if tid == 0 || self.get(tid).is_some() {
            return false;
        }
        let place = self.slots.insert(Request { tid, state: RequestState::Fresh });
        self.chosen.insert(tid, place);
        true
    }

    /// Returns the slot that a request with this ID has, if there is one.
    #[inline]
    fn place(&self, tid: u64) -> usize {
        let named = tid as u32 as usize;
        if self.chosen.is_empty() { named } else { self.chosen.get(&tid).copied().unwrap_or(named) }
    }

    #[inline]
    fn get(&mut self, tid: u64) -> Option<&mut Request> {
        let place = self.place(tid);
        self.slots.get_mut(place).filter(|request| request.tid == tid)
    }

    /// Marks a request as queued, so that a reply can be delivered.
    #[inline]
    fn queued(&mut self, tid: u64) {
        if let Some(request) = self.get(tid) {
            request.state = RequestState::Waiting(None);
        }
    }

    /// Delivers a reply to its request.  Returns the waker to wake, or the message as an error if nothing waits for it.
    // Boxing the error would charge every message for a rare case.
    #[allow(clippy::result_large_err)]
    #[inline]
    fn answer(&mut self, tid: u64, message: Message) -> Result<Option<Waker>, Message> {
        match self.get(tid) {
            Some(Request { state: state @ RequestState::Waiting(_), .. }) => {
                let RequestState::Waiting(waker) = state else { unreachable!("just seen") };
                let waker = waker.take();
                *state = RequestState::Done(Ok(message));
                Ok(waker)
            }
            _ => Err(message),
        }
    }

    /// Takes the reply and ends the request, if the reply has arrived.
    #[inline]
    fn take(&mut self, tid: u64) -> Option<ReplyResult> {
        let place = self.place(tid);
        let answered = |request: &Request| request.tid == tid && matches!(request.state, RequestState::Done(_));
        if !self.slots.get(place).is_some_and(answered) {
            return None;
        }
        if !self.chosen.is_empty() {
            self.chosen.remove(&tid);
        }
        match self.slots.remove(place).state {
            RequestState::Done(reply) => Some(reply),
            _ => unreachable!("just seen"),
        }
    }

    /// Registers a waker for the reply; a previous waker is returned for the caller to drop, since its drop may run
    /// arbitrary code.
    #[inline]
    fn wait(&mut self, tid: u64, cx: &Context<'_>) -> Option<Waker> {
        let request = self.get(tid).expect("a request is there until it has ended");
        match &mut request.state {
            RequestState::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => None,
            RequestState::Waiting(waker) => waker.replace(cx.waker().clone()),
            RequestState::Done(_) => unreachable!("waits for a reply that is there"),
            RequestState::Fresh => unreachable!("waits for the reply to what was not queued"),
        }
    }

    /// Ends a request, with or without a reply; the remains are returned for the caller to drop.
    #[inline]
    fn end(&mut self, tid: u64) -> impl Sized + use<> {
        self.get(tid)?;
        let place = self.place(tid);
        if !self.chosen.is_empty() {
            self.chosen.remove(&tid);
        }
        Some(self.slots.remove(place))
    }

    /// Fails all waiting requests, and returns the wakers to wake.
    fn fail(&mut self, error: &SendError) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for (_, request) in &mut self.slots {
            if matches!(request.state, RequestState::Waiting(_)) {
                let before = std::mem::replace(&mut request.state, RequestState::Done(Err(error.clone())));
                if let RequestState::Waiting(Some(waker)) = before {
                    wakers.push(waker);
                }
            }
        }
        wakers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(requests: &mut Requests, tid: u64) -> Poll<ReplyResult> {
        if let Some(reply) = requests.take(tid) {
            return Poll::Ready(reply);
        }
        drop(requests.wait(tid, &Context::from_waker(Waker::noop())));
        Poll::Pending
    }

    #[test]
    fn a_late_reply_is_not_the_next_ones() {
        let mut requests = Requests::default();
        let first = requests.begin();
        requests.queued(first);
        drop(requests.end(first));
        let second = requests.begin();
        requests.queued(second);
        assert_eq!(requests.place(first), requests.place(second), "the place is used again");
        assert!(requests.answer(first, Message::new(1)).is_err());
        assert!(poll(&mut requests, second).is_pending());
        assert!(matches!(requests.answer(second, Message::new(2)), Ok(Some(_))));
        assert!(requests.answer(second, Message::new(3)).is_err(), "it has its answer");
        let Poll::Ready(Ok(message)) = poll(&mut requests, second) else { panic!("it was answered") };
        assert_eq!(message.kind, 2);
    }

    #[test]
    fn the_callers_numbers_are_found_beside_ours() {
        let mut requests = Requests::default();
        let ours = requests.begin();
        requests.queued(ours);
        assert!(!requests.begin_as(0), "0 is no number");
        assert!(!requests.begin_as(ours), "it is in use");
        // Predicts the next ID that `begin` allocates.
        let next = (2 << 32) | 1;
        for tid in [7, 8, next] {
            assert!(requests.begin_as(tid) && !requests.begin_as(tid));
            requests.queued(tid);
        }
        let another = requests.begin();
        assert!(another != next && another != ours);
        for tid in [8, next, 7, ours] {
            assert!(requests.answer(tid, Message::new(tid as u16)).is_ok());
            let Poll::Ready(Ok(message)) = poll(&mut requests, tid) else { panic!("it was answered") };
            assert_eq!(message.kind, tid as u16);
            assert!(requests.get(tid).is_none(), "it has ended with its reply");
            assert!(requests.answer(tid, Message::new(1)).is_err(), "it has ended");
        }
        assert!(requests.begin_as(7), "it may be used again");
        assert_eq!((requests.slots.len(), requests.chosen.len()), (2, 1));
    }

    #[test]
    fn only_what_was_queued_fails() {
        let mut requests = Requests::default();
        let [fresh, waiting, done] = [(); 3].map(|()| requests.begin());
        requests.queued(waiting);
        requests.queued(done);
        assert!(requests.answer(done, Message::new(1)).is_ok());
        assert!(requests.fail(&SendError::Full).is_empty(), "nobody has looked yet");
        assert!(matches!(poll(&mut requests, waiting), Poll::Ready(Err(SendError::Full))));
        assert!(matches!(poll(&mut requests, done), Poll::Ready(Ok(_))));
        requests.queued(fresh);
        assert!(poll(&mut requests, fresh).is_pending());
    }

    #[test]
    fn strange_numbers_are_nobodys() {
        let mut requests = Requests::default();
        let tid = requests.begin();
        requests.queued(tid);
        for other in [0, 1, u64::MAX, tid + 1, tid ^ (1 << 63)] {
            assert!(requests.answer(other, Message::new(1)).is_err());
        }
    }
}
