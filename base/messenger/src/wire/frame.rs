//! Frame format: the preamble, the on-wire length of each part, and the epilogue's status ("Frame format").

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use forebay_accel::crc32c;

use super::WireError;

/// Maximum number of segments of a frame.
pub const SEGMENTS_MAX: usize = 4;
/// Length of a preamble in bytes.
pub const PREAMBLE_LEN: usize = 32;
/// Length of a checksum in bytes.
pub const CRC_LEN: usize = 4;
/// Length of the epilogue in crc mode in bytes: the status, and checksums of all segments but the first.
pub const EPILOGUE_CRC_LEN: usize = 13;
/// Number of bytes of the first segment that are sent with the preamble in secure mode.
pub const INLINE_LEN: usize = 48;
/// Length of an AES-GCM tag in bytes.
pub const TAG_LEN: usize = 16;
/// Padding unit of segments in secure mode, in bytes.
pub const CIPHER_BLOCK: usize = 16;
/// Length of the epilogue in secure mode in bytes, without the tag.
pub const EPILOGUE_SECURE_LEN: usize = 16;
/// Length in bytes of the preamble block in secure mode: preamble, inline bytes and tag.
pub const SECURE_HEAD_LEN: usize = PREAMBLE_LEN + INLINE_LEN + TAG_LEN;

/// Epilogue status: the frame is complete.
pub const STATUS_COMPLETE: u8 = 0x0e;
/// Epilogue status: the sender aborted the frame while sending it; it must be dropped.
pub const STATUS_ABORTED: u8 = 0x01;
/// Mask of the status bits that distinguish the two.
pub const STATUS_MASK: u8 = 0x0f;

/// Frame tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tag {
    /// Hello: the sender's type, and the peer's address as seen by the sender.
    Hello = 1,
    /// Authentication request of the client.
    AuthRequest = 2,
    /// Rejection by a server that accepts other methods or modes.
    AuthBadMethod = 3,
    /// Next authentication step of the server.
    AuthReplyMore = 4,
    /// Next authentication step of the client.
    AuthRequestMore = 5,
    /// Authentication success.
    AuthDone = 6,
    /// Signature by which each side proves that the handshake was not changed in transit.
    AuthSignature = 7,
    /// Session request of a client.
    ClientIdent = 8,
    /// Session acceptance of a server.
    ServerIdent = 9,
    /// Session rejection by a server that requires more features.
    IdentMissingFeatures = 10,
    /// Request of a client to resume a session.
    SessionReconnect = 11,
    /// Reset by a server that does not know the session.
    SessionReset = 12,
    /// Retry request of a server that has seen a later reconnect attempt.
    SessionRetry = 13,
    /// Retry request of a server that has seen a later connection of this client.
    SessionRetryGlobal = 14,
    /// Session resumption by the server.
    SessionReconnectOk = 15,
    /// Wait request of a server that is connecting to the client itself.
    Wait = 16,
    /// Frame of a message.
    Message = 17,
    /// Keepalive request.
    Keepalive2 = 18,
    /// Keepalive acknowledgement.
    Keepalive2Ack = 19,
    /// Acknowledgement of messages.
    Ack = 20,
}

impl Tag {
    /// Tags in numerical order.
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

    /// Returns the tag with this number, if it is defined.
    #[inline]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

/// Segment descriptor in the preamble.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SegmentDesc {
    /// Length in bytes, without padding.
    pub len: U32,
    /// Alignment in bytes that the sender suggests.
    pub align: U16,
}

/// Preamble of a frame.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Preamble {
    /// Tag, of [`Tag`].
    pub tag: u8,
    /// Number of segments that follow: 1 to 4.
    pub count: u8,
    /// Segment descriptors.
    pub segments: [SegmentDesc; SEGMENTS_MAX],
    /// Flags for compression; always zero here.
    pub flags: u8,
    /// Reserved; zero.
    pub reserved: u8,
    /// CRC32C of the preceding bytes, with initial value zero and not inverted.
    pub crc: U32,
}

const _: () = assert!(size_of::<Preamble>() == PREAMBLE_LEN);

/// Computes the checksum of a preamble: CRC32C with initial value zero and no final inversion, as Ceph's function does.
#[inline]
pub fn preamble_crc(bytes: &[u8]) -> u32 {
    !crc32c::extend(u32::MAX, bytes)
}

/// Computes the checksum of a segment: CRC32C with initial value all ones and no final inversion.
#[inline]
pub fn segment_crc<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut parts = parts.into_iter();
    let first = parts.next().unwrap_or_default();
    !parts.fold(crc32c::crc32c(first), crc32c::extend)
}

/// Segment size limits of one side, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentLimits {
    /// Control payload; also each frame before the peer has authenticated.
    pub control_max: u32,
    /// Front segment of a message.
    pub front_max: u32,
    /// Middle segment of a message.
    pub middle_max: u32,
    /// Data segment of a message.
    pub data_max: u32,
}

impl Default for SegmentLimits {
    fn default() -> Self {
        Self { control_max: 16 << 10, front_max: 16 << 20, middle_max: 4 << 20, data_max: 64 << 20 }
    }
}

/// Validated content of a preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLayout {
    /// Tag of the frame.
    pub tag: Tag,
    /// Number of segments: 1 to 4.
    pub count: usize,
    /// Length of each segment in bytes, without padding; zero past `count`.
    pub lens: [u32; SEGMENTS_MAX],
}

/// Rounds up to a multiple of the cipher block.
pub const fn padded(len: usize) -> usize {
    len.next_multiple_of(CIPHER_BLOCK)
}

impl FrameLayout {
    /// Creates the layout of a frame with these segment lengths; trailing empty segments are left out.
    #[inline]
    pub fn new(tag: Tag, lens: [u32; SEGMENTS_MAX]) -> Self {
        let count = lens.iter().rposition(|&len| len > 0).map_or(1, |last| last + 1);
        Self { tag, count, lens }
    }

    /// Encodes the preamble.
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

    /// Decodes a preamble, and checks it against the limits.
    #[inline]
    pub fn read(bytes: &[u8; PREAMBLE_LEN], limits: &SegmentLimits) -> Result<Self, WireError> {
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

    /// Returns the number of bytes of all segments but the first: the payload of a message.
    #[inline]
    pub fn payload_len(&self) -> usize {
        self.lens[1..].iter().map(|&len| len as usize).sum()
    }

    /// Returns the number of bytes of the first segment in crc mode, with its checksum.
    #[inline]
    pub fn first_crc_len(&self) -> usize {
        match self.lens[0] as usize {
            0 => 0,
            len => len + CRC_LEN,
        }
    }

    /// Returns the number of bytes of the other segments in crc mode, with the epilogue.
    #[inline]
    pub fn rest_crc_len(&self) -> usize {
        if self.count > 1 { self.payload_len() + EPILOGUE_CRC_LEN } else { 0 }
    }

    /// Returns the number of bytes of the first segment in secure mode that are not sent with the preamble, with the
    /// tag.
    pub fn first_secure_len(&self) -> usize {
        match padded(self.lens[0] as usize).saturating_sub(INLINE_LEN) {
            0 => 0,
            len => len + TAG_LEN,
        }
    }

    /// Returns the number of bytes of the other segments in secure mode, with the epilogue and the tag.
    pub fn rest_secure_len(&self) -> usize {
        let segments: usize = self.lens[1..].iter().map(|&len| padded(len as usize)).sum();
        if self.count > 1 { segments + EPILOGUE_SECURE_LEN + TAG_LEN } else { 0 }
    }
}

/// Decodes an epilogue's status: `true` when the frame is complete, `false` when it must be dropped.
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
        let bytes = FrameLayout::new(Tag::Hello, [28, 0, 0, 0]).preamble([8, 0, 0, 0]);
        assert_eq!(bytes[..8], [1, 1, 28, 0, 0, 0, 8, 0]);
        assert!(bytes[8..28].iter().all(|&byte| byte == 0));
        assert_eq!(
            FrameLayout::read(&bytes, &SegmentLimits::default()),
            Ok(FrameLayout::new(Tag::Hello, [28, 0, 0, 0]))
        );
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
        let bytes = FrameLayout::new(Tag::Message, [41, 5, 0, 4096]).preamble([8, 8, 8, 4096]);
        for bit in 0..PREAMBLE_LEN * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(
                FrameLayout::read(&changed, &SegmentLimits::default()),
                Err(WireError::BadPreambleCrc { .. })
            ));
        }
    }

    fn signed(preamble: Preamble) -> [u8; PREAMBLE_LEN] {
        let mut preamble = preamble;
        preamble.crc = preamble_crc(&preamble.as_bytes()[..28]).into();
        zerocopy::transmute!(preamble)
    }

    #[test]
    fn impossible_frames_are_refused() {
        let limits = SegmentLimits::default();
        let desc = |len: u32| SegmentDesc { len: len.into(), align: 8.into() };
        let base =
            Preamble { tag: 17, count: 4, segments: [desc(41), desc(0), desc(0), desc(9)], ..Default::default() };
        assert!(FrameLayout::read(&signed(base), &limits).is_ok());
        let refused = |preamble| FrameLayout::read(&signed(preamble), &limits).expect_err("it is refused");
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
        let control = FrameLayout::new(Tag::Ack, [8, 0, 0, 0]);
        assert_eq!((control.first_crc_len(), control.rest_crc_len()), (12, 0));
        assert_eq!((control.first_secure_len(), control.rest_secure_len()), (0, 0));
        let long = FrameLayout::new(Tag::ClientIdent, [49, 0, 0, 0]);
        assert_eq!(long.first_secure_len(), 16 + 16);
        let message = FrameLayout::new(Tag::Message, [41, 5, 0, 4096]);
        assert_eq!((message.first_crc_len(), message.rest_crc_len()), (45, 5 + 4096 + 13));
        assert_eq!((message.first_secure_len(), message.rest_secure_len()), (0, 16 + 4096 + 16 + 16));
        let empty = FrameLayout::new(Tag::Message, [41, 0, 0, 0]);
        assert_eq!((empty.count, empty.rest_crc_len(), empty.rest_secure_len()), (1, 0, 0));
    }
}
