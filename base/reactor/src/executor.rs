//! The executor: one thread, tasks that need not be `Send`, timers, and the operations in flight.
//!
//! The loop runs what is ready, looks at the driver, and only when nothing is ready lets the driver wait, until the
//! next timer at the latest.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::mem;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use async_task::Runnable;
use crossbeam_queue::SegQueue;
use slab::Slab;

use crate::cores::CoreHandle;
use crate::driver::{Completion, Driver, Op, Unpark, Wait};
use crate::ops::{OpFuture, Ops};
use crate::time::Instant;

/// Tasks run between two looks at the driver, so that completions are not kept waiting by a busy queue.
const TASKS_PER_TURN_MAX: usize = 256;

/// How long a turn has lasted when work that nobody waits for leaves the rest of it to others.
const TURN_LONG: Duration = Duration::from_micros(100);
/// Turns that it leaves to others at most, on a core that has only long ones.
const STAND_BACK_MAX: u32 = 16;

/// A reactor lingers while the pauses between its work are on average at most so many times as long as it may linger:
/// when it sleeps, a pause has the time of waking up in it, which lingering would save.
const GAP_LINGERS_MAX: u32 = 2;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Inner>>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's reactor.
///
/// # Panics
/// When no reactor runs on this thread.
pub(crate) fn with_current<R>(f: impl FnOnce(&Rc<Inner>) -> R) -> R {
    try_with_current(f).expect("called outside a reactor")
}

fn try_with_current<R>(f: impl FnOnce(&Rc<Inner>) -> R) -> Option<R> {
    let inner = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()?;
    Some(f(&inner))
}

/// What comes from other threads.
pub(crate) enum Work {
    /// A task that was woken.
    Resume(Runnable),
    /// Something to be begun on this core.
    Begin(Box<dyn FnOnce() + Send>),
}

/// What other threads can reach of a reactor.
pub(crate) struct Remote {
    queue: SegQueue<Work>,
    /// The reactor is gone, with all its tasks.
    pub(crate) closed: AtomicBool,
    /// False only while the reactor sleeps or is about to; who sets it wakes the driver, so that many wake-ups cost
    /// one system call, and none at all while the reactor is busy.
    notified: AtomicBool,
    unpark: Arc<dyn Unpark>,
}

impl Remote {
    fn notify(&self) {
        if !self.notified.swap(true, Ordering::SeqCst) {
            self.unpark.unpark();
        }
    }

    /// True on the thread that runs this reactor, while it runs.
    pub(crate) fn is_current(self: &Arc<Self>) -> bool {
        let same = |current: &RefCell<Option<Rc<Inner>>>| {
            current.borrow().as_ref().is_some_and(|inner| Arc::ptr_eq(&inner.remote, self))
        };
        CURRENT.try_with(same).unwrap_or(false)
    }

    fn schedule(self: &Arc<Self>, runnable: Runnable) {
        let mut runnable = Some(runnable);
        // A task that is woken on its own thread, as most are, costs one look at that thread's state.
        let _gone = CURRENT.try_with(|current| {
            let current = current.borrow();
            if let Some(inner) = current.as_ref().filter(|inner| Arc::ptr_eq(&inner.remote, self)) {
                inner.ready.borrow_mut().extend(runnable.take());
            }
        });
        if let Some(runnable) = runnable {
            self.queue.push(Work::Resume(runnable));
            self.notify();
        }
    }

    /// Hands something to the reactor; it is dropped when the reactor is gone.
    pub(crate) fn push(&self, work: Work) {
        self.queue.push(work);
        // Closed before it is emptied for the last time, so one of the two sees what was pushed.
        if self.closed.load(Ordering::SeqCst) {
            self.discard();
        } else {
            self.notify();
        }
    }

    /// Drops what nobody will do any more.  No task is alive when this is called, so nothing in the queue belongs to
    /// the reactor's thread.
    fn discard(&self) {
        while let Some(work) = self.queue.pop() {
            drop(work);
        }
    }
}

/// The state of one reactor.
pub(crate) struct Inner {
    driver: RefCell<Box<dyn Driver>>,
    ready: RefCell<VecDeque<Runnable>>,
    /// Those who let the others and the driver go first, this turn.
    yielded: RefCell<Vec<Waker>>,
    /// When this turn began.
    turn_began: Cell<Instant>,
    pub(crate) remote: Arc<Remote>,
    /// A waker of every task alive, to end them all when the reactor goes.
    tasks: RefCell<Slab<Waker>>,
    pub(crate) ops: Ops,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next_timer: Cell<u64>,
    /// How long the driver is asked again and again before it may wait.
    linger: Cell<Duration>,
    /// How long there was nothing to do, each time, on average of the last few times.
    gap: Cell<Duration>,
}

impl Inner {
    pub(crate) fn now(&self) -> Instant {
        self.driver.borrow().now()
    }

    pub(crate) fn wall_clock(&self) -> Duration {
        self.driver.borrow().wall_clock()
    }

    pub(crate) fn random(&self) -> u64 {
        self.driver.borrow_mut().random()
    }

    /// A number for a timer; timers of the same deadline fire in the order of their numbers.
    pub(crate) fn new_timer(&self) -> u64 {
        let id = self.next_timer.get();
        self.next_timer.set(id + 1);
        id
    }

    pub(crate) fn arm_timer(&self, deadline: Instant, id: u64, waker: &Waker) {
        let before = self.timers.borrow_mut().insert((deadline, id), waker.clone());
        drop(before);
    }

    pub(crate) fn disarm_timer(&self, deadline: Instant, id: u64) {
        let before = self.timers.borrow_mut().remove(&(deadline, id));
        drop(before);
    }

    pub(crate) fn with_driver<R>(&self, f: impl FnOnce(&mut dyn Driver) -> R) -> R {
        f(self.driver.borrow_mut().as_mut())
    }

    pub(crate) fn start_op(self: &Rc<Self>, op: Op) -> OpFuture {
        Ops::start(self, op)
    }

    fn spawn<F: Future + 'static>(self: &Rc<Self>, future: F) -> async_task::Task<F::Output>
    where
        F::Output: 'static,
    {
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let registered = Registered { inner: self.clone(), key: entry.key() };
        let future = async move {
            let _registered = registered;
            future.await
        };
        let remote = self.remote.clone();
        let (runnable, task) = async_task::spawn_local(future, move |runnable| remote.schedule(runnable));
        entry.insert(runnable.waker());
        drop(tasks);
        runnable.schedule();
        task
    }

    fn next_ready(&self) -> Option<Runnable> {
        self.ready.borrow_mut().pop_front()
    }

    /// Takes over what other threads have woken.
    fn take_remote(&self, begin: bool) {
        // Only what is there now: others may add without end.
        for _ in 0..self.remote.queue.len() {
            match self.remote.queue.pop() {
                Some(Work::Resume(runnable)) => self.ready.borrow_mut().push_back(runnable),
                Some(Work::Begin(start)) if begin => start(),
                Some(Work::Begin(start)) => drop(start),
                None => break,
            }
        }
    }

    fn run_ready(&self) {
        if !self.remote.queue.is_empty() {
            self.take_remote(true);
        }
        self.turn_began.set(self.now());
        for _ in 0..TASKS_PER_TURN_MAX {
            let Some(runnable) = self.next_ready() else { break };
            runnable.run();
        }
    }

    fn fire_timers(&self) {
        if self.timers.borrow().is_empty() {
            return;
        }
        let now = self.now();
        loop {
            let due = {
                let mut timers = self.timers.borrow_mut();
                match timers.first_entry() {
                    Some(entry) if entry.key().0 <= now => entry.remove(),
                    _ => break,
                }
            };
            due.wake();
        }
    }

    /// Asks the driver again and again, for as long as this reactor lingers after its last work; true when there is
    /// something to do.
    ///
    /// Being woken from a wait costs a client at depth 1 more than the request itself, and other cores a system call
    /// a message; who lingers pays for it with CPU time.  So it does only while work has been coming about that fast.
    fn linger(&self, main: &MainWaker, begun: Instant, done: &mut Vec<Completion>) -> bool {
        let linger = self.linger.get();
        if linger.is_zero() || self.gap.get() > linger * GAP_LINGERS_MAX {
            return false;
        }
        let mut now = begun;
        while now.since(begun) < linger {
            self.driver.borrow_mut().poll(Wait::No, done);
            let timer_due = self.timers.borrow().first_key_value().is_some_and(|((at, _), _)| *at <= now);
            let woken = main.woken.load(Ordering::SeqCst) || !self.remote.queue.is_empty();
            if !done.is_empty() || woken || timer_due {
                return true;
            }
            std::hint::spin_loop();
            now = self.now();
        }
        false
    }

    /// Notes how long there was nothing to do.
    fn note_gap(&self, begun: Instant) {
        let linger = self.linger.get();
        if !linger.is_zero() {
            // Clamped, so that one long pause is forgotten after a few short ones.
            let gap = self.now().since(begun).min(linger * (4 * GAP_LINGERS_MAX));
            self.gap.set((self.gap.get() * 7 + gap) / 8);
        }
    }

    /// Lets the driver work; waits when nothing is ready.
    fn turn_driver(&self, main: &MainWaker, done: &mut Vec<Completion>) {
        let busy = |main: &MainWaker| {
            !self.ready.borrow().is_empty() || main.woken.load(Ordering::SeqCst) || !self.yielded.borrow().is_empty()
        };
        if busy(main) {
            self.driver.borrow_mut().poll(Wait::No, done);
            return self.complete(done);
        }
        let begun = self.now();
        if !self.linger(main, begun, done) {
            // From here on a wake-up from another thread goes through the driver.  One that came before has been
            // queued or noted without waking it, so look again, after the flag.
            self.remote.notified.store(false, Ordering::SeqCst);
            let wait = if !self.remote.queue.is_empty() || main.woken.load(Ordering::SeqCst) {
                Wait::No
            } else {
                self.timers.borrow().first_key_value().map_or(Wait::Forever, |((at, _), _)| Wait::Until(*at))
            };
            self.driver.borrow_mut().poll(wait, done);
            self.remote.notified.store(true, Ordering::SeqCst);
        }
        self.note_gap(begun);
        self.complete(done);
    }

    fn complete(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            Ops::complete(self, completion);
        }
        let yielded = mem::take(&mut *self.yielded.borrow_mut());
        yielded.into_iter().for_each(Waker::wake);
    }
}

/// Takes a task off the list of the living when its future is dropped.
struct Registered {
    inner: Rc<Inner>,
    key: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let waker = self.inner.tasks.borrow_mut().remove(self.key);
        drop(waker);
    }
}

/// Wakes the future of `block_on`.
struct MainWaker {
    woken: AtomicBool,
    remote: Arc<Remote>,
}

impl Wake for MainWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        if !self.remote.is_current() {
            self.remote.notify();
        }
    }
}

/// A reactor: an executor on a driver.  Lives on one thread.
pub struct Reactor {
    inner: Rc<Inner>,
}

impl Reactor {
    /// A reactor on the given driver, for this thread.
    pub fn new(driver: Box<dyn Driver>) -> Self {
        let remote = Remote {
            queue: SegQueue::new(),
            closed: AtomicBool::new(false),
            notified: AtomicBool::new(true),
            unpark: driver.unparker(),
        };
        let inner = Inner {
            driver: RefCell::new(driver),
            ready: RefCell::default(),
            yielded: RefCell::default(),
            turn_began: Cell::default(),
            remote: Arc::new(remote),
            tasks: RefCell::default(),
            ops: Ops::default(),
            timers: RefCell::default(),
            next_timer: Cell::new(0),
            linger: Cell::default(),
            gap: Cell::default(),
        };
        Self { inner: Rc::new(inner) }
    }

    /// A reactor on the operating system, by [`DriverChoice`](crate::DriverChoice).
    pub fn system(choice: crate::driver::DriverChoice) -> io::Result<Self> {
        Ok(Self::new(crate::driver::system_driver(choice)?))
    }

    /// Reaches this reactor from any thread.
    pub fn handle(&self) -> CoreHandle {
        CoreHandle::new(self.inner.remote.clone())
    }

    /// From now on asks the driver for so long after the last work before it sleeps; zero, as it is at first, sleeps
    /// at once.
    pub fn set_linger(&self, linger: Duration) {
        self.inner.linger.set(linger);
    }

    /// The driver's name.
    pub fn driver_name(&self) -> &'static str {
        self.inner.driver.borrow().name()
    }

    /// Runs until `future` ends.  Tasks that it spawned stay, and go on in the next call.
    ///
    /// # Panics
    /// When `future` or a task panics: a broken invariant ends the reactor, and is not survived by the tasks beside
    /// it.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::new(&self.inner);
        let main = Arc::new(MainWaker { woken: AtomicBool::new(true), remote: self.inner.remote.clone() });
        let waker = Waker::from(main.clone());
        let mut cx = Context::from_waker(&waker);
        let mut future = std::pin::pin!(future);
        let mut done = Vec::new();
        loop {
            if main.woken.swap(false, Ordering::SeqCst)
                && let Poll::Ready(value) = future.as_mut().poll(&mut cx)
            {
                return value;
            }
            self.inner.run_ready();
            self.inner.turn_driver(&main, &mut done);
            self.inner.fire_timers();
        }
    }
}

impl Drop for Reactor {
    /// Ends every task where it stands, as a crash would: futures are dropped, and not polled any more.
    fn drop(&mut self) {
        let _entered = Entered::new(&self.inner);
        // Waking a task queues it; dropping the queued runnable drops its future.  Dropping one may wake or spawn
        // others, and another thread may just be about to queue one, so go on until none is alive.
        loop {
            let wakers: Vec<Waker> = self.inner.tasks.borrow().iter().map(|(_, waker)| waker.clone()).collect();
            if wakers.is_empty() {
                break;
            }
            wakers.into_iter().for_each(Waker::wake);
            self.inner.take_remote(false);
            let mut dropped = false;
            while let Some(runnable) = self.inner.next_ready() {
                dropped = true;
                drop(runnable);
            }
            if !dropped {
                std::thread::yield_now();
            }
        }
        let timers = mem::take(&mut *self.inner.timers.borrow_mut());
        let yielded = mem::take(&mut *self.inner.yielded.borrow_mut());
        drop((timers, yielded));
        self.inner.remote.closed.store(true, Ordering::SeqCst);
        self.inner.remote.discard();
    }
}

/// Makes a reactor current while it runs, and the one before it again after.
struct Entered {
    before: Option<Rc<Inner>>,
}

impl Entered {
    fn new(inner: &Rc<Inner>) -> Self {
        Self { before: CURRENT.with(|current| current.borrow_mut().replace(inner.clone())) }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let before = self.before.take();
        let this = CURRENT.with(|current| mem::replace(&mut *current.borrow_mut(), before));
        drop(this);
    }
}

/// A task's result to wait for.  Dropping it lets the task go on by itself.
pub struct JoinHandle<T> {
    task: Option<async_task::FallibleTask<T>>,
}

impl<T> JoinHandle<T> {
    /// Ends the task at its next point of waiting, and waits until its future is dropped.
    /// The result is what it returned, if it had ended before.
    pub async fn cancel(mut self) -> Option<T> {
        self.task.take().expect("a handle has its task until it is dropped").cancel().await
    }

    /// Ends the task at its next point of waiting, without waiting for that.
    pub fn abort(mut self) {
        // Unlike a handle, an async task ends when it is dropped.
        drop(self.task.take());
    }

    /// True when it has ended.
    pub fn is_finished(&self) -> bool {
        self.task.as_ref().is_none_or(async_task::FallibleTask::is_finished)
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let task = self.task.as_mut().expect("a handle has its task until it is dropped");
        Pin::new(task).poll(cx).map(|value| value.expect("waited for a task that panicked, or whose reactor is gone"))
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}

/// Starts a task on this reactor.
///
/// # Panics
/// When no reactor runs on this thread.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    with_current(|inner| JoinHandle { task: Some(inner.spawn(future).fallible()) })
}

/// Starts a task if a reactor runs on this thread; otherwise the future is dropped.  For what is still to be done when
/// something is dropped, which may be after the reactor.
///
/// A reactor that ends drops tasks which were started like this, too: their futures must not start another one then.
pub fn try_spawn<F>(future: F) -> Option<JoinHandle<F::Output>>
where
    F: Future + 'static,
    F::Output: 'static,
{
    try_with_current(|inner| inner.clone()).map(|inner| JoinHandle { task: Some(inner.spawn(future).fallible()) })
}

/// The name of this reactor's driver.
///
/// # Panics
/// When no reactor runs on this thread.
pub fn driver_name() -> &'static str {
    with_current(|inner| inner.driver.borrow().name())
}

/// Lets others go first while turns are long, but not for ever: for each piece of work that nobody waits for, so that many
/// of them at once do not keep a host's request waiting.
pub async fn stand_back() {
    for _ in 0..STAND_BACK_MAX {
        if with_current(|inner| inner.now().since(inner.turn_began.get()) < TURN_LONG) {
            return;
        }
        yield_now().await;
    }
}

/// Lets the other ready tasks and the driver have a turn.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        with_current(|inner| inner.yielded.borrow_mut().push(cx.waker().clone()));
        Poll::Pending
    })
    .await;
}
