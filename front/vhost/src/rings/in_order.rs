//! Completions in the order of submission (VIRTIO_F_IN_ORDER, VIRTIO 1.2 sections 2.7.9 and 2.8.3).

use std::collections::VecDeque;

/// Chains in flight by the order in which they were submitted, and which of them are complete.
#[derive(Debug)]
pub(super) struct CompletionOrder {
    /// Chains in flight, oldest first: head or buffer ID, and the bytes written once complete.
    pending: VecDeque<(u16, Option<u32>)>,
    /// Number of the oldest chain in flight.
    first: u64,
    /// Number of the chain in flight with a given head or buffer ID.
    numbers: Vec<u64>,
}

impl CompletionOrder {
    pub(super) fn new(size: u16) -> Self {
        Self { pending: VecDeque::new(), first: 0, numbers: vec![0; usize::from(size)] }
    }

    /// Appends a chain.
    pub(super) fn fetched(&mut self, id: u16) {
        self.numbers[usize::from(id)] = self.first + self.pending.len() as u64;
        self.pending.push_back((id, None));
    }

    /// Records that a chain in flight is complete.
    pub(super) fn completed(&mut self, id: u16, written: u32) {
        let at = self.numbers[usize::from(id)].wrapping_sub(self.first) as usize;
        if let Some(pending) = self.pending.get_mut(at).filter(|pending| pending.0 == id) {
            pending.1 = Some(written);
        }
    }

    /// Removes the oldest chain if it is complete.
    pub(super) fn pop(&mut self) -> Option<(u16, u32)> {
        let (id, written) = *self.pending.front()?;
        let written = written?;
        self.pending.pop_front();
        self.first += 1;
        Some((id, written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_returned_once_all_earlier_ones_are_complete() {
        let mut order = CompletionOrder::new(8);
        [5, 3, 7].into_iter().for_each(|id| order.fetched(id));
        order.completed(3, 30);
        assert_eq!(order.pop(), None);
        order.completed(5, 50);
        assert_eq!((order.pop(), order.pop(), order.pop()), (Some((5, 50)), Some((3, 30)), None));
        order.fetched(5);
        order.completed(5, 51);
        assert_eq!(order.pop(), None, "7 is in flight");
        order.completed(7, 70);
        assert_eq!((order.pop(), order.pop(), order.pop()), (Some((7, 70)), Some((5, 51)), None));
    }
}
