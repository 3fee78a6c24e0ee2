//! TLS beneath a connection: what is received is opened, and what is sent is sealed, before and after anybody else sees it.

use std::cell::RefCell;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::{Stream, timeout};
use forebay_serve::Want;
use forebay_tls::{Acceptor, Failure, Keys, Psk, Read, Session, Suite, sealed_len};

use super::connection::{Connection, End, LINGER};
use crate::session::{Fatal, Pools, psk};
use crate::target::{Refused, Target};
use crate::wire::Status;
use crate::wire::fabrics::{Connect, DISCOVERY_NQN, connect_field};
use crate::wire::pdu::{Fes, kind};

/// Plain bytes that are sealed at once.
const RECORD: usize = 16 << 10;
/// How long the record with which a session ends may take to be sent.
const CLOSING: Duration = Duration::from_millis(100);
/// Receives with little in them after which the buffer for them is small again.
const QUIET_RECEIVES: u32 = 32;
/// What is little.
const QUIET_BYTES: usize = 2 << 10;
/// What the connections of a core share for TLS.
#[derive(Debug)]
pub(super) struct Shared {
    acceptor: Acceptor,
    /// Where parts of one record are put together.
    record: Rc<RefCell<Vec<u8>>>,
}

/// Keys are looked up as they are at that time.
struct Ring(Target);

impl Keys for Ring {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        self.0.tls_keys().find(identity)
    }
}

impl Shared {
    pub(super) fn new(target: &Target) -> Result<Self, Failure> {
        let acceptor = Acceptor::new(std::sync::Arc::new(Ring(target.clone())))?;
        Ok(Self { acceptor, record: Rc::new(RefCell::new(Vec::with_capacity(RECORD))) })
    }
}

/// What was received and not opened yet.
struct Input {
    /// `None` while it is being received into.
    buf: Option<BufMut>,
    /// More comes at once than a small one holds.
    large: bool,
    quiet: u32,
}

/// The session of a connection.
pub(super) struct Channel {
    stream: Stream,
    session: RefCell<Session>,
    input: RefCell<Input>,
    pools: Rc<Pools>,
    record: Rc<RefCell<Vec<u8>>>,
    pub(super) suite: Suite,
    host: String,
    subsystem: String,
}

fn broken(failure: &Failure) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {failure}"))
}

impl Channel {
    /// Opens what has been received, as far as `buf` has room.
    fn open(&self, buf: &mut BufMut) -> io::Result<Read> {
        let mut input = self.input.borrow_mut();
        let Some(received) = &mut input.buf else { return Ok(Read::Hungry) };
        let mut left = &received[..];
        let read = self.session.borrow_mut().read(&mut left, buf.spare_mut()).map_err(|failure| broken(&failure))?;
        let taken = received.len() - left.len();
        received.advance(taken);
        if let Read::Data(len) = read {
            buf.set_len(buf.len() + len);
        }
        Ok(read)
    }

    /// Receives more; false at the end of the stream.
    async fn fill(&self) -> io::Result<bool> {
        let buf = {
            let mut input = self.input.borrow_mut();
            let buf = input.buf.take().map(|mut buf| {
                buf.clear();
                buf.reclaim();
                buf
            });
            buf.filter(|buf| buf.spare() == self.pools.sealed_size(input.large))
                .unwrap_or_else(|| self.pools.sealed(input.large))
        };
        let (got, buf) = self.stream.recv(buf).await;
        let mut input = self.input.borrow_mut();
        if buf.spare() == 0 {
            (input.large, input.quiet) = (true, 0);
        } else if input.large {
            input.quiet = if buf.len() < QUIET_BYTES { input.quiet + 1 } else { 0 };
            input.large = input.quiet < QUIET_RECEIVES;
        }
        input.buf = Some(buf);
        Ok(got? > 0)
    }

    /// Seals what is to be sent.
    fn seal(&self, batch: &BufList) -> io::Result<BufList> {
        let mut session = self.session.borrow_mut();
        let mut record = self.record.borrow_mut();
        record.clear();
        let (mut out, mut left) = (BufList::new(), batch.len());
        let mut room = BufMut::with_capacity(0);
        let mut put = |plain: &[u8]| {
            if room.spare() < sealed_len(plain.len()) {
                let next = self.pools.sealing(sealed_len(left));
                out.push(std::mem::replace(&mut room, next).freeze());
            }
            left -= plain.len();
            let len = session.write(plain, room.spare_mut()).map_err(|failure| broken(&failure))?;
            room.set_len(room.len() + len);
            Ok::<(), io::Error>(())
        };
        for part in batch.parts() {
            let mut part = &part[..];
            while !part.is_empty() {
                // Long data goes straight into records of its own; the rest is put together.
                if record.is_empty() && part.len() >= RECORD {
                    put(&part[..RECORD])?;
                    part = &part[RECORD..];
                    continue;
                }
                let (now, rest) = part.split_at(part.len().min(RECORD - record.len()));
                record.extend_from_slice(now);
                part = rest;
                if record.len() == RECORD {
                    put(&record)?;
                    record.clear();
                }
            }
        }
        if !record.is_empty() {
            put(&record)?;
            // It held what hosts read and write.
            record.clear();
        }
        out.push(room.freeze());
        Ok(out)
    }

    /// Tells the host that nothing follows.  Nothing else may be under way.
    pub(super) async fn close(&self) {
        let closing = self.session.borrow_mut().close();
        // Who does not read it has to do without.
        let _ = timeout(CLOSING, self.stream.send(Buf::copy_of(&closing))).await;
    }
}

/// Receives through a session, as a stream would.
pub(super) async fn receive(channel: Rc<Channel>, want: Want) -> (io::Result<usize>, BufMut) {
    let Want { mut buf, all } = want;
    let before = buf.len();
    loop {
        match channel.open(&mut buf) {
            Ok(Read::Data(_)) if all && buf.spare() > 0 => {}
            Ok(Read::Data(_)) => return (Ok(buf.len() - before), buf),
            Ok(Read::Closed) if buf.len() == before => return (Ok(0), buf),
            Ok(Read::Closed) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
            Ok(Read::Hungry) => match channel.fill().await {
                Ok(true) => {}
                // Hosts close without a word when they go; what they have sent has its length within.
                Ok(false) if buf.len() == before => return (Ok(0), buf),
                Ok(false) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Err(error) => return (Err(error), buf),
            },
            Err(error) => return (Err(error), buf),
        }
    }
}

/// Sends through a session, as a stream would.
pub(super) async fn send(channel: Rc<Channel>, batch: BufList) -> io::Result<()> {
    let sealed = channel.seal(&batch)?;
    drop(batch);
    channel.stream.send(sealed).await
}

/// How a handshake came to nothing.
enum Broken {
    Refused(Failure),
    Stream(io::Error),
}

/// Has a session agreed on; what is left of what was received is data.
async fn shake(stream: &Stream, session: &mut Session, mut buf: BufMut) -> Result<BufMut, Broken> {
    let mut output = Vec::new();
    loop {
        let (got, received) = stream.recv(buf).await;
        buf = received;
        if got.map_err(Broken::Stream)? == 0 {
            return Err(Broken::Stream(io::ErrorKind::UnexpectedEof.into()));
        }
        let mut input = &buf[..];
        let result = session.handshake(&mut input, &mut output);
        let taken = buf.len() - input.len();
        if matches!(result, Err(Failure::Plain)) && buf[0] == kind::IC_REQ {
            // Who speaks NVMe/TCP is answered in it.
            let head = &buf[..buf.len().min(8)];
            output = Fatal::new(Fes::Unsupported, 0, head, "TLS is required").encode();
        }
        if !output.is_empty() {
            let sent = stream.send(Buf::copy_of(&output)).await;
            output.clear();
            sent.map_err(Broken::Stream)?;
        }
        buf.advance(taken);
        match result {
            Ok(true) => return Ok(buf),
            Ok(false) => {
                buf.clear();
                buf.reclaim();
            }
            Err(failure) => return Err(Broken::Refused(failure)),
        }
    }
}

/// Drops what comes until the peer closes: what it was told is lost when it finds the connection closed first.
async fn drain(stream: &Stream, mut buf: BufMut) {
    let read = async {
        loop {
            buf.clear();
            buf.reclaim();
            let (got, received) = stream.recv(buf).await;
            buf = received;
            if !got.is_ok_and(|got| got > 0) {
                return;
            }
        }
    };
    let _ = timeout(LINGER, read).await;
}

impl Connection {
    /// Agrees on a session before anything else is said, in the time that the connection has to become a queue.
    pub(super) async fn secure(&mut self) -> Result<Rc<Channel>, End> {
        let shared = self.server.tls().map_err(|failure| self.insecure(&failure))?;
        let mut session = Session::accept(&shared.acceptor).map_err(|failure| self.insecure(&failure))?;
        let (stream, pools) = (self.stream.clone(), self.server.pools.clone());
        let shaken = {
            let mut shaking = pin!(shake(&stream, &mut session, pools.sealed(false)));
            std::future::poll_fn(|cx| {
                self.control.set_task(cx.waker());
                if self.control.stopping() {
                    return Poll::Ready(Err(End::Stopped));
                }
                if let Poll::Ready(shaken) = shaking.as_mut().poll(cx) {
                    return Poll::Ready(Ok(shaken));
                }
                let late = self.timer.as_mut().is_some_and(|timer| Pin::new(timer).poll(cx).is_ready());
                if late { Poll::Ready(Err(End::TooSlow)) } else { Poll::Pending }
            })
            .await
        };
        let left = match shaken? {
            Ok(left) => left,
            Err(Broken::Stream(error)) => return Err(End::Socket(error)),
            Err(Broken::Refused(failure)) => {
                let end = self.insecure(&failure);
                drain(&stream, pools.sealed(false)).await;
                return Err(end);
            }
        };
        session.rest();
        let identity = session.identity();
        let (Some(parties), Some(suite)) = (psk::parties(&identity), session.suite()) else {
            return Err(self.insecure(&Failure::NoKey));
        };
        tracing::debug!(peer = %self.peer, host = parties.host, suite = suite.name(), "TLS was agreed on");
        Ok(Rc::new(Channel {
            stream,
            input: RefCell::new(Input { buf: Some(left), large: false, quiet: 0 }),
            pools,
            record: shared.record.clone(),
            suite,
            host: parties.host.to_owned(),
            subsystem: parties.subsystem.to_owned(),
            session: RefCell::new(session),
        }))
    }

    fn insecure(&self, failure: &Failure) -> End {
        self.server.target.stats().count(|counts| counts.tls_failures += 1);
        tracing::warn!(peer = %self.peer, reason = %failure, "a host has failed to agree on TLS");
        End::Insecure
    }

    /// Why a Connect does not fit with the session, or with there being none.
    pub(super) fn channel_refuses(&self, connect: &Connect) -> Option<Refused> {
        let parameter = |wrong| Refused { status: Status::CONNECT_PARAMETER.final_(), wrong: Some(wrong) };
        let discovers = connect.subsystem == DISCOVERY_NQN;
        match &self.channel {
            // Its key is for that host.
            Some(channel) if channel.host != connect.host => Some(parameter(connect_field::HOST)),
            // And for that subsystem; discovery tells nothing that its controllers do not.
            Some(channel) if channel.subsystem != connect.subsystem && !discovers => {
                Some(parameter(connect_field::SUBSYSTEM))
            }
            // Or whoever says its name could leave TLS out.
            None if !discovers && self.server.target.tls_keys().has(&connect.host) => {
                Some(Refused { status: Status::CONNECT_HOST.final_(), wrong: None })
            }
            _ => None,
        }
    }
}
