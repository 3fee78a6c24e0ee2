//! From a stream of bytes to frames, in place.
//!
//! What is received lands in a staging buffer, out of which frames are cut without being copied; a body that is longer
//! than what has arrived gets a buffer of its own, into which the rest is received directly.  Nothing is allocated
//! before its length was held against the limits, and no message's body before it was admitted.

use std::rc::Rc;

use forebay_reactor::{Buf, BufMut, Pool};

use super::WireError;
use super::banner::Banner;
use super::codec::Malformed;
use super::crypto::Direction;
use super::frame::{
    CRC_LEN, EPILOGUE_CRC_LEN, EPILOGUE_SECURE_LEN, INLINE_LEN, Layout, Limits, PREAMBLE_LEN, SECURE_HEAD_LEN, TAG_LEN,
    Tag, padded, read_status, segment_crc,
};
use super::header::{HEADER_LEN, Header};

/// Received at a time on a quiet connection, in bytes.
const STAGING_SMALL: usize = 8 << 10;
/// Received at a time on a busy one.
const STAGING_LARGE: usize = 256 << 10;
/// Large staging buffers that are in use at most before payloads are copied out of them: a small message that is kept
/// keeps its whole neighbourhood.
const STAGING_OUT_MAX: usize = 48;
/// A receive that brings less counts as quiet; after so many in a row the staging buffer becomes small again.
const QUIET_BYTES: usize = STAGING_SMALL;
const QUIET_RECEIVES: u32 = 32;
/// Bodies from here on are received into a buffer of their own when they are not there already.
const DIRECT_MIN: usize = 16 << 10;
/// Alignment of a message's data in a buffer of its own, in bytes.
const DATA_ALIGN: usize = 4096;
/// Room that is worth a receive.
const ROOM_MIN: usize = 2 << 10;
/// For headers and short frames.
const ARENA_LEN: usize = 16 << 10;
/// Bytes of the buffers for bodies, and how many of each are kept.  The odd 8 KiB hold the headers, the epilogue and
/// what aligns the data.
const BODIES: [(usize, usize); 4] = [(16 << 10, 256), (72 << 10, 128), (264 << 10, 32), (1032 << 10, 16)];

/// The memory of the connections of one core.
#[derive(Debug)]
pub struct Pools {
    small: Pool,
    large: Pool,
    arenas: Pool,
    bodies: [Pool; BODIES.len()],
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            small: Pool::new(STAGING_SMALL, 1024),
            large: Pool::new(STAGING_LARGE, 2 * STAGING_OUT_MAX),
            arenas: Pool::new(ARENA_LEN, 256),
            bodies: BODIES.map(|(size, keep)| Pool::new(size, keep)),
        }
    }
}

impl Pools {
    /// Memory is allocated as it is used.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty buffer with room for `len` bytes at least, from a pool where one is large enough.
    pub fn get(&self, len: usize) -> BufMut {
        match self.bodies.iter().find(|pool| pool.buf_size() >= len) {
            Some(pool) => pool.get(),
            None => BufMut::with_capacity(len),
        }
    }

    /// An empty buffer for headers and short frames.
    pub(super) fn arena(&self) -> BufMut {
        self.arenas.get()
    }

    /// Buffers for bodies that are in use now.
    pub fn bodies_out(&self) -> usize {
        self.bodies.iter().map(Pool::outstanding).sum()
    }

    fn crowded(&self) -> bool {
        self.large.outstanding() > STAGING_OUT_MAX
    }
}

/// The first segment of a frame: a control payload or a message's header.
#[derive(Debug, Clone)]
enum First {
    /// As it was received.
    Buf(Buf),
    /// What travelled with the preamble in secure mode.
    Inline([u8; INLINE_LEN], usize),
    /// A message's header, read where it lay.
    Header(Header),
}

/// A frame that was received whole.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Which kind.
    pub tag: Tag,
    first: First,
    /// Front, middle and data of a message; empty otherwise.
    pub segments: [Option<Buf>; 3],
}

impl Frame {
    /// A control frame's payload; empty for a message, whose first segment is its [`header`](Self::header).
    #[inline]
    pub fn payload(&self) -> &[u8] {
        match &self.first {
            First::Buf(buf) => buf,
            First::Inline(bytes, len) => &bytes[..*len],
            First::Header(_) => &[],
        }
    }

    /// A message's header.
    ///
    /// # Errors
    /// When the first segment is none.
    #[inline]
    pub fn header(&self) -> Result<Header, Malformed> {
        match &self.first {
            First::Header(header) => Ok(*header),
            _ => Header::decode(self.payload()),
        }
    }
}

/// What a look at the received bytes came to.
#[derive(Debug)]
pub enum Next {
    /// A frame; there may be more.
    Frame(Frame),
    /// More has to be received.
    Hungry,
    /// A message waits to be admitted.
    Held,
}

/// Into what to receive.
#[derive(Debug)]
pub struct Want {
    /// The buffer.
    pub buf: BufMut,
    /// Wait until it is full: it is a body's own.
    pub all: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// A preamble comes next.
    Head,
    /// The preamble was read; the body has not been admitted.
    Announced(Layout, [u8; INLINE_LEN]),
    /// The body comes next.
    Body(Layout, [u8; INLINE_LEN]),
}

/// Cuts one direction of a connection into frames.
pub struct Decoder {
    pools: Rc<Pools>,
    limits: Limits,
    checksum: bool,
    crypto: Option<Direction>,
    state: State,
    /// Received, not parsed yet; `None` while it is being received into.
    staging: Option<BufMut>,
    /// A body in a buffer of its own, partly received; `None` too while it is being received into.
    body: Option<BufMut>,
    /// What is being received belongs to the body.
    receiving_body: bool,
    busy: bool,
    quiet: u32,
}

impl Decoder {
    /// Reads in crc mode; without looking at the checksums of segments when the connection's both sides are set up so.
    pub fn new(pools: Rc<Pools>, limits: Limits, checksum: bool) -> Self {
        let staging = Some(pools.small.get());
        Self {
            pools,
            limits,
            checksum,
            crypto: None,
            state: State::Head,
            staging,
            body: None,
            receiving_body: false,
            busy: false,
            quiet: 0,
        }
    }

    /// What is taken from here on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Reads in secure mode from the next frame on.
    pub fn secure(&mut self, direction: Direction) {
        self.crypto = Some(direction);
    }

    /// Into what to receive next, when [`next`](Self::next) was hungry.
    pub fn want(&mut self) -> Want {
        if let Some(body) = self.body.take() {
            self.receiving_body = true;
            return Want { buf: body, all: true };
        }
        let mut staging = self.staging.take().expect("one receive at a time");
        let large = self.busy && !self.pools.crowded();
        let (wanted, room_min) =
            if large { (&self.pools.large, STAGING_LARGE / 4) } else { (&self.pools.small, ROOM_MIN) };
        let room = staging.reclaim().then(|| staging.capacity());
        if room.is_some_and(|room| room != wanted.buf_size()) || staging.spare() < room_min {
            let mut fresh = wanted.get();
            if staging.len() + ROOM_MIN > fresh.capacity() {
                // Only bodies below the direct limit are kept here, so a large one always has room.
                fresh = self.pools.large.get();
            }
            fresh.clear();
            fresh.extend_from_slice(&staging);
            staging = fresh;
        }
        Want { buf: staging, all: false }
    }

    /// Takes back the buffer of [`want`](Self::want), into which `got` bytes were received.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        if std::mem::take(&mut self.receiving_body) {
            self.body = Some(buf);
            return;
        }
        self.quiet = if got < QUIET_BYTES { self.quiet + 1 } else { 0 };
        if got >= QUIET_BYTES / 2 {
            self.busy = true;
        } else if self.quiet >= QUIET_RECEIVES {
            self.busy = false;
        }
        self.staging = Some(buf);
    }

    /// Takes some of `bytes` as if they had just been received, when [`next`](Self::next) was hungry; returns how many.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let mut want = self.want();
        let len = want.buf.spare().min(bytes.len());
        want.buf.extend_from_slice(&bytes[..len]);
        self.received(want.buf, len);
        len
    }

    /// The stream may end here: nothing is half received.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.state, State::Head) && self.staging.as_ref().is_some_and(|staging| staging.is_empty())
    }

    /// The peer's banner, which comes before all frames, and its bytes.
    pub fn banner(&mut self) -> Result<Option<(Banner, Buf)>, WireError> {
        let staging = self.staging.as_mut().expect("nothing is being received");
        let found = Banner::decode(staging)?;
        Ok(found.map(|(banner, len)| (banner, staging.split_to(len))))
    }

    /// The next frame.  `admit` is asked, once or more, before room is made for a message's body.  The bytes of a
    /// frame in crc mode, as they were received, are given to `seen`.
    ///
    /// # Errors
    /// What is not a frame, or not one that is taken.  The connection cannot go on.
    pub fn next(
        &mut self,
        mut admit: impl FnMut(&Layout) -> bool,
        mut seen: impl FnMut(&[u8]),
    ) -> Result<Next, WireError> {
        loop {
            match self.state {
                State::Head => {
                    let staging = self.staging.as_mut().expect("nothing is being received");
                    let mut inline = [0; INLINE_LEN];
                    let layout = match &mut self.crypto {
                        None => {
                            let Some(head) = staging.first_chunk::<PREAMBLE_LEN>() else { return Ok(Next::Hungry) };
                            let layout = Layout::read(head, &self.limits)?;
                            seen(head);
                            staging.advance(PREAMBLE_LEN);
                            let len = layout.first_crc_len() + layout.rest_crc_len();
                            if layout.tag == Tag::Message && staging.len() >= len && !self.pools.crowded() {
                                if !admit(&layout) {
                                    self.state = State::Announced(layout, inline);
                                    return Ok(Next::Held);
                                }
                                match cut_message(&layout, staging, self.checksum)? {
                                    Some(frame) => return Ok(Next::Frame(frame)),
                                    None => continue,
                                }
                            }
                            layout
                        }
                        Some(crypto) => {
                            if staging.len() < SECURE_HEAD_LEN {
                                return Ok(Next::Hungry);
                            }
                            let head = &mut staging[..SECURE_HEAD_LEN];
                            crypto.open(head)?;
                            let preamble = head.first_chunk::<PREAMBLE_LEN>().expect("a whole head");
                            let layout = Layout::read(preamble, &self.limits)?;
                            inline.copy_from_slice(&head[PREAMBLE_LEN..PREAMBLE_LEN + INLINE_LEN]);
                            staging.advance(SECURE_HEAD_LEN);
                            layout
                        }
                    };
                    self.state = State::Announced(layout, inline);
                }
                State::Announced(layout, inline) => {
                    if layout.tag == Tag::Message && !admit(&layout) {
                        return Ok(Next::Held);
                    }
                    self.state = State::Body(layout, inline);
                }
                State::Body(layout, inline) => {
                    let Some(body) = self.take_body(&layout)? else { return Ok(Next::Hungry) };
                    self.state = State::Head;
                    let frame = match self.crypto {
                        None => {
                            if layout.tag != Tag::Message {
                                seen(&body);
                            }
                            self.cut_plain(&layout, body)?
                        }
                        Some(_) => cut_opened(&layout, &inline, body)?,
                    };
                    if let Some(frame) = frame {
                        return Ok(Next::Frame(frame));
                    }
                }
            }
        }
    }

    /// The body of a frame, decrypted, when all of it is there; otherwise sees to where the rest will go.
    #[inline]
    fn take_body(&mut self, layout: &Layout) -> Result<Option<Buf>, WireError> {
        let (first, rest, data_at) = match self.crypto {
            None => {
                let first = layout.first_crc_len();
                (first, layout.rest_crc_len(), first + (layout.lens[1] + layout.lens[2]) as usize)
            }
            Some(_) => {
                let first = layout.first_secure_len();
                let before = padded(layout.lens[1] as usize) + padded(layout.lens[2] as usize);
                (first, layout.rest_secure_len(), first + before)
            }
        };
        let len = first + rest;
        if let Some(mut body) = self.body.take() {
            if body.spare() > 0 {
                self.body = Some(body);
                return Ok(None);
            }
            self.open(&mut body, first)?;
            return Ok(Some(body.freeze()));
        }
        let mut staging = self.staging.take().expect("nothing is being received");
        let body = if staging.len() >= len {
            self.open(&mut staging[..len], first)?;
            let body = staging.split_to(len);
            if layout.payload_len() > 0 && self.pools.crowded() && body.retained() > STAGING_SMALL {
                let mut own = self.pools.get(len);
                own.extend_from_slice(&body);
                Some(own.freeze())
            } else {
                Some(body)
            }
        } else {
            if len >= DIRECT_MIN {
                let pad = if layout.lens[3] as usize >= DATA_ALIGN { data_at.wrapping_neg() % DATA_ALIGN } else { 0 };
                let mut body = self.pools.get(len + pad);
                body.set_len(pad);
                body.advance(pad);
                body.extend_from_slice(&staging);
                self.body = Some(body.limited(len));
                staging.advance(staging.len());
            }
            None
        };
        self.staging = Some(staging);
        Ok(body)
    }

    /// Decrypts a body in place: its first part and the rest, each with its tag.
    #[inline]
    fn open(&mut self, body: &mut [u8], first: usize) -> Result<(), WireError> {
        let Some(crypto) = &mut self.crypto else { return Ok(()) };
        let (first, rest) = body.split_at_mut(first);
        if !first.is_empty() {
            crypto.open(first)?;
        }
        if !rest.is_empty() {
            crypto.open(rest)?;
        }
        Ok(())
    }

    /// Cuts a body in crc mode into its segments; `None` when the sender gave the frame up.
    fn cut_plain(&self, layout: &Layout, mut body: Buf) -> Result<Option<Frame>, WireError> {
        let (tag, len) = (layout.tag, layout.lens[0] as usize);
        let first = First::Buf(body.slice(0..len));
        if len > 0 {
            check(tag, 0, &body[..len], &body[len..], self.checksum)?;
            body.advance(len + CRC_LEN);
        }
        let mut frame = Frame { tag, first, segments: [None, None, None] };
        if layout.count == 1 {
            return Ok(Some(frame));
        }
        let mut epilogue = [0; EPILOGUE_CRC_LEN];
        epilogue.copy_from_slice(&body[body.len() - EPILOGUE_CRC_LEN..]);
        for at in 1..layout.count {
            let segment = body.split_to(layout.lens[at] as usize);
            check(tag, at, &segment, &epilogue[1 + (at - 1) * CRC_LEN..], self.checksum)?;
            frame.segments[at - 1] = (!segment.is_empty()).then_some(segment);
        }
        Ok(read_status(epilogue[0])?.then_some(frame))
    }
}

/// Holds a segment against the checksum at the front of `said`.
#[inline]
fn check(tag: Tag, segment: usize, bytes: &[u8], said: &[u8], checksum: bool) -> Result<(), WireError> {
    let said = u32::from_le_bytes(*said.first_chunk().expect("4 bytes"));
    if !checksum {
        return Ok(());
    }
    match segment_crc([bytes]) {
        found if found == said => Ok(()),
        found => Err(WireError::BadSegmentCrc { tag, segment, found, said }),
    }
}

/// Cuts a message in crc mode out of what was received, all of which is there; `None` when the sender gave it up.
///
/// Most messages come this way, so the header is read where it lies, and only segments that are not empty are counted as
/// referring to the memory.
#[inline]
fn cut_message(layout: &Layout, staging: &mut BufMut, checksum: bool) -> Result<Option<Frame>, WireError> {
    let (tag, len) = (Tag::Message, layout.lens[0] as usize);
    let first = match &staging[..len] {
        header if len == HEADER_LEN => First::Header(Header::decode(header).expect("as long as a header")),
        other => First::Buf(Buf::copy_of(other)),
    };
    if len > 0 {
        check(tag, 0, &staging[..len], &staging[len..], checksum)?;
        staging.advance(len + CRC_LEN);
    }
    let mut frame = Frame { tag, first, segments: [None, None, None] };
    if layout.count == 1 {
        return Ok(Some(frame));
    }
    let mut epilogue = [0; EPILOGUE_CRC_LEN];
    epilogue.copy_from_slice(&staging[layout.payload_len()..][..EPILOGUE_CRC_LEN]);
    for at in 1..layout.count {
        let len = layout.lens[at] as usize;
        check(tag, at, &staging[..len], &epilogue[1 + (at - 1) * CRC_LEN..], checksum)?;
        frame.segments[at - 1] = (len > 0).then(|| staging.split_to(len));
    }
    staging.advance(EPILOGUE_CRC_LEN);
    Ok(read_status(epilogue[0])?.then_some(frame))
}

/// Cuts a decrypted body into its segments; `None` when the sender gave the frame up.
fn cut_opened(layout: &Layout, inline: &[u8; INLINE_LEN], mut body: Buf) -> Result<Option<Frame>, WireError> {
    let len = layout.lens[0] as usize;
    let first = match len.checked_sub(INLINE_LEN) {
        None | Some(0) => First::Inline(*inline, len),
        Some(more) => {
            let rest = body.split_to(layout.first_secure_len());
            let mut first = BufMut::with_capacity(len);
            first.extend_from_slice(inline);
            first.extend_from_slice(&rest[..more]);
            First::Buf(first.freeze())
        }
    };
    let mut frame = Frame { tag: layout.tag, first, segments: [None, None, None] };
    if layout.count == 1 {
        return Ok(Some(frame));
    }
    for at in 1..layout.count {
        let len = layout.lens[at] as usize;
        let segment = body.split_to(padded(len)).slice(0..len);
        frame.segments[at - 1] = (len > 0).then_some(segment);
    }
    debug_assert_eq!(body.len(), EPILOGUE_SECURE_LEN + TAG_LEN);
    Ok(read_status(body[0])?.then_some(frame))
}
