//! Tests of sockets on both drivers.

use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::rc::Rc;
use std::time::Duration;

use crate::common::TempDir;
use forebay_reactor::{Addr, Buf, BufList, BufMut, Listener, Stream, sleep, spawn, timeout, yield_now};

crate::on_each_driver!(
    bytes_go_both_ways,
    long_sends_and_exact_receives,
    the_end_of_a_stream,
    a_closed_peer_is_known_before_its_last_bytes_are_received,
    a_receive_is_cancelled_and_the_stream_lives,
    an_accept_is_cancelled_and_the_listener_lives,
    connections_that_nobody_takes_are_closed,
    shutdown_ends_a_waiting_receive,
    a_peer_that_sends_still_is_not_reset,
    a_peer_that_stays_is_left,
    stale_socket_files_are_replaced,
    private_sockets_are_for_their_owner,
    listeners_that_go_are_waited_for,
    refused_connections,
    a_listener_closed_under_its_accept,
    a_slow_reader_does_not_lose_a_byte,
    descriptors_are_passed_over_unix_sockets,
);

fn tcp() -> Addr {
    "127.0.0.1:0".parse().expect("an address")
}

fn addresses(dir: &TempDir) -> [Addr; 2] {
    [tcp(), Addr::Unix(dir.join("s"))]
}

async fn pair() -> (Stream, Stream) {
    let listener = Listener::bind(&tcp()).expect("listens");
    let addr = listener.local_addr().clone();
    let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
    let (server, _) = listener.accept().await.expect("accepts");
    (client.await, server)
}

async fn bytes_go_both_ways() {
    let dir = TempDir::new();
    for addr in addresses(&dir) {
        let listener = Listener::bind(&addr).expect("listens");
        let server = spawn({
            let listener = Rc::new(listener);
            let addr = listener.local_addr().clone();
            let client = spawn(async move {
                let stream = Stream::connect(&addr).await.expect("connects");
                stream.send(Buf::copy_of(b"ping")).await.expect("sends");
                let (result, buf) = stream.recv_exact(BufMut::with_capacity(4)).await;
                result.expect("receives");
                assert_eq!(&buf[..], b"pong");
            });
            async move {
                let (stream, peer) = listener.accept().await.expect("accepts");
                assert!(peer.is_local());
                let (result, buf) = stream.recv(BufMut::with_capacity(100)).await;
                assert_eq!((result.expect("receives"), &buf[..]), (4, &b"ping"[..]));
                stream.send(BufList::from_iter([Buf::copy_of(b"po"), Buf::copy_of(b"ng")])).await.expect("sends");
                client.await;
            }
        });
        server.await;
    }
}

async fn long_sends_and_exact_receives() {
    const LEN: usize = 12 << 20;
    let (client, server) = pair().await;
    let mut data = BufMut::zeroed(LEN);
    data.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let data = data.freeze();
    // Three shapes: one buffer, a few parts, and more parts than one system call takes.
    for part in [LEN, LEN / 7, 4096] {
        let list: BufList = (0..LEN.div_ceil(part)).map(|at| data.slice(at * part..LEN.min((at + 1) * part))).collect();
        let sending = spawn({
            let client = client.clone();
            async move { client.send(list).await }
        });
        let (result, got) = server.recv_exact(BufMut::with_capacity(LEN)).await;
        result.expect("receives");
        sending.await.expect("sends");
        assert!(got[..] == data[..]);
    }
}

async fn the_end_of_a_stream() {
    let (client, server) = pair().await;
    client.send(Buf::copy_of(b"abc")).await.expect("sends");
    drop(client);
    let (result, buf) = server.recv_exact(BufMut::with_capacity(10)).await;
    assert_eq!(result.expect_err("ends").kind(), std::io::ErrorKind::UnexpectedEof);
    assert_eq!(&buf[..], b"abc");
    assert_eq!(server.recv(buf).await.0.expect("receives"), 0);
}

async fn a_closed_peer_is_known_before_its_last_bytes_are_received() {
    let dir = TempDir::new();
    for addr in addresses(&dir) {
        let listener = Listener::bind(&addr).expect("binds");
        let client = Stream::connect(listener.local_addr()).await.expect("connects");
        let (server, _) = listener.accept().await.expect("accepts");
        client.send(Buf::copy_of(b"last")).await.expect("sent");
        assert!(!server.is_peer_closed());
        client.shutdown();
        if !server.is_unix() {
            // Its last segment is on its way.
            while !server.is_peer_closed() {
                yield_now().await;
            }
        }
        assert!(server.is_peer_closed());
        let (result, _) = server.recv(BufMut::with_capacity(16)).await;
        assert_eq!(result.expect("received"), 4);
        assert!(server.is_peer_closed());
    }
}

async fn a_receive_is_cancelled_and_the_stream_lives() {
    let (client, server) = pair().await;
    for _ in 0..10 {
        let waiting = timeout(Duration::from_millis(1), server.recv(BufMut::with_capacity(10)));
        assert!(waiting.await.is_err(), "nothing was sent");
    }
    // Cancelled receives must end before the next one takes bytes.
    let (result, _) = {
        client.send(Buf::copy_of(b"late")).await.expect("sends");
        server.recv_exact(BufMut::with_capacity(4)).await
    };
    result.expect("receives");
}

async fn an_accept_is_cancelled_and_the_listener_lives() {
    let listener = Listener::bind(&tcp()).expect("listens");
    for _ in 0..10 {
        assert!(timeout(Duration::from_millis(1), listener.accept()).await.is_err());
    }
    let addr = listener.local_addr().clone();
    let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
    listener.accept().await.expect("accepts");
    client.await;
}

async fn connections_that_nobody_takes_are_closed() {
    let listener = Rc::new(Listener::bind(&tcp()).expect("listens"));
    let addr = listener.local_addr().clone();
    let accepting = spawn({
        let listener = listener.clone();
        async move { listener.accept().await.map(drop) }
    });
    yield_now().await;
    let client = Stream::connect(&addr).await.expect("connects");
    // Whether or not the accept had completed when it was cancelled, a connection that it accepted is closed.
    let taken = accepting.cancel().await.is_some();
    if !taken {
        let accepted = timeout(Duration::from_millis(20), listener.accept()).await;
        if let Ok(accepted) = accepted {
            drop(accepted.expect("accepts"));
        }
    }
    assert_eq!(client.recv(BufMut::with_capacity(1)).await.0.expect("the other side is closed"), 0);
}

async fn shutdown_ends_a_waiting_receive() {
    let (client, server) = pair().await;
    let waiting = spawn({
        let server = server.clone();
        async move { server.recv(BufMut::with_capacity(10)).await.0 }
    });
    yield_now().await;
    server.shutdown();
    assert_eq!(waiting.await.expect("ends"), 0);
    assert_eq!(client.recv(BufMut::with_capacity(10)).await.0.expect("ends"), 0);
    assert!(server.send(Buf::copy_of(b"x")).await.is_err());
}

async fn a_peer_that_sends_still_is_not_reset() {
    let (client, server) = pair().await;
    // Cancelled as the receive of a connection that is ended.
    assert!(timeout(Duration::from_millis(1), server.recv(BufMut::with_capacity(10))).await.is_err());
    let closing = spawn(async move { server.close_gracefully(Duration::from_secs(60)).await });
    assert_eq!(client.recv(BufMut::with_capacity(10)).await.0.expect("the end, and no reset"), 0);
    // More than the buffers of both sockets hold: it is received.
    for _ in 0..256 {
        client.send(Buf::copy_of(&[7; 64 << 10])).await.expect("it is not reset");
    }
    assert!(!closing.is_finished());
    drop(client);
    assert!(closing.await, "the peer has closed");
}

async fn a_peer_that_stays_is_left() {
    let (client, server) = pair().await;
    assert!(!server.close_gracefully(Duration::from_millis(1)).await);
    assert_eq!(client.recv(BufMut::with_capacity(10)).await.0.expect("ends"), 0);
}

async fn private_sockets_are_for_their_owner() {
    let dir = TempDir::new();
    let path = dir.join("s");
    // Also in place of one that was not.
    for _ in 0..2 {
        let listener = Listener::bind_private(&Addr::Unix(path.clone())).expect("listens");
        let mode = std::fs::metadata(&path).expect("a socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(listener);
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(&path, open).expect("changed");
    }
}

async fn stale_socket_files_are_replaced() {
    let dir = TempDir::new();
    let addr = Addr::Unix(dir.join("s"));
    let live = Listener::bind(&addr).expect("listens");
    let error = Listener::bind(&addr).err().expect("somebody listens there");
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    drop(live);
    assert!(dir.join("s").exists());
    Listener::bind(&addr).expect("replaces what a dead listener left");
    // A path that is not a socket is left alone.
    std::fs::write(dir.join("file"), b"precious").expect("writes");
    assert!(Listener::bind(&Addr::Unix(dir.join("file"))).is_err());
    assert_eq!(std::fs::read(dir.join("file")).expect("reads"), b"precious");
}

/// Checks that waiting for a closing listener yields the reactor: otherwise the listener would never close.
async fn listeners_that_go_are_waited_for() {
    let dir = TempDir::new();
    let addr = Addr::Unix(dir.join("s"));
    let live = Listener::bind(&addr).expect("listens");
    let waiting = spawn(async move {
        Listener::settle(&addr).await;
        Listener::bind(&addr).map(drop)
    });
    for _ in 0..10 {
        yield_now().await;
    }
    drop(live);
    waiting.await.expect("it is replaced as soon as it is gone");
}

async fn refused_connections() {
    let dir = TempDir::new();
    let listener = Listener::bind(&tcp()).expect("listens");
    let addr = listener.local_addr().clone();
    drop(listener);
    let error = Stream::connect(&addr).await.err().expect("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    let error = Stream::connect(&Addr::Unix(dir.join("none"))).await.err().expect("not there");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let long = Addr::Unix(dir.join("x".repeat(200)));
    assert_eq!(Stream::connect(&long).await.err().expect("too long").kind(), std::io::ErrorKind::InvalidInput);
}

async fn a_listener_closed_under_its_accept() {
    for _ in 0..20 {
        let listener = Listener::bind(&tcp()).expect("listens");
        let addr = listener.local_addr().clone();
        let accepting = spawn(async move { listener.accept().await.map(drop) });
        yield_now().await;
        assert!(accepting.cancel().await.is_none());
        // The port is free as soon as the operation has ended; until then connecting may still succeed.
        while Stream::connect(&addr).await.is_ok() {
            yield_now().await;
        }
    }
}

async fn a_slow_reader_does_not_lose_a_byte() {
    const COUNT: u32 = 100_000;
    let (client, server) = pair().await;
    let sent = Rc::new(Cell::new(false));
    let sending = spawn({
        let sent = sent.clone();
        async move {
            let mut at = 0;
            while at < COUNT {
                let end = COUNT.min(at + 5000);
                let bytes: Vec<u8> = (at..end).flat_map(|number| number.to_be_bytes()).collect();
                client.send(Buf::copy_of(&bytes)).await.expect("sends");
                at = end;
            }
            sent.set(true);
        }
    });
    let mut expect = 0;
    let mut buf = BufMut::with_capacity(1 << 16);
    let mut held = Vec::new();
    loop {
        let (result, back) = server.recv(buf).await;
        if result.expect("receives") == 0 {
            break;
        }
        held.extend_from_slice(&back);
        let whole = held.len() / 4 * 4;
        for number in held[..whole].chunks_exact(4) {
            assert_eq!(u32::from_be_bytes(number.try_into().expect("four bytes")), expect);
            expect += 1;
        }
        held.drain(..whole);
        buf = back;
        buf.clear();
        if expect % 7 == 0 {
            sleep(Duration::from_micros(50)).await;
        }
    }
    sending.await;
    assert!(sent.get());
    assert_eq!(expect, COUNT);
}

async fn descriptors_are_passed_over_unix_sockets() {
    let dir = TempDir::new();
    let addr = Addr::Unix(dir.join("s"));
    let listener = Listener::bind(&addr).expect("listens");
    let client = spawn(async move {
        let stream = Stream::connect(&addr).await.expect("connects");
        let fd = stream.recv_fd().await.expect("a descriptor");
        let none = stream.recv_fd().await.expect_err("a byte alone");
        let ended = stream.recv_fd().await.expect_err("the end");
        (fd, none.kind(), ended.kind())
    });
    let (server, _) = listener.accept().await.expect("accepts");
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    server.send_fd(std::os::fd::AsFd::as_fd(&writer)).expect("sends");
    server.send(Buf::copy_of(b"x")).await.expect("sends");
    server.shutdown();
    let (fd, none, ended) = client.await;
    assert_eq!((none, ended), (std::io::ErrorKind::InvalidData, std::io::ErrorKind::UnexpectedEof));
    drop(writer);
    // The passed descriptor is the same pipe: it ends only when this one is closed too.
    let mut passed = std::fs::File::from(fd);
    std::io::Write::write_all(&mut passed, b"through").expect("writes");
    drop(passed);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut reader, &mut text).expect("reads");
    assert_eq!(text, "through");
}
