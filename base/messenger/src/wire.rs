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
pub use codec::{Malformed, NewerEncoding, Reader, Writer};
pub use crypto::{Direction, SecretTooShort};
pub use decode::{Decoder, Frame, Next, Pools, Want};
pub use encode::Encoder;
pub use frame::{Layout, Limits, Tag};
pub use header::Header;

/// Decoding error: received bytes that are not a frame of this protocol, or not an accepted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Banner prefix mismatch; the first bytes received.
    #[error("the peer does not speak msgr2: its banner begins with {0:02x?}")]
    BadBanner([u8; 8]),
    /// Banner payload length out of range.
    #[error("the banner announces {0} bytes of features, and 16 to {max} are taken", max = banner::PAYLOAD_MAX)]
    BadBannerLength(u16),
    /// Preamble checksum mismatch.
    #[error("a frame's preamble has checksum {found:#010x}, and says {said:#010x}")]
    BadPreambleCrc {
        /// Checksum calculated from the received bytes.
        found: u32,
        /// Checksum stated by the peer.
        said: u32,
    },
    /// Frame tag that is not defined, or not offered.
    #[error("a frame has the unknown tag {0}")]
    UnknownTag(u8),
    /// Frame flags that were not negotiated.
    #[error("a frame has flags {0:#04x}, and none were agreed upon")]
    BadFlags(u8),
    /// Invalid number of segments, or an empty last one.
    #[error("a frame of {count} segments, the last of {last} bytes, is not allowed for {tag:?}")]
    BadSegments {
        /// Tag of the frame.
        tag: Tag,
        /// Number of segments.
        count: u8,
        /// Length of the last segment in bytes.
        last: u32,
    },
    /// Segment longer than the limit.
    #[error("segment {segment} of a {tag:?} frame has {len} bytes, and at most {max} are taken")]
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
    #[error("segment {segment} of a {tag:?} frame has checksum {found:#010x}, and its epilogue says {said:#010x}")]
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
    #[error("a frame's epilogue has the status {0:#04x}")]
    BadStatus(u8),
    /// Authentication tag mismatch: the frame was changed, replayed or left out, or its sender does not have the key.
    #[error("a frame does not authenticate")]
    BadTag,
    /// Nonce space exhausted: the next nonce under this key was used already.
    #[error("the key of this connection is used up")]
    NonceUsedUp,
    /// Control payload that does not match its tag's format.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

#[cfg(test)]
mod tests;
