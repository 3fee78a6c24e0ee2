//! Arithmetic modulo Castagnoli's polynomial, P = 0x11EDC6F41, on reflected registers: bit 31 is the constant term.

/// Polynomial P without its highest term, reflected.
pub(crate) const POLYNOMIAL: u32 = 0x82F6_3B78;

/// Polynomial 1.
const ONE: u32 = 1 << 31;

/// Order of x modulo P: x^ORDER is 1, so x has negative powers.
const ORDER: u64 = (1 << 31) - 1;

/// Returns the product of two polynomials modulo P.
pub(crate) const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
    }
    product
}

/// Returns x^exponent modulo P; exponents may be negative.
pub(crate) const fn power(exponent: i64) -> u32 {
    let mut exponent = exponent.rem_euclid(ORDER as i64);
    let mut base = ONE >> 1;
    let mut result = ONE;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(result, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    result
}

/// Exponent of x that the carry-less product of two reflected registers gains, run through the CRC32 instruction as a
/// 64-bit message: 1 for the reflection, 32 for the checksum's own shift.  Constants make up for it.
const SCALE: i64 = 33;

/// Returns the two factors that move the halves of a 128-bit lane `bytes` further from the end of the message.
///
/// The lane's product with a factor gains 1 from the reflection; a factor stands in the low half of its 64-bit word,
/// which is another 32; and the lane's first half is 64 bits further from the end than its second.
pub(crate) const fn fold_key(bytes: u64) -> (u32, u32) {
    (power(8 * bytes as i64 + 64 - SCALE), power(8 * bytes as i64 - SCALE))
}

/// Factors `x^(8 * 2^i)`, which move a register by `2^i` bytes.
pub(crate) const SHIFTS: [u32; 64] = {
    let mut table = [0; 64];
    let mut entry = power(8);
    let mut at = 0;
    while at < 64 {
        table[at] = entry;
        entry = multiply(entry, entry);
        at += 1;
    }
    table
};

/// Factor that undoes the one of the instructions: a register times this, run through the CRC32 instruction as a
/// message of 64 bits, is the register again.
pub(crate) const UNSCALE: u32 = power(-SCALE);

/// Returns the factor that moves a register by `bytes` bytes: their product, run through the CRC32 instruction as a
/// message of 64 bits.
pub(crate) const fn shift_key(bytes: u64) -> u32 {
    power(8 * bytes as i64 - SCALE)
}

/// Factors `x^(8 * 2^i)` divided by what the instructions multiply by.
pub(crate) const SHIFT_KEYS: [u32; 64] = {
    let mut table = SHIFTS;
    let mut at = 0;
    while at < 64 {
        table[at] = multiply(table[at], UNSCALE);
        at += 1;
    }
    table
};

/// Returns the register `state` after `bytes` more bytes of zero; the other way to say it: multiplied by x^(8 * bytes).
pub(crate) fn shift(state: u32, mut bytes: u64) -> u32 {
    let mut result = state;
    while bytes != 0 && result != 0 {
        result = multiply(SHIFTS[bytes.trailing_zeros() as usize], result);
        bytes &= bytes - 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_follow_the_laws() {
        assert_eq!(power(0), ONE);
        assert_eq!(power(32), POLYNOMIAL);
        assert_eq!(power(ORDER as i64), ONE);
        assert_eq!(multiply(power(-33), power(33)), ONE);
        assert_eq!(multiply(power(1000), power(234)), power(1234));
        assert_eq!(shift(ONE, 1 << 40), power(8 << 40));
        assert_eq!(shift_key(128), SHIFT_KEYS[7]);
        assert_eq!(multiply(SHIFT_KEYS[7], power(33)), SHIFTS[7]);
    }
}
