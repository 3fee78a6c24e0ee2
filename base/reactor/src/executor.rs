//! Executor: one thread, tasks that need not be `Send`, timers, and operations in flight.
//!
//! Each loop iteration runs ready tasks and polls the driver.  The driver blocks only when no task is ready, and no
//! longer than until the next timer.

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
use crate::queue_limit::QueueLimit;
use crate::time::Instant;

/// Maximum tasks run between two polls of the driver, so that a busy queue does not delay completions.
const TASKS_PER_TURN_MAX: usize = 256;

/// Duration of a loop iteration from which background work yields the rest of it.
const TURN_LONG: Duration = Duration::from_micros(100);
/// Maximum consecutive yields of background work, on a core that has only long iterations.
const STAND_BACK_MAX: u32 = 16;

/// Limit of the average idle gap, in multiples of the busy-poll time, up to which a reactor busy-polls.  When the
/// reactor sleeps, a gap includes the wake-up latency that busy-polling would save.
pub(crate) const GAP_LINGERS_MAX: u32 = 2;

thread_local! {
    static CURRENT: RefCell<Option<Rc<ReactorState>>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's reactor.
///
/// # Panics
/// When no reactor runs on this thread.
pub(crate) fn with_current<R>(f: impl FnOnce(&Rc<ReactorState>) -> R) -> R {
    try_with_current(f).expect("called outside a reactor")
}

pub(crate) fn try_with_current<R>(f: impl FnOnce(&Rc<ReactorState>) -> R) -> Option<R> {
    let inner = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()?;
    Some(f(&inner))
}

/// Message from another thread.
pub(crate) enum ThreadMessage {
    /// Woken task to be queued.
    Resume(Runnable),
    /// Function to be run on this core.
    Begin(Box<dyn FnOnce() + Send>),
}

/// Part of a reactor that other threads can reach.
pub(crate) struct Remote {
    queue: SegQueue<ThreadMessage>,
    /// Set once the reactor is gone, with all its tasks.
    pub(crate) closed: AtomicBool,
    /// False only while the reactor sleeps or is about to.  The thread that sets it wakes the driver, so that many
    /// wake-ups cost one system call, and none while the reactor is busy.
    notified: AtomicBool,
    unpark: Arc<dyn Unpark>,
}

impl Remote {
    fn notify(&self) {
        if !self.notified.swap(true, Ordering::SeqCst) {
            self.unpark.unpark();
        }
    }

    /// Returns whether this thread runs the reactor now.
    pub(crate) fn is_current(self: &Arc<Self>) -> bool {
        let same = |current: &RefCell<Option<Rc<ReactorState>>>| {
            current.borrow().as_ref().is_some_and(|inner| Arc::ptr_eq(&inner.remote, self))
        };
        CURRENT.try_with(same).unwrap_or(false)
    }

    fn schedule(self: &Arc<Self>, runnable: Runnable) {
        let mut runnable = Some(runnable);
        // Waking a task on its own thread, the common case, costs one look at that thread's state.
        let _gone = CURRENT.try_with(|current| {
            let current = current.borrow();
            if let Some(inner) = current.as_ref().filter(|inner| Arc::ptr_eq(&inner.remote, self)) {
                inner.ready.borrow_mut().extend(runnable.take());
            }
        });
        if let Some(runnable) = runnable {
            self.queue.push(ThreadMessage::Resume(runnable));
            self.notify();
        }
    }

    /// Queues `work` for the reactor; drops it when the reactor is gone.
    pub(crate) fn push(&self, work: ThreadMessage) {
        self.queue.push(work);
        // The reactor sets `closed` before it empties the queue for the last time, so one of the two sees the item.
        if self.closed.load(Ordering::SeqCst) {
            self.discard();
        } else {
            self.notify();
        }
    }

    /// Drops the queued work of a closed reactor.  No task is alive when this is called, so no queued item belongs to
    /// the reactor's thread.
    fn discard(&self) {
        while let Some(work) = self.queue.pop() {
            drop(work);
        }
    }
}

/// Reactor state, local to its thread.
pub(crate) struct ReactorState {
    driver: RefCell<Box<dyn Driver>>,
    ready: RefCell<VecDeque<Runnable>>,
    /// Wakers of tasks that yielded in this loop iteration.
    yielded: RefCell<Vec<Waker>>,
    /// Start time of this loop iteration.
    turn_began: Cell<Instant>,
    pub(crate) remote: Arc<Remote>,
    /// Waker of every live task, used to drop them all when the reactor is dropped.
    tasks: RefCell<Slab<Waker>>,
    pub(crate) ops: Ops,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next_timer: Cell<u64>,
    /// Busy-poll time before the driver may block.
    linger: Cell<Duration>,
    /// Idle time between work: moving average (weight 1/8).
    gap: Cell<Duration>,
}

impl ReactorState {
    pub(crate) fn now(&self) -> Instant {
        self.driver.borrow().now()
    }

    pub(crate) fn wall_clock(&self) -> Duration {
        self.driver.borrow().wall_clock()
    }

    pub(crate) fn random(&self) -> u64 {
        self.driver.borrow_mut().random()
    }

    /// Allocates a timer number; timers with the same deadline fire in the order of their numbers.
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

    pub(crate) fn start_limited_op(self: &Rc<Self>, op: Op, limit: &Rc<QueueLimit>) -> OpFuture {
        Ops::start_limited(self, op, limit)
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

    /// Moves work queued by other threads to this reactor; `begin` false drops functions instead of running them.
    fn take_remote(&self, begin: bool) {
        // Bounded by the current length: other threads may keep adding.
        for _ in 0..self.remote.queue.len() {
            match self.remote.queue.pop() {
                Some(ThreadMessage::Resume(runnable)) => self.ready.borrow_mut().push_back(runnable),
                Some(ThreadMessage::Begin(start)) if begin => start(),
                Some(ThreadMessage::Begin(start)) => drop(start),
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

    /// Busy-polls the driver for up to the configured time; returns true when there is work.
    ///
    /// Wake-up latency costs a client at queue depth 1 more than the request itself, and costs other cores a system
    /// call per message; busy-polling avoids both for CPU time.  It is therefore done only while the average idle gap
    /// is at most [`GAP_LINGERS_MAX`] times the busy-poll time.
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

    /// Updates the average idle gap with the one that began at `begun`.
    fn note_gap(&self, begun: Instant) {
        let linger = self.linger.get();
        if !linger.is_zero() {
            // Clamped, so that a few short gaps outweigh one long pause.
            let gap = self.now().since(begun).min(linger * (4 * GAP_LINGERS_MAX));
            self.gap.set((self.gap.get() * 7 + gap) / 8);
        }
    }

    /// Polls the driver; blocks when no task is ready.
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
            // Wake-ups from other threads go through the driver once the flag is cleared.  An earlier one was queued or
            // noted without waking it, so check again after clearing the flag.
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

/// Guard that removes a task from the list of live tasks when its future is dropped.
struct Registered {
    inner: Rc<ReactorState>,
    key: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let waker = self.inner.tasks.borrow_mut().remove(self.key);
        drop(waker);
    }
}

/// Waker of the future of `block_on`.
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

/// Executor on a driver, bound to one thread.
pub struct Reactor {
    inner: Rc<ReactorState>,
}

impl Reactor {
    /// Creates a reactor on the given driver, for this thread.
    pub fn new(driver: Box<dyn Driver>) -> Self {
        let remote = Remote {
            queue: SegQueue::new(),
            closed: AtomicBool::new(false),
            notified: AtomicBool::new(true),
            unpark: driver.unparker(),
        };
        let inner = ReactorState {
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

    /// Creates a reactor on the operating system, with the driver that [`DriverChoice`](crate::DriverChoice) selects.
    pub fn system(choice: crate::driver::DriverChoice) -> io::Result<Self> {
        Ok(Self::new(crate::driver::system_driver(choice)?))
    }

    /// Returns a handle to this reactor that works from any thread.
    pub fn handle(&self) -> CoreHandle {
        CoreHandle::new(self.inner.remote.clone())
    }

    /// Sets the busy-poll time: how long the driver is polled after the last work before the reactor sleeps.  Zero, the
    /// default, sleeps at once.
    pub fn set_linger(&self, linger: Duration) {
        self.inner.linger.set(linger);
    }

    /// Returns the driver's name.
    pub fn driver_name(&self) -> &'static str {
        self.inner.driver.borrow().name()
    }

    /// Runs the reactor until `future` ends.  Tasks that it spawned stay, and continue in the next call.
    ///
    /// # Panics
    /// When `future` or a task panics: a broken invariant ends the reactor, and its other tasks with it.
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
    /// Drops every task at its current await point, as a crash would: futures are not polled any more.
    fn drop(&mut self) {
        let _entered = Entered::new(&self.inner);
        // Waking a task queues it, and dropping the queued runnable drops its future.  Dropping a future may wake or
        // spawn others, and another thread may be about to queue one, so repeat until no task is alive.
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

/// Guard that makes a reactor current on this thread, and restores the previous one when dropped.
struct Entered {
    before: Option<Rc<ReactorState>>,
}

impl Entered {
    fn new(inner: &Rc<ReactorState>) -> Self {
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

/// Handle to a task's result.  Dropping it detaches the task.
pub struct JoinHandle<T> {
    task: Option<async_task::FallibleTask<T>>,
}

impl<T> JoinHandle<T> {
    /// Cancels the task at its next await point and waits until its future is dropped.  Returns the task's result if it
    /// had ended before.
    pub async fn cancel(mut self) -> Option<T> {
        self.task.take().expect("a handle has its task until it is dropped").cancel().await
    }

    /// Cancels the task at its next await point, without waiting for that.
    pub fn abort(mut self) {
        // Dropping an async task cancels it, unlike dropping a handle.
        drop(self.task.take());
    }

    /// Returns whether the task has ended.
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

/// Spawns a task on this reactor.
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

/// Spawns a task if a reactor runs on this thread; otherwise drops the future.  Meant for cleanup in `Drop`, which may
/// run after the reactor has ended.
///
/// A reactor that ends drops these tasks too: their futures must not spawn another one then.
pub fn try_spawn<F>(future: F) -> Option<JoinHandle<F::Output>>
where
    F: Future + 'static,
    F::Output: 'static,
{
    try_with_current(|inner| inner.clone()).map(|inner| JoinHandle { task: Some(inner.spawn(future).fallible()) })
}

/// Returns the name of this reactor's driver.
///
/// # Panics
/// When no reactor runs on this thread.
pub fn driver_name() -> &'static str {
    with_current(|inner| inner.driver.borrow().name())
}

/// Returns this reactor's busy-poll time.
pub(crate) fn busy_poll_time() -> Duration {
    with_current(|inner| inner.linger.get())
}

/// Yields background work while the current loop iteration exceeds `TURN_LONG`, at most `STAND_BACK_MAX` times.  Call
/// it before each piece of background work, so that many of them at once do not delay a host's request.
pub async fn stand_back() {
    for _ in 0..STAND_BACK_MAX {
        if with_current(|inner| inner.now().since(inner.turn_began.get()) < TURN_LONG) {
            return;
        }
        yield_now().await;
    }
}

/// Yields to the other ready tasks and the driver, once.
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
