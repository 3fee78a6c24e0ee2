//! The ring on sockets and files of this machine.

use super::*;
use crate::buf::{Buf, BufMut};
use crate::{File, Listener, Reactor, Stream, cross, sleep, spawn, yield_now};

/// Files, sockets, timers and wake-ups, waiting and not.
async fn exercise() {
    let path = std::env::temp_dir().join(format!("forebay-uring-{}-{}", std::process::id(), crate::random()));
    let file = File::open(&path, OpenOptions::read_write().create_new().direct()).expect("opens");
    std::fs::remove_file(&path).expect("removes");
    let busy = spawn(async {
        loop {
            yield_now().await;
        }
    });
    for busy in [Some(busy), None] {
        let writes: Vec<_> = (0..600u64)
            .map(|at| {
                let file = file.clone();
                spawn(async move { file.write_at(BufMut::zeroed(4096), 4096 * at).await })
            })
            .collect();
        for write in writes {
            write.await.expect("writes");
        }
        file.sync_data().await.expect("syncs");
        let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("listens");
        let addr = listener.local_addr().clone();
        let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
        let (server, _) = listener.accept().await.expect("accepts");
        let client = client.await;
        for _ in 0..100 {
            client.send(Buf::copy_of(b"ping")).await.expect("sends");
            server.recv_exact(BufMut::with_capacity(4)).await.0.expect("receives");
        }
        let waiting = server.recv(BufMut::with_capacity(4));
        assert!(crate::timeout(Duration::from_millis(1), waiting).await.is_err());
        let (answer, answered) = cross::oneshot();
        let thread = std::thread::spawn(move || answer.send(7));
        assert_eq!(answered.await, Some(7));
        thread.join().expect("the thread ends");
        sleep(Duration::from_millis(1)).await;
        // In the second round there is nothing else to do, so the driver waits.
        if let Some(busy) = busy {
            busy.abort();
        }
    }
    file.read_exact_at(0, 1 << 20).await.expect("reads");
}

/// One call a turn: what is sent ends within the call that waits for the answer.
#[test]
fn who_sends_and_waits_asks_the_kernel_once() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let mut driver = UringDriver::new().expect("a ring");
    if !driver.waits_for_several {
        return;
    }
    let fd = ours.into_raw_fd();
    driver.handles.add_socket(fd);
    let sock = os::handle_of(fd);
    let echo = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut peer, mut bytes) = (theirs, [0; 4]);
        while peer.read_exact(&mut bytes).is_ok() {
            // The other side sleeps by now, most of the time; its send has long ended.
            std::thread::sleep(Duration::from_millis(2));
            peer.write_all(&bytes).expect("an answer is sent");
        }
    });
    let mut together = 0;
    for _ in 0..20 {
        driver.submit(OpKey(0), Op::Recv { sock, buf: BufMut::with_capacity(4), all: true });
        driver.submit(OpKey(1), Op::Send { sock, bufs: Buf::copy_of(b"ping").into() });
        let (mut done, mut ended, mut polls) = (Vec::new(), 0, 0);
        while ended < 2 {
            driver.poll(Wait::Until(os::now() + Duration::from_secs(10)), &mut done);
            ended += done.drain(..).map(|end| end.result.expect("it goes well")).filter(|&len| len == 4).count();
            polls += 1;
        }
        together += u32::from(polls == 1);
    }
    assert!(together > 10, "{together} of 20 rounds with one wait");
    driver.handles.close(fd);
    drop(driver);
    echo.join().expect("it ends");
}

/// A short send that waits for room must not keep from us what has come.
#[test]
fn a_send_without_room_holds_nothing_up() {
    use std::io::Write;
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let mut driver = UringDriver::new().expect("a ring");
    ours.set_nonblocking(true).expect("set");
    // Nobody reads: the socket fills up.
    while (&ours).write(&[7; 4096]).is_ok() {}
    ours.set_nonblocking(false).expect("set");
    let fd = ours.into_raw_fd();
    driver.handles.add_socket(fd);
    let sock = os::handle_of(fd);
    theirs.write_all(b"here").expect("sent");
    driver.submit(OpKey(0), Op::Send { sock, bufs: Buf::copy_of(&[7; 4096]).into() });
    driver.submit(OpKey(1), Op::Recv { sock, buf: BufMut::with_capacity(4), all: true });
    let (mut done, begun) = (Vec::new(), os::now());
    while done.is_empty() {
        driver.poll(Wait::Until(begun + Duration::from_secs(30)), &mut done);
    }
    assert_eq!(done.pop().expect("an end").key.0, 1);
    assert!(os::now().since(begun) < Duration::from_secs(5), "it waited for the send");
    // As soon as there is room the send ends, and the next ones are not waited for.
    let reading = std::thread::spawn(move || {
        use std::io::Read;
        let mut bytes = [0; 4096];
        while theirs.read(&mut bytes).is_ok_and(|got| got > 0) {}
    });
    let mut send = |key| {
        let (mut done, mut left) = (Vec::new(), Duration::ZERO);
        while done.is_empty() {
            left += Duration::from_millis(100);
            driver.poll(Wait::Until(os::now() + left), &mut done);
        }
        assert_eq!(done.pop().expect("an end").key.0, key);
        let at_once = driver.handles.sends_at_once(fd);
        driver.submit(OpKey(2), Op::Send { sock, bufs: Buf::copy_of(b"short").into() });
        let counted = driver.sends_queued > 0;
        assert_eq!(at_once, counted);
        at_once
    };
    assert!(!send(0), "it did not end at once");
    let doubted = (0..1000).take_while(|_| !send(2)).count();
    assert!((60..1000).contains(&doubted), "{doubted} more before it is trusted again");
    drop(driver);
    reading.join().expect("it ends");
}

/// This kernel knows newer flags, but older kernels must do without them.
#[test]
fn every_way_to_set_up_works() {
    for first in 0..SET_UPS.len() {
        let driver = UringDriver::set_up(&SET_UPS[first..]).expect("a ring");
        Reactor::new(Box::new(driver)).block_on(exercise());
    }
}
