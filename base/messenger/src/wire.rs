//! Wire format of msgr2.1: banner, frames, control payloads, message headers, and the crc and secure modes.
//!
//! Free of I/O and clocks.  Integers are little-endian unless said otherwise.  `docs/formats/msgr2.md` lists which
//! parts of Ceph's protocol are implemented and which are left out; section names in comments are those of Ceph's
//! `doc/dev/msgr2.rst`.

pub mod addr;
pub mod banner;
pub mod codec;
pub mod control;
pub mod crypto;
pub mod decode;
pub mod encode;
pub mod frame;
pub mod header;

pub use addr::{AddrKind, EntityAddr, entity};
pub use banner::Banner;
pub use codec::{MalformedPayload, NewerEncoding, PayloadReader, PayloadWriter};
pub use crypto::{Direction, SecretTooShort};
pub use decode::{Frame, FrameBuffer, FrameDecoder, MessengerPools, ParseProgress};
pub use encode::Encoder;
pub use frame::{FrameLayout, SegmentLimits, Tag};
pub use header::MessageHeader;

/// Decoding error: received bytes that are not a frame of this protocol, or not an accepted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Banner prefix mismatch; the first bytes received.
    #[error("the peer does not speak msgr2: its banner begins with {0:02x?}")]
    BadBanner([u8; 8]),
    /// Banner payload length out of range.
    #[error("banner payload of {0} bytes is not between 16 and {max}", max = banner::PAYLOAD_MAX)]
    BadBannerLength(u16),
    /// Preamble checksum mismatch.
    #[error("frame preamble checksum mismatch: calculated {found:#010x}, stated {said:#010x}")]
    BadPreambleCrc {
        /// Checksum calculated from the received bytes.
        found: u32,
        /// Checksum stated by the peer.
        said: u32,
    },
    /// Frame tag that is not defined, or not offered.
    #[error("unknown frame tag {0}")]
    UnknownTag(u8),
    /// Frame flags that were not negotiated.
    #[error("frame flags {0:#04x} were not negotiated")]
    BadFlags(u8),
    /// Invalid number of segments, or an empty last one.
    #[error("invalid {tag:?} frame: {count} segments, the last of {last} bytes")]
    BadSegments {
        /// Tag of the frame.
        tag: Tag,
        /// Number of segments.
        count: u8,
        /// Length of the last segment in bytes.
        last: u32,
    },
    /// Segment longer than the limit.
    #[error("segment {segment} of a {tag:?} frame has {len} bytes, more than the limit of {max}")]
    TooLong {
        /// Tag of the frame.
        tag: Tag,
        /// Index of the segment, from 0.
        segment: usize,
        /// Length announced, in bytes.
        len: u32,
        /// Limit in bytes.
        max: u32,
    },
    /// Segment checksum mismatch.
    #[error("checksum mismatch in segment {segment} of a {tag:?} frame: calculated {found:#010x}, stated {said:#010x}")]
    BadSegmentCrc {
        /// Tag of the frame.
        tag: Tag,
        /// Index of the segment, from 0.
        segment: usize,
        /// Checksum calculated from the received bytes.
        found: u32,
        /// Checksum stated by the peer.
        said: u32,
    },
    /// Epilogue status that is neither complete nor aborted.
    #[error("invalid frame epilogue status {0:#04x}")]
    BadStatus(u8),
    /// Authentication tag mismatch: the frame was changed, replayed or left out, or its sender does not have the key.
    #[error("frame authentication tag mismatch: changed, replayed or missing frame, or wrong key")]
    BadTag,
    /// Nonce space exhausted: the next nonce under this key was used already.
    #[error("nonces of the connection key are exhausted")]
    NonceUsedUp,
    /// Control payload that does not match its tag's format.
    #[error(transparent)]
    Malformed(#[from] MalformedPayload),
}

#[cfg(test)]
mod tests;
