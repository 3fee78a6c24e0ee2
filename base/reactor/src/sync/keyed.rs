use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Permit, Semaphore};

/// Locks by key: waiting for one key delays no user of another.  Waiters for the same key are served in the order in
/// which they asked.
pub struct KeyedLock<K> {
    locks: Rc<RefCell<BTreeMap<K, Semaphore>>>,
}

/// Guard of one key's lock; unlocks when dropped.
pub struct KeyedGuard<K: Ord> {
    /// Released before the check whether the key still has users.
    permit: Option<Permit>,
    user: User<K>,
}

/// Holder of a key's lock or waiter for it.
struct User<K: Ord> {
    locks: Rc<RefCell<BTreeMap<K, Semaphore>>>,
    key: K,
}

impl<K> Default for KeyedLock<K> {
    fn default() -> Self {
        Self { locks: Rc::default() }
    }
}

impl<K: Ord + Clone> KeyedLock<K> {
    /// Returns locks without users.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for the lock of this key and takes it.  Joins the queue when the future is first polled.
    pub async fn lock<Q>(&self, key: &Q) -> KeyedGuard<K>
    where
        K: std::borrow::Borrow<Q>,
        Q: Ord + ToOwned<Owned = K> + ?Sized,
    {
        let lock = {
            let mut locks = self.locks.borrow_mut();
            locks.entry(key.to_owned()).or_insert_with(|| Semaphore::new(1)).clone()
        };
        // Removes the key again if the wait is abandoned.
        let user = User { locks: self.locks.clone(), key: key.to_owned() };
        let permit = lock.acquire(1).await;
        KeyedGuard { permit: Some(permit), user }
    }

    /// Returns whether this key's lock is taken or waited for.
    pub fn is_locked<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: std::borrow::Borrow<Q>,
    {
        self.locks.borrow().contains_key(key)
    }

    /// Returns the number of keys whose lock is taken or waited for.
    pub fn len(&self) -> usize {
        self.locks.borrow().len()
    }

    /// Returns whether no lock is taken or waited for.
    pub fn is_empty(&self) -> bool {
        self.locks.borrow().is_empty()
    }
}

impl<K: Ord> KeyedGuard<K> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        &self.user.key
    }
}

impl<K: Ord> Drop for KeyedGuard<K> {
    fn drop(&mut self) {
        // The next waiter has the lock now; the field that is dropped after this sees that.
        self.permit.take();
    }
}

impl<K: Ord> Drop for User<K> {
    fn drop(&mut self) {
        let mut locks = self.locks.borrow_mut();
        if locks.get(&self.key).is_some_and(|lock| lock.available() == 1 && !lock.is_waited_for()) {
            locks.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::driver::DriverChoice;
    use crate::executor::{Reactor, spawn, yield_now};

    async fn settle() {
        for _ in 0..8 {
            yield_now().await;
        }
    }

    fn on_reactor(test: impl Future<Output = ()>) {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(test);
    }

    #[test]
    fn a_key_is_had_by_one_at_a_time_in_the_order_of_asking() {
        on_reactor(async {
            let locks: KeyedLock<String> = KeyedLock::new();
            let locks = Rc::new(locks);
            let first = locks.lock("a").await;
            assert_eq!(first.key(), "a");
            let order = Rc::new(RefCell::new(Vec::new()));
            for number in 0..3 {
                let (locks, order) = (locks.clone(), order.clone());
                drop(spawn(async move {
                    let _guard = locks.lock("a").await;
                    order.borrow_mut().push(number);
                    yield_now().await;
                    order.borrow_mut().push(number);
                }));
            }
            settle().await;
            assert!(order.borrow().is_empty());
            // Other keys are free.
            let other = locks.lock("b").await;
            assert_eq!(locks.len(), 2);
            drop((first, other));
            while !locks.is_empty() {
                yield_now().await;
            }
            assert_eq!(*order.borrow(), [0, 0, 1, 1, 2, 2]);
        });
    }

    #[test]
    fn who_gives_up_waiting_leaves_nothing_and_lets_the_next_one_in() {
        on_reactor(async {
            let locks: Rc<KeyedLock<u32>> = Rc::default();
            let first = locks.lock(&1).await;
            let (own, got) = (locks.clone(), Rc::new(Cell::new(false)));
            let mut given_up = Box::pin(async move { own.lock(&1).await });
            assert!(futures_poll(&mut given_up).is_none());
            let (own, seen) = (locks.clone(), got.clone());
            drop(spawn(async move {
                let _guard = own.lock(&1).await;
                seen.set(true);
            }));
            settle().await;
            drop(given_up);
            assert!(!got.get());
            drop(first);
            while !got.get() {
                yield_now().await;
            }
            while !locks.is_empty() {
                yield_now().await;
            }
            // Same when the only waiter is dropped after it was granted the lock.
            let first = locks.lock(&1).await;
            let own = locks.clone();
            let mut given_up = Box::pin(async move { own.lock(&1).await });
            assert!(futures_poll(&mut given_up).is_none());
            drop(first);
            drop(given_up);
            assert!(locks.is_empty());
            drop(locks.lock(&1).await);
            assert!(locks.is_empty());
        });
    }

    /// Polls once, with a no-op waker.
    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }
}
