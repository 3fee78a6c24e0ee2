//! Space of a unit's pool, as hosts are told of it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::log::Provisioning;

/// Pool space, updated by the owner of the pool.
#[derive(Debug, Default)]
pub struct PoolSpace {
    used: AtomicU64,
    available: AtomicU64,
    /// Used bytes from which hosts are notified; 0 disables the threshold.
    threshold: AtomicU64,
    /// Number of times the threshold was exceeded.
    passed: AtomicU32,
}

impl PoolSpace {
    /// Creates a record whose threshold is `threshold` used bytes; 0 disables it.
    pub fn new(threshold: u64) -> Self {
        Self { threshold: threshold.into(), ..Self::default() }
    }

    /// Returns the last known space.
    pub fn provisioning(&self) -> Provisioning {
        Provisioning { available: self.available.load(Ordering::Relaxed), used: self.used.load(Ordering::Relaxed) }
    }

    /// Returns the threshold in used bytes, if enabled.
    pub fn threshold(&self) -> Option<u64> {
        Some(self.threshold.load(Ordering::Relaxed)).filter(|&threshold| threshold > 0)
    }

    /// Updates used and available bytes, and the threshold.
    pub fn update(&self, used: u64, available: u64, threshold: u64) {
        let before = self.used.swap(used, Ordering::Relaxed);
        self.available.store(available, Ordering::Relaxed);
        let threshold_before = self.threshold.swap(threshold, Ordering::Relaxed);
        let was_past = threshold_before > 0 && before >= threshold_before;
        if threshold > 0 && used >= threshold && !was_past {
            self.passed.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns the number of times the threshold was exceeded.
    pub fn passed(&self) -> u32 {
        self.passed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_passed_once_until_it_is_left() {
        let space = PoolSpace::new(100);
        space.update(50, 50, 100);
        assert_eq!(space.passed(), 0);
        space.update(100, 0, 100);
        space.update(120, 0, 100);
        assert_eq!(space.passed(), 1);
        space.update(80, 20, 100);
        space.update(101, 0, 100);
        assert_eq!((space.passed(), space.threshold()), (2, Some(100)));
        space.update(200, 0, 0);
        assert_eq!((space.passed(), space.threshold()), (2, None));
    }
}
