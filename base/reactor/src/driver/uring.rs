//! Driver on io_uring.
//!
//! Operations become submission entries at once and are submitted with the next [`poll`](Driver::poll): one system call
//! per loop iteration submits new operations and fetches completions.  Partial results (short reads, short writes) are
//! continued here until the operation is complete.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, Probe, opcode, squeue};

use super::files::OsDriver;
use super::fixed::FixedBuffers;
use super::flight::{Flight, FlightStep, advance, entry};
use super::handles::Handles;
use super::os::{self, EventFd, Random, SockAddr};
use super::threads::{FileJob, FileThreads};
use super::{Completion, Driver, Handle, Op, OpKey, Unpark, Wait};
use crate::net::Addr;
use crate::time::Instant;

/// Submission and completion entries of the ring: the maximum per system call, and the completions that fit before the
/// kernel keeps them in an overflow list.  New kernels count a ring's memory against RLIMIT_MEMLOCK; when that is
/// short, the smaller size is used.
const ENTRIES: [(u32, u32); 2] = [(256, 2048), (32, 128)];

/// Queued reads and writes of files from which they are submitted before the end of the loop iteration.
///
/// Submitting the operations of a whole iteration at once saves system calls, but makes disk and program alternate: all
/// requests complete together, and the disk idles while the program handles them.  At 32 reads in flight, 4 per call
/// gave 25 % more reads a second than one call per iteration, for 10 % more CPU each; 8 gave half of that.
const DISK_BATCH: u32 = 4;

/// Upper half of the user data that marks entries which are not operations.
const INTERNAL: u64 = (u32::MAX as u64) << 32;
/// User data of the wake-up from other threads.
const WAKE: u64 = INTERNAL;
/// User data of a cancellation, whose result is ignored.
const CANCEL: u64 = INTERNAL | 1;

/// Maximum wait, when the driver is dropped, for the kernel to release the buffers.
const DROP_WAIT: Duration = Duration::from_secs(10);
/// Interval of cancellation requests during that wait.
const DROP_ASK: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Slot {
    /// Counts the operations that used this slot, so that a late completion is not taken for the next operation's.
    generation: u32,
    flight: Option<Box<Flight>>,
}

/// Driver on io_uring.
pub(crate) struct UringDriver {
    ring: IoUring,
    handles: Handles,
    buffers: FixedBuffers,
    slots: Vec<Slot>,
    /// Boxed, because the kernel uses their address.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Flight>>,
    live: usize,
    /// Entries that did not fit into the submission queue, in order.
    backlog: VecDeque<squeue::Entry>,
    /// Reads and writes of files among the entries not yet submitted.
    disk_queued: u32,
    /// Operations completed without the kernel.
    finished: Vec<Completion>,
    answers: Vec<(u64, i32)>,
    wake: Arc<EventFd>,
    wake_count: Box<u64>,
    wake_armed: bool,
    /// Threads for operations that this kernel's ring does not support (discarding on a block device); started on first
    /// use.
    threads: Option<FileThreads>,
    closing: bool,
    random: Random,
}

impl UringDriver {
    pub(crate) fn new() -> io::Result<Self> {
        Self::set_up(&SET_UPS)
    }

    fn set_up(set_ups: &[SetUp]) -> io::Result<Self> {
        let ring = build_ring(set_ups)?;
        let params = ring.params();
        if !(params.is_feature_nodrop()
            && params.is_feature_submit_stable()
            && params.is_feature_fast_poll()
            && params.is_feature_ext_arg())
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel's io_uring is too old (before 5.11)"));
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let wanted = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::Accept::CODE,
            opcode::Connect::CODE,
            opcode::Recv::CODE,
            opcode::Send::CODE,
            opcode::SendMsg::CODE,
            opcode::AsyncCancel::CODE,
            opcode::PollAdd::CODE,
        ];
        if let Some(code) = wanted.iter().find(|&&code| !probe.is_supported(code)) {
            let text = format!("this kernel's io_uring lacks operation {code}");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let buffers = FixedBuffers::new(&ring);
        let mut driver = Self {
            ring,
            buffers,
            handles: Handles::default(),
            slots: Vec::new(),
            spare: Vec::new(),
            live: 0,
            backlog: VecDeque::new(),
            disk_queued: 0,
            finished: Vec::new(),
            answers: Vec::new(),
            wake: Arc::new(EventFd::new(false)?),
            wake_count: Box::new(0),
            wake_armed: false,
            threads: None,
            closing: false,
            random: Random::new(),
        };
        // Fails here, not later, where ring set-up is allowed but entering is not.
        driver.arm_wake();
        if let Err(error) = driver.enter(0, None) {
            driver.wake_armed = false;
            return Err(error);
        }
        Ok(driver)
    }

    fn arm_wake(&mut self) {
        if self.wake_armed || self.closing {
            return;
        }
        self.wake_armed = true;
        let to = (&raw mut *self.wake_count).cast();
        self.push(opcode::Read::new(Fd(self.wake.fd()), to, 8).build().user_data(WAKE));
    }

    /// Queues an entry for the next system call.
    fn push(&mut self, entry: squeue::Entry) {
        if self.backlog.is_empty() {
            // SAFETY: the entry points into a `Flight` (or to `wake_count`), which lives until the kernel has completed
            // it; `Drop` ensures that too.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
        }
        self.backlog.push_back(entry);
    }

    fn refill(&mut self) {
        if self.backlog.is_empty() {
            return;
        }
        let mut queue = self.ring.submission();
        while let Some(entry) = self.backlog.front() {
            // SAFETY: as in `push`.
            if unsafe { queue.push(entry) }.is_err() {
                break;
            }
            self.backlog.pop_front();
        }
    }

    /// Submits queued entries, and waits for `want` completions for at most `timeout`.
    fn enter(&mut self, want: u32, timeout: Option<Duration>) -> io::Result<()> {
        let submit = self.ring.submission().len() as u32;
        self.disk_queued = 0;
        let flags = EnterFlags::GETEVENTS;
        let submitter = self.ring.submitter();
        let result = match timeout {
            Some(timeout) => {
                let timeout = Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
                let args = SubmitArgs::new().timespec(&timeout);
                // SAFETY: with EXT_ARG the argument is a SubmitArgs; it and the time live through the call.
                unsafe { submitter.enter(submit, want, (flags | EnterFlags::EXT_ARG).bits(), Some(&args)) }
            }
            // SAFETY: no argument.
            None => unsafe { submitter.enter::<libc::sigset_t>(submit, want, flags.bits(), None) },
        };
        result.map(drop)
    }

    /// Handles the kernel's completions.
    fn reap(&mut self, done: &mut Vec<Completion>) {
        let mut answers = mem::take(&mut self.answers);
        answers.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (user_data, result) in answers.drain(..) {
            self.answer(user_data, result, done);
        }
        self.answers = answers;
        if self.threads.is_some() {
            self.reap_threads(done);
        }
    }

    fn answer(&mut self, user_data: u64, result: i32, done: &mut Vec<Completion>) {
        if user_data & INTERNAL == INTERNAL {
            if user_data == WAKE {
                self.wake_armed = false;
            }
            return;
        }
        let (index, generation) = (user_data as u32 as usize, (user_data >> 32) as u32);
        let slot = &mut self.slots[index];
        assert_eq!(slot.generation, generation, "the kernel answered operation {index} twice");
        let flight = slot.flight.as_mut().expect("an answer to an operation in flight");
        let nudge =
            (flight.cancelled && result < 0 && matches!(flight.op, Some(Op::Accept { .. }))).then_some(flight.fd);
        let (next, peer) = advance(flight, result);
        match next {
            FlightStep::Again => self.issue(index),
            FlightStep::End(result) => self.end(index, result, peer, done),
            FlightStep::Thread => self.hand_over(index, done),
        }
        if let Some(listener) = nudge {
            self.nudge_accepts(listener);
        }
    }

    /// Cancels and re-submits the other accepts on a listener, so that they check for connections again.
    ///
    /// A listener wakes one accept per connection, and that one may have been cancelled meanwhile; the kernel does not
    /// pass the wake-up on to the other accepts.
    fn nudge_accepts(&mut self, listener: RawFd) {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            let Some(flight) = &slot.flight else { continue };
            if flight.fd == listener && !flight.cancelled && matches!(flight.op, Some(Op::Accept { .. })) {
                let user_data = user_data(slot.generation, index);
                self.push(opcode::AsyncCancel::new(user_data).build().user_data(CANCEL));
            }
        }
    }

    /// Moves an operation to a thread.
    fn hand_over(&mut self, index: usize, done: &mut Vec<Completion>) {
        let flight = self.slots[index].flight.as_mut().expect("an operation in flight");
        let job = FileJob {
            key: OpKey(index as u64),
            fd: flight.fd,
            direct_unit: flight.direct_unit,
            block_device: flight.block_device,
            op: flight.op.take().expect("an operation in flight"),
            result: Ok(0),
        };
        let threads = self.threads.get_or_insert_with(|| FileThreads::new(self.wake.clone()));
        if let Err(job) = threads.submit(job) {
            flight.op = Some(job.op);
            self.end(index, job.result, None, done);
        }
    }

    fn reap_threads(&mut self, done: &mut Vec<Completion>) {
        while let Some(job) = self.threads.as_mut().and_then(FileThreads::next_done) {
            let index = job.key.0 as usize;
            self.slots[index].flight.as_mut().expect("an operation in flight").op = Some(job.op);
            self.end(index, job.result, None, done);
        }
    }

    fn end(&mut self, index: usize, result: io::Result<u64>, peer: Option<Addr>, done: &mut Vec<Completion>) {
        let slot = &mut self.slots[index];
        let mut flight = slot.flight.take().expect("an operation in flight");
        slot.generation = next_generation(slot.generation);
        self.live -= 1;
        let op = flight.op.take().expect("an operation in flight");
        if let (Op::Recv { buf, .. }, Ok(_)) = (&op, &result) {
            self.handles.set_drained(flight.fd, buf.spare() > 0);
        }
        self.handles.end(flight.fd);
        match (&op, &result) {
            (Op::Connect { .. }, Err(_)) => {
                self.handles.close(flight.fd);
            }
            (Op::Accept { .. }, Ok(fd)) => self.handles.add_socket(*fd as RawFd),
            _ => {}
        }
        self.spare.push(flight);
        done.push(Completion { key: OpKey(index as u64), result, op, peer });
    }

    /// Starts an operation, or completes it at once where no system call is needed.
    fn begin(&mut self, index: usize, op: Op) -> Result<(), (io::Result<u64>, Op)> {
        let fd = match &op {
            Op::Read { buf, .. } | Op::Recv { buf, .. } if buf.spare() == 0 => return Err((Ok(0), op)),
            Op::Write { bufs, .. } | Op::Send { bufs, .. } if bufs.is_empty() => return Err((Ok(0), op)),
            Op::Punch { len: 0, .. } | Op::Allocate { len: 0, .. } => return Err((Ok(0), op)),
            Op::Read { file, .. }
            | Op::Write { file, .. }
            | Op::Sync { file }
            | Op::Punch { file, .. }
            | Op::Allocate { file, .. } => os::fd_of(*file),
            Op::Accept { listener: handle } | Op::Ready { handle, .. } => os::fd_of(*handle),
            Op::Recv { sock, .. } | Op::Send { sock, .. } => os::fd_of(*sock),
            Op::Connect { .. } => -1,
        };
        let mut flight = self.spare.pop().unwrap_or_else(Flight::new);
        flight.done = 0;
        flight.cancelled = false;
        flight.asynchronous = false;
        flight.fd = fd;
        if let Op::Connect { addr } = &op {
            let socket = match os::socket(addr, false).and_then(|fd| Ok((fd, SockAddr::new(addr)?))) {
                Ok((fd, sock_addr)) => {
                    flight.addr = sock_addr;
                    fd.into_raw_fd()
                }
                Err(error) => return Err((Err(error), op)),
            };
            self.handles.add_socket(socket);
            flight.fd = socket;
        }
        let Some(entry) = self.handles.begin(flight.fd) else {
            return Err((Err(io::Error::from_raw_os_error(libc::EBADF)), op));
        };
        flight.poll_first = entry.drained;
        flight.block_device = entry.block_device;
        flight.direct_unit = entry.direct_unit;
        let region = match &op {
            Op::Read { buf, .. } => buf.region(),
            Op::Write { bufs, .. } => match bufs.parts() {
                [only] => only.region(),
                _ => None,
            },
            _ => None,
        };
        flight.fixed = region.and_then(|region| self.buffers.index(&self.ring, region));
        flight.op = Some(op);
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, Slot::default);
        }
        assert!(self.slots[index].flight.is_none(), "operation {index} was submitted twice");
        self.slots[index].flight = Some(flight);
        self.live += 1;
        self.issue(index);
        Ok(())
    }

    /// Queues a submission entry for the rest of an operation.
    fn issue(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let user_data = user_data(slot.generation, index);
        let flight = slot.flight.as_mut().expect("an operation in flight");
        let disk = matches!(flight.op, Some(Op::Read { .. } | Op::Write { .. }));
        let entry = entry(flight);
        self.push(entry.user_data(user_data));
        if disk {
            self.disk_queued += 1;
            if self.disk_queued >= DISK_BATCH {
                self.submit_early();
            }
        }
    }

    /// Submits queued entries without fetching completions.
    fn submit_early(&mut self) {
        self.disk_queued = 0;
        let submit = self.ring.submission().len() as u32;
        // SAFETY: no argument; what the entries point to is as in `push`.
        let submitted = unsafe { self.ring.submitter().enter::<libc::sigset_t>(submit, 0, 0, None) };
        // Entries that the kernel could not take stay in the queue; the regular call of this iteration retries them and
        // handles errors.
        drop(submitted);
    }
}

fn user_data(generation: u32, index: usize) -> u64 {
    u64::from(generation) << 32 | index as u64
}

fn next_generation(generation: u32) -> u32 {
    // The highest value marks internal entries.
    if generation >= u32::MAX - 1 { 0 } else { generation + 1 }
}

type SetUp = fn(&mut io_uring::Builder) -> &mut io_uring::Builder;

/// Ring set-up flags, newest first: 6.1 runs completions only when this thread asks for them; 5.19 does not interrupt
/// it for them; 5.18 continues submitting after an entry that fails.
const SET_UPS: [SetUp; 5] = [
    |b| b.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all(),
    |b| b.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
    |b| b.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
    |b| b.setup_submit_all(),
    |b| b,
];

/// Builds a ring with the first of these flag sets that the kernel supports, in the largest size that it allows.
fn build_ring(set_ups: &[SetUp]) -> io::Result<IoUring> {
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (submissions, completions) in ENTRIES {
        for set_up in set_ups {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_clamp().setup_cqsize(completions);
            match set_up(&mut builder).build(submissions) {
                Ok(ring) => return Ok(ring),
                Err(error) => last = error,
            }
            match last.raw_os_error() {
                Some(libc::EINVAL) => {}
                Some(libc::ENOMEM) => break,
                _ => return Err(last),
            }
        }
    }
    Err(last)
}

impl OsDriver for UringDriver {
    fn handles(&mut self) -> &mut Handles {
        &mut self.handles
    }
}

impl Driver for UringDriver {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn submit(&mut self, key: OpKey, op: Op) {
        if let Err((result, op)) = self.begin(key.0 as usize, op) {
            self.finished.push(Completion { key, result, op, peer: None });
        }
    }

    fn cancel(&mut self, key: OpKey) {
        let index = key.0 as usize;
        let Some(slot) = self.slots.get_mut(index) else { return };
        let Some(flight) = slot.flight.as_mut() else { return };
        flight.cancelled = true;
        let user_data = user_data(slot.generation, index);
        self.push(opcode::AsyncCancel::new(user_data).build().user_data(CANCEL));
    }

    fn poll(&mut self, wait: Wait, done: &mut Vec<Completion>) {
        done.append(&mut self.finished);
        self.arm_wake();
        self.reap(done);
        loop {
            self.refill();
            let (queued, work) = {
                let queue = self.ring.submission();
                (queue.len(), queue.taskrun() || queue.cq_overflow())
            };
            let timeout = match wait {
                Wait::Until(deadline) => Some(deadline.since(os::now())),
                _ => None,
            };
            let may_wait = wait != Wait::No && timeout != Some(Duration::ZERO);
            let want = may_wait && done.is_empty() && self.backlog.is_empty();
            if !want && queued == 0 && !work {
                return;
            }
            match self.enter(u32::from(want), timeout.filter(|_| want)) {
                Ok(()) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::ETIME | libc::EINTR) => {}
                    // The kernel is short of a resource; fetching completions frees some, and the next iteration
                    // retries.
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                        self.reap(done);
                        return;
                    }
                    _ => panic!("io_uring_enter: {error}"),
                },
            }
            self.reap(done);
            if self.backlog.is_empty() {
                return;
            }
        }
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
        let (fd, bound) = os::listen(addr, false, private)?;
        let fd = fd.into_raw_fd();
        self.handles.add_socket(fd);
        Ok((os::handle_of(fd), bound))
    }

    fn share_listener(&mut self, listener: Handle) -> io::Result<OwnedFd> {
        os::duplicate(self.handles.open_fd(listener)?)
    }

    fn adopt_listener(&mut self, listener: OwnedFd) -> io::Result<Handle> {
        let fd = listener.into_raw_fd();
        self.handles.add_socket(fd);
        Ok(os::handle_of(fd))
    }

    fn adopt_stream(&mut self, socket: OwnedFd) -> io::Result<Handle> {
        // The ring waits for sockets that would block, and fails on nonblocking ones.
        os::set_nonblocking(socket.as_raw_fd(), false)?;
        self.adopt_listener(socket)
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
        if self.handles.close(fd) {
            // The close is deferred until the operations in flight have completed.
            for index in 0..self.slots.len() {
                if self.slots[index].flight.as_ref().is_some_and(|flight| flight.fd == fd && !flight.cancelled) {
                    self.cancel(OpKey(index as u64));
                }
            }
        }
    }
}

impl Drop for UringDriver {
    /// Waits until the kernel has released all buffers; those not released within `DROP_WAIT` are leaked, not freed.
    fn drop(&mut self) {
        self.closing = true;
        let deadline = os::now() + DROP_WAIT;
        let mut done = Vec::new();
        loop {
            let indices: Vec<usize> = (0..self.slots.len()).filter(|&at| self.slots[at].flight.is_some()).collect();
            if indices.is_empty() && !self.wake_armed {
                return;
            }
            if os::now() >= deadline {
                break;
            }
            indices.into_iter().for_each(|at| self.cancel(OpKey(at as u64)));
            if self.wake_armed {
                self.push(opcode::AsyncCancel::new(WAKE).build().user_data(CANCEL));
            }
            let ask = os::now() + DROP_ASK;
            while (self.live > 0 || self.wake_armed) && os::now() < ask {
                self.poll(Wait::Until(ask), &mut done);
                done.clear();
            }
        }
        tracing::error!(operations = self.live, "the kernel has not completed some operations; leaking their buffers");
        // An operation on a thread is not here, and dropping the threads waits for it.
        self.slots.iter_mut().filter_map(|slot| slot.flight.take()).for_each(mem::forget);
        mem::forget(mem::take(&mut self.wake_count));
    }
}

#[cfg(test)]
mod tests;
