//! Vector abstraction: the register operations that the erasure-coding kernels need, implemented for every tier.
//!
//! The kernels in [`crate::erasure`] are generic functions over [`Vector`], marked to be inlined, and are instantiated
//! inside functions that enable the tier's features; only there do the methods below become the instructions they
//! stand for.  Multiplication by a constant of GF(2^8) differs most between tiers, so the trait speaks of it in steps
//! that each tier can hoist: a *table* in memory for a coefficient, the same *loaded* into registers for several
//! vectors, and a source *split* once for all outputs.

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

/// Register full of bytes, which are elements of GF(2^8) modulo x^8+x^4+x^3+x^2+1 (0x11d).
///
/// # Safety
/// An implementation reads and writes exactly the bytes its methods name.  Every method may be called only on a
/// processor with the tier's features; pointers need no alignment except where a method says so.
pub(crate) unsafe trait Vector: Copy {
    /// Length of a register in bytes.
    const BYTES: usize;
    /// 64-bit words in a coefficient's table.
    const TABLE_WORDS: usize;
    /// Table of a coefficient in registers.
    type Loaded: Copy;
    /// Source, prepared to be multiplied.
    type Split: Copy;

    /// Writes the table of `coefficient` into `TABLE_WORDS` words.
    fn table(coefficient: u8, words: &mut [u64]);

    /// Returns a register of zeroes.
    unsafe fn zero() -> Self;
    /// Loads `BYTES` bytes from `from`.
    unsafe fn load(from: *const u8) -> Self;
    /// Stores `BYTES` bytes to `to`.
    unsafe fn store(self, to: *mut u8);
    /// Stores `BYTES` bytes to `to`, past the caches where the processor can; `to` is aligned to `BYTES`.
    unsafe fn stream(self, to: *mut u8);
    /// Returns the sum (exclusive or) of three.
    unsafe fn xor3(self, b: Self, c: Self) -> Self;
    /// Returns the sum (exclusive or) of two.
    unsafe fn xor(self, b: Self) -> Self;

    /// Reads a coefficient's table.
    unsafe fn loaded(table: *const u64) -> Self::Loaded;
    /// Prepares a source.
    unsafe fn split(self) -> Self::Split;
    /// Returns `self + coefficient * source`.
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self;
    /// Returns `self + c * a + d * b`.
    #[inline(always)]
    unsafe fn multiply_add2(self, a: Self::Split, c: &Self::Loaded, b: Self::Split, d: &Self::Loaded) -> Self {
        // SAFETY: as for this method.
        unsafe { self.multiply_add(a, c).multiply_add(b, d) }
    }

    /// Loads the first `count` bytes (fewer than `BYTES`) from `from`, zeroes behind them.
    #[inline(always)]
    unsafe fn load_partial(from: *const u8, count: usize) -> Self {
        let mut bytes = [0u8; 64];
        debug_assert!(count < Self::BYTES && Self::BYTES <= 64);
        // SAFETY: the caller promises `count` readable bytes; the array has room for a whole register.
        unsafe {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), count);
            Self::load(bytes.as_ptr())
        }
    }

    /// Stores the first `count` bytes (fewer than `BYTES`) to `to`.
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut u8, count: usize) {
        let mut bytes = [0u8; 64];
        debug_assert!(count < Self::BYTES && Self::BYTES <= 64);
        // SAFETY: the array has room for a whole register; the caller promises `count` writable bytes.
        unsafe {
            self.store(bytes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count);
        }
    }
}

/// Orders stores past the caches ([`Vector::stream`]) before everything that follows.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SFENCE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Makes the two tables of 16 products (of the low and the high four bits) that byte shuffles look up, as four words.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn nibble_table(coefficient: u8, words: &mut [u64]) {
    use crate::erasure::gf::multiply;
    let mut bytes = [0u8; 32];
    for nibble in 0..16u8 {
        bytes[usize::from(nibble)] = multiply(coefficient, nibble);
        bytes[usize::from(nibble) + 16] = multiply(coefficient, nibble << 4);
    }
    for (word, eight) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(eight.try_into().expect("eight bytes"));
    }
}
