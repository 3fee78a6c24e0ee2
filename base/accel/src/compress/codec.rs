//! Which codecs there are.

use std::fmt;
use std::str::FromStr;

/// Framing of a DEFLATE stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Framing {
    /// Raw DEFLATE without framing (RFC 1951).
    Raw,
    /// Two bytes in front, an Adler-32 behind (RFC 1950).
    Zlib,
    /// Gzip: a header of ten bytes in front, a CRC-32 and the length behind (RFC 1952).  One member; extra fields,
    /// names and comments written by other programs are skipped.
    Gzip,
}

/// Compression level of DEFLATE, from 1 (fastest) to 9; at each level the result is no longer than zlib's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// Fastest level.
    pub const FASTEST: Level = Level(1);
    /// Default level of zlib.
    pub const DEFAULT: Level = Level(6);
    /// Level with the smallest result.
    pub const BEST: Level = Level(9);

    /// Returns a level from 1 to 9; `None` for any other number.
    pub const fn new(level: u8) -> Option<Level> {
        if level >= 1 && level <= 9 { Some(Level(level)) } else { None }
    }

    /// Returns the number of the level, from 1 to 9.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// Compression format, and the level for writing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// DEFLATE; every level is read alike.
    Deflate {
        /// Framing of the stream.
        framing: Framing,
        /// Compression level.
        level: Level,
    },
    /// LZ4's block format, without a length in front and without a frame.
    Lz4,
    /// Single Zstandard frame (RFC 8878).
    Zstd {
        /// Level from -7 (fastest) to 19; the default of zstd is 3.
        level: i8,
    },
}

impl Codec {
    /// DEFLATE in zlib's framing at its default level.
    pub const ZLIB: Codec = Codec::Deflate { framing: Framing::Zlib, level: Level::DEFAULT };

    /// Returns the maximum compressed length of `length` bytes, in bytes.
    pub fn bound(self, length: usize) -> usize {
        match self {
            // Five bytes for each stored block, each at least 5000 bytes long except the last; and the frame.
            Codec::Deflate { .. } => length + 5 * (length / 5000 + 1) + 18 + 16,
            Codec::Lz4 => lz4_flex::block::get_maximum_output_size(length),
            Codec::Zstd { .. } => zstd::zstd_safe::compress_bound(length),
        }
    }
}

/// Formats the name as it is parsed: `deflate-1`, `zlib-6`, `gzip-9`, `lz4`, `zstd-3`.
impl fmt::Display for Codec {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Deflate { framing: Framing::Raw, level } => write!(out, "deflate-{}", level.0),
            Codec::Deflate { framing: Framing::Zlib, level } => write!(out, "zlib-{}", level.0),
            Codec::Deflate { framing: Framing::Gzip, level } => write!(out, "gzip-{}", level.0),
            Codec::Lz4 => out.write_str("lz4"),
            Codec::Zstd { level } => write!(out, "zstd-{level}"),
        }
    }
}

/// Name that no codec has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown codec `{0}`; use one of: deflate-1 to -9, zlib-1 to -9, gzip-1 to -9, lz4, zstd--7 to -19")]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    /// Parses a name; one without a level means the default level.
    fn from_str(text: &str) -> Result<Codec, UnknownCodec> {
        let unknown = || UnknownCodec(text.to_owned());
        let (name, level) = text.split_once('-').map_or((text, None), |(name, level)| (name, Some(level)));
        let framing = match name {
            "deflate" => Framing::Raw,
            "zlib" => Framing::Zlib,
            "gzip" => Framing::Gzip,
            "lz4" if level.is_none() => return Ok(Codec::Lz4),
            "zstd" => {
                let level = level.map_or(Ok(3), str::parse).map_err(|_| unknown())?;
                return (-7..=19).contains(&level).then_some(Codec::Zstd { level }).ok_or_else(unknown);
            }
            _ => return Err(unknown()),
        };
        let level = match level {
            None => Some(Level::DEFAULT),
            Some(level) => level.parse().ok().and_then(Level::new),
        };
        Ok(Codec::Deflate { framing, level: level.ok_or_else(unknown)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in ["deflate-1", "zlib-6", "gzip-9", "lz4", "zstd-3", "zstd--5", "zstd-19"] {
            assert_eq!(name.parse::<Codec>().unwrap().to_string(), name);
        }
        assert_eq!("zlib".parse(), Ok(Codec::ZLIB));
        for name in ["zlib-0", "zlib-10", "lz4-1", "zstd-20", "zstd--8", "brotli", "", "gzip-x"] {
            assert_eq!(name.parse::<Codec>(), Err(UnknownCodec(name.into())));
        }
    }
}
