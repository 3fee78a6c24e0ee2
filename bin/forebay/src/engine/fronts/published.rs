//! What one core offers to the others, by name.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Values by name, as every core sees them.  The engine's core changes them; the lock is held for a lookup when a
/// host connects, never for a request.
pub struct Published<T>(Arc<RwLock<BTreeMap<String, T>>>);

impl<T> Published<T> {
    /// Looks at what there is.
    pub fn read<R>(&self, look: impl FnOnce(&BTreeMap<String, T>) -> R) -> R {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Offers a value under a name, in the place of the one before.
    pub fn insert(&self, name: String, value: T) {
        let before = self.write(|published| published.insert(name, value));
        // It is dropped after the lock is given back: its own end may look here.
        drop(before);
    }

    /// Offers it no more; those who have it keep it.
    pub fn remove(&self, name: &str) {
        let before = self.write(|published| published.remove(name));
        drop(before);
    }

    /// Offers nothing any more.
    pub fn clear(&self) {
        drop(self.write(std::mem::take));
    }

    fn write<R>(&self, change: impl FnOnce(&mut BTreeMap<String, T>) -> R) -> R {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> Default for Published<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Clone for Published<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
