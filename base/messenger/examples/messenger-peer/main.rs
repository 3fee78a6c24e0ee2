//! Baselines for the messenger's benchmarks: the same exchange without framing, checksums or sessions.
//!
//! `messenger-peer bare-serve ADDR SIZE` and `bare-run ADDR SIZE DEPTH SECONDS`: a loop on io_uring that receives as much
//! as there is, and answers all of it with one send.  `epoll-serve` and `epoll-run`: plain sockets and epoll, a system call
//! for each answer and each request.  `rings-serve` and `rings-run`: rings in shared memory, polled all the time.
//! As many bytes go over the wire as the messenger sends for a payload of SIZE, in crc mode, and for an empty answer.
//!
//! `wakes eventfd|futex|socket SECONDS`: two threads, each on a processor of its own, that wake each other in turn with
//! nothing but that, and sleep: what a round trip between two sleepers costs on this machine at least.

mod bare;
mod epoll;
mod rings;
mod shape;
mod wakes;

use std::io;
use std::time::Duration;

use forebay_reactor::{DriverChoice, Reactor};

use shape::Shape;

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok()).expect("a number");
    let addr = words.get(1).expect("an address");
    if words[0] == "wakes" {
        return wakes::run(addr, number(2));
    }
    let request = shape::request(number(2) as usize);
    let shape = || Shape { request, depth: number(3) as usize, seconds: number(4) };
    match words[0].as_str() {
        "bare-serve" => reactor()?.block_on(bare::serve(addr, request)),
        "bare-run" => reactor()?.block_on(bare::run(addr, shape())),
        "epoll-serve" => epoll::serve(addr, request),
        "epoll-run" => epoll::run(addr, shape()),
        "rings-serve" => reactor()?.block_on(rings::serve(addr, request)),
        "rings-run" => reactor()?.block_on(rings::run(addr, shape())),
        other => panic!("{other}?"),
    }
}

/// Creates a reactor configured like the messenger's.
fn reactor() -> io::Result<Reactor> {
    let reactor = Reactor::system(DriverChoice::Auto)?;
    let linger = std::env::var("LINGER_US").ok().and_then(|text| text.parse().ok()).unwrap_or(50);
    reactor.set_linger(Duration::from_micros(linger));
    Ok(reactor)
}
