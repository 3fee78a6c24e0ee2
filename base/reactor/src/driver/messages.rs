//! Bytes and descriptors over Unix sockets, in single calls that never block.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::os::{RW_MAX, check, check_len, socket_option};

/// Maximum descriptors of one message.
pub const DESCRIPTORS_MAX: usize = 32;

/// Bytes of a control message with as many descriptors as a message may carry.  No padding follows them, so the kernel
/// cannot add one more.
const CONTROL_LEN: usize = control_len(DESCRIPTORS_MAX);

const fn control_len(descriptors: usize) -> usize {
    // SAFETY: no pointers, only arithmetic.
    unsafe { libc::CMSG_SPACE((descriptors * size_of::<RawFd>()) as u32) as usize }
}

/// Space for control messages, aligned as the kernel requires.
#[repr(C, align(8))]
struct ControlSpace([u8; CONTROL_LEN]);

/// Checks that a descriptor is a connected Unix stream socket.
pub(crate) fn check_unix_stream(socket: BorrowedFd<'_>) -> io::Result<()> {
    let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, format!("the descriptor is {what}")));
    let fd = socket.as_raw_fd();
    match socket_option(fd, libc::SO_DOMAIN) {
        Ok(libc::AF_UNIX) => {}
        Ok(_) => return wrong("no Unix socket"),
        Err(error) if error.raw_os_error() == Some(libc::ENOTSOCK) => return wrong("no socket"),
        Err(error) => return Err(error),
    }
    if socket_option(fd, libc::SO_TYPE)? != libc::SOCK_STREAM {
        return wrong("no stream socket");
    }
    let mut peer = super::os::SockAddr::empty();
    // SAFETY: `peer` has space for `len` bytes.
    match check(unsafe { libc::getpeername(fd, peer.ptr_mut(), &mut peer.len) }) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => wrong("a socket without a peer"),
        Err(error) => Err(error),
    }
}

/// Sends bytes, with descriptors attached to the first of them; returns the number of bytes sent.  Once any are, the
/// descriptors are too.
///
/// # Errors
/// `WouldBlock` while the peer's queue is full.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(descriptors.len() <= DESCRIPTORS_MAX, "a message with {} descriptors", descriptors.len());
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len().min(RW_MAX) as _ };
    let mut control = ControlSpace([0; CONTROL_LEN]);
    // SAFETY: all zeroes is a valid msghdr; the control space is aligned and long enough for a header and the
    // descriptors, so the macros stay within it; the kernel only reads the bytes; everything lives through the call.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !descriptors.is_empty() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control_len(descriptors.len()) as _;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(mem::size_of_val(descriptors) as u32) as _;
            let to = libc::CMSG_DATA(head).cast::<RawFd>();
            for (at, descriptor) in descriptors.iter().enumerate() {
                to.add(at).write_unaligned(descriptor.as_raw_fd());
            }
        }
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    check_len(sent)
}

/// Receives available bytes, and the descriptors that came with them; returns 0 bytes at the end of the stream.
///
/// # Errors
/// `WouldBlock` while no bytes are available; `InvalidData` when not all descriptors could be received: the bytes and
/// the other descriptors are lost.
pub(crate) fn receive(socket: BorrowedFd<'_>, to: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut part = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len().min(RW_MAX) as _ };
    let mut control = ControlSpace([0; CONTROL_LEN]);
    let mut descriptors = Vec::new();
    // SAFETY: all zeroes is a valid msghdr; the kernel writes no more bytes and control bytes than the given lengths,
    // and sets the length of the control messages that the macros then stay within; a received descriptor is new, and
    // owned here.
    let (got, flags) = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_LEN as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let got = check_len(libc::recvmsg(socket.as_raw_fd(), &mut message, flags))?;
        let mut head = libc::CMSG_FIRSTHDR(&message);
        while !head.is_null() {
            if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                let from = libc::CMSG_DATA(head).cast::<RawFd>();
                let len = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for at in 0..len / size_of::<RawFd>() {
                    descriptors.push(OwnedFd::from_raw_fd(from.add(at).read_unaligned()));
                }
            }
            head = libc::CMSG_NXTHDR(&message, head);
        }
        (got, message.msg_flags)
    };
    if flags & libc::MSG_CTRUNC != 0 {
        let text = if descriptors.len() < DESCRIPTORS_MAX {
            format!("received {} descriptors of a message, and the process can open no more", descriptors.len())
        } else {
            format!("the peer sent a message with more than {DESCRIPTORS_MAX} descriptors")
        };
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok((got, descriptors))
}
