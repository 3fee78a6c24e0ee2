//! Access advice for caches.

use std::ops::BitOr;

/// Access advice for bytes that are read or written, with the meaning of `posix_fadvise` and RADOS operation flags.  It
/// changes no result; a layer that does not support it ignores it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Advice(u8);

impl Advice {
    /// No advice.
    pub const NONE: Advice = Advice(0);
    /// Random access: adjacent bytes are not likely to be accessed next.
    pub const RANDOM: Advice = Advice(1);
    /// Sequential access: the bytes behind are accessed next.
    pub const SEQUENTIAL: Advice = Advice(1 << 1);
    /// Bytes will be accessed again soon, by any client.
    pub const WILL_NEED: Advice = Advice(1 << 2);
    /// Bytes will not be accessed soon by any client: caches may evict them.
    pub const DONT_NEED: Advice = Advice(1 << 3);
    /// Bytes will not be accessed again by this client: they need not enter a cache for it.
    pub const NO_CACHE: Advice = Advice(1 << 4);
    /// Copy of a whole volume: sequential, each byte once.
    pub const ONE_PASS: Advice = Advice(Self::SEQUENTIAL.0 | Self::NO_CACHE.0);

    /// Returns whether all of `other` is set.
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
