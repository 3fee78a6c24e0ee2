use std::io;
use std::pin::pin;
use std::task::{Context, Poll};

use forebay_reactor::{BufList, BufMut, Stream};

use crate::ReceiveRequest;

/// Result of parsing the received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intake {
    /// More bytes must be received.
    NeedInput,
    /// Limits of the connection are reached; parsing is retried when something was sent.
    Full,
    /// Request budget of the turn is spent; other tasks run, and then parsing continues.
    BudgetSpent,
    /// Blocked until another event, which wakes the task.
    Busy,
}

/// Handler of a connection, driven by [`exchange`].
pub trait ConnectionHandler {
    /// Result of the connection.
    type End;

    /// Maximum requests started in one turn; then other connections run.
    const TURN: u32;

    /// Begins a turn: registers the task for wake-ups, and replies to requests completed meanwhile.
    fn begin_turn(&mut self, cx: &mut Context<'_>);

    /// Returns the buffer to receive into.
    fn want(&mut self) -> ReceiveRequest;

    /// Takes back the buffer with the received bytes; none when the stream has ended.
    fn received(&mut self, result: io::Result<usize>, buf: BufMut);

    /// Starts requests that have arrived, within the limits and the turn's budget.
    fn take_in(&mut self, budget: &mut u32) -> Intake;

    /// Returns the next batch to send.
    fn next_batch(&mut self) -> Option<BufList>;

    /// Handles the result of sending a batch.
    fn sent(&mut self, result: io::Result<()>);

    /// Returns whether the connection still receives.
    fn is_open(&self) -> bool;

    /// Ends a turn.  Ready when no work is left, or the time for it is over.
    fn end_turn(&mut self, cx: &mut Context<'_>) -> Poll<Self::End>;
}

/// Receives and sends concurrently, in turns, until the connection ends: at most one receive and one send are in
/// flight, and neither waits for the other.
pub async fn exchange<T, R, S>(
    handler: &mut T,
    receive: impl Fn(ReceiveRequest) -> R,
    send: impl Fn(BufList) -> S,
) -> T::End
where
    T: ConnectionHandler,
    R: Future<Output = (io::Result<usize>, BufMut)>,
    S: Future<Output = io::Result<()>>,
{
    let mut receiving = pin!(None);
    let mut sending = pin!(None);
    std::future::poll_fn(|cx| {
        handler.begin_turn(cx);
        let mut budget = T::TURN;
        loop {
            let mut again = false;
            if let Some(future) = receiving.as_mut().as_pin_mut()
                && let Poll::Ready((result, buf)) = R::poll(future, cx)
            {
                receiving.set(None);
                handler.received(result, buf);
            }
            let intake = if receiving.is_some() { Intake::NeedInput } else { handler.take_in(&mut budget) };
            loop {
                if sending.is_none()
                    && let Some(batch) = handler.next_batch()
                {
                    sending.set(Some(send(batch)));
                }
                let Some(future) = sending.as_mut().as_pin_mut() else { break };
                let Poll::Ready(result) = S::poll(future, cx) else { break };
                sending.set(None);
                handler.sent(result);
                // Sending may have freed space, and nothing else would trigger another parse.
                again |= intake == Intake::Full;
            }
            if receiving.is_none() && intake == Intake::NeedInput && handler.is_open() {
                receiving.set(Some(receive(handler.want())));
                again = true;
            }
            if intake == Intake::BudgetSpent {
                cx.waker().wake_by_ref();
                break;
            }
            if !again {
                break;
            }
        }
        if !handler.is_open() {
            // Further received bytes are discarded.
            receiving.set(None);
        }
        handler.end_turn(cx)
    })
    .await
}

/// Receives into the requested buffer from a socket.
pub async fn receive(stream: Stream, want: ReceiveRequest) -> (io::Result<usize>, BufMut) {
    if want.all {
        let len = want.buf.spare();
        let (result, buf) = stream.recv_exact(want.buf).await;
        return (result.map(|()| len), buf);
    }
    stream.recv(want.buf).await
}

/// Sends a whole batch through a socket.
pub async fn send(stream: Stream, batch: BufList) -> io::Result<()> {
    stream.send(batch).await
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::VecDeque;
    use std::task::Waker;

    use forebay_reactor::Buf;

    use super::*;

    /// Echoes every byte, two at a time; keeps at most four that are not sent.
    #[derive(Default)]
    struct Echo {
        arrived: VecDeque<u8>,
        replies: Vec<u8>,
        sending: usize,
        ended: Option<&'static str>,
    }

    impl ConnectionHandler for Echo {
        type End = &'static str;

        const TURN: u32 = 3;

        fn begin_turn(&mut self, _: &mut Context<'_>) {}

        fn want(&mut self) -> ReceiveRequest {
            ReceiveRequest { buf: BufMut::with_capacity(16), all: false }
        }

        fn received(&mut self, result: io::Result<usize>, buf: BufMut) {
            self.arrived.extend(&buf[..]);
            if result.unwrap() == 0 {
                self.ended = Some("closed");
            }
        }

        fn take_in(&mut self, budget: &mut u32) -> Intake {
            loop {
                if self.replies.len() + self.sending >= 4 {
                    return Intake::Full;
                }
                if *budget == 0 {
                    return Intake::BudgetSpent;
                }
                let Some(byte) = self.arrived.pop_front() else { return Intake::NeedInput };
                *budget -= 1;
                self.replies.push(byte);
            }
        }

        fn next_batch(&mut self) -> Option<BufList> {
            let batch: Vec<_> = self.replies.drain(..self.replies.len().min(2)).collect();
            self.sending = batch.len();
            (!batch.is_empty()).then(|| Buf::copy_of(&batch).into())
        }

        fn sent(&mut self, result: io::Result<()>) {
            self.sending = 0;
            if result.is_err() {
                self.replies.clear();
                self.arrived.clear();
                self.ended = Some("send failed");
            }
        }

        fn is_open(&self) -> bool {
            self.ended.is_none()
        }

        fn end_turn(&mut self, _: &mut Context<'_>) -> Poll<&'static str> {
            match self.ended {
                Some(end) if self.sending == 0 && self.replies.is_empty() => Poll::Ready(end),
                _ => Poll::Pending,
            }
        }
    }

    /// Peer: the bytes that it sends, and how much it reads.
    #[derive(Default)]
    struct Peer {
        sends: RefCell<VecDeque<Vec<u8>>>,
        /// Number of sends that it lets through.
        reads: Cell<usize>,
        gone: Cell<bool>,
        got: RefCell<Vec<u8>>,
    }

    impl Peer {
        async fn receive(&self) -> (io::Result<usize>, BufMut) {
            let next = std::future::poll_fn(|_| match self.sends.borrow_mut().pop_front() {
                Some(next) => Poll::Ready(next),
                None => Poll::Pending,
            });
            let bytes = next.await;
            (Ok(bytes.len()), BufMut::copy_of(&bytes))
        }

        async fn send(&self, batch: BufList) -> io::Result<()> {
            std::future::poll_fn(|_| match self.reads.get() {
                _ if self.gone.get() => Poll::Ready(()),
                0 => Poll::Pending,
                left => {
                    self.reads.set(left - 1);
                    Poll::Ready(())
                }
            })
            .await;
            if self.gone.get() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            self.got.borrow_mut().extend(batch.to_vec());
            Ok(())
        }
    }

    fn turns(peer: &Peer, wanted: u32, play: impl Fn(u32)) -> Option<&'static str> {
        let mut echo = Echo::default();
        let mut running = pin!(exchange(&mut echo, |_| peer.receive(), |batch| peer.send(batch)));
        for turn in 0..wanted {
            play(turn);
            if let Poll::Ready(end) = running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return Some(end);
            }
        }
        None
    }

    #[test]
    fn it_receives_while_a_send_waits() {
        let peer = Peer::default();
        // The peer reads none of the replies; the echo takes up to its limit, and no more.
        let end = turns(&peer, 10, |turn| {
            if turn < 4 {
                peer.sends.borrow_mut().push_back(vec![turn as u8]);
            }
        });
        assert_eq!((end, peer.sends.borrow().len()), (None, 0));
        let end = turns(&peer, 10, |turn| peer.sends.borrow_mut().push_back(vec![turn as u8]));
        assert_eq!((end, peer.sends.borrow().len()), (None, 6));
    }

    #[test]
    fn what_was_full_goes_on_when_something_is_sent() {
        let peer = Peer::default();
        peer.sends.borrow_mut().extend([(0..9).collect::<Vec<u8>>(), vec![]]);
        let end = turns(&peer, 20, |turn| peer.reads.set(usize::from(turn > 3)));
        assert_eq!(end, Some("closed"));
        // Bytes that had arrived before the stream ended, up to the limit, were echoed in order.
        let got = peer.got.borrow();
        assert!(got.len() >= 8 && got.iter().copied().eq(0..got.len() as u8), "{got:?}");
    }

    #[test]
    fn who_reads_no_more_ends_it() {
        let peer = Peer::default();
        peer.sends.borrow_mut().push_back(vec![1, 2, 3]);
        assert_eq!(turns(&peer, 5, |turn| peer.gone.set(turn == 2)), Some("send failed"));
        assert!(peer.got.borrow().is_empty());
    }
}
