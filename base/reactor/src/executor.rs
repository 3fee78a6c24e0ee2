//! The executor: one thread, tasks that need not be `Send`, timers, and the operations in flight.
//!
//! The loop runs what is ready, looks at the driver, and only when nothing is ready lets the driver wait, until the
//! next timer at the latest.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use async_task::Runnable;
use crossbeam_queue::SegQueue;
use slab::Slab;

use crate::driver::{Completion, Driver, Op, OpKey, Unpark, Wait};
use crate::time::Instant;

/// Tasks run between two looks at the driver, so that completions are not kept waiting by a busy queue.
const TASKS_PER_TURN_MAX: usize = 256;

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

pub(crate) fn try_with_current<R>(f: impl FnOnce(&Rc<Inner>) -> R) -> Option<R> {
    let inner = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()?;
    Some(f(&inner))
}

/// What other threads can reach of a reactor.
pub(crate) struct Remote {
    thread: ThreadId,
    queue: SegQueue<Runnable>,
    /// Set by whoever wakes it while it may sleep, so that many wake-ups cost one system call.
    notified: AtomicBool,
    unpark: Arc<dyn Unpark>,
}

impl Remote {
    fn notify(&self) {
        if !self.notified.swap(true, Ordering::SeqCst) {
            self.unpark.unpark();
        }
    }
}

enum OpState {
    Waiting(Option<Waker>),
    Done(Completion),
    /// Its future is gone; the completion is dropped when it comes, and only then its buffers.
    Orphaned,
}

/// The state of one reactor.
pub(crate) struct Inner {
    driver: RefCell<Box<dyn Driver>>,
    ready: RefCell<VecDeque<Runnable>>,
    remote: Arc<Remote>,
    /// A waker of every task alive, to end them all when the reactor goes.
    tasks: RefCell<Slab<Waker>>,
    ops: RefCell<Slab<OpState>>,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next_timer: Cell<u64>,
    closing: Cell<bool>,
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

    pub(crate) fn arm_timer(&self, deadline: Instant, waker: &Waker) -> u64 {
        let id = self.next_timer.get();
        self.next_timer.set(id + 1);
        self.timers.borrow_mut().insert((deadline, id), waker.clone());
        id
    }

    pub(crate) fn rearm_timer(&self, deadline: Instant, id: u64, waker: &Waker) {
        self.timers.borrow_mut().insert((deadline, id), waker.clone());
    }

    pub(crate) fn disarm_timer(&self, deadline: Instant, id: u64) {
        self.timers.borrow_mut().remove(&(deadline, id));
    }

    pub(crate) fn with_driver<R>(&self, f: impl FnOnce(&mut dyn Driver) -> R) -> R {
        f(self.driver.borrow_mut().as_mut())
    }

    pub(crate) fn start_op(self: &Rc<Self>, op: Op) -> OpFuture {
        let key = self.ops.borrow_mut().insert(OpState::Waiting(None));
        self.driver.borrow_mut().submit(OpKey(key as u64), op);
        OpFuture { inner: self.clone(), key: Some(key) }
    }

    fn spawn<F: Future + 'static>(self: &Rc<Self>, future: F) -> async_task::Task<F::Output>
    where
        F::Output: 'static,
    {
        assert!(!self.closing.get(), "spawned on a reactor that is closing");
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let key = entry.key();
        let registered = Registered { inner: self.clone(), key };
        let future = async move {
            let _registered = registered;
            future.await
        };
        let remote = self.remote.clone();
        let schedule = move |runnable: Runnable| {
            if std::thread::current().id() == remote.thread {
                let left = Cell::new(Some(runnable));
                try_with_current(|inner| {
                    if Arc::ptr_eq(&inner.remote, &remote) {
                        inner.ready.borrow_mut().push_back(left.take().expect("runnable"));
                    }
                });
                let Some(runnable) = left.take() else { return };
                remote.queue.push(runnable);
            } else {
                remote.queue.push(runnable);
            }
            remote.notify();
        };
        let (runnable, task) = async_task::spawn_local(future, schedule);
        entry.insert(runnable.waker());
        drop(tasks);
        runnable.schedule();
        task
    }

    /// Runs what is ready; true if something ran.
    fn run_ready(&self) -> bool {
        let mut ran = false;
        for _ in 0..TASKS_PER_TURN_MAX {
            let next = self.ready.borrow_mut().pop_front();
            let Some(runnable) = next.or_else(|| self.remote.queue.pop()) else { break };
            ran = true;
            runnable.run();
        }
        ran
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

    fn turn_driver(&self, may_wait: bool, main: &MainWaker, done: &mut Vec<Completion>) {
        let wait = if !may_wait {
            Wait::No
        } else {
            // From here on a wake-up from another thread goes through the driver.
            self.remote.notified.store(false, Ordering::SeqCst);
            // Whoever queued something before that has not woken the driver, so look once more.
            if !self.remote.queue.is_empty() || main.woken.load(Ordering::SeqCst) {
                Wait::No
            } else {
                self.timers.borrow().first_key_value().map_or(Wait::Forever, |((at, _), _)| Wait::Until(*at))
            }
        };
        self.driver.borrow_mut().poll(wait, done);
        if may_wait {
            self.remote.notified.store(true, Ordering::SeqCst);
        }
        for completion in done.drain(..) {
            self.complete(completion);
        }
    }

    fn complete(&self, completion: Completion) {
        let key = completion.key.0 as usize;
        let mut ops = self.ops.borrow_mut();
        match std::mem::replace(&mut ops[key], OpState::Orphaned) {
            OpState::Waiting(waker) => {
                ops[key] = OpState::Done(completion);
                drop(ops);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            OpState::Orphaned => {
                ops.remove(key);
                drop(ops);
                // A socket that nobody waits for any more is closed, not leaked.
                if let (Op::Accept { .. } | Op::Connect { .. }, Ok(handle)) = (&completion.op, &completion.result) {
                    self.driver.borrow_mut().close(crate::driver::Handle(*handle));
                }
            }
            OpState::Done(_) => unreachable!("the driver completed operation {key} twice"),
        }
    }
}

/// Takes a task off the list of the living when it ends.
struct Registered {
    inner: Rc<Inner>,
    key: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        // While the reactor closes, the list is already taken.
        if let Ok(mut tasks) = self.inner.tasks.try_borrow_mut() {
            tasks.try_remove(self.key);
        }
    }
}

/// An operation in flight.  Dropped early, the operation is asked to end, and its buffers stay with the driver until
/// it has.
pub(crate) struct OpFuture {
    inner: Rc<Inner>,
    key: Option<usize>,
}

impl Future for OpFuture {
    type Output = Completion;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let key = self.key.expect("polled after it was done");
        let inner = self.inner.clone();
        let mut ops = inner.ops.borrow_mut();
        match &mut ops[key] {
            OpState::Waiting(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            OpState::Done(_) => {
                let OpState::Done(completion) = ops.remove(key) else { unreachable!() };
                self.key = None;
                Poll::Ready(completion)
            }
            OpState::Orphaned => unreachable!("a future polled after it was dropped"),
        }
    }
}

impl Drop for OpFuture {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut ops = self.inner.ops.borrow_mut();
        match &ops[key] {
            OpState::Done(_) => {
                let OpState::Done(completion) = ops.remove(key) else { unreachable!() };
                drop(ops);
                if let (Op::Accept { .. } | Op::Connect { .. }, Ok(handle)) = (&completion.op, &completion.result) {
                    self.inner.driver.borrow_mut().close(crate::driver::Handle(*handle));
                }
            }
            _ => {
                ops[key] = OpState::Orphaned;
                drop(ops);
                self.inner.driver.borrow_mut().cancel(OpKey(key as u64));
            }
        }
    }
}

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
        if std::thread::current().id() != self.remote.thread {
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
        let unpark = driver.unparker();
        let remote = Arc::new(Remote {
            thread: std::thread::current().id(),
            queue: SegQueue::new(),
            notified: AtomicBool::new(true),
            unpark,
        });
        let inner = Inner {
            driver: RefCell::new(driver),
            ready: RefCell::default(),
            remote,
            tasks: RefCell::default(),
            ops: RefCell::default(),
            timers: RefCell::default(),
            next_timer: Cell::new(0),
            closing: Cell::new(false),
        };
        Self { inner: Rc::new(inner) }
    }

    /// A reactor on the operating system, by [`DriverChoice`](crate::DriverChoice).
    pub fn system(choice: crate::driver::DriverChoice) -> io::Result<Self> {
        Ok(Self::new(crate::driver::system_driver(choice)?))
    }

    /// The driver's name.
    pub fn driver_name(&self) -> &'static str {
        self.inner.driver.borrow().name()
    }

    /// Runs until `future` ends.  Tasks that it spawned stay, and go on in the next call.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::new(&self.inner);
        let main = Arc::new(MainWaker { woken: AtomicBool::new(true), remote: self.inner.remote.clone() });
        let waker = Waker::from(main.clone());
        let mut cx = Context::from_waker(&waker);
        let mut future = std::pin::pin!(future);
        let mut done = Vec::new();
        loop {
            let mut ran = false;
            if main.woken.swap(false, Ordering::SeqCst) {
                ran = true;
                if let Poll::Ready(value) = future.as_mut().poll(&mut cx) {
                    return value;
                }
            }
            ran |= self.inner.run_ready();
            let idle = !ran || (self.inner.ready.borrow().is_empty() && self.inner.remote.queue.is_empty());
            let idle = idle && !main.woken.load(Ordering::SeqCst);
            self.inner.turn_driver(idle, &main, &mut done);
            self.inner.fire_timers();
        }
    }
}

impl Drop for Reactor {
    /// Ends every task where it stands, as a crash would: futures are dropped, nothing more is submitted.
    fn drop(&mut self) {
        let _entered = Entered::new(&self.inner);
        self.inner.closing.set(true);
        // Waking a task queues it; dropping the queued runnable drops its future.  Dropping one may wake others.
        loop {
            let wakers: Vec<Waker> = self.inner.tasks.borrow_mut().drain().collect();
            let empty = wakers.is_empty();
            wakers.into_iter().for_each(Waker::wake);
            let mut dropped = false;
            loop {
                let next = self.inner.ready.borrow_mut().pop_front();
                let Some(runnable) = next.or_else(|| self.inner.remote.queue.pop()) else { break };
                dropped = true;
                drop(runnable);
            }
            if empty && !dropped {
                break;
            }
        }
        self.inner.timers.borrow_mut().clear();
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
        CURRENT.with(|current| *current.borrow_mut() = before);
    }
}

/// A task's result to wait for.  Dropping it lets the task go on by itself.
pub struct JoinHandle<T> {
    task: Option<async_task::Task<T>>,
}

impl<T> JoinHandle<T> {
    /// Ends the task at its next point of waiting, and waits until its future is dropped.
    pub async fn cancel(mut self) -> Option<T> {
        self.task.take().expect("task").cancel().await
    }

    /// True when it has ended.
    pub fn is_finished(&self) -> bool {
        self.task.as_ref().is_none_or(async_task::Task::is_finished)
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(self.task.as_mut().expect("polled after it was done")).poll(cx)
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
    with_current(|inner| JoinHandle { task: Some(inner.spawn(future)) })
}

/// Lets the other ready tasks and the driver have a turn.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
