//! What the messenger is measured against: the same shape of exchange without framing, checksums or sessions.
//!
//! `messenger-peer bare-serve ADDR` and `bare-run ADDR SIZE DEPTH SECONDS`: a loop on io_uring that receives as much as
//! there is, and answers all of it with one send.  `epoll-serve` and `epoll-run`: plain sockets and epoll, a system call
//! for each answer and each request.  `rings-serve` and `rings-run`: rings in shared memory, polled all the time.
//! A request has SIZE bytes (16 at least), an answer 16.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forebay_reactor::{Addr, Buf, BufList, DriverChoice, Listener, Pool, Reactor, Stream, now, shm};
use rustix::event::epoll;

const ANSWER: usize = 16;
const REQUEST_MIN: usize = 16;
const RECEIVE: usize = 256 << 10;

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok()).expect("a number");
    let addr = words.get(1).expect("an address");
    let (size, depth, seconds) = match words[0].as_str() {
        "bare-serve" | "epoll-serve" | "rings-serve" => (number(2) as usize, 0, 0.0),
        _ => (number(2) as usize, number(3) as usize, number(4)),
    };
    let size = size.max(REQUEST_MIN);
    match words[0].as_str() {
        "bare-serve" => reactor()?.block_on(bare_serve(addr, size)),
        "bare-run" => reactor()?.block_on(bare_run(addr, size, depth, seconds)),
        "epoll-serve" => epoll_serve(addr, size),
        "epoll-run" => epoll_run(addr, size, depth, seconds),
        "rings-serve" => reactor()?.block_on(rings_serve(addr, size)),
        "rings-run" => reactor()?.block_on(rings_run(addr, size, depth, seconds)),
        other => panic!("{other}?"),
    }
}

/// As the messenger's own is set up.
fn reactor() -> io::Result<Reactor> {
    let reactor = Reactor::system(DriverChoice::Auto)?;
    let linger = std::env::var("LINGER_US").ok().and_then(|text| text.parse().ok()).unwrap_or(50);
    reactor.set_linger(Duration::from_micros(linger));
    Ok(reactor)
}

fn bound(addr: &str) {
    println!("{addr}");
}

fn report(messages: u64, seconds: f64) {
    println!("{{\"messages_per_s\":{:.1}}}", messages as f64 / seconds);
}

async fn bare_serve(addr: &str, size: usize) -> io::Result<()> {
    let listener = Listener::bind(&addr.parse::<Addr>().expect("an address"))?;
    bound(&listener.local_addr().to_string());
    let (stream, _) = listener.accept().await?;
    let (pool, answer) = (Pool::new(RECEIVE, 4), Buf::zeroed(ANSWER * 65_536));
    let mut received = 0;
    loop {
        let (got, _) = stream.recv(pool.get()).await;
        match got? {
            0 => return Ok(()),
            got => received += got,
        }
        let whole = received / size;
        received %= size;
        if whole > 0 {
            stream.send(answer.slice(0..ANSWER * whole)).await?;
        }
    }
}

async fn bare_run(addr: &str, size: usize, depth: usize, seconds: f64) -> io::Result<()> {
    let stream = Stream::connect(&addr.parse::<Addr>().expect("an address")).await?;
    let (pool, request) = (Pool::new(RECEIVE, 4), Buf::copy_of(&vec![0xA5; size]));
    let warm = now() + Duration::from_millis(200);
    let end = warm + Duration::from_secs_f64(seconds);
    let (mut credits, mut received, mut messages, mut begin) = (depth, 0, 0, None);
    loop {
        let time = now();
        if time >= end {
            break;
        }
        if begin.is_none() && time >= warm {
            (begin, messages) = (Some(time), 0);
        }
        if credits > 0 {
            let batch: BufList = std::iter::repeat_n(request.clone(), credits).collect();
            credits = 0;
            stream.send(batch).await?;
        }
        let (got, _) = stream.recv(pool.get()).await;
        received += got?;
        credits += received / ANSWER;
        messages += (received / ANSWER) as u64;
        received %= ANSWER;
    }
    report(messages, now().since(begin.expect("it ran")).as_secs_f64());
    Ok(())
}

async fn rings_serve(path: &str, size: usize) -> io::Result<()> {
    let listener = Listener::bind(&format!("unix:{path}").parse::<Addr>().expect("an address"))?;
    bound(path);
    let (stream, _) = listener.accept().await?;
    let (mut producer, mut consumer, fd) = shm::create()?;
    stream.send_fd(fd.as_fd())?;
    let (mut buf, mut received) = (vec![0; RECEIVE], 0);
    // Until it is killed: nothing else happens on this core.
    loop {
        received += consumer.read(&mut buf)?.0;
        while received >= size {
            let put = producer.write(&[0; ANSWER])?;
            assert_eq!(put, ANSWER, "answers are shorter than requests, so there is room");
            received -= size;
        }
        producer.publish();
        std::hint::spin_loop();
    }
}

async fn rings_run(path: &str, size: usize, depth: usize, seconds: f64) -> io::Result<()> {
    let stream = Stream::connect(&format!("unix:{path}").parse::<Addr>().expect("an address")).await?;
    let (mut producer, mut consumer) = shm::adopt(&stream.recv_fd().await?)?;
    let (request, mut buf) = (vec![0xA5; size], vec![0; RECEIVE]);
    let warm = now() + Duration::from_millis(200);
    let end = warm + Duration::from_secs_f64(seconds);
    let (mut credits, mut sent, mut received, mut messages, mut begin) = (depth, 0, 0, 0u64, None);
    loop {
        let time = now();
        if time >= end {
            break;
        }
        if begin.is_none() && time >= warm {
            (begin, messages) = (Some(time), 0);
        }
        while credits > 0 {
            let put = producer.write(&request[sent..])?;
            sent = (sent + put) % size;
            credits -= usize::from(put > 0 && sent == 0);
            producer.publish();
            if put == 0 {
                break;
            }
        }
        received += consumer.read(&mut buf)?.0;
        credits += received / ANSWER;
        messages += (received / ANSWER) as u64;
        received %= ANSWER;
        std::hint::spin_loop();
    }
    report(messages, now().since(begin.expect("it ran")).as_secs_f64());
    Ok(())
}

fn poller(stream: &impl std::os::fd::AsFd, flags: epoll::EventFlags) -> io::Result<std::os::fd::OwnedFd> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poller, stream, epoll::EventData::new_u64(0), flags)?;
    Ok(poller)
}

fn wait(poller: &std::os::fd::OwnedFd) -> io::Result<()> {
    let mut events = Vec::with_capacity(8);
    epoll::wait(poller, rustix::buffer::spare_capacity(&mut events), None)?;
    Ok(())
}

/// Writes everything, waiting where the socket is full.
fn write_all(stream: &mut TcpStream, writable: &std::os::fd::OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(writable)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn epoll_serve(addr: &str, size: usize) -> io::Result<()> {
    let listener = TcpListener::bind(addr)?;
    bound(&listener.local_addr()?.to_string());
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let readable = poller(&stream, epoll::EventFlags::IN)?;
    let writable = poller(&stream, epoll::EventFlags::OUT)?;
    let (mut buf, mut received, answer) = (vec![0; 64 << 10], 0, [0; ANSWER]);
    loop {
        wait(&readable)?;
        match stream.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(got) => received += got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        }
        while received >= size {
            received -= size;
            write_all(&mut stream, &writable, &answer)?;
        }
    }
}

fn epoll_run(addr: &str, size: usize, depth: usize, seconds: f64) -> io::Result<()> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let either = poller(&stream, epoll::EventFlags::IN | epoll::EventFlags::OUT)?;
    let readable = poller(&stream, epoll::EventFlags::IN)?;
    let request = vec![0xA5; size];
    let warm = Instant::now() + Duration::from_millis(200);
    let end = warm + Duration::from_secs_f64(seconds);
    let (mut buf, mut received, mut messages, mut begin) = (vec![0; 64 << 10], 0, 0u64, None);
    let (mut credits, mut sent) = (depth, 0);
    loop {
        let time = Instant::now();
        if time >= end {
            break;
        }
        if begin.is_none() && time >= warm {
            (begin, messages) = (Some(time), 0);
        }
        let mut blocked = false;
        while credits > 0 && !blocked {
            match stream.write(&request[sent..]) {
                Ok(len) => {
                    sent = (sent + len) % size;
                    credits -= usize::from(sent == 0);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => blocked = true,
                Err(error) => return Err(error),
            }
        }
        wait(if blocked { &either } else { &readable })?;
        match stream.read(&mut buf) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(got) => received += got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        credits += received / ANSWER;
        messages += (received / ANSWER) as u64;
        received %= ANSWER;
    }
    report(messages, begin.expect("it ran").elapsed().as_secs_f64());
    Ok(())
}
