//! Benchmark of the bare reactor: `reactor-bench MODE [DEPTH] [SECONDS] [uring|epoll]`.
//!
//! Modes: `read` and `write` (4 KiB at random offsets of a 256 MiB file, O_DIRECT), `echo` (28 bytes in, 4 KiB out,
//! DEPTH requests in flight on one connection), `plain` (the same on a blocking thread), `cross` (calls to another
//! core), `task` (spawn and join), `yield`.  Prints operations per second and the CPU time of the reactor's thread per
//! operation.

use std::path::PathBuf;
use std::time::Duration;

use forebay_reactor::{
    Addr, Buf, BufMut, BufPool, Cores, CoresOptions, DriverChoice, File, Instant, Listener, OpenOptions, Reactor,
    cross, now, random, spawn, yield_now,
};

const BLOCK: usize = 4096;
const FILE_BLOCKS: u64 = 65_536;

fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid timespec to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Counts operations until a deadline.
async fn workers<F: Future<Output = u64> + 'static>(depth: usize, make: impl Fn() -> F) -> u64 {
    let tasks: Vec<_> = (0..depth).map(|_| spawn(make())).collect();
    let mut sum = 0;
    for task in tasks {
        sum += task.await;
    }
    sum
}

async fn file_ops(depth: usize, end: Instant, write: bool) -> u64 {
    let path = std::env::var_os("BENCH_FILE").map_or_else(|| std::env::temp_dir().join("reactor-bench"), PathBuf::from);
    let file = File::open(&path, OpenOptions::read_write().create().direct()).expect("opens");
    if file.size().expect("size") < FILE_BLOCKS * BLOCK as u64 {
        for at in 0..FILE_BLOCKS / 256 {
            file.write_at(BufMut::zeroed(256 * BLOCK), at * 256 * BLOCK as u64).await.expect("writes");
        }
        file.sync_data().await.expect("syncs");
    }
    let pool = BufPool::new(BLOCK, depth);
    let ops = workers(depth, || {
        let (file, pool) = (file.clone(), pool.clone());
        async move {
            let mut ops = 0;
            while now() < end {
                let at = random() % FILE_BLOCKS * BLOCK as u64;
                let mut buf = pool.get();
                if write {
                    buf.set_len(BLOCK);
                    file.write_at(buf, at).await.expect("writes");
                } else {
                    file.read_at(buf, at).await.0.expect("reads");
                }
                ops += 1;
            }
            ops
        }
    });
    ops.await
}

/// Peer on a plain thread, so that only the server's side is measured.
fn echo_client(addr: Addr, depth: usize) {
    use std::io::{Read, Write};
    let Addr::Unix(path) = addr else { unreachable!("a Unix socket") };
    let mut stream = std::os::unix::net::UnixStream::connect(path).expect("connects");
    let mut reply = vec![0; BLOCK];
    stream.write_all(&vec![1; 28 * depth]).expect("sends");
    while stream.read_exact(&mut reply).is_ok() {
        if stream.write_all(&[1; 28]).is_err() {
            break;
        }
    }
}

async fn echo(depth: usize, end: Instant) -> u64 {
    let path = std::env::temp_dir().join(format!("reactor-bench-{}", std::process::id()));
    let addr = Addr::Unix(path.clone());
    let listener = Listener::bind(&addr).expect("listens");
    let client = std::thread::spawn(move || echo_client(addr, depth));
    let (stream, _) = listener.accept().await.expect("accepts");
    let payload = Buf::zeroed(BLOCK);
    let mut ops = 0;
    let mut buf = BufMut::with_capacity(64 << 10);
    while now() < end {
        let (result, back) = stream.recv(buf).await;
        assert!(result.expect("receives") > 0);
        buf = back;
        let requests = buf.len() / 28;
        if requests > 0 {
            let parts = (0..requests).map(|_| payload.clone()).collect::<forebay_reactor::BufList>();
            stream.send(parts).await.expect("sends");
            let rest = Buf::copy_of(&buf[28 * requests..]);
            buf.clear();
            buf.extend_from_slice(&rest);
            ops += requests as u64;
        }
    }
    stream.shutdown();
    client.join().expect("the client ends");
    let _ = std::fs::remove_file(path);
    ops
}

/// Echo on a blocking thread, for comparison: the cost of the kernel alone.
fn plain(depth: usize, end: Instant) -> u64 {
    use std::io::{Read, Write};
    let path = std::env::temp_dir().join(format!("reactor-bench-{}", std::process::id()));
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("listens");
    let addr = Addr::Unix(path.clone());
    let client = std::thread::spawn(move || echo_client(addr, depth));
    let (mut stream, _) = listener.accept().expect("accepts");
    let payload = vec![0; BLOCK * depth];
    let mut buf = vec![0; 64 << 10];
    let (mut ops, mut held) = (0, 0);
    while now() < end {
        let got = stream.read(&mut buf).expect("receives");
        assert!(got > 0);
        held += got;
        let requests = held / 28;
        held %= 28;
        stream.write_all(&payload[..BLOCK * requests]).expect("sends");
        ops += requests as u64;
    }
    stream.shutdown(std::net::Shutdown::Both).expect("shuts down");
    client.join().expect("the client ends");
    let _ = std::fs::remove_file(path);
    ops
}

async fn calls(depth: usize, end: Instant, driver: DriverChoice) -> u64 {
    let options = CoresOptions { count: 1, driver, pin: false, ..CoresOptions::default() };
    let cores = Cores::start(&options).expect("cores");
    let (sender, mut receiver) = cross::channel::<cross::OneshotSender<()>>();
    drop(cores.handle(0).run(move || async move {
        while let Some(answer) = receiver.recv().await {
            answer.send(());
        }
    }));
    let ops = workers(depth, || {
        let sender = sender.clone();
        async move {
            let mut ops = 0;
            while now() < end {
                let (answer, answered) = cross::oneshot();
                assert!(sender.send(answer).is_ok());
                answered.await.expect("answers");
                ops += 1;
            }
            ops
        }
    });
    ops.await
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |at: usize| args.get(at).map(String::as_str);
    let mode = arg(0).unwrap_or("read").to_owned();
    let depth: usize = arg(1).map_or(32, |text| text.parse().expect("a depth"));
    let seconds: f64 = arg(2).map_or(2.0, |text| text.parse().expect("seconds"));
    let driver = if arg(3) == Some("epoll") { DriverChoice::Poll } else { DriverChoice::Uring };
    let reactor = Reactor::system(driver).expect("a driver");
    let (ops, wall, cpu) = reactor.block_on(async {
        let (start, cpu) = (now(), thread_time());
        let end = start + Duration::from_secs_f64(seconds);
        let ops = match mode.as_str() {
            "read" => file_ops(depth, end, false).await,
            "write" => file_ops(depth, end, true).await,
            "echo" => echo(depth, end).await,
            "plain" => plain(depth, end),
            "cross" => calls(depth, end, driver).await,
            "task" => {
                let body = || async move {
                    let mut ops = 0;
                    while now() < end {
                        spawn(async {}).await;
                        ops += 1;
                    }
                    ops
                };
                workers(depth, body).await
            }
            "yield" => {
                let body = || async move {
                    let mut ops = 0;
                    while now() < end {
                        yield_now().await;
                        ops += 1;
                    }
                    ops
                };
                workers(depth, body).await
            }
            other => panic!("no mode '{other}'"),
        };
        (ops, start.elapsed(), thread_time() - cpu)
    });
    println!(
        "{} {mode} depth {depth}: {:.0} operations/s, {:.0} ns of processor an operation ({:.0} % busy)",
        reactor.driver_name(),
        ops as f64 / wall.as_secs_f64(),
        cpu.as_nanos() as f64 / ops as f64,
        100.0 * cpu.as_secs_f64() / wall.as_secs_f64(),
    );
}
