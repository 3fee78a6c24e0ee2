//! Round keys for the processor's own instructions (FIPS 197 section 5.2).

use zeroize::Zeroize;

/// Maximum number of round keys, including the initial key addition.
pub(super) const ROUND_KEYS_MAX: usize = 15;

/// Round key, replicated four times for 512-bit instructions; narrower ones use the first quarter.
pub(super) type RoundKey = [u8; 64];

/// Schedules of both halves of an XTS key, erased when they are dropped.
#[derive(Clone)]
#[repr(C, align(64))]
pub(super) struct Schedules {
    /// Schedule for the data.
    pub(super) encrypt: [RoundKey; ROUND_KEYS_MAX],
    /// Schedule for the data, the other way round: in the order of use, the inner ones mixed (the equivalent inverse
    /// cipher, section 5.3.5).
    pub(super) decrypt: [RoundKey; ROUND_KEYS_MAX],
    /// Schedule for the tweak.
    pub(super) tweak: [RoundKey; ROUND_KEYS_MAX],
    /// Number of rounds, 10 or 14.
    pub(super) rounds: usize,
}

impl Schedules {
    /// Expands two keys of 16 or 32 bytes.
    ///
    /// # Safety
    /// The processor has the AES instructions.
    pub(super) unsafe fn new(data: &[u8], tweak: &[u8]) -> Box<Self> {
        let empty = [[0; 64]; ROUND_KEYS_MAX];
        let mut all = Box::new(Self { encrypt: empty, decrypt: empty, tweak: empty, rounds: data.len() / 4 + 6 });
        // SAFETY: the caller's word.
        unsafe {
            super::x86::expand(data, &mut all.encrypt);
            super::x86::expand(tweak, &mut all.tweak);
            let Self { encrypt, decrypt, rounds, .. } = &mut *all;
            super::x86::invert(&encrypt[..=*rounds], &mut decrypt[..=*rounds]);
        }
        all
    }
}

impl Drop for Schedules {
    fn drop(&mut self) {
        for keys in [&mut self.encrypt, &mut self.decrypt, &mut self.tweak] {
            keys.as_flattened_mut().zeroize();
        }
    }
}
