//! Tests of eventfds on both drivers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;

use crate::steps::{poll_once, turn_round};
use forebay_reactor::{EventSignal, EventWatch, spawn};

crate::on_each_driver!(
    signals_are_counted_and_taken,
    waiting_for_a_signal,
    readiness_lasts_until_it_is_taken,
    a_dropped_wait_is_continued,
    a_dropped_wait_that_is_over_is_checked,
    several_tasks_wait,
    a_full_counter_does_not_block,
    nothing_to_take_does_not_block,
    events_that_come_again,
    a_watch_is_dropped_while_armed,
    only_eventfds_are_adopted,
);

fn event() -> (EventSignal, EventWatch) {
    let (signal, other) = EventSignal::create().expect("an eventfd");
    (signal, EventWatch::new(other).expect("watched"))
}

/// Sets an eventfd to blocking, as the other process may at any time.
fn set_blocking(fd: &impl AsRawFd) {
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) }, 0);
}

async fn signals_are_counted_and_taken() {
    let (signal, watch) = event();
    assert!(!watch.take());
    signal.signal();
    signal.signal();
    assert!(watch.take());
    assert!(!watch.take());
}

async fn waiting_for_a_signal() {
    let (signal, watch) = event();
    let watch = Rc::new(watch);
    for _ in 0..100 {
        let mut ready = pin!(watch.ready());
        assert!(poll_once(ready.as_mut()).await.is_none());
        turn_round().await;
        assert!(poll_once(ready.as_mut()).await.is_none());
        let waiting = spawn({
            let watch = watch.clone();
            async move {
                watch.ready().await.expect("readable");
                watch.take()
            }
        });
        turn_round().await;
        assert!(!waiting.is_finished());
        signal.signal();
        assert!(waiting.await);
    }
    // From another thread, while the reactor sleeps.
    let signalling = std::thread::spawn(move || signal.signal());
    watch.ready().await.expect("readable");
    assert!(watch.take());
    signalling.join().expect("ended");
}

async fn readiness_lasts_until_it_is_taken() {
    let (signal, watch) = event();
    signal.signal();
    for _ in 0..5 {
        watch.ready().await.expect("readable");
    }
    assert!(watch.take());
    let mut ready = pin!(watch.ready());
    assert!(poll_once(ready.as_mut()).await.is_none());
    turn_round().await;
    assert!(poll_once(ready.as_mut()).await.is_none());
}

async fn a_dropped_wait_is_continued() {
    let (signal, watch) = event();
    for _ in 0..100 {
        let mut ready = pin!(watch.ready());
        assert!(poll_once(ready.as_mut()).await.is_none());
    }
    turn_round().await;
    let waiting = spawn(async move {
        watch.ready().await.expect("readable");
        watch.take()
    });
    turn_round().await;
    signal.signal();
    assert!(waiting.await);
}

async fn a_dropped_wait_that_is_over_is_checked() {
    let (signal, watch) = event();
    {
        let mut ready = pin!(watch.ready());
        assert!(poll_once(ready.as_mut()).await.is_none());
    }
    signal.signal();
    turn_round().await;
    assert!(watch.take());
    // The wait from before is complete, but the counter is zero again.
    let mut ready = pin!(watch.ready());
    assert!(poll_once(ready.as_mut()).await.is_none());
    turn_round().await;
    assert!(poll_once(ready.as_mut()).await.is_none());
    signal.signal();
    ready.await.expect("readable");
    // And here it is not.
    {
        assert!(watch.take());
        let mut ready = pin!(watch.ready());
        assert!(poll_once(ready.as_mut()).await.is_none());
    }
    signal.signal();
    turn_round().await;
    watch.ready().await.expect("readable");
}

async fn several_tasks_wait() {
    let (signal, watch) = event();
    let watch = Rc::new(watch);
    let waiting: Vec<_> = (0..5)
        .map(|_| {
            let watch = watch.clone();
            spawn(async move { watch.ready().await.expect("readable") })
        })
        .collect();
    turn_round().await;
    signal.signal();
    for waiting in waiting {
        waiting.await;
    }
    assert!(watch.take());
}

async fn a_full_counter_does_not_block() {
    let (signal, other) = EventSignal::create().expect("an eventfd");
    let mut file = File::from(other.try_clone().expect("cloned"));
    let watch = EventWatch::new(other).expect("watched");
    for blocking in [false, true] {
        file.write_all(&(u64::MAX - 1).to_ne_bytes()).expect("filled");
        if blocking {
            set_blocking(&file);
        }
        signal.signal();
        signal.signal();
        assert!(watch.take());
        signal.signal();
        assert!(watch.take());
        assert!(!watch.take());
    }
}

async fn nothing_to_take_does_not_block() {
    let (signal, other) = EventSignal::create().expect("an eventfd");
    let file = File::from(other.try_clone().expect("cloned"));
    let watch = EventWatch::new(other).expect("watched");
    set_blocking(&file);
    assert!(!watch.take());
    let mut ready = pin!(watch.ready());
    assert!(poll_once(ready.as_mut()).await.is_none());
    turn_round().await;
    signal.signal();
    ready.await.expect("readable");
    assert!(watch.take());
    assert!(!watch.take());
}

async fn events_that_come_again() {
    let (signal, other) = EventSignal::create().expect("an eventfd");
    for round in 0..10 {
        // The other process keeps the eventfd open, so each of these is the same file, under the same number.
        let watch = EventWatch::new(other.try_clone().expect("cloned")).expect("watched");
        if round % 2 == 0 {
            let mut ready = pin!(watch.ready());
            assert!(poll_once(ready.as_mut()).await.is_none());
            turn_round().await;
        }
        signal.signal();
        watch.ready().await.expect("readable");
        assert!(watch.take());
        drop(watch);
        turn_round().await;
    }
}

async fn a_watch_is_dropped_while_armed() {
    let (signal, mut other) = EventSignal::create().expect("an eventfd");
    let watch = EventWatch::new(other.try_clone().expect("cloned")).expect("watched");
    {
        let mut ready = pin!(watch.ready());
        assert!(poll_once(ready.as_mut()).await.is_none());
    }
    drop(watch);
    signal.signal();
    turn_round().await;
    let mut file = File::from(other);
    let mut count = [0; 8];
    file.read_exact(&mut count).expect("nobody has taken it");
    assert_eq!(u64::from_ne_bytes(count), 1);
    other = file.into();
    EventSignal::new(other).expect("an eventfd").signal();
}

async fn only_eventfds_are_adopted() {
    let descriptors = || -> Vec<OwnedFd> {
        let (reader, writer) = io::pipe().expect("a pipe");
        vec![reader.into(), writer.into(), File::open("/dev/null").expect("opened").into()]
    };
    for descriptor in descriptors() {
        assert_eq!(EventWatch::new(descriptor).expect_err("refused").kind(), io::ErrorKind::InvalidInput);
    }
    for descriptor in descriptors() {
        let error = EventSignal::new(descriptor).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}
