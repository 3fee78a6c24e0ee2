//! Payload cache: most recently written payloads, and those not on the medium yet.

use std::collections::{HashMap, VecDeque};

use forebay_block::BufList;

/// Payload cache: most recently written payloads, and those not on the medium yet.
#[derive(Default)]
pub(crate) struct PayloadCache {
    map: HashMap<u64, BufList>,
    order: VecDeque<u64>,
    bytes: usize,
}

fn retained(data: &BufList) -> usize {
    data.parts().iter().map(|part| part.retained().min(2 * part.len() + 4096)).sum()
}

impl PayloadCache {
    pub(crate) fn get(&self, seq: u64) -> Option<&BufList> {
        self.map.get(&seq)
    }

    pub(crate) fn insert(&mut self, seq: u64, data: BufList) {
        self.bytes += retained(&data);
        self.map.insert(seq, data);
        self.order.push_back(seq);
    }

    pub(crate) fn remove(&mut self, seq: u64) {
        if let Some(data) = self.map.remove(&seq) {
            self.bytes -= retained(&data);
        }
        while self.order.front().is_some_and(|front| !self.map.contains_key(front)) {
            self.order.pop_front();
        }
    }

    /// Evicts the oldest payloads before `before` until at most `bytes` are cached.
    pub(crate) fn shrink(&mut self, bytes: usize, before: u64) {
        while self.bytes > bytes
            && let Some(&front) = self.order.front().filter(|&&front| front < before)
        {
            self.remove(front);
        }
    }
}
