//! Instruction tiers: the ladder of processor feature sets, those available, and the one in use.
//!
//! Each tier stands for a set of features, all of which are required, so that a kernel needs one check.  The
//! environment variable `FOREBAY_ACCEL` restricts a process to a lower tier than the processor has, for tests and to
//! isolate a faulty kernel; it never enables features that the processor lacks.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// Environment variable that forces a tier.
pub const VARIABLE: &str = "FOREBAY_ACCEL";

/// Set of processor features that kernels are written for, from the plainest to the strongest.
///
/// Ordered by strength per architecture: [`Tier::Portable`] is below every other tier, and a tier of an architecture
/// has all features of the lower ones of that architecture.  Tiers of two architectures are not comparable, so
/// `tier >= Tier::Avx2` is false on AArch64.  Kernels are selected by that order ("at least GFNI") and never by
/// equality: a stronger tier without a kernel of its own keeps the one of the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Portable code without special instructions: tables and 64-bit words.
    Portable,
    /// x86-64 with SSSE3, SSE4.2 (the CRC32 instruction) and PCLMULQDQ: 2010 and later.
    Sse,
    /// x86-64 with AVX2, and all of [`Tier::Sse`]: 2013 and later.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ, and all of [`Tier::Avx2`]: 2017 and later.
    Avx512,
    /// x86-64 with GFNI, VPCLMULQDQ and VAES on 512-bit vectors, VBMI2, and all of [`Tier::Avx512`]: 2019 and later.
    Gfni,
    /// AArch64 with NEON, the CRC32 instructions and PMULL.
    Neon,
}

/// Reason why a tier cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TierError {
    /// Name that no tier has.
    #[error("unknown tier `{0}`; use one of: portable, sse, avx2, avx512, gfni, neon")]
    Unknown(String),
    /// Tier that this processor lacks.
    #[error("this processor lacks instructions of the tier `{0}`")]
    Absent(Tier),
}

impl PartialOrd for Tier {
    fn partial_cmp(&self, other: &Tier) -> Option<Ordering> {
        let comparable = self == other
            || matches!((self, other), (Tier::Portable, _) | (_, Tier::Portable))
            || self.is_x86() == other.is_x86();
        // The tiers of one architecture are declared in the order of their strength.
        comparable.then(|| (*self as u8).cmp(&(*other as u8)))
    }
}

impl Tier {
    /// Tiers, the plainest first.
    pub const ALL: [Tier; 6] = [Tier::Portable, Tier::Sse, Tier::Avx2, Tier::Avx512, Tier::Gfni, Tier::Neon];

    /// Returns the name in `FOREBAY_ACCEL` and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Portable => "portable",
            Tier::Sse => "sse",
            Tier::Avx2 => "avx2",
            Tier::Avx512 => "avx512",
            Tier::Gfni => "gfni",
            Tier::Neon => "neon",
        }
    }

    /// Returns true for the tiers of x86-64.
    fn is_x86(self) -> bool {
        !matches!(self, Tier::Portable | Tier::Neon)
    }

    /// Returns true if this processor has all features of the tier.
    pub fn is_available(self) -> bool {
        match self {
            Tier::Portable => true,
            Tier::Neon => neon(),
            _ => x86(self),
        }
    }

    /// Lists the tiers this processor has, the plainest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Tier> + Clone {
        Tier::ALL.into_iter().filter(|tier| tier.is_available())
    }

    /// Returns the strongest tier this processor has.
    pub fn best() -> Tier {
        Tier::available().next_back().unwrap_or(Tier::Portable)
    }

    /// Returns the tier in use: the one `FOREBAY_ACCEL` names, where it can be used, otherwise the best.
    ///
    /// Decided once per process, at the first call.  An invalid or unavailable value is ignored here; programs call
    /// [`Tier::forced`] at their start to report it.
    #[inline]
    pub fn current() -> Tier {
        static CURRENT: OnceLock<Tier> = OnceLock::new();
        *CURRENT.get_or_init(|| Tier::forced().ok().flatten().unwrap_or_else(Tier::best))
    }

    /// Returns the tier that `FOREBAY_ACCEL` asks for; `None` where it is unset or empty.
    ///
    /// # Errors
    /// The variable names no tier, or one that this processor lacks.
    pub fn forced() -> Result<Option<Tier>, TierError> {
        match std::env::var_os(VARIABLE) {
            Some(value) if !value.is_empty() => {
                let tier: Tier = value.to_string_lossy().parse()?;
                if tier.is_available() { Ok(Some(tier)) } else { Err(TierError::Absent(tier)) }
            }
            _ => Ok(None),
        }
    }
}

/// Table of implementations by tier.
///
/// Invariants: the first row is that of [`Tier::Portable`], and no row needs a weaker tier than a row before it, so
/// the last row that a tier satisfies is the strongest one.
pub(crate) struct ByTier<T: 'static>(&'static [(Tier, T)]);

impl<T> ByTier<T> {
    /// Makes a table of rows: the minimum tier, and its implementation.
    pub(crate) const fn new(rows: &'static [(Tier, T)]) -> Self {
        assert!(matches!(rows[0].0, Tier::Portable), "a table of kernels begins with the portable ones");
        Self(rows)
    }

    /// Returns the implementation for a tier: its own, or that of the strongest tier below that has one.
    pub(crate) fn of(&self, tier: Tier) -> &'static T {
        &self.row(tier).1
    }

    fn row(&self, tier: Tier) -> &'static (Tier, T) {
        let row = self.0.iter().rev().find(|(needed, _)| *needed <= tier);
        row.unwrap_or_else(|| unreachable!("every tier is at least portable"))
    }

    /// Checks the invariants, and that no tier selects a weaker row than a tier below, nor one that it does not
    /// satisfy.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        for (at, (needed, _)) in self.0.iter().enumerate() {
            let weaker =
                |before: &Tier| !matches!(before.partial_cmp(needed), Some(Ordering::Equal | Ordering::Greater));
            assert!(self.0[..at].iter().all(|(before, _)| weaker(before)), "the row of {needed} is too late");
        }
        for tier in Tier::ALL {
            let (needed, _) = self.row(tier);
            assert!(*needed <= tier, "{tier} selects {needed}");
            for lower in Tier::ALL.into_iter().filter(|lower| *lower <= tier) {
                assert!(self.row(lower).0 <= *needed, "{lower} selects more than {tier}");
            }
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for Tier {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Tier, TierError> {
        Tier::ALL
            .into_iter()
            .find(|tier| tier.name().eq_ignore_ascii_case(text.trim()))
            .ok_or_else(|| TierError::Unknown(text.to_owned()))
    }
}

#[cfg(target_arch = "x86_64")]
fn x86(tier: Tier) -> bool {
    use std::arch::is_x86_feature_detected as has;
    let sse = || has!("ssse3") && has!("sse4.1") && has!("sse4.2") && has!("pclmulqdq") && has!("popcnt");
    let avx2 = || sse() && has!("avx") && has!("avx2") && has!("bmi1") && has!("bmi2");
    let avx512 = || avx2() && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
    match tier {
        Tier::Sse => sse(),
        Tier::Avx2 => avx2(),
        Tier::Avx512 => avx512(),
        Tier::Gfni => avx512() && has!("gfni") && has!("vpclmulqdq") && has!("vaes") && has!("avx512vbmi2"),
        Tier::Portable | Tier::Neon => false,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn x86(_: Tier) -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn neon() -> bool {
    use std::arch::is_aarch64_feature_detected as has;
    has!("neon") && has!("crc") && has!("aes")
}

#[cfg(not(target_arch = "aarch64"))]
fn neon() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for tier in Tier::ALL {
            assert_eq!(tier.name().parse(), Ok(tier));
        }
        assert_eq!(" AVX2 ".parse(), Ok(Tier::Avx2));
        assert_eq!("mmx".parse::<Tier>(), Err(TierError::Unknown("mmx".into())));
    }

    #[test]
    fn tiers_are_ordered_per_architecture() {
        let x86 = [Tier::Portable, Tier::Sse, Tier::Avx2, Tier::Avx512, Tier::Gfni];
        for (at, tier) in x86.iter().enumerate() {
            for (other_at, other) in x86.iter().enumerate() {
                assert_eq!(tier.partial_cmp(other), Some(at.cmp(&other_at)), "{tier} {other}");
            }
        }
        assert!(Tier::Neon > Tier::Portable && Tier::Neon >= Tier::Neon);
        for tier in &x86[1..] {
            assert_eq!((tier.partial_cmp(&Tier::Neon), Tier::Neon.partial_cmp(tier)), (None, None), "{tier}");
        }
    }

    #[test]
    fn a_tier_without_a_kernel_of_its_own_takes_that_of_the_strongest_tier_below() {
        let table = const { ByTier::new(&[(Tier::Portable, "words"), (Tier::Sse, "sse"), (Tier::Avx512, "avx512")]) };
        table.check();
        let taken = Tier::ALL.map(|tier| *table.of(tier));
        assert_eq!(taken, ["words", "sse", "sse", "avx512", "avx512", "words"]);
    }

    #[test]
    #[should_panic(expected = "too late")]
    fn rows_out_of_order_are_found() {
        ByTier::new(&[(Tier::Portable, 0), (Tier::Gfni, 2), (Tier::Sse, 1)]).check();
    }

    #[test]
    fn every_processor_has_a_tier_and_none_has_those_of_two_architectures() {
        let available: Vec<Tier> = Tier::available().collect();
        assert_eq!(available[0], Tier::Portable);
        assert_eq!(available.last(), Some(&Tier::best()));
        assert!(!(available.contains(&Tier::Neon) && available.contains(&Tier::Sse)));
        assert!(available.contains(&Tier::current()));
    }
}
