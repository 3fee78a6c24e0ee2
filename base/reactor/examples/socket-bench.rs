//! Benchmark of socket send and receive variants directly on io_uring: zero-copy sends against copying ones, multishot
//! receives from a buffer ring against single ones.
//!
//! `socket-bench serve ADDR SIZE recv|multishot` replies to each SIZE bytes with 16, for one connection; `socket-bench
//! run ADDR SIZE DEPTH SECONDS send|zc|zc-fixed` keeps DEPTH requests in flight, with all that may be sent in one send
//! (`zc-fixed`: from a registered buffer).  Both wait without polling, and print CPU time per message; a zero-copy
//! client also prints the share of its sends that the kernel has copied after all.

use std::io::{self, Error};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode, squeue};

const ANSWER: usize = 16;
const RECEIVE: usize = 256 << 10;
/// Buffers of the ring for multishot receives.
const RING: usize = 16;
/// Flag `IORING_SEND_ZC_REPORT_USAGE`: the notification reports whether the kernel has copied.
const REPORT_USAGE: u16 = 8;
/// Flag `IORING_NOTIF_USAGE_ZC_COPIED`.
const COPIED: u32 = 1 << 31;
/// Kind of an operation, in its user data.
const SEND: u64 = 1;
const RECV: u64 = 2;

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok()).expect("a number");
    match words[0].as_str() {
        "serve" => serve(&words[1], number(2) as usize, &words[3]),
        "run" => run(&words[1], (number(2) as usize, number(3) as usize), number(4), &words[5]),
        other => panic!("{other}?"),
    }
}

fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn ring() -> io::Result<IoUring> {
    IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(64)
}

fn push(ring: &mut IoUring, entry: squeue::Entry) {
    // SAFETY: memory that entries point to lives until `main` ends, or until they have completed.
    unsafe { ring.submission().push(&entry) }.expect("the queue has room: it is emptied in each turn");
}

/// Waits for at least one completion, and takes all that are there.
fn answers(ring: &mut IoUring) -> io::Result<Vec<(u64, i32, u32)>> {
    ring.submit_and_wait(1)?;
    Ok(ring.completion().map(|entry| (entry.user_data(), entry.result(), entry.flags())).collect())
}

fn moved(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| Error::from_raw_os_error(-result))
}

/// Buffers from which a multishot receive takes.
struct BufRing {
    entries: *mut BufRingEntry,
    tail: u16,
    memory: Vec<u8>,
}

impl BufRing {
    fn new(ring: &IoUring) -> io::Result<Self> {
        let layout = std::alloc::Layout::from_size_align(RING * size_of::<BufRingEntry>(), 4096).expect("a layout");
        // SAFETY: the size is not zero; the memory lives as long as the process.
        let entries: *mut BufRingEntry = unsafe { std::alloc::alloc_zeroed(layout) }.cast();
        // SAFETY: as above.
        unsafe { ring.submitter().register_buf_ring_with_flags(entries as u64, RING as u16, 0, 0) }?;
        let mut buffers = Self { entries, tail: 0, memory: vec![0; RING * RECEIVE] };
        (0..RING as u16).for_each(|id| buffers.give(id));
        Ok(buffers)
    }

    /// Returns a buffer to the kernel.
    fn give(&mut self, id: u16) {
        // SAFETY: one of the entries, which the kernel does not read before the tail below is stored.
        let entry = unsafe { &mut *self.entries.add(usize::from(self.tail) % RING) };
        entry.set_addr(self.memory[usize::from(id) * RECEIVE..].as_ptr() as u64);
        entry.set_len(RECEIVE as u32);
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is in the first entry, aligned, and the kernel only reads it.
        unsafe { &*BufRingEntry::tail(self.entries).cast::<AtomicU16>() }.store(self.tail, Ordering::Release);
    }
}

fn serve(addr: &str, size: usize, how: &str) -> io::Result<()> {
    let listener = TcpListener::bind(addr)?;
    println!("{}", listener.local_addr()?);
    let (stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let fd = Fd(stream.as_raw_fd());
    let mut ring = ring()?;
    let multishot = how == "multishot";
    let mut buffers = if multishot { Some(BufRing::new(&ring)?) } else { None };
    let (mut buf, answer) = (vec![0u8; RECEIVE], vec![0u8; ANSWER * 65_536]);
    let (mut received, mut owed, mut sending, mut receiving, mut messages) = (0, 0, false, false, 0u64);
    let begin = cpu();
    loop {
        if !receiving {
            let entry = if multishot {
                opcode::RecvMulti::new(fd, 0).build()
            } else {
                opcode::Recv::new(fd, buf.as_mut_ptr(), buf.len() as u32).build()
            };
            push(&mut ring, entry.user_data(RECV));
            receiving = true;
        }
        if !sending && owed > 0 {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
            let entry = opcode::Send::new(fd, answer.as_ptr(), (ANSWER * owed) as u32).flags(flags).build();
            push(&mut ring, entry.user_data(SEND));
            (sending, owed) = (true, 0);
        }
        for (what, result, flags) in answers(&mut ring)? {
            if what == SEND {
                // The receive detects a peer that is gone.
                sending = false;
                continue;
            }
            receiving = cqueue::more(flags);
            // Out of buffers: the receive is restarted, and the buffers have been returned.
            if result == -libc::ENOBUFS {
                continue;
            }
            // A client that leaves replies unread when it exits resets the connection.
            let got = if result == -libc::ECONNRESET { 0 } else { moved(result)? };
            if got == 0 {
                let micros = (cpu() - begin).as_secs_f64() * 1e6 / messages.max(1) as f64;
                println!("{{\"messages\":{messages},\"server_cpu_us\":{micros:.3}}}");
                return Ok(());
            }
            received += got;
            if let (Some(buffers), Some(id)) = (&mut buffers, cqueue::buffer_select(flags)) {
                buffers.give(id);
            }
        }
        messages += (received / size) as u64;
        owed += received / size;
        received %= size;
    }
}

fn run(addr: &str, (size, depth): (usize, usize), seconds: f64, how: &str) -> io::Result<()> {
    let stream = TcpStream::connect(addr)?;
    stream.set_nodelay(true)?;
    let fd = Fd(stream.as_raw_fd());
    let mut ring = ring()?;
    let requests = vec![0xA5u8; size * depth];
    let index = (how == "zc-fixed").then_some(0);
    if index.is_some() {
        let iovec = libc::iovec { iov_base: requests.as_ptr().cast_mut().cast(), iov_len: requests.len() };
        // SAFETY: the memory lives until this returns, and the ring with it.
        unsafe { ring.submitter().register_buffers(&[iovec]) }?;
    }
    let mut buf = vec![0u8; RECEIVE];
    let (mut credits, mut received, mut left, mut sending, mut receiving) = (depth, 0, 0, false, false);
    let (mut messages, mut sends, mut copied) = (0u64, 0u64, 0u64);
    let (start, begin) = (Instant::now(), cpu());
    while start.elapsed().as_secs_f64() < seconds {
        if !sending && left == 0 && credits > 0 {
            left = credits * size;
            credits = 0;
        }
        if !sending && left > 0 {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
            let entry = if how == "send" {
                opcode::Send::new(fd, requests.as_ptr(), left as u32).flags(flags).build()
            } else {
                let send = opcode::SendZc::new(fd, requests.as_ptr(), left as u32).flags(flags);
                send.zc_flags(REPORT_USAGE).buf_index(index).build()
            };
            push(&mut ring, entry.user_data(SEND));
            sending = true;
            sends += 1;
        }
        if !receiving {
            push(&mut ring, opcode::Recv::new(fd, buf.as_mut_ptr(), buf.len() as u32).build().user_data(RECV));
            receiving = true;
        }
        for (what, result, flags) in answers(&mut ring)? {
            // Sent data never changes, so there is no need to wait for the kernel to release it.
            if cqueue::notif(flags) {
                copied += u64::from(result as u32 & COPIED != 0);
            } else if what == SEND {
                left -= moved(result)?;
                sending = false;
            } else {
                received += moved(result)?;
                receiving = false;
            }
        }
        messages += (received / ANSWER) as u64;
        credits += received / ANSWER;
        received %= ANSWER;
    }
    let micros = (cpu() - begin).as_secs_f64() * 1e6 / messages.max(1) as f64;
    let rate = messages as f64 / start.elapsed().as_secs_f64();
    let copied = if how == "send" { 1.0 } else { copied as f64 / sends.max(1) as f64 };
    println!("{{\"messages_per_s\":{rate:.0},\"client_cpu_us\":{micros:.3},\"copied\":{copied:.2}}}");
    Ok(())
}
