//! Seeded workloads with concurrency, for any block device and any object backend.

mod block;
mod object;

pub use block::{BlockLoad, Stream, verify_blocks};
pub use object::{ObjectLoad, verify_objects};

use std::cell::Cell;

use forebay_block::{ErrorKind, Result};

use crate::rng::Rng;

/// Counts of the results of a load's requests.
#[derive(Debug, Default)]
pub struct Seen {
    /// All completed requests.
    pub answered: Cell<u64>,
    /// Requests that ended with `NoSpace`.
    pub no_space: Cell<u64>,
    /// Requests that ended with `Corrupt`.
    pub corrupt: Cell<u64>,
    /// Requests that ended with `Io`.
    pub io: Cell<u64>,
}

impl Seen {
    pub(crate) fn note<T>(&self, result: &Result<T>) {
        let add = |count: &Cell<u64>| count.set(count.get() + 1);
        add(&self.answered);
        match result.as_ref().err().map(forebay_block::Error::kind) {
            Some(ErrorKind::NoSpace) => add(&self.no_space),
            Some(ErrorKind::Corrupt) => add(&self.corrupt),
            Some(ErrorKind::Io) => add(&self.io),
            _ => {}
        }
    }
}

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
