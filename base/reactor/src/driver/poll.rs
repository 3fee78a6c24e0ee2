//! Driver on epoll, for systems that forbid io_uring: readiness-based sockets, and files on a few threads.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::files::OsDriver;
use super::handles::{HandleEntry, Handles};
use super::iov;
use super::os::{self, EventFd, RW_MAX, Random, SockAddr, check, check_len};
use super::threads::{FileJob, FileThreads};
use super::{Completion, Driver, Handle, Op, OpKey, Unpark, Wait};
use crate::net::Addr;
use crate::time::Instant;

/// Maximum events per system call.
const EVENTS: usize = 256;
/// User data of the wake-up eventfd among the events.
const WAKE: u64 = u64::MAX;
/// Retry interval of a connect to a listener whose backlog is full; no event reports space in it.
const CONNECT_RETRY: Duration = Duration::from_millis(2);

/// Socket operation that waits until the socket is ready.
struct Pending {
    op: Op,
    fd: RawFd,
    /// Bytes transferred so far.
    done: usize,
    /// For `Connect`: in flight, so its result is queried instead of trying again.
    under_way: bool,
}

/// Operations waiting on one socket, in order.
#[derive(Default)]
struct Waiting {
    to_read: VecDeque<OpKey>,
    to_write: VecDeque<OpKey>,
    /// True while the descriptor is in the epoll set.
    watched: bool,
}

/// Result of an attempt.
enum Tried {
    Ended(io::Result<u64>, Option<Addr>),
    /// More may be possible at once.
    Again,
    NotReady,
    /// Not ready, and no event will report it.
    Later,
}

/// Driver on epoll.
pub(crate) struct PollDriver {
    epoll: OwnedFd,
    handles: Handles,
    /// Socket operations, by operation key.
    pending: Vec<Option<Pending>>,
    /// Waiting operations, by file descriptor.
    waiting: Vec<Waiting>,
    /// Connects to be retried soon.
    later: Vec<OpKey>,
    finished: Vec<Completion>,
    threads: FileThreads,
    wake: Arc<EventFd>,
    random: Random,
    iovecs: Vec<libc::iovec>,
    events: Vec<libc::epoll_event>,
    /// False once `epoll_pwait2` (5.11, nanosecond timeouts) was found missing.
    fine_waits: bool,
}

impl PollDriver {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the descriptor is new and owned here.
        let epoll = unsafe { OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
        let wake = Arc::new(EventFd::new(true)?);
        watch(&epoll, wake.fd(), libc::EPOLLIN as u32, WAKE)?;
        Ok(Self {
            epoll,
            handles: Handles::default(),
            pending: Vec::new(),
            waiting: Vec::new(),
            later: Vec::new(),
            finished: Vec::new(),
            threads: FileThreads::new(wake.clone()),
            wake,
            random: Random::new(),
            iovecs: Vec::new(),
            events: Vec::with_capacity(EVENTS),
            fine_waits: true,
        })
    }

    /// Registers a new socket for all events; returns its descriptor.
    fn add_socket(&mut self, socket: OwnedFd) -> io::Result<RawFd> {
        self.add(socket, libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP)
    }

    /// Registers a new descriptor for some events; returns its number.
    fn add(&mut self, socket: OwnedFd, interest: libc::c_int) -> io::Result<RawFd> {
        let fd = socket.as_raw_fd();
        // Edge-triggered and only once: each operation is tried before it waits for an event.
        watch(&self.epoll, fd, (interest | libc::EPOLLET) as u32, fd as u64)?;
        let at = socket.into_raw_fd() as usize;
        self.handles.add_socket(fd);
        if at >= self.waiting.len() {
            self.waiting.resize_with(at + 1, Waiting::default);
        }
        self.waiting[at].watched = true;
        Ok(fd)
    }

    fn begin(&mut self, key: OpKey, op: Op) -> Result<(), (io::Result<u64>, Op)> {
        let fd = match &op {
            Op::Read { buf, .. } | Op::Recv { buf, .. } if buf.spare() == 0 => return Err((Ok(0), op)),
            Op::Write { bufs, .. } | Op::Send { bufs, .. } if bufs.is_empty() => return Err((Ok(0), op)),
            Op::Punch { len: 0, .. } | Op::Allocate { len: 0, .. } => return Err((Ok(0), op)),
            Op::Read { file, .. }
            | Op::Write { file, .. }
            | Op::Sync { file }
            | Op::Punch { file, .. }
            | Op::Allocate { file, .. } => {
                return self.begin_file(key, os::fd_of(*file), op);
            }
            Op::Accept { listener: handle } | Op::Ready { handle, .. } => os::fd_of(*handle),
            Op::Recv { sock, .. } | Op::Send { sock, .. } => os::fd_of(*sock),
            Op::Connect { addr } => match os::socket(addr, true).and_then(|fd| self.add_socket(fd)) {
                Ok(fd) => fd,
                Err(error) => return Err((Err(error), op)),
            },
        };
        if self.handles.begin(fd).is_none() {
            return Err((Err(io::Error::from_raw_os_error(libc::EBADF)), op));
        }
        let to_write = matches!(op, Op::Send { .. } | Op::Connect { .. } | Op::Ready { writable: true, .. });
        let at = key.0 as usize;
        if at >= self.pending.len() {
            self.pending.resize_with(at + 1, || None);
        }
        assert!(self.pending[at].is_none(), "operation {at} was submitted twice");
        self.pending[at] = Some(Pending { op, fd, done: 0, under_way: false });
        let waiting = &mut self.waiting[fd as usize];
        let queue = if to_write { &mut waiting.to_write } else { &mut waiting.to_read };
        queue.push_back(key);
        if queue.len() == 1 {
            self.advance(fd, to_write);
        }
        Ok(())
    }

    fn begin_file(&mut self, key: OpKey, fd: RawFd, op: Op) -> Result<(), (io::Result<u64>, Op)> {
        let Some(&HandleEntry { direct_unit, block_device, .. }) = self.handles.begin(fd) else {
            return Err((Err(io::Error::from_raw_os_error(libc::EBADF)), op));
        };
        let job = FileJob { key, fd, direct_unit, block_device, op, result: Ok(0) };
        self.threads.submit(job).map_err(|job| {
            self.handles.end(fd);
            (job.result, job.op)
        })
    }

    /// Attempts the operations waiting on a socket until one is not ready.
    fn advance(&mut self, fd: RawFd, to_write: bool) {
        loop {
            let Some(waiting) = self.waiting.get_mut(fd as usize) else { return };
            let queue = if to_write { &mut waiting.to_write } else { &mut waiting.to_read };
            let Some(&key) = queue.front() else { return };
            match self.attempt(key) {
                Tried::Ended(result, peer) => self.end(key, result, peer),
                Tried::Again => {}
                Tried::NotReady => return,
                Tried::Later => {
                    if !self.later.contains(&key) {
                        self.later.push(key);
                    }
                    return;
                }
            }
        }
    }

    /// Completes a socket operation.
    fn end(&mut self, key: OpKey, result: io::Result<u64>, peer: Option<Addr>) {
        let Some(pending) = self.pending.get_mut(key.0 as usize).and_then(Option::take) else { return };
        let fd = pending.fd;
        let waiting = &mut self.waiting[fd as usize];
        waiting.to_read.retain(|&other| other != key);
        waiting.to_write.retain(|&other| other != key);
        self.later.retain(|&other| other != key);
        self.handles.end(fd);
        if matches!(pending.op, Op::Connect { .. }) && result.is_err() {
            self.handles.close(fd);
        }
        self.finished.push(Completion { key, result, op: pending.op, peer });
    }

    fn attempt(&mut self, key: OpKey) -> Tried {
        let pending = self.pending[key.0 as usize].as_mut().expect("what waits is pending");
        let fd = pending.fd;
        let total = pending.done as u64;
        match &mut pending.op {
            Op::Recv { buf, all, .. } => {
                let all = *all;
                let to = buf.spare_mut();
                let len = to.len().min(RW_MAX);
                // SAFETY: `to` has space for `len` bytes and is borrowed uniquely.
                match check_len(unsafe { libc::recv(fd, to.as_mut_ptr().cast(), len, 0) }) {
                    Ok(got) => {
                        buf.set_len(buf.len() + got);
                        pending.done += got;
                        if got == 0 || buf.spare() == 0 || !all {
                            return Tried::Ended(Ok(total + got as u64), None);
                        }
                        Tried::Again
                    }
                    Err(error) => failed(error),
                }
            }
            Op::Send { bufs, .. } => {
                let _ = iov::remaining(bufs, pending.done, &mut self.iovecs);
                // SAFETY: all zeroes is a valid msghdr.
                let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
                msg.msg_iov = self.iovecs.as_mut_ptr();
                msg.msg_iovlen = self.iovecs.len() as _;
                // SAFETY: the parts are memory that the operation keeps alive.
                match check_len(unsafe { libc::sendmsg(fd, &msg, libc::MSG_NOSIGNAL) }) {
                    Ok(0) => {
                        let error =
                            io::Error::new(io::ErrorKind::WriteZero, "the kernel accepts no more bytes of a send");
                        Tried::Ended(Err(error), None)
                    }
                    Ok(put) => {
                        pending.done += put;
                        if pending.done == bufs.len() {
                            return Tried::Ended(Ok(pending.done as u64), None);
                        }
                        Tried::Again
                    }
                    Err(error) => failed(error),
                }
            }
            Op::Accept { .. } => {
                let mut peer = SockAddr::empty();
                let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
                // SAFETY: `peer` has space for `len` bytes.
                match check(unsafe { libc::accept4(fd, peer.ptr_mut(), &mut peer.len, flags) }) {
                    Ok(new) => {
                        let peer = peer.addr();
                        if matches!(peer, Some(Addr::Tcp(_))) {
                            os::set_nodelay(new);
                        }
                        // SAFETY: the descriptor is new and owned here.
                        let added = self.add_socket(unsafe { OwnedFd::from_raw_fd(new) });
                        Tried::Ended(added.map(|fd| os::handle_of(fd).0), peer)
                    }
                    // That connection is gone already; the next may be there.
                    Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Tried::Again,
                    Err(error) => failed(error),
                }
            }
            Op::Ready { writable, .. } => match os::is_ready(fd, *writable) {
                Ok(true) => Tried::Ended(Ok(0), None),
                Ok(false) => Tried::NotReady,
                Err(error) => failed(error),
            },
            Op::Connect { .. } if pending.under_way => match connected(fd) {
                Ok(true) => Tried::Ended(Ok(os::handle_of(fd).0), None),
                Ok(false) => Tried::NotReady,
                Err(error) => Tried::Ended(Err(error), None),
            },
            Op::Connect { addr } => {
                let addr = match SockAddr::new(addr) {
                    Ok(addr) => addr,
                    Err(error) => return Tried::Ended(Err(error), None),
                };
                // SAFETY: `addr` holds an address of `len` bytes.
                match check(unsafe { libc::connect(fd, addr.ptr(), addr.len) }) {
                    Ok(_) => Tried::Ended(Ok(os::handle_of(fd).0), None),
                    Err(error) => match error.raw_os_error() {
                        // An interrupted connect continues in the kernel.
                        Some(libc::EINPROGRESS | libc::EINTR) => {
                            pending.under_way = true;
                            Tried::NotReady
                        }
                        // Unix socket whose listener's backlog is full.
                        Some(libc::EAGAIN) => Tried::Later,
                        _ => Tried::Ended(Err(error), None),
                    },
                }
            }
            other => unreachable!("no socket operation: {other:?}"),
        }
    }

    /// Completes the operations that the file threads have finished.
    fn reap_files(&mut self) {
        while let Some(job) = self.threads.next_done() {
            self.handles.end(job.fd);
            self.finished.push(Completion { key: job.key, result: job.result, op: job.op, peer: None });
        }
    }

    /// Waits for events; the timeout is rounded up to milliseconds where the kernel lacks `epoll_pwait2`.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let epoll = self.epoll.as_raw_fd();
        let events = self.events.as_mut_ptr();
        self.events.clear();
        if let (true, Some(timeout)) = (self.fine_waits, timeout.filter(|timeout| !timeout.is_zero())) {
            let timeout = libc::timespec {
                tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
            };
            let mask = std::ptr::null::<libc::sigset_t>();
            // SAFETY: `events` has space for EVENTS events; the time lives through the call; no signal mask.
            let count = unsafe {
                libc::syscall(libc::SYS_epoll_pwait2, epoll, events, EVENTS as libc::c_int, &raw const timeout, mask, 8)
            };
            match check_len(count as isize) {
                Ok(count) => {
                    // SAFETY: the kernel has filled `count` events.
                    unsafe { self.events.set_len(count) };
                    return Ok(());
                }
                // Sandboxes reject unknown system calls with either error.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                    self.fine_waits = false;
                }
                Err(error) => return Err(error),
            }
        }
        let millis = match timeout {
            None => -1,
            Some(timeout) => i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX),
        };
        // SAFETY: `events` has space for EVENTS events.
        let count = check(unsafe { libc::epoll_wait(epoll, events, EVENTS as libc::c_int, millis) })?;
        // SAFETY: the kernel has filled `count` events.
        unsafe { self.events.set_len(count as usize) };
        Ok(())
    }

    fn take_events(&mut self) {
        let events = std::mem::take(&mut self.events);
        for event in &events {
            let (data, flags) = (event.u64, event.events as i32);
            if data == WAKE {
                self.wake.drain();
                continue;
            }
            let fd = data as RawFd;
            let broken = flags & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            if broken || flags & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0 {
                self.advance(fd, false);
            }
            if broken || flags & libc::EPOLLOUT != 0 {
                self.advance(fd, true);
            }
        }
        self.events = events;
    }
}

impl Drop for PollDriver {
    /// Waits for the threads, so that files are closed (and unlocked) on return.
    fn drop(&mut self) {
        for job in self.threads.stop() {
            self.handles.end(job.fd);
        }
        for pending in std::mem::take(&mut self.pending).into_iter().flatten() {
            self.handles.end(pending.fd);
        }
    }
}

fn failed(error: io::Error) -> Tried {
    match error.kind() {
        io::ErrorKind::WouldBlock => Tried::NotReady,
        io::ErrorKind::Interrupted => Tried::Again,
        _ => Tried::Ended(Err(error), None),
    }
}

fn watch(epoll: &OwnedFd, fd: RawFd, interest: u32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: interest, u64: data };
    // SAFETY: the event lives through the call.
    check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) }).map(drop)
}

fn unwatch(epoll: &OwnedFd, fd: RawFd) {
    // Fails harmlessly if it is not in the set: a connect that failed has closed the socket.
    // SAFETY: no pointers.
    unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
}

/// Returns whether a connect has succeeded; false while it is still in flight.
fn connected(fd: RawFd) -> io::Result<bool> {
    os::socket_error(fd)?;
    let mut peer = SockAddr::empty();
    // SAFETY: `peer` has space for `len` bytes.
    match check(unsafe { libc::getpeername(fd, peer.ptr_mut(), &mut peer.len) }) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

impl OsDriver for PollDriver {
    fn handles(&mut self) -> &mut Handles {
        &mut self.handles
    }
}

impl Driver for PollDriver {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn submit(&mut self, key: OpKey, op: Op) {
        if let Err((result, op)) = self.begin(key, op) {
            self.finished.push(Completion { key, result, op, peer: None });
        }
    }

    fn cancel(&mut self, key: OpKey) {
        let cancelled = || io::Error::from_raw_os_error(libc::ECANCELED);
        if self.pending.get(key.0 as usize).is_some_and(Option::is_some) {
            self.end(key, Err(cancelled()), None);
        } else if let Some(job) = self.threads.take_back(key) {
            self.handles.end(job.fd);
            self.finished.push(Completion { key, result: Err(cancelled()), op: job.op, peer: None });
        }
    }

    fn poll(&mut self, wait: Wait, done: &mut Vec<Completion>) {
        self.reap_files();
        let mut timeout = match wait {
            _ if !self.finished.is_empty() => Some(Duration::ZERO),
            Wait::No => Some(Duration::ZERO),
            Wait::Until(deadline) => Some(deadline.since(os::now())),
            Wait::Forever => None,
        };
        if !self.later.is_empty() {
            timeout = Some(timeout.map_or(CONNECT_RETRY, |timeout| timeout.min(CONNECT_RETRY)));
        }
        match self.wait(timeout) {
            Ok(()) => self.take_events(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => panic!("epoll_wait: {error}"),
        }
        for key in std::mem::take(&mut self.later) {
            if let Some(fd) = self.pending[key.0 as usize].as_ref().map(|pending| pending.fd) {
                self.advance(fd, true);
            }
        }
        self.reap_files();
        done.append(&mut self.finished);
    }

    fn now(&self) -> Instant {
        os::now()
    }

    fn wall_clock(&self) -> Duration {
        os::wall_clock()
    }

    fn random(&mut self) -> u64 {
        self.random.next()
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        self.wake.clone()
    }

    fn listen(&mut self, addr: &Addr, private: bool) -> io::Result<(Handle, Addr)> {
        let (socket, bound) = os::listen(addr, true, private)?;
        Ok((os::handle_of(self.add_socket(socket)?), bound))
    }

    fn share_listener(&mut self, listener: Handle) -> io::Result<OwnedFd> {
        os::duplicate(self.handles.open_fd(listener)?)
    }

    fn adopt_listener(&mut self, listener: OwnedFd) -> io::Result<Handle> {
        // Only this end is waited for, and an eventfd reports space after each of its reads.
        Ok(os::handle_of(self.add(listener, libc::EPOLLIN)?))
    }

    fn adopt_stream(&mut self, socket: OwnedFd) -> io::Result<Handle> {
        os::set_nonblocking(socket.as_raw_fd(), true)?;
        Ok(os::handle_of(self.add_socket(socket)?))
    }

    fn descriptor(&self, sock: Handle) -> io::Result<BorrowedFd<'_>> {
        self.handles.descriptor(sock)
    }

    fn is_peer_closed(&mut self, sock: Handle) -> bool {
        self.handles.open_fd(sock).map_or(true, os::is_peer_closed)
    }

    fn shutdown(&mut self, sock: Handle) {
        let fd = os::fd_of(sock);
        if self.handles.get(fd).is_some() {
            os::shutdown(fd);
        }
    }

    fn shutdown_send(&mut self, sock: Handle) {
        let fd = os::fd_of(sock);
        if self.handles.get(fd).is_some() {
            os::shutdown_send(fd);
        }
    }

    fn close(&mut self, handle: Handle) {
        let fd = os::fd_of(handle);
        if let Some(waiting) = self.waiting.get_mut(fd as usize) {
            let keys: Vec<OpKey> = waiting.to_read.iter().chain(&waiting.to_write).copied().collect();
            for key in keys {
                self.end(key, Err(io::Error::from_raw_os_error(libc::ECANCELED)), None);
            }
            // What another process or core has open too stays in the set when it is closed here, and a descriptor that
            // gets the same number and refers to the same file could not be added.
            if std::mem::take(&mut self.waiting[fd as usize].watched) {
                unwatch(&self.epoll, fd);
            }
        }
        self.handles.close(fd);
    }
}
