//! Both ends of connections over RDMA in one process: what must hold of streams, windows and messengers.  For a machine
//! with a device, as the lab's guest has; `messenger-rdma IP` prints a line for each check.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::wire::control::mode;
use forebay_messenger::{
    Address, Auth, Connection, DisconnectReason, Handler, Keyring, MemoryWindow, Message, Messenger, MessengerCore,
    MessengerOptions, Policy, SharedKey, WindowDescriptor,
};
use forebay_reactor::pmem::{PersistentMemory, PmemFile, PmemOptions};
use forebay_reactor::rdma::{self, RdmaListener, RdmaStream};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, BufList, BufMut, BufPool, DriverChoice, Reactor, sleep, spawn, timeout};

const LOOK: Duration = Duration::from_micros(50);
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ip: IpAddr = std::env::args().nth(1).ok_or("messenger-rdma IP")?.parse()?;
    for (driver, name) in [(DriverChoice::Uring, "io_uring"), (DriverChoice::Poll, "epoll")] {
        let reactor = match Reactor::system(driver) {
            Ok(reactor) => reactor,
            Err(error) => {
                println!("# {name} is unavailable: {error}");
                continue;
            }
        };
        reactor.block_on(async {
            for look in [LOOK, Duration::ZERO] {
                let what = if look.is_zero() { "asleep" } else { "looking" };
                streams(ip, look).await?;
                println!("ok messenger-rdma: streams, {name}, {what}");
            }
            windows(ip).await?;
            println!("ok messenger-rdma: windows, {name}");
            mapped(ip).await?;
            println!("ok messenger-rdma: a window onto a mapped file, {name}");
            forgeries(ip).await?;
            println!("ok messenger-rdma: forged places, {name}");
            stale_keys(ip).await?;
            println!("ok messenger-rdma: keys end with their connection, {name}");
            ends(ip).await?;
            println!("ok messenger-rdma: ends are noticed, {name}");
            late_listener(ip).await?;
            println!("ok messenger-rdma: a peer that listens late, {name}");
            for secure in [false, true] {
                messages(ip, secure).await?;
                println!("ok messenger-rdma: messages, {name}, {}", if secure { "secure" } else { "crc" });
                remote_writes(ip, secure).await?;
                println!("ok messenger-rdma: one-sided writes, {name}, {}", if secure { "secure" } else { "crc" });
            }
            Ok::<(), Box<dyn std::error::Error>>(())
        })?;
    }
    Ok(())
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

async fn pair(ip: IpAddr, look: Duration) -> std::io::Result<(RdmaStream, RdmaStream)> {
    let listener = RdmaListener::bind((ip, 0).into(), look)?;
    let addr = listener.local_addr();
    let client = spawn(async move { RdmaStream::connect(addr, Some(addr.ip()), look).await });
    let (server, peer) = timeout(PATIENCE, listener.accept()).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    assert_eq!(peer.ip(), ip, "who connects is named");
    Ok((client.await?, server))
}

fn byte(at: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8)) as u8
}

/// Streams runs of various lengths in one direction, from pooled and other memory, received in pieces of other lengths.
async fn streams(ip: IpAddr, look: Duration) -> Outcome {
    let (client, server) = pair(ip, look).await?;
    let lengths = [1, 16, 100, 8176, 8177, 8191, 8192, 8193, 20_000, 65_536, 300_000, 1 << 20, 3, 5_000_000, 7];
    let total: usize = lengths.iter().sum::<usize>() * 2;
    let sender = spawn(async move {
        let (pool, mut at) = (BufPool::new(1 << 20, 16), 0);
        for round in 0..2 {
            for len in lengths {
                let bytes: Vec<u8> = (at..at + len).map(byte).collect();
                at += len;
                let mut list = BufList::new();
                for part in bytes.chunks(if round == 0 { 1 << 20 } else { 10_000 }) {
                    let mut buf = if round == 0 { pool.get() } else { BufMut::with_capacity(part.len()) };
                    buf.extend_from_slice(part);
                    list.push(buf.freeze());
                }
                client.send(list).await?;
            }
        }
        client.shutdown();
        Ok::<_, std::io::Error>(client)
    });
    let (pool, mut at, mut step) = (BufPool::new(256 << 10, 4), 0, 1);
    loop {
        let room = (step * 7919) % 100_000 + 1;
        let mut buf = if step % 2 == 0 { pool.get().limited(room) } else { BufMut::with_capacity(room) };
        buf.clear();
        let all = step % 3 == 0 && total - at > room;
        step += 1;
        let (result, buf) = timeout(PATIENCE, server.recv(buf, all)).await.map_err(|_| "a receive takes too long")?;
        let got = match result {
            Ok(got) => got,
            Err(error) => {
                let sent = timeout(PATIENCE, sender).await.map(|sent| sent.map(drop));
                return Err(format!("receiving at {at} of {total}: {error}; the sender: {sent:?}").into());
            }
        };
        match got {
            0 => break,
            got => assert!(!all || got == room, "all was asked for"),
        }
        assert!(buf.iter().enumerate().all(|(index, &found)| found == byte(at + index)), "bytes at {at} differ");
        at += buf.len();
    }
    assert_eq!(at, total, "everything that was sent before the end arrived");
    drop(sender.await?);
    Ok(())
}

/// Checks one-sided writes into the peer's memory, and that they cannot pass its end.
async fn windows(ip: IpAddr) -> Outcome {
    let (client, server) = pair(ip, LOOK).await?;
    let window = server.window(1 << 20)?;
    let data: Vec<u8> = (0..700_000).map(byte).collect();
    client.write(window.place(), 4096, Buf::copy_of(&data)).await?;
    let mut found = vec![0; data.len()];
    window.read(4096, &mut found);
    assert!(found == data, "what was written is there when the write is complete");
    let past = client.write(window.place(), 1 << 20, Buf::copy_of(b"x")).await;
    assert_eq!(past.expect_err("past the end").kind(), std::io::ErrorKind::InvalidInput);
    let place = window.place();
    drop(window);
    let late =
        timeout(PATIENCE, client.write(place, 0, Buf::copy_of(b"x"))).await.map_err(|_| "a write takes too long")?;
    assert!(late.is_err(), "a window that is gone takes nothing");
    Ok(())
}

/// Checks one-sided writes into a mapped file, from an offset on, and that nothing arrives once the window is gone.
async fn mapped(ip: IpAddr) -> Outcome {
    const AT: u64 = 1 << 16;
    let path = std::env::temp_dir().join(format!("messenger-rdma-{}", std::process::id()));
    let options = PmemOptions { create: true, size: 1 << 20, force: true };
    let memory = Rc::new(PmemFile::open(&path, options)?);
    std::fs::remove_file(&path)?;
    let (client, server) = pair(ip, LOOK).await?;
    let window = server.window_onto(memory.clone(), AT, 1 << 19)?;
    let data: Vec<u8> = (0..300_000).map(byte).collect();
    let mut parts = BufList::new();
    data.chunks(7001).for_each(|part| parts.push(Buf::copy_of(part)));
    client.write(window.place(), 4096, parts).await?;
    memory.flush(AT + 4096, data.len() as u64);
    memory.fence();
    let load = || {
        let mut found = vec![0; 1 << 20];
        memory.load(0, &mut found);
        found
    };
    let found = load();
    assert!(found[AT as usize + 4096..][..data.len()] == data, "what was written is in the file");
    assert!(found[..AT as usize + 4096].iter().all(|&byte| byte == 0), "and nothing else");
    let place = window.place();
    drop(window);
    let late = timeout(PATIENCE, client.write(place, 0, Buf::copy_of(&[0xEE; 4096]))).await;
    assert!(late.map_err(|_| "a late write takes too long")?.is_err(), "a window that is gone takes nothing");
    assert!(load() == found, "and nothing has changed");
    Ok(())
}

/// Checks that forged window descriptors fail: the device rejects each, which ends the connection, and no byte changes.
async fn forgeries(ip: IpAddr) -> Outcome {
    const LEN: usize = 64 << 10;
    for forgery in ["past the end", "before the beginning", "to another window", "with a guessed key"] {
        let (client, server) = pair(ip, LOOK).await?;
        let (window, other) = (server.window(LEN)?, server.window(LEN)?);
        let (place, beside) = (window.place(), other.place());
        let page = Buf::copy_of(&[0xEE; 4096]);
        client.write(place, 0, Buf::copy_of(&[1; LEN])).await?;
        client.write(beside, 0, Buf::copy_of(&[2; LEN])).await?;
        let forged = match forgery {
            "past the end" => rdma::RemoteWindow { addr: place.addr + LEN as u64 - 2048, ..place },
            "before the beginning" => rdma::RemoteWindow { addr: place.addr - 2048, ..place },
            "to another window" => rdma::RemoteWindow { addr: beside.addr, ..place },
            _ => rdma::RemoteWindow { key: place.key ^ 0x55, ..place },
        };
        let written = timeout(PATIENCE, client.write(forged, 0, page)).await;
        let written = written.map_err(|_| format!("a write {forgery} takes too long"))?;
        assert!(written.is_err(), "a write {forgery} is not refused");
        for (window, byte) in [(&window, 1), (&other, 2)] {
            let mut found = vec![0; LEN];
            window.read(0, &mut found);
            assert!(found.iter().all(|&found| found == byte), "a write {forgery} has changed something");
        }
    }
    Ok(())
}

/// Checks window writes between messengers: by the device in crc mode; by messages in secure mode, where nothing is
/// sent in the clear.
async fn remote_writes(ip: IpAddr, secure: bool) -> Outcome {
    let core = MessengerCore::default();
    let options = options(ip, secure);
    let opened: Rc<RefCell<Option<MemoryWindow>>> = Rc::default();
    let keep = opened.clone();
    let open = move |connection: &Connection, message: Message| {
        let window = connection.window(1 << 20).expect("memory");
        window.on_persist(|_, _, _| async { Ok(()) });
        let place = Buf::copy_of(&window.descriptor().encode());
        connection.post(message.reply(2).front(place)).expect("there is room");
        *keep.borrow_mut() = Some(window);
    };
    let server = Messenger::new(&core, options.clone(), open);
    let address = server.bind(&Address::Rdma((ip, 0).into()))?;
    let client = Messenger::new(&core, options, |_: &Connection, _: Message| {});
    let connection = client.connect(&address, Policy::LosslessPeer);
    let reply = connection.request(Message::new(1)).await?;
    let place = WindowDescriptor::decode(&reply.front.to_vec())?;
    assert_eq!(connection.writes_one_sided(), !secure);
    let data: Vec<u8> = (0..700_000).map(byte).collect();
    for at in 0..3u64 {
        let writing = connection.write(place, at * 1000, Buf::copy_of(&data));
        timeout(PATIENCE, writing).await.map_err(|_| "a write takes too long")??;
        let mut found = vec![0; data.len()];
        opened.borrow().as_ref().ok_or("a window")?.read(at as usize * 1000, &mut found);
        assert!(found == data, "what was written is there when the write is complete");
    }
    connection.persist(place, 0, 1 << 20).await?;
    let by_message = opened.borrow().as_ref().ok_or("a window")?.writes_by_message();
    assert_eq!(by_message > 0, secure, "{by_message} writes came as messages");
    drop(opened.take());
    let late = timeout(PATIENCE, connection.write(place, 0, Buf::copy_of(b"x"))).await;
    assert!(late.map_err(|_| "a late write takes too long")?.is_err(), "a window that is gone takes nothing");
    // A write rejected by the device ends the stream; the session continues on the next one.
    connection.request(Message::new(1)).await?;
    client.shutdown();
    server.shutdown();
    Ok(())
}

/// Checks that a window descriptor is invalid once its connection has ended, even on another connection of the same
/// peer, and even if the owner keeps the window.
async fn stale_keys(ip: IpAddr) -> Outcome {
    struct Opens {
        kept: Rc<RefCell<Option<MemoryWindow>>>,
        lost: Rc<Notify>,
        gone: Rc<Cell<bool>>,
    }
    impl Handler for Opens {
        fn message(&self, connection: &Connection, message: Message) {
            let window = connection.window(4096).expect("memory");
            let place = Buf::copy_of(&window.descriptor().encode());
            connection.post(message.reply(2).front(place)).expect("there is room");
            *self.kept.borrow_mut() = Some(window);
        }
        fn lost(&self, _: &Connection, _: &DisconnectReason) {
            self.gone.set(true);
            self.lost.notify_all();
        }
    }
    let (kept, lost, gone) = (Rc::default(), Rc::new(Notify::new()), Rc::default());
    let opens = Opens { kept: Rc::clone(&kept), lost: lost.clone(), gone: Rc::clone(&gone) };
    let core = MessengerCore::default();
    let server = Messenger::new(&core, options(ip, false), opens);
    let address = server.bind(&Address::Rdma((ip, 0).into()))?;
    let client = Messenger::new(&core, options(ip, false), |_: &Connection, _: Message| {});
    let [first, second] = [(); 2].map(|()| client.connect(&address, Policy::LossyClient));
    second.ready().await?;
    let reply = first.request(Message::new(1)).await?;
    let place = WindowDescriptor::decode(&reply.front.to_vec())?;
    first.write(place, 0, Buf::copy_of(&[1; 4096])).await?;
    first.close();
    let noticed = timeout(PATIENCE, lost.wait_until(|| gone.get())).await;
    noticed.map_err(|_| "the end of a connection is not noticed")?;
    let late = timeout(PATIENCE, second.write(place, 0, Buf::copy_of(&[2; 4096]))).await;
    assert!(
        late.map_err(|_| "a late write takes too long")?.is_err(),
        "the key of a connection that has ended opens nothing"
    );
    let mut found = [0; 4096];
    kept.borrow().as_ref().ok_or("a window")?.read(0, &mut found);
    assert!(found == [1; 4096], "and nothing has changed");
    client.shutdown();
    server.shutdown();
    Ok(())
}

/// Checks that a pending receive completes when the peer has gone.
async fn ends(ip: IpAddr) -> Outcome {
    let (client, server) = pair(ip, Duration::ZERO).await?;
    let waiting = spawn(async move { server.recv(BufMut::with_capacity(100), false).await.0 });
    client.send(BufList::from(Buf::copy_of(b"x"))).await?;
    assert_eq!(timeout(PATIENCE, waiting).await.map_err(|_| "nothing comes")??, 1);
    let (client, server) = pair(ip, Duration::ZERO).await?;
    let waiting = spawn(async move { server.recv(BufMut::with_capacity(100), false).await.0 });
    drop(client);
    let result = timeout(PATIENCE, waiting).await.map_err(|_| "the end is not noticed")?;
    assert!(matches!(result, Ok(0) | Err(_)), "nothing was sent");
    Ok(())
}

/// Checks that a client uses RDMA if its peer begins to listen only after the first attempt, which is rejected.  A TCP
/// listener whose queue is full holds the client at its attempt over TCP meanwhile.
async fn late_listener(ip: IpAddr) -> Outcome {
    let tcp = TcpListener::bind((ip, 0))?;
    let addr = tcp.local_addr()?;
    let mut queue = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&addr, Duration::from_secs(1)) {
        queue.push(stream);
        assert!(queue.len() < 1000, "a queue is full at some time");
    }
    let client = Messenger::new(&MessengerCore::default(), options(ip, false), |_: &Connection, _: Message| {});
    let connection = client.connect(&Address::Rdma(addr), Policy::LosslessPeer);
    let dials_tcp = async {
        while !dials(addr)? {
            sleep(Duration::from_millis(10)).await;
        }
        Ok::<_, std::io::Error>(())
    };
    timeout(PATIENCE, dials_tcp).await.map_err(|_| "the client does not try TCP")??;
    let listener = RdmaListener::bind(addr, Duration::ZERO)?;
    tcp.set_nonblocking(true)?;
    let mut accepted = Vec::new();
    let drain = async {
        loop {
            while let Ok((stream, _)) = tcp.accept() {
                stream.set_nonblocking(true)?;
                accepted.push(stream);
            }
            if timeout(Duration::from_millis(10), listener.asked()).await.is_ok() {
                return Ok::<_, std::io::Error>(());
            }
        }
    };
    timeout(PATIENCE, drain).await.map_err(|_| "the client does not come back over RDMA")??;
    while let Ok((stream, _)) = tcp.accept() {
        stream.set_nonblocking(true)?;
        accepted.push(stream);
    }
    assert!(accepted.len() > queue.len(), "the client connected over TCP first");
    for mut stream in accepted {
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0, "the client uses the connection over TCP");
    }
    connection.close();
    client.shutdown();
    Ok(())
}

/// Returns whether a socket of this machine waits for an answer to its connection attempt to an address of version 4.
fn dials(addr: SocketAddr) -> std::io::Result<bool> {
    let SocketAddr::V4(v4) = addr else { return Err(std::io::ErrorKind::Unsupported.into()) };
    let remote = format!("{:08X}:{:04X}", u32::from_le_bytes(v4.ip().octets()), v4.port());
    let sockets = std::fs::read_to_string("/proc/net/tcp")?;
    Ok(sockets.lines().any(|line| line.split_whitespace().skip(2).take(2).eq([remote.as_str(), "02"])))
}

fn options(ip: IpAddr, secure: bool) -> MessengerOptions {
    let key = SharedKey::new([7; 32]);
    let auth = Auth::SharedKey { name: "a".into(), key: key.clone(), keyring: Rc::new(Keyring::new().with("a", key)) };
    MessengerOptions {
        auth,
        modes: Some(vec![if secure { mode::SECURE } else { mode::CRC }]),
        rdma_local: Some(ip),
        ..MessengerOptions::default()
    }
}

/// Exchanges messages of all lengths, over one connection that is lost in between.
async fn messages(ip: IpAddr, secure: bool) -> Outcome {
    let core = MessengerCore::default();
    let options = options(ip, secure);
    let echo = |connection: &Connection, message: Message| {
        let reply = message.reply(2).data(message.data.clone());
        let connection = connection.clone();
        drop(spawn(async move { connection.send(reply).await }));
    };
    let server = Messenger::new(&core, options.clone(), echo);
    let address = server.bind(&Address::Rdma((ip, 0).into()))?;
    assert!(matches!(address, Address::Rdma(_)), "the server listens over RDMA");
    let client = Messenger::new(&core, options, |_: &Connection, _: Message| {});
    let connection = client.connect(&address, Policy::LosslessPeer);
    let answered = Rc::new(Cell::new(0));
    let lanes: Vec<_> = (0..8usize)
        .map(|lane| {
            let (connection, answered) = (connection.clone(), answered.clone());
            spawn(async move {
                for round in 0..30 {
                    let len = [0, 1, 4096, 9000, 65_536, 200_000, 1_000_000][(lane + round) % 7];
                    let data: Vec<u8> = (0..len).map(|at| byte(at + lane * 1000 + round)).collect();
                    let message = Message::new(1).data(Buf::copy_of(&data));
                    let reply = connection.request(message).await.map_err(|error| error.to_string())?;
                    if reply.data.to_vec() != data {
                        return Err(format!("{len} bytes came back otherwise"));
                    }
                    answered.set(answered.get() + 1);
                }
                Ok(())
            })
        })
        .collect();
    let failures = RefCell::new(Vec::new());
    for lane in lanes {
        let result = timeout(3 * PATIENCE, lane).await.map_err(|_| "a lane takes too long")?;
        failures.borrow_mut().extend(result.err());
    }
    assert!(failures.borrow().is_empty(), "{:?}", failures.borrow());
    assert_eq!(answered.get(), 240);
    client.shutdown();
    server.shutdown();
    Ok(())
}
