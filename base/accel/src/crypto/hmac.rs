//! HMAC-SHA-256 (RFC 2104), to derive keys and check values.

use std::ptr;

use aws_lc_sys as aws;

/// Length of a code, in bytes.
pub const HMAC_LEN: usize = 32;

/// Context of the library, which erases it when it is freed.
struct Context(*mut aws::HMAC_CTX);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by the library, and freed once.
        unsafe { aws::HMAC_CTX_free(self.0) };
    }
}

/// Returns the HMAC-SHA-256 of the parts, one after the other.
///
/// Does not erase the result.
///
/// # Panics
/// When the library has no memory.
#[must_use]
pub fn hmac_sha256(key: &[u8], parts: &[&[u8]]) -> [u8; HMAC_LEN] {
    // SAFETY: the call has no preconditions.
    let context = Context(unsafe { aws::HMAC_CTX_new() });
    assert!(!context.0.is_null(), "no memory for a message authentication code");
    let mut out = [0; HMAC_LEN];
    let mut len = 0;
    // SAFETY: the context is alive; every piece of memory has the length that is given; the code has as many bytes as
    // `out`.
    let done = unsafe {
        let begun = aws::HMAC_Init_ex(context.0, key.as_ptr().cast(), key.len(), aws::EVP_sha256(), ptr::null_mut());
        let updated = parts.iter().all(|part| aws::HMAC_Update(context.0, part.as_ptr(), part.len()) == 1);
        begun == 1 && updated && aws::HMAC_Final(context.0, out.as_mut_ptr(), &mut len) == 1
    };
    assert!(done && len as usize == HMAC_LEN, "the code of a message of any length is computed");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Test cases 1, 2 and 6 of RFC 4231: a short key, a text, and a key longer than a block.
    #[test]
    fn codes_are_those_of_the_specification() {
        let cases: [(&[u8], &[u8], &str); 3] = [
            (&[0x0b; 20], b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (
                b"Jefe",
                b"what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, text, expected) in cases {
            assert_eq!(hex(&hmac_sha256(key, &[text])), expected);
            let (head, tail) = text.split_at(3);
            assert_eq!(hex(&hmac_sha256(key, &[head, &[], tail])), expected, "in parts");
        }
    }
}
