//! Requests: messages that wait for their replies.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::{Conn, SendError};
use crate::message::Message;

/// Request future, written by hand because each layer of `async` moves the message.
pub(super) struct ReplyFuture<'a> {
    conn: &'a Rc<Conn>,
    /// Transaction ID chosen by the caller.
    chosen: Option<u64>,
    /// Transaction ID of the listed request; 0 while it is not listed.
    tid: u64,
    step: Step<'a>,
}

enum Step<'a> {
    New(Message),
    /// Waiting for send budget.
    Queueing(Pin<Box<dyn Future<Output = Result<(), SendError>> + 'a>>),
    Sent,
}

impl<'a> ReplyFuture<'a> {
    /// Creates a request, under the caller's transaction ID or one of the connection's.
    #[inline]
    pub(super) fn new(conn: &'a Rc<Conn>, chosen: Option<u64>, message: Message) -> Self {
        Self { conn, chosen, tid: 0, step: Step::New(message) }
    }
}

impl Future for ReplyFuture<'_> {
    type Output = Result<Message, SendError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Step::New(_) = this.step {
            this.tid = this.conn.requests.begin(this.chosen)?;
            let Step::New(message) = &mut this.step else { unreachable!("just seen") };
            message.tid = this.tid;
            // Senders that wait for budget come first.
            if !this.conn.send_queue.has_waiting_senders() && this.conn.offer(message, &mut None)? {
                this.conn.requests.queued(this.tid);
                this.step = Step::Sent;
            } else {
                this.step = Step::Queueing(Box::pin(this.conn.queue(std::mem::take(message), None)));
            }
        }
        if let Step::Queueing(queueing) = &mut this.step {
            std::task::ready!(queueing.as_mut().poll(cx))?;
            // No reply can have arrived in between: the receiving task has not run yet.
            this.conn.requests.queued(this.tid);
            this.step = Step::Sent;
        }
        let reply = std::task::ready!(this.conn.requests.poll(this.tid, cx));
        this.tid = 0;
        Poll::Ready(reply)
    }
}

impl Drop for ReplyFuture<'_> {
    /// Removes the request from the list: its reply is no longer awaited.
    fn drop(&mut self) {
        if self.tid != 0 {
            self.conn.requests.end(self.tid);
        }
    }
}
