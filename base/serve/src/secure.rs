//! TLS layer of a connection: decrypts received bytes before a front sees them, encrypts its replies.
//!
//! A [`SecureStream`] replaces a socket in [`exchange`](crate::exchange()); connections without TLS are unaffected.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{Buf, BufList, BufMut, Stream, timeout};
use forebay_tls::{Read, TlsFailure, TlsSession, sealed_len};

use crate::ReceiveRequest;

/// Plaintext bytes encrypted into one record.
const RECORD: usize = 16 << 10;
/// Longest time that the closing alert may take to be sent.
const CLOSING: Duration = Duration::from_millis(100);
/// Quiet receives in a row after which the buffer for them is small again.
const QUIET_RECEIVES: u32 = 32;
/// Bytes of a receive up to which it counts as quiet.
const QUIET_BYTES: usize = 2 << 10;

/// Source of the buffers of secure streams.
pub trait SealBuffers {
    /// Returns the size in bytes of a receive buffer; more if `large`.
    fn sealed_size(&self, large: bool) -> usize;

    /// Returns an empty receive buffer.
    fn sealed(&self, large: bool) -> BufMut;

    /// Returns an empty send buffer: for all of `len` bytes, or as much as fits into one, at least 64 KiB.
    fn sealing(&self, len: usize) -> BufMut;
}

/// Buffer in which short parts are coalesced into one record; shared by the connections of a core.
#[derive(Debug, Clone)]
pub struct RecordBuffer(Rc<RefCell<Vec<u8>>>);

impl Default for RecordBuffer {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(Vec::with_capacity(RECORD))))
    }
}

/// Received bytes that are not decrypted yet.
struct Input {
    /// `None` while a receive into it is in flight.
    buf: Option<BufMut>,
    /// True if the next receive uses a large buffer.
    large: bool,
    quiet: u32,
}

/// Socket with a TLS session on it.
pub struct SecureStream<B> {
    stream: Stream,
    session: RefCell<TlsSession>,
    input: RefCell<Input>,
    buffers: Rc<B>,
    record: RecordBuffer,
}

fn broken(failure: &TlsFailure) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {failure}"))
}

impl<B: SealBuffers> SecureStream<B> {
    /// Creates a stream after the handshake; `received` are the bytes received behind it.
    pub fn new(
        stream: Stream,
        mut session: TlsSession,
        received: BufMut,
        buffers: Rc<B>,
        record: RecordBuffer,
    ) -> Self {
        session.rest();
        let input = RefCell::new(Input { buf: Some(received), large: false, quiet: 0 });
        Self { stream, session: RefCell::new(session), input, buffers, record }
    }

    /// Decrypts received records into the spare space of `buf`.
    fn open(&self, buf: &mut BufMut) -> io::Result<Read> {
        let mut input = self.input.borrow_mut();
        let Some(received) = &mut input.buf else { return Ok(Read::NeedInput) };
        let mut left = &received[..];
        let read = self.session.borrow_mut().read(&mut left, buf.spare_mut()).map_err(|failure| broken(&failure))?;
        let taken = received.len() - left.len();
        received.advance(taken);
        if let Read::Data(len) = read {
            buf.set_len(buf.len() + len);
        }
        Ok(read)
    }

    /// Receives more encrypted bytes; returns false at the end of the stream.
    async fn fill(&self) -> io::Result<bool> {
        let buf = {
            let mut input = self.input.borrow_mut();
            let buf = input.buf.take().map(|mut buf| {
                buf.clear();
                buf.reclaim();
                buf
            });
            buf.filter(|buf| buf.spare() == self.buffers.sealed_size(input.large))
                .unwrap_or_else(|| self.buffers.sealed(input.large))
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

    /// Encrypts a batch into records.
    fn seal(&self, batch: &BufList) -> io::Result<BufList> {
        let mut session = self.session.borrow_mut();
        let mut record = self.record.0.borrow_mut();
        record.clear();
        let (mut out, mut left) = (BufList::new(), batch.len());
        let mut sealed = BufMut::with_capacity(0);
        let mut put = |plain: &[u8]| {
            if sealed.spare() < sealed_len(plain.len()) {
                let next = self.buffers.sealing(sealed_len(left));
                out.push(std::mem::replace(&mut sealed, next).freeze());
            }
            left -= plain.len();
            let len = session.write(plain, sealed.spare_mut()).map_err(|failure| broken(&failure))?;
            sealed.set_len(sealed.len() + len);
            Ok::<(), io::Error>(())
        };
        for part in batch.parts() {
            let mut part = &part[..];
            while !part.is_empty() {
                // Long data is encrypted directly, in records of its own; short parts are coalesced.
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
            // Discard the plaintext of the hosts' data.
            record.clear();
        }
        out.push(sealed.freeze());
        Ok(out)
    }

    /// Receives into the requested buffer, as [`receive`](crate::receive) does from a socket.
    pub async fn receive(self: Rc<Self>, want: ReceiveRequest) -> (io::Result<usize>, BufMut) {
        let ReceiveRequest { mut buf, all } = want;
        let before = buf.len();
        loop {
            match self.open(&mut buf) {
                Ok(Read::Data(_)) if all && buf.spare() > 0 => {}
                Ok(Read::Data(_)) => return (Ok(buf.len() - before), buf),
                Ok(Read::Closed) if buf.len() == before => return (Ok(0), buf),
                Ok(Read::Closed) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Ok(Read::NeedInput) => match self.fill().await {
                    Ok(true) => {}
                    // Hosts close without a closing alert; their messages are self-delimiting, so truncation is
                    // detected.
                    Ok(false) if buf.len() == before => return (Ok(0), buf),
                    Ok(false) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                    Err(error) => return (Err(error), buf),
                },
                Err(error) => return (Err(error), buf),
            }
        }
    }

    /// Sends a whole batch, as [`send`](crate::send) does through a socket.
    pub async fn send(self: Rc<Self>, batch: BufList) -> io::Result<()> {
        let sealed = self.seal(&batch)?;
        drop(batch);
        self.stream.send(sealed).await
    }

    /// Sends the closing alert.  Nothing else may be in flight.
    pub async fn close(&self) {
        let closing = self.session.borrow_mut().close();
        // Bounded, for a peer that does not read.
        let _ = timeout(CLOSING, self.stream.send(Buf::copy_of(&closing))).await;
    }
}

impl<B> std::fmt::Debug for SecureStream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecureStream")
    }
}

/// Failure of a handshake.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Handshake failure: the peer and this side cannot agree.
    #[error("{0}")]
    Refused(TlsFailure),
    /// Socket error, or connection closed by the peer.
    #[error("the connection ended: {0}")]
    Stream(io::Error),
}

/// Negotiates a session; bytes left in the returned buffer are data.  `rejection` may replace TLS's own alert to a
/// rejected peer, given the failure and the bytes that the peer has sent last.
///
/// # Errors
/// Errors of the session or of the stream; the peer has been sent an alert.
pub async fn handshake(
    stream: &Stream,
    session: &mut TlsSession,
    mut buf: BufMut,
    rejection: impl Fn(&TlsFailure, &[u8]) -> Option<Vec<u8>>,
) -> Result<BufMut, HandshakeError> {
    let mut output = Vec::new();
    loop {
        // Use bytes left from before first.
        if buf.is_empty() {
            let (got, received) = stream.recv(buf).await;
            buf = received;
            if got.map_err(HandshakeError::Stream)? == 0 {
                return Err(HandshakeError::Stream(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        let mut input = &buf[..];
        let result = session.handshake(&mut input, &mut output);
        let taken = buf.len() - input.len();
        if let Err(failure) = &result
            && let Some(instead) = rejection(failure, &buf)
        {
            output = instead;
        }
        if !output.is_empty() {
            let sent = stream.send(Buf::copy_of(&output)).await;
            output.clear();
            sent.map_err(HandshakeError::Stream)?;
        }
        buf.advance(taken);
        match result {
            Ok(true) => return Ok(buf),
            Ok(false) => {
                buf.clear();
                buf.reclaim();
            }
            Err(failure) => return Err(HandshakeError::Refused(failure)),
        }
    }
}

/// Discards received bytes until the peer closes, for at most `patience`: a peer that finds the connection closed first
/// loses the last message to it.
pub async fn drain(stream: &Stream, mut buf: BufMut, patience: Duration) {
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
    let _ = timeout(patience, read).await;
}
