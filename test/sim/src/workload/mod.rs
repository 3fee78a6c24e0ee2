//! Seeded workloads with concurrency, for any block device and any object backend.

mod block;
mod object;

pub use block::{BlockLoad, verify_blocks};
pub use object::{ObjectLoad, verify_objects};

use crate::rng::Rng;

/// Odds of several things, each run having odds of its own: a run that hardly ever flushes finds what one that
/// always flushes does not.
#[derive(Debug, Clone)]
struct Odds<T> {
    items: Vec<(T, u64)>,
    total: u64,
}

impl<T: Copy> Odds<T> {
    /// From usual weights, each of which is left out, halved, kept or quadrupled; the first one always stays.
    fn draw(rng: &mut Rng, usual: &[(T, u64)]) -> Self {
        let mut items = Vec::new();
        for (index, &(item, weight)) in usual.iter().enumerate() {
            let factor = *rng.pick(&[0, 2, 4, 4, 4, 16]);
            items.push((item, if index == 0 { weight * factor.max(2) } else { weight * factor }));
        }
        let total = items.iter().map(|(_, weight)| weight).sum();
        Self { items, total }
    }

    fn pick(&self, rng: &mut Rng) -> T {
        let mut drawn = rng.below(self.total);
        for &(item, weight) in &self.items {
            if drawn < weight {
                return item;
            }
            drawn -= weight;
        }
        self.items[0].0
    }
}
