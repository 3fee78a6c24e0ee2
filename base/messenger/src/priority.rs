//! Priority queue: highest priority first, FIFO within a priority.

use std::collections::{BTreeMap, VecDeque};

/// Priority queue.
#[derive(Debug)]
pub(crate) struct PriorityQueue<M> {
    /// Items of the most recent sole priority, `priority`: most items have the same one.
    single: VecDeque<M>,
    priority: u16,
    others: BTreeMap<u16, VecDeque<M>>,
    len: usize,
}

impl<M> Default for PriorityQueue<M> {
    fn default() -> Self {
        Self { single: VecDeque::new(), priority: 0, others: BTreeMap::new(), len: 0 }
    }
}

impl<M> PriorityQueue<M> {
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub(crate) fn push(&mut self, priority: u16, item: M) {
        self.len += 1;
        if priority != self.priority && self.single.is_empty() && !self.others.contains_key(&priority) {
            self.priority = priority;
        }
        if priority == self.priority {
            self.single.push_back(item);
        } else {
            self.others.entry(priority).or_default().push_back(item);
        }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<M> {
        if let Some(mut entry) = self.others.last_entry()
            && (*entry.key() > self.priority || self.single.is_empty())
        {
            let item = entry.get_mut().pop_front();
            if entry.get().is_empty() {
                entry.remove();
            }
            self.len -= usize::from(item.is_some());
            return item;
        }
        let item = self.single.pop_front();
        self.len -= usize::from(item.is_some());
        item
    }

    /// Removes and returns all items, in order.
    pub(crate) fn drain(&mut self) -> Vec<M> {
        std::iter::from_fn(|| self.pop()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_agrees_with_sorting(steps in prop::collection::vec(prop::option::weighted(0.6, 0u16..5), 0..200)) {
            let mut queue = PriorityQueue::default();
            let mut model: Vec<(u16, usize)> = Vec::new();
            for (at, step) in steps.into_iter().enumerate() {
                match step {
                    Some(priority) => {
                        queue.push(priority, (priority, at));
                        model.push((priority, at));
                    }
                    None => {
                        let first = model.iter().enumerate().max_by_key(|(_, (priority, at))| (*priority, usize::MAX - at));
                        let expected = first.map(|(index, _)| index).map(|index| model.remove(index));
                        prop_assert_eq!(queue.pop(), expected);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }
}
