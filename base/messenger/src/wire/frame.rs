//! Frames: the preamble, how long each part is on the wire, and the epilogue's states ("Frame format").

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use forebay_accel::crc32c;

use super::WireError;

/// Segments of a frame at most.
pub const SEGMENTS_MAX: usize = 4;
/// Bytes of a preamble.
pub const PREAMBLE_LEN: usize = 32;
/// Bytes of a checksum.
pub const CRC_LEN: usize = 4;
/// Bytes of the epilogue in crc mode: the status, and checksums of all segments but the first.
pub const EPILOGUE_CRC_LEN: usize = 13;
/// Bytes of the first segment that travel with the preamble in secure mode.
pub const INLINE_LEN: usize = 48;
/// Bytes of an AES-GCM tag.
pub const TAG_LEN: usize = 16;
/// Unit to which segments are padded in secure mode.
pub const CIPHER_BLOCK: usize = 16;
/// Bytes of the epilogue in secure mode, before the tag.
pub const EPILOGUE_SECURE_LEN: usize = 16;
/// Bytes of the preamble as it travels in secure mode.
pub const SECURE_HEAD_LEN: usize = PREAMBLE_LEN + INLINE_LEN + TAG_LEN;

/// The epilogue's status: the frame is whole.
pub const STATUS_COMPLETE: u8 = 0x0e;
/// The epilogue's status: the sender gave the frame up while sending it; it must be dropped.
pub const STATUS_ABORTED: u8 = 0x01;
/// The part of the status that tells the two apart.
pub const STATUS_MASK: u8 = 0x0f;

/// The kinds of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tag {
    /// Who we are, and where we see the peer.
    Hello = 1,
    /// The client picks a method of authentication.
    AuthRequest = 2,
    /// The server takes other methods.
    AuthBadMethod = 3,
    /// The server's next step of authentication.
    AuthReplyMore = 4,
    /// The client's next step of authentication.
    AuthRequestMore = 5,
    /// Authentication is done.
    AuthDone = 6,
    /// Both prove that nobody changed what was said before.
    AuthSignature = 7,
    /// The client begins a session.
    ClientIdent = 8,
    /// The server agrees to it.
    ServerIdent = 9,
    /// The server wants features that the client lacks.
    IdentMissingFeatures = 10,
    /// The client goes on with a session.
    SessionReconnect = 11,
    /// The server does not know that session.
    SessionReset = 12,
    /// The server has seen a later attempt to reconnect.
    SessionRetry = 13,
    /// The server has seen a later connection of this client.
    SessionRetryGlobal = 14,
    /// The session goes on.
    SessionReconnectOk = 15,
    /// The server is just connecting to the client itself.
    Wait = 16,
    /// A message.
    Message = 17,
    /// Are you there?
    Keepalive2 = 18,
    /// Yes.
    Keepalive2Ack = 19,
    /// Messages have arrived.
    Ack = 20,
}

impl Tag {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Hello,
        Self::AuthRequest,
        Self::AuthBadMethod,
        Self::AuthReplyMore,
        Self::AuthRequestMore,
        Self::AuthDone,
        Self::AuthSignature,
        Self::ClientIdent,
        Self::ServerIdent,
        Self::IdentMissingFeatures,
        Self::SessionReconnect,
        Self::SessionReset,
        Self::SessionRetry,
        Self::SessionRetryGlobal,
        Self::SessionReconnectOk,
        Self::Wait,
        Self::Message,
        Self::Keepalive2,
        Self::Keepalive2Ack,
        Self::Ack,
    ];

    /// The tag with this number.
    #[inline]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

/// A segment as the preamble describes it.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SegmentDesc {
    /// Bytes, without padding.
    pub len: U32,
    /// Alignment in bytes that the sender suggests.
    pub align: U16,
}

/// How a frame begins.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Preamble {
    /// One of [`Tag`].
    pub tag: u8,
    /// Segments that follow: 1 to 4.
    pub count: u8,
    /// What they are.
    pub segments: [SegmentDesc; SEGMENTS_MAX],
    /// Whether it is compressed; never, here.
    pub flags: u8,
    /// Zero.
    pub reserved: u8,
    /// CRC32C of what comes before, begun with zero and not inverted.
    pub crc: U32,
}

const _: () = assert!(size_of::<Preamble>() == PREAMBLE_LEN);

/// The checksum of a preamble: CRC32C begun with zero and not inverted at the end, which is how Ceph's function works.
#[inline]
pub fn preamble_crc(bytes: &[u8]) -> u32 {
    !crc32c::extend(u32::MAX, bytes)
}

/// The checksum of a segment: CRC32C begun with all ones and not inverted at the end.
#[inline]
pub fn segment_crc<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut parts = parts.into_iter();
    let first = parts.next().unwrap_or_default();
    !parts.fold(crc32c::crc32c(first), crc32c::extend)
}

/// What one side takes: bytes a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Payload of a control frame; also of each frame before the peer has authenticated.
    pub control_max: u32,
    /// Front segment of a message.
    pub front_max: u32,
    /// Middle segment of a message.
    pub middle_max: u32,
    /// Data segment of a message.
    pub data_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { control_max: 16 << 10, front_max: 16 << 20, middle_max: 4 << 20, data_max: 64 << 20 }
    }
}

/// What a preamble says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Which kind of frame.
    pub tag: Tag,
    /// Segments: 1 to 4.
    pub count: usize,
    /// Bytes of each segment, without padding; zero past `count`.
    pub lens: [u32; SEGMENTS_MAX],
}

/// Rounds up to whole cipher blocks.
pub const fn padded(len: usize) -> usize {
    len.next_multiple_of(CIPHER_BLOCK)
}

impl Layout {
    /// The layout of a frame with these segments: empty ones at the end are left out.
    #[inline]
    pub fn new(tag: Tag, lens: [u32; SEGMENTS_MAX]) -> Self {
        let count = lens.iter().rposition(|&len| len > 0).map_or(1, |last| last + 1);
        Self { tag, count, lens }
    }

    /// The preamble's bytes.
    #[inline]
    pub fn preamble(&self, aligns: [u16; SEGMENTS_MAX]) -> [u8; PREAMBLE_LEN] {
        let mut preamble = Preamble { tag: self.tag as u8, count: self.count as u8, ..Preamble::default() };
        let described = self.lens.iter().zip(aligns).take(self.count);
        for (segment, (&len, align)) in preamble.segments.iter_mut().zip(described) {
            *segment = SegmentDesc { len: len.into(), align: align.into() };
        }
        preamble.crc = preamble_crc(&preamble.as_bytes()[..PREAMBLE_LEN - CRC_LEN]).into();
        zerocopy::transmute!(preamble)
    }

    /// Reads a preamble, and holds it against what is taken.
    #[inline]
    pub fn read(bytes: &[u8; PREAMBLE_LEN], limits: &Limits) -> Result<Self, WireError> {
        let preamble: Preamble = zerocopy::transmute!(*bytes);
        let (found, said) = (preamble_crc(&bytes[..PREAMBLE_LEN - CRC_LEN]), preamble.crc.get());
        if found != said {
            return Err(WireError::BadPreambleCrc { found, said });
        }
        let tag = Tag::from_code(preamble.tag).ok_or(WireError::UnknownTag(preamble.tag))?;
        if preamble.flags != 0 {
            return Err(WireError::BadFlags(preamble.flags));
        }
        let count = usize::from(preamble.count);
        let most = if tag == Tag::Message { SEGMENTS_MAX } else { 1 };
        let last = preamble.segments.get(count.wrapping_sub(1)).map_or(0, |last| last.len.get());
        if !(1..=most).contains(&count) || (count > 1 && last == 0) {
            return Err(WireError::BadSegments { tag, count: preamble.count, last });
        }
        let mut lens = [0; SEGMENTS_MAX];
        for (at, (len, segment)) in lens.iter_mut().zip(&preamble.segments).take(count).enumerate() {
            *len = segment.len.get();
            let max = match (tag, at) {
                (Tag::Message, 1) => limits.front_max,
                (Tag::Message, 2) => limits.middle_max,
                (Tag::Message, 3) => limits.data_max,
                _ => limits.control_max,
            };
            if *len > max {
                return Err(WireError::TooLong { tag, segment: at, len: *len, max });
            }
        }
        Ok(Self { tag, count, lens })
    }

    /// Bytes of all segments but the first: what a message carries.
    #[inline]
    pub fn payload_len(&self) -> usize {
        self.lens[1..].iter().map(|&len| len as usize).sum()
    }

    /// Bytes of the first segment in crc mode, its checksum included.
    #[inline]
    pub fn first_crc_len(&self) -> usize {
        match self.lens[0] as usize {
            0 => 0,
            len => len + CRC_LEN,
        }
    }

    /// Bytes of the other segments in crc mode, the epilogue included.
    #[inline]
    pub fn rest_crc_len(&self) -> usize {
        if self.count > 1 { self.payload_len() + EPILOGUE_CRC_LEN } else { 0 }
    }

    /// Bytes of the first segment in secure mode that do not travel with the preamble, the tag included.
    pub fn first_secure_len(&self) -> usize {
        match padded(self.lens[0] as usize).saturating_sub(INLINE_LEN) {
            0 => 0,
            len => len + TAG_LEN,
        }
    }

    /// Bytes of the other segments in secure mode, the epilogue and the tag included.
    pub fn rest_secure_len(&self) -> usize {
        let segments: usize = self.lens[1..].iter().map(|&len| padded(len as usize)).sum();
        if self.count > 1 { segments + EPILOGUE_SECURE_LEN + TAG_LEN } else { 0 }
    }
}

/// What an epilogue's status says: `true` when the frame is whole, `false` when it is to be dropped.
#[inline]
pub fn read_status(status: u8) -> Result<bool, WireError> {
    match status & STATUS_MASK {
        STATUS_COMPLETE => Ok(true),
        STATUS_ABORTED => Ok(false),
        _ => Err(WireError::BadStatus(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preamble_is_what_ceph_writes() {
        // A hello of 28 bytes at alignment 8.
        let bytes = Layout::new(Tag::Hello, [28, 0, 0, 0]).preamble([8, 0, 0, 0]);
        assert_eq!(bytes[..8], [1, 1, 28, 0, 0, 0, 8, 0]);
        assert!(bytes[8..28].iter().all(|&byte| byte == 0));
        assert_eq!(Layout::read(&bytes, &Limits::default()), Ok(Layout::new(Tag::Hello, [28, 0, 0, 0])));
    }

    #[test]
    fn checksums_are_cephs() {
        // `ceph_crc32c(-1, ...)` and `ceph_crc32c(0, ...)` are the register without its inversions.
        assert_eq!(segment_crc([&b"123456789"[..]]), !0xE306_9283);
        assert_eq!(segment_crc([&b"1234"[..], b"", b"56789"]), !0xE306_9283);
        assert_eq!(segment_crc([]), 0xFFFF_FFFF);
        assert_eq!(preamble_crc(&[0; 28]), 0);
    }

    #[test]
    fn every_change_of_a_preamble_is_noticed() {
        let bytes = Layout::new(Tag::Message, [41, 5, 0, 4096]).preamble([8, 8, 8, 4096]);
        for bit in 0..PREAMBLE_LEN * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(Layout::read(&changed, &Limits::default()), Err(WireError::BadPreambleCrc { .. })));
        }
    }

    fn signed(preamble: Preamble) -> [u8; PREAMBLE_LEN] {
        let mut preamble = preamble;
        preamble.crc = preamble_crc(&preamble.as_bytes()[..28]).into();
        zerocopy::transmute!(preamble)
    }

    #[test]
    fn impossible_frames_are_refused() {
        let limits = Limits::default();
        let desc = |len: u32| SegmentDesc { len: len.into(), align: 8.into() };
        let base =
            Preamble { tag: 17, count: 4, segments: [desc(41), desc(0), desc(0), desc(9)], ..Default::default() };
        assert!(Layout::read(&signed(base), &limits).is_ok());
        let refused = |preamble| Layout::read(&signed(preamble), &limits).expect_err("it is refused");
        for tag in [0, 21, 22, 255] {
            assert_eq!(refused(Preamble { tag, ..base }), WireError::UnknownTag(tag));
        }
        assert_eq!(refused(Preamble { flags: 1, ..base }), WireError::BadFlags(1));
        for count in [0, 3, 5, 255] {
            assert!(matches!(refused(Preamble { count, ..base }), WireError::BadSegments { .. }));
        }
        assert!(matches!(refused(Preamble { tag: 1, ..base }), WireError::BadSegments { .. }));
        for at in 0..4 {
            let mut preamble = base;
            preamble.segments[at] = desc(u32::MAX);
            assert!(matches!(refused(preamble), WireError::TooLong { segment, .. } if segment == at));
        }
    }

    #[test]
    fn lengths_on_the_wire() {
        let control = Layout::new(Tag::Ack, [8, 0, 0, 0]);
        assert_eq!((control.first_crc_len(), control.rest_crc_len()), (12, 0));
        assert_eq!((control.first_secure_len(), control.rest_secure_len()), (0, 0));
        let long = Layout::new(Tag::ClientIdent, [49, 0, 0, 0]);
        assert_eq!(long.first_secure_len(), 16 + 16);
        let message = Layout::new(Tag::Message, [41, 5, 0, 4096]);
        assert_eq!((message.first_crc_len(), message.rest_crc_len()), (45, 5 + 4096 + 13));
        assert_eq!((message.first_secure_len(), message.rest_secure_len()), (0, 16 + 4096 + 16 + 16));
        let empty = Layout::new(Tag::Message, [41, 0, 0, 0]);
        assert_eq!((empty.count, empty.rest_crc_len(), empty.rest_secure_len()), (1, 0, 0));
    }
}
