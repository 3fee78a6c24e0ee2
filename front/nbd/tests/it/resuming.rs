//! Tests of connections whose client sends requests without a reply again, on real Unix sockets.

use std::io::{Read, Write};
use std::time::Duration;

use crate::common::world::{addr, simulate};
use crate::common::*;
use forebay_block::ErrorKind;
use forebay_nbd::kernel::handshake::{ClientHandshake, HandshakeStep};
use forebay_nbd::{NbdListenerOptions, NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Addr, DriverChoice, Listener, Reactor, sleep, spawn};

/// A client of the kernel's kind, that shuts a connection down with a write in it which the server has not received.
fn abandoned_write_is_carried_out(resumes: bool) -> bool {
    let dir = std::env::temp_dir().join(format!("forebay-nbd-{}-{resumes}", std::process::id()));
    let path = dir.join("socket");
    std::fs::create_dir_all(&dir).expect("a directory");
    let written = Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let model = Model::new(1 << 20);
        let exports = TestExports::with("disk", &model);
        let server = NbdServer::new(exports, NbdServerOptions::default(), NbdStats::new());
        let listener = Listener::bind(&Addr::Unix(path.clone())).expect("binds");
        drop(spawn(server.clone().serve(listener, NbdListenerOptions { tls: Tls::None, resumes })));
        let client = std::thread::spawn(move || {
            let mut socket = std::os::unix::net::UnixStream::connect(&path).expect("connects");
            let mut handshake = ClientHandshake::new("disk");
            loop {
                match handshake.step().expect("a step") {
                    HandshakeStep::Send(bytes) => socket.write_all(&bytes).expect("sent"),
                    HandshakeStep::Receive(len) => {
                        let mut buf = vec![0; len];
                        socket.read_exact(&mut buf).expect("received");
                        handshake.received(&buf).expect("as expected");
                    }
                    HandshakeStep::Done(_) => return socket,
                }
            }
        });
        while !client.is_finished() {
            sleep(Duration::from_micros(100)).await;
        }
        let mut socket = client.join().expect("negotiated");
        let write = |cookie: u64, offset: u64| {
            let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
            bytes.extend([0, 0, 0, 1]);
            bytes.extend(cookie.to_be_bytes());
            bytes.extend(offset.to_be_bytes());
            bytes.extend(4_u32.to_be_bytes());
            bytes.extend(b"data");
            bytes
        };
        socket.write_all(&write(1, 0)).expect("sent");
        while model.asked().is_empty() {
            sleep(Duration::from_micros(100)).await;
        }
        // On the reactor's own thread, so that the server sees both at once.
        socket.write_all(&write(2, 4096)).expect("sent");
        socket.shutdown(std::net::Shutdown::Both).expect("shut down");
        while server.connections() > 0 {
            sleep(Duration::from_micros(100)).await;
        }
        assert_eq!(&model.bytes.borrow()[..4], b"data", "the first was begun before");
        let written = &model.bytes.borrow()[4096..4100] == b"data";
        server.stop().await;
        written
    });
    std::fs::remove_dir_all(dir).expect("removed");
    written
}

#[test]
fn a_write_of_a_connection_that_a_client_which_resumes_has_given_up_is_not_carried_out() {
    assert!(!abandoned_write_is_carried_out(true), "the client has sent it again, and may have sent later ones");
    assert!(abandoned_write_is_carried_out(false), "others may send their last write without waiting for the reply");
}

#[test]
fn a_request_whose_path_is_given_up_gets_no_answer() {
    simulate(|| async {
        let model = Model::new(1 << 20);
        let server = NbdServer::new(TestExports::with("disk", &model), NbdServerOptions::default(), NbdStats::new());
        let listener = Listener::bind(&addr()).expect("binds");
        drop(spawn(server.clone().serve(listener, NbdListenerOptions::from(Tls::None))));
        let (mut client, _) = Client::open(&addr(), "disk", Style::Simple).await;
        // A connection that goes on is told of the error.
        model.fail(&[ErrorKind::Fenced]);
        assert_eq!(client.ask(0, 0, 0, 4, &[]).await.error, 108);
        model.held.set(true);
        model.fail(&[ErrorKind::Fenced]);
        client.request(1, 1, 0, 0, 4, b"data").await;
        while model.in_flight.get() == 0 {
            sleep(Duration::from_micros(100)).await;
        }
        let detaching = spawn({
            let server = server.clone();
            async move { server.detach("disk").await }
        });
        sleep(Duration::from_millis(1)).await;
        model.release();
        assert_eq!(client.answer().await, None, "the client sends it again");
        assert_eq!(detaching.await, 1);
        assert_eq!((server.connections(), model.in_flight.get()), (0, 0));
        server.stop().await;
    });
}
