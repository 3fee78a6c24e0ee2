//! System calls common to both drivers: opening, listening, closing, addresses, the clock.

use std::ffi::{CString, OsString};
use std::io;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use super::{Handle, Unpark};
use crate::net::Addr;
use crate::time::Instant;

/// Listen backlog (the system's own limit may reduce it).
const BACKLOG: i32 = 1024;

/// Maximum parts of one vectored system call.
pub(crate) const IOV_MAX: usize = 1024;

/// Maximum bytes of one system call: below the kernel's own limit (2 GiB less a page), and aligned.
pub(crate) const RW_MAX: usize = 1 << 30;

// From linux/fs.h, as on every 64-bit machine with the generic ioctl numbers (x86-64, AArch64, RISC-V).
pub(crate) const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;
pub(crate) const BLKDISCARD: libc::Ioctl = 0x1277;

/// Unit of direct I/O in bytes where the system does not report it: every supported device accepts it.
pub(crate) const SECTOR_DEFAULT: u32 = 4096;

/// Turns a system call's -1 into its error.
pub(crate) fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Like [`check`], for calls that return a length.
pub(crate) fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a path with a zero byte in it"))
}

pub(crate) fn fd_of(handle: Handle) -> RawFd {
    // Handles are made from file descriptors, which are never negative; any other number is no open file.
    RawFd::try_from(handle.0).unwrap_or(-1)
}

pub(crate) fn handle_of(fd: RawFd) -> Handle {
    Handle(u64::try_from(fd).expect("an open file descriptor is not negative"))
}

/// Closes a file descriptor that this crate owns.
pub(crate) fn close(fd: RawFd) {
    // SAFETY: the caller owns `fd` and uses it no more.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
}

/// Returns the bytes of memory that this process may lock; all processes of the user share the limit.
pub(crate) fn lockable_bytes() -> u64 {
    // Bit 14 of the effective capabilities is CAP_IPC_LOCK, which lifts the limit.
    let capable = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(line.trim(), 16).ok()
    });
    if capable.is_some_and(|bits| bits & 1 << 14 != 0) {
        return u64::MAX;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid rlimit to write to; on failure it stays a limit of 0.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    // RLIM_INFINITY is the highest number.
    limit.rlim_cur
}

/// Returns the time since the system has started, in nanoseconds, which all cores share.  It counts while the machine is
/// suspended: a lease runs out meanwhile.
pub(crate) fn now() -> Instant {
    let time = clock(libc::CLOCK_BOOTTIME);
    Instant::from_nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

pub(crate) fn wall_clock() -> Duration {
    clock(libc::CLOCK_REALTIME)
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to; the clocks asked for exist on every Linux.
    unsafe { libc::clock_gettime(id, &mut time) };
    // The wall clock may be set to before 1970; return 1970 then.
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Random numbers from the system, fetched 32 at a time.
pub(crate) struct Random {
    ready: [u64; 32],
    left: usize,
}

impl Random {
    pub(crate) fn new() -> Self {
        Self { ready: [0; 32], left: 0 }
    }

    pub(crate) fn next(&mut self) -> u64 {
        if self.left == 0 {
            let want = mem::size_of_val(&self.ready);
            let mut got = 0;
            while got < want {
                // SAFETY: `ready` has `want - got` bytes from `got` on, and any bytes are valid integers.
                let len =
                    unsafe { libc::getrandom(self.ready.as_mut_ptr().cast::<u8>().add(got).cast(), want - got, 0) };
                match check_len(len) {
                    Ok(len) => got += len,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => panic!("the system has no random numbers: {error}"),
                }
            }
            self.left = self.ready.len();
        }
        self.left -= 1;
        self.ready[self.left]
    }
}

/// Waker of a waiting driver: an eventfd.
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    /// Creates an eventfd; with `nonblocking`, reads return at once while it is not signalled.
    pub(crate) fn new(nonblocking: bool) -> io::Result<Self> {
        let flags = libc::EFD_CLOEXEC | if nonblocking { libc::EFD_NONBLOCK } else { 0 };
        // SAFETY: no pointers; the descriptor is new and owned here.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(check(libc::eventfd(0, flags))?) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Resets the counter (only for a nonblocking one).
    pub(crate) fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes into eight bytes.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }
}

impl Unpark for EventFd {
    fn unpark(&self) {
        let one = 1u64;
        // The only failure is a full counter, and then the driver is woken already.
        // SAFETY: eight bytes from eight bytes.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }
}

/// Socket address in the kernel's form.
#[derive(Clone, Copy)]
pub(crate) struct SockAddr {
    pub(crate) storage: libc::sockaddr_storage,
    pub(crate) len: libc::socklen_t,
}

impl SockAddr {
    /// Returns space for the kernel to write an address to.
    pub(crate) fn empty() -> Self {
        // SAFETY: all zeroes is a valid sockaddr_storage of no family.
        Self { storage: unsafe { mem::zeroed() }, len: mem::size_of::<libc::sockaddr_storage>() as libc::socklen_t }
    }

    pub(crate) fn ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn ptr_mut(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn new(addr: &Addr) -> io::Result<Self> {
        let mut out = Self::empty();
        match addr {
            Addr::Tcp(SocketAddr::V4(v4)) => {
                let sin = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is large enough for, and aligned as, every sockaddr.
                unsafe { out.ptr_mut().cast::<libc::sockaddr_in>().write(sin) };
                out.len = mem::size_of_val(&sin) as libc::socklen_t;
            }
            Addr::Tcp(SocketAddr::V6(v6)) => {
                let sin6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { out.ptr_mut().cast::<libc::sockaddr_in6>().write(sin6) };
                out.len = mem::size_of_val(&sin6) as libc::socklen_t;
            }
            Addr::Unix(path) => {
                let bytes = path.as_os_str().as_bytes();
                // SAFETY: all zeroes is a valid sockaddr_un.
                let mut sun: libc::sockaddr_un = unsafe { mem::zeroed() };
                // One byte is reserved for the final zero.
                if bytes.is_empty() || bytes.len() >= sun.sun_path.len() || bytes.contains(&0) {
                    let text = format!("'{}' is not a valid socket path", path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
                }
                sun.sun_family = libc::AF_UNIX as libc::sa_family_t;
                for (to, from) in sun.sun_path.iter_mut().zip(bytes) {
                    *to = *from as libc::c_char;
                }
                let len = mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
                // SAFETY: as above.
                unsafe { out.ptr_mut().cast::<libc::sockaddr_un>().write(sun) };
                out.len = len as libc::socklen_t;
            }
        }
        Ok(out)
    }

    /// Returns the address that the kernel wrote; `None` for other address families.
    pub(crate) fn addr(&self) -> Option<Addr> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family determines the type; the storage is large enough and aligned.
                let sin = unsafe { self.ptr().cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes());
                Some(Addr::Tcp(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into()))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let sin6 = unsafe { self.ptr().cast::<libc::sockaddr_in6>().read() };
                let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
                let port = u16::from_be(sin6.sin6_port);
                Some(Addr::Tcp(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id).into()))
            }
            libc::AF_UNIX => {
                // SAFETY: as above.
                let sun = unsafe { self.ptr().cast::<libc::sockaddr_un>().read() };
                let len = (self.len as usize).saturating_sub(mem::offset_of!(libc::sockaddr_un, sun_path));
                let path: Vec<u8> =
                    sun.sun_path.iter().take(len).map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
                Some(Addr::Unix(PathBuf::from(OsString::from_vec(path))))
            }
            _ => None,
        }
    }
}

/// Creates a socket for `addr`; `nonblocking` for epoll.
pub(crate) fn socket(addr: &Addr, nonblocking: bool) -> io::Result<OwnedFd> {
    let family = match addr {
        Addr::Tcp(SocketAddr::V4(_)) => libc::AF_INET,
        Addr::Tcp(SocketAddr::V6(_)) => libc::AF_INET6,
        Addr::Unix(_) => libc::AF_UNIX,
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    // SAFETY: no pointers; the descriptor is new and owned here.
    let fd = unsafe { OwnedFd::from_raw_fd(check(libc::socket(family, kind, 0))?) };
    if matches!(addr, Addr::Tcp(_)) {
        set_nodelay(fd.as_raw_fd());
        set_keepalive(fd.as_raw_fd());
    }
    Ok(fd)
}

/// Enables TCP keepalive, which detects a dead peer after about three minutes.  Accepted sockets inherit it.
fn set_keepalive(fd: RawFd) {
    // A failure only leaves dead connections open.
    let _ = set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE);
    for (option, value) in [(libc::TCP_KEEPIDLE, 60), (libc::TCP_KEEPINTVL, 20), (libc::TCP_KEEPCNT, 6)] {
        let _ = set_option_to(fd, libc::IPPROTO_TCP, option, value);
    }
}

/// Disables Nagle's algorithm.  Accepted sockets inherit it from their listener.
pub(crate) fn set_nodelay(fd: RawFd) {
    // A failure only costs speed.
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY);
}

fn set_option(fd: RawFd, level: i32, option: i32) -> io::Result<()> {
    set_option_to(fd, level, option, 1)
}

fn set_option_to(fd: RawFd, level: i32, option: i32, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the option's value is one int.
    check(unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), mem::size_of_val(&value) as u32) })
        .map(drop)
}

/// Creates a listening socket; returns it and its bound address.  With `private`, a Unix socket is created for its owner alone.
pub(crate) fn listen(addr: &Addr, nonblocking: bool, private: bool) -> io::Result<(OwnedFd, Addr)> {
    let fd = socket(addr, nonblocking)?;
    if private && matches!(addr, Addr::Unix(_)) {
        // Linux creates the file with the mode of the socket.
        // SAFETY: no pointers.
        check(unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) })?;
    }
    let sock_addr = SockAddr::new(addr)?;
    if matches!(addr, Addr::Tcp(_)) {
        set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    }
    match bind(&fd, &sock_addr) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match addr {
            Addr::Unix(path) if is_dead_socket(path, &sock_addr) => {
                std::fs::remove_file(path)?;
                bind(&fd, &sock_addr)?;
            }
            _ => return Err(error),
        },
        other => other?,
    }
    // SAFETY: no pointers.
    check(unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) })?;
    let mut bound = SockAddr::empty();
    // SAFETY: `bound` has space for `len` bytes.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), bound.ptr_mut(), &mut bound.len) })?;
    let bound = match addr {
        Addr::Tcp(_) => bound.addr().unwrap_or_else(|| addr.clone()),
        Addr::Unix(_) => addr.clone(),
    };
    Ok((fd, bound))
}

/// Duplicates a descriptor.
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the caller's table shows that the descriptor is open, and nothing closes it in between.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}

fn bind(fd: &OwnedFd, addr: &SockAddr) -> io::Result<()> {
    // SAFETY: `addr` holds an address of `len` bytes.
    check(unsafe { libc::bind(fd.as_raw_fd(), addr.ptr(), addr.len) }).map(drop)
}

/// Returns whether the path is a socket without a listener.
fn is_dead_socket(path: &Path, addr: &SockAddr) -> bool {
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        return false;
    }
    // Nonblocking: a live listener whose backlog is full returns EAGAIN, and counts as live.
    let Ok(probe) = socket(&Addr::Unix(path.to_owned()), true) else { return false };
    // SAFETY: `addr` holds an address of `len` bytes.
    match check(unsafe { libc::connect(probe.as_raw_fd(), addr.ptr(), addr.len) }) {
        Ok(_) => false,
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    }
}

/// Returns whether a read would not block (data, or the end of the stream), or a write.  Does not wait.
pub(crate) fn is_ready(fd: RawFd, writable: bool) -> io::Result<bool> {
    let events = if writable { libc::POLLOUT } else { libc::POLLIN };
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    loop {
        // SAFETY: one structure, which lives through the call.
        match check(unsafe { libc::poll(&raw mut poll, 1, 0) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|ready| ready > 0),
        }
    }
}

/// Sets the descriptor to nonblocking, or back to blocking.
pub(crate) fn set_nonblocking(fd: RawFd, nonblocking: bool) -> io::Result<()> {
    // SAFETY: no pointers.
    let before = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let after = if nonblocking { before | libc::O_NONBLOCK } else { before & !libc::O_NONBLOCK };
    // SAFETY: no pointers.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, after) }).map(drop)
}

/// Returns whether the peer of a connection has closed it or shut its sending direction down.
pub(crate) fn is_peer_closed(fd: RawFd) -> bool {
    let mut watched = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    loop {
        // SAFETY: one descriptor, and it lives through the call.
        match check(unsafe { libc::poll(&raw mut watched, 1, 0) }) {
            Ok(_) => return watched.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Unknown: what must not happen on a closed connection does not happen then either.
            Err(_) => return true,
        }
    }
}

/// Shuts down both directions of a connection.
pub(crate) fn shutdown(fd: RawFd) {
    // Fails harmlessly on a socket whose peer is gone already.
    // SAFETY: no pointers.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// Shuts down the sending direction of a connection.
pub(crate) fn shutdown_send(fd: RawFd) {
    // Fails harmlessly on a socket whose peer is gone already.
    // SAFETY: no pointers.
    unsafe { libc::shutdown(fd, libc::SHUT_WR) };
}

/// Returns and clears a socket's pending error, such as the failure of a connect.
pub(crate) fn socket_error(fd: RawFd) -> io::Result<()> {
    let error = socket_option(fd, libc::SO_ERROR)?;
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Returns a socket's option of level `SOL_SOCKET`.
pub(crate) fn socket_option(fd: RawFd, option: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut len = mem::size_of_val(&value) as libc::socklen_t;
    // SAFETY: the option's value is one int.
    check(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut value).cast(), &mut len) })?;
    Ok(value)
}

/// Returns the number of the process on the other side of a Unix socket, as it was when the sockets were connected; `None` if
/// this process cannot see it (unix(7), `SO_PEERCRED`).
pub(crate) fn peer_process(fd: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut value = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = mem::size_of_val(&value) as libc::socklen_t;
    let (socket, option) = (fd.as_raw_fd(), libc::SO_PEERCRED);
    // SAFETY: the option's value is one `ucred`.
    check(unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, (&raw mut value).cast(), &mut len) })?;
    Ok(u32::try_from(value.pid).ok().filter(|pid| *pid != 0))
}

/// Processors that this process may run on, from before the first reactor was pinned.
static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();

/// Returns the processors that this process may run on.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    ALLOWED.get_or_init(cpus_of_thread).clone()
}

/// Allows this thread to run on all processors that the process may run on: one that a pinned reactor has started inherits
/// its processor.
pub(crate) fn unpin() {
    // Without a list, no reactor was ever pinned.
    let Some(cpus) = ALLOWED.get().filter(|cpus| !cpus.is_empty()) else { return };
    if let Err(error) = run_on(cpus) {
        tracing::debug!(%error, "cannot let a thread run on all CPUs");
    }
}

fn cpus_of_thread() -> Vec<usize> {
    // SAFETY: all zeroes is the empty set, which the call fills.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        if libc::sched_getaffinity(0, mem::size_of_val(&set), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Pins this thread to one processor.
pub(crate) fn pin_to(cpu: usize) {
    // A sandbox may forbid it; that only costs speed.
    if let Err(error) = run_on(&[cpu]) {
        tracing::debug!(%error, cpu, "cannot pin a reactor to its CPU");
    }
}

/// Lets this thread run on some processors only, which came out of [`cpus_of_thread`].
fn run_on(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: all zeroes is the empty set; the processors are below its size, because they came out of such a set.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
        check(libc::sched_setaffinity(0, mem::size_of_val(&set), &set)).map(drop)
    }
}
