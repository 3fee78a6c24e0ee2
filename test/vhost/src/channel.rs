//! Back-end channel: requests of the device to the front-end ("Back-end communication").

use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::error::{FrontEndError, Result};
use crate::message::{FrontEndMessage, IotlbMessage, NEED_REPLY, REPLY, VERSION, backend_request, encode};
use crate::socket::FrontEndSocket;

/// Front-end's end of the channel.
#[derive(Debug)]
pub struct BackendChannel {
    socket: FrontEndSocket,
}

impl BackendChannel {
    /// Creates a channel; returns the device's end, too.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn create() -> Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Self { socket: FrontEndSocket::over(ours) }, theirs))
    }

    /// Returns the socket, for any other bytes.
    pub fn socket(&self) -> &FrontEndSocket {
        &self.socket
    }

    /// Receives a request, and acknowledges it with `value` if the device asks for that.
    ///
    /// # Errors
    /// [`FrontEndError::TimedOut`] when none comes, [`FrontEndError::Ended`] when the device has closed the channel.
    pub fn receive(&self, value: u64, patience: Duration) -> Result<FrontEndMessage> {
        let message = self.socket.receive(patience)?;
        if message.flags & 3 != VERSION || message.flags & REPLY != 0 {
            return Err(FrontEndError::Violation(format!("back-end request with flags {:#x}", message.flags)));
        }
        if message.flags & NEED_REPLY != 0 {
            self.socket.send(&encode(message.request, VERSION | REPLY, &value.to_ne_bytes()), &[])?;
        }
        Ok(message)
    }

    /// Waits until the device announces a change of its configuration.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`FrontEndError::Violation`] when it sends another request.
    pub fn await_config_change(&self, patience: Duration) -> Result<()> {
        let message = self.receive(0, patience)?;
        match (message.request, message.payload.len()) {
            (backend_request::CONFIG_CHANGE_MSG, 0) => Ok(()),
            (request, size) => Err(FrontEndError::Violation(format!("back-end request {request} of {size} bytes"))),
        }
    }

    /// Waits until the device reports an IOTLB miss or a failed access; the caller has to update the IOTLB.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`FrontEndError::Violation`] when it sends another request.
    pub fn await_iotlb(&self, patience: Duration) -> Result<IotlbMessage> {
        let message = self.receive(0, patience)?;
        let decoded = IotlbMessage::decode(&message.payload).filter(|_| message.request == backend_request::IOTLB_MSG);
        decoded.ok_or_else(|| FrontEndError::Violation(format!("back-end request {}", message.request)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[test]
    fn a_change_is_acknowledged() {
        let (channel, theirs) = BackendChannel::create().expect("a pair");
        let device = FrontEndSocket::over(theirs);
        device.send(&encode(backend_request::CONFIG_CHANGE_MSG, VERSION | NEED_REPLY, &[]), &[]).expect("sent");
        channel.await_config_change(PATIENCE).expect("announced");
        let reply = device.receive(PATIENCE).expect("acknowledged");
        assert_eq!((reply.request, reply.flags, reply.number()), (2, VERSION | REPLY, Some(0)));
        device.send(&encode(9, VERSION, &[]), &[]).expect("sent");
        assert!(channel.await_config_change(PATIENCE).is_err());
    }
}
