//! Tests of the executor: scheduling, wake-ups, dropping.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::common::TempDir;
use forebay_reactor::sync::{Notify, Semaphore, oneshot, queue};
use forebay_reactor::{
    Addr, BufMut, DriverChoice, File, Listener, OpenOptions, Reactor, Stream, cross, now, sleep, sleep_until, spawn,
    stand_back, timeout, yield_now,
};

crate::on_each_driver!(
    timers_fire_in_order,
    a_timer_dropped_does_not_fire,
    a_timeout_keeps_the_result,
    woken_by_other_threads,
    yielding_lets_the_driver_work,
    cancelling_drops_the_future_first,
    a_busy_task_does_not_starve_sockets,
    background_work_takes_one_turn_a_piece,
    background_work_goes_on_beside_a_busy_task,
    permits_are_fair,
    notifications_reach_all_who_wait,
    random_numbers_differ,
);

fn reactor() -> Reactor {
    Reactor::system(DriverChoice::Auto).expect("a driver")
}

/// Waits for a condition that another thread or the kernel makes true.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        yield_now().await;
    }
}

async fn timers_fire_in_order() {
    let order = Rc::new(RefCell::new(Vec::new()));
    let start = now();
    let delays = [5u64, 1, 3, 3, 0, 2, 1, 4];
    let tasks: Vec<_> = delays
        .iter()
        .enumerate()
        .map(|(index, &delay)| {
            let order = order.clone();
            spawn(async move {
                let deadline = start + Duration::from_millis(delay);
                sleep_until(deadline).await;
                assert!(now() >= deadline, "a timer fired early");
                order.borrow_mut().push((delay, index));
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    let order = order.borrow().clone();
    let mut sorted = order.clone();
    sorted.sort();
    assert_eq!(order, sorted, "not in the order of deadlines, and then of creation");
}

async fn a_timer_dropped_does_not_fire() {
    let mut long = Box::pin(sleep(Duration::from_secs(3600)));
    poll_fn(|cx| {
        assert!(long.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    drop(long);
    sleep(Duration::from_millis(1)).await;
}

async fn a_timeout_keeps_the_result() {
    assert_eq!(timeout(Duration::from_secs(3600), async { 7 }).await, Ok(7));
    assert!(timeout(Duration::from_millis(1), std::future::pending::<()>()).await.is_err());
    assert_eq!(timeout(Duration::ZERO, async { 8 }).await, Ok(8), "what is ready is taken");
}

/// Flag that another thread sets, in each way in which a sleeping reactor can be woken.
async fn woken_by_other_threads() {
    struct Flag {
        set: AtomicBool,
        waker: Mutex<Option<Waker>>,
    }
    async fn wait(flag: &Flag) {
        poll_fn(|cx| {
            *flag.waker.lock().expect("lock") = Some(cx.waker().clone());
            if flag.set.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
    for round in 0..2000 {
        let flag = Arc::new(Flag { set: AtomicBool::new(false), waker: Mutex::new(None) });
        let thread = std::thread::spawn({
            let flag = flag.clone();
            move || {
                flag.set.store(true, Ordering::SeqCst);
                if let Some(waker) = flag.waker.lock().expect("lock").take() {
                    waker.wake();
                }
            }
        });
        // The main future and a task are woken in different ways.
        if round % 2 == 0 {
            wait(&flag).await;
        } else {
            spawn(async move { wait(&flag).await }).await;
        }
        thread.join().expect("the thread ends");
    }
}

async fn yielding_lets_the_driver_work() {
    let done = Rc::new(Cell::new(false));
    spawn({
        let done = done.clone();
        async move {
            sleep(Duration::from_millis(2)).await;
            done.set(true);
        }
    });
    until(|| done.get()).await;
}

async fn cancelling_drops_the_future_first() {
    struct Tell(Rc<Cell<bool>>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let dropped = Rc::new(Cell::new(false));
    let tell = Tell(dropped.clone());
    let task = spawn(async move {
        let _tell = tell;
        std::future::pending::<()>().await;
    });
    yield_now().await;
    assert!(!task.is_finished());
    assert_eq!(task.cancel().await, None);
    assert!(dropped.get());

    let task = spawn(async { 5 });
    until(|| task.is_finished()).await;
    assert_eq!(task.cancel().await, Some(5));

    // Dropping a handle does not cancel its task.
    dropped.set(false);
    let tell = Tell(dropped.clone());
    drop(spawn(async move {
        yield_now().await;
        drop(tell);
    }));
    until(|| dropped.get()).await;
}

/// Works for longer than `TURN_LONG`.
fn work() {
    let begun = now();
    while now().since(begun) < Duration::from_micros(200) {
        std::hint::spin_loop();
    }
}

async fn background_work_takes_one_turn_a_piece() {
    let turns = Rc::new(RefCell::new(Vec::new()));
    let turn = Rc::new(Cell::new(0));
    let left = Rc::new(Cell::new(6));
    for _ in 0..left.get() {
        let (turns, turn, left) = (turns.clone(), turn.clone(), left.clone());
        drop(spawn(async move {
            stand_back().await;
            turns.borrow_mut().push(turn.get());
            work();
            left.set(left.get() - 1);
        }));
    }
    while left.get() > 0 {
        yield_now().await;
        turn.set(turn.get() + 1);
    }
    let turns = turns.borrow();
    assert!(turns.windows(2).all(|two| two[0] != two[1]), "two pieces in one turn: {turns:?}");
}

async fn background_work_goes_on_beside_a_busy_task() {
    let busy = spawn(async {
        loop {
            work();
            yield_now().await;
        }
    });
    for _ in 0..3 {
        stand_back().await;
    }
    assert_eq!(busy.cancel().await, None);
}

async fn a_busy_task_does_not_starve_sockets() {
    let stop = Rc::new(Cell::new(false));
    let busy = spawn({
        let stop = stop.clone();
        async move {
            while !stop.get() {
                // Wakes itself at once, without yielding.
                let mut first = true;
                poll_fn(|cx| {
                    if std::mem::take(&mut first) {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    Poll::Ready(())
                })
                .await;
            }
        }
    });
    let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("listens");
    let addr = listener.local_addr().clone();
    let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
    listener.accept().await.expect("accepts");
    client.await;
    sleep(Duration::from_millis(1)).await;
    stop.set(true);
    busy.await;
}

async fn permits_are_fair() {
    let semaphore = Semaphore::new(2);
    let order = Rc::new(RefCell::new(Vec::new()));
    let held = semaphore.acquire(2).await;
    let tasks: Vec<_> = [2, 1, 1]
        .into_iter()
        .enumerate()
        .map(|(index, want)| {
            let (semaphore, order) = (semaphore.clone(), order.clone());
            spawn(async move {
                let _permit = semaphore.acquire(want).await;
                order.borrow_mut().push(index);
                yield_now().await;
            })
        })
        .collect();
    yield_now().await;
    drop(held);
    for task in tasks {
        task.await;
    }
    assert_eq!(*order.borrow(), [0, 1, 2]);
    assert_eq!(semaphore.available(), 2);
}

async fn notifications_reach_all_who_wait() {
    let notify = Rc::new(Notify::new());
    let heard = Rc::new(Cell::new(0));
    let wait = |rounds: usize| {
        let (notify, heard) = (notify.clone(), heard.clone());
        spawn(async move {
            for _ in 0..rounds {
                notify.wait().await;
                heard.set(heard.get() + 1);
            }
        })
    };
    let tasks: Vec<_> = (0..1000).map(|at| wait(1 + at % 3)).collect();
    let given_up: Vec<_> = (0..100).map(|_| wait(1)).collect();
    // Wait until each task waits before the notification.
    for _ in 0..10 {
        yield_now().await;
    }
    given_up.into_iter().for_each(forebay_reactor::JoinHandle::abort);
    // A wait starts when it is created, not at its first poll.
    let early = notify.wait();
    notify.notify_all();
    early.await;
    for expect in [1000, 1666, 1999] {
        until(|| heard.get() == expect).await;
        // One more iteration, for the last waiter to wait again.
        yield_now().await;
        notify.notify_all();
    }
    for task in tasks {
        task.await;
    }
}

async fn random_numbers_differ() {
    let numbers: std::collections::HashSet<u64> = (0..100).map(|_| forebay_reactor::random()).collect();
    assert_eq!(numbers.len(), 100);
}

/// Drops a reactor with everything in flight at once: files, sockets, timers, tasks that wait for each other.
#[test]
fn dropping_a_reactor_ends_everything() {
    for choice in [DriverChoice::Uring, DriverChoice::Poll] {
        let dir = TempDir::new();
        let alive = Rc::new(());
        let reactor = Reactor::system(choice).expect("a driver");
        let survivor = reactor.block_on(async {
            let file = File::open(dir.join("f"), OpenOptions::read_write().create()).expect("opens");
            let listener = Rc::new(Listener::bind(&Addr::Unix(dir.join("s"))).expect("listens"));
            let notify = Rc::new(Notify::new());
            let (sender, mut receiver) = queue::unbounded::<Rc<()>>();
            let (once, other) = oneshot::channel::<()>();
            for _ in 0..10 {
                let (alive, file, notify) = (alive.clone(), file.clone(), notify.clone());
                spawn(async move {
                    let _alive = alive;
                    let _ = file.write_at(BufMut::zeroed(1 << 16), 0).await;
                    notify.wait().await;
                });
            }
            spawn({
                let (alive, listener) = (alive.clone(), listener.clone());
                async move {
                    let _alive = alive;
                    let _ = listener.accept().await;
                    std::future::pending::<()>().await;
                }
            });
            spawn({
                let alive = alive.clone();
                async move {
                    let stream = Stream::connect(listener.local_addr()).await.expect("connects");
                    let _alive = alive;
                    // Wakes another task from its destructor.
                    let _once = once;
                    let _ = stream.recv(BufMut::with_capacity(10)).await;
                }
            });
            let waits = spawn({
                let alive = alive.clone();
                async move {
                    let _alive = alive;
                    let _ = other.await;
                    sleep(Duration::from_secs(3600)).await;
                }
            });
            spawn({
                let alive = alive.clone();
                async move {
                    let _alive = alive;
                    sender.send(Rc::new(()));
                    // Spawns another task from its destructor.
                    struct Spawns(Rc<()>);
                    impl Drop for Spawns {
                        fn drop(&mut self) {
                            let alive = self.0.clone();
                            spawn(async move { drop(alive) });
                        }
                    }
                    let _spawns = Spawns(_alive.clone());
                    while receiver.recv().await.is_some() {}
                    waits.await;
                }
            });
            for _ in 0..3 {
                yield_now().await;
            }
            file
        });
        assert!(Rc::strong_count(&alive) > 1);
        drop(reactor);
        assert_eq!(Rc::strong_count(&alive), 1, "a task outlived its reactor");
        // Objects moved out of the reactor can still be dropped.
        assert!(survivor.size().is_ok());
        drop(survivor);
    }
}

/// Checks that files and ports are free again after a crash in the same process.  A file may take a moment: the kernel
/// reports the completion of an operation before it releases the operation's file.
#[test]
fn dropping_a_reactor_frees_locks_and_ports() {
    for choice in [DriverChoice::Uring, DriverChoice::Poll] {
        let dir = TempDir::new();
        let mut addr: Addr = "127.0.0.1:0".parse().expect("an address");
        for _ in 0..10 {
            let reactor = Reactor::system(choice).expect("a driver");
            addr = reactor.block_on(async {
                let options = OpenOptions::read_write().create().direct().lock();
                let file = File::open_when_free(dir.join("f"), options).await.expect("nobody holds it any more");
                let listener = Listener::bind(&addr).expect("nobody listens there any more");
                let addr = listener.local_addr().clone();
                for at in 0..20 {
                    let file = file.clone();
                    drop(spawn(async move { file.write_at(BufMut::zeroed(1 << 18), at << 18).await }));
                }
                drop(spawn(async move { listener.accept().await.map(drop) }));
                yield_now().await;
                addr
            });
            drop(reactor);
        }
    }
}

/// Races a wake-up by another thread with dropping the reactor.
#[test]
fn wakers_may_outlive_their_reactor() {
    for _ in 0..200 {
        let (sender, receiver) = std::sync::mpsc::channel::<Waker>();
        let waking = std::thread::spawn(move || {
            let waker = receiver.recv().expect("a waker");
            for _ in 0..100 {
                waker.wake_by_ref();
            }
        });
        let held = Rc::new(());
        let reactor = reactor();
        reactor.block_on(async {
            let held = held.clone();
            spawn(async move {
                let _held = held;
                poll_fn::<(), _>(|cx| {
                    let _ = sender.send(cx.waker().clone());
                    Poll::Pending
                })
                .await;
            });
            yield_now().await;
        });
        drop(reactor);
        assert_eq!(Rc::strong_count(&held), 1);
        waking.join().expect("the thread ends");
    }
}

#[test]
fn a_panic_of_a_task_ends_the_reactor() {
    let reactor = reactor();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        reactor.block_on(async {
            spawn(async { panic!("on purpose") });
            std::future::pending::<()>().await;
        });
    }));
    assert_eq!(result.expect_err("panics").downcast_ref::<&str>(), Some(&"on purpose"));
}

#[test]
fn tasks_go_on_in_the_next_call() {
    let reactor = reactor();
    let count = Rc::new(Cell::new(0));
    let mut counting = {
        let count = count.clone();
        Some(async move {
            for _ in 0..5 {
                sleep(Duration::from_micros(100)).await;
                count.set(count.get() + 1);
            }
        })
    };
    let counting = reactor.block_on(poll_fn(|_| Poll::Ready(counting.take().map(spawn)))).expect("taken once");
    assert!(count.get() < 5);
    reactor.block_on(counting);
    assert_eq!(count.get(), 5);
}

#[test]
fn reactors_nest() {
    let (outer, inner) = (reactor(), reactor());
    let sum = outer.block_on(async {
        let slow = spawn(async {
            sleep(Duration::from_millis(1)).await;
            1
        });
        let two = inner.block_on(async { spawn(async { 2 }).await });
        slow.await + two
    });
    assert_eq!(sum, 3);
}

/// Measures the cost of an idle reactor: CPU time of its thread over a second, and iterations of its loop.
#[test]
fn idle_costs_nothing() {
    const CHEAP: Duration = Duration::from_millis(10);
    fn thread_time() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid timespec to write to.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
    fn switches() -> i64 {
        // SAFETY: all zeroes is a valid rusage, and the call fills it.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
            usage.ru_nvcsw
        }
    }
    for choice in [DriverChoice::Uring, DriverChoice::Poll] {
        let reactor = Reactor::system(choice).expect("a driver");
        reactor.block_on(async {
            let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("listens");
            let addr = listener.local_addr().clone();
            let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
            let (server, _) = listener.accept().await.expect("accepts");
            let client = client.await;
            // Waits for connections, for bytes and for a distant timer, as an idle daemon does.
            spawn(async move { listener.accept().await.map(drop) });
            spawn(async move { server.recv(BufMut::with_capacity(100)).await.0 });
            spawn(sleep(Duration::from_secs(3600)));
            yield_now().await;
            // Some machines charge a thread for CPU time stolen from it: take the cheapest of several seconds.
            let mut cheapest = Duration::MAX;
            for _ in 0..10 {
                let mut polls = 0;
                let (cpu, switched) = (thread_time(), switches());
                let mut second = Box::pin(sleep(Duration::from_secs(1)));
                poll_fn(|cx| {
                    polls += 1;
                    second.as_mut().poll(cx)
                })
                .await;
                let (cpu, switched) = (thread_time() - cpu, switches() - switched);
                assert!(switched <= 5, "it slept {switched} times");
                assert!(polls <= 3, "the task was woken for nothing");
                cheapest = cheapest.min(cpu);
                if cheapest < CHEAP {
                    break;
                }
            }
            assert!(cheapest < CHEAP, "an idle second cost {cheapest:?} at least");
            drop(client);
        });
    }
}

/// Checks that a busy-polling reactor still sleeps when idle: messages, timers and completions reach it in both states.
#[test]
fn a_lingering_reactor_misses_nothing() {
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.set_linger(Duration::from_micros(200));
    reactor.block_on(async {
        for pause in [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(5)] {
            for _ in 0..40 {
                let (answer, answered) = cross::oneshot();
                let thread = std::thread::spawn(move || {
                    std::thread::sleep(pause);
                    answer.send(7);
                });
                assert_eq!(answered.await, Some(7));
                thread.join().expect("the thread ends");
                sleep(pause / 2).await;
            }
        }
    });
}
