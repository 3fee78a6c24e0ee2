//! Rate limit of background reads.

use std::time::Duration;

use forebay_reactor::{Instant, now, sleep_until};

/// Limits background work to a number of bytes a second.
pub struct RepairPacer {
    /// Bytes a second; 0 for no limit.
    rate: u64,
    /// Time before which nothing more is done.
    next: Option<Instant>,
}

impl RepairPacer {
    /// Creates a limit of `rate` bytes a second; 0 for none.
    pub fn new(rate: u64) -> Self {
        Self { rate, next: None }
    }

    /// Waits until `bytes` more bytes may be processed.
    pub async fn pace(&mut self, bytes: u64) {
        if self.rate == 0 {
            return;
        }
        let start = match self.next {
            Some(next) if next > now() => {
                sleep_until(next).await;
                next
            }
            _ => now(),
        };
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        self.next = Some(start + Duration::from_nanos(nanos as u64));
    }
}
