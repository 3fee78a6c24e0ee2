//! In-flight changes of a volume, and draining of those that began before.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_reactor::sync::Notify;
use forebay_reactor::try_spawn;

/// Changes that began between two drains.
#[derive(Default)]
struct Batch {
    count: Cell<usize>,
    ended: Notify,
}

/// In-flight changes.
///
/// | invariant | |
/// |---|---|
/// | C1 | a change belongs to one batch: the one that was current when it began |
/// | C2 | a drain waits for every batch with a change in flight that was current before it, and for no other |
#[derive(Default)]
pub struct InFlightChanges {
    current: RefCell<Rc<Batch>>,
    /// Earlier batches that drains wait for.
    before: RefCell<Vec<Rc<Batch>>>,
}

/// In-flight change; it ends when this is dropped.
struct Change(Rc<Batch>);

impl Drop for Change {
    fn drop(&mut self) {
        debug_assert!(self.0.count.get() > 0, "C1");
        self.0.count.set(self.0.count.get() - 1);
        if self.0.count.get() == 0 {
            self.0.ended.notify_all();
        }
    }
}

impl InFlightChanges {
    fn begin(&self) -> Change {
        let batch = self.current.borrow().clone();
        batch.count.set(batch.count.get() + 1);
        Change(batch)
    }

    /// Starts a change, which ends when `work` has completed.  Dropping the returned future does not end the work: a
    /// task continues it, as the volume continues a request whose caller is gone, and a drain waits for it.
    pub fn track<F: Future + Unpin + 'static>(&self, work: F) -> Tracked<F> {
        Tracked(Some((work, self.begin())))
    }

    /// Waits for the end of all changes that have begun so far, not for later ones.
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

/// Future for the work of a change; see [`InFlightChanges::track`].
pub struct Tracked<F: Future + Unpin + 'static>(Option<(F, Change)>);

impl<F: Future + Unpin + 'static> Future for Tracked<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some((work, _)) = &mut self.0 else { panic!("polled after its end") };
        let Poll::Ready(result) = Pin::new(work).poll(cx) else { return Poll::Pending };
        self.0 = None;
        Poll::Ready(result)
    }
}

impl<F: Future + Unpin + 'static> Drop for Tracked<F> {
    fn drop(&mut self) {
        let Some((work, change)) = self.0.take() else { return };
        // Only the work is stored, so that a reactor that ends drops it.
        drop(try_spawn(async move {
            work.await;
            drop(change);
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Future, pending};
    use std::task::Waker;

    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn only_what_began_before_is_waited_for() {
        let changes = InFlightChanges::default();
        let mut cx = Context::from_waker(Waker::noop());
        let (first, second) = (changes.begin(), changes.begin());
        let mut drain = Box::pin(changes.drain());
        assert!(drain.as_mut().poll(&mut cx).is_pending());
        let later = changes.begin();
        drop(first);
        let mut another = Box::pin(changes.drain());
        assert!(drain.as_mut().poll(&mut cx).is_pending() && another.as_mut().poll(&mut cx).is_pending());
        drop(second);
        assert!(drain.as_mut().poll(&mut cx).is_ready());
        assert!(another.as_mut().poll(&mut cx).is_pending(), "the later one is before this drain");
        drop(later);
        assert!(another.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn what_nobody_waits_for_any_more_goes_on_and_is_drained() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let changes = Rc::new(InFlightChanges::default());
            let (gate, landed) = (Rc::new(Notify::new()), Rc::new(Cell::new(false)));
            let (may, done) = (Rc::new(Cell::new(false)), landed.clone());
            let write = {
                let (gate, may) = (gate.clone(), may.clone());
                changes.track(Box::pin(async move {
                    gate.wait_until(|| may.get()).await;
                    done.set(true);
                }))
            };
            drop(write);
            let drained = Rc::new(Cell::new(false));
            let drain = spawn({
                let (changes, landed, drained) = (changes.clone(), landed.clone(), drained.clone());
                async move {
                    changes.drain().await;
                    assert!(landed.get(), "the drain is over before the write");
                    drained.set(true);
                }
            });
            for _ in 0..10 {
                yield_now().await;
            }
            assert!(!drained.get() && !landed.get());
            may.set(true);
            gate.notify_all();
            drain.await;
        });
    }

    #[test]
    fn a_reactor_ends_though_changes_never_do() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let changes = InFlightChanges::default();
        reactor.block_on(async {
            drop(changes.track(Box::pin(pending::<()>())));
            let held = changes.track(Box::pin(pending::<()>()));
            drop(spawn(async move {
                held.await;
            }));
            yield_now().await;
        });
        let left = changes.track(Box::pin(pending::<()>()));
        drop(reactor);
        drop(left);
        assert_eq!(changes.current.borrow().count.get(), 0, "nothing is left of them");
    }
}
