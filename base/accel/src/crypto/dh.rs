//! Finite-field Diffie-Hellman in the groups of RFC 7919, for protocols that ask for it.

use std::fmt;
use std::ptr::{self, NonNull};

use aws_lc_sys as aws;
use zeroize::Zeroizing;

/// Diffie-Hellman group of RFC 7919, appendix A.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DhGroup {
    /// Group of 2,048 bits.
    Ffdhe2048,
    /// Group of 3,072 bits.
    Ffdhe3072,
    /// Group of 4,096 bits.
    Ffdhe4096,
    /// Group of 6,144 bits.
    Ffdhe6144,
    /// Group of 8,192 bits.
    Ffdhe8192,
}

/// Public value of the peer that no honest computation in the group can yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("Diffie-Hellman value out of the range of its group")]
pub struct NotInGroup;

/// floor(2^8062 e): the digits of Euler's number that the RFC takes for 8,192 bits.  The other groups have the
/// beginning of them.
const E: [&str; 21] = [
    "adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363630c75d8",
    "f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77",
    "e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f468",
    "1d4f42a3de394df4ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff",
    "8e4f1232eef28183c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b4238611fcfdc",
    "de355b3b6519035bbc34f4def99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91caefe130985139270",
    "b4130c93bc437944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69ee86d2bc522363a0dabc521979b0deada",
    "1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c25e41d2b669e1ef16e6f52c3164df4fb7930e9e4e58857b6",
    "ac7d5f42d69f6d187763cf1d5503400487f55ba57e31cc7a7135c886efb4318aed6a1e012d9e6832a907600a918130c4",
    "6dc778f971ad0038092999a333cb8b7a1a1db93d7140003c2a4ecea9f98d0acc0a8291cdcec97dcf8ec9b55a7f88a46b",
    "4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a4e677d2c38532a3a23ba4442caf53ea63bb454329b7624c8",
    "917bdd64b1c0fd4cb38e8c334c701c3acdad0657fccfec719b1f5c3e4e46041f388147fb4cfdb477a52471f7a9a96910",
    "b855322edb6340d8a00ef092350511e30abec1fff9e3a26e7fb29f8c183023c3587e38da0077d9b4763e4e4b94b2bbc1",
    "94c6651e77caf992eeaac0232a281bf6b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e",
    "62292c311562a846505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b71f9dc6b80d6",
    "3fdd4a8e9adb1e6962a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004cf600c8381e425a31d951ae64",
    "fdb23fcec9509d43687feb69edd1cc5e0b8cc3bdf64b10ef86b63142a3ab8829555b2f747c932665cb2c0f1cc01bd702",
    "29388839d2af05e454504ac78b7582822846c0ba35c35f5c59160cc046fd8251541fc68c9c86b022bb7099876a460e74",
    "51a8a93109703fee1c217e6c3826e52c51aa691e0e423cfc99e9e31650c1217b624816cdad9a95f9d5b8019488d9c0a0",
    "a1fe3075a577e23183f81d4a3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30fafabe1c5d71a87e",
    "2f741ef8c1fe86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88cd68c8bb7c51eef6d",
];

/// Maximum length of an exponent in bytes.
pub const EXPONENT_MAX: usize = 56;

impl DhGroup {
    /// Every group, the weakest first.
    pub const ALL: [DhGroup; 5] =
        [DhGroup::Ffdhe2048, DhGroup::Ffdhe3072, DhGroup::Ffdhe4096, DhGroup::Ffdhe6144, DhGroup::Ffdhe8192];

    /// Returns the length of a value of the group in bytes.
    pub fn len(self) -> usize {
        match self {
            DhGroup::Ffdhe2048 => 256,
            DhGroup::Ffdhe3072 => 384,
            DhGroup::Ffdhe4096 => 512,
            DhGroup::Ffdhe6144 => 768,
            DhGroup::Ffdhe8192 => 1024,
        }
    }

    /// Returns false: no group has values of length zero.
    pub fn is_empty(self) -> bool {
        false
    }

    /// Returns the offset X, which is added to the digits of e so that a safe prime results.
    fn offset(self) -> u64 {
        match self {
            DhGroup::Ffdhe2048 => 560_316,
            DhGroup::Ffdhe3072 => 2_625_351,
            DhGroup::Ffdhe4096 => 5_736_041,
            DhGroup::Ffdhe6144 => 15_705_020,
            DhGroup::Ffdhe8192 => 10_965_728,
        }
    }

    /// Random bytes of an exponent: at least twice the bits that the group is worth (RFC 7919, section 5.2).
    pub fn exponent_len(self) -> usize {
        match self {
            DhGroup::Ffdhe2048 => 32,
            DhGroup::Ffdhe3072 => 40,
            DhGroup::Ffdhe4096 => 48,
            DhGroup::Ffdhe6144 | DhGroup::Ffdhe8192 => EXPONENT_MAX,
        }
    }

    /// Returns the prime, p = 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1, the most significant byte first.
    fn prime(self) -> Vec<u8> {
        let digits = E.concat();
        let middle = self.len() - 16;
        let mut prime = vec![0xFF; 8];
        prime.extend((0..middle).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("digits")));
        // The -1 borrows from the middle part and leaves 64 ones.
        let mut carry = self.offset() - 1;
        for byte in prime.iter_mut().rev() {
            carry += u64::from(*byte);
            *byte = carry as u8;
            carry >>= 8;
        }
        prime.extend([0xFF; 8]);
        prime
    }
}

/// Secret of one side, for one exchange.
pub struct DhExchange {
    group: DhGroup,
    exponent: Number,
    prime: Number,
}

impl DhExchange {
    /// Creates a secret from [`DhGroup::exponent_len`] random bytes.
    ///
    /// # Panics
    /// When the number of bytes differs from that, or the bytes are evidently not random.
    pub fn new(group: DhGroup, random: &[u8]) -> Self {
        assert_eq!(random.len(), group.exponent_len(), "random bytes for {group:?}");
        let exponent = Number::of(random);
        assert!(exponent.bits() > 8, "random bytes that are not random");
        Self { group, exponent, prime: Number::of(&group.prime()) }
    }

    /// Returns the group.
    pub fn group(&self) -> DhGroup {
        self.group
    }

    /// Returns the public value to send to the peer.
    pub fn public(&self) -> Vec<u8> {
        self.power(&Number::of(&[2])).to_vec()
    }

    /// Returns the shared secret of [`DhGroup::len`] bytes, computed from the peer's public value.
    ///
    /// # Errors
    /// The value is 0, 1, p - 1 or more: everybody would know the result.
    pub fn agree(&self, theirs: &[u8]) -> Result<Zeroizing<Vec<u8>>, NotInGroup> {
        if theirs.len() > self.group.len() {
            return Err(NotInGroup);
        }
        let value = Number::of(theirs);
        let mut last = self.group.prime();
        *last.last_mut().expect("a prime") -= 1;
        if value.bits() <= 1 || value.is_at_least(&Number::of(&last)) {
            return Err(NotInGroup);
        }
        Ok(self.power(&value))
    }

    /// `base` to the secret, modulo the prime, in time that does not depend on the secret.
    fn power(&self, base: &Number) -> Zeroizing<Vec<u8>> {
        let mut out = Zeroizing::new(vec![0; self.group.len()]);
        let result = Number::of(&[]);
        // SAFETY: all numbers are alive and different from the result; the context is made and freed here; the prime is
        // odd, and the base is smaller than it.  The output has the length that is given.
        let done = unsafe {
            let context = aws::BN_CTX_new();
            assert!(!context.is_null(), "no memory for a number");
            let done = aws::BN_mod_exp_mont_consttime(
                result.0.as_ptr(),
                base.0.as_ptr(),
                self.exponent.0.as_ptr(),
                self.prime.0.as_ptr(),
                context,
                ptr::null(),
            );
            aws::BN_CTX_free(context);
            done == 1 && aws::BN_bn2bin_padded(out.as_mut_ptr(), out.len(), result.0.as_ptr()) == 1
        };
        assert!(done, "no memory for a power");
        out
    }
}

impl fmt::Debug for DhExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DhExchange({:?}, a secret)", self.group)
    }
}

/// Big number of the library; erased when dropped.
struct Number(NonNull<aws::BIGNUM>);

impl Number {
    /// Converts bytes, the most significant first.
    fn of(bytes: &[u8]) -> Self {
        // SAFETY: the bytes have the length that is given; a null result asks for a new number.
        let number = unsafe { aws::BN_bin2bn(bytes.as_ptr(), bytes.len(), ptr::null_mut()) };
        Self(NonNull::new(number).expect("no memory for a number"))
    }

    fn bits(&self) -> u32 {
        // SAFETY: the number is alive.
        unsafe { aws::BN_num_bits(self.0.as_ptr()) }
    }

    fn is_at_least(&self, other: &Number) -> bool {
        // SAFETY: both numbers are alive.
        unsafe { aws::BN_cmp(self.0.as_ptr(), other.0.as_ptr()) >= 0 }
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        // SAFETY: it was made by `of`, and there is no other reference to it.
        unsafe { aws::BN_clear_free(self.0.as_ptr()) };
    }
}

// SAFETY: it is memory without ties to a thread.
unsafe impl Send for Number {}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(group: DhGroup, seed: u8) -> DhExchange {
        let random: Vec<u8> = (0..group.exponent_len()).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
        DhExchange::new(group, &random)
    }

    #[test]
    fn the_primes_are_those_of_the_rfc() {
        // Last bytes before the ones, as appendix A prints them.
        for (group, tail) in [
            (DhGroup::Ffdhe2048, 0x886B_4238_6128_5C97_u64),
            (DhGroup::Ffdhe3072, 0x25E4_1D2B_66C6_2E37),
            (DhGroup::Ffdhe4096, 0xC68A_007E_5E65_5F6A),
            (DhGroup::Ffdhe6144, 0xA40E_329C_D0E4_0E65),
            (DhGroup::Ffdhe8192, 0xD68C_8BB7_C5C6_424C),
        ] {
            let prime = group.prime();
            assert_eq!(prime.len(), group.len());
            assert_eq!(prime[prime.len() - 16..prime.len() - 8], tail.to_be_bytes(), "{group:?}");
            // 2 has the order (p - 1) / 2 = q, as in a group of a safe prime.
            let mut half = Number::of(&prime);
            // SAFETY: the number is alive, and shifted in place.
            assert_eq!(unsafe { aws::BN_rshift1(half.0.as_mut(), half.0.as_ptr()) }, 1);
            let check = DhExchange { group, exponent: half, prime: Number::of(&prime) };
            let one = check.power(&Number::of(&[2]));
            assert!(one[..one.len() - 1].iter().all(|&byte| byte == 0) && one[one.len() - 1] == 1, "{group:?}");
        }
    }

    #[test]
    fn both_sides_agree_and_others_do_not() {
        for group in DhGroup::ALL {
            let (ours, theirs, other) = (exchange(group, 1), exchange(group, 2), exchange(group, 3));
            let shared = ours.agree(&theirs.public()).expect("in the group");
            assert_eq!(shared.len(), group.len());
            assert_eq!(shared, theirs.agree(&ours.public()).expect("in the group"));
            assert_ne!(shared, other.agree(&ours.public()).expect("in the group"));
        }
    }

    #[test]
    fn values_that_tell_the_result_are_refused() {
        let ours = exchange(DhGroup::Ffdhe2048, 9);
        let prime = DhGroup::Ffdhe2048.prime();
        let mut less = prime.clone();
        *less.last_mut().expect("a byte") -= 1;
        for bad in [&[][..], &[0; 256], &[1], &prime, &less, &[1; 257]] {
            assert_eq!(ours.agree(bad).map(|_| ()), Err(NotInGroup));
        }
        *less.last_mut().expect("a byte") -= 1;
        assert!(ours.agree(&less).is_ok());
        assert_eq!(format!("{ours:?}"), "DhExchange(Ffdhe2048, a secret)");
    }
}
