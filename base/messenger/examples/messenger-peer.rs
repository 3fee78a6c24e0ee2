//! What the messenger is measured against: the same shape of exchange without framing, checksums or sessions.
//!
//! `messenger-peer bare-serve ADDR` and `bare-run ADDR SIZE DEPTH SECONDS`: a loop on io_uring that receives as much as
//! there is, and answers all of it with one send.  `epoll-serve` and `epoll-run`: plain sockets and epoll, a system call
//! for each answer and each request.  `rings-serve` and `rings-run`: rings in shared memory, polled all the time.
//! A request has SIZE bytes (16 at least), an answer 16.
//!
//! `wakes eventfd|futex|socket SECONDS`: two threads, each on a processor of its own, that wake each other in turn with
//! nothing but that, and sleep: what a round trip between two sleepers costs on this machine at least.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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
    if words[0] == "wakes" {
        return wakes(addr, number(2));
    }
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

/// One side of a pair that wakes each other: waits for its turn, and gives the other one its.
type Turn = (Box<dyn FnMut() + Send>, Box<dyn FnMut() + Send>);

fn by_eventfd() -> io::Result<[Turn; 2]> {
    use rustix::event::{EventfdFlags, eventfd};
    let fds = [eventfd(0, EventfdFlags::CLOEXEC)?, eventfd(0, EventfdFlags::CLOEXEC)?];
    let side = |own: usize| -> io::Result<Turn> {
        let (own, other) = (fds[own].try_clone()?, fds[1 - own].try_clone()?);
        let wait = move || assert_eq!(rustix::io::read(&own, &mut [0u8; 8]), Ok(8));
        let wake = move || assert_eq!(rustix::io::write(&other, &1u64.to_ne_bytes()), Ok(8));
        Ok((Box::new(wait), Box::new(wake)))
    };
    Ok([side(0)?, side(1)?])
}

fn by_socket() -> io::Result<[Turn; 2]> {
    let (one, other) = std::os::unix::net::UnixStream::pair()?;
    let side = |stream: std::os::unix::net::UnixStream| -> io::Result<Turn> {
        let (mut own, mut other) = (stream.try_clone()?, stream);
        let wait = move || own.read_exact(&mut [0]).expect("a byte");
        let wake = move || other.write_all(&[1]).expect("sent");
        Ok((Box::new(wait), Box::new(wake)))
    };
    Ok([side(one)?, side(other)?])
}

fn by_futex() -> [Turn; 2] {
    use rustix::thread::futex;
    let words = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
    let side = |own: usize| -> Turn {
        let (own, other) = (words[own].clone(), words[1 - own].clone());
        let wait = move || {
            while own.swap(0, Ordering::AcqRel) == 0 {
                let _ = futex::wait(&own, futex::Flags::empty(), 0, None);
            }
        };
        let wake = move || {
            other.store(1, Ordering::Release);
            let _ = futex::wake(&other, futex::Flags::empty(), 1);
        };
        (Box::new(wait), Box::new(wake))
    };
    [side(0), side(1)]
}

fn wakes(kind: &str, seconds: f64) -> io::Result<()> {
    let [(mut wait, mut wake), (mut await_question, mut answer)] = match kind {
        "eventfd" => by_eventfd()?,
        "socket" => by_socket()?,
        "futex" => by_futex(),
        other => panic!("{other}?"),
    };
    let pin = |cpu: usize| {
        let mut cpus = rustix::thread::CpuSet::new();
        cpus.set(cpu);
        // Where there is one processor they share it.
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    };
    // It ends with the process.
    std::thread::spawn(move || {
        pin(0);
        loop {
            await_question();
            answer();
        }
    });
    pin(1);
    let (begin, mut trips) = (Instant::now(), Vec::new());
    while begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        wake();
        wait();
        trips.push(start.elapsed().as_nanos() as u64);
    }
    trips.sort_unstable();
    println!("{{\"latency_us_p50\":{:.2}}}", trips[trips.len() / 2] as f64 / 1e3);
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
