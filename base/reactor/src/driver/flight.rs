//! Operation in flight in io_uring: its submission entries, and the interpretation of their results.

use std::io;
use std::mem;
use std::os::fd::RawFd;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use super::Op;
use super::files;
use super::iov::{self, IovPiece};
use super::os::{self, RW_MAX, SockAddr};
use crate::net::Addr;

/// Waits for readiness before the first attempt (`IORING_RECVSEND_POLL_FIRST`).
const POLL_FIRST: u16 = 1;

/// Operation in flight, with all memory that the kernel may access; its address does not change.
pub(super) struct Flight {
    pub(super) op: Option<Op>,
    /// Bytes transferred so far.
    pub(super) done: usize,
    /// Descriptor on which it is counted as in flight.
    pub(super) fd: RawFd,
    pub(super) cancelled: bool,
    /// True if `fd` is a block device.
    pub(super) block_device: bool,
    /// Unit of direct I/O on `fd` in bytes; 1 when there is no restriction.
    pub(super) direct_unit: u32,
    /// Registered buffer index, when it is a single buffer and its memory is registered.
    pub(super) fixed: Option<u16>,
    /// True if it runs on a kernel thread, after `EAGAIN`.
    pub(super) asynchronous: bool,
    /// True if no data is expected yet: wait for readiness before the first attempt.
    pub(super) poll_first: bool,
    iovecs: Vec<libc::iovec>,
    msg: libc::msghdr,
    pub(super) addr: SockAddr,
}

impl Flight {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            op: None,
            done: 0,
            fd: -1,
            cancelled: false,
            block_device: false,
            direct_unit: 1,
            fixed: None,
            asynchronous: false,
            poll_first: false,
            iovecs: Vec::new(),
            // SAFETY: all zeroes is a valid msghdr: no name, no parts.
            msg: unsafe { mem::zeroed() },
            addr: SockAddr::empty(),
        })
    }
}

/// Action after a result of the kernel.
pub(super) enum FlightStep {
    /// Submit again for the rest.
    Again,
    /// Complete the operation.
    End(io::Result<u64>),
    /// Run it on a thread: the ring cannot do it.
    Thread,
}

/// Builds the submission entry for the rest of an operation.
pub(super) fn entry(flight: &mut Flight) -> squeue::Entry {
    let fd = Fd(flight.fd);
    let done = flight.done;
    let entry = match flight.op.as_mut().expect("an operation in flight") {
        Op::Read { offset, buf, .. } => {
            let to = buf.spare_mut();
            let (to, len) = (to.as_mut_ptr(), to.len().min(RW_MAX) as u32);
            let offset = *offset + done as u64;
            match flight.fixed {
                Some(index) => opcode::ReadFixed::new(fd, to, len, index).offset(offset).build(),
                None => opcode::Read::new(fd, to, len).offset(offset).build(),
            }
        }
        Op::Write { offset, bufs, durable, .. } => {
            let rw_flags = if *durable { libc::RWF_DSYNC } else { 0 };
            let offset = *offset + done as u64;
            match iov::remaining(bufs, done, &mut flight.iovecs) {
                IovPiece::One(from, len) => match flight.fixed {
                    Some(index) => {
                        opcode::WriteFixed::new(fd, from, len as u32, index).offset(offset).rw_flags(rw_flags).build()
                    }
                    None => opcode::Write::new(fd, from, len as u32).offset(offset).rw_flags(rw_flags).build(),
                },
                IovPiece::Many => opcode::Writev::new(fd, flight.iovecs.as_ptr(), flight.iovecs.len() as u32)
                    .offset(offset)
                    .rw_flags(rw_flags)
                    .build(),
            }
        }
        Op::Sync { .. } => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        Op::Punch { offset, len, .. } => {
            opcode::Fallocate::new(fd, *len).offset(*offset).mode(files::PUNCH_MODE).build()
        }
        Op::Allocate { offset, len, .. } => {
            opcode::Fallocate::new(fd, *len).offset(*offset).mode(files::ALLOCATE_MODE).build()
        }
        Op::Accept { .. } => {
            flight.addr = SockAddr::empty();
            let (addr, len) = (flight.addr.ptr_mut(), &raw mut flight.addr.len);
            opcode::Accept::new(fd, addr, len).flags(libc::SOCK_CLOEXEC).build()
        }
        Op::Ready { writable, .. } => {
            let events = if *writable { libc::POLLOUT } else { libc::POLLIN };
            opcode::PollAdd::new(fd, events as u32).build()
        }
        Op::Connect { .. } => opcode::Connect::new(fd, flight.addr.ptr(), flight.addr.len).build(),
        Op::Recv { buf, all, .. } => {
            let to = buf.spare_mut();
            let flags = if *all { libc::MSG_WAITALL } else { 0 };
            let first = if flight.poll_first && done == 0 { POLL_FIRST } else { 0 };
            opcode::Recv::new(fd, to.as_mut_ptr(), to.len().min(RW_MAX) as u32).flags(flags).ioprio(first).build()
        }
        Op::Send { bufs, .. } => {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
            match iov::remaining(bufs, done, &mut flight.iovecs) {
                IovPiece::One(from, len) => opcode::Send::new(fd, from, len as u32).flags(flags).build(),
                IovPiece::Many => {
                    flight.msg.msg_iov = flight.iovecs.as_mut_ptr();
                    flight.msg.msg_iovlen = flight.iovecs.len() as _;
                    opcode::SendMsg::new(fd, &raw const flight.msg).flags(flags as u32).build()
                }
            }
        }
    };
    if flight.asynchronous { entry.flags(squeue::Flags::ASYNC) } else { entry }
}

/// Applies a result of the kernel to the operation.
pub(super) fn advance(flight: &mut Flight, result: i32) -> (FlightStep, Option<Addr>) {
    let op = flight.op.as_mut().expect("an operation in flight");
    if result < 0 {
        let again = match -result {
            // An interrupted connect continues in the kernel, and cannot be started twice.
            libc::EINTR => !matches!(op, Op::Connect { .. }),
            libc::EAGAIN => {
                flight.asynchronous = true;
                true
            }
            // A connection that is gone already, or a nudge (a real cancellation is handled below).
            libc::ECONNABORTED | libc::ECANCELED => matches!(op, Op::Accept { .. }),
            libc::EOPNOTSUPP if matches!(op, Op::Punch { .. }) && flight.block_device => {
                return (FlightStep::Thread, None);
            }
            _ => false,
        };
        if again && !flight.cancelled {
            return (FlightStep::Again, None);
        }
        return (FlightStep::End(Err(io::Error::from_raw_os_error(-result))), None);
    }
    let moved = result as usize;
    flight.done += moved;
    let total = flight.done as u64;
    let whole = match op {
        Op::Read { offset, buf, .. } => {
            buf.set_len(buf.len() + moved);
            // A direct read that ends at the end of the file has an unaligned length; continuing from there would be
            // refused.
            moved == 0 || buf.spare() == 0 || !(*offset + total).is_multiple_of(u64::from(flight.direct_unit))
        }
        Op::Recv { buf, all, .. } => {
            buf.set_len(buf.len() + moved);
            moved == 0 || buf.spare() == 0 || !*all
        }
        Op::Write { bufs, .. } | Op::Send { bufs, .. } => {
            let whole = flight.done == bufs.len();
            if moved == 0 && !whole {
                let error = io::Error::new(io::ErrorKind::WriteZero, "the kernel accepts no more bytes of a write");
                return (FlightStep::End(Err(error)), None);
            }
            whole
        }
        Op::Accept { .. } => {
            let peer = flight.addr.addr();
            if matches!(peer, Some(Addr::Tcp(_))) {
                os::set_nodelay(result);
            }
            return (FlightStep::End(Ok(result as u64)), peer);
        }
        Op::Connect { .. } => return (FlightStep::End(Ok(os::handle_of(flight.fd).0)), None),
        Op::Sync { .. } | Op::Punch { .. } | Op::Allocate { .. } | Op::Ready { .. } => {
            return (FlightStep::End(Ok(0)), None);
        }
    };
    let next = match (whole, flight.cancelled) {
        (true, _) => FlightStep::End(Ok(total)),
        (false, false) => FlightStep::Again,
        (false, true) => FlightStep::End(Err(io::Error::from_raw_os_error(libc::ECANCELED))),
    };
    (next, None)
}
