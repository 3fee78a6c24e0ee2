//! Merging of stored pairs with later changes, in key order.

use std::iter::Peekable;

use crate::tree::TreeKey;

/// Returns an iterator over the pairs of `stored` with layers of changes applied, newest layer first, in key order. The
/// inputs are consumed lazily.
pub fn merged<'a, S, L>(stored: S, layers: Vec<L>) -> Merged<'a, S, L>
where
    S: Iterator<Item = (&'a TreeKey, &'a Vec<u8>)>,
    L: Iterator<Item = (&'a TreeKey, &'a Option<Vec<u8>>)>,
{
    Merged { stored: stored.peekable(), layers: layers.into_iter().map(Iterator::peekable).collect() }
}

/// Iterator returned by [`merged`].
pub struct Merged<'a, S, L>
where
    S: Iterator<Item = (&'a TreeKey, &'a Vec<u8>)>,
    L: Iterator<Item = (&'a TreeKey, &'a Option<Vec<u8>>)>,
{
    stored: Peekable<S>,
    layers: Vec<Peekable<L>>,
}

impl<'a, S, L> Iterator for Merged<'a, S, L>
where
    S: Iterator<Item = (&'a TreeKey, &'a Vec<u8>)>,
    L: Iterator<Item = (&'a TreeKey, &'a Option<Vec<u8>>)>,
{
    type Item = (&'a TreeKey, &'a Vec<u8>);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let changed = self.layers.iter_mut().filter_map(|layer| layer.peek().map(|(key, _)| *key)).min();
            let Some(key) = changed else { return self.stored.next() };
            if self.stored.peek().is_some_and(|(stored, _)| *stored < key) {
                return self.stored.next();
            }
            // The newest layer with an entry for this key wins; entries below it are skipped.
            self.stored.next_if(|(stored, _)| *stored == key);
            let said: Vec<_> =
                self.layers.iter_mut().filter_map(|layer| layer.next_if(|(changed, _)| *changed == key)).collect();
            if let Some((key, Some(value))) = said.first() {
                return Some((key, value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    type Layer = BTreeMap<TreeKey, Option<Vec<u8>>>;

    fn key(number: u32) -> TreeKey {
        number.to_be_bytes().to_vec()
    }

    #[test]
    fn the_newest_layer_counts() {
        let stored: Vec<(TreeKey, Vec<u8>)> = (0..6).map(|i| (key(i * 2), vec![0])).collect();
        let older: Layer = [(key(2), None), (key(4), Some(vec![1])), (key(5), Some(vec![1]))].into();
        let newer: Layer = [(key(2), Some(vec![2])), (key(4), None), (key(20), Some(vec![2]))].into();
        let found = merged(stored.iter().map(|(key, value)| (key, value)), vec![newer.iter(), older.iter()]);
        let found: Vec<(u32, u8)> =
            found.map(|(key, value)| (u32::from_be_bytes(key[..].try_into().expect("4 bytes")), value[0])).collect();
        assert_eq!(found, [(0, 0), (2, 2), (5, 1), (6, 0), (8, 0), (10, 0), (20, 2)]);
    }

    #[test]
    fn no_more_is_looked_at_than_is_asked_for() {
        let stored: Vec<(TreeKey, Vec<u8>)> = Vec::new();
        let changes: Layer = (0..10_000).map(|i| (key(i), Some(vec![1]))).collect();
        let looked_at = Cell::new(0);
        let count = changes.iter().inspect(|_| looked_at.set(looked_at.get() + 1));
        let found = merged(stored.iter().map(|(key, value)| (key, value)), vec![count]).take(10).count();
        assert_eq!(found, 10);
        assert!(looked_at.get() <= 11, "{} changes looked at for 10 pairs", looked_at.get());
    }
}
