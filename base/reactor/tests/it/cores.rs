//! Tests of several reactors: calls between cores, queues between them, stopping, panics.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::TempDir;
use forebay_reactor::cores::{CoreGone, CorePanic};
use forebay_reactor::{
    Addr, Buf, BufMut, CoreHandle, Cores, CoresOptions, DriverChoice, Listener, Reactor, Stream, cross, sleep, spawn,
    yield_now,
};

fn on_each(test: impl AsyncFn(&mut Cores)) {
    for driver in [DriverChoice::Uring, DriverChoice::Poll] {
        let options = CoresOptions { count: 3, driver, name: "test".into(), ..CoresOptions::default() };
        let mut cores = Cores::start(&options).expect("cores");
        Reactor::system(driver).expect("a driver").block_on(test(&mut cores));
    }
}

#[test]
fn work_runs_where_it_is_sent() {
    on_each(async |cores| {
        for index in 0..cores.len() {
            let name = cores
                .handle(index)
                .run(move || async move {
                    // Need not be `Send`.
                    let local = Rc::new(index);
                    sleep(Duration::from_micros(10)).await;
                    (*local, std::thread::current().name().map(str::to_owned))
                })
                .await;
            assert_eq!(name, Ok((index, Some(format!("test-{index}")))));
        }
    });
}

#[test]
fn cores_call_one_another() {
    on_each(async |cores| {
        let handles = cores.handles();
        let home = CoreHandle::current();
        assert!(home.is_current() && !handles[0].is_current());
        // Ping-pong with a buffer that is not copied.
        let buf = BufMut::zeroed(4096).freeze();
        let address = buf.as_ptr() as usize;
        let first = handles[0].clone();
        let sum = first
            .run(move || async move {
                let mut sum = 0;
                for round in 0..200 {
                    let buf = buf.clone();
                    let next = handles[1 + round % 2].run(move || async move {
                        assert_eq!(buf.as_ptr() as usize, address);
                        round
                    });
                    let at_home = home.run(move || async move { round });
                    sum += next.await.expect("runs") + at_home.await.expect("runs");
                }
                sum
            })
            .await;
        assert_eq!(sum, Ok(2 * (0..200).sum::<usize>()));
    });
}

#[test]
fn what_is_started_goes_on_when_nobody_waits() {
    on_each(async |cores| {
        let done = Arc::new(AtomicUsize::new(0));
        for index in 0..100 {
            let done = done.clone();
            drop(cores.handle(index % 3).run(move || async move {
                yield_now().await;
                done.fetch_add(1, Ordering::SeqCst);
            }));
        }
        while done.load(Ordering::SeqCst) < 100 {
            yield_now().await;
        }
    });
}

#[test]
fn queues_keep_the_order_of_each_sender() {
    const COUNT: usize = 20_000;
    on_each(async |cores| {
        let (sender, mut receiver) = cross::channel();
        for index in 0..cores.len() {
            let sender = sender.clone();
            drop(cores.handle(index).run(move || async move {
                for number in 0..COUNT {
                    sender.send((index, number)).expect("somebody receives");
                    // Lets the receiver go to sleep occasionally.
                    if number % 1000 == 0 {
                        sleep(Duration::from_micros(200)).await;
                    }
                }
            }));
        }
        drop(sender);
        let mut next = [0; 3];
        while let Some((index, number)) = receiver.recv().await {
            assert_eq!(next[index], number);
            next[index] += 1;
        }
        assert_eq!(next, [COUNT; 3]);
    });
}

#[test]
fn a_queue_nobody_receives_from_gives_items_back() {
    let (sender, receiver) = cross::channel();
    let item = Arc::new(());
    assert!(sender.send(item.clone()).is_ok());
    drop(receiver);
    assert_eq!(Arc::strong_count(&item), 1, "what was queued is dropped");
    assert!(sender.send(item).is_err());
}

#[test]
fn an_answer_that_never_comes() {
    Reactor::system(DriverChoice::Auto).expect("a driver").block_on(async {
        let (answer, answered) = cross::oneshot::<u32>();
        let waiting = spawn(answered);
        yield_now().await;
        std::thread::spawn(move || drop(answer)).join().expect("the thread ends");
        assert_eq!(waiting.await, None);
        let (answer, answered) = cross::oneshot::<u32>();
        assert!(!answer.is_abandoned());
        drop(answered);
        assert!(answer.is_abandoned());
        answer.send(1);
    });
}

#[test]
fn stopping_ends_what_runs_and_refuses_what_comes() {
    for _ in 0..20 {
        let cores = Cores::start(&CoresOptions { count: 2, ..CoresOptions::default() }).expect("cores");
        let handles = cores.handles();
        let alive = Arc::new(());
        let reactor = Reactor::system(DriverChoice::Auto).expect("a driver");
        let running: Vec<_> = handles
            .iter()
            .map(|handle| {
                let alive = alive.clone();
                handle.run(move || async move {
                    let _alive = alive;
                    std::future::pending::<()>().await;
                })
            })
            .collect();
        let late: Vec<_> = std::thread::scope(|scope| {
            // Sends while the cores stop.
            let sending = scope.spawn(|| {
                let send = |_| handles[0].run(|| async {});
                (0..100).map(send).collect::<Vec<_>>()
            });
            cores.stop().expect("no panic");
            sending.join().expect("the thread ends")
        });
        reactor.block_on(async {
            for running in running {
                assert_eq!(running.await, Err(CoreGone));
            }
            for late in late {
                // Completed before the stop, or refused; never left hanging.
                let _ = late.await;
            }
            assert!(handles[0].is_gone());
            assert_eq!(handles[0].run(|| async {}).await, Err(CoreGone));
        });
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}

#[test]
fn cores_accept_from_one_queue() {
    on_each(async |cores| {
        let dir = TempDir::new();
        for addr in [Addr::Tcp(([127, 0, 0, 1], 0).into()), Addr::Unix(dir.join("socket"))] {
            let listener = Listener::bind(&addr).expect("a listening socket");
            let addr = listener.local_addr().clone();
            let accepting: Vec<_> = (0..cores.len())
                .map(|index| {
                    let shared = listener.share().expect("shared");
                    cores.handle(index).run(move || async move {
                        let (stream, _) = shared.attach().expect("attached").accept().await.expect("a connection");
                        stream.send(Buf::copy_of(&[index as u8])).await.expect("sent");
                    })
                })
                .collect();
            let mut served = Vec::new();
            for _ in 0..cores.len() {
                let stream = Stream::connect(&addr).await.expect("connected");
                let (received, byte) = stream.recv_exact(BufMut::with_capacity(1)).await;
                received.expect("a byte");
                served.push(byte[0]);
            }
            served.sort_unstable();
            assert_eq!(served, [0, 1, 2], "each core takes one connection and stops");
            for ended in accepting {
                ended.await.expect("the core lives");
            }
        }
    });
}

#[test]
fn a_panic_is_reported_and_the_others_go_on() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    fn see(panic: &CorePanic) {
        SEEN.fetch_add(panic.core, Ordering::SeqCst);
    }
    let options = CoresOptions { count: 2, on_panic: Some(see), ..CoresOptions::default() };
    let cores = Cores::start(&options).expect("cores");
    let reactor = Reactor::system(DriverChoice::Auto).expect("a driver");
    reactor.block_on(async {
        let broken = cores.handle(1).run(|| async { panic!("on purpose: {}", 5) });
        assert_eq!(broken.await, Err(CoreGone));
        assert_eq!(cores.handle(0).run(|| async { 1 }).await, Ok(1));
    });
    assert_eq!(cores.stop(), Err(CorePanic { core: 1, message: "on purpose: 5".into() }));
    assert_eq!(SEEN.load(Ordering::SeqCst), 1, "told once, of core 1");
}
