use std::rc::Rc;

use forebay_block::{BufList, BufMut};
use forebay_reactor::Pool;
use forebay_serve::{SMALL, Staging, StagingPools, Want};

use super::{Action, Command, Rules, Violation};

/// Payloads from this length on get a buffer of their own and are received straight into it.
const PAYLOAD_OWN: usize = 64 * 1024;
/// Longer payloads are received piece by piece, so that nobody has more memory set aside than a piece beyond what it
/// has sent.
const PIECE: usize = 1024 * 1024;
/// Free memory kept a size class of payloads, in bytes.
const KEPT_BYTES: usize = 8 * 1024 * 1024;
/// Free pieces kept.
const KEPT_PIECES: usize = 32;

/// Where receive buffers come from: shared by the connections of a core.
#[derive(Debug)]
pub struct Pools {
    staging: StagingPools,
    /// By powers of two, from [`PAYLOAD_OWN`] up.
    payload: Vec<Pool>,
}

impl Default for Pools {
    fn default() -> Self {
        Self::new()
    }
}

impl Pools {
    /// Pools with nothing in them yet.
    pub fn new() -> Self {
        let keep = |size| if size == PIECE { KEPT_PIECES } else { KEPT_BYTES / size };
        let classes = (PAYLOAD_OWN.ilog2()..=PIECE.ilog2()).map(|bits| 1 << bits);
        Self { staging: StagingPools::new(256), payload: classes.map(|size| Pool::new(size, keep(size))).collect() }
    }

    /// An empty buffer with room for exactly `len` bytes, at most a piece.
    fn payload(&self, len: usize) -> BufMut {
        let pool = self.payload.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }

    /// Small buffers for the headers of replies.
    pub(super) fn headers(&self) -> BufMut {
        self.staging.small()
    }
}

/// What came with a command.
pub type Payload = BufList;

/// A write whose payload goes to a buffer of its own.
#[derive(Debug)]
struct Own {
    command: Command,
    /// Pieces that are full.
    full: BufList,
    /// The piece that is being filled; `None` while it is being received into.
    buf: Option<BufMut>,
    /// Bytes past that piece.
    left: usize,
}

impl Own {
    /// Goes on to the next piece when one is full; true when all are.
    fn filled(&mut self, pools: &Pools) -> bool {
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

/// Cuts the received stream into commands and their payloads.
///
/// Payloads of small writes are slices of the staging buffer, those of large ones are received straight into a
/// buffer of their own, so that a byte is copied at most when it arrived together with what precedes it.
#[derive(Debug)]
pub struct Receiver {
    pools: Rc<Pools>,
    staging: Staging,
    own: Option<Own>,
    /// A write whose header is parsed and whose payload is not all in staging yet.
    partial: Option<Command>,
    /// Bytes of a refused payload still to be dropped.
    skip: usize,
}

impl Receiver {
    /// A receiver that begins with `received`, bytes that came behind the negotiation.
    pub fn new(pools: Rc<Pools>, received: &[u8]) -> Self {
        let mut staging = if received.len() <= SMALL { pools.staging.small() } else { pools.payload(received.len()) };
        staging.extend_from_slice(received);
        Self { pools, staging: Staging::new(staging), own: None, partial: None, skip: 0 }
    }

    /// The next command that is there with all of its payload; `None` when more has to be received.
    /// Nothing is parsed while a buffer is out.
    pub fn next(&mut self, rules: &Rules) -> Result<Option<(Command, Payload)>, Violation> {
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
            Action::Write { .. } if payload > staging.len() && payload >= PAYLOAD_OWN => {
                let len = payload.min(PIECE);
                let mut buf = self.pools.payload(len);
                buf.extend_from_slice(staging);
                let here = staging.len();
                staging.advance(here);
                self.staging.expect_long();
                self.own = Some(Own { command, full: BufList::new(), buf: Some(buf), left: payload - len });
                return Ok(None);
            }
            Action::Write { .. } if payload > staging.len() => {
                self.partial = Some(command);
                return Ok(None);
            }
            Action::Write { .. } => {
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

    /// What to receive next.
    ///
    /// # Panics
    /// When a buffer is out already.
    pub fn want(&mut self) -> Want {
        if let Some(own) = &mut self.own {
            return Want { buf: own.buf.take().expect("one receive at a time"), all: true };
        }
        // A payload that goes on past what is staged has to lie in one piece.
        let staged = self.staging.staged().map_or(0, |staged| staged.len());
        let missing = self.partial.map_or(0, |command| command.payload as usize - staged);
        // What does not fit into a small one is a payload shorter than those that get a buffer of their own.
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

    /// Takes back the buffer with nothing more in it: the stream has ended.  True when it ended between messages.
    pub fn ended(&mut self, buf: BufMut) -> bool {
        if self.own.is_none() {
            self.staging.ended(buf);
        }
        self.between_messages()
    }

    /// True when nothing of a message has arrived that is not complete: the stream may end here.
    pub fn between_messages(&self) -> bool {
        self.own.is_none() && self.partial.is_none() && self.skip == 0 && self.staging.is_empty()
    }
}
