//! Vectors without special instructions: four 64-bit words, which compilers turn into whatever the platform's
//! baseline has.

use super::Vector;

/// Register of 32 bytes, as words.
#[derive(Clone, Copy)]
pub(crate) struct Words([u64; 4]);

/// Doubles eight field elements at once: shift, and reduce by 0x1d where a bit fell out.
#[inline(always)]
fn double(word: u64) -> u64 {
    let high = (word >> 7) & 0x0101_0101_0101_0101;
    ((word << 1) & 0xfefe_fefe_fefe_fefe) ^ (high * 0x1d)
}

// SAFETY: loads and stores go over four words of eight bytes; nothing depends on the processor.
unsafe impl Vector for Words {
    const BYTES: usize = 32;
    /// Mask of each bit of the coefficient.
    const TABLE_WORDS: usize = 8;
    type Loaded = [u64; 8];
    /// Products of the source with 1, 2, 4, ... 128.
    type Split = [Words; 8];

    fn table(coefficient: u8, words: &mut [u64]) {
        for (bit, word) in words.iter_mut().enumerate() {
            *word = if coefficient >> bit & 1 == 1 { u64::MAX } else { 0 };
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Words([0; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller promises 32 readable bytes; the read is unaligned.
        unsafe { Words(from.cast::<[u64; 4]>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller promises 32 writable bytes; the write is unaligned.
        unsafe { to.cast::<[u64; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: as for `store`; there is no portable way past the caches.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn xor3(self, b: Self, c: Self) -> Self {
        Words(std::array::from_fn(|at| self.0[at] ^ b.0[at] ^ c.0[at]))
    }

    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        Words(std::array::from_fn(|at| self.0[at] ^ b.0[at]))
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of eight words.
        unsafe { table.cast::<[u64; 8]>().read() }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        let mut powers = [self; 8];
        for bit in 1..8 {
            powers[bit] = Words(powers[bit - 1].0.map(double));
        }
        powers
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        let mut sum = self.0;
        for (power, mask) in source.iter().zip(coefficient) {
            for (word, times) in sum.iter_mut().zip(power.0) {
                *word ^= times & mask;
            }
        }
        Words(sum)
    }
}
