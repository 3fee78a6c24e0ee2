use std::rc::Rc;

use forebay_block::{BufList, BufMut};
use forebay_reactor::Pool;

use super::{Action, Command, Rules, Violation};

/// Staging of a connection with little to say.  Holds many reads, and the start of a large write.
const STAGING_SMALL: usize = 4 * 1024;
/// Staging of a busy connection: many requests and small payloads with one receive.
const STAGING_LARGE: usize = 256 * 1024;
/// Payloads from this length on get a buffer of their own and are received straight into it.
const PAYLOAD_OWN: usize = 64 * 1024;
/// Receives with little in them after which staging is small again.
const QUIET_RECEIVES: u32 = 32;
/// Longer payloads are received piece by piece, so that nobody has more memory set aside than a piece beyond what it
/// has sent.
const PIECE: usize = 1024 * 1024;
/// Large staging buffers of a core.  When all are in use, connections make do with small ones.
const STAGING_LARGE_MAX: usize = 128;
/// Large staging buffers in use past which small payloads are copied out, instead of keeping their whole
/// neighbourhood in memory for as long as the device holds them.
const STAGING_CROWDED: usize = 64;
/// Free memory kept a size class of payloads, in bytes.
const KEPT_BYTES: usize = 8 * 1024 * 1024;
/// Free pieces kept.
const KEPT_PIECES: usize = 32;

/// Where receive buffers come from: shared by the connections of a core.
#[derive(Debug)]
pub struct Pools {
    small: Pool,
    large: Pool,
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
        Self {
            small: Pool::new(STAGING_SMALL, 256),
            large: Pool::new(STAGING_LARGE, STAGING_LARGE_MAX),
            payload: classes.map(|size| Pool::new(size, keep(size))).collect(),
        }
    }

    /// An empty buffer with room for exactly `len` bytes, at most a piece.
    fn payload(&self, len: usize) -> BufMut {
        let pool = self.payload.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }

    /// A copy that keeps nothing else in memory.
    fn copy(&self, data: &[u8]) -> BufMut {
        if data.len() > STAGING_SMALL {
            return BufMut::copy_of(data);
        }
        let mut buf = self.small.get();
        buf.extend_from_slice(data);
        buf
    }

    /// Small buffers for the headers of replies.
    pub(super) fn headers(&self) -> BufMut {
        self.small.get()
    }
}

/// What came with a command.
pub type Payload = BufList;

/// A buffer to receive into.
#[derive(Debug)]
pub struct Want {
    /// Receive into its spare room.
    pub buf: BufMut,
    /// All of the room, not only what there is.
    pub all: bool,
}

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
    /// Received and not yet parsed; `None` while it is being received into.
    staging: Option<BufMut>,
    /// The class that the next staging buffer is to be of.
    large: bool,
    quiet: u32,
    own: Option<Own>,
    /// A write whose header is parsed and whose payload is not all in staging yet.
    partial: Option<Command>,
    /// Bytes of a refused payload still to be dropped.
    skip: usize,
}

impl Receiver {
    /// A receiver that begins with `received`, bytes that came behind the negotiation.
    pub fn new(pools: Rc<Pools>, received: &[u8]) -> Self {
        let mut staging =
            if received.len() <= STAGING_SMALL { pools.small.get() } else { pools.payload(received.len()) };
        staging.extend_from_slice(received);
        Self { pools, staging: Some(staging), large: false, quiet: 0, own: None, partial: None, skip: 0 }
    }

    /// The next command that is there with all of its payload; `None` when more has to be received.
    /// Nothing is parsed while a buffer is out.
    pub fn next(&mut self, rules: &Rules) -> Result<Option<(Command, Payload)>, Violation> {
        let Some(staging) = &mut self.staging else { return Ok(None) };
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
                // The next header is then received on its own, and its payload straight to its place.
                self.large = false;
                self.own = Some(Own { command, full: BufList::new(), buf: Some(buf), left: payload - len });
                return Ok(None);
            }
            Action::Write { .. } if payload > staging.len() => {
                self.partial = Some(command);
                return Ok(None);
            }
            Action::Write { .. } => {
                let crowded = self.pools.large.outstanding() > STAGING_CROWDED;
                let data: Payload = if crowded && staging.capacity() > STAGING_SMALL {
                    let data = self.pools.copy(&staging[..payload]);
                    staging.advance(payload);
                    data.into()
                } else {
                    staging.split_to(payload).into()
                };
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
        let mut staging = self.staging.take().expect("one receive at a time");
        if staging.is_empty() {
            staging.reclaim();
        }
        // A payload that goes on past what is staged has to lie in one piece.
        let missing = self.partial.map_or(0, |command| command.payload as usize - staging.len());
        let none_left = self.pools.large.outstanding() >= STAGING_LARGE_MAX;
        let small = (!self.large || none_left) && staging.len() + missing <= STAGING_SMALL;
        let size = if small { STAGING_SMALL } else { STAGING_LARGE };
        let fits = staging.spare() >= missing.max(size / 4) && staging.capacity() <= size;
        if fits {
            return Want { buf: staging, all: false };
        }
        let mut next = match (small, none_left) {
            (true, _) => self.pools.small.get(),
            (false, false) => self.pools.large.get(),
            // What does not fit into a small one is a payload shorter than those that get a buffer of their own.
            (false, true) => self.pools.payload(PAYLOAD_OWN),
        };
        next.extend_from_slice(&staging);
        Want { buf: next, all: false }
    }

    /// Takes back the buffer that [`want`](Self::want) gave, with `got` more bytes in it.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        if let Some(own) = &mut self.own
            && own.buf.is_none()
        {
            own.buf = Some(buf);
            return;
        }
        let filled = buf.spare() == 0;
        self.staging = Some(buf);
        if self.large {
            self.quiet = if got < STAGING_SMALL / 2 { self.quiet + 1 } else { 0 };
            if self.quiet >= QUIET_RECEIVES {
                self.large = false;
                self.quiet = 0;
            }
        } else if filled && got >= STAGING_SMALL / 2 {
            self.large = true;
            self.quiet = 0;
        }
    }

    /// Takes back the buffer with nothing more in it: the stream has ended.  True when it ended between messages.
    pub fn ended(&mut self, buf: BufMut) -> bool {
        if self.own.is_none() {
            self.staging = Some(buf);
        }
        self.between_messages()
    }

    /// True when nothing of a message has arrived that is not complete: the stream may end here.
    pub fn between_messages(&self) -> bool {
        self.own.is_none()
            && self.partial.is_none()
            && self.skip == 0
            && self.staging.as_ref().is_none_or(|staging| staging.is_empty())
    }
}
