//! The simulated network: order within a connection, and everything that can befall one.

use std::io::ErrorKind;
use std::time::Duration;

use forebay_reactor::{Addr, Buf, BufMut, Listener, Stream, now, sleep, spawn, timeout};
use forebay_sim::{Faults, NetFaults, World};

fn addr() -> Addr {
    Addr::Unix("/run/s".into())
}

fn world(seed: u64, net: NetFaults) -> World {
    World::new(seed, Faults { net, ..Faults::none() })
}

fn counting(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Sends everything back, until the stream ends.
async fn echo(stream: Stream) -> std::io::Result<usize> {
    let mut total = 0;
    loop {
        let (got, buf) = stream.recv(BufMut::with_capacity(10_000)).await;
        let got = got?;
        if got == 0 {
            return Ok(total);
        }
        total += got;
        stream.send(buf).await?;
    }
}

#[test]
fn bytes_arrive_in_order_through_small_windows() {
    for seed in 0..20 {
        let net = NetFaults { segment_max: 3000, window: 5000, ..NetFaults::none() };
        let world = world(seed, net);
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let listener = Listener::bind(&addr()).expect("bound");
            let server = spawn(async move { echo(listener.accept().await.expect("accepted").0).await });
            let stream = Stream::connect(&addr()).await.expect("connected");
            let sender = stream.clone();
            let sending = spawn(async move { sender.send(Buf::copy_of(&counting(100_000))).await });
            let (result, buf) = stream.recv_exact(BufMut::with_capacity(100_000)).await;
            result.expect("all of it comes back");
            assert!(buf[..] == counting(100_000)[..]);
            sending.await.expect("sent");
            drop(stream);
            assert_eq!(server.await.expect("a clean end"), 100_000);
        });
        assert_eq!(ran, Ok(()), "seed {seed}\n{}", world.trace(50));
    }
}

#[test]
fn receives_can_be_partial_and_connections_overtake_each_other() {
    let world = world(5, NetFaults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("bound");
        let addr = listener.local_addr().clone();
        let (mut partial, mut second_first) = (0, 0);
        for _ in 0..50 {
            let (first, second) =
                (Stream::connect(&addr).await.expect("first"), Stream::connect(&addr).await.expect("second"));
            let (a, peer) = listener.accept().await.expect("accepted");
            assert!(peer.is_local());
            let (b, _) = listener.accept().await.expect("accepted");
            first.send(Buf::copy_of(&[1; 100])).await.expect("sent");
            second.send(Buf::copy_of(&[2; 100])).await.expect("sent");
            let [from_a, from_b] = [a, b].map(|stream| {
                spawn(async move {
                    let (result, _) = stream.recv(BufMut::with_capacity(100)).await;
                    (result.expect("received"), now())
                })
            });
            let (from_a, from_b) = (from_a.await, from_b.await);
            partial += usize::from(from_a.0 < 100);
            second_first += usize::from(from_b.1 < from_a.1);
        }
        assert!(partial > 5, "{partial}");
        assert!((5..45).contains(&second_first), "{second_first}");
    });
    assert_eq!(ran, Ok(()), "{}", world.trace(50));
}

#[test]
fn refused_reset_and_cut_connections() {
    let world = world(9, NetFaults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let refused = Stream::connect(&addr()).await.map(drop).expect_err("nobody listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let listener = Listener::bind(&addr()).expect("bound");
        assert_eq!(Listener::bind(&addr()).map(drop).expect_err("twice").kind(), ErrorKind::AddrInUse);

        let client = Stream::connect(&addr()).await.expect("connected");
        let (server, _) = listener.accept().await.expect("accepted");
        let receiving = spawn(async move { client.recv(BufMut::with_capacity(10)).await.0.map_err(|e| e.kind()) });
        sleep(Duration::from_millis(1)).await;
        assert_eq!(world.reset_connections(Some(&addr()), 1_000_000), 1);
        assert_eq!(receiving.await, Err(ErrorKind::ConnectionReset));
        assert_eq!(
            server.send(Buf::copy_of(b"x")).await.expect_err("reset for both").kind(),
            ErrorKind::ConnectionReset
        );

        let client = Stream::connect(&addr()).await.expect("connected");
        let (server, _) = listener.accept().await.expect("accepted");
        assert_eq!(world.cut_connections(None, 1_000_000), 1);
        client.send(Buf::copy_of(b"x")).await.expect("it looks sent");
        drop(client);
        timeout(Duration::from_secs(100), server.recv(BufMut::with_capacity(1))).await.expect_err("silence");
        let big = server.send(Buf::zeroed(10 << 20));
        timeout(Duration::from_secs(100), big).await.expect_err("the window fills and stays full");

        let client = Stream::connect(&addr()).await.expect("connected");
        let (server, _) = listener.accept().await.expect("accepted");
        let waiting = {
            let client = client.clone();
            spawn(async move { client.recv(BufMut::with_capacity(1)).await.0.map_err(|error| error.kind()) })
        };
        sleep(Duration::from_millis(1)).await;
        client.shutdown();
        assert_eq!(waiting.await, Ok(0));
        let (ended, _) = server.recv(BufMut::with_capacity(1)).await;
        assert_eq!(ended.expect("a clean end"), 0);
        assert_eq!(client.send(Buf::copy_of(b"x")).await.expect_err("shut").kind(), ErrorKind::BrokenPipe);
    });
    assert_eq!(ran, Ok(()), "{}", world.trace(50));
}

#[test]
fn random_faults_strike() {
    let mut seen = [0; 4];
    for seed in 0..200 {
        let net = NetFaults {
            refuse_ppm: 200_000,
            reset_ppm: 50_000,
            cut_ppm: 50_000,
            stall_ppm: 50_000,
            segment_max: 1000,
            ..NetFaults::none()
        };
        let world = world(seed, net);
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let listener = Listener::bind(&addr()).expect("bound");
            spawn(async move { echo(listener.accept().await.expect("accepted").0).await });
            let Ok(stream) = Stream::connect(&addr()).await else { return 0 };
            if stream.send(Buf::copy_of(&counting(5000))).await.is_err() {
                return 1;
            }
            match timeout(Duration::from_secs(10), stream.recv_exact(BufMut::with_capacity(5000))).await {
                Err(_) => 2,
                Ok((Err(_), _)) => 1,
                Ok((Ok(()), buf)) => {
                    assert!(buf[..] == counting(5000)[..]);
                    3
                }
            }
        });
        seen[ran.expect("no deadlock")] += 1;
    }
    assert!(seen.iter().all(|&count| count > 10), "{seen:?}");
}
