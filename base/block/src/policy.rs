//! Data policy: properties of the data of one volume, which a backend applies to every object of it.

use std::fmt;
use std::str::FromStr;

/// Compression of a volume's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Compression {
    /// Data is stored as it is written.
    #[default]
    None,
    /// LZ4's block format.
    Lz4,
    /// Zstandard frames.
    Zstd {
        /// Level from -7 (fastest) to 19.
        level: i8,
    },
    /// DEFLATE streams.
    Deflate {
        /// Level from 1 (fastest) to 9.
        level: u8,
    },
}

impl Compression {
    /// Default level of Zstandard.
    pub const ZSTD_LEVEL: i8 = 3;
    /// Default level of DEFLATE.
    pub const DEFLATE_LEVEL: u8 = 6;
}

/// Formats the setting as it is parsed: `none`, `lz4`, `zstd:3`, `deflate:6`.
impl fmt::Display for Compression {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => out.write_str("none"),
            Self::Lz4 => out.write_str("lz4"),
            Self::Zstd { level } => write!(out, "zstd:{level}"),
            Self::Deflate { level } => write!(out, "deflate:{level}"),
        }
    }
}

/// Text that is no compression setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownCompression(String);

impl fmt::Display for UnknownCompression {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "unknown compression `{}`; use none, lz4, zstd[:LEVEL] with a level from -7 to 19, or deflate[:LEVEL] with a \
             level from 1 to 9",
            self.0
        )
    }
}

impl std::error::Error for UnknownCompression {}

impl FromStr for Compression {
    type Err = UnknownCompression;

    /// Parses a setting; one without a level has the default level.
    fn from_str(text: &str) -> Result<Self, UnknownCompression> {
        let unknown = || UnknownCompression(text.to_owned());
        let (name, level) = text.split_once(':').map_or((text, None), |(name, level)| (name, Some(level)));
        match (name, level) {
            ("none", None) => Ok(Self::None),
            ("lz4", None) => Ok(Self::Lz4),
            ("zstd", level) => {
                let level = level.map_or(Ok(Self::ZSTD_LEVEL), str::parse).map_err(|_| unknown())?;
                (-7..=19).contains(&level).then_some(Self::Zstd { level }).ok_or_else(unknown)
            }
            ("deflate", level) => {
                let level = level.map_or(Ok(Self::DEFLATE_LEVEL), str::parse).map_err(|_| unknown())?;
                (1..=9).contains(&level).then_some(Self::Deflate { level }).ok_or_else(unknown)
            }
            _ => Err(unknown()),
        }
    }
}

/// Data policy of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct DataPolicy {
    /// Compression of data written from now on. Data written before stays as it is.
    pub compression: Compression,
}

/// Stored size of a volume's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoredBytes {
    /// Bytes of the blocks that the volume's objects map.
    pub logical: u64,
    /// Bytes that they take on the device. A compressed blob counts in full while any block of it is mapped.
    pub stored: u64,
}

impl StoredBytes {
    /// Returns logical bytes for each stored byte; 1 if nothing is stored.
    pub fn ratio(&self) -> f64 {
        if self.stored == 0 { 1.0 } else { self.logical as f64 / self.stored as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_parsed_as_they_are_shown() {
        for text in ["none", "lz4", "zstd:3", "zstd:-7", "zstd:19", "deflate:1", "deflate:9"] {
            assert_eq!(text.parse::<Compression>().expect(text).to_string(), text);
        }
        assert_eq!("zstd".parse(), Ok(Compression::Zstd { level: 3 }));
        assert_eq!("deflate".parse(), Ok(Compression::Deflate { level: 6 }));
        for text in ["", "lz4:1", "none:0", "zstd:20", "zstd:-8", "zstd:x", "deflate:0", "deflate:10", "gzip", "LZ4"] {
            let error = text.parse::<Compression>().expect_err(text);
            assert!(error.to_string().contains("zstd[:LEVEL]"), "{error}");
        }
    }

    #[test]
    fn ratio_of_nothing_is_one() {
        assert_eq!(StoredBytes::default().ratio(), 1.0);
        assert_eq!(StoredBytes { logical: 8192, stored: 4096 }.ratio(), 2.0);
    }
}
