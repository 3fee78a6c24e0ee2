//! Banner: the first bytes that both sides send ("Banner").

use super::WireError;
use super::codec::PayloadReader;

/// First bytes of a banner.
pub const PREFIX: &[u8; 8] = b"ceph v2\n";
/// Length in bytes of what precedes the features.
pub const HEAD_LEN: usize = PREFIX.len() + 2;
/// Length in bytes of the features that are sent.
const PAYLOAD_LEN: u16 = 16;
/// Maximum length in bytes of the features that are accepted; later versions may append some.
pub const PAYLOAD_MAX: u16 = 256;

/// Protocol features, a number space of its own.
pub mod feature {
    /// Frame format of msgr2.1.
    pub const REVISION_1: u64 = 1 << 0;
    /// On-wire compression; not offered here.
    pub const COMPRESSION: u64 = 1 << 1;
}

/// Banner of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Banner {
    /// Features that the sender supports.
    pub supported: u64,
    /// Features that the sender requires.
    pub required: u64,
}

impl Banner {
    /// Banner of this implementation: msgr2.1, and nothing older.
    pub const OURS: Self = Self { supported: feature::REVISION_1, required: feature::REVISION_1 };

    /// Encodes the banner.
    pub fn encode(&self) -> Vec<u8> {
        let parts =
            [&PREFIX[..], &PAYLOAD_LEN.to_le_bytes(), &self.supported.to_le_bytes(), &self.required.to_le_bytes()];
        parts.concat()
    }

    /// Decodes a banner from the beginning of `bytes`.  Returns the banner and its length, or `None` if more bytes are
    /// needed.  A beginning that cannot become a banner is rejected at its first wrong byte.
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
        let mut reader = PayloadReader::new(&bytes[HEAD_LEN..whole], "a banner");
        Ok(Some((Self { supported: reader.u64()?, required: reader.u64()? }, whole)))
    }

    /// Returns the features that `peer` lacks and `self` requires, and those that `peer` requires and `self` lacks;
    /// `None` if there are neither.
    pub fn disagreement(&self, peer: &Self) -> Option<(u64, u64)> {
        let (lacks, wants) = (self.required & !peer.supported, peer.required & !self.supported);
        (lacks != 0 || wants != 0).then_some((lacks, wants))
    }
}
