//! Requests that wait for their replies, found by the number in the message's header without a search.

use std::task::{Context, Poll, Waker};

use slab::Slab;

use crate::connection::SendError;
use crate::message::Message;

type Reply = Result<Message, SendError>;

enum State {
    /// It was not queued yet: what becomes of the connection is told to who queues it.
    Fresh,
    /// Nobody has looked for the reply yet, or this one is to be woken.
    Waiting(Option<Waker>),
    Done(Reply),
}

struct Request {
    tid: u64,
    state: State,
}

/// Those of one connection.
///
/// A request's number has its place in the lower half and a count in the upper one, so that a reply that comes after its
/// request was given up is not taken for that of the next one in its place.
#[derive(Default)]
pub(crate) struct Requests {
    slots: Slab<Request>,
    count: u32,
}

/// The place that a number names.
fn place(tid: u64) -> usize {
    tid as u32 as usize
}

impl Requests {
    /// A number for a request that is about to be queued; never 0.
    pub(crate) fn begin(&mut self) -> u64 {
        self.count = self.count.checked_add(1).unwrap_or(1);
        let slot = self.slots.vacant_entry();
        let tid = u64::from(self.count) << 32 | slot.key() as u64;
        slot.insert(Request { tid, state: State::Fresh });
        tid
    }

    fn get(&mut self, tid: u64) -> Option<&mut Request> {
        self.slots.get_mut(place(tid)).filter(|request| request.tid == tid)
    }

    /// The request was queued, and waits from here on.
    pub(crate) fn queued(&mut self, tid: u64) {
        if let Some(request) = self.get(tid) {
            request.state = State::Waiting(None);
        }
    }

    /// Gives a reply to its request: who is to be woken, or the reply back when nobody waits for it.
    // Boxing it would cost every message what only strange ones need.
    #[allow(clippy::result_large_err)]
    pub(crate) fn answer(&mut self, tid: u64, message: Message) -> Result<Option<Waker>, Message> {
        match self.get(tid) {
            Some(Request { state: state @ State::Waiting(_), .. }) => {
                match std::mem::replace(state, State::Done(Ok(message))) {
                    State::Waiting(waker) => Ok(waker),
                    _ => unreachable!("it was waiting"),
                }
            }
            _ => Err(message),
        }
    }

    /// Looks for the reply; a waker that was there before is for the caller to drop, for it may do anything then.
    pub(crate) fn poll(&mut self, tid: u64, cx: &Context<'_>) -> (Poll<Reply>, Option<Waker>) {
        let request = self.get(tid).expect("a request is there until it has ended");
        match &mut request.state {
            State::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => (Poll::Pending, None),
            State::Waiting(waker) => (Poll::Pending, waker.replace(cx.waker().clone())),
            State::Done(_) => match std::mem::replace(&mut request.state, State::Fresh) {
                State::Done(reply) => (Poll::Ready(reply), None),
                _ => unreachable!("it was done"),
            },
            State::Fresh => unreachable!("looked for the reply to what was not queued"),
        }
    }

    /// Ends a request, answered or not; what is left of it is for the caller to drop.
    pub(crate) fn end(&mut self, tid: u64) -> impl Sized + use<> {
        self.get(tid)?;
        Some(self.slots.remove(place(tid)))
    }

    /// All that wait have failed; returns who is to be woken.
    pub(crate) fn fail(&mut self, error: &SendError) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for (_, request) in &mut self.slots {
            if matches!(request.state, State::Waiting(_)) {
                let before = std::mem::replace(&mut request.state, State::Done(Err(error.clone())));
                if let State::Waiting(Some(waker)) = before {
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

    fn poll(requests: &mut Requests, tid: u64) -> Poll<Reply> {
        requests.poll(tid, &Context::from_waker(Waker::noop())).0
    }

    #[test]
    fn a_late_reply_is_not_the_next_ones() {
        let mut requests = Requests::default();
        let first = requests.begin();
        requests.queued(first);
        drop(requests.end(first));
        let second = requests.begin();
        requests.queued(second);
        assert_eq!(place(first), place(second), "the place is used again");
        assert!(requests.answer(first, Message::new(1)).is_err());
        assert!(poll(&mut requests, second).is_pending());
        assert!(matches!(requests.answer(second, Message::new(2)), Ok(Some(_))));
        assert!(requests.answer(second, Message::new(3)).is_err(), "it has its answer");
        let Poll::Ready(Ok(message)) = poll(&mut requests, second) else { panic!("it was answered") };
        assert_eq!(message.kind, 2);
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
