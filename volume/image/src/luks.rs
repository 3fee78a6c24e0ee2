//! Headers of encrypted images, as `rbd encryption format` and `cryptsetup` write them at byte 0. Images are not
//! decrypted here: detection only serves to report that hosts get the encrypted bytes.

use std::fmt;

/// Length of the header part that identifies the format, in bytes.
pub const LUKS_HEADER_LEN: usize = 8;

/// Magic of a LUKS header, in both versions.
const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Magic of librbd's header of a clone that is encrypted with a key of its own.
const CLONE_MAGIC: [u8; 6] = *b"RBDL\xba\xbe";

/// Encryption header of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LuksHeader {
    /// Version of the format, 1 or 2.
    pub version: u16,
    /// Set for librbd's header of a clone with a key of its own, which only librbd understands.
    pub clone: bool,
}

impl LuksHeader {
    /// Finds a header in the first [`LUKS_HEADER_LEN`] bytes of an image.
    pub fn find(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<6>()?;
        let clone = match *magic {
            MAGIC => false,
            CLONE_MAGIC => true,
            _ => return None,
        };
        let version = u16::from_be_bytes(*rest.first_chunk::<2>()?);
        (1..=2).contains(&version).then_some(Self { version, clone })
    }
}

impl fmt::Display for LuksHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LUKS{}", self.version)?;
        if self.clone { f.write_str(" (of an encrypted clone)") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_both_versions_and_of_clones() {
        let found = |bytes: &[u8]| LuksHeader::find(bytes).map(|header| header.to_string());
        assert_eq!(found(b"LUKS\xba\xbe\0\x01aes").as_deref(), Some("LUKS1"));
        assert_eq!(found(b"LUKS\xba\xbe\0\x02").as_deref(), Some("LUKS2"));
        assert_eq!(found(b"RBDL\xba\xbe\0\x02").as_deref(), Some("LUKS2 (of an encrypted clone)"));
        for other in
            [&b""[..], b"LUKS\xba\xbe\0", b"LUKS\xba\xbe\0\x03", b"LUKS\xba\xbf\0\x01", b"SKUL\xba\xbe\0\x02", &[0; 8]]
        {
            assert_eq!(found(other), None, "{other:?}");
        }
    }
}
