//! Two threads that wake each other in turn, and sleep.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// One side of a pair that wakes each other: the functions that wait for its turn, and wake the other side.
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

pub fn run(kind: &str, seconds: f64) -> io::Result<()> {
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
