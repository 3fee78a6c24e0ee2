//! Send queue of a connection: the session's messages, their budget, and the wake-ups of the task that sends them.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;
use std::task::Waker;

use forebay_reactor::sync::{Permit, Semaphore, oneshot};

use super::{DisconnectReason, SendError};
use crate::message::Message;
use crate::session::{MessengerSession, SessionViolation};
use crate::throttle::{BudgetShare, MessageBudget, MessageThrottle};

/// Receiver of a message's outcome.
pub(crate) type Done = oneshot::Sender<Result<(), SendError>>;

/// Outgoing message.
pub(crate) struct Outgoing {
    message: Message,
    /// Completed once the peer's messenger has the message (in a lossy session: once the transport has it), or when it
    /// fails.
    done: RefCell<Option<Done>>,
    /// Share of the send budget.
    _held: BudgetShare,
}

impl Outgoing {
    #[inline]
    pub(crate) fn message(&self) -> &Message {
        &self.message
    }

    /// Notifies the sender, once.
    #[inline]
    pub(crate) fn settle(&self, result: Result<(), SendError>) {
        if let Some(done) = self.done.borrow_mut().take() {
            done.send(result);
        }
    }
}

/// Messages to the peer across all streams, and the task of the current one.
///
/// Invariants:
/// 1. Each message that is queued or not acknowledged holds its share of the send budget.
/// 2. Senders that wait for budget are served in order, so a short message does not overtake a long one.
/// 3. No message waits unnoticed: it wakes the stream's task, unless that will check the queue without being woken.
/// 4. Senders are notified while the session is not borrowed, because they may queue the next message.
pub(crate) struct SendQueue {
    session: RefCell<MessengerSession<Rc<Outgoing>>>,
    budget: Rc<MessageThrottle>,
    /// FIFO of the senders that wait for budget.
    turn: Semaphore,
    /// Task of the current stream.
    task: RefCell<Option<Waker>>,
    /// Set while the task will check the queue without being woken.
    attentive: Cell<bool>,
}

impl SendQueue {
    pub(super) fn new(session: MessengerSession<Rc<Outgoing>>, budget: MessageBudget) -> Self {
        Self {
            session: RefCell::new(session),
            budget: MessageThrottle::new(budget, None),
            turn: Semaphore::new(1),
            task: RefCell::default(),
            attentive: Cell::new(false),
        }
    }

    /// Returns the session, for reading.
    #[inline]
    pub(crate) fn session(&self) -> Ref<'_, MessengerSession<Rc<Outgoing>>> {
        self.session.borrow()
    }

    /// Returns the session.  It must be released before a message is settled or dropped.
    #[inline]
    pub(crate) fn session_mut(&self) -> RefMut<'_, MessengerSession<Rc<Outgoing>>> {
        self.session.borrow_mut()
    }

    /// Returns the send budget: its users are the messages that wait to be sent or acknowledged.
    pub(super) fn budget(&self) -> &MessageThrottle {
        &self.budget
    }

    /// Returns true if senders wait for budget; they come before any other.
    #[inline]
    pub(super) fn has_waiting_senders(&self) -> bool {
        self.turn.available() == 0
    }

    /// Waits for the turn of a sender that may have to wait for budget.
    pub(super) fn turn(&self) -> impl Future<Output = Permit> + use<'_> {
        self.turn.acquire(1)
    }

    /// Queues a message.  Returns `false` and leaves the message in place if the budget is exhausted.
    #[inline]
    pub(super) fn push(&self, message: &mut Message, done: &mut Option<Done>) -> bool {
        let Some(held) = self.budget.take(message.len()) else { return false };
        let priority = message.priority;
        let (message, done) = (std::mem::take(message), RefCell::new(done.take()));
        let mut session = self.session.borrow_mut();
        session.push(priority, Rc::new(Outgoing { message, done, _held: held }));
        debug_assert!(
            session.queued() + session.unacknowledged() <= self.budget.used().messages,
            "a message without a share of the send budget"
        );
        drop(session);
        self.wake();
        true
    }

    /// Processes an acknowledgement of everything up to `seq`, and notifies the senders.  `settled` is an empty list
    /// whose memory is used.
    ///
    /// # Errors
    /// When `seq` exceeds the highest number sent.
    #[inline]
    pub(crate) fn acknowledged(&self, seq: u64, settled: &mut Vec<Rc<Outgoing>>) -> Result<(), SessionViolation> {
        debug_assert!(settled.is_empty());
        let mut session = self.session.borrow_mut();
        if session.is_lossy() {
            return Ok(());
        }
        let result = session.acknowledged(seq, |outgoing| settled.push(outgoing));
        drop(session);
        settled.drain(..).for_each(|outgoing| outgoing.settle(Ok(())));
        result
    }

    /// Resumes the session on a new stream; the peer has received everything up to `seq`, and those senders are
    /// notified.
    ///
    /// # Errors
    /// When the two sides disagree on what was sent and acknowledged.
    pub(crate) fn resumed(&self, seq: u64) -> Result<(), SessionViolation> {
        let mut settled = Vec::new();
        let result = self.session.borrow_mut().resumed(seq, |outgoing| settled.push(outgoing));
        settled.into_iter().for_each(|outgoing| outgoing.settle(Ok(())));
        result
    }

    /// Fails all messages.
    pub(super) fn fail(&self, reason: &DisconnectReason) {
        let failed = self.session.borrow_mut().reset(true);
        for outgoing in failed {
            outgoing.settle(Err(SendError::Ended(reason.clone())));
        }
    }

    /// Handles the loss of the stream: unacknowledged messages will be sent again.
    pub(super) fn stream_lost(&self) {
        self.session.borrow_mut().lost();
    }

    /// Registers the task of the stream, which from here on checks the queue without being woken.
    pub(crate) fn attend(&self, waker: &Waker) {
        let mut task = self.task.borrow_mut();
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
        drop(task);
        self.attentive.set(true);
    }

    /// Ends the task's attention: the next message wakes it.
    pub(crate) fn rest(&self) {
        self.attentive.set(false);
    }

    #[inline]
    fn wake(&self) {
        if !self.attentive.replace(true)
            && let Some(task) = &*self.task.borrow()
        {
            task.wake_by_ref();
        }
    }

    /// Wakes the task even if it is attentive, since its stream is over.
    pub(super) fn wake_replaced(&self) {
        self.attentive.set(false);
        self.wake();
    }
}
