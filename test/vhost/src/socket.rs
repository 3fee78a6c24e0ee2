//! Connection to a device: bytes and descriptors over a Unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::error::{FrontEndError, Result};
use crate::message::{FrontEndMessage, HEADER};

/// Maximum number of descriptors that Linux lets one message carry (SCM_MAX_FD).
pub const DESCRIPTORS_MAX: usize = 253;
/// Maximum size in bytes of a message that is received.
const MESSAGE_MAX: usize = 1 << 20;

/// Connected Unix socket.
#[derive(Debug)]
pub struct FrontEndSocket {
    stream: UnixStream,
}

impl FrontEndSocket {
    /// Connects to a listening device.
    ///
    /// # Errors
    /// When no one listens there.
    pub fn connect(path: &Path) -> Result<Self> {
        Ok(Self::over(UnixStream::connect(path)?))
    }

    /// Uses a socket that is connected already.
    pub fn over(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Returns the socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends bytes and, with the first of them, descriptors.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] when the device has closed the connection.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let mut sent = self.send_some(bytes, descriptors, SendFlags::empty())?;
        while sent < bytes.len() {
            sent += self.send_some(&bytes[sent..], &[], SendFlags::empty())?;
        }
        Ok(())
    }

    /// Sends what the socket takes without blocking; returns the number of bytes, 0 when it is full.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] when the device has closed the connection.
    pub fn try_send(&self, bytes: &[u8]) -> Result<usize> {
        match self.send_some(bytes, &[], SendFlags::DONTWAIT) {
            Err(FrontEndError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    fn send_some(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> Result<usize> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(descriptors.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "the space is that of all of them");
        }
        match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Ok(sent) => Ok(sent),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(FrontEndError::Ended),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Receives up to `into.len()` bytes, and appends the descriptors that come with them.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] at the end of the stream, [`FrontEndError::TimedOut`] when there is nothing by
    /// `deadline`.
    pub fn receive_some(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        deadline: Instant,
        patience: Duration,
    ) -> Result<usize> {
        if !is_readable(self.stream.as_fd(), deadline)? {
            return Err(FrontEndError::timed_out("reply", patience));
        }
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        match got {
            Ok(message) if message.bytes == 0 => Err(FrontEndError::Ended),
            Ok(message) => Ok(message.bytes),
            Err(Errno::CONNRESET | Errno::PIPE) => Err(FrontEndError::Ended),
            Err(errno) => Err(errno.into()),
        }
    }

    fn receive_exact(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        deadline: Instant,
        patience: Duration,
    ) -> Result<()> {
        let mut got = 0;
        while got < into.len() {
            got += self.receive_some(&mut into[got..], descriptors, deadline, patience)?;
        }
        Ok(())
    }

    /// Receives one message.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] at the end of the stream, [`FrontEndError::TimedOut`] when it has not come as a whole
    /// within `patience`.
    pub fn receive(&self, patience: Duration) -> Result<FrontEndMessage> {
        let deadline = Instant::now() + patience;
        let mut descriptors = Vec::new();
        let mut header = [0; HEADER];
        self.receive_exact(&mut header, &mut descriptors, deadline, patience)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let size = word(8) as usize;
        if size > MESSAGE_MAX {
            return Err(FrontEndError::Violation(format!("a message of {size} bytes")));
        }
        let mut payload = vec![0; size];
        self.receive_exact(&mut payload, &mut descriptors, deadline, patience)?;
        Ok(FrontEndMessage { request: word(0), flags: word(4), payload, descriptors })
    }

    /// Receives and drops everything until the device closes the connection.
    ///
    /// # Errors
    /// [`FrontEndError::TimedOut`] when it does not within `patience`.
    pub fn await_end(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut bytes = [0; 4096];
        loop {
            match self.receive_some(&mut bytes, &mut Vec::new(), deadline, patience) {
                Ok(_) => {}
                Err(FrontEndError::Ended) => return Ok(()),
                Err(FrontEndError::TimedOut { .. }) => {
                    return Err(FrontEndError::timed_out("end of the connection", patience));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Waits until a descriptor is readable or has ended; returns false at the deadline.
///
/// # Errors
/// Of the operating system.
pub fn is_readable(descriptor: BorrowedFd<'_>, deadline: Instant) -> Result<bool> {
    Ok(first_readable(&[descriptor], deadline)?.is_some())
}

/// Waits until one of several descriptors is readable or has ended; returns its index, `None` at the deadline.
///
/// # Errors
/// Of the operating system.
pub fn first_readable(descriptors: &[BorrowedFd<'_>], deadline: Instant) -> Result<Option<usize>> {
    let mut watched: Vec<PollFd<'_>> = descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut watched, Some(&timeout)) {
            Ok(0) if left.is_zero() => return Ok(None),
            Ok(_) => {
                let found = watched.iter().position(|fd| !fd.revents().is_empty());
                if found.is_some() {
                    return Ok(found);
                }
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::message::{VERSION, encode};

    const SOON: Duration = Duration::from_millis(20);

    #[test]
    fn a_message_comes_with_its_descriptors() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (ours, theirs) = (FrontEndSocket::over(ours), FrontEndSocket::over(theirs));
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an event");
        ours.send(&encode(7, VERSION, &[1; 30]), &[event.as_fd(), event.as_fd()]).expect("sent");
        let message = theirs.receive(Duration::from_secs(5)).expect("received");
        assert_eq!((message.request, message.payload.len(), message.descriptors.len()), (7, 30, 2));
        drop(ours);
        assert!(matches!(theirs.receive(Duration::from_secs(5)), Err(FrontEndError::Ended)));
        theirs.await_end(Duration::from_secs(5)).expect("ended");
    }

    #[test]
    fn half_a_message_is_waited_for() {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let theirs = FrontEndSocket::over(theirs);
        ours.write_all(&encode(7, VERSION, &[1; 30])[..20]).expect("sent");
        assert!(matches!(theirs.receive(SOON), Err(FrontEndError::TimedOut { .. })));
        theirs.send(b"abc", &[]).expect("sent");
        let mut bytes = [0; 3];
        ours.read_exact(&mut bytes).expect("received");
        assert_eq!(&bytes, b"abc");
        drop(ours);
        while theirs.send(b"abc", &[]).is_ok() {}
        assert!(matches!(theirs.send(b"abc", &[]), Err(FrontEndError::Ended)));
    }
}
