//! Frame decoder: splits a byte stream into frames, in place.
//!
//! Bytes are received into a staging buffer, from which frames are cut without copying; a body that is longer than what
//! has arrived gets a buffer of its own, into which the rest is received directly.  Nothing is allocated before its
//! length was checked against the limits, and no message's body before it was admitted.

use std::rc::Rc;

use forebay_reactor::{Buf, BufMut, BufPool};

use super::WireError;
use super::banner::Banner;
use super::codec::MalformedPayload;
use super::crypto::Direction;
use super::frame::{
    CRC_LEN, EPILOGUE_CRC_LEN, EPILOGUE_SECURE_LEN, FrameLayout, INLINE_LEN, PREAMBLE_LEN, SECURE_HEAD_LEN,
    SegmentLimits, TAG_LEN, Tag, padded, read_status, segment_crc,
};
use super::header::{HEADER_LEN, MessageHeader};

/// Staging buffer of an idle connection, in bytes.
const STAGING_SMALL: usize = 8 << 10;
/// Staging buffer of a busy connection, in bytes.
const STAGING_LARGE: usize = 256 << 10;
/// Number of large staging buffers in use beyond which payloads are copied out of them, and small buffers are used for
/// receiving: a small message that is kept pins the whole buffer it lies in.
const STAGING_OUT_MAX: usize = 48;
/// Receives below this size, in bytes, count as quiet; after [`QUIET_RECEIVES`] in a row the staging buffer becomes
/// small again.
const QUIET_BYTES: usize = STAGING_SMALL;
const QUIET_RECEIVES: u32 = 32;
/// Minimum length in bytes of a body that is received into a buffer of its own, if it is not there already.
const DIRECT_MIN: usize = 16 << 10;
/// Alignment of a message's data in a buffer of its own, in bytes.
const DATA_ALIGN: usize = 4096;
/// Minimum space in bytes for a receive.
const ROOM_MIN: usize = 2 << 10;
/// Size in bytes of the buffers for headers and short frames.
const ARENA_LEN: usize = 16 << 10;
/// Sizes in bytes of the body buffers, and the number of each that is kept.  The extra 8 KiB hold the headers, the
/// epilogue and the padding that aligns the data.
const BODIES: [(usize, usize); 4] = [(16 << 10, 256), (72 << 10, 128), (264 << 10, 32), (1032 << 10, 16)];

/// Buffer pools of the connections of one core.
#[derive(Debug)]
pub struct MessengerPools {
    small: BufPool,
    large: BufPool,
    arenas: BufPool,
    bodies: [BufPool; BODIES.len()],
}

impl Default for MessengerPools {
    fn default() -> Self {
        Self {
            small: BufPool::new(STAGING_SMALL, 1024),
            large: BufPool::new(STAGING_LARGE, 2 * STAGING_OUT_MAX),
            arenas: BufPool::new(ARENA_LEN, 256),
            bodies: BODIES.map(|(size, keep)| BufPool::new(size, keep)),
        }
    }
}

impl MessengerPools {
    /// Creates the pools.  Memory is allocated on use.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty buffer with a capacity of at least `len` bytes, from a pool if one has buffers large enough.
    pub fn get(&self, len: usize) -> BufMut {
        match self.bodies.iter().find(|pool| pool.buf_size() >= len) {
            Some(pool) => pool.get(),
            None => BufMut::with_capacity(len),
        }
    }

    /// Returns an empty buffer for headers and short frames.
    pub(super) fn arena(&self) -> BufMut {
        self.arenas.get()
    }

    /// Returns the number of body buffers in use.
    pub fn bodies_out(&self) -> usize {
        self.bodies.iter().map(BufPool::outstanding).sum()
    }

    fn crowded(&self) -> bool {
        self.large.outstanding() > STAGING_OUT_MAX
    }
}

/// First segment of a frame: a control payload or a message header.
#[derive(Debug, Clone)]
enum First {
    /// Segment as received.
    Buf(Buf),
    /// Bytes that were sent with the preamble in secure mode.
    Inline([u8; INLINE_LEN], usize),
    /// Message header, parsed in place.
    Header(MessageHeader),
}

/// Complete frame.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Tag of the frame.
    pub tag: Tag,
    first: First,
    /// Front, middle and data segments of a message; `None` otherwise.
    pub segments: [Option<Buf>; 3],
}

impl Frame {
    /// Returns a control frame's payload; empty for a message, whose first segment is its [`header`](Self::header).
    #[inline]
    pub fn payload(&self) -> &[u8] {
        match &self.first {
            First::Buf(buf) => buf,
            First::Inline(bytes, len) => &bytes[..*len],
            First::Header(_) => &[],
        }
    }

    /// Returns the message header.
    ///
    /// # Errors
    /// When the first segment is not a header.
    #[inline]
    pub fn header(&self) -> Result<MessageHeader, MalformedPayload> {
        match &self.first {
            First::Header(header) => Ok(*header),
            _ => MessageHeader::decode(self.payload()),
        }
    }
}

/// Result of parsing the received bytes.
#[derive(Debug)]
pub enum ParseProgress {
    /// Complete frame; more may follow.
    Frame(Frame),
    /// More bytes must be received.
    NeedInput,
    /// A message waits for admission.
    NotAdmitted,
}

/// Buffer to receive into.
#[derive(Debug)]
pub struct FrameBuffer {
    /// Receive buffer.
    pub buf: BufMut,
    /// Receive until it is full: it belongs to one body.
    pub all: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Expecting a preamble.
    Head,
    /// Preamble parsed; the body has not been admitted.
    Announced(FrameLayout, [u8; INLINE_LEN]),
    /// Expecting the body.
    Body(FrameLayout, [u8; INLINE_LEN]),
}

/// Frame decoder of one direction of a connection.
pub struct FrameDecoder {
    pools: Rc<MessengerPools>,
    limits: SegmentLimits,
    checksum: bool,
    crypto: Option<Direction>,
    state: State,
    /// Bytes received and not parsed yet; `None` during a receive into it.
    staging: Option<BufMut>,
    /// Partly received body in a buffer of its own; also `None` during a receive into it.
    body: Option<BufMut>,
    /// Set while the receive in flight is for the body.
    receiving_body: bool,
    busy: bool,
    quiet: u32,
}

impl FrameDecoder {
    /// Creates a decoder in crc mode; `checksum` tells whether segment checksums are verified, and must match the
    /// peer's setting.
    pub fn new(pools: Rc<MessengerPools>, limits: SegmentLimits, checksum: bool) -> Self {
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

    /// Sets the frame limits from here on.
    pub fn set_limits(&mut self, limits: SegmentLimits) {
        self.limits = limits;
    }

    /// Switches to secure mode from the next frame on.
    pub fn secure(&mut self, direction: Direction) {
        self.crypto = Some(direction);
    }

    /// Returns the buffer to receive into, after [`next`](Self::next) returned `NeedInput`.
    pub fn want(&mut self) -> FrameBuffer {
        if let Some(body) = self.body.take() {
            self.receiving_body = true;
            return FrameBuffer { buf: body, all: true };
        }
        let mut staging = self.staging.take().expect("one receive at a time");
        let large = self.busy && !self.pools.crowded();
        let (wanted, room_min) =
            if large { (&self.pools.large, STAGING_LARGE / 4) } else { (&self.pools.small, ROOM_MIN) };
        let room = staging.reclaim().then(|| staging.capacity());
        if room.is_some_and(|room| room != wanted.buf_size()) || staging.spare() < room_min {
            let mut fresh = wanted.get();
            if staging.len() + ROOM_MIN > fresh.capacity() {
                // Only bodies below the direct limit are kept here, so a large buffer always has space for them.
                fresh = self.pools.large.get();
            }
            fresh.clear();
            fresh.extend_from_slice(&staging);
            staging = fresh;
        }
        FrameBuffer { buf: staging, all: false }
    }

    /// Returns the buffer of [`want`](Self::want), into which `got` bytes were received.
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

    /// Copies some of `bytes` in as if they had just been received, after [`next`](Self::next) returned `NeedInput`;
    /// returns the number of bytes taken.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let mut want = self.want();
        let len = want.buf.spare().min(bytes.len());
        want.buf.extend_from_slice(&bytes[..len]);
        self.received(want.buf, len);
        len
    }

    /// Returns true if the stream may end here: no frame is partly received.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.state, State::Head) && self.staging.as_ref().is_some_and(|staging| staging.is_empty())
    }

    /// Returns the peer's banner, which precedes all frames, and its bytes; `None` if more bytes are needed.
    pub fn banner(&mut self) -> Result<Option<(Banner, Buf)>, WireError> {
        let staging = self.staging.as_mut().expect("nothing is being received");
        let found = Banner::decode(staging)?;
        Ok(found.map(|(banner, len)| (banner, staging.split_to(len))))
    }

    /// Returns the next frame.  `admit` is called, once or more, before memory is allocated for a message's body.  The
    /// raw bytes of a frame in crc mode are passed to `seen`.
    ///
    /// # Errors
    /// When the bytes are not a frame, or not an accepted one.  The connection cannot continue.
    pub fn next(
        &mut self,
        mut admit: impl FnMut(&FrameLayout) -> bool,
        mut seen: impl FnMut(&[u8]),
    ) -> Result<ParseProgress, WireError> {
        loop {
            match self.state {
                State::Head => {
                    let staging = self.staging.as_mut().expect("nothing is being received");
                    let mut inline = [0; INLINE_LEN];
                    let layout = match &mut self.crypto {
                        None => {
                            let Some(head) = staging.first_chunk::<PREAMBLE_LEN>() else {
                                return Ok(ParseProgress::NeedInput);
                            };
                            let layout = FrameLayout::read(head, &self.limits)?;
                            seen(head);
                            staging.advance(PREAMBLE_LEN);
                            let len = layout.first_crc_len() + layout.rest_crc_len();
                            if layout.tag == Tag::Message && staging.len() >= len && !self.pools.crowded() {
                                if !admit(&layout) {
                                    self.state = State::Announced(layout, inline);
                                    return Ok(ParseProgress::NotAdmitted);
                                }
                                match cut_message(&layout, staging, self.checksum)? {
                                    Some(frame) => return Ok(ParseProgress::Frame(frame)),
                                    None => continue,
                                }
                            }
                            layout
                        }
                        Some(crypto) => {
                            if staging.len() < SECURE_HEAD_LEN {
                                return Ok(ParseProgress::NeedInput);
                            }
                            let head = &mut staging[..SECURE_HEAD_LEN];
                            crypto.open(head)?;
                            let preamble = head.first_chunk::<PREAMBLE_LEN>().expect("a whole head");
                            let layout = FrameLayout::read(preamble, &self.limits)?;
                            inline.copy_from_slice(&head[PREAMBLE_LEN..PREAMBLE_LEN + INLINE_LEN]);
                            staging.advance(SECURE_HEAD_LEN);
                            layout
                        }
                    };
                    self.state = State::Announced(layout, inline);
                }
                State::Announced(layout, inline) => {
                    if layout.tag == Tag::Message && !admit(&layout) {
                        return Ok(ParseProgress::NotAdmitted);
                    }
                    self.state = State::Body(layout, inline);
                }
                State::Body(layout, inline) => {
                    let Some(body) = self.take_body(&layout)? else { return Ok(ParseProgress::NeedInput) };
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
                        return Ok(ParseProgress::Frame(frame));
                    }
                }
            }
        }
    }

    /// Returns the decrypted body of a frame once it is complete; otherwise prepares the buffer for the rest.
    #[inline]
    fn take_body(&mut self, layout: &FrameLayout) -> Result<Option<Buf>, WireError> {
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

    /// Splits a body in crc mode into its segments; `None` when the sender aborted the frame.
    fn cut_plain(&self, layout: &FrameLayout, mut body: Buf) -> Result<Option<Frame>, WireError> {
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

/// Compares a segment's checksum with the one at the front of `said`.
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

/// Cuts a message in crc mode out of the staging buffer, which holds all of it; `None` when the sender aborted it.
///
/// Fast path of most messages: the header is parsed in place, and only non-empty segments take a reference to the
/// memory.
#[inline]
fn cut_message(layout: &FrameLayout, staging: &mut BufMut, checksum: bool) -> Result<Option<Frame>, WireError> {
    let (tag, len) = (Tag::Message, layout.lens[0] as usize);
    let first = match &staging[..len] {
        header if len == HEADER_LEN => First::Header(MessageHeader::decode(header).expect("as long as a header")),
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

/// Splits a decrypted body into its segments; `None` when the sender aborted the frame.
fn cut_opened(layout: &FrameLayout, inline: &[u8; INLINE_LEN], mut body: Buf) -> Result<Option<Frame>, WireError> {
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
