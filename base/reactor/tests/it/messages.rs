//! Tests of messages with descriptors on both drivers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::pin::pin;

use crate::common::TempDir;
use crate::steps::{poll_once, turn_round};
use forebay_reactor::net::DESCRIPTORS_MAX;
use forebay_reactor::{Addr, Buf, BufMut, Listener, Stream, spawn};

crate::on_each_driver!(
    descriptors_come_with_their_bytes,
    most_descriptors_fit,
    too_many_descriptors_are_an_error,
    bytes_arrive_one_by_one,
    descriptors_end_a_receive,
    a_dropped_receive_loses_nothing,
    a_dropped_receive_and_a_plain_one,
    a_long_message_waits_for_its_reader,
    a_dropped_send_does_not_hang,
    a_peer_that_closes_ends_both,
    a_shutdown_ends_a_waiting_receive,
    accepted_connections_pass_messages,
    only_connected_unix_streams_are_adopted,
    the_process_of_a_unix_peer_is_known,
    refused_messages,
);

fn pair() -> (Stream, Stream) {
    let (one, other) = UnixStream::pair().expect("a pair");
    (Stream::adopt_unix(one.into()).expect("adopted"), Stream::adopt_unix(other.into()).expect("adopted"))
}

/// Returns the adopted end, and the other as the system's socket.
fn half() -> (Stream, UnixStream) {
    let (one, other) = UnixStream::pair().expect("a pair");
    (Stream::adopt_unix(one.into()).expect("adopted"), other)
}

fn pipe() -> (File, OwnedFd) {
    let (reader, writer) = io::pipe().expect("a pipe");
    (File::from(OwnedFd::from(reader)), writer.into())
}

/// Returns whether a descriptor is the only writer of a pipe, by closing it.
fn is_last_writer(mut reader: File, writer: OwnedFd) -> bool {
    File::from(writer).write_all(b"through").expect("written");
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("read to the end");
    text == "through"
}

/// Sends more descriptors in one message than a [`Stream`] would.
fn send_raw(socket: &UnixStream, descriptors: &[RawFd]) {
    let mut byte = 7u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = [0u64; 256];
    let len = size_of_val(descriptors) as u32;
    // SAFETY: the control space is long enough for a header and the descriptors, and everything lives through the call.
    let sent = unsafe {
        assert!(libc::CMSG_SPACE(len) as usize <= size_of_val(&control));
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(len) as _;
        let head = libc::CMSG_FIRSTHDR(&message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(len) as _;
        let to = libc::CMSG_DATA(head).cast::<RawFd>();
        std::ptr::copy_nonoverlapping(descriptors.as_ptr(), to, descriptors.len());
        libc::sendmsg(socket.as_raw_fd(), &message, 0)
    };
    assert_eq!(sent, 1, "{}", io::Error::last_os_error());
}

async fn descriptors_come_with_their_bytes() {
    let (one, other) = pair();
    assert!(one.is_unix());
    let (reader, writer) = pipe();
    one.send_message(Buf::copy_of(b"take this"), vec![writer]).await.expect("sent");
    one.send_message(Buf::copy_of(b"no more"), vec![]).await.expect("sent");
    let (result, buf) = other.recv_message(BufMut::with_capacity(100)).await;
    let (got, mut descriptors) = result.expect("received");
    assert_eq!((got, &buf[..], descriptors.len()), (9, &b"take this"[..], 1));
    let passed = descriptors.remove(0);
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::fcntl(passed.as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
    assert!(is_last_writer(reader, passed));
    let (result, buf) = other.recv_message(buf).await;
    let (got, descriptors) = result.expect("received");
    assert_eq!((got, &buf[..], descriptors.len()), (7, &b"take thisno more"[..], 0));
}

async fn most_descriptors_fit() {
    let (one, other) = pair();
    let pipes: Vec<_> = (0..DESCRIPTORS_MAX).map(|_| pipe()).collect();
    let (readers, writers): (Vec<_>, Vec<_>) = pipes.into_iter().unzip();
    one.send_message(Buf::copy_of(b"x"), writers).await.expect("sent");
    let (_, descriptors) = other.recv_message(BufMut::with_capacity(8)).await.0.expect("received");
    assert_eq!(descriptors.len(), DESCRIPTORS_MAX);
    for (reader, writer) in readers.into_iter().zip(descriptors) {
        assert!(is_last_writer(reader, writer));
    }
}

async fn too_many_descriptors_are_an_error() {
    let (stream, peer) = half();
    let (mut reader, writer) = pipe();
    send_raw(&peer, &[writer.as_raw_fd(); DESCRIPTORS_MAX + 1]);
    drop(writer);
    let (result, buf) = stream.recv_message(BufMut::with_capacity(8)).await;
    let error = result.expect_err("one too many");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    assert!(error.to_string().contains("more than 32"), "{error}");
    assert!(buf.is_empty());
    // All of them are closed.
    assert_eq!(reader.read(&mut [0; 8]).expect("the end"), 0);
}

async fn bytes_arrive_one_by_one() {
    let (stream, mut peer) = half();
    let mut buf = BufMut::with_capacity(100);
    for (at, byte) in b"one by one".iter().enumerate() {
        let mut receiving = pin!(stream.recv_message(buf));
        assert!(poll_once(receiving.as_mut()).await.is_none(), "nothing was sent");
        peer.write_all(&[*byte]).expect("written");
        let (result, got) = receiving.await;
        assert_eq!(result.expect("received").0, 1);
        assert_eq!(got.len(), at + 1);
        buf = got;
    }
    assert_eq!(&buf[..], b"one by one");
    // Limited buffers take a message in parts, and its descriptors come with the first.
    let (reader, writer) = pipe();
    send_raw(&peer, &[writer.as_raw_fd()]);
    peer.write_all(b"abc").expect("written");
    drop(writer);
    let (_, descriptors) = stream.recv_message(BufMut::with_capacity(1)).await.0.expect("received");
    assert!(is_last_writer(reader, descriptors.into_iter().next().expect("one")));
    let (result, rest) = stream.recv_message(BufMut::with_capacity(2).limited(2)).await;
    assert_eq!((result.expect("received").0, &rest[..]), (2, &b"ab"[..]));
}

async fn descriptors_end_a_receive() {
    let (stream, mut peer) = half();
    let (_reader, writer) = pipe();
    peer.write_all(b"before").expect("written");
    send_raw(&peer, &[writer.as_raw_fd()]);
    send_raw(&peer, &[writer.as_raw_fd(), writer.as_raw_fd()]);
    peer.write_all(b"after").expect("written");
    let (mut bytes, mut counts) = (Vec::new(), Vec::new());
    while bytes.len() < 6 + 1 + 1 + 5 {
        let (result, buf) = stream.recv_message(BufMut::with_capacity(100)).await;
        counts.push((bytes.len() + result.as_ref().expect("received").0, result.expect("received").1.len()));
        bytes.extend_from_slice(&buf);
    }
    assert_eq!(&bytes, b"before\x07\x07after");
    counts.retain(|&(_, count)| count > 0);
    assert_eq!(counts, [(7, 1), (8, 2)], "each ends with the byte that it belongs to");
}

async fn a_dropped_receive_loses_nothing() {
    let (stream, mut peer) = half();
    for round in 0..10 {
        {
            let mut receiving = pin!(stream.recv_message(BufMut::with_capacity(100)));
            assert!(poll_once(receiving.as_mut()).await.is_none());
            if round % 2 == 0 {
                turn_round().await;
            }
            let (_, writer) = pipe();
            send_raw(&peer, &[writer.as_raw_fd()]);
            if round % 3 == 0 {
                // It is complete, and was not polled.
                turn_round().await;
            }
        }
        let (result, buf) = stream.recv_message(BufMut::with_capacity(100)).await;
        let (got, descriptors) = result.expect("received");
        assert_eq!((got, &buf[..], descriptors.len()), (1, &b"\x07"[..], 1));
    }
    peer.write_all(b"x").expect("written");
    assert_eq!(stream.recv_message(BufMut::with_capacity(1)).await.0.expect("received").0, 1);
}

async fn a_dropped_receive_and_a_plain_one() {
    let (stream, mut peer) = half();
    {
        let mut receiving = pin!(stream.recv_message(BufMut::with_capacity(100)));
        assert!(poll_once(receiving.as_mut()).await.is_none());
        turn_round().await;
    }
    let plain = spawn({
        let stream = stream.clone();
        async move { stream.recv_exact(BufMut::with_capacity(5)).await }
    });
    turn_round().await;
    peer.write_all(b"plain").expect("written");
    let (result, buf) = plain.await;
    result.expect("received");
    assert_eq!(&buf[..], b"plain");
    stream.send(Buf::copy_of(b"answer")).await.expect("sent");
    let mut answer = [0; 6];
    peer.read_exact(&mut answer).expect("read");
    assert_eq!(&answer, b"answer");
}

async fn a_long_message_waits_for_its_reader() {
    const LEN: usize = 8 << 20;
    let (one, other) = pair();
    let mut data = BufMut::zeroed(LEN);
    data.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    let data = data.freeze();
    let (reader, writer) = pipe();
    let sending = spawn({
        let data = data.clone();
        async move { one.send_message(data, vec![writer]).await }
    });
    turn_round().await;
    assert!(!sending.is_finished(), "no socket holds that much");
    let mut buf = BufMut::with_capacity(LEN);
    let mut passed = Vec::new();
    while buf.len() < LEN {
        let (result, got) = other.recv_message(buf).await;
        let (len, descriptors) = result.expect("received");
        assert!(len > 0);
        passed.extend(descriptors);
        buf = got;
    }
    sending.await.expect("sent");
    assert!(buf[..] == data[..]);
    assert_eq!(passed.len(), 1, "descriptors are sent once");
    assert!(is_last_writer(reader, passed.remove(0)));
}

async fn a_dropped_send_does_not_hang() {
    let (one, other) = pair();
    {
        let mut sending = pin!(one.send_message(Buf::zeroed(8 << 20), vec![]));
        assert!(poll_once(sending.as_mut()).await.is_none());
        turn_round().await;
        assert!(poll_once(sending.as_mut()).await.is_none());
    }
    drop(one);
    let mut buf = BufMut::with_capacity(1 << 16);
    loop {
        let (result, got) = other.recv_message(buf).await;
        if result.expect("received").0 == 0 {
            break;
        }
        buf = got;
        buf.clear();
    }
}

async fn a_peer_that_closes_ends_both() {
    let (stream, peer) = half();
    let receiving = spawn({
        let stream = stream.clone();
        async move { stream.recv_message(BufMut::with_capacity(10)).await }
    });
    turn_round().await;
    drop(peer);
    assert_eq!(receiving.await.0.expect("the end").0, 0);
    assert_eq!(stream.recv_message(BufMut::with_capacity(10)).await.0.expect("the end").0, 0);
    let error = stream.send_message(Buf::copy_of(b"x"), vec![]).await.expect_err("closed");
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    // While a send waits.
    let (stream, peer) = half();
    let sending = spawn(async move { stream.send_message(Buf::zeroed(8 << 20), vec![]).await });
    turn_round().await;
    drop(peer);
    let kind = sending.await.expect_err("closed").kind();
    assert!(matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{kind}");
}

async fn a_shutdown_ends_a_waiting_receive() {
    let (one, _other) = pair();
    let receiving = spawn({
        let one = one.clone();
        async move { one.recv_message(BufMut::with_capacity(10)).await }
    });
    turn_round().await;
    one.shutdown();
    assert_eq!(receiving.await.0.expect("the end").0, 0);
}

async fn accepted_connections_pass_messages() {
    let dir = TempDir::new();
    let addr = Addr::Unix(dir.join("s"));
    let listener = Listener::bind(&addr).expect("listens");
    let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
    let (server, _) = listener.accept().await.expect("accepts");
    let client = client.await;
    let (reader, writer) = pipe();
    let receiving = spawn(async move { server.recv_message(BufMut::with_capacity(10)).await });
    turn_round().await;
    client.send_message(Buf::copy_of(b"hello"), vec![writer]).await.expect("sent");
    let (result, buf) = receiving.await;
    let (got, descriptors) = result.expect("received");
    assert_eq!((got, &buf[..]), (5, &b"hello"[..]));
    assert!(is_last_writer(reader, descriptors.into_iter().next().expect("one")));
}

async fn only_connected_unix_streams_are_adopted() {
    let dir = TempDir::new();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("listens");
    let wrong: [(OwnedFd, &str); 4] = [
        (File::open("/dev/null").expect("opened").into(), "no socket"),
        (tcp.into(), "no Unix socket"),
        (UnixDatagram::pair().expect("a pair").0.into(), "no stream socket"),
        (UnixListener::bind(dir.join("s")).expect("listens").into(), "a socket without a peer"),
    ];
    for (descriptor, text) in wrong {
        let error = Stream::adopt_unix(descriptor).err().expect("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().ends_with(text), "{error}");
    }
}

async fn refused_messages() {
    let (one, _other) = pair();
    let null = File::open("/dev/null").expect("opened");
    let many = (0..=DESCRIPTORS_MAX).map(|_| null.as_fd().try_clone_to_owned().expect("cloned")).collect();
    let error = one.send_message(Buf::copy_of(b"x"), many).await.expect_err("too many");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    let error = one.send_message(Buf::zeroed(0), vec![null.into()]).await.expect_err("no bytes");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    one.send_message(Buf::zeroed(0), vec![]).await.expect("nothing to send");
    let error = one.recv_message(BufMut::with_capacity(0)).await.0.expect_err("no space");
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

async fn the_process_of_a_unix_peer_is_known() {
    let (one, _other) = pair();
    assert_eq!(one.peer_process(), Some(std::process::id()));
    let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("bound");
    let stream = Stream::connect(listener.local_addr()).await.expect("connected");
    assert_eq!(stream.peer_process(), None);
}
