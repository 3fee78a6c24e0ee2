//! Sizes as people write and read them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Unit letters, each 1024 times the one before.
const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];

/// A number of bytes written with a unit: `10G`, `512M`, `4KiB`, `512B`.  As in `rbd`, units are powers of 1024, and a
/// bare number counts mebibytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Parses a size of which a bare number counts bytes, as in `rbd`'s options for parts of an image.
///
/// # Errors
/// The reason for which it is no size.
pub fn byte_size(text: &str) -> Result<Size, String> {
    match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => format!("{text}B").parse(),
        false => text.parse(),
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("'{text}' is not a size: {why}; write for example 10G, 512M, 64K or 4096B");
        if text.starts_with('-') {
            return Err(wrong("it is negative"));
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let shift = match unit.to_ascii_uppercase().as_str() {
            "" => 20,
            "B" => 0,
            unit => {
                let letter = unit.chars().next().expect("a unit that is not empty");
                let power = UNITS.iter().position(|&known| known == letter).ok_or_else(|| wrong("unknown unit"))?;
                match &unit[letter.len_utf8()..] {
                    "" | "I" | "IB" => 10 * (power as u32 + 1),
                    "B" => return Err(wrong("units are powers of 1024, written G or GiB, not GB")),
                    _ => return Err(wrong("unknown unit")),
                }
            }
        };
        let bytes = match number.split_once('.') {
            None => {
                let number: u64 = number.parse().map_err(|_| wrong("no whole number before the unit"))?;
                number.checked_mul(1 << shift).ok_or_else(|| wrong("too large"))?
            }
            Some((whole, fraction)) => {
                // Exact for what people write (1.5T); a fraction of a byte is refused rather than rounded.
                let digits = fraction.len();
                if whole.is_empty() || digits == 0 || digits > 18 || fraction.contains('.') {
                    return Err(wrong("no number before the unit"));
                }
                let scale = 10u128.pow(digits as u32);
                let value: u128 = format!("{whole}{fraction}").parse().map_err(|_| wrong("no number"))?;
                let scaled = value.checked_mul(1 << shift).ok_or_else(|| wrong("too large"))?;
                if !scaled.is_multiple_of(scale) {
                    return Err(wrong("that is not a whole number of bytes"));
                }
                u64::try_from(scaled / scale).map_err(|_| wrong("too large"))?
            }
        };
        Ok(Size(bytes))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for Size {
    /// Formats a size like `rbd`: at most three or four digits and the unit, `10 GiB`, `1.5 TiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let Some(power) = (0..UNITS.len()).rev().find(|&power| bytes >= 1 << (10 * (power + 1))) else {
            return write!(f, "{bytes} B");
        };
        let unit = 1u128 << (10 * (power + 1));
        let letter = UNITS[power];
        // Tenths, rounded down, so that nothing is said to be larger than it is.
        let tenths = u128::from(bytes) * 10 / unit;
        if tenths.is_multiple_of(10) || tenths >= 1000 {
            write!(f, "{} {letter}iB", tenths / 10)
        } else {
            write!(f, "{}.{} {letter}iB", tenths / 10, tenths % 10)
        }
    }
}

/// A size as `rbd` prints it, seven characters at most: rounded to the nearest, with as many decimals as fit.
pub fn rbd_size(bytes: u64) -> String {
    let power = (1..=UNITS.len()).rev().find(|&power| bytes >= 1 << (10 * power));
    let Some(power) = power else { return format!("{bytes} B") };
    let (unit, letter) = (1u64 << (10 * power), UNITS[power - 1]);
    if bytes.is_multiple_of(unit) {
        return format!("{} {letter}iB", bytes / unit);
    }
    let with = |decimals: usize| format!("{:.decimals$} {letter}iB", bytes as f64 / unit as f64);
    (1..=2).rev().map(with).find(|text| text.len() <= 7).unwrap_or_else(|| with(0))
}

/// A part of a whole in percent, for people.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".into();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// A time as people write it: `500ms`, `2s`, `5m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("'{text}' is not a time: {why}; write for example 500ms, 2s or 5m");
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let number: u64 = number.parse().map_err(|_| wrong("no whole number before the unit"))?;
        let factor = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "" => return Err(wrong("no unit")),
            _ => return Err(wrong("unknown unit")),
        };
        let millis = number.checked_mul(factor).ok_or_else(|| wrong("too long"))?;
        Ok(Span(Duration::from_millis(millis)))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            millis if millis > 0 && millis.is_multiple_of(60_000) => write!(f, "{}m", millis / 60_000),
            millis if millis.is_multiple_of(1000) => write!(f, "{}s", millis / 1000),
            millis => write!(f, "{millis}ms"),
        }
    }
}

/// Returns a time as people say it, in its two largest units.
pub fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<u64, String> {
        text.parse::<Size>().map(|size| size.0)
    }

    #[test]
    fn durations() {
        let shown = [59, 60, 3_661, 90_000].map(duration);
        assert_eq!(shown, ["59 s", "1 min 0 s", "1 h 1 min", "1 d 1 h"]);
    }

    #[test]
    fn sizes_as_rbd_prints_them() {
        for (bytes, want) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (5_120_000, "4.9 MiB"),
            (1_310_720, "1.2 MiB"),
            (12_897_484, "12 MiB"),
            (1_048_575, "1024 KiB"),
            (3 << 30, "3 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(rbd_size(bytes), want, "{bytes}");
        }
    }

    #[test]
    fn sizes_that_people_write() {
        for (text, want) in [
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("512M", 512 << 20),
            ("4KiB", 4096),
            ("4Ki", 4096),
            ("0B", 0),
            ("4096B", 4096),
            ("100", 100 << 20),
            ("1.5T", 3 << 39),
            ("0.5K", 512),
            ("15E", 15 << 60),
        ] {
            assert_eq!(bytes(text), Ok(want), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for text in ["", "G", "-1G", "10GB", "10 G", "1e3", "10X", "16E", "1.G", ".5G", "1.2.3G", "0.3B", "10Gi B", "é"]
        {
            let error = bytes(text).expect_err(text);
            assert!(error.contains("10G"), "{error}");
        }
    }

    #[test]
    fn sizes_that_people_read() {
        for (bytes, want) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (10 << 30, "10 GiB"),
            (3 << 39, "1.5 TiB"),
            ((1 << 30) - 1, "1023 MiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), want);
        }
    }

    #[test]
    fn percents() {
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(0, 0), "-");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.0 %");
    }

    #[test]
    fn times_are_read_and_written() {
        for (text, millis) in [("500ms", 500), ("2s", 2000), ("5m", 300_000), ("0s", 0)] {
            let span: Span = text.parse().expect("a time");
            assert_eq!((span.0.as_millis(), span.to_string().as_str()), (millis, text));
        }
        for wrong in ["", "2", "s", "2h", "1.5s", "99999999999999999999s", "18446744073709551615m"] {
            assert!(wrong.parse::<Span>().is_err(), "{wrong}");
        }
    }
}
