//! Arithmetic in GF(2^8) modulo x^8+x^4+x^3+x^2+1 (0x11d), the field of ISA-L and of jerasure with w=8.

/// Powers of the generator 2, twice over so that a sum of two logarithms needs no reduction.
const EXPONENTS: [u8; 510] = tables().0;

/// Logarithm to base 2 of everything but 0.
const LOGARITHMS: [u8; 256] = tables().1;

const fn tables() -> ([u8; 510], [u8; 256]) {
    let (mut exponents, mut logarithms) = ([0; 510], [0; 256]);
    let mut value = 1u16;
    let mut power = 0;
    while power < 255 {
        exponents[power] = value as u8;
        exponents[power + 255] = value as u8;
        logarithms[value as usize] = power as u8;
        value <<= 1;
        if value & 0x100 != 0 {
            value ^= 0x11d;
        }
        power += 1;
    }
    (exponents, logarithms)
}

/// Returns the product.
#[inline]
pub(crate) fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXPONENTS[usize::from(LOGARITHMS[usize::from(a)]) + usize::from(LOGARITHMS[usize::from(b)])]
}

/// Returns the multiplicative inverse of anything but 0.
#[inline]
pub(crate) fn invert(a: u8) -> u8 {
    debug_assert_ne!(a, 0);
    EXPONENTS[255 - usize::from(LOGARITHMS[usize::from(a)])]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplies as it is taught: add shifted copies, reduce.
    fn plain(a: u8, b: u8) -> u8 {
        let mut product = 0u16;
        for bit in 0..8 {
            if b >> bit & 1 == 1 {
                product ^= u16::from(a) << bit;
            }
        }
        for bit in (8..15).rev() {
            if product >> bit & 1 == 1 {
                product ^= 0x11d << (bit - 8);
            }
        }
        product as u8
    }

    #[test]
    fn tables_agree_with_polynomials() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(multiply(a, b), plain(a, b), "{a} {b}");
            }
            if a != 0 {
                assert_eq!(multiply(a, invert(a)), 1, "{a}");
            }
        }
    }
}
