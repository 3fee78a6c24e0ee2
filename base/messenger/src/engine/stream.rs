//! Open stream: receives frames, dispatches messages, sends queued ones.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_reactor::{BufList, BufMut, Instant, now, wall_clock};

use super::liveness::StreamLiveness;
use crate::connection::{Conn, DisconnectReason, Outgoing};
use crate::message::{Message, MessageRole};
use crate::session::state::ReceiveVerdict;
use crate::session::{MessengerHandshake, SessionViolation};
use crate::throttle::BudgetShare;
use crate::transport::Channel;
use crate::wire::control::{Ack, ControlPayload, Keepalive, KeepaliveAck, mode};
use crate::wire::{Encoder, Frame, FrameBuffer, FrameDecoder, FrameLayout, ParseProgress, Tag, entity};

/// Maximum number of frames processed in one turn, before other tasks run.
const TURN_FRAMES: u32 = 256;
/// Maximum number of bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Maximum number of buffers gathered for one send.
const SEND_PARTS: usize = 256;
/// Maximum number of queued keepalive acknowledgements.
const KEEPALIVE_ACKS_MAX: usize = 4;

/// Outcome of parsing the received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Intake {
    /// More bytes must be received.
    NeedInput,
    /// A message waits for receive budget.
    NoReceiveBudget,
    /// The frame budget of this turn is spent.
    BudgetSpent,
}

/// Open stream.
pub(super) struct OpenStream {
    conn: Rc<Conn>,
    epoch: u64,
    channel: Channel,
    decoder: FrameDecoder,
    encoder: Encoder,
    /// Bytes to send before all messages.
    control: BufList,
    keepalive_acks: Vec<KeepaliveAck>,
    ask_alive: bool,
    /// Set once an acknowledgement was deferred so that other tasks may queue a message that carries it.
    ack_waits: bool,
    /// Messages whose senders are being notified; empty in between.
    settled: Vec<Rc<Outgoing>>,
    /// Budget share of the message that is being received.
    held: Option<BudgetShare>,
    /// Time at the beginning of the turn.
    now: Instant,
    liveness: StreamLiveness,
}

impl OpenStream {
    /// Creates the transmission of a connection whose handshake is complete.
    pub(super) fn new(conn: Rc<Conn>, epoch: u64, channel: Channel, handshake: MessengerHandshake) -> Self {
        // RDMA writes by a device are not encrypted.  The handler may have closed the connection when it opened.
        let writes_by_device = handshake.mode() != mode::SECURE && conn.lifecycle.is_current(epoch);
        conn.windows.set_device(channel.rdma().filter(|_| writes_by_device));
        let (mut decoder, encoder, control) = handshake.into_parts();
        decoder.set_limits(conn.endpoint.options.limits);
        let now = now();
        Self {
            conn,
            epoch,
            channel,
            decoder,
            encoder,
            control,
            keepalive_acks: Vec::new(),
            ask_alive: false,
            ack_waits: false,
            settled: Vec::new(),
            held: None,
            now,
            liveness: StreamLiveness::new(now),
        }
    }

    /// Serves the stream until it ends, and returns the reason.
    pub(super) async fn run(mut self) -> DisconnectReason {
        let mut receiving = std::pin::pin!(None);
        let mut sending = std::pin::pin!(None);
        let channel = self.channel.clone();
        let receive = |want: FrameBuffer| channel.clone().recv(want.buf, want.all);
        let send = |batch: BufList| channel.clone().send(batch);
        std::future::poll_fn(|cx| match self.turn(cx, (&receive, receiving.as_mut()), (&send, sending.as_mut())) {
            Ok(()) => Poll::Pending,
            Err(reason) => Poll::Ready(reason),
        })
        .await
    }

    fn is_over(&self) -> bool {
        !self.conn.lifecycle.is_current(self.epoch)
    }

    fn turn<R, S>(
        &mut self,
        cx: &mut Context<'_>,
        (receive, mut receiving): (impl Fn(FrameBuffer) -> R, Pin<&mut Option<R>>),
        (send, mut sending): (impl Fn(BufList) -> S, Pin<&mut Option<S>>),
    ) -> Result<(), DisconnectReason>
    where
        R: Future<Output = (io::Result<usize>, BufMut)>,
        S: Future<Output = io::Result<()>>,
    {
        if self.is_over() {
            return Err(DisconnectReason::Replaced);
        }
        self.now = now();
        // Messages queued from here on are seen below.
        self.conn.send_queue.attend(cx.waker());
        self.ask_alive |= self.liveness.check(self.now, &self.conn.endpoint.options, cx)?;
        if self.conn.send_queue.session().queued() > 0 {
            // Queued messages are sent before more is received, which may take a while.
            self.pump(cx, &send, sending.as_mut())?;
        }
        let mut budget = TURN_FRAMES;
        loop {
            let mut again = false;
            if let Some(future) = receiving.as_mut().as_pin_mut()
                && let Poll::Ready((result, buf)) = future.poll(cx)
            {
                receiving.set(None);
                self.received(result, buf)?;
            }
            let intake = if receiving.is_some() { Intake::NeedInput } else { self.take_in(cx, &mut budget)? };
            self.conn.endpoint.core.dispatch();
            if self.is_over() {
                return Err(DisconnectReason::Replaced);
            }
            self.pump(cx, &send, sending.as_mut())?;
            if receiving.is_none() && intake == Intake::NeedInput {
                let want = self.decoder.want();
                receiving.set(Some(receive(want)));
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
        // While a send is in flight, its completion checks the queue again.
        if sending.is_none() {
            self.conn.send_queue.rest();
        }
        Ok(())
    }

    /// Sends queued messages until the send blocks or the queue is empty.
    fn pump<S: Future<Output = io::Result<()>>>(
        &mut self,
        cx: &mut Context<'_>,
        send: impl Fn(BufList) -> S,
        mut sending: Pin<&mut Option<S>>,
    ) -> Result<(), DisconnectReason> {
        loop {
            if sending.is_none() {
                let batch = self.gather(cx)?;
                if batch.is_empty() {
                    return Ok(());
                }
                sending.set(Some(send(batch)));
            }
            let Some(future) = sending.as_mut().as_pin_mut() else { return Ok(()) };
            let Poll::Ready(result) = future.poll(cx) else { return Ok(()) };
            sending.set(None);
            result?;
        }
    }

    fn received(&mut self, result: io::Result<usize>, buf: BufMut) -> Result<(), DisconnectReason> {
        match result {
            Ok(0) if self.liveness.is_in_frame() => Err(DisconnectReason::PeerBroke),
            Ok(0) => Err(DisconnectReason::PeerClosed),
            Ok(got) => {
                self.decoder.received(buf, got);
                self.liveness.received(self.now);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(DisconnectReason::PeerBroke),
            Err(error) => Err(error.into()),
        }
    }

    /// Parses frames from the received bytes, as far as budgets allow.
    fn take_in(&mut self, cx: &Context<'_>, budget: &mut u32) -> Result<Intake, DisconnectReason> {
        self.liveness.resume(self.now);
        loop {
            if *budget == 0 {
                return Ok(Intake::BudgetSpent);
            }
            let (held, throttle) = (&mut self.held, &self.conn.receive_budget);
            let admit = |layout: &FrameLayout| {
                // A share may be left over from a message that its sender aborted.
                *held = None;
                *held = throttle.take(layout.payload_len());
                held.is_some()
            };
            match self.decoder.next(admit, |_| {}).map_err(SessionViolation::from)? {
                ParseProgress::Frame(frame) => {
                    *budget -= 1;
                    self.liveness.frame_ended();
                    match frame.tag {
                        Tag::Message => self.message(frame)?,
                        _ => self.control(&frame)?,
                    }
                }
                ParseProgress::NeedInput => {
                    if self.decoder.is_between_frames() {
                        self.liveness.frame_ended();
                    } else {
                        self.liveness.frame_begun(self.now);
                    }
                    return Ok(Intake::NeedInput);
                }
                ParseProgress::NotAdmitted => {
                    self.liveness.pause();
                    self.conn.receive_budget.wait(cx.waker());
                    return Ok(Intake::NoReceiveBudget);
                }
            }
        }
    }

    fn control(&mut self, frame: &Frame) -> Result<(), DisconnectReason> {
        match frame.tag {
            Tag::Ack => self.acknowledged(Ack::decode(frame.payload()).map_err(SessionViolation::from)?.seq)?,
            Tag::Keepalive2 => {
                let Keepalive { seconds, nanos } =
                    Keepalive::decode(frame.payload()).map_err(SessionViolation::from)?;
                // If keepalives arrive faster than they can be acknowledged, only the latest are.
                if self.keepalive_acks.len() >= KEEPALIVE_ACKS_MAX {
                    self.keepalive_acks.remove(0);
                }
                self.keepalive_acks.push(KeepaliveAck { seconds, nanos });
            }
            // Any reception proves that the peer is alive; the content does not matter.
            Tag::Keepalive2Ack => {
                KeepaliveAck::decode(frame.payload()).map_err(SessionViolation::from)?;
            }
            tag => return Err(SessionViolation::Unexpected { tag, state: "exchanging messages" }.into()),
        }
        Ok(())
    }

    #[inline]
    fn message(&mut self, frame: Frame) -> Result<(), DisconnectReason> {
        let header = frame.header().map_err(SessionViolation::from)?;
        let held = self.held.take().expect("a message was admitted");
        if header.ack_seq > 0 {
            self.acknowledged(header.ack_seq)?;
        }
        let verdict = self.conn.send_queue.session_mut().received(header.seq)?;
        if verdict == ReceiveVerdict::Duplicate {
            return Ok(());
        }
        let message = Message::received(&header, frame.segments, held);
        // Ceph's daemons do not mark replies; a pending tid identifies one.
        let reply = message.role == MessageRole::Reply || self.conn.identity.entity() != entity::FOREBAY;
        let message = if reply && message.tid != 0 { self.conn.requests.answer(message) } else { Some(message) };
        if let Some(message) = message {
            self.conn.endpoint.core.enqueue(self.conn.clone(), message);
        }
        Ok(())
    }

    fn acknowledged(&mut self, seq: u64) -> Result<(), DisconnectReason> {
        Ok(self.conn.send_queue.acknowledged(seq, &mut self.settled)?)
    }

    /// Gathers the bytes to send now.
    fn gather(&mut self, cx: &Context<'_>) -> Result<BufList, DisconnectReason> {
        let mut batch = std::mem::take(&mut self.control);
        for ack in self.keepalive_acks.drain(..) {
            self.encoder.control(Tag::Keepalive2Ack, &ack.encode(), &mut batch).map_err(SessionViolation::from)?;
        }
        if std::mem::take(&mut self.ask_alive) {
            let time = wall_clock();
            let ask = Keepalive { seconds: time.as_secs() as u32, nanos: time.subsec_nanos() };
            self.encoder.control(Tag::Keepalive2, &ask.encode(), &mut batch).map_err(SessionViolation::from)?;
        }
        let mut session = self.conn.send_queue.session_mut();
        let handed_over = &mut self.settled;
        if batch.is_empty() && session.queued() > 1 {
            batch = BufList::with_room((2 * session.queued()).min(SEND_PARTS));
        }
        while batch.len() < SEND_BYTES && batch.parts().len() < SEND_PARTS {
            let Some((seq, outgoing)) = session.pop() else { break };
            let message = outgoing.message();
            let header = message.header(seq, session.tell());
            let segments = [&message.front, &message.middle, &message.data];
            self.encoder.append(&header, segments, &mut batch).map_err(SessionViolation::from)?;
            if session.is_lossy() {
                handed_over.push(outgoing);
            }
        }
        self.encoder.flush(&mut batch);
        if session.owes_ack() {
            // A notified requester may send again, and a handler may have left its reply to a task: such a message
            // carries the acknowledgement.
            if batch.is_empty() && !std::mem::replace(&mut self.ack_waits, true) {
                cx.waker().wake_by_ref();
                return Ok(batch);
            }
            let ack = Ack { seq: session.tell() };
            self.encoder.control(Tag::Ack, &ack.encode(), &mut batch).map_err(SessionViolation::from)?;
        }
        self.ack_waits = false;
        drop(session);
        handed_over.drain(..).for_each(|outgoing| outgoing.settle(Ok(())));
        Ok(batch)
    }
}
