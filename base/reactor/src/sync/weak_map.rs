use std::borrow::Borrow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

/// Minimum number of entries, live or dead, for a sweep.
const SWEEP_MIN: usize = 64;

/// Map that does not keep its values alive.
///
/// Dead entries are swept out as the map grows: it has at most twice as many entries as were live at the last sweep, or
/// 64, and an insertion costs O(log n) amortized.
pub struct WeakMap<K, V> {
    entries: RefCell<BTreeMap<K, Weak<V>>>,
    /// Number of entries from which the next insertion sweeps.
    sweep_at: Cell<usize>,
}

impl<K, V> Default for WeakMap<K, V> {
    fn default() -> Self {
        Self { entries: RefCell::default(), sweep_at: Cell::new(SWEEP_MIN) }
    }
}

impl<K: Ord, V> WeakMap<K, V> {
    /// Returns an empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the value of a key, if it is alive.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<Rc<V>>
    where
        K: Borrow<Q>,
    {
        self.entries.borrow().get(key).and_then(Weak::upgrade)
    }

    /// Returns whether the value of a key is alive.
    pub fn contains<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.entries.borrow().get(key).is_some_and(|value| value.strong_count() > 0)
    }

    /// Inserts a value, replacing the key's previous one.
    pub fn insert(&self, key: K, value: &Rc<V>) {
        let mut entries = self.entries.borrow_mut();
        if entries.len() >= self.sweep_at.get() {
            entries.retain(|_, value| value.strong_count() > 0);
            self.sweep_at.set(SWEEP_MIN.max(2 * entries.len()));
        }
        entries.insert(key, Rc::downgrade(value));
    }

    /// Removes a key.
    pub fn remove<Q: Ord + ?Sized>(&self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.entries.borrow_mut().remove(key);
    }

    /// Returns the live values, in the order of their keys.
    pub fn values(&self) -> Vec<Rc<V>> {
        self.entries.borrow().values().filter_map(Weak::upgrade).collect()
    }

    /// Returns the keys of the live values, in order.
    pub fn keys(&self) -> Vec<K>
    where
        K: Clone,
    {
        let entries = self.entries.borrow();
        entries.iter().filter(|(_, value)| value.strong_count() > 0).map(|(key, _)| key.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_nobody_holds_is_not_there_and_does_not_pile_up() {
        let map = WeakMap::new();
        let held: Vec<Rc<u32>> = (0..100).map(Rc::new).collect();
        held.iter().for_each(|value| map.insert(**value, value));
        for key in 100..10_000 {
            map.insert(key, &Rc::new(key));
            assert!(!map.contains(&key) && map.get(&key).is_none());
            assert!(map.entries.borrow().len() <= 2 * held.len(), "{key}");
        }
        assert_eq!((map.keys().len(), map.values().len()), (100, 100));
        drop(held);
        (0..200).for_each(|key| map.insert(key, &Rc::new(key)));
        assert!(map.entries.borrow().len() <= 2 * SWEEP_MIN, "{}", map.entries.borrow().len());
        assert!(map.values().is_empty());
    }

    #[test]
    fn a_key_has_the_last_value_that_was_inserted() {
        let map: WeakMap<String, u32> = WeakMap::new();
        let (first, second) = (Rc::new(1), Rc::new(2));
        map.insert("a".into(), &first);
        map.insert("a".into(), &second);
        assert_eq!(map.get("a"), Some(second.clone()));
        drop(second);
        assert_eq!(map.get("a"), None, "not the one before");
        map.insert("a".into(), &first);
        map.remove("a");
        assert!(!map.contains("a"));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u8),
        Drop(u8),
        Remove(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = any::<u8>();
        prop_oneof![4 => key.prop_map(Step::Insert), 3 => key.prop_map(Step::Drop), 1 => key.prop_map(Step::Remove)]
    }

    proptest! {
        #[test]
        fn as_a_map_of_what_is_held(steps in proptest::collection::vec(step(), 1..600)) {
            let (map, mut held) = (WeakMap::new(), BTreeMap::new());
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(key) => {
                        let value = Rc::new(number);
                        map.insert(key, &value);
                        held.insert(key, value);
                    }
                    Step::Drop(key) => drop(held.remove(&key)),
                    Step::Remove(key) => {
                        map.remove(&key);
                        held.remove(&key);
                    }
                }
                prop_assert_eq!(map.keys(), held.keys().copied().collect::<Vec<_>>());
                prop_assert!(map.values().iter().eq(held.values()));
                prop_assert!(held.iter().all(|(key, value)| map.get(key).as_ref() == Some(value) && map.contains(key)));
            }
        }
    }
}
