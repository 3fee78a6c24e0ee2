//! Set of futures in flight, polled only when they are woken.
//!
//! One task owns all requests of its connection.  Each slot has its own waker, which is created once and reused.  A
//! wake-up sets a bit and wakes the task, so that the task polls only requests that may have progressed, and nothing is
//! allocated or spawned per request.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

const BITS: usize = u64::BITS as usize;

/// Wake-up bits; shared with the wakers, which may be called on any thread.
struct Woken {
    bits: Box<[AtomicU64]>,
    task: Mutex<Waker>,
}

impl Woken {
    fn task(&self) -> MutexGuard<'_, Waker> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SlotWaker {
    woken: Arc<Woken>,
    index: usize,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let before = self.woken.bits[self.index / BITS].fetch_or(1 << (self.index % BITS), Ordering::AcqRel);
        if before == 0 {
            // No other slot of this word has woken the task since it last looked.
            let task = self.woken.task().clone();
            task.wake();
        }
    }
}

struct Slot<F, T> {
    waker: Waker,
    work: Option<(F, T)>,
}

/// Bounded set of futures, each with a note `T` on its purpose.
pub struct InFlight<F, T> {
    slots: Vec<Slot<F, T>>,
    free: Vec<usize>,
    woken: Arc<Woken>,
    /// Copy of the task in `woken`, to detect without a lock that it has not changed.
    task: Waker,
    capacity: usize,
}

impl<F: Future + Unpin, T> InFlight<F, T> {
    /// Creates an empty set for up to `capacity` futures.
    pub fn new(capacity: usize) -> Self {
        let bits = (0..capacity.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect();
        let task = Waker::noop().clone();
        let woken = Arc::new(Woken { bits, task: Mutex::new(task.clone()) });
        Self { slots: Vec::new(), free: Vec::new(), woken, task, capacity }
    }

    /// Returns the number of futures in the set.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets the task to wake.
    pub fn set_task(&mut self, task: &Waker) {
        if !self.task.will_wake(task) {
            self.task = task.clone();
            *self.woken.task() = task.clone();
        }
    }

    /// Polls `future`; returns its result and `note` when it is ready, otherwise keeps it.
    ///
    /// # Panics
    /// When the set is full.
    pub fn start(&mut self, mut future: F, note: T) -> Option<(F::Output, T)> {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = self.slots.len();
            assert!(index < self.capacity, "more than {} futures", self.capacity);
            let waker = Waker::from(Arc::new(SlotWaker { woken: self.woken.clone(), index }));
            self.slots.push(Slot { waker, work: None });
            index
        });
        let slot = &mut self.slots[index];
        match Pin::new(&mut future).poll(&mut Context::from_waker(&slot.waker)) {
            Poll::Ready(result) => {
                self.free.push(index);
                Some((result, note))
            }
            Poll::Pending => {
                slot.work = Some((future, note));
                None
            }
        }
    }

    /// Returns the notes of the futures in the set.
    pub fn notes_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.work.as_mut().map(|(_, note)| note))
    }

    /// Polls woken futures, and passes results to `done`.
    pub fn poll(&mut self, mut done: impl FnMut(F::Output, T)) {
        for word in 0..self.woken.bits.len() {
            let mut bits = match self.woken.bits[word].load(Ordering::Relaxed) {
                0 => continue,
                _ => self.woken.bits[word].swap(0, Ordering::AcqRel),
            };
            while bits != 0 {
                let index = word * BITS + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let slot = &mut self.slots[index];
                // A waker that outlived its request may wake an empty slot or another request, which is harmless.
                let Some((future, _)) = &mut slot.work else { continue };
                if let Poll::Ready(result) = Pin::new(future).poll(&mut Context::from_waker(&slot.waker)) {
                    let (_, note) = slot.work.take().expect("just polled");
                    self.free.push(index);
                    done(result, note);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;

    #[derive(Default)]
    struct Gate {
        open: Cell<bool>,
        polls: Cell<u32>,
        waker: RefCell<Option<Waker>>,
    }

    impl Gate {
        fn open(&self) {
            self.open.set(true);
            if let Some(waker) = self.waker.borrow_mut().take() {
                waker.wake();
            }
        }
    }

    struct Through(Rc<Gate>);

    impl Future for Through {
        type Output = ();
        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            self.0.polls.set(self.0.polls.get() + 1);
            *self.0.waker.borrow_mut() = Some(cx.waker().clone());
            if self.0.open.get() { Poll::Ready(()) } else { Poll::Pending }
        }
    }

    #[derive(Default)]
    struct Task(AtomicU64);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_what_was_woken_is_polled_and_slots_are_used_again() {
        let task = Arc::new(Task::default());
        let mut set = InFlight::new(130);
        set.set_task(&Waker::from(task.clone()));
        let gates: Vec<Rc<Gate>> = (0..130).map(|_| Rc::default()).collect();
        for (note, gate) in gates.iter().enumerate() {
            assert!(set.start(Through(gate.clone()), note).is_none());
        }
        assert_eq!(set.len(), 130);
        let mut done = Vec::new();
        set.poll(|(), note| done.push(note));
        assert!(done.is_empty());
        for at in [129, 3, 64, 5] {
            gates[at].open();
        }
        assert_eq!(task.0.load(Ordering::Relaxed), 3, "one wake-up a word");
        set.poll(|(), note| done.push(note));
        assert_eq!(done, [3, 5, 64, 129]);
        assert!(gates.iter().enumerate().all(|(at, gate)| gate.polls.get() == 1 + u32::from(done.contains(&at))));
        assert_eq!(set.len(), 126);
        let gate: Rc<Gate> = Rc::default();
        gate.open();
        assert!(set.start(Through(gate), 500).is_some(), "done at once");
        let late: Rc<Gate> = Rc::default();
        assert!(set.start(Through(late.clone()), 501).is_none());
        // A waker of the slot's former request causes a spurious wake-up of the new one.
        late.waker.borrow().as_ref().expect("polled").wake_by_ref();
        set.poll(|(), note| panic!("{note} is not done"));
        late.open();
        let mut last = None;
        set.poll(|(), note| last = Some(note));
        assert_eq!(last, Some(501));
    }
}
