//! What is known of how bytes will be used, for whoever keeps caches.

use std::ops::BitOr;

/// Advice about bytes that are read or written: `posix_fadvise`'s, as RADOS has it.  It changes no result; a layer that
/// does not know what to make of it leaves it out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advice(u8);

impl Advice {
    /// Nothing is known.
    pub const NONE: Advice = Advice(0);
    /// Those around them are not likely to be next.
    pub const RANDOM: Advice = Advice(1);
    /// Those behind them are next.
    pub const SEQUENTIAL: Advice = Advice(1 << 1);
    /// They are wanted again soon, by anybody.
    pub const WILL_NEED: Advice = Advice(1 << 2);
    /// Nobody wants them soon: who has them in a cache may let go of them.
    pub const DONT_NEED: Advice = Advice(1 << 3);
    /// This client does not want them again: they need not come into a cache for it.
    pub const NO_CACHE: Advice = Advice(1 << 4);
    /// Of a copy of a whole volume: one byte after the other, each one once.
    pub const ONE_PASS: Advice = Advice(Self::SEQUENTIAL.0 | Self::NO_CACHE.0);

    /// All of `other` is in it.
    pub const fn has(self, other: Advice) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Advice {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
