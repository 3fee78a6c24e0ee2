//! The bytes of msgr2.1: banner, frames, control payloads, message headers, and the two ways to protect them.
//!
//! Nothing here does I/O or knows time.  Integers are little-endian unless said otherwise.  What is implemented, and
//! what of Ceph's protocol is left out, is in `docs/formats/msgr2.md`; section names in comments are those of Ceph's
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
pub use codec::{Malformed, Reader, Writer};
pub use crypto::{Direction, SecretTooShort};
pub use decode::{Decoder, Frame, Next, Pools, Want};
pub use encode::Encoder;
pub use frame::{Layout, Limits, Tag};
pub use header::Header;

/// Why what was received is not a frame of this protocol, or not one that is taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not the banner.
    #[error("the peer does not speak msgr2: its banner begins with {0:02x?}")]
    BadBanner([u8; 8]),
    /// The banner's payload is not what version 2 has.
    #[error("the banner announces {0} bytes of features, and 16 to {max} are taken", max = banner::PAYLOAD_MAX)]
    BadBannerLength(u16),
    /// A preamble's checksum does not match.
    #[error("a frame's preamble has checksum {found:#010x}, and says {said:#010x}")]
    BadPreambleCrc {
        /// Calculated from what was received.
        found: u32,
        /// Stated by the peer.
        said: u32,
    },
    /// A tag that is not defined, or not offered.
    #[error("a frame has the unknown tag {0}")]
    UnknownTag(u8),
    /// Flags that were not agreed upon.
    #[error("a frame has flags {0:#04x}, and none were agreed upon")]
    BadFlags(u8),
    /// The number of segments, or an empty last one.
    #[error("a frame of {count} segments, the last of {last} bytes, is not allowed for {tag:?}")]
    BadSegments {
        /// Which frame.
        tag: Tag,
        /// Segments.
        count: u8,
        /// Bytes of the last.
        last: u32,
    },
    /// A segment is longer than this side takes.
    #[error("segment {segment} of a {tag:?} frame has {len} bytes, and at most {max} are taken")]
    TooLong {
        /// Which frame.
        tag: Tag,
        /// Which segment, from 0.
        segment: usize,
        /// Bytes announced.
        len: u32,
        /// Bytes taken at most.
        max: u32,
    },
    /// A segment's checksum does not match.
    #[error("segment {segment} of a {tag:?} frame has checksum {found:#010x}, and its epilogue says {said:#010x}")]
    BadSegmentCrc {
        /// Which frame.
        tag: Tag,
        /// Which segment, from 0.
        segment: usize,
        /// Calculated from what was received.
        found: u32,
        /// Stated by the peer.
        said: u32,
    },
    /// The epilogue says neither complete nor aborted.
    #[error("a frame's epilogue has the status {0:#04x}")]
    BadStatus(u8),
    /// A frame was changed, replayed or left out, or is not from who has the key.
    #[error("a frame does not authenticate")]
    BadTag,
    /// So many frames were exchanged under one key that the next nonce was used already.
    #[error("the key of this connection is used up")]
    NonceUsedUp,
    /// A payload is not what its tag promises.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

#[cfg(test)]
mod tests;
