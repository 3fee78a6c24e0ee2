//! Changes of a volume that are under way, and waiting for those of before.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_reactor::sync::Notify;

/// Those that began between two drains.
#[derive(Default)]
struct Batch {
    count: Cell<usize>,
    ended: Notify,
}

/// The changes that are under way.
#[derive(Default)]
pub struct Underway {
    current: RefCell<Rc<Batch>>,
    /// Batches that somebody waits for.
    before: RefCell<Vec<Rc<Batch>>>,
}

/// A change that is under way; it is over when this is dropped.
pub struct Change(Rc<Batch>);

impl Drop for Change {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        if self.0.count.get() == 0 {
            self.0.ended.notify_all();
        }
    }
}

impl Underway {
    /// A change begins.
    pub fn begin(&self) -> Change {
        let batch = self.current.borrow().clone();
        batch.count.set(batch.count.get() + 1);
        Change(batch)
    }

    /// Waits for the end of all that have begun by now; those that begin later do not matter.
    pub async fn drain(&self) {
        let batch = self.current.replace(Rc::default());
        let batches = {
            let mut before = self.before.borrow_mut();
            before.retain(|batch| batch.count.get() > 0);
            before.push(batch);
            before.clone()
        };
        for batch in batches {
            batch.ended.wait_until(|| batch.count.get() == 0).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn only_what_began_before_is_waited_for() {
        let underway = Underway::default();
        let mut cx = Context::from_waker(Waker::noop());
        let (first, second) = (underway.begin(), underway.begin());
        let mut drain = Box::pin(underway.drain());
        assert!(drain.as_mut().poll(&mut cx).is_pending());
        let later = underway.begin();
        drop(first);
        let mut another = Box::pin(underway.drain());
        assert!(drain.as_mut().poll(&mut cx).is_pending() && another.as_mut().poll(&mut cx).is_pending());
        drop(second);
        assert!(drain.as_mut().poll(&mut cx).is_ready());
        assert!(another.as_mut().poll(&mut cx).is_pending(), "the later one is before this drain");
        drop(later);
        assert!(another.as_mut().poll(&mut cx).is_ready());
    }
}
