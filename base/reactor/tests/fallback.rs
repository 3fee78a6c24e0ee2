//! Tests of the fallback to epoll, with one warning, where io_uring is forbidden, and of operation with little lockable
//! memory.
//!
//! Each case runs this program again with a seccomp filter, as a container's runtime would set one.  A filter cannot be
//! removed, so it needs a process of its own.

#[path = "it/common/mod.rs"]
mod common;

use std::fmt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::TempDir;
use forebay_reactor::{BufMut, BufPool, DriverChoice, File, Listener, OpenOptions, Reactor, Stream, spawn};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Forbidden system calls, with the error that they return.
const CASES: [(&str, libc::c_long, i32); 3] = [
    ("setup-eperm", libc::SYS_io_uring_setup, libc::EPERM),
    ("setup-enosys", libc::SYS_io_uring_setup, libc::ENOSYS),
    ("enter-eperm", libc::SYS_io_uring_enter, libc::EPERM),
];

const MEMORY: &str = "little-locked-memory";

const CASE: &str = "FOREBAY_TEST_FORBIDDEN";

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts warnings that name io_uring.
struct Counter;

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        struct Message(bool);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                self.0 |= field.name() == "message" && format!("{value:?}").contains("io_uring");
            }
        }
        let mut message = Message(false);
        event.record(&mut message);
        WARNINGS.fetch_add(usize::from(message.0), Ordering::SeqCst);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

fn forbid(call: libc::c_long, error: i32) {
    let statement = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // Offset 0 of a filter's input is the system call number.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | error as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives through the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

async fn everything_works() {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), OpenOptions::read_write().create().direct()).expect("opens");
    file.write_durable_at(BufMut::zeroed(8192), 0).await.expect("writes");
    file.sync_data().await.expect("syncs");
    assert_eq!(file.read_exact_at(0, 8192).await.expect("reads").len(), 8192);
    let listener = Listener::bind(&"127.0.0.1:0".parse().expect("an address")).expect("listens");
    let addr = listener.local_addr().clone();
    let client = spawn(async move { Stream::connect(&addr).await.expect("connects") });
    let (server, _) = listener.accept().await.expect("accepts");
    client.await.send(BufMut::zeroed(100)).await.expect("sends");
    server.recv_exact(BufMut::with_capacity(100)).await.0.expect("receives");
}

fn case(name: &str) {
    let (_, call, error) = CASES.into_iter().find(|case| case.0 == name).expect("a known case");
    tracing::subscriber::set_global_default(Counter).expect("the first subscriber");
    assert_eq!(Reactor::system(DriverChoice::Auto).expect("a driver").driver_name(), "io_uring");
    assert_eq!(WARNINGS.load(Ordering::SeqCst), 0);
    forbid(call, error);
    assert!(Reactor::system(DriverChoice::Uring).is_err(), "asked for by name, it is not replaced");
    assert_eq!(WARNINGS.load(Ordering::SeqCst), 0);
    for _ in 0..3 {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a driver");
        assert_eq!(reactor.driver_name(), "epoll");
        reactor.block_on(everything_works());
    }
    assert_eq!(WARNINGS.load(Ordering::SeqCst), 1, "said once");
}

/// Checks that with hardly any lockable memory a ring is small and most of a pool is not registered with it, but
/// everything works, and another ring can be created.
fn little_locked_memory() {
    let little = libc::rlimit { rlim_cur: 384 << 10, rlim_max: 384 << 10 };
    // SAFETY: a valid limit to read from; the second call has no pointers.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &little), 0);
        // The limit does not bind root, so become the user `nobody`; this fails for other users, whom the limit binds
        // already.
        libc::setuid(65_534);
    }
    Reactor::system(DriverChoice::Uring).expect("io_uring").block_on(async {
        let dir = TempDir::new();
        let file = File::open(dir.join("f"), OpenOptions::read_write().create().direct()).expect("opens");
        let pool = BufPool::new(4096, 1024);
        // Kept, so that the pool grows past the registration limit.
        let mut held = Vec::new();
        for at in 0..256 {
            let mut buf = pool.get();
            buf.extend_from_slice(&[at as u8; 4096]);
            file.write_at(buf, 4096 * at).await.expect("writes");
            let (result, buf) = file.read_at(pool.get(), 4096 * at).await;
            assert_eq!(result.expect("reads"), 4096);
            assert!(buf.iter().all(|&byte| byte == at as u8));
            held.push(buf);
        }
        Reactor::system(DriverChoice::Uring).expect("another io_uring").block_on(everything_works());
    });
}

fn main() {
    if let Ok(name) = std::env::var(CASE) {
        if name == MEMORY {
            return little_locked_memory();
        }
        return case(&name);
    }
    let program = std::env::current_exe().expect("this program");
    for name in CASES.map(|case| case.0).into_iter().chain([MEMORY]) {
        let output = Command::new(&program).env(CASE, name).output().expect("runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {}\n{text}", output.status);
        println!("test {name} ... ok");
    }
}
