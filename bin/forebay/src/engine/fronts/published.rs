//! Values that one core publishes to the others, by name.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, PoisonError, RwLock};

use forebay_block::{BlockDevice, DeviceHandle};

/// Published values by name, shared by all cores.  Only the engine's core changes them.  The lock is held for a
/// lookup when a host connects, never for a request.
pub struct Published<T>(Arc<RwLock<BTreeMap<String, T>>>);

impl<T> Published<T> {
    /// Reads the published values under the lock.
    pub fn read<R>(&self, look: impl FnOnce(&BTreeMap<String, T>) -> R) -> R {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Publishes a value under a name, replacing the previous one.
    pub fn insert(&self, name: String, value: T) {
        let before = self.write(|published| published.insert(name, value));
        // Dropped after the lock is released: the destructor may read these values.
        drop(before);
    }

    /// Withdraws a value; holders keep it.
    pub fn remove(&self, name: &str) {
        let before = self.write(|published| published.remove(name));
        drop(before);
    }

    /// Withdraws all values.
    pub fn clear(&self) {
        drop(self.write(std::mem::take));
    }

    fn write<R>(&self, change: impl FnOnce(&mut BTreeMap<String, T>) -> R) -> R {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Published<DeviceHandle> {
    /// Opens a published device on this core, which is not the engine's: requests are forwarded.
    pub fn open(&self, name: &str) -> Option<Rc<dyn BlockDevice>> {
        let handle = self.read(|published| published.get(name).cloned())?;
        Some(handle.attach())
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
