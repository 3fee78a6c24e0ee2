//! Text format of logins and text requests: `key=value` pairs, each terminated by a zero byte (RFC 7143, chapter 6).

/// Maximum text in bytes of one request, over all its PDUs.
pub const TEXT_MAX: usize = 64 * 1024;
/// Maximum number of pairs in one text.
pub const PAIRS_MAX: usize = 256;
/// Maximum key length in bytes (RFC 7143, section 6.1).
const KEY_MAX: usize = 63;
/// Maximum value length in bytes (section 6.1); binary items may be longer, up to what CHAP needs.
const VALUE_MAX: usize = 8192;

/// Text parsing error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// Item is not `key=value`.
    #[error("text is not key=value")]
    NoPair,
    /// Last pair lacks its terminating zero byte.
    #[error("text is not terminated")]
    NoEnd,
    /// Key or value too long, or too many pairs.
    #[error("text is too long")]
    TooLong,
    /// Bytes are not text.
    #[error("text contains invalid bytes")]
    NoText,
    /// Duplicate key.
    #[error("duplicate key in text")]
    Twice,
}

/// Key-value pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<'a> {
    /// Pair key.
    pub key: &'a str,
    /// Pair value.
    pub value: &'a str,
}

/// Parses a text.
///
/// # Errors
/// [`TextError`].
pub fn parse(bytes: &[u8]) -> Result<Vec<Pair<'_>>, TextError> {
    let mut pairs: Vec<Pair<'_>> = Vec::new();
    let mut rest = bytes;
    // Some initiators pad with additional zero bytes.
    while !rest.is_empty() {
        let end = rest.iter().position(|&byte| byte == 0).ok_or(TextError::NoEnd)?;
        let (item, after) = (&rest[..end], &rest[end + 1..]);
        rest = after;
        if item.is_empty() {
            continue;
        }
        let item = std::str::from_utf8(item).map_err(|_| TextError::NoText)?;
        let (key, value) = item.split_once('=').ok_or(TextError::NoPair)?;
        let sound = |byte: u8| byte.is_ascii_alphanumeric() || b".-+@_/[]:#$".contains(&byte);
        if key.is_empty() || !key.bytes().all(sound) {
            return Err(TextError::NoPair);
        }
        if key.len() > KEY_MAX || value.len() > VALUE_MAX || pairs.len() == PAIRS_MAX {
            return Err(TextError::TooLong);
        }
        if pairs.iter().any(|pair| pair.key == key) {
            return Err(TextError::Twice);
        }
        pairs.push(Pair { key, value });
    }
    Ok(pairs)
}

/// Appends a pair.
pub fn push(out: &mut Vec<u8>, key: &str, value: &str) {
    out.extend_from_slice(key.as_bytes());
    out.push(b'=');
    out.extend_from_slice(value.as_bytes());
    out.push(0);
}

/// Parses a number, decimal or with `0x` (section 6.1).
pub fn number(value: &str) -> Option<u32> {
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) if !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            u32::from_str_radix(hex, 16).ok()
        }
        Some(_) => None,
        None if value.bytes().all(|byte| byte.is_ascii_digit()) => value.parse().ok(),
        None => None,
    }
}

/// Decodes a binary value, `0x...` or `0b...` (base64; section 6.1).
pub fn binary(value: &str, max: usize) -> Option<Vec<u8>> {
    let digits = value.get(2..)?;
    match value.get(..2)? {
        "0x" | "0X" => hex(digits, max),
        "0b" | "0B" => base64(digits, max),
        _ => None,
    }
}

fn hex(digits: &str, max: usize) -> Option<Vec<u8>> {
    if digits.is_empty() || digits.len().div_ceil(2) > max {
        return None;
    }
    let nibbles: Option<Vec<u8>> = digits.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect();
    let nibbles = nibbles?;
    let mut out = Vec::with_capacity(nibbles.len().div_ceil(2));
    let (first, rest) = nibbles.split_at(nibbles.len() % 2);
    out.extend_from_slice(first);
    out.extend(rest.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]));
    Some(out)
}

fn base64(digits: &str, max: usize) -> Option<Vec<u8>> {
    let digits = digits.trim_end_matches('=');
    if digits.is_empty() || digits.len() / 4 * 3 > max {
        return None;
    }
    forebay_accel::crypto::base64::decode_digits(digits).filter(|bytes| bytes.len() <= max)
}

/// Encodes bytes as `0x...`.
pub fn to_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(2 + bytes.len() * 2);
    text.push_str("0x");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read() {
        let pairs = parse(b"InitiatorName=iqn.a:b=c\0SessionType=Normal\0\0").expect("two pairs");
        assert_eq!(pairs[0], Pair { key: "InitiatorName", value: "iqn.a:b=c" });
        assert_eq!(pairs.len(), 2);
        assert_eq!(parse(b""), Ok(vec![]));
        for (text, error) in [
            (&b"a=b"[..], TextError::NoEnd),
            (b"ab\0", TextError::NoPair),
            (b"=b\0", TextError::NoPair),
            (b"a\xff=b\0", TextError::NoText),
            (b"a=1\0a=2\0", TextError::Twice),
        ] {
            assert_eq!(parse(text), Err(error));
        }
        assert_eq!(parse(&[vec![b'a'; 64], b"=1\0".to_vec()].concat()), Err(TextError::TooLong));
    }

    #[test]
    fn numbers_and_bytes_are_read() {
        assert_eq!(
            [number("12"), number("0x1F"), number("-1"), number("0x"), number("99999999999")],
            [Some(12), Some(31), None, None, None]
        );
        assert_eq!(number(""), None);
        assert_eq!(binary("0x0102ff", 16), Some(vec![1, 2, 255]));
        assert_eq!(binary("0x102", 16), Some(vec![1, 2]));
        assert_eq!(binary("0bAQL/", 16), Some(vec![1, 2, 255]));
        assert_eq!(binary("0bAQI=", 16), Some(vec![1, 2]));
        assert_eq!(binary(&to_hex(&[0, 9, 0xab]), 3), Some(vec![0, 9, 0xab]));
        for wrong in ["", "0x", "0b", "12", "0xgg", "0bA", "0b*A==", "0x01020304", "ä"] {
            assert_eq!(binary(wrong, 3), None, "{wrong}");
        }
    }
}
