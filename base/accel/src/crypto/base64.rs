//! Keys as people pass them on: standard base64 (RFC 4648, section 4).

/// Decodes a text with padding; `None` if it is malformed.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    decode_digits(digits)
}

/// Decodes a text without padding; bits beyond the last whole byte are ignored.
pub fn decode_digits(digits: &str) -> Option<Vec<u8>> {
    if digits.len() % 4 == 1 {
        return None;
    }
    let (mut bits, mut count) = (0_u32, 0);
    // Its whole length from the start, so that no copy of a secret is left behind by growing.
    let mut out = Vec::with_capacity(digits.len() * 3 / 4);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

/// Encodes bytes, with padding.
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().enumerate().fold(0, |bits, (at, &byte)| bits | u32::from(byte) << (16 - 8 * at));
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            out.push(if at <= group.len() { digit.into() } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_rfc_4648() {
        for (text, bytes) in
            [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob"), ("Zm9vYmFy", "foobar")]
        {
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()), "{text}");
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode_digits(text.trim_end_matches('=')).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        for text in ["Zg", "Zg=", "Z===", "====", "Zm9v=", "Zm-v", "Zm 9", "Z=g="] {
            assert_eq!(decode(text), None, "{text}");
        }
        assert_eq!(decode_digits("Z"), None);
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
    }
}
