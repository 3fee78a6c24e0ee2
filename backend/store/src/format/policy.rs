//! Data policy record: compression of the objects whose names begin with a prefix.

use forebay_block::{Compression, DataPolicy};

use super::{MalformedStore, Put, StoreReader, malformed};

/// Encoded size in bytes.
pub const POLICY_LEN: usize = 4;

const VERSION: u8 = 1;

/// Encodes a policy.
pub fn encode(policy: &DataPolicy) -> Vec<u8> {
    let mut out = Vec::with_capacity(POLICY_LEN);
    let (codec, level) = match policy.compression {
        Compression::None => (0, 0),
        Compression::Deflate { level } => (1, level),
        Compression::Lz4 => (2, 0),
        Compression::Zstd { level } => (3, level as u8),
    };
    out.put_u8(VERSION);
    out.put_u8(codec);
    out.put_u8(level);
    out.put_u8(0);
    out
}

/// Decodes a policy.
///
/// # Errors
/// Description of the malformed field. Flags are for later versions, and none is known yet.
pub fn decode(bytes: &[u8]) -> Result<DataPolicy, MalformedStore> {
    let mut reader = StoreReader::new(bytes, "data policy");
    let (version, codec, level, flags) = (reader.u8()?, reader.u8()?, reader.u8()?, reader.u8()?);
    reader.end()?;
    let compression = match (version, codec, level as i8, flags) {
        (VERSION, 0, 0, 0) => Compression::None,
        (VERSION, 1, 1..=9, 0) => Compression::Deflate { level },
        (VERSION, 2, 0, 0) => Compression::Lz4,
        (VERSION, 3, level @ -7..=19, 0) => Compression::Zstd { level },
        _ => {
            let what = format!("version {version}, codec {codec}, level {level}, flags {flags:#x}");
            return malformed(format!("data policy: {what}, which this program does not know"));
        }
    };
    Ok(DataPolicy { compression })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        for text in ["none", "lz4", "zstd:-7", "zstd:19", "deflate:1", "deflate:9"] {
            let policy = DataPolicy { compression: text.parse().expect(text) };
            let bytes = encode(&policy);
            assert_eq!((bytes.len(), decode(&bytes)), (POLICY_LEN, Ok(policy)));
            for len in 0..bytes.len() {
                assert!(decode(&bytes[..len]).is_err());
            }
        }
        for bad in [[0, 0, 0, 0], [2, 0, 0, 0], [1, 4, 0, 0], [1, 2, 1, 0], [1, 1, 10, 0], [1, 3, 20, 0], [1, 0, 0, 1]]
        {
            assert!(decode(&bad).is_err(), "{bad:?}");
        }
    }
}
