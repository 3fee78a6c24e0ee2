use std::rc::Rc;

use forebay_block::{BufList, BufMut};
use forebay_reactor::BufPool;
use forebay_serve::secure::SealBuffers;
use forebay_serve::{ReceiveRequest, ReceiveStaging, SMALL, StagingPools};

use super::{NbdAction, NbdCommand, NbdRules, NbdViolation};

/// Length from which payloads get a buffer of their own, into which they are received directly.
const PAYLOAD_OWN: usize = 64 * 1024;
/// Piece size of longer payloads.  Limits the memory allocated for a connection to one piece beyond what it has
/// sent.
const PIECE: usize = 1024 * 1024;
/// Maximum bytes of free memory retained per size class of payload buffers.
const KEPT_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of free pieces retained.
const KEPT_PIECES: usize = 32;

/// Receive buffer pools, shared by the connections of a core.
#[derive(Debug)]
pub struct NbdPools {
    staging: StagingPools,
    /// Payload buffer pools, in powers of two from [`PAYLOAD_OWN`] up.
    payload: Vec<BufPool>,
}

impl Default for NbdPools {
    fn default() -> Self {
        Self::new()
    }
}

impl NbdPools {
    /// Creates empty pools.
    pub fn new() -> Self {
        let keep = |size| if size == PIECE { KEPT_PIECES } else { KEPT_BYTES / size };
        let classes = (PAYLOAD_OWN.ilog2()..=PIECE.ilog2()).map(|bits| 1 << bits);
        Self { staging: StagingPools::new(256), payload: classes.map(|size| BufPool::new(size, keep(size))).collect() }
    }

    /// Returns an empty buffer with space for exactly `len` bytes, at most `PIECE`.
    fn payload(&self, len: usize) -> BufMut {
        let pool = self.payload.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }

    /// Returns a small buffer for the headers of replies.
    pub(super) fn headers(&self) -> BufMut {
        self.staging.small()
    }
}

impl SealBuffers for NbdPools {
    fn sealed_size(&self, large: bool) -> usize {
        if large { PAYLOAD_OWN } else { SMALL }
    }

    fn sealed(&self, large: bool) -> BufMut {
        if large { self.payload(PAYLOAD_OWN) } else { self.staging.small() }
    }

    fn sealing(&self, len: usize) -> BufMut {
        if len > SMALL { self.payload(len.min(PIECE)) } else { self.staging.small() }
    }
}

/// Payload of a command.
pub type Payload = BufList;

/// Write whose payload is received into buffers of its own.
#[derive(Debug)]
struct Own {
    command: NbdCommand,
    /// Full pieces.
    full: BufList,
    /// Piece that is being filled; `None` while it is handed out for receiving.
    buf: Option<BufMut>,
    /// Bytes after that piece.
    left: usize,
}

impl Own {
    /// Begins the next piece if the current one is full.  Returns true if all pieces are full.
    fn filled(&mut self, pools: &NbdPools) -> bool {
        let Some(buf) = self.buf.take_if(|buf| buf.spare() == 0) else { return false };
        self.full.push(buf.freeze());
        if self.left == 0 {
            return true;
        }
        let len = self.left.min(PIECE);
        self.left -= len;
        self.buf = Some(pools.payload(len));
        false
    }
}

/// Splits the received stream into commands and their payloads.
///
/// Payloads of small writes are slices of the staging buffer.  Those of large writes are received directly into
/// buffers of their own.  A byte is copied at most once, and only if it arrived together with what precedes it.
#[derive(Debug)]
pub struct NbdReceiver {
    pools: Rc<NbdPools>,
    staging: ReceiveStaging,
    own: Option<Own>,
    /// Write with a parsed header, whose payload is not complete in the staging buffer yet.
    partial: Option<NbdCommand>,
    /// Bytes of a refused payload that are still to be skipped.
    skip: usize,
}

impl NbdReceiver {
    /// Creates a receiver that begins with `received`, the bytes after the negotiation.
    pub fn new(pools: Rc<NbdPools>, received: &[u8]) -> Self {
        let mut staging = if received.len() <= SMALL { pools.staging.small() } else { pools.payload(received.len()) };
        staging.extend_from_slice(received);
        Self { pools, staging: ReceiveStaging::new(staging), own: None, partial: None, skip: 0 }
    }

    /// Returns the next command with its complete payload; `None` if more bytes must be received.
    /// Nothing is parsed while a buffer is handed out.
    pub fn next(&mut self, rules: &NbdRules) -> Result<Option<(NbdCommand, Payload)>, NbdViolation> {
        let Some(staging) = self.staging.staged() else { return Ok(None) };
        if let Some(own) = &mut self.own {
            if !own.filled(&self.pools) {
                return Ok(None);
            }
            let own = self.own.take().expect("own");
            return Ok(Some((own.command, own.full)));
        }
        if self.skip > 0 {
            let now = self.skip.min(staging.len());
            staging.advance(now);
            self.skip -= now;
            if self.skip > 0 {
                return Ok(None);
            }
        }
        let command = match self.partial.take() {
            Some(command) => command,
            None => {
                let Some((command, head_len)) = rules.parse(staging)? else { return Ok(None) };
                staging.advance(head_len);
                command
            }
        };
        let payload = command.payload as usize;
        match command.action {
            NbdAction::Write { .. } if payload > staging.len() && payload >= PAYLOAD_OWN => {
                let len = payload.min(PIECE);
                let mut buf = self.pools.payload(len);
                buf.extend_from_slice(staging);
                let here = staging.len();
                staging.advance(here);
                self.staging.expect_long();
                self.own = Some(Own { command, full: BufList::new(), buf: Some(buf), left: payload - len });
                return Ok(None);
            }
            NbdAction::Write { .. } if payload > staging.len() => {
                self.partial = Some(command);
                return Ok(None);
            }
            NbdAction::Write { .. } => {
                let data = self.staging.cut(payload, &self.pools.staging).into();
                return Ok(Some((command, data)));
            }
            _ => {
                self.skip = payload;
                let now = self.skip.min(staging.len());
                staging.advance(now);
                self.skip -= now;
            }
        }
        Ok(Some((command, Payload::new())))
    }

    /// Returns the buffer to receive into next.
    ///
    /// # Panics
    /// When a buffer is out already.
    pub fn want(&mut self) -> ReceiveRequest {
        if let Some(own) = &mut self.own {
            return ReceiveRequest { buf: own.buf.take().expect("one receive at a time"), all: true };
        }
        // A payload that extends past the staged bytes must be contiguous.
        let staged = self.staging.staged().map_or(0, |staged| staged.len());
        let missing = self.partial.map_or(0, |command| command.payload as usize - staged);
        // A payload that does not fit into a small buffer is shorter than those with a buffer of their own.
        self.staging.want(missing, &self.pools.staging, || self.pools.payload(PAYLOAD_OWN))
    }

    /// Takes back the buffer that [`want`](Self::want) gave, with `got` more bytes in it.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        if let Some(own) = &mut self.own
            && own.buf.is_none()
        {
            own.buf = Some(buf);
            return;
        }
        self.staging.received(buf, got);
    }

    /// Takes back the buffer with nothing more in it, at the end of the stream.  Returns whether the stream ended
    /// between messages.
    pub fn ended(&mut self, buf: BufMut) -> bool {
        if self.own.is_none() {
            self.staging.ended(buf);
        }
        self.between_messages()
    }

    /// Returns whether no incomplete message has arrived, so that the stream may end here.
    pub fn between_messages(&self) -> bool {
        self.own.is_none() && self.partial.is_none() && self.skip == 0 && self.staging.is_empty()
    }
}
