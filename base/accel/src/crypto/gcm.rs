//! AES-GCM (NIST SP 800-38D), in place, the tag apart.

use std::fmt;
use std::ptr::{self, NonNull};

use aws_lc_sys as aws;

use super::CipherKeyError;

/// Length of a nonce, in bytes.
pub const NONCE_LEN: usize = 12;

/// Length of a tag, in bytes.
pub const TAG_LEN: usize = 16;

/// Authentication failure: the data, the additional data, the nonce, or the tag is not what was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("AEAD authentication failed: changed message or wrong key")]
pub struct TagMismatch;

/// Key for AES-128-GCM or AES-256-GCM, with its schedule and tables expanded.
///
/// Can be shared by threads; the caller ensures that no nonce is used twice.
pub struct Gcm {
    context: NonNull<aws::EVP_AEAD_CTX>,
    bits: u16,
}

// SAFETY: it is memory without ties to a thread.
unsafe impl Send for Gcm {}

// SAFETY: sealing and opening take the context as a constant; the library allows them on one from many threads.
unsafe impl Sync for Gcm {}

impl Gcm {
    /// Expands a key of 16 bytes (AES-128) or 32 bytes (AES-256).
    ///
    /// Does not erase the caller's copy of the key.
    ///
    /// # Errors
    /// The key has another length.
    pub fn new(key: &[u8]) -> Result<Self, CipherKeyError> {
        let (cipher, bits) = match key.len() {
            // SAFETY: these return pointers to constants.
            16 => (unsafe { aws::EVP_aead_aes_128_gcm() }, 128),
            // SAFETY: as above.
            32 => (unsafe { aws::EVP_aead_aes_256_gcm() }, 256),
            length => return Err(CipherKeyError::Length(length, "16 or 32")),
        };
        // SAFETY: the key has the length that is given and the cipher wants.
        let context = unsafe { aws::EVP_AEAD_CTX_new(cipher, key.as_ptr(), key.len(), TAG_LEN) };
        Ok(Self { context: NonNull::new(context).expect("no memory for a cipher"), bits })
    }

    /// Encrypts `data` in place; returns the tag over it and `beside`, which is authenticated but not encrypted.
    ///
    /// Requires a nonce that was never used under this key before.
    ///
    /// # Panics
    /// When the data is longer than the mode allows (64 GiB).
    #[must_use]
    pub fn seal(&self, nonce: &[u8; NONCE_LEN], beside: &[u8], data: &mut [u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        let mut tag_len = 0;
        // SAFETY: the context is alive; every piece of memory has the length that is given; source and destination are
        // the same place, which the call allows.
        let done = unsafe {
            aws::EVP_AEAD_CTX_seal_scatter(
                self.context.as_ptr(),
                data.as_mut_ptr(),
                tag.as_mut_ptr(),
                &mut tag_len,
                TAG_LEN,
                nonce.as_ptr(),
                NONCE_LEN,
                data.as_ptr(),
                data.len(),
                ptr::null(),
                0,
                beside.as_ptr(),
                beside.len(),
            )
        };
        assert!(done == 1 && tag_len == TAG_LEN, "a message of a legal length is sealed");
        tag
    }

    /// Decrypts `data` in place, if it and `beside` are what the tag was made over.
    ///
    /// # Errors
    /// They are not; what `data` holds then means nothing.
    pub fn open(
        &self,
        nonce: &[u8; NONCE_LEN],
        beside: &[u8],
        data: &mut [u8],
        tag: &[u8; TAG_LEN],
    ) -> Result<(), TagMismatch> {
        // SAFETY: as in `seal`.
        let done = unsafe {
            aws::EVP_AEAD_CTX_open_gather(
                self.context.as_ptr(),
                data.as_mut_ptr(),
                nonce.as_ptr(),
                NONCE_LEN,
                data.as_ptr(),
                data.len(),
                tag.as_ptr(),
                TAG_LEN,
                beside.as_ptr(),
                beside.len(),
            )
        };
        if done == 1 {
            return Ok(());
        }
        // The library keeps a per-thread list of errors, which is not read anywhere.
        // SAFETY: the call has no preconditions.
        unsafe { aws::ERR_clear_error() };
        Err(TagMismatch)
    }
}

impl Drop for Gcm {
    fn drop(&mut self) {
        // SAFETY: it is alive, and there is no other reference to it.  The library erases the memory.
        unsafe { aws::EVP_AEAD_CTX_free(self.context.as_ptr()) };
    }
}

impl fmt::Debug for Gcm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Gcm(AES-{}, key hidden)", self.bits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    /// The Galois/Counter Mode of Operation (as submitted to NIST), appendix B: test cases 1, 2, 4, 14 and 16.
    #[test]
    fn vectors_of_the_specification() {
        let long = "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
                    1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39";
        let beside = "feedfacedeadbeeffeedfacedeadbeefabaddad2";
        let key = "feffe9928665731c6d6a8f9467308308";
        let cases = [
            ("00".repeat(16), "00".repeat(12), "", String::new(), "", "58e2fccefa7e3061367f1d57a4e7455a"),
            (
                "00".repeat(16),
                "00".repeat(12),
                "",
                "00".repeat(16),
                "0388dace60b6a392f328c2b971b2fe78",
                "ab6e47d42cec13bdf53a67b21257bddf",
            ),
            (
                key.into(),
                "cafebabefacedbaddecaf888".into(),
                beside,
                long.into(),
                "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e\
                 21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091",
                "5bc94fbc3221a5db94fae95ae7121a47",
            ),
            (
                "00".repeat(32),
                "00".repeat(12),
                "",
                "00".repeat(16),
                "cea7403d4d606b6e074ec5d3baf39d18",
                "d0d1c8a799996bf0265b98b5d48ab919",
            ),
            (
                key.repeat(2),
                "cafebabefacedbaddecaf888".into(),
                beside,
                long.into(),
                "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa\
                 8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662",
                "76fc6ece0f4e1768cddf8853bb2d551b",
            ),
        ];
        for (key, nonce, beside, plain, sealed, tag) in cases {
            let gcm = Gcm::new(&hex(&key)).unwrap();
            let nonce: [u8; NONCE_LEN] = hex(&nonce).try_into().unwrap();
            let mut data = hex(&plain);
            let found = gcm.seal(&nonce, &hex(beside), &mut data);
            assert_eq!((&data, found.to_vec()), (&hex(sealed), hex(tag)));
            gcm.open(&nonce, &hex(beside), &mut data, &found).unwrap();
            assert_eq!(data, hex(&plain));
        }
    }

    #[test]
    fn keys_that_will_not_do() {
        assert_eq!(Gcm::new(&[0; 24]).err(), Some(CipherKeyError::Length(24, "16 or 32")));
        assert_eq!(format!("{:?}", Gcm::new(&[9; 16]).unwrap()), "Gcm(AES-128, key hidden)");
    }

    proptest! {
        #[test]
        fn any_change_is_noticed(
            data in proptest::collection::vec(any::<u8>(), 0..3000),
            beside in proptest::collection::vec(any::<u8>(), 0..40),
            nonce: [u8; NONCE_LEN],
            at: proptest::sample::Index,
            bit in 0u8..8,
        ) {
            let gcm = Gcm::new(&[7; 32]).unwrap();
            let mut sealed = data.clone();
            let tag = gcm.seal(&nonce, &beside, &mut sealed);
            let mut opened = sealed.clone();
            prop_assert_eq!(gcm.open(&nonce, &beside, &mut opened, &tag), Ok(()));
            prop_assert_eq!(opened, data);
            // One bit of the whole: the nonce, what is beside, the data, the tag.
            let mut all = [&nonce[..], &beside, &sealed, &tag].concat();
            let at = at.index(all.len());
            all[at] ^= 1 << bit;
            let (nonce, rest) = all.split_at(NONCE_LEN);
            let (beside, rest) = rest.split_at(beside.len());
            let (changed, tag) = rest.split_at(sealed.len());
            let (nonce, tag) = (nonce.try_into().unwrap(), tag.try_into().unwrap());
            prop_assert_eq!(gcm.open(nonce, beside, &mut changed.to_vec(), tag), Err(TagMismatch));
        }
    }
}
