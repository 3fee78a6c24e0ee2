//! The banner: what both sides say first ("Banner").

use super::WireError;
use super::codec::Reader;

/// How it begins.
pub const PREFIX: &[u8; 8] = b"ceph v2\n";
/// Bytes before the features.
pub const HEAD_LEN: usize = PREFIX.len() + 2;
/// Bytes of features that are sent.
const PAYLOAD_LEN: u16 = 16;
/// Bytes of features that are taken, for what later versions may append.
pub const PAYLOAD_MAX: u16 = 256;

/// Features of the protocol itself, a space of its own.
pub mod feature {
    /// The frames of msgr2.1.
    pub const REVISION_1: u64 = 1 << 0;
    /// Compression on the wire; not offered here.
    pub const COMPRESSION: u64 = 1 << 1;
}

/// What both sides say first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Banner {
    /// Features that the sender knows.
    pub supported: u64,
    /// Features without which it does not talk.
    pub required: u64,
}

impl Banner {
    /// Ours: msgr2.1, and nothing older.
    pub const OURS: Self = Self { supported: feature::REVISION_1, required: feature::REVISION_1 };

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let parts =
            [&PREFIX[..], &PAYLOAD_LEN.to_le_bytes(), &self.supported.to_le_bytes(), &self.required.to_le_bytes()];
        parts.concat()
    }

    /// Reads one from the beginning of `bytes`; the banner and its length, or `None` when there are too few bytes
    /// yet.  A beginning that cannot become a banner is refused at its first wrong byte.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let known = bytes.len().min(PREFIX.len());
        if bytes[..known] != PREFIX[..known] {
            let mut begins = [0; 8];
            begins[..known].copy_from_slice(&bytes[..known]);
            return Err(WireError::BadBanner(begins));
        }
        let Some(head) = bytes.first_chunk::<HEAD_LEN>() else { return Ok(None) };
        let len = u16::from_le_bytes([head[8], head[9]]);
        if !(PAYLOAD_LEN..=PAYLOAD_MAX).contains(&len) {
            return Err(WireError::BadBannerLength(len));
        }
        let whole = HEAD_LEN + usize::from(len);
        if bytes.len() < whole {
            return Ok(None);
        }
        let mut reader = Reader::new(&bytes[HEAD_LEN..whole], "a banner");
        Ok(Some((Self { supported: reader.u64()?, required: reader.u64()? }, whole)))
    }

    /// Features that `peer` lacks and we require, or requires and we lack.
    pub fn disagreement(&self, peer: &Self) -> Option<(u64, u64)> {
        let (lacks, wants) = (self.required & !peer.supported, peer.required & !self.supported);
        (lacks != 0 || wants != 0).then_some((lacks, wants))
    }
}
