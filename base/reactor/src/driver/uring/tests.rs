//! Tests of the ring on sockets and files of this machine.

use super::*;
use crate::buf::{Buf, BufMut};
use crate::driver::OpenOptions;
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

/// Sets rings up with each set of flags: older kernels must do without the newer ones.
#[test]
fn every_way_to_set_up_works() {
    for first in 0..SET_UPS.len() {
        let driver = UringDriver::set_up(&SET_UPS[first..]).expect("a ring");
        Reactor::new(Box::new(driver)).block_on(exercise());
    }
}
