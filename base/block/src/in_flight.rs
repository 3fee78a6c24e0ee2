//! Operations in flight: draining those that began before, and completing what no caller waits for any more.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_reactor::sync::Notify;
use forebay_reactor::try_spawn;

/// Operations in flight, for the tasks of one reactor.
///
/// Invariants:
/// 1. An operation belongs to one generation: the one that was current when it began.
/// 2. A drain waits for every operation that began before it, and for no later one.
/// 3. The end of a generation's last operation is signaled.
///
/// Beginning and ending an operation cost a counter each; only a drain allocates.
pub struct InFlightTracker {
    current: RefCell<Rc<Generation>>,
    /// Earlier generations that may still have operations in flight.
    earlier: RefCell<Vec<Rc<Generation>>>,
    changed: Rc<Notify>,
}

/// Operations that began between two drains.
struct Generation {
    count: Cell<usize>,
    changed: Rc<Notify>,
}

/// Operation in flight; it ends when this is dropped.
#[must_use]
pub struct InFlightGuard(Rc<Generation>);

/// Operations that a drain waits for.
struct Earlier(Vec<Rc<Generation>>);

impl Default for InFlightTracker {
    fn default() -> Self {
        Self::new(Rc::default())
    }
}

impl InFlightTracker {
    /// Creates a set without operations, which signals `changed` whenever a generation has drained.
    pub fn new(changed: Rc<Notify>) -> Self {
        let current = RefCell::new(Generation::new(&changed));
        Self { current, earlier: RefCell::default(), changed }
    }

    /// Begins an operation.
    pub fn begin(&self) -> InFlightGuard {
        let generation = self.current.borrow().clone();
        generation.count.set(generation.count.get() + 1);
        InFlightGuard(generation)
    }

    /// Begins an operation that ends when `work` has completed.  Dropping the returned future does not end the work: a
    /// task continues it, as a volume continues a request whose caller is gone, and a drain waits for it.
    pub fn track<F: Future + Unpin + 'static>(&self, work: F) -> CompleteOnDrop<F, InFlightGuard> {
        CompleteOnDrop::new(work, self.begin())
    }

    /// Returns whether no operation is in flight.
    pub fn is_idle(&self) -> bool {
        self.current.borrow().is_drained() && self.earlier.borrow().iter().all(|generation| generation.is_drained())
    }

    /// Waits for the end of all operations that have begun so far, not for later ones.
    pub async fn drain(&self) {
        let earlier = self.begin_generation();
        self.changed.wait_until(|| earlier.is_drained()).await;
    }

    /// Begins a new generation; returns the operations of earlier ones.
    fn begin_generation(&self) -> Earlier {
        let mut earlier = self.earlier.borrow_mut();
        earlier.push(self.current.replace(Generation::new(&self.changed)));
        earlier.retain(|generation| !generation.is_drained());
        Earlier(earlier.clone())
    }
}

impl Earlier {
    /// Returns whether all of them have ended.
    fn is_drained(&self) -> bool {
        self.0.iter().all(|generation| generation.is_drained())
    }
}

impl Generation {
    fn new(changed: &Rc<Notify>) -> Rc<Self> {
        Rc::new(Self { count: Cell::new(0), changed: changed.clone() })
    }

    fn is_drained(&self) -> bool {
        self.count.get() == 0
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        debug_assert!(self.0.count.get() > 0, "an operation of a generation that has none");
        self.0.count.set(self.0.count.get() - 1);
        if self.0.is_drained() {
            self.0.changed.notify_all();
        }
    }
}

/// Future of work that owns a guard until the work has completed.  When it is dropped before, a task completes the work
/// and then drops the guard; a reactor that ends drops both.
pub struct CompleteOnDrop<F: Future + Unpin + 'static, G: 'static>(Option<(F, G)>);

impl<F: Future + Unpin + 'static, G: 'static> CompleteOnDrop<F, G> {
    /// Creates the future of `work`, with a guard of it.
    pub fn new(work: F, guard: G) -> Self {
        Self(Some((work, guard)))
    }
}

impl<F: Future + Unpin + 'static, G: 'static> Unpin for CompleteOnDrop<F, G> {}

impl<F: Future + Unpin + 'static, G: 'static> Future for CompleteOnDrop<F, G> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some((work, _)) = &mut self.0 else { panic!("polled after its end") };
        let Poll::Ready(result) = Pin::new(work).poll(cx) else { return Poll::Pending };
        self.0 = None;
        Poll::Ready(result)
    }
}

impl<F: Future + Unpin + 'static, G: 'static> Drop for CompleteOnDrop<F, G> {
    fn drop(&mut self) {
        let Some((work, guard)) = self.0.take() else { return };
        // Only the work is stored, so that a reactor that ends drops it.
        drop(try_spawn(async move {
            work.await;
            drop(guard);
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
        let changes = InFlightTracker::default();
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
            let changes = Rc::new(InFlightTracker::default());
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
        let changes = InFlightTracker::default();
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
